# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of transformers, of which every head looks hard at a few keys: with the usual initialisation
attention is nearly uniform, and a wrong mask would hardly change a token."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
import transformers as hf

# What forward and generate call a cache: past_key_values before transformers 5.24.
CACHE = "cache" if "cache" in inspect.signature(hf.LlamaForCausalLM.forward).parameters else "past_key_values"
VOCABULARY = 97
WINDOW = 8
COMMON = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "initializer_range": 0.3,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
GROUPED = {**COMMON, "num_key_value_heads": 2, "head_dim": 16}
ALTERNATING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
DECODERS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (hf.LlamaConfig, hf.LlamaForCausalLM, GROUPED),
    "qwen3": (hf.Qwen3Config, hf.Qwen3ForCausalLM, GROUPED),
    "mistral": (hf.MistralConfig, hf.MistralForCausalLM, {**GROUPED, "sliding_window": WINDOW}),
    "gemma2": (
        hf.Gemma2Config,
        hf.Gemma2ForCausalLM,
        {**GROUPED, **ALTERNATING, "attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 2},
    ),
    "gemma3": (hf.Gemma3TextConfig, hf.Gemma3ForCausalLM, {**GROUPED, **ALTERNATING, "query_pre_attn_scalar": 2}),
    "gpt_oss": (
        hf.GptOssConfig,
        hf.GptOssForCausalLM,
        {**GROUPED, **ALTERNATING, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "llama4": (
        hf.Llama4TextConfig,
        hf.Llama4ForCausalLM,
        {
            **GROUPED,
            "attention_chunk_size": WINDOW,
            "intermediate_size_mlp": 48,
            "num_local_experts": 2,
            "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0],
        },
    ),
    "deepseek_v3": (
        hf.DeepseekV3Config,
        hf.DeepseekV3ForCausalLM,
        {
            **COMMON,
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "first_k_dense_replace": 2,
        },
    ),
}
# Those that transformers' continuous batching takes.
CONTINUOUS = ("llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss")
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
BOTH_SIDES = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "vocab_size": VOCABULARY,
    "init_std": 0.3,
    **SPECIAL,
}
OTHERS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "bert": (hf.BertConfig, hf.BertModel, COMMON),
    "modernbert": (
        hf.ModernBertConfig,
        hf.ModernBertModel,
        {**COMMON, "local_attention": WINDOW, "global_attn_every_n_layers": 2},
    ),
    "bart": (hf.BartConfig, hf.BartForConditionalGeneration, {**BOTH_SIDES, "forced_eos_token_id": None}),
    "whisper": (
        hf.WhisperConfig,
        hf.WhisperForConditionalGeneration,
        {
            **BOTH_SIDES,
            "num_mel_bins": 8,
            "max_source_positions": 20,
            "max_target_positions": 40,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
    ),
    "t5": (
        hf.T5Config,
        hf.T5ForConditionalGeneration,
        {
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "vocab_size": VOCABULARY,
            "initializer_factor": 3.0,
            **SPECIAL,
        },
    ),
}


@cache
def model(name: str) -> Any:
    """In float32, for inference."""
    config, kind, options = {**DECODERS, **OTHERS}[name]
    torch.manual_seed(7)
    made = kind(config(**options))
    generator = torch.Generator().manual_seed(11)
    for parameter_name, parameter in made.named_parameters():  # not every class goes by initializer_range
        if parameter.ndim > 1 and "norm" not in parameter_name:
            parameter.data.normal_(0, 0.3, generator=generator)
        elif "sinks" in parameter_name:
            parameter.data.normal_(6.0, 2.0, generator=generator)
    made.set_attn_implementation("eager")
    return made.eval()


def tokens(*lengths: int, side: str = "left", seed: int = 3) -> dict[str, torch.Tensor]:
    """input_ids [B, T] of random tokens and attention_mask, padded on that side."""
    generator, most = torch.Generator().manual_seed(seed), max(lengths)
    ids = torch.randint(3, VOCABULARY, (len(lengths), most), generator=generator)
    positions, count = torch.arange(most), torch.tensor(lengths)[:, None]
    mask = positions >= most - count if side == "left" else positions < count
    return {"input_ids": ids * mask, "attention_mask": mask.long()}
