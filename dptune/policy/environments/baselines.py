"""PPO and A2C of stable-baselines3 on the same environments, for comparison. They are not private."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np

from dptune.core.errors import ConfigError
from dptune.policy.environments.environment import Environment
from dptune.policy.environments.training import Point, returns_of

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
