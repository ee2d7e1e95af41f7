"""Bounds on the cost of Laplace-mixture noise, proven for a clipped vector of any dimension.

A shift of one coordinate by x is (s0 |x|, 0)-DP, s0 being the law's score bound. An epsilon-DP coordinate is
alpha epsilon^2 / 2 Renyi DP (Bun and Steinke 2016, proposition 3.3). Over coordinates that adds up to
alpha s0^2 |x|_2^2 / 2: the curve of a Gaussian with noise multiplier 1 / s0 at sensitivity 1. Under Poisson sampling
the binomial expansion at *integer* orders holds for it, in both directions since the law is symmetric (Mironov, Talwar
and Zhang 2019). A coordinate is also sqrt(pi / 2) epsilon Gaussian DP, which composes and subsamples as Gaussian DP
does, so that a loss distribution of a Gaussian with sqrt(2 / pi) / s0 is valid; one with 1 / s0 is not.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln

from dptune.privacy.accounting.laplace_mixtures import InverseScale, rounded_up
from dptune.privacy.release import LIKE_GAUSSIAN, PURE, Composition, Release

#: Renyi orders to search; integers only, for which the expansion under sampling is proven.
INTEGER_ORDERS = (*range(2, 257), *range(272, 513, 16), *range(576, 1025, 64))

#: Largest number of distinct curves that are priced one by one.
MOST_CURVES = 1024
_WIDEST = 1e3  # step of a grid that is so coarse that all kinds of one family become equal
_BOUNDED = LIKE_GAUSSIAN

Array = NDArray[np.float64]
Indices = NDArray[np.int64]
Kind = TypeVar("Kind")


class _Curve(NamedTuple):
    """The numbers that a Renyi curve depends on: rate, 1 / effective noise multiplier, and with l1 law and shift."""

    rate: float
    signal: float
    law: InverseScale | None = None
    shift: float = 1.0


def renyi_epsilon(composition: Composition, delta: float, orders: Sequence[int] = INTEGER_ORDERS) -> float:
    """Upper bound on epsilon at ``delta`` in (0, 1) over integer Renyi orders, Gaussian releases included.

    More than ``MOST_CURVES`` distinct curves are merged into fewer, dearer ones. If only one number moves, such as the
    scale of the noise, that adds a few thousandths to epsilon.
    """
    from dp_accounting.rdp import compute_epsilon

    if not all(release.noise in _BOUNDED for release in composition):
        return math.inf
    curves = Counter[_Curve]()
    for release, count in composition.items():
        curves[_curve(release)] += count
    total = np.zeros(len(orders))
    for curve, count in merged(curves, _coarser, MOST_CURVES).items():
        total += count * _sampled(curve, tuple(orders))
    return float(compute_epsilon(orders, total, delta)[0])


def merged(kinds: Counter[Kind], coarser: Callable[[Kind, float], Kind], most: int) -> Counter[Kind]:
    """Merge kinds into at most ``most``, each replaced by one that costs at least as much.

    ``coarser(kind, step)`` rounds the numbers of a kind to a grid of ``step`` in the logarithm. The grid of twice the
    step must be part of it, so that a part of a composition never costs more than the whole.
    """
    step, few = 0.001, kinds
    while len(few) > most and step < _WIDEST:
        few = Counter()
        for kind, count in kinds.items():
            few[coarser(kind, step)] += count
        step *= 2
    return few


def _coarser(curve: _Curve, step: float) -> _Curve:
    law = None if curve.law is None else curve.law.rounded_up(step)
    rate, signal, shift = (rounded_up(number, step) for number in (curve.rate, curve.signal, curve.shift))
    return _Curve(min(1.0, rate), signal, law, shift)


def _curve(release: Release) -> _Curve:
    multiplier = release.effective_noise_multiplier
    pure = (release.law, release.sensitivity) if is_pure(release) else (None, 1.0)
    return _Curve(release.sample_rate, 1 / multiplier if multiplier else math.inf, *pure)


def pure_epsilon(composition: Composition) -> float:
    """Sum of log(1 + q (e^s - 1)): finite if every release is clipped in l1, and then a bound at delta = 0.

    The bound is for ideal real-valued noise; see ``dptune.mechanisms.noises.laplace_noise.Laplace``.
    """
    total = 0.0
    for release, count in composition.items():
        step = 1 / release.effective_noise_multiplier if is_pure(release) else math.inf
        rate = release.sample_rate
        # log(1 - q + q e^s), without overflow at a large s.
        total += count * float(np.logaddexp(math.log1p(-rate) if rate < 1 else -math.inf, math.log(rate) + step))
    return total


def is_pure(release: Release) -> bool:
    """Whether the whole release is bounded in l1 and has noise of a family in ``PURE`` on every coordinate."""
    return release.norm == "l1" and release.noise in PURE and release.statistics == ("gradient sum",)


def gaussian_renyi(rate: float, noise_multiplier: float, orders: tuple[int, ...]) -> Array:
    """Renyi DP of a Poisson-sampled Gaussian release at integer orders."""
    return _sampled(_Curve(rate, 1 / noise_multiplier), orders)


def limit_multiplier(release: Release) -> float:
    """The noise multiplier of the Gaussian that is the limit of spreading a shift over ever more coordinates.

    At a small dimension it is no bound in either direction.
    """
    if release.law is None:
        return release.effective_noise_multiplier
    return 1 / (math.sqrt(release.law.fisher_information) * release.sensitivity)


def scalar_renyi(law: InverseScale, shift: float, orders: Array) -> Array:
    """Renyi DP of one coordinate shifted by ``shift``; infinity outside the domain (LMO-DP, equation 4).

    It is an upper bound for one coordinate, by joint convexity. As it is convex in the shift, it also holds for any
    number of coordinates that are shifted by ``shift`` in l1 together; for a shift in l2 it does not.
    """
    first = np.log(orders / (2 * orders - 1)) + law.log_mgf((orders - 1) * shift)
    second = np.log((orders - 1) / (2 * orders - 1)) + law.log_mgf(-orders * shift)
    return np.asarray(np.logaddexp(first, second) / (orders - 1))


@lru_cache(maxsize=4096)
def _sampled(curve: _Curve, orders: tuple[int, ...]) -> Array:
    unsampled = _unsampled(curve, max(orders))
    return unsampled[np.array(orders)] if curve.rate == 1.0 else _expansion(curve.rate, unsampled, orders)


def _unsampled(curve: _Curve, highest: int) -> Array:
    """Renyi DP at the orders 0, 1, ..., highest; 0 at the first two, which the expansion never uses."""
    orders = np.arange(2, highest + 1, dtype=np.float64)
    bound = orders * (curve.signal * curve.signal / 2)
    if curve.law is not None:
        bound = np.minimum(np.minimum(bound, curve.signal), scalar_renyi(curve.law, curve.shift, orders))
    return np.concatenate([np.zeros(2), bound])


def _expansion(rate: float, curve: Array, orders: tuple[int, ...]) -> Array:
    """log(sum_l binom(order, l) (1-q)^(order-l) q^l exp((l-1) curve(l))) / (order - 1), at every order."""
    inner, outer, log_binomials, starts = _terms(orders)
    exponents = np.maximum(np.arange(len(curve)) - 1, 0) * curve
    terms = log_binomials + outer * math.log1p(-rate) + inner * math.log(rate) + exponents[inner]
    most = np.maximum.reduceat(terms, starts)
    with np.errstate(invalid="ignore"):
        sums = np.add.reduceat(np.exp(terms - np.repeat(most, np.array(orders) + 1)), starts)
        values = np.maximum(most + np.log(sums), 0.0) / (np.array(orders) - 1)
    return np.where(np.isfinite(most), values, np.inf)


@lru_cache(maxsize=16)
def _terms(orders: tuple[int, ...]) -> tuple[Indices, Indices, Array, Indices]:
    """Terms of the sums of all orders, in one row: l, order - l, log binom(order, l); and each order's first place."""
    inner = np.concatenate([np.arange(order + 1) for order in orders])
    order = np.repeat(orders, np.array(orders) + 1)
    starts = np.cumsum([0, *(order + 1 for order in orders[:-1])])
    return inner, order - inner, gammaln(order + 1) - gammaln(inner + 1) - gammaln(order - inner + 1), starts
