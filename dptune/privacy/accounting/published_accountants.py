"""The accountants that PLRV-O, LMO-DP and DP policy gradient published. Claims, not guarantees: docstrings say why.

They choose noise or stop a run only if a user asks for ``accounting: published``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln, logsumexp

from dptune.core.errors import ConfigError
from dptune.privacy.accounting.laplace_mixtures import InverseScale, rounded_up
from dptune.privacy.accounting.mixture_bounds import gaussian_renyi, merged, scalar_renyi
from dptune.privacy.calibration import calibrate
from dptune.privacy.release import UNBOUNDED, Composition, Release

Array = NDArray[np.float64]
LARGEST_MOMENT, MOST_MOMENTS = 255, 2000  # of PLRV-O: by default, and at most
LARGEST_ORDER = 128
_EXACT_COORDINATES = 1000
_MOST_KINDS = 64  # largest number of laws that are priced one by one; more are merged, which only raises the claim
_TAIL_NODES = 40
STEP_ORDERS = np.arange(2, 129, dtype=np.float64)


def plrvo_epsilon(composition: Composition, delta: float) -> float:
    """Epsilon by PLRV-O's theorem 4.9 / algorithm 2, at the dimension of the gradient.

    The moments go from 1 to the number that the releases claim ("moments"), else to 255; the paper's section 5.1 has
    about 1,000. More moments never raise the claim.

    NOT a bound: it samples every coordinate by a coin of its own, although an example is in the batch for all of them
    or for none, and it treats one shared scale as many independent ones.
    """
    return _plrvo(composition, delta, coordinates=None)


def plrvo_one_coordinate_epsilon(composition: Composition, delta: float) -> float:
    """Epsilon by the same theorem for a gradient of one coordinate, as PLRV-O's released configurations have it.

    NOT a bound for any model with two parameters.
    """
    return _plrvo(composition, delta, coordinates=1)


def lmo_dp_epsilon(composition: Composition, delta: float, largest_order: int = LARGEST_ORDER) -> float:
    """Epsilon as LMO-DP totals it: a Gaussian, classically calibrated to the epsilon of one step, is composed instead.

    NOT a bound: the noise that is really added is never composed or sampled, and its epsilon is that of one coordinate.
    """
    if any(release.noise in UNBOUNDED for release in composition):
        return math.inf
    surrogates = [(r.sample_rate, surrogate_multiplier(r, delta), count) for r, count in composition.items()]
    return _gaussians_epsilon(surrogates, delta, largest_order)


def lmo_dp_step_target(epsilon: float, delta: float, sample_rate: float, steps: int) -> float:
    """The epsilon of one step for which ``lmo_dp_epsilon`` of a run is ``epsilon``."""
    surrogate = calibrate(lambda z: _gaussians_epsilon([(sample_rate, z, steps)], delta, LARGEST_ORDER), epsilon)
    return _classical(delta) / surrogate


def surrogate_multiplier(release: Release, delta: float) -> float:
    """Noise multiplier of that Gaussian: sqrt(2 log(1.25 / delta)) / epsilon, with the step's epsilon as the paper
    states it or, for other parameters, by equation 4.
    """
    claimed = dict(release.claims).get("step_epsilon") or lmo_dp_step_epsilon(law_of(release), delta, in_domain=False)
    return _classical(delta) / claimed if claimed else math.inf


def _classical(delta: float) -> float:
    """Noise multiplier times epsilon in the classical Gaussian calibration."""
    return math.sqrt(2 * math.log(1.25 / delta))


def _gaussians_epsilon(gaussians: list[tuple[float, float, int]], delta: float, largest_order: int) -> float:
    """Epsilon of composed Gaussians (sample rate, noise multiplier, steps), at LMO-DP's integer orders from 2."""
    from dp_accounting.rdp import compute_epsilon

    orders = tuple(range(2, largest_order + 1))
    total = np.zeros(len(orders))
    for rate, multiplier, count in gaussians:
        total += count * gaussian_renyi(rate, multiplier, orders)
    return float(compute_epsilon(orders, total, delta)[0])


def dppg_epsilon(composition: Composition, delta: float) -> float:
    """Epsilon by DP policy gradient's rule (its appendix B.1), for every release.

    The rule is the classical calibration if z > sqrt(2 log(1.25 / delta)), so that epsilon < 1, else theorem 5 of Zhao
    et al. (2019). It bounds one Gaussian release, not tightly. NOT a bound of a run whose critic trains on raw data.
    """
    if any(release.noise != "gaussian" for release in composition):
        return math.inf
    return math.fsum(count * _dppg_update_epsilon(r.noise_multiplier, delta) for r, count in composition.items())


