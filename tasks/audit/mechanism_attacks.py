"""Attacks on a finished cell's mechanism: its step, whole runs of it, its draw, and gradients planted in its run."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptune.audit.draws.draw_test import audit_bins, audit_draw
from dptune.audit.games.run_twin import audit_twin, unplayable
from dptune.audit.games.step import audit_step
from dptune.audit.one_run import audited_sample_rate, one_run
from dptune.audit.refutation import refutation, run_certificate
from dptune.audit.text.membership import auc
from dptune.audit.verdict import certificate, judged
from dptune.core.errors import DataError
from dptune.core.files import jsonable
from dptune.job.audit_canaries import KeptCanaries
from dptune.mechanisms.mechanism import Mechanism
from dptune.mechanisms.planning import Schedule, as_charged, fitted, price
from dptune.mechanisms.registry import build, of_model, takes_noise
from dptune.privacy.entropy import OsEntropy
from dptune.privacy.release import Release
from dptune.privacy.run_folder import RunFolder
from dptune.privacy.samplers.sampler import POISSON
from dptune.training.data import Bins, keys_of
from dptune.training.gradients.shared_pass import shared_copy
from dptune.training.models.own_weights import groups_of
from dptune.training.privacy_units import Turn
from tasks.audit.target import Target
from tasks.experiment.preparation import corpus_of, plan_of, units_of
from tasks.paths import TRAIN

#: Pairs of games on whole runs for each trial of the attack on one step.
_GAMES = 2


def one_run_figures(target: Target, scores: NDArray[np.float64], included: NDArray[np.bool_]) -> dict[str, Any]:
    """The bound for the report, and what the coins say, and could have said, against the run's certificate."""
    kinds = bool(target.secrets.audit) + RunFolder(target.directory).crafted.exists()
    reported = one_run(scores, included, target.cell.delta, target.confidence(kinds))
    known = run_certificate(target.contents.header, target.contents.composition)
    against = refutation(scores, included, known, target.cell.delta, target.alarm_confidence)
    return {**reported.to_dict(), **against.to_dict()}


def crafted_attack(target: Target) -> dict[str, Any]:
    """Bounds from planted gradients: on epsilon, and on the sample rate with which they entered batches."""
    file = RunFolder(target.directory).crafted
    if not file.exists():
        return {}
    canaries = KeptCanaries.read(target.directory, file)
    found = one_run_figures(target, canaries.guesses_by, canaries.included)
    members, others = canaries.guesses_by[canaries.included], canaries.guesses_by[~canaries.included]
    shown = {**found, "auc": auc(members, others), "watched": canaries.watched, "releases": target.contents.releases}
    rates = {release.sample_rate for release in target.contents.composition}
    draw = audited_sample_rate(
        canaries.scores,
        canaries.included,
        canaries.moves,
        max(rates),
        target.confidence(),
        target.alarm_confidence,
        OsEntropy(),
        max(release.sampler.batches for release in target.contents.composition),
    )
    return {"crafted": shown, "draw": draw.to_dict()}


def sampling_audit(target: Target) -> dict[str, Any]:
    """Compare new draws from the run's own units and plan with the sample rate in its ledger.

    Allowed under private telemetry: if sampling is right, the p-values have the same law whatever the data is.
    """
    cell = target.cell
    corpus = corpus_of(cell, TRAIN, target.tokenizer)
    units, expected_batch_size = units_of(cell, corpus)
    records = len(corpus.tokens.rows)
    # The ledger holds the rate of a unit's own group, which with b bands is b times the plain sample rate.
    charged = min(target.contents.composition, key=lambda release: release.sample_rate)
    bands, run_id = len(charged.coefficients) or 1, target.contents.header.run_id
    rate = plan_of(cell.training, len(units), expected_batch_size, cell.delta).sample_rate
    filled = units.with_slots(np.ones(cell.crafted, dtype=bool))
    absent = np.zeros(records, dtype=bool) if corpus.absent is None else corpus.absent
    if charged.sampler.name == "balls_in_bins":
        bins = Bins.toss(charged.sampler.batches, keys_of(filled), OsEntropy())
        return {"sampling": audit_bins(filled, absent, bins, 1 - target.alarm_confidence, OsEntropy()).to_dict()}
    found = audit_draw(
        filled,
        absent,
        min(1.0, bands * rate),
        charged.sample_rate,
        1 - target.alarm_confidence,
        OsEntropy(),
        [Turn.of(run_id, bands, row, charged.dealt_by) for row in range(bands)],
        charged.sampler.max_batch or None,
    )
    return {"sampling": found.to_dict()}


