# SPDX-License-Identifier: Apache-2.0
"""Which cases there are. What a case's fields mean and how it is made, run and judged: cases.py."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpu_attn.reference import Window, visible

DTYPES = ("float32", "float16", "bfloat16")
LEVELS = ("quick", "default", "full")
RANDOM_CASES = {"quick": 6, "default": 40, "full": 400}
# Multiply-adds of a random case, so that the plain C engine takes milliseconds.
RANDOM_WORK = 2e6
# Of an attn_bias: of each request and head, of each head, of each request with -inf among them, of all.
BIASES = ("heads", "batch", "holes", "one")


@dataclass(frozen=True)
class Case:
    """A call of attention_with_kv_cache in numbers. alibi: the largest slope, 0 for none; sinks: "moderate", "huge"
    (nothing else counts), "absent" (-inf), "mixed" or None; fill: a name from cases.FILLS; strided: K and V of a
    block interleaved in one array, tokens, output and lse as parts of wider rows; pieces: calls that write the
    cache; kv_cache_dtype: other than "auto", with scales (cases.SCALES); rotary: what is done to queries and keys on
    their way (rotation.py), or None; mm_prefix_range, document_start_loc: of each request, () for none; tree: of each
    request's query tokens, a name from TREES; selected: the share of its request's blocks that
    a kv head attends, at random, None for all without a selection; shared: for each request the number of an
    earlier one and how many of its blocks it starts with, which the plan is told; kv_cache_layout: of the caches
    (strided: in plain ones rows are apart, too, and blocks run backwards); latent: V is the first head_size_v columns
    of K; bias: an attn_bias, a name from BIASES, or None."""

    name: str
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 32
    head_size_v: int | None = None
    block_size: int = 16
    causal: bool = True
    dynamic_causal: tuple[int, ...] | None = None
    sliding_window: Window = -1
    alibi: float = 0.0
    softcap: float = 0.0
    sinks: str | None = None
    fill: str = "normal"
    strided: bool = False
    pieces: int = 1
    kv_cache_dtype: str = "auto"
    kv_cache_layout: str = "packed"
    latent: bool = False
    dtype: str = "float32"
    seed: int = 0
    rotary: str | None = None
    mm_prefix_range: tuple[tuple[tuple[int, int], ...], ...] | None = None
    document_start_loc: tuple[tuple[int, ...], ...] | None = None
    tree: str | None = None
    selected: float | None = None
    shared: tuple[tuple[int, int], ...] = ()
    bias: str | None = None

    @property
    def value_size(self) -> int:
        return self.head_size if self.head_size_v is None else self.head_size_v

    def mask(self, r: int) -> NDArray[np.bool_]:
        """[q_len, seq_len]: what request r sees."""
        causal = self.causal if self.dynamic_causal is None else bool(self.dynamic_causal[r])
        spans = self.mm_prefix_range[r] if self.mm_prefix_range else ()
        documents = self.document_start_loc[r] if self.document_start_loc else ()
        tree = TREES[self.tree](self.query_lens[r]) if self.tree else None
        return visible(self.query_lens[r], self.seq_lens[r], causal, self.sliding_window, spans, documents, tree)

    @property
    def masks(self) -> dict[str, Any]:
        """What get_scheduler_metadata takes of them."""
        found: dict[str, Any] = {
            name: {r: x for r, x in enumerate(kind) if x}
            for name, kind in (
                ("mm_prefix_range", self.mm_prefix_range),
                ("document_start_loc", self.document_start_loc),
            )
            if kind is not None
        }
        if self.tree:
            rows = [pack_tree(TREES[self.tree](n), max(self.query_lens)) for n in self.query_lens]
            found["tree_mask"] = np.concatenate(rows)
        return found

    def chosen(self, r: int) -> NDArray[np.bool_]:
        """[Hkv, blocks]: what request r has selected."""
        shape = self.num_kv_heads, -(-self.seq_lens[r] // self.block_size)
        share = 1.0 if self.selected is None else self.selected
        return np.random.default_rng([self.seed, zlib.crc32(self.name.encode()), r]).random(shape) < share

    def sees(self, r: int) -> NDArray[np.bool_]:
        """[q_len, Hkv, seq_len]: what each head of request r attends."""
        keys = self.chosen(r)[:, np.arange(self.seq_lens[r]) // self.block_size]
        return self.mask(r)[:, None] & keys


# ---- trees of query tokens: [n, n], does token i see token j? ----


def ancestors(parents: Sequence[int]) -> NDArray[np.bool_]:
    """Each token sees itself and its ancestors. parents[i] < i, -1: none."""
    tree = np.eye(len(parents), dtype=np.bool_)
    for i, parent in enumerate(parents):
        if parent >= 0:
            tree[i] |= tree[parent]
    return tree


def pack_tree(tree: NDArray[np.bool_], width: int, garbage: bool = True) -> NDArray[np.uint8]:
    """Rows of a tree_mask for up to `width` query tokens; bits that mean nothing are set."""
    wide = np.full((len(tree), -(-width // 8) * 8), garbage)
    wide[:, : len(tree)] = tree
    return np.packbits(wide, axis=1, bitorder="little")


def _random_bits(n: int) -> NDArray[np.bool_]:
    """Anything sees anything, or nothing; most do not see themselves."""
    tree = np.random.default_rng(n).random((n, n)) < 0.3
    tree[::4] = False
    return tree


TREES: dict[str, Callable[[int], NDArray[np.bool_]]] = {
    "chain": lambda n: ancestors(range(-1, n - 1)),
    "binary": lambda n: ancestors([(i - 1) // 2 for i in range(n)]),
    "star": lambda n: ancestors([-1] + [0] * (n - 1) if n else []),
    "forest": lambda n: ancestors([i - 3 if i >= 3 else -1 for i in range(n)]),
    "bits": _random_bits,
}


# A token at a time, a whole prompt, a chunk of one, and all of them in one step.
DECODE = {"query_lens": (1, 1, 1), "seq_lens": (1, 37, 130)}
PREFILL = {"query_lens": (37, 70), "seq_lens": (37, 70)}
CHUNK = {"query_lens": (19,), "seq_lens": (83,)}
MIXED = {"query_lens": (1, 20, 0, 7, 33), "seq_lens": (50, 20, 9, 100, 47)}
STEPS: dict[str, dict[str, Any]] = {"decode": DECODE, "prefill": PREFILL, "chunk": CHUNK, "mixed": MIXED}

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bidirectional": {"causal": False},
    "dynamic-causal": {"dynamic": True},
    "dynamic-causal-window": {"dynamic": True, "sliding_window": 9},
    "dynamic-over-bidirectional": {"dynamic": True, "causal": False},
    "window-1": {"sliding_window": 1},
    "window-20": {"sliding_window": 20},
    "window-20-bidirectional": {"sliding_window": 20, "causal": False},
    "window-left": {"sliding_window": (11, -1)},
    "window-left-bidirectional": {"sliding_window": (11, -1), "causal": False},
    "window-right": {"sliding_window": (-1, 4), "causal": False},
    "window-right-causal": {"sliding_window": (-1, 4)},
    "window-both": {"sliding_window": (7, 3), "causal": False},
    "window-self": {"sliding_window": (0, 0), "causal": False},
    "alibi": {"alibi": 0.5},
    "alibi-steep": {"alibi": 100.0},
    "alibi-bidirectional": {"alibi": 0.125, "causal": False},
    "softcap": {"softcap": 5.0},
    "softcap-low": {"softcap": 0.5},
    "softcap-high": {"softcap": 1000.0},
    "sinks": {"sinks": "moderate"},
    "sinks-huge": {"sinks": "huge"},
    "sinks-absent": {"sinks": "absent"},
    "sinks-mixed": {"sinks": "mixed"},
    "strided": {"strided": True},
    "pieces": {"pieces": 3},
    "everything": {
        "sliding_window": 29,
        "alibi": 0.25,
        "softcap": 20.0,
        "sinks": "mixed",
        "strided": True,
        "pieces": 4,
        "dynamic": True,
    },
}

EDGES: dict[str, dict[str, Any]] = {
    "no-requests": {"query_lens": (), "seq_lens": ()},
    "no-tokens": {"query_lens": (0, 0), "seq_lens": (0, 5)},
    "no-keys": {"query_lens": (3, 1), "seq_lens": (0, 8)},
    "no-keys-sinks": {"query_lens": (3, 1), "seq_lens": (0, 8), "sinks": "mixed"},
    "one-key": {"query_lens": (1,), "seq_lens": (1,), "num_heads": 1, "num_kv_heads": 1},
    "more-queries-than-keys": {"query_lens": (40, 5), "seq_lens": (9, 1)},
    "more-queries-than-keys-sinks": {"query_lens": (40, 5), "seq_lens": (9, 1), "sinks": "mixed"},
    "window-past-the-keys": {"query_lens": (40,), "seq_lens": (9,), "causal": False, "sliding_window": (5, 2)},
    "cross": {"query_lens": (3, 50, 1), "seq_lens": (60, 7, 20), "causal": False},
    "cross-sinks": {"query_lens": (3, 50, 1), "seq_lens": (60, 7, 20), "causal": False, "sinks": "moderate"},
    "many-requests": {"query_lens": (1, 2) * 20, "seq_lens": tuple(range(2, 42)), "block_size": 8},
}

LONG: dict[str, dict[str, Any]] = {
    "1023-1024-1025": {"query_lens": (1, 1, 1), "seq_lens": (1023, 1024, 1025)},
    "3000": {"query_lens": (1, 4, 1), "seq_lens": (3000, 2049, 1)},
    "3000-chunk": {"query_lens": (33, 1), "seq_lens": (3000, 70), "num_heads": 2, "num_kv_heads": 1},
    "3000-window": {"query_lens": (1, 9), "seq_lens": (3000, 1030), "sliding_window": 1100},
    "3000-sinks": {"query_lens": (1, 2), "seq_lens": (3000, 1025), "sinks": "moderate", "softcap": 10.0},
    "3000-equal": {"query_lens": (1, 3), "seq_lens": (3000, 1025), "fill": "equal"},
    "3000-dominant": {"query_lens": (1, 3), "seq_lens": (3000, 1100), "fill": "dominant"},
    "3000-leaping": {"query_lens": (1, 3), "seq_lens": (3000, 1100), "fill": "leaping"},
    "1100-block-5": {"query_lens": (1, 3), "seq_lens": (1100, 2070), "block_size": 5},
    "2100-block-24": {"query_lens": (2, 1), "seq_lens": (2100, 1031), "block_size": 24},
    "1500-prefill": {"query_lens": (1500,), "seq_lens": (1500,), "num_heads": 1, "num_kv_heads": 1},
}

QUANTISED: dict[str, dict[str, Any]] = {
    "plain": MIXED,
    "decode": DECODE,
    "everything": {**MIXED, **FEATURES["everything"]},
    "late-nan": {**MIXED, "fill": "late-nan"},
    "tiny": {**MIXED, "fill": "tiny"},
    "saturated": {**MIXED, "fill": "large"},
    "block-5": {**PREFILL, "block_size": 5, "head_size": 33, "head_size_v": 7},
    "3000": {"query_lens": (1, 4), "seq_lens": (3000, 2049), "head_size": 16, "num_heads": 2, "num_kv_heads": 1},
}

# Whole blocks, one register tile of rows: where narrow and plain caches may be unpacked on the way into the products.
FEW_ROWS: dict[str, dict[str, Any]] = {
    "mha": {"query_lens": (1, 1), "seq_lens": (300, 64), "num_heads": 2, "num_kv_heads": 2, "head_size": 64},
    "group-5": {"query_lens": (1,), "seq_lens": (290,), "num_heads": 5, "num_kv_heads": 1, "head_size": 128},
    "group-8": {"query_lens": (1,), "seq_lens": (290,), "num_heads": 8, "num_kv_heads": 1, "head_size": 64},
    "two-tokens": {"query_lens": (2,), "seq_lens": (290,), "num_heads": 3, "num_kv_heads": 1, "head_size": 64},
    "unequal": {"query_lens": (1,), "seq_lens": (290,), "head_size": 72, "head_size_v": 192, "softcap": 5.0},
    "bounded": {"query_lens": (1,), "seq_lens": (290,), "head_size": 64, "sliding_window": 200, "fill": "masked"},
    "heads": {"query_lens": (1, 2), "seq_lens": (2100, 300), "num_heads": 6, "num_kv_heads": 3, "sliding_window": 1500},
}

ROTARY: dict[str, dict[str, Any]] = {
    "neox": {**MIXED, "rotary": "neox"},
    "gptj": {**MIXED, "rotary": "gptj"},
    "neox-partial": {**MIXED, "rotary": "neox-partial", "head_size": 40},
    "neox-norm": {**MIXED, "rotary": "neox-norm", "head_size": 128},
    "everything": {**MIXED, **FEATURES["everything"], "rotary": "gptj-partial-norm", "head_size": 37},
    "alone": {**EDGES["more-queries-than-keys"], "rotary": "gptj-norm", "block_size": 5, "num_heads": 6},
    "fp8": {**MIXED, "rotary": "neox", "kv_cache_dtype": "fp8_e4m3", "pieces": 2},
}

# Tokens in spans and documents that reach past either end of the queries or of the keys.
SPANS = {
    **MIXED,
    "mm_prefix_range": (((0, 60),), ((0, 4), (5, 5), (6, 12), (18, 30)), (), ((80, 95),), ((0, 13), (20, 46))),
}
DOCUMENTS = {
    "query_lens": (1, 20, 0, 7, 33),
    "seq_lens": (50, 20, 9, 100, 47),
    "document_start_loc": ((0, 49), (0, 1, 2, 9, 25), (0,), (), (0, 16, 31, 32, 40)),
}
LONG_SPANS = {
    "query_lens": (1100, 9),
    "seq_lens": (1500, 2100),
    "mm_prefix_range": (((100, 900), (1000, 1300)), ((0, 2095),)),
    "document_start_loc": ((0, 950, 1400), (0,)),
    **{"num_heads": 1, "num_kv_heads": 1, "head_size": 16},
}
# Drafts that end in the middle of a group of 16 keys, at the end of one, in several score blocks.
TREE = {"query_lens": (8, 1, 0, 13, 5), "seq_lens": (50, 20, 9, 100, 5)}
LONG_TREE = {"query_lens": (40, 8), "seq_lens": (3000, 1030), "num_heads": 2, "num_kv_heads": 1, "head_size": 16}
EVERYTHING = {"softcap": 20.0, "sinks": "mixed", "strided": True, "pieces": 3}

MASKS: dict[str, dict[str, Any]] = {
    "spans": SPANS,
    "spans-window": {**SPANS, "sliding_window": 5},
    "spans-window-bidirectional": {**SPANS, "sliding_window": 5, "causal": False},
    "spans-dynamic-causal": {**SPANS, "sliding_window": (6, 2), "dynamic_causal": (0, 1, 1, 0, 1)},
    "spans-alibi": {**SPANS, "alibi": 0.25, **EVERYTHING},
    "spans-late-nan": {**SPANS, "fill": "late-nan"},
    "spans-masked": {**SPANS, "sliding_window": 3, "fill": "masked"},
    "spans-more-queries-than-keys": {
        "query_lens": (40, 5),
        "seq_lens": (9, 1),
        "mm_prefix_range": (((2, 7),), ((0, 3),)),
    },
    "prefix-lm": {**PREFILL, "mm_prefix_range": (((0, 20),), ((0, 69),))},
    "documents": DOCUMENTS,
    "documents-window": {**DOCUMENTS, "sliding_window": 4},
    "documents-bidirectional": {**DOCUMENTS, "causal": False},
    "documents-nan-value": {**DOCUMENTS, "fill": "nan-value"},
    "documents-masked": {**DOCUMENTS, "fill": "masked", "causal": False, "block_size": 5},
    "documents-spans": {**DOCUMENTS, "mm_prefix_range": ((), ((2, 8), (9, 24)), (), ((0, 99),), ((16, 30), (33, 39)))},
    "documents-everything": {**DOCUMENTS, "sliding_window": 7, "alibi": 0.25, **EVERYTHING},
    **{f"tree-{name}": {**TREE, "tree": name} for name in ("chain", "binary", "star", "forest", "bits")},
    **{f"tree-{name}-window": {**TREE, "tree": name, "sliding_window": 4} for name in ("chain", "binary", "bits")},
    "tree-window-wide": {**TREE, "tree": "forest", "sliding_window": (30, -1)},
    "tree-window-1": {**TREE, "tree": "forest", "sliding_window": 1},
    "tree-late-nan": {**TREE, "tree": "forest", "fill": "late-nan"},
    "tree-nan-value": {**TREE, "tree": "bits", "fill": "nan-value", "block_size": 5},
    "tree-masked": {**TREE, "tree": "bits", "fill": "masked", "sliding_window": 3},
    "tree-odd-query": {**TREE, "tree": "binary", "fill": "odd-query"},
    "tree-everything": {**TREE, "tree": "binary", "sliding_window": 29, **EVERYTHING},
    "tree-mha": {**TREE, "tree": "binary", "num_heads": 2, "head_size": 40, "sliding_window": 30},
    "tree-prompt": {"query_lens": (150,), "seq_lens": (150,), "tree": "binary", "sliding_window": 5},
}

BIAS: dict[str, dict[str, Any]] = {
    "heads": {**MIXED, "bias": "heads"},
    "batch": {**MIXED, "bias": "batch", "causal": False},
    "holes": {**MIXED, "bias": "holes", "block_size": 5},
    "one": {**PREFILL, "bias": "one", "sinks": "mixed", "strided": True},
    "holes-everything": {**MIXED, **FEATURES["everything"], "bias": "holes"},
    "spans": {**SPANS, "bias": "heads", "sliding_window": 5},
    "tree": {**TREE, "bias": "holes", "tree": "binary", "sliding_window": 30},
    "late-nan": {**MIXED, "bias": "heads", "fill": "late-nan"},
    "selected": {**MIXED, "bias": "heads", "selected": 0.5, "fill": "masked"},
    "int4": {**MIXED, "bias": "heads", "kv_cache_dtype": "int4", "head_size": 64},
    "few": {**FEW_ROWS["group-5"], "bias": "holes", "block_size": 32},
    "few-int8": {**FEW_ROWS["group-8"], "bias": "heads", "block_size": 32, "kv_cache_dtype": "int8"},
    "few-NHD": {**FEW_ROWS["heads"], "bias": "heads", "block_size": 32, "kv_cache_layout": "NHD"},
    "3000": {**LONG["3000-chunk"], "bias": "heads", "head_size": 16},
}
QUICK_BIAS = ("heads", "holes", "one", "holes-everything", "few-NHD", "3000")

# The unselected blocks of "masked" hold NaN, the ones that no head selects are not even in the block table.
SELECTED: dict[str, dict[str, Any]] = {
    "half": {**MIXED, "selected": 0.5, "fill": "masked"},
    "half-block-5": {**MIXED, "selected": 0.5, "fill": "masked", "block_size": 5},
    "half-late-nan": {**MIXED, "selected": 0.5, "fill": "late-nan"},
    "half-window": {**MIXED, "selected": 0.5, "fill": "masked", "sliding_window": 25, "block_size": 8},
    "half-bidirectional": {**MIXED, "selected": 0.5, "fill": "masked", "causal": False, "sliding_window": (9, 7)},
    "half-everything": {**MIXED, **FEATURES["everything"], "selected": 0.5, "fill": "masked", "block_size": 8},
    "half-fp8": {**MIXED, "selected": 0.5, "fill": "masked", "kv_cache_dtype": "fp8_e4m3", "alibi": 0.5},
    "none": {**MIXED, "selected": 0.0, "sinks": "mixed"},
    "all": {**MIXED, "selected": 1.0},
    "few-of-3000": {"query_lens": (1, 4, 1), "seq_lens": (3000, 2049, 1), "selected": 0.05, "fill": "masked"},
    "few-of-3000-sinks": {"query_lens": (40, 1), "seq_lens": (3000, 5), "selected": 0.1, "sinks": "moderate"},
}
LONG_SELECTED: dict[str, dict[str, Any]] = {
    "chunk": {"query_lens": (300, 1), "seq_lens": (2500, 1025), "selected": 0.2, "fill": "masked"},
    "prefill": {"query_lens": (1500,), "seq_lens": (1500,), "selected": 0.3, "fill": "masked", "alibi": 0.125},
    "window": {"query_lens": (1, 30), "seq_lens": (3001, 2047), "selected": 0.3, "sliding_window": 1101},
    "odd-window": {"query_lens": (2, 3), "seq_lens": (3000, 1100), "selected": 0.5, "sliding_window": 778},
    "block-128": {"query_lens": (1, 3), "seq_lens": (5000, 3000), "selected": 0.1, "fill": "masked", "block_size": 128},
    "block-24": {"query_lens": (2, 33), "seq_lens": (2100, 1031), "selected": 0.4, "fill": "masked", "block_size": 24},
    "block-1": {"query_lens": (2, 9), "seq_lens": (1100, 77), "selected": 0.5, "fill": "masked", "block_size": 1},
    "fp8": {"query_lens": (1, 20), "seq_lens": (2100, 1500), "selected": 0.3, "kv_cache_dtype": "fp8_e5m2"},
    "leaping": {"query_lens": (1, 3), "seq_lens": (3000, 1100), "selected": 0.3, "fill": "leaping"},
    "sparse": {"query_lens": (1, 1), "seq_lens": (9000, 4000), "selected": 0.01, "fill": "masked"},
}

# All have 1024 keys in common, three of them 2048; one that stops within a segment, one for itself; a chunk, and one
# that has no keys besides.
PREFIXES: dict[str, Any] = {
    "query_lens": (1, 1, 2, 1, 3, 1, 0, 1),
    "seq_lens": (2100, 3100, 2052, 1500, 1027, 1100, 1200, 2048),
    "shared": ((0, 0), (0, 130), (1, 128), (0, 80), (1, 64), (5, 0), (0, 64), (2, 128)),
    "head_size": 16,
    "num_heads": 2,
    "num_kv_heads": 1,
}
CASCADE: dict[str, dict[str, Any]] = {
    "tree": {},
    "everything": {**FEATURES["everything"], "sliding_window": -1},
    "window": {"sliding_window": 1800},
    "window-right": {"sliding_window": (-1, 4), "causal": False},
    "dynamic-causal": {"dynamic": True},
    "heads": {"num_heads": 10, "num_kv_heads": 2, "head_size": 20, "head_size_v": 24},
    "wide-group": {"num_heads": 16, "num_kv_heads": 1},
    "leaping": {"fill": "leaping"},
    "dominant": {"fill": "dominant"},
    "late-nan": {"fill": "late-nan"},
    "odd-query": {"fill": "odd-query"},
    "masked": {"fill": "masked", "sliding_window": 1800},
    "fp8_e4m3": {"kv_cache_dtype": "fp8_e4m3", "alibi": 0.25},
    # 1024 is no multiple of these
    "block-24": {"block_size": 24, "shared": ((0, 0), (0, 86), (1, 85), (0, 50), (1, 42), (5, 0), (0, 43), (2, 85))},
    "block-5": {"block_size": 5, "shared": ((0, 0), (0, 413), (1, 410), (0, 204), (1, 205), (5, 0), (0, 205), (2, 9))},
    "many": {"query_lens": (1,) * 40, "seq_lens": tuple(range(1030, 1070)), "shared": ((0, 0), *[(0, 64)] * 39)},
}

PLAIN: dict[str, dict[str, Any]] = {
    "mixed": MIXED,
    "decode": DECODE,
    "everything": {**MIXED, **FEATURES["everything"]},
    "window": {**MIXED, "sliding_window": 20},
    "late-nan": {**MIXED, "fill": "late-nan"},
    "nan-value": {**MIXED, "fill": "nan-value", "sliding_window": (2, -1), "causal": False},
    "masked": {**MIXED, "fill": "masked", "sliding_window": 9},
    "block-5": {**PREFILL, "block_size": 5, "head_size": 33, "head_size_v": 7},
    "block-1": {**CHUNK, "block_size": 1, "head_size": 3},
    "block-24": {**CHUNK, "block_size": 24, "head_size": 20, "strided": True},
    "block-128": {**MIXED, "block_size": 128, "head_size": 80, "pieces": 2},
    "equal-axes": {**PREFILL, "block_size": 2, "num_kv_heads": 2},
    "fp8": {**MIXED, "kv_cache_dtype": "fp8_e4m3"},
    "fp8-everything": {**MIXED, **FEATURES["everything"], "kv_cache_dtype": "fp8_e5m2"},
    "fp8-block-5": {**PREFILL, "block_size": 5, "head_size": 33, "head_size_v": 7, "kv_cache_dtype": "fp8_e4m3"},
    "fp8-auto": {**MIXED, "kv_cache_dtype": "fp8_e4m3/auto"},
    "auto-fp8": {**MIXED, "kv_cache_dtype": "auto/fp8_e5m2", "head_size": 64},
    "tree": MASKS["tree-everything"],
    "documents": MASKS["documents-masked"],
    "selected": SELECTED["half"],
    "selected-block-5": SELECTED["half-block-5"],
    "selected-of-3000": SELECTED["few-of-3000"],
    "cascade": {**PREFIXES, **CASCADE["everything"]},
    "cascade-block-24": {**PREFIXES, **CASCADE["block-24"]},
    "3000": {"query_lens": (1, 4), "seq_lens": (3000, 2049), "head_size": 16, "num_heads": 2, "num_kv_heads": 1},
}

# DeepSeek's latent attention in small, and as it is.
_MLA: dict[str, Any] = {"kv_cache_layout": "NHD", "latent": True, "num_kv_heads": 1}
LATENT: dict[str, dict[str, Any]] = {
    "decode": {**DECODE, **_MLA, "num_heads": 16, "head_size": 72, "head_size_v": 64},
    "mixed": {**MIXED, **_MLA, "num_heads": 16, "head_size": 72, "head_size_v": 64, "strided": True},
    "hnd": {**CHUNK, **_MLA, "num_kv_heads": 2, "head_size": 40, "head_size_v": 31, "kv_cache_layout": "HND"},
    "masked": {**MIXED, **_MLA, "head_size": 24, "head_size_v": 16, "fill": "masked", "sliding_window": 9},
    "late-nan": {**MIXED, **_MLA, "head_size": 24, "head_size_v": 16, "fill": "late-nan"},
    "fp8": {**MIXED, **_MLA, "head_size": 24, "head_size_v": 16, "kv_cache_dtype": "fp8_e4m3"},
    "more-rows": {**DECODE, **_MLA, "num_heads": 300, "head_size": 24, "head_size_v": 16},
    "576-512": {"query_lens": (1,), "seq_lens": (70,), **_MLA, "num_heads": 16, "head_size": 576, "head_size_v": 512},
}

HEAD_SIZES = (1, 2, 3, 8, 16, 20, 64, 80, 96, 100, 112, 128, 192, 256, 512, 576)
QUICK_HEAD_SIZES = (1, 3, 20, 64, 128)
UNEQUAL_HEAD_SIZES = ((64, 32), (24, 40), (192, 128), (576, 512), (7, 5), (1, 16), (33, 1))
BLOCK_SIZES = (1, 5, 8, 16, 24, 32, 48, 64, 128)
QUICK_BLOCK_SIZES = (1, 5, 24, 128)
HEADS = ((1, 1), (3, 3), (3, 1), (5, 1), (14, 2), (6, 3), (8, 1), (32, 2), (20, 4), (71, 1))
QUICK_HEADS = ((3, 3), (6, 2), (5, 1), (14, 2))
QUICK_PLAIN = ("mixed", "everything", "nan-value", "block-5", "fp8-everything", "selected", "cascade", "3000")
QUICK_MASKS = (
    "spans-window",
    "spans-alibi",
    "documents-masked",
    "documents-everything",
    "tree-late-nan",
    "tree-everything",
    "tree-bits-window",
    "tree-nan-value",
)
LARGE_SCORES = ("negative", "rising", "leaping", "falling", "dominant")
FILLS = ("equal", "tiny", "large", "odd-query", "late-nan", *LARGE_SCORES)


def _case(name: str, step: dict[str, Any], **fields: Any) -> Case:
    fields = {**step, **fields}
    if fields.pop("dynamic", False):
        fields["dynamic_causal"] = tuple((r + 1) % 2 for r in range(len(fields["query_lens"])))
    return Case(name, **fields)


def _boundary(block_size: int) -> dict[str, Any]:
    """Requests that end one before, at and one after the ends of their first and second block."""
    ends = sorted({max(1, n * block_size + d) for n in (1, 2) for d in (-1, 0, 1)})
    return {"query_lens": tuple(min(n, 1 + n % 3) for n in ends), "seq_lens": tuple(ends)}


def _quick() -> Iterator[Case]:
    for name, feature in FEATURES.items():
        yield _case(f"mixed-{name}", MIXED, **feature)
    for step in ("decode", "prefill", "chunk"):
        yield _case(f"{step}-plain", STEPS[step])
    yield from (_case(name, edge) for name, edge in EDGES.items())
    for size in QUICK_HEAD_SIZES:
        yield _case(f"chunk-head-{size}", CHUNK, head_size=size)
    yield _case("decode-head-192-128", DECODE, head_size=192, head_size_v=128)
    yield _case("chunk-head-24-40", CHUNK, head_size=24, head_size_v=40)
    for size in QUICK_BLOCK_SIZES:
        yield _case(f"block-{size}", _boundary(size), block_size=size, head_size=16)
    for heads, kv_heads in QUICK_HEADS:
        yield _case(f"mixed-heads-{heads}-{kv_heads}", MIXED, num_heads=heads, num_kv_heads=kv_heads, head_size=24)
    for fill in FILLS:
        yield _case(f"mixed-fill-{fill}", MIXED, fill=fill)
    yield _case("mixed-fill-masked", MIXED, fill="masked", sliding_window=9)
    for name, fields in QUANTISED.items():
        yield _case(f"fp8_e4m3-{name}", fields, kv_cache_dtype="fp8_e4m3")
    yield _case("fp8_e5m2-everything", QUANTISED["everything"], kv_cache_dtype="fp8_e5m2")
    for name, fields in QUANTISED.items():
        yield _case(f"int4-{name}", fields, kv_cache_dtype="int4")
    yield _case("int8-3000", QUANTISED["3000"], kv_cache_dtype="int8")
    for name, fields in FEW_ROWS.items():
        yield _case(f"int4-few-{name}", fields, kv_cache_dtype="int4", block_size=32)
    for kind in ("int8/int4", "int4/auto", "auto/int8", "fp8/int8"):
        yield _case(f"{kind.replace('/', '-')}-mixed", MIXED, kv_cache_dtype=kind, head_size=64)
    for name, fields in ROTARY.items():
        yield _case(f"rotary-{name}", fields)
    for name in QUICK_PLAIN:
        yield _case(f"NHD-{name}", PLAIN[name], kv_cache_layout="NHD")
    for name in ("group-5", "two-tokens", "heads"):
        yield _case(f"NHD-few-{name}", FEW_ROWS[name], kv_cache_layout="NHD", block_size=32)
    yield _case("NHD-few-cascade", {**PLAIN["cascade"], "head_size": 64}, kv_cache_layout="NHD")
    yield _case("HND-mixed", MIXED, kv_cache_layout="HND")
    yield _case("HND-everything", PLAIN["everything"], kv_cache_layout="HND")
    yield from (_case(f"latent-{name}", fields) for name, fields in LATENT.items())
    yield _case("decode-fill-masked-block-64", DECODE, fill="masked", sliding_window=25, block_size=64)
    yield _case("mixed-fill-nan-value", MIXED, fill="nan-value", sliding_window=(2, -1), causal=False)
    for name in QUICK_MASKS:
        yield _case(f"masks-{name}", MASKS[name])
    yield _case("int4-masks-tree-late-nan", MASKS["tree-late-nan"], kv_cache_dtype="int4", head_size=64)
    for name in ("1023-1024-1025", "3000"):
        yield _case(f"long-{name}", LONG[name], head_size=16, num_heads=2, num_kv_heads=1)
    for name, fields in SELECTED.items():
        yield _case(f"selected-{name}", fields)
    for name in ("tree", "everything", "block-24"):
        yield _case(f"cascade-{name}", PREFIXES, **CASCADE[name])
    for name in QUICK_BIAS:
        yield _case(f"bias-{name}", BIAS[name])


def _default() -> Iterator[Case]:
    for name, fields in QUANTISED.items():
        if name != "3000":
            yield _case(f"int8-{name}", fields, kv_cache_dtype="int8")
    for kind in ("fp8_e5m2", "int8", "int4/auto"):
        for name, fields in FEW_ROWS.items():
            yield _case(f"{kind.replace('/', '-')}-few-{name}", fields, kv_cache_dtype=kind, block_size=32)
    for name, fields in FEW_ROWS.items():
        yield _case(f"HND-few-{name}", fields, kv_cache_layout="HND", block_size=32, strided=True)
    for name, fields in PLAIN.items():
        if name not in QUICK_PLAIN:
            yield _case(f"NHD-{name}", fields, kv_cache_layout="NHD")
    for name, fields in MASKS.items():
        if name not in QUICK_MASKS:
            yield _case(f"masks-{name}", fields)
    for name in ("spans", "documents-masked", "tree-everything", "tree-late-nan"):
        yield _case(f"fp8_e4m3-masks-{name}", MASKS[name], kv_cache_dtype="fp8_e4m3")
        if name != "tree-late-nan":
            yield _case(f"int4-masks-{name}", MASKS[name], kv_cache_dtype="int4", head_size=64)
    for step in ("decode", "prefill", "chunk"):
        for name, feature in FEATURES.items():
            yield _case(f"{step}-{name}", STEPS[step], **feature)
        for fill in FILLS:
            yield _case(f"{step}-fill-{fill}", STEPS[step], fill=fill, head_size=24)
        yield _case(f"{step}-fill-masked", STEPS[step], fill="masked", sliding_window=(6, -1), head_size=24)
    for size in HEAD_SIZES:
        for step in ("decode", "chunk"):
            yield _case(f"{step}-head-{size}", STEPS[step], head_size=size, num_heads=2, num_kv_heads=1)
    for size, size_v in UNEQUAL_HEAD_SIZES:
        for step in ("decode", "chunk"):
            yield _case(f"{step}-head-{size}-{size_v}", STEPS[step], head_size=size, head_size_v=size_v)
    for size in BLOCK_SIZES:
        yield _case(f"block-{size}", _boundary(size), block_size=size, head_size=16)
        yield _case(f"block-{size}-odd-head", _boundary(size), block_size=size, head_size=5, pieces=3, strided=True)
        yield _case(f"block-{size}-mixed", MIXED, block_size=size, head_size=16, sliding_window=21)
    for heads, kv_heads in HEADS:
        for step in ("decode", "mixed"):
            shape = {"num_heads": heads, "num_kv_heads": kv_heads}
            yield _case(f"{step}-heads-{heads}-{kv_heads}", STEPS[step], **shape, head_size=24)
    for name, fields in QUANTISED.items():
        yield _case(f"fp8_e5m2-{name}", fields, kv_cache_dtype="fp8_e5m2")
    for name, feature in FEATURES.items():
        yield _case(f"fp8-{name}", MIXED, **feature, kv_cache_dtype="fp8", num_heads=6, head_size=24)
    for size in HEAD_SIZES:
        yield _case(f"fp8-head-{size}", CHUNK, head_size=size, kv_cache_dtype="fp8")
    for size in BLOCK_SIZES:
        yield _case(f"fp8-block-{size}", _boundary(size), block_size=size, head_size=20, kv_cache_dtype="fp8")
    for kind in ("int8", "int4", "int4/int8", "auto/fp8_e5m2"):
        short = kind.replace("/", "-")
        for name, feature in FEATURES.items():
            yield _case(f"{short}-{name}", MIXED, **feature, kv_cache_dtype=kind, num_heads=6, head_size=40)
        for size in HEAD_SIZES:
            yield _case(f"{short}-head-{size}", CHUNK, head_size=size, kv_cache_dtype=kind)
        for size in BLOCK_SIZES:
            yield _case(f"{short}-block-{size}", _boundary(size), block_size=size, head_size=20, kv_cache_dtype=kind)
        for fill in ("late-nan", "nan-value", "masked"):
            window = (6, -1)
            yield _case(
                f"{short}-fill-{fill}", MIXED, fill=fill, head_size=64, kv_cache_dtype=kind, sliding_window=window
            )
    for size in HEAD_SIZES[1:]:
        for rotary in ("neox-norm", "gptj-partial"):
            yield _case(f"rotary-{rotary}-head-{size}", CHUNK, rotary=rotary, head_size=size)
    yield _case("rotary-fp8_e5m2", PREFILL, rotary="gptj", kv_cache_dtype="fp8_e5m2", head_size=33, strided=True)
    for name, fields in MASKS.items():
        yield _case(f"fp8-masks-{name}", fields, kv_cache_dtype="fp8", num_heads=6, head_size=24)
        yield _case(f"masks-{name}-head-33-7", fields, head_size=33, head_size_v=7, block_size=24)
    for left in (-1, 20, 1100):
        yield _case(f"long-spans-window-{left}", LONG_SPANS, sliding_window=left)
        for tree in ("binary", "bits"):
            yield _case(f"long-tree-{tree}-window-{left}", LONG_TREE, tree=tree, sliding_window=left)
    for name, fields in PLAIN.items():
        yield _case(f"HND-{name}", fields, kv_cache_layout="HND")
    for size in HEAD_SIZES:
        yield _case(f"NHD-head-{size}", CHUNK, head_size=size, kv_cache_layout="NHD")
        yield _case(f"HND-head-{size}-decode", DECODE, head_size=size, kv_cache_layout="HND", strided=True)
    for size in BLOCK_SIZES:
        yield _case(f"NHD-block-{size}", _boundary(size), block_size=size, head_size=20, kv_cache_layout="NHD")
    for heads in (16, 128):
        sizes = {**_MLA, "num_heads": heads, "head_size": 576, "head_size_v": 512}
        yield _case(f"latent-decode-576-512-heads-{heads}", DECODE, **sizes)
        yield _case(f"latent-chunk-576-512-heads-{heads}", {"query_lens": (7,), "seq_lens": (45,)}, **sizes)
    for name, fields in LONG.items():
        yield _case(f"long-{name}", {"head_size": 16, "num_heads": 2, "num_kv_heads": 1, **fields})
    for name, fields in LONG_SELECTED.items():
        yield _case(f"selected-{name}", {"head_size": 16, **fields})
    for name, feature in FEATURES.items():
        yield _case(f"selected-{name}", MIXED, **feature, selected=0.4, num_heads=6, head_size=24, block_size=8)
    for name, fields in CASCADE.items():
        yield _case(f"cascade-{name}", PREFIXES, **fields)
    for name, fields in BIAS.items():
        if name not in QUICK_BIAS:
            yield _case(f"bias-{name}", fields)
    yield _case("bias-cascade", PREFIXES, **CASCADE["everything"], bias="holes")
    for name, feature in FEATURES.items():
        yield _case(f"bias-mixed-{name}", MIXED, **feature, bias="holes", num_heads=6, head_size=24)


def _full() -> Iterator[Case]:
    for name, feature in FEATURES.items():
        for size in (5, 64, 80, 128):
            for heads, kv_heads in ((3, 3), (7, 1), (8, 2)):
                shape = {"head_size": size, "num_heads": heads, "num_kv_heads": kv_heads}
                yield _case(f"full-{name}-head-{size}-heads-{heads}-{kv_heads}", MIXED, **shape, **feature)
    for size in HEAD_SIZES:
        for block_size in (8, 16, 24, 128):
            shape = {"head_size": size, "block_size": block_size, "num_heads": 3, "num_kv_heads": 1}
            yield _case(f"full-head-{size}-block-{block_size}", _boundary(block_size), **shape)
    for fill in FILLS:
        for size in (1, 64, 192):
            yield _case(f"full-fill-{fill}-head-{size}", MIXED, fill=fill, head_size=size, block_size=32)
        yield _case(f"full-fill-{fill}-NHD", MIXED, fill=fill, head_size=64, kv_cache_layout="NHD", strided=True)
        yield _case(f"full-fill-{fill}-HND", DECODE, fill=fill, head_size=24, kv_cache_layout="HND", block_size=24)
    for size in (1, 5, 64, 128, 192):
        for block_size in (8, 16, 24, 128):
            shape = {"head_size": size, "block_size": block_size, "num_heads": 7}
            name = f"full-selected-head-{size}-block-{block_size}"
            yield _case(name, LONG["3000-chunk"] | shape, selected=0.5)
    one_head = {"num_heads": 1, "num_kv_heads": 1, "head_size": 16}
    yield _case("full-70000", {"query_lens": (1, 1), "seq_lens": (70000, 65537)}, **one_head)
    yield _case("full-70000-mqa", {"query_lens": (3,), "seq_lens": (70000,)}, num_kv_heads=1, sinks="moderate")
    shared = {"query_lens": (1, 2, 1), "seq_lens": (70000, 69000, 65537), "shared": ((0, 0), (0, 4200), (1, 4097))}
    yield _case("full-70000-cascade", shared, **one_head)
    yield _case("full-70000-window", {"query_lens": (2,), "seq_lens": (70000,)}, **one_head, sliding_window=5000)


def _random_step(rng: np.random.Generator) -> dict[str, Any]:
    requests = int(rng.integers(1, 6))
    longest = int(rng.choice([8, 40, 120, 300]))
    seq_lens = [int(n) for n in rng.integers(0, longest + 1, requests)]
    query_lens = [int(rng.choice([1, 1, n, int(rng.integers(0, n + 1)), int(rng.integers(0, 9))])) for n in seq_lens]
    return {"query_lens": tuple(query_lens), "seq_lens": tuple(seq_lens)}


def _random_mask(rng: np.random.Generator, requests: int) -> dict[str, Any]:
    causal = bool(rng.random() < 0.7)
    left, right = (int(n) for n in rng.integers(-1, 40, 2))
    windows: list[Window] = [-1, -1, int(rng.integers(1, 60)), (left, right), (left, -1), (-1, right)]
    dynamic = tuple(int(n) for n in rng.integers(0, 2, requests)) if rng.random() < 0.2 else None
    window = windows[int(rng.integers(len(windows)))]
    return {"causal": causal, "sliding_window": window, "dynamic_causal": dynamic}


def _random_cuts(rng: np.random.Generator, seq_len: int) -> list[int]:
    return sorted({int(n) for n in rng.integers(0, seq_len + 20, int(rng.integers(0, 7)))})


def _random_masks(rng: np.random.Generator, case: Case) -> dict[str, Any]:
    """Spans, documents with spans in them, or a tree, where the case can have it."""
    kind = str(rng.choice(["", "", "", "spans", "documents", "tree"]))
    cuts = [[0, *_random_cuts(rng, n)] for n in case.seq_lens]
    spans = [[(a, b - 1) for a, b in pairwise(c) if b > a and rng.random() < 0.7] for c in cuts]
    fits = all(q <= s for q, s in zip(case.query_lens, case.seq_lens, strict=True))
    if kind == "tree" and fits and case.causal and case.dynamic_causal is None and not case.alibi:
        return {"tree": str(rng.choice(list(TREES)))}
    if kind == "documents" and fits:
        keep = [sorted({0, *(c for c in some if rng.random() < 0.5)}) for some in cuts]
        return {"document_start_loc": tuple(map(tuple, keep)), "mm_prefix_range": tuple(map(tuple, spans))}
    return {"mm_prefix_range": tuple(map(tuple, spans))} if kind == "spans" else {}


def _random(index: int, seed: int) -> Case:
    """Anything with anything, but neither ALiBi nor scales of their own on scores so large that float32 cannot hold
    them any more."""
    rng = np.random.default_rng([seed, index])
    step = _random_step(rng)
    mask = _random_mask(rng, len(step["seq_lens"]))
    kv_heads, group = int(rng.choice([1, 1, 2, 3])), int(rng.choice([1, 2, 3, 4, 5, 7, 8, 16]))
    pairs = sum(q * s for q, s in zip(step["query_lens"], step["seq_lens"], strict=True))
    most = RANDOM_WORK / (max(pairs, 1) * kv_heads * group)
    least = 1 if kv_heads * group >= 8 else 8  # a lone bfloat16 may be 2**-8 off, which is all of the budget
    sizes = [size for size in HEAD_SIZES if least <= size <= most] or [least]
    fill = str(rng.choice(["normal"] * 6 + ["masked", *FILLS]))
    layout = str(np.random.default_rng([seed, index, 1]).choice(["packed", "packed", "packed", "HND", "NHD"]))
    bias = [None, None, None, None, *BIASES][int(np.random.default_rng([seed, index, 2]).integers(8))]
    slope = 0.0 if fill in LARGE_SCORES else float(rng.choice([0.0, 0.0, 0.0625]))
    kinds = ["auto"] * 5 + ["fp8_e4m3", "fp8_e5m2"]
    kinds += ["auto/int4"] if fill in LARGE_SCORES else ["int8", "int4", "int8/int4", "int4/auto"]
    case = Case(
        f"random-{index}",
        **step,
        **mask,
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_size=int(rng.choice(sizes)),
        head_size_v=int(rng.choice(sizes)) if rng.random() < 0.2 else None,
        block_size=int(rng.choice(BLOCK_SIZES)),
        alibi=slope,
        softcap=float(rng.choice([0.0, 0.0, 3.0, 20.0])),
        sinks=[None, None, "moderate", "mixed", "absent", "huge"][int(rng.integers(6))],
        fill=fill,
        strided=bool(rng.random() < 0.3),
        pieces=int(rng.integers(1, 4)),
        kv_cache_dtype=str(rng.choice(kinds)),
        selected=[None, None, None, 0.2, 0.7][int(rng.integers(5))],
        bias=None if fill in LARGE_SCORES else bias,
    )
    case = dataclasses.replace(case, **_random_masks(rng, case))
    rotary = str(rng.choice(["", "", "", "neox", "gptj", "neox-partial", "gptj-partial", "neox-norm", "gptj-norm"]))
    odd = fill != "normal" or case.head_size < 2 or "int" in case.kv_cache_dtype
    odd = odd or (case.kv_cache_dtype != "auto" and "norm" in rotary)
    case = dataclasses.replace(case, rotary=None if odd else rotary or None)
    refused = case.rotary or "int" in case.kv_cache_dtype
    return case if refused else dataclasses.replace(case, kv_cache_layout=layout)


def cases(level: str = "default", dtype: str = "float32", seed: int = 0) -> list[Case]:
    """The cases of a level ("quick", "default" or "full": each holds the one before), in a fixed order, names
    unique. seed: of their arrays, and of what the random ones are."""
    depth = LEVELS.index(level)
    found: dict[str, Case] = {}
    for more in (_quick, _default, _full)[: depth + 1]:
        for case in more():
            found.setdefault(case.name, case)
    for index in range(RANDOM_CASES[level]):
        found[f"random-{index}"] = _random(index, seed)
    return [dataclasses.replace(case, dtype=dtype, seed=seed) for case in found.values()]


def invariant(level: str, dtype: str = "float32", seed: int = 0) -> list[Case]:
    """The cases on which thread counts, splits and batches are varied, bit for bit."""
    wanted = {"mixed-plain", "mixed-everything", "long-3000", "fp8_e4m3-everything", "int4-everything", "int8-3000"}
    wanted |= {"rotary-everything"}
    wanted |= {"masks-documents-everything", "masks-spans-alibi", "masks-tree-everything", "masks-tree-bits-window"}
    wanted |= {"selected-few-of-3000"}
    wanted |= {"cascade-tree", "bias-holes-everything", "bias-few-NHD", "bias-3000"}
    wanted |= {"NHD-everything", "NHD-3000", "NHD-selected", "NHD-cascade"}
    if level != "quick":
        wanted |= {"many-requests", "mixed-fill-leaping", "long-3000-chunk", "long-3000-sinks", "mixed-heads-14-2"}
        wanted |= {"selected-chunk", "selected-block-24", "selected-sparse"}
        wanted |= {f"cascade-{name}" for name in CASCADE}
    if level == "full":
        wanted |= {f"random-{index}" for index in range(100)} | {"full-70000", "full-70000-mqa"}
    return [case for case in cases(level, dtype, seed) if case.name in wanted]
