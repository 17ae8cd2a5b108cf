# SPDX-License-Identifier: Apache-2.0
"""This package computes paged attention of language models on CPUs: vLLM's three calls, fused kernels per isa, a oneDNN
engine.

A step makes a plan with :func:`get_scheduler_metadata`; every layer calls :func:`reshape_and_cache` and then
:func:`attention_with_kv_cache`. :class:`PagedKVCache` is a friendlier form of these. Arrays are NumPy arrays, torch CPU
tensors or anything with DLPack, and are never copied.

What not everybody meets is in modules of its own: :mod:`cpu_attn.serving` (blocks of requests), :mod:`cpu_attn.sparse`
(which keys to read), :mod:`cpu_attn.storage` (caches in files and in other layouts), :mod:`cpu_attn.rotation`,
:mod:`cpu_attn.distributed`, :mod:`cpu_attn.linear`, :mod:`cpu_attn.profiling`.

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

from cpu_attn import (
    _self_test,  # noqa: F401  # _dispatch calls its test
    profiling,
    rotation,
    serving,
    sparse,
    storage,
)
from cpu_attn._dispatch import engines, isas
from cpu_attn._errors import UnavailableError
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
from cpu_attn.mla import attention_mla, concat_and_cache_mla
from cpu_attn.ops import attention_with_kv_cache, merge_states, reshape_and_cache
from cpu_attn.plan import SchedulerMetadata, get_kv_cache_shape, get_scheduler_metadata, kv_cache_dtypes
from cpu_attn.rotary import rotary_reshape_and_cache
from cpu_attn.storage import CacheDescriptor, PagedKVCache

__version__ = "0.2.0"

# These are of modules of their own, and are found here, too, three of them by the names that they had.
BlockManager = serving.BlockManager
BlockStats = serving.BlockStats
NoFreeBlocksError = serving.NoFreeBlocksError
Step = serving.Step
StoredCache = storage.StoredCache
balance = rotation.balance
error_feedback = rotation.error_feedback
convert = storage.convert
get_index_cache_shape = sparse.get_index_cache_shape
index_and_cache = sparse.index_and_cache
profile = profiling.profile
query_blocks = sparse.query_blocks
rotate = rotation.rotate
score_pages = sparse.score_blocks
select_pages = sparse.select_blocks
select_tokens = sparse.select_tokens
update_page_bounds = sparse.update_block_bounds

__all__ = [
    "AttentionType",
    "CPUAttentionBackend",
    "CPUAttentionBackendImpl",
    "CPUAttentionMetadata",
    "CPUAttentionMetadataBuilder",
    "CacheDescriptor",
    "OneDNNPagedAttention",
    "PagedAttention",
    "PagedKVCache",
    "SchedulerMetadata",
    "UnavailableError",
    "attention_mla",
    "attention_with_kv_cache",
    "concat_and_cache_mla",
    "engines",
    "get_kv_cache_shape",
    "get_num_threads",
    "get_scheduler_metadata",
    "isas",
    "kv_cache_dtypes",
    "make_alibi_bias",
    "make_sliding_window_bias",
    "merge_states",
    "reshape_and_cache",
    "rotary_reshape_and_cache",
    "set_num_threads",
]
