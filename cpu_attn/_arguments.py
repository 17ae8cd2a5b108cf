# SPDX-License-Identifier: Apache-2.0
"""This module is the one table of what the calls take.

From a row follow, when build_ffi.py runs this file alone: the C enum of a call's arrays, the rows by which
native/check/arguments.c checks them, and the fields of ``ca_shape`` and ``ca_linear_how`` that hold options. In Python
these follow: the order in which C is handed the arrays, the checks of options and their defaults, the words of errors,
the schemas of torch's ops, docstrings, and the tables of docs/contract.md (docs/tables.py).

What an argument means stays with the code that means it: masks in native/plan, the maths in reference.py.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import Any, TypeVar

# A size that is the same throughout a call: the plan says it, or the first array that has it. Each has the symbol that
# docstrings use for it.
SHARED_AXES = {
    "T": "T",
    "num_reqs": "R",
    "num_reqs + 1": "R + 1",
    "num_heads": "Hq",
    "num_kv_heads": "Hkv",
    "head_size": "D",
    "head_size_v": "Dv",
    "num_blocks": "N",
    "block_size": "B",
    "query blocks": "query blocks",
    # Those of linear attention.
    "num_k_heads": "Hk",
    "num_v_heads": "Hv",
    "head_k_dim": "Dk",
    "head_v_dim": "Dv",
    "channels": "C",
    "(request, tokens, slot)": "3",
}
# The others stand for no size that arrays share.
FREE_AXES = {
    "rot_dim": "rot_dim",
    "blocks": "M",
    "max_position": "max_position",
    "width": "width",
    "Q": "Q",
    "K": "K",
    "tokens": "S",
    "num_slots": "num_slots",
    "inputs": "L",
    "checkpoints": "checkpoints",
}
OR_1 = " or 1"  # behind the name of an axis: a size of 1 will do, too
REQUIRED = object()  # the default of an argument that has none

# Of an array's `kinds` these are dtypes by name, and two words: OWN is the call's dtype, which the plan says or the
# first array that has it; CACHE follows from kv_cache_dtype.
OWN, CACHE = "own", "cache"

# Flags of arrays; native/check/arguments.c says what each means.
FLAGS = ("OPTIONAL", "LENGTHS", "WRITTEN", "OF_V", "IN_PLACE", "ONE_HEAD", "LISTS", "WIDER", "SWAPS")
OPTIONAL, LENGTHS, WRITTEN, OF_V, IN_PLACE, ONE_HEAD, LISTS, WIDER, SWAPS = FLAGS


@dataclass(frozen=True)
class Array:
    """A row: an array that C checks. kinds: its dtypes; axes: names of SHARED_AXES and FREE_AXES; what: whole
    sentences."""

    name: str
    kinds: tuple[str, ...]
    axes: tuple[str, ...]
    what: str
    flags: tuple[str, ...] = ()

    @property
    def optional(self) -> bool:
        return OPTIONAL in self.flags

    @property
    def form(self) -> str:
        """Says dtypes and shape: ``int32 [R + 1], or None.``"""
        kinds = [kind for kind in self.kinds if kind not in (OWN, CACHE)]
        symbols = [{**SHARED_AXES, **FREE_AXES}[axis.removesuffix(OR_1)] for axis in self.axes]
        sizes = [s + OR_1 * axis.endswith(OR_1) for s, axis in zip(symbols, self.axes, strict=True)]
        shape = f"[{', '.join(sizes)}]"
        if WIDER in self.flags:
            shape = f"[{', '.join(sizes[:-1])}] or {shape}"
        if OWN in self.kinds:
            shape += " of the call's dtype" + (f" or {kinds[0]}" if kinds else "")
        elif kinds:
            shape = f"{', '.join(kinds[:-2])}{', ' * (len(kinds) > 2)}{' or '.join(kinds[-2:])} {shape}"
        return f"{shape}{', or None' * self.optional}."


@dataclass(frozen=True)
class Scalar:
    """A row: a number, a name, or what Python reads by itself. type: the annotation; torch: how torch's schema has it
    where that does not follow from the annotation; field: a comment, where ``ca_shape`` or ``ca_linear_how`` holds the
    number or flag, None being 0 there; least: of such numbers; c: its declaration there, unless it is an int32_t."""

    name: str
    type: str
    what: str
    default: Any = REQUIRED
    torch: str = ""
    field: str = ""
    least: int = 1
    c: str = ""

    @property
    def declaration(self) -> str:
        return f"{self.c or f'int32_t {self.name}'}; /* {self.field} */"

    @property
    def schema(self) -> str:
        """The type in torch's schema language."""
        plain, _, rest = self.type.partition(" | ")
        kinds = {"int": "SymInt", "float": "float", "bool": "bool", "str": "str"}
        return self.torch or kinds[plain] + "?" * (rest == "None")


