# SPDX-License-Identifier: Apache-2.0
"""Metadata of a step out of what vLLM has of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cpu_attn import _check
from cpu_attn.backend.attention_metadata import CPUAttentionMetadata, running_sum
from cpu_attn.backend.paged_attention import Array


class CPUAttentionMetadataBuilder:
    """Metadata from vLLM's CommonAttentionMetadata, once a step for the layers of one cache group.

    kv_cache_spec and layer_names are kept as they are; of config only ``scheduler_config`` is looked at, for whether
    prefill is chunked. device: the CPU ("cpu", torch.device("cpu") or None), else ValueError.
    """

    def __init__(self, kv_cache_spec: Any, layer_names: Sequence[str], config: Any, device: Any = "cpu") -> None:
        if device is not None and str(device).split(":")[0] != "cpu":
            raise ValueError(f"device: {device}, expected cpu")
        self.kv_cache_spec = kv_cache_spec
        self.layer_names = layer_names
        self.config = config
        self.device = device
        scheduler = getattr(config, "scheduler_config", None)
        names = ("chunked_prefill_enabled", "enable_chunked_prefill")
        self.chunked_prefill = any(getattr(scheduler, name, False) for name in names)

    def reorder_batch(self, input_batch: Any, scheduler_output: Any) -> bool:
        """Moves requests with one scheduled token (decodes) behind all others; says whether anything moved.

        input_batch: req_ids, swap_states(i, j). scheduler_output: num_scheduled_tokens {req_id: number}. As few
        swaps as can be. Raises KeyError, before anything is moved, for a request without a number.
        """
        scheduled = scheduler_output.num_scheduled_tokens
        is_decode = [scheduled[req_id] == 1 for req_id in input_batch.req_ids]
        num_prefills = is_decode.count(False)
        early = [i for i in range(num_prefills) if is_decode[i]]
        late = [i for i in range(num_prefills, len(is_decode)) if not is_decode[i]]
        for i, j in zip(early, late, strict=True):
            input_batch.swap_states(i, j)
        return bool(early)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        """Metadata of a step. Trailing requests of one query token are its decodes, whatever the order.

        Read by name: num_reqs, query_start_loc [R+1] and seq_lens [R] (or ..._cpu, which are preferred),
        block_table_tensor [R, M], slot_mapping [T], causal (True unless said); where there is cross attention
        encoder_seq_lens [R], cross_slot_mapping and cross_block_tables [R, M]. Rows past R, slots past T: padding.
        All of it is copied: what an engine writes there for its next step is the next build's.
        common_prefix_len and fast_build change nothing: a layer's plan finds for itself which requests share blocks.

        Raises ValueError or TypeError for a query_start_loc that does not begin with 0 or falls, arrays that are too
        short, of other axes or dtypes, and a causal that is no boolean. Lengths and blocks are a layer's to check.
        NotImplementedError for masks that no layer here has: mm_req_doc_ranges, rswa_prefix_lens.
        """
        _check.integer("common_prefix_len", common_prefix_len, 0)
        common = common_attn_metadata
        for name in ("mm_req_doc_ranges", "rswa_prefix_lens"):
            if (mask := getattr(common, name, None)) is not None and len(mask):
                raise NotImplementedError(
                    f"{name}: these layers are causal or not; the calls and cpu_attn.vllm have spans"
                )
        num_reqs = _check.integer("num_reqs", common.num_reqs, 0)
        starts = _check.rising(
            "query_start_loc", _leading("query_start_loc", _cpu(common, "query_start_loc"), num_reqs + 1)
        )
        lens = _leading("seq_lens", _cpu(common, "seq_lens"), num_reqs)
        table = _leading("block_table_tensor", common.block_table_tensor, num_reqs, ndim=2)
        slots = _leading("slot_mapping", common.slot_mapping, int(starts[-1]), np.int64)
        query_lens = np.diff(starts)
        longer = np.flatnonzero(query_lens != 1)
        p = int(longer[-1]) + 1 if longer.size else 0
        metadata = CPUAttentionMetadata(
            num_prefills=p,
            num_prefill_tokens=int(starts[p]),
            num_decode_tokens=int(starts[-1] - starts[p]),
            slot_mapping=slots,
            seq_lens=lens.tolist(),
            seq_lens_tensor=lens[p:],
            max_decode_seq_len=int(lens[p:].max(initial=0)),
            block_tables=table[p:],
            chunked_prefill=self.chunked_prefill,
            max_query_len=int(query_lens.max(initial=0)),
            max_kv_len=int(lens[:p].max(initial=0)),
            prefill_query_start_loc=starts[: p + 1],
            kv_start_loc=running_sum(lens[:p]),
            prefill_block_tables=table[:p],
            query_start_loc=starts,
            causal=_check.boolean("causal", getattr(common, "causal", True)),
        )
        if (encoder_lens := getattr(common, "encoder_seq_lens", None)) is not None:
            encoder = _leading("encoder_seq_lens", encoder_lens, num_reqs)
            metadata.encoder_seq_lens, metadata.encoder_seq_lens_tensor = encoder.tolist(), encoder
            metadata.max_encoder_seq_len = int(encoder.max(initial=0))
            metadata.num_encoder_tokens = int(encoder.sum(dtype=np.int64))
        for name, kind in (("cross_slot_mapping", np.int64), ("cross_block_tables", np.int32)):
            if (x := getattr(common, name, None)) is not None:
                setattr(metadata, name, _check.integers(name, x, kind, None).copy())
        return metadata


def _cpu(common: Any, name: str) -> Any:
    on_cpu = getattr(common, f"{name}_cpu", None)
    return getattr(common, name) if on_cpu is None else on_cpu


def _leading(name: str, x: Any, number: int, dtype: Any = np.int32, ndim: int = 1) -> Array:
    a = _check.integers(name, x, dtype, ndim)
    if len(a) < number:
        raise ValueError(f"{name}: shape {a.shape}, expected at least {number} along axis 0")
    own: Array = a[:number].copy()
    return own
