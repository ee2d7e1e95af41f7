"""White-box audit of the private step: drive ``privatise`` with an adversary's batches and see what gets out.

The attacker builds the batch, adds or leaves out one sample of their own, sees everything that the step releases,
and guesses which it was. What they get right bounds mu and epsilon from below, whatever any accountant says. The
attack reads a mechanism's releases only, not its inside: noises need not be Gaussian, controllers not be sound.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from dptune.audit.bounds import epsilon_from_errors, mu_from_errors
from dptune.errors import ConfigError
from dptune.mechanisms.mechanism import Gradients, Knobs, Mechanism, Observation, Released, RunFacts
from dptune.privacy.entropy import Entropy, uniform
from dptune.progress import Meter

#: Parameters of every pair that the attacker's model has: enough for a clipper to have a direction to keep.
PAIR_SIZE = 2
_HUGE, _TINY = 1e6, 1e-6
_PILOT_SHARE = 0.2
_SMALLEST_PILOT = 50
_FEWEST_TRIALS = 100
_MOST_COUNTED = 1e30


@dataclass(frozen=True)
class Scene:
    """What the attacker puts into a batch: multiples of one fixed direction.

    Attributes:
        name: for the report.
        others: the samples that are always there.
        sample: the one that is in or out.
        loss: of that sample.
    """

    name: str
    others: tuple[float, ...]
    sample: float
    loss: float = 1.0


#: One of them moves every mechanism by all it can: alone, against others, through a quantile, through counts.
SCENES = (
    Scene("alone", (), _HUGE),
    Scene("against one other", (-_HUGE,), _HUGE),
    Scene("against many others", (-_HUGE,) * 8, _HUGE),
    Scene("tips the median norm", (_TINY, _TINY, _HUGE, _HUGE), _HUGE),
    Scene("without a gradient", (), 0.0),
    Scene("with a huge loss", (), _HUGE, 1e6),
)


@dataclass(frozen=True)
class StepAudit:
    """The result, each bound at ``confidence`` by itself.

    Attributes:
        scene: which of ``SCENES`` the pilot trials found the most telling.
        trials: in each of the two worlds, pilot included.
        steps: composed in one trial.
        sample_rate: chance of the sample to enter a batch where it is in the data.
        mu_audited: lower bound on mu, if the releases are Gaussian DP.
        epsilon_audited: lower bound on epsilon at ``delta``, for any mechanism; at most about log(trials).
    """

    scene: str
    trials: int
    confidence: float
    steps: int
    sample_rate: float
    delta: float
    mu_audited: float
    epsilon_audited: float


@dataclass(frozen=True)
class _Batch:
    """Gradients that are multiples of a direction: ``dptune.mechanisms.mechanism.Gradients`` by hand."""

    multiples: torch.Tensor
    direction: list[torch.Tensor]
    unit_losses: torch.Tensor

    def norms(self) -> torch.Tensor:
        lengths = torch.stack([part.norm() for part in self.direction])
        return self.multiples.abs()[:, None] * lengths

    def losses(self) -> torch.Tensor:
        return self.unit_losses

    def weighted_sum(self, factors: torch.Tensor) -> list[torch.Tensor]:
        weights = (factors.double() * self.multiples[:, None]).sum(dim=0)
        return [weight * part for weight, part in zip(weights, self.direction, strict=True)]

    def matrix(self) -> torch.Tensor:
        return self.multiples[:, None] * torch.cat(self.direction)


def audit_step(
    mechanism: Mechanism,
    *,
    trials: int,
    confidence: float,
    delta: float,
    entropy: Entropy,
    steps: int = 1,
    sample_rate: float = 1.0,
    scenes: Sequence[Scene] = SCENES,
) -> StepAudit:
    """Bound mu and epsilon of ``steps`` composed private steps from below.

    Guarantee: if what ``steps`` calls of ``privatise`` release is mu-GDP (or (epsilon, delta)-DP) about one sample
    that enters each batch with probability ``sample_rate``, then ``mu_audited <= mu`` (or ``epsilon_audited <=
    epsilon``) with probability ``confidence``. Pilot trials choose scene, score and threshold; only the others count.

    Args:
        mechanism: not yet started; it is copied, never changed.
        trials: runs of the steps in each world.
        entropy: of noise and coins.

    Raises: ConfigError for too few trials, or a confidence, sample rate or delta out of range.
    """
    _check(trials, confidence, delta, steps, sample_rate)
    stage = _Stage(mechanism, steps, sample_rate, delta, entropy)
    pilot = max(_SMALLEST_PILOT, int(trials * _PILOT_SHARE))
    counted = trials - pilot
    total = len(scenes) * 2 * pilot + 2 * counted * steps
    with Meter(f"audit {mechanism.name}", total=total, unit="steps") as meter:
        attack = max(
            (_attack(stage, scene, pilot, counted, confidence, meter) for scene in scenes), key=lambda one: one.promise
        )
        scores = [_scores(stage, attack, world, counted, meter) for world in (True, False)]
    return StepAudit(
        attack.scene.name,
        trials,
        confidence,
        steps,
        sample_rate,
        delta,
        mu_audited=mu_from_errors(*_errors(scores, attack.cut_for_mu), confidence),
        epsilon_audited=epsilon_from_errors(*_errors(scores, attack.cut_for_epsilon), delta, confidence),
    )


@dataclass(frozen=True)
class _Stage:
    """A mechanism on the attacker's bench."""

    mechanism: Mechanism
    steps: int
    sample_rate: float
    delta: float
    entropy: Entropy
    direction: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        pairs = self.mechanism.pairs
        object.__setattr__(self, "direction", [torch.ones(PAIR_SIZE, dtype=torch.float64) for _ in range(pairs)])

    def started(self) -> Mechanism:
        """A fresh copy before its first step."""
        mechanism = copy.deepcopy(self.mechanism)
        sizes = (PAIR_SIZE,) * mechanism.pairs
        cpu = torch.device("cpu")
        mechanism.start(RunFacts(sizes, cpu, 1.0, self.sample_rate, max(self.steps, 2), None, self.delta))
        return mechanism

    def release(self, mechanism: Mechanism, knobs: Knobs, scene: Scene, with_sample: bool) -> Released:
        """One step on the scene's batch."""
        zeros = [torch.zeros_like(part) for part in self.direction]
        multiples = [*scene.others, *([scene.sample] if with_sample else [])]
        losses = [1.0] * len(scene.others) + ([scene.loss] if with_sample else [])
        batch: list[Gradients] = []
        if multiples:
            values = [torch.tensor(column, dtype=torch.float64) for column in (multiples, losses)]
            batch = [_Batch(values[0], self.direction, values[1])]
        return mechanism.privatise(batch, zeros, knobs, 1.0, self.entropy)


