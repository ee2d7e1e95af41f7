"""Fixed batches: batches cut to a largest size, and batches of one size drawn without replacement.

**Truncated Poisson.** *Statement.* Each of n units enters each batch by a coin of chance q; a batch of more than B
units is cut to B of them at random. If T steps of Poisson sampling are (epsilon, delta)-DP under add/remove of one
unit, these are (epsilon, delta + c)-DP, c = 1 - (1 - t)^T, where t is the chance that n coins give B heads or more.
*Proof.* Let G be the event that in no step B or more of the other units are drawn. It hangs on their coins alone, which
are the same for both data sets, and has a chance of at least 1 - c. Given any coins in G no batch is cut, with the unit
or without, so the steps are those of Poisson sampling with the others' coins known, whose dominating pair is the same.
Given other coins the divergence is at most 1. A mixture with the same weights diverges by no more than the mixture of
the divergences. (Chua et al. 2024, Scalable DP-SGD, add (1 + e^epsilon) times such a chance to delta.)

**Fixed size.** *Statement.* Each batch is a uniformly random set of B of the n units, q = B / n. Under replacement of
one unit, a step with noise z is dominated by the symmetric pair whose delta at epsilon >= 0 is that of a
Poisson-sampled Gaussian of rate q and noise z / 2 under ``remove`` (and follows from it below 0). So it is under
add/remove of one unit at the same B, with n the larger number. *Proof.* Let M1 be the release given that the unit is
drawn, M1' with its replacement, M0 if it is not drawn. The two laws are (1 - q) M0 + q M1 and (1 - q) M0 + q M1'. By
advanced joint convexity (Balle, Barthe and Gaboardi 2018) their divergence at e^epsilon = 1 + q (a - 1) is at most q
times a mixture of the divergences at a of M1 from M0 and from M1'. Both pairs can be coupled so that one unit of the
batch differs: a set that holds the unit, and one with another unit in its place. The sum then moves by at most 2. So
the divergence is at most q times that of N(2, z^2) from N(0, z^2) at a, which is that of (1 - q) N(0) + q N(2) from
N(0) at epsilon. Replacing is symmetric, so the same holds the other way round, and below 0 by duality (Zhu, Dong and
Wang 2022). Data whose other gradients are all -1 reach it. Under add/remove M1' is M0, and one of the
two directions is needed.

A bound of ``remove`` alone would not compose (Lebeda et al. 2024): the pair has the losses below 0 of the other
direction. Everything here is public.
"""

from __future__ import annotations

import math

from scipy.special import betainc

from dptune.core.errors import ConfigError

#: Relative error that a binomial tail is given.
_TAIL_ERROR = 1e-6
#: Share of delta that the advised largest batch leaves for cuts.
_ADVISED = 1e-3


def chance_of_a_cut(units: int, sample_rate: float, max_batch: int, steps: int) -> float:
    """The chance c of the statement, from above.

    Example:
        >>> from dptune.privacy.accounting.fixed_batches import chance_of_a_cut
        >>> f"{chance_of_a_cut(units=10_000, sample_rate=0.01, max_batch=180, steps=1000):.2g}"
        '3e-10'
    """
    if max_batch > units:
        return 0.0
    one = float(betainc(max_batch, units - max_batch + 1, sample_rate)) * (1 + _TAIL_ERROR) + 1e-300
    return -math.expm1(steps * math.log1p(-one)) if one < 1 else 1.0


def delta_without_cuts(units: int, sample_rate: float, max_batch: int, steps: int, delta: float) -> float:
    """The delta that is left for Poisson sampling. Raises: ConfigError, with a larger batch, if none is left."""
    cut = chance_of_a_cut(units, sample_rate, max_batch, steps)
    if cut < delta:
        return delta - cut
    problem = f"a batch is cut to {max_batch} with a chance of {cut:.2g} in {steps} steps, which is not below delta"
    raise ConfigError("max_batch", problem, fix=f"use {advised_batch(units, sample_rate, steps, delta)} or more")


def advised_batch(units: int, sample_rate: float, steps: int, delta: float) -> int:
    """The least batch to cut to whose cuts, over all steps, take at most a thousandth of delta. Public.

    Example:
        >>> from dptune.privacy.accounting.fixed_batches import advised_batch
        >>> advised_batch(units=10_000, sample_rate=0.01, steps=1000, delta=1e-5)
        175
    """
    low, high = 0, units + 1
    while high - low > 1:
        middle = (low + high) // 2
        enough = chance_of_a_cut(units, sample_rate, middle, steps) <= _ADVISED * delta
        low, high = (low, middle) if enough else (middle, high)
    return high
