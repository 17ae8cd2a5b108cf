# SPDX-License-Identifier: Apache-2.0
"""Paged attention in plain Python, made of three calls: gather_pages, matmul, softmax. To read and to experiment.

This is native/engines/onednn/segment.c without threads, buckets and packing. A request's query tokens are taken ROWS
query rows at a time (a decode step is a single token), its keys KEYS at a time:

    s = q k^T                   matmul      [rows, D] x [keys, D]^T
    softcap, ALiBi, bias, mask  NumPy
    p = softmax(s)              softmax     over these keys alone
    o = p v                     matmul      [rows, keys] x [keys, Dv]

Results over different keys merge by their log-sum-exps: with l = log(exp(l1) + exp(l2)),

    o = exp(l1 - l) o1 + exp(l2 - l) o2

(arXiv:2205.14135; the sink, arXiv:2309.17453, is one more l2 without an o2.) softmax keeps no log-sum-exp, but the
largest score s* tells it: p* = exp(s* - lse). No array grows with rows times context.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from cpu_attn import _check
from cpu_attn._arrays import Array as Memory
from cpu_attn._dtypes import DTYPES
from cpu_attn.plan import get_scheduler_metadata
from cpu_attn.primitives import gather_pages, matmul, softmax

Array = np.ndarray[Any, Any]
ROWS, KEYS = 256, 512
CHAIN = 128  # keys of one sum in float32: native/engines/onednn/segment.c


@dataclass(frozen=True)
class Tree:
    """mask [T, W]: tree_mask; left: keys that the window leaves before a token's own, -1: all."""

    mask: Array
    query_start_loc: Array
    seq_lens: Array
    left: int

    def tokens(self, r: int) -> slice:
        return slice(*self.query_start_loc[r : r + 2].tolist())

    def context(self, r: int) -> int:
        """Keys before those of request r's query tokens."""
        return int(self.seq_lens[r] - len(self.mask[self.tokens(r)]))

    @cached_property
    def depth(self) -> Array:
        """[T]: query tokens that each one sees besides itself."""
        depth = np.zeros(len(self.mask), np.int64)
        for r in range(len(self.seq_lens)):
            rows = self.mask[self.tokens(r)]
            bits = np.unpackbits(rows, axis=1, count=len(rows), bitorder="little")
            depth[self.tokens(r)] = bits.sum(axis=1, dtype=np.int64) - bits.diagonal()
        return depth

    def ranges(self) -> Array:
        """[T, 2]: first key and the one after its last, of which `shows` says more."""
        q_lens: Array = np.diff(self.query_start_loc)
        end = np.repeat(self.seq_lens, q_lens).astype(np.int64)
        context = end - np.repeat(q_lens, q_lens)
        low = np.clip(context + self.depth - self.left, 0, context) if self.left >= 0 else np.zeros_like(end)
        return np.stack([low, end], axis=1)

    def shows(self, r: int, rows: slice, keys: Array) -> Array:
        """[n, keys]: which keys some tokens of request r see, of those in their range."""
        is_new, new = keys >= self.context(r), np.maximum(keys - self.context(r), 0)
        seen = self.mask[rows][:, new // 8] >> (new % 8).astype(np.uint8) & 1 == 1
        if self.left >= 0 and is_new.any():
            seen &= self.depth[rows, None] - self.depth[self.tokens(r)][new] <= self.left
        shown: Array = seen | np.logical_not(is_new)
        return shown


@dataclass(frozen=True)
class Step:
    """One call's arguments, checked, as NumPy views; caches [N, Hkv, B, width], so that kv_cache_layout is never NHD.
    sees [T, 2]: first key of a token and the one after its last; position [T]: where a token itself stands among its
    request's keys; chosen [R, Hkv, M]: blocks that count; attn_bias [R, Hq, Q, K]."""

    query: Array
    key_cache: Array
    value_cache: Array
    kv_dtypes: tuple[str, ...]
    head_size_v: int
    query_start_loc: Array
    block_table: Array
    isa: str
    scale: float
    kv_scales: tuple[float, float]
    softcap: float
    alibi_slopes: Array
    attn_bias: Array | None
    s_aux: Array
    position: Array
    sees: Array
    tree: Tree | None
    chosen: Array
    kv_cache_layout: str

    @property
    def group(self) -> int:
        """Query heads that read the same kv head."""
        return int(self.query.shape[1] // self.key_cache.shape[1])


def attention(
    query: Any,
    key_cache: Any,
    value_cache: Any,
    output: Any,
    query_start_loc: Any,
    seq_lens: Any,
    scale: float,
    causal: bool,
    alibi_slopes: Any,
    sliding_window: int | tuple[int, int],
    block_table: Any,
    softcap: float,
    s_aux: Any = None,
    dynamic_causal: Any = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    kv_cache_dtype: str = "auto",
    *,
    lse: Any = None,
    isa: str = "auto",
    mm_prefix_range: Mapping[int, Sequence[tuple[int, int]]] | None = None,
    document_start_loc: Mapping[int, Sequence[int]] | None = None,
    tree_mask: Any = None,
    selected_blocks: Any = None,
    attn_bias: Any = None,
    kv_cache_layout: str = "packed",
    mm_prefix_clamp_sliding_window: bool = False,
) -> Any:
    """:func:`cpu_attn.attention_with_kv_cache` without a plan: same arguments, shapes, dtypes, meaning and errors.

    isa: the one that the caches were written with. mm_prefix_range, document_start_loc, tree_mask,
    mm_prefix_clamp_sliding_window: those of :func:`cpu_attn.get_scheduler_metadata`. Runs on the calling thread, in
    float32 whatever the dtype; output and lse are written when all of it is done. UnavailableError where oneDNN is not
    there.
    """
    step, out, log = _checked(
        *(query, key_cache, value_cache, output, query_start_loc, seq_lens, scale, causal, alibi_slopes),
        sliding_window,
        *(block_table, softcap, s_aux, dynamic_causal),
        k_scale,
        v_scale,
        kv_cache_dtype,
        lse,
        isa,
        selected_blocks,
        attn_bias,
        {
            "mm_prefix_range": mm_prefix_range,
            "document_start_loc": document_start_loc,
            "tree_mask": tree_mask,
            "mm_prefix_clamp_sliding_window": mm_prefix_clamp_sliding_window,
        },
        kv_cache_layout,
    )
    result, result_lse = _every_request(step)
    out.numpy()[...] = result
    if log is not None:
        log.numpy()[...] = result_lse
    return output


def _visible(
    starts: Array, lens: Array, causal: bool, flags: Any, sliding_window: int | tuple[int, int]
) -> tuple[Array, Array]:
    """Positions and visible keys of all tokens: pos - left <= key <= pos + right, key <= pos where causal."""
    left, right = _check.window(sliding_window)
    q_lens: Array = starts[1:].astype(np.int64) - starts[:-1]
    ends = np.repeat(lens.astype(np.int64), q_lens)
    position = ends - np.repeat(starts[1:], q_lens) + np.arange(len(ends))
    past_only = np.repeat(np.full(len(lens), bool(causal)) if flags is None else flags.numpy() != 0, q_lens)
    low = np.maximum(0, position - left) if left >= 0 else np.zeros_like(position)
    high = np.minimum(ends, position + right + 1) if right >= 0 else ends
    high = np.where(past_only, np.minimum(high, position + 1), high)
    return position, np.stack([low, np.maximum(low, high)], axis=1)


def _with_masks(masks: _check.Masks, starts: Array, lens: Array, position: Array, sees: Array) -> Array:
    """sees [T, 2] with the spans that tokens lie in, and without others' documents."""
    low, high = sees.T.copy()
    for r, first, last in masks.spans.tolist():
        rows = slice(starts[r], starts[r + 1])
        inside = (first <= position[rows]) & (position[rows] <= last)
        if not masks.clamped:
            low[rows] = np.where(inside, np.minimum(low[rows], first), low[rows])
        high[rows] = np.where(inside, np.maximum(high[rows], min(lens[r], last + 1)), high[rows])
    for r in np.unique(masks.documents[:, 0]):
        rows = slice(starts[r], starts[r + 1])
        borders = np.append(masks.documents[masks.documents[:, 0] == r, 1], _check.INT32_MAX)
        own = np.searchsorted(borders, position[rows], "right")
        low[rows] = np.maximum(low[rows], borders[own - 1])
        high[rows] = np.minimum(high[rows], borders[own])
    return np.stack([low, high], axis=1)


def _chosen(selected: Memory | None, num_reqs: int, num_kv_heads: int, blocks: int) -> Array:
    """[R, Hkv, blocks]: does a block count?"""
    chosen = np.full((num_reqs, num_kv_heads, blocks + 1), selected is None)
    if selected is not None:
        named = selected.numpy().astype(np.int64)
        np.put_along_axis(chosen, np.where((named >= 0) & (named < blocks), named, blocks), True, axis=2)
    return chosen[:, :, :-1]


def _every_request(step: Step) -> tuple[Array, Array]:
    tokens, num_heads, _ = step.query.shape
    output = np.zeros((tokens, num_heads, step.head_size_v))
    lse = np.full((tokens, num_heads), -np.inf)
    at_once = max(1, ROWS // step.group)
    with np.errstate(all="ignore"):
        for r, (start, stop) in enumerate(pairwise(step.query_start_loc.tolist())):
            for first in range(start, stop, at_once):
                rows = slice(first, min(first + at_once, stop))
                output[rows], lse[rows] = _some_tokens(step, r, rows)
    return output, lse.T


def _some_tokens(step: Step, r: int, rows: slice) -> tuple[Array, Array]:
    """Output [n, Hq, Dv] and lse [n, Hq] of some of request r's tokens."""
    query = step.query[rows].astype(np.float32)
    n, num_heads, _ = query.shape
    output, lse = np.zeros((n, num_heads, step.head_size_v)), np.full((n, num_heads), -np.inf)
    for keys, key, value in _chunks(step, r, step.sees[rows]):
        seen = (step.sees[rows, :1] <= keys) & (keys < step.sees[rows, 1:])
        if step.tree:
            seen &= step.tree.shows(r, rows, keys)
        chosen = step.chosen[r][:, keys // step.key_cache.shape[2]]
        bias = _bias(step, r, rows, keys)
        for h in range(key.shape[1]):
            heads = slice(h * step.group, (h + 1) * step.group)
            part = _one_head(step, query[:, heads], key[:, h], value[:, h], seen & chosen[h], bias[:, heads])
            output[:, heads], lse[:, heads] = _merge(output[:, heads], lse[:, heads], *part)
    return _merge(output, lse, np.zeros_like(output), np.broadcast_to(step.s_aux, lse.shape))


def _chunks(step: Step, r: int, sees: Array) -> Iterator[tuple[Array, Array, Array]]:
    """Key numbers [n], K [n, Hkv, D] and V [n, Hkv, Dv] in float32, of all that some token sees and some head has
    chosen, KEYS at a time."""
    block_size, start = step.key_cache.shape[2], int(sees[:, 0].min())
    end = min(int(sees[:, 1].max()), step.block_table.shape[1] * block_size)
    seen = np.arange(start // block_size, -(-end // block_size))
    blocks, at_once = seen[step.chosen[r][:, seen].any(axis=0)], max(1, KEYS // block_size)
    common: Any = {"isa": step.isa, "dtype": step.query.dtype, "kv_cache_layout": step.kv_cache_layout}
    for some in (blocks[i : i + at_once] for i in range(0, len(blocks), at_once)):
        keys = (some[:, None] * block_size + np.arange(block_size)).reshape(-1)
        keys, pages = keys[keys < end], step.block_table[r, some]
        k_dtype, v_dtype = ({**common, "kv_cache_dtype": kv} for kv in step.kv_dtypes)
        key = gather_pages(step.key_cache, pages, len(keys), head_size=step.query.shape[2], **k_dtype)
        value = gather_pages(step.value_cache, pages, len(keys), head_size=step.head_size_v, value=True, **v_dtype)
        key, value = (x.astype(np.float32) * np.float32(s) for x, s in zip((key, value), step.kv_scales, strict=True))
        for part in (slice(i, i + KEYS) for i in range(int(np.searchsorted(keys, start)), len(keys), KEYS)):
            yield keys[part], key[part], value[part]


def _bias(step: Step, r: int, rows: slice, keys: Array) -> Array:
    """[n, Hq, keys]: what ALiBi and attn_bias add to logits."""
    distance = (keys - step.position[rows, None]).astype(np.float32)
    bias: Array = step.alibi_slopes[:, None] * distance[:, None]
    if step.attn_bias is not None:
        first = rows.start - step.query_start_loc[r]
        bias = bias + step.attn_bias[r][:, first : first + len(distance), keys].swapaxes(0, 1)
    return bias


def _one_head(step: Step, query: Array, key: Array, value: Array, mask: Array, bias: Array) -> tuple[Array, Array]:
    """Output [n, group, Dv] and lse [n, group] over these keys alone. query [n, group, D], key [keys, D],
    value [keys, Dv], mask [n, keys], bias [n, group, keys]."""
    n, group, head_size = query.shape
    product, _ = matmul(query.reshape(n * group, head_size) * np.float32(step.scale), key, transpose_b=True)
    s = product.reshape(n, group, -1)
    if step.softcap > 0:
        s = np.float32(step.softcap) * np.tanh(s / np.float32(step.softcap))
    s = np.where(mask[:, None], s + bias, np.float32(-np.inf))
    p, _ = softmax(s)
    largest = s.argmax(axis=2)[:, :, None]
    top, p_top = (np.take_along_axis(x, largest, axis=2)[:, :, 0].astype(np.float64) for x in (s, p))
    lse = np.where(top == -np.inf, -np.inf, top - np.log(p_top))
    return _weighted_sum(p, value, mask), lse


def _weighted_sum(p: Array, value: Array, mask: Array) -> Array:
    """p [n, group, keys] times value [keys, Dv]. A weight of 0 does not hide NaN or inf: a key that holds one and
    that not all rows see is left out of the product and added to the rows that see it."""
    n, group, num_keys = p.shape
    odd = np.logical_not(mask.all(axis=0) | np.isfinite(value).all(axis=1))
    weights, known = p.reshape(n * group, num_keys), np.where(odd[:, None], np.float32(0), value)
    chains = (slice(i, i + CHAIN) for i in range(0, num_keys, CHAIN))
    output: Array = np.sum([matmul(weights[:, c], known[c])[0] for c in chains], axis=0).reshape(n, group, -1)
    for j in np.flatnonzero(odd):
        output[mask[:, j]] += p[mask[:, j], :, j, None] * value[j]
    return output


def _merge(output: Array, lse: Array, other: Array, other_lse: Array) -> tuple[Array, Array]:
    total = np.logaddexp(lse, other_lse)
    weight, other_weight = (np.where(total == -np.inf, 0.0, np.exp(x - total))[..., None] for x in (lse, other_lse))
    return weight * output + other_weight * other, total


# ---- checks: those of attention_with_kv_cache, which has a plan to check against ----


def _checked(
    query: Any,
    key_cache: Any,
    value_cache: Any,
    output: Any,
    query_start_loc: Any,
    seq_lens: Any,
    scale: float,
    causal: bool,
    alibi_slopes: Any,
    sliding_window: int | tuple[int, int],
    block_table: Any,
    softcap: float,
    s_aux: Any,
    dynamic_causal: Any,
    k_scale: float,
    v_scale: float,
    kv_cache_dtype: str,
    lse: Any,
    isa: str,
    selected_blocks: Any,
    attn_bias: Any,
    masks: dict[str, Any],
    kv_cache_layout: str,
) -> tuple[Step, Memory, Memory | None]:
    q = _check.array("query", query, _check.FLOATS, [("T", None), ("num_heads", None), ("head_size", None)])
    kvs = _check.kv_dtypes(kv_cache_dtype, q.dtype)
    layout = _check.kv_cache_layout(kv_cache_layout, kvs)
    kc, vc = _check.caches(key_cache, value_cache, kvs, None, layout)
    num_blocks, num_kv_heads, block_size = _check.cache_sizes(kc.shape, layout)
    table = _check.array("block_table", block_table, ["int32"], [("num_reqs", None), ("blocks", None)])
    (tokens, num_heads, head_size), num_reqs = q.shape, table.shape[0]
    out = _check.array("output", output, [q.dtype], [("T", tokens), ("num_heads", num_heads), ("head_size_v", None)])
    log = None if lse is None else _check.array("lse", lse, ["float32"], [("num_heads", num_heads), ("T", tokens)])
    starts, lens, flags = _check.lengths(num_reqs, query_start_loc, seq_lens, dynamic_causal)
    selected = _check.selected_blocks(selected_blocks, num_reqs, num_kv_heads)
    given: dict[str, Memory | None] = {"block_table": table, "query_start_loc": starts, "seq_lens": lens}
    given |= {"dynamic_causal": flags, "selected_blocks": selected}
    table, starts, lens = _check.copied(table), _check.copied(starts), _check.copied(lens)
    flags, selected = flags and _check.copied(flags), selected and _check.copied(selected)
    plan = get_scheduler_metadata(
        *(num_reqs, num_heads, num_kv_heads, head_size, lens.numpy(), q.dtype, starts.numpy(), causal, sliding_window),
        isa=isa,
        kv_cache_dtype=kv_cache_dtype,
        dynamic_causal=None if flags is None else flags.numpy(),
        head_size_v=out.shape[2],
        engine="reference",
        **masks,
        kv_cache_layout=layout,
    )
    if plan.num_tokens != tokens:
        raise ValueError(f"query: axis 0 is {tokens}, expected query_start_loc[-1] = {plan.num_tokens}")
    for name, cache, kv, size in (("key_cache", kc, kvs[0], head_size), ("value_cache", vc, kvs[1], out.shape[2])):
        _check.cache_width(name, cache, plan._shape.isa, plan._shape.dtype, kv, size, layout)
    _check.block_table(plan, table, num_blocks, block_size, selected)
    inputs: dict[str, Memory | None] = {"query": q, "key_cache": kc, "value_cache": vc, **given}
    bias = inputs["attn_bias"] = _check.attn_bias(plan, attn_bias)
    _check.disjoint("output", _check.writable("output", out), inputs)
    if log is not None:
        _check.disjoint("lse", _check.writable("lse", log), {**inputs, "output": out})
    position, sees = _visible(starts.numpy(), lens.numpy(), causal, flags, sliding_window)
    found, tree = _check.masks(num_reqs, **masks), None
    if found and found.tree is not None:
        if alibi_slopes is not None:
            raise ValueError("alibi_slopes: do not go with tree_mask, where a token's place is not its position")
        tree = Tree(found.tree.numpy(), starts.numpy(), lens.numpy(), _check.window(sliding_window)[0])
        sees = tree.ranges()
    elif found:
        sees = _with_masks(found, starts.numpy(), lens.numpy(), position, sees)
    slopes = _check.small_floats("alibi_slopes", alibi_slopes, ["float32"], num_heads)
    sinks = _check.small_floats("s_aux", s_aux, _check.FLOATS, num_heads)
    kv_scales = _check.scales(k_scale, v_scale, kvs)
    factor, cap = _check.logit_factors(scale, softcap, kv_scales[0])
    step = Step(
        query=q.numpy(),
        key_cache=_heads_first(kc, kvs[0], layout),
        value_cache=_heads_first(vc, kvs[1], layout),
        kv_dtypes=kvs,
        head_size_v=out.shape[2],
        query_start_loc=starts.numpy(),
        block_table=table.numpy(),
        isa=plan.isa,
        scale=factor,
        kv_scales=kv_scales,
        softcap=cap,
        alibi_slopes=np.zeros(num_heads, np.float32) if slopes is None else slopes,
        attn_bias=None if bias is None else np.broadcast_to(bias.numpy(), (num_reqs, num_heads, *bias.shape[2:])),
        s_aux=np.full(num_heads, -np.inf) if sinks is None else sinks.astype(np.float64),
        position=position,
        sees=sees,
        tree=tree,
        chosen=_chosen(selected, num_reqs, num_kv_heads, table.shape[1]),
        kv_cache_layout="HND" if layout == "NHD" else layout,
    )
    return step, out, log


def _heads_first(cache: Memory, kv: str, layout: str) -> Array:
    pages = cache.numpy().view(DTYPES[_check.memory(kv)[0]])
    return pages.swapaxes(1, 2) if layout == "NHD" else pages
