# SPDX-License-Identifier: Apache-2.0
"""Every check of foreign input: shapes, dtypes, strides, aliases here; what indices hold in native/check.c,
whose findings :func:`raise_fault` turns into exceptions. All of it runs before a byte is written."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cpu_attn import _dispatch
from cpu_attn._arrays import Array, view
from cpu_attn._native import ffi, lib

INT32_MAX = 2**31 - 1
MAX_SIZE = 2**16  # of heads and head sizes: keeps every product of sizes within int64
FLOATS = ("float32", "float16", "bfloat16")
FP8 = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}  # vLLM's names
LAYOUTS = {"packed": lib.CA_PACKED, "HND": lib.CA_HND, "NHD": lib.CA_NHD}  # the last two: vLLM's names


def integer(name: str, x: Any, low: int, high: int = INT32_MAX) -> int:
    """``x`` as an int in [low, high]."""
    if type(x) is int and low <= x <= high:
        return x
    if isinstance(x, (bool, np.bool_)):
        raise TypeError(f"{name}: expected an integer, got {x!r}")
    try:
        value = operator.index(x)
    except TypeError:
        raise TypeError(f"{name}: expected an integer, got {type(x).__name__}") from None
    if not low <= value <= high:
        raise ValueError(f"{name}: {value} is outside {low}..{high}")
    return value


def number(name: str, x: Any, low: float = -math.inf) -> float:
    """``x`` as a float that is finite in float32 and at least ``low``."""
    if type(x) is float and low <= x and -3.4e38 <= x <= 3.4e38:
        return x
    if isinstance(x, (str, bytes, bool)):
        raise TypeError(f"{name}: expected a number, got {x!r}")
    try:
        value = float(x)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: expected a number, got {type(x).__name__}") from None
    if not abs(value) <= 3.4e38 or value < low:
        raise ValueError(f"{name}: {value} is not a finite float32" + (f" >= {low}" if low > -math.inf else ""))
    return value


def plan(name: str, x: Any) -> Any:
    if type(x).__name__ != "SchedulerMetadata":
        raise TypeError(f"{name}: expected get_scheduler_metadata's result, got {type(x).__name__}")
    return x


def boolean(name: str, x: Any) -> bool:
    if x is True or x is False:
        return x
    if isinstance(x, np.bool_) or (isinstance(x, (int, np.integer)) and x in (0, 1)):
        return bool(x)
    raise TypeError(f"{name}: expected True or False, got {x!r}")


def window(x: Any) -> tuple[int, int]:
    """(left, right) keys visible beside the query, -1 for all; from vLLM's int (own key counted) or a pair."""
    if isinstance(x, (tuple, list)):
        if len(x) != 2:
            raise ValueError(f"sliding_window: expected (left, right), got {len(x)} values")
        return integer("sliding_window[0]", x[0], -1), integer("sliding_window[1]", x[1], -1)
    size = integer("sliding_window", x, -1)
    if size == 0:
        raise ValueError("sliding_window: 0 would see nothing; -1 turns it off, w counts the query's own key")
    return (-1, -1) if size == -1 else (size - 1, size - 1)


def kv_dtype(kv_cache_dtype: Any, dtype: Any) -> str:
    """The dtype of the cache's memory."""
    name = str(dtype)
    if isinstance(kv_cache_dtype, str):
        if kv_cache_dtype in ("auto", name):
            return name
        if kv_cache_dtype in FP8:
            return FP8[kv_cache_dtype]
    raise ValueError(f"kv_cache_dtype: {kv_cache_dtype!r} is none of 'auto', the dtype {name!r}, {', '.join(FP8)}")


def same_kv_dtype(plan: Any, kv_cache_dtype: Any) -> None:
    if kv_cache_dtype == "auto" and not plan.narrow:
        return
    asked = kv_dtype(kv_cache_dtype, plan.dtype)
    if asked != plan.kv_dtype:
        raise ValueError(f"kv_cache_dtype: {kv_cache_dtype!r}, scheduler_metadata was made for {plan.kv_dtype}")


def kv_cache_layout(x: Any) -> str:
    if isinstance(x, str) and x in LAYOUTS:
        return x
    raise ValueError(f"kv_cache_layout: {x!r} is none of {', '.join(LAYOUTS)}")


def same_kv_cache_layout(plan: Any, layout: Any) -> None:
    if layout != plan.kv_cache_layout:
        kv_cache_layout(layout)
        raise ValueError(f"kv_cache_layout: {layout!r}, scheduler_metadata was made for {plan.kv_cache_layout!r}")


