# SPDX-License-Identifier: Apache-2.0
"""This module does multi-head latent attention in vLLM (DeepSeek-V2 and V3, and models that share their layer), by
attention_mla.

vLLM's layer (``MLAAttention.forward_impl``) knows two ways. Queries of a decode are multiplied by W_UK and attend over
latents, and what comes out is multiplied by W_UV. Queries of a prefill attend over keys and values that were made of
their own latents, and over those of the context that were made of the cache, chunk by chunk. Here every query goes the
first way: to the layer a step is one of decodes alone. One call serves decodes, chunks of a prompt and prompts whose
beginning was in the cache, and no key is made of a latent. A query and a key then take L + P + L multiplications in
each head: in DeepSeek's models 512 + 64 + 512, where made keys and values take 128 + 64 + 128, 3.4 times fewer.
"""

from __future__ import annotations

import os
from typing import Any, ClassVar

import torch

from cpu_attn import attention_mla, concat_and_cache_mla
from cpu_attn._dtypes import is_fp8
from cpu_attn.vllm.backend import KV_CACHE_DTYPES, MetadataBuilder
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend, MLACommonMetadata
from vllm.v1.attention.backend import AttentionType, MLAAttentionImpl


class MLABackend(MLACommonBackend):  # type: ignore[misc]
    """Stands in the place of vLLM's CPU_MLA and AMX_MLA. It takes any head size and block size; the rows of a cache lie
    as vLLM has them, which leaves no place for the scales of integers."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = [kv for kv in KV_CACHE_DTYPES if not kv.startswith("int")]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []  # it means every size

    @staticmethod
    def get_name() -> str:
        return "CPU_MLA"

    @staticmethod
    def get_impl_cls() -> type[MLAImpl]:
        return MLAImpl

    @staticmethod
    def get_builder_cls() -> type[MLAMetadataBuilder]:
        return MLAMetadataBuilder


class MLAMetadataBuilder(MetadataBuilder):
    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> MLACommonMetadata:
        """Describes a step as one of decodes, however many tokens each has. ``decode``, which is the backend's own
        affair, is our Metadata."""
        common = common_attn_metadata
        return MLACommonMetadata(
            num_reqs=common.num_reqs,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            num_actual_tokens=common.num_actual_tokens,
            query_start_loc=common.query_start_loc,
            slot_mapping=common.slot_mapping,
            num_decodes=common.num_reqs,
            num_decode_tokens=common.num_actual_tokens,
            num_prefills=0,
            decode=super().build(common_prefix_len, common, fast_build),
        )


class MLAImpl(MLAAttentionImpl[MLACommonMetadata]):  # type: ignore[misc]
    """Computes the attention of one layer. Arguments are as vLLM has them; of mla_args only kv_lora_rank matters, since
    the layer itself absorbs the weights."""

    supports_pcp = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla_args: Any,
    ) -> None:
        refused = {
            "alibi_slopes": alibi_slopes is not None,
            "attn_type": attn_type != AttentionType.DECODER,
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name is not None,
            "CPU_ATTN_KV_CACHE_ROTATION": os.environ.get("CPU_ATTN_KV_CACHE_ROTATION") not in (None, "", "none"),
        }
        if found := ", ".join(name for name, given in refused.items() if given):
            raise NotImplementedError(f"{found}: not with latent caches (MLA)")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.kv_lora_rank = num_kv_heads, mla_args["kv_lora_rank"]
        self.sliding_window = -1 if sliding_window is None else sliding_window
        self.logits_soft_cap = logits_soft_cap or 0.0
        self.kv_cache_dtype = kv_cache_dtype
        self._stored = KV_CACHE_DTYPES[kv_cache_dtype]

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Writes kv_c_normed [T, L] and k_pe [T, 1, P] into kv_cache [N, B, L + P] at slot_mapping int64 [T]; rows past
        it are padding, and so are slots < 0."""
        if kv_cache.numel() == 0:
            return
        slots = slot_mapping.flatten()
        scale = float(k_scale) if is_fp8(self._stored) else 1.0
        latent, rotated = kv_c_normed[: len(slots)], k_pe[: len(slots)].squeeze(1)
        concat_and_cache_mla(latent, rotated, self._rows(kv_cache), slots, self._stored, scale)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MLACommonMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, None]:
        """Computes attention of q, [T, Hq, L + P] or its two parts, over latents: [T, Hq, L]. It gives no lse."""
        query = q if isinstance(q, torch.Tensor) else torch.cat(q, dim=-1)
        rows, step = self._rows(kv_c_and_k_pe_cache), attn_metadata.decode
        plan = step.plan(
            (self.num_heads, 1, self.head_size, self.sliding_window),
            query.dtype,
            step.block_table,
            block_size=rows.shape[1],
            head_size_v=self.kv_lora_rank,
            kv_cache_dtype=self._stored,
            kv_cache_layout="NHD",
        )
        output = query.new_empty(len(query), self.num_heads, self.kv_lora_rank)
        attention_mla(
            query,
            rows,
            output,
            step.query_start_loc,
            step.seq_lens,
            self.scale,
            step.causal,
            step.block_table,
            plan,
            self._stored,
            layer._k_scale_float if is_fp8(self._stored) else 1.0,
            sliding_window=self.sliding_window,
            softcap=self.logits_soft_cap,
            dynamic_causal=step.dynamic_causal,
        )
        return output, None

    def _rows(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """Gives the bytes of an fp8 cache, which vLLM views as float8_e4m3fn, whatever its kind."""
        return kv_cache.view(torch.uint8) if is_fp8(self._stored) else kv_cache
