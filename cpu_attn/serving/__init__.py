# SPDX-License-Identifier: Apache-2.0
"""This package does the bookkeeping of a serving loop: which block holds which tokens of which request, and the arrays
of a step. A prefix store keeps blocks across processes."""

from cpu_attn._errors import NoFreeBlocksError
from cpu_attn.serving.block_manager import BlockManager
from cpu_attn.serving.block_pool import BlockStats
from cpu_attn.serving.prefix_store import PrefixStore, StoreStats
from cpu_attn.step import Step

__all__ = ["BlockManager", "BlockStats", "NoFreeBlocksError", "PrefixStore", "Step", "StoreStats"]
