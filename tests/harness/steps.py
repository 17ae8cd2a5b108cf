# SPDX-License-Identifier: Apache-2.0
"""One small valid step whose arguments a test then spoils, one at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

import cpu_attn

from ..cases.formats import numpy_dtype

PLAN = ("num_reqs", "num_heads", "num_kv_heads", "head_size", "seq_lens", "dtype", "query_start_loc")


def write_args(dtype: str = "float32") -> dict[str, Any]:
    """Arguments of reshape_and_cache: 5 tokens, 2 kv heads of 8, 4 blocks of 16."""
    rng = np.random.default_rng(1)
    kind = numpy_dtype(dtype)
    return {
        "key": rng.standard_normal((5, 2, 8)).astype(kind),
        "value": rng.standard_normal((5, 2, 8)).astype(kind),
        "key_cache": np.zeros((4, 2, 16, 8), kind),
        "value_cache": np.zeros((4, 2, 16, 8), kind),
        "slot_mapping": np.array([17, 18, -1, 63, 0], np.int64),
    }


def plan_args(dtype: str = "float32") -> dict[str, Any]:
    """Arguments of get_scheduler_metadata: requests of 3 and 1 query tokens over 20 and 7 keys."""
    return {
        "num_reqs": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 8,
        "seq_lens": np.array([20, 7], np.int32),
        "dtype": dtype,
        "query_start_loc": np.array([0, 3, 4], np.int32),
        "causal": True,
        "sliding_window": -1,
    }


def attention_args(dtype: str = "float32", **plan: Any) -> dict[str, Any]:
    """Arguments of attention_with_kv_cache for that plan; every array exists once."""
    rng = np.random.default_rng(2)
    kind = numpy_dtype(dtype)
    planned = plan_args(dtype) | plan
    return {
        "query": rng.standard_normal((4, 4, 8)).astype(kind),
        "key_cache": rng.standard_normal((4, 2, 16, 8)).astype(kind),
        "value_cache": rng.standard_normal((4, 2, 16, 8)).astype(kind),
        "output": np.zeros((4, 4, 8), kind),
        "query_start_loc": planned["query_start_loc"].copy(),
        "seq_lens": planned["seq_lens"].copy(),
        "scale": 0.25,
        "causal": planned["causal"],
        "alibi_slopes": None,
        "sliding_window": planned["sliding_window"],
        "block_table": np.array([[1, 3], [2, -7]], np.int32),
        "softcap": 0.0,
        "scheduler_metadata": cpu_attn.get_scheduler_metadata(**planned),
        "lse": np.zeros((4, 4), np.float32),
    }