Argument = Array | Scalar


def c_name(axis: str) -> str:
    """Gives an axis as C names it: ``CA_NUM_REQS_1`` for ``num_reqs + 1``."""
    return "CA_" + re.sub(r"\W+", "_", axis).strip("_").upper()


@dataclass(frozen=True)
class Call:
    """A call: its rows, in the order of the Python function's arguments, in which C checks the arrays."""

    name: str  # the Python function
    prefix: str  # of the C names: CA_WRITE_KEY
    rows: tuple[Argument, ...]

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays in the order in which C has them: first those that the call writes."""
        arrays = [row for row in self.rows if isinstance(row, Array)]
        return tuple(sorted(arrays, key=lambda array: WRITTEN not in array.flags))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(array.name for array in self.arrays)

    @property
    def fields(self) -> tuple[Scalar, ...]:
        """The options that C holds in a struct."""
        return tuple(row for row in self.rows if isinstance(row, Scalar) and row.field)


# A row begins with one line of name, kinds and axes, of which the formatter would make three.
# fmt: off

INT32, INT64, FLOAT32 = ("int32",), ("int64",), ("float32",)
FLOAT32_OR_OWN, FLOATS, ANY_FLOAT = ("float32", OWN), (OWN,), ("float32", "float16", "bfloat16")
CACHE_AXES = ("num_blocks", "num_kv_heads", "block_size", "width")
SPANS = "Mapping[int, Sequence[tuple[int, int]]] | None"
STARTS = "Mapping[int, Sequence[int]] | None"
NAMES_OF_KINDS = (
    "``auto``, ``fp8_e4m3`` (``fp8``), ``fp8_e5m2``, ``int8``, ``int6``, ``int5``, ``int4``, ``int4_per_token_head``, "
    "or two of these as ``K/V``"
)

_query_start_loc = Array(
    "query_start_loc", INT32, ("num_reqs + 1",),
    "Where each request's query tokens start; the last number is T.",
)
_seq_lens = Array("seq_lens", INT32, ("num_reqs",), "How many keys each request has, this step's among them.")
_dynamic_causal = Array(
    "dynamic_causal", INT32, ("num_reqs",),
    "Whether each request is causal (not 0) or bidirectional (0), in place of ``causal``.",
    (OPTIONAL,),
)

# ---- the plan ----

PLAN = Call(
    "get_scheduler_metadata",
    "STEP",
    (
        Scalar("num_reqs", "int", "R, the number of requests."),
        Scalar("num_heads", "int", "Hq, query heads, 1 to 65536."),
        Scalar(
            "num_kv_heads", "int",
            "Hkv, kv heads; divides ``num_heads``. Query head h reads kv head h // (Hq // Hkv).",
        ),
        Scalar("head_size", "int", "D, elements of a head of queries and keys, 1 to 65536."),
        Array(_seq_lens.name, INT32, _seq_lens.axes, _seq_lens.what),
        Scalar(
            "dtype", "Any",
            "Of queries, keys and values: float32, float16 or bfloat16, as NumPy dtype, torch dtype or name.",
            torch="ScalarType",
        ),
        Array(_query_start_loc.name, INT32, _query_start_loc.axes, _query_start_loc.what),
        Scalar(
            "causal", "bool", "Whether query token i of a request sees the keys up to ``seq_len - q_len + i`` only.",
            True,
        ),
        Scalar(
            "sliding_window", "int | tuple[int, int]",
            "-1: off. w: the last w keys, the query's own among them, and w - 1 keys ahead where not causal. (left, "
            "right): so many keys on each side of the query's own, -1 for all.",
            -1,
            torch="int[1]",
        ),
        Scalar(
            "isa", "str",
            "Whose kernels; ``auto`` follows CPU_ATTN_ISA, then takes the best isa of this machine; ``vec`` is the "
            "best without a matrix unit; ``vec16`` is the same for head sizes that are multiples of 16.",
            "auto",
        ),
        Scalar(
            "enable_kv_split", "bool",
            "Whether long requests may be split over their keys where threads would idle. The bits of results are the "
            "same either way.",
            True,
        ),
        _dynamic_causal,
        Scalar("kv_cache_dtype", "str", f"What the caches hold: {NAMES_OF_KINDS}.", "auto"),
        Scalar(
            "head_size_v", "int | None",
            "Dv, elements of a head of values and of the output; ``head_size`` unless said.",
            None,
        ),
        Scalar(
            "engine", "str",
            "``auto`` follows CPU_ATTN_ENGINE, then means ``native``; ``onednn``; ``reference``.",
            "auto",
        ),
        Scalar(
            "mm_prefix_range", SPANS,
            "{request: [(start, end), ...]}, ascending spans of keys, end inclusive. The tokens of a span see one "
            "another, whatever ``causal`` and ``sliding_window`` say. A prefix-LM is one span from 0.",
            None,
            torch="Tensor?",
        ),
        Scalar(
            "document_start_loc", STARTS,
            "{request: [0, ...]}, ascending first keys of the documents that are packed in a request. A query sees "
            "keys of its own document only. No span crosses a border, and every query has a key of its own.",
            None,
            torch="Tensor?",
        ),
        Scalar(
            "tree_mask", "Any",
            'uint8 [T, W], or None. Bit j of row t (``numpy.packbits(..., bitorder="little")``) says whether query '
            "token t sees the key of its request's query token j, in place of ``causal`` among these. The position of "
            "a token, by which windows go, is ``seq_len - q_len`` plus the number of query tokens that it sees "
            "besides itself. Requests are causal. It does not go with ALiBi, ``mm_prefix_range`` or "
            "``document_start_loc``.",
            None,
            torch="Tensor?",
        ),
        Array(
            "block_table", INT32, ("num_reqs", "blocks"),
            "With it, requests whose tables start with the same blocks read these once, in whole segments of 1024 "
            "keys, where few query rows meet them (decode). The bits of results are the same, of ``onednn`` they stay "
            "within the error budgets. The table of a call must then have the same blocks in common.",
            (OPTIONAL,),
        ),
        Scalar("block_size", "int | None", "B, tokens of a block; with ``block_table``, and only then.", None),
        Scalar(
            "kv_cache_layout", "str",
            "``packed``, as :func:`reshape_and_cache` writes it for the isa, or plain rows, which hold no integers: "
            "``HND`` [N, Hkv, B, D] or ``NHD`` [N, B, Hkv, D].",
            "packed",
        ),
        Scalar(
            "mm_prefix_clamp_sliding_window", "bool",
            "Whether the left side of ``sliding_window`` holds within spans, too (Gemma 4).",
            False,
            field="whether spans end at the left side of the window",
        ),
        Scalar(
            "kv_cache_rotation", "str",
            "``none`` or ``hadamard``, as :func:`reshape_and_cache` wrote the caches.",
            "none",
        ),
        Scalar(
            "max_selected_tokens", "int | None",
            "S, or None. The plan is for calls with ``selected_tokens`` of up to S columns, and for no others; every "
            "query token is a task of its own then. It does not go with ``block_table``.",
            None,
            field="most columns of selected_tokens; 0: calls have none, else all of them have some",
        ),
        Scalar(
            "cp_world_size", "int",
            "How many ranks share the keys of each request; 1: none do. With more, ``seq_lens``, ``query_start_loc`` "
            "and the masks are the same on all ranks and go by positions, while caches, ``block_table``, "
            "``selected_blocks``, ``selected_tokens`` and the last axis of ``attn_bias`` have this rank's keys alone. "
            ":func:`merge_states` merges the results of all ranks.",
            1,
            field="how many ranks share the positions of a request: the first has the first "
            "cp_kv_cache_interleave_size of them, the next one as many after these, and so on in turns; 0 and 1: none",
        ),
        Scalar(
            "cp_rank", "int",
            "Which of them this is. Its keys are those of the positions p of a request with ``p // "
            "cp_kv_cache_interleave_size % cp_world_size == cp_rank``, counted without gaps.",
            0,
            field="the rank whose keys alone the caches hold",
            least=0,
        ),
        Scalar(
            "cp_kv_cache_interleave_size", "int",
            "How many positions in a row have their keys on the same rank.",
            1,
            field="consecutive positions that a rank has",
        ),
        Array(
            "block_nodes", INT32, ("num_blocks",),
            "The NUMA node on which the memory of each block lies, with ``block_table``, and only then. Threads then "
            "take tasks first whose blocks are on their own node; no bit changes.",
            (OPTIONAL,),
        ),
        Scalar(
            "query_block_size", "int | None",
            "Query tokens of a query block, or None. ``selected_blocks`` then has lists for each query block in place "
            "of each request. The blocks of a request start at its first query token of the step; the last one may "
            "have fewer tokens. It does not go with ``block_table`` or ``max_selected_tokens``.",
            None,
            field="query tokens that share a list of selected_blocks; 0: all of their request",
        ),
        Scalar(
            "select_by_query_head", "bool",
            "Whether ``selected_blocks`` has lists for each query head in place of each kv head. Every query head "
            "then reads its keys for itself. It does not go with ``block_table`` or ``max_selected_tokens``.",
            False,
            field="whether query heads have lists of selected_blocks, in place of kv heads",
        ),
        Scalar(
            "attention_chunk_size", "int | None",
            "Positions of a chunk, or None. A query sees keys of its own chunk only, of those that ``causal`` and "
            "``sliding_window`` leave it: chunks are [0, size), [size, 2 size), ... of each request's positions "
            "(Llama 4). It does not go with ``tree_mask``.",
            None,
            field="positions of a chunk, of whose keys alone a query sees any; 0: of all",
        ),
    ),
)

# ---- writes of caches ----

_isa_of_cache = Scalar(
    "isa", "str",
    "Whose layout to write; ``auto`` follows CPU_ATTN_ISA, then takes the best isa of this machine. Whoever reads the "
    "cache has to name the same isa.",
    "auto",
)
_written = "As :func:`reshape_and_cache` had it."

WRITE = Call(
    "reshape_and_cache",
    "WRITE",
    (
        Array(
            "key", FLOATS, ("T", "num_kv_heads", "head_size"),
            "The dtype is float32, float16 or bfloat16. The last axis is dense, the other strides are free.",
        ),
        Array(
            "value", FLOATS, ("T", "num_kv_heads", "head_size_v"),
            "The last axis is dense, the other strides are free.",
        ),
        Array(
            "key_cache", (CACHE,), CACHE_AXES,
            "Changed in place. :func:`get_kv_cache_shape` says the width. The strides of N and Hkv are free, so that "
            "K and V of a block may interleave.",
            (WRITTEN,),
        ),
        Array("value_cache", (CACHE,), CACHE_AXES, "The same for values.", (WRITTEN, OF_V)),
        Array(
            "slot_mapping", INT64, ("T",),
            "Slots: block * B + place in the block. A token with a negative slot is skipped. Where tokens share a "
            "slot, one of them is stored, whole.",
        ),
        _isa_of_cache,
        Scalar(
            "k_scale", "float",
            "What keys are divided by in fp8 caches: positive, normal and finite in float32. 1 for other caches.",
            1.0,
        ),
        Scalar("v_scale", "float", "The same for values.", 1.0),
        Scalar(
            "kv_cache_dtype", "str",
            "What the caches hold. ``auto``: elements of the dtype of ``key``. ``fp8_e4m3`` (``fp8``) or "
            "``fp8_e5m2``, in arrays of that float8 dtype or of uint8: key / k_scale and value / v_scale, rounded to "
            "nearest even, saturating, subnormals kept. ``int8``, ``int6``, ``int5``, ``int4_per_token_head`` or "
            "``int4``, in arrays of uint8: integers, rounded to nearest even, and bfloat16 scales, one for each token "
            "and kv head, in ``int4`` one for 32 elements of these. Two names as ``K/V``: one for keys, one for "
            "values.",
            "auto",
        ),
        Scalar(
            "kv_cache_layout", "str",
            "``packed``, or plain rows, which hold no integers: ``HND`` [N, Hkv, B, D] or ``NHD`` [N, B, Hkv, D]. In "
            "plain rows all strides but the last axis's are free, and every isa reads the same.",
            "packed",
        ),
        Scalar(
            "kv_cache_rotation", "str",
            "``hadamard`` stores each head of K and V after an orthogonal transform in float32 "
            "(:func:`cpu_attn.rotation.rotate`), so that channels which are larger than the others do not cost the "
            "others their digits. It is meant for quantised caches; docs/quality.md has figures. ``hadamard/none`` "
            "and ``none/hadamard`` transform K alone or V alone. Whoever reads the cache names the same rotation. A "
            "head of which one element is not finite comes back as NaN throughout.",
            "none",
        ),
        Array(
            "k_feedback", FLOAT32, ("num_kv_heads", "head_size", "head_size"),
            "For keys of integers: what channel j of a key loses in rounding, times ``k_feedback[h, j, d]``, is taken "
            "from each later channel d before that is rounded. Entries without d > j are ignored. Of "
            ":func:`cpu_attn.rotation.error_feedback`; docs/reference/cache_memory.md has the formula.",
            (OPTIONAL,),
        ),
    ),
)

_k_feedback = WRITE.rows[-1]
_at_k_and_v = WRITE.rows[:5]  # key, value, key_cache, value_cache, slot_mapping

ROTARY = Call(
    "rotary_reshape_and_cache",
    "ROTARY",
    (
        *_at_k_and_v,
        Array(
            "query", FLOATS, ("T", "num_heads", "head_size"),
            "Rotated where it lies unless ``query_out`` is given.",
            (IN_PLACE,),
        ),
        Array(
            "query_out", FLOATS, ("T", "num_heads", "head_size"),
            "Receives the queries; it is ``query`` itself or memory apart from all inputs.",
            (WRITTEN, IN_PLACE),
        ),
        Array(
            "cos_sin_cache", FLOAT32_OR_OWN, ("max_position", "rot_dim"),
            "A row is rot_dim / 2 cosines, then as many sines.",
        ),
        Array("positions", INT64, ("T",), "Rows of ``cos_sin_cache``."),
        Array("q_weight", FLOAT32_OR_OWN, ("head_size",), "Of the norm of queries.", (OPTIONAL,)),
        Array("k_weight", FLOAT32_OR_OWN, ("head_size",), "Of the norm of keys.", (OPTIONAL,)),
        _k_feedback,
    ),
)

INDEX = Call(
    "index_and_cache",
    "INDEX",
    (
        Array("k", FLOATS, ("T", "num_kv_heads", "head_size"), "An indexer's keys.", (ONE_HEAD,)),
        Array("index_cache", (CACHE,), CACHE_AXES, "Changed in place.", (WRITTEN, ONE_HEAD)),
        Array("slot_mapping", INT64, ("T",), _at_k_and_v[4].what),
    ),
)

SELECT = Call(
    "select_tokens",
    "SELECT",
    (
        Array("query", FLOATS, ("T", "num_heads", "head_size"), "An indexer's queries."),
        Array("index_cache", (CACHE,), CACHE_AXES, "As :func:`cpu_attn.sparse.index_and_cache` wrote it.", (ONE_HEAD,)),
        _seq_lens,
        _query_start_loc,
        Array("block_table", INT32, ("num_reqs", "blocks"), "The blocks of each request in order."),
        Array("weights", FLOAT32, ("T", "num_heads"), "Of each query head."),
        Array("selected", INT32, ("T", "tokens"), "Receives the positions, ascending, then -1.", (WRITTEN,)),
    ),
)

_block_size = Scalar("block_size", "int", "B, tokens of a block.")

BOUNDS = Call(
    "update_block_bounds",
    "BOUNDS",
    (
        Array(
            "key", FLOATS, ("T", "num_kv_heads", "head_size"),
            "As it goes into the cache: float32, float16 or bfloat16. The last axis is dense, here and below; other "
            "strides are free.",
        ),
        _at_k_and_v[4],
        Array(
            "block_min", FLOATS, ("num_blocks", "num_kv_heads", "head_size"),
            "The smallest values, changed in place. A NaN in a key makes both bounds NaN there.",
            (WRITTEN,),
        ),
        Array(
            "block_max", FLOATS, ("num_blocks", "num_kv_heads", "head_size"),
            "The largest values, changed in place.",
            (WRITTEN,),
        ),
        _block_size,
    ),
)

_bounds = tuple(
    Array(name, FLOATS, ("num_blocks", "num_kv_heads", "head_size"), "Of :func:`update_block_bounds`.")
    for name in ("block_min", "block_max")
)

SCORES = Call(
    "score_blocks",
    "SCORES",
    (
        Array("query", FLOATS, ("T", "num_heads", "head_size"), "One request after another."),
        *_bounds,
        Array(
            "block_table", INT32, ("num_reqs", "blocks"),
            "The blocks of each request in order. Entries that a request does not need are ignored.",
        ),
        _seq_lens,
        _query_start_loc,
        _block_size,
        Scalar("isa", "str", "Whose registers to compute in; ``auto`` takes the best isa of this machine.", "auto"),
        Scalar(
            "by_query_head", "bool",
            "Whether each query head has scores of its own, for a plan that has ``select_by_query_head``.",
            False,
        ),
        Array(
            "scores", FLOAT32, ("num_reqs", "num_kv_heads", "blocks"),
            "What the call returns.",
            (WRITTEN, LISTS),
        ),
    ),
)

# ---- attention ----

ATTENTION = Call(
    "attention_with_kv_cache",
    "",
    (
        Array(
            "query", FLOATS, ("T", "num_heads", "head_size"),
            "One request after another. The last axis is dense, other strides are free.",
        ),
        Array("key_cache", (CACHE,), CACHE_AXES, "As :func:`reshape_and_cache` wrote it with the plan's isa."),
        Array(
            "value_cache", (CACHE,), CACHE_AXES,
            "The same for values. In plain layouts it may be a view of ``key_cache``.",
            (OF_V,),
        ),
        Array(
            "output", FLOAT32_OR_OWN, ("T", "num_heads", "head_size_v"),
            "Written. The last axis is dense, other strides are free.",
            (WRITTEN,),
        ),
        Array(*("query_start_loc", INT32, _query_start_loc.axes), "As the plan has it.", (LENGTHS,)),
        Array(*("seq_lens", INT32, _seq_lens.axes), "As the plan has it.", (LENGTHS,)),
        Scalar("scale", "float", "The factor of q.k, finite in float32; usually 1 / sqrt(D)."),
        Scalar("causal", "bool", "As the plan has it."),
        Array(
            "alibi_slopes", FLOAT32, ("num_heads",),
            "Adds slope * (key position - query position) to the logits.",
            (OPTIONAL,),
        ),
        Scalar(
            *("sliding_window", "int | tuple[int, int]", "As the plan has it: -1, w or (left, right)."), torch="int[1]"
        ),
        Array(
            "block_table", INT32, ("num_reqs", "blocks"),
            "The blocks of each request in order. Entries that a request does not need are ignored.",
        ),
        Scalar(
            "softcap", "float",
            "0 turns it off. Otherwise logits become softcap * tanh(logit / softcap), and softcap is within "
            "1.18e-38..2.34e38. ``scale * k_scale / softcap`` has to be finite in float32; without softcap, ``scale * "
            "k_scale * log2(e)`` has to be.",
        ),
        Scalar(
            *("scheduler_metadata", "SchedulerMetadata", "The plan, of :func:`get_scheduler_metadata`."), torch="Tensor"
        ),
        Array(
            "s_aux", FLOAT32, ("num_heads",),
            "Attention sinks: one logit more for each head in the softmax, which has no value. float16 and bfloat16 "
            "will do, too.",
            (OPTIONAL,),
        ),
        Array(_dynamic_causal.name, INT32, _dynamic_causal.axes, "As the plan has it.", (OPTIONAL,)),
        Scalar("k_scale", "float", _written, 1.0),
        Scalar("v_scale", "float", _written, 1.0),
        Scalar("kv_cache_dtype", "str", "As the plan and :func:`reshape_and_cache` had it.", "auto"),
        Array(
            "lse", FLOAT32, ("num_heads", "T"),
            "Receives the natural log of each softmax's denominator, with the sink in it.",
            (OPTIONAL, WRITTEN),
        ),
        Array(
            "selected_blocks", INT32, ("num_reqs", "num_kv_heads", "blocks"),
            "Which blocks each kv head attends, None for all: columns of its request's row of ``block_table``, "
            "strictly ascending, then -1. Keys of other blocks do not count and cost nothing, and entries of "
            "``block_table`` that no head selects are ignored. :func:`cpu_attn.sparse.select_blocks` chooses. With a "
            "plan that has a ``query_block_size`` the first axis counts the query blocks of all requests, one request "
            "after another: each attends blocks of its own. With a plan that has ``select_by_query_head`` the second "
            "axis counts query heads.",
            (OPTIONAL, LISTS),
        ),
        Array(
            "attn_bias", FLOAT32, ("num_reqs or 1", "num_heads or 1", "Q", "K"),
            "``attn_bias[r, h, i, j]`` is added to the logit of query token i of request r for its key j, after "
            "softcap. Q and K are no less than any request needs. The last axis is dense, other strides are free and "
            "may be 0. -inf hides a key, though not NaN or inf in the key or its value. Entries for keys that a token "
            "does not see are ignored.",
            (OPTIONAL,),
        ),
        Scalar(
            "kv_cache_layout", "str",
            "As the plan has it. ``HND`` and ``NHD`` are read where they lie, whoever wrote them.",
            "packed",
        ),
        Scalar(
            "kv_cache_rotation", "str",
            "As the plan has it. Queries are rotated like keys and rounded to their dtype, and the output is turned "
            "back.",
            "none",
        ),
        Array(
            "selected_tokens", INT32, ("T", "tokens"),
            "Which keys of its request each query token attends, None for all, of those that masks leave it: strictly "
            "ascending, then -1. No other key is read. S is at most the plan's ``max_selected_tokens``; such a plan "
            "is for calls that select tokens, and others are for calls that do not. It does not go with "
            "``selected_blocks``. :func:`cpu_attn.sparse.select_tokens` chooses.",
            (OPTIONAL,),
        ),
    ),
)

# Both in one call: what a write has beside the caches, then an attention, whose caches are written.
UPDATE = Call(
    "update_and_attend",
    "UPDATE",
    (
        *(_row for _row in WRITE.rows if _row.name in ("key", "value", "slot_mapping", "k_feedback")),
        *(
            replace(_row, flags=(*_row.flags, WRITTEN)) if isinstance(_row, Array) and CACHE in _row.kinds else _row
            for _row in ATTENTION.rows
        ),
    ),
)

# ---- linear attention ----

_slots = (
    Array(
        "state_indices", INT32, ("num_reqs",),
        "The slot in which each request leaves its state, and from which it begins unless ``initial_state_indices`` "
        "says otherwise. Negative: it begins from zeros, and keeps nothing.",
    ),
    Scalar("linear_attention_metadata", "LinearAttentionMetadata", "The plan of the step."),
)
_more_slots = (
    Array(
        "initial_state_indices", INT32, ("num_reqs",),
        "The slots from which requests begin that bring a state, in place of ``state_indices``. Several may begin from "
        "the same. Negative: from zeros.",
        (OPTIONAL,),
    ),
    Array(
        "checkpoints", INT32, ("checkpoints", "(request, tokens, slot)"),
        "Rows (request, number of tokens, slot) that ascend: the state after so many of the request's tokens in this "
        "call, from 1 on, is left in the slot, too. They change no bit of anything else. A row with a negative slot is "
        "none.",
        (OPTIONAL,),
    ),
)
_KEYS, _VALUES = ("T", "num_k_heads", "head_k_dim"), ("T", "num_v_heads", "head_v_dim")

LINEAR = Call(
    "linear_attention_with_state_cache",
    "LINEAR",
    (
        Array("query", FLOATS, _KEYS, "The last axis is dense, here and below; other strides are free."),
        Array("key", FLOATS, _KEYS, "The same for keys."),
        Array("value", FLOATS, _VALUES, "The same for values."),
        Array("output", FLOAT32_OR_OWN, _VALUES, "Changed in place.", (WRITTEN,)),
        Array(
            "state_cache", ANY_FLOAT, ("num_slots", "num_v_heads", "head_k_dim", "head_v_dim"),
            "The last two axes are as ``state_layout`` says. Changed in place. A state in 16 bits is rounded once a "
            "call.",
            (WRITTEN, SWAPS),
        ),
        *_slots,
        Array(
            "g", ANY_FLOAT, ("T", "num_v_heads", "head_k_dim"),
            "The logarithm of each token's decay; with a third axis one for each key channel (KDA). [Hv] is the same "
            "for all tokens (lightning attention, RetNet). None: no decay. Decays above e^88 count as that, and below "
            "e^-87 as 0. A state or an output beyond float32 becomes infinite or NaN, and so do from there on the "
            "outputs of its value channel.",
            (OPTIONAL, WIDER),
        ),
        Array(
            "beta", ANY_FLOAT, ("T", "num_v_heads", "head_v_dim"),
            "With a third axis, which goes with ``erase`` or without the delta rule, one for each value channel. "
            "None: 1.",
            (OPTIONAL, WIDER),
        ),
        Array(
            "erase", ANY_FLOAT, ("T", "num_v_heads", "head_k_dim"),
            "What takes the place of beta in beta k: erase and write gates of their own (GDN-2).",
            (OPTIONAL,),
        ),
        Scalar(
            "scale", "float | None",
            "The factor of the query; None: Dk ** -0.5.",
            None,
            field="the factor of the query",
            c="float scale",
        ),
        Scalar(
            "delta_rule", "bool",
            "Whether a token first takes from the state what its key reads there. Mamba-2, lightning attention and "
            "RetNet do not.",
            True,
            field="whether a token first takes from the state what its key reads there",
        ),
        Scalar(
            "gate", "str",
            "How g is made. ``log``: it is what is given. ``softplus``: what is given is raw, and g = -exp(A_log) "
            "softplus(g + dt_bias) (gated delta net, KDA). ``dt``: with dt = softplus(g + dt_bias), kept within "
            "``dt_limit``, g = -exp(A_log) dt and beta = dt (Mamba-2), so that no beta is given. ``sigmoid``: g = "
            "lower_bound sigmoid(exp(A_log) (g + dt_bias)) (KDA with fla's ``lower_bound``). ``logsigmoid``: g = "
            "exp(A_log) log(sigmoid(g + dt_bias)) (GLA, whose ``gate_logit_normalizer`` is exp(-A_log)).",
            "log",
            field="enum ca_gate",
        ),
        Array(
            "A_log", ANY_FLOAT, ("num_v_heads",),
            "For gates other than ``log``. None, with ``sigmoid`` and ``logsigmoid`` alone: 0.",
            (OPTIONAL,),
        ),
        Array(
            "dt_bias", ANY_FLOAT, ("num_v_heads", "head_k_dim"),
            "For gates other than ``log``; with a second axis where g has a third one. None: 0.",
            (OPTIONAL, WIDER),
        ),
        Scalar(
            "dt_limit", "tuple[float, float]",
            "The least and the largest dt.",
            (0.0, float("inf")),
            field="of CA_GATE_DT: the least and the largest dt",
            c="float dt_limit[2]",
        ),
        Scalar(
            "lower_bound", "float | None",
            "The least g that the gate ``sigmoid`` makes, at most 0; for no other gate.",
            None,
            field="of CA_GATE_SIGMOID",
            c="float lower_bound",
        ),
        Array(
            "D", ANY_FLOAT, ("num_v_heads", "head_v_dim"),
            "With a second axis one for each value channel: what D v is added to the output (Mamba-2).",
            (OPTIONAL, WIDER),
        ),
        Scalar(
            "use_qk_l2norm_in_kernel", "bool",
            "Whether queries and keys are divided by sqrt(sum of their squares + ``norm_eps``).",
            False,
            field="whether queries and keys are divided by their norms",
        ),
        Scalar("norm_eps", "float", "See there.", 1e-6, field="see there", c="float norm_eps"),
        Scalar(
            "use_beta_sigmoid_in_kernel", "bool",
            "Whether beta is the sigmoid of what is given.",
            False,
            field="whether beta is the sigmoid of what is given",
        ),
        Scalar(
            "allow_neg_eigval", "bool",
            "Whether beta, after its sigmoid, is doubled.",
            False,
            field="whether beta, after its sigmoid, is doubled",
        ),
        Scalar(
            "state_layout", "str",
            "``KV`` for states [Dk, Dv], as transformers keeps them, or ``VK`` for [Dv, Dk], as vLLM and FlashInfer "
            "do.",
            "KV",
            field="enum ca_state_layout",
        ),
        *_more_slots,
    ),
)

CONV = Call(
    "causal_conv1d",
    "CONV",
    (
        Array(
            "x", FLOATS, ("T", "channels"),
            "The last axis is dense, here and below; other strides are free.",
            (IN_PLACE,),
        ),
        Array(
            "weight", FLOAT32_OR_OWN, ("channels", "width"),
            "W, the width, is from 2 to 8. The last input of a window comes last.",
        ),
        Array("bias", FLOAT32_OR_OWN, ("channels",), "Added to every output.", (OPTIONAL,)),
        Array("output", FLOATS, ("T", "channels"), "Changed in place. It may be x itself.", (WRITTEN, IN_PLACE)),
        Array(
            "conv_state", ANY_FLOAT, ("num_slots", "channels", "inputs"),
            "The last two axes are as ``state_layout`` says. Changed in place: the last L inputs, the oldest first. L "
            "is W - 1 to 8.",
            (WRITTEN, SWAPS),
        ),
        *_slots,
        Scalar("activation", "str | None", "``silu`` (``swish``), or None.", "silu"),
        Scalar("state_layout", "str", "``CL`` for states [C, L], or ``LC`` for [L, C].", "CL"),
        *_more_slots,
    ),
)

CALLS = (ATTENTION, PLAN, WRITE, INDEX, ROTARY, SELECT, BOUNDS, SCORES, UPDATE, LINEAR, CONV)

# fmt: on

# ---- docstrings ----

Function = TypeVar("Function", bound=Callable[..., Any])


def sentences(row: Argument) -> str:
    """What a docstring or a table says of an argument."""
    return f"{row.form} {row.what}" if isinstance(row, Array) else row.what


def documented(call: Call) -> Callable[[Function], Function]:
    """Puts the rows of a call in the place of ``{arguments}`` in the docstring of its function, as deep as that stands:
    from 3.13 on Python takes the indentation of a docstring away when it compiles."""

    def rows(place: re.Match[str], given: Collection[str]) -> str:
        texts = [f"{row.name}: {sentences(row)}" for row in call.rows if row.name in given]
        behind = place[1] + " " * 4
        return "\n".join(textwrap.fill(x, 120, initial_indent=place[1], subsequent_indent=behind) for x in texts)

    def put(function: Function) -> Function:
        if function.__doc__:  # python -OO leaves none
            given = partial(rows, given=signature(function).parameters)
            function.__doc__ = re.sub(r"^( *)\{arguments\}", given, function.__doc__, flags=re.M)
        return function

    return put
