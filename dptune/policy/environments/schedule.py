"""Public schedule of a run in an environment. It imports no torch, so that settings can be checked without it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dptune.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class PolicyTraining:
    """Public schedule of a run. Defaults are the paper's for classical control (its table 3).

    Attributes:
        algorithm: "ppo" (deep DPPG: local PPO steps), or one policy gradient step whose clip radius keeps it in a trust
            region: "l2" (DPPG-L2) or "kl" (DPPG-KL, with the Fisher matrix of public simulated users).
        users: K, number of users in each update.
        steps: T, number of steps of each user.
        updates: number of updates, each of which is one release.
        hidden: units in each of the policy's two layers; 0 is a linear policy.
        form: form of a linear policy, see ``dptune.policy.policies.Linear``.
        discount, decay: gamma, and lambda of the advantages.
        learning_rate, epochs, minibatches: settings of the local steps (ppo); the critic shares the last two.
        radius: S, clip radius of the policy's update (ppo).
        entropy_weight: weight of the policy's entropy in the local loss.
        warm_moments: start every user's Adam from the last released update (appendix C.2.3), else from zero.
        critic_hidden: units in each of the critic's two layers; 0 is a linear critic.
        critic_radius: clip radius of the critic's update.
        critic_learning_rate: learning rate of the critic's local steps.
        value_scale: factor that multiplies the critic's output; about the size of returns.
        step_size, step_every, step_divisor, least_step: eta of l2 and kl: starts at ``step_size``, is divided by
            ``step_divisor`` after every ``step_every`` users, and is at least ``least_step`` (the paper's table 2).
        trust, miss: alpha, bound of the trust region, and beta, probability with which a step may leave it (l2, kl).
        fisher_episodes, fisher_regulariser: number of episodes and regulariser of the public Fisher matrix (kl).
        continuing: let episodes span updates, as public code does; a user is then in two updates, and the run ends with
            an error.
        evaluate_every, evaluate_episodes: number of updates between points of the curve, and of simulated episodes for
            each point.
        seed: seed of initial parameters and of simulated users; public.

    Raises: ConfigError naming the setting that is out of range.
    """

    algorithm: Literal["ppo", "l2", "kl"] = "ppo"
    users: int = 8
    steps: int = 64
    updates: int = 100
    hidden: int = 64
    form: Literal["outer", "additive"] = "outer"
    discount: float = 0.99
    decay: float = 0.85
    learning_rate: float = 7.26e-4
    epochs: int = 8
    minibatches: int = 2
    radius: float = 0.05
    entropy_weight: float = 0.36
    warm_moments: bool = True
    critic_hidden: int = 64
    critic_radius: float = 0.3
    critic_learning_rate: float = 7.26e-4
    value_scale: float = 1.0
    step_size: float = 12.0
    step_every: int = 50
    step_divisor: float = 5.0
    least_step: float = 0.06
    trust: float = 3.5
    miss: float = 0.4
    fisher_episodes: int = 25
    fisher_regulariser: float = 1e-3
    continuing: bool = False
    evaluate_every: int = 10
    evaluate_episodes: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise ConfigError(name, f"{getattr(self, name)} is not positive", fix="use 1 or more")
        for name in _POSITIVE:
            if not _LEAST <= getattr(self, name) <= _MOST:
                problem = f"{getattr(self, name)} is not in [{_LEAST:g}, {_MOST:g}]"
                raise ConfigError(name, problem, fix="use its default")
        if self.algorithm == "ppo" and self.users == 1:
            problem = "1 is too few for ppo: noise of z clip radii in every direction hides one user's update"
            raise ConfigError("users", problem, fix="use 8 or more, or algorithm l2 or kl")

    def step_size_at(self, number: int) -> float:
        """Step size eta of update ``number`` for l2 and kl. Public: it depends on the number of users so far alone."""
        return max(self.step_size / self.step_divisor ** (number * self.users // self.step_every), self.least_step)


_LEAST, _MOST = 1e-9, 1e9
_COUNTS = (
    *("users", "steps", "updates", "epochs", "minibatches"),
    *("step_every", "fisher_episodes", "evaluate_every", "evaluate_episodes"),
)
_POSITIVE = (
    *("learning_rate", "radius", "critic_radius", "critic_learning_rate", "value_scale"),
    *("step_size", "step_divisor", "least_step", "trust", "fisher_regulariser"),
)
