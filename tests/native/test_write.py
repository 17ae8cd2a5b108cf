# SPDX-License-Identifier: Apache-2.0
"""reshape_and_cache, byte by byte: every element where the layout wants it, and not one byte elsewhere.

Sources and caches end at pages that nobody may touch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

import cpu_attn
from cpu_attn import _dispatch
from cpu_attn._dtypes import DTYPE_CODES
from cpu_attn._native import ffi, lib
from cpu_attn._threads import threads

from ..cases.formats import numpy_dtype
from ..harness.guard import Guarded
from ..harness.kernels import KERNELS

Index = NDArray[np.int64]


def layout(isa: str, dtype: str) -> int:
    info = ffi.new("ca_kernel_info *")
    resolved = _dispatch.resolve_isa(isa, dtype, 16)
    assert lib.ca_isa_kernel(resolved.index, DTYPE_CODES[dtype], info)
    return int(info.layout)


def places(pairs: bool, value: bool, token: Index, size: int) -> Index:
    """[T, size]: where a token's elements lie in its block, as layout.h says. An odd K of pairs has one more, its
    zero."""
    token, d = token[:, None], np.arange(size + (size % 2 if pairs and not value else 0))
    if value:
        return (token // 2 * size + d) * 2 + token % 2 if pairs else token * size + d
    group, lane = np.divmod(token, 16)
    if pairs:
        return (group * (-(-size // 2)) + d // 2) * 32 + lane * 2 + d % 2
    return (group * size + d) * 16 + lane


class Source:
    """Random bits [T, H, size], the last of them before a forbidden page; apart: elements between its rows."""

    def __init__(self, rng: np.random.Generator, count: int, heads: int, size: int, dtype: str, apart: int) -> None:
        stride_h = size + apart
        stride_t = heads * stride_h + apart
        kind = numpy_dtype(dtype)
        used = (count - 1) * stride_t + (heads - 1) * stride_h + size
        memory = np.frombuffer(rng.bytes(used * kind.itemsize), kind)
        self.guarded = Guarded(memory)
        strides = tuple(s * kind.itemsize for s in (stride_t, stride_h, 1))
        self.array: NDArray[Any] = as_strided(self.guarded.array, (count, heads, size), strides)
        self.words = self.array.view(f"u{kind.itemsize}")


class Target:
    """A K and a V cache in one piece of memory. apart: elements between blocks and between heads, V after all of K; 0:
    K and V of each head side by side."""

    def __init__(
        self, blocks: int, block_size: int, heads: int, sizes: tuple[int, int], dtype: str, isa: str, apart: int
    ) -> None:
        kind = numpy_dtype(dtype)
        shapes = [cpu_attn.get_kv_cache_shape(blocks, block_size, heads, size, dtype, isa) for size in sizes]
        self.pairs, self.block_size, self.sizes = layout(isa, dtype) == 1, block_size, sizes
        lengths = [shape[2] * shape[3] for shape in shapes]
        self.heads = heads
        if apart:
            self.strides = [(heads * (length + apart) + apart, length + apart) for length in lengths]
            self.starts = [apart, blocks * self.strides[0][0] + 2 * apart]
        else:
            self.strides = [(heads * sum(lengths), sum(lengths))] * 2
            self.starts = [0, lengths[0]]
        used = self.starts[1] + (blocks - 1) * self.strides[1][0] + (heads - 1) * self.strides[1][1] + lengths[1]
        self.guarded = Guarded(np.full(used * kind.itemsize, 0x5A, np.uint8).view(kind))
        self.words = self.guarded.array.view(f"u{kind.itemsize}")
        self.caches = [
            as_strided(
                self.guarded.array[start:],
                shape,
                tuple(s * kind.itemsize for s in (*strides, shape[3], 1)),
            )
            for start, shape, strides in zip(self.starts, shapes, self.strides, strict=True)
        ]

    def indices(self, value: bool, slots: Index) -> Index:
        """[T, heads, size]: of each element of these slots, in words."""
        block, token = np.divmod(slots, self.block_size)
        inside = places(self.pairs, value, token, self.sizes[value])
        stride_n, stride_h = self.strides[value]
        base = self.starts[value] + block[:, None] * stride_n + np.arange(self.heads) * stride_h
        return base[:, :, None] + inside[:, None, :]

    def expected(self, before: NDArray[Any], sources: tuple[Source, Source], slots: Index) -> NDArray[Any]:
        words = before.copy()
        for value, source in enumerate(sources):
            to = self.indices(bool(value), slots[slots >= 0])
            rows = source.words[slots >= 0]
            words[to] = np.concatenate([rows, np.zeros_like(rows[:, :, : to.shape[2] - rows.shape[2]])], axis=2)
        return words

    def write_and_check(self, sources: tuple[Source, Source], slots: Index, isa: str, what: object) -> None:
        want = self.expected(self.words, sources, slots)
        cpu_attn.reshape_and_cache(*(s.array for s in sources), *self.caches, slots, isa)
        wrong = np.flatnonzero(self.words != want)
        assert not len(wrong), f"{what}: {len(wrong)} words differ, the first at {wrong[0]}"
        assert self.guarded.intact(), what
        assert all(s.guarded.intact() for s in sources), what


# ---- slot mappings: of `count` tokens over `total` slots ----


def _runs(first: int) -> Callable[[np.random.Generator, int, int, int], Index]:
    def slots(rng: np.random.Generator, count: int, blocks: int, block_size: int) -> Index:
        position = np.arange(first, first + count)
        return rng.permutation(blocks)[position // block_size] * block_size + position % block_size

    return slots


def _broken(rng: np.random.Generator, count: int, blocks: int, block_size: int) -> Index:
    """Runs of all lengths, some tokens padding, some slots left out."""
    slots = np.sort(rng.permutation(blocks * block_size)[: blocks * block_size * 9 // 10])[:count]
    slots[rng.random(count) < 0.05] = -1
    return slots


def _shuffled(rng: np.random.Generator, count: int, blocks: int, block_size: int) -> Index:
    return rng.permutation(blocks * block_size)[:count]


def _swapped(rng: np.random.Generator, count: int, blocks: int, block_size: int) -> Index:
    """Whole runs but for two tokens of each 16 that changed places: the first and last slot look like a run."""
    slots = np.arange(count)
    slots[5::16], slots[6::16] = slots[6::16].copy(), slots[5:-1:16].copy()
    return slots


MAPPINGS = {
    "runs": _runs(0),
    "runs from 5": _runs(5),
    "broken": _broken,
    "shuffled": _shuffled,
    "backwards": lambda rng, count, blocks, block_size: np.arange(count)[::-1].copy(),
    "swapped": _swapped,
}
SIZES = [(1, 1), (2, 3), (3, 8), (8, 7), (20, 16), (31, 33), (33, 64), (64, 65), (80, 31), (128, 96)]


@pytest.mark.parametrize(("isa", "dtype"), KERNELS)
@pytest.mark.parametrize("block_size", [1, 8, 16, 17, 32, 128])
def test_every_byte(isa: str, dtype: str, block_size: int) -> None:
    """Twice each, so that the second write finds the first one's bytes around its own."""
    rng = np.random.default_rng(block_size)
    count, heads = 87, 3
    blocks = -(-(count + 5) // block_size) + 1 + count // (4 * block_size)
    for sizes, (name, mapping) in itertools.product(SIZES, MAPPINGS.items()):
        apart = int(rng.integers(0, 4))
        target = Target(blocks, block_size, heads, sizes, dtype, isa, apart)
        for num_threads in (1, 4):
            sources = tuple(Source(rng, count, heads, size, dtype, apart) for size in sizes)
            slots = np.asarray(mapping(rng, count, blocks, block_size), np.int64)
            with threads(num_threads):
                target.write_and_check((sources[0], sources[1]), slots, isa, (sizes, name, apart, num_threads))


@pytest.mark.parametrize(("isa", "dtype"), KERNELS)
@pytest.mark.parametrize(
    ("sizes", "block_size", "apart"),
    [((128, 128), 16, 0), ((64, 128), 32, 8), ((65, 63), 16, 1), ((1031, 2100), 20, 3)],
)
def test_every_byte_of_a_large_write(isa: str, dtype: str, sizes: tuple[int, int], block_size: int, apart: int) -> None:
    """Over 16 MiB, from where writes go past the caches (native/cache/cache.c)."""
    rng = np.random.default_rng(1)
    heads = 2
    count = 17 * 2**20 // (heads * sum(sizes) * numpy_dtype(dtype).itemsize)
    blocks = -(-(count + 5) // block_size)
    target = Target(blocks, block_size, heads, sizes, dtype, isa, apart)
    sources = (
        Source(rng, count, heads, sizes[0], dtype, apart),
        Source(rng, count, heads, sizes[1], dtype, apart),
    )
    with threads(3):
        target.write_and_check(sources, _runs(5)(rng, count, blocks, block_size), isa, "")


@pytest.mark.parametrize(("isa", "dtype"), KERNELS)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_shared_slots_hold_one_token_whole(isa: str, dtype: str, num_threads: int) -> None:
    """Runs that overlap, so that groups of 16 and single tokens meet in a slot: all heads, K and V are one token's."""
    rng = np.random.default_rng(2)
    count, heads, sizes = 600, 4, (64, 48)
    target = Target(8, 32, heads, sizes, dtype, isa, 0)
    sources = (Source(rng, count, heads, sizes[0], dtype, 0), Source(rng, count, heads, sizes[1], dtype, 0))
    starts = rng.integers(0, 8 * 32 - 20, count // 20)
    slots = (starts[:, None] + np.arange(20)).reshape(-1)
    before = target.words.copy()
    with threads(num_threads):
        cpu_attn.reshape_and_cache(*(s.array for s in sources), *target.caches, slots, isa)
    kept = np.full(count, -1)
    first = target.words[target.indices(False, slots)[:, 0, :4]]
    for slot in np.unique(slots):
        tokens = np.flatnonzero(slots == slot)
        here = tokens[(sources[0].words[tokens, 0, :4] == first[tokens[0]]).all(axis=1)]
        assert len(here) == 1, f"slot {slot} holds no token's beginning"
        kept[here[0]] = slot
    assert (target.words == target.expected(before, sources, kept)).all()


@pytest.mark.parametrize(("isa", "dtype"), KERNELS)
def test_sources_may_lie_any_way(isa: str, dtype: str) -> None:
    """Tokens backwards, one row for all of them, heads before tokens."""
    rng = np.random.default_rng(3)
    slots = np.arange(3, 43)
    target = Target(3, 16, 2, (40, 24), dtype, isa, 0)
    plain = tuple(rng.integers(0, 2**8, (2, 40, size * numpy_dtype(dtype).itemsize), np.uint8) for size in (40, 24))
    heads_first = [p.view(numpy_dtype(dtype)).transpose(1, 0, 2) for p in plain]
    one_row = [np.broadcast_to(a[:1], a.shape) for a in heads_first]
    for arrays in (heads_first, [a[::-1] for a in heads_first], one_row):
        dense = []
        for array, size in zip(arrays, target.sizes, strict=True):
            dense.append(Source(rng, 40, 2, size, dtype, 0))
            dense[-1].array[:] = array
        want = target.expected(target.words, (dense[0], dense[1]), slots)
        cpu_attn.reshape_and_cache(*arrays, *target.caches, slots, isa)
        assert (target.words == want).all()
