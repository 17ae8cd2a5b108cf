# SPDX-License-Identifier: Apache-2.0
"""The snippets of docs/transformers.md, and README's, run as they stand, but for the model that they load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ..harness.snippets import ROOT, run, snippets

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

from cpu_attn import ops  # noqa: E402
from cpu_attn.tests.models import hf_models  # noqa: E402

pytestmark = pytest.mark.integrations


def test_snippets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[Any] = []
    real = ops.attend
    monkeypatch.setattr(ops, "attend", lambda plan, *rest, **more: (calls.append(plan), real(plan, *rest, **more))[1])
    model = hf_models.model.__wrapped__("qwen3")

    def load(name: str, attn_implementation: str) -> Any:
        model.set_attn_implementation(attn_implementation)
        return model

    def tokenizer(texts: Any, return_tensors: str | None = None) -> Any:
        ids = [[3 + ord(letter) % 90 for letter in text] for text in ([texts] if isinstance(texts, str) else texts)]
        return {"input_ids": torch.tensor(ids) if return_tensors else ids}

    monkeypatch.setattr(hf.AutoModelForCausalLM, "from_pretrained", load)
    monkeypatch.setattr(hf.AutoTokenizer, "from_pretrained", lambda name: tokenizer)
    if tuple(map(int, hf.__version__.split(".")[:2])) < (5, 24):  # as the page says of that version
        generate = model.generate
        named = lambda cache=None, **how: generate(**how, **({"past_key_values": cache} if cache else {}))  # noqa: E731
        monkeypatch.setattr(model, "generate", named)
    (names,) = run(ROOT / "README.md", lambda snippet: "transformers" in snippet)
    assert names["model"].config._attn_implementation == "cpu_attn"
    ran = []
    for names in run(ROOT / "docs" / "transformers.md", lambda snippet: "gemma3" not in snippet):
        ran.append(names.get("outputs", names["ids"]))
        assert calls
        calls.clear()
    first, quantised, balanced, batched = ran
    (stored,) = (x for x in snippets(ROOT / "docs" / "prefix_store.md") if "prefill" in x)
    given = {"model": names["model"], "inputs": names["inputs"]}
    exec(stored.replace("/var/cache/mymodel", str(tmp_path / "store")), given)
    given["store"].close()
    model.set_attn_implementation("eager")
    assert given["found"] == 0 and given["ids"].equal(first)
    assert first.equal(model.generate(**names["inputs"], max_new_tokens=8))
    assert quantised.shape == balanced.shape == first.shape == (1, len("Attention is") + 8)
    assert all(len(found.generated_tokens) == 8 for found in batched.values()) and len(batched) == 2
