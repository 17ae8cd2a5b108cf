# SPDX-License-Identifier: Apache-2.0
"""This module is vLLM's ``--load-format cpu_attn_balanced``: queries times factors and keys over them, in the weights
that make both, so that quantised caches keep more of a model. Rotated keys of integers feed errors of rounding back.
See docs/vllm.md."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cpu_attn import __version__, rotation
from cpu_attn.vllm.backend import Impl
from vllm.config import get_current_vllm_config, replace
from vllm.forward_context import set_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

logger = init_logger("vllm.plugins.cpu_attn")  # vLLM has handlers for its own namespace only
TOKENS, PASSED = 5, 256  # that a module is tried on; that run through a model
CLOSE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # of the largest number


class Loader(DefaultModelLoader):  # type: ignore[misc]
    """Loads what ``--load-format auto`` does, and balances it."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(replace(load_config, load_format="auto"))
        self.balanced: list[str] = []

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        model = super().load_model(vllm_config, model_config, prefix)
        counts = len(self.balanced + balance(model)), type(model).__name__, feed_back(model, vllm_config, model_config)
        logger.info("cpu-attn %s balanced %d layers of %s; %d feed errors of keys back", __version__, *counts)
        return model

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Balances projections, too: vLLM packs their weights next. Where it has adapters (LoRA) they stay, since these
        add to queries and keys what no factor multiplies."""
        super().load_weights(model, model_config)
        vllm_config = get_current_vllm_config()
        if vllm_config.lora_config is None:
            self.balanced = balance_projections(model, vllm_config, model_config)


@dataclass
class Layer:
    """Holds a module that attends, its attention, and the projection that makes queries, keys and values, or None."""

    name: str
    module: Any
    attn: Any
    qkv: Any

    @property
    def norms_of_heads(self) -> list[Any]:
        """Those of queries and keys; an empty list where the module does not have both."""
        norms: list[Any] = [getattr(self.module, f"{x}_norm", None) for x in "qk"]
        shape = (self.attn.head_size,)
        return norms if all(type(x) in (RMSNorm, GemmaRMSNorm) and x.weight.shape == shape for x in norms) else []

    @property
    def rotary(self) -> tuple[int, bool]:
        """Says how many channels of a head are turned, and whether those of a pair are half of them apart."""
        dims = range(1, self.attn.head_size + 1)
        found = next((m for m in self.module.children() if getattr(m, "rotary_dim", 0) in dims), None)
        return (0, True) if found is None else (found.rotary_dim, getattr(found, "is_neox_style", True))


def layers(model: torch.nn.Module) -> Iterator[Layer]:
    """Gives the attention modules of a model that share no keys with others."""
    attentions = [m for m in model.modules() if isinstance(m, Attention)]
    shared = {name for m in attentions if (name := m.kv_sharing_target_layer_name)}
    for name, module in model.named_modules():
        attn, qkv = getattr(module, "attn", None), getattr(module, "qkv_proj", None)
        if isinstance(attn, Attention) and not attn.kv_sharing_target_layer_name and attn.layer_name not in shared:
            yield Layer(name, module, attn, qkv if isinstance(qkv, LinearBase) else None)


def balance(model: torch.nn.Module) -> list[str]:
    """Balances the attention modules of a model whose queries and keys come from norms of heads before or behind a
    rotary embedding (Qwen3, Gemma 3). Gives their names.

    A module stays as it is that does not attend over queries times the factors and keys over them when it is tried on
    random hidden states.
    """
    return [layer.name for layer in layers(model) if layer.norms_of_heads and _balance_norms(layer)]


def balance_projections(model: torch.nn.Module, vllm_config: Any, model_config: Any) -> list[str]:
    """Does what :func:`balance` does to attention modules whose queries and keys come straight from a projection
    (Llama, Qwen2), where vLLM has yet to pack weights. How large a channel is shows in the queries and keys of random
    tokens, which models of experts or quantised weights do not take yet: these stay."""
    methods = [getattr(m, "quant_method", None) for m in model.modules()]
    if not all(type(x) in (type(None), UnquantizedLinearMethod, UnquantizedEmbeddingMethod) for x in methods):
        return []
    with _unpacked(model):
        found = _seen(model, vllm_config, model_config)
        straight = [x for x in layers(model) if x.qkv and not x.norms_of_heads and x.attn.layer_name in found]
        return [x.name for x in straight if _balance_projection(x, *found[x.attn.layer_name])]


def feed_back(model: torch.nn.Module, vllm_config: Any, model_config: Any) -> int:
    """Has attention modules over rotated keys of integers feed errors back, and says how many do. How much an error
    counts in a channel is the mean square of that channel in the queries of random tokens."""
    rounding = [x for x in layers(model) if isinstance(x.attn.impl, Impl) and x.attn.impl.rounds_rotated_keys]
    if any(layer.attn.impl.k_feedback is None for layer in rounding):
        found = _seen(model, vllm_config, model_config)
        for layer in rounding:
            if layer.attn.impl.k_feedback is None and layer.attn.layer_name in found:
                squares = _squares(found[layer.attn.layer_name][0], layer.attn)
                layer.attn.impl.feed_back(_by_pair(squares, *layer.rotary))
    return sum(layer.attn.impl.k_feedback is not None for layer in rounding)


# ---- what takes the factors in ----


def _balance_norms(layer: Layer) -> bool:
    """Puts the factors into the weights of both norms, and says whether that did what it should; otherwise they are as
    before. How much an error counts in a channel follows from the weights of the queries' norm."""
    norms, attn = layer.norms_of_heads, layer.attn
    ones = [float(type(norm) is GemmaRMSNorm) for norm in norms]  # Gemma's weights are 1 less than what they do
    weights = [norm.weight.data.float() + one for norm, one in zip(norms, ones, strict=True)]
    sizes = [x.abs().numpy() for x in weights]
    factors = torch.from_numpy(rotation.balance(sizes[0], sizes[1], *layer.rotary))
    scales = [factors, 1 / factors]
    after = [weight * scale - one for weight, scale, one in zip(weights, scales, ones, strict=True)]
    if not _takes(layer, [norm.weight for norm in norms], after, scales):
        return False
    if isinstance(attn.impl, Impl):
        squares = _by_pair(np.square(sizes[0] * factors.numpy()), *layer.rotary)
        attn.impl.feed_back(np.tile(squares, (attn.num_kv_heads, 1)))
    return True


