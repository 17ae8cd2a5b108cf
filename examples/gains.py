# SPDX-License-Identifier: Apache-2.0
"""What a user gains: two real models and 8B's shape in transformers, vLLM and llama.cpp, with cpu-attn and without.

    make gains    # installs what it compares, each in an environment of its own: build/gains.json, build/gains.svg
    python examples/gains.py --environment transformers=$(which python) --model smollm2 --shape 1x2048

The same weights and prompts go through every engine (gains_engines.py), each in a process of its own, one after the
other: the time until all rows of a batch have a token, and the median time of the tokens after it. An engine that is
not installed is named, with the reason.
A shape is left out where the engine, as fast as before, would take longer than --limit. One line has no attention at
all: what is above it is what attention costs.
"""

from __future__ import annotations

import csv
import importlib
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
from gains_engines import ENGINES, check_shapes, shape_of

HERE = Path(__file__).resolve().parent
SHAPES = ("1x512", "1x2048", "1x8192", "1x32000", "8x512", "8x2048", "8x8192", "32x512", "32x2048")
Result = dict[str, Any]


class Model(NamedTuple):
    name: str
    context: int  # the most tokens
    rows: int  # the most


MODELS = {
    "gemma3": Model("Gemma 3 270M", 32768, 32),
    "smollm2": Model("SmolLM2 135M", 8192, 32),
    "8b": Model("8B shape, 2 layers", 131072, 1),
}


def run(python: str, *arguments: str) -> Iterator[str]:
    """Gives the lines of a run of gains_engines.py. It raises an error with the last words of one that fails."""
    with tempfile.TemporaryFile("w+") as errors:
        command = [python, str(HERE / "gains_engines.py"), *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            assert process.stdout
            yield from process.stdout
        if process.returncode:
            errors.seek(0)
            words = errors.read().strip().splitlines() or [f"exit status {process.returncode}"]
            raise click.ClickException(words[-1])


def has(python: str | None, package: str) -> str:
    """Says why an environment cannot run an engine; empty where it can."""
    if python is None:
        return f"no --environment {package}=PYTHON"
    command = [python, "-c", f"import importlib.util as u; raise SystemExit(u.find_spec({package!r}) is None)"]
    return f"{package} is not installed in it" if subprocess.run(command, capture_output=True).returncode else ""


def measure(
    model: str,
    folder: Path,
    environments: dict[str, str],
    engines: Sequence[str],
    shapes: Sequence[str],
    options: Sequence[str],
) -> Iterator[Result]:
    """Gives what each engine took for each shape, or why it has none."""
    most = MODELS[model]
    fitting = [x for x in shapes if shape_of(x)[0] <= most.rows and shape_of(x)[1] + 64 <= most.context]
    asked = [word for shape in fitting for word in ("--shape", shape)]
    for engine in engines:
        package = ENGINES[engine][0]
        said: Result = {"model": model, "engine": engine}
        if reason := has(environments.get(package), package):
            yield said | {"missing": reason}
            continue
        try:
            for line in run(environments[package], engine, str(folder), *asked, *options):
                yield said | json.loads(line)
        except click.ClickException as reason:
            yield said | {"missing": reason.message}


def table(results: Sequence[Result]) -> list[list[str]]:
    """Gives a row for each engine and batch: seconds until the first token and milliseconds a token of each context."""
    contexts = sorted({r["context"] for r in results if "context" in r})
    rows = [["model", "engine", "rows", *map(str, contexts)]]
    for model, engine, batch in dict.fromkeys((r["model"], r["engine"], r.get("batch")) for r in results):
        its = [r for r in results if (r["model"], r["engine"], r.get("batch")) == (model, engine, batch)]
        if "missing" in its[0]:
            rows.append([MODELS[model].name, engine, "", its[0]["missing"], *[""] * (len(contexts) - 1)])
            continue
        by_context = {r["context"]: r for r in its}
        cells = [cell(by_context[c]) if c in by_context else "" for c in contexts]
        rows.append([MODELS[model].name, engine, str(batch), *cells])
    return rows


def cell(result: Result) -> str:
    if "first" not in result:
        return "too large" if "GiB" in result["skipped"] else "too slow"
    return f"{result['first']:.2f} s, {result['step'] * 1e3:.1f} ms"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


class Panel(NamedTuple):
    title: str
    model: str
    batch: int
    context: int
    field: str  # "first", in seconds, or "step", in milliseconds


PANELS = (
    Panel("Gemma 3 270M: seconds for\na prompt of 8192 tokens", "gemma3", 1, 8192, "first"),
    Panel("SmolLM2 135M: milliseconds for\na token of 8 rows behind 2048", "smollm2", 8, 2048, "step"),
    Panel("8B's shape, 2 layers: milliseconds\nfor a token behind 32,000", "8b", 1, 32000, "step"),
)
BARS = (  # engine, what its bar is called, whether it is with cpu-attn
    ("transformers, sdpa", "transformers, sdpa", False),
    ("transformers, cpu_attn, PagedCache", "transformers, cpu-attn", True),
    ("vLLM", "vLLM", False),
    ("vLLM, cpu_attn", "vLLM, cpu-attn", True),
    ("llama.cpp", "llama.cpp", False),
)


def draw(results: Sequence[Result], path: Path) -> None:
    """Draws a panel for each of PANELS: a bar for each engine, and below it one with cpu-attn."""
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(5, 5.6), layout="constrained")
    for axes, panel in zip(figure.subplots(len(PANELS), 1), PANELS, strict=True):
        its = {r["engine"]: r for r in results if (r["model"], r.get("batch"), r.get("context")) == panel[1:4]}
        found = [(label, its[name][panel.field], own) for name, label, own in BARS if panel.field in its.get(name, {})]
        for place, (_, value, own) in enumerate(found):
            shown = value if panel.field == "first" else value * 1e3
            axes.barh(-place, shown, color="C0" if own else "0.75")
            axes.text(shown, -place, f" {shown:.1f}" if shown < 10 else f" {shown:.0f}", va="center", fontsize=9)
        axes.set_yticks([-place for place in range(len(found))], [label for label, *_ in found], fontsize=9)
        axes.set_title(panel.title, loc="left", fontsize=10)
        axes.set_xticks([])
        axes.margins(x=0.12)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    figure.savefig(path)


