# SPDX-License-Identifier: Apache-2.0
"""This module puts FlashInfer's names where programs find them."""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

from cpu_attn.flashinfer import (
    attention,
    cascade,
    decode,
    gdn,
    mla,
    norm,
    page,
    pod,
    prefill,
    quantization,
    rope,
    rope_quantize,
    sparse,
)
from cpu_attn.flashinfer.xqa import xqa, xqa_mla
from cpu_attn.torch.entry import stand_in


def _names(module: ModuleType) -> dict[str, Any]:
    return {name: getattr(module, name) for name in module.__all__}


_PARTS = {
    m.__name__.rpartition(".")[2]: m for m in (attention, cascade, decode, mla, norm, page, pod, prefill, rope, sparse)
}
# These are only in modules, as in FlashInfer.
_NOT_ABOVE = re.compile(r"(trtllm_|xqa_|MLA).*|.*_dimensions|convert_bsr_mask_layout")
_GDN = _names(gdn)
_PREFILL = {"chunk_gated_delta_rule": _GDN.pop("chunk_gated_delta_rule")}
_ABOVE = _PREFILL | {
    name: x
    for module in (*_PARTS.values(), quantization)
    for name, x in _names(module).items()
    if not _NOT_ABOVE.fullmatch(name)
}
_XQA = {"xqa": xqa, "xqa_mla": xqa_mla}
MODULES: dict[str, dict[str, Any]] = {"flashinfer": _ABOVE | _XQA}
MODULES |= {f"flashinfer.{name}": _names(module) for name, module in _PARTS.items()}
MODULES["flashinfer.triton"] = {}  # all that is in it is its module
MODULES["flashinfer.triton.cascade"] = {name: x for name, x in _names(cascade).items() if name.startswith("merge_")}
MODULES["flashinfer.rope"] |= _names(rope_quantize)
MODULES["flashinfer.quantization"] = _names(quantization)
MODULES |= {"flashinfer.gdn_prefill": _PREFILL, "flashinfer.gdn_decode": _GDN, "flashinfer.xqa": _XQA}
__version__ = "0.7.2"  # the release that these functions are like; callers ask flashinfer for it


def install() -> None:
    """Makes ``import flashinfer`` find these, in this process. It may be called again.

    Importable are then flashinfer and its modules attention, cascade, decode, gdn_decode, gdn_prefill, mla, norm, page,
    pod, prefill, quantization, rope, sparse, triton.cascade and xqa.

    Raises:
        RuntimeError: another flashinfer is imported, or could be.
    """
    library = MODULES["flashinfer"] | {"__version__": __version__}
    latent = {name: x for name, x in MODULES["flashinfer.mla"].items() if "decode" in name}
    decoding = MODULES["flashinfer.decode"] | latent  # these had their place there, and serving engines know it
    stand_in(MODULES | {"flashinfer": library, "flashinfer.decode": decoding})
