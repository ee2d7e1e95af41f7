"""``dptune tune``: takes a user's records, a model and a budget; makes an adapter with its proof."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dptune.cli.console import by_option, check_command, notice, set_up_logs, show
from dptune.cli.options import (
    AsJson,
    Candidates,
    Completion,
    Messages,
    Model,
    Prompt,
    Revision,
    Shape,
    Template,
    Text,
    takes_settings,
)
from dptune.cli.tune_result import search_of_options, tune_by_search
from dptune.core.declarations import assignments
from dptune.core.errors import ConfigError, FullDeviceError, is_out_of_memory
from dptune.core.files import read_json
from dptune.core.interrupts import ends_like_ctrl_c
from dptune.core.settings import RECORD
from dptune.job.settings import TuneSettings
from dptune.records.reading.formats import ENDINGS, Format
from dptune.records.reading.source import RecordsAre, RecordSource

if TYPE_CHECKING:
    from dptune.job.preparation import PreparedRun
    from dptune.job.run import Tuned

_INTERRUPTED = 130
#: The most characters of a record that the plan shows.
_SHOWN = 200


@takes_settings()
@ends_like_ctrl_c()
def tune(
    model: Model,
    data: Annotated[Path | None, typer.Option(help=f"Records: {', '.join(ENDINGS)}, or a saved data set.")] = None,
    source: Annotated[str | None, typer.Option(help="In place of --data: a benchmark, or a plug-in's source.")] = None,
    source_options: Annotated[
        list[str] | None, typer.Option("--source-set", help="Argument of --source, as KEY=VALUE; repeatable.")
    ] = None,
    unit: Annotated[str | None, typer.Option(help="Column whose values are protected as a whole.")] = None,
    own_id: Annotated[
        str | None,
        typer.Option("--id", help="Column of the records' own ids, which must differ; it is not read as text."),
    ] = None,
    text: Text = None,
    prompt: Prompt = None,
    completion: Completion = None,
    messages: Messages = None,
    template: Template = None,
    label: Annotated[str | None, typer.Option(help="Column of labels (default: label).")] = None,
    file_format: Annotated[
        Format | None,
        typer.Option("--format", help="Format of the file (default: by the file's ending)."),
    ] = None,
    records_are: Annotated[
        RecordsAre | None, typer.Option(help="Records of a text file: its lines, or its paragraphs.")
    ] = None,
    public: Annotated[
        Path | None, typer.Option(help="Public records, read in the same way; no epsilon covers them.")
    ] = None,
    *,
    settings: dict[str, Any],
    out: Annotated[Path, typer.Option(help="Folder of the run; the same command resumes it.")] = Path("tuned"),
    revision: Revision = None,
    search: Annotated[
        Path | None,
        typer.Option(help="YAML file with a space of settings; only the best candidate is released."),
    ] = None,
    candidates: Candidates = None,
    shape: Shape = None,
    again: Annotated[
        bool, typer.Option("--again", help="Search records that already spent budget; the costs add up.")
    ] = False,
    register: Annotated[
        Path | None, typer.Option(help="Register of spent budgets (default: spent.jsonl beside --out).")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and print the memory and time that the run would take.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Fine-tune a model on records of your own with differential privacy; the adapter comes with its proof."""
    columns = {
        "id": own_id,
        "format": file_format,
        "records_are": records_are,
        "text": text,
        "prompt": prompt,
        "completion": completion,
        "messages": messages,
        "template": template,
        "label": label,
        "public": None if public is None else str(public),
    }
    searches = again or (search, candidates, shape) != (None, None, None)
    try:
        records, name = records_of_options(data, source, source_options, unit, columns)
        chosen = settings | ({"called": name} if settings["called"] == TuneSettings.called else {})
        asked = search_of_options(search, candidates, shape, again) if searches else None
        if asked is not None:
            tune_by_search(model, revision, records, chosen, asked, out, register, dry_run, as_json)
        else:
            _tune(model, revision, records, chosen, out, register, dry_run, as_json)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise FullDeviceError from None
    except KeyboardInterrupt:
        notice("stopped", _where(out) if search is None else "run again to go on with the same search")
        raise typer.Exit(_INTERRUPTED) from None


