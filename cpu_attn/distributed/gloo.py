# SPDX-License-Identifier: Apache-2.0
"""This module connects ranks by torch.distributed's gloo."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from cpu_attn.distributed.group import Array, Group

__all__ = ["GlooGroup"]


class GlooGroup(Group):
    """Connects processes that have called ``torch.distributed.init_process_group``, by gloo.

    gloo ends a call on the ranks that are left as soon as the connection to a rank that died breaks, and after
    ``timeout`` where a rank hangs or a network falls silent. Both become a :class:`cpu_attn.distributed.RankError`.
    Where a message is larger than a rank expects, because the ranks did not make the same calls, gloo ends that rank's
    process.

    Args:
        group: a ProcessGroup of torch.distributed, of any backend, whose processes are the ranks; None for all. Each of
            them makes the group.
        timeout: seconds within which every call returns, or raises.

    Raises:
        RuntimeError: a rank did not come.
        ValueError: torch.distributed has no process group yet, or ``timeout`` is out of range.
    """

    def __init__(self, group: Any = None, timeout: float = 30.0) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group), timeout)
        ranks = dist.get_process_group_ranks(group)
        self._group = dist.new_group(ranks, timedelta(seconds=self.timeout), "gloo", use_local_synchronization=True)

    def _all_gather(self, message: Array, gathered: Array) -> None:
        dist.all_gather_single(torch.from_numpy(gathered), torch.from_numpy(message), self._group)
