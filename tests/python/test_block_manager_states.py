# SPDX-License-Identifier: Apache-2.0
"""BlockManager with slots of states: what a request goes on from, snapshots, drafts, and the bits of a prefix hit."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from cpu_attn import BlockManager, NoFreeBlocksError, PagedKVCache
from cpu_attn.linear import causal_conv1d, get_linear_attention_metadata, linear_attention_with_state_cache, reference
from cpu_attn.serving import Step


def small(num_slots: int = 8, num_blocks: int = 40, interval: int = 64, **options: Any) -> BlockManager:
    states = [np.zeros((num_slots, 3), np.float32)]
    return BlockManager(PagedKVCache(num_blocks, 16, 1, 2), states=states, state_interval=interval, **options)


def arrays(step: Step) -> tuple[list[int], list[int], list[list[int]]]:
    found = (step.state_indices, step.initial_state_indices, step.checkpoints)
    to, of, checkpoints = (x.tolist() for x in found if x is not None)
    return to, of, checkpoints


def test_slots_of_a_step() -> None:
    """A request keeps its slot. One without tokens has none, and leaves it alone."""
    manager = small()
    manager.allocate("a")
    manager.allocate("b")
    assert arrays(manager.step([("a", range(150)), ("b", [])])) == ([0, -1], [-1, -1], [[0, 64, 2], [0, 128, 1]])
    assert arrays(manager.step([("b", [1]), ("a", [1])])) == ([3, 0], [-1, 0], [])
    assert arrays(manager.step([("a", []), ("b", range(63))])) == ([-1, 3], [-1, 3], [[1, 63, 4]])
    assert manager.stats()[7:10] == (8, 6, 3)
    manager.free("a")
    manager.free("b")
    assert manager.stats()[7:10] == (8, 8, 3)


def test_a_hit_ends_at_a_snapshot() -> None:
    """Wherever one lies: also after 64 of 128 tokens that are cached, once the later snapshot is gone."""
    manager, prompt = small(num_slots=4), list(range(200))
    manager.allocate("a", prompt)
    manager.step([("a", prompt)])  # snapshots after 64, 128 and 192 tokens
    sizes = {"same": 192, "up to 192": 128, "up to 193": 192, "up to 150": 128, "up to 63": 0}
    for name, found in sizes.items():
        end = int(name[6:]) if name != "same" else 200
        assert manager.allocate(name, prompt[:end]) == found
        assert len(manager.get_block_ids(name)) == found // 16
    assert arrays(manager.step([("a", [1])])) == ([0], [0], [])
    for name in sizes:
        manager.free(name)
    manager.allocate("b")
    manager.step([("b", range(1000, 1070))])  # takes the slots of two snapshots, those used longest ago
    left = [n for n in (64, 128, 192) if manager.allocate(f"now {n}", prompt[: n + 1]) == n]
    assert len(left) == 1


def test_a_hit_begins_from_the_snapshot() -> None:
    manager, prompt = small(), list(range(100))
    manager.allocate("a", prompt)
    _, _, [[_, _, snapshot]] = arrays(manager.step([("a", prompt)]))
    for name in ("b", "c"):
        assert manager.allocate(name, prompt) == 64
    to, of, _ = arrays(manager.step([("b", prompt[64:]), ("c", prompt[64:])]))
    assert of == [snapshot, snapshot] and len({*to, snapshot, 0}) == 4


def test_few_slots() -> None:
    """One is enough: a hit makes the snapshot the request's own."""
    manager, prompt = small(num_slots=1), list(range(100))
    manager.allocate("a", prompt)
    assert arrays(manager.step([("a", prompt[:64])])) == ([0], [-1], [])  # no slot for a snapshot
    manager.free("a")
    manager = small(num_slots=2)
    manager.allocate("a", prompt)
    manager.step([("a", prompt)])
    manager.free("a")
    assert manager.allocate("b", prompt) == 64
    manager.allocate("c")
    to, of, _ = arrays(manager.step([("b", prompt[64:]), ("c", [1])]))
    assert to[0] == of[0] != to[1] and of[1] == -1
    manager.allocate("d")
    with pytest.raises(
        NoFreeBlocksError, match=r"^batch: needs 1 state slots, 0 are free, 1 are missing: free"
    ) as error:
        manager.step([("d", [1])])
    assert error.value.missing == 1 and not error.value.never_fits
    told = r"batch\[0\] needs 4 of 2 state slots, never fits$"
    with pytest.raises(NoFreeBlocksError, match=told) as error:
        manager.step([("d", [1, 2, 3, 4])], num_draft_tokens=[3])
    assert error.value.never_fits and str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


def test_forks_share_a_slot_until_they_go_on() -> None:
    manager = small()
    manager.allocate("a")
    manager.step([("a", [1, 2])])
    manager.fork("a", "b")
    assert manager.stats().num_free_state_slots == 7
    to, of, _ = arrays(manager.step([("a", [3]), ("b", [4])]))
    assert of == [0, 0] and len({*to, 0}) == 3
    assert manager.stats().num_free_state_slots == 6


