# SPDX-License-Identifier: Apache-2.0
"""This module makes a model's queries and keys alike, channel by channel, by factors that its weights take in.

It knows no architecture. A forward pass of random tokens shows which modules attend, and over which queries and keys.
Derivatives show which channels of which layers (projections, norms of heads) make which of their numbers: a projection
before a norm makes none by itself, and a rotary embedding makes two of each channel that it turns. Channels that make
the same number share a factor. A copy of the module in float32, with the factors in its weights, then has to attend
over the queries times the factors and the keys over them, and to give what it gave before; otherwise it stays as it is.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from cpu_attn import _check, rotation
from cpu_attn.transformers import private
from cpu_attn.transformers.attention import attention
from cpu_attn.transformers.lazy import LazyTensor
from cpu_attn.transformers.masks import mask_function
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel

NAME = "cpu_attn_balance"  # the implementation that a model has while it is looked at
STATE = "_cpu_attn_balance"  # the attribute of a balanced model: the weights that it had
TOKENS = 61  # a prime, so that no axis of weights is mistaken for theirs
CLOSE, SAME = 1e-4, 1e-3  # of the largest number: queries and keys in float32, and what the softmax makes of them
Bools = np.ndarray[Any, np.dtype[np.bool_]]
Factors = np.ndarray[Any, np.dtype[np.float32]]


class UnbalanceableError(ValueError):
    """Says why a module's keys cannot be balanced."""


class Attends(BaseException):
    """Ends a module's forward pass where it attends. It is no Exception, which a model might catch."""

    def __init__(self, query: torch.Tensor, key: torch.Tensor) -> None:
        super().__init__()
        self.query, self.key = query, key


@dataclass
class Call:
    """Holds what a module's forward was given, in float32, and the keys [B, Hkv, S, D] that it attended over."""

    args: Any
    kwargs: Any
    key: torch.Tensor


@dataclass
class Source:
    """Describes a layer whose output makes queries or keys by itself: given [...] and output [..., channels] of a call,
    and bool [channels, H, D] and [channels, Hkv, D]: the numbers that each channel makes."""

    name: str
    given: torch.Tensor
    output: torch.Tensor
    of_query: Bools
    of_key: Bools


@dataclass
class Layer:
    """Holds a module that attends, its calls, and a copy of it in float32; of the copy in the first call the queries
    [B, H, T, D], the keys [B, Hkv, S, D] and what makes them."""

    name: str
    module: torch.nn.Module
    calls: list[Call]
    copy: torch.nn.Module
    query: torch.Tensor
    key: torch.Tensor
    sources: list[Source]

    @property
    def makes_keys(self) -> bool:
        return any(source.of_key.any() for source in self.sources)


def balance(model: Any, inputs: dict[str, Any] | None = None) -> list[str]:
    """Makes the channels of a model's queries and keys alike, which helps quantised caches; a second call undoes it.

    Where the weights that make them last (projections, or the norms of heads) can take factors in, queries are
    multiplied by those of :func:`cpu_attn.rotation.balance` and keys divided by them. q.k stays as it is, and so do the
    model's outputs, to the rounding of its dtype. How large a channel is shows in a forward pass of 61 random tokens,
    the same in every call, so that the factors are a function of the weights. The weights before are kept until the
    second call, which puts them back, bit for bit.

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
        return []
    before: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
    names: list[str] = []
    reasons: list[str] = []
    owners = Counter(id(p) for m in model.modules() for p in m._parameters.values())
    with _attending(model) as probe, torch.no_grad():
        for group in _groups(_layers(model, inputs, probe, reasons), reasons):
            try:
                changes = _changes(group, probe, owners)
            except UnbalanceableError as e:
                reasons.append(str(e))
                continue
            names += [layer.name for layer in group]
            for parameter, data in changes:
                before.append((parameter, parameter.data))
                parameter.data = data.to(parameter)
    if not names:
        raise ValueError(f"model: nothing in {type(model).__name__} can be balanced; {(reasons or [NONE])[0]}")
    setattr(model, STATE, before)
    return names


def channel_sizes(
    model: Any, inputs: dict[str, Any] | None, reasons: list[str]
) -> Iterator[tuple[list[Layer], list[np.ndarray[Any, Any]]]]:
    """Gives the layers that attend over the same keys, of which the first makes them, with the sizes [Hkv, D] of
    channels in their queries and in the keys. ``reasons`` says in the end why others are not among them."""
    with _attending(model) as probe, torch.no_grad():
        for group in _groups(_layers(model, inputs, probe, reasons), reasons):
            try:
                yield group, _alike(group)[1]
            except UnbalanceableError as e:
                reasons.append(str(e))


NONE = "none of its modules asks transformers' attention interface"


# ---- which modules attend ----


class Probe:
    """Is what every layer's attention does: a function of what the attention function is given."""

    attend: Callable[..., Any] = staticmethod(attention)

    @contextmanager
    def attending(self, attend: Callable[..., Any]) -> Iterator[None]:
        self.attend, before = attend, self.attend
        try:
            yield
        finally:
            self.attend = before


