# SPDX-License-Identifier: Apache-2.0
"""``cpu-attn info`` shows what this machine has, what was built, and what a call would use."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from collections.abc import Iterable, Iterator
from typing import Any

import click
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

import cpu_attn
from cpu_attn import _adapters, _dispatch, _numa, _onednn_loader
from cpu_attn._dtypes import DTYPE_CODES
from cpu_attn._native import ffi, lib
from cpu_attn.cli.report import new_console


def cpu() -> dict[str, Any]:
    c = ffi.new("ca_cpu_info *")
    lib.ca_cpu(c)
    features: dict[str, bool] = {}
    name = ffi.new("char **")
    while (here := lib.ca_cpu_feature(len(features), name)) >= 0:
        features[ffi.string(name[0]).decode()] = bool(here)
    return {
        "brand": ffi.string(c.brand).decode().strip() or "unknown",
        "vendor": ffi.string(c.vendor).decode(),
        "family": c.family,
        "model": c.model,
        "stepping": c.stepping,
        "features": features,
        "caches_bytes": {"l1d": c.l1d, "l2": c.l2, "l3": c.l3},
        "cpus": c.cpus,
        "amx_permission": {1: "granted", 0: "refused", -1: "no AMX"}[c.amx_permission],
        "amx_reason": ffi.string(c.amx_reason).decode(),
    }


def emulated(isa: _dispatch.Isa) -> bool:
    k = ffi.new("ca_kernel_info *")
    found = isa.compiled and lib.ca_isa_kernel(isa.index, lib.CA_BF16, k)
    return bool(found) and "emulated" in ffi.string(k.method).decode()


def isas(amx_permission: str) -> list[dict[str, Any]]:
    """Lists the isas. compiled: the file is in this build; supported: CPU and system have the instructions; permitted:
    the kernel lets this process use them (only AMX needs asking); emulated: this build has them in software, for
    tests."""
    return [
        {
            "name": i.name,
            "unit": i.unit,
            "compiled": i.compiled,
            "supported": i.supported,
            "permitted": i.supported and (i.name != "amx" or emulated(i) or amx_permission == "granted"),
            "emulated": emulated(i),
            "reason": i.reason,
        }
        for i in cpu_attn.isas()
    ]


def _asked(variable: str) -> str:
    asked = os.environ.get(variable, "")
    return f"{variable}={asked}" if asked not in ("", "auto") else ""


def engine() -> dict[str, Any]:
    """Gives the engine that ``auto`` picks, and why."""
    try:
        name, _ = _dispatch.resolve_engine("auto")
    except (ValueError, cpu_attn.UnavailableError) as e:
        return {"name": None, "why": str(e)}
    return {"name": name, "why": _asked("CPU_ATTN_ENGINE") or "the others are for comparison"}


def kernels() -> list[dict[str, Any]]:
    """Gives what ``auto`` picks for each dtype, and why."""
    found, k = [], ffi.new("ca_kernel_info *")
    for dtype, code in DTYPE_CODES.items():
        try:
            isa = _dispatch.resolve_isa("auto", dtype, 64)
        except (ValueError, cpu_attn.UnavailableError) as e:
            found.append({"dtype": dtype, "isa": None, "method": None, "why": str(e)})
            continue
        lib.ca_isa_kernel(isa.index, code, k)
        why = _asked("CPU_ATTN_ISA") or "the best here" + failed(dtype)
        if k.variant:
            why += f"; without its variant {ffi.string(k.variant).decode()}: {_dispatch.reason_of(k.reason)}"
        method = ffi.string(k.method).decode()
        if k.integers:  # tiles need more rows than a decode has
            where = " in decode" if isa.unit == "matrix" else ""
            method += f"; int8 to int4 caches{where}: 16-bit integers ({ffi.string(k.integers).decode()})"
        found.append({"dtype": dtype, "isa": isa.name, "method": method, "why": why})
    return found


def failed(dtype: str) -> str:
    """Says which isas ``auto`` leaves out, and why."""
    tested = {i.name: _dispatch.self_test(i, dtype) for i in _dispatch.able(dtype) if i.unit == "matrix"}
    return "".join(f"; not {name}, whose self-test fails: {why}" for name, why in tested.items() if why)


def onednn() -> dict[str, Any]:
    """Describes the library found, and which implementations two probe matmuls (256 x 512 x 128) really got."""
    try:
        found = dataclasses.asdict(_onednn_loader.describe())
    except cpu_attn.UnavailableError as e:
        return {"available": False, "reason": str(e)}
    return {"available": True, **found, "amx_used": "amx" in found["bfloat16"] + found["float32"]}


def nodes(num_threads: int) -> list[dict[str, Any]]:
    """Lists NUMA nodes: their CPUs, whether calls may run there, and how many of a call's threads do at present."""
    known = _numa.cpus_of_nodes()
    threads = _numa.thread_nodes(num_threads) if known else []
    try:
        usable = {node: len(_numa.cpus() & set(own)) for node, own in known.items()}
    except cpu_attn.UnavailableError:  # a container may hide on which CPUs it may run
        usable = {}
    return [
        {"node": node, "cpus": len(own), "usable_cpus": usable.get(node), "threads": threads.count(node)}
        for node, own in known.items()
    ]


