# SPDX-License-Identifier: Apache-2.0
"""Layers of linear attention of transformers' models, with our functions after enable(), against the models' own."""

from __future__ import annotations

import copy
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

import cpu_attn.transformers as adapter  # noqa: E402
from cpu_attn import profiling  # noqa: E402
from cpu_attn.tests.models import hf_tiny, model_sweep  # noqa: E402
from cpu_attn.tests.models.hf_models import CACHE  # noqa: E402
from cpu_attn.tests.models.hf_odd_models import LAYERS, ODD, SPECIAL  # noqa: E402
from cpu_attn.transformers import private  # noqa: E402

pytestmark = pytest.mark.integrations

RULE, CONV = "linear_attention_with_state_cache", "causal_conv1d"
BOTH, ALONE, LIGHTNING = {RULE, CONV}, {CONV}, {RULE}
NONE: set[str] = set()
GATED = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "kimi_linear")
SPACES = ("granitemoehybrid", "nemotron_h", "falcon_h1", "bamba", "zamba2", "mamba2")
# Mamba-1's scan has no function here, and the layers of MiniMax-01 have no convolution.
MODELS = dict.fromkeys(GATED + SPACES, BOTH) | dict.fromkeys(("lfm2", "lfm2_moe", "mamba", "jamba"), ALONE)
MODELS |= {"minimax": LIGHTNING}
# Which of the newer ones there are is a matter of the version.
NEWER = dict.fromkeys(("bailing_hybrid", "lara_mini", "glm5_next", "qwen4_exp_text"), BOTH)
NEWER |= dict.fromkeys(("lfm3", "inkling_text", "inkling2_text", "inkling2_loop_text"), ALONE)
NEWER |= {} if CACHE == "cache" else {"lfm3": NONE}  # before transformers 5.24 it asks for no function
MODELS |= {name: called for name, called in NEWER.items() if name in CONFIG_MAPPING}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
TWO = LAYERS | EXPERTS | {"num_hidden_layers": 2, "layer_types": ["linear_attention", "indexed_attention"]}
INKLING = LAYERS | EXPERTS | {"n_routed_experts": 4, "unpadded_vocab_size": 128, "head_dim": 8, "d_rel": 4}
INKLING |= {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "sliding_window_size": 8}
INKLING |= {"rel_extent": 64, "layer_types": ["hybrid_sliding", "hybrid"] * 2}
OWN: dict[str, Callable[[], Any]] = {
    "mamba2": lambda: hf.Mamba2Config(
        **SPECIAL | {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2},
        **{"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 16},
    ),
    "minimax": lambda: hf.MiniMaxConfig(
        **LAYERS | {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
        **{"block_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    ),
    "lfm2_moe": lambda: hf.Lfm2MoeConfig(
        **LAYERS,
        **{"layer_types": ["conv", "full_attention"] * 2, "moe_intermediate_size": 32},
        **{"num_experts": 4, "num_experts_per_tok": 2, "num_dense_layers": 1},
    ),
    "glm5_next": lambda: CONFIG_MAPPING["glm5_next"](
        text_config=TWO
        | {"num_key_value_heads": 4, "n_routed_experts": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "v_head_dim": 16}
        | {"qk_nope_head_dim": 16, "index_topk": 160, "index_kpool": 4, "index_head_dim": 16, "index_n_heads": 8}
        | {"linear_head_dim": 16, "linear_num_heads": 4, "indexer_types": ["full"] * 2},
        vision_config={"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32},
    ),
    "qwen4_exp_text": lambda: CONFIG_MAPPING["qwen4_exp_text"](
        **TWO | {"shared_expert_intermediate_size": 16, "num_experts": 4, "head_dim": 16, "linear_num_key_heads": 2},
        **{"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_value_heads": 4, "hc_count": 2},
        **{"hc_lowrank": 8, "ple_embed_dim": 16, "ngram_vocab_size_base": 100, "split_ngram_parts": 4},
        **{"heads_per_ngram": 2, "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16},
        **{"indexer_budget": 160, "indexer_compress_ratio": 4},
    ),
    "inkling_text": lambda: CONFIG_MAPPING["inkling_text"](**INKLING),
    "inkling2_text": lambda: CONFIG_MAPPING["inkling2_text"](**INKLING, n_layers_per_attn_res_block=1),
    "inkling2_loop_text": lambda: CONFIG_MAPPING["inkling2_loop_text"](
        **INKLING,
        **{"n_layers_per_attn_res_block": 1, "loop_layer_index_start": 1, "loop_layer_index_end": 3},
        **{"loop_num_passes": 2, "loop_gate_rank": 8},
    ),
}
GREEDY = {"do_sample": False, "use_cache": True, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": 9}


@pytest.fixture(autouse=True)
def _disabled() -> Iterator[None]:
    adapter.disable()
    yield
    adapter.disable()


@cache
def model(name: str) -> Any:
    if name in ODD:
        return ODD[name]()[0]
    config = OWN[name]() if name in OWN else hf_tiny.tiny(CONFIG_MAPPING[name])
    return hf_tiny.build(getattr(hf, model_sweep.architectures()[name]), config)


def tokens(*lengths: int, right: bool = False) -> dict[str, Any]:
    """Padded on the left unless said."""
    most, lens = max(lengths), torch.tensor(lengths)[:, None]
    ids = torch.randint(4, hf_tiny.VOCABULARY - 28, (len(lengths), most), generator=torch.Generator().manual_seed(3))
    mask = torch.arange(most) < lens if right else torch.arange(most) >= most - lens
    return {"input_ids": ids * mask, "attention_mask": mask.long()}


def close(ours: Any, theirs: Any) -> None:
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    error = (ours - theirs).double().norm() / theirs.double().norm()
    assert error < 2e-5, error


def both(run: Callable[[], Any], called: set[str]) -> tuple[Any, Any]:
    """The result with our functions, and the models' own. called: which of ours have to run."""
    with torch.no_grad():
        adapter.disable()
        with profiling.profile() as profile:
            theirs = run()
        assert not {kind.name for kind in profile.totals} & BOTH
        adapter.enable()
        with profiling.profile() as profile:
            ours = run()
        assert {kind.name for kind in profile.totals} & BOTH == called
    return ours, theirs


@pytest.mark.parametrize("padded", ["", "left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_prompts(name: str, padded: str) -> None:
    """Of more than a chunk."""
    made, inputs = model(name), tokens(*((150, 70, 5) if padded else (130, 130)), right=padded == "right")
    ours, theirs = both(lambda: made(**inputs).logits, MODELS[name])
    mask = inputs["attention_mask"].bool()
    close(ours[mask], theirs[mask])


@pytest.mark.parametrize("name", MODELS)
def test_generation(name: str) -> None:
    made, inputs = model(name), tokens(19, 5, 13)
    run: Any = lambda: made.generate(**inputs, **GREEDY, output_logits=True, return_dict_in_generate=True)  # noqa: E731
    ours, theirs = both(run, MODELS[name])
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    close(torch.stack(ours.logits), torch.stack(theirs.logits))


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("mamba", "jamba")])
def test_prompt_in_parts(name: str) -> None:
    """States of a cache after each part, which a copy of it keeps while the other goes on."""
    made, inputs = model(name), tokens(90, 90)["input_ids"]

    def run() -> list[Any]:
        held = lightning().MiniMaxCache() if name == "minimax" else hf.DynamicCache(config=made.config)
        found = [made(inputs[:, a:b], **{CACHE: held}).logits for a, b in ((0, 70), (70, 71), (71, 90))]
        other = copy.deepcopy(held)
        for x in (held, other):
            found += [made(inputs[:, :1], **{CACHE: x}).logits for _ in range(2)]
        assert found[3].equal(found[5]) and found[4].equal(found[6])
        return found

    for ours, theirs in zip(*both(run, MODELS[name]), strict=True):
        close(ours, theirs)


def lightning() -> Any:
    return sys.modules[type(model("minimax")).__module__]


def test_lightning_attention_keeps_states_in_float32() -> None:
    """With them 200 tokens of bfloat16, one by one, end nearer to float64 than those of the model's own forward."""
    layer = copy.deepcopy(model("minimax").model.layers[2].self_attn).bfloat16()
    inputs = torch.randn(2, 200, layer.qkv_proj.in_features, generator=torch.Generator().manual_seed(5)).bfloat16()
    exact = copy.deepcopy(layer).double()

    def run(layer: Any, x: Any) -> Any:
        held = lightning().MiniMaxCache()
        for i in range(x.shape[1]):
            layer(x[:, i : i + 1], position_embeddings=None, attention_mask=None, **{CACHE: held})
        return held.get_linear_cache(2)

    with torch.no_grad():
        want = run(exact, inputs.double())
        ours, theirs = both(lambda: run(layer, inputs), LIGHTNING)
    assert (ours.dtype, theirs.dtype) == (torch.float32, torch.bfloat16)
    ours, theirs = ((x.double() - want).norm() / want.norm() for x in (ours, theirs))
    assert ours < 4e-3 and ours < theirs / 2, (ours, theirs)


def test_lightning_attention_with_gradients_goes_on_from_our_states() -> None:
    made, ids = copy.deepcopy(model("minimax")).bfloat16(), tokens(41)["input_ids"]

    def run() -> Any:
        held = lightning().MiniMaxCache()
        made(ids[:, :40], **{CACHE: held})
        with torch.enable_grad():
            logits = made(ids[:, 40:], **{CACHE: held}).logits
        assert logits.requires_grad
        return logits.detach()

    ours, theirs = both(run, LIGHTNING)
    assert (ours - theirs).norm() < 0.05 * theirs.norm()


@pytest.mark.parametrize("name", ["qwen3_next", "olmo_hybrid", "kimi_linear", "bamba", "lfm2"])
@pytest.mark.parametrize("told", ["cu_seq_lens_q", "seq_idx", "both"])
def test_packed_sequences(name: str, told: str) -> None:
    """They do not see one another, as by ``seq_idx``, if only attention is told where they start."""
    made, lengths = model(name), (40, 2, 90)
    ids, lens = tokens(sum(lengths))["input_ids"], torch.tensor(lengths)
    starts = torch.nn.functional.pad(lens.cumsum(0), (1, 0)).int()
    of_attention = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 90, "max_length_k": 90}
    inputs: dict[str, Any] = {"position_ids": torch.cat([torch.arange(n) for n in lengths])[None], "use_cache": False}
    inputs |= of_attention if told != "seq_idx" else {}
    inputs |= (
        {"seq_idx": torch.arange(3, dtype=torch.int32).repeat_interleave(lens)[None]} if told != "cu_seq_lens_q" else {}
    )
    with torch.no_grad():
        theirs = torch.cat([made(x).logits for x in ids.split(lengths, 1)], 1)
        adapter.enable()
        close(made(ids, **inputs).logits, theirs)


def test_packed_sequences_that_are_none() -> None:
    made, ids = model("qwen3_next"), tokens(9, 9)["input_ids"]
    adapter.enable()
    with torch.no_grad():
        for x, starts, words in (
            (ids, [0, 4, 9], "the batch size is 2, expected 1 of packed sequences"),
            (ids[:1], [0, 4, 10], "10, expected at most 9 tokens"),
            (ids[:1], [0, 4, 3, 9], "3, expected at least 4"),
        ):
            with pytest.raises(ValueError, match=rf"^cu_seq_lens_q(\[\d\])?: {words}$"):
                made(x, cu_seq_lens_q=torch.tensor(starts), use_cache=False)


def test_everything_is_given_back() -> None:
    made, inputs = model("qwen3_next"), tokens(40)
    module = sys.modules[type(made).__module__]
    functions = {name: x for name, x in vars(module).items() if private._cells(x)}
    assert set(functions) >= {"causal_conv1d_fn", "torch_chunk_gated_delta_rule"}

    def state() -> Any:
        return {name: {n: c.cell_contents for n, c in private._cells(x)[1].items()} for name, x in functions.items()}

    with torch.no_grad():
        before, logits = state(), made(**inputs).logits
        for change in (adapter.enable, adapter.disable, adapter.enable, adapter.disable):
            for _ in range(2):
                change()
            enabled = change is adapter.enable
            assert (state() == before) != enabled and made(**inputs).logits.equal(logits) != enabled
    assert all(vars(module)[name] is x for name, x in functions.items())


def test_the_forward_of_lightning_attention_is_given_back() -> None:
    layer_class = lightning().MiniMaxLightningAttention
    theirs = layer_class.forward
    for change in (adapter.enable, adapter.enable, adapter.disable, adapter.disable):
        change()
        assert (layer_class.forward is theirs) == (change is adapter.disable)


def test_gradients_are_the_models_own() -> None:
    """In training, and out of it without no_grad."""
    made, ids = model("qwen3_next"), tokens(30)["input_ids"]
    weight = made.model.layers[0].linear_attn.A_log

    def run() -> Any:
        made.zero_grad()
        with torch.enable_grad():
            made(ids, labels=ids).loss.backward()
        return weight.grad.clone()

    ours, theirs = both(run, NONE)
    assert ours.equal(theirs) and theirs.any()
    made.zero_grad()


@pytest.mark.parametrize(("dtype", "called"), [("bfloat16", BOTH), ("float64", NONE)])
def test_dtypes(dtype: str, called: set[str]) -> None:
    """float64 is left to the model."""
    made, inputs = copy.deepcopy(model("qwen3_5_text")).to(getattr(torch, dtype)), tokens(80)
    ours, theirs = both(lambda: made(**inputs).logits, called)
    error = (ours - theirs).double().norm() / theirs.double().norm()
    assert error < (0.05 if called else 1e-300)


def test_convolutions_that_are_too_wide() -> None:
    """Nine inputs are left to the model."""
    config = hf.Lfm2Config(**LAYERS, layer_types=["conv", "full_attention"] * 2, conv_L_cache=9)
    made, inputs = hf_tiny.build(hf.Lfm2ForCausalLM, config), tokens(30)
    ours, theirs = both(lambda: made.generate(**inputs, **GREEDY), NONE)
    assert ours.equal(theirs)


def test_models_that_are_imported_later(tmp_path: Path) -> None:
    code = """
        import sys

        import torch

        import cpu_attn.transformers as adapter
        from cpu_attn import profiling

        adapter.enable()
        assert "transformers.models.lfm2.modeling_lfm2" not in sys.modules
        from transformers import Lfm2Config, Lfm2ForCausalLM

        sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
        sizes |= {"vocab_size": 64, "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
        made = Lfm2ForCausalLM(Lfm2Config(**sizes)).eval()
        for called in (True, False):
            with torch.no_grad(), profiling.profile() as profile:
                made(torch.ones(1, 5, dtype=torch.int64))
            assert {kind.name for kind in profile.totals} == ({"causal_conv1d"} if called else set())
            adapter.disable()
        from transformers import integrations
        from transformers.integrations import hub_kernels

        decorator = hub_kernels.use_kernel_func_from_hub_with_fallback
        assert decorator is integrations.use_kernel_func_from_hub_with_fallback
        assert not hasattr(decorator, "__wrapped__")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_functions_that_are_modules() -> None:
    """What the package `kernels` makes of a function: an instance of a class whose forward calls it."""
    function = private._decorator("causal_conv1d_fn", "no_such_package")(lambda *args, **kwargs: args)

    class Func(torch.nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

    made = Func()
    private._give(made, lambda name, before: lambda *args, **kwargs: (name, before(*args), kwargs))
    assert made(1, other=2) == ("causal_conv1d_fn", (1,), {"other": 2})
    private.take_functions_back()
    assert made(1, 2) == (1, 2)
