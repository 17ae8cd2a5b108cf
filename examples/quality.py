# SPDX-License-Identifier: Apache-2.0
"""What narrow caches cost language models: Gemma 3 270M and SmolLM2 135M (gemma3.py, smollm2.py) over caches of every
kv_cache_dtype.

    make quality                          # in an environment of its own, with --json and --plot
    python examples/quality.py --quick    # 128 tokens, float32, balanced and rotated alone

The text is Python's own reference, which every Python brings (pydoc_data.topics): windows of it, spread evenly, that
begin with the token before every text and go through the cache in chunks. A chunk attends over what the cache holds of
it and of the chunks before. Every cache meets the same chunk before the next, so that no logits are kept.

A cache may be rotated (kv_cache_rotation), and the keys may be balanced before (Decoder.balanced).

Three figures, each against the plain cache of the same dtype: the Kullback-Leibler divergence of the next token's
distribution, in nats, which sees every change and needs few tokens; how often the likeliest token stays the same; and
perplexity, which a lucky error may lower, hence its standard error.

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
from decoder import BLOCK_SIZE, Array, Decoder, Ints
from gemma3 import Gemma3
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from smollm2 import SmolLM2

import cpu_attn
from cpu_attn import PagedKVCache
from cpu_attn.serving import BlockManager

MODELS = {"gemma3": Gemma3, "smollm2": SmolLM2}
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


def windows_of(model: Decoder, text: str, windows: int, context: int) -> Ints:
    """[windows, context + 1] tokens: what the model reads, and one more that it is to predict."""
    tokens = model.tokenizer.encode(text, add_special_tokens=False).ids
    step = len(tokens) // windows
    if step < context:
        raise click.UsageError(f"the text has {len(tokens)} tokens: no {windows} windows of {context}")
    return np.array([[model.first, *tokens[i * step : i * step + context]] for i in range(windows)])


def log_softmax(logits: Array, scratch: Array) -> Array:
    """Of each row, in its place."""
    logits -= logits.max(1)[:, None]
    logits -= np.log(np.exp(logits, out=scratch).sum(1))[:, None]
    return logits


def measure(model: Decoder, windows: Ints, dtype: str, kinds: Sequence[Kind]) -> Iterator[list[Result]]:
    """After each window, what caches of dtype and of each kind lost so far against the plain one, which comes first."""
    context = windows.shape[1] - 1
    models, caches = {}, {}
    balanced = model.balanced() if any(kind.balanced for kind in kinds) else model
    for kind in dict.fromkeys([PLAIN, *kinds]):
        models[kind] = balanced if kind.balanced else model
        its = models[kind]
        its.dtype, its.kv_cache_dtype, its.kv_cache_rotation = dtype, *kind[:2]
        caches[kind] = its.caches(-(-context // BLOCK_SIZE))
    manager = BlockManager([cache for layers in caches.values() for cache in layers], enable_prefix_caching=False)
    scratch = np.empty((CHUNK, model.weights["token_embd"].shape[0]), np.float32)
    losses: dict[Kind, list[NDArray[np.float64]]] = {kind: [] for kind in caches}  # of tokens: nll, KL, same
    chunks = [(window, start) for window in windows for start in range(0, context, CHUNK)]
    for window, start in track(chunks, f"{model.name}, {dtype}", console=Console(stderr=True)):
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
            yield results_of(losses, model.name, dtype, {kind: bits(cache[0]) for kind, cache in caches.items()})


def results_of(
    losses: dict[Kind, list[NDArray[np.float64]]], model: str, dtype: str, bits_of: dict[Kind, float]
) -> list[Result]:
    joined = {kind: np.hstack(loss) for kind, loss in losses.items()}
    return [
        {
            "model": model,
            "dtype": dtype,
            **kind._asdict(),
            "keys": kind.keys,
            "bits": bits_of[kind],
            "tokens": loss.shape[1],
            "divergence": float(loss[1].mean()),
            "same": float(loss[2].mean()),
            "perplexity": float(np.exp(loss[0].mean())),
            "over": float(np.expm1((loss[0] - joined[PLAIN][0]).mean())),
            "error": float((loss[0] - joined[PLAIN][0]).std() / np.sqrt(loss.shape[1])),
        }
        for kind, loss in joined.items()
    ]


def table(results: list[Result]) -> str:
    """In Markdown, for docs/reports/README.md."""
    heads = ["model", "dtype", "kv_cache_dtype", "keys", "bits", "KL divergence", "same token", "perplexity"]
    lines = [f"| {' | '.join(heads)} | over plain |", "|---" * (len(heads) + 1) + "|"]
    for r in results:
        over = f"{100 * r['over']:+.2f} ± {100 * r['error']:.2f} %"
        lines.append(
            f"| {r['model']} | {r['dtype']} | {r['kv_cache_dtype']} | {r['keys']} | {r['bits']:.2f} "
            f"| {r['divergence']:.5f} | {100 * r['same']:.2f} % | {r['perplexity']:.4f} | {over} |"
        )
    return "\n".join(lines)


def draw(results: list[Result], path: Path) -> None:
    """Bits a number against KL divergence, of which the plain cache has none: a panel for each model."""
    models = list(dict.fromkeys(r["model"] for r in results))
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(7.5, 4.5 * len(models)), layout="constrained")
    panels = figure.subplots(len(models), squeeze=False)[:, 0]
    for axes, model in zip(panels, models, strict=True):
        panel(axes, [r for r in results if r["model"] == model and r["divergence"] > 0])
        axes.set(title=model, ylabel="KL divergence from the plain cache, nats")
    panels[-1].set(xlabel="bits a number of K and V, scales included")
    panels[0].legend()
    figure.savefig(path)


def panel(axes: Any, results: list[Result]) -> None:
    for dtype, filled in zip(dict.fromkeys(r["dtype"] for r in results), (True, False), strict=False):
        for (keys, marker), colour in zip(MARKERS.items(), ("C0", "C1", "C2"), strict=True):
            shown = [r for r in results if (r["dtype"], r["keys"]) == (dtype, keys)]
            points = [[r[name] for r in shown] for name in ("bits", "divergence")]
            axes.plot(*points, marker, color=colour, label=f"{dtype}, {keys}", fillstyle="full" if filled else "none")
    for r in results:
        if r["dtype"] == results[0]["dtype"] and r["keys"] == "plain":
            at = r["bits"], r["divergence"]
            axes.annotate(r["kv_cache_dtype"], at, (3, 3), textcoords="offset points", rotation=30)
    left, right = axes.get_xlim()
    axes.set(yscale="log", xlim=(left, right + 0.5), ylim=(None, 9 * axes.get_ylim()[1]))  # room for names
    axes.grid(which="both", alpha=0.25)


@click.command()
@click.option(
    "--model", "names", multiple=True, default=tuple(MODELS), type=click.Choice(list(MODELS)), show_default=True
)
@click.option("--dtype", "dtypes", multiple=True, default=("float32", "bfloat16"), show_default=True)
@click.option("--kv-cache-dtype", "kvs", multiple=True, help="May be given again; all unless said.")
@click.option("--windows", default=4, show_default=True, type=click.IntRange(1))
@click.option("--context", default=2048, show_default=True, type=click.IntRange(2), help="Tokens of a window.")
@click.option("--balanced", is_flag=True, help="Rotated caches of balanced models alone.")
@click.option("--quick", is_flag=True, help="128 tokens, float32, --balanced.")
@click.option(
    "--json", "as_json", type=click.Path(dir_okay=False, path_type=Path), help="Also write the figures there."
)
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Also draw bits against loss there.")
def main(
    names: tuple[str, ...],
    dtypes: tuple[str, ...],
    kvs: tuple[str, ...],
    windows: int,
    context: int,
    balanced: bool,
    quick: bool,
    as_json: Path | None,
    plot: Path | None,
) -> None:
    """Print what every kv_cache_dtype costs two language models."""
    kinds = kinds_of(kvs or kv_cache_dtypes())
    if balanced or quick:
        kinds = [kind for kind in kinds if kind.balanced]
    if quick:
        dtypes, windows, context = ("float32",), 1, CHUNK
    text = reference_text()
    click.echo(
        f"cpu-attn {cpu_attn.__version__}. Text: pydoc_data.topics of Python {platform.python_version()}, {len(text)} "
        f"characters; {windows} windows of {context} tokens of it.\n"
    )
    found: dict[tuple[str, str], list[Result]] = {}
    for name in names:
        model = MODELS[name]()
        tokens = windows_of(model, text, windows, context)
        for dtype in dtypes:
            for latest in measure(model, tokens, dtype, kinds):
                found[name, dtype] = latest
                results = [r for some in found.values() for r in some]
                if as_json:
                    report = {"version": cpu_attn.__version__, "python": platform.python_version(), "context": context}
                    as_json.write_text(json.dumps({**report, "results": results}, indent=2) + "\n")
                if plot:
                    draw(results, plot)
    click.echo(table(results))


if __name__ == "__main__":
    main()
