# SPDX-License-Identifier: Apache-2.0
"""This module turns transformers' masks into requests of a plan: lengths, window and documents in place of [B, 1, T, S]
booleans."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from cpu_attn.transformers import private
from cpu_attn.transformers.lazy import LazyTensor
from cpu_attn.transformers.plans import Ints, Requests
from transformers import PreTrainedModel


class UnplannableError(Exception):
    """Says why a mask is no plan."""


@dataclass
class Pattern:
    """Holds what a mask function says, padding apart. chunks: their size, and the padding [B] before the first one;
    packed: which sequence a token [B, T] is of."""

    causal: bool = False
    left: int = -1
    right: int = -1
    chunks: tuple[int, Any] | None = None
    packed: Any = None

    def read(self, function: Any) -> None:
        kind, cells = private.mask_function(function)
        if kind == "and":
            for part in cells[0]:
                self.read(part)
        elif kind == "causal":
            self.causal = True
        elif kind == "window":
            self.left = _narrower(self.left, cells[0] - 1)
        elif kind == "window on both sides":
            self.left, self.right = (_narrower(x, cells[0]) for x in (self.left, self.right))
        elif kind == "chunks":
            if self.chunks:
                raise UnplannableError("chunks of two sizes")
            self.chunks = cells[0], cells[1]
        elif kind == "packed":
            self.packed = cells[0]
        elif kind == "remapped":  # positions run on within a sequence, so distances are what they were
            self.read(cells[0])
            if self.chunks:
                raise UnplannableError("chunks that start anew in each packed sequence")
        elif kind != "bidirectional":
            raise UnplannableError(f"the mask function {getattr(function, '__qualname__', function)!r}")


def _narrower(*sides: int) -> int:
    return min((x for x in sides if x >= 0), default=-1)


# ---- the mask ----

# This hides a key beside any that is seen, and stays finite times log2(e), where float32's own least number does not.
LEAST = -1e38
_ADDITIONS = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)


def eager_only(config: Any) -> bool:
    """Says whether the models of such a configuration are not made for sdpa: they take every mask for what eager adds
    to scores, and none for every key."""
    config_class: Any = type(config)
    module = private.modeling(config)
    return module is not None and _eager_only(config_class, module)


@cache
def _eager_only(config_class: Any, module: Any) -> bool:
    found: list[Any] = [x for x in vars(module).values() if isinstance(x, type)]
    models = [x for x in found if issubclass(x, PreTrainedModel) and x.config_class is config_class]
    return bool(models) and not any(private.supports_sdpa(x) for x in models)


class Mask(LazyTensor):
    """Stands for [B, 1, T, S], as ``sdpa_mask`` makes it of these arguments, bool; or, for models that know no other,
    as ``eager_mask`` does, of numbers to be added. ``requests()`` says the same by lengths.

    All who look see one tensor, which they may change in place; ``requests()`` and ``bias()`` do not know of that. A
    model with attention of its own that adds a boolean one to scores, as it would add eager's, gets what hides keys.
    """

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        scores = [x for x in args if isinstance(x, torch.Tensor) and x.is_floating_point()]
        if func in _ADDITIONS and scores and not (func is _ADDITIONS[1] and isinstance(args[0], Mask)):
            dtype = scores[0].dtype
            args = tree_map_only(Mask, lambda x: _added(x.dense(), dtype), args)
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    @staticmethod
    def __new__(cls, arguments: dict[str, Any]) -> Mask:
        shape = (arguments["batch_size"], 1, arguments["q_length"], arguments["kv_length"])
        added = eager_only(arguments.get("config"))
        mask: Mask = super().__new__(cls, shape, arguments.get("dtype", torch.float32) if added else torch.bool)
        mask._arguments, mask._seen, mask._found, mask._bias, mask._dense = arguments, None, None, None, None
        return mask

    _arguments: dict[str, Any]
    _seen: torch.Tensor | None
    _found: Requests | str | None
    _bias: torch.Tensor | None
    _dense: tuple[torch.Tensor, torch.Tensor] | None

    def __getitem__(self, index: Any) -> torch.Tensor:
        if _is_one_head(index):
            return MaskRows(self)
        found: torch.Tensor = super().__getitem__(index)
        return found

    def is_planned_as(self, requests: Requests) -> bool:
        return self._found is requests

    def seen(self) -> torch.Tensor:
        """Gives booleans, whatever the mask is to others."""
        if self._seen is None:
            arguments = self._arguments | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
            self._seen = private.sdpa_mask(**arguments)
        return self._seen

    def dense(self) -> torch.Tensor:
        if self._dense is None:
            made = self.seen()  # rows of a batch may be one memory
            if self.dtype != torch.bool:
                made = _added(made, self.dtype)
            self._dense = made.clone(memory_format=torch.contiguous_format), made
        return self._dense[0]

    def changed(self) -> bool:
        """Says whether somebody has changed the values. It compares them: tensors of inference_mode count no versions,
        and none counts changes by ``data`` or an array."""
        return self._dense is not None and not self._dense[0].equal(self._dense[1])

    def bias(self) -> torch.Tensor:
        """Gives what :func:`as_bias` makes of it, once for all layers."""
        if self._bias is None:
            self._bias = as_bias(self.seen())
        return self._bias

    def requests(self) -> Requests:
        """Gives the mask as requests. It raises UnplannableError where a plan cannot say it."""
        if self._found is None:
            try:
                self._found = _requests(**self._arguments)
            except UnplannableError as reason:
                self._found = str(reason)
        if isinstance(self._found, str):
            raise UnplannableError(self._found)
        return self._found


def _is_one_head(index: Any) -> bool:
    """Says whether the index is [:, 0] of a mask, with or without the axes behind that."""
    everything = slice(None)
    if not (isinstance(index, tuple) and 2 <= len(index) <= 4 and type(index[1]) is int and index[1] == 0):
        return False
    return all(isinstance(i, slice) and i == everything for i in (index[0], *index[2:]))


class MaskRows(LazyTensor):
    """Stands for [B, T, S] of a mask, or for what it hides, as indexers mask their scores."""

    @staticmethod
    def __new__(cls, mask: Mask, hides: bool = False) -> MaskRows:
        rows: MaskRows = LazyTensor.__new__(cls, (mask.shape[0], *mask.shape[2:]), mask.dtype)
        rows.mask, rows.hides = mask, hides
        return rows

    def __init__(self, *_: Any) -> None:
        super().__init__()

    mask: Mask
    hides: bool

    def __invert__(self) -> torch.Tensor:
        return MaskRows(self.mask, not self.hides) if self.dtype == torch.bool else ~self.dense()

    def dense(self) -> torch.Tensor:
        rows = self.mask.dense()[:, 0]
        return ~rows if self.hides else rows


def _added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Adds the least number for what is hidden, as ``eager_mask`` does, so that a softmax over hidden keys alone gives
    no NaN."""
    if mask.dtype != torch.bool:
        return mask
    return mask.new_zeros((), dtype=dtype).where(mask, torch.finfo(dtype).min)


