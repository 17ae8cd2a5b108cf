# SPDX-License-Identifier: Apache-2.0
"""Tests, and the cases that they share with `cpu-attn verify` and `cpu-attn bench`."""
