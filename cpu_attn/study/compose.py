# SPDX-License-Identifier: Apache-2.0
"""This module composes paged attention in plain Python of three calls: gather_pages, matmul, softmax. It is to read and
to experiment with.

This is native/engines/onednn/segment.c without threads, buckets and packing. A request's query tokens are taken ROWS
query rows at a time (a decode step is a single token), its keys KEYS at a time:

    s = q k^T                   matmul      [rows, D] x [keys, D]^T
    softcap, ALiBi, bias, mask  NumPy
    p = softmax(s)              softmax     over these keys alone
    o = p v                     matmul      [rows, keys] x [keys, Dv]

Results over different keys merge by their log-sum-exps: with l = log(exp(l1) + exp(l2)),

    o = exp(l1 - l) o1 + exp(l2 - l) o2

(arXiv:2205.14135; the sink, arXiv:2309.17453, is one more l2 without an o2.) softmax keeps no log-sum-exp, but the
largest score s* tells it: p* = exp(s* - lse). No array grows with rows times context.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from cpu_attn.rotation import rotate
from cpu_attn.study.masks import Array, chosen_tokens
from cpu_attn.study.primitives import gather_pages, matmul, softmax
from cpu_attn.study.step import Step, checked

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
    mm_prefix_range: Mapping[int, Sequence[tuple[int, int]]] | None = None,
    document_start_loc: Mapping[int, Sequence[int]] | None = None,
    tree_mask: Any = None,
    selected_blocks: Any = None,
    attn_bias: Any = None,
    kv_cache_layout: str = "packed",
    mm_prefix_clamp_sliding_window: bool = False,
    kv_cache_rotation: str = "none",
    selected_tokens: Any = None,
    query_block_size: int | None = None,
    select_by_query_head: bool = False,
) -> Any:
    """Does what :func:`cpu_attn.attention_with_kv_cache` does, without a plan: arguments, shapes, dtypes, meaning and
    errors are the same.

    isa: the one that the caches were written with. mm_prefix_range, document_start_loc, tree_mask,
    mm_prefix_clamp_sliding_window, query_block_size, select_by_query_head: those of
    :func:`cpu_attn.get_scheduler_metadata`. It runs on the calling thread, in float32; output and lse
    are written when all of it is done. It raises UnavailableError where oneDNN is not there.
    """
    step, out, log = checked(
        *(query, key_cache, value_cache, output, query_start_loc, seq_lens, scale, causal, alibi_slopes),
        sliding_window,
        *(block_table, softcap, s_aux, dynamic_causal),
        k_scale,
        v_scale,
        kv_cache_dtype,
        lse,
        isa,
        selected_blocks,
        attn_bias,
        {
            "mm_prefix_range": mm_prefix_range,
            "document_start_loc": document_start_loc,
            "tree_mask": tree_mask,
            "mm_prefix_clamp_sliding_window": mm_prefix_clamp_sliding_window,
        },
        kv_cache_layout,
        kv_cache_rotation,
        selected_tokens,
        query_block_size,
        select_by_query_head,
    )
    result, result_lse = _every_request(step)
    out.numpy()[...] = result
    if log is not None:
        log.numpy()[...] = result_lse
    return output


def _every_request(step: Step) -> tuple[Array, Array]:
    tokens, num_heads, _ = step.query.shape
    output = np.zeros((tokens, num_heads, step.head_size_v))
    lse = np.full((tokens, num_heads), -np.inf)
    at_once = max(1, ROWS // step.group)
    with np.errstate(all="ignore"):
        for r, (start, stop) in enumerate(pairwise(step.query_start_loc.tolist())):
            for first in range(start, stop, at_once):
                rows = slice(first, min(first + at_once, stop))
                output[rows], lse[rows] = _some_tokens(step, r, rows)
    return output, lse.T


def _some_tokens(step: Step, r: int, rows: slice) -> tuple[Array, Array]:
    """Gives output [n, Hq, Dv] and lse [n, Hq] of some of request r's tokens."""
    query = step.query[rows].astype(np.float32)
    n, num_heads, _ = query.shape
    output, lse = np.zeros((n, num_heads, step.head_size_v)), np.full((n, num_heads), -np.inf)
    for keys, key, value in _chunks(step, r, rows):
        seen = (step.sees[rows, :1] <= keys) & (keys < step.sees[rows, 1:])
        if step.selected_tokens is not None:
            seen &= chosen_tokens(step.selected_tokens[rows], keys)
        if step.tree:
            seen &= step.tree.shows(r, rows, keys)
        chosen = step.chosen[step.lists[rows, None], :, keys // step.key_cache.shape[2]]
        bias = _bias(step, r, rows, keys)
        group = num_heads // chosen.shape[2]
        for h in range(chosen.shape[2]):
            heads, kv_head = slice(h * group, (h + 1) * group), h * group // step.group
            mine = seen & chosen[:, :, h]
            part = _one_head(step, query[:, heads], key[:, kv_head], value[:, kv_head], mine, bias[:, heads])
            output[:, heads], lse[:, heads] = _merge(output[:, heads], lse[:, heads], *part)
    return _merge(output, lse, np.zeros_like(output), np.broadcast_to(step.s_aux, lse.shape))


def _chunks(step: Step, r: int, rows: slice) -> Iterator[tuple[Array, Array, Array]]:
    """Gives key numbers [n], K [n, Hkv, D] and V [n, Hkv, Dv] in float32, KEYS at a time, of all blocks with a key that
    some of the tokens see and that they, or one of their heads, have chosen."""
    sees = step.sees[rows]
    block_size, start = step.key_cache.shape[2], int(sees[:, 0].min())
    end = min(int(sees[:, 1].max()), step.block_table.shape[1] * block_size)
    seen = np.arange(start // block_size, -(-end // block_size))
    chosen = step.chosen[step.lists[rows, None], :, seen].any(axis=2)  # [n, blocks]
    chosen &= (sees[:, :1] < (seen + 1) * block_size) & (seen * block_size < sees[:, 1:]) & (sees[:, :1] < sees[:, 1:])
    blocks, at_once = seen[chosen.any(axis=0)], max(1, KEYS // block_size)
    if step.selected_tokens is not None:
        own = step.selected_tokens[rows]
        blocks = np.unique(own[(sees[:, :1] <= own) & (own < sees[:, 1:])] // block_size)
    common: Any = {"isa": step.isa, "dtype": step.dtype, "kv_cache_layout": step.kv_cache_layout}
    for some in (blocks[i : i + at_once] for i in range(0, len(blocks), at_once)):
        keys = (some[:, None] * block_size + np.arange(block_size)).reshape(-1)
        keys, pages = keys[keys < end], step.block_table[r, some]
        k_dtype, v_dtype = ({**common, "kv_cache_dtype": kv} for kv in step.kv_dtypes)
        key = gather_pages(step.key_cache, pages, len(keys), head_size=step.query.shape[2], **k_dtype)
        value = gather_pages(step.value_cache, pages, len(keys), head_size=step.head_size_v, value=True, **v_dtype)
        key, value = (x.astype(np.float32) * np.float32(s) for x, s in zip((key, value), step.kv_scales, strict=True))
        key, value = (rotate(x, back=True) if r else x for x, r in zip((key, value), step.rotated, strict=True))
        for part in (slice(i, i + KEYS) for i in range(int(np.searchsorted(keys, start)), len(keys), KEYS)):
            yield keys[part], key[part], value[part]


def _bias(step: Step, r: int, rows: slice, keys: Array) -> Array:
    """Gives what ALiBi and attn_bias add to logits: [n, Hq, keys]."""
    distance = (keys - step.position[rows, None]).astype(np.float32)
    bias: Array = step.alibi_slopes[:, None] * distance[:, None]
    if step.attn_bias is not None:
        first = rows.start - step.query_start_loc[r]
        bias = bias + step.attn_bias[r][:, first : first + len(distance), keys].swapaxes(0, 1)
    return bias


def _one_head(step: Step, query: Array, key: Array, value: Array, mask: Array, bias: Array) -> tuple[Array, Array]:
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
