# SPDX-License-Identifier: Apache-2.0
"""Whatever is thrown at the three calls: a clear exception and not a byte written, or a right answer.

A valid step is drawn, then spoiled in up to three places. Every buffer lies between a known pattern and a forbidden
page (guard.py), so a stray access kills the run. What is accepted must match the float64 oracle over the very
arrays that were passed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

import cpu_attn
from cpu_attn import ops, reference

from ..cases.formats import numpy_dtype
from ..harness.guard import Guarded
from ..harness.kernels import KERNELS

REFUSALS = (ValueError, TypeError, cpu_attn.UnavailableError)
ENGINES = [e.name for e in cpu_attn.engines() if e.available]
EXTREMES = [-(2**63), -(2**31), -2, -1, 0, 1, 2, 3, 17, 2**16, 2**31 - 1, 2**31, 2**63 - 1]
MASKS = (
    *("mm_prefix_range", "mm_prefix_clamp_sliding_window", "attention_chunk_size"),
    *("document_start_loc", "tree_mask"),
)
JUNK = [*EXTREMES, 0.5, float("nan"), float("inf"), 1e39, None, "x", b"x", True, [], (1, 2), (0, -1), object]
OTHER_DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16, np.float64, np.int32, np.int64, np.uint8, ">f4", object]


@dataclass
class Step:
    plan: dict[str, Any]
    write: dict[str, Any]
    attend: dict[str, Any]
    guards: list[Guarded] = field(repr=False)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    def one(*choices: Any) -> Any:
        return draw(st.sampled_from(choices))

    (isa, dtype), num_reqs, kv_heads, group = one(*KERNELS), one(0, 1, 2, 3), one(1, 2), one(1, 3)
    sizes, block_size = (one(1, 4, 7, 16), one(1, 5, 16, 18)), one(1, 3, 16, 17, 32)
    query_lens, seq_lens = ([draw(st.integers(0, n)) for _ in range(num_reqs)] for n in (4, 40))
    heads, tokens, kind = kv_heads * group, sum(query_lens), numpy_dtype(dtype)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    guards: list[Guarded] = []

    def make(x: Any) -> Any:
        guards.append(Guarded(np.asarray(x)))
        return guards[-1].array

    def normal(*shape: int) -> Any:
        return make(rng.standard_normal(shape, np.float32).astype(kind))

    def draw_masks() -> dict[str, Any]:
        kind = one("", "", "ranges", "tree")
        if kind == "tree":
            width = max(1, -(-max(query_lens, default=0) // 8))
            return {"tree_mask": make(rng.integers(0, 256, (tokens, width)).astype(np.uint8))}
        cuts = [sorted({0, *rng.integers(0, 45, 4).tolist()}) for _ in range(num_reqs)] if kind else []
        spans = {r: [(a, b - 1) for a, b in pairwise(c)] for r, c in enumerate(cuts)}
        documents = {r: c[::2] for r, c in enumerate(cuts)}
        return {
            "mm_prefix_range": one(None, spans),
            "document_start_loc": one(None, documents),
            "mm_prefix_clamp_sliding_window": one(False, True),
            "attention_chunk_size": one(None, None, 4, 16),
        }

    columns = max([-(-s // block_size) for s in seq_lens], default=0) + 1
    blocks = columns * num_reqs + 1
    table = rng.permutation(blocks)[: num_reqs * columns].reshape(num_reqs, columns).astype(np.int32)
    count = draw(st.integers(0, 6))
    mask = {"causal": one(True, False), "sliding_window": one(-1, 3, (5, 2), (-1, 0))}
    lens, start = make(np.array(seq_lens, np.int32)), make(np.cumsum([0, *query_lens]).astype(np.int32))
    caches = [normal(*cpu_attn.get_kv_cache_shape(blocks, block_size, kv_heads, s, dtype, isa)) for s in sizes]
    plan = {
        "num_reqs": num_reqs,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_size": sizes[0],
        "seq_lens": lens,
        "dtype": dtype,
        "query_start_loc": start,
        **mask,
        "isa": isa,
        "enable_kv_split": one(True, False),
        "dynamic_causal": one(None, make(np.array([r % 2 for r in range(num_reqs)], np.int32))),
        "head_size_v": sizes[1],
        "engine": one(*ENGINES),
        **draw_masks(),
    }
    write = {
        "key": normal(count, kv_heads, sizes[0]),
        "value": normal(count, kv_heads, sizes[1]),
        "key_cache": caches[0],
        "value_cache": caches[1],
        "slot_mapping": make(rng.integers(-1, blocks * block_size, count)),
        "isa": isa,
    }
    attend = {
        "query": normal(tokens, heads, sizes[0]),
        "key_cache": caches[0],
        "value_cache": caches[1],
        "output": normal(tokens, heads, sizes[1]),
        "query_start_loc": start,
        "seq_lens": lens,
        "scale": one(0.3, -0.5, 0.0),
        **mask,
        "alibi_slopes": one(None, make(np.linspace(0.1, 0.5, heads).astype(np.float32))),
        "block_table": make(table),
        "softcap": one(0.0, 2.0),
        "s_aux": one(None, make(np.linspace(-1, 1, heads).astype(np.float32))),
        "dynamic_causal": plan["dynamic_causal"],
        "lse": one(None, make(np.zeros((heads, tokens), np.float32))),
    }
    return Step(plan, write, attend, guards)


def spoil(draw: st.DrawFn, args: dict[str, Any]) -> None:
    """One argument becomes something else."""
    name = draw(st.sampled_from(sorted(args)))
    x = args[name]
    if not isinstance(x, np.ndarray):
        args[name] = draw(st.sampled_from(JUNK))
        return
    arrays = [a for a in args.values() if isinstance(a, np.ndarray)]
    how = draw(
        st.sampled_from(["junk", "dtype", "axis", "less", "step", "stride", "value", "alias", "shift", "readonly"])
    )
    axis = draw(st.integers(0, max(0, x.ndim - 1)))
    if how == "junk":
        args[name] = draw(st.sampled_from(JUNK))
    elif how == "dtype":
        args[name] = x.astype(draw(st.sampled_from(OTHER_DTYPES)))
    elif how == "axis":
        args[name] = draw(st.sampled_from([x[None], x.reshape(-1), x[..., None], x.T]))
    elif how == "less":
        args[name] = x[(slice(None),) * axis + (slice(1, None),)]
    elif how == "step":
        args[name] = x[(slice(None),) * axis + (slice(None, None, draw(st.sampled_from([-1, 2]))),)]
    elif how == "stride":
        strides = list(x.strides)
        strides[axis] = draw(st.sampled_from([0, x.itemsize, 1, -x.itemsize if x.size < 2 else 0]))
        args[name] = as_strided(x, x.shape, strides) if x.size else x
    elif how == "value" and x.size and x.dtype.kind == "i":
        flat = x.reshape(-1)
        bound = np.iinfo(x.dtype)
        flat[draw(st.integers(0, x.size - 1))] = np.clip(draw(st.sampled_from(EXTREMES)), bound.min, bound.max)
    elif how == "alias":
        other = draw(st.sampled_from(arrays))
        raw = other.reshape(-1).view(np.uint8) if other.size else other
        if 0 < x.nbytes <= raw.nbytes:
            args[name] = raw[: x.nbytes].view(x.dtype).reshape(x.shape)
    elif how == "shift" and x.nbytes > 1:
        raw = np.zeros(x.nbytes + 8, np.uint8)[1 : x.nbytes + 1]
        args[name] = raw.view(x.dtype).reshape(x.shape)
    elif how == "readonly":
        args[name] = x.view()
        args[name].flags.writeable = False


def attempt(call: Any, args: dict[str, Any], guards: list[Guarded]) -> tuple[bool, Any]:
    before = [g.array.tobytes() for g in guards]
    try:
        return True, call(**args)
    except REFUSALS as e:
        assert str(e), "an exception that says nothing"
        assert before == [g.array.tobytes() for g in guards], f"written in spite of: {e}"
        return False, None
    finally:
        assert all(g.intact() for g in guards)


def judge(plan: Any, args: dict[str, Any], plan_args: dict[str, Any]) -> None:
    """What was computed, against the oracle over the tokens that the block table names."""
    if plan.num_reqs == 0:
        return
    lens, start = (np.asarray(args[k]) for k in ("seq_lens", "query_start_loc"))
    tables = np.asarray(args["block_table"])
    tables = np.where((tables >= 0) & (tables < len(args["key_cache"])), tables, 0)
    plain: list[list[Any]] = [[], []]
    for table, n in zip(tables, lens, strict=True):
        size = args["key_cache"].shape[2]
        row = np.zeros(-(-int(n) // size), np.int32)
        row[: len(table)] = table[: len(row)]
        for i, name in enumerate(("key_cache", "value_cache")):
            head_size = (plan.head_size, plan.head_size_v)[i]
            plain[i].append(ops.gather(args[name], row, int(n), head_size, plan.isa, value=bool(i)))
    slopes, sinks = (None if args[k] is None else np.asarray(args[k], np.float64) for k in ("alibi_slopes", "s_aux"))
    want, want_lse = reference.attention(
        np.asarray(args["query"]), *plain, start, lens, args["scale"], args["causal"], slopes, args["sliding_window"],
        args["softcap"], sinks, args["dynamic_causal"], **{k: x for k, x in plan_args.items() if k in MASKS},
    )  # fmt: skip
    name = str(plan.dtype)
    # Few values may cancel to almost nothing: errors count against the request's largest, too.
    error = np.abs(np.asarray(args["output"], np.float64) - want)
    assert (error <= 10 * reference.BUDGET[name] * (1 + np.abs(want))).all(), (plan, plan_args)
    if args["lse"] is not None:
        tolerance = max(1e-4, reference.LSE_BUDGET[name])
        assert np.allclose(args["lse"], want_lse, rtol=tolerance, atol=tolerance), (plan, plan_args)


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.data(), steps())
def test_a_clear_exception_or_a_right_answer(data: st.DataObject, step: Step) -> None:
    for args in data.draw(st.lists(st.sampled_from([step.plan, step.write, step.attend]), max_size=3)):
        spoil(data.draw, args)
    attempt(cpu_attn.reshape_and_cache, step.write, step.guards)
    planned, plan = attempt(cpu_attn.get_scheduler_metadata, step.plan, step.guards)
    if planned:
        step.attend["scheduler_metadata"] = plan
        done, _ = attempt(cpu_attn.attention_with_kv_cache, step.attend, step.guards)
        if done:
            judge(plan, step.attend, step.plan)
