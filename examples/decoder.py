# SPDX-License-Identifier: Apache-2.0
"""What gemma3.py and smollm2.py share: decoders of llama.cpp's format GGUF in NumPy, over paged caches of cpu_attn.

The library gguf reads a file and dequantises it. A step takes the new tokens of any number of requests, prompts, parts
of prompts and single tokens alike. Their keys are rotated by their positions while they are written.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize
from numpy.typing import NDArray

from cpu_attn import PagedKVCache, SchedulerMetadata, rotary_reshape_and_cache
from cpu_attn.rotation import balance, error_feedback
from cpu_attn.serving import BlockManager, Step

Array = NDArray[np.float32]
Ints = NDArray[np.integer[Any]]

BLOCK_SIZE = 32


class Reader(GGUFReader):
    """A GGUFReader that slices a plain array: it takes a million slices of a np.memmap, at a third of the speed."""

    @property
    def data(self) -> Any:
        return self._data

    @data.setter
    def data(self, memory: Any) -> None:
        self._data = np.asarray(memory)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x / sqrt(mean(x**2) + eps) * weight, in each row."""
    scale = 1 / np.sqrt(np.einsum("td,td->t", x, x) / np.float32(x.shape[1]) + np.float32(eps))
    normed: Array = x * scale[:, None]
    normed *= weight
    return normed


def dense(x: Array, weight: Array) -> Array:
    """x @ weight.T. For the 2 to 32 rows of decode OpenBLAS takes 0.4 to 0.9 of the time the other way round."""
    return x @ weight.T if len(x) > 32 else np.ascontiguousarray((weight @ x.T).T)


def rotary_table(base: float, positions: int, head_size: int) -> Array:
    """cos, then sin, of every position's angles: [positions, head_size]."""
    angles = np.outer(np.arange(positions), base ** -(np.arange(0, head_size, 2) / head_size))
    return np.hstack([np.cos(angles), np.sin(angles)]).astype(np.float32)


