# SPDX-License-Identifier: Apache-2.0
"""Tests lie in adapters, docs, native, python and tools, as what they test does. They share these packages:

- cases: the calls that the tests have in common with `cpu-attn verify` and `cpu-attn bench`, and their judge;
- harness: what tests of several files stand on;
- models: models, engines and steps of the libraries that the adapters join;
- programs: what tests start in a process of its own.

Commands of the Makefile lie beside this file: mutants.py breaks the package, in places that mutants.toml names or
mutate.py draws, and peers.py compares signatures.
"""
