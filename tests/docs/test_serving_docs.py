# SPDX-License-Identifier: Apache-2.0
"""The program of docs/serving.md gives the tokens of the same model without a cache."""

from __future__ import annotations

from typing import Any

import numpy as np

from cpu_attn import reference
from cpu_attn.linear import reference as linear_attention

from ..cases import linear_cases
from ..harness.snippets import ROOT, run


def next_token(names: dict[str, Any], text: list[int]) -> int:
    """All at once, every layer by the oracle."""
    heads, kv_heads, size = names["NUM_HEADS"], names["NUM_KV_HEADS"], names["HEAD_SIZE"]
    loc, lens = np.array([0, len(text)], np.int32), np.array([len(text)], np.int32)
    x = names["embedding"][text].astype(np.float64)
    for weight in names["weights"]:
        query, key, value = np.split((x @ weight).reshape(len(x), -1, size), [heads, heads + kv_heads], 1)
        attended, _ = reference.attention(query, [key], [value], loc, lens, size**-0.5)
        x = x + attended.reshape(len(x), -1)
    logits = x[-1] @ names["embedding"].T
    second, first = np.sort(logits)[-2:]
    assert first - second > 1e-3  # no rounding decides
    return int(logits.argmax())


def test_serving() -> None:
    names: dict[str, Any] = {}
    steps = run(ROOT / "docs" / "serving.md")
    next(steps)

    names = next(steps)  # a step
    for request, given in (("a", 43), ("b", 3)):
        text = names["texts"][request]
        assert text[given:] == [next_token(names, text[:i]) for i in range(given, given + 8)]

    names = next(steps)  # prefix caching
    assert names["found"] == 32 and names["tokens"] == [next_token(names, names["texts"]["c"])]

    names = next(steps)  # forks
    assert names["tokens"].tolist() == [next_token(names, names["texts"][r]) for r in names["answers"]]

    names = next(steps)  # when blocks run out
    assert names["swapped"] == ["c2"]
    computed = ("d", "a", "b", "c0", "c1")
    assert names["tokens"].tolist() == [next_token(names, names["texts"][r]) for r in computed]
    assert names["manager"].seq_len("c2") == len(names["texts"]["c2"]) - 1

    names = next(steps)  # taking tokens back
    manager, text = names["manager"], [*names["texts"]["b"], names["drafts"][0]]
    assert manager.seq_len("b") == len(text)
    text += [7]
    assert names["run"]([("b", [7])]) == [next_token(names, text)]

    names = next(steps)  # states
    rows, step = (names[x] for x in ("query", "key", "value")), names["step"]
    want = linear_attention.linear_attention(*rows, step.query_start_loc, [None], use_qk_l2norm_in_kernel=True)
    assert linear_cases.relative(names["output"], want.output) <= linear_attention.BUDGET["float32"]
    state = names["state_cache"][step.state_indices[0]]
    assert linear_cases.relative(state, want.states[0]) <= linear_attention.BUDGET["float32"]
    assert not list(steps)
