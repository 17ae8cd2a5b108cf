# SPDX-License-Identifier: Apache-2.0
"""What narrow caches cost a language model: Gemma 3 270M (gemma3.py) over caches of every kv_cache_dtype.

    make quality                          # in an environment of its own, with --json and --plot
    python examples/quality.py --quick    # 128 tokens, float32, balanced and rotated alone

The text is Python's own reference, which every Python brings (pydoc_data.topics): windows of it, spread evenly, that
begin with the model's first token and go through the cache in chunks. A chunk attends over what the cache holds of it
and of the chunks before. Every cache meets the same chunk before the next, so that no logits are kept.

A cache may be rotated (kv_cache_rotation), and the keys may be balanced before (Gemma3.balanced).

Three figures, each against the plain cache of the same dtype: perplexity, which a lucky error may lower, hence its
standard error; the Kullback-Leibler divergence of the next token's distribution, in nats, which sees every change and
needs fewer tokens; and how often the likeliest token stays the same.

What is done and the time that is left stand on stderr. The JSON and the picture are written after every window, with
the tokens that have been measured so far.
"""

from __future__ import annotations

import importlib
import json
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from pydoc_data import topics
from typing import Any, NamedTuple

import click
import numpy as np
from gemma3 import BLOCK_SIZE, Array, Gemma3, Ints
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

import cpu_attn
from cpu_attn import BlockManager, PagedKVCache

CHUNK = 128  # tokens; their logits take 134 MB
# Wider keys with narrower values, which bear more.
PAIRS = ("int8/int5", "int8/int4", "int6/int4", "int5/int4_per_token_head")
MARKERS = {"plain": "o", "rotated": "s", "rotated, balanced": "^"}
Result = dict[str, Any]


def reference_text() -> str:
    return "\n".join(topics.topics[name] for name in sorted(topics.topics))


class Kind(NamedTuple):
    """Of cache, and of the keys that it gets."""

    kv_cache_dtype: str = "auto"
    kv_cache_rotation: str = "none"
    balanced: bool = False

    @property
    def keys(self) -> str:
        return "rotated, balanced" if self.balanced else "plain" if self.kv_cache_rotation == "none" else "rotated"


PLAIN = Kind()


def kinds_of(kv_cache_dtypes: Sequence[str]) -> list[Kind]:
    return [
        Kind(name, *how)
        for name in kv_cache_dtypes
        for how in ((), ("hadamard",), ("hadamard", True))
        if name != "auto" or not how
    ]


def kv_cache_dtypes() -> list[str]:
    """Every one that the package has, and PAIRS."""
    return [*cpu_attn.kv_cache_dtypes(), *PAIRS]


def bits(cache: PagedKVCache) -> float:
    """That a number of K or V takes, scales included."""
    numbers = cache.num_blocks * cache.block_size * cache.num_kv_heads * (cache.head_size + cache.head_size_v)
    return float((cache.key_cache.nbytes + cache.value_cache.nbytes) * 8 / numbers)


def windows_of(model: Gemma3, text: str, windows: int, context: int) -> Ints:
    """[windows, context + 1] tokens: what the model reads, and one more that it is to predict."""
    first, *tokens = model.tokenizer.encode(text).ids
    step = len(tokens) // windows
    if step < context:
        raise click.UsageError(f"the text has {len(tokens)} tokens: no {windows} windows of {context}")
    return np.array([[first, *tokens[i * step : i * step + context]] for i in range(windows)])


def log_softmax(logits: Array, scratch: Array) -> Array:
    """Of each row, in its place."""
    logits -= logits.max(1)[:, None]
    logits -= np.log(np.exp(logits, out=scratch).sum(1))[:, None]
    return logits


