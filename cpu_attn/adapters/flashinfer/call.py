# SPDX-License-Identifier: Apache-2.0
"""This module has what FlashInfer's functions have in common: a step with its plans, what becomes of q.k, factors of
queries, keys and values, and the call itself.

Of everything that these functions compute:

- Queries are float32, float16 or bfloat16, or float8, which is converted exactly to the dtype of the output, or to
  float16 if that is float8, too. Keys and values have the dtype of the queries, or are float8.
- An output of float8 is rounded from float32, once; what is too large becomes the largest number.
- With ALIBI, slope * (key's position - query's position) is added to the logits, behind logits_soft_cap. Slopes are
  those of the ALiBi paper, a geometric sequence, with every second one of a sequence twice as dense where the number of
  heads is no power of 2.
- With ROPE_LLAMA, queries and cached keys are rotated by their positions, in float32, and rounded to the dtype of the
  queries. Keys and values of the step are copied for it, in every call.
- A factor of queries or keys multiplies the logits, one of values the output: in float32, before the one rounding. Of
  one number for each head it is applied to the queries instead, which float8 keys leave in float32.
- lse is float32, in base 2, -inf where a row sees no key.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cpu_attn import _check, ops
from cpu_attn.flashinfer.arguments import choice
from cpu_attn.flashinfer.norm import FLOATS, put
from cpu_attn.flashinfer.rope import frequencies, rotated
from cpu_attn.plan import SchedulerMetadata, get_scheduler_metadata
from cpu_attn.torch.entry import RefusedError, axes, optional, tensors, written
from cpu_attn.torch.packed import Int32, Part

LOG2E = math.log2(math.e)
# These are torch's dtypes of caches that are not those of queries.
_FP8 = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}
PLANNED = {
    "num_heads": "num_qo_heads",
    "sliding_window": "window_left",
    "isa": "CPU_ATTN_ISA",
}
RUN = {
    "query": "q",
    "output": "out",
    "s_aux": "sinks",
    "attn_bias": "custom_mask",
    "scale": "sm_scale",
    "softcap": "logits_soft_cap",
    "isa": "CPU_ATTN_ISA",
}
# These are the names of :class:`Sequences` where a call takes its sizes from tensors q, k and v.
ALONE = RUN | {
    "key_cache": "k",
    "value_cache": "v",
    "q_data_type": "q",
    "kv_data_type": "k",
    "o_data_type": "o_dtype",
}


def dtype_of(name: str, x: Any, *kinds: torch.dtype) -> torch.dtype:
    """Gives a dtype of torch that may be a name."""
    found = getattr(torch, x.removeprefix("torch."), None) if isinstance(x, str) else x
    kinds = kinds or (*FLOATS, *_FP8)
    if not isinstance(found, torch.dtype) or found not in kinds:
        raise TypeError(f"{name}: {x} is none of {', '.join(str(k).removeprefix('torch.') for k in kinds)}")
    return found


def fp8_name(dtype: torch.dtype) -> str | None:
    """Gives the ``kv_cache_dtype`` of caches of float8, else None."""
    return _FP8.get(dtype)


@dataclass(frozen=True)
class Logits:
    """Says what becomes of q.k. window_left: -1 is open; scale: None is 1 / sqrt(D)."""

    scale: float | None
    causal: bool
    window_left: int
    softcap: float
    pos_encoding_mode: str = "NONE"
    rope_scale: float = 1.0
    rope_theta: float = 1e4


def logits_of(
    sm_scale: Any,
    causal: Any,
    window_left: Any,
    logits_soft_cap: Any,
    pos_encoding_mode: Any = "NONE",
    rope_scale: Any = None,
    rope_theta: Any = None,
) -> Logits:
    low = _check.TINY
    return Logits(
        None if sm_scale is None else _check.number("sm_scale", sm_scale),
        _check.boolean("causal", causal),
        _check.integer("window_left", window_left, -1),
        max(0.0, 0.0 if logits_soft_cap is None else _check.number("logits_soft_cap", logits_soft_cap)),
        choice("pos_encoding_mode", pos_encoding_mode, "NONE", "ROPE_LLAMA", "ALIBI"),
        1.0 if rope_scale is None else _check.number("rope_scale", rope_scale, low),
        1e4 if rope_theta is None else _check.number("rope_theta", rope_theta, low),
    )


def alibi_slopes(num_heads: int) -> Any:
    """Gives ALiBi's slopes for so many heads, float32 [Hq] (arXiv:2108.12409)."""
    whole = 1 << (num_heads.bit_length() - 1)
    powers = [8 * i / whole for i in range(1, whole + 1)]
    powers += [4 * i / whole for i in range(1, 2 * (num_heads - whole), 2)]
    return np.exp2(-np.array(powers)).astype(np.float32)


