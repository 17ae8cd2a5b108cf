# SPDX-License-Identifier: Apache-2.0
"""This module has what FlashInfer's wrappers have in common: where the pages of sequences are, fixed buffers, plan and
run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cpu_attn import _check
from cpu_attn.flashinfer.arguments import layout_of
from cpu_attn.flashinfer.call import Factors, Logits, Results, Sequences, logits_of
from cpu_attn.torch.entry import axes, optional, tensors, written
from cpu_attn.torch.packed import Int32, Part, int32, starts_of


def lengths(indptr: Int32, last_page_len: Int32, page_size: int) -> Int32:
    """Gives how many keys sequences have in their pages."""
    pages = np.diff(indptr)
    for b in np.flatnonzero((pages > 0) & ((last_page_len < 1) | (last_page_len > page_size))):
        raise ValueError(f"last_page_len[{b}]: {last_page_len[b]}, outside 1..{page_size}, the tokens of a page")
    lens = np.where(pages > 0, (pages.astype(np.int64) - 1) * page_size + last_page_len, 0)
    for b in np.flatnonzero(lens > _check.INT32_MAX):
        raise ValueError(f"indptr[{b + 1}]: {pages[b]} pages of {page_size} tokens are more than {_check.INT32_MAX}")
    return lens.astype(np.int32)


def table_of(indptr: Int32, indices: Int32) -> Int32:
    """Gives the block table [B, M]; entries behind a sequence's pages are 0."""
    counts = np.diff(indptr)
    table = np.zeros((len(counts), int(counts.max(initial=0))), np.int32)
    table[np.arange(table.shape[1]) < counts[:, None]] = indices[: indptr[-1]]
    return table


def check_lens(name: str, lens: Any, table: Int32, page_size: int) -> Int32:
    """Checks lengths, int32 or uint32 [B], of sequences whose pages are in the rows of table."""
    (lens,) = tensors(**{name: lens})
    if lens.dtype == torch.uint32:
        lens = lens.to(torch.int64).clamp(max=_check.INT32_MAX).int()
    found = int32(name, lens, len(table))
    most = min(_check.INT32_MAX, table.shape[1] * page_size)
    for b in np.flatnonzero((found < 0) | (found > most)):
        raise ValueError(f"{name}[{b}]: {found[b]}, outside 0..{most}, for which there are pages")
    return found


def tables(name: str, x: Any, num_reqs: int | None = None) -> Int32:
    """Gives block tables, int32 or uint32 [B, M]."""
    (x,) = tensors(**{name: x})
    axes(name, x, batch_size=num_reqs, pages=None)
    if x.dtype not in (torch.int32, torch.uint32):
        raise TypeError(f"{name}: dtype {x.dtype}, expected torch.int32")
    found: Int32 = x.resolve_neg().view(torch.int32).numpy().copy()
    return found


def flat(name: str, x: Any, shape: Any, kept: int) -> Any:
    """Gives a view [T, ...] of what is to be written, which has this shape, or is [T, ...] already; kept: how many of
    its axes are not tokens."""
    (x,) = optional(**{name: x})
    if x is None:
        return None
    packed = (int(np.prod(shape[: len(shape) - kept])), *shape[len(shape) - kept :])
    if tuple(x.shape) not in (tuple(shape), packed):
        raise ValueError(f"{name}: shape {tuple(x.shape)}, expected {tuple(shape)}")
    if not x.is_contiguous():
        raise ValueError(f"{name}: is not contiguous")
    return x.view(packed)


def pair_of(paged_kv_cache: Any, layout: str, page_size: int | None) -> tuple[Tensor, Tensor]:
    """Gives keys and values of (K, V), or of one tensor [N, 2, ...]."""
    if isinstance(paged_kv_cache, torch.Tensor):
        (cache,) = tensors(paged_kv_cache=paged_kv_cache)
        axes("paged_kv_cache", cache, pages=None, two=2, a=None, b=None, head_dim=None)
        key, value = cache.unbind(1)
    else:
        pair = _check.sequence("paged_kv_cache", paged_kv_cache)
        if len(pair) != 2:
            raise ValueError(f"paged_kv_cache: expected a tensor or (K, V), got {len(pair)} values")
        key, value = (tensors(paged_kv_cache=x)[0] for x in pair)
    for x in (key, value):
        axes("paged_kv_cache", x, pages=None, a=None, b=None, head_dim=None)
    size = key.shape[1 if layout == "NHD" else 2]
    if page_size is not None and size != page_size:
        raise ValueError(f"paged_kv_cache: pages of {size} tokens, plan() was given page_size {page_size}")
    return key, value


PAGES = ("paged_kv_cache[0]", "paged_kv_cache[1]")  # how errors call the tensors of keys and of values


