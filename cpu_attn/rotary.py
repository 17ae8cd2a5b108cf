# SPDX-License-Identifier: Apache-2.0
"""What stands between a model's projections and attention, in one call: norm, rotary embedding, cache write."""

from __future__ import annotations

from typing import Any

from cpu_attn import _check
from cpu_attn._native import lib
from cpu_attn.ops import run_write

_IN_PLACE = tuple("query" if name == "query_out" else name for name in _check.ROTARY)


def rotary_reshape_and_cache(
    query: Any,
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slot_mapping: Any,
    positions: Any,
    cos_sin_cache: Any,
    is_neox: bool = True,
    q_weight: Any = None,
    k_weight: Any = None,
    eps: float = 1e-6,
    isa: str = "auto",
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    kv_cache_dtype: str = "auto",
    *,
    query_out: Any = None,
    kv_cache_layout: str = "packed",
    kv_cache_rotation: str = "none",
) -> Any:
    """Norms and rotates the queries and keys of T tokens, and writes keys and values into their slots: vLLM's
    ``fused_qk_norm_rope`` (or ``rotary_embedding``) and ``reshape_and_cache`` in one pass. Returns the queries.

    query [T, Hq, D], key [T, Hkv, D], value [T, Hkv, Dv]: float32, float16 or bfloat16, last axis dense. Queries are
    rotated where they lie, or into query_out [T, Hq, D]; keys go rotated into the cache, and stay as they are.
    key_cache, value_cache, slot_mapping, isa, k_scale, v_scale, kv_cache_dtype, kv_cache_layout,
    kv_cache_rotation: as in :func:`reshape_and_cache`; the queries that are returned are not rotated by it. The query
    of a token whose slot is negative is rotated all the same.
    positions: int64 [T], rows of cos_sin_cache.
    cos_sin_cache: [max_position, rot_dim], float32 or the dtype of query; a row is cos, then sin, of rot_dim / 2
    angles. rot_dim is even and at most D; the dimensions from rot_dim on are not rotated.
    is_neox: dimension i turns with i + rot_dim / 2 (GPT-NeoX, Llama); else 2 * i with 2 * i + 1 (GPT-J).
    q_weight, k_weight: [D], float32 or the dtype of query, or None: x becomes x / sqrt(mean(x**2) + eps) * weight,
    over each head, before it turns (Qwen3; Gemma 3 with 1 + its weight).

    All in float32 from the inputs on, rounded once to the dtype: nearer to the truth than the same steps one by one,
    each of which rounds. Raises ValueError or TypeError, before anything is written, for shapes, dtypes, strides, slots
    and positions out of range, and memory that overlaps (query_out may be query, or apart from it).
    Maths: arXiv:2104.09864 (rotary embedding), arXiv:1910.07467 (RMS norm).
    """
    out = query if query_out is None else query_out
    turns = (positions, cos_sin_cache, q_weight, k_weight)
    arrays = (key_cache, value_cache, out, query, key, value, slot_mapping, *turns)
    names = _IN_PLACE if out is query else _check.ROTARY
    cache = (isa, k_scale, v_scale, kv_cache_dtype, kv_cache_layout, kv_cache_rotation)
    how = (_check.boolean("is_neox", is_neox), _check.number("eps", eps, 0.0))
    run_write(lib.ca_rotary_write, names, arrays, *cache, *how)
    return out
