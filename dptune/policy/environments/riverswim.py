"""Riverswim: six states in a row, a current to the left, and a large reward at the far right (Osband et al. 2013)."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dptune.core.errors import ConfigError

STATES, LEFT, RIGHT = 6, 0, 1
SMALL, LARGE = 0.005, 1.0

#: Rule for the reward of swimming right in the last state: paid at every try, or only if the swimmer stays there. The
#: paper does not say which it uses.
Pays = Literal["always", "staying"]


def transitions(stay: float = 0.6) -> NDArray[np.float64]:
    """(actions, states, next states) transition probabilities.

    Args:
        stay: probability of staying in the last state when swimming right.

    Raises: ConfigError for a ``stay`` outside (0, 1).
    """
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
    """(actions, states) expected rewards. Raises: ConfigError for an unknown ``pays``."""
    if pays not in ("always", "staying"):
        raise ConfigError("pays", f"unknown {pays!r}", fix="use always or staying")
    expected = np.zeros((2, STATES))
    expected[LEFT, 0] = SMALL
    expected[RIGHT, -1] = LARGE * (stay if pays == "staying" else 1.0)
    return expected


def value(
    policy: NDArray[np.float64] | None = None, horizon: int = 20, stay: float = 0.6, pays: Pays = "always"
) -> float:
    """Exact expected undiscounted return from the first state.

    Args:
        policy: (states, actions) probabilities; None takes the best policy.
        horizon: number of steps.
    """
    moves, expected = transitions(stay), rewards(stay, pays)
    future = np.zeros(STATES)
    for _ in range(horizon):
        now = expected + moves @ future
        future = now.max(0) if policy is None else (policy.T * now).sum(0)
    return float(future[0])
