# SPDX-License-Identifier: Apache-2.0
"""BlockManager and Step: any operations against a model, attention over shared blocks against the oracle."""

from __future__ import annotations

import copy
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cpu_attn import BlockManager, BlockStats, NoFreeBlocksError, PagedKVCache, reference
from cpu_attn.serving.block_pool import root

from ..harness.blocks_model import Model, walk

KINDS: list[dict[str, Any]] = [
    *({}, {"caching": False}, {"block_size": 1}, {"num_blocks": 3}, {"nodes": 2}),
    *({"window": 1, "num_blocks": 16}, {"window": 6, "num_blocks": 16}, {"ranks": 2, "block_size": 2}),
    *(
        {"slots": 14},
        {"slots": 24, "interval": 8, "num_blocks": 14},
        {"slots": 12, "caching": False},
        {"slots": 30, "interval": 2, "block_size": 1},
    ),
    *({"slots": 30, "window": 6, "num_blocks": 16}, {"slots": 12, "ranks": 2, "block_size": 2}),
]


def small(num_blocks: int = 8, block_size: int = 4, **options: Any) -> BlockManager:
    return BlockManager(PagedKVCache(num_blocks, block_size, 1, 2), **options)


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_random_operations(options: dict[str, Any]) -> None:
    model = Model(**options)
    walk(model, 1500)
    assert model.counts["refused blocks"] or model.counts["refused state slots"]
    assert (model.counts["found"] > 0) == model.caching


@pytest.mark.parametrize("window", [-1, 6])
def test_attention_over_shared_blocks(window: int) -> None:
    model = Model(head_size=16, window=window, attending=True)
    walk(model, 400, 1)
    assert model.counts["found"]


TOKENS = st.lists(st.integers(0, 1), max_size=18)
WHICH = st.integers(0, 99)


FAILS = st.one_of(st.none(), st.integers(0, 250))
MACHINES: list[dict[str, Any]] = [
    *({}, {"caching": False}, {"block_size": 1}, {"nodes": 2}, {"window": 6, "num_blocks": 14}),
    *({"ranks": 2, "block_size": 2}, {"ranks": 3, "block_size": 1, "window": 5, "num_blocks": 12}),
    *({"slots": 10}, {"slots": 5, "block_size": 2, "num_blocks": 16}, {"slots": 8, "caching": False}),
]


class Operations(RuleBasedStateMachine):
    """Any operations in any order, each of which may fail at any line before it is done."""

    @initialize(options=st.sampled_from(MACHINES))
    def begin(self, options: dict[str, Any]) -> None:
        self.model = Model(**options)

    def one(self, which: int) -> int:
        here = self.model.here()
        return here[which % len(here)]

    @rule(tokens=TOKENS, like=st.one_of(st.none(), WHICH), key=st.integers(0, 7), fails=FAILS)
    def allocate(self, tokens: list[int], like: int | None, key: int, fails: int | None) -> None:
        """like: what another request has comes first, which is found or not."""
        if like is not None and self.model.here():
            tokens = self.model.tokens[self.one(like)] + tokens
        self.model.fails_at, key = fails, key // 7
        request = self.model.allocate(tokens, key)
        self.model.fails_at = fails
        self.model.step([(request, tokens[len(self.model.tokens[request]) :])])

    @rule(given=st.lists(TOKENS, max_size=5), drafts=st.integers(0, 3), fails=FAILS)
    def step(self, given: list[list[int]], drafts: int, fails: int | None) -> None:
        self.model.fails_at = fails
        self.model.step(list(zip(self.model.here(), given, strict=False)), drafts)

    @precondition(lambda self: self.model.here())
    @rule(which=WHICH, fails=FAILS)
    def fork(self, which: int, fails: int | None) -> None:
        self.model.fails_at = fails
        self.model.fork(self.one(which))

    @precondition(lambda self: self.model.here())
    @rule(which=WHICH, left=st.integers(0, 20), fails=FAILS)
    def truncate(self, which: int, left: int, fails: int | None) -> None:
        self.model.fails_at, request = fails, self.one(which)
        self.model.truncate(request, max(self.model.least(request), min(left, len(self.model.tokens[request]))))

    @precondition(lambda self: self.model.here())
    @rule(which=WHICH, fails=FAILS)
    def free(self, which: int, fails: int | None) -> None:
        self.model.fails_at = fails
        self.model.free(self.one(which))

    @precondition(lambda self: self.model.here())
    @rule(which=WHICH, fails=FAILS)
    def swap_out(self, which: int, fails: int | None) -> None:
        self.model.fails_at = fails
        self.model.swap_out(self.one(which))

    @precondition(lambda self: self.model.swapped)
    @rule(which=WHICH, back=st.booleans(), fails=FAILS)
    def swap_in_or_free(self, which: int, back: bool, fails: int | None) -> None:
        self.model.fails_at = fails
        request = sorted(self.model.swapped)[which % len(self.model.swapped)]
        (self.model.swap_in if back else self.model.free)(request)

    @rule(given=st.lists(TOKENS, min_size=1, max_size=3), fails=FAILS)
    def reset_and_go_on(self, given: list[list[int]], fails: int | None) -> None:
        self.model.fails_at = fails
        self.model.reset()
        self.step(given, 0, None)

    @invariant()
    def holds(self) -> None:
        self.model.check_blocks()
        for request in self.model.tokens:
            self.model.check(request)