def collect() -> dict[str, Any]:
    machine, auto, one = cpu(), kernels(), onednn()
    return {
        "version": cpu_attn.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(("CPU_ATTN_", "OMP_", "ONEDNN_"))},
        "cpu": machine,
        "threads": {"count": cpu_attn.get_num_threads(), "runtime": ffi.string(lib.ca_threading()).decode()},
        "numa": nodes(cpu_attn.get_num_threads()),
        "isas": isas(machine["amx_permission"]),
        "auto": auto,
        "auto_engine": engine(),
        "engines": [{"name": e.name, "available": e.available, "reason": e.reason} for e in cpu_attn.engines()],
        "onednn": one,
        "amx_used": {"native": any(k["isa"] == "amx" for k in auto), "onednn": one.get("amx_used", False)},
        "adapters": [_adapters.describe(name) for name in _adapters.NEEDS],
    }


def _yes(flag: bool) -> Text:
    return Text("yes", "green") if flag else Text("no", "red")


def _size(n: int) -> str:
    if not n:
        return "unknown"
    return f"{n / 2**20:g} MiB" if n >= 2**20 else f"{n / 2**10:g} KiB"


WIDTH = 80  # columns, also where stdout is a pipe


def _paragraph(console: Console, title: str, rows: Iterable[tuple[str | Text, str | Text]]) -> str:
    """Gives a paragraph of names and what is said of each, folded to WIDTH."""
    grid = Table.grid(Column(overflow="fold", max_width=WIDTH // 3), Column(overflow="fold"), padding=(0, 2, 0, 0))
    for name, said in rows:
        grid.add_row(name, said)
    with console.capture() as captured:
        if title:
            console.print(Text(title, "bold"))
        console.print(grid, width=min(console.width, WIDTH))
    return captured.get()


def _what_runs(data: dict[str, Any]) -> Iterator[tuple[str | Text, str | Text]]:
    """Gives for each dtype the isa, what multiplies, and why; then the engine, and AMX."""
    for k in data["auto"]:
        what = f"{k['isa']}: {k['method'].split(';')[0]} ({k['why']})" if k["isa"] else Text(f"none: {k['why']}", "red")
        yield Text(k["dtype"], "bold"), what
    auto, amx = data["auto_engine"], data["amx_used"]
    yield "engine", f"{auto['name'] or 'none'} ({auto['why']})"
    why = "".join(i["reason"] for i in data["isas"] if i["name"] == "amx")
    used = Text.assemble("native: ", _yes(amx["native"]), ", onednn: ", _yes(amx["onednn"]))
    yield "Is AMX used?", used if amx["native"] or not why else used + Text(f" ({why})")


def _machine(data: dict[str, Any]) -> Iterator[tuple[str | Text, str | Text]]:
    c = data["cpu"]
    yield "cpu", f"{c['brand']} ({c['vendor']} family {c['family']} model {c['model']}), {c['cpus']} cpus"
    yield "caches", ", ".join(f"{k} {_size(v)}" for k, v in c["caches_bytes"].items())
    yield "features", " ".join(k for k, v in c["features"].items() if v)
    yield "threads", f"{data['threads']['count']} ({data['threads']['runtime']})"
    if data["environment"]:
        yield "environment", " ".join(f"{k}={v}" for k, v in data["environment"].items())
    for n in data["numa"]:
        usable = "unknown which" if n["usable_cpus"] is None else n["usable_cpus"]
        yield f"NUMA node {n['node']}", f"{usable} of {n['cpus']} cpus, {n['threads']} threads at present"
    yield "AMX permission", c["amx_permission"] + (f" ({c['amx_reason']})" if c["amx_reason"] else "")


def _isas(data: dict[str, Any]) -> Iterator[tuple[str | Text, str | Text]]:
    for i in data["isas"]:
        there = i["compiled"] and i["supported"] and i["permitted"]
        unit = i["unit"] + " (emulated)" * i["emulated"]
        yield i["name"], _yes(there) + Text(f", {unit}" + (f": {i['reason']}" if i["reason"] else ""))


def _more_of_kernels(data: dict[str, Any]) -> Iterator[tuple[str | Text, str | Text]]:
    for k in data["auto"]:
        if k["method"] and ";" in k["method"]:
            yield k["dtype"], k["method"].partition("; ")[2]


def _engines(data: dict[str, Any]) -> Iterator[tuple[str | Text, str | Text]]:
    for e in data["engines"]:
        yield e["name"], _yes(e["available"]) + Text(f": {e['reason']}" if e["reason"] else "")
    one = data["onednn"]
    if one["available"]:
        yield "oneDNN", f"{one['version']}, run time {one['runtime']}, effective isa {one['isa']}"
        yield "its probe matmuls", f"bfloat16 {one['bfloat16']}, float32 {one['float32']}"
        yield "its library", one["library"]
    elif one["reason"] not in (e["reason"] for e in data["engines"]):
        yield "oneDNN", one["reason"]


def _adapter_rows(data: dict[str, Any]) -> Iterator[tuple[str | Text, str | Text]]:
    for a in data["adapters"]:
        found = f", found {a['version']}" if a["version"] else ""
        said = f"{found}, tested {a['tested']}: {a['state'] or a['reason']}"
        yield f"cpu_attn.{a['name']}", _yes(a["usable"]) + Text(said)


def show(data: dict[str, Any], console: Console) -> None:
    """Prints it all. What runs is said first, but last on a terminal that is too short for the whole, where the first
    lines scroll away."""
    first = _paragraph(console, "", _what_runs(data))
    rest = [
        _paragraph(console, f"cpu-attn {data['version']} on this machine", _machine(data)),
        _paragraph(console, "isas that can run", _isas(data)),
        _paragraph(console, "what auto's kernels do besides", _more_of_kernels(data)),
        _paragraph(console, "engines that are there", _engines(data)),
        _paragraph(console, "adapters that can be used", _adapter_rows(data)),
    ]
    text = "\n".join([first, *rest])
    if console.is_terminal and text.count("\n") >= console.height:
        text = "\n".join([*rest, first])
    console.file.write(text)


@click.command(short_help="What this machine has and what calls use.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")
def info(as_json: bool) -> None:
    """Show what computes each dtype and why, CPU, isas, engines and adapters, with the reason for what is missing."""
    data = collect()
    if as_json:
        click.echo(json.dumps(data, indent=2))
    else:
        show(data, new_console())
