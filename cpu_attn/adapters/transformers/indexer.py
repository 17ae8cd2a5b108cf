# SPDX-License-Identifier: Apache-2.0
"""This module is the indexer of a sparse layer (DeepSeek-V3.2) over a PagedCache: select_tokens scores its keys, which
are in pages.

A model's indexer asks its cache for all of its keys, and makes scores and indices of them by operations of torch. What
the cache gives it records these operations. Where they are the formula of ``cpu_attn.sparse.select_tokens``, and the
indices get to our attention function, torch computes none of them. To everything else, each is the tensor that torch
makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from cpu_attn import CacheDescriptor, PagedKVCache
from cpu_attn.sparse import index_and_cache, select_tokens
from cpu_attn.transformers.lazy import LazyTensor, ReadOnly
from cpu_attn.transformers.masks import Mask, MaskRows
from cpu_attn.transformers.pages import PagedLayer, Pages
from cpu_attn.transformers.plans import Requests

# ---- what a model computes ----


@dataclass(frozen=True)
class Formula:
    """Says how far operations are those of select_tokens over keys [B, 1, S, D], and holds what they have brought:
    query [B, T, H, D] of the keys' dtype, scale, weights [B, T, 1, H], the mask, how many keys are selected."""

    keys: Pages
    step: str = "keys"
    query: Any = None
    scale: float = 1.0
    weights: Any = None
    mask: Any = None
    most: int = 0
    found: list[Any] = field(default_factory=list, init=False)  # the plan of a mask, and what is selected under it

    def after(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Formula, tuple[int, ...]] | None:
        """Gives what the formula is after an operation, and the shape of its result; None where the operation is not
        the next one."""
        batch_size, _, length, size = self.keys.shape
        tokens, heads = self.query.shape[1:3] if self.query is not None else (0, 0)
        match self.step, func, args, tuple(kwargs.items()):
            case "keys", torch.Tensor.transpose, (_, -1, -2), ():
                return replace(self, step="columns"), (batch_size, size, length)
            case "columns", torch.Tensor.float, (_,), ():
                return replace(self, step="numbers"), (batch_size, size, length)
            case "numbers", torch.Tensor.unsqueeze, (_, 1), ():
                return replace(self, step="factors"), (batch_size, 1, size, length)
            case "factors", torch.matmul, (torch.Tensor(dtype=torch.float32, ndim=4) as query, Recorded()), ():
                exact = query.detach().to(self.keys.dtype)
                if query.shape[::3] == (batch_size, size) and exact.float().equal(query):
                    return replace(self, step="products", query=exact), (*query.shape[:3], length)
            case "products", torch.Tensor.mul, (_, float() as scale), () if scale > 0:
                return replace(self, scale=self.scale * scale), (batch_size, tokens, heads, length)
            case "products", functional.relu, (_,), (("inplace", False),):
                return replace(self, step="terms"), (batch_size, tokens, heads, length)
            case "terms", torch.matmul, (torch.Tensor(dtype=torch.float32) as weights, Recorded()), ():
                if weights.shape == (batch_size, tokens, 1, heads):
                    return replace(self, step="sums", weights=weights.detach()), (batch_size, tokens, 1, length)
            case "sums", torch.Tensor.squeeze, (_, -2), ():
                return replace(self, step="scores"), (batch_size, tokens, length)
            case "scores", torch.Tensor.masked_fill, (Recorded(), MaskRows(hides=True) as rows, float() as least), ():
                if rows.shape == (batch_size, tokens, length) and least == -torch.inf:
                    return replace(self, step="masked", mask=rows.mask), rows.shape
            case "scores", torch.Tensor.add, (Recorded(), MaskRows(hides=False) as rows), ():
                if rows.shape == (batch_size, tokens, length) and rows.is_floating_point():
                    return replace(self, step="masked", mask=rows.mask), rows.shape
            case "masked", torch.Tensor.topk, (_, int() as most), (("dim", -1),) if 0 < most <= length:
                return replace(self, step="indices", most=most), (batch_size, tokens, most)
            case "indices", torch.Tensor.to, (_, torch.int32), ():
                return self, (batch_size, tokens, self.most)
        return None

    def selected(self, requests: Requests) -> np.ndarray[Any, Any]:
        """Gives selected_tokens under the plan of the mask, made once where layers share the indices (GLM-MoE-DSA)."""
        if not (self.found and self.found[0] is requests):
            held, each = self.keys.held, requests.all_causal
            tokens = select_tokens(
                query=self.query.flatten(0, 1),
                index_cache=held.pages.key_cache[:, 0],
                weights=self.weights.flatten(0, 2),
                query_start_loc=each.query_start_loc,
                seq_lens=each.seq_lens,
                block_table=held.table[each.rows],
                topk_tokens=self.most,
                scale=self.scale,
                isa=held.pages.isa,
                document_start_loc=each.documents or None,
            )
            self.found[:] = requests, tokens
        selected: np.ndarray[Any, Any] = self.found[1]
        return selected


