"""The command line: price a mechanism, calibrate it, search its noise, audit it, and verify a ledger."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dptune.console import reports_errors, show
from dptune.errors import ConfigError
from dptune.mechanisms.mechanism import Mechanism as BuiltMechanism
from dptune.mechanisms.planning import Schedule, calibrated, planned, price
from dptune.mechanisms.registry import MECHANISMS, build, describe_options, lacks_noise, option_rows, takes_noise
from dptune.mechanisms.rldp_published import RldpPublished
from dptune.policy import method
from dptune.prediction import commands
from dptune.prediction.protocols import PROTOCOLS, SUMMARIES, Protocol, priced_answers, protocol_of
from dptune.privacy.accountants import Epsilons, mixture_figures, repriced_epsilon
from dptune.privacy.calibration import sampling
from dptune.privacy.commands import COVERED, set_aside
from dptune.privacy.entropy import OsEntropy
from dptune.privacy.ledger import LedgerContents, read_ledger
from dptune.privacy.release import Composition

if TYPE_CHECKING:
    from dptune.audit.step import StepAudit

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__, pretty_exceptions_enable=False)

Mechanism = Annotated[str, typer.Argument(help="Registered name; see `dptune mechanisms`.")]
SampleRate = Annotated[float | None, typer.Option(help="Probability that a unit enters a batch.")]
Steps = Annotated[int | None, typer.Option(help="Number of steps.", min=1, max=10**12)]
Records = Annotated[int | None, typer.Option(help="Units in the training data.", max=10**15)]
Batch = Annotated[float | None, typer.Option(help="Expected batch size.")]
Epochs = Annotated[float | None, typer.Option(help="Passes over the data.")]
Delta = Annotated[float, typer.Option(help="Delta of the guarantee.")]
Options = Annotated[list[str] | None, typer.Option("--set", help="Option of the mechanism, KEY=VALUE; repeatable.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Accounting = Literal["certified", "noise_only", "published"]


@app.command()
@reports_errors
def account(
    mechanism: Mechanism,
    delta: Delta,
    sample_rate: SampleRate = None,
    steps: Steps = None,
    options: Options = None,
    as_json: AsJson = False,
) -> None:
    """Print the three epsilons of a run: as published, of the noise alone, and certified."""
    if mechanism in PROTOCOLS:
        _refuse_sampling(mechanism, sample_rate, steps)
        show(_answers(protocol_of(mechanism, _parse(options) | {"delta": delta})), as_json)
        return
    if mechanism == method.NAME:
        _refuse_sampling(mechanism, sample_rate, steps)
        show(_policy_gradient(method.method_of(_parse(options)), delta), as_json)
        return
    sample_rate, steps = _required(sample_rate, "--sample-rate"), int(_required(steps, "--steps"))
    _check_name(mechanism)
    built = build(mechanism, _parse(options))
    schedule = Schedule(sample_rate, steps, delta)
    show(_run(built, schedule) | _prices(price(built, schedule)) | _diagnostics(built, schedule), as_json)


@app.command()
@reports_errors
def calibrate(
    mechanism: Mechanism,
    epsilon: Annotated[float, typer.Option(help="The budget.")],
    delta: Delta,
    sample_rate: SampleRate = None,
    steps: Steps = None,
    records: Records = None,
    batch: Batch = None,
    epochs: Epochs = None,
    accounting: Annotated[Accounting, typer.Option(help="Which epsilon meets the budget.")] = "certified",
    options: Options = None,
    as_json: AsJson = False,
) -> None:
    """Find the least noise multiplier, or the radius of answers, that keeps a run within the budget."""
    if mechanism in PROTOCOLS:
        _refuse_sampling(mechanism, sample_rate, steps, records, batch, epochs)
        show(_answers(protocol_of(mechanism, _parse(options) | {"epsilon": epsilon, "delta": delta})), as_json)
        return
    if mechanism == method.NAME:
        _refuse_sampling(mechanism, sample_rate, steps, records, batch, epochs)
        least = method.calibrated_method(_without_noise(_parse(options)), epsilon, delta, accounting)
        show(_policy_gradient(least, delta), as_json)
        return
    sample_rate, steps = _sampling(sample_rate, steps, records, batch, epochs)
    chosen = _parse(options)
    _check_name(mechanism)
    if not takes_noise(mechanism, chosen):
        raise ConfigError("mechanism", f"{mechanism} adds no noise to calibrate", fix="choose another mechanism")
    chosen = _without_noise(chosen)
    schedule = Schedule(sample_rate, steps, delta)
    found = calibrated(
        lambda noise: build(mechanism, chosen | {"noise_multiplier": noise}), epsilon, schedule, accounting
    )
    prices = price(found.mechanism, schedule, found.renyi_filter)
    show(_run(found.mechanism, schedule) | _prices(prices) | _diagnostics(found.mechanism, schedule), as_json)


@app.command()
@reports_errors
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
    from dptune.noise_search import Request, search_noise, write_found

    schedule = Schedule(*_sampling(sample_rate, steps, records, batch, epochs), delta)
    found = search_noise(Request(mechanism, mode, epsilon, schedule, objective, dimension, max_grad_norm))
    directory = out or Path("data/search") / f"{mechanism}-{mode}"
    write_found(found, directory)
    show(found.entry | found.figures, as_json)
    if not as_json:
        Console().print(f"{escape(str(directory))}: profile.yaml, search.json, density.png", soft_wrap=True)


@app.command()
@reports_errors
def audit(
    mechanism: Mechanism,
    trials: Annotated[int, typer.Option(help="Runs of the steps, with the attacker's sample and without.")] = 20_000,
    confidence: Annotated[float, typer.Option(help="Of each bound that is printed, by itself.")] = 0.95,
    false_alarms: Annotated[
        float, typer.Option(help="Chance that a sound step is accused, shared by the checks on mu and on epsilon.")
    ] = 0.001,
    steps: Annotated[int, typer.Option(help="Private steps composed in one run.", min=1, max=10**12)] = 1,
    sample_rate: Annotated[float, typer.Option(help="Probability that the sample enters a batch.")] = 1.0,
    delta: Delta = 1e-5,
    options: Options = None,
    as_json: AsJson = False,
) -> None:
    """Attack a mechanism's private step and print what it shows beside the three epsilons.

    The attacker sees all that the step releases. epsilon_audited holds for any mechanism, and can be about
    log(trials) at most; mu_audited belongs beside mu_certified: where releases are no certain Gaussian ones, both are
    taken at the attack's false positive rate. Ends with status 1 and a sentence if the attack shows more than is
    certified. The noise multiplier is 1 if not set.
    """
    if not 0 < false_alarms < 1:
        raise ConfigError("--false-alarms", f"{false_alarms} is not in (0, 1)", fix="use 0.001, say")
    import torch  # pricing must start without it

    from dptune.audit.step import audit_step

    torch.set_num_threads(1)  # vectors here are short
    if mechanism == method.NAME:
        _audit_policy_gradient(_parse(options), trials, confidence, false_alarms, steps, sample_rate, delta, as_json)
        return
    _check_name(mechanism)
    chosen = _parse(options)
    noise = {"noise_multiplier": 1.0} if lacks_noise(mechanism, chosen) else {}
    built = build(mechanism, noise | chosen)
    found = audit_step(
        built,
        trials=trials,
        confidence=confidence,
        delta=delta,
        entropy=OsEntropy(),
        steps=steps,
        sample_rate=sample_rate,
    )
    schedule = Schedule(sample_rate, steps, delta)
    prices = _prices(price(built, schedule))
    result = {"mechanism": mechanism, **_run(built, schedule), **found.to_dict(), **prices}
    _show_audit(result, found, planned(built, schedule), false_alarms, as_json)


def _audit_policy_gradient(
    options: dict[str, Any],
    trials: int,
    confidence: float,
    false_alarms: float,
    updates: int,
    sample_rate: float,
    delta: float,
    as_json: bool,
) -> None:
    """``audit`` of the mean of users' updates; steps are updates."""
    from dptune.audit.updates import audit_updates

    if sample_rate != 1.0:
        raise ConfigError("--sample-rate", f"{sample_rate}: every user takes part in one update", fix="leave it out")
    chosen = method.method_of({"noise_multiplier": 1.0} | options)
    found = audit_updates(
        chosen, trials=trials, confidence=confidence, delta=delta, entropy=OsEntropy(), updates=updates
    )
    result = _policy_gradient(chosen, delta) | found.to_dict()
    _show_audit(result, found, chosen.planned(updates), false_alarms, as_json)


