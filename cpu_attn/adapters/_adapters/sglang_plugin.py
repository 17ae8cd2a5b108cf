# SPDX-License-Identifier: Apache-2.0
"""SGLang calls this module in every process where cpu-attn is installed (entry point ``sglang.srt.plugins``).

It is apart from :mod:`cpu_attn.sglang`, which raises where it cannot work: a plugin is loaded for users who never asked
for it, on any platform. It adds a name to choose from and changes nothing for whoever does not choose it.
"""

from __future__ import annotations

import logging
import pkgutil
from typing import Any

from cpu_attn import __version__, _adapters

NAME, BACKEND = "cpu_attn", "cpu_attn.sglang:Backend"
_CACHES = "sglang.srt.mem_cache.kv_cache_configurator"


def register() -> None:
    """Makes ``--attention-backend cpu_attn`` mean :class:`cpu_attn.sglang.Backend`. With a version that it does not
    work with it logs one warning, and the name is not there."""
    if reason := _adapters.missing("sglang"):
        logging.getLogger(__name__).warning("cpu-attn %s stays away from SGLang: %s", __version__, reason)
        return
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import add_attention_backend_choices

    add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(_backend)
    HookRegistry.register(f"{_CACHES}.KVCacheConfigurator.configure", _configure, HookType.AROUND)


def _backend(model_runner: Any) -> Any:
    return pkgutil.resolve_name(BACKEND)(model_runner)


def _configure(configure: Any, configurator: Any, **options: Any) -> Any:
    """SGLang makes a cache of fp8_e4m3 on a CPU for its own attention alone, which it asks two functions about. For
    whoever chose cpu_attn they say what it wants to hear, as long as it makes the cache."""
    module = pkgutil.resolve_name(_CACHES)
    asked = {"attention_backends": lambda: ("intel_amx",), "cpu_has_amx_support": lambda: True}
    fp8 = str(configurator.kv_cache_dtype) == "torch.float8_e4m3fn"
    if not fp8 or {*module.attention_backends()} != {NAME}:
        return configure(configurator, **options)
    before = {name: getattr(module, name) for name in asked}
    vars(module).update(asked)
    try:
        return configure(configurator, **options)
    finally:
        vars(module).update(before)