class Decoder:
    """A model, weights in float32.

    dtype: of query, key, value and the attention's output; kv_cache_dtype, kv_cache_rotation, isa, engine: as in
    cpu_attn.get_scheduler_metadata.
    """

    name: str
    first: int  # the token before every text
    is_neox = True  # which channels the rotary embedding turns into one another: D / 2 apart, or neighbours
    tokenizer: Any
    rotary: dict[bool, Array]

    def __init__(
        self,
        file: Path,
        dtype: str = "float32",
        kv_cache_dtype: str = "auto",
        isa: str = "auto",
        engine: str = "auto",
        kv_cache_rotation: str = "none",
    ) -> None:
        self.dtype, self.kv_cache_dtype, self.isa, self.engine = dtype, kv_cache_dtype, isa, engine
        self.kv_cache_rotation = kv_cache_rotation
        reader = Reader(file)
        self.fields = {name: field.contents() for name, field in reader.fields.items()}
        self.eos: int = self.fields["tokenizer.ggml.eos_token_id"]
        self.num_layers: int = self.config("block_count")
        self.num_heads: int = self.config("attention.head_count")
        self.num_kv_heads: int = self.config("attention.head_count_kv")
        self.max_seq_len: int = self.config("context_length")
        self.eps: float = self.config("attention.layer_norm_rms_epsilon")
        self.weights: dict[str, Array] = {}
        self.layers: list[dict[str, Array]] = [{} for _ in range(self.num_layers)]
        for tensor in reader.tensors:
            weight, name = dequantize(tensor.data, tensor.tensor_type), tensor.name.removesuffix(".weight")
            if name.startswith("blk."):
                _, layer, name = name.split(".")
                self.layers[int(layer)][name] = weight
            else:
                self.weights[name] = weight
        for w in self.layers:  # one product where the inputs are the same
            w["attn_qkv"] = np.concatenate([w.pop("attn_q"), w.pop("attn_k"), w.pop("attn_v")])
            w["ffn_gate_up"] = np.concatenate([w.pop("ffn_gate"), w.pop("ffn_up")])
        self.head_size: int = len(self.layers[0]["attn_qkv"]) // (self.num_heads + 2 * self.num_kv_heads)
        self.queries: list[Array] | None = None  # of each layer, where somebody wants to see them
        self.feedback: list[Array] | None = None  # of each layer, for keys of integers (balanced)

    @property
    def identity(self) -> str:
        """What decides keys and values besides tokens and caches, for a prefix store."""
        return f"{self.name}, {self.dtype}{'' if self.feedback is None else ', balanced'}"

    def config(self, name: str) -> Any:
        return self.fields[f"{self.fields['general.architecture']}.{name}"]

    def forward(
        self, tokens: Sequence[int] | Ints, step: Step, caches: list[PagedKVCache], rows: Sequence[int] | Ints
    ) -> Array:
        """Logits [len(rows), vocabulary] of some of a step's T tokens, whose keys and values go into the caches."""
        raise NotImplementedError

    def scaled(self, w: dict[str, Array], factors: Array) -> dict[str, Array]:
        """The weights of a layer whose queries are multiplied by factors [Hkv, D], and whose keys are divided by
        them."""
        raise NotImplementedError

    def caches(self, num_blocks: int) -> list[PagedKVCache]:
        """A cache for each layer, with room for num_blocks * BLOCK_SIZE tokens."""
        sizes = (num_blocks, BLOCK_SIZE, self.num_kv_heads, self.head_size)
        feeds = self.feedback and self.kv_cache_dtype.startswith("int") and self.kv_cache_rotation == "hadamard"
        return [
            PagedKVCache(
                *(*sizes, self.dtype, self.isa),
                kv_cache_dtype=self.kv_cache_dtype,
                kv_cache_rotation=self.kv_cache_rotation,
                k_feedback=table,
            )
            for table in (self.feedback if feeds else [None] * self.num_layers)
        ]

    def attend(
        self,
        qkv: Array,
        step: Step,
        cache: PagedKVCache,
        plan: SchedulerMetadata,
        rotary: Array,
        **norms: Any,
    ) -> Array:
        """Attention's output [T, Hq * D] of qkv [T, (Hq + 2 * Hkv) * D]."""
        qkv = qkv.reshape(len(qkv), -1, self.head_size).astype(cache.dtype, copy=False)
        query, key, value = np.split(qkv, np.cumsum([self.num_heads, self.num_kv_heads]), 1)
        rotary_reshape_and_cache(
            *(query, key, value, cache.key_cache, cache.value_cache, step.slot_mapping, step.positions),
            *(rotary, self.is_neox),
            **norms,
            isa=cache.isa,
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
            kv_cache_dtype=cache.kv_cache_dtype,
            kv_cache_rotation=cache.kv_cache_rotation,
            k_feedback=cache.k_feedback,
        )
        if self.queries is not None:
            self.queries.append(query.astype(np.float32))
        return cache.attend(query, step, plan).reshape(len(qkv), -1).astype(np.float32, copy=False)

    def balanced(self, tokens: int = 61) -> Any:
        """The same model with keys that quantise better: queries times, and keys over, the factors that
        cpu_attn.rotation.balance finds for the sizes that their channels have over random tokens. Rotated caches of
        integers feed errors back by these sizes."""
        probe = copy.copy(self)
        probe.dtype, probe.kv_cache_dtype, probe.kv_cache_rotation, probe.queries = "float32", "auto", "none", []
        vocabulary = len(self.weights["token_embd"])
        ids = np.random.default_rng(0).integers(vocabulary // 4, 3 * vocabulary // 4, tokens)
        manager = BlockManager(probe.caches(-(-tokens // BLOCK_SIZE)), enable_prefix_caching=False)
        manager.allocate("probe")
        step = manager.step([("probe", tokens)])
        probe.forward(ids, step, list(manager.caches), [0])
        model = copy.copy(self)
        model.layers, model.feedback = [], []
        for w, query, cache in zip(self.layers, probe.queries, manager.caches, strict=True):
            query = query.reshape(tokens, self.num_kv_heads, -1, self.head_size)
            key, _ = cache.gather(step.block_table[0], tokens)
            sizes = np.sqrt(np.square(query).mean((0, 2))), np.sqrt(np.square(key).mean(0))
            factors = balance(*sizes, is_neox=self.is_neox)
            model.layers.append(self.scaled(w, factors))
            squares = np.square(sizes[0] * factors)
            pairs = squares.reshape(self.num_kv_heads, *((2, -1) if self.is_neox else (-1, 2)))
            pairs[...] = pairs.mean(1 if self.is_neox else 2, keepdims=True)
            model.feedback.append(error_feedback(squares))
        return model
