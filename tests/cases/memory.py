# SPDX-License-Identifier: Apache-2.0
"""The memory of a problem: its caches, what is written to them, arrays inside wider ones.

Every cache starts as bytes 0xff, NaN in every dtype, so a slot that nobody wrote, a lane that pads and a block that
nobody owns poison whoever reads them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import cpu_attn

from .formats import kinds_of, memory_dtype
from .problem import Problem
from .rotation import tokens_of, write_rotated


def wider(shape: tuple[int, ...], dtype: np.dtype[Any], strided: bool) -> NDArray[Any]:
    """NaN of this shape, the last two axes inside wider rows if strided."""
    if not strided:
        return np.full(shape, np.nan, dtype)
    *outer, rows, columns = shape
    return np.full((*outer, rows + 1, columns + 3), np.nan, dtype)[..., 1:, :columns]


def copy_of(array: NDArray[Any], strided: bool) -> NDArray[Any]:
    copy = wider(array.shape, array.dtype, strided)
    copy[...] = array
    return copy


def forbid_outside(name: str, array: NDArray[Any], strided: bool) -> None:
    """What `wider` put around an array must still be NaN."""
    if strided and isinstance(array.base, np.ndarray):
        wide, columns = array.base, array.shape[-1]
        if not (np.isnan(wide[..., :1, :]).all() and np.isnan(wide[..., columns:]).all()):
            raise AssertionError(f"{name}: elements outside of the array were written")


def caches_of(problem: Problem, isa: str) -> tuple[NDArray[Any], NDArray[Any]]:
    case = problem.case
    common = (problem.num_blocks, case.block_size, case.num_kv_heads)
    layout: dict[str, Any] = {"kv_cache_layout": case.kv_cache_layout}
    (k_shape, k_dtype), (v_shape, v_dtype) = (
        (
            cpu_attn.get_kv_cache_shape(*common, size, case.dtype, isa, kind, **layout),
            memory_dtype(kind, case.dtype),
        )
        for size, kind in zip((case.head_size, case.value_size), kinds_of(case.kv_cache_dtype), strict=True)
    )
    if case.latent:
        latent = _plain_cache(k_shape, k_dtype, case.strided)
        return latent, latent[..., : case.value_size]
    if case.kv_cache_layout != "packed":
        if case.strided and k_dtype == v_dtype:
            both = _plain_cache((*k_shape[:3], case.head_size + case.value_size), k_dtype, True)
            return both[..., : case.head_size], both[..., case.head_size :]
        return _plain_cache(k_shape, k_dtype, case.strided), _plain_cache(v_shape, v_dtype, case.strided)
    if case.strided and k_shape == v_shape and k_dtype == v_dtype:
        both = _nan_bytes((k_shape[0], 2, *k_shape[1:]), k_dtype)
        return both[:, 0], both[:, 1]
    return _nan_bytes(k_shape, k_dtype), _nan_bytes(v_shape, v_dtype)


def _plain_cache(shape: tuple[int, ...], dtype: np.dtype[Any], strided: bool) -> NDArray[Any]:
    """strided: every axis has gaps, blocks run backwards."""
    if not strided:
        return _nan_bytes(shape, dtype)
    n, a, b, d = shape
    return _nan_bytes((n, a + 1, b, 2, d + 3), dtype)[::-1, 1:, :, 1, 2 : d + 2]


def _nan_bytes(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    cache = np.empty(shape, dtype)
    cache.reshape(-1).view(np.uint8)[:] = 0xFF
    return cache


def write(problem: Problem, isa: str, key_cache: NDArray[Any], value_cache: NDArray[Any]) -> NDArray[Any]:
    """All tokens of all requests, in `pieces` calls: with one, in order; with more, shuffled, each slot first
    written with another token's key and value, and padding (slot -1, NaN) in between. Returns the queries, which a
    case may have rotated meanwhile."""
    case = problem.case
    query: NDArray[Any] = problem.query.copy()
    slots = slots_of(problem)
    if not len(slots):
        return query
    key, value = np.concatenate(problem.key), np.concatenate(problem.value)
    if case.latent:  # each column once
        value, value_cache, key_cache = key[..., case.value_size :], key_cache[..., case.value_size :], value_cache
        key = key[..., : case.value_size]
    if problem.rotation:  # queries without a key of their own come with padding
        more = len(tokens_of(problem)[0]) - len(slots)
        slots = np.append(slots, np.full(more, -1))
        key, value = (np.append(x, np.full_like(x, np.nan, shape=(more, *x.shape[1:])), axis=0) for x in (key, value))
    k_scale, v_scale = problem.scales
    how: dict[str, Any] = {"isa": isa, "k_scale": k_scale, "v_scale": v_scale, "kv_cache_dtype": case.kv_cache_dtype}
    how |= {"kv_cache_layout": case.kv_cache_layout, "kv_cache_rotation": case.kv_cache_rotation}

    def put(which: NDArray[np.int64], k: NDArray[Any], v: NDArray[Any], to: NDArray[np.int64]) -> None:
        tokens = (copy_of(k, case.strided), copy_of(v, case.strided), key_cache, value_cache, to)
        if problem.rotation:
            write_rotated(problem, problem.rotation, which, tokens, query, how)
        else:
            cpu_attn.reshape_and_cache(*tokens, **how)

    if case.pieces == 1:
        put(np.arange(len(slots)), key, value, slots)
        return query
    rng = np.random.default_rng(case.seed)
    put(np.arange(len(slots)), key, value, rng.permutation(slots))
    for part in np.array_split(rng.permutation(len(slots)), case.pieces):
        part = np.append(part, -1)
        k, v, to = key[part], value[part], slots[part]
        k[-1], v[-1], to[-1] = np.nan, np.nan, -1
        put(part, k, v, to)
    return query


def slots_of(problem: Problem) -> NDArray[np.int64]:
    """[tokens of all requests]: where each key and value lies."""
    size = problem.case.block_size
    slots = [np.zeros(0, np.int64)]
    for row, seq_len in zip(problem.block_table.astype(np.int64), problem.seq_lens, strict=True):
        j = np.arange(seq_len)
        slots.append(row[j // size] * size + j % size)
    return np.concatenate(slots)
