# SPDX-License-Identifier: Apache-2.0
"""Models with an indexer: attention over the keys that it selects, without a mask of the others, and a PagedCache for
them, which keeps the indexer's keys, too."""

from __future__ import annotations

import copy
import pickle
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

import cpu_attn.transformers as adapter  # noqa: E402
from cpu_attn import ops  # noqa: E402
from cpu_attn.tests.models import hf_tiny, model_sweep  # noqa: E402
from cpu_attn.tests.models.hf_models import CACHE, tokens  # noqa: E402
from cpu_attn.transformers import PagedCache, latents  # noqa: E402
from cpu_attn.transformers import attention as module  # noqa: E402
from cpu_attn.transformers.indexer import IndexedLayer  # noqa: E402
from cpu_attn.transformers.masks import Mask  # noqa: E402
from cpu_attn.transformers.pages import Held  # noqa: E402

pytestmark = pytest.mark.integrations
adapter.enable()
GREEDY = {"do_sample": False, "use_cache": True, "pad_token_id": 0, "eos_token_id": None}
NAMES = ("deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4", "mistral_large4", "dots3_note_text")
MOST, NEW = 8, 10  # keys that an indexer selects (hf_tiny); new tokens
# Of Dots 3's third layer, which has a window and heads of its own.
SIZES = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 24, "qk_nope_head_dim": 16}
SIZES |= {"qk_rope_head_dim": 8, "v_head_dim": 12, "q_lora_rank": 32, "kv_lora_rank": 24}


@cache
def model(name: str) -> Any:
    config = hf_tiny.tiny(CONFIG_MAPPING[name])
    if name == "dots3_note_text":
        config = type(config)(**config.to_dict() | {"per_layer_config": {"2": SIZES}})
    return hf_tiny.build(getattr(hf, model_sweep.architectures()[name]), config)


def generate(name: str, implementation: str, cache: Any, inputs: Any, **options: Any) -> Any:
    made = model(name)
    made.set_attn_implementation(implementation)
    with torch.no_grad():
        return made.generate(**inputs, **{CACHE: cache}, **GREEDY, **options).tolist()


@cache
def wanted(name: str, *lengths: int) -> Any:
    """eager's tokens behind prompts of such lengths."""
    return generate(name, "eager", None, tokens(*lengths), max_new_tokens=NEW)


class Calls(list[Any]):
    """``selected_tokens`` of every call of attention."""

    def are_sparse(self) -> bool:
        """All of them, but those of layers with a window (Dots 3)."""
        sparse = [x for x in self if x is not None]
        return len(sparse) >= 2 / 3 * len(self) > 0 and all(int((x >= 0).sum(1).max()) == MOST for x in sparse)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    found, real = Calls(), ops.attend

    def attend(*args: Any) -> None:
        logits = args[6]
        assert logits.attn_bias is None
        found.append(logits.selected_tokens)
        real(*args)

    monkeypatch.setattr(ops, "attend", attend)
    return found


@pytest.mark.parametrize(("name", "lengths"), [("deepseek_v32", (19,)), *((name, (19, 5, 13)) for name in NAMES)])
def test_same_tokens(name: str, lengths: tuple[int, ...], calls: Calls) -> None:
    """Of 19 and more keys a query attends 8."""
    want = wanted(name, *lengths)
    assert generate(name, "cpu_attn", None, tokens(*lengths), max_new_tokens=NEW) == want
    assert calls.are_sparse()


