# SPDX-License-Identifier: Apache-2.0
"""cpu_attn.sglang in the real engine: transformers' tokens, whatever SGLang does with its slots meanwhile.

The engines run one after the other in a process of their own (sglang_harness.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.integrations
pytest.importorskip("sglang")

from ..models import sglang_harness, vllm_harness  # noqa: E402

# Prompts have up to 70 tokens: chunks of them go together with tokens of other requests.
CHUNKED = {"chunked_prefill_size": 48, "enable_mixed_chunk": True, "max_total_tokens": 1024}
WINDOWS = {"page_size": 16, "disable_hybrid_swa_memory": True}
JOBS: dict[str, dict[str, Any]] = {
    "slots": {"model": "llama", **CHUNKED, "page_size": 1},
    "pages": {"model": "llama", **CHUNKED, "page_size": 16},
    # Windows of 24 tokens in every second layer; with softcap.
    **{name: {"model": name, **CHUNKED, **WINDOWS} for name in ("gemma3_text", "gemma2")},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """What a job found, and transformers' tokens for it."""
    folder = tmp_path_factory.mktemp("sglang")
    file, jobs = folder / "results.json", {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CPU_ATTN_TEST_MODELS", str(folder / "models"))
        wanted = {job["model"]: vllm_harness.reference(job["model"]) for job in JOBS.values()}
        given = {"prompts": vllm_harness.prompts(), "new_tokens": vllm_harness.NEW_TOKENS}
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
        return {**found[name], "wanted": wanted[JOBS[name]["model"]]}

    return result


@pytest.mark.parametrize("name", JOBS)
def test_tokens(results: Callable[[str], Any], name: str) -> None:
    """Twice, the second time with prompts that are in the cache; requests are thrown out of it and resumed. No other
    backend has the name cpu_attn."""
    result = results(name)
    assert result["tokens"] == [result["wanted"]] * 2
    assert result["cached"] > 0 and result["retracted"] > 0
