# SPDX-License-Identifier: Apache-2.0
"""The plan of a step: made once by :func:`get_scheduler_metadata`, used by every layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cpu_attn import _check, _dispatch, _threads, profiling
from cpu_attn._arrays import addresses, bridged
from cpu_attn._dtypes import CODES, DTYPE_CODES, DTYPES, FORMATS, dtype_name
from cpu_attn._native import ffi, lib


class SchedulerMetadata(_check.Plan):
    """An immutable plan: lengths and masks as they were when it was made, cut into tasks for threads.

    Opaque to callers but for what describes it. Any number of threads may use one plan at once.
    """

    __slots__ = (
        "__weakref__",
        "_info",
        "_pointer",
        "_shape",
        "_words",
        "dtype",
        "engine",
        "isa",
        "kv_cache_layout",
        "kv_cache_rotation",
        "kv_dtypes",
        "narrow",
    )
    _info: Any
    _pointer: Any
    _shape: Any
    _words: tuple[Any, ...]
    dtype: np.dtype[Any]
    engine: str
    isa: str
    kv_cache_layout: str
    kv_cache_rotation: str
    kv_dtypes: tuple[str, ...]
    narrow: bool

    def __init__(
        self,
        pointer: Any,
        shape: Any,
        dtype: str,
        kvs: tuple[str, ...],
        isa: str,
        engine: str,
        kv_cache_layout: str,
        kv_cache_rotation: str,
        words: tuple[Any, ...],
    ) -> None:
        info, keep = ffi.new("ca_plan_info *"), object.__setattr__
        lib.ca_plan_describe(pointer, info)
        keep(self, "_pointer", pointer)
        keep(self, "_shape", shape)
        keep(self, "_info", info)
        keep(self, "_words", words)
        keep(self, "dtype", DTYPES[dtype])
        keep(self, "kv_dtypes", kvs)
        keep(self, "narrow", kvs != (dtype, dtype))
        keep(self, "isa", isa)
        keep(self, "engine", engine)
        keep(self, "kv_cache_layout", kv_cache_layout)
        keep(self, "kv_cache_rotation", kv_cache_rotation)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"SchedulerMetadata is immutable: cannot set {name}")

    def __copy__(self) -> SchedulerMetadata:
        return self

    def __deepcopy__(self, memo: Any) -> SchedulerMetadata:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "SchedulerMetadata: cannot be pickled, it is memory of this process for its CPU; make a new plan from the "
            "same lengths where it is needed"
        )

    num_reqs = property(lambda self: int(self._shape.num_reqs), doc="R")
    num_heads = property(lambda self: int(self._shape.num_heads), doc="Hq")
    num_kv_heads = property(lambda self: int(self._shape.num_kv_heads), doc="Hkv")
    head_size = property(lambda self: int(self._shape.head_size), doc="D")
    head_size_v = property(lambda self: int(self._shape.head_size_v), doc="Dv")
    num_tokens = property(lambda self: int(self._info.num_tokens), doc="T, query tokens of the step")
    num_threads = property(lambda self: int(self._info.num_threads), doc="most threads a call will use")
    num_tasks = property(lambda self: int(self._info.num_tasks), doc="pieces of work for each kv head")
    num_shared = property(lambda self: int(self._info.num_shared), doc="tasks that serve several requests")
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
            f"{self.num_tasks} tasks, {self.num_splits} split, {self.num_shared} shared)"
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
    mm_prefix_range: Mapping[int, Sequence[tuple[int, int]]] | None = None,
    document_start_loc: Mapping[int, Sequence[int]] | None = None,
    tree_mask: Any = None,
    block_table: Any = None,
    block_size: int | None = None,
    kv_cache_layout: str = "packed",
    mm_prefix_clamp_sliding_window: bool = False,
    kv_cache_rotation: str = "none",
    max_selected_tokens: int | None = None,
) -> SchedulerMetadata:
    """Plans the attention of one step over ``num_reqs`` requests, once for all its layers.

    num_heads, num_kv_heads, head_size: 1 to 65536 each; num_kv_heads divides num_heads.
    seq_lens: int32 [num_reqs], keys of each request, the new tokens counted.
    dtype: float32, float16 or bfloat16 (NumPy dtype, torch dtype or name) of queries, keys and values.
    kv_cache_dtype: of the cache: ``auto`` as dtype; ``fp8_e4m3`` (``fp8``), ``fp8_e5m2``, ``int8``, ``int6``,
    ``int5``, ``int4``, ``int4_per_token_head``, or two of these as ``K/V``.
    query_start_loc: int32 [num_reqs + 1], where each request's query tokens start; the last is T.
    causal: query i of a request sees keys up to ``seq_len - q_len + i``.
    sliding_window: -1 off; w: the last w keys (and w - 1 ahead where not causal); or (left, right), -1 a side off.
    isa, engine: which kernels; ``auto`` follows CPU_ATTN_ISA and CPU_ATTN_ENGINE, then takes the best here.
    enable_kv_split: long requests may be split over their keys where threads would idle. Same bits either way.
    dynamic_causal: int32 [num_reqs] or None; says causal for each request by itself, 0 is bidirectional.
    head_size_v: head size of V and of the output, head_size unless said.
    mm_prefix_range: for each request named, ascending (start, end) of keys that see one another whatever causal and
    sliding_window say; end is inclusive, as vLLM has it. A prefix-LM is one span from 0.
    mm_prefix_clamp_sliding_window: within these spans, too, no key before sliding_window's is seen (Gemma 4).
    document_start_loc: for each request named, the ascending first keys of the documents packed in it, the first one 0:
    a query sees its own document only. No span may cross a border, and no query be without a key of its own.
    tree_mask: uint8 [T, W], for causal requests whose query tokens are a tree of drafts. Bit j of row t
    (``numpy.packbits(..., bitorder="little")``) says whether query token t sees the key of its request's query token j;
    it takes the place of causal among these. For sliding_window a token stands as many places behind the
    ``seq_len - q_len`` keys before them as it sees query tokens besides itself. Not with ALiBi, nor with the two above.
    block_table, block_size: int32 [num_reqs, M] and the tokens of a block, or neither. Given, requests whose tables
    start with the same blocks read these once, where few query rows meet them (decode) and in whole segments of 1024
    keys; bits stay the same. A call must then come with a table in which they are the same, too.
    kv_cache_layout: of the caches: ``packed`` by :func:`reshape_and_cache` as the isa likes it, or rows that somebody
    else may own, ``HND`` [N, Hkv, B, D] or ``NHD`` [N, B, Hkv, D] (vLLM's names), which hold no integers.
    kv_cache_rotation: of the caches, as :func:`reshape_and_cache` wrote them.
    max_selected_tokens: the plan is for calls with selected_tokens of up to so many columns, and for no others. Every
    query token is a task of its own then. Not with block_table.

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
    kvs = _check.kv_dtypes(kv_cache_dtype, name)
    shape.dtype, shape.k_dtype, shape.v_dtype = (CODES[x][0] for x in (name, *kvs))
    resolved = _dispatch.resolve_isa(isa, name, shape.head_size)
    shape.isa = resolved.index
    engine, engine_pointer = _dispatch.resolve_engine(engine)
    shape.causal = _check.boolean("causal", causal)
    shape.window_left, shape.window_right = _check.window(sliding_window)
    shape.enable_kv_split = _check.boolean("enable_kv_split", enable_kv_split)
    shape.num_threads = _threads.get_num_threads()
    layout = _check.kv_cache_layout(kv_cache_layout, kvs)
    shape.kv_cache_layout = _check.LAYOUTS[layout]
    shape.hadamard = _check.kv_cache_rotation(kv_cache_rotation)
    if block_table is not None or block_size is not None:
        shape.block_size = _check.table_block_size(block_table, block_size)
    if max_selected_tokens is not None:
        shape.max_selected_tokens = _check.integer("max_selected_tokens", max_selected_tokens, 1)
        if shape.block_size:
            raise ValueError("max_selected_tokens: query tokens that select their keys share no prefixes (block_table)")
    found = _check.masks(num_reqs, mm_prefix_range, document_start_loc, tree_mask, mm_prefix_clamp_sliding_window)
    step = (query_start_loc, seq_lens, dynamic_causal, block_table)
    pointer = _plan(shape, engine_pointer, step, _masks_struct(found) if found else ffi.NULL)
    words = (sliding_window, kv_cache_dtype, kv_cache_layout, kv_cache_rotation)
    return SchedulerMetadata(pointer, shape, name, kvs, resolved.name, engine, layout, kv_cache_rotation, words)


# On its own: a frame object of more than 512 bytes, as get_scheduler_metadata's would be with these names too, is one
# more that memory may not be there for, and CPython 3.11 then forgets which exception it is for.
def _plan(shape: Any, engine: Any, step: tuple[Any, ...], masks: Any) -> Any:
    start, fault = profiling.clock(), ffi.new("ca_fault *")
    found = step if type(step[1]) is np.ndarray else bridged(step)
    where, given, alive = addresses(found), ffi.NULL, found
    while not (pointer := lib.ca_plan_new(shape, engine, where, given, masks, fault)):
        where, given, alive = _check.reread(fault, _check.STEP, step, given, alive)
    if start:
        profiling.record("get_scheduler_metadata", start, num_reqs=shape.num_reqs)
    return ffi.gc(pointer, lib.ca_plan_free)


def _masks_struct(found: _check.Masks) -> Any:
    masks = ffi.new("ca_masks *", {"tree_rows": -1, "clamp_spans": found.clamped})
    masks.spans, masks.num_spans = _check.pointer("int32_t *", found.spans), len(found.spans)
    masks.documents, masks.num_documents = _check.pointer("int32_t *", found.documents), len(found.documents)
    if found.tree is not None:
        masks.tree, masks.tree_stride = _check.pointer("uint8_t *", found.tree), found.tree.strides[0]
        masks.tree_rows, masks.tree_bytes = found.tree.shape
    return masks


def kv_cache_dtypes() -> tuple[str, ...]:
    """What a cache may hold: the names that kv_cache_dtype takes, each also for K or V alone (``int8/int4``)."""
    return ("auto", *FORMATS)


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
    larger, and for ``int8`` to ``int4`` it counts bytes, scales among them. What lies inside a (block, head) is the
    affair of the isa and of dtype, which is that of keys and values; the cache itself is of the dtype that
    kv_cache_dtype says: fp8 of ``ml_dtypes``' or of uint8, integers of uint8. Where K's differs from V's: one of
    the two.
    kv_cache_layout: of ``HND`` and ``NHD`` the width is head_size; ``NHD`` has block_size before num_kv_heads.

    Raises ValueError or TypeError for sizes out of range and names that are none, UnavailableError for an isa that is
    not there.
    """
    name = dtype_name(dtype)
    kv, v_dtype = _check.kv_dtypes(kv_cache_dtype, name)
    if kv != v_dtype:
        raise ValueError(f"kv_cache_dtype: {kv_cache_dtype!r} names two, K and V have a shape each")
    block_size = _check.integer("block_size", block_size, 1)
    head_size = _check.integer("head_size", head_size, 1, _check.MAX_SIZE)
    resolved = _dispatch.resolve_isa(isa, name, head_size)
    num_blocks = _check.integer("num_blocks", num_blocks, 0)
    num_kv_heads = _check.integer("num_kv_heads", num_kv_heads, 1, _check.MAX_SIZE)
    layout = _check.kv_cache_layout(kv_cache_layout, [kv])
    width = head_size
    if layout == "packed":
        width = _check.width(resolved.index, DTYPE_CODES[name], kv, block_size, head_size)
    return (*_check.cache_sizes((num_blocks, num_kv_heads, block_size), layout), width)
