# SPDX-License-Identifier: Apache-2.0
"""What the cases are put together from (levels.py): fields of Case by name, "dynamic" for a dynamic_causal that
alternates from request to request."""

from __future__ import annotations

from typing import Any

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
    "block-5": {**PREFILL, "block_size": 5, "head_size": 33, "head_size_v": 39},
    "3000": {"query_lens": (1, 4), "seq_lens": (3000, 2049), "head_size": 32, "num_heads": 2, "num_kv_heads": 1},
}

# With kv_cache_rotation="hadamard" unless said.
ROTATED: dict[str, dict[str, Any]] = {
    "int8": {**MIXED, "kv_cache_dtype": "int8", "head_size": 128},
    "int4-everything": {**QUANTISED["everything"], "kv_cache_dtype": "int4"},
    "int8-int4-block-5": {**QUANTISED["block-5"], "kv_cache_dtype": "int8/int4", "strided": True},
    "fp8_e4m3-late-nan": {**QUANTISED["late-nan"], "kv_cache_dtype": "fp8_e4m3"},
    "fp8_e5m2-HND": {**MIXED, "kv_cache_dtype": "fp8_e5m2", "kv_cache_layout": "HND", "head_size": 40, "strided": True},
    "keys-3000": {**QUANTISED["3000"], "kv_cache_dtype": "int4/auto", "kv_cache_rotation": "hadamard/none"},
    "values": {**DECODE, "kv_cache_dtype": "int8", "kv_cache_rotation": "none/hadamard", "pieces": 2},
    "rotary": {**MIXED, "kv_cache_dtype": "fp8_e4m3", "rotary": "neox", "head_size": 64, "pieces": 2},
    "rotary-values": {**MIXED, "kv_cache_dtype": "auto/int4", "rotary": "gptj", "kv_cache_rotation": "none/hadamard"},
    "plain": {**MIXED, "head_size": 40, "head_size_v": 72, "strided": True},
    "plain-NHD": {**MIXED, **FEATURES["everything"], "kv_cache_layout": "NHD"},
    "tiny": {**QUANTISED["tiny"], "kv_cache_dtype": "int4"},
    "saturated": {**QUANTISED["saturated"], "kv_cache_dtype": "fp8_e5m2"},
    "int4-per-token-head": {**MIXED, "kv_cache_dtype": "int6/int4_per_token_head", "head_size": 64},
    "int5-late-nan": {**QUANTISED["late-nan"], "kv_cache_dtype": "int5"},
    "int5-tiny": {**QUANTISED["tiny"], "kv_cache_dtype": "int5/int4_per_token_head"},
    "int6-block-5": {**QUANTISED["block-5"], "kv_cache_dtype": "int6", "strided": True},
    "int5-large": {**QUANTISED["saturated"], "kv_cache_dtype": "int5/int6"},
}

