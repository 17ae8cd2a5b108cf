# SPDX-License-Identifier: Apache-2.0
"""The README's first calls run as they stand, and compute what the oracle says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from cpu_attn import reference

README = Path(__file__).resolve().parents[1] / "README.md"


def test_use() -> None:
    section = README.read_text(encoding="utf-8").split("\n## Use\n")[1].split("\n## ")[0]
    snippets = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(snippets) == 2
    names: dict[str, Any] = {}
    for snippet in snippets:  # the second goes on from the first, and has an output of its own
        names.pop("output", None)
        exec(compile(snippet, str(README), "exec"), names)
        query, loc, lens = names["query"], names["query_start_loc"], names["seq_lens"]
        assert (np.diff(loc) == lens).all()  # prompts: the keys are those of the step
        key, value = (np.split(names[name], loc[1:-1]) for name in ("key", "value"))
        want, _ = reference.attention(query, key, value, loc, lens, query.shape[2] ** -0.5)
        assert (reference.relative_rms(names["output"], want, loc) <= reference.BUDGET["float32"]).all()
