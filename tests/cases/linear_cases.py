# SPDX-License-Identifier: Apache-2.0
"""Cases of linear attention, which tests and ``cpu-attn verify`` share: made from a seed, run, and held to the float64
oracle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpu_attn._threads import threads
from cpu_attn.linear import get_linear_attention_metadata, linear_attention_with_state_cache, reference

from .formats import numpy_dtype
from .judge import same_bits

F32 = np.float32
_BY_HEADS = ("none", "lightning", "ssd", "ssd_raw", "ssd_channels", "gdn", "gdn_raw", "erase")
VARIANTS = (*_BY_HEADS, "kda", "kda_raw", "kda_bounded", "gdn2", "gla_raw")

BUDGET = reference.BUDGET  # which verify asks for


@dataclass(frozen=True)
class Case:
    """A step of requests with so many tokens each; starts: tokens that they had before, -1: they bring no state."""

    variant: str = "gdn"
    lens: tuple[int, ...] = (1,)
    starts: tuple[int, ...] = ()
    num_k_heads: int = 2
    num_v_heads: int = 4
    head_k_dim: int = 32
    head_v_dim: int = 32
    dtype: str = "float32"
    state_dtype: str = "float32"
    state_layout: str = "KV"
    checkpoints: tuple[tuple[int, int], ...] = ()  # (request, number of tokens)
    fill: str = ""  # what makes it adversarial
    seed: int = 0

    @property
    def name(self) -> str:
        sizes = f"{self.num_k_heads}-{self.num_v_heads}x{self.head_k_dim}x{self.head_v_dim}"
        kinds = f"{self.dtype}-{self.state_dtype}-{self.state_layout}"
        lens = "-".join(map(str, self.lens)) if len(self.lens) < 8 else f"{len(self.lens)}x{self.lens[0]}"
        fill = f"-{self.fill}" if self.fill else ""
        return f"linear-{self.variant}-{lens}-{sizes}-{kinds}{fill}"


def gates_of(case: Case, rng: np.random.Generator) -> dict[str, Any]:
    """What a variant's layers hand over beside queries, keys and values."""
    tokens, heads, dk, dv = sum(case.lens), case.num_v_heads, case.head_k_dim, case.head_v_dim

    def decay(*shape: int) -> NDArray[np.float32]:
        return (-np.exp(2 * rng.standard_normal(shape) - 3)).astype(F32)  # of a median of 0.05, as models have them

    def unit(*shape: int) -> NDArray[np.float32]:
        return rng.random(shape, F32)

    def normal(*shape: int) -> NDArray[np.float32]:
        return rng.standard_normal(shape, F32)

    raw = {"gate": "softplus", "A_log": np.log(unit(heads) * 2 + F32(0.01)), "use_beta_sigmoid_in_kernel": True}
    norm = {"use_qk_l2norm_in_kernel": True}
    of = {
        "none": {"delta_rule": False},
        "lightning": {"delta_rule": False, "g": -(F32(2.0) ** -np.arange(1, heads + 1)).astype(F32)},
        "ssd": {"delta_rule": False, "g": decay(tokens, heads), "beta": unit(tokens, heads), "D": normal(heads)},
        "ssd_raw": {"delta_rule": False, "gate": "dt", "g": normal(tokens, heads), "A_log": raw["A_log"]}
        | {"dt_bias": normal(heads), "dt_limit": (0.01, 2.0), "D": normal(heads), "scale": 1.0},
        "ssd_channels": {"delta_rule": False, "g": decay(tokens, heads), "D": normal(heads, dv), "scale": 1.0},
        "gdn": {"g": decay(tokens, heads), "beta": unit(tokens, heads)} | norm,
        "gdn_raw": {"g": normal(tokens, heads), "beta": normal(tokens, heads), "dt_bias": normal(heads)}
        | {"allow_neg_eigval": True}
        | raw
        | norm,
        "erase": {"g": decay(tokens, heads), "beta": unit(tokens, heads), "erase": unit(tokens, heads, dk)} | norm,
        "kda": {"g": decay(tokens, heads, dk), "beta": unit(tokens, heads)} | norm,
        "kda_raw": {"g": normal(tokens, heads, dk), "beta": normal(tokens, heads), "dt_bias": normal(heads, dk)}
        | raw
        | norm,
        "kda_bounded": {"gate": "sigmoid", "lower_bound": -3.0, "g": normal(tokens, heads, dk), "A_log": raw["A_log"]}
        | {"beta": unit(tokens, heads), "dt_bias": normal(heads, dk) - F32(2)}
        | norm,
        "gdn2": {"g": decay(tokens, heads, dk), "beta": unit(tokens, heads, dv), "erase": unit(tokens, heads, dk)}
        | norm,
        "gla_raw": {"delta_rule": False, "gate": "logsigmoid", "g": normal(tokens, heads, dk), "A_log": raw["A_log"]}
        | {"dt_bias": normal(heads, dk)},
    }
    found: dict[str, Any] = of[case.variant]
    return found


