# SPDX-License-Identifier: Apache-2.0
"""This module does what stands between a model's projections and attention in one call: norm, rotary embedding, cache
write."""

from __future__ import annotations

from typing import Any

from cpu_attn import _check
from cpu_attn._native import lib
from cpu_attn.ops import Written, cache_format, run_write

_IN_PLACE = tuple("query" if name == "query_out" else name for name in _check.ROTARY)


def rotary_reshape_and_cache(
    query: Written,
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
    query_out: Written | None = None,
    kv_cache_layout: str = "packed",
    kv_cache_rotation: str = "none",
    k_feedback: Any = None,
) -> Written:
    """Norms and rotates queries and keys, and writes keys and values into their slots, in one pass.

    This is vLLM's ``fused_qk_norm_rope`` (or ``rotary_embedding``) and :func:`reshape_and_cache` together. All of it is
    float32 from the inputs on and is rounded once, so results are nearer to the exact ones than those of the same steps
    one by one. Symbols: as in :func:`reshape_and_cache`.

    Args:
        query: [T, Hq, D] of float32, float16 or bfloat16. The last axis is dense. It is rotated where it lies, unless
            ``query_out`` is given, also for tokens with a negative slot.
        key: [T, Hkv, D], of the same dtype. The last axis is dense. Keys go rotated into the cache and stay as they
            are.
        value: [T, Hkv, Dv], of the same dtype. The last axis is dense.
        key_cache: as in :func:`reshape_and_cache`.
        value_cache: as in :func:`reshape_and_cache`.
        slot_mapping: int64 [T], block * B + place in the block; key and value of a token with a negative slot are
            skipped.
        positions: int64 [T], rows of ``cos_sin_cache``.
        cos_sin_cache: [max_position, rot_dim], float32 or the dtype of ``query``. A row is rot_dim / 2 cosines, then as
            many sines. rot_dim is even and at most D; dimensions from rot_dim on are not rotated.
        is_neox: whether dimension i turns with i + rot_dim / 2 (GPT-NeoX, Llama), else 2 i turns with 2 i + 1 (GPT-J).
        q_weight: [D], float32 or the dtype of ``query``, or None for no norm. Each head x of the queries becomes x /
            sqrt(mean(x**2) + eps) * q_weight before it turns (Qwen3; Gemma 3 with 1 + its weight).
        k_weight: the same for keys.
        eps: of these norms.
        isa: as in :func:`reshape_and_cache`.
        k_scale: as in :func:`reshape_and_cache`.
        v_scale: as in :func:`reshape_and_cache`.
        kv_cache_dtype: as in :func:`reshape_and_cache`.
        query_out: [T, Hq, D] to write the queries to, or None. It is ``query`` itself or memory apart from all inputs.
        kv_cache_layout: as in :func:`reshape_and_cache`.
        kv_cache_rotation: as in :func:`reshape_and_cache`. The queries that are returned do not have it.
        k_feedback: as in :func:`reshape_and_cache`.

    Returns:
        ``query_out`` where given, else ``query``.

    Raises:
        ValueError: a shape, a stride, a slot or a position is out of range, a name is unknown, or memory overlaps.
            Nothing has been written then.
        TypeError: an argument is no array, or has another dtype. Nothing has been written then.
        UnavailableError: this machine does not have the isa.

    Maths: arXiv:2104.09864 (rotary embedding), arXiv:1910.07467 (RMS norm).

    Example:
        >>> import numpy as np
        >>> from cpu_attn import get_kv_cache_shape, rotary_reshape_and_cache
        >>> query, (key, value) = np.ones((3, 8, 64), np.float32), np.ones((2, 3, 2, 64), np.float32)
        >>> angles = np.arange(100)[:, None] / 10000 ** (np.arange(32) / 32)
        >>> cos_sin_cache = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)  # rot_dim = 64
        >>> key_cache, value_cache = np.zeros((2, *get_kv_cache_shape(4, 16, 2, 64, "float32")), np.float32)
        >>> slots = positions = np.arange(3)
        >>> out = rotary_reshape_and_cache(query, key, value, key_cache, value_cache, slots, positions, cos_sin_cache)
        >>> out is query, bool((query[0] == 1).all())  # position 0 turns nothing
        (True, True)
    """
    out = query if query_out is None else query_out
    turns = (cos_sin_cache, positions, q_weight, k_weight)
    arrays = (key_cache, value_cache, out, key, value, slot_mapping, query, *turns, k_feedback)
    names = _IN_PLACE if out is query else _check.ROTARY
    form = cache_format(isa, kv_cache_dtype, kv_cache_layout, kv_cache_rotation)
    how = (_check.boolean("is_neox", is_neox), _check.number("eps", eps, 0.0))
    run_write(lib.ca_rotary_write, names, arrays, form, k_scale, v_scale, *how)
    return out