def test_drafts() -> None:
    """The states before them are kept, up to the next step."""
    manager = small()
    manager.allocate("a")
    manager.step([("a", [1, 2, 3])])
    to, of, checkpoints = arrays(manager.step([("a", [4, 5, 6])], num_draft_tokens=[3]))
    assert of == [0] and checkpoints == [[0, 1, checkpoints[0][2]], [0, 2, checkpoints[1][2]]]
    assert len({0, to[0], checkpoints[0][2], checkpoints[1][2]}) == 4
    assert manager.stats().num_free_state_slots == 4
    other = copy.deepcopy(manager)
    for back, slot in ((3, 0), (4, checkpoints[0][2]), (5, checkpoints[1][2]), (6, to[0])):
        manager = copy.deepcopy(other)
        manager.truncate("a", back)
        assert manager.stats().num_free_state_slots == 7
        assert arrays(manager.step([("a", [9])]))[:2] == ([slot], [slot])
    with pytest.raises(ValueError, match=r"^seq_len: there is no state after 2 tokens; the last before it is after 0"):
        other.truncate("a", 2)
    other.step([("a", [7])])
    assert other.stats().num_free_state_slots == 7
    with pytest.raises(ValueError, match=r"^seq_len: there is no state after 6 tokens"):
        other.truncate("a", 6)
    other.truncate("a", 0)
    assert other.stats().num_free_state_slots == 8


def test_snapshots_of_a_step_that_is_not_computed() -> None:
    manager, prompt = small(), list(range(100))
    manager.allocate("a", prompt)
    manager.step([("a", prompt)])
    manager.truncate("a", 0)
    assert manager.stats().num_snapshots == 0 and manager.allocate("b", prompt) == 0
    manager.step([("b", prompt)])
    manager.truncate("b", 64)  # where it has a snapshot, which stays
    to, of, _ = arrays(manager.step([("b", [7])]))
    assert to != of and manager.stats().num_snapshots == 1


def test_blocks_and_snapshots_go_together() -> None:
    manager, prompt = small(num_blocks=9), list(range(130))
    manager.allocate("a", prompt)
    manager.step([("a", prompt)])
    manager.free("a")
    assert manager.stats().num_snapshots == 2
    manager.allocate("b")
    manager.step([("b", range(1000, 1032))])  # takes a block that nobody knows, and the last of those that are cached
    assert manager.stats().num_snapshots == 1 and manager.allocate("c", prompt) == 64
    manager.reset_prefix_cache()
    assert manager.stats().num_snapshots == 0


def test_swapped_states_come_back() -> None:
    manager = small()
    manager.allocate("a")
    manager.step([("a", [1, 2])])
    manager.states[0][0] = 7
    manager.swap_out("a")
    assert manager.stats().num_free_state_slots == 8
    manager.states[0][:] = 0
    for name in range(8):
        manager.allocate(name)
    manager.step([(name, [name]) for name in range(8)])
    with pytest.raises(NoFreeBlocksError, match=r"^request: needs 1 state slots, 0 are free"):
        manager.swap_in("a")
    manager.free(5)
    manager.swap_in("a")
    to, of, _ = arrays(manager.step([("a", [1])]))
    assert to == of and (manager.states[0][to[0]] == 7).all() and (manager.states[0] == 7).sum() == 3


READ_ONLY = np.zeros((8, 2), np.float32)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"states": 3}, "states: expected a sequence"),
        ({"states": [np.zeros((), np.float32)]}, r"states\[0\]: 0 axes"),
        ({"states": [np.zeros((0, 2), np.float32)]}, r"states\[0\]: 0 slots, expected at least 1"),
        ({"states": [np.zeros(8, np.float32), np.zeros((7, 2), np.float32)]}, r"states\[1\]: 7 slots, expected 8"),
        ({"states": [READ_ONLY]}, r"states\[0\]: is read-only"),
        ({"states": [None]}, r"states\[0\]: "),
        ({"state_interval": 32}, "state_interval: 32, expected a multiple of 64 and of 16"),
        ({"state_interval": 0}, "state_interval: 0"),
    ],
)
def test_states_that_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^{words}"):
        BlockManager(PagedKVCache(8, 16, 1, 2), **{"states": [np.zeros((8, 2), np.float32)], **options})


@pytest.mark.parametrize(
    ("drafts", "words"),
    [
        ([1], r"num_draft_tokens: 1 numbers, expected 2"),
        ([1, 3], r"num_draft_tokens\[1\]: 3 is outside 0\.\.2"),
        ([-1, 0], r"num_draft_tokens\[0\]: -1 is outside 0\.\.1"),
        ([0.5, 0], "num_draft_tokens: dtype float64"),
        (2, "num_draft_tokens: "),
    ],
)
def test_drafts_that_are_refused(drafts: Any, words: str) -> None:
    manager = small()
    manager.allocate("a")
    manager.allocate("b")
    with pytest.raises((ValueError, TypeError), match=f"^{words}"):
        manager.step([("a", [1]), ("b", [1, 2])], num_draft_tokens=drafts)
    assert manager.seq_len("a") == manager.seq_len("b") == 0


