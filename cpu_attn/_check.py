# SPDX-License-Identifier: Apache-2.0
"""Every check of foreign input: shapes, dtypes, strides, aliases here; what indices hold in native/check.c,
whose findings :func:`raise_fault` turns into exceptions. All of it runs before a byte is written."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from cpu_attn import _dispatch
from cpu_attn._arrays import CODES, Array, described, view
from cpu_attn._native import ffi, lib

INT32_MAX = 2**31 - 1
MAX_SIZE = 2**16  # of heads and head sizes: keeps every product of sizes within int64
FLOATS = ("float32", "float16", "bfloat16")
LAYOUTS = {"packed": lib.CA_PACKED, "HND": lib.CA_HND, "NHD": lib.CA_NHD}  # the last two: vLLM's names
# What a narrow cache holds: vLLM's names and ours, what they mean, and the dtypes that its memory may have.
NARROW = {"fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2", "int8": "int8", "int4": "int4"}
MEMORY = {
    "fp8_e4m3": ("float8_e4m3fn", "uint8"),
    "fp8_e5m2": ("float8_e5m2", "uint8"),
    "int8": ("uint8",),
    "int4": ("uint8",),
}


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


@functools.cache
def _kv_dtypes(kv_cache_dtype: str, dtype: str) -> tuple[str, ...]:
    names = kv_cache_dtype.split("/")
    found = tuple(dtype if name in ("auto", dtype) else NARROW.get(name, "") for name in names)
    return found * (3 - len(names)) if all(found) and len(names) < 3 else ()


def kv_dtypes(kv_cache_dtype: Any, dtype: Any) -> tuple[str, ...]:
    """What the caches of K and of V hold: ``dtype``, or a name of MEMORY."""
    found = _kv_dtypes(kv_cache_dtype, str(dtype)) if isinstance(kv_cache_dtype, str) else ()
    if not found:
        raise ValueError(
            f"kv_cache_dtype: {kv_cache_dtype!r} is none of 'auto', the dtype {str(dtype)!r}, {', '.join(NARROW)}, nor "
            "two of them as 'K/V'"
        )
    return found


def same_kv_dtypes(plan: Any, kv_cache_dtype: Any) -> None:
    if kv_cache_dtype == "auto" and not plan.narrow:
        return
    if kv_dtypes(kv_cache_dtype, plan.dtype) != plan.kv_dtypes:
        made_for = "/".join(dict.fromkeys(plan.kv_dtypes))
        raise ValueError(f"kv_cache_dtype: {kv_cache_dtype!r}, scheduler_metadata was made for {made_for}")


def kv_cache_layout(x: Any, kvs: Sequence[str] = ()) -> str:
    """kvs: what the caches are to hold, as kv_dtypes says it."""
    if not isinstance(x, str) or x not in LAYOUTS:
        raise ValueError(f"kv_cache_layout: {x!r} is none of {', '.join(LAYOUTS)}")
    for kv in kvs:
        if x != "packed" and kv in ("int8", "int4"):
            raise ValueError(f"kv_cache_layout: {x!r} holds no {kv}")
    return x


def same_kv_cache_layout(plan: Any, layout: Any) -> None:
    if layout != plan.kv_cache_layout:
        kv_cache_layout(layout)
        raise ValueError(f"kv_cache_layout: {layout!r}, scheduler_metadata was made for {plan.kv_cache_layout!r}")


def memory(kv: str) -> tuple[str, ...]:
    """The dtypes that an array may have whose memory holds ``kv``."""
    return MEMORY.get(kv, (kv,))


def scales(k_scale: Any, v_scale: Any, kvs: Sequence[str]) -> tuple[float, float]:
    """Both as floats: positive, and 1 unless the cache is fp8. kvs: what kv_dtypes says."""
    if type(k_scale) is float and type(v_scale) is float and k_scale == v_scale == 1.0:
        return k_scale, v_scale
    found = number("k_scale", k_scale), number("v_scale", v_scale)
    for name, x, kv in zip(("k_scale", "v_scale"), found, kvs, strict=True):
        if not kv.startswith("fp8") and x != 1.0:
            holds = "integers with scales of their own" if kv in MEMORY else "plain numbers"
            raise ValueError(f"{name}: {x} applies to fp8 caches, this one holds {holds}; expected 1.0")
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


class Masks(NamedTuple):
    """Masks besides causal and window: spans int32 [n, 3] request, first and last key; documents int32 [m, 2] request,
    first key; both in ascending order."""

    spans: np.ndarray[Any, Any]
    documents: np.ndarray[Any, Any]
    tree: Array | None


def masks(num_reqs: int, mm_prefix_range: Any, document_start_loc: Any, tree_mask: Any) -> Masks | None:
    """What get_scheduler_metadata was given of them, None: nothing. native/masks.c looks at what depends on lengths."""
    if mm_prefix_range is None and document_start_loc is None and tree_mask is None:
        return None
    if tree_mask is not None:
        for name, x in (("mm_prefix_range", mm_prefix_range), ("document_start_loc", document_start_loc)):
            if x is not None:
                raise ValueError(f"tree_mask: does not go with {name}")
        tree = array("tree_mask", tree_mask, ["uint8"], [("T", None), ("W", None)])
        return Masks(np.zeros((0, 3), np.int32), np.zeros((0, 2), np.int32), tree)
    spans = _by_request("mm_prefix_range", mm_prefix_range, num_reqs, _spans)
    documents = _by_request("document_start_loc", document_start_loc, num_reqs, _documents)
    for r, found in spans.items():
        for (start, end), (border,) in product(found, documents.get(r, ())):
            if start < border <= end:
                raise ValueError(f"mm_prefix_range[{r}]: ({start}, {end}) crosses the start of a document, {border}")
    return Masks(_flat(spans, 3), _flat(documents, 2), None)


Ranges = list[tuple[int, ...]]


def _flat(found: dict[int, Ranges], width: int) -> np.ndarray[Any, Any]:
    return np.array([(r, *x) for r, some in found.items() for x in some], np.int32).reshape(-1, width)


def _by_request(name: str, x: Any, num_reqs: int, read: Callable[[str, Any], Ranges]) -> dict[int, Ranges]:
    """A mapping by request, ascending."""
    if x is None:
        return {}
    if not isinstance(x, Mapping):
        raise TypeError(f"{name}: expected a mapping by request, got {type(x).__name__}")
    found: dict[int, Ranges] = {}
    for key, some in x.items():
        r = integer(f"{name}: request", key, 0, num_reqs - 1)
        if r in found:
            raise ValueError(f"{name}: request {r} is named twice")
        found[r] = read(f"{name}[{r}]", _sequence(f"{name}[{r}]", some))
    return dict(sorted(found.items()))


def _sequence(name: str, x: Any) -> list[Any]:
    if not isinstance(x, (Sequence, np.ndarray)) or isinstance(x, (str, bytes)):
        raise TypeError(f"{name}: expected a sequence, got {type(x).__name__}")
    return list(x)


def _spans(name: str, x: list[Any]) -> Ranges:
    """(start, end), end inclusive, as vLLM has them: ascending, apart."""
    found: Ranges = []
    for i, pair in enumerate(x):
        ends = _sequence(f"{name}[{i}]", pair)
        if len(ends) != 2:
            raise ValueError(f"{name}[{i}]: expected (start, end), got {len(ends)} values")
        start = integer(f"{name}[{i}][0]", ends[0], found[-1][1] + 1 if found else 0)
        found.append((start, integer(f"{name}[{i}][1]", ends[1], start)))
    return found


def _documents(name: str, x: list[Any]) -> Ranges:
    """Where documents start: at 0, then ever later."""
    found: Ranges = []
    for i, start in enumerate(x):
        found.append((integer(f"{name}[{i}]", start, found[-1][0] + 1 if found else 0, INT32_MAX if found else 0),))
    if not found:
        raise ValueError(f"{name}: is empty, the first document starts at 0")
    return found


def step(num_reqs: int, *arrays: Any) -> tuple[Array | None, ...]:
    """The arrays that a plan is made of: lengths, and a block table or None."""
    *three, table = arrays
    axes = [("num_reqs", num_reqs), ("blocks", None)]
    return *lengths(num_reqs, *three), None if table is None else array("block_table", table, ["int32"], axes)


def table_block_size(block_table: Any, block_size: Any) -> int:
    if block_table is None or block_size is None:
        given, missing = ("block_size", "block_table") if block_table is None else ("block_table", "block_size")
        raise ValueError(f"{missing}: is None, {given} is given; a plan takes both or neither")
    return integer("block_size", block_size, 1)


def same_call(plan: Any, sliding_window: Any, kv_cache_dtype: Any, kv_cache_layout: Any) -> None:
    """What the plan was made for. Said in the same words it is not looked at any further: 0.1 us instead of 0.6."""
    words = (sliding_window, kv_cache_dtype, kv_cache_layout)
    if type(sliding_window) in (int, tuple) and words == plan._words:
        return
    shape = plan._shape
    asked, planned = window(sliding_window), (shape.window_left, shape.window_right)
    if asked != planned and not (shape.all_causal and asked[0] == planned[0]):  # a causal request never looks right
        raise ValueError(f"sliding_window: {sliding_window}, scheduler_metadata was made for (left, right) = {planned}")
    same_kv_dtypes(plan, kv_cache_dtype)
    same_kv_cache_layout(plan, kv_cache_layout)


def selected_blocks(x: Any, num_reqs: int, num_kv_heads: int) -> Array | None:
    axes = [("num_reqs", num_reqs), ("num_kv_heads", num_kv_heads), ("blocks", None)]
    return None if x is None else array("selected_blocks", x, ["int32"], axes)


def block_table(plan: Any, table: Array, num_blocks: int, block_size: int, selected: Array | None = None) -> None:
    """Every block that the plan will look for is there; those selected are blocks of their requests."""
    fault, columns = new_fault(), table.shape[1]
    address, stride = pointer("int32_t *", table), table.strides[0]
    chosen = described([selected])
    lib.ca_check_table(plan._pointer, address, stride, columns, num_blocks, block_size, chosen, fault)
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
    a = array(name, x, memory(kv), axes)
    if cache_sizes(a.shape, layout)[2] < 1:
        raise ValueError(f"{name}: block_size is 0, expected at least 1")
    if layout == "packed" and a.size and a.shape[2] > 1 and a.strides[2] != a.shape[3]:
        raise ValueError(f"{name}: axis 2 has stride {a.strides[2]}, expected {a.shape[3]}: a block must be dense")
    return a


def caches(
    key_cache: Any, value_cache: Any, kvs: Sequence[str], num_kv_heads: int | None, layout: str
) -> tuple[Array, Array]:
    """Both, of the same sizes but for the last axis."""
    k = cache("key_cache", key_cache, kvs[0], num_kv_heads, None, None, layout)
    num_blocks, num_kv_heads, block_size = cache_sizes(k.shape, layout)
    return k, cache("value_cache", value_cache, kvs[1], num_kv_heads, num_blocks, block_size, layout)


def cache_sizes(axes: Sequence[int], layout: str) -> tuple[int, int, int]:
    """Of a cache's shape num_blocks, num_kv_heads and block_size; of its strides theirs."""
    n, h, b = axes[:3]
    return (n, b, h) if layout == "NHD" else (n, h, b)


