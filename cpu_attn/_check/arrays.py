# SPDX-License-Identifier: Apache-2.0
"""Any array: dtype, shape, strides, and which memory it shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cpu_attn._arrays import Array, view
from cpu_attn._check.values import INT32_MAX
from cpu_attn._native import ffi

FLOATS = ("float32", "float16", "bfloat16")


def array(name: str, x: Any, dtypes: Sequence[str], axes: Sequence[tuple[str, int | None]]) -> Array:
    """``x`` as memory of one of the dtypes and of the shape ``axes`` = (what, size or None: any), last axis dense."""
    a = view(name, x)
    if a.dtype not in dtypes:
        raise TypeError(f"{name}: dtype {a.dtype}, expected {' or '.join(dtypes)}")
    if len(a.shape) != len(axes):
        raise ValueError(f"{name}: {len(a.shape)} axes, expected {len(axes)}: [{', '.join(w for w, _ in axes)}]")
    for i, (size, (what, expected)) in enumerate(zip(a.shape, axes, strict=True)):
        if expected is not None and size != expected:
            raise ValueError(f"{name}: axis {i} is {size}, expected {what} = {expected}")
        if size > INT32_MAX:
            raise ValueError(f"{name}: axis {i} is {size}, more than {INT32_MAX}")
    if a.shape[-1] > 1 and a.strides[-1] != 1 and a.size:
        raise ValueError(f"{name}: the last axis has stride {a.strides[-1]}, expected 1 (dense)")
    return a


def small_floats(name: str, x: Any, dtypes: Sequence[str], num_heads: int) -> np.ndarray[Any, Any] | None:
    """A float32 copy of one number for each query head."""
    if x is None:
        return None
    a = array(name, x, dtypes, [("num_heads", num_heads)])
    return np.ascontiguousarray(a.numpy().astype(np.float32))


def writable(name: str, a: Array) -> Array:
    """Memory that may be written and in which no two elements coincide."""
    if not a.writable:
        raise ValueError(f"{name}: is read-only")
    extent = 1
    for stride, size in sorted((abs(s), n) for s, n in zip(a.strides, a.shape, strict=True) if n > 1):
        if stride < extent and a.size:
            raise ValueError(f"{name}: strides {a.strides} over shape {a.shape} make elements overlap")
        extent += stride * (size - 1)
    return a


def disjoint(name: str, a: Array, others: Mapping[str, Array | None]) -> None:
    """No byte of ``a`` may be one of another array's."""
    first, end = a.extent()
    for other, b in others.items():
        if b is None or not a.size or not b.size:
            continue
        b_first, b_end = b.extent()
        if first < b_end and b_first < end and _shared(a, b):
            raise ValueError(f"{name}: shares memory with {other}")


def _shared(a: Array, b: Array) -> bool:
    try:
        return bool(np.shares_memory(a.numpy(), b.numpy(), max_work=100_000))  # type: ignore[arg-type]  # the stub knows only 0 and -1
    except np.exceptions.TooHardError:
        return True


def apart(names: Sequence[str], arrays: Sequence[Array | None], num_outputs: int) -> None:
    """The first num_outputs arrays share no byte with one another or with the rest."""
    for i in range(num_outputs):
        a = arrays[i]
        if a is not None:
            disjoint(names[i], a, dict(zip(names[i + 1 :], arrays[i + 1 :], strict=True)))


def pointer(kind: str, a: Array | np.ndarray[Any, Any] | None) -> Any:
    """``a`` as a C pointer; the caller keeps ``a`` alive."""
    if a is None:
        return ffi.NULL
    return ffi.cast(kind, a.address if isinstance(a, Array) else a.ctypes.data)
