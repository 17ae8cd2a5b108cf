# SPDX-License-Identifier: Apache-2.0
"""Which tokens are worth attending: the lightning indexer of DeepSeek-V3.2, for ``selected_tokens``.

    index_and_cache(k, index_cache, slot_mapping)                              beside concat_and_cache_mla
    selected = select_tokens(q, index_cache, weights, query_start_loc, seq_lens, block_table, 2048, scale)
    attention_mla(..., selected_tokens=selected)

An indexer has a key of its own for each token, and some query heads. Query token t gives key s the score

    sum_h weights[t, h] * relu(scale * q[t, h] . k[s])

and attends the keys of the highest scores. vLLM's calls for this are ``indexer_k_quant_and_cache``,
``fp8_paged_mqa_logits`` and ``top_k_per_row_decode``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cpu_attn import _check, _dispatch, _threads, ops
from cpu_attn._arrays import described, view
from cpu_attn._dtypes import CODES, DTYPE_CODES
from cpu_attn._native import ffi, lib
from cpu_attn.plan import get_kv_cache_shape

_WRITTEN = {"key": "k", "key_cache": "index_cache"}


class _Cache(NamedTuple):
    """pages: as a K cache of one kv head. kv: what it holds. isa: the number of the one that reads it."""

    pages: np.ndarray[Any, Any]
    kv: str
    isa: int


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
        >>> from cpu_attn import get_index_cache_shape
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
        >>> from cpu_attn import get_index_cache_shape, index_and_cache
        >>> index_cache = np.zeros(get_index_cache_shape(2, 16, 64, "float32"), np.float32)
        >>> index_and_cache(np.ones((3, 64), np.float32), index_cache, np.array([0, 1, 2]))
        >>> float(index_cache.sum())
        192.0
    """
    key = _check.with_one_head("k", k, _check.FLOATS, [("T", None), ("head_size", None)])
    cache = _cache(index_cache, str(key.dtype), key.shape[2], isa, kv_cache_dtype, kv_cache_layout)
    arrays = (cache.pages, key, slot_mapping)
    try:
        ops.run_write(
            *(lib.ca_index_and_cache, _check.INDEX, arrays, isa, k_scale, 1.0, kv_cache_dtype, kv_cache_layout, "none")
        )
    except (TypeError, ValueError) as e:
        raise _check.renamed(e, _WRITTEN) from None


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
) -> np.ndarray[Any, Any]:
    """Selects, for each query token, the keys that an indexer scores best.

    Query token t gives key s the score ``sum_h weights[t, h] * relu(scale * q[t, h] . k[s])``. The selection is exact:
    no key that is left out has a higher score in float32 than one that is taken, and of equal scores the lower position
    is taken. A score of NaN counts as +inf. Scores depend on the query token and the key alone, whatever the batch and
    the threads. Besides 4 MiB, or the scores of one query token where these are more, no memory grows with the keys.

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
        >>> from cpu_attn import get_index_cache_shape, index_and_cache, select_tokens
        >>> index_cache = np.zeros(get_index_cache_shape(1, 16, 64, "float32"), np.float32)
        >>> keys = np.outer([1, 3, 2, 3, 0], np.ones(64)).astype(np.float32)
        >>> index_and_cache(keys, index_cache, np.arange(5))
        >>> query, weights = np.ones((1, 4, 64), np.float32), np.ones((1, 4), np.float32)
        >>> loc, lens, table = (np.array(x, np.int32) for x in ([0, 1], [5], [[0]]))
        >>> select_tokens(query, index_cache, weights, loc, lens, table, 3).tolist()  # scores 1, 3, 2, 3, 0
        [[1, 2, 3]]
    """
    q = _check.array("query", query, _check.FLOATS, [("T", None), ("num_heads", None), ("head_size", None)])
    tokens, num_heads, head_size = q.shape
    cache = _cache(index_cache, q.dtype, head_size, isa, kv_cache_dtype, kv_cache_layout)
    most = _check.integer("topk_tokens", topk_tokens, 1)
    arrays = _check.select_tokens(q, weights, query_start_loc, seq_lens, block_table)
    k_scale, _ = _check.scales(k_scale, 1.0, (cache.kv, q.dtype))
    code = CODES[cache.kv][0]
    shape = ffi.new(
        "ca_shape *",
        {
            "num_reqs": arrays[-1].shape[0],
            "num_heads": num_heads,
            "num_kv_heads": 1,
            "head_size": head_size,
            "head_size_v": head_size,
            "dtype": CODES[q.dtype][0],
            "k_dtype": code,
            "v_dtype": code,
            "isa": cache.isa,
            "causal": _check.boolean("causal", causal),
            "window_left": -1,
            "window_right": -1,
            "num_threads": _threads.get_num_threads(),
            "kv_cache_layout": _check.LAYOUTS[kv_cache_layout],
        },
    )
    selected = np.empty((tokens, most), np.int32)
    fault, given = _check.new_fault(), [view("selected", selected), q, view("index_cache", cache.pages), *arrays]
    factor, _ = _check.logit_factors(_check.number("scale", scale, _check.TINY), 0.0, k_scale)
    lib.ca_select_tokens(shape, described(given), factor * k_scale, fault)
    _check.raise_fault(fault)
    return selected


def _cache(x: Any, dtype: str, head_size: int, isa: str, kv_cache_dtype: str, layout: str) -> _Cache:
    kvs = _check.kv_dtypes(kv_cache_dtype, dtype)
    _check.kv_cache_layout(layout, kvs)
    if kvs[0] != kvs[1]:
        raise ValueError(f"kv_cache_dtype: {kv_cache_dtype!r} names two, an indexer has keys alone")
    resolved = _dispatch.resolve_isa(isa, dtype, _check.integer("head_size", head_size, 1, _check.MAX_SIZE))
    axes: list[tuple[str, int | None]] = [("num_blocks", None), ("block_size", None), ("width", None)]
    memory = _check.array("index_cache", x, list(_check.memory(kvs[0])), axes)
    _, block_size, width = memory.shape
    _check.integer("index_cache: block_size", block_size, 1)
    packed = layout == "packed"
    wanted = _check.width(resolved.index, DTYPE_CODES[dtype], kvs[0], block_size, head_size) if packed else head_size
    if width != wanted:
        raise ValueError(
            f"index_cache: axis 2 is {width}, expected {wanted} (get_index_cache_shape says what to allocate)"
        )
    if packed and block_size > 1 and memory.strides[1] != width and memory.size:
        raise ValueError(
            f"index_cache: axis 1 has stride {memory.strides[1]}, expected {width}: packed blocks are dense"
        )
    found = x if isinstance(x, np.ndarray) else memory.numpy()
    return _Cache(np.expand_dims(found, 2 if layout == "NHD" else 1), kvs[0], resolved.index)
