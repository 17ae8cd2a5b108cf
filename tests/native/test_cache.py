# SPDX-License-Identifier: Apache-2.0
"""PagedKVCache and the cache's memory: bytes come back as written, shapes are as promised."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import numpy as np
import pytest

import cpu_attn
from cpu_attn import reference
from cpu_attn._threads import threads

from ..cases.formats import numpy_dtype
from ..harness.kernels import KERNELS, ONE_DTYPE


def tokens(n: int, heads: int, size: int, dtype: str, seed: int = 0) -> Any:
    bits = np.random.default_rng(seed).integers(0, 256, (n, heads, size * numpy_dtype(dtype).itemsize), np.uint8)
    return bits.view(numpy_dtype(dtype))


@pytest.mark.parametrize(("isa", "dtype"), KERNELS)
def test_even_heads_and_blocks_of_16_need_exactly_their_elements(isa: str, dtype: str) -> None:
    for head_size, block_size in itertools.product((2, 20, 64, 80, 576), (16, 48, 128)):
        shape = cpu_attn.get_kv_cache_shape(7, block_size, 3, head_size, dtype, isa)
        assert shape == (7, 3, block_size, head_size)


@pytest.mark.parametrize(("isa", "dtype"), KERNELS)
@pytest.mark.parametrize("block_size", [1, 3, 16, 20, 33])
@pytest.mark.parametrize("sizes", [(1, 1), (7, 4), (64, 31), (33, 33)])
def test_every_bit_comes_back(isa: str, dtype: str, block_size: int, sizes: tuple[int, int]) -> None:
    """Random bytes, NaN payloads included, written out of order over an old content, gathered in order."""
    count, blocks = 45, 50
    cache = cpu_attn.PagedKVCache(blocks, block_size, 3, sizes[0], dtype, isa, head_size_v=sizes[1])
    key, value = (tokens(count, 3, size, dtype, seed) for seed, size in enumerate(sizes))
    rng = np.random.default_rng(5)
    table = rng.permutation(blocks).astype(np.int32)
    j = np.arange(count)
    slots = table[j // block_size].astype(np.int64) * block_size + j % block_size
    for order in (rng.permutation(count), rng.permutation(count)):
        cache.update(key[order], value[order], slots[order])
    got = cache.gather(table, count)
    assert got[0].tobytes() == key.tobytes()
    assert got[1].tobytes() == value.tobytes()


@pytest.mark.parametrize(("isa", "dtype"), KERNELS)
def test_padding_slots_write_nothing(isa: str, dtype: str) -> None:
    cache = cpu_attn.PagedKVCache(3, 16, 2, 8, dtype, isa)
    cache.update(tokens(4, 2, 8, dtype), tokens(4, 2, 8, dtype, 1), np.array([-1, -(2**63), -7, -48]))
    assert not cache.key_cache.view(np.uint8).any()
    assert not cache.value_cache.view(np.uint8).any()


@pytest.mark.parametrize(("isa", "dtype"), ONE_DTYPE)
@pytest.mark.parametrize("num_threads", [1, 8])
@pytest.mark.parametrize("heads", [1, 2])
def test_of_tokens_that_share_a_slot_one_stays_whole(isa: str, dtype: str, num_threads: int, heads: int) -> None:
    count = 4096
    cache = cpu_attn.PagedKVCache(3, 16, heads, 32, dtype, isa)
    bits = np.arange(count, dtype=f"u{numpy_dtype(dtype).itemsize}")  # 0..4095: no NaN in any dtype
    key = np.tile(bits[:, None, None], (1, heads, 32)).view(cache.key_cache.dtype)
    slots = np.arange(count) % 40
    with threads(num_threads, forced=True):
        cache.update(key, key, slots)
    for got in cache.gather(np.arange(3, dtype=np.int32), 40):
        winner = got.view(bits.dtype)[:, 0, 0]
        assert (got.view(bits.dtype) == winner[:, None, None]).all()
        assert (winner % 40 == np.arange(40)).all()


@pytest.mark.parametrize(("isa", "dtype"), KERNELS)
def test_memory_that_an_engine_allocated_itself(isa: str, dtype: str) -> None:
    """vLLM's cache: [blocks, heads, block_size, 2 * head_size], K and V of a (block, head) side by side."""
    blocks, heads, size, head_size = 5, 2, 16, 24
    memory = np.zeros((blocks, heads, 2, size, head_size), numpy_dtype(dtype))
    rng = np.random.default_rng(3)
    key, value, query = (rng.standard_normal((33, heads, head_size)).astype(numpy_dtype(dtype)) for _ in range(3))
    table = np.array([[4, 0, 2]], np.int32)
    j = np.arange(33)
    cpu_attn.reshape_and_cache(
        key, value, memory[:, :, 0], memory[:, :, 1], table[0].astype(np.int64)[j // 16] * 16 + j % 16, isa
    )
    start, lens, output = np.array([0, 33], np.int32), np.array([33], np.int32), np.empty_like(query)
    plan = cpu_attn.get_scheduler_metadata(1, heads, heads, head_size, lens, dtype, start, isa=isa)
    cpu_attn.attention_with_kv_cache(
        query, memory[:, :, 0], memory[:, :, 1], output, start, lens, 0.2, True, None, -1, table, 0.0, plan
    )
    want, _ = reference.attention(query, [key], [value], start, lens, 0.2, True, None, -1, 0.0, None, None)
    assert (reference.relative_rms(output, want, start) <= reference.BUDGET[dtype]).all()


def test_copy_blocks_reads_before_it_writes() -> None:
    cache = cpu_attn.PagedKVCache(4, 16, 2, 8)
    cache.key_cache[:] = np.arange(4)[:, None, None, None]
    cache.value_cache[:] = 10 + cache.key_cache
    cache.copy_blocks([(0, 1), (1, 2), (2, 0)])
    assert cache.key_cache[:, 0, 0, 0].tolist() == [2, 0, 1, 3]
    assert cache.value_cache[:, 1, 3, 5].tolist() == [12, 10, 11, 13]
    cache.copy_blocks([])


def test_copy_blocks_where_v_is_a_view_of_k() -> None:
    cache = cpu_attn.PagedKVCache(4, 16, 1, 24, "float32", head_size_v=16, kv_cache_layout="HND")
    rows = cache.key_cache
    cache.value_cache = rows[..., :16]
    rows[:] = np.arange(4)[:, None, None, None]
    cache.copy_blocks([(0, 1), (1, 2), (2, 0)])
    assert rows[:, 0, 0, 0].tolist() == rows[:, 0, 0, 23].tolist() == [2, 0, 1, 3]


BAD_PAIRS = [[(0, 4)], [(-1, 0)], [(0, 1), (2, 1)], [(0, 1, 2)], [(0.5, 1)], [1, 2], [(0,), (1, 2)], None, "ab"]


@pytest.mark.parametrize("pairs", BAD_PAIRS)
def test_copy_blocks_refuses(pairs: Any) -> None:
    cache = cpu_attn.PagedKVCache(4, 16, 2, 8)
    with pytest.raises((ValueError, TypeError), match=r"^pairs"):
        cache.copy_blocks(pairs)


@pytest.mark.parametrize("name", ["key_cache", "value_cache"])
def test_copy_blocks_of_read_only_memory(name: str) -> None:
    """Not of the other half either."""
    cache = cpu_attn.PagedKVCache(4, 16, 2, 8)
    for half in (cache.key_cache, cache.value_cache):
        half[:] = np.arange(4)[:, None, None, None]
    getattr(cache, name).flags.writeable = False
    before = cache.key_cache.tobytes(), cache.value_cache.tobytes()
    with pytest.raises(ValueError, match=f"^{name}: is read-only"):
        cache.copy_blocks([(0, 1)])
    assert (cache.key_cache.tobytes(), cache.value_cache.tobytes()) == before


def test_more_than_there_is() -> None:
    with pytest.raises(MemoryError):
        cpu_attn.PagedKVCache(2**31 - 1, 2**20, 8, 128)
    with pytest.raises(MemoryError):
        cpu_attn.PagedKVCache(2**31 - 1, 2**31 - 1, 2**16, 2**16)


def test_five_lines() -> None:
    rng = np.random.default_rng(0)
    key, value = (rng.standard_normal((20, 2, 16), np.float32) for _ in range(2))
    query = rng.standard_normal((20, 6, 16), np.float32)
    start, lens, table = np.array([0, 20], np.int32), np.array([20], np.int32), np.array([[3, 1]], np.int32)
    slots = np.concatenate([48 + np.arange(16), 16 + np.arange(4)])

    cache = cpu_attn.PagedKVCache(4, 16, num_kv_heads=2, head_size=16)
    cache.update(key, value, slots)
    plan = cache.plan(start, lens, num_heads=6)
    output = cache.attend(query, table, plan)

    want, _ = reference.attention(query, [key], [value], start, lens, 0.25, True, None, -1, 0.0, None, None)
    assert (reference.relative_rms(output, want, start) <= reference.BUDGET["float32"]).all()


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype", "sizes", "planned"),
    [
        ("bfloat16", "auto", (15, 15), (16, 16)),
        ("float32", "int4", (8, 4), (8, 8)),
        ("float32", "int4", (5, 8), (8, 8)),
    ],
)
def test_a_plan_for_other_head_sizes_is_refused(
    dtype: str, kv_cache_dtype: str, sizes: tuple[int, int], planned: tuple[int, int]
) -> None:
    """Memory of the same width."""
    (d, dv), (other, other_v) = sizes, planned
    cache = cpu_attn.PagedKVCache(1, 16, 1, d, dtype, head_size_v=dv, kv_cache_dtype=kv_cache_dtype)
    like = cpu_attn.PagedKVCache(1, 16, 1, other, dtype, head_size_v=other_v, kv_cache_dtype=kv_cache_dtype)
    assert (cache.key_cache.shape, cache.value_cache.shape) == (like.key_cache.shape, like.value_cache.shape)
    plan = like.plan(np.array([0, 1], np.int32), np.array([9], np.int32), 1)
    query = np.zeros((1, 1, other), cache.dtype)
    with pytest.raises(ValueError, match=rf"plan: made for heads of \({other}, {other_v}\), .* \({d}, {dv}\)"):
        cache.attend(query, np.zeros((1, 1), np.int32), plan)


