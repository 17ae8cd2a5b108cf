# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) over its cache of latent rows, weights absorbed.

A token's row is its latent kv_c beside its rotated key k_pe, shared by all heads: [kv_c | k_pe], 512 + 64 columns in
DeepSeek's models. With W_UK absorbed into the query and W_UV into what follows, every head is attention over the same
rows: K is the whole row, V the part of it that is kv_c. To :func:`cpu_attn.attention_with_kv_cache` this is one plain
kv head, ``NHD``, whose V is a view of its K:

    plan = get_scheduler_metadata(num_reqs, num_heads, 1, 576, seq_lens, dtype, query_start_loc,
                                  head_size_v=512, kv_cache_layout="NHD")
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cpu_attn import _check, ops
from cpu_attn._arrays import view
from cpu_attn.plan import SchedulerMetadata

# What the calls underneath say, in the words of their callers.
_WRITTEN = {"key": "kv_c", "value": "k_pe", "key_cache": "kv_cache", "value_cache": "kv_cache"}
_WRITTEN |= {"k_scale": "scale", "v_scale": "scale"}
_READ = {"key_cache": "kv_cache", "value_cache": "kv_cache", "v_scale": "k_scale"}


def concat_and_cache_mla(
    kv_c: Any,
    k_pe: Any,
    kv_cache: Any,
    slot_mapping: Any,
    kv_cache_dtype: str = "auto",
    scale: float = 1.0,
) -> None:
    """Writes the latent rows [kv_c | k_pe] of T tokens into their slots. vLLM's name and order.

    kv_c [T, L], k_pe [T, P]: float32, float16 or bfloat16, last axis dense. kv_cache [N, B, L + P]: the same dtype, or
    what kv_cache_dtype says, holding x / scale; strides of N and B are free. slot_mapping: int64 [T], block * B +
    offset; a negative slot is skipped.

    Raises ValueError or TypeError, before anything is written, for shapes, dtypes, strides, slots out of range and
    memory that overlaps.
    """
    latent = _check.with_one_head("kv_c", kv_c, list(_check.FLOATS), [("T", None), ("kv_lora_rank", None)])
    tokens, _, rank = latent.shape
    rotated = _check.with_one_head("k_pe", k_pe, [view("kv_c", kv_c).dtype], [("T", tokens), ("rope size", None)])
    pages = _cache(kv_cache, kv_cache_dtype, view("kv_c", kv_c).dtype, rank + rotated.shape[2])
    try:
        ops.reshape_and_cache(
            *(latent, rotated, pages[..., :rank], pages[..., rank:], slot_mapping),
            k_scale=scale,
            v_scale=scale,
            kv_cache_dtype=kv_cache_dtype,
            kv_cache_layout="NHD",
        )
    except (TypeError, ValueError) as e:
        raise _check.renamed(e, _WRITTEN) from None


def attention_mla(
    query: Any,
    kv_cache: Any,
    output: Any,
    query_start_loc: Any,
    seq_lens: Any,
    scale: float,
    causal: bool,
    block_table: Any,
    scheduler_metadata: SchedulerMetadata,
    kv_cache_dtype: str = "auto",
    k_scale: float = 1.0,
    *,
    sliding_window: int | tuple[int, int] = -1,
    softcap: float = 0.0,
    s_aux: Any = None,
    dynamic_causal: Any = None,
    lse: Any = None,
    selected_tokens: Any = None,
) -> Any:
    """Attention of every query token over its request's latent rows, into ``output``, which is returned.

    query [T, Hq, L + P]: [q_nope W_UK | q_pe]. kv_cache [N, B, L + P], read where it lies. output [T, Hq, L]: what W_UV
    is still to be applied to. scheduler_metadata: as above, with head_size L + P and head_size_v L. scale: of the heads
    before absorption, 1 / sqrt(128 + 64) in DeepSeek's models. The rest, and errors: as in
    :func:`cpu_attn.attention_with_kv_cache`.
    """
    plan = _check.plan("scheduler_metadata", scheduler_metadata)
    if plan.head_size_v > plan.head_size or plan.num_kv_heads != 1:
        raise ValueError(
            f"scheduler_metadata: made for {plan.num_kv_heads} kv heads of {plan.head_size}/{plan.head_size_v}, "
            "expected 1 whose head_size_v is a part of head_size"
        )
    pages = _cache(kv_cache, kv_cache_dtype, str(plan.dtype), plan.head_size)
    try:
        return ops.attention_with_kv_cache(
            *(query, pages, pages[..., : plan.head_size_v], output, query_start_loc, seq_lens, scale, causal, None),
            *(sliding_window, block_table, softcap, plan, s_aux, dynamic_causal, k_scale, k_scale, kv_cache_dtype),
            lse=lse,
            kv_cache_layout="NHD",
            selected_tokens=selected_tokens,
        )
    except (TypeError, ValueError) as e:
        raise _check.renamed(e, _READ) from None


def _cache(kv_cache: Any, kv_cache_dtype: str, dtype: str, head_size: int) -> np.ndarray[Any, Any]:
    """kv_cache as pages of one kv head, [N, B, 1, L + P]."""
    kvs = _check.kv_dtypes(kv_cache_dtype, dtype)
    _check.kv_cache_layout("NHD", kvs)
    if kvs[0] != kvs[1]:
        raise ValueError(f"kv_cache_dtype: {kv_cache_dtype!r} names two, K and V are the same rows")
    dtypes = list(_check.memory(kvs[0]))
    axes: list[tuple[str, int | None]] = [("num_blocks", None), ("block_size", None), ("L + P", head_size)]
    return _check.with_one_head("kv_cache", kv_cache, dtypes, axes)
