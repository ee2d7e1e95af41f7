"""Sampler bounds: what releases cost as their batches were really sampled, for samplers other than Poisson."""

from __future__ import annotations

import math

from scipy.special import betainc

from dptune.core.errors import ConfigError
from dptune.privacy.accounting.composed_losses import composed_epsilon, replaced_epsilon
from dptune.privacy.accounting.sampled_gaussian import Kind, gdp_epsilon
from dptune.privacy.release import UNBOUNDED, Composition, Release
from dptune.privacy.samplers.random_allocation import allocation_epsilon
from dptune.privacy.samplers.shuffled_batches import least_shuffled_epsilon


def sampled_epsilon(composition: Composition, delta: float, *, quick: bool = False) -> float:
    """Upper bound for releases of one sampler other than Poisson, at one rate. Each part is priced apart.

    Guarantee: never below the truth, at any delta, for the neighbours that ``sampler.SAMPLERS`` names. For shuffle it
    is the bound without any amplification within an epoch. Given the batches of all other units, the unit is in one
    known batch of an epoch, or left out with the last one; the other sums are the same for both data sets, so the epoch
    is one Gaussian release at most. A mixture with the same weights diverges by no more than its worst part, and
    Gaussian DP composes exactly.

    The bound holds after every release: those of an epoch that was begun are a part of the whole epoch's, whose price
    counts. Epochs begin with the first release, and their bins are never drawn anew within one (``training.data``).
    Where noise differs, as by its last digits where a controller moves radii, the least counts for all: more noise is
    less noise with some added.

    Args:
        composition: the count of each distinct release; an epoch that was begun counts as a whole one.
        delta: a number in (0, 1).
        quick: a looser bound, several times faster.

    Returns: infinity where a release has no noise.

    Raises: ConfigError for releases that differ in sampler or sample rate.

    Example:
        >>> from collections import Counter
        >>> from dptune.privacy.samplers.sampler_bounds import sampled_epsilon
        >>> from dptune.privacy.samplers.sampler import Sampler
        >>> from dptune.privacy.release import Release
        >>> step = Release(sample_rate=1 / 65, noise_multiplier=1.3521, sampler=Sampler("shuffle", batches=65))
        >>> round(sampled_epsilon(Counter({step: 65}), delta=7.424e-6), 5)
        3.14878
    """
    if any(release.noise in UNBOUNDED for release in composition):
        return math.inf
    release, count = _only(composition)
    name, rate, noise = release.sampler.name, release.sample_rate, release.effective_noise_multiplier
    if name == "truncated_poisson":
        left = delta_without_cuts(release.sampler.units, rate, release.sampler.max_batch, count, delta)
        return min(_unamplified(noise, count, left), composed_epsilon([Kind(rate, noise, count)], left, quick=quick))
    if name == "fixed_size":
        bound = replaced_epsilon(Kind(rate, noise / 2, count), delta, quick=quick)
        return min(_unamplified(noise / 2, count, delta), bound)
    epochs = math.ceil(count / release.sampler.batches)
    unamplified = _unamplified(noise, epochs, delta)
    if name == "balls_in_bins":
        return min(unamplified, allocation_epsilon(noise, release.sampler.batches, epochs, delta, quick=quick))
    return unamplified


def least_epsilon(composition: Composition, delta: float) -> float | None:
    """A lower bound for releases of one sampler; None where dptune knows none.

    Guarantee: no epsilon below it holds at this delta, for data that ``shuffled_batches`` names.

    Example:
        >>> from dptune.privacy.samplers.sampler_bounds import least_epsilon
        >>> from dptune.privacy.samplers.sampler import sampler_of
        >>> from dptune.privacy.release import Release
        >>> rate = 1024 / 66013
        >>> step = Release(rate, 1.3521, sampler=sampler_of("shuffle", rate, records=66013, drop_last=True))
        >>> round(least_epsilon({step: 64}, delta=7.424e-6), 5)
        2.35712
    """
    release, count = _only(composition)
    if len(composition) > 1:  # the least noise of several would overstate what they cost at least
        return None
    # A statistic beside the gradient may take a share of the sensitivity that the data of the proof do not reach.
    if release.sampler.name != "shuffle" or release.statistics != ("gradient sum",):
        return None
    batches, left_out = release.sampler.batches, release.sampler.left_out(release.sample_rate)
    noise, epochs = release.effective_noise_multiplier, count // batches
    return least_shuffled_epsilon(noise, batches, epochs, delta, left_out)