def environment(_: Any, __: Any, given: Sequence[str]) -> dict[str, str]:
    found = dict(text.partition("=")[::2] for text in given)
    for name, python in found.items():
        if name not in {x[0] for x in ENGINES.values()} or not Path(python).exists():
            raise click.BadParameter(f"{name}={python}: expected transformers, vllm or llama_cpp, and a Python")
    return found


@click.command()
@click.option(
    "--environment", "environments", multiple=True, callback=environment, help="NAME=PYTHON, for each library."
)
@click.option("--model", "models", multiple=True, default=tuple(MODELS), type=click.Choice(list(MODELS)))
@click.option("--engine", "engines", multiple=True, default=tuple(ENGINES), type=click.Choice(list(ENGINES)))
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    default=SHAPES,
    show_default=True,
    callback=check_shapes,
    help="BATCHxCONTEXT",
)
@click.option("--dtype", default="bfloat16", show_default=True, type=click.Choice(["bfloat16", "float32"]))
@click.option("--new-tokens", default=16, show_default=True, type=click.IntRange(2))
@click.option("--limit", default=100.0, show_default=True, help="Seconds that a shape's prompts may take.")
@click.option("--weights", type=click.Path(path_type=Path), help="Where the weights are, or are to be, laid out.")
@click.option(
    "--json", "as_json", type=click.Path(dir_okay=False, path_type=Path), help="Also write the figures there."
)
@click.option("--csv", "as_csv", type=click.Path(dir_okay=False, path_type=Path), help="Also write the table there.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Also draw them there.")
def main(
    environments: dict[str, str],
    models: Sequence[str],
    engines: Sequence[str],
    shapes: Sequence[str],
    dtype: str,
    new_tokens: int,
    limit: float,
    weights: Path | None,
    as_json: Path | None,
    as_csv: Path | None,
    plot: Path | None,
) -> None:
    """Compare engines with and without cpu-attn."""
    if "transformers" not in environments:
        raise click.UsageError("--environment transformers=PYTHON lays out the weights, and is not given")
    options = ["--dtype", dtype, "--new-tokens", str(new_tokens), "--limit", str(limit)]
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as temporary:
        for model in models:
            folder = (weights or Path(temporary)) / model
            if not (folder / "tokens.json").exists():
                folder.mkdir(parents=True, exist_ok=True)
                list(run(environments["transformers"], "prepare", str(folder), "--model", model, "--dtype", dtype))
            for found in measure(model, folder, environments, engines, shapes, options):
                results.append(found)
                print(json.dumps(found), file=sys.stderr)
                if as_json:
                    report = {"machine": platform.machine(), "dtype": dtype, "new_tokens": new_tokens}
                    as_json.write_text(json.dumps({**report, "results": results}, indent=1) + "\n")
                if plot:
                    draw(results, plot)
    rows = table(results)
    if as_csv:
        with as_csv.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)
    click.echo(markdown(rows))


if __name__ == "__main__":
    main()
