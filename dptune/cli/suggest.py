"""``dptune suggest``: what to set for a private run, from public facts alone."""

from __future__ import annotations

import json
import shlex
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dptune.cli.console import show
from dptune.cli.options import AsJson, Options, read_options
from dptune.cli.tune_messages import by_option, set_up_logs
from dptune.cli.tuning_options import (
    AddBosToken,
    Alpha,
    AlphaPattern,
    AverageName,
    BatchUnits,
    Completion,
    DeltaOrNone,
    Device,
    Dtype,
    Epsilon,
    GradientCheckpointing,
    InitLoraWeights,
    LoadIn4bit,
    LossOn,
    MaxLength,
    MechanismName,
    Messages,
    Model,
    OptimizerName,
    Passes,
    Prompt,
    Rank,
    RankPattern,
    RecordsPerUnit,
    Revision,
    Rows,
    Rslora,
    ScheduleName,
    Seed,
    TargetModules,
    Template,
    Text,
    lora_arguments,
    lora_settings,
)
from dptune.errors import DptuneError

if TYPE_CHECKING:
    from dptune.tuning.base import Base
    from dptune.tuning.suggest import Suggestion


def suggest(
    model: Model,
    units: Annotated[int, typer.Option(help="Number of units to train on; public.", min=1)],
    epsilon: Epsilon,
    delta: DeltaOrNone = None,
    public: Annotated[
        Path | None, typer.Option(help="File of public records of the same kind as the private ones.")
    ] = None,
    trials: Annotated[
        bool,
        typer.Option("--trials", help="Try five learning rates on the public records; takes as long as five runs."),
    ] = False,
    unit: Annotated[str | None, typer.Option(help="Column of the public records that names the unit.")] = None,
    text: Text = None,
    prompt: Prompt = None,
    completion: Completion = None,
    messages: Messages = None,
    template: Template = None,
    mechanism: MechanismName = "static",
    options: Options = None,
    revision: Revision = None,
    batch: BatchUnits = None,
    epochs: Passes = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="Learning rate after warm-up; trials use multiples of it.")
    ] = None,
    optimizer: OptimizerName = "adamw",
    schedule: ScheduleName = "constant",
    average: AverageName = "tail",
    max_length: MaxLength = None,
    records_per_unit: RecordsPerUnit = 4,
    rows: Rows = 16,
    gradient_checkpointing: GradientCheckpointing = False,
    rank: Rank = 8,
    alpha: Alpha = 16,
    target_modules: TargetModules = None,
    rslora: Rslora = False,
    rank_pattern: RankPattern = None,
    alpha_pattern: AlphaPattern = None,
    init: InitLoraWeights = "true",
    loss_on: LossOn = None,
    add_bos_token: AddBosToken = False,
    seed: Seed = 0,
    device: Device = None,
    dtype: Dtype = None,
    load_in_4bit: LoadIn4bit = False,
    as_json: AsJson = False,
) -> None:
    """Suggest settings for a private run, with reasons; reads no private record."""
    settings = {
        "epsilon": epsilon,
        "delta": delta,
        "mechanism": mechanism,
        "options": read_options(options),
        "batch": batch,
        "epochs": epochs,
        "learning_rate": learning_rate,
        "optimizer": optimizer,
        "schedule": schedule,
        "average": average,
        "max_length": max_length,
        "records_per_unit": records_per_unit,
        "rows": rows,
        "gradient_checkpointing": gradient_checkpointing,
        "loss_on": loss_on,
        "add_bos_token": add_bos_token,
        "seed": seed,
        "device": device,
        "dtype": dtype,
        "load_in_4bit": load_in_4bit,
    }
    lora: dict[str, Any] = {
        "rank": rank,
        "alpha": alpha,
        "target_modules": target_modules,
        "rslora": rslora,
        "rank_pattern": rank_pattern,
        "alpha_pattern": alpha_pattern,
        "init": init,
    }
    columns = {
        "text": text,
        "prompt": prompt,
        "completion": completion,
        "messages": messages,
        "template": template,
        "unit": unit,
    }
    try:
        _suggest(model, revision, units, public, columns, settings | lora_settings(**lora), trials, as_json)
    except DptuneError as error:
        raise DptuneError(by_option(str(error))) from None


