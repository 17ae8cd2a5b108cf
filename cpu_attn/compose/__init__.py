# SPDX-License-Identifier: Apache-2.0
"""This package composes paged attention in plain Python of calls that do one thing each, to read and to experiment
with.

Each module imports only those below it:

by_chunks   :func:`attention`: chunks of keys, softmax, merging
step        the arguments of a call, their checks, and which keys a token sees

The calls are those of :mod:`cpu_attn.primitives`. The definition of results is :mod:`cpu_attn.reference`.
"""

from cpu_attn.compose.by_chunks import attention

__all__ = ["attention"]