TestOperations = Operations.TestCase
TestOperations.settings = settings(
    max_examples=100, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def test_a_shared_prefix_is_read_once() -> None:
    """Forks of more than a segment of keys, in caches of two layers, one of them quantised."""
    rng = np.random.default_rng(0)
    caches = [PagedKVCache(90, 16, 1, 16), PagedKVCache(90, 16, 1, 16, kv_cache_dtype="int8")]
    manager = BlockManager(caches)
    key, value = rng.standard_normal((2, 1104, 1, 16), np.float32)
    prompt = rng.integers(0, 1000, 1100)
    manager.allocate(0, prompt)
    step = manager.step([(0, prompt)])
    for cache in caches:
        cache.update(key[:1100], value[:1100], step)
    for new in (1, 2, 3):
        manager.fork(0, new)
    step = manager.step([(r, [r]) for r in range(4)])
    query = rng.standard_normal((4, 2, 16), np.float32)
    keys, values = ([np.append(x[:1100], x[1100 + r : 1101 + r], 0) for r in range(4)] for x in (key, value))
    want, _ = reference.attention(query, keys, values, step.query_start_loc, step.seq_lens, 0.25)
    for cache, budget in zip(caches, (reference.BUDGET["float32"], 0.02), strict=True):
        cache.update(key[1100:], value[1100:], step)
        assert step.plan(cache, 2).num_shared > 0
        output = cache.attend(query, step)
        assert (reference.relative_rms(output, want, step.query_start_loc) <= budget).all()
        assert (cache.attend(query, step, step.plan(cache, 2, block_table=None)) == output).all()


def test_layers_of_a_kind_share_a_plan() -> None:
    caches = [PagedKVCache(4, 16, 1, size) for size in (8, 8, 16)]
    manager = BlockManager(caches, enable_prefix_caching=False)
    manager.allocate("a")
    step = manager.step([("a", 3)])
    for cache in caches:
        cache.attend(np.zeros((3, 2, cache.head_size), np.float32), step)
    assert len(step._plans) == 2


def test_what_is_found() -> None:
    """Whole blocks of the same tokens behind the same tokens; one token is always left."""
    manager, prompt = small(), list(range(9))
    assert manager.allocate("a", prompt) == 0
    manager.step([("a", prompt)])
    found = {
        "same": (prompt, ""),
        "longer": ([*prompt, 9, 10, 11, 12], ""),
        "exact": (prompt[:8], ""),
        "array": (np.array(prompt, np.int32), b""),
        "other": ([*prompt[:4], 0, *prompt[5:]], ""),
        "keyed": (prompt, "a LoRA"),
        "behind": (prompt[4:], ""),
        "empty": ([], ""),
    }
    sizes = {name: manager.allocate(name, ids, extra_key=key) for name, (ids, key) in found.items()}
    assert sizes == dict(same=8, longer=8, exact=4, array=8, other=4, keyed=0, behind=0, empty=0)
    assert manager.num_free_blocks == 5
    for name in found:
        manager.free(name)
    manager.free("a")
    assert manager.num_free_blocks == 8 and manager.allocate("again", prompt) == 8
    manager.reset_prefix_cache()
    assert manager.allocate("after", prompt) == 0
    manager.step([("again", [8]), ("after", prompt)])
    assert manager.allocate("later", prompt) == 8
    assert (manager.get_block_ids("later") == manager.get_block_ids("after")[:2]).all()


def test_a_key_whose_bytes_are_a_block() -> None:
    """A root of sha256(b"0 " + key) and blocks of sha256(the hash before + ids) are the same function: one first token
    in 65,536 gives a hash that begins with b"0 ", and the rest of the second block's bytes is then a key."""
    manager = small(num_blocks=16)
    head, ids = [80523, 1, 2, 3], np.arange(8)
    before = sha256(sha256(b"0 ").digest() + np.array(head).tobytes()).digest()
    assert before.startswith(b"0 ")
    manager.allocate("victim")
    manager.step([("victim", [*head, *ids, 8])])
    key = before[2:] + ids[:4].tobytes()
    assert manager.allocate("other", [*ids[4:], 8], extra_key=key) == 0


KEYS = st.one_of(st.text(max_size=4), st.binary(max_size=40))
PROMPTS = st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=9)


