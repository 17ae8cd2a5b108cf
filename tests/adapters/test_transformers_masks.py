# SPDX-License-Identifier: Apache-2.0
"""Masks as plans, against a float64 softmax under the dense mask that transformers makes of the same arguments."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

from transformers import masking_utils as stock  # noqa: E402
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402

from cpu_attn.transformers.attention import attention  # noqa: E402
from cpu_attn.transformers.masks import Mask, UnplannableError, mask_function  # noqa: E402

pytestmark = pytest.mark.integrations
MODULE = SimpleNamespace(training=False)
HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 16


def inputs(batch: int, queries: int, keys: int) -> Any:
    generator = torch.Generator().manual_seed(1)
    shapes = [(batch, HEADS, queries, HEAD_SIZE), *[(batch, KV_HEADS, keys, HEAD_SIZE)] * 2]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def dense(query: Any, key: Any, value: Any, mask: Any) -> Any:
    """[B, T, H, D] in float64; a row that sees nothing is 0."""
    key = key.double().repeat_interleave(HEADS // KV_HEADS, 1)
    return dense_scores(query.double() @ key.mT * HEAD_SIZE**-0.5, value, mask)


def dense_scores(scores: Any, value: Any, mask: Any) -> Any:
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0.0)
    return (weights @ value.double().repeat_interleave(HEADS // KV_HEADS, 1)).transpose(1, 2)


def by_sdpa(*states: Any, **more: Any) -> Any:
    """What transformers' sdpa makes of the same arguments."""
    module = SimpleNamespace(training=False, num_key_value_groups=HEADS // KV_HEADS, is_causal=False)
    return sdpa_attention_forward(module, *states, **more)[0]


def padded(batch: int, keys: int, padding: str) -> Any:
    at, amount = torch.arange(keys), torch.arange(batch)[:, None] * (keys // batch)
    return {"none": None, "left": at >= amount, "right": at < keys - amount, "both": (at >= amount) & (at < keys - 2)}[
        padding
    ]


def chunked(attention_mask: Any, batch: int) -> Any:
    padding = torch.zeros(batch, dtype=torch.long)
    if attention_mask is not None:
        padding = (attention_mask.cumsum(-1) == 0).sum(-1)
    return stock.chunked_causal_mask_function(4, padding)


FUNCTIONS: dict[str, Any] = {
    "causal": lambda mask, batch: stock.causal_mask_function,
    "sliding": lambda mask, batch: stock.sliding_window_causal_mask_function(5),
    "chunked": chunked,
}
# queries, keys, position of the first query, position of the first key: a prompt, a chunk of one, a token; a sliding
# cache that has forgotten keys; a static one that has room left
STEPS = [(13, 13, 0, 0), (4, 13, 9, 0), (1, 13, 12, 0), (1, 5, 12, 8), (3, 7, 12, 8), (4, 13, 5, 0)]


@pytest.mark.parametrize("padding", ["none", "left", "right", "both"])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(("queries", "keys", "q_offset", "kv_offset"), STEPS)
def test_causal(name: str, padding: str, queries: int, keys: int, q_offset: int, kv_offset: int) -> None:
    batch = 4
    attention_mask = padded(batch, q_offset + queries, padding)
    function = FUNCTIONS[name](attention_mask, batch)
    mask = mask_function(
        batch_size=batch,
        q_length=queries,
        kv_length=keys,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=function,
        attention_mask=attention_mask,
    )
    q, k, v = inputs(batch, queries, keys)
    assert mask.requests()
    got, want = attention(MODULE, q, k, v, mask)[0], dense(q, k, v, mask.dense())
    assert torch.allclose(got.double(), want, atol=2e-6)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("padding", ["none", "left", "right", "both"])
def test_bidirectional(padding: str, window: int | None) -> None:
    function = stock.bidirectional_mask_function
    if window:
        function = stock.sliding_window_bidirectional_mask_function(window)
    attention_mask = padded(4, 13, padding)
    mask = mask_function(batch_size=4, q_length=13, kv_length=13, mask_function=function, attention_mask=attention_mask)
    q, k, v = inputs(4, 13, 13)
    got, want = attention(MODULE, q, k, v, mask)[0], dense(q, k, v, mask.dense())
    if window or padding in ("none", "right"):
        assert mask.requests()
    else:  # the same mask might be of cross attention
        with pytest.raises(UnplannableError, match="padding on the left"):
            mask.requests()
    assert torch.allclose(got.double(), want, atol=2e-6)


@pytest.mark.parametrize("padding", ["none", "left", "right", "both"])
@pytest.mark.parametrize("queries", [1, 13, 20])
def test_cross(queries: int, padding: str) -> None:
    """As many queries as keys are no sign of self attention: none of them is padding."""
    attention_mask = padded(4, 13, padding)
    mask = mask_function(
        batch_size=4,
        q_length=queries,
        kv_length=13,
        mask_function=stock.bidirectional_mask_function,
        attention_mask=attention_mask,
    )
    q, k, v = inputs(4, queries, 13)
    assert torch.allclose(attention(MODULE, q, k, v, mask)[0].double(), dense(q, k, v, mask.dense()), atol=2e-6)


def test_keys_past_the_mask_do_not_reach_the_output() -> None:
    """NaN in what a static cache has not written, and in padding."""
    q, k, v = inputs(2, 3, 12)
    attention_mask = torch.arange(8) >= torch.tensor([[0], [4]])
    mask = mask_function(batch_size=2, q_length=3, kv_length=12, q_offset=5, attention_mask=attention_mask)
    want = attention(MODULE, q, k, v, mask)[0]
    for x in (k, v):
        x[:, :, 8:] = torch.nan
        x[1, :, :4] = torch.nan
    assert attention(MODULE, q, k, v, mask)[0].equal(want)


@pytest.mark.parametrize("keys", [9, 4, 3])
@pytest.mark.parametrize("causal", [True, False])
def test_no_mask_means_what_sdpa_makes_of_it(causal: bool, keys: int) -> None:
    q, k, v = inputs(2, 4, keys)
    all_seen = torch.ones(4, keys, dtype=torch.bool)
    want = dense(q, k, v, all_seen.tril() if causal else all_seen)
    assert torch.allclose(attention(MODULE, q, k, v, None, is_causal=causal)[0].double(), want, atol=2e-6)
    one = attention(MODULE, q[:, :, :1], k, v, None, is_causal=causal)[0]
    assert torch.allclose(one.double(), dense(q[:, :, :1], k, v, all_seen[:1]), atol=2e-6)


@pytest.mark.parametrize("keys", [6, 9])
@pytest.mark.parametrize("masked", [True, False])
def test_position_bias(masked: bool, keys: int) -> None:
    q, k, v = inputs(2, 6, keys)
    bias = torch.randn(1, HEADS, 6, keys, generator=torch.Generator().manual_seed(2))
    mask = mask_function(batch_size=2, q_length=6, kv_length=keys, q_offset=keys - 6) if masked else None
    seen = mask.dense() if masked else torch.ones(6, keys, dtype=torch.bool).tril()
    got = attention(MODULE, q, k, v, mask, position_bias=bias, is_causal=True)[0]
    scale = HEAD_SIZE**0.5
    want = dense_scores(q.double() @ k.double().repeat_interleave(2, 1).mT / scale + bias, v, seen)
    assert torch.allclose(got.double(), want, atol=2e-6)


def test_strides_are_free() -> None:
    q, k, v = inputs(2, 6, 6)
    mask = mask_function(batch_size=2, q_length=6, kv_length=6)
    want = attention(MODULE, q, k, v, mask)[0]
    by_token = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert attention(MODULE, *by_token, mask)[0].equal(want)
    scattered = [x.mT.contiguous().mT for x in (q, k, v)]
    assert attention(MODULE, *scattered, mask)[0].equal(want)


def test_windows_within_windows() -> None:
    """As and_mask_function makes them."""
    parts = (stock.sliding_window_causal_mask_function(n) for n in (7, 3, 5))
    mask = mask_function(batch_size=1, q_length=12, kv_length=12, mask_function=stock.and_masks(*parts))
    q, k, v = inputs(1, 12, 12)
    assert mask.requests().window == (2, -1)
    assert torch.allclose(attention(MODULE, q, k, v, mask)[0].double(), dense(q, k, v, mask.dense()), atol=2e-6)


UNKNOWN = {
    "or": lambda: stock.or_masks(stock.causal_mask_function, stock.sliding_window_overlay(2)),
    "own": lambda: lambda batch, head, query, key: key <= query,
    "blocks": lambda: stock.and_masks(stock.causal_mask_function, stock.blockwise_overlay(torch.zeros(1, 6))),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_unknown_functions_are_not_guessed_at(kind: str) -> None:
    mask = mask_function(batch_size=1, q_length=6, kv_length=6, mask_function=UNKNOWN[kind]())
    with pytest.raises(UnplannableError, match="the mask function"):
        mask.requests()
    q, k, v = inputs(1, 6, 6)
    assert torch.allclose(attention(MODULE, q, k, v, mask)[0].double(), dense(q, k, v, mask.dense()), atol=2e-6)


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("queries", [1, 9])
def test_position_bias_beside_padding(queries: int, padding: str) -> None:
    """Where rows of the batch are cut into tokens and padding the bias is not the plan's."""
    attention_mask = padded(4, 13, padding)
    mask = mask_function(
        batch_size=4, q_length=queries, kv_length=13, q_offset=13 - queries, attention_mask=attention_mask
    )
    q, k, v = inputs(4, queries, 13)
    bias = torch.randn(queries, 13, HEADS, generator=torch.Generator().manual_seed(2)).permute(2, 0, 1)[None]
    got = attention(MODULE, q, k, v, mask, position_bias=bias)[0].double()
    scores = q.double() @ k.double().repeat_interleave(2, 1).mT * HEAD_SIZE**-0.5 + bias
    want, real = dense_scores(scores, v, mask.dense()), attention_mask[:, 13 - queries :]
    assert torch.allclose(got[real], want[real], atol=2e-6)


@pytest.mark.parametrize("shape", [(2, 1, 6, 9), (1, HEADS, 1, 9), (2, HEADS, 6, 9)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.float64])
def test_masks_of_the_callers_own(shape: tuple[int, ...], dtype: Any) -> None:
    q, k, v = inputs(2, 6, 9)
    generator = torch.Generator().manual_seed(3)
    seen = torch.rand(shape, generator=generator) < 0.6
    bias = torch.zeros(shape) if dtype == torch.bool else torch.randn(shape, generator=generator)
    mask = seen if dtype == torch.bool else bias.masked_fill(~seen, -torch.inf).to(dtype)
    scores = q.double() @ k.double().repeat_interleave(2, 1).mT * HEAD_SIZE**-0.5 + bias
    want = dense_scores(scores, v, seen)
    assert torch.allclose(attention(MODULE, q, k, v, mask)[0].double(), want, atol=2e-6)


def test_one_mask_for_all_rows() -> None:
    mask = mask_function(batch_size=1, q_length=6, kv_length=9, q_offset=3)
    q, k, v = inputs(2, 6, 9)
    assert torch.allclose(attention(MODULE, q, k, v, mask)[0].double(), dense(q, k, v, mask.dense()), atol=2e-6)


@pytest.mark.parametrize("kind", ["none", "plan", "bool", "added"])
@pytest.mark.parametrize("sinks", [True, False])
def test_no_keys(kind: str, sinks: bool) -> None:
    masks = {
        "none": None,
        "plan": mask_function(batch_size=2, q_length=3, kv_length=0, mask_function=stock.bidirectional_mask_function),
        "bool": torch.ones(2, 1, 3, 0, dtype=torch.bool),
        "added": torch.zeros(1, HEADS, 3, 0),
    }
    q, k, _ = inputs(2, 3, 0)
    value = torch.zeros(2, KV_HEADS, 0, 24)
    got = attention(MODULE, q, k, value, masks[kind], s_aux=torch.ones(HEADS) if sinks else None)[0]
    assert got.equal(torch.zeros(2, 3, HEADS, 24))


@pytest.mark.parametrize("shape", [(2, 1, 6, 8), (2, 1, 5, 9), (6, 9), (3, 1, 6, 9), (2, 3, 6, 9)])
def test_masks_that_do_not_fit(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"^attention_mask: "):
        attention(MODULE, *inputs(2, 6, 9), torch.ones(shape, dtype=torch.bool))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mask_that_is_added_to_scores_hides_keys(dtype: Any) -> None:
    """As the mask of eager does, which models with attention of their own count on; a row that sees nothing, too."""
    arguments = {"batch_size": 2, "q_length": 5, "kv_length": 7, "q_offset": 2}
    arguments["attention_mask"] = torch.arange(7) >= torch.tensor([[0], [4]])
    mask = mask_function(**arguments)
    scores = torch.randn(2, 3, 5, 7, dtype=dtype)
    want = scores + stock.eager_mask(**arguments, dtype=dtype)
    assert torch.equal(scores + mask, want) and torch.equal(mask + scores, want) and (scores + mask).dtype == dtype
    assert torch.equal(scores.clone().add_(mask), want)
    assert torch.equal(mask + mask, mask.dense())


def test_a_mask_is_dense_to_whoever_looks() -> None:
    arguments = {"batch_size": 2, "q_length": 5, "kv_length": 5, "q_offset": 0, "kv_offset": 0}
    mask = mask_function(**arguments)
    want = stock.sdpa_mask(**arguments, allow_is_causal_skip=False)
    assert isinstance(mask, Mask) and mask.shape == want.shape and mask.dtype == torch.bool
    looks: tuple[Any, ...] = (
        lambda x: x[:, :, 1:3],
        lambda x: x.float(),
        lambda x: ~x,
        lambda x: torch.cat([x, x], -1),
        lambda x: x.flatten(0, 2),
        copy.deepcopy,
    )
    for look in looks:
        got = look(mask)
        assert type(got) is torch.Tensor and got.equal(look(want))
    assert mask.tolist() == mask.numpy().tolist() == np.asarray(mask).tolist() == want.tolist()
    copy.deepcopy(mask).fill_(True)
    assert mask.equal(want)
    with pytest.raises(BufferError, match="Mask: no memory to share"):
        torch.from_dlpack(mask)
    with pytest.raises(AttributeError):
        mask.data = want


MORE = torch.rand(2, 1, 6, 9, generator=torch.Generator().manual_seed(3)) < 0.3


def in_place_or(mask: Any) -> None:
    mask |= MORE


CHANGES: dict[str, Any] = {
    "setitem": lambda x: x.__setitem__((slice(None), slice(None), slice(0, 2), slice(0, 6)), True),
    "a row": lambda x: x.__setitem__(0, True),
    "where": lambda x: x.__setitem__(MORE, True),
    "masked_fill_": lambda x: x.masked_fill_(MORE, True),
    "logical_or_": lambda x: x.logical_or_(MORE),
    "or": in_place_or,
    "view": lambda x: x[:, :, 0].fill_(True),
    "view of a view": lambda x: x[:, 0].transpose(1, 2)[:, 4].logical_not_(),
    "views": lambda x: [row.zero_() for row in x.unbind(2)[::2]],
    "out": lambda x: torch.logical_or(~x, MORE, out=x),
    "out of a view": lambda x: torch.logical_or(MORE[:, :, 1], MORE[:, :, 2], out=x[:, :, 3]),
    "foreach": lambda x: torch._foreach_zero_([x]),
    "transpose": lambda x: x[..., :6].copy_(x[..., :6].mT.clone()),
    "detach": lambda x: x.detach().fill_(True),
    "data": lambda x: x.data.fill_(True),
    "array": lambda x: x.numpy()[:, :, 2:4].fill(True),
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_mask_that_is_changed_in_place(name: str, padding: str, mode: Any) -> None:
    arguments = {"batch_size": 2, "q_length": 6, "kv_length": 9, "q_offset": 3, "kv_offset": 0}
    arguments["attention_mask"] = padded(2, 9, padding)
    with mode():
        mask, want = mask_function(**arguments), stock.sdpa_mask(**arguments, allow_is_causal_skip=False).clone()
        CHANGES[name](mask), CHANGES[name](want)
        q, k, v = inputs(2, 6, 9)
        got = attention(MODULE, q, k, v, mask)[0]
        assert mask.equal(want)
        assert torch.allclose(got.double(), dense(q, k, v, want), atol=2e-6)
        assert not mask.requests().plans


def test_a_mask_that_changes_from_layer_to_layer() -> None:
    mask = mask_function(batch_size=2, q_length=6, kv_length=9, q_offset=3)
    q, k, v = inputs(2, 6, 9)
    row, want = mask[:, :, 1], mask.clone()
    for change in (lambda x: None, lambda x: x.fill_(True), lambda x: x[..., 1].fill_(False)):
        change(row), change(want[:, :, 1])
        assert torch.allclose(attention(MODULE, q, k, v, mask)[0].double(), dense(q, k, v, want), atol=2e-6)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_mask_that_was_only_looked_at_is_a_plan(mode: Any) -> None:
    with mode():
        attention_mask = padded(2, 9, "left")
        mask = mask_function(batch_size=2, q_length=6, kv_length=9, q_offset=3, attention_mask=attention_mask)
        mask[:, :, 0].any(), mask.float(), mask.numpy(), copy.deepcopy(mask).fill_(True)
        mask.logical_not_().logical_not_()
        attention(MODULE, *inputs(2, 6, 9), mask)
        assert len(mask.requests().plans) == 1


# ---- what models make of masks, of which others see only what sdpa or eager gives them ----


@pytest.mark.parametrize("masked", [True, False])
def test_position_bias_of_rows_that_see_nothing(masked: bool) -> None:
    """Beside it sdpa hides keys by the least number there is, and a row without others sees all of them alike."""
    attention_mask = padded(3, 7, "right")
    attention_mask[1] = False
    functions = {True: stock.bidirectional_mask_function, False: stock.causal_mask_function}
    mask = mask_function(
        batch_size=3, q_length=7, kv_length=7, mask_function=functions[masked], attention_mask=attention_mask
    )
    bias = torch.randn(1, HEADS, 7, 7, generator=torch.Generator().manual_seed(2))
    q, k, v = inputs(3, 7, 7)
    want = by_sdpa(q, k, v, mask.dense(), position_bias=bias)
    assert want[1].abs().max() > 0.1
    assert torch.allclose(attention(MODULE, q, k, v, mask, position_bias=bias)[0], want, atol=2e-6)


def test_a_position_bias_is_cut_with_the_keys_that_it_is_of() -> None:
    q, k, v = inputs(2, 4, 9)
    bias = torch.randn(1, HEADS, 4, 9, generator=torch.Generator().manual_seed(2))
    want = by_sdpa(q, k, v, None, position_bias=bias, is_causal=True)
    assert torch.allclose(attention(MODULE, q, k, v, None, position_bias=bias, is_causal=True)[0], want, atol=2e-6)


@pytest.mark.parametrize("least", [torch.finfo(torch.float32).min, torch.finfo(torch.bfloat16).min, -1e10])
def test_rows_that_numbers_hide(least: float) -> None:
    """As eager's masks and many a model's own do; every key of such a row weighs the same, or nearly."""
    q, k, v = inputs(2, 6, 9)
    mask = torch.zeros(2, 1, 6, 9)
    mask[0, :, 2], mask[1, :, :, 4:] = least, least
    want = by_sdpa(q, k, v, mask)
    assert torch.allclose(attention(MODULE, q, k, v, mask)[0], want, atol=2e-6)


@pytest.mark.parametrize("one", ["query", "states", "mask"])
@pytest.mark.parametrize("shape", [(1, 1, 6, 9), (3, 1, 1, 1), (1, HEADS, 6, 1), None])
def test_a_batch_of_one_stands_for_all(one: str, shape: tuple[int, ...] | None) -> None:
    """Learned queries, as GraniteSpeech's projector has them; and masks of one key, as BERT's that generates has."""
    q, k, v = inputs(3, 6, 9)
    q, k, v = (x[:1] if one == name else x for name, x in (("query", q), ("states", k), ("states", v)))
    mask = None if shape is None else torch.randn(shape, generator=torch.Generator().manual_seed(3))
    want = by_sdpa(q.expand(3, -1, -1, -1), k, v, mask)
    assert torch.allclose(attention(MODULE, q, k, v, mask, is_causal=False)[0], want, atol=2e-6)


@pytest.mark.parametrize("kind", ["none", "causal", "plan", "left", "bool", "added"])
def test_only_the_keys_that_an_indexer_selects(kind: str) -> None:
    batch, queries, keys, most = 3, 6, 9, 3
    generator = torch.Generator().manual_seed(5)
    indices = torch.rand(batch, queries, keys, generator=generator).argsort(-1)[..., :most].int()
    indices[:, ::2, -1] = -1
    selected = torch.zeros(batch, queries, keys + 1, dtype=torch.bool)
    selected = selected.scatter(2, indices.long() % (keys + 1), True)[:, None, :, :keys]
    seen = torch.rand(batch, 1, queries, keys, generator=generator) < 0.7
    plan = {"batch_size": batch, "q_length": queries, "kv_length": keys, "q_offset": keys - queries}
    masks = {
        "plan": lambda: mask_function(**plan),
        "left": lambda: mask_function(**plan, attention_mask=padded(batch, keys, "left")),
        "bool": lambda: seen,
        "added": lambda: torch.zeros(seen.shape).masked_fill(~seen, -torch.inf),
    }
    mask = masks[kind]() if kind in masks else None
    if isinstance(mask, Mask):
        seen = mask.dense()
    elif kind in ("none", "causal"):
        seen = torch.ones(queries, keys, dtype=torch.bool)
        seen = seen.tril() if kind == "causal" else seen
    q, k, v = inputs(batch, queries, keys)
    got = attention(MODULE, q, k, v, mask, is_causal=kind == "causal", indices=indices)[0]
    want, rows = dense(q, k, v, seen & selected), (seen & selected).any(-1)[:, 0]
    assert torch.allclose(got[rows].double(), want[rows], atol=2e-6) and rows.any()


def test_an_indexer_that_selects_every_key_leaves_a_plan() -> None:
    mask = mask_function(batch_size=1, q_length=3, kv_length=5, q_offset=2)
    indices = torch.arange(5).expand(1, 3, -1).flip(-1)
    attention(MODULE, *inputs(1, 3, 5), mask, indices=indices)
    assert len(mask.requests().plans) == 1


@pytest.mark.parametrize(
    ("indices", "words"),
    [
        (torch.zeros(2, 3, dtype=torch.int32), r"^indices: \(2, 3\) of torch.int32, expected integers \[2, 3, k\]"),
        (torch.zeros(2, 3, 4), r"^indices: \(2, 3, 4\) of torch.float32, expected integers"),
        (torch.full((2, 3, 4), 9), r"^indices: 9..9, expected -1..8$"),
        (torch.full((2, 3, 4), -2), r"^indices: -2..-2, expected -1..8$"),
    ],
)
def test_indices_that_do_not_fit(indices: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        attention(MODULE, *inputs(2, 3, 9), None, is_causal=False, indices=indices)


def test_models_that_know_eager_alone_get_its_masks() -> None:
    """Gemma 2 is one: numbers to be added; and no mask hides no key, whatever is_causal says."""
    arguments = {"batch_size": 2, "q_length": 5, "kv_length": 5, "attention_mask": padded(2, 5, "left")}
    hf.Gemma2Model  # noqa: B018, its module is imported when it is first named
    mask = mask_function(**arguments, config=hf.Gemma2Config(), dtype=torch.bfloat16)
    want = stock.eager_mask(**arguments, dtype=torch.bfloat16)
    assert mask.dtype == torch.bfloat16 and mask.requests() and torch.equal(mask, want)
    assert torch.equal(torch.ones(2, 3, 5, 5) + mask, torch.ones(2, 3, 5, 5) + want)
    assert mask_function(**arguments, config=hf.LlamaConfig()).dtype == torch.bool
    q, k, v = inputs(2, 5, 5)
    got = attention(SimpleNamespace(config=hf.Gemma2Config(), is_causal=True), q, k, v, None)[0]
    assert torch.allclose(got, by_sdpa(q, k, v, None), atol=2e-6)


def test_no_mask_where_others_make_none() -> None:
    """Informer shortens its tokens after masks were made, and has none for what it does not pad."""
    arguments = {"batch_size": 2, "q_length": 5, "kv_length": 6, "kv_offset": 0, "allow_is_bidirectional_skip": True}
    arguments["mask_function"] = stock.bidirectional_mask_function
    assert mask_function(**arguments, attention_mask=None) is None
    assert mask_function(**arguments, attention_mask=torch.ones(2, 6, dtype=torch.bool)) is None
    assert mask_function(**arguments, attention_mask=padded(2, 6, "right")) is not None
    assert mask_function(**arguments | {"allow_is_bidirectional_skip": False}, attention_mask=None) is not None


@pytest.mark.parametrize("name", ["own", "sliding"])
def test_functions_that_are_mapped_over_indices(name: str) -> None:
    """torch.vmap does not run inside of an operation on the mask, where it is made once somebody looks at it."""
    functions = {"own": UNKNOWN["own"](), "sliding": stock.sliding_window_causal_mask_function(3)}
    arguments = {"batch_size": 2, "q_length": 5, "kv_length": 5, "mask_function": functions[name], "use_vmap": True}
    mask, want = mask_function(**arguments), stock.sdpa_mask(**arguments, allow_is_causal_skip=False)
    assert torch.equal(~mask, ~want)
    q, k, v = inputs(2, 5, 5)
    assert torch.allclose(attention(MODULE, q, k, v, mask)[0].double(), dense(q, k, v, want), atol=2e-6)
