# SPDX-License-Identifier: Apache-2.0
"""PagedCache for models of which not every layer has keys and values of its own: layers of linear attention and of
convolutions, layers that share another's keys, layers of unlike heads."""

from __future__ import annotations

import copy
import pickle
from functools import cache
from typing import Any

import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

import cpu_attn.transformers as adapter  # noqa: E402
from cpu_attn.tests.models import hf_tiny, model_sweep  # noqa: E402
from cpu_attn.tests.models.hf_models import CACHE  # noqa: E402
from cpu_attn.tests.models.hf_odd_models import ODD  # noqa: E402
from cpu_attn.transformers import PagedCache  # noqa: E402
from cpu_attn.transformers.pages import Held, HybridLayer, PagedLayer, StateLayer  # noqa: E402

pytestmark = pytest.mark.integrations
adapter.enable()
GREEDY = {"do_sample": False, "use_cache": True, "pad_token_id": 0, "eos_token_id": None}
LINEAR = ("qwen3_next", "granitemoehybrid", "lfm2", "bamba", "jamba", "nemotron_h", "olmo_hybrid")
BOTH = ("falcon_h1", "zamba2")  # states and pages in one layer
SHARED = ("gemma3n_text", "gemma4_text")


@cache
def model(name: str) -> Any:
    if name in ODD:
        return ODD[name]()[0]
    model_class = getattr(hf, model_sweep.architectures()[name])
    return hf_tiny.build(model_class, hf_tiny.tiny(CONFIG_MAPPING[name]))


def tokens(*lengths: int, seed: int = 3) -> dict[str, torch.Tensor]:
    """Padded on the left."""
    most = max(lengths)
    ids = torch.randint(4, hf_tiny.VOCABULARY - 28, (len(lengths), most), generator=torch.Generator().manual_seed(seed))
    mask = torch.arange(most) >= most - torch.tensor(lengths)[:, None]
    return {"input_ids": ids * mask, "attention_mask": mask.long()}


def generate(name: str, attention: str, cache: Any, inputs: Any, **options: Any) -> Any:
    made = model(name)
    made.set_attn_implementation(attention)
    (adapter.disable if attention == "eager" else adapter.enable)()
    with torch.no_grad():
        return made.generate(**inputs, **{CACHE: cache}, **GREEDY, **options).tolist()


def paged(name: str, **options: Any) -> PagedCache:
    return PagedCache(model(name).config, **options)


@pytest.fixture(autouse=True)
def _nothing_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Held, "gather", lambda self, value: pytest.fail("keys or values were made dense"))


@pytest.mark.parametrize("name", [*LINEAR, *BOTH, *SHARED])
def test_same_tokens(name: str) -> None:
    inputs, cache = tokens(19, 5, 13), paged(name, block_size=16)
    want = generate(name, "eager", None, inputs, max_new_tokens=12)
    assert generate(name, "cpu_attn", cache, inputs, max_new_tokens=12) == want
    assert cache.get_seq_length() == 19 + 11 and cache.nbytes
    kinds = {type(layer) for layer in cache.layers}
    assert (HybridLayer if name in BOTH else PagedLayer) in kinds
    assert len(kinds) > 1 or name == "falcon_h1"


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2", "falcon_h1", *SHARED])
def test_beams(name: str) -> None:
    inputs, options = tokens(14, 9), {"max_new_tokens": 12, "num_beams": 3, "num_return_sequences": 2}
    want = generate(name, "eager", None, inputs, **options)
    assert generate(name, "cpu_attn", paged(name, block_size=4), inputs, **options) == want


def test_heads_differ_by_layer() -> None:
    cache = paged("gemma4_text")
    generate("gemma4_text", "cpu_attn", cache, tokens(9), max_new_tokens=2)
    pages = [layer.held.pages for layer in cache.layers if isinstance(layer, PagedLayer)]
    assert [(x.num_kv_heads, x.head_size) for x in pages] == [(2, 16), (1, 32)]
    assert cache.is_dummy == [False, False, True, True]


@pytest.mark.parametrize("name", ["lfm2", *SHARED])
def test_assisted_generation_crops(name: str) -> None:
    """Convolutions can, of which transformers keeps earlier inputs meanwhile."""
    inputs, cache = {"input_ids": torch.tensor([[5, 9, 11, 5, 9, 11, 5, 9]])}, paged(name, block_size=4)
    want = generate(name, "eager", None, inputs, max_new_tokens=20)
    crops = []
    real, cache.crop = cache.crop, lambda n: (crops.append(n), real(n))
    assert generate(name, "cpu_attn", cache, inputs, max_new_tokens=20, prompt_lookup_num_tokens=3) == want
    assert any(n < 0 for n in crops)


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2", "falcon_h1"])
def test_states_that_cannot_be_cropped(name: str) -> None:
    first, cache = tokens(9, 7), paged(name, block_size=4)
    cache.crop(0)  # of nothing
    made = model(name)
    made.set_attn_implementation("cpu_attn")
    with torch.no_grad():
        made(**first, **{CACHE: cache})
        want = made(torch.tensor([[7], [8]]), **{CACHE: copy.deepcopy(cache)}).logits
        with pytest.raises(ValueError, match=r"^tokens_to_remove: -2, but layer 0 of linear attention has the state"):
            cache.crop(-2)
        assert cache.get_seq_length() == 9
        assert made(torch.tensor([[7], [8]]), **{CACHE: cache}).logits.equal(want)


@pytest.mark.parametrize("name", ["lfm2"])
def test_crops_that_there_is_nothing_for_change_nothing(name: str) -> None:
    cache = paged(name, block_size=4)
    cache.activate_past_recording()
    generate(name, "cpu_attn", cache, tokens(9), max_new_tokens=2)
    states = [layer for layer in cache.layers if isinstance(layer, StateLayer)]
    before = [layer.conv_states[0].clone() for layer in states]
    for n in (1, -11):
        with pytest.raises(ValueError, match=f"tokens_to_remove: {n} is outside -10..0"):
            cache.crop(n)
    assert all(layer.conv_states[0].equal(x) for layer, x in zip(states, before, strict=True))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1", "gemma4_text"])
def test_rows_and_copies_go_on_by_themselves(name: str, copied: Any) -> None:
    """A prompt's rows, repeated, chosen and copied, against those rows' own prompts."""
    made, first, rest = model(name), tokens(9, 9), torch.tensor([[7], [8], [9]])
    made.set_attn_implementation("cpu_attn")
    with torch.no_grad():
        cache = paged(name, block_size=4)
        made(first["input_ids"], **{CACHE: cache})
        twin = copied(cache)
        cache.batch_repeat_interleave(2)  # 0 0 1 1
        cache.batch_select_indices(torch.tensor([3, 0, 2]))
        twin.batch_select_indices(torch.tensor([1, 0]))
        twin.reorder_cache(torch.tensor([0, 1, 0]))
        want = made(torch.cat([first["input_ids"][[1, 0, 1]], rest], 1)).logits[:, -1:]
        for found in (cache, twin):
            assert torch.allclose(made(rest, **{CACHE: found}).logits, want, rtol=1e-4, atol=1e-4)


def test_kinds_that_are_refused() -> None:
    config = hf_tiny.tiny(CONFIG_MAPPING["deepseek_v4"])
    with pytest.raises(ValueError, match=r"^config: a layer of '.*', PagedCache has full_attention, .*, dummy$"):
        PagedCache(config)
