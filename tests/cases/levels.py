# SPDX-License-Identifier: Apache-2.0
"""Which cases there are at each level."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from .case import Case
from .draw import random_case
from .tables import (
    BIAS,
    BLOCK_SIZES,
    BY_BLOCK,
    CASCADE,
    CHUNK,
    DECODE,
    DECODES,
    EDGES,
    FEATURES,
    FEW_ROWS,
    FILLS,
    HEAD_SIZES,
    HEADS,
    LATENT,
    LONG,
    LONG_SELECTED,
    LONG_SPANS,
    LONG_TREE,
    MASKS,
    MIXED,
    MLA,
    PLAIN,
    PREFILL,
    PREFIXES,
    QUANTISED,
    QUERY_BLOCKS,
    QUERY_HEADS,
    ROTARY,
    ROTATED,
    SELECTED,
    SELECTED_TOKENS,
    STEPS,
    TOGETHER,
    UNEQUAL_HEAD_SIZES,
)

LEVELS = ("quick", "default", "full")
RANDOM_CASES = {"quick": 6, "default": 40, "full": 400}

QUICK_BIAS = ("heads", "holes", "one", "prompt", "holes-everything", "few-NHD", "3000")
QUICK_HEAD_SIZES = (1, 3, 20, 33, 64, 128)
QUICK_BLOCK_SIZES = (1, 5, 24, 128)
QUICK_HEADS = ((3, 3), (6, 2), (5, 1), (14, 2))
QUICK_PLAIN = ("mixed", "everything", "nan-value", "block-5", "fp8-everything", "selected", "cascade", "3000")
QUICK_TOGETHER = ("packed", "int4", "NHD", "HND", "chunk")
QUICK_MASKS = (
    "spans-window",
    "spans-window-clamped",
    "chunks-clamped-everything",
    "spans-alibi",
    "documents-masked",
    "documents-everything",
    "tree-late-nan",
    "tree-everything",
    "tree-bits-window",
    "tree-nan-value",
)


def _case(name: str, step: dict[str, Any], **fields: Any) -> Case:
    fields = {**step, **fields}
    if fields.pop("dynamic", False):
        fields["dynamic_causal"] = tuple((r + 1) % 2 for r in range(len(fields["query_lens"])))
    return Case(name, **fields)


def _boundary(block_size: int) -> dict[str, Any]:
    """Requests that end one before, at and one after the ends of their first and second block."""
    ends = sorted({max(1, n * block_size + d) for n in (1, 2) for d in (-1, 0, 1)})
    return {"query_lens": tuple(min(n, 1 + n % 3) for n in ends), "seq_lens": tuple(ends)}


QUICK_WIDE = tuple(("int8", name) for name in ("group-9", "group-12", "group-16-wide"))


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
        yield _case(f"block-{size}", _boundary(size), block_size=size, head_size=32)
    for heads, kv_heads in QUICK_HEADS:
        yield _case(f"mixed-heads-{heads}-{kv_heads}", MIXED, num_heads=heads, num_kv_heads=kv_heads, head_size=40)
    for fill in FILLS:
        yield _case(f"mixed-fill-{fill}", MIXED, fill=fill)
    yield _case("mixed-fill-masked", MIXED, fill="masked", sliding_window=9)
    for name, fields in QUANTISED.items():
        yield _case(f"fp8_e4m3-{name}", fields, kv_cache_dtype="fp8_e4m3")
    yield _case("fp8_e5m2-everything", QUANTISED["everything"], kv_cache_dtype="fp8_e5m2")
    for name, fields in QUANTISED.items():
        yield _case(f"int4-{name}", fields, kv_cache_dtype="int4")
    yield _case("int8-3000", QUANTISED["3000"], kv_cache_dtype="int8")
    for kind, name in QUICK_WIDE:
        yield _case(f"{kind}-few-{name}", FEW_ROWS[name], kv_cache_dtype=kind, block_size=32)
    yield _case("int8-wide-group-block-5", FEW_ROWS["group-12"], kv_cache_dtype="int8", block_size=5, strided=True)
    for kind in ("int6", "int5", "int4_per_token_head"):
        for name in ("everything", "block-5", "late-nan"):
            yield _case(f"{kind}-{name}", QUANTISED[name], kv_cache_dtype=kind)
        yield _case(f"{kind}-few-group-5", FEW_ROWS["group-5"], kv_cache_dtype=kind, block_size=32)
    for name, fields in FEW_ROWS.items():
        yield _case(f"int4-few-{name}", fields, kv_cache_dtype="int4", block_size=32)
    for kind in ("int8/int4", "int4/auto", "auto/int8", "fp8/int8"):
        yield _case(f"{kind.replace('/', '-')}-mixed", MIXED, kv_cache_dtype=kind, head_size=64)
    for name, fields in ROTATED.items():
        yield _case(f"rotated-{name}", {"kv_cache_rotation": "hadamard", **fields})
    for name, fields in ROTARY.items():
        yield _case(f"rotary-{name}", fields)
    yield _case("rotary-NHD", ROTARY["everything"], kv_cache_layout="NHD")
    for name in QUICK_PLAIN:
        yield _case(f"NHD-{name}", PLAIN[name], kv_cache_layout="NHD")
    for name in ("group-5", "two-tokens", "heads"):
        yield _case(f"NHD-few-{name}", FEW_ROWS[name], kv_cache_layout="NHD", block_size=32)
    for name in ("group-7", "size-96"):
        fields = {"kv_cache_layout": "NHD", "block_size": 32, "kv_cache_dtype": "fp8_e4m3"}
        yield _case(f"NHD-fp8_e4m3-few-{name}", FEW_ROWS[name], **fields)
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
        yield _case(f"long-{name}", LONG[name], head_size=32, num_heads=2, num_kv_heads=1)
    for name, fields in SELECTED.items():
        yield _case(f"selected-{name}", fields)
    for name, fields in SELECTED_TOKENS.items():
        yield _case(f"tokens-{name}", fields)
    for name, fields in QUERY_BLOCKS.items():
        yield _case(f"query-blocks-{name}", fields)
    for name, fields in QUERY_HEADS.items():
        yield _case(f"query-heads-{name}", fields)
    for name in ("tree", "everything", "block-24"):
        yield _case(f"cascade-{name}", PREFIXES, **CASCADE[name])
    for name in QUICK_BIAS:
        yield _case(f"bias-{name}", BIAS[name])
    for name in QUICK_TOGETHER:
        yield _case(f"together-{name}", DECODES, **TOGETHER[name])


def _default() -> Iterator[Case]:
    for name, fields in QUANTISED.items():
        if name != "3000":
            yield _case(f"int8-{name}", fields, kv_cache_dtype="int8")
    for kind in ("fp8_e5m2", "int8", "int4/auto", "int6/int5", "int4_per_token_head", "int8/int6", "int5/int4"):
        for name, fields in FEW_ROWS.items():
            if (kind, name) not in QUICK_WIDE:
                yield _case(f"{kind.replace('/', '-')}-few-{name}", fields, kv_cache_dtype=kind, block_size=32)
    for kind in ("int6", "int5", "int4_per_token_head"):
        for name, fields in QUANTISED.items():
            yield _case(f"{kind}-{name}", fields, kv_cache_dtype=kind)
        for size in (1, 33, 64, 80, 128, 256):
            for rotation in ("none", "hadamard"):
                fields = {"kv_cache_dtype": kind, "kv_cache_rotation": rotation, "head_size": size}
                yield _case(f"{kind}-{rotation}-head-{size}", CHUNK, **fields, block_size=24)
        for size in (5, 16, 24, 128):
            fields = {"kv_cache_dtype": kind, "kv_cache_rotation": "hadamard/none", "head_size": 40}
            yield _case(f"{kind}-block-{size}", _boundary(size), block_size=size, **fields, strided=True)
        for name in ("tree-late-nan", "documents-everything"):
            yield _case(f"{kind}-masks-{name}", MASKS[name], kv_cache_dtype=kind, head_size=64)
    for name, fields in FEW_ROWS.items():
        yield _case(f"HND-few-{name}", fields, kv_cache_layout="HND", block_size=32, strided=True)
        fp8 = {**fields, "kv_cache_layout": "HND", "block_size": 32, "strided": True}
        yield _case(f"HND-fp8_e5m2-few-{name}", fp8, kv_cache_dtype="fp8_e5m2")
        yield _case(f"HND-auto-fp8-few-{name}", fp8, kv_cache_dtype="auto/fp8_e4m3")
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
            yield _case(f"{step}-fill-{fill}", STEPS[step], fill=fill, head_size=40)
        yield _case(f"{step}-fill-masked", STEPS[step], fill="masked", sliding_window=(6, -1), head_size=40)
    for size in HEAD_SIZES:
        for step in ("decode", "chunk"):
            yield _case(f"{step}-head-{size}", STEPS[step], head_size=size, num_heads=2, num_kv_heads=1)
    for size, size_v in UNEQUAL_HEAD_SIZES:
        for step in ("decode", "chunk"):
            yield _case(f"{step}-head-{size}-{size_v}", STEPS[step], head_size=size, head_size_v=size_v)
    for size in BLOCK_SIZES:
        yield _case(f"block-{size}", _boundary(size), block_size=size, head_size=32)
        yield _case(f"block-{size}-odd-head", _boundary(size), block_size=size, head_size=37, pieces=3, strided=True)
        yield _case(f"block-{size}-mixed", MIXED, block_size=size, head_size=32, sliding_window=21)
    for heads, kv_heads in HEADS:
        for step in ("decode", "mixed"):
            shape = {"num_heads": heads, "num_kv_heads": kv_heads}
            yield _case(f"{step}-heads-{heads}-{kv_heads}", STEPS[step], **shape, head_size=40)
    for name, fields in QUANTISED.items():
        yield _case(f"fp8_e5m2-{name}", fields, kv_cache_dtype="fp8_e5m2")
    for name, feature in FEATURES.items():
        yield _case(f"fp8-{name}", MIXED, **feature, kv_cache_dtype="fp8", num_heads=6, head_size=40)
    for size in HEAD_SIZES:
        yield _case(f"fp8-head-{size}", CHUNK, head_size=size, kv_cache_dtype="fp8")
    for size in BLOCK_SIZES:
        yield _case(f"fp8-block-{size}", _boundary(size), block_size=size, head_size=36, kv_cache_dtype="fp8")
    for kind in ("int8", "int4", "int4/int8", "auto/fp8_e5m2"):
        short = kind.replace("/", "-")
        for name, feature in FEATURES.items():
            yield _case(f"{short}-{name}", MIXED, **feature, kv_cache_dtype=kind, num_heads=6, head_size=40)
        for size in HEAD_SIZES:
            yield _case(f"{short}-head-{size}", CHUNK, head_size=size, kv_cache_dtype=kind)
        for size in BLOCK_SIZES:
            yield _case(f"{short}-block-{size}", _boundary(size), block_size=size, head_size=36, kv_cache_dtype=kind)
        for fill in ("late-nan", "nan-value", "masked"):
            window = (6, -1)
            yield _case(
                f"{short}-fill-{fill}", MIXED, fill=fill, head_size=64, kv_cache_dtype=kind, sliding_window=window
            )
        yield _case(f"{short}-long-dominant", {**LONG["3000-dominant"], "query_lens": (1, 20)}, kv_cache_dtype=kind)
    rotated = {"kv_cache_rotation": "hadamard", "kv_cache_dtype": "int8"}
    for size in HEAD_SIZES:
        yield _case(f"rotated-head-{size}", CHUNK, head_size=size, **rotated)
    for name, feature in FEATURES.items():
        yield _case(f"rotated-{name}", MIXED, **feature, **rotated, num_heads=6, head_size=40)
    for name, fields in FEW_ROWS.items():
        yield _case(f"rotated-few-{name}", {"block_size": 32, **fields}, **rotated)
    for size in HEAD_SIZES[1:]:
        for rotary in ("neox-norm", "gptj-partial"):
            yield _case(f"rotary-{rotary}-head-{size}", CHUNK, rotary=rotary, head_size=size)
    for name in ("everything", "fp8", "alone"):
        yield _case(f"rotary-HND-{name}", ROTARY[name], kv_cache_layout="HND", strided=True)
    yield _case("rotary-fp8_e5m2", PREFILL, rotary="gptj", kv_cache_dtype="fp8_e5m2", head_size=33, strided=True)
    for name, fields in MASKS.items():
        yield _case(f"fp8-masks-{name}", fields, kv_cache_dtype="fp8", num_heads=6, head_size=40)
        yield _case(f"masks-{name}-head-33-39", fields, head_size=33, head_size_v=39, block_size=24)
    for left in (-1, 20, 1100):
        yield _case(f"long-spans-window-{left}", LONG_SPANS, sliding_window=left)
        yield _case(f"long-spans-clamped-{left}", LONG_SPANS, sliding_window=left, clamped=True)
        for tree in ("binary", "bits"):
            yield _case(f"long-tree-{tree}-window-{left}", LONG_TREE, tree=tree, sliding_window=left)
    for name, fields in PLAIN.items():
        yield _case(f"HND-{name}", fields, kv_cache_layout="HND")
    for size in HEAD_SIZES:
        yield _case(f"NHD-head-{size}", CHUNK, head_size=size, kv_cache_layout="NHD")
        yield _case(f"HND-head-{size}-decode", DECODE, head_size=size, kv_cache_layout="HND", strided=True)
    for size in BLOCK_SIZES:
        yield _case(f"NHD-block-{size}", _boundary(size), block_size=size, head_size=36, kv_cache_layout="NHD")
    for heads in (16, 128):
        sizes = {**MLA, "num_heads": heads, "head_size": 576, "head_size_v": 512}
        yield _case(f"latent-decode-576-512-heads-{heads}", DECODE, **sizes)
        yield _case(f"latent-chunk-576-512-heads-{heads}", {"query_lens": (7,), "seq_lens": (45,)}, **sizes)
    for name, fields in LONG.items():
        yield _case(f"long-{name}", {"head_size": 32, "num_heads": 2, "num_kv_heads": 1, **fields})
    for name, fields in LONG_SELECTED.items():
        yield _case(f"selected-{name}", {"head_size": 32, **fields})
    for name, feature in FEATURES.items():
        yield _case(f"selected-{name}", MIXED, **feature, selected=0.4, num_heads=6, head_size=40, block_size=8)
        yield _case(f"tokens-{name}", MIXED, **feature, selected_tokens=0.4, num_heads=6, head_size=40, block_size=8)
        yield _case(f"query-blocks-{name}", BY_BLOCK, **feature, num_heads=6, head_size=40, block_size=8)
    for size in HEAD_SIZES:
        yield _case(f"tokens-head-{size}", CHUNK, head_size=size, selected_tokens=0.6)
    for name, fields in CASCADE.items():
        yield _case(f"cascade-{name}", PREFIXES, **fields)
    for name, fields in BIAS.items():
        if name not in QUICK_BIAS:
            yield _case(f"bias-{name}", fields)
    for name, fields in TOGETHER.items():
        yield _case(f"together-{name}", DECODES, **fields)
    yield _case("bias-cascade", PREFIXES, **CASCADE["everything"], bias="holes")
    for name, feature in FEATURES.items():
        yield _case(f"bias-mixed-{name}", MIXED, **feature, bias="holes", num_heads=6, head_size=40)


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
        yield _case(f"full-fill-{fill}-HND", DECODE, fill=fill, head_size=40, kv_cache_layout="HND", block_size=24)
    for size in (1, 5, 64, 128, 192):
        for block_size in (8, 16, 24, 128):
            shape = {"head_size": size, "block_size": block_size, "num_heads": 7}
            name = f"full-selected-head-{size}-block-{block_size}"
            yield _case(name, LONG["3000-chunk"] | shape, selected=0.5)
    one_head = {"num_heads": 1, "num_kv_heads": 1, "head_size": 32}
    yield _case("full-70000", {"query_lens": (1, 1), "seq_lens": (70000, 65537)}, **one_head)
    yield _case("full-70000-mqa", {"query_lens": (3,), "seq_lens": (70000,)}, num_kv_heads=1, sinks="moderate")
    shared = {"query_lens": (1, 2, 1), "seq_lens": (70000, 69000, 65537), "shared": ((0, 0), (0, 4200), (1, 4097))}
    yield _case("full-70000-cascade", shared, **one_head)
    yield _case("full-70000-window", {"query_lens": (2,), "seq_lens": (70000,)}, **one_head, sliding_window=5000)


def cases(level: str = "default", dtype: str = "float32", seed: int = 0) -> list[Case]:
    """The cases of a level ("quick", "default" or "full": each holds the one before), in a fixed order, names
    unique. seed: of their arrays, and of what the random ones are."""
    depth = LEVELS.index(level)
    found: dict[str, Case] = {}
    for more in (_quick, _default, _full)[: depth + 1]:
        for case in more():
            found.setdefault(case.name, case)
    for index in range(RANDOM_CASES[level]):
        found[f"random-{index}"] = random_case(index, seed)
    return [dataclasses.replace(case, dtype=dtype, seed=seed) for case in found.values()]


def added(level: str, dtype: str = "float32") -> list[Case]:
    """The cases of a level that the level before it lacks."""
    depth = LEVELS.index(level)
    before = {case.name for case in cases(LEVELS[depth - 1], dtype)} if depth else set()
    return [case for case in cases(level, dtype) if case.name not in before]


def invariant(level: str, dtype: str = "float32", seed: int = 0) -> list[Case]:
    """The cases on which thread counts, splits and batches are varied, bit for bit."""
    wanted = {"mixed-plain", "mixed-everything", "long-3000", "fp8_e4m3-everything", "int4-everything", "int8-3000"}
    wanted |= {"rotary-everything", "rotated-int4-everything", "rotated-rotary"}
    wanted |= {"masks-documents-everything", "masks-spans-alibi", "masks-tree-everything", "masks-tree-bits-window"}
    wanted |= {"selected-few-of-3000", "tokens-half-everything", "tokens-most-of-3000"}
    wanted |= {"query-blocks-half-everything", "query-blocks-2300", "query-heads-everything", "query-heads-few-of-3000"}
    wanted |= {"cascade-tree", "bias-holes-everything", "bias-few-NHD", "bias-3000"}
    wanted |= {"NHD-everything", "NHD-3000", "NHD-selected", "NHD-cascade"}
    wanted |= {f"together-{name}" for name in TOGETHER}
    if level != "quick":
        wanted |= {"many-requests", "mixed-fill-leaping", "long-3000-chunk", "long-3000-sinks", "mixed-heads-14-2"}
        wanted |= {"selected-chunk", "selected-block-24", "selected-sparse"}
        wanted |= {f"cascade-{name}" for name in CASCADE}
    if level == "full":
        wanted |= {f"random-{index}" for index in range(100)} | {"full-70000", "full-70000-mqa"}
    return [case for case in cases(level, dtype, seed) if case.name in wanted]