@given(keys=st.tuples(KEYS, KEYS), prompts=st.tuples(PROMPTS, PROMPTS), data=st.data())
@settings(max_examples=300, deadline=None)
def test_chains_of_different_keys_never_meet(keys: Any, prompts: Any, data: st.DataObject) -> None:
    """Any two chains, also where the second one's key is what a block of the first is made from."""

    def chain(key: Any, prompt: list[int]) -> list[bytes]:
        manager = small(block_size=1, num_blocks=9)
        manager.allocate(0, extra_key=key)
        manager.step([(0, prompt)])
        return [root(key), *manager._pool.block_of]

    first = chain(keys[0], prompts[0])
    at = data.draw(st.integers(0, len(prompts[0]) - 1))
    made = first[at] + np.int64(prompts[0][at]).tobytes()
    for key in (keys[1], made):
        for prompt in prompts:
            second, same = chain(key, prompt), as_bytes(key) == as_bytes(keys[0])
            begun = [a == b for a, b in zip(prompts[0], prompt, strict=False)]
            shared = 1 + (begun.index(False) if False in begun else len(begun))
            assert len(set(first) & set(second)) == (shared if same else 0)


def as_bytes(key: str | bytes) -> bytes:
    return key.encode() if isinstance(key, str) else key


def test_after_a_reset() -> None:
    """What a request computes then depends on its keys from before."""
    manager, prompt = small(num_blocks=12), list(range(8))
    manager.allocate("old", prompt)
    manager.step([("old", prompt)])
    manager.reset_prefix_cache()
    manager.allocate("new", prompt)
    manager.step([("new", prompt), ("old", [8, 9, 10, 11])])
    assert manager.allocate("later", range(13)) == 8
    assert (manager.get_block_ids("later") == manager.get_block_ids("new")).all()


def test_swapped_out_over_a_reset() -> None:
    """Two requests of the same tokens from before. One of them is computed again, by other weights."""
    manager, prompt = small(num_blocks=6), list(range(8))
    (cache,) = manager.caches

    def compute(request: str, weights: float) -> None:
        key = np.full((8, 1, 2), weights, np.float32)
        cache.update(key, key, manager.step([(request, prompt)]))

    for request in ("out", "again"):
        manager.allocate(request)
        compute(request, 1)
    manager.swap_out("out")
    manager.reset_prefix_cache()
    manager.truncate("again", 0)
    compute("again", 2)
    manager.swap_in("out")
    key, value = cache.gather(manager.get_block_ids("out"), 8)
    assert (key == 1).all() and (value == 1).all()


def test_a_step_that_is_not_computed() -> None:
    manager, prompt = small(), list(range(9))
    manager.allocate("a", prompt)
    manager.step([("a", prompt[:5])])
    manager.step([("a", prompt[5:])])
    manager.truncate("a", 5)
    assert manager.allocate("b", prompt) == 4
    manager.truncate("a", 0)
    manager.free("b")
    assert manager.num_free_blocks == 8 and manager.allocate("c", prompt) == 4  # which b had found, too


