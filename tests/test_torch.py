# SPDX-License-Identifier: Apache-2.0
"""Real tensors of torch, where it is installed: read and written in place, and never imported by us.

Nothing here depends on torch: make test-integrations installs it.
"""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cpu_attn

from .backend_steps import MIXED, Step, layer
from .steps import attention_args, write_args

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.integrations


def tensor(x: np.ndarray[Any, Any]) -> Any:
    """The same memory as a tensor; bfloat16 passes as bits."""
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_three_calls(dtype: str) -> None:
    plain, plain_write = attention_args(dtype), write_args(dtype)
    cpu_attn.attention_with_kv_cache(**plain)
    cpu_attn.reshape_and_cache(**plain_write)

    write = write_args(dtype)
    arrays = {k: tensor(v) if isinstance(v, np.ndarray) else v for k, v in write.items()}
    cpu_attn.reshape_and_cache(**arrays)
    assert write["key_cache"].tobytes() == plain_write["key_cache"].tobytes()
    assert write["value_cache"].tobytes() == plain_write["value_cache"].tobytes()

    args = attention_args(dtype)
    given = {k: tensor(v) if isinstance(v, np.ndarray) else v for k, v in args.items()}
    given["scheduler_metadata"] = cpu_attn.get_scheduler_metadata(
        2, 4, 2, 8, given["seq_lens"], getattr(torch, dtype), given["query_start_loc"]
    )
    assert cpu_attn.attention_with_kv_cache(**given) is given["output"]
    assert args["output"].tobytes() == plain["output"].tobytes()
    assert args["lse"].tobytes() == plain["lse"].tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_backend_layer(dtype: str) -> None:
    """Tensors all the way: metadata, flat cache, scales of 0 axes; an output of ours is a tensor too."""
    step = Step(*MIXED, dtype=dtype)
    metadata, kv_cache = step.metadata(), tensor(step.kv_cache)
    for name, x in vars(metadata).items():
        if isinstance(x, np.ndarray):
            setattr(metadata, name, tensor(x))
    query, key, value = (tensor(x).flatten(1) for x in (step.query, step.key, step.value))
    scales = SimpleNamespace(_k_scale=torch.tensor(1.0), _v_scale=torch.tensor(1.0))
    output = layer(sinks=torch.zeros(4)).forward(scales, query, key, value, kv_cache, metadata)
    assert isinstance(output, torch.Tensor) and output.dtype == query.dtype and output.shape == query.shape
    step.check(output.float().numpy().astype(step.query.dtype), s_aux=np.zeros(4))
    cpu_attn.CPUAttentionBackend.copy_blocks([kv_cache], torch.tensor([[0, 1]]))
    assert step.kv_cache[:, 0].tobytes() == step.kv_cache[:, 1].tobytes()


def test_strided_tensors() -> None:
    """Q as a slice of a packed projection, output transposed, as models have them."""
    args, plain = attention_args(), attention_args()
    cpu_attn.attention_with_kv_cache(**plain)
    packed = torch.zeros(4, 3 * 4 * 8)
    args["query"] = packed[:, 32:64].view(4, 4, 8).copy_(tensor(args["query"]))
    args["output"] = torch.zeros(4, 4, 8).transpose(0, 1).contiguous().transpose(0, 1)
    cpu_attn.attention_with_kv_cache(**args)
    assert np.array_equal(args["output"].numpy(), plain["output"])


def test_what_a_tensor_can_be_that_we_refuse() -> None:
    for query, error, words in (
        (torch.zeros(4, 4, 8, requires_grad=True), ValueError, "requires grad"),
        (torch.zeros(4, 4, 8, device="meta"), ValueError, "meta"),
        (torch.zeros(4, 4, 8, dtype=torch.float64), TypeError, "float64"),
        (torch.zeros(4, 4, 16)[..., ::2], ValueError, "stride 2"),
        (torch.zeros(4, 4, 8).to_sparse(), TypeError, "sparse"),
    ):
        args = attention_args()
        args["query"] = query
        with pytest.raises(error, match=words):
            cpu_attn.attention_with_kv_cache(**args)


def test_torch_is_not_imported() -> None:
    code = "import sys, cpu_attn, cpu_attn.compose; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("first", ["torch", "cpu_attn"])
def test_both_orders_of_import_share_the_threads(first: str) -> None:
    """One OpenMP run time, whose count torch and threadpoolctl set, for plans too; and one pool of threads: after both
    have computed on two there are no more of them than before."""
    second = "cpu_attn" if first == "torch" else "torch"
    code = f"""if True:
        import {first}, {second}
        import os
        import numpy as np
        from threadpoolctl import ThreadpoolController

        lens, starts = np.array([4096], np.int32), np.array([0, 512], np.int32)

        def plan():
            return cpu_attn.get_scheduler_metadata(1, 8, 8, 64, lens, "float32", starts)

        for n in (1, 2):
            torch.set_num_threads(n)
            assert cpu_attn.get_num_threads() == n == plan().num_threads
        with ThreadpoolController().limit(limits=1, user_api="openmp"):
            assert cpu_attn.get_num_threads() == 1 == plan().num_threads
        assert cpu_attn.get_num_threads() == 2
        with open("/proc/self/maps") as maps:
            assert len({{line.split()[-1] for line in maps if "libgomp" in line}}) == 1

        assert torch.ones(3000, 300).matmul(torch.ones(300, 3000))[0, 0] == 300
        torch.ones(10_000_000).add_(1)
        threads = len(os.listdir("/proc/self/task"))
        query, pages = torch.ones(512, 8, 64), torch.ones(32, 8, 128, 64)
        table = torch.arange(32, dtype=torch.int32)[None]
        step = (starts, lens, 1.0, True, None, -1, table, 0.0, plan())
        out = cpu_attn.attention_with_kv_cache(query, pages, pages.clone(), torch.empty_like(query), *step)
        assert (out - 1).abs().max() < 1e-5
        assert len(os.listdir("/proc/self/task")) == threads, threads
        assert all(e.available for e in cpu_attn.engines() if e.name != "onednn")
    """
    subprocess.run([sys.executable, "-c", code], check=True)
