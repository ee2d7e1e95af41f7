"""Plain PPO and A2C by stable-baselines3, on the same environments; nothing about them is private."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np

from dptune.errors import ConfigError
from dptune.policy.environments.environment import Environment
from dptune.policy.environments.evaluation import returns_of
from dptune.policy.environments.training import Point

Baseline = Literal["ppo", "a2c"]
_PPO_BATCH = 2048
_COPIES = 8  # environments side by side


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
    """Train with the library's defaults: two layers of 64, no running normalisation, PPO's 2,048 steps over all copies.

    Args:
        timesteps: number of environment steps in all.
        every: steps between points of the curve; ``update`` and ``users`` of a point count steps.
        episodes: number of simulated episodes for each point.

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
    for done in range(every, timesteps + every, every):
        model.learn(every, reset_num_timesteps=False)
        returns = returns_of(environment, lambda seen: np.asarray(model.predict(seen)[0]), episodes, seed)
        points.append(Point(done, done, float(returns.mean()), float(returns.std(unbiased=False))))
        on_point(points[-1])
    many.close()
    return points


def check_installed() -> None:
    """Raise ConfigError naming the extra, unless the library is installed."""
    if find_spec("stable_baselines3") is None:
        raise ConfigError("baseline", "needs stable-baselines3, which is missing", fix="pip install 'dptune[policy]'")
