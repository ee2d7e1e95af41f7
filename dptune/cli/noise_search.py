"""``dptune search``: noise parameters for a budget."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dptune.cli.console import show
from dptune.cli.options import AsJson, Batch, Delta, Epochs, Records, SampleRate, Steps, sampling_of


def search(
    mechanism: Annotated[str, typer.Argument(help="plrvo or lmo_dp")],
    epsilon: Annotated[float, typer.Option(help="Of the whole run, as the mode counts it.")],
    delta: Delta,
    mode: Annotated[
        str, typer.Option(help="published, published_usefulness (LMO-DP's other search), or certified.")
    ] = "certified",
    sample_rate: SampleRate = None,
    steps: Steps = None,
    records: Records = None,
    batch: Batch = None,
    epochs: Epochs = None,
    objective: Annotated[str, typer.Option(help="Certified: variance, mean_absolute or usefulness.")] = "variance",
    dimension: Annotated[int, typer.Option(help="Trainable parameters, which PLRV-O's accountant counts.")] = 0,
    max_grad_norm: Annotated[float, typer.Option(help="The clip radius.")] = 1.0,
    out: Annotated[Path | None, typer.Option(help="Folder of the files [data/search/MECHANISM-MODE].")] = None,
    as_json: AsJson = False,
) -> None:
    """Find noise parameters for a budget; write a profile, its provenance and a picture of the density."""
    from dptune.mechanisms.planning import Schedule
    from dptune.noise_search import Request, search_noise, write_found

    schedule = Schedule(*sampling_of(sample_rate, steps, records, batch, epochs), delta)
    found = search_noise(Request(mechanism, mode, epsilon, schedule, objective, dimension, max_grad_norm))
    directory = out or Path("data/search") / f"{mechanism}-{mode}"
    write_found(found, directory)
    show(found.entry | found.figures, as_json)
    if not as_json:
        typer.echo(f"{directory}: profile.yaml, search.json, density.png")
