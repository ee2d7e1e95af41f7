"""``dptune export``: a run's guarantee by the components of NIST SP 800-226, or as an entry of the public registry."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


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
