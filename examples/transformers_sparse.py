# SPDX-License-Identifier: Apache-2.0
"""Sparse attention in transformers: decode with an indexer's 2048 of many keys, by eager, sdpa and cpu_attn.

    pip install '.[transformers]'
    python examples/transformers_sparse.py

Two layers of DeepSeek-V3.2's shape, but 16 heads and a hidden size of 2048, of random weights: latents of 512 + 64, an
indexer of 64 heads of 128. Decode goes on behind caches of random latents and indexer's keys, for which no prompt has
to be read. A context of 1 says what a step costs besides. Every way takes its steps in turn with the others, and the
fastest counts. Beside it stands how many of the tokens that follow are eager's. A prompt is read once; the scores of
all its keys that torch makes for the indexer take gigabytes from 3000 tokens on.
"""

from __future__ import annotations

import time
from typing import Any

import click
import torch
import transformers
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM, DynamicCache

from cpu_attn.transformers import PagedCache, enable

# transformers 5.24 warns of the older name.
CACHE = "cache" if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24) else "past_key_values"

# The attention, and whether the cache is ours.
WAYS = {
    "eager": ("eager", False),
    "sdpa": ("sdpa", False),
    "cpu_attn": ("cpu_attn", False),
    "paged": ("cpu_attn", True),
}


def new_model(dtype: torch.dtype, layers: int) -> Any:
    config = DeepseekV32Config(
        vocab_size=1024,
        hidden_size=2048,
        intermediate_size=4096,
        num_hidden_layers=layers,
        first_k_dense_replace=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        dtype=dtype,
    )
    return DeepseekV32ForCausalLM(config).to(dtype).eval()


def new_cache(model: Any, way: str) -> Any:
    return PagedCache(model.config) if WAYS[way][1] else DynamicCache(config=model.config)


def filled_cache(model: Any, way: str, batch: int, context: int) -> Any:
    config, generator = model.config, torch.Generator().manual_seed(0)
    cache = new_cache(model, way)
    for layer in range(config.num_hidden_layers):
        latents, rotated, keys = (
            torch.randn(batch, context, size, generator=generator, dtype=model.dtype)
            for size in (config.kv_lora_rank, config.qk_rope_head_dim, config.index_head_dim)
        )
        cache.update(latents[:, None], rotated[:, None], layer)
        cache.update_indexer(keys, layer)
    return cache


def timed(model: Any, way: str, cache: Any, ids: torch.Tensor) -> tuple[float, list[int]]:
    """Seconds of a forward pass, and the tokens that it writes."""
    model.set_attn_implementation(WAYS[way][0])
    start = time.perf_counter()
    logits = model(ids, logits_to_keep=1, **{CACHE: cache}).logits
    return time.perf_counter() - start, logits.argmax(-1).flatten().tolist()


@click.command()
@click.option("--prompt", default=0, show_default=True, type=click.IntRange(0), help="Of one row; 0: no prefill.")
@click.option(
    "--context", "contexts", default=[1, 16384, 65536], multiple=True, show_default=True, type=click.IntRange(1)
)
@click.option("--batch", default=1, show_default=True, type=click.IntRange(1))
@click.option("--steps", default=5, show_default=True, type=click.IntRange(1), help="Tokens that are decoded.")
@click.option("--layers", default=2, show_default=True, type=click.IntRange(1))
@click.option(
    "--way", "ways", default=list(WAYS), multiple=True, type=click.Choice(list(WAYS)), help="All unless said."
)
@click.option("--dtype", default="bfloat16", show_default=True, type=click.Choice(["float32", "bfloat16"]))
@torch.no_grad()
def main(prompt: int, contexts: list[int], batch: int, steps: int, layers: int, ways: list[str], dtype: str) -> None:
    torch.manual_seed(0)
    enable()
    model = new_model(getattr(torch, dtype), layers)
    if prompt:
        print(f"prefill of {prompt} tokens, {dtype}")
        ids = torch.randint(0, 1024, (1, prompt))
        for way in ways:
            print(f"  {way:<10}{timed(model, way, new_cache(model, way), ids)[0] * 1e3:10.1f} ms")
    ids = torch.randint(0, 1024, (steps, batch, 1))
    for context in contexts:
        caches = {way: filled_cache(model, way, batch, context) for way in ways}
        taken, written = dict.fromkeys(ways, float("inf")), {way: [] for way in ways}
        for step in ids:
            for way, cache in caches.items():
                seconds, tokens = timed(model, way, cache, step)
                taken[way] = min(taken[way], seconds)
                written[way] += tokens
        print(f"decode of {batch} behind {context} tokens, {dtype}")
        for way in ways:
            same = sum(x == y for x, y in zip(written[way], written[ways[0]], strict=True))
            print(f"  {way:<10}{taken[way] * 1e3:10.1f} ms    {same} of {steps * batch} tokens as {ways[0]}")


if __name__ == "__main__":
    main()
