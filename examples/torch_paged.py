# SPDX-License-Identifier: Apache-2.0
"""A chat-like loop in plain torch over a paged KV cache, with and without cpu-attn.

    pip install '.[torch]'
    python examples/torch_paged.py --help

The decoder is tiny and random: what it says is noise, how fast it says it is not. All chats are prefilled at once, then
each step decodes one token of every chat. Attention is torch's own ``varlen_attn`` over pages, which only cpu-attn runs
on a CPU; "without" gathers each chat's pages and calls ``scaled_dot_product_attention``. Both give the same tokens.
"""

from __future__ import annotations

from time import perf_counter

import click
import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.attention import activate_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn

import cpu_attn.torch  # registers the provider

PAGE = 128


class Chats:
    """Pages of all layers, and which of them belong to which chat."""

    def __init__(self, num_chats: int, max_len: int, layers: int, kv_heads: int, head_size: int) -> None:
        columns = -(-max_len // PAGE)
        shape = (layers, 2, num_chats * columns, PAGE, kv_heads, head_size)
        self.pages = torch.zeros(shape)
        self.block_table = torch.randperm(num_chats * columns).int().view(num_chats, columns)
        self.lens = torch.zeros(num_chats, dtype=torch.int32)

    def grow(self, num_new: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Page, slot in it and position of ``num_new`` more tokens of every chat."""
        positions = (self.lens[:, None] + torch.arange(num_new)).long()
        self.lens += num_new
        return self.block_table.gather(1, positions // PAGE).long().flatten(), positions.flatten() % PAGE, positions


def with_cpu_attn(q: torch.Tensor, pages: torch.Tensor, chats: Chats, starts: torch.Tensor) -> torch.Tensor:
    lens, num_new = chats.lens, int(starts[1])
    return varlen_attn(
        *(q, *pages, starts, None, num_new, int(lens.max())),
        seqused_k=lens,
        block_table=chats.block_table,
        window_size=(-1, 0),
        enable_gqa=True,
    )


def with_sdpa(q: torch.Tensor, pages: torch.Tensor, chats: Chats, starts: torch.Tensor) -> torch.Tensor:
    outputs = []
    for table, n, rows in zip(chats.block_table, chats.lens.tolist(), q.split(int(starts[1])), strict=True):
        used = pages[:, table[: -(-n // PAGE)].long()].flatten(1, 2)[:, :n]  # [2, n, Hkv, D]
        k, v = used.transpose(1, 2)
        out = F.scaled_dot_product_attention(rows.transpose(0, 1), k, v, is_causal=len(rows) > 1, enable_gqa=True)
        outputs.append(out.transpose(0, 1))
    return torch.cat(outputs)


class Decoder:
    """Embedding, layers of attention and MLP, output by the embedding. Positions by sines."""

    def __init__(self, layers: int, heads: int, kv_heads: int, head_size: int, vocabulary: int = 512) -> None:
        hidden = heads * head_size
        self.heads, self.kv_heads, self.head_size = heads, kv_heads, head_size
        self.embedding = torch.randn(vocabulary, hidden)
        sizes = ((heads + 2 * kv_heads) * head_size, hidden, hidden, hidden)
        self.layers = [[torch.randn(hidden, n) * hidden**-0.5 for n in sizes] for _ in range(layers)]
        self.frequencies = 10_000.0 ** -torch.linspace(0, 1, hidden)

    def step(self, tokens: torch.Tensor, chats: Chats, attention) -> torch.Tensor:
        """The next token of every chat after ``tokens`` [chats, n]."""
        num_chats, n = tokens.shape
        page, slot, positions = chats.grow(n)
        starts = torch.arange(0, num_chats * n + 1, n, dtype=torch.int32)
        x = (self.embedding[tokens] + torch.sin(positions[..., None] * self.frequencies)).flatten(0, 1)
        for pages, (qkv, out, up, down) in zip(chats.pages, self.layers, strict=True):
            heads = (F.rms_norm(x, x.shape[-1:]) @ qkv).view(len(x), -1, self.head_size)
            q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], 1)
            pages[0, page, slot], pages[1, page, slot] = k, v
            x = x + attention(q, pages, chats, starts).flatten(1) @ out
            x = x + F.silu(F.rms_norm(x, x.shape[-1:]) @ up) @ down
        last = F.rms_norm(x.view(num_chats, n, -1)[:, -1], x.shape[-1:])
        return (last @ self.embedding.T).argmax(-1)


@torch.inference_mode()
def chat(model: Decoder, attention, prompts: torch.Tensor, new_tokens: int, layers: int) -> torch.Tensor:
    torch.manual_seed(1)
    chats = Chats(len(prompts), prompts.shape[1] + new_tokens, layers, model.kv_heads, model.head_size)
    start = perf_counter()
    said = [model.step(prompts, chats, attention)]
    prefilled = perf_counter()
    while len(said) < new_tokens:
        said.append(model.step(said[-1][:, None], chats, attention))
    end = perf_counter()
    prompt, decoded = prompts.numel() / (prefilled - start), len(prompts) * (new_tokens - 1) / (end - prefilled)
    print(f"{attention.__name__:14} prompt {prompt:8.0f} tokens/s   decode {decoded:8.1f} tokens/s")
    return torch.stack(said, 1)


@click.command()
@click.option("--chats", default=8, show_default=True, type=click.IntRange(1))
@click.option("--prompt", default=1000, show_default=True, type=click.IntRange(1), help="Tokens of each chat's prompt.")
@click.option("--new", default=16, show_default=True, type=click.IntRange(2), help="Tokens of each answer.")
@click.option("--layers", default=2, show_default=True, type=click.IntRange(1))
@click.option("--heads", default=8, show_default=True, type=click.IntRange(1))
@click.option("--kv-heads", default=2, show_default=True, type=click.IntRange(1), help="They divide the heads.")
def main(chats: int, prompt: int, new: int, layers: int, heads: int, kv_heads: int) -> None:
    if heads % kv_heads:
        raise click.UsageError(f"--kv-heads {kv_heads} does not divide --heads {heads}")
    torch.manual_seed(0)
    model = Decoder(layers, heads, kv_heads, head_size=64)
    prompts = torch.randint(512, (chats, prompt))
    activate_flash_attention_impl(cpu_attn.torch.provider.NAME)
    said = [chat(model, attention, prompts, new, layers) for attention in (with_sdpa, with_cpu_attn)]
    print("the same tokens" if torch.equal(*said) else "other tokens")


if __name__ == "__main__":
    main()
