# SPDX-License-Identifier: Apache-2.0
"""Which kernels run here."""

from __future__ import annotations

import cpu_attn
from cpu_attn._dtypes import DTYPE_CODES
from cpu_attn._native import ffi, lib

from ..cases.formats import DTYPES

# (isa, dtype) of every kernel that runs here; of these one for each isa: bfloat16 where that is what tiles multiply.
KERNELS = [
    (isa.name, dtype)
    for isa in cpu_attn.isas()
    for dtype in DTYPES
    if isa.supported and lib.ca_isa_kernel(isa.index, DTYPE_CODES[dtype], ffi.new("ca_kernel_info *"))
]
_TILES = {isa.name for isa in cpu_attn.isas() if isa.unit == "matrix"}
ONE_DTYPE = [(isa, dtype) for isa, dtype in KERNELS if dtype == ("bfloat16" if isa in _TILES else "float32")]
