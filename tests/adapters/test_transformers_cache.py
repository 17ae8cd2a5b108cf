# SPDX-License-Identifier: Apache-2.0
"""PagedCache under plain generate(), and its quantised kinds against float64 attention over what they hold."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

import cpu_attn  # noqa: E402
import cpu_attn.transformers as adapter  # noqa: E402
from cpu_attn.tests.models import hf_models  # noqa: E402
from cpu_attn.tests.models.hf_models import CACHE, DECODERS, tokens  # noqa: E402
from cpu_attn.transformers import PagedCache  # noqa: E402
from cpu_attn.transformers.attention import attention  # noqa: E402
from cpu_attn.transformers.masks import mask_function  # noqa: E402
from cpu_attn.transformers.pages import Held, PagedLayer, Pages  # noqa: E402

pytestmark = pytest.mark.integrations
adapter.enable()
GREEDY = {"do_sample": False, "use_cache": True}


@contextmanager
def implementation(name: str, attention: str) -> Iterator[Any]:
    model = hf_models.model(name)
    model.set_attn_implementation(attention)
    try:
        with torch.no_grad():
            yield model
    finally:
        model.set_attn_implementation("eager")


def generate(name: str, attention: str, cache: Any, inputs: Any, **options: Any) -> Any:
    with implementation(name, attention) as model:
        return model.generate(**inputs, **{CACHE: cache}, **GREEDY, **options)


def paged(name: str, **options: Any) -> PagedCache:
    return PagedCache(hf_models.model(name).config, **options)


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """How often keys or values were made dense."""
    found: list[Any] = []
    real = Held.gather
    monkeypatch.setattr(Held, "gather", lambda self, value: (found.append(value), real(self, value))[1])
    return found


@pytest.mark.parametrize("name", DECODERS)
def test_same_tokens_and_no_gather(name: str, gathers: list[Any]) -> None:
    inputs, options = tokens(19, 5, 13), {"max_new_tokens": 16}
    want = generate(name, "eager", None, inputs, **options)
    cache = paged(name, block_size=16)
    assert generate(name, "cpu_attn", cache, inputs, **options).tolist() == want.tolist()
    assert cache.get_seq_length() == 19 + 15
    # What DeepSeek caches is latent, and expanded for the prompt, where that takes fewer multiplications.
    assert len(gathers) == (2 * 2 if name == "deepseek_v3" else 0)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_other_implementations_get_dense_keys(attention: str, gathers: list[Any]) -> None:
    inputs = tokens(9, 4)
    want = generate("llama", "eager", None, inputs, max_new_tokens=6)
    assert generate("llama", attention, paged("llama"), inputs, max_new_tokens=6).tolist() == want.tolist()
    assert len(gathers) == 6 * 2 * 2


def test_a_model_with_attention_of_its_own(gathers: list[Any]) -> None:
    """It makes one axis of batch and heads by a view, as keys that were concatenated allow it."""
    torch.manual_seed(7)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": hf_models.VOCABULARY}
    config = hf.GPTNeoXJapaneseConfig(**sizes, initializer_range=0.3, pad_token_id=0, eos_token_id=None)
    model = hf.GPTNeoXJapaneseForCausalLM(config).eval()
    inputs = tokens(9, 4)
    for kind in ("auto", "float32/auto"):
        gathers.clear()
        found = [
            model.generate(**inputs, **{CACHE: cache}, max_new_tokens=6, **GREEDY)
            for cache in (PagedCache(config, kv_cache_dtype=kind), hf.DynamicCache())
        ]
        assert found[0].equal(found[1]) and len(gathers) == 6 * 2 * 2


@pytest.mark.parametrize("name", ["bart", "whisper"])
def test_decoder_of_an_encoder_decoder(name: str, gathers: list[Any]) -> None:
    inputs = tokens(15, 6, side="right")
    if name == "whisper":
        inputs = {"input_features": torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(5))}
    options = {"max_new_tokens": 20, "min_new_tokens": 20}
    want = generate(name, "eager", None, inputs, **options)
    cache = hf.EncoderDecoderCache(paged(name, block_size=8), paged(name, block_size=8))
    assert generate(name, "cpu_attn", cache, inputs, **options).tolist() == want.tolist()
    assert not gathers


def test_mask_that_is_no_plan(gathers: list[Any]) -> None:
    inputs = tokens(12, 12)
    inputs["attention_mask"][1, 3:5] = 0
    want = generate("llama", "eager", None, inputs, max_new_tokens=4)
    assert generate("llama", "cpu_attn", paged("llama"), inputs, max_new_tokens=4).tolist() == want.tolist()
    assert not gathers


def test_inference_mode() -> None:
    inputs = tokens(12, 7)
    want = generate("gemma3", "eager", None, inputs, max_new_tokens=4)
    with torch.inference_mode():
        assert generate("gemma3", "cpu_attn", paged("gemma3"), inputs, max_new_tokens=4).tolist() == want.tolist()


@pytest.mark.parametrize("length", [14, 16, 17])
def test_beams_share_blocks_until_they_write(length: int, gathers: list[Any]) -> None:
    inputs, options = tokens(length, 9), {"max_new_tokens": 20, "num_beams": 3, "num_return_sequences": 2}
    want = generate("llama", "eager", None, inputs, **options)
    assert generate("llama", "cpu_attn", paged("llama", block_size=16), inputs, **options).tolist() == want.tolist()
    assert not gathers


def test_assisted_generation_crops() -> None:
    inputs = {"input_ids": torch.tensor([[5, 9, 11, 5, 9, 11, 5, 9]]), "attention_mask": torch.ones(1, 8).long()}
    want = generate("llama", "eager", None, inputs, max_new_tokens=20)
    cache = paged("llama", block_size=4)
    crops = []
    real, cache.crop = cache.crop, lambda n: (crops.append(n), real(n))
    got = generate("llama", "cpu_attn", cache, inputs, max_new_tokens=20, prompt_lookup_num_tokens=3)
    assert got.tolist() == want.tolist()
    assert any(n < 0 for n in crops)


def test_a_conversation_goes_on_in_the_same_cache() -> None:
    first, cache = tokens(11), paged("mistral", block_size=8)
    said = generate("mistral", "cpu_attn", cache, first, max_new_tokens=5)
    more = torch.cat([said, tokens(7, seed=9)["input_ids"]], 1)
    second = {"input_ids": more, "attention_mask": torch.ones_like(more)}
    want = generate("mistral", "eager", None, second, max_new_tokens=8)
    assert generate("mistral", "cpu_attn", cache, second, max_new_tokens=8).tolist() == want.tolist()
    cache.reset()
    assert cache.get_seq_length() == cache.nbytes == 0
    assert generate("mistral", "cpu_attn", cache, first, max_new_tokens=5).tolist() == said.tolist()


@pytest.mark.filterwarnings("error:Dynamo does not know how to trace")
@pytest.mark.parametrize("attention", ["cpu_attn", "sdpa"])
def test_compiled_model(attention: str) -> None:
    """Dynamo traces the model, and nothing of what its tensors do between graphs."""
    torch._dynamo.reset()
    nodes: list[Any] = []
    ids = tokens(10)["input_ids"]
    with implementation("llama", attention) as model:
        compiled = torch.compile(model, backend=lambda graph, _: (nodes.extend(graph.graph.nodes), graph.forward)[1])
        cache, parts = paged("llama", block_size=8), (slice(0, 6), slice(6, 7), slice(7, 8), slice(8, 10))
        logits = [compiled(ids[:, part], **{CACHE: cache}).logits for part in parts]
        assert torch.allclose(torch.cat(logits, 1), model(ids, use_cache=False).logits, rtol=1e-4, atol=1e-4)
    traces = [node.stack_trace or "" for node in nodes]
    assert any("modeling_llama.py" in trace for trace in traces)
    assert not any("lazy.py" in trace for trace in traces)


@pytest.mark.parametrize("attention", ["cpu_attn", "sdpa"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_copies_of_a_prompts_cache_go_on_by_themselves(copied: Any, attention: str) -> None:
    """In turns, each with tokens of its own."""
    prompt, *rests = (tokens(n, n, seed=n)["input_ids"] for n in (11, 7, 8, 9))
    with implementation("llama", attention) as model:
        cache = paged("llama", block_size=8)
        model(prompt, **{CACHE: cache})
        caches = [copied(cache), cache, copied(cache)]
        for part in (slice(0, 1), slice(1, None)):
            logits = [model(x[:, part], **{CACHE: c}).logits for x, c in zip(rests, caches, strict=True)]
    with implementation("llama", "eager") as model:
        for rest, got in zip(rests, logits, strict=True):
            want = model(torch.cat([prompt, rest], 1), use_cache=False).logits[:, 12:]
            assert torch.allclose(got, want, rtol=1e-4, atol=1e-4)


def filled(layer: PagedLayer, batch: int = 3, length: int = 21) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(4)
    states = [torch.randn(batch, 2, length, size, generator=generator) for size in (32, 64)]
    for start, end in ((0, 13), (13, 14), (14, length)):
        layer.update(*(x[:, :, start:end] for x in states))
    return states[0], states[1]


def test_rows_of_the_batch_and_their_blocks() -> None:
    """Against the same operations on dense tensors."""
    layer = PagedLayer(8, kv_cache_dtype="auto")
    key, value = filled(layer)
    dense = hf.cache_utils.DynamicLayer()
    dense.update(key, value)
    for step in (
        lambda x: x.batch_repeat_interleave(2),
        lambda x: x.reorder_cache(torch.tensor([5, 0, 0, 3, 2, 0])),
        lambda x: x.crop(-3),
        lambda x: x.update(*(y[:1].repeat(6, 1, 1, 1) * torch.arange(6)[:, None, None, None] for y in (key, value))),
        lambda x: x.batch_select_indices(torch.tensor([4, 1])),
        lambda x: x.crop(-30),
        lambda x: x.update(*(y[1:3] for y in (key, value))),
    ):
        step(layer), step(dense)
        assert layer.get_seq_length() == dense.get_seq_length()
        assert layer.keys.clone().equal(dense.keys) and layer.values.clone().equal(dense.values)
        assert layer.keys.shape == dense.keys.shape and layer.values.shape == dense.values.shape
    repeated = PagedLayer(8, kv_cache_dtype="auto")
    filled(repeated)
    before = repeated.nbytes
    repeated.batch_repeat_interleave(5)
    assert repeated.nbytes == before


@pytest.mark.parametrize("indices", [[2, 0], (1,), torch.tensor([True, False, True]), torch.tensor([-1])])
def test_rows_are_chosen_as_from_a_tensor(indices: Any) -> None:
    layer = PagedLayer(8, kv_cache_dtype="auto")
    key, value = filled(layer)
    layer.batch_select_indices(indices)
    assert layer.held.gather(False).equal(key[indices, ...]) and layer.held.gather(True).equal(value[indices, ...])


def test_an_unused_cache_has_no_rows_to_choose() -> None:
    """Nothing happens, as with transformers' own."""
    fresh, used = (paged("llama") for _ in range(2))
    fresh.reorder_cache(torch.tensor([0, 1]))
    fresh.batch_select_indices([0, 1])
    fresh.batch_repeat_interleave(2)
    inputs = tokens(5, 3)
    got = [generate("llama", "cpu_attn", cache, inputs, max_new_tokens=2).tolist() for cache in (fresh, used)]
    assert got[0] == got[1]


