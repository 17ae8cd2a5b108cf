# SPDX-License-Identifier: Apache-2.0
"""The snippets of README and docs that need nothing else run as they stand, and compute what the oracle says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cpu_attn import reference

from .snippets import DOCUMENTS, ROOT, run, snippets

PROMPTS = {ROOT / "README.md": 2, ROOT / "docs" / "backend.md": 1}  # attention over what a step brings
# Those of test_torch_docs.py, test_transformers_docs.py, test_flash_attn.py, test_flashinfer.py and test_docs.py.
ELSEWHERE = ("torch.md", "transformers.md", "flash_attn.md", "flashinfer.md", "tutorial.md", "sparse.md", "threads.md")
OTHERS = {ROOT / "docs" / name for name in ELSEWHERE}


def test_all_documents_are_run() -> None:
    assert {document for document in DOCUMENTS if snippets(document)} == PROMPTS.keys() | OTHERS


@pytest.mark.parametrize("document", PROMPTS, ids=lambda document: document.name)
def test_prompts(document: Path) -> None:
    ran = 0
    for names in run(document):
        query = names["query"]
        loc, lens = (
            names.get(name, getattr(names.get("common_attn_metadata"), name, None))
            for name in ("query_start_loc", "seq_lens")
        )
        assert (np.diff(loc) == lens).all()  # the keys are those of the step
        key, value = (np.split(names[name], loc[1:-1]) for name in ("key", "value"))
        want, _ = reference.attention(query, key, value, loc, lens, query.shape[2] ** -0.5)
        output = names.pop("output").reshape(want.shape)  # the next snippet has one of its own
        assert (reference.relative_rms(output, want, loc) <= reference.BUDGET["float32"]).all()
        ran += 1
    assert ran == PROMPTS[document]
