# SPDX-License-Identifier: Apache-2.0
"""Context parallel without a network: every rank's keys by themselves, the merged results against the float64 oracle of
the undivided problem."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import numpy as np
import pytest

import cpu_attn
from cpu_attn import BlockManager, PagedKVCache, reference
from cpu_attn.distributed import ContextParallel, Group, RankError, ThreadGroup
from cpu_attn.ops import merge_stacked

from ..cases.case import Case
from ..cases.formats import numpy_dtype
from ..cases.judge import check, same_bits
from ..cases.levels import cases
from ..cases.problem import build
from ..harness.kernels import KERNELS, ONE_DTYPE
from ..harness.ranks import owned, run_ranks, spreads
from ..harness.snippets import ROOT, run

# Ranks and interleave: one position by turns; whole groups of 16; ranks without keys; an odd number.
SPLITS = [(2, 1), (3, 16), (4, 64), (3, 5)]


def failures(all_of_them: list[Case], isa: str = "auto", engine: str = "auto") -> list[str]:
    found = []
    for i, case in enumerate(filter(spreads, all_of_them)):
        problem, split = build(case), SPLITS[i % len(SPLITS)]
        result = check(problem, *run_ranks(problem, *split, isa, engine))
        if not result.ok:
            found.append(f"{case.name} over {split}: {result.message}")
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cases(dtype: str) -> None:
    """Masks, windows, ALiBi, sinks, softcap, bias, quantised and plain caches, chunks of prompts, requests shorter than
    an interleave."""
    assert not failures(list(cases("quick", dtype)))


ENGINES = [(e.name, "auto", "float32") for e in cpu_attn.engines() if e.available and e.name != "native"]


@pytest.mark.parametrize(("engine", "isa", "dtype"), [*(("native", *kernel) for kernel in ONE_DTYPE), *ENGINES])
def test_what_goes_by_positions(engine: str, isa: str, dtype: str) -> None:
    """In each kernel: ALiBi, trees, selected tokens."""
    by_position = [c for c in cases("quick", dtype) if c.alibi or c.tree or c.selected_tokens is not None]
    assert len(by_position) > 20 and not failures(by_position, isa, engine)


@pytest.mark.parametrize("tree", ["forest", "bits"])
def test_a_tree_on_one_rank(tree: str) -> None:
    """Its rows are whole bytes, and the other rank has none of its tokens: a bit too many would be the next token's."""
    problem = build(Case("tree", (16, 16), (48, 16), num_heads=4, num_kv_heads=2, head_size=64, tree=tree))
    result = check(problem, *run_ranks(problem, 2, 16))
    assert result.ok, result.message


class Model:
    """A layer's attention over a prompt in two chunks, then two tokens one by one, in two requests."""

    sizes: ClassVar[dict[str, Any]] = {"num_kv_heads": 2, "head_size": 64}
    num_heads, length = 4, 203
    chunks = (("a", 0, 150), ("b", 0, 40)), (("a", 150, 201), ("b", 40, 41)), (("b", 41, 42), ("a", 201, 203))

    def __init__(self, dtype: str = "float32", **options: Any) -> None:
        rng, kind = np.random.default_rng(5), numpy_dtype(dtype)
        self.dtype, self.options = dtype, options
        self.key, self.value, self.query = (
            {name: rng.standard_normal((self.length, h, 64), np.float32).astype(kind) for name in "ab"}
            for h in (2, 2, 4)
        )

    def run(self, group: Group, interleave: int = 4, only: str = "ab") -> dict[str, np.ndarray[Any, Any]]:
        """The outputs of each request's tokens on a rank."""
        ranks = ContextParallel(group, interleave)
        cache = PagedKVCache(num_blocks=40, block_size=8, dtype=self.dtype, **self.sizes)
        for memory in cache.key_cache, cache.value_cache:
            memory.reshape(-1).view(np.uint8)[:] = 0xFF
        manager = BlockManager(cache, decode_context_parallel_size=group.world_size)
        for name in only:
            manager.allocate(name)
        found: dict[str, list[Any]] = {name: [] for name in only}
        for chunk in self.chunks:
            chunk = [part for part in chunk if part[0] in only]
            step = ranks.step(manager.step([(name, range(a, b)) for name, a, b in chunk]))
            here = {x: np.concatenate([getattr(self, x)[name][a:b] for name, a, b in chunk]) for x in STATES}
            cache.update(here["key"], here["value"], step)
            output = ranks.attend(cache, here["query"], step, **self.options)
            for (name, _, _), start, end in zip(
                chunk, step.query_start_loc[:-1], step.query_start_loc[1:], strict=True
            ):
                found[name].append(output[start:end])
        return {name: np.concatenate(parts) for name, parts in found.items()}

    def run_all(self, world_size: int, **how: Any) -> list[dict[str, np.ndarray[Any, Any]]]:
        with ThreadPoolExecutor(world_size) as pool:
            return list(pool.map(lambda group: self.run(group, **how), ThreadGroup.make(world_size)))


