# SPDX-License-Identifier: Apache-2.0
"""What a layer of the backend is told of a step: its forms, its getters, the plan made of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from cpu_attn import CPUAttentionMetadata
from cpu_attn.backend import attention_metadata

from ..harness.backend_steps import FEATURES, LAYER, MIXED, Cross, Step, empty_cache, layer
from ..python.test_arrays import Capsule, Tensor
from ..python.test_odd_arguments import ODD

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
        with pytest.raises(ValueError, match="attn_type: 'other' is none of 'decoder', 'encoder'"):
            call("other")
        with pytest.raises(TypeError, match=r"^attn_type: expected a name"):
            call(ODD["raises"])


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