# Half a step of the largest magnitude that shares a scale, which is rounded up to bfloat16; e4m3 has 3 bits. Where the
# scale that loses least is the largest magnitude over 8.5, int4 clips the other side at 7 of its steps.
LARGEST = {"int8": 1.01 / 254, "int4": 1.01 * 1.5 / 8.5, "fp8_e4m3": 2**-4}


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("kind", [*LARGEST, "int8/int4"])
def test_quantised_pages(kind: str, scale: float) -> None:
    """They hold what was written, as near as they can, and attention is that over what they hold."""
    options = {"k_scale": scale, "v_scale": 2 * scale} if kind.startswith("fp8") else {}
    layer = PagedLayer(8, kv_cache_dtype=kind, **options)
    key, value = filled(layer)
    stored = layer.held.gather(False), layer.held.gather(True)
    kinds = kind.split("/") * 2
    for held, given, one in zip(stored, (key, value), kinds[:2], strict=True):
        bound = LARGEST[one] * given.abs().amax(-1, keepdim=True) + 2**-8 * scale
        error = (held - given).abs()
        assert (error <= bound).all()
        assert one != "int4" or error.square().mean() ** 0.5 < 1 / 14 / 3**0.5 * given.abs().amax()
        assert not held.equal(given)
    assert layer.nbytes < 0.6 * 3 * 24 * 2 * (32 + 64) * 4

    query = torch.randn(3, 4, 5, 32, generator=torch.Generator().manual_seed(6))
    attention_mask = torch.arange(21) >= torch.tensor([[0], [3], [18]])
    mask = mask_function(batch_size=3, q_length=5, kv_length=21, q_offset=16, attention_mask=attention_mask)
    got = attention(SimpleNamespace(training=False), query, layer.keys, layer.values, mask)[0]
    k, v = (x.double().repeat_interleave(2, 1) for x in stored)
    scores = (query.double() @ k.mT * 32**-0.5).masked_fill(~mask.dense(), -torch.inf)
    want = (scores.softmax(-1).nan_to_num(0.0) @ v).transpose(1, 2)
    want *= attention_mask[:, 16:, None, None]
    assert torch.allclose(got.double(), want, atol=5e-6)