@pytest.mark.parametrize("name", NAMES)
def test_same_tokens_in_pages(name: str, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Latents are attended as they are in decode, and only the prompt's are made dense. An indexer's keys never are,
    nor is there a mask."""
    monkeypatch.setattr(Mask, "seen", lambda _: pytest.fail("a mask was made"))
    gathered: list[Any] = []
    real = Held.gather
    monkeypatch.setattr(Held, "gather", lambda self, value: (gathered.append(value), real(self, value))[1])
    want, pages = wanted(name, 19, 5, 13), PagedCache(model(name).config, block_size=8)
    assert generate(name, "cpu_attn", pages, tokens(19, 5, 13), max_new_tokens=NEW) == want
    layers = [layer for layer in pages.layers if isinstance(layer, latents.IndexedLatentLayer)]
    assert calls.are_sparse() and layers and len(gathered) <= 2 * len(pages.layers)
    indexed = [layer for layer in layers if layer.index.held]
    assert indexed and all(layer.index.get_seq_length() == 19 + NEW - 1 for layer in indexed)
    assert pages.nbytes > sum(layer.index.nbytes for layer in indexed) > 0


def test_what_is_selected_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all keys in its place the tests above would fail."""
    want = wanted("deepseek_v32", 19, 5, 13)
    monkeypatch.setattr(module, "_chosen", lambda *_: None)
    assert generate("deepseek_v32", "cpu_attn", None, tokens(19, 5, 13), max_new_tokens=NEW) != want


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_of_each_kv_head(causal: bool, calls: Calls) -> None:
    """As MiniMax M3 selects them: heads 0 and 1 attend other blocks of 4 keys than heads 2 and 3."""
    generator = torch.Generator().manual_seed(6)
    q, k, v = (torch.randn(2, h, 18, 16, generator=generator) for h in (4, 2, 2))
    blocks = torch.rand(2, 2, 18, 5, generator=generator).argsort(-1)[..., :2]
    blocks[..., 0] = torch.arange(18) // 4  # what a token's own key is in
    blocks[:, :, ::3, 1] = -1
    seen = (torch.arange(18) // 4 == blocks[..., None]).any(-2).repeat_interleave(2, 1)
    seen &= torch.ones(18, 18, dtype=torch.bool).tril() if causal else seen
    indexer = SimpleNamespace(indexer=SimpleNamespace(block_size=4), training=False)
    got = module.attention(indexer, q, k, v, None, is_causal=causal, block_indices=blocks)[0]
    scores = q.double() @ k.double().repeat_interleave(2, 1).mT * 16**-0.5
    want = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v.double().repeat_interleave(2, 1)
    assert torch.allclose(got.double(), want.transpose(1, 2), atol=2e-6)
    assert len(calls) == 2 and all(x.shape == (36, 8) for x in calls)
    for options, words in (
        ({"block_indices": blocks[:, :1]}, r"\(2, 1, 18, 2\) of torch.int64, expected integers \[2, 2, 18, k\]"),
        ({"block_indices": blocks + 1}, r"0..5, expected -1..4"),
        ({"block_indices": blocks, "indices": blocks[:, 0]}, "they go without position_bias and indices"),
    ):
        with pytest.raises(ValueError, match=f"^block_indices: {words}$"):
            module.attention(indexer, q, k, v, None, is_causal=causal, **options)


def test_beams_and_assistance(calls: Calls) -> None:
    config, inputs = model("deepseek_v32").config, tokens(14, 9)
    options: dict[str, Any] = {"max_new_tokens": 12, "num_beams": 3}
    want = generate("deepseek_v32", "eager", None, inputs, **options)
    assert generate("deepseek_v32", "cpu_attn", PagedCache(config, block_size=4), inputs, **options) == want
    inputs = {"input_ids": torch.tensor([[5, 9, 11, 5, 9, 11, 5, 9, 11]])}
    want = generate("deepseek_v32", "eager", None, inputs, max_new_tokens=20)
    options = {"max_new_tokens": 20, "prompt_lookup_num_tokens": 3}
    assert generate("deepseek_v32", "cpu_attn", PagedCache(config, block_size=4), inputs, **options) == want
    assert calls.are_sparse()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_rows_and_copies_go_on_by_themselves(copied: Any) -> None:
    """A prompt's rows, repeated, chosen, cropped and copied, against those rows' own prompts."""
    made, first, rest = model("deepseek_v32"), tokens(17, 17)["input_ids"], torch.tensor([[7], [8], [9]])
    made.set_attn_implementation("cpu_attn")
    with torch.no_grad():
        pages = PagedCache(made.config, block_size=4)
        made(first, **{CACHE: pages})
        twin = copied(pages)
        pages.batch_repeat_interleave(2)  # 0 0 1 1
        pages.batch_select_indices(torch.tensor([3, 0, 2]))
        twin.batch_select_indices(torch.tensor([1, 0]))
        twin.reorder_cache(torch.tensor([0, 1, 0]))
        want = made(torch.cat([first[[1, 0, 1], :13], rest], 1)).logits[:, -1:]
        for found in (pages, twin):
            found.crop(-4)
            assert torch.allclose(made(rest, **{CACHE: found}).logits, want, rtol=1e-4, atol=1e-4)
        pages.reset()
        assert pages.nbytes == pages.get_seq_length() == 0
        made(first, **{CACHE: pages})
        layer = pages.layers[0]
        assert isinstance(layer, IndexedLayer) and layer.index.get_seq_length() == 17
