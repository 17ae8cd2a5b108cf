# SPDX-License-Identifier: Apache-2.0
"""Compares the signatures that cpu_attn.flashinfer, cpu_attn.flash_attn and cpu_attn.linear_attention offer with those
of the libraries, read from what a package index has, and writes the tables of docs/flashinfer.md and
docs/flash_attn.md, docs/reference/*_*.csv.

    python -m cpu_attn.tests.peers build/peers          # says what differs, exit status 1 if something does
    python -m cpu_attn.tests.peers build/peers --write  # and writes the tables

`make peers` fetches the packages. None of them is imported: they need a GPU.
"""

from __future__ import annotations

import argparse
import ast
import csv
import inspect
import io
import math
import re
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from cpu_attn.flash_attn.install import MODULES as FLASH_ATTN
from cpu_attn.flashinfer import arguments
from cpu_attn.flashinfer.install import MODULES as FLASHINFER
from cpu_attn.linear_attention.install import MODULES as LINEAR

_MLA = ("mla/_core.py", "mla/_batch_mla/_wrapper.py", "mla/_batch_mla/_contracts.py")
# The files of a package in which the names of a module are defined.
_FLASHINFER: dict[str, tuple[str, ...]] = {
    f"flashinfer.{name}": (f"flashinfer/{name}.py",)
    for name in ("cascade", "decode", "gdn_decode", "gdn_prefill", "page", "pod", "prefill", "rope", "sparse", "xqa")
}
_FLASHINFER |= {
    "flashinfer.attention": ("flashinfer/attention/_core.py",),
    "flashinfer.mla": tuple(f"flashinfer/{file}" for file in _MLA),
    "flashinfer.norm": ("flashinfer/norm/__init__.py",),
    "flashinfer.quantization": ("flashinfer/quantization/packbits.py",),
}
_FLASH_ATTN: dict[str, tuple[str, ...]] = {
    "flash_attn.flash_attn_interface": ("flash_attn/flash_attn_interface.py",),
    "flash_attn.bert_padding": ("flash_attn/bert_padding.py",),
    "flash_attn.layers.rotary": ("flash_attn/layers/rotary.py",),
    "flash_attn_interface": ("hopper/flash_attn_interface.py",),
}
_FOUR: dict[str, tuple[str, ...]] = {"flash_attn.cute": ("flash_attn/cute/interface.py",)}
_FLA: dict[str, tuple[str, ...]] = {
    f"fla.ops.{name}": tuple(f"fla/ops/{name}/{kind}.py" for kind in ("chunk", "fused_recurrent"))
    for name in ("gated_delta_rule", "kda")
}
_CONV: dict[str, tuple[str, ...]] = {
    "causal_conv1d": ("causal_conv1d/causal_conv1d_interface.py",),
    "causal_conv1d.causal_conv1d_varlen": ("causal_conv1d/causal_conv1d_varlen.py",),
}
_MAMBA: dict[str, tuple[str, ...]] = {
    f"mamba_ssm.ops.triton.{name}": (f"mamba_ssm/ops/triton/{name}.py",)
    for name in ("selective_state_update", "ssd_combined")
}
PEERS = {
    "flashinfer": ("flashinfer_python-*.whl", _FLASHINFER, FLASHINFER),
    "flash_attn": ("flash_attn-2*.tar.gz", _FLASH_ATTN, FLASH_ATTN),
    "flash_attn_4": ("flash_attn_4-*.whl", _FOUR, FLASH_ATTN),
    "fla": ("fla_core-*.whl", _FLA, LINEAR["fla"]),
    "causal_conv1d": ("causal_conv1d-*.tar.gz", _CONV, LINEAR["causal_conv1d"]),
    "mamba_ssm": ("mamba_ssm-*.tar.gz", _MAMBA, LINEAR["mamba_ssm"]),
}
# What takes any arguments and hands them on.
_BEHIND = {"BatchDecodeWithPagedKVCacheWrapper.plan": "BatchDecodeWithPagedKVCacheWrapper._plan_impl"}
# Names of older releases, which programs still call, and what is inherited here.
_OLD = ("end_forward", "prewarm_paged_kv_stride_variant", "reset_workspace_buffer")
# Parameters that differ on purpose: a keyword of vLLM's flash-attn, and what flash-attn has since its last release.
_MORE = {"flash_attn_varlen_func.seqused_k", "_flash_attn_varlen_forward.num_splits"}
_MORE |= {f"flash_attn_{name}func.return_attn_probs" for name in ("", "qkvpacked_", "varlen_")}
# Of these libraries a few functions are here, which their page lists.
_FEW = ("fla", "causal_conv1d", "mamba_ssm")
# What is no part of the interface: functions that compile kernels, and classes that hold a backward pass.
_INSIDE = re.compile(
    r"get_\w+_module|\w*(Func|_|Residual|Axis|Runner|Module)|fmha_varlen_plan|make_\w+|maybe_\w+|round_\w+"
)

