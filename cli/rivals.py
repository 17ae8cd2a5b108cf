# SPDX-License-Identifier: Apache-2.0
"""This module runs other people's attention for ``cpu-attn bench --rival``: what each takes part in, and a call of it
to time."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

import cpu_attn
from cpu_attn import _adapters
from cpu_attn._check import kv_dtypes
from cpu_attn.cli import ggml, linear
from cpu_attn.cli.workloads import BINARY, Step, Workload


@dataclass(frozen=True)
class Rival:
    """Holds another library's attention. name: of what is called. load: raises ImportError where it is not here. lacks:
    says what of a workload it has no notion of, over caches of some kind and blocks of some size. call: gives one run,
    for which all is made that can be made before. uses_matrix: whether it may multiply on the matrix unit, where there
    is one."""

    name: str
    load: Callable[[], Any]
    kinds: frozenset[str]
    lacks: Callable[[Workload, str, int], list[str]]
    call: Callable[[Step], Callable[[], Any]]
    uses_matrix: Callable[[Step], bool]


def _torch_load() -> Any:
    return importlib.import_module("torch")


def _tensor(array: NDArray[Any]) -> Any:
    """Gives a tensor of the same memory; torch reads no bfloat16 of NumPy's."""
    torch = _torch_load()
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


# ---- what torch, zentorch and ggml are told: requests that are alike as one batch, and masks ----


def _batches(step: Step) -> list[list[int]]:
    """Gives all requests as one batch where they are alike, else each by itself."""
    requests = list(range(len(step.workload.lens)))
    return [requests] if len(set(step.workload.lens)) == 1 else [[r] for r in requests]


def _arrays(step: Step, requests: list[int]) -> list[NDArray[Any]]:
    """Gives query [n, Hq, q_len, D], key [n, Hkv, kv_len, D] and value [n, Hkv, kv_len, Dv] of requests that are
    alike."""
    ends = step.query_start_loc.tolist()
    pages = [step.cache.gather(step.block_table[r], int(step.seq_lens[r])) for r in requests]
    queries = [step.query[ends[r] : ends[r + 1]] for r in requests]
    return [np.ascontiguousarray(np.stack(x).transpose(0, 2, 1, 3)) for x in (queries, *zip(*pages, strict=True))]


def _is_plain(step: Step, kv_len: int) -> bool:
    """Says whether the mask is causal, and no more."""
    w = step.workload
    return not (w.alibi or w.attn_bias or w.tree or 0 <= w.sliding_window < kv_len)


def _distance(q_len: int, kv_len: int) -> NDArray[Any]:
    """Gives the distance of each key from each query, which is negative before it."""
    return np.arange(kv_len) - np.arange(kv_len - q_len, kv_len)[:, None]


def _seen(step: Step, q_len: int, kv_len: int) -> NDArray[np.bool_]:
    """Says which keys each query sees: [q_len, kv_len]."""
    window = step.workload.sliding_window
    if step.workload.tree:
        return np.concatenate([np.ones((q_len, kv_len - q_len), np.bool_), BINARY(q_len)], axis=1)
    distance = _distance(q_len, kv_len)
    seen: NDArray[np.bool_] = (distance <= 0) & (distance > -window if window >= 0 else True)
    return seen


def _bias(step: Step, q_len: int, kv_len: int) -> NDArray[np.float32]:
    """Gives what is added to logits: [Hq, q_len, kv_len], or [1, q_len, kv_len] where heads do not differ; -inf
    hides."""
    bias: Any = np.zeros((1, 1, 1), np.float32)
    if step.workload.alibi:
        bias = step.alibi_slopes[:, None, None] * _distance(q_len, kv_len)
    if step.attn_bias is not None:
        bias = bias + step.attn_bias[0, :, :q_len, :kv_len]
    return np.where(_seen(step, q_len, kv_len), bias, -np.inf).astype(np.float32)


# ---- torch: scaled_dot_product_attention over contiguous K and V ----


