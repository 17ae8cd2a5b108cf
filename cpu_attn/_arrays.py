# SPDX-License-Identifier: Apache-2.0
"""This module reads foreign arrays without a copy: NumPy's, those with ``data_ptr`` (torch), with DLPack or with
``__array_interface__``.

torch is never imported: its tensors are known by their methods, bfloat16 by the dtype's name. C reads those of a call
through DLPack's exchange functions. NumPy's own bridges (``np.from_dlpack``, ``tensor.numpy()``) refuse bfloat16, so
the DLPack capsule of other arrays is read directly.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Sequence
from functools import cache
from math import prod
from operator import index
from typing import Any

import numpy as np

from cpu_attn._dtypes import CODES, DTYPES, NAMES
from cpu_attn._native import ffi, lib

# The keys are the DLDataTypeCode of dlpack.h 1.1 and the number of bits.
_DLPACK = {(2, 32): "float32", (2, 16): "float16", (4, 16): "bfloat16", (0, 32): "int32", (0, 64): "int64"}
_DLPACK |= {(10, 8): "float8_e4m3fn", (12, 8): "float8_e5m2", (1, 8): "uint8"}

# These write the fields of ca_array in native/cpu_attn.h, one for each number of axes.
FIELDS = [struct.Struct(f"=Q {n}q {32 - 8 * n}x {n}q {32 - 8 * n}x 4i") for n in range(5)]
ABSENT = bytes(FIELDS[0].size)


class _UnknownDtypeError(Exception):
    """Says that an array's dtype is none of DTYPES."""


class _Memory:
    """Describes an Array by NumPy's protocol. That cannot name all dtypes, so elements pass as bytes."""

    def __init__(self, a: Array) -> None:
        self.owner = a.owner
        self.__array_interface__ = {
            "version": 3,
            "data": (a.address, not a.writable),
            "shape": a.shape,
            "strides": tuple(s * a.itemsize for s in a.strides),
            "typestr": f"|V{a.itemsize}",
        }


class Array:
    """Holds the address, shape and strides (in elements) of somebody's memory, and the object that keeps it alive."""

    __slots__ = ("_described", "address", "dtype", "owner", "shape", "strides", "writable")

    def __init__(
        self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str, writable: bool, owner: Any
    ) -> None:
        self.address = address
        self.shape = shape
        self.strides = strides
        self.dtype = dtype
        self.writable = writable
        self.owner = owner
        self._described: bytes | None = None

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def size(self) -> int:
        return prod(self.shape)

    def extent(self) -> tuple[int, int]:
        """Gives the addresses of the first byte and of the one behind the last."""
        if not self.size:
            return self.address, self.address
        steps = [(n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)]
        low, high = sum(s for s in steps if s < 0), sum(s for s in steps if s > 0)
        return self.address + low * self.itemsize, self.address + (high + 1) * self.itemsize

    def described(self) -> bytes:
        """Gives the memory as a ``ca_array``. More than four axes are cut off, since no call accepts so many."""
        if self._described is None:
            n = min(len(self.shape), 4)
            code, size = CODES[self.dtype]
            axes = (*self.shape[:n], *self.strides[:n], len(self.shape))
            self._described = FIELDS[n].pack(self.address, *axes, code, size, self.writable)
        return self._described

    def numpy(self) -> np.ndarray[Any, Any]:
        """Gives a NumPy view of the memory."""
        dtype = DTYPES[self.dtype]
        return np.asarray(_Memory(self)).view(dtype) if self.size else np.empty(self.shape, dtype)


def view(name: str, x: Any, dtypes: Sequence[str] = tuple(DTYPES)) -> Array:
    """Gives the memory of ``x``, which errors call ``name``. Whatever a foreign object raises becomes a TypeError, but
    for ValueError and MemoryError. dtypes: what the error says is expected where the dtype is none of DTYPES."""
    try:
        return _placed(_read(x))
    except MemoryError:
        raise
    except _UnknownDtypeError as e:
        raise TypeError(f"{name}: {e}, expected {' or '.join(dtypes)}") from None
    except (TypeError, ValueError) as e:
        raise (TypeError if isinstance(e, TypeError) else ValueError)(f"{name}: {e}") from None
    except Exception as e:
        raise TypeError(f"{name}: {type(x).__name__} does not say where it lies: {e!r}") from e


