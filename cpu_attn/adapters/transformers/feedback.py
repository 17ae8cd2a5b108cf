# SPDX-License-Identifier: Apache-2.0
"""This module makes what a PagedCache feeds errors of rounding keys back by, from a model's weights."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cpu_attn import _check, rotation
from cpu_attn.transformers.balance import NONE, channel_sizes


def key_feedback(
    model: Any, inputs: dict[str, Any] | None = None, kv_cache_rotation: str = "hadamard"
) -> dict[int, NDArray[np.float32]]:
    """Finds what :class:`PagedCache` feeds errors of rounding keys back by, in each layer of a model.

    How much an error counts in a channel is the mean square of that channel in the queries, which the pass of random
    tokens of :func:`balance` shows. Balance first, since the factors are those of the weights as they are.

    Args:
        model: of transformers, for inference (``model.eval()``), on the CPU. Nothing of it changes.
        inputs: as in :func:`balance`.
        kv_cache_rotation: of the cache; what it says of K counts.

    Returns:
        float32 [Hkv, D, D] by the number of the layer in a cache (``layer_idx``). Missing are layers that cache latents
        or attend over keys which no weights of theirs make last, and numbers that several modules have.

    Raises:
        ValueError: no layer is left, the model does not take ``input_ids`` alone and there are no ``inputs``, or a name
            is unknown.
        TypeError: ``model`` is no module of torch.

    Maths: :func:`cpu_attn.rotation.error_feedback`.

    Example:
        >>> names = balance(model)
        >>> cache = PagedCache(model.config, kv_cache_dtype="int6/int4", k_feedback=key_feedback(model))
        >>> model.generate(**inputs, cache=cache)
    """
    _check.instance("model", model, torch.nn.Module)
    _check.kv_cache_rotation(kv_cache_rotation)
    reasons: list[str] = []
    found: dict[int, NDArray[np.float32]] = {}
    seen: Counter[Any] = Counter()
    for group, (query, _) in channel_sizes(model, inputs, reasons):
        numbers = [getattr(layer.module, "layer_idx", None) for layer in group]
        seen.update(numbers)
        if isinstance(numbers[0], int):
            found[numbers[0]] = rotation.error_feedback(np.square(query), kv_cache_rotation)
        else:
            reasons.append(f"{group[0].name}: it has no layer_idx")
    found = {number: factors for number, factors in found.items() if seen[number] == 1}
    if not found:
        raise ValueError(f"model: no layer of {type(model).__name__} makes its keys; {(reasons or [NONE])[0]}")
    return found