def measure(model: Gemma3, windows: Ints, dtype: str, kinds: Sequence[Kind]) -> Iterator[list[Result]]:
    """After each window, what caches of dtype and of each kind lost so far against the plain one, which comes first."""
    context = windows.shape[1] - 1
    models, caches = {}, {}
    for kind in dict.fromkeys([PLAIN, *kinds]):
        models[kind] = model.balanced() if kind.balanced else model
        model.dtype, model.kv_cache_dtype, model.kv_cache_rotation = dtype, *kind[:2]
        caches[kind] = model.caches(-(-context // BLOCK_SIZE))
    manager = BlockManager([cache for layers in caches.values() for cache in layers], enable_prefix_caching=False)
    scratch = np.empty((CHUNK, model.weights["token_embd"].shape[0]), np.float32)
    losses: dict[Kind, list[NDArray[np.float64]]] = {kind: [] for kind in caches}  # of tokens: nll, KL, same
    chunks = [(window, start) for window in windows for start in range(0, context, CHUNK)]
    for window, start in track(chunks, dtype, console=Console(stderr=True)):
        if start == 0:
            manager.allocate("window")
        tokens = window[start : min(start + CHUNK, context)]
        rows = np.arange(len(tokens))
        following = window[start + 1 :][rows]
        step = manager.step([("window", len(tokens))])
        for kind, its in models.items():
            logits = its.forward(tokens, step, caches[kind], rows)
            found = log_softmax(logits, scratch[: len(rows)])
            if kind == PLAIN:
                plain, probability, likeliest = found, np.exp(found), found.argmax(1)
            divergence = np.einsum("tv,tv->t", probability, np.subtract(plain, found, out=scratch[: len(rows)]))
            same = found.argmax(1) == likeliest
            losses[kind].append(np.array([-found[rows, following], divergence, same], np.float64))
        if start + CHUNK >= context:
            manager.free("window")
            yield results_of(losses, dtype, {kind: bits(cache[0]) for kind, cache in caches.items()})


def results_of(losses: dict[Kind, list[NDArray[np.float64]]], dtype: str, bits_of: dict[Kind, float]) -> list[Result]:
    joined = {kind: np.hstack(loss) for kind, loss in losses.items()}
    return [
        {
            "dtype": dtype,
            **kind._asdict(),
            "keys": kind.keys,
            "bits": bits_of[kind],
            "tokens": loss.shape[1],
            "perplexity": float(np.exp(loss[0].mean())),
            "over": float(np.expm1((loss[0] - joined[PLAIN][0]).mean())),
            "error": float((loss[0] - joined[PLAIN][0]).std() / np.sqrt(loss.shape[1])),
            "divergence": float(loss[1].mean()),
            "same": float(loss[2].mean()),
        }
        for kind, loss in joined.items()
    ]


def table(results: list[Result]) -> str:
    """In Markdown, for docs/quality.md."""
    lines = ["| dtype | kv_cache_dtype | keys | bits | perplexity | over plain | KL divergence | same token |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for r in results:
        over = f"{100 * r['over']:+.2f} ± {100 * r['error']:.2f} %"
        lines.append(
            f"| {r['dtype']} | {r['kv_cache_dtype']} | {r['keys']} | {r['bits']:.2f} | {r['perplexity']:.4f} | {over} "
            f"| {r['divergence']:.5f} | {100 * r['same']:.2f} % |"
        )
    return "\n".join(lines)


def draw(results: list[Result], path: Path) -> None:
    """Bits a number against KL divergence, of which the plain cache has none."""
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(7.5, 5.0), layout="constrained")
    axes = figure.add_subplot()
    for dtype, filled in zip(dict.fromkeys(r["dtype"] for r in results), (True, False), strict=False):
        for (keys, marker), colour in zip(MARKERS.items(), ("C0", "C1", "C2"), strict=True):
            shown = [r for r in results if (r["dtype"], r["keys"]) == (dtype, keys) and r["divergence"] > 0]
            points = [[r[name] for r in shown] for name in ("bits", "divergence")]
            axes.plot(*points, marker, color=colour, label=f"{dtype}, {keys}", fillstyle="full" if filled else "none")
    for r in results:
        if r["dtype"] == results[0]["dtype"] and r["keys"] == "plain" and r["divergence"] > 0:
            at = r["bits"], r["divergence"]
            axes.annotate(r["kv_cache_dtype"], at, (3, 3), textcoords="offset points", rotation=30)
    axes.set(xlabel="bits a number of K and V, scales included", ylabel="KL divergence from the plain cache, nats")
    left, right = axes.get_xlim()
    axes.set(yscale="log", xlim=(left, right + 0.5), ylim=(None, 9 * axes.get_ylim()[1]))  # room for names
    axes.grid(which="both", alpha=0.25)
    axes.legend()
    figure.savefig(path)


@click.command()
@click.option("--dtype", "dtypes", multiple=True, default=("float32", "bfloat16"), show_default=True)
@click.option("--kv-cache-dtype", "names", multiple=True, help="May be given again; all unless said.")
@click.option("--windows", default=4, show_default=True, type=click.IntRange(1))
@click.option("--context", default=2048, show_default=True, type=click.IntRange(2), help="Tokens of a window.")
@click.option("--quick", is_flag=True, help="128 tokens, float32, balanced and rotated alone.")
@click.option(
    "--json", "as_json", type=click.Path(dir_okay=False, path_type=Path), help="Also write the figures there."
)
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Also draw bits against loss there.")
def main(
    dtypes: tuple[str, ...],
    names: tuple[str, ...],
    windows: int,
    context: int,
    quick: bool,
    as_json: Path | None,
    plot: Path | None,
) -> None:
    """Print what every kv_cache_dtype costs Gemma 3 270M."""
    kinds = kinds_of(names or kv_cache_dtypes())
    if quick:
        dtypes, windows, context, kinds = ("float32",), 1, CHUNK, [kind for kind in kinds if kind.balanced]
    model = Gemma3()
    text = reference_text()
    tokens = windows_of(model, text, windows, context)
    click.echo(
        f"Gemma 3 270M, cpu-attn {cpu_attn.__version__}, isa {model.caches(1)[0].isa}. Text: pydoc_data.topics of "
        f"Python {platform.python_version()}, {len(text)} characters; {windows} windows of {context} tokens of it.\n"
    )
    found: dict[str, list[Result]] = {}
    for dtype in dtypes:
        for latest in measure(model, tokens, dtype, kinds):
            found[dtype] = latest
            results = [r for of_dtype in found.values() for r in of_dtype]
            if as_json:
                report = {"version": cpu_attn.__version__, "python": platform.python_version(), "context": context}
                as_json.write_text(json.dumps({**report, "results": results}, indent=2) + "\n")
            if plot:
                draw(results, plot)
    click.echo(table(results))


if __name__ == "__main__":
    main()