def test_blocks_unused_for_longest_go_first() -> None:
    manager = small(num_blocks=4)
    texts = {name: [ord(name)] * 8 for name in "abc"}
    for name in "ab":
        manager.allocate(name, texts[name])
        manager.step([(name, texts[name])])
    manager.free("b")
    manager.free("a")
    assert manager.allocate("b", [*texts["b"], 0]) == 8  # used again
    manager.free("b")
    manager.allocate("c", texts["c"])
    manager.step([("c", texts["c"][:1])])  # takes the end of a
    assert manager.allocate("a", [*texts["a"], 0]) == 4
    assert manager.allocate("b", [*texts["b"], 0]) == 8


def test_the_last_to_write_has_the_block() -> None:
    manager = small()
    manager.allocate(0)
    manager.step([(0, [1, 2])])
    before = manager.get_block_ids(0)
    manager.fork(0, 1)
    manager.fork(1, 2)
    step = manager.step([(r, [r]) for r in range(3)])
    assert len(set(step.block_table[:, 0])) == 3 and step.block_table[2] == before
    assert manager.num_free_blocks == 5


def test_blocks_behind_the_window() -> None:
    """Of 6 tokens that are seen, in blocks of 4. What the first token of a step sees is kept."""
    manager = small(sliding_window=6, enable_prefix_caching=False)
    manager.allocate(0)
    for seq_len, dropped in ((8, 0), (9, 0), (10, 1), (17, 1), (18, 3)):
        manager.step([(0, seq_len - manager.seq_len(0))])
        assert (manager.get_block_ids(0) < 0).sum() == dropped
        assert manager.num_free_blocks == 8 - (-(-seq_len // 4) - dropped)
    with pytest.raises(ValueError, match=r"^seq_len: 16 is outside 17\.\.18"):
        manager.truncate(0, 16)
    manager.truncate(0, 17)


def test_swapped_blocks_of_any_cache() -> None:
    """Bytes come back. What the prefix cache still has is not copied."""
    rng = np.random.default_rng(1)
    caches = [PagedKVCache(6, 16, 2, 8, kv_cache_dtype="int8/int4"), PagedKVCache(6, 16, 2, 8, "bfloat16")]
    manager = BlockManager(caches)

    def run(request: str, tokens: Any) -> None:
        manager.allocate(request, tokens)
        step = manager.step([(request, tokens)])
        for cache in caches:
            cache.update(*rng.standard_normal((2, len(tokens), 2, 8), np.float32).astype(cache.dtype), step)

    def held() -> list[bytes]:
        blocks = manager.get_block_ids("a")
        return [x.tobytes() for cache in caches for x in cache.gather(blocks, manager.seq_len("a"))]

    run("a", rng.integers(0, 99, 40))
    before, blocks = held(), manager.get_block_ids("a")
    manager.swap_out("a")
    assert manager.num_free_blocks == 6 and manager.seq_len("a") == 40
    run("b", range(80))  # in all blocks but the first of a
    with pytest.raises(NoFreeBlocksError, match=r"^request: needs 2 blocks, 0 are free, 2 are missing") as error:
        manager.swap_in("a")
    assert error.value.missing == 2
    manager.free("b")
    manager.swap_in("a")
    assert held() == before and manager.get_block_ids("a")[0] == blocks[0]
    assert manager.num_free_blocks == 3


def test_a_step_of_another_block_size() -> None:
    manager, cache = small(block_size=4), PagedKVCache(8, 16, 1, 2)
    manager.allocate(0)
    step, x = manager.step([(0, [1])]), np.zeros((1, 1, 2), np.float32)
    for call in (lambda: cache.update(x, x, step), lambda: cache.attend(x, step), lambda: step.plan(cache, 1)):
        with pytest.raises(ValueError, match=r"^step: for blocks of 4 tokens, this cache has 16"):
            call()
    with pytest.raises(ValueError, match=r"^query"):
        manager.caches[0].attend(x[0], step)
    with pytest.raises(TypeError, match=r"^plan"):
        cache.attend(x, np.zeros((1, 1), np.int32))


CACHE = PagedKVCache(8, 4, 1, 2)
READ_ONLY = PagedKVCache(8, 4, 1, 2)
READ_ONLY.value_cache.flags.writeable = False
EMPTY = PagedKVCache(0, 4, 1, 2)


@pytest.mark.parametrize(
    ("caches", "options", "words"),
    [
        ([], {}, "caches: is empty"),
        (7, {}, "caches: expected a sequence"),
        ([CACHE, np.zeros(3)], {}, r"caches\[1\]: expected a PagedKVCache, got ndarray"),
        ([CACHE, PagedKVCache(9, 4, 1, 2)], {}, r"caches\[1\]: num_blocks 9, expected 8"),
        ([CACHE, PagedKVCache(8, 5, 1, 2)], {}, r"caches\[1\]: block_size 5, expected 4"),
        ([CACHE, READ_ONLY], {}, r"caches\[1\].value_cache: is read-only"),
        (EMPTY, {}, r"caches\[0\]: has no blocks"),
        (CACHE, {"sliding_window": 0}, "sliding_window: 0"),
        (CACHE, {"sliding_window": -2}, "sliding_window: -2"),
        (CACHE, {"enable_prefix_caching": 2}, "enable_prefix_caching: "),
    ],
)
def test_caches_that_are_refused(caches: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^{words}"):
        BlockManager(caches, **options)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: m.step([("a", [1]), ("x", [1])]), r"batch\[1\]\[0\]: 'x' is not there"),
        (lambda m: m.step([("a", [1]), ("b", [1]), ("a", [2])]), r"batch\[2\]\[0\]: 'a' is named twice"),
        (lambda m: m.step([("a", [1]), ("gone", [1])]), r"batch\[1\]\[0\]: 'gone' is swapped out"),
        (lambda m: m.step([([], [1])]), r"batch\[0\]\[0\]: unhashable"),
        (lambda m: m.step([("a", [1]), 7]), r"batch\[1\]: expected a sequence, got int"),
        (lambda m: m.step([("a", [1], 2)]), r"batch\[0\]: expected \(request, tokens\)"),
        (lambda m: m.step("a"), "batch: expected a sequence"),
        (lambda m: m.step([("found", range(9))]), r"batch\[0\]\[1\]\[0\]: id 0, expected 4: 4 of the 9 tokens"),
        (lambda m: m.step([("a", [1]), ("found", [4, 5, 9])]), r"batch\[1\]\[1\]\[2\]: id 9, expected 6: 4 of the 9"),
        (lambda m: m.step([("a", [1]), ("b", 3)]), r"batch\[1\]\[1\]: expected token ids, got 3"),
        (lambda m: m.step([("a", [1]), ("b", [1.5])]), r"batch\[1\]\[1\]: dtype float64"),
        (lambda m: m.step([("a", [1]), ("b", [[1]])]), r"batch\[1\]\[1\]: 2 axes"),
        (lambda m: m.step([("a", [1]), ("b", "ab")]), r"batch\[1\]\[1\]: "),
        (lambda m: m.step([("a", [1]), ("b", [2**63])]), r"batch\[1\]\[1\]: dtype uint64"),
        (lambda m: m.step([("a", [1]), ("b", np.zeros(1))]), r"batch\[1\]\[1\]: dtype float64"),
        (lambda m: m.allocate("a"), "request: 'a' is there already"),
        (lambda m: m.allocate({}), "request: unhashable"),
        (lambda m: m.allocate("c", [0.5]), "tokens: dtype float64"),
        (lambda m: m.allocate("c", 3), "tokens: "),
        (lambda m: m.allocate("c", extra_key=3), "extra_key: expected str or bytes, got int"),
        (lambda m: m.fork("x", "c"), "request: 'x' is not there"),
        (lambda m: m.fork("a", "b"), "new_request: 'b' is there already"),
        (lambda m: m.fork("gone", "c"), "request: 'gone' is swapped out"),
        (lambda m: m.truncate("a", 6), r"seq_len: 6 is outside 0\.\.5"),
        (lambda m: m.truncate("a", -1), r"seq_len: -1 is outside 0\.\.5"),
        (lambda m: m.truncate("gone", 0), "request: 'gone' is swapped out"),
        (lambda m: m.free("x"), "request: 'x' is not there"),
        (lambda m: m.swap_out("gone"), "request: 'gone' is swapped out"),
        (lambda m: m.swap_in("a"), "request: 'a' is not swapped out"),
        (lambda m: m.get_block_ids("gone"), "request: 'gone' is swapped out"),
        (lambda m: m.seq_len("x"), "request: 'x' is not there"),
    ],
)
def test_calls_that_are_refused(call: Any, words: str) -> None:
    """Nothing has changed then."""
    model = Model(num_blocks=8, block_size=4)
    manager = model.manager
    for request in ("a", "b", "gone"):
        manager.allocate(request)
        manager.step([(request, range(5))])
        model.tokens[request] = []  # type: ignore[index]
    manager.allocate("found", range(9))
    model.tokens["found"] = []  # type: ignore[index]
    model.swap_out("gone")  # type: ignore[arg-type]
    state = model.state()
    with pytest.raises((ValueError, TypeError), match=f"^{words}"):
        call(manager)
    assert model.state() == state


