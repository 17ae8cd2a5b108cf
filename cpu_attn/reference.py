# SPDX-License-Identifier: Apache-2.0
"""This module defines attention over a paged cache in float64 NumPy. It is slow and short, and every engine is measured
against it.

Query token i of a request with q_len query tokens and seq_len keys stands at position
``pos = seq_len - q_len + i``. Its logit for key j is

    s = scale * q.k                    query head h reads kv head h // (num_heads // num_kv_heads)
    s = softcap * tanh(s / softcap)    if softcap > 0
    s = s + slope_h * (j - pos)        if alibi_slopes are given (Press et al., arXiv:2108.12409)
    s = s + attn_bias[r, h, i, j]      if it is given

It sees key j where ``pos - left <= j <= pos + right``, a side of -1 being open, and, if causal, ``j <= pos``; with an
``attention_chunk_size`` of c only where, besides, ``j // c == pos // c``.
Besides, where given: it sees the keys of the span of ``mm_prefix_range`` that pos lies in (with
``mm_prefix_clamp_sliding_window``: those with ``j >= pos - left``); of all these only those of the document of
``document_start_loc`` that pos lies in. With a ``tree_mask`` the q_len newest keys are the query tokens', of which it
sees what the mask says; d of them besides itself: for the window it then stands at ``pos = seq_len - q_len + d``, and
the key of another token at that token's.
Where blocks are selected it sees of these keys the ones with ``j // block_size`` among the blocks of its request and kv
head, or query head; where tokens are selected, those among its own.
With m the largest visible logit, the sink s_aux[h] (arXiv:2309.17453) among them,

    l = sum_j exp(s_j - m) + exp(s_aux_h - m)    output = sum_j exp(s_j - m) / l * v_j    lse = m + log(l)

A row that sees nothing has output 0 and lse = -inf, or the sink. A number below 2^-126 counts as 0 where it is given
and where it results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]
Window = int | tuple[int, int]

# A request may have this relative RMS error, by dtype of query and cache.
BUDGET = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 4e-3}

# This bounds |lse - expected| / max(1, |expected|). Whoever merges partial results by lse multiplies them by exp(lse),
# so an error e in lse is a relative error e in the output: it gets the output's budget. Past 1 it grows with the
# float32 that holds it.
LSE_BUDGET = BUDGET

_SMALLEST = 2.0**-126  # the smallest normal number of float32 and bfloat16


def widened(x: Any) -> Float64:
    """Gives x in float64, and 0 where a number is below 2^-126."""
    wide = np.asarray(x).astype(np.float64)
    return np.where(np.abs(wide) < _SMALLEST, 0.0, wide)


def window_sides(sliding_window: Window, causal: bool) -> tuple[int, int]:
    """Gives how many keys are visible to the left and to the right of a query token, -1 for all. An int w counts the
    token itself."""
    if not isinstance(sliding_window, int | np.integer):
        left, right = (int(side) for side in sliding_window)
        if min(left, right) < -1:
            raise ValueError(f"sliding_window {sliding_window}: a side is -1 (open) or at least 0")
        return left, right
    if sliding_window == -1:
        return -1, -1
    if sliding_window < 1:
        raise ValueError(f"sliding_window {sliding_window}: -1 (off) or at least 1")
    return int(sliding_window) - 1, -1 if causal else int(sliding_window) - 1


def visible(
    q_len: int,
    seq_len: int,
    causal: bool,
    sliding_window: Window = -1,
    spans: Sequence[tuple[int, int]] = (),
    documents: Sequence[int] = (),
    tree: NDArray[np.bool_] | None = None,
    clamped: bool = False,
    chunk_size: int | None = None,
) -> NDArray[np.bool_]:
    """Says which keys the query tokens see: [q_len, seq_len]. spans: first and last key of each; documents: where they
    start; tree [q_len, q_len]: which query tokens see the key of which; clamped: whether spans keep to the left side of
    the window; chunk_size: attention_chunk_size."""
    if tree is not None:
        return _visible_tree(seq_len, window_sides(sliding_window, True)[0], tree)
    position, key = seq_len - q_len + np.arange(q_len)[:, None], np.arange(seq_len)
    mask = _visible_range(q_len, seq_len, causal, sliding_window)
    if chunk_size is not None:
        mask &= key // chunk_size == position // chunk_size
    left = window_sides(sliding_window, causal)[0]
    kept = key >= position - left if clamped and left >= 0 else np.True_
    for start, end in spans:
        mask |= (start <= position) & (position <= end) & (start <= key) & (key <= end) & kept
    if len(documents):
        mask &= np.searchsorted(documents, position, "right") == np.searchsorted(documents, key, "right")
    return mask


def _visible_tree(seq_len: int, left: int, tree: NDArray[np.bool_]) -> NDArray[np.bool_]:
    q_len = len(tree)
    context = seq_len - q_len
    depth = (tree & ~np.eye(q_len, dtype=np.bool_)).sum(axis=1)
    position = np.concatenate([np.arange(context), context + depth])
    mask = np.concatenate([np.ones((q_len, context), np.bool_), tree], axis=1)
    if left >= 0:
        mask &= position >= position[context:, None] - left
    return mask


def _visible_range(q_len: int, seq_len: int, causal: bool, sliding_window: Window) -> NDArray[np.bool_]:
    left, right = window_sides(sliding_window, causal)
    distance = np.arange(seq_len) - (seq_len - q_len + np.arange(q_len))[:, None]
    mask = np.ones((q_len, seq_len), np.bool_)
    if left >= 0:
        mask &= distance >= -left
    if right >= 0:
        mask &= distance <= right
    if causal:
        mask &= distance <= 0
    return mask


def unpack_tree(rows: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Gives one request's rows of a tree_mask as [q_len, q_len]."""
    return np.unpackbits(rows, axis=1, count=len(rows), bitorder="little").astype(np.bool_)


