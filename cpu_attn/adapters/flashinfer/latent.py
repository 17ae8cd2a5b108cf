# SPDX-License-Identifier: Apache-2.0
"""This module computes multi-head latent attention over rows [ckv | kpe] for FlashInfer's calls: see
:func:`cpu_attn.attention_mla`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cpu_attn import _check
from cpu_attn.flashinfer.arguments import choice
from cpu_attn.flashinfer.call import LOG2E, dtype_of, fp8_name
from cpu_attn.flashinfer.norm import put
from cpu_attn.mla import attention_mla
from cpu_attn.plan import get_scheduler_metadata
from cpu_attn.torch.entry import axes, optional, written
from cpu_attn.torch.packed import Int32


@dataclass(frozen=True)
class MLAHeadDimensions:
    """Says how many elements a head has before absorption, those of queries and keys that are not rotated and those
    that are, and of values; and how many a latent has. It is for callers: any sizes do here."""

    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    kv_lora_rank: int


@dataclass(frozen=True)
class MLALayerDimensions:
    """Says of how many heads of which sizes a layer is."""

    head_dimensions: MLAHeadDimensions
    num_heads: int


deepseek_mla_dimensions = MLAHeadDimensions(128, 64, 128, 512)
smaller_mla_dimensions = MLAHeadDimensions(64, 64, 128, 256)
nope_mla_dimensions = MLAHeadDimensions(256, 0, 256, 512)
# Those that FlashInfer has kernels for.
supported_mla_head_dimensions = [deepseek_mla_dimensions, smaller_mla_dimensions, nope_mla_dimensions]
supported_mla_layer_dimensions = [
    MLALayerDimensions(deepseek_mla_dimensions, 128),
    MLALayerDimensions(deepseek_mla_dimensions, 64),
    MLALayerDimensions(smaller_mla_dimensions, 32),
]


def joined(a: Tensor, b: Tensor) -> Tensor | None:
    """Gives [a | b] where they lie beside one another in memory, without a copy, else None."""
    beside = a.data_ptr() + a.shape[-1] * a.element_size() == b.data_ptr()
    same = (a.stride(), a.dtype, a.is_neg()) == (b.stride(), b.dtype, b.is_neg()) and a.stride(-1) == 1
    if not (beside and same and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()):
        return None
    return a.as_strided((*a.shape[:-1], a.shape[-1] + b.shape[-1]), a.stride(), a.storage_offset())


def rows_of(ckv: Tensor, kpe: Tensor, table: Int32, lens: Int32) -> tuple[Tensor, Int32]:
    """Gives pages of rows [ckv | kpe] and their table: those of the caller, where they are one tensor, else a copy of
    the pages that are needed."""
    found = joined(ckv, kpe)
    if found is not None:
        return found, table
    needed = np.arange(table.shape[1]) < -(-lens // max(1, ckv.shape[1]))[:, None]
    pages, at = np.unique(table[needed], return_inverse=True)
    for page in pages[(pages < 0) | (pages >= len(ckv))]:
        raise ValueError(f"kv_indices: page {page} is outside 0..{len(ckv) - 1}")
    taken = torch.from_numpy(pages.astype(np.int64))
    new = np.zeros(table.shape, np.int32)
    new[needed] = at.ravel()
    if not len(pages):
        return ckv.new_zeros(1, max(1, ckv.shape[1]), ckv.shape[2] + kpe.shape[2]), new
    return torch.cat([ckv[taken], kpe[taken]], -1), new


@dataclass(frozen=True)
class Latents:
    """Says what is attended: where query tokens of sequences start, how many keys each has, its pages; heads, elements
    of a latent and of a rotated key; dtypes of queries, products, rows and outputs. Queries of float8 become bfloat16,
    exactly, which their output has, too, unless said."""

    starts: Int32
    lens: Int32
    table: Int32
    num_heads: int
    rank: int
    rope: int
    q_dtype: torch.dtype
    dtype: torch.dtype
    kv_dtype: torch.dtype
    o_dtype: torch.dtype
    causal: bool
    plans: dict[torch.dtype, Any]  # by dtype of the products

    @classmethod
    def planned(
        cls,
        starts: Int32,
        lens: Int32,
        table: Int32,
        sizes: tuple[Any, Any, Any],
        dtypes: tuple[Any, Any, Any],
        causal: Any,
    ) -> Latents:
        """Plans it. sizes: heads, elements of a latent and of a rotated key; dtypes: of queries, rows and outputs, the
        latter None for that of queries."""
        heads = _check.integer("num_heads", sizes[0], 1, _check.MAX_SIZE)
        rank = _check.integer("head_dim_ckv", sizes[1], 1, _check.MAX_SIZE)
        rope = _check.integer("head_dim_kpe", sizes[2], 0, _check.MAX_SIZE - rank)
        q_dtype, kv_dtype = dtype_of("q_data_type", dtypes[0]), dtype_of("kv_data_type", dtypes[1])
        dtype = torch.bfloat16 if fp8_name(q_dtype) else q_dtype
        o_dtype = dtype if dtypes[2] is None else dtype_of("output_dtype", dtypes[2])
        if fp8_name(kv_dtype) is None and kv_dtype != dtype:
            names = [str(x).removeprefix("torch.") for x in (kv_dtype, dtype)]
            raise ValueError(f"kv_data_type: {names[0]}, expected {names[1]}, as q_data_type, or float8")
        causal = _check.boolean("causal", causal)
        kinds = (q_dtype, dtype, kv_dtype, o_dtype)
        found = cls(starts.copy(), lens.copy(), table, heads, rank, rope, *kinds, causal, {})
        found.plan(dtype)
        return found

    def plan(self, dtype: torch.dtype) -> Any:
        """Gives the plan for products of this dtype, which is kept."""
        if dtype not in self.plans:
            self.plans[dtype] = get_scheduler_metadata(
                *(len(self.lens), self.num_heads, 1, self.rank + self.rope, self.lens, dtype, self.starts, self.causal),
                kv_cache_dtype=fp8_name(self.kv_dtype) or "auto",
                head_size_v=self.rank,
                kv_cache_layout="NHD",
            )
        return self.plans[dtype]

    def attend(
        self,
        query: Tensor,
        rows: Tensor,
        table: Int32,
        scale: float,
        row_scales: tuple[float, float],
        sinks: Any,
        results: tuple[Any, Any, Any, str],
        factor: float = 1.0,
    ) -> Any:
        """Runs it. query [T, H, L + P]; rows [N, page_size, L + P]; row_scales: factors of their L and P elements;
        results: out [T, H, L] or None, lse [T, H] or None, whether to return lse, and its base; factor: of the
        output."""
        given, log, return_lse, base = results
        return_lse, size = _check.boolean("return_lse", return_lse), len(query)
        (sinks,) = optional(sinks=sinks)
        to, found = written({"query": query, "kv_cache": rows, "sinks": sinks}, out=given, lse=log)
        out = torch.empty(size, self.num_heads, self.rank, dtype=self.o_dtype) if to is None else to
        axes("out", out, T=size, num_heads=self.num_heads, head_dim_ckv=self.rank)
        for name, x, dtype in (("query", query, self.q_dtype), ("out", out, self.o_dtype)):
            if x.dtype != dtype:
                raise TypeError(f"{name}: dtype {x.dtype}, expected {dtype}")
        if found is not None:
            axes("lse", found, T=size, num_heads=self.num_heads)
            if found.dtype != torch.float32:
                raise TypeError(f"lse: dtype {found.dtype}, expected torch.float32")
        logs = torch.empty(self.num_heads, size) if return_lse or found is not None else None
        kind, (row_scale, rope_scale) = fp8_name(self.kv_dtype), row_scales
        query = query.to(self.dtype)
        if row_scale != rope_scale:
            by_part = torch.tensor([row_scale] * self.rank + [rope_scale] * self.rope)
            query = (query * by_part).to(self.dtype if kind is None else torch.float32)
            factor, row_scale = factor * row_scale, 1.0
        elif kind is None:  # then it is a factor like any other
            scale, factor, row_scale = scale * row_scale, factor * row_scale, 1.0
        plain = factor == 1.0 and out.dtype == query.dtype
        attend_to = out if plain else torch.empty(out.shape)
        plan = self.plan(query.dtype)
        attention_mla(
            *(query, rows, attend_to, self.starts, self.lens, scale, self.causal, table, plan),
            kv_cache_dtype=kind or "auto",
            k_scale=row_scale,
            s_aux=sinks,
            lse=logs,
        )
        if not plain:
            put(out, attend_to * factor)
        if logs is None:
            return out if given is None else given
        logs = logs.T * (1.0 if choice("lse base", base, "base2", "basee") == "basee" else LOG2E)
        if found is not None:
            found.copy_(logs)
        out = out if given is None else given
        return (out, logs.contiguous() if log is None else log) if return_lse else out
