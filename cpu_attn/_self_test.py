# SPDX-License-Identifier: Apache-2.0
"""This module compares a few small calls of an isa with the float64 oracle: ``auto`` takes a matrix isa only where they
agree."""

from __future__ import annotations

from itertools import cycle

import numpy as np

from cpu_attn import _dispatch, profiling, reference
from cpu_attn._dtypes import DTYPES, FORMATS
from cpu_attn.ops import attention_with_kv_cache, reshape_and_cache
from cpu_attn.plan import get_kv_cache_shape, get_scheduler_metadata

# The requests are a prompt, a decode over more than one score block, and a chunk of a prompt.
QUERY_LENS, SEQ_LENS = (40, 1, 20), (40, 600, 75)
HEADS, KV_HEADS, SIZE, BLOCK = 6, 2, 64, 16
# Each row is a format of a cache, the number that is furthest from 0 in it, and after how many elements that number
# comes again. So each scale of integers is 1, and quantising loses nothing.
CACHES = (
    ("auto", 127, SIZE),
    *((kv, -row.zero or row.largest, row.shared or SIZE) for kv, row in FORMATS.items() if row.scaled),
)


def fault(isa: str, dtype: str) -> str:
    """Says what is wrong with the results of this isa for this dtype, "" if nothing is."""
    for softcap, (kv_cache_dtype, furthest, every) in zip(cycle((0.0, 5.0)), CACHES):
        with profiling.unrecorded():
            error = _errors(isa, dtype, kv_cache_dtype, furthest, every, softcap)
        if not error <= 1:  # also where it is NaN
            return f"over a cache of {kv_cache_dtype} its error is {error:.3g} of the budget"
    return ""


def _errors(isa: str, dtype: str, kv_cache_dtype: str, furthest: int, every: int, softcap: float) -> float:
    """Gives the worst error of output and lse in units of the budget."""
    rng = np.random.default_rng(0)
    start = np.concatenate([[0], np.cumsum(QUERY_LENS)]).astype(np.int32)
    seq_lens = np.array(SEQ_LENS, np.int32)
    query = rng.standard_normal((start[-1], HEADS, SIZE)).astype(DTYPES[dtype])
    keys, values = ([_numbers(rng, n, furthest, every) for n in SEQ_LENS] for _ in "kv")
    scale = 1 / (abs(furthest) * SIZE**0.5)

    blocks = -(-seq_lens // BLOCK)
    table = np.zeros((len(SEQ_LENS), blocks.max()), np.int32)
    table[np.arange(blocks.max()) < blocks[:, None]] = rng.permutation(blocks.sum())
    slots = [table[r, np.arange(n) // BLOCK] * BLOCK + np.arange(n) % BLOCK for r, n in enumerate(SEQ_LENS)]
    shape = get_kv_cache_shape(int(blocks.sum()), BLOCK, KV_HEADS, SIZE, dtype, isa, kv_cache_dtype)
    key_cache, value_cache = (np.zeros(shape, DTYPES[dtype] if kv_cache_dtype == "auto" else np.uint8) for _ in "kv")
    k, v = (np.concatenate(rows).astype(DTYPES[dtype]) for rows in (keys, values))
    reshape_and_cache(k, v, key_cache, value_cache, np.concatenate(slots), isa, kv_cache_dtype=kv_cache_dtype)

    plan = get_scheduler_metadata(
        len(SEQ_LENS),
        HEADS,
        KV_HEADS,
        SIZE,
        seq_lens,
        dtype,
        start,
        isa=isa,
        engine="native",
        kv_cache_dtype=kv_cache_dtype,
    )
    output, lse = np.empty(query.shape, query.dtype), np.empty((HEADS, start[-1]), np.float32)
    attention_with_kv_cache(
        query,
        key_cache,
        value_cache,
        output,
        start,
        seq_lens,
        scale,
        True,
        None,
        -1,
        table,
        softcap,
        plan,
        kv_cache_dtype=kv_cache_dtype,
        lse=lse,
    )
    wanted, wanted_lse = reference.attention(query, keys, values, start, seq_lens, scale, True, softcap=softcap)
    off = np.abs(lse - wanted_lse) / np.maximum(1, np.abs(wanted_lse)) / reference.LSE_BUDGET[dtype]
    errors = reference.relative_rms(output, wanted, start) / reference.BUDGET[dtype]
    return float(np.maximum(errors.max(), off.max()))


def _numbers(rng: np.random.Generator, n: int, furthest: int, every: int) -> reference.Float64:
    """Gives [n, KV_HEADS, SIZE] random whole numbers."""
    most = furthest if furthest > 0 else -furthest - 1
    x = rng.integers(-most, most, (n, KV_HEADS, SIZE), endpoint=True).astype(np.float64)
    x[..., ::every] = furthest
    return x


_dispatch.set_self_test(fault)
