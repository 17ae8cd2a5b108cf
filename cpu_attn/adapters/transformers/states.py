# SPDX-License-Identifier: Apache-2.0
"""This module keeps the states of linear attention in transformers' continuous batching, in slots of its own cache.

Its PagedAttentionCache deals out blocks of one tensor, by kinds of layers. A request has one block for all of its
layers of linear attention (or of short convolutions), which holds their states side by side, and which the cache hands
back, copies and moves as it does with pages. Layers get the tokens of a whole step as one row: they are told that there
is no state yet, and the functions that they then call find each request's own in its block.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cpu_attn import profiling
from cpu_attn.linear_attention.call import Int32, States
from cpu_attn.transformers import private

KINDS = ("full_attention", "sliding_attention", "linear_attention", "conv")
_OF_STATES = KINDS[2:]
_CALLS = ("linear_attention_with_state_cache", "causal_conv1d")
_ALIGNMENT = 64
# What each layer of a model keeps, by the id of its config, while a context is open: (shape, dtype) by (name, number),
# of a sequence of one.
_kept: dict[int, dict[int, dict[tuple[str, int], tuple[tuple[int, ...], torch.dtype]]]] = {}
_thread = threading.local()


def has_states(config: Any) -> bool:
    """Says whether the model has layers of linear attention. Raises ValueError for a layer of a kind that continuous
    batching does not have."""
    kinds = getattr(config, "layer_types", None) or []
    for i, kind in enumerate(kinds):
        if kind not in KINDS:
            raise ValueError(f"model: layer {i} is of {kind!r}, generate_batch takes {', '.join(KINDS)}")
    return any(kind in _OF_STATES for kind in kinds)


def open_model(model: Any, config: Any) -> None:
    """Finds out what layers keep, by a token that is thrown away. Raises ValueError for layers that keep a state
    elsewhere, change it by functions that are not ours, or get no cache."""
    with profiling.profile() as profile:
        kept = private.states_after_a_token(model)
    calls = sum(total.calls for kind, total in profile.totals.items() if kind.name in _CALLS)
    layers = [i for i, kind in enumerate(config.layer_types) if kind in _OF_STATES]
    for i in layers:
        if not kept.get(i):
            raise ValueError(f"model: layer {i} keeps no state in its cache, generate_batch has no other place for it")
    if calls != sum(len(kept[i]) for i in layers):
        raise ValueError(f"model: its layers, such as {layers[0]}, have states that no function of cpu_attn changes")
    if not private.has_cache_argument(model):
        raise ValueError("model: its layers get no cache of generate_batch, those of transformers 5.24 do by `cache`")
    _kept[id(config)] = kept
    private.add_allocators({kind: made for kind, made in zip(_OF_STATES, (Allocator, ConvAllocator), strict=True)})
    private.add_states(find_conv_state, find_state, put_conv_state, put_state)


def close_model(config: Any) -> None:
    _kept.pop(id(config), None)


class Allocator(private.CacheAllocator):  # type: ignore[misc]
    """Deals out one block to each request, for the states of all layers of a kind."""

    supports_block_sharing = False
    supports_block_table = False
    rows_per_token = 1
    layer_type = _OF_STATES[0]

    def __init__(
        self,
        index: int,
        config: Any,
        num_key_value_heads: int,
        cache_dtype: torch.dtype,
        page_size: int,
        layer_indices: list[int],
        allow_block_sharing: bool,
    ) -> None:
        kept = _kept.get(id(config))
        if kept is None:
            raise ValueError(f"config: layers of {self.layer_type!r} outside cpu_attn.transformers.continuous_batching")
        end, self.places = 0, {}
        for layer in layer_indices:
            for name, (shape, dtype) in kept[layer].items():
                self.places[layer, name] = end, shape, dtype
                end += _up(math.prod(shape) * dtype.itemsize, _ALIGNMENT)
        # A sector of the cache is the least common multiple of all kinds' blocks, so a block here is a multiple of
        # those of pages.
        page = private.bytes_per_page(config, num_key_value_heads, cache_dtype, page_size)
        pages = [page * config.layer_types.count(kind) for kind in KINDS if kind not in _OF_STATES]
        block = _up(end, math.lcm(128, *(x for x in pages if x)))
        # One page to a block, with all layers in it.
        self._before_cache_tensor_init(index, layer_indices[:1], page_size, block, allow_block_sharing)
        self.layer_indices = layer_indices

    def register_cache_tensor(
        self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: Tensor, pool: Any
    ) -> None:
        self._copy_view = cache_tensor.view(-1, self.bytes_per_block)
        self._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, cache_tensor, pool)
        self.slots = {}
        for name, (offset, shape, dtype) in self.places.items():
            size = math.prod(shape) * dtype.itemsize
            rows = self._copy_view[:, offset : offset + size].view(dtype)
            self.slots[name] = rows.unflatten(1, shape)

    def needs_new_blocks(self, request_id: str, past_length: int, query_length: int) -> int:
        return 0 if self.block_table.get(request_id) else 1

    def allocate_cache_to_request(self, request_id: str, past_length: int, query_length: int) -> None:
        if self.needs_new_blocks(request_id, past_length, query_length):
            self.block_table[request_id] = self.pool.get_free_blocks(self.index, 1)

    def get_seqlen_k(self, past_length: int, query_length: int) -> int:
        return past_length + query_length

    def get_read_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        return []

    def get_write_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        found: list[int] = self.block_table[request_id] * query_length
        return found

    def fill_block_table(self, request_id: str, past_length: int, query_length: int, block_table: Tensor) -> None:
        raise NotImplementedError("there are no pages of states")

    def update(self, *_: Any) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("there are no keys in states")

    def get_cache_for_block_table(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("there are no pages of states")


class ConvAllocator(Allocator):
    layer_type = _OF_STATES[1]


def _up(x: int, unit: int) -> int:
    return -(-x // unit) * unit


# ---- what a layer asks of the cache: these become methods of PagedAttentionCache ----


def find_conv_state(self: Any, layer_idx: int, state_idx: int = 0) -> None:
    """Says that there is no state, so that the layer hands over all tokens of the step."""


def put_conv_state(self: Any, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
    """Gives the inputs as they came, for the convolution that is called next."""
    _thread.conv = self, (layer_idx, ("conv_states", state_idx))
    return conv_states


def find_state(self: Any, layer_idx: int, state_idx: int = 0) -> None:
    """Says that there is no state, and whose the next call of a rule is."""
    _thread.rule = self, (layer_idx, ("recurrent_states", state_idx))


def put_state(self: Any, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
    """Gives it back: it has been left in the request's slot."""
    return recurrent_states