def _balance_projection(layer: Layer, query: torch.Tensor, key: torch.Tensor) -> bool:
    """Puts the factors into the rows of a projection, in the same way. Query heads share those of their kv head."""
    attn = layer.attn
    parameters = [p for p in (layer.qkv.weight, layer.qkv.bias) if p is not None]
    sizes = [np.sqrt(_squares(x, attn)) for x in (query, key)]
    factors = torch.from_numpy(rotation.balance(sizes[0], sizes[1], *layer.rotary))
    scales = [factors.repeat_interleave(attn.num_heads // attn.num_kv_heads, 0), 1 / factors]
    rows = torch.cat([*(x.ravel() for x in scales), factors.new_ones(attn.num_kv_heads * attn.head_size_v)])
    if any(len(p) != len(rows) for p in parameters):
        return False
    after = [p.data.float() * (rows[:, None] if p.dim() == 2 else rows) for p in parameters]
    return _takes(layer, parameters, after, scales)


def _takes(layer: Layer, parameters: list[Any], after: list[Any], scales: list[Any]) -> bool:
    """Gives parameters what they are to be after, and says whether queries and keys are times the scales ([D] or
    [H, D]) then and values as before; otherwise parameters are as before."""
    before, states = [p.data for p in parameters], _states(layer)
    for p, data in zip(parameters, after, strict=True):
        p.data = data.to(p.data)
    again, every = _states(layer), [*scales, torch.ones(1)]
    if states and again and all(_scaled(x, y, scale) for x, y, scale in zip(states, again, every, strict=True)):
        return True
    for p, data in zip(parameters, before, strict=True):
        p.data = data
    return False


def _scaled(before: torch.Tensor, after: torch.Tensor, scale: torch.Tensor) -> bool:
    want = before.float().unflatten(1, (-1, scale.shape[-1])) * scale
    got = after.float().unflatten(1, (-1, scale.shape[-1]))
    return bool((got - want).abs().max() <= CLOSE[before.dtype] * want.abs().max())


# ---- what a module attends over ----


class Attends(BaseException):
    """Ends a module's forward pass where it attends. It is no Exception, which a module might catch."""

    def __init__(self, *states: Any) -> None:
        super().__init__()
        self.states = states


def _states(layer: Layer) -> list[torch.Tensor]:
    """Gives the queries, keys and values [T, H * D] that a module attends over for random hidden states, the same in
    every call; nothing where it takes others."""
    attn, size = layer.attn, layer.attn.head_size
    if layer.qkv is None:
        return []
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, layer.qkv.input_size, generator=random, dtype=torch.float32).to(layer.qkv.params_dtype)
    positions = torch.arange(3, 3 + TOKENS)

    def forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise Attends(query, key, value)

    states: list[torch.Tensor] = []
    attn.forward = forward
    try:
        with torch.no_grad():
            layer.module(positions=positions, hidden_states=hidden)
    except Attends as e:
        states = [x.flatten(1) for x in e.states if isinstance(x, torch.Tensor) and x.dim() > 1]
    except Exception as e:
        logger.debug("cpu-attn: %s alone raises %s", attn.layer_name, e)
    finally:
        del attn.forward
    widths = [attn.num_heads * size, attn.num_kv_heads * size, attn.num_kv_heads * attn.head_size_v]
    return states if [x.shape for x in states] == [(TOKENS, width) for width in widths] else []


def _seen(model: Any, vllm_config: Any, model_config: Any) -> dict[str, list[torch.Tensor]]:
    """Gives the queries and keys [T, H * D] of random tokens, the same in every call, by the names of the layers that
    attend over them; where one raises, of those before it."""
    found: dict[str, list[torch.Tensor]] = {}
    size, tokens = model_config.get_vocab_size(), min(PASSED, model_config.max_model_len)
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(size // 4, 3 * size // 4, (tokens,), generator=random)  # special ones are at the ends
    attentions = [m for m in model.modules() if isinstance(m, Attention)]

    def attend(attn: Any) -> Any:
        def forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            widths = attn.head_size, attn.head_size, attn.head_size_v
            states = [x.reshape(tokens, -1, n).clone() for x, n in zip((query, key, value), widths, strict=True)]
            found[attn.layer_name] = [x.flatten(1) for x in states[:2]]
            options: Any = {"is_causal": True, "scale": attn.impl.scale, "enable_gqa": True}
            heads = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(0, 1) for x in states), **options)
            return heads.transpose(0, 1).flatten(1)

        return forward

    for attn in attentions:
        attn.forward = attend(attn)
    try:
        with torch.no_grad(), set_forward_context(None, vllm_config, skip_compiled=True):
            model(input_ids=ids, positions=torch.arange(tokens))
    except Exception as e:
        logger.debug("cpu-attn: %s alone raises %s", type(model).__name__, e)
    finally:
        for attn in attentions:
            del attn.forward
    return found


