"""``dptune account``, ``calibrate`` and ``samplers``: what a run costs, and the noise that a budget needs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dptune.cli.console import show
from dptune.cli.mechanisms import check_mechanism
from dptune.cli.options import (
    Accounting,
    AsJson,
    Batch,
    Candidates,
    Delta,
    DropLast,
    Epochs,
    MaxBatch,
    Mechanism,
    Options,
    Records,
    SampleRate,
    SamplerName,
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
from dptune.core.digits import at_least, at_most
from dptune.core.errors import ConfigError

if TYPE_CHECKING:
    from dptune.mechanisms import mechanism as mechanisms
    from dptune.mechanisms.planning import Schedule


def account(
    mechanism: Mechanism,
    delta: Delta,
    sample_rate: SampleRate = None,
    steps: Steps = None,
    records: Records = None,
    batch: Batch = None,
    epochs: Epochs = None,
    sampler: SamplerName = None,
    max_batch: MaxBatch = None,
    drop_last: DropLast = False,
    candidates: Candidates = None,
    shape: Shape = None,
    bound: SelectionBound = None,
    options: Options = None,
    as_json: AsJson = False,
) -> None:
    """Print the published, noise-only and certified epsilon of a run; with --candidates, also the cost of a search."""
    from dptune.cli import figures
    from dptune.mechanisms.planning import fitted, price
    from dptune.mechanisms.registry import build
    from dptune.policy import method
    from dptune.prediction.protocols import PROTOCOLS, protocol_of

    warn_of_delta(delta, records)
    plan = (sample_rate, steps, records, batch, epochs, sampler, max_batch, drop_last or None)
    law = law_of(candidates, shape, bound)
    if mechanism in PROTOCOLS or mechanism == method.NAME:
        refuse_selection(mechanism, law)
    if mechanism in PROTOCOLS:
        refuse_sampling(mechanism, *plan)
        show(figures.of_answers(protocol_of(mechanism, read_options(options) | {"delta": delta})), as_json)
        return
    if mechanism == method.NAME:
        refuse_sampling(mechanism, *plan)
        show(figures.of_policy_gradient(method.method_of(read_options(options)), delta), as_json)
        return
    check_mechanism(mechanism)
    schedule = _schedule(delta, *plan)
    built = build(mechanism, read_options(options))
    _check_bands(built, sampler)
    built = fitted(built, schedule)
    found = figures.of_run(built, schedule, price(built, schedule))
    if law is not None:
        found |= figures.of_search(built, schedule, law, delta, bound or "hull")
    _show_sampled(found | figures.of_sampler(built, schedule, sampler), as_json)


def calibrate(
    mechanism: Mechanism,
    epsilon: Annotated[float, typer.Option(help="The budget: the largest epsilon allowed.")],
    delta: Delta,
    sample_rate: SampleRate = None,
    steps: Steps = None,
    records: Records = None,
    batch: Batch = None,
    epochs: Epochs = None,
    sampler: SamplerName = None,
    max_batch: MaxBatch = None,
    drop_last: DropLast = False,
    candidates: Candidates = None,
    shape: Shape = None,
    bound: SelectionBound = None,
    accounting: Annotated[Accounting, typer.Option(help="The epsilon that must stay within the budget.")] = "certified",
    options: Options = None,
    as_json: AsJson = False,
) -> None:
    """Find the smallest noise multiplier, or the radius for private answers, that keeps a run within the budget."""
    from dptune.cli import figures
    from dptune.mechanisms.planning import calibrated, calibrated_candidate, price
    from dptune.mechanisms.registry import build, takes_noise
    from dptune.policy import method
    from dptune.prediction.protocols import PROTOCOLS, protocol_of

    chosen = read_options(options)
    warn_of_delta(delta, records)
    plan = (sample_rate, steps, records, batch, epochs, sampler, max_batch, drop_last or None)
    law = law_of(candidates, shape, bound)
    if mechanism in PROTOCOLS or mechanism == method.NAME:
        refuse_selection(mechanism, law)
    if mechanism in PROTOCOLS:
        refuse_sampling(mechanism, *plan)
        show(figures.of_answers(protocol_of(mechanism, chosen | {"epsilon": epsilon, "delta": delta})), as_json)
        return
    if mechanism == method.NAME:
        refuse_sampling(mechanism, *plan)
        least = method.calibrated_method(without_noise(chosen), epsilon, delta, accounting)
        show(figures.of_policy_gradient(least, delta), as_json)
        return
    check_mechanism(mechanism)
    schedule = _schedule(delta, *plan)
    if not takes_noise(mechanism, chosen):
        problem = f"{mechanism} adds no noise with a proven bound, or an option fixes it: nothing to calibrate"
        raise ConfigError("mechanism", problem, fix=f"price it with `dptune account {mechanism}`, or choose another")
    chosen = without_noise(chosen)

    def with_noise(noise: float) -> Any:
        return build(mechanism, chosen | {"noise_multiplier": noise})

    _check_bands(with_noise(1.0), sampler)
    if law is not None:
        if accounting != "certified":
            raise ConfigError("--accounting", f"{accounting} does not go with a search", fix="leave it out")
        one, single = calibrated_candidate(with_noise, epsilon, schedule, law, bound or "hull")
        searched = figures.of_search(one, schedule, law, delta, bound or "hull")
        ratio = one.knobs().noise_multiplier / single.knobs().noise_multiplier
        shown = figures.of_run(one, schedule, price(one, schedule)) | searched
        shown |= {"noise_over_that_of_a_single_run": ratio}
        _show_sampled(shown | figures.of_sampler(one, schedule, sampler), as_json)
        return
    found = calibrated(with_noise, epsilon, schedule, accounting)
    prices = price(found.mechanism, schedule, found.renyi_filter)
    shown = figures.of_run(found.mechanism, schedule, prices)
    if found.mechanism.noise.correlated is not None:
        one_band = calibrated(lambda noise: build("static", {"noise_multiplier": noise}), epsilon, schedule, accounting)
        shown |= figures.of_bands_at_one_budget(found.mechanism, one_band.mechanism, schedule.steps)
    _show_sampled(shown | figures.of_sampler(found.mechanism, schedule, sampler), as_json)


def _schedule(
    delta: float,
    sample_rate: float | None,
    steps: int | None,
    records: int | None,
    batch: float | None,
    epochs: float | None,
    sampler: str | None,
    max_batch: int | None,
    drop_last: bool | None,
) -> Schedule:
    """The schedule that the options give. Raises: ConfigError naming the option that is wrong."""
    from dptune.mechanisms.planning import Schedule
    from dptune.privacy.samplers.sampler import sampler_of

    if sampler == "full":
        batch = records if batch is None else batch
        sample_rate = 1.0 if sample_rate is records is None else sample_rate
    if records is batch is epochs is None and (sample_rate is None) != (steps is None):
        rate, count = rate_and_steps(sample_rate, steps)
    else:
        rate, count = sampling_of(sample_rate, steps, records, batch, epochs)
    law = sampler_of(
        sampler or "poisson", rate, records=records, batch=batch, max_batch=max_batch, drop_last=bool(drop_last)
    )
    if law.batches and epochs is not None:  # where 1 / rate is rounded, an epoch still has that many batches
        count = math.ceil(epochs * law.batches)
    return Schedule(rate, count, delta, law)


def _check_bands(built: mechanisms.Mechanism, sampler: str | None) -> None:
    """Refuse bands without cyclic_poisson, and cyclic_poisson without bands. Raises: ConfigError."""
    from dptune.privacy.samplers.sampler import CYCLIC, check_name

    if sampler is None:
        return
    check_name(sampler)
    banded = built.noise.correlated is not None
    if banded and sampler != CYCLIC:
        problem = f"{sampler} does not go with {built.name}, whose proof needs {CYCLIC}: groups that take turns"
        raise ConfigError("--sampler", problem, fix=f"use {CYCLIC}, or the mechanism static")
    if sampler == CYCLIC and not banded:
        problem = f"{CYCLIC} is the sampler of correlated noise, and {built.name} has no bands"
        raise ConfigError("--sampler", problem, fix="use poisson, or the mechanism banded")


def _show_sampled(shown: dict[str, Any], as_json: bool) -> None:
    """Print figures; with an interval, or neighbours of its own, a sentence first."""
    if not as_json and (name := shown.get("sampler")):
        certified, delta = at_most(shown["epsilon_certified"]), shown["delta"]
        interval = f"at most {certified}"
        if "epsilon_at_least" in shown:
            interval = f"at least {at_least(shown['epsilon_at_least'])} and {interval}"
        typer.echo(f"With the sampler {name}, epsilon is {interval} at delta {delta:g} ({shown['neighbours']}).")
    show(shown, as_json)


def samplers(
    as_json: AsJson = False,
) -> None:
    """List the samplers: how units get into batches, and what is proven about the price of each."""
    from dataclasses import asdict

    from dptune.privacy.samplers.sampler import SAMPLERS

    if as_json:
        show({name: asdict(one) for name, one in SAMPLERS.items()}, as_json)
        return
    for name, one in SAMPLERS.items():
        typer.echo(f"{typer.style(name, bold=True)}: {one.law}")
        for title, text in (("needs", one.needs), ("neighbours", one.neighbours), ("bound", one.bound)):
            typer.echo(f"    {title}: {text}")


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
    moments: Annotated[
        int, typer.Option(help="Largest moment of PLRV-O's published search; its paper has about 1,000.")
    ] = 200,
    out: Annotated[Path | None, typer.Option(help="Output folder [data/search/MECHANISM-MODE].")] = None,
    as_json: AsJson = False,
) -> None:
    """Find noise parameters for a budget; write a profile, its origin, and a picture of the noise density."""
    from dptune.mechanisms.noise_search import Request, check_drawable, search_noise, write_found
    from dptune.mechanisms.planning import Schedule

    check_drawable()
    schedule = Schedule(*sampling_of(sample_rate, steps, records, batch, epochs), delta)
    found = search_noise(Request(mechanism, mode, epsilon, schedule, objective, dimension, max_grad_norm, moments))
    directory = out or Path("data/search") / f"{mechanism}-{mode}"
    write_found(found, directory)
    show(found.entry | found.figures, as_json)
    if not as_json:
        typer.echo(f"{directory}: profile.yaml, search.json, density.png")
