# SPDX-License-Identifier: Apache-2.0
"""This module says which isas and engines are there, and which one a name means here."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

from cpu_attn._dtypes import DTYPE_CODES
from cpu_attn._errors import UnavailableError, none_of
from cpu_attn._native import ffi, lib

ENGINE_NAMES = ("native", "onednn", "reference")


@dataclass(frozen=True)
class Isa:
    """Describes one isa of the table. ``reason`` says why it cannot run here, and is empty where it can."""

    name: str
    unit: str
    compiled: bool
    supported: bool
    reason: str
    index: int


@dataclass(frozen=True)
class Engine:
    """Describes one engine. ``reason`` says why it is not there, and is empty where it is."""

    name: str
    available: bool
    reason: str


def reason_of(text: Any) -> str:
    """Gives in words what a ``missing`` of native/isa said."""
    reason: str = ffi.string(text).decode()
    lacks = reason and " " not in reason  # one word is the name of a feature, more are a whole reason
    return f"this CPU or its operating system lacks {reason}" if lacks else reason


@cache
def isas() -> tuple[Isa, ...]:
    """Lists every isa of this build, those that run here first, best first.

    Returns:
        Rows with ``name``; ``unit`` (matrix, vector or scalar); ``compiled`` and ``supported``, whether this build and
        this machine have the isa; ``reason``, why it cannot run here, or "". The function raises no errors.

    Example:
        >>> from cpu_attn import isas
        >>> "scalar" in [isa.name for isa in isas() if isa.supported]
        True
    """
    info = ffi.new("ca_isa_info *")
    found: list[Isa] = []
    while lib.ca_isa(len(found), info):
        name, unit = (ffi.string(s).decode() for s in (info.name, info.unit))
        found.append(Isa(name, unit, bool(info.compiled), bool(info.supported), reason_of(info.reason), len(found)))
    return tuple(sorted(found, key=lambda i: (not i.supported, i.index)))


def _onednn() -> ModuleType:
    """Imports the module that finds oneDNN as late as it can: it needs importlib.metadata, which would take 20 of the
    package's 100 ms at every start."""
    from cpu_attn import _onednn_loader

    return _onednn_loader


def engines() -> tuple[Engine, ...]:
    """Lists every engine.

    Returns:
        Rows with ``name``; ``available``, whether the engine is here; ``reason``, why it is not, or "". The function
        raises no errors.

    Example:
        >>> from cpu_attn import engines
        >>> [engine.name for engine in engines()]
        ['native', 'onednn', 'reference']
    """
    try:
        _onednn().load()
        reason = ""
    except UnavailableError as e:
        reason = str(e)
    return (Engine("native", True, ""), Engine("onednn", not reason, reason), Engine("reference", True, ""))


def asked(argument: str, name: Any, variable: str) -> str:
    """Gives the name that ``auto`` stands for in this environment, or else the name itself."""
    if not isinstance(name, str):
        raise TypeError(f"{argument}: expected a name, got {type(name).__name__}")
    return os.environ.get(variable) or "auto" if name == "auto" else name


def _who_asked(argument: str, name: str, variable: str) -> str:
    return variable if os.environ.get(variable) == name else argument


def resolve_isa(name: str, dtype: str, head_size: int) -> Isa:
    """Gives the isa that ``name`` means here; ``auto`` follows CPU_ATTN_ISA, then takes the best."""
    name = asked("isa", name, "CPU_ATTN_ISA")
    return _resolve_isa(name, dtype, name == "vec16" and head_size % 16 != 0)


_fault: Callable[[str, str], str]
_found: dict[tuple[str, str], str] = {}
_testing = threading.RLock()


def _renew_lock() -> None:
    global _testing
    _testing = threading.RLock()  # the old lock may be held by a thread that this child does not have


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def set_self_test(fault: Callable[[str, str], str]) -> None:
    """Sets the function that :func:`self_test` calls. cpu_attn/_self_test.py provides it and cannot be imported here,
    since its calls ask this module for their isa."""
    global _fault
    _fault = fault


def self_test(isa: Isa, dtype: str) -> str:
    """Says what is wrong with a matrix isa's results in this process, "" if nothing is. Each dtype is tested once, and
    a fault is also a RuntimeWarning then."""
    key = (isa.name, dtype)
    with _testing:
        known = key in _found
        if not known:
            _found[key] = _fault(*key)
    if _found[key] and not known:
        text = f"isa {isa.name!r} fails its self-test in {dtype}: {_found[key]}. auto takes the next one"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    return _found[key]


def able(dtype: str) -> list[Isa]:
    """Lists the isas that run here and have kernels for a dtype, best first."""
    kernel = ffi.new("ca_kernel_info *")
    return [i for i in isas() if i.supported and lib.ca_isa_kernel(i.index, DTYPE_CODES[dtype], kernel)]


def automatic(dtype: str) -> Iterator[Isa]:
    """Gives those of :func:`able` that ``auto`` may take: an isa with a matrix unit has to pass its self-test."""
    return (i for i in able(dtype) if i.unit != "matrix" or not self_test(i, dtype))


@cache
def _resolve_isa(name: str, dtype: str, odd_vec16: bool) -> Isa:
    runs = able(dtype)
    if odd_vec16:
        raise ValueError("isa: 'vec16' is for head sizes that are multiples of 16; 'vec' takes any")
    if name == "auto":
        return next(automatic(dtype))
    if name in ("vec", "vec16"):
        return next(i for i in runs if i.unit != "matrix")
    for isa in runs:
        if isa.name == name:
            return isa
    there = ", ".join(i.name for i in runs)
    for isa in isas():
        if isa.name == name:
            reason = isa.reason or f"it has no {dtype} kernel"
            raise UnavailableError(f"isa: {name!r} is not available here: {reason}. Available for {dtype}: {there}")
    who, known = _who_asked("isa", name, "CPU_ATTN_ISA"), ("auto", "vec", "vec16", *(i.name for i in isas()))
    raise ValueError(f"{none_of(who, name, known)}. Available here: {there}")


def serves(isa: str, dtype: str) -> bool:
    """Says whether ``isa`` has kernels for the dtype here."""
    try:
        resolve_isa(isa, dtype, 16)
    except UnavailableError:
        return False
    return True


def resolve_engine(name: str) -> tuple[str, Any]:
    """Gives the name and the ``ca_engine *`` of an engine; ``auto`` follows CPU_ATTN_ENGINE, then means native."""
    name = asked("engine", name, "CPU_ATTN_ENGINE")
    if name in ("auto", "native"):
        return "native", ffi.NULL
    if name == "reference":
        return name, lib.ca_reference_engine()
    if name == "onednn":
        return name, _onednn().engine()
    raise ValueError(none_of(_who_asked("engine", name, "CPU_ATTN_ENGINE"), name, ("auto", *ENGINE_NAMES)))
