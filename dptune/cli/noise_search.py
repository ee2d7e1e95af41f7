"""``dptune search``: noise parameters for a budget."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dptune.cli.console import show
from dptune.cli.options import AsJson, Batch, Delta, Epochs, Records, SampleRate, Steps, sampling_of


def search(
    mechanism: Annotated[str, typer.Argument(help="Mechanism whose noise is searched: plrvo or lmo_dp.")],
    epsilon: Annotated[float, typer.Option(help="Budget of the whole run, as the accountant of --mode counts it.")],
    delta: Delta,
    mode: Annotated[
        str,
        typer.Option(
            help="Accountant and search: published, published_usefulness (LMO-DP's other search), or certified."
        ),
    ] = "certified",
    sample_rate: SampleRate = None,
    steps: Steps = None,
    records: Records = None,
    batch: Batch = None,
    epochs: Epochs = None,
    objective: Annotated[
        str, typer.Option(help="Quantity that mode certified optimises: variance, mean_absolute or usefulness.")
    ] = "variance",
    dimension: Annotated[int, typer.Option(help="Number of trainable parameters; PLRV-O's accountant needs it.")] = 0,
    max_grad_norm: Annotated[float, typer.Option(help="Clip radius.")] = 1.0,
    out: Annotated[Path | None, typer.Option(help="Output folder [data/search/MECHANISM-MODE].")] = None,
    as_json: AsJson = False,
) -> None:
    """Find noise parameters for a budget; write a profile, its origin, and a picture of the noise density."""
    from dptune.mechanisms.planning import Schedule
    from dptune.noise_search import Request, check_drawable, search_noise, write_found

    check_drawable()
    schedule = Schedule(*sampling_of(sample_rate, steps, records, batch, epochs), delta)
    found = search_noise(Request(mechanism, mode, epsilon, schedule, objective, dimension, max_grad_norm))
    directory = out or Path("data/search") / f"{mechanism}-{mode}"
    write_found(found, directory)
    show(found.entry | found.figures, as_json)
    if not as_json:
        typer.echo(f"{directory}: profile.yaml, search.json, density.png")
