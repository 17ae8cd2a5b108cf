# SPDX-License-Identifier: Apache-2.0
"""Hashes of whole calls' results, to compare two builds: ``python -m cpu_attn.tests.programs.call_bits ISA DTYPE``."""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..cases.levels import cases
from ..cases.problem import build
from ..cases.run import run


def same_for_any_nan(x: NDArray[Any]) -> bytes:
    return np.where(np.isnan(x), x.dtype.type(np.nan), x).tobytes()


def main(isa: str, dtype: str) -> dict[str, str]:
    """Of every case of `verify` without options, by name."""
    found = {}
    for case in cases("default", dtype, 0):
        output, lse = run(build(case), isa, "native")
        found[case.name] = hashlib.sha256(same_for_any_nan(output) + same_for_any_nan(lse)).hexdigest()
    return found


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
