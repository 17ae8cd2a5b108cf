# SPDX-License-Identifier: Apache-2.0
"""Every check of foreign input: shapes, dtypes, strides, aliases here; what indices hold in native/check/check.c,
whose findings :func:`raise_fault` turns into exceptions. All of it runs before a byte is written.

Each module imports only those above it:

values      numbers, booleans, sequences, windows
faults      what native code found
arrays      any array: dtype, shape, strides, aliases; lists of integers
kv_cache    caches: what they hold, layouts, scales, sizes
masking     masks besides causal and window
plans       what a plan is made of and what has to fit it
calls       the arrays of each call
"""

from cpu_attn._check.arrays import (
    FLOATS,
    apart,
    apart_from,
    array,
    copied,
    disjoint,
    integers,
    listed,
    moves,
    pointer,
    rising,
    small_floats,
    writable,
)
from cpu_attn._check.calls import (
    ATTENTION,
    ROTARY,
    WRITE,
    attention,
    merged,
    rotary,
    score_pages,
    states,
    update_page_bounds,
    write,
)
from cpu_attn._check.faults import instance, new_fault, raise_fault, renamed
from cpu_attn._check.kv_cache import (
    LAYOUTS,
    cache,
    cache_sizes,
    cache_width,
    caches,
    kv_cache_layout,
    kv_dtypes,
    memory,
    pages,
    scales,
    width,
)
from cpu_attn._check.masking import Masks, masks
from cpu_attn._check.plans import (
    Plan,
    attn_bias,
    block_table,
    lengths,
    plan,
    same_call,
    same_kv_cache_layout,
    same_kv_dtypes,
    selected_blocks,
    step,
    table_block_size,
)
from cpu_attn._check.values import (
    INT32_MAX,
    MAX_SIZE,
    SOFTCAP_MAX,
    TINY,
    boolean,
    integer,
    logit_factors,
    number,
    sequence,
    softcap,
    window,
)

__all__ = [
    "ATTENTION",
    "FLOATS",
    "INT32_MAX",
    "LAYOUTS",
    "MAX_SIZE",
    "ROTARY",
    "SOFTCAP_MAX",
    "TINY",
    "WRITE",
    "Masks",
    "Plan",
    "apart",
    "apart_from",
    "array",
    "attention",
    "attn_bias",
    "block_table",
    "boolean",
    "cache",
    "cache_sizes",
    "cache_width",
    "caches",
    "copied",
    "disjoint",
    "instance",
    "integer",
    "integers",
    "kv_cache_layout",
    "kv_dtypes",
    "lengths",
    "listed",
    "logit_factors",
    "masks",
    "memory",
    "merged",
    "moves",
    "new_fault",
    "number",
    "pages",
    "plan",
    "pointer",
    "raise_fault",
    "renamed",
    "rising",
    "rotary",
    "same_call",
    "same_kv_cache_layout",
    "same_kv_dtypes",
    "scales",
    "score_pages",
    "selected_blocks",
    "sequence",
    "small_floats",
    "softcap",
    "states",
    "step",
    "table_block_size",
    "update_page_bounds",
    "width",
    "window",
    "writable",
    "write",
]
