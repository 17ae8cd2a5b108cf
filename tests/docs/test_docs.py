# SPDX-License-Identifier: Apache-2.0
"""The tutorial's and the guides' code runs as it stands and computes what the oracle says; pictures are as drawn."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpu_attn import attention_with_kv_cache, get_num_threads, reference
from cpu_attn.linear import reference as linear_attention

from ..harness.snippets import ROOT, run

DOCS = ROOT / "docs"
if not DOCS.is_dir():
    pytest.skip("these tests belong to a source tree", allow_module_level=True)


def logits_of(names: dict[str, Any], tokens: list[int]) -> np.ndarray[Any, Any]:
    """The tutorial's model over a whole text, its attention by the oracle: logits [T, 256]."""
    heads, kv_heads, size = (names[name] for name in ("num_heads", "num_kv_heads", "head_size"))
    x, normed = names["embedding"][tokens].astype(np.float64), names["normed"]
    loc, length = np.array([0, len(tokens)], np.int32), np.array([len(tokens)], np.int32)
    for layer in names["layers"]:
        hidden = normed(x)
        query = (hidden @ layer["query"]).reshape(-1, heads, size)
        key, value = ((hidden @ layer[name]).reshape(-1, kv_heads, size) for name in ("key", "value"))
        out, _ = reference.attention(query, [key], [value], loc, length, size**-0.5, alibi_slopes=names["alibi_slopes"])
        x = x + out.reshape(len(x), -1) @ layer["output"]
        x = x + np.maximum(normed(x) @ layer["up"], 0) @ layer["down"]
    logits: np.ndarray[Any, Any] = normed(x) @ names["embedding"].T
    return logits


def test_tutorial(capsys: pytest.CaptureFixture[str]) -> None:
    for snippet, names in enumerate(run(DOCS / "tutorial.md")):
        if snippet == 2:
            assert names["step"].block_table.tolist() == [[5, 2]]
            assert names["step"].slot_mapping.tolist() == [*range(80, 96), *range(32, 41)]
        if snippet == 6:
            plain, logits = names["plain_logits"](names["prompt"]), names["logits"][0]
            assert np.abs(plain - logits).max() <= 1e-5 * np.abs(logits).max()
        if snippet == 7:
            assert names["manager"].seq_len("first") == 34 and names["step"].block_table.tolist() == [[5, 2, 1]]
    printed = capsys.readouterr().out
    for line in ("8 free, 0 used", "[[5 2]]", "34 [[5 2 1]]", "[ 0  1 21] [35 20]", "\n6\n"):
        assert line in printed
    for row, (prompt, tokens) in enumerate((("prompt", "tokens"), ("second_prompt", "second_tokens"))):
        text = [*names[prompt], *names[tokens]]
        want = logits_of(names, text[:-1])[len(names[prompt]) - 1 :]
        assert np.abs(names["logits"][row] - want[-1]).max() <= 1e-5 * np.abs(want).max()
        best = np.sort(want, axis=1)[:, -2:]
        assert (best[:, 1] - best[:, 0] > 1e-3).all()  # far beyond float32's rounding, so tokens have to be equal
        assert want.argmax(axis=1).tolist() == names[tokens]
    assert len(names["tokens"]) == 11 and len(names["second_tokens"]) == 1


def test_sparse() -> None:
    document = run(DOCS / "sparse.md")

    def check(names: dict[str, Any], keys: list[Any], values: list[Any], **options: Any) -> None:
        query, loc, lens = names["query"], names["query_start_loc"], names["seq_lens"]
        want, _ = reference.attention(query, keys, values, loc, lens, 64**-0.5, **options)
        errors = reference.relative_rms(names["output"], want, loc)
        assert (errors <= reference.BUDGET["float32"]).all() and np.abs(want).max() > 0.05

    names = next(document)
    key, value, selected = names["key"], names["value"], names["selected_blocks"]
    assert selected.shape == (1, 2, 8) and (selected[:, :, -1] == 31).all()
    check(names, [key], [value], selected_blocks=selected)

    names = next(document)
    selected = names["prompt_blocks"]
    assert selected.shape == (8, 2, 10) and selected[0, 0].tolist() == [0, 1, 2, 3] + 6 * [-1]
    prompt = {"query": names["prompt"], "query_start_loc": names["prompt_start_loc"]}
    check(names | prompt, [key], [value], selected_blocks=selected, query_block_size=64)

    names = next(document)
    selected = names["head_blocks"]
    assert selected.shape == (8, 8, 10)
    check(names | prompt, [key], [value], selected_blocks=selected, query_block_size=64)

    names = next(document)
    check(names, [key], [value], selected_tokens=names["selected_tokens"])

    names = next(document)
    assert reference.unpack_tree(names["tree_mask"]).tolist() == [
        [True, False, False, False],
        [True, True, False, False],
        [True, False, True, False],
        [True, True, False, True],
    ]
    drafts = [np.concatenate(pair) for pair in ((key, names["draft_key"]), (value, names["draft_value"]))]
    check(names, drafts[:1], drafts[1:], tree_mask=names["tree_mask"])

    names = next(document)
    assert names["num_shared"] > 0
    rows = [[*range(1024), *range(1024 + 5 * r, 1029 + 5 * r)] for r in range(4)]
    check(names, [names["key"][row] for row in rows], [names["value"][row] for row in rows])
    assert next(document, None) is None


