# SPDX-License-Identifier: Apache-2.0
"""What the cases are judged by: the float64 oracle and the budgets in cpu_attn.reference."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cpu_attn import reference

from .problem import Problem

# One (token, head) row may have this many times the budget of its request, so that one wrong row cannot hide.
ROW_SLACK = 4.0


@dataclass(frozen=True)
class Result:
    """errors [R] relative RMS and lse_error, both in units of their budget: 1 is the most that is allowed."""

    errors: tuple[float, ...]
    lse_error: float
    ok: bool
    message: str

    @property
    def worst(self) -> float:
        return max((*self.errors, self.lse_error), default=0.0)


def same_bits(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Equal bit for bit, but one NaN is as good as another."""
    bits = np.dtype(f"u{a.dtype.itemsize}")
    equal = np.ascontiguousarray(a).view(bits) == np.ascontiguousarray(b).view(bits)
    return bool((equal | (np.isnan(a) & np.isnan(b))).all())


def check(problem: Problem, output: NDArray[Any], lse: NDArray[np.float32]) -> Result:
    """Output and lse against the oracle: errors in units of the budget, NaN and empty rows exactly in their place."""
    with np.errstate(invalid="ignore"):
        return _check(problem, output, lse, *problem.expected)


def _check(
    problem: Problem,
    output: NDArray[Any],
    lse: NDArray[np.float32],
    want: reference.Float64,
    want_lse: reference.Float64,
) -> Result:
    loc, name = problem.query_start_loc, problem.case.dtype
    free = problem.unspecified
    got, got_lse = output.copy(), lse.astype(np.float64)
    got[free], want = 0, np.where(free[:, :, None], 0.0, want)
    got_lse[free.T], want_lse = 0, np.where(free.T, 0.0, want_lse)

    complaints = []
    if (np.isnan(got) != np.isnan(want)).any():
        token, head = np.argwhere(np.isnan(got) != np.isnan(want))[0][:2]
        complaints.append(f"NaN is {'there' if np.isnan(got[token, head]).any() else 'missing'} at {token=} {head=}")
    empty = problem.empty
    if (got[empty] != 0).any():
        token, head = np.argwhere(empty)[0]
        complaints.append(f"{token=} {head=} sees nothing, its output is not 0")

    nan = np.isnan(want)
    got[nan], want = 0, np.where(nan, 0.0, want)
    errors = np.nan_to_num(reference.relative_rms(got, want, loc) / reference.BUDGET[name], nan=np.inf, posinf=np.inf)
    rows = _row_errors(got, want, loc) / (ROW_SLACK * reference.BUDGET[name])
    lse_errors = _lse_errors(got_lse, want_lse) / reference.LSE_BUDGET[name]
    complaints += _over(errors, "request {0}: relative RMS error is {x:.3g} of the budget")
    complaints += _over(rows, f"token {{0}} head {{1}}: error is {{x:.3g}} of {ROW_SLACK:g} budgets")
    complaints += _over(lse_errors, "lse of head {0} token {1}: error is {x:.3g} of the budget")
    worst_lse = float(lse_errors.max(initial=0.0))
    return Result(tuple(float(e) for e in errors), worst_lse, not complaints, "; ".join(complaints))


def _over(errors: NDArray[Any], text: str) -> list[str]:
    """The worst of the errors that are not within 1, NaN first."""
    if (errors <= 1).all():
        return []
    where = np.unravel_index(np.argmax(errors), errors.shape)
    return [text.format(*where, x=errors[where])]


def _row_errors(got: NDArray[Any], want: reference.Float64, loc: NDArray[np.int32]) -> reference.Float64:
    """[T, Hq]: a row's error relative to the row or to its request, whichever is larger."""
    floor = float(ml_dtypes.finfo(got.dtype).smallest_normal)
    scale = np.maximum(_row_rms(want), floor)
    for first, last in itertools.pairwise(loc):
        if last > first:
            scale[first:last] = np.maximum(scale[first:last], reference.rms(want[first:last]))
    return _row_rms(got.astype(np.float64) - want) / scale


def _row_rms(x: reference.Float64) -> reference.Float64:
    largest = np.abs(x).max(axis=-1, initial=0.0)
    safe = np.where((largest > 0) & np.isfinite(largest), largest, 1.0)
    return np.asarray(safe * np.sqrt(np.mean(np.square(x / safe[..., None]), axis=-1)))


def _lse_errors(got: reference.Float64, want: reference.Float64) -> reference.Float64:
    """[Hq, T]: |got - want| / max(1, |want|); infinities and NaN must be the same."""
    error = np.abs(got - want) / np.maximum(1.0, np.abs(want))
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    return np.asarray(np.where(same, 0.0, np.where(np.isfinite(want), error, np.inf)))