# Whole blocks, one register tile of rows: where narrow and plain caches may be unpacked on the way into the products.
FEW_ROWS: dict[str, dict[str, Any]] = {
    "mha": {"query_lens": (1, 1), "seq_lens": (300, 64), "num_heads": 2, "num_kv_heads": 2, "head_size": 64},
    "group-5": {"query_lens": (1,), "seq_lens": (290,), "num_heads": 5, "num_kv_heads": 1, "head_size": 128},
    "group-8": {"query_lens": (1,), "seq_lens": (290,), "num_heads": 8, "num_kv_heads": 1, "head_size": 64},
    "group-7": {"query_lens": (1, 3), "seq_lens": (290, 290), "num_heads": 7, "num_kv_heads": 1, "head_size": 64},
    "group-16": {"query_lens": (1, 2), "seq_lens": (290, 300), "num_heads": 16, "num_kv_heads": 1, "head_size": 64},
    # One token's heads are more than one tile of vectors.
    "group-9": {"query_lens": (1, 1), "seq_lens": (290, 30), "num_heads": 18, "num_kv_heads": 2, "head_size": 96},
    "group-12": {
        "query_lens": (1, 1, 2),
        "seq_lens": (290, 1100, 45),
        "num_heads": 12,
        "num_kv_heads": 1,
        "head_size": 40,
        "head_size_v": 48,
        "sliding_window": 170,
        "sinks": "mixed",
        "softcap": 20.0,
    },
    "group-13": {
        "query_lens": (1,),
        "seq_lens": (290,),
        "num_heads": 13,
        "num_kv_heads": 1,
        "head_size": 37,
        "head_size_v": 16,
        "fill": "late-nan",
    },
    "group-16-wide": {
        "query_lens": (1,),
        "seq_lens": (290,),
        "num_heads": 16,
        "num_kv_heads": 1,
        "head_size": 300,
        "head_size_v": 272,
        "fill": "masked",
        "sliding_window": 250,
    },
    "rows-9-36": {"query_lens": (3, 12), "seq_lens": (290, 300), "num_heads": 3, "num_kv_heads": 1, "head_size": 64},
    "two-tokens": {"query_lens": (2,), "seq_lens": (290,), "num_heads": 3, "num_kv_heads": 1, "head_size": 64},
    "size-32": {"query_lens": (1, 5), "seq_lens": (290, 300), "num_heads": 7, "num_kv_heads": 1, "head_size": 32},
    "size-80": {"query_lens": (1, 2), "seq_lens": (290, 300), "num_heads": 8, "num_kv_heads": 2, "head_size": 80},
    "size-96": {"query_lens": (1, 2), "seq_lens": (290, 300), "num_heads": 8, "num_kv_heads": 2, "head_size": 96},
    "size-160": {"query_lens": (1,), "seq_lens": (290,), "num_heads": 6, "num_kv_heads": 1, "head_size": 160},
    "size-48-112": {"query_lens": (1, 5), "seq_lens": (290, 300), "head_size": 48, "head_size_v": 112},
    "size-40-43": {"query_lens": (1, 5), "seq_lens": (290, 300), "head_size": 40, "head_size_v": 43},
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
    **{"num_heads": 1, "num_kv_heads": 1, "head_size": 32},
}
# Drafts that end in the middle of a group of 16 keys, at the end of one, in several score blocks.
TREE = {"query_lens": (8, 1, 0, 13, 5), "seq_lens": (50, 20, 9, 100, 5)}
LONG_TREE = {"query_lens": (40, 8), "seq_lens": (3000, 1030), "num_heads": 2, "num_kv_heads": 1, "head_size": 32}
EVERYTHING = {"softcap": 20.0, "sinks": "mixed", "strided": True, "pieces": 3}

