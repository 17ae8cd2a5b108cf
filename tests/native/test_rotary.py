# SPDX-License-Identifier: Apache-2.0
"""rotary_reshape_and_cache against the float64 oracle, element by element: float32 throughout, one rounding at the end.
Attention over what it wrote is among the cases (rotation.py)."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import cpu_attn
from cpu_attn import _threads, ops, reference

from ..cases.formats import integers, numpy_dtype, quantised
from ..cases.rotation import Rotation
from ..harness.guard import Guarded
from ..harness.kernels import KERNELS, ONE_DTYPE
from ..python.test_errors import refuses

SHAPES = [(2, 2), (7, 4), (16, 16), (33, 32), (40, 8), (80, 80), (128, 128), (128, 64), (576, 64)]  # D, rot_dim


def arguments(
    dtype: str, head_size: int = 40, rot_dim: int = 16, count: int = 37, isa: str = "auto", **more: Any
) -> dict[str, Any]:
    """of rotary_reshape_and_cache: 6 query heads, 2 kv heads, V of 24, tokens in any order, some padding."""
    rng = np.random.default_rng(head_size)
    kind = numpy_dtype(dtype)
    angles = rng.uniform(-4, 4, (50, rot_dim // 2))
    caches = [np.zeros(cpu_attn.get_kv_cache_shape(5, 16, 2, n, dtype, isa), kind) for n in (head_size, 24)]
    slots = rng.permutation(80)[:count]
    slots[::7] = -1
    return {
        "query": (rng.standard_normal((count, 6, head_size)) * 3).astype(kind),
        "key": rng.standard_normal((count, 2, head_size)).astype(kind),
        "value": rng.standard_normal((count, 2, 24)).astype(kind),
        "key_cache": caches[0],
        "value_cache": caches[1],
        "slot_mapping": slots,
        "positions": rng.integers(0, 50, count),
        "cos_sin_cache": np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32),
        "isa": isa,
        **more,
    }


def wanted(args: dict[str, Any]) -> tuple[reference.Float64, reference.Float64]:
    """Queries and keys by the oracle."""
    how = (args["positions"], args["cos_sin_cache"], args.get("is_neox", True))
    eps = args.get("eps", 1e-6)
    return (
        reference.rotary(args["query"], *how, args.get("q_weight"), eps),
        reference.rotary(args["key"], *how, args.get("k_weight"), eps),
    )


def rounded_once(got: NDArray[Any], want: reference.Float64) -> bool:
    """Half a unit in the last place, and what float32 errs on the way: some units of the largest of its head."""
    info = ml_dtypes.finfo(got.dtype)
    exponent = np.floor(np.log2(np.maximum(np.abs(want), float(info.smallest_normal))))
    unit = np.exp2(exponent) * float(info.eps)
    slack = 1e-6 * np.abs(want).max(axis=2, keepdims=True)
    return bool((np.abs(got.astype(np.float64) - want) <= 0.5 * unit + slack).all())


def stored(args: dict[str, Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """K and V of the tokens that have a slot."""
    n, isa = 80, args["isa"]
    table, slots = np.arange(5, dtype=np.int32), args["slot_mapping"]
    how: Any = {"dtype": args["key"].dtype, "kv_cache_dtype": args.get("kv_cache_dtype", "auto")}
    key = ops.gather(args["key_cache"], table, n, args["key"].shape[2], isa, value=False, **how)
    value = ops.gather(args["value_cache"], table, n, 24, isa, value=True, **how)
    return key[slots[slots >= 0]], value[slots[slots >= 0]]


@pytest.mark.parametrize(("isa", "dtype"), KERNELS)
@pytest.mark.parametrize(("head_size", "rot_dim"), SHAPES)
@pytest.mark.parametrize("is_neox", [True, False])
def test_oracle(isa: str, dtype: str, head_size: int, rot_dim: int, is_neox: bool) -> None:
    rng = np.random.default_rng(1)
    weights = rng.uniform(0.5, 2, (2, head_size)).astype(np.float32)
    norms: list[dict[str, Any]] = [
        {},
        {"q_weight": weights[0], "k_weight": weights[1].astype(numpy_dtype(dtype)), "eps": 0.01},
        {"k_weight": weights[0]},
    ]
    for norm in norms:
        args = arguments(dtype, head_size, rot_dim, isa=isa, is_neox=is_neox, **norm)
        if norm:
            args["cos_sin_cache"] = args["cos_sin_cache"].astype(numpy_dtype(dtype))
            if dtype != "float16":  # numbers whose squares float32 does not hold
                args["key"][::3] *= np.float32(2.0**100)
                args["key"][1::3] *= np.float32(2.0**-80)
        query, key = wanted(args)
        before = args["key"].copy()
        assert cpu_attn.rotary_reshape_and_cache(**args) is args["query"]
        kept = args["slot_mapping"] >= 0
        got_key, got_value = stored(args)
        assert rounded_once(args["query"], query)
        assert rounded_once(got_key, key[kept])
        assert got_value.tobytes() == args["value"][kept].tobytes()
        assert args["key"].tobytes() == before.tobytes()


@pytest.mark.parametrize(("isa", "dtype"), KERNELS)
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_plain_rows(isa: str, dtype: str, layout: str) -> None:
    """The same numbers as in a packed cache, in rows; integers have no place there."""
    packed, plain = arguments(dtype, isa=isa), arguments(dtype, isa=isa)
    names = ("key_cache", "value_cache")
    shapes = [cpu_attn.get_kv_cache_shape(5, 16, 2, n, dtype, isa, kv_cache_layout=layout) for n in (40, 24)]
    plain |= {name: np.zeros(shape, numpy_dtype(dtype)) for name, shape in zip(names, shapes, strict=True)}
    cpu_attn.rotary_reshape_and_cache(**packed)
    cpu_attn.rotary_reshape_and_cache(**plain, kv_cache_layout=layout)
    assert plain["query"].tobytes() == packed["query"].tobytes()
    slots = packed["slot_mapping"]
    for name, want in zip(names, stored(packed), strict=True):
        rows = plain[name].swapaxes(1, 2) if layout == "HND" else plain[name]
        assert rows.reshape(80, 2, -1)[slots[slots >= 0]].tobytes() == want.tobytes()
    narrow = {name: plain[name].view(np.uint8) for name in names} | {"kv_cache_dtype": "int8"}
    plain |= {"kv_cache_layout": layout, **narrow}
    refuses(cpu_attn.rotary_reshape_and_cache, plain, ValueError, f"kv_cache_layout: '{layout}' holds no int8")


@pytest.mark.parametrize(("isa", "dtype"), KERNELS)
def test_only_what_is_asked_for(isa: str, dtype: str) -> None:
    """Sources that end at forbidden pages; padding leaves the caches alone; query_out takes the place of query."""
    args = arguments(dtype, isa=isa)
    want = wanted(args)[0]
    names = ("query", "key", "value", "positions", "slot_mapping", "cos_sin_cache", "key_cache", "value_cache")
    out = np.full_like(args["query"], np.nan)
    guards = {name: Guarded(x) for name, x in (*((n, args[n]) for n in names), ("query_out", out))}
    guarded = {**args, **{name: guard.array for name, guard in guards.items()}}
    cpu_attn.rotary_reshape_and_cache(**guarded)
    assert all(guard.intact() for guard in guards.values())
    assert guards["query"].array.tobytes() == args["query"].tobytes()
    assert rounded_once(guards["query_out"].array, want)
    only = arguments(dtype, isa=isa, slot_mapping=np.full(37, -1))
    only["key"][:], only["value"][:] = np.nan, np.nan
    cpu_attn.rotary_reshape_and_cache(**only)
    assert rounded_once(only["query"], want)
    assert not only["key_cache"].any() and not only["value_cache"].any()


@pytest.mark.parametrize(("isa", "dtype"), ONE_DTYPE)
def test_parts_of_one_qkv(isa: str, dtype: str) -> None:
    """Q, K and V as a model's projection leaves them, side by side; and tokens backwards."""
    args = arguments(dtype, isa=isa)
    query, key = wanted(args)
    flat = [args[name].reshape(37, -1) for name in ("query", "key", "value")]
    qkv = np.concatenate(flat, axis=1)
    ends = np.cumsum([x.shape[1] for x in flat])[:-1]
    for name, part in zip(("query", "key", "value"), np.split(qkv, ends, axis=1), strict=True):
        args[name] = part.reshape(37, -1, args[name].shape[2])
        assert np.shares_memory(args[name], qkv)
    cpu_attn.rotary_reshape_and_cache(**args)
    kept = args["slot_mapping"] >= 0
    assert rounded_once(args["query"], query)
    assert rounded_once(stored(args)[0], key[kept])
    assert qkv[:, ends[0] :].tobytes() == np.concatenate(flat[1:], axis=1).tobytes()
    back = {**arguments(dtype, isa=isa), "query_out": np.zeros_like(args["query"])[::-1]}
    for name in ("query", "key", "value"):
        back[name] = back[name][::-1].copy()[::-1]
    cpu_attn.rotary_reshape_and_cache(**back)
    assert rounded_once(back["query_out"], query)
    assert rounded_once(stored(back)[0], key[kept])


