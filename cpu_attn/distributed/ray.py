# SPDX-License-Identifier: Apache-2.0
"""This module connects ranks that are actors of Ray."""

from __future__ import annotations

from ray.util import collective

from cpu_attn.distributed.gloo import GlooGroup

__all__ = ["RayGroup"]


class RayGroup(GlooGroup):
    """Connects actors, each of which makes the group in its own process and keeps its shard of the keys for as long as
    it lives.

    Ray places the actors, lets them find one another, and tells their owner of those that died. Messages go by the gloo
    of ``ray.util.collective``, which is torch.distributed's, so that what
    :class:`cpu_attn.distributed.gloo.GlooGroup` says of ranks that die or hang holds here, too.

    Args:
        rank: which of the actors this is.
        world_size: how many there are.
        timeout: seconds within which every call returns, or raises. To meet the actors have Ray's 30 seconds.
        group_name: one name for each group in a Ray cluster.

    Raises:
        RuntimeError: an actor did not come, or this one has a process group of torch.distributed already.
        ValueError: a number is out of range.
    """

    def __init__(self, rank: int, world_size: int, timeout: float = 30.0, group_name: str = "cpu_attn") -> None:
        collective.init_collective_group(world_size, rank, "GLOO", group_name)
        super().__init__(timeout=timeout)