def step_attack(target: Target) -> dict[str, Any]:
    """Attack the cell's mechanism with made-up gradients: one private step, and whole runs of its twin.

    Raises: DataError if the step that was attacked is none that the ledger was charged for.
    """
    if not target.settings.step_trials:
        return {}
    alone = not any(release.coefficients for release in target.contents.composition)
    return (_one_step(target) if alone else {}) | _whole_run(target)


def _mechanism(target: Target, noise: float) -> tuple[Mechanism, bool]:
    """The cell's mechanism with this noise, and whether a hyper-policy was left out: it moves the radii only, which
    attacks scale away.
    """
    dimension = int(dict(next(iter(target.contents.composition)).claims).get("dimension", 0))
    model = target.adapted
    if target.cell.training.trained.train != "lora":  # a delivered checkpoint does not say what trained
        model = target.base.start(0, shared_copy(target.public))
    options = of_model(target.cell.mechanism, target.cell.options, len(groups_of(model)), dimension)
    if takes_noise(target.cell.mechanism, options):
        options["noise_multiplier"] = noise
    inherits = options.pop("init_from", None)
    return build(target.cell.mechanism, options), bool(inherits)


def _one_step(target: Target) -> dict[str, Any]:
    composition, settings = target.contents.composition, target.settings
    charged = min(composition, key=lambda release: release.noise_multiplier)
    mechanism, inherits = _mechanism(target, charged.noise_multiplier)
    found = audit_step(
        mechanism,
        trials=settings.step_trials,
        confidence=target.confidence(),
        delta=target.cell.delta,
        entropy=OsEntropy(),
    )
    # The ledger names what a hyper-policy leaked; that is no part of this step.
    attacked = replace(found.release, raw_inputs=charged.raw_inputs) if inherits else found.release
    check_audited(attacked, charged, RunFolder(target.directory).ledger)
    # The certified figures are those of the ledger, whatever was attacked; the attacked sample is in every batch.
    once = replace(charged, sample_rate=1.0, sampler=POISSON)
    certified = certificate(Counter({once: 1}), target.cell.delta)
    verdict = judged(found, certified, settings.false_alarms, target.checks)
    figures: dict[str, Any] = {
        "scene": found.scene,
        "trials": found.trials,
        "mu_audited": found.mu_audited,
        "epsilon_audited": found.epsilon_audited,
        **price(mechanism, Schedule(1.0, 1, target.cell.delta)).to_dict(),
        **verdict.to_dict(),
    }
    return {"step": figures | jsonable({key: value for key, value in figures.items() if isinstance(value, float)})}


def _whole_run(target: Target) -> dict[str, Any]:
    """Games on the twin of the cell's run; nothing where none can be played."""
    composition, header = target.contents.composition, target.contents.header
    # The most noise of any step: where it moved, the twin then leaks no more than the run.
    charged = max(composition, key=lambda release: release.noise_multiplier)
    mechanism, _ = _mechanism(target, charged.noise_multiplier)
    if unplayable(mechanism) is not None or not charged.sampler.like_poisson:  # games draw Poisson samples
        return {}
    bands = len(charged.coefficients) or 1
    schedule = Schedule(charged.sample_rate / bands, sum(composition.values()), target.cell.delta)
    if charged.coefficients:
        mechanism = as_charged(fitted(mechanism, schedule, bands), charged)
        own = mechanism.release(mechanism.knobs(), schedule.sample_rate, charged.part or 0)
        check_audited(own, charged, RunFolder(target.directory).ledger)
    found = audit_twin(
        mechanism,
        schedule,
        games=_GAMES * target.settings.step_trials,
        confidence=target.confidence(),
        false_alarms=1 - target.alarm_confidence,
        expected_batch_size=schedule.sample_rate * header.units,
        claimed_of=composition,
    )
    figures = found.to_dict()
    return {"whole_run": figures | jsonable({key: value for key, value in figures.items() if isinstance(value, float)})}


def check_audited(audited_release: Release, charged_release: Release, ledger: Path) -> None:
    """Check that the attacked step is the ledger's, but for the sample rate: else its audit is not about this run.

    Raises: DataError that names what differs.
    """
    expected = replace(charged_release, sample_rate=audited_release.sample_rate, sampler=audited_release.sampler)
    pairs = [(item.name, getattr(audited_release, item.name), getattr(expected, item.name)) for item in fields(Release)]
    different = [f"{name} {_shortly(ours)} in place of {_shortly(its)}" for name, ours, its in pairs if ours != its]
    if different:
        problem = f"was charged for another step than the one that was attacked, which has {'; '.join(different)}"
        raise DataError(problem, fix="audit with the code and options that the run was made with", file=ledger)


def _shortly(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)[:80]
