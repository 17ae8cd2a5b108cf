# SPDX-License-Identifier: Apache-2.0
"""This module lists the dtypes: this library's names, the objects of NumPy and ml_dtypes, and the numbers that C
knows."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from cpu_attn._errors import none_of
from cpu_attn._native import lib


class KVFormat(NamedTuple):
    """Describes what a quantised cache holds: a row of ca_formats (native/cache/formats.h), with its names."""

    code: int  # enum ca_dtype
    memory: tuple[str, ...]  # the dtypes that its memory may have; new caches get the first
    aliases: tuple[str, ...]
    bits: int  # bits of an element: 5 and 6 are sign and magnitude, 4 have `zero` added
    scaled: bool  # whether it has scales of its own, for which only a packed cache has a place; else fp8
    largest: int  # the largest integer
    shared: int  # how many elements of a token share a scale; 0: all of them
    zero: int  # the stored number that means 0
    divisors: tuple[float, ...]  # the scales that are tried are the largest magnitude over these

    def places(self, elements: int) -> int:
        """Gives how many items of the memory's dtype so many elements take."""
        return elements * self.bits // 8


def _format(code: int, *memory: str, aliases: tuple[str, ...] = ()) -> KVFormat:
    row = lib.ca_format_of(code)
    divisors = tuple(row.divisor + 0.5 * c for c in range(row.tried))
    return KVFormat(code, memory, aliases, row.bits, bool(row.scaled), row.largest, row.shared, row.zero, divisors)


FORMATS = {
    "fp8_e4m3": _format(lib.CA_E4M3, "float8_e4m3fn", "uint8", aliases=("fp8",)),
    "fp8_e5m2": _format(lib.CA_E5M2, "float8_e5m2", "uint8"),
    "int8": _format(lib.CA_I8, "uint8"),
    "int6": _format(lib.CA_I6, "uint8"),
    "int5": _format(lib.CA_I5, "uint8"),
    "int4": _format(lib.CA_I4, "uint8"),
    "int4_per_token_head": _format(lib.CA_I4_TOKEN, "uint8"),
}

# Queries, keys and values have one of these dtypes, in which kernels compute.
DTYPE_CODES = {"float32": lib.CA_F32, "float16": lib.CA_F16, "bfloat16": lib.CA_BF16}

DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(kind)
    for name, kind in {
        "float32": np.float32,
        "float16": np.float16,
        "bfloat16": ml_dtypes.bfloat16,
        "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
        "float8_e5m2": ml_dtypes.float8_e5m2,
        "uint8": np.uint8,
        "int32": np.int32,
        "int64": np.int64,
    }.items()
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

# Each dtype has its number in enum ca_dtype and its itemsize. The last five hold quantised caches or indices.
CODES = {
    name: (code, DTYPES[name].itemsize)
    for name, code in {
        **DTYPE_CODES,
        "float8_e4m3fn": lib.CA_E4M3,
        "float8_e5m2": lib.CA_E5M2,
        "uint8": lib.CA_U8,
        "int32": lib.CA_I32,
        "int64": lib.CA_I64,
    }.items()
}
# These are the formats of quantised caches, whatever dtype their memory has.
CODES |= {name: (kv.code, 1) for name, kv in FORMATS.items()}


def is_scaled(kv: str) -> bool:
    """Says whether a cache of ``kv`` has scales of its own."""
    return kv in FORMATS and FORMATS[kv].scaled


def rotation_of(kvs: Sequence[str], balanced: bool = False) -> str:
    """Gives the kv_cache_rotation that loses least with caches of K and V that hold ``kvs``: integers are rotated, and
    so is fp8 where queries and keys are balanced."""
    names = ["hadamard" if is_scaled(kv) or (balanced and is_fp8(kv)) else "none" for kv in kvs]
    return "/".join(dict.fromkeys(names))


def is_fp8(kv: str) -> bool:
    """Says whether a cache of ``kv`` is divided by k_scale or v_scale."""
    return kv in FORMATS and not FORMATS[kv].scaled


def dtype_name(dtype: Any, argument: str = "dtype") -> str:
    """Gives float32, float16 or bfloat16 for a NumPy dtype, a torch dtype or a string. It raises TypeError for
    others."""
    name = NAMES.get(dtype, "") if isinstance(dtype, np.dtype) else str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        with contextlib.suppress(Exception):  # np.dtype parses, and raises SyntaxError, ValueError, ...
            name = NAMES.get(np.dtype(dtype), name)
    if name not in DTYPE_CODES:
        raise TypeError(none_of(argument, dtype, DTYPE_CODES))
    return name
