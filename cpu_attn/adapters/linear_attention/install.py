# SPDX-License-Identifier: Apache-2.0
"""This module puts the names of these functions where programs find them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cpu_attn import _check
from cpu_attn.linear_attention import conv, delta_rule, mamba
from cpu_attn.torch.entry import stand_in

_GATED = {x.__name__: x for x in (delta_rule.chunk_gated_delta_rule, delta_rule.fused_recurrent_gated_delta_rule)}
_GATED |= {"chunk_gdn": delta_rule.chunk_gated_delta_rule}  # fla's shorter names of the same
_GATED |= {"fused_recurrent_gdn": delta_rule.fused_recurrent_gated_delta_rule}
_KDA = {x.__name__: x for x in (delta_rule.chunk_kda, delta_rule.fused_recurrent_kda)}
_CONV = {x.__name__: x for x in (conv.causal_conv1d_fn, conv.causal_conv1d_update)}
_VARLEN = {"causal_conv1d_varlen_states": conv.causal_conv1d_varlen_states}
_SSD = {"mamba_chunk_scan_combined": mamba.mamba_chunk_scan_combined}
_UPDATE = {"selective_state_update": mamba.selective_state_update}
# What stands in for each library: its modules, and the release that these functions are like.
MODULES: dict[str, dict[str, dict[str, Any]]] = {
    "fla": {
        "fla": {"__version__": "0.6.0"},
        "fla.ops": _GATED | _KDA,
        "fla.ops.gated_delta_rule": _GATED,
        "fla.ops.kda": _KDA,
    },
    "causal_conv1d": {
        "causal_conv1d": _CONV | {"__version__": "1.7.0"},
        "causal_conv1d.causal_conv1d_interface": _CONV,
        "causal_conv1d.causal_conv1d_varlen": _VARLEN,
    },
    "mamba_ssm": {
        "mamba_ssm": {"__version__": "2.3.2.post1"},
        "mamba_ssm.ops": {},
        "mamba_ssm.ops.triton": {},
        "mamba_ssm.ops.triton.ssd_combined": _SSD,
        "mamba_ssm.ops.triton.selective_state_update": _UPDATE,
    },
}


def install(libraries: Sequence[str] = tuple(MODULES)) -> None:
    """Makes imports of these libraries find these functions, in this process. It may be called again.

    Importable are then fla.ops, fla.ops.gated_delta_rule, fla.ops.kda; causal_conv1d, its causal_conv1d_interface and
    causal_conv1d_varlen; mamba_ssm.ops.triton.ssd_combined, mamba_ssm.ops.triton.selective_state_update.

    Args:
        libraries: which of ``fla``, ``causal_conv1d`` and ``mamba_ssm``.

    Raises:
        RuntimeError: one of them is imported, or could be. Those named before it are in place then.
        ValueError: a name is none of these.
    """
    names = _check.sequence("libraries", libraries)
    for name in names:
        _check.choice("libraries", name, MODULES)
    for name in names:
        stand_in(MODULES[name])
