# SPDX-License-Identifier: Apache-2.0
"""Checks of numbers, booleans, sequences and windows."""

from __future__ import annotations

import math
import operator
import os
import threading
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from cpu_attn._errors import none_of

INT32_MAX = 2**31 - 1
TINY, HUGE = (float(x) for x in (np.finfo(np.float32).tiny, np.finfo(np.float32).max))  # normal float32
LOG2E = math.log2(math.e)
SOFTCAP_MAX = 0.69 * HUGE  # it stays finite times log2(e)
MOST_FACTOR = 0.999 * HUGE  # it leaves room for the roundings of the product
LONGEST = min(INT32_MAX, int(threading.TIMEOUT_MAX))  # seconds; every library that waits can count as many
MAX_SIZE = 2**16  # the most heads and head size, so that products of sizes fit in int64


def integer(name: str, x: Any, low: int, high: int = INT32_MAX) -> int:
    """Gives ``x`` as an int in [low, high]."""
    if type(x) is int and low <= x <= high:
        return x
    if isinstance(x, (bool, np.bool_)):
        raise TypeError(f"{name}: expected an integer, got {x!r}")
    try:
        value = operator.index(x)
    except MemoryError:
        raise
    except Exception:
        raise TypeError(f"{name}: expected an integer, got {type(x).__name__}") from None
    if not low <= value <= high:
        raise ValueError(f"{name}: {value} is outside {low}..{high}")
    return value


def number(name: str, x: Any, low: float = -math.inf) -> float:
    """Gives ``x`` as a float that is finite in float32 and at least ``low``."""
    if type(x) is float and low <= x and -HUGE <= x <= HUGE:
        return x
    if isinstance(x, (str, bytes, bool)):
        raise TypeError(f"{name}: expected a number, got {x!r}")
    try:
        value = float(x)
    except OverflowError:  # an int may be larger than any float
        value = math.inf if x > 0 else -math.inf
    except MemoryError:
        raise
    except Exception:
        raise TypeError(f"{name}: expected a number, got {type(x).__name__}") from None
    if not abs(value) <= HUGE or value < low:
        raise ValueError(f"{name}: {value} is not a finite float32" + (f" >= {low}" if low > -math.inf else ""))
    return value


def timeout(name: str, x: Any) -> float:
    """Gives ``x`` as a float of seconds."""
    value = number(name, x, 0.0)
    if value > LONGEST:
        raise ValueError(f"{name}: {value} s is outside 0..{LONGEST}")
    return value


def softcap(name: str, x: Any) -> float:
    """Checks a softcap, of which 0 is off. C divides by it, and multiplies it by log2(e)."""
    if type(x) is float and (x == 0.0 or TINY <= x <= SOFTCAP_MAX):
        return x
    value = number(name, x, 0.0)
    if value and not TINY <= value <= SOFTCAP_MAX:
        raise ValueError(f"{name}: {value} is neither 0 (off) nor within {TINY}..{SOFTCAP_MAX}")
    return value


def logit_factors(scale: Any, softcap_: Any, k_scale: float) -> tuple[float, float]:
    """Checks scale and softcap together. In float32 C multiplies q.k by scale * k_scale / softcap or, without a
    softcap, by scale * k_scale * log2(e)."""
    factor, cap = number("scale", scale), softcap("softcap", softcap_)
    product = factor * k_scale / cap if cap else factor * k_scale * LOG2E
    if not -MOST_FACTOR <= product <= MOST_FACTOR:
        by = f"over softcap {cap}" if cap else "times log2(e)"
        raise ValueError(f"scale: {factor} times k_scale {k_scale} {by} is not a finite float32")
    return factor, cap


def choice(name: str, x: Any, known: Collection[Any]) -> Any:
    """Gives ``x``, a name that is among ``known``, or None where that is."""
    if x is None and None in known:
        return x
    if not isinstance(x, str):
        raise TypeError(f"{name}: expected a name{' or None' * (None in known)}, got {type(x).__name__}")
    if x not in known:
        raise ValueError(none_of(name, x, known))
    return x


def text(name: str, x: Any) -> str:
    if not isinstance(x, str):
        raise TypeError(f"{name}: expected a str, got {type(x).__name__}")
    return x


def path(name: str, x: Any) -> str:
    """Gives a path of a file or a folder as a str."""
    found = text(name, os.fspath(x) if isinstance(x, os.PathLike) else x)
    if "\0" in found:
        raise ValueError(f"{name}: {found!r} has a null character, which no path has")
    return found


def boolean(name: str, x: Any) -> bool:
    if x is True or x is False:
        return x
    if isinstance(x, np.bool_) or (isinstance(x, (int, np.integer)) and x in (0, 1)):
        return bool(x)
    raise TypeError(f"{name}: expected True or False, got {x!r}")


def sequence(name: str, x: Any) -> list[Any]:
    """Gives the items of a list, a tuple, an array or whatever else can be iterated."""
    cause = None
    if not isinstance(x, (str, bytes, Mapping)):
        try:
            return list(x)
        except MemoryError:
            raise
        except Exception as e:  # an array has no axes, or a foreign object raises
            cause = e
    raise TypeError(f"{name}: expected a sequence, got {type(x).__name__}") from cause


def window(x: Any, name: str = "sliding_window") -> tuple[int, int]:
    """Gives how many keys are visible to the left and to the right of the query, -1 for all. ``x`` is such a pair, or
    vLLM's int, which counts the query's own key."""
    if isinstance(x, (tuple, list)):
        if len(x) != 2:
            raise ValueError(f"{name}: expected (left, right), got {len(x)} values")
        return integer(f"{name}[0]", x[0], -1), integer(f"{name}[1]", x[1], -1)
    size = integer(name, x, -1)
    if size == 0:
        raise ValueError(f"{name}: 0 would see nothing; -1 turns it off, w counts the query's own key")
    return (-1, -1) if size == -1 else (size - 1, size - 1)
