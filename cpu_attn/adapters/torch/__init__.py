# SPDX-License-Identifier: Apache-2.0
"""This package is cpu-attn for torch: a provider for its paged attention API, and the three calls as ops::

    import cpu_attn.torch
    torch.nn.attention.activate_flash_attention_impl("cpu_attn")  # varlen_attn now runs on the CPU
    torch.ops.cpu_attn.cpu_attention_with_kv_cache(...)  # vLLM's name and arguments, and more

The import registers both, and activates nothing.
"""

from cpu_attn._adapters import require

require("torch")

from cpu_attn.torch import ops, provider  # noqa: E402

__all__ = ["ops", "provider"]

provider.register()
