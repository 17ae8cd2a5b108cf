# SPDX-License-Identifier: Apache-2.0
"""Checks of foreign input that are Python's affair: names, numbers, masks, arrays of the calls that have no table in
native/check/arguments.c. What native/check finds of arrays and of what they hold becomes an exception here. All of it
runs before a byte is written.

Each module imports only those above it:

values      numbers, booleans, sequences, windows
faults      what native code found, in words
arrays      any array: dtype, shape, strides, aliases; lists of integers
kv_cache    caches: what they hold, layouts, scales, sizes
masking     masks besides causal and window
plans       what a plan is made of and what has to fit it
calls       which arrays each call has
batches     what a step of a BlockManager is made from
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
    rows,
    sizes,
    small_floats,
    with_one_head,
    writable,
)
from cpu_attn._check.batches import batch, tokens
from cpu_attn._check.calls import (
    ATTENTION,
    INDEX,
    ROTARY,
    STEP,
    WRITE,
    attention_arrays,
    merged,
    score_pages,
    select_tokens,
    states,
    update_page_bounds,
)
from cpu_attn._check.faults import instance, new_fault, raise_fault, renamed, reread
from cpu_attn._check.kv_cache import (
    LAYOUTS,
    cache,
    cache_sizes,
    cache_width,
    caches,
    kv_cache_layout,
    kv_cache_rotation,
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
    same_kv_cache_rotation,
    same_kv_dtypes,
    selected_blocks,
    selected_tokens,
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
    "INDEX",
    "INT32_MAX",
    "LAYOUTS",
    "MAX_SIZE",
    "ROTARY",
    "SOFTCAP_MAX",
    "STEP",
    "TINY",
    "WRITE",
    "Masks",
    "Plan",
    "apart",
    "apart_from",
    "array",
    "attention_arrays",
    "attn_bias",
    "batch",
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
    "kv_cache_rotation",
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
    "reread",
    "rising",
    "rows",
    "same_call",
    "same_kv_cache_layout",
    "same_kv_cache_rotation",
    "same_kv_dtypes",
    "scales",
    "score_pages",
    "select_tokens",
    "selected_blocks",
    "selected_tokens",
    "sequence",
    "sizes",
    "small_floats",
    "softcap",
    "states",
    "table_block_size",
    "tokens",
    "update_page_bounds",
    "width",
    "window",
    "with_one_head",
    "writable",
]
