# SPDX-License-Identifier: Apache-2.0
"""This module makes the metadata of a step from vLLM's description of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cpu_attn import _check
from cpu_attn.backend.attention_metadata import CPUAttentionMetadata, running_sum
from cpu_attn.backend.paged_attention import Array


class CPUAttentionMetadataBuilder:
    """Makes the metadata of each step for the layers of one cache group, from vLLM's ``CommonAttentionMetadata``.

    Args:
        kv_cache_spec: kept as it is.
        layer_names: kept as they are.
        config: its ``scheduler_config`` says whether prefill is chunked; the rest is not looked at.
        device: the CPU: ``"cpu"``, ``torch.device("cpu")`` or None.

    Raises:
        ValueError: the device is another one.

    Example:
        >>> from types import SimpleNamespace
        >>> import numpy as np
        >>> from cpu_attn import CPUAttentionMetadataBuilder
        >>> common = SimpleNamespace(
        ...     num_reqs=2, query_start_loc=np.array([0, 3, 4], np.int32), seq_lens=np.array([3, 9], np.int32),
        ...     block_table_tensor=np.array([[0], [1]], np.int32), slot_mapping=np.array([0, 1, 2, 24]))
        >>> metadata = CPUAttentionMetadataBuilder(None, ["layers.0"], None).build(0, common)
        >>> metadata.num_prefills, metadata.num_prefill_tokens, metadata.num_decode_tokens
        (1, 3, 1)
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
        """Moves requests with one scheduled token (decodes) behind all others, with as few swaps as can be.

        Args:
            input_batch: an object with ``req_ids`` and ``swap_states(i, j)``.
            scheduler_output: an object with ``num_scheduled_tokens``, {request id: number}.

        Returns:
            Whether anything moved.

        Raises:
            KeyError: a request has no number. Nothing has moved then.
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
        """Makes the metadata of a step. Trailing requests of one query token are its decodes, whatever the order.

        Args:
            common_prefix_len: changes nothing: a plan finds for itself which requests share blocks.
            common_attn_metadata: an object with ``num_reqs``, ``query_start_loc`` [R + 1], ``seq_lens`` [R] (or both
                with ``_cpu`` behind the name, which are preferred), ``block_table_tensor`` [R, M], ``slot_mapping`` [T]
                and ``causal`` (True unless said). For cross attention also ``encoder_seq_lens`` [R],
                ``cross_slot_mapping`` and ``cross_block_tables`` [R, M]. Rows past R and slots past T are padding. All
                of it is copied, so an engine may fill the arrays for its next step.
            fast_build: changes nothing.

        Returns:
            The metadata. Its lengths and blocks are checked by the layers.

        Raises:
            ValueError: ``query_start_loc`` does not begin with 0 or falls, or an array is too short or has other axes.
            TypeError: an array has another dtype, or ``causal`` is no boolean.
            NotImplementedError: the step has masks that no layer here has (``mm_req_doc_ranges``,
                ``rswa_prefix_lens``).
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
