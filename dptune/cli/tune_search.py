"""``dptune tune --search``: the best of a random number of candidates, with one guarantee for the whole search."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from dptune.cli.console import notice, show
from dptune.cli.tune_messages import by_option, check_command, set_up_logs
from dptune.core.errors import ConfigError

if TYPE_CHECKING:
    from dptune.job.base_model import Base
    from dptune.job.search.settings import SearchSettings
    from dptune.job.settings import TuneSettings
    from dptune.privacy.certificate import SearchCertificate
    from dptune.privacy.spent_budgets.register import Register
    from dptune.records.reading.source import RecordSource


def search_of_options(
    path: Path | None, candidates: float | None, shape: float | None, again: bool
) -> SearchSettings | None:
    """The search that is asked for; None without one. Raises: ConfigError."""
    if path is None:
        for option, value in (("--candidates", candidates), ("--shape", shape), ("--again", again or None)):
            if value is not None:
                raise ConfigError(option, "is about a search", fix="give --search, or leave it out")
        return None
    from dptune.job.search.settings import SearchSettings

    return SearchSettings.of(path, candidates=candidates, shape=shape, again=again or None)


def tune_by_search(
    model: str,
    revision: str | None,
    described: RecordSource,
    given: dict[str, Any],
    asked: SearchSettings,
    out: Path,
    register: Path | None,
    dry: bool,
    as_json: bool,
) -> None:
    """Run a search, or with ``dry`` say what it would promise. Raises: DptuneError as ``search``."""
    from dptune.job.path_checks import check_data, check_folder, check_model
    from dptune.job.settings import TuneSettings

    settings = TuneSettings.of(**given)
    settings.check_search()
    check_model(model, revision)
    check_folder(out, "run" if asked.score.on == "rehearsal" else "search")
    check_data(described)
    set_up_logs()
    from dptune.cli.figures import of_certificate
    from dptune.job.base_model import open_base
    from dptune.job.preparation import with_labels
    from dptune.job.search.search import id_of, planned_certificate, prepare_search, search
    from dptune.privacy.spent_budgets.register import Register

    settings, described = with_labels(settings, described)
    base = open_base(model, settings, revision)
    if not dry:
        base.check_memory()
    book = Register.beside(out, register)
    if asked.score.on == "rehearsal":
        _tune_rehearsed(described, base, settings, asked, out, book, dry, as_json)
        return
    prepared = prepare_search(described, base, settings, asked)
    for note in prepared.notes:
        notice("warning", by_option(note))
    for warning in book.warnings(prepared.fingerprint, id_of(out), again=asked.again):
        notice("warning", warning)
    if dry:
        show(of_certificate(planned_certificate(prepared, asked)), as_json)
        return

    def start(certificate: SearchCertificate) -> None:
        if not as_json:
            show(of_certificate(certificate), as_json)
            notice("searching", "the number of candidates is secret, so no progress is shown")

    tuned = search(prepared, asked, out, book, start)
    assert tuned.certificate is not None
    adapter = tuned.folder / "adapter"
    show(of_certificate(tuned.certificate) | {"adapter": str(adapter)}, as_json)
    if not as_json:
        typer.echo(check_command(adapter))
        typer.echo(f"What these records have paid: dptune spent {shlex.quote(str(book.path))}")


def _tune_rehearsed(
    described: RecordSource,
    base: Base,
    settings: TuneSettings,
    asked: SearchSettings,
    out: Path,
    book: Register,
    dry: bool,
    as_json: bool,
) -> None:
    """Rehearse on public records, and train the chosen settings once on the private ones."""
    from dptune.cli.figures import of_ledger
    from dptune.cli.tune_result import figures_of, what_counts, where_figures_stay, with_glosses
    from dptune.job.preparation import prepare
    from dptune.job.run import paid_before, run_here, working_in
    from dptune.job.search.rehearsal import rehearsed

    first = prepare(described, base, settings)
    for note in (*first.notes, *paid_before(book, first, out)):
        notice("warning", by_option(note))

    def said(configuration: dict[str, Any], perplexity: float) -> None:
        named = ", ".join(
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in configuration.items()
        )
        if not as_json:
            typer.echo(f"rehearsed on public records: {named}: perplexity {perplexity:.4g}")

    if dry:
        found = rehearsed(described, base, settings, asked, len(first.units), out, said, keep=False)
        show({"chosen": min(found.tried, key=lambda one: one[1])[0]}, as_json)
        return
    with working_in(out):  # of two commands at once, the later rehearsal would replace that of the earlier's run
        found = rehearsed(described, base, settings, asked, len(first.units), out, said)
        tuned = run_here(prepare(described, base, found.settings), out, book)
    told = of_ledger(tuned.ledger)
    told = (told if as_json else with_glosses(told)) | figures_of(tuned)
    show(told | {"adapter": str(tuned.folder / "adapter")}, as_json)
    if not as_json:
        for sentence in (what_counts(tuned.ledger), *where_figures_stay(tuned)):
            typer.echo(sentence)
        typer.echo(check_command(tuned.folder / "adapter"))
