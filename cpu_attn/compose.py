# SPDX-License-Identifier: Apache-2.0
"""This is the public name of what :mod:`cpu_attn.study` composes."""

from cpu_attn.study import attention

__all__ = ["attention"]
