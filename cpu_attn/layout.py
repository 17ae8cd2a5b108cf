# SPDX-License-Identifier: Apache-2.0
"""What lies in a cache's memory, as data: descriptors, files, and conversion from any layout to any other in NumPy."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cpu_attn import _check, _dispatch
from cpu_attn._arrays import DTYPES, dtype_name
from cpu_attn._errors import UnavailableError
from cpu_attn._native import ffi, lib

if TYPE_CHECKING:
    from cpu_attn.cache import PagedKVCache

VERSION = 1
LAYOUT_NAMES = {lib.CA_LAYOUT_LANES: "lanes-v1", lib.CA_LAYOUT_PAIRS: "pairs-v1"}
# As native/cpu_attn.h describes them: so many neighbours (of d in K, of tokens in V) lie side by side.
PAIRS = {"lanes-v1": 1, "pairs-v1": 2}
LANES = 16
CHUNK = 1 << 20  # elements converted at a time
SAFETENSORS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3"}
SAFETENSORS |= {"float8_e5m2": "F8_E5M2", "int8": "I8", "uint8": "U8"}
Memory = np.ndarray[Any, Any]


@cache
def layout_of(isa: int, dtype: str) -> str | None:
    """What an isa's kernels read; None where it has none for the dtype."""
    kernel = ffi.new("ca_kernel_info *")
    return LAYOUT_NAMES[kernel.layout] if lib.ca_isa_kernel(isa, _dispatch.DTYPE_CODES[dtype], kernel) else None