@dataclass(frozen=True)
class Factors:
    """Holds factors of queries, keys, values: a float, or float32 [heads]."""

    q: Any = 1.0
    k: Any = 1.0
    v: Any = 1.0

    def times(self, other: Factors) -> Factors:
        """Gives the products of these factors and others."""
        return Factors(self.q * other.q, self.k * other.k, self.v * other.v)


def _factor(name: str, x: Any, num_heads: int) -> Any:
    if x is None:
        return 1.0
    if not isinstance(x, torch.Tensor):
        return _check.number(name, x)
    (x,) = tensors(**{name: x})
    if x.numel() == 1:
        return _check.number(name, x.item())
    axes(name, x, heads=num_heads)
    if not bool(x.isfinite().all()):
        raise ValueError(f"{name}: a number is not finite")
    return x.float()


class Sequences:
    """Holds the lengths of a step, and its plans. starts: where the query tokens of sequences start, [B + 1]; lens: how
    many keys each has, [B]; heads: Hq, Hkv; sizes: D of keys, D of values, or None for the same; dtypes: of queries,
    pages, outputs, the latter None for that of queries."""

    def __init__(
        self,
        starts: Int32,
        lens: Int32,
        heads: tuple[Any, Any],
        sizes: tuple[Any, Any],
        dtypes: tuple[Any, Any, Any],
        split: bool = True,
    ):
        self.starts, self.lens, self.split = starts.copy(), lens.copy(), split  # callers may write to theirs
        self.num_heads = _check.integer("num_qo_heads", heads[0], 1, _check.MAX_SIZE)
        self.num_kv_heads = _check.integer("num_kv_heads", heads[1], 1, _check.MAX_SIZE)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads: {heads[1]} does not divide num_qo_heads = {heads[0]}")
        self.head_size = _check.integer("head_dim", sizes[0], 1, _check.MAX_SIZE)
        self.head_size_v = (
            self.head_size if sizes[1] is None else _check.integer("head_dim_vo", sizes[1], 1, _check.MAX_SIZE)
        )
        self.q_dtype = dtype_of("q_data_type", dtypes[0])
        self.kv_dtype = self.q_dtype if dtypes[1] is None else dtype_of("kv_data_type", dtypes[1])
        default = self.q_dtype if self.q_dtype in FLOATS else torch.float16
        self.o_dtype = default if dtypes[2] is None else dtype_of("o_data_type", dtypes[2])
        wide = self.o_dtype if self.o_dtype in FLOATS else torch.float16
        self.dtype = self.q_dtype if self.q_dtype in FLOATS else wide  # of the products
        if self.kv_dtype not in _FP8 and self.kv_dtype != self.dtype:
            names = [str(x).removeprefix("torch.") for x in (self.kv_dtype, self.dtype, *_FP8)]
            raise ValueError(
                f"kv_data_type: {names[0]}, expected {names[1]}, as q_data_type (data_type fills only what is None), "
                f"or {', '.join(names[2:])}"
            )
        self._plans: dict[Any, SchedulerMetadata] = {}

    def with_starts(self, starts: Any) -> Sequences:
        """Gives the same sequences with other query tokens."""
        sizes, dtypes = (self.head_size, self.head_size_v), (self.q_dtype, self.kv_dtype, self.o_dtype)
        heads = (self.num_heads, self.num_kv_heads)
        return Sequences(starts.astype(np.int32), self.lens, heads, sizes, dtypes, self.split)

    @property
    def num_tokens(self) -> int:
        return int(self.starts[-1])

    def plan(
        self, first: int, end: int, logits: Logits, layout: str, dtype: torch.dtype, kv_dtype: torch.dtype
    ) -> SchedulerMetadata:
        """Gives the plan of sequences [first, end), which is kept."""
        key = (first, end, logits.causal, logits.window_left, layout, dtype, kv_dtype)
        if key not in self._plans:
            starts = self.starts[first : end + 1]
            self._plans[key] = get_scheduler_metadata(
                *(end - first, self.num_heads, self.num_kv_heads, self.head_size, self.lens[first:end], dtype),
                *(starts - starts[0], logits.causal, (logits.window_left, -1)),
                enable_kv_split=self.split,
                kv_cache_dtype=_FP8.get(kv_dtype, "auto"),
                head_size_v=self.head_size_v,
                kv_cache_layout=layout,
            )
        return self._plans[key]

    def factors(self, q_scale: Any = None, k_scale: Any = None, v_scale: Any = None, names: str = "q_scale") -> Factors:
        """Checks factors; names: how the first of them is called, as the others are."""
        n = [names.replace("q", x) for x in "qkv"]
        return Factors(
            _factor(n[0], q_scale, self.num_heads),
            _factor(n[1], k_scale, self.num_kv_heads),
            _factor(n[2], v_scale, self.num_kv_heads),
        )

    def factors_of(self, args: tuple[Any, ...]) -> Factors:
        """Checks arguments for kernels of float8, which are scale_q, scale_k, scale_v or none."""
        if len(args) not in (0, 3):
            raise RefusedError(
                f"args: expected scale_q, scale_k, scale_v or none, got {len(args)}; no kernel is compiled at run time"
            )
        q, k, v = args or (None, None, None)
        return self.factors(q, k, v, "scale_q")

    def _queries(self, q: Any, factors: Factors) -> tuple[Tensor, float]:
        """Gives the queries in the dtype of the products, and a factor of the logits."""
        (q,) = tensors(q=q)
        axes("q", q, T=self.num_tokens, num_qo_heads=self.num_heads, head_dim=self.head_size)
        if q.dtype != self.q_dtype:
            names = (str(x).removeprefix("torch.") for x in (q.dtype, self.q_dtype))
            raise TypeError("q: dtype {}, expected {}".format(*names))
        by_head, scale = None, 1.0
        for x, repeat in ((factors.q, 1), (factors.k, self.num_heads // self.num_kv_heads)):
            if isinstance(x, float):
                scale *= x
            else:
                each = x.repeat_interleave(repeat)
                by_head = each if by_head is None else by_head * each
        if by_head is None:
            return (q if q.dtype == self.dtype else q.to(self.dtype)), scale
        dtype = torch.float32 if self.kv_dtype in _FP8 else self.dtype
        return (q.float() * by_head[:, None]).to(dtype), scale

    def _turned(self, query: Tensor, logits: Logits, layout: str, parts: Sequence[Part]) -> tuple[Tensor, list[Part]]:
        """Gives queries rotated by their positions, and a copy of all keys and values as NHD pages, rotated, in the
        dtype of the queries."""
        inv_freq = frequencies(self.head_size, logits.rope_scale, logits.rope_theta)
        q_lens = np.diff(self.starts)
        first = np.repeat(self.lens - self.starts[1:], q_lens)
        found: list[Part] = []
        for begin, end, key, value, table in parts:
            if layout == "HND":
                key, value = key.transpose(1, 2), value.transpose(1, 2)
            size = max(1, key.shape[1])
            counts = -(-self.lens[begin:end] // size)
            table, column = np.asarray(table), np.arange(int(counts.max(initial=0)))
            needed = column < counts[:, None]
            if table.shape[1] < needed.shape[1]:
                raise ValueError(f"block_tables: {table.shape[1]} columns, expected at least {needed.shape[1]}")
            pages = table[:, : needed.shape[1]][needed]
            for page in pages[(pages < 0) | (pages >= len(key))]:
                raise ValueError(f"indices: page {page} is outside 0..{len(key) - 1}")
            at = torch.from_numpy(pages.astype(np.int64))
            position = (column * size + np.zeros_like(counts)[:, None])[needed][:, None] + np.arange(size)
            key = rotated(key[at].to(query.dtype), torch.from_numpy(position), inv_freq)
            new = np.zeros(needed.shape, np.int32)
            new[needed] = np.arange(len(pages))
            found.append((begin, end, key, value[at].to(query.dtype), new))
        positions = torch.from_numpy(first.astype(np.int64) + np.arange(self.num_tokens))
        return rotated(query, positions, inv_freq), found

    def attend(
        self,
        q: Any,
        layout: str,
        parts: Sequence[Part],
        logits: Logits,
        factors: Factors,
        results: Results,
        bias: Tensor | None = None,
        sinks: Any = None,
    ) -> Any:
        """Runs all parts. bias: [B, 1, Q, K] of all sequences, or None."""
        query, factor = self._queries(q, factors)
        (sinks,) = optional(sinks=sinks)
        for _, _, key, value, _ in parts:
            self._check_states(key, value)
            written({"q": q, "key_cache": key, "value_cache": value, "sinks": sinks}, out=results.out, lse=results.lse)
        kv_dtype, scales, v = self.kv_dtype, (1.0, 1.0), factors.v
        if logits.pos_encoding_mode == "ROPE_LLAMA":
            query, parts = self._turned(query, logits, layout, parts)
            layout, kv_dtype = "NHD", query.dtype
        elif kv_dtype in _FP8 and isinstance(v, float) and v >= _check.TINY:
            scales, v = (1.0, v), 1.0  # read in float32, so that no pass over the output is needed
        plain = isinstance(v, float) and v == 1.0
        out, lse = results.begin(self, query.dtype, plain)
        scale = factor * (self.head_size**-0.5 if logits.scale is None else logits.scale)
        slopes = alibi_slopes(self.num_heads) if logits.pos_encoding_mode == "ALIBI" else None
        for first, end, key, value, table in parts:
            tokens = slice(int(self.starts[first]), int(self.starts[end]))
            plan = self.plan(first, end, logits, layout, query.dtype, kv_dtype)
            own_bias = None if bias is None else bias[first:end]
            own = ops.Logits(scale, logits.softcap, slopes, sinks, own_bias)
            own_lse = None if lse is None else lse[:, tokens]
            ops.attend(plan, query[tokens], key, value, out[tokens], table, own, scales, own_lse)
        if not plain:
            out *= v if isinstance(v, float) else v.repeat_interleave(self.num_heads // self.num_kv_heads)[:, None]
        return results.end(out, lse)

    def _check_states(self, key: Tensor, value: Tensor) -> None:
        for name, x in (("key_cache", key), ("value_cache", value)):
            if x.dtype != self.kv_dtype:
                kinds = (str(kind).removeprefix("torch.") for kind in (x.dtype, self.kv_dtype))
                raise TypeError("{}: dtype {}, expected {}".format(name, *kinds))


@dataclass
class Results:
    """Says what a call returns, and where to write it: out [T, Hq, D] or None, lse float32 [T, Hq] or None; with
    lse_layout ``HN`` [Hq, T], with lse_base ``ln`` the natural logarithm."""

    out: Any = None
    lse: Any = None
    return_lse: Any = False
    lse_base: Any = "log2"
    lse_layout: Any = "NH"

    def begin(self, step: Sequences, dtype: torch.dtype, plain: bool) -> tuple[Tensor, Tensor | None]:
        """Checks them, and gives where to compute: out itself if it holds products of this dtype as they are (plain),
        else float32; and lse [Hq, T]."""
        self.return_lse = _check.boolean("return_lse", self.return_lse)
        base = choice("lse_base", self.lse_base, "log2", "ln")
        swapped = choice("lse_layout", self.lse_layout, "NH", "HN") == "HN"
        self._factor = LOG2E if base == "log2" else 1.0
        out, self._lse = optional(out=self.out, lse=self.lse)
        shape = (step.num_tokens, step.num_heads, step.head_size_v)
        if out is None:
            self.out = out = torch.empty(shape, dtype=step.o_dtype)
        axes("out", out, T=shape[0], num_qo_heads=shape[1], head_dim=shape[2])
        if out.dtype != step.o_dtype:
            raise TypeError(f"out: dtype {out.dtype}, expected {step.o_dtype}")
        self._out = out
        if self._lse is not None:
            sizes = {"T": shape[0], "num_qo_heads": shape[1]}
            axes("lse", self._lse, **dict(reversed(sizes.items()) if swapped else sizes))
            if self._lse.dtype != torch.float32:
                raise TypeError(f"lse: dtype {self._lse.dtype}, expected torch.float32")
        lse = torch.empty(shape[1], shape[0]) if self.return_lse or self._lse is not None else None
        direct = plain and out.dtype in (dtype, torch.float32) and out.stride(-1) == 1
        return (out if direct else torch.empty(shape)), lse

    def end(self, out: Tensor, lse: Tensor | None) -> Any:
        if out is not self._out:
            put(self._out, out)
        if lse is None:
            return self.out
        lse = lse * self._factor
        lse = lse if self.lse_layout == "HN" else lse.T
        if self._lse is None:
            self.lse = lse.contiguous()
        else:
            self._lse.copy_(lse)
        return (self.out, self.lse) if self.return_lse else self.out
