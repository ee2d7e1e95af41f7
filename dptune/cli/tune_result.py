"""Result of ``dptune tune`` as people read it: epsilons with a word on each, scores, and how to attack it.

A search (``--search``) begins and ends here too.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from dptune.cli.console import by_option, check_command, notice, set_up_logs, show
from dptune.core.digits import at_most
from dptune.core.errors import ConfigError
from dptune.core.metric import CHANGES

if TYPE_CHECKING:
    from dptune.job.base_model import Base
    from dptune.job.preparation import PreparedRun
    from dptune.job.run import Tuned
    from dptune.job.search.settings import SearchSettings
    from dptune.job.settings import TuneSettings
    from dptune.privacy.certificate import SearchCertificate
    from dptune.privacy.ledger_file import LedgerContents
    from dptune.privacy.spent_budgets.register import Register
    from dptune.records.reading.source import RecordSource

_PRINTED = 6


def delivered(folder: Path) -> dict[str, str]:
    """The row that names the folder of the trained weights: an adapter, or a model's own weights."""
    from dptune.job.delivery.weights import LORA, form_within

    return {"adapter" if form_within(folder) in (None, LORA) else "weights": str(folder)}


def with_glosses(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of a ledger, with what the card says of each epsilon beside it."""
    from dptune.job.delivery.privacy_section import GLOSSES, NOT_MEASURED

    found: dict[str, Any] = {}
    for name, value in figures.items():
        found[name] = f"{at_most(value, _PRINTED)} ({GLOSSES[name]})" if name in GLOSSES else value
        if name == "epsilon_certified":
            found["epsilon_audited"] = NOT_MEASURED
    return found


def figures_of(tuned: Tuned) -> dict[str, float]:
    """Perplexities and scores before and after by name, for their owner; ``scores_of`` has fewer, for people."""
    found: dict[str, float] = {}
    for name, (before, after) in tuned.perplexity.items():
        whose = name.split()[0].replace("-", "_")
        found |= {f"perplexity_before_{whose}": before, f"perplexity_after_{whose}": after}
    for name, scores in tuned.scores.items():
        whose = name.split()[0].replace("-", "_")
        for score, (before, after) in scores.items():
            found |= {f"{score}_before_{whose}": before, f"{score}_after_{whose}": after}
    return found


def where_figures_stay(tuned: Tuned) -> Iterator[str]:
    """A sentence for the owner where figures of held-out private records were shown."""
    from dptune.job.result import HELD_OUT
    from dptune.privacy.run_folder import RunFolder

    if HELD_OUT in {**tuned.perplexity, **tuned.scores}:
        folder, measure = RunFolder(tuned.folder), "Accuracy" if tuned.scores else "Perplexity"
        yield (
            f"{measure} of held-out records is a statistic of private records, which the guarantee does not cover: it "
            f"stays in {folder.result}, and {folder.adapter} does not show it."
        )


def what_counts(contents: LedgerContents) -> str:
    """A sentence on the guarantee of a run."""
    header = contents.header
    unit = "record" if header.unit == "record" else f"unit `{header.unit}` with all its records"
    price = f"{at_most(contents.epsilons.certified, _PRINTED)} at delta {at_most(header.delta)}"
    return f"epsilon_certified is the one that counts: {price}, for adding or removing one {unit}."


def scores_of(tuned: Tuned, prepared: PreparedRun) -> tuple[dict[str, float], list[str]]:
    """A classifier's scores before and after by name, and what is to be said of them."""
    told, said = dict[str, float](), list[str]()
    changes = {metric.name for metric in CHANGES}
    for name, scores in tuned.scores.items():
        whose = name.split()[0].replace("-", "_")
        records = prepared.counts["public" if whose == "public" else "eval"]
        before, after = (
            printed_scores({score: pair[place] for score, pair in scores.items()}, records) for place in (0, 1)
        )
        for score, value in after.items():
            told |= {f"{score}_before_{whose}": before[score]} if score in changes else {}
            told[f"{score}_after_{whose}" if score in changes else f"{score}_{whose}"] = value
        untuned, tuned_scores = ({score: pair[place] for score, pair in scores.items()} for place in (0, 1))
        sentence = comparison(tuned_scores, records, untuned)
        said.append(f"{name[0].upper()}{name[1:]}: {sentence[0].lower()}{sentence[1:]}")
    return told, said


def gains(tuned: Tuned) -> Iterator[str]:
    """A sentence for each side on whether its perplexity is better than before training."""
    for name, (before, after) in tuned.perplexity.items():
        if after < before:
            yield f"Better than no tuning: perplexity of {name} is {after:.4g}, and was {before:.4g}."
        else:
            yield (
                f"No better than the base model: perplexity of {name} was {before:.4g}, and is {after:.4g}. Less noise "
                "in each step (more units, a larger batch, a larger epsilon) or a smaller learning rate may help; "
                "`dptune suggest` tries rates on public records at no cost. Another run on these records adds its own "
                "epsilon."
            )


def about_bands(tuned: Tuned, prepared: PreparedRun) -> Iterator[str]:
    """What became of correlated noise where it is not what the ledger's figures let expect."""
    mechanism = prepared.mechanism.mechanism
    if mechanism.noise.correlated is not None and mechanism.bands == 1:
        yield "With one band this is ordinary, independent noise."
    if tuned.restarts:
        times = "once" if tuned.restarts == 1 else f"{tuned.restarts} times"
        yield (
            f"Correlated noise began anew {times}, where the run had been stopped: as private, but less of it "
            "cancelled than noise_in_recent_sum_at_one_multiplier says."
        )


def attack_of(tuned: Tuned, prepared: PreparedRun) -> Iterator[str]:
    """How to measure ``epsilon_audited``: the command that attacks one step, and what its figures are about."""
    from dptune.mechanisms.registry import plugin_modules

    built, schedule = prepared.mechanism.mechanism, prepared.schedule
    plain = {name: value for name, value in prepared.settings.options.items() if isinstance(value, str | int | float)}
    options = plain | {"noise_multiplier": at_most(built.knobs().noise_multiplier, _PRINTED)}
    if built.noise.correlated is not None:
        options["bands"] = built.bands
    given = " ".join(f"--set {name}={value}" for name, value in options.items())
    plugins = "".join(f"--plugin {module} " for module in plugin_modules(prepared.settings.mechanism, {}))
    delta = f"--delta {tuned.ledger.header.delta:g}"
    if prepared.settings.audit_canaries:
        yield f"Attack this run: dptune audit-run {tuned.folder}"
    else:
        yield "To attack a whole run, tune one with --audit-canaries 256, and give its folder to dptune audit-run."
    yield f"Attack one step: dptune {plugins}audit {prepared.settings.mechanism} {given} {delta}"
    steps, rate = -(-schedule.steps // built.bands), schedule.sample_rate * built.bands
    yield (
        "That prices a single step whose batch holds the sample for certain, where a wrong noise shows best: not the "
        f"epsilons above. With --whole-run --steps {steps} --sample-rate {rate:.6g} it prices and attacks whole runs."
    )


# A classifier's scores as commands print them: what a constant answer would have, and whether this one is better.


def standard_error(accuracy: float, records: int) -> float:
    """Standard error of an accuracy that was measured on this many records, each right or wrong independently."""
    return math.sqrt(accuracy * (1 - accuracy) / records)


def printed_scores(scores: Mapping[str, float], records: int) -> dict[str, float]:
    """Fields of ``training.evaluation.Scores`` by names that explain themselves, with the accuracy's standard error."""
    found: dict[str, float] = {}
    for name, value in scores.items():
        found["constant_answer_accuracy" if name == "largest_class" else name] = value
        if name == "accuracy":
            found["accuracy_standard_error"] = standard_error(value, records)
    return found


def comparison(scores: Mapping[str, float], records: int, before: Mapping[str, float] | None = None) -> str:
    """Whether an accuracy is better than a constant answer, and than no tuning, and whether the loss became worse.

    Better means by more than a standard error of the accuracy.

    Args:
        before: scores of the same records before tuning; None where they were not taken.

    >>> scores = {"accuracy": 0.75, "largest_class": 0.5}
    >>> comparison(scores, 300, before={"accuracy": 0.48}).partition(":")[0]
    'Better than a constant answer, and than no tuning'
    """
    accuracy, constant = scores["accuracy"], scores["largest_class"]
    error = standard_error(accuracy, records)
    beats = accuracy > constant + error
    head, figures, unsure = f"{'Better' if beats else 'No better'} than a constant answer", "", ""
    if before is not None:
        untuned = before["accuracy"]
        over_untuned = accuracy > untuned + error
        joined = "than" if beats and over_untuned else "better than" if over_untuned else "no better than"
        head += f", {'but' if over_untuned and not beats else 'and'} {joined} no tuning"
        figures = f", and the model before tuning had {untuned:.4g}"
        if "loss" in before and scores["loss"] > before["loss"]:
            losses = f"{scores['loss']:.4g} after {before['loss']:.4g}"
            unsure = f" But its loss rose, {losses}: do not trust its probabilities."
    return (
        f"{head}: accuracy {accuracy:.4g} with a standard error of {error:.2g} on {records} records; always saying the "
        f"most frequent label has {constant:.4g}{figures}.{unsure}"
    )


# ``dptune tune --search``: the best of a random number of candidates, with one guarantee for the whole search.


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
    show(of_certificate(tuned.certificate) | delivered(adapter), as_json)
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
    show(told | delivered(tuned.folder / "adapter"), as_json)
    if not as_json:
        for sentence in (what_counts(tuned.ledger), *where_figures_stay(tuned)):
            typer.echo(sentence)
        typer.echo(check_command(tuned.folder / "adapter"))
