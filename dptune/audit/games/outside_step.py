"""Audit of a private step that somebody else wrote: a function from a batch of gradients to the noisy gradient.

The auditor makes batches with and without one unit, calls the function many times on each, and guesses from what it
returns whether the unit was in. Right guesses bound mu of Gaussian DP from below, whatever the function does inside.
A step that is as noisy as claimed is 1 / noise_multiplier-GDP about a unit that surely is in the batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Le
from numpy.typing import NDArray

from dptune.audit.epsilon_bounds import Cuts, best_cuts, errors
from dptune.audit.games.scene import Fit, StepAudit
from dptune.core.declarations import Positive, check
from dptune.core.errors import ConfigError
from dptune.core.plugins import running
from dptune.core.progress import Meter
from dptune.privacy.entropy import Entropy
from dptune.privacy.release import Release

Rows = NDArray[np.float64]
#: Norms in units of ``max_grad_norm``: of the attacked unit's gradients, and of the others'.
_HUGE, _LARGE, _MODERATE = 1e4, 10.0, 3.0
#: Beside a part of 1, the square of this one is below half a unit in the last place of bfloat16.
_SMALL = 0.06
_NEAR = "alone, hardly above the clip norm"
_SCENE_TRIALS, _PILOT_SHARE, _FEWEST_TRIALS = 200, 0.2, 500
_DISCOUNT = 0.7
_MOST_NUMBERS = 10_000_000
_TOGETHER = 250  # number of releases that are scored together


@dataclass(frozen=True, kw_only=True)
class StepClaim:
    """The claim about a step, and the batches by which it is tested.

    Attributes:
        noise_multiplier: claimed noise multiplier: standard deviation of the noise on the sum of clipped gradients, in
            units of max_grad_norm.
        max_grad_norm: claimed clip norm of a unit's gradient.
        records: number of records in a batch with the attacked unit.
        parameters: length of each gradient.
        micro_batches: number of parts of a batch whose gradients the loop accumulates; above 1, FUNCTION gets a list of
            arrays.
        unit_records: number of records of the attacked unit; above 1, FUNCTION also gets the unit of each record.
        absent: in the world without the unit, its records are "removed" from the batch, or "zeroed" (for a loop whose
            batches have one fixed size).

    Example:
        >>> from dptune.audit.games.outside_step import StepClaim
        >>> StepClaim(noise_multiplier=2.0).release.noise_multiplier
        2.0
    """

    noise_multiplier: Positive
    max_grad_norm: Annotated[float, Ge(1e-20), Le(1e30)] = 1.0
    records: Annotated[int, Ge(2), Le(10_000)] = 16
    parameters: Annotated[int, Ge(8), Le(100_000)] = 1024
    micro_batches: Annotated[int, Ge(1), Le(100)] = 1
    unit_records: Annotated[int, Ge(1), Le(1000)] = 1
    absent: Literal["removed", "zeroed"] = "removed"

    def __post_init__(self) -> None:
        check(self)
        if self.records * self.parameters > _MOST_NUMBERS:
            problem = f"{self.records} records of {self.parameters} parameters are too many numbers for one batch"
            raise ConfigError("parameters", problem, fix=f"use {_MOST_NUMBERS // self.records} or fewer")
        if self.records < self.unit_records + self.micro_batches:
            problem = f"{self.records} cannot hold a unit's records and one record in each of the micro-batches"
            least = self.unit_records + self.micro_batches
            raise ConfigError("records", problem, fix=f"use {least} or more (unit_records + micro_batches)")

    @property
    def release(self) -> Release:
        """The release that a ledger is charged for one step on a batch that surely holds the unit."""
        return Release(1.0, self.noise_multiplier)


@dataclass(frozen=True)
class _Scene:
    """A pair of batches, with and without the unit.

    Attributes:
        direction: (parameters,) unit vector along which the unit's gradient, if clipped, moves the sum.
        batches: for each world the arguments of FUNCTION.
    """

    name: str
    direction: Rows
    batches: dict[bool, tuple[Any, ...]]

    def words(self, world: bool) -> str:
        """The batch in words, for errors."""
        parts = self.batches[world][0]
        count = len(parts) if isinstance(parts, np.ndarray) else sum(map(len, parts))
        return f"on a batch of {count} records (scene {self.name!r})"


def scenes_of(claim: StepClaim) -> list[_Scene]:
    """The batches that may move a release most: by the unit alone, by a gradient that is hardly clipped, against
    others, through rounding of the norm."""
    others = claim.records - claim.unit_records
    even = np.full(claim.parameters, claim.parameters**-0.5)
    uneven = np.full(claim.parameters, _SMALL)
    uneven[0] = 1.0
    uneven /= np.linalg.norm(uneven)
    made = [
        ("alone", even, np.zeros(others)),
        (_NEAR, even, np.zeros(others)),
        ("against the others", even, np.full(others, -_LARGE)),
    ]
    made.append(("one large part and many small ones", uneven, np.zeros(others)))
    if claim.absent == "removed" and claim.micro_batches == 1:
        made.append(("the only record" if claim.unit_records == 1 else "the only unit", even, np.zeros(0)))
    ways = ("", ", spread over micro-batches") if claim.micro_batches > 1 and claim.unit_records > 1 else ("",)
    return [
        _Scene(
            name + way,
            unit,
            {
                world: _batch(claim, unit, multiples, world, bool(way), _MODERATE if name == _NEAR else _HUGE)
                for world in (True, False)
            },
        )
        for name, unit, multiples in made
        for way in ways
    ]


def _batch(
    claim: StepClaim, direction: Rows, others: Rows, world: bool, spread: bool, size: float = _HUGE
) -> tuple[Any, ...]:
    """The arguments of FUNCTION. The unit has number 0, and its records are last in their micro-batches."""
    number, parts = claim.unit_records, claim.micro_batches
    rows = np.split(np.arange(len(others)), np.linspace(0, len(others), parts + 1).astype(int)[1:-1])
    places = [parts - 1 - index % parts if spread else parts - 1 for index in range(number)]
    gradients, units = [], []
    for part, mine in enumerate(rows):
        own = places.count(part) if world or claim.absent == "zeroed" else 0
        multiples = np.concatenate([others[mine], np.full(own, size if world else 0.0)])
        gradients.append((multiples[:, None] * direction * claim.max_grad_norm).astype(np.float32))
        units.append(np.concatenate([mine + 1, np.zeros(own, dtype=np.int64)]))
    arguments: tuple[Any, ...] = (gradients if parts > 1 else gradients[0],)
    return (*arguments, units if parts > 1 else units[0]) if number > 1 else arguments


def audit_outside_step(
    step: Callable[..., Any],
    claim: StepClaim,
    *,
    trials: int,
    confidence: float,
    delta: float,
    entropy: Entropy,
    name: str = "FUNCTION",
) -> StepAudit:
    """Bound mu and epsilon of one call of somebody else's step from below.

    Guarantee: if each call is mu-GDP (or (epsilon, delta)-DP) about one unit in or out, and calls are independent, then
    ``mu_audited <= mu`` (or ``epsilon_audited <= epsilon``) with probability ``confidence``. Pilot calls choose scene,
    score and threshold; only the others count, and the two worlds come in random order. Two calls on one batch that
    return the same numbers are a fault of their own: they share their noise, or have none.

    Args:
        step: FUNCTION. It gets a (records, parameters) float32 array, each row the gradient of one record before
            clipping; with micro-batches, a list of them; with several records of a unit, also the units of the rows, in
            the same form. It returns a vector of ``parameters`` numbers: what its optimizer would get, a sum or a mean.
            Every call must start from the same state.
        trials: calls in each world, a fifth of them to choose the attack; scenes are chosen before.
        entropy: source of the order of the worlds.
        name: what the user named, for errors.

    Raises: ConfigError for too few trials; for a step that raises, or returns other than finite numbers of that shape.

    Example:
        >>> import numpy as np
        >>> from dptune.audit.games.outside_step import StepClaim, audit_outside_step
        >>> from dptune.privacy.entropy import OsEntropy
        >>> noise = np.random.default_rng()
        >>> def averaged_before_it_is_clipped(gradients):
        ...     mean = gradients.sum(axis=0) / 16
        ...     mean /= max(1, np.linalg.norm(mean))
        ...     return mean + noise.normal(size=mean.shape) / 16
        >>> found = audit_outside_step(averaged_before_it_is_clipped, StepClaim(noise_multiplier=1.0), trials=500,
        ...                            confidence=0.999, delta=1e-5, entropy=OsEntropy())
        >>> found.mu_audited > 1
        True
    """
    if trials < _FEWEST_TRIALS:
        raise ConfigError("trials", f"{trials} is below {_FEWEST_TRIALS}", fix="use thousands")
    scenes, pilot = scenes_of(claim), int(trials * _PILOT_SHARE)
    counted = trials - pilot
    with Meter(f"audit {name}", total=2 * (len(scenes) * _SCENE_TRIALS + trials), unit="calls") as meter:
        calls = _Calls(step, name, claim, np.random.default_rng(entropy.words(4)), meter)
        looks = [_attack(calls, scene, _SCENE_TRIALS, counted, delta, confidence) for scene in scenes]
        chosen = max(looks, key=lambda attack: attack.cuts.promise).scene
        best = _attack(calls, chosen, pilot, counted, delta, confidence)
        inside, outside = calls.scores(best, counted)
    return StepAudit(
        best.scene.name,
        trials,
        confidence,
        1,
        1.0,
        delta,
        claim.release,
        mu_errors=errors(inside, outside, best.cuts.for_mu),
        epsilon_errors=errors(inside, outside, best.cuts.for_epsilon),
        fault=calls.fault,
    )


@dataclass(frozen=True)
class _Guess:
    """A way to guess: a scene, with the score and the thresholds that did best in the pilot calls."""

    scene: _Scene
    fit: Fit
    few: bool
    cuts: Cuts

    def score(self, releases: Rows) -> Rows:
        """(rows,) log-likelihood ratios."""
        return self.fit.log_ratio(_features(self.scene, releases) if self.few else releases)


@dataclass
class _Calls:
    """Calls of the user's step, and what was noticed at them.

    Attributes:
        seen: for each scene and world the digests of all releases.
        fault: releases that repeat, in words; None if none did.
    """

    step: Callable[..., Any]
    name: str
    claim: StepClaim
    coins: np.random.Generator
    meter: Meter
    seen: dict[tuple[str, bool], set[bytes]] = field(default_factory=dict)
    fault: str | None = None

    def release(self, scene: _Scene, world: bool) -> Rows:
        """(parameters,) what one call returns. Raises: ConfigError as ``audit_outside_step``."""
        # PyTorch says of a batch of another width only which two shapes it could not multiply.
        fix = f"mend it; if it expects other gradients than of {self.claim.parameters} numbers, set their number: "
        with running(self.name, scene.words(world), f"{fix}--set parameters=N"):
            returned = self.step(*(_copied(one) for one in scene.batches[world]))
            values = _numbers(returned)
        self.meter.update(self.meter.done + 1)
        problem = None
        if values is None or values.shape != (self.claim.parameters,):
            found = f"a {type(returned).__name__}" if values is None else f"an array of shape {values.shape}"
            problem = f"returned {found} instead of {self.claim.parameters} numbers"
        elif not np.isfinite(values).all():
            problem = f"returned {'nan' if np.isnan(values).any() else 'infinity'}"
        if values is None or problem:
            fix = "return the noisy gradient as one finite vector, for empty batches and huge gradients too"
            raise ConfigError(self.name, f"{problem} {scene.words(world)}", fix=fix)
        made = hashlib.blake2b(values.tobytes(), digest_size=16).digest()
        if made in (seen := self.seen.setdefault((scene.name, world), set())):
            self.fault = (
                f"two calls {scene.words(world)} returned the same numbers: the noise is used twice, or there is none"
            )
        seen.add(made)
        return values

    def releases(self, scene: _Scene, count: int) -> tuple[Rows, Rows]:
        """(count, parameters) releases in each world, which come in random order."""
        worlds = self.coins.permutation(np.repeat([True, False], count))
        rows = np.stack([self.release(scene, bool(world)) for world in worlds])
        return rows[worlds], rows[~worlds]

    def scores(self, attack: _Guess, count: int) -> tuple[Rows, Rows]:
        """(count,) scores in each world."""
        parts = [min(_TOGETHER, count - done) for done in range(0, count, _TOGETHER)]
        pairs = [tuple(map(attack.score, self.releases(attack.scene, part))) for part in parts]
        inside, outside = (np.concatenate(side) for side in zip(*pairs, strict=True))
        return inside, outside


def _attack(calls: _Calls, scene: _Scene, pilot: int, trials: int, delta: float, confidence: float) -> _Guess:
    """Fit scores on half of the pilot's calls; choose the score and its thresholds on the other half."""
    inside, outside = calls.releases(scene, pilot)
    half, attacks = pilot // 2, []
    for few, same in ((True, True), (True, False), (False, True)):
        sides = [_features(scene, one) if few else one for one in (inside, outside)]
        fit = Fit.of(sides[0][:half], sides[1][:half], power=2, one_spread=same)
        scores = [fit.log_ratio(one[half:]) for one in sides]
        cuts = best_cuts(scores[0], scores[1], trials, delta, confidence)
        attacks.append(_Guess(scene, fit, few, cuts))
    # A fit of all coordinates to a few pilot calls may be lucky: it must be clearly better than one of two numbers.
    return max(attacks, key=lambda attack: attack.cuts.promise * (1.0 if attack.few else _DISCOUNT))


def _features(scene: _Scene, releases: Rows) -> Rows:
    """(rows, 2) length of a release along the unit's direction, which shows a shift, and logarithm of its length
    across, which shows the noise: two numbers are fitted far better to a few pilot calls than all coordinates."""
    along = releases @ scene.direction
    across = np.maximum((releases**2).sum(axis=1) - along**2, 1e-300)
    return np.stack([along, np.log(across)], axis=1)


def _copied(argument: Any) -> Any:
    """A copy, for a step may change what it is given."""
    return argument.copy() if isinstance(argument, np.ndarray) else [one.copy() for one in argument]


def _numbers(returned: Any) -> Rows | None:
    """The returned vector in float64; None if it is not made of numbers. Tensors of any library are accepted."""
    if hasattr(returned, "detach"):  # torch
        returned = returned.detach().cpu().double().numpy()
    try:
        return None if returned is None else np.array(returned, dtype=np.float64)
    except (TypeError, ValueError):
        return None
