# SPDX-License-Identifier: Apache-2.0
"""A step of vLLM's: what test_vllm_layers.py and test_vllm_mla.py call a layer with, and what should come out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheLayout,
    KVCacheTensor,
    create_kv_cache_views,
    get_kv_quant_mode,
)

from cpu_attn import reference
from cpu_attn.vllm import Backend

HEADS, KV_HEADS = 4, 2
LAYER = SimpleNamespace(_k_scale_float=1.0, _v_scale_float=1.0, kv_sharing_target_layer_name=None)
CONFIG = SimpleNamespace(kv_transfer_config=None)
DEFAULTS: dict[str, Any] = {"alibi_slopes": None, "sliding_window": None}


class Step:
    """Requests with keys already in the cache, some query tokens, and what else a test says of them."""

    query_lens, seq_lens = np.array([1, 9, 20, 1]), np.array([40, 9, 33, 17])

    def __init__(
        self,
        dtype: str = "float32",
        head_size: int = 16,
        kv_cache_dtype: str = "auto",
        block_size: int = 16,
        head_size_v: int | None = None,
    ) -> None:
        self.dtype, self.head_size, self.block_size = getattr(torch, dtype), head_size, block_size
        self.head_size_v = head_size_v or head_size
        self.kv_cache_dtype = kv_cache_dtype
        random = torch.Generator().manual_seed(1)
        self.starts = np.concatenate([[0], np.cumsum(self.query_lens)])

        def normal(tokens: int, heads: int, size: int) -> Any:
            return torch.randn(tokens, heads, size, generator=random).to(self.dtype)

        sizes = (head_size, self.head_size_v)
        self.keys, self.values = ([normal(n, KV_HEADS, size) for n in self.seq_lens] for size in sizes)
        self.query = normal(int(self.starts[-1]), HEADS, head_size)
        blocks = -(-self.seq_lens // block_size)
        self.table = torch.zeros(len(blocks), int(blocks.max()), dtype=torch.int32)
        free = torch.randperm(int(blocks.sum()) + 3, generator=random) + 1
        for row, n in zip(self.table, blocks, strict=True):
            row[:n], free = free[:n], free[n:]
        self.num_blocks = int(blocks.sum()) + 4

    def spec(self, cls: Any = FullAttentionSpec) -> Any:
        stored = {"auto": self.dtype, "int8_per_token_head": torch.int8}.get(self.kv_cache_dtype, torch.uint8)
        plain = cls(
            block_size=self.block_size,
            num_kv_heads=KV_HEADS,
            head_size=self.head_size,
            head_size_v=self.head_size_v,
            dtype=stored,
            kv_quant_mode=get_kv_quant_mode(self.kv_cache_dtype),
        )
        return Backend.customize_spec(plain)

    def cache(self, spec: Any) -> Any:
        """As vLLM allocates and views it. Full of NaN, or what is like it."""
        page = spec.page_size_bytes
        raw = torch.full((self.num_blocks * page,), -1, dtype=torch.int8)
        where = KVCacheTensor(size=len(raw), layers=["layer"], layer_stride=len(raw), block_stride=page)
        (view,) = create_kv_cache_views(raw, spec, self.num_blocks, KVCacheLayout.LBHNC, where)
        return view

    def slots(self, r: int, positions: Any) -> Any:
        return self.table[r, positions // self.block_size].long() * self.block_size + positions % self.block_size

    def common(self, **changes: Any) -> Any:
        fields = {
            "query_start_loc": torch.tensor(self.starts, dtype=torch.int32),
            "query_start_loc_cpu": torch.tensor(self.starts, dtype=torch.int32),
            "seq_lens": torch.tensor(self.seq_lens, dtype=torch.int32),
            "num_reqs": len(self.seq_lens),
            "num_actual_tokens": int(self.starts[-1]),
            "max_query_len": int(self.query_lens.max()),
            "max_seq_len": int(self.seq_lens.max()),
            "block_table_tensor": self.table,
            "slot_mapping": torch.empty(0, dtype=torch.int64),
            "seq_lens_cpu_upper_bound": torch.tensor(self.seq_lens, dtype=torch.int32),
            **changes,
        }
        return CommonAttentionMetadata(**fields)

    def layer(self, backend: Any = Backend, **options: Any) -> Any:
        scale = self.head_size**-0.5
        given = {"kv_cache_dtype": self.kv_cache_dtype, **options}
        return backend.get_impl_cls()(HEADS, self.head_size, scale, KV_HEADS, **{**DEFAULTS, **given})

    def attend(self, impl: Any, padding: int = 0, backend: Any = Backend, **changes: Any) -> Any:
        """All keys written first, in two calls, as if the earlier ones came in another step."""
        spec = self.spec()
        cache = self.cache(spec)
        metadata = backend.get_builder_cls()(spec, ["layer"], CONFIG, torch.device("cpu")).build(
            0, self.common(**changes)
        )
        for r, (key, value) in enumerate(zip(self.keys, self.values, strict=True)):
            at = torch.arange(len(key))
            for part in (at[::2], at[1::2]):
                pad = torch.full((3,), -1)
                slots = torch.cat([self.slots(r, part), pad])
                rows = torch.cat([part, torch.zeros(3, dtype=torch.int64)])
                impl.do_kv_cache_update(LAYER, key[rows], value[rows], cache, slots)
        query = torch.cat([self.query, self.query[:padding]])
        output = torch.full((*query.shape[:2], self.head_size_v), 7.0, dtype=self.dtype)
        found = impl.forward(LAYER, query, None, None, cache, metadata, output)
        assert found is output and (output[len(self.query) :] == 7).all()
        return output[: len(self.query)]

    def expected(self, causal: bool = True, **options: Any) -> Any:
        keys, values = ([x.double().numpy() for x in some] for some in (self.keys, self.values))
        lens = self.seq_lens.astype(np.int32), self.starts.astype(np.int32)
        query = self.query.double().numpy()
        return reference.attention(query, keys, values, lens[1], lens[0], self.head_size**-0.5, causal, **options)[0]

    def error(self, output: Any, expected: Any) -> float:
        """In units of the budget."""
        rms = np.sqrt(np.mean((output.double().numpy() - expected) ** 2) / np.mean(expected**2))
        return float(rms) / reference.BUDGET[str(self.dtype).removeprefix("torch.")]