MASKS: dict[str, dict[str, Any]] = {
    "spans": SPANS,
    "spans-window": {**SPANS, "sliding_window": 5},
    "spans-window-clamped": {**SPANS, "sliding_window": 5, "clamped": True},
    "spans-clamped-everything": {**SPANS, "sliding_window": (7, 2), "clamped": True, "alibi": 0.25, **EVERYTHING},
    "spans-window-bidirectional-clamped": {**SPANS, "sliding_window": 5, "causal": False, "clamped": True},
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
    "spans-clamped-masked": {**SPANS, "sliding_window": 3, "clamped": True, "fill": "masked"},
    "chunks": {**DOCUMENTS, "document_start_loc": None, "chunk": 16},
    "chunks-window": {**SPANS, "chunk": 7, "sliding_window": 5, "alibi": 0.25, **EVERYTHING},
    "chunks-clamped": {**SPANS, "chunk": 7, "clamped": True},
    "chunks-clamped-everything": {**SPANS, "chunk": 4, "sliding_window": (6, 2), "clamped": True, **EVERYTHING},
    "chunks-clamped-bidirectional": {**SPANS, "chunk": 7, "sliding_window": 5, "clamped": True, "causal": False},
    "chunks-documents-bidirectional": {**DOCUMENTS, "chunk": 10, "causal": False, "fill": "nan-value"},
    "chunks-late-nan": {**SPANS, "mm_prefix_range": None, "chunk": 33, "fill": "late-nan"},
    "chunks-more-queries-than-keys": {"query_lens": (40, 5), "seq_lens": (9, 1), "causal": False, "chunk": 4},
    "chunks-long": {**LONG_SPANS, "mm_prefix_range": None, "document_start_loc": None, "chunk": 1100},
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
    "prompt": {"query_lens": (1, 150), "seq_lens": (40, 170), "bias": "heads"},  # more than 256 query rows of a kv head
    "holes-everything": {**MIXED, **FEATURES["everything"], "bias": "holes"},
    "spans": {**SPANS, "bias": "heads", "sliding_window": 5},
    "tree": {**TREE, "bias": "holes", "tree": "binary", "sliding_window": 30},
    "late-nan": {**MIXED, "bias": "heads", "fill": "late-nan"},
    "selected": {**MIXED, "bias": "heads", "selected": 0.5, "fill": "masked"},
    "int4": {**MIXED, "bias": "heads", "kv_cache_dtype": "int4", "head_size": 64},
    "few": {**FEW_ROWS["group-5"], "bias": "holes", "block_size": 32},
    "few-int8": {**FEW_ROWS["group-8"], "bias": "heads", "block_size": 32, "kv_cache_dtype": "int8"},
    "few-NHD": {**FEW_ROWS["heads"], "bias": "heads", "block_size": 32, "kv_cache_layout": "NHD"},
    "3000": {**LONG["3000-chunk"], "bias": "heads", "head_size": 32},
}

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
    "head_size": 32,
    "num_heads": 4,
    "num_kv_heads": 1,
}
CASCADE: dict[str, dict[str, Any]] = {
    "tree": {},
    "everything": {**FEATURES["everything"], "sliding_window": -1},
    "window": {"sliding_window": 1800},
    "window-right": {"sliding_window": (-1, 4), "causal": False},
    "dynamic-causal": {"dynamic": True},
    "heads": {"num_heads": 10, "num_kv_heads": 2, "head_size": 36, "head_size_v": 40},
    "wide-group": {"num_heads": 16, "num_kv_heads": 1},
    "wide-group-int8": {"num_heads": 12, "num_kv_heads": 1, "kv_cache_dtype": "int8"},
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
    "block-5": {**PREFILL, "block_size": 5, "head_size": 33, "head_size_v": 39},
    "block-1": {**CHUNK, "block_size": 1, "head_size": 3},
    "block-24": {**CHUNK, "block_size": 24, "head_size": 36, "strided": True},
    "block-1-window": {"query_lens": (1, 4), "seq_lens": (3000, 300), "block_size": 1, "sliding_window": 1001},
    "block-1-few": {"query_lens": (1, 3), "seq_lens": (290, 300), "block_size": 1, "num_heads": 14, "head_size": 64},
    "block-7-late-nan": {**MIXED, "block_size": 7, "fill": "late-nan"},
    "block-24-everything": {**MIXED, **FEATURES["everything"], "block_size": 24},
    "block-128": {**MIXED, "block_size": 128, "head_size": 80, "pieces": 2},
    "equal-axes": {**PREFILL, "block_size": 2, "num_kv_heads": 2},
    "70-heads": {"query_lens": (1,), "seq_lens": (130,), "num_heads": 70, "num_kv_heads": 70, "head_size": 64},
    "fp8": {**MIXED, "kv_cache_dtype": "fp8_e4m3"},
    "fp8-everything": {**MIXED, **FEATURES["everything"], "kv_cache_dtype": "fp8_e5m2"},
    "fp8-block-5": {**PREFILL, "block_size": 5, "head_size": 33, "head_size_v": 39, "kv_cache_dtype": "fp8_e4m3"},
    "fp8-block-1": {**MIXED, "block_size": 1, "head_size": 64, "kv_cache_dtype": "fp8_e4m3"},
    "fp8-auto": {**MIXED, "kv_cache_dtype": "fp8_e4m3/auto"},
    "auto-fp8": {**MIXED, "kv_cache_dtype": "auto/fp8_e5m2", "head_size": 64},
    "tree": MASKS["tree-everything"],
    "documents": MASKS["documents-masked"],
    "selected": SELECTED["half"],
    "selected-block-5": SELECTED["half-block-5"],
    "selected-block-24": {**LONG_SELECTED["block-24"], "sliding_window": 778},
    "selected-block-1": LONG_SELECTED["block-1"],
    "selected-of-3000": SELECTED["few-of-3000"],
    "cascade": {**PREFIXES, **CASCADE["everything"]},
    "cascade-block-24": {**PREFIXES, **CASCADE["block-24"]},
    "3000": {"query_lens": (1, 4), "seq_lens": (3000, 2049), "head_size": 32, "num_heads": 2, "num_kv_heads": 1},
}

