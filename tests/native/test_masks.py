# SPDX-License-Identifier: Apache-2.0
"""Masks of a plan besides causal and window: spans, documents and trees of drafts. What they mean in every engine, isa
and dtype is among the cases (tables.MASKS); here are trees as what they are for, edges and errors."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import numpy as np
import pytest

import cpu_attn
from cpu_attn import reference

from ..cases.case import Case
from ..cases.formats import numpy_dtype
from ..cases.problem import build
from ..cases.run import plan_of
from ..cases.tables import MASKS
from ..cases.trees import TREES, ancestors, pack_tree
from ..harness.kernels import KERNELS
from ..harness.steps import attention_args, plan_args
from ..python.test_errors import refuses

ENGINES = [e.name for e in cpu_attn.engines() if e.available]
COMBINATIONS = [("native", isa, dtype) for isa, dtype in KERNELS] + [(e, "auto", "float32") for e in ENGINES]

# Drafts: 0 and 5 follow the context, the others one of those before them.
PARENTS = [-1, 0, 0, 1, 3, -1, 5, 2, 5]


def path(node: int) -> list[int]:
    return ([] if PARENTS[node] < 0 else path(PARENTS[node])) + [node]


@pytest.mark.parametrize(("engine", "isa", "dtype"), COMBINATIONS)
@pytest.mark.parametrize("window", [-1, 1, 3, 20])
def test_a_tree_gives_what_decoding_each_path_gives(engine: str, isa: str, dtype: str, window: int) -> None:
    """A node's row is that of its token, decoded behind the context and its ancestors alone."""
    rng, kind, context, n = np.random.default_rng(1), numpy_dtype(dtype), 37, len(PARENTS)
    key, value = rng.standard_normal((2, context + n, 2, 24), np.float32).astype(kind)
    query = rng.standard_normal((n, 6, 24), np.float32).astype(kind)
    cache = cpu_attn.PagedKVCache(4, 16, 2, 24, dtype, isa)
    cache.update(key, value, np.arange(context + n))
    start, lens = np.array([0, n], np.int32), np.array([context + n], np.int32)
    options: dict[str, Any] = {"sliding_window": window, "tree_mask": pack_tree(ancestors(PARENTS), n)}
    plan = cache.plan(start, lens, 6, engine=engine, **options)
    output = cache.attend(query, np.arange(4, dtype=np.int32)[None], plan)
    for leaf in set(range(n)) - set(PARENTS):
        nodes = path(leaf)
        along = [*range(context), *(context + i for i in nodes)]
        loc = np.array([0, len(nodes)], np.int32)
        want, _ = reference.attention(
            query[nodes], [key[along]], [value[along]], loc, [len(along)], 24**-0.5, sliding_window=window
        )
        assert reference.relative_rms(output[nodes], want, loc) <= reference.BUDGET[dtype], leaf


@pytest.mark.parametrize("name", list(MASKS))
def test_visible_pairs(name: str) -> None:
    problem = build(Case(name, **MASKS[name]))
    want = sum(int(problem.case.mask(r).sum()) for r in range(len(problem.seq_lens))) * problem.case.num_heads
    assert plan_of(problem, "auto", "native", True).visible_pairs == want