Table = list[list[str]]
Parameters = dict[str, tuple[bool, Any]]  # whether it is a keyword only, and its default
NEEDED = inspect.Parameter.empty


def sources(archive: Path) -> Iterator[tuple[str, str]]:
    """The Python files of a wheel or of a source distribution, as they lie in its package."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                if name.endswith(".py"):
                    yield name, wheel.read(name).decode()
        return
    with tarfile.open(archive) as packed:
        for member in packed:
            file = packed.extractfile(member) if member.name.endswith(".py") else None
            if file is not None:
                yield member.name.split("/", 1)[1], file.read().decode()


def _default(node: ast.expr | None) -> Any:
    if node is None:
        return NEEDED
    text = ast.unparse(node)
    try:
        return eval(text, {"torch": torch, "math": math})
    except Exception:
        return text


def parameters(function: ast.FunctionDef) -> Parameters:
    given, found = function.args, Parameters()
    places = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(places) - len(given.defaults)) + [*given.defaults]
    for argument, default in zip(places, defaults, strict=True):
        found[argument.arg] = (False, _default(default))
    for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        found[argument.arg] = (True, _default(default))
    return found


def _functions(body: list[ast.stmt], inside: str = "") -> Iterator[tuple[str, Parameters]]:
    for node in body:
        if isinstance(node, ast.FunctionDef) and not any("overload" in ast.unparse(d) for d in node.decorator_list):
            yield inside + node.name, parameters(node)
        elif isinstance(node, ast.ClassDef):
            yield node.name, {}
            yield from _functions(node.body, f"{node.name}.")
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield inside + node.targets[0].id, {}


def theirs(archive: Path, files: dict[str, tuple[str, ...]]) -> dict[str, dict[str, Parameters]]:
    """Of each module its functions, classes and methods, and what else it names, without parameters."""
    wanted, texts = {file for each in files.values() for file in each}, {}
    for name, text in sources(archive):
        if name in wanted:
            texts[name] = text
    return {
        module: {name: found for file in each for name, found in _functions(ast.parse(texts[file]).body)}
        for module, each in files.items()
    }


def ours(module: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Functions, and methods of classes, that take parameters of their own."""
    for name, x in module.items():
        if inspect.isclass(x):
            for method, function in inspect.getmembers(x, inspect.isfunction):
                if not method.startswith("_") or method == "__init__":
                    yield f"{name}.{method}", function
        elif inspect.isfunction(x):
            yield name, x


