# SPDX-License-Identifier: Apache-2.0
"""This module describes a step in vLLM's fields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from cpu_attn import _check
from cpu_attn._check import integers
from cpu_attn.backend.paged_attention import Array
from cpu_attn.plan import Plans, SchedulerMetadata, get_scheduler_metadata

NONE = np.zeros(0, np.int32)


class AttentionType(str, Enum):
    """Names what a layer attends to, as vLLM does. Plain strings of the same value do as well.

    Raises:
        ValueError: a name is none of the four.

    Example:
        >>> from cpu_attn import AttentionType
        >>> AttentionType("encoder_decoder").name
        'ENCODER_DECODER'
    """

    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


def attention_type(attn_type: Any) -> AttentionType:
    if isinstance(attn_type, str):  # anything else might compare with names as it likes
        for kind in AttentionType:
            if attn_type == kind.value:
                return kind
    raise ValueError(f"attn_type: {attn_type!r} is none of {', '.join(AttentionType)}")


class Part(NamedTuple):
    """Requests that one call serves. ``first`` is the row of their first query token. Where block_table is None it is
    also the row of their first key, since their K and V are then only in the arrays that forward was given."""

    first: int
    query_start_loc: Array
    seq_lens: Array
    block_table: Array | None

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + int(self.query_start_loc[-1]))


@dataclass(eq=False)
class CPUAttentionMetadata:
    """Holds the metadata of one step: P prefills first, then the decodes; R requests and T tokens in all.

    Lengths, tables and slots are lists or arrays of int32 or int64. The query tokens of a prefill are its last ones:
    where it has more keys than queries, that is chunked prefill or a cached prefix. An engine may advance the arrays in
    place and keep the metadata.

    Args:
        num_prefills: P.
        num_prefill_tokens: query tokens of the prefills.
        num_decode_tokens: query tokens of the decodes, one for each.
        slot_mapping: [T], the slot of each token's K and V, block * B + place in the block; negative: skipped.
        seq_lens: [R], keys of each request, the new ones among them.
        seq_lens_tensor: the same, of the decodes.
        max_decode_seq_len: the largest of those.
        block_tables: [R - P, M], of the decodes.
        chunked_prefill: whether a prefill has more keys than queries. Nothing depends on it.
        max_query_len: the largest number of query tokens of a request.
        max_kv_len: the largest number of keys of a prefill.
        prefill_query_start_loc: [P + 1], where each prefill's query tokens start; None: ``seq_lens``, whole prompts.
        kv_start_loc: [P + 1], the running sum of the prefills' keys; None: of ``seq_lens``.
        prefill_block_tables: [P, M]; None: whole prompts, attended as ``forward`` gets them.
        query_start_loc: [R + 1], where each request's query tokens start; counts where it is given.
        encoder_seq_lens: [R], keys of each request in cross attention; in an encoder the tokens of each text.
        encoder_seq_lens_tensor: the same as an array.
        max_encoder_seq_len: the largest of those.
        num_encoder_tokens: their sum.
        cross_slot_mapping: slots for the K and V that cross attention is given, those of the new requests.
        cross_block_tables: [R, M].
        causal: False: decoder attention sees the whole request.

    Raises:
        ValueError: one of the three counts is negative. A layer looks at all else.
        TypeError: one of the three counts is no integer.

    Example:
        >>> from cpu_attn import CPUAttentionMetadata
        >>> step = CPUAttentionMetadata(
        ...     num_prefills=1, num_prefill_tokens=3, num_decode_tokens=1, slot_mapping=[0, 1, 2, 24],
        ...     seq_lens=[3, 9], seq_lens_tensor=[9], block_tables=[[1]], prefill_block_tables=[[0]])
        >>> step.get_seq_lens("decoder")
        ([3, 9], [3, 9])
    """

    num_prefills: int
    num_prefill_tokens: int
    num_decode_tokens: int
    slot_mapping: Any = None
    seq_lens: Sequence[int] | None = None
    seq_lens_tensor: Any = None
    max_decode_seq_len: int = 0
    block_tables: Any = None
    chunked_prefill: bool = False
    max_query_len: int | None = None
    max_kv_len: int | None = None
    prefill_query_start_loc: Any = None
    kv_start_loc: Any = None
    prefill_block_tables: Any = None
    query_start_loc: Any = None
    encoder_seq_lens: Sequence[int] | None = None
    encoder_seq_lens_tensor: Any = None
    max_encoder_seq_len: int | None = None
    num_encoder_tokens: int | None = None
    cross_slot_mapping: Any = None
    cross_block_tables: Any = None
    causal: bool = True
    attn_bias: list[Any] | None = field(default=None, init=False, repr=False)
    encoder_attn_bias: list[Any] | None = field(default=None, init=False, repr=False)
    cross_attn_bias: list[Any] | None = field(default=None, init=False, repr=False)
    _plans: Plans = field(default_factory=Plans, init=False, repr=False)  # (lengths, table, plan) of each kind

    def __post_init__(self) -> None:
        for name in ("num_prefills", "num_prefill_tokens", "num_decode_tokens"):
            _check.integer(name, getattr(self, name), 0)

    @property
    def is_all_encoder_attn_metadata_set(self) -> bool:
        """Says whether encoder attention has ``encoder_seq_lens``, its array and its maximum, which it needs."""
        fields = (self.encoder_seq_lens, self.encoder_seq_lens_tensor, self.max_encoder_seq_len)
        return all(x is not None for x in fields)

    @property
    def is_all_cross_attn_metadata_set(self) -> bool:
        """Says whether cross attention has all that it needs, which is what encoder attention needs, its slots and its
        block tables."""
        return (
            self.is_all_encoder_attn_metadata_set
            and self.cross_slot_mapping is not None
            and self.cross_block_tables is not None
        )

    @property
    def prefill_metadata(self) -> CPUAttentionMetadata | None:
        """Gives this object where there are prefills, else None."""
        return self if self.num_prefill_tokens else None

    @property
    def decode_metadata(self) -> CPUAttentionMetadata | None:
        """Gives this object where there are decodes, else None."""
        return self if self.num_decode_tokens else None

    def get_seq_lens(self, attn_type: str) -> tuple[Any, Any]:
        """Gives the lengths of queries and of keys: ``seq_lens`` or ``encoder_seq_lens``.

        Args:
            attn_type: a name of :class:`AttentionType`.

        Raises:
            ValueError: the name is unknown.
        """
        kind = attention_type(attn_type)
        queries = self.encoder_seq_lens if kind is AttentionType.ENCODER else self.seq_lens
        of_encoder = kind in (AttentionType.ENCODER, AttentionType.ENCODER_DECODER)
        return queries, self.encoder_seq_lens if of_encoder else self.seq_lens

    def get_seq_len_block_table_args(self, attn_type: str) -> tuple[Any, int | None, Any]:
        """Gives (lengths of keys, the largest, block tables) of the decodes, of the encoder or of cross attention.

        Args:
            attn_type: a name of :class:`AttentionType`. An encoder has no block tables.

        Raises:
            ValueError: the name is unknown.
        """
        kind = attention_type(attn_type)
        if kind is AttentionType.ENCODER:
            return self.encoder_seq_lens_tensor, self.max_encoder_seq_len, None
        if kind is AttentionType.ENCODER_DECODER:
            return self.encoder_seq_lens_tensor, self.max_encoder_seq_len, self.cross_block_tables
        return self.seq_lens_tensor, self.max_decode_seq_len, self.block_tables

    def get_attn_bias(self, attn_type: str) -> list[Any] | None:
        """Gives the dense biases that an engine keeps here for itself. A layer refuses to run while there are any.

        Args:
            attn_type: a name of :class:`AttentionType`.

        Raises:
            ValueError: the name is unknown.
        """
        bias: list[Any] | None = getattr(self, self._bias_name(attn_type))
        return bias

    def set_attn_bias(self, attn_bias: list[Any] | None, attn_type: str) -> None:
        """Keeps dense biases for :meth:`get_attn_bias`.

        Args:
            attn_bias: the biases, or None.
            attn_type: a name of :class:`AttentionType`.

        Raises:
            ValueError: the name is unknown.
        """
        setattr(self, self._bias_name(attn_type), attn_bias)

    @staticmethod
    def _bias_name(attn_type: str) -> str:
        kind = attention_type(attn_type)
        names = {AttentionType.ENCODER: "encoder_attn_bias", AttentionType.ENCODER_DECODER: "cross_attn_bias"}
        return names.get(kind, "attn_bias")

    # ---- what the calls need, derived anew for every layer: arrays updated in place are never stale ----

    @property
    def _num_tokens(self) -> int:
        return self.num_prefill_tokens + self.num_decode_tokens

    def _query_starts(self) -> Array:
        """Gives query_start_loc [R + 1] of prefills and decodes."""
        prefills = self.num_prefills
        if self.query_start_loc is not None:
            name, starts = "query_start_loc", integers("query_start_loc", self.query_start_loc)
        else:
            if self.prefill_query_start_loc is not None:
                name = "prefill_query_start_loc"
                starts = integers(name, self.prefill_query_start_loc)
            else:
                name = "seq_lens"
                whole = integers(name, _needed(name, self.seq_lens))[:prefills] if prefills else NONE
                starts = integers(name, running_sum(whole))
            ones = np.arange(1, self.num_decode_tokens + 1, dtype=np.int32)
            starts = np.concatenate([starts, self.num_prefill_tokens + ones])
        if len(starts) <= prefills:
            raise ValueError(f"{name}: says of {len(starts) - 1} requests, num_prefills is {prefills}")
        for what, at, expected in (
            ("num_prefill_tokens", prefills, self.num_prefill_tokens),
            ("num_prefill_tokens + num_decode_tokens", -1, self._num_tokens),
        ):
            if starts[at] != expected:
                raise ValueError(f"{what}: {expected}, {name} says {starts[at]}")
        return starts

    def _decoder_parts(self) -> list[Part]:
        """Gives one part, or two where the prefills have no block tables: one for them and one for the decodes."""
        starts, prefills = self._query_starts(), self.num_prefills
        decodes, parts = len(starts) - 1 - prefills, []
        if prefills:
            lens = self._prefill_lens()
            _same_number("prefills' lengths", len(lens), prefills)
            table = _table("prefill_block_tables", self.prefill_block_tables, lens)
            parts.append(Part(0, starts[: prefills + 1], lens, table))
        if decodes:
            lens = self._decode_lens()
            _same_number("decodes' lengths", len(lens), decodes)
            own_starts = starts[prefills:] - starts[prefills] if prefills else starts
            parts.append(
                Part(self.num_prefill_tokens, own_starts, lens, _table("block_tables", self.block_tables, lens))
            )
        tables = [part.block_table for part in parts if part.block_table is not None]
        if len(tables) < 2:
            return parts
        return [Part(0, starts, np.concatenate([part.seq_lens for part in parts]), _stacked(*tables))]

    def _prefill_lens(self) -> Array:
        if self.kv_start_loc is not None:
            return integers("kv_start_loc", np.diff(integers("kv_start_loc", self.kv_start_loc, np.int64)))
        return integers("seq_lens", _needed("seq_lens", self.seq_lens))[: self.num_prefills]

    def _decode_lens(self) -> Array:
        if self.seq_lens_tensor is not None:
            return integers("seq_lens_tensor", self.seq_lens_tensor)
        return integers("seq_lens", _needed("seq_lens", self.seq_lens))[self.num_prefills :]

    def _encoder_part(self) -> Part:
        self._require_encoder("encoder")
        lens = integers("encoder_seq_lens_tensor", self.encoder_seq_lens_tensor)
        starts = integers("encoder_seq_lens_tensor", running_sum(lens))
        if self.num_encoder_tokens is not None and self.num_encoder_tokens != starts[-1]:
            raise ValueError(
                f"num_encoder_tokens: {self.num_encoder_tokens}, encoder_seq_lens_tensor says {starts[-1]}"
            )
        return Part(0, starts, lens, None)

    def _cross_part(self) -> Part:
        self._require_encoder("cross")
        starts = self._query_starts()
        lens = integers("encoder_seq_lens_tensor", self.encoder_seq_lens_tensor)
        _same_number("encoder_seq_lens_tensor", len(lens), len(starts) - 1)
        return Part(0, starts, lens, _table("cross_block_tables", self.cross_block_tables, lens))

    def _require_encoder(self, kind: str) -> None:
        if not getattr(self, f"is_all_{kind}_attn_metadata_set"):
            names = ["encoder_seq_lens", "encoder_seq_lens_tensor", "max_encoder_seq_len"]
            names += ["cross_slot_mapping", "cross_block_tables"] if kind == "cross" else []
            missing = [name for name in names if getattr(self, name) is None]
            raise ValueError(f"attn_metadata: {kind} attention needs {', '.join(missing)}")

    def _plan(self, part: Part, kind: AttentionType, block_size: int | None = None, **shape: Any) -> SchedulerMetadata:
        """Gives the plan for some requests of this step. The first layer of a shape makes it, and the others find it as
        long as the lengths are the same and, where requests share blocks, the tables, too."""
        key = (part.first, kind, block_size, *shape.values())
        lengths = part.query_start_loc.tobytes() + part.seq_lens.tobytes()
        known = self._plans.get(key)
        table = None if block_size is None else part.block_table
        if known is None or known[0] != lengths or _other_table(known[1], table):
            plan = get_scheduler_metadata(
                len(part.seq_lens),
                seq_lens=part.seq_lens,
                query_start_loc=part.query_start_loc,
                block_table=table,
                block_size=block_size,
                **shape,
            )
            kept = table.copy() if table is not None and plan.num_shared else None
            known = self._plans[key] = (lengths, kept, plan)
        found: SchedulerMetadata = known[2]
        return found


def _needed(name: str, x: Any) -> Any:
    if x is None:
        raise ValueError(f"{name}: is None, this step needs it")
    return x


def _same_number(name: str, number: int, expected: int) -> None:
    if number != expected:
        raise ValueError(f"{name}: {number} requests, expected {expected}")


def running_sum(lens: Array) -> Array:
    return np.concatenate([[0], np.cumsum(lens, dtype=np.int64)])


def _table(name: str, x: Any, lens: Array) -> Array | None:
    """Gives the block table of requests with so many keys; None where there is no table although they have keys."""
    if x is None or (table := integers(name, x, ndim=None)).size == 0:
        return None if lens.any() else np.zeros((len(lens), 0), np.int32)
    if len(lens) and (table.ndim != 2 or len(table) != len(lens)):
        raise ValueError(f"{name}: shape {table.shape}, expected [{len(lens)}, blocks]")
    return table[: len(lens)]


def _stacked(first: Array, second: Array) -> Array:
    """Puts one table under the other. The entries that the narrower one lacks name no block."""
    table = np.full((len(first) + len(second), max(first.shape[1], second.shape[1])), -1, np.int32)
    table[: len(first), : first.shape[1]] = first
    table[len(first) :, : second.shape[1]] = second
    return table


def _other_table(then: Any, now: Any) -> bool:
    """Says whether this is not the table whose shared blocks a plan was made for. None stands for no table."""
    return then is not None and (now is None or not np.array_equal(then, now))
