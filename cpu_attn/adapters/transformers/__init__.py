# SPDX-License-Identifier: Apache-2.0
"""This package runs transformers over cpu-attn: ``attn_implementation="cpu_attn"``, a paged cache for ``generate``, and
continuous batching in place. See docs/transformers.md."""

from __future__ import annotations

from cpu_attn import _adapters

_adapters.require("transformers")

from cpu_attn.transformers.attention import continuous_batching, disable, enable  # noqa: E402
from cpu_attn.transformers.balance import balance  # noqa: E402
from cpu_attn.transformers.feedback import key_feedback  # noqa: E402
from cpu_attn.transformers.paged_cache import PagedCache  # noqa: E402

__all__ = ["PagedCache", "balance", "continuous_batching", "disable", "enable", "key_feedback"]
