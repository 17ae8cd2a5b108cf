# SPDX-License-Identifier: Apache-2.0
"""The real SGLang engine over tiny random models, in processes of its own: what ``test_sglang.py`` asks it to run.

SGLang as Makefile installs it has neither its kernels (sgl_kernel) nor torchvision, whose builds are for CUDA. Its
engine for CPUs without AMX imports many of their names and, for these models, calls none: here all are there, and
empty. As a script: reads jobs as JSON from stdin, runs them one after the other (an engine, or one layer), writes their
results to the file it is given.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any


class Named(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class Missing(metaclass=Named):
    """Whatever one of their names is: a function that is not there, a class to annotate with, an enumeration."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("this is in a library that is not installed")


class Empty(ModuleType):
    __path__: list[str] = []  # noqa: RUF012
    __version__ = "0.28.0"  # transformers compares torchvision's

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.split(".")[0] in ("sgl_kernel", "torchvision"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def environment(folder: Path) -> dict[str, str]:
    """For the process and all that it starts."""
    (folder / "sglang_harness.py").write_text(Path(__file__).read_text())
    (folder / "sitecustomize.py").write_text("import sys, sglang_harness as h; sys.meta_path.append(h.Finder())\n")
    return {
        **os.environ,
        **{"PYTHONPATH": str(folder), "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        **{"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "10"},  # as if the cache were full by then
    }


def run(model: str, prompts: list[list[int]], new_tokens: int, **options: Any) -> dict[str, Any]:
    """One engine from start to end: all prompts at once, twice. model: a folder."""
    from sglang.srt.entrypoints.engine import Engine

    settings: dict[str, Any] = {
        **{"device": "cpu", "dtype": "float32", "attention_backend": "cpu_attn", "skip_tokenizer_init": True},
        **{"context_length": 128, "max_running_requests": 8, "mem_fraction_static": 0.5, "random_seed": 0},
        **options,
    }
    engine = Engine(model_path=model, **settings)
    try:
        params = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        both = [engine.generate(input_ids=prompts, sampling_params=params) for _ in range(2)]
    finally:
        engine.shutdown()
    return {
        "tokens": [[o["output_ids"] for o in outs] for outs in both],
        "cached": sum(o["meta_info"]["cached_tokens"] for o in both[1]),
        "retracted": sum(o["meta_info"]["num_retractions"] for outs in both for o in outs),
    }


def layer(dtype: str, scales: tuple[float, float] | None, heads: tuple[int, int, int]) -> dict[str, Any]:
    """One layer over SGLang's own pool, with a cache of fp8_e4m3 where it has scales: two prompts in one step, then a
    token of each. heads: Hq, Hkv, D."""
    from types import SimpleNamespace

    import torch
    from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import get_kv_cache_quant_method
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from cpu_attn.sglang import Backend

    kind, (num_heads, kv_heads, d), page = getattr(torch, dtype), heads, 16
    how = (torch.float8_e4m3fn, get_kv_cache_quant_method("cpu_fp8_e4m3")) if scales else (kind, None)
    pool = MHATokenToKVPool(160, page, how[0], kv_heads, d, 1, "cpu", False, quant_method=how[1])
    pages = torch.tensor([[5, 2, 7], [3, 9, 1]])
    table = (pages[:, :, None] * page + torch.arange(page)).flatten(1).int()
    runner = SimpleNamespace(token_to_kv_pool=pool, dtype=kind)
    runner.req_to_token_pool = SimpleNamespace(req_to_token=table)
    backend, attention = Backend(runner), RadixAttention(num_heads, d, d**-0.5, kv_heads, 0)
    attention.k_scale_float, attention.v_scale_float = scales or (2.0, 2.0)  # of other caches they are not used
    given, outs, lens = list[Any](), list[Any](), torch.tensor([37, 5])
    g = torch.Generator().manual_seed(0)
    for counts in (lens, torch.tensor([1, 1])):
        before = 0 * lens if not given else lens
        batch = SimpleNamespace(req_pool_indices=torch.arange(2), encoder_lens=None, seq_lens=before + counts)
        batch.forward_mode, batch.extend_seq_lens = ForwardMode.EXTEND if not given else ForwardMode.DECODE, counts
        ends = before + counts
        batch.out_cache_loc = torch.cat([table[b, before[b] : ends[b]].long() for b in range(2)])
        sizes = [(int(counts.sum()), n, d) for n in (num_heads, kv_heads, kv_heads)]
        q, k, v = (torch.randn(size, generator=g).to(kind) for size in sizes)
        given.append([x.float().tolist() for x in (q, k, v)])
        backend.init_forward_metadata(batch)
        run = backend.forward_extend if len(outs) == 0 else backend.forward_decode
        outs.append(run(q.flatten(1), k, v, attention, batch).float().tolist())
    return {"given": given, "outs": outs}


def main(results: str) -> None:
    found: dict[str, Any] = {}
    for name, job in json.load(sys.stdin).items():
        try:
            found[name] = layer(**job) if "heads" in job else run(**job)
        except Exception:
            found[name] = {"error": traceback.format_exc()}
        Path(results).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
