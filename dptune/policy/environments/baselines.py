"""Baselines in the same environments, for comparison: UCB-VI on Riverswim, and PPO and A2C of stable-baselines3.

UCB-VI is plain (Azar et al. 2017), or private by noisy counters (after Chowdhury and Zhou 2021): the baseline of the DP
policy gradient paper. A binary-tree mechanism with Gaussian noise releases the counters of all episodes, and every
policy is a function of released counters. PPO and A2C are not private.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from dptune.core.errors import ConfigError
from dptune.mechanisms.noises.gaussian import rounded_sums, standard_normal
from dptune.policy.environments.environment import Environment
from dptune.policy.environments.riverswim import LARGE, LEFT, RIGHT, SMALL, STATES, Pays, rewards, transitions
from dptune.policy.environments.training import Point, returns_of
from dptune.privacy.entropy import Entropy
from dptune.privacy.release import Release

Array = NDArray[np.float64]
ACTIONS = 2


@dataclass(frozen=True)
class UcbVi:
    """Public settings of a run.

    Attributes:
        episodes: number of episodes, each of which is one user's.
        horizon: H, number of steps of an episode.
        stay: probability of staying in the last state when swimming right.
        pays: rule for the reward of the last state, see ``dptune.policy.environments.riverswim``.
        noise_multiplier: z of the whole run: standard deviation of the noise divided by the l2 norm of what one user
            adds to all nodes of the tree together; 0 is plain UCB-VI.
        bonus: factor that multiplies the theory's exploration bonus; the theory's own, 1, explores for very long.
        confidence: confidence level of the bonus.
        seed: seed of the simulated users; public.

    Raises: ConfigError for a number out of range.
    """

    episodes: int
    horizon: int = 20
    stay: float = 0.6
    pays: Pays = "always"
    noise_multiplier: float = 0.0
    bonus: float = 1.0
    confidence: float = 0.9
    seed: int = 0

    def __post_init__(self) -> None:
        if self.episodes < 1 or self.horizon < 1:
            raise ConfigError(
                "episodes", f"{self.episodes} episodes of {self.horizon} steps", fix="use 1 or more of both"
            )
        if not (math.isfinite(self.noise_multiplier) and self.noise_multiplier >= 0):
            raise ConfigError("noise_multiplier", f"{self.noise_multiplier} is negative", fix="use 1, or 0 for none")

    @property
    def levels(self) -> int:
        """Largest number of nodes of the tree that one episode is part of."""
        return self.episodes.bit_length()

    @property
    def deviation(self) -> float:
        """Standard deviation of the noise in every counter of every node.

        An episode adds 1 to H counts of visits and to H of transitions, and at most 1 to each of H sums of rewards, in
        each of its nodes: an l2 norm of at most sqrt(3 H levels).
        """
        return self.noise_multiplier * math.sqrt(3 * self.horizon * self.levels)

    def release(self) -> Release:
        """The release of all counters of the whole run, as one Gaussian mechanism."""
        noise = "gaussian" if self.noise_multiplier else "none"
        return Release(1.0, self.noise_multiplier, noise=noise, statistics=("visits", "transitions", "rewards"))


def run_ucb_vi(plan: UcbVi, entropy: Entropy) -> Array:
    """Run all episodes, each under the optimistic policy for the counters released so far.

    Guarantee: policies are functions of public values and of the one release ``plan.release()``, which the caller must
    charge before. Private: users' episodes. Public: all else.

    Returns: (episodes,) exact value of the policy that each episode followed.
    """
    size = plan.horizon * STATES * ACTIONS
    tree = _Tree(size * (STATES + 2), plan.deviation, entropy)
    generator = np.random.default_rng(plan.seed)
    moves, expected_rewards = transitions(plan.stay), rewards(plan.stay, plan.pays)
    values = np.empty(plan.episodes)
    counters = np.zeros(size * (STATES + 2))
    for episode in range(plan.episodes):
        policy = _optimistic(counters, plan)
        values[episode] = _value(policy, moves, expected_rewards)
        counters = tree.add(_episode(policy, plan, generator))
    return values


class _Tree:
    """Noisy prefix sums of vectors by the binary-tree mechanism (Chan et al. 2011): each node has noise of its own."""

    def __init__(self, size: int, deviation: float, entropy: Entropy) -> None:
        self._size, self._deviation, self._entropy = size, deviation, entropy
        self._exact: dict[int, Array] = {}  # level -> exact sum of its open node
        self._noisy: dict[int, Array] = {}
        self._count = 0

    def add(self, vector: Array) -> Array:
        """Add a vector, and return the noisy sum of all vectors so far."""
        self._count += 1
        level = (self._count & -self._count).bit_length() - 1
        total = vector + sum((self._exact.pop(lower) for lower in range(level)), np.zeros(self._size))
        for lower in range(level):
            self._noisy.pop(lower)
        self._exact[level], self._noisy[level] = total, self._with_noise(total)
        return np.sum(list(self._noisy.values()), axis=0)

    def _with_noise(self, total: Array) -> Array:
        if not self._deviation:
            return total
        normal = standard_normal(self._entropy, self._size, torch.device("cpu"))
        (noisy,) = rounded_sums([torch.from_numpy(total)], (normal,), [self._deviation], [self._deviation])
        return np.asarray(noisy.double().numpy())


def _optimistic(counters: Array, plan: UcbVi) -> NDArray[np.int64]:
    """(horizon, states) actions of the optimistic policy under these counters."""
    shape = (plan.horizon, STATES, ACTIONS)
    size = math.prod(shape)
    visits, earned = counters[:size].reshape(shape), counters[size : 2 * size].reshape(shape)
    moved = np.maximum(counters[2 * size :].reshape(*shape, STATES), 0.0)
    n = np.maximum(visits, 1.0)
    log = math.log(4 * size * plan.episodes / (1 - plan.confidence))
    noise = plan.deviation * math.sqrt(2 * plan.levels * log)
    bonus = plan.bonus * plan.horizon * (np.sqrt(log / (2 * n)) + noise / n)
    total = moved.sum(axis=-1, keepdims=True)
    chances = np.where(total > 0, moved / np.maximum(total, 1e-12), 1 / STATES)
    future, policy = np.zeros(STATES), np.zeros((plan.horizon, STATES), dtype=np.int64)
    for step in reversed(range(plan.horizon)):
        gains = np.clip(earned[step] / n[step], 0.0, 1.0) + chances[step] @ future + bonus[step]
        policy[step] = gains.argmax(axis=1)
        future = np.minimum(gains.max(axis=1), plan.horizon - step)
    return policy


def _value(policy: NDArray[np.int64], moves: Array, expected_rewards: Array) -> float:
    """Exact expected return of a (horizon, states) policy from the first state."""
    future, states = np.zeros(STATES), np.arange(STATES)
    for actions in policy[::-1]:
        future = expected_rewards[actions, states] + (moves[actions, states] @ future)
    return float(future[0])


def _episode(policy: NDArray[np.int64], plan: UcbVi, generator: np.random.Generator) -> Array:
    """Play a user's episode; return its visits, rewards and transitions as one vector. Private."""
    moves = transitions(plan.stay)
    shape = (plan.horizon, STATES, ACTIONS)
    visits, earned, moved = np.zeros(shape), np.zeros(shape), np.zeros((*shape, STATES))
    state = 0
    for step in range(plan.horizon):
        action = policy[step, state]
        after = int(generator.choice(STATES, p=moves[action, state]))
        visits[step, state, action] = moved[step, state, action, after] = 1
        earned[step, state, action] = _reward(state, int(action), after, plan.pays)
        state = after
    return np.concatenate([visits.ravel(), earned.ravel(), moved.ravel()])


