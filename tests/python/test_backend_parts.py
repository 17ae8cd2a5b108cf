# SPDX-License-Identifier: Apache-2.0
"""What surrounds a layer: the backend, caches and their blocks, the builder, dense biases."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cpu_attn
from cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
    OneDNNPagedAttention,
    PagedAttention,
)
from cpu_attn.backend import paged_attention

from ..cases.formats import DTYPES, numpy_dtype
from ..harness.backend_steps import (
    FEATURES,
    MIXED,
    SLOPES,
    Array,
    Cross,
    Step,
    empty_cache,
    layer,
)
from ..python.test_arrays import Tensor
from ..python.test_backend import ONEDNN, PAGED

# ---- the backend and its paged attention ----


def test_backend() -> None:
    backend = CPUAttentionBackend
    assert backend.get_name() == "CPU_ATTN"
    assert backend.get_impl_cls() is CPUAttentionBackendImpl
    assert backend.get_metadata_cls() is CPUAttentionMetadata
    assert backend.get_builder_cls() is CPUAttentionMetadataBuilder
    assert {str(d) for d in backend.get_supported_dtypes()} == set(DTYPES)
    assert backend.get_supported_head_sizes() == PagedAttention.get_supported_head_sizes() == []
    for size in (1, 7, 128, 65536):
        backend.validate_head_size(size)
        assert PagedAttention.validate_head_size(size) == (True, [])
    for size in (0, -1, 65537):
        with pytest.raises(ValueError, match="head_size: "):
            backend.validate_head_size(size)
        assert PagedAttention.validate_head_size(size) == (False, [])
    for what in (1.5, "a", None):
        with pytest.raises(TypeError, match="head_size: expected an integer"):
            backend.validate_head_size(what)
        assert PagedAttention.validate_head_size(what) == (False, [])


def test_cache_shapes() -> None:
    shape = CPUAttentionBackend.get_kv_cache_shape
    assert shape(10, 32, 2, 64) == shape(10, 32, 2, 64, "bfloat16") == (2, 10, 32 * 2 * 64)
    assert shape(10, 32, 2, 64, layout="pair") == (10, 2, 32, 64)
    assert shape(10, 16, 2, 7, "bfloat16", layout="pair") == cpu_attn.get_kv_cache_shape(10, 16, 2, 7, "bfloat16")
    with pytest.raises(ValueError, match="block_size: 8 is no multiple of 16: only layout 'pair'"):
        shape(10, 8, 2, 64)
    with pytest.raises(ValueError, match="layout: 'NHD'"):
        shape(10, 16, 2, 64, layout="NHD")
    with pytest.raises(ValueError, match="cache_dtype_str: 'int3'"):
        shape(10, 16, 2, 64, "int3")
    widths = {cpu_attn.get_kv_cache_shape(1, 16, 1, 7, dtype)[3] for dtype in DTYPES}
    if len(widths) > 1:
        with pytest.raises(ValueError, match="cache_dtype_str: 'auto' does not say the dtype"):
            shape(10, 16, 2, 7)


def test_split_is_a_view() -> None:
    cache = np.zeros((2, 3, 16 * 2 * 8), np.float32)
    key_cache, value_cache = PagedAttention.split_kv_cache(Tensor(cache), 2, 8)
    assert key_cache.shape == value_cache.shape == (3, 2, 16, 8)
    key_cache[1], value_cache[2] = 1, 2
    assert (cache[0, 1] == 1).all() and (cache[1, 2] == 2).all() and cache.sum() == 256 * 3


@pytest.mark.parametrize("paged", PAGED)
@pytest.mark.parametrize("feature", ["plain", "all"])
def test_forward_decode(paged: type[PagedAttention], feature: str) -> None:
    step = Step([1, 1, 1], [7, 33, 1], 0, layout="pair")
    paged.write_to_paged_cache(step.key, step.value, *step.kv_cache, step.slot_mapping, "auto", 1.0, np.float32(1))
    oracle = dict(FEATURES[feature][1])
    output = np.zeros_like(step.query)
    slopes = oracle.get("alibi_slopes")
    options = {name: oracle[name] for name in ("sliding_window", "softcap", "s_aux") if name in oracle}
    arrays = (output, step.query, *step.kv_cache, step.table, np.array(step.seq_lens))
    slopes = None if slopes is None else slopes.astype(np.float32)
    decode = paged.forward_decode(*arrays, 33, "auto", 2, 0.25, slopes, 1.0, 1.0, **options)
    assert decode is output
    step.check(output, **oracle)
    with pytest.raises(ValueError, match=r"context_lens\[1\]: 33, expected at most max_context_len = 32"):
        paged.forward_decode(*arrays, 32, "auto", 2, 0.25, None)


@ONEDNN
def test_engines_are_the_ones_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CPU_ATTN_ENGINE", raising=False)
    for paged, engine in ((PagedAttention, "native"), (OneDNNPagedAttention, "onednn")):
        step = Step(*MIXED)
        metadata = step.metadata()
        step.forward(layer(paged), metadata)
        assert {plan.engine for *_, plan in metadata._plans.values()} == {engine}
        made: list[Any] = []
        call = cpu_attn.attention_with_kv_cache
        monkeypatch.setattr(
            paged_attention,
            "attention_with_kv_cache",
            lambda *a, call=call, made=made, **k: made.append(a[12]) or call(*a, **k),
        )
        step = Step([1, 1], [7, 20], 0, layout="pair")
        arrays = (np.zeros_like(step.query), step.query, *step.kv_cache, step.table, step.seq_lens)
        paged.forward_decode(*arrays, 20, "auto", 2, 0.25, None)
        assert [plan.engine for plan in made] == [engine]


# ---- whole blocks ----


def numbered(layout: str, num_blocks: int, offset: int = 0) -> Any:
    cache = empty_cache(layout, num_blocks, 16, (8, 8), "bfloat16")
    for half, blocks in enumerate(cache):
        blocks[...] = (offset + 100 * half + np.arange(num_blocks)).reshape(-1, *[1] * (blocks.ndim - 1))
    return cache


def contents(cache: Any) -> list[list[int]]:
    assert all((half == half.reshape(len(half), -1)[:, :1].reshape(-1, *[1] * (half.ndim - 1))).all() for half in cache)
    return [[int(x) for x in half.reshape(len(half), -1)[:, 0]] for half in cache]


@pytest.mark.parametrize("layout", ["flat", "pair", "stacked"])
@pytest.mark.parametrize("of", [PagedAttention, CPUAttentionBackend])
def test_copy_blocks(layout: str, of: Any) -> None:
    for moves in (
        {0: [2, 3], 2: np.array(0)},
        {0: iter([2, 3]), 2: np.int64(0)},
        np.array([[0, 2], [0, 3], [2, 0]]),
        [(0, 2), (0, 3), (2, 0)],
    ):
        caches = [numbered(layout, 5), numbered(layout, 5, 10)]
        of.copy_blocks(caches, moves)
        assert contents(caches[0]) == [[2, 1, 0, 0, 4], [102, 101, 100, 100, 104]]
        assert contents(caches[1]) == [[12, 11, 10, 10, 14], [112, 111, 110, 110, 114]]
        of.copy_blocks(caches, [])
        assert contents(caches[0])[0] == [2, 1, 0, 0, 4]
    caches = [numbered(layout, 5), numbered(layout, 5, 10)]
    of.copy_blocks(caches, zip((0, 1), (1, 2), strict=True))
    assert contents(caches[1]) == [[10, 10, 11, 13, 14], [110, 110, 111, 113, 114]]
    shared = numbered(layout, 5)
    of.copy_blocks([shared, shared], [(0, 1), (1, 2)])
    assert contents(shared) == [[0, 0, 1, 3, 4], [100, 100, 101, 103, 104]]
    if layout == "flat":
        of.copy_blocks([shared, shared.reshape(2, 5, 16, -1), shared[::-1]], [(3, 1), (1, 2)])
        assert contents(shared) == [[0, 3, 0, 3, 4], [100, 103, 100, 103, 104]]


def test_copy_blocks_where_v_is_a_view_of_k() -> None:
    rows = np.arange(4.0).repeat(16 * 24).reshape(4, 1, 16, 24)
    PagedAttention.copy_blocks([(rows, rows[..., :16])], [(0, 1), (1, 2), (2, 0)])
    assert rows[:, 0, 0, 0].tolist() == rows[:, 0, 0, 23].tolist() == [2, 0, 1, 3]


@pytest.mark.parametrize("moves", [[(0, 1), (1, 2)], [(1, 2), (0, 1)], [(0, 1), (1, 2), (2, 0), (3, 4)]])
def test_copy_blocks_where_layers_share_halves(moves: list[tuple[int, int]]) -> None:
    halves = [numbered("pair", 5, offset) for offset in (0, 10, 20)]
    (key, value), (other_key, other_value), (rows, _) = halves
    layers = [(key, value), (key, other_value), (other_key, value), (rows, rows[..., :4]), (value, rows[..., 4:])]
    expected = np.array([contents(half) for half in halves])
    expected[..., [to for _, to in moves]] = expected[..., [source for source, _ in moves]]
    expected[2, 1] = contents(halves[2])[1]  # which is in no layer
    PagedAttention.copy_blocks(layers, moves)
    assert [contents(half) for half in halves] == expected.tolist()


@pytest.mark.parametrize("layout", ["flat", "pair", "stacked"])
@pytest.mark.parametrize("of", [PagedAttention, CPUAttentionBackend])
def test_swap_blocks(layout: str, of: Any) -> None:
    for moves in ({0: 2, 4: 0}, np.array([[0, 2], [4, 0]], np.int32), zip((0, 4), (2, 0), strict=True)):
        source, destination = numbered(layout, 5), numbered(layout, 3, 50)
        of.swap_blocks(source, destination, moves)
        assert contents(source) == contents(numbered(layout, 5))
        assert contents(destination) == [[4, 51, 0], [104, 151, 100]]


@pytest.mark.parametrize(
    ("says", "moves"),
    [
        (r"src_to_dists\[1\]\[0\]: block 5 is outside 0..4", [(0, 1), (5, 2)]),
        (r"src_to_dists\[0\]\[1\]: block -1 is outside", [(0, -1)]),
        ("destination 3 is named twice", [(0, 3), (1, 3)]),
        (r"shape \(3,\), expected \[n, 2\]", [1, 2, 3]),
        ("src_to_dists: .*inhomogeneous", [(0,), (1, 2)]),
    ],
)
def test_refused_moves(says: str, moves: Any) -> None:
    caches = [numbered("flat", 9), numbered("flat", 5)]  # the second layer is too small: the first must not change
    with pytest.raises(ValueError, match=says):
        PagedAttention.copy_blocks(caches, moves)
    assert [contents(c) for c in caches] == [contents(numbered("flat", n)) for n in (9, 5)]
    source, destination = numbered("flat", 5), numbered("flat", 5, 50)
    with pytest.raises(ValueError, match=says.replace("src_to_dists", "src_to_dst")):
        PagedAttention.swap_blocks(source, destination, moves)
    assert contents(destination) == contents(numbered("flat", 5, 50))


def test_refused_caches() -> None:
    flat, pair = numbered("flat", 5), numbered("pair", 5)
    with pytest.raises(ValueError, match="dst_kv_cache: blocks of bfloat16"):
        PagedAttention.swap_blocks(flat, pair, [(0, 0)])
    for moves in ([(0.0, 1.0)], {0: np.array(1.0)}):
        with pytest.raises(TypeError, match="src_to_dst: dtype float64"):
            PagedAttention.swap_blocks(flat, flat, moves)
    flat.flags.writeable = False
    with pytest.raises(ValueError, match="dst_kv_cache: is read-only"):
        PagedAttention.swap_blocks(pair, flat, [(0, 0)])
    with pytest.raises(ValueError, match=r"kv_caches\[0\]: is read-only"):
        PagedAttention.copy_blocks([flat], [(0, 0)])
    with pytest.raises(TypeError, match="kv_caches: expected a sequence, got NoneType"):
        PagedAttention.copy_blocks(None, [(0, 0)])
    for heads in (0, -1):
        with pytest.raises(ValueError, match=f"num_kv_heads: {heads} is outside"):
            PagedAttention.split_kv_cache(pair, heads, 8)


@pytest.mark.parametrize(
    ("error", "says", "changes"),
    [
        (TypeError, "max_context_len: expected an integer, got NoneType", {"max_context_len": None}),
        (TypeError, "max_context_len: expected an integer, got str", {"max_context_len": "33"}),
        (ValueError, "output: 0 axes, expected 3", {"output": np.float32(0)}),
        (ValueError, "context_lens: 2 axes, expected 1", {"context_lens": [[33, 1]]}),
        (ValueError, r"context_lens\[1\]: -1, expected at least 0", {"context_lens": [33, -1]}),
        (ValueError, "block_tables: axis 0 is 1, expected num_reqs = 2", {"block_tables": [[0, 1, 2]]}),
    ],
)
def test_refused_decodes(error: type[Exception], says: str, changes: dict[str, Any]) -> None:
    step = Step([1, 1], [33, 1], 0)
    key_cache, value_cache = PagedAttention.split_kv_cache(step.kv_cache, 2, 16)
    arguments: dict[str, Any] = {
        "output": np.zeros_like(step.query),
        "query": step.query,
        "key_cache": key_cache,
        "value_cache": value_cache,
        "block_tables": step.table,
        "context_lens": step.seq_lens,
        "max_context_len": 33,
        "kv_cache_dtype": "auto",
        "num_kv_heads": 2,
        "scale": 0.25,
        "alibi_slopes": None,
    }
    PagedAttention.forward_decode(**arguments)
    with pytest.raises(error, match=says):
        PagedAttention.forward_decode(**arguments | changes)


# ---- the builder ----


def common(step: Step, **more: Any) -> Any:
    """vLLM's CommonAttentionMetadata, with padding behind requests and tokens."""
    padded_table = np.concatenate([step.table, np.full_like(step.table[:1], -9)])
    fields = {
        "query_start_loc": step.starts,
        "query_start_loc_cpu": np.append(step.starts, step.starts[-1]),
        "seq_lens": np.array(step.seq_lens, np.int32),
        "seq_lens_cpu": np.array([*step.seq_lens, 0], np.int32),
        "num_reqs": len(step.seq_lens),
        "num_actual_tokens": step.tokens,
        "max_query_len": max(step.query_lens),
        "max_seq_len": max(step.seq_lens),
        "block_table_tensor": padded_table,
        "slot_mapping": np.append(step.slot_mapping, [-1, -1]),
        "causal": step.causal,
    }
    return SimpleNamespace(**(fields | more))


