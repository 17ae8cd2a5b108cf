# SPDX-License-Identifier: Apache-2.0
"""The cases that the tests share with `cpu-attn verify` and `cpu-attn bench`.

    for case in cases("quick", "bfloat16"):
        problem = build(case)
        result = check(problem, *run(problem, isa="avx512", engine="native"))
        assert result.ok, result.message

case.py says what a case is, levels.py which there are, problem.py what its arrays are, run.py how it is run, judge.py
whether the result is right. A case depends on its name, dtype and seed alone.
"""
