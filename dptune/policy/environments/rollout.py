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
    """Trajectories of K users by T steps; after an episode's early end the same user begins another. Private.

    Attributes:
        users: numbers of the users.
        features: (K, T + 1, features) seen before each step, and after the last.
        actions: (K, T) or (K, T, dimensions), as sampled, before they were cut to bounds.
        rewards: (K, T).
        terminated: (K, T): nothing can be earned after this step.
        ended: (K, T): the episode ended here, by its own end or by its limit of time.
        taken: (K, T): a step was taken. An environment's reset is a row without one; a null user takes none at all.
    """

    users: tuple[int, ...]
    features: torch.Tensor
    actions: torch.Tensor
    rewards: torch.Tensor
    terminated: torch.Tensor
    ended: torch.Tensor
    taken: torch.Tensor


class Users:
    """A stream of users: each update meets K new ones, every one in an environment that was just reset.

    Args:
        count: K, users an update.
        steps: T, steps a user; whatever episode is under way then is cut off and never resumed.
        seed: seed of the environments. Simulated users' randomness, unlike the noise's, needs no secrecy.
        continuing: whether to continue episodes that an earlier update began, as much public code does. A user is then
            in several updates, and ``dptune.policy.met.Met`` ends the run with an error.
    """

    def __init__(self, environment: Environment, count: int, steps: int, seed: int, continuing: bool = False) -> None:
        self.interface = Interface.of(environment)
        self._environments = environment.vector(count)
        self._count, self._steps, self._seed, self._continuing = count, steps, seed, continuing
        self._observations: Any = None
        self._resting = torch.zeros(count, dtype=torch.bool)
        self._ids: tuple[int, ...] = ()

    def meet(self, number: int, policy: Policy, parameters: torch.Tensor) -> Trajectories:
        """Trajectories of the users of update ``number``, under the policy with these parameters."""
        environment_seed, action_seed = map(int, np.random.SeedSequence([self._seed, number]).generate_state(2))
        generator = torch.Generator().manual_seed(action_seed)
        newcomers = range(number * self._count, (number + 1) * self._count)
        if self._observations is None or not self._continuing:
            self._observations, _ = self._environments.reset(seed=environment_seed)
            self._resting = torch.zeros(self._count, dtype=torch.bool)
            users = tuple(newcomers)
        else:  # a user whose episode has ended is replaced by a new one
            users = tuple(
                new if over else old for old, new, over in zip(self._ids, newcomers, self._resting, strict=True)
            )
        self._ids = users
        columns: dict[str, list[torch.Tensor]] = {name: [] for name in _COLUMNS}
        seen = self.interface.seen(self._observations)
        for _ in range(self._steps):
            actions = policy.sample(parameters, seen, generator)
            self._observations, rewards, terminated, truncated, _ = self._environments.step(
                self.interface.done(actions)
            )
            ends, rewards = torch.from_numpy(terminated), torch.from_numpy(rewards).float()
            over = ends | torch.from_numpy(truncated)
            for name, value in zip(_COLUMNS, (seen, actions, rewards, ends, over, ~self._resting), strict=True):
                columns[name].append(value)
            seen, self._resting = self.interface.seen(self._observations), over
        stacked = {name: torch.stack(values, dim=1) for name, values in columns.items()}
        stacked["features"] = torch.cat([stacked["features"], seen[:, None]], dim=1)
        return Trajectories(users, **stacked)

    def close(self) -> None:
        """Close the environments of this stream."""
        self._environments.close()


_COLUMNS = ("features", "actions", "rewards", "terminated", "ended", "taken")


def advantages(
    trajectories: Trajectories, values: torch.Tensor, discount: float, decay: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimates (Schulman et al. 2016) and returns, both (K, T); each row is one user's own.

    Args:
        values: (K, T + 1) values of the features; zeros give discounted rewards to go if ``decay`` is 1.
        discount, decay: gamma and lambda.
    """
    rewards, alive = trajectories.rewards, (~trajectories.terminated).float()
    goes_on = (~trajectories.ended).float()
    running, found = torch.zeros(len(rewards)), torch.zeros_like(rewards)
    for step in reversed(range(rewards.shape[1])):
        error = rewards[:, step] + discount * values[:, step + 1] * alive[:, step] - values[:, step]
        running = error + discount * decay * goes_on[:, step] * running
        running = torch.where(trajectories.taken[:, step], running, torch.zeros(()))
        found[:, step] = running
    return found, found + values[:, :-1]