def builder() -> CPUAttentionMetadataBuilder:
    config = SimpleNamespace(scheduler_config=SimpleNamespace(chunked_prefill_enabled=True))
    return CPUAttentionMetadataBuilder(SimpleNamespace(block_size=16), ["layers.0"], config, "cpu")


def test_build() -> None:
    step = Step(*MIXED)
    metadata, by_hand = builder().build(0, common(step)), step.metadata()
    for f in dataclasses.fields(metadata):
        if f.init and f.name not in ("max_query_len", "max_kv_len"):
            assert np.array_equal(getattr(metadata, f.name), getattr(by_hand, f.name)), f.name
    assert (metadata.max_query_len, metadata.max_kv_len) == (40, 40)
    step.check(step.forward(layer(), metadata))


@pytest.mark.parametrize(
    "shape", [([1, 1], [7, 33], 0), ([5, 9], [5, 20], 2), ([1, 5, 1, 0, 1], [9, 20, 1, 3, 4], 4), ([1], [1], 0)]
)
@pytest.mark.parametrize("causal", [True, False])
def test_build_in_any_order(shape: Any, causal: bool) -> None:
    step = Step(*shape, causal=causal)
    metadata = builder().build(3, common(step), fast_build=True)
    assert metadata.num_prefills == shape[2]
    step.check(step.forward(layer(), metadata))


