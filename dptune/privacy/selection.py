"""The price of a private selection: the best of a random number of candidates, of which only that one leaves.

The mechanism. A number K is drawn once from a public law (``SelectionLaw``); K candidates are drawn independently from
a public distribution over configurations, trained each with its own noise and coins, and scored by a function of their
own output. The one with the largest score is released; neither K nor anything of the others is.

The bound. Let P be the law of one candidate's output with a unit and Q without it, phi'(x) = E[K x^(K-1)], and
G(u) = min over e >= 0 of min(1, exp(e) u + delta_QP(e)), so that Q(S) <= G(P(S)) for every event S. Let segment j of
the lower convex hull of (0, 0) and all (phi'(1 - u), phi'(1 - G(u))), 0 <= u <= 1, have width D_j and slope exp(c_j).

    delta_search(e) <= sum over j of D_j delta_PQ(e + c_j),  and the same with P and Q exchanged.

Proof. Append an independent uniform tag to outputs, last in the order: there are no ties. With F the distribution
functions in that order the winner has density phi'(F_P) dP. With u = 1 - F_P(y) and v = 1 - F_Q(y) <= G(u) at an
outcome y, the integrand of the hockey stick is at most sup_u [phi'(1 - u) L - exp(e) phi'(1 - G(u))]_+ dQ, with
L = dP/dQ. That supremum over the points of a set is the one over its convex hull: sum_j D_j (L - exp(e + c_j))_+.
Integrating each term gives a hockey stick of one candidate. Nothing is assumed of the score. (This bound is our own; it
is never above the one-shift form below, and both are tested against enumerations of the mechanism.)

Published bounds, for comparison: Papernot and Steinke 2022, theorem 2 (Renyi DP), by dp-accounting; one shift of the
profile, the form of Koskela, Redberg and Wang 2024. Everything here is public.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dptune.core.errors import ConfigError
from dptune.privacy.accountants import RENYI_ORDERS, as_kinds, check_delta, smallest_epsilon
from dptune.privacy.accounting.loss_profile import GRID, Profile, profile_of
from dptune.privacy.accounting.parts import dearest, disjoint
from dptune.privacy.release import Composition
from dptune.privacy.selection_law import SelectionLaw

Array = NDArray[np.float64]
Bound = Literal["hull", "one_shift"]
BOUNDS: tuple[Bound, ...] = ("hull", "one_shift")

#: Probabilities at which the trade-off between the two worlds is tabulated.
_TAILS: Array = np.unique(np.concatenate([[0.0], np.geomspace(1e-15, 1.0, 4000), np.linspace(0.0, 1.0, 16_001)]))
_EXP: Array = np.exp(GRID)
#: Added to every delta of the trade-off, for the rounding of the tables.
_FLOOR = 1e-14
#: Relative, for sums and the hull.
_ROUNDING = 1e-12
_STEPS = 60  # of the bisection: far finer than the tables


@dataclass(frozen=True, eq=False)
class Shifts:
    """The convex hull of the theorem: widths D_j, which add up to the mean of K, and shifts c_j, rising."""

    widths: Array
    shifts: Array

    def delta(self, profile: Profile, epsilon: float) -> float:
        """Bound of the search's delta in the profile's direction ``remove``."""
        return min(1.0, float(self.widths @ profile.delta(epsilon + self.shifts)) * (1 + _ROUNDING))


def shifts_of(profile: Profile, law: SelectionLaw, bound: Bound = "hull") -> Shifts:
    """The shifts of a bound, for the direction ``remove`` of a profile. Raises: ConfigError for an unknown bound."""
    if bound not in BOUNDS:
        raise ConfigError("bound", f"{bound!r} is unknown", fix=f"use {' or '.join(BOUNDS)}")
    return _one_shift(profile, law) if bound == "one_shift" else _hull_shifts(profile, law)


def _one_shift(profile: Profile, law: SelectionLaw) -> Shifts:
    """One shift for all of K: delta_search(e) <= m delta(e - s), m the mean.

    Where v <= R u for the chances of an event in the two worlds, phi'(1 - u) <= exp(s) phi'(1 - v): for the negative
    binomial law s = (1 + eta) ln R with R = min over e of exp(e) + delta(e) (1 - g) / g, for Poisson's s = lambda
    delta(0). A cap makes phi' rise less, so that s holds for capped laws too.
    """
    delta = np.maximum(profile.remove, profile.add) + _FLOOR
    if law.shape == math.inf:
        shift = law.rate * float(delta[0])
    else:
        shift = (1 + law.shape) * math.log(float(np.min(_EXP + (1 - law.rate) / law.rate * delta)))
    return Shifts(np.array([law.mean]), np.array([-shift]))


def _hull_shifts(profile: Profile, law: SelectionLaw) -> Shifts:
    """The theorem's hull.

    Each cell of the grid of tails stands for its largest slope and its smallest intercept, so that the hull is at or
    below the true one and the bound at or above.
    """
    reached = _reach(profile)
    x = law.slope(1.0 - _TAILS[:-1])
    y = law.slope(np.maximum(1.0 - reached[1:], 0.0))
    one = law.slope(0.0)
    points = np.column_stack([[0.0, one, *x], [0.0, one, *y]])
    hull = _lower_hull(points[np.lexsort((points[:, 1], points[:, 0]))])
    widths, heights = np.diff(hull[:, 0]), np.diff(hull[:, 1])
    with np.errstate(divide="ignore"):
        return Shifts(widths, np.log(np.maximum(heights, 0.0) / widths))


def selection_delta(profile: Profile, law: SelectionLaw, epsilon: float, bound: Bound = "hull") -> float:
    """A delta at which the selection is certainly (epsilon, delta)-DP, both directions.

    Example:
        >>> from collections import Counter
        >>> from dptune.privacy.accounting.loss_profile import profile_of
        >>> from dptune.privacy.release import Release
        >>> from dptune.privacy.selection import selection_delta
        >>> from dptune.privacy.selection_law import SelectionLaw
        >>> one_run = profile_of(Counter({Release(sample_rate=1.0, noise_multiplier=5.0): 1}))
        >>> f"{selection_delta(one_run, SelectionLaw.of(candidates=10), epsilon=1.0):.1e}"
        '2.6e-04'
    """
    return max(shifts_of(side, law, bound).delta(side, epsilon) for side in (profile, profile.turned()))


def selection_epsilon(profile: Profile, law: SelectionLaw, delta: float, bound: Bound = "hull") -> float:
    """An epsilon for which the release of the winner is certainly (epsilon, delta)-DP; infinity if none is found.

    Guarantee: for runs whose profile is at most ``profile``, by the theorem above. Assumes K drawn from ``law`` and
    kept secret with all losers, independent candidates, and a score that is part of a candidate's own output.

    Args:
        profile: of one candidate.
        law: of the number of candidates.
        delta: in (0, 1).
        bound: "hull", the theorem above, or "one_shift", a looser and older form.

    Raises: ConfigError for another delta or bound.

    Example:
        >>> from collections import Counter
        >>> from dptune.privacy.accounting.loss_profile import profile_of
        >>> from dptune.privacy.release import Release
        >>> from dptune.privacy.selection import selection_epsilon
        >>> from dptune.privacy.selection_law import SelectionLaw
        >>> one_run = profile_of(Counter({Release(sample_rate=1.0, noise_multiplier=5.0): 1}))
        >>> round(selection_epsilon(one_run, SelectionLaw.of(candidates=10), delta=1e-5), 2)
        1.17
    """
    check_delta(delta)
    return max(_epsilon_of(side, shifts_of(side, law, bound), delta) for side in (profile, profile.turned()))


def renyi_selection_epsilon(composition: Composition, law: SelectionLaw, delta: float) -> float:
    """The published bound, by Renyi DP (Papernot and Steinke 2022, theorems 2 and 6), for the law without its cap.

    Example:
        >>> from collections import Counter
        >>> from dptune.privacy.release import Release
        >>> from dptune.privacy.selection import renyi_selection_epsilon
        >>> from dptune.privacy.selection_law import SelectionLaw
        >>> steps = Counter({Release(sample_rate=1.0, noise_multiplier=5.0): 1})
        >>> round(renyi_selection_epsilon(steps, SelectionLaw.of(candidates=10), delta=1e-5), 2)
        1.97
    """
    from dp_accounting import dp_event
    from dp_accounting.rdp import RdpAccountant

    uncapped = law.uncapped_mean
    found = 0.0
    for part in disjoint(composition):
        run = dp_event.ComposedDpEvent(
            [
                dp_event.SelfComposedDpEvent(
                    dp_event.PoissonSampledDpEvent(kind.sample_rate, dp_event.GaussianDpEvent(kind.noise_multiplier)),
                    kind.releases,
                )
                for kind in as_kinds(part)
            ]
        )
        accountant = RdpAccountant(orders=RENYI_ORDERS)
        accountant.compose(dp_event.RepeatAndSelectDpEvent(run, uncapped, law.shape))
        found = max(found, float(accountant.get_epsilon(delta)))
    return found


@dataclass(frozen=True)
class SelectionPrices:
    """What the best of a random number of candidates costs, and what others would have said. Public.

    Attributes:
        certified: the guarantee of the whole search, at the bound that was asked for.
        one_shift: the older and looser form of the same bound.
        renyi: the published bound (Papernot and Steinke 2022), for the law without its cap.
        composed: the epsilon of as many runs as are expected, all of which may be shown.
        one_candidate: the epsilon of one candidate alone. No guarantee for the winner.

    Example:
        >>> from collections import Counter
        >>> from dptune.privacy.release import Release
        >>> from dptune.privacy.selection import price_selection
        >>> from dptune.privacy.selection_law import SelectionLaw
        >>> prices = price_selection(Counter({Release(1.0, 5.0): 1}), SelectionLaw.of(candidates=10), delta=1e-5)
        >>> prices.one_candidate < prices.certified < prices.one_shift < prices.composed
        True
    """

    certified: float
    one_shift: float
    renyi: float
    composed: float
    one_candidate: float


def price_selection(
    composition: Composition, law: SelectionLaw, delta: float, bound: Bound = "hull"
) -> SelectionPrices:
    """Price a search whose every candidate makes these releases. Raises: ConfigError as ``profile_of``.

    Example:
        >>> from collections import Counter
        >>> from dptune.privacy.release import Release
        >>> from dptune.privacy.selection import price_selection
        >>> from dptune.privacy.selection_law import SelectionLaw
        >>> prices = price_selection(Counter({Release(1.0, 5.0): 1}), SelectionLaw.of(candidates=10), delta=1e-5)
        >>> round(prices.one_candidate, 2), round(prices.certified, 2), round(prices.composed, 2)
        (0.73, 1.17, 2.59)
    """
    profile = profile_of(composition)
    expected = math.ceil(law.uncapped_mean - 1e-9)
    many = Counter({release: count * expected for release, count in composition.items()})
    return SelectionPrices(
        certified=selection_epsilon(profile, law, delta, bound),
        one_shift=selection_epsilon(profile, law, delta, "one_shift"),
        renyi=renyi_selection_epsilon(composition, law, delta),
        composed=dearest(many, lambda part: smallest_epsilon(part, delta)),
        one_candidate=dearest(composition, lambda part: smallest_epsilon(part, delta)),
    )


def pure_selection_epsilon(epsilon: float, law: SelectionLaw) -> float:
    """The exact epsilon of a selection from candidates that are epsilon-DP at delta 0, for a law without a cap.

    eps + (1 + eta) ln[(g (1 + E) + (1 - g) E) / (g (1 + E) + (1 - g))] with E = exp(eps); attained by randomised
    response whose output carries a uniform tag. Raises: ConfigError for Poisson's law.

    Example:
        >>> from dptune.privacy.selection import pure_selection_epsilon
        >>> from dptune.privacy.selection_law import SelectionLaw
        >>> round(pure_selection_epsilon(0.5, SelectionLaw.of(candidates=10)), 3)
        1.551
    """
    if law.shape == math.inf:
        raise ConfigError("shape", "inf does not have this closed form", fix="use a finite shape")
    g, e = law.rate, math.exp(epsilon)
    return epsilon + (1 + law.shape) * math.log((g * (1 + e) + (1 - g) * e) / (g * (1 + e) + (1 - g)))


def _epsilon_of(profile: Profile, shifts: Shifts, delta: float) -> float:
    def spent(epsilon: float) -> float:
        found = shifts.delta(profile, epsilon)
        if math.isnan(found):
            raise ArithmeticError("the delta of a selection is not a number")
        return found

    low, high = 0.0, float(GRID[-1])
    if spent(low) <= delta:
        return 0.0
    if not spent(high) <= delta:
        return math.inf
    return _bisect(lambda epsilon: spent(epsilon) <= delta, low, high)


def _bisect(fits: Callable[[float], bool], low: float, high: float) -> float:
    """The upper end of a bracket of the least number that fits."""
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if fits(middle):
            high = middle
        else:
            low = middle
    return high


def _reach(profile: Profile) -> Array:
    """G on ``_TAILS``: the most probability that an event can have in world Q, by its probability in world P.

    The minimum over lines exp(e) u + delta(e). Any e of the grid gives a bound, so an inexact minimiser is safe.
    """
    slopes, heights = _EXP, profile.add
    falls = np.minimum.accumulate((heights[:-1] - heights[1:]) / np.diff(slopes))
    # The chord's fall is least where exp(e) is largest: the minimum for u lies where the fall passes u.
    index = np.searchsorted(-falls, -_TAILS, side="left")
    found = np.full(len(_TAILS), 1.0)
    for near in (index - 1, index, index + 1):
        place = np.clip(near, 0, len(slopes) - 1)
        found = np.minimum(found, slopes[place] * _TAILS + heights[place] + _FLOOR)
    return np.asarray(np.maximum.accumulate(found))


def _lower_hull(points: Array) -> Array:
    """Vertices of the lower convex hull of points sorted by first, then second coordinate (monotone chain).

    The slope test is written out: a call for each of 20,000 points took most of a search's start.
    """
    xs: list[float] = []
    ys: list[float] = []
    for x, y in points.tolist():
        if xs and x == xs[-1]:
            continue  # of equal first coordinates the smaller second one came first
        while len(xs) > 1 and (ys[-1] - ys[-2]) * (x - xs[-2]) >= (y - ys[-2]) * (xs[-1] - xs[-2]):
            xs.pop()
            ys.pop()
        xs.append(x)
        ys.append(y)
    return np.column_stack([xs, ys])