def cache_dtypes(kv: str) -> list[str]:
    """What an array may call a cache that holds ``kv``: fp8 passes as bytes, too."""
    return [kv] if kv in FLOATS else [kv, "uint8"]


def scales(k_scale: Any, v_scale: Any, narrow: bool) -> tuple[float, float]:
    """Both as floats: positive, and 1 unless the cache is quantised."""
    if type(k_scale) is float and type(v_scale) is float and k_scale == v_scale == 1.0:
        return k_scale, v_scale
    found = number("k_scale", k_scale), number("v_scale", v_scale)
    for name, x in zip(("k_scale", "v_scale"), found, strict=True):
        if not narrow and x != 1.0:
            raise ValueError(f"{name}: {x} applies to quantised caches, this one holds plain numbers; expected 1.0")
        if x < 1.2e-38:
            raise ValueError(f"{name}: {x} is not a positive, normal float32")
    return found


def array(name: str, x: Any, dtypes: Sequence[str], axes: Sequence[tuple[str, int | None]]) -> Array:
    """``x`` as memory of one of the dtypes and of the shape ``axes`` = (what, size or None: any), last axis dense."""
    a = view(name, x)
    if a.dtype not in dtypes:
        raise TypeError(f"{name}: dtype {a.dtype}, expected {' or '.join(dtypes)}")
    if len(a.shape) != len(axes):
        raise ValueError(f"{name}: {len(a.shape)} axes, expected {len(axes)}: [{', '.join(w for w, _ in axes)}]")
    for i, (size, (what, expected)) in enumerate(zip(a.shape, axes, strict=True)):
        if expected is not None and size != expected:
            raise ValueError(f"{name}: axis {i} is {size}, expected {what} = {expected}")
        if size > INT32_MAX:
            raise ValueError(f"{name}: axis {i} is {size}, more than {INT32_MAX}")
    if a.shape[-1] > 1 and a.strides[-1] != 1 and a.size:
        raise ValueError(f"{name}: the last axis has stride {a.strides[-1]}, expected 1 (dense)")
    return a


def small_floats(name: str, x: Any, dtypes: Sequence[str], num_heads: int) -> np.ndarray[Any, Any] | None:
    """A float32 copy of one number for each query head."""
    if x is None:
        return None
    a = array(name, x, dtypes, [("num_heads", num_heads)])
    return np.ascontiguousarray(a.numpy().astype(np.float32))


def lengths(
    num_reqs: int, query_start_loc: Any, seq_lens: Any, dynamic_causal: Any
) -> tuple[Array, Array, Array | None]:
    """The three int32 arrays that say which requests a step has."""
    reqs = [("num_reqs", num_reqs)]
    lens = array("seq_lens", seq_lens, ["int32"], reqs)
    starts = array("query_start_loc", query_start_loc, ["int32"], [("num_reqs + 1", num_reqs + 1)])
    return starts, lens, None if dynamic_causal is None else array("dynamic_causal", dynamic_causal, ["int32"], reqs)


def same_window(plan: Any, sliding_window: Any) -> None:
    """A causal request never looks right."""
    shape = plan._shape
    asked, planned = window(sliding_window), (shape.window_left, shape.window_right)
    if asked != planned and not (shape.all_causal and asked[0] == planned[0]):
        raise ValueError(f"sliding_window: {sliding_window}, scheduler_metadata was made for (left, right) = {planned}")


def block_table(plan: Any, table: Array, num_blocks: int, block_size: int) -> None:
    """Every block that the plan will look for is there."""
    fault = new_fault()
    columns = table.shape[1]
    lib.ca_check_table(
        plan._pointer, pointer("int32_t *", table), table.strides[0], columns, num_blocks, block_size, fault
    )
    raise_fault(fault)


def pointer(kind: str, a: Array | np.ndarray[Any, Any] | None) -> Any:
    """``a`` as a C pointer; the caller keeps ``a`` alive."""
    if a is None:
        return ffi.NULL
    return ffi.cast(kind, a.address if isinstance(a, Array) else a.ctypes.data)


def cache(
    name: str,
    x: Any,
    kv: str,
    num_kv_heads: int | None,
    num_blocks: int | None,
    block_size: int | None,
    layout: str = "packed",
) -> Array:
    """A cache [N, Hkv, B, width], or [N, B, Hkv, D] (NHD). Strides are free; a packed block of a head is dense."""
    axes = [("num_blocks", num_blocks), ("num_kv_heads", num_kv_heads), ("block_size", block_size), ("width", None)]
    if layout == "NHD":
        axes[1], axes[2] = axes[2], axes[1]
    a = array(name, x, cache_dtypes(kv), axes)
    if cache_sizes(a.shape, layout)[2] < 1:
        raise ValueError(f"{name}: block_size is 0, expected at least 1")
    if layout == "packed" and a.size and a.shape[2] > 1 and a.strides[2] != a.shape[3]:
        raise ValueError(f"{name}: axis 2 has stride {a.strides[2]}, expected {a.shape[3]}: a block must be dense")
    return a


