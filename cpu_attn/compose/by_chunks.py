# SPDX-License-Identifier: Apache-2.0
"""This module composes paged attention in plain Python of three calls: gather_pages, matmul, softmax. It is to read and
to experiment with.

This is native/engines/onednn/segment.c without threads, buckets and packing. A request's query tokens are taken ROWS
query rows at a time (a decode step is a single token), its keys KEYS at a time:

    s = q k^T              matmul      [rows, D] x [keys, D]^T
    softcap, ALiBi, mask   NumPy
    p = softmax(s)         softmax     over these keys alone
    o = p v                matmul      [rows, keys] x [keys, Dv]

Results over different keys merge by their log-sum-exps: with l = log(exp(l1) + exp(l2)),

    o = exp(l1 - l) o1 + exp(l2 - l) o2

(arXiv:2205.14135; the sink, arXiv:2309.17453, is one more l2 without an o2.) softmax keeps no log-sum-exp, but the
largest score s* tells it: p* = exp(s* - lse). No array grows with rows times context.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from cpu_attn.compose.step import Arguments, Array, checked
from cpu_attn.primitives import gather_pages, matmul, softmax

ROWS, KEYS = 256, 512
CHAIN = 128  # keys that one float32 sum may have: native/engines/onednn/segment.c


def attention(
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
    s_aux: Any = None,
    dynamic_causal: Any = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    kv_cache_dtype: str = "auto",
    *,
    lse: Any = None,
    isa: str = "auto",
    kv_cache_layout: str = "packed",
) -> Any:
    """Does what :func:`cpu_attn.attention_with_kv_cache` does with these arguments, without a plan: shapes, dtypes,
    meaning and errors are the same.

    isa: the one that the caches were written with. It runs on the calling thread, in float32; output and lse are
    written when all of it is done. It has none of the other masks and selections, and reads no rotated caches. It
    raises UnavailableError where oneDNN is not there.
    """
    arrays = {"query": query, "key_cache": key_cache, "value_cache": value_cache, "output": output, "lse": lse}
    arrays |= {"query_start_loc": query_start_loc, "seq_lens": seq_lens, "dynamic_causal": dynamic_causal}
    arrays |= {"block_table": block_table, "alibi_slopes": alibi_slopes, "s_aux": s_aux}
    cache = {"isa": isa, "kv_cache_dtype": kv_cache_dtype, "kv_cache_layout": kv_cache_layout}
    step = checked(arrays, cache, scale, causal, sliding_window, softcap, k_scale, v_scale)
    result, result_lse = np.zeros(step.output.shape), np.zeros(step.query.shape[:2])
    at_once = max(1, ROWS // step.group)
    with np.errstate(all="ignore"):
        for r, (start, stop) in enumerate(pairwise(step.query_start_loc.tolist())):
            for first in range(start, stop, at_once):
                rows = slice(first, min(first + at_once, stop))
                result[rows], result_lse[rows] = _some_tokens(step, r, rows)
    step.output[...] = result
    if step.lse is not None:
        step.lse[...] = result_lse.T
    return output


def _some_tokens(step: Arguments, r: int, rows: slice) -> tuple[Array, Array]:
    """Gives output [n, Hq, Dv] and lse [n, Hq] of some of request r's tokens."""
    query = step.query[rows].astype(np.float32)
    output, lse = np.zeros(step.output[rows].shape), np.full(query.shape[:2], -np.inf)
    for keys, key, value in _chunks(step, r, rows):
        mask = (step.sees[rows, :1] <= keys) & (keys < step.sees[rows, 1:])
        distance = (keys - step.position[rows, None]).astype(np.float32)
        bias = step.alibi_slopes[:, None] * distance[:, None]
        for h in range(key.shape[1]):
            heads = slice(h * step.group, (h + 1) * step.group)
            part = _one_head(step, query[:, heads], key[:, h], value[:, h], mask, bias[:, heads])
            output[:, heads], lse[:, heads] = _merge(output[:, heads], lse[:, heads], *part)
    return _merge(output, lse, np.zeros_like(output), np.broadcast_to(step.s_aux, lse.shape))


def _chunks(step: Arguments, r: int, rows: slice) -> Iterator[tuple[Array, Array, Array]]:
    """Gives key numbers [n], K [n, Hkv, D] and V [n, Hkv, Dv] in float32, KEYS at a time, of all keys that some of the
    tokens see."""
    block_size, sizes = step.block_size, (step.query.shape[2], step.output.shape[2])
    first_seen, end = int(step.sees[rows, 0].min()), int(step.sees[rows, 1].max())
    for first in range(first_seen, end, KEYS):
        last = min(first + KEYS, end)
        begin = first // block_size * block_size  # of the first page
        pages, found = step.block_table[r, first // block_size : -(-last // block_size)], []
        for i, (cache, scale) in enumerate(zip(step.caches, step.scales, strict=True)):
            x = gather_pages(cache, pages, last - begin, head_size=sizes[i], value=i == 1, **step.cache)
            found.append(x[first - begin :].astype(np.float32) * np.float32(scale))
        yield np.arange(first, last), *found


def _one_head(step: Arguments, query: Array, key: Array, value: Array, mask: Array, bias: Array) -> tuple[Array, Array]:
    """Gives output [n, group, Dv] and lse [n, group] over these keys alone, of query [n, group, D], key [keys, D],
    value [keys, Dv], mask [n, keys] and bias [n, group, keys]."""
    n, group, head_size = query.shape
    product, _ = matmul(query.reshape(n * group, head_size) * np.float32(step.scale), key, transpose_b=True)
    s = product.reshape(n, group, -1)
    if step.softcap > 0:
        s = np.float32(step.softcap) * np.tanh(s / np.float32(step.softcap))
    s = np.where(mask[:, None], s + bias, np.float32(-np.inf))
    p, _ = softmax(s)
    largest = s.argmax(axis=2)[:, :, None]
    top, p_top = (np.take_along_axis(x, largest, axis=2)[:, :, 0].astype(np.float64) for x in (s, p))
    lse = np.where(top == -np.inf, -np.inf, top - np.log(p_top))
    return _weighted_sum(p, value, mask), lse


def _weighted_sum(p: Array, value: Array, mask: Array) -> Array:
    """Multiplies p [n, group, keys] by value [keys, Dv]. A weight of 0 does not hide NaN or inf: a key that holds one
    and that not all rows see is left out of the product and added to the rows that see it."""
    n, group, num_keys = p.shape
    odd = np.logical_not(mask.all(axis=0) | np.isfinite(value).all(axis=1))
    weights, known = p.reshape(n * group, num_keys), np.where(odd[:, None], np.float32(0), value)
    chains = (slice(i, i + CHAIN) for i in range(0, num_keys, CHAIN))
    output: Array = np.sum([matmul(weights[:, c], known[c])[0] for c in chains], axis=0).reshape(n, group, -1)
    for j in np.flatnonzero(odd):
        output[mask[:, j]] += p[mask[:, j], :, j, None] * value[j]
    return output


def _merge(output: Array, lse: Array, other: Array, other_lse: Array) -> tuple[Array, Array]:
    total = np.logaddexp(lse, other_lse)
    weight, other_weight = (np.where(total == -np.inf, 0.0, np.exp(x - total))[..., None] for x in (lse, other_lse))
    return weight * output + other_weight * other, total
