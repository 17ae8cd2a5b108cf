# SPDX-License-Identifier: Apache-2.0
"""This module is SGLang's attention on CPUs: ``--attention-backend cpu_attn``. See docs/sglang.md.

SGLang's cache is a pool of token slots, [slots, Hkv, D] for K and for V of each layer, and a table that says in which
slot each token of a request lies. Slots are given out in pages of ``--page-size`` tokens, which lie side by side: to
:func:`cpu_attn.attention_with_kv_cache` the pool is [slots / page, page, Hkv, D], ``NHD``, and every page-th column of
the table is the block table. A pool of float8_e4m3fn is ``fp8_e4m3``, with the scales that a layer has from its
checkpoint.
"""

from __future__ import annotations

from typing import Any

from cpu_attn._adapters import require

require("sglang")

import torch  # noqa: E402

from cpu_attn import SchedulerMetadata, attention_with_kv_cache, get_scheduler_metadata  # noqa: E402
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend  # noqa: E402
from sglang.srt.layers.radix_attention import AttentionType  # noqa: E402
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402

__all__ = ["Backend"]

MODES = (ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.DECODE)


class Backend(AttentionBackend):  # type: ignore[misc]
    """Computes the attention of all layers of a model. Prefill, chunks of it, decode, and both in one batch are the
    same call."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        self._pool, self._table = model_runner.token_to_kv_pool, model_runner.req_to_token_pool.req_to_token
        if type(self._pool) is not MHATokenToKVPool:
            raise NotImplementedError(
                f"cpu_attn: a cache of {type(self._pool).__name__}; it reads one of keys and values, all layers alike "
                "(for sliding windows --disable-hybrid-swa-memory; not MLA)"
            )
        self._kv_cache_dtype = "fp8_e4m3" if self._pool.dtype == torch.float8_e4m3fn else "auto"
        if self._kv_cache_dtype == "auto" and self._pool.store_dtype != model_runner.dtype:
            raise NotImplementedError(f"cpu_attn: a cache of {self._pool.dtype} for a model of {model_runner.dtype}")
        self._step: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self._plans: dict[Any, SchedulerMetadata] = {}

    def support_triton(self) -> bool:
        return False

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Makes what the layers of a step share: query_start_loc, seq_lens, block_table, and their plans."""
        mode = forward_batch.forward_mode
        if mode.is_idle():
            return
        if mode not in MODES or forward_batch.encoder_lens is not None:
            raise NotImplementedError(f"cpu_attn: {mode.name}, expected decoders' EXTEND, MIXED or DECODE")
        seq_lens = forward_batch.seq_lens.to(torch.int32)
        query_lens = torch.ones_like(seq_lens) if mode.is_decode() else forward_batch.extend_seq_lens
        query_start_loc = torch.zeros(len(seq_lens) + 1, dtype=torch.int32)
        torch.cumsum(query_lens, 0, out=query_start_loc[1:])
        page = self._pool.page_size
        table = self._table[forward_batch.req_pool_indices, : int(seq_lens.max()) : page] // page
        self._step, self._plans = (query_start_loc, seq_lens, table.contiguous()), {}

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor:
        """Writes k and v [T, Hkv, D] into the pool and computes attention of q [T, Hq * D] over it: [T, Hq * Dv]."""
        asked = [name for name, value in others.items() if value is not None]
        if layer.is_cross_attention or layer.attn_type != AttentionType.DECODER or layer.xai_temperature_len > 0:
            asked.append(f"layer {layer.layer_id}")
        if asked:
            raise NotImplementedError(f"cpu_attn: {', '.join(asked)}: only decoders' causal attention")
        scales = self._scales(layer)
        if save_kv_cache and k is not None:
            self._pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v, *scales)
        page = self._pool.page_size
        key_cache, value_cache = (x.unflatten(0, (-1, page)) for x in self._pool.get_kv_buffer(layer.layer_id))
        query = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        output = q.new_empty(len(query), layer.tp_q_head_num, layer.v_head_dim)
        query_start_loc, seq_lens, block_table = self._step  # type: ignore[misc]
        before = layer.sliding_window_size  # keys that a token sees besides its own
        window = before + 1 if before > -1 else -1
        attention_with_kv_cache(
            query,
            key_cache,
            value_cache,
            output,
            query_start_loc,
            seq_lens,
            layer.scaling,
            True,
            None,
            window,
            block_table,
            layer.logit_cap or 0.0,
            self._plan(layer, query.dtype, window),
            None if sinks is None else sinks.detach(),
            kv_cache_dtype=self._kv_cache_dtype,
            k_scale=scales[0],
            v_scale=scales[1],
            kv_cache_layout="NHD",
        )
        return output.flatten(1)

    forward_decode = forward_extend

    def _scales(self, layer: Any) -> tuple[float, float]:
        """Gives the scales of an fp8 cache, and 1 for any other: a checkpoint may have scales that its cache does not
        use."""
        if self._kv_cache_dtype == "auto":
            return 1.0, 1.0
        return layer.k_scale_float or 1.0, layer.v_scale_float or 1.0

    def _plan(self, layer: Any, dtype: torch.dtype, window: int) -> SchedulerMetadata:
        shape = (layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim)
        key = (*shape, layer.v_head_dim, dtype, window)
        if key not in self._plans:
            query_start_loc, seq_lens, block_table = self._step  # type: ignore[misc]
            self._plans[key] = get_scheduler_metadata(
                len(seq_lens),
                *shape,
                seq_lens,
                dtype,
                query_start_loc,
                causal=True,
                sliding_window=window,
                head_size_v=layer.v_head_dim,
                block_table=block_table,
                block_size=self._pool.page_size,
                kv_cache_dtype=self._kv_cache_dtype,
                kv_cache_layout="NHD",
            )
        return self._plans[key]
