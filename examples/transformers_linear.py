# SPDX-License-Identifier: Apache-2.0
"""Linear attention in transformers: a prompt and the tokens after it, without cpu-attn and with it.

    pip install '.[transformers]'
    python examples/transformers_linear.py

Four layers of Qwen3-Next's shape, three of them gated delta nets, or of MiniMax-01's lightning attention, of random
weights and with few experts. `stock` is transformers alone with sdpa, `functions` has cpu-attn's linear attention
(`enable()`), `cpu_attn` its attention, too. Every way takes its steps in turn with the others, and the fastest counts.
Beside it stands how many of the tokens are those of `stock`.
"""

from __future__ import annotations

import time
from typing import Any

import click
import torch
import transformers

from cpu_attn.transformers import disable, enable

# transformers 5.24 warns of the older name.
CACHE = "cache" if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24) else "past_key_values"
# Whether cpu-attn's functions are enabled, and the attention.
WAYS = {"stock": (False, "sdpa"), "functions": (True, "sdpa"), "cpu_attn": (True, "cpu_attn")}
SIZES = {"vocab_size": 1024, "hidden_size": 2048, "num_hidden_layers": 4, "num_experts_per_tok": 2}
LAYERS = ["linear_attention"] * 3 + ["full_attention"]


def qwen3_next() -> Any:
    config = transformers.Qwen3NextConfig(**SIZES, layer_types=LAYERS, num_experts=8)
    return transformers.Qwen3NextForCausalLM(config)


def minimax() -> Any:
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128}
    config = transformers.MiniMaxConfig(
        **SIZES, **heads, layer_types=LAYERS, num_local_experts=8, intermediate_size=1024, sliding_window=None
    )
    return transformers.MiniMaxForCausalLM(config)


MODELS = {"qwen3_next": qwen3_next, "minimax": minimax}


def timed(model: Any, way: str, ids: torch.Tensor, cache: Any) -> tuple[float, int, Any]:
    """Seconds of a forward pass, the token that it writes, and the cache."""
    enabled, attention = WAYS[way]
    (enable if enabled else disable)()
    model.set_attn_implementation(attention)
    start = time.perf_counter()
    found = model(ids, logits_to_keep=1, use_cache=True, **{CACHE: cache})
    return time.perf_counter() - start, int(found.logits.argmax(-1)), found[CACHE]


@click.command()
@click.option("--model", "name", default="qwen3_next", show_default=True, type=click.Choice(list(MODELS)))
@click.option("--prompt", default=4096, show_default=True, type=click.IntRange(1))
@click.option("--steps", default=10, show_default=True, type=click.IntRange(1), help="Tokens that are decoded.")
@click.option("--repeat", default=2, show_default=True, type=click.IntRange(1), help="Times that the prompt is read.")
@click.option("--dtype", default="bfloat16", show_default=True, type=click.Choice(["float32", "bfloat16"]))
@torch.no_grad()
def main(name: str, prompt: int, steps: int, repeat: int, dtype: str) -> None:
    torch.manual_seed(0)
    enable()  # makes the attention known
    model = MODELS[name]().to(getattr(torch, dtype)).eval()
    ids, step_ids = torch.randint(0, 1024, (1, prompt)), torch.randint(0, 1024, (steps, 1, 1))
    prefill, decode = dict.fromkeys(WAYS, float("inf")), dict.fromkeys(WAYS, float("inf"))
    caches: dict[str, Any] = {}
    written: dict[str, list[int]] = {way: [] for way in WAYS}
    for _ in range(repeat):
        for way in WAYS:
            seconds, _, caches[way] = timed(model, way, ids, None)
            prefill[way] = min(prefill[way], seconds)
    for step in step_ids:
        for way in WAYS:
            seconds, token, caches[way] = timed(model, way, step, caches[way])
            decode[way] = min(decode[way], seconds)
            written[way].append(token)
    print(f"{name}, {dtype}, {torch.get_num_threads()} threads: a prompt of {prompt} tokens, and a token after it")
    for way in WAYS:
        same = sum(x == y for x, y in zip(written[way], written["stock"], strict=True))
        print(f"  {way:<10}{prefill[way]:9.3f} s{decode[way] * 1e3:10.2f} ms    {same} of {steps} tokens as stock")


if __name__ == "__main__":
    main()
