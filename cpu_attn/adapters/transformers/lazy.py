# SPDX-License-Identifier: Apache-2.0
"""This module has tensors that say what they would hold, and hold it only once somebody looks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map_only


class Inference(torch.autograd.Function):  # type: ignore[misc]
    """Makes tensors of inputs that need gradients: models run without no_grad, but no backward pass goes unnoticed."""

    @staticmethod
    def forward(ctx: Any, make: Callable[[], torch.Tensor], *inputs: Any) -> torch.Tensor:
        return make()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError("cpu_attn has no backward pass; train with another attn_implementation, without PagedCache")


class LazyTensor(torch.Tensor):  # type: ignore[misc]
    """Passes through a model to our attention function as it is; to every operation of torch it is :meth:`dense`.

    So a model, or another attention function, that slices a mask or reads keys gets the right numbers, only slower.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # its results would be instances of this class

    @classmethod
    def without_memory(cls, shape: tuple[int, ...], dtype: torch.dtype, strides: tuple[int, ...] | None = None) -> Any:
        """Makes a tensor without memory, for callers that dynamo does not trace. strides: those of dense(), dense ones
        unless said."""
        return torch.Tensor._make_wrapper_subclass(cls, shape, strides, dtype=dtype)

    @staticmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __new__(cls, shape: tuple[int, ...], dtype: torch.dtype, strides: tuple[int, ...] | None = None) -> Any:
        """Does what :meth:`without_memory` does for any caller."""
        return cls.without_memory(shape, dtype, strides)

    def dense(self) -> torch.Tensor:
        raise NotImplementedError

    @property
    def data(self) -> torch.Tensor:
        """Gives a detached tensor. It cannot be set, as dense() would not notice."""
        return self.detach()

    def numpy(self, *, force: bool = False) -> np.ndarray[Any, Any]:
        found: np.ndarray[Any, Any] = self.dense().numpy(force=force)
        return found

    def tolist(self) -> Any:
        return self.dense().tolist()

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        raise BufferError(f"{type(self).__name__}: no memory to share; a clone() has some")

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.dense().clone()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({tuple(self.shape)}, {self.dtype})"

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _writes(func._schema.arguments, args, kwargs):
            raise RuntimeError(f"{func}: would change in place what a cache holds; change a clone() of it")
        looks = {x: x.dense() for x in tree_leaves((args, kwargs)) if isinstance(x, LazyTensor)}
        held = [dense for x, dense in looks.items() if isinstance(x, ReadOnly)]
        args, kwargs = tree_map_only(LazyTensor, looks.get, (args, kwargs))
        found = func(*args, **kwargs)
        return tree_map_only(torch.Tensor, lambda x: ReadOnly(x) if _is_view(x, held) else x, found)


class ReadOnly(LazyTensor):
    """Raises RuntimeError for operations that would change it, or a view of it."""

    @staticmethod
    def __new__(cls, dense: torch.Tensor) -> ReadOnly:
        found: ReadOnly = LazyTensor.__new__(cls, dense.shape, dense.dtype, dense.stride())
        found._dense = dense
        return found

    _dense: torch.Tensor

    def dense(self) -> torch.Tensor:
        return self._dense

    def numpy(self, *, force: bool = False) -> np.ndarray[Any, Any]:
        found = super().numpy(force=force)
        found.flags.writeable = False
        return found


def _is_view(x: torch.Tensor, held: list[torch.Tensor]) -> bool:
    return any(torch._C._is_alias_of(x, dense) for dense in held)


def _writes(arguments: Any, args: Any, kwargs: Any) -> bool:
    """Says whether an operation of such arguments changes one that is read-only."""
    given = dict(zip((x.name for x in arguments), args, strict=False)) | kwargs
    written = [given.get(x.name) for x in arguments if x.alias_info and x.alias_info.is_write]
    return any(isinstance(x, ReadOnly) for x in tree_leaves(written))
