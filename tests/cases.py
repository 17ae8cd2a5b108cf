# SPDX-License-Identifier: Apache-2.0
"""The cases that tests, verify and bench share: what they are, how their arrays are made, run and judged.

    for case in cases("quick", "bfloat16"):
        problem = build(case)
        result = check(problem, *run(problem, isa="avx512", engine="native"))
        assert result.ok, result.message

Every cache starts as bytes 0xff, NaN in every dtype, so a slot that nobody wrote, a lane that pads and a block that
nobody owns poison whoever reads them. A case depends on its name, dtype and seed alone.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import cpu_attn
from cpu_attn import _dispatch, reference
from cpu_attn._dispatch import force_num_threads
from cpu_attn._native import ffi, lib

from .case_list import DTYPES, LEVELS, Case, cases, invariant
from .judge import Result, check, same_bits
from .rotation import Rotation, by_oracle, few_digits, tokens_of, write_rotated

__all__ = [
    "DTYPES",
    "KERNELS",
    "LEVELS",
    "ONE_DTYPE",
    "Case",
    "Problem",
    "Result",
    "alone",
    "build",
    "cases",
    "check",
    "invariant",
    "numpy_dtype",
    "run",
    "same_bits",
    "slots_of",
]

# (isa, dtype) of every kernel that runs here; of these one for each isa.
KERNELS = [
    (isa.name, dtype)
    for isa in cpu_attn.isas()
    for dtype in DTYPES
    if isa.supported and lib.ca_isa_kernel(isa.index, _dispatch.DTYPE_CODES[dtype], ffi.new("ca_kernel_info *"))
]
ONE_DTYPE = list({isa: (isa, dtype) for isa, dtype in reversed(KERNELS)}.values())


@dataclass
class Problem:
    """A case's arrays: query [T, Hq, D], key and value a list of [seq_len, Hkv, D or Dv] in the case's dtype, as they
    are written to the cache.
    unspecified [T, Hq]: rows that may come out as anything (their query is infinite)."""

    case: Case
    query: NDArray[Any]
    key: list[NDArray[Any]]
    value: list[NDArray[Any]]
    query_start_loc: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    block_table: NDArray[np.int32]
    num_blocks: int
    scale: float
    alibi_slopes: NDArray[np.float32] | None
    s_aux: NDArray[np.float32] | None
    dynamic_causal: NDArray[np.int32] | None
    unspecified: NDArray[np.bool_]
    selected_blocks: NDArray[np.int32] | None = None
    attn_bias: NDArray[np.float32] | None = None

    @property
    def scales(self) -> tuple[float, float]:
        """k_scale and v_scale."""
        k_scale, v_scale = (
            s if kind.startswith("fp8") else 1.0 for s, kind in zip(SCALES, kinds(self.case), strict=True)
        )
        return k_scale, k_scale if self.case.latent else v_scale

    def _stored(self, rows: list[NDArray[Any]], kind: str, scale: float) -> list[NDArray[Any]]:
        """What the cache holds, times its scale."""
        if kind.startswith("int"):
            return [integers(x, kind) for x in rows]
        if not kind.startswith("fp8"):
            return rows
        return [quantised(x, kind, scale).astype(np.float64) * scale for x in rows]

    @cached_property
    def rotation(self) -> Rotation | None:
        return None if self.case.rotary is None else Rotation.of(self.case, self.query.dtype)

    @cached_property
    def rotated(self) -> tuple[NDArray[Any], list[NDArray[Any]]]:
        """Queries and keys as they meet, and keys as the cache is to hold them."""
        return (self.query, self.key) if self.rotation is None else by_oracle(self, self.rotation)

    @cached_property
    def expected(self) -> tuple[reference.Float64, reference.Float64]:
        """The float64 oracle's output [T, Hq, Dv] and lse [Hq, T]."""
        query, key = self.rotated
        return reference.attention(
            query,
            self._stored(key, kinds(self.case)[0], self.scales[0]),
            self._stored(self.value, kinds(self.case)[1], self.scales[1]),
            self.query_start_loc,
            self.seq_lens,
            self.scale,
            self.case.causal,
            self.alibi_slopes,
            self.case.sliding_window,
            self.case.softcap,
            self.s_aux,
            self.dynamic_causal,
            **self.case.masks,
            selected_blocks=self.selected_blocks,
            block_size=self.case.block_size,
            attn_bias=self.attn_bias,
        )


