# SPDX-License-Identifier: Apache-2.0
"""torch.ops.cpu_attn: the cases' whole feature set through the ops against the float64 oracle, and what torch asks of
ops besides: fake tensors, torch.compile, inference_mode, and plans that travel as tensors."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import io
import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cpu_attn

from ..cases.judge import check
from ..cases.levels import cases
from ..cases.problem import build
from ..cases.run import run
from ..harness.steps import PLAN, attention_args, plan_args, write_args

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.integrations
import cpu_attn.torch as cpu_attn_torch  # noqa: E402

OPS = torch.ops.cpu_attn
# Of each op cpu-attn's function.
SIGNATURES = {
    "get_scheduler_metadata": inspect.signature(cpu_attn.get_scheduler_metadata),
    "cpu_attn_reshape_and_cache": inspect.signature(cpu_attn.reshape_and_cache),
    "cpu_attention_with_kv_cache": inspect.signature(cpu_attn.attention_with_kv_cache),
}


def tensor(x: Any) -> Any:
    """Arrays as tensors of the same memory, bfloat16 and float8 as bits; other things as they are."""
    if not isinstance(x, np.ndarray):
        return x
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        if x.dtype == getattr(ml_dtypes, name):
            return torch.from_numpy(x.view(f"uint{8 * x.itemsize}")).view(getattr(torch, name))
    return torch.from_numpy(x)


def rows(mapping: Any) -> Any:
    if mapping is None:
        return None
    found = [(r, *np.atleast_1d(x)) for r, some in mapping.items() for x in some]
    return torch.tensor(np.array(found, np.int32))


def through(op: str, called: list[str]) -> Any:
    """A function with the arguments of cpu_attn's that calls the op with tensors."""
    signature = SIGNATURES[op]

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = {k: tensor(v) for k, v in bound.arguments.items()}
        for name in ("mm_prefix_range", "document_start_loc"):
            if name in given:
                given[name] = rows(given[name])
        if "dtype" in given:
            given["dtype"] = getattr(torch, str(np.dtype(given["dtype"])))
        called.append(op)
        keywords = [p.name for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
        more = {k: given.pop(k) for k in keywords}
        return getattr(OPS, op)(*given.values(), **more)

    return call


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_whole_feature_set(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    called: list[str] = []
    for name, op in zip(
        ("get_scheduler_metadata", "reshape_and_cache", "attention_with_kv_cache"), SIGNATURES, strict=True
    ):
        monkeypatch.setattr(cpu_attn, name, through(op, called))
    attended = 0
    for case in cases("quick", dtype):
        backwards = case.strided and case.kv_cache_layout != "packed"  # tensors have no negative strides
        if not (case.latent or case.rotary or backwards):
            problem = build(case)
            result = check(problem, *run(problem))
            assert result.ok, result.message
            attended += 1
    assert attended > 100 and all(called.count(op) >= attended for op in SIGNATURES)


def _step(dtype: str = "float32", most: int | None = None, **changed: Any) -> tuple[list[Any], Any]:
    """Arguments of the attention op without the plan, and the plan's tensor. most: its max_selected_tokens."""
    args = {k: tensor(v) for k, v in (attention_args(dtype) | changed).items()}
    del args["scheduler_metadata"], args["lse"]
    planned = plan_args(dtype)
    given = [getattr(torch, dtype) if k == "dtype" else tensor(planned[k]) for k in PLAN]
    plan = OPS.get_scheduler_metadata(*given, True, -1, "auto", True, None, max_selected_tokens=most)
    return list(args.values()), plan


def _expected(dtype: str = "float32") -> Any:
    plain = attention_args(dtype)
    return tensor(cpu_attn.attention_with_kv_cache(**plain))


def test_as_vllm_calls_them() -> None:
    """Positional, with what its wrappers in _custom_ops.py pass, and with their defaults left out."""
    arguments, plan = _step()
    OPS.cpu_attention_with_kv_cache(*arguments, plan, None, None, 1.0, 1.0, "auto")
    assert torch.equal(arguments[3], _expected())
    arguments[3].zero_()
    OPS.cpu_attention_with_kv_cache(*arguments, plan, None, None)
    assert torch.equal(arguments[3], _expected())
    write, plain = write_args(), write_args()
    OPS.cpu_attn_reshape_and_cache(*map(tensor, write.values()), "vec", 1.0, 1.0, "auto")
    cpu_attn.reshape_and_cache(**plain, isa="vec")
    assert write["key_cache"].any() and (write["key_cache"] == plain["key_cache"]).all()
    names = [a.name for a in OPS.cpu_attention_with_kv_cache.default._schema.arguments if not a.kwarg_only]
    assert names[9] == "sliding_window_size" and names[-6:] == [
        *("scheduler_metadata", "s_aux", "dynamic_causal", "k_scale", "v_scale", "kv_cache_dtype")
    ]


def test_a_window_of_two_sides() -> None:
    arguments, _ = _step()
    step = plan_args() | {"causal": False, "sliding_window": (3, 1)}
    plain = attention_args(causal=False, sliding_window=(3, 1))
    cpu_attn.attention_with_kv_cache(**plain)
    given = [torch.float32 if k == "dtype" else tensor(step[k]) for k in PLAN]
    plan = OPS.get_scheduler_metadata(*given, False, [3, 1], "auto", True, None)
    arguments[7], arguments[9] = False, [3, 1]
    OPS.cpu_attention_with_kv_cache(*arguments, plan, None, None)
    assert torch.equal(arguments[3], tensor(plain["output"]))


# ---- plans as tensors ----


def test_a_plan_lives_as_long_as_its_tensor() -> None:
    from cpu_attn.torch.ops import _plans

    gc.collect()
    before = len(_plans)
    arguments, plan = _step()
    view, clone = plan[:], plan.clone()
    assert len(_plans) == before + 1
    for x in (plan, clone, copy.deepcopy(plan), pickle.loads(pickle.dumps(plan)), plan.view(1, 1), plan[0]):
        OPS.cpu_attention_with_kv_cache(*arguments, x, None, None)
    del plan, x
    gc.collect()
    OPS.cpu_attention_with_kv_cache(*arguments, clone, None, None)  # the view holds the memory
    del view
    gc.collect()
    assert len(_plans) == before
    with pytest.raises(ValueError, match=r"scheduler_metadata: no plan of this process .* \(a copy is of no use"):
        OPS.cpu_attention_with_kv_cache(*arguments, clone, None, None)


def test_a_plan_of_the_core_as_a_tensor() -> None:
    arguments, _ = _step()
    plan = cpu_attn_torch.ops.tensor_of(cpu_attn.get_scheduler_metadata(**plan_args()))
    OPS.cpu_attention_with_kv_cache(*arguments, plan, None, None)
    assert torch.equal(arguments[3], _expected())


@pytest.mark.parametrize(
    "foreign",
    [
        torch.zeros(1, dtype=torch.int64),
        torch.zeros(64, dtype=torch.int8),
        torch.zeros(0),
        torch.tensor([float("nan")]),
        torch.tensor([True]),
        torch.tensor([1j]),
        None,
    ],
)
def test_a_foreign_tensor_is_no_plan(foreign: Any) -> None:
    arguments, _ = _step()
    arguments[3].fill_(7)
    with pytest.raises(ValueError, match="scheduler_metadata: no plan of this process"):
        OPS.cpu_attention_with_kv_cache(*arguments, foreign, None, None)
    assert (arguments[3] == 7).all()


def test_another_process_does_not_know_it() -> None:
    _, plan = _step()
    file = io.BytesIO()
    torch.save(plan, file)
    code = """if True:
        import io, sys, torch, cpu_attn.torch
        plan = torch.load(io.BytesIO(sys.stdin.buffer.read()))
        try:
            cpu_attn.torch.ops.plan_of(plan)
        except ValueError as e:
            print(e)
    """
    done = subprocess.run([sys.executable, "-c", code], input=file.getvalue(), capture_output=True, check=True)
    assert b"no plan of this process" in done.stdout


def test_a_plan_for_another_step_is_refused() -> None:
    arguments, _ = _step()
    other, starts = torch.tensor([20, 8], dtype=torch.int32), torch.tensor([0, 3, 4], dtype=torch.int32)
    plan = OPS.get_scheduler_metadata(2, 4, 2, 8, other, torch.float32, starts, True, -1, "auto", True, None)
    with pytest.raises(ValueError, match=r"seq_lens\[1\]: 7, scheduler_metadata was made for 8"):
        OPS.cpu_attention_with_kv_cache(*arguments, plan, None, None)


NO_MAPPING = torch.tensor([[2, 0, 1]], dtype=torch.int32)
ABSENT = next(isa.name for isa in cpu_attn.isas() if not isa.supported)


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"num_req": -1}, ValueError, "num_req: -1 is outside"),
        ({"num_heads_q": 0}, ValueError, "num_heads_q: 0 is outside"),
        ({"num_heads_kv": 3}, ValueError, "num_heads_kv: 3 does not divide num_heads_q = 4"),
        ({"head_dim": 0}, ValueError, "head_dim: 0 is outside"),
        ({"window_size": [1, 2, 3]}, ValueError, r"window_size: expected \(left, right\), got 3 values"),
        ({"isa_hint": "avx"}, ValueError, "isa_hint: 'avx' is none of"),
        ({"isa_hint": ABSENT}, cpu_attn.UnavailableError, f"isa_hint: '{ABSENT}' is not available here"),
        ({"seq_lens": torch.zeros(1, dtype=torch.int32)}, ValueError, "seq_lens: axis 0 is 1, expected num_req = 2"),
        ({"mm_prefix_range": NO_MAPPING}, ValueError, "mm_prefix_range: request: 2 is outside 0..1"),
    ],
)
def test_errors_have_the_names_of_the_op(changed: dict[str, Any], error: type[Exception], words: str) -> None:
    args = [torch.float32 if k == "dtype" else tensor(plan_args()[k]) for k in PLAN]
    names = (a.name for a in OPS.get_scheduler_metadata.default._schema.arguments)
    given = dict(zip(names, [*args, True, -1, "auto", True, None], strict=False))
    with pytest.raises(error, match=f"^{words}"):
        OPS.get_scheduler_metadata(**given | changed)


