# SPDX-License-Identifier: Apache-2.0
"""Encoder layers of the backend and those that attend to encoders, against the float64 oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cpu_attn import CPUAttentionMetadata, PagedAttention

from ..cases.formats import DTYPES
from ..harness.backend_steps import FEATURES, Cross, Step, layer
from ..python.test_backend import PAGED

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
