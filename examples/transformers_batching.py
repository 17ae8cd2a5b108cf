# SPDX-License-Identifier: Apache-2.0
"""A layer's attention in a decode step of transformers' continuous batching: its own way, and over its pages in place.

    pip install '.[transformers]' psutil
    python examples/transformers_batching.py

Both are called as a layer calls them, with the PagedAttentionCache, indices and lengths of a real step. Stock is
``sdpa``, which gathers the keys and values of all requests and masks those of others; its mask is made beforehand and
not counted, while our plan, which is made once a step for all layers, is.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import click
import torch
from transformers import ContinuousBatchingConfig, LlamaConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.distributed import DistributedHelper
from transformers.generation.continuous_batching.utils import build_attention_mask
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from cpu_attn.transformers.attention import attention


def make_cache(requests: int, keys: int, heads: int, kv_heads: int, head_size: int, page_size: int) -> Any:
    config = LlamaConfig(
        hidden_size=256,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_size,
    )
    blocks = requests * -(-keys // page_size)
    options = ContinuousBatchingConfig(
        page_size=page_size,
        num_blocks=blocks,
        max_batch_tokens=requests,
        max_blocks_per_request=0,
        max_memory_percent=0.9,
    )
    options.max_requests_per_batch, options.use_async_batching = requests, False
    config._attn_implementation = "cpu_flash_attn"
    helper = DistributedHelper(None, 300.0)
    cache = PagedAttentionCache(config, options, torch.device("cpu"), helper, torch.bfloat16)
    config._attn_implementation = "sdpa"  # to which the cache gives what it gathers
    allocator = cache.layer_to_allocator[0]
    while cache.pool.num_free_sectors:
        cache.pool.allocate_sector(allocator.index)
    for past in range(0, keys, page_size):  # a page of every request after another, as they grow
        for request in range(requests):
            allocator.allocate_cache_to_request(str(request), past, min(page_size, keys - past))
    cache.cache_tensor.view(torch.bfloat16).normal_()
    return cache


def step(cache: Any, requests: int, keys: int) -> dict[str, Any]:
    """What a layer is called with besides its states: every request adds one token."""
    read: list[list[int]] = [[]]
    write: list[list[int]] = [[]]
    for request in range(requests):
        cache.extend_read_and_write_indices(str(request), keys - 1, 1, read, write)
    return {
        "cache": cache,
        "cu_seq_lens_q": torch.arange(requests + 1, dtype=torch.int32),
        "cu_seq_lens_k": {"full_attention": torch.arange(requests + 1, dtype=torch.int32) * keys},
        "max_length_k": {"full_attention": keys},
        "read_index": [torch.tensor(read[0])],
        "write_index": [torch.tensor(write[0])],
        "block_table": None,
    }


@click.command()
@click.option("--requests", default=8, show_default=True, type=click.IntRange(1))
@click.option(
    "--keys", default=2048, show_default=True, type=click.IntRange(1), help="Of each request, the new one counted."
)
@click.option("--heads", default=32, show_default=True, type=click.IntRange(1))
@click.option("--kv-heads", default=8, show_default=True, type=click.IntRange(1))
@click.option("--head-size", default=128, show_default=True, type=click.IntRange(1))
@click.option(
    "--page-size",
    default=256,
    show_default=True,
    type=click.IntRange(1),
    help="256 is what transformers takes by itself.",
)
@click.option(
    "--repeat",
    default=10,
    show_default=True,
    type=click.IntRange(1),
    help="Rounds, both ways in turn; the fastest counts.",
)
@torch.no_grad()
def main(requests: int, keys: int, heads: int, kv_heads: int, head_size: int, page_size: int, repeat: int) -> None:
    torch.manual_seed(0)
    cache = make_cache(requests, keys, heads, kv_heads, head_size, page_size)
    query, key, value = (
        torch.randn(1, requests, n, head_size, dtype=torch.bfloat16).transpose(1, 2)
        for n in (heads, kv_heads, kv_heads)
    )
    lengths = [n * keys for n in range(requests + 1)]
    mask = torch.full((1, 1, requests, requests * keys), torch.finfo(torch.bfloat16).min, dtype=torch.bfloat16)
    build_attention_mask(mask, list(range(requests + 1)), lengths)
    layer = SimpleNamespace(layer_idx=0, is_causal=True, training=False, num_key_value_groups=heads // kv_heads)

    def stock(at: dict[str, Any]) -> Any:
        keys, values = at.pop("cache").update(key, value, layer.layer_idx, at)
        return sdpa_attention_forward(layer, query, keys, values, mask, is_causal=False)

    ways: dict[str, Any] = {
        "stock sdpa": stock,
        "cpu_attn": lambda at: attention(layer, query, key, value, None, is_causal=True, **at),
    }
    seconds, outputs = dict.fromkeys(ways, float("inf")), {}
    for _ in range(repeat):
        for name, way in ways.items():
            arguments = step(cache, requests, keys)
            start = time.perf_counter()
            outputs[name] = way(arguments)[0]
            seconds[name] = min(seconds[name], time.perf_counter() - start)
    worst = (outputs["stock sdpa"] - outputs["cpu_attn"]).abs().max()
    for name, taken in seconds.items():
        print(f"{name:<12}{taken * 1e3:9.2f} ms")
    print(f"ratio       {seconds['stock sdpa'] / seconds['cpu_attn']:9.1f}    largest difference {worst:.4f}")


if __name__ == "__main__":
    main()
