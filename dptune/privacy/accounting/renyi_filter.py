"""The Renyi privacy filter, for noise that is chosen from earlier releases.

Feldman and Zrnic 2021 (arXiv 2008.11193), theorem 4.3: fix the order alpha and the budget B before touching
data; if every prefix keeps ``sum rho_t(alpha) <= B``, the whole adaptive interaction is (alpha, B)-Renyi DP.
A filter that tracked several orders and continued while any one allowed it would not be valid.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from dptune.core.errors import ConfigError
from dptune.privacy.release import Composition, Release

#: Relative slack for the rounding of a sum of up to millions of costs.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class RenyiFilter:
    """A budget at one Renyi order, both fixed in advance. Public data only; deciding never reads a record.

    Attributes:
        order: alpha > 1.
        budget: the largest sum of rho(alpha) that may be spent.
    """

    order: float
    budget: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.order) and self.order > 1):
            raise ConfigError("filter.order", f"{self.order} is not above 1", fix="use RenyiFilter.plan")
        if not (math.isfinite(self.budget) and self.budget > 0):
            raise ConfigError("filter.budget", f"{self.budget} is not positive", fix="use RenyiFilter.plan")

    @classmethod
    def plan(cls, epsilon: float, delta: float, sample_rate: float, steps: int) -> RenyiFilter:
        """The filter at the order that lets ``steps`` steps of constant noise use the least noise.

        Raises: ConfigError if no order reaches epsilon at delta.
        """
        from scipy.optimize import minimize_scalar

        def needed(order: float) -> float:
            budget = budget_at(order, epsilon, delta)
            if budget <= 0:
                return 1e6 * (1 + abs(budget))
            return smallest_noise_multiplier(order, budget / steps, sample_rate)

        grid = np.exp(np.linspace(np.log(0.05), np.log(200.0), 60)) + 1
        best = min(grid, key=needed)
        around = np.clip([1 + (best - 1) / 1.2, 1 + (best - 1) * 1.2], 1.01, None)
        order = float(minimize_scalar(needed, bounds=tuple(around), method="bounded").x)
        return cls(order=order, budget=budget_at(order, epsilon, delta) / (1 + 2 * _ROUNDING))

    def cost(self, release: Release) -> float:
        """rho(alpha) of one Poisson-sampled Gaussian release, at its effective noise. Infinite for any other."""
        # Releases about parts of the units do not add up.
        if release.noise != "gaussian" or release.coefficients or not release.sampler.like_poisson:
            return math.inf
        return renyi_cost(self.order, release.sample_rate, release.effective_noise_multiplier)

    def spent(self, composition: Composition) -> float:
        """Sum of the costs of all releases, those of empty batches included; rounded up once."""
        return Spend(self, composition).value

    def admits(self, composition: Composition) -> bool:
        """Whether the composition stays within the budget."""
        return self.affords(self.spent(composition))

    def affords(self, spent: float) -> bool:
        """Whether this sum of costs stays within the budget."""
        return spent <= self.budget * (1 + _ROUNDING)

    def raise_noise_multiplier(self, least: float, sample_rate: float, spent: float) -> float:
        """The smallest effective noise multiplier that is at least ``least`` and that the rest of the budget allows.

        Infinity when nothing is left. Call this before the batch is drawn.
        """
        left = self.budget - spent
        if renyi_cost(self.order, sample_rate, least) <= left:
            return least
        return smallest_noise_multiplier(self.order, left, sample_rate)

    def epsilon(self, composition: Composition, delta: float) -> float:
        """The epsilon of the whole interaction, which follows from the budget and not from the amount spent.

        A smaller epsilon that depends on when an adaptive run stopped would need an odometer. Infinite if
        the composition exceeds the budget.
        """
        return self.limit(delta) if self.admits(composition) else math.inf

    def limit(self, delta: float) -> float:
        """The epsilon of any interaction that stays within the budget."""
        from dp_accounting.rdp import compute_epsilon

        return float(compute_epsilon([self.order], [self.budget * (1 + _ROUNDING)], delta)[0])

    def to_dict(self) -> dict[str, float]:
        """The filter in plain JSON types."""
        return {"order": self.order, "budget": self.budget}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RenyiFilter:
        """Make a filter of what ``to_dict`` gave."""
        return cls(order=float(data["order"]), budget=float(data["budget"]))


_FINEST = 1074  # every float is a whole multiple of 2^-1074


class Spend:
    """A running total of what releases cost a filter; adding a release takes constant time.

    Guarantee: ``value`` is never below the exact sum of the costs. Every float is a whole number of 2^-1074, so a
    Python integer adds up any number of them without rounding, in any order; only ``value`` rounds, upwards and once.
    The filter's relative slack covers the error of each single cost, as ``renyi_cost`` computes it.
    """

    def __init__(self, renyi_filter: RenyiFilter, composition: Composition | None = None) -> None:
        self._filter = renyi_filter
        self._units, self._infinite = 0, False
        for release, count in (composition or {}).items():
            self.add(release, count)

    def add(self, release: Release, count: int = 1) -> None:
        """Count ``count`` more of this release."""
        cost = self._filter.cost(release)
        if math.isfinite(cost):
            self._units += count * _as_units(cost)
        else:
            self._infinite |= count > 0

    def with_another(self, release: Release) -> Spend:
        """The total if this release were charged too."""
        other = copy.copy(self)
        other.add(release)
        return other

    def __add__(self, other: Spend) -> Spend:
        total = copy.copy(self)
        total._units, total._infinite = self._units + other._units, self._infinite or other._infinite
        return total

    @property
    def value(self) -> float:
        """The total, rounded up to a float."""
        try:
            nearest = math.inf if self._infinite else self._units / (1 << _FINEST)
        except OverflowError:
            return math.inf
        short = math.isfinite(nearest) and _as_units(nearest) < self._units
        return math.nextafter(nearest, math.inf) if short else nearest


def _as_units(cost: float) -> int:
    numerator, denominator = cost.as_integer_ratio()
    return numerator << (_FINEST + 1 - denominator.bit_length())


def budget_at(order: float, epsilon: float, delta: float) -> float:
    """The rho at ``order`` that converts to exactly (epsilon, delta); may be negative (out of reach)."""
    return epsilon - math.log((order - 1) / order) + (math.log(delta) + math.log(order)) / (order - 1)


@lru_cache(maxsize=65536)
def renyi_cost(order: float, sample_rate: float, noise_multiplier: float) -> float:
    """rho(alpha) of one Poisson-subsampled Gaussian step (Mironov, Talwar and Zhang 2019)."""
    from dp_accounting import dp_event
    from dp_accounting.rdp import RdpAccountant

    event = dp_event.PoissonSampledDpEvent(sample_rate, dp_event.GaussianDpEvent(noise_multiplier))
    # max(x, 0) keeps a NaN, which is then refused; max(0, x) would turn it into a cost of 0.
    return max(float(RdpAccountant(orders=[order]).compose(event).rdp[0]), 0.0)


def smallest_noise_multiplier(order: float, cost: float, sample_rate: float) -> float:
    """The smallest noise multiplier whose rho(order) is at most ``cost``, rounded up; infinity if cost <= 0."""
    if cost <= 0:
        return math.inf
    from scipy.optimize import brentq

    def excess(log_z: float) -> float:
        return math.log(max(renyi_cost(order, sample_rate, math.exp(log_z)), 1e-300)) - math.log(cost)

    low, high = math.log(0.05), math.log(1.0)
    while excess(high) > 0:
        high += 1.0
        if high > 15:
            return math.inf
    while excess(low) < 0:
        low -= 1.0
    z = math.exp(brentq(excess, low, high, xtol=1e-10))
    while renyi_cost(order, sample_rate, z) > cost:
        z *= 1 + 1e-9
    return float(z)


# The cost of answers: tokens whose Renyi divergence is bounded at one order, or at all of them (pure tokens).
#
# Renyi divergence grows with its order, so a bound at one order holds at all lower ones. It adds up over tokens that
# are asked for adaptively. Nothing is known at higher orders, so all tokens are priced at the lowest order among them.

#: Orders at which pure tokens beside other releases are priced.
_ORDERS = tuple(1 + np.geomspace(1e-2, 1e4, 121))
#: Cells of the smallest of several pure epsilons, and most cells of the largest. All are rounded up to whole cells.
_CELLS, _MOST_CELLS = 200, 1 << 14


def has_answers(composition: Composition) -> bool:
    """Whether a token is among the releases."""
    return any(release.noise in ("token", "pure_token", "unbounded_token") for release in composition)


def answers_epsilon(composition: Composition, delta: float) -> float:
    """Upper bound on epsilon at ``delta`` in (0, 1), at the lowest order of the tokens. Gaussian releases may be among
    them; any other release costs infinity. Pure tokens alone cost what randomised responses do, and a hundred thousand
    of two epsilons take 20 seconds of a core.
    """
    if any(release.noise == "pure_token" for release in composition) and not any(r.renyi for r in composition):
        renyi = min(_renyi_epsilon(composition, order, delta) for order in _ORDERS)
        alone = all(release.noise == "pure_token" for release in composition)
        return min(renyi, _responses_epsilon(composition, delta)) if alone else renyi
    order = min((release.renyi[0] for release in composition if release.renyi), default=2.0)
    return _renyi_epsilon(composition, order, delta)


def _renyi_epsilon(composition: Composition, order: float, delta: float) -> float:
    return approximate_epsilon(order, math.fsum(n * _cost(release, order) for release, n in composition.items()), delta)


def _responses_epsilon(composition: Composition, delta: float) -> float:
    """Epsilon of pure tokens: of as many randomised responses, which is the least that holds for all such tokens.

    Any epsilon-DP release is a randomised response that is processed further: a true answer has probability
    e^epsilon / (1 + e^epsilon), and a loss of epsilon or -epsilon (Kairouz, Oh and Viswanath 2015, theorem 3.3). This
    holds for tokens that are asked for adaptively. Sums of equal losses lie on the grid. Different
    losses are rounded up to whole cells: by half a percent at most, unless the largest is over 80 times the smallest.
    """
    from scipy.special import expit

    from dptune.privacy.accounting.composed_losses import grid_epsilon
    from dptune.privacy.accounting.sampled_gaussian import GridLosses, Kind

    kinds: Counter[float] = Counter()
    for release, count in composition.items():
        kinds[1 / release.effective_noise_multiplier] += count
    width = max(min(kinds) / (_CELLS if len(kinds) > 1 else 1), max(kinds) / _MOST_CELLS) * (1 + _ROUNDING)
    grids = []
    for epsilon, count in kinds.items():
        cells = math.ceil(epsilon / width)
        losses, mass = np.arange(-cells, cells + 1, dtype=np.float64) * width, np.zeros(2 * cells + 1)
        mass[[0, -1]] = expit(losses[[0, -1]])
        grids.append((GridLosses(-cells, losses, mass, 0.0), Kind(1.0, 1 / epsilon, count)))
    # Chernoff's tilt is far too large for few tokens, so smaller tilts are tried too; the least bound counts.
    with np.errstate(divide="ignore"):  # the logarithm of empty cells
        found = grid_epsilon(grids, width, delta, 0.0, 1 / min(kinds))
    total = math.fsum(count * epsilon for epsilon, count in kinds.items())
    return min(found, total * (1 + _ROUNDING))


def approximate_epsilon(order: float, renyi: float, delta: float) -> float:
    """Convert Renyi to approximate DP (Canonne, Kamath and Steinke 2020, proposition 12); at least 0."""
    return max(renyi - budget_at(order, 0.0, delta), 0.0)


def published_answers_epsilon(composition: Composition, delta: float) -> float:
    """Epsilon by PMixED's theorem 5.1, which adds up the Renyi epsilons that its radius was solved for. NOT a bound."""
    claims = [(dict(release.claims), count) for release, count in composition.items()]
    if not claims:
        return 0.0
    if all(claim.get("pure", 0) > 0 for claim, _ in claims):  # appendix B: tokens that are epsilon-DP
        return math.fsum(count * claim["pure"] for claim, count in claims)
    if not all(claim.get("order", 0) > 1 and claim.get("renyi", 0) > 0 for claim, _ in claims):
        return math.inf
    order = min(claim["order"] for claim, _ in claims)
    return approximate_epsilon(order, math.fsum(count * claim["renyi"] for claim, count in claims), delta)


def _cost(release: Release, order: float) -> float:
    if release.renyi is not None:
        return release.renyi[1]
    if release.noise == "pure_token":  # Bun and Steinke 2016, proposition 3.3
        epsilon = (1 + _ROUNDING) / release.effective_noise_multiplier
        return min(epsilon, order * epsilon**2 / 2)
    if release.noise != "gaussian":
        return math.inf
    return renyi_cost(order, release.sample_rate, release.effective_noise_multiplier)
