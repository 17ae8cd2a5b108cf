# SPDX-License-Identifier: Apache-2.0
"""Two small transformers, decoder-only and encoder-decoder, for 64 steps of continuous batching through the backend
layer: requests join, leave, are preempted by swap and come back, prefill in chunks, share prefixes. Every token must be
the one that the same weights give in plain dense attention, in float64, one request at a time.

Blocks that nobody owns are NaN, so whoever reads one that is not its own is found out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cpu_attn import CPUAttentionBackend, CPUAttentionMetadata, PagedAttention

from ..python.test_backend import PAGED

Array = np.ndarray[Any, Any]
STEPS, VOCABULARY, LONGEST = 64, 61, 120
HIDDEN, HEADS, KV_HEADS, SIZE, BLOCK = 32, 4, 2, 8, 16
SLOPES = [0.5, 0.25, 0.125, 0.0625]
SINKS = np.array([0.5, -1.0, 1.5, 0.0], np.float32)
# Decoder layers, as the layer is told of them; the last one reads the first one's keys and values.
LAYERS: tuple[dict[str, Any], ...] = (
    {},
    {"alibi_slopes": SLOPES},
    {"sliding_window": 19, "logits_soft_cap": 3.0, "sinks": SINKS},
    {"kv_sharing_target_layer_name": "layers.0"},
)
ENCODER_LAYERS: tuple[dict[str, Any], ...] = ({}, {"sliding_window": 7})
LAYOUTS = ("flat", "pair", "stacked", None)


# ---- the model: all but its attention ----


class Weights:
    """Random weights, the same in float32 and in float64."""

    def __init__(self, seed: int, dtype: Any) -> None:
        self._seed, self._dtype, self._known = seed, dtype, {}  # type: ignore[var-annotated]

    def __call__(self, name: str, rows: int, columns: int) -> Array:
        if name not in self._known:
            rng = np.random.default_rng([self._seed, *name.encode()])
            weight = (rng.standard_normal((rows, columns)) * 1.6 / np.sqrt(rows)).astype(np.float32)
            self._known[name] = weight.astype(self._dtype)
        weight = self._known[name]
        return weight

    def projection(self, name: str, x: Array, heads: int) -> Array:
        return np.asarray(norm(x) @ self(name, HIDDEN, heads * SIZE))


def norm(x: Array) -> Array:
    return np.asarray(x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + 1e-6))


def embed(w: Weights, side: str, tokens: Any, positions: Any) -> Array:
    table, place = w(f"{side}.tokens", VOCABULARY, HIDDEN), w(f"{side}.positions", LONGEST, HIDDEN)
    return np.asarray(3 * table[tokens] + 9 * place[positions])


def transformer(w: Weights, side: str, x: Array, attend: Callable[[str, int, Any], Array]) -> Array:
    """Pre-norm layers; attend(kind, layer, project) gives [n, HEADS * SIZE], project(name, heads) q, k and v."""
    for i in range(len(ENCODER_LAYERS if side == "encoder" else LAYERS)):
        for kind in ("encoder",) if side == "encoder" else ("decoder", "encoder_decoder"):
            prefix = f"{kind}.{i}"

            def project(name: str, heads: int, x: Array = x, prefix: str = prefix) -> Array:
                return w.projection(f"{prefix}.{name}", x, heads)

            attended = attend(kind, i, project)
            if attended is not None:
                x = x + attended @ w(f"{prefix}.out", HEADS * SIZE, HIDDEN)
        inner = np.maximum(norm(x) @ w(f"{side}.{i}.up", HIDDEN, 2 * HIDDEN), 0)
        x = x + inner @ w(f"{side}.{i}.down", 2 * HIDDEN, HIDDEN)
    return x


def logits(w: Weights, x: Array) -> Array:
    return np.asarray(norm(x) @ w("logits", HIDDEN, VOCABULARY))


# ---- plain and dense ----


def dense_attention(q: Array, k: Array, v: Array, causal: bool, options: dict[str, Any]) -> Array:
    n, m = len(q), len(k)
    q, k, v = q.reshape(n, HEADS, SIZE), *(x.reshape(m, KV_HEADS, SIZE).repeat(2, axis=1) for x in (k, v))
    s = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(SIZE)
    if cap := options.get("logits_soft_cap"):
        s = cap * np.tanh(s / cap)
    distance = np.arange(m) - np.arange(n)[:, None]
    if "alibi_slopes" in options:
        s = s + np.array(options["alibi_slopes"])[:, None, None] * distance
    window = options.get("sliding_window", LONGEST)
    seen = (distance > -window) & (distance < (1 if causal else window))
    p = np.exp(np.where(seen, s, -np.inf))
    sinks = np.exp(options["sinks"].astype(np.float64)) if "sinks" in options else np.zeros(HEADS)
    p /= p.sum(axis=2, keepdims=True) + sinks[:, None, None]
    return np.asarray(np.einsum("hij,jhd->ihd", p, v).reshape(n, -1))


class Dense:
    """Greedy tokens of one request at a time, everything computed anew for every token."""

    def __init__(self, seed: int) -> None:
        self.w = Weights(seed, np.float64)

    def encode(self, source: list[int]) -> Array:
        def attend(kind: str, i: int, project: Any) -> Array:
            q, k, v = project("q", HEADS), project("k", KV_HEADS), project("v", KV_HEADS)
            return dense_attention(q, k, v, False, ENCODER_LAYERS[i])

        return transformer(self.w, "encoder", embed(self.w, "encoder", source, range(len(source))), attend)

    def scores(self, tokens: list[int], states: Array | None) -> Array:
        shared: list[Array] = []

        def attend(kind: str, i: int, project: Any) -> Array | None:
            if kind == "encoder_decoder":
                if states is None:
                    return None
                k, v = (self.w.projection(f"{kind}.{i}.{name}", states, KV_HEADS) for name in "kv")
                return dense_attention(project("q", HEADS), k, v, False, {"sliding_window": LONGEST + len(states)})
            kv = [project("k", KV_HEADS), project("v", KV_HEADS)]
            if "kv_sharing_target_layer_name" in LAYERS[i]:
                kv = shared
            elif i == 0:
                shared.extend(kv)
            return dense_attention(project("q", HEADS), *kv, True, LAYERS[i])

        x = transformer(self.w, "decoder", embed(self.w, "decoder", tokens, range(len(tokens))), attend)
        return logits(self.w, x[-1:])[0]

    def generate(self, prompt: list[int], source: list[int], number: int) -> tuple[list[int], list[Array]]:
        """The next tokens, and the scores that they were the best of."""
        tokens, scores, states = list(prompt), [], self.encode(source) if source else None
        for _ in range(number):
            scores.append(self.scores(tokens, states))
            tokens.append(int(scores[-1].argmax()))
        return tokens[len(prompt) :], scores


# ---- the engine: pages, batches, metadata ----


class Pool:
    """Blocks of the layers' caches that share block tables, counted by owners."""

    def __init__(self, num_blocks: int, layouts: tuple[str | None, ...]) -> None:
        self.caches = [self._allocate(num_blocks, layout) for layout in layouts if layout]
        self.owners = [0] * num_blocks
        for block in range(num_blocks):
            self._poison(block)

    @staticmethod
    def _allocate(num_blocks: int, layout: str) -> Any:
        shape = CPUAttentionBackend.get_kv_cache_shape
        if layout == "flat":
            return np.empty(shape(num_blocks, BLOCK, KV_HEADS, SIZE), np.float32)
        half = shape(num_blocks, BLOCK, KV_HEADS, SIZE, layout="pair")
        return np.empty((2, *half), np.float32) if layout == "stacked" else tuple(np.empty((2, *half), np.float32))

    def _poison(self, block: int) -> None:
        for cache in self.caches:
            cache[0][block] = cache[1][block] = np.nan

    def take(self, number: int) -> list[int]:
        free = [block for block, owners in enumerate(self.owners) if not owners][-number:] if number else []
        assert len(free) == number, "the test's pool is too small"
        for block in free:
            self.owners[block] = 1
        return free

    def share(self, blocks: list[int]) -> list[int]:
        for block in blocks:
            self.owners[block] += 1
        return list(blocks)

    def release(self, blocks: list[int]) -> None:
        for block in blocks:
            self.owners[block] -= 1
            if not self.owners[block]:
                self._poison(block)

    def move(self, blocks: list[int], to: Pool) -> list[int]:
        moved = to.take(len(blocks))
        pairs = np.array([blocks, moved], np.int64).T
        for source, destination in zip(self.caches, to.caches, strict=True):
            CPUAttentionBackend.swap_blocks(source, destination, pairs)
        self.release(blocks)
        return moved

    def own(self, blocks: list[int], i: int) -> bool:
        """Copy on write: blocks[i] becomes this owner's alone. Says whether it had to be copied."""
        if self.owners[blocks[i]] == 1:
            return False
        (copy,) = self.take(1)
        CPUAttentionBackend.copy_blocks(self.caches, {blocks[i]: [copy]})
        self.release([blocks[i]])
        blocks[i] = copy
        return True