def as_bias(mask: torch.Tensor) -> torch.Tensor:
    """Gives what a dense mask adds to logits, float32, its last axis dense; True is seen.

    Where numbers hide a whole row, as eager's masks do by the least number of a dtype, every key is seen alike: what
    is finite stays so times log2(e).
    """
    if mask.dtype != torch.bool:
        bias = mask.detach().float()
        return bias.clamp(min=LEAST).where(bias != -torch.inf, bias).contiguous()
    return mask.new_zeros(mask.shape, dtype=torch.float32).masked_fill_(~mask, -torch.inf)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def mask_function(**arguments: Any) -> Mask | None:
    """Serves AttentionMaskInterface, which calls it with the arguments of ``sdpa_mask``. It gives None, as others do,
    where every key is seen and the caller allows that: a model may change the length of its tokens after that."""
    for name in ("q_offset", "kv_offset"):  # a StaticCache gives tensors, which its next update changes
        arguments[name] = int(arguments.get(name, 0))
    if arguments.get("allow_is_bidirectional_skip"):
        lengths = arguments["kv_length"], arguments["kv_offset"], arguments.get("local_size")
        if private.hides_nothing(arguments["attention_mask"], *lengths):
            return None
    if not arguments.get("use_vmap"):
        return Mask(arguments)
    try:
        Pattern().read(arguments.get("mask_function", private.causal_mask_function))
        return Mask(arguments | {"use_vmap": False})  # each of them is a function of indices
    except UnplannableError:
        mask = Mask(arguments)
        mask.seen()  # made now: inside an operation of torch, where somebody looks, there is no vmap
        return mask


