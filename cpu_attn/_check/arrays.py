# SPDX-License-Identifier: Apache-2.0
"""Checks of any array: its dtype, its shape, its strides, and the memory that it shares."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np

from cpu_attn._arrays import Array, address, describe, numpy_view, view
from cpu_attn._check.faults import misfit, new_fault
from cpu_attn._dtypes import CODES, DTYPES
from cpu_attn._native import ffi, lib

FLOATS = ("float32", "float16", "bfloat16")


def array(name: str, x: Any, dtypes: Sequence[str], axes: Sequence[tuple[str, int | None]]) -> Array:
    """Gives ``x`` as memory of one of the dtypes. Its shape is ``axes`` = (name, size, or None for any size), and its
    last axis is dense."""
    a, fault, expected = view(name, x, dtypes), new_fault(), 0
    for kind in dtypes:
        expected |= 1 << CODES[kind][0]
    sizes = [-1 if size is None else size for _, size in axes]
    if lib.ca_check_array(describe(a), expected, len(sizes), sizes, fault):
        raise misfit(fault, name, a, dtypes, [what for what, _ in axes])
    return a


def with_one_head(
    name: str, x: Any, dtypes: Sequence[str], axes: Sequence[tuple[str, int | None]]
) -> np.ndarray[Any, Any]:
    """Gives ``x`` as a NumPy view with one more axis, that of its one kv head, before the last."""
    memory = array(name, x, dtypes, axes)
    found = x if isinstance(x, np.ndarray) else memory.numpy().view(DTYPES[memory.dtype])
    return found[..., None, :]


def length(name: str, x: Any, axis: int = 0) -> int:
    """Gives the size of an axis. native/check refuses an array that has no such axis, so it counts as 0 here."""
    found = numpy_view(name, x)
    return int(found.shape[axis]) if found.ndim > axis else 0


def listed(name: str, x: Sequence[Any], dtype: Any = None) -> np.ndarray[Any, Any]:
    """Gives a list of numbers, or of such lists, as an array."""
    try:
        return np.asarray(x, dtype)
    except MemoryError:
        raise
    except Exception as e:
        raise ValueError(f"{name}: {e}") from None


def integers(name: str, x: Any, dtype: Any = np.int32, ndim: int | None = 1) -> np.ndarray[Any, Any]:
    """Gives ``x``, a sequence or an array of int32 or int64, as ``dtype``. A number that does not fit is clipped, and
    so stays outside every range that a caller checks."""
    if isinstance(x, (list, tuple, range)):
        a = listed(name, x) if len(x) else np.zeros(0, np.int64)
    else:
        a = numpy_view(name, x, ("int32", "int64"))
    if a.dtype.kind != "i":
        raise TypeError(f"{name}: dtype {a.dtype}, expected int32 or int64")
    if ndim not in (None, a.ndim):
        raise ValueError(f"{name}: {a.ndim} axes, expected {ndim}")
    if a.dtype == dtype:
        return a
    bounds = np.iinfo(dtype)
    clipped: np.ndarray[Any, Any] = np.clip(a, bounds.min, bounds.max).astype(dtype)
    return clipped


def rising(name: str, starts: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Checks where requests start: the first at 0, and none before the one ahead of it."""
    if not len(starts):
        raise ValueError(f"{name}: is empty, expected 0 first")
    if starts[0] != 0:
        raise ValueError(f"{name}[0]: {starts[0]}, expected 0")
    for i in np.flatnonzero(starts[1:] < starts[:-1])[:1] + 1:
        raise ValueError(f"{name}[{i}]: {starts[i]}, expected at least {starts[i - 1]}")
    return starts


def slots(name: str, x: Any, bound: int) -> None:
    """Checks int64 slots of a cache that goes on behind those that may be written to; a negative one is skipped. What
    else slots are, native code checks."""
    a = numpy_view(name, x, ("int64",))
    for i in np.argwhere(a >= bound)[:1]:
        at = ", ".join(map(str, i))
        raise ValueError(f"{name}[{at}]: {a[tuple(i)]}, expected less than num_blocks * block_size = {bound}")


