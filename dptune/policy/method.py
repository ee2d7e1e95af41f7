"""DP policy gradient as options: how much noise, and what the critic costs. Prices without torch or an environment."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dptune.errors import ConfigError
from dptune.mechanisms.options import make_part, option_names
from dptune.privacy.accountants import Epsilons, epsilons
from dptune.privacy.calibration import calibrate
from dptune.privacy.release import Composition, Release

NAME, PUBLISHED_ACCOUNTANT = "dppg", "dppg"
SUMMARY = (
    "Private reinforcement learning (DP policy gradient, Rio et al. 2025): clips each user's local update of a policy, "
    "adds Gaussian noise to their mean, and meets every user once. Sound, but for critic=raw, which is as published."
)
#: Why a run with the paper's critic has no certified epsilon.
RAW_CRITIC = "value network trained on raw trajectories: it enters the updates of all later users"
_LEAST, _MOST = 1e-6, 1e6
Critic = Literal["private", "none", "public", "raw"]


@dataclass(frozen=True, kw_only=True)
class Dppg:
    """The settings that the privacy of a run depends on.

    Attributes:
        noise_multiplier: z, standard deviation of the noise on the sum of the users' updates over the clip radius; 0
            adds none, and then nothing is private.
        critic: private (its update is released in one mechanism with the policy's), none, public (trained on simulated
            users, who are nobody), or raw (as published: not private).
        critic_share: share of the inverse variance that the private critic's update gets.
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
        """Of the policy's update and, where it is private, the critic's: 1 / z_p^2 + 1 / z_v^2 = 1 / z^2."""
        if self.critic != "private":
            return (self.noise_multiplier,)
        return tuple(self.noise_multiplier / math.sqrt(share) for share in (1 - self.critic_share, self.critic_share))

    def release(self, part: int) -> Release:
        """Update number ``part``, on users who are in no other.

        One Gaussian mechanism: each block is bounded by its radius, and over its noise by 1 / multiplier, so a whole
        user moves the joint vector by 1 / noise_multiplier deviations at most. The unit is a user, whose slot is
        zeroed (null-replacement; a user *replaced* by another moves it twice as far).
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
        """The releases of a run; its epsilon does not depend on how many there are."""
        return Counter(self.release(part) for part in range(updates))

    def price(self, delta: float) -> Epsilons:
        """The three epsilons of a run of any length."""
        return epsilons(self.planned(), delta, published_accountant=PUBLISHED_ACCOUNTANT)


def method_of(options: Mapping[str, Any]) -> Dppg:
    """Options as params.yaml or ``--set`` give them. Raises: ConfigError naming what is unknown or out of range."""
    known = option_names(Dppg)
    for option in options:
        if option not in known:
            raise ConfigError(option, f"{NAME} has no such option", fix=f"use one of {', '.join(known)}")
    made: Dppg = make_part(Dppg, dict(options))
    return made


def calibrated_method(options: Mapping[str, Any], epsilon: float, delta: float, accounting: str = "certified") -> Dppg:
    """With the least noise whose epsilon of that name meets ``epsilon``; where the paper's rule jumps, with more.

    Raises: ConfigError if none does: a raw critic certifies nothing.
    """

    def epsilon_of(noise_multiplier: float) -> float:
        made = method_of({**options, "noise_multiplier": noise_multiplier})
        return float(getattr(made.price(delta), accounting))

    return method_of({**options, "noise_multiplier": calibrate(epsilon_of, epsilon)})


def check_accounting(method: Dppg, delta: float, accounting: str) -> None:
    """Raises: ConfigError where ``accounting`` is certified and the run has no certified epsilon, with the reason."""
    prices = method.price(delta)
    if accounting == "certified" and math.isinf(prices.certified):
        field = "critic" if method.noise_multiplier else "noise_multiplier"
        problem = f"{getattr(method, field)} certifies no epsilon ({'; '.join(prices.leaks)})"
        raise ConfigError(field, problem, fix="give its entry accounting: published, or change it")
