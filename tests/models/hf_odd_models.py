# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of transformers that need a configuration or inputs of their own, and what they are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from transformers.models.gemma4.configuration_gemma4 import Gemma4AudioConfig

from cpu_attn.tests.models.hf_tiny import build

Made = tuple[Any, dict[str, torch.Tensor]]
TEXT = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
VISION = {
    **TEXT,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 64,
}
WINDOWS = {
    **TEXT,
    "head_dim": 16,
    "global_head_dim": 16,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}


def ids(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randint(4, 90, shape, generator=torch.Generator().manual_seed(seed))


def floats(*shape: int, seed: int = 4) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _series(config: Any, model_class: Any, **options: Any) -> Made:
    sizes = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in SIDE.items()}
    made = config(
        prediction_length=7,
        context_length=14,
        d_model=16,
        num_time_features=1,
        lags_sequence=[1, 2],
        **sizes,
        **options,
    )
    past = 14 + 2
    given = {
        "past_values": floats(2, past),
        "past_time_features": floats(2, past, 1),
        "past_observed_mask": torch.ones(2, past),
        "future_values": floats(2, 7),
        "future_time_features": floats(2, 7, 1),
    }
    return build(model_class, made), given


SIDE = {"layers": 2, "attention_heads": 4, "ffn_dim": 32}


def _kyutai() -> Made:
    codec = {
        "num_filters": 8,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "codebook_size": 32,
        "codebook_dim": 16,
        "vector_quantization_hidden_dimension": 16,
        "upsampling_ratios": [2, 2],
        "upsample_groups": 32,
        "num_quantizers": 4,
        "sampling_rate": 16,
        "frame_rate": 1,
    }
    config = hf.KyutaiSpeechToTextConfig(
        **{k: v for k, v in TEXT.items() if k != "intermediate_size"},
        head_dim=8,
        ffn_dim=64,
        codebook_vocab_size=32,
        num_codebooks=4,
        audio_bos_token_id=31,
        audio_pad_token_id=30,
        bos_token_id=3,
        pad_token_id=1,
        max_position_embeddings=64,
        sliding_window=8,
        codec_config=codec,
    )
    return build(hf.KyutaiSpeechToTextForConditionalGeneration, config), {"input_ids": ids(2, 21, 5) % 29}


def _blt() -> Made:
    part = {k: v for k, v in TEXT.items() if k != "num_key_value_heads"}
    local = {**part, "hidden_size_global": 64, "cross_attn_k": 2}
    config = hf.BltConfig(
        vocab_size=128,
        patch_in_forward=False,
        patch_size=4,
        num_hidden_layers=2,
        max_patch_length=4,
        cross_attn_k=2,
        encoder_hash_byte_group_size=[2, 3],
        encoder_hash_byte_group_vocab=64,
        encoder_hash_byte_group_nb_functions=1,
        patcher_config=part,
        encoder_config=local,
        decoder_config=local,
        global_config={**part, "hidden_size": 64},
    )
    return build(hf.BltForCausalLM, config), {"input_ids": ids(2, 21)}


def _granite_speech() -> Made:
    config = hf.GraniteSpeechConfig(
        text_config={**TEXT, "model_type": "granite"},
        encoder_config={
            "num_layers": 2,
            "hidden_dim": 32,
            "num_heads": 4,
            "dim_head": 8,
            "input_dim": 16,
            "output_dim": 7,
            "context_size": 10,
            "max_pos_emb": 16,
        },
        projector_config={
            **TEXT,
            "model_type": "blip_2_qformer",
            "encoder_hidden_size": 32,
            "cross_attention_frequency": 1,
            "use_qformer_text_input": False,
        },
        audio_token_index=98,
        has_lora_adapter=False,
    )
    text = ids(2, 15)
    text[:, 2:8] = 98
    model = build(hf.GraniteSpeechForConditionalGeneration, config)
    return model, {"input_ids": text, "input_features": floats(2, 30, 16)}


def _grounding_dino() -> Made:
    backbone = hf.SwinConfig(
        image_size=64,
        window_size=7,
        embed_dim=12,
        depths=[1, 1, 1, 1],
        num_heads=[1, 1, 1, 1],
        out_features=["stage2", "stage3", "stage4"],
    )
    text = {"model_type": "bert", **TEXT, "hidden_size": 16}
    sizes = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in SIDE.items()}
    config = hf.GroundingDinoConfig(
        backbone_config=backbone,
        text_config=text,
        num_queries=2,
        d_model=32,
        max_text_len=7,
        encoder_n_points=2,
        decoder_n_points=2,
        **sizes,
    )
    return build(hf.GroundingDinoModel, config), {"pixel_values": floats(2, 3, 128, 128), "input_ids": ids(2, 7)}


def _diffusion_gemma() -> Made:
    text = {
        **WINDOWS,
        "num_global_key_value_heads": 2,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
    }
    config = hf.DiffusionGemmaConfig(text_config=text, vision_config=VISION, canvas_length=6)
    model = build(hf.DiffusionGemmaForBlockDiffusion, config)
    return model, {"input_ids": ids(2, 13), "decoder_input_ids": ids(2, 6, seed=5)}


AUDIO = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "subsampling_conv_channels": (8, 4),
    "output_proj_dims": 32,
}


def _gemma4_audio() -> Made:
    model = build(hf.Gemma4AudioModel, Gemma4AudioConfig(**AUDIO))
    return model, {"input_features": floats(2, 90, 8), "attention_mask": torch.arange(90) < torch.tensor([[90], [50]])}


