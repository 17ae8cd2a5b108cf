# SPDX-License-Identifier: Apache-2.0
"""This module computes multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) over its cache of latent rows, with
absorbed weights.

A token's row is its latent kv_c beside its rotated key k_pe, shared by all heads: [kv_c | k_pe], 512 + 64 columns in
DeepSeek's models. With W_UK absorbed into the query and W_UV into what follows, every head is attention over the same
rows: K is the whole row, V the part of it that is kv_c. This is what :func:`cpu_attn.attention_with_kv_cache` does for
one plain kv head, ``NHD``, whose V is a view of its K; here the axis of that head, and the view, are left to C:

    plan = get_scheduler_metadata(num_reqs, num_heads, 1, 576, seq_lens, dtype, query_start_loc,
                                  head_size_v=512, kv_cache_layout="NHD")
"""

from __future__ import annotations

from typing import Any

from cpu_attn import _check, ops
from cpu_attn._arrays import view
from cpu_attn._native import lib
from cpu_attn.ops import Written
from cpu_attn.plan import SchedulerMetadata

# These are the names of arguments in the calls underneath, and those that our callers know.
_WRITTEN = {"key": "kv_c", "value": "k_pe", "key_cache": "kv_cache", "value_cache": "kv_cache"}
_WRITTEN |= {"k_scale": "scale", "v_scale": "scale"}
_READ = {"key_cache": "kv_cache"}