NO_IDS = ["hello", [None], {3: 4}, [1.5], [0.0], np.zeros(2), {1, 2}, [[1]], b"ab", [2**63]]


@pytest.mark.parametrize("tokens", NO_IDS, ids=str)
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_tokens_that_are_no_ids(tokens: Any, enable_prefix_caching: bool) -> None:
    manager = small(enable_prefix_caching=enable_prefix_caching)
    manager.allocate("a")
    manager.allocate("b")
    with pytest.raises((ValueError, TypeError), match=r"^batch\[1\]\[1\]: "):
        manager.step([("a", [1]), ("b", tokens)])
    assert manager.seq_len("a") == manager.seq_len("b") == 0


def test_a_prompt_of_which_some_is_there() -> None:
    """Its tokens from the beginning, at once or in parts, would stand behind those that were found."""
    manager, prompt = small(num_blocks=32), [*range(12), 0, 0]
    manager.allocate("first")
    manager.step([("first", prompt)])
    assert manager.allocate("a", prompt) == 12
    for wrong in (prompt, prompt[:5], prompt[11:], [0, 1], [*prompt, 7]):
        manager.allocate("right", prompt)
        manager.step([("right", prompt[12:])])
        with pytest.raises(ValueError, match=r"12 of the 14 tokens given to allocate|tokens\[12\] on"):
            manager.step([("right", [1]), ("a", wrong)])
        assert manager.seq_len("a") == 12
        manager.free("right")
    manager.step([("a", prompt[12:13])])
    manager.truncate("a", 12)  # as after a step that was not computed
    with pytest.raises(ValueError, match=r"expected those from|12 of the 14"):
        manager.step([("a", prompt)])
    manager.step([("a", [*prompt[12:], 7])])
    manager.step([("a", prompt)])  # which is text as any now
    assert manager.seq_len("a") == 29

    same = [5] * 14
    manager.allocate("same")
    manager.step([("same", same)])
    assert manager.allocate("b", same) == 12
    with pytest.raises(ValueError, match=r"^batch\[0\]\[1\]: all 14 tokens .* from tokens\[12\] on: 12 are there"):
        manager.step([("b", same)])
    manager.truncate("b", 0)
    manager.step([("b", [1, 2])])  # and begins anew


