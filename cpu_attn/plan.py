# SPDX-License-Identifier: Apache-2.0
"""The plan of a step: made once by :func:`get_scheduler_metadata`, used by every layer."""

from __future__ import annotations

from typing import Any

import numpy as np

from cpu_attn import _check, _dispatch
from cpu_attn._arrays import CODES, DTYPES, described, dtype_name
from cpu_attn._native import ffi, lib


class SchedulerMetadata:
    """An immutable plan: lengths and masks as they were when it was made, cut into tasks for threads.

    Opaque to callers but for what describes it. Any number of threads may use one plan at once.
    """

    __slots__ = ("_info", "_pointer", "_shape", "dtype", "engine", "isa", "kv_cache_layout", "kv_dtype", "narrow")
    _info: Any
    _pointer: Any
    _shape: Any
    dtype: np.dtype[Any]
    engine: str
    isa: str
    kv_cache_layout: str
    kv_dtype: str
    narrow: bool

    def __init__(
        self, pointer: Any, shape: Any, dtype: str, kv_dtype: str, isa: str, engine: str, kv_cache_layout: str
    ) -> None:
        info, keep = ffi.new("ca_plan_info *"), object.__setattr__
        lib.ca_plan_describe(pointer, info)
        keep(self, "_pointer", pointer)
        keep(self, "_shape", shape)
        keep(self, "_info", info)
        keep(self, "dtype", DTYPES[dtype])
        keep(self, "kv_dtype", kv_dtype)
        keep(self, "narrow", kv_dtype != dtype)
        keep(self, "isa", isa)
        keep(self, "engine", engine)
        keep(self, "kv_cache_layout", kv_cache_layout)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"SchedulerMetadata is immutable: cannot set {name}")

    num_reqs = property(lambda self: int(self._shape.num_reqs), doc="R")
    num_heads = property(lambda self: int(self._shape.num_heads), doc="Hq")
    num_kv_heads = property(lambda self: int(self._shape.num_kv_heads), doc="Hkv")
    head_size = property(lambda self: int(self._shape.head_size), doc="D")
    head_size_v = property(lambda self: int(self._shape.head_size_v), doc="Dv")
    num_tokens = property(lambda self: int(self._info.num_tokens), doc="T, query tokens of the step")
    num_threads = property(lambda self: int(self._info.num_threads), doc="most threads a call will use")
    num_tasks = property(lambda self: int(self._info.num_tasks), doc="pieces of work for each kv head")
    num_splits = property(lambda self: int(self._info.num_splits), doc="query blocks whose keys are split")
    workspace_bytes = property(lambda self: int(self._info.workspace_bytes), doc="all the memory a call needs")

    @property
    def visible_pairs(self) -> int:
        """(query, key) pairs that the mask leaves, over all query heads: 2 * (D + Dv) flops each."""
        return int(lib.ca_plan_visible_pairs(self._pointer))

    def __repr__(self) -> str:
        return (
            f"SchedulerMetadata({self.num_reqs} requests, {self.num_tokens} tokens, {self.num_heads}/"
            f"{self.num_kv_heads} heads of {self.head_size}, {self.dtype}, {self.engine} on {self.isa}, "
            f"{self.num_tasks} tasks, {self.num_splits} split)"
        )


