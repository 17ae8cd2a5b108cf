# SPDX-License-Identifier: Apache-2.0
"""This module has all that these adapters use of transformers and that it promises to nobody: names in its modules,
attributes, and what the closures of its mask functions hold. tests/adapters/test_transformers_private.py says which of
it a version lacks."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from functools import cache, wraps
from types import CellType, FunctionType
from typing import Any

import torch

from transformers import cache_utils, integrations, masking_utils
from transformers.generation.continuous_batching import PagedAttentionCache, cache_allocators, input_outputs
from transformers.generation.continuous_batching import cache as paged_cache
from transformers.integrations import hub_kernels

# ---- caches ----

CacheLayerMixin = cache_utils.CacheLayerMixin
LinearAttentionLayer = cache_utils.LinearAttentionLayer
DummyLayer = cache_utils.DummyLayer
get_layer_types_and_kwargs = cache_utils.get_layer_types_and_kwargs


# ---- masks ----

sdpa_mask = masking_utils.sdpa_mask
causal_mask_function = masking_utils.causal_mask_function
# A plan can express these mask functions. Each has a way to make one, and the variables of its closure that say the
# rest. Those of one maker share their code.
_MADE: dict[str, tuple[Any, tuple[str, ...]]] = {
    "causal": (masking_utils.causal_mask_function, ()),
    "bidirectional": (masking_utils.bidirectional_mask_function, ()),
    "and": (masking_utils.and_masks(masking_utils.causal_mask_function), ("mask_functions",)),
    "window": (masking_utils.sliding_window_overlay(1), ("sliding_window",)),
    "window on both sides": (masking_utils.sliding_window_bidirectional_overlay(1), ("sliding_window",)),
    "chunks": (masking_utils.chunked_overlay(1, torch.zeros(1)), ("chunk_size", "left_padding")),
    "packed": (masking_utils.packed_sequence_mask_function(torch.zeros(1, 1)), ("packed_sequence_mask",)),
    "remapped": (
        masking_utils.remap_positions_for_packed_sequence(masking_utils.causal_mask_function, torch.zeros(1, 1)),
        ("mask_function",),
    ),
}
MASK_FUNCTIONS = {made.__code__: (kind, names) for kind, (made, names) in _MADE.items()}


def mask_function(function: Any) -> tuple[str, list[Any]]:
    """Says which of MASK_FUNCTIONS it is, and gives the variables of its closure; the name is empty for any other."""
    code: Any = getattr(function, "__code__", None)
    kind, names = MASK_FUNCTIONS.get(code, ("", ()))
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True)) if names else {}
    return kind, [cells[name].cell_contents for name in names]


def hides_nothing(attention_mask: Any, kv_length: int, kv_offset: int, local_size: int | None) -> bool:
    """Says whether sdpa needs no mask for bidirectional attention."""
    padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    return bool(masking_utils._ignore_bidirectional_mask_sdpa(padding, kv_length, local_size))


# ---- models ----


def modeling(config: Any) -> Any:
    """Gives the module of the models of such a configuration; None where it has not been imported."""
    return sys.modules.get(type(config).__module__.replace("configuration_", "modeling_"))


def latent_attention(config: Any) -> list[Any]:
    """Lists the classes of attention among them that cache latents, and expand them in a method of their own."""
    module = modeling(config)
    return [x for x in vars(module).values() if isinstance(x, type) and hasattr(x, "expand_kv")] if module else []


def latent_weights(module: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Gives, of a module of such a class, what makes keys of latents, [H, nope, L], and values, [H, L, Dv], as views.
    It gives None where something else than a plain product makes them."""
    made = module.kv_b_proj
    if type(made) is not torch.nn.Linear or made.bias is not None:
        return None
    sizes = module.qk_nope_head_dim, module.v_head_dim
    keys, values = made.weight.detach().unflatten(0, (-1, sum(sizes))).split(sizes, 1)
    return keys, values.mT


def index_block_size(module: Any) -> int:
    """Gives how many keys are in a block that a module's indexer selects (MiniMax M3)."""
    return int(module.indexer.block_size)


def implementation(config: Any) -> str | None:
    name: str | None = config._attn_implementation
    return name


def set_implementation(config: Any, name: str | None) -> None:
    """Sets the name in this config alone, unchecked: set_attn_implementation looks for a flash_attn package by the
    name."""
    config._attn_implementation_internal = name


def supports_sdpa(model_class: Any) -> bool:
    return bool(model_class._supports_sdpa)


