# SPDX-License-Identifier: Apache-2.0
"""The program of docs/prefix_store.md finds in its second run what the first one computed."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from ..harness.snippets import ROOT, run

if not (ROOT / "docs").is_dir():
    pytest.skip("these tests belong to a source tree", allow_module_level=True)


def test_prefix_store(capsys: pytest.CaptureFixture[str]) -> None:
    *_, names = run(ROOT / "docs" / "prefix_store.md", lambda snippet: "transformers" not in snippet)
    assert capsys.readouterr().out == "0 96\n96 6 0\n"
    for of in ("computed", "read"):
        for layer, (key, value) in enumerate(names[of]):
            want = np.broadcast_to(np.arange(100, dtype=np.float32)[:, None, None] + layer, (100, 2, 32))
            assert (key == want).all() and (value == want).all()
    for layer, found in enumerate(names["mapped"]):
        assert all((x[:, 0, 0] == np.arange(96) + layer).all() for x in found)
    shutil.rmtree(names["folder"])
