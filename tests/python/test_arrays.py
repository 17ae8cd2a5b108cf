# SPDX-License-Identifier: Apache-2.0
"""Foreign arrays, zero-copy, in and out: DLPack capsules, tensors by their methods, strides of every kind."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cpu_attn
from cpu_attn import _arrays

from ..harness.steps import attention_args

pytestmark = pytest.mark.isa


class Capsule:
    """Nothing but DLPack, as another library's array would be."""

    def __init__(self, array: Any, versioned: bool = True) -> None:
        self._array, self._versioned = array, versioned

    def __dlpack__(self, **options: Any) -> Any:
        if options and not self._versioned:
            raise TypeError("no options before DLPack 1.0")
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self._array.__dlpack_device__()
        return device


def exported(array: Any) -> tuple[Any, Any]:
    """A capsule and the DLTensor in it, versioned from NumPy 2.1 on."""
    try:
        capsule = array.__dlpack__(max_version=(1, 0))
    except TypeError:
        capsule = array.__dlpack__()
        return capsule, _arrays._DLTensor.from_address(_arrays._capsule_pointer(capsule, b"dltensor"))
    pointer = _arrays._capsule_pointer(capsule, b"dltensor_versioned")
    return capsule, _arrays._DLVersioned.from_address(pointer).tensor


def spoilt_capsule(**fields: Any) -> Capsule:
    """Other fields of its DLTensor than its array has."""
    array = np.zeros((4, 4, 8), np.float32)
    capsule, tensor = exported(array)
    for name, x in fields.items():
        setattr(tensor, name, x)
    kept = (array, tensor)
    return Capsule(SimpleNamespace(__dlpack__=lambda **_: capsule, __dlpack_device__=lambda: (1, 0), kept=kept))


def raises(error: Exception) -> Any:
    def call(*_: Any, **__: Any) -> Any:
        raise error

    return call


