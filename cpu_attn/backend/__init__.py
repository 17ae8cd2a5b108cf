# SPDX-License-Identifier: Apache-2.0
"""This package has the classes that an inference engine programs against, under the names of vLLM's older CPU backend,
without torch.

Each module imports only those above it:

paged_attention     :class:`PagedAttention`, :class:`OneDNNPagedAttention`: caches, writing, decoding, whole blocks
bias                :func:`make_alibi_bias`, :func:`make_sliding_window_bias`: dense biases
attention_metadata  :class:`CPUAttentionMetadata`: how long everything in a step is and where it lies
builder             :class:`CPUAttentionMetadataBuilder`: that of vLLM's CommonAttentionMetadata
layer               :class:`CPUAttentionBackendImpl`: attention of one layer
backend             :class:`CPUAttentionBackend`: which of these belong together
"""

from cpu_attn.backend.attention_metadata import AttentionType, CPUAttentionMetadata
from cpu_attn.backend.backend import CPUAttentionBackend
from cpu_attn.backend.bias import make_alibi_bias, make_sliding_window_bias
from cpu_attn.backend.builder import CPUAttentionMetadataBuilder
from cpu_attn.backend.layer import CPUAttentionBackendImpl
from cpu_attn.backend.paged_attention import OneDNNPagedAttention, PagedAttention

__all__ = [
    "AttentionType",
    "CPUAttentionBackend",
    "CPUAttentionBackendImpl",
    "CPUAttentionMetadata",
    "CPUAttentionMetadataBuilder",
    "OneDNNPagedAttention",
    "PagedAttention",
    "make_alibi_bias",
    "make_sliding_window_bias",
]
