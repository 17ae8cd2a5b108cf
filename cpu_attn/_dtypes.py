# SPDX-License-Identifier: Apache-2.0
"""dtypes: the names that this library has for them, NumPy's and ml_dtypes' objects, and the numbers that C knows."""

from __future__ import annotations

import contextlib
from typing import Any

import ml_dtypes
import numpy as np

from cpu_attn._native import lib

# Of queries, keys and values: what kernels compute in.
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

# enum ca_dtype and itemsize; the last ones hold what a narrow cache does, or indices.
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
# What a narrow cache holds, whatever its memory is called.
CODES |= {"fp8_e4m3": (lib.CA_E4M3, 1), "fp8_e5m2": (lib.CA_E5M2, 1), "int8": (lib.CA_I8, 1), "int4": (lib.CA_I4, 1)}


def dtype_name(dtype: Any, argument: str = "dtype") -> str:
    """float32, float16 or bfloat16, of a NumPy dtype, a torch dtype or a string; TypeError for others."""
    name = NAMES.get(dtype, "") if isinstance(dtype, np.dtype) else str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        with contextlib.suppress(Exception):  # np.dtype parses: SyntaxError, ValueError, ...
            name = NAMES.get(np.dtype(dtype), name)
    if name not in DTYPE_CODES:
        raise TypeError(f"{argument}: {dtype!r} is none of {', '.join(DTYPE_CODES)}")
    return name