def test_a_plan_for_another_layout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The isa may be another one, if it reads what lies there."""
    cache = cpu_attn.PagedKVCache(4, 16, 2, 8, isa="scalar")
    start, lens = np.array([0, 1], np.int32), np.array([1], np.int32)
    other = next(isa for isa, dtype in KERNELS if isa != "scalar" and dtype == "float32")
    plan = cpu_attn.get_scheduler_metadata(1, 2, 2, 8, lens, "float32", start, isa=other)
    key, value = np.ones((1, 2, 8), np.float32), np.full((1, 2, 8), 3, np.float32)
    cache.update(key, value, np.zeros(1, np.int64))
    assert (cache.attend(key, np.zeros((1, 1), np.int32), plan) == value).all()
    monkeypatch.setattr("cpu_attn.storage.cache.layout_of", lambda isa, dtype: "pairs-v1")
    with pytest.raises(ValueError, match=f"{other}.*lanes-v2"):
        cache.attend(key, np.zeros((1, 1), np.int32), plan)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda c: c.gather(np.array([0, 4], np.int32), 20), "position 1 holds block 4"),
        (lambda c: c.gather(np.array([0], np.int32), 17), "needs 2 blocks, has 1"),
        (lambda c: c.gather(np.array([0], np.int32), -1), "seq_len: -1"),
        (
            lambda c: c.update(np.zeros((1, 2, 9), np.float32), np.zeros((1, 2, 8), np.float32), np.zeros(1, np.int64)),
            "key",
        ),
    ],
)
def test_refused(call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call(cpu_attn.PagedKVCache(4, 16, 2, 8))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
@pytest.mark.parametrize("num_blocks", [3, 5, 1000])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8/int4"])
def test_copies_begin_at_a_cache_line(kv_cache_dtype: str, num_blocks: int, copied: Any) -> None:
    cache = cpu_attn.PagedKVCache(num_blocks, 16, 2, 24, "bfloat16", kv_cache_dtype=kv_cache_dtype)
    cache.update(tokens(40, 2, 24, "bfloat16"), tokens(40, 2, 24, "bfloat16", 1), np.arange(40))
    for _ in range(4):
        found = copied(cache)
        assert found.descriptor == cache.descriptor
        for memory, there in ((found.key_cache, cache.key_cache), (found.value_cache, cache.value_cache)):
            assert memory.ctypes.data % 64 == 0
            assert memory.dtype == there.dtype
            assert memory.tobytes() == there.tobytes()
            assert not np.may_share_memory(memory, there)


def test_what_copies_share() -> None:
    cache = cpu_attn.PagedKVCache(3, 16, 2, 24)
    both, key_cache = copy.deepcopy([cache, cache]), copy.deepcopy([cache.key_cache, cache])
    assert both[0] is both[1]
    assert key_cache[0] is key_cache[1].key_cache
    shallow = copy.copy(cache)
    assert shallow is not cache
    assert shallow.key_cache is cache.key_cache
    assert shallow.value_cache is cache.value_cache
