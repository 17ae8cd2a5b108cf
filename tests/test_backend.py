# SPDX-License-Identifier: Apache-2.0
"""The backend layer, feature by feature, against the float64 oracle. Whole models run in test_backend_models.py."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Sequence
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
    attention_metadata,
    backend,
    paged_attention,
    reference,
)

from .cases import DTYPES, numpy_dtype, same_bits
from .test_arrays import Capsule, Tensor

Array = np.ndarray[Any, Any]
REASON = next(e.reason for e in cpu_attn.engines() if e.name == "onednn")
ONEDNN = pytest.mark.skipif(bool(REASON), reason=REASON)
PAGED = [pytest.param(PagedAttention, id="auto"), pytest.param(OneDNNPagedAttention, id="onednn", marks=ONEDNN)]
LAYER = SimpleNamespace(_k_scale=1.0, _v_scale=np.array(1.0, np.float32))
SLOPES = [0.5, 0.25, 0.0625, 0.125]
SINKS = np.array([0.5, -1.0, 2.0, -math.inf], np.float32)
# options of the layer, and of the oracle
FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "alibi": ({"alibi_slopes": SLOPES}, {"alibi_slopes": np.array(SLOPES)}),
    "window": ({"sliding_window": 6}, {"sliding_window": 6}),
    "softcap": ({"logits_soft_cap": 0.8}, {"softcap": 0.8}),
    "sinks": ({"sinks": SINKS}, {"s_aux": SINKS}),
    "all": (
        {"alibi_slopes": SLOPES, "sliding_window": 9, "logits_soft_cap": 2.0, "sinks": SINKS},
        {"alibi_slopes": np.array(SLOPES), "sliding_window": 9, "softcap": 2.0, "s_aux": SINKS},
    ),
}


def starts_of(lens: Sequence[int]) -> Array:
    return np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)


class Step:
    """A step over a cache that holds every request's earlier tokens; prefills first. Unused slots are NaN."""

    def __init__(
        self,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        num_prefills: int,
        *,
        dtype: str = "float32",
        head_size: int = 16,
        head_size_v: int | None = None,
        block_size: int = 16,
        layout: str = "flat",
        causal: bool = True,
    ) -> None:
        rng = np.random.default_rng([len(query_lens), *seq_lens])
        kind = numpy_dtype(dtype)
        self.dtype, self.causal, self.num_prefills = dtype, causal, num_prefills
        self.query_lens, self.seq_lens = list(query_lens), list(seq_lens)
        self.sizes = head_size, head_size_v or head_size
        self.starts, self.tokens = starts_of(query_lens), sum(query_lens)
        self.query = rng.standard_normal((self.tokens, 4, head_size)).astype(kind)
        self.keys = [rng.standard_normal((n, 2, self.sizes[0])).astype(kind) for n in seq_lens]
        self.values = [rng.standard_normal((n, 2, self.sizes[1])).astype(kind) for n in seq_lens]
        blocks = [-(-n // block_size) for n in seq_lens]
        num_blocks, width = sum(blocks) + 2, max(blocks) + 1
        order = rng.permutation(num_blocks).astype(np.int32)
        self.table = np.full((len(blocks), width), -1, np.int32)
        for r, first in enumerate(starts_of(blocks)[:-1]):
            self.table[r, : blocks[r]] = order[first : first + blocks[r]]
        self.kv_cache = empty_cache(layout, num_blocks, block_size, self.sizes, dtype)
        slots = [self.table[r, np.arange(n) // block_size] for r, n in enumerate(seq_lens)]
        self.slots = [s.astype(np.int64) * block_size + np.arange(len(s)) % block_size for s in slots]
        old = [n - q for q, n in zip(query_lens, seq_lens, strict=True)]
        self.key, self.value, self.slot_mapping = (
            np.concatenate([x[n:] for x, n in zip(xs, old, strict=True)]) for xs in (self.keys, self.values, self.slots)
        )
        cached = [np.concatenate([x[:n] for x, n in zip(xs, old, strict=True)]) for xs in (self.keys, self.values)]
        caches = PagedAttention.split_kv_cache(self.kv_cache, 2, head_size)
        before = np.concatenate([s[:n] for s, n in zip(self.slots, old, strict=True)])
        PagedAttention.write_to_paged_cache(*cached, *caches, before)

    def metadata(self, **changes: Any) -> CPUAttentionMetadata:
        p, lens = self.num_prefills, np.array(self.seq_lens, np.int32)
        fields: dict[str, Any] = {
            "num_prefills": p,
            "num_prefill_tokens": int(self.starts[p]),
            "num_decode_tokens": int(self.tokens - self.starts[p]),
            "slot_mapping": self.slot_mapping,
            "seq_lens": self.seq_lens,
            "seq_lens_tensor": lens[p:],
            "max_decode_seq_len": int(lens[p:].max(initial=0)),
            "block_tables": self.table[p:],
            "chunked_prefill": True,
            "prefill_query_start_loc": self.starts[: p + 1],
            "kv_start_loc": starts_of(self.seq_lens[:p]),
            "prefill_block_tables": self.table[:p],
            "query_start_loc": self.starts,
            "causal": self.causal,
        }
        return CPUAttentionMetadata(**(fields | changes))

    def expected(self, **options: Any) -> Array:
        scale = self.sizes[0] ** -0.5
        lens = np.array(self.seq_lens, np.int32)
        return reference.attention(
            self.query, self.keys, self.values, self.starts, lens, scale, self.causal, **options
        )[0]

    def forward(self, impl: CPUAttentionBackendImpl, metadata: CPUAttentionMetadata | None = None, **kw: Any) -> Any:
        args = {"query": self.query, "key": self.key, "value": self.value, "kv_cache": self.kv_cache} | kw
        return impl.forward(LAYER, attn_metadata=metadata or self.metadata(), **args)

    def check(self, output: Any, expected: Array | None = None, **options: Any) -> None:
        want = self.expected(**options) if expected is None else expected
        got = np.asarray(output).reshape(want.shape)
        errors = reference.relative_rms(got, want, self.starts)
        assert (errors <= reference.BUDGET[self.dtype]).all(), errors


def empty_cache(layout: str, num_blocks: int, block_size: int, sizes: tuple[int, int], dtype: str) -> Any:
    """Every byte 0xff, NaN in every dtype."""

    def allocate(size: int, of: str) -> Array:
        shape = PagedAttention.get_kv_cache_shape(num_blocks, block_size, 2, size, dtype, layout=of)
        cache = np.empty(shape, numpy_dtype(dtype))
        cache.reshape(-1).view(np.uint8)[:] = 0xFF
        return cache

    if layout == "flat":
        return allocate(sizes[0], "flat")
    pair = allocate(sizes[0], "pair"), allocate(sizes[1], "pair")
    return np.stack(pair) if layout == "stacked" else pair


def layer(paged: type[PagedAttention] = PagedAttention, head_size: int = 16, **options: Any) -> CPUAttentionBackendImpl:
    arguments: dict[str, Any] = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto"} | options
    impl = CPUAttentionBackendImpl(4, head_size, head_size**-0.5, 2, **arguments)
    impl.paged_attn_impl = paged
    return impl


MIXED = ([5, 3, 40, 1, 1], [5, 20, 40, 33, 1], 3)  # a whole prompt, a chunk after a prefix, a long prompt, two decodes


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


class Cross(Step):
    """Cross attention: decoder tokens of four requests over encoder outputs of other lengths, two of them new."""

    ENCODER_LENS = (20, 3, 35, 0)

    def __init__(self, **options: Any) -> None:
        super().__init__([1] * 4, self.ENCODER_LENS, 0, causal=False, **options)  # the cache: one layer's cross K and V
        rng = np.random.default_rng(3)
        self.query_lens = [6, 2, 1, 1]  # the first two have just joined
        self.starts, self.tokens, self.num_prefills = starts_of(self.query_lens), 10, 2
        self.query = rng.standard_normal((10, 4, 16)).astype(np.float32)
        self.key, self.value = (np.concatenate(x[:2]) for x in (self.keys, self.values))
        self.cross_slots = np.concatenate(self.slots[:2])

    def metadata(self, **changes: Any) -> CPUAttentionMetadata:
        fields: dict[str, Any] = {
            "num_prefills": 2,
            "num_prefill_tokens": 8,
            "num_decode_tokens": 2,
            "seq_lens": [6, 2, 9, 4],  # of the decoder: not looked at here
            "query_start_loc": self.starts,
            "encoder_seq_lens": list(self.ENCODER_LENS),
            "encoder_seq_lens_tensor": np.array(self.ENCODER_LENS, np.int32),
            "max_encoder_seq_len": 35,
            "cross_slot_mapping": self.cross_slots,
            "cross_block_tables": self.table,
        }
        return CPUAttentionMetadata(**(fields | changes))

    def fill(self) -> None:
        """Every encoder's keys, those of the new requests spoilt."""
        caches = PagedAttention.split_kv_cache(self.kv_cache, 2, 16)
        PagedAttention.write_to_paged_cache(
            *(np.concatenate(x) for x in (self.keys, self.values)), *caches, np.concatenate(self.slots)
        )
        PagedAttention.write_to_paged_cache(-self.key, -self.value, *caches, self.cross_slots)


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
    with pytest.raises(ValueError, match=f"{name[1:]}: 2.0 applies to quantised caches"):
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


def test_cache_shapes() -> None:
    shape = CPUAttentionBackend.get_kv_cache_shape
    assert shape(10, 32, 2, 64) == shape(10, 32, 2, 64, "bfloat16") == (2, 10, 32 * 2 * 64)
    assert shape(10, 32, 2, 64, layout="pair") == (10, 2, 32, 64)
    assert shape(10, 16, 2, 7, "bfloat16", layout="pair") == cpu_attn.get_kv_cache_shape(10, 16, 2, 7, "bfloat16")
    with pytest.raises(ValueError, match="block_size: 8 is no multiple of 16: only layout 'pair'"):
        shape(10, 8, 2, 64)
    with pytest.raises(ValueError, match="layout: 'NHD'"):
        shape(10, 16, 2, 64, layout="NHD")
    with pytest.raises(ValueError, match="kv_cache_dtype: 'int3'"):
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
        assert {plan.engine for _, plan in metadata._plans.values()} == {engine}
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
    for moves in ({0: [2, 3], 2: [0]}, np.array([[0, 2], [0, 3], [2, 0]]), [(0, 2), (0, 3), (2, 0)]):
        caches = [numbered(layout, 5), numbered(layout, 5, 10)]
        of.copy_blocks(caches, moves)
        assert contents(caches[0]) == [[2, 1, 0, 0, 4], [102, 101, 100, 100, 104]]
        assert contents(caches[1]) == [[12, 11, 10, 10, 14], [112, 111, 110, 110, 114]]
        of.copy_blocks(caches, [])
        assert contents(caches[0])[0] == [2, 1, 0, 0, 4]


@pytest.mark.parametrize("layout", ["flat", "pair", "stacked"])
@pytest.mark.parametrize("of", [PagedAttention, CPUAttentionBackend])
def test_swap_blocks(layout: str, of: Any) -> None:
    for moves in ({0: 2, 4: 0}, np.array([[0, 2], [4, 0]], np.int32)):
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
    with pytest.raises(TypeError, match="src_to_dst: dtype float64"):
        PagedAttention.swap_blocks(flat, flat, [(0.0, 1.0)])
    flat.flags.writeable = False
    with pytest.raises(ValueError, match="dst_kv_cache: is read-only"):
        PagedAttention.swap_blocks(pair, flat, [(0, 0)])
    with pytest.raises(ValueError, match=r"kv_caches\[0\]: is read-only"):
        PagedAttention.copy_blocks([flat], [(0, 0)])


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


def test_refused_builds() -> None:
    step = Step(*MIXED)
    with pytest.raises(ValueError, match="device: cuda:0, expected cpu"):
        CPUAttentionMetadataBuilder(None, [], None, "cuda:0")
    for says, changes in (
        ("seq_lens: shape", {"seq_lens_cpu": np.zeros(3, np.int32)}),
        ("slot_mapping: shape", {"slot_mapping": np.zeros(3, np.int64)}),
        ("block_table_tensor: shape", {"block_table_tensor": step.table[:2]}),
        ("query_start_loc: shape", {"num_reqs": 9}),
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
