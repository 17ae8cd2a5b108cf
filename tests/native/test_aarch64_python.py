# SPDX-License-Identifier: Apache-2.0
"""The Python for arm64 in which ``make aarch64`` runs: it is at home in its folder, starts itself anew, and compiles
modules by the cross compiler."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

from .test_cross import COMPILER, EMULATOR, ROOT

SCRIPT = ROOT / "tests/cross/aarch64_python.py"
TOOLS = (COMPILER, "apt-get", "dpkg-deb", "tar")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (EMULATOR and all(map(shutil.which, TOOLS)) and SCRIPT.is_file()),
        reason=f"needs {', '.join(TOOLS)}, qemu-user and a source tree",
    ),
]

PROGRAM = """
import platform, subprocess, sys, sysconfig
here = sysconfig.get_config_var("INCLUDEPY")
subprocess.run([sys.argv[1], "-shared", "-fPIC", f"-I{here}", "answer.c", "-o", "answer.so"], check=True)
ask = "import answer, platform, sys; print(answer.machine(), platform.machine(), sys.executable)"
print(subprocess.run([sys.executable, "-c", ask], check=True, capture_output=True, text=True).stdout)
"""

MODULE = """
#include <Python.h>
static PyObject *machine(PyObject *self, PyObject *none) {
    (void)self, (void)none;
#ifdef __aarch64__
    return PyUnicode_FromString("aarch64");
#else
    return PyUnicode_FromString("another");
#endif
}
static PyMethodDef methods[] = {{"machine", machine, METH_NOARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "answer", NULL, -1, methods, NULL, NULL, NULL, NULL};
PyMODINIT_FUNC PyInit_answer(void) { return PyModule_Create(&module); }
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = importlib.util.spec_from_file_location("aarch64_python", SCRIPT)
    assert spec and spec.loader
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    folder = tmp_path_factory.mktemp("aarch64")
    try:
        packages = made.download(folder / "apt")
    except subprocess.CalledProcessError:
        pytest.skip("the package sources of this machine have nothing for arm64")
    made.unpack(packages, folder / "root")
    made.relocate(folder / "root")
    path: Path = made.wrap(folder / "root")
    return path


def test_it_compiles_and_starts_itself(python: Path, tmp_path: Path) -> None:
    subprocess.run([python, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (tmp_path / "answer.c").write_text(MODULE)
    at_home = tmp_path / "venv/bin/python"
    done = subprocess.run([at_home, "-c", PROGRAM, COMPILER], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["aarch64", "aarch64", str(at_home)]
