# SPDX-License-Identifier: Apache-2.0
"""This module has the layers of ``cpu-attn bench`` whose requests have states in place of keys and values: what one
step costs, its arrays, and whose calls run it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpu_attn.linear import (
    LinearAttentionMetadata,
    causal_conv1d,
    get_linear_attention_metadata,
    linear_attention_with_state_cache,
)
from cpu_attn.tests.cases.formats import numpy_dtype

KINDS = ("linear-prefill", "linear-decode", "conv")
WIDTH = 4  # inputs of an output of a convolution


@dataclass(frozen=True)
class Layer:
    """Describes a layer. rule: gdn (gated delta net), kda, ssd (Mamba-2) or conv. size_v: elements of a value head.
    forgets: logarithms of decays are between 0 and less this. Its workload has the value heads, key heads and elements
    of a key head as num_heads, num_kv_heads and head_size; a convolution has as many channels as these queries, keys
    and values together."""

    rule: str
    size_v: int
    forgets: float = 0.1

    @property
    def has_delta_rule(self) -> bool:
        return self.rule in ("gdn", "kda")

    def channels(self, heads: int, key_heads: int, size: int) -> int:
        return 2 * key_heads * size + heads * self.size_v

    def flops(self, heads: int, key_heads: int, size: int) -> int:
        """Counts, for a token, 2 Dk Dv of each value head for its output and for what it adds to the state and, by the
        delta rule, for what it takes from it: the recurrence, whatever a prompt is computed by."""
        if self.rule == "conv":
            return 2 * WIDTH * self.channels(heads, key_heads, size)
        return (6 if self.has_delta_rule else 4) * heads * size * self.size_v

    def bytes(self, requests: int, tokens: int, heads: int, key_heads: int, size: int, itemsize: float) -> float:
        """Counts the states of a decode, which are read and written in place of copied; of a prefill queries, keys,
        values and outputs, too; of a convolution its inputs."""
        states = 4 * requests * heads * size * self.size_v
        inputs = tokens * self.channels(heads, key_heads, size) * itemsize
        if self.rule == "conv":
            return inputs
        return states if tokens == requests else states + inputs + tokens * heads * self.size_v * itemsize


@dataclass
class Arrays:
    """Holds the arrays of a step of such a layer, the same for all who run it. Gates are as models have them unless the
    layer forgets more: most of a state is left after a token."""

    step: Any
    layer: Layer
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def __post_init__(self) -> None:
        w = self.step.workload
        self.heads, self.key_heads, self.size = w.num_heads, w.num_kv_heads, w.head_size
        self.requests, self.tokens = len(w.lens), w.num_tokens
        self.slots = self.rng.permutation(self.requests).astype(np.int32)

    @cached_property
    def query(self) -> NDArray[Any]:
        return self._unit()

    @cached_property
    def key(self) -> NDArray[Any]:
        return self._unit()

    def _unit(self) -> NDArray[Any]:
        """Gives rows of length 1, as after an L2 norm."""
        x = self.rng.standard_normal((self.tokens, self.key_heads, self.size), np.float32)
        found: NDArray[Any] = (x / np.linalg.norm(x, axis=2, keepdims=True)).astype(numpy_dtype(self.step.dtype))
        return found

    @cached_property
    def value(self) -> NDArray[Any]:
        found: NDArray[Any] = self.step.random(self.tokens, self.heads, self.layer.size_v)
        return found

    @cached_property
    def g(self) -> NDArray[np.float32]:
        shape = (self.tokens, self.heads, *([self.size] if self.layer.rule == "kda" else []))
        found: NDArray[np.float32] = -self.rng.random(shape, np.float32) * np.float32(self.layer.forgets)
        return found

    @cached_property
    def beta(self) -> NDArray[np.float32]:
        return self.rng.random((self.tokens, self.heads), np.float32)

    @cached_property
    def states(self) -> NDArray[np.float32]:
        """Gives [R, Hv, Dk, Dv], as they come from earlier tokens."""
        shape = (self.requests, self.heads, self.size, self.layer.size_v)
        return self.rng.standard_normal(shape, np.float32)

    @cached_property
    def inputs(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Gives x [T, C] of a convolution, and its weights [C, WIDTH]."""
        channels = self.layer.channels(self.heads, self.key_heads, self.size)
        return self.step.random(self.tokens, channels), self.step.random(channels, WIDTH)

    def plan(self, engine: str) -> LinearAttentionMetadata:
        step = self.step
        heads = (self.key_heads, self.heads, self.size, self.layer.size_v) if self.layer.rule != "conv" else ()
        how: Any = {"seq_lens": step.seq_lens, "isa": step.isa, "engine": engine}
        return get_linear_attention_metadata(step.query_start_loc, step.dtype, *heads, **how)


