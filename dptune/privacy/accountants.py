"""Accountants: functions from a composition of releases to an epsilon at a given delta.

``epsilons`` puts the three numbers side by side. Sources: the loss distribution of Poisson-sampled Gaussian releases
(``composed_losses``); their Renyi DP (Mironov, Talwar and Zhang 2019), from dp-accounting; the Gaussian-DP central
limit theorem (Dong, Roth and Su 2022; Bu et al. 2020), which papers use and which is no bound. Papers on banded
matrix factorisation state the first of them, so "bandmf" is the same function.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from dptune.core.errors import ConfigError
from dptune.privacy.accounting.mixture_bounds import is_pure, pure_epsilon, renyi_epsilon
from dptune.privacy.accounting.parts import WORK, dearest
from dptune.privacy.accounting.published_accountants import (
    dppg_epsilon,
    lmo_dp_epsilon,
    plrvo_epsilon,
    plrvo_one_coordinate_epsilon,
)
from dptune.privacy.accounting.renyi_filter import RenyiFilter, answers_epsilon, has_answers, published_answers_epsilon
from dptune.privacy.accounting.sampled_gaussian import Kind
from dptune.privacy.accounting.sampled_gaussian import gdp_delta as gdp_delta  # callers import it from here
from dptune.privacy.accounting.sampled_gaussian import gdp_epsilon as gdp_epsilon
from dptune.privacy.release import LIKE_GAUSSIAN, Composition, Release
from dptune.privacy.samplers.sampler_bounds import sampled_epsilon

# dp-accounting warns of every order whose series does not converge, hundreds of times a run, and a user can do nothing
# about it. Such an order costs infinity: a looser bound or more noise, never too small an epsilon.
logging.getLogger("absl").addFilter(lambda record: "_compute_log_a_frac failed" not in str(record.msg))

#: Version of the accountants, and of the calibration that asks them for noise. Raise it when a change moves an epsilon
#: or a calibrated multiplier: tests/golden says when.
VERSION = 1
#: Releases of different parts that are priced one by one where a price is a sum.
_SUMS = 20_000
#: Fractional orders matter: at epsilon 8 and small sampling rates the best order lies near 2.5.
RENYI_ORDERS = (
    *np.arange(1.05, 4.0, 0.05),
    *np.arange(4.0, 20.0, 0.5),
    *range(20, 65, 4),
    80,
    128,
    256,
    512,
    1024,
)


@dataclass(frozen=True)
class Epsilons:
    """The three epsilons of one run, at one delta.

    Attributes:
        published: the paper's accountant on the paper's own terms. A claim, not a guarantee.
        noise_only: right sensitivity, right accountant, leaks of the controller ignored.
        certified: the guarantee; infinity while anything un-noised or unaccounted steers the run.
        leaks: reasons why ``certified`` is infinite; empty when it is the guarantee.

    Example:
        >>> from collections import Counter
        >>> from dptune.privacy.accountants import epsilons
        >>> from dptune.privacy.release import Release
        >>> prices = epsilons(Counter({Release(0.01, 1.0, raw_inputs=("gradient norms",)): 1000}), delta=1e-5)
        >>> round(prices.noise_only, 3), prices.certified
        (1.829, inf)
        >>> prices.leaks
        ('gradient norms',)
    """

    published: float
    noise_only: float
    certified: float
    leaks: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, float]:
        """The three epsilons under the names that every file uses."""
        return {
            "epsilon_published": self.published,
            "epsilon_noise_only": self.noise_only,
            "epsilon_certified": self.certified,
        }


def epsilons(
    composition: Composition,
    delta: float,
    *,
    published_accountant: str = "gdp_clt",
    renyi_filter: RenyiFilter | None = None,
    run_leaks: tuple[str, ...] = (),
    inherited: Composition | None = None,
) -> Epsilons:
    """Price a composition three ways. Releases about disjoint parts of the units cost what the dearest part costs.

    Guarantee: if ``certified`` is finite, the sequence of releases is (certified, delta)-DP under
    add/remove of one unit, given Poisson sampling with secret coins; of another sampler, under its neighbours
    (``sampler.SAMPLERS``). Where releases name parts, no unit's part may hang
    on others: it follows from the unit's own key, or the slot of a unit that leaves stays, empty. All arguments are
    public. (Only this function tells parts apart; all others here add up all releases.)

    Args:
        composition: the count of each distinct release.
        delta: a number in (0, 1).
        published_accountant: a key of ``PUBLISHED_ACCOUNTANTS``.
        renyi_filter: the filter fixed before the run, required for a finite epsilon when a release is adaptive.
        run_leaks: reasons from outside the releases (a fixed noise seed, say) that void the guarantee.
        inherited: releases of other runs that this one was made from (a hyper-policy's). They count in
            ``noise_only`` and ``certified``; no paper counts them, so not in ``published``. Parts among them must be
            of one run: two runs number theirs alike.

    Raises:
        ConfigError: delta out of range or unknown accountant.

    Example:
        >>> from collections import Counter
        >>> from dptune.privacy.accountants import epsilons
        >>> from dptune.privacy.release import Release
        >>> prices = epsilons(Counter({Release(sample_rate=0.01, noise_multiplier=1.0): 1000}), delta=1e-5)
        >>> round(prices.published, 3), round(prices.certified, 3)
        (1.618, 1.829)
    """
    check_delta(delta, pure=delta == 0 and _is_pure(composition))
    published = published_epsilon(published_accountant, composition, delta)
    leaks = leaks_of(composition + (inherited or Counter()), renyi_filter, run_leaks)
    # A unit in some part of an inherited run may be in any part of this run: every pair of parts is priced.
    mine, theirs = _unlabelled(composition), _unlabelled(inherited or Counter())
    work = _SUMS if renyi_filter is not None else WORK

    def of_parts(both: Composition) -> float:
        if renyi_filter is not None and any(release.adaptive for release in both):
            return renyi_filter.epsilon(both, delta)
        return smallest_epsilon(both, delta)

    noise_only = dearest(mine, lambda one: dearest(theirs, lambda other: of_parts(one + other), work), work)
    return Epsilons(published, noise_only, math.inf if leaks else noise_only, leaks)


def _unlabelled(composition: Composition) -> Composition:
    """The releases without the fields that no bound reads, if any is about a part: equally dear parts become equal."""
    if all(release.part is None for release in composition):
        return composition
    total: Composition = Counter()
    for release, count in composition.items():
        statistics = release.statistics if release.norm == "l1" else ("gradient sum",)
        total[replace(release, statistics=statistics, raw_inputs=(), claims=())] += count
    return total


def published_epsilon(accountant: str, composition: Composition, delta: float) -> float:
    """The epsilon of the paper's accountant; infinite where it has none.

    It has none at delta 0, without a claim that it needs, and for a sampler that its formula is not for.

    Raises: ConfigError for an unknown accountant, which a plug-in's noise may name.
    """
    if accountant not in PUBLISHED_ACCOUNTANTS:
        known = ", ".join(PUBLISHED_ACCOUNTANTS)
        raise ConfigError("published_accountant", f"unknown accountant {accountant!r}", fix=f"use one of {known}")
    if delta == 0 and accountant != "pure":
        return math.inf
    if not all(release.sampler.claimed for release in composition):
        return math.inf
    return dearest(composition, lambda part: PUBLISHED_ACCOUNTANTS[accountant](part, delta), work=_SUMS)


def smallest_epsilon(composition: Composition, delta: float) -> float:
    """The least of the bounds that hold for these releases, each proven at this ``delta``.

    Gaussian releases alone have a tight bound. With Laplace mixtures the bounds are the loss distribution of a Gaussian
    that is at most as private, Renyi DP at integer orders and, with clipping in l1, pure DP, the only one that holds at
    delta 0. With tokens the bound is Renyi DP at their order.

    Example:
        >>> from collections import Counter
        >>> from dptune.privacy.accountants import smallest_epsilon
        >>> from dptune.privacy.release import Release
        >>> round(smallest_epsilon(Counter({Release(sample_rate=0.01, noise_multiplier=1.0): 1000}), delta=1e-5), 3)
        1.829
    """
    check_delta(delta, pure=delta == 0 and _is_pure(composition))
    if not is_like_poisson(composition):
        return sampled_epsilon(composition, delta)
    if all(release.noise == "gaussian" for release in composition):
        return pld_epsilon(composition, delta)
    if has_answers(composition):
        return answers_epsilon(composition, delta)
    quick = quick_epsilon(composition, delta)
    if delta == 0 or math.isinf(quick):
        return quick
    return min(quick, pld_epsilon(composition, delta))


def quick_epsilon(composition: Composition, delta: float) -> float:
    """A faster bound near ``smallest_epsilon``: on a coarse grid, or without a grid for Laplace mixtures."""
    if not is_like_poisson(composition):
        return sampled_epsilon(composition, delta, quick=True)
    if all(release.noise == "gaussian" for release in composition):
        return pld_epsilon(composition, delta, quick=True)
    if has_answers(composition):
        return answers_epsilon(composition, delta)
    if any(release.noise == "shared_laplace_mixture" for release in composition):
        return math.inf
    if delta == 0:
        return pure_epsilon(composition)
    return math.inf if has_noiseless(composition) else min(pure_epsilon(composition), renyi_epsilon(composition, delta))


def leaks_of(
    composition: Composition, renyi_filter: RenyiFilter | None = None, run_leaks: tuple[str, ...] = ()
) -> tuple[str, ...]:
    """Reasons why these releases have no certified epsilon; empty if they have one."""
    leaks = dict.fromkeys(run_leaks)
    for release in composition:
        leaks.update(dict.fromkeys(release.leaks))
    if renyi_filter is None and any(release.adaptive for release in composition):
        leaks["noise chosen from earlier releases without a filter fixed in advance"] = None
    return tuple(leaks)


def pld_epsilon(composition: Composition, delta: float, *, quick: bool = False) -> float:
    """Tight upper bound for releases whose parameters were fixed in advance: their loss distribution, exact at q = 1.

    Guarantee: never below the truth, at any delta; within 1 % of it for epsilon from 0.02 to 20 and up to 64 kinds of
    Gaussian release (see the tests for the ratios that were found). It uses the effective noise multiplier, and for
    Laplace mixtures that of a Gaussian that is at most as private.

    Args:
        composition: the count of each distinct release.
        delta: a number in (0, 1).
        quick: a looser bound, several times faster.

    Example:
        >>> from collections import Counter
        >>> from dptune.privacy.accountants import pld_epsilon
        >>> from dptune.privacy.release import Release
        >>> round(pld_epsilon(Counter({Release(0.01, 1.0): 500, Release(0.02, 1.5): 500}), delta=1e-5), 3)
        1.898
    """
    check_delta(delta)
    if not composition:
        return 0.0
    if has_noiseless(composition):
        return math.inf
    return _pld_epsilon(as_kinds(composition), delta, quick)


@lru_cache(maxsize=4096)
def _pld_epsilon(key: tuple[Kind, ...], delta: float, quick: bool = False) -> float:
    from dptune.privacy.accounting.composed_losses import composed_epsilon

    # Gaussian DP composes exactly. ``gdp_epsilon`` adds more than its root finder can be off.
    unsampled = gdp_epsilon(math.hypot(*(math.sqrt(kind.releases) / kind.noise_multiplier for kind in key)), delta)
    unsampled = unsampled * (1 + 1e-9) + 1e-12
    if all(kind.sample_rate == 1.0 for kind in key):
        return unsampled
    # Sampling only helps, so this bound holds even if the loss distribution gives none: with hardly any noise, say.
    return min(unsampled, composed_epsilon(key, delta, quick=quick))


def rdp_epsilon(composition: Composition, delta: float) -> float:
    """Upper bound by Renyi DP over ``RENYI_ORDERS``, for releases whose parameters were fixed in advance.

    Example:
        >>> from collections import Counter
        >>> from dptune.privacy.accountants import pld_epsilon, rdp_epsilon
        >>> from dptune.privacy.release import Release
        >>> steps = Counter({Release(sample_rate=0.01, noise_multiplier=1.0): 1000})
        >>> round(rdp_epsilon(steps, delta=1e-5), 3), round(pld_epsilon(steps, delta=1e-5), 3)
        (2.108, 1.829)
    """
    check_delta(delta)
    if not composition:
        return 0.0
    if has_noiseless(composition):
        return math.inf
    return _rdp_epsilon(as_kinds(composition), delta)


@lru_cache(maxsize=4096)
def _rdp_epsilon(key: tuple[Kind, ...], delta: float) -> float:
    from dp_accounting import dp_event
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant(orders=RENYI_ORDERS)
    for sample_rate, noise_multiplier, count in key:
        accountant.compose(
            dp_event.PoissonSampledDpEvent(sample_rate, dp_event.GaussianDpEvent(noise_multiplier)), count
        )
    return float(accountant.get_epsilon(delta))


def gdp_clt_epsilon(composition: Composition, delta: float) -> float:
    """The central-limit epsilon at the *published* noise multiplier. Asymptotic: neither an upper nor a lower bound.

    mu^2 = sum q^2 (exp(1/z^2) - 1), then the duality of mu-Gaussian DP (Dong, Roth and Su 2022, corollary 1).

    Example:
        >>> from collections import Counter
        >>> from dptune.privacy.accountants import gdp_clt_epsilon, pld_epsilon
        >>> from dptune.privacy.release import Release
        >>> steps = Counter({Release(sample_rate=0.01, noise_multiplier=1.0): 1000})
        >>> round(gdp_clt_epsilon(steps, delta=1e-5), 3), round(pld_epsilon(steps, delta=1e-5), 3)
        (1.618, 1.829)
    """
    check_delta(delta)
    if not composition:
        return 0.0
    if has_noiseless(composition):
        return math.inf
    with np.errstate(over="ignore", divide="ignore"):
        mu_squared = sum(
            count * r.sample_rate**2 * float(np.expm1(1 / np.float64(r.noise_multiplier) ** 2))
            for r, count in composition.items()
        )
    return gdp_epsilon(math.sqrt(mu_squared), delta)


def repriced_epsilon(last: Release, releases: int, delta: float) -> float:
    """The epsilon of RLDP's algorithm 1, line 14, which prices all past releases at the *last* sigma.

    A diagnostic, not an accountant: a controller that ends with more noise erases what it has spent.
    """
    return gdp_clt_epsilon(Counter({last: releases}), delta)


PUBLISHED_ACCOUNTANTS: dict[str, Callable[[Composition, float], float]] = {
    "gdp_clt": gdp_clt_epsilon,
    "pure": lambda composition, delta: pure_epsilon(composition),
    "plrvo": plrvo_epsilon,
    "plrvo_one_coordinate": plrvo_one_coordinate_epsilon,
    "lmo_dp": lmo_dp_epsilon,
    "pmixed": published_answers_epsilon,
    "dppg": dppg_epsilon,
    "bandmf": pld_epsilon,
}


def as_kinds(composition: Composition) -> tuple[Kind, ...]:
    """The releases as Poisson-sampled Gaussians that are at most as private, equal ones counted together.

    Raises: ConfigError for releases of a sampler that accountants of Poisson sampling do not price.
    """
    totals: dict[tuple[float, float], int] = {}
    for release, count in composition.items():
        if not release.sampler.like_poisson:
            problem = f"{release.sampler.name} is not Poisson sampling, which the proof of this bound needs"
            raise ConfigError("sampler", problem, fix="use poisson, or price one run without a search")
        pair = (release.sample_rate, release.gaussian_multiplier)
        if count:
            totals[pair] = totals.get(pair, 0) + count
    return tuple(Kind(q, z, count) for (q, z), count in sorted(totals.items()))


def is_like_poisson(composition: Composition) -> bool:
    """Whether accountants of Poisson sampling price all these releases."""
    return all(release.sampler.like_poisson for release in composition)


def has_noiseless(composition: Composition) -> bool:
    """Whether a release has no noise, or is a token, which no accountant of Gaussians can price."""
    return any(release.noise not in LIKE_GAUSSIAN for release in composition)


def _is_pure(composition: Composition) -> bool:
    return bool(composition) and all(is_pure(release) for release in composition)


def check_delta(delta: float, *, pure: bool = False) -> None:
    """Raise ConfigError unless delta is in (0, 1); with ``pure`` it may be 0."""
    if not 0 < delta < 1 and not (pure and delta == 0):
        raise ConfigError("delta", f"{delta} is not in (0, 1)", fix="use a number below 1 / records, such as 1e-5")
