# SPDX-License-Identifier: Apache-2.0
"""Models that do not ask the attention interface, or not for all of their attention: what docs/transformers.md says of
them. Where transformers mends one of them, a test here fails, and the docs have a row less."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

import cpu_attn.transformers as adapter  # noqa: E402
from cpu_attn.tests.models import hf_tiny, model_sweep  # noqa: E402
from cpu_attn.tests.models.hf_models import CACHE  # noqa: E402
from cpu_attn.tests.models.hf_odd_models import floats, ids  # noqa: E402
from cpu_attn.transformers import PagedCache  # noqa: E402

pytestmark = pytest.mark.integrations
adapter.enable()


def tiny(name: str) -> Any:
    return hf_tiny.tiny(CONFIG_MAPPING[name])


def gpt_neo() -> Any:
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 128, "window_size": 8}
    return hf.GPTNeoConfig(**sizes, attention_types=[[["global", "local"], 1]], max_position_embeddings=64)


def sam() -> Any:
    image = {"hidden_size": 32, "image_size": 32, "patch_size": 8}
    tower = {"num_hidden_layers": 2, "num_attention_heads": 4, "output_channels": 32, "mlp_dim": 48, "window_size": 2}
    return hf.SamConfig(
        vision_config={**image, **tower, "num_pos_feats": 16, "global_attn_indexes": [1]},
        prompt_encoder_config={**image, "mask_input_channels": 4},
        mask_decoder_config={"hidden_size": 32, "mlp_dim": 32, "num_attention_heads": 4, "iou_head_hidden_dim": 32},
    )


TABLES: dict[str, Callable[[], Any]] = {
    "BarkModel": lambda: tiny("bark"),
    "Data2VecVisionModel": lambda: tiny("data2vec-vision"),
    "DeepseekOcr2ForConditionalGeneration": lambda: tiny("deepseek_ocr2"),
    "FalconForCausalLM": lambda: tiny("falcon"),
    "GPTNeoForCausalLM": gpt_neo,
    "GitForCausalLM": lambda: tiny("git"),
    "SamHQModel": lambda: tiny("sam_hq"),
    "SamModel": sam,
    "UnlimitedOcrForConditionalGeneration": lambda: tiny("unlimited_ocr"),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_its_own_knows_no_other_implementation(name: str) -> None:
    config = TABLES[name]()
    config._attn_implementation = "cpu_attn"
    with torch.device("meta"), pytest.raises(KeyError, match=r"^'cpu_attn'$"):
        getattr(hf, name)(config)


IMAGE, POINT = floats(2, 3, 32, 32), torch.tensor([[[[9.0, 9.0]]]] * 2)
LATER = {"": "cpu_attn", "sam_config": "eager"}
PARTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "GitForCausalLM": ({"": "eager", "vision_config": "cpu_attn"}, {"input_ids": ids(2, 9), "pixel_values": IMAGE}),
    "SamModel": ({"": "cpu_attn", "vision_config": "eager"}, {"pixel_values": IMAGE, "input_points": POINT}),
    "UnlimitedOcrForConditionalGeneration": (
        {"text_config": "cpu_attn", "vision_config": LATER},
        {"input_ids": ids(2, 9)},
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_the_other_parts_of_such_a_model(name: str) -> None:
    parts, given = PARTS[name]
    calls, config = [0], TABLES[name]()
    config._attn_implementation = parts
    hf.AttentionInterface.register("cpu_attn", model_sweep._counted(calls))
    try:
        model = hf_tiny.build(getattr(hf, name), config)
        with torch.no_grad():
            found = model_sweep.forward(model, given)
            reached = calls[0]
            model.set_attn_implementation("eager")
            want = model_sweep.forward(model, given)
    finally:
        adapter.enable()
    assert reached and model_sweep.difference(found, want) < model_sweep.TOLERANCE


@pytest.mark.parametrize("name", ["falcon", "bloom", "mpt"])
def test_a_paged_cache_all_the_same(name: str) -> None:
    model = hf_tiny.build(getattr(hf, model_sweep.architectures()[name]), tiny(name))
    given = {"input_ids": ids(2, 9), "attention_mask": torch.ones(2, 9, dtype=torch.long)}
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        caches = hf.DynamicCache(config=model.config), PagedCache(model.config)
        want, found = (model.generate(**given, **{CACHE: cache}, **options) for cache in caches)
    assert found.equal(want)
