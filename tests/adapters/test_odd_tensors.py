# SPDX-License-Identifier: Apache-2.0
"""tests/python/test_odd_arguments.py for the functions of flash-attn, FlashInfer and linear attention, and the tensors
of torch that they do not expect."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

from ..python.test_odd_arguments import ODD, Args, arguments, refused_by_name_or_taken

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.integrations,
    pytest.mark.filterwarnings("ignore:.*(Sparse CSR|nested tensors|Converting a tensor).*"),
]
from cpu_attn import flash_attn, flashinfer, linear_attention  # noqa: E402
from cpu_attn.flashinfer import gdn  # noqa: E402

zeros, F32 = torch.zeros, torch.float32


def ints(*x: Any) -> Any:
    return torch.tensor(x, dtype=torch.int32)


def odd_tensors() -> Args:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "sparse": zeros(2, 3, 4, 8).to_sparse(),
            "sparse rows": zeros(6, 8).to_sparse_csr(),
            "nested": torch.nested.nested_tensor([zeros(3, 8)]),
            "meta": zeros(2, 3, 4, 8, device="meta"),
            "complex": zeros(2, 3, 4, 8, dtype=torch.complex64),
            "float64": zeros(2, 3, 4, 8, dtype=torch.float64),
            "gradients": zeros(2, 3, 4, 8, requires_grad=True),
            "negative": torch._neg_view(zeros(2, 3, 4, 8)),
            "conjugate": zeros(2, 3, 4, 8, dtype=torch.complex64).conj(),
            "quantised": torch.quantize_per_tensor(zeros(2, 3, 4, 8), 0.5, 0, torch.qint8),
            "sparse integers": torch.zeros(3, dtype=torch.int64).to_sparse(),
            "integers on meta": torch.zeros(3, dtype=torch.int64, device="meta"),
            "negative integers": torch._neg_view(torch.zeros(3, dtype=torch.int64)),
            "numbers": zeros(2),
            "flag": torch.tensor(True),
        }


def decode() -> flashinfer.BatchDecodeWithPagedKVCacheWrapper:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(zeros(8, dtype=torch.uint8))
    wrapper.plan(**plan_args())
    return wrapper


def plan_args() -> Args:
    pages = {"indptr": ints(0, 1, 2), "indices": ints(0, 1), "last_page_len": ints(3, 4)}
    sizes = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 8, "page_size": 16}
    return {**pages, **sizes, "q_data_type": F32}


Q, K, PACKED_Q, PACKED_K, STARTS = zeros(2, 3, 4, 8), zeros(2, 3, 2, 8), zeros(6, 4, 8), zeros(6, 2, 8), ints(0, 3, 6)
LENGTHS = {"cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS, "max_seqlen_q": 3, "max_seqlen_k": 3}
NEW = {"k": K, "v": K, "cache_seqlens": 2, "rotary_cos": zeros(9, 4), "rotary_sin": zeros(9, 4)}
RULE = {"q": zeros(2, 3, 2, 8), "k": zeros(2, 3, 2, 8), "v": zeros(2, 3, 4, 8), "beta": zeros(2, 3, 4)}
GATES = {"A_log": zeros(4), "a": zeros(2, 1, 4), "dt_bias": zeros(4), "b": zeros(2, 1, 4)}
TOKEN = {"q": zeros(2, 1, 2, 8), "k": zeros(2, 1, 2, 8), "v": zeros(2, 1, 4, 8), **GATES}
SCAN = {"x": zeros(2, 3, 4, 8), "dt": zeros(2, 3, 4), "A": zeros(4), "B": zeros(2, 3, 2, 5), "C": zeros(2, 3, 2, 5)}
UPDATE = {"x": zeros(2, 4, 8), "dt": zeros(2, 4, 8), "A": zeros(4, 8, 5), "B": zeros(2, 2, 5), "C": zeros(2, 2, 5)}
CALLS: dict[str, tuple[Callable[..., Any], Callable[[], Args]]] = {
    "func": (flash_attn.flash_attn_func, lambda: {"q": Q, "k": K, "v": K}),
    "qkvpacked": (flash_attn.flash_attn_qkvpacked_func, lambda: {"qkv": zeros(2, 3, 3, 4, 8)}),
    "kvpacked": (flash_attn.flash_attn_kvpacked_func, lambda: {"q": Q, "kv": zeros(2, 3, 2, 2, 8)}),
    "varlen": (
        flash_attn.flash_attn_varlen_func,
        lambda: {"q": PACKED_Q, "k": PACKED_K, "v": PACKED_K, **LENGTHS},
    ),
    "varlen_kvpacked": (
        flash_attn.flash_attn_varlen_kvpacked_func,
        lambda: {"q": PACKED_Q, "kv": zeros(6, 2, 2, 8), **LENGTHS},
    ),
    "varlen_qkvpacked": (
        flash_attn.flash_attn_varlen_qkvpacked_func,
        lambda: {"qkv": zeros(6, 3, 4, 8), "cu_seqlens": STARTS, "max_seqlen": 3},
    ),
    "with_kvcache": (
        flash_attn.flash_attn_with_kvcache,
        lambda: {"q": Q, "k_cache": zeros(2, 9, 2, 8), "v_cache": zeros(2, 9, 2, 8), **NEW},
    ),
    "wrapper": (
        flashinfer.BatchDecodeWithPagedKVCacheWrapper,
        lambda: {"float_workspace_buffer": zeros(8, dtype=torch.uint8)},
    ),
    "plan": (decode().plan, plan_args),
    "run": (decode().run, lambda: {"q": zeros(2, 4, 8), "paged_kv_cache": zeros(2, 2, 16, 2, 8)}),
    "merge_state": (
        flashinfer.merge_state,
        lambda: {"v_a": zeros(3, 4, 8), "s_a": zeros(3, 4), "v_b": zeros(3, 4, 8), "s_b": zeros(3, 4)},
    ),
    "merge_state_in_place": (
        flashinfer.merge_state_in_place,
        lambda: {"v": zeros(3, 4, 8), "s": zeros(3, 4), "v_other": zeros(3, 4, 8), "s_other": zeros(3, 4)},
    ),
    "merge_states": (flashinfer.merge_states, lambda: {"v": zeros(3, 2, 4, 8), "s": zeros(3, 2, 4)}),
    "gated": (linear_attention.chunk_gated_delta_rule, lambda: RULE | {"g": zeros(2, 3, 4)}),
    "gated_recurrent": (linear_attention.fused_recurrent_gated_delta_rule, lambda: RULE | {"g": zeros(2, 3, 4)}),
    "kda": (linear_attention.chunk_kda, lambda: RULE | {"g": zeros(2, 3, 4, 8)}),
    "kda_recurrent": (linear_attention.fused_recurrent_kda, lambda: RULE | {"g": zeros(2, 3, 4, 8)}),
    "conv": (linear_attention.causal_conv1d_fn, lambda: {"x": zeros(2, 8, 3), "weight": zeros(8, 4)}),
    "conv_update": (
        linear_attention.causal_conv1d_update,
        lambda: {"x": zeros(2, 8, 1), "weight": zeros(8, 4), "conv_state": zeros(2, 8, 4)},
    ),
    "scan": (linear_attention.mamba_chunk_scan_combined, lambda: SCAN | {"chunk_size": 64}),
    "state_update": (linear_attention.selective_state_update, lambda: UPDATE | {"state": zeros(2, 4, 8, 5)}),
    "gdn": (
        gdn.chunk_gated_delta_rule,
        lambda: {"q": PACKED_Q, "k": PACKED_Q, "v": PACKED_Q, "cu_seqlens": STARTS},
    ),
    "gdn_decode": (gdn.gated_delta_rule_decode, lambda: TOKEN | {"state": zeros(2, 4, 8, 8)}),
    "gdn_decode_pretranspose": (
        gdn.gated_delta_rule_decode_pretranspose,
        lambda: TOKEN | {"state": zeros(2, 4, 8, 8)},
    ),
}


@pytest.mark.parametrize(("call", "name"), [(call, name) for call, (f, _) in CALLS.items() for name in arguments(f)])
def test_every_argument(call: str, name: str) -> None:
    function, make = CALLS[call]
    refused_by_name_or_taken(function, make, name, ODD | odd_tensors())


@pytest.mark.parametrize(("call", "name"), [("func", "return_attn_probs"), ("with_kvcache", "return_softmax_lse")])
def test_the_name_of_what_is_returned(call: str, name: str) -> None:
    """Each function has its own."""
    function, make = CALLS[call]
    with pytest.raises(TypeError, match=rf"^{name}: expected True or False"):
        function(**make(), **{name: ODD["array"]})


def test_a_storage_that_shrank() -> None:
    """Of what is appended to, and of what torch itself would write past its end."""
    args = CALLS["with_kvcache"][1]()
    args["k_cache"].untyped_storage().resize_(args["k_cache"].nbytes - 4)
    with pytest.raises(ValueError, match=r"^k_cache: its elements end 1152 bytes into a storage of 1148$"):
        flash_attn.flash_attn_with_kvcache(**args)
    states = CALLS["merge_state_in_place"][1]()
    states["s"].untyped_storage().resize_(8)
    with pytest.raises(ValueError, match=r"^s: its elements end 48 bytes into a storage of 8$"):
        flashinfer.merge_state_in_place(**states)
