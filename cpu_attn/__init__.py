# SPDX-License-Identifier: Apache-2.0
"""This package computes paged attention of language models on CPUs: vLLM's three calls, fused kernels per isa, a oneDNN
engine.

A step makes a plan with :func:`get_scheduler_metadata`; every layer calls :func:`reshape_and_cache` and then
:func:`attention_with_kv_cache`. :class:`PagedKVCache` is a friendlier form of these. Arrays are NumPy arrays, torch CPU
tensors or anything with DLPack, and are never copied.

Symbols: R requests of a step; T query tokens, one request after another; Hq query heads and Hkv kv heads; D elements of
a head of queries and keys, Dv of values; N blocks of a cache, of B tokens each; M columns of a block table.
"""

try:
    from cpu_attn._native import lib as _lib  # noqa: F401  # the modules below need it
except ModuleNotFoundError as e:
    if e.name != "cpu_attn._native":
        raise
    raise ImportError(
        f"cpu_attn: no compiled module in {__path__[0]}, which is a source tree; install it (make verify, or pip "
        "install .) and start Python in another folder, or pip install -e . to run from here"
    ) from None

from cpu_attn import _self_test  # noqa: F401  # _dispatch calls its test
from cpu_attn._dispatch import engines, isas
from cpu_attn._errors import NoFreeBlocksError, UnavailableError
from cpu_attn._threads import get_num_threads, set_num_threads
from cpu_attn.backend import (
    AttentionType,
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
    OneDNNPagedAttention,
    PagedAttention,
    make_alibi_bias,
    make_sliding_window_bias,
)
from cpu_attn.block_manager import BlockManager
from cpu_attn.block_pool import BlockStats
from cpu_attn.indexer import get_index_cache_shape, index_and_cache, select_tokens
from cpu_attn.mla import attention_mla, concat_and_cache_mla
from cpu_attn.ops import attention_with_kv_cache, merge_states, reshape_and_cache
from cpu_attn.pages import query_blocks, score_pages, select_pages, update_page_bounds
from cpu_attn.plan import SchedulerMetadata, get_kv_cache_shape, get_scheduler_metadata, kv_cache_dtypes
from cpu_attn.profiling import profile
from cpu_attn.rotary import rotary_reshape_and_cache
from cpu_attn.rotation import balance, rotate
from cpu_attn.step import Step
from cpu_attn.storage import CacheDescriptor, PagedKVCache, StoredCache, convert

__version__ = "0.2.0"

__all__ = [
    "AttentionType",
    "BlockManager",
    "BlockStats",
    "CPUAttentionBackend",
    "CPUAttentionBackendImpl",
    "CPUAttentionMetadata",
    "CPUAttentionMetadataBuilder",
    "CacheDescriptor",
    "NoFreeBlocksError",
    "OneDNNPagedAttention",
    "PagedAttention",
    "PagedKVCache",
    "SchedulerMetadata",
    "Step",
    "StoredCache",
    "UnavailableError",
    "attention_mla",
    "attention_with_kv_cache",
    "balance",
    "concat_and_cache_mla",
    "convert",
    "engines",
    "get_index_cache_shape",
    "get_kv_cache_shape",
    "get_num_threads",
    "get_scheduler_metadata",
    "index_and_cache",
    "isas",
    "kv_cache_dtypes",
    "make_alibi_bias",
    "make_sliding_window_bias",
    "merge_states",
    "profile",
    "query_blocks",
    "reshape_and_cache",
    "rotary_reshape_and_cache",
    "rotate",
    "score_pages",
    "select_pages",
    "select_tokens",
    "set_num_threads",
    "update_page_bounds",
]