def _show_audit(
    result: dict[str, Any], found: StepAudit, releases: Composition, false_alarms: float, as_json: bool
) -> None:
    from dptune.audit.verdict import certificate, judged

    # What was attacked: a controller that moves the noise may have moved it before this step.
    attacked = Counter([found.release]) if sum(releases.values()) == 1 and found.release.part is None else releases
    verdict = judged(found, certificate(attacked, found.delta), false_alarms)
    show(result | verdict.to_dict() | {"epsilon_certified": result["epsilon_certified"]}, as_json)
    if verdict.accusation:
        Console(stderr=True).print(f"[red]Accused:[/red] {escape(verdict.accusation)}.", soft_wrap=True)
        raise typer.Exit(1)


@app.command()
@reports_errors
def verify(
    ledger: Annotated[Path, typer.Argument(help="data/runs/<run>/ledger.jsonl")], as_json: AsJson = False
) -> None:
    """Recompute every epsilon of a run from its ledger alone; refuse a ledger that was torn or edited."""
    contents = read_ledger(ledger)
    header = contents.header
    releases = sorted(contents.composition, key=lambda release: release.noise_multiplier)
    effective = sorted({release.effective_noise_multiplier for release in releases})
    rates = sorted({release.sample_rate for release in releases})
    result = {
        "mechanism": header.mechanism,
        "noise_multiplier": _one_or_range([release.noise_multiplier for release in releases]),
        "effective_noise_multiplier": _one_or_range(effective),
        "sample_rate": _one_or_range(rates),
        "steps": contents.releases,
        "delta": header.delta,
        **_prices(contents.epsilons),
        **_repriced_ledger(contents),
        **mixture_figures(contents.composition, header.delta),
        "accounting": header.accounting,
        "budget_epsilon": header.epsilon,
        "complete": contents.complete,
        "inherited_releases": sum(count for _, count in header.inherited),
        "data": header.data,
        "run_id": header.run_id,
        "telemetry": header.telemetry,
        "unit": header.unit,
    }
    show(result, as_json)
    if as_json:
        return
    if not contents.complete:
        Console().print("The run is not finished: these are the epsilons so far, not those of the planned run.")
    if header.telemetry in COVERED:
        Console().print(COVERED[header.telemetry], soft_wrap=True)


