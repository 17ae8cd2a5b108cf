# SPDX-License-Identifier: Apache-2.0
"""Steps for the tests of the backend layer: requests over a paged cache, their metadata, and the oracle's answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadata, PagedAttention, reference

from ..cases.formats import numpy_dtype

Array = np.ndarray[Any, Any]
LAYER = SimpleNamespace(_k_scale=1.0, _v_scale=np.array(1.0, np.float32))
SLOPES = [0.5, 0.25, 0.0625, 0.125]
SINKS = np.array([0.5, -1.0, 2.0, -math.inf], np.float32)
# options of the layer, and of the oracle
FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "alibi": ({"alibi_slopes": SLOPES}, {"alibi_slopes": np.array(SLOPES)}),
    "window": ({"sliding_window": 6}, {"sliding_window": 6}),
    "softcap": ({"logits_soft_cap": 0.8}, {"softcap": 0.8}),
    "sinks": ({"sinks": SINKS}, {"s_aux": SINKS}),
    "all": (
        {"alibi_slopes": SLOPES, "sliding_window": 9, "logits_soft_cap": 2.0, "sinks": SINKS},
        {"alibi_slopes": np.array(SLOPES), "sliding_window": 9, "softcap": 2.0, "s_aux": SINKS},
    ),
}


def starts_of(lens: Sequence[int]) -> Array:
    return np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)


class Step:
    """A step over a cache that holds every request's earlier tokens; prefills first. Unused slots are NaN."""

    def __init__(
        self,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        num_prefills: int,
        *,
        dtype: str = "float32",
        head_size: int = 16,
        head_size_v: int | None = None,
        block_size: int = 16,
        layout: str = "flat",
        causal: bool = True,
    ) -> None:
        rng = np.random.default_rng([len(query_lens), *seq_lens])
        kind = numpy_dtype(dtype)
        self.dtype, self.causal, self.num_prefills = dtype, causal, num_prefills
        self.query_lens, self.seq_lens = list(query_lens), list(seq_lens)
        self.sizes = head_size, head_size_v or head_size
        self.starts, self.tokens = starts_of(query_lens), sum(query_lens)
        self.query = rng.standard_normal((self.tokens, 4, head_size)).astype(kind)
        self.keys = [rng.standard_normal((n, 2, self.sizes[0])).astype(kind) for n in seq_lens]
        self.values = [rng.standard_normal((n, 2, self.sizes[1])).astype(kind) for n in seq_lens]
        blocks = [-(-n // block_size) for n in seq_lens]
        num_blocks, width = sum(blocks) + 2, max(blocks) + 1
        order = rng.permutation(num_blocks).astype(np.int32)
        self.table = np.full((len(blocks), width), -1, np.int32)
        for r, first in enumerate(starts_of(blocks)[:-1]):
            self.table[r, : blocks[r]] = order[first : first + blocks[r]]
        self.kv_cache = empty_cache(layout, num_blocks, block_size, self.sizes, dtype)
        slots = [self.table[r, np.arange(n) // block_size] for r, n in enumerate(seq_lens)]
        self.slots = [s.astype(np.int64) * block_size + np.arange(len(s)) % block_size for s in slots]
        old = [n - q for q, n in zip(query_lens, seq_lens, strict=True)]
        self.key, self.value, self.slot_mapping = (
            np.concatenate([x[n:] for x, n in zip(xs, old, strict=True)]) for xs in (self.keys, self.values, self.slots)
        )
        key, value, before = (
            np.concatenate([x[:n] for x, n in zip(xs, old, strict=True)]) for xs in (self.keys, self.values, self.slots)
        )
        self.write(key, value, before)

    def write(self, key: Array, value: Array, slots: Array) -> None:
        key_cache, value_cache = PagedAttention.split_kv_cache(self.kv_cache, 2, self.sizes[0])
        PagedAttention.write_to_paged_cache(key, value, key_cache, value_cache, slots)

    def metadata(self, **changes: Any) -> CPUAttentionMetadata:
        p, lens = self.num_prefills, np.array(self.seq_lens, np.int32)
        fields: dict[str, Any] = {
            "num_prefills": p,
            "num_prefill_tokens": int(self.starts[p]),
            "num_decode_tokens": int(self.tokens - self.starts[p]),
            "slot_mapping": self.slot_mapping,
            "seq_lens": self.seq_lens,
            "seq_lens_tensor": lens[p:],
            "max_decode_seq_len": int(lens[p:].max(initial=0)),
            "block_tables": self.table[p:],
            "chunked_prefill": True,
            "prefill_query_start_loc": self.starts[: p + 1],
            "kv_start_loc": starts_of(self.seq_lens[:p]),
            "prefill_block_tables": self.table[:p],
            "query_start_loc": self.starts,
            "causal": self.causal,
        }
        return CPUAttentionMetadata(**(fields | changes))

    def expected(self, **options: Any) -> Array:
        scale = self.sizes[0] ** -0.5
        lens = np.array(self.seq_lens, np.int32)
        return reference.attention(
            self.query, self.keys, self.values, self.starts, lens, scale, self.causal, **options
        )[0]

    def forward(self, impl: CPUAttentionBackendImpl, metadata: CPUAttentionMetadata | None = None, **kw: Any) -> Any:
        args = {"query": self.query, "key": self.key, "value": self.value, "kv_cache": self.kv_cache} | kw
        return impl.forward(LAYER, attn_metadata=metadata or self.metadata(), **args)

    def check(self, output: Any, expected: Array | None = None, **options: Any) -> None:
        want = self.expected(**options) if expected is None else expected
        got = np.asarray(output).reshape(want.shape)
        errors = reference.relative_rms(got, want, self.starts)
        assert (errors <= reference.BUDGET[self.dtype]).all(), errors


def empty_cache(layout: str, num_blocks: int, block_size: int, sizes: tuple[int, int], dtype: str) -> Any:
    """Every byte 0xff, NaN in every dtype."""

    def allocate(size: int, of: str) -> Array:
        shape = PagedAttention.get_kv_cache_shape(num_blocks, block_size, 2, size, dtype, layout=of)
        cache = np.empty(shape, numpy_dtype(dtype))
        cache.reshape(-1).view(np.uint8)[:] = 0xFF
        return cache

    if layout == "flat":
        return allocate(sizes[0], "flat")
    pair = allocate(sizes[0], "pair"), allocate(sizes[1], "pair")
    return np.stack(pair) if layout == "stacked" else pair


def layer(paged: type[PagedAttention] = PagedAttention, head_size: int = 16, **options: Any) -> CPUAttentionBackendImpl:
    arguments: dict[str, Any] = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto"} | options
    impl = CPUAttentionBackendImpl(4, head_size, head_size**-0.5, 2, **arguments)
    impl.paged_attn_impl = paged
    return impl


MIXED = ([5, 3, 40, 1, 1], [5, 20, 40, 33, 1], 3)  # a whole prompt, a chunk after a prefix, a long prompt, two decodes


class Cross(Step):
    """Cross attention: decoder tokens of four requests over encoder outputs of other lengths, two of them new."""

    ENCODER_LENS = (20, 3, 35, 0)

    def __init__(self, **options: Any) -> None:
        super().__init__([1] * 4, self.ENCODER_LENS, 0, causal=False, **options)  # the cache: one layer's cross K and V
        rng = np.random.default_rng(3)
        self.query_lens = [6, 2, 1, 1]  # the first two have just joined
        self.starts, self.tokens, self.num_prefills = starts_of(self.query_lens), 10, 2
        self.query = rng.standard_normal((10, 4, 16)).astype(np.float32)
        self.key, self.value = (np.concatenate(x[:2]) for x in (self.keys, self.values))
        self.cross_slots = np.concatenate(self.slots[:2])

    def metadata(self, **changes: Any) -> CPUAttentionMetadata:
        fields: dict[str, Any] = {
            "num_prefills": 2,
            "num_prefill_tokens": 8,
            "num_decode_tokens": 2,
            "seq_lens": [6, 2, 9, 4],  # of the decoder: not looked at here
            "query_start_loc": self.starts,
            "encoder_seq_lens": list(self.ENCODER_LENS),
            "encoder_seq_lens_tensor": np.array(self.ENCODER_LENS, np.int32),
            "max_encoder_seq_len": 35,
            "cross_slot_mapping": self.cross_slots,
            "cross_block_tables": self.table,
        }
        return CPUAttentionMetadata(**(fields | changes))

    def fill(self) -> None:
        """Every encoder's keys, those of the new requests spoilt."""
        self.write(np.concatenate(self.keys), np.concatenate(self.values), np.concatenate(self.slots))
        self.write(-self.key, -self.value, self.cross_slots)
