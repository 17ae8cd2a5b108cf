# SPDX-License-Identifier: Apache-2.0
"""This module attends over blocks of a mask: FlashInfer's ``sparse``.

A row of blocks is planned as a sequence of its own, whose pages are its column blocks. So keys and values are read
where they lie, whatever the sizes of blocks; pages of fewer than 16 tokens are slower.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from cpu_attn import _check
from cpu_attn.flashinfer.arguments import interface
from cpu_attn.flashinfer.call import PLANNED, RUN, Results, Sequences, logits_of
from cpu_attn.flashinfer.masks import custom_bias
from cpu_attn.flashinfer.wrapper import Wrapper, table_of
from cpu_attn.torch.entry import axes, optional, tensors, written
from cpu_attn.torch.packed import Int32, int32, starts_of

__all__ = ["BlockSparseAttentionWrapper", "VariableBlockSparseAttentionWrapper", "convert_bsr_mask_layout"]


def _flat(name: str, mask: Tensor, indptr: Int32) -> Tensor:
    """Gives the masks of blocks [nnz, R, C] as those of rows of blocks, flattened, one after another."""
    axes(name, mask, nnz=int(indptr[-1]), R=None, C=None)
    if mask.dtype != torch.bool:
        raise TypeError(f"{name}: dtype {mask.dtype}, expected torch.bool")
    rows = [
        mask[a:b].transpose(0, 1).reshape(-1) for a, b in zip(indptr[:-1].tolist(), indptr[1:].tolist(), strict=True)
    ]
    return torch.cat([mask.new_empty(0), *rows])


@interface()
def convert_bsr_mask_layout(mask: Tensor, indptr: Tensor) -> Tensor:
    """Gives the masks of blocks, bool [nnz, R, C], of which ``indptr`` int32 [MB + 1] says where each row of blocks
    starts, as bool [nnz * R * C]: the [R, blocks * C] of each row of blocks, one after another."""
    (mask,) = tensors(mask=mask)
    starts = starts_of("indptr", indptr, _check.INT32_MAX)
    return _flat("mask", mask, starts)


class BlockSparseAttentionWrapper(Wrapper):
    """Attends over blocks of R query tokens by C keys, of a mask in SciPy's BSR format.

    Args:
        float_workspace_buffer: not needed.
        backend: not looked at.

    This constructor raises no errors.
    """

    _blocks: tuple[Int32, int, int]  # table, N, C

    @interface()
    def __init__(self, float_workspace_buffer: Any, backend: str = "auto") -> None:
        """Makes a wrapper."""
        super().__init__("NHD")

    @interface(**PLANNED, packed_custom_mask="packed_mask", custom_mask="mask")
    def plan(
        self,
        indptr: Tensor | None,
        indices: Tensor | None,
        M: int,  # noqa: N803
        N: int,  # noqa: N803
        R: int,  # noqa: N803
        C: int,  # noqa: N803
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        mask: Tensor | None = None,
        packed_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = "float16",
        non_blocking: bool = True,
        block_mask: Tensor | None = None,
        kv_block_lens: Tensor | None = None,
        q2k_indices: Tensor | None = None,
        q2k_num: Tensor | None = None,
        kv_splits: Any = None,
        use_clc: bool | None = None,
        q_scale: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None:
        """Plans attention of M query tokens over N keys.

        Args:
            indptr: int32 [ceil(M / R) + 1], where the column blocks of each row of blocks start in ``indices``.
            indices: int32, column blocks.
            M: query tokens.
            N: keys, a multiple of C.
            R: query tokens of a row of blocks; the last one may have fewer.
            C: keys of a column block.
            num_qo_heads: Hq.
            num_kv_heads: Hkv.
            head_dim: D, of values, too.
            mask: bool [nnz, R, C], or None: what each block leaves, in place of ``causal``. M is a multiple of R then.
            packed_mask: uint8, in place of it: bits of what ``convert_bsr_mask_layout`` gives, lowest first, each
                row of blocks from a byte of its own on.
            causal: whether, of the keys of its row of blocks, counted without gaps, the last token sees all, the one
                before one fewer, and so on.
            pos_encoding_mode: ``NONE``, ``ROPE_LLAMA`` or ``ALIBI``, by positions that are counted likewise.
            logits_soft_cap: None and 0 are off.
            sm_scale: the factor of q.k; 1 / sqrt(D) unless said.
            rope_scale: what angles of ``ROPE_LLAMA`` are divided by; 1 unless said.
            rope_theta: the base of its frequencies; 10000 unless said.
            q_data_type: of queries: float32, float16, bfloat16 or float8.
            kv_data_type: of keys and values: that of queries, or float8; None: that of queries.
            o_data_type: of the output: float32, float16, bfloat16 or float8; None: that of queries.
            q_scale: float32 [Hq], or a number, or None: factors of the logits.
            k_scale: float32 [Hkv], or a number, or None: factors of the logits.
            v_scale: float32 [Hkv], or a number, or None: factors of the output.

        Raises:
            ValueError: an argument is out of range.
            TypeError: an argument is no tensor, or has another dtype.
            NotImplementedError: an argument asks for what is not here.
        """
        sizes = [_check.integer(name, x, 1) for name, x in (("M", M), ("N", N), ("R", R), ("C", C))]
        num_tokens, keys, rows, columns = sizes
        if keys % columns:
            raise ValueError(f"N: {keys} is no multiple of C = {columns}")
        found = int32("indices", indices)
        size = -(-num_tokens // rows)
        where = starts_of("indptr", indptr, len(found), size + 1)
        for i in np.flatnonzero((found < 0) | (found >= keys // columns)):
            raise ValueError(f"indices[{i}]: {found[i]}, outside 0..{keys // columns - 1}, the column blocks")
        starts = np.minimum(np.arange(size + 1) * rows, num_tokens).astype(np.int32)
        lens = (np.diff(where) * columns).astype(np.int32)
        (mask, packed) = optional(mask=mask, packed_mask=packed_mask)
        if mask is not None and packed is None:
            mask = _flat("mask", mask, where)
        bias = custom_bias(mask, packed, np.diff(starts), lens)
        logits = logits_of(sm_scale, causal, -1, logits_soft_cap, pos_encoding_mode, rope_scale, rope_theta)
        dtypes = (q_data_type, kv_data_type, o_data_type)
        step = Sequences(starts, lens, (num_qo_heads, num_kv_heads), (head_dim, None), dtypes)
        self._scales = step.factors(q_scale, k_scale, v_scale)
        self._planned(step, logits, bias)
        self._blocks = table_of(where, found), keys, columns

    begin_forward = plan

    @interface(**RUN, key_cache="k", value_cache="v")
    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale_q: Tensor | None = None,
        scale_k: Tensor | None = None,
        scale_v: Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> Any:
        """Computes attention of one layer with the plan.

        Args:
            q: [M, Hq, D].
            k: [N, Hkv, D], read where it lies.
            v: [N, Hkv, D], read where it lies.
            scale_q: float32 [Hq], or a number, or None: factors of the logits.
            scale_k: float32 [Hkv], or a number, or None: factors of the logits.
            scale_v: float32 [Hkv], or a number, or None: factors of the output.
            out: [M, Hq, D] to write to, or None.
            lse: float32 [M, Hq] to write to, or None.
            return_lse: whether to return (out, lse).
            enable_pdl: not looked at.

        Returns:
            out, or (out, lse). lse is in base 2.

        Raises:
            ValueError: an argument does not fit the plan, or a tensor requires grad while grad mode is on.
            TypeError: an argument is no tensor, or has another dtype.
            RuntimeError: there is no plan yet.
        """
        step = self._ready()
        table, keys, columns = self._blocks
        k, v = tensors(k=k, v=v)
        for name, x in (("k", k), ("v", v)):
            axes(name, x, N=keys, num_kv_heads=step.num_kv_heads, head_dim=step.head_size)
        pages = [x.unflatten(0, (keys // columns, columns)) for x in (k, v)]
        parts = [(0, len(step.lens), *pages, table)]
        factors = step.factors(scale_q, scale_k, scale_v, names="scale_q").times(self._scales)
        results = Results(out, lse, return_lse)
        return step.attend(q, "NHD", parts, self._logits, factors, results, self._bias)

    @interface(**RUN, key_cache="k", value_cache="v")
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale_q: Tensor | None = None,
        scale_k: Tensor | None = None,
        scale_v: Tensor | None = None,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Tensor:
        """Does what :meth:`run` does, with arguments of :meth:`plan` in place of those that it was given."""
        self._ready()
        changed = (pos_encoding_mode, rope_scale, rope_theta)
        self._again(sm_scale, self._logits.causal, -1, logits_soft_cap, *changed)
        return self.run(q, k, v, scale_q, scale_k, scale_v)


class VariableBlockSparseAttentionWrapper(Wrapper):
    """Attends over blocks of sizes that differ, which each kv head selects for itself.

    Args:
        float_workspace_buffer: not needed.
        backend: not looked at.

    This constructor raises no errors.
    """

    _pages: tuple[Int32, int, int, int]  # table, query tokens, keys, tokens of a page

    @interface()
    def __init__(self, float_workspace_buffer: Any, backend: str = "auto") -> None:
        """Makes a wrapper."""
        super().__init__("HND")

    @interface(**PLANNED)
    def plan(
        self,
        block_mask_map: Tensor,
        block_row_sz: Tensor,
        block_col_sz: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
    ) -> None:
        """Plans attention of query tokens over keys.

        Args:
            block_mask_map: bool [Hkv, MB, NB], which column blocks each row of blocks attends.
            block_row_sz: int32 [Hkv, MB], query tokens of each row of blocks; of all kv heads as many together.
            block_col_sz: int32 [Hkv, NB], keys of each column block; of all kv heads as many together.
            num_qo_heads: Hq.
            num_kv_heads: Hkv.
            head_dim: D, of values, too.
            causal: as ``BlockSparseAttentionWrapper.plan`` has it; so are ``pos_encoding_mode``, ``logits_soft_cap``,
                ``sm_scale``, ``rope_scale``, ``rope_theta``, ``q_data_type`` and ``kv_data_type``.

        Raises:
            ValueError: an argument is out of range.
            TypeError: an argument is no tensor, or has another dtype.
        """
        kv_heads = _check.integer("num_kv_heads", num_kv_heads, 1, _check.MAX_SIZE)
        heads = _check.integer("num_qo_heads", num_qo_heads, 1, _check.MAX_SIZE)
        if heads % kv_heads:
            raise ValueError(f"num_kv_heads: {kv_heads} does not divide num_qo_heads = {heads}")
        chosen, rows, columns = tensors(
            block_mask_map=block_mask_map, block_row_sz=block_row_sz, block_col_sz=block_col_sz
        )
        axes("block_mask_map", chosen, num_kv_heads=kv_heads, MB=None, NB=None)
        if chosen.dtype != torch.bool:
            raise TypeError(f"block_mask_map: dtype {chosen.dtype}, expected torch.bool")
        row, queries = _sizes("block_row_sz", rows, kv_heads, chosen.shape[1])
        column, keys = _sizes("block_col_sz", columns, kv_heads, chosen.shape[2])
        size = max(1, int(np.gcd.reduce(column, axis=None)))  # so that every column block is whole pages
        pages, picked = column // size, chosen.resolve_neg().numpy()
        owner = np.repeat(np.arange(pages.size), pages.ravel()).reshape(kv_heads, -1)  # the column block of each page
        owner = owner - np.arange(kv_heads)[:, None] * pages.shape[1]
        of_row = np.take_along_axis(picked, owner[:, None], 2)  # [Hkv, MB, pages of a head]
        of_row = of_row.reshape(-1, owner.shape[1])
        page = np.nonzero(of_row)[1] + np.nonzero(of_row)[0] // picked.shape[1] * owner.shape[1]
        counts = of_row.sum(1)
        where = np.append(0, np.cumsum(counts)).astype(np.int32)
        starts, lens = np.append(0, np.cumsum(row)).astype(np.int32), (counts * size).astype(np.int32)
        logits = logits_of(sm_scale, causal, -1, logits_soft_cap, pos_encoding_mode, rope_scale, rope_theta)
        step = Sequences(starts, lens, (heads // kv_heads, 1), (head_dim, None), (q_data_type, kv_data_type, None))
        self._planned(step, logits)
        self._pages = table_of(where, page.astype(np.int32)), queries, keys, size
        self._heads = heads, kv_heads

    begin_forward = plan

    @interface(**RUN, key_cache="k", value_cache="v")
    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> Any:
        """Computes attention of one layer with the plan.

        Args:
            q: [Hq, qo_len, D]. Queries and outputs are copied where a kv head has several query heads.
            k: [Hkv, kv_len, D]. It is read where it lies; a tensor that is not contiguous is copied.
            v: [Hkv, kv_len, D] likewise.
            out: [Hq, qo_len, D] to write to, or None.
            lse: float32 [Hq, qo_len] to write to, or None.
            return_lse: whether to return (out, lse).
            enable_pdl: not looked at.

        Returns:
            out, or (out, lse). lse is in base 2.

        Raises:
            ValueError: an argument does not fit the plan, or a tensor requires grad while grad mode is on.
            TypeError: an argument is no tensor, or has another dtype.
            RuntimeError: there is no plan yet.
        """
        step = self._ready()
        (table, queries, keys, size), (heads, kv_heads) = self._pages, self._heads
        q, k, v = tensors(q=q, k=k, v=v)
        axes("q", q, num_qo_heads=heads, qo_len=queries, head_dim=step.head_size)
        for name, x in (("k", k), ("v", v)):
            axes(name, x, num_kv_heads=kv_heads, kv_len=keys, head_dim=step.head_size)
        to, log = written({"q": q, "k": k, "v": v}, out=out, lse=lse)
        return_lse = _check.boolean("return_lse", return_lse)
        for name, x, shape, dtype in (
            ("out", to, (heads, queries, step.head_size_v), step.o_dtype),
            ("lse", log, (heads, queries), torch.float32),
        ):
            if x is not None and (tuple(x.shape) != shape or x.dtype != dtype):
                raise ValueError(f"{name}: {x.dtype} {tuple(x.shape)}, expected {dtype} {shape}")
        pages = [x.reshape(kv_heads * keys // size, size, 1, step.head_size) for x in (k, v)]
        rows = q.unflatten(0, (kv_heads, -1)).transpose(1, 2).reshape(kv_heads * queries, -1, step.head_size)
        parts = [(0, len(step.lens), *pages, table)]
        factors, results = step.factors(), Results(return_lse=True)
        found = step.attend(rows, "NHD", parts, self._logits, factors, results)
        new = [x.unflatten(0, (kv_heads, queries)).transpose(1, 2).flatten(0, 1) for x in found]
        for x, each in ((to, new[0]), (log, new[1])):
            if x is not None:
                x.copy_(each)
        new_out, new_lse = new[0] if out is None else out, new[1] if lse is None else lse
        return (new_out, new_lse) if return_lse else new_out

    @interface(**RUN, key_cache="k", value_cache="v")
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Tensor:
        """Does what :meth:`run` does, with arguments of :meth:`plan` in place of those that it was given."""
        self._ready()
        changed = (pos_encoding_mode, rope_scale, rope_theta)
        self._again(sm_scale, self._logits.causal, -1, logits_soft_cap, *changed)
        return self.run(q, k, v)


def _sizes(name: str, x: Tensor, kv_heads: int, blocks: int) -> tuple[Any, int]:
    """Gives sizes of blocks, int64 [Hkv, blocks], and how many tokens each head has, which is the same for all."""
    axes(name, x, num_kv_heads=kv_heads, blocks=blocks)
    if x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: dtype {x.dtype}, expected torch.int32")
    sizes = x.to(torch.int64).resolve_neg().numpy()
    if (sizes < 0).any():
        raise ValueError(f"{name}: {sizes.min()} is negative")
    total = sizes.sum(1)
    if (total != total[0]).any() or total[0] * kv_heads > _check.INT32_MAX:
        raise ValueError(
            f"{name}: sums {total.tolist()}, expected the same of all kv heads, at most {_check.INT32_MAX}"
        )
    return sizes, int(total[0])
