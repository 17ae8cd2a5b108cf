# SPDX-License-Identifier: Apache-2.0
"""This module has the attention function, and tells transformers of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from cpu_attn import UnavailableError, _check
from cpu_attn._arrays import dense_rows
from cpu_attn.ops import Logits
from cpu_attn.transformers import continuous, linear, private
from cpu_attn.transformers.indexer import formula_of
from cpu_attn.transformers.latents import is_expansion
from cpu_attn.transformers.lazy import Inference, LazyTensor
from cpu_attn.transformers.masks import LEAST, Mask, UnplannableError, as_bias, eager_only, mask_function
from cpu_attn.transformers.pages import Pages, is_held
from cpu_attn.transformers.plans import Requests, autocast, run, unmasked
from transformers import AttentionInterface, AttentionMaskInterface

NAME = "cpu_attn"
# generate_batch takes an implementation that transformers does not have only by a name that contains "flash". It needs
# no masks.
CONTINUOUS = "cpu_flash_attn"
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_TENSORS = ("query", "key", "value", "attention_mask", "s_aux", "position_bias", "indices", "block_indices")
_REFUSED = {
    "sinks": "sinks are s_aux, a number for each head",
    "head_mask": "attn_implementation='eager' has",
}
# These are the core's names of arguments and those that a caller knows.
_NAMES = {"scale": "scaling", "output": "query", "key_cache": "key", "value_cache": "value", "isa": "CPU_ATTN_ISA"}


def enable() -> None:
    """Makes ``attn_implementation="cpu_attn"`` known to transformers, and gives all models cpu-attn's functions of
    linear attention. It may be called again.

    A model with that implementation raises ValueError or TypeError where it asks for something that is not there, such
    as dropout. ``cpu_flash_attn``, which :func:`continuous_batching` uses, becomes known, too.

    Functions of linear attention (gated delta nets, KDA, Mamba-2, short convolutions) are the same for models of any
    implementation, those imported later among them. Where gradients are wanted transformers' own are called, and for
    other devices and dtypes.
    """
    _register()
    linear.enable()


def disable() -> None:
    """Gives all models transformers' own functions of linear attention back. ``attn_implementation="cpu_attn"`` stays
    known, for models that have it. It may be called again."""
    linear.disable()


def _register() -> None:
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask_function)
    AttentionInterface.register(CONTINUOUS, continuous_attention)


@contextmanager
def continuous_batching(model: Any) -> Iterator[Any]:
    """Inside this context manager ``model.generate_batch`` attends over transformers' own pages where they lie, and
    keeps the states of linear attention beside them, in a block for each request.

    Args:
        model: a model of transformers. Its config names another attention until the end of the context. A model with
            layers of linear attention computes a token at the start, and all models have the functions of
            :func:`enable` meanwhile.

    Raises:
        ValueError: the model has a layer of a kind that continuous batching does not have, or, inside the context,
            another forward pass of the model is asked for.

    Example:
        >>> with continuous_batching(model):
        ...     outputs = model.generate_batch(inputs, generation_config)
    """
    _register()
    private.leave_pages_to(CONTINUOUS)
    config = model.config.get_text_config()  # of a composite model this is the part that generates
    before = {id(c): (c, private.implementation(c)) for c in (model.config, config)}
    with linear.states_of(model, config):
        for c, _ in before.values():
            private.set_implementation(c, CONTINUOUS)
        try:
            yield model
        finally:
            for c, name in before.values():
                private.set_implementation(c, name)


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
    indices: torch.Tensor | None = None,
    block_indices: torch.Tensor | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Gives output [B, T, H, Dv] of query [B, H, T, D] over key [B, Hkv, S, D] and value [B, Hkv, S, Dv], any strides.

    transformers' models call it, for inference. A batch of 1 in one of the three stands for B. attention_mask [B or 1,
    H or 1, T or 1, S or 1] is ours, which mostly is a plan; None; or any other, boolean or to be added. position_bias
    has such a shape, too. indices [B, T, k] are the only keys that a query may see, of those that the mask shows it; -1
    is none. block_indices [B, Hkv, T, k] say the same of each kv head's queries, by blocks of the size that module's
    indexer has. It raises RuntimeError for training, ValueError or TypeError for dropout, for attention weights, for a
    head_mask, for sinks other than s_aux [H] and for what does not fit, and UnavailableError for what CPU_ATTN_ISA or
    CPU_ATTN_ENGINE asks for in vain.
    """
    if dropout:
        raise ValueError(f"dropout: {dropout}, cpu_attn is for inference; expected 0.0 (model.eval())")
    if kwargs.get("output_attentions"):
        raise ValueError("output_attentions: cpu_attn keeps no attention weights; attn_implementation='eager' does")
    for name, instead in _REFUSED.items():
        if kwargs.get(name) is not None:
            raise ValueError(f"{name}: cpu_attn has no such thing ({instead})")
    inputs = (query, key, value, attention_mask, s_aux, position_bias, indices, block_indices)
    for i, x in enumerate(inputs):
        if x is not None or i < 3:
            _check.instance(_TENSORS[i], x, torch.Tensor)
    tracked = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    if tracked:
        if module.training:
            raise RuntimeError("cpu_attn has no backward pass: model.eval(), or another attn_implementation to train")
        query, key, value = (x if isinstance(x, Pages) else x.detach() for x in (query, key, value))
    dtype = key.dtype if isinstance(key, Pages) else torch.get_autocast_dtype("cpu")
    query, key, value = autocast(dtype, query, key, value)
    query, key, value = _one_batch(query, key, value)
    _check_states(query, key, value)
    scale = max(1, query.shape[3]) ** -0.5 if scaling is None else _check.number("scaling", scaling)
    sinks = None if s_aux is None else s_aux.detach()
    logits = Logits(scale, _check.softcap("softcap", softcap or 0.0), s_aux=sinks)
    try:
        if cache is not None:
            if not all(x is None for x in (attention_mask, position_bias, indices, block_indices)):
                raise ValueError("cache: the one of generate_batch takes no attention_mask, position_bias or indices")
            output = continuous.attend(module.layer_idx, query, key, value, cache, logits, **kwargs)
        else:
            causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
            causal = bool(causal) and not eager_only(getattr(module, "config", None))
            if block_indices is None:
                output = _attend(query, key, value, attention_mask, causal, logits, position_bias, indices)
            elif position_bias is not None or indices is not None:
                raise ValueError("block_indices: they go without position_bias and indices")
            else:
                size = private.index_block_size(module)
                output = _attend_blocks(query, key, value, attention_mask, causal, logits, block_indices, size)
    except (TypeError, ValueError, UnavailableError) as e:
        bias = "position_bias" if attention_mask is None else "attention_mask"
        raise _check.renamed(e, _NAMES | {"attn_bias": bias}) from None
    return (Inference.apply(lambda: output, *inputs) if tracked else output), None


