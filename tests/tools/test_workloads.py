# SPDX-License-Identifier: Apache-2.0
"""What `cpu-attn bench` runs and counts: shapes, flops and bytes, that it is attention, and which limit binds."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cpu_attn
from cpu_attn import reference
from cpu_attn._dtypes import DTYPE_CODES
from cpu_attn._native import ffi, lib
from cpu_attn.cli import contest, limits
from cpu_attn.cli.limits import Limit, Limits
from cpu_attn.cli.workloads import GROUPS, WORKLOADS, Step, Workload
from cpu_attn.tests.cases.formats import DTYPES, numpy_dtype

# The oracle's input: all features, requests of all kinds, blocks that are not full.
ODD = Workload("odd", "prefill", ((5, 40), (1, 33), (17, 17)), 6, 2, 24, 11, 7.0, True, True, True)
DRAFTS = Workload("drafts", "decode", ((5, 40), (1, 33), (17, 17)), 6, 2, 24, softcap=7.0, sinks=True, tree=True)
UNBIASED = replace(ODD, name="unbiased", attn_bias=False)
LATENT = Workload("latent", "decode", ((1, 40), (1, 7)), 6, 1, 24, latent_rank=16)
BIASED_DRAFTS = replace(DRAFTS, name="biased drafts", attn_bias=True)
PLAIN = Workload("plain", "prefill", ((3, 30), (3, 30)), 4, 2, 16)


# ---- workloads ----


def test_every_workload_by_name() -> None:
    """Name, requests, tokens, keys, heads and head size, as the figures to compare with were measured."""
    found = {
        w.name: (len(w.lens), w.num_tokens, sum(k for _, k in w.lens), w.num_heads, w.num_kv_heads, w.head_size)
        for w in WORKLOADS.values()
    }
    keys = found.pop("plan-256")
    assert keys[:2] + keys[3:] == (256, 256, 32, 8, 128)
    assert found == {
        "prefill-2k": (1, 2048, 2048, 32, 8, 128),
        "prefill-8k": (1, 8192, 8192, 8, 2, 128),
        "prefill-64x512": (64, 64 * 512, 64 * 512, 32, 8, 128),
        "prefill-4k-d64": (1, 4096, 4096, 16, 16, 64),
        "prefill-2k-d256": (1, 2048, 2048, 8, 4, 256),
        "chunk-512-of-8k": (1, 512, 8192, 32, 8, 128),
        "prefill-32k": (1, 32768, 32768, 4, 1, 128),
        "prefill-32k-sparse": (1, 32768, 32768, 4, 1, 128),
        "mixed": (5, 3437, 2456 + 1234 + 1145 + 4162 + 2345, 32, 8, 128),
        "decode-1x16k": (1, 1, 16384, 32, 8, 128),
        "decode-8x8k": (8, 8, 8 * 8192, 32, 8, 128),
        "decode-32x2k": (32, 32, 32 * 2048, 32, 8, 128),
        "decode-64x512": (64, 64, 64 * 512, 32, 8, 128),
        "decode-16x4k-mha": (16, 16, 16 * 4096, 16, 16, 128),
        "decode-8x8k-gqa8": (8, 8, 8 * 8192, 32, 4, 128),
        "decode-8x8k-gqa16": (8, 8, 8 * 8192, 32, 2, 128),
        "decode-8x8k-d64": (8, 8, 8 * 8192, 64, 8, 64),
        "mla-8x4k-h16": (8, 8, 8 * 4096, 16, 1, 576),
        "mla-8x4k-h128": (8, 8, 8 * 4096, 128, 1, 576),
        "mla-1x64k": (1, 1, 65536, 128, 1, 576),
        "mla-1x64k-sparse": (1, 1, 65536, 128, 1, 576),
        "tree-8x8k": (8, 64, 8 * 8192, 32, 8, 128),
        "tree-16x4k-mha": (16, 128, 16 * 4096, 16, 16, 128),
        "select-1x64k": (1, 1, 65536, 32, 8, 128),
        "cascade-32x4k": (32, 32, 32 * 4160, 32, 8, 128),
        "cascade-32x4k-mha": (32, 32, 32 * 4160, 16, 16, 128),
        "write-8k": (1, 8192, 8192, 32, 8, 128),
        "rope-write-8k": (1, 8192, 8192, 32, 8, 128),
        "call-tiny": (1, 1, 16, 32, 8, 128),
        "gdn-prefill-2k": (1, 2048, 2048, 32, 16, 128),
        "gdn-prefill-512": (1, 512, 512, 32, 16, 128),
        "gdn-decode-64": (64, 64, 64 * 1024, 32, 16, 128),
        "gdn-decode-1": (1, 1, 1024, 32, 16, 128),
        "kda-prefill-2k": (1, 2048, 2048, 32, 32, 128),
        "ssd-prefill-2k": (1, 2048, 2048, 128, 8, 128),
        "ssd-decode-64": (64, 64, 64 * 1024, 128, 8, 128),
        "gdn-forget-2k": (1, 2048, 2048, 32, 16, 128),
        "kda-forget-2k": (1, 2048, 2048, 32, 32, 128),
        "ssd-forget-2k": (1, 2048, 2048, 128, 8, 128),
        "conv-prefill-2k": (1, 2048, 2048, 32, 16, 128),
    }


def test_groups() -> None:
    assert [w.name for w in GROUPS["all"]] == list(WORKLOADS)
    names = ("decode-", "tree-", "select-")
    assert {w.name for w in GROUPS["decode"]} == {n for n in WORKLOADS if n.startswith(names)}
    assert {w.name for w in GROUPS["mla"]} == {name for name in WORKLOADS if name.startswith("mla-")}
    prefill = {name for name in WORKLOADS if name.startswith("prefill-")} | {"chunk-512-of-8k", "mixed"}
    assert {w.name for w in GROUPS["prefill"]} == prefill
    assert all(w.kind == group for group in ("prefill", "decode", "cascade") for w in GROUPS[group])
    assert {w.name for w in GROUPS["cascade"]} == {name for name in WORKLOADS if name.startswith("cascade-")}


def test_latent() -> None:
    """A row of K is read once, and V is a part of it."""
    w = Workload("w", "decode", ((1, 40), (1, 7)), 6, 1, 24, latent_rank=16)
    assert w.flops == 47 * 6 * 2 * (24 + 16)
    assert w.kv_bytes(2) == 47 * 24 * 2
    step = Step(w, "auto", "float32", 16)
    output = cpu_attn.attention_with_kv_cache(**step.arguments(), scheduler_metadata=step.plan("native"))
    pages = [step.cache.gather(step.block_table[r], int(n)) for r, n in enumerate(step.seq_lens)]
    key, value = [k for k, _ in pages], [v for _, v in pages]
    assert all((k[..., :16] == v).all() for k, v in pages)
    want, _ = reference.attention(step.query, key, value, step.query_start_loc, step.seq_lens, 24**-0.5)
    assert (reference.relative_rms(output, want, step.query_start_loc) <= reference.BUDGET["float32"]).all()


@pytest.mark.parametrize("window", [-1, 1, 4, 11, 1000])
@pytest.mark.parametrize("lens", [((1, 1),), ((5, 40), (1, 33), (17, 17))])
def test_flops_and_bytes_counted_one_by_one(lens: tuple[tuple[int, int], ...], window: int) -> None:
    w = Workload("w", "prefill", lens, 6, 2, 24, window)
    flops = elements = 0
    for q_len, kv_len in lens:
        touched = set()
        for i in range(q_len):
            position = kv_len - q_len + i
            seen = [j for j in range(kv_len) if j <= position and (window < 0 or position - j < window)]
            touched |= set(seen)
            for _ in seen:
                flops += 6 * (24 + 24) * 2  # each query head: D products and sums for q.k, D for p*v
        elements += len(touched) * 2 * (24 + 24)  # each kv head: a row of K, a row of V
    assert w.flops == flops
    assert w.kv_bytes(2) == 2 * elements
    assert w.flops == 4 * 24 * Step(w, "auto", "float32").plan("native").visible_pairs


def test_flops_of_drafts() -> None:
    assert DRAFTS.flops == 4 * 24 * Step(DRAFTS, "auto", "float32").plan("native").visible_pairs
    assert DRAFTS.flops == 4 * 24 * 6 * (5 * 35 + 11 + 1 * 33 + 17 * 0 + sum(i.bit_length() for i in range(1, 18)))


def test_what_is_selected_is_something() -> None:
    w = Workload("w", "decode", ((1, 64),), selected=1e-9)
    assert w.flops == w.kv_bytes(2) == 1


# ---- what is timed is attention ----


def expected(step: Step) -> tuple[Any, Any]:
    w = step.workload
    pages = [step.cache.gather(step.block_table[r], int(n)) for r, n in enumerate(step.seq_lens)]
    return reference.attention(
        step.query,
        [k for k, _ in pages],
        [v for _, v in pages],
        step.query_start_loc,
        step.seq_lens,
        w.head_size**-0.5,
        True,
        step.alibi_slopes if w.alibi else None,
        w.sliding_window,
        w.softcap,
        step.s_aux if w.sinks else None,
        **step.masks,
        attn_bias=step.attn_bias,
    )


def called(row: contest.Contestant) -> Any:
    with contest.threads(row.threads):
        return row.call()


def assert_right(step: Step, output: Any) -> None:
    wanted = expected(step)[0]
    for first, last in pairwise(step.query_start_loc):
        error = np.asarray(output[first:last], np.float64) - wanted[first:last]
        relative = np.sqrt((error**2).mean() / (wanted[first:last] ** 2).mean())
        assert relative <= reference.BUDGET[step.dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("engine", contest.ENGINES)
@pytest.mark.parametrize("workload", [ODD, DRAFTS, UNBIASED, LATENT], ids=lambda w: w.name)
def test_contestants_compute_attention(engine: str, dtype: str, workload: Workload) -> None:
    if reason := contest.missing(engine, "auto", dtype) or contest.unable(engine, workload, "auto", 16):
        pytest.skip(reason)
    step = Step(workload, "auto", dtype, block_size=16)
    (row,) = contest.contestants(step, [engine], 2)
    step.output[...] = 9
    called(row)
    assert (row.engine, row.isa) == (engine, step.plan("native").isa)
    assert_right(step, step.output)


@pytest.mark.integrations
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rival", ["torch", "zentorch"])
@pytest.mark.parametrize(
    "workload",
    [
        *(PLAIN, ODD, DRAFTS, BIASED_DRAFTS, Workload("full", "prefill", ((9, 9),), 4, 2)),
        Workload("decode", "decode", ((1, 40), (1, 40)), 6, 2),
        Workload("alibi", "decode", ((1, 40), (1, 40)), 6, 2, alibi=True),
        Workload("window", "prefill", ((9, 40), (9, 40)), 6, 2, sliding_window=7),
    ],
    ids=lambda w: w.name,
)
def test_torch_computes_the_same_attention(workload: Workload, rival: str, dtype: str) -> None:
    if rival == "zentorch" and (reason := contest.missing(rival, "auto", dtype)):
        pytest.skip(reason)
    step = Step(replace(workload, softcap=0.0, sinks=False), "auto", dtype)
    (row,) = contest.contestants(step, [rival], 2)
    tokens = [one for group in called(row) for one in group]  # [Hq, q_len, D] of each request
    assert (row.isa, len(tokens)) == (None, len(workload.lens))
    assert_right(step, np.concatenate([t.float().numpy().transpose(1, 0, 2) for t in tokens]))


GGML = [
    *(PLAIN, ODD, DRAFTS, BIASED_DRAFTS),
    Workload("tiles", "prefill", ((100, 130), (70, 70)), 6, 2, 64, 90, 7.0, True),  # from 64 query tokens on
    Workload("decode", "decode", ((1, 40), (1, 40)), 6, 2),
    Workload("split", "decode", ((1, 700),), 6, 2, 64, sinks=True),  # one request of 512 keys or more
    Workload("alibi", "prefill", ((9, 40), (9, 40)), 6, 2, 64, alibi=True),
    Workload("latent", "decode", ((1, 40), (1, 40)), 6, 1, 72, latent_rank=40),
]
GGML_CACHES = [
    *((dtype, "auto", 1e-2) for dtype in DTYPES),
    ("float16", "int8", 1e-2),
    ("bfloat16", "int8/int5", 0.1),
    ("float32", "int4/float32", 0.2),
]


@pytest.mark.parametrize(
    ("workload", "dtype", "kv_cache_dtype", "budget"),
    [
        pytest.param(w, *cache, id=f"{w.name}-{cache[0]}-{cache[1]}")
        for w, cache in product(GGML, GGML_CACHES)
        if cache[1] == "auto" or w.head_size % 64 == 0
    ],
)
def test_ggml_computes_the_same_attention(workload: Workload, dtype: str, kv_cache_dtype: str, budget: float) -> None:
    """Loosely: float16 adds up V in float16, and what a quantised cache of ours gives is quantised again."""
    if reason := contest.missing("ggml", "auto", dtype):
        pytest.skip(reason)
    step = Step(workload, "auto", dtype, 16, kv_cache_dtype)
    (row,) = contest.contestants(step, ["ggml"], 2)
    output = np.concatenate([x for batch in called(row) for x in batch])  # [q_len, Hq, Dv] of each request
    wanted = expected(step)[0]
    assert (row.isa, output.shape) == (None, wanted.shape)
    assert (reference.relative_rms(output, wanted, step.query_start_loc) <= budget).all()


def test_python_says_what_it_lacks() -> None:
    assert not contest.unable("onednn-python", UNBIASED, "int8", 16)
    for workload, lacking in ((ODD, "attn_bias"), (BIASED_DRAFTS, "attn_bias and no tree")):
        assert contest.unable("onednn-python", workload, "auto", 16) == f"onednn-python has no {lacking}"
    sparse = ("prefill-32k-sparse", "select-1x64k", "mla-1x64k-sparse")
    assert all(contest.unable("onednn-python", WORKLOADS[name], "auto", 16) for name in sparse)
    assert contest.unable("onednn-python", PLAIN, "auto", 16, "hadamard").endswith("has no kv_cache_rotation")


def test_ggml_says_what_it_lacks() -> None:
    lacks = replace(ODD, selected=0.5)
    for kv_cache_dtype, lacking in {
        "auto": "selected",
        "fp8/int6": "selected and no fp8 and no int6",
        "int8": "selected and no head size 24 of int8",
        "float16/int4": "selected and no head size 24 of float16/int4",
    }.items():
        assert contest.unable("ggml", lacks, kv_cache_dtype, 16) == f"ggml's flash attention has no {lacking}"
    assert not contest.unable("ggml", ODD, "bfloat16", 16)
    assert not contest.unable("ggml", WORKLOADS["decode-8x8k"], "int8/int4", 16)


VLLM_SCHEMAS = {
    "get_scheduler_metadata": """(int num_req, int num_heads_q, int num_heads_kv, int head_dim, Tensor seq_lens,
        ScalarType dtype, Tensor query_start_loc, bool casual, int window_size, str isa_hint, bool enable_kv_split,
        Tensor? dynamic_causal, str kv_cache_dtype="auto") -> Tensor""",
    "cpu_attn_reshape_and_cache": """(Tensor key, Tensor value, Tensor(a2!) key_cache, Tensor(a3!) value_cache,
        Tensor slot_mapping, str isa, float k_scale=1.0, float v_scale=1.0, str kv_cache_dtype="auto") -> ()""",
    "cpu_attention_with_kv_cache": """(Tensor query, Tensor key_cache, Tensor value_cache, Tensor(a3!) output,
        Tensor query_start_loc, Tensor seq_lens, float scale, bool causal, Tensor? alibi_slopes,
        SymInt sliding_window_size, Tensor block_table, float softcap, Tensor scheduler_metadata, Tensor? s_aux,
        Tensor? dynamic_causal, float k_scale=1.0, float v_scale=1.0, str kv_cache_dtype="auto") -> ()""",
}


@pytest.fixture(scope="module")
def vllm_kernels() -> Iterator[None]:
    """vLLM's compiled kernels; where it has none, ours under their names and with their arguments."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_TARGET_DEVICE", "cpu")
        pytest.importorskip("vllm")
        library = None
        if contest.missing("vllm", "auto", "bfloat16"):
            torch = importlib.import_module("torch")
            importlib.import_module("cpu_attn.torch")
            library = torch.library.Library("_C", "FRAGMENT")
            for name, schema in VLLM_SCHEMAS.items():
                library.define(name + schema)
                library.impl(name, getattr(torch.ops.cpu_attn, name), "CompositeExplicitAutograd")
        yield
        del library


