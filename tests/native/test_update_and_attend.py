# SPDX-License-Identifier: Apache-2.0
"""update_and_attend: what update and then attend do, in one call that checks everything before it writes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cpu_attn
from cpu_attn import profiling, reference
from cpu_attn.serving import BlockManager

from ..harness.kernels import KERNELS

BLOCKS, BLOCK, KV_HEADS, HEADS, SIZE, SIZE_V = 6, 16, 2, 6, 32, 16
# Two requests, of which one has 20 keys that an earlier step wrote, and none of block 5.
STARTS, LENS, TABLE = np.array([0, 3, 21], np.int32), np.array([23, 18], np.int32), np.array([[3, 1], [0, 4]], np.int32)
POSITIONS = [np.arange(20, 23), np.arange(18)]


def slots(request: int, positions: Any) -> Any:
    return TABLE[request][positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK


SLOTS, EARLIER = np.concatenate([slots(r, at) for r, at in enumerate(POSITIONS)]), slots(0, np.arange(20))


def numbers(dtype: Any, *shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype)


def cache_of(dtype: str = "float32", **options: Any) -> Any:
    """A cache that holds the 20 keys; their numbers."""
    cache = cpu_attn.PagedKVCache(BLOCKS, BLOCK, KV_HEADS, SIZE, dtype, head_size_v=SIZE_V, **options)
    key, value = (numbers(cache.dtype, 20, KV_HEADS, size, seed=size) for size in (SIZE, SIZE_V))
    cache.update(key, value, EARLIER)
    return cache, key, value


def step_of(cache: Any) -> dict[str, Any]:
    return {
        "key": numbers(cache.dtype, 21, KV_HEADS, SIZE, seed=1),
        "value": numbers(cache.dtype, 21, KV_HEADS, SIZE_V, seed=2),
        "query": numbers(cache.dtype, 21, HEADS, SIZE, seed=3),
        "slot_mapping": SLOTS,
        "block_table": TABLE,
        "plan": cache.plan(STARTS, LENS, HEADS),
    }


@pytest.mark.parametrize(("isa", "dtype"), KERNELS)
def test_the_oracle_sees_old_and_new_tokens(isa: str, dtype: str) -> None:
    cache, key, value = cache_of(dtype, isa=isa)
    step = step_of(cache)
    lse = np.empty((HEADS, 21), np.float32)
    output = cache.update_and_attend(**step, lse=lse)
    keys = [np.concatenate([key, step["key"][:3]]), step["key"][3:]]
    values = [np.concatenate([value, step["value"][:3]]), step["value"][3:]]
    want, want_lse = reference.attention(
        *(step["query"], keys, values, STARTS, LENS, SIZE**-0.5, True, None, -1, 0.0, None, None)
    )
    assert (reference.relative_rms(output, want, STARTS) <= reference.BUDGET[dtype]).all()
    lse_error = np.abs(lse - want_lse) / np.maximum(1, np.abs(want_lse))
    assert (lse_error <= reference.LSE_BUDGET[dtype]).all()


@pytest.mark.parametrize("layout", ["packed", "HND", "NHD"])
@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype", "rotation", "feedback"),
    [
        ("float32", "auto", "none", False),
        ("float16", "fp8_e5m2", "none", False),
        ("bfloat16", "int8/int4", "hadamard", False),
        ("float32", "int8", "hadamard/none", True),
        ("bfloat16", "auto", "hadamard", False),
    ],
)
def test_the_bits_of_two_calls(layout: str, dtype: str, kv_cache_dtype: str, rotation: str, feedback: bool) -> None:
    if layout != "packed" and "int" in kv_cache_dtype:
        pytest.skip("plain rows hold no integers")
    factors = numbers(np.float32, KV_HEADS, SIZE, SIZE) / SIZE if feedback else None
    found = []
    for one_call in (False, True):
        cache, _, _ = cache_of(
            dtype,
            kv_cache_dtype=kv_cache_dtype,
            kv_cache_rotation=rotation,
            kv_cache_layout=layout,
            k_feedback=factors,
            **({"k_scale": 0.5, "v_scale": 2.0} if "fp8" in kv_cache_dtype else {}),
        )
        step = step_of(cache)
        logits = {"softcap": 20.0, "s_aux": numbers(np.float32, HEADS), "scale": 0.3}
        if one_call:
            output = cache.update_and_attend(**step, **logits)
        else:
            cache.update(step["key"], step["value"], SLOTS)
            output = cache.attend(step["query"], TABLE, step["plan"], **logits)
        found.append((output.tobytes(), cache.key_cache.tobytes(), cache.value_cache.tobytes()))
    assert found[0] == found[1]


def test_a_step_of_a_block_manager() -> None:
    found = []
    for one_call in (False, True):
        cache = cpu_attn.PagedKVCache(8, BLOCK, KV_HEADS, SIZE)
        manager = BlockManager(cache)
        manager.allocate("a")
        for tokens in ([*range(20)], [7]):
            step = manager.step([("a", tokens)])
            key, value = numbers(np.float32, 2, len(tokens), KV_HEADS, SIZE)
            query = numbers(np.float32, len(tokens), HEADS, SIZE)
            if one_call:
                found.append(cache.update_and_attend(key, value, query, step))
            else:
                cache.update(key, value, step)
                found.append(cache.attend(query, step))
    assert all((one == two).all() for one, two in zip(found[:2], found[2:], strict=True))
    with pytest.raises(ValueError, match="block_table: is given, and slot_mapping is a step, which has one"):
        cache.update_and_attend(key, value, query, step, TABLE[:1, :1])
    with pytest.raises(ValueError, match="step: for blocks of 16 tokens, this cache has 32"):
        cpu_attn.PagedKVCache(8, 32, KV_HEADS, SIZE).update_and_attend(key, value, query, step)


@pytest.mark.parametrize(
    ("spoil", "error", "words"),
    [
        (lambda c, s: {"slot_mapping": SLOTS + 3 * BLOCK}, ValueError, r"slot_mapping\[19\]: 112, expected less than"),
        (lambda c, s: {"slot_mapping": SLOTS[:-1]}, ValueError, "slot_mapping"),
        (lambda c, s: {"slot_mapping": SLOTS.astype(np.int32)}, TypeError, "slot_mapping: dtype int32, expected int64"),
        (lambda c, s: {"block_table": TABLE + 2}, ValueError, "block_table: request 1: position 1 holds block 6"),
        (lambda c, s: {"block_table": None}, TypeError, "block_table"),
        (lambda c, s: {"key": s["key"][:-1]}, ValueError, "key"),
        (lambda c, s: {"value": s["value"][..., :-1]}, ValueError, "value"),
        (lambda c, s: {"key": s["key"].astype(np.float64)}, TypeError, "key: dtype float64"),
        (lambda c, s: {"query": s["query"][:, :4]}, ValueError, "query"),
        (lambda c, s: {"s_aux": np.zeros(HEADS - 1, np.float32)}, ValueError, "s_aux"),
        (lambda c, s: {"attn_bias": np.zeros((1, 1, 18, 22), np.float32)}, ValueError, "attn_bias"),
        (lambda c, s: {"softcap": -1.0}, ValueError, "softcap"),
        (lambda c, s: {"plan": c.plan(STARTS, LENS, HEADS + 2)}, ValueError, "query"),
        (lambda c, s: {"key": c.key_cache.reshape(-1)[: s["key"].size].reshape(s["key"].shape)}, ValueError, "key"),
        (
            lambda c, s: {"block_table": c.key_cache.view(np.int32).reshape(-1)[:4].reshape(2, 2)},
            ValueError,
            "key_cache: shares memory with block_table",
        ),
        (lambda c, s: {"output": s["query"][..., :SIZE_V]}, ValueError, "output: shares memory with query"),
        (
            lambda c, s: {"attn_bias": c.value_cache.reshape(-1)[: 23 * 18].reshape(1, 1, 18, 23)},
            ValueError,
            "value_cache: shares memory with attn_bias",
        ),
    ],
)
def test_what_is_refused_leaves_everything_as_it_was(spoil: Any, error: type[Exception], words: str) -> None:
    cache, _, _ = cache_of()
    step = step_of(cache)
    step["output"] = np.full((21, HEADS, SIZE_V), 7, np.float32)
    step |= spoil(cache, step)
    before = cache.key_cache.tobytes(), cache.value_cache.tobytes(), step["output"].tobytes()
    with pytest.raises(error, match=words):
        cache.update_and_attend(**step)
    assert before == (cache.key_cache.tobytes(), cache.value_cache.tobytes(), step["output"].tobytes())


def test_read_only_memory() -> None:
    cache, _, _ = cache_of()
    cache.value_cache.flags.writeable = False
    before = cache.key_cache.tobytes()
    with pytest.raises(ValueError, match="value_cache: is read-only"):
        cache.update_and_attend(**step_of(cache))
    assert before == cache.key_cache.tobytes()


def test_tokens_without_a_slot_are_skipped() -> None:
    """What is not written is not seen: the cache keeps zeros there."""
    cache, key, value = cache_of()
    step = step_of(cache)
    step["slot_mapping"] = np.full(21, -1, np.int64)
    output = cache.update_and_attend(**step)
    keys = [np.concatenate([key, np.zeros((3, KV_HEADS, SIZE))]), np.zeros((18, KV_HEADS, SIZE))]
    values = [np.concatenate([value, np.zeros((3, KV_HEADS, SIZE_V))]), np.zeros((18, KV_HEADS, SIZE_V))]
    want, _ = reference.attention(
        *(step["query"], keys, values, STARTS, LENS, SIZE**-0.5, True, None, -1, 0.0, None, None)
    )
    assert np.allclose(output, want, atol=1e-5)


def test_a_profile_has_one_call() -> None:
    cache, _, _ = cache_of("bfloat16")
    assert cache.dtype == ml_dtypes.bfloat16
    step = step_of(cache)
    with profiling.profile() as profile:
        cache.update_and_attend(**step)
    (kind,) = profile.totals
    assert (kind.name, kind.dtype) == ("update_and_attend", "bfloat16")
