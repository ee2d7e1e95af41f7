"""Options of DP policy gradient that decide its privacy, and the price of a run. It imports no torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dptune.core.errors import ConfigError
from dptune.mechanisms.options import make_part, option_names
from dptune.privacy.accountants import Epsilons, epsilons
from dptune.privacy.calibration import calibrate
from dptune.privacy.release import Composition, Release

NAME, PUBLISHED_ACCOUNTANT = "dppg", "dppg"
SUMMARY = (
    "Private reinforcement learning (DP policy gradient, Rio et al. 2025): clips each user's local update of a policy, "
    "adds Gaussian noise to their mean, and uses every user once. Sound, except critic=raw, which is as published."
)
#: Reason why a run with the paper's critic has no certified epsilon, as its ledger states it.
RAW_CRITIC = "value network trained on raw trajectories: it enters the updates of all later users"
_LEAST, _MOST = 1e-6, 1e6
Critic = Literal["private", "none", "public", "raw"]


@dataclass(frozen=True, kw_only=True)
class Dppg:
    """Settings that the privacy of a run depends on.

    Attributes:
        noise_multiplier: z, standard deviation of the noise on the sum of users' updates, in units of the clip radius;
            0 adds no noise, and the run is not private.
        critic: "private" (its update is released in one mechanism with the policy's), "none", "public" (trained on
            simulated users, who are no persons), or "raw" (trained on users' trajectories as published: not private).
        critic_share: share of 1 / z^2 that the private critic's update gets; the policy's gets the rest.
    """

    noise_multiplier: float
    critic: Critic = "private"
    critic_share: float = 0.5

    def __post_init__(self) -> None:
        if self.noise_multiplier != 0 and not _LEAST <= self.noise_multiplier <= _MOST:
            problem = f"{self.noise_multiplier} is neither 0 nor in [{_LEAST:g}, {_MOST:g}]"
            raise ConfigError("noise_multiplier", problem, fix="use 1, say")
        if not 0 < self.critic_share < 1:
            raise ConfigError("critic_share", f"{self.critic_share} is not in (0, 1)", fix="use 0.5")

    @property
    def multipliers(self) -> tuple[float, ...]:
        """Noise multipliers (z_p, z_v) of policy and private critic, 1 / z_p^2 + 1 / z_v^2 = 1 / z^2; or (z,)."""
        if self.critic != "private":
            return (self.noise_multiplier,)
        return tuple(self.noise_multiplier / math.sqrt(share) for share in (1 - self.critic_share, self.critic_share))

    def release(self, part: int) -> Release:
        """The release of update number ``part``, whose users are in no other update.

        Guarantee: policy and critic are released by one Gaussian mechanism. Each block moves by at most its clip
        radius, which is 1 / multiplier standard deviations of its noise, so one user moves both together by at most
        1 / noise_multiplier standard deviations. The unit is a user whose update is replaced by zeros; replacing a
        user by another one moves the release up to twice as far.
        """
        return Release(
            1.0,
            self.noise_multiplier,
            noise="gaussian" if self.noise_multiplier else "none",
            statistics=("policy update", "critic update")[: len(self.multipliers)],
            raw_inputs=(RAW_CRITIC,) if self.critic == "raw" else (),
            part=part,
        )

    def planned(self, updates: int = 1) -> Composition:
        """The releases of a run. Its epsilon does not depend on their number, because every user is in one of them."""
        return Counter(self.release(part) for part in range(updates))

    def price(self, delta: float) -> Epsilons:
        """The three epsilons of a run with any number of updates."""
        return epsilons(self.planned(), delta, published_accountant=PUBLISHED_ACCOUNTANT)


def method_of(options: Mapping[str, Any]) -> Dppg:
    """Make a method from options as params.yaml or ``--set`` give them.

    Raises: ConfigError naming the option that is unknown or out of range.
    """
    known = option_names(Dppg)
    for option in options:
        if option not in known:
            raise ConfigError(option, f"{NAME} has no such option", fix=f"use one of {', '.join(known)}")
    made: Dppg = make_part(Dppg, dict(options))
    return made


def calibrated_method(options: Mapping[str, Any], epsilon: float, delta: float, accounting: str = "certified") -> Dppg:
    """Make the method with the least noise that keeps the epsilon named by ``accounting`` within ``epsilon``.

    The published epsilon jumps up to 1 as noise grows; for a budget a little below 1 the noise may be more than needed.

    Raises: ConfigError if no noise suffices: a raw critic certifies no epsilon.
    """

    def epsilon_of(noise_multiplier: float) -> float:
        made = method_of({**options, "noise_multiplier": noise_multiplier})
        return float(getattr(made.price(delta), accounting))

    return method_of({**options, "noise_multiplier": calibrate(epsilon_of, epsilon)})


def check_accounting(method: Dppg, delta: float, accounting: str) -> None:
    """Refuse accounting "certified" for a method without a certified epsilon.

    Raises: ConfigError with the reason.
    """
    prices = method.price(delta)
    if accounting == "certified" and math.isinf(prices.certified):
        field = "critic" if method.noise_multiplier else "noise_multiplier"
        problem = f"{getattr(method, field)} certifies no epsilon ({'; '.join(prices.leaks)})"
        raise ConfigError(field, problem, fix="give its entry accounting: published, or change it")
