"""Options that `dptune tune` and `dptune suggest` share."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

import typer

from dptune.cli.catalogue import completions
from dptune.errors import ConfigError
from dptune.update_rule import Average, Optimizer, RateSchedule

AddBosToken = Annotated[
    bool,
    typer.Option(
        "--add-bos-token", help="Learn how texts begin, for dptune sample, if the tokenizer puts nothing before."
    ),
]
Alpha = Annotated[int, typer.Option(help="Of LoRA.")]
AlphaPattern = Annotated[
    list[str] | None, typer.Option(help="Alpha of some layers, NAME=NUMBER, as PEFT's alpha_pattern; repeatable.")
]
BatchUnits = Annotated[float | None, typer.Option(help="Expected units of a batch.")]
Completion = Annotated[str | None, typer.Option(help="Column of completions.")]
DeltaOrNone = Annotated[float | None, typer.Option(help="Of the guarantee, below 1 over the units.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda:0; else a GPU where there is one.")]
Dtype = Annotated[Literal["float32", "bfloat16"] | None, typer.Option(help="Of the frozen weights.")]
Passes = Annotated[float | None, typer.Option(help="Passes over the units.")]
Epsilon = Annotated[float, typer.Option(help="The budget, certified.")]
GradientCheckpointing = Annotated[
    bool, typer.Option("--gradient-checkpointing", help="Less memory, more time, the same result.")
]
InitLoraWeights = Annotated[
    Literal["true", "gaussian", "orthogonal"],
    typer.Option("--init", "--init-lora-weights", help="Start of the adapters, as PEFT has it."),
]
LoadIn4bit = Annotated[
    bool, typer.Option("--load-in-4bit", help="Frozen weights in bitsandbytes' NF4, as transformers has it.")
]
LossOn = Annotated[Literal["completion", "assistant", "all"] | None, typer.Option(help="What is learned.")]
MaxLength = Annotated[int | None, typer.Option(help="Tokens of a record.")]
MechanismName = Annotated[str, typer.Option(help="See `dptune mechanisms`.", autocompletion=completions)]
Messages = Annotated[str | None, typer.Option(help="Column of chats.")]
Model = Annotated[str, typer.Option(help="Folder of a checkpoint, or a hub id with --revision.")]
Prompt = Annotated[str | None, typer.Option(help="Column of prompts, which have no loss.")]
OptimizerName = Annotated[Optimizer, typer.Option("--optimizer", help="adam_bc: Adam without the noise it knows of.")]
ScheduleName = Annotated[RateSchedule, typer.Option("--schedule", help="Of the learning rate, after warm-up.")]
AverageName = Annotated[
    Average, typer.Option("--average", help="Of the weights; tail: of the last tenth of the steps.")
]
Rank = Annotated[int, typer.Option(help="Of LoRA.")]
RankPattern = Annotated[
    list[str] | None, typer.Option(help="Rank of some layers, NAME=NUMBER, as PEFT's rank_pattern; repeatable.")
]
RecordsPerUnit = Annotated[int, typer.Option(help="Most records of a unit in a batch.")]
Revision = Annotated[str | None, typer.Option(help="40-digit commit of a hub id.")]
Rows = Annotated[int, typer.Option(help="Of a micro-batch: memory and speed only.")]
Rslora = Annotated[bool, typer.Option("--rslora", help="Scale by alpha / sqrt(rank).")]
Seed = Annotated[int, typer.Option(help="Of the adapters' and head's start; public.")]
TargetModules = Annotated[
    str | None, typer.Option(help="Linear layers, by commas; all-linear; or a regular expression of whole names.")
]
Template = Annotated[
    str | None, typer.Option(help="Text with columns in braces: '{age} years'. {text} is the column of --text.")
]
Text = Annotated[str | None, typer.Option(help="Column of texts.")]

_NAMES = re.compile(r"[\w.]+(\s*,\s*[\w.]+)*")


def lora_settings(
    *,
    rank: int,
    alpha: int,
    target_modules: str | None,
    rslora: bool,
    rank_pattern: list[str] | None,
    alpha_pattern: list[str] | None,
    init: str,
) -> dict[str, Any]:
    """LoRA's settings by their names in ``TuneSettings``. Raises: ConfigError for a pattern that is no NAME=NUMBER."""
    return {
        "rank": rank,
        "alpha": alpha,
        "target_modules": _modules(target_modules),
        "rslora": rslora,
        "rank_pattern": _pattern("rank_pattern", rank_pattern),
        "alpha_pattern": _pattern("alpha_pattern", alpha_pattern),
        "init_lora_weights": True if init == "true" else init,
    }


def named_labels(given: str | None) -> tuple[Any, ...] | None:
    """Labels from a text with commas, or from a list in JSON, where a label holds a comma."""
    if given is None:
        return None
    if not given.lstrip().startswith("["):
        return tuple(name.strip() for name in given.split(","))
    try:
        return tuple(json.loads(given))
    except ValueError:
        raise ConfigError("--labels", f"{given!r} is no list in JSON", fix='write ["one, label", "another"]') from None


def words_of_labels(given: list[str] | None) -> dict[str, str] | None:
    """Each label's word, with the space at its beginning; None where none is given."""
    found: dict[str, str] = {}
    for text in given or ():
        label, sign, word = text.partition("=")
        if not (sign and label.strip() and word):
            problem = f"{text!r} is no LABEL=WORD"
            raise ConfigError("task.words", problem, fix='write a label, = and its word, such as 0=" poor"')
        if label.strip() in found:
            raise ConfigError("task.words", f"label {label.strip()!r} is given twice", fix="give it one word")
        found[label.strip()] = word
    return found or None


def _modules(given: str | None) -> tuple[str, ...] | str | None:
    """Names of layers from a text with commas. What else is given is a regular expression, as PEFT takes texts."""
    if given is None or given == "all-linear" or not _NAMES.fullmatch(given):
        return given
    return tuple(name.strip() for name in given.split(","))


def _pattern(field: str, given: list[str] | None) -> dict[str, int]:
    """Numbers by names of layers, which are regular expressions and may hold ``=``."""
    found = {}
    for text in given or ():
        name, sign, number = text.rpartition("=")
        if not (sign and name and number.strip().isdigit()):
            fix = "write the layer's name, = and a whole number, such as q_proj=4"
            raise ConfigError(field, f"{text!r} is no NAME=NUMBER", fix=fix)
        if name in found:
            raise ConfigError(field, f"{name!r} is given twice", fix="give it once")
        found[name] = int(number)
    return found


def lora_arguments(settings: Any) -> list[str]:
    """The options that give these settings of LoRA, rank and alpha apart; defaults are left out."""
    layers, start = settings.target_modules, settings.init_lora_weights
    given = [] if layers is None else ["--target-modules", layers if isinstance(layers, str) else ",".join(layers)]
    for option, pattern in (("--rank-pattern", settings.rank_pattern), ("--alpha-pattern", settings.alpha_pattern)):
        given += [word for name, number in pattern.items() for word in (option, f"{name}={number}")]
    given += ["--rslora"] if settings.rslora else []
    return given if start is True else [*given, "--init", start]
