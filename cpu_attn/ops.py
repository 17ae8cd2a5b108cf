# SPDX-License-Identifier: Apache-2.0
"""This module has the calls that move data, with vLLM's names, order and meaning (``cpu_attn_reshape_and_cache``,
``cpu_attention_with_kv_cache`` in its ``_custom_ops.py``). The plan is made in :mod:`cpu_attn.plan`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np

from cpu_attn import _check, _dispatch, profiling
from cpu_attn._arguments import ATTENTION, WRITE, documented
from cpu_attn._arrays import address, described, new_beside, objects, view
from cpu_attn._dtypes import CODES, DTYPE_CODES, DTYPES, FORMATS, dtype_name, is_scaled
from cpu_attn._native import ffi, lib
from cpu_attn.plan import SchedulerMetadata

Written = TypeVar("Written")  # the class of the caller's arrays: NumPy's or torch's


@dataclass(frozen=True, slots=True)
class CacheFormat:
    """Says how a cache holds what is written to it, in the words of :func:`reshape_and_cache`; they are checked when it
    is made. kind: kv_cache_dtype, "?" where that is no name; kinds: what it says of K and of V; code and rotated: what
    C takes of layout and rotation."""

    isa: str = "auto"
    kv_cache_dtype: Any = "auto"  # what it means depends on the dtype of the arrays, which C reads: kv_dtypes
    kv_cache_layout: str = "packed"
    kv_cache_rotation: str = "none"
    kind: str = field(init=False)
    kinds: tuple[str, ...] = field(init=False)
    code: int = field(init=False)
    rotated: int = field(init=False)

    def __post_init__(self) -> None:
        keep, kind = object.__setattr__, self.kv_cache_dtype if isinstance(self.kv_cache_dtype, str) else "?"
        keep(self, "kind", kind)
        keep(self, "kinds", tuple((kind.split("/") * 2)[:2]))
        keep(self, "rotated", _check.kv_cache_rotation(self.kv_cache_rotation))
        keep(self, "code", _check.LAYOUTS[_check.kv_cache_layout(self.kv_cache_layout)])


_known_format = lru_cache(maxsize=32)(CacheFormat)


def cache_format(*words: Any) -> CacheFormat:
    """Makes a CacheFormat, once for the same words."""
    try:
        return _known_format(*words)
    except MemoryError:
        raise
    except Exception:  # a word cannot be hashed, or is wrong, which the next line says
        return CacheFormat(*words)


@dataclass(frozen=True, slots=True)
class Logits:
    """Says what becomes of q.k, and which keys count, in the words of :func:`attention_with_kv_cache`."""

    scale: float
    softcap: float = 0.0
    alibi_slopes: Any = None
    s_aux: Any = None
    attn_bias: Any = None
    selected_blocks: Any = None
    selected_tokens: Any = None

    @property
    def max_selected_tokens(self) -> int | None:
        """Gives the number that a plan has to be made for."""
        return None if self.selected_tokens is None else max(1, self.selected_tokens.shape[1])


class _Thread(threading.local):
    """Keeps what a Python thread has from call to call: scratch that grows."""

    def __init__(self) -> None:
        self.workspace: tuple[Any, int] = (ffi.NULL, 0)  # the memory and its bytes; it lives while somebody holds it

    def grow(self, size: int) -> None:
        """Makes the workspace at least this large. It is aligned to 64 bytes."""
        if self.workspace[1] < size:
            memory = np.empty(size + 64, np.uint8)
            self.workspace = ffi.from_buffer(memory[-address(memory) % 64 :]), size


thread_state = _Thread()
# What C goes by in a write, for each isa, kv_cache_dtype and kv_cache_layout that was named.
_meanings: dict[tuple[str, str, str], Any] = {}
_NOTHING = ffi.new("ca_meaning *", {"head_sizes": 1})
# Of each kind of attention the names of its arrays, the place of s_aux among them, and its name in profiles.
_ATTENTIONS = {
    kind: (names, names.index("s_aux"), called)
    for kind, names, called in (
        (lib.CA_ATTEND, _check.ATTENTION, "attention_with_kv_cache"),
        (lib.CA_ATTEND_LATENT, _check.MLA, "attention_with_kv_cache"),
        (lib.CA_UPDATE_AND_ATTEND, _check.UPDATE, "update_and_attend"),
    )
}
_RECORDED = {  # the name of a call in profiles, and the array that tells dtype and tokens
    lib.ca_write: ("reshape_and_cache", "key"),
    lib.ca_rotary_write: ("rotary_reshape_and_cache", "key"),
    lib.ca_index_and_cache: ("index_and_cache", "k"),
    lib.ca_select_tokens: ("select_tokens", "query"),
    lib.ca_score_blocks: ("score_blocks", "query"),
}
ONLY_CHECK = (ffi.NULL, 2**63 - 1)  # ca_attend has no workspace here: it checks and computes nothing


@documented(WRITE)
def reshape_and_cache(
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slot_mapping: Any,
    isa: str = "auto",
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    kv_cache_dtype: str = "auto",
    *,
    kv_cache_layout: str = "packed",
    kv_cache_rotation: str = "none",
    k_feedback: Any = None,
) -> None:
    """Writes the keys and values of a step's tokens into their slots of a paged cache.

    Every layer calls this before :func:`attention_with_kv_cache` reads the cache. Symbols: T tokens, Hkv kv heads of D
    elements (in values: Dv), N blocks of B tokens.

    Args:
        {arguments}

    Raises:
        ValueError: a shape, a stride, a slot or a number is out of range, a name is unknown, or memory overlaps.
            Nothing has been written then.
        TypeError: an argument is no array, or has another dtype. Nothing has been written then.
        UnavailableError: this machine does not have the isa.

    Example:
        >>> import numpy as np
        >>> from cpu_attn import get_kv_cache_shape, reshape_and_cache
        >>> key, value = np.ones((2, 3, 2, 64), np.float32)  # 3 tokens, 2 kv heads of 64
        >>> key_cache, value_cache = np.zeros((2, *get_kv_cache_shape(4, 16, 2, 64, "float32")), np.float32)
        >>> reshape_and_cache(key, value, key_cache, value_cache, np.array([17, 18, -1]))  # block 1; one is skipped
        >>> float(value_cache.sum())  # 2 tokens of 2 heads of 64 ones
        256.0
    """
    arrays = (key_cache, value_cache, key, value, slot_mapping, k_feedback)
    form = cache_format(isa, kv_cache_dtype, kv_cache_layout, kv_cache_rotation)
    run_write(lib.ca_write, _check.WRITE, arrays, form, k_scale, v_scale)


def run_write(
    call: Any, names: Sequence[str], arrays: tuple[Any, ...], form: CacheFormat, k_scale: Any, v_scale: Any, *more: Any
) -> None:
    """Runs a call that writes a cache. more: what C takes of this call alone, behind what every write has."""
    if names[-1] == "k_feedback" and arrays[-1] is not None:
        _check.feeds_back("k_feedback", form.kinds[0])
    run_by_names(call, names, arrays, form, form.rotated, *_check.scales(k_scale, v_scale, form.kinds), *more)


def run(call: Any, names: Sequence[str], arrays: tuple[Any, ...], *how: Any) -> None:
    """Runs a call that takes neither a plan nor the name of an isa."""
    fault = ffi.new("ca_fault *")
    addresses, given, alive = objects(arrays)
    while call(addresses, given, *how, fault):
        addresses, given, alive = _check.reread(fault, names, arrays, given, alive)


def run_by_names(call: Any, names: Sequence[str], arrays: tuple[Any, ...], form: CacheFormat, *how: Any) -> None:
    """Runs a call that has no plan. What isa and kv_cache_dtype mean depends on the dtype of its arrays, which C reads:
    where it does not know the meaning yet, it asks and is called again."""
    start, fault = profiling.clock(), ffi.new("ca_fault *")
    isa = _dispatch.asked("isa", form.isa, "CPU_ATTN_ISA")
    asked = (isa, form.kind, form.kv_cache_layout)
    meaning = _meanings.get(asked, _NOTHING)
    addresses, given, alive = objects(arrays)
    while status := call(addresses, given, meaning, form.code, *how, fault):
        if status == lib.CA_UNNAMED:
            meaning = _meanings[asked] = _meaning(meaning, fault, isa, form.kv_cache_dtype, form.kv_cache_layout)
        else:
            addresses, given, alive = _check.reread(fault, names, arrays, given, alive)
    if start:
        name, by = _RECORDED[call]
        a = view(by, arrays[names.index(by)])
        resolved = _dispatch.resolve_isa(isa, a.dtype, a.shape[-1]).name
        profiling.record(name, start, "native", resolved, a.dtype, form.kind, num_tokens=a.shape[0])


def _meaning(before: Any, fault: Any, isa: str, kv_cache_dtype: Any, layout: str) -> Any:
    """Adds to what C knows already what the names mean for the dtype and the head size that it asks for."""
    dtype = next(name for name, code in DTYPE_CODES.items() if code == fault.value)
    kvs = _check.kv_dtypes(kv_cache_dtype, dtype)
    resolved = _dispatch.resolve_isa(isa, dtype, fault.bound)
    _check.kv_cache_layout(layout, kvs)
    meaning = ffi.new("ca_meaning *", before[0])
    meaning.head_sizes = 16 if isa == "vec16" else 1
    meaning.of[fault.value] = {"known": 1, "isa": resolved.index, "kv_dtype": [CODES[kv][0] for kv in kvs]}
    return meaning


@documented(ATTENTION)
def attention_with_kv_cache(
    query: Any,
    key_cache: Any,
    value_cache: Any,
    output: Written,
    query_start_loc: Any,
    seq_lens: Any,
    scale: float,
    causal: bool,
    alibi_slopes: Any,
    sliding_window: int | tuple[int, int],
    block_table: Any,
    softcap: float,
    scheduler_metadata: SchedulerMetadata,
    s_aux: Any = None,
    dynamic_causal: Any = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    kv_cache_dtype: str = "auto",
    *,
    lse: Any = None,
    selected_blocks: Any = None,
    attn_bias: Any = None,
    kv_cache_layout: str = "packed",
    kv_cache_rotation: str = "none",
    selected_tokens: Any = None,
) -> Written:
    """Computes attention of every query token over its request's pages, into ``output``, which is returned.

    Every layer calls this with the plan of the step. One call serves prefill, decode and any mixture of them. Symbols:
    R requests, T query tokens of all requests, Hq query heads on Hkv kv heads, head sizes D of queries and keys and Dv
    of values, N blocks of B tokens, M columns of the block table.

    Args:
        {arguments}

    Returns:
        ``output``. A row that sees no key is 0, and its lse is -inf, or the sink where there is one.

    Raises:
        ValueError: an argument is out of range, memory overlaps, or a length, a mask or a name differs from the plan's.
            Nothing has been written then.
        TypeError: an argument is no array, or has another dtype. Nothing has been written then.
        MemoryError: there is no memory for the plan's ``workspace_bytes``.

    Maths: softmax(scale * q k^T + bias) v with an online softmax in float32 (arXiv:2205.14135); sinks as in GPT-OSS;
    docs/contract.md defines all of it.

    Example:
        >>> import numpy as np
        >>> from cpu_attn import attention_with_kv_cache, get_kv_cache_shape, get_scheduler_metadata, reshape_and_cache
        >>> rng = np.random.default_rng(0)
        >>> query = rng.standard_normal((20, 8, 64), np.float32)  # a prompt of 20 tokens, 8 query heads of 64
        >>> key, value = rng.standard_normal((2, 20, 2, 64), np.float32)  # on 2 kv heads
        >>> key_cache, value_cache = np.zeros((2, *get_kv_cache_shape(4, 16, 2, 64, "float32")), np.float32)
        >>> query_start_loc, seq_lens = np.array([0, 20], np.int32), np.array([20], np.int32)
        >>> block_table = np.array([[2, 0]], np.int32)
        >>> slot_mapping = np.concatenate([32 + np.arange(16), np.arange(4)])  # block 2, then block 0
        >>> plan = get_scheduler_metadata(1, 8, 2, 64, seq_lens, "float32", query_start_loc)
        >>> reshape_and_cache(key, value, key_cache, value_cache, slot_mapping)
        >>> output = attention_with_kv_cache(
        ...     query, key_cache, value_cache, np.empty_like(query), query_start_loc, seq_lens, 64**-0.5, True, None,
        ...     -1, block_table, 0.0, plan)
        >>> bool(np.allclose(output[0], value[0].repeat(4, axis=0)))  # the first token sees its own key alone
        True
    """
    plan = _check.plan("scheduler_metadata", scheduler_metadata)
    _check.same_call(plan, sliding_window, kv_cache_dtype, kv_cache_layout, kv_cache_rotation)
    scales = _check.scales(k_scale, v_scale, plan.kv_dtypes)
    step = (query_start_loc, seq_lens, alibi_slopes, block_table, s_aux, dynamic_causal)
    arrays = (output, lse, query, key_cache, value_cache, *step, selected_blocks, attn_bias, selected_tokens)
    run_attention(plan, arrays, scale, softcap, scales, _check.boolean("causal", causal))
    return output


def attend(
    plan: SchedulerMetadata,
    query: Any,
    key_cache: Any,
    value_cache: Any,
    output: Any,
    block_table: Any,
    logits: Logits,
    scales: tuple[float, float] = (1.0, 1.0),
    lse: Any = None,
) -> None:
    """Does what :func:`attention_with_kv_cache` does for callers that made the plan and know its lengths to be right.
    scales: of K and V."""
    step = (None, None, logits.alibi_slopes, block_table, logits.s_aux, None)
    last = (logits.selected_blocks, logits.attn_bias, logits.selected_tokens)
    arrays = (output, lse, query, key_cache, value_cache, *step, *last)
    run_attention(plan, arrays, logits.scale, logits.softcap, scales)


def run_attention(
    plan: SchedulerMetadata,
    arrays: tuple[Any, ...],
    scale: float,
    softcap: float,
    scales: tuple[float, float],
    causal: int = -1,
    only_check: bool = False,
    kind: int = lib.CA_ATTEND,
) -> None:
    """Runs an attention. causal: -1 says that the plan's lengths are right, and that there are none among the arrays.
    only_check: nothing is computed. kind: which arrays these are (_ATTENTIONS); in _check.MLA the second kv_cache is
    None."""
    thread, fault, start = thread_state, ffi.new("ca_fault *"), profiling.clock()
    names, s_aux, called = _ATTENTIONS[kind]
    sinks = arrays[s_aux]
    if sinks is not None and not (type(sinks) is np.ndarray and sinks.dtype == np.float32):
        sinks = _check.small_floats("s_aux", sinks, _check.FLOATS, plan.num_heads)
        arrays = (*arrays[:s_aux], sinks, *arrays[s_aux + 1 :])
    numbers = (kind, causal, *_check.logit_factors(scale, softcap, scales[0]), *scales)
    addresses, given, alive = objects(arrays)
    # A Python finalizer may make a call meanwhile and replace the workspace, so this one is held here.
    room = ONLY_CHECK if only_check else thread.workspace
    while status := lib.ca_attend(plan._pointer, addresses, given, *numbers, *room, fault):
        if status == lib.CA_SMALL_WORKSPACE:
            thread.grow(plan.workspace_bytes)
            room = thread.workspace
        else:
            addresses, given, alive = _check.reread(fault, names, arrays, given, alive)
    if start and not only_check:
        profiling.record_plan(called, start, plan)


def _first(parts: Any) -> Any:
    """Gives one of the arrays, or the array that holds all of them, which need not have items."""
    return parts[0] if isinstance(parts, (list, tuple)) else parts


def merge_states(outs: Any, lses: Any, *, out: Any = None, lse: Any = None) -> tuple[Any, Any]:
    """Computes attention over several sets of keys from the results over each set.

    S sets were attended separately, by the same query tokens. Their results combine exactly, since each result comes
    with the log of its softmax's denominator: lse is log(sum of exp(lses)), output is the sum of exp(lses - lse) *
    outs.

    Args:
        outs: a list or tuple of S arrays [T, Hq, Dv], or one array [S, T, Hq, Dv], of float32, float16 or bfloat16.
        lses: as many float32 [Hq, T], as :func:`attention_with_kv_cache` writes them. No key may be in two sets. A sink
            may be in one set only.
        out: [T, Hq, Dv] to write to, apart from all inputs, or None for a new one. The last axis is dense.
        lse: float32 [Hq, T] to write to, apart from all inputs, or None for a new one. The last axis is dense.

    Returns:
        (output [T, Hq, Dv], lse [Hq, T]); new ones are tensors where the inputs are. A part whose lse is -inf, or +inf
        as FlashAttention 2 writes it, saw no key and counts for nothing, whatever its output holds. Where all parts
        did, output is 0 and lse is -inf. A lse of NaN stays NaN and makes its row NaN.

    Raises:
        ValueError: shapes differ or memory overlaps. Nothing has been written then.
        TypeError: an argument is no array, or has another dtype. Nothing has been written then.

    Maths: arXiv:2501.01005, in float32.

    Example:
        >>> import numpy as np
        >>> from cpu_attn import merge_states
        >>> outs = np.array([1.0, 4.0], np.float32).reshape(2, 1, 1, 1)  # two sets, 1 token, 1 head, Dv = 1
        >>> lses = np.log(np.array([1.0, 2.0], np.float32)).reshape(2, 1, 1)  # the second weighs twice as much
        >>> output, lse = merge_states(outs, lses)
        >>> round(float(output.item()), 5), round(float(np.exp(lse.item())), 5)
        (3.0, 3.0)
    """
    start = profiling.clock()
    parts, logs = _check.states(outs, lses)
    if out is None:
        out = new_beside(_first(outs), parts[0].shape, DTYPES[parts[0].dtype])
    if lse is None:
        lse = new_beside(_first(lses), logs[0].shape, np.float32)
    to, log = _check.merged(parts, logs, out, lse)
    lib.ca_merge_states(len(parts), described([*parts, to]), described([*logs, log]))
    if start:
        profiling.record("merge_states", start, num_tokens=to.shape[0])
    return out, lse


def merge_stacked(
    outs: np.ndarray[Any, Any], lses: np.ndarray[Any, Any], out: np.ndarray[Any, Any], lse: np.ndarray[Any, Any]
) -> None:
    """Does what :func:`merge_states` does for arrays [S, T, Hq, Dv] and [S, Hq, T] that are known to be right. Their
    number costs no time here, whereas arrays that are checked one by one take 10 us each."""
    start = profiling.clock()
    lib.ca_merge_states(len(outs), _stacked(outs, out), _stacked(lses, lse))
    if start:
        profiling.record("merge_states", start, num_tokens=out.shape[0])


def _stacked(parts: np.ndarray[Any, Any], to: np.ndarray[Any, Any]) -> Any:
    """Gives a ``ca_array`` of each part, which differ in their addresses alone, and one of the array that they are
    merged into."""
    each = np.frombuffer(view("parts", parts[0]).described() * len(parts), np.uint8).reshape(len(parts), -1).copy()
    each[:, :8].view(np.uint64)[:, 0] += np.arange(len(parts), dtype=np.uint64) * np.uint64(parts.strides[0])
    return ffi.from_buffer("ca_array[]", each.tobytes() + view("to", to).described())


def gather(
    cache: Any,
    block_table: Any,
    seq_len: int,
    head_size: int,
    isa: str = "auto",
    *,
    value: bool,
    out: Any = None,
    dtype: Any = None,
    kv_cache_dtype: str = "auto",
    kv_cache_layout: str = "packed",
) -> np.ndarray[Any, Any]:
    """Reads the first seq_len tokens of one request out of its pages as plain rows [seq_len, Hkv, head_size]. They are
    as they are stored, rotated where they were; integers become float32, times their scales, exactly.

    cache [N, Hkv, B, width] as written with ``isa``, or what kv_cache_layout says; block_table int32 [M]; value: a
    value cache, else a key cache.
    dtype: of the keys and values that were written, for a quantised cache; else the cache's own.
    kv_cache_dtype: what the cache holds, in case its dtype does not say it (uint8).
    """
    kinds = [*_check.FLOATS, *dict.fromkeys(name for row in FORMATS.values() for name in row.memory)]
    first = _check.array("cache", cache, kinds, [(w, None) for w in ("N", "Hkv", "B", "width")])
    value, written = bool(value), dtype_name(first.dtype if dtype is None else dtype)
    head_size = _check.integer("head_size", head_size, 1, _check.MAX_SIZE)
    resolved, code = _dispatch.resolve_isa(isa, written, head_size), DTYPE_CODES[written]
    if kv_cache_dtype == "auto":  # the dtype of a float8 array says what it holds
        kv_cache_dtype = next((kv for kv, row in FORMATS.items() if first.dtype in row.memory), "auto")
    kv = _check.kv_dtypes(kv_cache_dtype, written)[value]
    if first.dtype not in _check.memory(kv):
        raise ValueError(f"kv_cache_dtype: {kv_cache_dtype!r} of {written}, this cache holds {first.dtype}")
    stored = "float32" if is_scaled(kv) else first.dtype
    layout = _check.kv_cache_layout(kv_cache_layout, [kv])
    pages = _check.cache("cache", cache, kv, None, None, None, layout)
    _check.cache_width("cache", pages, resolved.index, code, kv, head_size, layout)
    _, num_kv_heads, block_size = _check.cache_sizes(pages.shape, layout)
    table = _check.array("block_table", block_table, ["int32"], [("blocks", None)])
    seq_len = _check.integer("seq_len", seq_len, 0)
    if out is None:
        if -(-seq_len // block_size) > table.shape[0]:
            raise ValueError(f"block_table: needs {-(-seq_len // block_size)} blocks, has {table.shape[0]}")
        out = np.empty((seq_len, num_kv_heads, head_size), DTYPES[stored])
    rows = _check.array(
        "out", out, [stored], [("seq_len", seq_len), ("num_kv_heads", num_kv_heads), ("head_size", head_size)]
    )
    _check.disjoint("out", _check.writable("out", rows), {"cache": pages, "block_table": table})
    fault = _check.new_fault()
    how = (resolved.index, code, CODES[kv][0], _check.LAYOUTS[layout])
    lib.ca_gather(described([rows, pages, table]), value, *how, fault)
    _check.raise_fault(fault)
    return out  # type: ignore[no-any-return]