def moves(
    name: str, x: Any, num_sources: int, num_destinations: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Reads sources and destinations from {source: destination or [destinations]}, from pairs or from [n, 2]. Both are
    copies and in range, and no destination comes twice."""
    if isinstance(x, Mapping):
        x = [(s, d) for s, to in x.items() for d in (to if getattr(to, "ndim", isinstance(to, Iterable)) else [to])]
    pairs = integers(name, list(x) if isinstance(x, (Iterator, Set)) else x, np.int64, None).copy()
    if pairs.size == 0:
        pairs = pairs.reshape(0, 2)
    if pairs.ndim != 2 or pairs.shape[1] != 2:
        raise ValueError(f"{name}: shape {pairs.shape}, expected [n, 2]: (source, destination)")
    for column, num_blocks in enumerate((num_sources, num_destinations)):
        wrong = np.flatnonzero((pairs[:, column] < 0) | (pairs[:, column] >= num_blocks))
        if wrong.size:
            i = wrong[0]
            raise ValueError(f"{name}[{i}][{column}]: block {pairs[i, column]} is outside 0..{num_blocks - 1}")
    blocks, counts = np.unique(pairs[:, 1], return_counts=True)
    if (counts > 1).any():
        raise ValueError(f"{name}: destination {blocks[counts > 1][0]} is named twice")
    return pairs[:, 0], pairs[:, 1]


def small_floats(name: str, x: Any, dtypes: Sequence[str], num_heads: int) -> np.ndarray[Any, Any] | None:
    """Gives a float32 copy of an array that has one number for each query head."""
    if x is None:
        return None
    a = array(name, x, dtypes, [("num_heads", num_heads)])
    return np.ascontiguousarray(a.numpy().astype(np.float32))


def rows(name: str, x: Any) -> np.ndarray[Any, Any]:
    """Checks that ``x`` is [..., D] of floats, which may be float64 here."""
    a = numpy_view(name, x, FLOATS)
    if str(a.dtype) not in (*FLOATS, "float64"):
        raise TypeError(f"{name}: dtype {a.dtype}, expected {', '.join(FLOATS)} or float64")
    if not a.ndim or not a.shape[-1]:
        raise ValueError(f"{name}: shape {a.shape}, expected a last axis of at least 1")
    return a


def sizes(name: str, x: Any) -> np.ndarray[Any, Any]:
    """Gives a float64 copy of x [..., D], whose numbers must be finite and not negative."""
    found: np.ndarray[Any, Any] = rows(name, x).astype(np.float64)
    for where in np.argwhere(~(np.isfinite(found) & (found >= 0)))[:1]:
        at = ", ".join(map(str, where))
        raise ValueError(f"{name}[{at}]: {found[tuple(where)]}, expected a finite size of at least 0")
    return found


def writable(name: str, a: Array) -> Array:
    """Checks that the memory may be written and that no two elements coincide in it."""
    fault = new_fault()
    if lib.ca_check_written(describe(a), fault):
        raise misfit(fault, name, a)
    return a


def disjoint(name: str, a: Array, others: Mapping[str, Array | None]) -> None:
    """Checks that no byte of ``a`` belongs to another array, too."""
    first, end = a.extent()
    for other, b in others.items():
        if b is None or not a.size or not b.size:
            continue
        b_first, b_end = b.extent()
        if first < b_end and b_first < end and lib.ca_share_memory(describe(a), describe(b)):
            raise ValueError(f"{name}: shares memory with {other}")


def apart_from(name: str, a: np.ndarray[Any, Any], others: Mapping[str, np.ndarray[Any, Any] | None]) -> None:
    """Does what :func:`disjoint` does for NumPy arrays, in 0.3 us for each that lies nowhere near."""
    for other, b in others.items():
        if b is not None and np.may_share_memory(a, b):
            disjoint(name, view(name, a), {other: view(other, b)})


def apart(names: Sequence[str], arrays: Sequence[Array | None], num_outputs: int) -> None:
    """Checks that the first num_outputs arrays share no byte with one another or with the rest."""
    for i in range(num_outputs):
        a = arrays[i]
        if a is not None:
            disjoint(names[i], a, dict(zip(names[i + 1 :], arrays[i + 1 :], strict=True)))


def pointer(kind: str, a: Array | np.ndarray[Any, Any]) -> Any:
    """Gives ``a`` as a C pointer; the caller keeps ``a`` alive."""
    return ffi.cast(kind, a.address if isinstance(a, Array) else address(a))
