# SPDX-License-Identifier: Apache-2.0
"""Whether the installed transformers has what cpu_attn/adapters/transformers/private.py uses of it, name by name.
Nothing of cpu_attn.transformers is imported here: without one of these names that fails."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import types
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

import cpu_attn  # noqa: E402

pytestmark = pytest.mark.integrations
ADAPTER = Path(cpu_attn.__file__).parent / "transformers"
MODULES = ("cache_utils", "masking_utils")
PRIVATE = ast.parse((ADAPTER / "private.py").read_text(encoding="utf-8"))
NAMES = sorted(
    {
        f"{node.value.id}.{node.attr}"
        for node in ast.walk(PRIVATE)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in MODULES
    }
)
# What makes a mask function, and which variables of its closure are read.
CLOSURES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "and_masks": (lambda f: f(hf.masking_utils.causal_mask_function), ("mask_functions",)),
    "sliding_window_overlay": (lambda f: f(1), ("sliding_window",)),
    "sliding_window_bidirectional_overlay": (lambda f: f(1), ("sliding_window",)),
    "chunked_overlay": (lambda f: f(1, torch.zeros(1)), ("chunk_size", "left_padding")),
    "packed_sequence_mask_function": (lambda f: f(torch.zeros(1, 1)), ("packed_sequence_mask",)),
    "remap_positions_for_packed_sequence": (
        lambda f: f(hf.masking_utils.causal_mask_function, torch.zeros(1, 1)),
        ("mask_function",),
    ),
}
BATCHING = "transformers.generation.continuous_batching"
ALLOCATORS = [f"{BATCHING}.cache_allocators.{x}" for x in ("cache_allocator", "full_attention", "sliding_attention")]
# Attributes, and the modules that set them.
ATTRIBUTES = {
    "layer_to_allocator": [f"{BATCHING}.cache"],
    **dict.fromkeys(("_kv_token_views", "index", "layer_type", "tokens_per_page", "sliding_window"), ALLOCATORS),
}


def lacks(name: str) -> str:
    return f"transformers {hf.__version__} has no {name}, which cpu_attn/adapters/transformers/private.py uses"


@pytest.mark.parametrize("name", NAMES)
def test_names(name: str) -> None:
    module, attribute = name.split(".")
    assert hasattr(importlib.import_module(f"transformers.{module}"), attribute), lacks(name)


@pytest.mark.parametrize("name", CLOSURES)
def test_variables_of_mask_functions(name: str) -> None:
    make, variables = CLOSURES[name]
    made = make(getattr(hf.masking_utils, name))
    assert isinstance(made, types.FunctionType)
    for variable in variables:
        assert variable in made.__code__.co_freevars, lacks(f"variable {variable} in masking_utils.{name}")


def test_variables_of_functions_of_linear_attention() -> None:
    decorate = hf.integrations.hub_kernels.use_kernel_func_from_hub_with_fallback
    made = decorate("causal_conv1d_fn", "no_such_package")(lambda: None)
    assert made.__globals__ is vars(hf.integrations.hub_kernels)
    for variable in ("func_name", "implementation", "applicable_params", "is_new_implementation"):
        assert variable in made.__code__.co_freevars, lacks(f"variable {variable} in {decorate.__name__}")


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attributes_of_continuous_batching(name: str) -> None:
    source = "".join(inspect.getsource(importlib.import_module(module)) for module in ATTRIBUTES[name])
    assert re.search(rf"\b{name}(: [^=\n]+)? = ", source), lacks(f"{name} in {ATTRIBUTES[name][0]}")


def test_attributes_of_models() -> None:
    config = hf.LlamaConfig()
    config._attn_implementation_internal = "eager"
    assert config._attn_implementation == "eager", lacks("config._attn_implementation_internal")
    assert hf.LlamaModel._supports_sdpa is True, lacks("PreTrainedModel._supports_sdpa")


def test_nobody_else_reaches_into_transformers() -> None:
    for path in set(ADAPTER.glob("*.py")) - {ADAPTER / "private.py"}:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [node.module] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            reached = [m for m in modules if m and m.startswith("transformers.")]
            assert not reached, f"{path.name} imports {reached[0]}: private.py is the place"
            if isinstance(node, ast.ImportFrom) and node.module == "transformers":
                names = {alias.name for alias in node.names}
                assert not names & set(MODULES), f"{path.name} imports {names}: private.py is the place"