def dense_rows(x: Any) -> Any:
    """Gives a torch tensor as it is, or a copy where its last axis is not dense."""
    return x if x.dim() == 0 or x.stride(-1) == 1 else x.contiguous()


def numpy_view(name: str, x: Any, dtypes: Sequence[str] = tuple(DTYPES)) -> np.ndarray[Any, Any]:
    """Gives ``x`` as a NumPy array of the same memory. A NumPy array is not checked here, since the call that it goes
    to checks it."""
    if isinstance(x, np.ndarray):
        return x
    try:
        stored(x)
        return _bridged(x)
    except Exception:  # it is no tensor, or one that is not plain, of which view() says why
        return view(name, x, dtypes).numpy()


def plain_dtype(x: Any) -> str | None:
    """Gives the name of a NumPy array's or a tensor's dtype, if it is of exactly that class; None for anything else."""
    if type(x) is np.ndarray:
        return NAMES.get(x.dtype)
    kind: Any = type(x)
    return _torch_name(x.dtype) if _borrower(kind) else None


@cache
def _torch_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _read(x: Any) -> Array:
    if isinstance(x, np.ndarray):
        return _of_numpy(x)
    if hasattr(x, "data_ptr"):
        return _of_tensor(x)
    if hasattr(x, "__dlpack__"):
        return _of_dlpack(x)
    if hasattr(x, "__array_interface__"):
        if x.__array_interface__["typestr"][1] == "V":
            raise TypeError(f"its __array_interface__ says only {x.__array_interface__['typestr']!r}")
        return _of_numpy(x)
    raise TypeError(f"expected an array on the CPU, got {type(x).__name__}")


def _placed(a: Array) -> Array:
    """Checks that the sizes and addresses are such as memory can have."""
    if min(a.shape, default=0) < 0:
        raise ValueError(f"shape {a.shape} has a negative axis")
    if a.address % CODES[a.dtype][1]:
        raise ValueError(f"address {a.address:#x} is not a multiple of its {a.itemsize}-byte elements")
    first, end = a.extent()
    if a.size and not 0 < first < end < 2**63:
        raise ValueError(f"its elements would lie from {first:#x} to {end:#x}, where no memory is")
    if a.address < 0 or max((a.address, *a.shape, *map(abs, a.strides))) >= 2**63:
        raise ValueError(f"no memory has address {a.address:#x}, shape {a.shape}, strides {a.strides}")
    return a


# This is the offset of a tuple's items. To read their addresses there takes 10 ns, where a list of what id() says takes
# 700.
_ITEMS = tuple.__basicsize__


def new_beside(x: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Makes an array for a call to return: a tensor of x's dtype where x is one, else a NumPy array of ``dtype``."""
    return x.new_empty(shape) if hasattr(x, "new_empty") else np.empty(shape, dtype)


def addresses(arrays: tuple[Any, ...]) -> int:
    """Gives the address at which C finds the addresses of NumPy arrays and of None. It is valid while ``arrays``
    lives."""
    return id(arrays) + _ITEMS


def objects(arrays: tuple[Any, ...], leading: int = 2) -> tuple[int, Any, Any]:
    """Gives the address at which C finds the addresses of ``arrays``, the descriptions that it takes in place of some,
    and what keeps both alive. Only the leading array is asked for its type, since a model has just computed it: where
    that one is NumPy's, the others are taken for NumPy's, too, and one that is not costs a second attempt
    (_check.reread). Where it is torch's, C reads all tensors."""
    kind: Any = type(arrays[leading])
    borrow = None if kind is np.ndarray else _borrower(kind)
    if borrow:
        try:
            return _borrowed(arrays, kind, borrow)
        except Exception:  # torch raises many kinds of error; view() looks again and says what is wrong
            pass
    return addresses(arrays), ffi.NULL, arrays


def _borrowed(arrays: tuple[Any, ...], kind: Any, borrow: Any) -> tuple[int, Any, Any]:
    for x in arrays:
        if type(x) is kind:
            if x.requires_grad or x.is_neg():
                raise ValueError("is no plain tensor")
            stored(x)
    given, found = ffi.new("ca_array[]", len(arrays)), ffi.new("uintptr_t[]", len(arrays))
    at = int(ffi.cast("uintptr_t", found))
    borrow(addresses(arrays), len(arrays), at, int(ffi.cast("uintptr_t", given)))
    return at, given, (found, {})


@cache
def _borrower(kind: Any) -> Any:
    """Gives ``ca_borrow_tensors`` if the class is torch.Tensor and C knows how to read its instances, else None."""
    torch = sys.modules.get("torch")
    if not _knows_numpy or kind is not getattr(torch, "Tensor", None):
        return None
    exchange = _capsule_pointer(getattr(kind, "__dlpack_c_exchange_api__", None), b"dlpack_exchange_api")
    if not exchange or not lib.ca_know_tensors(id(kind), exchange):
        return None
    function = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_size_t, ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t)
    return function(int(ffi.cast("uintptr_t", ffi.addressof(lib, "ca_borrow_tensors"))))


