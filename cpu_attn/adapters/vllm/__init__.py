# SPDX-License-Identifier: Apache-2.0
"""This package is vLLM's attention on CPUs by cpu_attn. Installed beside a CPU vLLM it is active by itself: see
docs/vllm.md."""

from cpu_attn import _adapters

_adapters.require("vllm")

from cpu_attn.vllm.backend import Backend, Impl, Metadata, MetadataBuilder  # noqa: E402
from cpu_attn.vllm.mla import MLABackend, MLAImpl, MLAMetadataBuilder  # noqa: E402

__all__ = ["Backend", "Impl", "MLABackend", "MLAImpl", "MLAMetadataBuilder", "Metadata", "MetadataBuilder"]