STATES = ("key", "value", "query")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sinks": {"s_aux": np.array([0.5, 3.0, -1.0, 9.0], np.float32)},
    "alibi": {"alibi_slopes": np.array([0.5, 0.25, 0.125, 0.01], np.float32), "softcap": 5.0},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_model_over_threads(options: str, dtype: str) -> None:
    """Every rank has the same bits, within the budget of the oracle; sinks count once."""
    model = Model(dtype, **OPTIONS[options])
    ranks = model.run_all(3)
    loc = np.array([0, 203], np.int32)
    for name in "ab":
        length = len(ranks[0][name])
        arrays = (x[name][:length] for x in (model.query, model.key, model.value))
        query, key, value = arrays
        loc = np.array([0, length], np.int32)
        given = {"alibi_slopes": None, "softcap": 0.0, "s_aux": None, **OPTIONS[options]}
        want, _ = reference.attention(query, [key], [value], loc, loc[1:], 0.125, **given)
        assert ranks[0][name].dtype == numpy_dtype(dtype)
        assert (reference.relative_rms(ranks[0][name], want, loc) <= reference.BUDGET[dtype]).all()
        for rank in ranks[1:]:
            assert same_bits(rank[name], ranks[0][name])


def test_output_and_lse_that_are_given() -> None:
    rng = np.random.default_rng(4)
    query, key, value = (rng.standard_normal((30, h, 64), np.float32).astype(np.float16) for h in (4, 2, 2))
    loc = np.array([0, 30], np.int32)

    def work(group: Group) -> tuple[Any, Any]:
        ranks, cache = ContextParallel(group, 8), PagedKVCache(2, 16, 2, 64, "float16")
        cache.update(key, value, ranks.slot_mapping(np.arange(30), 16))
        size, rank, interleave = ranks.ranks
        made = cache.plan(loc, loc[1:], 4, cp_world_size=size, cp_rank=rank, cp_kv_cache_interleave_size=interleave)
        output, lse, table = (
            np.empty((30, 4, 64), np.float32),
            np.empty((4, 30), np.float32),
            np.zeros((1, 1), np.int32),
        )
        with pytest.raises(ValueError, match="output: shares memory with query"):
            ranks.attend(cache, query, table, made, output=query)
        with pytest.raises(ValueError, match="lse: axis 0 is 30, expected num_heads = 4"):
            ranks.attend(cache, query, table, made, lse=lse.T.copy())
        assert ranks.attend(cache, query, table, made, output=output, lse=lse) is output
        return output, lse

    want, want_lse = reference.attention(query, [key], [value], loc, loc[1:], 0.125)
    with ThreadPoolExecutor(2) as pool:
        for output, lse in pool.map(work, ThreadGroup.make(2)):
            assert (reference.relative_rms(output, want, loc) <= reference.BUDGET["float16"]).all()
            assert np.allclose(lse, want_lse, atol=1e-3)


def test_bits_depend_on_the_request_alone() -> None:
    model = Model("bfloat16")
    both, again, one = model.run_all(2), model.run_all(2), model.run_all(2, only="b")
    assert same_bits(both[0]["b"], again[1]["b"]) and same_bits(both[0]["b"], one[0]["b"])