# ---- arrays of a case ----

# Of quantised caches, exact in float32. K's saturates a few of a thousand normal numbers in e4m3.
SCALES = (0.00634765625, 0.37109375)
_FP8 = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


def quantised(x: NDArray[Any], kv_cache_dtype: str, scale: float) -> NDArray[Any]:
    """x / scale in float32, saturating, rounded to nearest even."""
    dtype = np.dtype(getattr(ml_dtypes, _FP8[kv_cache_dtype]))
    most = np.float32(ml_dtypes.finfo(dtype).max)
    with np.errstate(over="ignore", invalid="ignore"):
        rounded: NDArray[Any] = np.clip(x.astype(np.float32) / np.float32(scale), -most, most).astype(dtype)
    return rounded


def integers(x: NDArray[Any], kind: str) -> NDArray[np.float64]:
    """x as int8 (a scale for each row) or int4 (for each 32 of it) hold it. The scale is the largest magnitude over 127
    or 7 in float32, rounded up to bfloat16; x times its reciprocal, in float32, goes to the nearest even integer. NaN
    where a row is not finite."""
    most, step = (127, x.shape[-1]) if kind == "int8" else (7, 32)
    out = np.zeros(x.shape)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        for first in range(0, x.shape[-1], step):
            part = x[..., first : first + step].astype(np.float32)
            bits = (np.abs(part).max(axis=-1, keepdims=True) / np.float32(most)).view(np.uint32)
            scale = ((bits + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)).view(np.float32)
            scale[~np.isfinite(part).all(axis=-1)] = np.nan
            safe = np.where(scale == 0, np.float32(1), scale)
            whole = np.rint(np.where(safe >= 2.0**-126, part * (np.float32(1) / safe), part / safe))
            out[..., first : first + step] = whole.astype(np.float64) * scale
    return out


def kinds(case: Case) -> list[str]:
    """What the caches of K and of V hold."""
    return (case.kv_cache_dtype.split("/") * 2)[:2]


def numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def _fill_normal(rng: np.random.Generator, case: Case) -> tuple[Any, list[Any], list[Any], float]:
    query = rng.standard_normal((sum(case.query_lens), case.num_heads, case.head_size), np.float32)
    key = [rng.standard_normal((s, case.num_kv_heads, case.head_size), np.float32) for s in case.seq_lens]
    value = [rng.standard_normal((s, case.num_kv_heads, case.value_size), np.float32) for s in case.seq_lens]
    if case.value_size < 8:  # so few may cancel by chance, and no float sum is good relative to that
        value = [v + 1 for v in value]
    return query, key, value, float(np.float32(case.head_size**-0.5))


def _scores(logits: Any) -> Any:
    """Fills in which q.k is logits(j, seq_len), exactly in every dtype: q = (64, 0, ...), k = (logits / 64, ...)."""

    def fill(rng: np.random.Generator, case: Case) -> tuple[Any, list[Any], list[Any], float]:
        query, key, value, _ = _fill_normal(rng, case)
        query[:] = 0
        query[:, :, 0] = 64
        for k in key:
            k[:, :, 0] = (np.asarray(logits(np.arange(len(k)), len(k)), np.float32) / 64)[:, None]
        return query, key, value, 1.0

    return fill


