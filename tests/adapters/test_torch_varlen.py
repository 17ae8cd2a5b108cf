# SPDX-License-Identifier: Apache-2.0
"""torch.nn.attention.varlen on the CPU, by our provider: against float64 maths, request by request."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cpu_attn import ops, reference

from ..harness.guard import Guarded

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.integrations
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl  # noqa: E402
from torch.nn.attention.varlen import AuxRequest, varlen_attn, varlen_attn_out  # noqa: E402

import cpu_attn.torch  # noqa: E402, F401

DTYPES = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 4e-3}
LSE = AuxRequest(lse=True)
# Query tokens and keys of requests: rows without a key (causal, more queries than keys), no queries, no keys, and
# several requests within the last 64 tokens, whose blocks of 64 would end past the tensor.
MIXED = ([3, 1, 0, 70, 4, 2, 5, 1, 2], [40, 5, 3, 133, 2, 0, 9, 1, 3])


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Activated; the arrays of every call that came to our kernels."""
    seen: list[Any] = []
    attend = ops.attend

    def counted(plan: Any, *args: Any, **more: Any) -> None:
        seen.append((plan, args))
        attend(plan, *args, **more)

    monkeypatch.setattr(ops, "attend", counted)
    activate_flash_attention_impl("cpu_attn")
    yield seen
    restore_flash_attention_impl()


def starts(lens: Any) -> Any:
    return torch.tensor([0, *np.cumsum(lens)], dtype=torch.int32)


