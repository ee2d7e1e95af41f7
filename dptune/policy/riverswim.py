"""Riverswim: six states in a row, a current to the left, and a large reward at the far right (Osband et al. 2013)."""

from __future__ import annotations

from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium.spaces import Discrete
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from dptune.errors import ConfigError

STATES, LEFT, RIGHT = 6, 0, 1
_SMALL, _LARGE = 0.005, 1.0

#: When swimming right in the last state pays: at every try, or where the swimmer stays. The paper does not say.
Pays = Literal["always", "staying"]


def transitions(stay: float = 0.6) -> NDArray[np.float64]:
    """(actions, states, states) probabilities; ``stay`` is that of the last state when swimming right."""
    if not 0 < stay < 1:
        raise ConfigError("stay", f"{stay} is not in (0, 1)", fix="use 0.6 or 0.9, as the paper")
    moves = np.zeros((2, STATES, STATES))
    for state in range(STATES):
        moves[LEFT, state, max(0, state - 1)] = 1.0
    moves[RIGHT, 0, :2] = 0.4, 0.6
    for state in range(1, STATES - 1):
        moves[RIGHT, state, state - 1 : state + 2] = 0.05, 0.6, 0.35
    moves[RIGHT, -1, -2:] = 1 - stay, stay
    return moves


def rewards(stay: float = 0.6, pays: Pays = "always") -> NDArray[np.float64]:
    """(actions, states) expected rewards."""
    if pays not in ("always", "staying"):
        raise ConfigError("pays", f"unknown {pays!r}", fix="use always or staying")
    expected = np.zeros((2, STATES))
    expected[LEFT, 0] = _SMALL
    expected[RIGHT, -1] = _LARGE * (stay if pays == "staying" else 1.0)
    return expected


def value(
    policy: NDArray[np.float64] | None = None, horizon: int = 20, stay: float = 0.6, pays: Pays = "always"
) -> float:
    """The undiscounted return from the first state, of a (states, actions) policy or, without one, of the best."""
    moves, expected = transitions(stay), rewards(stay, pays)
    future = np.zeros(STATES)
    for _ in range(horizon):
        now = expected + moves @ future
        future = now.max(0) if policy is None else (policy.T * now).sum(0)
    return float(future[0])


class RiverswimVector(VectorEnv[NDArray[np.int64], NDArray[np.int64], Any]):
    """``num_envs`` swimmers at once, faster than as many ``Riverswim``.

    Observations are states, actions are ``LEFT`` and ``RIGHT``; episodes start in the first state, last ``horizon``
    steps and start again at the step after.
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
        rewards(stay, pays)  # refuses what cannot be
        self._states, self._step = np.zeros(num_envs, dtype=np.int64), 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.int64], dict[str, Any]]:
        """All at the left bank."""
        super().reset(seed=seed)
        self._states, self._step = np.zeros(self.num_envs, dtype=np.int64), 0
        return self._states, {}

    def step(
        self, actions: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """All episodes end together, by truncation at the horizon."""
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
        earned = _SMALL * ((actions == LEFT) & (before == 0)) + _LARGE * paid
        return self._states, earned, never, never | (self._step == self._horizon), {}


class Riverswim(gymnasium.Env[np.int64, np.int64]):
    """One swimmer; see ``RiverswimVector``."""

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 (gymnasium's own)

    def __init__(self, horizon: int = 20, stay: float = 0.6, pays: Pays = "always") -> None:
        self._many = RiverswimVector(1, horizon, stay, pays)
        self.observation_space, self.action_space = Discrete(STATES), Discrete(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.int64, dict[str, Any]]:
        """At the left bank."""
        super().reset(seed=seed)
        if seed is not None:
            self._many.reset(seed=seed)
        states, _ = self._many.reset()
        return np.int64(states[0]), {}

    def step(self, action: np.int64) -> tuple[np.int64, float, bool, bool, dict[str, Any]]:
        """Ends by truncation at the horizon."""
        states, earned, _, over, _ = self._many.step(np.asarray([action]))
        return np.int64(states[0]), float(earned[0]), False, bool(over[0]), {}