def pages(arrays: Sequence[Any], shapes: Sequence[tuple[int, ...]], kvs: Sequence[str]) -> list[np.ndarray[Any, Any]]:
    """The memory of K and of V, which has these shapes, as NumPy arrays."""
    found = {}
    for name, x, kv, (num_blocks, num_kv_heads, block_size, expected) in zip(
        ("key_cache", "value_cache"), arrays, kvs, shapes, strict=True
    ):
        a = found[name] = cache(name, x, kv, num_kv_heads, num_blocks, block_size)
        if a.shape[3] != expected:
            raise ValueError(f"{name}: axis 3 is {a.shape[3]}, expected {expected}")
    disjoint("key_cache", found["key_cache"], {"value_cache": found["value_cache"]})
    return [
        np.asarray(x) if isinstance(x, np.ndarray) else a.numpy() for x, a in zip(arrays, found.values(), strict=True)
    ]


def width(isa: int, dtype: int, kv: str, block_size: int, head_size: int) -> int:
    """Last axis of a cache so that a block of block_size * width elements holds K or V in the isa's layout."""
    sizes = (lib.ca_block_elements(isa, dtype, CODES[kv][0], block_size, head_size, v) for v in (0, 1))
    return -(-max(map(int, sizes)) // block_size)


def cache_width(name: str, a: Array, isa: int, dtype: int, kv: str, head_size: int, layout: str = "packed") -> None:
    if layout != "packed":
        if a.shape[3] != head_size:
            raise ValueError(f"{name}: axis 3 is {a.shape[3]}, expected head_size = {head_size} in layout {layout}")
        return
    expected = width(isa, dtype, kv, a.shape[2], head_size)
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
_FEATURES = ("alibi_slopes", "s_aux", "selected_blocks", "attn_bias")
ATTENTION = ("output", "lse", "query", "key_cache", "value_cache", "block_table", *STEP, *_FEATURES)
WRITE = ("key_cache", "value_cache", "key", "value", "slot_mapping")
_TURNS = ("positions", "cos_sin_cache", "q_weight", "k_weight")
ROTARY = ("key_cache", "value_cache", "query_out", "query", "key", "value", "slot_mapping", *_TURNS)


def attention(plan: Any, arrays: Sequence[Any], same_step: bool) -> list[Array | None]:
    """``arrays`` as ATTENTION names them, of shapes and dtypes that fit the plan, apart from one another.
    same_step: lengths are among them."""
    output, lse, query, key_cache, value_cache, table, starts, lens, flags, slopes, sinks, selected, bias = arrays
    shape, dtype, tokens = plan._shape, str(plan.dtype), ("T", plan.num_tokens)
    heads = ("num_heads", shape.num_heads)
    if same_step:
        starts, lens, flags = lengths(plan.num_reqs, starts, lens, flags)
    q = array("query", query, [dtype], [tokens, heads, ("head_size", shape.head_size)])
    out = writable("output", array("output", output, [dtype], [tokens, heads, ("head_size_v", shape.head_size_v)]))
    (k_dtype, v_dtype), layout = plan.kv_dtypes, plan.kv_cache_layout
    kc, vc = caches(key_cache, value_cache, plan.kv_dtypes, shape.num_kv_heads, layout)
    cache_width("key_cache", kc, shape.isa, shape.dtype, k_dtype, shape.head_size, layout)
    cache_width("value_cache", vc, shape.isa, shape.dtype, v_dtype, shape.head_size_v, layout)
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
        selected_blocks(selected, shape.num_reqs, shape.num_kv_heads),
        attn_bias(plan, bias),
    ]
    apart(ATTENTION, found, 2)
    return found