def test_another_window_than_the_plans() -> None:
    arguments, plan = _step()
    arguments[9] = 4
    with pytest.raises(ValueError, match=r"^sliding_window_size: 4, scheduler_metadata was made for"):
        OPS.cpu_attention_with_kv_cache(*arguments, plan, None, None)


# ---- under torch ----


def test_what_torch_checks_of_an_op() -> None:
    """Schemas, mutation, fake tensors and AOT dispatch, each op with all its tensors."""
    arguments, plan = _step()
    lse = torch.zeros(4, 4)
    more = {"lse": lse, "selected_blocks": torch.tensor([[[0, 1]] * 2, [[0, -1]] * 2], dtype=torch.int32)}
    torch.library.opcheck(OPS.cpu_attention_with_kv_cache.default, (*arguments, plan, torch.zeros(4), None), more)
    arguments, plan = _step(most=2)
    more = {"selected_tokens": torch.tensor([[0, 1]] * 4, dtype=torch.int32)}
    torch.library.opcheck(OPS.cpu_attention_with_kv_cache.default, (*arguments, plan, None, None), more)
    write = tuple(map(tensor, write_args().values()))
    torch.library.opcheck(OPS.cpu_attn_reshape_and_cache.default, (*write, "auto"))
    fake = torch.empty(1, dtype=torch.int64, device="meta")
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        found = OPS.get_scheduler_metadata(
            *(2, 4, 2, 8, arguments[5], torch.float32, arguments[4], True, -1, "auto", True, None)
        )
    assert (found.shape, found.dtype, found.device.type) == (fake.shape, fake.dtype, "cpu")


