# SPDX-License-Identifier: Apache-2.0
"""transformers' masks as requests of a plan: lengths, window and documents in place of [B, 1, T, S] booleans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map_only
from transformers import masking_utils as stock

from cpu_attn.transformers.lazy import LazyTensor
from cpu_attn.transformers.plans import Ints, Requests


class UnplannableError(Exception):
    """Why a mask is no plan."""


# ---- which of transformers' mask functions a function is ----


def _code(function: Any) -> Any:
    return getattr(function, "__code__", None)


# Closures of one maker share their code; what they close over is in their cells.
_CAUSAL = _code(stock.causal_mask_function)
_BIDIRECTIONAL = _code(stock.bidirectional_mask_function)
_AND = _code(stock.and_masks(stock.causal_mask_function))
_WINDOW = _code(stock.sliding_window_overlay(1))
_WINDOW_BOTH = _code(stock.sliding_window_bidirectional_overlay(1))
_CHUNKS = _code(stock.chunked_overlay(1, torch.zeros(1)))
_PACKED = _code(stock.packed_sequence_mask_function(torch.zeros(1, 1)))
_REMAPPED = _code(stock.remap_positions_for_packed_sequence(stock.causal_mask_function, torch.zeros(1, 1)))


@dataclass
class Pattern:
    """What a mask function says, padding apart. chunks: their size, and the padding [B] before the first one; packed:
    which sequence a token [B, T] is of."""

    causal: bool = False
    left: int = -1
    right: int = -1
    chunks: tuple[int, Any] | None = None
    packed: Any = None

    def read(self, function: Any) -> None:
        code, cells = _code(function), {}
        if code is not None:
            cells = dict(zip(code.co_freevars, (c.cell_contents for c in function.__closure__ or ()), strict=True))
        if code is _AND:
            for part in cells["mask_functions"]:
                self.read(part)
        elif code is _CAUSAL:
            self.causal = True
        elif code is _WINDOW:
            self.left = _narrower(self.left, cells["sliding_window"] - 1)
        elif code is _WINDOW_BOTH:
            self.left, self.right = (_narrower(x, cells["sliding_window"]) for x in (self.left, self.right))
        elif code is _CHUNKS:
            if self.chunks:
                raise UnplannableError("chunks of two sizes")
            self.chunks = cells["chunk_size"], cells["left_padding"]
        elif code is _PACKED:
            self.packed = cells["packed_sequence_mask"]
        elif code is _REMAPPED:  # positions run on within a sequence, so distances are what they were
            self.read(cells["mask_function"])
            if self.chunks:
                raise UnplannableError("chunks that start anew in each packed sequence")
        elif code is not _BIDIRECTIONAL:
            raise UnplannableError(f"the mask function {getattr(function, '__qualname__', function)!r}")


def _narrower(*sides: int) -> int:
    return min((x for x in sides if x >= 0), default=-1)


# ---- the mask ----

_ADDITIONS = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)


class Mask(LazyTensor):
    """bool [B, 1, T, S], as ``sdpa_mask`` makes it of the same arguments; ``requests()`` is the same as lengths.

    All who look see one tensor, which they may change in place; ``requests()`` and ``bias()`` do not know of that. A
    model with attention of its own that adds it to scores, as it would add ``eager_mask``, gets what hides keys.
    """

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        scores = [x for x in args if isinstance(x, torch.Tensor) and x.is_floating_point()]
        if func in _ADDITIONS and scores and not (func is _ADDITIONS[1] and isinstance(args[0], Mask)):
            args = tree_map_only(Mask, lambda x: as_bias(x.dense()).to(scores[0].dtype), args)
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    @staticmethod
    def __new__(cls, arguments: dict[str, Any]) -> Mask:
        shape = (arguments["batch_size"], 1, arguments["q_length"], arguments["kv_length"])
        mask: Mask = super().__new__(cls, shape, torch.bool)
        mask._arguments, mask._found, mask._bias, mask._dense = arguments, None, None, None
        return mask

    _arguments: dict[str, Any]
    _found: Requests | str | None
    _bias: torch.Tensor | None
    _dense: tuple[torch.Tensor, torch.Tensor] | None

    def _make(self) -> torch.Tensor:
        arguments = self._arguments | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return stock.sdpa_mask(**arguments)

    def dense(self) -> torch.Tensor:
        if self._dense is None:
            made = self._make()  # rows of a batch may be one memory
            self._dense = made.clone(memory_format=torch.contiguous_format), made
        return self._dense[0]

    def changed(self) -> bool:
        """By value: tensors of inference_mode count no versions, and none counts changes by ``data`` or an array."""
        return self._dense is not None and not self._dense[0].equal(self._dense[1])

    def bias(self) -> torch.Tensor:
        """As :func:`as_bias` has it, made once for all layers."""
        if self._bias is None:
            self._bias = as_bias(self._make())
        return self._bias

    def requests(self) -> Requests:
        """UnplannableError, where a plan cannot say it."""
        if self._found is None:
            try:
                self._found = _requests(**self._arguments)
            except UnplannableError as reason:
                self._found = str(reason)
        if isinstance(self._found, str):
            raise UnplannableError(self._found)
        return self._found


def as_bias(mask: torch.Tensor) -> torch.Tensor:
    """What a dense mask adds to logits, float32, its last axis dense; True is seen."""
    if mask.dtype != torch.bool:
        return mask.detach().float().contiguous()
    return mask.new_zeros(mask.shape, dtype=torch.float32).masked_fill_(~mask, -torch.inf)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def mask_function(**arguments: Any) -> Mask:
    """What AttentionMaskInterface calls, with the arguments of ``sdpa_mask``."""
    for name in ("q_offset", "kv_offset"):  # of a StaticCache: tensors that its next update changes
        arguments[name] = int(arguments.get(name, 0))
    return Mask(arguments)


def _requests(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int,
    kv_offset: int,
    mask_function: Callable[..., Any] = stock.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **_: Any,
) -> Requests:
    pattern = Pattern()
    pattern.read(mask_function)
    # Where the first query stands among the keys, and where they end for the last one if it is causal.
    origin = q_offset - kv_offset
    seen = origin + q_length if pattern.causal else kv_length
    if not 0 <= seen <= kv_length:
        raise UnplannableError("a causal mask whose queries end past the keys")
    first, end = _valid(attention_mask, batch_size, kv_offset, kv_length, seen)
    if pattern == Pattern():  # positions mean nothing: padded rows attend, too
        if first.any():  # queries may be other tokens than keys, of whatever length
            raise UnplannableError("padding on the left of keys that every query sees")
        starts = np.arange(batch_size + 1, dtype=np.int32) * np.int32(q_length)
        return Requests(np.arange(batch_size), starts, end.astype(np.int32), False)
    if not pattern.causal and (origin or q_length != kv_length):
        raise UnplannableError("a bidirectional mask of more than lengths, where keys are not those of the queries")
    # A row of the batch is up to three requests: padding, which sees nothing, before and behind the tokens.
    before = np.clip(first - origin, 0, q_length)
    tokens = np.clip(end - origin, before, q_length) - before
    counts = np.stack([before, tokens, q_length - before - tokens], 1)
    lengths = np.stack([0 * end, np.where(tokens, end, 0), 0 * end], 1)
    which = np.flatnonzero(counts)
    rows = which // 3
    starts = np.concatenate([[0], counts.ravel()[which].cumsum()]).astype(np.int32)
    documents = {}
    for r, (row, part) in enumerate(zip(rows, which % 3, strict=True)):
        borders = _borders(pattern, int(row), int(first[row]), int(end[row]), kv_offset) if part == 1 else []
        if borders:
            documents[r] = [0, *borders]
    window = (pattern.left, pattern.right)
    return Requests(rows, starts, lengths.ravel()[which].astype(np.int32), pattern.causal, window, documents)


def _valid(
    attention_mask: torch.Tensor | None, batch_size: int, kv_offset: int, kv_length: int, seen: int
) -> tuple[Ints, Ints]:
    """Of each row the first key that is no padding, and the one after the last, of those below ``seen``."""
    if attention_mask is None:
        return np.zeros(batch_size, np.int64), np.full(batch_size, seen)
    # transformers fills up a mask that is too short with padding
    valid = attention_mask[:, kv_offset : kv_offset + min(kv_length, seen)].numpy()
    if valid.shape[0] != batch_size:
        raise UnplannableError("an attention_mask of another batch size")
    count = valid.sum(1)
    if not valid.shape[1]:
        return count, count
    first = np.where(count, valid.argmax(1), 0)
    end = np.where(count, valid.shape[1] - valid[:, ::-1].argmax(1), 0)
    if (end - first != count).any():
        raise UnplannableError("an attention_mask with holes between its ones")
    return first, end


def _borders(pattern: Pattern, row: int, first: int, end: int, kv_offset: int) -> list[int]:
    """The keys in [first, end) where documents start, but for 0."""
    borders = {first}
    if pattern.chunks:
        size, padding = pattern.chunks
        borders.update(range(int(padding[row]) - kv_offset, end, size))
    if pattern.packed is not None:
        ids = pattern.packed[row].numpy()
        borders.update((np.flatnonzero(ids[1:] != ids[:-1]) + 1).tolist())
    return sorted(b for b in borders if max(first, 1) <= b < end)
