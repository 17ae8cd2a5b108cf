# SPDX-License-Identifier: Apache-2.0
"""Context parallelism spreads the keys of each request over ranks, every rank attends its own, and the results merge.

:class:`ContextParallel` knows which rank has which token and merges; a :class:`Group` carries one message of each rank
to all ranks. Three libraries do that, each in a module of its own, which nothing else imports:
:class:`cpu_attn.distributed.gloo.GlooGroup` (torch.distributed, the one to take), ``cpu_attn.distributed.mpi.MPIGroup``
(mpi4py) and ``cpu_attn.distributed.ray.RayGroup`` (Ray's actors). :class:`ThreadGroup` is for ranks that are threads of
one process.
"""

from cpu_attn.distributed.context_parallel import ContextParallel
from cpu_attn.distributed.group import Group, RankError, ThreadGroup

__all__ = ["ContextParallel", "Group", "RankError", "ThreadGroup"]
