# SPDX-License-Identifier: Apache-2.0
"""This module describes what lies in a cache's memory, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from cpu_attn import _check, _dispatch
from cpu_attn._dtypes import DTYPE_CODES, is_scaled
from cpu_attn._native import ffi, lib
from cpu_attn.storage.layout import LANES, PAIRS, PLAIN, Form, groups_of

VERSION = 2  # 1 had no kv_cache_rotation
LAYOUT_NAMES = {lib.CA_LAYOUT_LANES: "lanes-v2", lib.CA_LAYOUT_PAIRS: "pairs-v1"}


@cache
def layout_of(isa: int, dtype: str) -> str | None:
    """Gives the layout that an isa's kernels read; None where it has none for the dtype."""
    kernel = ffi.new("ca_kernel_info *")
    return LAYOUT_NAMES[kernel.layout] if lib.ca_isa_kernel(isa, DTYPE_CODES[dtype], kernel) else None


@dataclass(frozen=True, kw_only=True)
class CacheDescriptor:
    """Says all that it takes to read the memory of a cache, on this machine or another, as data.

    Args:
        version: of the descriptor; 2.
        layout: what lies in a block: ``lanes-v2`` or ``pairs-v1`` (docs/reference/cache_memory.md), or ``HND`` or
            ``NHD``, plain rows.
        dtype: of keys and values: ``float32``, ``float16`` or ``bfloat16``.
        kv_cache_dtype: as in :class:`PagedKVCache`.
        num_blocks: N.
        block_size: B.
        num_kv_heads: Hkv.
        head_size: D.
        head_size_v: Dv.
        k_scale: what keys were divided by; 1 unless they are fp8.
        v_scale: what values were divided by; 1 unless they are fp8.
        isa: whose kernels wrote the memory, which may be an isa that this machine lacks: what counts is the layout.
        kv_cache_rotation: as in :class:`PagedKVCache`.

    Raises:
        ValueError: a field is out of range or a name is unknown; the error names the field.
        TypeError: a field has another type.

    Example:
        >>> from cpu_attn import CacheDescriptor, PagedKVCache
        >>> descriptor = PagedKVCache(4, 16, 2, 64, "float32").descriptor
        >>> descriptor.layout, descriptor.shapes[0]
        ('lanes-v2', (4, 2, 16, 64))
        >>> CacheDescriptor.from_json(descriptor.to_json()) == descriptor
        True
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
    kv_cache_rotation: str = "none"

    def __post_init__(self) -> None:
        if type(self.version) is not int or self.version != VERSION:
            raise ValueError(f"version: {self.version!r}, this library knows {VERSION}")
        _check.choice("layout", self.layout, (*PAIRS, *PLAIN))
        if not isinstance(self.isa, str):
            raise TypeError(f"isa: expected a name, got {self.isa!r}")
        _check.choice("dtype", self.dtype, _check.FLOATS)
        for name in ("num_blocks", "block_size", "num_kv_heads", "head_size", "head_size_v"):
            most = _check.MAX_SIZE if "head" in name else _check.INT32_MAX
            object.__setattr__(self, name, _check.integer(name, getattr(self, name), name != "num_blocks", most))
        for name, scale in zip(
            ("k_scale", "v_scale"), _check.scales(self.k_scale, self.v_scale, self.stored), strict=True
        ):
            object.__setattr__(self, name, scale)
        _check.kv_cache_rotation(self.kv_cache_rotation)
        if self.layout in PLAIN and (kinds := [kind for kind in self.stored if is_scaled(kind)]):
            raise ValueError(f"layout: {self.layout!r} holds no {kinds[0]}")

    @property
    def kv_cache_layout(self) -> str:
        """Gives the layout's name in the calls, which is ``packed``, ``HND`` or ``NHD``."""
        return self.layout if self.layout in PLAIN else "packed"

    @property
    def stored(self) -> tuple[str, ...]:
        """Says what the memory of K and of V holds."""
        return _check.kv_dtypes(self.kv_cache_dtype, self.dtype)

    @property
    def shapes(self) -> tuple[tuple[int, int, int, int], ...]:
        """Gives the shapes of K's and of V's memory, [N, Hkv, B, width]; in ``NHD`` [N, B, Hkv, D].

        Packed room for K is room for V of that size, too.
        """
        size, widths = self.block_size, [self.head_size, self.head_size_v]
        if self.layout not in PLAIN:
            forms = [Form(self.layout, kind, n, False) for n, kind in zip(widths, self.stored, strict=True)]
            widths = [-(-groups_of(size) * (form.places + form.scales * LANES * 2) // size) for form in forms]
        axes = _check.cache_sizes((self.num_blocks, self.num_kv_heads, size), self.layout)
        return tuple((*axes, width) for width in widths)

    def reader(self, isa: str = "auto") -> _dispatch.Isa:
        """Finds the isa of that name, or the best one here, whose kernels read this layout.

        Args:
            isa: a name, or ``auto``.

        Returns:
            A row of :func:`isas`.

        Raises:
            ValueError: no such isa reads the layout, or the name is unknown.
            UnavailableError: this machine does not have the isa.
        """
        resolved = _dispatch.resolve_isa(isa, self.dtype, self.head_size)
        others: Iterable[_dispatch.Isa] = _dispatch.automatic(self.dtype) if isa == "auto" else ()
        for row in (resolved, *others):
            reads = layout_of(row.index, self.dtype)
            if reads == self.layout or (reads and self.layout in PLAIN):
                return row
        who = "no isa of this machine reads" if isa == "auto" else f"isa {resolved.name} does not read"
        raise ValueError(f"layout: {who} {self.dtype} in {self.layout}; cpu_attn.storage.convert does")

    def to_json(self) -> str:
        """Writes the fields as a JSON object, which :meth:`from_json` reads."""
        import json  # imported in functions: it takes 1.5 ms, and few keep a cache

        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> CacheDescriptor:
        """Reads what :meth:`to_json` wrote, in this version or version 1.

        Args:
            text: a JSON object.

        Returns:
            The descriptor.

        Raises:
            ValueError: the text is no JSON object, or a field is missing, unknown or out of range.
        """
        import json

        try:
            fields = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"descriptor: no JSON: {error}") from None
        if not isinstance(fields, dict):
            raise ValueError(f"descriptor: expected an object, got {type(fields).__name__}")
        if fields.get("version") == 1 and "kv_cache_rotation" not in fields:
            fields = {**fields, "version": VERSION, "kv_cache_rotation": "none"}
        if fields.get("version", VERSION) != VERSION:  # another version may have other fields
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
