# SPDX-License-Identifier: Apache-2.0
"""attention_mla: selected blocks, against the oracle over the rows of its cache, and what it says of that cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cpu_attn
from cpu_attn import reference

from ..cases.formats import numpy_dtype
from ..cases.judge import same_bits
from ..python.test_errors import refuses

# A decode, a chunk and a request without query tokens; 6 heads over rows of 16 + 8 in blocks of 16.
STARTS, LENS = np.array([0, 1, 21, 21], np.int32), np.array([130, 70, 5], np.int32)
TABLE = np.arange(9 + 5 + 1, dtype=np.int32)[::-1]
TABLE = np.array([TABLE[:9], [*TABLE[9:14], *[-1] * 4], [*TABLE[14:], *[-1] * 8]], np.int32)
STEP: tuple[Any, ...] = (STARTS, LENS, 0.2, True, TABLE)


def mla(dtype: str, **options: Any) -> tuple[Any, ...]:
    """Query, cache, output and plan."""
    rng, kind = np.random.default_rng(0), numpy_dtype(dtype)
    kv_cache, query = rng.standard_normal((15, 16, 24)).astype(kind), rng.standard_normal((21, 6, 24)).astype(kind)
    plan = cpu_attn.get_scheduler_metadata(
        *(3, 6, 1, 24, LENS, dtype, STARTS), head_size_v=16, kv_cache_layout="NHD", **options
    )
    return query, kv_cache, np.zeros((21, 6, 16), kind), plan


def rows_of(kv_cache: Any) -> list[Any]:
    return [kv_cache[TABLE[r, : -(-n // 16)]].reshape(-1, 1, 24)[:n] for r, n in enumerate(LENS)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("query_block_size", [None, 8])
@pytest.mark.parametrize("by_head", [False, True])
def test_selected_blocks(dtype: str, query_block_size: int | None, by_head: bool) -> None:
    query, kv_cache, output, plan = mla(dtype, query_block_size=query_block_size, select_by_query_head=by_head)
    heads, blocks = 6 if by_head else 1, [9, 5, 1] if query_block_size is None else [9, 4, 4, 5]
    selected = np.full((len(blocks), heads, 9), -1, np.int32)
    for i, h in np.ndindex(selected.shape[:2]):
        own = np.flatnonzero(np.random.default_rng([i, h]).random(blocks[i]) < 0.5)
        selected[i, h, : len(own)] = own
    selected[1, 0] = -1
    lse = np.zeros((6, 21), np.float32)
    got = cpu_attn.attention_mla(query, kv_cache, output, *STEP, plan, selected_blocks=selected, lse=lse)
    rows = rows_of(kv_cache)
    want, want_lse = reference.attention(
        *(query, rows, [x[..., :16] for x in rows], STARTS, LENS, 0.2),
        selected_blocks=selected,
        query_block_size=query_block_size,
    )
    assert got is output and (reference.relative_rms(output, want, STARTS) <= reference.BUDGET[dtype]).all()
    seen = np.isfinite(want_lse)
    assert (seen == np.isfinite(lse)).all() and not seen.all()
    lse, want_lse = lse[seen], want_lse[seen]
    assert (np.abs(lse - want_lse) <= reference.LSE_BUDGET[dtype] * np.maximum(1, np.abs(want_lse))).all()


def test_blocks_refused() -> None:
    query, kv_cache, output, plan = mla("float32")
    for selected, words in (
        (np.zeros((3, 6, 1), np.int32), "selected_blocks: axis 1 is 6, expected num_kv_heads = 1"),
        (np.array([[[1]], [[5]], [[0]]], np.int32), "selected_blocks: request 1: kv head 0: position 0 holds block 5"),
    ):
        with pytest.raises(ValueError, match=words):
            cpu_attn.attention_mla(query, kv_cache, output, *STEP, plan, selected_blocks=selected)
    assert not output.any()


NAMES = ("query", "kv_cache", "output", "query_start_loc", "seq_lens", "scale", "causal", "block_table")


def arguments(dtype: str = "float32", **options: Any) -> dict[str, Any]:
    query, kv_cache, output, plan = mla(dtype, **options)
    given = (query, kv_cache, output, *STEP)
    return {**dict(zip(NAMES, given, strict=True)), "scheduler_metadata": plan}


class Foreign:
    """An array that only its interface describes."""

    def __init__(self, array: Any) -> None:
        self.__array_interface__ = array.__array_interface__
        self.array = array


@pytest.mark.parametrize("make", ["apart", "foreign", "float32"])
def test_caches(make: str) -> None:
    """Blocks and rows that lie apart, an array of somebody else's, an output of another dtype: the same bits."""
    dtype = "bfloat16" if make == "float32" else "float32"
    plain, other = arguments(dtype), arguments(dtype)
    cpu_attn.attention_mla(**plain)
    if make == "float32":
        other["output"] = np.zeros((21, 6, 16), np.float32)
    else:
        wide = np.full((30, 32, 40), np.nan, np.float32)
        wide[::2, ::2, 3:27] = other["kv_cache"]
        other["kv_cache"] = wide[::2, ::2, 3:27]
    if make == "foreign":
        other["kv_cache"] = Foreign(other["kv_cache"])
    cpu_attn.attention_mla(**other)
    assert same_bits(plain["output"], other["output"].astype(plain["output"].dtype))


