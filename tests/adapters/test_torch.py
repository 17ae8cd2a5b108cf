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
from cpu_attn import sparse

from ..harness.backend_steps import MIXED, Step, layer
from ..harness.steps import attention_args, write_args
from ..python.test_arguments import rotary_args

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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_calls_return_beside_tensors(dtype: str) -> None:
    """Outputs that are not given are tensors for tensors, with the bits of the arrays for arrays."""
    rng = np.random.default_rng(3)
    q, k, v = (tensor(rng.standard_normal((20, 2, 16)).astype(np.float32)).to(getattr(torch, dtype)) for _ in range(3))
    table, starts, lens = torch.arange(2)[None].int(), torch.tensor([0, 20]).int(), torch.tensor([20]).int()
    cache = cpu_attn.PagedKVCache(2, 16, 2, 16, dtype)
    cache.update(k, v, torch.arange(20))
    plan, lse = cache.plan(starts, lens, 2), torch.empty(2, 20)
    got = cache.attend(q, table, plan, lse=lse)
    assert isinstance(got, torch.Tensor) and got.dtype == q.dtype
    want = np.empty((20, 2, 16), cache.dtype)
    cache.attend(q, table, plan, output=want)
    assert tensor(want).equal(got)

    for outs, lses in (([got, got], [lse, lse]), (torch.stack([got, got]), torch.stack([lse, lse]))):
        out, log = cpu_attn.merge_states(outs, lses)
        assert isinstance(out, torch.Tensor) and out.dtype == q.dtype and log.dtype == torch.float32
        assert out.equal(got) and torch.allclose(log, lse + np.log(2))


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


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_gradients_are_refused_every_time(dtype: str) -> None:
    args = write_args(dtype)
    write = {k: tensor(v) if isinstance(v, np.ndarray) else v for k, v in args.items()}
    for tracked in (True, False, True):
        with torch.set_grad_enabled(tracked), pytest.raises(ValueError, match="key: requires grad"):
            cpu_attn.reshape_and_cache(**{**write, "key": write["key"].clone().requires_grad_()})
        cpu_attn.reshape_and_cache(**write)


def test_a_subclass_whose_numpy_copies() -> None:
    class Copying(torch.Tensor):
        def numpy(self, *, force: bool = False) -> Any:
            return torch.Tensor.numpy(self, force=force).copy()

    args = {k: tensor(v) if isinstance(v, np.ndarray) else v for k, v in attention_args().items()}
    for _ in range(3):
        cpu_attn.attention_with_kv_cache(**args)
        output = torch.full_like(args["output"], torch.nan)
        cpu_attn.attention_with_kv_cache(**{**args, "output": output.as_subclass(Copying)})
        assert torch.equal(output, args["output"])


def test_tensors_without_memory() -> None:
    """Freed, fake, all zeros by definition or functional: refused by name, in the first call and in one like others."""
    code = """if True:
        import numpy as np, pytest, torch
        import cpu_attn
        from cpu_attn.tests.harness.steps import attention_args, plan_args, write_args
        from torch._subclasses.fake_tensor import FakeTensorMode

        def arguments(make):
            return {k: torch.tensor(v) if isinstance(v, np.ndarray) else v for k, v in make().items()}

        def refused(call, name, arguments):
            with pytest.raises((ValueError, TypeError), match=f"^{name}: .*(no memory|does not say|storage)"):
                call(**arguments)

        for make, call in (
            (write_args, cpu_attn.reshape_and_cache),
            (plan_args, cpu_attn.get_scheduler_metadata),
            (attention_args, cpu_attn.attention_with_kv_cache),
        ):
            for _ in range(2):
                for name, x in arguments(make).items():
                    if not isinstance(x, torch.Tensor):
                        continue
                    with FakeTensorMode():
                        fake = torch.empty(x.shape, dtype=x.dtype)
                    others = arguments(make)
                    refused(call, name, {**others, name: fake})
                    refused(call, name, {**others, name: torch._efficientzerotensor(x.shape, dtype=x.dtype)})
                    torch.func.functionalize(lambda t: (refused(call, name, {**others, name: t}), t)[1])(x.clone())
                    x.untyped_storage().resize_(0)
                    refused(call, name, {**others, name: x})
                call(**arguments(make))

        freed = torch.ones(4, 4, 8, dtype=torch.bfloat16)
        freed.untyped_storage().resize_(0)
        for _ in range(2):
            args = {k: x.bfloat16() if getattr(x, "dtype", None) == torch.float32 and k != "lse" else x
                    for k, x in arguments(lambda: attention_args("float32")).items()}
            args["scheduler_metadata"] = attention_args("bfloat16")["scheduler_metadata"]
            cpu_attn.attention_with_kv_cache(**args)
            refused(cpu_attn.attention_with_kv_cache, "query", {**args, "query": freed})
    """
    subprocess.run([sys.executable, "-c", code], check=True)