def _gemma4() -> Made:
    text = {
        **WINDOWS,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 128,
        "use_bidirectional_attention": "vision",
    }
    names = ("image_token_id", "audio_token_id", "video_token_id", "boi_token_id", "eoi_token_id", "boa_token_id")
    special = {name: 120 + i for i, name in enumerate(names)}
    config = hf.Gemma4Config(text_config=text, vision_config=VISION, audio_config=AUDIO, eoa_token_index=126, **special)
    text_ids, kinds = ids(2, 16), torch.zeros(2, 16, dtype=torch.long)
    text_ids[:, 3:7], kinds[:, 3:7] = special["image_token_id"], 1
    grid = torch.cartesian_prod(torch.arange(4), torch.arange(4)).flip(1)
    given = {
        "input_ids": text_ids,
        "pixel_values": floats(2, 16, 48).sigmoid(),
        "image_position_ids": grid.expand(2, -1, -1),
        "mm_token_type_ids": kinds,
    }
    return build(hf.Gemma4ForConditionalGeneration, config), given


def _minimax_m3() -> Made:
    """Blocks of keys that an indexer selects."""
    config = hf.MiniMaxM3VLTextConfig(
        **TEXT,
        head_dim=16,
        dense_intermediate_size=48,
        shared_intermediate_size=48,
        num_local_experts=4,
        num_experts_per_tok=2,
        mlp_layer_types=["dense", "sparse"],
        layer_types=["full_attention", "minimax_m3_sparse"],
        index_n_heads=2,
        index_head_dim=16,
        index_block_size=4,
        index_topk_blocks=2,
    )
    return build(hf.MiniMaxM3VLForCausalLM, config), {"input_ids": ids(2, 21)}


# ---- layers that have no keys and values of their own ----

SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
LAYERS = {**TEXT, **SPECIAL, "num_hidden_layers": 4, "tie_word_embeddings": False}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_expand": 2, "mamba_chunk_size": 8}
LINEAR = ["linear_attention", "full_attention"] * 2
SHARED = {
    **LAYERS,
    "vocab_size_per_layer_input": 128,
    "hidden_size_per_layer_input": 8,
    "head_dim": 16,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
}


def _text(model_class: Any, config: Any) -> Made:
    return build(model_class, config), {"input_ids": ids(2, 21)}


def _nemotron_h() -> Made:
    config = hf.NemotronHConfig(
        **LAYERS,
        layers_block_type=["linear_attention", "full_attention", "moe", "full_attention"],
        mamba_num_heads=8,
        mamba_head_dim=8,
        ssm_state_size=8,
        n_groups=1,
        chunk_size=8,
        head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=16,
        n_group=1,
        topk_group=1,
    )
    return _text(hf.NemotronHForCausalLM, config)


def _granite() -> Made:
    config = hf.GraniteMoeHybridConfig(
        **LAYERS, **MAMBA, layer_types=LINEAR, num_local_experts=0, shared_intermediate_size=48
    )
    return _text(hf.GraniteMoeHybridForCausalLM, config)


def _zamba2() -> Made:
    config = hf.Zamba2Config(
        **LAYERS,
        layers_block_type=["linear_attention", "hybrid"] * 2,
        mamba_d_state=8,
        mamba_expand=2,
        mamba_ngroups=1,
        n_mamba_heads=8,
        chunk_size=8,
        attention_head_dim=16,
        adapter_rank=4,
    )
    return _text(hf.Zamba2ForCausalLM, config)


def _falcon_h1() -> Made:
    config = hf.FalconH1Config(**LAYERS, **MAMBA, mamba_d_ssm=64, mamba_n_groups=1, head_dim=8)
    return _text(hf.FalconH1ForCausalLM, config)


def _gemma3n() -> Made:
    config = hf.Gemma3nTextConfig(**SHARED, laurel_rank=8, activation_sparsity_pattern=[0.0] * 4)
    return _text(hf.Gemma3nForCausalLM, config)


def _gemma4_text() -> Made:
    config = hf.Gemma4TextConfig(**SHARED, global_head_dim=32, num_global_key_value_heads=1, attention_k_eq_v=True)
    return _text(hf.Gemma4ForCausalLM, config)


ODD: dict[str, Callable[[], Made]] = {
    "autoformer": lambda: _series(hf.AutoformerConfig, hf.AutoformerModel, label_length=4, moving_average=5),
    "bamba": lambda: _text(hf.BambaForCausalLM, hf.BambaConfig(**LAYERS, **MAMBA, attn_layer_indices=[1, 3])),
    "blt": _blt,
    "diffusion_gemma": _diffusion_gemma,
    "falcon_h1": _falcon_h1,
    "gemma3n_text": _gemma3n,
    "gemma4": _gemma4,
    "gemma4_audio": _gemma4_audio,
    "gemma4_text": _gemma4_text,
    "granite_speech": _granite_speech,
    "granitemoehybrid": _granite,
    "grounding-dino": _grounding_dino,
    "informer": lambda: _series(hf.InformerConfig, hf.InformerModel),
    "kyutai_speech_to_text": _kyutai,
    "lfm2": lambda: _text(hf.Lfm2ForCausalLM, hf.Lfm2Config(**LAYERS, layer_types=["conv", "full_attention"] * 2)),
    "minimax_m3_vl_text": _minimax_m3,
    "nemotron_h": _nemotron_h,
    "time_series_transformer": lambda: _series(hf.TimeSeriesTransformerConfig, hf.TimeSeriesTransformerModel),
    "zamba2": _zamba2,
}
