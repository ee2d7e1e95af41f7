"""``dptune verify`` and ``dptune set-aside``: what a run has spent, and a run that cannot go on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dptune.cli.console import show
from dptune.cli.options import AsJson

#: What a ledger's certified epsilon is about, by its telemetry.
_COVERED = {
    "research": "telemetry: research. The guarantee covers the adapter, not the logged curves.",
    "private": (
        "telemetry: private. The guarantee covers the adapter and all that was published, "
        "not the times that Prefect's database, logs and files keep."
    ),
}


def verify(
    ledger: Annotated[Path, typer.Argument(help="data/runs/<run>/ledger.jsonl")], as_json: AsJson = False
) -> None:
    """Recompute every epsilon of a run from its ledger alone; refuse a ledger that was torn or edited."""
    from dptune.cli.figures import of_ledger
    from dptune.privacy.ledger_file import read_ledger

    contents = read_ledger(ledger)
    show(of_ledger(contents), as_json)
    if as_json:
        return
    if not contents.complete:
        typer.echo("The run is not finished: these are the epsilons so far, not those of the planned run.")
    for plugin in contents.header.plugins:
        typer.echo(f"Made with plug-in {plugin}: the epsilons hold if that code does what it says.")
    if contents.header.telemetry in _COVERED:
        typer.echo(_COVERED[contents.header.telemetry])


def set_aside(
    folder: Annotated[Path, typer.Argument(help="data/runs/<run>, or another run's folder")],
) -> None:
    """Keep a run that cannot go on, ledger and all, out of the way of a new one; say what it has spent."""
    from dptune.privacy.set_aside import set_aside as keep

    # Not resolved: of a link, the link is renamed, so that the run stays among those that are counted.
    target, spent = keep(folder.absolute())
    said = "nothing was charged to it: it costs nothing, and may be removed" if spent is None else str(spent)
    counted = (
        ""
        if spent is None
        else " The next run on the same records adds to that; the report counts both where they lie in data/runs."
    )
    typer.echo(f"It lies in {target} now; {said}.{counted}")