@contextmanager
def _unpacked(model: torch.nn.Module) -> Iterator[None]:
    """Has linear layers multiply by their weights as they were read."""
    methods = {id(m.quant_method): m.quant_method for m in model.modules() if isinstance(m, LinearBase)}.values()
    for method in methods:
        method.apply = lambda layer, x, bias=None: torch.nn.functional.linear(x, layer.weight, bias)
    try:
        yield
    finally:
        for method in methods:
            del method.apply


def _squares(states: torch.Tensor, attn: Any) -> np.ndarray[Any, Any]:
    """Gives the mean squares [Hkv, D] of channels of queries or keys [T, H * D]."""
    of_heads = states.double().unflatten(1, (attn.num_kv_heads, -1, attn.head_size))
    squares: np.ndarray[Any, Any] = of_heads.square().mean((0, 2)).numpy()
    return squares


def _by_pair(squares: np.ndarray[Any, Any], rot_dim: int, is_neox: bool) -> np.ndarray[Any, Any]:
    """Gives both channels [..., D] of a rotary pair the mean of the two."""
    pairs = np.arange(rot_dim).reshape((2, -1) if is_neox else (-1, 2))
    squares[..., pairs] = squares[..., pairs].mean(-2 if is_neox else -1, keepdims=True)
    return squares
