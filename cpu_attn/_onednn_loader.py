# SPDX-License-Identifier: Apache-2.0
"""This module finds oneDNN, judges it, and only then imports the engine's module, which is linked to it.

It looks in this order: CPU_ATTN_ONEDNN (a library file, or a prefix with lib/), the package onednn-cpu-gomp,
ONEDNN_ROOT (a prefix), the system's libraries. The first that is set or installed decides; there is no second try.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from cpu_attn._errors import UnavailableError
from cpu_attn._native import ffi as core

PACKAGE = "onednn-cpu-gomp"
NAMES = ("libdnnl.so.3", "libdnnl.3.dylib")
# These are the DNNL_RUNTIME_* of dnnl_config.h that work. TBB (4), SYCL (512) and others bring threads that OpenMP
# regions cannot hold.
RUNTIMES = {1: "sequential", 2: "OpenMP", 8: "threadpool"}
# These are the numbers of dnnl_get_effective_cpu_isa: the enum dnnl_cpu_isa_t of dnnl_types.h, and what oneDNN means by
# some of them on aarch64 (src/cpu/aarch64/cpu_isa_traits.hpp; v3.7 and v3.13).
ISAS = {
    0x0: "default",
    0x1: "sse41",
    0x3: "avx",
    0x7: "avx2",
    0xF: "avx2_vnni",
    0x1F: "avx2_vnni_2",
    0x27: "avx512_core",
    0x67: "avx512_core_vnni",
    0xE7: "avx512_core_bf16",
    0x1EF: "avx512_core_fp16",
    0xFEF: "avx512_core_amx",
    0x1FEF: "avx512_core_amx_fp16",
}
ISAS_OF_AARCH64 = {0x0: "default", 0x1: "asimd", 0x3: "sve_128", 0x7: "sve_256", 0x27: "sve_512"}


class _Version(ctypes.Structure):
    """Lays out the struct dnnl_version_t."""

    _fields_ = (
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
        ("patch", ctypes.c_int),
        ("hash", ctypes.c_char_p),
        ("cpu_runtime", ctypes.c_uint),
        ("gpu_runtime", ctypes.c_uint),
    )


@dataclass(frozen=True)
class Description:
    """Holds what ``cpu-attn info`` says of oneDNN. The last two fields name the implementations of a 256 x 512 x 128
    matmul."""

    version: str
    library: str
    runtime: str
    isa: str
    bfloat16: str
    float32: str


# One thread opens oneDNN, which takes 40 ms, and others that need it wait: oneDNN refuses to mix streams and primitives
# of two of its engines. fork() waits, too, so that no child has half of it. A signal handler that interrupts the thread
# that opens it must not wait for that thread, so the lock is reentrant; the thread then finds open what the handler
# opened.
_loading = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_loading.acquire, after_in_parent=_loading.release, after_in_child=_loading.release)


@cache
def _outcome() -> ModuleType | str:
    try:
        return _load()
    except UnavailableError as e:
        return str(e)


def load() -> ModuleType:
    """Gives the module ``cpu_attn._onednn``, opened. It raises UnavailableError, always with the same reason, where
    oneDNN is not there."""
    with _loading:
        found = _outcome()
    if isinstance(found, str):
        raise UnavailableError(found)
    return found


def engine() -> Any:
    """Gives the engine as the core's ``ca_engine *``. The modules share no type: only the address passes."""
    module = load()
    return core.cast("ca_engine *", int(module.ffi.cast("uintptr_t", module.lib.ca_onednn_engine())))


def status_text(status: int) -> str:
    """Gives in words a status of the engine, which is the value of CA_ENGINE_FAILED."""
    module = load()
    return str(module.ffi.string(module.lib.ca_onednn_text(status)).decode())


def failure(who: str, status: int) -> Exception:
    """Gives an exception for a status that is not CA_ONEDNN_OK."""
    kind = MemoryError if status == load().lib.CA_ONEDNN_NO_MEMORY else RuntimeError
    return kind(f"{who}: {status_text(status)}")


def describe() -> Description:
    """Describes the library that was found. It raises UnavailableError where oneDNN is not there."""
    module = load()
    path, library = _library()
    version = _version(library)
    return Description(
        version=f"{version.major}.{version.minor}.{version.patch}",
        library=path,
        runtime=RUNTIMES[version.cpu_runtime],
        isa=_isa_name(int(library.dnnl_get_effective_cpu_isa())),
        bfloat16=_probe(module, module.lib.CA_ONEDNN_BF16),
        float32=_probe(module, module.lib.CA_ONEDNN_F32),
    )


def _isa_name(code: int) -> str:
    return (ISAS_OF_AARCH64 if platform.machine() in ("aarch64", "arm64") else ISAS).get(code, hex(code))


