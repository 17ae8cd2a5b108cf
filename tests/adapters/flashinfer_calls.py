# SPDX-License-Identifier: Apache-2.0
"""Calls of FlashInfer's functions with small tensors: all that write, CALLS, and others, READS."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from .flashinfer_case import WORKSPACE

torch = pytest.importorskip("torch")
from cpu_attn.flashinfer.install import MODULES  # noqa: E402

Args = dict[str, Any]
F32, F8 = torch.float32, torch.float8_e4m3fn


class Call(NamedTuple):
    """A function, its tensors by name, its other arguments, the names of what it writes, and those of what one of these
    may be. Tensors of one argument, which is a tuple, are called NAME[0] and NAME[1]."""

    run: Callable[..., Any]
    tensors: Args
    others: Args
    writes: tuple[str, ...]
    in_place: tuple[str, ...] = ()

    def __call__(self, tensors: Args) -> None:
        args = self.others | {name: x for name, x in tensors.items() if "[" not in name}
        for name in {name.partition("[")[0] for name in tensors if "[" in name}:
            args[name] = (tensors[f"{name}[0]"], tensors[f"{name}[1]"])
        self.run(**args)


def randn(*shape: int, dtype: Any = F32) -> Any:
    return torch.randn(*shape).to(dtype)


def ints(*x: int) -> Any:
    return torch.tensor(x, dtype=torch.int32)


def name_of(module: str) -> Any:
    path, _, name = module.rpartition(".")
    return MODULES[f"flashinfer{path and '.'}{path}"][name]


# ---- attention: two sequences of 3 and 4 query tokens, in pages of 16, Hq 4, Hkv 2, D 8 ----


STARTS, PAGES = ints(0, 3, 7), {"indptr": ints(0, 1, 2), "indices": ints(0, 1), "last_page_len": ints(9, 12)}
SIZES = {"num_qo_heads": 4, "num_kv_heads": 2, "q_data_type": F32}
PAGED = {f"paged_kv_{name}": x for name, x in PAGES.items()}
SERVED = {"workspace_buffer": WORKSPACE, "max_seq_len": 16}
SCALES = {"bmm1_scale": 0.3, "bmm2_scale": 1.0}


def planned(wrapper: str, *args: Any, **plan: Any) -> Any:
    found = name_of(wrapper)(*args)
    found.plan(**plan)
    return found.run


def attends(run: Any, queries: int, rows: Args, out: str = "out", query: str = "q", **others: Any) -> Call:
    to = {out: randn(queries, 4, 8)} | ({"lse": randn(queries, 4)} if out == "out" else {})
    return Call(run, {query: randn(queries, 4, 8), **rows, **to}, others, tuple(to))


def pages(name: str = "paged_kv_cache") -> Args:
    return {f"{name}[{i}]": randn(2, 16, 2, 8) for i in (0, 1)}


def of_pages(wrapper: str, queries: int, *args: Any, name: str = "paged_kv_cache", **plan: Any) -> Call:
    return attends(planned(wrapper, *args, **SIZES, page_size=16, **plan), queries, pages(name))


def keys(n: int = 16) -> Args:
    return {"k": randn(n, 2, 8), "v": randn(n, 2, 8)}


def of_blocks(variable: bool) -> Call:
    if not variable:
        where = {"indptr": ints(0, 1, 3), "indices": ints(1, 0, 1), "M": 7, "N": 16, "R": 4, "C": 8}
        plan = {**SIZES, "head_dim": 8, "o_data_type": F32}
        return attends(planned("sparse.BlockSparseAttentionWrapper", WORKSPACE, **where, **plan), 7, keys())
    where = {"block_mask_map": torch.ones(2, 2, 2, dtype=torch.bool)}
    where |= {"block_row_sz": ints(3, 4).expand(2, 2), "block_col_sz": ints(9, 7).expand(2, 2)}
    run = planned("sparse.VariableBlockSparseAttentionWrapper", WORKSPACE, **where, **SIZES, head_dim=8)
    given = {"q": randn(4, 7, 8), "k": randn(2, 16, 8), "v": randn(2, 16, 8)}
    return Call(run, {**given, "out": randn(4, 7, 8), "lse": randn(4, 7)}, {}, ("out", "lse"))


def served(name: str, queries: int, **others: Any) -> Call:
    where = {"block_tables": ints(0, 1)[:, None], "seq_lens": ints(9, 12)}
    call = attends(name_of(name), queries, pages("kv_cache"), query="query", **SERVED, **SCALES, **where, **others)
    here = inspect.signature(call.run).parameters
    tensors = {n: x for n, x in call.tensors.items() if n.partition("[")[0] in here}
    others = {n: x for n, x in call.others.items() if n in here}
    return Call(call.run, tensors, others, tuple(n for n in call.writes if n in here))


RAGGED = {"cum_seq_lens_q": STARTS, "cum_seq_lens_kv": ints(0, 9, 16)}
CONTEXT = {"max_q_len": 4, "max_kv_len": 16, "batch_size": 2, **RAGGED}


def ragged() -> Call:
    rows = {"key": randn(16, 2, 8), "value": randn(16, 2, 8)}
    more = {"seq_lens": ints(9, 7), "o_sf_scale": 1.0, "window_left": -1, "enable_pdl": None, "is_causal": True}
    how = {**CONTEXT, **SCALES, **more, "return_lse": False, "workspace_buffer": WORKSPACE}
    return attends(name_of("prefill.trtllm_ragged_attention_deepseek"), 7, rows, query="query", **how)


def latents() -> Call:
    where = {"qo_indptr": STARTS, "kv_indptr": ints(0, 1, 2), "kv_indices": ints(0, 1), "kv_len_arr": ints(9, 12)}
    how = {"num_heads": 4, "head_dim_ckv": 8, "head_dim_kpe": 4, "page_size": 16, "causal": True, "sm_scale": 0.3}
    run = planned("mla.BatchMLAPagedAttentionWrapper", WORKSPACE, **where, **how, q_data_type=F32)
    rows = {"q_pe": randn(7, 4, 4), "ckv_cache": randn(2, 16, 8), "kpe_cache": randn(2, 16, 4)}
    return attends(run, 7, rows, query="q_nope")


def served_latents(name: str) -> Call:
    sizes = {"qk_nope_head_dim": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4}
    where = {"block_tables": ints(0, 1)[:, None], "seq_lens": ints(9, 12)}
    to = {"out": randn(2, 1, 4, 8), "lse": randn(2, 1, 4)}
    writes = ("out", "lse") if name.startswith("trtllm") else ("out",)
    given = {"query": randn(2, 1, 4, 12), "kv_cache": randn(2, 16, 12), **{n: to[n] for n in writes}}
    return Call(name_of(f"mla.{name}"), given, {**SERVED, **SCALES, **sizes, **where}, writes)


def xqa(latent: bool) -> Call:
    given = {"page_table": ints(0, 1)[:, None], "seq_lens": ints(9, 12), "page_size": 16}
    given |= {"workspace_buffer": WORKSPACE, "semaphores": WORKSPACE}
    heads = {} if latent else {"num_kv_heads": 2}
    rows = {f"{x}_cache": randn(2, 16, 1 if latent else 2, 8) for x in "kv"}
    to = {"output": randn(2, 1, 4, 8)}
    return Call(
        name_of("xqa_mla" if latent else "xqa"), {"q": randn(2, 1, 4, 8), **rows, **to}, given | heads, ("output",)
    )


# ---- the others ----


def norm(name: str, out: Any = F32, **more: Any) -> Call:
    given = {"input": randn(3, 8), "weight": randn(8)}
    if name.startswith("layer"):
        given = {"input": randn(3, 8), "gemma": randn(8), "beta": randn(8)}
    writes = ()
    if "add" in name:
        given["residual"], writes = randn(3, 8), ("residual",) if out is not None else ("input", "residual")
    if out is not None:
        given["out"], writes = randn(3, 8, dtype=out), (*writes, "out")
    return Call(name_of(f"norm.{name}"), given, more, writes, ("input",) if out is F32 else ())


def rope(name: str) -> Call:
    given = {"q": randn(7, 4, 8), "k": randn(7, 2, 8)}
    where = {"pos_ids": torch.arange(7).int()} if "pos_ids" in name else {"indptr": STARTS, "offsets": ints(5, 6)}
    return Call(name_of(f"rope.{name}"), given | where, {}, ("q", "k"))


def rope_cache() -> Call:
    given = {"query": randn(7, 32), "key": randn(7, 16), "cos_sin_cache": randn(9, 8), "positions": torch.arange(7)}
    run = name_of("rope.apply_rope_with_cos_sin_cache_inplace")
    return Call(run, given, {"head_size": 8}, ("query", "key"))


def quantised(name: str, append: bool = False) -> Call:
    given = {"q_rope": randn(7, 4, 4), "k_rope": randn(7, 2, 4), "q_nope": randn(7, 4, 8), "k_nope": randn(7, 2, 8)}
    outs = {f"{n}_out": x.to(F8) for n, x in given.items() if not append or n.startswith("q")}
    table = {"cos_sin_cache": randn(9, 4), "pos_ids": torch.arange(7)}
    if not append:
        return Call(name_of(f"rope.{name}"), given | table | outs, {}, tuple(outs))
    to = {"paged_kv_cache[0]": randn(2, 16, 2, 12, dtype=F8), "paged_kv_cache[1]": randn(2, 16, 2, 8, dtype=F8)}
    where = {"kv_indices": ints(0, 1), "kv_indptr": ints(0, 1, 2), **new_tokens()}
    return Call(name_of(f"rope.{name}"), given | table | outs | to | {"v": randn(7, 2, 8)}, where, (*outs, *to))


def new_tokens() -> Args:
    return {"batch_indices": ints(0, 0, 0, 1, 1, 1, 1), "positions": ints(6, 7, 8, 8, 9, 10, 11)}


def appended(dtype: Any) -> Call:
    given = {"append_key": randn(7, 2, 8, dtype=dtype), "append_value": randn(7, 2, 8, dtype=dtype)}
    to = {name: x.to(dtype) for name, x in pages().items()}
    where = {f"kv_{name}": x for name, x in PAGES.items()} | new_tokens()
    return Call(name_of("page.append_paged_kv_cache"), given | to, where, tuple(to))


def appended_latents() -> Call:
    given = {"append_ckv": randn(7, 8), "append_kpe": randn(7, 4)}
    to = {"ckv_cache": randn(2, 16, 8), "kpe_cache": randn(2, 16, 4)}
    where = {f"kv_{name}": x for name, x in PAGES.items()} | new_tokens()
    return Call(name_of("page.append_paged_mla_kv_cache"), given | to, where, tuple(to))


def places() -> Call:
    given = {"append_indptr": STARTS.clone(), "seq_lens": ints(9, 12)}
    to = {name: x.clone() for name, x in new_tokens().items()}
    return Call(name_of("page.get_batch_indices_positions"), given | to, {"nnz": 7}, tuple(to))


def merged() -> Call:
    given = {"v": randn(7, 4, 8), "s": randn(7, 4), "v_other": randn(7, 4, 8), "s_other": randn(7, 4)}
    mask = {"mask": torch.arange(7) % 2 == 0}
    return Call(name_of("cascade.merge_state_in_place"), given | mask, {}, ("v", "s"))


def rule() -> Call:
    q, k, v = (randn(130, 2, 8) * 0.3 for _ in "qkv")
    given = {"q": q, "k": k, "v": v, "g": torch.rand(130, 2), "beta": torch.rand(130, 2)}
    given["initial_state"] = randn(3, 2, 8, 8)
    to = {"output": randn(130, 2, 8), "output_state": randn(3, 2, 8, 8), "state_checkpoints": randn(2, 2, 8, 8)}
    places = {"cu_seqlens": torch.tensor([0, 129, 129, 130]), "checkpoint_cu_starts": torch.tensor([0, 2, 2, 2])}
    how = {"checkpoint_every_n_tokens": 64, "output_final_state": True, **places}
    return Call(name_of("chunk_gated_delta_rule"), given | to, how, tuple(to), ("initial_state",))


def step(name: str, pool: bool = False) -> Call:
    q, k, v = (randn(3, 1, 2, 8) for _ in "qkv")
    given = {"q": q, "k": k, "v": v, "A_log": randn(2), "a": randn(3, 1, 2), "dt_bias": randn(2), "b": randn(3, 1, 2)}
    to = {"initial_state" if pool else "state": randn(3, 2, 8, 8), "output": randn(3, 1, 2, 8)}
    more = {"state": None, "initial_state_indices": ints(2, 0, 1)} if pool else {}
    return Call(name_of(f"gdn_decode.{name}"), given | to, more, tuple(to))


CALLS: dict[str, Callable[[], Call]] = {
    "decode.BatchDecodeWithPagedKVCacheWrapper.run": lambda: of_pages(
        "decode.BatchDecodeWithPagedKVCacheWrapper", 2, WORKSPACE, **PAGES, head_dim=8
    ),
    "prefill.BatchPrefillWithPagedKVCacheWrapper.run": lambda: of_pages(
        *("prefill.BatchPrefillWithPagedKVCacheWrapper", 7, WORKSPACE), **PAGED, qo_indptr=STARTS, head_dim_qk=8
    ),
    "prefill.BatchPrefillWithRaggedKVCacheWrapper.run": lambda: attends(
        planned(
            *("prefill.BatchPrefillWithRaggedKVCacheWrapper", WORKSPACE),
            **{**SIZES, "qo_indptr": STARTS, "kv_indptr": ints(0, 9, 16), "head_dim_qk": 8},
        ),
        *(7, keys()),
    ),
    "attention.BatchAttention.run": lambda: of_pages(
        *("attention.BatchAttention", 7),
        name="kv_cache",
        **{"qo_indptr": STARTS, "kv_indptr": ints(0, 1, 2), "kv_indices": ints(0, 1), "kv_len_arr": ints(9, 12)},
        **{"head_dim_qk": 8, "head_dim_vo": 8, "kv_data_type": F32},
    ),
    "attention.BatchAttentionWithAttentionSinkWrapper.run": lambda: of_pages(
        *("attention.BatchAttentionWithAttentionSinkWrapper", 7, WORKSPACE), **PAGED, qo_indptr=STARTS, head_dim_qk=8
    ),
    "sparse.BlockSparseAttentionWrapper.run": lambda: of_blocks(False),
    "sparse.VariableBlockSparseAttentionWrapper.run": lambda: of_blocks(True),
    "mla.BatchMLAPagedAttentionWrapper.run": latents,
    "decode.trtllm_batch_decode_with_kv_cache": lambda: served(
        "decode.trtllm_batch_decode_with_kv_cache", 2, kv_layout="NHD"
    ),
    "decode.xqa_batch_decode_with_kv_cache": lambda: served("decode.xqa_batch_decode_with_kv_cache", 2),
    "prefill.trtllm_batch_context_with_kv_cache": lambda: served(
        "prefill.trtllm_batch_context_with_kv_cache", 7, kv_layout="NHD", **CONTEXT
    ),
    "prefill.trtllm_ragged_attention_deepseek": ragged,
    "mla.trtllm_batch_decode_with_kv_cache_mla": lambda: served_latents("trtllm_batch_decode_with_kv_cache_mla"),
    "mla.xqa_batch_decode_with_kv_cache_mla": lambda: served_latents("xqa_batch_decode_with_kv_cache_mla"),
    "xqa": lambda: xqa(False),
    "xqa_mla": lambda: xqa(True),
    "norm.rmsnorm": lambda: norm("rmsnorm"),
    "norm.gemma_rmsnorm": lambda: norm("gemma_rmsnorm"),
    "norm.fused_rmsnorm_silu": lambda: norm("fused_rmsnorm_silu"),
    "norm.rmsnorm_quant": lambda: norm("rmsnorm_quant", F8, scale=0.5),
    "norm.layernorm_quant": lambda: norm("layernorm_quant", F8, scale=0.5),
    "norm.fused_add_rmsnorm": lambda: norm("fused_add_rmsnorm", None),
    "norm.gemma_fused_add_rmsnorm": lambda: norm("gemma_fused_add_rmsnorm", None),
    "norm.fused_add_rmsnorm_quant": lambda: norm("fused_add_rmsnorm_quant", F8, scale=0.5),
    **{
        f"rope.{name}": (lambda name=name: rope(name))
        for kind in ("rope", "llama31_rope")
        for name in (f"apply_{kind}_inplace", f"apply_{kind}_pos_ids_inplace")
    },
    "rope.apply_rope_with_cos_sin_cache_inplace": rope_cache,
    "rope.rope_quantize_fp8": lambda: quantised("rope_quantize_fp8"),
    "rope.mla_rope_quantize_fp8": lambda: quantised("mla_rope_quantize_fp8"),
    "rope.rope_quantize_fp8_append_paged_kv_cache": lambda: quantised("rope_quantize_fp8_append_paged_kv_cache", True),
    "page.append_paged_kv_cache": lambda: appended(F32),
    "page.append_paged_kv_cache of bytes": lambda: appended(F8),
    "page.append_paged_mla_kv_cache": appended_latents,
    "page.get_batch_indices_positions": places,
    "cascade.merge_state_in_place": merged,
    "chunk_gated_delta_rule": rule,
    "gdn_decode.gated_delta_rule_decode": lambda: step("gated_delta_rule_decode"),
    "gdn_decode.gated_delta_rule_decode_pretranspose": lambda: step("gated_delta_rule_decode_pretranspose"),
    "gdn_decode.gated_delta_rule_decode_pretranspose of a pool": lambda: step(
        "gated_delta_rule_decode_pretranspose", True
    ),
}


# ---- what is read ----


def plans(wrapper: str, *args: Any, **plan: Any) -> Call:
    found = name_of(wrapper)(*args)
    tensors = {n: x for n, x in plan.items() if isinstance(x, torch.Tensor)}
    return Call(found.plan, tensors, {n: x for n, x in plan.items() if n not in tensors}, ())


def reads(name: str, **given: Any) -> Call:
    tensors = {n: x for n, x in given.items() if isinstance(x, torch.Tensor)}
    return Call(name_of(name), tensors, {n: x for n, x in given.items() if n not in tensors}, ())


def mask() -> Any:
    return torch.arange(3 * 9 + 4 * 12) % 3 > 0


QUERY = {"head_dim_qk": 8, "qo_indptr": STARTS, **SIZES}
PLACES = {"pos_ids": torch.arange(7).int()}
READS: dict[str, Callable[[], Call]] = {
    "decode.plan": lambda: plans(
        *("decode.BatchDecodeWithPagedKVCacheWrapper", WORKSPACE),
        **{**PAGES, **SIZES, "head_dim": 8, "page_size": 16},
        **{"block_tables": ints(0, 1)[:, None], "seq_lens": ints(9, 12)},
    ),
    "prefill.plan": lambda: plans(
        *("prefill.BatchPrefillWithPagedKVCacheWrapper", WORKSPACE),
        **{**PAGED, **QUERY, "page_size": 16, "custom_mask": mask()},
    ),
    "prefill.plan of items": lambda: plans(
        *("prefill.BatchPrefillWithPagedKVCacheWrapper", WORKSPACE),
        **{**PAGED, **QUERY, "page_size": 16, "prefix_len_ptr": ints(6, 8), "token_pos_in_items_len": 4},
        token_pos_in_items_ptr=torch.zeros(8, dtype=torch.int64),
    ),
    "ragged.plan": lambda: plans(
        *("prefill.BatchPrefillWithRaggedKVCacheWrapper", WORKSPACE),
        **{**QUERY, "kv_indptr": ints(0, 9, 21), "seq_lens": ints(9, 12)},
        packed_custom_mask=torch.zeros(4 + 6, dtype=torch.uint8),
    ),
    "BatchAttention.plan": lambda: plans(
        *("attention.BatchAttention",),
        **{**QUERY, "kv_indptr": ints(0, 1, 2), "kv_indices": ints(0, 1), "kv_len_arr": ints(9, 12)},
        **{"head_dim_vo": 8, "page_size": 16, "kv_data_type": F32},
    ),
    "sparse.plan": lambda: plans(
        *("sparse.BlockSparseAttentionWrapper", WORKSPACE),
        **{"indptr": ints(0, 1, 3), "indices": ints(1, 0, 1), "M": 8, "N": 16, "R": 4, "C": 8},
        **{**SIZES, "head_dim": 8, "mask": torch.ones(3, 4, 8, dtype=torch.bool)},
    ),
    "variable.plan": lambda: plans(
        *("sparse.VariableBlockSparseAttentionWrapper", WORKSPACE),
        block_mask_map=torch.ones(2, 2, 2, dtype=torch.bool),
        **{"block_row_sz": ints(3, 4).repeat(2, 1), "block_col_sz": ints(9, 7).repeat(2, 1), **SIZES, "head_dim": 8},
    ),
    "mla.plan": lambda: plans(
        *("mla.BatchMLAPagedAttentionWrapper", WORKSPACE),
        **{"qo_indptr": STARTS, "kv_indptr": ints(0, 1, 2), "kv_indices": ints(0, 1), "kv_len_arr": ints(9, 12)},
        **{"num_heads": 4, "head_dim_ckv": 8, "head_dim_kpe": 4, "page_size": 16, "causal": True, "sm_scale": 0.3},
        q_data_type=F32,
    ),
    "convert_bsr_mask_layout": lambda: reads(
        "sparse.convert_bsr_mask_layout", mask=torch.ones(3, 4, 8, dtype=torch.bool), indptr=ints(0, 1, 3)
    ),
    "single_decode": lambda: reads("decode.single_decode_with_kv_cache", q=randn(4, 8), **keys()),
    "single_prefill": lambda: reads(
        *("prefill.single_prefill_with_kv_cache",),
        **{"q": randn(7, 4, 8), **keys(), "custom_mask": torch.ones(7, 16, dtype=torch.bool), "v_scale": torch.ones(2)},
        **{"scale_q": torch.ones(4), "scale_k": torch.ones(2)},
    ),
    "merge_state": lambda: reads(
        "cascade.merge_state", v_a=randn(7, 4, 8), s_a=randn(7, 4), v_b=randn(7, 4, 8), s_b=randn(7, 4)
    ),
    "merge_states": lambda: reads("cascade.merge_states", v=randn(7, 2, 4, 8), s=randn(7, 2, 4)),
    "layernorm": lambda: reads("norm.layernorm", input=randn(3, 8), gemma=randn(8), beta=randn(8)),
    "rmsnorm": lambda: reads("norm.rmsnorm", input=randn(3, 8), weight=randn(8)),
    "rmsnorm_quant": lambda: norm("rmsnorm_quant", F8, scale=torch.ones(1)),
    "apply_rope": lambda: reads(
        "rope.apply_rope", q=randn(7, 4, 8), k=randn(7, 2, 8), indptr=STARTS, offsets=torch.tensor([5, 6])
    ),
    "apply_llama31_rope_pos_ids": lambda: reads(
        "rope.apply_llama31_rope_pos_ids", q=randn(7, 4, 8), k=randn(7, 2, 8), **PLACES
    ),
    "packbits": lambda: reads("quantization.packbits", x=mask()),
    "segment_packbits": lambda: reads("quantization.segment_packbits", x=mask(), indptr=ints(0, 27, 75)),
    "get_seq_lens": lambda: reads(
        "page.get_seq_lens", kv_indptr=ints(0, 1, 2), kv_last_page_len=ints(9, 12), page_size=16
    ),
}
