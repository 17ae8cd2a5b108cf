# SPDX-License-Identifier: Apache-2.0
"""What a type checker sees of the installed package in a user's program: the classes of results, and no Any."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
from typing import Any

import numpy as np
from cpu_attn import *
from cpu_attn.distributed import ContextParallel, ThreadGroup
from cpu_attn.serving import *
from cpu_attn.sparse import *

class Tensor:
    def new_empty(self, shape: tuple[int, ...]) -> "Tensor": ...

cache = PagedKVCache(4, 16, 2, 64, "float32")
manager = BlockManager([cache])
query = np.zeros((3, 8, 64), np.float32)
ranks = ContextParallel(ThreadGroup.make(1)[0])

def shown(step: Step, plan: SchedulerMetadata, error: NoFreeBlocksError, tensor: Tensor) -> None:
    """

# What is shown, and what it is.
SHOWN = {
    "manager.allocate('a', [1, 2, 3])": "int",
    "manager.step([('a', [1, 2, 3])])": "Step",
    "manager.num_free_blocks": "int",
    "manager.stats()": "tuple",
    "manager.stats().num_evictions": "int",
    "manager.caches[0]": "PagedKVCache",
    "manager.get_block_ids('a')": "ndarray",
    "step.num_reqs": "int",
    "step.num_tokens": "int",
    "step.slot_mapping": "ndarray",
    "step.plan(cache, 8)": "SchedulerMetadata",
    "ranks.step(step)": "Step",
    "ranks.attend(cache, query, step)": "ndarray",
    "cache.plan(np.array([0, 3]), np.array([3]), 8)": "SchedulerMetadata",
    "cache.attend(query, step)": "ndarray",
    "cache.attend(query, step, plan, output=query)": "ndarray",
    "cache.attend(tensor, step)": "Tensor",
    "cache.gather(np.array([0]), 3)[0]": "ndarray",
    "cache.key_cache": "ndarray",
    "cache.value_cache": "ndarray",
    "cache.num_blocks": "int",
    "cache.isa": "str",
    "cache.dtype": "dtype",
    "cache.k_scale": "float",
    "cache.descriptor": "CacheDescriptor",
    "plan.num_threads": "int",
    "plan.workspace_bytes": "int",
    "plan.dtype": "dtype",
    "plan.engine": "str",
    "error.missing": "int",
    "error.never_fits": "bool",
    "get_kv_cache_shape(4, 16, 2, 64, 'float32')": "tuple",
    "get_scheduler_metadata(1, 8, 2, 64, [3], 'float32', [0, 3])": "SchedulerMetadata",
    "attention_with_kv_cache(query, 0, 0, query, 0, 0, 1.0, True, None, -1, 0, 0.0, plan)": "ndarray",
    "attention_mla(tensor, 0, tensor, 0, 0, 1.0, True, 0, plan)": "Tensor",
    "rotary_reshape_and_cache(query, 0, 0, 0, 0, 0, 0, 0)": "ndarray",
    "select_blocks(0, 0, 0, 0, 16)": "ndarray",
    "isas()[0].name": "str",
    "engines()[0].available": "bool",
    "get_num_threads()": "int",
}


@pytest.fixture
def program(tmp_path: Path) -> Path:
    lines = [f"reveal_type({expression})" for expression in SHOWN]
    path = tmp_path / "program.py"
    path.write_text(PROGRAM + "\n    ".join(lines) + "\n")
    return path


def told(program: Path, *words: str) -> str:
    """Gives what a type checker says of the program, which it has to accept."""
    command = [sys.executable, "-m", *words, program.name]
    result = subprocess.run(command, cwd=program.parent, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def names(types: list[str]) -> dict[str, str]:
    return dict(zip(SHOWN, (name.rpartition(".")[2] for name in types), strict=True))


def test_mypy(program: Path) -> None:
    said = told(program, "mypy", "--strict", "--allow-empty-bodies")
    assert names(re.findall(r'note: Revealed type is "([\w.]+)', said)) == SHOWN, said


def test_pyright(program: Path) -> None:
    pytest.importorskip("basedpyright", reason="make .venv/dev installs it")
    (program.parent / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')
    said = told(program, "basedpyright", "--pythonpath", sys.executable)
    types = names(re.findall(r'Type of ".*" is "(\w+)', said))
    assert types == SHOWN | {"manager.stats()": "BlockStats"}, said
