# SPDX-License-Identifier: Apache-2.0
"""The calls that move data: vLLM's names, order and meaning (``cpu_attn_reshape_and_cache``,
``cpu_attention_with_kv_cache`` in its ``_custom_ops.py``). The plan is made in :mod:`cpu_attn.plan`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from cpu_attn import _check, _dispatch
from cpu_attn._arrays import described, new_beside, objects
from cpu_attn._dtypes import CODES, DTYPE_CODES, DTYPES, FORMATS, dtype_name, is_scaled
from cpu_attn._native import ffi, lib
from cpu_attn.plan import SchedulerMetadata


class _Thread(threading.local):
    """What a Python thread keeps from call to call: scratch that grows."""

    def __init__(self) -> None:
        self.workspace: tuple[Any, int] = (ffi.NULL, 0)  # and its bytes; lives as long as whoever holds it

    def grow(self, size: int) -> None:
        """A 64-byte aligned workspace of at least this size."""
        if self.workspace[1] < size:
            memory = np.empty(size + 64, np.uint8)
            self.workspace = ffi.from_buffer(memory[-memory.ctypes.data % 64 :]), size


thread_state = _Thread()
# By isa, kv_cache_dtype and kv_cache_layout as writes name them: what C goes by.
_meanings: dict[tuple[str, str, str], Any] = {}
_NOTHING = ffi.new("ca_meaning *", {"head_sizes": 1})
_S_AUX = _check.ATTENTION.index("s_aux")
ONLY_CHECK = (ffi.NULL, 2**63 - 1)  # a workspace without which ca_attend computes nothing


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
) -> None:
    """Writes the keys and values of T tokens into their slots, in the layout of ``isa``.

    key [T, Hkv, D], value [T, Hkv, Dv]: float32, float16 or bfloat16, last axis dense.
    key_cache, value_cache [N, Hkv, B, width]: as :func:`get_kv_cache_shape` says, same dtype; strides of N and
    Hkv are free (K and V of a block may interleave).
    kv_cache_dtype: ``auto``: as key; ``fp8_e4m3`` (``fp8``) or ``fp8_e5m2``: caches of that float8 dtype or of uint8
    hold key / k_scale and value / v_scale, rounded to nearest even, saturating, subnormals kept; ``int8``, ``int6``,
    ``int5``, ``int4_per_token_head`` or ``int4``: uint8 caches hold integers to nearest even and bfloat16 scales, one
    for each token and kv head, in ``int4`` for 32 elements of them; two of these as ``K/V``.
    k_scale, v_scale: 1 unless the cache is fp8; positive, normal and finite in float32.
    kv_cache_layout: ``packed``, or rows as they are, but of no integers: ``HND`` [N, Hkv, B, D], ``NHD``
    [N, B, Hkv, D], all strides but the last axis's free, and the same for every isa.
    kv_cache_rotation: ``hadamard``: each head of K and of V goes through an orthogonal transform first, in float32, so
    that channels which are larger than the others do not cost the others their digits (:func:`cpu_attn.rotate` says
    which; docs/quality.md what it brings); ``hadamard/none`` or ``none/hadamard``: K alone or V alone. Whoever reads
    the cache says it, too: :func:`attention_with_kv_cache` then transforms the queries and turns the output back. It is
    meant for quantised caches. Where one element of a head is not finite, the whole head comes back as NaN.
    slot_mapping: int64 [T], block * B + offset; a negative slot is skipped. Of tokens that share a slot one stays,
    whole. Whoever writes with one isa must read with the same.

    Raises ValueError or TypeError, before anything is written, for shapes, dtypes, strides, slots out of range and
    memory that overlaps, UnavailableError for an isa that is not there.
    """
    arrays = (key_cache, value_cache, key, value, slot_mapping)
    cache = (isa, k_scale, v_scale, kv_cache_dtype, kv_cache_layout, kv_cache_rotation)
    run_write(lib.ca_write, _check.WRITE, arrays, *cache)


def run_write(
    call: Any,
    names: Sequence[str],
    arrays: tuple[Any, ...],
    isa: str,
    k_scale: float,
    v_scale: float,
    kv_cache_dtype: str,
    kv_cache_layout: str,
    kv_cache_rotation: str,
    *more: Any,
) -> None:
    """more: what C takes of this call alone, behind what every write has."""
    layout, fault = _check.LAYOUTS[_check.kv_cache_layout(kv_cache_layout)], ffi.new("ca_fault *")
    kind = kv_cache_dtype if isinstance(kv_cache_dtype, str) else "?"
    rotated = _check.kv_cache_rotation(kv_cache_rotation)
    how = (layout, rotated, *_check.scales(k_scale, v_scale, (kind.split("/") * 2)[:2]), *more)
    isa = _dispatch.asked("isa", isa, "CPU_ATTN_ISA")
    asked = (isa, kind, kv_cache_layout)
    meaning = _meanings.get(asked, _NOTHING)
    addresses, given, alive = objects(arrays)
    while status := call(addresses, given, meaning, *how, fault):
        if status == lib.CA_UNNAMED:
            meaning = _meanings[asked] = _meaning(meaning, fault, isa, kv_cache_dtype, kv_cache_layout)
        else:
            addresses, given, alive = _check.reread(fault, names, arrays, given, alive)


def _meaning(before: Any, fault: Any, isa: str, kv_cache_dtype: Any, layout: str) -> Any:
    """What C knows, and what the names mean for the dtype and the head size that it asks for."""
    dtype = next(name for name, code in DTYPE_CODES.items() if code == fault.value)
    kvs = _check.kv_dtypes(kv_cache_dtype, dtype)
    resolved = _dispatch.resolve_isa(isa, dtype, fault.bound)
    _check.kv_cache_layout(layout, kvs)
    meaning = ffi.new("ca_meaning *", before[0])
    meaning.head_sizes = 16 if isa == "vec16" else 1
    meaning.of[fault.value] = {"known": 1, "isa": resolved.index, "kv_dtype": [CODES[kv][0] for kv in kvs]}
    return meaning


def attention_with_kv_cache(
    query: Any,
    key_cache: Any,
    value_cache: Any,
    output: Any,
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
) -> Any:
    """Attention of every query token over its request's pages, into ``output``, which is returned.

    query [T, Hq, D], output [T, Hq, Dv]: the plan's dtype, last axis dense, other strides free.
    key_cache, value_cache [N, Hkv, B, width]: written by :func:`reshape_and_cache` with the plan's isa, and with the
    same k_scale, v_scale and kv_cache_dtype, which is the plan's.
    kv_cache_layout: the plan's. ``HND`` and ``NHD`` are read where they lie, whoever wrote them: [N, Hkv, B, D] and
    [N, B, Hkv, D], all strides but the last axis's free; value_cache may be a view of key_cache.
    kv_cache_rotation: the plan's. The queries meet rotated keys as rotated copies, rounded to their dtype.
    query_start_loc int32 [R+1], seq_lens int32 [R], causal, sliding_window, dynamic_causal: as the plan was made for.
    scale: factor of q.k, finite in float32. softcap > 0: logits become softcap * tanh(logit / softcap); 0 is off, else
    it is within 1.18e-38..2.34e38. scale * k_scale over it, or times log2(e), is finite in float32, too.
    alibi_slopes: float32 [Hq] or None, adds slope * (key position - query position).
    block_table: int32 [R, M]; entries past the blocks that a request needs are ignored.
    s_aux: [Hq] or None, attention sinks: one logit more a head in the softmax, without a value.
    lse: float32 [Hq, T] or None: receives the natural log of the softmax's denominator, sink included.
    selected_blocks: int32 [R, Hkv, S] or None (all): which blocks of its request, columns of its row of block_table,
    a kv head attends; strictly ascending, then -1. Keys of other blocks do not count, and cost nothing; entries of
    block_table that no head selects are ignored. See :func:`cpu_attn.select_pages`.

    attn_bias: float32 [R or 1, Hq or 1, Q, K] or None: attn_bias[r, h, i, j] is added to the logit of query token i of
    request r for its key j, after softcap. Q and K are no less than what any request needs; the last axis is dense,
    the other strides are free, 0 among them. -inf hides a key from a token, though not NaN or inf in the key or its
    value; what stands for keys that a token does not see anyway is ignored.

    selected_tokens: int32 [T, S] or None (all): which keys of its request each query token attends, of those that masks
    leave it; strictly ascending, then -1. No other key is read. S is no more than the plan's max_selected_tokens: a
    plan is for calls that select tokens, or for calls that do not. Not with selected_blocks. See
    :func:`cpu_attn.select_tokens`.

    A row that sees no key gives output 0 and lse -inf (the sink, where there is one). Raises ValueError or
    TypeError, before anything is written, for whatever is out of range or differs from the plan.
    Maths: softmax(scale * q k^T + bias) v, online in float32 (arXiv:2205.14135); sinks as in GPT-OSS.
    """
    plan = _check.plan("scheduler_metadata", scheduler_metadata)
    _check.same_call(plan, sliding_window, kv_cache_dtype, kv_cache_layout, kv_cache_rotation)
    scales = _check.scales(k_scale, v_scale, plan.kv_dtypes)
    step = (query_start_loc, seq_lens, dynamic_causal)
    features = (alibi_slopes, s_aux, selected_blocks, attn_bias, selected_tokens)
    arrays = (output, lse, query, key_cache, value_cache, block_table, *step, *features)
    run_attention(plan, arrays, scale, softcap, scales, _check.boolean("causal", causal))
    return output


def attend(
    plan: SchedulerMetadata,
    query: Any,
    key_cache: Any,
    value_cache: Any,
    output: Any,
    block_table: Any,
    scale: float,
    softcap: float = 0.0,
    scales: tuple[float, float] = (1.0, 1.0),
    *,
    lse: Any = None,
    alibi_slopes: Any = None,
    s_aux: Any = None,
    selected_blocks: Any = None,
    attn_bias: Any = None,
    selected_tokens: Any = None,
) -> None:
    """:func:`attention_with_kv_cache` for who made the plan and knows its lengths to be right. scales: of K and V."""
    features = (alibi_slopes, s_aux, selected_blocks, attn_bias, selected_tokens)
    arrays = (output, lse, query, key_cache, value_cache, block_table, None, None, None, *features)
    run_attention(plan, arrays, scale, softcap, scales)


def run_attention(
    plan: SchedulerMetadata,
    arrays: tuple[Any, ...],
    scale: float,
    softcap: float,
    scales: tuple[float, float],
    causal: int = -1,
    only_check: bool = False,
) -> None:
    """The arrays are those of _check.ATTENTION. causal -1: no lengths among them, the plan's are right. only_check:
    nothing is computed."""
    thread, fault = thread_state, ffi.new("ca_fault *")
    sinks = arrays[_S_AUX]
    if sinks is not None and not (type(sinks) is np.ndarray and sinks.dtype == np.float32):
        sinks = _check.small_floats("s_aux", sinks, _check.FLOATS, plan.num_heads)
        arrays = (*arrays[:_S_AUX], sinks, *arrays[_S_AUX + 1 :])
    numbers = (causal, *_check.logit_factors(scale, softcap, scales[0]), *scales)
    addresses, given, alive = objects(arrays)
    # held here: what Python runs meanwhile (__del__) may call us, too
    room = ONLY_CHECK if only_check else thread.workspace
    while status := lib.ca_attend(plan._pointer, addresses, given, *numbers, *room, fault):
        if status == lib.CA_SMALL_WORKSPACE:
            thread.grow(plan.workspace_bytes)
            room = thread.workspace
        else:
            addresses, given, alive = _check.reread(fault, _check.ATTENTION, arrays, given, alive)


def _first(parts: Any) -> Any:
    """One of the arrays, or the one that holds all of them, which need not have items."""
    return parts[0] if isinstance(parts, (list, tuple)) else parts


def merge_states(outs: Any, lses: Any, *, out: Any = None, lse: Any = None) -> tuple[Any, Any]:
    """Attention over several sets of keys, from that over each: returns (output [T, Hq, Dv], lse [Hq, T]).

    outs: a list or tuple of [T, Hq, Dv], or one [S, T, Hq, Dv], of float32, float16 or bfloat16; lses: as many float32
    [Hq, T], as :func:`attention_with_kv_cache` writes them. The sets must not have a key in common; a sink may be in
    one part only. out, lse: written and returned where given, apart from all inputs; last axes are dense. What is
    returned else is new, tensors where the inputs are.

    lse is the log of the sum of exp(lses), output the sum of exp(lses - lse) * outs, in float32 (arXiv:2501.01005). A
    part with lse -inf, or +inf as FlashAttention 2 writes it, saw nothing and counts for nothing, NaN in its output
    neither; where all are, the output is 0 and lse -inf. NaN in a lse makes NaN of that row's output, and stays in its
    lse. Raises ValueError or TypeError, before anything is written.
    """
    parts, logs = _check.states(outs, lses)
    if out is None:
        out = new_beside(_first(outs), parts[0].shape, DTYPES[parts[0].dtype])
    if lse is None:
        lse = new_beside(_first(lses), logs[0].shape, np.float32)
    to, log = _check.merged(parts, logs, out, lse)
    lib.ca_merge_states(len(parts), described([*parts, to]), described([*logs, log]))
    return out, lse


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
    """The first seq_len tokens of one request out of its pages, plain: [seq_len, Hkv, head_size], as they are stored,
    rotated where they were; integers in float32, times their scales, exactly.

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
    if kv_cache_dtype == "auto":  # a float8 array says itself what it holds
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
