"""White-box audit of the private step: an attacker calls ``privatise`` with batches of their own.

The attacker builds the batch, adds or leaves out one sample, sees everything that the step releases, and guesses
whether the sample was in. Their right guesses bound mu and epsilon from below, whatever any accountant says. The
attack only reads releases: noises need not be Gaussian, nor controllers sound.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from dptune.audit.epsilon_bounds import Cuts, best_cuts, errors
from dptune.audit.games.contract import check_knobs, check_parts, check_released, check_statistics
from dptune.audit.games.layer_step import LayerModel
from dptune.audit.games.noise_check import noise_fault
from dptune.audit.games.scene import Fit, StepAudit, StepScene
from dptune.core.errors import ConfigError
from dptune.core.plugins import naming_plugins
from dptune.core.progress import Meter
from dptune.core.settings import RECORD
from dptune.mechanisms.gradient_interfaces import Gradients
from dptune.mechanisms.interfaces import Knobs, Observation, Released, RunFacts
from dptune.mechanisms.mechanism import Mechanism
from dptune.privacy.entropy import Entropy, OsEntropy
from dptune.privacy.release import Release
from dptune.training.privacy_units import PrivacyUnits

#: Number of parameters of every pair of the attacker's model: with one, a gradient would have no direction.
PAIR_SIZE = 2
_HUGE, _LARGE, _TINY = 1e6, 1e3, 1e-6
_SCENE_TRIALS = 200
_PILOT_SHARE = 0.2
_FEWEST_TRIALS = 500
_TOGETHER = 1000  # number of trials whose releases are scored together


#: Scenes that may move a release most: by the sample alone, against others, through a quantile, counts or losses.
SCENES = (
    StepScene("alone", (), _HUGE),
    StepScene("against one other", (-_LARGE,), _HUGE, apart=True),
    StepScene("against many others", (-_LARGE,) * 8, _HUGE),
    StepScene("tips the median norm", (_TINY, _TINY, _HUGE, _HUGE), _HUGE),
    StepScene("without a gradient", (), 0.0),
    StepScene("with a huge loss", (), _HUGE, 1e6),
    StepScene("without a loss", (), _HUGE, 0.0),
)


@dataclass(frozen=True)
class _Batch:
    """Gradients (``dptune.mechanisms.gradient_interfaces.Gradients``) that are multiples of one direction."""

    multiples: torch.Tensor
    direction: list[torch.Tensor]
    lengths: torch.Tensor
    unit_losses: torch.Tensor

    def norms(self) -> torch.Tensor:
        return self.multiples.abs()[:, None] * self.lengths

    def tokens(self) -> torch.Tensor:
        return torch.ones_like(self.losses())

    def losses(self) -> torch.Tensor:
        return self.unit_losses

    def weighted_sum(self, factors: torch.Tensor) -> list[torch.Tensor]:
        weights = (factors.double() * self.multiples[:, None]).sum(dim=0)
        return list(torch._foreach_mul(self.direction, list(weights.unbind())))

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
    scenes: Sequence[StepScene] = SCENES,
    own: LayerModel | None = None,
) -> StepAudit:
    """Bound mu and epsilon of ``steps`` composed private steps from below.

    Noise that is missing, or not fresh, in some coordinate is a fault by itself (``noise_check``).

    Guarantee: if the releases of ``steps`` calls of ``privatise`` are mu-GDP (or (epsilon, delta)-DP) about one sample
    that enters each batch with probability ``sample_rate``, then ``mu_audited <= mu`` (or ``epsilon_audited <=
    epsilon``) with probability ``confidence``. Pilot trials choose scene, score and threshold; only the others count.

    A controller may move radii and weights between steps, but the noise multiplier of the first step is kept.

    Args:
        mechanism: a mechanism that is not yet started; it is copied, never changed.
        trials: runs of the steps in each world, a fifth of them to choose the attack; scenes are chosen before.
        entropy: source of noise and coins.
        own: a model whose own weights train, with scenes of its own in place of ``scenes``; None takes gradients that
            the attacker made.

    Raises: ConfigError for too few trials, a confidence, sample rate or delta out of range, or correlated noise; and
        for a step that releases anything but finite vectors, or a plug-in that raises: nothing would be shown of it.
    """
    _check(trials, confidence, delta, steps, sample_rate)
    if mechanism.bands > 1:
        problem = f"{mechanism.name} has {mechanism.bands}, and a single step of it reveals next to nothing"
        raise ConfigError("bands", problem, fix="use audit_rows")
    scenes = scenes if own is None else own.scenes
    pilot = int(trials * _PILOT_SHARE)
    counted = trials - pilot
    total = 1 + 2 * (len(scenes) * _SCENE_TRIALS + pilot + counted * steps)  # 1: the step that opens the stage
    about = f"mechanisms.{mechanism.name}"
    with naming_plugins(about, mechanism.modules), Meter(f"audit {mechanism.name}", total=total, unit="steps") as meter:
        stage = _Stage.of(mechanism, steps, sample_rate, delta, entropy, meter, own)
        looks = [_attack(stage, scene, _SCENE_TRIALS, counted, confidence) for scene in scenes]
        scene = max(looks, key=lambda attack: attack.cuts.promise).scene
        best = _attack(stage, scene, pilot, counted, confidence)
        inside, outside = (_scores(stage, best, world, counted) for world in (True, False))
        charged, fault = stage.charged(), stage.noise_fault()
    return StepAudit(
        best.scene.name,
        trials,
        confidence,
        steps,
        sample_rate,
        delta,
        charged,
        mu_errors=errors(inside, outside, best.cuts.for_mu),
        epsilon_errors=errors(inside, outside, best.cuts.for_epsilon),
        fault=fault,
    )


@dataclass(frozen=True)
class _Stage:
    """A started mechanism that the attacker can run from its first state, again and again.

    Attributes:
        noise_multiplier: noise multiplier of every step. If a controller moved it after the opening step, another step
            would be audited than the one that was asked for.
    """

    mechanism: Mechanism
    noise_multiplier: float
    direction: list[torch.Tensor]
    lengths: torch.Tensor
    zeros: list[torch.Tensor]
    steps: int
    sample_rate: float
    delta: float
    entropy: Entropy
    meter: Meter
    slots: dict[bool, PrivacyUnits]
    own: LayerModel | None
    batches: dict[tuple[StepScene, bool], list[Gradients]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        mechanism: Mechanism,
        steps: int,
        sample_rate: float,
        delta: float,
        entropy: Entropy,
        meter: Meter,
        own: LayerModel | None = None,
    ) -> _Stage:
        started = copy.deepcopy(mechanism)
        check_knobs(started, started.knobs())
        sizes = (PAIR_SIZE,) * mechanism.pairs if own is None else tuple(group.size for group in own.groups)
        started.start(RunFacts(sizes, torch.device("cpu"), 1.0, sample_rate, steps + 1, None, delta))
        direction = [torch.ones(size, dtype=torch.float64) for size in sizes]
        lengths = torch.stack([part.norm() for part in direction])
        zeros = [torch.zeros_like(part) for part in direction]
        # The attacker's unit has a slot, which is empty in the world without it.
        one = np.zeros(1, dtype=np.int64)
        slots = {world: PrivacyUnits.of(RECORD, one, 1, np.array([not world])) for world in (True, False)}
        check_knobs(started, started.knobs())
        noise_multiplier = started.knobs().noise_multiplier
        stage = cls(
            started, noise_multiplier, direction, lengths, zeros, steps, sample_rate, delta, entropy, meter, slots, own
        )
        scenes = SCENES if own is None else own.scenes
        batches = [stage.batch(scene, world) for scene in scenes for world in (True, False)]
        for batch in batches:
            probed = copy.deepcopy(started)  # its noise may remember what it drew
            check_parts(probed, stage.knobs(probed), batch, zeros, OsEntropy())
        # Run a step on an empty batch first: until then a controller may lack what its statistics need (a public loss).
        released = stage.release(started, stage.knobs(started), StepScene("nothing", (), 0.0), with_sample=False)
        started.controller.observe(_observation(started, released, 0, steps + 1))
        for batch in batches:
            check_statistics(started, stage.knobs(started), batch)
        return stage

    def fresh(self) -> Mechanism:
        """The mechanism in its state before any trial: a copy, or itself if steps never change it."""
        remembers = self.steps > 1 or self.mechanism.controller.raw_inputs
        return copy.deepcopy(self.mechanism) if remembers else self.mechanism

    def knobs(self, mechanism: Mechanism) -> Knobs:
        """Knobs of the mechanism's next step, with the stage's noise multiplier."""
        knobs = mechanism.knobs()
        check_knobs(mechanism, knobs)
        return replace(knobs, noise_multiplier=self.noise_multiplier)

    def charged(self) -> Release:
        """The release that a ledger is charged for the first step of a trial."""
        return self.mechanism.release(self.knobs(self.mechanism), self.sample_rate)

    def noise_fault(self) -> str | None:
        """What is wrong with the noise of some block, in a sentence; None if nothing was seen (``contract``)."""
        probed = copy.deepcopy(self.mechanism)
        scenes = SCENES if self.own is None else self.own.scenes
        batches = [self.batch(scene, True) for scene in scenes]
        names = [] if self.own is None else [group.name for group in self.own.groups]
        return noise_fault(probed, self.knobs(probed), batches, self.zeros, OsEntropy(), names)

    def drawn(self, world: bool) -> bool:
        """Draw whether the sample enters a batch, by the code that runs use."""
        return bool(self.slots[world].draw(self.sample_rate, self.entropy))

    def exact(self, scene: StepScene) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
        """The releases in and out without noise, which the attacker can compute; None if the batch moves the noise.

        They are in the units of ``_seen``.
        """
        mechanism = self.mechanism
        if mechanism.controller.raw_inputs or not mechanism.private:
            return None
        knobs = self.knobs(mechanism)
        sums = (mechanism.exact_sums(self.batch(scene, world), self.zeros, knobs) for world in (True, False))
        inside, outside = (_in_units(mechanism, knobs, blocks) for blocks in sums)
        return inside, outside

    def release(self, mechanism: Mechanism, knobs: Knobs, scene: StepScene, with_sample: bool) -> Released:
        """Run one step on the scene's batch. Raises: ConfigError if it releases anything but finite vectors."""
        self.meter.update(self.meter.done + 1)
        statistics = mechanism.statistics(knobs)
        released = mechanism.privatise(self.batch(scene, with_sample), self.zeros, knobs, 1.0, self.entropy)
        check_released(mechanism, knobs, released, self.zeros, None if statistics is None else statistics.empty)
        return released

    def batch(self, scene: StepScene, with_sample: bool) -> list[Gradients]:
        """Micro-batches of the scene, which are made at the first call."""
        made = self.batches.get((scene, with_sample))
        if made is None:
            made = self.batches[scene, with_sample] = self._made(scene, with_sample)
        return made

    def _made(self, scene: StepScene, with_sample: bool) -> list[Gradients]:
        if self.own is not None:
            return self.own.batches(scene, with_sample)
        rows = [(multiple, 1.0) for multiple in scene.others]
        sample = [(scene.sample, scene.loss)] if with_sample else []
        parts = [rows, sample] if scene.apart else [rows + sample]
        columns = [torch.tensor(part, dtype=torch.float64).T for part in parts if part]
        return [_Batch(multiples, self.direction, self.lengths, losses) for multiples, losses in columns]


