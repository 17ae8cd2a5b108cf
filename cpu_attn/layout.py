# SPDX-License-Identifier: Apache-2.0
"""What lies in a cache's memory, as data: descriptors, files, and conversion from any layout to any other in NumPy."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import mmap
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cpu_attn import _check, _dispatch
from cpu_attn._dtypes import DTYPE_CODES, DTYPES, dtype_name
from cpu_attn._errors import UnavailableError
from cpu_attn._native import ffi, lib

if TYPE_CHECKING:
    from cpu_attn.cache import PagedKVCache

VERSION = 1
LAYOUT_NAMES = {lib.CA_LAYOUT_LANES: "lanes-v2", lib.CA_LAYOUT_PAIRS: "pairs-v1"}
# As native/cpu_attn.h describes them: so many neighbours (of d in K, of tokens in V) lie side by side.
PAIRS = {"lanes-v2": 1, "pairs-v1": 2}
PLAIN = ("HND", "NHD")  # rows as anybody has them
LANES = 16  # tokens that lie together: where these divide a block, its width does not depend on its size
HALVES = 128  # elements of int4 that share 64 bytes
# What integers mean before their scale, by how they are stored: sign and magnitude, and plus 8.
WHOLE = {"int8": np.append(np.arange(128.0), 0 - np.arange(128.0)), "int4": np.arange(16.0) - 8}
CHUNK = 1 << 20  # elements converted at a time
HUGE_PAGE = 2 << 20
SAFETENSORS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3"}
SAFETENSORS |= {"float8_e5m2": "F8_E5M2", "int8": "I8", "uint8": "U8"}
Memory = np.ndarray[Any, Any]


@cache
def layout_of(isa: int, dtype: str) -> str | None:
    """What an isa's kernels read; None where it has none for the dtype."""
    kernel = ffi.new("ca_kernel_info *")
    return LAYOUT_NAMES[kernel.layout] if lib.ca_isa_kernel(isa, DTYPE_CODES[dtype], kernel) else None


