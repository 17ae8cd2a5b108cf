# SPDX-License-Identifier: Apache-2.0
"""A case's arrays, and what the oracle makes of them: Problem."""

from __future__ import annotations

import dataclasses
import zlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpu_attn import reference

from .case import Case, ranges
from .fills import FILLS
from .formats import SCALES, hadamard, integers, kinds_of, numpy_dtype, quantised, rotates
from .rotation import Rotation, by_oracle, few_digits


@dataclass
class Problem:
    """A case's arrays: query [T, Hq, D], key and value a list of [seq_len, Hkv, D or Dv] in the case's dtype, as they
    are written to the cache.
    unspecified [T, Hq]: rows that may come out as anything (their query is infinite, or what a bias alone hides is not
    finite)."""

    case: Case
    query: NDArray[Any]
    key: list[NDArray[Any]]
    value: list[NDArray[Any]]
    query_start_loc: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    block_table: NDArray[np.int32]
    num_blocks: int
    scale: float
    alibi_slopes: NDArray[np.float32] | None
    s_aux: NDArray[np.float32] | None
    dynamic_causal: NDArray[np.int32] | None
    unspecified: NDArray[np.bool_]
    selected_blocks: NDArray[np.int32] | None = None
    attn_bias: NDArray[np.float32] | None = None
    selected_tokens: NDArray[np.int32] | None = None

    @property
    def scales(self) -> tuple[float, float]:
        """k_scale and v_scale."""
        kinds = kinds_of(self.case.kv_cache_dtype)
        k_scale, v_scale = (s if kind.startswith("fp8") else 1.0 for s, kind in zip(SCALES, kinds, strict=True))
        return k_scale, k_scale if self.case.latent else v_scale

    def _stored(self, rows: list[NDArray[Any]], kind: str, scale: float, rotated: bool) -> list[NDArray[Any]]:
        """What the cache holds, times its scale, and turned back where it is rotated."""
        if rotated:
            rows = [hadamard(x.astype(np.float32)) for x in rows]
        if kind.startswith("int"):
            rows = [integers(x, kind) for x in rows]
        elif kind.startswith("fp8"):
            rows = [quantised(x, kind, scale).astype(np.float64) * scale for x in rows]
        else:
            with np.errstate(over="ignore"):
                rows = [x.astype(self.query.dtype) for x in rows]
        return [hadamard(x.astype(np.float64), back=True) for x in rows] if rotated else rows

    @cached_property
    def rotation(self) -> Rotation | None:
        return None if self.case.rotary is None else Rotation.of(self.case, self.query.dtype)

    @cached_property
    def rotated(self) -> tuple[NDArray[Any], list[NDArray[Any]]]:
        """Queries and keys as they meet, and keys as the cache is to hold them."""
        return (self.query, self.key) if self.rotation is None else by_oracle(self, self.rotation)

    @cached_property
    def empty(self) -> NDArray[np.bool_]:
        """[T, Hq]: rows that see nothing."""
        rows = [~self.case.sees(r).any(axis=2) for r in range(len(self.seq_lens))]
        none = np.zeros((0, self.case.selecting_heads), np.bool_)
        return np.concatenate([none, *rows]).repeat(self.case.num_heads // self.case.selecting_heads, axis=1)

    @cached_property
    def expected(self) -> tuple[reference.Float64, reference.Float64]:
        """The float64 oracle's output [T, Hq, Dv] and lse [Hq, T]."""
        query, key = self.rotated
        k_kind, v_kind = kinds_of(self.case.kv_cache_dtype)
        k_rotated, v_rotated = rotates(self.case.kv_cache_rotation)
        if k_rotated:
            with np.errstate(over="ignore"):
                met = hadamard(query.astype(np.float32)).astype(query.dtype)
            query = hadamard(met.astype(np.float64), back=True)
        return reference.attention(
            query,
            self._stored(key, k_kind, self.scales[0], k_rotated),
            self._stored(self.value, v_kind, self.scales[1], v_rotated),
            self.query_start_loc,
            self.seq_lens,
            self.scale,
            self.case.causal,
            self.alibi_slopes,
            self.case.sliding_window,
            self.case.softcap,
            self.s_aux,
            self.dynamic_causal,
            **self.case.masks,
            selected_blocks=self.selected_blocks,
            block_size=self.case.block_size,
            attn_bias=self.attn_bias,
            selected_tokens=self.selected_tokens,
            query_block_size=self.case.query_block,
        )


def _sinks(rng: np.random.Generator, case: Case) -> NDArray[np.float32] | None:
    if case.sinks is None:
        return None
    sinks = rng.standard_normal(case.num_heads).astype(np.float32) * 2
    if case.sinks == "huge":
        sinks[:] = 1e6
    elif case.sinks == "absent":
        sinks[:] = -np.inf
    elif case.sinks == "mixed":
        sinks[::3], sinks[1::3] = -np.inf, 1e6
    return sinks


def _block_table(rng: np.random.Generator, case: Case) -> tuple[NDArray[np.int32], int]:
    """Blocks in random order, some owned by nobody; entries past the needed ones are out of every range."""
    needed = [-(-s // case.block_size) for s in case.seq_lens]
    num_blocks = sum(needed) + 3
    table = rng.choice(np.array([-1, -(2**31), 2**31 - 1, num_blocks]), (len(needed), max(needed, default=0) + 2))
    table = table.astype(np.int32)
    order = rng.permutation(num_blocks)
    for r, (first, last) in enumerate(ranges(needed)):
        table[r, : last - first] = order[first:last]
    for r, (source, blocks) in enumerate(case.shared):
        table[r, :blocks] = table[source, :blocks]
    return table, num_blocks


def _selected_blocks(case: Case) -> NDArray[np.int32] | None:
    """[lists, selecting_heads, S], S what the longest list needs, or by the name one more."""
    if case.selected is None:
        return None
    lists = [[np.flatnonzero(head) for head in own] for r in range(len(case.seq_lens)) for own in case.chosen(r)]
    longest = max((len(blocks) for heads in lists for blocks in heads), default=0)
    selected = np.full((len(lists), case.selecting_heads, longest + zlib.crc32(case.name.encode()) % 2), -1, np.int32)
    for own, heads in zip(selected, lists, strict=True):
        for row, blocks in zip(own, heads, strict=True):
            row[: len(blocks)] = blocks
    return selected


def _selected_tokens(case: Case) -> NDArray[np.int32] | None:
    """[T, S], S what the longest list needs, or by the name one more."""
    if case.selected_tokens is None:
        return None
    lists = [np.flatnonzero(row) for r in range(len(case.seq_lens)) for row in case.picked(r)]
    longest = max(map(len, lists), default=0)
    selected = np.full((len(lists), longest + zlib.crc32(case.name.encode()) % 2), -1, np.int32)
    for row, keys in zip(selected, lists, strict=True):
        row[: len(keys)] = keys
    return selected


def _share(case: Case, rows: list[NDArray[Any]]) -> None:
    """Keys or values of blocks that a request shares are those of the request that has them first."""
    for r, (source, blocks) in enumerate(case.shared):
        n = min(blocks * case.block_size, len(rows[r]), len(rows[source]))
        rows[r][:n] = rows[source][:n]


def _attn_bias(case: Case) -> NDArray[np.float32] | None:
    """NaN wherever nobody may look: past the queries and the keys of a request, and at what a token does not see."""
    if case.bias is None:
        return None
    rng = np.random.default_rng([case.seed, zlib.crc32(case.name.encode()), 1])
    each = case.bias in ("heads", "holes")
    heads = case.num_heads if case.bias in ("heads", "batch") else 1
    queries, keys = max(case.query_lens, default=0) + 1, max(case.seq_lens, default=0) + 2
    bias: NDArray[np.float32]
    bias = rng.standard_normal((len(case.seq_lens) if each else 1, heads, queries, keys), np.float32) * 2
    seen = np.zeros((len(case.seq_lens), queries, keys), np.bool_)
    for r, (q_len, seq_len) in enumerate(zip(case.query_lens, case.seq_lens, strict=True)):
        seen[r, :q_len, :seq_len] = case.mask(r) & case.picked(r)
    if case.bias == "holes":
        bias[rng.random(bias.shape) < 0.3] = -np.inf
        bias[:, :, queries // 2] = -np.inf
    shown: NDArray[np.bool_] = seen if each else np.asarray(seen.any(axis=0, keepdims=True))
    return np.where(shown[:, None], bias, np.float32(np.nan))


def _hides_what_is_not_finite(
    case: Case, bias: NDArray[np.float32] | None, key: list[NDArray[Any]], value: list[NDArray[Any]]
) -> NDArray[np.bool_]:
    """[T, Hq]: is a key or value not finite that only a bias hides?"""
    found = []
    for r, q_len in enumerate(case.query_lens):
        bad = ~(
            np.isfinite(key[r].astype(np.float32)).all(axis=2) & np.isfinite(value[r].astype(np.float32)).all(axis=2)
        )
        bad = np.repeat(bad.T, case.num_heads // case.num_kv_heads, axis=0)[:, None]
        hidden = np.zeros((case.num_heads, q_len, case.seq_lens[r]), np.bool_)
        if bias is not None:
            hidden |= np.isneginf(_of_request(bias, r)[0, :, :q_len, : case.seq_lens[r]])
        found.append((hidden & bad & case.mask(r)).any(axis=2).T)
    return np.concatenate(found) if found else np.zeros((0, case.num_heads), np.bool_)


def build(case: Case) -> Problem:
    """A case's arrays."""
    rng = np.random.default_rng([case.seed, zlib.crc32(case.name.encode())])
    query, key, value, scale = FILLS[case.fill](rng, case)
    if case.latent:
        value = [k[..., : case.value_size] for k in key]
    if case.rotary and case.kv_cache_dtype != "auto":
        key = few_digits(key)
    table, num_blocks = _block_table(rng, case)
    _share(case, key)
    _share(case, value)
    dtype = numpy_dtype(case.dtype)
    slopes = case.alibi * 2.0 ** (-8 * np.arange(case.num_heads) / case.num_heads)
    start = np.concatenate([[0], np.cumsum(case.query_lens)]).astype(np.int32)
    bias = _attn_bias(case)
    return Problem(
        case=case,
        query=query.astype(dtype),
        key=[k.astype(dtype) for k in key],
        value=[v.astype(dtype) for v in value],
        query_start_loc=start,
        seq_lens=np.array(case.seq_lens, np.int32),
        block_table=table,
        num_blocks=num_blocks,
        scale=scale,
        alibi_slopes=slopes.astype(np.float32) if case.alibi else None,
        s_aux=_sinks(rng, case),
        dynamic_causal=None if case.dynamic_causal is None else np.array(case.dynamic_causal, np.int32),
        unspecified=np.isinf(query).any(axis=2) | _hides_what_is_not_finite(case, bias, key, value),
        selected_blocks=_selected_blocks(case),
        attn_bias=bias,
        selected_tokens=_selected_tokens(case),
    )


def _of_request(bias: NDArray[np.float32], r: int) -> NDArray[np.float32]:
    return bias if len(bias) == 1 else bias[r : r + 1]


def alone(problem: Problem, r: int) -> Problem:
    """Request r of a problem, in the same cache and blocks, with nobody beside it."""
    case, loc = problem.case, problem.query_start_loc
    pick, rows = slice(r, r + 1), slice(int(loc[r]), int(loc[r + 1]))
    flags = None if case.dynamic_causal is None else case.dynamic_causal[pick]
    lists = slice(sum(map(case.lists, range(r))), sum(map(case.lists, range(r + 1))))
    return dataclasses.replace(
        problem,
        case=dataclasses.replace(
            case,
            query_lens=case.query_lens[pick],
            seq_lens=case.seq_lens[pick],
            dynamic_causal=flags,
            mm_prefix_range=case.mm_prefix_range and case.mm_prefix_range[pick],
            document_start_loc=case.document_start_loc and case.document_start_loc[pick],
            shared=(),
        ),
        query=problem.query[rows],
        key=problem.key[pick],
        value=problem.value[pick],
        query_start_loc=loc[r : r + 2] - loc[r],
        seq_lens=problem.seq_lens[pick],
        block_table=problem.block_table[pick],
        dynamic_causal=None if problem.dynamic_causal is None else problem.dynamic_causal[pick],
        unspecified=problem.unspecified[rows],
        selected_blocks=None if problem.selected_blocks is None else problem.selected_blocks[lists],
        attn_bias=None if problem.attn_bias is None else _of_request(problem.attn_bias, r),
        selected_tokens=None if problem.selected_tokens is None else problem.selected_tokens[rows],
    )