@pytest.mark.integrations
@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype"), [("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "fp8_e5m2")]
)
@pytest.mark.parametrize(
    "workload",
    [
        replace(ODD, attn_bias=False, head_size=64),
        Workload("shared", "cascade", ((1, 140), (1, 151)), 6, 2, 64, shared=128),
    ],
    ids=lambda w: w.name,
)
def test_vllm_computes_the_same_attention(
    vllm_kernels: Any, workload: Workload, dtype: str, kv_cache_dtype: str
) -> None:
    step = Step(workload, "auto", dtype, 32, kv_cache_dtype)
    (row,) = contest.contestants(step, ["vllm"], 2)
    assert row.isa is None
    assert_right(step, called(row).float().numpy())


@pytest.mark.integrations
def test_vllm_plans_and_writes(vllm_kernels: Any) -> None:
    (row,) = contest.contestants(Step(WORKLOADS["plan-256"], "auto", "bfloat16", 32), ["vllm"], 2)
    assert called(row).numel() > 0
    step = Step(Workload("w", "write", ((40, 40),), 4, 2, 64), "auto", "bfloat16", 32)
    native, row = contest.contestants(step, ["native", "vllm"], 2)
    assert (native.engine, row.engine) == ("native", "vllm")
    *_, key_cache, value_cache, _, _ = row.call.args
    called(row)
    for written in (key_cache, value_cache):
        values = written.float().abs()
        tokens = (values > 0).sum() / (2 * 64)
        assert tokens == 40 and values.max() < 2