def test_compiled() -> None:
    """A whole layer in one graph: the plan made in it, K and V written, attended, and used again."""

    def layer(key: Any, value: Any, key_cache: Any, value_cache: Any, slots: Any, arguments: list[Any], w: Any) -> Any:
        query, _, _, _, starts, lens, *rest = arguments
        plan = OPS.get_scheduler_metadata(2, 4, 2, 8, lens, torch.float32, starts, True, -1, "auto", True, None)
        OPS.cpu_attn_reshape_and_cache(key * 2, value, key_cache, value_cache, slots, "auto")
        output, lse = torch.empty_like(query), query.new_empty(4, 4)
        for _ in range(2):
            query = query + 1
            OPS.cpu_attention_with_kv_cache(
                *(query, key_cache, value_cache, output, starts, lens, *rest, plan, None, None), lse=lse
            )
            query = output @ w
        return query, lse

    torch._dynamo.reset()
    arguments, _ = _step()
    results = []
    for run_layer in (layer, torch.compile(layer, fullgraph=True)):
        write = [tensor(x) for x in write_args().values()]
        w = torch.eye(8) + 1
        with torch.inference_mode():
            results.append((*run_layer(*write, arguments, w), *write))
    for plain, compiled in zip(*results, strict=True):
        assert torch.allclose(plain, compiled, rtol=1e-5, atol=1e-5)
    assert results[0][2 + 2].any()  # the cache was written