class Layers:
    """Two layers of a convolution before a gated delta net, whose inputs follow from the tokens alone."""

    heads, size, channels, layers = 2, 16, 96, 2

    def __init__(self, num_slots: int, **options: Any) -> None:
        shapes = ((self.heads, self.size, self.size), (self.channels, 3))
        states = [np.full((num_slots, *shape), np.nan, np.float32) for _ in range(self.layers) for shape in shapes]
        cache = PagedKVCache(80, 16, 1, 2)
        self.manager = BlockManager(cache, states=states, state_interval=64, **options)
        rng = np.random.default_rng(0)
        self.weights = rng.standard_normal((self.layers, self.channels, 4), np.float32)
        self.embedding = rng.standard_normal((1000, self.channels), np.float32)
        self.gates = rng.random((1000, 2, self.heads), np.float32)

    def run(self, batch: list[tuple[str, list[int]]], drafts: list[int] | None = None) -> Any:
        """Outputs [layers, T, Hv, Dv] of a step."""
        step, outputs = self.manager.step(batch, num_draft_tokens=drafts), []
        tokens = np.concatenate([np.array(tokens, int) for _, tokens in batch])
        sizes = (self.heads, self.heads, self.size, self.size)
        plan = get_linear_attention_metadata(step.query_start_loc, "float32", *sizes, seq_lens=step.seq_lens)
        where = {"initial_state_indices": step.initial_state_indices, "checkpoints": step.checkpoints}
        for weight, state, conv in zip(self.weights, self.manager.states[::2], self.manager.states[1::2], strict=True):
            x = self.embedding[tokens]
            causal_conv1d(x, weight, None, x, conv, step.state_indices, plan, **where)
            query, key, value = x.reshape(len(x), 3, self.heads, self.size).transpose(1, 0, 2, 3)
            g, beta = -self.gates[tokens, 0] / 8, self.gates[tokens, 1]
            out = np.empty(value.shape, np.float32)
            given = (query, key, value, out, state, step.state_indices, plan)
            linear_attention_with_state_cache(*given, g=g, beta=beta, use_qk_l2norm_in_kernel=True, **where)
            outputs.append(out)
        return np.stack(outputs)

    def states_of(self, request: str) -> list[bytes]:
        slot = self.manager._states.slot.item(self.manager._row_of[request])
        return [x[slot].tobytes() for x in self.manager.states]

    def expected(self, tokens: list[int]) -> Any:
        """In float64, token by token."""
        start, outputs = np.array([0, len(tokens)], np.int32), []
        for weight in self.weights:
            x = reference.causal_conv1d(self.embedding[tokens], weight, None, start, [None], 3).output
            query, key, value = x.reshape(len(x), 3, self.heads, self.size).transpose(1, 0, 2, 3)
            gates = {"g": -self.gates[tokens, 0] / 8, "beta": self.gates[tokens, 1]}
            found = reference.linear_attention(
                *(query, key, value, start, [None]), **gates, use_qk_l2norm_in_kernel=True
            )
            outputs.append(found.output)
        return np.stack(outputs)


def within_budget(got: Any, want: Any) -> bool:
    return bool(np.linalg.norm(got - want) <= reference.BUDGET["float32"] * np.linalg.norm(want))


def test_a_hit_has_the_bits_of_one_that_computed_all() -> None:
    """Whoever began the prompt, and however it was cut at multiples of 64 tokens. Slots that nobody wrote are NaN."""
    rng = np.random.default_rng(1)
    prompt = rng.integers(0, 1000, 200).tolist()
    other = [*prompt[:150], *rng.integers(0, 1000, 60).tolist()]
    engine = Layers(12)
    for name, tokens, found in (("a", prompt, 0), ("b", other, 128), ("c", prompt, 192)):
        assert engine.manager.allocate(name, tokens) == found
        parts = [tokens[found:128], tokens[max(found, 128) :]] if found < 128 else [tokens[found:]]
        got = np.concatenate([engine.run([(name, part)]) for part in parts], axis=1)
        alone = Layers(4, enable_prefix_caching=False)
        alone.manager.allocate(name)
        whole = alone.run([(name, tokens)])
        assert (got == whole[:, found:]).all() and within_budget(got, engine.expected(tokens)[:, found:])
        assert engine.states_of(name) == alone.states_of(name)


def test_forks_and_drafts_within_the_budget() -> None:
    """Forks go on with other tokens; drafts are taken back; swapped requests come back."""
    rng = np.random.default_rng(2)
    engine, prompt = Layers(16), rng.integers(0, 1000, 70).tolist()
    engine.manager.allocate("a", prompt)
    engine.run([("a", prompt)])
    engine.manager.fork("a", "b")
    engine.run([("a", [1, 2, 3, 4]), ("b", [5, 6, 7])], [3, 0])
    engine.manager.truncate("a", 72)
    engine.manager.swap_out("b")
    got_a = engine.run([("a", [8, 9])])
    engine.manager.swap_in("b")
    got_b = engine.run([("b", [10])])
    assert within_budget(got_a, engine.expected([*prompt, 1, 2, 8, 9])[:, 72:])
    assert within_budget(got_b, engine.expected([*prompt, 5, 6, 7, 10])[:, 73:])