def _torch_lacks(w: Workload, kv_cache_dtype: str, block_size: int) -> list[str]:
    if w.linear:
        return linear.torch_lacks(w.linear)
    odd = [name for name in ("softcap", "sinks", "selected", "topk_tokens") if getattr(w, name)]
    return odd + [kv_cache_dtype] * (kv_cache_dtype != "auto")


def _torch(step: Step) -> Callable[[], Any]:
    if step.workload.linear:
        return linear.torch_call(step, _tensor)
    return _sdpa(step, _torch_load().nn.functional.scaled_dot_product_attention)


def _sdpa(step: Step, attention: Callable[..., Any], takes_bool: bool = True) -> Callable[[], Any]:
    """Makes one call for each batch. takes_bool: whether it takes a mask of booleans where that only hides."""
    calls = [_torch_arguments(step, requests, takes_bool) for requests in _batches(step)]
    scale = step.workload.head_size**-0.5

    def run() -> list[Any]:
        return [attention(*qkv, **how, scale=scale).reshape(shape) for qkv, how, shape in calls]

    return run


def _torch_arguments(
    step: Step, requests: list[int], takes_bool: bool
) -> tuple[tuple[Any, ...], dict[str, Any], tuple[int, ...]]:
    """Gives query, key and value, the mask, and the shape of the output.

    The heads of a group are rows of one query where the mask can say so: enable_gqa copies K and V for each of them,
    which takes 20 times as long in decode-8x8k."""
    query, key, value = map(_tensor, _arrays(step, requests))
    (n, num_heads, q_len, _), (_, num_kv_heads, kv_len, _) = query.shape, key.shape
    shape = (n, num_heads, q_len, value.shape[3])
    if _is_plain(step, kv_len) and q_len == kv_len > 1:
        return (query, key, value), {"is_causal": True, "enable_gqa": num_heads != num_kv_heads}, shape
    query = query.reshape(n, num_kv_heads, -1, query.shape[3])
    if _is_plain(step, kv_len) and q_len == 1:
        return (query, key, value), {}, shape
    mask = _torch_mask(step, q_len, kv_len, query.dtype, takes_bool)
    group = num_heads // num_kv_heads
    # The mask has 2 or 4 axes, since 3 take 5 to 10 times as long.
    mask = mask.repeat(group, 1) if mask.dim() == 2 else mask.reshape(1, num_kv_heads, -1, kv_len)
    return (query, key, value), {"attn_mask": mask}, shape


def _torch_mask(step: Step, q_len: int, kv_len: int, dtype: Any, takes_bool: bool) -> Any:
    """Gives the mask as [q_len, kv_len] where heads do not differ, [Hq, q_len, kv_len] where they do."""
    torch = _torch_load()
    if takes_bool and not (step.workload.alibi or step.workload.attn_bias):
        return torch.from_numpy(_seen(step, q_len, kv_len))
    bias = torch.from_numpy(_bias(step, q_len, kv_len)).to(dtype)
    return bias[0] if len(bias) == 1 else bias


# ---- zentorch: what AMD's plugin puts in the place of torch's, called by its name ----


def _zentorch_load() -> Any:
    importlib.import_module("zentorch")
    return _torch_load().ops.zentorch.zentorch_sdpa


def _zentorch_lacks(w: Workload, kv_cache_dtype: str, block_size: int) -> list[str]:
    return _torch_lacks(w, kv_cache_dtype, block_size) + ["latent_rank"] * (w.latent_rank > 0)


def _zentorch(step: Step) -> Callable[[], Any]:
    """Makes the call of K and V as they are, whatever the groups of heads."""
    op = _zentorch_load()

    def attention(query: Any, key: Any, value: Any, enable_gqa: bool = False, **how: Any) -> Any:
        return op(query, key, value, **how)[0]

    return _sdpa(step, attention, takes_bool=False)


