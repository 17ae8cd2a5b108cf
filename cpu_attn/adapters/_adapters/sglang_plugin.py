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


def register() -> None:
    """Makes ``--attention-backend cpu_attn`` mean :class:`cpu_attn.sglang.Backend`. With a version that it does not
    work with it logs one warning, and the name is not there."""
    if reason := _adapters.missing("sglang"):
        logging.getLogger(__name__).warning("cpu-attn %s stays away from SGLang: %s", __version__, reason)
        return
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.server_args import add_attention_backend_choices

    add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(_backend)


def _backend(model_runner: Any) -> Any:
    return pkgutil.resolve_name(BACKEND)(model_runner)
