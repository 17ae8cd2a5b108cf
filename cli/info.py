# SPDX-License-Identifier: Apache-2.0
"""``cpu-attn info``: what this machine has, what was built, and what a call would use."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

import click
from rich.console import Console
from rich.text import Text

import cpu_attn
from cpu_attn import _adapters, _dispatch, _onednn_loader
from cpu_attn._dtypes import DTYPE_CODES
from cpu_attn._native import ffi, lib
from cpu_attn.cli.report import new_console, new_table


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
    """compiled: the file is in this build; supported: CPU and system have the instructions; permitted: the
    kernel lets this process use them (only AMX needs asking); emulated: this build has them in software, for tests."""
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
    """What ``auto`` picks, and why."""
    try:
        name, _ = _dispatch.resolve_engine("auto")
    except (ValueError, cpu_attn.UnavailableError) as e:
        return {"name": None, "why": str(e)}
    return {"name": name, "why": _asked("CPU_ATTN_ENGINE") or "the others are for comparison"}


def kernels() -> list[dict[str, Any]]:
    """What ``auto`` picks for each dtype, and why."""
    found, k = [], ffi.new("ca_kernel_info *")
    for dtype, code in DTYPE_CODES.items():
        try:
            isa = _dispatch.resolve_isa("auto", dtype, 64)
        except (ValueError, cpu_attn.UnavailableError) as e:
            found.append({"dtype": dtype, "isa": None, "method": None, "why": str(e)})
            continue
        lib.ca_isa_kernel(isa.index, code, k)
        why = _asked("CPU_ATTN_ISA") or "the best isa that can run here" + failed(dtype)
        if k.variant:
            why += f"; without its variant {ffi.string(k.variant).decode()}: {_dispatch.reason_of(k.reason)}"
        method = ffi.string(k.method).decode()
        if k.integers:  # tiles are for more rows than decode has
            where = " in decode" if isa.unit == "matrix" else ""
            method += f"; int8 to int4 caches{where}: 16-bit integers ({ffi.string(k.integers).decode()})"
        found.append({"dtype": dtype, "isa": isa.name, "method": method, "why": why})
    return found


def failed(dtype: str) -> str:
    """Which isas ``auto`` leaves out, and why."""
    tested = {i.name: _dispatch.self_test(i, dtype) for i in _dispatch.able(dtype) if i.unit == "matrix"}
    return "".join(f"; not {name}, whose self-test fails: {why}" for name, why in tested.items() if why)


def onednn() -> dict[str, Any]:
    """The library found, and which implementations two probe matmuls (256 x 512 x 128) really got."""
    try:
        found = dataclasses.asdict(_onednn_loader.describe())
    except cpu_attn.UnavailableError as e:
        return {"available": False, "reason": str(e)}
    return {"available": True, **found, "amx_used": "amx" in found["bfloat16"] + found["float32"]}


def collect() -> dict[str, Any]:
    machine = cpu()
    return {
        "version": cpu_attn.__version__,
        "cpu": machine,
        "threads": {"count": cpu_attn.get_num_threads(), "runtime": ffi.string(lib.ca_threading()).decode()},
        "isas": isas(machine["amx_permission"]),
        "auto": kernels(),
        "auto_engine": engine(),
        "engines": [{"name": e.name, "available": e.available, "reason": e.reason} for e in cpu_attn.engines()],
        "onednn": onednn(),
        "adapters": [_adapters.describe(name) for name in _adapters.NEEDS],
    }


def _yes(flag: bool) -> Text:
    return Text("yes", "green") if flag else Text("no", "red")


def _size(n: int) -> str:
    if not n:
        return "unknown"
    return f"{n / 2**20:g} MiB" if n >= 2**20 else f"{n / 2**10:g} KiB"


def show(data: dict[str, Any], console: Console) -> None:
    c = data["cpu"]
    console.print(
        Text(f"cpu-attn {data['version']}", "bold"),
        f"on {c['brand']} ({c['vendor']} family {c['family']} model {c['model']}), {c['cpus']} cpus",
    )
    console.print(
        "caches: "
        + ", ".join(f"{k} {_size(v)}" for k, v in c["caches_bytes"].items())
        + f"; threads: {data['threads']['count']} ({data['threads']['runtime']})"
    )
    console.print("features: " + " ".join(k for k, v in c["features"].items() if v))
    console.print(f"AMX permission: {c['amx_permission']}" + (f" ({c['amx_reason']})" if c["amx_reason"] else ""))

    table = new_table("isa", "unit", "compiled", "supported", "permitted", "why not")
    for i in data["isas"]:
        flags = (_yes(i[k]) for k in ("compiled", "supported", "permitted"))
        table.add_row(i["name"], i["unit"] + " (emulated)" * i["emulated"], *flags, i["reason"])
    console.print(table)

    table = new_table("dtype", "auto picks", "how", "why")
    for k in data["auto"]:
        table.add_row(k["dtype"], k["isa"] or Text("nothing", "red"), k["method"] or "", k["why"])
    console.print(table)

    table = new_table("engine", "available", "why not")
    for e in data["engines"]:
        table.add_row(e["name"], _yes(e["available"]), e["reason"])
    console.print(table)
    auto = data["auto_engine"]
    console.print(f"auto picks the engine {auto['name'] or 'nothing'}: {auto['why']}")

    table = new_table("adapter", "found", "tested", "usable", "how, or why not")
    for a in data["adapters"]:
        found = a["version"] or "not installed"
        table.add_row(f"cpu_attn.{a['name']}", found, a["tested"], _yes(a["usable"]), a["state"] or a["reason"])
    console.print(table)

    one = data["onednn"]
    if one["available"]:
        console.print(
            f"oneDNN {one['version']}, run time {one['runtime']}, effective isa {one['isa']}; probe matmuls got"
        )
        console.print(
            f"  bfloat16: {one['bfloat16']}\n  float32:  {one['float32']}\n  from {one['library']}", soft_wrap=True
        )
    else:
        console.print(f"oneDNN: not available: {one['reason']}", soft_wrap=True)
    native = any(k["isa"] == "amx" for k in data["auto"])
    console.print(Text.assemble("Is AMX used? native: ", _yes(native), ", onednn: ", _yes(one.get("amx_used", False))))


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")
def info(as_json: bool) -> None:
    """Show CPU, isas, chosen kernels, engines and oneDNN, with the reason for whatever is missing."""
    data = collect()
    if as_json:
        click.echo(json.dumps(data, indent=2))
    else:
        show(data, new_console())