# ---- layers of lightning attention ----

_forwards: dict[type, Any] = {}  # the forwards of classes that have another one


def lightning_attention() -> type:
    """Gives the class of MiniMax-01's layers of lightning attention, which call no function that could be given."""
    module = importlib.import_module("transformers.models.minimax.modeling_minimax")
    found: type = module.MiniMaxLightningAttention
    return found


def give_forward(layer_class: Any, make: Callable[[Any], Any]) -> None:
    """Gives the layers of a class another forward, which ``make`` makes of their own."""
    if layer_class not in _forwards:
        _forwards[layer_class] = layer_class.forward
        layer_class.forward = make(layer_class.forward)


def has_given() -> bool:
    """Says whether models have other functions or forwards than their own."""
    return bool(_given or _forwards)


def take_forwards_back() -> None:
    """Undoes what :func:`give_forward` did."""
    while _forwards:
        layer_class, forward = _forwards.popitem()
        layer_class.forward = forward  # type: ignore[attr-defined]


# ---- continuous batching ----


@cache
def leave_pages_to(name: str) -> None:
    """Makes ``PagedAttentionCache.update`` give models of that implementation the pages themselves, as its attention
    function's ``cache``, and what they would write into them. Models of 5.24 call that before they attend, those of
    5.23 hand the cache over."""
    update = PagedAttentionCache.update
    if hasattr(update, "leaves_pages_to"):  # an earlier call has done it
        return

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @wraps(update)
    def updated(self: Any, key_states: Any, value_states: Any, layer_idx: int, kwargs: dict[str, Any]) -> Any:
        if implementation(self.config) != name:
            return update(self, key_states, value_states, layer_idx, kwargs)
        kwargs["cache"] = self
        return key_states, value_states

    updated.leaves_pages_to = name
    PagedAttentionCache.update = updated


def pages(paged: Any, layer_idx: int) -> tuple[Any, list[torch.Tensor]]:
    """Gives a layer's allocator (index, layer_type, tokens_per_page, and sliding_window where it has one), and its K
    and V as rows [tokens, Hkv, D]."""
    allocator = paged.layer_to_allocator[layer_idx]
    return allocator, list(allocator._kv_token_views[layer_idx])


CacheAllocator = cache_allocators.CacheAllocator


def bytes_per_page(config: Any, num_kv_heads: int, dtype: torch.dtype, page_size: int) -> int:
    """Gives the bytes of a page of keys and values."""
    head_dim = paged_cache.find_head_dim(config)
    found: int = cache_allocators.FullAttentionCacheAllocator.get_bytes_per_page(
        num_kv_heads, head_dim, dtype, page_size
    )
    return found


def allocator(paged: Any, layer_idx: int) -> Any:
    return paged.layer_to_allocator[layer_idx]


