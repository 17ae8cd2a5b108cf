# SPDX-License-Identifier: Apache-2.0
"""attention_mla over selected blocks, against the oracle over the rows of its cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cpu_attn
from cpu_attn import reference

from .formats import numpy_dtype

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
    assert (np.abs(lse - want_lse)[seen] <= reference.LSE_BUDGET[dtype] * np.maximum(1, np.abs(want_lse[seen]))).all()


def test_blocks_refused() -> None:
    query, kv_cache, output, plan = mla("float32")
    for selected, words in (
        (np.zeros((3, 6, 1), np.int32), "selected_blocks: axis 1 is 6, expected num_kv_heads = 1"),
        (np.array([[[1]], [[5]], [[0]]], np.int32), "selected_blocks: request 1: kv head 0: position 0 holds block 5"),
    ):
        with pytest.raises(ValueError, match=words):
            cpu_attn.attention_mla(query, kv_cache, output, *STEP, plan, selected_blocks=selected)
    assert not output.any()
