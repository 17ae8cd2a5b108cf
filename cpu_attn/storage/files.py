# SPDX-License-Identifier: Apache-2.0
"""This module keeps a cache as memory and descriptor, and as a file."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from cpu_attn import _check
from cpu_attn._errors import UnavailableError
from cpu_attn.storage.descriptor import CacheDescriptor
from cpu_attn.storage.memory import Memory, aligned_zeros, memory_dtype

SAFETENSORS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3"}
SAFETENSORS |= {"float8_e5m2": "F8_E5M2", "uint8": "U8"}


@dataclass(frozen=True, eq=False)
class StoredCache:
    """Holds the memory of a cache and what lies in it, whether or not an isa of this machine reads it.

    This is what a file holds, and what :func:`convert` takes.

    Args:
        descriptor: what the memory holds.
        key_cache: memory of keys, as :meth:`PagedKVCache.open` takes it.
        value_cache: memory of values, as :meth:`PagedKVCache.open` takes it.

    Raises:
        ValueError: an array does not fit the descriptor.
        TypeError: an argument has another type or dtype.

    Example:
        >>> from cpu_attn.storage import PagedKVCache, StoredCache, convert
        >>> cache = PagedKVCache(4, 16, 2, 64, "float32")
        >>> stored = StoredCache(cache.descriptor, cache.key_cache, cache.value_cache)
        >>> str(convert(stored, dtype="bfloat16").dtype)
        'bfloat16'
    """

    descriptor: CacheDescriptor
    key_cache: Memory
    value_cache: Memory

    def __post_init__(self) -> None:
        _check.instance("descriptor", self.descriptor, CacheDescriptor)
        kinds = self.descriptor.stored
        shapes, layout = self.descriptor.shapes, self.descriptor.kv_cache_layout
        caches = _check.pages((self.key_cache, self.value_cache), shapes, kinds, layout)
        for name, memory, kind in zip(("key_cache", "value_cache"), caches, kinds, strict=True):
            object.__setattr__(self, name, memory.view(memory_dtype(kind)))

    def save(self, file: str | os.PathLike[str]) -> None:
        """Writes a safetensors file of both arrays and, in its metadata as ``cpu_attn``, the descriptor.

        Args:
            file: the path. The extra ``safetensors`` is needed.

        Raises:
            OSError: the file cannot be written.
            UnavailableError: safetensors is not installed.
        """
        safetensors = _safetensors()
        arrays = {name: np.ascontiguousarray(getattr(self, name)) for name in ("key_cache", "value_cache")}
        try:
            safetensors.numpy.save_file(arrays, file, metadata={"cpu_attn": self.descriptor.to_json()})
        except safetensors.SafetensorError as error:
            raise OSError(f"{file}: {error}") from None

    @classmethod
    def load(cls, file: str | os.PathLike[str]) -> StoredCache:
        """Reads a file that :meth:`save` wrote, on this machine or another.

        Args:
            file: the path. The extra ``safetensors`` is needed.

        Returns:
            The memory and its descriptor.

        Raises:
            ValueError: the file is something else.
            TypeError: a field of its descriptor has another type.
            OSError: the file cannot be read.
            UnavailableError: safetensors is not installed.
        """
        safetensors = _safetensors()
        try:
            with safetensors.safe_open(file, framework="np") as opened:
                said, names = (opened.metadata() or {}).get("cpu_attn"), set(opened.keys())
        except safetensors.SafetensorError as error:
            raise ValueError(f"{file}: {error}") from None
        if said is None or names != {"key_cache", "value_cache"}:
            raise ValueError(f"{file}: not written by PagedKVCache.save")
        descriptor = CacheDescriptor.from_json(said)
        key_cache, value_cache = (
            _tensor(file, name, memory_dtype(kind))
            for name, kind in zip(("key_cache", "value_cache"), descriptor.stored, strict=True)
        )
        return cls(descriptor, key_cache, value_cache)


def _fill(opened: io.BufferedReader, buffer: Any) -> None:
    """Reads as many bytes as ``buffer`` has. A file may be cut after safetensors has found it to be sound."""
    if opened.readinto(buffer) < memoryview(buffer).nbytes:
        raise ValueError(f"{opened.name}: ends before its tensors do")


def _tensor(file: str | os.PathLike[str], name: str, dtype: np.dtype[Any]) -> Memory:
    """Reads a tensor of a file that safetensors has found to be sound; its NumPy bridge knows no float8."""
    import json  # imported as late as in CacheDescriptor

    with open(file, "rb") as opened:
        _fill(opened, size := bytearray(8))
        _fill(opened, header := bytearray(int.from_bytes(size, "little")))
        tensor = json.loads(header)[name]
        if tensor["dtype"] != SAFETENSORS[dtype.name]:
            raise ValueError(f"{name}: holds {tensor['dtype']}, the descriptor says {dtype.name}")
        first, end = tensor["data_offsets"]
        array = aligned_zeros((end - first,), np.dtype(np.uint8))
        opened.seek(first, os.SEEK_CUR)
        _fill(opened, array.data)
    found: Memory = array.view(dtype).reshape(tensor["shape"])
    return found


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.numpy
    except ImportError as error:
        how = "pip install 'cpu-attn[safetensors]'"
        raise UnavailableError(f"files need safetensors: {how} ({error})") from None
    return safetensors