def test_linear_attention() -> None:
    (names,) = run(DOCS / "linear_attention.md")
    loc, options = names["query_start_loc"], names["options"]
    want = linear_attention.linear_attention(names["query"], names["key"], names["value"], loc, [None, None], **options)
    assert np.abs(want.output).max() > 0.01
    assert (reference.relative_rms(names["output"], want.output, loc) <= linear_attention.BUDGET["float32"]).all()
    for slot, state in zip(names["slots"], want.states, strict=True):
        assert np.abs(names["state_cache"][slot] - state).max() <= 1e-5 * np.abs(state).max()
        assert names["conv_state"][slot].any()


def test_threads() -> None:
    before = get_num_threads()
    threads, profiled = run(DOCS / "threads.md")
    assert threads["num_threads"] == 1 and get_num_threads() == before
    assert [kind.name for kind in profiled["profile"].totals][-1] == "attention_with_kv_cache"


def module(name: str) -> Any:
    """A script of docs/."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec and spec.loader
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_pictures() -> None:
    """They are those of docs/figures.py."""
    drawn = {f"{name}.svg": draw() for name, draw in module("figures").PICTURES.items()}
    assert drawn == {file.name: file.read_text(encoding="utf-8") for file in (DOCS / "figures").glob("*.svg")}


def test_tables() -> None:
    """The pages' tables are those that docs/tables.py makes, each in one place."""
    tables = module("tables")
    assert not tables.stale()
    pages = "".join(page.read_text(encoding="utf-8") for page in tables.PAGES)
    shown = re.findall(r"^<!-- begin: docs/tables.py (\S+) -->$", pages, re.MULTILINE)
    assert sorted(shown) == sorted([*tables.TABLES, "site"])


def test_address_of_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    """One variable puts it into README."""
    tables = module("tables")
    monkeypatch.setattr(tables, "SITE", "https://cpu-attn.example/")
    readme = tables.written(tables.README.read_text(encoding="utf-8"))
    assert "[site](https://cpu-attn.example/)" in readme and "docs/index.md" not in readme


def test_a_table_of_arguments() -> None:
    """Names, shapes and defaults are those of the call."""
    page = "a\n<!-- begin: docs/tables.py attention_with_kv_cache -->\nstale\n<!-- end: docs/tables.py -->\nb\n"
    lines = module("tables").written(page).splitlines()
    assert lines[0] == "a" and lines[-1] == "b" and "stale" not in lines
    assert "| `query` | [T, Hq, D] of the call's dtype | |" in lines
    assert "| `sliding_window` | `int \\| tuple[int, int]` | |" in lines
    assert '| `kv_cache_dtype` | `str` | `"auto"` |' in lines
    names = [line.split("`")[1] for line in lines if line.startswith("| `")]
    assert names == list(inspect.signature(attention_with_kv_cache).parameters)


def test_rows_of_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs as ``cpu-attn bench --save`` writes them: means, the unit that a limit has, and what the others take."""

    def run(seconds: float) -> dict[str, Any]:
        prefill = {"workload": "prefill-2k", "gflops": 300.0, "kv_gbps": 1.0, "limit_of": "vdpbf16ps"}
        decode = {"workload": "decode-8x8k", "gflops": 9.0, "kv_gbps": 31.5, "limit_of": "read_gbps"}
        call = {"workload": "call-tiny", "gflops": 2.0, "kv_gbps": 3.0, "limit_of": None, "fraction_of_limit": None}
        fractions = {"seconds_min": seconds, "fraction_of_limit": 0.5}
        own = [{"engine": "native", **fractions, **row} for row in (prefill, decode, call)]
        return {"results": [*own, *({**row, "engine": "torch", "seconds_min": 6e-6} for row in own[:2])]}

    tables = module("tables")
    (tmp_path / "some.json").write_text(json.dumps({"runs": [run(2e-6), run(3e-6)]}))
    monkeypatch.setattr(tables, "REPORTS", tmp_path)
    assert tables.compared("some", engines="torch", columns=tables.LIMIT) == [
        ["workload", "own kernels", "of the limit", "torch takes"],
        ["prefill-2k", "300 GF", "0.50", "2.5"],  # the mean of 3 and 2
        ["decode-8x8k", "31.5 GB/s", "0.50", "2.5"],
        ["call-tiny", "2.5 us", "", ""],
    ]
