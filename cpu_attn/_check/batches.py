# SPDX-License-Identifier: Apache-2.0
"""Checks of what a step is made from: requests and their tokens."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from cpu_attn._arrays import numpy_view, view
from cpu_attn._check.arrays import integers, writable
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
    except MemoryError:
        raise
    except Exception:
        wrong = next(i for i, pair in enumerate(pairs) if len(sequence(f"{name}[{i}]", pair)) != 2)
        raise ValueError(f"{name}[{wrong}]: expected (request, tokens), got {pairs[wrong]!r}") from None
    try:
        counts = np.fromiter(map(len, given), np.int64, len(given))
        found = _joined(given)
    except MemoryError:
        raise
    except Exception:  # one of them is a number of tokens, or is wrong and has to be named
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


def state_arrays(name: str, x: Any) -> tuple[Array, ...]:
    """Reads arrays of states, [num_slots, ...] each, as NumPy arrays of the same memory."""
    found: list[Array] = []
    for i, given in enumerate(sequence(name, x)):
        here = f"{name}[{i}]"
        a = writable(here, view(here, given))
        if not a.shape:
            raise ValueError(f"{here}: 0 axes, expected at least 1")
        slots = len(found[0]) if found else a.shape[0]
        if a.shape[0] != slots or not slots:
            raise ValueError(f"{here}: {a.shape[0]} slots, expected {slots if found else 'at least 1'}")
        found.append(numpy_view(here, given))
    return tuple(found)


def draft_tokens(name: str, x: Any, counts: Array) -> Array:
    """Reads how many of its ``counts`` tokens each request may have to take back, int64 [R]."""
    if x is None:
        return np.zeros_like(counts)
    found = integers(name, x, np.int64)
    if len(found) != len(counts):
        raise ValueError(f"{name}: {len(found)} numbers, expected {len(counts)}, one for each request of the batch")
    for i in np.flatnonzero((found < 0) | (found > counts))[:1]:
        raise ValueError(f"{name}[{i}]: {found[i]} is outside 0..{counts[i]}")
    return found


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
