# SPDX-License-Identifier: Apache-2.0
"""Public objects and exceptions, used and unused: copied, deep-copied, pickled, sent to a process and back."""

from __future__ import annotations

import copy
import inspect
import operator
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np
import pytest

import cpu_attn
from cpu_attn import (
    AttentionType,
    BlockManager,
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
    NoFreeBlocksError,
    OneDNNPagedAttention,
    PagedAttention,
    PagedKVCache,
    StoredCache,
    UnavailableError,
    distributed,
)
from cpu_attn.distributed import ContextParallel, Group, RankError, ThreadGroup

pytestmark = pytest.mark.isa
X = np.random.default_rng(0).standard_normal((3, 5, 2, 16)).astype(np.float32)


def attended(cache: PagedKVCache, step: Any) -> bytes:
    return cache.attend(np.repeat(X[0], 2, axis=1), step).tobytes()


def stepped() -> tuple[PagedKVCache, BlockManager, Any]:
    cache = PagedKVCache(4, 16, 2, 16)
    manager = BlockManager(cache)
    manager.allocate("a")
    step = manager.step([("a", range(5))])
    cache.update(X[1], X[2], step)
    return cache, manager, step


def metadata() -> CPUAttentionMetadata:
    return CPUAttentionMetadata(1, 5, 0, list(range(5)), [5], [], block_tables=[])


def forwarded(impl: CPUAttentionBackendImpl, step: CPUAttentionMetadata) -> bytes:
    pages = np.zeros(CPUAttentionBackend.get_kv_cache_shape(2, 16, 2, 16), np.float32)
    return impl.forward(None, np.repeat(X[0], 2, axis=1), X[1], X[2], pages, step).tobytes()


def impl() -> CPUAttentionBackendImpl:
    return CPUAttentionBackendImpl(4, 16, 0.25, 2, sinks=[1.0] * 4)


def used(make: Callable[[], Any], use: Callable[[Any], Any]) -> Callable[[], Any]:
    def made() -> Any:
        x = make()
        use(x)
        return x

    return made


def refused() -> Exception:
    _, manager, _ = stepped()
    manager.allocate("b")
    with pytest.raises(NoFreeBlocksError) as error:
        manager.step([("b", range(100))])
    return error.value


def profiled() -> Any:
    with cpu_attn.profile() as profile:
        stepped()
    return profile


def same_manager(manager: BlockManager) -> Any:
    """It goes on as the other one does."""
    manager.fork("a", "b")
    step = manager.step([("a", [1]), ("b", [2])])
    return step.block_table.tolist(), step.slot_mapping.tolist(), manager.allocate("c", range(5)), manager.seq_len("b")


def raised(error: Exception) -> Any:
    return type(error), str(error), error.args, vars(error)


