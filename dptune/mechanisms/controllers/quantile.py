"""Adaptive quantile clipping with a private count (Andrew et al. 2021, arXiv 1905.03871).

Opacus calls it "AdaClip", with two flaws that this version avoids: Opacus divides the noisy count by the realised batch
size, which is private under Poisson sampling, and it releases the sum of b, though only b - 1/2 has the sensitivity of
1/2 that its budget split assumes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from dptune.core.errors import ConfigError
from dptune.mechanisms.controllers.control import Constant, check_bounds, check_start, total_norms
from dptune.mechanisms.gradient_interfaces import Gradients
from dptune.mechanisms.interfaces import Knobs, Observation, RunFacts, Statistics
from dptune.mechanisms.registry import controller, mechanism

if TYPE_CHECKING:
    import torch

_LARGEST_SHARE = 0.05  # largest share of the inverse variance for counts, if the user did not choose their noise


@controller("quantile")
@dataclass
class Quantile(Constant):
    """Moves every radius towards the target quantile of its norms: C <- C exp(-rate (fraction - target)).

    Releases, per radius, the centred count sum_i (1[norm_i <= C] - 1/2) in the gradients' own release; K radii
    have joint sensitivity sqrt(K) / 2. The division is by the constant expected batch size.

    Attributes:
        target: gamma, the quantile.
        rate: eta_C, rate of the geometric update.
        count_noise: z_b, standard deviation on each count; 0 takes the paper's expected batch / 20 (times sqrt(K)), or
            more if the gradients would otherwise get less than 95 % of the release's inverse variance.
        lowest_radius: public lower bound of every radius.
        highest_radius: public upper bound of every radius.
    """

    VERSION = 1  # raise it when a change moves a released number: tests/golden

    target: float = 0.5
    rate: float = 0.2
    count_noise: float = 0.0
    lowest_radius: float = 1e-4
    highest_radius: float = 100.0
    _radii: tuple[float, ...] = field(default=(), init=False)
    _facts: Any = field(default=None, init=False, repr=False)
    _fractions: tuple[float, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        if not 0 < self.target < 1:
            raise ConfigError("target", f"{self.target} is not in (0, 1)", fix="use a quantile such as 0.5")
        if not (math.isfinite(self.rate) and self.rate >= 0):
            raise ConfigError("rate", f"{self.rate} is negative", fix="use 0.2")
        if not (math.isfinite(self.count_noise) and self.count_noise >= 0):
            raise ConfigError("count_noise", f"{self.count_noise} is negative", fix="use 0 for the recommended")
        check_bounds(self.lowest_radius, self.highest_radius)

    def check(self, initial: Knobs, pairs: int) -> None:
        """Raise ConfigError unless the clipper has radii, within their bounds."""
        if not initial.radii:
            raise ConfigError("controller quantile", "has no radius to move", fix="use clipper: flat or per_pair")
        check_start(initial.radii, self.lowest_radius, self.highest_radius)

    def start(self, facts: RunFacts) -> None:
        """Keep the expected batch size."""
        self._facts = facts

    def knobs(self, initial: Knobs) -> Knobs:
        """Returns the current radii, and the noise at its start."""
        return Knobs(self._radii or initial.radii, initial.noise_multiplier)

    def statistics(self, knobs: Knobs, effective_noise_multiplier: float) -> Statistics | None:
        """The centred counts, one for each radius; None before ``start``, for their noise depends on the batch size."""
        if self._facts is None:
            return None
        import torch

        groups = len(knobs.radii)
        sensitivity = math.sqrt(groups) / 2
        recommended = self._facts.expected_batch_size / 20 * math.sqrt(groups)
        affordable = sensitivity * effective_noise_multiplier / math.sqrt(_LARGEST_SHARE)
        deviation = self.count_noise or max(recommended, affordable)
        empty = torch.zeros(groups, dtype=torch.float64)
        return Statistics(
            ("unclipped count",),
            sensitivity,
            deviation,
            partial(centred_counts, radii=knobs.radii),
            empty,
        )

    def observe(self, observation: Observation) -> None:
        """Move every radius by one geometric step."""
        released = observation.released
        assert released.statistics is not None
        batch = self._facts.expected_batch_size
        self._fractions = tuple(float(count) / batch + 0.5 for count in released.statistics)
        steps = (min(-self.rate * (fraction - self.target), 700.0) for fraction in self._fractions)  # exp overflows
        self._radii = tuple(
            min(max(radius * math.exp(step), self.lowest_radius), self.highest_radius)
            for radius, step in zip(released.knobs.radii, steps, strict=True)
        )

    def metrics(self) -> dict[str, float]:
        """The estimated share of unclipped gradients for each radius, from the release."""
        return {f"unclipped_estimate_{index}": fraction for index, fraction in enumerate(self._fractions)}

    def state_dict(self) -> dict[str, Any]:
        """The current radii, for checkpoints."""
        return {"radii": list(self._radii)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state_dict`` gave."""
        self._radii = tuple(state["radii"])


mechanism(
    "quantile",
    controller="quantile",
    clips="the whole gradient to a moving radius (Andrew et al. 2021)",
    adapts="a noisy count of the unclipped",
    costs="a share (z / 2 z_b)^2 of the budget",
)


def centred_counts(gradients: Gradients, radii: tuple[float, ...]) -> torch.Tensor:
    """Sum over units of +1/2 if the norm is within the radius, else -1/2, for each radius: (radii,) float64."""
    norms = gradients.norms()
    if len(radii) == 1:
        norms = total_norms(norms)[:, None]
    return ((norms <= norms.new_tensor(radii)).double() - 0.5).sum(dim=0)
