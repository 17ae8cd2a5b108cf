# SPDX-License-Identifier: Apache-2.0
"""generate_batch of models with linear attention, whose states lie in slots of transformers' own cache: the tokens of
their own generate, request by request."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

import cpu_attn.transformers as adapter  # noqa: E402
from cpu_attn.tests.models import hf_tiny, model_sweep  # noqa: E402
from cpu_attn.tests.models.hf_models import CACHE, tokens  # noqa: E402
from cpu_attn.tests.models.hf_odd_models import ODD  # noqa: E402
from cpu_attn.transformers import continuous_batching, private, states  # noqa: E402

pytestmark = pytest.mark.integrations
LENGTHS = (3, 70, 8, 9, 30, 130)
NEW = 9
NEEDS_CACHE = pytest.mark.skipif(CACHE != "cache", reason="layers of transformers 5.23 get no cache of generate_batch")
MODELS = ("qwen3_next", "qwen3_5_text", "olmo_hybrid", "granitemoehybrid", "bamba", "lfm2")


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> Iterator[None]:
    """generate_batch collects garbage twice as it ends, half a second each over all that torch has imported."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _disabled() -> None:
    adapter.disable()


@cache
def model(name: str) -> Any:
    if name in ODD:
        return ODD[name]()[0]
    return hf_tiny.build(getattr(hf, model_sweep.architectures()[name]), hf_tiny.tiny(CONFIG_MAPPING[name]))


@cache
def prompts() -> list[list[int]]:
    made = [tokens(n, seed=n)["input_ids"][0].tolist() for n in LENGTHS]
    return [*made, made[4][:20] + made[0]]


@cache
def alone(name: str) -> list[list[int]]:
    """What generate makes of each prompt, by the model's own functions."""
    found = []
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for prompt in prompts():
        out = model(name).generate(torch.tensor([prompt]), **options)
        found.append(out[0, len(prompt) :].tolist())
    return found


def batched(name: str, **options: Any) -> list[list[int]]:
    config = hf.ContinuousBatchingConfig(**{"page_size": 16, "num_blocks": 256, "max_batch_tokens": 300, **options})
    generation = hf.GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    with continuous_batching(model(name)):
        found = model(name).generate_batch(
            prompts(), generation, continuous_batching_config=config, progress_bar=False, warmup=False
        )
    assert all(x.error is None for x in found.values()), [x.error for x in found.values()]
    assert len(found) == len(prompts())
    return [found[key].generated_tokens for key in sorted(found, key=lambda x: int(x.rsplit("_", 1)[1]))]


@NEEDS_CACHE
@pytest.mark.parametrize("name", MODELS)
def test_tokens_of_generate(name: str) -> None:
    assert batched(name) == alone(name)
    assert not private.has_given() and not states._kept


@NEEDS_CACHE
@pytest.mark.parametrize("name", MODELS)
def test_prompts_in_chunks(name: str) -> None:
    """Of steps that begin and end anywhere in a prompt."""
    assert batched(name, max_batch_tokens=21) == alone(name)


@NEEDS_CACHE
@pytest.mark.parametrize("name", ["qwen3_next", "bamba", "lfm2"])
def test_compiled_steps(name: str) -> None:
    """Steps of few sizes, with tokens that pad them."""
    torch._dynamo.reset()
    compile_config = hf.CompileConfig(backend="eager", dynamic=True, mode=None)
    assert batched(name, varlen_compile_config=compile_config) == alone(name)


@NEEDS_CACHE
@pytest.mark.parametrize(("name", "num_blocks"), [("qwen3_next", 14), ("lfm2", 10)])
def test_requests_that_wait_for_room(name: str, num_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So few blocks that requests begin anew, from zeros, in slots that others had."""
    taken: list[int] = []
    real = states.Allocator.allocate_cache_to_request

    def allocate(self: Any, request_id: str, *lengths: int) -> None:
        known = request_id in self.block_table
        real(self, request_id, *lengths)
        if not known:
            taken.extend(self.block_table[request_id])

    monkeypatch.setattr(states.Allocator, "allocate_cache_to_request", allocate)
    assert batched(name, num_blocks=num_blocks, max_batch_tokens=40) == alone(name)
    assert len(taken) > len(set(taken))


@NEEDS_CACHE
def test_sequences_that_go_on_from_one_prompt() -> None:
    """Their states are copied with their pages: each goes on as the one that it comes from."""
    config = hf.ContinuousBatchingConfig(page_size=16, num_blocks=256, max_batch_tokens=300)
    options = {"max_new_tokens": NEW, "do_sample": True, "top_k": 1, "eos_token_id": -1, "pad_token_id": 0}
    made = model("qwen3_next")
    with continuous_batching(made):
        found = made.generate_batch(
            prompts()[:2],
            hf.GenerationConfig(**options, num_return_sequences=3),
            continuous_batching_config=config,
            progress_bar=False,
            warmup=False,
        )
    assert all(x.error is None for x in found.values()) and len(found) == 6
    want = [x for x in alone("qwen3_next")[:2] for _ in range(3)]
    assert sorted(x.generated_tokens for x in found.values()) == sorted(want)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("falcon_h1", "model: layer 0 is of 'hybrid', generate_batch takes full_attention, "),
        ("jamba", "model: its layers, such as 0, have states that no function of cpu_attn changes"),
        ("minimax", "model: layer [01] keeps no state in its cache"),
    ],
)
def test_models_that_are_refused(name: str, message: str) -> None:
    """Before anything is generated; the model is as it was then."""
    before = model(name).config._attn_implementation
    with pytest.raises(ValueError, match="^" + message), continuous_batching(model(name)):
        pytest.fail("it should not come here")
    assert model(name).config._attn_implementation == before and not private.has_given() and not states._kept


def test_layers_that_get_no_cache_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of transformers 5.23, or of a model that has another name for it."""
    made = model("lfm2")
    if CACHE == "cache":
        theirs = made.forward
        monkeypatch.setattr(made, "forward", lambda input_ids, use_cache=None: theirs(input_ids, use_cache=use_cache))
    with pytest.raises(ValueError, match=r"^model: its layers get no cache of"), continuous_batching(made):
        pytest.fail("it should not come here")
    assert not private.has_given() and not states._kept


@NEEDS_CACHE
def test_states_outside_this_context_are_refused() -> None:
    """By what makes the cache of generate_batch, in place of transformers' `Invalid layer type`."""
    config = model("qwen3_next").config
    with continuous_batching(model("qwen3_next")):
        pass
    made = private.paged_cache.ATTN_TYPE_TO_ALLOCATOR["linear_attention"]
    with pytest.raises(ValueError, match=r"^config: layers of 'linear_attention' outside cpu_attn"):
        made(0, config, 2, torch.float32, 16, [0], False)