def test_build_for_cross_attention() -> None:
    step = Cross()
    step.fill()
    more = {"encoder_seq_lens": np.array(step.ENCODER_LENS), "cross_slot_mapping": step.cross_slots}
    decoder = common(step, seq_lens_cpu=None, seq_lens=[6, 2, 9, 4], slot_mapping=np.zeros(10, np.int64), **more)
    metadata = builder().build(0, SimpleNamespace(**vars(decoder), cross_block_tables=step.table))
    assert metadata.is_all_cross_attn_metadata_set
    assert (metadata.max_encoder_seq_len, metadata.num_encoder_tokens) == (35, 58)
    step.check(step.forward(layer(attn_type="encoder_decoder"), metadata))


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("shape", [([1, 1], [7, 33], 0), ([3, 2], [9, 20], 2), MIXED, None])
def test_what_is_built_stays(shape: Any, dtype: Any) -> None:
    """Whatever the engine's arrays hold then. None: cross attention."""
    step, more = Cross() if shape is None else Step(*shape), {}
    if isinstance(step, Cross):
        step.fill()
        more = {"encoder_seq_lens": step.ENCODER_LENS, "cross_slot_mapping": step.cross_slots}
        more |= {"cross_block_tables": step.table, "slot_mapping": np.zeros(10)}
    fields = vars(common(step, **more))
    arrays = {name: np.array(x, dtype) for name, x in fields.items() if np.ndim(x)}
    metadata = builder().build(0, SimpleNamespace(**fields | arrays))
    for x in arrays.values():
        x -= 1
    step.check(step.forward(layer(attn_type="decoder" if shape else "encoder_decoder"), metadata))


