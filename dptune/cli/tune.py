"""``dptune tune``: takes a user's records, a model and a budget; makes an adapter with its proof."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dptune.cli.console import notice, show, show_progress
from dptune.cli.options import AsJson, Options, read_options
from dptune.cli.tuning_options import (
    Alpha,
    BatchUnits,
    Completion,
    DeltaOrNone,
    Device,
    Dtype,
    Epsilon,
    LossOn,
    MaxLength,
    MechanismName,
    Messages,
    Model,
    Passes,
    Prompt,
    Rank,
    RecordsPerUnit,
    Revision,
    Rows,
    Seed,
    TargetModules,
    Template,
    Text,
)
from dptune.corpus.reading.source import Format
from dptune.errors import DptuneError

if TYPE_CHECKING:
    from dptune.tuning.prepare import PreparedRun
    from dptune.tuning.run import Tuned

_INTERRUPTED = 130
#: The option of this command for each name that messages of the library use.
_OPTIONS = {
    "data.text": "--text",
    "data.prompt": "--prompt",
    "data.messages": "--messages",
    "data.template": "--template",
    "data.format": "--format",
    "data.unit": "--unit",
    "data.split": "--eval-share",
    "data.revision": "datasets saved to a folder",
    "model.source": "--model",
    "model.revision": "--revision",
    "lora.target_modules": "--target-modules",
    "training.max_length": "--max-length",
    "training.learning_rate": "--learning-rate",
    "training.loss_on": "--loss-on",
    "records_per_unit": "--records-per-unit",
    "max_length": "--max-length",
    "cut_records": "--cut-records",
    "eval_share": "--eval-share",
    "learning_rate": "--learning-rate",
    "target_modules": "--target-modules",
    "options.": "--set ",
}
#: Names that are English words too: they are replaced only at the beginning of a message.
_WORDS = (
    "data",
    "label",
    "seed",
    "dtype",
    "telemetry",
    "epsilon",
    "delta",
    "batch",
    "epochs",
    "rows",
    "rank",
    "alpha",
    "mechanism",
    "device",
    "public",
    "out",
)
_NAMES = re.compile("|".join(rf"(?<![\w./-]){re.escape(name)}\b" for name in sorted(_OPTIONS, key=len, reverse=True)))


def tune(
    model: Model,
    data: Annotated[Path, typer.Option(help="Records: .csv, .tsv, .parquet, .jsonl, .txt, or a saved data set.")],
    epsilon: Epsilon,
    delta: DeltaOrNone = None,
    unit: Annotated[str | None, typer.Option(help="Column whose values are protected as a whole.")] = None,
    text: Text = None,
    prompt: Prompt = None,
    completion: Completion = None,
    messages: Messages = None,
    template: Template = None,
    file_format: Annotated[
        Format | None,
        typer.Option("--format", help="Else by the file's ending."),
    ] = None,
    public: Annotated[Path | None, typer.Option(help="Records of nobody, read in the same way.")] = None,
    mechanism: MechanismName = "static",
    options: Options = None,
    out: Annotated[Path, typer.Option(help="Folder of the run; run again to go on.")] = Path("tuned"),
    revision: Revision = None,
    batch: BatchUnits = None,
    epochs: Passes = None,
    learning_rate: Annotated[float | None, typer.Option(help="AdamW's.")] = None,
    max_length: MaxLength = None,
    cut_records: Annotated[bool, typer.Option("--cut-records", help="Allow most records to be cut.")] = False,
    records_per_unit: RecordsPerUnit = 4,
    rows: Rows = 16,
    rank: Rank = 8,
    alpha: Alpha = 16,
    target_modules: TargetModules = None,
    rslora: Annotated[bool, typer.Option("--rslora", help="Scale by alpha / sqrt(rank).")] = False,
    loss_on: LossOn = None,
    eval_share: Annotated[float, typer.Option(help="Of the units, held out for perplexity; 0: none.")] = 0.1,
    telemetry: Annotated[
        Literal["research", "private"], typer.Option(help="private: no statistic of private records is told.")
    ] = "research",
    seed: Seed = 0,
    device: Device = None,
    dtype: Dtype = None,
    label: Annotated[str, typer.Option(help="What ledger and card call the records; public.")] = "own records",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything and say what it would take.")] = False,
    as_json: AsJson = False,
) -> None:
    """Fine-tune a model on records of your own with differential privacy; the adapter comes with its proof."""
    given = {
        "epsilon": epsilon,
        "delta": delta,
        "mechanism": mechanism,
        "options": read_options(options),
        "batch": batch,
        "epochs": epochs,
        "learning_rate": learning_rate,
        "max_length": max_length,
        "cut_records": cut_records,
        "records_per_unit": records_per_unit,
        "rows": rows,
        "rank": rank,
        "alpha": alpha,
        "target_modules": modules(target_modules),
        "rslora": rslora,
        "loss_on": loss_on,
        "eval_share": eval_share,
        "telemetry": telemetry,
        "seed": seed,
        "device": device,
        "dtype": dtype,
        "label": label,
    }
    source = {
        "data": str(data),
        "format": file_format,
        "text": text,
        "prompt": prompt,
        "completion": completion,
        "messages": messages,
        "template": template,
        "unit": unit,
        "public": None if public is None else str(public),
    }
    try:
        _tune(model, revision, source, given, out, dry_run, as_json)
    except DptuneError as error:
        raise DptuneError(by_option(str(error))) from None
    except KeyboardInterrupt:
        notice("stopped", _where(out))
        raise typer.Exit(_INTERRUPTED) from None


def _tune(
    model: str, revision: str | None, source: dict[str, Any], given: dict[str, Any], out: Path, dry: bool, as_json: bool
) -> None:
    from dptune.corpus.reading.source import RecordSource
    from dptune.tuning.places import check_data, check_folder, check_model
    from dptune.tuning.settings import TuneSettings

    settings, described = TuneSettings.of(**given), RecordSource(**source)
    check_model(model, revision)
    check_folder(out)
    check_data(described)
    set_up_logs()
    from dptune.tuning.base import open_base
    from dptune.tuning.prepare import check_mechanism, prepare
    from dptune.tuning.run import run

    base = open_base(model, settings, revision)
    check_mechanism(settings, base)
    prepared = prepare(described, base, settings)
    for note in prepared.notes:
        notice("warning", by_option(note))
    if dry:
        show(_plan(prepared) | _resources(prepared), as_json)
        return
    tuned = run(prepared, out, on_start=lambda: None if as_json else show(_plan(prepared), as_json))
    _show_result(tuned, prepared, as_json)


def by_option(message: str) -> str:
    """A message of the library, with names of fields replaced by this command's options."""
    field, colon, rest = message.partition(": ")
    named = f"--{message}" if colon and rest and field in _WORDS else message
    return _NAMES.sub(lambda found: _OPTIONS[found[0]], named)