def test_shared_prefixes() -> None:
    """Two requests with a prompt in common, of which each rank has more than a segment: it is read once."""
    rng = np.random.default_rng(6)
    query, key, value = (rng.standard_normal((2102, h, 64), np.float32) for h in (4, 1, 1))

    def work(group: Group) -> Any:
        ranks, cache = ContextParallel(group, 16), PagedKVCache(80, 16, 1, 64)
        manager = BlockManager(cache, decode_context_parallel_size=2)
        manager.allocate("a")
        cache.update(key[:2100], value[:2100], ranks.step(manager.step([("a", range(2100))])))
        manager.fork("a", "b")
        step = ranks.step(manager.step([("a", [1]), ("b", [2])]))
        cache.update(key[2100:], value[2100:], step)
        assert step.plan(cache, 4).num_shared
        return ranks.attend(cache, query[2100:], step)

    loc = np.arange(3, dtype=np.int32)
    keys, values = ([np.delete(x, 2101 - r, axis=0) for r in range(2)] for x in (key, value))
    want, _ = reference.attention(query[2100:], keys, values, loc, np.full(2, 2101, np.int32), 0.125)
    with ThreadPoolExecutor(2) as pool:
        for output in pool.map(work, ThreadGroup.make(2)):
            assert (reference.relative_rms(output, want, loc) <= reference.BUDGET["float32"]).all()


def test_each_rank_holds_its_own_tokens() -> None:
    """Local lengths and slots, by their definition."""
    slots = np.array([-1, *range(16 * 3, 16 * 6)], np.int64)  # of blocks of 48
    for interleave in (1, 2, 16):
        found = []
        for group in ThreadGroup.make(3):
            ranks = ContextParallel(group, interleave)
            local = ranks.slot_mapping(slots, 16)
            here = owned(48, ranks.ranks)
            assert local[0] == -1 and (np.flatnonzero(local >= 0) - 1).tolist() == here.tolist()
            assert local[local >= 0].tolist() == list(range(16, 32))
            found.append(ranks.local_seq_lens(np.array([0, 1, 47, 48, 1000], np.int32)))
            assert found[-1].tolist() == [len(owned(n, ranks.ranks)) for n in (0, 1, 47, 48, 1000)]
        assert np.sum(found, axis=0).tolist() == [0, 1, 47, 48, 1000]


@pytest.mark.parametrize(("dtype", "isa"), [(dtype, isa) for isa, dtype in KERNELS if dtype != "float32"])
def test_float32_output(dtype: str, isa: str) -> None:
    """It is what the output of the plan's dtype is rounded from."""
    cache = PagedKVCache(
        num_blocks=4, block_size=16, num_kv_heads=1, head_size=40, head_size_v=37, dtype=dtype, isa=isa
    )
    rng, kind = np.random.default_rng(2), numpy_dtype(dtype)
    query, key = (rng.standard_normal((50, h, 40), np.float32).astype(kind) for h in (3, 1))
    value = rng.standard_normal((50, 1, 37), np.float32).astype(kind)
    loc, table = np.array([0, 50], np.int32), np.arange(4, dtype=np.int32)[None]
    cache.update(key, value, np.arange(50))
    plan = cache.plan(loc, loc[1:], 3)
    narrow = cache.attend(query, table, plan)
    wide = cache.attend(query, table, plan, output=np.empty(narrow.shape, np.float32))
    assert same_bits(wide.astype(kind), narrow) and not same_bits(wide, narrow.astype(np.float32))