@pytest.mark.integrations
def test_vllm_says_what_it_lacks(vllm_kernels: Any) -> None:
    everything = replace(DRAFTS, attn_bias=True, selected=0.5)
    reason = contest.unable("vllm", everything, "int8", 16)
    lacking = ("attn_bias", "tree", "selected", "int8", "head size 24", "blocks of 16 tokens")
    assert reason == f"vLLM's CPU attention has no {' and no '.join(lacking)}"
    assert not contest.unable("vllm", WORKLOADS["decode-8x8k"], "auto", 128)
    fives = replace(WORKLOADS["decode-8x8k"], head_size=80)  # which vLLM has, but not of fp8
    assert not contest.unable("vllm", fives, "auto", 32)
    assert contest.unable("vllm", fives, "fp8", 32).endswith("no head size 80")
    assert contest.unable("vllm", WORKLOADS["decode-8x8k"], "fp8/auto", 32).endswith("has no fp8/auto")


def test_write_and_plan() -> None:
    step = Step(Workload("w", "write", ((40, 40),), 4, 2, 16), "auto", "bfloat16")
    (row,) = contest.contestants(step, ["native", "onednn-python"], 2)
    called(row)
    assert row.engine == "native"
    for found in step.cache.gather(step.block_table[0], 40):
        values = np.abs(found.astype(np.float32))
        assert values.min() >= 0.5 and values.max() < 2  # as random() makes them: none was left out
    (row,) = contest.contestants(Step(WORKLOADS["plan-256"], "auto", "bfloat16"), ["native", "onednn-python"], 2)
    plan = called(row)
    assert (plan.num_reqs, plan.workspace_bytes) == (256, row.workspace_bytes)