def test_called_between_graphs() -> None:
    """Where dynamo gives a function up, it still traces what that calls, but not what an op calls."""

    @contextlib.contextmanager
    def untraceable() -> Iterator[None]:
        torch._dynamo.graph_break()
        yield

    def layer(arguments: list[Any], *write: Any) -> Any:
        _, _, _, output, starts, lens, *_ = arguments
        with untraceable():
            plan = OPS.get_scheduler_metadata(2, 4, 2, 8, lens, torch.float32, starts, True, -1, "auto", True, None)
            OPS.cpu_attn_reshape_and_cache(*write, "auto")
            OPS.cpu_attention_with_kv_cache(*arguments, plan, None, None)
        return output.clone()

    torch._dynamo.reset()
    arguments, _ = _step()
    results = []
    for run_layer in (layer, torch.compile(layer, backend="eager")):
        write = [tensor(x) for x in write_args().values()]
        results.append((run_layer(arguments, *write), *write))
    for plain, compiled in zip(*results, strict=True):
        assert torch.equal(plain, compiled)


def test_compiled_with_lengths_that_do_not_change() -> None:
    """Freezing works out what depends on buffers alone, once, and keeps copies: of no use for a plan."""
    arguments, _ = _step()

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("starts", arguments[4])
            self.register_buffer("lens", arguments[5])

        def forward(self, query: Any) -> Any:
            step = (*arguments[1:3], torch.empty_like(query), self.starts, self.lens, *arguments[6:])
            plan = OPS.get_scheduler_metadata(
                2, 4, 2, 8, self.lens, torch.float32, self.starts, True, -1, "auto", True, None
            )
            OPS.cpu_attention_with_kv_cache(query, *step, plan, None, None)
            return step[2]

    torch._dynamo.reset()
    want, compiled = Layer()(arguments[0]), torch.compile(Layer().eval(), fullgraph=True)
    with torch._inductor.config.patch(freezing=True), torch.no_grad():
        for _ in range(2):
            assert torch.equal(compiled(arguments[0]), want)
            gc.collect()


def test_gradients_are_refused() -> None:
    arguments, plan = _step()
    arguments[0].requires_grad_()
    with pytest.raises(ValueError, match="query: requires grad"):
        OPS.cpu_attention_with_kv_cache(*arguments, plan, None, None)