def concat_and_cache_mla(
    kv_c: Any,
    k_pe: Any,
    kv_cache: Any,
    slot_mapping: Any,
    kv_cache_dtype: str = "auto",
    scale: float = 1.0,
) -> None:
    """Writes the latent rows [kv_c | k_pe] of T tokens into their slots. It is the cache write of MLA, with vLLM's name
    and order of arguments.

    Symbols: L elements of a latent (512 in DeepSeek's models), P of the rotated key that all heads share (64), N blocks
    of B tokens.

    Args:
        kv_c: [T, L] of float32, float16 or bfloat16. The last axis is dense.
        k_pe: [T, P], of the same dtype. The last axis is dense.
        kv_cache: [N, B, L + P], changed in place. The strides of N and B are free.
        slot_mapping: int64 [T], block * B + place in the block; a token with a negative slot is skipped.
        kv_cache_dtype: what the cache holds: ``auto`` for the dtype of ``kv_c``, or an fp8 dtype, for x / scale.
        scale: what rows are divided by in fp8 caches; 1 for others.

    Raises:
        ValueError: a shape, a stride or a slot is out of range, a name is unknown, or memory overlaps. Nothing has been
            written then.
        TypeError: an argument is no array, or has another dtype. Nothing has been written then.

    Maths: DeepSeek-V2, arXiv:2405.04434.

    Example:
        >>> import numpy as np
        >>> from cpu_attn import concat_and_cache_mla
        >>> kv_cache = np.zeros((4, 16, 512 + 64), np.float32)
        >>> concat_and_cache_mla(np.ones((3, 512), np.float32), np.ones((3, 64), np.float32), kv_cache, np.arange(3))
        >>> float(kv_cache.sum()) == 3 * (512 + 64)
        True
    """
    latent = _check.with_one_head("kv_c", kv_c, list(_check.FLOATS), [("T", None), ("kv_lora_rank", None)])
    (tokens, _, rank), dtype = latent.shape, view("kv_c", kv_c).dtype
    rotated = _check.with_one_head("k_pe", k_pe, [dtype], [("T", tokens), ("rope size", None)])
    kvs = _check.kv_dtypes(kv_cache_dtype, dtype)
    _check.kv_cache_layout("NHD", kvs)
    if kvs[0] != kvs[1]:
        raise ValueError(f"kv_cache_dtype: {kv_cache_dtype!r} names two, K and V are the same rows")
    axes = [("num_blocks", None), ("block_size", None), ("L + P", rank + rotated.shape[2])]
    pages = _check.with_one_head("kv_cache", kv_cache, list(_check.memory(kvs[0])), axes)
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
    output: Written,
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
    selected_blocks: Any = None,
    selected_tokens: Any = None,
) -> Written:
    """Computes MLA with absorbed weights over latent rows, into ``output``, which is returned.

    Every head attends over the same rows: K is the whole row [kv_c | k_pe], V is its first L elements. The plan is made
    for one kv head of plain rows, as the example shows. Symbols: as in :func:`concat_and_cache_mla`.

    Args:
        query: [T, Hq, L + P]: [q_nope W_UK | q_pe] of each head.
        kv_cache: [N, B, L + P], read where it lies.
        output: [T, Hq, L], written: what W_UV is still to be applied to.
        query_start_loc: int32 [R + 1], as the plan has it.
        seq_lens: int32 [R], as the plan has it.
        scale: the factor of q.k, of the heads before absorption: 1 / sqrt(128 + 64) in DeepSeek's models.
        causal: as the plan has it.
        block_table: int32 [R, M], the blocks of each request in order.
        scheduler_metadata: the plan.
        kv_cache_dtype: as the plan and :func:`concat_and_cache_mla` had it.
        k_scale: the ``scale`` of :func:`concat_and_cache_mla`.
        sliding_window: as the plan has it.
        softcap: as in :func:`attention_with_kv_cache`.
        s_aux: [Hq], or None: attention sinks.
        dynamic_causal: as the plan has it.
        lse: float32 [Hq, T], or None: receives the log of each softmax's denominator.
        selected_blocks: int32 [R, 1, S], or None for all: which blocks each request attends, as in
            :func:`attention_with_kv_cache`. The plan may say that query blocks select for themselves, or query heads.
        selected_tokens: int32 [T, S], or None for all: which keys each query token attends, as in
            :func:`attention_with_kv_cache`.

    Returns:
        ``output``.

    Raises:
        ValueError: an argument is out of range, memory overlaps, or the plan was made for something else. Nothing has
            been written then.
        TypeError: an argument is no array, or has another dtype. Nothing has been written then.
        MemoryError: there is no memory for the plan's ``workspace_bytes``.

    Maths: DeepSeek-V2, arXiv:2405.04434.

    Example:
        >>> import numpy as np
        >>> from cpu_attn import attention_mla, concat_and_cache_mla, get_scheduler_metadata
        >>> rng = np.random.default_rng(0)
        >>> kv_cache, block_table = np.zeros((1, 16, 576), np.float32), np.array([[0]], np.int32)
        >>> kv_c, k_pe = rng.standard_normal((5, 512), np.float32), rng.standard_normal((5, 64), np.float32)
        >>> concat_and_cache_mla(kv_c, k_pe, kv_cache, np.arange(5))
        >>> query, output = rng.standard_normal((5, 8, 576), np.float32), np.empty((5, 8, 512), np.float32)
        >>> loc, lens = np.array([0, 5], np.int32), np.array([5], np.int32)
        >>> plan = get_scheduler_metadata(1, 8, 1, 576, lens, "float32", loc, head_size_v=512, kv_cache_layout="NHD")
        >>> output = attention_mla(query, kv_cache, output, loc, lens, 192**-0.5, True, block_table, plan)
        >>> bool(np.allclose(output[0], kv_c[0]))  # the first token sees its own row alone
        True
    """
    plan = _check.plan("scheduler_metadata", scheduler_metadata)
    _check.latent(plan)
    step = (query_start_loc, seq_lens, None, block_table, s_aux, dynamic_causal)
    arrays = (output, lse, query, kv_cache, None, *step, selected_blocks, None, selected_tokens)
    try:
        _check.same_call(plan, sliding_window, kv_cache_dtype, "NHD", "none")
        scales = _check.scales(k_scale, k_scale, plan.kv_dtypes)
        latent = lib.CA_ATTEND_LATENT
        ops.run_attention(plan, arrays, scale, softcap, scales, _check.boolean("causal", causal), kind=latent)
    except (TypeError, ValueError) as e:
        raise _check.renamed(e, _READ) from None
    return output
