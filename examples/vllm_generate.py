# SPDX-License-Identifier: Apache-2.0
"""Tokens a second of vLLM on this CPU, with cpu-attn and with vLLM's own attention.

    pip install .    # into the environment of a vLLM 0.33 for CPUs
    python examples/vllm_generate.py --model Qwen/Qwen3-0.6B
    python examples/vllm_generate.py --prompt-tokens 2048 --requests 8    # without --model: random weights

Each runs in a process of its own; nothing differs but CPU_ATTN_VLLM. Random weights make a small Llama without
a tokenizer, so that what is printed are token ids.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

LAYERS, HEADS, KV_HEADS, HEAD_SIZE = 8, 16, 4, 128


def random_model(folder: Path) -> str:
    """A Llama of random weights in bfloat16, 150 million parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden = HEADS * HEAD_SIZE // 2
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_SIZE,
        vocab_size=8192,
        max_position_embeddings=16384,
        initializer_range=0.1,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return str(folder)


def generate(model: str, random: bool, requests: int, prompt_tokens: int, new_tokens: int, repeat: int) -> None:
    """The run of one process."""
    from vllm import LLM, SamplingParams
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    llm = LLM(
        model=model,
        dtype="bfloat16",
        skip_tokenizer_init=random,
        enable_prefix_caching=False,
        max_model_len=prompt_tokens + new_tokens + 16,
        compilation_config={"custom_ops": ["none"]} if random else {},
    )
    prompts = [
        {"prompt_token_ids": [(7 * i * j + j) % 8000 + 3 for j in range(prompt_tokens)]} for i in range(requests)
    ]

    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=not random)
    runs = [run(llm.llm_engine, f"{i}", prompts, params) for i in range(repeat + 1)][1:]
    prefill, decode = min(r[0] for r in runs), min(statistics.median(r[1]) for r in runs)
    click.echo(f"{AttentionBackendEnum.CPU_ATTN.get_path()}\n  first tokens: {runs[0][2][0][:12]}")
    click.echo(f"  prefill {requests * prompt_tokens / prefill:.1f} tokens/s")
    click.echo(f"  decode  {requests / decode:.1f} tokens/s, a step {decode * 1e3:.1f} ms")


def run(engine: Any, name: str, prompts: list[Any], params: Any) -> tuple[float, list[float], list[list[int]]]:
    """Seconds until every request has a token, of each step after that, and the tokens of each request."""
    tokens: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts):
        engine.add_request(f"{name}-{i}", prompt, params)
    start, prefill, steps = time.perf_counter(), 0.0, []
    while engine.has_unfinished_requests():
        before, waiting = time.perf_counter(), len(tokens) < len(prompts)
        for out in engine.step():
            tokens[out.request_id] = list(out.outputs[0].token_ids)
        if waiting:
            prefill = time.perf_counter() - start
        else:
            steps.append(time.perf_counter() - before)
    return prefill, steps, [tokens[f"{name}-{i}"] for i in range(len(prompts))]


@click.command()
@click.option("--model", help="A model that vLLM knows, by name or folder.  [default: random weights]")
@click.option("--requests", default=4, show_default=True, type=click.IntRange(1))
@click.option("--prompt-tokens", default=1024, show_default=True, type=click.IntRange(1))
@click.option("--new-tokens", default=32, show_default=True, type=click.IntRange(2))
@click.option("--repeat", default=2, show_default=True, type=click.IntRange(1), help="Runs, the best of which counts.")
@click.option("--alone", is_flag=True, hidden=True)
@click.option("--random", is_flag=True, hidden=True)
def main(
    model: str | None, requests: int, prompt_tokens: int, new_tokens: int, repeat: int, alone: bool, random: bool
) -> None:
    """Generate with cpu-attn, then with vLLM's own attention."""
    if alone:
        assert model is not None
        return generate(model, random, requests, prompt_tokens, new_tokens, repeat)
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--alone", "--model", model or random_model(Path(folder)), *([] if model else ["--random"])]
        sizes = [
            f"--requests={requests}",
            f"--prompt-tokens={prompt_tokens}",
            f"--new-tokens={new_tokens}",
            f"--repeat={repeat}",
        ]
        for enabled in ("1", "0"):
            environment = {"VLLM_LOGGING_LEVEL": "WARNING", **os.environ, "CPU_ATTN_VLLM": enabled}
            command = [sys.executable, __file__, *arguments, *sizes]
            if subprocess.run(command, env=environment).returncode:
                raise click.ClickException(f"the run with CPU_ATTN_VLLM={enabled} failed")


if __name__ == "__main__":
    main()
