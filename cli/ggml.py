# SPDX-License-Identifier: Apache-2.0
"""This module calls ggml, which llama.cpp computes with, through ctypes: as much of it as attention on a CPU takes.

Its tensors, contexts, graphs and backends are pointers here, and no more is known of them.
"""

from __future__ import annotations

import ctypes
import importlib.util
import weakref
from ctypes import c_bool, c_float, c_int, c_int64, c_size_t, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

# These are numbers of enum ggml_type, which stand in files of models and so never change.
TYPES = {"float32": 0, "float16": 1, "bfloat16": 30, "q4_0": 2, "q5_0": 6, "q8_0": 8}
Q_BLOCK = 32  # elements of a row that have a scale in common in q4_0, q5_0 and q8_0


DELTA_RULE = "ggml_gated_delta_net"


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


_SIGNATURES: dict[str, tuple[Any, ...]] = {  # the type of the result, then those of the arguments
    "ggml_tensor_overhead": (c_size_t,),
    "ggml_graph_overhead_custom": (c_size_t, c_size_t, c_bool),
    "ggml_row_size": (c_size_t, c_int, c_int64),
    "ggml_init": (c_void_p, _InitParams),
    "ggml_free": (None, c_void_p),
    "ggml_get_data": (c_void_p, c_void_p),
    "ggml_quantize_chunk": (c_size_t, c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p),
    "ggml_new_tensor_4d": (c_void_p, c_void_p, c_int, *[c_int64] * 4),
    "ggml_view_4d": (c_void_p, c_void_p, c_void_p, *[c_int64] * 4, *[c_size_t] * 4),  # all strides but one, offset
    "ggml_flash_attn_ext": (c_void_p, *[c_void_p] * 5, *[c_float] * 3),
    "ggml_flash_attn_ext_add_sinks": (None, c_void_p, c_void_p),
    "ggml_gated_delta_net": (c_void_p, *[c_void_p] * 7, c_int64),
    "ggml_new_graph_custom": (c_void_p, c_void_p, c_size_t, c_bool),
    "ggml_build_forward_expand": (None, c_void_p, c_void_p),
    "ggml_backend_cpu_init": (c_void_p,),
    "ggml_backend_cpu_set_n_threads": (None, c_void_p, c_int),
    "ggml_backend_alloc_ctx_tensors": (c_void_p, c_void_p, c_void_p),
    "ggml_backend_buffer_free": (None, c_void_p),
    "ggml_backend_graph_compute": (c_int, c_void_p, c_void_p),
    "ggml_backend_free": (None, c_void_p),
}


@cache
def load() -> Any:
    """Loads the libraries that llama-cpp-python was built with, and does not import it. It raises ImportError without
    them."""
    found = importlib.util.find_spec("llama_cpp")
    if found is None:
        raise ImportError("llama-cpp-python is not installed; pip install 'cpu-attn[ggml]' builds it")
    folders = [Path(folder) / "lib" for folder in found.submodule_search_locations or ()]
    paths = [path for folder in folders for path in folder.glob("*ggml-cpu.*")]
    if not paths:
        raise ImportError(f"no ggml-cpu in {' or '.join(map(str, folders))}")
    try:
        library = ctypes.CDLL(str(paths[0]))  # this loads ggml-base, too, on which it depends
        for name, (result, *arguments) in _SIGNATURES.items():
            if name == DELTA_RULE and not hasattr(library, name):
                continue  # a ggml from before it
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise ImportError(str(error)) from None
    return library


def lacks_delta_rule() -> list[str]:
    return [] if hasattr(load(), DELTA_RULE) else [DELTA_RULE]