def differences(name: str, function: Any, there: Parameters) -> Iterator[str]:
    """What a caller of theirs would notice."""
    here = inspect.signature(function).parameters
    for parameter, (keyword, default) in there.items():
        mine = here.get(parameter)
        if mine is None:
            yield f"{name}: has no {parameter}"
        elif mine.default != default and not (mine.default is NEEDED and default is NEEDED):
            yield f"{name}: {parameter} is {mine.default!r} by default, theirs {default!r}"
        elif mine.kind is mine.KEYWORD_ONLY and not keyword:
            yield f"{name}: {parameter} is a keyword only"
    places = [p for p, (keyword, _) in there.items() if not keyword]
    first = [p for p, x in here.items() if x.kind is x.POSITIONAL_OR_KEYWORD]
    if first[: len(places)] != places and all(p in first for p in places):
        yield f"{name}: the order is {first}, theirs {places}"
    for parameter, x in here.items():
        more = parameter not in there and x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD)
        if more and f"{name}.{parameter}" not in _MORE:
            yield f"{name}: has {parameter}, which theirs has not"


def compared(peer: str, folder: Path) -> tuple[list[str], dict[str, list[str]]]:
    """What differs; and of each of their modules the names that are not here."""
    pattern, files, modules = PEERS[peer]
    found = sorted(folder.glob(pattern))
    if not found:
        raise FileNotFoundError(f"{folder}: has no {pattern}; `make peers` fetches it")
    there = theirs(found[-1], files)
    wrong, missing = list[str](), dict[str, list[str]]()
    for module, names in there.items():
        for name, function in ours(modules[module]):
            if name.endswith(".__init__") and name not in names:
                continue
            signature = names.get(_BEHIND.get(name, name))
            if signature is None:
                if name.rpartition(".")[2] not in _OLD and not any(
                    name.rpartition(".")[2] == other.rpartition(".")[2] for other in names if "." in other
                ):  # methods that are inherited there
                    wrong.append(f"{module}.{name}: theirs has none")
            elif signature:
                wrong += (f"{module}.{each}" for each in differences(name, function, signature))
        missing[module] = sorted(
            name
            for name, signature in names.items()
            if "." not in name
            and not name.startswith("_")
            and not _INSIDE.fullmatch(name)
            and (signature or f"{name}.__init__" in names)
            and name not in modules[module]
        )
        missing[module] += sorted(
            name
            for name in names
            if "." in name
            and (owner := modules[module].get(name.partition(".")[0]))
            and not name.partition(".")[2].startswith("_")
            and not hasattr(owner, name.partition(".")[2])
        )
    return wrong, missing


def _grouped(reasons: dict[str, str], used: set[str]) -> Table:
    rows: dict[str, list[str]] = {}
    for name, why in reasons.items():
        if name in used:
            rows.setdefault(why, []).append(name)
    return [[_code(names), why] for why, names in rows.items()]


def _code(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def tables(peer: str, missing: dict[str, list[str]]) -> dict[str, Table]:
    """What the page of a library says, by the names of its tables."""
    found = {
        f"{peer}_missing": [["module", "names that are not here"]]
        + [[f"`{module}`", _code(names)] for module, names in missing.items() if names]
    }
    if peer == "flashinfer":
        used = {p for m in FLASHINFER.values() for _, f in ours(m) for p in inspect.signature(f).parameters}
        found["flashinfer_ignored"] = [["not looked at", "why"], *_grouped(arguments.IGNORED, used)]
        found["flashinfer_refused"] = [["NotImplementedError where given", "why"], *_grouped(arguments.REFUSED, used)]
    return found


def as_csv(table: Table) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(table)
    return text.getvalue()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("folder", type=Path, help="where the packages are")
    parser.add_argument("--docs", type=Path, required=True, help="docs/, which has the tables")
    parser.add_argument("--write", action="store_true", help="write the tables")
    options = parser.parse_args()
    wrong: list[str] = []
    for peer in PEERS:
        faults, missing = compared(peer, options.folder)
        wrong += faults
        for name, table in {} if peer in _FEW else tables(peer, missing).items():
            file, after = options.docs / "reference" / f"{name}.csv", as_csv(table)
            if options.write:
                file.write_text(after, encoding="utf-8")
            elif after != file.read_text(encoding="utf-8"):
                wrong.append(f"{file.name}: the table is another; make peers WRITE=1 writes it")
    print("\n".join(wrong) or "the signatures are theirs")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
