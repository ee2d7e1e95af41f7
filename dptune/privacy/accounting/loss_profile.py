"""Privacy profile of a run: bounds of delta at every epsilon, in both directions apart.

``epsilons`` needs one delta; private selection (``selection``) needs the whole curve, and it needs the divergence of
the run with a unit from the run without it apart from the other direction, since they differ much under sampling. All
of this is public.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import erfcx, log_ndtr

from dptune.core.errors import ConfigError
from dptune.privacy.accountants import as_kinds, leaks_of
from dptune.privacy.accounting.composed_losses import composed_deltas, merge
from dptune.privacy.accounting.parts import disjoint
from dptune.privacy.accounting.sampled_gaussian import LEAST_NOISE, MASS_ERROR, MOST_NOISE, Direction, Kind
from dptune.privacy.release import DEALT_BY_RANK, LIKE_GAUSSIAN, Composition

Array = NDArray[np.float64]

#: Epsilons at which profiles are tabulated. Between them delta is convex in exp(epsilon), so a chord is above it.
GRID: Array = np.linspace(0.0, 60.0, 60_001)
_GRID_EXP: Array = np.exp(GRID)
#: Rounding of a closed form, absolute.
_ROUNDING = 1e-15
_MOST_KINDS, _MERGED = 64, 0.001


@dataclass(frozen=True, eq=False)
class Profile:
    """Upper bounds of delta at each epsilon of ``GRID``, not rising.

    Attributes:
        remove: (n,) the divergence of the run with the unit from the run without it.
        add: (n,) the other direction.
    """

    remove: Array
    add: Array

    def turned(self) -> Profile:
        """The same with the two directions exchanged."""
        return Profile(self.add, self.remove)

    def delta(self, at: Array) -> Array:
        """Bounds of delta in the direction ``remove`` at any epsilons, also below 0 (by duality) and at -inf.

        For e < 0: delta_PQ(e) = 1 - exp(e) + exp(e) delta_QP(-e).
        """
        at = np.asarray(at, dtype=np.float64)
        shrunk = np.exp(np.minimum(at, 0.0))
        below = 1.0 - shrunk + shrunk * _between(self.add, np.maximum(-at, 0.0))
        return np.where(at >= 0, _between(self.remove, np.maximum(at, 0.0)), below)


def _between(table: Array, at: Array) -> Array:
    """Linear in exp(epsilon) between the points of the grid, the last value beyond."""
    return np.asarray(np.interp(np.exp(np.minimum(at, GRID[-1])), _GRID_EXP, table))


def profile_of(composition: Composition) -> Profile:
    """The profile of a run of these releases, whose parameters were fixed in advance.

    Guarantee: never below the truth, under add/remove of one unit; where releases name parts, the larger of their
    parts' profiles, for a unit is in one. Of groups dealt by rank: under emptying one unit's slot, no more.

    Raises: ConfigError for releases that leak, move their noise by what was released, or are tokens.

    Example:
        >>> from collections import Counter
        >>> import numpy as np
        >>> from dptune.privacy.accounting.loss_profile import profile_of
        >>> from dptune.privacy.release import Release
        >>> profile = profile_of(Counter({Release(sample_rate=1.0, noise_multiplier=1.0): 1}))
        >>> [round(float(delta), 4) for delta in profile.delta(np.array([0.0, 1.0, 2.0]))]
        [0.3829, 0.1269, 0.0209]
    """
    leaks = [leak for leak in leaks_of(composition) if leak != DEALT_BY_RANK]
    if leaks or any(release.noise not in LIKE_GAUSSIAN for release in composition):
        problem = f"has no loss distribution to select by: {'; '.join(leaks) or 'tokens'}"
        raise ConfigError("mechanism", problem, fix="use a sound mechanism whose noise is fixed in advance")
    return largest([_profile_of(as_kinds(part)) for part in disjoint(composition)])


def gaussian_profile(mu: float) -> Profile:
    """The profile of one unsampled Gaussian release with sensitivity ``mu`` standard deviations."""
    found = np.asarray(_gaussian_deltas(mu, GRID))
    return Profile(found, found)


def largest(profiles: Sequence[Profile]) -> Profile:
    """A profile that bounds each of ``profiles``."""
    return Profile(
        np.maximum.reduce([profile.remove for profile in profiles]),
        np.maximum.reduce([profile.add for profile in profiles]),
    )


def average(weighted: Sequence[tuple[float, Profile]]) -> Profile:
    """The profile of a run whose kind is drawn with these weights and is part of its output. Weights add up to 1."""
    total = math.fsum(weight for weight, _ in weighted)
    if not abs(total - 1) <= 1e-9 or any(not weight > 0 for weight, _ in weighted):
        raise ConfigError("weight", f"the weights add up to {total!r}", fix="give positive weights that add up to 1")
    return Profile(
        np.asarray(sum(weight * profile.remove for weight, profile in weighted)),
        np.asarray(sum(weight * profile.add for weight, profile in weighted)),
    )


@lru_cache(maxsize=256)
def _profile_of(kinds: tuple[Kind, ...]) -> Profile:
    if not kinds:
        return Profile(np.zeros(len(GRID)), np.zeros(len(GRID)))
    if any(kind.noise_multiplier < LEAST_NOISE for kind in kinds):
        return Profile(np.ones(len(GRID)), np.ones(len(GRID)))
    unsampled = _gaussian_deltas(
        math.hypot(*(math.sqrt(kind.releases) / kind.noise_multiplier for kind in kinds)), GRID
    )
    if all(kind.sample_rate == 1.0 for kind in kinds):
        return Profile(unsampled, unsampled)
    few = [kind._replace(noise_multiplier=min(kind.noise_multiplier, MOST_NOISE)) for kind in kinds]
    step = _MERGED
    while len(few) > _MOST_KINDS:
        few, step = merge(kinds, step), 2 * step
    return Profile(_sampled(few, "remove", unsampled), _sampled(few, "add", unsampled))


def _sampled(kinds: Sequence[Kind], direction: Direction, unsampled: Array) -> Array:
    found = np.minimum(composed_deltas(kinds, GRID, direction), unsampled)
    if direction == "add":  # a unit that is added changes no probability by more than this, whatever the noise
        most = sum(
            kind.releases * -math.log1p(-kind.sample_rate) if kind.sample_rate < 1 else math.inf for kind in kinds
        )
        found = np.where(most * (1 + MASS_ERROR) <= GRID, 0.0, found)
    return np.asarray(np.minimum.accumulate(found))


def _gaussian_deltas(mu: float, at: Array) -> Array:
    """delta of mu-Gaussian DP at epsilons; see ``gdp_delta``."""
    if mu == 0:
        return np.zeros(len(at))
    if math.isinf(mu):
        return np.ones(len(at))
    away = at / mu - mu / 2
    second = erfcx((at / mu + mu / 2) / math.sqrt(2)) / 2 * np.exp(-away * away / 2)
    first = np.exp(log_ndtr(-away))
    return np.asarray(np.minimum(np.maximum(first - second, 0.0) + first * 1e-12 + _ROUNDING, 1.0))
