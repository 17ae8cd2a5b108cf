# SPDX-License-Identifier: Apache-2.0
"""What FlashInfer's functions write and read: a tensor that cannot be is refused by its name before any byte is
written."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from functools import partialmethod
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.integrations,
    pytest.mark.filterwarnings("ignore:.*(Sparse|nested tensors|quantize).*"),
]
from cpu_attn import flashinfer  # noqa: E402
from cpu_attn.flashinfer.install import MODULES  # noqa: E402

from .flashinfer_calls import CALLS, F8, PAGED, PAGES, READS, SIZES, Args, Call  # noqa: E402
from .flashinfer_case import WORKSPACE  # noqa: E402

WRITING = re.compile(r"out|lse|output|\w+_out|output_state|state|state_checkpoints")


def test_every_call_that_writes_is_here() -> None:
    tested = {name.split()[0]: make() for name, make in CALLS.items()}
    known = {id(call.run) for call in tested.values()} | {id(getattr(c.run, "__func__", None)) for c in tested.values()}
    for module, names in MODULES.items():
        for name, x in names.items():
            methods = inspect.getmembers(x, inspect.isfunction) if inspect.isclass(x) else []
            for method, function in methods or ([(name, x)] if inspect.isfunction(x) else []):
                if inspect.isclass(x) and isinstance(inspect.getattr_static(x, method), partialmethod):
                    continue
                writes = [p for p in inspect.signature(function).parameters if WRITING.fullmatch(p)]
                if writes or re.search("in_?place|append|fused_add", method):
                    assert id(function) in known, f"{module}.{name}.{method}: {writes}"


def wrong(x: Any) -> Iterator[tuple[str, Any]]:
    for axis in [i for i, n in enumerate(x.shape) if n > 1][:1]:
        yield "expanded", x.narrow(axis, 0, 1).clone().expand(x.shape)
    yield "longer rows", torch.zeros(*x.shape[:-1], x.shape[-1] + 1, dtype=x.dtype)
    yield "fewer axes", x[0].clone()
    yield "float64", x.double()
    yield "bool", x.bool()
    yield "complex", x.to(torch.complex64)
    yield "quantised", torch.quantize_per_tensor(x.float(), 0.5, 0, torch.qint8)
    yield "meta", x.to("meta")
    yield "sparse", x.float().to_sparse().to(x.dtype)
    if x.dtype not in (torch.bool, F8):  # whose negatives torch itself has not
        yield "negative", torch._neg_view(x.clone())
    yield "array", x.float().numpy()
    if x.is_floating_point():
        yield "gradients", x.clone().requires_grad_()
    shrunk = x.clone()
    shrunk.untyped_storage().resize_(x.nbytes - x.element_size())
    yield "shrunk", shrunk


def plain(x: Any) -> bool:
    """Whether its memory can be looked at."""
    if x.layout != torch.strided or x.device.type != "cpu" or x.is_complex() or x.is_quantized or x.is_neg():
        return False
    return bool(x.untyped_storage().nbytes() >= x.nbytes or 0 in x.stride())


def bits(x: Any) -> Any:
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.view(kind[x.element_size()]).clone()


def refuses(call: Call, tensors: Args, what: str) -> None:
    """Nothing has changed after an error that begins with a name of the call's."""
    readable = {n: x.detach() for n, x in tensors.items() if isinstance(x, torch.Tensor) and plain(x)}
    before = {name: bits(x) for name, x in readable.items()}
    names = "|".join(inspect.signature(call.run).parameters)
    with pytest.raises((ValueError, TypeError)) as error:
        call(tensors)
    assert re.match(rf"({names})\b", str(error.value)), f"{what}: {error.value}"
    for name, x in readable.items():
        assert bits(x).equal(before[name]), f"{what}: {name} has changed"


@pytest.mark.parametrize("name", CALLS)
def test_what_cannot_be_written(name: str) -> None:
    call = CALLS[name]()
    for output in call.writes:
        for what, x in wrong(call.tensors[output]):
            refuses(call, {n: t.clone() for n, t in call.tensors.items()} | {output: x}, f"{output}: {what}")
    call({n: t.clone() for n, t in call.tensors.items()})


