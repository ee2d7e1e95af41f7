"""Random trajectories, and a learner without an environment."""

from __future__ import annotations

import numpy as np
import torch

from dptune.policy.environments.environment import Interface, Trajectories
from dptune.policy.environments.learner import PolicyLearner
from dptune.policy.method import Dppg
from dptune.policy.schedules import PolicyTraining

_NOTHING = np.zeros(0, dtype=np.float32)
INTERFACE = Interface(3, 2, False, False, _NOTHING, _NOTHING, _NOTHING, _NOTHING)


def trajectories(users: int, steps: int, seed: int = 0) -> Trajectories:
    """Random trajectories, some with episodes that end early."""
    generator = torch.Generator().manual_seed(seed)
    ended = torch.rand(users, steps, generator=generator) < 0.1
    taken = torch.cat([torch.ones(users, 1, dtype=torch.bool), ~ended[:, :-1]], dim=1)
    return Trajectories(
        users=tuple(range(users)),
        features=torch.randn(users, steps + 1, 3, generator=generator),
        actions=torch.randint(2, (users, steps), generator=generator),
        rewards=torch.randn(users, steps, generator=generator),
        terminated=ended & (torch.rand(users, steps, generator=generator) < 0.5),
        episode_ends=ended & taken,
        step_mask=taken,
    )


def learner(critic: str = "private", noise_multiplier: float = 0.0, **training: object) -> PolicyLearner:
    """A learner with small networks and two local epochs."""
    options = {"users": 4, "steps": 6, "hidden": 4, "critic_hidden": 3, "epochs": 2, "minibatches": 2}
    chosen = PolicyTraining(**(options | training))  # type: ignore[arg-type]
    return PolicyLearner(INTERFACE, Dppg(noise_multiplier=noise_multiplier, critic=critic), chosen)  # type: ignore[arg-type]
