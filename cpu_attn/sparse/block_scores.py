# SPDX-License-Identifier: Apache-2.0
"""This module scores blocks by Quest's bounds (Tang et al., arXiv:2406.10774) and selects those that are worth
attending, for ``selected_blocks``.

    update_block_bounds(key, slot_mapping, block_min, block_max, block_size)             beside reshape_and_cache
    scores = score_blocks(query, block_min, block_max, block_table, seq_lens, query_start_loc, block_size)
    selected_blocks = select_blocks(scores, seq_lens, block_size, max_selected_blocks)
    attention_with_kv_cache(..., selected_blocks=selected_blocks)

Two rows are kept for each physical block and kv head: the least and the largest of its keys in each dimension. No
q.k over the block exceeds ``sum_d max(q_d * min_d, q_d * max_d)``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cpu_attn import _check, ops
from cpu_attn._arguments import BOUNDS, SCORES, documented
from cpu_attn._native import lib


@documented(BOUNDS)
def update_block_bounds(key: Any, slot_mapping: Any, block_min: Any, block_max: Any, block_size: int) -> None:
    """Keeps the bounds of each block's keys: its smallest and its largest value of each dimension.

    Call it beside every cache write. The bounds of a block start anew with the call that writes its first slot, so
    memory that holds anything will do to begin with. Whoever copies blocks copies their rows of the bounds. Symbols: as
    in :func:`cpu_attn.reshape_and_cache`.

    Args:
        {arguments}

    Raises:
        ValueError: a shape, a stride or a slot is out of range, or memory overlaps. Nothing has been written then.
        TypeError: an argument is no array, or has another dtype. Nothing has been written then.

    Maths: Quest, arXiv:2406.10774.

    Example:
        >>> import numpy as np
        >>> from cpu_attn.sparse import update_block_bounds
        >>> block_min, block_max = np.zeros((2, 4, 1, 2), np.float32)  # 4 blocks, 1 kv head of 2
        >>> key = np.array([[[1, 5]], [[3, 2]]], np.float32)
        >>> update_block_bounds(key, np.array([16, 17]), block_min, block_max, block_size=16)  # both are in block 1
        >>> block_min[1].tolist(), block_max[1].tolist()
        ([[1.0, 2.0]], [[3.0, 5.0]])
    """
    arrays = (block_min, block_max, key, slot_mapping)
    ops.run(lib.ca_update_block_bounds, _check.BOUNDS, arrays, _check.integer("block_size", block_size, 1))


@documented(SCORES)
def score_blocks(
    query: Any,
    block_min: Any,
    block_max: Any,
    block_table: Any,
    seq_lens: Any,
    query_start_loc: Any,
    block_size: int,
    isa: str = "auto",
    *,
    by_query_head: bool = False,
) -> np.ndarray[Any, Any]:
    """Scores the blocks of each request: no q.k over a block exceeds its score.

    The score of a block is the sum over d of max(q_d * block_min_d, q_d * block_max_d), the largest over the query
    heads of a kv head and over the query tokens of the request. Scale, softcap and ALiBi are not in it. Over a
    quantised cache q.k may exceed the score by what quantisation rounds.

    Args:
        {arguments}

    Returns:
        float32 [R, Hkv, M], or [R, Hq, M] where ``by_query_head``. Columns past a request's blocks are -inf, and so are
        all of a request without query tokens. A score that is not finite is +inf, so that a block with NaN in it is not
        overlooked.

    Raises:
        ValueError: a shape, a length or a block is out of range.
        TypeError: an argument is no array, or has another dtype.
        UnavailableError: this machine does not have the isa.

    Maths: Quest, arXiv:2406.10774.

    Example:
        >>> import numpy as np
        >>> from cpu_attn.sparse import score_blocks
        >>> block_min = np.array([[[-1, 0]], [[2, 2]]], np.float32)  # 2 blocks, 1 kv head of 2
        >>> block_max = np.array([[[1, 1]], [[3, 2]]], np.float32)
        >>> query = np.array([[[1, -1]]], np.float32)
        >>> table, lens, loc = np.array([[0, 1]], np.int32), np.array([32], np.int32), np.array([0, 1], np.int32)
        >>> score_blocks(query, block_min, block_max, table, lens, loc, block_size=16).tolist()
        [[[1.0, 1.0]]]
    """
    heads = ("query", query) if _check.boolean("by_query_head", by_query_head) else ("block_min", block_min)
    rows, columns = (_check.length("block_table", block_table, axis) for axis in (0, 1))
    scores = np.empty((rows, _check.length(*heads, 1), columns), np.float32)
    arrays = (scores, query, block_min, block_max, block_table, seq_lens, query_start_loc)
    form = ops.cache_format(isa, "auto", "packed")
    how = (by_query_head, _check.integer("block_size", block_size, 1))
    ops.run_by_names(lib.ca_score_blocks, _check.SCORES, arrays, form, *how)
    return scores


def query_blocks(
    query_start_loc: Any, seq_lens: Any, query_block_size: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Takes the query blocks of a step for requests, so that each of them may have scores and a selection of its own.

    :func:`score_blocks` and :func:`select_blocks` then give what :func:`cpu_attn.attention_with_kv_cache` takes with a
    plan that has this ``query_block_size``. Symbols: n query blocks of all requests.

    Args:
        query_start_loc: int32 [R + 1], where each request's query tokens start.
        seq_lens: int32 [R], how many keys each request has.
        query_block_size: query tokens of a query block. The last one of a request may have fewer.

    Returns:
        (query_start_loc int32 [n + 1], seq_lens int32 [n], requests int64 [n]): where each query block starts, how many
        keys there are up to that of its last token, and its request, by which to take rows of ``block_table``. Where
        not causal, take ``seq_lens[requests]`` of the argument for its keys.

    Raises:
        ValueError: a shape or a length is out of range.
        TypeError: an argument is no array, or has another dtype.

    Example:
        >>> import numpy as np
        >>> from cpu_attn.sparse import query_blocks
        >>> query_start_loc, seq_lens = np.array([0, 5, 6], np.int32), np.array([9, 4], np.int32)
        >>> for x in query_blocks(query_start_loc, seq_lens, query_block_size=2):
        ...     print(x.tolist())
        [0, 2, 4, 5, 6]
        [6, 8, 9, 4]
        [0, 0, 0, 1]
    """
    found = _check.array("seq_lens", seq_lens, ["int32"], [("num_reqs", None)])
    starts, lens, _ = _check.lengths(found.shape[0], query_start_loc, seq_lens, None)
    size = _check.integer("query_block_size", query_block_size, 1)
    begin, keys = _check.rising("query_start_loc", starts.numpy().astype(np.int64)), lens.numpy().astype(np.int64)
    for r in np.flatnonzero(keys < 0)[:1]:
        raise ValueError(f"seq_lens[{r}]: {keys[r]}, expected at least 0")
    counts = -(-np.diff(begin) // size)
    requests = np.repeat(np.arange(len(keys)), counts)
    number = np.arange(len(requests)) - np.repeat(np.cumsum(counts) - counts, counts)  # counted within each request
    end = np.minimum(begin[:-1][requests] + (number + 1) * size, begin[1:][requests])
    seen = np.maximum(0, keys[requests] - (begin[1:][requests] - end))
    return np.append(0, end).astype(np.int32), seen.astype(np.int32), requests


def select_blocks(
    scores: Any,
    seq_lens: Any,
    block_size: int,
    max_selected_blocks: int,
    always_last: int = 1,
    always_first: int = 0,
) -> np.ndarray[Any, Any]:
    """Selects the best blocks of each request and head by their scores.

    Args:
        scores: float32 [R, Hkv, M] or [R, Hq, M], of :func:`score_blocks` or of a rule of your own. Of equal scores the
            first counts more; NaN counts as +inf.
        seq_lens: int32 [R], how many keys each request has.
        block_size: B, tokens of a block.
        max_selected_blocks: how many blocks to select, those that are always selected among them.
        always_last: how many blocks at the end of each request are always selected: the newest keys. A chunk of q_len
            query tokens stands in up to ceil(q_len / block_size) + 1 last blocks.
        always_first: how many blocks at the start of each request are always selected: attention sinks.

    Returns:
        int32 [R, Hkv or Hq, S], S the smaller of ``max_selected_blocks`` and M: columns of the block table, ascending,
        then -1 where the request has fewer blocks. :func:`cpu_attn.attention_with_kv_cache` takes it as
        ``selected_blocks``.

    Raises:
        ValueError: ``max_selected_blocks`` is less than ``always_last + always_first``, or a request has more blocks
            than ``scores`` has columns.
        TypeError: an argument is no array, or has another dtype.

    Example:
        >>> import numpy as np
        >>> from cpu_attn.sparse import select_blocks
        >>> scores = np.array([[[0.1, 0.9, 0.5, 0.2]]], np.float32)  # 4 blocks
        >>> select_blocks(scores, np.array([60], np.int32), block_size=16, max_selected_blocks=2).tolist()
        [[[1, 3]]]
    """
    found = _check.array("scores", scores, ["float32"], [("num_reqs", None), ("heads", None), ("blocks", None)])
    block_size = _check.integer("block_size", block_size, 1)
    always_last = _check.integer("always_last", always_last, 0)
    always_first = _check.integer("always_first", always_first, 0)
    max_selected_blocks = _check.integer("max_selected_blocks", max_selected_blocks, max(1, always_last + always_first))
    lens = _check.array("seq_lens", seq_lens, ["int32"], [("num_reqs", found.shape[0])]).numpy().astype(np.int64)
    blocks, columns = -(-lens // block_size), found.shape[2]
    for r in np.flatnonzero((lens < 0) | (blocks > columns))[:1]:
        raise ValueError(f"seq_lens[{r}]: {lens[r]}, expected 0..{columns * block_size}: scores has {columns} columns")
    column, end = np.arange(columns), blocks[:, None, None]
    most, inf = np.finfo(np.float32).max, np.float32(np.inf)
    score = np.nan_to_num(found.numpy(), nan=most, posinf=most, neginf=-most)
    score = np.where((column < always_first) | (column >= end - always_last), inf, score)
    score = np.where(column < end, score, np.float32(-np.inf))
    size = min(max_selected_blocks, columns)
    if not size:
        return np.empty((*score.shape[:2], 0), np.int32)
    least = np.partition(score, columns - size, axis=2)[:, :, columns - size, None]
    above, equal = score > least, score == least
    chosen = above | equal & (equal.cumsum(axis=2) <= size - above.sum(axis=2, keepdims=True))
    selected = np.nonzero(chosen)[2].astype(np.int32).reshape(*score.shape[:2], size)
    selected[selected >= end] = -1
    return selected
