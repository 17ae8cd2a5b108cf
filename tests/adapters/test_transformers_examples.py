# SPDX-License-Identifier: Apache-2.0
"""The examples run, and the two ways of examples/transformers_batching.py compute the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ..harness.snippets import example, printed

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


@pytest.mark.parametrize("name", ["qwen3_next", "minimax"])
def test_linear(name: str) -> None:
    options = {"model": name, "prompt": "70", "steps": "2", "repeat": "1", "dtype": "float32"}
    found = printed("transformers_linear", *(word for key, x in options.items() for word in (f"--{key}", x)))
    assert [line.split()[0] for line in found] == [f"{name},", "stock", "functions", "cpu_attn"]
    assert all(line.endswith("2 of 2 tokens as stock") for line in found[1:])


def test_gains_runs_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 97}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, initializer_range=0.5)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "hf")
    (tmp_path / "tokens.json").write_text(json.dumps([1, *(7 * i % 90 + 3 for i in range(200))]))
    gains = example("gains_engines")
    prompts = gains.prompts_of(tmp_path, 2, 40)
    wanted = model.generate(torch.tensor(prompts), max_new_tokens=5, min_new_tokens=5, do_sample=False)[:, 40:]
    names = [name for name, row in gains.ENGINES.items() if row[0] == "transformers"]
    assert len(names) == 7
    names.remove(f"transformers, {gains.NONE}")
    for name in names:
        _, kind, options = gains.ENGINES[name]
        run = kind(folder=tmp_path, dtype="float32", **options).run(prompts, 5)
        assert "int8" in name or run.tokens == wanted.tolist(), name
        assert run.first > 0 and len(run.steps) == 4 and len(run.tokens[1]) == 5
        plain = 2 * 2 * 2 * 16 * 44 * 4  # rows, K and V, layers, head size, tokens; bytes
        assert run.cache == plain if "PagedCache" not in name and "int8" not in name else run.cache < 2 * plain
    _, kind, options = gains.ENGINES[f"transformers, {gains.NONE}"]
    engine = kind(folder=tmp_path, dtype="float32", **options)
    for layer in model.model.layers:  # whatever attention would give is lost in it
        layer.self_attn.o_proj.weight.data.zero_()
    without = model(torch.tensor(prompts)).logits[:, -1].argmax(-1)
    run = engine.run(prompts, 3)
    assert [row[0] for row in run.tokens] == without.tolist() and run.cache is None and engine.room(2, 40) == 0


def test_gains_writes_the_same_model_for_llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers reads both files."""
    pytest.importorskip("gguf")
    import torch
    from transformers import LlamaForCausalLM

    gains = example("gains_engines")
    small = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    monkeypatch.setattr(gains, "SHAPE_OF_8B", gains.SHAPE_OF_8B | small | {"num_key_value_heads": 2})
    gains.prepare(tmp_path, "8b", "float32")
    ids = torch.tensor(gains.prompts_of(tmp_path, 2, 30))
    one = LlamaForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    other = LlamaForCausalLM.from_pretrained(tmp_path, gguf_file="float16.gguf", dtype=torch.float32).eval()
    assert len(one.model.layers) == 2
    want = one(ids).logits
    assert (other(ids).logits - want).abs().max() < 2e-3 * want.abs().max()
