# SPDX-License-Identifier: Apache-2.0
"""Checks of the masks besides causal and window."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from cpu_attn._arrays import Array
from cpu_attn._check.arrays import array
from cpu_attn._check.values import INT32_MAX, integer, sequence


class Masks(NamedTuple):
    """Holds the masks of a step besides causal and window. spans is int32 [n, 3]: request, first key, last key.
    documents is int32 [m, 2]: request, first key. Both ascend."""

    spans: np.ndarray[Any, Any]
    documents: np.ndarray[Any, Any]
    tree: Array | None


def masks(
    num_reqs: int,
    mm_prefix_range: Any,
    document_start_loc: Any,
    tree_mask: Any,
) -> Masks | None:
    """Checks the masks that get_scheduler_metadata was given, and gives None where it was given none. plan/masks.c
    checks what depends on lengths."""
    if mm_prefix_range is None and document_start_loc is None and tree_mask is None:
        return None
    spans = _by_request("mm_prefix_range", mm_prefix_range, num_reqs, _spans)
    documents = _by_request("document_start_loc", document_start_loc, num_reqs, _documents)
    for r, found in spans.items():
        for (start, end), (border,) in product(found, documents.get(r, ())):
            if start < border <= end:
                raise ValueError(f"mm_prefix_range[{r}]: ({start}, {end}) crosses the start of a document, {border}")
    ranges = Masks(_flat(spans, 3), _flat(documents, 2), None)
    if tree_mask is None:
        return ranges
    for name, rows in (("mm_prefix_range", ranges.spans), ("document_start_loc", ranges.documents)):
        if rows.size:
            raise ValueError(f"tree_mask: does not go with {name}")
    return ranges._replace(tree=array("tree_mask", tree_mask, ["uint8"], [("T", None), ("W", None)]))


Ranges = list[tuple[int, ...]]


def _flat(found: dict[int, Ranges], width: int) -> np.ndarray[Any, Any]:
    return np.array([(r, *x) for r, some in found.items() for x in some], np.int32).reshape(-1, width)


def _by_request(name: str, x: Any, num_reqs: int, read: Callable[[str, Any], Ranges]) -> dict[int, Ranges]:
    """Reads a mapping by request, and gives it in ascending order."""
    if x is None:
        return {}
    if not isinstance(x, Mapping):
        raise TypeError(f"{name}: expected a mapping by request, got {type(x).__name__}")
    found: dict[int, Ranges] = {}
    for key, some in x.items():
        r = integer(f"{name}: request", key, 0, num_reqs - 1)
        if r in found:
            raise ValueError(f"{name}: request {r} is named twice")
        found[r] = read(f"{name}[{r}]", sequence(f"{name}[{r}]", some))
    return dict(sorted(found.items()))


def _spans(name: str, x: list[Any]) -> Ranges:
    """Reads pairs (start, end) whose end is inclusive, as in vLLM. They ascend and do not touch one another."""
    found: Ranges = []
    for i, pair in enumerate(x):
        ends = sequence(f"{name}[{i}]", pair)
        if len(ends) != 2:
            raise ValueError(f"{name}[{i}]: expected (start, end), got {len(ends)} values")
        start = integer(f"{name}[{i}][0]", ends[0], found[-1][1] + 1 if found else 0)
        found.append((start, integer(f"{name}[{i}][1]", ends[1], start)))
    return found


def _documents(name: str, x: list[Any]) -> Ranges:
    """Reads where documents start: the first at 0, and each later than the one before."""
    found: Ranges = []
    for i, start in enumerate(x):
        found.append((integer(f"{name}[{i}]", start, found[-1][0] + 1 if found else 0, INT32_MAX if found else 0),))
    if not found:
        raise ValueError(f"{name}: is empty, the first document starts at 0")
    return found
