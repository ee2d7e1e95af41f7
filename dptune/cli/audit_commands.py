"""Commands that audit: ``dptune audit`` (a private step), ``audit-run`` (a finished run), ``audit-draw`` (a loader)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dptune.cli.console import notice, show, show_progress
from dptune.cli.mechanisms import check_mechanism, completions, summaries
from dptune.cli.options import AsJson, Delta, DropLast, MaxBatch, Options, read_options
from dptune.core.digits import at_least, at_most
from dptune.core.errors import ConfigError

if TYPE_CHECKING:
    from dptune.audit.games.layer_step import LayerModel
    from dptune.audit.games.scene import StepAudit
    from dptune.mechanisms.mechanism import Mechanism
    from dptune.mechanisms.planning import Schedule
    from dptune.privacy.release import Composition

_ONE_STEP = (
    "All epsilons here are about one step whose batch certainly holds the sample, which is where wrong noise or "
    "sensitivity shows best. A run takes many steps on batches that are drawn: --steps, --sample-rate and --delta "
    "price and attack it as a whole."
)


def audit(
    mechanism: Annotated[
        str,
        typer.Argument(
            help="Name of a mechanism (`dptune mechanisms` lists them), or MODULE:FUNCTION for a step of your own, "
            "whose module is imported: that runs its code.",
            autocompletion=completions,
        ),
    ],
    trials: Annotated[
        int, typer.Option(help="Number of attacked runs with the attacker's sample, and as many without it.", max=10**8)
    ] = 20_000,
    confidence: Annotated[float, typer.Option(help="Confidence of each printed bound.")] = 0.95,
    false_alarms: Annotated[
        float, typer.Option(help="Probability that a sound step is accused; the checks on mu and epsilon share it.")
    ] = 0.001,
    steps: Annotated[int, typer.Option(help="Number of private steps in one run.", min=1, max=10**12)] = 1,
    sample_rate: Annotated[
        float,
        typer.Option(help="Probability that the sample enters a batch (with correlated noise: a batch of its group)."),
    ] = 1.0,
    delta: Delta = 1e-5,
    whole_run: Annotated[
        bool,
        typer.Option("--whole-run", help="Play whole runs of --steps on made-up parameters, --trials in each world."),
    ] = False,
    train: Annotated[
        Literal["lora", "all"],
        typer.Option(help="Weights that train in the attacked step: LoRA pairs, or all of a small model."),
    ] = "lora",
    options: Options = None,
    as_json: AsJson = False,
) -> None:
    """Attack a mechanism's private step and print the lower bounds beside the three epsilons.

    The attacker sees everything that the step releases. epsilon_audited is valid for any mechanism and can be at most
    about log(trials). Compare mu_audited with mu_certified. If the releases are not unsampled Gaussian ones, both mu
    are taken at the attack's false positive rate. The command exits with status 1 and a sentence if the attack shows
    more than is certified. The noise multiplier is 1 unless you set it. With correlated noise, a step is one visit of
    the sample together with all rows that its noise reaches.

    MODULE:FUNCTION is a step of any library, from a batch of gradients to the noisy gradient, which is tested against
    --set noise_multiplier and --set max_grad_norm (1 each unless set) by batches with and without one unit. Set
    records, parameters, micro_batches, unit_records and absent to fit its batches. audit-draw tests its loader.
    """
    if not 0 < false_alarms < 1:
        raise ConfigError("--false-alarms", f"{false_alarms} is not in (0, 1)", fix="use a number such as 0.001")
    import torch

    from dptune.policy.method import NAME

    torch.set_num_threads(1)  # vectors here are short
    show_progress()
    chosen = read_options(options)
    if train != "lora" and (whole_run or mechanism == NAME):
        raise ConfigError("--train", f"{train} is for single steps of a mechanism that trains", fix="leave it out")
    if ":" in mechanism or ("." in mechanism and mechanism not in summaries()):
        _refuse_runs(steps, sample_rate, whole_run, train)
        _audit_outside_step(mechanism, chosen, trials, confidence, false_alarms, delta, as_json)
        return
    if mechanism == NAME:
        if whole_run:
            raise ConfigError("--whole-run", f"{mechanism} has no batches to draw", fix="use --steps, an update each")
        _audit_policy_gradient(chosen, trials, confidence, false_alarms, steps, sample_rate, delta, as_json)
        return
    from dptune.audit.games.correlated_noise import audit_rows
    from dptune.audit.games.step import audit_step
    from dptune.cli import figures
    from dptune.core.plugins import naming_plugins
    from dptune.mechanisms.planning import Schedule, planned, price
    from dptune.privacy.entropy import OsEntropy

    check_mechanism(mechanism)
    built, own, modules = _built(mechanism, chosen, train)
    about = f"mechanisms.{mechanism}"
    # Correlated noise: the sample can be drawn in every bands-th step only, so a run has bands times as many steps as
    # visits, and bands times the rate in its own group's steps.
    schedule = Schedule(sample_rate / built.bands, steps * built.bands, delta)
    if whole_run:
        audit_whole_run(built, schedule, trials, confidence, false_alarms, as_json)
        return
    common: dict[str, Any] = {
        "trials": trials,
        "confidence": confidence,
        "delta": delta,
        "entropy": OsEntropy(),
        "sample_rate": sample_rate,
    }
    step = {"steps": steps, "own": own} | common
    found = audit_rows(built, visits=steps, **common) if built.bands > 1 else audit_step(built, **step)
    with naming_plugins(about, modules):
        releases = planned(built, schedule)
        result = {
            "mechanism": mechanism,
            **figures.of_schedule(built, schedule),
            **found.to_dict(),
            **figures.of_prices(price(built, schedule), built.published_accountant, releases, delta),
        }
    once = _ONE_STEP if steps == 1 and sample_rate == 1 else ""
    _show_audit(result, found, releases, false_alarms, as_json, once)


def _built(name: str, options: dict[str, Any], train: str) -> tuple[Mechanism, LayerModel | None, tuple[str, ...]]:
    """The mechanism to attack, the model whose own weights train (None: none do), and the plug-ins with its code."""
    from dptune.audit.games.layer_step import LayerModel
    from dptune.core.plugins import naming_plugins
    from dptune.mechanisms.registry import build, lacks_noise, plugin_modules

    own, modules = LayerModel() if train == "all" else None, plugin_modules(name, options)
    with naming_plugins(f"mechanisms.{name}", modules):
        entry = ({"noise_multiplier": 1.0} if lacks_noise(name, options) else {}) | options
        built = build(name, entry) if own is None else own.mechanism(name, entry)
    if (correlated := built.noise.correlated) is not None and len(correlated.bands_to_try(0.01, 64)) > 1:
        problem = "is open, so there is no noise of several rows to attack"
        raise ConfigError("bands", problem, fix="use --set bands=8, or the number of your run")
    return built, own, modules


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
    """Attack DP policy gradient's noisy mean of users' updates; a step is an update."""
    from dptune.audit.games.updates import audit_updates
    from dptune.cli import figures
    from dptune.policy.method import method_of
    from dptune.privacy.entropy import OsEntropy

    if sample_rate != 1.0:
        raise ConfigError("--sample-rate", f"{sample_rate}: every user takes part in one update", fix="leave it out")
    chosen = method_of({"noise_multiplier": 1.0} | options)
    found = audit_updates(
        chosen, trials=trials, confidence=confidence, delta=delta, entropy=OsEntropy(), updates=updates
    )
    result = figures.of_policy_gradient(chosen, delta) | found.to_dict()
    _show_audit(result, found, chosen.planned(updates), false_alarms, as_json)


def _refuse_runs(steps: int, sample_rate: float, whole_run: bool, train: str) -> None:
    """Raise ConfigError if a step of the user's own is to be audited as a run."""
    runs = (("--steps", steps, 1), ("--sample-rate", sample_rate, 1.0), ("--whole-run", whole_run, False))
    for option, value, right in (*runs, ("--train", train, "lora")):
        if value != right:
            problem = f"{value}: MODULE:FUNCTION is audited on one batch that surely holds the unit"
            raise ConfigError(option, problem, fix="leave it out; `dptune audit-draw` tests how batches are drawn")