def _seen(mechanism: Mechanism, knobs: Knobs, released: Released) -> NDArray[np.float64]:
    """(coordinates,) all numbers of a release, in units of the noise that the public knobs state."""
    return _in_units(
        mechanism, knobs, [*released.blocks, *([released.statistics] if released.statistics is not None else [])]
    )


def _in_units(mechanism: Mechanism, knobs: Knobs, parts: list[torch.Tensor]) -> NDArray[np.float64]:
    scales = mechanism.scales(knobs) if mechanism.private else (1.0,) * len(parts)
    unit = knobs.noise_multiplier or 1.0
    units = np.repeat(scales, [part.numel() for part in parts]) * unit
    return torch.cat([part.flatten() for part in parts]).double().numpy() / units


@dataclass(frozen=True)
class _Attack:
    """A scene, with the score and the thresholds that did best in the pilot trials."""

    scene: StepScene
    fit: Fit
    cuts: Cuts


def _attack(stage: _Stage, scene: StepScene, pilot: int, trials: int, confidence: float) -> _Attack:
    """Fit scores on half of the pilot's steps; choose the score and its thresholds on the other half."""
    inside, outside = (_pilot_steps(stage, scene, world, pilot) for world in (True, False))
    half = pilot // 2
    kinds = ((2, True), (2, False), (1, True))
    fits = [Fit.of(inside[:half], outside[:half], power=power, one_spread=same) for power, same in kinds]
    fits += _known(stage.exact(scene), 2 if stage.mechanism.noise.family == "gaussian" else 1)
    rest = inside[half:], outside[half:]
    attacks = (_choose(stage, scene, fit, rest, trials, confidence) for fit in fits)
    return max(attacks, key=lambda attack: attack.cuts.promise)


