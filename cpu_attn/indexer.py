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
    """Shape to allocate for an indexer's keys, (num_blocks, block_size, width): that of
    :func:`cpu_attn.get_kv_cache_shape` for K of one kv head, without the axis of that head."""
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
    """Writes the indexer's keys of T tokens into their slots.

    k [T, D]: float32, float16 or bfloat16, last axis dense. index_cache [N, B, width]: as
    :func:`get_index_cache_shape` says. The rest, and the errors: as in :func:`cpu_attn.reshape_and_cache`, whose K this
    is. fp8 has one scale, k_scale; ``int8`` and the other integers have one for each token, and packed caches alone.
    With kv_cache_layout ``NHD`` the cache is plain rows, [N, B, D].
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
    """int32 [T, topk_tokens]: for each query token the keys of the highest scores, ascending, then -1 where it sees
    fewer. As ``selected_tokens`` takes it.

    query [T, H, D]: of the dtype of the keys that were written, last axis dense. weights: float32 [T, H]. index_cache,
    k_scale, kv_cache_dtype, kv_cache_layout: as :func:`index_and_cache` had them, and an isa with the same layout.
    query_start_loc int32 [R + 1], seq_lens int32 [R], block_table int32 [R, M], causal: as in
    :func:`cpu_attn.attention_with_kv_cache`; where causal, a query token scores the keys up to its own. scale is
    positive.

    The selection is exact: no key that is left out has a higher score in float32 than one that is taken, and of equal
    scores the lower position is taken. A score of NaN counts as +inf. Scores depend on the query token and the key
    alone, whatever the batch and the threads. Besides 4 MiB, or the scores of one query token where these are more, no
    memory grows with the keys.

    Raises ValueError or TypeError for what is out of range.
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