@dataclass(frozen=True, kw_only=True)
class CacheDescriptor:
    """All that it takes to read the memory of a cache, on this machine or another.

    layout: ``lanes-v2`` or ``pairs-v1`` (native/cpu_attn.h), or ``HND`` or ``NHD``, plain rows; isa: whose kernels
    wrote it, which may be one that this machine lacks: what counts is the layout. The other fields are those of
    :class:`PagedKVCache`. Raises ValueError or TypeError that names the field, for what no cache can be.
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
        if not isinstance(self.layout, str) or self.layout not in (*PAIRS, *PLAIN):
            raise ValueError(f"layout: {self.layout!r} is none of {', '.join((*PAIRS, *PLAIN))}")
        if not isinstance(self.isa, str):
            raise TypeError(f"isa: expected a name, got {self.isa!r}")
        if not isinstance(self.dtype, str) or self.dtype != dtype_name(self.dtype):
            raise ValueError(f"dtype: {self.dtype!r} is none of {', '.join(_check.FLOATS)}")
        for name in ("num_blocks", "block_size", "num_kv_heads", "head_size", "head_size_v"):
            most = _check.MAX_SIZE if "head" in name else _check.INT32_MAX
            object.__setattr__(self, name, _check.integer(name, getattr(self, name), name != "num_blocks", most))
        for name, scale in zip(
            ("k_scale", "v_scale"), _check.scales(self.k_scale, self.v_scale, self.stored), strict=True
        ):
            object.__setattr__(self, name, scale)
        if self.layout in PLAIN and (kinds := [kind for kind in self.stored if kind in WHOLE]):
            raise ValueError(f"layout: {self.layout!r} holds no {kinds[0]}")

    @property
    def kv_cache_layout(self) -> str:
        """The layout's name to the calls: ``packed``, ``HND`` or ``NHD``."""
        return self.layout if self.layout in PLAIN else "packed"

    @property
    def stored(self) -> tuple[str, ...]:
        """What the memory of K and of V holds."""
        return _check.kv_dtypes(self.kv_cache_dtype, self.dtype)

    @property
    def shapes(self) -> tuple[tuple[int, int, int, int], ...]:
        """Of K's and of V's memory: [N, Hkv, B, width], of NHD [N, B, Hkv, D]. Packed room for K is room for V of that
        size, too."""
        size, widths = self.block_size, [self.head_size, self.head_size_v]
        if self.layout not in PLAIN:
            forms = [Form(self.layout, kind, n, False) for n, kind in zip(widths, self.stored, strict=True)]
            widths = [-(-_groups(size) * (form.places + form.scales * LANES * 2) // size) for form in forms]
        axes = _check.cache_sizes((self.num_blocks, self.num_kv_heads, size), self.layout)
        return tuple((*axes, width) for width in widths)

    def reader(self, isa: str = "auto") -> _dispatch.Isa:
        """The isa of that name, or the best one here, whose kernels read this layout. ValueError if none does."""
        resolved = _dispatch.resolve_isa(isa, self.dtype, self.head_size)
        others: Iterable[_dispatch.Isa] = _dispatch.automatic(self.dtype) if isa == "auto" else ()
        for row in (resolved, *others):
            reads = layout_of(row.index, self.dtype)
            if reads == self.layout or (reads and self.layout in PLAIN):
                return row
        who = "no isa of this machine reads" if isa == "auto" else f"isa {resolved.name} does not read"
        raise ValueError(f"layout: {who} {self.dtype} in {self.layout}; cpu_attn.convert does")

    def to_json(self) -> str:
        """An object of its fields, which :meth:`from_json` reads."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> CacheDescriptor:
        """ValueError for what is no JSON object, and for a field that is missing, unknown or out of range."""
        try:
            fields = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"descriptor: no JSON: {error}") from None
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
        _check.instance("descriptor", self.descriptor, CacheDescriptor)
        kinds = self.descriptor.stored
        shapes, layout = self.descriptor.shapes, self.descriptor.kv_cache_layout
        caches = _check.pages((self.key_cache, self.value_cache), shapes, kinds, layout)
        for name, memory, kind in zip(("key_cache", "value_cache"), caches, kinds, strict=True):
            object.__setattr__(self, name, memory.view(memory_dtype(kind)))

    def save(self, file: str | os.PathLike[str]) -> None:
        """As safetensors: ``key_cache``, ``value_cache``, and the descriptor as metadata ``cpu_attn``. Raises OSError
        for a file that cannot be written, UnavailableError without safetensors."""
        safetensors = _safetensors()
        arrays = {name: np.ascontiguousarray(getattr(self, name)) for name in ("key_cache", "value_cache")}
        try:
            safetensors.numpy.save_file(arrays, file, metadata={"cpu_attn": self.descriptor.to_json()})
        except safetensors.SafetensorError as error:
            raise OSError(f"{file}: {error}") from None

    @classmethod
    def load(cls, file: str | os.PathLike[str]) -> StoredCache:
        """What :meth:`save` wrote, here or elsewhere. Raises ValueError or TypeError for a file that is something else,
        OSError for one that cannot be read, UnavailableError without safetensors."""
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


def memory_dtype(kind: str) -> np.dtype[Any]:
    """Of memory that holds ``kind``."""
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


def lined_up(seq_lens: Memory, block_size: int) -> tuple[int, Memory, Memory]:
    """Pages for the tokens of some requests, one after the other: how many, block_table int32 [R, M] and slot_mapping
    int64 [T]."""
    lens = seq_lens.astype(np.int64)
    blocks = -(-lens // block_size)
    first = np.cumsum(blocks) - blocks
    offsets = np.arange(lens.sum()) - np.repeat(np.cumsum(lens) - lens, lens)
    table = (first[:, None] + np.arange(blocks.max(initial=0))).astype(np.int32)
    return int(blocks.sum()), table, np.repeat(first, lens) * block_size + offsets


def move_blocks(sources: Sequence[Memory], destinations: Sequence[Memory], moves: tuple[Any, Any]) -> None:
    """Blocks of K and V; all are read before one is written, which V as a view of K needs."""
    from_blocks, to_blocks = moves
    found = [source[from_blocks] for source in sources]
    for destination, blocks in zip(destinations, found, strict=True):
        destination[to_blocks] = blocks


def aligned_zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Memory:
    """Zeros from the beginning of a cache line on: NumPy's own begin 16 bytes into one, which costs a cache write 8 %
    of its speed in bfloat16, 20 % in float32 (kernel/cache_write/write.inc). In huge pages where the system has them: 1
    to 4 % of decode's speed (Cascade Lake)."""
    size, align = prod(shape) * dtype.itemsize, 64
    if size >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        align = HUGE_PAGE
        try:
            pages = mmap.mmap(-1, size + align, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError):
            raise MemoryError(f"no memory for {size} bytes") from None
        with contextlib.suppress(OSError):  # of a kernel that was built without them
            pages.madvise(mmap.MADV_HUGEPAGE)
        memory = np.frombuffer(pages, np.uint8)
    else:
        memory = np.zeros(size + align, np.uint8)
    return memory[-memory.ctypes.data % align :][:size].view(dtype).reshape(shape)


def aligned_copy(x: Memory) -> Memory:
    copied = aligned_zeros(x.shape, x.dtype)
    copied[...] = x
    return copied


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.numpy
    except ImportError as error:
        how = "pip install '.[safetensors]' in a checkout of cpu-attn"
        raise UnavailableError(f"files need safetensors: {how} ({error})") from None
    return safetensors


# ---- elements and their scales in and out of a layout ----


@dataclass(frozen=True)
class Form:
    """How 16 tokens of one kv head lie, K or V: ca_group_form of cache/layout.h. Groups follow one another; behind
    them, of integers, their scales [groups][scales][16] in bfloat16."""

    layout: str
    kind: str
    head_size: int
    value: bool

    @property
    def pairs(self) -> int:
        """Bytes lie in pairs in every layout."""
        return PAIRS[self.layout] if self.kind in _check.FLOATS else 2

    @property
    def axes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of a group, and their order that makes tokens of it, and a group of tokens."""
        if self.value:
            return (LANES // self.pairs, self.head_size, self.pairs), (0, 2, 1)
        return (-(-self.head_size // self.pairs), LANES, self.pairs), (1, 0, 2)

    @property
    def elements(self) -> int:
        n = prod(self.axes[0])
        return -(-n // HALVES) * HALVES if self.kind == "int4" else n

    @property
    def places(self) -> int:
        """Of the memory's dtype."""
        return self.elements // 2 if self.kind == "int4" else self.elements

    @property
    def scale_elements(self) -> int:
        """Of a token, that share a scale."""
        return 32 if self.kind == "int4" else self.head_size

    @property
    def scales(self) -> int:
        """Of a token."""
        return -(-self.head_size // self.scale_elements) if self.kind in WHOLE else 0


def _groups(block_size: int) -> int:
    return -(-block_size // LANES)


def _by_head(memory: Memory, layout: str) -> Memory:
    """[N, Hkv, B, D] of plain rows, in the same memory."""
    return memory.swapaxes(1, 2) if layout == "NHD" else memory


def unpack(memory: Memory, form: Form) -> tuple[Memory, Memory]:
    """Elements [N, Hkv, B, head_size] and scales [N, Hkv, B, form.scales] of memory [N, Hkv, B, width], as they are
    stored: integers as bytes of their own, their scales as the bits of bfloat16."""
    if form.layout in PLAIN:
        rows = _by_head(memory, form.layout)
        return rows, np.zeros((*rows.shape[:3], 0), np.uint16)
    n, heads, size, _ = memory.shape
    groups, (axes, order) = _groups(size), form.axes
    flat, end = memory.reshape(n, heads, -1), groups * form.places
    x = flat[..., :end]
    if form.kind == "int4":
        x = x.reshape(n, heads, -1, 1, HALVES // 2) >> np.array([[0], [4]], np.uint8) & 15
    x = x.reshape(n, heads, groups, -1)[..., : prod(axes)].reshape(n, heads, groups, *axes)
    elements = x.transpose(0, 1, 2, *(i + 3 for i in order)).reshape(n, heads, groups * LANES, -1)
    s = flat[..., end : end + groups * form.scales * LANES * 2].view(np.uint8).view(np.uint16)
    scales = s.reshape(n, heads, groups, form.scales, LANES).swapaxes(3, 4)
    scales = scales.reshape(n, heads, groups * LANES, form.scales)
    return elements[:, :, :size, : form.head_size], scales[:, :, :size]


def pack(elements: Memory, scales: Memory, form: Form, memory: Memory) -> None:
    """The way back, into memory that is zero: lanes and an odd last d that belong to nobody stay so."""
    if form.layout in PLAIN:
        _by_head(memory, form.layout)[...] = elements
        return
    n, heads, size, _ = memory.shape
    groups, (axes, order) = _groups(size), form.axes
    flat, end = memory.reshape(n, heads, -1), groups * form.places
    x = _padded(elements, groups * LANES, prod(axes) // LANES)
    x = x.reshape(n, heads, groups, *(axes[i] for i in order)).transpose(0, 1, 2, *(i + 3 for i in order))
    if form.kind == "int4":
        x = _padded(x.reshape(n, heads, groups, -1), groups, form.elements)
        x = x.reshape(n, heads, -1, 2, HALVES // 2)
        x = x[..., 0, :] | x[..., 1, :] << 4
    flat[..., :end] = x.reshape(n, heads, -1)
    if form.scales:
        s = _padded(scales, groups * LANES, form.scales).reshape(n, heads, groups, LANES, form.scales)
        s = np.ascontiguousarray(s.swapaxes(3, 4)).reshape(n, heads, -1).view(np.uint8)
        flat[..., end : end + s.shape[2]] = s


def _padded(x: Memory, tokens: int, size: int) -> Memory:
    n, heads, *rest = x.shape
    wide = np.zeros((n, heads, tokens, size), x.dtype)
    wide[:, :, : rest[0], : rest[1]] = x
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
    kv_cache_layout: str | None = None,
) -> PagedKVCache:
    """A new cache of the same tokens in the same slots, for another isa, dtype, quantisation or layout.

    cache: one of this machine, or a StoredCache of any. dtype, kv_cache_dtype, k_scale, v_scale, kv_cache_layout: as in
    :class:`PagedKVCache`; what is not said stays as it is (k_scale and v_scale are 1 where the new cache is not fp8).
    What is of the same kind and scale keeps its bits, scales of integers included. Else numbers that the new cache can
    hold are exact, others are rounded once, to nearest even; into a quantised cache they go as
    :func:`reshape_and_cache` would write their float32. Needs memory for the new cache and a few megabytes. Raises
    ValueError or TypeError for what PagedKVCache refuses.
    """
    from cpu_attn.cache import PagedKVCache

    _check.instance("cache", cache, PagedKVCache, StoredCache)
    old = cache.descriptor
    name = old.dtype if dtype is None else dtype_name(dtype)
    if kv_cache_dtype is None:
        kv_cache_dtype = "/".join("auto" if kv == old.dtype else kv for kv in old.kv_cache_dtype.split("/"))
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
        kv_cache_layout=old.kv_cache_layout if kv_cache_layout is None else kv_cache_layout,
    )
    for value, (source, target) in enumerate(
        ((cache.key_cache, new.key_cache), (cache.value_cache, new.value_cache)),
    ):
        _convert_pages(source, target, old, new.descriptor, bool(value))
    return new


def _convert_pages(source: Memory, target: Memory, old: CacheDescriptor, new: CacheDescriptor, value: bool) -> None:
    head_size = old.head_size_v if value else old.head_size
    forms = [Form(d.layout, d.stored[value], head_size, value) for d in (old, new)]
    scales = [_scale(d.v_scale if value else d.k_scale) for d in (old, new)]
    source, target = (x.view(memory_dtype(form.kind)) for x, form in zip((source, target), forms, strict=True))
    as_it_is = (forms[0].kind, scales[0]) == (forms[1].kind, scales[1])
    step = max(1, CHUNK // (old.num_kv_heads * _groups(old.block_size) * LANES * head_size))
    with np.errstate(all="ignore"):
        for first in range(0, old.num_blocks, step):
            blocks = slice(first, first + step)
            stored = unpack(source[blocks], forms[0])
            if not as_it_is:
                stored = _stored(_numbers(*stored, forms[0], scales[0]), new, forms[1], scales[1])
            pack(*stored, forms[1], target[blocks])


def _scale(x: float) -> float:
    """As C takes it: a float32."""
    return float(np.float32(x))


def _numbers(elements: Memory, scales: Memory, form: Form, scale: float) -> NDArray[np.float64]:
    """What elements mean, exactly; a NaN scale makes all of them NaN."""
    if not form.scales:
        return elements.astype(np.float64) * scale
    each = np.repeat(_widened(scales), form.scale_elements, axis=-1)[..., : form.head_size]
    numbers: NDArray[np.float64] = WHOLE[form.kind][elements] * each
    return numbers


def _widened(bits: Memory) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _stored(numbers: NDArray[np.float64], to: CacheDescriptor, form: Form, scale: float) -> tuple[Memory, Memory]:
    """Elements and scales, as pack wants them."""
    dtype, none = memory_dtype(form.kind), np.zeros((*numbers.shape[:3], 0), np.uint16)
    if form.scales:
        return _integers(numbers.astype(np.float32), form)
    if form.kind == to.dtype:
        return _round_once(numbers, dtype), none
    most = float(ml_dtypes.finfo(dtype).max)
    divided = numbers.astype(np.float32) / np.float32(scale)
    return np.clip(divided, -most, most).astype(dtype), none


def _integers(x: NDArray[np.float32], form: Form) -> tuple[Memory, Memory]:
    """As kernel/kv_formats/narrow.inc quantises: the largest magnitude over the largest integer, rounded up to bfloat16,
    is the scale; x times its reciprocal, where that is a float, goes to the nearest even integer."""
    n, heads, size, _ = x.shape
    x = _padded(x, size, form.scales * form.scale_elements).reshape(n, heads, size, form.scales, -1)
    top = np.abs(x).max(axis=-1)
    up = (top / np.float32(WHOLE[form.kind].max())).view(np.uint32) + np.uint32(0xFFFF) >> 16
    scales = np.where(np.isfinite(top), up, 0x7FC0).astype(np.uint16)
    over = _widened(np.where(scales == 0, 0x3F80, scales))[..., None]
    whole = np.rint(np.where(over >= 2.0**-126, x * (1 / over), x / over))
    whole = np.where(np.isnan(over), 0, whole).reshape(n, heads, size, -1)[..., : form.head_size]
    stored = whole + 8 if form.kind == "int4" else np.where(whole < 0, 128 - whole, whole)
    return stored.astype(np.uint8), scales


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
