# SPDX-License-Identifier: Apache-2.0
"""This module says which workloads ``cpu-attn bench`` runs: by name, of a free shape, with heads and features changed
as asked, or with those of a model."""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from cpu_attn._check import INT32_MAX
from cpu_attn._dtypes import is_scaled
from cpu_attn.cli.report import counted, new_console, new_table
from cpu_attn.cli.workloads import GROUPS, WORKLOADS, Workload
from cpu_attn.tests.cases.formats import DTYPES

Options = dict[str, Any]
MOST = 2**24  # the most characters of a config.json; a device may have no end
# What config.json of Hugging Face calls each size, in the models of today and of GPT-2's and Falcon's days.
NAMES = {
    "num_heads": ("num_attention_heads", "n_head"),
    "num_kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "hidden_size": ("hidden_size", "n_embd"),
    "layers": ("num_hidden_layers", "n_layer"),
}
FULL, SLIDING = "full_attention", "sliding_attention"


def chosen(
    names: Sequence[str], shape: Options, kvs: Collection[str] = (), model: Path | None = None
) -> list[Workload]:
    """Gives the workloads of these names or groups with heads and features changed as asked, or one of a free shape.
    What cannot be is left out of a group; otherwise it is an error. model: whose heads and features they have, once for
    each kind of its layers."""
    shape = {k: v for k, v in shape.items() if v}
    lens = {k: shape.pop(k) for k in ("q_len", "kv_len", "batch") if k in shape}
    if names and lens:
        raise click.UsageError(f"--{next(iter(lens)).replace('_', '-')} is for a free shape, not for {names[0]}")
    base = [_free(**lens)] if lens else _by_name(names or ["all"])
    kinds = layers_of(model) if model else [{}]
    found, reason = [], ""
    for w in base:
        for kind in kinds:
            changed = _changed(_of_model(w, kind), shape)
            reason = impossible(changed, kvs) or (kind and _no_model(w, kind)) or ""
            if not reason:
                found.append(changed)
            elif lens or w.name in names:
                raise click.UsageError(reason)
            else:
                click.echo(f"without {reason}", err=True)
    if not found:
        raise click.UsageError(reason)
    return found


def impossible(w: Workload, kvs: Collection[str] = ()) -> str:
    """Says why a workload cannot be, "" if it can. kvs: what such caches are to hold."""
    integers = sorted(filter(is_scaled, kvs))
    features = ("sliding_window", "softcap", "sinks", "alibi", "attn_bias", "selected", "no_cascade")
    odd = [k for k in features if w.linear and getattr(w, k) not in (None, False, 0.0, -1)]
    odd += ["KV cache"] if w.linear and not set(kvs) <= set(DTYPES) else []
    reasons = {
        f"--num-kv-heads {w.num_kv_heads} does not divide {w.num_heads} heads": w.num_heads % w.num_kv_heads,
        f"--batch, --q-len: {w.num_tokens} query tokens, at most {INT32_MAX}": w.num_tokens > INT32_MAX,
        f"linear attention has no {' and no '.join(odd)}": odd,
        f"--head-size {w.head_size}: at least {w.latent_rank + 1}, V is a part of K": w.head_size <= w.latent_rank,
        f"--head-size {w.head_size} is odd: rotary_reshape_and_cache turns pairs": w.rotary and w.head_size % 2,
        "--selected needs --no-cascade: requests may select other blocks": w.cascades and w.selected is not None,
        "--selected: the workload's indexer selects keys": w.topk_tokens and w.selected is not None,
        "drafts are measured without ALiBi and windows": w.tree and (w.alibi or w.sliding_window >= 0),
        f"--kv-cache-dtype: NHD holds no {' and no '.join(integers)}": w.latent_rank and integers,
    }
    return next((f"{w.name}: {reason}" for reason, wrong in reasons.items() if wrong), "")


def _by_name(names: Sequence[str]) -> list[Workload]:
    known = [*GROUPS, *WORKLOADS]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 3)
            hint = f"did you mean {' or '.join(near)}? " if near else ""
            raise click.UsageError(f"no workload {name!r}: {hint}`cpu-attn bench --list` has them all")
    found = [w for name in names for w in GROUPS.get(name) or [WORKLOADS[name]]]
    return list(dict.fromkeys(found))


def _free(q_len: int | None = None, kv_len: int | None = None, batch: int = 1) -> Workload:
    """Makes a workload of a free shape. q_len is 1 unless said; kv_len is q_len unless said, and 1024 where neither
    is."""
    kv_len = kv_len or q_len or 1024
    q_len = q_len or 1
    if q_len > kv_len:
        raise click.UsageError(f"--q-len {q_len} is more than --kv-len {kv_len}: its queries are among the keys")
    kind = "decode" if q_len == 1 else "prefill"
    return Workload(f"{batch}x({q_len},{kv_len})", kind, ((q_len, kv_len),) * batch)


def _changed(w: Workload, shape: Options) -> Workload:
    """Changes a workload, and puts into its name what is not as it was."""
    changed = replace(w, **shape)
    differing = {k: v for k, v in shape.items() if v != getattr(w, k)}
    return replace(changed, name=" ".join([w.name, *(k if v is True else f"{k}={v:g}" for k, v in differing.items())]))