@pytest.mark.parametrize("transform", ["grad", "jvp", "vmap"])
def test_transforms_of_torch_func_are_refused(transform: str) -> None:
    """Which would find gradients of 0."""
    (query, *rest), plan = _step()

    def attend(x: Any) -> Any:
        OPS.cpu_attention_with_kv_cache(x, *rest, plan, None, None)
        return rest[2].sum()

    transformed = {
        "grad": lambda: torch.func.grad(attend)(query),
        "jvp": lambda: torch.func.jvp(attend, (query,), (query,)),
        "vmap": lambda: torch.vmap(attend)(query[None]),
    }[transform]
    with pytest.raises(RuntimeError, match=r"torch\.func"):
        transformed()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_gradients_are_refused_in_a_graph(backend: str) -> None:
    """When it is traced, rather than cut off; also by what was first compiled in no_grad."""
    (first, *rest), plan = _step()
    key, *write = map(tensor, write_args().values())

    def attend(query: Any) -> Any:
        OPS.cpu_attention_with_kv_cache(query * 2, *rest, plan, None, None)
        return rest[2].sum() + query.sum()

    def store(key: Any) -> Any:
        OPS.cpu_attn_reshape_and_cache(key * 2, *write, "auto")
        return key.sum()

    for run_op, x, name in ((attend, first, "query"), (store, key, "key")):
        torch._dynamo.reset()
        compiled, x = torch.compile(run_op, backend=backend, fullgraph=True), x.requires_grad_()
        with torch.no_grad():
            assert torch.allclose(compiled(x), run_op(x.detach()))
        with pytest.raises(Exception, match=rf"\b{name}: requires grad; pass it detached"):
            compiled(x)


def test_meta_tensors_are_refused() -> None:
    """One among others, as the core does it, and before anything is written."""
    arguments, plan = _step()
    step = [torch.float32 if k == "dtype" else tensor(plan_args()[k]) for k in PLAN]
    write = [tensor(x) for x in write_args().values()]
    calls: tuple[tuple[str, list[Any], dict[str, Any]], ...] = (
        ("get_scheduler_metadata", [*step, True, -1, "auto", True, None], {"mm_prefix_range": rows({0: [(0, 1)]})}),
        ("cpu_attn_reshape_and_cache", [*write, "auto"], {}),
        ("cpu_attention_with_kv_cache", [*arguments, plan, torch.zeros(4), None], {"lse": torch.zeros(4, 4)}),
    )
    for op, args, more in calls:
        schema = getattr(OPS, op).default._schema
        kwargs = dict(zip((a.name for a in schema.arguments), args, strict=False)) | more
        for name in (k for k, x in kwargs.items() if isinstance(x, torch.Tensor)):
            with pytest.raises(ValueError, match=f"^{name}: (lies on meta, expected cpu|no plan of this process)"):
                getattr(OPS, op)(**kwargs | {name: kwargs[name].to("meta")})
    assert not arguments[3].any() and not write[2].any()


@pytest.mark.parametrize(("version", "works"), [("2.12.1", False), ("2.99.0", True)])
def test_a_version_that_was_not_tested(version: str, works: bool) -> None:
    code = f"""if True:
        from importlib import metadata
        real = metadata.version
        metadata.version = lambda name: {version!r} if name == "torch" else real(name)
        try:
            import cpu_attn.torch, cpu_attn.flash_attn
            print("works")
        except ImportError as e:
            print(e)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    if works:
        assert done.stdout.strip() == "works"
        assert done.stderr.count("torch is 2.99.0, newer than those that cpu-attn was tested with") == 1
        assert "<string>:6: UserWarning" in done.stderr
    else:
        assert done.stdout.strip().startswith("cpu_attn.torch: torch is 2.12.1, older than those tested (>=2.13,<")
