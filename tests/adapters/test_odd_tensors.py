# SPDX-License-Identifier: Apache-2.0
"""tests/python/test_odd_arguments.py for flash-attn's functions and FlashInfer's, and the tensors of torch that they do
not expect."""

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
from cpu_attn import flash_attn, flashinfer  # noqa: E402

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
