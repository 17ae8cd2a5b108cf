# SPDX-License-Identifier: Apache-2.0
"""The snippets of README and docs that need nothing else run as they stand, and compute what the oracle says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import numpy as np
import pytest

from cpu_attn import reference
from cpu_attn.cli import main

from ..harness.snippets import DOCUMENTS, ROOT, run, snippets

PROMPTS = {ROOT / "README.md": 2, ROOT / "docs" / "backend.md": 1}  # attention over what a step brings
# Those of test_{prefix_store,serving,torch,transformers}_docs.py, test_flash_attn.py, test_flashinfer.py, test_docs.py,
# test_context_parallel.py and test_compose.py.
ELSEWHERE = (
    "prefix_store serving torch transformers flash_attn flashinfer tutorial sparse linear_attention threads "
    "distributed compose"
)
OTHERS = {ROOT / "docs" / f"{name}.md" for name in ELSEWHERE.split()}


def test_all_documents_are_run() -> None:
    assert {document for document in DOCUMENTS if snippets(document)} == PROMPTS.keys() | OTHERS


@pytest.mark.parametrize("document", PROMPTS, ids=lambda document: document.name)
def test_prompts(document: Path) -> None:
    ran = 0
    for names in run(document, lambda snippet: "transformers" not in snippet):  # test_transformers_docs.py has these
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


def test_fences_have_languages() -> None:
    """What can run is python, which tests run, or sh; "py" would be neither."""
    said = {line for document in DOCUMENTS for line in document.read_text().splitlines() if line.startswith("```")}
    assert {line[3:] for line in said} <= {"", "python", "sh", "text", "{eval-rst}", "{toctree}"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_commands(document: Path) -> None:
    """Commands of cpu-attn and of examples/ have the options that the documents give them."""
    text = document.read_text(encoding="utf-8")
    lines = [
        *"\n".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL)).splitlines(),
        *re.findall(r"`([^`\n]+)`", text),
    ]
    for line in lines:
        words = shlex.split(line, comments=True) if line.startswith(("cpu-attn ", "python examples/")) else []
        if words[:1] == ["cpu-attn"] and len(words) > 1 and words[1] in main.commands:
            command = main.commands[words[1]]
            command.make_parser(click.Context(command)).parse_args(words[2:])
        elif words:
            assert words[0] != "python" or (ROOT / words[1]).exists(), line