def test_counts_that_are_refused() -> None:
    manager = small(enable_prefix_caching=False)
    manager.allocate("a")
    for tokens, words in ((-1, "-1 is outside"), (True, "expected an integer"), (1.5, "expected an integer")):
        with pytest.raises((ValueError, TypeError), match=rf"^batch\[0\]\[1\]: {words}"):
            manager.step([("a", tokens)])
    manager.step([("a", 3)])
    too_many = r"batch\[0\]: 2147483650 tokens in all"
    for tokens, words in ((2**31 - 1, too_many), (30, "batch: needs 8 blocks, 7 are free, 1 are missing: batch")):
        with pytest.raises((ValueError, NoFreeBlocksError), match=f"^{words}"):
            manager.step([("a", tokens)])
    manager.allocate("b")
    with pytest.raises(ValueError, match=r"^batch: 4294967294 tokens"):
        manager.step([("a", 2**31 - 1), ("b", 2**31 - 1)])
    with pytest.raises(NoFreeBlocksError, match=r"^batch: needs 536870912 blocks, 7 are free"):
        manager.step([("b", 2**31 - 1)])


def test_what_can_never_fit() -> None:
    """However many requests are freed. A window lets a longer prompt through, in parts."""
    manager = small(num_blocks=4)
    manager.allocate("a")
    manager.step([("a", range(5))])
    manager.allocate("b", range(100, 117))
    with pytest.raises(
        NoFreeBlocksError, match=r"2 are free, 1 are missing: free requests, or swap them out$"
    ) as error:
        manager.step([("b", range(100, 112))])
    assert not error.value.never_fits and error.value.missing == 1
    told = r"5 blocks, 2 are free, 3 are missing: batch\[1\] with 17 tokens needs 5 of 4 blocks, never fits$"
    with pytest.raises(NoFreeBlocksError, match=told) as error:
        manager.step([("a", []), ("b", range(100, 117))])
    assert error.value.never_fits
    windowed = small(num_blocks=4, sliding_window=4)
    windowed.allocate("a")
    with pytest.raises(NoFreeBlocksError, match="never fits at once: give it in parts"):
        windowed.step([("a", range(17))])
    for first in range(0, 100, 5):
        windowed.step([("a", range(first, first + 5))])
    with pytest.raises(NoFreeBlocksError, match=r"batch\[0\] with 117 tokens needs 7 of 4"):
        windowed.step([("a", range(17))])


