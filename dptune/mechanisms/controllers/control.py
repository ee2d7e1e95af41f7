"""The controller that moves nothing, a base for others; and checks that controllers share."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from dptune.core.errors import ConfigError
from dptune.mechanisms.interfaces import Knobs, Observation, RunFacts, Statistics
from dptune.mechanisms.registry import controller
from dptune.privacy.release import Composition

if TYPE_CHECKING:
    import torch


@controller("constant")
class Constant:
    """Keeps the knobs where they start and reads nothing. Subclasses override what they need."""

    VERSION = 1  # raise it when a change moves a released number: tests/golden

    @property
    def adaptive(self) -> bool:
        """Returns False: the noise never moves."""
        return False

    @property
    def noise_range(self) -> tuple[float, float]:
        """Returns (1, 1): the noise stays at its start."""
        return (1.0, 1.0)

    @property
    def raw_inputs(self) -> tuple[str, ...]:
        """Returns no names: the controller reads nothing un-noised."""
        return ()

    @property
    def inherited(self) -> Composition:
        """Returns no releases: the controller was made from no other run."""
        return Counter()

    @property
    def inherited_unit(self) -> str | None:
        """Returns None: no releases are inherited."""
        return None

    @property
    def releases_statistics(self) -> bool:
        """Whether a subclass overrides ``statistics``."""
        return type(self).statistics is not Constant.statistics

    def check(self, initial: Knobs, pairs: int) -> None:
        """Accept any knobs: this controller moves none."""

    def start(self, facts: RunFacts) -> None:
        """Do nothing: this controller needs no preparation."""

    def knobs(self, initial: Knobs) -> Knobs:
        """Returns the initial knobs unchanged."""
        return initial

    def statistics(self, knobs: Knobs, effective_noise_multiplier: float) -> Statistics | None:
        """Returns None: nothing is released beside the gradients."""
        return None

    def peek(self, norms: torch.Tensor, losses: torch.Tensor, tokens: torch.Tensor, knobs: Knobs) -> Knobs:
        """Raise NotImplementedError: a sound controller must not see raw data."""
        raise NotImplementedError(f"{type(self).__name__} must not see raw data")

    def observe(self, observation: Observation) -> None:
        """Do nothing: this controller learns nothing from releases."""

    def metrics(self) -> dict[str, float]:
        """Returns no figures: there is nothing to plot."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Returns an empty table: there is no state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: there is no state to load."""


def needs_one_radius(name: str, initial: Knobs) -> None:
    """Raise ConfigError unless the clipper has a single radius."""
    if len(initial.radii) != 1:
        raise ConfigError(f"controller {name}", "moves one radius for the whole gradient", fix="use clipper: flat")


def needs_coordinates(name: str, initial: Knobs) -> None:
    """Raise ConfigError unless the clipper works in the coordinates that the controller makes."""
    if initial.radii:
        raise ConfigError(f"controller {name}", "chooses coordinates to clip in", fix="use clipper: transformed")


def check_bounds(lowest: float, highest: float) -> None:
    """Raise ConfigError unless 0 < lowest <= highest, both finite."""
    if not (math.isfinite(lowest) and lowest > 0):
        raise ConfigError("lowest_radius", f"{lowest} is not positive", fix="use 1e-3")
    if not lowest <= highest < math.inf:
        raise ConfigError("highest_radius", f"{highest} is not between {lowest} and infinity", fix="use 100")


def check_start(radii: tuple[float, ...], lowest: float, highest: float) -> None:
    """Raise ConfigError unless the radii start within their public bounds."""
    if not all(lowest <= radius <= highest for radius in radii):
        raise ConfigError(
            "max_grad_norm", f"starts radii at {radii[0]}, outside [{lowest}, {highest}]", fix="change it or the bounds"
        )


def total_norms(norms: torch.Tensor) -> torch.Tensor:
    """(units,) l2 norms of the whole gradients from (units, pairs)."""
    return norms.square().sum(dim=1).sqrt()
