# SPDX-License-Identifier: Apache-2.0
"""``python -m cpu_attn`` is the command line."""

from cpu_attn.cli import main

if __name__ == "__main__":
    main(prog_name="cpu-attn")
