# SPDX-License-Identifier: Apache-2.0
"""This module selects the tokens that are worth attending by the lightning indexer of DeepSeek-V3.2, for
``selected_tokens``.

    index_and_cache(k, index_cache, slot_mapping)                              beside concat_and_cache_mla
    selected = select_tokens(q, index_cache, weights, query_start_loc, seq_lens, block_table, 2048, scale)
    attention_mla(..., selected_tokens=selected)

An indexer has a key of its own for each token, and some query heads. Query token t gives key s the score

    sum_h weights[t, h] * relu(scale * q[t, h] . k[s])

and attends the keys of the highest scores. vLLM's calls for this are ``indexer_k_quant_and_cache``,
``fp8_paged_mqa_logits`` and ``top_k_per_row_decode``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cpu_attn import _check, ops
from cpu_attn._native import ffi, lib
from cpu_attn.plan import get_kv_cache_shape, masks_struct


def get_index_cache_shape(
    num_blocks: int,
    block_size: int,
    head_size: int,
    dtype: Any,
    isa: str = "auto",
    kv_cache_dtype: str = "auto",
    *,
    kv_cache_layout: str = "packed",
) -> tuple[int, int, int]:
    """Says what to allocate for an indexer's keys.

    It is what :func:`get_kv_cache_shape` says for K of one kv head, without the axis of that head.

    Args:
        num_blocks: N.
        block_size: B, tokens of a block.
        head_size: D, elements of an indexer's key.
        dtype: of the keys that are written, float32, float16 or bfloat16.
        isa: whose layout; ``auto`` follows CPU_ATTN_ISA, then takes the best isa of this machine.
        kv_cache_dtype: what the cache holds, as in :func:`index_and_cache`.
        kv_cache_layout: ``packed``, or ``NHD`` for plain rows.

    Returns:
        (N, B, width).

    Raises:
        ValueError: a size is out of range, or a name is unknown.
        TypeError: an argument has another type.
        UnavailableError: this machine does not have the isa.

    Example:
        >>> from cpu_attn.sparse import get_index_cache_shape
        >>> get_index_cache_shape(64, 16, 128, "float32")
        (64, 16, 128)
    """
    shape = get_kv_cache_shape(
        num_blocks, block_size, 1, head_size, dtype, isa, kv_cache_dtype, kv_cache_layout=kv_cache_layout
    )
    return shape[0], _check.integer("block_size", block_size, 1), shape[3]


def index_and_cache(
    k: Any,
    index_cache: Any,
    slot_mapping: Any,
    isa: str = "auto",
    k_scale: float = 1.0,
    kv_cache_dtype: str = "auto",
    *,
    kv_cache_layout: str = "packed",
) -> None:
    """Writes the keys of an indexer for T tokens into their slots.

    Args:
        k: [T, D], float32, float16 or bfloat16, last axis dense.
        index_cache: [N, B, width], as :func:`get_index_cache_shape` says; of the dtype of ``k``, or what
            ``kv_cache_dtype`` says.
        slot_mapping: int64 [T], block * B + place in the block; a token with a negative slot is skipped.
        isa: whose layout; whoever reads the cache must say the same.
        k_scale: what keys are divided by in fp8 caches; 1 for others.
        kv_cache_dtype: ``auto``, ``fp8_e4m3`` (``fp8``), ``fp8_e5m2``, and in packed caches ``int8``, ``int6``,
            ``int5``, ``int4`` and ``int4_per_token_head``, which have scales of their own.
        kv_cache_layout: ``packed``, or ``NHD`` for plain rows [N, B, D].

    Raises:
        ValueError: a shape, a stride or a slot is out of range, or memory overlaps. Nothing has been written then.
        TypeError: an argument is no array, or has another dtype. Nothing has been written then.
        UnavailableError: this machine does not have the isa.

    Maths: DeepSeek-V3.2's lightning indexer; vLLM's ``indexer_k_quant_and_cache``.

    Example:
        >>> import numpy as np
        >>> from cpu_attn.sparse import get_index_cache_shape, index_and_cache
        >>> index_cache = np.zeros(get_index_cache_shape(2, 16, 64, "float32"), np.float32)
        >>> index_and_cache(np.ones((3, 64), np.float32), index_cache, np.array([0, 1, 2]))
        >>> float(index_cache.sum())
        192.0
    """
    _check.keys_alone(kv_cache_dtype)
    form = ops.cache_format(isa, kv_cache_dtype, kv_cache_layout)
    ops.run_write(lib.ca_index_and_cache, _check.INDEX, (index_cache, k, slot_mapping), form, k_scale, 1.0)


def select_tokens(
    query: Any,
    index_cache: Any,
    weights: Any,
    query_start_loc: Any,
    seq_lens: Any,
    block_table: Any,
    topk_tokens: int,
    scale: float = 1.0,
    causal: bool = True,
    isa: str = "auto",
    k_scale: float = 1.0,
    kv_cache_dtype: str = "auto",
    *,
    kv_cache_layout: str = "packed",
    document_start_loc: Mapping[int, Sequence[int]] | None = None,
) -> np.ndarray[Any, Any]:
    """Selects, for each query token, the keys that an indexer scores best.

    Query token t gives key s the score ``sum_h weights[t, h] * relu(scale * q[t, h] . k[s])``. The selection is exact:
    no key that is left out has a higher score in float32 than one that is taken, and of equal scores the lower position
    is taken. A score of NaN counts as +inf. Scores depend on the query token and the key alone, whatever the batch and
    the threads. Memory that grows with the keys: 4 bytes a key for each thread, and up to 4 MiB of scores, or those
    of one query token where these are more.

    Args:
        query: [T, H, D], of the dtype of the keys that were written, last axis dense.
        index_cache: [N, B, width], as :func:`index_and_cache` wrote it.
        weights: float32 [T, H].
        query_start_loc: int32 [R + 1], where each request's query tokens start; the last is T.
        seq_lens: int32 [R], how many keys each request has.
        block_table: int32 [R, M], the blocks of each request in order.
        topk_tokens: k, how many keys to select.
        scale: the factor of q.k, positive.
        causal: whether query token i of a request scores the keys up to ``seq_len - q_len + i`` only.
        isa: as :func:`index_and_cache` had it.
        k_scale: as :func:`index_and_cache` had it.
        kv_cache_dtype: as :func:`index_and_cache` had it.
        kv_cache_layout: as :func:`index_and_cache` had it.
        document_start_loc: {request: [0, ...]}, as in :func:`get_scheduler_metadata`: a query token scores keys of its
            own document only. ``{0: [0, 5]}`` hides the first 5 keys of request 0 from the tokens behind them.

    Returns:
        int32 [T, k], ascending, then -1 where a token sees fewer keys: what ``selected_tokens`` of
        :func:`attention_with_kv_cache` and :func:`attention_mla` takes.

    Raises:
        ValueError: a length, a block, a scale or a shape is out of range.
        TypeError: an argument is no array, or has another dtype.
        UnavailableError: this machine does not have the isa.
        MemoryError: there is no memory for the scores.

    Maths: DeepSeek-V3.2's lightning indexer; vLLM's ``fp8_paged_mqa_logits`` and ``top_k_per_row_decode``.

    Example:
        >>> import numpy as np
        >>> from cpu_attn.sparse import get_index_cache_shape, index_and_cache, select_tokens
        >>> index_cache = np.zeros(get_index_cache_shape(1, 16, 64, "float32"), np.float32)
        >>> keys = np.outer([1, 3, 2, 3, 0], np.ones(64)).astype(np.float32)
        >>> index_and_cache(keys, index_cache, np.arange(5))
        >>> query, weights = np.ones((1, 4, 64), np.float32), np.ones((1, 4), np.float32)
        >>> loc, lens, table = (np.array(x, np.int32) for x in ([0, 1], [5], [[0]]))
        >>> select_tokens(query, index_cache, weights, loc, lens, table, 3).tolist()  # scores 1, 3, 2, 3, 0
        [[1, 2, 3]]
    """
    _check.keys_alone(kv_cache_dtype)
    form = ops.cache_format(isa, kv_cache_dtype, kv_cache_layout)
    k_scale, _ = _check.scales(k_scale, 1.0, form.kinds)
    factor, _ = _check.logit_factors(_check.number("scale", scale, _check.TINY), 0.0, k_scale)
    selected = np.empty((_check.length("query", query), _check.integer("topk_tokens", topk_tokens, 1)), np.int32)
    arrays = (selected, query, index_cache, seq_lens, query_start_loc, block_table, weights)
    found = _check.masks(_check.length("seq_lens", seq_lens), None, document_start_loc, None)
    how = (_check.boolean("causal", causal), factor * k_scale, masks_struct(found) if found else ffi.NULL)
    ops.run_by_names(lib.ca_select_tokens, _check.SELECT, arrays, form, *how)
    return selected