# For each class and dtype of a tensor that was met: the torch dtype of the same width and the NumPy dtype to view the
# bits as, or None twice where torch's bridge knows the dtype.
_BITS: dict[tuple[type, Any], tuple[Any, Any]] = {}


def _bridged(x: Any) -> np.ndarray[Any, Any]:
    """Gives a tensor through its own bridge to NumPy, in half the time that :func:`view` takes: 0.7 us, in bfloat16 1.5
    us."""
    kind = (type(x), x.dtype)
    if kind not in _BITS:
        torch = sys.modules["torch"]
        if type(x).numpy is not torch.Tensor.numpy:
            raise TypeError("another numpy() may copy")
        name = _torch_name(x.dtype)
        foreign = name == "bfloat16" or name.startswith("float8")
        _BITS[kind] = (getattr(torch, f"uint{8 * x.itemsize}"), DTYPES[name]) if foreign else (None, None)
    bits, dtype = _BITS[kind]
    if x.requires_grad:  # under no_grad, numpy() would take it, but a view of its bits would not
        raise ValueError("requires grad")
    array: np.ndarray[Any, Any] = x.numpy() if bits is None else x.view(bits).numpy().view(dtype)
    return array


def stored(x: Any) -> None:
    """Raises ValueError where a tensor's storage was made smaller than the tensor (``resize_``). torch itself does not
    check, and reads and writes past the end. This takes 0.25 us."""
    there = x.untyped_storage().nbytes()
    first, size = x.storage_offset(), x.nbytes // x.itemsize
    if size and not x.is_contiguous():
        size = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    if size and (first + size) * x.itemsize > there:
        raise ValueError(f"its elements end {(first + size) * x.itemsize} bytes into a storage of {there}")


def described(arrays: Sequence[Array | None]) -> Any:
    """Gives an array of ``ca_array``, one for each of the arrays."""
    return ffi.from_buffer("ca_array[]", b"".join([ABSENT if a is None else a.described() for a in arrays]))


def describe(a: Array) -> Any:
    """Gives one array as a ``ca_array``."""
    return ffi.from_buffer("ca_array[]", a.described())


def address(x: np.ndarray[Any, Any]) -> int:
    """Gives the address of the first element. Where memory runs out, ``x.__array_interface__`` ends the process (NumPy
    2.4.6) and ``x.ctypes`` raises SystemError, so the buffer protocol is used. It takes neither strides nor a dtype
    that is not NumPy's, so it is asked for the bytes of one element."""
    first = x[(slice(1),) * x.ndim or ...]
    return int(ffi.cast("uintptr_t", ffi.from_buffer(first.reshape(-1).view(np.uint8))))


