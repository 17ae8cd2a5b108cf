# SPDX-License-Identifier: Apache-2.0
"""float16 and float32 by tiles of bfloat16 parts (native/kernel/amx/floats.h): every feature with more rows than
vector kernels would take, and numbers at the edges of what parts hold, from where segments go by vectors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cpu_attn import reference

from ..cases.case import Case
from ..cases.fills import FILLS
from ..cases.judge import check
from ..cases.problem import build
from ..cases.run import run
from .test_pipeline import COMMON_NUMBERS, ISAS, MASKS, attend, grow_by, has_its_bits_alone, numbers, times

pytestmark = [pytest.mark.isa, pytest.mark.skipif(not ISAS, reason="no isa here has tiles")]
dtypes = pytest.mark.parametrize("dtype", ["float16", "float32"])

# Tiles take tasks of 32 rows of float16 and 64 of float32; strips have 32, tasks 512.
QUERIES = {"31 rows": (31, 1), "63": (21, 3), "64": (16, 4), "65": (65, 1), "95": (19, 5), "two tasks": (131, 4)}
MORE_MASKS: dict[str, dict[str, Any]] = {
    **MASKS,
    "chunks": {"chunk": 48},
    "alibi": {"alibi": 0.25},
    "bias": {"bias": "heads"},
    "bias with holes": {"bias": "holes"},
    "softcap, alibi and bias": {"softcap": 3.0, "alibi": 0.5, "bias": "batch", "sliding_window": 77},
}


SIZES = [(64, 64), (32, 32), (128, 64), (40, 72), (1, 3), (16, 16), (96, 160), (256, 256), (576, 512)]


def holds(name: str, q_len: int, group: int, seq_len: int, **options: Any) -> None:
    options = {"num_heads": 2 * group, "num_kv_heads": 2, "head_size": 64, **options}
    problem = build(Case(f"parts-{name}-{options['dtype']}", (q_len,), (seq_len,), **options))
    for isa in ISAS:
        result = check(problem, *run(problem, isa))
        assert result.ok, result.message


@dtypes
@pytest.mark.parametrize("mask", MORE_MASKS)
@pytest.mark.parametrize("rows", QUERIES)
def test_masks_and_rows(rows: str, mask: str, dtype: str) -> None:
    q_len, group = QUERIES[rows]
    holds(f"{rows}-{mask}", q_len, group, q_len + 217, dtype=dtype, **MORE_MASKS[mask])


@dtypes
@pytest.mark.parametrize("seq_len", [64, 65, 1024, 1039, 2100])
@pytest.mark.parametrize("sizes", SIZES)
def test_head_sizes_and_blocks(sizes: tuple[int, int], seq_len: int, dtype: str) -> None:
    holds(f"{sizes}-{seq_len}", 33, 2, seq_len, head_size=sizes[0], head_size_v=sizes[1], dtype=dtype)


@dtypes
@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("size", [64, 256])
def test_fills(size: int, fill: str, dtype: str) -> None:
    holds(f"fill-{fill}-{size}", 70, 2, 1100, head_size=size, fill=fill, dtype=dtype)


CACHES: dict[str, dict[str, Any]] = {
    **{kv: {"kv_cache_dtype": kv, "head_size": 96} for kv in ("fp8_e4m3", "fp8_e5m2", "int8", "int4", "int5")},
    "fp8 HND": {"kv_cache_dtype": "fp8_e5m2", "kv_cache_layout": "HND"},
    "odd sizes": {"kv_cache_dtype": "int8", "head_size": 41, "head_size_v": 35},
    "rotated": {"kv_cache_dtype": "int4", "kv_cache_rotation": "hadamard", "head_size": 128},
    "HND": {"kv_cache_layout": "HND"},
    "NHD, blocks of 8": {"kv_cache_layout": "NHD", "block_size": 8},
    "blocks of 24": {"block_size": 24},
    "blocks of 1": {"block_size": 1},
    "strided": {"strided": True},
    "blocks": {"selected": 0.3},
    "blocks of a part": {"selected": 0.3, "query_block": 64},
    "blocks of query heads": {"selected": 0.3, "select_by_query_head": True},
    "tokens": {"selected_tokens": 0.5},
    "spans": {"mm_prefix_range": (((5, 60),),)},
    "documents": {"document_start_loc": ((0, 77, 150),)},
    "tree": {"tree": "bits"},
    "tree and window": {"tree": "binary", "sliding_window": 30, "softcap": 4.0},
    "latent": {"kv_cache_layout": "NHD", "latent": True, "num_kv_heads": 1, "head_size": 80, "head_size_v": 64},
    "NaN where nobody looks": {"fill": "masked", "sliding_window": 40},
    "NaN late": {"fill": "late-nan"},
}


@dtypes
@pytest.mark.parametrize("options", CACHES)
def test_caches_and_lists(options: str, dtype: str) -> None:
    tree = "tree" in options
    holds(options, 100, 2, 130 if tree else 300, dtype=dtype, **CACHES[options])


@dtypes
def test_a_request_has_its_bits_whatever_is_beside_it(dtype: str) -> None:
    query_lens, seq_lens = (40, 17, 1, 100, 140), (1100, 40, 300, 100, 2300)
    for options in ({"sliding_window": 150}, {}, {"softcap": 3.0}):
        has_its_bits_alone(Case(f"parts-batch-{dtype}", query_lens, seq_lens, 8, 2, 64, dtype=dtype, **options))


NUMBERS = {
    **COMMON_NUMBERS,
    **{f"a key {n} octaves above": grow_by(n) for n in (0.4, 9, 29, 59, 60, 61, 84, 85, 100, 127, 300, 5000)},
}
# They leave the range of float16.
LARGE = {
    "huge keys": times(1, 1e10),
    "huger keys": times(1, 1e20),
    "tiny keys": times(1, 1e-30),
    "tinier keys": times(1, 1e-36),
    "tiny values": times(2, 2.0**-90),
    "tinier values": times(2, 2.0**-110),
    "huge values": times(2, 2.0**27),
    "huger values": times(2, 2.0**80),
    "a key 1e7 octaves above": grow_by(1e7),
}


@pytest.mark.parametrize("softcap", [0.0, 20.0])
@pytest.mark.parametrize(
    ("dtype", "name"), [*((d, n) for d in ("float16", "float32") for n in NUMBERS), *(("float32", n) for n in LARGE)]
)
def test_numbers(name: str, dtype: str, softcap: float) -> None:
    q, k, v = {**NUMBERS, **LARGE}[name](np.random.default_rng(5))
    if dtype == "float16":
        q, k, v = (np.clip(x, -60000, 60000, where=np.isfinite(x), out=x) for x in (q, k, v))
    error, lse_error = attend(q, k, v, dtype, softcap=softcap)
    assert error <= reference.BUDGET[dtype]
    assert lse_error <= reference.LSE_BUDGET[dtype]


@dtypes
@pytest.mark.parametrize("first", [0, 10, 32, 64, 100])
@pytest.mark.parametrize("octaves", [0.6, 9, 61, 300])
def test_references_grow_between_blocks(octaves: float, first: int, dtype: str) -> None:
    """Blocks have up to 512 keys, so O and l of the first one follow the second one's references."""
    q, k, v = numbers(np.random.default_rng(7), size=256)
    q[..., 0] = 16
    k[..., 0] = 0
    k[520 + first, 0, 0] = octaves * np.log(2)
    error, lse_error = attend(q, k, v, dtype)
    assert error <= reference.BUDGET[dtype]
    assert lse_error <= reference.LSE_BUDGET[dtype]


@dtypes
@pytest.mark.parametrize("scale", [0.0, -0.125, 1e-30, 1e30])
def test_scales(scale: float, dtype: str) -> None:
    error, _ = attend(*numbers(np.random.default_rng(9)), dtype, scale=scale)
    assert error <= reference.BUDGET[dtype]