# Decodes of so many requests that kv heads go through the keys of each together, over several score blocks.
DECODES: dict[str, Any] = {
    "query_lens": (1, 1, 2, 1, 1, 1, 1, 1, 1),
    "seq_lens": (300, 270, 290, 16, 300, 281, 255, 300, 97),
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_size": 64,
    "block_size": 32,
    "alibi": 0.25,
    "bias": "heads",
    "sinks": "mixed",
}
TOGETHER: dict[str, dict[str, Any]] = {
    "packed": {"softcap": 20.0, "sliding_window": 250, "strided": True},
    "int8": {"kv_cache_dtype": "int8"},
    "int4": {"kv_cache_dtype": "int4", "bias": "holes"},
    "int4-auto": {"kv_cache_dtype": "int4/auto", "head_size": 40, "head_size_v": 72},
    "fp8": {"kv_cache_dtype": "fp8_e4m3"},
    "NHD": {"kv_cache_layout": "NHD", "strided": True},
    "HND": {"kv_cache_layout": "HND", "strided": True},
    "HND-fp8": {"kv_cache_layout": "HND", "kv_cache_dtype": "fp8_e4m3", "head_size": 40},
    "NHD-fp8": {"kv_cache_layout": "NHD", "kv_cache_dtype": "fp8_e5m2", "head_size": 40},
    "late-nan": {"fill": "late-nan"},
    "block-5": {"block_size": 5, "head_size": 33, "head_size_v": 39},
    "chunk": {"query_lens": (1, 1, 2, 1, 9, 1, 1, 1, 1)},
    "long": {"seq_lens": (1300, 1270, 1190, 600, 1300, 1281, 1255, 700, 1097)},  # blocks of tiles have 512 keys
}

# DeepSeek's latent attention in small, and as it is.
MLA: dict[str, Any] = {"kv_cache_layout": "NHD", "latent": True, "num_kv_heads": 1}
LATENT: dict[str, dict[str, Any]] = {
    "decode": {**DECODE, **MLA, "num_heads": 16, "head_size": 72, "head_size_v": 64},
    "mixed": {**MIXED, **MLA, "num_heads": 16, "head_size": 72, "head_size_v": 64, "strided": True},
    "hnd": {**CHUNK, **MLA, "num_kv_heads": 2, "head_size": 40, "head_size_v": 31, "kv_cache_layout": "HND"},
    "masked": {**MIXED, **MLA, "head_size": 40, "head_size_v": 32, "fill": "masked", "sliding_window": 9},
    "late-nan": {**MIXED, **MLA, "head_size": 40, "head_size_v": 32, "fill": "late-nan"},
    "fp8": {**MIXED, **MLA, "head_size": 40, "head_size_v": 32, "kv_cache_dtype": "fp8_e4m3"},
    "more-rows": {**DECODE, **MLA, "num_heads": 300, "head_size": 40, "head_size_v": 32},
    "block-1": {**MIXED, **MLA, "num_heads": 16, "head_size": 72, "head_size_v": 64, "block_size": 1},
    "576-512": {"query_lens": (1,), "seq_lens": (70,), **MLA, "num_heads": 16, "head_size": 576, "head_size_v": 512},
}

