"""Trajectories of an update's users under the released policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dptune.policy.environments.environment import Environment, Interface
from dptune.policy.policies import Policy


@dataclass(frozen=True)
class Trajectories:
    """Trajectories of K users with T steps each; a user whose episode ends early begins another one. Private.

    Attributes:
        users: numbers of the users.
        features: (K, T + 1, features) before each step, and after the last.
        actions: (K, T) or (K, T, dimensions), as the policy sampled them, before they were clipped to bounds.
        rewards: (K, T) rewards of the steps.
        terminated: (K, T) whether the step reached a terminal state, as gymnasium says it: its value is 0.
        episode_ends: (K, T) whether the step ended an episode, in a terminal state or at its time limit.
        step_mask: (K, T) whether the row is a step of the user. A row in which the environment resets is none, and a
            null user, whose slot is empty, has none.
    """

    users: tuple[int, ...]
    features: torch.Tensor
    actions: torch.Tensor
    rewards: torch.Tensor
    terminated: torch.Tensor
    episode_ends: torch.Tensor
    step_mask: torch.Tensor


class Users:
    """A stream of simulated users: every update gets K new ones, each in an environment that was just reset.

    Args:
        count: K, number of users in each update.
        steps: T, number of steps of each user; an episode that is not over by then is cut off and never resumed.
        seed: seed of environments and actions. Unlike the noise's, the randomness of simulated users needs no secrecy.
        continuing: whether to continue the episodes of the update before, as much public code does. A user is then in
            several updates, and ``dptune.policy.run_files.UserRegister`` ends the run with an error.
    """

    def __init__(self, environment: Environment, count: int, steps: int, seed: int, continuing: bool = False) -> None:
        self.interface = Interface.of(environment)
        self._environments = environment.vector(count)
        self._count, self._steps, self._seed, self._continuing = count, steps, seed, continuing
        self._observations: Any = None
        self._resting = torch.zeros(count, dtype=torch.bool)
        self._ids: tuple[int, ...] = ()

    def meet(self, number: int, policy: Policy, parameters: torch.Tensor) -> Trajectories:
        """Roll out the policy with these parameters for the users of update ``number``. Private."""
        environment_seed, action_seed = map(int, np.random.SeedSequence([self._seed, number]).generate_state(2))
        generator = torch.Generator().manual_seed(action_seed)
        newcomers = range(number * self._count, (number + 1) * self._count)
        if self._observations is None or not self._continuing:
            self._observations, _ = self._environments.reset(seed=environment_seed)
            self._resting = torch.zeros(self._count, dtype=torch.bool)
            users = tuple(newcomers)
        else:  # a user whose episode ended is replaced by a new one
            users = tuple(
                new if over else old for old, new, over in zip(self._ids, newcomers, self._resting, strict=True)
            )
        self._ids = users
        columns: dict[str, list[torch.Tensor]] = {name: [] for name in _COLUMNS}
        features = self.interface.encode_observations(self._observations)
        for _ in range(self._steps):
            actions = policy.sample(parameters, features, generator)
            self._observations, rewards, terminated, truncated, _ = self._environments.step(
                self.interface.decode_actions(actions)
            )
            ends, rewards = torch.from_numpy(terminated), torch.from_numpy(rewards).float()
            over = ends | torch.from_numpy(truncated)
            for name, value in zip(_COLUMNS, (features, actions, rewards, ends, over, ~self._resting), strict=True):
                columns[name].append(value)
            features, self._resting = self.interface.encode_observations(self._observations), over
        columns_by_name = {name: torch.stack(values, dim=1) for name, values in columns.items()}
        columns_by_name["features"] = torch.cat([columns_by_name["features"], features[:, None]], dim=1)
        return Trajectories(users, **columns_by_name)

    def close(self) -> None:
        """Close the stream's environments."""
        self._environments.close()


_COLUMNS = ("features", "actions", "rewards", "terminated", "episode_ends", "step_mask")


def advantages(
    trajectories: Trajectories, values: torch.Tensor, discount: float, decay: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages, returns), both (K, T), by generalised advantage estimation (Schulman et al. 2016). Private.

    Each row depends on its own user's trajectory alone.

    Args:
        values: (K, T + 1) values of the features; with zeros and a ``decay`` of 1, advantages are discounted returns.
        discount, decay: gamma and lambda.
    """
    rewards, alive = trajectories.rewards, (~trajectories.terminated).float()
    goes_on = (~trajectories.episode_ends).float()
    running, found = torch.zeros(len(rewards)), torch.zeros_like(rewards)
    for step in reversed(range(rewards.shape[1])):
        error = rewards[:, step] + discount * values[:, step + 1] * alive[:, step] - values[:, step]
        running = error + discount * decay * goes_on[:, step] * running
        running = torch.where(trajectories.step_mask[:, step], running, torch.zeros(()))
        found[:, step] = running
    return found, found + values[:, :-1]
