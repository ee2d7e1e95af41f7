"""Commands on ledgers: ``dptune verify`` computes what a run or a search has spent; ``dptune spent`` adds up what was
published; ``dptune set-aside`` puts away a run that cannot go on; ``dptune export`` describes a guarantee."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dptune.cli.console import notice, show
from dptune.cli.options import AsJson
from dptune.core.digits import at_most
from dptune.core.errors import ConfigError, DptuneError
from dptune.core.files import sha256

if TYPE_CHECKING:
    from dptune.privacy.certificate import SearchCertificate
    from dptune.privacy.ledger_file import LedgerContents

#: What the parts of a total are called; a study has a line for all of its cells.
_PARTS = {"search": "searches", "run": "runs", "cell": "cells of study {}", "answers": "ensembles that answer"}


def verify(
    ledger: Annotated[
        Path, typer.Argument(help="A ledger.jsonl, a certificate.jsonl, or a folder that holds one of them.")
    ],
    no_guarantee: Annotated[
        bool, typer.Option("--no-guarantee", help="Exit with status 0 even if no epsilon is certified.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Recompute every epsilon of a run from its ledger; refuse a ledger or card that was cut off or edited.

    Status 0: everything that was compared agrees, and an epsilon is certified. Status 1: it agrees, but no epsilon is
    certified. Status 2: the ledger or folder is refused.
    """
    from dptune.cli.figures import of_certificate, of_ledger, of_winner
    from dptune.job.delivery.deliverable import audits
    from dptune.job.delivery.verification import CARD, check_deliverable, consistent_certificate, deliverable_within
    from dptune.job.delivery.weights import check_weights
    from dptune.privacy.certificate import FILE, read_certificate
    from dptune.privacy.ledger_file import read_ledger
    from dptune.privacy.run_folder import RunFolder

    folder = deliverable_within(ledger) if ledger.is_dir() else None
    file = RunFolder(ledger).ledger if ledger.is_dir() else ledger
    if folder is None and ledger.is_dir() and not file.exists() and (ledger / FILE).is_file():
        file = ledger / FILE
    compared = {"weights_compared": folder is not None} if as_json else {}  # in text it is said in sentences
    if as_json and folder is not None and audits(folder / CARD):
        compared["audit_compared"] = False
    if folder is None and file.name == FILE:
        found = consistent_certificate(file)
        if ledger.is_dir() and found.winner is not None:  # else any weights could lie beside it
            problem = f"{ledger}: its certificate names a winner, and the winner's ledger is missing"
            raise DptuneError(f"{problem}. Fix: take the whole folder that the search delivered.")
        # A search that does not keep its budget was refused.
        _show_search(found, as_json, of_certificate(found) | compared)
        if not as_json:
            _say_alone(file)
        _end(found.certified, found.all_leaks, no_guarantee=no_guarantee)
        return
    contents = read_ledger(file) if folder is None else check_deliverable(folder)
    own = folder is None and file == RunFolder(file.parent).ledger and check_weights(file.parent, contents)
    compared |= {"weights_compared": True} if as_json and own else {}
    certified, leaks, searched = contents.epsilons.certified, contents.epsilons.leaks, False
    if folder is not None and (folder / FILE).is_file():  # checked against ledger and weights with the card
        certificate = read_certificate(folder / FILE)
        certified, leaks, searched = certificate.certified, certificate.all_leaks, True
        _show_search(certificate, as_json, of_winner(contents, certificate) | compared)
    else:
        show(of_ledger(contents) | compared, as_json)
    if not as_json:
        _say(contents, None if folder is None else folder / CARD, searched=searched)
        if own:
            _say_own(file.parent)
        elif folder is None:
            _say_alone(file)
    _end(certified, leaks, no_guarantee=no_guarantee)


def _say_own(run: Path) -> None:
    """Say what of a study's run was compared, and what that proves."""
    from dptune.job.delivery.weights import weights_file
    from dptune.privacy.run_folder import RunFolder

    weights, result = weights_file(RunFolder(run).adapter), RunFolder(run).result
    typer.echo(
        f"Compared: {weights} with the SHA-256 in {result}, and the mechanism, budget, units, number of releases, "
        f"noise-only and certified epsilon in {result.name} with the ledger. All agree (of the two epsilons, the "
        "ledger proves what is said, or up to 5 % less): none of the three was replaced alone. Its other figures, and "
        f"other files of the run, were not compared. {result.name} is not signed: a change of two of them, or the "
        "ledger of another run with the same settings, may go unnoticed."
    )


def _say_alone(file: Path) -> None:
    """Say that no weights were looked at."""
    others = sorted(one.name for one in file.parent.iterdir() if one.name != file.name and not one.name.startswith("."))
    beside = f": not {', '.join(others)}, which lies beside it" if len(others) == 1 else ""
    beside = f": nothing of the {len(others)} files and folders beside it" if len(others) > 1 else beside
    typer.echo(f"Only {file} was read{beside}. It proves what a run may cost, and binds no weights.")


