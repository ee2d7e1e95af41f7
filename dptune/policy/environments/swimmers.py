"""Riverswim as gymnasium environments, by the tables of ``dptune.policy.environments.riverswim``."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Discrete
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from dptune.core.errors import ConfigError
from dptune.policy.environments.riverswim import LARGE, LEFT, RIGHT, SMALL, STATES, Pays, rewards, transitions


class RiverswimVector(VectorEnv[NDArray[np.int64], NDArray[np.int64], Any]):
    """A vector environment of ``num_envs`` swimmers, faster than as many copies of ``Riverswim``.

    Observations are states, actions are ``LEFT`` and ``RIGHT``. Episodes start in the first state, last ``horizon``
    steps, and reset at the step after.

    Raises: ConfigError for options out of range.
    """

    metadata: dict[str, Any] = {"render_modes": [], "autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, num_envs: int = 1, horizon: int = 20, stay: float = 0.6, pays: Pays = "always") -> None:
        if horizon < 1:
            raise ConfigError("horizon", f"{horizon} is below 1", fix="use 20, as the paper")
        self.num_envs = num_envs
        self.single_observation_space, self.single_action_space = Discrete(STATES), Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._sums, self._horizon, self._pays = transitions(stay).cumsum(axis=-1), horizon, pays
        rewards(stay, pays)  # raises for an unknown ``pays``
        self._states, self._step = np.zeros(num_envs, dtype=np.int64), 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.int64], dict[str, Any]]:
        """Start all swimmers at the left bank."""
        super().reset(seed=seed)
        self._states, self._step = np.zeros(self.num_envs, dtype=np.int64), 0
        return self._states, {}

    def step(
        self, actions: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """Move all swimmers by one step; all episodes are truncated together at the horizon."""
        never = np.zeros(self.num_envs, dtype=bool)
        if self._step == self._horizon:
            self._states, self._step = np.zeros(self.num_envs, dtype=np.int64), 0
            return self._states, np.zeros(self.num_envs), never, never, {}
        before, self._step = self._states, self._step + 1
        drawn = self.np_random.random((self.num_envs, 1))
        self._states = np.minimum((drawn >= self._sums[actions, before]).sum(axis=1), STATES - 1)
        paid = (actions == RIGHT) & (before == STATES - 1)
        if self._pays == "staying":
            paid &= self._states == before
        earned = SMALL * ((actions == LEFT) & (before == 0)) + LARGE * paid
        return self._states, earned, never, never | (self._step == self._horizon), {}


class Riverswim(gymnasium.Env[np.int64, np.int64]):
    """Riverswim with a single swimmer; options are those of ``RiverswimVector``."""

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 (gymnasium's own)

    def __init__(self, horizon: int = 20, stay: float = 0.6, pays: Pays = "always") -> None:
        self._many = RiverswimVector(1, horizon, stay, pays)
        self.observation_space, self.action_space = Discrete(STATES), Discrete(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.int64, dict[str, Any]]:
        """Start at the left bank."""
        super().reset(seed=seed)
        if seed is not None:
            self._many.reset(seed=seed)
        states, _ = self._many.reset()
        return np.int64(states[0]), {}

    def step(self, action: np.int64) -> tuple[np.int64, float, bool, bool, dict[str, Any]]:
        """Move by one step; the episode is truncated at the horizon."""
        states, earned, _, over, _ = self._many.step(np.asarray([action]))
        return np.int64(states[0]), float(earned[0]), False, bool(over[0]), {}