def _reward(state: int, action: int, after: int, pays: Pays) -> float:
    if state == 0 and action == LEFT:
        return SMALL
    paid = state == STATES - 1 and action == RIGHT and (pays == "always" or after == state)
    return LARGE * paid


Baseline = Literal["ppo", "a2c"]
_PPO_BATCH = 2048
_COPIES = 8  # number of environments that run in parallel


def train_baseline(
    name: Baseline,
    environment: Environment,
    *,
    timesteps: int,
    every: int,
    episodes: int,
    seed: int,
    discount: float = 0.99,
    on_point: Callable[[Point], None] = lambda point: None,
) -> list[Point]:
    """Train with the library's defaults: two layers of 64 units, and batches of 2,048 steps over all copies for PPO.

    Args:
        timesteps: number of environment steps in all.
        every: number of steps between points of the curve.
        episodes: number of simulated episodes for each point.
        seed: seed of training and evaluation.
        discount: gamma.
        on_point: called with every point of the curve.

    Returns: the curve, whose ``update`` and ``users`` both count environment steps.

    Raises: ConfigError if the library is not installed.
    """
    check_installed()
    from stable_baselines3 import A2C, PPO
    from stable_baselines3.common.env_util import make_vec_env

    environment.register()
    many = make_vec_env(environment.id, n_envs=_COPIES, seed=seed, env_kwargs=dict(environment.options))
    kinds: dict[str, Any] = {"ppo": PPO, "a2c": A2C}
    batch = {"n_steps": _PPO_BATCH // _COPIES} if name == "ppo" else {}
    model = kinds[name]("MlpPolicy", many, gamma=discount, seed=seed, device="cpu", verbose=0, **batch)
    points = []
    for step in range(every, timesteps + every, every):
        model.learn(every, reset_num_timesteps=False)
        returns = returns_of(environment, lambda states: np.asarray(model.predict(states)[0]), episodes, seed)
        points.append(Point(step, step, float(returns.mean()), float(returns.std(unbiased=False))))
        on_point(points[-1])
    many.close()
    return points


def check_installed() -> None:
    """Raise ConfigError naming the extra to install if stable-baselines3 is missing."""
    if find_spec("stable_baselines3") is None:
        raise ConfigError("baseline", "needs stable-baselines3, which is missing", fix="pip install 'dptune[policy]'")
