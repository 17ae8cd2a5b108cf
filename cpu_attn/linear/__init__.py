# SPDX-License-Identifier: Apache-2.0
"""This package computes linear attention: layers of gated delta nets, Kimi delta attention, Mamba-2 and their like,
whose requests have a state in place of keys and values, and the short convolutions before them.

A step makes a plan with :func:`get_linear_attention_metadata`; every layer calls :func:`causal_conv1d` and
:func:`linear_attention_with_state_cache`.
"""

from cpu_attn.linear.attention import causal_conv1d, linear_attention_with_state_cache
from cpu_attn.linear.plan import LinearAttentionMetadata, get_linear_attention_metadata

__all__ = [
    "LinearAttentionMetadata",
    "causal_conv1d",
    "get_linear_attention_metadata",
    "linear_attention_with_state_cache",
]
