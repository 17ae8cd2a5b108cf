# SPDX-License-Identifier: Apache-2.0
"""This module makes a model's queries and keys alike, channel by channel, by factors that its weights take in.

Numbers that are alike (channels.py) share a factor. A copy of the module in float32, with the factors in its weights,
has to attend over the queries times the factors and the keys over them, and to give what it gave before; otherwise it
stays as it is.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch

from cpu_attn import _check, rotation
from cpu_attn.transformers import feedback
from cpu_attn.transformers.channels import (
    NONE,
    Bools,
    Group,
    Layer,
    Probe,
    Source,
    UnbalanceableError,
    attending,
    by_kv_head,
    forward,
    groups,
)

STATE = "_cpu_attn_balance"  # the attribute of a balanced model: the weights that it had
CLOSE, SAME = 1e-4, 1e-3  # of the largest number: queries and keys in float32, and what the softmax makes of them
Factors = np.ndarray[Any, np.dtype[np.float32]]


def balance(model: Any, inputs: dict[str, Any] | None = None) -> list[str]:
    """Makes the channels of a model's queries and keys alike, which helps quantised caches; a second call undoes it.

    Where the weights that make them last (projections, or the norms of heads) can take factors in, queries are
    multiplied by those of :func:`cpu_attn.rotation.balance` and keys divided by them. q.k stays as it is, and so do the
    model's outputs, to the rounding of its dtype. How large a channel is shows in a forward pass of 61 random tokens,
    the same in every call, so that the factors are a function of the weights. The weights before are kept until the
    second call, which puts them back, bit for bit.

    Until then a :class:`PagedCache` made for ``model.config``, the object itself, feeds errors of rounding rotated keys
    of integers back as with :func:`key_feedback`, and rotates fp8.

    A cache that is in use holds keys of the weights that made them: balance before the first token.

    Args:
        model: of transformers, for inference (``model.eval()``), on the CPU.
        inputs: what its forward takes for those tokens; unless said, ``input_ids`` (and ``decoder_input_ids``).

    Returns:
        The names of the modules that have been balanced; an empty list where a second call has undone it. Those that
        are not among them are as they were: norms without weights make their queries or keys (Llama 4's rotary layers),
        they cache latents (DeepSeek-V3), or they share weights with others.

    Raises:
        ValueError: there is no module that can be balanced (it says why the first cannot), or the model does not take
            ``input_ids`` alone and there are no ``inputs``.
        TypeError: ``model`` is no module of torch.

    Maths: :func:`cpu_attn.rotation.balance`.

    Example:
        >>> names = balance(model)
        >>> model.generate(**inputs, cache=PagedCache(model.config, kv_cache_dtype="int6/int4"))
    """
    _check.instance("model", model, torch.nn.Module)
    if hasattr(model, STATE):
        for parameter, data in getattr(model, STATE):
            parameter.data = data
        delattr(model, STATE)
        feedback.forget(model)
        return []
    before: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
    names: list[str] = []
    reasons: list[str] = []
    owners = Counter(id(p) for m in model.modules() for p in m._parameters.values())
    found: list[Group] = []
    with attending(model) as probe, torch.no_grad():
        for group in groups(model, inputs, probe, reasons):
            found.append(group)
            try:
                factors = _factors(group)
                changes = _changes(group.layers, factors, probe, owners)
            except UnbalanceableError as e:
                reasons.append(str(e))
                continue
            group.query *= factors
            names += [layer.name for layer in group.layers]
            for parameter, data in changes:
                before.append((parameter, parameter.data))
                parameter.data = data.to(parameter)
    if not names:
        raise ValueError(f"model: nothing in {type(model).__name__} can be balanced; {(reasons or [NONE])[0]}")
    setattr(model, STATE, before)
    feedback.remember(model, feedback.tables(found, reasons))
    return names


# ---- factors, and where they go ----


def _factors(group: Group) -> Factors:
    """Gives the factors of queries [Hkv, D]."""
    logs = np.log(rotation.balance(group.query, group.key, rot_dim=0)).ravel()
    means = np.bincount(group.parts, logs) / np.bincount(group.parts)
    factors: Factors = np.exp(means[group.parts]).reshape(group.query.shape).astype(np.float32)
    if (np.ptp(factors, 1) <= 1e-6 * factors.max(1)).all():
        raise UnbalanceableError(f"{group.name}: a factor would be that of a whole head")
    return factors


def _changes(
    layers: list[Layer], factors: Factors, probe: Probe, owners: Counter[int]
) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Gives the parameters that take the factors in, with their new values in float32, which have been tried."""
    changes: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
    for layer in layers:
        before = [layer.copy(*call.args, **call.kwargs) for call in layer.calls] if layer.makes_keys else []
        for source in layer.sources:
            scale = _of_channels(source.of_query, factors) / _of_channels(source.of_key, factors)
            if not (scale != 1).any():
                continue
            leaf, real = (x.get_submodule(source.name) for x in (layer.copy, layer.module))
            found = _scaled(leaf, torch.from_numpy(scale), source, layer.name)
            for name, data in found.items():
                if owners[id(real._parameters[name])] > 1:
                    raise UnbalanceableError(f"{layer.name}: other modules have the {name} of its {source.name}, too")
                leaf._parameters[name].data = data
                changes.append((real._parameters[name], data))
        _try(layer, probe, torch.from_numpy(factors), before)
    return changes


def _of_channels(made: Bools, factors: Factors) -> Factors:
    """Gives the factor of each channel, 1 for those that make nothing."""
    numbers = by_kv_head(made, len(factors))
    of: Factors = np.where(numbers.any(1), factors.ravel()[numbers.argmax(1)], np.float32(1))
    return of


def _scaled(leaf: torch.nn.Module, scale: torch.Tensor, source: Source, name: str) -> dict[str, torch.Tensor]:
    """Gives weights with which a layer's output is ``scale`` times as large. What a weight has of each channel shows
    when it is tried: a row, a column, or a number, to which 1 may be added."""
    had = {n: p.data for n, p in leaf._parameters.items() if n in ("weight", "bias") and p is not None}
    weight, n = had["weight"], len(scale)
    if "bias" in had and had["bias"].numel() != n:
        raise UnbalanceableError(f"{name}: the bias of its {source.name} is not one of channels")
    ways: list[torch.Tensor] = []
    if weight.dim() == 2:
        ways += [weight * by for axis, by in ((0, scale[:, None]), (1, scale)) if weight.shape[axis] == n]
    if weight.numel() == n:
        by = scale.reshape(weight.shape)
        ways += [weight * by, (weight + 1) * by - 1]
    want = (source.output.reshape(-1, n) * scale).reshape(source.output.shape)
    for way in ways:
        found = {m: way if m == "weight" else (p.ravel() * scale).reshape(p.shape) for m, p in had.items()}
        for m, data in found.items():
            leaf._parameters[m].data = data
        if _close(leaf(source.given), want, CLOSE):
            return found
        for m, data in had.items():
            leaf._parameters[m].data = data
    raise UnbalanceableError(f"{name}: the weights of its {source.name} do not scale what it gives")


def _try(layer: Layer, probe: Probe, factors: torch.Tensor, before: list[Any]) -> None:
    """Raises UnbalanceableError unless the copy attends over balanced queries and keys, and gives what it gave."""
    query, key = forward(layer.name, layer.copy, probe, layer.calls[0])
    group = query.shape[1] // len(factors)
    if not _close(query, layer.query * factors.repeat_interleave(group, 0)[:, None], CLOSE):
        raise UnbalanceableError(f"{layer.name}: its queries do not scale with the weights that make them")
    if not layer.makes_keys:
        return
    if not _close(key, layer.key / factors[:, None], CLOSE):
        raise UnbalanceableError(f"{layer.name}: its keys do not scale with the weights that make them")
    for its, output in zip(layer.calls, before, strict=True):
        pairs = zip(_tensors(layer.copy(*its.args, **its.kwargs)), _tensors(output), strict=True)
        if not all(_close(x, y, SAME) for x, y in pairs):
            raise UnbalanceableError(f"{layer.name}: what makes its queries and keys makes more than them")


def _tensors(output: Any) -> list[torch.Tensor]:
    found = output if isinstance(output, (tuple, list)) else [output]
    return [x for x in found if isinstance(x, torch.Tensor)]


def _close(x: torch.Tensor, y: torch.Tensor, most: float) -> bool:
    return x.shape == y.shape and bool((x - y).abs().max() <= most * y.abs().max())
