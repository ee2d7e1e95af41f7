"""Gaussian differential privacy: the exact conversion between its mu, epsilon and delta (Dong, Roth and Su 2022)."""

from __future__ import annotations

import math

import numpy as np
from scipy.special import erfcx, log_ndtr


def gdp_epsilon(mu: float, delta: float) -> float:
    """Epsilon of mu-Gaussian DP at delta, by the exact conversion.

    Example:
        >>> from dptune.privacy.accounting.gaussian_dp import gdp_epsilon
        >>> round(gdp_epsilon(mu=1.0, delta=1e-5), 4)
        4.3772
    """
    if math.isinf(mu):
        return math.inf
    if mu == 0 or gdp_delta(mu, 0.0) <= delta:
        return 0.0
    from scipy.optimize import brentq

    high = 1.0
    while gdp_delta(mu, high) > delta:
        high *= 2
        if math.isinf(high):
            return math.inf
    root, _ = brentq(lambda epsilon: gdp_delta(mu, epsilon) - delta, 0.0, high, xtol=1e-15, full_output=True)
    return float(root)


def gdp_delta(mu: float, epsilon: float) -> float:
    """Delta of mu-Gaussian DP at epsilon, without overflow.

    e^epsilon Phi(-x) with x = epsilon / mu + mu / 2 is exp(-(epsilon / mu - mu / 2)^2 / 2) erfcx(x / sqrt(2)) / 2.
    """
    away = epsilon / mu - mu / 2
    second = erfcx((epsilon / mu + mu / 2) / math.sqrt(2)) / 2 * np.exp(-away * away / 2)
    return float(np.exp(log_ndtr(-away)) - second)
