# SPDX-License-Identifier: Apache-2.0
"""This module makes the plan of a step of linear attention."""

from __future__ import annotations

from typing import Any

from cpu_attn import _check, _dispatch, _threads
from cpu_attn._dtypes import CODES, DTYPES, dtype_name
from cpu_attn._errors import UnavailableError
from cpu_attn._native import ffi, lib


class LinearAttentionMetadata:
    """Holds the plan of a step: :func:`get_linear_attention_metadata` makes it, every layer's call takes it. It is
    immutable, and any number of threads may use it at once."""

    __slots__ = ("_pointer", "_shape", "dtype", "engine", "isa", "num_tokens", "workspace_bytes")
    _pointer: Any
    _shape: Any
    dtype: Any
    engine: str
    isa: str
    num_tokens: int
    workspace_bytes: int

    def __init__(self, pointer: Any, shape: Any, num_tokens: int, dtype: str, isa: str, engine: str) -> None:
        keep = object.__setattr__
        keep(self, "_pointer", pointer)
        keep(self, "_shape", shape)
        keep(self, "dtype", DTYPES[dtype])
        keep(self, "engine", engine)
        keep(self, "isa", isa)
        keep(self, "num_tokens", num_tokens)
        keep(self, "workspace_bytes", int(lib.ca_linear_workspace_bytes(pointer)))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"LinearAttentionMetadata is immutable: cannot set {name}")

    def __copy__(self) -> LinearAttentionMetadata:
        return self

    def __deepcopy__(self, memo: Any) -> LinearAttentionMetadata:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "LinearAttentionMetadata: cannot be pickled, it is memory of this process for its CPU; make a new plan "
            "from the same lengths where it is needed"
        )

    num_reqs = property(lambda self: int(self._shape.num_reqs), doc="R")
    num_k_heads = property(lambda self: int(self._shape.num_k_heads), doc="Hk; 0 in a plan for convolutions alone")
    num_v_heads = property(lambda self: int(self._shape.num_v_heads), doc="Hv; 0 in a plan for convolutions alone")
    head_k_dim = property(lambda self: int(self._shape.head_k_dim), doc="Dk; 0 in a plan for convolutions alone")
    head_v_dim = property(lambda self: int(self._shape.head_v_dim), doc="Dv; 0 in a plan for convolutions alone")


def get_linear_attention_metadata(
    query_start_loc: Any,
    dtype: Any,
    num_k_heads: int | None = None,
    num_v_heads: int | None = None,
    head_k_dim: int | None = None,
    head_v_dim: int | None = None,
    *,
    seq_lens: Any = None,
    has_initial_state: Any = None,
    isa: str = "auto",
    engine: str = "auto",
) -> LinearAttentionMetadata:
    """Makes the plan of a step of linear attention, which all of its layers share.

    Args:
        query_start_loc: int32 [R + 1], where each request's tokens start; the last number is T.
        dtype: of queries, keys and values: float32, float16 or bfloat16, as NumPy dtype, torch dtype or name.
        num_k_heads: Hk, heads of queries and keys, 1 to 65536. None, with the three below: the plan is for
            :func:`causal_conv1d` alone.
        num_v_heads: Hv, heads of values, a multiple of Hk. Value head h has the query and the key of head
            h // (Hv // Hk).
        head_k_dim: Dk, elements of a head of queries and keys, 1 to 65536.
        head_v_dim: Dv, elements of a head of values, 1 to 65536.
        seq_lens: int32 [R], how many tokens each request has, this step's among them; None: as many as in this step.
            Prompts are computed by chunks that begin at multiples of 64 tokens of the request, so a prompt that is cut
            at such a multiple has the bits of one that is not, if states are float32.
        has_initial_state: bool or int32 [R], whether each request brings a state; the others begin from zeros. None:
            those do that had tokens before this step. To say that a request of which ``seq_lens`` tells nothing goes
            on, give this.
        isa: whose kernels; ``auto`` follows CPU_ATTN_ISA, then takes the best isa of this machine; ``vec`` is the best
            without a matrix unit.
        engine: ``native``, or ``reference``, which is plain C in float64. ``auto`` is ``reference`` where
            CPU_ATTN_ENGINE says so, else ``native``.

    Returns:
        The plan. Its ``workspace_bytes`` is the memory that a call takes beside its arrays.

    Raises:
        ValueError: a length or a size is out of range, or a name is unknown.
        TypeError: an argument has another type or dtype.
        UnavailableError: this machine does not have the isa.
        MemoryError: there is no memory for the plan.

    Example:
        >>> import numpy as np
        >>> from cpu_attn.linear import get_linear_attention_metadata
        >>> query_start_loc = np.array([0, 1, 26], np.int32)  # one token of a decode, 25 of a prompt
        >>> plan = get_linear_attention_metadata(query_start_loc, "float32", 16, 32, 128, 128,
        ...                                      has_initial_state=np.array([True, False]))
        >>> plan.num_tokens, plan.num_reqs
        (26, 2)
    """
    starts, first, brings = _check.linear_step(query_start_loc, seq_lens, has_initial_state)
    heads = _check.linear_heads(num_k_heads, num_v_heads, head_k_dim, head_v_dim)
    name, engine = dtype_name(dtype), _engine(engine)
    resolved = _dispatch.resolve_isa(isa, name, heads[2] or 16)
    shape = ffi.new("ca_linear_shape *")
    shape.num_reqs = len(first)
    shape.num_k_heads, shape.num_v_heads, shape.head_k_dim, shape.head_v_dim = heads
    shape.dtype, shape.isa = CODES[name][0], resolved.index
    shape.reference, shape.num_threads = engine == "reference", _threads.get_num_threads()
    arrays = (
        _check.pointer("int32_t *", starts),
        _check.pointer("int32_t *", first),
        _check.pointer("uint8_t *", brings),
    )
    pointer = lib.ca_linear_plan_new(shape, *arrays)
    if pointer == ffi.NULL:
        raise MemoryError("no memory for the plan")
    pointer = ffi.gc(pointer, lib.ca_linear_plan_free)
    return LinearAttentionMetadata(pointer, shape, int(starts[-1]), name, resolved.name, engine)


def _engine(name: Any) -> str:
    """Gives the engine that a name means. Where CPU_ATTN_ENGINE names onednn, which has no linear attention, ``auto``
    means native."""
    asked = _dispatch.asked("engine", name, "CPU_ATTN_ENGINE")
    if asked in ("native", "reference"):
        return str(asked)
    if asked == "onednn" and name != "auto":
        raise UnavailableError("engine: 'onednn' has no linear attention; native and reference have")
    return "native" if asked in ("auto", "onednn") else _dispatch.resolve_engine(asked)[0]
