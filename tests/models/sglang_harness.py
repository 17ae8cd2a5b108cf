# SPDX-License-Identifier: Apache-2.0
"""The real SGLang engine over tiny random models, in processes of its own: what ``test_sglang.py`` asks it to run.

SGLang as Makefile installs it has neither its kernels (sgl_kernel) nor torchvision, whose builds are for CUDA. Its
engine for CPUs without AMX imports many of their names and, for these models, calls none: here all are there, and
empty. As a script: reads jobs as JSON from stdin, runs them one after the other, writes their results to the file it is
given.
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
        **{"context_length": 128, "max_running_requests": 8, "mem_fraction_static": 0.1, "random_seed": 0},
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


def main(results: str) -> None:
    found: dict[str, Any] = {}
    for name, job in json.load(sys.stdin).items():
        try:
            found[name] = run(**job)
        except Exception:
            found[name] = {"error": traceback.format_exc()}
        Path(results).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