def _weighted_sum(p: Float64, value: Float64, mask: NDArray[np.bool_]) -> Float64:
    """Multiplies p [q_len, group, seq_len] by value [seq_len, Dv]; a NaN or inf in value reaches only the rows that see
    it."""
    finite = np.isfinite(value)
    out = p @ np.where(finite, value, 0.0)
    for j in np.flatnonzero(~finite.all(axis=1) & mask.any(axis=0)):
        out[mask[:, j]] += p[mask[:, j], :, j, None] * np.where(finite[j], 0.0, value[j])
    return out


def _one_head(
    query: Float64,
    key: Float64,
    value: Float64,
    mask: NDArray[np.bool_],
    scale: float,
    slopes: Float64 | None,
    bias: Float64 | None,
    softcap: float,
    sinks: Float64,
) -> tuple[Float64, Float64]:
    """Computes one kv head of one request from query [q_len, group, D] and bias [q_len, group, seq_len], and gives
    output [q_len, group, Dv] and lse [q_len, group]."""
    q_len, seq_len = mask.shape
    s = scale * (query @ key.T)
    if softcap > 0:
        s = softcap * np.tanh(s / softcap)
    if slopes is not None:
        distance = np.arange(seq_len) - (seq_len - q_len + np.arange(q_len))[:, None]
        s = s + slopes[:, None] * distance[:, None]
    if bias is not None:
        s = s + bias
    s = np.where(mask[:, None], s, -np.inf)
    m = np.maximum(s.max(axis=2, initial=-np.inf), sinks)
    shift = np.where(m == -np.inf, 0.0, m)[:, :, None]
    p = np.exp(s - shift)
    total = p.sum(axis=2) + np.exp(sinks - shift[:, :, 0])
    lse = shift[:, :, 0] + np.log(total)
    return _weighted_sum(p / np.where(total == 0, 1.0, total)[:, :, None], value, mask), lse