@pytest.mark.parametrize(("isa", "dtype"), KERNELS)
@pytest.mark.parametrize("num_threads", [2, 3, 5])
def test_threads_do_not_matter(isa: str, dtype: str, num_threads: int) -> None:
    norm = {name: np.linspace(0.5, 2, 40, dtype=np.float32) for name in ("q_weight", "k_weight")}
    found = []
    for n in (1, num_threads):
        args = arguments(dtype, isa=isa, **norm)
        with _threads.threads(n, forced=True):
            cpu_attn.rotary_reshape_and_cache(**args)
        found.append([args[name].tobytes() for name in ("query", "key_cache", "value_cache")])
    assert found[0] == found[1]


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize(("isa", "dtype"), KERNELS)
def test_quantised(isa: str, dtype: str, kv_cache_dtype: str) -> None:
    """Of numbers that float32 rotates exactly every byte is known."""
    args = arguments(dtype, isa=isa, kv_cache_dtype=kv_cache_dtype, k_scale=0.37, v_scale=0.25)
    cache = cpu_attn.PagedKVCache(5, 16, 2, 40, dtype, isa, head_size_v=24, kv_cache_dtype=kv_cache_dtype)
    args |= {"key_cache": cache.key_cache, "value_cache": cache.value_cache}
    args["key"] = (np.round(args["key"] * 32) / 32).astype(args["key"].dtype)
    args["cos_sin_cache"] = (np.round(args["cos_sin_cache"] * 256) / 256).astype(np.float32)
    key = wanted(args)[1].astype(args["key"].dtype)
    cpu_attn.rotary_reshape_and_cache(**args)
    got_key, got_value = stored(args)
    kept = args["slot_mapping"] >= 0
    assert got_key.tobytes() == quantised(key[kept], kv_cache_dtype, 0.37).tobytes()
    assert got_value.tobytes() == quantised(args["value"][kept], kv_cache_dtype, 0.25).tobytes()


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "int4"])
@pytest.mark.parametrize(("isa", "dtype"), KERNELS)
def test_integers(isa: str, dtype: str, kv_cache_dtype: str) -> None:
    """Of the keys that the same call writes into a cache of the dtype, every one is known."""
    args = arguments(dtype, isa=isa, k_weight=np.linspace(0.5, 2, 40, dtype=np.float32))
    cache = cpu_attn.PagedKVCache(5, 16, 2, 40, dtype, isa, head_size_v=24, kv_cache_dtype=kv_cache_dtype)
    narrow = {**args, "kv_cache_dtype": kv_cache_dtype, "query": args["query"].copy()}
    narrow |= {"key_cache": cache.key_cache, "value_cache": cache.value_cache}
    cpu_attn.rotary_reshape_and_cache(**args)
    cpu_attn.rotary_reshape_and_cache(**narrow)
    for got, plain in zip(stored(narrow), stored(args), strict=True):
        assert np.array_equal(got, integers(plain, kv_cache_dtype))


