# SPDX-License-Identifier: Apache-2.0
"""This module has what a layer of a PagedCache holds: pages, or the states of linear attention, or both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeGuard

import numpy as np
import torch

from cpu_attn import PagedKVCache, _check, ops
from cpu_attn._arrays import dense_rows
from cpu_attn._dtypes import dtype_name, is_scaled
from cpu_attn.ops import Logits
from cpu_attn.rotation import rotate
from cpu_attn.transformers import private
from cpu_attn.transformers.lazy import Inference, ReadOnly
from cpu_attn.transformers.plans import Requests, autocast, by_token, run


@dataclass(eq=False)
class Held:
    """Says what a layer holds at one moment: ``length`` tokens of each row from its token ``start`` on, in the blocks
    of ``table`` int32 [B, blocks]. Rows share blocks after beam search or repetition, until one of them writes into
    such a block. To attention and to masks the keys begin at ``start``."""

    pages: PagedKVCache
    table: np.ndarray[Any, Any]
    length: int
    dtype: torch.dtype
    start: int = 0
    current: bool = True

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def nbytes(self) -> int:
        key, value = self.pages.key_cache, self.pages.value_cache
        block: int = key[:1].nbytes + (0 if np.may_share_memory(key, value) else value[:1].nbytes)
        return len(np.unique(self.table)) * block

    def with_room(self, tokens: int) -> Held:
        """Gives room for so many more tokens, which are not yet written. They go into blocks of each row's own; a
        shared last block, which they would go into, is copied."""
        block_size, (rows, have) = self.pages.block_size, self.table.shape
        length = self.length + tokens
        more = -(-length // block_size) - have
        shared = rows > 1 and bool(self.length % block_size) and len(np.unique(self.table[:, -1])) < rows
        if not more and not shared:
            return Held(self.pages, self.table, length, self.dtype, self.start)
        columns = more + shared
        pages, free = self._free(columns * rows)
        free = free.reshape(rows, columns)
        if shared:
            pages.copy_blocks(zip(self.table[:, -1], free[:, 0], strict=True))
        return Held(pages, np.concatenate([self.table[:, : have - shared], free], 1), length, self.dtype, self.start)

    def since(self, position: int) -> Held:
        """Drops the blocks that hold nothing but tokens before ``position``, which are free then."""
        blocks = max(0, min(position, self.end) - self.start) // self.pages.block_size
        dropped = blocks * self.pages.block_size
        return replace(self, table=self.table[:, blocks:], length=self.length - dropped, start=self.start + dropped)

    def moved(self, num_blocks: int) -> Held:
        """Copies the blocks to memory of their own, which has room for num_blocks, no fewer than these."""
        blocks, table = np.unique(self.table, return_inverse=True)
        pages = _alike(self.pages, num_blocks)
        pages.key_cache[: len(blocks)] = self.pages.key_cache[blocks]
        pages.value_cache[: len(blocks)] = self.pages.value_cache[blocks]
        return replace(self, pages=pages, table=table.reshape(self.table.shape).astype(np.int32))

    def _free(self, count: int) -> tuple[PagedKVCache, np.ndarray[Any, Any]]:
        """Gives so many blocks that no row has, and the memory that they are in: twice as large where they ran out."""
        had = pages = self.pages
        free = np.setdiff1d(np.arange(had.num_blocks, dtype=np.int32), self.table)
        if len(free) < count:
            pages = _alike(had, max(2 * had.num_blocks, had.num_blocks + count - len(free)))
            pages.key_cache[: had.num_blocks] = had.key_cache
            pages.value_cache[: had.num_blocks] = had.value_cache
            free = np.append(free, np.arange(had.num_blocks, pages.num_blocks, dtype=np.int32))
        return pages, free[:count]

    def slots(self, start: int) -> np.ndarray[Any, Any]:
        """Gives the slots of the tokens from ``start`` on, row after row."""
        block_size = self.pages.block_size
        if self.length - start == 1:
            block, place = divmod(start, block_size)
            return self.table[:, block].astype(np.int64) * block_size + place
        positions = np.arange(start, self.length)
        blocks = self.table[:, positions // block_size].astype(np.int64)
        return (blocks * block_size + positions % block_size).ravel()

    def attend(self, query: torch.Tensor, requests: Requests, logits: Logits) -> torch.Tensor:
        """Gives output [B, T, H, Dv] of query [B, H, T, D] over the pages."""
        pages = self.pages
        head_sizes = pages.head_size, pages.head_size_v
        kind = self.dtype, pages.kv_cache_layout, pages.kv_cache_dtype, pages.kv_cache_rotation
        lists = logits.max_selected_tokens, None if logits.selected_blocks is None else 1
        plan = requests.plan(query.shape[1], pages.num_kv_heads, *head_sizes, *kind, *lists)
        table, scales = self.table[requests.rows], (pages.k_scale, pages.v_scale)
        return run(plan, query, pages.key_cache, pages.value_cache, table, logits, scales)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def gather(self, value: bool) -> torch.Tensor:
        """Gives keys [B, Hkv, S, D] or values [B, Hkv, S, Dv], times their scales: dense, as models view them by
        heads."""
        pages = self.pages
        memory, head_size = (pages.value_cache, pages.head_size_v) if value else (pages.key_cache, pages.head_size)
        integers = is_scaled(pages.descriptor.stored[value])
        shape = (len(self.table), pages.num_kv_heads, self.length, head_size)
        states = np.empty(shape, np.float32 if integers else memory.dtype)
        for row, out in zip(self.table, states, strict=True):
            ops.gather(
                *(memory, row, self.length, head_size, pages.isa),
                value=value,
                out=out.swapaxes(0, 1),
                dtype=pages.dtype,
                kv_cache_dtype=pages.kv_cache_dtype,
                kv_cache_layout=pages.kv_cache_layout,
            )
        rotated = _check.kv_cache_rotation(pages.kv_cache_rotation) >> value & 1
        if rotated or states.dtype != pages.dtype:  # quantised
            states = states.astype(np.float32) * np.float32(pages.v_scale if value else pages.k_scale)
            states = (rotate(states, back=True) if rotated else states).astype(pages.dtype)
        return torch.from_numpy(states.view(np.uint8)).view(self.dtype)  # torch does not know NumPy's bfloat16


def _alike(pages: PagedKVCache, num_blocks: int) -> PagedKVCache:
    """Makes empty pages of the same kind."""
    return type(pages)(
        *(num_blocks, pages.block_size, pages.num_kv_heads, pages.head_size, pages.dtype, pages.isa),
        head_size_v=pages.head_size_v,
        kv_cache_dtype=pages.kv_cache_dtype,
        k_scale=pages.k_scale,
        v_scale=pages.v_scale,
        kv_cache_layout=pages.kv_cache_layout,
        kv_cache_rotation=pages.kv_cache_rotation,
        k_feedback=pages.k_feedback,
    )


class PagedLayer(private.CacheLayerMixin):  # type: ignore[misc]
    """Holds K and V of a layer, as transformers asks for them and writes them.

    sliding_window: how many keys, its own among them, a query sees at most: blocks with none of those that queries to
    come may see are given back. The masks of a step begin where the first block does that is left, as those of
    transformers' own layers begin with the window.
    """

    is_croppable = True
    record_past = False
    held: Held | None = None

    def __init__(self, block_size: int, sliding_window: int | None = None, **options: Any) -> None:
        super().__init__()
        self.block_size, self.sliding_window, self.options = block_size, sliding_window, options
        self.is_sliding = sliding_window is not None

    def activate_past_recording(self) -> None:
        """Leaves it from now on to ``crop`` alone to give back a window's older keys (assisted generation)."""
        self.record_past = True

    def _first(self, end: int) -> int:
        """Gives the first token that queries from ``end`` on may see."""
        return 0 if self.sliding_window is None else max(0, end - self.sliding_window + 1)

    def _left(self) -> Held | None:
        """Gives what a step finds, before it writes."""
        return self.held if self.held is None or self.record_past else self.held.since(self._first(self.held.end))

    def _kept(self, held: Held) -> Held:
        """Gives what stays of it behind a step."""
        return held if self.sliding_window is None or self.record_past else self._shrunk(held, self.sliding_window)

    def _shrunk(self, held: Held, sliding_window: int) -> Held:
        """Moves what a window needs to smaller memory, behind a prompt that is much longer than the window. Twice as
        much as steps of one token need may stay, so that longer ones (chunks of a prompt) do not move every time."""
        columns = -(-(sliding_window + self.block_size - 2) // self.block_size) + 1
        most = len(held.table) * columns
        return held.since(self._first(held.end)).moved(most) if held.pages.num_blocks > 2 * most else held

    def _hold(self, held: Held | None) -> None:
        """Holds this from now on. Keys and values of what was held before are an error for whoever looks at them."""
        if self.held:
            self.held.current = False
        self.held, self.is_initialized = held, held is not None
        self.keys = Pages(held, value=False) if held else None
        self.values = Pages(held, value=True) if held else None

    def reset(self) -> None:
        self._hold(None)

    def parts(self) -> list[PagedLayer]:
        """Lists what has pages here."""
        return [self]

    def begin(self, num_blocks: int) -> None:
        """Lets go of the tokens that are held, for those of one row, for which there is room in so many blocks."""
        assert self.held
        self._hold(Held(_alike(self.held.pages, num_blocks), np.zeros((1, 0), np.int32), 0, self.held.dtype))

    def begin_with(self, num_blocks: int) -> None:
        """Holds the first blocks, which have been written meanwhile, as full ones of that row."""
        assert self.held
        table = np.arange(num_blocks, dtype=np.int32)[None]
        self._hold(replace(self.held, table=table, length=num_blocks * self.block_size))

    @contextmanager
    def keeping_all(self) -> Iterator[None]:
        """Gives nothing before a window back until the end of the context."""
        window, self.sliding_window = self.sliding_window, None
        try:
            yield
        finally:
            self.sliding_window = window
            self._hold(self.held and self._kept(self.held))

    def __getstate__(self) -> dict[str, Any]:
        """Leaves keys and values out of copies, which make their own: what these hold is in the pages."""
        return self.__dict__ | {"keys": None, "values": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.held:
            self._hold(replace(self.held))

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self._hold(self._empty(key_states, value_states))

    def _empty(self, key_states: torch.Tensor, value_states: torch.Tensor) -> Held:
        batch_size, num_kv_heads, _, head_size = key_states.shape
        pages = self._pages(num_kv_heads, head_size, value_states.shape[-1], dtype_name(key_states.dtype))
        return Held(pages, np.zeros((batch_size, 0), np.int32), 0, key_states.dtype)

    def _pages(self, num_kv_heads: int, head_size: int, head_size_v: int, dtype: str) -> PagedKVCache:
        sizes = 0, self.block_size, num_kv_heads, head_size
        return PagedKVCache(*sizes, dtype, head_size_v=head_size_v, **self.options)

    @property
    def nbytes(self) -> int:
        return self.held.nbytes if self.held else 0

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes key_states [B, Hkv, T, D] and value_states [B, Hkv, T, Dv] behind what is there. It raises ValueError
        or TypeError for shapes and dtypes other than those that it holds, and leaves the layer as it was then."""
        dtype = self.held.dtype if self.held else torch.get_autocast_dtype("cpu")
        key_states, value_states = autocast(dtype, key_states, value_states)
        if not self._fit(key_states, value_states):
            self._check(key_states, value_states)
        before = self._left() or self._empty(key_states, value_states)
        held = before.with_room(key_states.shape[2])
        try:
            held.pages.update(by_token(key_states.detach()), by_token(value_states.detach()), held.slots(before.length))
        except (TypeError, ValueError) as e:
            raise _check.renamed(e, {"key": "key_states", "value": "value_states"}) from None
        self._hold(self._kept(held))
        keys, values = (partial(Pages, held, value=value) for value in (False, True))
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            return tuple(Inference.apply(make, key_states, value_states) for make in (keys, values))
        return (self.keys, self.values) if self.held is held else (keys(), values())

    def _fit(self, key_states: torch.Tensor, value_states: torch.Tensor) -> bool:
        """Says whether these are like what is held, which costs a step of one token a tenth of what :meth:`_check`
        does."""
        if self.held is None:
            return False
        rows, pages, dtype = len(self.held.table), self.held.pages, self.held.dtype
        expected, num_tokens = (rows, pages.num_kv_heads), key_states.shape[2:3]
        return all(
            type(x) is torch.Tensor and x.dtype == dtype and x.shape == (*expected, *num_tokens, size)
            for x, size in ((key_states, pages.head_size), (value_states, pages.head_size_v))
        )

    def _check(self, *states: torch.Tensor) -> None:
        dtypes: Sequence[str] = _check.FLOATS
        axes: tuple[int | None, ...] = (None, None, None)
        sizes: tuple[int | None, ...] = (None, None)
        if self.held:
            pages = self.held.pages
            dtypes, axes = [str(pages.dtype)], (len(self.held.table), pages.num_kv_heads, None)
            sizes = pages.head_size, pages.head_size_v
        for name, x, size in zip(("key_states", "value_states"), states, sizes, strict=True):
            expected = zip(("batch size", "num_kv_heads", "tokens", "head size"), (*axes, size), strict=True)
            found = _check.array(name, dense_rows(x.detach()), dtypes, list(expected))
            dtypes, axes = [str(found.dtype)], found.shape[:3]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        left = self._left()
        return (left.length + query_length, left.start) if left else (query_length, 0)

    def get_seq_length(self) -> int:
        return self.held.end if self.held else 0

    def get_max_length(self) -> int:
        return -1

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raises ValueError where there are not so many tokens, or keys are gone that would be in the window again."""
        if not self.held:
            return
        end = self.held.end
        if not -end <= tokens_to_remove <= 0:
            raise ValueError(f"tokens_to_remove: {tokens_to_remove} is outside {-end}..0")
        first = self._first(end + tokens_to_remove)
        if first < self.held.start:
            raise ValueError(
                f"tokens_to_remove: {tokens_to_remove}, but the window of {self.sliding_window} would then begin at "
                f"token {first}, and those before {self.held.start} are gone; after activate_past_recording() they stay"
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last ``-tokens_to_remove`` tokens."""
        self.check_crop(tokens_to_remove)
        self._select(slice(None), tokens_to_remove=tokens_to_remove)
        if self.held and self.record_past and self.sliding_window is not None:
            self._hold(self._shrunk(self.held.since(self._first(self.held.end)), self.sliding_window))

    def _select(self, rows: Any, name: str = "rows", tokens_to_remove: int = 0) -> None:
        """Keeps those rows of the batch, with the blocks that their tokens are in; ``rows`` is an index of a tensor."""
        if not self.held:
            return
        try:
            found = torch.from_numpy(np.arange(len(self.held.table)))[rows, ...]
        except (IndexError, TypeError) as e:
            raise type(e)(f"{name}: {e}") from None
        if found.dim() != 1:
            raise ValueError(f"{name}: {found.dim()} axes, expected 1")
        length = self.held.length + tokens_to_remove
        table = self.held.table[found.numpy(), : -(-length // self.block_size)]
        self._hold(replace(self.held, table=table, length=length))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._select(beam_idx, "beam_idx")

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.held:
            self._select(np.arange(len(self.held.table)).repeat(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._select(indices, "indices")


class StateLayer(private.LinearAttentionLayer):  # type: ignore[misc]
    """Holds the states of a layer of linear attention or of short convolutions, as transformers keeps them."""

    def can_crop(self) -> bool:
        """Says whether it can crop: convolutions can, of which earlier inputs were kept
        (``activate_past_recording``)."""
        return not any(self.has_previous_state.values()) or (self.record_past and self.is_croppable)

    def crop(self, tokens_to_remove: int) -> None:
        if any(self.has_previous_state.values()):
            super().crop(tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._change(lambda x: x[indices, ...])

    def _change(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for states in (self.conv_states, self.recurrent_states):
            states.update({i: change(x) for i, x in states.items() if x is not None})


class HybridLayer(StateLayer, PagedLayer):
    """Holds both, side by side (Falcon-H1, Zamba 2)."""

    is_compileable = False

    def __init__(self, block_size: int, number_of_states: int = 1, **options: Any) -> None:
        PagedLayer.__init__(self, block_size, **options)
        private.LinearAttentionLayer.__init__(self, number_of_states)

    def crop(self, tokens_to_remove: int) -> None:
        PagedLayer.crop(self, tokens_to_remove)
        StateLayer.crop(self, tokens_to_remove)

    def reset(self) -> None:
        PagedLayer.reset(self)
        StateLayer.reset(self)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        PagedLayer.reorder_cache(self, beam_idx)
        StateLayer.reorder_cache(self, beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        PagedLayer.batch_repeat_interleave(self, repeats)
        StateLayer.batch_repeat_interleave(self, repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        PagedLayer.batch_select_indices(self, indices)
        StateLayer.batch_select_indices(self, indices)


class Pages(ReadOnly):
    """Stands for keys [B, Hkv, S, D] or values [B, Hkv, S, Dv] of what a layer holds. Once the layer holds something
    else, whoever looks gets an error."""

    @staticmethod
    def __new__(cls, held: Held, *, value: bool) -> Pages:
        heads, size = held.pages.num_kv_heads, held.pages.head_size_v if value else held.pages.head_size
        pages: Pages = cls.without_memory((len(held.table), heads, held.length, size), held.dtype)
        pages.held, pages.value = held, value
        return pages

    def __init__(self, held: Held, *, value: bool) -> None:
        super().__init__()

    held: Held
    value: bool

    def dense(self) -> torch.Tensor:
        if not self.held.current:
            raise RuntimeError("PagedCache: keys or values of an earlier step, which the cache has since changed")
        return self.held.gather(self.value)


def is_held(key: torch.Tensor, value: torch.Tensor) -> TypeGuard[Pages]:
    """Says whether these are the keys and the values that one layer holds now."""
    if not (isinstance(key, Pages) and isinstance(value, Pages)):
        return False
    return key.held is value.held and key.held.current and not key.value and value.value