def plan(**ranks: Any) -> Any:
    loc = np.array([0, 1], np.int32)
    return PagedKVCache(4, 8, 2, 64).plan(loc, loc[1:] * 9, 4, **ranks)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ({"cp_world_size": 0}, "cp_world_size: 0 is outside 1..65536"),
        ({"cp_world_size": 2, "cp_rank": 2}, "cp_rank: 2 is outside 0..1"),
        ({"cp_rank": 1}, "cp_rank: 1 is outside 0..0"),
        ({"cp_world_size": 2, "cp_kv_cache_interleave_size": 0}, "cp_kv_cache_interleave_size: 0 is outside"),
    ],
)
def test_plans_refuse(ranks: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        plan(**ranks)


@pytest.mark.parametrize("name", ["cp_world_size", "cp_rank", "cp_kv_cache_interleave_size"])
@pytest.mark.parametrize("wrong", [np.ones(2, np.int32), True, 1.0])
def test_ranks_are_integers(name: str, wrong: Any) -> None:
    with pytest.raises(TypeError, match=f"{name}: expected an integer"):
        plan(**{name: wrong})


def test_a_plan_keeps_all_lengths() -> None:
    """The call names the keys on all ranks, as the plan did."""
    cache, loc = PagedKVCache(4, 8, 2, 64), np.array([0, 1], np.int32)
    made = plan(cp_world_size=2, cp_rank=1)
    query = np.zeros((1, 4, 64), np.float32)

    def attend(lens: Any) -> Any:
        arrays = query, cache.key_cache, cache.value_cache, np.empty_like(query), loc, np.array([lens], np.int32)
        table = np.zeros((1, 1), np.int32)  # 4 keys are in a block
        return cpu_attn.attention_with_kv_cache(*arrays, 1.0, True, None, -1, table, 0.0, made)

    attend(9)
    with pytest.raises(ValueError, match=r"seq_lens\[0\]: 4, scheduler_metadata was made for 9"):
        attend(4)


def test_context_parallel_refuses() -> None:
    ranks = ContextParallel(ThreadGroup.make(2)[0], 4)
    cache, query = PagedKVCache(4, 8, 2, 64), np.zeros((1, 4, 64), np.float32)
    made = plan(cp_world_size=2, cp_rank=1, cp_kv_cache_interleave_size=4)
    with pytest.raises(ValueError, match=r"plan: made for .* = \(2, 1, 4\), expected \(2, 0, 4\)"):
        ranks.attend(cache, query, np.zeros((1, 2), np.int32), made)
    with pytest.raises(ValueError, match="block_size: 6 is no multiple of cp_kv_cache_interleave_size = 4"):
        ranks.slot_mapping(np.zeros(1, np.int64), 6)
    manager = BlockManager(PagedKVCache(4, 8, 2, 64), decode_context_parallel_size=2)
    manager.allocate("a")
    here = ranks.step(manager.step([("a", [1])]))
    assert here.block_size == 8
    with pytest.raises(ValueError, match="expected those of a BlockManager with decode_context_parallel_size = 2"):
        ranks.step(here)
    with pytest.raises(TypeError, match="group: expected Group, got int"):
        ContextParallel(2)  # type: ignore[arg-type]


def test_a_rank_that_does_not_come() -> None:
    """Within the time that the group was given, and from then on at once, though the other rank comes."""
    first, second = ThreadGroup.make(2, timeout=0.2)
    with pytest.raises(RankError, match=r"rank 0 of 2: no message of every other rank within 0\.2 s, one is dead or"):
        first.barrier()
    with pytest.raises(RankError, match="rank 1 of 2"):
        second.barrier()
    with pytest.raises(RankError, match="rank 0 of 2"):
        first.all_gather(np.zeros(3))


class Late(Group):
    """One rank, whose first message comes late."""

    late = True

    def _all_gather(self, message: np.ndarray[Any, Any], gathered: np.ndarray[Any, Any]) -> None:
        if self.late:
            self.late = False
            raise RuntimeError("late. Some library's advice")
        gathered[:] = message


def test_a_group_stays_broken() -> None:
    """Else a message that came late would be taken for the next one."""
    group = Late(0, 1)
    for _ in range(2):
        with pytest.raises(RankError, match=r"within 30 s, one is dead or hangs \(RuntimeError: late\)$"):
            group.barrier()


def test_heads_side_by_side() -> None:
    with ThreadPoolExecutor(2) as pool:
        heads = np.arange(2 * 3 * 4, dtype=np.float32).reshape(3, 2, 4)
        groups = ThreadGroup.make(2)
        found = list(pool.map(lambda g: ContextParallel(g).all_gather_heads(heads[:, g.rank : g.rank + 1]), groups))
    assert all((x == heads).all() for x in found)


def test_the_guide() -> None:
    """Its first snippet; tests/adapters/test_torch_distributed.py runs the one that needs torch."""
    assert next(run(ROOT / "docs" / "distributed.md"))


def test_stacked_parts_merge_as_listed_ones_do() -> None:
    """Rows of wider memory, as messages are."""
    rng = np.random.default_rng(3)
    messages = rng.standard_normal((5, 7 * 3 * 8 + 7 * 3), np.float32)
    outs, lses = messages[:, : 7 * 3 * 8].reshape(5, 7, 3, 8), messages[:, 7 * 3 * 8 :].reshape(5, 3, 7)
    want, want_lse = cpu_attn.merge_states(list(outs), list(lses))
    out, lse = np.empty_like(want), np.empty_like(want_lse)
    merge_stacked(outs, lses, out, lse)
    assert same_bits(out, want) and same_bits(lse, want_lse)


class Counting(ThreadGroup):
    """How many messages of each size there were."""

    sizes: list[int]

    def _all_gather(self, message: Any, gathered: Any) -> None:
        self.__dict__.setdefault("sizes", []).append(message.nbytes)
        super()._all_gather(message, gathered)


DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lengths": ({"seq_lens": [20, 30]}, {"seq_lens": [21, 30]}),
    "starts": ({"starts": [0, 3, 6]}, {"starts": [0, 2, 6]}),
    "tokens": ({"starts": [0, 3, 6]}, {"starts": [0, 3, 7]}),
    "no tokens": ({"starts": [0, 3, 6]}, {"starts": [0, 0, 0]}),
    "causal": ({"causal": True}, {"causal": False}),
    "requests that are causal": ({"dynamic_causal": [1, 0]}, {"dynamic_causal": [0, 1]}),
    "windows": ({"sliding_window": 7}, {"sliding_window": 8}),
    "spans": ({"mm_prefix_range": {0: [(0, 3)]}}, {"mm_prefix_range": {1: [(0, 3)]}}),
    "documents": ({"document_start_loc": {0: [0, 5]}}, {"document_start_loc": {0: [0, 6]}}),
    "trees": ({"tree_mask": [1, 3, 5] * 2}, {"tree_mask": [1, 3, 7] * 2}),
    "heads": ({"num_heads": 4}, {"num_heads": 8}),
}