def _end(certified: float, leaks: Sequence[str], *, no_guarantee: bool) -> None:
    """Say last that no epsilon is certified, if none is; the command then ends with status 1, unless it was asked."""
    from dptune.job.delivery.privacy_section import NO_GUARANTEE, has_guarantee, why_not

    if has_guarantee(certified):
        return
    fix = "treat what it made like the records themselves, or give --no-guarantee for status 0"
    typer.echo(f"{NO_GUARANTEE}: no epsilon is certified ({why_not(leaks)}). Fix: {fix}.", err=True)
    if not no_guarantee:
        raise typer.Exit(1)


def _say(contents: LedgerContents, card: Path | None, *, searched: bool) -> None:
    """Print what was compared, and what the figures are about."""
    from dptune.job.delivery.deliverable import audit_note
    from dptune.job.delivery.privacy_section import covered, has_guarantee
    from dptune.job.delivery.verification import beside, compared, linked
    from dptune.job.delivery.weights import NO_DIGEST, read_base
    from dptune.prediction.protocols import PROTOCOLS
    from dptune.privacy.run_folder import RunFolder

    if card is not None:
        files = ", ".join(compared(card.parent))
        typer.echo(
            f'Compared: the section "Privacy" of {card} with the ledger and the SHA-256 of {files}; and the tag of the '
            "card with the certified epsilon. All agree. Other sections were not compared."
        )
        if note := audit_note(card.parent, sha256(RunFolder(card.parent).ledger)):
            typer.echo(note)
        if others := beside(card.parent):
            typer.echo(f"Not compared, and read by nothing: {', '.join(others)}.")
        if links := linked(card.parent):
            typer.echo(f"Links, whose targets were compared: {', '.join(links)}. Hand on the files themselves.")
        base = read_base(card.parent)
        typer.echo(f"Base model: {NO_DIGEST if base is None else base.row}.")
        typer.echo(
            "Anyone who can write the whole folder can make its files agree. SHA-256 of this card, to compare with "
            f"what its maker says: {sha256(card)}"
        )
    if not contents.complete:
        typer.echo("The run is not finished: these are the epsilons so far, not the epsilons of the planned run.")
    for plugin in contents.header.plugins if not searched else ():
        typer.echo(f"Made with plug-in {plugin}: the epsilons hold if that code does what it says.")
    header = contents.header
    if searched:
        return
    _say_dealt_by_rank(contents.epsilons.leaks)
    if has_guarantee(contents.epsilons.certified) and header.telemetry:
        subject = "the answers" if header.mechanism in PROTOCOLS else "the trained weights"
        typer.echo(f"telemetry: {header.telemetry}. {covered(header.telemetry, subject)}")


def _show_search(certificate: SearchCertificate, as_json: bool, figures: dict[str, Any]) -> None:
    """Print what a search costs, and what its certificate cannot show."""
    show(figures, as_json)
    if as_json:
        return
    law, price = certificate.law, f"({at_most(certificate.certified, 6)}, {at_most(certificate.delta)})"
    typer.echo(
        f"The search is {price}-DP under adding or removing one {certificate.unit}: it takes the best of a random "
        f"number of candidates, {law.uncapped_mean:g} on average and at most {law.most}, and that choice is paid for."
    )
    _say_dealt_by_rank(certificate.all_leaks)
    typer.echo("epsilon_published is inf: the mechanisms' papers count no search.")
    if not certificate.complete:
        typer.echo("The search is not finished: its whole cost counts already.")
    elif certificate.winner is None:
        typer.echo("Every candidate failed: the base model is the result.")
    for plugin in certificate.plugins:
        typer.echo(f"Searched with plug-in {plugin}: the epsilons hold if that code does what it says.")
    typer.echo(
        "The guarantee is about someone who sees only the winner, and holds only if no record can crash a run. A "
        "certificate cannot show whether the number of candidates was drawn honestly, losers were read, or other "
        "searches were made."
    )


def _say_dealt_by_rank(leaks: Sequence[str]) -> None:
    """Say of a run or search of an earlier version that its number is another promise than its card says."""
    from dptune.privacy.release import DEALT_BY_RANK

    if DEALT_BY_RANK in leaks:
        typer.echo(f"Not certified: {DEALT_BY_RANK}. A card of that version calls this number certified.")


