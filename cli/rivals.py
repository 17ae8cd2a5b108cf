# SPDX-License-Identifier: Apache-2.0
"""Other people's attention, for ``cpu-attn bench --rival``: what each takes part in, and a call of it to time."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpu_attn import _adapters
from cpu_attn.cli.workloads import BINARY, Step, Workload


@dataclass(frozen=True)
class Rival:
    """name: of what is called. load: ImportError where it is not here. lacks: what it has no notion of, of a workload
    over caches of some kind and blocks of some size. call: all that can be made before made. uses_matrix: may it
    multiply on the matrix unit, where there is one?"""

    name: str
    load: Callable[[], Any]
    kinds: frozenset[str]
    lacks: Callable[[Workload, str, int], list[str]]
    call: Callable[[Step], Callable[[], Any]]
    uses_matrix: Callable[[Step], bool]


def _torch_load() -> Any:
    return importlib.import_module("torch")


def _tensor(array: NDArray[Any]) -> Any:
    """Of the same memory; torch reads no bfloat16 of NumPy's."""
    torch = _torch_load()
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


# ---- torch: scaled_dot_product_attention over contiguous K and V ----


def _torch_lacks(w: Workload, kv_cache_dtype: str, block_size: int) -> list[str]:
    odd = [name for name in ("softcap", "sinks", "selected") if getattr(w, name)]
    return odd + [kv_cache_dtype] * (kv_cache_dtype != "auto")


def _torch(step: Step) -> Callable[[], Any]:
    """One call for all requests where they are alike, else one for each. Masks are made outside."""
    torch = _torch_load()
    w = step.workload
    alike = len(set(w.lens)) == 1
    groups = [list(range(len(w.lens)))] if alike else [[r] for r in range(len(w.lens))]
    calls = [_torch_arguments(torch, step, requests) for requests in groups]
    attention, scale = torch.nn.functional.scaled_dot_product_attention, w.head_size**-0.5

    def run() -> list[Any]:
        return [attention(*qkv, **how, scale=scale).reshape(shape) for qkv, how, shape in calls]

    return run


def _torch_arguments(torch: Any, step: Step, requests: list[int]) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """query [n, Hq, q_len, D], key and value [n, Hkv, kv_len, D] of requests that are alike, mask, shape of the output.

    The heads of a group are rows of one query where the mask can say so: enable_gqa copies K and V for each of them,
    which takes 20 times as long in decode-8x8k."""

    def stacked(arrays: list[Any]) -> Any:
        return _tensor(np.ascontiguousarray(np.stack(arrays).transpose(0, 2, 1, 3)))

    ends = step.query_start_loc.tolist()
    query = stacked([step.query[ends[r] : ends[r + 1]] for r in requests])
    pages = [step.cache.gather(step.block_table[r], int(step.seq_lens[r])) for r in requests]
    key, value = stacked([k for k, _ in pages]), stacked([v for _, v in pages])
    (n, num_heads, q_len, head_size), num_kv_heads = query.shape, key.shape[1]
    how = _torch_mask(torch, step, *step.workload.lens[requests[0]], query.dtype)
    if how.get("is_causal"):
        how["enable_gqa"] = num_heads != num_kv_heads
    else:
        query = query.reshape(n, num_kv_heads, -1, head_size)
    if "attn_mask" in how:  # 2 or 4 axes: 3 take 5 to 10 times as long
        mask, kv_len = how["attn_mask"], how["attn_mask"].shape[-1]
        if mask.dim() == 2:
            how["attn_mask"] = mask.repeat(num_heads // num_kv_heads, 1)
        else:
            how["attn_mask"] = mask.expand(num_heads, q_len, kv_len).reshape(1, num_kv_heads, -1, kv_len)
    return (query, key, value), how, (n, num_heads, q_len, value.shape[3])


def _torch_mask(torch: Any, step: Step, q_len: int, kv_len: int, dtype: Any) -> dict[str, Any]:
    w = step.workload
    windowed = 0 <= w.sliding_window < kv_len
    if w.tree:
        seen = np.concatenate([np.ones((q_len, kv_len - q_len), np.bool_), BINARY(q_len)], axis=1)
        return {"attn_mask": torch.from_numpy(seen)}
    if not (w.alibi or w.attn_bias or windowed) and q_len in (1, kv_len):
        return {"is_causal": q_len > 1}
    distance = np.arange(kv_len) - np.arange(kv_len - q_len, kv_len)[:, None]
    seen = (distance <= 0) & (distance > -w.sliding_window) if windowed else distance <= 0
    if not (w.alibi or w.attn_bias):
        return {"attn_mask": torch.from_numpy(seen)}
    bias = step.alibi_slopes[:, None, None] * distance if w.alibi else np.zeros((1, *seen.shape))
    if step.attn_bias is not None:
        bias = bias + step.attn_bias[0, :, :q_len, :kv_len]
    return {"attn_mask": torch.from_numpy(np.where(seen, bias, -np.inf).astype(np.float32)).to(dtype)}


# ---- vLLM: the compiled kernels of its CPU attention, over a paged cache as its backend lays it out ----


def _vllm_load() -> Any:
    """``torch.ops._C`` with them; vLLM for CPUs registers them when asked to, others have none."""
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
    odd = [name for name in ("attn_bias", "tree", "selected", "rotary", "latent_rank") if getattr(w, name)]
    backend = _vllm_backend().CPUAttentionBackend
    if not backend.supports_kv_cache_dtype(kv_cache_dtype):
        odd.append(kv_cache_dtype)
    if w.head_size not in backend.get_supported_head_sizes() or (w.head_size % 32 and kv_cache_dtype != "auto"):
        odd.append(f"head size {w.head_size}")
    if block_size % 32:
        odd.append(f"blocks of {block_size} tokens")
    return odd


def _vllm_isa(step: Step) -> str:
    """What its backend would take."""
    kv = None if step.kv_cache_dtype == "auto" else step.kv_cache_dtype
    sizes = (step.block_size, step.workload.head_size)
    isa: str = _vllm_backend()._get_attn_isa(getattr(_torch_load(), step.dtype), *sizes, kv)
    return isa


def _vllm(step: Step) -> Callable[[], Any]:
    """As the backend calls them: get_scheduler_metadata once a step, K and V of a kv head one after the other."""
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
    "torch": Rival("torch's scaled_dot_product_attention", _torch_load, _ATTENDS, _torch_lacks, _torch, lambda _: True),
    "vllm": Rival("vLLM's CPU attention", _vllm_load, _ALL, _vllm_lacks, _vllm, _vllm_uses_matrix),
}
