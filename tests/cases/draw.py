# SPDX-License-Identifier: Apache-2.0
"""Cases at random: any feature with any other."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import numpy as np

from cpu_attn.reference import Window

from .case import BIASES, Case
from .tables import BLOCK_SIZES, FILLS, HEAD_SIZES, LARGE_SCORES
from .trees import TREES

# Multiply-adds of a random case, so that the plain C engine takes milliseconds.
WORK = 2e6


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
    """Draws chunks, spans, and documents with spans in them, or a tree, where the case can have it."""
    kind = str(rng.choice(["", "", "", "spans", "documents", "tree"]))
    cuts = [[0, *_random_cuts(rng, n)] for n in case.seq_lens]
    spans = [[(a, b - 1) for a, b in pairwise(c) if b > a and rng.random() < 0.7] for c in cuts]
    fits = all(q <= s for q, s in zip(case.query_lens, case.seq_lens, strict=True))
    if kind == "tree" and fits and case.causal and case.dynamic_causal is None and not case.alibi:
        return {"tree": str(rng.choice(list(TREES)))}
    found: dict[str, Any] = {"chunk": [None, None, None, 1, 4, 16, 33][int(rng.integers(7))]}
    if kind in ("spans", "documents"):
        found |= {"mm_prefix_range": tuple(map(tuple, spans)), "clamped": bool(rng.random() < 0.5)}
    if kind == "documents" and fits:
        keep = [sorted({0, *(c for c in some if rng.random() < 0.5)}) for some in cuts]
        found["document_start_loc"] = tuple(map(tuple, keep))
    return found


def random_case(index: int, seed: int) -> Case:
    """Anything with anything, but neither ALiBi nor scales of their own on scores so large that float32 cannot hold
    them any more."""
    rng = np.random.default_rng([seed, index])
    step = _random_step(rng)
    mask = _random_mask(rng, len(step["seq_lens"]))
    kv_heads, group = int(rng.choice([1, 1, 2, 3])), int(rng.choice([1, 2, 3, 4, 5, 7, 8, 16]))
    pairs = sum(q * s for q, s in zip(step["query_lens"], step["seq_lens"], strict=True))
    most = WORK / (max(pairs, 1) * kv_heads * group)
    sizes = [size for size in HEAD_SIZES if size <= most] or [1]
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
    if case.bias == "holes" and fill == "late-nan" and "int" in case.kv_cache_dtype:
        case = dataclasses.replace(case, bias="heads")  # NaN in a value that only a bias hides may be seen or not
    case = dataclasses.replace(case, **_random_masks(rng, case))
    rotary = str(rng.choice(["", "", "", "neox", "gptj", "neox-partial", "gptj-partial", "neox-norm", "gptj-norm"]))
    odd = fill != "normal" or case.head_size < 2 or "int" in case.kv_cache_dtype
    odd = odd or (case.kv_cache_dtype != "auto" and "norm" in rotary)
    case = dataclasses.replace(case, rotary=None if odd else rotary or None)
    # Rotated, the one product that makes a score becomes a sum of 128 that cancel: float32 then has digits too few.
    cancels = fill in (*LARGE_SCORES, "equal")
    rotations = ["none"] * 4 + ["none/hadamard"] + ["hadamard", "hadamard/none"] * (not cancels)
    rotation = str(np.random.default_rng([seed, index, 3]).choice(rotations))
    case = dataclasses.replace(case, kv_cache_rotation=rotation)
    tokens = [None] * 5 + [0.1, 0.6]
    picked = tokens[int(np.random.default_rng([seed, index, 4]).integers(len(tokens)))]
    if picked is not None:
        case = dataclasses.replace(case, selected=None, selected_tokens=picked)
    blocks = [None, 1, 5, 16, 100][int(np.random.default_rng([seed, index, 5]).integers(5))]
    if case.selected is not None:
        by_head = bool(np.random.default_rng([seed, index, 6]).integers(2))
        case = dataclasses.replace(case, query_block=blocks, select_by_query_head=by_head)
    return case if "int" in case.kv_cache_dtype else dataclasses.replace(case, kv_cache_layout=layout)
