# SPDX-License-Identifier: Apache-2.0
"""The attention function, and where transformers is told of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from cpu_attn.transformers import continuous
from cpu_attn.transformers.lazy import Inference, LazyTensor
from cpu_attn.transformers.masks import Mask, UnplannableError, as_bias, mask_function
from cpu_attn.transformers.paged_cache import Pages, is_held
from cpu_attn.transformers.plans import Logits, Requests, autocast, dense_rows, run, unmasked

NAME = "cpu_attn"
# generate_batch takes an implementation of one's own only by a name that contains "flash". It needs no masks.
CONTINUOUS = "cpu_flash_attn"


def enable() -> None:
    """Makes ``attn_implementation="cpu_attn"`` known to transformers, and ``cpu_flash_attn``, which
    :func:`continuous_batching` uses. Changes nothing else; may be called again."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask_function)
    AttentionInterface.register(CONTINUOUS, continuous_attention)


@contextmanager
def continuous_batching(model: Any) -> Iterator[Any]:
    """Inside it ``model.generate_batch`` attends over transformers' own pages where they lie.

    >>> with continuous_batching(model):
    ...     outputs = model.generate_batch(inputs, generation_config)
    """
    enable()
    config = model.config.get_text_config()  # of a composite model, the one that generates
    before = {id(c): (c, c._attn_implementation) for c in (model.config, config)}
    # set_attn_implementation would look for a flash_attn package by the name.
    for c, _ in before.values():
        c._attn_implementation_internal = CONTINUOUS
    try:
        yield model
    finally:
        for c, name in before.values():
            c._attn_implementation_internal = name


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Output [B, T, H, Dv] of query [B, H, T, D] over key [B, Hkv, S, D] and value [B, Hkv, S, Dv], any strides.

    What transformers' models call, for inference. attention_mask [B or 1, H or 1, T, S]: ours, which mostly is a plan;
    None; or any other, boolean or to be added. position_bias [B or 1, H or 1, T, S]. RuntimeError for training,
    ValueError for dropout, for attention weights, for a head_mask and for sinks other than s_aux [H].
    """
    if dropout:
        raise ValueError(f"dropout: {dropout}, cpu_attn is for inference; expected 0.0 (model.eval())")
    if kwargs.get("output_attentions"):
        raise ValueError("output_attentions: cpu_attn keeps no attention weights; attn_implementation='eager' does")
    for name in ("sinks", "head_mask"):
        if kwargs.get(name) is not None:
            raise ValueError(f"{name}: cpu_attn has no such thing (sinks are s_aux, a number for each head)")
    inputs = (query, key, value, attention_mask, s_aux, position_bias)
    tracked = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    if tracked and module.training:
        raise RuntimeError("cpu_attn has no backward pass: model.eval(), or another attn_implementation to train")
    scale = max(1, query.shape[-1]) ** -0.5 if scaling is None else float(scaling)  # the plan refuses 0
    sinks = None if s_aux is None else s_aux.detach()
    logits = Logits(scale, float(softcap or 0.0), sinks)
    query, key, value = (x.detach() if tracked and not isinstance(x, Pages) else x for x in (query, key, value))
    dtype = key.dtype if isinstance(key, Pages) else torch.get_autocast_dtype("cpu")
    query, key, value = autocast(dtype, query, key, value)
    if cache is not None:
        output = continuous.attend(module.layer_idx, query, key, value, cache, logits, **kwargs)
    else:
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        bias = None if position_bias is None else as_bias(position_bias)
        output = _attend(query, key, value, attention_mask, bool(causal), replace(logits, attn_bias=bias))
    return (Inference.apply(lambda: output, *inputs) if tracked else output), None


def continuous_attention(*args: Any, cache: Any = None, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """:func:`attention` for generate_batch, which gives a cache and no mask. ValueError without one."""
    if cache is None:
        raise ValueError(f"cache: None, {CONTINUOUS} is for generate_batch; other calls take {NAME}")
    attended: tuple[torch.Tensor, None] = attention(*args, cache=cache, **kwargs)
    return attended


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, causal: bool, logits: Logits
) -> torch.Tensor:
    batch_size, _, q_length, _ = query.shape
    for name, x in (("key", key), ("value", value)):
        if (x.shape[0], x.shape[2]) != (batch_size, key.shape[2]):
            expected = f"[{batch_size}, H, {key.shape[2]}, D], as many as query and as key have"
            raise ValueError(f"{name}: {tuple(x.shape)}, expected {expected}")
    causal = causal and q_length > 1 and mask is None  # sdpa's rule: a model without a mask means its own is_causal
    if causal and key.shape[2] > q_length:  # and its keys from the first one on
        key, value = key[:, :, :q_length], value[:, :, :q_length]
    elif causal and key.shape[2] < q_length:
        mask = query.new_ones((1, 1, q_length, key.shape[2]), dtype=torch.bool).tril()
    kv_length = key.shape[2]
    if mask is None:
        requests = unmasked(batch_size, q_length, kv_length, causal)
    else:
        if isinstance(mask, Mask) and mask.changed():
            mask = mask.dense()
        if mask.dim() != 4 or mask.shape[2] not in (1, q_length) or mask.shape[3] != kv_length:
            raise ValueError(
                f"attention_mask: {tuple(mask.shape)}, expected [B, H, {q_length}, {kv_length}], B, H or 1"
            )
        requests, logits = _masked(mask, batch_size, q_length, logits)
    if is_held(key, value):
        return key.held.attend(query, requests, logits)
    if not kv_length:  # keys that are no block of a cache
        return query.new_zeros(batch_size, q_length, query.shape[1], value.shape[3])
    key, value = (x.dense() if isinstance(x, LazyTensor) else x for x in (key, value))
    key, value = dense_rows(key), dense_rows(value)
    head_sizes = key.shape[3], value.shape[3]
    plan = requests.plan(query.shape[1], key.shape[1], *head_sizes, query.dtype, "HND", "auto")
    return run(plan, query, key, value, requests.block_table, logits)


def _masked(mask: torch.Tensor, batch_size: int, q_length: int, logits: Logits) -> tuple[Requests, Logits]:
    """The mask as a plan, which hides keys for nothing, or, where there is none, as a bias over all of a row's keys."""
    if isinstance(mask, Mask) and (mask.shape[0], mask.shape[2]) == (batch_size, q_length):
        with suppress(UnplannableError):
            requests = mask.requests()
            # A bias goes by query tokens of a request: those of a row without its padding are others.
            if logits.attn_bias is None or len(requests.rows) == batch_size:
                return requests, logits
    bias = mask.bias() if isinstance(mask, Mask) else as_bias(mask)
    if logits.attn_bias is not None:
        bias = bias + logits.attn_bias
    bias = bias.expand(-1, -1, q_length, -1)
    return unmasked(batch_size, q_length, mask.shape[3], False), replace(logits, attn_bias=bias)