class Graph:
    """Holds the attention of some requests, each call a node. The outputs lie in memory of the graph's.

    Query, key and value are [n, heads, tokens, columns]. Caches of llama.cpp's own have tokens before heads, which
    takes longer to decode: this is the better of what ggml can do."""

    def __init__(self, calls: int, threads: int) -> None:
        self._lib = lib = load()
        tensors = 7 * calls  # query, key, value, mask, sinks, output; or of states, those of gated_delta_net
        size = tensors * lib.ggml_tensor_overhead() + lib.ggml_graph_overhead_custom(tensors, False)
        self._context = lib.ggml_init(_InitParams(size, None, True))
        weakref.finalize(self, lib.ggml_free, self._context)
        self._graph = lib.ggml_new_graph_custom(self._context, tensors, False)
        self._backend = lib.ggml_backend_cpu_init()
        weakref.finalize(self, lib.ggml_backend_free, self._backend)
        lib.ggml_backend_cpu_set_n_threads(self._backend, threads)
        self._filled: list[tuple[int, NDArray[Any], str]] = []
        self._outputs: list[tuple[int, tuple[int, ...]]] = []

    def _tensor(self, array: NDArray[Any], kind: str = "float32") -> int:
        """Makes a tensor of the array's shape, whose axes ggml names from the last on; :meth:`allocate` fills it."""
        shape = (*array.shape[::-1], *[1] * (4 - array.ndim))
        made: int = self._lib.ggml_new_tensor_4d(self._context, TYPES[kind], *shape)
        self._filled.append((made, array, kind))
        return made

    def _first_columns(self, tensor: int, shape: tuple[int, ...], kind: str, columns: int) -> int:
        n, heads, tokens, width = shape
        row = self._lib.ggml_row_size(TYPES[kind], width)
        strides = (row, row * tokens, row * tokens * heads, 0)
        viewed: int = self._lib.ggml_view_4d(self._context, tensor, columns, tokens, heads, n, *strides)
        return viewed

    def attend(
        self,
        query: NDArray[Any],
        key: NDArray[Any],
        value: NDArray[Any],
        kinds: tuple[str, ...],
        *,
        scale: float,
        softcap: float = 0.0,
        mask: NDArray[Any] | None = None,
        sinks: NDArray[Any] | None = None,
        is_latent: bool = False,
    ) -> None:
        """Adds a call. kinds: of TYPES, for K and V. mask: what is added to the logits, [heads or 1, query tokens,
        keys]. is_latent: V is the first columns of K."""
        lib, context = self._lib, self._context
        q, k = self._tensor(query), self._tensor(key, kinds[0])
        columns = (key.shape, kinds[0], value.shape[3])
        v = self._first_columns(k, *columns) if is_latent else self._tensor(value, kinds[1])
        m = None if mask is None else self._tensor(mask, "float16")
        output = lib.ggml_flash_attn_ext(context, q, k, v, m, scale, 0.0, softcap)
        if sinks is not None:
            lib.ggml_flash_attn_ext_add_sinks(output, self._tensor(sinks))
        lib.ggml_build_forward_expand(self._graph, output)
        n, heads, tokens, _ = query.shape
        self._outputs.append((output, (n, tokens, heads, value.shape[3])))

    def gated_delta_net(self, *arrays: NDArray[Any]) -> None:
        """Adds a call of the delta rule: query, key, value, decays, betas, states, as linear.ggml_arrays says. Its
        output has a row [Hv * Dv] of each token, and below these the states [R, Hv, Dv, Dk]."""
        requests, tokens, heads, size = arrays[2].shape
        output = self._lib.ggml_gated_delta_net(self._context, *map(self._tensor, arrays), 1)
        self._lib.ggml_build_forward_expand(self._graph, output)
        self._outputs.append((output, (requests * (tokens + size), heads * size)))

    def allocate(self) -> list[NDArray[np.float32]]:
        """Allocates all tensors, once, after the last call, and gives the output of each call: [n, query tokens, heads,
        columns of V]."""
        lib = self._lib
        buffer = lib.ggml_backend_alloc_ctx_tensors(self._context, self._backend)
        if not buffer:
            raise MemoryError("ggml's tensors")
        weakref.finalize(self, lib.ggml_backend_buffer_free, buffer)
        for tensor, array, kind in self._filled:
            x = np.ascontiguousarray(array, np.float32)
            rows = (x.size // x.shape[-1], x.shape[-1])
            lib.ggml_quantize_chunk(TYPES[kind], x.ctypes.data, lib.ggml_get_data(tensor), 0, *rows, None)
        self._filled.clear()
        found = []
        for tensor, shape in self._outputs:
            memory = (c_float * int(np.prod(shape))).from_address(lib.ggml_get_data(tensor))
            found.append(np.ctypeslib.as_array(memory).reshape(shape))
        return found

    def run(self) -> None:
        if status := self._lib.ggml_backend_graph_compute(self._backend, self._graph):
            raise RuntimeError(f"ggml_backend_graph_compute: status {status}")
