"""White-box audit of correlated noise: an attacker sees a unit's visit, and all rows that its noise reaches.

One row of correlated noise tells next to nothing; what is priced is the block of rows from a visit on. A trial plays
4 b - 1 rows of a new run on the attacker's batch: b in which the window fills; b of which the run's own draw, by group,
lets the attacked unit into one; and the others, for the rest of the block and for what a wrong recursion drags on. Two
attackers guess from the rows whether the unit is in the data: one decodes them by the announced strategy, the other
learns what tells the worlds apart. The first alone would be blind: it believes what the mechanism says of itself.

Trials play one unit of one run. That every unit of every run has one turn in b rows, on which the price rests, is no
matter of chance and is checked exactly, on many of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import toeplitz

from dptune.audit.epsilon_bounds import Cuts, best_cuts, errors
from dptune.audit.games.contract import check_released
from dptune.audit.games.scene import Fit, StepAudit, StepScene
from dptune.audit.games.step import SCENES, _check, _seen, _Stage, _subsampled
from dptune.core.errors import ConfigError
from dptune.core.plugins import naming_plugins
from dptune.core.progress import Meter
from dptune.mechanisms.mechanism import Mechanism
from dptune.privacy.entropy import Entropy
from dptune.training.privacy_units import Turn

#: Scenes of such an audit: radii do not move, so there is less to try than with one step of any mechanism.
ROW_SCENES = (SCENES[0], SCENES[2])
_PILOT_SHARE = 0.2
_PER_BAND = 40  # least number of pilot trials a band and world, from which the learned attack is fitted
_RUN = "audit"  # the id by which groups are dealt

Array = NDArray[np.float64]


def audit_rows(
    mechanism: Mechanism,
    *,
    trials: int,
    confidence: float,
    delta: float,
    entropy: Entropy,
    visits: int = 1,
    sample_rate: float = 1.0,
    scenes: Sequence[StepScene] = ROW_SCENES,
) -> StepAudit:
    """Bound mu and epsilon of ``visits`` visits of one unit to a run with correlated noise from below.

    Guarantee: if a unit's visits are mu-GDP (or (epsilon, delta)-DP) when it enters each row of its group with
    probability ``sample_rate``, then ``mu_audited <= mu`` (or ``epsilon_audited <= epsilon``) with probability
    ``confidence``. Pilot trials choose scene, attack and threshold; only the others count. Visits are played in runs of
    their own, which shows the same or less than one long run.

    Args:
        mechanism: a mechanism of two or more bands that is not yet started; it is copied, never changed.
        trials: runs in each world, a fifth of them to choose the attack.
        sample_rate: p, that of a unit in the rows of its own group.

    Raises: ConfigError for too few trials, one band, or what is out of range; and as ``audit_step`` of what a step
        releases.
    """
    _check(trials, confidence, delta, visits, sample_rate)
    pilot, bands = int(trials * _PILOT_SHARE), mechanism.bands
    if bands < 2:
        raise ConfigError("bands", f"{mechanism.name} has one, so its steps are independent", fix="use audit_step")
    if pilot < _PER_BAND * bands:
        least = int(_PER_BAND * bands / _PILOT_SHARE)
        raise ConfigError("trials", f"{trials} are too few for {bands} bands", fix=f"use {least} or more")
    counted, rows = trials - pilot, 4 * bands - 1
    total = 1 + 2 * rows * (len(scenes) * pilot + counted * visits)
    about = f"mechanisms.{mechanism.name}"
    with naming_plugins(about, mechanism.modules), Meter(f"audit {mechanism.name}", total=total, unit="rows") as meter:
        stage = _Stage.of(mechanism, 4 * bands, sample_rate / bands, delta, entropy, meter)
        attacks = [_choose(stage, scene, pilot, counted, confidence) for scene in scenes]
        best = max(attacks, key=lambda attack: attack.cuts.promise)
        inside, outside = (_scores(stage, best, world, counted, visits, sample_rate) for world in (True, False))
        fault = fault_of_deal(bands) or stage.noise_fault()
    knobs = stage.knobs(stage.mechanism)
    return StepAudit(
        best.scene.name,
        trials,
        confidence,
        visits,
        sample_rate,
        delta,
        stage.mechanism.release(knobs, sample_rate / bands),
        mu_errors=errors(inside, outside, best.cuts.for_mu),
        epsilon_errors=errors(inside, outside, best.cuts.for_epsilon),
        fault=fault,
    )


def fault_of_deal(bands: int, runs: int = 20, units: int = 500) -> str | None:
    """A sentence on a unit that has more or fewer turns than one in ``bands`` rows that follow one another; None if all
    of ``units`` units in each of ``runs`` runs have one, in 3 ``bands`` rows.
    """
    keys = np.arange(units, dtype=np.int64) * 7919
    for run in range(runs):
        turns = [Turn.of(f"{_RUN} {run}", bands, row) for row in range(3 * bands)]
        held = np.array([turn.holds(keys) for turn in turns if turn is not None])
        for first in range(2 * bands + 1):
            count = held[first : first + bands].sum(axis=0)
            if (wrong := np.flatnonzero(count != 1)).size:
                unit = wrong[0]
                return (
                    f"the unit of key {keys[unit]} has {count[unit]} turns in the {bands} rows from row {first} on, "
                    "where the price holds for one: groups are not dealt once for a run"
                )
    return None


@dataclass(frozen=True)
class _RowAttack:
    """A scene, the weights of its rows, and the thresholds that did best in the pilot."""

    scene: StepScene
    weights: Array
    fit: Fit
    cuts: Cuts

    def ratios(self, rows: Array) -> Array:
        return self.fit.log_ratio((rows @ self.weights)[:, None])


def _choose(stage: _Stage, scene: StepScene, pilot: int, counted: int, confidence: float) -> _RowAttack:
    """Fit both attackers on one half of the pilot, and choose between them on the other."""
    inside, outside = (_trials(stage, scene, world, pilot, 1.0) for world in (True, False))
    half = pilot // 2
    attacks = []
    for weights in (_decoder(stage.mechanism, len(inside[0])), _learned(inside[:half], outside[:half])):
        seen = [(values @ weights)[:, None] for values in (inside, outside)]
        fit = Fit.of(seen[0][:half], seen[1][:half], power=2, one_spread=True)
        scores = [fit.log_ratio(values[half:]) for values in seen]
        cuts = best_cuts(scores[0], scores[1], counted, stage.delta, confidence)
        attacks.append(_RowAttack(scene, weights, fit, cuts))
    return max(attacks, key=lambda attack: attack.cuts.promise)


def _decoder(mechanism: Mechanism, rows: int) -> Array:
    """(rows,) weights of the matched filter of the announced strategy, from the attacked unit's row on."""
    strategy, bands = np.array(mechanism.coefficients), mechanism.bands
    column = np.concatenate([strategy, np.zeros(rows - bands)])
    decode = toeplitz(column, np.zeros(rows))
    visit = next((row for row in range(bands, 2 * bands) if _holds(bands, row)), bands)
    weights = np.zeros(rows)
    weights[visit : visit + bands] = strategy
    return np.asarray(weights @ decode)


