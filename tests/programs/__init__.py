# SPDX-License-Identifier: Apache-2.0
"""What tests start in a process of its own: ``python -m cpu_attn.tests.programs.NAME``."""
