# SPDX-License-Identifier: Apache-2.0
"""A conversation with a small random Llama in transformers: tokens a second with and without cpu_attn.

    pip install '.[transformers]'
    python examples/transformers_chat.py --context 2048

It has nothing to say, but takes the time that a trained model of these sizes would. Every turn appends what the user
says to the same cache and generates an answer.
"""

from __future__ import annotations

import time
from typing import Any

import click
import torch
import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from cpu_attn.transformers import PagedCache, enable

# transformers 5.24 warns of the older name.
CACHE = "cache" if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24) else "past_key_values"

VARIANTS = {
    "sdpa": ("sdpa", None),
    "cpu_attn": ("cpu_attn", None),
    "cpu_attn, paged": ("cpu_attn", "auto"),
    "cpu_attn, paged int8": ("cpu_attn", "int8"),
}


def small_model(layers: int, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    config = LlamaConfig(
        num_hidden_layers=layers, vocab_size=4096, head_dim=64, initializer_range=0.1, **sizes, **special
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def converse(model: Any, turns: list[torch.Tensor], answer: int, kv_cache_dtype: str | None) -> float:
    """The seconds that the answers took, but for their first tokens, which read what the user said."""
    cache = DynamicCache(config=model.config)
    if kv_cache_dtype:
        cache = PagedCache(model.config, kv_cache_dtype=kv_cache_dtype)
    ids, seconds = torch.zeros(1, 0, dtype=torch.long), 0.0
    for turn in turns:
        ids = torch.cat([ids, turn], 1)
        options = {CACHE: cache, "do_sample": False}
        ids = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, **options)
        start = time.perf_counter()
        ids = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=answer, **options)
        seconds += time.perf_counter() - start
    return seconds


@click.command()
@click.option(
    "--context", default=1024, show_default=True, type=click.IntRange(1), help="Tokens that the user says first."
)
@click.option(
    "--turns", default=3, show_default=True, type=click.IntRange(1), help="Turns, of 32 tokens after the first one."
)
@click.option("--answer", default=32, show_default=True, type=click.IntRange(2), help="Tokens of an answer.")
@click.option("--layers", default=4, show_default=True, type=click.IntRange(1))
@click.option("--dtype", default="bfloat16", show_default=True, type=click.Choice(["float32", "bfloat16"]))
def main(context: int, turns: int, answer: int, layers: int, dtype: str) -> None:
    enable()
    model = small_model(layers, getattr(torch, dtype))
    heard = [torch.randint(2, 4096, (1, context if turn == 0 else 32)) for turn in range(turns)]
    for name, (implementation, kv_cache_dtype) in VARIANTS.items():
        model.set_attn_implementation(implementation)
        converse(model, heard[:1], 2, kv_cache_dtype)
        seconds = converse(model, heard, answer, kv_cache_dtype)
        print(f"{name:<22}{turns * answer / seconds:8.1f} tokens/s")


if __name__ == "__main__":
    main()
