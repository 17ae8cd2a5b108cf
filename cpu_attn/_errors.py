# SPDX-License-Identifier: Apache-2.0
"""This module defines the library's own exceptions, and the words of those that several modules raise."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def none_of(name: str, x: Any, known: Iterable[Any]) -> str:
    """Says that an argument is none of what it may be. Each of these is quoted, since 'none' may be one of them."""
    return f"{name}: {x!r} is none of {', '.join(map(repr, known))}"


class UnavailableError(RuntimeError):
    """This machine or this build does not have an isa, an engine or a library.

    The text says why, and what is there instead. It is a RuntimeError.

    Example:
        >>> from cpu_attn import UnavailableError, get_kv_cache_shape, isas
        >>> missing = [isa.name for isa in isas() if not isa.supported]
        >>> try:
        ...     get_kv_cache_shape(4, 16, 2, 64, "float32", isa=missing[0] if missing else "scalar")
        ... except UnavailableError as error:
        ...     reason = str(error)
        ... else:
        ...     reason = "every isa is here"
    """


class NoFreeBlocksError(RuntimeError):
    """There are fewer free blocks, or slots of states, than a call needs. The call has changed nothing.

    ``missing`` says how many there are too few, and ``never_fits`` whether a request needs more of them by itself than
    there are, so that it would not help to free others.

    Args:
        name: the argument that needs them.
        needed: how many blocks the call needs.
        free: how many there are.
        too_long: which request never fits, and why, for the message; "" where it would help to free others.
        what: what is missing.

    This class raises no errors itself.

    Example:
        >>> from cpu_attn import PagedKVCache
        >>> from cpu_attn.serving import BlockManager, NoFreeBlocksError
        >>> manager = BlockManager(PagedKVCache(num_blocks=2, block_size=16, num_kv_heads=1, head_size=64))
        >>> manager.allocate("a")
        0
        >>> try:
        ...     step = manager.step([("a", range(40))])
        ... except NoFreeBlocksError as e:
        ...     print(e.missing, e.never_fits)
        1 True
    """

    def __init__(self, name: str, needed: int, free: int, too_long: str = "", what: str = "blocks") -> None:
        super().__init__(name, needed, free, too_long, what)  # copies and pickles are made from these
        self.missing, self.never_fits = needed - free, bool(too_long)

    def __str__(self) -> str:
        name, needed, free, too_long, what = self.args
        help = too_long or "free requests, or swap them out"
        return f"{name}: needs {needed} {what}, {free} are free, {self.missing} are missing: {help}"
