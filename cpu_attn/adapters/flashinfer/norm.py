# SPDX-License-Identifier: Apache-2.0
"""This module normalises rows: FlashInfer's ``norm``, in float32 with one rounding to the output. An input has one or
more axes, the last of which is a row of H elements of float32, float16 or bfloat16."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cpu_attn import _check
from cpu_attn.flashinfer.arguments import interface
from cpu_attn.torch.entry import tensors, written

__all__ = [
    "fused_add_rmsnorm",
    "fused_add_rmsnorm_quant",
    "fused_rmsnorm_silu",
    "gemma_fused_add_rmsnorm",
    "gemma_rmsnorm",
    "layernorm",
    "layernorm_quant",
    "rmsnorm",
    "rmsnorm_quant",
]

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def _like(name: str, x: Tensor, other: Tensor, kinds: tuple[torch.dtype, ...]) -> None:
    """Checks a tensor that has the shape of another one."""
    if x.shape != other.shape:
        raise ValueError(f"{name}: shape {tuple(x.shape)}, expected {tuple(other.shape)}, that of input")
    if x.dtype not in kinds:
        raise TypeError(f"{name}: dtype {x.dtype}, expected {' or '.join(map(str, kinds))}")


def floats(name: str, x: Tensor) -> None:
    if x.dtype not in FLOATS:
        raise TypeError(f"{name}: dtype {x.dtype}, expected torch.float32, torch.float16 or torch.bfloat16")


def _given(input: Any, **rows: Any) -> list[Tensor]:
    """Gives the input and vectors [H], which fit it."""
    found = tensors(input=input, **rows)
    if found[0].dim() < 1:
        raise ValueError("input: has no axes, expected at least one, [H]")
    for name, x in zip(("input", *rows), found, strict=True):
        if name != "input" and tuple(x.shape) != (found[0].shape[-1],):
            raise ValueError(f"{name}: shape {tuple(x.shape)}, expected [{found[0].shape[-1]}], a row of input")
        floats(name, x)
    return found


def _output(out: Any, input: Tensor, weight: Tensor, kinds: tuple[torch.dtype, ...] = FLOATS) -> Tensor:
    """Gives where to write, which may be the input itself."""
    if out is None:
        return torch.empty_like(input)
    _check.instance("out", out, Tensor)
    _like("out", out, input, kinds)
    (to,) = written({"input": input, "weight": weight}, "input", out=out)
    found: Tensor = to
    return found


def _quantised(out: Any, input: Tensor, scale: Any, **more: Tensor) -> tuple[Tensor, float]:
    """Checks an output of float8, and gives it and the number by which it is divided. more: what else is read."""
    _check.instance("out", out, Tensor)
    _like("out", out, input, FP8)
    (out,) = written({"input": input, **more}, out=out)
    if isinstance(scale, torch.Tensor):
        (scale,) = tensors(scale=scale)
        if scale.dim() > 1 or scale.numel() != 1:
            raise ValueError(f"scale: shape {tuple(scale.shape)}, scale must be a scalar tensor or shape (1,)")
        scale = scale.item()
    return out, _check.number("scale", scale, _check.TINY)


def to_fp8(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds float32 to float8; what is too large becomes the largest number."""
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Gives float32 in one of the dtypes of this module."""
    return to_fp8(x, dtype) if dtype in FP8 else x.to(dtype)


def put(to: Tensor, x: Tensor) -> None:
    """Writes x, rounded to the dtype of ``to``."""
    to.copy_(to_fp8(x, to.dtype) if to.dtype in FP8 else x)


def _rms(x: Tensor, weight: Tensor, eps: Any, bias: float = 0.0) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (weight + bias), in float32 (arXiv:1910.07467)."""
    x = x.float()
    squares = x.square().mean(-1, keepdim=True)
    if squares.isinf().any():  # which float32 does not hold
        squares = x.double().square().mean(-1, keepdim=True)
    return x / (squares + _check.number("eps", eps, 0.0)).sqrt().float() * (weight.float() + bias)


def _layer(x: Tensor, gemma: Tensor, beta: Tensor, eps: Any) -> Tensor:
    eps = _check.number("eps", eps, 0.0)
    return torch.nn.functional.layer_norm(x.float(), x.shape[-1:], gemma.float(), beta.float(), eps)


