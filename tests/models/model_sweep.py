# SPDX-License-Identifier: Apache-2.0
"""Every architecture of transformers, made tiny and random, with attn_implementation="cpu_attn" beside "eager".

``python -m cpu_attn.tests.models.model_sweep`` goes through all of them (``make model-sweep``), ``... llama bert``
through some, and prints a table. Outcomes, the worst of what was run of a model:

- equal: cpu_attn's outputs are those of eager or sdpa, padding included, or, where sdpa does not run or differs, those
  of eager without padding;
- refused: a ValueError that says why;
- different, error: what must not be;
- undecided: eager and sdpa generate different tokens themselves (a model that draws them);
- not reached: the model never calls the attention function that it was told of;
- not driven: no tiny model could be made here, or eager itself fails with it.

``--csv FILE`` writes the table of docs/reference/architectures.md, a row for each outcome and reason.
"""

from __future__ import annotations

import argparse
import csv
import inspect
import json
import re
import resource
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import cpu_attn.transformers as adapter
from cpu_attn.tests.models.hf_odd_models import ODD
from cpu_attn.tests.models.hf_tiny import MELS, VOCABULARY, build, tiny
from cpu_attn.transformers import attention as module
from cpu_attn.transformers import linear

TOKENS, BATCH = 21, 2
MOST_SECONDS, MOST_BYTES = 60, 12 << 30
TOLERANCE = 2e-4  # of the largest output: weights are so large that float32 rounds to 1e-5 of it
# What generates first, then what has a head of some kind, then the bare model.
CLASSES = (
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "MODEL_MAPPING_NAMES",
)
RANK = ("error", "different", "refused", "undecided", "equal", "not reached", "not driven")
OWN = "attention of its own"
TABLE = "KeyError from from_pretrained, which looks cpu_attn up in a table of its own"
# What stands in the docs for reasons that match; others go there as they are, but those of models that were not made.
REASONS = (
    ("no input is known", "inputs that the sweep does not know"),
    ("^Late: ", f"more than {MOST_SECONDS} s"),
    ("padded .* eager: ", "eager fails with padding"),
    ("eager: ", "eager fails with the sweep's inputs"),
    ("to sdpa, which is ", "as sdpa has it, from which eager differs"),
    ("to eager, which is ", "as eager has it, from which sdpa differs"),
)


# ---- what a model is given ----


def given(model: Any, more: str = "") -> dict[str, Any]:
    """What its forward asks for, as far as a name says what that is. NotImplementedError where none does."""
    names = inspect.signature(model.forward).parameters
    generator = torch.Generator().manual_seed(3)
    main = model.main_input_name
    found: dict[str, Any] = {}
    low, high = 4, VOCABULARY - 28  # special tokens are above and below
    ids = torch.randint(low, high, (BATCH, TOKENS), generator=generator)
    if "input_ids" in names and main == "input_ids":
        found["input_ids"] = ids
    elif main in ("pixel_values", "pixel_values_videos"):
        found[main] = _pixels(model, generator)
    elif main in ("input_features", "input_values"):
        found[main] = _sound(model, main, generator)
    else:
        raise NotImplementedError(f"no input is known for {main}")
    if "decoder_input_ids" in names:
        found["decoder_input_ids"] = torch.randint(low, high, (BATCH, 9), generator=generator)
    if more:
        if more not in names or main == more:
            raise NotImplementedError(f"no {more}")
        found[more] = _pixels(model, generator) if more == "pixel_values" else _sound(model, more, generator)
    return found


def _pixels(model: Any, generator: torch.Generator) -> torch.Tensor:
    config = model.config
    for part in (config, *(getattr(config, n, None) for n in ("vision_config", "encoder", "backbone_config"))):
        size = getattr(part, "image_size", None)
        if size is not None:
            sizes = (size, size) if isinstance(size, int) else tuple(size)[-2:]
            return torch.randn(BATCH, getattr(part, "num_channels", 3), *sizes, generator=generator)
    return torch.randn(BATCH, 3, 64, 64, generator=generator)


def _sound(model: Any, name: str, generator: torch.Generator) -> torch.Tensor:
    config = model.config.get_audio_config() if hasattr(model.config, "get_audio_config") else model.config
    if name == "input_values":
        return torch.randn(BATCH, 4000, generator=generator)
    mels = next((getattr(config, n) for n in ("num_mel_bins", "feature_size", "n_mels") if hasattr(config, n)), MELS)
    positions = getattr(config, "max_source_positions", None)
    if positions and hasattr(config, "decoder_layers") and "whisper" in config.model_type:
        return torch.randn(BATCH, mels, 2 * positions, generator=generator)
    return torch.randn(BATCH, 64, mels, generator=generator)


# ---- runs ----


@dataclass
class Result:
    architecture: str
    model_class: str
    outcome: str
    why: str = ""
    reached: int = 0


