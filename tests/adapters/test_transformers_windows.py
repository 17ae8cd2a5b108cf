# SPDX-License-Identifier: Apache-2.0
"""Layers of a PagedCache with a window keep the pages that it needs, and no more."""

from __future__ import annotations

import copy
import gc
import weakref
from functools import cache
from typing import Any

import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

import cpu_attn.transformers as adapter  # noqa: E402
from cpu_attn.tests.models import hf_models  # noqa: E402
from cpu_attn.tests.models.hf_models import CACHE, WINDOW, tokens  # noqa: E402
from cpu_attn.transformers import PagedCache  # noqa: E402
from cpu_attn.transformers.pages import PagedLayer  # noqa: E402

pytestmark = pytest.mark.integrations
adapter.enable()
NEW = 20
GREEDY = {"do_sample": False, "use_cache": True, "max_new_tokens": NEW}
NAMES = ("mistral", "gemma2", "gemma3", "gpt_oss", "llama4")
BLOCK = 4
COLUMNS = -(-(WINDOW + BLOCK - 2) // BLOCK) + 1  # blocks of a row that a step of one token may need


def generate(name: str, implementation: str, cache: Any, inputs: Any, **options: Any) -> Any:
    made = hf_models.model(name)
    made.set_attn_implementation(implementation)
    try:
        with torch.no_grad():
            return made.generate(**inputs, **{CACHE: cache}, **{**GREEDY, **options}).tolist()
    finally:
        made.set_attn_implementation("eager")


@cache
def wanted(name: str) -> Any:
    """eager's tokens."""
    return generate(name, "eager", None, tokens(37, 5, 13))


def paged(name: str, **options: Any) -> PagedCache:
    return PagedCache(hf_models.model(name).config, block_size=BLOCK, **options)


def windows(cache: PagedCache) -> list[PagedLayer]:
    return [layer for layer in cache.layers if layer.is_sliding]


@pytest.mark.parametrize("implementation", ["cpu_attn", "eager"])
@pytest.mark.parametrize("name", NAMES)
def test_same_tokens_far_past_the_window(name: str, implementation: str) -> None:
    cache, want = paged(name), wanted(name)
    assert generate(name, implementation, cache, tokens(37, 5, 13)) == want
    assert windows(cache)
    for layer in cache.layers:
        assert layer.get_seq_length() == 37 + NEW - 1
        if layer.is_sliding:
            assert layer.held.table.shape[1] <= COLUMNS and layer.held.pages.num_blocks <= 2 * 3 * COLUMNS
        else:
            assert layer.held.table.shape[1] == -(-(37 + NEW - 1) // BLOCK)


@pytest.mark.parametrize("name", ["mistral", "gemma3", "llama4"])
def test_prompts_in_parts_and_rows(name: str) -> None:
    """Logits of every part, and what rows that are repeated, chosen and copied go on with."""
    made, ids = hf_models.model(name), tokens(60, 60)["input_ids"]
    with torch.no_grad():
        want = made(ids, use_cache=False).logits
        made.set_attn_implementation("cpu_attn")
        try:
            cache, found = paged(name), []
            for start, end in ((0, 3), (3, 30), (30, 31), (31, 32), (32, 41), (41, 42)):
                found.append(made(ids[:, start:end], **{CACHE: cache}).logits)
            assert torch.allclose(torch.cat(found, 1), want[:, :42], rtol=1e-4, atol=1e-4)
            twin = copy.deepcopy(cache)
            cache.batch_repeat_interleave(2)  # 0 0 1 1
            cache.batch_select_indices(torch.tensor([3, 0, 2]))
            twin.reorder_cache(torch.tensor([1, 0, 1]))
            rows = torch.tensor([1, 0, 1])
            for start, end in ((42, 43), (43, 60)):
                for c in (cache, twin):
                    got = made(ids[rows, start:end], **{CACHE: c}).logits
                    assert torch.allclose(got, want[rows, start:end], rtol=1e-4, atol=1e-4)
        finally:
            made.set_attn_implementation("eager")


def test_beams() -> None:
    inputs, options = tokens(21, 9), {"num_beams": 3, "num_return_sequences": 2}
    want = generate("gemma3", "eager", None, inputs, **options)
    assert generate("gemma3", "cpu_attn", paged("gemma3"), inputs, **options) == want


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_assisted_generation_far_past_the_window(name: str) -> None:
    inputs, cache = {"input_ids": torch.tensor([[5, 9, 11] * 7])}, paged(name)
    want = generate(name, "eager", None, inputs)
    crops = []
    real, cache.crop = cache.crop, lambda n: (crops.append(n), real(n))
    assert generate(name, "cpu_attn", cache, inputs, prompt_lookup_num_tokens=3) == want
    assert any(n < 0 for n in crops)
    assert all(layer.held.length < 2 * WINDOW + BLOCK for layer in windows(cache))


def states(length: int, seed: int = 4) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(3, 2, length, size, generator=generator) for size in (32, 64)]


@pytest.mark.parametrize("kind", ["auto", "int8", "fp8_e4m3", "int8/int4"])
def test_what_is_kept_is_what_was_written(kind: str) -> None:
    """Against a layer that keeps everything, whatever the pages hold, prompt, steps and a chunk."""
    key, value = states(90)
    whole, layer = PagedLayer(BLOCK, kv_cache_dtype=kind), PagedLayer(BLOCK, WINDOW, kv_cache_dtype=kind)
    at = 0
    for count in (50, 1, 1, 1, 1, 1, 17, 1, 0, 1):
        length, start = layer.get_mask_sizes(count)
        assert start == max(0, at - WINDOW + 1) // BLOCK * BLOCK and start + length == at + count
        part = slice(at, at + count)
        at += count
        for got, want in zip(*(x.update(key[:, :, part], value[:, :, part]) for x in (layer, whole)), strict=True):
            assert got.shape[2] == length and got.clone().equal(want[:, :, start:])
        assert layer.keys.clone().equal(whole.keys[:, :, layer.held.start :])


def test_the_memory_of_a_long_prompt_goes_with_its_keys() -> None:
    """Without the garbage collector, and before the next step; what is left is no more than the next steps need."""
    layer = PagedLayer(BLOCK, WINDOW, kv_cache_dtype="auto")
    gc.disable()
    try:
        keys, values = layer.update(*states(1000))
        memory = weakref.ref(keys.held.pages.key_cache)
        assert layer.held.pages.num_blocks == 3 * COLUMNS and memory().shape[0] == 3 * 250
        del keys, values
        assert memory() is None
    finally:
        gc.enable()
    for _ in range(50):
        layer.update(*states(1))
        assert layer.held.pages.num_blocks == 3 * COLUMNS


def test_crops_behind_the_window() -> None:
    """What is gone cannot come back, and nothing changes; what was recorded can."""
    cache = paged("gemma3")
    window, full = cache.layers
    cache.layers.reverse()  # the one that could be cropped comes first
    for layer in cache.layers:
        layer.update(*states(8))
    cache.crop(-1)  # the window begins with the first token
    for layer in cache.layers:
        for x in (20, 1):
            layer.update(*states(x))
    assert cache.get_seq_length() == 28
    words = r"^tokens_to_remove: -9, but the window of 8 would then begin at token 12, and those before 20 are gone"
    with pytest.raises(ValueError, match=words):
        cache.crop(-9)
    assert window.get_seq_length() == full.get_seq_length() == 28
    cache.activate_past_recording()
    more = states(11, seed=5)
    for layer in cache.layers:
        layer.update(*more)
    before = full.keys.clone()
    cache.crop(-9)
    assert window.get_seq_length() == full.get_seq_length() == 30 and window.held.start == 20
    assert window.keys.clone().equal(full.keys[:, :, 20:]) and full.keys.clone().equal(before[:, :, :30])
    for layer in cache.layers:
        layer.update(*states(200))
    assert window.held.pages.num_blocks > 150 and window.held.start == 20
    cache.crop(-9)
    assert window.held.pages.num_blocks == 3 * COLUMNS and window.held.start == 212
    assert window.keys.clone().equal(full.keys[:, :, 212:])
