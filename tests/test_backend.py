# SPDX-License-Identifier: Apache-2.0
"""A layer of the backend, feature by feature, against the float64 oracle. Whole models: test_backend_models.py."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cpu_attn
from cpu_attn import (
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    OneDNNPagedAttention,
    PagedAttention,
    attention_metadata,
    backend,
    paged_attention,
)

from .backend_steps import FEATURES, LAYER, MIXED, Cross, Step, empty_cache, layer
from .cases import DTYPES, quantised, same_bits
from .test_arrays import Capsule, Tensor

REASON = next(e.reason for e in cpu_attn.engines() if e.name == "onednn")
ONEDNN = pytest.mark.skipif(bool(REASON), reason=REASON)
PAGED = [pytest.param(PagedAttention, id="auto"), pytest.param(OneDNNPagedAttention, id="onednn", marks=ONEDNN)]

# ---- decoder ----


@pytest.mark.parametrize("paged", PAGED)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("feature", FEATURES)
def test_decoder(paged: type[PagedAttention], causal: bool, feature: str) -> None:
    step, (options, oracle) = Step(*MIXED, causal=causal), FEATURES[feature]
    step.check(step.forward(layer(paged, **options)), **oracle)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["flat", "pair", "stacked"])
def test_layouts_and_dtypes(dtype: str, layout: str) -> None:
    step = Step(*MIXED, dtype=dtype, layout=layout)
    step.check(step.forward(layer()))
    key_cache, value_cache = PagedAttention.split_kv_cache(step.kv_cache, 2, 16)
    for half, cache in enumerate((key_cache, value_cache)):  # the tokens are where slot_mapping said
        rows = cpu_attn.ops.gather(cache, step.table[2], 40, 16, value=bool(half))
        assert same_bits(rows, (step.keys, step.values)[half][2])


@pytest.mark.parametrize("paged", PAGED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_size", "head_size_v", "block_size"), [(7, 7, 16), (16, 5, 16), (1, 3, 5), (80, 80, 48)])
def test_any_sizes(paged: type[PagedAttention], dtype: str, head_size: int, head_size_v: int, block_size: int) -> None:
    sizes: dict[str, Any] = {"head_size": head_size, "head_size_v": head_size_v, "block_size": block_size}
    step = Step(*MIXED, dtype=dtype, layout="pair", **sizes)
    step.check(step.forward(layer(paged, head_size)))
    if head_size == head_size_v and block_size % 16 == 0:
        step = Step(*MIXED, dtype=dtype, layout="flat", **sizes)
        step.check(step.forward(layer(paged, head_size)))


METADATA: dict[str, tuple[Any, dict[str, Any]]] = {
    "decodes alone": (([1, 1, 1], [7, 33, 1], 0), {"query_start_loc": None, "prefill_query_start_loc": None}),
    "no query_start_loc": (MIXED, {"query_start_loc": None}),
    "lengths from seq_lens": (MIXED, {"kv_start_loc": None, "seq_lens_tensor": None}),
    "decodes of several tokens": (([5, 3, 2], [5, 20, 33], 1), {}),
    "whole prompts": (([5, 9], [5, 9], 2), {"prefill_query_start_loc": None, "query_start_loc": None}),
    "whole prompts without blocks": (([5, 90], [5, 90], 2), {"prefill_block_tables": None, "kv_start_loc": None}),
    "whole prompts without blocks, decodes": (([5, 9, 1, 1], [5, 9, 20, 3], 2), {"prefill_block_tables": None}),
    "an empty table": (([5, 9, 1], [5, 9, 20], 2), {"prefill_block_tables": np.zeros(0, np.int32)}),
    "prefills alone": (([5, 9], [5, 20], 2), {"block_tables": np.full((3, 1), 99, np.int32), "seq_lens_tensor": [7]}),
    "lists": (MIXED, {"query_start_loc": [0, 5, 8, 48, 49, 50], "seq_lens_tensor": [33, 1]}),
    "requests of no tokens": (([0, 3, 1], [4, 3, 9], 2), {}),
    "nothing": (([], [], 0), {}),
}


@pytest.mark.parametrize("case", METADATA)
def test_metadata(case: str) -> None:
    shape, changes = METADATA[case]
    if not shape[0]:
        impl, none = layer(), np.zeros((0, 64), np.float32)
        metadata = CPUAttentionMetadata(0, 0, 0, [])
        cache = empty_cache("flat", 2, 16, (16, 16), "float32")
        assert impl.forward(LAYER, none, none[:, :32], none[:, :32], cache, metadata).shape == (0, 64)
        return
    step = Step(*shape)
    output = step.forward(layer(), step.metadata(**changes))
    step.check(output)


def test_wide_integers_and_other_arrays() -> None:
    step, impl = Step(*MIXED), layer()
    metadata = step.metadata()
    for name in ("seq_lens_tensor", "block_tables", "prefill_block_tables", "query_start_loc", "kv_start_loc"):
        setattr(metadata, name, getattr(metadata, name).astype(np.int64))
    metadata.slot_mapping = metadata.slot_mapping.astype(np.int32)[None]
    step.check(step.forward(impl, metadata))
    for wrap in (Capsule, Tensor):
        metadata = step.metadata()
        for name in ("seq_lens_tensor", "block_tables", "prefill_block_tables", "query_start_loc", "slot_mapping"):
            setattr(metadata, name, wrap(getattr(metadata, name)))
        arrays = {name: wrap(getattr(step, name)) for name in ("query", "key", "value", "kv_cache")}
        output = np.zeros((step.tokens, 64), np.float32)
        step.forward(impl, metadata, **arrays, output=wrap(output))
        step.check(output)


def test_int64_entries_do_not_wrap() -> None:
    step = Step([1], [7], 0)
    with pytest.raises(ValueError, match="block_table"):
        step.forward(layer(), step.metadata(block_tables=step.table.astype(np.int64) + 2**32))


def test_padding() -> None:
    """Rows past the step's tokens: not read, not written; 0 in an output of ours."""
    step, impl = Step(*MIXED), layer()
    padded = [np.concatenate([x, np.full_like(x[:6], np.nan)]) for x in (step.query, step.key, step.value)]
    output = np.full((step.tokens + 6, 4, 16), 7, np.float32)
    metadata = step.metadata(slot_mapping=np.append(step.slot_mapping, step.slot_mapping[:6]))
    arrays = dict(zip(("query", "key", "value"), padded, strict=True))
    assert step.forward(impl, metadata, **arrays, output=output) is output
    step.check(output[:-6])
    assert (output[-6:] == 7).all()
    assert not step.forward(impl, metadata, **arrays)[-6:].any()