@pytest.mark.parametrize(("isa", "dtype"), KERNELS)
def test_nan_stays_in_its_head(isa: str, dtype: str) -> None:
    args = arguments(dtype, isa=isa, q_weight=np.ones(40, np.float32))
    query = wanted(args)[0]
    args["query"][5, 2, 30], args["query"][6, 0, 0] = np.nan, np.inf
    with np.errstate(all="ignore"):
        cpu_attn.rotary_reshape_and_cache(**args)
    odd = np.zeros((37, 6), np.bool_)
    odd[5, 2] = odd[6, 0] = True
    got = args["query"].astype(np.float64)
    assert np.isnan(got[odd]).any(axis=1).all()
    assert np.abs(got[~odd] - query[~odd]).max() < 0.05


def test_nothing_to_do() -> None:
    for args in (
        arguments("float32", count=0),
        arguments("float32", count=1),  # its slot is -1
        arguments("float32", count=0, cos_sin_cache=np.zeros((0, 16), np.float32)),
    ):
        cpu_attn.rotary_reshape_and_cache(**args)
        assert not args["key_cache"].any() and not args["value_cache"].any()


def bad(i: int, value: int) -> NDArray[np.int64]:
    positions = np.arange(37)
    positions[i] = value
    return positions


F32, F16 = np.float32, np.float16
BAD: list[tuple[dict[str, Any], type[Exception], list[str]]] = [
    ({"positions": bad(36, 50)}, ValueError, ["positions[36]", "50", "0..49", "cos_sin_cache"]),
    ({"positions": bad(0, -1)}, ValueError, ["positions[0]", "-1", "0..49"]),  # its slot is negative
    ({"positions": bad(3, 2**62)}, ValueError, ["positions[3]", str(2**62)]),
    ({"positions": np.arange(37, dtype=np.int32)}, TypeError, ["positions", "int32", "int64"]),
    ({"positions": np.arange(36)}, ValueError, ["positions", "axis 0 is 36", "T = 37"]),
    ({"slot_mapping": bad(9, 80)}, ValueError, ["slot_mapping[9]", "80"]),
    ({"query": np.zeros((37, 6, 41), F32)}, ValueError, ["query", "axis 2 is 41", "head_size = 40"]),
    ({"query": np.zeros((36, 6, 40), F32)}, ValueError, ["query", "axis 0 is 36", "T = 37"]),
    ({"query": np.zeros((37, 0, 40), F32)}, ValueError, ["query", "num_heads", "0"]),
    ({"query": np.zeros((37, 6, 40), F16)}, TypeError, ["query", "float16", "float32"]),
    ({"query": np.zeros((37, 6, 80), F32)[..., ::2]}, ValueError, ["query", "stride 2"]),
    ({"query": np.broadcast_to(np.zeros((1, 6, 40), F32), (37, 6, 40))}, ValueError, ["query", "read-only"]),
    ({"query_out": np.zeros((37, 5, 40), F32)}, ValueError, ["query_out", "axis 1 is 5", "num_heads = 6"]),
    ({"query_out": np.zeros((37, 6, 40), F16)}, TypeError, ["query_out", "float16"]),
    ({"cos_sin_cache": np.zeros((50, 15), F32)}, ValueError, ["cos_sin_cache", "rot_dim", "15", "even"]),
    ({"cos_sin_cache": np.zeros((50, 0), F32)}, ValueError, ["cos_sin_cache", "rot_dim", "0"]),
    ({"cos_sin_cache": np.zeros((50, 42), F32)}, ValueError, ["cos_sin_cache", "rot_dim", "42", "40"]),
    ({"cos_sin_cache": np.zeros((50, 16), F16)}, TypeError, ["cos_sin_cache", "float16", "float32"]),
    ({"cos_sin_cache": np.zeros((50, 32), F32)[:, ::2]}, ValueError, ["cos_sin_cache", "stride 2"]),
    ({"q_weight": np.ones(39, F32)}, ValueError, ["q_weight", "axis 0 is 39", "head_size = 40"]),
    ({"k_weight": np.ones(40, F16)}, TypeError, ["k_weight", "float16"]),
    ({"eps": -1.0}, ValueError, ["eps", "-1.0"]),
    ({"eps": float("nan")}, ValueError, ["eps", "nan"]),
    ({"eps": "small"}, TypeError, ["eps", "small"]),
    ({"is_neox": "yes"}, TypeError, ["is_neox", "yes"]),
    ({"kv_cache_dtype": "int3"}, ValueError, ["kv_cache_dtype", "int3"]),
    ({"k_scale": 2.0}, ValueError, ["k_scale", "2.0"]),
    ({"isa": "sse9"}, ValueError, ["isa", "sse9"]),
]