@app.command()
@reports_errors
def mechanisms(
    name: Annotated[str | None, typer.Argument(help="Show the options of this one.")] = None,
) -> None:
    """List the mechanisms, one line each, or the `--set` options of one."""
    console = Console()
    if name is None:
        for key, listed in MECHANISMS.items():
            console.print(f"[bold]{key}[/bold]: {escape(listed.summary)}", soft_wrap=True, highlight=False)
        for key, summary in _OTHERS.items():
            console.print(f"[bold]{key}[/bold]: {escape(summary)}", soft_wrap=True, highlight=False)
        return
    if name not in _OTHERS:
        _check_name(name)
    summary = _OTHERS.get(name) or MECHANISMS[name].summary
    console.print(f"[bold]{name}[/bold]: {escape(summary)}", soft_wrap=True, highlight=False)
    table = Table("--set option", "default", "meaning")
    options = {**PROTOCOLS, method.NAME: method.Dppg}
    for row in option_rows(options[name]) if name in options else describe_options(name):
        table.add_row(*row)
    console.print(table)


#: What is priced and audited here but trains no adapter by the steps of a mechanism.
_OTHERS = {**SUMMARIES, method.NAME: method.SUMMARY}


def _check_name(name: str) -> None:
    if name in PROTOCOLS:
        raise ConfigError("mechanism", f"{name} answers and trains nothing", fix="use account or calibrate with it")
    if name not in MECHANISMS:
        choices = ", ".join([*MECHANISMS, *_OTHERS])
        raise ConfigError("mechanism", f"unknown mechanism {name!r}", fix=f"use one of {choices}")


