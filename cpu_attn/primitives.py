# SPDX-License-Identifier: Apache-2.0
"""This module has the building blocks of :mod:`cpu_attn.compose`: pages out of the cache, and matmul and softmax by
oneDNN.

matmul and softmax run on the calling thread alone, with the GIL released, and say which of oneDNN's
implementations ran. Inputs are NumPy arrays or anything that :func:`cpu_attn.attention_with_kv_cache` takes; what
is not dense and 64-byte aligned is copied, since oneDNN is slow on all else.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from cpu_attn import _check, _onednn_loader
from cpu_attn._arrays import address, view
from cpu_attn._dtypes import DTYPES, dtype_name
from cpu_attn.ops import gather

__all__ = ["gather_pages", "matmul", "softmax"]

Array = np.ndarray[Any, Any]


def gather_pages(
    cache: Any,
    block_table_row: Any,
    seq_len: int,
    *,
    head_size: int,
    isa: str = "auto",
    value: bool = False,
    out: Any = None,
    dtype: Any = None,
    kv_cache_dtype: str = "auto",
    kv_cache_layout: str = "packed",
) -> Array:
    """Gives the keys (or values) of one request's first seq_len tokens as plain rows [seq_len, Hkv, head_size] in the
    cache's dtype; integers (``int8``, ...) become float32, times their scales.

    cache: a key cache [N, Hkv, B, width] as written with ``isa``, or a value cache with ``value=True``.
    block_table_row: int32 [M], the request's blocks. out: written and returned where given. dtype: of the tokens that
    were written to a quantised cache, which holds kv_cache_dtype. kv_cache_layout: of the cache.
    It raises ValueError or TypeError for shapes, dtypes and blocks out of range, before anything is written.
    """
    value = _check.boolean("value", value)
    more: Any = {"out": out, "dtype": dtype, "kv_cache_dtype": kv_cache_dtype, "kv_cache_layout": kv_cache_layout}
    try:
        return gather(cache, block_table_row, seq_len, head_size, isa, value=value, **more)
    except (TypeError, ValueError) as e:
        raise _check.renamed(e, {"block_table": "block_table_row"}) from None


def matmul(a: Any, b: Any, *, transpose_b: bool = False, out_dtype: Any = None) -> tuple[Array, str]:
    """Multiplies a [M, K] by b [K, N] (or [N, K] with transpose_b), and gives the product and the name of the
    implementation that ran.

    a and b: float32, float16 or bfloat16, the same for both; sums are float32. out_dtype: float32 or that of a,
    which it is unless said. A dtype for which oneDNN has nothing but its reference loops here runs as float32.

    It raises ValueError or TypeError for shapes and dtypes, UnavailableError where oneDNN is not there.
    """
    module = _onednn_loader.load()
    transpose_b = _check.boolean("transpose_b", transpose_b)
    (left, given), (right, other) = _matrix("a", a), _matrix("b", b)
    (m, k), (n, depth) = left.shape, right.shape if transpose_b else right.shape[::-1]
    if other != given:
        raise TypeError(f"b: dtype {other}, expected that of a, {given}")
    if depth != k:
        raise ValueError(f"b: axis {int(transpose_b)} is {depth}, expected K = {k}")
    out = given if out_dtype is None else dtype_name(out_dtype, "out_dtype")
    if out not in ("float32", given):
        raise ValueError(f"out_dtype: {out}, expected float32 or {given}")
    if not m * n * k:
        return np.zeros((m, n), DTYPES[out]), "empty"
    for dtype, result_dtype in ((given, out), ("float32", "float32")):
        x, y = _dense(left, dtype), _dense(right, dtype)
        c = _aligned((m, n), result_dtype)
        sizes = (_code(module, dtype), _code(module, result_dtype), transpose_b, m, n, k)
        status, impl = _call(module, module.lib.ca_onednn_matmul, *sizes, *_pointers(module, x, y, c))
        if status != module.lib.CA_ONEDNN_NO_PRIMITIVE:
            break
    _raise(module, status)
    return c.astype(DTYPES[out], copy=False), impl


def softmax(x: Any, axis: int = -1) -> tuple[Array, str]:
    """Gives exp(x) / sum of exp(x) along one axis, in x's dtype, and the name of the implementation that ran.

    x: float32, float16 or bfloat16, of at least one axis. It is computed in float32. Where all of x is -inf
    nothing is to be weighed and the result is 0 (oneDNN says NaN); NaN or +inf make all of their row NaN.

    It raises ValueError or TypeError for x and axis, UnavailableError where oneDNN is not there.
    """
    module = _onednn_loader.load()
    source, dtype = _floats("x", x)
    if not source.ndim:
        raise ValueError("x: has no axis to normalise over")
    axis = _check.integer("axis", axis, -source.ndim, source.ndim - 1)
    if not source.size:
        return np.zeros(source.shape, DTYPES[dtype]), "empty"
    turned = np.moveaxis(source, axis, -1)
    rows = _dense(turned, "float32").reshape(prod(turned.shape[:-1]), -1)
    p = _aligned(rows.shape, "float32")
    status, impl = _call(module, module.lib.ca_onednn_softmax, *rows.shape, *_pointers(module, rows, p, kind="float *"))
    _raise(module, status)
    largest = rows.max(axis=1)
    p[largest == -np.inf] = 0
    p[np.isnan(largest) | (largest == np.inf)] = np.nan
    result = np.moveaxis(p.reshape(turned.shape), -1, axis)
    return result.astype(DTYPES[dtype], copy=False), impl


def _floats(name: str, x: Any) -> tuple[Array, str]:
    """Gives a NumPy view of x, and the name of its dtype."""
    a = view(name, x)
    if a.dtype not in _check.FLOATS:
        raise TypeError(f"{name}: dtype {a.dtype}, expected {' or '.join(_check.FLOATS)}")
    return x if isinstance(x, np.ndarray) else a.numpy(), a.dtype


def _matrix(name: str, x: Any) -> tuple[Array, str]:
    matrix, dtype = _floats(name, x)
    if matrix.ndim != 2:
        raise ValueError(f"{name}: {matrix.ndim} axes, expected 2")
    return matrix, dtype


def _aligned(shape: tuple[int, ...], dtype: str) -> Array:
    """Gives uninitialised memory that starts at a multiple of 64 bytes."""
    size = prod(shape) * DTYPES[dtype].itemsize
    memory = np.empty(size + 64, np.uint8)
    start = -address(memory) % 64
    return memory[start : start + size].view(DTYPES[dtype]).reshape(shape)


def _dense(x: Array, dtype: str) -> Array:
    if x.flags.c_contiguous and address(x) % 64 == 0 and x.dtype == DTYPES[dtype]:
        return x
    copy = _aligned(x.shape, dtype)
    copy[...] = x
    return copy


def _code(module: Any, dtype: str) -> int:
    return int(
        {
            "float32": module.lib.CA_ONEDNN_F32,
            "float16": module.lib.CA_ONEDNN_F16,
            "bfloat16": module.lib.CA_ONEDNN_BF16,
        }[dtype]
    )


def _pointers(module: Any, *arrays: Array, kind: str = "void *") -> list[Any]:
    return [module.ffi.cast(kind, address(a)) for a in arrays]


def _call(module: Any, function: Any, *arguments: Any) -> tuple[int, str]:
    impl = module.ffi.new("char[64]")
    status = function(*arguments, impl, 64)
    return status, module.ffi.string(impl).decode()


def _raise(module: Any, status: int) -> None:
    if status != module.lib.CA_ONEDNN_OK:
        raise _onednn_loader.failure("oneDNN", status)