HALF = {**MIXED, "selected_tokens": 0.5}
# Of each query token. What none of them selects is NaN in "masked", and its blocks are not in the block table.
SELECTED_TOKENS: dict[str, dict[str, Any]] = {
    "half": {**HALF, "fill": "masked"},
    "half-block-5": {**HALF, "fill": "masked", "block_size": 5},
    "half-odd-head": {**HALF, "fill": "masked", "head_size": 33, "head_size_v": 39},
    "half-late-nan": {**HALF, "fill": "late-nan"},
    "half-bidirectional": {**HALF, "fill": "masked", "causal": False, "sliding_window": (9, 7)},
    "half-everything": {**HALF, **FEATURES["everything"], "fill": "masked", "block_size": 8},
    "half-fp8": {**HALF, "fill": "masked", "kv_cache_dtype": "fp8_e4m3", "alibi": 0.5},
    "half-int8": {**HALF, "kv_cache_dtype": "int8", "head_size": 64},
    "half-int4": {**HALF, "kv_cache_dtype": "int4", "head_size": 64, "block_size": 24},
    "half-int6-int5": {**HALF, "kv_cache_dtype": "int6/int5", "head_size": 40},
    "half-rotated": {**HALF, "kv_cache_dtype": "int8", "kv_cache_rotation": "hadamard"},
    "half-bias": {**HALF, "bias": "heads", "alibi": 0.25, "fill": "masked"},
    "half-bias-alone": {**HALF, "bias": "heads", "fill": "masked"},
    "half-spans": {**SPANS, "selected_tokens": 0.5, "sliding_window": 5, "fill": "masked"},
    "half-documents": {**MASKS["documents-everything"], "selected_tokens": 0.5},
    "half-tree": {**TREE, "selected_tokens": 0.5, "tree": "binary", "sliding_window": 30, "fill": "masked"},
    "half-NHD": {**HALF, "fill": "masked", "kv_cache_layout": "NHD", "strided": True},
    "half-HND-fp8": {**HALF, "kv_cache_layout": "HND", "kv_cache_dtype": "fp8_e4m3", "block_size": 5, "alibi": 0.5},
    "none": {**MIXED, "selected_tokens": 0.0, "sinks": "mixed"},
    "all": {**MIXED, "selected_tokens": 1.0},
    "few-of-3000": {"query_lens": (1, 4, 1), "seq_lens": (3000, 2049, 1), "selected_tokens": 0.05, "fill": "masked"},
    "most-of-3000": {"query_lens": (2, 1), "seq_lens": (3000, 1500), "selected_tokens": 0.8, "sinks": "moderate"},
    "latent": {**LATENT["mixed"], "selected_tokens": 0.5, "fill": "masked"},
    "latent-2500": {**LATENT["mixed"], "query_lens": (2,), "seq_lens": (2500,), "selected_tokens": 0.9},
}