def prepare(step: Any, engine: str) -> tuple[Callable[[], Any], int, str]:
    """Gives the own call, the memory that it needs besides, and its isa."""
    arrays = step.arrays_of_layer
    plan, layer = arrays.plan(engine), arrays.layer
    if layer.rule == "conv":
        x, weight = arrays.inputs
        states = np.zeros((arrays.requests, x.shape[1], WIDTH - 1), np.float32)
        call = partial(causal_conv1d, x, weight, None, np.empty_like(x), states, arrays.slots, plan)
        return call, plan.workspace_bytes, plan.isa
    output, states = np.empty_like(arrays.value), np.empty_like(arrays.states)
    states[arrays.slots] = arrays.states
    rows = (arrays.query, arrays.key, arrays.value, output, states, arrays.slots, plan)
    how: Any = {"g": arrays.g, "beta": arrays.beta, "delta_rule": layer.has_delta_rule}
    return partial(linear_attention_with_state_cache, *rows, **how), plan.workspace_bytes, plan.isa


# ---- rivals ----

# The plain implementations of transformers: a module, and its functions of a prefill and of a decode.
_TRANSFORMERS = {
    "gdn": ("qwen3_next.modeling_qwen3_next", "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
    "kda": ("kimi_linear.modeling_kimi_linear", "chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"),
}


def _functions(rule: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    module, *names = _TRANSFORMERS[rule]
    found = importlib.import_module(f"transformers.models.{module}")
    prefill, decode = (getattr(found, name) for name in names)
    return prefill, decode


def torch_lacks(layer: Layer) -> list[str]:
    """Says what torch has no function of, its own or one of transformers."""
    if layer.rule == "conv":
        return []
    if layer.rule not in _TRANSFORMERS:
        return [layer.rule]
    try:
        _functions(layer.rule)
    except (ImportError, AttributeError) as error:
        return [f"{layer.rule} ({error})"]
    return []


def torch_call(step: Any, tensor: Callable[[NDArray[Any]], Any]) -> Callable[[], Any]:
    """Makes the call of transformers' function over requests that are alike, which gives the states, or of a
    convolution as its models call it. tensor: gives a tensor of an array's memory."""
    arrays, torch = step.arrays_of_layer, importlib.import_module("torch")
    requests, tokens = arrays.requests, arrays.tokens // arrays.requests
    if arrays.layer.rule == "conv":
        x, weight = map(tensor, arrays.inputs)
        x = x.reshape(requests, tokens, -1).transpose(1, 2).contiguous()
        convolve = partial(torch.nn.functional.conv1d, x, weight[:, None], padding=WIDTH - 1, groups=len(weight))
        return lambda: torch.nn.functional.silu(convolve()[:, :, :tokens])
    rows = [arrays.query, arrays.key, arrays.value, arrays.g, arrays.beta]
    given = [tensor(x.reshape(requests, tokens, *x.shape[1:])) for x in rows]
    prefill, decode = _functions(arrays.layer.rule)
    states = tensor(arrays.states)
    how: Any = {"initial_state": states if tokens == 1 else None, "output_final_state": True}
    call = partial(decode if tokens == 1 else prefill, *given, **how)
    made: Callable[[], Any] = torch.no_grad()(call)
    return made


def ggml_lacks(layer: Layer, size: int) -> list[str]:
    odd = [] if layer.has_delta_rule else [layer.rule]
    return odd + [f"heads of {size} and {layer.size_v}"] * (not odd and size != layer.size_v)


def ggml_arrays(step: Any) -> tuple[NDArray[np.float32], ...]:
    """Gives queries, keys and values [R, tokens, heads, D], decays and betas [R, tokens, Hv, Dk or 1], and states
    [R, Hv, Dv, Dk], all in float32. Its value heads have the keys of head h % Hk, so the values come in that order."""
    arrays = step.arrays_of_layer
    order = np.arange(arrays.heads).reshape(arrays.key_heads, -1).T.reshape(-1)
    rows = [arrays.query, arrays.key, arrays.value[:, order], arrays.g[:, order], arrays.beta[:, order]]
    rows[3:] = [x if x.ndim == 3 else x[..., None] for x in rows[3:]]
    given = [x.astype(np.float32).reshape(arrays.requests, -1, *x.shape[1:]) for x in rows]
    states = arrays.states * (arrays.tokens == arrays.requests)  # a prefill brings none
    return (*given, states[:, order].swapaxes(2, 3).copy())


def onnxruntime_load() -> tuple[Any, Any]:
    """Gives ONNX Runtime, and the package that makes its models."""
    return importlib.import_module("onnxruntime"), importlib.import_module("onnx")


def onnxruntime_lacks(layer: Layer) -> list[str]:
    return [] if layer.has_delta_rule else [layer.rule]


def onnxruntime_call(step: Any, num_threads: int) -> Callable[[], Any]:
    """Makes a model of one operator, LinearAttention, over requests that are alike, with its results in memory of its
    own. On CPUs it has float16 and float32, so bfloat16 becomes float32. Returns outputs, and the states after them."""
    runtime, onnx = onnxruntime_load()
    arrays, kind = step.arrays_of_layer, np.dtype(np.float16 if step.dtype == "float16" else np.float32)
    requests = arrays.requests
    names = ("query", "key", "value", "past_state", "decay", "beta")
    states = arrays.states * (arrays.tokens == requests)  # a prefill brings none
    rows = [arrays.query, arrays.key, arrays.value, states, arrays.g, arrays.beta]
    shapes = [x.shape if x is states else (requests, arrays.tokens // requests, x[0].size) for x in rows]
    given = {
        name: np.ascontiguousarray(x, kind).reshape(shape) for name, x, shape in zip(names, rows, shapes, strict=True)
    }
    results = {"output": shapes[2], "present_state": shapes[3]}
    make, of_numpy = onnx.helper, onnx.helper.np_dtype_to_tensor_dtype(kind)
    domain = "com.microsoft"
    heads = {"q_num_heads": arrays.key_heads, "kv_num_heads": arrays.heads, "scale": arrays.size**-0.5}
    node = make.make_node("LinearAttention", names, list(results), domain=domain, update_rule="gated_delta", **heads)
    inputs = [make.make_tensor_value_info(name, of_numpy, x.shape) for name, x in given.items()]
    outputs = [make.make_tensor_value_info(name, of_numpy, shape) for name, shape in results.items()]
    graph = make.make_graph([node], "layer", inputs, outputs)
    versions = [make.make_opsetid(domain, 1), make.make_opsetid("", 20)]
    options = runtime.SessionOptions()
    options.intra_op_num_threads = num_threads
    model = make.make_model(graph, opset_imports=versions, ir_version=10).SerializeToString()
    session = runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    made = {name: np.empty(shape, kind) for name, shape in results.items()}
    for arrays_of, bind in ((given, binding.bind_ortvalue_input), (made, binding.bind_ortvalue_output)):
        for name, x in arrays_of.items():
            bind(name, runtime.OrtValue.ortvalue_from_numpy(x))

    def run(inputs: Any = given) -> tuple[Any, ...]:  # which keeps the inputs: values of the runtime only point to them
        session.run_with_iobinding(binding)
        return tuple(made.values())

    return run
