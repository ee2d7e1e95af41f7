"""DC-SGD: the radius from a noisy histogram of norms (Wei, Li, Gong and Chen 2025, arXiv 2503.22988)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from dptune.core.errors import ConfigError
from dptune.mechanisms.controllers.control import Constant, check_bounds, check_start, needs_one_radius, total_norms
from dptune.mechanisms.gradient_interfaces import Gradients
from dptune.mechanisms.interfaces import Knobs, Observation, RunFacts, Statistics
from dptune.mechanisms.registry import controller, mechanism

if TYPE_CHECKING:
    import torch

_MOST_SEARCHES = 20


@controller("dc_sgd")
@dataclass
class DcSgd(Constant):
    """Moves the radius by a histogram of gradient norms that is released with the gradients.

    One unit changes one bin by 1. "percentile" (DC-SGD-P) takes the edge where the cumulated histogram first exceeds
    ``target``; "expected_error" (DC-SGD-E) minimises noise variance plus squared clipping bias over 0.1 C .. 2 C. The
    bias is computed from the noisy histogram, never from raw norms, and divided by the histogram's own sum, never by
    the private batch size |S_t|.

    Attributes:
        rule: the rule that chooses the radius, "percentile" or "expected_error".
        target: p of DC-SGD-P, the share of norms below the radius.
        bins: M, number of bins; the last one is open.
        width: width of a bin at the start, as a multiple of the starting radius; doubles or halves with the mass.
        histogram_noise: z_H, standard deviation of the noise on each bin.
        memory: decay of the running average of histograms; 0 looks at the last one only, as published. With
            expected batches of 16 to 64 a single histogram is mostly noise.
        lowest_radius: public lower bound of the radius.
        highest_radius: public upper bound of the radius.
    """

    VERSION = 1  # raise it when a change moves a released number: tests/golden

    rule: Literal["percentile", "expected_error"] = "percentile"
    target: float = 0.5
    bins: int = 20
    width: float = 0.2
    histogram_noise: float = 6.0
    memory: float = 0.9
    lowest_radius: float = 1e-3
    highest_radius: float = 100.0
    _radius: float = field(default=0.0, init=False)
    _stride: float = field(default=0.0, init=False)
    _histogram: list[float] = field(default_factory=list, init=False)
    _facts: Any = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.target < 1:
            raise ConfigError("target", f"{self.target} is not in (0, 1)", fix="use a quantile such as 0.5")
        if self.bins < 2:
            raise ConfigError("bins", f"{self.bins} is below 2", fix="use 20")
        if not 0 <= self.memory < 1:
            raise ConfigError("memory", f"{self.memory} is not in [0, 1)", fix="use 0.9, or 0 as published")
        for name in ("width", "histogram_noise"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ConfigError(name, f"{getattr(self, name)} is not positive", fix="use its default")
        check_bounds(self.lowest_radius, self.highest_radius)

    def check(self, initial: Knobs, pairs: int) -> None:
        """Raise ConfigError unless there is one radius, within its bounds."""
        needs_one_radius("dc_sgd", initial)
        check_start(initial.radii, self.lowest_radius, self.highest_radius)

    def start(self, facts: RunFacts) -> None:
        """Keep batch size and number of parameters, which the noise term of the error needs."""
        self._facts = facts

    def knobs(self, initial: Knobs) -> Knobs:
        """Returns the current radius, and the noise at its start."""
        self._radius = self._radius or initial.radii[0]
        self._stride = self._stride or self.width * initial.radii[0]
        return Knobs((self._radius,), initial.noise_multiplier)

    def statistics(self, knobs: Knobs, effective_noise_multiplier: float) -> Statistics | None:
        """The histogram, in bins fixed by earlier releases; None before ``start``."""
        if self._facts is None:
            return None
        import torch

        return Statistics(
            ("histogram of gradient norms",),
            1.0,
            self.histogram_noise,
            partial(histogram, stride=self._stride, bins=self.bins),
            torch.zeros(self.bins, dtype=torch.float64),
        )

    def observe(self, observation: Observation) -> None:
        """Choose the next radius, then the next bins."""
        released = observation.released
        assert released.statistics is not None
        fresh = [float(count) for count in released.statistics]
        old = self._histogram or fresh
        self._histogram = [self.memory * a + (1 - self.memory) * b for a, b in zip(old, fresh, strict=True)]
        counts = [max(count, 0.0) for count in self._histogram]
        if sum(counts) <= 0:
            return
        # Standard deviation of the noise on the sum of gradients, in units of the radius.
        noise = released.deviations[0] / released.knobs.radii[0]
        chosen = self._percentile(counts) if self.rule == "percentile" else self._least_error(counts, noise)
        self._radius = min(max(chosen, self.lowest_radius), self.highest_radius)
        self._resize(counts)

    def _percentile(self, counts: list[float]) -> float:
        threshold, total = self.target * sum(counts), 0.0
        for index, count in enumerate(counts, start=1):
            total += count
            if total > threshold:
                return index * self._stride
        return len(counts) * self._stride

    def _least_error(self, counts: list[float], noise: float) -> float:
        """The radius of least error; searched again, a bounded number of times, around an optimum on the boundary."""
        radius = self._radius
        for _ in range(_MOST_SEARCHES):
            candidates = [radius * tenth / 10 for tenth in range(1, 21)]
            best = min(candidates, key=lambda c: self.expected_error(c, counts, noise))
            if best not in (candidates[0], candidates[-1]) or not self.lowest_radius < best < self.highest_radius:
                return best
            radius = best
        return radius

    def expected_error(self, radius: float, counts: list[float], noise: float) -> float:
        """Estimated error: noise^2 C^2 d / B^2 plus the mean squared excess of the norms over C, from bin midpoints."""
        size, batch = sum(self._facts.pair_sizes), self._facts.expected_batch_size
        middles = [(index + 0.5) * self._stride for index in range(len(counts))]
        bias = math.fsum(
            count * (middle - radius) ** 2 for count, middle in zip(counts, middles, strict=True) if middle > radius
        )
        return (noise * radius / batch) ** 2 * size + bias / sum(counts)

    def _resize(self, counts: list[float]) -> None:
        """Double the bins' width if the open bin holds half the mass, halve it if the upper half is nearly empty."""
        mass = sum(counts)
        if counts[-1] > mass / 2:
            wanted = self._stride * 2
        elif sum(counts[self.bins // 2 :]) < mass / self.bins:
            wanted = self._stride / 2
        else:
            return
        # Without bounds, noise alone could halve the width to zero or double it for ever.
        self._stride = min(max(wanted, self.lowest_radius / self.bins), self.highest_radius)
        self._histogram = []  # its counts are of bins of the old width

    def metrics(self) -> dict[str, float]:
        """The width of a bin."""
        return {"bin_width": self._stride}

    def state_dict(self) -> dict[str, Any]:
        """The radius, the width of the bins and the running histogram."""
        return {"radius": self._radius, "stride": self._stride, "histogram": self._histogram}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state_dict`` gave."""
        self._radius, self._stride, self._histogram = state["radius"], state["stride"], list(state["histogram"])


mechanism(
    "dc_sgd_e",
    controller="dc_sgd",
    options={"rule": "expected_error"},
    clips="the whole gradient to the radius of least expected error (DC-SGD-E, Wei et al. 2025)",
    adapts="a noisy histogram of norms",
    costs="a share (z / z_H)^2 of the budget",
)


mechanism(
    "dc_sgd_p",
    controller="dc_sgd",
    options={"rule": "percentile"},
    clips="the whole gradient to a percentile (DC-SGD-P, Wei et al. 2025)",
    adapts="a noisy histogram of norms",
    costs="a share (z / z_H)^2 of the budget",
)


def histogram(gradients: Gradients, stride: float, bins: int) -> torch.Tensor:
    """Counts (bins,) float64 of the units' whole-gradient norms; the last bin is open."""
    norms = total_norms(gradients.norms())
    index = (norms / stride).clamp(max=bins - 1).long()
    return norms.new_zeros(bins).index_add_(0, index, norms.new_ones(len(norms)))