def attn_bias(plan: Any, x: Any) -> Array | None:
    """[R or 1, Hq or 1, Q, K], Q and K no less than what any request of the plan needs."""
    if x is None:
        return None
    a = array("attn_bias", x, ["float32"], [("num_reqs", None), ("num_heads", None), ("Q", None), ("K", None)])
    for axis, (what, size) in enumerate((("num_reqs", plan.num_reqs), ("num_heads", plan.num_heads))):
        if a.shape[axis] not in (1, size):
            raise ValueError(f"attn_bias: axis {axis} is {a.shape[axis]}, expected {what} = {size}, or 1")
    fault = new_fault()
    lib.ca_check_bias(plan._pointer, described([a]), fault)
    raise_fault(fault)
    return a


def write(
    arrays: Sequence[Any], isa: str, kv_cache_dtype: Any, layout: str = "packed"
) -> tuple[list[Array | None], int, tuple[str, ...]]:
    """``arrays`` as WRITE names them, of shapes and dtypes that fit one another, the index of the isa, and what the
    caches hold."""
    key_cache, value_cache, key, value, slot_mapping = arrays
    k = array("key", key, FLOATS, [("T", None), ("num_kv_heads", None), ("head_size", None)])
    tokens, heads, head_size = k.shape
    v = array("value", value, [k.dtype], [("T", tokens), ("num_kv_heads", heads), ("head_size_v", None)])
    for name, a in (("key", k), ("value", v)):
        integer(f"{name}: head size", a.shape[2], 1, MAX_SIZE)
    integer("key: num_kv_heads", heads, 1, MAX_SIZE)
    k_dtype, v_dtype = kvs = kv_dtypes(kv_cache_dtype, k.dtype)
    resolved, code = _dispatch.resolve_isa(isa, k.dtype, head_size), _dispatch.DTYPE_CODES[k.dtype]
    kv_cache_layout(layout, kvs)
    kc, vc = caches(key_cache, value_cache, kvs, heads, layout)
    cache_width("key_cache", writable("key_cache", kc), resolved.index, code, k_dtype, head_size, layout)
    cache_width("value_cache", writable("value_cache", vc), resolved.index, code, v_dtype, v.shape[2], layout)
    found: list[Array | None] = [kc, vc, k, v, array("slot_mapping", slot_mapping, ["int64"], [("T", tokens)])]
    apart(WRITE, found, 2)
    return found, resolved.index, kvs