def _learned(inside: Array, outside: Array) -> Array:
    """(rows,) weights that tell the worlds apart best if rows are normal: S^-1 times the difference of means."""
    pooled = (np.cov(inside.T) + np.cov(outside.T)) / 2
    scale = float(np.trace(pooled)) / len(pooled) or 1.0
    pooled += 1e-9 * scale * np.eye(len(pooled))
    return np.asarray(np.linalg.solve(pooled, inside.mean(axis=0) - outside.mean(axis=0)))


def _holds(bands: int, row: int) -> bool:
    turn = Turn.of(_RUN, bands, row)
    return turn is not None and bool(turn.holds(np.zeros(1, dtype=np.int64))[0])


def _scores(stage: _Stage, attack: _RowAttack, world: bool, trials: int, visits: int, sample_rate: float) -> Array:
    """(trials,) log-likelihood ratios of all visits of a trial."""
    total = np.zeros(trials)
    for _ in range(visits):
        rows = _trials(stage, attack.scene, world, trials, sample_rate)
        total += _subsampled(attack.ratios(rows), sample_rate)
    return total


def _trials(stage: _Stage, scene: StepScene, world: bool, count: int, sample_rate: float) -> Array:
    """(count, rows) what the attacker sees of each row: along the sample's direction, less what others add."""
    project = _projection(stage, scene)
    return np.stack([_play(stage, scene, world, sample_rate, project) for _ in range(count)])


def _projection(stage: _Stage, scene: StepScene) -> Callable[[Array], float]:
    exact = stage.exact(scene)
    assert exact is not None  # correlated noise goes with no controller that reads raw statistics
    inside, outside = exact
    direction = (inside - outside) / np.linalg.norm(inside - outside)
    return lambda seen: float((seen - outside) @ direction)


def _play(stage: _Stage, scene: StepScene, world: bool, sample_rate: float, project: Callable[[Array], float]) -> Array:
    """(rows,) one run; in its middle rows the attacked unit is drawn by the code that draws for runs."""
    mechanism, bands, found = stage.fresh(), stage.mechanism.bands, []
    knobs = stage.knobs(mechanism)
    for row in range(4 * bands - 1):
        middle = bands <= row < 2 * bands
        turn = Turn.of(_RUN, bands, row)
        drawn = middle and bool(stage.slots[world].draw(sample_rate, stage.entropy, turn))
        stage.meter.update(stage.meter.done + 1)
        released = mechanism.privatise(stage.batch(scene, drawn), stage.zeros, knobs, 1.0, stage.entropy, list, row)
        check_released(mechanism, knobs, released, stage.zeros, None)  # with correlated noise there are no statistics
        found.append(project(_seen(mechanism, knobs, released)))
    return np.array(found)