class Recorded(LazyTensor):
    """Stands for what an operation makes, which torch computes once somebody looks. Its operands may not change before
    that."""

    @staticmethod
    def __new__(
        cls, formula: Formula | None, shape: tuple[int, ...], dtype: torch.dtype, make: Callable[[], torch.Tensor]
    ) -> Recorded:
        kind = RecordedKeys if formula and formula.query is None else Recorded
        recorded: Recorded = LazyTensor.__new__(kind, shape, dtype)
        recorded.formula, recorded.make, recorded._made = formula, make, None
        return recorded

    def __init__(self, *_: Any) -> None:
        super().__init__()

    formula: Formula | None  # None once somebody has looked
    make: Callable[[], torch.Tensor]
    _made: torch.Tensor | None

    def dense(self) -> torch.Tensor:
        if self._made is None:
            self._made, self.formula = self.make(), None
        return self._made

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        one = [x for x in args if isinstance(x, Recorded)]
        if len(one) == 1 and one[0].formula and not torch.is_autocast_enabled("cpu"):
            found = one[0].formula.after(func, args, kwargs)
            if found:
                return _recorded(*found, func, args, kwargs)
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs)


class RecordedKeys(Recorded, ReadOnly):
    """Stands for keys that are in the pages."""


class Best(NamedTuple):
    """Holds the result of ``topk``."""

    values: torch.Tensor
    indices: torch.Tensor


def _recorded(formula: Formula, shape: tuple[int, ...], func: Any, args: Any, kwargs: Any) -> Any:
    def make() -> Any:
        return func(*(x.make() if isinstance(x, Recorded) else x for x in args), **kwargs)

    if func is torch.Tensor.topk:
        values = Recorded(None, shape, torch.float32, lambda: make().values)
        return Best(values, Recorded(formula, shape, torch.int64, lambda: make().indices))
    dtype = formula.keys.dtype if formula.step == "columns" else torch.float32
    return Recorded(formula, shape, torch.int32 if formula.step == "indices" else dtype, make)


def formula_of(indices: torch.Tensor, mask: torch.Tensor | None, requests: Requests) -> Formula | None:
    """Gives the formula of indices that are recorded and that nobody has looked at, if their keys are those that a
    layer holds now and their mask is the one whose plan ``requests`` is."""
    formula = indices.formula if isinstance(indices, Recorded) else None
    if formula is None or formula.step != "indices" or formula.mask is not mask or not formula.keys.held.current:
        return None
    planned = isinstance(mask, Mask) and mask.is_planned_as(requests) and requests.window == (-1, -1)
    return formula if planned and requests.causal else None


# ---- the cache ----


class IndexPages(PagedKVCache):
    """Holds pages of keys alone, of one head; its values are these keys."""

    def _hold(self, descriptor: CacheDescriptor, key_cache: Any, value_cache: Any) -> None:
        super()._hold(descriptor, key_cache, key_cache)

    def update(self, key: Any, value: Any, slot_mapping: Any) -> None:
        index_and_cache(key[:, 0], self.key_cache[:, 0], slot_mapping, self.isa)


class IndexKeys(PagedLayer):
    """Holds the keys of an indexer in the model's dtype, whatever the pages beside them hold."""

    def _pages(self, num_kv_heads: int, head_size: int, head_size_v: int, dtype: str) -> PagedKVCache:
        return IndexPages(0, self.block_size, num_kv_heads, head_size, dtype)


class IndexedLayer(PagedLayer):
    """Holds pages and, beside them, those of an indexer's keys."""

    def __init__(self, block_size: int, **options: Any) -> None:
        super().__init__(block_size, **options)
        self.index = IndexKeys(block_size)

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Gives all keys [B, S, D] of the indexer (DeepSeek-V3.2), with those that are new, [B, T, D]."""
        keys = self.update_index(indexer_key_states[:, None])
        if not isinstance(keys, Pages) or keys.requires_grad:  # their backward pass is an error
            return keys[:, 0]
        batch_size, _, length, size = keys.shape
        return Recorded(Formula(keys), (batch_size, length, size), keys.dtype, lambda: keys.dense()[:, 0])

    def update_index(self, idx_k: torch.Tensor) -> torch.Tensor:
        """Gives all keys [B, 1, S, D] of an indexer that selects blocks (MiniMax M3), with those that are new."""
        return self.index.update(idx_k, idx_k)[0]

    def parts(self) -> list[PagedLayer]:
        return [self, self.index]

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.index.nbytes

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        self.index.crop(tokens_to_remove)

    def reset(self) -> None:
        super().reset()
        self.index.reset()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        super().reorder_cache(beam_idx)
        self.index.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self.index.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        self.index.batch_select_indices(indices)
