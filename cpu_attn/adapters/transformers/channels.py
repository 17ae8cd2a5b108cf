# SPDX-License-Identifier: Apache-2.0
"""This module finds how large the channels of a model's queries and keys are, and which layers make them.

It knows no architecture. A forward pass of random tokens shows which modules attend, and over which queries and keys.
Derivatives show which channels of which layers (projections, norms of heads) make which of their numbers: a projection
before a norm makes none by itself, and a rotary embedding makes two of each channel that it turns. Channels that make
the same number are alike.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from cpu_attn.transformers import private
from cpu_attn.transformers.attention import attention
from cpu_attn.transformers.lazy import LazyTensor
from cpu_attn.transformers.masks import mask_function
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel

NAME = "cpu_attn_balance"  # the implementation that a model has while it is looked at
TOKENS = 61  # a prime, so that no axis of weights is mistaken for theirs
NONE = "none of its modules asks transformers' attention interface"
Bools = np.ndarray[Any, np.dtype[np.bool_]]
Sizes = np.ndarray[Any, Any]


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


@dataclass
class Group:
    """Holds layers that attend over the same keys, of which the first makes them, and the sizes [Hkv, D] that channels
    have in their queries and in the keys. ``parts`` [Hkv * D] numbers what is alike: of one part all have one size."""

    layers: list[Layer]
    parts: np.ndarray[Any, Any]
    query: Sizes
    key: Sizes

    @property
    def name(self) -> str:
        return self.layers[0].name


def groups(model: Any, inputs: dict[str, Any] | None, probe: Probe, reasons: list[str]) -> Iterator[Group]:
    """Gives the layers of a model under a probe. ``reasons`` says in the end why others are not among them."""
    for layers in _sharing(_layers(model, inputs, probe, reasons), reasons):
        try:
            yield _sized(layers)
        except UnbalanceableError as e:
            reasons.append(str(e))


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


def configs(model: Any) -> list[Any]:
    """Gives the configs of a model and of the models in it."""
    return list({id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}.values())


@contextmanager
def attending(model: Any) -> Iterator[Probe]:
    """Sends the attention of a model through a Probe."""
    probe = Probe()
    AttentionInterface.register(NAME, lambda *args, **kwargs: probe.attend(*args, **kwargs))
    AttentionMaskInterface.register(NAME, mask_function)
    of_model = configs(model)
    names = [private.implementation(config) for config in of_model]
    try:
        for config in of_model:
            private.set_implementation(config, NAME)
        yield probe
    finally:
        for config, name in zip(of_model, names, strict=True):
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


def _sharing(layers: list[Layer], reasons: list[str]) -> list[list[Layer]]:
    """Puts layers together that attend over the keys of one of them, which is the first."""
    found: list[list[Layer]] = []
    for layer in layers:
        key = layer.calls[0].key
        if layer.makes_keys:
            found.append([layer])
            continue
        same = next((g for g in found if key.shape == g[0].calls[0].key.shape and key.equal(g[0].calls[0].key)), None)
        if same:
            same.append(layer)
        else:
            reasons.append(f"{layer.name}: no weights of its own make its keys last")
    return found


# ---- what makes queries and keys ----


def forward(name: str, module: torch.nn.Module, probe: Probe, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
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
            states = forward(name, single, probe, calls[0])
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


# ---- which numbers are alike ----


def _sized(layers: list[Layer]) -> Group:
    """Finds the sizes of channels, which are alike where a channel of some layer makes both numbers."""
    key = layers[0].key
    heads, size = key.shape[1], key.shape[3]
    queries = [layer.query for layer in layers]
    if any(q.shape[1] % heads or q.shape[3] != size for q in queries):
        raise UnbalanceableError(f"{layers[0].name}: queries and keys of heads that do not fit")
    squares = torch.stack([q.unflatten(1, (heads, -1)).square().mean((0, 2, 3)) for q in queries]).mean(0)
    made = [by_kv_head(x, heads) for layer in layers for s in layer.sources for x in (s.of_query, s.of_key)]
    parts = _together(np.concatenate(made))
    counts = np.bincount(parts)
    query, key_sizes = (
        np.sqrt(np.bincount(parts, x.numpy().ravel()) / counts)[parts].reshape(x.shape)
        for x in (squares, key.square().mean((0, 2)))
    )
    return Group(layers, parts, query, key_sizes)


def by_kv_head(made: Bools, heads: int) -> Bools:
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
