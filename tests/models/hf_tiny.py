# SPDX-License-Identifier: Apache-2.0
"""Models of any of transformers' architectures, made tiny and random out of what a configuration is by default."""

from __future__ import annotations

import re
from typing import Any

import torch
import transformers as hf

VOCABULARY, IMAGE, PATCH, MELS = 128, 32, 8, 16
MOST_PARAMETERS = 20_000_000


# By the name of a field, the first that matches: what an integer of it becomes.
FIELDS: tuple[tuple[str, int], ...] = (
    (r"(.*_)?vocab_size", VOCABULARY),
    (r"type_vocab_size|pretraining_tp|num_channels|in_channels|temporal_patch_size|spatial_merge_size", 0),
    (r"(.*_)?(max_(position_embeddings|source_positions|target_positions)|n_positions|n_ctx|max_seq_len)", 128),
    (r"num_mel_bins|n_mels|feature_size", MELS),
    (r"(pretrain_)?image_size", IMAGE),
    (r"patch_size", PATCH),
    (r"num_key_value_heads|.*_kv_heads|n_kv_heads|num_kv_heads", 2),
    (r"index_n_heads", 16),  # of few heads none may score a key, and many keys are as good
    (r"(.*_)?(num_attention_heads|attention_heads|num_heads|n_heads?|n_head)", 4),
    (r"(.*_)?(head_dim|kv_channels|d_kv|dim_head)", 16),
    (r"qk_nope_head_dim|qk_rope_head_dim|v_head_dim", 16),
    (r"(.*_)?lora_rank", 32),
    (r"index_topk", 8),
    (r"index_block_size", 4),
    (r"attn_layer_period", 2),
    (r"attn_layer_offset", 1),
    (r"index_topk_blocks", 2),
    (r"(.*_)?(num_experts_per_tok|moe_topk|moe_k|num_selected_experts|top_k_experts)", 2),
    (r"n_group|topk_group|num_expert_groups?", 1),
    (r"(.*_)?(n_routed_experts|num_(local_)?experts|moe_num_experts|num_routed_experts)", 4),
    (r"first_k_dense_replace", 1),
    (r"(num_hidden|encoder|decoder|num|n|num_encoder|num_decoder|num_block|transformer)_layers?|depth|n_layer", 2),
    (r"sliding_window|local_attention|attention_window|window_attn_size|attention_chunk_size", 8),
    (r"(.*_)?(intermediate_size|ffn_dim|d_ff|mlp_dim|n_inner|d_inner|ffn_hidden_size|intermediate_size_mlp)", 64),
    (r"(.*_)?(hidden_size|d_model|n_embd|embed_dim|emb_dim|hidden_dim|projection_dim|embedding_size|dim|d_embed)", 64),
)
TOKEN = re.compile(r"(.*_)?token_(id|index)|(.*_)?(boi|eoi)_(id|index)")
LISTS = re.compile(r"layer_types|layers_block_type|mlp_layer_types|indexer_types|block_types|hybrid_override_pattern")


def tiny(config_class: type) -> Any:
    """The class's defaults with every size made small, its parts too."""
    default = config_class()
    return config_class(**_changes(default, set()))


def _changes(default: Any, taken: set[int]) -> dict[str, Any]:
    values = {k: v for k, v in vars(default).items() if not k.startswith("_")}
    values |= {k: getattr(default, k) for k in getattr(default, "attribute_map", {}) if hasattr(default, k)}
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, hf.PreTrainedConfig):
            found[name] = type(value)(**_changes(value, taken))
        elif isinstance(value, bool) or value is None:
            continue
        elif TOKEN.fullmatch(name):
            if isinstance(value, int) and value >= 0:
                found[name] = value if value < 4 else _token(taken)
        elif isinstance(value, int) and value > 0:
            small = _small(name)
            if small:
                found[name] = min(value, small)
        elif name == "rope_parameters" and isinstance(value, dict) and "rope_type" in value:
            found[name] = value | {"mrope_section": [4, 2, 2]}  # for those that have one
    _layers(default, values, found)
    if values.get("num_key_value_heads") == values.get("num_attention_heads") and "num_key_value_heads" in found:
        found["num_key_value_heads"] = found["num_attention_heads"]
    return found


def _token(taken: set[int]) -> int:
    taken.add(VOCABULARY - 1 - len(taken))
    return min(taken)


def _small(name: str) -> int:
    return next((size for pattern, size in FIELDS if re.fullmatch(pattern, name)), 0)


def _layers(default: Any, values: dict[str, Any], found: dict[str, Any]) -> None:
    """As many layers as there are kinds of them, and lists of what layers are cut to that."""
    kinds = {k: v for k, v in values.items() if LISTS.fullmatch(k) and isinstance(v, (list, tuple))}
    if not kinds:
        return
    layers = len(next(iter(kinds.values())))
    rows = list(zip(*(v for v in kinds.values() if len(v) == layers), strict=True))
    chosen = sorted({row: i for i, row in reversed(list(enumerate(rows)))}.values())[:4]
    if len(chosen) < 2:
        chosen = [0, 1]
    for name, value in values.items():
        if isinstance(value, (list, tuple)) and len(value) == layers and chosen[-1] < layers:
            found[name] = type(value)(value[i] for i in chosen)
    for name in ("num_hidden_layers", "n_layers", "num_layers"):
        if name in values:
            found[name] = len(chosen)


def build(model_class: Any, config: Any) -> Any:
    """Of weights that make heads look hard at a few keys, float32, for inference."""
    with torch.device("meta"):
        shapes = model_class(config)
    count = sum(p.numel() for p in shapes.parameters())
    if count > MOST_PARAMETERS:
        raise NotImplementedError(f"{count / 1e6:.0f} million parameters after all")
    torch.manual_seed(7)
    model = model_class(config)
    generator = torch.Generator().manual_seed(11)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and "norm" not in name and parameter.is_floating_point():
            parameter.data.normal_(0, min(0.3, 1.6 * parameter[0].numel() ** -0.5), generator=generator)
    return model.eval()