class Wrapper:
    """Holds a plan. buffers: those that a graph of a GPU would read, which a plan with use_cuda_graph fills: its arrays
    in the order in which plan has them, the first of which fix the number of sequences."""

    _step: Sequences | None = None
    _logits: Logits
    _bias: Tensor | None = None
    _masks: tuple[Tensor | None, Tensor | None]

    def __init__(self, kv_layout: Any, use_cuda_graph: Any = False, **buffers: Any):
        self._kv_layout = layout_of(kv_layout)
        self._fixed = _check.boolean("use_cuda_graph", use_cuda_graph)
        self._buffers = buffers if self._fixed else {}
        for name, x in self._buffers.items():
            int32(name, x)
        written({}, **self._buffers)

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether plans have fixed buffers."""
        return self._fixed

    def reset_workspace_buffer(self, float_workspace_buffer: Any, int_workspace_buffer: Any) -> None:
        """Does nothing: no workspace is needed."""

    def end_forward(self) -> None:
        """Does nothing, as in FlashInfer."""

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Does nothing: no kernel is compiled at run time."""

    def _keep(self, *arrays: Any) -> None:
        """Writes a plan's arrays, which may be parts of the fixed buffers, into these, once all fit; those of indices
        may be longer."""
        buffers = written({}, **self._buffers)
        kept = [torch.as_tensor(x).clone() for _, x in zip(buffers, arrays, strict=False)]
        for name, buffer, x in zip(self._buffers, buffers, kept, strict=False):
            if len(x) > len(buffer) or (len(x) != len(buffer) and "indices" not in name):
                raise ValueError(f"{name}: {len(buffer)} numbers, the plan has {len(x)}, fixed by use_cuda_graph")
        for buffer, x in zip(buffers, kept, strict=False):
            buffer[: len(x)] = x

    def _planned(
        self, step: Sequences, logits: Logits, mask: Tensor | None = None, items: Tensor | None = None
    ) -> None:
        """Keeps a plan, and the bias of a mask, which takes the place of causal, or of items, which are causal."""
        self._step, self._bias, self._masks = step, mask if items is None else items, (mask, items)
        self._logits = self._masked(logits)

    def _masked(self, logits: Logits) -> Logits:
        mask, items = self._masks
        return replace(logits, causal=items is not None or (logits.causal and mask is None))

    def _ready(self) -> Sequences:
        if self._step is None:
            raise RuntimeError("run() before plan()")
        return self._step

    def _again(self, *changed: Any) -> None:
        """Changes what becomes of q.k, as ``forward`` says it in place of ``plan``."""
        self._ready()
        self._logits = self._masked(logits_of(*changed))


class PagedWrapper(Wrapper):
    """Holds a plan over pages."""

    _table: Int32
    _page_size: int

    def _pages(
        self, indptr: Any, indices: Any, last_page_len: Any, page_size: Any, seq_lens: Any, block_tables: Any, size: int
    ) -> tuple[Int32, Int32, int]:
        """Gives lengths, table and page size of ``size`` - 1 sequences."""
        found = int32("indices", indices)
        starts = starts_of("indptr", indptr, len(found), size)
        last = int32("last_page_len", last_page_len, size - 1)
        page_size = _check.integer("page_size", page_size, 1)
        table = table_of(starts, found) if block_tables is None else tables("block_tables", block_tables, size - 1)
        lens = lengths(starts, last, page_size)
        if seq_lens is not None or block_tables is not None:
            given = torch.from_numpy(lens) if seq_lens is None else seq_lens
            lens = check_lens("seq_lens", given, table, page_size)
        return lens, table, page_size

    def _plan_pages(self, step: Sequences, table: Int32, page_size: int, logits: Logits, *masks: Tensor | None) -> None:
        self._planned(step, logits, *masks)
        self._table, self._page_size = table, page_size
        if logits.pos_encoding_mode != "ROPE_LLAMA":  # which is planned over copies, when it is run
            step.plan(0, len(step.lens), self._logits, self._kv_layout, step.dtype, step.kv_dtype)

    def _run_pages(
        self,
        q: Any,
        paged_kv_cache: Any,
        factors: Factors,
        results: Results,
        window_left: Any = None,
        sinks: Any = None,
        scale: Any = None,
        step: Sequences | None = None,
    ) -> Any:
        """step: in place of that of the plan, which has the same sequences."""
        step, logits = step or self._ready(), self._logits
        if window_left is not None:
            logits = replace(logits, window_left=_check.integer("window_left", window_left, -1))
        if scale is not None:
            logits = replace(logits, scale=_check.number("sm_scale", scale))
        key, value = pair_of(paged_kv_cache, self._kv_layout, self._page_size)
        parts = [(0, len(step.lens), key, value, self._table)]
        return step.attend(q, self._kv_layout, parts, logits, factors, results, self._bias, sinks)


def part_of_one(key: Tensor, value: Tensor, layout: str) -> list[Part]:
    """Gives one sequence's keys and values [kv_len, Hkv, D], or of HND [Hkv, kv_len, D], as one page. A page has at
    least one token."""
    if not key.shape[0 if layout == "NHD" else 1]:
        shape = [(1, x.shape[1], x.shape[2]) if layout == "NHD" else (x.shape[0], 1, x.shape[2]) for x in (key, value)]
        key, value = key.new_zeros(shape[0]), value.new_zeros(shape[1])
    return [(0, 1, key[None], value[None], np.zeros((1, 1), np.int32))]
