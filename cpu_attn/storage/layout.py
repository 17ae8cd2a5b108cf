# SPDX-License-Identifier: Apache-2.0
"""This module moves elements and their scales into and out of the layouts of a cache's blocks, in NumPy."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import numpy as np

from cpu_attn._dtypes import FORMATS, KVFormat, is_scaled
from cpu_attn.storage.memory import Memory

# This says how many neighbours (of d in K, of tokens in V) lie side by side, as native/cpu_attn.h describes it.
PAIRS = {"lanes-v2": 1, "pairs-v1": 2}
PLAIN = ("HND", "NHD")  # plain rows, which other libraries have, too
LANES = 16  # tokens that lie together: where these divide a block, its width does not depend on its size
TOGETHER = 128  # elements of fewer than 8 bits that are packed together, 4 of their bits in 64 bytes


class Form(NamedTuple):
    """Says how a group of 16 tokens of one kv head lies, K or V: ca_group_form of cache/layout.h. Groups follow one
    another. Behind the groups of a block lie the scales of integers, [groups][scales][16] in bfloat16."""

    layout: str
    kind: str
    head_size: int
    value: bool

    @property
    def format(self) -> KVFormat | None:
        """Gives the row of FORMATS; None where elements are those of the kernels."""
        return FORMATS.get(self.kind)

    @property
    def packed(self) -> int:
        """Gives the bits of an element that is less than a byte, else 0."""
        return self.format.bits if self.format and self.format.bits < 8 else 0

    @property
    def pairs(self) -> int:
        """Says how many neighbours lie side by side. Bytes lie in pairs in every layout."""
        return 2 if self.format else PAIRS[self.layout]

    @property
    def axes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Gives the axes of a group, and the order in which these make tokens of it, each with its elements in a
        row."""
        if self.value:
            return (LANES // self.pairs, self.head_size, self.pairs), (0, 2, 1)
        return (-(-self.head_size // self.pairs), LANES, self.pairs), (1, 0, 2)

    @property
    def elements(self) -> int:
        n = prod(self.axes[0])
        return -(-n // TOGETHER) * TOGETHER if self.packed else n

    @property
    def places(self) -> int:
        """Says how many items of the memory's dtype a group takes."""
        return self.format.places(self.elements) if self.format else self.elements

    @property
    def scale_elements(self) -> int:
        """Says how many elements of a token share a scale."""
        return (self.format.shared if self.format else 0) or self.head_size

    @property
    def scales(self) -> int:
        """Says how many scales a token has."""
        return -(-self.head_size // self.scale_elements) if is_scaled(self.kind) else 0


def groups_of(block_size: int) -> int:
    return -(-block_size // LANES)


def _by_head(memory: Memory, layout: str) -> Memory:
    """Gives plain rows as [N, Hkv, B, D], in the same memory."""
    return memory.swapaxes(1, 2) if layout == "NHD" else memory


def unpack(memory: Memory, form: Form) -> tuple[Memory, Memory]:
    """Reads elements [N, Hkv, B, head_size] and scales [N, Hkv, B, form.scales] of memory [N, Hkv, B, width], as they
    are stored: integers as bytes of their own, their scales as the bits of bfloat16."""
    if form.layout in PLAIN:
        rows = _by_head(memory, form.layout)
        return rows, np.zeros((*rows.shape[:3], 0), np.uint16)
    n, heads, size, _ = memory.shape
    groups, (axes, order) = groups_of(size), form.axes
    flat, end = memory.reshape(n, heads, -1), groups * form.places
    x = flat[..., :end]
    if form.packed:
        x = _bytes_of_bits(x.reshape(n, heads, -1, TOGETHER * form.packed // 8), form.packed)
    x = x.reshape(n, heads, groups, -1)[..., : prod(axes)].reshape(n, heads, groups, *axes)
    elements = x.transpose(0, 1, 2, *(i + 3 for i in order)).reshape(n, heads, groups * LANES, -1)
    s = flat[..., end : end + groups * form.scales * LANES * 2].view(np.uint8).view(np.uint16)
    scales = s.reshape(n, heads, groups, form.scales, LANES).swapaxes(3, 4)
    scales = scales.reshape(n, heads, groups * LANES, form.scales)
    return elements[:, :, :size, : form.head_size], scales[:, :, :size]


def pack(elements: Memory, scales: Memory, form: Form, memory: Memory) -> None:
    """Writes what :func:`unpack` reads into memory that is zero. Lanes that have no token, and a last d that an odd
    head size lacks, stay zero."""
    if form.layout in PLAIN:
        _by_head(memory, form.layout)[...] = elements
        return
    n, heads, size, _ = memory.shape
    groups, (axes, order) = groups_of(size), form.axes
    flat, end = memory.reshape(n, heads, -1), groups * form.places
    x = padded(elements, groups * LANES, prod(axes) // LANES)
    x = x.reshape(n, heads, groups, *(axes[i] for i in order)).transpose(0, 1, 2, *(i + 3 for i in order))
    if form.packed:
        x = padded(x.reshape(n, heads, groups, -1), groups, form.elements)
        x = _bits_of_bytes(x.reshape(n, heads, -1, TOGETHER), form.packed)
    flat[..., :end] = x.reshape(n, heads, -1)
    if form.scales:
        s = padded(scales, groups * LANES, form.scales).reshape(n, heads, groups, LANES, form.scales)
        s = np.ascontiguousarray(s.swapaxes(3, 4)).reshape(n, heads, -1).view(np.uint8)
        flat[..., end : end + s.shape[2]] = s


def _places(bits: int) -> list[int]:
    """Says where the bits of an element from the fifth on are in its byte: the last one is the sign."""
    return [*range(4, bits - 1), 7][: bits - 4]


def _bytes_of_bits(x: Memory, bits: int) -> Memory:
    """Gives [..., 128] elements of [..., 16 * bits] bytes, as cache/layout.h packs them."""
    low = (x[..., None, :64] >> np.array([[0], [4]], np.uint8) & 15).reshape(*x.shape[:-1], TOGETHER)
    for plane, place in enumerate(_places(bits), 4):
        high = x[..., None, 16 * plane : 16 * plane + 16] >> np.arange(8, dtype=np.uint8)[:, None] & 1
        low |= high.reshape(low.shape) << np.uint8(place)
    return low


def _bits_of_bytes(x: Memory, bits: int) -> Memory:
    """Does the reverse of :func:`_bytes_of_bits`."""
    parts = [x[..., :64] & 15 | x[..., 64:] << 4]
    for place in _places(bits):
        high = (x >> np.uint8(place) & 1).reshape(*x.shape[:-1], 8, 16)
        parts.append(np.bitwise_or.reduce(high << np.arange(8, dtype=np.uint8)[:, None], axis=-2))
    return np.concatenate(parts, axis=-1)


def padded(x: Memory, tokens: int, size: int) -> Memory:
    n, heads, *rest = x.shape
    wide = np.zeros((n, heads, tokens, size), x.dtype)
    wide[:, :, : rest[0], : rest[1]] = x
    return wide