CACHE = np.zeros((15, 16, 24), np.float32)


@pytest.mark.parametrize(
    ("spoiled", "error", "words"),
    [
        ({"kv_cache": CACHE[None]}, ValueError, ["kv_cache: 4 axes, expected 3: [num_blocks, block_size, width]"]),
        ({"kv_cache": CACHE[0]}, ValueError, ["kv_cache: 2 axes, expected 3"]),
        ({"kv_cache": CACHE[..., :23]}, ValueError, ["kv_cache: axis 2 is 23, expected head_size = 24"]),
        ({"kv_cache": CACHE[..., :16]}, ValueError, ["kv_cache: axis 2 is 16"]),
        ({"kv_cache": CACHE[..., ::-1]}, ValueError, ["kv_cache: the last axis has stride -1"]),
        ({"kv_cache": CACHE[:, :0]}, ValueError, ["kv_cache: block_size is 0"]),
        ({"kv_cache": CACHE[:14]}, ValueError, ["block_table: request 0: position 0 holds block 14, outside 0..13"]),
        ({"kv_cache": CACHE.astype(np.float16)}, TypeError, ["kv_cache: dtype float16, expected float32"]),
        ({"kv_cache": CACHE.astype(np.float64)}, TypeError, ["kv_cache: dtype float64"]),
        ({"kv_cache": CACHE.view(np.uint8)}, TypeError, ["kv_cache: dtype uint8"]),
        ({"kv_cache": None}, TypeError, ["kv_cache: expected an array"]),
        ({"kv_cache": CACHE.tolist()}, TypeError, ["kv_cache: expected an array"]),
        (
            {"output": np.zeros((21, 6, 24), np.float32)},
            ValueError,
            ["output: axis 2 is 24, expected head_size_v = 16"],
        ),
        ({"query": np.zeros((21, 6, 16), np.float32)}, ValueError, ["query: axis 2 is 16, expected head_size = 24"]),
        ({"kv_cache_dtype": "fp8"}, ValueError, ["kv_cache_dtype: 'fp8', scheduler_metadata was made for float32"]),
        ({"k_scale": 2.0}, ValueError, ["k_scale: 2.0 applies to fp8"]),
        ({"k_scale": "x"}, TypeError, ["k_scale: expected a number"]),
        ({"sliding_window": 3}, ValueError, ["sliding_window: 3, scheduler_metadata was made for"]),
        ({"causal": 2}, TypeError, ["causal: expected True or False"]),
    ],
)
def test_refused(spoiled: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    fine = arguments()
    refuses(cpu_attn.attention_mla, fine | spoiled, error, *words)
    cpu_attn.attention_mla(**fine)


def test_plans_refused() -> None:
    def plan(*sizes: int, **options: Any) -> dict[str, Any]:
        lens = (LENS, "float32", STARTS)
        options = {"head_size_v": 16, "kv_cache_layout": "NHD", **options}
        return {"scheduler_metadata": cpu_attn.get_scheduler_metadata(3, 6, *sizes, *lens, **options)}

    for made, words in (
        (plan(2, 24), "scheduler_metadata: made for 2 kv heads of 24/16"),
        (plan(1, 24, kv_cache_dtype="auto/fp8"), "scheduler_metadata: made for K of float32 and V of fp8_e4m3"),
        (plan(1, 24, kv_cache_layout="HND"), "kv_cache_layout: 'NHD', scheduler_metadata was made for 'HND'"),
        (plan(1, 24, kv_cache_rotation="hadamard"), "kv_cache_rotation: 'none', scheduler_metadata was made for"),
        (plan(1, 24, block_table=TABLE, block_size=8), "kv_cache: block_size is 16, scheduler_metadata was made for 8"),
    ):
        refuses(cpu_attn.attention_mla, arguments() | made, ValueError, words)