@dataclass
class Problem:
    """A case with its arrays. before: the states that requests bring."""

    case: Case
    query_start_loc: NDArray[np.int32]
    arrays: dict[str, NDArray[Any]]
    options: dict[str, Any]
    before: list[NDArray[Any] | None]
    slots: NDArray[np.int32]
    kept: dict[tuple[int, int], int] = field(default_factory=dict)  # slots of checkpoints

    @property
    def starts(self) -> tuple[int, ...]:
        return starts_of(self.case)

    @property
    def brings(self) -> NDArray[np.bool_]:
        return np.array([state is not None for state in self.before], np.bool_)

    def cache(self) -> NDArray[Any]:
        """A cache whose slots hold NaN where no request brings a state."""
        c = self.case
        sizes = (c.head_k_dim, c.head_v_dim) if c.state_layout == "KV" else (c.head_v_dim, c.head_k_dim)
        count = len(c.lens) + len(self.kept) + 2
        cache = np.full((count, c.num_v_heads, *sizes), np.nan, numpy_dtype(c.state_dtype))
        for slot, state in zip(self.slots, self.before, strict=True):
            if state is not None:
                cache[slot] = state if c.state_layout == "KV" else state.transpose(0, 2, 1)
        return cache

    def expected(self) -> reference.Expected:
        a = self.arrays
        wanted: dict[int, list[int]] = {}
        for request, tokens in self.kept:
            wanted.setdefault(request, []).append(tokens)
        qkv = (a["query"], a["key"], a["value"], self.query_start_loc)
        with np.errstate(invalid="ignore", over="ignore", under="ignore"):
            return reference.linear_attention(*qkv, self.before, checkpoints=wanted, **self.options)


def _spoil(case: Case, arrays: dict[str, NDArray[Any]], options: dict[str, Any]) -> None:
    """Makes the adversarial fills."""
    rng = np.random.default_rng(case.seed)
    if case.fill == "g_edges":  # no decay, all of it, and what underflows within a chunk
        options["g"][rng.random(options["g"].shape) < 0.3] = 0
        options["g"][rng.random(options["g"].shape) < 0.05] = -np.inf
        options["g"][rng.random(options["g"].shape) < 0.2] = -40
    elif case.fill == "g_minus_infinity":
        options["g"][...] = -np.inf
    elif case.fill == "beta_edges":
        options["beta"][...] = rng.integers(0, 3, options["beta"].shape)
    elif case.fill == "beta_two":
        options["beta"][...], options["g"][...] = 2, 0
    elif case.fill == "zero_keys":
        arrays["key"][...] = 0
    elif case.fill == "equal_keys":
        arrays["key"][...] = arrays["key"][:1]
        options["g"][...] = 0
    elif case.fill == "large":
        arrays["value"] *= F32(1e15)
    elif case.fill == "unread_channels":  # the largest ones meet zeros, so that nothing comes of them
        half = case.head_k_dim // 2
        arrays["query"][20:, :, :half] *= F32(1000)
        arrays["key"][..., :half] = 0
    elif case.fill == "growth":  # of the last head alone, in each chunk
        g = options["g"][:, -1]
        g[24::10], g[25::10] = 9, -10
    elif case.fill == "forgetting":  # a third of the channels, so that tiles take few tokens together
        options["g"][..., ::3] = -6
    elif case.fill == "unread_keys":
        arrays["key"][..., 3] *= F32(1000)
        arrays["query"][..., 3] = 0
    elif case.fill == "unread_tokens":
        arrays["key"][40::50, :, 3] *= F32(1000)
        arrays["value"][40::50] = 0
    elif case.fill == "unread_states":  # `build` makes the channel's part of the states large
        arrays["query"][..., 3] = arrays["key"][..., 3] = 0
    elif case.fill:
        raise ValueError(case.fill)


