"""Insulin dosing for type-1 diabetes: one day of a simulated patient, by an ordinary differential equation (SYNTHETIC).

The patient's model, its parameters, the reward and the limits are those of the simulator of Salas, Ferguson and Zweig
(2019). The meals are not: they are three smooth peaks over a constant intake, made up here.
"""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box
from numpy.typing import NDArray
from scipy.integrate import solve_ivp

from dptune.core.errors import ConfigError

DAY = 24 * 60  # minutes
TARGET, LOWEST, HIGHEST = 80.0, 65.0, 105.0  # mg/dl of blood glucose
LARGEST_DOSE = 10.0  # mU/min
_BASAL, _P1, _P2, _SENSITIVITY, _CLEARANCE = 291.0, 0.0317, 0.0123, 0.029, 0.09
_ABSORPTION, _EMPTYING, _AVAILABLE, _VOLUME = 0.012, 0.18, 0.8, 12.0
_STEADY_INTAKE, _USUAL_DOSE = 1000.0, 3.0
_MEALS = ((8.0, 600.0), (13.0, 600.0), (19.0, 600.0))  # hour, height over the steady intake
_MEAL_MINUTES = 40.0


def slopes(state: NDArray[np.float64], dose: float, intake: float) -> NDArray[np.float64]:
    """Derivatives of the patient's state, per minute.

    Args:
        state: (6,) glucose in mg/dl, remote insulin, plasma insulin, first and second compartment, gut glucose.
        dose: insulin in mU/min.
        intake: rate of glucose intake.
    """
    glucose, remote, plasma, first, second, gut = state
    entering = _AVAILABLE * (_ABSORPTION * gut + intake) / _VOLUME
    return np.array(
        [
            -_P1 * (glucose - _BASAL) - _SENSITIVITY * remote * glucose + entering,
            _P2 * (plasma - remote),
            -_CLEARANCE * plasma + dose,
            dose - _EMPTYING * first,
            _EMPTYING * (first - second),
            _EMPTYING * second - _ABSORPTION * gut,
        ]
    )


def reward(glucose: float) -> float:
    """Reward of a glucose level: 1 at the target, falling smoothly, and -1 outside the limits."""
    if not LOWEST <= glucose <= HIGHEST:
        return -1.0
    return 1 - math.tanh(0.1 * abs(glucose - TARGET) / 0.7) ** 2


class Dosing(gymnasium.Env[NDArray[np.float32], NDArray[np.float32]]):
    """A patient's day. An action is a dose in mU/min, given for ``interval`` minutes and clipped to the limits.

    Observations are (9,): the six states of ``slopes``, the intake, and glucose and intake one interval earlier.

    Args:
        random_meals: draw the times and sizes of meals, the constant intake and the first dose anew for each day.
        interval: minutes between doses.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 (gymnasium's own)

    def __init__(self, random_meals: bool = False, interval: int = 10) -> None:
        if not 1 <= interval < DAY or DAY % interval:
            raise ConfigError("interval", f"{interval} does not divide the {DAY} minutes of a day", fix="use 10")
        self.observation_space = Box(0.0, np.inf, (9,), np.float32)
        self.action_space = Box(0.0, LARGEST_DOSE, (1,), np.float32)
        self._random_meals, self._interval = random_meals, interval
        self._state, self._intake, self._now = np.zeros(6), np.zeros(0), 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Start at midnight, near the steady state, and run the first interval at the first dose."""
        super().reset(seed=seed)
        draw = self.np_random
        others = draw.normal([33.33, 33.33, 25.0, 25.0, 250.0], 5.0)
        self._state, self._now = np.array([draw.uniform(LOWEST, HIGHEST), *others]), 0
        self._intake = self._day()
        return self._advance(float(draw.integers(7)) if self._random_meals else _USUAL_DOSE), {}

    def step(self, action: NDArray[np.float32]) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Run one interval at this dose; the episode is truncated at midnight."""
        observation = self._advance(float(np.clip(action[0], 0.0, LARGEST_DOSE)))
        return observation, reward(float(self._state[0])), False, self._now >= len(self._intake) - 1, {}

    def _advance(self, dose: float) -> NDArray[np.float32]:
        before, intake = self._state[0], self._intake[self._now + 1]
        solved = solve_ivp(
            lambda _, state: slopes(state, dose, intake), (0.0, self._interval), self._state, method="LSODA", rtol=1e-6
        )
        self._state = np.maximum(solved.y[:, -1], 0.0)
        self._now += 1
        return np.array([*self._state, intake, before, self._intake[self._now - 1]], dtype=np.float32)

    def _day(self) -> NDArray[np.float64]:
        """(intervals + 1,) intake of a day, at the start of each interval and at its end."""
        draw, hours = self.np_random, np.arange(0, DAY + 1, self._interval) / 60
        steady = draw.uniform(800.0, 1200.0) if self._random_meals else _STEADY_INTAKE
        intake = np.full(len(hours), steady)
        for hour, height in _MEALS:
            if self._random_meals:
                hour, height = hour + draw.normal(0.0, 1.0), height * draw.uniform(0.5, 1.5)
            intake += height * np.exp(-(((hours - hour) * 60 / _MEAL_MINUTES) ** 2) / 2)
        return intake