def slots(blocks: list[int], first: int, last: int) -> Array:
    j = np.arange(first, last)
    return np.array(blocks, np.int64)[j // BLOCK] * BLOCK + j % BLOCK


def table(rows: list[list[int]]) -> Array:
    """Entries past a request's blocks are out of every range."""
    filled = np.full((len(rows), max(map(len, rows), default=0) + 1), 2**31 - 1, np.int32)
    for row, blocks in zip(filled, rows, strict=True):
        row[: len(blocks)] = blocks
    return filled


@dataclass(eq=False)
class Request:
    name: str
    tokens: list[int]
    source: list[int]
    new_tokens: int
    prompt: int = 0
    computed: int = 0
    encoded: bool = False
    blocks: list[int] = field(default_factory=list)
    cross_blocks: list[int] = field(default_factory=list)
    scores: list[Array] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)


class Engine:
    def __init__(self, seed: int, paged: type[PagedAttention], encoder: bool) -> None:
        self.w, self.rng, self.encoder = Weights(seed, np.float32), np.random.default_rng(seed), encoder
        self.device, self.host = (Pool(n, LAYOUTS) for n in (56, 40))
        self.cross_device, self.cross_host = (Pool(n, ("pair",) * len(LAYERS)) for n in (30, 30))
        kinds = {"decoder": LAYERS, "encoder_decoder": ({},) * len(LAYERS), "encoder": ENCODER_LAYERS}
        self.impls = {
            (kind, i): self._layer(paged, kind, options)
            for kind, layers in kinds.items()
            for i, options in enumerate(layers)
        }
        scheduler = SimpleNamespace(chunked_prefill_enabled=True)
        spec, config = SimpleNamespace(block_size=BLOCK), SimpleNamespace(scheduler_config=scheduler)
        self.builder = CPUAttentionBackend.get_builder_cls()(spec, ["layers.0"], config, "cpu")
        self.running: list[Request] = []
        self.swapped: list[Request] = []
        self.done: list[Request] = []
        self.events: Counter[str] = Counter()

    @staticmethod
    def _layer(paged: type[PagedAttention], kind: str, options: dict[str, Any]) -> Any:
        arguments = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto"} | options
        impl_cls = CPUAttentionBackend.get_impl_cls()
        impl = impl_cls(HEADS, SIZE, SIZE**-0.5, KV_HEADS, attn_type=kind, **arguments)
        impl.paged_attn_impl = paged
        return impl

    # -- requests come and go --

    def join(self) -> None:
        """A new request; half of them begin like a running one and take over its blocks so far."""
        number, name = len(self.running) + len(self.swapped) + len(self.done), self.events["joined"]
        prompt = self.rng.integers(0, VOCABULARY, int(self.rng.integers(1, 45))).tolist()
        source = self.rng.integers(0, VOCABULARY, int(self.rng.integers(1, 70))).tolist() if self.encoder else []
        likes = [r for r in self.running if r.computed > 3 and len(r.tokens) < 60]
        if likes and self.rng.random() < 0.6:
            other = likes[int(self.rng.integers(len(likes)))]
            common = int(self.rng.integers(1, other.computed + 1))
            request = Request(f"r{name}", other.tokens[:common] + prompt[:20], other.source, 0)
            request.blocks = self.device.share(other.blocks[: -(-common // BLOCK)])
            request.cross_blocks = self.cross_device.share(other.cross_blocks)
            request.computed, request.encoded = common, True
            self.events["shared a prefix"] += 1
        else:
            request = Request(f"r{name}", prompt, source, 0)
            request.cross_blocks = self.cross_device.take(-(-len(source) // BLOCK))
        assert number == name
        request.new_tokens = int(self.rng.integers(1, 36))
        self.running.append(request)
        self.events["joined"] += 1

    def preempt(self, request: Request) -> None:
        request.blocks = self.device.move(request.blocks, self.host)
        request.cross_blocks = self.cross_device.move(request.cross_blocks, self.cross_host)
        self.running.remove(request)
        self.swapped.append(request)
        self.events["preempted"] += 1

    def resume(self, request: Request) -> None:
        request.blocks = self.host.move(request.blocks, self.device)
        request.cross_blocks = self.cross_host.move(request.cross_blocks, self.cross_device)
        self.swapped.remove(request)
        self.running.append(request)
        self.events["came back"] += 1

    def leave(self, request: Request) -> None:
        self.device.release(request.blocks)
        self.cross_device.release(request.cross_blocks)
        self.running.remove(request)
        self.done.append(request)

    def happen(self) -> None:
        """What happens before a step: by chance, within what the pools hold."""
        if len(self.running) + len(self.swapped) < 6 and self.rng.random() < 0.5:
            self.join()
        if self.running and len(self.swapped) < 3 and self.rng.random() < 0.25:
            self.preempt(self.running[int(self.rng.integers(len(self.running)))])
        if self.swapped and self.rng.random() < 0.3:
            self.resume(self.swapped[0])
        if len(self.running) > 2 and self.rng.random() < 0.05:
            self.leave(self.running[0])
            self.events["aborted"] += 1

    # -- one step --

    def step(self) -> None:
        budget, scheduled = 30, {}
        for request in self.running:
            number = min(len(request.tokens) - request.computed, 13, budget)
            if number:
                scheduled[request.name] = number
                budget -= number
        requests = {r.name: r for r in self.running}
        order = [str(name) for name in self.rng.permutation(list(scheduled))]
        if not order:
            return
        batch = SimpleNamespace(req_ids=order, num_reqs=len(order))

        def swap_states(i: int, j: int) -> None:
            order[i], order[j] = order[j], order[i]

        batch.swap_states = swap_states
        self.events["reordered"] += self.builder.reorder_batch(batch, SimpleNamespace(num_scheduled_tokens=scheduled))
        self._forward([(requests[name], scheduled[name]) for name in order])

    def _forward(self, batch: list[tuple[Request, int]]) -> None:
        for request, number in batch:
            missing = -(-(request.computed + number) // BLOCK) - len(request.blocks)
            request.blocks += self.device.take(missing)
            for i in range(request.computed // BLOCK, len(request.blocks)):
                self.events["copied a block"] += self.device.own(request.blocks, i)
        starts = np.concatenate([[0], np.cumsum([n for _, n in batch])]).astype(np.int32)
        new = [r for r, _ in batch if r.source and not r.encoded]
        common = self._common(batch, starts, new)
        metadata = self.builder.build(0, common)
        self._count(batch, metadata)
        states = self._encode(new) if new else None
        tokens = np.concatenate([r.tokens[r.computed : r.computed + n] for r, n in batch])
        positions = np.concatenate([np.arange(r.computed, r.computed + n) for r, n in batch])

        def attend(kind: str, i: int, project: Any) -> Array | None:
            q, impl = project("q", HEADS), self.impls[kind, i]
            if kind == "decoder":
                cache = self.device.caches[0 if impl.kv_sharing_target_layer_name else i]
                k, v = project("k", KV_HEADS), project("v", KV_HEADS)
                return np.asarray(impl.forward(None, q, k, v, cache, metadata))
            if not self.encoder:
                return None
            k = v = None
            if states is not None:
                k, v = (self.w.projection(f"{kind}.{i}.{name}", states, KV_HEADS) for name in "kv")
            return np.asarray(impl.forward(None, q, k, v, self.cross_device.caches[i], metadata))

        x = transformer(self.w, "decoder", embed(self.w, "decoder", tokens, positions), attend)
        for (request, number), scores in zip(batch, logits(self.w, x[starts[1:] - 1]), strict=True):
            request.computed += number
            request.encoded = True
            if request.computed == len(request.tokens):
                request.scores.append(scores)
                request.tokens.append(int(scores.argmax()))
                if len(request.tokens) - request.prompt == request.new_tokens:
                    self.leave(request)
                    self.events["finished"] += 1

    def _common(self, batch: list[tuple[Request, int]], starts: Array, new: list[Request]) -> Any:
        """vLLM's CommonAttentionMetadata."""
        lens = np.array([r.computed + n for r, n in batch], np.int32)
        common = SimpleNamespace(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=lens,
            seq_lens_cpu=lens,
            num_reqs=len(batch),
            num_actual_tokens=int(starts[-1]),
            max_query_len=int(np.diff(starts).max()),
            max_seq_len=int(lens.max()),
            block_table_tensor=table([r.blocks for r, _ in batch]),
            slot_mapping=np.concatenate([slots(r.blocks, r.computed, r.computed + n) for r, n in batch]),
            causal=True,
        )
        if self.encoder:
            common.encoder_seq_lens = np.array([len(r.source) for r, _ in batch], np.int32)
            common.cross_block_tables = table([r.cross_blocks for r, _ in batch])
            none = np.zeros(0, np.int64)
            common.cross_slot_mapping = np.concatenate([none, *(slots(r.cross_blocks, 0, len(r.source)) for r in new)])
        return common

    def _encode(self, new: list[Request]) -> Array:
        """Encoder states of the requests that have just joined, one after the other."""
        lens = [len(r.source) for r in new]
        metadata = CPUAttentionMetadata(
            0,
            0,
            0,
            encoder_seq_lens=lens,
            encoder_seq_lens_tensor=np.array(lens, np.int32),
            max_encoder_seq_len=max(lens),
            num_encoder_tokens=sum(lens),
        )

        def attend(kind: str, i: int, project: Any) -> Array:
            q, k, v = project("q", HEADS), project("k", KV_HEADS), project("v", KV_HEADS)
            return np.asarray(self.impls[kind, i].forward(None, q, k, v, None, metadata))

        tokens = np.concatenate([r.source for r in new])
        positions = np.concatenate([np.arange(n) for n in lens])
        return transformer(self.w, "encoder", embed(self.w, "encoder", tokens, positions), attend)

    def _count(self, batch: list[tuple[Request, int]], metadata: CPUAttentionMetadata) -> None:
        self.events["mixed"] += bool(metadata.num_prefills and metadata.num_decode_tokens)
        self.events["chunks of a prefill"] += sum(0 < r.computed < r.prompt - 1 for r, _ in batch)


EVENTS = ("joined", "finished", "preempted", "came back", "shared a prefix", "copied a block", "mixed", "reordered")


@pytest.mark.parametrize("encoder", [False, True], ids=["decoder-only", "encoder-decoder"])
@pytest.mark.parametrize("paged", PAGED)
def test_continuous_batching(paged: type[PagedAttention], encoder: bool) -> None:
    engine, dense = Engine(5, paged, encoder), Dense(5)
    for _ in range(STEPS):
        engine.happen()
        engine.step()
    for event in (*EVENTS, "chunks of a prefill"):
        assert engine.events[event] >= 3, engine.events
    assert engine.events["aborted"] >= 1
    requests = engine.done + engine.running + engine.swapped
    generated: list[int] = []
    for request in requests:
        tokens = request.tokens[request.prompt :]
        expected, scores = dense.generate(request.tokens[: request.prompt], request.source, len(tokens))
        assert tokens == expected, request.name
        for score, want in zip(request.scores, scores, strict=True):
            assert np.abs(score - want).max() < 1e-4
            assert np.diff(np.sort(want)[-2:]) > 1e-3, "two tokens are about as likely: choose another seed"
        generated += tokens
    assert len(requests) == engine.events["joined"]
    assert len(generated) > 150
    assert len(set(generated)) > 20
