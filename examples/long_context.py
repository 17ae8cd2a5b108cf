# SPDX-License-Identifier: Apache-2.0
"""A long context that two processes share: tokens a second of one rank and of two.

    pip install '.[torch]' threadpoolctl
    python examples/long_context.py

The decoder is tiny and random, and so are the keys and values of the context: what it says is noise, how fast it says
it is not. Each rank is a process with one thread, so that two ranks on this machine have what two machines with one
core would have, but for the memory, whose bandwidth they share. All ranks say the same tokens.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from time import perf_counter

import click
import ml_dtypes
import numpy as np
import torch.distributed as dist
import torch.multiprocessing as mp
from threadpoolctl import threadpool_limits

from cpu_attn import PagedKVCache, set_num_threads
from cpu_attn.distributed import ContextParallel
from cpu_attn.distributed.gloo import GlooGroup
from cpu_attn.serving import BlockManager

LAYERS, HIDDEN, VOCABULARY = 4, 256, 512
HEADS, KV_HEADS, HEAD_SIZE = 16, 4, 128
BLOCK_SIZE, INTERLEAVE = 64, 64  # positions of a rank's block, and in a row on one rank
Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


def norm(x: Floats) -> Floats:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True))


class Decoder:
    """A rank's: all of the weights, and its share of the keys."""

    def __init__(self, ranks: ContextParallel, context: int, new: int) -> None:
        rng = np.random.default_rng(0)
        self.ranks = ranks
        self.embedding, self.head = rng.standard_normal((2, VOCABULARY, HIDDEN), np.float32)
        width = (HEADS + 2 * KV_HEADS) * HEAD_SIZE
        self.qkv = rng.standard_normal((LAYERS, HIDDEN, width), np.float32) / np.float32(HIDDEN**0.5)
        self.out = rng.standard_normal((LAYERS, HEADS * HEAD_SIZE, HIDDEN), np.float32) / np.float32(HIDDEN**0.5)
        size = BLOCK_SIZE * ranks.group.world_size
        sizes = (-(-(context + new) // size), BLOCK_SIZE, KV_HEADS, HEAD_SIZE, "bfloat16")
        self.caches = [PagedKVCache(*sizes) for _ in range(LAYERS)]
        self.manager = BlockManager(
            self.caches, enable_prefix_caching=False, decode_context_parallel_size=ranks.group.world_size
        )
        self.manager.allocate("text")
        for start in range(0, context, 4096):
            step = ranks.step(self.manager.step([("text", min(4096, context - start))]))
            key, value = rng.standard_normal((2, step.num_tokens, KV_HEADS, HEAD_SIZE), np.float32)
            for cache in self.caches:
                cache.update(key.astype(cache.dtype), value.astype(cache.dtype), step)

    def forward(self, token: int) -> Floats:
        """Logits of the token that follows."""
        step = self.ranks.step(self.manager.step([("text", 1)]))
        x = self.embedding[token][None]
        for cache, qkv, out in zip(self.caches, self.qkv, self.out, strict=True):
            heads = (norm(x) @ qkv).reshape(1, -1, HEAD_SIZE).astype(ml_dtypes.bfloat16)
            query, key, value = np.split(heads, [HEADS, HEADS + KV_HEADS], axis=1)
            cache.update(key, value, step)
            attended = self.ranks.attend(cache, query, step)
            x = x + attended.reshape(1, -1).astype(np.float32) @ out
        logits: Floats = (norm(x) @ self.head.T)[0]
        return logits

    def generate(self, new: int) -> Iterator[int]:
        token = 1
        for _ in range(new):
            token = int(self.forward(token).argmax())
            yield token


def run_rank(rank: int, world_size: int, meeting: str, context: int, new: int, found: mp.SimpleQueue) -> None:
    set_num_threads(1)
    threadpool_limits(1)  # NumPy's BLAS, whose threads would wait on the other ranks' cores
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=world_size)
    decoder = Decoder(ContextParallel(GlooGroup(timeout=60), INTERLEAVE), context, new + 1)
    tokens = list(decoder.generate(1))  # the first one warms up
    decoder.ranks.group.barrier()
    begin = perf_counter()
    tokens += decoder.generate(new)
    found.put((rank, tokens, new / (perf_counter() - begin)))
    dist.destroy_process_group()


@click.command()
@click.option("--context", default=131_072, show_default=True, type=click.IntRange(1), help="Tokens that are there.")
@click.option("--new", default=16, show_default=True, type=click.IntRange(1), help="Tokens to generate.")
@click.option("--ranks", default=(1, 2), show_default=True, multiple=True, type=click.IntRange(1))
@click.option("--quick", is_flag=True, help="A context of 1000 tokens, 4 new ones.")
def main(context: int, new: int, ranks: tuple[int, ...], quick: bool) -> None:
    """Generate tokens behind a long context over so many RANKS, which are processes of this machine."""
    if quick:
        context, new = 1000, 4
    for world_size in ranks:
        with tempfile.TemporaryDirectory() as folder:
            found = mp.get_context("fork").SimpleQueue()
            arguments = (world_size, f"{folder}/meeting", context, new, found)
            mp.start_processes(run_rank, arguments, nprocs=world_size, start_method="fork")
        said = sorted(found.get() for _ in range(world_size))
        assert all(tokens == said[0][1] for _, tokens, _ in said)
        held = f"{context // world_size} of {context} tokens a rank"
        click.echo(f"ranks {world_size}: {min(rate for *_, rate in said):.1f} tokens/s, {held}, says {said[0][1][:4]}")


if __name__ == "__main__":
    main()