# ---- ggml: llama.cpp's flash attention over contiguous K and V ----

_GGML_KV = {"int8": "q8_0", "int5": "q5_0", "int4": "q4_0"}


def _ggml_lacks(w: Workload, kv_cache_dtype: str, block_size: int) -> list[str]:
    if w.linear:
        return linear.ggml_lacks(w.linear, w.head_size) or ggml.lacks_delta_rule()
    names = kv_cache_dtype.split("/")
    odd = [name for name in ("selected", "topk_tokens") if getattr(w, name)]
    odd += [name for name in dict.fromkeys(names) if name not in ("auto", *ggml.TYPES, *_GGML_KV)]
    if w.head_size % ggml.Q_BLOCK and any(name in _GGML_KV for name in names):
        odd.append(f"head size {w.head_size} of {kv_cache_dtype}")
    return odd


def _ggml(step: Step) -> Callable[[], Any]:
    """Makes one graph of all batches. Queries and outputs are float32."""
    if step.workload.linear:
        delta_rule = ggml.Graph(1, cpu_attn.get_num_threads())
        delta_rule.gated_delta_net(*linear.ggml_arrays(step))
        return _run_graph(delta_rule)
    w, batches = step.workload, _batches(step)
    graph = ggml.Graph(len(batches), cpu_attn.get_num_threads())
    kinds = tuple(_GGML_KV.get(kv, kv) for kv in kv_dtypes(step.kv_cache_dtype, step.dtype))
    for requests in batches:
        query, key, value = _arrays(step, requests)
        q_len, kv_len = query.shape[2], key.shape[2]
        mask = None if q_len == 1 and _is_plain(step, kv_len) else _bias(step, q_len, kv_len)
        how: Any = {"scale": w.head_size**-0.5, "softcap": w.softcap, "mask": mask, "is_latent": w.latent_rank > 0}
        graph.attend(query, key, value, kinds, **how, sinks=step.s_aux if w.sinks else None)
    return _run_graph(graph)


def _run_graph(graph: ggml.Graph) -> Callable[[], Any]:
    outputs = graph.allocate()

    def run() -> list[NDArray[np.float32]]:
        graph.run()
        return outputs

    return run


# ---- vLLM: the compiled kernels of its CPU attention, over a paged cache as its backend lays it out ----


def _vllm_load() -> Any:
    """Gives ``torch.ops._C`` with them; vLLM for CPUs registers them when asked to, others have none."""
    _adapters.require("vllm")
    ops = _torch_load().ops._C
    if not hasattr(ops, "cpu_attention_with_kv_cache"):
        importlib.import_module("vllm.platforms").current_platform.import_kernels()
    if not hasattr(ops, "cpu_attention_with_kv_cache"):
        raise ImportError("this vLLM has no compiled kernels for CPUs (torch.ops._C.cpu_attention_with_kv_cache)")
    return ops


def _vllm_backend() -> Any:
    return importlib.import_module("vllm.v1.attention.backends.cpu_attn")


def _vllm_lacks(w: Workload, kv_cache_dtype: str, block_size: int) -> list[str]:
    odd = [
        name for name in ("attn_bias", "tree", "selected", "rotary", "latent_rank", "topk_tokens") if getattr(w, name)
    ]
    backend = _vllm_backend().CPUAttentionBackend
    if not backend.supports_kv_cache_dtype(kv_cache_dtype):
        odd.append(kv_cache_dtype)
    if w.head_size not in backend.get_supported_head_sizes() or (w.head_size % 32 and kv_cache_dtype != "auto"):
        odd.append(f"head size {w.head_size}")
    if block_size % 32:
        odd.append(f"blocks of {block_size} tokens")
    return odd


def _vllm_isa(step: Step) -> str:
    """Gives the isa that vLLM's backend would take."""
    kv = None if step.kv_cache_dtype == "auto" else step.kv_cache_dtype
    sizes = (step.block_size, step.workload.head_size)
    isa: str = _vllm_backend()._get_attn_isa(getattr(_torch_load(), step.dtype), *sizes, kv)
    return isa


