# SPDX-License-Identifier: Apache-2.0
"""Serves a prompt by layers whose keys and values follow from its tokens, and prints what it found and what attention
gave: `python -m cpu_attn.tests.programs.prefix_store_serving FOLDER KIND SEED`."""

from __future__ import annotations

import json
import sys
from hashlib import sha256
from typing import Any

import numpy as np

from cpu_attn import PagedKVCache
from cpu_attn.rotation import error_feedback
from cpu_attn.serving import BlockManager, PrefixStore

HEADS, KV_HEADS, SIZE, BLOCK_SIZE, TOKENS = 8, 2, 32, 16, 150
TAIL = 4  # tokens whose outputs are compared, which no hit has
KINDS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "fp8": {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3", "k_scale": 0.5, "v_scale": 0.25},
    "int8": {"dtype": "bfloat16", "kv_cache_dtype": "int8/int4", "kv_cache_rotation": "hadamard"},
    "int4_per_token_head": {"dtype": "float32", "kv_cache_dtype": "int4_per_token_head"},
    "NHD": {"dtype": "float16", "kv_cache_layout": "NHD"},
    "odd": {"dtype": "float32", "head_size_v": 24},
}


def made(kind: str, num_blocks: int = 16, store_blocks: int = 0) -> list[PagedKVCache]:
    """Caches of three layers."""
    sizes = (num_blocks, BLOCK_SIZE, KV_HEADS, SIZE)
    caches = [PagedKVCache(*sizes, **KINDS[kind], store_blocks=store_blocks) for _ in range(3)]
    if kind == "int8":
        caches[0].k_feedback = error_feedback(np.random.default_rng(9).random((KV_HEADS, SIZE)))
    return caches


def run(manager: BlockManager, tokens: Any) -> tuple[int, str]:
    """How many of the tokens were found, and the hash of what attention gives for the last of them."""
    found = manager.allocate("a", tokens)
    outputs: list[Any] = []
    for first, end in ((found, TOKENS - TAIL), (TOKENS - TAIL, TOKENS)):
        step = manager.step([("a", tokens[first:end])])
        outputs = []
        for layer, cache in enumerate(manager.caches):
            sizes = (KV_HEADS * cache.head_size, KV_HEADS * cache.head_size_v, HEADS * SIZE)
            each = [
                np.random.default_rng([layer, token, place]).standard_normal(sum(sizes), np.float32)
                for place, token in enumerate(tokens[first:end].tolist(), first)
            ]
            rows = np.stack(each).astype(cache.dtype) if each else np.zeros((0, sum(sizes)), cache.dtype)
            key, value, query = np.split(rows, np.cumsum(sizes)[:2], axis=1)
            cache.update(
                key.reshape(-1, KV_HEADS, cache.head_size), value.reshape(-1, KV_HEADS, cache.head_size_v), step
            )
            outputs.append(cache.attend(np.ascontiguousarray(query).reshape(-1, HEADS, SIZE), step))
    return found, sha256(b"".join(x.tobytes() for x in outputs)).hexdigest()


def tokens_of(seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 50_000, TOKENS)


if __name__ == "__main__":
    folder, kind, seed = sys.argv[1:]
    with PrefixStore(folder, max_bytes=1 << 30) as store:
        manager = BlockManager(made(kind), store=store, model="m")
        result = run(manager, tokens_of(int(seed)))
        manager.flush_store()
        print(json.dumps([*result, store.stats().num_written_blocks]))
