"""AdaCliP: coordinate-wise adaptive clipping (Pichapati et al. 2019, arXiv 1908.07643).

Not what Opacus calls AdaClip: that is the quantile method of Andrew et al. (``quantile.py``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dptune.mechanisms.clippers.transformed import check_estimator
from dptune.mechanisms.controllers.control import Constant, needs_coordinates
from dptune.mechanisms.interfaces import Knobs, Observation, RunFacts
from dptune.mechanisms.registry import controller, mechanism

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Diagonal:
    """Coordinates w = (g - centre) / scale, elementwise, clipped to the unit ball."""

    centre: torch.Tensor
    scale: torch.Tensor
    radii: tuple[float, ...] = (1.0,)
    scales: tuple[float, ...] = (1.0,)

    def forward(self, gradients: torch.Tensor) -> list[torch.Tensor]:
        """Map (units, parameters) to one matrix of the same shape."""
        return [(gradients - self.centre) / self.scale]

    def backward(self, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        """Map an averaged release back to a (parameters,) gradient."""
        return self.scale * blocks[0] + self.centre


@controller("adaclip")
@dataclass
class AdaClip(Constant):
    """Estimates every coordinate's mean m and deviation s from the released gradients only, at no cost.

    The scale b_j = sqrt(s_j) sqrt(sum s) minimises the noise energy (sum b^2) for the same clipped share. Unlike the
    paper, the variance of a sample is estimated as that of a batch mean times the constant expected batch size B, for
    the size of a Poisson batch is private. Variances are about the updated mean, clamped, then smoothed.

    Noise has at least d z^2 / B times the variance of the signal (d parameters, noise multiplier z). Where that is far
    above 1, as for most adapters, estimates jump between floor and ceiling, and coordinates hardly differ.

    Attributes:
        mean_decay: beta_1, decay of the running means.
        variance_decay: beta_2, decay of the running variances.
        start_norm: clip radius of the DP-SGD that the run starts as: s = start_norm / sqrt(parameters).
        floor: h_1, smallest variance, as a multiple of the starting one (the noise energy needs a bound).
        ceiling: h_2, largest variance, as a multiple of the starting one.
    """

    VERSION = 1  # raise it when a change moves a released number: tests/golden

    mean_decay: float = 0.99
    variance_decay: float = 0.999
    start_norm: float = 1.0
    floor: float = 0.01
    ceiling: float = 10.0
    _mean: Any = field(default=None, init=False, repr=False)
    _variance: Any = field(default=None, init=False, repr=False)
    _facts: Any = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        decays = {"mean_decay": self.mean_decay, "variance_decay": self.variance_decay}
        check_estimator(decays, {"start_norm": self.start_norm}, self.floor, self.ceiling)

    def check(self, initial: Knobs, pairs: int) -> None:
        """Raise ConfigError for a clipper that would ignore the coordinates."""
        needs_coordinates("adaclip", initial)

    def start(self, facts: RunFacts) -> None:
        """Start with zero means and equal deviations."""
        import torch

        size = sum(facts.pair_sizes)
        self._facts = facts
        self._start_variance = self.start_norm**2 / size
        self._mean = torch.zeros(size, dtype=torch.float64, device=facts.device)
        self._variance = torch.full_like(self._mean, self._start_variance)

    def knobs(self, initial: Knobs) -> Knobs:
        """The coordinates of the next step; none before ``start``."""
        if self._mean is None:
            return initial
        return Knobs(initial.radii, initial.noise_multiplier, geometry=Diagonal(self._mean, self._scale()))

    def observe(self, observation: Observation) -> None:
        """Update mean and variance by the released gradient, with the noise's variance subtracted."""
        import torch

        released, batch = observation.released, self._facts.expected_batch_size
        gradient = torch.cat([part.double() for part in released.gradient])
        scale = self._scale()
        noise_variance = (scale * released.deviations[0] / batch) ** 2
        self._mean = self.mean_decay * self._mean + (1 - self.mean_decay) * gradient
        sampled = batch * ((gradient - self._mean).square() - noise_variance)
        bounded = sampled.clamp(self.floor * self._start_variance, self.ceiling * self._start_variance)
        self._variance = self.variance_decay * self._variance + (1 - self.variance_decay) * bounded

    def metrics(self) -> dict[str, float]:
        """The clip radius of DP-SGD with equal noise energy, and the spread of the deviations."""
        deviations = self._variance.sqrt()
        return {
            "equivalent_radius": float(deviations.sum()) / math.sqrt(len(deviations)),
            "deviation_spread": float(deviations.std() / deviations.mean()),
        }

    def state_dict(self) -> dict[str, Any]:
        """The running means and variances."""
        return {"mean": self._mean, "variance": self._variance}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state_dict`` gave."""
        self._mean = state["mean"].to(self._mean)
        self._variance = state["variance"].to(self._variance)

    def _scale(self) -> Any:
        deviations = self._variance.sqrt()
        return deviations.sqrt() * deviations.sum().sqrt()


mechanism(
    "adaclip",
    clipper="transformed",
    controller="adaclip",
    clips="the gradient in coordinates scaled one by one (AdaCliP, Pichapati et al. 2019)",
    adds="less Gaussian noise to coordinates of small deviation",
    adapts="mean and variance of released gradients",
)