def _suggest(
    model: str,
    revision: str | None,
    units: int,
    public: Path | None,
    columns: dict[str, Any],
    settings: dict[str, Any],
    trials: bool,
    as_json: bool,
) -> None:
    from dptune.corpus.reading.source import RecordSource
    from dptune.tuning.places import check_data, check_model
    from dptune.tuning.settings import TuneSettings

    chosen = TuneSettings.of(**settings)
    chosen.check_rows(columns.get("unit"))
    check_model(model, revision)
    source = None if public is None else RecordSource(str(public), **columns)
    if source is not None:
        check_data(source)
    set_up_logs()
    from dptune.tuning.base import open_base
    from dptune.tuning.prepare import check_mechanism
    from dptune.tuning.suggest import suggest as found

    base = open_base(model, chosen, revision)
    check_mechanism(chosen, base)
    suggestion = found(base, chosen, units, source, trials=trials)
    show(_figures(base, suggestion, units, epsilon=chosen.epsilon), as_json)
    if not as_json:
        options = _tune_options(suggestion, chosen, columns | {"revision": revision})
        typer.echo("Choose around it, one epsilon for all that is tried: the command below with")
        typer.echo("--search space.yaml --candidates 10 in place of --batch, --learning-rate and --set max_grad_norm;")
        typer.echo(f"space.yaml: {_space(suggestion, units)}")
        typer.echo(f"Use it: dptune tune --data FILE --model {shlex.quote(model)} {options}")


def _figures(base: Base, suggestion: Suggestion, units: int, epsilon: float) -> dict[str, Any]:
    schedule, mechanism = suggestion.schedule, suggestion.mechanism.mechanism
    found: dict[str, Any] = {
        "model": base.name,
        "units": units,
        "epsilon": epsilon,
        "delta": schedule.delta,
        "mechanism": mechanism.name,
        **schedule.options,
        "noise_multiplier": mechanism.effective_noise_multiplier(mechanism.knobs()),
        "batch": schedule.batch,
        "epochs": schedule.epochs,
        "steps": schedule.steps,
        "learning_rate": schedule.learning_rate,
        "warmup_steps": schedule.warmup_steps,
        "max_length": schedule.max_length,
    }
    if suggestion.norms:
        found["public_norms_10_50_90_percent"] = [f"{norm:.3g}" for norm in suggestion.norms]
    if suggestion.trials:
        found["public_perplexity_before"] = suggestion.perplexity_before
        found |= {f"public_perplexity_at_{rate:g}": value for rate, value in suggestion.trials.items()}
    return found | {"chosen_because": [f"{name}: {reason}" for name, reason in schedule.reasons.items()]}


def _space(suggestion: Suggestion, units: int) -> str:
    """The file of a space around what is suggested; JSON is YAML too."""
    return json.dumps({"space": suggestion.space(units)})


def _exact(number: float) -> str:
    """All digits of a number, and no point after a whole one."""
    return str(int(number)) if float(number).is_integer() else repr(number)


def _tune_options(suggestion: Suggestion, settings: Any, columns: dict[str, Any]) -> str:
    schedule = suggestion.schedule
    # With all digits: an epsilon that was rounded up would be another budget.
    given = [f"--epsilon {settings.epsilon!r} --delta {schedule.delta!r} --mechanism {settings.mechanism}"]
    given += [f"--set {name}={value}" for name, value in schedule.options.items()]
    given.append(f"--batch {_exact(schedule.batch)} --epochs {_exact(schedule.epochs)}")
    given.append(f"--learning-rate {schedule.learning_rate!r}")
    usual = {field.name: field.default for field in fields(settings)}
    rule = {name: getattr(settings, name) for name in ("optimizer", "schedule", "average")}
    given += [f"--{name} {value}" for name, value in rule.items() if value != usual[name]]
    given.append(f"--max-length {schedule.max_length} --rank {settings.rank} --alpha {settings.alpha}")
    if columns.get("unit"):
        given.append(f"--records-per-unit {settings.records_per_unit}")
    given += map(shlex.quote, lora_arguments(settings))
    given += [f"--{name} {shlex.quote(value)}" for name, value in columns.items() if value]
    given += [
        f"--{name} {value}" for name, value in (("loss-on", settings.loss_on), ("dtype", settings.dtype)) if value
    ]
    switches = ("gradient_checkpointing", "load_in_4bit", "add_bos_token")
    given += [f"--{name.replace('_', '-')}" for name in switches if getattr(settings, name)]
    if settings.seed:
        given.append(f"--seed {settings.seed}")
    return " ".join(given)
