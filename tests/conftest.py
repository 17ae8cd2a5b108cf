# SPDX-License-Identifier: Apache-2.0
"""Marks the tests that take an isa, which ``make emulate`` runs: ``-m isa`` selects them, ``-m "isa(name='amx')"``
those for which it is amx."""

from __future__ import annotations

from typing import Any

import pytest

from .harness import kernels


def pytest_itemcollected(item: Any) -> None:
    """A test takes an isa as an argument, or its file goes through the isas that run here. A file that asks for them in
    another way marks itself."""
    if "isa" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.isa(name=item.callspec.params.get("isa")))
    elif any(x is kernels.KERNELS or x is kernels.ONE_DTYPE for x in vars(item.module).values()):
        item.add_marker(pytest.mark.isa)
