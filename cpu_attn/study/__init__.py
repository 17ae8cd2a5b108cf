# SPDX-License-Identifier: Apache-2.0
"""This package is attention to read and to experiment with: the computation in plain Python, over calls that do one
thing each.

Read compose first; each module imports only those below it:

compose     :func:`attention`: chunks of keys, softmax, merging
step        the arguments of a call, their checks, and which keys a token sees
primitives  :func:`gather_pages`, :func:`matmul`, :func:`softmax`: pages out of a cache, and oneDNN

Their public names are those of ``cpu_attn.compose`` and ``cpu_attn.primitives``. The definition of results is
:mod:`cpu_attn.reference`.
"""

from cpu_attn.study.compose import attention
from cpu_attn.study.primitives import gather_pages, matmul, softmax

__all__ = ["attention", "gather_pages", "matmul", "softmax"]