@pytest.mark.parametrize(("spoiled", "error", "words"), BAD)
def test_bad_arguments(spoiled: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    """Also where calls like it, but for the fault, have been accepted before."""
    for _ in range(2):
        refuses(cpu_attn.rotary_reshape_and_cache, {**arguments("float32"), **spoiled}, error, *words)
        cpu_attn.rotary_reshape_and_cache(**arguments("float32"))


def test_aliases() -> None:
    """Outputs apart from all inputs, but query_out may be query; whatever was accepted before."""
    good = arguments("float32")
    memory = np.zeros(38 * 6 * 40, F32)
    query, shifted = memory[240:].reshape(37, 6, 40), memory[:-240].reshape(37, 6, 40)
    for _ in range(2):
        cpu_attn.rotary_reshape_and_cache(**{**good, "query": query, "query_out": query.view()})
        cpu_attn.rotary_reshape_and_cache(**{**good, "query": query, "query_out": np.zeros_like(query)})
        call = cpu_attn.rotary_reshape_and_cache
        refuses(call, {**good, "query": query, "query_out": shifted}, ValueError, "query_out", "query")
        turned = query.reshape(6, 37, 40).swapaxes(0, 1)  # the same memory in another order
        refuses(call, {**good, "query": query, "query_out": turned}, ValueError, "query_out", "query")
        heads = np.zeros((37, 6, 40), F32)
        refuses(call, {**good, "query": heads, "key": heads[:, :2]}, ValueError, "query", "key")
        cache = np.zeros(37 * 6 * 40, F32)
        inside = {"query": cache.reshape(37, 6, 40), "key_cache": cache[:6400].reshape(5, 2, 16, 40)}
        refuses(call, {**good, **inside}, ValueError, "key_cache", "query")


def test_one_token_in_place() -> None:
    """An axis of one element may have any stride."""
    good, row = arguments("float32"), np.ones((6, 40), F32)
    one = {k: good[k][:1] for k in ("key", "value", "slot_mapping", "positions")}
    cpu_attn.rotary_reshape_and_cache(**{**good, **one, "query": row.reshape(1, 6, 40), "query_out": row[None]})
    assert (row != 1).any()


def test_rotation_of_a_case_is_exact_where_it_must_be() -> None:
    """What quantised cases count on: cos and sin of 8 digits."""
    from ..cases.levels import cases

    case = next(c for c in cases("quick") if c.name == "rotary-fp8")
    table = Rotation.of(case, np.dtype(np.float32)).cos_sin_cache
    assert (table * 256 == np.round(table * 256)).all() and np.ptp(table) > 1.5
