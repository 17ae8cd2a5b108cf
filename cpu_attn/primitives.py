# SPDX-License-Identifier: Apache-2.0
"""This is the public name of what :mod:`cpu_attn.study` is made of."""

from cpu_attn.study import gather_pages, matmul, softmax

__all__ = ["gather_pages", "matmul", "softmax"]