def one_head(q_len: int, seq_len: int, **masks: Any) -> tuple[Any, Any]:
    """Output of one request of one head, and its arrays."""
    rng, n = np.random.default_rng(2), -(-seq_len // 16)
    key, value = rng.standard_normal((2, seq_len, 1, 8), np.float32)
    query = rng.standard_normal((q_len, 1, 8), np.float32)
    cache = cpu_attn.PagedKVCache(n, 16, 1, 8)
    cache.update(key, value, np.arange(seq_len))
    start, lens = np.array([0, q_len], np.int32), np.array([seq_len], np.int32)
    plan = cache.plan(start, lens, 1, **masks)
    return cache.attend(query, np.arange(n, dtype=np.int32)[None], plan, scale=0.3), (query, key, value, start, lens)


def assert_like(output: Any, arrays: Any, **masks: Any) -> None:
    query, key, value, start, lens = arrays
    want, _ = reference.attention(query, [key], [value], start, lens, 0.3, **masks)
    assert (reference.relative_rms(output, want, start) <= reference.BUDGET["float32"]).all()


def test_a_chain_is_causal_however_long() -> None:
    assert_like(*one_head(2500, 2600, tree_mask=pack_tree(TREES["chain"](2500), 2500)))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_plan_keeps_its_own_copy(engine: str) -> None:
    tree = pack_tree(TREES["binary"](9), 9)
    wide = np.zeros((18, tree.shape[1] + 3), np.uint8)
    given = wide[::-2, : tree.shape[1]]
    given[...] = tree
    cache = cpu_attn.PagedKVCache(2, 16, 1, 8)
    start, lens = np.array([0, 9], np.int32), np.array([20], np.int32)
    spans, documents = {0: [[2, 9]]}, {0: [0, 10]}
    plans = [
        cache.plan(start, lens, 1, engine=engine, tree_mask=given),
        cache.plan(start, lens, 1, engine=engine, mm_prefix_range=spans, document_start_loc=documents),
    ]
    wide[...] = 0xFF
    spans[0][0][1], documents[0][1] = 15, 3
    rng = np.random.default_rng(4)
    key, value = rng.standard_normal((2, 20, 1, 8), np.float32)
    query = rng.standard_normal((9, 1, 8), np.float32)
    cache.update(key, value, np.arange(20))
    masks: list[dict[str, Any]] = [
        {"tree_mask": tree},
        {"mm_prefix_range": {0: [(2, 9)]}, "document_start_loc": {0: [0, 10]}},
    ]
    for plan, mask in zip(plans, masks, strict=True):
        output = cache.attend(query, np.array([[0, 1]], np.int32), plan, scale=0.3)
        assert_like(output, (query, key, value, start, lens), **mask)


def test_no_ranges_are_no_mask() -> None:
    for nothing in ({}, {0: []}, UserDict()):
        assert_like(*one_head(9, 20, mm_prefix_range=nothing))
    assert_like(*one_head(9, 20, document_start_loc={}))
    tree = pack_tree(TREES["chain"](9), 9)
    assert_like(*one_head(9, 20, mm_prefix_range={0: []}, document_start_loc={}, tree_mask=tree))


@pytest.mark.parametrize("flag", [1, 2, -1])
def test_any_flag_but_0_is_causal(flag: int) -> None:
    assert_like(*one_head(9, 20, causal=False, dynamic_causal=np.array([flag], np.int32)))


def test_numpy_numbers_and_mappings() -> None:
    spans = UserDict({np.int64(0): np.array([[3, 12], [14, 2**31 - 2]])})
    documents = {np.int32(0): np.array([0, 13, 2**31 - 1])}
    masks = {"mm_prefix_range": {0: [(3, 12), (14, 19)]}, "document_start_loc": {0: [0, 13]}}
    assert_like(*one_head(15, 20, mm_prefix_range=spans, document_start_loc=documents), **masks)


def test_a_span_up_to_the_largest_position() -> None:
    assert_like(*one_head(15, 20, mm_prefix_range={0: [(8, 2**31 - 1)]}), mm_prefix_range={0: [(8, 19)]})


def test_blocks_of_other_documents_are_not_asked_for() -> None:
    args = attention_args(document_start_loc={0: [0, 16]})
    args["block_table"][0, 0] = -5
    cpu_attn.attention_with_kv_cache(**args)
    args["block_table"][0, 1] = -5
    refuses(cpu_attn.attention_with_kv_cache, args, ValueError, "block_table", "position 1", "-5")


TREE = np.full((4, 1), 0xFF, np.uint8)
ERRORS = [
    ({"mm_prefix_range": [(0, 3)]}, TypeError, ["mm_prefix_range", "mapping", "list"]),
    ({"mm_prefix_range": {2: [(0, 3)]}}, ValueError, ["mm_prefix_range: request", "2", "0..1"]),
    ({"mm_prefix_range": {-1: []}}, ValueError, ["mm_prefix_range: request", "-1"]),
    ({"mm_prefix_range": {"0": []}}, TypeError, ["mm_prefix_range: request", "str"]),
    ({"mm_prefix_range": {0: 5}}, TypeError, ["mm_prefix_range[0]", "int"]),
    ({"mm_prefix_range": {0: [5]}}, TypeError, ["mm_prefix_range[0][0]", "int"]),
    ({"mm_prefix_range": {0: "ab"}}, TypeError, ["mm_prefix_range[0]", "str"]),
    ({"mm_prefix_range": {1: [(0, 3), (4, 5, 6)]}}, ValueError, ["mm_prefix_range[1][1]", "3 values"]),
    ({"mm_prefix_range": {1: [(0, 3.0)]}}, TypeError, ["mm_prefix_range[1][0][1]", "float"]),
    ({"mm_prefix_range": {1: [(4, 3)]}}, ValueError, ["mm_prefix_range[1][0][1]", "3 is outside 4.."]),
    ({"mm_prefix_range": {1: [(-1, 3)]}}, ValueError, ["mm_prefix_range[1][0][0]", "-1"]),
    ({"mm_prefix_range": {1: [(0, 2**31)]}}, ValueError, ["mm_prefix_range[1][0][1]", str(2**31)]),
    ({"mm_prefix_range": {1: [(0, 3), (3, 5)]}}, ValueError, ["mm_prefix_range[1][1][0]", "3 is outside 4.."]),
    ({"mm_prefix_range": {1: [(4, 5), (0, 2)]}}, ValueError, ["mm_prefix_range[1][1][0]", "0 is outside 6.."]),
    ({"document_start_loc": [0, 3]}, TypeError, ["document_start_loc", "mapping", "list"]),
    ({"document_start_loc": {5: [0]}}, ValueError, ["document_start_loc: request", "5", "0..1"]),
    ({"document_start_loc": {0: []}}, ValueError, ["document_start_loc[0]", "empty"]),
    ({"document_start_loc": {0: [1, 5]}}, ValueError, ["document_start_loc[0][0]", "1 is outside 0..0"]),
    ({"document_start_loc": {0: [0, 5, 5]}}, ValueError, ["document_start_loc[0][2]", "5 is outside 6.."]),
    ({"document_start_loc": {0: [0, 2**31]}}, ValueError, ["document_start_loc[0][1]", str(2**31)]),
    ({"document_start_loc": {0: [0, "x"]}}, TypeError, ["document_start_loc[0][1]", "str"]),
    (
        {"document_start_loc": {0: [0, 5]}, "mm_prefix_range": {0: [(0, 2), (4, 5)]}},
        ValueError,
        ["mm_prefix_range[0]", "(4, 5)", "document", "5"],
    ),
    (
        {"document_start_loc": {0: [0, 5]}, "seq_lens": np.array([2, 7], np.int32)},
        ValueError,
        ["seq_lens[0]", "2", "at least", "3"],
    ),
    ({"tree_mask": TREE, "mm_prefix_range": {0: [(0, 1)]}}, ValueError, ["tree_mask", "mm_prefix_range"]),
    ({"tree_mask": TREE, "document_start_loc": {1: [0]}}, ValueError, ["tree_mask", "document_start_loc"]),
    ({"tree_mask": TREE, "attention_chunk_size": 16}, ValueError, ["tree_mask", "attention_chunk_size"]),
    ({"tree_mask": TREE[:3]}, ValueError, ["tree_mask", "axis 0 is 3", "T = 4"]),
    ({"tree_mask": TREE[:, :0]}, ValueError, ["tree_mask", "request 0", "3 query tokens", "0 bits"]),
    ({"tree_mask": TREE[:, 0]}, ValueError, ["tree_mask", "1 axes", "2"]),
    ({"tree_mask": TREE.astype(bool)}, TypeError, ["tree_mask", "bool"]),
    ({"tree_mask": TREE.astype(np.int32)}, TypeError, ["tree_mask", "int32", "uint8"]),
    ({"tree_mask": np.full((4, 4), 1, np.uint8)[:, ::2]}, ValueError, ["tree_mask", "stride 2"]),
    ({"tree_mask": TREE, "causal": False}, ValueError, ["tree_mask", "request 0", "not causal"]),
    (
        {"tree_mask": TREE, "dynamic_causal": np.array([1, 0], np.int32)},
        ValueError,
        ["tree_mask", "request 1", "not causal"],
    ),
    ({"tree_mask": TREE, "seq_lens": np.array([20, 0], np.int32)}, ValueError, ["seq_lens[1]", "0", "at least", "1"]),
]


@pytest.mark.parametrize(("change", "error", "words"), ERRORS, ids=lambda x: str(x)[:60] if isinstance(x, dict) else "")
def test_errors(change: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    refuses(cpu_attn.get_scheduler_metadata, plan_args() | change, error, *words)


def test_a_mapping_that_names_a_request_twice() -> None:
    class Twice(UserDict[int, Any]):
        def items(self) -> Any:
            return [(0, [(0, 3)]), (np.int64(0), [(5, 6)])]

    refuses(
        cpu_attn.get_scheduler_metadata, plan_args() | {"mm_prefix_range": Twice()}, ValueError, "request 0", "twice"
    )


def test_alibi_with_a_tree_is_refused_also_after_the_same_call_without_one() -> None:
    slopes = {"alibi_slopes": np.ones(4, np.float32)}
    cpu_attn.attention_with_kv_cache(**attention_args() | slopes)
    refuses(cpu_attn.attention_with_kv_cache, attention_args(tree_mask=TREE) | slopes, ValueError, "alibi_slopes")
