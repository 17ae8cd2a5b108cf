# SPDX-License-Identifier: Apache-2.0
"""Every example has a test, and examples/vllm_generate.py does what it says of a vLLM that is not there."""

from __future__ import annotations

import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from ..harness.snippets import EXAMPLES, example

# The others: test_{gains,minilm,gemma,quality,torch_examples,torch_distributed}.py and
# test_transformers_{examples,gemma}.py.
TESTED = {
    *("embed_sentences", "decoder", "gemma3", "generate", "quality", "smollm2", "torch_paged", "transformers_batching"),
    *(
        "gains",
        "gains_engines",
        "transformers_chat",
        "transformers_long",
        "transformers_linear",
        "transformers_sparse",
        "vllm_generate",
        "long_context",
    ),
}


def test_all_have_one() -> None:
    assert {file.stem for file in EXAMPLES.glob("*.py")} == TESTED


def test_the_index_has_all() -> None:
    assert set(re.findall(r"\]\((\w+)\.py\)", (EXAMPLES / "README.md").read_text())) == TESTED


class LLM:
    """vLLM's, of which each step gives every request one token more."""

    made: list[dict[str, Any]]

    def __init__(self, **options: Any) -> None:
        self.made.append(options)
        self.llm_engine = self
        self.tokens: dict[str, list[int]] = {}

    def add_request(self, name: str, prompt: dict[str, list[int]], params: Any) -> None:
        assert len(prompt["prompt_token_ids"]) == 7
        self.tokens[name], self.most = [], params.max_tokens

    def has_unfinished_requests(self) -> bool:
        return any(len(tokens) < self.most for tokens in self.tokens.values())

    def step(self) -> list[Any]:
        for tokens in self.tokens.values():
            tokens.append(40 + len(tokens))
        found = [
            SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=tokens)])
            for name, tokens in self.tokens.items()
        ]
        if not self.has_unfinished_requests():
            self.tokens.clear()
        return found


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(LLM, "made", [], raising=False)
    vllm, registry = ModuleType("vllm"), ModuleType("registry")
    vllm.LLM, vllm.SamplingParams = LLM, lambda **options: SimpleNamespace(**options)  # type: ignore[attr-defined]
    backend = SimpleNamespace(get_path=lambda: "its.attention")
    registry.AttentionBackendEnum = SimpleNamespace(CPU_ATTN=backend)  # type: ignore[attr-defined]
    for name in ("v1", "v1.attention", "v1.attention.backends"):
        monkeypatch.setitem(sys.modules, f"vllm.{name}", ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.registry", registry)
    return example("vllm_generate")


SIZES = ("--requests", "3", "--prompt-tokens", "7", "--new-tokens", "5", "--repeat", "1")


@pytest.mark.parametrize("random", [True, False])
def test_the_run_of_one_process(module: Any, random: bool) -> None:
    options = ["--alone", "--model", "some/model", *["--random"] * random, *SIZES]
    result = CliRunner().invoke(module.main, options)
    assert result.exit_code == 0, result.output
    assert result.output.startswith("its.attention\n  first tokens: [40, 41, 42, 43, 44]\n  prefill ")
    (made,) = LLM.made
    assert made["model"] == "some/model" and made["skip_tokenizer_init"] == random and made["max_model_len"] == 28


@pytest.mark.parametrize("fails", [False, True])
def test_two_processes(module: Any, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []

    def run(command: list[str], env: dict[str, str]) -> Any:
        ran.append((command, env["CPU_ATTN_VLLM"]))
        return SimpleNamespace(returncode=int(fails))

    monkeypatch.setattr(module.subprocess, "run", run)
    result = CliRunner().invoke(module.main, ["--model", "some/model", *SIZES])
    if fails:
        assert result.exit_code == 1 and "Error: the run with CPU_ATTN_VLLM=1 failed" in result.output
        return
    assert result.exit_code == 0, result.output
    (first, enabled), (second, disabled) = ran
    assert (enabled, disabled) == ("1", "0") and first == second
    again = CliRunner().invoke(module.main, first[2:])  # what it gives the other process is what that takes
    assert again.exit_code == 0 and first[0] == sys.executable, again.output
