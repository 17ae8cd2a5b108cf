# SPDX-License-Identifier: Apache-2.0
"""The examples run, and the two ways of examples/transformers_batching.py compute the same."""

from __future__ import annotations

import pytest

from ..harness.snippets import printed

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.integrations


def test_batching() -> None:
    sizes = {"requests": 3, "keys": 100, "heads": 4, "kv-heads": 2, "head-size": 16, "page-size": 16, "repeat": 1}
    found = printed("transformers_batching", *(word for name, n in sizes.items() for word in (f"--{name}", str(n))))
    assert [line.split()[0] for line in found] == ["stock", "cpu_attn", "ratio"]
    assert 0 < float(found[-1].split()[-1]) < 0.02


def test_chat() -> None:
    found = printed("transformers_chat", "--context", "20", "--turns", "2", "--answer", "3", "--layers", "1")
    assert len(found) == 4 and all(line.endswith("tokens/s") for line in found)


def test_sparse() -> None:
    found = printed("transformers_sparse", "--prompt", "9", "--context", "40", "--steps", "1", "--layers", "1")
    ways = ["eager", "sdpa", "cpu_attn", "paged"]
    assert [line.split()[0] for line in found] == ["prefill", *ways, "decode", *ways]
    assert all(line.endswith("1 of 1 tokens as eager") for line in found[6:])