def test_refused_builds() -> None:
    step = Step(*MIXED)
    with pytest.raises(ValueError, match="device: cuda:0, expected cpu"):
        CPUAttentionMetadataBuilder(None, [], None, "cuda:0")
    for says, changes in (
        ("seq_lens: shape", {"seq_lens_cpu": np.zeros(3, np.int32)}),
        ("slot_mapping: shape", {"slot_mapping": np.zeros(3, np.int64)}),
        ("block_table_tensor: shape", {"block_table_tensor": step.table[:2]}),
        ("query_start_loc: shape", {"num_reqs": 9}),
        (r"query_start_loc\[3\]: 7, expected at least 8", {"query_start_loc_cpu": np.array([0, 5, 8, 7, 49, 50])}),
        (r"query_start_loc\[0\]: 1, expected 0", {"query_start_loc_cpu": np.array([1, 5, 8, 48, 49, 50])}),
        ("block_table_tensor: 1 axes, expected 2", {"block_table_tensor": np.zeros(9, np.int32)}),
    ):
        with pytest.raises(ValueError, match=says):
            builder().build(0, common(step, **changes))


def test_reorder_batch() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        number = int(rng.integers(0, 9))
        scheduled = {f"r{i}": int(rng.choice([1, 1, 2, 30])) for i in range(number)}
        names, swaps = list(scheduled), []

        def swap_states(i: int, j: int, names: list[str] = names, swaps: list[Any] = swaps) -> None:
            names[i], names[j] = names[j], names[i]
            swaps.append((i, j))

        batch = SimpleNamespace(req_ids=names, num_reqs=number, swap_states=swap_states)
        moved = builder().reorder_batch(batch, SimpleNamespace(num_scheduled_tokens=scheduled))
        kinds = [scheduled[name] == 1 for name in names]
        assert kinds == sorted(kinds) and moved == bool(swaps)
        assert len(swaps) == sum(a != b for a, b in zip(kinds, [n == 1 for n in scheduled.values()], strict=True)) / 2


