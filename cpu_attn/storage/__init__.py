# SPDX-License-Identifier: Apache-2.0
"""This package keeps caches: memory and what lies in it, whichever machine reads it.

Each module imports only those above it:

memory      how memory of caches is made, and whole blocks of it
layout      elements and scales in and out of a layout
descriptor  :class:`CacheDescriptor`: what lies in the memory, as data
files       :class:`StoredCache`: memory and descriptor, and as safetensors
cache       :class:`PagedKVCache`: the friendly layer over the calls
conversion  :func:`convert`: to another layout, dtype or quantisation
"""

from cpu_attn.storage.cache import PagedKVCache
from cpu_attn.storage.conversion import convert
from cpu_attn.storage.descriptor import CacheDescriptor
from cpu_attn.storage.files import StoredCache
from cpu_attn.storage.layout import LANES
from cpu_attn.storage.memory import lined_up, move_blocks

__all__ = ["LANES", "CacheDescriptor", "PagedKVCache", "StoredCache", "convert", "lined_up", "move_blocks"]