def _one_step(group: Group, starts: Any, seq_lens: Any, num_heads: int, options: dict[str, Any]) -> Any:
    """Attends on a rank, two layers of one plan."""
    ranks, cache = ContextParallel(group), PagedKVCache(8, 16, 2, 64)
    given = {name: np.array(x, np.int32) for name, x in options.items() if name == "dynamic_causal"}
    given |= {name: np.array(x, np.uint8)[:, None] for name, x in options.items() if name == "tree_mask"}
    size, rank, _ = ranks.ranks
    loc, lens = np.array(starts, np.int32), np.array(seq_lens, np.int32)
    plan = cache.plan(loc, lens, num_heads, **options | given, cp_world_size=size, cp_rank=rank)
    output = np.full((loc[-1], num_heads, 64), 7, np.float32)
    try:
        for _ in range(2):
            ranks.attend(cache, np.ones_like(output), np.array([[0, 1], [2, 3]], np.int32), plan, output=output)
    except ValueError as error:
        return str(error), output
    return "", output


def _steps(makes: list[dict[str, Any]]) -> tuple[list[Any], list[Group]]:
    groups = Counting.make(len(makes), timeout=20)

    def work(group: Group) -> Any:
        options = dict(makes[group.rank])
        sizes = [options.pop(name, x) for name, x in (("starts", [0, 3, 6]), ("seq_lens", [20, 30]), ("num_heads", 4))]
        return _one_step(group, *sizes, options)

    with ThreadPoolExecutor(len(makes)) as pool:
        return list(pool.map(work, groups)), [*groups]


@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_disagree(what: str) -> None:
    """All of them find it, before a byte is written, and the group goes on."""
    one, other = DIFFERENT[what]
    found, groups = _steps([one, one, other])
    for rank, (error, output) in enumerate(found):
        assert error.startswith(f"plan: rank {0 if rank == 2 else 2} has another one than rank {rank}: for other")
        assert (output == 7).all()
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda g: g.all_gather(np.array([g.rank])).ravel().tolist(), groups)) == [[0, 1, 2]] * 3


@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_agree(what: str) -> None:
    """They say so once for all layers of a plan, in 8 bytes."""
    found, groups = _steps([DIFFERENT[what][1]] * 2)
    for (error, output), group in zip(found, groups, strict=True):
        assert not error and not output.any()
        assert isinstance(group, Counting) and group.sizes[0] == 8 and all(n > 8 for n in group.sizes[1:])
        assert len(group.sizes) == (3 if len(output) else 1)
