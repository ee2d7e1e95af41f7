"""What Laplace-mixture noise costs: bounds that are proven for a clipped vector of any dimension.

A shift of one coordinate by x is (s0 |x|, 0)-DP, s0 being the law's score bound. An epsilon-DP coordinate is
alpha epsilon^2 / 2 Renyi DP (Bun and Steinke 2016, proposition 3.3). Over coordinates that adds up to
alpha s0^2 |x|_2^2 / 2: the curve of a Gaussian with noise multiplier 1 / s0 at sensitivity 1. Under Poisson sampling
the binomial expansion at *integer* orders holds for it, in both directions since the law is symmetric (Mironov, Talwar
and Zhang 2019). A coordinate is also sqrt(pi / 2) epsilon Gaussian DP, which composes and subsamples as Gaussian DP
does, so that a loss distribution of a Gaussian with sqrt(2 / pi) / s0 is valid; one with 1 / s0 is not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln

from dptune.privacy.laplace_mixtures import InverseScale
from dptune.privacy.release import Composition, Release

#: Only integers: the expansion under sampling is proven for them.
INTEGER_ORDERS = (*range(2, 257), *range(272, 513, 16), *range(576, 1025, 64))
#: Of the Gaussian whose trade-off function lies below that of noise with the same zCDP.
GDP_FACTOR = math.sqrt(2 / math.pi)

Array = NDArray[np.float64]


def renyi_epsilon(composition: Composition, delta: float, orders: Sequence[int] = INTEGER_ORDERS) -> float:
    """Upper bound on epsilon at ``delta`` in (0, 1) over integer Renyi orders, Gaussian releases included."""
    from dp_accounting.rdp import compute_epsilon

    total = np.zeros(len(orders))
    for release, count in composition.items():
        total += count * _sampled(release, tuple(orders))
    return float(compute_epsilon(orders, total, delta)[0])


def pure_epsilon(composition: Composition) -> float:
    """Sum of log(1 + q (e^s - 1)): finite where every release is clipped in l1, and then true at delta = 0.

    Of ideal real-valued noise, that is; see ``dptune.mechanisms.laplace_noise.Laplace``.
    """
    total = 0.0
    for release, count in composition.items():
        step = 1 / release.effective_noise_multiplier if is_pure(release) else math.inf
        rate = release.sample_rate
        # log(1 - q + q e^s) for any s.
        total += count * float(np.logaddexp(math.log1p(-rate) if rate < 1 else -math.inf, math.log(rate) + step))
    return total


def is_pure(release: Release) -> bool:
    """Whether all that leaves the step is bounded in l1 and has Laplace noise of its own on every coordinate."""
    return release.norm == "l1" and release.noise == "laplace_mixture" and release.statistics == ("gradient sum",)


def gaussian_renyi(rate: float, noise_multiplier: float, orders: tuple[int, ...]) -> Array:
    """Renyi DP of a Poisson-sampled Gaussian at integer orders."""
    return (
        _sampled(Release(rate, noise_multiplier), orders) if math.isfinite(noise_multiplier) else np.zeros(len(orders))
    )


def gaussian_dp_multiplier(release: Release) -> float:
    """The noise multiplier of a Gaussian release that is at most as private."""
    return release.effective_noise_multiplier * (1.0 if release.law is None else GDP_FACTOR)


def limit_multiplier(release: Release) -> float:
    """The noise multiplier of the Gaussian that a shift spread over ever more coordinates tends to.

    The limit of high dimension: no bound, in either direction, at a small one.
    """
    if release.law is None:
        return release.effective_noise_multiplier
    return 1 / (math.sqrt(release.law.fisher_information) * release.sensitivity)


def scalar_renyi(law: InverseScale, shift: float, orders: Array) -> Array:
    """Renyi DP of one coordinate shifted by ``shift``; infinity outside the domain (LMO-DP, equation 4).

    An upper bound for one coordinate, by joint convexity. It is convex in the shift, so that it holds for any number of
    coordinates shifted by ``shift`` in l1 together; in l2 it does not.
    """
    first = np.log(orders / (2 * orders - 1)) + law.log_mgf((orders - 1) * shift)
    second = np.log((orders - 1) / (2 * orders - 1)) + law.log_mgf(-orders * shift)
    return np.asarray(np.logaddexp(first, second) / (orders - 1))


@lru_cache(maxsize=4096)
def _sampled(release: Release, orders: tuple[int, ...]) -> Array:
    if release.noise not in ("gaussian", "laplace_mixture", "shared_laplace_mixture"):
        return np.full(len(orders), np.inf)
    curve = _unsampled(release, max(orders))
    if release.sample_rate == 1.0:
        return curve[np.array(orders)]
    return np.array([_expansion(release.sample_rate, curve, order) for order in orders])


def _unsampled(release: Release, highest: int) -> Array:
    """Renyi DP at the orders 0, 1, ..., highest; 0 at the first two, which the expansion never uses."""
    orders = np.arange(highest + 1, dtype=np.float64)
    curve = orders / (2 * release.effective_noise_multiplier**2)
    if is_pure(release) and release.law is not None:
        curve = np.minimum(curve, 1 / release.effective_noise_multiplier)
        curve[2:] = np.minimum(curve[2:], scalar_renyi(release.law, release.sensitivity, orders[2:]))
    curve[:2] = 0.0
    return np.asarray(curve)


def _expansion(rate: float, curve: Array, order: int) -> float:
    """log of sum_l binom(order, l) (1-q)^(order-l) q^l exp((l-1) curve(l)), over (order - 1)."""
    inner = np.arange(order + 1)
    terms = (
        gammaln(order + 1) - gammaln(inner + 1) - gammaln(order - inner + 1)
        + (order - inner) * math.log1p(-rate) + inner * math.log(rate)
        + np.maximum(inner - 1, 0) * curve[: order + 1]
    )  # fmt: skip
    return float(max(np.logaddexp.reduce(terms), 0.0)) / (order - 1)