def _dppg_update_epsilon(noise_multiplier: float, delta: float) -> float:
    classical = _classical(delta)
    if noise_multiplier > classical:
        return classical / noise_multiplier
    if delta >= 0.5:
        return math.inf  # the theorem has no answer
    constant = math.sqrt(math.log(2 / (math.sqrt(16 * delta + 1) - 1)))
    return (1 / noise_multiplier + 2 * math.sqrt(2) * constant) / noise_multiplier / 2


def lmo_dp_step_epsilon(law: InverseScale, delta: float, *, in_domain: bool) -> float:
    """Epsilon of one step by LMO-DP's equation 4, at integer orders 2 to 128.

    With ``in_domain`` the orders are those at which the formula is a bound, for one coordinate. Without it, the formula
    is also evaluated where the moment that it stands for is infinite, as in the authors' code: two negative factors
    then make a positive number below the true value.
    """
    if not in_domain:
        up, down = formal_mgf(law, STEP_ORDERS - 1), formal_mgf(law, -STEP_ORDERS)
        return float(formal_step_epsilons(up, down, STEP_ORDERS, delta))
    return float(_least(scalar_renyi(law, 1.0, STEP_ORDERS), STEP_ORDERS, delta))


def formal_step_epsilons(up: Array, down: Array, orders: Array, delta: float) -> Array:
    """Epsilons by equation 4, from numbers for M(order - 1) and M(-order); orders are in the last axis.

    An order whose value is no positive number counts as infinite, as in the authors' code. NOT a bound if an order is
    outside the domain.
    """
    with np.errstate(all="ignore"):
        sums = orders / (2 * orders - 1) * up + (orders - 1) / (2 * orders - 1) * down
        renyi = np.log(sums) / (orders - 1)
        return _least(np.where(renyi > 0, renyi, np.inf), orders, delta)


def formal_mgf(law: InverseScale, t: Array) -> Array:
    """The product of the factors of M(t), wherever it can be evaluated, even outside the domain."""
    (k, theta), (low, high) = law.gamma, law.uniform
    with np.errstate(all="ignore"):
        # The authors' own expression: another would overflow at other orders, and give another epsilon.
        uniform = (np.exp(high * t) - np.exp(low * t)) / ((high - low) * t) if high else 1.0
        return np.asarray(np.exp(law.constant * t) * (1 - theta * t) ** -k / (1 - law.exponential * t) * uniform)


def _least(renyi: Array, orders: Array, delta: float) -> Array:
    """The least epsilon over the orders that give a number (Canonne, Kamath and Steinke 2020); at least 0."""
    epsilons = renyi + np.log1p(-1 / orders) - np.log(orders * delta) / (orders - 1)
    # A divergence this small bounds delta itself, by Pinsker's inequality; the authors' code has it too.
    epsilons = np.where(delta**2 + np.expm1(-renyi) >= 0, 0.0, epsilons)
    return np.maximum(np.where(np.isfinite(renyi), epsilons, np.inf).min(axis=-1), 0.0)


def law_of(release: Release) -> InverseScale:
    """The law of the noise. Raises ConfigError for a Gaussian release, which these papers do not account for."""
    if release.law is None:
        raise ConfigError("published_accountant", "is one of Laplace mixtures", fix="use gdp_clt for Gaussian noise")
    return release.law


def _plrvo(composition: Composition, delta: float, coordinates: int | None) -> float:
    if any(release.noise in UNBOUNDED for release in composition):
        return math.inf
    laws = [law_of(release) for release in composition]
    if not all(law.is_gamma for law in laws):
        raise ConfigError("published_accountant", "plrvo accounts Gamma inverse scales", fix="use noise: plrvo")
    if coordinates is None and not all(dimension(release) for release in composition):
        return math.inf
    kinds = Counter[_Kind]()
    for release, count in composition.items():
        kinds[_Kind(coordinates or dimension(release), release.sample_rate, *law_of(release).gamma)] += count
    kinds = merged(kinds, _Kind.coarser, _MOST_KINDS)
    claimed = [dict(release.claims).get("moments", LARGEST_MOMENT) for release in composition]
    highest = int(min([MOST_MOMENTS, *claimed, *(math.ceil(1 / kind.theta) - 1 for kind in kinds)]))

    def epsilon(moment: int) -> float:
        total = math.fsum(count * _moment(kind, moment) for kind, count in kinds.items())
        return total / moment + math.log(moment / (moment + 1)) - math.log(delta * (moment + 1)) / moment

    return max(0.0, _smallest(epsilon, highest)) if highest >= 1 else math.inf


