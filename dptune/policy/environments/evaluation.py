"""Returns of a policy in simulated episodes, which belong to no user and so cost no privacy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from numpy.typing import NDArray

from dptune.core.errors import ConfigError
from dptune.policy.environments.environment import RIVERSWIM, Environment, Interface
from dptune.policy.environments.riverswim import STATES, value
from dptune.policy.policies import Policy

_LONGEST = 100_000


@torch.no_grad()
def returns_under(
    environment: Environment, policy: Policy, parameters: torch.Tensor, episodes: int, seed: int
) -> torch.Tensor:
    """Undiscounted returns of a policy: (episodes,) simulated ones, or for Riverswim the exact expectation, (1,).

    Args:
        parameters: (size,) released parameters of the policy.
        seed: seed of environments and actions; public.
    """
    if environment.id == RIVERSWIM:
        chances = policy.function(parameters, torch.eye(STATES)).softmax(dim=-1)
        return torch.tensor([value(chances.double().numpy(), **environment.options)])
    interface, generator = Interface.of(environment), torch.Generator().manual_seed(seed)

    def act(observations: NDArray[Any]) -> NDArray[Any]:
        features = interface.encode_observations(observations)
        return interface.decode_actions(policy.sample(parameters, features, generator))

    return returns_of(environment, act, episodes, seed)


def returns_of(
    environment: Environment, act: Callable[[NDArray[Any]], NDArray[Any]], episodes: int, seed: int
) -> torch.Tensor:
    """(episodes,) undiscounted returns of whole episodes that run in parallel.

    Args:
        act: function from the observations of all episodes to their actions.

    Raises: ConfigError for an environment whose episodes do not end.
    """
    vector = environment.vector(episodes)
    observations, _ = vector.reset(seed=seed)
    returns, running = torch.zeros(episodes), torch.ones(episodes, dtype=torch.bool)
    for _ in range(_LONGEST):
        if not running.any():
            break
        observations, rewards, terminated, truncated, _ = vector.step(act(observations))
        returns += torch.from_numpy(rewards).float() * running
        running &= ~torch.from_numpy(terminated | truncated)
    vector.close()
    if running.any():
        problem = f"{environment.id} has episodes of more than {_LONGEST} steps"
        raise ConfigError("environment", problem, fix="set its max_episode_steps")
    return returns
