# SPDX-License-Identifier: Apache-2.0
"""This module computes a prompt for a PagedCache, but for what a PrefixStore has of it.

Blocks of all layers go by one name, as a block manager has them: SHA-256 over what decides their bytes and all tokens
up to their end. States of linear attention are kept behind every so many tokens, as a block of another kind, so a
prompt is found up to the last of these of which all blocks are there. What is to be written is copied, since the cache
may write over its pages at any time; copies stay until they are written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import takewhile
from typing import Any

import numpy as np
import torch

from cpu_attn import profiling
from cpu_attn.serving import PrefixStore
from cpu_attn.serving.block_manager import decides
from cpu_attn.serving.block_pool import child, root
from cpu_attn.serving.prefix_store import StoredBlocks
from cpu_attn.transformers.pages import PagedLayer, StateLayer

Array = np.ndarray[Any, Any]
_CALL = "linear_attention_with_state_cache"


class States:
    """Are the states of all layers that have some, as they are when this is made and as long as the layers keep their
    tensors. To a store they are the arrays of one block, uint8 [1, bytes] each."""

    def __init__(self, layers: Sequence[StateLayer]) -> None:
        self.layers = layers
        self.flags = [dict(layer.has_previous_state) for layer in layers]
        kinds = [x for layer in layers for x in (layer.conv_states, layer.recurrent_states)]
        self.tensors = [kind[i] for kind in kinds for i in sorted(kind) if kind[i] is not None]

    def about(self) -> list[Any]:
        return [(str(x.dtype), list(x.shape)) for x in self.tensors]

    def empty(self) -> list[Array]:
        return [np.empty((1, x.nbytes), np.uint8) for x in self.tensors]

    def copied(self) -> list[Array]:
        flat = (x.detach().clone(memory_format=torch.contiguous_format).flatten() for x in self.tensors)
        return [x.view(torch.uint8).numpy()[None] for x in flat]

    def put(self, arrays: Sequence[Array]) -> None:
        for x, array in zip(self.tensors, arrays, strict=True):
            x.copy_(torch.from_numpy(array[0]).view(x.dtype).view(x.shape))
        for layer, flags in zip(self.layers, self.flags, strict=True):
            layer.has_previous_state.update(flags)


def _kept(layers: Sequence[Any], profile: profiling.Profile) -> tuple[list[PagedLayer], States]:
    """Gives what has pages, and the states, of layers that have seen a token. Raises ValueError for those that cannot
    go on from what a store has: they keep it elsewhere, or their states are changed by functions that begin each part
    of a prompt from zeros (Mamba-1)."""
    for i, layer in enumerate(layers):
        pages = isinstance(layer, PagedLayer) and all(part.held for part in layer.parts())
        states = isinstance(layer, StateLayer) and any(layer.has_previous_state.values())
        if isinstance(layer, (PagedLayer, StateLayer)) and not pages and not states:
            raise ValueError(f"model: layer {i} keeps nothing in its cache, from which it could go on")
    parts = [part for layer in layers if isinstance(layer, PagedLayer) for part in layer.parts()]
    found = States([layer for layer in layers if isinstance(layer, StateLayer)])
    recurrent = sum(x is not None for layer in found.layers for x in layer.recurrent_states.values())
    calls = sum(total.calls for kind, total in profile.totals.items() if kind.name == _CALL)
    if calls != recurrent:
        raise ValueError(
            f"model: functions of cpu_attn change {calls} of {recurrent} states of linear attention, and others do not "
            "go on within a prompt; enable() gives models all that there are"
        )
    return parts, found


def prefill(
    layers: Sequence[Any],
    forward: Callable[[int, int], Any],
    ids: Array,
    interval: int,
    open_store: Callable[[list[PagedLayer], States], Stored] | None,
) -> int:
    """Brings layers, of which none has a token, to all tokens of a prompt but the last.

    Args:
        layers: of the cache.
        forward: computes the tokens from one place to another.
        ids: of the prompt, int64 [T].
        interval: tokens that are computed at once, a multiple of the block size.
        open_store: finds what there is in a store.

    Returns:
        How many tokens were found.

    Raises:
        ValueError: layers cannot go on from what a store has, or what ``open_store`` raises.
    """
    with profiling.profile() as profile:
        forward(0, 1)  # which shows what layers keep, and of which sizes
    parts, states = _kept(layers, profile)
    block_size = parts[0].block_size
    for part in parts:
        part.begin(-(-len(ids) // block_size))
    for layer in states.layers:
        StateLayer.reset(layer)
    stored = open_store(parts, states) if open_store else None
    end = found = stored.find() if stored else 0
    with ExitStack() as stack:
        for part in parts:
            stack.enter_context(part.keeping_all())
        while end < len(ids) - 1:
            start, end = end, min((end // interval + 1) * interval, len(ids) - 1)
            forward(start, end)
            if stored:
                stored.save(start // block_size, end)
    return found


class Stored:
    """Is what a store has of a prompt, or comes to have.

    Args:
        store: the :class:`PrefixStore`.
        about: what else than tokens and caches decides keys, values and states.
        extra_key: as :meth:`cpu_attn.serving.BlockManager.allocate` has it.
        ids: of the prompt, int64 [T].
        interval: tokens between snapshots of states.
        parts: what has pages of the prompt, with no token yet.
        states: of all layers.

    Raises:
        ValueError: the store is closed, or too small for a block.
    """

    def __init__(
        self,
        store: PrefixStore,
        about: Mapping[str, Any],
        extra_key: str | bytes,
        ids: Array,
        interval: int,
        parts: list[PagedLayer],
        states: States,
    ) -> None:
        self.parts, self.states, self.interval = parts, states, interval
        self.block_size = parts[0].block_size
        about = {**about, "caches": [decides(part.held.pages) for part in parts if part.held]}
        self.blocks = store.blocks({**about, "kind": "blocks"}, self._memory())
        self.read_states = states.empty()
        self.snapshots: StoredBlocks | None = None
        if states.tensors:
            self.snapshots = store.blocks({**about, "kind": "states", "states": states.about()}, self.read_states)
        here, self.hashes = root(extra_key, self.blocks.layout.fingerprint), list[bytes]()
        for start in range(0, len(ids) - self.block_size, self.block_size):
            here = child(here, ids[start : start + self.block_size])
            self.hashes.append(here)

    def _memory(self) -> list[Array]:
        """Lists the arrays of all pages, of those that hold values in their keys once."""
        pages = [part.held.pages for part in self.parts if part.held]
        pairs = [(x.key_cache, x.value_cache) for x in pages]
        return [x for k, v in pairs for x in ((k,) if np.may_share_memory(k, v) else (k, v))]

    def find(self) -> int:
        """Has the layers begin with what is found, and says how many tokens that is."""
        count = len([*takewhile(self.blocks.__contains__, self.hashes)])
        while count := self._last_boundary(count):
            done = self.blocks.read(self.hashes[:count], range(count))
            if done == count and (not self.snapshots or self.snapshots.read([self.hashes[count - 1]], [0])):
                break
            count = min(done, count - 1)  # what could not be read is not in the store any more
        if count:
            for part in self.parts:
                part.begin_with(count)
            self.states.put(self.read_states)
        return count * self.block_size

    def _last_boundary(self, count: int) -> int:
        """Gives the most blocks, of so many, with which all layers can begin."""
        while self.snapshots and count and self.hashes[count - 1] not in self.snapshots:
            count -= 1
        return count

    def save(self, first: int, end: int) -> None:
        """Has the full blocks from ``first`` on written, of ``end`` tokens that were computed, and the states."""
        new = [b for b in range(first, end // self.block_size) if self.hashes[b] not in self.blocks]
        if new:
            copies = StoredBlocks(self.blocks.store, self.blocks.layout, [memory[new] for memory in self._memory()])
            copies.write([(i, self.hashes[b]) for i, b in enumerate(new)], keep=True)
        if self.snapshots and end % self.interval == 0:
            here = self.hashes[end // self.block_size - 1]
            if here not in self.snapshots:
                copies = StoredBlocks(self.blocks.store, self.snapshots.layout, self.states.copied())
                copies.write([(0, here)], keep=True)