def caches(key_cache: Any, value_cache: Any, kv: str, num_kv_heads: int | None, layout: str) -> tuple[Array, Array]:
    """Both, of the same sizes but for the last axis."""
    k = cache("key_cache", key_cache, kv, num_kv_heads, None, None, layout)
    num_blocks, num_kv_heads, block_size = cache_sizes(k.shape, layout)
    return k, cache("value_cache", value_cache, kv, num_kv_heads, num_blocks, block_size, layout)


def cache_sizes(axes: Sequence[int], layout: str) -> tuple[int, int, int]:
    """Of a cache's shape num_blocks, num_kv_heads and block_size; of its strides theirs."""
    n, h, b = axes[:3]
    return (n, b, h) if layout == "NHD" else (n, h, b)


def width(isa: int, dtype: int, block_size: int, head_size: int) -> int:
    """Last axis of a cache so that a block of block_size * width elements holds K or V in the isa's layout."""
    most = max(int(lib.ca_block_elements(isa, dtype, block_size, head_size, v)) for v in (0, 1))
    return -(-most // block_size)


def cache_width(name: str, a: Array, isa: int, dtype: int, head_size: int, layout: str = "packed") -> None:
    if layout != "packed":
        if a.shape[3] != head_size:
            raise ValueError(f"{name}: axis 3 is {a.shape[3]}, expected head_size = {head_size} in layout {layout}")
        return
    expected = width(isa, dtype, a.shape[2], head_size)
    if a.shape[3] != expected:
        raise ValueError(
            f"{name}: axis 3 is {a.shape[3]}, expected {expected} for head_size {head_size} and block_size "
            f"{a.shape[2]} on this isa (get_kv_cache_shape says what to allocate)"
        )


def writable(name: str, a: Array) -> Array:
    """Memory that may be written and in which no two elements coincide."""
    if not a.writable:
        raise ValueError(f"{name}: is read-only")
    extent = 1
    for stride, size in sorted((abs(s), n) for s, n in zip(a.strides, a.shape, strict=True) if n > 1):
        if stride < extent and a.size:
            raise ValueError(f"{name}: strides {a.strides} over shape {a.shape} make elements overlap")
        extent += stride * (size - 1)
    return a


def disjoint(name: str, a: Array, others: Mapping[str, Array | None]) -> None:
    """No byte of ``a`` may be one of another array's."""
    first, end = a.extent()
    for other, b in others.items():
        if b is None or not a.size or not b.size:
            continue
        b_first, b_end = b.extent()
        if first < b_end and b_first < end and _shared(a, b):
            raise ValueError(f"{name}: shares memory with {other}")


def _shared(a: Array, b: Array) -> bool:
    try:
        return bool(np.shares_memory(a.numpy(), b.numpy(), max_work=100_000))  # type: ignore[arg-type]  # the stub knows only 0 and -1
    except np.exceptions.TooHardError:
        return True


# The arrays of a call, in the order that native/cpu_attn.h has them in too: those that it writes first.
STEP = ("query_start_loc", "seq_lens", "dynamic_causal")
ATTENTION = ("output", "lse", "query", "key_cache", "value_cache", "block_table", *STEP, "alibi_slopes", "s_aux")
WRITE = ("key_cache", "value_cache", "key", "value", "slot_mapping")


def attention(plan: Any, arrays: Sequence[Any], same_step: bool) -> list[Array | None]:
    """``arrays`` as ATTENTION names them, of shapes and dtypes that fit the plan, apart from one another.
    same_step: lengths are among them."""
    output, lse, query, key_cache, value_cache, table, starts, lens, flags, slopes, sinks = arrays
    shape, dtype, tokens = plan._shape, str(plan.dtype), ("T", plan.num_tokens)
    heads = ("num_heads", shape.num_heads)
    if same_step:
        starts, lens, flags = lengths(plan.num_reqs, starts, lens, flags)
    q = array("query", query, [dtype], [tokens, heads, ("head_size", shape.head_size)])
    out = writable("output", array("output", output, [dtype], [tokens, heads, ("head_size_v", shape.head_size_v)]))
    kc, vc = caches(key_cache, value_cache, plan.kv_dtype, shape.num_kv_heads, plan.kv_cache_layout)
    cache_width("key_cache", kc, shape.isa, shape.dtype, shape.head_size, plan.kv_cache_layout)
    cache_width("value_cache", vc, shape.isa, shape.dtype, shape.head_size_v, plan.kv_cache_layout)
    found: list[Array | None] = [
        out,
        None if lse is None else writable("lse", array("lse", lse, ["float32"], [heads, tokens])),
        q,
        kc,
        vc,
        array("block_table", table, ["int32"], [("num_reqs", shape.num_reqs), ("blocks", None)]),
        starts,
        lens,
        flags,
        None if slopes is None else array("alibi_slopes", slopes, ["float32"], [heads]),
        None if sinks is None else array("s_aux", sinks, ["float32"], [heads]),
    ]
    apart(ATTENTION, found, 2)
    return found


def write(arrays: Sequence[Any], isa: str, kv_cache_dtype: Any, layout: str) -> tuple[list[Array | None], int, str]:
    """``arrays`` as WRITE names them, of shapes and dtypes that fit one another, the index of the isa, and the dtype
    of the cache."""
    key_cache, value_cache, key, value, slot_mapping = arrays
    k = array("key", key, FLOATS, [("T", None), ("num_kv_heads", None), ("head_size", None)])
    tokens, heads, head_size = k.shape
    v = array("value", value, [k.dtype], [("T", tokens), ("num_kv_heads", heads), ("head_size_v", None)])
    for name, a in (("key", k), ("value", v)):
        integer(f"{name}: head size", a.shape[2], 1, MAX_SIZE)
    integer("key: num_kv_heads", heads, 1, MAX_SIZE)
    kv = kv_dtype(kv_cache_dtype, k.dtype)
    resolved, code = _dispatch.resolve_isa(isa, k.dtype, head_size), _dispatch.DTYPE_CODES[k.dtype]
    kc, vc = caches(key_cache, value_cache, kv, heads, layout)
    cache_width("key_cache", writable("key_cache", kc), resolved.index, code, head_size, layout)
    cache_width("value_cache", writable("value_cache", vc), resolved.index, code, v.shape[2], layout)
    found: list[Array | None] = [kc, vc, k, v, array("slot_mapping", slot_mapping, ["int64"], [("T", tokens)])]
    apart(WRITE, found, 2)
    return found, resolved.index, kv


def apart(names: Sequence[str], arrays: Sequence[Array | None], num_outputs: int) -> None:
    """The first num_outputs arrays share no byte with one another or with the rest."""
    for i in range(num_outputs):
        a = arrays[i]
        if a is not None:
            disjoint(names[i], a, dict(zip(names[i + 1 :], arrays[i + 1 :], strict=True)))


def raise_fault(fault: Any) -> None:
    """The exception for what native/check.c found, if it found anything."""
    if fault.status == lib.CA_OK:
        return
    if fault.status == lib.CA_NO_MEMORY:
        raise MemoryError("no memory for the plan")
    if fault.status == lib.CA_ENGINE_FAILED:
        from cpu_attn import _onednn_loader  # the only engine that can fail

        raise RuntimeError(f"engine onednn: {_onednn_loader.status_text(fault.value)}")
    request, position, value, bound = fault.request, fault.position, fault.value, fault.bound
    where = f"request {request}: " if request >= 0 else ""
    raise ValueError(
        {
            lib.CA_BAD_QUERY_START_LOC: f"query_start_loc[{position}]: {where}{value}, expected at least {bound}"
            if position
            else f"query_start_loc[0]: {value}, expected 0",
            lib.CA_TOO_MANY_TASKS: f"query_start_loc: {value} blocks of query tokens, a plan holds {bound}",
            lib.CA_BAD_SEQ_LEN: f"seq_lens[{position}]: {value}, expected at least 0",
            lib.CA_BAD_BLOCK: f"block_table: {where}position {position} holds block {value}, outside 0..{bound - 1} "
            f"(num_blocks {bound})",
            lib.CA_BLOCK_TABLE_SHORT: f"block_table: {where}needs {value} blocks, the table has {bound} columns",
            lib.CA_BAD_SLOT: f"slot_mapping[{position}]: {value}, expected less than num_blocks * block_size = {bound}",
            lib.CA_OTHER_LENGTHS: f"query_start_loc[{position}]: {value}, scheduler_metadata was made for {bound}",
            lib.CA_OTHER_SEQ_LENS: f"seq_lens[{position}]: {value}, scheduler_metadata was made for {bound}",
            lib.CA_OTHER_CAUSAL: f"causal: {where}is {bool(value)}, scheduler_metadata was made for {bool(bound)}",
        }[fault.status]
    )


def new_fault() -> Any:
    return ffi.new("ca_fault *")