def _probe(module: ModuleType, dtype: int) -> str:
    ffi, impl = module.ffi, module.ffi.new("char[64]")
    status = module.lib.ca_onednn_matmul(dtype, module.lib.CA_ONEDNN_F32, 0, 256, 512, 128, *3 * [ffi.NULL], impl, 64)
    return ffi.string(impl).decode() if status == module.lib.CA_ONEDNN_OK else f"none: {status_text(status)}"


def _load() -> ModuleType:
    if importlib.util.find_spec("cpu_attn._onednn") is None:
        raise UnavailableError(
            "this build has no oneDNN engine: there were no headers of oneDNN, or CPU_ATTN_NO_ONEDNN was set; set "
            "ONEDNN_ROOT to a oneDNN v3 and install cpu-attn anew"
        )
    path, library = _library()
    _judge(path, library)
    try:
        module = importlib.import_module("cpu_attn._onednn")
    except ImportError as e:
        raise UnavailableError(f"{path} does not fit this build's oneDNN engine: {e}") from None
    ffi = module.ffi
    if int(ffi.cast("uintptr_t", module.lib.ca_onednn_bound())) != _address(library.dnnl_version):
        raise UnavailableError(f"another {NAMES[0]} than {path} was loaded before it; import cpu_attn first")
    get, set_ = _thread_functions(path, library)
    status = module.lib.ca_onednn_open(ffi.cast("int (*)(void)", get), ffi.cast("void (*)(int)", set_))
    if status != module.lib.CA_ONEDNN_OK:
        raise UnavailableError(f"{path}: {ffi.string(module.lib.ca_onednn_text(status)).decode()}")
    return module


@cache
def _library() -> tuple[str, ctypes.CDLL]:
    path = _find()
    try:
        return path, ctypes.CDLL(path)
    except OSError as e:
        raise UnavailableError(f"oneDNN does not load: {e}") from None


def _find() -> str:
    if asked := os.environ.get("CPU_ATTN_ONEDNN"):
        return _under(Path(asked), "CPU_ATTN_ONEDNN")
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name in NAMES:
            path = Path(str(file.locate()))
            if path.is_file():
                return str(path.resolve())
            raise UnavailableError(
                f"the package {PACKAGE} lists {file} but it is not there (pip --target leaves lib/ out); "
                "set CPU_ATTN_ONEDNN to a libdnnl"
            )
    if root := os.environ.get("ONEDNN_ROOT"):
        return _under(Path(root), "ONEDNN_ROOT")
    for name in NAMES:
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return name
    raise UnavailableError(
        f"oneDNN is not installed: no package {PACKAGE}, no {NAMES[0]} on the system; install one, or set "
        "CPU_ATTN_ONEDNN to a libdnnl v3"
    )


def _under(path: Path, variable: str) -> str:
    """Gives a library file, or the one under a prefix."""
    if path.is_file():
        return str(path.resolve())
    folders = [path / "lib", path / "lib64", *sorted((path / "lib").glob("*-linux-gnu")), path]
    for candidate in (folder / name for folder in folders for name in NAMES):
        if candidate.is_file():
            return str(candidate.resolve())
    raise UnavailableError(f"{variable} is {path}: neither a library file nor a prefix with lib/{NAMES[0]}")


def _version(library: ctypes.CDLL) -> _Version:
    library.dnnl_version.restype = ctypes.POINTER(_Version)
    version: _Version = library.dnnl_version().contents
    return version


def _judge(path: str, library: ctypes.CDLL) -> None:
    if not hasattr(library, "dnnl_version"):
        raise UnavailableError(f"{path} is not oneDNN: it has no dnnl_version")
    version = _version(library)
    if version.major != 3 or version.minor < 2:
        raise UnavailableError(f"{path} is oneDNN {version.major}.{version.minor}; the engine needs v3, at least 3.2")
    if version.cpu_runtime not in RUNTIMES:
        raise UnavailableError(
            f"{path} is a build for threading run time {version.cpu_runtime} (4: TBB, 512: SYCL); the engine needs "
            "one of " + ", ".join(f"{name} ({code})" for code, name in RUNTIMES.items())
        )


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _thread_functions(path: str, library: ctypes.CDLL) -> tuple[int, int]:
    """Gives the addresses of omp_get_max_threads and omp_set_num_threads in the OpenMP that this libdnnl is linked to,
    or 0 where it has none."""
    if _version(library).cpu_runtime != 2:
        return 0, 0
    try:
        return _address(library.omp_get_max_threads), _address(library.omp_set_num_threads)
    except AttributeError:
        raise UnavailableError(f"{path} runs on OpenMP but brings no omp_set_num_threads") from None