# ---- the shapes of a model ----


def layers_of(path: Path) -> list[Options]:
    """Reads a model's config.json: for each kind of its attention layers the fields of a Workload, ``layers``, which
    says how many there are of it, and ``model``, its name."""
    try:
        with path.open() as file:
            config = json.loads(file.read(MOST))
        config = config.get("text_config", config)
        return _layers(config)
    except OSError as error:
        raise click.UsageError(f"--model-config {path}: {error.strerror}") from None
    except KeyError as error:
        raise click.UsageError(f"--model-config {path}: lacks {error.args[0]}") from None
    except (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise click.UsageError(f"--model-config {path}: no config.json of a model ({error})") from None


def _layers(config: Options) -> list[Options]:
    def get(name: str, default: Any = None) -> int:
        found = next((config[key] for key in NAMES[name] if config.get(key)), default)
        if found is None:
            raise KeyError(NAMES[name][0])
        if type(found) is not int or not 0 < found <= 2**16:
            raise ValueError(f"{NAMES[name][0]}: {found!r}")
        return found

    num_heads, layers = get("num_heads"), get("layers")
    shape: Options = {"model": str(config.get("model_type", "model")), "num_heads": num_heads}
    if config.get("kv_lora_rank"):  # MLA with absorbed weights: all heads read the same rows
        rank, rope = int(config["kv_lora_rank"]), int(config["qk_rope_head_dim"])
        return [{**shape, "num_kv_heads": 1, "head_size": rank + rope, "latent_rank": rank, "layers": layers}]
    shape["num_kv_heads"] = get("num_kv_heads", num_heads)
    shape["head_size"] = int(config.get("head_dim") or get("hidden_size") // num_heads)
    shape["softcap"] = float(config.get("attn_logit_softcapping") or 0)
    shape["sinks"] = config.get("model_type") == "gpt_oss"  # its config does not say so
    window = int(config.get("sliding_window") or 0) if config.get("use_sliding_window", True) else 0
    kinds = config.get("layer_types") or [SLIDING if window else FULL] * layers
    counts = Counter(kind if window or kind != SLIDING else FULL for kind in kinds)
    others = {kind: n for kind, n in counts.items() if kind not in (FULL, SLIDING)}
    for kind, n in others.items():
        click.echo(f"without {counted(n, 'layer')} of {kind}", err=True)
    windows = {FULL: -1, SLIDING: window}
    found = [{**shape, "sliding_window": windows[k], "layers": n} for k, n in counts.items() if k in windows]
    if not found:
        raise ValueError("it has no layers of full or sliding attention")
    return found


def _of_model(w: Workload, kind: Options) -> Workload:
    """Gives a workload the heads and features of a kind of layers; its name says whose they are."""
    shape = {k: v for k, v in kind.items() if k != "model"}
    window = kind.get("sliding_window", -1)
    name = f"{w.name} {kind['model']}" + f" sliding_window={window}" * (window >= 0) if kind else w.name
    return replace(w, name=name, **shape)


def _no_model(w: Workload, kind: Options) -> str:
    """Says why a workload is not for a kind of layers, "" if it is."""
    latent = bool(kind.get("latent_rank"))
    if w.linear and kind:
        return f"{w.name}: --model-config has the shapes of attention"
    if w.latent_rank and not latent:
        return f"{w.name}: it is MLA, and this model is not"
    if latent and w.kind != "decode":
        return f"{w.name}: MLA with absorbed weights is measured in decode"
    return ""


# ---- the list ----


def show_list() -> None:
    """Prints what there is to run: requests, their tokens, heads, and what is special."""
    table = new_table("workload", "requests", numbers=("heads", "size"))
    table.add_column("features", overflow="fold")
    for group, members in GROUPS.items():
        if group == "all":
            continue
        table.add_row(Text(group, "bold"))
        for w in members:
            _add(table, w)
    grouped = {w.name for group, members in GROUPS.items() if group != "all" for w in members}
    table.add_row(Text("in no group but all", "bold"))
    for w in GROUPS["all"]:
        if w.name not in grouped:
            _add(table, w)
    new_console().print(table)


def _add(table: Any, w: Workload) -> None:
    lens = Counter(w.lens)
    requests = [f"{n} x {q} of {kv}" for (q, kv), n in lens.items()]
    said = ", ".join(requests) if len(requests) < 4 else f"{w.num_tokens} tokens in {counted(len(w.lens), 'request')}"
    features = {
        f"V is {w.latent_rank} columns of K": w.latent_rank,
        f"an indexer selects {w.topk_tokens} keys": w.topk_tokens,
        f"{w.selected or 0:.1%} of the blocks": w.selected is not None,
        f"{w.shared} keys shared": w.shared,
        "drafts": w.tree,
        "norm and rotary": w.rotary,
        w.kind: w.kind in ("write", "plan", "call"),
        f"{w.linear and w.linear.rule}, states": w.linear,
    }
    heads = f"{w.num_heads}/{w.num_kv_heads}"
    table.add_row(f"  {w.name}", said, heads, str(w.head_size), ", ".join(k for k, there in features.items() if there))
