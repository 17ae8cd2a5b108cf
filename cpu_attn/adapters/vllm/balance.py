# SPDX-License-Identifier: Apache-2.0
"""This module is vLLM's ``--load-format cpu_attn_balanced``: queries times factors and keys over them, in the weights
of the norms that make both, so that quantised caches keep more of a model. Rotated keys of integers feed errors of
rounding back. See docs/vllm.md."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from cpu_attn import __version__, rotation
from cpu_attn.vllm.backend import Impl
from vllm.config import replace
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

logger = init_logger("vllm.plugins.cpu_attn")  # vLLM has handlers for its own namespace only
TOKENS = 5
CLOSE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # of the largest number


class Loader(DefaultModelLoader):  # type: ignore[misc]
    """Loads what ``--load-format auto`` does, and balances it."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(replace(load_config, load_format="auto"))

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        model = super().load_model(vllm_config, model_config, prefix)
        names = balance(model)
        logger.info("cpu-attn %s balanced %d layers of %s", __version__, len(names), type(model).__name__)
        return model


def balance(model: torch.nn.Module) -> list[str]:
    """Balances the attention modules of a model whose queries and keys come from norms of heads before or behind a
    rotary embedding (Qwen3, Gemma 3). Gives their names.

    Layers that share keys stay as they are, and so does a module that does not attend over queries times the factors
    and keys over them when it is tried on a few random hidden states.
    """
    attentions = [m for m in model.modules() if isinstance(m, Attention)]
    shared = {name for m in attentions if (name := m.kv_sharing_target_layer_name)}
    found = []
    for name, module in model.named_modules():
        attn, norms = getattr(module, "attn", None), [getattr(module, f"{x}_norm", None) for x in "qk"]
        if not isinstance(attn, Attention) or attn.kv_sharing_target_layer_name or attn.layer_name in shared:
            continue
        if all(_is_of_heads(norm, attn.head_size) for norm in norms) and _balance(module, attn, norms):
            found.append(name)
    return found


def _is_of_heads(norm: Any, head_size: int) -> bool:
    return type(norm) in (RMSNorm, GemmaRMSNorm) and norm.weight.shape == (head_size,)


def _balance(module: Any, attn: Any, norms: list[Any]) -> bool:
    """Puts the factors into the weights of both norms, and says whether that did what it should; otherwise they are as
    before. How much an error counts in a channel follows from the weights of the queries' norm."""
    rotary = getattr(module, "rotary_emb", None)
    if not isinstance(rotary, RotaryEmbeddingBase):
        return False
    ones = [float(type(norm) is GemmaRMSNorm) for norm in norms]  # Gemma's weights are 1 less than what they do
    before = [norm.weight.data for norm in norms]
    weights = [x.float() + one for x, one in zip(before, ones, strict=True)]
    sizes = [x.abs().numpy() for x in weights]
    factors = torch.from_numpy(rotation.balance(sizes[0], sizes[1], rotary.rotary_dim, rotary.is_neox_style))
    states = _states(module, attn, before[0].dtype)
    scales = factors, 1 / factors
    for norm, weight, one, scale in zip(norms, weights, ones, scales, strict=True):
        norm.weight.data = (weight * scale - one).to(norm.weight)
    again = _states(module, attn, before[0].dtype)
    if states and again and all(_scaled(x, y, scale) for x, y, scale in zip(states, again, scales, strict=True)):
        if isinstance(attn.impl, Impl):
            squares = np.square(sizes[0] * factors.numpy())
            pairs = np.arange(rotary.rotary_dim).reshape((2, -1) if rotary.is_neox_style else (-1, 2))
            squares[pairs] = squares[pairs].mean(0 if rotary.is_neox_style else 1, keepdims=True)
            attn.impl.feed_back(np.tile(squares, (attn.num_kv_heads, 1)))
        return True
    for norm, weight in zip(norms, before, strict=True):
        norm.weight.data = weight
    return False


def _states(module: Any, attn: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    """Gives the queries and the keys that a module attends over for random hidden states; nothing where it takes
    others."""
    width = getattr(getattr(module, "qkv_proj", None), "input_size", 0)
    hidden = torch.randn(TOKENS, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    with _seen(attn) as found, torch.no_grad():
        try:
            module(positions=torch.arange(3, 3 + TOKENS), hidden_states=hidden)
        except Exception as e:
            logger.debug("cpu-attn: %s alone raises %s", attn.layer_name, e)
    return found[:2]


@contextmanager
def _seen(attn: Any) -> Iterator[list[torch.Tensor]]:
    """Has a layer's attention give zeros, and say what it was given."""
    found: list[torch.Tensor] = []

    def forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        found[:] = query.clone(), key.clone()
        return query.new_zeros(len(query), attn.num_heads * attn.head_size_v)

    attn.forward = forward
    try:
        yield found
    finally:
        del attn.forward


def _scaled(before: torch.Tensor, after: torch.Tensor, scale: torch.Tensor) -> bool:
    want = before.float().unflatten(-1, (-1, len(scale))) * scale
    got = after.float().unflatten(-1, (-1, len(scale)))
    return got.shape == want.shape and bool((got - want).abs().max() <= CLOSE[before.dtype] * want.abs().max())