def _smallest(epsilon: Callable[[int], float], highest: int) -> float:
    """The least value over the moments 1..highest of a function that falls and then rises, by an ever finer search."""
    seen: dict[int, float] = {}
    low, high = 1, highest
    while True:
        grid = sorted({round(value) for value in np.geomspace(low, high, 9)})
        seen |= {moment: epsilon(moment) for moment in grid if moment not in seen}
        best = min(grid, key=seen.__getitem__)
        place = grid.index(best)
        low, high = grid[max(place - 1, 0)], grid[min(place + 1, len(grid) - 1)]
        if all(moment in seen for moment in range(low, high + 1)):
            return seen[best]


class _Kind(NamedTuple):
    """The numbers of a release that equation 19 reads."""

    dimension: int
    rate: float
    k: float
    theta: float

    def coarser(self, step: float) -> _Kind:
        """A kind that costs at least as much, with numbers rounded to a grid of ``step`` in the logarithm."""
        rate = min(1.0, rounded_up(self.rate, step))
        return _Kind(self.dimension, rate, rounded_up(self.k, step), rounded_up(self.theta, step))


def _moment(kind: _Kind, moment: int) -> float:
    """Equation 19, the sum over coordinates i of log sum_eta w_eta G(x_i, eta), x_i = sqrt(i) - sqrt(i - 1).

    The first thousand terms are added; the rest, which is smooth, is integrated in log i.
    """
    n, rate, k, theta = kind
    exact = np.arange(1, min(n, _EXACT_COORDINATES) + 1, dtype=np.float64)
    total = float(_log_moments(exact, k, theta, rate, moment).sum())
    if n > _EXACT_COORDINATES:
        nodes, weights = np.polynomial.legendre.leggauss(_TAIL_NODES)
        low, high = math.log(_EXACT_COORDINATES + 0.5), math.log(n + 0.5)
        index = np.exp((high - low) / 2 * nodes + (high + low) / 2)
        values = _log_moments(index, k, theta, rate, moment)
        total += float((weights * index * values).sum()) * (high - low) / 2
    return total


def _log_moments(index: Array, k: float, theta: float, rate: float, moment: int) -> Array:
    """The terms log sum_eta w_eta G(x_i, eta). Most are tiny, so computed as log(1 + sum) unless that overflows."""
    shift = (1 / (np.sqrt(index) + np.sqrt(index - 1)))[:, None] * theta
    eta = np.arange(2, moment + 2, dtype=np.float64)[None, :]
    log_weight = (
        gammaln(moment + 2) - gammaln(eta + 1) - gammaln(moment + 2 - eta)
        + _times_log(moment + 1 - eta, 1 - rate) + eta * math.log(rate)
    )  # fmt: skip
    up, down = -k * np.log1p(-(eta - 1) * shift), -k * np.log1p(eta * shift)
    with np.errstate(over="ignore", invalid="ignore"):
        excess = eta / (2 * eta - 1) * np.expm1(up) + (eta - 1) / (2 * eta - 1) * np.expm1(down)
        small = np.log1p((np.exp(log_weight) * excess).sum(axis=1))
    if np.isfinite(small).all():
        return np.asarray(small)
    whole = np.logaddexp(np.log(eta / (2 * eta - 1)) + up, np.log((eta - 1) / (2 * eta - 1)) + down) + log_weight
    return np.asarray(np.logaddexp(logsumexp(whole, axis=1), _without(moment, rate)))


def _without(moment: int, rate: float) -> float:
    """The part log(w_0 + w_1) of the terms eta = 0 and 1, where G is 1."""
    if rate == 1.0:
        return -math.inf
    return float(moment * math.log1p(-rate) + math.log((1 - rate) + (moment + 1) * rate))


def _times_log(count: Array, value: float) -> Array:
    """Compute count * log(value), where 0 log 0 is 0."""
    return np.where(count == 0, 0.0, count * math.log(value)) if value > 0 else np.where(count == 0, 0.0, -np.inf)


def dimension(release: Release) -> int:
    """Number of coordinates that algorithm 2 sums over; 0 if the release does not state it."""
    return int(dict(release.claims).get("dimension", 0))