class RefusedError(Exception):
    """A ValueError of the attention function."""


class Late(BaseException):
    """Not for those who catch what models raise."""


def _counted(calls: list[int]) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        try:
            return module.attention(*args, **kwargs)
        except ValueError as e:
            raise RefusedError(str(e)) from e

    return counted


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        if output.is_floating_point() or output.dtype in (torch.int64, torch.int32):
            yield output
    elif isinstance(output, (list, tuple)):
        for x in output:
            yield from _tensors(x)
    elif isinstance(output, dict):
        for name, x in output.items():
            if "attentions" not in name:  # weights, which eager alone has
                yield from _tensors(x)


def forward(model: Any, inputs: dict[str, Any]) -> list[torch.Tensor]:
    torch.manual_seed(5)
    return list(_tensors(model(**inputs)))


def generate(model: Any, inputs: dict[str, Any]) -> list[torch.Tensor]:
    inputs = {k: v for k, v in inputs.items() if k != "decoder_input_ids"}
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    torch.manual_seed(5)
    return list(_tensors(model.generate(**inputs, **options)))


def runs(model: Any, plain: dict[str, Any] | None = None) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """What to run, by name. Padding stands behind the tokens of a row, but where a text goes on after them."""
    plain = plain or given(model, _needed(model))
    yield "prefill", forward, plain
    if model.can_generate():
        yield "generate", generate, plain
    if "attention_mask" in plain or "input_ids" not in plain:
        return
    if "attention_mask" not in inspect.signature(model.forward).parameters:
        return
    length = plain["input_ids"].shape[1]
    tokens, at = torch.tensor([[length], [length - length // 3]]), torch.arange(length)
    yield "padded prefill", forward, plain | {"attention_mask": (at < tokens).long()}
    if model.can_generate():
        side = at < tokens if model.config.is_encoder_decoder else at >= length - tokens
        yield "padded generate", generate, plain | {"attention_mask": side.long()}


def _needed(model: Any) -> str:
    """What eager cannot do without, of what a forward also takes."""
    for more in ("", "pixel_values", "input_features", "input_values"):
        try:
            under(model, "eager", forward, given(model, more))
            return more
        except Exception:
            continue
    return ""


def difference(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """Of the largest that there is, over all that came out; inf for other shapes."""
    if [x.shape for x in ours] != [x.shape for x in theirs]:
        return float("inf")
    most = 0.0
    for a, b in zip(ours, theirs, strict=True):
        if not a.numel():
            continue
        a, b = (torch.nan_to_num(x.double(), 0.5, 1e30, -1e30) for x in (a, b))
        scale = b[b.abs() < 1e29].abs().max() if (b.abs() < 1e29).any() else torch.tensor(1.0)
        most = max(most, float((a - b).abs().max() / scale.clamp_min(1e-6)))
    return most


def under(model: Any, implementation: str, run: Any, inputs: dict[str, Any]) -> list[torch.Tensor]:
    (linear.enable if implementation == "cpu_attn" else linear.disable)()
    model.set_attn_implementation(implementation)
    # As from_pretrained does: a model whose attention is its own gets the masks of what it is told of.
    for config in {id(x.config): x.config for x in model.modules() if isinstance(x, hf.PreTrainedModel)}.values():
        config._attn_implementation_internal = implementation
    with torch.no_grad():
        found: list[torch.Tensor] = run(model, inputs)
    return found


def of_tokens(outputs: list[torch.Tensor], inputs: dict[str, Any]) -> list[torch.Tensor]:
    """Without padding, of which eager makes what it likes, and without what is no longer told apart by tokens."""
    mask = inputs.get("attention_mask")
    if mask is None or mask.all() or "input_ids" not in inputs:
        return outputs
    decoded = inputs.get("decoder_input_ids", mask).shape
    found = [x[mask.bool()] for x in outputs if x.shape[:2] == mask.shape]
    return found + [x for x in outputs if x.ndim > 1 and x.shape[:2] == decoded != mask.shape]


def compare(model: Any, run: Any, inputs: dict[str, Any]) -> tuple[str, str]:
    try:
        eager = under(model, "eager", run, inputs)
    except Exception as e:
        return "not driven", f"eager: {_said(e)}"
    if not eager:
        return "not driven", "nothing came out"
    try:
        ours = under(model, "cpu_attn", run, inputs)
    except RefusedError as e:
        return "refused", str(e)
    except Exception as e:
        return "error", _said(e)
    try:
        sdpa = under(model, "sdpa", run, inputs)
    except Exception:
        sdpa = None
    some = (lambda x: x) if run is generate else (lambda x: of_tokens(x, inputs))
    from_eager = difference(some(ours), some(eager))
    if sdpa is None:
        return ("equal", "") if from_eager < TOLERANCE else ("different", f"{from_eager:.2g}")
    from_sdpa, apart = difference(ours, sdpa), difference(some(sdpa), some(eager))
    if difference(ours, eager) < TOLERANCE:
        return "equal", ""
    if from_sdpa < TOLERANCE:  # padding, too
        return "equal", "" if from_eager < TOLERANCE else f"to sdpa, which is {apart:.2g} from eager"
    if apart >= TOLERANCE and from_eager < TOLERANCE:
        return "equal", f"to eager, which is {apart:.2g} from sdpa"
    if apart >= TOLERANCE and run is generate:
        return "undecided", f"eager and sdpa write other tokens, too ({apart:.2g})"
    return "different", f"{from_eager:.2g} from eager, {from_sdpa:.2g} from sdpa, padding included"


def _said(e: BaseException) -> str:
    return f"{type(e).__name__}: {' '.join(str(e).split())[:160]}"


def sweep(architecture: str, model_class_name: str) -> Result:
    adapter.enable()
    calls = [0]
    hf.AttentionInterface.register("cpu_attn", _counted(calls))
    result = Result(architecture, model_class_name, "not driven")
    try:
        if architecture in ODD:
            model, plain = ODD[architecture]()
            result.model_class = type(model).__name__
        else:
            model, plain = build(getattr(hf, model_class_name), tiny(CONFIG_MAPPING[architecture])), None
        found = [(name, *compare(model, run, inputs)) for name, run, inputs in runs(model, plain)]
    except Exception as e:
        result.why = _said(e)
        return result
    finally:
        adapter.enable()
    result.reached = calls[0]
    ranked = sorted(found, key=lambda x: RANK.index(x[1]))
    name, result.outcome, why = ranked[0]
    result.why = f"{name}: {why}" if why else ""
    if result.outcome == "equal" and not result.reached:
        result.outcome, result.why = "not reached", OWN
    if result.outcome in ("equal", "not reached") and _in_a_table(model):
        result.why = TABLE
    return result


def _in_a_table(model: Any) -> bool:
    """Whether it is not to be made with the implementation, only to be told of it afterwards."""
    try:
        config = type(model.config).from_dict(model.config.to_dict(), attn_implementation="cpu_attn")
        with torch.device("meta"):
            type(model)(config)
    except KeyError:
        return True
    except Exception:  # of a configuration that does not survive its own words
        return False
    return False


def architectures() -> dict[str, str]:
    """The model class of each that transformers has one for."""
    found: dict[str, str] = {}
    for name in CLASSES:
        for architecture, classes in getattr(modeling_auto, name).items():
            found.setdefault(architecture, classes if isinstance(classes, str) else classes[0])
    found |= {name: "" for name in ODD if name not in found}
    return dict(sorted(found.items()))


# ---- all of them ----


def table(results: list[Result]) -> list[list[str]]:
    """A row for each outcome and reason, with the architectures that it is of, below the names of the columns."""
    rows: dict[tuple[int, str], list[str]] = {}
    for x in results:
        other = "no tiny model" if x.outcome == "not driven" else x.why.replace("|", "\\|")
        why = next((text for pattern, text in REASONS if re.search(pattern, x.why)), other)
        rows.setdefault((RANK.index(x.outcome), why), []).append(x.architecture)
    return [["outcome", "why", "how many", f"architectures of transformers {hf.__version__}"]] + [
        [RANK[rank], why, str(len(names)), ", ".join(names)]
        for (rank, why), names in sorted(rows.items(), key=lambda row: (row[0][0], -len(row[1])))
    ]


def _one(item: tuple[str, str]) -> Result:
    def late(*_: Any) -> None:
        raise Late(f"more than {MOST_SECONDS} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(MOST_SECONDS)
    try:
        return sweep(*item)
    except Late as e:
        return Result(*item, "not driven", _said(e))
    finally:
        signal.alarm(0)


def _worker() -> None:
    warnings.simplefilter("ignore")
    hf.logging.set_verbosity_error()
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("names", nargs="*", help="architectures; all, if there is none")
    parser.add_argument("--json", help="a file for the results")
    parser.add_argument("--csv", type=Path, help="a file for a table of the outcomes")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args(arguments)
    items = [x for x in architectures().items() if not options.names or x[0] in options.names]
    results = []
    with get_context("spawn").Pool(options.processes, _worker, maxtasksperchild=40) as pool:
        for result in pool.imap(_one, items):
            results.append(result)
            print(f"{result.architecture:32} {result.model_class:40} {result.outcome:12} {result.why}", flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump([asdict(x) for x in results], file, indent=1)
    if options.csv:
        with options.csv.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(table(results))
    counts = Counter(x.outcome for x in results)
    print(", ".join(f"{counts[x]} {x}" for x in RANK if counts[x]))
    return int(bool(counts["error"] or counts["different"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