def _parse(options: list[str] | None) -> dict[str, Any]:
    parsed: dict[str, Any] = {}
    for option in options or []:
        key, separator, value = option.partition("=")
        if not separator:
            raise ConfigError(f"--set {option}", "has no '='", fix="write --set KEY=VALUE")
        key = key.strip()
        if key in parsed:
            raise ConfigError(f"--set {key}", "is given twice", fix="give it once")
        parsed[key] = value.strip()
    return parsed


def _required(value: float | None, option: str) -> float:
    if value is None:
        raise ConfigError(option, "is missing", fix=f"give {option}")
    return value


def _sampling(
    sample_rate: float | None,
    steps: int | None,
    records: int | None,
    batch: float | None,
    epochs: float | None,
) -> tuple[float, int]:
    by_rate = sample_rate is not None and steps is not None
    if by_rate and records is batch is epochs is None:
        return float(_required(sample_rate, "--sample-rate")), int(_required(steps, "--steps"))
    if records is not None and batch is not None and epochs is not None and sample_rate is steps is None:
        return sampling(records, batch, epochs)
    raise ConfigError(
        "--sample-rate --steps",
        "give these two, or all of --records --batch --epochs",
        fix="choose one of the sets",
    )


def _refuse_sampling(name: str, *given: float | None) -> None:
    if any(value is not None for value in given):
        problem = f"{name} takes no batches of records"
        raise ConfigError("--sample-rate --steps --records --batch --epochs", problem, fix="use --set options alone")


def _answers(protocol: Protocol) -> dict[str, Any]:
    return {
        "mechanism": protocol.name,
        **{key: value for key, value in asdict(protocol).items() if key not in ("name", "epsilon")},
        "rdp_budget": protocol.rdp_budget,
        "rdp_per_token": protocol.rdp_per_token,
        **protocol.figures,
        **_prices(priced_answers(protocol)),
    }


def _policy_gradient(chosen: method.Dppg, delta: float) -> dict[str, Any]:
    return {"mechanism": method.NAME, **asdict(chosen), "delta": delta, **_prices(chosen.price(delta))}


def _without_noise(options: dict[str, Any]) -> dict[str, Any]:
    if "noise_multiplier" in options:
        raise ConfigError("--set noise_multiplier", "is what calibrate finds", fix="leave it out, or use account")
    return options


def _run(mechanism: BuiltMechanism, schedule: Schedule) -> dict[str, Any]:
    knobs = mechanism.knobs()
    return {
        "mechanism": mechanism.name,
        "noise_multiplier": knobs.noise_multiplier,
        "effective_noise_multiplier": mechanism.effective_noise_multiplier(knobs) if mechanism.private else 0.0,
        "sample_rate": schedule.sample_rate,
        "steps": schedule.steps,
        "delta": schedule.delta,
    }


def _diagnostics(mechanism: BuiltMechanism, schedule: Schedule) -> dict[str, Any]:
    """Figures that belong to one family of mechanisms, none of them a guarantee."""
    return _repriced(mechanism, schedule) | mixture_figures(planned(mechanism, schedule), schedule.delta)


def _repriced(mechanism: BuiltMechanism, schedule: Schedule) -> dict[str, Any]:
    """RLDP's Algorithm 1 prices today's noise for all past steps: a diagnostic, next to the mechanism it is of."""
    if not isinstance(mechanism.controller, RldpPublished):
        return {}
    last = mechanism.release(mechanism.knobs(), schedule.sample_rate)
    return {"epsilon_repriced_diagnostic": repriced_epsilon(last, schedule.steps, schedule.delta)}


def _repriced_ledger(contents: LedgerContents) -> dict[str, Any]:
    if contents.last is None or not contents.last.adaptive:
        return {}
    return {"epsilon_repriced_diagnostic": repriced_epsilon(contents.last, contents.releases, contents.header.delta)}


def _prices(prices: Epsilons) -> dict[str, Any]:
    return {
        "epsilon_published": prices.published,
        "epsilon_noise_only": prices.noise_only,
        "epsilon_certified": prices.certified,
        "leaks": list(prices.leaks),
    }


def _one_or_range(values: list[float]) -> float | list[float] | None:
    if not values:
        return None
    return values[0] if values[0] == values[-1] else [values[0], values[-1]]


app.command()(reports_errors(set_aside))
app.command()(reports_errors(commands.generate))
app.command()(reports_errors(commands.serve))


if __name__ == "__main__":
    app()
