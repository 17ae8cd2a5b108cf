# SPDX-License-Identifier: Apache-2.0
"""This package chooses what attention reads: blocks by bounds of their keys (Quest) for ``selected_blocks``, keys by an
indexer (DeepSeek-V3.2) for ``selected_tokens``."""

from cpu_attn.sparse.block_scores import query_blocks, score_blocks, select_blocks, update_block_bounds
from cpu_attn.sparse.indexer import get_index_cache_shape, index_and_cache, select_tokens

__all__ = [
    "get_index_cache_shape",
    "index_and_cache",
    "query_blocks",
    "score_blocks",
    "select_blocks",
    "select_tokens",
    "update_block_bounds",
]