def records_of_options(
    data: Path | None, source: str | None, options: list[str] | None, unit: str | None, columns: dict[str, Any]
) -> tuple[RecordSource, str]:
    """The records that are asked for, and what ledger and card call them. Raises: ConfigError unless one is named."""
    if (data is None) == (source is None):
        problem = "is missing" if data is None else "does not go with --source"
        raise ConfigError("data", problem, fix="give a file, or the source of a plug-in with --source")
    if source is None:
        if options:
            raise ConfigError("--source-set", "is for a plug-in's --source", fix="leave it out")
        return RecordSource(str(data), unit=unit, **columns), "own records"
    found, called = records_of(source, unit, dict(assignments(options or ())))
    return replace(found, **columns), called


def records_of(name: str, unit: str | None, options: Mapping[str, str]) -> tuple[RecordSource, str]:
    """The records of a plug-in's source or of a benchmark, and the label under which the ledger names them.

    Args:
        unit: the column whose values name units; None: every record is one.
        options: the function's arguments, as texts; each becomes what its annotation says.

    Raises: ConfigError for an unknown source, one of dptune's own, an unknown unit, or arguments that the function does
        not take.
    """
    from dptune.mechanisms.options import convert
    from dptune.records.catalogue import SourceSettings, find_source, label_of, plugin_sources

    found = find_source(name)
    if found.rows is None:
        fix = f"use one of {', '.join(plugin_sources())}, or name your own module: dptune --plugin MODULE tune ..."
        problem = f"{name!r} is neither a benchmark nor a plug-in's source"
        raise ConfigError("source", problem, fix=f"{fix}; files are read by data")
    if unit is not None and found.units is not None and unit not in found.units:
        problem = f"source {name} yields texts, which have no column {unit!r}"
        raise ConfigError("data.unit", problem, fix="leave it out, or register the source with rows=True")
    kinds = {key: kind if (kind := found.kinds.get(key)) in (bool, int, float) else str for key in options}
    # A separator may be made of white space, and a number is not.
    texts = {key: value if kinds[key] is str else value.strip() for key, value in options.items()}
    values = {key: convert(f"source.{key}", text, kinds[key]) for key, text in texts.items()}
    settings = SourceSettings(unit=unit or RECORD, options=values)
    found.check(settings)
    return found.rows(settings), label_of(name, values)


def _tune(
    model: str,
    revision: str | None,
    described: RecordSource,
    given: dict[str, Any],
    out: Path,
    register: Path | None,
    dry: bool,
    as_json: bool,
) -> None:
    from dptune.job.path_checks import check_data, check_folder, check_model

    settings = TuneSettings.of(**given)
    check_model(model, revision)
    check_folder(out)
    check_data(described)
    set_up_logs()
    from dptune.job.base_model import open_base
    from dptune.job.preparation import check_mechanism, prepare, with_labels
    from dptune.job.run import paid_before, run
    from dptune.privacy.spent_budgets.register import Register

    settings, described = with_labels(settings, described)
    base = open_base(model, settings, revision)
    if not dry:
        base.check_memory()
    check_mechanism(settings, base)
    prepared = prepare(described, base, settings)
    book = Register.beside(out, register)
    for note in (*prepared.notes, *paid_before(book, prepared, out)):
        notice("warning", by_option(note))
    if settings.audit_canaries and (weak := _power_of_canaries(prepared)):
        notice("warning", weak)
    if dry:
        show(_plan(prepared) | _resources(prepared), as_json)
        for text in prepared.first:
            notice("a record as it is read", repr(text[:_SHOWN] + ("..." if len(text) > _SHOWN else "")))
        return
    tuned = run(prepared, out, book, on_start=lambda: None if as_json else show(_plan(prepared), as_json))
    _show_result(tuned, prepared, as_json)


def _power_of_canaries(prepared: PreparedRun) -> str:
    """A sentence if the run's coins will not be able to refute its budget; empty if they can."""
    from dptune.audit.refutation import coins_too_few, run_certificate
    from dptune.audit.whole_run import CHECKS, FALSE_ALARMS
    from dptune.mechanisms.planning import planned

    releases = planned(prepared.mechanism.mechanism, prepared.schedule.priced)
    certificate, planted = run_certificate(prepared.header, releases), prepared.settings.audit_canaries
    found = coins_too_few(planted, certificate, 1 - FALSE_ALARMS / CHECKS)
    return f"{found}. Its noise and its draw are tested all the same." if found else ""