def starts_of(case: Case) -> tuple[int, ...]:
    return case.starts or tuple(-1 if r % 3 == 1 else 7 * r for r in range(len(case.lens)))


def build(case: Case) -> Problem:
    rng = np.random.default_rng([case.seed, len(case.lens), sum(case.lens)])
    tokens, kind = sum(case.lens), numpy_dtype(case.dtype)
    key_shape = (tokens, case.num_k_heads, case.head_k_dim)
    arrays = {
        "query": rng.standard_normal(key_shape, F32).astype(kind),
        "key": rng.standard_normal(key_shape, F32).astype(kind),
        "value": rng.standard_normal((tokens, case.num_v_heads, case.head_v_dim), F32).astype(kind),
    }
    options = gates_of(case, rng)
    _spoil(case, arrays, options)
    starts = starts_of(case)
    shape = (case.num_v_heads, case.head_k_dim, case.head_v_dim)
    size = F32(1e30) if case.fill == "large" else F32(1)
    before = [
        None if start < 0 else (size * rng.standard_normal(shape, F32)).astype(numpy_dtype(case.state_dtype))
        for start in starts
    ]
    for state in before:
        if case.fill == "unread_states" and state is not None:
            state[:, 3] *= F32(1000)
    count = len(case.lens) + len(case.checkpoints)
    free = rng.permutation(count + 2).astype(np.int32)
    slots = free[: len(case.lens)].copy()
    kept = dict(zip(sorted(case.checkpoints), free[len(case.lens) : count].tolist(), strict=True))
    loc = np.concatenate([[0], np.cumsum(case.lens)]).astype(np.int32)
    return Problem(case, loc, arrays, options, before, slots, kept)


@dataclass
class Result:
    output: NDArray[Any]
    states: list[NDArray[Any]]  # of each request, [Hv, Dk, Dv]
    checkpoints: dict[tuple[int, int], NDArray[Any]]


def run(problem: Problem, isa: str = "auto", engine: str = "auto", **changed: Any) -> Result:
    """Calls with a cache of its own. changed: arguments in place of the problem's."""
    c, a = problem.case, problem.arrays
    lens = (np.maximum(problem.starts, 0) + np.array(c.lens)).astype(np.int32)
    sizes = (c.num_k_heads, c.num_v_heads, c.head_k_dim, c.head_v_dim)
    plan = get_linear_attention_metadata(
        problem.query_start_loc,
        c.dtype,
        *sizes,
        seq_lens=lens,
        has_initial_state=problem.brings,
        isa=isa,
        engine=engine,
    )
    cache, output = problem.cache(), np.full(a["value"].shape, np.nan, numpy_dtype(c.dtype))
    rows = np.array([(*key, slot) for key, slot in problem.kept.items()], np.int32).reshape(-1, 3)
    options = {"state_layout": c.state_layout, "checkpoints": rows, **problem.options, **changed}
    arrays = (a["query"], a["key"], a["value"], output, cache, problem.slots, plan)
    linear_attention_with_state_cache(*arrays, **options)

    def state(slot: int) -> NDArray[Any]:
        found: NDArray[Any] = cache[slot] if c.state_layout == "KV" else cache[slot].transpose(0, 2, 1)
        return found

    return Result(output, [state(s) for s in problem.slots], {key: state(s) for key, s in problem.kept.items()})


def errors(problem: Problem, got: Result) -> tuple[float, str]:
    """The worst error in units of its budget, and where it is; infinite where something is not finite that has to
    be."""
    want, loc = problem.expected(), problem.query_start_loc
    output = reference.BUDGET[problem.case.dtype]
    state = max(reference.BUDGET[problem.case.state_dtype], reference.STATE_BUDGET[problem.case.dtype])
    found = [(0.0, "")]
    for r in range(len(problem.case.lens)):
        rows = slice(int(loc[r]), int(loc[r + 1]))
        if rows.start < rows.stop:
            found.append((relative(got.output[rows], want.output[rows]) / output, f"output of request {r}"))
            found.append((relative(got.states[r], want.states[r]) / state, f"state of request {r}"))
    for key, kept in got.checkpoints.items():
        found.append((relative(kept, want.checkpoints[key]) / state, f"checkpoint {key}"))
    return max(found)


