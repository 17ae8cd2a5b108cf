# SPDX-License-Identifier: Apache-2.0
"""The snippets of README and docs that need nothing else run as they stand, and compute what the oracle says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cpu_attn import reference

from ..snippets import DOCUMENTS, ROOT, run, snippets

PROMPTS = {ROOT / "README.md": 2, ROOT / "docs" / "backend.md": 1}  # attention over what a step brings
# Those of test_{serving,torch,transformers}_docs.py, test_flash_attn.py, test_flashinfer.py, test_docs.py and
# test_context_parallel.py.
ELSEWHERE = "serving torch transformers flash_attn flashinfer tutorial sparse linear_attention threads distributed"
OTHERS = {ROOT / "docs" / f"{name}.md" for name in ELSEWHERE.split()}


def test_all_documents_are_run() -> None:
    assert {document for document in DOCUMENTS if snippets(document)} == PROMPTS.keys() | OTHERS


@pytest.mark.parametrize("document", PROMPTS, ids=lambda document: document.name)
def test_prompts(document: Path) -> None:
    ran = 0
    for names in run(document):
        query = names["query"]
        step = names.get("step") or names["common_attn_metadata"]
        loc, lens = step.query_start_loc, step.seq_lens
        assert (np.diff(loc) == lens).all()  # the keys are those of the step
        key, value = (np.split(names[name], loc[1:-1]) for name in ("key", "value"))
        want, _ = reference.attention(query, key, value, loc, lens, query.shape[2] ** -0.5)
        output = names.pop("output").reshape(want.shape)  # the next snippet has one of its own
        assert (reference.relative_rms(output, want, loc) <= reference.BUDGET["float32"]).all()
        ran += 1
    assert ran == PROMPTS[document]
