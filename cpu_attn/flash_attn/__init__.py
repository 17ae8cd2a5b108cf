# SPDX-License-Identifier: Apache-2.0
"""The functions of flash-attn 2.8 on CPUs, over torch's tensors.

from cpu_attn.flash_attn import flash_attn_func
cpu_attn.flash_attn.install()  # from here on also: from flash_attn import flash_attn_func
"""

from cpu_attn._adapters import require

require("torch")

import importlib.util  # noqa: E402
import sys  # noqa: E402
from importlib.machinery import ModuleSpec  # noqa: E402
from types import ModuleType  # noqa: E402

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

__version__ = "2.8.3"  # whose functions these are; callers ask flash_attn for it

# Modules by the names that flash-attn gives them, and what of ours is in them.
_MODULES: dict[str, tuple[ModuleType, list[str]]] = {
    "flash_attn": (flash_attn_interface, flash_attn_interface.__all__),
    "flash_attn.flash_attn_interface": (flash_attn_interface, flash_attn_interface.__all__),
    "flash_attn.bert_padding": (bert_padding, ["index_first_axis", "pad_input", "unpad_input"]),
    "flash_attn.layers": (rotary, []),
    "flash_attn.layers.rotary": (rotary, ["apply_rotary_emb"]),
}
_PACKAGES = ("flash_attn", "flash_attn.layers")


def install() -> None:
    """Makes ``import flash_attn`` find these functions, in this process; may be called again.

    Importable are flash_attn, flash_attn.flash_attn_interface, flash_attn.bert_padding and flash_attn.layers.rotary.
    RuntimeError where another flash_attn is imported or could be.
    """
    there = sys.modules.get("flash_attn")
    if there is not None and vars(there).get("flash_attn_func") is flash_attn_func:
        return
    if found := there or importlib.util.find_spec("flash_attn"):
        where = getattr(found, "__file__", None) or getattr(found, "origin", None)
        raise RuntimeError(f"flash_attn: another one is here ({where}), which install() does not replace")
    for name, (source, names) in _MODULES.items():
        module = ModuleType(name, source.__doc__)
        module.__spec__ = ModuleSpec(name, None, origin="cpu_attn.flash_attn", is_package=name in _PACKAGES)
        module.__package__ = name if name in _PACKAGES else name.rpartition(".")[0]
        if name in _PACKAGES:
            module.__path__ = []
        vars(module).update({each: getattr(source, each) for each in names}, __all__=list(names))
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    vars(sys.modules["flash_attn"])["__version__"] = __version__
