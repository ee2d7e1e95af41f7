"""The public schedule of a run on prompts. No model, so that settings can be checked without one."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dptune.errors import ConfigError
from dptune.policy.trust_region import Update, l2_radius


@dataclass(frozen=True, kw_only=True)
class Bandit:
    """The public schedule of a run.

    Attributes:
        users: K, prompts an update.
        updates: releases to make.
        prompt_tokens: length to which every prompt is cut or padded: one user's text must not change others' shapes.
        new_tokens: largest number of tokens of a continuation.
        kl_weight: beta, weight of the mean log-ratio to the base in the reward.
        learning_rate: learning rate of the local Adam steps.
        epochs: local steps a user, each on the whole continuation.
        radius: S, clip radius of a user's update; None takes that of the trust region.
        trust, miss: the noisy step leaves ||step||^2 / 2 <= trust with probability ``miss`` at most.
        server_step: factor that multiplies the released mean.
        prompt_weight: weight of the likelihood of the user's own prompt in the local loss (PPO-ptx, Ouyang et al. 2022,
            with private text). Makes the model memorise prompts as fast as ``radius`` allows: for audits.
        evaluate_every: updates between points of the curve.
        seed: seed of initial adapters and of all samples; public.
    """

    users: int = 128
    updates: int = 24
    prompt_tokens: int = 32
    new_tokens: int = 24
    kl_weight: float = 0.2
    learning_rate: float = 1e-2
    epochs: int = 2
    radius: float | None = None
    trust: float = 0.2
    miss: float = 0.1
    server_step: float = 1.0
    prompt_weight: float = 0.0
    evaluate_every: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("users", "updates", "prompt_tokens", "new_tokens", "epochs", "evaluate_every"):
            if getattr(self, name) < 1:
                raise ConfigError(name, f"{getattr(self, name)} is not positive", fix="use 1 or more")
        for name in ("learning_rate", "server_step", *(("radius",) if self.radius is not None else ())):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(name, f"{getattr(self, name)} is not positive", fix="use its default")
        for name in ("kl_weight", "prompt_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(name, f"{getattr(self, name)} is negative", fix="use 0 or more")

    def clip_radius(self, noise_multiplier: float, dimension: int) -> float:
        """S: as given, or the largest that keeps a noisy step in the trust region (proposition 4.4)."""
        if self.radius is not None:
            return self.radius
        if not noise_multiplier:  # the law's limit
            return math.sqrt(2 * self.trust) / self.server_step
        return l2_radius(Update(self.server_step, noise_multiplier, dimension, self.users), self.trust, self.miss)