def relative(got: NDArray[Any], want: reference.Float64) -> float:
    """The RMS of the error over the RMS of what is expected, both scaled by the largest number."""
    top = float(np.abs(want).max())
    if not np.isfinite(got.astype(np.float64)).all():
        return np.inf
    difference = (got.astype(np.float64) - want) / max(top, 1e-300)
    size = float(np.sqrt(np.mean(np.square(want / max(top, 1e-300)))))
    return float(np.sqrt(np.mean(np.square(difference)))) / size if top > 1e-30 else float(np.abs(difference).max() > 1)


def alone(problem: Problem, r: int) -> Problem:
    """One request by itself."""
    loc, c = problem.query_start_loc, problem.case
    rows = slice(int(loc[r]), int(loc[r + 1]))
    arrays = {name: x[rows] for name, x in problem.arrays.items()}
    tokens = int(loc[-1])
    options = {
        name: x[rows] if isinstance(x, np.ndarray) and x.ndim > 1 and len(x) == tokens else x
        for name, x in problem.options.items()
    }
    case = replace(c, lens=(c.lens[r],), starts=problem.starts[r : r + 1], checkpoints=())
    loc = np.array([0, c.lens[r]], np.int32)
    return Problem(case, loc, arrays, options, problem.before[r : r + 1], np.zeros(1, np.int32))


def differences(problem: Problem, want: Result, isa: str, numbers: Sequence[int]) -> Iterator[str]:
    """What changes the bits of a result and must not: so many threads, and the batch around a request."""

    def same(got: Result, outputs: NDArray[Any], states: Sequence[NDArray[Any]]) -> bool:
        return same_bits(got.output, outputs) and all(map(same_bits, got.states, states))

    for n in numbers:
        with threads(n, forced=True):
            got = run(problem, isa)
        kept = all(map(same_bits, got.checkpoints.values(), want.checkpoints.values()))
        if not (kept and same(got, want.output, want.states)):
            yield f"{n} threads give other bits"
    loc = problem.query_start_loc
    for r in range(len(problem.case.lens)):
        one = run(alone(problem, r), isa)
        if problem.case.lens[r] and not same(one, want.output[loc[r] : loc[r + 1]], want.states[r : r + 1]):
            yield f"request {r} alone gives other bits than in its batch"


def cases(level: str, dtype: str = "float32", seed: int = 0) -> list[Case]:
    """What ``verify`` runs; a level has the cases of the one before. The levels are quick, default and full."""
    mixed = Case(
        lens=(1, 70, 3, 0, 130, 64), dtype=dtype, seed=seed, checkpoints=((1, 17), (4, 64), (4, 100), (4, 130))
    )
    found = [replace(mixed, variant=v) for v in ("gdn_raw", "kda", "ssd_raw")]
    found += [Case(v, (1, 1, 1, 1, 1), dtype=dtype, seed=seed, state_layout="VK") for v in ("gdn", "kda_raw", "ssd")]
    if level == "quick":
        return found
    odd: dict[str, Any] = {"num_k_heads": 1, "num_v_heads": 3, "head_k_dim": 19, "head_v_dim": 37}
    found += [replace(mixed, variant=v, **odd, state_layout=s) for v in VARIANTS for s in ("KV", "VK")]
    found += [replace(mixed, variant=v, state_dtype=s) for v in ("gdn", "gdn2") for s in ("float16", "bfloat16")]
    found += [replace(mixed, variant=v, fill="g_edges") for v in ("gdn", "kda", "ssd")]
    if level == "default":
        return found
    large: dict[str, Any] = {"head_k_dim": 128, "head_v_dim": 128, "num_k_heads": 1, "num_v_heads": 2}
    found += [replace(mixed, variant=v, lens=(1000, 5), checkpoints=(), **large) for v in VARIANTS]
    found += [Case("gdn", (4096,), dtype=dtype, seed=seed, num_k_heads=1, num_v_heads=1)]
    return found