def test_forms_of_arguments() -> None:
    """Packed projections, heads and sizes in one axis, output in either shape, strided or none."""
    step, impl = Step(*MIXED), layer()
    packed = np.concatenate([x.reshape(step.tokens, -1) for x in (step.query, step.key, step.value)], axis=1)
    query, key, value = packed[:, :64], packed[:, 64:96], packed[:, 96:]
    output = step.forward(impl, query=query, key=key, value=value)
    assert output.shape == (step.tokens, 64)
    step.check(output)
    wide = np.zeros((step.tokens, 80), np.float32)
    step.check(step.forward(impl, query=query, output=wide[:, :64]))
    assert not wide[:, 64:].any()
    step.check(step.forward(impl, output=np.zeros((4, step.tokens, 16), np.float32).transpose(1, 0, 2)))
    tensor = Tensor(step.query)
    tensor.new_zeros = lambda shape: Tensor(np.zeros(shape, np.float32))  # type: ignore[attr-defined]
    step.check(step.forward(impl, query=tensor)._array)


def test_keys_already_in_the_cache() -> None:
    step = Step(*MIXED)
    step.forward(layer())
    step.check(step.forward(layer(), key=None, value=None))


def test_kv_sharing() -> None:
    """The target's keys are read, this layer's are not written."""
    step = Step(*MIXED)
    step.forward(layer())
    before = step.kv_cache.tobytes()
    output = step.forward(layer(kv_sharing_target_layer_name="layers.0"), key=-step.key, value=-step.value)
    step.check(output)
    assert step.kv_cache.tobytes() == before
    step = Step([5], [5], 1)
    metadata, sharing = step.metadata(prefill_block_tables=None), layer(kv_sharing_target_layer_name="layers.0")
    with pytest.raises(ValueError, match="block_tables: needed"):
        step.forward(sharing, metadata)