def continuous_attention(*args: Any, cache: Any = None, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """Does what :func:`attention` does for generate_batch, which gives a cache and no mask. It raises ValueError
    without a cache."""
    if cache is None:
        raise ValueError(f"cache: None, {CONTINUOUS} is for generate_batch; other calls take {NAME}")
    attended: tuple[torch.Tensor, None] = attention(*args, cache=cache, **kwargs)
    return attended


def _one_batch(*states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Broadcasts the batch as matrix products do: learned queries are one batch for all (GraniteSpeech)."""
    if states[0].shape[:1] == states[1].shape[:1] == states[2].shape[:1]:
        return states
    sizes = {x.shape[0] for x in states if x.dim() == 4} - {1}
    if len(sizes) != 1:
        return states
    (batch_size,) = sizes
    return tuple(x.expand(batch_size, -1, -1, -1) if x.dim() == 4 and x.shape[0] == 1 else x for x in states)


def _check_states(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    if query.dim() != 4 or query.dtype not in _FLOATS:
        raise (ValueError if query.dtype in _FLOATS else TypeError)(
            f"query: {tuple(query.shape)} of {query.dtype}, expected [B, H, T, D] of float32, float16 or bfloat16"
        )
    batch_size, num_heads, _, head_size = query.shape
    if key.dim() != 4 or (key.shape[0], key.shape[3]) != (batch_size, head_size):
        raise ValueError(f"key: {tuple(key.shape)}, expected [{batch_size}, Hkv, S, {head_size}], as query has them")
    if value.dim() != 4 or value.shape[:3] != key.shape[:3]:
        expected = ", ".join(map(str, key.shape[:3]))
        raise ValueError(f"value: {tuple(value.shape)}, expected [{expected}, Dv], as key has them")
    for name, x in (("key", key), ("value", value)):
        if x.dtype != query.dtype:
            raise TypeError(f"{name}: dtype {x.dtype}, expected {query.dtype}, as query has it")
    if key.shape[1] and num_heads % key.shape[1]:
        raise ValueError(f"key: {key.shape[1]} heads do not divide query's {num_heads}")


def _check_bias(name: str, x: torch.Tensor, query: torch.Tensor, kv_length: int) -> None:
    """Checks a mask or a bias [B or 1, H or 1, T or 1, S or 1]."""
    sizes = (*query.shape[:3], kv_length)
    if x.dim() != 4 or any(have not in (1, size) for have, size in zip(x.shape, sizes, strict=True)):
        expected = ", ".join(f"{size} or 1" for size in sizes)
        raise ValueError(f"{name}: {tuple(x.shape)}, expected [{expected}]")
    if x.dtype != torch.bool and not x.is_floating_point():
        raise TypeError(f"{name}: dtype {x.dtype}, expected bool, True is seen, or numbers to be added")


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    logits: Logits,
    position_bias: torch.Tensor | None,
    indices: torch.Tensor | None,
    blocks: np.ndarray[Any, Any] | None = None,
) -> torch.Tensor:
    """Attends with a mask, a bias or a selection. blocks: [B * T, Hkv, k], of the pages that keys and values are in."""
    (batch_size, _, q_length, _), num_keys = query.shape, key.shape[2]
    if position_bias is not None:
        _check_bias("position_bias", position_bias, query, key.shape[2])
        logits = replace(logits, attn_bias=_spread(as_bias(position_bias), q_length, key.shape[2]))
    causal = causal and q_length > 1 and mask is None  # sdpa's rule: without a mask, is_causal counts
    if causal and key.shape[2] > q_length:  # sdpa's causal keys begin with the first
        key, value = key[:, :, :q_length], value[:, :, :q_length]
        if logits.attn_bias is not None:
            logits = replace(logits, attn_bias=logits.attn_bias[..., :q_length])
    elif causal and key.shape[2] < q_length:
        mask = query.new_ones((1, 1, q_length, key.shape[2]), dtype=torch.bool).tril()
    kv_length = key.shape[2]
    if isinstance(mask, Mask) and mask.changed():
        mask = mask.dense()
    if mask is not None:
        _check_bias("attention_mask", mask, query, kv_length)
    if mask is None:
        requests = unmasked(batch_size, q_length, kv_length, causal)
    else:
        requests, logits = _masked(mask, batch_size, q_length, kv_length, logits)
    if indices is not None:
        formula = formula_of(indices, mask, requests)
        if formula is None:
            chosen = _chosen(indices, batch_size, q_length, num_keys)
            tokens = None if chosen is None else requests.those_there(chosen)
        else:
            tokens = formula.selected(requests) if formula.most < num_keys else None
        logits = replace(logits, selected_tokens=tokens)
    if is_held(key, value):
        if blocks is not None:
            there = requests.blocks_there(blocks, key.held.pages.block_size)
            logits = replace(logits, selected_blocks=there)
        return key.held.attend(query, requests, logits)
    if is_expansion(key, value) and key.expansion.is_worse(q_length, logits.max_selected_tokens):
        return key.expansion.attend(query, requests, logits)
    if not kv_length:  # no keys make no block of a cache
        return query.new_zeros(batch_size, q_length, query.shape[1], value.shape[3])
    key, value = (x.dense() if isinstance(x, LazyTensor) else x for x in (key, value))
    key, value = dense_rows(key), dense_rows(value)
    heads, head_sizes, most = (query.shape[1], key.shape[1]), (key.shape[3], value.shape[3]), logits.max_selected_tokens
    plan = requests.plan(*heads, *head_sizes, query.dtype, "HND", max_selected_tokens=most)
    return run(plan, query, key, value, requests.block_table, logits)


def _attend_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    logits: Logits,
    block_indices: torch.Tensor,
    block_size: int,
) -> torch.Tensor:
    """Attends over selected blocks: over pages, of which a block is some, in one call; over other keys each kv head by
    itself, with the keys of its own blocks."""
    (batch_size, num_heads, q_length, _), (num_kv_heads, kv_length) = query.shape, key.shape[1:3]
    sizes, found = (batch_size, num_kv_heads, q_length), block_indices
    if found.dim() != 4 or found.shape[:3] != sizes or found.is_floating_point():
        expected = ", ".join(map(str, sizes))
        raise ValueError(f"block_indices: {tuple(found.shape)} of {found.dtype}, expected integers [{expected}, k]")
    blocks = -(-kv_length // block_size)
    if found.numel() and (int(found.min()) < -1 or int(found.max()) >= blocks):
        raise ValueError(f"block_indices: {int(found.min())}..{int(found.max())}, expected -1..{blocks - 1}")
    planned = mask is not None or q_length == 1  # otherwise _attend may cut the keys
    if is_held(key, value) and planned and block_size % key.held.pages.block_size == 0:
        pages = _parts(found.detach(), block_size // key.held.pages.block_size)
        lists = _ascending(pages.transpose(1, 2).flatten(0, 1), blocks * block_size)
        return _attend(query, key, value, mask, causal, logits, None, None, lists)
    key, value = (x.dense() if isinstance(x, LazyTensor) else x for x in (key, value))
    keys = _parts(found, block_size)
    keys = keys.where(keys < kv_length, -1)
    group, outputs = num_heads // num_kv_heads, []
    for h in range(num_kv_heads):
        heads = slice(h * group, (h + 1) * group)
        own = logits if logits.s_aux is None else replace(logits, s_aux=logits.s_aux[heads])
        states = query[:, heads], key[:, h : h + 1], value[:, h : h + 1]
        outputs.append(_attend(*states, mask, causal, own, None, keys[:, h]))
    return torch.cat(outputs, 2)


def _parts(blocks: torch.Tensor, size: int) -> torch.Tensor:
    """Splits blocks [..., k] into the ``size`` parts of each, [..., k * size]; -1 is none."""
    parts = blocks[..., None].long() * size + torch.arange(size)
    return parts.where(blocks[..., None] >= 0, -1).flatten(-2)


def _ascending(lists: torch.Tensor, bound: int) -> np.ndarray[Any, Any]:
    """Sorts lists of numbers below ``bound``, of which -1 is none: int32 [..., k] that ascend, each number once, then
    ``bound``."""
    found: np.ndarray[Any, Any] = lists.numpy().astype(np.int32)
    found[found < 0] = bound
    found.sort()
    again = found[..., 1:] == found[..., :-1]
    if again.any():
        found[..., 1:][again] = bound
        found.sort()
    return found


def _chosen(indices: torch.Tensor, batch_size: int, q_length: int, kv_length: int) -> np.ndarray[Any, Any] | None:
    """Gives the keys that an indexer has chosen for each query token, int32 [B * T, k], ascending, each once, then
    kv_length; None where they are all that there are."""
    if indices.dim() != 3 or indices.shape[:2] != (batch_size, q_length) or indices.is_floating_point():
        found = f"{tuple(indices.shape)} of {indices.dtype}"
        raise ValueError(f"indices: {found}, expected integers [{batch_size}, {q_length}, k]")
    if indices.numel() and (int(indices.min()) < -1 or int(indices.max()) >= kv_length):
        raise ValueError(f"indices: {int(indices.min())}..{int(indices.max())}, expected -1..{kv_length - 1}")
    chosen = _ascending(indices.detach().flatten(0, 1), kv_length)
    everything = chosen.shape[1] >= kv_length and (chosen[:, :kv_length] == np.arange(kv_length)).all()
    return None if everything else chosen


def _masked(
    mask: torch.Tensor, batch_size: int, q_length: int, kv_length: int, logits: Logits
) -> tuple[Requests, Logits]:
    """Gives the mask as a plan, which hides keys at no cost, or, where no plan can say it, as a bias over all of a
    row's keys."""
    if isinstance(mask, Mask) and mask.shape == (batch_size, 1, q_length, kv_length):
        with suppress(UnplannableError):
            requests = mask.requests()
            # A bias counts query tokens within a request, and those of a row without its padding would be counted
            # otherwise.
            if logits.attn_bias is None or (len(requests.rows) == batch_size and requests.seq_lens.all()):
                return requests, logits
    if logits.attn_bias is None:
        bias = mask.bias() if isinstance(mask, Mask) else as_bias(mask)
    else:  # sdpa's rule beside a position_bias: a row with every key hidden sees every key
        seen = mask.seen() if isinstance(mask, Mask) else mask
        bias = logits.attn_bias.where(seen, LEAST) if seen.dtype == torch.bool else logits.attn_bias + as_bias(seen)
    bias = _spread(bias, q_length, kv_length)
    return unmasked(batch_size, q_length, kv_length, False), replace(logits, attn_bias=bias)


def _spread(bias: torch.Tensor, q_length: int, kv_length: int) -> torch.Tensor:
    return dense_rows(bias.expand(-1, -1, q_length, kv_length))
