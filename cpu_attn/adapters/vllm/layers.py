# SPDX-License-Identifier: Apache-2.0
"""This module gives :mod:`cpu_attn.vllm.linear` to vLLM's layers.

A layer's own function is replaced where vLLM looks it up, and the backend that makes its metadata through vLLM's
registry: both or neither. A layer whose code is not as it was in the versions tested stays vLLM's.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch

from cpu_attn import __version__
from cpu_attn.vllm import copies, linear
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum, register_backend

logger = init_logger("vllm.plugins.cpu_attn")  # vLLM has handlers for its own namespace only
_LAYERS = "vllm.model_executor.layers.mamba"
_COMMON = {"query_start_loc", "seq_lens", "num_reqs", "block_table_tensor"}  # of CommonAttentionMetadata
_GATED = {"prefix", "tp_size", "conv1d", "activation", "A_log", "dt_bias"}
_GATED |= {"key_dim", "value_dim", "head_k_dim", "head_v_dim"}


# torch makes an operator of it, whose schema it reads from these annotations.
def _core(
    mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core_attn_out: torch.Tensor, layer_name: LayerNameType
) -> None:
    layer = get_forward_context().no_compile_layers[_resolve_layer_name(layer_name)]
    linear.gated_delta_net(layer, mixed_qkv, b, a, core_attn_out)


def _mixer(self: Any, projected_states: Any, output: Any) -> Any:
    if self.use_replayssm:
        return _mixer.__wrapped__(self, projected_states, output)  # type: ignore[attr-defined]
    return linear.mamba2(self, projected_states, output)


def _short(self: Any, hidden_states: Any, output: Any) -> None:
    linear.short_conv(self, hidden_states, output)


@dataclass(frozen=True)
class Kind:
    """Is a kind of layer: its class, the attributes that ours reads of it; its own function, whose parameters it has,
    and ours; the backend that makes its metadata, and ours."""

    layer: str
    reads: set[str]
    function: str
    ours: Callable[..., Any]
    backend: str
    our_backend: type

    def differs(self) -> str:
        """Says what of vLLM's code is not as it was, or nothing."""
        try:
            layer, function = (pkgutil.resolve_name(f"{_LAYERS}.{x}") for x in (self.layer, self.function))
            backend = MambaAttentionBackendEnum[self.backend].get_class()
        except Exception as e:
            return f"{type(e).__name__}: {e}"
        has, wants = (" ".join(inspect.signature(f).parameters) for f in (function, self.ours))
        if has != wants:
            return f"{self.function} takes {has}, expected {wants}"
        if missing := self.reads - _attributes(layer):
            return f"{self.layer} has no {', '.join(sorted(missing))}"
        if missing := _COMMON - set(CommonAttentionMetadata.__dataclass_fields__):
            return f"CommonAttentionMetadata has no {', '.join(sorted(missing))}"
        return "" if issubclass(self.our_backend, backend) else f"{backend.__name__} makes its metadata"

    def place(self) -> tuple[Any, str]:
        """Gives the module or class where vLLM looks for the function, and its name there."""
        owner, _, name = f"{_LAYERS}.{self.function}".replace(":", ".").rpartition(".")
        return pkgutil.resolve_name(owner), name

    def give(self) -> None:
        """Puts ours in the place of both."""
        owner, name = self.place()
        if getattr(owner, name) is not self.ours:
            setattr(owner, name, wraps(getattr(owner, name))(self.ours))
        path = f"{self.our_backend.__module__}.{self.our_backend.__qualname__}"
        register_backend(MambaAttentionBackendEnum[self.backend], path, is_mamba=True)


def _attributes(layer: type) -> set[str]:
    """Gives the names that the constructors of a class and of its bases mention."""
    constructors = (inspect.unwrap(vars(c)["__init__"]) for c in layer.__mro__ if "__init__" in vars(c))
    return {name for f in constructors if inspect.isfunction(f) for name in f.__code__.co_names}


KINDS = {
    "gated delta nets": Kind(
        *("gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention", _GATED),
        *("ops.cpu.gdn_attention:cpu_gdn_attention_core", _core),
        *("GDN_ATTN", linear.GDNBackend),
    ),
    "Mamba-2": Kind(
        "mamba_mixer2:MambaMixer2",
        {"prefix", "tp_size", "conv1d", "activation", "A", "D", "dt_bias", "use_replayssm"}
        | {"tped_intermediate_size", "tped_conv_size", "tped_dt_size"}
        | {"groups_ssm_state_size", "ssm_state_size", "head_dim"},
        *("mamba_mixer2:MambaMixer2.conv_ssm_forward", _mixer),
        *("MAMBA2", linear.Mamba2Backend),
    ),
    "short convolutions": Kind(
        *("short_conv:ShortConv", {"prefix", "conv", "in_proj", "out_proj"}),
        *("short_conv:ShortConv.forward_native", _short),
        *("SHORT_CONV", linear.ShortConvBackend),
    ),
}


def give() -> list[str]:
    """Gives every kind of layer ours, and drafts our copies of states, or logs why they stay vLLM's. Gives the kinds
    that have ours."""
    given = []
    for name, kind in KINDS.items():
        if differs := kind.differs():
            logger.warning("cpu-attn %s leaves layers of %s to vLLM: %s", __version__, name, differs)
        else:
            kind.give()
            given.append(name)
    if differs := copies.give():
        logger.warning("cpu-attn %s leaves drafts with prefix caching to vLLM: %s", __version__, differs)
    return given
