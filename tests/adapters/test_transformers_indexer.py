# SPDX-License-Identifier: Apache-2.0
"""The indexer of a PagedCache: what it selects, against float64 scores of the keys that the mask shows; all else that a
model does with its keys, against the same operations on a plain tensor. And MiniMax M3, which selects blocks."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

from cpu_attn import ops, reference  # noqa: E402
from cpu_attn.tests.models import hf_tiny  # noqa: E402
from cpu_attn.tests.models.hf_models import CACHE, tokens  # noqa: E402
from cpu_attn.transformers import PagedCache, enable  # noqa: E402
from cpu_attn.transformers.indexer import IndexedLayer, formula_of  # noqa: E402
from cpu_attn.transformers.masks import mask_function  # noqa: E402
from cpu_attn.transformers.pages import Held  # noqa: E402

pytestmark = pytest.mark.integrations
enable()
BATCH, KEYS, HEADS, SIZE, MOST = 3, 29, 24, 16, 6
VALID = {
    "none": None,
    "left": torch.arange(KEYS) >= torch.tensor([[0], [11], [25]]),
    "right": torch.arange(KEYS) < torch.tensor([[KEYS], [27], [4]]),
}


def numbers(*shape: int, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def filled(dtype: Any = torch.float32) -> tuple[IndexedLayer, Any, Any]:
    """A layer, all of its keys as the layer gives them out, and as they are."""
    layer, keys = IndexedLayer(block_size=4), numbers(BATCH, KEYS, SIZE).to(dtype)
    layer.update_indexer(keys[:, :10])
    return layer, layer.update_indexer(keys[:, 10:]), keys


def masked(queries: int, padding: str = "none") -> Any:
    sizes = {"batch_size": BATCH, "q_length": queries, "kv_length": KEYS, "q_offset": KEYS - queries}
    return mask_function(**sizes, attention_mask=VALID[padding])


def scores(query: Any, keys: Any, weights: Any, scale: float = 0.25) -> Any:
    """As DeepSeek-V3.2 computes them."""
    products = torch.matmul(query.float(), keys.transpose(-1, -2).float().unsqueeze(1)) * scale
    return torch.matmul(weights.unsqueeze(-2), torch.nn.functional.relu(products)).squeeze(-2)


def best(found: Any, mask: Any) -> Any:
    return found.masked_fill(~mask[:, 0, :, :], float("-inf")).topk(MOST, dim=-1).indices.to(torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padding", VALID)
@pytest.mark.parametrize("queries", [KEYS, 5, 1])
def test_selected(queries: int, padding: str, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is gathered for it. Rows that are padding see what the mask shows them, or nothing."""
    _, given, keys = filled(dtype)
    query, weights = numbers(BATCH, queries, HEADS, SIZE, seed=1).to(dtype), numbers(BATCH, queries, HEADS, seed=2)
    mask = masked(queries, padding)
    monkeypatch.setattr(Held, "gather", lambda *_: pytest.fail("the keys were gathered"))
    indices = best(scores(query, given, weights), mask)
    formula = formula_of(indices, mask, mask.requests())
    assert formula and indices.shape == (BATCH, queries, MOST)
    selected = formula.selected(mask.requests()).reshape(BATCH, queries, MOST)
    assert formula.selected(mask.requests()) is formula.selected(mask.requests())
    for b in range(BATCH):
        want = reference.index_scores(query[b].float().numpy(), keys[b].float().numpy(), weights[b].numpy(), 0.25)
        for i in range(queries):
            seen = mask.dense()[b, 0, i].nonzero()[:, 0].numpy()
            chosen = np.sort(seen[np.argsort(-want[i, seen])[:MOST]])
            assert selected[b, i].tolist() == [*chosen, *[-1] * (MOST - len(chosen))]


