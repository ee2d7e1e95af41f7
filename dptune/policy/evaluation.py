"""Returns of a released policy in simulated episodes that belong to no user."""

from __future__ import annotations

import torch

from dptune.policy.environments import Environment, Interface
from dptune.policy.policies import Policy


@torch.no_grad()
def mean_return(
    environment: Environment, policy: Policy, parameters: torch.Tensor, episodes: int, seed: int
) -> torch.Tensor:
    """(episodes,) undiscounted returns of whole episodes, actions drawn from the policy."""
    interface, vector = Interface.of(environment), environment.vector(episodes)
    generator = torch.Generator().manual_seed(seed)
    observations, _ = vector.reset(seed=seed)
    returns, running = torch.zeros(episodes), torch.ones(episodes, dtype=torch.bool)
    while running.any():
        actions = policy.sample(parameters, interface.seen(observations), generator)
        observations, rewards, terminated, truncated, _ = vector.step(interface.done(actions))
        returns += torch.from_numpy(rewards).float() * running
        running &= ~torch.from_numpy(terminated | truncated)
    vector.close()
    return returns
