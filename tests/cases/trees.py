# SPDX-License-Identifier: Apache-2.0
"""Trees of query tokens: [n, n], does token i see token j?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray


def ancestors(parents: Sequence[int]) -> NDArray[np.bool_]:
    """Each token sees itself and its ancestors. parents[i] < i, -1: none."""
    tree = np.eye(len(parents), dtype=np.bool_)
    for i, parent in enumerate(parents):
        if parent >= 0:
            tree[i] |= tree[parent]
    return tree


def pack_tree(tree: NDArray[np.bool_], width: int, garbage: bool = True) -> NDArray[np.uint8]:
    """Rows of a tree_mask for up to `width` query tokens; bits that mean nothing are set."""
    wide = np.full((len(tree), -(-width // 8) * 8), garbage)
    wide[:, : len(tree)] = tree
    return np.packbits(wide, axis=1, bitorder="little")


def _random_bits(n: int) -> NDArray[np.bool_]:
    """Anything sees anything, or nothing; most do not see themselves."""
    tree = np.random.default_rng(n).random((n, n)) < 0.3
    tree[::4] = False
    return tree


TREES: dict[str, Callable[[int], NDArray[np.bool_]]] = {
    "chain": lambda n: ancestors(range(-1, n - 1)),
    "binary": lambda n: ancestors([(i - 1) // 2 for i in range(n)]),
    "star": lambda n: ancestors([-1] + [0] * (n - 1) if n else []),
    "forest": lambda n: ancestors([i - 3 if i >= 3 else -1 for i in range(n)]),
    "bits": _random_bits,
}
