# SPDX-License-Identifier: Apache-2.0
"""This module does multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) over a PagedCache, without its expansion
where that pays.

A model's attention caches a latent and a rotated key of each token, one head of each, and expands all of them to keys
and values of every head in its method ``expand_kv``. Absorbed into the query and applied to the output instead, the
weights of that leave attention of all heads over the same rows: keys are [latent | rotated key], values latents."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial, wraps
from typing import Any, TypeGuard

import torch

from cpu_attn import CacheDescriptor, PagedKVCache, _check, concat_and_cache_mla
from cpu_attn._dtypes import is_scaled
from cpu_attn.ops import Logits
from cpu_attn.transformers import private
from cpu_attn.transformers.indexer import IndexedLayer
from cpu_attn.transformers.lazy import LazyTensor, ReadOnly
from cpu_attn.transformers.pages import Held, PagedLayer, Pages
from cpu_attn.transformers.plans import Requests


class LatentRows(PagedKVCache):
    """Holds pages of plain rows [latent | rotated key], which have latents once: values are a part of keys."""

    def _hold(self, descriptor: CacheDescriptor, key_cache: Any, value_cache: Any) -> None:
        super()._hold(descriptor, key_cache, key_cache[..., : descriptor.head_size_v])

    def __deepcopy__(self, memo: dict[int, Any]) -> LatentRows:
        copied = super().__deepcopy__(memo)
        assert isinstance(copied, LatentRows)
        copied._hold(copied.descriptor, copied.key_cache, None)
        return copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._hold(self.descriptor, self.key_cache, None)

    def update(self, key: Any, value: Any, slot_mapping: Any) -> None:
        rank, rows = self.head_size_v, self.key_cache[:, :, 0]
        kind = self.kv_cache_dtype, self.k_scale
        concat_and_cache_mla(key[:, 0, :rank], key[:, 0, rank:], rows, slot_mapping, *kind)


class LatentLayer(PagedLayer):
    """Holds rows [latent | rotated key] as keys and latents as values. Integers, which plain rows have no place for,
    and kinds that differ for K and V are in packed pages, which hold latents twice."""

    def _pages(self, num_kv_heads: int, head_size: int, head_size_v: int, dtype: str) -> PagedKVCache:
        k, v = _check.kv_dtypes(self.options["kv_cache_dtype"], dtype)
        alike = k == v and self.options.get("k_scale") == self.options.get("v_scale")
        if not alike or is_scaled(k) or self.options.get("kv_cache_rotation", "none") != "none":
            return super()._pages(num_kv_heads, head_size, head_size_v, dtype)
        sizes = 0, self.block_size, num_kv_heads, head_size
        return LatentRows(*sizes, dtype, head_size_v=head_size_v, kv_cache_layout="NHD", **self.options)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes latents [B, 1, T, L] and rotated keys [B, 1, T, P], and gives all of both."""
        keys, latents = super().update(torch.cat([key_states, value_states], -1), key_states)
        return latents, Rotated(keys)


class IndexedLatentLayer(IndexedLayer, LatentLayer):
    """Adds the keys of an indexer to a LatentLayer."""


class Rotated(ReadOnly):
    """Stands for the rotated keys [B, 1, S, P] of a layer."""

    @staticmethod
    def __new__(cls, keys: Pages) -> Rotated:
        held = keys.held
        size = held.pages.head_size - held.pages.head_size_v
        rotated: Rotated = LazyTensor.__new__(cls, (*keys.shape[:3], size), held.dtype)
        rotated.keys = keys
        return rotated

    def __init__(self, keys: Pages) -> None:
        super().__init__()

    keys: Pages

    def dense(self) -> torch.Tensor:
        return self.keys.dense()[..., -self.shape[3] :]


class Expansion:
    """Stands for the keys and values of all heads that an attention module would make of a layer's latents."""

    def __init__(self, make: Callable[..., Any], weights: Any, latents: Pages, rotated: Rotated) -> None:
        self.held: Held = latents.held
        self.make: Callable[[], Any] = lambda: make(latents.dense(), rotated.dense())
        self.to_latents, self.from_latents = weights  # [H, nope, L] and [H, L, Dv]
        self.sizes = self.to_latents.shape[1] + rotated.shape[3], self.from_latents.shape[2]

    def states(self) -> tuple[Expanded, Expanded]:
        """Gives keys and values, which are made when somebody looks."""
        return Expanded(self, 0), Expanded(self, 1)

    @cached_property
    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        found: tuple[torch.Tensor, torch.Tensor] = self.make()
        return found

    def is_worse(self, q_length: int, most: int | None) -> bool:
        """Says whether it takes more multiplications than attention over the latents does, absorption included. most:
        how many keys a query token attends, None for all."""
        (_, nope, rank), size = self.to_latents.shape, self.from_latents.shape[2]
        rotated, weights = self.held.pages.head_size - rank, rank * (nope + size)
        pairs = q_length * (self.held.length if most is None else most)
        expanded = self.held.length * weights + pairs * (nope + rotated + size)
        return bool(expanded > q_length * weights + pairs * (2 * rank + rotated))

    def attend(self, query: torch.Tensor, requests: Requests, logits: Logits) -> torch.Tensor:
        """Gives output [B, T, H, Dv] of query [B, H, T, nope + P] over the latents."""
        nope = self.to_latents.shape[1]
        absorbed = torch.cat([query[..., :nope] @ self.to_latents, query[..., nope:]], -1)
        output = self.held.attend(absorbed, requests, logits)
        return (output.transpose(1, 2) @ self.from_latents).transpose(1, 2)


class Expanded(LazyTensor):
    """Stands for the keys (index 0) or the values (1) of an expansion."""

    @staticmethod
    def __new__(cls, expansion: Expansion, index: int) -> Expanded:
        held, heads = expansion.held, len(expansion.to_latents)
        shape = len(held.table), heads, held.length, expansion.sizes[index]
        expanded: Expanded = LazyTensor.__new__(cls, shape, held.dtype)
        expanded.expansion, expanded.index = expansion, index
        return expanded

    def __init__(self, expansion: Expansion, index: int) -> None:
        super().__init__()

    expansion: Expansion
    index: int

    def dense(self) -> torch.Tensor:
        return self.expansion.dense[self.index]


def is_expansion(key: torch.Tensor, value: torch.Tensor) -> TypeGuard[Expanded]:
    """Says whether these are the keys and the values of one expansion, of what its layer holds now."""
    if not (isinstance(key, Expanded) and isinstance(value, Expanded)):
        return False
    return key.expansion is value.expansion and (key.index, value.index) == (0, 1) and key.expansion.held.current


def layer_classes(config: Any) -> dict[type[PagedLayer], type[PagedLayer]]:
    """Gives the classes of layers that replace others in a model of such a configuration, which there are where it
    caches latents. From then on its attention classes know LatentLayer."""
    found = private.latent_attention(config)
    for attention in found:
        if not hasattr(attention.expand_kv, "__wrapped__"):
            attention.expand_kv = _lazily(attention.expand_kv)
    return {PagedLayer: LatentLayer, IndexedLayer: IndexedLatentLayer} if found else {}


def _lazily(expand_kv: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(expand_kv)
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def expand(module: Any, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> Any:
        make = partial(expand_kv, module)
        of_one = isinstance(kv_nope, Pages) and isinstance(k_rot, Rotated) and kv_nope.held is k_rot.keys.held
        weights = private.latent_weights(module) if of_one else None
        return Expansion(make, weights, kv_nope, k_rot).states() if weights else make(kv_nope, k_rot)

    return expand