def _known(exact: tuple[NDArray[np.float64], NDArray[np.float64]] | None, power: int) -> list[Fit]:
    """The score of an attacker who knows all but the noise: more exact than any that is fitted to a pilot."""
    if exact is None or not all(np.isfinite(centre).all() for centre in exact):
        return []
    ones = np.ones_like(exact[0])
    return [Fit(exact, (ones, ones), power)]


def _pilot_steps(stage: _Stage, scene: StepScene, with_sample: bool, count: int) -> NDArray[np.float64]:
    """(count, coordinates) releases of first steps, with the sample in every batch or in none."""
    return np.stack([_first_step(stage, scene, with_sample) for _ in range(count)])


def _choose(
    stage: _Stage,
    scene: StepScene,
    fit: Fit,
    steps: tuple[NDArray[np.float64], NDArray[np.float64]],
    trials: int,
    confidence: float,
) -> _Attack:
    """The score's best thresholds: those whose bounds would be highest if ``trials`` trials err like the pilot's."""
    inside, outside = _composed(stage, *(fit.log_ratio(values) for values in steps))
    cuts = best_cuts(inside, outside, trials, stage.delta, confidence)
    return _Attack(scene, fit, cuts)


def _composed(
    stage: _Stage, inside: NDArray[np.float64], outside: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Scores of whole runs, in and out, composed of the pilot's single steps, each used equally often."""
    generator = np.random.default_rng(stage.entropy.words(4))

    def columns(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.stack([generator.permutation(values) for _ in range(stage.steps)], axis=1)

    drawn = generator.random((len(inside), stage.steps)) < stage.sample_rate
    members, others = np.where(drawn, columns(inside), columns(outside)), columns(outside)
    return _subsampled(members, stage.sample_rate).sum(axis=1), _subsampled(others, stage.sample_rate).sum(axis=1)


def _scores(stage: _Stage, attack: _Attack, world: bool, trials: int) -> NDArray[np.float64]:
    """(trials,) log-likelihood ratios of whole runs; ``world`` is True if the sample is in the data."""
    if stage.steps > 1:
        return np.array([_run(stage, attack, world) for _ in range(trials)])
    parts = [min(_TOGETHER, trials - done) for done in range(0, trials, _TOGETHER)]
    ratios = (
        attack.fit.log_ratio(np.stack([_first_step(stage, attack.scene, stage.drawn(world)) for _ in range(part)]))
        for part in parts
    )
    return _subsampled(np.concatenate(list(ratios)), stage.sample_rate)


def _first_step(stage: _Stage, scene: StepScene, with_sample: bool) -> NDArray[np.float64]:
    mechanism = stage.fresh()
    knobs = stage.knobs(mechanism)
    return _seen(mechanism, knobs, stage.release(mechanism, knobs, scene, with_sample))


def _run(stage: _Stage, attack: _Attack, world: bool) -> float:
    mechanism, score = stage.fresh(), 0.0
    for step in range(stage.steps):
        knobs = stage.knobs(mechanism)
        released = stage.release(mechanism, knobs, attack.scene, stage.drawn(world))
        ratio = attack.fit.log_ratio(_seen(mechanism, knobs, released))
        score += float(_subsampled(ratio, stage.sample_rate))
        mechanism.controller.observe(_observation(mechanism, released, step + 1, stage.steps + 1))
    return score


def _observation(mechanism: Mechanism, released: Released, step: int, steps: int) -> Observation:
    """The observation for a controller, with constant public figures."""
    figures = {name: [1.0] * mechanism.pairs for name in ("product", "momentum", "second_moment")}
    return Observation(step + 1, released, (step + 1) / steps, lambda: 1.0, lambda: figures)


def _subsampled(ratios: NDArray[np.float64], sample_rate: float) -> NDArray[np.float64]:
    """Log-ratios when the sample enters a batch only sometimes: log(1 - q + q e^ratio)."""
    with np.errstate(divide="ignore"):
        return np.logaddexp(np.log1p(-sample_rate), np.log(sample_rate) + ratios) if sample_rate < 1 else ratios


def _check(trials: int, confidence: float, delta: float, steps: int, sample_rate: float) -> None:
    if trials < _FEWEST_TRIALS:
        raise ConfigError("trials", f"{trials} is below {_FEWEST_TRIALS}", fix="use thousands")
    if not 0 < confidence < 1:
        raise ConfigError("confidence", f"{confidence} is not in (0, 1)", fix="use 0.95, say")
    if not 0 <= delta < 1:
        raise ConfigError("delta", f"{delta} is not in [0, 1)", fix="use 1e-5, say")
    if steps < 1:
        raise ConfigError("steps", f"{steps} is below 1", fix="use 1 or more")
    if not 0 < sample_rate <= 1:
        raise ConfigError("sample_rate", f"{sample_rate} is not in (0, 1]", fix="use 1 for a sample in every batch")
