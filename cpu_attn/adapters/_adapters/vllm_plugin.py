# SPDX-License-Identifier: Apache-2.0
"""vLLM calls this module in every process where cpu-attn is installed (entry point ``vllm.general_plugins``).

It is apart from :mod:`cpu_attn.vllm`, which raises where it cannot work: a plugin is loaded for users who never asked
for it, on any platform, and may at most say why it stays away.
"""

from __future__ import annotations

import pkgutil
from typing import Any

from cpu_attn import __version__, _adapters

BACKEND = "cpu_attn.vllm.Backend"
MLA_BACKEND = "cpu_attn.vllm.MLABackend"
LAYERS = "cpu_attn.vllm.layers:give"
BALANCED, LOADER = "cpu_attn_balanced", "cpu_attn.vllm.balance.Loader"  # a --load-format
# vLLM's CPU platform sets these fields of a VllmConfig to what its own MLA backend can do: whole prompts, none of them
# found in the cache, and blocks of 16. Here they keep what the user asked for.
KEPT = {
    "cache_config": ("enable_prefix_caching", "block_size"),
    "scheduler_config": ("enable_chunked_prefill", "max_num_batched_tokens"),
}


class MLAPlatform:
    """Changes the answers of vLLM's platform about MLA, of which the registry of backends is but one: it is put before
    the platform's class. Sparse attention (``index_topk``) stays with vLLM."""

    @classmethod
    def get_attn_backend_cls(cls, selected_backend: Any, attn_selector_config: Any, num_heads: Any = None) -> Any:
        asked = attn_selector_config
        if not asked.use_mla or asked.use_sparse:
            return super().get_attn_backend_cls(selected_backend, asked, num_heads)  # type: ignore[misc]
        backend = pkgutil.resolve_name(MLA_BACKEND)
        if not backend.supports_kv_cache_dtype(asked.kv_cache_dtype):
            raise ValueError(
                f"--kv-cache-dtype {asked.kv_cache_dtype}: latent caches (MLA) take "
                f"{', '.join(backend.supported_kv_cache_dtypes)}"
            )
        return MLA_BACKEND

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        kept = [(getattr(vllm_config, part), name) for part, names in KEPT.items() for name in names]
        before = [getattr(part, name) for part, name in kept]
        super().check_and_update_config(vllm_config)  # type: ignore[misc]
        model = vllm_config.model_config
        if model is not None and model.use_mla and not hasattr(model.hf_text_config, "index_topk"):
            for (part, name), value in zip(kept, before, strict=True):
                setattr(part, name, value)


def _fault() -> str:
    """Says why vLLM could not import the backend, which vLLM does at a point where an error ends the engine; empty
    where it can."""
    try:
        pkgutil.resolve_name(BACKEND)
    except Exception as e:
        return f"{_adapters.untested('vllm')[0]}, and {type(e).__name__}: {e}"
    return ""


def _register_loader() -> None:
    from vllm.model_executor import model_loader

    if BALANCED not in model_loader._LOAD_FORMAT_TO_MODEL_LOADER:  # it warns of a second time
        model_loader.register_model_loader(BALANCED)(pkgutil.resolve_name(LOADER))


def register() -> None:
    """Puts :class:`cpu_attn.vllm.Backend` in the place of vLLM's ``CPU_ATTN`` and :class:`cpu_attn.vllm.MLABackend` in
    that of its backends for MLA, for the process.

    It does nothing where ``CPU_ATTN_VLLM=0`` or the platform is not a CPU. With a version that it does not work with it
    logs one warning, and vLLM's own backend stays.
    """
    if not _adapters.vllm_enabled():
        return
    from vllm.logger import init_logger
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    logger = init_logger("vllm.plugins.cpu_attn")  # vLLM has handlers for its own namespace only
    reason = _adapters.missing("vllm")
    if not reason and _adapters.untested("vllm"):
        reason = _fault()
    if reason:
        logger.warning("cpu-attn %s stays away, vLLM's own CPU attention runs: %s", __version__, reason)
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_ATTN, BACKEND)
    _register_loader()
    layers = pkgutil.resolve_name(LAYERS)()
    if not isinstance(current_platform, MLAPlatform):
        platform = type(current_platform)
        current_platform.__class__ = type(platform.__name__, (MLAPlatform, platform), {})
    runs = ", ".join(["the attention", *layers])
    logger.info("cpu-attn %s runs %s (CPU_ATTN_VLLM=0 turns it off)", __version__, runs)