# Of each query block: some end in the middle of one, some have no query token, no key, or less than one block.
BY_BLOCK = {"query_lens": (1, 70, 0, 37), "seq_lens": (50, 70, 9, 100), "selected": 0.5, "query_block": 16}
QUERY_BLOCKS: dict[str, dict[str, Any]] = {
    "half": {**BY_BLOCK, "fill": "masked"},
    "half-block-5": {**BY_BLOCK, "fill": "masked", "block_size": 5, "query_block": 7},
    "half-late-nan": {**BY_BLOCK, "fill": "late-nan", "block_size": 8},
    "half-bidirectional": {**BY_BLOCK, "fill": "masked", "causal": False, "sliding_window": (9, 7)},
    "half-everything": {**BY_BLOCK, **FEATURES["everything"], "fill": "masked", "block_size": 8},
    "half-fp8": {**BY_BLOCK, "fill": "masked", "kv_cache_dtype": "fp8_e4m3", "alibi": 0.5},
    "half-int4": {**BY_BLOCK, "kv_cache_dtype": "int4", "head_size": 64, "block_size": 24, "bias": "holes"},
    "half-documents": {**MASKS["documents-everything"], "selected": 0.5, "query_block": 8, "fill": "masked"},
    "half-spans": {**SPANS, "selected": 0.5, "query_block": 8, "sliding_window": 5, "fill": "masked"},
    "half-tree": {**TREE, "selected": 0.5, "query_block": 4, "tree": "binary", "sliding_window": 30, "fill": "masked"},
    "half-NHD": {**BY_BLOCK, "fill": "masked", "kv_cache_layout": "NHD", "strided": True},
    "half-HND-block-5": {**BY_BLOCK, "fill": "masked", "kv_cache_layout": "HND", "block_size": 5},
    "half-latent": {**BY_BLOCK, **MLA, "num_heads": 16, "head_size": 72, "head_size_v": 64, "fill": "masked"},
    "each-token": {**BY_BLOCK, "query_block": 1, "fill": "masked"},
    "more-queries-than-keys": {"query_lens": (40, 5), "seq_lens": (9, 1), "selected": 0.7, "query_block": 8},
    "none": {**BY_BLOCK, "selected": 0.0, "sinks": "mixed"},
    "all": {**BY_BLOCK, "selected": 1.0},
    # Query blocks of several tasks, of which the last is shorter, on every isa and engine.
    "tall": {
        **{"query_lens": (5, 150), "seq_lens": (9, 170), "selected": 0.5, "query_block": 67},
        **{"num_heads": 17, "num_kv_heads": 1, "head_size": 16},
    },
    "2300": {
        **{"query_lens": (300,), "seq_lens": (2300,), "selected": 0.6, "query_block": 128, "fill": "masked"},
        **{"num_heads": 2, "num_kv_heads": 1, "alibi": 0.125},
    },
}

# Of each query head.
BY_HEAD = {**MIXED, "selected": 0.4, "select_by_query_head": True}
QUERY_HEADS: dict[str, dict[str, Any]] = {
    "half": {**BY_HEAD, "fill": "masked"},
    "everything": {**BY_HEAD, **FEATURES["everything"], "fill": "masked", "block_size": 8, "num_heads": 6},
    "late-nan": {**BY_HEAD, "fill": "late-nan", "block_size": 5},
    "bias-int4": {**BY_HEAD, "kv_cache_dtype": "int4", "head_size": 64, "bias": "holes", "num_kv_heads": 1},
    "rotated": {**BY_HEAD, "kv_cache_dtype": "fp8_e4m3", "kv_cache_rotation": "hadamard"},
    "NHD": {**BY_HEAD, "fill": "masked", "kv_cache_layout": "NHD", "strided": True, "num_heads": 10},
    "HND-block-5": {**BY_HEAD, "fill": "masked", "kv_cache_layout": "HND", "block_size": 5},
    "latent": {**BY_HEAD, **MLA, "num_heads": 16, "head_size": 72, "head_size_v": 64, "fill": "masked"},
    "all": {**BY_HEAD, "selected": 1.0},
    "no-lists": {**DECODES, "select_by_query_head": True},
    "few-of-3000": {**SELECTED["few-of-3000"], "select_by_query_head": True, "num_heads": 7, "num_kv_heads": 1},
    "blocks": {**BY_BLOCK, "select_by_query_head": True, "fill": "masked", "sliding_window": 45},
    "blocks-2300": {**QUERY_BLOCKS["2300"], "select_by_query_head": True},
}

HEAD_SIZES = (1, 2, 3, 8, 16, 20, 33, 50, 64, 80, 96, 100, 112, 128, 192, 256, 512, 576)
UNEQUAL_HEAD_SIZES = ((64, 32), (24, 40), (192, 128), (576, 512), (7, 5), (1, 16), (33, 1), (3, 41))
BLOCK_SIZES = (1, 5, 8, 16, 24, 32, 48, 64, 128)
HEADS = ((1, 1), (3, 3), (3, 1), (5, 1), (14, 2), (6, 3), (8, 1), (32, 2), (20, 4), (71, 1))
LARGE_SCORES = ("negative", "rising", "leaping", "falling", "dominant")
FILLS = ("equal", "tiny", "large", "odd-query", "late-nan", *LARGE_SCORES)