def rotary(arrays: Sequence[Any], isa: str, kv_cache_dtype: Any) -> tuple[list[Array | None], int, tuple[str, ...]]:
    """The same of ``arrays`` as ROTARY names them."""
    key_cache, value_cache, query_out, query, key, value, slot_mapping, positions, cos_sin_cache, *weights = arrays
    (kc, vc, k, v, slots), index, kvs = write((key_cache, value_cache, key, value, slot_mapping), isa, kv_cache_dtype)
    assert k is not None
    tokens, head_size, dtypes = ("T", k.shape[0]), ("head_size", k.shape[2]), list(dict.fromkeys(("float32", k.dtype)))
    q = array("query", query, [k.dtype], [tokens, ("num_heads", None), head_size])
    heads = ("num_heads", integer("query: num_heads", q.shape[1], 1, MAX_SIZE))
    name = "query" if query_out is query else "query_out"
    out = writable(name, array(name, query_out, [k.dtype], [tokens, heads, head_size]))
    table = array("cos_sin_cache", cos_sin_cache, dtypes, [("max_position", None), ("rot_dim", None)])
    if integer("cos_sin_cache: rot_dim", table.shape[1], 2, head_size[1]) % 2:
        raise ValueError(f"cos_sin_cache: rot_dim is {table.shape[1]}, expected an even number")
    found: list[Array | None] = [kc, vc, out, q, k, v, slots, array("positions", positions, ["int64"], [tokens]), table]
    for what, weight in zip(_TURNS[2:], weights, strict=True):
        found.append(None if weight is None else array(what, weight, dtypes, [head_size]))
    in_place = (out.address, out.strides) == (q.address, q.strides)
    apart(ROTARY, [None if in_place and a is q else a for a in found], 3)
    return found, index, kvs