# ---- profiling and warm-up ----


@pytest.mark.parametrize("kv_cache", [None, np.zeros(0, np.float32), (np.zeros(0, np.float32),) * 2, ()])
def test_profiling_run(kv_cache: Any) -> None:
    step = Step([5, 40, 1], [5, 40, 1], 2)
    step.check(step.forward(layer(), kv_cache=kv_cache))
    step = Step([5, 3], [5, 20], 2)
    with pytest.raises(ValueError, match="seq_lens: request 1 has 20 keys and 3 query tokens"):
        step.forward(layer(), kv_cache=kv_cache)


def test_warm_up() -> None:
    step, output = Step(*MIXED), np.full((50, 64), np.nan, np.float32)
    before = step.kv_cache.tobytes()
    arrays = (step.query, step.key, step.value, step.kv_cache)
    assert layer().forward(LAYER, *arrays, None, output) is output
    assert not output.any() and step.kv_cache.tobytes() == before
    assert layer().forward(LAYER, *arrays, None).shape == (50, 64)


# ---- encoders ----


@pytest.mark.parametrize("paged", PAGED)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("attn_type", ["encoder", "encoder_only"])
def test_encoder(paged: type[PagedAttention], attn_type: str, feature: str) -> None:
    """Lengths around the scratch block's, a single token, nothing; no cache is read or written."""
    lens = [5, 64, 1, 0, 130, 1]
    step, (options, oracle) = Step(lens, lens, 5, causal=False), FEATURES[feature]
    if attn_type == "encoder":
        numbers = np.array(lens, np.int32)
        metadata = CPUAttentionMetadata(
            0,
            0,
            0,
            encoder_seq_lens=lens,
            encoder_seq_lens_tensor=numbers,
            max_encoder_seq_len=130,
            num_encoder_tokens=sum(lens),
        )
    else:
        metadata = step.metadata(causal=True, block_tables=None, prefill_block_tables=None, slot_mapping=None)
    before = step.kv_cache.tobytes()
    step.check(step.forward(layer(paged, attn_type=attn_type, **options), metadata), **oracle)
    assert step.kv_cache.tobytes() == before


