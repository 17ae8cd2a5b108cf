# SPDX-License-Identifier: Apache-2.0
"""This module has a paged KV cache for ``generate(cache=...)``, quantised on request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpu_attn import _check
from cpu_attn._dtypes import dtype_name, is_scaled, rotation_of
from cpu_attn.transformers import private
from cpu_attn.transformers.feedback import remembered
from cpu_attn.transformers.indexer import IndexedLayer
from cpu_attn.transformers.latents import layer_classes
from cpu_attn.transformers.pages import HybridLayer, PagedLayer, StateLayer
from transformers import Cache

# These are the classes of what a layer keeps, by transformers' names for kinds of layers; a dummy layer is one that
# shares another's keys.
LAYERS: dict[str, Any] = {
    "full_attention": PagedLayer,
    "sliding_attention": PagedLayer,
    "chunked_attention": PagedLayer,
    "indexed_attention": IndexedLayer,
    "minimax_m3_sparse": IndexedLayer,
    "linear_attention": StateLayer,
    "conv": StateLayer,
    "hybrid": HybridLayer,
    "hybrid_sliding": HybridLayer,
    "dummy": private.DummyLayer,
}


def _feedback(given: Mapping[int, Any], kv: str, layers: list[Any]) -> dict[int, Any]:
    """Checks k_feedback for keys that are held as ``kv``. The sizes are checked where a layer knows its own."""
    _check.instance("k_feedback", given, Mapping)
    if given:
        _check.feeds_back("k_feedback", kv)
    found = {}
    for layer, factors in given.items():
        i = _check.integer("k_feedback: layer", layer, 0, len(layers) - 1)
        if not issubclass(layers[i], PagedLayer):
            raise ValueError(f"k_feedback: layer {i} has no pages of keys")
        found[i] = _check.feedback(f"k_feedback[{i}]", factors, kv, None, None)
    return found


class PagedCache(Cache):  # type: ignore[misc]
    """Holds a cache of packed pages for ``generate(cache=...)``.

    A layer of attention keeps all its tokens; one with a window or with chunks gives back the pages before what queries
    to come may see. A layer of linear attention has the states that transformers' own caches have; one that shares
    another's keys has nothing. With ``attn_implementation="cpu_attn"`` attention reads the pages where they lie,
    latents among them (DeepSeek-V3), and :func:`cpu_attn.sparse.select_tokens` those of an indexer's keys, which are of
    the model's dtype (DeepSeek-V3.2). Any other implementation gets keys and values gathered anew in every step.

    Args:
        config: of the model; of a composite model its decoder's counts. The config of a model that :func:`balance` has
            balanced, the object itself, brings the defaults of a balanced model.
        kv_cache_dtype: what the pages hold: ``auto`` (the model's dtype), ``fp8_e4m3``, ``fp8_e5m2``, ``int8``,
            ``int6``, ``int5``, ``int4``, ``int4_per_token_head``, or two of these as ``K/V``.
        block_size: tokens of a page.
        k_scale: what keys are divided by in fp8 pages; 1 for others.
        v_scale: what values are divided by in fp8 pages; 1 for others.
        kv_cache_rotation: ``hadamard``, ``none``, or a word for each of K and V; unless said, integers are rotated,
            which hold a model's keys and values better so (docs/quality.md), and fp8 of a balanced model.
        k_feedback: {layer: float32 [Hkv, D, D]} for keys of integers, as :func:`key_feedback` gives it for the model
            and the rotation; layers that are not among them feed no errors back. Unless said, rotated keys of a
            balanced model have that of :func:`balance`.

    Raises:
        ValueError: a layer is of a kind that is not named above, or an argument is out of range.
        TypeError: an argument has another type.

    Example:
        >>> model.generate(**inputs, cache=PagedCache(model.config, kv_cache_dtype="int8"))
    """

    def __init__(
        self,
        config: Any,
        kv_cache_dtype: str = "auto",
        block_size: int = 32,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        kv_cache_rotation: str | None = None,
        k_feedback: Mapping[int, Any] | None = None,
    ) -> None:
        balanced = remembered(config)
        config = config.get_text_config(decoder=True)
        kinds = list(zip(*private.get_layer_types_and_kwargs(config), strict=True))
        for layer_type, _ in kinds:
            if layer_type not in LAYERS:
                raise ValueError(f"config: a layer of {layer_type!r}, PagedCache has {', '.join(LAYERS)}")
        # The first step shows which isa there is for it: a model need not be of its config's dtype.
        _check.instance("kv_cache_dtype", kv_cache_dtype, str)
        kvs = _check.kv_dtypes(kv_cache_dtype, dtype_name(config.dtype or "float32"))
        block_size = _check.integer("block_size", block_size, 1)
        k_scale, v_scale = _check.scales(k_scale, v_scale, kvs)
        kv_cache_rotation = rotation_of(kvs, balanced is not None) if kv_cache_rotation is None else kv_cache_rotation
        rotates_keys = _check.kv_cache_rotation(kv_cache_rotation) & 1
        options = {"kv_cache_dtype": kv_cache_dtype, "k_scale": k_scale, "v_scale": v_scale}
        options["kv_cache_rotation"] = kv_cache_rotation
        latent = layer_classes(config)
        layers = {kind: latent.get(has, has) for kind, has in LAYERS.items()}
        classes = [layers[kind] for kind, _ in kinds]
        if k_feedback is None:
            tables = balanced if balanced and rotates_keys and is_scaled(kvs[0]) else {}
            k_feedback = {i: tables[i] for i, has in enumerate(classes) if i in tables and issubclass(has, PagedLayer)}
        each = [options] * len(kinds)
        for i, factors in _feedback(k_feedback, kvs[0], classes).items():
            each[i] = {**options, "k_feedback": factors}
        args = zip(classes, kinds, each, strict=True)
        super().__init__(layers=[layer(block_size=block_size, **has, **its) for layer, (_, has), its in args])

    @property
    def nbytes(self) -> int:
        """Says how many bytes the pages in use take, in all layers."""
        return sum(layer.nbytes for layer in self.layers if isinstance(layer, PagedLayer))

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last ``-tokens_to_remove`` tokens. Raises ValueError, and changes nothing, where there are not so
        many, where a layer has only the state after the last one, and where keys before a window are gone that would be
        in it again."""
        states = [i for i, layer in enumerate(self.layers) if isinstance(layer, StateLayer) and not layer.can_crop()]
        if states:
            raise ValueError(
                f"tokens_to_remove: {tokens_to_remove}, but layer {states[0]} of linear attention has the state after "
                "the last token alone; a copy.deepcopy of the cache at an earlier token goes on from there"
            )
        for layer in self.layers:
            if isinstance(layer, PagedLayer):
                layer.check_crop(tokens_to_remove)
        for layer in self.layers:
            layer.crop(tokens_to_remove)