def add_allocators(classes: dict[str, type]) -> None:
    """Makes continuous batching take layers of more kinds. What it tells them of a step has room for its own two."""
    for kind, made in classes.items():
        paged_cache.ATTN_TYPE_TO_ALLOCATOR.setdefault(kind, made)
    make = input_outputs.ContinuousBatchingIOs._setup_static_tensors
    if hasattr(make, "kinds"):  # an earlier call has done it
        return

    @wraps(make)
    def made_for_all(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        for kind in set(classes) & set(self.cache.cache_allocators):
            self.cumulative_seqlens_k[kind] = torch.zeros_like(self.cumulative_seqlens_q)
            self.total_seqlen_k[kind] = self.max_length_k[kind] = 0

    made_for_all.kinds = set(classes)  # type: ignore[attr-defined]
    input_outputs.ContinuousBatchingIOs._setup_static_tensors = made_for_all


def add_states(find_conv: Any, find: Any, put_conv: Any, put: Any) -> None:
    """Gives PagedAttentionCache the methods of caches that layers of linear attention call."""
    made = {"get_conv_state": find_conv, "get_recurrent_state": find}
    made |= {"update_conv_state": put_conv, "update_recurrent_state": put}
    for name, method in made.items():
        if not hasattr(PagedAttentionCache, name):
            setattr(PagedAttentionCache, name, torch.compiler.disable(method))


def has_cache_argument(model: Any) -> bool:
    """Says whether the model takes ``cache``, by which continuous batching hands its cache over. Models of transformers
    5.23 hand that on to attention, and to no other layer."""
    return "cache" in inspect.signature(model.forward).parameters


def forward_of(model: Any, cache: Any, input_ids: torch.Tensor) -> Callable[[int, int], Any]:
    """Gives what computes the tokens [1, T] from one place to another, which the cache then has, without logits where
    the model has a body. Some bodies count positions from 0 unless told."""
    body = getattr(model, "base_model", model)
    takes = inspect.signature(body.forward).parameters
    name = "cache" if "cache" in takes else "past_key_values"

    def forward(start: int, end: int) -> Any:
        options = {"position_ids": torch.arange(start, end)[None]} if "position_ids" in takes else {}
        return body(input_ids=input_ids[:, start:end], use_cache=True, **{name: cache}, **options)

    return forward


def states_after_a_token(model: Any) -> dict[int, dict[tuple[str, int], tuple[tuple[int, ...], torch.dtype]]]:
    """Runs a token, and gives by layers the shapes and dtypes of a sequence's states, by their names in a cache's layer
    and their numbers."""
    with torch.no_grad():
        found = model(torch.zeros(1, 1, dtype=torch.int64, device=model.device), use_cache=True)
    held = found.get("cache", found.get("past_key_values"))
    return {
        i: {
            (name, number): (tuple(x.shape[1:]), x.dtype)
            for name in ("conv_states", "recurrent_states")
            for number, x in (getattr(layer, name, None) or {}).items()
            if x is not None
        }
        for i, layer in enumerate(getattr(held, "layers", []))
    }


# ---- functions of linear attention ----

# Models decorate their functions with this. What it makes keeps in cells which implementation it calls.
_DECORATOR = "use_kernel_func_from_hub_with_fallback"
_decorator = getattr(hub_kernels, _DECORATOR)
_CELLS = ("func_name", "implementation", "applicable_params", "is_new_implementation")
_given: dict[FunctionType, dict[str, Any]] = {}  # what was in the cells of functions that have another implementation


class _Everything:
    def __contains__(self, name: object) -> bool:
        return True


def _cells(x: Any) -> tuple[FunctionType, dict[str, CellType]] | None:
    """Gives the function that the decorator made, and its cells, of a name in a model's module: it is there as it is
    or, with the package `kernels`, in the forward of a torch module."""
    function = x if isinstance(x, FunctionType) else getattr(type(x), "forward", None)
    if not isinstance(function, FunctionType):
        return None
    around = [c.cell_contents for c in function.__closure__ or () if function.__globals__ is not vars(hub_kernels)]
    for found in (function, *around):
        if isinstance(found, FunctionType) and found.__globals__ is vars(hub_kernels):
            cells = dict(zip(found.__code__.co_freevars, found.__closure__ or (), strict=True))
            if all(name in cells for name in _CELLS):
                return found, cells
    return None


def _give(x: Any, make: Callable[[str, Any], Any]) -> None:
    found = _cells(x)
    if not found or found[0] in _given:
        return
    function, cells = found
    own = tuple(CellType(c.cell_contents) for c in function.__closure__ or ())
    before = FunctionType(function.__code__, function.__globals__, function.__name__, None, own)
    instead = make(cells["func_name"].cell_contents, before)
    if instead is not None:
        _given[function] = {name: cells[name].cell_contents for name in _CELLS}
        cells["implementation"].cell_contents = instead
        cells["applicable_params"].cell_contents = _Everything()
        cells["is_new_implementation"].cell_contents = True


def _functions() -> Iterator[Any]:
    """Gives what is in the modules of models that have been imported, those of the hub's own code among them."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("transformers.", "transformers_modules.")) and ".modeling_" in name:
            yield from list(vars(module).values())


def give_functions(make: Callable[[str, Any], Any]) -> None:
    """Gives models other functions of linear attention, also those models that are imported later.

    Args:
        make: is called with a function's name in the library that transformers would take it from, and with
            transformers' function, and gives what is called instead, with any arguments, or None.
    """

    @wraps(_decorator)
    def decorator(*args: Any, **kwargs: Any) -> Any:
        decorate = _decorator(*args, **kwargs)

        def decorated(function: Any) -> Any:
            found = decorate(function)
            _give(found, make)
            return found

        return decorated

    for x in _functions():
        _give(x, make)
    for module in (hub_kernels, integrations):
        setattr(module, _DECORATOR, decorator)


def take_functions_back() -> None:
    """Undoes what :func:`give_functions` did."""
    for module in (hub_kernels, integrations):
        setattr(module, _DECORATOR, _decorator)
    for function, before in _given.items():
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        for name, x in before.items():
            cells[name].cell_contents = x
    _given.clear()
