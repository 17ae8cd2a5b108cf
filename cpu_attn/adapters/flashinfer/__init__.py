# SPDX-License-Identifier: Apache-2.0
"""This package is FlashInfer's attention on CPUs, for torch tensors: plan once a step, run for each layer.

The names, arguments and what they mean are those of FlashInfer 0.7; docs/flashinfer.md says which are refused. lse is
in base 2, [T, Hq], -inf where a row sees no key. ValueError, TypeError or NotImplementedError is raised for what does
not fit, before anything is written, and for tensors that require grad while grad mode is on. torch.compile breaks its
graph at a call.
"""

from cpu_attn._adapters import require

require("flashinfer")

from cpu_attn.flashinfer.attention import BatchAttention, BatchAttentionWithAttentionSinkWrapper  # noqa: E402
from cpu_attn.flashinfer.cascade import (  # noqa: E402
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
    MultiLevelCascadeAttentionWrapper,
    merge_state,
    merge_state_in_place,
    merge_states,
)
from cpu_attn.flashinfer.decode import (  # noqa: E402
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    fast_decode_plan,
    single_decode_with_kv_cache,
)
from cpu_attn.flashinfer.gdn import chunk_gated_delta_rule  # noqa: E402
from cpu_attn.flashinfer.install import install  # noqa: E402
from cpu_attn.flashinfer.mla import BatchMLAPagedAttentionWrapper  # noqa: E402
from cpu_attn.flashinfer.norm import (  # noqa: E402
    fused_add_rmsnorm,
    fused_add_rmsnorm_quant,
    fused_rmsnorm_silu,
    gemma_fused_add_rmsnorm,
    gemma_rmsnorm,
    layernorm,
    layernorm_quant,
    rmsnorm,
    rmsnorm_quant,
)
from cpu_attn.flashinfer.page import (  # noqa: E402
    append_paged_kv_cache,
    append_paged_mla_kv_cache,
    get_batch_indices_positions,
    get_seq_lens,
)
from cpu_attn.flashinfer.pod import BatchPODWithPagedKVCacheWrapper, PODWithPagedKVCacheWrapper  # noqa: E402
from cpu_attn.flashinfer.prefill import (  # noqa: E402
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
)
from cpu_attn.flashinfer.quantization import packbits, segment_packbits  # noqa: E402
from cpu_attn.flashinfer.rope import (  # noqa: E402
    apply_llama31_rope,
    apply_llama31_rope_inplace,
    apply_llama31_rope_pos_ids,
    apply_llama31_rope_pos_ids_inplace,
    apply_rope,
    apply_rope_inplace,
    apply_rope_pos_ids,
    apply_rope_pos_ids_inplace,
    apply_rope_with_cos_sin_cache,
    apply_rope_with_cos_sin_cache_inplace,
)
from cpu_attn.flashinfer.sparse import BlockSparseAttentionWrapper, VariableBlockSparseAttentionWrapper  # noqa: E402
from cpu_attn.flashinfer.xqa import xqa, xqa_mla  # noqa: E402

__all__ = [
    "BatchAttention",
    "BatchAttentionWithAttentionSinkWrapper",
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "BatchPODWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "BlockSparseAttentionWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "PODWithPagedKVCacheWrapper",
    "VariableBlockSparseAttentionWrapper",
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "apply_llama31_rope",
    "apply_llama31_rope_inplace",
    "apply_llama31_rope_pos_ids",
    "apply_llama31_rope_pos_ids_inplace",
    "apply_rope",
    "apply_rope_inplace",
    "apply_rope_pos_ids",
    "apply_rope_pos_ids_inplace",
    "apply_rope_with_cos_sin_cache",
    "apply_rope_with_cos_sin_cache_inplace",
    "chunk_gated_delta_rule",
    "fast_decode_plan",
    "fused_add_rmsnorm",
    "fused_add_rmsnorm_quant",
    "fused_rmsnorm_silu",
    "gemma_fused_add_rmsnorm",
    "gemma_rmsnorm",
    "get_batch_indices_positions",
    "get_seq_lens",
    "install",
    "layernorm",
    "layernorm_quant",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "packbits",
    "rmsnorm",
    "rmsnorm_quant",
    "segment_packbits",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
    "xqa",
    "xqa_mla",
]