BOUNDS = ("page_min", "page_max", "key", "slot_mapping")
SCORES = ("scores", "query", "page_min", "page_max", "block_table", "query_start_loc", "seq_lens")


def bounds(page_min: Any, page_max: Any, dtypes: Sequence[str]) -> tuple[Array, Array]:
    """Both [N, Hkv, D]."""
    low = array("page_min", page_min, dtypes, [("num_blocks", None), ("num_kv_heads", None), ("head_size", None)])
    blocks, heads, head_size = low.shape
    sizes = [("num_blocks", blocks), ("num_kv_heads", heads), ("head_size", head_size)]
    integer("page_min: num_kv_heads", heads, 1, MAX_SIZE)
    integer("page_min: head_size", head_size, 1, MAX_SIZE)
    return low, array("page_max", page_max, [low.dtype], sizes)


def update_page_bounds(key: Any, slot_mapping: Any, page_min: Any, page_max: Any) -> list[Array | None]:
    """The arrays as BOUNDS names them."""
    low, high = bounds(page_min, page_max, FLOATS)
    k = array("key", key, [low.dtype], [("T", None), ("num_kv_heads", low.shape[1]), ("head_size", low.shape[2])])
    slots = array("slot_mapping", slot_mapping, ["int64"], [("T", k.shape[0])])
    found: list[Array | None] = [writable("page_min", low), writable("page_max", high), k, slots]
    apart(BOUNDS, found, 2)
    return found


def score_pages(
    query: Any, page_min: Any, page_max: Any, block_table: Any, seq_lens: Any, query_start_loc: Any
) -> list[Array | None]:
    """The arrays as SCORES names them, but for the first, which is new."""
    q = array("query", query, FLOATS, [("T", None), ("num_heads", None), ("head_size", None)])
    low, high = bounds(page_min, page_max, [q.dtype])
    if q.shape[2] != low.shape[2]:
        raise ValueError(f"page_min: axis 2 is {low.shape[2]}, expected head_size = {q.shape[2]}")
    integer("query: num_heads", q.shape[1], 1, MAX_SIZE)
    if q.shape[1] % low.shape[1]:
        raise ValueError(f"page_min: {low.shape[1]} kv heads do not divide num_heads = {q.shape[1]}")
    table = array("block_table", block_table, ["int32"], [("num_reqs", None), ("blocks", None)])
    starts, lens, _ = lengths(table.shape[0], query_start_loc, seq_lens, None)
    if starts.numpy()[-1] != q.shape[0]:
        raise ValueError(f"query: axis 0 is {q.shape[0]}, expected query_start_loc[-1] = {starts.numpy()[-1]}")
    return [None, q, low, high, table, starts, lens]