def _requests(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int,
    kv_offset: int,
    mask_function: Callable[..., Any] = private.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **_: Any,
) -> Requests:
    pattern = Pattern()
    pattern.read(mask_function)
    # ``origin`` is where the first query stands among the keys, ``seen`` where they end for the last one if it is
    # causal.
    origin = q_offset - kv_offset
    seen = origin + q_length if pattern.causal else kv_length
    if not 0 <= seen <= kv_length:
        raise UnplannableError("a causal mask whose queries end past the keys")
    first, end = _valid(attention_mask, batch_size, kv_offset, kv_length, seen)
    if pattern == Pattern():  # positions mean nothing, so padded rows attend, too
        if first.any():  # queries may be other tokens than keys, and any number
            raise UnplannableError("padding on the left of keys that every query sees")
        starts = np.arange(batch_size + 1, dtype=np.int32) * np.int32(q_length)
        return Requests(np.arange(batch_size), starts, end.astype(np.int32), False)
    if not pattern.causal and (origin or q_length != kv_length):
        raise UnplannableError("a bidirectional mask of more than lengths, where keys are not those of the queries")
    parts = [
        part
        for row in range(batch_size)
        for part in _parts(pattern, row, int(first[row]), int(end[row]), origin, q_length, kv_offset)
    ]
    starts = np.concatenate([[0], np.cumsum([x.tokens for x in parts])]).astype(np.int32)
    lengths = np.array([x.seq_len for x in parts], np.int32)
    documents = {r: [0, *x.borders] for r, x in enumerate(parts) if x.borders}
    rows = np.array([x.row for x in parts], np.int64)
    flags = np.array([pattern.causal and x.causal for x in parts], np.int32)
    return Requests(rows, starts, lengths, pattern.causal, (pattern.left, pattern.right), documents, flags)


_FAR = 1 << 40


class Part(NamedTuple):
    """Holds a request: tokens of a row of the batch that see some of its keys below seq_len, and where documents start.
    causal: whether they are as the pattern says; if not, each token sees all keys."""

    row: int
    tokens: int
    seq_len: int
    borders: list[int]
    causal: bool = True


def _parts(
    pattern: Pattern, row: int, first: int, end: int, origin: int, q_length: int, kv_offset: int
) -> Iterator[Part]:
    """Cuts a row into requests. The tokens whose own keys are in [first, end) are one. The plan has no keys of padding,
    before and behind them: tokens of padding that see nothing, or the same keys from the first one on, are one request,
    and any other is one by itself."""
    before = min(max(first - origin, 0), q_length)
    tokens = min(max(end - origin, before), q_length) - before
    borders = _borders(pattern, row, origin + q_length, kv_offset)
    at = np.arange(origin, origin + q_length)
    yield from _padding(pattern, row, first, end, borders, at[:before])
    if tokens:
        yield Part(row, tokens, end, [b for b in sorted({first, *borders}) if max(first, 1) <= b < end])
    yield from _padding(pattern, row, first, end, borders, at[before + tokens :])


def _padding(pattern: Pattern, row: int, first: int, end: int, borders: list[int], at: Ints) -> Iterator[Part]:
    """Cuts tokens of padding into requests. at: where they stand among the keys."""
    edges = np.array([-_FAR, *borders, _FAR])
    document = np.searchsorted(edges, at, "right")
    low, high = np.maximum(first, edges[document - 1]), np.minimum(end, edges[document])
    if pattern.left >= 0:
        low = np.maximum(low, at - pattern.left)
    if pattern.causal or pattern.right >= 0:
        high = np.minimum(high, at + 1 + (0 if pattern.causal else pattern.right))
    high = np.where(low < high, high, 0)
    alike = (high == 0) | ((low == 0) & (pattern.left < 0) & (pattern.right < 0))
    for run in np.split(np.arange(len(at)), np.flatnonzero((high[1:] != high[:-1]) | ~alike[1:] | ~alike[:-1]) + 1):
        if len(run) and alike[run[0]]:
            yield Part(row, len(run), int(high[run[0]]), [], causal=False)
        elif len(run):
            start = int(low[run[0]])
            yield Part(row, 1, int(high[run[0]]), [start] if start else [])


def _valid(
    attention_mask: torch.Tensor | None, batch_size: int, kv_offset: int, kv_length: int, seen: int
) -> tuple[Ints, Ints]:
    """Gives for each row the first key that is no padding, and the one after the last, among those below ``seen``."""
    if attention_mask is None:
        return np.zeros(batch_size, np.int64), np.full(batch_size, seen)
    # transformers fills up a mask that is too short with padding.
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


def _borders(pattern: Pattern, row: int, end: int, kv_offset: int) -> list[int]:
    """Says where documents start among the keys below ``end``, but for 0."""
    borders: set[int] = set()
    if pattern.chunks:
        size, padding = pattern.chunks
        borders.update(range(int(padding[row]) - kv_offset, end, size))
    if pattern.packed is not None:
        ids = pattern.packed[row].numpy()
        borders.update((np.flatnonzero(ids[1:] != ids[:-1]) + 1).tolist())
    return sorted(b for b in borders if 0 < b < end)