def _audit_outside_step(
    name: str,
    options: dict[str, Any],
    trials: int,
    confidence: float,
    false_alarms: float,
    delta: float,
    as_json: bool,
) -> None:
    """Attack a step that somebody else wrote, and compare it with what is claimed of it."""
    from dptune.audit.games.outside_step import StepClaim, audit_outside_step
    from dptune.audit.verdict import CERTIFIED_WRONG, certificate, judged
    from dptune.core.plugins import imported_function
    from dptune.mechanisms.options import make_part, option_names
    from dptune.privacy.entropy import OsEntropy

    known = option_names(StepClaim)
    for option in options:
        if option not in known:
            raise ConfigError(option, "a step of your own has no such option", fix=f"use one of {', '.join(known)}")
    claim: StepClaim = make_part(StepClaim, {"noise_multiplier": 1.0} | options)
    found = audit_outside_step(
        imported_function(name),
        claim,
        trials=trials,
        confidence=confidence,
        delta=delta,
        entropy=OsEntropy(),
        name=name,
    )
    verdict = judged(found, certificate(Counter([claim.release]), delta), false_alarms)
    claimed = {"noise_multiplier": claim.noise_multiplier, "max_grad_norm": claim.max_grad_norm}
    # The user only claims that the step is Gaussian, so the figures are called claims, not certificates.
    both = {**found.to_dict(), **verdict.to_dict()}
    figures = {key.replace("certified", "claimed"): value for key, value in both.items()}
    if verdict.accusation:
        figures["accusation"] = verdict.accusation.replace(CERTIFIED_WRONG, "claimed: the step does not keep its claim")
    show({"function": name, **claimed, **figures}, as_json)
    if verdict.accusation:
        notice("Accused", f"{figures['accusation']}.")
        raise typer.Exit(1)
    if not as_json:
        typer.echo("Not accused: the step agrees with its claim, as far as these batches can tell (power).")