def modules(given: str | None) -> Any:
    """Names of layers from a comma-separated text; None and all-linear are returned unchanged."""
    if given is None or given == "all-linear":
        return given
    return tuple(name.strip() for name in given.split(","))


def set_up_logs() -> None:
    """Show progress, and hide warnings that are meant for developers of other libraries."""
    import warnings

    warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.*", FutureWarning)  # PEFT's, of transformers
    show_progress()


def _plan(prepared: PreparedRun) -> dict[str, Any]:
    """The run's settings, with the reason for each one that the user left open."""
    from dptune.tuning.run import public_settings

    settings, chosen, units = prepared.settings, prepared.schedule, prepared.units
    mechanism = prepared.mechanism.mechanism
    knobs = mechanism.knobs()
    records = prepared.counts if settings.telemetry == "research" else {"public": prepared.counts["public"]}
    return {
        "model": prepared.base.name,
        **{f"records_{side}": count for side, count in records.items() if count},
        "units": len(units),
        "unit": units.kind,
        "epsilon": settings.epsilon,
        "delta": chosen.delta,
        "noise_multiplier": mechanism.effective_noise_multiplier(knobs),
        "sample_rate": chosen.sample_rate,
        **{name.replace(" ", "_").lower(): value for name, value in public_settings(prepared).items()},
        "adapter_parameters": prepared.base.dimension,
        "telemetry": settings.telemetry,
        "chosen_because": [f"{name}: {reason}" for name, reason in chosen.reasons.items()],
    }


def _resources(prepared: PreparedRun) -> dict[str, Any]:
    from dptune.tuning.estimate import estimate
    from dptune.units import RECORD

    units, private = prepared.units, prepared.settings.telemetry == "private"
    brought = [units.most] if private else [min(len(members), units.most) for members in units.members]
    each = sum(brought) / len(brought)  # how many records units have is private: then it is the most
    found = estimate(prepared.base, prepared.schedule, prepared.settings.rows, each)
    figures = {"estimated_memory_gib": found.memory / 2**30, "estimated_minutes": found.seconds / 60}
    follows = "shapes" if private or prepared.units.kind == RECORD else "shapes and the private records of each unit"
    about = f"rough projections from {follows}, before any weight is read; the time may be several times longer"
    return {**{name: float(f"{value:.2g}") for name, value in figures.items()}, "estimates_are": about}


def _show_result(tuned: Tuned, prepared: PreparedRun, as_json: bool) -> None:
    from dptune.cli.figures import of_ledger
    from dptune.privacy.run_folder import RunFolder

    adapter, model = RunFolder(tuned.folder).adapter, prepared.base.name
    said: dict[str, float] = {}
    for name, (before, after) in tuned.perplexity.items():
        whose = name.split()[0].replace("-", "_")
        said |= {f"perplexity_before_{whose}": before, f"perplexity_after_{whose}": after}
    show(of_ledger(tuned.ledger) | said | {"adapter": str(adapter)}, as_json)
    if as_json:
        return
    if any("held" in name for name in tuned.perplexity):
        typer.echo(
            "Perplexity of held-out records is a statistic of private records, which the guarantee does not cover; "
            "--telemetry private leaves it out."
        )
    typer.echo(f'Load it: PeftModel.from_pretrained(base, "{adapter}"), with {model} as its base.')
    typer.echo(f"Check it: dptune verify {adapter}")
    noise = f"{prepared.mechanism.mechanism.knobs().noise_multiplier:.6g}"
    typer.echo(f"Attack its mechanism: dptune audit {prepared.settings.mechanism} --set noise_multiplier={noise}")


def _where(out: Path) -> str:
    """A sentence on how far an interrupted run came, and how to resume it."""
    import json

    from dptune.privacy.ledger_file import LedgerError, read_ledger
    from dptune.privacy.run_folder import RunFolder

    folder = RunFolder(out)
    try:
        steps = json.loads(folder.cell.read_text(encoding="utf-8"))["steps"]
        return f"at release {read_ledger(folder.ledger).releases} of {steps}; run again to go on"
    except (OSError, ValueError, KeyError, LedgerError):
        return "before the first release; nothing was charged"