def spent(
    register: Annotated[Path, typer.Argument(help="A spent.jsonl file.")] = Path("spent.jsonl"),
    restore: Annotated[
        bool, typer.Option("--restore", help="Add finished runs that lie beside the register but are missing from it.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Add up the published epsilons in a register, for each set of records and each unit; name runs it lacks."""
    from dptune.privacy.spent_budgets.booking import MOST
    from dptune.privacy.spent_budgets.register import IN_A_SHARD, SHARD, Register
    from dptune.privacy.spent_budgets.register_file import unnumbered

    book = Register(register)
    faults = book.faults() if register.is_file() or not register.exists() else []  # a register that was removed is one
    if not register.is_file() and (register.exists() or not faults):
        fix = "give the spent.jsonl beside the folders of runs, or the pipeline's data/spent.jsonl"
        problem = "is not a register" if register.exists() else "does not exist"
        raise ConfigError(str(register), problem, fix=fix)
    if restore and (names := book.restore()):
        notice("restored", f"{register} names {', '.join(names)} again")
        faults = book.faults()
    for fault in faults:
        notice("warning", fault)
    totals, whole = book.totals(), book.of_all_units()
    note = (
        "Epsilons and deltas add up (basic composition). Records that were edited in between, or read by another "
        "template or column, count as other records: their epsilons add to these where they hold the same "
        "people. An ensemble that answers counts with its whole budget. A ledger beside the register counts too "
        "if no line names it, "
        "such as the ledger of a cell that has not ended; a folder that was removed, lies elsewhere, more than two "
        f"levels deep or beyond the first {MOST:,} is not seen. A run's or an ensemble's folder that was copied "
        "half-way and finished twice has one id and counts once: add the copy by hand."
    )
    if older := unnumbered(register):
        note += f" {older} lines have no number: an earlier version wrote them, and only their checksums hold them "
        note += "together."
    if any(total.unit.endswith(IN_A_SHARD) for total in whole):
        note += (
            f" An ensemble whose unit is a {SHARD} is not in the line of records, or of another unit, although each "
        )
        note += f"record lies in a shard: the line of one of each{IN_A_SHARD} counts them all."
    if others := book.others:
        note += f" What {' and '.join(map(str, others))} counts of the same records comes on top: each register has a "
        note += "key of its own, so no command adds up two registers."
    if as_json:
        listed = {"totals": [asdict(total) for total in totals], "all_units": [asdict(total) for total in whole]}
        show(listed | {"faults": faults, "note": note}, as_json)
        return
    for total in (*totals, *whole):
        whole_of = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(total).items()}
        whole_of = {name: value for name, value in whole_of.items() if name not in ("records", "parts") and value != []}
        parts = {_PARTS.get(part.what, part.what).format(part.study): str(part) for part in total.parts}
        show(whole_of | parts, as_json)
    typer.echo(note)


def set_aside(
    folder: Annotated[Path, typer.Argument(help="Folder of the run, such as data/runs/<run>.")],
) -> None:
    """Move a run that cannot continue out of the way of a new one, with its ledger; print what it has spent."""
    from dptune.privacy.run_folder import said_within
    from dptune.privacy.run_folder import set_aside as keep

    # The path is not resolved: renaming a link itself keeps the run among those that the report counts.
    target, spent = keep(folder.absolute())
    within = said_within(target)
    if spent is None and not within:
        typer.echo(f"It lies in {target} now; nothing was charged to it: it costs nothing, and may be removed.")
        return
    own = "nothing was charged to its own run" if spent is None else str(spent)
    counted = "The next run on the same records adds to that; the report counts both where they lie in data/runs."
    typer.echo(f"It lies in {target} now; {own}{within}. {counted}")


# ``dptune export``: a run's guarantee by the components of NIST SP 800-226, or as an entry of the public registry.


class Format(StrEnum):
    """Forms of an export."""

    nist = "nist"
    registry = "registry"


def export(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run or of its adapter, or a ledger.jsonl.")],
    form: Annotated[
        Format, typer.Option("--format", help="An evaluation by NIST SP 800-226, or an entry for the registry.")
    ] = Format.nist,
    out: Annotated[Path | None, typer.Option(help="File to write (default: print it).")] = None,
) -> None:
    """Describe a finished run's guarantee for readers outside: Markdown (nist), or YAML in its JSON form (registry).

    Everything follows from ledger and header, so nothing of it is a figure of private records. Places that only you
    can fill are marked TO FILL IN. A delivered folder is verified first.
    """
    import json

    from dptune.core.errors import ConfigError
    from dptune.core.files import sha256, write_text
    from dptune.job.delivery.exports import Exported
    from dptune.job.delivery.verification import LABELS, certificate_of, check_deliverable, deliverable_within
    from dptune.privacy.ledger_file import read_ledger
    from dptune.privacy.run_folder import RunFolder

    folder = deliverable_within(run) if run.is_dir() else None
    ledger = RunFolder(folder or run).ledger if run.is_dir() else run
    if not ledger.is_file():
        fix = "give the folder of a finished run, or its ledger.jsonl"
        raise ConfigError("run", f"{ledger} does not exist", fix=fix)
    contents = read_ledger(ledger) if folder is None else check_deliverable(folder)
    certificate = None if folder is None else certificate_of(folder)
    classifies = folder is not None and (folder / LABELS).is_file()
    found = Exported(contents, certificate, sha256(ledger), classifies)
    text = found.nist() if form is Format.nist else json.dumps(found.registry(), indent=2, ensure_ascii=False) + "\n"
    if out is None:
        typer.echo(text, nl=False)
    else:
        write_text(out, text)
        typer.echo(f"Wrote {out}. Fill in what is marked TO FILL IN.")