def _added(input: Any, residual: Any, weight: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gives input, residual, weight, and the sum of the first two in float32."""
    x, weight = _given(input, weight=weight)
    x, residual = written({"weight": weight}, input=x, residual=residual)
    _like("residual", residual, x, FLOATS)
    return x, residual, weight, x.float() + residual.float()


@interface()
def rmsnorm(
    input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None, enable_pdl: bool | None = None
) -> Tensor:
    """Gives input / sqrt(mean(input^2) + eps) * weight, row by row.

    Args:
        input: [..., H] of float32, float16 or bfloat16.
        weight: [H] likewise.
        eps: what is added to the mean.
        out: [..., H] to write to, or None.

    Returns:
        out.

    Raises:
        ValueError: a shape or a number is out of range.
        TypeError: an argument is no tensor, or has another dtype.
    """
    x, weight = _given(input, weight=weight)
    to = _output(out, x, weight)
    to.copy_(_rms(x, weight, eps))
    return to if out is None else out


@interface()
def gemma_rmsnorm(
    input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None, enable_pdl: bool | None = None
) -> Tensor:
    """Does what :func:`rmsnorm` does with weight + 1."""
    x, weight = _given(input, weight=weight)
    to = _output(out, x, weight)
    to.copy_(_rms(x, weight, eps, 1.0))
    return to if out is None else out


@interface()
def rmsnorm_quant(
    out: Tensor, input: Tensor, weight: Tensor, scale: Any, eps: float = 1e-6, enable_pdl: bool | None = None
) -> None:
    """Does what :func:`rmsnorm` does, divides by ``scale``, a number or a tensor of one, and writes float8."""
    x, weight = _given(input, weight=weight)
    to, divisor = _quantised(out, x, scale, weight=weight)
    to.copy_(to_fp8(_rms(x, weight, eps) / divisor, to.dtype))


@interface()
def fused_add_rmsnorm(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, enable_pdl: bool | None = None
) -> None:
    """Adds ``input`` to ``residual``, and writes :func:`rmsnorm` of that sum, not yet rounded, into ``input``."""
    x, residual, weight, total = _added(input, residual, weight)
    found = _rms(total, weight, eps)
    residual.copy_(total)
    x.copy_(found)


@interface()
def gemma_fused_add_rmsnorm(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, enable_pdl: bool | None = None
) -> None:
    """Does what :func:`fused_add_rmsnorm` does with weight + 1."""
    x, residual, weight, total = _added(input, residual, weight)
    found = _rms(total, weight, eps, 1.0)
    residual.copy_(total)
    x.copy_(found)


@interface()
def fused_add_rmsnorm_quant(
    out: Tensor,
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    scale: Any,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """Adds ``input`` to ``residual``, and writes what :func:`rmsnorm_quant` gives of that sum into ``out``."""
    x, residual, weight, total = _added(input, residual, weight)
    to, divisor = _quantised(out, x, scale, residual=residual, weight=weight)
    found = to_fp8(_rms(total, weight, eps) / divisor, to.dtype)
    residual.copy_(total)
    to.copy_(found)


@interface()
def layernorm(input: Tensor, gemma: Tensor, beta: Tensor, eps: float = 1e-6) -> Tensor:
    """Gives (input - mean) / sqrt(variance + eps) * gemma + beta, row by row, as :func:`rmsnorm` takes them."""
    x, gemma, beta = _given(input, gemma=gemma, beta=beta)
    return _layer(x, gemma, beta, eps).to(x.dtype)


@interface()
def layernorm_quant(out: Tensor, input: Tensor, gemma: Tensor, beta: Tensor, scale: Any, eps: float = 1e-6) -> None:
    """Does what :func:`layernorm` does, divides by ``scale``, a number or a tensor of one, and writes float8. As in
    FlashInfer it is rounded to the dtype of ``input`` before the division."""
    x, gemma, beta = _given(input, gemma=gemma, beta=beta)
    to, divisor = _quantised(out, x, scale, gemma=gemma, beta=beta)
    to.copy_(to_fp8(_layer(x, gemma, beta, eps).to(x.dtype).float() / divisor, to.dtype))


@interface()
def fused_rmsnorm_silu(
    input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None, block_scale: Any = None
) -> Tensor:
    """Gives y / (1 + exp(-y)) of what :func:`rmsnorm` gives; ``out`` may be float8, too."""
    x, weight = _given(input, weight=weight)
    to = _output(out, x, weight, (*FLOATS, *FP8))
    found = torch.nn.functional.silu(_rms(x, weight, eps))
    put(to, found)
    return to if out is None else out
