# SPDX-License-Identifier: Apache-2.0
"""This package is the command line: ``cpu-attn info``, ``cpu-attn verify``, ``cpu-attn bench`` and ``cpu-attn
store``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import click

from cpu_attn import __version__
from cpu_attn.cli.bench import bench
from cpu_attn.cli.info import info
from cpu_attn.cli.prefix_store import prefix_store
from cpu_attn.cli.report import fold
from cpu_attn.cli.store import store
from cpu_attn.cli.verify import verify


@contextmanager
def _folded() -> Iterator[None]:
    """Folds the text of an error between its words where a terminal would break inside of them."""
    try:
        yield
    except click.ClickException as error:
        text = fold(error.format_message(), "Error: ").removeprefix("Error: ")
        error.format_message = lambda: text  # type: ignore[method-assign]
        raise


class _Commands(click.Group):
    """Runs commands whose output may find no room."""

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        with _folded():
            return super().make_context(*args, **extra)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[:2] == ["bench", "prefix-store"]:  # which has options of its own
            return " ".join(args[:2]), prefix_store, args[2:]
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        with _folded():
            result = super().invoke(ctx)
        sys.stdout.flush()  # here an error of it is one of the command
        return result

    def main(self, *args: Any, **extra: Any) -> Any:
        try:
            return super().main(*args, **extra)
        except OSError as error:
            click.echo(f"Error: {': '.join(filter(None, (error.filename, error.strerror or str(error))))}", err=True)
            # What stdout still holds back would be written when Python ends, which fails again and says so.
            with suppress(OSError):  # stdout may be a stream that is no file
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="cpu-attn")
def main() -> None:
    """Paged attention on CPUs: what runs here, whether it is right, how fast it is."""


main.add_command(bench)
main.add_command(info)
main.add_command(store)
main.add_command(verify)