def _of_numpy(x: Any) -> Array:
    x = np.asarray(x)  # a subclass may describe itself wrongly
    dtype = NAMES.get(x.dtype)
    if dtype is None:
        raise _UnknownDtypeError(f"dtype {x.dtype}")
    size = x.dtype.itemsize
    if any(s % size for s in x.strides):
        raise ValueError(f"strides {x.strides} are not whole elements of {size} bytes")
    strides = tuple(s // size for s in x.strides)
    return Array(address(x), x.shape, strides, dtype, x.flags.writeable, x)


def _of_tensor(x: Any) -> Array:
    if not getattr(x, "is_cpu", False) and x.device.type != "cpu":
        raise ValueError(f"lies on {x.device}, expected cpu")
    dtype = str(x.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise _UnknownDtypeError(f"dtype {x.dtype}")
    if str(getattr(x, "layout", "strided")).removeprefix("torch.") != "strided":
        raise TypeError(f"layout {x.layout}, expected a dense tensor, not a sparse one")
    if getattr(x, "requires_grad", False):
        raise ValueError("requires grad; pass it detached")
    if hasattr(x, "is_neg") and x.is_neg():
        raise ValueError("is the negative of what lies in its memory; pass its resolve_neg()")
    if hasattr(x, "untyped_storage"):
        stored(x)
    # torch gives integers here, but an object that only looks like a tensor may give anything.
    shape, strides = tuple(map(index, x.shape)), tuple(map(index, x.stride()))
    if len(strides) != len(shape):
        raise TypeError(f"{len(strides)} strides, expected {len(shape)}, as many as axes")
    return Array(index(x.data_ptr()), shape, strides, dtype, True, x)


class _DLTensor(ctypes.Structure):
    """Lays out the struct DLTensor of dlpack.h 1.0."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLVersioned(ctypes.Structure):
    """Lays out the struct DLManagedTensorVersioned of dlpack.h 1.0, whose flag 1 means read-only."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    )


def _capsule_pointer(capsule: Any, name: bytes) -> int | None:
    valid, pointer = ctypes.pythonapi.PyCapsule_IsValid, ctypes.pythonapi.PyCapsule_GetPointer
    valid.argtypes = pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
    pointer.restype = ctypes.c_void_p
    try:
        return pointer(capsule, name) if valid(capsule, name) else None
    except ctypes.ArgumentError:  # ctypes makes it of a MemoryError, as py_object takes any object
        raise MemoryError from None


def _of_dlpack(x: Any) -> Array:
    if x.__dlpack_device__()[0] != 1:
        raise ValueError(f"lies on DLPack device {x.__dlpack_device__()}, expected the CPU (1, 0)")
    try:
        capsule = x.__dlpack__(max_version=(1, 0))
    except TypeError:
        capsule = x.__dlpack__()
    writable = True
    if pointer := _capsule_pointer(capsule, b"dltensor_versioned"):
        versioned = _DLVersioned.from_address(pointer)
        if versioned.major != 1:
            raise TypeError(f"DLPack version {versioned.major}, expected 1")
        tensor, writable = versioned.tensor, not versioned.flags & 1
    elif pointer := _capsule_pointer(capsule, b"dltensor"):
        tensor = _DLTensor.from_address(pointer)
    else:
        raise TypeError("its __dlpack__ gave no DLPack capsule")
    dtype = _DLPACK.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if dtype is None:
        raise _UnknownDtypeError(f"DLPack dtype {tensor.code}/{tensor.bits}")
    if tensor.ndim < 0 or (tensor.ndim and not tensor.shape):
        raise TypeError(f"DLPack tensor of {tensor.ndim} axes{'' if tensor.shape else ', without a shape'}")
    # The sizes are read one by one: where memory runs out, a slice of a ctypes pointer has holes, and reading these
    # ends the process.
    shape = tuple([tensor.shape[i] for i in range(tensor.ndim)])
    if tensor.strides:
        strides = tuple([tensor.strides[i] for i in range(tensor.ndim)])
    else:
        strides = tuple(prod(shape[i + 1 :]) for i in range(tensor.ndim))
    address = (tensor.data or 0) + tensor.byte_offset
    return Array(address, shape, strides, dtype, writable, (x, capsule))


def _let_c_read_numpy() -> bool:
    """Tells C how NumPy arrays and tuples lie in memory. Python reads the arrays itself wherever that is not known to
    hold: in other Pythons than CPython, and where the layout of tuples or arrays has changed. Then it returns False."""
    if sys.implementation.name != "cpython":
        return False
    items = (None, np.ndarray)
    if (ctypes.c_size_t * 2).from_address(addresses(items))[:] != [id(x) for x in items]:
        return False
    lib.ca_know_numpy(id(np.ndarray), id(None), object.__basicsize__)
    for name, dtype in DTYPES.items():
        lib.ca_know_dtype(id(dtype), *CODES[name])
    for (code, bits), name in _DLPACK.items():
        lib.ca_know_dlpack_dtype(code, bits, *CODES[name])
    probe, read = np.zeros((2, 3, 5), np.int32)[::-1, :, 1:4], ffi.new("ca_array *")
    for probe.flags.writeable in (True, False):
        lib.ca_read_array(id(probe), read)
        if bytes(ffi.buffer(read)) != bytes(ffi.buffer(described([_of_numpy(probe)]))):
            lib.ca_know_numpy(0, 0, 0)
            return False
    return True


_knows_numpy = _let_c_read_numpy()