def get_scheduler_metadata(
    num_reqs: int,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    seq_lens: Any,
    dtype: Any,
    query_start_loc: Any,
    causal: bool = True,
    sliding_window: int | tuple[int, int] = -1,
    isa: str = "auto",
    enable_kv_split: bool = True,
    dynamic_causal: Any = None,
    kv_cache_dtype: str = "auto",
    *,
    head_size_v: int | None = None,
    engine: str = "auto",
    kv_cache_layout: str = "packed",
) -> SchedulerMetadata:
    """Plans the attention of one step over ``num_reqs`` requests, once for all its layers.

    seq_lens: int32 [num_reqs], keys of each request, the new tokens counted.
    dtype: float32, float16 or bfloat16 (NumPy dtype, torch dtype or name) of queries, keys and values.
    kv_cache_dtype: of the cache: ``auto`` as dtype; ``fp8_e4m3`` (``fp8``) or ``fp8_e5m2``.
    query_start_loc: int32 [num_reqs + 1], where each request's query tokens start; the last is T.
    causal: query i of a request sees keys up to ``seq_len - q_len + i``.
    sliding_window: -1 off; w: the last w keys (and w - 1 ahead where not causal); or (left, right), -1 a side off.
    isa, engine: which kernels; ``auto`` follows CPU_ATTN_ISA and CPU_ATTN_ENGINE, then takes the best here.
    enable_kv_split: long requests may be split over their keys where threads would idle. Same bits either way.
    dynamic_causal: int32 [num_reqs] or None; says causal for each request by itself, 0 is bidirectional.
    head_size_v: head size of V and of the output, head_size unless said.
    kv_cache_layout: of the caches: ``packed`` by :func:`reshape_and_cache` as the isa likes it, or rows that somebody
    else may own, ``HND`` [N, Hkv, B, D] or ``NHD`` [N, B, Hkv, D] (vLLM's names).

    Raises ValueError or TypeError for lengths and sizes out of range, UnavailableError for an isa or engine
    that is not there. Names and order follow vLLM's ``cpu_attn_get_scheduler_metadata``.
    """
    num_reqs = _check.integer("num_reqs", num_reqs, 0)
    shape = ffi.new("ca_shape *")
    shape.num_reqs = num_reqs
    shape.num_heads = _check.integer("num_heads", num_heads, 1, _check.MAX_SIZE)
    shape.num_kv_heads = _check.integer("num_kv_heads", num_kv_heads, 1, shape.num_heads)
    if shape.num_heads % shape.num_kv_heads:
        raise ValueError(f"num_kv_heads: {num_kv_heads} does not divide num_heads = {num_heads}")
    shape.head_size = _check.integer("head_size", head_size, 1, _check.MAX_SIZE)
    shape.head_size_v = _check.integer(
        "head_size_v", head_size if head_size_v is None else head_size_v, 1, _check.MAX_SIZE
    )
    name = dtype_name(dtype)
    kv = _check.kv_dtype(kv_cache_dtype, name)
    shape.dtype, shape.kv_dtype = _dispatch.DTYPE_CODES[name], CODES[kv][0]
    resolved = _dispatch.resolve_isa(isa, name, shape.head_size)
    shape.isa = resolved.index
    engine, engine_pointer = _dispatch.resolve_engine(engine)
    shape.causal = _check.boolean("causal", causal)
    shape.window_left, shape.window_right = _check.window(sliding_window)
    shape.enable_kv_split = _check.boolean("enable_kv_split", enable_kv_split)
    shape.num_threads = _dispatch.get_num_threads()
    shape.kv_cache_layout = _check.LAYOUTS[_check.kv_cache_layout(kv_cache_layout)]
    fault = _check.new_fault()
    addresses = (id(query_start_loc), id(seq_lens), id(dynamic_causal))
    pointer = lib.ca_plan_new(shape, engine_pointer, addresses, ffi.NULL, fault)
    if fault.status == lib.CA_UNKNOWN:
        step = _check.lengths(num_reqs, query_start_loc, seq_lens, dynamic_causal)
        pointer = lib.ca_plan_new(shape, engine_pointer, ffi.NULL, described(step), fault)
    _check.raise_fault(fault)
    return SchedulerMetadata(ffi.gc(pointer, lib.ca_plan_free), shape, name, kv, resolved.name, engine, kv_cache_layout)


def get_kv_cache_shape(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    dtype: Any,
    isa: str = "auto",
    kv_cache_dtype: str = "auto",
    *,
    kv_cache_layout: str = "packed",
) -> tuple[int, int, int, int]:
    """Shape to allocate for K or for V: (num_blocks, num_kv_heads, block_size, width).

    width is head_size where head_size is even and block_size a multiple of 16; otherwise it may be
    larger. What lies inside a (block, head) is the affair of the isa and of dtype, which is that of keys and values;
    the cache itself is of the dtype that kv_cache_dtype says: an fp8 one of ``ml_dtypes``' or of uint8.
    kv_cache_layout: of ``HND`` and ``NHD`` the width is head_size; ``NHD`` has block_size before num_kv_heads.
    """
    name = dtype_name(dtype)
    _check.kv_dtype(kv_cache_dtype, name)
    block_size = _check.integer("block_size", block_size, 1)
    head_size = _check.integer("head_size", head_size, 1, _check.MAX_SIZE)
    resolved = _dispatch.resolve_isa(isa, name, head_size)
    num_blocks = _check.integer("num_blocks", num_blocks, 0)
    num_kv_heads = _check.integer("num_kv_heads", num_kv_heads, 1, _check.MAX_SIZE)
    layout = _check.kv_cache_layout(kv_cache_layout)
    if layout == "NHD":
        return num_blocks, block_size, num_kv_heads, head_size
    if layout == "HND":
        return num_blocks, num_kv_heads, block_size, head_size
    width = _check.width(resolved.index, _dispatch.DTYPE_CODES[name], block_size, head_size)
    return num_blocks, num_kv_heads, block_size, width
