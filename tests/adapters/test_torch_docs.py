# SPDX-License-Identifier: Apache-2.0
"""The snippets of docs/torch.md run as they stand, and compute what the oracle says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cpu_attn import reference

from ..harness.snippets import ROOT, run

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.integrations


def check(output: Any, query: Any, keys: Any, values: Any, starts: Any, lens: Any) -> None:
    arrays = (query.numpy(), [k.numpy() for k in keys], [v.numpy() for v in values], starts.numpy(), lens.numpy())
    want, _ = reference.attention(*arrays, query.shape[2] ** -0.5)
    errors = reference.relative_rms(output.numpy(), want, starts.numpy())
    assert (errors <= reference.BUDGET["float32"]).all() and np.abs(want).max() > 0.1


def test_snippets() -> None:
    document = run(ROOT / "docs" / "torch.md")
    names = next(document)
    try:
        table, lens = names["table"], names["lens"]
        keys, values = (
            [names[name][row].flatten(0, 1)[:n] for row, n in zip(table.long(), lens, strict=True)]
            for name in ("key_pages", "value_pages")
        )
        check(names["out"], names["query"], keys, values, names["cu_seq_q"], lens)
    finally:
        torch.nn.attention.restore_flash_attention_impl()
    names = next(document)
    keys, values = (names[name].split(names["seq_lens"].tolist()) for name in ("key", "value"))
    check(names["output"], names["query"], keys, values, names["query_start_loc"], names["seq_lens"])
    assert next(document, None) is None
