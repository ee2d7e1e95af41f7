"""Price a mechanism before a run, and find the noise that a budget asks for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from dptune.errors import ConfigError
from dptune.mechanisms.mechanism import Mechanism
from dptune.privacy.accountants import (
    Epsilons,
    epsilons,
    published_epsilon,
    quick_epsilon,
    smallest_epsilon,
)
from dptune.privacy.calibration import calibrate
from dptune.privacy.filters import RenyiFilter, smallest_noise_multiplier
from dptune.privacy.parts import disjoint
from dptune.privacy.release import Composition

_ALMOST_ALL = 0.99


@dataclass(frozen=True)
class Schedule:
    """Sample rate and number of steps of a run, and the delta of its epsilon. Public."""

    sample_rate: float
    steps: int
    delta: float


@dataclass(frozen=True)
class Calibrated:
    """A mechanism with the noise that meets a budget, and the filter that it needs if it moves that noise."""

    mechanism: Mechanism
    renyi_filter: RenyiFilter | None = None


def planned(mechanism: Mechanism, schedule: Schedule) -> Composition:
    """The releases of a run whose knobs stay where they start."""
    return Counter({mechanism.release(mechanism.knobs(), schedule.sample_rate): schedule.steps})


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

    A mechanism that moves its noise gets a Renyi filter, fixed here; it starts at the noise that, held constant, would
    spend the filter's whole budget.

    Args:
        build_with: builds the mechanism with a given noise multiplier, in its own units.
        accounting: "certified", "noise_only" or "published".

    Raises: ConfigError if no noise reaches the budget: the mechanism leaks, say.
    """
    probe = build_with(1.0)
    leaks = probe.release(probe.knobs(), schedule.sample_rate).leaks
    if accounting == "certified" and leaks:
        raise ConfigError(
            "accounting",
            f"{probe.name} has no certified epsilon: {'; '.join(leaks)}",
            fix="use accounting: published or noise_only for it",
        )
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

        def claim_of(noise: float) -> float:
            return published_epsilon(probe.published_accountant, planned(build_with(noise), schedule), schedule.delta)

        return Calibrated(build_with(calibrate(claim_of, epsilon)))

    def dearest(noise: float, epsilon_of: Callable[[Composition, float], float]) -> float:
        mechanism = build_with(noise)
        mine = planned(mechanism, schedule)
        return max(epsilon_of(mine + theirs, schedule.delta) for theirs in disjoint(mechanism.controller.inherited))

    # Here leaks need no price: certified accounting refused them above, noise_only leaves them out.
    found = calibrate(
        lambda noise: dearest(noise, smallest_epsilon), epsilon, roughly=lambda noise: dearest(noise, quick_epsilon)
    )
    return Calibrated(build_with(found))


def _check_inherited(mechanism: Mechanism, epsilon: float, schedule: Schedule, accounting: str) -> None:
    inherited = mechanism.controller.inherited
    if not inherited or accounting == "published":
        return
    spent = float(getattr(epsilons(inherited, schedule.delta), accounting))
    if spent > _ALMOST_ALL * epsilon:
        raise ConfigError(
            "init_from",
            f"the run of that hyper-policy alone spent {spent:.4g} of the budget {epsilon:.4g}, which both share",
            fix="raise the budget, or start from one that spent less",
        )
