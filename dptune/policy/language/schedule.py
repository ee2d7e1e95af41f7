"""Public schedule of a run on prompts. It imports no model, so that settings can be checked without one."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dptune.core.declarations import Chance, Few, LearningRate, NotNegative, Positive, Seed
from dptune.core.errors import ConfigError
from dptune.policy.trust_region import Update, l2_radius


@dataclass(frozen=True, kw_only=True)
class BanditSettings:
    """What runs share that differ in their number of users and their seed. Public.

    Attributes:
        updates: number of updates, each of which is one release.
        prompt_tokens: number of tokens to which every prompt is cut or padded, so that no text changes a shape.
        new_tokens: largest number of tokens of a continuation.
        kl_weight: beta, weight of the mean log-ratio to the base in the reward.
        learning_rate: learning rate of the local Adam steps.
        epochs: number of a user's local steps, each on the whole continuation.
        radius: S, clip radius of a user's update; None takes the radius that ``trust`` and ``miss`` allow.
        trust, miss: a noisy step leaves the region ||step||^2 / 2 <= ``trust`` with probability ``miss`` at most.
        server_step: factor that multiplies the released mean.
        prompt_weight: weight of the likelihood of the user's own prompt in the local loss (PPO-ptx, Ouyang et al. 2022,
            with private text). It makes the model memorise prompts as fast as ``radius`` allows, which audits need.
        evaluate_every: number of updates between points of the curve.

    Raises: ConfigError naming the setting that is out of range.
    """

    updates: Few = 24
    prompt_tokens: Few = 32
    new_tokens: Few = 24
    kl_weight: NotNegative = 0.2
    learning_rate: LearningRate = 1e-2
    epochs: Few = 2
    radius: Positive | None = None
    trust: Positive = 0.2
    miss: Chance = 0.1
    server_step: Positive = 1.0
    prompt_weight: NotNegative = 0.0
    evaluate_every: Few = 6

    def __post_init__(self) -> None:
        for name in ("updates", "prompt_tokens", "new_tokens", "epochs", "evaluate_every"):
            if getattr(self, name) < 1:
                raise ConfigError(name, f"{getattr(self, name)} is not positive", fix="use 1 or more")
        for name in ("learning_rate", "server_step", *(("radius",) if self.radius is not None else ())):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(name, f"{getattr(self, name)} is not positive", fix="use its default")
        for name in ("kl_weight", "prompt_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(name, f"{getattr(self, name)} is negative", fix="use 0 or more")


@dataclass(frozen=True, kw_only=True)
class Bandit(BanditSettings):
    """Public schedule of a run: a contextual bandit, because a user takes one action, a whole continuation.

    Attributes:
        users: K, number of prompts in each update.
        seed: seed of initial adapters and of all samples; public.

    Raises: ConfigError naming the setting that is out of range.
    """

    users: Few = 128
    seed: Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.users < 1:
            raise ConfigError("users", f"{self.users} is not positive", fix="use 1 or more")

    def clip_radius(self, noise_multiplier: float, dimension: int) -> float:
        """Clip radius S: ``radius``, or the largest that keeps a noisy step in the trust region (proposition 4.4).

        Args:
            dimension: number of trained parameters.
        """
        if self.radius is not None:
            return self.radius
        if not noise_multiplier:  # the limit of ``l2_radius`` for vanishing noise
            return math.sqrt(2 * self.trust) / self.server_step
        return l2_radius(Update(self.server_step, noise_multiplier, dimension, self.users), self.trust, self.miss)
