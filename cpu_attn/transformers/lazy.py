# SPDX-License-Identifier: Apache-2.0
"""Tensors that say what they would hold, and hold it only once somebody looks."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map_only


class LazyTensor(torch.Tensor):  # type: ignore[misc]
    """Passes through a model to our attention function as it is; to every operation of torch it is :meth:`dense`.

    So a model, or another attention function, that slices a mask or reads keys gets the right numbers, only slower.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # its results would be of this class

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], dtype: torch.dtype, *args: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)

    def dense(self) -> torch.Tensor:
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(LazyTensor, lambda x: x.dense(), (args, kwargs or {}))
        return func(*args, **kwargs)