def test_what_an_encoder_needs() -> None:
    step = Step([5, 3], [5, 3], 2, causal=False)
    fields: dict[str, Any] = {
        "encoder_seq_lens": [5, 3],
        "encoder_seq_lens_tensor": np.array([5, 3], np.int32),
        "max_encoder_seq_len": 5,
        "num_encoder_tokens": 8,
    }
    impl = layer(attn_type="encoder")
    step.check(step.forward(impl, step.metadata(**fields)))
    for changes, says in (
        ({"encoder_seq_lens_tensor": None}, "encoder attention needs encoder_seq_lens_tensor"),
        ({"max_encoder_seq_len": None}, "encoder attention needs max_encoder_seq_len"),
        ({"num_encoder_tokens": 7}, "num_encoder_tokens: 7, encoder_seq_lens_tensor says 8"),
        ({"encoder_seq_lens_tensor": [5, 4], "num_encoder_tokens": None}, "query: 8 tokens, attn_metadata says 9"),
    ):
        with pytest.raises(ValueError, match=says):
            step.forward(impl, step.metadata(**(fields | changes)))
    with pytest.raises(ValueError, match="key: is None"):
        step.forward(impl, step.metadata(**fields), key=None, value=None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_encoder_dtypes(dtype: str) -> None:
    lens = [70, 3]
    step = Step(lens, lens, 2, causal=False, dtype=dtype, head_size=7, layout="pair")
    step.check(step.forward(layer(head_size=7, attn_type="encoder_only")))


# ---- cross attention ----


@pytest.mark.parametrize("paged", PAGED)
@pytest.mark.parametrize("feature", FEATURES)
def test_cross(paged: type[PagedAttention], feature: str) -> None:
    step, (options, oracle) = Cross(), FEATURES[feature]
    step.fill()
    impl = layer(paged, attn_type="encoder_decoder", **options)
    step.check(step.forward(impl), **oracle)
    later = step.metadata(cross_slot_mapping=np.zeros(0, np.int64))
    step.check(step.forward(impl, later, key=None, value=None), **oracle)


def test_cross_profiling() -> None:
    """Without a cache the keys are those of all encoders."""
    step = Cross()
    arrays = {"key": np.concatenate(step.keys), "value": np.concatenate(step.values), "kv_cache": None}
    impl = layer(attn_type="encoder_decoder")
    step.check(step.forward(impl, **arrays))
    with pytest.raises(ValueError, match="key: 23 tokens, attn_metadata says 58"):
        step.forward(impl, kv_cache=None)


def test_what_cross_attention_needs() -> None:
    step, impl = Cross(), layer(attn_type="encoder_decoder")
    for changes, says in (
        ({"cross_block_tables": None, "encoder_seq_lens": None}, "needs encoder_seq_lens, cross_block_tables"),
        ({"encoder_seq_lens_tensor": np.array([20, 3], np.int32)}, "encoder_seq_lens_tensor: 2 requests, expected 4"),
        ({"cross_slot_mapping": step.cross_slots[1:]}, "cross_slot_mapping: 22 slots, key has 23 tokens"),
        ({"cross_block_tables": step.table[:2]}, r"cross_block_tables: shape \(2, 4\), expected \[4, blocks\]"),
        ({"cross_block_tables": np.zeros(0, np.int32)}, "cross_block_tables: needed"),
    ):
        before = step.kv_cache.tobytes()
        with pytest.raises(ValueError, match=says):
            step.forward(impl, step.metadata(**changes))
        assert step.kv_cache.tobytes() == before


# ---- metadata: properties and getters ----


def test_getters() -> None:
    m = Step(*MIXED).metadata()
    assert not m.is_all_encoder_attn_metadata_set and not m.is_all_cross_attn_metadata_set
    assert m.get_seq_lens("decoder") == m.get_seq_lens("encoder_only") == (m.seq_lens, m.seq_lens)
    for kind in ("decoder", "encoder_only"):
        assert [id(x) for x in m.get_seq_len_block_table_args(kind)] == [
            id(x) for x in (m.seq_lens_tensor, m.max_decode_seq_len, m.block_tables)
        ]
    assert m.prefill_metadata is m and m.decode_metadata is m
    c = Cross().metadata()
    assert c.is_all_encoder_attn_metadata_set and c.is_all_cross_attn_metadata_set
    assert not dataclasses.replace(c, max_encoder_seq_len=None).is_all_cross_attn_metadata_set
    no_slots = dataclasses.replace(c, cross_slot_mapping=None)
    assert no_slots.is_all_encoder_attn_metadata_set and not no_slots.is_all_cross_attn_metadata_set
    assert c.get_seq_lens("encoder") == (c.encoder_seq_lens, c.encoder_seq_lens)
    assert c.get_seq_lens("encoder_decoder") == (c.seq_lens, c.encoder_seq_lens)
    assert c.get_seq_len_block_table_args("encoder") == (c.encoder_seq_lens_tensor, 35, None)
    assert c.get_seq_len_block_table_args("encoder_decoder")[2] is c.cross_block_tables
    nothing = CPUAttentionMetadata(0, 0, 0)
    assert nothing.prefill_metadata is None and nothing.decode_metadata is None
    for call in (m.get_seq_lens, m.get_attn_bias, m.get_seq_len_block_table_args):
        with pytest.raises(ValueError, match="attn_type: 'other' is none of decoder, encoder"):
            call("other")


def test_dense_bias_is_kept_and_refused() -> None:
    step = Step(*MIXED)
    metadata = step.metadata()
    for i, kind in enumerate(("decoder", "encoder", "encoder_decoder")):
        metadata.set_attn_bias([i], kind)
    assert [metadata.get_attn_bias(k) for k in ("encoder_only", "encoder", "encoder_decoder")] == [[0], [1], [2]]
    with pytest.raises(NotImplementedError, match="attn_bias"):
        step.forward(layer(), metadata)
    metadata.set_attn_bias(None, "decoder")
    step.check(step.forward(layer(), metadata))


def count_plans(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    made: list[Any] = []
    plan = attention_metadata.get_scheduler_metadata
    monkeypatch.setattr(attention_metadata, "get_scheduler_metadata", lambda *a, **k: made.append(a) or plan(*a, **k))
    return made


def test_layers_share_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    made, step = count_plans(monkeypatch), Step(*MIXED)
    metadata = step.metadata()
    for feature in ("plain", "alibi", "softcap", "sinks"):  # none of which a plan depends on
        options, oracle = FEATURES[feature]
        step.check(step.forward(layer(**options), metadata), **oracle)
    assert len(made) == 1
    step.check(step.forward(layer(sliding_window=6), metadata), sliding_window=6)
    assert len(made) == 2
    step.check(step.forward(layer(), metadata))
    assert len(made) == 2


def test_lengths_updated_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that advances its arrays and keeps the metadata gets the new step."""
    made = count_plans(monkeypatch)
    step, metadata = Step([1, 1], [20, 9], 0), None
    lens = np.array([19, 8], np.int32)
    metadata = step.metadata(seq_lens_tensor=lens)
    for _ in range(2):
        output = step.forward(layer(), metadata)
        lens += 1
    step.check(output)
    assert len(made) == 2


# ---- what is refused, before anything is written ----

BAD: dict[str, tuple[type[Exception], str, Callable[[Step], tuple[dict[str, Any], dict[str, Any]]]]] = {
    "block": (ValueError, "block_table", lambda s: ({"block_tables": s.table[3:] + 99}, {})),
    "slot": (ValueError, "slot_mapping", lambda s: ({"slot_mapping": s.slot_mapping + 10**6}, {})),
    "slots": (ValueError, "slot_mapping: 49 slots", lambda s: ({"slot_mapping": s.slot_mapping[1:]}, {})),
    "no slots": (TypeError, "slot_mapping", lambda s: ({"slot_mapping": None}, {})),
    "seq_lens": (ValueError, "decodes' lengths: 1", lambda s: ({"seq_lens_tensor": [33]}, {})),
    "fraction": (TypeError, "seq_lens_tensor: dtype float64", lambda s: ({"seq_lens_tensor": [33.5, 1]}, {})),
    "tokens": (
        ValueError,
        "num_prefill_tokens: 47, query_start_loc says 48",
        lambda s: ({"num_prefill_tokens": 47}, {}),
    ),
    "decodes": (ValueError, "num_decode_tokens: 51", lambda s: ({"num_decode_tokens": 3}, {})),
    "prefills": (ValueError, "num_prefills is 9", lambda s: ({"num_prefills": 9}, {})),
    "table": (ValueError, r"block_tables: shape \(5,", lambda s: ({"block_tables": s.table}, {})),
    "no table": (ValueError, "request 0 has 33 keys", lambda s: ({"block_tables": None}, {})),
    "no lengths": (ValueError, "seq_lens: is None", lambda s: ({"kv_start_loc": None, "seq_lens": None}, {})),
    "query": (ValueError, "query: 49 tokens", lambda s: ({}, {"query": s.query[1:]})),
    "query heads": (ValueError, r"query: shape \(50, 2, 16\)", lambda s: ({}, {"query": s.query[:, :2]})),
    "query dtype": (
        TypeError,
        "key: dtype float32, query has float16",
        lambda s: ({}, {"query": s.query.astype("f2")}),
    ),
    "query stride": (
        ValueError,
        "query: the last axis",
        lambda s: ({}, {"query": s.query.repeat(2, axis=2)[:, :, ::2]}),
    ),
    "output stride": (
        ValueError,
        "output: the last axis",
        lambda s: ({}, {"output": np.zeros((50, 128), "f4")[:, ::2]}),
    ),
    "query kind": (TypeError, "float64", lambda s: ({}, {"query": s.query.astype("f8")})),
    "value dtype": (TypeError, "value: dtype float16", lambda s: ({}, {"value": s.value.astype("f2")})),
    "key": (ValueError, "slots and 49 keys", lambda s: ({}, {"key": s.key[1:], "value": s.value[1:]})),
    "key alone": (ValueError, "one of them is None", lambda s: ({}, {"value": None})),
    "value": (ValueError, "value: 49 tokens, key has 50", lambda s: ({}, {"value": s.value[1:]})),
    "output": (ValueError, "output: 49 tokens", lambda s: ({}, {"output": np.zeros((49, 64), "f4")})),
    "output size": (ValueError, r"output: shape \(50, 4, 12\)", lambda s: ({}, {"output": np.zeros((50, 48), "f4")})),
    "output dtype": (TypeError, "output: dtype float16", lambda s: ({}, {"output": np.zeros((50, 64), "f2")})),
    "output alias": (ValueError, "output: shares memory with query", lambda s: ({}, {"output": s.query})),
    "read-only": (
        ValueError,
        "output: is read-only",
        lambda s: ({}, {"output": np.broadcast_to(s.query, s.query.shape)}),
    ),
    "scale": (NotImplementedError, "output_scale", lambda s: ({}, {"output_scale": 1.0})),
    "block scale": (NotImplementedError, "output_block_scale", lambda s: ({}, {"output_block_scale": 1.0})),
    "cache": (ValueError, "kv_cache: axis 2 is 500", lambda s: ({}, {"kv_cache": s.kv_cache[:, :, :500]})),
    "cache axes": (ValueError, "kv_cache: 1 axes of K", lambda s: ({}, {"kv_cache": s.kv_cache[:, 0]})),
    "cache halves": (ValueError, "kv_cache: expected", lambda s: ({}, {"kv_cache": s.kv_cache[:1]})),
    "cache dtype": (TypeError, "key_cache: dtype", lambda s: ({}, {"kv_cache": s.kv_cache.astype("f2")})),
}


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("what", BAD)
def test_refused(what: str) -> None:
    step = Step(*MIXED)
    error, says, spoil = BAD[what]
    changes, arguments = spoil(step)
    before = step.kv_cache.tobytes()
    with pytest.raises(error, match=says):
        step.forward(layer(), step.metadata(**changes), **arguments)
    assert step.kv_cache.tobytes() == before


@pytest.mark.parametrize("name", ["_k_scale", "_v_scale"])
@pytest.mark.parametrize(
    "kind", [float, np.float32, lambda x: np.array(x, np.float32), lambda x: Capsule(np.array(x, np.float32))]
)
def test_scales_reach_the_calls(name: str, kind: Any) -> None:
    step = Step(*MIXED)
    arrays = (step.query, step.key, step.value, step.kv_cache, step.metadata())
    step.check(layer().forward(SimpleNamespace(**{name: kind(1.0)}), *arrays))
    step.check(layer().forward(None, *arrays))
    with pytest.raises(ValueError, match=f"{name[1:]}: 2.0 applies to fp8 caches"):
        layer().forward(SimpleNamespace(**{name: kind(2.0)}), *arrays)


def test_kv_cache_dtype_reaches_the_calls() -> None:
    step = Step(*MIXED)
    step.check(step.forward(layer(kv_cache_dtype="float32")))
    with pytest.raises(ValueError, match="kv_cache_dtype: 'int3'"):
        step.forward(layer(kv_cache_dtype="int3"))
    lens = [3, 4]  # an encoder quantises nothing
    step = Step(lens, lens, 2, causal=False)
    step.check(step.forward(layer(attn_type="encoder_only", kv_cache_dtype="int3")))


def test_each_call_gets_scales_and_cache_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a quantised cache will need, recorded and replaced by what a plain one takes."""
    seen = []

    def spy(call: Callable[..., Any]) -> Callable[..., Any]:
        parameters = inspect.signature(call)

        def replaced(*args: Any, **kwargs: Any) -> Any:
            bound = parameters.bind(*args, **kwargs)
            given = bound.arguments
            seen.append((call.__name__, given.get("kv_cache_dtype"), given.get("k_scale"), given.get("v_scale")))
            plain = {"kv_cache_dtype": "auto", "k_scale": 1.0, "v_scale": 1.0}
            given.update({name: x for name, x in plain.items() if name in given})
            return call(*bound.args, **bound.kwargs)

        return replaced

    for module, name in (
        (paged_attention, "reshape_and_cache"),
        (attention_metadata, "get_scheduler_metadata"),
        (backend, "attention_with_kv_cache"),
    ):
        monkeypatch.setattr(module, name, spy(getattr(module, name)))
    step = Step(*MIXED, layout="pair")
    seen.clear()
    quantised = SimpleNamespace(_k_scale=0.5, _v_scale=np.array(0.25))
    arrays = (step.query, step.key, step.value, step.kv_cache, step.metadata())
    step.check(layer(kv_cache_dtype="fp8_e4m3").forward(quantised, *arrays))
    assert seen == [
        ("get_scheduler_metadata", "fp8_e4m3", None, None),
        ("reshape_and_cache", "fp8_e4m3", 0.5, 0.25),
        ("attention_with_kv_cache", "fp8_e4m3", 0.5, 0.25),
    ]


@pytest.mark.parametrize(
    ("error", "says", "options"),
    [
        (ValueError, "head_size: 0", {"head_size": 0}),
        (ValueError, "num_kv_heads: 3 does not divide num_heads = 4", {"num_kv_heads": 3}),
        (ValueError, "scale: nan", {"scale": math.nan}),
        (ValueError, "logits_soft_cap: -1.0", {"logits_soft_cap": -1.0}),
        (ValueError, "sliding_window: 0", {"sliding_window": 0}),
        (ValueError, "alibi_slopes: axis 0 is 3", {"alibi_slopes": [1.0, 2.0, 3.0]}),
        (ValueError, "sinks: axis 0 is 2", {"sinks": np.zeros(2, np.float32)}),
        (ValueError, "attn_type: 'both' is none of", {"attn_type": "both"}),
        (ValueError, "no cache to share", {"attn_type": "encoder", "kv_sharing_target_layer_name": "a"}),
    ],
)
def test_refused_layers(error: type[Exception], says: str, options: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"num_heads": 4, "head_size": 16, "scale": 0.25, "num_kv_heads": 2}
    with pytest.raises(error, match=says):
        CPUAttentionBackendImpl(**(arguments | options))


@pytest.mark.parametrize("paged", PAGED)
@pytest.mark.parametrize("layout", ["flat", "pair", "stacked"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e5m2"])
def test_fp8_cache(paged: type[PagedAttention], layout: str, dtype: str, kv_cache_dtype: str) -> None:
    """A step over a cache of bytes, as vLLM allocates it; the oracle sees what the bytes say."""
    step, scales = Step(*MIXED, dtype=dtype, layout=layout), (0.0625, 0.25)
    step.kv_cache = (
        tuple(np.full(c.shape, 0xFF, np.uint8) for c in step.kv_cache)
        if layout == "pair"
        else np.full(step.kv_cache.shape, 0xFF, np.uint8)
    )
    caches = paged.split_kv_cache(step.kv_cache, 2, 16, kv_cache_dtype)
    rows = [np.concatenate(x) for x in (step.keys, step.values, step.slots)]
    rows[2][np.isin(rows[2], step.slot_mapping)] = -1  # the step's own tokens are the layer's to write
    paged.write_to_paged_cache(rows[0], rows[1], *caches, rows[2], kv_cache_dtype, *scales)
    scaled = SimpleNamespace(_k_scale=np.array(scales[0], np.float32), _v_scale=scales[1])
    impl = layer(paged, kv_cache_dtype=kv_cache_dtype)
    output = impl.forward(scaled, step.query, step.key, step.value, step.kv_cache, step.metadata())
    step.keys, step.values = (
        [quantised(x, kv_cache_dtype, scale).astype(np.float64) * scale for x in xs]
        for xs, scale in ((step.keys, scales[0]), (step.values, scales[1]))
    )
    step.check(output)
