# SPDX-License-Identifier: Apache-2.0
"""``cpu-attn store`` shows, checks and shortens what a prefix store has in its folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from cpu_attn import UnavailableError
from cpu_attn.cli.report import new_console, new_table
from cpu_attn.serving.store_folder import Folder
from cpu_attn.serving.store_segment import Layout, Record, load_xxhash, read_block, read_layout, read_records

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
PATH = click.argument("path", type=click.Path(exists=True, file_okay=False))
AS_JSON = click.option("--json", "as_json", is_flag=True, help="One JSON object in place of text.")


def _size(ctx: click.Context, param: click.Parameter, value: str) -> int:
    """Reads a number of bytes, such as 200G, in powers of 1024."""
    digits = value.rstrip("KMGT")
    if not digits.isdecimal() or value[len(digits) :] not in UNITS:
        raise click.BadParameter(f"{value!r} is no size, such as 512M or 200G")
    return int(digits) * UNITS[value[len(digits) :]]


@contextmanager
def _opened(path: str) -> Iterator[Folder]:
    try:
        load_xxhash()
        folder = Folder(path)
    except (ValueError, UnavailableError) as error:
        raise click.ClickException(str(error)) from None
    try:
        yield folder
    finally:
        folder.close()


Look = Callable[[int, Layout, list[Record | None]], dict[str, Any]]


def _segments(folder: Folder, look: Look) -> list[dict[str, Any]]:
    """Lists the segments, those unused for longest first, with what ``look`` says of each; then what cannot be read,
    and why."""
    found, unreadable = [], []
    files = {each.name: each for each in folder.survey()}
    for name in sorted(folder.names(), key=lambda name: files[name].last_use if name in files else 0.0):
        try:
            with folder.opened(name) as fd:
                layout = read_layout(folder, fd)
                records = read_records(folder, fd, layout, 0)
                about = json.loads(layout.text)
                row = {"name": name, "model": str(about.get("model", "")), "kind": str(about.get("kind", ""))}
                row |= files[name]._asdict() | {"num_blocks": len(records), "capacity": layout.capacity}
                found.append(row | {"block_bytes": layout.block_bytes} | look(fd, layout, records))
        except FileNotFoundError:  # it has been evicted meanwhile
            pass
        except (OSError, ValueError) as error:
            unreadable.append({"name": name, "why": str(error).removeprefix(f"{name}: ")})
    return [*found, *unreadable]


def _bytes(number: int) -> str:
    unit = max((u for u in UNITS if number >= UNITS[u]), key=UNITS.__getitem__, default="")
    return f"{number / UNITS[unit]:.{1 if unit else 0}f} {f'{unit}iB' if unit else 'B'}"


def _print_unreadable(console: Console, segments: list[dict[str, Any]]) -> None:
    for each in segments:
        if "why" in each:
            console.print(Text(f"not read: {each['name']}: {each['why']}", "yellow"))


@click.group(short_help="What a prefix store has in its folder.")
def store() -> None:
    """Show, check or shorten the folder of a prefix store (cpu_attn.serving.PrefixStore)."""


@store.command(short_help="What a folder has.")
@PATH
@AS_JSON
def info(path: str, as_json: bool) -> None:
    """Show the models whose blocks are in the folder, and what they take."""
    with _opened(path) as folder:
        segments = _segments(folder, lambda fd, layout, records: {})
    if as_json:
        click.echo(json.dumps({"path": path, "segments": segments}, indent=2))
        return
    console, kinds = new_console(), dict[tuple[str, str, int], list[dict[str, Any]]]()
    for each in segments:
        if "why" not in each:
            kinds.setdefault((each["model"], each["kind"], each["block_bytes"]), []).append(each)
    table = new_table("model", "of", numbers=("segments", "in use", "blocks", "of", "disk", "last use"))
    for (model, kind, size), rows in kinds.items():
        count, last = sum(row["num_blocks"] for row in rows), max(row["last_use"] for row in rows)
        used = str(sum(row["in_use"] for row in rows))
        disk = _bytes(sum(row["num_bytes"] for row in rows))
        when = datetime.fromtimestamp(last).isoformat(" ", "minutes")
        table.add_row(model, kind, str(len(rows)), used, str(count), _bytes(size), disk, when)
    console.print(table if kinds else Text("no segments"))
    _print_unreadable(console, segments)


@store.command(short_help="Whether all blocks are what was written.")
@PATH
@AS_JSON
def verify(path: str, as_json: bool) -> None:
    """Read every block and compare it with its checksum.

    The exit status is 1 where a block or a file is damaged. Both do no harm: a damaged block is computed again.
    """
    stderr = Console(stderr=True)

    def look(fd: int, layout: Layout, records: list[Record | None]) -> dict[str, Any]:
        block, num_damaged = bytearray(layout.block_bytes), 0
        for record in records:
            num_damaged += record is None or not read_block(folder, fd, layout, record, block)
            progress.advance(task)
        return {"num_damaged": num_damaged}

    with _opened(path) as folder, Progress(console=stderr, transient=True, disable=not stderr.is_terminal) as progress:
        sizes = _segments(folder, lambda fd, layout, records: {})
        task = progress.add_task("blocks", total=sum(each.get("num_blocks", 0) for each in sizes))
        segments = _segments(folder, look)
    bad = [each for each in segments if each.get("num_damaged", 1)]
    if as_json:
        click.echo(json.dumps({"path": path, "segments": segments}, indent=2))
    else:
        console, sound = new_console(), len(segments) - len(bad)
        table = new_table("segment", "model", numbers=("blocks", "damaged"))
        for each in bad:
            if "why" not in each:
                table.add_row(each["name"], each["model"], str(each["num_blocks"]), str(each["num_damaged"]))
        if table.row_count:
            console.print(table)
        _print_unreadable(console, segments)
        console.print(f"{sound} of {len(segments)} segments are whole")
    if bad:
        raise SystemExit(1)


@store.command(short_help="Remove what was unused for longest.")
@PATH
@click.option("--max-bytes", callback=_size, required=True, metavar="SIZE", help="What may stay, such as 50G.")
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
def prune(path: str, max_bytes: int, dry_run: bool) -> None:
    """Remove segments that were unused for longest, until the rest takes at most so many bytes.

    Processes may use the folder meanwhile: what they append to stays, and what they have open they can still read.
    """
    with _opened(path) as folder:
        files = folder.survey()
        left, count = sum(each.num_bytes for each in files), 0
        for each in files:
            if left > max_bytes and not each.in_use and (dry_run or folder.remove(each.name)):
                left, count = left - each.num_bytes, count + 1
    would = "would be removed" if dry_run else "removed"
    new_console().print(f"{count} of {len(files)} files {would}, {_bytes(left)} stay")
