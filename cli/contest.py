# SPDX-License-Identifier: Apache-2.0
"""Who runs a workload in ``cpu-attn bench``: a call to time, and the limits that bound it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import cpu_attn
from cpu_attn import _onednn_loader
from cpu_attn.cli.limits import Limit, best_isa, products
from cpu_attn.cli.workloads import BINARY, Step, Workload

PLANNED = ("native", "onednn", "reference")  # by get_scheduler_metadata
ENGINES = ("native", "onednn", "onednn-python", "reference")
RIVALS = ("torch",)
LEAST_BYTES = 2**16  # read or copied to measure a limit


@dataclass(frozen=True)
class Contestant:
    """engine: of ENGINES or RIVALS; isa: of ours, None for others; call: one run, all that can be made before made."""

    step: Step
    engine: str
    isa: str | None
    limits: tuple[Limit, ...]
    workspace_bytes: int | None
    call: Callable[[], Any]


def missing(engine: str, isa: str, dtype: str, head_sizes: Iterable[int] = (16,)) -> str:
    """Why a combination cannot run here, "" if it can."""
    try:
        if engine in RIVALS:
            importlib.import_module(engine)
        planned = {"onednn-python": "onednn", **dict.fromkeys(RIVALS, "native")}.get(engine, engine)
        none = np.zeros(0, np.int32)
        for size in head_sizes:
            cpu_attn.get_scheduler_metadata(0, 1, 1, size, none, dtype, np.zeros(1, np.int32), isa=isa, engine=planned)
    except (cpu_attn.UnavailableError, ImportError, ValueError) as error:
        return str(error)
    return ""


def unable(engine: str, workload: Workload, kv_cache_dtype: str = "auto") -> str:
    """What of a workload an engine has no notion of, "" if nothing."""
    if engine == "torch":
        odd = [name for name in ("softcap", "sinks", "selected") if getattr(workload, name)]
        if kv_cache_dtype != "auto":
            odd.append(kv_cache_dtype)
        return f"torch's scaled_dot_product_attention has no {' and no '.join(odd)}" if odd else ""
    return ""


def takes_part(engines: Sequence[str], kind: str) -> list[str]:
    """Who has something to do. Whoever reads a cache, reshape_and_cache writes it: that runs once, as native."""
    if kind == "write":
        return ["native"]
    if kind == "plan":
        return [engine for engine in engines if engine in PLANNED]
    return list(engines)


def contestants(step: Step, engines: Sequence[str]) -> Iterator[Contestant]:
    for engine in takes_part(engines, step.workload.kind):
        call, workspace_bytes, isa = _prepare(step, engine)
        yield Contestant(step, engine, isa, tuple(_limits(step, engine, isa)), workspace_bytes, call)


def _limits(step: Step, engine: str, isa: str | None) -> list[Limit]:
    num_bytes = max(step.workload.kv_bytes(step.itemsize), LEAST_BYTES)
    if step.workload.kind == "decode" and not step.workload.latent_rank:
        return [Limit("read_gbps", num_bytes=num_bytes)]
    if step.workload.kind == "write":
        return [Limit("memcpy_gbps", num_bytes=num_bytes)]
    if step.workload.kind in (
        "prefill",
        "decode",
        "cascade",
    ):  # latent rows serve so many heads that products limit them
        if engine != "native":
            isa = best_isa(step.dtype, _uses_matrix(engine, step.dtype))
        return products(isa, step.dtype)
    return []


def _uses_matrix(engine: str, dtype: str) -> bool:
    """May it multiply on the matrix unit, where there is one? oneDNN says itself what it took."""
    if engine == "onednn" and dtype in ("bfloat16", "float32"):
        return "amx" in getattr(_onednn_loader.describe(), dtype)
    return engine == "torch"


def _prepare(step: Step, engine: str) -> tuple[Callable[[], Any], int | None, str | None]:
    """The call, the memory that it needs besides, and the isa, where it is ours."""
    if engine == "torch":
        return _torch(step), None, None
    plan = step.plan("native" if engine == "onednn-python" else engine)
    if step.workload.kind == "plan":
        return partial(step.plan, engine), plan.workspace_bytes, plan.isa
    if step.workload.kind == "write":
        tokens = (*step.key_value(0), step.cache.key_cache, step.cache.value_cache, step.slots(0))
        how: Any = {"isa": plan.isa, "kv_cache_dtype": step.kv_cache_dtype}
        if not step.workload.rotary:
            how["kv_cache_layout"] = step.kv_cache_layout
            return partial(cpu_attn.reshape_and_cache, *tokens, **how), None, plan.isa
        turns = (np.arange(len(step.query)), step.cos_sin_cache)
        return partial(cpu_attn.rotary_reshape_and_cache, step.query, *tokens, *turns, **how), None, plan.isa
    arguments = step.arguments()
    if engine == "onednn-python":
        from cpu_attn import compose

        return partial(compose.attention, **arguments, isa=plan.isa, **step.masks), None, plan.isa
    call = partial(cpu_attn.attention_with_kv_cache, **arguments, scheduler_metadata=plan)
    return call, plan.workspace_bytes, plan.isa


# ---- torch: scaled_dot_product_attention over contiguous K and V ----


def _torch(step: Step) -> Callable[[], Any]:
    """One call for all requests where they are alike, else one for each. Masks are made outside."""
    torch: Any = importlib.import_module("torch")
    torch.set_num_threads(cpu_attn.get_num_threads())
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

    def tensor(arrays: list[Any]) -> Any:
        stacked = np.ascontiguousarray(np.stack(arrays).transpose(0, 2, 1, 3))
        if step.dtype == "bfloat16":
            return torch.from_numpy(stacked.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(stacked)

    ends = step.query_start_loc.tolist()
    query = tensor([step.query[ends[r] : ends[r + 1]] for r in requests])
    pages = [step.cache.gather(step.block_table[r], int(step.seq_lens[r])) for r in requests]
    key, value = tensor([k for k, _ in pages]), tensor([v for _, v in pages])
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