@pytest.mark.parametrize("kind", LARGEST)
def test_quantised_generation_stays_near(kind: str) -> None:
    """Logits of a prompt in two parts, so that the second reads what the cache holds of the first."""
    ids, mask = tokens(24, 15).values()
    logits = []
    with implementation("llama", "cpu_attn") as model:
        for cache in (paged("llama"), paged("llama", kv_cache_dtype=kind)):
            model(ids[:, :20], attention_mask=mask[:, :20], **{CACHE: cache})
            logits.append(model(ids[:, 20:], attention_mask=mask, **{CACHE: cache}).logits)
    error = (logits[0] - logits[1]).square().mean().sqrt() / logits[0].square().mean().sqrt()
    assert 0 < error < {"int8": 0.03, "int4": 0.5, "fp8_e4m3": 0.15}[kind]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "error"), [("auto", 2e-6), ("int8", 0.01), ("fp8_e4m3", 0.04), ("int8/int4", 0.15)])
def test_dense_keys_of_rotated_pages(kind: str, error: float, dtype: Any) -> None:
    """They are turned back, whatever holds them, and near what came (relative RMS)."""
    key, value = (torch.randn(2, 3, 21, size, generator=torch.manual_seed(size)).to(dtype) for size in (64, 40))
    layer = PagedLayer(16, kv_cache_dtype=kind, k_scale=1.0, v_scale=1.0, kv_cache_rotation="hadamard")
    rounded = 4e-3 if dtype == torch.bfloat16 else 0.0
    for pages, states in zip(layer.update(key, value), (key, value), strict=True):
        got, want = pages.dense(), states.double()
        assert got.dtype == dtype
        assert (got.double() - want).square().mean().sqrt() <= (error + rounded) * want.square().mean().sqrt()


