# SPDX-License-Identifier: Apache-2.0
"""This module has what ``cpu-attn bench`` runs: shapes by name, what they cost, and the arrays of one step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

import cpu_attn
from cpu_attn import sparse
from cpu_attn.cli.linear import Arrays, Layer
from cpu_attn.tests.cases.formats import numpy_dtype
from cpu_attn.tests.cases.trees import TREES, pack_tree

SEED, BINARY = 0, TREES["binary"]
INDEX_HEADS, INDEX_SIZE = 64, 128  # DeepSeek-V3.2's indexer


@dataclass(frozen=True)
class Workload:
    """Describes one step of causal attention, or what serves it.

    kind: prefill, decode, cascade (decode of requests that share a prefix), write (reshape_and_cache of all tokens,
    with rotary rotary_reshape_and_cache, queries in place), plan (get_scheduler_metadata), call (too little to be
    limited by anything but the call), or one of linear.KINDS: a layer of states in place of attention, ``linear``.
    lens: (q_len, kv_len) of each request. tree: its query tokens are drafts, each behind the one of half its number.
    selected: the share of the blocks that each kv head attends, at random; None: all without a selection. query_block:
    so many query tokens select from the blocks that they see, others of their own; 0: all of a request select together.
    shared: keys that all requests have in common, in the same blocks; no_cascade: the plan is not told so.
    """

    name: str
    kind: str
    lens: tuple[tuple[int, int], ...]
    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128
    sliding_window: int = -1
    softcap: float = 0.0
    sinks: bool = False
    alibi: bool = False
    attn_bias: bool = False
    rotary: bool = False
    tree: bool = False
    selected: float | None = None
    query_block: int = 0
    shared: int = 0
    no_cascade: bool = False
    latent_rank: int = 0  # if not 0, V is the first so many columns of K (MLA)
    topk_tokens: int = 0  # if not 0, an indexer selects so many keys for each query token, in the same call
    layers: int = 0  # if not 0, so many layers of a model are of this shape
    linear: Layer | None = None

    @property
    def head_size_v(self) -> int:
        return self.latent_rank or self.head_size

    @property
    def attends(self) -> bool:
        return self.kind in ("prefill", "decode", "cascade", "call")

    @property
    def cascades(self) -> bool:
        """Says whether the plan is told what is shared."""
        return self.shared > 0 and not self.no_cascade

    @cached_property
    def _lens(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        q_lens, kv_lens = np.array(self.lens, np.int64).reshape(-1, 2).T
        return q_lens, kv_lens

    @property
    def num_tokens(self) -> int:
        return int(self._lens[0].sum())

    @property
    def flops(self) -> int:
        """Counts 2 * D for q.k and 2 * Dv for p*v, for each (query head, query, key) that the mask leaves and an
        indexer selects, and 2 * INDEX_SIZE for each that it scores."""
        if self.linear:
            return self.num_tokens * self.linear.flops(self.num_heads, self.num_kv_heads, self.head_size)
        pairs = scored = 0
        for q_len, kv_len in self.lens:
            seen = np.arange(kv_len - q_len + 1, kv_len + 1)  # keys up to each query's own
            if self.tree:
                seen = kv_len - q_len + BINARY(q_len).sum(axis=1)
            pairs += int(seen.sum() if self.sliding_window < 0 else np.minimum(seen, self.sliding_window).sum())
            if self.topk_tokens:
                scored += int(seen.sum())
                pairs -= int(np.maximum(seen - self.topk_tokens, 0).sum())
        attended = 2 * (self.head_size + self.head_size_v) * self.num_heads * pairs * self._share
        return math.ceil(attended + 2 * INDEX_HEADS * INDEX_SIZE * scored)

    @property
    def _share(self) -> float:
        return 1.0 if self.selected is None or not self.attends else self.selected

    def kv_bytes(self, itemsize: float) -> int:
        """Gives the bytes of K and V that some query sees, each counted once; of a write those that are written, with
        rotated queries; of a layer of states what that says."""
        if self.linear:
            sizes = (self.num_heads, self.num_kv_heads, self.head_size)
            return math.ceil(self.linear.bytes(len(self.lens), self.num_tokens, *sizes, itemsize))
        q_lens, kv_lens = self._lens
        keys = kv_lens
        if self.sliding_window >= 0:
            keys = np.minimum(kv_lens, q_lens - 1 + self.sliding_window)
        heads = self.num_kv_heads * (1 if self.latent_rank else 2) + (self.num_heads if self.rotary else 0)
        scored = int(kv_lens.sum()) * INDEX_SIZE * itemsize if self.topk_tokens else 0
        if self.topk_tokens:
            keys = np.minimum(keys, q_lens * self.topk_tokens)
        own = np.minimum(keys, kv_lens - self.shared)
        rows = int(own.sum() + (keys - own).max()) * heads
        share = 1.0 if self.query_block else self._share  # what one query block leaves out another one sees
        return math.ceil(rows * self.head_size * itemsize * share + scored)


def _forgetful(layer: dict[str, Any]) -> dict[str, Any]:
    """Makes decays so strong that what is left of a state becomes subnormal within a chunk."""
    return {**layer, "linear": replace(layer["linear"], forgets=4.0)}


def _same(kind: str, num_reqs: int, q_len: int, kv_len: int, **shape: Any) -> dict[str, Any]:
    return {"kind": kind, "lens": ((q_len, kv_len),) * num_reqs, **shape}


def _various(num_reqs: int, low: int, high: int) -> tuple[tuple[int, int], ...]:
    """Gives decode requests over contexts of all lengths."""
    return tuple((1, int(s)) for s in np.random.default_rng(SEED).integers(low, high + 1, num_reqs))


MLA: dict[str, Any] = {"num_kv_heads": 1, "head_size": 576, "latent_rank": 512}  # DeepSeek's
GDN: dict[str, Any] = {"num_kv_heads": 16, "linear": Layer("gdn", 128)}  # Qwen3.5's
KDA: dict[str, Any] = {"num_kv_heads": 32, "linear": Layer("kda", 128)}
SSD: dict[str, Any] = {"num_heads": 128, "num_kv_heads": 8, "linear": Layer("ssd", 64)}  # Nemotron-H's
LONG_PROMPT: dict[str, Any] = _same("prefill", 1, 32768, 32768, num_heads=4, num_kv_heads=1)
MIXED = ((992, 2456), (1, 1234), (98, 1145), (1, 4162), (2345, 2345))
WORKLOADS = {
    name: Workload(name, **shape)
    for name, shape in {
        "prefill-2k": _same("prefill", 1, 2048, 2048),
        "prefill-8k": _same("prefill", 1, 8192, 8192, num_heads=8, num_kv_heads=2),
        "prefill-64x512": _same("prefill", 64, 512, 512),
        "prefill-4k-d64": _same("prefill", 1, 4096, 4096, num_heads=16, num_kv_heads=16, head_size=64),
        "prefill-2k-d256": _same("prefill", 1, 2048, 2048, num_heads=8, num_kv_heads=4, head_size=256),
        "chunk-512-of-8k": _same("prefill", 1, 512, 8192),
        "mixed": {"kind": "prefill", "lens": MIXED},
        "prefill-32k": LONG_PROMPT,
        "prefill-32k-sparse": {**LONG_PROMPT, "selected": 1 / 8, "query_block": 128},
        "decode-1x16k": _same("decode", 1, 1, 16384),
        "decode-8x8k": _same("decode", 8, 1, 8192),
        "decode-32x2k": _same("decode", 32, 1, 2048),
        "decode-64x512": _same("decode", 64, 1, 512),
        "decode-16x4k-mha": _same("decode", 16, 1, 4096, num_heads=16, num_kv_heads=16),
        "decode-8x8k-gqa8": _same("decode", 8, 1, 8192, num_kv_heads=4),
        "decode-8x8k-gqa16": _same("decode", 8, 1, 8192, num_kv_heads=2),
        "decode-8x8k-d64": _same("decode", 8, 1, 8192, num_heads=64, head_size=64),
        "mla-8x4k-h16": _same("decode", 8, 1, 4096, num_heads=16, **MLA),
        "mla-8x4k-h128": _same("decode", 8, 1, 4096, num_heads=128, **MLA),
        "mla-1x64k": _same("decode", 1, 1, 65536, num_heads=128, **MLA),
        "mla-1x64k-sparse": _same("decode", 1, 1, 65536, num_heads=128, **MLA, topk_tokens=2048),
        "tree-8x8k": _same("decode", 8, 8, 8192, tree=True),
        "tree-16x4k-mha": _same("decode", 16, 8, 4096, num_heads=16, num_kv_heads=16, tree=True),
        "select-1x64k": _same("decode", 1, 1, 65536, selected=1 / 16),
        "cascade-32x4k": _same("cascade", 32, 1, 4096 + 64, shared=4096),
        "cascade-32x4k-mha": _same("cascade", 32, 1, 4096 + 64, shared=4096, num_heads=16, num_kv_heads=16),
        "write-8k": _same("write", 1, 8192, 8192),
        "rope-write-8k": _same("write", 1, 8192, 8192, rotary=True),
        "plan-256": {"kind": "plan", "lens": _various(256, 512, 4096)},
        "call-tiny": _same("call", 1, 1, 16),
        "gdn-prefill-2k": _same("linear-prefill", 1, 2048, 2048, **GDN),
        "gdn-prefill-512": _same("linear-prefill", 1, 512, 512, **GDN),
        "gdn-decode-64": _same("linear-decode", 64, 1, 1024, **GDN),
        "gdn-decode-1": _same("linear-decode", 1, 1, 1024, **GDN),
        "kda-prefill-2k": _same("linear-prefill", 1, 2048, 2048, **KDA),
        "ssd-prefill-2k": _same("linear-prefill", 1, 2048, 2048, **SSD),
        "ssd-decode-64": _same("linear-decode", 64, 1, 1024, **SSD),
        "gdn-forget-2k": _same("linear-prefill", 1, 2048, 2048, **_forgetful(GDN)),
        "kda-forget-2k": _same("linear-prefill", 1, 2048, 2048, **_forgetful(KDA)),
        "ssd-forget-2k": _same("linear-prefill", 1, 2048, 2048, **_forgetful(SSD)),
        "conv-prefill-2k": _same("conv", 1, 2048, 2048, num_kv_heads=16, linear=Layer("conv", 128)),
    }.items()
}
GROUPS = {
    "prefill": [w for w in WORKLOADS.values() if w.kind == "prefill"],
    "decode": [w for w in WORKLOADS.values() if w.kind == "decode" and not w.latent_rank],
    "mla": [w for w in WORKLOADS.values() if w.latent_rank],
    "cascade": [w for w in WORKLOADS.values() if w.kind == "cascade"],
    "linear": [w for w in WORKLOADS.values() if w.linear],
    "all": list(WORKLOADS.values()),
}


@dataclass
class Step:
    """Holds a workload's arrays in one dtype, in the cache of one isa. Blocks lie in random order, all of them
    owned."""

    workload: Workload
    isa: str
    dtype: str
    block_size: int = 16
    kv_cache_dtype: str = "auto"
    kv_cache_layout: str = "packed"
    kv_cache_rotation: str = "none"
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(SEED))

    def __post_init__(self) -> None:
        w = self.workload
        if w.latent_rank and self.kv_cache_layout == "packed":
            self.kv_cache_layout = "NHD"
        q_lens, kv_lens = np.array(w.lens, np.int64).T
        self.query_start_loc = np.concatenate([[0], q_lens.cumsum()]).astype(np.int32)
        self.seq_lens = kv_lens.astype(np.int32)
        self.alibi_slopes = np.exp2(-8 * np.arange(1, w.num_heads + 1) / w.num_heads).astype(np.float32)
        self.s_aux = self.rng.standard_normal(w.num_heads).astype(np.float32)
        shared = w.shared // self.block_size
        needed = -(-kv_lens // self.block_size) - shared
        self.num_blocks = int(needed.sum()) + shared
        blocks = self.rng.permutation(self.num_blocks).astype(np.int32)
        self.block_table = np.zeros((len(needed), shared + needed.max()), np.int32)
        self.block_table[:, :shared] = blocks[:shared]
        for row, own in zip(self.block_table, np.split(blocks[shared:], needed.cumsum()[:-1]), strict=True):
            row[shared : shared + len(own)] = own

    @cached_property
    def selected_blocks(self) -> NDArray[np.int32] | None:
        """Selects [R, Hkv, S] at random: the share of each request's blocks that the workload says, or of the blocks
        that each query block sees."""
        w, lens = self.workload, self.seq_lens
        if w.selected is None:
            return None
        if w.query_block:
            _, lens, _ = sparse.query_blocks(self.query_start_loc, lens, w.query_block)
        blocks = -(-lens // self.block_size)
        counts = np.maximum(1, np.rint(blocks * w.selected)).astype(int)
        selected = np.full((len(blocks), w.num_kv_heads, counts.max()), -1, np.int32)
        for own, n, count in zip(selected, blocks, counts, strict=True):
            for head in own:
                head[:count] = np.sort(self.rng.permutation(n)[:count])
        return selected

    @cached_property
    def indexer(self) -> dict[str, Any]:
        """Gives the arguments of select_tokens, over packed keys of the step's dtype."""
        w, sizes = self.workload, (self.block_size, INDEX_SIZE, self.dtype, self.isa)
        cache = np.empty(sparse.get_index_cache_shape(self.num_blocks, *sizes), numpy_dtype(self.dtype))
        for r, n in enumerate(self.seq_lens):
            sparse.index_and_cache(self.random(int(n), INDEX_SIZE), cache, self.slots(r), self.isa)
        return {
            "query": self.random(w.num_tokens, INDEX_HEADS, INDEX_SIZE),
            "index_cache": cache,
            "weights": self.rng.standard_normal((w.num_tokens, INDEX_HEADS), np.float32),
            "query_start_loc": self.query_start_loc,
            "seq_lens": self.seq_lens,
            "block_table": self.block_table,
            "topk_tokens": w.topk_tokens,
            "scale": INDEX_SIZE**-0.5,
            "isa": self.isa,
        }

    @cached_property
    def attn_bias(self) -> NDArray[np.float32] | None:
        """Gives [1, Hq, Q, K], as T5 has one for the whole batch."""
        w = self.workload
        if not w.attn_bias:
            return None
        return self.rng.standard_normal((1, w.num_heads, *np.max(w.lens, axis=0)), np.float32)

    @property
    def itemsize(self) -> float:
        """Gives the bytes of an element that moves: of keys and values on their way into a cache, of the inputs of a
        layer of states, else of K and V in the cache, scales counted."""
        if self.workload.kind == "write" or self.workload.linear:
            return numpy_dtype(self.dtype).itemsize
        size = self.workload.head_size
        cache = cpu_attn.PagedKVCache(
            0, self.block_size, 1, size, self.dtype, self.isa, kv_cache_dtype=self.kv_cache_dtype
        )
        width: int = sum(x.shape[3] * x.itemsize for x in (cache.key_cache, cache.value_cache))
        return width / (2 * size)

    @cached_property
    def arrays_of_layer(self) -> Arrays:
        """Gives the arrays of a layer of states."""
        assert self.workload.linear
        return Arrays(self, self.workload.linear)

    @cached_property
    def query(self) -> NDArray[Any]:
        return self.random(self.workload.num_tokens, self.workload.num_heads, self.workload.head_size)

    @cached_property
    def output(self) -> NDArray[Any]:
        return np.empty((*self.query.shape[:2], self.workload.head_size_v), self.query.dtype)

    @cached_property
    def cache(self) -> cpu_attn.PagedKVCache:
        """Gives the cache, with every token of every request in it; for a write it is empty."""
        w = self.workload
        cache = cpu_attn.PagedKVCache(
            self.num_blocks,
            self.block_size,
            w.num_kv_heads,
            w.head_size,
            self.dtype,
            self.isa,
            head_size_v=w.head_size_v,
            kv_cache_dtype=self.kv_cache_dtype,
            kv_cache_layout=self.kv_cache_layout,
            kv_cache_rotation=self.kv_cache_rotation,
        )
        if w.latent_rank:
            cache.value_cache = cache.key_cache[..., : w.latent_rank]
        for r in range(len(self.seq_lens)) if w.kind != "write" else ():
            self._fill(cache, r)
        return cache

    def _fill(self, cache: cpu_attn.PagedKVCache, r: int) -> None:
        (key, value), rank = self.key_value(r), self.workload.latent_rank
        if not rank:
            cache.update(key, value, self.slots(r))
            return
        halves = (key[..., :rank], key[..., rank:], cache.value_cache, cache.key_cache[..., rank:], self.slots(r))
        how: Any = {"kv_cache_dtype": self.kv_cache_dtype, "kv_cache_layout": self.kv_cache_layout}
        cpu_attn.reshape_and_cache(*halves, **how)

    @property
    def cos_sin_cache(self) -> NDArray[np.float32]:
        """Gives the rows of all positions, with the whole head rotated; theta is 10,000."""
        size = self.workload.head_size
        angles = np.arange(self.seq_lens.max())[:, None] / 1e4 ** (np.arange(0, size, 2) / size)
        return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)

    def key_value(self, r: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Gives random K and V [seq_len, Hkv, D] of request r."""
        shape = (int(self.seq_lens[r]), self.workload.num_kv_heads, self.workload.head_size)
        return self.random(*shape), self.random(*shape)

    def slots(self, r: int) -> NDArray[np.int64]:
        block, offset = np.divmod(np.arange(self.seq_lens[r], dtype=np.int64), self.block_size)
        slots: NDArray[np.int64] = self.block_table[r, block].astype(np.int64) * self.block_size + offset
        return slots

    @property
    def masks(self) -> dict[str, Any]:
        """Gives the masks as get_scheduler_metadata takes them, and who selects."""
        found: dict[str, Any] = {"query_block_size": self.workload.query_block} if self.workload.query_block else {}
        if self.workload.tree:
            q_lens = np.diff(self.query_start_loc)
            found["tree_mask"] = np.concatenate([pack_tree(BINARY(n), max(q_lens)) for n in q_lens])
        return found

    def plan(self, engine: str) -> cpu_attn.SchedulerMetadata:
        w = self.workload
        return cpu_attn.get_scheduler_metadata(
            len(self.seq_lens),
            w.num_heads,
            w.num_kv_heads,
            w.head_size,
            self.seq_lens,
            self.dtype,
            self.query_start_loc,
            sliding_window=w.sliding_window,
            isa=self.isa,
            kv_cache_dtype=self.kv_cache_dtype,
            head_size_v=w.head_size_v,
            kv_cache_layout=self.kv_cache_layout,
            kv_cache_rotation=self.kv_cache_rotation,
            engine=engine,
            **self.masks,
            block_table=self.block_table if w.cascades else None,
            block_size=self.block_size if w.cascades else None,
            max_selected_tokens=w.topk_tokens or None,
        )

    def arguments(self) -> dict[str, Any]:
        """Gives the arguments of attention_with_kv_cache, but for the plan, and without those that say nothing and that
        compose.attention does not have."""
        w = self.workload
        found = {
            "query": self.query,
            "key_cache": self.cache.key_cache,
            "value_cache": self.cache.value_cache,
            "output": self.output,
            "query_start_loc": self.query_start_loc,
            "seq_lens": self.seq_lens,
            "scale": w.head_size**-0.5,
            "causal": True,
            "alibi_slopes": self.alibi_slopes if w.alibi else None,
            "sliding_window": w.sliding_window,
            "block_table": self.block_table,
            "softcap": w.softcap,
            "s_aux": self.s_aux if w.sinks else None,
            "kv_cache_dtype": self.kv_cache_dtype,
            "kv_cache_layout": self.kv_cache_layout,
        }
        if self.kv_cache_rotation != "none":
            found["kv_cache_rotation"] = self.kv_cache_rotation
        if self.selected_blocks is not None:
            found["selected_blocks"] = self.selected_blocks
        if self.attn_bias is not None:
            found["attn_bias"] = self.attn_bias
        return found

    def random(self, *shape: int) -> NDArray[Any]:
        """Gives +-[0.5, 2), every mantissa as likely: that toggles as many bits as real data, and costs a tenth of a
        normal."""
        dtype = numpy_dtype(self.dtype)
        keep, exponent = {
            "float32": (0x80FFFFFF, 0x3F000000),
            "float16": (0x87FF, 0x3800),
            "bfloat16": (0x80FF, 0x3F00),
        }[self.dtype]
        word = np.dtype(f"u{dtype.itemsize}")
        bits: NDArray[Any] = np.frombuffer(self.rng.bytes(int(np.prod(shape)) * dtype.itemsize), word) & word.type(keep)
        bits |= word.type(exponent)
        return bits.reshape(shape).view(dtype)