@contextmanager
def _attending(model: Any) -> Iterator[Probe]:
    """Sends the attention of a model through a Probe."""
    probe = Probe()
    AttentionInterface.register(NAME, lambda *args, **kwargs: probe.attend(*args, **kwargs))
    AttentionMaskInterface.register(NAME, mask_function)
    configs = {id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}
    names = [private.implementation(config) for config in configs.values()]
    try:
        for config in configs.values():
            private.set_implementation(config, NAME)
        yield probe
    finally:
        for config, name in zip(configs.values(), names, strict=True):
            private.set_implementation(config, name)


def _inputs(model: Any) -> dict[str, Any]:
    """Makes random tokens; special ones are at the ends of a vocabulary."""
    size = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(size // 4, 3 * size // 4, (2, 1, TOKENS), generator=generator)
    names = inspect.signature(model.forward).parameters
    found: dict[str, Any] = {"input_ids": ids[0]}
    if "decoder_input_ids" in names:
        found["decoder_input_ids"] = ids[1]
    return found


def _run(model: Any, inputs: dict[str, Any] | None) -> None:
    if inputs is not None:
        model(**inputs)
        return
    inputs = _inputs(model)
    try:
        model(**inputs)
    except Exception as e:
        names = ", ".join(inputs)
        raise ValueError(f"inputs: {type(model).__name__} does not take random {names}; what it takes goes here") from e


def _layers(model: Any, inputs: dict[str, Any] | None, probe: Probe, reasons: list[str]) -> list[Layer]:
    """Finds the modules that attend, in their order, with what makes their queries and keys."""
    given: dict[torch.nn.Module, Any] = {}
    calls: dict[torch.nn.Module, list[Call]] = {}

    def enter(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        given[module] = args, kwargs

    def attend(module: Any, query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if module in given:
            (its_args, its_kwargs), its_key = tree_map(_single, (given[module], key), is_leaf=_is_cache)
            calls.setdefault(module, []).append(Call(its_args, its_kwargs, its_key))
        return attention(module, query, key, *args, **kwargs)

    hooks = [m.register_forward_pre_hook(enter, with_kwargs=True) for m in model.modules()]
    try:
        with probe.attending(attend):
            _run(model, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    names = {module: name for name, module in model.named_modules()}
    layers = []
    for module, its in calls.items():
        try:
            layers.append(_layer(names[module], module, its, probe))
        except UnbalanceableError as e:
            reasons.append(str(e))
    return layers


def _is_cache(x: Any) -> bool:
    return isinstance(x, Cache)


def _single(x: Any) -> Any:
    """Copies a tensor, floats to float32. What stands for a mask stays as it is, and a cache, which has the keys of
    this call by the next one, becomes None."""
    if _is_cache(x):
        return None
    if not isinstance(x, torch.Tensor) or isinstance(x, LazyTensor):
        return x
    return x.detach().to(torch.float32 if x.is_floating_point() else x.dtype, copy=True)


def _groups(layers: list[Layer], reasons: list[str]) -> list[list[Layer]]:
    """Puts layers together that attend over the keys of one of them, which is the first."""
    groups: list[list[Layer]] = []
    for layer in layers:
        key = layer.calls[0].key
        if layer.makes_keys:
            groups.append([layer])
            continue
        same = next((g for g in groups if key.shape == g[0].calls[0].key.shape and key.equal(g[0].calls[0].key)), None)
        if same:
            same.append(layer)
        else:
            reasons.append(f"{layer.name}: no weights of its own make its keys last")
    return groups


# ---- what makes queries and keys ----


def _forward(name: str, module: torch.nn.Module, probe: Probe, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives the queries and keys that a module attends over."""

    def attend(module: Any, query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        raise Attends(query, key)

    with probe.attending(attend):
        try:
            module(*call.args, **call.kwargs)
        except Attends as e:
            return e.query, e.key
        except Exception as e:
            raise UnbalanceableError(f"{name}: alone it raises {type(e).__name__}: {e}") from e
    raise UnbalanceableError(f"{name}: alone it does not attend")


def _layer(name: str, module: torch.nn.Module, calls: list[Call], probe: Probe) -> Layer:
    """Finds the layers whose outputs make queries and keys, and the numbers that each channel makes.

    Every output is cut from what made it, so that its derivatives are those of what comes behind it alone.
    """
    if hasattr(module, "expand_kv"):
        raise UnbalanceableError(f"{name}: it caches latents")
    single = copy.deepcopy(module).float().requires_grad_(False)
    given: dict[str, torch.Tensor] = {}
    outputs: dict[str, torch.Tensor] = {}

    def cut(leaf: str) -> Callable[..., Any]:
        def hook(module: Any, args: Any, output: Any) -> Any:
            if not isinstance(output, torch.Tensor) or not output.is_floating_point() or not args:
                return output
            given[leaf], outputs[leaf] = args[0].detach(), output.detach().requires_grad_()
            return outputs[leaf]

        return hook

    leaves = {leaf: m for leaf, m in single.named_modules() if _has_channels(m)}
    hooks = [m.register_forward_hook(cut(leaf)) for leaf, m in leaves.items()]
    try:
        with torch.enable_grad():
            states = _forward(name, single, probe, calls[0])
    finally:
        for hook in hooks:
            hook.remove()
    channels = {leaf: _channels(leaves[leaf].weight, x) for leaf, x in outputs.items()}
    of_query, of_key = (_made(x, outputs, channels) for x in states)
    sources = [Source(leaf, given[leaf], x.detach(), of_query[leaf], of_key[leaf]) for leaf, x in outputs.items()]
    sources = [source for source in sources if source.of_query.any() or source.of_key.any()]
    if not any(source.of_query.any() for source in sources):
        raise UnbalanceableError(f"{name}: no weights of its own make its queries last")
    query, key = (x.detach() for x in states)
    return Layer(name, module, calls, single, query, key, sources)


def _has_channels(module: torch.nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return weight is not None and weight.is_floating_point() and weight.dim() in (1, 2)


def _channels(weight: torch.Tensor, output: torch.Tensor) -> int:
    """Says how many channels an output has: a norm may have weights [H, D] for each token."""
    return int(weight.numel() if weight.shape == output.shape[-2:] else output.shape[-1])


def _made(states: torch.Tensor, outputs: dict[str, torch.Tensor], channels: dict[str, int]) -> dict[str, Bools]:
    """Says which numbers of states [B, H, T, D] each channel of outputs makes: bool [channels, H, D].

    A derivative by a dimension is taken of all heads at once, in sums with random weights, and one by a head of all
    dimensions. A channel makes the numbers of some heads in some dimensions, which these two say.
    """
    heads, size = states.shape[1], states.shape[3]
    if not states.requires_grad:
        return {name: np.zeros((n, heads, size), bool) for name, n in channels.items()}
    random = torch.randn(states.shape, generator=torch.Generator().manual_seed(1))

    def derivatives(sums: torch.Tensor) -> dict[str, Bools]:
        each = [torch.autograd.grad(s, list(outputs.values()), retain_graph=True, allow_unused=True) for s in sums]
        return {name: np.stack([_moves(one[i], n) for one in each]) for i, (name, n) in enumerate(channels.items())}

    with torch.enable_grad():
        of_dim, of_head = (derivatives((states * random).sum(axes)) for axes in ((0, 1, 2), (0, 2, 3)))
    return {name: (of_dim[name][None] & of_head[name][:, None]).transpose(2, 0, 1) for name in channels}


def _moves(gradient: torch.Tensor | None, channels: int) -> Bools:
    if gradient is None:
        return np.zeros(channels, bool)
    return np.asarray((gradient.reshape(-1, channels) != 0).any(0).numpy())


# ---- factors, and where they go ----


def _alike(group: list[Layer]) -> tuple[np.ndarray[Any, Any], list[np.ndarray[Any, Any]]]:
    """Gives the sizes [Hkv, D] of channels in queries and in keys, which are alike where a channel of some layer makes
    both numbers, and which numbers [Hkv * D] are in the same part then."""
    key = group[0].key
    heads, size = key.shape[1], key.shape[3]
    queries = [layer.query for layer in group]
    if any(q.shape[1] % heads or q.shape[3] != size for q in queries):
        raise UnbalanceableError(f"{group[0].name}: queries and keys of heads that do not fit")
    squares = [q.unflatten(1, (heads, -1)).square().mean((0, 2, 3)) for q in queries]
    sizes = torch.stack(squares).mean(0).sqrt().numpy(), key.square().mean((0, 2)).sqrt().numpy()
    together = _together(
        np.concatenate([_by_kv_head(made, heads) for x in group for s in x.sources for made in (s.of_query, s.of_key)])
    )
    counts = np.bincount(together)
    return together, [
        np.sqrt(np.bincount(together, np.square(x).ravel()) / counts)[together].reshape(x.shape) for x in sizes
    ]


def _factors(group: list[Layer]) -> Factors:
    """Gives the factors of queries [Hkv, D]."""
    together, (query, key) = _alike(group)
    logs = np.log(rotation.balance(query, key, rot_dim=0)).ravel()
    means = np.bincount(together, logs) / np.bincount(together)
    factors: Factors = np.exp(means[together]).reshape(query.shape).astype(np.float32)
    return factors


def _by_kv_head(made: Bools, heads: int) -> Bools:
    """Gives bool [channels, Hkv * D] of [channels, H, D]."""
    grouped: Bools = made.reshape(len(made), heads, -1, made.shape[2]).any(2).reshape(len(made), -1)
    return grouped


def _together(sets: Bools) -> np.ndarray[Any, Any]:
    """Numbers the parts of what sets [n, N] of N things hold together: two things of a set are in one part."""
    of_set, things = np.nonzero(sets)
    part = np.arange(sets.shape[1])
    while True:
        least, found = np.full(len(sets), sets.shape[1]), part.copy()
        np.minimum.at(least, of_set, part[things])
        np.minimum.at(found, things, least[of_set])
        if (found == part).all():
            return np.unique(part, return_inverse=True)[1].ravel()
        part = found


def _changes(group: list[Layer], probe: Probe, owners: Counter[int]) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Gives the parameters that take the factors in, with their new values in float32, which have been tried."""
    factors = _factors(group)
    if (np.ptp(factors, 1) <= 1e-6 * factors.max(1)).all():
        raise UnbalanceableError(f"{group[0].name}: a factor would be that of a whole head")
    changes: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
    for layer in group:
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
    by_kv_head = _by_kv_head(made, len(factors))
    of: Factors = np.where(by_kv_head.any(1), factors.ravel()[by_kv_head.argmax(1)], np.float32(1))
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
    query, key = _forward(layer.name, layer.copy, probe, layer.calls[0])
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
