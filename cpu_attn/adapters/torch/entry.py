# SPDX-License-Identifier: Apache-2.0
"""This module has what stands in for another library's functions: its words in errors, checks of tensors, its modules'
names."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

import torch
from cpu_attn import UnavailableError, _check
from cpu_attn._arrays import Array, stored, view
from torch import Tensor

Run = TypeVar("Run", bound=Callable[..., Any])


class RefusedError(NotImplementedError, ValueError):
    """An argument asks for what has no meaning here. The text says why."""


def entry(**names: str) -> Callable[[Run], Run]:
    """Decorates a function that users call: errors name its arguments as it does, and dynamo does not trace what is
    behind it, unless that is a constructor. (torch.compiler.disable, which is public, imports dynamo at once; that
    takes as long as torch's own import.)"""

    def wrapped(run: Run) -> Run:
        @functools.wraps(run)
        def call(*args: Any, **options: Any) -> Any:
            try:
                return run(*args, **options)
            except (TypeError, ValueError, UnavailableError) as e:
                raise _check.renamed(e, names) from None

        hidden: Run = call if run.__name__ == "__init__" else torch._disable_dynamo(call)  # type: ignore[assignment]
        return hidden

    return wrapped


def tensors(**named: Any) -> list[Tensor]:
    """Gives the tensors without what only a backward pass would need, once all of them are dense, real numbers in
    memory of the CPU."""
    for name, x in named.items():
        _check.instance(name, x, torch.Tensor)
        if x.layout != torch.strided or x.is_nested:
            raise TypeError(f"{name}: layout {x.layout}, expected a dense tensor, neither sparse nor nested")
        if not x.is_cpu:
            raise ValueError(f"{name}: lies on {x.device}, expected cpu")
        if x.is_complex() or x.is_quantized:
            raise TypeError(f"{name}: dtype {x.dtype}, expected real numbers without a scale of their own")
        try:
            stored(x)
        except ValueError as e:
            raise ValueError(f"{name}: {e}") from None
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name}: requires grad, for which there is no backward pass; call it under torch.no_grad(), or pass "
                "it detached"
            )
    return [x.detach() for x in named.values()]


def optional(**named: Any) -> list[Any]:
    """Does what :func:`tensors` does where some of them may be None."""
    return [x if x is None else tensors(**{name: x})[0] for name, x in named.items()]


# Overlap is found whatever elements mean, so they are described as those of a dtype of their size.
_OF_SIZE = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}


def _memory(name: str, x: Tensor) -> Array:
    """Gives the memory of a tensor of any number of axes, of which those that leave no gap count as one."""
    runs: list[tuple[int, int]] = []
    for size, stride in zip(x.shape, x.stride(), strict=True):
        if size != 1:
            runs.append((size * runs.pop()[0] if runs and runs[-1][1] == size * stride else size, stride))
    shape, strides = zip(*runs, strict=True) if runs else ((), ())
    return view(name, x.as_strided(shape, strides).view(_OF_SIZE[x.element_size()]))


def written(given: Mapping[str, Any], *in_place: str, **outputs: Any) -> list[Any]:
    """Does what :func:`optional` does for tensors that a call writes, and checks their memory: no two elements of one
    coincide, and none shares a byte with another one or with a tensor that the call is given and reads, but that those
    of ``in_place`` may be the very same. A call asks this before it writes anything."""
    found = optional(**outputs)
    if not any(isinstance(x, Tensor) for x in found):
        return found
    others = {name: (x, *_storage(x)) for name, x in given.items() if isinstance(x, Tensor)}
    for i, (name, x) in enumerate(zip(outputs, found, strict=True)):
        if x is None:
            continue
        if x.is_neg():
            raise ValueError(f"{name}: is the negative of what lies in its memory; pass its resolve_neg()")
        if x.is_inference() and not torch.is_inference_mode_enabled():
            found[i] = x = torch.from_dlpack(x)  # torch itself would write to it in some ways and not in others
        if not x.is_contiguous():
            _check.writable(name, _memory(name, x))
        first, end = _storage(x)
        for other, (y, begin, stop) in others.items():
            if first < stop and begin < end and not (other in in_place and _same(x, y)):
                _check.disjoint(name, _memory(name, x), {other: _memory(other, y)})
        others[name] = x, first, end
    return found


def _storage(x: Tensor) -> tuple[int, int]:
    """Gives the addresses of the first byte of a tensor's storage and of the one behind the last."""
    storage = x.untyped_storage()
    first = storage.data_ptr()
    return first, first + storage.nbytes()


def _same(x: Tensor, y: Tensor) -> bool:
    """Says whether two tensors have the same elements in the same memory."""
    return bool(x.data_ptr() == y.data_ptr()) and (x.dtype, x.shape, x.stride()) == (y.dtype, y.shape, y.stride())


def axes(name: str, x: Tensor, **sizes: int | None) -> None:
    """Checks a tensor's axes: their names and sizes, a size of None being free."""
    if x.dim() != len(sizes):
        raise ValueError(f"{name}: {x.dim()} axes, expected {len(sizes)}: [{', '.join(sizes)}]")
    for axis, (have, (what, size)) in enumerate(zip(x.shape, sizes.items(), strict=True)):
        if size not in (None, have):
            raise ValueError(f"{name}: axis {axis} is {have}, expected {what} = {size}")


def stand_in(modules: Mapping[str, Mapping[str, Any]]) -> None:
    """Makes these modules importable in this process. modules: what is in each, by name. The first is the library,
    which must not be here otherwise (RuntimeError), but for a stand-in of ours; a module that others are in comes
    before them."""
    library = next(iter(modules))
    there = sys.modules.get(library)
    if there is not None and modules[library].items() <= vars(there).items():
        return
    if found := there or importlib.util.find_spec(library):
        where = getattr(found, "__file__", None) or getattr(found, "origin", None)
        raise RuntimeError(f"{library}: another one is here ({where}), which install() does not replace")
    for name, contents in modules.items():
        parent, _, child = name.rpartition(".")
        module, package = ModuleType(name), any(other.startswith(f"{name}.") for other in modules)
        module.__spec__ = ModuleSpec(name, None, origin="cpu_attn", is_package=package)
        module.__package__ = module.__spec__.parent
        if package:
            module.__path__ = []
        vars(module).update(contents)
        sys.modules[name] = module
        if parent and child not in modules[parent]:  # a function may have the name of its module
            setattr(sys.modules[parent], child, module)