def _parts(name: str, x: Any) -> list[Any]:
    """A sequence of arrays, or the arrays along the first axis of one."""
    found = list(x if isinstance(x, (list, tuple)) else view(name, x).numpy())
    if not found:
        raise ValueError(f"{name}: no parts, expected at least one")
    return found


def states(outs: Any, lses: Any) -> tuple[list[Array], list[Array]]:
    """Outputs [T, Hq, Dv] of one dtype and lses [Hq, T] of several sets of keys."""
    parts, logs = _parts("outs", outs), _parts("lses", lses)
    if len(parts) != len(logs):
        raise ValueError(f"lses: {len(logs)} parts, outs has {len(parts)}")
    axes: list[tuple[str, int | None]] = [("T", None), ("num_heads", None), ("head_size_v", None)]
    first = array("outs[0]", parts[0], FLOATS, axes)
    axes = [(what, size) for (what, _), size in zip(axes, first.shape, strict=True)]
    return (
        [array(f"outs[{i}]", x, [first.dtype], axes) for i, x in enumerate(parts)],
        [array(f"lses[{i}]", x, ["float32"], [axes[1], axes[0]]) for i, x in enumerate(logs)],
    )


def merged(parts: Sequence[Array], logs: Sequence[Array], out: Any, lse: Any) -> tuple[Array, Array]:
    """Where states go to: of their shapes, apart from them."""
    tokens, heads, size = zip(("T", "num_heads", "head_size_v"), parts[0].shape, strict=True)
    to = writable("out", array("out", out, [parts[0].dtype], [tokens, heads, size]))
    log = writable("lse", array("lse", lse, ["float32"], [heads, tokens]))
    inputs: dict[str, Array | None] = {f"outs[{i}]": a for i, a in enumerate(parts)}
    inputs |= {f"lses[{i}]": a for i, a in enumerate(logs)}
    disjoint("out", to, {"lse": log, **inputs})
    disjoint("lse", log, inputs)
    return to, log


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
        raise MemoryError("no memory for the call")
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
            lib.CA_BAD_POSITION: f"positions[{position}]: {value}, outside 0..{bound - 1} (rows of cos_sin_cache)",
            lib.CA_OTHER_LENGTHS: f"query_start_loc[{position}]: {value}, scheduler_metadata was made for {bound}",
            lib.CA_OTHER_SEQ_LENS: f"seq_lens[{position}]: {value}, scheduler_metadata was made for {bound}",
            lib.CA_OTHER_BLOCK_SIZE: f"key_cache: block_size is {value}, scheduler_metadata was made for {bound}",
            lib.CA_OTHER_BLOCKS: f"block_table: {where}position {position} holds block {value}, not {bound} as a "
            f"request that shares it; scheduler_metadata was made for other block tables",
            lib.CA_OTHER_CAUSAL: f"causal: {where}is {bool(value)}, scheduler_metadata was made for {bool(bound)}",
            lib.CA_TREE_TOKENS: f"tree_mask: axis 0 is {value}, expected T = {bound}",
            lib.CA_TREE_NARROW: f"tree_mask: {where}{value} query tokens, a row has {bound} bits",
            lib.CA_TREE_NOT_CAUSAL: f"tree_mask: {where}is not causal",
            lib.CA_TREE_ALIBI: "alibi_slopes: scheduler_metadata was made for a tree_mask, where a token's place among "
            "the keys is not its position",
            lib.CA_TOKENS_WITHOUT_KEYS: f"seq_lens[{position}]: {value}, expected at least the request's {bound} query "
            "tokens, whose own keys its mask goes by",
            lib.CA_SELECTED_SHARED: "selected_blocks: scheduler_metadata shares prefixes between requests, which may "
            "select other blocks of them; make it without block_table",
            lib.CA_BAD_SELECTED: f"selected_blocks: {where}kv head {fault.kv_head}: position {position} holds block "
            f"{value}, outside 0..{bound - 1} (the request has {bound} blocks); -1 pads the end",
            lib.CA_BIAS_SMALL: f"attn_bias: {where}axis {position} is {value}, expected at least the request's {bound} "
            f"{'keys' if position == 3 else 'query tokens'}",
            lib.CA_SELECTED_ORDER: f"selected_blocks: {where}kv head {fault.kv_head}: position {position} holds block "
            f"{value} after {bound}, expected ascending blocks, then -1",
        }[fault.status]
    )


def new_fault() -> Any:
    return ffi.new("ca_fault *")