class Tensor:
    """The methods by which a tensor of torch is known."""

    def __init__(self, array: Any, device: str = "cpu", requires_grad: bool = False, dtype: str | None = None) -> None:
        self._array = array
        self.shape = array.shape
        self.dtype = f"torch.{dtype or array.dtype}"
        self.device = SimpleNamespace(type=device)
        self.requires_grad = requires_grad

    def data_ptr(self) -> int:
        return int(self._array.ctypes.data)

    def stride(self) -> tuple[int, ...]:
        return tuple(s // self._array.itemsize for s in self._array.strides)


class Copying(Tensor):
    """Of a library whose tensors' numpy() is a copy."""

    def numpy(self) -> Any:
        return self._array.copy()


class Interface:
    """Nothing but __array_interface__."""

    def __init__(self, array: Any) -> None:
        self._array = array
        self.__array_interface__ = array.__array_interface__


class Subclass(np.ndarray[Any, Any]):
    __array_interface__ = 5  # type: ignore[assignment]


WRAP = {
    "dlpack": Capsule,
    "dlpack-unversioned": lambda x: Capsule(x, versioned=False),
    "tensor": Tensor,
    "tensor with a numpy() that copies": Copying,
    "subclass": lambda x: x.view(Subclass),
    "interface": Interface,
}


def plain(dtype: str) -> Any:
    args = attention_args(dtype)
    cpu_attn.attention_with_kv_cache(**args)
    return args["output"], args["lse"]


def wrapped_args(wrap: Any, dtype: str) -> tuple[dict[str, Any], Any, Any]:
    args = attention_args(dtype)
    output, lse = args["output"], args["lse"]
    return {k: wrap(v) if isinstance(v, np.ndarray) else v for k, v in args.items()}, output, lse


@pytest.mark.parametrize("kind", WRAP)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_foreign_arrays_are_read_and_written_in_place(kind: str, dtype: str) -> None:
    args, output, lse = wrapped_args(WRAP[kind], dtype)
    want, want_lse = plain(dtype)
    for _ in range(2):
        output[...], lse[...] = 7, 7
        returned = cpu_attn.attention_with_kv_cache(**args)
        assert returned is args["output"]
        assert np.array_equal(output, want)
        assert np.array_equal(lse, want_lse)


def test_bfloat16_tensors() -> None:
    args, output, _ = wrapped_args(Tensor, "bfloat16")
    cpu_attn.attention_with_kv_cache(**args)
    assert output.tobytes() == plain("bfloat16")[0].tobytes()


def test_bfloat16_dlpack_is_read_from_the_capsule() -> None:
    """NumPy exports no bfloat16: an exported uint16 whose type code is set to bfloat (4) stands for it."""
    source = np.arange(6, dtype=np.uint16).reshape(2, 3)
    capsule, tensor = exported(source)
    tensor.code = 4
    fake = SimpleNamespace(__dlpack__=lambda **_: capsule, __dlpack_device__=lambda: (1, 0))
    got = _arrays.view("x", fake)
    assert (got.dtype, got.shape, got.strides, got.address) == ("bfloat16", (2, 3), (3, 1), source.ctypes.data)
    assert got.numpy().dtype == ml_dtypes.bfloat16


def test_readonly_dlpack_is_not_written() -> None:
    args = attention_args()
    output = args["output"]
    output.flags.writeable = False
    args["output"] = Capsule(output)
    with pytest.raises(ValueError, match="output: is read-only"):
        cpu_attn.attention_with_kv_cache(**args)


@pytest.mark.parametrize(
    ("x", "error", "words"),
    [
        (Tensor(np.zeros((4, 4, 8), np.float32), device="cuda"), ValueError, "expected cpu"),
        (Tensor(np.zeros((4, 4, 8), np.float32), requires_grad=True), ValueError, "requires grad"),
        (Tensor(np.zeros((4, 4, 8), np.float32), dtype="float64"), TypeError, "float64"),
        (SimpleNamespace(__dlpack__=lambda **_: None, __dlpack_device__=lambda: (2, 0)), ValueError, r"\(2, 0\)"),
        (SimpleNamespace(__dlpack__=lambda **_: 5, __dlpack_device__=lambda: (1, 0)), TypeError, "no DLPack capsule"),
        (Capsule(np.zeros((4, 4, 8))), TypeError, "DLPack dtype 2/64"),
        (spoilt_capsule(data=None), ValueError, "query: its elements would lie from 0x0 .* no memory"),
        (spoilt_capsule(byte_offset=2**64 - 4), ValueError, "query: its elements would lie .* no memory"),
        (spoilt_capsule(shape=None), TypeError, "query: DLPack tensor of 3 axes, without a shape"),
        (spoilt_capsule(ndim=-1), TypeError, "query: DLPack tensor of -1 axes"),
        (spoilt_capsule(shape=(ctypes.c_int64 * 3)(4, -4, 8)), ValueError, r"query: shape \(4, -4, 8\) .* negative"),
        (Interface(np.zeros((4, 4, 8), ml_dtypes.bfloat16)), TypeError, "V2"),
        (SimpleNamespace(__array_interface__=5), TypeError, "query: "),
        (SimpleNamespace(__array_interface__={"shape": (4, 4, 8)}), TypeError, "query: .*'typestr'"),
        (
            SimpleNamespace(__dlpack__=raises(BufferError("held")), __dlpack_device__=lambda: (1, 0)),
            TypeError,
            "query: .*held",
        ),
        (SimpleNamespace(data_ptr=raises(RuntimeError("no storage"))), TypeError, "query: "),
        (SimpleNamespace(data_ptr=0, device=SimpleNamespace(type="cpu")), TypeError, "query: .*dtype"),
        ("text", TypeError, "expected an array"),
        (None, TypeError, "expected an array"),
    ],
)
def test_refused(x: Any, error: type[Exception], words: str) -> None:
    args = attention_args()
    args["query"] = x
    with pytest.raises(error, match=words):
        cpu_attn.attention_with_kv_cache(**args)


def reversed_tokens(x: Any) -> Any:
    return np.ascontiguousarray(x[::-1])[::-1]


def head_major(x: Any) -> Any:
    return np.ascontiguousarray(x.transpose(1, 0, 2)).transpose(1, 0, 2)


def padded(x: Any) -> Any:
    wide = np.full((x.shape[0], x.shape[1] + 2, x.shape[2] + 5), np.nan, x.dtype)[:, 1:-1, 2:-3]
    wide[...] = x
    return wide


@pytest.mark.parametrize("strided", [reversed_tokens, head_major, padded])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_strides(strided: Any, dtype: str) -> None:
    args = attention_args(dtype)
    args["query"], args["output"] = strided(args["query"]), strided(args["output"])
    args["lse"] = np.full((4, 9), np.nan, np.float32)[:, 2:6]
    cpu_attn.attention_with_kv_cache(**args)
    want, want_lse = plain(dtype)
    assert np.array_equal(args["output"], want)
    assert np.array_equal(args["lse"], want_lse)
    if strided is padded:
        around = args["output"].base
        assert np.isnan(around[:, :, :2]).all()
        assert np.isnan(around[:, :, -3:]).all()
        assert np.isnan(around[:, [0, -1]]).all()


def test_one_row_for_all_tokens_is_a_valid_input() -> None:
    """Stride 0 reads the same memory again: fine for what is only read."""
    args = attention_args()
    args["query"] = np.broadcast_to(args["query"][:1], (4, 4, 8))
    cpu_attn.attention_with_kv_cache(**args)
    same = attention_args()
    same["query"] = np.ascontiguousarray(args["query"])
    cpu_attn.attention_with_kv_cache(**same)
    assert np.array_equal(args["output"], same["output"])
