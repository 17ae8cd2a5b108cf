# SPDX-License-Identifier: Apache-2.0
"""The indexer: which keys it selects, against float64 scores of the keys as they are stored."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import cpu_attn
from cpu_attn import reference, sparse
from cpu_attn._threads import threads

from ..cases.formats import integers, numpy_dtype, quantised
from ..harness.kernels import KERNELS, ONE_DTYPE
from ..python.test_errors import refuses

F32 = np.float32
LENS, STARTS = np.array([300, 70, 9, 0, 33], np.int32), np.array([0, 1, 21, 30, 30, 33], np.int32)
# What a cache holds, and how; of integers only packed ones are there.
CACHES = [("auto", "packed"), ("auto", "NHD"), ("auto", "HND"), ("fp8_e4m3", "packed"), ("fp8_e4m3", "NHD")]
CACHES += [("fp8_e5m2", "packed"), ("int8", "packed"), ("int6", "packed"), ("int4", "packed")]


class Indexer:
    """Keys of requests in a cache whose blocks lie in any order, NaN in what nobody may look at."""

    def __init__(
        self,
        dtype: str,
        isa: str = "auto",
        kv: str = "auto",
        layout: str = "packed",
        *,
        heads: int = 5,
        head_size: int = 32,
        block_size: int = 16,
        whole: bool = False,
        k_scale: float = 1.0,
    ) -> None:
        rng = np.random.default_rng([heads, head_size, block_size])
        kind = numpy_dtype(dtype)

        def numbers(*shape: int) -> NDArray[Any]:
            return rng.integers(-2, 3, shape).astype(F32) if whole else rng.standard_normal(shape, F32)

        blocks = -(-LENS // block_size)
        shape = sparse.get_index_cache_shape(
            int(blocks.sum()) + 2, block_size, head_size, dtype, isa, kv, kv_cache_layout=layout
        )
        memory = kind if kv == "auto" else np.dtype(np.uint8)
        cache = np.full(shape[0] * shape[1] * shape[2] * memory.itemsize, 0xFF, np.uint8).view(memory).reshape(shape)
        table = np.full((len(LENS), int(blocks.max()) + 1), 2**31 - 1, np.int32)
        order = iter(rng.permutation(shape[0])[1:])
        self.keys = [numbers(n, head_size).astype(kind) for n in LENS]
        how: dict[str, Any] = {"isa": isa, "kv_cache_dtype": kv, "kv_cache_layout": layout, "k_scale": k_scale}
        for r, n in enumerate(blocks):
            table[r, :n] = [next(order) for _ in range(n)]
            token = np.arange(LENS[r])
            slots = table[r, token // block_size].astype(np.int64) * block_size + token % block_size
            sparse.index_and_cache(self.keys[r], cache, slots, **how)
        if kv.startswith("int"):
            self.keys = [integers(k[:, None], kv)[:, 0] for k in self.keys]
        elif kv != "auto":
            self.keys = [quantised(k, kv, k_scale).astype(np.float64) * k_scale for k in self.keys]
        self.args = {
            "query": numbers(int(STARTS[-1]), heads, head_size).astype(kind),
            "index_cache": cache,
            "weights": numbers(int(STARTS[-1]), heads),
            "query_start_loc": STARTS,
            "seq_lens": LENS,
            "block_table": table,
            "topk_tokens": 24,
            "scale": 1.0 if whole else head_size**-0.5,
            **how,
        }

    def select(self, **changed: Any) -> NDArray[np.int32]:
        selected = sparse.select_tokens(**self.args | changed)
        assert selected.dtype == np.int32
        return selected

    def scores(self, causal: bool = True) -> list[NDArray[np.float64]]:
        """Of each query token those of the keys that it sees."""
        found = []
        for r, key in enumerate(self.keys):
            rows = slice(STARTS[r], STARTS[r + 1])
            scores = reference.index_scores(
                self.args["query"][rows], key, self.args["weights"][rows], self.args["scale"]
            )
            seen = len(key) - len(scores) + 1 + np.arange(len(scores)) if causal else np.full(len(scores), len(key))
            found += [own[: max(0, n)] for own, n in zip(scores, seen, strict=True)]
        return found

    def rounding(self) -> list[float]:
        """How far apart scores of a query token may be, and be as good as equal."""
        query, weights = np.abs(self.args["query"].astype(np.float64)), np.abs(self.args["weights"])
        largest = np.repeat([np.abs(k.astype(np.float64)).max(initial=0) for k in self.keys], np.diff(STARTS))
        terms = (query.sum(axis=2) * weights).sum(axis=1) * largest * self.args["scale"]
        return list(terms * (2**-14 if str(self.args["kv_cache_dtype"]).startswith("int") else 2**-20))


def best(scores: NDArray[np.float64], most: int) -> list[int]:
    """By sorting; of equal scores the first key."""
    return sorted(sorted(range(len(scores)), key=lambda j: (-scores[j], j))[:most])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("kv", "layout"), CACHES[:6])
@pytest.mark.parametrize(("isa", "dtype"), KERNELS)
def test_whole_numbers(isa: str, dtype: str, kv: str, layout: str, causal: bool) -> None:
    """Their scores are exact, and many are equal."""
    indexer = Indexer(dtype, isa, kv, layout, whole=True)
    for got, scores in zip(indexer.select(causal=causal), indexer.scores(causal), strict=True):
        want = best(scores, 24)
        assert got.tolist() == want + [-1] * (24 - len(want))


@pytest.mark.parametrize(("heads", "head_size", "block_size"), [(1, 1, 16), (64, 128, 64), (17, 33, 24), (8, 40, 5)])
@pytest.mark.parametrize(("kv", "layout"), CACHES)
@pytest.mark.parametrize(("isa", "dtype"), KERNELS)
def test_nobody_left_out_is_better(
    isa: str, dtype: str, kv: str, layout: str, heads: int, head_size: int, block_size: int
) -> None:
    k_scale = 0.25 if kv.startswith("fp8") else 1.0
    indexer = Indexer(dtype, isa, kv, layout, heads=heads, head_size=head_size, block_size=block_size, k_scale=k_scale)
    for got, scores, near in zip(indexer.select(), indexer.scores(), indexer.rounding(), strict=True):
        taken = got[got >= 0]
        assert len(taken) == min(24, len(scores)) and (got[len(taken) :] == -1).all()
        assert (np.diff(taken) > 0).all() and (taken < len(scores)).all()
        left = np.delete(scores, taken)
        assert not len(left) or scores[taken].min() >= left.max() - near


@pytest.mark.parametrize(("isa", "dtype"), KERNELS)
def test_documents(isa: str, dtype: str) -> None:
    """A query token selects from its own document; blocks before the first one that is needed may be missing."""
    indexer, borders = Indexer(dtype, isa, whole=True), {0: [0, 137, 250], 1: [0, 60], 4: [0, 7]}
    indexer.args["block_table"][0, : 250 // 16] = -1
    got, scores = indexer.select(document_start_loc=borders), indexer.scores()
    for r in range(len(LENS)):
        for t in range(STARTS[r], STARTS[r + 1]):
            first = max(b for b in borders.get(r, [0]) if b < len(scores[t]))
            want = [first + j for j in best(scores[t][first:], 24)]
            assert got[t].tolist() == want + [-1] * (24 - len(want))


@pytest.mark.parametrize("most", [1, 16, 300, 1000])
def test_as_many_as_asked(most: int) -> None:
    indexer = Indexer("float32", whole=True)
    for got, scores in zip(indexer.select(topk_tokens=most), indexer.scores(), strict=True):
        want = best(scores, most)
        assert got.tolist() == want + [-1] * (most - len(want))


def test_long() -> None:
    """Many pieces, and more query tokens than there is room for at once."""
    rng = np.random.default_rng(8)
    keys, queries = rng.integers(-2, 3, (9000, 16)).astype(F32), rng.integers(-2, 3, (260, 3, 16)).astype(F32)
    weights, table = rng.integers(-2, 3, (260, 3)).astype(F32), rng.permutation(282).astype(np.int32)[None]
    cache = np.zeros(sparse.get_index_cache_shape(282, 32, 16, "float32"), F32)
    token = np.arange(9000)
    sparse.index_and_cache(keys, cache, table[0, token // 32].astype(np.int64) * 32 + token % 32)
    step = np.array([0, 260], np.int32), np.array([9000], np.int32), table
    got = sparse.select_tokens(queries, cache, weights, *step, 700)
    scores = reference.index_scores(queries, keys, weights, 1.0)
    for i in (0, 1, 100, 258, 259):
        assert got[i].tolist() == best(scores[i, : 9000 - 259 + i], 700)
    with threads(3, forced=True):
        assert np.array_equal(sparse.select_tokens(queries, cache, weights, *step, 700), got)


@pytest.mark.parametrize(("isa", "dtype"), KERNELS)
def test_what_is_selected_is_a_request_s_own(isa: str, dtype: str) -> None:
    """Whatever the batch and the threads."""
    indexer = Indexer(dtype, isa, heads=9)
    want = indexer.select()
    with threads(3, forced=True):
        assert np.array_equal(indexer.select(), want)
    for r in range(len(LENS)):
        rows, (first, last) = slice(r, r + 1), STARTS[r : r + 2]
        one = {name: indexer.args[name][first:last] for name in ("query", "weights")}
        one |= {"seq_lens": LENS[rows], "block_table": indexer.args["block_table"][rows]}
        got = indexer.select(**one, query_start_loc=np.array([0, last - first], np.int32))
        assert np.array_equal(got, want[first:last])


@pytest.mark.parametrize(("isa", "dtype"), ONE_DTYPE)
def test_what_is_not_a_number_is_selected(isa: str, dtype: str) -> None:
    """A NaN is not overlooked, and stays in the rows that it belongs to."""
    indexer = Indexer(dtype, isa)
    want = indexer.select(topk_tokens=2)
    indexer.args["query"][5] = np.nan
    got = indexer.select(topk_tokens=2)
    assert got[5].tolist() == [0, 1]
    assert np.array_equal(np.delete(got, 5, axis=0), np.delete(want, 5, axis=0))


def test_from_keys_to_attention() -> None:
    """Dense attention, where all keys are selected; only the selected keys count, where some are."""
    rng = np.random.default_rng(9)
    indexer = Indexer("float32", heads=4)
    keys = [rng.standard_normal((n, 1, 24), F32) for n in LENS]
    query, table = rng.standard_normal((int(STARTS[-1]), 2, 24), F32), indexer.args["block_table"]
    kv_cache = np.full((len(indexer.args["index_cache"]), 16, 24), np.nan, F32)
    for r, n in enumerate(LENS):
        token = np.arange(n)
        kv_cache[table[r, token // 16], token % 16] = keys[r][:, 0]
    for most in (7, 1000):
        selected = indexer.select(topk_tokens=most)
        plan = cpu_attn.get_scheduler_metadata(
            *(len(LENS), 2, 1, 24, LENS, "float32", STARTS),
            head_size_v=16,
            kv_cache_layout="NHD",
            max_selected_tokens=most,
        )
        output = np.zeros((len(query), 2, 16), F32)
        cpu_attn.attention_mla(query, kv_cache, output, STARTS, LENS, 0.2, True, table, plan, selected_tokens=selected)
        values = [k[..., :16] for k in keys]
        only = selected if most == 7 else None
        want, _ = reference.attention(query, keys, values, STARTS, LENS, 0.2, selected_tokens=only)
        assert reference.relative_rms(output, want, STARTS).max() <= reference.BUDGET["float32"]


@pytest.mark.parametrize(
    ("spoiled", "error", "words"),
    [
        ({"query": np.zeros((33, 5, 31), F32)}, ValueError, ["index_cache", "axis 2 is 32", "expected 31"]),
        ({"query": np.zeros((33, 5, 32), np.float64)}, TypeError, ["query", "float64"]),
        ({"query": np.zeros((33, 0, 32), F32)}, ValueError, ["num_heads", "0"]),
        ({"query": np.zeros((32, 5, 32), F32)}, ValueError, ["weights", "axis 0 is 33", "T = 32"]),
        (
            {"query": np.zeros((32, 5, 32), F32), "weights": np.zeros((32, 5), F32)},
            ValueError,
            ["query", "axis 0 is 32", "query_start_loc[-1] = 33"],
        ),
        ({"query": np.float32(1)}, ValueError, ["query", "0 axes", "[T, num_heads, head_size]"]),
        ({"index_cache": np.zeros((99, 1, 16, 32), F32)}, ValueError, ["index_cache", "4 axes", "block_size, width]"]),
        (
            {"index_cache": np.zeros((99, 1, 16, 32), F32), "kv_cache_layout": "NHD"},
            ValueError,
            ["index_cache", "4 axes", "block_size, width]"],
        ),
        ({"weights": np.zeros((33, 4), F32)}, ValueError, ["weights", "axis 1 is 4", "num_heads = 5"]),
        ({"weights": np.zeros((32, 5), F32)}, ValueError, ["weights", "axis 0 is 32", "T = 33"]),
        ({"weights": np.zeros((33, 5), np.float16)}, TypeError, ["weights", "float16", "float32"]),
        ({"seq_lens": np.array([300, 70, 9, -1, 33], np.int32)}, ValueError, ["seq_lens[3]", "-1"]),
        ({"query_start_loc": np.array([0, 2, 1, 30, 30, 33], np.int32)}, ValueError, ["query_start_loc[2]", "1"]),
        ({"query_start_loc": np.array([1, 1, 21, 30, 30, 33], np.int32)}, ValueError, ["query_start_loc[0]"]),
        ({"block_table": np.full((5, 20), 10**6, np.int32)}, ValueError, ["block_table", "request 0", "1000000"]),
        ({"block_table": np.zeros((5, 3), np.int32)}, ValueError, ["block_table", "request 0", "needs 19", "3 col"]),
        ({"topk_tokens": 0}, ValueError, ["topk_tokens", "0"]),
        ({"scale": 0.0}, ValueError, ["scale", "0.0"]),
        ({"scale": float("nan")}, ValueError, ["scale", "nan"]),
        ({"isa": "sse9"}, ValueError, ["isa", "sse9"]),
        ({"k_scale": 0.5}, ValueError, ["k_scale", "0.5"]),
        ({"kv_cache_dtype": "int8/int4"}, ValueError, ["kv_cache_dtype", "names two"]),
        ({"kv_cache_dtype": "int8", "kv_cache_layout": "NHD"}, ValueError, ["kv_cache_layout", "int8"]),
        ({"kv_cache_dtype": "fp8"}, TypeError, ["index_cache", "float32"]),
        ({"causal": "yes"}, TypeError, ["causal"]),
        ({"document_start_loc": {5: [0]}}, ValueError, ["document_start_loc: request", "5"]),
        ({"document_start_loc": {0: [3]}}, ValueError, ["document_start_loc[0][0]", "3"]),
    ],
)
def test_select_tokens_refuses(spoiled: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    args = Indexer("float32").args
    sparse.select_tokens(**args)
    refuses(sparse.select_tokens, args | spoiled, error, *words)


@pytest.mark.parametrize("name", ["query", "index_cache", "weights", "query_start_loc", "seq_lens", "block_table"])
def test_select_tokens_wants_every_array(name: str) -> None:
    wrong = Indexer("float32").args | {name: None}
    refuses(sparse.select_tokens, wrong, TypeError, f"{name}: expected an array on the CPU, got NoneType")


@pytest.mark.parametrize(
    ("spoiled", "error", "words"),
    [
        *(
            ({name: None}, TypeError, [f"{name}: expected an array on the CPU, got NoneType"])
            for name in ("k", "index_cache", "slot_mapping")
        ),
        ({"k": np.zeros((3, 7), F32)}, ValueError, ["index_cache", "axis 2 is 8", "expected 7"]),
        ({"k": np.zeros((3, 1, 8), F32)}, ValueError, ["k", "3 axes, expected 2"]),
        ({"k": np.zeros((2, 8), F32)}, ValueError, ["slot_mapping", "axis 0 is 3", "T = 2"]),
        ({"k": np.zeros((3, 0), F32)}, ValueError, ["k: head size", "0"]),
        ({"slot_mapping": np.array([0, 64, 1])}, ValueError, ["slot_mapping[1]", "64"]),
        ({"slot_mapping": np.zeros(3, np.int32)}, TypeError, ["slot_mapping", "int32"]),
        ({"index_cache": np.zeros((4, 16, 8), np.float16)}, TypeError, ["index_cache", "float16"]),
        ({"index_cache": np.zeros((4, 0, 8), F32)}, ValueError, ["index_cache", "block_size"]),
        ({"index_cache": np.zeros((4, 32, 8), F32)[:, ::2]}, ValueError, ["index_cache", "axis 1", "stride 16"]),
        ({"index_cache": np.broadcast_to(F32(0), (4, 16, 8))}, ValueError, ["index_cache"]),
        ({"kv_cache_dtype": "int8", "kv_cache_layout": "HND"}, ValueError, ["kv_cache_layout", "int8"]),
    ],
)
def test_index_and_cache_refuses(spoiled: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    args: dict[str, Any] = {
        "k": np.ones((3, 8), F32),
        "index_cache": np.zeros((4, 16, 8), F32),
        "slot_mapping": np.array([0, -1, 63]),
    }
    sparse.index_and_cache(**args)
    assert args["index_cache"].sum() == 16
    refuses(sparse.index_and_cache, args | spoiled, error, *words)
    memory = np.zeros((4, 16, 8), F32)
    both = args | {"index_cache": memory, "k": memory[0, :3]}
    refuses(sparse.index_and_cache, both, ValueError, "index_cache: shares memory with k")
