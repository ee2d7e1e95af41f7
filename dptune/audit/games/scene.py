"""Scene, result and scores of an audit of the private step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dptune.audit.epsilon_bounds import epsilon_from_errors, mu_from_errors
from dptune.privacy.release import Release


@dataclass(frozen=True)
class StepScene:
    """The attacker's batch: gradients that are multiples of one fixed direction.

    Attributes:
        name: name of the scene in the report.
        others: multiples of the samples that are always in the batch.
        sample: multiple of the sample that is in or out.
        loss: loss of that sample; the others' losses and the public loss are 1.
        apart: whether the sample is in a micro-batch of its own.
    """

    name: str
    others: tuple[float, ...]
    sample: float
    loss: float = 1.0
    apart: bool = False


@dataclass(frozen=True)
class StepAudit:
    """The result of an audit; each bound holds by itself at ``confidence``.

    Attributes:
        scene: name of the scene among ``step.SCENES`` that did best in the pilot trials.
        trials: number of trials in each of the two worlds, those that chose the attack included.
        steps: number of steps composed in one trial.
        sample_rate: probability with which the sample, if in the data, enters a batch.
        release: release that the ledger of a run must be charged for each audited step.
        mu_errors, epsilon_errors: (missed, members, false alarms, others) of the two attacks that were counted.
        fault: what was seen to break a precondition of the price, with certainty; None if nothing was.
    """

    scene: str
    trials: int
    confidence: float
    steps: int
    sample_rate: float
    delta: float
    release: Release
    mu_errors: tuple[int, int, int, int]
    epsilon_errors: tuple[int, int, int, int]
    fault: str | None = None

    @property
    def mu_audited(self) -> float:
        """Lower bound on mu if the releases are Gaussian DP; else the mu of the Gaussian through the attack's point."""
        return mu_from_errors(*self.mu_errors, self.confidence)

    @property
    def epsilon_audited(self) -> float:
        """Lower bound on epsilon at ``delta``, for any mechanism; at most about log(trials)."""
        return epsilon_from_errors(*self.epsilon_errors, self.delta, self.confidence)

    def to_dict(self) -> dict[str, str | int | float]:
        """The figures that users read, in plain JSON types."""
        names = ("scene", "trials", "confidence", "steps", "sample_rate", "delta", "mu_audited", "epsilon_audited")
        return {name: getattr(self, name) for name in names}


# Scores that tell two worlds apart by the releases of a step, learned from trials in both worlds.


_ENOUGH_TO_POOL = 4


@dataclass(frozen=True)
class Fit:
    """Centres and spreads of each coordinate of a release, with the sample in and out.

    Attributes:
        centre: (coordinates,) centres in and out.
        spread: (coordinates,) spreads in and out.
        power: 2 for Gaussian scores (means, standard deviations), 1 for Laplace scores (medians, mean absolute
            deviations), which detect a shift under heavy tails far better.
    """

    centre: tuple[NDArray[np.float64], NDArray[np.float64]]
    spread: tuple[NDArray[np.float64], NDArray[np.float64]]
    power: int

    @classmethod
    def of(cls, inside: NDArray[np.float64], outside: NDArray[np.float64], *, power: int, one_spread: bool) -> Fit:
        """Fit centres and spreads to (trials, coordinates) releases in both worlds.

        Args:
            one_spread: give both worlds the same spread.
        """
        inside, outside = _numbers_only(inside), _numbers_only(outside)
        centres = [np.median(values, axis=0) if power == 1 else values.mean(axis=0) for values in (inside, outside)]
        moments = [
            np.maximum((np.abs(values - centre) ** power).mean(axis=0), 1e-30)
            for values, centre in zip((inside, outside), centres, strict=True)
        ]
        if one_spread:
            moments = [(moments[0] + moments[1]) / 2] * 2
        one, other = (moment ** (1 / power) for moment in moments)
        uncertainty = float((one**2 / len(inside) + other**2 / len(outside)).mean())
        half = _towards_their_mean(centres[0] - centres[1], uncertainty) / 2
        middle = (centres[0] + centres[1]) / 2
        return cls((middle + half, middle - half), (one, other), power)

    def log_ratio(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """(rows,) log-likelihood ratios of "in" against "out", as if coordinates were independent and of that law."""
        one, other = (
            -((np.abs(values - centre) / spread) ** self.power) / self.power - np.log(spread)
            for centre, spread in zip(self.centre, self.spread, strict=True)
        )
        return np.asarray((one - other).sum(axis=-1))


def _numbers_only(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The rows without NaN; all rows if each has one, for a fit that then tells nothing."""
    rows = np.isfinite(values).all(axis=1)
    return values[rows] if rows.any() else values


def _towards_their_mean(shifts: NDArray[np.float64], uncertainty: float) -> NDArray[np.float64]:
    """Shrink the shifts towards their mean, the more so the less they differ beyond uncertainty (James and Stein)."""
    if len(shifts) < _ENOUGH_TO_POOL or not uncertainty > 0:
        return shifts
    mean, spread = shifts.mean(), shifts.var(ddof=1)
    share = max(0.0, 1 - uncertainty / spread) if spread > 0 else 0.0
    return np.asarray(mean + share * (shifts - mean))