@dataclass(frozen=True)
class _Fit:
    """Means and variances of what a step releases, coordinate by coordinate, in the two worlds."""

    mean: tuple[NDArray[np.float64], NDArray[np.float64]]
    variance: tuple[NDArray[np.float64], NDArray[np.float64]]

    @classmethod
    def of(cls, inside: NDArray[np.float64], outside: NDArray[np.float64], pooled: bool) -> _Fit:
        variances = [np.maximum(values.var(axis=0), 1e-30) for values in (inside, outside)]
        if pooled:
            variances = [(variances[0] + variances[1]) / 2] * 2
        return cls((inside.mean(axis=0), outside.mean(axis=0)), (variances[0], variances[1]))

    def log_ratio(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """(rows,) log-likelihood ratios, "in" against "out"."""
        one, other = (
            -((values - mean) ** 2) / (2 * variance) - np.log(variance) / 2
            for mean, variance in zip(self.mean, self.variance, strict=True)
        )
        return np.clip((one - other).sum(axis=-1), -_MOST_COUNTED, _MOST_COUNTED)


@dataclass(frozen=True)
class _Attack:
    """A scene with the score and the thresholds that the pilot trials favour."""

    scene: Scene
    fit: _Fit
    cut_for_mu: float
    cut_for_epsilon: float
    promise: float


def _attack(stage: _Stage, scene: Scene, pilot: int, counted: int, confidence: float, meter: Meter) -> _Attack:
    """Fit on half of the pilot steps, choose on the other half."""
    inside, outside = (_pilot_steps(stage, scene, world, pilot, meter) for world in (True, False))
    half = pilot // 2
    return max(
        (
            _choose(stage, scene, fit, (inside[half:], outside[half:]), counted, confidence)
            for fit in (_Fit.of(inside[:half], outside[:half], pooled) for pooled in (True, False))
        ),
        key=lambda one: one.promise,
    )


def _pilot_steps(stage: _Stage, scene: Scene, world: bool, count: int, meter: Meter) -> NDArray[np.float64]:
    """(count, coordinates): single steps, the sample in every batch or in none."""
    mechanism = stage.started()
    knobs = mechanism.knobs()
    rows = []
    for _ in range(count):
        rows.append(_seen(stage.release(mechanism, knobs, scene, world)))
        meter.update(meter.done + 1)
    return np.stack(rows)


def _choose(
    stage: _Stage,
    scene: Scene,
    fit: _Fit,
    pilot: tuple[NDArray[np.float64], NDArray[np.float64]],
    counted: int,
    confidence: float,
) -> _Attack:
    """Thresholds that promise most for ``counted`` trials, judged by composed trials drawn from the pilot's steps."""
    generator = np.random.default_rng(stage.entropy.words(4))
    scores = [_composed(fit, pilot, world, stage, generator) for world in (True, False)]
    cuts = np.unique(np.quantile(np.concatenate(scores), np.linspace(0, 1, 101)))
    promised = []
    for cut in cuts:
        counts = _errors(scores, cut)
        scaled = [
            min(counted, round((errors + 0.5) * counted / of)) for errors, of in itertools.batched_pairs(counts)
        ] if False else [min(counted, round((counts[i] + 0.5) * counted / counts[i + 1])) for i in (0, 2)]
        errors = (scaled[0], counted, scaled[1], counted)
        promised.append(
            (mu_from_errors(*errors, confidence), epsilon_from_errors(*errors, stage.delta, confidence), float(cut))
        )
    best_mu = max(promised, key=lambda one: one[0])
    best_epsilon = max(promised, key=lambda one: one[1])
    return _Attack(scene, fit, best_mu[2], best_epsilon[2], promise=best_mu[0])
