# SPDX-License-Identifier: Apache-2.0
"""What a layer of the backend refuses, before anything is written."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl, CPUAttentionMetadata, CPUAttentionMetadataBuilder

from ..harness.backend_steps import LAYER, MIXED, Step, layer

NOTHING: dict[str, Any] = {"key": None, "value": None, "kv_cache": None, "attn_metadata": None}
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
    "narrow table": (
        ValueError,
        "block_table: request 1: position 1 holds block -1",
        lambda s: ({"prefill_block_tables": s.table[:3, :1]}, {}),
    ),
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
    "query kind": (TypeError, "query: .*float64.* is none of 'float", lambda s: ({}, {"query": s.query.astype("f8")})),
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
        lambda s: ({}, {"output": np.broadcast_to(s.query.copy(), s.query.shape)}),
    ),
    "number": (TypeError, "num_prefills: expected an integer", lambda s: ({"num_prefills": "1"}, {})),
    "starts": (
        ValueError,
        "prefill_query_start_loc: 2 axes, expected 1",
        lambda s: ({"query_start_loc": None, "prefill_query_start_loc": s.starts[None, :4]}, {}),
    ),
    "ragged table": (ValueError, "block_tables: ", lambda s: ({"block_tables": [[1], [1, 2]]}, {})),
    "causal": (TypeError, "causal: expected True or False", lambda s: ({"causal": np.array([True])}, {})),
    "scale": (NotImplementedError, "output_scale", lambda s: ({}, {"output_scale": 1.0})),
    "block scale": (NotImplementedError, "output_block_scale", lambda s: ({}, {"output_block_scale": 1.0})),
    "cache": (ValueError, "kv_cache: axis 2 is 500", lambda s: ({}, {"kv_cache": s.kv_cache[:, :, :500]})),
    "cache of small blocks": (
        ValueError,
        "kv_cache: axis 2 is 256",
        lambda s: ({}, {"kv_cache": s.kv_cache[:, :, :256]}),
    ),
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


@pytest.mark.parametrize(
    ("error", "says", "arguments"),
    [
        (
            TypeError,
            r"query: dtype\('int64'\) is none of",
            {"query": np.zeros((2, 4, 16), np.int64), "output": np.zeros((2, 64), "f4")},
        ),
        (ValueError, "output: is read-only", {"output": np.broadcast_to(np.zeros(64, "f4"), (2, 64))}),
    ],
)
def test_refused_warm_ups(error: type[Exception], says: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(error, match=says):
        layer().forward(LAYER, **({"query": np.zeros((2, 4, 16), "f4"), **NOTHING} | arguments))


@pytest.mark.parametrize(
    ("error", "says", "options"),
    [
        (ValueError, "head_size: 0", {"head_size": 0}),
        (ValueError, "num_kv_heads: 3 does not divide num_heads = 4", {"num_kv_heads": 3}),
        (ValueError, "scale: nan", {"scale": math.nan}),
        (ValueError, "logits_soft_cap: -1.0", {"logits_soft_cap": -1.0}),
        (ValueError, "logits_soft_cap: 1e-39", {"logits_soft_cap": 1e-39}),
        (TypeError, "logits_soft_cap: expected a number", {"logits_soft_cap": np.ones(2)}),
        (ValueError, "alibi_slopes: ", {"alibi_slopes": [1.0, [2.0]]}),
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


@pytest.mark.parametrize(
    ("options", "k_scale"),
    [
        ({"scale": 3e38}, 1.0),
        ({"scale": 1e30, "kv_cache_dtype": "fp8"}, 1e20),
        ({"scale": 1.0, "kv_cache_dtype": "fp8", "logits_soft_cap": 2e-38}, 1e20),
    ],
)
def test_factors_past_float32(options: dict[str, Any], k_scale: float) -> None:
    impl = CPUAttentionBackendImpl(1, 64, num_kv_heads=1, **options)
    kind = "fp8" if "kv_cache_dtype" in options else "float32"
    cache = np.zeros(CPUAttentionBackend.get_kv_cache_shape(4, 16, 1, 64, kind), np.uint8 if kind == "fp8" else "f4")
    metadata = CPUAttentionMetadata(
        num_prefills=0, num_prefill_tokens=0, num_decode_tokens=1, slot_mapping=[0],
        seq_lens=[1], seq_lens_tensor=[1], max_decode_seq_len=1, block_tables=[[0]],
    )  # fmt: skip
    x = np.ones((1, 64), np.float32)
    with pytest.raises(ValueError, match=r"^scale: .* is not a finite float32"):
        impl.forward(SimpleNamespace(_k_scale=k_scale, _v_scale=1.0), x, x, x, cache, metadata)
    assert not cache.any()


@pytest.mark.parametrize("over", ["block_tables", "query_start_loc"])
def test_output_over_what_says_where_the_keys_are(over: str) -> None:
    step = Step([1, 1], [33, 1], 0)
    memory, given = np.zeros((2, 64), np.float32), getattr(step.metadata(), over)
    table = memory.view(np.int32).reshape(-1)[: given.size].reshape(given.shape)
    table[...] = given
    before = step.kv_cache.tobytes(), memory.tobytes()
    argument = over.removesuffix("s")
    with pytest.raises(ValueError, match=f"output: shares memory with {argument}"):
        step.forward(layer(), step.metadata(**{over: table}), output=memory)
    assert (step.kv_cache.tobytes(), memory.tobytes()) == before


@pytest.mark.parametrize(("name", "mask"), [("mm_req_doc_ranges", {0: [(0, 5)]}), ("rswa_prefix_lens", [3])])
def test_masks_that_no_layer_has(name: str, mask: Any) -> None:
    builder = CPUAttentionMetadataBuilder(None, [], None)
    with pytest.raises(NotImplementedError, match=name):
        builder.build(0, SimpleNamespace(num_reqs=1, **{name: mask}))


def test_metadata_of_another_kind() -> None:
    step = Step(*MIXED)
    with pytest.raises(TypeError, match="attn_metadata: expected CPUAttentionMetadata, got int"):
        layer().forward(LAYER, step.query, step.key, step.value, step.kv_cache, 5)  # type: ignore[arg-type]


def test_a_second_call_is_checked_before_the_first_one_runs() -> None:
    """A prefill over the keys given, then a decode over a block that is not there."""
    step = Step([5, 1], [5, 9], 1)
    metadata = step.metadata(block_tables=step.table[1:] + 99, prefill_block_tables=None)
    output = np.full((6, 64), 7, np.float32)
    before = step.kv_cache.tobytes()
    with pytest.raises(ValueError, match=r"block_table: .* outside"):
        step.forward(layer(), metadata, output=output)
    assert step.kv_cache.tobytes() == before
    assert (output == 7).all()