def _chosen(lists: NDArray[np.int32], own: NDArray[np.int64], seq_len: int, block_size: int) -> NDArray[np.bool_]:
    """Says which keys are in blocks that a token's own list has: [n, seq_len]. lists [.., S] of blocks, own [n]."""
    block, (which, at) = np.arange(seq_len) // block_size, np.unique(own, return_inverse=True)
    found = np.array([np.isin(block, lists[i]) for i in which], np.bool_).reshape(len(which), seq_len)
    chosen: NDArray[np.bool_] = found[at]
    return chosen


def attention(
    query: NDArray[Any],
    key: Sequence[NDArray[Any]],
    value: Sequence[NDArray[Any]],
    query_start_loc: NDArray[np.int32],
    seq_lens: NDArray[np.int32],
    scale: float,
    causal: bool = True,
    alibi_slopes: NDArray[Any] | None = None,
    sliding_window: Window = -1,
    softcap: float = 0.0,
    s_aux: NDArray[Any] | None = None,
    dynamic_causal: NDArray[Any] | None = None,
    *,
    mm_prefix_range: Mapping[int, Sequence[tuple[int, int]]] | None = None,
    document_start_loc: Mapping[int, Sequence[int]] | None = None,
    tree_mask: NDArray[np.uint8] | None = None,
    mm_prefix_clamp_sliding_window: bool = False,
    selected_blocks: NDArray[np.int32] | None = None,
    block_size: int = 16,
    attn_bias: NDArray[np.float32] | None = None,
    selected_tokens: NDArray[np.int32] | None = None,
    query_block_size: int | None = None,
    attention_chunk_size: int | None = None,
) -> tuple[Float64, Float64]:
    """Computes the definition above, request by request.

    query [T, Hq, D]; key and value: for each request [seq_len, Hkv, D] and [seq_len, Hkv, Dv] as the cache holds
    them, already rounded to its dtype. query_start_loc [R+1], seq_lens [R], alibi_slopes and s_aux [Hq].
    dynamic_causal [R] takes the place of causal, request by request. sliding_window: keys that a token sees, itself
    among them (-1: all; to both sides where not causal), or (left, right).
    mm_prefix_range, document_start_loc, tree_mask, mm_prefix_clamp_sliding_window, attention_chunk_size: those of
    :func:`cpu_attn.get_scheduler_metadata`. selected_blocks [R, Hkv or Hq, S]: of block_size keys each, -1 is none;
    None: all. attn_bias [R or 1, Hq or 1, Q, K]. selected_tokens [T, S]: keys, -1 is none; None: all.
    query_block_size: the first axis of selected_blocks counts query blocks of so many tokens.

    Returns output [T, Hq, Dv] and lse [Hq, T] (natural log), float64. NaN and inf reach the rows that see them only.
    Raises ValueError for a sliding_window that means nothing.
    """
    num_tokens, num_heads, _ = query.shape
    head_size_v = value[0].shape[2] if len(value) else query.shape[2]
    output = np.zeros((num_tokens, num_heads, head_size_v))
    lse = np.full((num_heads, num_tokens), -np.inf)
    q64 = widened(query)
    slopes = None if alibi_slopes is None else widened(alibi_slopes)
    sinks = np.full(num_heads, -np.inf) if s_aux is None else widened(s_aux)
    bias = None
    if attn_bias is not None:
        bias = np.broadcast_to(widened(attn_bias), (len(seq_lens), num_heads, *attn_bias.shape[2:]))
    lists = 0  # how many lists of selected_blocks earlier requests have
    with np.errstate(all="ignore"):
        for r, seq_len in enumerate(seq_lens):
            rows = slice(int(query_start_loc[r]), int(query_start_loc[r + 1]))
            see_past_only = causal if dynamic_causal is None else bool(dynamic_causal[r])
            q_len = rows.stop - rows.start
            own = lists + np.arange(q_len) // (query_block_size or max(q_len, 1))
            lists += 1 if query_block_size is None else -(-q_len // query_block_size)
            mask = visible(
                q_len,
                int(seq_len),
                see_past_only,
                sliding_window,
                (mm_prefix_range or {}).get(r, ()),
                (document_start_loc or {}).get(r, ()),
                None if tree_mask is None else unpack_tree(tree_mask[rows]),
                mm_prefix_clamp_sliding_window,
                attention_chunk_size,
            )
            for i, keys in enumerate([] if selected_tokens is None else selected_tokens[rows]):
                mask[i] &= np.isin(np.arange(int(seq_len)), keys)
            num_kv_heads = key[r].shape[1]
            selecting = num_kv_heads if selected_blocks is None else selected_blocks.shape[1]  # or num_heads
            group = num_heads // selecting
            for h in range(selecting):
                heads, kv_head = slice(h * group, (h + 1) * group), h * num_kv_heads // selecting
                chosen = mask
                if selected_blocks is not None:
                    chosen = mask & _chosen(selected_blocks[:, h], own, int(seq_len), block_size)
                output[rows, heads], row_lse = _one_head(
                    q64[rows, heads],
                    widened(key[r][:, kv_head]),
                    widened(value[r][:, kv_head]),
                    chosen,
                    scale,
                    None if slopes is None else slopes[heads],
                    None if bias is None else bias[r, heads, :q_len, : int(seq_len)].swapaxes(0, 1),
                    softcap,
                    sinks[heads],
                )
                lse[heads, rows] = row_lse.T
    return widened(output), lse


def index_scores(query: NDArray[Any], key: NDArray[Any], weights: NDArray[np.float32], scale: float) -> Float64:
    """Gives [n, S], an indexer's scores sum_h weights_h * relu(scale * q_h.k) of keys [S, D] for query tokens [n, H, D]
    and weights [n, H] of one request."""
    products = scale * query.astype(np.float64) @ key.astype(np.float64).T
    scores: Float64 = np.einsum("nh,nhs->ns", weights.astype(np.float64), np.maximum(products, 0))
    return scores


def rotary(
    x: NDArray[Any],
    positions: NDArray[np.int64],
    cos_sin_cache: NDArray[Any],
    is_neox: bool = True,
    weight: NDArray[Any] | None = None,
    eps: float = 1e-6,
) -> Float64:
    """Rotates x [T, H, D]: divides each head by its RMS and multiplies it by weight [D] if there is one
    (arXiv:1910.07467), then turns its pairs of dimensions, as complex numbers, by the angles of its token's row
    (arXiv:2104.09864)."""
    turned = x.astype(np.float64)
    if weight is not None:
        turned = turned / np.sqrt(np.mean(turned**2, axis=2, keepdims=True) + eps) * weight.astype(np.float64)
    rows = cos_sin_cache.astype(np.float64)[positions][:, None]
    half = rows.shape[2] // 2
    first, second = (slice(half), slice(half, 2 * half)) if is_neox else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    pairs = (turned[..., first] + 1j * turned[..., second]) * (rows[..., :half] + 1j * rows[..., half:])
    turned[..., first], turned[..., second] = pairs.real, pairs.imag
    return turned


def relative_rms(actual: NDArray[Any], expected: Float64, query_start_loc: NDArray[np.int32]) -> Float64:
    """Gives [R]: the RMS of actual - expected over the RMS of expected, for each request; 0 for a request without query
    tokens.

    The divisor is never less than the smallest normal number of actual's dtype: below it a float has no relative
    precision to give. So where all of expected is 0, anything but (nearly) 0 is a huge error.
    """
    floor = float(ml_dtypes.finfo(actual.dtype).smallest_normal)
    errors = np.zeros(len(query_start_loc) - 1)
    for r in range(len(errors)):
        rows = slice(int(query_start_loc[r]), int(query_start_loc[r + 1]))
        want = expected[rows]
        if want.size:
            got = actual[rows].astype(np.float64)
            errors[r] = rms(got - want) / max(rms(want), floor)
    return errors


def rms(x: Float64) -> float:
    """Gives the root mean square. It scales by the largest magnitude first, as squares of subnormals would vanish."""
    largest = float(np.abs(x).max())
    return largest * float(np.sqrt(np.mean(np.square(x / largest)))) if largest > 0 else largest
