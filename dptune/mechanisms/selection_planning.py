"""The noise with which every candidate of a private selection must run, so that the whole search meets a budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from dptune.errors import ConfigError
from dptune.mechanisms.mechanism import Mechanism
from dptune.mechanisms.planning import Schedule, calibrated, fitted, planned
from dptune.privacy.accountants import smallest_epsilon
from dptune.privacy.calibration import calibrate
from dptune.privacy.loss_profile import profile_of
from dptune.privacy.parts import dearest
from dptune.privacy.release import Composition
from dptune.privacy.selection import Bound, selection_epsilon
from dptune.privacy.selection_law import SelectionLaw


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
        raise ConfigError("mechanism", problem, fix="set move_noise to false, or take another as a candidate")
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