# ---- dense biases ----


def dense(step: Step, r: int, bias: Array) -> Array:
    """Request r's attention by a dense bias, in float64."""
    rows = slice(step.starts[r], step.starts[r + 1])
    query, key, value = (x.astype(np.float64) for x in (step.query[rows], step.keys[r], step.values[r]))
    s = np.einsum("ihd,jhd->hij", query, key.repeat(2, axis=1)) * step.sizes[0] ** -0.5 + bias
    p = np.exp(s - s.max(axis=2, keepdims=True))
    p /= p.sum(axis=2, keepdims=True)
    return np.asarray(np.einsum("hij,jhd->ihd", p, value.repeat(2, axis=1)))


def test_make_alibi_bias() -> None:
    step = Step([5, 40], [5, 40], 2)
    biases = cpu_attn.make_alibi_bias(SLOPES, "float32", step.seq_lens)
    assert [b.shape for b in biases] == [(1, 4, 5, 5), (1, 4, 40, 40)]
    expected = step.expected(alibi_slopes=np.array(SLOPES))
    for r, bias in enumerate(biases):
        assert np.allclose(dense(step, r, bias[0]), expected[step.starts[r] : step.starts[r + 1]], atol=1e-12)
    (half,) = cpu_attn.make_alibi_bias(np.array(SLOPES, np.float32), numpy_dtype("bfloat16"), [300])
    assert half.dtype == numpy_dtype("bfloat16")  # and positions past 256, which bfloat16 cannot count, are right
    assert half[0, 0, 299, 0] == numpy_dtype("bfloat16").type(-149.5)


