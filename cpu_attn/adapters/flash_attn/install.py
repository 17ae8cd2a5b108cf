# SPDX-License-Identifier: Apache-2.0
"""This module puts the names of flash-attn where programs find them."""

from __future__ import annotations

from typing import Any

from cpu_attn.flash_attn import bert_padding, flash_attn_3, flash_attn_4, flash_attn_interface, rotary
from cpu_attn.torch.entry import stand_in

__version__ = "2.8.3"  # the release that these functions are like; callers ask flash_attn for it

_FUNCTIONS = {name: getattr(flash_attn_interface, name) for name in flash_attn_interface.__all__}
_ROTARY = ("apply_rotary_emb", "apply_rotary_emb_kv_", "apply_rotary_emb_qkv_")
_FOUR = {name: getattr(flash_attn_4, name) for name in flash_attn_4.__all__}
MODULES: dict[str, dict[str, Any]] = {
    "flash_attn": {name: x for name, x in _FUNCTIONS.items() if not name.startswith("_")},
    "flash_attn.flash_attn_interface": _FUNCTIONS,
    "flash_attn.bert_padding": {
        name: getattr(bert_padding, name) for name in ("index_first_axis", "pad_input", "unpad_input")
    },
    "flash_attn.layers": {},
    "flash_attn.layers.rotary": {name: getattr(rotary, name) for name in _ROTARY},
    "flash_attn.cute": _FOUR,
    "flash_attn.cute.interface": _FOUR,
    "flash_attn_interface": {name: getattr(flash_attn_3, name) for name in flash_attn_3.__all__},
}


def install() -> None:
    """Makes ``import flash_attn`` find these functions, in this process. It may be called again.

    Importable are then flash_attn, flash_attn.flash_attn_interface, flash_attn.bert_padding and
    flash_attn.layers.rotary, as flash-attn 3 has it flash_attn_interface, and flash_attn.cute, which is flash-attn 4.

    Raises:
        RuntimeError: another flash_attn or flash_attn_interface is imported, or could be.
    """
    three = "flash_attn_interface"
    others = {name: x for name, x in MODULES.items() if name != three}
    stand_in({three: MODULES[three]})
    stand_in(others | {"flash_attn": MODULES["flash_attn"] | {"__version__": __version__}})
