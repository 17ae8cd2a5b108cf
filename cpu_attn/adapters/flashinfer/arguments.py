# SPDX-License-Identifier: Apache-2.0
"""This module says of the arguments that mean nothing on a CPU why that is so: which are not looked at, and which are
refused. :func:`interface` refuses them, and docs/flashinfer.md's table has the same reasons."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any

import torch

from cpu_attn import _check
from cpu_attn.torch.entry import RefusedError, Run, entry

_SCRATCH = "calls have scratch of their own"
_LENGTHS = "lengths are read from where sequences start"
_SKIP = "no key that a mask leaves is skipped, so that results are exact"
_BITS = "results always have the same bits"
IGNORED = {
    "float_workspace_buffer": _SCRATCH,
    "int_workspace_buffer": _SCRATCH,
    "int_workspace_buffers": _SCRATCH,
    "workspace_buffer": _SCRATCH,
    "semaphores": _SCRATCH,
    "sm_count": "`OMP_NUM_THREADS` and `cpu_attn.set_num_threads` say how many threads there are",
    "multi_ctas_kv_counter_buffer": _SCRATCH,
    "custom_mask_buf": _SCRATCH,
    "mask_indptr_buf": _SCRATCH,
    "device": "memory of the CPU is the only one",
    "backend": "`CPU_ATTN_ISA` and the machine choose the kernels",
    "use_tensor_cores": "`CPU_ATTN_ISA` and the machine choose the kernels",
    "cute_dsl_impl": "`CPU_ATTN_ISA` and the machine choose the kernels",
    "bf16q_fp8kv_transform_mode": "`CPU_ATTN_ISA` and the machine choose the kernels",
    "jit_kwargs": "nothing is compiled at run time",
    "variant_owns_mask": "nothing is compiled at run time",
    "use_fp16_qk_reduction": "products are summed in float32",
    "use_fp16_softmax": "weights are computed in float32",
    "non_blocking": "calls return when they are done",
    "enable_pdl": "calls return when they are done",
    "use_profiler": "[`cpu_attn.profiling.profile`](threads.md#which-kernels-a-program-runs) measures calls",
    "profiler_buffer": "[`cpu_attn.profiling.profile`](threads.md#which-kernels-a-program-runs) measures calls",
    "fixed_split_size": _BITS,
    "request_order": _BITS,
    "request_order_plan": _BITS,
    "batch_size": _LENGTHS,
    "cum_seq_lens_kv": "`seq_lens` has the lengths",
    "max_seq_len": _LENGTHS,
    "max_q_len": _LENGTHS,
    "max_kv_len": _LENGTHS,
    "max_token_per_sequence": _LENGTHS,
    "max_sequence_kv": _LENGTHS,
    "max_item_len_ptr": _LENGTHS,
    "seq_lens_q": _LENGTHS,
    "uniform_q_len": _LENGTHS,
    "is_var_seq": _LENGTHS,
    "q_seq_lens_cpu": _LENGTHS,
    "kv_seq_lens_cpu": _LENGTHS,
    "skip_all_rows_active_check": "sequences without tokens are always allowed",
    "global_override_indptr_cpu": "`indptr` is on the CPU",
    "qk_nope_head_dim": "the factor of the logits is `bmm1_scale`",
    "return_lse_p": "as in FlashInfer, no lse is returned",
    "return_lse_d": "as in FlashInfer, no lse is returned",
    "kv_layout_d": "as in FlashInfer, that of the wrapper counts",
    "pos_encoding_mode_d": "as in FlashInfer, that of `plan` counts",
    "sm_scale_d": "as in FlashInfer, that of `plan` counts",
    "window_left_d": "as in FlashInfer, that of `plan` counts",
    "rope_scale_d": "as in FlashInfer, that of `plan` counts",
    "rope_theta_d": "as in FlashInfer, that of `plan` counts",
    "query_layout": "tensors say which they are",
    "lse_mode": "`run` says whether there is an lse, and to which base",
    "use_sinks": "`run` has the sinks",
    "scale_mode": "`run` has the scales",
    "output_scale": "`run` has the scales",
    "kv_scale_format": "it is for packed caches of one GPU",
    "use_cp": "threads share the work of a call",
    "skip_softmax": _SKIP,
    "skip_softmax_threshold_scale_factor": _SKIP,
    "uses_spcompress": _SKIP,
    "_cp_chunk_len": "threads share the work of a call",
    "max_seqlen": _LENGTHS,
}
_FP4 = "caches of 4 bits with scales of blocks are a format of GPUs"
_CAKE = "it is for kernels of one GPU"
REFUSED = {
    "jit_args": "no kernel is compiled at run time",
    "kv_cache_sf": _FP4,
    "k_sf_cache": _FP4,
    "v_sf_cache": _FP4,
    "o_sf_scale": _FP4,
    "o_sf_vec_size": _FP4,
    "block_scale": _FP4,
    "sage_attn_sfs": "queries and keys of 8 bits with scales of blocks are a format of GPUs",
    "num_elts_per_sage_attn_blk": "queries and keys of 8 bits with scales of blocks are a format of GPUs",
    "window_right": "windows end at the query's own key",
    "is_causal": "the query tokens of a sequence are its last ones, causal",
    "v_indptr": "values lie as keys do",
    "o_indptr": "outputs lie as queries do",
    "enable_block_sparse_attention": "`BlockSparseAttentionWrapper` selects blocks",
    "causal_seqlens_kv_global": "`cpu_attn.get_scheduler_metadata(cp_world_size=...)` plans ranks that share keys",
    "cp_world": "`cpu_attn.get_scheduler_metadata(cp_world_size=...)` plans ranks that share keys",
    "cp_rank": "`cpu_attn.get_scheduler_metadata(cp_world_size=...)` plans ranks that share keys",
    "enable_dcp": "`cpu_attn.get_scheduler_metadata(cp_world_size=...)` plans ranks that share keys",
    "sparse_mla_top_k_lens": "entries of -1 end a selection",
    "ckv_scale_arr": "a cache of latent rows has one scale",
    "kv_len": "`plan` has the lengths",
    "page_table": "`plan` has the pages",
    "block_mask": _CAKE,
    "kv_block_lens": _CAKE,
    "q2k_indices": _CAKE,
    "q2k_num": _CAKE,
    "kv_splits": _CAKE,
    "use_clc": _CAKE,
    "intermediate_states_buffer": "`cpu_attn.linear` keeps states after given tokens (`checkpoints`)",
}


def _same(x: Any, default: Any) -> bool:
    """Says whether an argument asks for nothing: it is the default, or None, or False where the default is None."""
    if x is default or x is None or (x is False and default is None):
        return True
    return not isinstance(x, torch.Tensor) and type(x) is type(default) and bool(x == default)


def interface(taken: Collection[str] = (), **names: str) -> Callable[[Run], Run]:
    """Decorates a function of FlashInfer's as :func:`cpu_attn.torch.entry.entry` does, and refuses what has no meaning
    here: NotImplementedError. taken: arguments of REFUSED that this function does not refuse."""

    def wrapped(run: Run) -> Run:
        parameters = inspect.signature(run).parameters.values()
        refused = [
            (name, None if p.kind is p.KEYWORD_ONLY else i, p.default)
            for i, (name, p) in enumerate((p.name, p) for p in parameters)
            if name in REFUSED and name not in taken
        ]

        @functools.wraps(run)
        def call(*args: Any, **options: Any) -> Any:
            for name, place, default in refused:
                x = options.get(name, default)
                if place is not None and place < len(args):
                    x = args[place]
                if not _same(x, default):
                    raise RefusedError(f"{name}: expected {default!r}; {REFUSED[name]}")
            return run(*args, **options)

        call.refused = [name for name, _, _ in refused]  # type: ignore[attr-defined]
        return entry(**names)(call)  # type: ignore[return-value]

    return wrapped


def choice(name: str, x: Any, *names: str) -> str:
    """Gives one of these names."""
    if not (isinstance(x, str) and x in names):
        raise ValueError(f"{name}: {x!r}, expected {' or '.join(map(repr, names))}")
    return x


def layout_of(kv_layout: Any, name: str = "kv_layout") -> str:
    return choice(name, kv_layout, "NHD", "HND")


def items(name: str, x: Any, size: int) -> list[Any]:
    """Gives the items of a sequence of this length."""
    found = _check.sequence(name, x)
    if len(found) != size:
        raise ValueError(f"{name}: {len(found)} items, expected {size}")
    return found
