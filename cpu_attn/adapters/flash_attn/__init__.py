# SPDX-License-Identifier: Apache-2.0
"""This package has the functions of flash-attn 2.8 on CPUs, over torch's tensors.

from cpu_attn.flash_attn import flash_attn_func
cpu_attn.flash_attn.install()  # from here on also: from flash_attn import flash_attn_func
"""

from cpu_attn._adapters import require

require("flash_attn")

from cpu_attn.flash_attn.flash_attn_interface import (  # noqa: E402
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from cpu_attn.flash_attn.install import __version__ as __version__  # noqa: E402
from cpu_attn.flash_attn.install import install  # noqa: E402

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
]
