# SPDX-License-Identifier: Apache-2.0
"""Which pages are worth attending: Quest's bounds (Tang et al., arXiv:2406.10774), for ``selected_blocks``.

    update_page_bounds(key, slot_mapping, page_min, page_max, block_size)             beside reshape_and_cache
    scores = score_pages(query, page_min, page_max, block_table, seq_lens, query_start_loc, block_size)
    selected_blocks = select_pages(scores, seq_lens, block_size, num_pages)
    attention_with_kv_cache(..., selected_blocks=selected_blocks)

Of each physical block and kv head two rows are kept, the least and the largest that its keys are in each dimension. No
q.k over the block exceeds ``sum_d max(q_d * min_d, q_d * max_d)``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cpu_attn import _check, _dispatch, _threads
from cpu_attn._arrays import described, view
from cpu_attn._native import ffi, lib


def update_page_bounds(key: Any, slot_mapping: Any, page_min: Any, page_max: Any, block_size: int) -> None:
    """Widens the bounds of the blocks into which these tokens are written.

    key [T, Hkv, D]: float32, float16 or bfloat16, as :func:`cpu_attn.reshape_and_cache` takes it, last axis dense.
    slot_mapping: int64 [T], block * block_size + offset; a negative slot is skipped.
    page_min, page_max [N, Hkv, D]: of key's dtype, last axis dense; changed in place. Nothing has to be in them: the
    bounds of a block start anew with the call that writes its first slot (offset 0), wherever in the call that token
    is. Whoever copies blocks copies their rows of page_min and page_max. A NaN in a key makes both bounds NaN there.

    Raises ValueError or TypeError, before anything is written, for shapes, dtypes, strides, slots out of range and
    memory that overlaps.
    """
    fault, arrays = _check.new_fault(), _check.update_page_bounds(key, slot_mapping, page_min, page_max)
    block_size = _check.integer("block_size", block_size, 1)
    lib.ca_update_page_bounds(described(arrays), block_size, fault)
    _check.raise_fault(fault)


def score_pages(
    query: Any,
    page_min: Any,
    page_max: Any,
    block_table: Any,
    seq_lens: Any,
    query_start_loc: Any,
    block_size: int,
    isa: str = "auto",
) -> np.ndarray[Any, Any]:
    """float32 [R, Hkv, M]: what q.k can at most be over each block of each request, without scale, softcap and ALiBi.

    The largest over the query heads of a kv head and over the query tokens of the request; -inf in the columns past the
    request's blocks, and where it has no query token.

    query [T, Hq, D]; page_min, page_max [N, Hkv, D] of its dtype, from :func:`update_page_bounds`; block_table int32
    [R, M], entries past a request's blocks are ignored; seq_lens int32 [R], query_start_loc int32 [R + 1], block_size:
    as :func:`cpu_attn.attention_with_kv_cache` takes them. isa: whose registers.

    A score that is not finite, of NaN or infinite keys or queries or past float32, is +inf: such a page cannot be ruled
    out. A quantised cache rounds keys: a product over them may exceed the bound by that. Raises ValueError or TypeError
    for what is out of range.
    """
    fault, arrays = (
        _check.new_fault(),
        _check.score_pages(query, page_min, page_max, block_table, seq_lens, query_start_loc),
    )
    block_size = _check.integer("block_size", block_size, 1)
    q, low, table = arrays[1], arrays[2], arrays[4]
    assert q and low and table
    resolved = _dispatch.resolve_isa(isa, q.dtype, q.shape[2])
    scores = np.empty((table.shape[0], low.shape[1], table.shape[1]), np.float32)
    threads = _threads.get_num_threads()
    scratch = np.empty(threads * lib.ca_score_floats(q.shape[2]), np.float32)
    room = ffi.cast("float *", scratch.ctypes.data)
    given = described([view("scores", scores), *arrays[1:]])
    lib.ca_score_pages(given, resolved.index, block_size, room, threads, fault)
    _check.raise_fault(fault)
    return scores


def select_pages(
    scores: Any,
    seq_lens: Any,
    block_size: int,
    num_pages: int,
    always_last: int = 1,
    always_first: int = 0,
) -> np.ndarray[Any, Any]:
    """int32 [R, Hkv, S], S the less of num_pages and M: for each request and kv head the blocks of the highest scores,
    ascending, then -1 where the request has fewer. As ``selected_blocks`` takes it.

    scores: float32 [R, Hkv, M], of equal ones the first counts more, NaN counts as +inf. seq_lens: int32 [R].
    always_last, always_first: so many blocks at the end (the newest keys) and at the start (attention sinks) of each
    request are among them. A chunk of q_len query tokens stands in up to ceil(q_len / block_size) + 1 last blocks.

    Raises ValueError or TypeError for what is out of range: num_pages less than always_last + always_first, scores of
    fewer columns than a request has blocks.
    """
    found = _check.array("scores", scores, ["float32"], [("num_reqs", None), ("num_kv_heads", None), ("blocks", None)])
    block_size = _check.integer("block_size", block_size, 1)
    always_last = _check.integer("always_last", always_last, 0)
    always_first = _check.integer("always_first", always_first, 0)
    num_pages = _check.integer("num_pages", num_pages, max(1, always_last + always_first))
    lens = _check.array("seq_lens", seq_lens, ["int32"], [("num_reqs", found.shape[0])]).numpy().astype(np.int64)
    blocks, columns = -(-lens // block_size), found.shape[2]
    for r in np.flatnonzero((lens < 0) | (blocks > columns))[:1]:
        raise ValueError(f"seq_lens[{r}]: {lens[r]}, expected 0..{columns * block_size}: scores has {columns} columns")
    column, end = np.arange(columns), blocks[:, None, None]
    most, inf = np.finfo(np.float32).max, np.float32(np.inf)
    score = np.nan_to_num(found.numpy(), nan=most, posinf=most, neginf=-most)
    score = np.where((column < always_first) | (column >= end - always_last), inf, score)
    score = np.where(column < end, score, -inf)
    size = min(num_pages, columns)
    if not size:
        return np.empty((*score.shape[:2], 0), np.int32)
    least = np.partition(score, columns - size, axis=2)[:, :, columns - size, None]
    above, equal = score > least, score == least
    chosen = above | equal & (equal.cumsum(axis=2) <= size - above.sum(axis=2, keepdims=True))
    selected = np.nonzero(chosen)[2].astype(np.int32).reshape(*score.shape[:2], size)
    selected[selected >= end] = -1
    return selected