@pytest.mark.parametrize(
    ("kind", "rotation"),
    [("auto", "none"), ("fp8_e4m3", "none"), ("int8", "hadamard"), ("int6/auto", "hadamard/none")],
)
def test_integers_are_rotated_unless_told_otherwise(kind: str, rotation: str) -> None:
    """Pages have the bytes of those that are told so."""
    key, value = torch.randn(2, 2, 2, 21, 16, generator=torch.Generator().manual_seed(6))
    unsaid, said, other = (
        paged("llama", kv_cache_dtype=kind, **how).layers[0]
        for how in ({}, {"kv_cache_rotation": rotation}, {"kv_cache_rotation": "none/hadamard"})
    )
    for layer in (unsaid, said, other):
        layer.update(key, value)
    assert unsaid.keys[:].equal(said.keys[:]) and unsaid.values[:].equal(said.values[:])
    assert unsaid.held.pages.kv_cache_rotation == rotation
    assert unsaid.keys[:].equal(other.keys[:]) == (rotation == "none")


@pytest.mark.parametrize("tracked", [False, True])
def test_its_memory_goes_with_it(tracked: bool) -> None:
    """At once, without the garbage collector; keys that somebody still has go on by themselves."""
    gc.disable()
    try:
        with torch.set_grad_enabled(tracked):
            layer = PagedLayer(8, kv_cache_dtype="auto")
            filled(layer)
            ones = torch.ones(3, 2, 1, 32, requires_grad=True), torch.ones(3, 2, 1, 64, requires_grad=True)
            keys, values = layer.update(*ones)
            memory = weakref.ref(layer.held.pages.key_cache)
            want = keys.clone()
            del layer, values
            assert keys.equal(want)
            del keys, want
            assert memory() is None
    finally:
        gc.enable()