class Step:
    """Random packed Q, K and V; ``pages``: the same K and V in a shuffled pool."""

    def __init__(
        self, q_lens: Any, k_lens: Any, dtype: str = "float32", heads: int = 4, kv_heads: int = 2, d: int = 32
    ):
        g = torch.Generator().manual_seed(sum(q_lens) + sum(k_lens))
        kind = getattr(torch, dtype)
        self.q_lens, self.k_lens, self.dtype = q_lens, k_lens, dtype
        self.query = torch.randn(sum(q_lens), heads, d, generator=g).to(kind)
        self.key, self.value = (torch.randn(sum(k_lens), kv_heads, d, generator=g).to(kind) for _ in range(2))
        self.cu_q, self.cu_k = starts(q_lens), starts(k_lens)

    @property
    def packed(self) -> tuple[Any, ...]:
        return (
            self.query,
            self.key,
            self.value,
            self.cu_q,
            self.cu_k,
            max(self.q_lens, default=0),
            max(self.k_lens, default=0),
        )

    def paged(self, page_size: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments. Slots past a request's keys hold NaN."""
        needed = [-(-n // page_size) for n in self.k_lens]
        order = torch.randperm(sum(needed) + 2, generator=torch.Generator().manual_seed(1)).int()
        table = torch.full((len(needed), max(needed)), -7, dtype=torch.int32)
        pools = [
            torch.full((len(order), page_size, *x.shape[1:]), torch.nan, dtype=x.dtype) for x in (self.key, self.value)
        ]
        for r, n in enumerate(needed):
            table[r, :n] = order[:n]
            order = order[n:]
            for x, pool in zip((self.key, self.value), pools, strict=True):
                for i in range(n):
                    here = x[self.cu_k[r] : self.cu_k[r + 1]][i * page_size : (i + 1) * page_size]
                    pool[table[r, i], : len(here)] = here
        used = torch.tensor(self.k_lens, dtype=torch.int32)
        arguments = (self.query, *pools, self.cu_q, None, max(self.q_lens), max(self.k_lens))
        return arguments, {"seqused_k": used, "block_table": table}

    def expected(
        self, window: tuple[int, int] = (-1, -1), used: Any = None, slopes: Any = None, scale: float | None = None
    ) -> tuple[Any, Any]:
        """float64 output [T, H, D] and lse [H, T]; without a key 0 and -inf."""
        outs, lses = [], []
        for r, (nq, nk) in enumerate(zip(self.q_lens, self.k_lens if used is None else used, strict=True)):
            q = self.query[self.cu_q[r] : self.cu_q[r + 1]].double().transpose(0, 1)
            group = q.shape[0] // self.key.shape[1]
            first = int(self.cu_k[r])
            here = slice(first, first + nk)
            k, v = (x[here].double().repeat_interleave(group, 1).transpose(0, 1) for x in (self.key, self.value))
            distance = torch.arange(nk)[None] - (torch.arange(nq) + nk - nq)[:, None]
            scores = q @ k.transpose(1, 2) * (q.shape[-1] ** -0.5 if scale is None else scale)
            if slopes is not None:
                scores = scores + slopes.double()[:, None, None] * distance
            for side, ahead in zip(window, (-distance, distance), strict=True):
                if side >= 0:
                    scores = scores.masked_fill(ahead > side, -torch.inf)
            lses.append(torch.logsumexp(scores, -1))
            outs.append((scores.softmax(-1).nan_to_num(0) @ v).transpose(0, 1))
        return torch.cat(outs), torch.cat(lses, 1)

    def check(self, out: Any, lse: Any = None, **expected: Any) -> None:
        want, want_lse = self.expected(**expected)
        assert out.dtype == getattr(torch, self.dtype) and out.shape == want.shape
        rms = reference.relative_rms(out.double().numpy(), want.numpy(), self.cu_q.numpy())
        assert rms.max() <= DTYPES[self.dtype], rms
        if lse is not None:
            assert lse.dtype == torch.float32 and lse.shape == want_lse.shape
            assert torch.allclose(lse.double(), want_lse, atol=10 * DTYPES[self.dtype], rtol=1e-5)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (6, 0), (5, 2), (-1, 3), (4, -1)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_and_paged(calls: list[Any], dtype: str, window: tuple[int, int]) -> None:
    step = Step(*MIXED, dtype)
    options = {"window_size": window, "enable_gqa": True, "return_aux": LSE}
    out, lse = varlen_attn(*step.packed, **options)
    assert calls
    step.check(out, lse, window=window)
    calls.clear()
    for page_size in (16, 24, 128):
        arguments, pages = step.paged(page_size)
        step.check(*varlen_attn(*arguments, **options, **pages), window=window)
    assert len(calls) == 3


@pytest.mark.parametrize("lens", [([5], [5]), ([1], [1000]), ([33, 7], [33, 7]), ([1] * 8, [64] * 8), ([2, 3], [0, 0])])
def test_shapes_without_gqa(calls: list[Any], lens: Any) -> None:
    step = Step(*lens, heads=3, kv_heads=3, d=20)
    step.check(*varlen_attn(*step.packed, window_size=(-1, 0), return_aux=LSE), window=(-1, 0))
    assert len(calls) <= 2  # one for all, and one for the last: nothing is run request by request


def test_nothing_at_all(calls: list[Any]) -> None:
    for lens in (([], []), ([0, 0], [3, 0])):
        step = Step(*lens)
        out, lse = varlen_attn(*step.packed, enable_gqa=True, return_aux=LSE)
        assert out.shape == (0, 4, 32) and lse.shape == (4, 0)


def test_some_of_the_keys_are_used(calls: list[Any]) -> None:
    """seqused_k without pages: the keys after them are another request's, or nobody's."""
    used = [20, 5, 0, 100, 2, 0, 9, 0, 1]
    step = Step(*MIXED)
    options = {"window_size": (-1, 0), "enable_gqa": True, "return_aux": LSE, "scale": 0.5}
    out, lse = varlen_attn(*step.packed, seqused_k=torch.tensor(used, dtype=torch.int32), **options)
    step.check(out, lse, window=(-1, 0), used=used, scale=0.5)


def test_keys_are_read_where_they_lie(calls: list[Any]) -> None:
    step = Step(*MIXED)
    varlen_attn(*step.packed, enable_gqa=True)
    for _, arrays in calls:
        for cache, x in zip(arrays[1:3], (step.key, step.value), strict=True):
            assert cache.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    calls.clear()
    arguments, pages = step.paged(16)
    varlen_attn(*arguments, enable_gqa=True, **pages)
    assert [x.data_ptr() for x in calls[0][1][1:3]] == [x.data_ptr() for x in arguments[1:3]]


@pytest.mark.parametrize("k_lens", [[133], [16, 5, 3], [40, 16], [7]])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_byte_past_the_keys(calls: list[Any], dtype: str, k_lens: list[int]) -> None:
    """K and V end where memory does."""
    step = Step([3] * len(k_lens), k_lens, dtype)
    bits = torch.int16 if dtype == "bfloat16" else torch.float32
    guards = [Guarded(x.view(bits).numpy()) for x in (step.key, step.value)]
    step.key, step.value = (torch.from_numpy(g.array).view(step.key.dtype) for g in guards)
    step.check(varlen_attn(*step.packed, enable_gqa=True))
    assert all(g.intact() for g in guards)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_bits_wherever_a_request_is(calls: list[Any], dtype: str) -> None:
    """Alone, before others and after them, over pages, split or not; torch promises it of num_splits=1."""
    lens = ([5, 40, 3], [70, 2100, 20])
    step = Step(*lens, dtype)
    options = {"enable_gqa": True, "window_size": (-1, 0)}
    out = varlen_attn(*step.packed, **options)
    first, last = 0, 0
    for nq, nk in zip(*lens, strict=True):
        q, k, v = step.query[first : first + nq], step.key[last : last + nk], step.value[last : last + nk]
        for num_splits in (None, 1, 4):
            alone = varlen_attn(q, k, v, starts([nq]), starts([nk]), nq, nk, num_splits=num_splits, **options)
            assert torch.equal(alone, out[first : first + nq])
        first, last = first + nq, last + nk
    arguments, pages = step.paged(64)
    assert torch.equal(varlen_attn(*arguments, **options, **pages), out)
    assert {plan._shape.enable_kv_split for plan, _ in calls} == {0, 1}


def test_strided_tensors(calls: list[Any]) -> None:
    """Q, K and V as slices of one projection; pages as a part of a larger pool."""
    step = Step([20, 30], [20, 30], heads=2)
    projection = torch.cat([step.query, step.key, step.value], 1)
    step.query, step.key, step.value = projection[:, :2], projection[:, 2:4], projection[:, 4:]
    assert not step.query.is_contiguous()
    step.check(varlen_attn(*step.packed))
    arguments, pages = step.paged(16)
    pool = torch.stack(arguments[1:3], 1)
    step.check(varlen_attn(arguments[0], *pool.unbind(1), *arguments[3:], **pages))
    assert len(calls) == 3


def test_out_is_given(calls: list[Any]) -> None:
    step = Step(*MIXED)
    out = torch.full_like(step.query, 7)
    same, lse = varlen_attn_out(out, *step.packed, enable_gqa=True, return_aux=LSE)
    assert same is out
    step.check(out, lse)


def test_nothing_is_written_before_an_error(calls: list[Any]) -> None:
    """The last token of out is the first of key, which only the last part of the call would meet."""
    step = Step([3, 2], [40, 5], heads=2)
    memory = torch.full((5 + 45 - 1, 2, 32), 7.0)
    out, step.key = memory[:5], memory[4:]
    with pytest.raises(ValueError, match="out: shares memory with key"):
        varlen_attn_out(out, *step.packed)
    assert (memory == 7).all()


@pytest.mark.parametrize("tokens", [4, 7])
def test_out_of_other_tokens(calls: list[Any], tokens: int) -> None:
    step = Step([3, 2], [40, 5], heads=2)
    out = torch.full((tokens, 2, 32), 7.0)
    with pytest.raises(ValueError, match=rf"^out: shape \({tokens}, 2, 32\), expected \[5, Hq, D\]"):
        varlen_attn_out(out, *step.packed)
    assert (out == 7).all()


def test_alibi(calls: list[Any]) -> None:
    """The public function has none; the aten op underneath has."""
    step, slopes = Step(*MIXED), torch.tensor([0.5, 0.25, 0.125, 1.0])
    forward = torch.ops.aten._flash_attention_forward
    out, lse, *_ = forward(*step.packed, 0.0, True, False, alibi_slopes=slopes)
    step.check(out, lse, window=(-1, 0), slopes=slopes)
    with pytest.raises(ValueError, match="alibi_slopes: only for causal attention"):
        forward(*step.packed, 0.0, False, False, alibi_slopes=slopes)


def test_compiled_and_in_inference_mode(calls: list[Any]) -> None:
    step = Step(*MIXED)
    torch._dynamo.reset()

    def attention(query: Any, key: Any, value: Any, cu_q: Any, cu_k: Any) -> Any:
        return varlen_attn(query, key, value, cu_q, cu_k, 70, 133, enable_gqa=True, window_size=(-1, 0), return_aux=LSE)

    compiled = torch.compile(attention, fullgraph=True)
    step.check(*compiled(*step.packed[:5]), window=(-1, 0))
    assert calls
    with torch.inference_mode():
        step.check(*attention(*step.packed[:5]), window=(-1, 0))


# The cases of torch's own tests of varlen_attn over caches: four requests of one query token, eight heads of 64.
TORCH_LENS = [[32, 64, 96, 48], [1, 1, 1, 1], [128, 128, 128, 128], [1, 128, 1, 128], [127, 63, 33, 17]]
inplace = torch.ops.aten._flash_attention_forward_no_dropout_inplace
torch_cases = pytest.mark.parametrize("lens", TORCH_LENS, ids=str)
half_dtypes = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("page_size", [32, 64, 128, 256])
@torch_cases
@half_dtypes
def test_cases_of_torch_over_pages(
    calls: list[Any], dtype: str, lens: list[int], page_size: int, compiled: bool
) -> None:
    """The in-place op, at which dynamo breaks the graph, before and after varlen_attn."""
    step = Step([1] * 4, lens, dtype, heads=8, kv_heads=8, d=64)
    arguments, pages = step.paged(page_size)
    torch._dynamo.reset()
    functions = (varlen_attn, varlen_attn_out, inplace)
    attn, attn_out, op = map(torch.compile, functions) if compiled else functions
    for _ in range(2):
        out = torch.empty_like(step.query)
        step.check(out, op(out, *arguments, 0.0, False, False, **pages))
        step.check(*attn(*arguments, return_aux=LSE, **pages))
        out = torch.empty_like(step.query)
        assert attn_out(out, *arguments, **pages).data_ptr() == out.data_ptr()
        step.check(out)
    assert len(calls) == 6
    assert torch.equal(out, varlen_attn(*step.packed))  # not by pages, not compiled


@torch_cases
@half_dtypes
def test_cases_of_torch_over_slots(calls: list[Any], dtype: str, lens: list[int]) -> None:
    """Each request has 128 slots of a packed cache, NaN past its keys."""
    step = Step([1] * 4, lens, dtype, heads=8, kv_heads=8, d=64)
    caches = [torch.full((4 * 128, 8, 64), torch.nan, dtype=x.dtype) for x in (step.key, step.value)]
    for r, n in enumerate(lens):
        for x, cache in zip((step.key, step.value), caches, strict=True):
            cache[128 * r :][:n] = x[step.cu_k[r] :][:n]
    slots = torch.arange(0, 5 * 128, 128, dtype=torch.int32)
    arguments, options = (step.query, *caches, step.cu_q, slots, 1, 128), {"seqused_k": torch.tensor(lens).int()}
    step.check(*varlen_attn(*arguments, return_aux=LSE, **options))
    out = torch.empty_like(step.query)
    step.check(varlen_attn_out(out, *arguments, **options))


def test_the_ops_in_a_graph(calls: list[Any]) -> None:
    """The fakes give what the kernels give."""
    step = Step(*MIXED)
    torch._dynamo.reset()
    forward = torch.ops.aten._flash_attention_forward.default
    arguments = (*step.packed, 0.0, True, False)
    torch.library.opcheck(forward, arguments)
    compiled = torch.compile(lambda *x: forward(*x), fullgraph=True)(*arguments)
    for got, want in zip(compiled, forward(*arguments), strict=True):
        assert torch.equal(got, want) and got.dtype == want.dtype
    step.check(*compiled[:2], window=(-1, 0))
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")  # the fourth is one graph
    torch.library.opcheck(inplace.default, (torch.empty_like(step.query), *arguments), test_utils=tests)


def test_gradients_have_no_kernel(calls: list[Any]) -> None:
    step = Step(*MIXED)
    step.query.requires_grad_()
    out = varlen_attn(*step.packed, enable_gqa=True)
    with torch.no_grad():
        assert torch.equal(varlen_attn(*step.packed, enable_gqa=True), out)
    with pytest.raises(NotImplementedError, match="cpu_attn has no backward"):
        out.sum().backward()


I32 = {"dtype": torch.int32}


def freed(*shape: int, **options: Any) -> Any:
    tensor = torch.zeros(*shape, **options)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"cum_seq_q": torch.tensor([0, 3, 9])}, TypeError, r"cu_seq_q: dtype torch.int64, expected torch.int32"),
        ({"cum_seq_q": torch.tensor([0, 3, 8], **I32)}, ValueError, r"query: 9 tokens, expected cu_seq_q\[-1\] = 8"),
        ({"cum_seq_q": torch.tensor([0, 10, 9], **I32)}, ValueError, r"cu_seq_q\[2\]: 9, expected at least 10"),
        ({"cum_seq_q": torch.tensor([1, 3, 9], **I32)}, ValueError, r"cu_seq_q\[0\]: 1, expected 0"),
        ({"cum_seq_q": freed(3, **I32)}, ValueError, "cu_seq_q: .* into a storage of 0"),
        ({"query": freed(9, 4, 32)}, ValueError, "query: .* into a storage of 0"),
        ({"cum_seq_q": None}, ValueError, "cu_seq_q: is None"),
        ({"cum_seq_k": torch.tensor([0, 31], **I32)}, ValueError, r"cu_seq_k: shape \(2,\), expected \[3\]"),
        ({"cum_seq_k": torch.tensor([0, 5, 32], **I32)}, ValueError, r"cu_seq_k\[2\]: 32, the tensor has 31 tokens"),
        ({"seqused_k": torch.tensor([6, 1], **I32)}, ValueError, r"seqused_k\[0\]: 6, outside 0..5"),
        ({"seqused_k": torch.tensor([1, -1], **I32)}, ValueError, r"seqused_k\[1\]: -1, outside 0..26"),
        ({"value": torch.zeros(30, 2, 32)}, ValueError, "value: 30 tokens, key has 31"),
        ({"value": torch.zeros(31, 2, 16)}, ValueError, "value: axis 3 is 16, expected head_size = 32"),
        ({"value": torch.zeros(31, 2, 32).half()}, TypeError, "value: dtype float16, expected float32"),
        ({"key": torch.zeros(31, 3, 32)}, ValueError, "num_kv_heads: 3 does not divide num_heads = 4"),
        ({"key": torch.zeros(2, 16, 2, 32)}, ValueError, "key: 4 axes, expected 3 without block_table"),
        ({"query": torch.zeros(9, 4, 32).double()}, TypeError, "query: dtype torch.float64, expected float32"),
        ({"query": torch.zeros(9, 4, 0)}, ValueError, "head_size: 0 is outside 1"),
        ({"query": torch.zeros(1, 9, 4, 32)}, ValueError, "query: 4 axes, expected 3"),
        ({"query": torch.zeros(9, 4, 64)[..., ::2]}, ValueError, "query: the last axis has stride 2"),
        ({"dropout_p": 0.1}, ValueError, "dropout_p: 0.1, expected 0"),
        ({"return_debug_mask": True}, ValueError, "return_debug_mask: True, expected False"),
        ({"window_size_left": -2}, ValueError, r"window_size\[0\]: -2 is outside -1"),
        ({"num_splits": -1}, ValueError, "num_splits: -1, expected at least 0"),
        ({"alibi_slopes": torch.zeros(2, 4), "is_causal": True}, ValueError, "alibi_slopes: 2 axes, expected 1"),
        ({"block_table": torch.zeros(2, 2, **I32)}, ValueError, "key: 3 axes, expected 4 with block_table"),
    ],
)
def test_errors(calls: list[Any], changed: dict[str, Any], error: type[Exception], words: str) -> None:
    step = Step([3, 6], [5, 26])
    names = ("query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k")
    arguments = dict(zip(names, step.packed, strict=True))
    arguments |= {"dropout_p": 0.0, "is_causal": False, "return_debug_mask": False} | changed
    with pytest.raises(error, match=words):
        torch.ops.aten._flash_attention_forward(**arguments)


