# SPDX-License-Identifier: Apache-2.0
"""The cases whose queries and keys are rotated on their way: Case.rotary names what is done to them, "neox" or "gptj",
then "-partial" (half of the dimensions) and "-norm" (RMS norm of each head)."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import cpu_attn
from cpu_attn import reference

from .case import Case
from .formats import rotates

if TYPE_CHECKING:
    from .problem import Problem

EPS = 1e-5


@dataclass(frozen=True)
class Rotation:
    """cos_sin_cache in the case's dtype, weights in float32 or None."""

    cos_sin_cache: NDArray[Any]
    is_neox: bool
    q_weight: NDArray[np.float32] | None
    k_weight: NDArray[np.float32] | None

    @classmethod
    def of(cls, case: Case, dtype: np.dtype[Any]) -> Rotation:
        """cos and sin are multiples of 2**-8, exact in every dtype."""
        kind, size = str(case.rotary), case.head_size
        rot_dim = max(2, size // 4 * 2 if "partial" in kind else size // 2 * 2)
        turns = np.arange(max(case.seq_lens, default=0) + 1)[:, None] / 100.0 ** (np.arange(0, rot_dim, 2) / rot_dim)
        table = np.round(np.concatenate([np.cos(turns), np.sin(turns)], axis=1) * 256) / 256
        rng = np.random.default_rng([case.seed, zlib.crc32(case.name.encode()), 1])
        weights = rng.uniform(0.5, 2, (2, size)).astype(np.float32) if "norm" in kind else (None, None)
        return cls(table.astype(dtype), "neox" in kind, *weights)

    def apply(
        self, x: NDArray[Any], positions: NDArray[np.int64], weight: NDArray[np.float32] | None, dtype: Any = None
    ) -> NDArray[Any]:
        """By the oracle, rounded to dtype, that of x unless said."""
        with np.errstate(all="ignore"):
            rotated = reference.rotary(x, positions, self.cos_sin_cache, self.is_neox, weight, EPS)
            return rotated.astype(x.dtype if dtype is None else dtype)


def few_digits(keys: list[NDArray[Any]]) -> list[NDArray[Any]]:
    """Keys that float32 rotates exactly by cos and sin of 8 digits: in a quantised cache a last bit that differs from
    the oracle's may be a step of 2**-3."""
    return [np.round(k * 32) / 32 for k in keys]


def tokens_of(problem: Problem) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of all requests' keys, then of the queries that stand before the first key: the row of the query (-1: a token
    without one) and the position."""
    rows, positions, alone = [], [], []
    for start, q_len, seq_len in zip(
        problem.query_start_loc, np.diff(problem.query_start_loc), problem.seq_lens, strict=False
    ):
        own = np.arange(seq_len) - seq_len + q_len
        rows.append(np.where(own >= 0, start + own, -1))
        positions.append(np.arange(seq_len))
        alone.append(start + np.arange(max(0, q_len - seq_len)))
    before = np.concatenate([np.zeros(0, np.int64), *alone])
    return np.concatenate([*rows, before]), np.concatenate([*positions, np.zeros_like(before)])


def by_oracle(problem: Problem, rotation: Rotation) -> tuple[NDArray[Any], list[NDArray[Any]]]:
    """Queries and keys, by the oracle."""
    rows, positions = tokens_of(problem)
    query = problem.query.copy()
    asking = rows >= 0
    query[rows[asking]] = rotation.apply(query[rows[asking]], positions[asking], rotation.q_weight)
    unrounded = np.float32 if rotates(problem.case.kv_cache_rotation)[0] else None
    return query, [rotation.apply(k, np.arange(len(k)), rotation.k_weight, unrounded) for k in problem.key]


def write_rotated(
    problem: Problem, rotation: Rotation, which: NDArray[np.int64], tokens: tuple[Any, ...], query: Any, how: Any
) -> None:
    """tokens: arguments of reshape_and_cache, of the tokens `which` of tokens_of. Their queries go into `query`."""
    rows, positions = (x[which] for x in tokens_of(problem))
    key, value, key_cache, value_cache, slots = tokens
    out = np.full_like(problem.query, np.nan, shape=(len(which), *problem.query.shape[1:]))
    out[rows >= 0] = problem.query[rows[rows >= 0]]
    kwargs = {"q_weight": rotation.q_weight, "k_weight": rotation.k_weight, "eps": EPS, **how}
    given = (out, key, value, key_cache, value_cache, slots, positions, rotation.cos_sin_cache, rotation.is_neox)
    cpu_attn.rotary_reshape_and_cache(*given, **kwargs)
    query[rows[rows >= 0]] = out[rows >= 0]
