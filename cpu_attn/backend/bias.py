# SPDX-License-Identifier: Apache-2.0
"""This module makes dense biases for tests and for engines that need them; no layer here makes one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cpu_attn import _check, reference
from cpu_attn._arrays import numpy_view
from cpu_attn._dtypes import DTYPES, dtype_name
from cpu_attn.backend.paged_attention import Array


def make_alibi_bias(alibi_slopes: Any, dtype: Any, seq_lens: Sequence[int]) -> list[Array]:
    """Makes the causal ALiBi bias of each length as a dense array. Attention itself never needs one.

    Args:
        alibi_slopes: [Hq], a list or an array.
        dtype: of the result: float32, float16 or bfloat16.
        seq_lens: the lengths, 0 or more.

    Returns:
        For each length L an array [1, Hq, L, L]: slope * (key - query), and -inf where the key is later.

    Raises:
        ValueError: the slopes have other axes, or a length is negative.
        TypeError: an argument has another type or dtype.

    Maths: arXiv:2108.12409.

    Example:
        >>> from cpu_attn import make_alibi_bias
        >>> make_alibi_bias([0.5], "float32", [2])[0][0, 0].tolist()
        [[0.0, -inf], [-0.5, 0.0]]
    """
    if not isinstance(alibi_slopes, (list, tuple)):
        alibi_slopes = numpy_view("alibi_slopes", alibi_slopes)
    slopes = _check.listed("alibi_slopes", alibi_slopes, np.float32)
    if slopes.ndim != 1:
        raise ValueError(f"alibi_slopes: {slopes.ndim} axes, expected 1: [num_heads]")
    slopes, kind = slopes.astype(np.float64)[:, None, None], DTYPES[dtype_name(dtype)]
    biases = []
    for length in _lengths(seq_lens):
        distance = np.arange(length) - np.arange(length)[:, None]
        bias = np.where(distance > 0, -np.inf, slopes * distance)
        biases.append(bias[None].astype(kind))
    return biases


def make_sliding_window_bias(
    seq_lens: Sequence[int], window_size: int | None, dtype: Any, causal: bool = True
) -> list[Array]:
    """Makes the mask of a sliding window of each length as a dense array. Attention itself never needs one.

    Args:
        seq_lens: the lengths, 0 or more.
        window_size: w: the last w keys, the query's own among them, and w - 1 ahead where not causal; None: no window.
        dtype: of the result: float32, float16 or bfloat16.
        causal: whether later keys are hidden.

    Returns:
        For each length L an array [1, L, L]: 0 where a query sees the key, else -inf.

    Raises:
        ValueError: a length is negative, or the window is less than 1.
        TypeError: an argument has another type or dtype.

    Example:
        >>> from cpu_attn import make_sliding_window_bias
        >>> make_sliding_window_bias([3], 2, "float32")[0][0].tolist()
        [[0.0, -inf, -inf], [0.0, 0.0, -inf], [-inf, 0.0, 0.0]]
    """
    window = _check.window(-1 if window_size is None else window_size, "window_size")
    causal, kind = _check.boolean("causal", causal), DTYPES[dtype_name(dtype)]
    masks = [reference.visible(length, length, causal, window) for length in _lengths(seq_lens)]
    return [np.where(mask, 0.0, -np.inf)[None].astype(kind) for mask in masks]


def _lengths(seq_lens: Any) -> list[int]:
    return [_check.integer(f"seq_lens[{i}]", n, 0) for i, n in enumerate(_check.sequence("seq_lens", seq_lens))]
