"""Banded correlated noise: what a step adds, later steps take back (DP-BandMF; Choquette-Choo et al. 2023).

``dptune.privacy.accounting.strategy`` has the strategies, and the proof of the price.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np

from dptune.core.errors import ConfigError
from dptune.mechanisms.controllers.control import Constant
from dptune.mechanisms.interfaces import Clipper, Controller, RunFacts
from dptune.mechanisms.noises.gaussian import PIECE, Gaussian, noisy_sums, on_device, standard_normal
from dptune.mechanisms.registry import mechanism, noise
from dptune.privacy.accounting.strategy import (
    WINDOW,
    Objective,
    check_strategy,
    optimised,
    relative_error,
    row_deviation,
    square_root,
)
from dptune.privacy.entropy import Entropy

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)

_GIGABYTE = 1e9
_BYTES = 8  # of a float64
_ROUNDING = 1e-9
_STEPS_OF_A_BAND = 4  # the least, where calibration chooses


class _Window:
    """The noise of past rows, in the one process that made them. Secret: with the releases it gives exact sums.

    A copy, and what is pickled, is empty, so that no two runs and no file ever have the same noise. No dataclass, for
    ``asdict`` would show what is in it.

    Attributes:
        row: number of the row that was made last; None before the first, and while one is made.
        rows: rows since the recursion (re)started.
        unit: the noise of each block at w = 1, which rows of one recursion share.
        ring: (bands - 1, coordinates) float64, past w; row r lies at r mod (bands - 1).
    """

    def __init__(self) -> None:
        self.row: int | None = None
        self.rows = 0
        self.unit: tuple[float, ...] = ()
        self.ring: torch.Tensor | None = None

    def __copy__(self) -> _Window:
        return _Window()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Window:
        return _Window()

    def __reduce__(self) -> tuple[type[_Window], tuple[()]]:
        return _Window, ()

    def follow(self, normals: torch.Tensor, row: int, strategy: tuple[float, ...], unit: tuple[float, ...]) -> int:
        """Turn z, in place, into w = (z - sum_i c_i w[-i]) / c_0, and keep it; returns the number of rows before.

        The window is used only if row - 1 was made here, with the same noise a block and on the same device.
        """
        length = len(strategy) - 1
        last, self.row = self.row, None  # if anything fails from here on, the next row starts anew
        whole = self.ring is not None and self.ring.shape == (length, len(normals))
        if not (whole and last == row - 1 and unit == self.unit and self.ring.device == normals.device):  # type: ignore[union-attr]
            self.rows, self.ring = 0, normals.new_zeros(length, len(normals))
        assert self.ring is not None
        before = min(self.rows, length)
        if before:
            weights = np.zeros(length)
            for back in range(1, before + 1):
                weights[(row - back) % length] = strategy[back]
            past = on_device(weights, normals.device)
            for start in range(0, len(normals), PIECE):
                normals[start : start + PIECE] -= past @ self.ring[:, start : start + PIECE]
        normals /= strategy[0]
        self.ring[row % length] = normals
        self.unit, self.rows = unit, self.rows + 1
        self.row = row
        return self.rows - 1


@noise("banded_gaussian")
@dataclass(frozen=True)
class BandedGaussian(Gaussian):
    """Normal noise of which later steps take back a part, so that less of it stays in the weights.

    Units are dealt into as many groups as there are bands, and a unit can be drawn in every b-th step alone, with b
    times the probability.

    Guarantee: that of ceil(steps / bands) Poisson-sampled releases with this multiplier at b times the sample rate (see
    ``accounting.strategy``), also for a run that was killed and resumed. Noise is drawn from the operating system
    for each step, lives in one process, and is never written; nor is a key of it.

    Attributes:
        noise_multiplier: standard deviation of the fresh noise over the clip radius. The noise of one step is larger.
        bands: number of bands b; "auto" lets calibration choose the power of two with the least expected error, of at
            most a quarter of the steps, whose past noise fits in noise_memory.
        strategy: "optimised" for objective and steps, where they are known; or "sqrt", the closed form.
        given: coefficients c_0 > c_1 >= .. >= 0 of a strategy of one's own, in place of both.
        objective: the noise to make small: that which the weights still hold ("recent"), in the sums of the first steps
            ("mean" over all of them), or in the sum of all ("last").
        window: number of steps after which training has mended all but a third of an error, for "recent".
        noise_memory: the most memory for past noise, in gigabytes; it takes bands - 1 adapters in float64.
        dimension: number of trained parameters, which that memory is counted by; a run takes it from its model.
    """

    VERSION = 1  # raise it when a change moves a released number: tests/golden

    published_accountant: ClassVar[str] = "bandmf"
    family: str = field(default="gaussian", init=False)
    bands: Literal["auto"] | int = "auto"
    strategy: Literal["optimised", "sqrt"] = "optimised"
    given: tuple[float, ...] = ()
    objective: Objective = "recent"
    window: float = WINDOW
    noise_memory: float = 2.0
    dimension: int = 0
    _window: _Window = field(default_factory=_Window, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bands != "auto" and self.bands < 1:
            raise ConfigError("bands", f"{self.bands} is below 1", fix="use 8, say, or auto")
        if self.given:
            try:
                check_strategy(self.given)
            except ConfigError as error:
                fix = "give numbers that fall, such as 1,0.5, or leave it out"
                raise ConfigError("given", f"coefficients {error.problem}", fix=fix) from None
            if self.bands not in ("auto", len(self.given)):
                problem = f"{self.bands} does not match the {len(self.given)} given coefficients"
                raise ConfigError("bands", problem, fix="leave bands out")
        if not (math.isfinite(self.noise_memory) and self.noise_memory > 0):
            raise ConfigError(
                "noise_memory", f"{self.noise_memory} is not a positive number", fix="use 2, in gigabytes"
            )
        if self.dimension < 0:
            raise ConfigError("dimension", f"{self.dimension} is negative", fix="count the trained parameters")
        if not 1 <= self.window < math.inf:
            raise ConfigError("window", f"{self.window} is not a number of steps, 1 or more", fix=f"use {WINDOW}, say")

    def __copy__(self) -> Self:
        return replace(self)  # with a window of its own

    @property
    def correlated(self) -> BandedGaussian:
        """The noise itself: its rows depend on one another."""
        return self

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Those given, else the closed form of ``bands``; none, so independent noise, while their number is open."""
        if self.given or self.bands == "auto" or self.bands == 1:
            return self.given
        return square_root(self.bands)

    def check(self, clipper: Clipper, controller: Controller) -> None:
        """Raise ConfigError for what moves radii or noise, releases statistics, or bounds by other means than l2."""
        if type(controller) is not Constant:
            problem = "moves or reads between steps: correlated noise cancels only if every step has the same scale"
            raise ConfigError("controller", problem, fix="use controller: constant with noise: banded_gaussian")
        if clipper.federation is not None:
            problem = "clips updates of clients, which are too few to deal into groups"
            raise ConfigError("clipper", problem, fix="use clipper: flat, or noise: gaussian")
        if clipper.norm != "l2" or not clipper.initial_radii(1):
            problem = "bounds no l2 norm by a fixed radius, which correlated noise is priced by"
            raise ConfigError("clipper", problem, fix="use flat, per_pair, auto_s or psac")

    def start(self, facts: RunFacts) -> None:
        """Forget all rows. Raises ConfigError if the past noise would not fit in ``noise_memory``."""
        self._check_plan(len(self.coefficients), facts.sample_rate, facts.steps)
        self.check_memory(facts.pair_sizes)
        self.forget()

    def check_memory(self, pair_sizes: Sequence[int]) -> None:
        """Raise ConfigError if the past noise of pairs of these sizes would not fit in ``noise_memory``."""
        bands = len(self.coefficients)
        wanted = _gigabytes(bands, sum(pair_sizes))
        if wanted > self.noise_memory:
            problem = f"{bands} bands keep {wanted:.3g} GB of past noise, and {self.noise_memory:g} are allowed"
            raise ConfigError("noise_memory", problem, fix="raise it, or use fewer bands")

    def forget(self) -> None:
        """Drop the noise of past rows: the next row begins anew."""
        object.__setattr__(self, "_window", _Window())

    def bands_to_try(self, sample_rate: float, steps: int) -> tuple[int, ...]:
        """The number itself if it is fixed; else powers of two up to a quarter of the steps, as rate and memory allow.

        More bands leave less in the sum of all steps and put more into each step, which AdamW divides by what it sees
        there: 64 bands of 68 steps trained worse than independent noise (docs/findings/correlated.md).
        """
        if self.given:
            return (len(self.given),)
        if self.bands != "auto":
            return (self.bands,)
        most = min(steps // _STEPS_OF_A_BAND, int(1 / sample_rate + _ROUNDING))
        tried = [2**power for power in range(max(1, most).bit_length())]
        held = [bands for bands in tried if _gigabytes(bands, self.dimension) <= self.noise_memory]
        if held != tried:
            _log.warning("noise_memory: %g GB of past noise allow bands up to %d", self.noise_memory, held[-1])
        return tuple(held)

    def fitted(self, sample_rate: float, steps: int, bands: int | None = None) -> Self:
        """The noise with the strategy for a run of these steps; ``bands`` stands in for "auto".

        Raises: ConfigError if the number of bands is open, above the steps, or draws a unit with a chance above 1.
        """
        number = len(self.given) or (bands if self.bands == "auto" else self.bands)
        if number is None:
            problem = "auto is chosen together with the noise, by calibration"
            raise ConfigError("bands", problem, fix="give a number, such as 8, or calibrate")
        self._check_plan(number, sample_rate, steps)
        if self.given or number == 1:
            return replace(self, bands=number)
        if self.strategy == "sqrt":
            return replace(self, bands=number, given=square_root(number))
        return replace(self, bands=number, given=optimised(number, steps, self.objective, self.window))

    def as_charged(self, noise_multiplier: float, coefficients: tuple[float, ...]) -> Self:
        """The noise with this multiplier and strategy: those of a ledger's rows, from another machine maybe."""
        return replace(self, noise_multiplier=noise_multiplier, bands=len(coefficients), given=coefficients)

    def expected_error(self, steps: int) -> float:
        """The objective's error at a noise multiplier of 1, over that of independent noise."""
        return relative_error(self.coefficients, steps, self.objective, self.window)

    def add_row(
        self, sums: list[torch.Tensor], scales: Sequence[float], noise_multiplier: float, entropy: Entropy, row: int
    ) -> tuple[list[torch.Tensor], float]:
        """Add noise_multiplier x scale x w_row in float64, round to the public grid, cast to float32."""
        sizes, strategy = [total.numel() for total in sums], self.coefficients
        unit = tuple(noise_multiplier * scale for scale in scales)
        noise = standard_normal(entropy, sum(sizes), sums[0].device)
        before = self._window.follow(noise, row, strategy, unit)
        rest = iter(noise.split(PIECE))
        noisy = noisy_sums(lambda count: next(rest)[:count], sums, list(unit), list(unit))
        return noisy, row_deviation(strategy, before)

    def _check_plan(self, bands: int, sample_rate: float, steps: int) -> None:
        if bands > steps:
            raise ConfigError("bands", f"{bands} are more than the {steps} steps", fix=f"use at most {steps}")
        if bands * sample_rate > 1 + _ROUNDING:
            problem = (
                f"{bands} at sample rate {sample_rate:.6g} would draw a unit with chance {bands * sample_rate:.4g}"
            )
            raise ConfigError("bands", problem, fix=f"use at most {int(1 / sample_rate + _ROUNDING)}")


def _gigabytes(bands: int, parameters: int) -> float:
    """What past noise takes: bands - 1 adapters in float64."""
    return max(0, bands - 1) * parameters * _BYTES / _GIGABYTE


mechanism(
    "banded",
    noise="banded_gaussian",
    clips="the whole gradient to one radius; clipper=per_pair, auto_s or psac work too",
    adds="Gaussian noise that later steps take back in part (DP-BandMF, Choquette-Choo et al. 2023)",
)
