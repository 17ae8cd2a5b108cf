# SPDX-License-Identifier: Apache-2.0
"""generate_batch over transformers' own pages: the tokens of eager's generate, request by request."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

from transformers.generation.continuous_batching import cache_allocators  # noqa: E402

from cpu_attn import ops  # noqa: E402
from cpu_attn.tests.models import hf_models  # noqa: E402
from cpu_attn.tests.models.hf_models import WINDOW, tokens  # noqa: E402
from cpu_attn.transformers import continuous, continuous_batching  # noqa: E402
from cpu_attn.transformers.plans import Logits  # noqa: E402

pytestmark = pytest.mark.integrations
LENGTHS = (3, 7, 8, 9, 30, 17)
NEW = 12


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> Iterator[None]:
    """generate_batch collects garbage twice as it ends, half a second each over all that torch has imported."""
    gc.freeze()
    yield
    gc.unfreeze()


@cache
def prompts() -> list[list[int]]:
    made = [tokens(n, seed=n)["input_ids"][0].tolist() for n in LENGTHS]
    return [*made, made[4][:20] + made[0]]  # a prefix in common


@cache
def alone(name: str) -> list[list[int]]:
    """What generate makes of each prompt, in eager."""
    model = hf_models.model(name)
    found = []
    for prompt in prompts():
        out = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)
        found.append(out[0, len(prompt) :].tolist())
    return found


def batched(name: str, asked: list[list[int]] | None = None, **options: Any) -> list[list[int]]:
    model = hf_models.model(name)
    config = hf.ContinuousBatchingConfig(**{"page_size": 16, "num_blocks": 64, "max_batch_tokens": 128, **options})
    generation = hf.GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    with continuous_batching(model):
        found = model.generate_batch(
            asked or prompts(), generation, continuous_batching_config=config, progress_bar=False, warmup=False
        )
    assert all(x.error is None for x in found.values()), [x.error for x in found.values()]
    return [found[key].generated_tokens for key in sorted(found, key=lambda x: int(x.rsplit("_", 1)[1]))]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    plans: list[Any] = []
    real = ops.attend
    monkeypatch.setattr(ops, "attend", lambda plan, *rest, **more: (plans.append(plan), real(plan, *rest, **more))[1])

    def gather(*_: Any) -> None:
        raise AssertionError("transformers gathered keys")

    for kind in ("FullAttentionCacheAllocator", "SlidingAttentionCacheAllocator"):
        module = cache_allocators.full_attention if "Full" in kind else cache_allocators.sliding_attention
        monkeypatch.setattr(getattr(module, kind), "update", gather)
    return plans


@pytest.fixture
def ring_prompts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    real = continuous.Prompt.attend
    monkeypatch.setattr(continuous.Prompt, "attend", lambda self, *rest: (found.append(self), real(self, *rest))[1])
    return found


@pytest.mark.parametrize("name", hf_models.CONTINUOUS)
def test_tokens_of_generate(name: str, calls: list[Any]) -> None:
    assert batched(name) == alone(name)
    assert len(calls) >= NEW * 2
    assert any(plan.num_reqs == len(prompts()) for plan in calls)
    assert hf_models.model(name).config._attn_implementation == "eager"


@pytest.mark.parametrize("page_size", [4, 12])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_prompts_in_chunks(name: str, page_size: int, calls: list[Any], ring_prompts: list[Any]) -> None:
    """Chunks that are shorter and longer than the window, over pages that do not divide it."""
    for most in (5, 21):
        assert batched(name, page_size=page_size, max_batch_tokens=most, num_blocks=256) == alone(name)
    reaching = [p for p in ring_prompts if p.old.seq_lens[0]]
    assert bool(reaching) == (name != "llama")
    if reaching:
        assert {int(p.old.query_start_loc[-1]) for p in reaching} >= {WINDOW - 1, 2}


def test_a_prefix_in_common_is_read_once(calls: list[Any]) -> None:
    """From 1024 keys on, where transformers has found that it is there already."""
    start = tokens(1040, seed=1)["input_ids"][0].tolist()
    asked = [start + tokens(n, seed=n)["input_ids"][0].tolist() for n in (3, 9)]
    model = hf_models.model("llama")
    want = [model.generate(torch.tensor([x]), max_new_tokens=NEW, do_sample=False)[0, len(x) :].tolist() for x in asked]
    assert batched("llama", asked, num_blocks=200, max_batch_tokens=1050) == want
    assert any(plan.num_shared for plan in calls)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_compiled_steps(name: str, calls: list[Any]) -> None:
    """Steps of few sizes, with queries that pad them."""
    torch._dynamo.reset()
    compile_config = hf.CompileConfig(backend="eager", dynamic=True, mode=None)
    assert batched(name, varlen_compile_config=compile_config) == alone(name)
    assert calls


def test_requests_that_wait_for_room(calls: list[Any]) -> None:
    assert batched("gemma3", page_size=4, num_blocks=16, max_batch_tokens=32) == alone("gemma3")


def test_no_other_forward_pass_within() -> None:
    """It would run without a mask."""
    model = hf_models.model("llama")
    with continuous_batching(model), pytest.raises(ValueError, match=r"^cache: None, cpu_flash_attn is for"):
        model.generate(**tokens(5, 3), max_new_tokens=1)


def test_block_table_is_refused() -> None:
    x = torch.zeros(1, 1, 1, 8)
    with pytest.raises(ValueError, match=r"^block_table"):
        continuous.attend(
            *(0, x, x, x, None, Logits(1.0)),
            cu_seq_lens_q=x,
            cu_seq_lens_k={},
            read_index=[],
            write_index=[],
            block_table=x,
        )
