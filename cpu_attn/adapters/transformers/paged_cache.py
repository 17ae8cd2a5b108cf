# SPDX-License-Identifier: Apache-2.0
"""This module has a paged KV cache for ``generate(cache=...)``, quantised on request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from hashlib import sha256
from typing import Any

import numpy as np
import torch

from cpu_attn import _check
from cpu_attn._dtypes import dtype_name, is_scaled, rotation_of
from cpu_attn.serving import PrefixStore
from cpu_attn.transformers import prefixes, private
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


def _store(store: Any, model: str) -> PrefixStore:
    _check.instance("store", store, PrefixStore)
    if not model:
        raise ValueError("model: is empty, expected what tells its weights from those of other models")
    found: PrefixStore = store
    return found


def _of_config(config: Any) -> str:
    """Hashes what a configuration says, but for where the model came from."""
    about = {k: x for k, x in config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}
    return sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()


def _prompt(input_ids: Any, attention_mask: Any) -> np.ndarray[Any, Any]:
    """Gives the token ids of one prompt, int64 [T]."""
    for name, x in (("input_ids", input_ids), ("attention_mask", attention_mask)):
        if x is not None or name == "input_ids":
            _check.instance(name, x, torch.Tensor)
            if x.dim() != 2 or len(x) != 1 or x.shape[1:] != input_ids.shape[1:]:
                raise ValueError(f"{name}: shape {tuple(x.shape)}, expected (1, tokens): prefill takes one prompt")
    if attention_mask is not None and not attention_mask.all():
        at = int(attention_mask[0].eq(0).nonzero()[0])
        raise ValueError(f"attention_mask[0, {at}]: hides a token, prefill takes a prompt without padding")
    ids: np.ndarray[Any, Any] = _check.tokens("input_ids", input_ids[0].numpy())
    if not len(ids):
        raise ValueError("input_ids: is empty")
    return ids


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
        store: the :class:`cpu_attn.serving.PrefixStore` in which :meth:`prefill` looks for prompts, and keeps them; or
            None.
        model: with a store, what tells the weights from those of other models: a name and a hash or a version, say.
            Where it is the same, what is stored is taken for the same.
        state_interval: tokens that :meth:`prefill` computes at once, a multiple of ``block_size``. Of a model with
            linear attention a prompt is found up to such a multiple, behind each of which its states are kept.

    Raises:
        ValueError: a layer is of a kind that is not named above, an argument is out of range, or one of ``store`` and
            ``model`` is given without the other.
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
        store: PrefixStore | None = None,
        model: str = "",
        state_interval: int = 512,
    ) -> None:
        balanced, whole = remembered(config), config
        config = config.get_text_config(decoder=True)
        kinds = list(zip(*private.get_layer_types_and_kwargs(config), strict=True))
        for layer_type, _ in kinds:
            if layer_type not in LAYERS:
                raise ValueError(f"config: a layer of {layer_type!r}, PagedCache has {', '.join(LAYERS)}")
        # The first step shows which isa there is for it: a model need not be of its config's dtype.
        _check.instance("kv_cache_dtype", kv_cache_dtype, str)
        kvs = _check.kv_dtypes(kv_cache_dtype, dtype_name(config.dtype or "float32"))
        block_size = _check.integer("block_size", block_size, 1)
        self._interval = _check.integer("state_interval", state_interval, 1)
        if self._interval % block_size:
            raise ValueError(f"state_interval: {self._interval}, expected a multiple of block_size {block_size}")
        self._store = None if store is None else _store(store, _check.text("model", model))
        if model and store is None:
            raise ValueError("model: is given without a store")
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

        if self._store:
            about = {"model": model, "config": _of_config(whole), "balanced": balanced is not None}
            self._about = {"engine": "transformers", **about}

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def prefill(self, model: Any, input_ids: Any, attention_mask: Any = None, *, extra_key: str | bytes = b"") -> int:
        """Brings the cache to all tokens of a prompt but the last, of which ``generate`` computes the first new one:
        what the store has is read, the rest is computed and stored.

        The store's thread writes behind this, out of copies. A token is computed twice, since the first one shows which
        sizes layers keep. Where something fails, the cache is empty.

        Args:
            model: the model that has the tokens, a decoder.
            input_ids: int64 [1, T], which ``generate`` is then given whole. For several rows, beams or returned
                sequences ``batch_repeat_interleave`` comes between the two.
            attention_mask: [1, T] of ones, or None.
            extra_key: what else keys and values depend on, such as an adapter's name, or who may know of the prompt:
                prompts with different ones share nothing.

        Returns:
            How many of the tokens were found.

        Raises:
            ValueError: there is more than one row, padding or no token, the cache has tokens already, no layer has
                pages, a layer keeps what it needs elsewhere or has states that no function of cpu_attn changes
                (Mamba-1, or any before :func:`enable`), or the store is closed or too small for a block.
            TypeError: an argument has another type.

        Example:
            >>> cache = PagedCache(model.config, store=store, model="Qwen3-0.6B, c1899de2")
            >>> found = cache.prefill(model, **inputs)
            >>> model.generate(**inputs, cache=cache)
        """
        _check.instance("model", model, torch.nn.Module)
        ids = _prompt(input_ids, attention_mask)
        if not isinstance(extra_key, (str, bytes)):
            raise TypeError(f"extra_key: expected str or bytes, got {type(extra_key).__name__}")
        if all(self.is_linear):
            raise ValueError("config: no layer has pages, by which generate knows how many tokens there are")
        if self.get_seq_length():
            raise ValueError(f"input_ids: the cache has {self.get_seq_length()} tokens already, expected none")
        forward, stored = private.forward_of(model, self, input_ids), None
        if self._store:
            stored = partial(prefixes.Stored, self._store, self._about, extra_key, ids, self._interval)
        try:
            return prefixes.prefill(self.layers, forward, ids, self._interval, stored)
        except BaseException:
            self.reset()
            raise

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
