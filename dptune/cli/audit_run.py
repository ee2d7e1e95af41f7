"""``dptune audit-run``: what the gradients that an auditor planted in a finished run show of its privacy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dptune.cli.console import notice, show
from dptune.cli.options import AsJson


def audit_run(
    run: Annotated[Path, typer.Argument(help="Folder of a run of dptune tune, or of a finished cell: data/runs/CELL.")],
    confidence: Annotated[float, typer.Option(help="Confidence of each printed bound.")] = 0.95,
    false_alarms: Annotated[
        float,
        typer.Option(help="Probability that a sound run is accused; the three checks share it."),
    ] = 0.001,
    card: Annotated[
        bool,
        typer.Option("--card", help="Also write what was shown onto the adapter's card, in a section named Audit."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Audit a finished run by its planted gradients, and print what they show beside what is certified.

    The run must have been trained with --audit-canaries, or as a cell with canaries.crafted. Status 0: nothing that
    coins, draw or noise show contradicts the ledger. Status 1: the run is accused. Status 2: the run cannot be
    audited, because it has no such gradients, or because coins, scores or adapter are not those of its ledger.

    The attacker of epsilon_audited made the gradients and sees every release; one who has the adapter alone sees less.
    """
    from datetime import UTC, datetime

    from dptune.audit.whole_run import audit_run as audited
    from dptune.core.files import sha256
    from dptune.job.delivery.audit_section import write_audit
    from dptune.privacy.run_folder import RunFolder

    found = audited(run, confidence, false_alarms)
    show(found.to_dict(), as_json)
    if not as_json:
        if found.against.too_few:
            typer.echo(f"epsilon_refutable is 0: {found.against.too_few}.")
        if not found.accusations:
            typer.echo("Not accused: coins, draw and noise agree with the ledger, as far as they can tell (power).")
        typer.echo(
            f"With {found.coins.canaries} coins epsilon_audited is at most {found.coins.most:.3g}, if all guesses are "
            "right. An audit finds errors; it proves no privacy."
        )
        if found.committed:
            typer.echo(
                "Coins and scores are those that the ledger commits to in its first and last line. Anyone who can "
                "write the whole folder can make its files agree. SHA-256 of the ledger, to compare with the card "
                f"that was handed on: {sha256(RunFolder(run).ledger)}"
            )
        else:
            typer.echo(
                "An earlier version made this run: its ledger holds no commitment to the coins, so nobody notices if "
                "they were exchanged."
            )
    if card:
        written = write_audit(run, found.to_dict(), sha256(RunFolder(run).ledger), datetime.now(UTC).date())
        typer.echo(f'Wrote the section "Audit" of {written}. SHA-256 of this card now: {sha256(written)}', err=as_json)
    for accusation in found.accusations:
        notice("Accused", f"{accusation}.")
    if found.accusations:
        raise typer.Exit(1)
