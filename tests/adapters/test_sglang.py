# SPDX-License-Identifier: Apache-2.0
"""cpu_attn.sglang in the real engine: transformers' tokens, whatever SGLang does with its slots meanwhile; and layers
over its real pools, against float64.

All run one after the other in a process of their own (sglang_harness.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cpu_attn import reference

pytestmark = pytest.mark.integrations
pytest.importorskip("sglang")
torch = pytest.importorskip("torch")

from ..models import sglang_harness, vllm_harness  # noqa: E402

# Prompts have up to 70 tokens: chunks of them go together with tokens of other requests.
CHUNKED = {"chunked_prefill_size": 48, "enable_mixed_chunk": True, "max_total_tokens": 1024}
WINDOWS = {"page_size": 16, "disable_hybrid_swa_memory": True}
JOBS: dict[str, dict[str, Any]] = {
    "slots": {"model": "llama", **CHUNKED, "page_size": 1},
    "pages": {"model": "llama", **CHUNKED, "page_size": 16},
    "fp8": {"model": "llama", **CHUNKED, "page_size": 16, "kv_cache_dtype": "fp8_e4m3"},
    # Windows of 24 tokens in every second layer; with softcap.
    **{name: {"model": name, **CHUNKED, **WINDOWS} for name in ("gemma3_text", "gemma2")},
}


# Of one layer: the heads are those of SGLang's own tests of its kernels.
LAYERS: dict[str, dict[str, Any]] = {
    f"{dtype} {scales} {heads}": {"dtype": dtype, "scales": scales, "heads": heads}
    for dtype in ("bfloat16", "float16")
    for scales in (None, (0.02, 0.3))
    for heads in ((16, 16, 64), (16, 1, 16), (40, 8, 128))
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """What a job found, and transformers' tokens for it."""
    folder = tmp_path_factory.mktemp("sglang")
    file, jobs = folder / "results.json", {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CPU_ATTN_TEST_MODELS", str(folder / "models"))
        kinds = {name: (job["model"], job.get("kv_cache_dtype", "auto")) for name, job in JOBS.items()}
        wanted = {kind: vllm_harness.reference(*kind) for kind in set(kinds.values())}
        given = {"prompts": vllm_harness.prompts(), "new_tokens": vllm_harness.NEW_TOKENS}
        jobs |= LAYERS
        for name, job in JOBS.items():
            jobs[name] = {**given, **job, "model": str(vllm_harness.save_model(job["model"]))}
    done = subprocess.run(
        [sys.executable, str(folder / "sglang_harness.py"), str(file)],
        **{"input": json.dumps(jobs), "env": sglang_harness.environment(folder), "text": True},
        **{"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT},
    )
    found = json.loads(file.read_text()) if file.exists() else {}
    print(done.stdout)  # with a failure pytest shows it

    def result(name: str) -> Any:
        assert name in found, f"the process of the engines ended with {done.returncode}"
        assert "error" not in found[name], found[name]["error"]
        return {**found[name], "wanted": wanted[kinds[name]] if name in JOBS else None}

    return result


@pytest.mark.parametrize("name", JOBS)
def test_tokens(results: Callable[[str], Any], name: str) -> None:
    """Twice, the second time with prompts that are in the cache; requests are thrown out of it and resumed. No other
    backend has the name cpu_attn. A cache of float8 gives those of keys and values that are rounded likewise."""
    result = results(name)
    assert result["tokens"] == [result["wanted"]] * 2
    assert result["cached"] > 0 and result["retracted"] > 0


@pytest.mark.parametrize("name", LAYERS)
def test_layers(results: Callable[[str], Any], name: str) -> None:
    """Prompts and then a token of each, over caches of the model's dtype and of float8 with scales of the layer."""
    found, (dtype, scales, (_, _, d)) = results(name), LAYERS[name].values()
    steps = [[np.array(x) for x in given] for given in found["given"]]
    query, keys, values = ([x[i] for x in steps] for i in range(3))
    if scales:
        both = zip((keys, values), scales, strict=True)
        keys, values = ([stored(x, scale, dtype) for x in xs] for xs, scale in both)
    key, value = (
        [np.concatenate([xs[0][a:b], xs[1][c : c + 1]]) for a, b, c in ((0, 37, 0), (37, 42, 1))]
        for xs in (keys, values)
    )
    for step, (loc, lens) in enumerate((([0, 37, 42], [37, 5]), ([0, 1, 2], [38, 6]))):
        cut = [[x[:n] for x, n in zip(xs, lens, strict=True)] for xs in (key, value)]
        where = np.array(loc, np.int32)
        want, _ = reference.attention(query[step], *cut, where, np.array(lens, np.int32), d**-0.5)
        got = np.array(found["outs"][step]).reshape(want.shape)
        assert reference.relative_rms(got, want, where).max() <= reference.BUDGET[dtype]


def stored(x: Any, scale: float, dtype: str) -> Any:
    """What SGLang's cache of fp8_e4m3 gives back: it divides in the dtype of the model."""
    held = torch.from_numpy(x).to(getattr(torch, dtype)) / scale
    return held.to(torch.float8_e4m3fn).double().numpy() * scale
