"""``dptune account`` and ``dptune calibrate``: what a run costs, and the noise that a budget needs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dptune.cli.console import show
from dptune.cli.mechanisms import check_mechanism
from dptune.cli.options import (
    Accounting,
    AsJson,
    Batch,
    Candidates,
    Delta,
    Epochs,
    Mechanism,
    Options,
    Records,
    SampleRate,
    SelectionBound,
    Shape,
    Steps,
    law_of,
    rate_and_steps,
    read_options,
    refuse_sampling,
    refuse_selection,
    sampling_of,
    warn_of_delta,
    without_noise,
)
from dptune.core.errors import ConfigError


def account(
    mechanism: Mechanism,
    delta: Delta,
    sample_rate: SampleRate = None,
    steps: Steps = None,
    candidates: Candidates = None,
    shape: Shape = None,
    bound: SelectionBound = None,
    options: Options = None,
    as_json: AsJson = False,
) -> None:
    """Print the published, noise-only and certified epsilon of a run; with --candidates, also the cost of a search."""
    from dptune.cli import figures
    from dptune.mechanisms.planning import Schedule, fitted, price
    from dptune.mechanisms.registry import build
    from dptune.policy import method
    from dptune.prediction.protocols import PROTOCOLS, protocol_of

    warn_of_delta(delta)
    law = law_of(candidates, shape, bound)
    if mechanism in PROTOCOLS or mechanism == method.NAME:
        refuse_selection(mechanism, law)
    if mechanism in PROTOCOLS:
        refuse_sampling(mechanism, sample_rate, steps)
        show(figures.of_answers(protocol_of(mechanism, read_options(options) | {"delta": delta})), as_json)
        return
    if mechanism == method.NAME:
        refuse_sampling(mechanism, sample_rate, steps)
        show(figures.of_policy_gradient(method.method_of(read_options(options)), delta), as_json)
        return
    check_mechanism(mechanism)
    schedule = Schedule(*rate_and_steps(sample_rate, steps), delta)
    built = fitted(build(mechanism, read_options(options)), schedule)
    found = figures.of_run(built, schedule, price(built, schedule))
    if law is not None:
        found |= figures.of_search(built, schedule, law, delta, bound or "hull")
    show(found, as_json)


def calibrate(
    mechanism: Mechanism,
    epsilon: Annotated[float, typer.Option(help="The budget: the largest epsilon allowed.")],
    delta: Delta,
    sample_rate: SampleRate = None,
    steps: Steps = None,
    records: Records = None,
    batch: Batch = None,
    epochs: Epochs = None,
    candidates: Candidates = None,
    shape: Shape = None,
    bound: SelectionBound = None,
    accounting: Annotated[Accounting, typer.Option(help="The epsilon that must stay within the budget.")] = "certified",
    options: Options = None,
    as_json: AsJson = False,
) -> None:
    """Find the smallest noise multiplier, or the radius for private answers, that keeps a run within the budget."""
    from dptune.cli import figures
    from dptune.mechanisms.planning import Schedule, calibrated, calibrated_candidate, price
    from dptune.mechanisms.registry import build, takes_noise
    from dptune.policy import method
    from dptune.prediction.protocols import PROTOCOLS, protocol_of

    chosen = read_options(options)
    warn_of_delta(delta, records)
    law = law_of(candidates, shape, bound)
    if mechanism in PROTOCOLS or mechanism == method.NAME:
        refuse_selection(mechanism, law)
    if mechanism in PROTOCOLS:
        refuse_sampling(mechanism, sample_rate, steps, records, batch, epochs)
        show(figures.of_answers(protocol_of(mechanism, chosen | {"epsilon": epsilon, "delta": delta})), as_json)
        return
    if mechanism == method.NAME:
        refuse_sampling(mechanism, sample_rate, steps, records, batch, epochs)
        least = method.calibrated_method(without_noise(chosen), epsilon, delta, accounting)
        show(figures.of_policy_gradient(least, delta), as_json)
        return
    check_mechanism(mechanism)
    schedule = Schedule(*sampling_of(sample_rate, steps, records, batch, epochs), delta)
    if not takes_noise(mechanism, chosen):
        problem = f"{mechanism} adds no noise with a proven bound, or an option fixes it: nothing to calibrate"
        raise ConfigError("mechanism", problem, fix=f"price it with `dptune account {mechanism}`, or choose another")
    chosen = without_noise(chosen)

    def with_noise(noise: float) -> Any:
        return build(mechanism, chosen | {"noise_multiplier": noise})

    if law is not None:
        if accounting != "certified":
            raise ConfigError("--accounting", f"{accounting} does not go with a search", fix="leave it out")
        one, single = calibrated_candidate(with_noise, epsilon, schedule, law, bound or "hull")
        searched = figures.of_search(one, schedule, law, delta, bound or "hull")
        ratio = one.knobs().noise_multiplier / single.knobs().noise_multiplier
        shown = figures.of_run(one, schedule, price(one, schedule)) | searched
        show(shown | {"noise_over_that_of_a_single_run": ratio}, as_json)
        return
    found = calibrated(with_noise, epsilon, schedule, accounting)
    prices = price(found.mechanism, schedule, found.renyi_filter)
    shown = figures.of_run(found.mechanism, schedule, prices)
    if found.mechanism.noise.correlated is not None:
        one_band = calibrated(lambda noise: build("static", {"noise_multiplier": noise}), epsilon, schedule, accounting)
        shown |= figures.of_bands_at_one_budget(found.mechanism, one_band.mechanism, schedule.steps)
    show(shown, as_json)


# ``dptune search``: noise parameters for a budget.


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
    from dptune.mechanisms.noise_search import Request, check_drawable, search_noise, write_found
    from dptune.mechanisms.planning import Schedule

    check_drawable()
    schedule = Schedule(*sampling_of(sample_rate, steps, records, batch, epochs), delta)
    found = search_noise(Request(mechanism, mode, epsilon, schedule, objective, dimension, max_grad_norm))
    directory = out or Path("data/search") / f"{mechanism}-{mode}"
    write_found(found, directory)
    show(found.entry | found.figures, as_json)
    if not as_json:
        typer.echo(f"{directory}: profile.yaml, search.json, density.png")
