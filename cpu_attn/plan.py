# SPDX-License-Identifier: Apache-2.0
"""This module makes the plan of a step: :func:`get_scheduler_metadata` makes it once, and every layer uses it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from cpu_attn import _check, _dispatch, _numa, _threads, profiling
from cpu_attn._arguments import PLAN, documented
from cpu_attn._arrays import objects, view
from cpu_attn._dtypes import CODES, DTYPE_CODES, DTYPES, FORMATS, dtype_name
from cpu_attn._native import ffi, lib


class SchedulerMetadata(_check.Plan):
    """Holds the plan of a step: its lengths and masks, checked and cut into tasks for threads.

    :func:`get_scheduler_metadata` makes it, once a step; all layers of one shape use it. A plan is immutable, and any
    number of threads may use it at once. It cannot be pickled, since it is memory of this process for its CPU
    (TypeError); setting an attribute is an AttributeError.

    Example:
        >>> import numpy as np
        >>> from cpu_attn import get_scheduler_metadata
        >>> lens = np.array([5, 9], np.int32)
        >>> plan = get_scheduler_metadata(2, 8, 2, 64, lens, "float32", np.array([0, 5, 14], np.int32))
        >>> plan.num_reqs, plan.num_tokens, plan.head_size
        (2, 14, 64)
        >>> plan.visible_pairs == 8 * (5 * 6 // 2 + 9 * 10 // 2)  # causal
        True
    """

    __slots__ = (
        "__weakref__",
        "_checksum",
        "_info",
        "_pointer",
        "_shape",
        "_words",
        "dtype",
        "engine",
        "isa",
        "kv_cache_layout",
        "kv_cache_rotation",
        "kv_dtypes",
        "narrow",
    )
    _checksum: bytes  # of what must be the same on all ranks; only where ranks share the keys
    _info: Any
    _pointer: Any
    _shape: Any
    _words: tuple[Any, ...]
    dtype: np.dtype[Any]
    engine: str
    isa: str
    kv_cache_layout: str
    kv_cache_rotation: str
    kv_dtypes: tuple[str, ...]
    narrow: bool

    def __init__(
        self,
        pointer: Any,
        shape: Any,
        dtype: str,
        kvs: tuple[str, ...],
        isa: str,
        engine: str,
        kv_cache_layout: str,
        kv_cache_rotation: str,
        words: tuple[Any, ...],
    ) -> None:
        info, keep = ffi.new("ca_plan_info *"), object.__setattr__
        lib.ca_plan_describe(pointer, info)
        keep(self, "_pointer", pointer)
        keep(self, "_shape", shape)
        keep(self, "_info", info)
        keep(self, "_words", words)
        keep(self, "dtype", DTYPES[dtype])
        keep(self, "kv_dtypes", kvs)
        keep(self, "narrow", kvs != (dtype, dtype))
        keep(self, "isa", isa)
        keep(self, "engine", engine)
        keep(self, "kv_cache_layout", kv_cache_layout)
        keep(self, "kv_cache_rotation", kv_cache_rotation)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"SchedulerMetadata is immutable: cannot set {name}")

    def __copy__(self) -> SchedulerMetadata:
        return self

    def __deepcopy__(self, memo: Any) -> SchedulerMetadata:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "SchedulerMetadata: cannot be pickled, it is memory of this process for its CPU; make a new plan from the "
            "same lengths where it is needed"
        )

    @property
    def num_reqs(self) -> int:
        """Is R, the requests of the step."""
        return int(self._shape.num_reqs)

    @property
    def num_heads(self) -> int:
        """Is Hq."""
        return int(self._shape.num_heads)

    @property
    def num_kv_heads(self) -> int:
        """Is Hkv."""
        return int(self._shape.num_kv_heads)

    @property
    def head_size(self) -> int:
        """Is D."""
        return int(self._shape.head_size)

    @property
    def head_size_v(self) -> int:
        """Is Dv."""
        return int(self._shape.head_size_v)

    @property
    def num_tokens(self) -> int:
        """Is T, the query tokens of the step."""
        return int(self._info.num_tokens)

    @property
    def num_threads(self) -> int:
        """Says how many threads a call uses at most."""
        return int(self._info.num_threads)

    @property
    def num_tasks(self) -> int:
        """Counts the pieces of work for each kv head."""
        return int(self._info.num_tasks)

    @property
    def num_shared(self) -> int:
        """Counts the tasks that serve several requests."""
        return int(self._info.num_shared)

    @property
    def num_splits(self) -> int:
        """Counts the query blocks whose keys are split."""
        return int(self._info.num_splits)

    @property
    def workspace_bytes(self) -> int:
        """Says how much memory a call needs, in bytes."""
        return int(self._info.workspace_bytes)

    @property
    def visible_pairs(self) -> int:
        """Says how many (query, key) pairs the masks leave, over all query heads. Each takes 2 * (D + Dv) flops."""
        return int(lib.ca_plan_visible_pairs(self._pointer))

    def __repr__(self) -> str:
        return (
            f"SchedulerMetadata({self.num_reqs} requests, {self.num_tokens} tokens, {self.num_heads}/"
            f"{self.num_kv_heads} heads of {self.head_size}, {self.dtype}, {self.engine} on {self.isa}, "
            f"{self.num_tasks} tasks, {self.num_splits} split, {self.num_shared} shared)"
        )


_DEFAULTS = ffi.new("ca_shape *", {row.name: int(row.default or 0) for row in PLAN.fields})


class Plans(dict[Any, Any]):
    """Keeps plans with what they were made for. A copy or a pickle of it is empty, since a plan is memory of its
    process."""

    def __reduce__(self) -> Any:
        return Plans, ()


@documented(PLAN)
def get_scheduler_metadata(
    num_reqs: int,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    seq_lens: Any,
    dtype: Any,
    query_start_loc: Any,
    causal: bool = True,
    sliding_window: int | tuple[int, int] = -1,
    isa: str = "auto",
    enable_kv_split: bool = True,
    dynamic_causal: Any = None,
    kv_cache_dtype: str = "auto",
    *,
    head_size_v: int | None = None,
    engine: str = "auto",
    mm_prefix_range: Mapping[int, Sequence[tuple[int, int]]] | None = None,
    document_start_loc: Mapping[int, Sequence[int]] | None = None,
    tree_mask: Any = None,
    block_table: Any = None,
    block_size: int | None = None,
    kv_cache_layout: str = "packed",
    mm_prefix_clamp_sliding_window: bool = False,
    kv_cache_rotation: str = "none",
    max_selected_tokens: int | None = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_kv_cache_interleave_size: int = 1,
    block_nodes: Any = None,
    query_block_size: int | None = None,
    select_by_query_head: bool = False,
    attention_chunk_size: int | None = None,
) -> SchedulerMetadata:
    """Plans the attention of one step, once for all layers of one shape.

    The plan holds what the lengths and the masks of the step mean, so that layers need not look at them again. Names
    and order of the arguments follow vLLM's ``cpu_attn_get_scheduler_metadata``.

    Args:
        {arguments}

    Returns:
        The plan.

    Raises:
        ValueError: a length or a size is out of range, a name is unknown, or masks do not go together.
        TypeError: an argument has another type or dtype.
        UnavailableError: this machine does not have the isa, or this build does not have the engine.
        MemoryError: there is no memory for the plan.

    Maths: docs/contract.md defines each mask. Shared prefixes: cascade attention, with segments merged by their
    log-sum-exps (arXiv:2501.01005).

    Example:
        >>> import numpy as np
        >>> from cpu_attn import get_scheduler_metadata
        >>> query_start_loc = np.array([0, 1, 26], np.int32)  # one token of a decode, 25 of a prompt
        >>> seq_lens = np.array([40, 25], np.int32)
        >>> plan = get_scheduler_metadata(2, 32, 8, 128, seq_lens, "float32", query_start_loc, sliding_window=32)
        >>> plan.num_tokens, plan.engine
        (26, 'native')
    """
    num_reqs = _check.integer("num_reqs", num_reqs, 0)
    shape = ffi.new("ca_shape *", _DEFAULTS[0])
    shape.num_reqs = num_reqs
    shape.num_heads = _check.integer("num_heads", num_heads, 1, _check.MAX_SIZE)
    shape.num_kv_heads = _check.integer("num_kv_heads", num_kv_heads, 1, shape.num_heads)
    if shape.num_heads % shape.num_kv_heads:
        raise ValueError(f"num_kv_heads: {num_kv_heads} does not divide num_heads = {num_heads}")
    shape.head_size = _check.integer("head_size", head_size, 1, _check.MAX_SIZE)
    shape.head_size_v = _check.integer(
        "head_size_v", head_size if head_size_v is None else head_size_v, 1, _check.MAX_SIZE
    )
    dtype = dtype_name(dtype)
    kvs = _check.kv_dtypes(kv_cache_dtype, dtype)
    shape.dtype, shape.k_dtype, shape.v_dtype = CODES[dtype][0], CODES[kvs[0]][0], CODES[kvs[1]][0]
    resolved = _dispatch.resolve_isa(isa, dtype, shape.head_size)
    shape.isa = resolved.index
    engine, engine_pointer = _dispatch.resolve_engine(engine)
    shape.causal = _check.boolean("causal", causal)
    shape.window_left, shape.window_right = _check.window(sliding_window)
    shape.enable_kv_split = _check.boolean("enable_kv_split", enable_kv_split)
    shape.num_threads = _threads.get_num_threads()
    shape.kv_cache_layout = _check.LAYOUTS[_check.kv_cache_layout(kv_cache_layout, kvs)]
    shape.hadamard = _check.kv_cache_rotation(kv_cache_rotation)
    if block_table is not None or block_size is not None:
        shape.block_size = _check.table_block_size(block_table, block_size)
    _check.options(
        shape,
        (
            mm_prefix_clamp_sliding_window,
            max_selected_tokens,
            cp_world_size,
            cp_rank,
            cp_kv_cache_interleave_size,
            query_block_size,
            select_by_query_head,
            attention_chunk_size,
        ),
    )
    if tree_mask is not None and shape.attention_chunk_size:
        raise ValueError("tree_mask: does not go with attention_chunk_size")
    if block_nodes is not None:
        if not shape.block_size:
            raise ValueError("block_table: is None, block_nodes is given, which needs it")
        _numa.cpus_of_nodes()
    found = _check.masks(num_reqs, mm_prefix_range, document_start_loc, tree_mask)
    words = (sliding_window, kv_cache_dtype, kv_cache_layout, kv_cache_rotation)
    made = SchedulerMetadata(
        _plan(shape, engine_pointer, (seq_lens, query_start_loc, dynamic_causal, block_table, block_nodes), found),
        shape,
        dtype,
        kvs,
        resolved.name,
        engine,
        kv_cache_layout,
        kv_cache_rotation,
        words,
    )
    if cp_world_size != 1:
        object.__setattr__(made, "_checksum", _checksum(shape, (query_start_loc, seq_lens, dynamic_causal), found))
    return made


# This is a function of its own to keep frames small: get_scheduler_metadata's would be a frame object of more than 512
# bytes with these names, too. Such an object needs memory that may not be there, and CPython 3.11 then forgets which
# exception it was to raise.
def _plan(shape: Any, engine: Any, step: tuple[Any, ...], given_masks: _check.Masks | None) -> Any:
    start, fault = profiling.clock(), ffi.new("ca_fault *")
    masks = masks_struct(given_masks) if given_masks else ffi.NULL
    where, given, alive = objects(step, 0)
    while not (pointer := lib.ca_plan_new(shape, engine, where, given, masks, fault)):
        where, given, alive = _check.reread(fault, _check.STEP, step, given, alive)
    if start:
        profiling.record("get_scheduler_metadata", start, num_reqs=shape.num_reqs)
    return ffi.gc(pointer, lib.ca_plan_free)


def _checksum(shape: Any, lengths: tuple[Any, ...], masks: _check.Masks | None) -> bytes:
    """Hashes what has to be the same on all ranks. The isa, the threads and what the cache holds are each rank's own
    affair."""
    same = ["num_reqs", "num_heads", "num_kv_heads", "head_size", "head_size_v", "dtype", "causal", "window_left"]
    same += ["window_right", *(row.name for row in PLAN.fields if row.name != "cp_rank")]
    found = blake2b(repr([getattr(shape, name) for name in same]).encode(), digest_size=8)
    arrays = [x if x is None else view("lengths", x).numpy() for x in lengths]
    if masks:
        arrays += [masks.spans, masks.documents, None if masks.tree is None else masks.tree.numpy()]
    for x in arrays:
        found.update(b"none" if x is None else repr(x.shape).encode() + x.tobytes())
    return found.digest()


def masks_struct(found: _check.Masks) -> Any:
    """Gives the masks as C takes them. The struct is valid as long as ``found`` lives."""
    masks = ffi.new("ca_masks *", {"tree_rows": -1})
    masks.spans, masks.num_spans = _check.pointer("int32_t *", found.spans), len(found.spans)
    masks.documents, masks.num_documents = _check.pointer("int32_t *", found.documents), len(found.documents)
    if found.tree is not None:
        masks.tree, masks.tree_stride = _check.pointer("uint8_t *", found.tree), found.tree.strides[0]
        masks.tree_rows, masks.tree_bytes = found.tree.shape
    return masks


def kv_cache_dtypes() -> tuple[str, ...]:
    """Names what a cache may hold: the values of ``kv_cache_dtype``.

    Returns:
        The names. Two of them as ``K/V`` name one for keys and one for values (``int8/int4``). ``fp8`` means
        ``fp8_e4m3``. The function raises no errors.

    Example:
        >>> from cpu_attn import kv_cache_dtypes
        >>> "auto" in kv_cache_dtypes(), "int8" in kv_cache_dtypes()
        (True, True)
    """
    return ("auto", *FORMATS)


def get_kv_cache_shape(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    dtype: Any,
    isa: str = "auto",
    kv_cache_dtype: str = "auto",
    *,
    kv_cache_layout: str = "packed",
) -> tuple[int, int, int, int]:
    """Says which shape to allocate for the keys, or for the values, of a layer.

    Args:
        num_blocks: N, blocks of the cache.
        block_size: B, tokens of a block. Multiples of 16 waste nothing.
        num_kv_heads: Hkv.
        head_size: D for keys, Dv for values.
        dtype: of keys and values: float32, float16 or bfloat16, as NumPy dtype, torch dtype or name.
        isa: whose layout; ``auto`` follows CPU_ATTN_ISA, then takes the best isa of this machine.
        kv_cache_dtype: what the cache holds, as in :func:`reshape_and_cache`. It says the dtype of the array, too: with
            ``auto`` it is ``dtype``, of fp8 it is the float8 dtype of ``ml_dtypes`` or uint8, of integers it is uint8.
            If K's and V's differ, ask for one of them at a time.
        kv_cache_layout: ``packed``, ``HND`` or ``NHD``.

    Returns:
        (N, Hkv, B, width), in elements of the array; for ``NHD`` (N, B, Hkv, width). The width is ``head_size`` where
        that is even and ``block_size`` is a multiple of 16, and in plain rows. It may be larger otherwise. For integers
        it counts bytes, scales among them.

    Raises:
        ValueError: a size is out of range, a name is unknown, or ``kv_cache_dtype`` names two.
        TypeError: an argument has another type.
        UnavailableError: this machine does not have the isa.

    Example:
        >>> from cpu_attn import get_kv_cache_shape
        >>> get_kv_cache_shape(64, 16, 8, 128, "bfloat16")
        (64, 8, 16, 128)
        >>> get_kv_cache_shape(64, 16, 8, 128, "bfloat16", kv_cache_dtype="int8")  # a byte each, and 2 for the scale
        (64, 8, 16, 130)
    """
    name = dtype_name(dtype)
    kv, v_dtype = _check.kv_dtypes(kv_cache_dtype, name)
    if kv != v_dtype:
        raise ValueError(f"kv_cache_dtype: {kv_cache_dtype!r} names two, K and V have a shape each")
    block_size = _check.integer("block_size", block_size, 1)
    head_size = _check.integer("head_size", head_size, 1, _check.MAX_SIZE)
    resolved = _dispatch.resolve_isa(isa, name, head_size)
    num_blocks = _check.integer("num_blocks", num_blocks, 0)
    num_kv_heads = _check.integer("num_kv_heads", num_kv_heads, 1, _check.MAX_SIZE)
    layout = _check.kv_cache_layout(kv_cache_layout, [kv])
    width = head_size
    if layout == "packed":
        width = _check.width(resolved.index, DTYPE_CODES[name], kv, block_size, head_size)
    return (*_check.cache_sizes((num_blocks, num_kv_heads, block_size), layout), width)
