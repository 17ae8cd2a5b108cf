# SPDX-License-Identifier: Apache-2.0
"""Checks of what a step is made from: requests and their tokens."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from cpu_attn._check.arrays import integers
from cpu_attn._check.values import INT32_MAX, integer, sequence

Array = np.ndarray[Any, Any]


def tokens(name: str, x: Any) -> Array:
    """Gives token ids as int64 [n]."""
    return integers(name, x, np.int64)


def batch(name: str, x: Any, ids: bool) -> tuple[tuple[Hashable, ...], Array, Array | None]:
    """Reads (request, tokens) pairs: the requests, how many tokens each has (int64 [R]) and, where ``ids`` is set, all
    token ids (int64 [T]), else None. Where it is not set, a number of tokens may stand for the ids; ids that are given
    are checked all the same."""
    pairs = sequence(name, x)
    try:
        requests, given = zip(*pairs, strict=True) if pairs else ((), ())
    except (TypeError, ValueError):
        wrong = next(i for i, pair in enumerate(pairs) if len(sequence(f"{name}[{i}]", pair)) != 2)
        raise ValueError(f"{name}[{wrong}]: expected (request, tokens), got {pairs[wrong]!r}") from None
    try:
        counts = np.fromiter(map(len, given), np.int64, len(given))
        found = _joined(given)
    except (TypeError, ValueError):  # one of them is a number of tokens, or is wrong and has to be named
        each = [_tokens(f"{name}[{i}][1]", t, ids) for i, t in enumerate(given)]
        counts = np.array([t if isinstance(t, int) else len(t) for t in each], np.int64)
        found = np.concatenate([np.zeros(0, np.int64), *each]) if ids else np.zeros(0, np.int64)
    if counts.sum() > INT32_MAX:
        raise ValueError(f"{name}: {counts.sum()} tokens, expected at most {INT32_MAX}")
    return requests, counts, found if ids else None


def _joined(given: Sequence[Any]) -> Array:
    if set(map(type, given)) <= {list}:  # one array for all of them takes a tenth of the time of one for each
        return tokens("", list(chain.from_iterable(given)))
    return np.concatenate([tokens("", t) for t in given])


def _tokens(name: str, x: Any, ids: bool) -> Any:
    if hasattr(x, "__len__"):
        return tokens(name, x)
    if ids:
        raise TypeError(f"{name}: expected token ids, got {x!r}")
    return integer(name, x, 0)


def continuation(name: str, given: Array, prompt: Array, there: int) -> None:
    """Checks that ``given`` goes on with ``prompt``, ``there`` tokens of which are in blocks already. Tokens past the
    end of the prompt are free."""
    rest = prompt[there : there + len(given)]
    for i in np.flatnonzero(given[: len(rest)] != rest)[:1]:
        raise ValueError(
            f"{name}[{i}]: id {given[i]}, expected {rest[i]}: {there} of the {len(prompt)} tokens given to allocate "
            f"are there already, a step takes those from tokens[{there}] on"
        )
    if there and len(given) >= len(prompt) and (given[: len(prompt)] == prompt).all():
        raise ValueError(
            f"{name}: all {len(prompt)} tokens given to allocate, expected those from tokens[{there}] on: {there} are "
            "there already"
        )