def _only(composition: Composition) -> tuple[Release, int]:
    """The release with the least noise, and the count of all, if they have one sampler and one sample rate."""
    releases = [release for release, count in composition.items() if count]
    if len({(release.sampler, release.sample_rate) for release in releases}) == 1:
        return min(releases, key=lambda release: release.effective_noise_multiplier), sum(composition.values())
    names = ", ".join(sorted({release.sampler.name for release in releases})) or "none"
    problem = f"{len(releases)} kinds of release (samplers: {names}) have no joint price with a sampler but poisson"
    raise ConfigError("sampler", problem, fix="price each kind alone, and add up their epsilons and their deltas")


def _unamplified(noise: float, times: int, delta: float) -> float:
    """Epsilon of a unit that takes part in ``times`` releases; above ``gdp_epsilon`` by more than it can be off."""
    return gdp_epsilon(math.sqrt(times) / noise, delta) * (1 + 1e-9) + 1e-12


# Fixed batches: batches cut to a largest size, and batches of one size drawn without replacement.
#
# **Truncated Poisson.** *Statement.* Each of n units enters each batch by a coin of chance q; a batch of more than B
# units is cut to B of them at random. If T steps of Poisson sampling are (epsilon, delta)-DP under add/remove of one
# unit, these are (epsilon, delta + c)-DP, c = 1 - (1 - t)^T, where t is the chance that n coins give B heads or more.
# *Proof.* Let G be the event that in no step B or more of the other units are drawn. It hangs on their coins alone,
# which are the same for both data sets, and has a chance of at least 1 - c. Given any coins in G no batch is cut, with
# the unit or without, so the steps are those of Poisson sampling with the others' coins known, whose dominating pair is
# the same. Given other coins the divergence is at most 1. A mixture with the same weights diverges by no more than the
# mixture of the divergences. (Chua et al. 2024, Scalable DP-SGD, add (1 + e^epsilon) times such a chance to delta.)
#
# **Fixed size.** *Statement.* Each batch is a uniformly random set of B of the n units, q = B / n. Under replacement of
# one unit, a step with noise z is dominated by the symmetric pair whose delta at epsilon >= 0 is that of a
# Poisson-sampled Gaussian of rate q and noise z / 2 under ``remove`` (and follows from it below 0). So it is under
# add/remove of one unit at the same B, with n the larger number. *Proof.* Let M1 be the release given that the unit is
# drawn, M1' with its replacement, M0 if it is not drawn. The two laws are (1 - q) M0 + q M1 and (1 - q) M0 + q M1'. By
# advanced joint convexity (Balle, Barthe and Gaboardi 2018) their divergence at e^epsilon = 1 + q (a - 1) is at most q
# times a mixture of the divergences at a of M1 from M0 and from M1'. Both pairs can be coupled so that one unit of the
# batch differs: a set that holds the unit, and one with another unit in its place. The sum then moves by at most 2. So
# the divergence is at most q times that of N(2, z^2) from N(0, z^2) at a, which is that of (1 - q) N(0) + q N(2) from
# N(0) at epsilon. Replacing is symmetric, so the same holds the other way round, and below 0 by duality (Zhu, Dong and
# Wang 2022). Data whose other gradients are all -1 reach it. Under add/remove M1' is M0, and one of the
# two directions is needed.
#
# A bound of ``remove`` alone would not compose (Lebeda et al. 2024): the pair has the losses below 0 of the other
# direction. Everything here is public.


#: Relative error that a binomial tail is given.
_TAIL_ERROR = 1e-6
#: Share of delta that the advised largest batch leaves for cuts.
_ADVISED = 1e-3


def chance_of_a_cut(units: int, sample_rate: float, max_batch: int, steps: int) -> float:
    """The chance c of the statement, from above.

    Example:
        >>> from dptune.privacy.samplers.sampler_bounds import chance_of_a_cut
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
        >>> from dptune.privacy.samplers.sampler_bounds import advised_batch
        >>> advised_batch(units=10_000, sample_rate=0.01, steps=1000, delta=1e-5)
        175
    """
    low, high = 0, units + 1
    while high - low > 1:
        middle = (low + high) // 2
        enough = chance_of_a_cut(units, sample_rate, middle, steps) <= _ADVISED * delta
        low, high = (low, middle) if enough else (middle, high)
    return high
