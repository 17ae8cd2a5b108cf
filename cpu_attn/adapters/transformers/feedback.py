# SPDX-License-Identifier: Apache-2.0
"""This module makes what a PagedCache feeds errors of rounding keys back by, from a model's weights, and knows that of
balanced models by their configs, which are all that a cache is made from."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cpu_attn import _check, rotation
from cpu_attn.transformers.channels import NONE, Group, attending, configs, groups

Tables = dict[int, NDArray[np.float32]]
_of_configs: dict[int, Tables] = {}  # by the id of a config that lives


def key_feedback(
    model: Any, inputs: dict[str, Any] | None = None, kv_cache_rotation: str = "hadamard"
) -> dict[int, NDArray[np.float32]]:
    """Finds what :class:`PagedCache` feeds errors of rounding keys back by, in each layer of a model.

    How much an error counts in a channel is the mean square of that channel in the queries, which the pass of random
    tokens of :func:`balance` shows. :func:`balance` does the same for the model that it balances.

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
        >>> cache = PagedCache(model.config, kv_cache_dtype="int6/int4", k_feedback=key_feedback(model))
        >>> model.generate(**inputs, cache=cache)
    """
    _check.instance("model", model, torch.nn.Module)
    _check.kv_cache_rotation(kv_cache_rotation)
    reasons: list[str] = []
    with attending(model) as probe, torch.no_grad():
        found = tables(groups(model, inputs, probe, reasons), reasons, kv_cache_rotation)
    if not found:
        raise ValueError(f"model: no layer of {type(model).__name__} makes its keys; {(reasons or [NONE])[0]}")
    return found


def tables(found: Iterable[Group], reasons: list[str], kv_cache_rotation: str = "hadamard") -> Tables:
    """Gives what :func:`key_feedback` does of layers whose queries have the sizes that ``found`` says."""
    made: Tables = {}
    seen: Counter[Any] = Counter()
    for group in found:
        numbers = [getattr(layer.module, "layer_idx", None) for layer in group.layers]
        seen.update(numbers)
        if isinstance(numbers[0], int):
            made[numbers[0]] = rotation.error_feedback(np.square(group.query), kv_cache_rotation)
        else:
            reasons.append(f"{group.name}: it has no layer_idx")
    return {number: factors for number, factors in made.items() if seen[number] == 1}


def remember(model: Any, made: Tables) -> None:
    """Has caches for the configs of a model feed errors back so, until :func:`forget`."""
    for config in configs(model):
        if id(config) not in _of_configs:
            weakref.finalize(config, _of_configs.pop, id(config), None)
        _of_configs[id(config)] = made


def forget(model: Any) -> None:
    for config in configs(model):
        _of_configs.pop(id(config), None)


def remembered(config: Any) -> Tables | None:
    """Gives what caches for a config feed errors of rotated keys back by, or None where its model is not balanced."""
    return _of_configs.get(id(config))
