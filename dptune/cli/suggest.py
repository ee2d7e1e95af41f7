"""``dptune suggest``: what to set for a private run, from public facts alone."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dptune.cli.console import flag, set_up_logs, show
from dptune.cli.options import (
    AsJson,
    Completion,
    Messages,
    Model,
    Prompt,
    Revision,
    Template,
    Text,
    arguments_of,
    exact,
    takes_settings,
)
from dptune.core.declarations import declared
from dptune.job.settings import TuneSettings

if TYPE_CHECKING:
    from dptune.job.base_model import Base
    from dptune.job.suggest import Suggestion


#: Settings about records and tasks, which suggestions are not about.
_OTHERS = ("task", "labels", "words", "eval_share", "telemetry", "called")
_SUGGESTED = tuple(name for name in declared(TuneSettings) if name not in _OTHERS)
#: Settings that the schedule completes, so that the command gives the values of the schedule.
_COMPLETED = ("delta", "expected_batch_size", "epochs", "learning_rate", "max_length")


@takes_settings(*_SUGGESTED)
def suggest(
    model: Model,
    units: Annotated[int, typer.Option(help="Number of units to train on; public.", min=1)],
    *,
    settings: dict[str, Any],
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
    revision: Revision = None,
    as_json: AsJson = False,
) -> None:
    """Suggest settings for a private run, with reasons; reads no private record."""
    columns = {
        "text": text,
        "prompt": prompt,
        "completion": completion,
        "messages": messages,
        "template": template,
        "unit": unit,
    }
    _suggest(model, revision, units, public, columns, settings, trials, as_json)


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
    from dptune.job.path_checks import check_data, check_model
    from dptune.records.reading.source import RecordSource

    chosen = TuneSettings.of(**settings)
    chosen.check_rows(columns.get("unit"))
    check_model(model, revision)
    source = None if public is None else RecordSource(str(public), **columns)
    if source is not None:
        check_data(source)
    set_up_logs()
    from dptune.job.base_model import open_base
    from dptune.job.preparation import check_mechanism
    from dptune.job.suggest import suggest as found

    base = open_base(model, chosen, revision)
    check_mechanism(chosen, base)
    suggestion = found(base, chosen, units, source, trials=trials)
    show(_figures(base, suggestion, units, epsilon=chosen.epsilon), as_json)
    if not as_json:
        options = _tune_options(suggestion, chosen, columns | {"revision": revision})
        typer.echo("Choose around it, one epsilon for all that is tried: the command below with")
        typer.echo(
            "--search space.yaml --candidates 10 in place of --expected-batch-size, --learning-rate and "
            "--set max_grad_norm;"
        )
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
        "expected_batch_size": schedule.expected_batch_size,
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


def _tune_options(suggestion: Suggestion, settings: TuneSettings, columns: dict[str, Any]) -> str:
    """The options of the command that trains as suggested, quoted for a shell."""
    completed = {name: getattr(suggestion.schedule, name) for name in _COMPLETED}
    own = replace(settings, options=suggestion.schedule.options, **completed)
    named = ("epsilon", *_COMPLETED, "mechanism")
    words = [word for name in named for word in (flag(name), exact(getattr(own, name)))]
    words += arguments_of(own, [name for name in _SUGGESTED if name not in (*named, "device")])
    words += [word for name, value in columns.items() if value for word in (f"--{name}", value)]
    return shlex.join(words)
