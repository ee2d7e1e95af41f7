"""Price a mechanism before a run, and find the noise that a budget asks for."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from dptune.core.digits import at_most
from dptune.core.errors import ConfigError
from dptune.mechanisms.mechanism import Mechanism
from dptune.privacy.accountants import Epsilons, epsilons, published_epsilon, quick_epsilon, smallest_epsilon
from dptune.privacy.accounting.loss_profile import profile_of
from dptune.privacy.accounting.parts import dearest, disjoint
from dptune.privacy.accounting.renyi_filter import RenyiFilter, smallest_noise_multiplier
from dptune.privacy.accounting.strategy import visits
from dptune.privacy.calibration import calibrate
from dptune.privacy.release import Composition, Release
from dptune.privacy.samplers.sampler import POISSON, Sampler
from dptune.privacy.selection import Bound, selection_epsilon
from dptune.privacy.selection_law import SelectionLaw

_ALMOST_ALL = 0.99
#: Strategies are kept to six digits; another machine's differ in the last of them at most.
_LAST_DIGITS = 2e-6


@dataclass(frozen=True)
class Schedule:
    """Sample rate, number of steps and sampler of a run, and the delta of its epsilon. Public."""

    sample_rate: float
    steps: int
    delta: float
    sampler: Sampler = POISSON


@dataclass(frozen=True)
class Calibrated:
    """A mechanism with the noise that meets a budget, and the filter that it needs if it moves that noise."""

    mechanism: Mechanism
    renyi_filter: RenyiFilter | None = None


def planned(mechanism: Mechanism, schedule: Schedule) -> Composition:
    """The releases of a run whose knobs stay where they start; with correlated noise, those about each group.

    Raises: ConfigError for more bands than steps, or so many that a unit would be drawn with a chance above 1, and for
    a sampler that no proof covers with the mechanism.
    """
    if mechanism.bands > schedule.steps:
        problem = f"{mechanism.bands} are more than the {schedule.steps} steps"
        raise ConfigError("bands", problem, fix=f"use at most {schedule.steps}")
    knobs, found = mechanism.knobs(), Counter[Release]()
    for group, rows in enumerate(visits(schedule.steps, mechanism.bands)):
        release = mechanism.release(knobs, schedule.sample_rate, row=group)
        found[sampled(release, schedule.sampler, mechanism)] = rows
    return found


def sampled(release: Release, sampler: Sampler, mechanism: Mechanism) -> Release:
    """A mechanism's release on a batch that this sampler drew.

    Radii may move, as of quantile, adaclip or dc_sgd: the proofs of all samplers let what one unit adds hang on earlier
    releases, as long as its bound over the noise stays. They do not cover noise that moves, is correlated or is not
    Gaussian.

    Raises: ConfigError naming the mechanism, where no proof covers both; and for a hyper-policy to start from if one of
    the two runs is not Poisson. Counts of such releases do not add up: two half epochs of bins are no whole one, for a
    unit can be in both.
    """
    inherited = mechanism.controller.inherited
    others = {one.name for one in (sampler, *(theirs.sampler for theirs in inherited)) if not one.like_poisson}
    if inherited and others:
        problem = f"is of another run, and no bound prices {others.pop()} together with it"
        raise ConfigError("init_from", problem, fix="use sampler poisson in both runs, or leave init_from out")
    if not sampler.like_poisson and not release.fits_any_sampler:
        needs = "independent Gaussian noise that never moves, on sums that are clipped in l2"
        problem = f"{sampler.name} does not go with {mechanism.name}: it is priced for {needs}"
        raise ConfigError("sampler", problem, fix="use the mechanism static, or sampler poisson")
    return replace(release, sampler=sampler)


def fitted(mechanism: Mechanism, schedule: Schedule, bands: int | None = None) -> Mechanism:
    """The mechanism with its noise fitted to the schedule, if its rows are correlated; else the mechanism itself.

    Args:
        bands: the number of bands where the mechanism leaves it open.

    Raises: ConfigError where the number stays open, or does not go with the schedule.
    """
    noise = mechanism.noise.correlated
    if noise is None:
        return mechanism
    return replace(mechanism, noise=noise.fitted(schedule.sample_rate, schedule.steps, bands))


def as_charged(mechanism: Mechanism, charged: Release | None) -> Mechanism:
    """The mechanism with the correlated noise, and the deal into groups, that a release of its ledger was charged with.

    All rows of a ledger must have the very same noise, and calibration on another machine, or with other versions of
    libraries, ends in other last digits. Noise that differs by more than those is left as it is: the ledger refuses it.
    """
    noise = mechanism.noise.correlated
    if noise is None or charged is None or mechanism.bands == 1 or len(charged.coefficients) != mechanism.bands:
        return mechanism
    digits = zip(noise.coefficients, charged.coefficients, strict=True)
    alike = all(abs(own - theirs) <= _LAST_DIGITS for own, theirs in digits)
    if not (alike and math.isclose(noise.noise_multiplier, charged.noise_multiplier)):
        return mechanism
    charged_noise = noise.as_charged(charged.noise_multiplier, charged.coefficients)
    return replace(mechanism, noise=charged_noise, dealt_by=charged.dealt_by)


def noise_options(mechanism: Mechanism) -> dict[str, Any]:
    """The options with which ``registry.build`` makes the same noise again, for another run of the same schedule."""
    found: dict[str, Any] = {"noise_multiplier": mechanism.noise.noise_multiplier}
    return found | ({"bands": mechanism.bands, "given": mechanism.coefficients} if mechanism.noise.correlated else {})


def price(
    mechanism: Mechanism,
    schedule: Schedule,
    renyi_filter: RenyiFilter | None = None,
) -> Epsilons:
    """Compute the three epsilons of the planned releases."""
    return epsilons(
        planned(mechanism, schedule),
        schedule.delta,
        published_accountant=mechanism.published_accountant,
        renyi_filter=renyi_filter,
        inherited=mechanism.controller.inherited,
    )


def calibrated(
    build_with: Callable[[float], Mechanism], epsilon: float, schedule: Schedule, accounting: str
) -> Calibrated:
    """The mechanism with the least noise whose epsilon, as ``accounting`` counts, meets the budget.

    Correlated noise is fitted to the schedule. Where its number of bands is open, it is the one with the least expected
    error: the error of the strategy times the noise multiplier that the budget asks for with it.

    A mechanism that moves its noise gets a Renyi filter, fixed here; it starts at the noise that, held constant, would
    spend the filter's whole budget.

    Args:
        build_with: builds the mechanism with a given noise multiplier, in its own units.
        accounting: "certified", "noise_only" or "published".

    Raises: ConfigError if no noise reaches the budget: the mechanism leaks, say.
    """
    probe = build_with(1.0)
    noise = probe.noise.correlated
    if noise is None:
        return _calibrated(build_with, probe, epsilon, schedule, accounting)
    choices = noise.bands_to_try(schedule.sample_rate, schedule.steps)
    bands = choices[0] if len(choices) == 1 else _best_bands(probe, epsilon, schedule, choices)

    def fit(multiplier: float) -> Mechanism:
        return fitted(build_with(multiplier), schedule, bands)

    return _calibrated(fit, fitted(probe, schedule, bands), epsilon, schedule, accounting)


def _best_bands(probe: Mechanism, epsilon: float, schedule: Schedule, choices: tuple[int, ...]) -> int:
    """The number of bands with the least expected error at the budget, by a coarse price; the smaller of equal ones.

    The error falls with the number of bands and then rises. After two that are no better than the best, no more are
    tried.
    """
    best, least, worse = choices[0], math.inf, 0
    for bands in choices:
        chosen = fitted(probe, schedule, bands)
        assert chosen.noise.correlated is not None
        error = _quick_noise(chosen, epsilon, schedule) * chosen.noise.correlated.expected_error(schedule.steps)
        if error < least:
            best, least, worse = bands, error, 0
        elif (worse := worse + 1) == 2:
            break
    return best


def _quick_noise(probe: Mechanism, epsilon: float, schedule: Schedule) -> float:
    """The multiplier that meets the budget by a coarse price, for a mechanism whose knobs never move."""
    parts = disjoint(planned(probe, schedule))

    def epsilon_of(noise: float) -> float:
        return max(
            quick_epsilon(
                Counter({replace(release, noise_multiplier=noise): count for release, count in part.items()}),
                schedule.delta,
            )
            for part in parts
        )

    return calibrate(epsilon_of, epsilon)


def _calibrated(
    build_with: Callable[[float], Mechanism], probe: Mechanism, epsilon: float, schedule: Schedule, accounting: str
) -> Calibrated:
    leaks = probe.release(probe.knobs(), schedule.sample_rate).leaks
    if accounting == "certified" and leaks:
        raise ConfigError(
            "accounting",
            f"{probe.name} has no certified epsilon: {'; '.join(leaks)}",
            fix="use accounting: published or noise_only for it",
        )
    planned(probe, schedule)  # refuses what no bound prices with the sampler
    if probe.controller.inherited and accounting != "published":
        _check_inherited(probe, epsilon, schedule, accounting)
    if probe.controller.adaptive and not leaks and accounting != "published":
        if probe.controller.inherited:
            raise ConfigError("init_from", "is not priced together with moving noise", fix="set move_noise to false")
        renyi_filter = RenyiFilter.plan(epsilon, schedule.delta, schedule.sample_rate, schedule.steps)
        noise = smallest_noise_multiplier(
            renyi_filter.order, renyi_filter.budget / schedule.steps, schedule.sample_rate
        )
        knobs = probe.at_effective_noise_multiplier(probe.knobs(), noise)
        return Calibrated(build_with(knobs.noise_multiplier), renyi_filter)

    if accounting == "published":
        if not schedule.sampler.claimed:
            problem = f"the paper of {probe.name} claims nothing for sampler {schedule.sampler.name}"
            raise ConfigError("accounting", problem, fix="use certified, or sampler poisson")
        if probe.published_accountant == "plrvo" and not probe.noise.dimension:
            problem = "is not given, and the published accountant sums over the trained parameters"
            raise ConfigError("dimension", problem, fix="give their number, such as --set dimension=16384")

        def claim_of(noise: float) -> float:
            return published_epsilon(probe.published_accountant, planned(build_with(noise), schedule), schedule.delta)

        return Calibrated(build_with(calibrate(claim_of, epsilon)))

    def dearest(noise: float, epsilon_of: Callable[[Composition, float], float]) -> float:
        mechanism = build_with(noise)
        return max(
            epsilon_of(mine + theirs, schedule.delta)
            for mine in disjoint(planned(mechanism, schedule))
            for theirs in disjoint(mechanism.controller.inherited)
        )

    # Here leaks need no price: certified accounting refused them above, noise_only leaves them out.
    found = calibrate(
        lambda noise: dearest(noise, smallest_epsilon), epsilon, roughly=lambda noise: dearest(noise, quick_epsilon)
    )
    return Calibrated(build_with(found))


def _check_inherited(mechanism: Mechanism, epsilon: float, schedule: Schedule, accounting: str) -> None:
    spent = float(getattr(epsilons(mechanism.controller.inherited, schedule.delta), accounting))
    if spent > _ALMOST_ALL * epsilon:
        raise ConfigError(
            "init_from",
            f"the run of that hyper-policy spent {at_most(spent)} of the budget {epsilon:.4g}, which both share",
            fix="raise the budget, or start from one that spent less",
        )


# The noise with which every candidate of a private selection must run, so that the whole search meets a budget.


def calibrated_candidate(
    build_with: Callable[[float], Mechanism],
    epsilon: float,
    schedule: Schedule,
    law: SelectionLaw,
    bound: Bound = "hull",
    beside: Composition | None = None,
) -> tuple[Mechanism, Mechanism]:
    """The mechanism with the least noise with which a search among equal candidates meets the budget.

    Args:
        build_with: builds the mechanism with a given noise multiplier, in its own units.
        beside: what each candidate releases besides, such as its score.

    Returns: that mechanism, and the one that a single run of the same budget would take.

    Raises: ConfigError for a mechanism that cannot be a candidate, and for a budget out of reach.
    """
    alone = calibrated(build_with, epsilon, schedule, "certified")
    check_candidate(alone.mechanism)
    if alone.renyi_filter is not None:
        problem = f"{alone.mechanism.name} moves its noise: only one Renyi order is bounded, not the loss distribution"
        raise ConfigError("mechanism", problem, fix="set move_noise to false, or use another mechanism")
    bands = alone.mechanism.bands

    def with_noise(noise: float) -> Mechanism:
        built = build_with(noise)
        return built if built.noise.correlated is None else fitted(built, schedule, bands)

    def search(noise: float) -> float:
        releases = planned(with_noise(noise), schedule) + (beside or Counter())
        return selection_epsilon(profile_of(releases), law, schedule.delta, bound)

    def single(noise: float) -> float:
        releases = planned(with_noise(noise), schedule)
        return dearest(releases, lambda part: smallest_epsilon(part, schedule.delta))

    start = 1.1 * alone.mechanism.noise.noise_multiplier
    ratio = search(start) / single(start)  # it hardly moves with the noise
    found = calibrate(search, epsilon, roughly=lambda noise: single(noise) * ratio)
    # A candidate's own ledger holds it to the budget too, by the accountant of single runs: for hardly more than one
    # candidate that one asks for a little more noise.
    return with_noise(max(found, alone.mechanism.noise.noise_multiplier)), alone.mechanism


def check_candidate(mechanism: Mechanism) -> None:
    """Refuse what the theorem does not cover as a candidate. Raises: ConfigError."""
    if mechanism.controller.inherited:
        problem = f"{mechanism.name} starts from another run's hyper-policy, whose releases all candidates would share"
        raise ConfigError("init_from", problem, fix="leave it out of a search")