def _fill_dominant(rng: np.random.Generator, case: Case) -> tuple[Any, list[Any], list[Any], float]:
    """One key in the middle of each request beats all others by 2**30, about the most that float16 can write."""
    query, key, value, _ = _fill_normal(rng, case)
    query /= 64
    query[:, :, 0] = 2.0**15
    for k in key:
        k[:, :, 0] = 0
        k[len(k) // 2 : len(k) // 2 + 1, :, 0] = 2.0**15
    return query, key, value, 1.0


def _fill_tiny(rng: np.random.Generator, case: Case) -> tuple[Any, list[Any], list[Any], float]:
    """Subnormal keys in every dtype, values subnormal in float16 and float32. Not in bfloat16: VDPBF16PS and
    TDPBF16PS take subnormals as 0 (Intel SDM), so its values are tiny but normal."""
    query, key, value, scale = _fill_normal(rng, case)
    info = ml_dtypes.finfo(numpy_dtype(case.dtype))
    value_scale = np.float32(1e-30) if case.dtype == "bfloat16" else np.float32(info.smallest_normal) / 8
    for k, v in zip(key, value, strict=True):
        k *= np.float32(info.smallest_normal) / 4
        v *= value_scale
    return query, key, value, scale


def _fill_large(rng: np.random.Generator, case: Case) -> tuple[Any, list[Any], list[Any], float]:
    """Values near float16's largest, far up for the others: sums must be formed in float32."""
    query, key, value, scale = _fill_normal(rng, case)
    for v in value:
        np.clip(v, -1, 1, out=v)
        v *= np.float32(6e4 if case.dtype == "float16" else 1e32)
    return query, key, value, scale


def _fill_odd_query(rng: np.random.Generator, case: Case) -> tuple[Any, list[Any], list[Any], float]:
    """NaN in one element of one query row of each request, inf in the next row."""
    query, key, value, scale = _fill_normal(rng, case)
    for first, last in _spans(case.query_lens):
        query[first : last : max(1, (last - first) // 2), 0, -1] = np.nan
        query[first + 1 : min(first + 2, last), -1, 0] = np.inf
    return query, key, value, scale


def _fill_masked(rng: np.random.Generator, case: Case) -> tuple[Any, list[Any], list[Any], float]:
    """NaN and inf in every key and value that no query token of its request may see, head by head."""
    query, key, value, scale = _fill_normal(rng, case)
    for r, (k, v) in enumerate(zip(key, value, strict=True)):
        hidden = ~case.sees(r).any(axis=0).T
        k[hidden], v[hidden] = np.nan, np.nan
        k[hidden, ..., ::2], v[hidden, ..., ::2] = np.inf, -np.inf
    return query, key, value, scale


def _fill_late(rng: np.random.Generator, case: Case) -> tuple[Any, list[Any], list[Any], float]:
    """NaN in one key and in another token's value near the end: rows that do not see that far must not know."""
    query, key, value, scale = _fill_normal(rng, case)
    for k, v in zip(key, value, strict=True):
        v[-5:-4, 0], k[-3:-2, 0] = np.nan, np.nan
    return query, key, value, scale


def _fill_nan_value(rng: np.random.Generator, case: Case) -> tuple[Any, list[Any], list[Any], float]:
    """NaN in one token's value near the end: with a window, rows that no longer see it must not know."""
    query, key, value, scale = _fill_normal(rng, case)
    for v in value:
        v[-5:-4, 0] = np.nan
    return query, key, value, scale


FILLS = {
    "normal": _fill_normal,
    "equal": _scores(lambda j, n: np.full(n, 3)),
    "negative": _scores(lambda j, n: np.where(j % 3, -4096, -4160)),
    "rising": _scores(lambda j, n: 2 * (j // 16)),  # less than exp can hold between two blocks, so p survives
    "leaping": _scores(lambda j, n: 32 * (j // 16)),
    "falling": _scores(lambda j, n: 8 * ((n - 1 - j) // 16)),
    "dominant": _fill_dominant,
    "tiny": _fill_tiny,
    "large": _fill_large,
    "odd-query": _fill_odd_query,
    "masked": _fill_masked,
    "late-nan": _fill_late,
    "nan-value": _fill_nan_value,
}


def _spans(lens: Sequence[int]) -> Iterator[tuple[int, int]]:
    ends = np.cumsum(lens, dtype=np.int64).tolist()
    return zip([0, *ends], ends, strict=False)


def _sinks(rng: np.random.Generator, case: Case) -> NDArray[np.float32] | None:
    if case.sinks is None:
        return None
    sinks = rng.standard_normal(case.num_heads).astype(np.float32) * 2
    if case.sinks == "huge":
        sinks[:] = 1e6
    elif case.sinks == "absent":
        sinks[:] = -np.inf
    elif case.sinks == "mixed":
        sinks[::3], sinks[1::3] = -np.inf, 1e6
    return sinks


def _block_table(rng: np.random.Generator, case: Case) -> tuple[NDArray[np.int32], int]:
    """Blocks in random order, some owned by nobody; entries past the needed ones are out of every range."""
    needed = [-(-s // case.block_size) for s in case.seq_lens]
    num_blocks = sum(needed) + 3
    table = rng.choice(np.array([-1, -(2**31), 2**31 - 1, num_blocks]), (len(needed), max(needed, default=0) + 2))
    table = table.astype(np.int32)
    order = rng.permutation(num_blocks)
    for r, (first, last) in enumerate(_spans(needed)):
        table[r, : last - first] = order[first:last]
    for r, (source, blocks) in enumerate(case.shared):
        table[r, :blocks] = table[source, :blocks]
    return table, num_blocks


def _selected_blocks(case: Case) -> NDArray[np.int32] | None:
    """[R, Hkv, S], S what the longest list needs, or by the name one more."""
    if case.selected is None:
        return None
    lists = [[np.flatnonzero(head) for head in case.chosen(r)] for r in range(len(case.seq_lens))]
    longest = max((len(blocks) for heads in lists for blocks in heads), default=0)
    selected = np.full((len(lists), case.num_kv_heads, longest + zlib.crc32(case.name.encode()) % 2), -1, np.int32)
    for r, heads in enumerate(lists):
        for h, blocks in enumerate(heads):
            selected[r, h, : len(blocks)] = blocks
    return selected


def _attended(problem: Problem) -> NDArray[np.int32]:
    """The block table, -1 for blocks of a request that no head selects."""
    table: NDArray[np.int32] = problem.block_table.copy()
    if problem.selected_blocks is not None:
        for row, own in zip(table, problem.selected_blocks, strict=True):
            row[~np.isin(np.arange(len(row)), own)] = -1
    return table


def _share(case: Case, rows: list[NDArray[Any]]) -> None:
    """Keys or values of blocks that a request shares are those of the request that has them first."""
    for r, (source, blocks) in enumerate(case.shared):
        n = min(blocks * case.block_size, len(rows[r]), len(rows[source]))
        rows[r][:n] = rows[source][:n]


def _attn_bias(case: Case) -> NDArray[np.float32] | None:
    """NaN wherever nobody may look: past the queries and the keys of a request, and at what a token does not see."""
    if case.bias is None:
        return None
    rng = np.random.default_rng([case.seed, zlib.crc32(case.name.encode()), 1])
    each = case.bias in ("heads", "holes")
    heads = case.num_heads if case.bias in ("heads", "batch") else 1
    queries, keys = max(case.query_lens, default=0) + 1, max(case.seq_lens, default=0) + 2
    bias: NDArray[np.float32]
    bias = rng.standard_normal((len(case.seq_lens) if each else 1, heads, queries, keys), np.float32) * 2
    seen = np.zeros((len(case.seq_lens), queries, keys), np.bool_)
    for r, (q_len, seq_len) in enumerate(zip(case.query_lens, case.seq_lens, strict=True)):
        seen[r, :q_len, :seq_len] = case.mask(r)
    if case.bias == "holes":
        bias[rng.random(bias.shape) < 0.3] = -np.inf
        bias[:, :, queries // 2] = -np.inf
    shown: NDArray[np.bool_] = seen if each else np.asarray(seen.any(axis=0, keepdims=True))
    return np.where(shown[:, None], bias, np.float32(np.nan))


def build(case: Case) -> Problem:
    """A case's arrays."""
    rng = np.random.default_rng([case.seed, zlib.crc32(case.name.encode())])
    query, key, value, scale = FILLS[case.fill](rng, case)
    if case.latent:
        value = [k[..., : case.value_size] for k in key]
    if case.rotary and case.kv_cache_dtype != "auto":
        key = few_digits(key)
    table, num_blocks = _block_table(rng, case)
    _share(case, key)
    _share(case, value)
    dtype = numpy_dtype(case.dtype)
    slopes = case.alibi * 2.0 ** (-8 * np.arange(case.num_heads) / case.num_heads)
    start = np.concatenate([[0], np.cumsum(case.query_lens)]).astype(np.int32)
    return Problem(
        case=case,
        query=query.astype(dtype),
        key=[k.astype(dtype) for k in key],
        value=[v.astype(dtype) for v in value],
        query_start_loc=start,
        seq_lens=np.array(case.seq_lens, np.int32),
        block_table=table,
        num_blocks=num_blocks,
        scale=scale,
        alibi_slopes=slopes.astype(np.float32) if case.alibi else None,
        s_aux=_sinks(rng, case),
        dynamic_causal=None if case.dynamic_causal is None else np.array(case.dynamic_causal, np.int32),
        unspecified=np.isinf(query).any(axis=2),
        selected_blocks=_selected_blocks(case),
        attn_bias=_attn_bias(case),
    )


def _of_request(bias: NDArray[np.float32] | None, r: int) -> NDArray[np.float32] | None:
    return bias if bias is None or len(bias) == 1 else bias[r : r + 1]


def alone(problem: Problem, r: int) -> Problem:
    """Request r of a problem, in the same cache and blocks, with nobody beside it."""
    case, loc = problem.case, problem.query_start_loc
    pick, rows = slice(r, r + 1), slice(int(loc[r]), int(loc[r + 1]))
    flags = None if case.dynamic_causal is None else case.dynamic_causal[pick]
    return dataclasses.replace(
        problem,
        case=dataclasses.replace(
            case,
            query_lens=case.query_lens[pick],
            seq_lens=case.seq_lens[pick],
            dynamic_causal=flags,
            mm_prefix_range=case.mm_prefix_range and case.mm_prefix_range[pick],
            document_start_loc=case.document_start_loc and case.document_start_loc[pick],
            shared=(),
        ),
        query=problem.query[rows],
        key=problem.key[pick],
        value=problem.value[pick],
        query_start_loc=loc[r : r + 2] - loc[r],
        seq_lens=problem.seq_lens[pick],
        block_table=problem.block_table[pick],
        dynamic_causal=None if problem.dynamic_causal is None else problem.dynamic_causal[pick],
        unspecified=problem.unspecified[rows],
        selected_blocks=None if problem.selected_blocks is None else problem.selected_blocks[pick],
        attn_bias=_of_request(problem.attn_bias, r),
    )


# ---- running one ----


def _wider(shape: tuple[int, ...], dtype: np.dtype[Any], strided: bool) -> NDArray[Any]:
    """NaN of this shape, the last two axes inside wider rows if strided."""
    if not strided:
        return np.full(shape, np.nan, dtype)
    *outer, rows, columns = shape
    return np.full((*outer, rows + 1, columns + 3), np.nan, dtype)[..., 1:, :columns]


def _copy(array: NDArray[Any], strided: bool) -> NDArray[Any]:
    copy = _wider(array.shape, array.dtype, strided)
    copy[...] = array
    return copy


def _forbid_outside(name: str, array: NDArray[Any], strided: bool) -> None:
    """What `_wider` put around an array must still be NaN."""
    if strided and isinstance(array.base, np.ndarray):
        wide, columns = array.base, array.shape[-1]
        if not (np.isnan(wide[..., :1, :]).all() and np.isnan(wide[..., columns:]).all()):
            raise AssertionError(f"{name}: elements outside of the array were written")


def memory_dtype(kind: str, dtype: str) -> np.dtype[Any]:
    """Of a cache that holds ``kind``."""
    if kind.startswith("int"):
        return np.dtype(np.uint8)
    return np.dtype(getattr(ml_dtypes, _FP8[kind])) if kind in _FP8 else numpy_dtype(dtype)


def _caches(problem: Problem, isa: str) -> tuple[NDArray[Any], NDArray[Any]]:
    case = problem.case
    common = (problem.num_blocks, case.block_size, case.num_kv_heads)
    layout: dict[str, Any] = {"kv_cache_layout": case.kv_cache_layout}
    (k_shape, k_dtype), (v_shape, v_dtype) = (
        (
            cpu_attn.get_kv_cache_shape(*common, size, case.dtype, isa, kind, **layout),
            memory_dtype(kind, case.dtype),
        )
        for size, kind in zip((case.head_size, case.value_size), kinds(case), strict=True)
    )
    if case.latent:
        latent = _plain_cache(k_shape, k_dtype, case.strided)
        return latent, latent[..., : case.value_size]
    if case.kv_cache_layout != "packed":
        if case.strided and k_dtype == v_dtype:
            both = _plain_cache((*k_shape[:3], case.head_size + case.value_size), k_dtype, True)
            return both[..., : case.head_size], both[..., case.head_size :]
        return _plain_cache(k_shape, k_dtype, case.strided), _plain_cache(v_shape, v_dtype, case.strided)
    if case.strided and k_shape == v_shape and k_dtype == v_dtype:
        both = _nan_bytes((k_shape[0], 2, *k_shape[1:]), k_dtype)
        return both[:, 0], both[:, 1]
    return _nan_bytes(k_shape, k_dtype), _nan_bytes(v_shape, v_dtype)


def _plain_cache(shape: tuple[int, ...], dtype: np.dtype[Any], strided: bool) -> NDArray[Any]:
    """strided: every axis has gaps, blocks run backwards."""
    if not strided:
        return _nan_bytes(shape, dtype)
    n, a, b, d = shape
    return _nan_bytes((n, a + 1, b, 2, d + 3), dtype)[::-1, 1:, :, 1, 2 : d + 2]


def _nan_bytes(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    cache = np.empty(shape, dtype)
    cache.reshape(-1).view(np.uint8)[:] = 0xFF
    return cache


def _write(problem: Problem, isa: str, key_cache: NDArray[Any], value_cache: NDArray[Any]) -> NDArray[Any]:
    """All tokens of all requests, in `pieces` calls: with one, in order; with more, shuffled, each slot first
    written with another token's key and value, and padding (slot -1, NaN) in between. Returns the queries, which a
    case may have rotated meanwhile."""
    case = problem.case
    query: NDArray[Any] = problem.query.copy()
    slots = slots_of(problem)
    if not len(slots):
        return query
    key, value = np.concatenate(problem.key), np.concatenate(problem.value)
    if case.latent:  # each column once
        value, value_cache, key_cache = key[..., case.value_size :], key_cache[..., case.value_size :], value_cache
        key = key[..., : case.value_size]
    if problem.rotation:  # queries without a key of their own come with padding
        more = len(tokens_of(problem)[0]) - len(slots)
        slots = np.append(slots, np.full(more, -1))
        key, value = (np.append(x, np.full_like(x, np.nan, shape=(more, *x.shape[1:])), axis=0) for x in (key, value))
    k_scale, v_scale = problem.scales
    how: dict[str, Any] = {"isa": isa, "k_scale": k_scale, "v_scale": v_scale, "kv_cache_dtype": case.kv_cache_dtype}

    def put(which: NDArray[np.int64], k: NDArray[Any], v: NDArray[Any], to: NDArray[np.int64]) -> None:
        tokens = (_copy(k, case.strided), _copy(v, case.strided), key_cache, value_cache, to)
        if problem.rotation:
            write_rotated(problem, problem.rotation, which, tokens, query, how)
        else:
            cpu_attn.reshape_and_cache(*tokens, **how, kv_cache_layout=case.kv_cache_layout)

    if case.pieces == 1:
        put(np.arange(len(slots)), key, value, slots)
        return query
    rng = np.random.default_rng(case.seed)
    put(np.arange(len(slots)), key, value, rng.permutation(slots))
    for part in np.array_split(rng.permutation(len(slots)), case.pieces):
        part = np.append(part, -1)
        k, v, to = key[part], value[part], slots[part]
        k[-1], v[-1], to[-1] = np.nan, np.nan, -1
        put(part, k, v, to)
    return query


def slots_of(problem: Problem) -> NDArray[np.int64]:
    """[tokens of all requests]: where each key and value lies."""
    size = problem.case.block_size
    slots = [np.zeros(0, np.int64)]
    for row, seq_len in zip(problem.block_table.astype(np.int64), problem.seq_lens, strict=True):
        j = np.arange(seq_len)
        slots.append(row[j // size] * size + j % size)
    return np.concatenate(slots)


def run(
    problem: Problem,
    isa: str = "auto",
    engine: str = "auto",
    enable_kv_split: bool = True,
    num_threads: int | None = None,
) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """Output [T, Hq, Dv] and lse [Hq, T] by the public calls. engine "onednn-python" is cpu_attn.compose.attention.
    num_threads: so many, however little there is to do."""
    before = cpu_attn.get_num_threads()
    if num_threads is not None:
        force_num_threads(num_threads)
    try:
        key_cache, value_cache = _caches(problem, isa)
        query = _write(problem, isa, key_cache, value_cache)
        return _attend(problem, query, isa, engine, enable_kv_split, key_cache, value_cache)
    finally:
        if num_threads is not None:
            cpu_attn.set_num_threads(before)


def _attend(
    problem: Problem,
    query: NDArray[Any],
    isa: str,
    engine: str,
    enable_kv_split: bool,
    key_cache: NDArray[Any],
    value_cache: NDArray[Any],
) -> tuple[NDArray[Any], NDArray[np.float32]]:
    case, dtype = problem.case, numpy_dtype(problem.case.dtype)
    query = _copy(query, case.strided)
    output = _wider((len(query), case.num_heads, case.value_size), dtype, case.strided)
    lse = _wider((case.num_heads, len(query)), np.dtype(np.float32), case.strided)
    common: dict[str, Any] = {
        "query": query,
        "key_cache": key_cache,
        "value_cache": value_cache,
        "output": output,
        "query_start_loc": problem.query_start_loc,
        "seq_lens": problem.seq_lens,
        "scale": problem.scale,
        "causal": case.causal,
        "alibi_slopes": problem.alibi_slopes,
        "sliding_window": case.sliding_window,
        "block_table": _attended(problem),
        "softcap": case.softcap,
        "s_aux": problem.s_aux,
        "dynamic_causal": problem.dynamic_causal,
        "k_scale": problem.scales[0],
        "v_scale": problem.scales[1],
        "kv_cache_dtype": case.kv_cache_dtype,
        "lse": lse,
        "selected_blocks": problem.selected_blocks,
        "kv_cache_layout": case.kv_cache_layout,
        "attn_bias": None if problem.attn_bias is None else _copy(problem.attn_bias, case.strided),
    }
    if engine == "onednn-python":
        from cpu_attn import compose

        compose.attention(**common, isa=isa, **case.masks)
    else:
        cpu_attn.attention_with_kv_cache(**common, scheduler_metadata=_plan(problem, isa, engine, enable_kv_split))
    _forbid_outside("output", output, case.strided)
    _forbid_outside("lse", lse, case.strided)
    return output, lse


def _plan(problem: Problem, isa: str, engine: str, enable_kv_split: bool) -> cpu_attn.SchedulerMetadata:
    case = problem.case
    return cpu_attn.get_scheduler_metadata(
        len(problem.seq_lens),
        case.num_heads,
        case.num_kv_heads,
        case.head_size,
        problem.seq_lens,
        numpy_dtype(case.dtype),
        problem.query_start_loc,
        case.causal,
        case.sliding_window,
        isa,
        enable_kv_split,
        problem.dynamic_causal,
        case.kv_cache_dtype,
        head_size_v=case.value_size,
        engine=engine,
        **case.masks,
        block_table=problem.block_table if case.shared else None,
        block_size=case.block_size if case.shared else None,
        kv_cache_layout=case.kv_cache_layout,
    )