@dataclass(frozen=True, kw_only=True)
class CacheDescriptor:
    """All that it takes to read the memory of a cache, on this machine or another.

    layout: ``lanes-v1`` or ``pairs-v1`` (native/cpu_attn.h); isa: whose kernels wrote it, which may be one that this
    machine lacks: what counts is the layout. The other fields are those of :class:`PagedKVCache`. Raises ValueError or
    TypeError that names the field, for what no cache can be.
    """

    version: int = VERSION
    layout: str
    dtype: str
    kv_cache_dtype: str
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    k_scale: float
    v_scale: float
    isa: str

    def __post_init__(self) -> None:
        if type(self.version) is not int or self.version != VERSION:
            raise ValueError(f"version: {self.version!r}, this library knows {VERSION}")
        if self.layout not in PAIRS:
            raise ValueError(f"layout: {self.layout!r} is none of {', '.join(PAIRS)}")
        if not isinstance(self.isa, str):
            raise TypeError(f"isa: expected a name, got {self.isa!r}")
        if not isinstance(self.dtype, str) or self.dtype != dtype_name(self.dtype):
            raise ValueError(f"dtype: {self.dtype!r} is none of {', '.join(_check.FLOATS)}")
        for name in ("num_blocks", "block_size", "num_kv_heads", "head_size", "head_size_v"):
            most = _check.MAX_SIZE if "head" in name else _check.INT32_MAX
            _check.integer(name, getattr(self, name), name != "num_blocks", most)
        _check.scales(self.k_scale, self.v_scale, self.stored)

    @property
    def stored(self) -> tuple[str, ...]:
        """What the memory of K and of V holds."""
        return _check.kv_dtypes(self.kv_cache_dtype, self.dtype)

    @property
    def shapes(self) -> tuple[tuple[int, int, int, int], ...]:
        """Of K's and of V's memory: [N, Hkv, B, width]."""
        pairs, heads, size = PAIRS[self.layout], (self.num_blocks, self.num_kv_heads), self.block_size
        widths = []
        for head_size in (self.head_size, self.head_size_v):
            k = -(-size // LANES) * LANES * -(-head_size // pairs) * pairs
            v = -(-size // pairs) * pairs * head_size
            widths.append(-(-max(k, v) // size))
        return tuple((*heads, size, width) for width in widths)

    def reader(self, isa: str = "auto") -> _dispatch.Isa:
        """The isa of that name, or the best one here, whose kernels read this layout. ValueError if none does."""
        resolved = _dispatch.resolve_isa(isa, self.dtype, self.head_size)
        others = _dispatch.isas() if isa == "auto" else ()
        for row in (resolved, *others):
            if row.supported and layout_of(row.index, self.dtype) == self.layout:
                return row
        who = "no isa of this machine reads" if isa == "auto" else f"isa {resolved.name} does not read"
        raise ValueError(f"layout: {who} {self.dtype} in {self.layout}; cpu_attn.convert does")

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> CacheDescriptor:
        """ValueError for what is no JSON object, and for a field that is missing, unknown or out of range."""
        fields = json.loads(text)
        if not isinstance(fields, dict):
            raise ValueError(f"descriptor: expected an object, got {type(fields).__name__}")
        if fields.get("version", VERSION) != VERSION:  # whose fields may be others
            raise ValueError(f"version: {fields['version']!r}, this library knows {VERSION}")
        known = [field.name for field in dataclasses.fields(cls)]
        for name in known:
            if name not in fields:
                raise ValueError(f"{name}: the descriptor does not say it")
        for name in fields:
            if name not in known:
                raise ValueError(f"{name}: no field of a descriptor of version {VERSION}")
        try:
            return cls(**fields)
        except TypeError as error:
            raise ValueError(str(error)) from None


@dataclass(frozen=True, eq=False)
class StoredCache:
    """Memory and what it is, whether or not an isa of this machine reads it: what a file holds, and what
    :func:`convert` takes. Arrays as :meth:`PagedKVCache.open` wants them, and the same errors."""

    descriptor: CacheDescriptor
    key_cache: Memory
    value_cache: Memory

    def __post_init__(self) -> None:
        kinds = self.descriptor.stored
        caches = _check.pages((self.key_cache, self.value_cache), self.descriptor.shapes, kinds)
        for name, memory, kind in zip(("key_cache", "value_cache"), caches, kinds, strict=True):
            object.__setattr__(self, name, memory.view(_memory(kind)))

    def save(self, file: str | os.PathLike[str]) -> None:
        """As safetensors: ``key_cache``, ``value_cache``, and the descriptor as metadata ``cpu_attn``."""
        arrays = {name: np.ascontiguousarray(getattr(self, name)) for name in ("key_cache", "value_cache")}
        _safetensors().numpy.save_file(arrays, file, metadata={"cpu_attn": self.descriptor.to_json()})

    @classmethod
    def load(cls, file: str | os.PathLike[str]) -> StoredCache:
        """What :meth:`save` wrote, here or elsewhere. ValueError for a file that is something else."""
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
            _tensor(file, name, _memory(kind))
            for name, kind in zip(("key_cache", "value_cache"), descriptor.stored, strict=True)
        )
        return cls(descriptor, key_cache, value_cache)


def _memory(kind: str) -> np.dtype[Any]:
    return DTYPES[_check.memory(kind)[0]]


def _tensor(file: str | os.PathLike[str], name: str, dtype: np.dtype[Any]) -> Memory:
    """A tensor of a file that safetensors has found to be sound; its NumPy bridge knows no float8."""
    with open(file, "rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        tensor = json.loads(opened.read(size))[name]
    if tensor["dtype"] != SAFETENSORS[dtype.name]:
        raise ValueError(f"{name}: holds {tensor['dtype']}, the descriptor says {dtype.name}")
    first, end = tensor["data_offsets"]
    array = aligned_zeros((end - first,), np.dtype(np.uint8))
    with open(file, "rb") as opened:
        opened.seek(8 + size + first)
        opened.readinto(array.data)
    found: Memory = array.view(dtype).reshape(tensor["shape"])
    return found


def aligned_zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Memory:
    """Zeros from the beginning of a cache line on: NumPy's own begin 16 bytes into one, which costs a cache write 8 %
    of its speed in bfloat16, 20 % in float32 (native/kernel/write.inc)."""
    size = prod(shape) * dtype.itemsize
    memory = np.zeros(size + 64, np.uint8)
    return memory[-memory.ctypes.data % 64 :][:size].view(dtype).reshape(shape)


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.numpy
    except ImportError as error:
        raise UnavailableError(f"files need safetensors: pip install 'cpu-attn[safetensors]' ({error})") from None
    return safetensors


# ---- elements in and out of a layout ----


def unpack(memory: Memory, layout: str, head_size: int, value: bool) -> Memory:
    """[N, Hkv, B, head_size] of memory [N, Hkv, B, width], as it is stored."""
    n, heads, size, _ = memory.shape
    pairs, flat = PAIRS[layout], memory.reshape(n, heads, -1)
    if value:
        rows = -(-size // pairs)
        v = flat[..., : rows * pairs * head_size].reshape(n, heads, rows, head_size, pairs)
        elements: Memory = v.transpose(0, 1, 2, 4, 3).reshape(n, heads, -1, head_size)[:, :, :size]
        return elements
    groups, words = -(-size // LANES), -(-head_size // pairs)
    k = flat[..., : groups * words * LANES * pairs].reshape(n, heads, groups, words, LANES, pairs)
    elements = k.transpose(0, 1, 2, 4, 3, 5).reshape(n, heads, groups * LANES, -1)[:, :, :size, :head_size]
    return elements


def pack(elements: Memory, layout: str, value: bool, memory: Memory) -> None:
    """The way back, into memory that is zero: lanes and an odd last d that belong to nobody stay so."""
    n, heads, size, head_size = elements.shape
    pairs, flat = PAIRS[layout], memory.reshape(n, heads, -1)
    if value:
        v = _padded(elements, -(-size // pairs) * pairs, head_size).reshape(n, heads, -1, pairs, head_size)
        packed = v.transpose(0, 1, 2, 4, 3).reshape(n, heads, -1)
    else:
        groups, words = -(-size // LANES), -(-head_size // pairs)
        k = _padded(elements, groups * LANES, words * pairs).reshape(n, heads, groups, LANES, words, pairs)
        packed = k.transpose(0, 1, 2, 4, 3, 5).reshape(n, heads, -1)
    flat[..., : packed.shape[2]] = packed


def _padded(elements: Memory, tokens: int, size: int) -> Memory:
    n, heads, *rest = elements.shape
    wide = np.zeros((n, heads, tokens, size), elements.dtype)
    wide[:, :, : rest[0], : rest[1]] = elements
    return wide


# ---- conversion ----


def convert(
    cache: PagedKVCache | StoredCache,
    *,
    isa: str = "auto",
    dtype: Any = None,
    kv_cache_dtype: str | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
) -> PagedKVCache:
    """A new cache of the same tokens in the same slots, for another isa, dtype or quantisation.

    cache: one of this machine, or a StoredCache of any. dtype, kv_cache_dtype, k_scale, v_scale: as in
    :class:`PagedKVCache`; what is not said stays as it is (the scales are 1 where the new cache is not quantised).
    Numbers that the new cache can hold are exact; others are rounded once, to nearest even. Into a quantised cache they
    go as :func:`reshape_and_cache` would write their float32: divided by the scale, saturating. Needs memory for the
    new cache and a few megabytes. Raises ValueError or TypeError for what PagedKVCache refuses.
    """
    from cpu_attn.cache import PagedKVCache

    old = cache.descriptor
    name = old.dtype if dtype is None else dtype_name(dtype)
    if kv_cache_dtype is None:
        kv_cache_dtype = "auto" if old.stored == (old.dtype, old.dtype) else old.kv_cache_dtype
    fp8 = [kind.startswith("fp8") for kind in _check.kv_dtypes(kv_cache_dtype, name)]
    new = PagedKVCache(
        old.num_blocks,
        old.block_size,
        old.num_kv_heads,
        old.head_size,
        name,
        isa,
        head_size_v=old.head_size_v,
        kv_cache_dtype=kv_cache_dtype,
        k_scale=k_scale if k_scale is not None else old.k_scale if fp8[0] else 1.0,
        v_scale=v_scale if v_scale is not None else old.v_scale if fp8[1] else 1.0,
    )
    to = new.descriptor
    _convert_pages(cache.key_cache, new.key_cache, (old, to), old.head_size, False, (old.k_scale, to.k_scale))
    _convert_pages(cache.value_cache, new.value_cache, (old, to), old.head_size_v, True, (old.v_scale, to.v_scale))
    return new


def _convert_pages(
    source: Memory,
    target: Memory,
    descriptors: tuple[CacheDescriptor, CacheDescriptor],
    head_size: int,
    value: bool,
    scales: tuple[float, float],
) -> None:
    old, new = descriptors
    kinds = old.stored[value], new.stored[value]
    source, target = source.view(_memory(kinds[0])), target.view(_memory(kinds[1]))
    as_it_is = (kinds[0], scales[0]) == (kinds[1], scales[1])
    step = max(1, CHUNK // max(1, old.num_kv_heads * old.block_size * head_size))
    with np.errstate(all="ignore"):
        for first in range(0, old.num_blocks, step):
            blocks = slice(first, first + step)
            elements = unpack(source[blocks], old.layout, head_size, value)
            if not as_it_is:
                elements = _quantised(elements.astype(np.float64) * _scale(scales[0]), new, kinds[1], _scale(scales[1]))
            pack(elements, new.layout, value, target[blocks])


def _scale(x: float) -> float:
    """As C takes it: a float32."""
    return float(np.float32(x))


def _quantised(numbers: NDArray[np.float64], to: CacheDescriptor, kind: str, scale: float) -> Memory:
    dtype = _memory(kind)
    if kind == to.dtype:
        return _round_once(numbers, dtype)
    most = float(ml_dtypes.finfo(dtype).max)
    divided = numbers.astype(np.float32) / np.float32(scale)
    clipped: Memory = np.clip(divided, -most, most)
    return clipped.astype(dtype)


def _round_once(numbers: NDArray[np.float64], dtype: np.dtype[Any]) -> Memory:
    """ml_dtypes takes doubles by way of float32; so they go there rounded to odd, which leaves the last rounding to the
    second step (Boldo and Melquiond, "When double rounding is odd")."""
    if dtype.kind == "f" and dtype.itemsize <= 8 and dtype != DTYPES["bfloat16"]:
        return numbers.astype(dtype)
    single = numbers.astype(np.float32)
    bits = single.view(np.uint32)
    bits -= np.abs(single) > np.abs(numbers)
    bits |= (single != numbers) & ~np.isnan(numbers)
    return single.astype(dtype)