def _tensors(make: Any) -> dict[str, Any]:
    return {k: torch.tensor(v) if isinstance(v, np.ndarray) else v for k, v in make().items()}


def _states() -> dict[str, Any]:
    out = {"out": np.zeros((3, 4, 8), np.float32), "lse": np.zeros((4, 3), np.float32)}
    return {"outs": np.zeros((2, 3, 4, 8), np.float32), "lses": np.zeros((2, 4, 3), np.float32), **out}


def _bounds() -> dict[str, Any]:
    key = {"key": np.ones((3, 2, 8), np.float32), "slot_mapping": np.arange(3), "block_size": 16}
    return key | {name: np.zeros((4, 2, 8), np.float32) for name in ("block_min", "block_max")}


def _indexed() -> dict[str, Any]:
    key = {"k": np.ones((3, 8), np.float32), "slot_mapping": np.arange(3)}
    return key | {"index_cache": np.zeros((4, 16, 8), np.float32)}


WRITTEN = [
    (cpu_attn.reshape_and_cache, write_args, ("key_cache", "value_cache")),
    (cpu_attn.rotary_reshape_and_cache, rotary_args, ("key_cache", "value_cache", "query_out")),
    (cpu_attn.attention_with_kv_cache, attention_args, ("output", "lse")),
    (cpu_attn.merge_states, _states, ("out", "lse")),
    (sparse.update_block_bounds, _bounds, ("block_min", "block_max")),
    (sparse.index_and_cache, _indexed, ("index_cache",)),
]


@pytest.mark.parametrize(
    ("call", "make", "name"), [(call, make, name) for call, make, names in WRITTEN for name in names]
)
def test_a_storage_that_shrank(call: Any, make: Any, name: str) -> None:
    """Whether it is the tensor's own or one that begins before it, and where the tensor has gaps. A storage that holds
    all but what lies behind the last element is no fault."""
    args, x = _tensors(make), _tensors(make)[name]
    call(**args)
    for spread in (lambda: x.clone(), lambda: torch.cat([x, x])[len(x) :], lambda: torch.stack([x, x], 1)[:, 0]):
        whole, cut = spread(), spread()  # each met once: NumPy's bridge makes a storage that is not resizable
        size = whole.storage_offset() + 1 + sum((n - 1) * s for n, s in zip(whole.shape, whole.stride(), strict=True))
        size *= whole.itemsize
        whole.untyped_storage().resize_(size)
        call(**args | {name: whole})
        cut.untyped_storage().resize_(size - 4)
        with pytest.raises(ValueError, match=rf"^{name}: its elements end {size} bytes into a storage of {size - 4}$"):
            call(**args | {name: cut})


def test_a_cache_that_shrank_is_not_copied_into() -> None:
    """By NumPy, which writes as far as a view of it goes."""
    flat = torch.zeros(2, 4, 2 * 16 * 8)
    flat.untyped_storage().resize_(flat.nbytes - 4)
    with pytest.raises(ValueError, match=r"kv_caches\[0\].*a storage of 8188"):
        cpu_attn.PagedAttention.copy_blocks([flat], np.array([[0, 1]]))


@pytest.mark.parametrize("name", ["query", "key_cache", "value_cache", "output", "lse"])
@pytest.mark.parametrize(
    "negative",
    [torch._neg_view, lambda x: torch.complex(x, x).conj().imag],
    ids=["neg_view", "conj"],
)
def test_the_negative_of_what_lies_there(name: str, negative: Any) -> None:
    for _ in range(2):
        args = {k: tensor(v) if isinstance(v, np.ndarray) else v for k, v in attention_args().items()}
        with pytest.raises(ValueError, match=rf"^{name}: .*resolve_neg\(\)"):
            cpu_attn.attention_with_kv_cache(**args | {name: negative(args[name])})
        cpu_attn.attention_with_kv_cache(**args)


def test_what_the_readers_of_tensors_raise() -> None:
    def call(query: Any) -> Any:
        return cpu_attn.attention_with_kv_cache(**attention_args() | {"query": query})

    nested = torch.nested.nested_tensor([torch.zeros(4, 8)] * 4)
    for read, query in ((call, nested), (torch.vmap(call), torch.zeros(2, 4, 4, 8))):
        with pytest.raises(TypeError, match=r"^query: "):
            read(query)


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