def test_random_numbers_are_all_of_their_range() -> None:
    for dtype in DTYPES:
        x = Step(PLAIN, "auto", dtype).random(64, 64)
        values = np.abs(x.astype(np.float64))
        assert x.dtype == numpy_dtype(dtype)
        assert 0.5 <= values.min() < 0.6 and 1.9 < values.max() < 2
        assert 0.4 < (x.astype(np.float64) < 0).mean() < 0.6


def test_blocks_are_owned_once_and_keys_differ() -> None:
    step = Step(ODD, "auto", "float32", block_size=16)
    needed = [-(-n // 16) for n in step.seq_lens]
    used = np.concatenate([row[:n] for row, n in zip(step.block_table, needed, strict=True)])
    assert sorted(used) == list(range(sum(needed)))
    pages = [step.cache.gather(step.block_table[r], 17)[0] for r in range(3)]
    assert not any(np.array_equal(a, b) for a, b in pairwise(pages))


# ---- limits ----


def test_every_kernel_has_a_limit() -> None:
    kernel = ffi.new("ca_kernel_info *")
    for isa in cpu_attn.isas():
        for dtype, code in DTYPE_CODES.items():
            if isa.supported and lib.ca_isa_kernel(isa.index, code, kernel):
                found = limits.products(isa.name, dtype, 1)
                assert found, f"no probe for {isa.name} in {dtype}"
                assert {x.kind for x in found} == {"matrix_gflops" if isa.unit == "matrix" else "vector_gflops"}
                assert limits.best_isa(dtype, matrix=True) in {i.name for i in cpu_attn.isas() if i.supported}


def test_probes() -> None:
    found = limits.probes()
    assert {"scalar", "avx2", "avx512", "avx512_bf16", "amx"} <= {p.name for p in found}
    for p in found:
        for threads in (1, 2, 5):
            assert (lib.ca_probe_gflops(p.index, threads, 1e-4) > 0) == (not p.reason), p
    assert lib.ca_probe_gflops(len(found), 1, 1e-4) == lib.ca_probe_gflops(-1, 1, 1e-4) == 0


@pytest.mark.parametrize("size", [0, 511, 512, 70_000, 9 * 2**20])
def test_probes_stay_inside_their_memory(size: int) -> None:
    source = np.random.default_rng(0).integers(1, 256, size + 64, np.uint8)
    target = np.zeros_like(source)
    for threads in (1, 3):
        assert (lib.ca_probe_read_gbps(ffi.from_buffer(source), size, threads) > 0) == (size >= 512)
        target[:] = 0
        speed = lib.ca_probe_copy_gbps(ffi.from_buffer(target), ffi.from_buffer(source), size, threads)
        assert (speed > 0) == (size >= 512)
        copied = int(np.count_nonzero(target))
        assert copied <= size and copied >= size * 0.9 - 512
        assert np.array_equal(target[:copied], source[:copied])


def test_the_higher_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([3.0, 5.0, 4.0, 7.0])
    monkeypatch.setattr(Limits, "_look", lambda self, limit: next(looks))
    measured, small, large = Limits(), Limit("read_gbps", 1, num_bytes=1), Limit("read_gbps", 1, num_bytes=2)
    measured.measure([small, large])
    measured.measure([large, small])
    assert measured.kept == {small: 7.0, large: 5.0}
    assert measured.fastest([large, small]) == small
    assert measured.fastest([]) is None
    assert measured.summary() == {
        "matrix_gflops": None,
        "vector_gflops": None,
        "read_gbps": 5.0,  # of the larger memory
        "memcpy_gbps": None,
    }


def test_probes_run_on_the_threads_of_their_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    found = limits.products(limits.best_isa("float32", matrix=False), "float32", 3)[:1]
    found += [Limit("read_gbps", 4, num_bytes=512), Limit("memcpy_gbps", 5, num_bytes=512)]
    on: list[int] = []
    fake = SimpleNamespace(
        ca_probe_gflops=lambda index, threads, seconds: on.append(threads) or 1.0,
        ca_probe_read_gbps=lambda source, size, threads: on.append(threads) or 1.0,
        ca_probe_copy_gbps=lambda target, source, size, threads: on.append(threads) or 1.0,
    )
    monkeypatch.setattr(limits, "lib", fake)
    monkeypatch.setattr(limits, "LOOKS", 1)
    Limits().measure(found)
    assert on == [3, 4, 5]


@pytest.mark.parametrize("kind", ["prefill", "cascade", "decode", "write", "plan", "call"])
def test_which_limit_binds(kind: str) -> None:
    w = Workload("w", kind, ((1, 4000),) if kind == "decode" else ((9, 9),))
    (row,) = contest.contestants(Step(w, "auto", "bfloat16"), ["native"], 2)
    memory = {"decode": "read_gbps", "write": "memcpy_gbps"}
    if kind in ("prefill", "cascade"):
        assert list(row.limits) == limits.products(row.isa, "bfloat16", 2)
    elif kind in memory:
        size = max(w.kv_bytes(2), contest.LEAST_BYTES)
        assert row.limits == (Limit(memory[kind], 2, num_bytes=size),)
    else:
        assert row.limits == ()