def test_what_is_counted() -> None:
    manager = small(num_blocks=6)
    manager.allocate("a", range(9))
    manager.step([("a", range(9))])
    assert manager.allocate("b", [*range(8), 50, 51]) == 8
    assert manager.stats() == BlockStats(6, 3, 3, 2, 19, 8, 0)
    manager.step([("b", [50, 51])])
    with pytest.raises(ValueError, match="is there already"):
        manager.allocate("b", range(9))
    with pytest.raises(NoFreeBlocksError):
        manager.step([("a", range(40))])
    assert manager.stats() == BlockStats(6, 2, 4, 2, 19, 8, 0)
    assert repr(manager) == "BlockManager(6 blocks of 4: 2 free, 4 used, 2 cached; requests: 2, caches: 1)"
    manager.free("a")
    manager.free("b")
    manager.allocate("c", range(70, 90))
    manager.step([("c", range(70, 90))])  # takes the four blocks that nobody knows, and one of the cached ones
    assert manager.stats() == BlockStats(6, 1, 5, 6, 39, 8, 1)
    other = copy.deepcopy(manager)
    other.allocate("d", range(70, 90))
    assert (other.stats().prefix_cache_hits, manager.stats().prefix_cache_hits) == (24, 8)
    plain = small(num_blocks=6, enable_prefix_caching=False, sliding_window=8)
    plain.allocate("a", range(9))
    assert plain.stats() == BlockStats(6, 6, 0, 0, 0, 0, 0)
    assert repr(plain) == "BlockManager(6 blocks of 4: 6 free, 0 used; requests: 1, caches: 1, sliding_window 8)"


def test_a_fork_of_what_was_found() -> None:
    """It takes the rest of the prompt, as the other one does."""
    manager, prompt = small(num_blocks=32), [*range(12), 0, 0]
    manager.allocate("first")
    manager.step([("first", prompt)])
    assert manager.allocate("a", prompt) == 12
    manager.fork("a", "b")
    for request in ("b", "a"):
        with pytest.raises(ValueError, match="12 of the 14 tokens given to allocate are there already"):
            manager.step([(request, prompt)])
        assert manager.step([(request, prompt[12:])]).seq_lens.tolist() == [14]


def test_steps_of_nothing() -> None:
    manager = small(enable_prefix_caching=False)
    manager.allocate("a")
    for batch in ([], [("a", 0)]):
        step, x = manager.step(batch), np.zeros((0, 1, 2), np.float32)
        manager.caches[0].update(x, x, step)
        assert (step.num_reqs, step.num_tokens) == (len(batch), 0)
        assert manager.caches[0].attend(x, step).shape == (0, 1, 2)
    assert manager.step([("a", [1, 2])]).slot_mapping.tolist() == [0, 1]
