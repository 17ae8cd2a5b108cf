# SPDX-License-Identifier: Apache-2.0
"""What a case's queries, keys and values hold."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from .case import Case, ranges
from .formats import numpy_dtype


def _fill_normal(rng: np.random.Generator, case: Case) -> tuple[Any, list[Any], list[Any], float]:
    query = rng.standard_normal((sum(case.query_lens), case.num_heads, case.head_size), np.float32)
    key = [rng.standard_normal((s, case.num_kv_heads, case.head_size), np.float32) for s in case.seq_lens]
    value = [rng.standard_normal((s, case.num_kv_heads, case.value_size), np.float32) for s in case.seq_lens]
    # So few may cancel by chance, and no float sum is good relative to that.
    if case.value_size < 8 or case.num_heads * case.value_size < 32:
        value = [v * np.float32(0.25) + 1 for v in value]
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
    """One key in the middle of each request beats all others by 2**30, about the most that float16 can write; in
    bfloat16, whose kernels may scale what they have summed, by more, and by what is no float."""
    query, key, value, _ = _fill_normal(rng, case)
    query /= 64
    query[:, :, 0] = 2.0**15
    for k in key:
        k[:, :, 0] = 0
        k[len(k) // 2 : len(k) // 2 + 1, :, 0] = 141 * 2.0**8
    return query, key, value, float(np.float32(256 + 256 * rng.random())) if case.dtype == "bfloat16" else 1.0


def _fill_tiny(rng: np.random.Generator, case: Case) -> tuple[Any, list[Any], list[Any], float]:
    """Subnormal keys in every dtype, and subnormal values in float16. Those of the others count as 0, so their values
    are tiny but normal."""
    query, key, value, scale = _fill_normal(rng, case)
    info = ml_dtypes.finfo(numpy_dtype(case.dtype))
    value_scale = np.float32(info.smallest_normal) / 8 if case.dtype == "float16" else np.float32(1e-30)
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
    for first, last in ranges(case.query_lens):
        query[first : last : max(1, (last - first) // 2), 0, -1] = np.nan
        query[first + 1 : min(first + 2, last), -1, 0] = np.inf
    return query, key, value, scale


def _fill_masked(rng: np.random.Generator, case: Case) -> tuple[Any, list[Any], list[Any], float]:
    """NaN and inf in every key and value that no query token of its request may see, head by head."""
    query, key, value, scale = _fill_normal(rng, case)
    for r, (k, v) in enumerate(zip(key, value, strict=True)):
        seen = case.sees(r).any(axis=0).reshape(case.num_kv_heads, -1 if len(k) else 0, len(k))
        hidden = ~seen.any(axis=1).T
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