def _show_audit(
    result: dict[str, Any],
    audit: StepAudit,
    releases: Composition,
    false_alarms: float,
    as_json: bool,
    about: str = "",
) -> None:
    from dptune.audit.verdict import certificate, judged
    from dptune.core.digits import shown_above

    # Print the noise of the attacked step: a controller may have moved it before.
    attacked = Counter([audit.release]) if sum(releases.values()) == 1 and audit.release.part is None else releases
    verdict = judged(audit, certificate(attacked, audit.delta), false_alarms)
    show(result | verdict.to_dict() | {"epsilon_certified": result["epsilon_certified"]}, as_json)
    if about and not as_json:
        typer.echo(about)
    claimed = result["epsilon_published"]
    if audit.epsilon_audited > claimed:
        lower, upper = shown_above(audit.epsilon_audited, claimed, 4)
        shown = f"the attack shows epsilon >= {lower} at confidence {audit.confidence:g}"
        why = f" ({'; '.join(result['leaks'])})" if result["leaks"] else ""
        notice("warning", f"{shown}, more than the {upper} that {result['mechanism']} claims{why}.")
    if verdict.accusation:
        notice("Accused", f"{verdict.accusation}.")
        raise typer.Exit(1)


# ``dptune audit --whole-run``: games on the twin of a run, beside what all its releases are certified for.


def audit_whole_run(
    mechanism: Mechanism, schedule: Schedule, games: int, confidence: float, false_alarms: float, as_json: bool
) -> None:
    """Play whole runs, print the figures and the curve; status 1 and a sentence if the certificate is refuted."""
    from dptune.audit.games.run_twin import audit_twin
    from dptune.cli.figures import of_schedule

    found = audit_twin(mechanism, schedule, games=games, confidence=confidence, false_alarms=false_alarms)
    figures = of_schedule(mechanism, schedule) | found.to_dict()
    show(figures | {"curve": list(found.curve)} if as_json else figures, as_json)
    if not as_json:
        for row in found.curve:
            if row["epsilon"] and not (row["delta_in_shown"] or row["delta_out_shown"]):
                continue  # nothing was shown so far out
            parts = [
                f"unit {world} {at_least(row[f'delta_{world}_shown'] or 0.0)} of "
                f"{'no finite delta' if (most := row[f'delta_{world}_certified']) is None else at_most(most)}"
                for world in ("in", "out")
            ]
            typer.echo(f"delta shown of certified at epsilon {row['epsilon']:g}: {', '.join(parts)}")
    if found.fewer:
        typer.echo(found.fewer, err=as_json)
    if found.claim_refuted:
        notice("warning", f"{found.claim_refuted}.")
    if found.accusation:
        notice("Accused", f"{found.accusation}.")
        raise typer.Exit(1)


# ``dptune audit-run``: what the gradients that an auditor planted in a finished run show of its privacy.


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
    from dptune.job.delivery.deliverable import write_audit
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


# ``dptune audit-draw``: a test of somebody else's loader against the sampler that is claimed of it.


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
    from dptune.audit.draws.loader_claim import LoaderClaim
    from dptune.audit.draws.loader_test import audit_loader
    from dptune.core.plugins import imported
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
