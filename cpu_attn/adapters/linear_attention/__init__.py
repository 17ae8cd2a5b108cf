# SPDX-License-Identifier: Apache-2.0
"""This package has the functions of linear attention of flash-linear-attention (fla), causal-conv1d and mamba_ssm on
CPUs, over torch's tensors.

from cpu_attn.linear_attention import chunk_gated_delta_rule
cpu_attn.linear_attention.install()  # from here on also: from fla.ops.gated_delta_rule import chunk_gated_delta_rule
"""

from cpu_attn._adapters import require

require("linear_attention")

from cpu_attn.linear_attention.conv import (  # noqa: E402
    causal_conv1d_fn,
    causal_conv1d_update,
    causal_conv1d_varlen_states,
)
from cpu_attn.linear_attention.delta_rule import (  # noqa: E402
    chunk_gated_delta_rule,
    chunk_kda,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_kda,
)
from cpu_attn.linear_attention.install import install  # noqa: E402
from cpu_attn.linear_attention.mamba import mamba_chunk_scan_combined, selective_state_update  # noqa: E402

__all__ = [
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "causal_conv1d_varlen_states",
    "chunk_gated_delta_rule",
    "chunk_kda",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_kda",
    "install",
    "mamba_chunk_scan_combined",
    "selective_state_update",
]
