# SPDX-License-Identifier: Apache-2.0
"""No tokens, no requests, no blocks of a cache, no columns of a table: every public function gives as little back."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cpu_attn
from cpu_attn import BlockManager, PagedKVCache, StoredCache, convert, sparse
from cpu_attn.distributed import ContextParallel, ThreadGroup

F32 = np.float32
ENGINES = [e.name for e in cpu_attn.engines() if e.available]
KINDS = [("packed", kv, rotation) for kv in ("auto", "int8", "fp8") for rotation in ("none", "hadamard")]
KINDS += [("HND", "auto", "hadamard"), ("NHD", "fp8", "none")]
SIZES = list(product((0, 3), (0, 4), (0, 2), (0, 2)))  # T, N, R, M


def zeros(*shape: int) -> Any:
    return np.zeros(shape, F32)


def ints(*shape: int) -> Any:
    return np.zeros(shape, np.int32)


def cache_of(kind: tuple[str, str, str], num_blocks: int) -> PagedKVCache:
    layout, kv, rotation = kind
    named: Any = {"kv_cache_layout": layout, "kv_cache_dtype": kv, "kv_cache_rotation": rotation}
    return PagedKVCache(num_blocks, 16, 2, 8, **named)


@pytest.mark.parametrize("shape", [(0, 8), (0, 0, 8), (3, 0, 8), (0, 1), (0, 20)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("back", [False, True])
def test_rotate(shape: tuple[int, ...], dtype: Any, back: bool) -> None:
    got = cpu_attn.rotate(np.zeros(shape, dtype), back)
    assert got.shape == shape and got.dtype == (np.float64 if dtype == np.float64 else np.float32)


@pytest.mark.parametrize("rot_dim", [None, 0])
def test_balance(rot_dim: int | None) -> None:
    assert cpu_attn.balance(zeros(0, 8), zeros(0, 8), rot_dim).shape == (0, 8)


def test_error_feedback() -> None:
    assert cpu_attn.error_feedback(zeros(0, 8)).shape == (0, 8, 8)
    assert cpu_attn.error_feedback(zeros(2, 1)).tolist() == [[[0.0]]] * 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_tokens", "num_blocks"), list(product((0, 3), (0, 4))))
def test_writes(kind: tuple[str, str, str], num_tokens: int, num_blocks: int) -> None:
    """Tokens that have no slot, or slots that no token has."""
    cache = cache_of(kind, num_blocks)
    before = cache.key_cache.tobytes()
    cache.update(zeros(num_tokens, 2, 8), zeros(num_tokens, 2, 8), np.full(num_tokens, -1))
    assert cache.key_cache.tobytes() == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_blocks", [0, 4])
def test_caches(kind: tuple[str, str, str], num_blocks: int, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    cache = cache_of(kind, num_blocks)
    assert [x.shape for x in cache.gather(ints(0), 0)] == [(0, 2, 8)] * 2
    for none in ([], {}, np.zeros((0, 2), int)):
        cache.copy_blocks(none)
    cache.save(tmp_path / "cache")
    for found in (PagedKVCache.load(tmp_path / "cache"), convert(StoredCache.load(tmp_path / "cache"))):
        assert found.num_blocks == num_blocks and found.key_cache.shape == cache.key_cache.shape
    other = convert(cache, dtype="bfloat16", kv_cache_dtype="int4", kv_cache_layout="packed")
    assert other.num_blocks == num_blocks


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_blocks", "num_reqs", "columns"), list(product((0, 4), (0, 2), (0, 2))))
def test_attention(kind: tuple[str, str, str], engine: str, num_blocks: int, num_reqs: int, columns: int) -> None:
    """Requests without tokens, then tokens without keys, whose rows are 0 and whose lse is -inf."""
    cache, table = cache_of(kind, num_blocks), ints(num_reqs, columns)
    for num_tokens, shared in product({0, num_reqs}, (None, table)):
        starts = np.linspace(0, num_tokens, num_reqs + 1).astype(np.int32)
        plan = cache.plan(starts, ints(num_reqs), 4, engine=engine, block_table=shared)
        output, lse = np.full((num_tokens, 4, 8), np.nan, F32), np.full((4, num_tokens), np.nan, F32)
        features = {"alibi_slopes": zeros(4), "attn_bias": zeros(1, 1, num_tokens, 0)}
        cache.attend(zeros(num_tokens, 4, 8), table, plan, output=output, lse=lse, **features)
        assert not output.any() and (lse == -np.inf).all()


@pytest.mark.parametrize(("num_tokens", "num_blocks", "num_reqs", "columns"), SIZES)
def test_other_calls(num_tokens: int, num_blocks: int, num_reqs: int, columns: int) -> None:
    if num_tokens and not num_reqs:
        return
    starts, lens, table = ints(num_reqs + 1), ints(num_reqs), ints(num_reqs, columns)
    starts[1:] = num_tokens
    slots = np.full(num_tokens, -1)
    step = (starts, lens, table)
    sparse.index_and_cache(zeros(num_tokens, 8), zeros(num_blocks, 16, 8), slots)
    query, weights = zeros(num_tokens, 2, 8), zeros(num_tokens, 2)
    selected = sparse.select_tokens(query, zeros(num_blocks, 16, 8), weights, *step, 3)
    assert selected.shape == (num_tokens, 3) and (selected == -1).all()
    bounds = zeros(num_blocks, 2, 8), zeros(num_blocks, 2, 8)
    sparse.update_block_bounds(zeros(num_tokens, 2, 8), slots, *bounds, 16)
    scores = sparse.score_blocks(zeros(num_tokens, 4, 8), *bounds, table, lens, starts, 16)
    assert scores.shape == (num_reqs, 2, columns) and (scores == -np.inf).all()
    pages = sparse.select_blocks(scores, lens, 16, 2)
    assert pages.shape == (num_reqs, 2, columns) and (pages == -1).all()
    assert sparse.query_blocks(starts, lens, 4)[0].tolist() == [0, num_tokens][: 1 + bool(num_tokens)]
    cpu_attn.concat_and_cache_mla(zeros(num_tokens, 6), zeros(num_tokens, 2), zeros(num_blocks, 16, 8), slots)
    rows: Any = {"head_size_v": 6, "kv_cache_layout": "NHD"}
    plan = cpu_attn.get_scheduler_metadata(num_reqs, 4, 1, 8, lens, "float32", starts, **rows)
    latent, output = zeros(num_blocks, 16, 8), np.full((num_tokens, 4, 6), np.nan, F32)
    cpu_attn.attention_mla(zeros(num_tokens, 4, 8), latent, output, *step[:2], 1.0, True, table, plan)
    assert not output.any()
    new = zeros(num_tokens, 2, 8)
    caches = zeros(num_blocks, 2, 16, 8), zeros(num_blocks, 2, 16, 8)
    cos_sin = zeros(min(1, num_tokens), 8)
    cpu_attn.rotary_reshape_and_cache(zeros(num_tokens, 4, 8), new, new.copy(), *caches, slots, slots + 1, cos_sin)
    out, lse = cpu_attn.merge_states(zeros(2, num_tokens, 4, 8), zeros(2, 4, num_tokens))
    assert out.shape == (num_tokens, 4, 8) and lse.shape == (4, num_tokens)


def test_steps() -> None:
    """A step of no requests, and one whose request has no new tokens."""
    cache = PagedKVCache(4, 16, 2, 8)
    manager = BlockManager(cache)
    manager.allocate("a")
    for batch in ([], [("a", [])]):
        step = manager.step(batch)
        cache.update(zeros(0, 2, 8), zeros(0, 2, 8), step)
        assert cache.attend(zeros(0, 4, 8), step).shape == (0, 4, 8)


def test_ranks() -> None:
    (group,) = ThreadGroup.make(1)
    ranks = ContextParallel(group)
    assert ranks.local_seq_lens(ints(0)).shape == ranks.slot_mapping(np.zeros(0, np.int64), 16).shape == (0,)
    assert ranks.all_gather_heads(zeros(0, 4, 8)).shape == (0, 4, 8)
    assert group.all_gather(zeros(0, 3)).shape == (1, 0, 3)
    cache = PagedKVCache(4, 16, 2, 8)
    step = ranks.step(BlockManager(cache).step([]))
    assert ranks.attend(cache, zeros(0, 4, 8), step).shape == (0, 4, 8)


@pytest.mark.parametrize("length", [0, None])
def test_biases(length: int | None) -> None:
    lengths = [] if length is None else [length]
    assert [x.shape for x in cpu_attn.make_alibi_bias([0.5], "float32", lengths)] == [(1, 1, 0, 0)] * len(lengths)
    assert [x.shape for x in cpu_attn.make_sliding_window_bias(lengths, 2, "float32")] == [(1, 0, 0)] * len(lengths)