# ---- what a function of linear attention asks ----


@dataclass
class Step:
    """Holds what the layers of a kind share in a step: where requests start, their slots, and which have a past."""

    starts: Int32
    slots: Int32
    brings: np.ndarray[Any, Any]

    @classmethod
    def of(cls, cu_q: Tensor, cu_k: Tensor, write: Tensor) -> Step:
        starts = cu_q.numpy().astype(np.int32)
        counts, keys = np.diff(starts), np.diff(cu_k.numpy())
        starts = np.append(starts[:-1][counts > 0], starts[-1])  # requests without tokens pad a compiled step
        slots = write.numpy()[starts[:-1]].astype(np.int32)
        return cls(starts, slots, (keys > counts)[counts > 0])


def taken(kind: str, kwargs: dict[str, Any]) -> tuple[Int32, States] | None:
    """Gives where the requests of a step of continuous batching start, and their states, for a call with these
    arguments of a convolution (``conv``) or a rule (``rule``); None for any other call."""
    asked, _thread.__dict__[kind] = _thread.__dict__.get(kind), None
    if kwargs.get("write_index") is None:
        return None
    if asked is None:
        raise RuntimeError(f"write_index: a step of continuous batching, but no layer has asked for its {kind} state")
    cache, place = asked
    allocator = private.allocator(cache, place[0])
    cu_q = kwargs["cu_seqlens"] if kwargs.get("cu_seq_lens_q") is None else kwargs["cu_seq_lens_q"]
    # All layers of a step are called with the one tensor that was made for it, so what they share hangs on it.
    steps = cu_q.__dict__.setdefault("_cpu_attn_states", {})
    if allocator.index not in steps:
        cu_k, write = kwargs["cu_seq_lens_k"][allocator.layer_type], kwargs["write_index"][allocator.index]
        steps[allocator.index] = Step.of(cu_q, cu_k, write)
    step = steps[allocator.index]
    return step.starts, States.at(allocator.slots[place], step.slots, step.brings)
