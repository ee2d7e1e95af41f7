"""Commands about ledgers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from dptune.privacy.set_aside import set_aside as keep

#: What a ledger's certified epsilon is about, by its telemetry.
COVERED = {
    "research": "telemetry: research. The guarantee covers the adapter, not the logged curves.",
    "private": (
        "telemetry: private. The guarantee covers the adapter and all that was published, "
        "not the times that Prefect's database, logs and files keep."
    ),
}


def set_aside(
    folder: Annotated[Path, typer.Argument(help="data/runs/<run>, or another run's folder")],
) -> None:
    """Keep a run that cannot go on, ledger and all, out of the way of a new one; say what it has spent."""
    # Not resolved: of a link, the link is renamed, so that the run stays among those that are counted.
    target, spent = keep(folder.absolute())
    said = "nothing was charged to it: it costs nothing, and may be removed" if spent is None else str(spent)
    counted = (
        ""
        if spent is None
        else " The next run on the same records adds to that; the report counts both where they lie in data/runs."
    )
    Console().print(escape(f"It lies in {target} now; {said}.{counted}"), soft_wrap=True, highlight=False)