def test_anything_else_is_what_torch_makes() -> None:
    _, given, keys = filled()
    query, weights, mask = numbers(BATCH, 5, HEADS, SIZE, seed=1), numbers(BATCH, 5, HEADS, seed=2), masked(5)
    plain = mask.dense().clone()
    for way in (
        lambda k, _: k,
        lambda k, _: k[:, 3:7] + k.transpose(-1, -2)[..., :1].mT,
        lambda k, _: k.transpose(-1, -2).float().unsqueeze(1) * 2,
        lambda k, _: k.transpose(1, 2).float().unsqueeze(0),
        lambda k, _: torch.matmul(query, k.transpose(-1, -2).float().unsqueeze(1)) * -2,
        lambda k, _: torch.matmul(query[:, :, :3], k.transpose(-1, -2).float().unsqueeze(1)).mul_(3).relu_(),
        lambda k, _: scores(query, k, weights).softmax(-1),
        lambda k, _: scores(query, k, weights).masked_fill(scores(query, k, weights) > 0, -1.0),
        lambda k, m: scores(query, k, weights).masked_fill(m[:, 0], float("-inf")),
        lambda k, m: scores(query, k, weights).masked_fill(~m[:, 0], 0.0),
        lambda k, m: scores(query, k, weights).masked_fill(~m[:, 0], float("-inf")).topk(MOST).indices,
        lambda k, m: scores(query, k, weights).masked_fill(~m[:, 0], float("-inf")).topk(MOST, dim=-1).values,
        lambda k, m: best(scores(query, k, weights), m).long() + 1,
    ):
        assert torch.equal(way(given, mask), way(keys, plain))
    looked_at = scores(query, given, weights)
    looked_at += 1  # from now on it is no longer what was recorded
    assert torch.equal(best(looked_at, mask), best(scores(query, keys, weights) + 1, plain))
    with pytest.raises(RuntimeError, match="would change in place what a cache holds"):
        given.zero_()
    layer, given, _ = filled()
    layer.crop(-1)
    with pytest.raises(RuntimeError, match="keys or values of an earlier step"):
        given.sum()


def test_no_backward_pass() -> None:
    layer, new = IndexedLayer(block_size=4), numbers(2, 3, SIZE).requires_grad_()
    for keys in (layer.update_indexer(new), layer.update_index(new[:, None])):
        with pytest.raises(RuntimeError, match="cpu_attn has no backward pass"):
            keys.sum().backward()


def test_what_is_no_formula() -> None:
    """Then attention gets indices that torch made."""
    _, given, _ = filled(torch.bfloat16)
    query, weights = numbers(BATCH, 1, HEADS, SIZE, seed=1).bfloat16(), numbers(BATCH, 1, HEADS, seed=2)
    mask, other = masked(1, "left"), masked(1, "left")

    def taken(indices: Any, under: Any = mask) -> bool:
        return formula_of(indices, under, under.requests()) is not None

    assert taken(best(scores(query, given, weights), mask))
    assert not taken(best(scores(query, given, weights), mask), other)
    assert not taken(best(scores(query, given, weights), mask.dense()))
    assert not taken(best(scores(query.float() + 2**-12, given, weights), mask))  # which bfloat16 would round
    assert not taken(best(scores(query, given, weights, -1.0), mask))
    assert not taken(best(scores(query, given, weights, -1.0), mask).long())
    assert not taken(torch.zeros(BATCH, 1, MOST, dtype=torch.int32))
    with torch.autocast("cpu", torch.bfloat16):  # in which torch's products are others
        assert not taken(best(scores(query, given, weights), mask))
    indices = best(scores(query, given, weights), mask)
    indices.sum()
    assert not taken(indices)


@cache
def minimax() -> Any:
    config = hf_tiny.tiny(CONFIG_MAPPING["minimax_m3_vl_text"])
    sparse = {"num_hidden_layers": 3, "layer_types": ["full_attention", *["minimax_m3_sparse"] * 2]}
    sparse |= {"mlp_layer_types": ["dense"] * 3, "index_n_heads": config.num_key_value_heads}
    return hf_tiny.build(hf.MiniMaxM3VLForCausalLM, type(config)(**config.to_dict() | sparse))


def generate(implementation: str, pages: Any, inputs: Any, **options: Any) -> Any:
    made = minimax()
    made.set_attn_implementation(implementation)
    greedy = {"do_sample": False, "use_cache": True, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": 7}
    with torch.no_grad():
        return made.generate(**inputs, **{CACHE: pages}, **greedy | options).tolist()


@cache
def wanted() -> Any:
    return generate("eager", None, tokens(18, 18))


@pytest.mark.parametrize("block_size", [4, 2, 8])
def test_blocks(block_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model selects blocks of 4 keys: pages of 8 have no such blocks."""
    lists: list[Any] = []
    real = ops.attend
    monkeypatch.setattr(ops, "attend", lambda *x: (lists.append(x[6].selected_blocks), real(*x))[1])
    pages = PagedCache(minimax().config, block_size=block_size)
    assert generate("cpu_attn", pages, tokens(18, 18)) == wanted()
    of_blocks = [x for x in lists if x is not None]
    assert len(of_blocks) == (0 if block_size == 8 else len(lists) * 2 / 3)
    assert all(x.shape[1:] == (2, 2 * 4 // block_size) for x in of_blocks)
    assert pages.nbytes > 2 * pages.layers[1].index.nbytes > 0


def test_blocks_of_beams() -> None:
    options = {"num_beams": 2, "max_new_tokens": 5}
    pages, inputs = PagedCache(minimax().config, block_size=4), tokens(14, 14)
    assert generate("cpu_attn", pages, inputs, **options) == generate("eager", None, inputs, **options)
