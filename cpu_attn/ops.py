# SPDX-License-Identifier: Apache-2.0
"""The calls that move data: vLLM's names, order and meaning (``cpu_attn_reshape_and_cache``,
``cpu_attention_with_kv_cache`` in its ``_custom_ops.py``). The plan is made in :mod:`cpu_attn.plan`."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from cpu_attn import _check, _dispatch
from cpu_attn._arrays import DTYPES, Array
from cpu_attn._native import ffi, lib
from cpu_attn.plan import SchedulerMetadata

_local = threading.local()


def _workspace(size: int) -> Any:
    """64-byte aligned scratch of this Python thread; it grows, and goes with the thread."""
    memory = getattr(_local, "memory", None)
    if memory is None or memory.size < size + 64:
        memory = _local.memory = np.empty(size + 64, np.uint8)
        _local.address = ffi.cast("void *", -(-memory.ctypes.data // 64) * 64)
    return _local.address


def _cache_struct(a: Array, isa: int, dtype: int, head_size: int) -> Any:
    cache = ffi.new("ca_cache *")
    cache.data = ffi.cast("void *", a.address)
    cache.stride_n, cache.stride_h = a.strides[:2]
    cache.num_blocks, cache.num_kv_heads, cache.block_size = a.shape[:3]
    cache.head_size, cache.dtype, cache.isa = head_size, dtype, isa
    return cache


def _rows_struct(a: Array) -> Any:
    rows = ffi.new("ca_rows *")
    rows.data = ffi.cast("void *", a.address)
    rows.stride_t, rows.stride_h = a.strides[:2]
    return rows


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
) -> None:
    """Writes the keys and values of T tokens into their slots, in the layout of ``isa``.

    key [T, Hkv, D], value [T, Hkv, Dv]: float32, float16 or bfloat16, last axis dense.
    key_cache, value_cache [N, Hkv, B, width]: as :func:`get_kv_cache_shape` says, same dtype; strides of N and
    Hkv are free (K and V of a block may interleave).
    slot_mapping: int64 [T], block * B + offset; a negative slot is skipped. Of tokens that share a slot one stays,
    whole. Whoever writes with one isa must read with the same.

    Raises ValueError or TypeError, before anything is written, for shapes, dtypes, strides, slots out of range and
    memory that overlaps.
    """
    k = _check.array("key", key, _check.FLOATS, [("T", None), ("num_kv_heads", None), ("head_size", None)])
    tokens, heads, head_size = k.shape
    v = _check.array("value", value, [k.dtype], [("T", tokens), ("num_kv_heads", heads), ("head_size_v", None)])
    for name, a in (("key", k), ("value", v)):
        _check.integer(f"{name}: head size", a.shape[2], 1, _check.MAX_SIZE)
    _check.integer("key: num_kv_heads", heads, 1, _check.MAX_SIZE)
    _check.kv_dtype(kv_cache_dtype, k.dtype)
    _check.scales(k_scale, v_scale)
    resolved, code = _dispatch.resolve_isa(isa, k.dtype, head_size), _dispatch.DTYPE_CODES[k.dtype]
    kc = _check.writable("key_cache", _check.cache("key_cache", key_cache, k.dtype, heads, None, None))
    vc = _check.writable(
        "value_cache", _check.cache("value_cache", value_cache, k.dtype, heads, kc.shape[0], kc.shape[2])
    )
    _check.cache_width("key_cache", kc, resolved.index, code, head_size)
    _check.cache_width("value_cache", vc, resolved.index, code, v.shape[2])
    slots = _check.array("slot_mapping", slot_mapping, ["int64"], [("T", tokens)])
    sources = {"key": k, "value": v, "slot_mapping": slots}
    _check.disjoint("key_cache", kc, {**sources, "value_cache": vc})
    _check.disjoint("value_cache", vc, sources)
    fault = _check.new_fault()
    lib.ca_write(
        _cache_struct(kc, resolved.index, code, head_size),
        _cache_struct(vc, resolved.index, code, v.shape[2]),
        _rows_struct(k),
        _rows_struct(v),
        _check.pointer("int64_t *", slots),
        tokens,
        fault,
    )
    _check.raise_fault(fault)


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
) -> Any:
    """Attention of every query token over its request's pages, into ``output``, which is returned.

    query [T, Hq, D], output [T, Hq, Dv]: the plan's dtype, last axis dense, other strides free.
    key_cache, value_cache [N, Hkv, B, width]: written by :func:`reshape_and_cache` with the plan's isa.
    query_start_loc int32 [R+1], seq_lens int32 [R], causal, sliding_window, dynamic_causal: as the plan was made for.
    scale: factor of q.k. softcap > 0: logits become softcap * tanh(logit / softcap); 0 is off.
    alibi_slopes: float32 [Hq] or None, adds slope * (key position - query position).
    block_table: int32 [R, M]; entries past the blocks that a request needs are ignored.
    s_aux: [Hq] or None, attention sinks: one logit more a head in the softmax, without a value.
    lse: float32 [Hq, T] or None: receives the natural log of the softmax's denominator, sink included.

    A row that sees no key gives output 0 and lse -inf (the sink, where there is one). Raises ValueError or
    TypeError, before anything is written, for whatever is out of range or differs from the plan.
    Maths: softmax(scale * q k^T + bias) v, online in float32 (arXiv:2205.14135); sinks as in GPT-OSS.
    """
    plan = _check.plan("scheduler_metadata", scheduler_metadata)
    lens, starts, flags = _check.lengths(plan.num_reqs, seq_lens, query_start_loc, dynamic_causal)
    _check.same_step(plan, starts, lens, flags, causal, sliding_window)
    _check.kv_dtype(kv_cache_dtype, str(plan.dtype))
    _check.scales(k_scale, v_scale)
    return attend(
        plan,
        query,
        key_cache,
        value_cache,
        output,
        block_table,
        scale=scale,
        alibi_slopes=alibi_slopes,
        softcap=softcap,
        s_aux=s_aux,
        lse=lse,
        untouchable={"query_start_loc": starts, "seq_lens": lens, "dynamic_causal": flags},
    )


def attend(
    plan: SchedulerMetadata,
    query: Any,
    key_cache: Any,
    value_cache: Any,
    output: Any,
    block_table: Any,
    *,
    scale: float,
    alibi_slopes: Any,
    softcap: float,
    s_aux: Any,
    lse: Any,
    untouchable: dict[str, Array | None] | None = None,
) -> Any:
    """:func:`attention_with_kv_cache` after the plan has been found to fit; ``untouchable`` must not be written."""
    shape, dtype, tokens = plan._shape, str(plan.dtype), plan.num_tokens
    heads, head_size, head_size_v = shape.num_heads, shape.head_size, shape.head_size_v
    q = _check.array("query", query, [dtype], [("T", tokens), ("num_heads", heads), ("head_size", head_size)])
    out = _check.array("output", output, [dtype], [("T", tokens), ("num_heads", heads), ("head_size_v", head_size_v)])
    kc = _check.cache("key_cache", key_cache, dtype, shape.num_kv_heads, None, None)
    vc = _check.cache("value_cache", value_cache, dtype, shape.num_kv_heads, kc.shape[0], kc.shape[2])
    _check.cache_width("key_cache", kc, shape.isa, shape.dtype, head_size)
    _check.cache_width("value_cache", vc, shape.isa, shape.dtype, head_size_v)
    table = _check.array("block_table", block_table, ["int32"], [("num_reqs", shape.num_reqs), ("blocks", None)])
    slopes = _check.small_floats("alibi_slopes", alibi_slopes, ["float32"], heads)
    sinks = _check.small_floats("s_aux", s_aux, _check.FLOATS, heads)
    inputs = {"query": q, "key_cache": kc, "value_cache": vc, "block_table": table, **(untouchable or {})}
    _check.disjoint("output", _check.writable("output", out), inputs)

    call = ffi.new("ca_call *")
    if lse is not None:
        log = _check.array("lse", lse, ["float32"], [("num_heads", heads), ("T", tokens)])
        _check.disjoint("lse", _check.writable("lse", log), {**inputs, "output": out})
        call.lse, call.lse_stride_h = _check.pointer("float *", log), log.strides[0]
    call.query, (call.q_stride_t, call.q_stride_h) = _check.pointer("void *", q), q.strides[:2]
    call.output, (call.o_stride_t, call.o_stride_h) = _check.pointer("void *", out), out.strides[:2]
    call.key_cache, (call.k_stride_n, call.k_stride_h) = _check.pointer("void *", kc), kc.strides[:2]
    call.value_cache, (call.v_stride_n, call.v_stride_h) = _check.pointer("void *", vc), vc.strides[:2]
    call.num_blocks, _, call.block_size, _ = kc.shape
    call.block_table = _check.pointer("int32_t *", table)
    call.table_stride, call.table_cols = table.strides[0], table.shape[1]
    call.alibi_slopes, call.s_aux = _check.pointer("float *", slopes), _check.pointer("float *", sinks)
    call.scale, call.softcap = _check.number("scale", scale), _check.number("softcap", softcap, 0.0)
    fault = _check.new_fault()
    lib.ca_attend(plan._pointer, call, _workspace(plan.workspace_bytes), fault)
    _check.raise_fault(fault)
    return output


def gather(
    cache: Any, block_table: Any, seq_len: int, head_size: int, isa: str = "auto", *, value: bool, out: Any = None
) -> np.ndarray[Any, Any]:
    """The first seq_len tokens of one request out of its pages, plain: [seq_len, Hkv, head_size].

    cache [N, Hkv, B, width] as written with ``isa``; block_table int32 [M]; value: a value cache, else a key cache.
    """
    first = _check.array("cache", cache, _check.FLOATS, [(w, None) for w in ("N", "Hkv", "B", "width")])
    head_size = _check.integer("head_size", head_size, 1, _check.MAX_SIZE)
    resolved, code = _dispatch.resolve_isa(isa, first.dtype, head_size), _dispatch.DTYPE_CODES[first.dtype]
    pages = _check.cache("cache", cache, first.dtype, None, None, None)
    _check.cache_width("cache", pages, resolved.index, code, head_size)
    table = _check.array("block_table", block_table, ["int32"], [("blocks", None)])
    seq_len = _check.integer("seq_len", seq_len, 0)
    if out is None:
        if -(-seq_len // pages.shape[2]) > table.shape[0]:
            raise ValueError(f"block_table: needs {-(-seq_len // pages.shape[2])} blocks, has {table.shape[0]}")
        out = np.empty((seq_len, pages.shape[1], head_size), DTYPES[first.dtype])
    rows = _check.array(
        "out", out, [first.dtype], [("seq_len", seq_len), ("num_kv_heads", pages.shape[1]), ("head_size", head_size)]
    )
    _check.disjoint("out", _check.writable("out", rows), {"cache": pages, "block_table": table})
    fault = _check.new_fault()
    lib.ca_gather(
        _cache_struct(pages, resolved.index, code, head_size),
        value,
        _check.pointer("int32_t *", table),
        table.shape[0],
        seq_len,
        _rows_struct(rows),
        fault,
    )
    _check.raise_fault(fault)
    return out  # type: ignore[no-any-return]