def test_what_is_refused() -> None:
    config = hf_models.model("llama").config
    with pytest.raises(ValueError, match="kv_cache_dtype"):
        PagedCache(config, kv_cache_dtype="int3")
    for no_name in (3, None, ["int8"]):
        with pytest.raises(TypeError, match=r"^kv_cache_dtype: expected str, got"):
            PagedCache(config, kv_cache_dtype=no_name)
    with pytest.raises(ValueError, match="block_size"):
        PagedCache(config, block_size=0)
    with pytest.raises(ValueError, match="k_scale"):
        PagedCache(config, kv_cache_dtype="int8", k_scale=0.5)
    layer = PagedLayer(8, kv_cache_dtype="auto")
    key, value = filled(layer)
    with pytest.raises(IndexError, match=r"^indices: index 3 is out of bounds .* size 3"):
        layer.batch_select_indices([0, 3])
    with pytest.raises(IndexError, match=r"^beam_idx: tensors used as indices must be long"):
        layer.reorder_cache(torch.tensor([0.0]))
    with pytest.raises(ValueError, match=r"^beam_idx: 2 axes, expected 1"):
        layer.reorder_cache([[0, 1]])
    with pytest.raises(ValueError, match=r"tokens_to_remove: 1 is outside -21..0"):
        layer.crop(1)
    old = layer.keys
    layer.update(key, value)
    assert isinstance(old, Pages)
    with pytest.raises(RuntimeError, match="of an earlier step"):
        old + 1
    stale = layer.keys, layer.values
    layer.reorder_cache(torch.tensor([2, 1, 0]))  # of the same shape
    with pytest.raises(RuntimeError, match="of an earlier step"):
        attention(SimpleNamespace(training=False), torch.zeros(3, 2, 1, 32), *stale, None)


def heads(batch: int, num_kv_heads: int, tokens: int, head_size: int, **options: Any) -> Any:
    return torch.zeros(batch, num_kv_heads, tokens, head_size, **options)


NOT_WRITTEN: dict[str, tuple[Any, Any, str]] = {
    "batch": (heads(1, 2, 4, 32), heads(1, 2, 4, 64), r"^key_states: axis 0 is 1, expected batch size = 3"),
    "heads": (heads(3, 1, 4, 32), heads(3, 1, 4, 64), r"^key_states: axis 1 is 1, expected num_kv_heads = 2"),
    "size": (heads(3, 2, 4, 16), heads(3, 2, 4, 64), r"^key_states: axis 3 is 16, expected head size = 32"),
    "size of values": (heads(3, 2, 4, 32), heads(3, 2, 4, 32), r"^value_states: axis 3 is 32, expected head size = 64"),
    "tokens": (heads(3, 2, 4, 32), heads(3, 2, 5, 64), r"^value_states: axis 2 is 5, expected tokens = 4"),
    "axes": (torch.zeros(3, 4, 32), heads(3, 2, 4, 64), r"^key_states: 3 axes, expected 4"),
    "dtype": (heads(3, 2, 4, 32).double(), heads(3, 2, 4, 64), r"^key_states: dtype torch.float64, expected"),
    "dtypes": (heads(3, 2, 4, 32), heads(3, 2, 4, 64).bfloat16(), r"^value_states: dtype bfloat16, expected float32"),
    "meta": (heads(3, 2, 4, 32), heads(3, 2, 4, 64, device="meta"), r"^value_states: lies on meta"),
}


