# SPDX-License-Identifier: Apache-2.0
"""The command line: ``cpu-attn info``, ``cpu-attn verify`` and ``cpu-attn bench``."""

from __future__ import annotations

import click

from cpu_attn import __version__
from cpu_attn.cli.bench import bench
from cpu_attn.cli.info import info
from cpu_attn.cli.verify import verify


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="cpu-attn")
def main() -> None:
    """Paged attention on CPUs: what runs here, and whether it is right, and how fast."""


main.add_command(bench)
main.add_command(info)
main.add_command(verify)
