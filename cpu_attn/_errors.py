# SPDX-License-Identifier: Apache-2.0
"""This module defines the library's own exceptions."""


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
    """There are fewer free blocks than a call needs. The call has changed nothing.

    ``missing`` says how many there are too few.

    Args:
        name: the argument that needs them.
        needed: how many blocks the call needs.
        free: how many there are.

    This class raises no errors itself.

    Example:
        >>> from cpu_attn import BlockManager, NoFreeBlocksError, PagedKVCache
        >>> manager = BlockManager(PagedKVCache(num_blocks=2, block_size=16, num_kv_heads=1, head_size=64))
        >>> manager.allocate("a")
        0
        >>> try:
        ...     step = manager.step([("a", range(40))])
        ... except NoFreeBlocksError as e:
        ...     print(e.missing)
        1
    """

    def __init__(self, name: str, needed: int, free: int) -> None:
        super().__init__(name, needed, free)  # copies and pickles are made from these
        self.missing = needed - free

    def __str__(self) -> str:
        name, needed, free = self.args
        return (
            f"{name}: needs {needed} blocks, {free} are free, {self.missing} are missing: free requests, or swap them "
            "out"
        )
