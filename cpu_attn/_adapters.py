# SPDX-License-Identifier: Apache-2.0
"""Which libraries cpu-attn has an adapter for, in the versions that each was tested with, and whether they are here.

By the metadata of what is installed: nothing is imported.
"""

from __future__ import annotations

import os
import re
from importlib import metadata

# Distribution: the first version tested, and the first one that is not. The extras in pyproject.toml say the same.
TESTED = {"torch": ("2.13", "2.14"), "transformers": ("5.23", "5.24"), "vllm": ("0.33", "0.34")}
# cpu_attn.NAME and what it needs, its own library first. vLLM pins a torch of its own (0.33 that of 2.14), and what is
# asked of tensors there is their memory alone.
NEEDS = {"torch": ("torch",), "transformers": ("transformers", "torch"), "vllm": ("vllm",)}


def tested(distribution: str) -> str:
    """The range as pip writes it."""
    low, high = TESTED[distribution]
    return f">={low},<{high}"


def version(distribution: str) -> str | None:
    """What is installed of it."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def missing(name: str) -> str:
    """Why ``cpu_attn.NAME`` cannot be imported here; empty where it can."""
    for distribution in NEEDS[name]:
        found = version(distribution)
        if found is None:
            return f"{distribution} is not installed; pip install 'cpu-attn[{name}]' brings {tested(distribution)}"
        low, high = map(_release, TESTED[distribution])
        if not low <= _release(found) < high:
            return f"{distribution} is {found}, tested with {tested(distribution)}"
    return ""


def require(name: str) -> None:
    """ImportError unless what ``cpu_attn.NAME`` needs is installed in a version that it was tested with."""
    if reason := missing(name):
        raise ImportError(f"cpu_attn.{name}: {reason}")


def vllm_enabled() -> bool:
    """What the environment says of the vLLM plugin, which is on by itself."""
    return os.environ.get("CPU_ATTN_VLLM") != "0"


def _release(text: str) -> tuple[int, ...]:
    """2.13.0rc1+cpu: (2, 13, 0)."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else ()