def _vllm(step: Step) -> Callable[[], Any]:
    """Calls the kernels as the backend does: get_scheduler_metadata once a step, K and V of a kv head one after the
    other."""
    torch, ops = _torch_load(), _vllm_load()
    w, isa, kv, dtype = step.workload, _vllm_isa(step), step.kv_cache_dtype, getattr(torch, step.dtype)
    if isa.startswith("amx"):
        torch.cpu._init_amx()
    query_start_loc, seq_lens, block_table = map(_tensor, (step.query_start_loc, step.seq_lens, step.block_table))
    split = importlib.import_module("vllm.envs").VLLM_CPU_ATTN_SPLIT_KV
    heads = (len(seq_lens), w.num_heads, w.num_kv_heads, w.head_size)
    how = (True, w.sliding_window, isa, split, None, kv)
    plan = partial(ops.get_scheduler_metadata, *heads, seq_lens, dtype, query_start_loc, *how)
    if w.kind == "plan":
        return plan
    shape = (step.num_blocks, w.num_kv_heads, 2 * step.block_size, w.head_size)
    pages = torch.zeros(shape, dtype=dtype if kv == "auto" else torch.uint8).chunk(2, dim=2)

    def write(r: int, key: Any, value: Any) -> Callable[[], Any]:
        tokens = (_tensor(key), _tensor(value), *pages, _tensor(step.slots(r)), isa)
        return partial(ops.cpu_attn_reshape_and_cache, *tokens, kv_cache_dtype=kv)

    if w.kind == "write":
        return write(0, *step.key_value(0))
    for r, (blocks, seq_len) in enumerate(zip(step.block_table, step.seq_lens.tolist(), strict=True)):
        write(r, *(x.astype(step.query.dtype, copy=False) for x in step.cache.gather(blocks, seq_len)))()
    output = torch.empty((w.num_tokens, w.num_heads, w.head_size), dtype=dtype)
    slopes, sinks = _tensor(step.alibi_slopes) if w.alibi else None, _tensor(step.s_aux) if w.sinks else None
    mask = (w.head_size**-0.5, True, slopes, w.sliding_window, block_table, w.softcap, plan(), sinks, None)
    attention = partial(
        ops.cpu_attention_with_kv_cache, _tensor(step.query), *pages, output, query_start_loc, seq_lens, *mask
    )

    def run() -> Any:
        attention(kv_cache_dtype=kv)
        return output

    return run


def _vllm_uses_matrix(step: Step) -> bool:
    return _vllm_isa(step).startswith("amx")


_ATTENDS = frozenset({"prefill", "decode", "cascade", "call"})
_ALL = _ATTENDS | {"plan", "write"}
RIVALS = {
    "torch": Rival(
        "torch's scaled_dot_product_attention",
        _torch_load,
        _ATTENDS | set(linear.KINDS),
        _torch_lacks,
        _torch,
        lambda _: True,
    ),
    "zentorch": Rival("zentorch's attention", _zentorch_load, _ATTENDS, _zentorch_lacks, _zentorch, lambda _: True),
    "ggml": Rival(
        "ggml's flash attention", ggml.load, _ATTENDS | set(linear.KINDS), _ggml_lacks, _ggml, lambda _: False
    ),
    "onnxruntime": Rival(
        "ONNX Runtime's LinearAttention",
        linear.onnxruntime_load,
        frozenset({"linear-prefill", "linear-decode"}),
        lambda w, _, __: linear.onnxruntime_lacks(w.linear) if w.linear else [w.kind],
        lambda step: linear.onnxruntime_call(step, cpu_attn.get_num_threads()),
        lambda _: False,
    ),
    "vllm": Rival("vLLM's CPU attention", _vllm_load, _ALL, _vllm_lacks, _vllm, _vllm_uses_matrix),
}
