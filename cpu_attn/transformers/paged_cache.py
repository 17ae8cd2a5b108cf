# SPDX-License-Identifier: Apache-2.0
"""A paged KV cache for ``generate(past_key_values=...)``, quantised on request."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin, get_layer_types_and_kwargs

from cpu_attn import PagedKVCache, ops
from cpu_attn._arrays import dtype_name
from cpu_attn.transformers.lazy import Inference, LazyTensor, ReadOnly
from cpu_attn.transformers.plans import Logits, Requests, autocast, by_token, run

LAYERS = ("full_attention", "sliding_attention", "chunked_attention")


class PagedCache(Cache):  # type: ignore[misc]
    """A cache of packed pages for the decoder that ``config`` describes.

    kv_cache_dtype: ``auto`` (the model's), ``fp8_e4m3``, ``fp8_e5m2``, ``int8``, ``int4``, or two of these as ``K/V``;
    block_size: tokens of a page; k_scale, v_scale: of fp8. Every layer keeps all its tokens, sliding ones too.
    With ``attn_implementation="cpu_attn"`` attention reads the pages; any other gets keys and values gathered anew in
    every step. Raises ValueError for a config with layers other than full, sliding and chunked attention.

    >>> model.generate(**inputs, past_key_values=PagedCache(model.config, kv_cache_dtype="int8"))
    """

    def __init__(
        self,
        config: Any,
        kv_cache_dtype: str = "auto",
        block_size: int = 32,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        layer_types, _ = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
        for layer_type in layer_types:
            if layer_type not in LAYERS:
                raise ValueError(f"config: a layer of {layer_type!r}, PagedCache has {', '.join(LAYERS)}")
        options: dict[str, Any] = {"kv_cache_dtype": kv_cache_dtype, "k_scale": k_scale, "v_scale": v_scale}
        PagedKVCache(0, block_size, 1, 32, **options)  # so that a wrong option fails here, not in the first step
        super().__init__(layers=[PagedLayer(block_size, **options) for _ in layer_types])

    @property
    def nbytes(self) -> int:
        """Of the pages in use, all layers."""
        return sum(layer.nbytes for layer in self.layers)


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]
    """K and V of a layer. ``table`` int32 [B, blocks]: rows share blocks after beam search or repetition, until one of
    them writes into such a block."""

    is_sliding = False
    is_croppable = True

    def __init__(self, block_size: int, **options: Any) -> None:
        super().__init__()
        self.block_size, self.options = block_size, options
        self.reset()

    def reset(self) -> None:
        self.length, self.table = 0, np.zeros((0, 0), np.int32)
        self.keys: Pages | None = None
        self.values: Pages | None = None
        self.is_initialized = False

    def __getstate__(self) -> dict[str, Any]:
        """For copies, which make their own keys and values: what those hold is in the pages."""
        return self.__dict__ | {"keys": None, "values": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.is_initialized:
            self._changed()

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        batch_size, num_kv_heads, _, head_size = key_states.shape
        self.sizes = {"num_kv_heads": num_kv_heads, "head_size": head_size, "head_size_v": value_states.shape[-1]}
        self.pages = self._allocate(0)
        self.table = np.zeros((batch_size, 0), np.int32)
        self.is_initialized = True

    def _allocate(self, num_blocks: int) -> PagedKVCache:
        return PagedKVCache(num_blocks, self.block_size, dtype=dtype_name(self.dtype), **self.sizes, **self.options)

    @property
    def nbytes(self) -> int:
        if not self.is_initialized:
            return 0
        used = len(np.unique(self.table))
        return sum(used * x[:1].nbytes for x in (self.pages.key_cache, self.pages.value_cache))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes key_states [B, Hkv, T, D] and value_states [B, Hkv, T, Dv] behind what is there."""
        dtype = self.dtype if self.is_initialized else torch.get_autocast_dtype("cpu")
        key_states, value_states = autocast(dtype, key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        batch_size, _, tokens, _ = key_states.shape
        if batch_size != len(self.table):
            raise ValueError(f"key_states: a batch of {batch_size}, the cache holds {len(self.table)}")
        self._make_room(tokens)
        positions = np.arange(self.length, self.length + tokens)
        blocks = self.table[:, positions // self.block_size].astype(np.int64)
        slots = blocks * self.block_size + positions % self.block_size
        self.pages.update(by_token(key_states.detach()), by_token(value_states.detach()), slots.ravel())
        self.length += tokens
        self._changed()
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            self.keys = Inference.apply(partial(Pages, self, value=False), key_states, value_states)
            self.values = Inference.apply(partial(Pages, self, value=True), key_states, value_states)
        return self.keys, self.values

    def _changed(self) -> None:
        self.keys, self.values = Pages(self, value=False), Pages(self, value=True)

    def _make_room(self, tokens: int) -> None:
        """Blocks of each row's own for the next tokens; the one that it shares and would write into is copied."""
        started, have = bool(self.length % self.block_size), self.table.shape[1]
        more = -(-(self.length + tokens) // self.block_size) - have
        shared = started and len(np.unique(self.table[:, -1])) < len(self.table)
        if not more and not shared:
            return
        columns = more + shared
        free = self._free(columns * len(self.table)).reshape(len(self.table), columns)
        if shared:
            self.pages.copy_blocks(zip(self.table[:, -1], free[:, 0], strict=True))
        self.table = np.concatenate([self.table[:, : have - shared], free], 1)

    def _free(self, count: int) -> np.ndarray[Any, Any]:
        """As many blocks that no row has; the memory doubles where they run out."""
        free = np.setdiff1d(np.arange(self.pages.num_blocks, dtype=np.int32), self.table)
        if len(free) < count:
            had = self.pages
            self.pages = self._allocate(max(2 * had.num_blocks, had.num_blocks + count - len(free)))
            self.pages.key_cache[: had.num_blocks] = had.key_cache
            self.pages.value_cache[: had.num_blocks] = had.value_cache
            free = np.append(free, np.arange(had.num_blocks, self.pages.num_blocks, dtype=np.int32))
        return free[:count]

    def attend(self, query: torch.Tensor, requests: Requests, logits: Logits) -> torch.Tensor:
        """Output [B, T, H, Dv] of query [B, H, T, D] over the pages."""
        pages = self.pages
        head_sizes = pages.head_size, pages.head_size_v
        plan = requests.plan(
            query.shape[1], pages.num_kv_heads, *head_sizes, self.dtype, "packed", pages.kv_cache_dtype
        )
        table, scales = self.table[requests.rows], (pages.k_scale, pages.v_scale)
        return run(plan, query, pages.key_cache, pages.value_cache, table, logits, scales)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def gather(self, value: bool) -> torch.Tensor:
        """Keys [B, Hkv, S, D] or values [B, Hkv, S, Dv], times their scales."""
        pages = self.pages
        memory, head_size = (pages.value_cache, pages.head_size_v) if value else (pages.key_cache, pages.head_size)
        rows = [
            ops.gather(
                *(memory, row, self.length, head_size, pages.isa),
                value=value,
                dtype=pages.dtype,
                kv_cache_dtype=pages.kv_cache_dtype,
            )
            for row in self.table
        ]
        stacked = np.stack(rows)
        if stacked.dtype != pages.dtype:  # quantised
            scale = np.float32(pages.v_scale if value else pages.k_scale)
            stacked = (stacked.astype(np.float32) * scale).astype(pages.dtype)
        bits = torch.from_numpy(stacked.view(np.uint8))  # which knows no bfloat16
        return bits.view(self.dtype).transpose(1, 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last ``-tokens_to_remove`` tokens."""
        if not self.is_initialized:
            return
        if not -self.length <= tokens_to_remove <= 0:
            raise ValueError(f"tokens_to_remove: {tokens_to_remove} is outside {-self.length}..0")
        self.length += tokens_to_remove
        self._select(slice(None))

    def _select(self, rows: Any, name: str = "rows") -> None:
        """Those rows of the batch, with the blocks that their tokens are in; ``rows`` as an index of a tensor."""
        if not self.is_initialized:
            return
        try:
            found = torch.from_numpy(np.arange(len(self.table)))[rows, ...]
        except (IndexError, TypeError) as e:
            raise type(e)(f"{name}: {e}") from None
        if found.dim() != 1:
            raise ValueError(f"{name}: {found.dim()} axes, expected 1")
        self.table = self.table[found.numpy(), : -(-self.length // self.block_size)]
        self._changed()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._select(beam_idx, "beam_idx")

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select(np.arange(len(self.table)).repeat(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._select(indices, "indices")


class Pages(ReadOnly):
    """Keys [B, Hkv, S, D] or values [B, Hkv, S, Dv] of a layer's pages, as they are now: a later update is an error for
    whoever looks at these."""

    @staticmethod
    def __new__(cls, layer: PagedLayer, *, value: bool) -> Pages:
        heads, size = layer.sizes["num_kv_heads"], layer.sizes["head_size_v" if value else "head_size"]
        shape = (len(layer.table), heads, layer.length, size)
        strides = (layer.length * heads * size, size, heads * size, 1)  # of gather()
        pages: Pages = LazyTensor.__new__(cls, shape, layer.dtype, strides)
        pages.layer, pages.value = layer, value
        return pages

    def __init__(self, layer: PagedLayer, *, value: bool) -> None:
        super().__init__()

    layer: PagedLayer
    value: bool

    def dense(self) -> torch.Tensor:
        if self is not (self.layer.values if self.value else self.layer.keys):
            raise RuntimeError("PagedCache: keys or values of an earlier step, which the cache has since changed")
        return self.layer.gather(self.value)
