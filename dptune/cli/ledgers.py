"""``dptune verify`` computes what a run or a search has spent; ``dptune spent`` adds up what was published; ``dptune
set-aside`` puts away a run that cannot go on."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dptune.cli.console import show
from dptune.cli.options import AsJson
from dptune.digits import at_most
from dptune.errors import ConfigError, DptuneError

if TYPE_CHECKING:
    from dptune.privacy.certificate import SearchCertificate
    from dptune.privacy.ledger_file import LedgerContents

#: What a ledger's certified epsilon is about beside what was trained or answered, and what not, by its telemetry.
_COVERED = {
    "research": ", not the curves and figures of private records that were logged or printed.",
    "private": (
        " and all that was published, not the times at which it was released, which logs, databases and files may keep."
    ),
}

#: What the parts of a total are called; a study has a line for all of its cells.
_PARTS = {"search": "searches", "run": "runs", "cell": "cells of study {}", "answers": "ensembles that answer"}


def verify(
    ledger: Annotated[Path, typer.Argument(help="A ledger.jsonl or certificate.jsonl, or a folder that holds one.")],
    as_json: AsJson = False,
) -> None:
    """Recompute every epsilon of a run from its ledger alone; refuse a ledger, or a card, that was torn or edited."""
    from dptune.cli.figures import of_ledger, of_winner
    from dptune.prediction.protocols import PROTOCOLS
    from dptune.privacy.certificate import FILE, read_certificate
    from dptune.privacy.run_folder import RunFolder
    from dptune.tuning.verifying import consistent_certificate

    alone = ledger / FILE if ledger.is_dir() and not RunFolder(ledger).ledger.exists() else ledger
    if alone.name == FILE and (alone == ledger or alone.is_file()):
        found = consistent_certificate(alone)
        if alone != ledger and found.winner is not None:  # else any weights could lie beside it
            problem = f"{ledger}: its certificate names a winner, and the winner's ledger is missing"
            raise DptuneError(f"{problem}. Fix: take the whole folder that the search delivered.")
        _show_search(found, as_json)
        return
    contents, card = _contents(ledger)
    searched = card is not None and (card.parent / FILE).is_file()
    if searched and card is not None:  # checked against ledger and weights with the card
        certificate = read_certificate(card.parent / FILE)
        _show_search(certificate, as_json, of_winner(contents, certificate))
    else:
        show(of_ledger(contents), as_json)
    if as_json:
        return
    if card is not None:
        typer.echo(f"{card} says what the ledger says, of these very weights, their configuration and the tokenizer.")
    if not contents.complete:
        typer.echo("The run is not finished: these are the epsilons so far, not those of the planned run.")
    for plugin in contents.header.plugins if not searched else ():
        typer.echo(f"Made with plug-in {plugin}: the epsilons hold if that code does what it says.")
    header = contents.header
    if searched:
        return
    if header.telemetry in _COVERED:
        subject = "answers" if header.mechanism in PROTOCOLS else "trained weights"
        typer.echo(f"telemetry: {header.telemetry}. The guarantee covers the {subject}{_COVERED[header.telemetry]}")


def _show_search(certificate: SearchCertificate, as_json: bool, figures: dict[str, Any] | None = None) -> None:
    """Print what a search costs, by default from its certificate alone, and what that cannot show."""
    from dptune.cli.figures import of_certificate

    show(figures or of_certificate(certificate), as_json)
    if as_json:
        return
    law, price = certificate.law, f"({at_most(certificate.certified, 6)}, {at_most(certificate.delta)})"
    typer.echo(
        f"The search is {price}-DP under adding or removing one {certificate.unit}: it takes the best of a random "
        f"number of candidates, {law.uncapped_mean:g} on average and at most {law.most}, and that choice is paid for."
    )
    typer.echo("epsilon_published is inf: the mechanisms' papers count no search.")
    if not certificate.complete:
        typer.echo("The search is not finished: its whole cost counts already.")
    elif certificate.winner is None:
        typer.echo("Every candidate failed: the base model is the result.")
    for plugin in certificate.plugins:
        typer.echo(f"Searched with plug-in {plugin}: the epsilons hold if that code does what it says.")
    typer.echo(
        "The guarantee is for who sees the winner alone, and if no record can crash a run. A certificate cannot show "
        "whether the number of candidates was drawn honestly, losers were read, or other searches were made."
    )


def spent(
    register: Annotated[Path, typer.Argument(help="A spent.jsonl; else that of this folder.")] = Path("spent.jsonl"),
    as_json: AsJson = False,
) -> None:
    """Add up everything that a register says was published, by set of records and unit."""
    from dptune.privacy.spent import IN_A_SHARD, SHARD, Register

    if not register.is_file():
        fix = "give the spent.jsonl beside the folders of runs, or the pipeline's data/spent.jsonl"
        raise ConfigError(str(register), "is no register", fix=fix)
    book = Register(register)
    totals, whole = book.totals(), book.of_all_units()
    note = (
        "Epsilons and deltas add up (basic composition). Records that were edited in between, or read by another "
        "template or column, count as others: theirs add to these where they hold the same people. An ensemble that "
        "answers counts with its whole budget. Cells of an experiment that did not end their training are in no "
        "register, nor are those of policy.rlhf that an earlier version trained: what their own ledgers hold comes on "
        "top. A run's or an ensemble's folder that was copied half-way "
        "and finished twice has one id and counts once: add the copy by hand."
    )
    if any(total.unit.endswith(IN_A_SHARD) for total in whole):
        note += f" An ensemble whose unit is a {SHARD} is not in the line of records, or of another unit, though each "
        note += f"record lies in a shard: the line of what is one of each{IN_A_SHARD}, counts them all."
    if others := book.others:
        note += f" What {' and '.join(map(str, others))} says of the same records comes on top as well: each register "
        note += "has a key of its own, and nothing adds up two."
    if as_json:
        listed = {"totals": [asdict(total) for total in totals], "all_units": [asdict(total) for total in whole]}
        show(listed | {"note": note}, as_json)
        return
    for total in (*totals, *whole):
        whole_of = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(total).items()}
        whole_of = {name: value for name, value in whole_of.items() if name not in ("records", "parts") and value != []}
        parts = {_PARTS.get(part.what, part.what).format(part.study): str(part) for part in total.parts}
        show(whole_of | parts, as_json)
    typer.echo(note)


def _contents(path: Path) -> tuple[LedgerContents, Path | None]:
    """The content of a ledger, and the path of the card that was checked against it, if there is one."""
    from dptune.privacy.ledger_file import read_ledger
    from dptune.privacy.run_folder import RunFolder

    if not path.is_dir():
        return read_ledger(path), None
    inner = RunFolder(path).adapter
    for folder in (path, inner):
        if (folder / "adapter_config.json").is_file() and RunFolder(folder).ledger.is_file():
            from dptune.tuning.verifying import CARD, check_deliverable

            return check_deliverable(folder), folder / CARD
    return read_ledger(RunFolder(path).ledger), None


def set_aside(
    folder: Annotated[Path, typer.Argument(help="data/runs/<run>, or another run's folder")],
) -> None:
    """Keep a run that cannot go on, ledger and all, out of the way of a new one; say what it has spent."""
    from dptune.privacy.runs_within import said_within
    from dptune.privacy.set_aside import set_aside as keep

    # The path is not resolved: renaming a link itself keeps the run among those that the report counts.
    target, spent = keep(folder.absolute())
    within = said_within(target)
    if spent is None and not within:
        typer.echo(f"It lies in {target} now; nothing was charged to it: it costs nothing, and may be removed.")
        return
    own = "nothing was charged to its own run" if spent is None else str(spent)
    counted = "The next run on the same records adds to that; the report counts both where they lie in data/runs."
    typer.echo(f"It lies in {target} now; {own}{within}. {counted}")
