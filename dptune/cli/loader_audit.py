"""``dptune audit-draw``: a test of somebody else's loader against the sampler that is claimed of it."""

from __future__ import annotations

from typing import Annotated

import typer

from dptune.cli.console import notice, show, show_progress
from dptune.cli.options import AsJson, DropLast, MaxBatch


def audit_draw(
    loader: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:LOADER",
            help="An iterable of batches of ids, or a function that returns one for each epoch. The module is "
            "imported: that runs its code.",
        ),
    ],
    units: Annotated[int, typer.Option(help="Number of ids; they are 0, 1, ..., units - 1.")],
    sample_rate: Annotated[float, typer.Option(help="Claimed expected share of the units in a batch.")],
    sampler: Annotated[
        str, typer.Option(help="Claimed sampler; `dptune samplers` lists them. Not cyclic_poisson, not full.")
    ] = "poisson",
    max_batch: MaxBatch = None,
    drop_last: DropLast = False,
    epochs: Annotated[
        int | None,
        typer.Option(help="Number of epochs to read (default: as many as hold about 20,000 ids).", min=1, max=10**6),
    ] = None,
    false_alarms: Annotated[
        float, typer.Option(help="Probability that a loader that is as claimed is accused.")
    ] = 1e-3,
    as_json: AsJson = False,
) -> None:
    """Test whether a loader's batches are those of the claimed sampler.

    The loader is read for many epochs, and compared with simulations of the sampler. Status 0: it agrees with the
    claim, as far as so many epochs can tell (power). Status 1: it is accused. Status 2: it cannot be tested, because it
    cannot be imported, ends early, or yields other ids.
    """
    from dptune.audit.loader_claim import LoaderClaim
    from dptune.audit.loader_test import audit_loader
    from dptune.audit.user_code import imported
    from dptune.privacy.entropy import OsEntropy

    claim = LoaderClaim(sampler=sampler, sample_rate=sample_rate, units=units, max_batch=max_batch, drop_last=drop_last)
    show_progress()
    found = audit_loader(
        imported(loader), claim, false_alarms=false_alarms, entropy=OsEntropy(), epochs=epochs, name=loader
    )
    show({"loader": loader, **found.to_dict()}, as_json)
    if found.accusation:
        notice("Accused", f"{found.accusation}.")
        raise typer.Exit(1)
    if not as_json:
        typer.echo("Not accused: the loader agrees with its claim, as far as these epochs can tell (power).")