@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize("causal", [True, False])
def test_make_sliding_window_bias(window: int | None, causal: bool) -> None:
    step = Step([5, 40], [5, 40], 2, causal=causal)
    biases = cpu_attn.make_sliding_window_bias(step.seq_lens, window, np.float16, causal)
    assert [(b.shape, b.dtype) for b in biases] == [((1, n, n), np.float16) for n in (5, 40)]
    expected = step.expected(sliding_window=window or -1)
    for r, bias in enumerate(biases):
        assert np.allclose(dense(step, r, bias), expected[step.starts[r] : step.starts[r + 1]], atol=1e-12)


def test_refused_biases() -> None:
    for error, says, arguments in (
        (ValueError, r"seq_lens\[1\]: -3", ([1.0], "float32", [2, -3])),
        (TypeError, r"seq_lens\[0\]: expected an integer", ([1.0], "float32", [2.5])),
        (TypeError, "seq_lens: expected a sequence, got int", ([1.0], "float32", 3)),
        (ValueError, "alibi_slopes: 2 axes, expected 1", ([[1.0]], "float32", [3])),
        (ValueError, "alibi_slopes: could not convert", (["a"], "float32", [3])),
        (TypeError, "dtype: 'float64'", ([1.0], "float64", [])),
    ):
        with pytest.raises(error, match=says):
            cpu_attn.make_alibi_bias(*arguments)
    for error, says, options in (
        (ValueError, r"seq_lens\[0\]: -3", ([-3], 2, "float32")),
        (TypeError, "window_size: expected an integer, got float", ([3], 1.5, "float32")),
        (ValueError, "window_size: 0 would see nothing", ([3], 0, "float32")),
        (TypeError, "causal: expected True or False", ([3], 2, "float32", "no")),
    ):
        with pytest.raises(error, match=says):
            cpu_attn.make_sliding_window_bias(*options)
