# SPDX-License-Identifier: Apache-2.0
"""This package has the functions of flash-attn 2.8 on CPUs, over torch's tensors.

from cpu_attn.flash_attn import flash_attn_func
cpu_attn.flash_attn.install()  # from here on also: from flash_attn import flash_attn_func
"""

from cpu_attn._adapters import require

require("torch")

from cpu_attn.flash_attn import bert_padding, flash_attn_interface, rotary  # noqa: E402
from cpu_attn.flash_attn.flash_attn_interface import (  # noqa: E402
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from cpu_attn.torch.entry import stand_in  # noqa: E402

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
]

__version__ = "2.8.3"  # the release that these functions are like; callers ask flash_attn for it

_FUNCTIONS = {name: getattr(flash_attn_interface, name) for name in flash_attn_interface.__all__}


def install() -> None:
    """Makes ``import flash_attn`` find these functions, in this process. It may be called again.

    Importable are then flash_attn, flash_attn.flash_attn_interface, flash_attn.bert_padding and
    flash_attn.layers.rotary.

    Raises:
        RuntimeError: another flash_attn is imported, or could be.
    """
    padding = {name: getattr(bert_padding, name) for name in ("index_first_axis", "pad_input", "unpad_input")}
    stand_in(
        {
            "flash_attn": _FUNCTIONS | {"__version__": __version__},
            "flash_attn.flash_attn_interface": _FUNCTIONS,
            "flash_attn.bert_padding": padding,
            "flash_attn.layers": {},
            "flash_attn.layers.rotary": {"apply_rotary_emb": rotary.apply_rotary_emb},
        }
    )