@pytest.mark.parametrize("name", CALLS)
def test_what_shares_memory(name: str) -> None:
    call = CALLS[name]()
    for output in call.writes:
        for other in call.tensors.keys() - {output}:
            x, y = call.tensors[output], call.tensors[other]
            memory = torch.zeros(max(x.nbytes, y.nbytes) + 16, dtype=torch.uint8)
            shared = [memory[: t.nbytes].view(t.dtype).view(t.shape) for t in (x, y)]
            shared[1].copy_(y)
            if other in call.in_place and x.shape == y.shape and x.dtype == y.dtype:  # allowed, unless it is shifted
                shared[0] = memory[8 : 8 + x.nbytes].view(x.dtype).view(x.shape)
            tensors = {n: t.clone() for n, t in call.tensors.items()} | dict(zip((output, other), shared, strict=True))
            refuses(call, tensors, f"{output} and {other}")


@pytest.mark.parametrize("name", CALLS)
def test_what_inference_mode_made(name: str) -> None:
    """torch itself would write to such tensors in some ways only."""
    call = CALLS[name]()
    plain = {n: t.clone() for n, t in call.tensors.items()}
    with torch.inference_mode():
        made = {n: t.clone() for n, t in call.tensors.items()}
    call(plain)
    call(made)
    for output in call.writes:
        assert bits(made[output].clone()).equal(bits(plain[output])), output


def test_buffers_of_plans() -> None:
    """They are checked when a plan writes them, too."""

    def made(**more: Any) -> Any:
        buffers = {f"{name}_buffer": x.clone() for name, x in PAGED.items()} | more
        return flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, "NHD", True, **buffers), buffers

    plan = {**PAGES, **SIZES, "head_dim": 8, "page_size": 16}
    wrapper, buffers = made()
    wrapper.plan(**plan | {"indices": buffers["paged_kv_indices_buffer"]})
    for name, x in buffers.items():
        for what, wrong_one in wrong(x):
            if what == "longer rows" and "indices" in name:
                continue
            with pytest.raises((ValueError, TypeError), match=rf"^{name}\b"):
                made(**{name: wrong_one})[0].plan(**plan)
    buffers["paged_kv_last_page_len_buffer"].untyped_storage().resize_(4)
    with pytest.raises(ValueError, match=r"^paged_kv_last_page_len_buffer: its elements end 8 bytes"):
        wrapper.plan(**plan)
    both = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^paged_kv_last_page_len_buffer: shares memory with paged_kv_indices_buffer"):
        made(paged_kv_indices_buffer=both[:3], paged_kv_last_page_len_buffer=both[2:])


def odd(x: Any) -> Iterator[tuple[str, Any]]:
    if x.dtype in (torch.int32, torch.int64):  # either may do
        for kind in (torch.int32, torch.int64):
            for what, y in wrong(x.to(kind)):
                yield f"{kind} {what}", y
            empty = x.to(kind, copy=True)
            empty.untyped_storage().resize_(0)
            yield f"{kind} without memory", empty
    else:
        yield from wrong(x)


@pytest.mark.parametrize("name", CALLS | READS)
def test_what_cannot_be_read(name: str) -> None:
    """It is refused by name, or read as what it is."""
    call = (CALLS | READS)[name]()
    call({n: x.clone() for n, x in call.tensors.items()})
    names = "|".join(inspect.signature(call.run).parameters)
    given = call.tensors | {n: x for n, x in call.others.items() if isinstance(x, torch.Tensor) and x.numel()}
    for argument, x in given.items():
        for what, y in odd(x):
            try:
                call({n: t.clone() for n, t in given.items()} | {argument: y})
            except (ValueError, TypeError) as error:
                assert re.match(rf"({names})\b", str(error)), f"{argument}: {what}: {error}"


@pytest.mark.parametrize("name", ["packbits", "segment_packbits", "get_seq_lens", "apply_rope", "sparse.plan"])
def test_what_lies_negated(name: str) -> None:
    """A tensor whose memory holds the negatives of its elements is read as what it is, or refused."""
    call = READS[name]()
    args = call.others | call.tensors
    want = call.run(**args)
    for argument, x in call.tensors.items():
        if x.dtype != torch.bool:
            y = torch._neg_view(-x)
            try:
                got = call.run(**args | {argument: y})
            except ValueError as error:
                assert re.match(rf"{argument}: is the negative", str(error))
                continue
            for a, b in zip(got or (), want or (), strict=True):
                assert a.equal(b)
