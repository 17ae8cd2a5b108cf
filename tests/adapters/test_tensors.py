# SPDX-License-Identifier: Apache-2.0
"""What C reads of torch's tensors by itself, beside what Python reads of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.integrations
from cpu_attn import PagedKVCache, _arrays  # noqa: E402
from cpu_attn._native import ffi  # noqa: E402

DTYPES = ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "uint8", "int32", "int64"]


def read(*arrays: Any) -> tuple[list[int], list[bytes]]:
    """Gives the addresses of the objects that C is to read, 0 for those that it has read, and all descriptions."""
    _, given, (found, _) = _arrays.objects(arrays)
    return list(found), [bytes(ffi.buffer(given + i, ffi.sizeof("ca_array"))) for i in range(len(arrays))]


@pytest.mark.parametrize("dtype", DTYPES)
def test_descriptions(dtype: str) -> None:
    x = torch.zeros(3, 4, 5, 6, dtype=getattr(torch, dtype))
    for y in (x, x[1:, :, 2:], x.transpose(0, 2), x[0, ..., ::2], x[:0], x[0, 0, 0, 0], x[:1].expand(7, -1, -1, -1)):
        found, given = read(y, y, y)
        assert found == [0, 0, 0] and given == [_arrays.view("y", y).described()] * 3


def test_other_objects_are_left_to_c_and_to_python() -> None:
    class Tensor(torch.Tensor):  # type: ignore[misc, name-defined]
        pass

    x = torch.zeros(2, 3)
    others: list[Any] = [None, np.zeros(3), [1.0], torch.nn.Parameter(x, False), x.as_subclass(Tensor)]
    others += [x.double(), torch.zeros(1, 1, 1, 1, 1), x.bool()]
    found, _ = read(x, x, x, *others)
    assert found == [0, 0, 0, *map(id, others)]


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(2, requires_grad=True),
        torch._neg_view(torch.zeros(2)),
        torch.zeros(2, device="meta"),
        torch.zeros(2).to_sparse(),
    ],
)
def test_python_says_what_is_wrong_with_a_tensor(x: Any) -> None:
    plain = torch.zeros(2)
    for arrays in ((plain, plain, plain, x), (x, plain, plain)):
        assert _arrays.objects(arrays) == (_arrays.addresses(arrays), ffi.NULL, arrays)


def test_a_storage_that_shrank() -> None:
    plain, x = torch.zeros(4), torch.zeros(4)
    x.untyped_storage().resize_(8)
    for arrays in ((x, plain, plain), (plain, plain, plain, None, x)):
        assert _arrays.objects(arrays)[1] == ffi.NULL


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_calls_with_tensors_take_one_attempt(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def reread(*args: Any) -> Any:
        raise AssertionError("Python read an array")

    cache = PagedKVCache(4, 16, 2, 64, dtype)
    query, key = torch.zeros(5, 4, 64, dtype=dtype), torch.zeros(5, 2, 64, dtype=dtype)
    lengths = torch.tensor([0, 5], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
    slots, table = torch.arange(5), torch.tensor([[0]], dtype=torch.int32)
    cache.update(key, key, slots)  # the first names of an isa and a dtype take two
    monkeypatch.setattr("cpu_attn._check.reread", reread)
    cache.update(key, key, slots)
    cache.attend(query, table, cache.plan(*lengths, 4))
    cache.update_and_attend(key, key, query, slots, table, cache.plan(*lengths, 4))