def test_errors_of_pages(calls: list[Any]) -> None:
    step = Step([3, 6], [5, 26])
    arguments, pages = step.paged(16)
    for changed, error, words in (
        ({"seqused_k": None}, ValueError, "seqused_k: is None"),
        ({"seqused_k": torch.tensor([5, -1], **I32)}, ValueError, r"seqused_k\[1\]: -1, expected at least 0"),
        ({"seqused_k": torch.tensor([5, 33], **I32)}, ValueError, "block_table: request 1: needs 3 blocks"),
        ({"block_table": pages["block_table"].long()}, TypeError, "block_table: dtype int64, expected int32"),
        ({"block_table": pages["block_table"][:1]}, ValueError, "block_table: axis 0 is 1, expected num_reqs = 2"),
        ({"block_table": pages["block_table"] + 9}, ValueError, "block_table: request 0: position 0 holds block"),
    ):
        with pytest.raises(error, match=words):
            varlen_attn(*arguments, enable_gqa=True, **pages | changed)


def test_in_place_without_the_module_of_varlen_attn() -> None:
    """Which says that graphs break at the op."""
    code = """if True:
        import torch, cpu_attn.torch
        torch.nn.attention.activate_flash_attention_impl("cpu_attn")
        op = torch.ops.aten._flash_attention_forward_no_dropout_inplace
        x, loc, out = torch.ones(5, 2, 8), torch.tensor([0, 5], dtype=torch.int32), torch.zeros(5, 2, 8)
        def double(out):
            op(out, x, x, x, loc, loc, 5, 5, 0.0, False, False)
            return out * 2
        print(bool((torch.compile(double)(out) - 2).abs().max() < 1e-6))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "True", done.stderr


def test_importing_does_not_activate() -> None:
    code = """if True:
        import torch, cpu_attn.torch
        from torch.nn.attention import *
        assert "cpu_attn" in list_flash_attention_impls() and current_flash_attention_impl() is None
        from torch.nn.attention.varlen import varlen_attn
        x, loc = torch.ones(5, 2, 8), torch.tensor([0, 5], dtype=torch.int32)
        def runs():
            try:
                return (varlen_attn(x, x, x, loc, loc, 5, 5) - 1).abs().max() < 1e-6
            except NotImplementedError:
                return False
        found = [runs()]
        activate_flash_attention_impl("cpu_attn")
        found += [runs(), current_flash_attention_impl() == "cpu_attn"]
        restore_flash_attention_impl()
        found += [runs()]
        activate_flash_attention_impl("cpu_attn")
        print([bool(f) for f in [*found, runs()]])
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[False, True, True, False, True]"