def _plan(prepared: PreparedRun) -> dict[str, Any]:
    """The run's settings, with the reason for each one that the user left open."""
    from dptune.job.delivery.settings_rows import public_settings
    from dptune.records.reading.fields import WAYS

    settings, chosen, units = prepared.settings, prepared.schedule, prepared.units
    mechanism = prepared.mechanism.mechanism
    knobs = mechanism.knobs()
    records = prepared.counts if settings.telemetry == "research" else {"public": prepared.counts["public"]}
    shown: dict[str, float] = {}
    if settings.audit_canaries:
        from dptune.audit.whole_run import most_shown  # runs without canaries need no audit

        shown["canaries_can_show_at_most"] = most_shown(settings.audit_canaries, chosen.delta)
    return {
        "model": prepared.base.name,
        **{f"records_{side}": count for side, count in records.items() if count},
        **({"texts_are": WAYS[prepared.way]} if prepared.way else {}),
        "units": len(units),
        "unit": units.kind,
        "epsilon": settings.epsilon,
        "delta": chosen.delta,
        "noise_multiplier": mechanism.effective_noise_multiplier(knobs),
        "sample_rate": chosen.sample_rate,
        **{name.replace(" ", "_").lower(): value for name, value in public_settings(prepared).items()},
        **shown,
        ("adapter_parameters" if settings.train == "lora" else "trained_parameters"): prepared.base.dimension,
        "telemetry": settings.telemetry,
        "chosen_because": [f"{name}: {reason}" for name, reason in chosen.reasons.items()],
    }


def _resources(prepared: PreparedRun) -> dict[str, Any]:
    from dptune.core.settings import RECORD
    from dptune.job.estimate import estimate, records_by_width

    units, private = prepared.units, prepared.settings.telemetry == "private"
    schedule, rows, bands = prepared.schedule, prepared.plan.physical_batch_size, prepared.mechanism.mechanism.bands
    # How many records units have, and how long they are, is private: then it is the most.
    most = {schedule.max_length: float(units.most)}
    brought = most if private else records_by_width(prepared.tokens, units, schedule, rows)
    again = prepared.settings.gradient_checkpointing
    found = estimate(prepared.base, schedule, rows, brought, checkpointing=again, bands=bands)
    figures = {"estimated_memory_gib": found.memory / 2**30, "estimated_minutes": found.seconds / 60}
    counted = "lengths" if units.kind == RECORD else "lengths and the numbers of records of each unit"
    follows = "shapes" if private else f"shapes and private {counted}"
    about = (
        f"projections from {follows}, before any weight is read; time: this device's present speed at a product of the "
        "model's width and at an elementwise operation, times their numbers in all steps, without evaluations "
        "(small runs on a CPU took 0.9 to 1.3 times as long, in bfloat16 1.7 times)"
    )
    return {**{name: float(f"{value:.2g}") for name, value in figures.items()}, "estimates_are": about}


def _show_result(tuned: Tuned, prepared: PreparedRun, as_json: bool) -> None:
    from dptune.cli.figures import of_ledger
    from dptune.cli.tune_result import (
        about_bands,
        attack_of,
        delivered,
        figures_of,
        gains,
        scores_of,
        what_counts,
        where_figures_stay,
        with_glosses,
    )
    from dptune.privacy.run_folder import RunFolder

    adapter, model = RunFolder(tuned.folder).adapter, prepared.base.name
    said = figures_of(tuned)
    if as_json:
        begun = {"restarts": tuned.restarts} if prepared.mechanism.mechanism.bands > 1 else {}
        show(of_ledger(tuned.ledger) | begun | said | delivered(adapter), as_json)
        return
    classified, noted = scores_of(tuned, prepared)
    show(with_glosses(of_ledger(tuned.ledger)) | (classified or said) | delivered(adapter), as_json)
    about = (*about_bands(tuned, prepared), *noted, *gains(tuned), *where_figures_stay(tuned))
    for sentence in (what_counts(tuned.ledger), *about):
        typer.echo(sentence)
    classifies = prepared.settings.task == "classify"
    as_card = classifies or prepared.settings.train != "lora"
    by = f"as the card in {adapter} has it" if as_card else f'PeftModel.from_pretrained(base, "{adapter}")'
    typer.echo(f"Load it: {by}, with {model} as its base.")
    typer.echo(check_command(adapter))
    for sentence in attack_of(tuned, prepared):
        typer.echo(sentence)


def _where(out: Path) -> str:
    """A sentence on how far an interrupted run came, and how to resume it."""

    from dptune.privacy.ledger_file import LedgerError, read_ledger
    from dptune.privacy.run_folder import RunFolder

    folder = RunFolder(out)
    try:
        steps = read_json(folder.cell)["steps"]
        return f"at release {read_ledger(folder.ledger).releases} of {steps}; run again to go on"
    except (OSError, ValueError, KeyError, LedgerError):
        return "before the first release; nothing was charged"
