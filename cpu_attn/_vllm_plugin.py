# SPDX-License-Identifier: Apache-2.0
"""What vLLM calls in every process where cpu-attn is installed (entry point ``vllm.general_plugins``).

Apart from :mod:`cpu_attn.vllm`, which raises where it cannot work: a plugin is loaded for users who never asked for it,
on any platform, and may at most say why it stays away.
"""

from __future__ import annotations

import pkgutil

from cpu_attn import __version__, _adapters

BACKEND = "cpu_attn.vllm.Backend"


def _fault() -> str:
    """Why vLLM could not import the backend, which it does where a fault ends the engine; empty where it can."""
    try:
        pkgutil.resolve_name(BACKEND)
    except Exception as e:
        return f"{_adapters.untested('vllm')[0]}, and {type(e).__name__}: {e}"
    return ""


def register() -> None:
    """Puts :class:`cpu_attn.vllm.Backend` in the place of vLLM's ``CPU_ATTN``, for the process.

    Does nothing where ``CPU_ATTN_VLLM=0`` or the platform is not a CPU. With a version that it does not work with it
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
    logger.info("cpu-attn %s runs the attention (CPU_ATTN_VLLM=0 turns it off)", __version__)
