# SPDX-License-Identifier: Apache-2.0
"""A decoder layer of the backend, feature by feature, against the float64 oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cpu_attn
from cpu_attn import OneDNNPagedAttention, PagedAttention

from ..cases.formats import DTYPES
from ..cases.judge import same_bits
from ..harness.backend_steps import FEATURES, LAYER, MIXED, Step, layer
from ..python.test_arrays import Tensor

REASON = next(e.reason for e in cpu_attn.engines() if e.name == "onednn")
ONEDNN = pytest.mark.skipif(bool(REASON), reason=REASON)
PAGED = [pytest.param(PagedAttention, id="auto"), pytest.param(OneDNNPagedAttention, id="onednn", marks=ONEDNN)]


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