CACHE = stepped()[0]
IMPL, STEP, PROFILE = impl(), metadata(), profiled()
# How each is made, what shows that another is the same, and the classes that the table stands for.
OBJECTS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "NoFreeBlocksError": (lambda: NoFreeBlocksError("batch", 3, 1), raised),
    "NoFreeBlocksError of what never fits": (lambda: NoFreeBlocksError("batch", 3, 1, "batch[0]"), raised),
    "NoFreeBlocksError raised": (refused, raised),
    "UnavailableError": (lambda: UnavailableError("no amx"), raised),
    "RankError": (lambda: RankError("rank 0 of 2"), raised),
    "Step": (lambda: stepped()[2], lambda x: attended(CACHE, x)),
    "Step used": (used(lambda: stepped()[2], lambda x: attended(CACHE, x)), lambda x: attended(CACHE, x)),
    "BlockStats": (lambda: stepped()[1].stats(), tuple),
    "BlockManager": (lambda: stepped()[1], same_manager),
    "BlockManager swapped": (used(lambda: stepped()[1], lambda m: m.swap_out("a")), lambda m: m.swap_in("a")),
    "PagedKVCache": (lambda: stepped()[0], lambda x: attended(x, stepped()[2])),
    "CacheDescriptor": (lambda: CACHE.descriptor, lambda x: x),
    "StoredCache": (
        lambda: StoredCache(CACHE.descriptor, CACHE.key_cache, CACHE.value_cache),
        lambda x: (x.descriptor, x.key_cache.tobytes(), x.value_cache.tobytes()),
    ),
    "AttentionType": (lambda: AttentionType.ENCODER, lambda x: x is AttentionType.ENCODER),
    "CPUAttentionBackend": (CPUAttentionBackend, lambda x: x.get_kv_cache_shape(2, 16, 2, 16)),
    "CPUAttentionBackendImpl": (impl, lambda x: forwarded(x, STEP)),
    "CPUAttentionBackendImpl used": (used(impl, lambda x: forwarded(x, STEP)), lambda x: forwarded(x, STEP)),
    "CPUAttentionMetadata": (metadata, lambda x: forwarded(IMPL, x)),
    "CPUAttentionMetadata used": (used(metadata, lambda x: forwarded(IMPL, x)), lambda x: forwarded(IMPL, x)),
    "CPUAttentionMetadataBuilder": (lambda: CPUAttentionMetadataBuilder(None, ["0"], None), lambda x: vars(x)),
    "PagedAttention": (PagedAttention, lambda x: x.engine),
    "OneDNNPagedAttention": (OneDNNPagedAttention, lambda x: x.engine),
    "Profile": (lambda: PROFILE, lambda x: (list(x.calls), x.totals, str(x))),
    "Isa": (lambda: cpu_attn.isas()[0], lambda x: x),
    "Engine": (lambda: cpu_attn.engines()[0], lambda x: x),
}
# A connection, and memory of this process.
BOUND = {
    "SchedulerMetadata": lambda: stepped()[2].plan(CACHE, 4),
    "ThreadGroup": lambda: ThreadGroup.make(1)[0],
    "ContextParallel": lambda: ContextParallel(ThreadGroup.make(1)[0]),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, get_context("spawn")) as executor:
        yield executor


def test_the_table_has_all_classes() -> None:
    public = {x for module in (cpu_attn, distributed) for x in vars(module).values() if inspect.isclass(x)}
    named = {name.split()[0] for name in (*OBJECTS, *BOUND)}
    assert {x.__name__ for x in public if x.__name__ in (*cpu_attn.__all__, *distributed.__all__)} - {"Group"} <= named
    assert Group in public and inspect.isabstract(Group)


@pytest.mark.parametrize("name", OBJECTS)
def test_objects(name: str, pool: ProcessPoolExecutor) -> None:
    make, shows = OBJECTS[name]
    want = shows(make())
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert shows(pickle.loads(pickle.dumps(make(), protocol))) == want
    for copied in (copy.copy(make()), copy.deepcopy(make()), pool.submit(copy.copy, make()).result()):
        assert shows(copied) == want
    one = make()
    shows(copy.deepcopy(one))
    shows(pickle.loads(pickle.dumps(one)))
    assert shows(one) == want  # the copies have changed nothing of it


@pytest.mark.parametrize("name", BOUND)
def test_what_belongs_to_its_process(name: str) -> None:
    x = BOUND[name]()
    for copied in (copy.copy(x), copy.deepcopy(x)):
        assert type(copied) is type(x)
    with pytest.raises(TypeError, match=r"^(SchedulerMetadata|ThreadGroup): cannot be pickled, it"):
        pickle.dumps(x)


def test_an_error_of_another_process(pool: ProcessPoolExecutor) -> None:
    _, manager, _ = stepped()
    with pytest.raises(NoFreeBlocksError, match=r"^batch: needs 6 blocks, 3 are free, 3 are missing") as error:
        pool.submit(manager.step, [("a", range(95))]).result()
    assert error.value.missing == 3


def test_a_copied_manager_has_the_same_caches_and_names() -> None:
    class Request:
        pass

    request, cache = Request(), PagedKVCache(4, 16, 1, 2)
    manager = BlockManager(cache)
    manager.allocate(request)
    copied = copy.copy(manager)
    copied.step([(request, [1, 2])])
    assert copied.caches[0] is cache and (copied.seq_len(request), manager.seq_len(request)) == (2, 0)
    both, its_request = copy.deepcopy([manager, request])
    assert both.caches[0] is not cache and both.seq_len(its_request) == 0
    assert operator.is_not(its_request, request)
