# SPDX-License-Identifier: Apache-2.0
"""Tests, and the cases that they share with `cpu-attn verify` and `cpu-attn bench`.

    for case in cases("quick", "bfloat16"):
        problem = build(case)
        result = check(problem, *run(problem, isa="avx512", engine="native"))
        assert result.ok, result.message

case.py says what a case is, case_levels.py which there are, case_problem.py what its arrays are, case_run.py how it is
run, judge.py whether the result is right. A case depends on its name, dtype and seed alone.
"""