# Of an empty layer the first states decide.
@pytest.mark.parametrize(
    ("name", "used"),
    [
        *((name, True) for name in NOT_WRITTEN),
        *((name, False) for name in ("tokens", "axes", "dtype", "dtypes", "meta")),
    ],
)
def test_a_refused_update_changes_nothing(name: str, used: bool) -> None:
    key, value, words = NOT_WRITTEN[name]
    layer = PagedLayer(8, kv_cache_dtype="auto")
    want = filled(layer) if used else (None, None)
    length, nbytes, keys = layer.get_seq_length(), layer.nbytes, layer.keys
    with pytest.raises((ValueError, TypeError), match=words):
        layer.update(key, value)
    assert (layer.get_seq_length(), layer.nbytes, layer.is_initialized) == (length, nbytes, used)
    assert layer.keys is keys and (not used or (keys.equal(want[0]) and layer.values.equal(want[1])))
    ones = torch.ones(3, 2, 1, 32), torch.ones(3, 2, 1, 64)
    for found, before, one in zip(layer.update(*ones), want, ones, strict=True):
        assert found.equal(torch.cat([before, one], 2) if used else one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_isa_that_not_every_machine_has(monkeypatch: pytest.MonkeyPatch, dtype: Any) -> None:
    """Which dtype is asked for says the first step, with what the library says."""
    monkeypatch.setenv("CPU_ATTN_ISA", "amx")
    layer = paged("llama").layers[0]
    states = torch.ones(1, 2, 3, 16, dtype=dtype)
    if any(isa.name == "amx" and isa.supported for isa in cpu_attn.isas()):
        assert layer.update(states, states)[0].equal(states)
        return
    with pytest.raises(cpu_attn.UnavailableError, match=rf"'amx' is not available here: .*{str(dtype)[6:]}"):
        layer.update(states, states)
    assert not layer.is_initialized


def test_a_dtype_of_its_own_name() -> None:
    config = copy.deepcopy(hf_models.model("llama").config)
    config.dtype = torch.bfloat16
    layer = PagedCache(config, kv_cache_dtype="bfloat16/int8").layers[0]
    assert layer.update(*2 * [torch.ones(1, 2, 3, 16, dtype=torch.bfloat16)])[0].eq(1).all()
    with pytest.raises(ValueError, match=r"kv_cache_dtype: 'float32' is none of 'auto', .*, nor the dtype 'bfloat16'"):
        PagedCache(config, kv_cache_dtype="float32")


def test_no_keys() -> None:
    layer = PagedLayer(8, kv_cache_dtype="auto")
    layer.update(torch.ones(3, 2, 0, 32), torch.ones(3, 2, 0, 64))
    got = attention(SimpleNamespace(training=False), torch.ones(3, 4, 2, 32), layer.keys, layer.values, None)[0]
    assert got.equal(torch.zeros(3, 2, 4, 64))


def test_keys_that_a_model_changes_are_no_longer_pages() -> None:
    layer = PagedLayer(8, kv_cache_dtype="auto")
    key, value = filled(layer)
    query = torch.randn(3, 2, 1, 32, generator=torch.Generator().manual_seed(8))
    module = SimpleNamespace(training=False)
    want = attention(module, query, key, -value, None)[0]
    assert torch.allclose(attention(module, query, layer.keys, -layer.values, None)[0], want, atol=1e-6)


def test_keys_are_dense_to_whoever_looks() -> None:
    layer = PagedLayer(8, kv_cache_dtype="auto")
    key, _ = filled(layer)
    looks: tuple[Any, ...] = (
        lambda x: x[:, 0],
        lambda x: x.transpose(1, 2).flatten(2),
        lambda x: x.reshape(3, -1),
        lambda x: x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(3, 4, 21, 32),
        lambda x: torch.zeros(3, 2, 30, 32).index_copy_(2, torch.arange(21), x),
        lambda x: torch.mul(x, 2, out=torch.empty(0)),
        lambda x: x.transpose(1, 2).contiguous().mul_(2),
        lambda x: x.clone().mul_(2),
        lambda x: copy.deepcopy(x).mul_(2),
        lambda x: copy.deepcopy(x[0]).mul_(2),
    )
    for look in looks:
        assert look(layer.keys).equal(look(key.clone()))
    assert layer.keys.tolist() == layer.keys[:].numpy().tolist() == key.tolist()
    assert layer.held.gather(False).equal(key)


IN_PLACE: dict[str, Any] = {
    "mul_": lambda x: x.mul_(2),
    "setitem": lambda x: x.__setitem__((slice(None), slice(None), 0), 0),
    "view": lambda x: x[:, :, 0].zero_(),
    "view of a view": lambda x: x[0].flatten(0, 1).mul_(2),
    "contiguous": lambda x: x.contiguous().mul_(2),
    "views": lambda x: x.unbind(1)[1].zero_(),
    "same": lambda x: x.to(x.dtype).mul_(2),
    "detach": lambda x: x.detach().mul_(2),
    "data": lambda x: x.data.mul_(2),
    "out": lambda x: torch.mul(x, 2, out=x),
    "one out of two": lambda x: torch.max(x, dim=1, out=(x[:, 0], torch.empty(0, dtype=torch.long))),
    "foreach": lambda x: torch._foreach_mul_([torch.ones(1), x], 2),
    "beside a mask": lambda x: torch.where(mask_function(batch_size=3, q_length=21, kv_length=32), x, 0 * x, out=x),
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", IN_PLACE)
def test_keys_cannot_be_changed_in_place(name: str, mode: Any) -> None:
    with mode():
        layer = PagedLayer(8, kv_cache_dtype="auto")
        key, _ = filled(layer)
        with pytest.raises(RuntimeError, match=r"^aten\..*: would change in place what a cache holds; change a clone"):
            IN_PLACE[name](layer.keys)
        for array in (layer.keys.numpy(), layer.keys[0].numpy()):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 0
        assert layer.keys.equal(key)
