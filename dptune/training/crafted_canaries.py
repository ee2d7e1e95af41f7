"""Canaries that are gradients: an auditor inside the training loop (Nasr et al. 2023; Steinke et al. 2023, section 6).

Each canary is one more unit of privacy, with a slot of its own in ``PrivacyUnits``: its coin fills the slot or leaves
it empty, and the run's own draw decides at each step whether it enters the batch, so that the auditor notices errors
in the draw. The mechanism clips, sums and noises it with the others. Its gradient is huge in one coordinate of every
LoRA pair, used by no other canary, so that any clipping bound is reached. The auditor adds up that coordinate of all
releases; of correlated noise it undoes the strategy first. Canaries cost utility: use them only in runs made for
auditing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from secrets import SystemRandom

import numpy as np
import torch
from numpy.typing import NDArray

from dptune.core.errors import ConfigError
from dptune.mechanisms.gradient_interfaces import Gradients
from dptune.mechanisms.interfaces import Released
from dptune.mechanisms.mechanism import Mechanism
from dptune.privacy.accounting.strategy import row_deviation

_HUGE = 1e6
_PLAIN = 10.0  # size if nothing clips: larger than samples have in one coordinate, too small to make training diverge


@dataclass
class CraftedCanaries:
    """The auditor of a run (``dptune.training.run.Auditor``): its coins and its scores so far. Private.

    Attributes:
        included: (canaries,) results of the fair coins.
        scores: (canaries,) scores, larger if the canary looks included.
        moves: amount that each watched release adds to the score of a canary in its batch; nan if it differs between
            canaries, because the mechanism clips in other coordinates or by the batch itself, or correlates its noise.
        squares: what the squares of the coordinates of canaries that are out add up to in each watched release, in
            units of ``moves``: noise and other gradients alone.
        ratios: (canaries,) logarithms of likelihood ratios of "in" to "out", added up over ``rated`` releases: the best
            statistic where each release's move and noise are known.
        sample_rate: rate at which the run's plan draws a canary that is in.
        decoder: what undoes correlated noise; new in each process, as the noise itself is started anew.
    """

    included: NDArray[np.bool_] = field(repr=False)
    scores: NDArray[np.float64] = field(repr=False)
    moves: list[float] = field(default_factory=list, repr=False)
    squares: list[float] = field(default_factory=list, repr=False)
    ratios: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0), repr=False)
    rated: int = field(default=0, repr=False)
    sample_rate: float = field(default=0.0, init=False, repr=False)
    decoder: _Decoder = field(default_factory=lambda: _Decoder(), init=False, repr=False)

    @classmethod
    def toss(cls, count: int) -> CraftedCanaries:
        """Toss new coins from the operating system's entropy. Raises ConfigError for fewer than 2."""
        if count < 2:
            raise ConfigError("canaries.crafted", f"{count} is too few", fix="use hundreds, or 0 for none")
        entropy = SystemRandom()
        return cls(np.array([bool(entropy.getrandbits(1)) for _ in range(count)]), np.zeros(count))

    @property
    def watched(self) -> int:
        """Number of releases that the scores add up."""
        return len(self.moves)

    @property
    def guesses_by(self) -> NDArray[np.float64]:
        """(canaries,) scores to guess coins by: ``ratios`` if they cover every watched release, ``scores`` if not."""
        return self.ratios if self.rated and self.rated == self.watched else self.scores

    def start(
        self, mechanism: Mechanism, pair_sizes: Sequence[int], planted: NDArray[np.bool_], sample_rate: float = 0.0
    ) -> None:
        """Check that every canary has its slot and a coordinate of its own in every pair, and forget all past rows.

        Raises: ConfigError if not, or if the mechanism trains locally.
        """
        self.decoder, self.sample_rate = _Decoder(), sample_rate
        if mechanism.clipper.federation is not None:
            raise ConfigError("canaries.crafted", f"{mechanism.name} clips updates of clients", fix="use 0")
        if not np.array_equal(planted, self.included):
            raise ConfigError("canaries.crafted", "the run's slots are not the auditor's", fix="use units.with_slots")
        if min(pair_sizes) < len(self.included):
            problem = f"{len(self.included)} exceeds the {min(pair_sizes)} parameters of the smallest LoRA pair"
            raise ConfigError("canaries.crafted", problem, fix="use fewer")

    def on_open(self, releases: int) -> None:
        """Do nothing. The coins exist in this process only, so there is no file to write or to check."""

    def on_save(self) -> None:
        """Do nothing, likewise."""

    def gradients(self, mechanism: Mechanism, drawn: NDArray[np.int64], zeros: list[torch.Tensor]) -> list[Gradients]:
        """Gradients of the drawn canaries, as one micro-batch; an empty list if none was drawn."""
        return [_Crafted.of(drawn, zeros, mechanism)] if len(drawn) else []

    def watch(
        self,
        mechanism: Mechanism,
        released: Released,
        zeros: list[torch.Tensor],
        divisor: float,
        row: int,
        turns: NDArray[np.bool_],
    ) -> None:
        """Add one release to the scores, in units of its noise if that is known for each pair."""
        known = len(released.deviations) == len(released.gradient) and min(released.deviations) > 0
        units = released.deviations if known else (1.0,) * len(released.gradient)
        found = _in_own_coordinates(released.gradient, units, len(self.scores))
        if mechanism.bands == 1:
            self.scores += found
            self.moves.append(self._move(mechanism, released, zeros, divisor, units))
            self.squares.append(float((found[~self.included] ** 2).sum()))
            if known:  # by now in units of its noise over the divisor
                self._rate(divisor * found, divisor * self.moves[-1], len(units))
        else:
            self.scores += self.decoder.follow(found, row, turns, mechanism.coefficients, in_units_of_noise=known)
            self.moves.append(float("nan"))
            self.squares.append(float("nan"))

    def _rate(self, found: NDArray[np.float64], move: float, pairs: int) -> None:
        """Add the log likelihood ratios of one release, in which each coordinate sums ``pairs`` units of noise."""
        if not (self.sample_rate and math.isfinite(move)):
            return
        visit = (2 * found * move - move**2) / (2 * pairs)  # of a canary that entered to one that did not
        stayed_out = math.log1p(-self.sample_rate) if self.sample_rate < 1 else -math.inf
        drawn = np.logaddexp(stayed_out, math.log(self.sample_rate) + visit)
        self.ratios = drawn if not self.rated else self.ratios + drawn
        self.rated += 1

    def _move(
        self,
        mechanism: Mechanism,
        released: Released,
        zeros: list[torch.Tensor],
        divisor: float,
        units: Sequence[float],
    ) -> float:
        if mechanism.controller.raw_inputs or released.knobs.geometry is not None:
            return float("nan")
        one = _Crafted.of(np.zeros(1, dtype=np.int64), zeros, mechanism)
        clipped = mechanism.clipper.clipped_sum(one, released.knobs)
        return float(
            _in_own_coordinates(mechanism.clipper.restore(clipped, zeros, released.knobs, divisor), units, 1)[0]
        )


class _Decoder:
    """The matched filter of a banded strategy C, release by release.

    The rows y = C v are a canary's visits times c plus independent noise, because v = s + C^-1 z. A visit in row j is
    then spread over the rows j to j + b - 1 of y with the weights c, so that the sum of c_k y_(j + k) is the best
    linear guess at it. A canary's visits are b rows apart, so that they do not mix.

    Attributes:
        last: number of the row that came last; None before the first.
        rows: rows since the recursion started.
        past: up to b rows v, newest first, each divided by the deviation that the noise would have had in the first.
        ages: (canaries,) rows since each canary's last turn; -1 before its first.
    """

    def __init__(self) -> None:
        self.last: int | None = None
        self.rows = 0
        self.past: list[NDArray[np.float64]] = []
        self.ages = np.zeros(0, dtype=np.int64)

    def follow(
        self,
        found: NDArray[np.float64],
        row: int,
        turns: NDArray[np.bool_],
        strategy: tuple[float, ...],
        in_units_of_noise: bool,
    ) -> NDArray[np.float64]:
        """(canaries,) what a row adds to the scores.

        Args:
            found: (canaries,) each canary's coordinate of the release.
            turns: (canaries,) whether each could be drawn in it.
            in_units_of_noise: whether ``found`` was divided by the deviation of the row's own noise, which is larger
                in later rows of a recursion.
        """
        if self.last != row - 1:  # a row was made elsewhere, and the noise was started anew after it
            self.rows, self.past, self.ages = 0, [], np.full(len(found), -1)
        even = found * row_deviation(strategy, self.rows) if in_units_of_noise else found
        self.last, self.rows = row, self.rows + 1
        self.past = [even, *self.past][: len(strategy)]
        decoded = np.sum([weight * one for weight, one in zip(strategy, self.past, strict=False)], axis=0)
        self.ages = np.where(turns, 0, np.where(self.ages < 0, -1, self.ages + 1))
        weights = np.where(self.ages < 0, 0.0, np.array(strategy)[np.clip(self.ages, 0, len(strategy) - 1)])
        return np.asarray(weights * decoded)


def _in_own_coordinates(gradient: Sequence[torch.Tensor], units: Sequence[float], canaries: int) -> NDArray[np.float64]:
    """(canaries,) sums over pairs of each canary's coordinate of a gradient, in these units."""
    parts = [part[:canaries].double().cpu().numpy() / unit for part, unit in zip(gradient, units, strict=True)]
    return np.asarray(np.sum(parts, axis=0))


@dataclass(frozen=True)
class _Crafted:
    """Gradients (see ``gradient_interfaces.Gradients``) of drawn canaries, each 0 but for one entry a pair."""

    coordinates: torch.Tensor
    size: float
    zeros: list[torch.Tensor]

    @classmethod
    def of(cls, drawn: NDArray[np.int64], zeros: list[torch.Tensor], mechanism: Mechanism) -> _Crafted:
        return cls(torch.from_numpy(drawn).to(zeros[0].device), _HUGE if mechanism.private else _PLAIN, zeros)

    def norms(self) -> torch.Tensor:
        return self.zeros[0].new_full((len(self.coordinates), len(self.zeros)), self.size)

    def losses(self) -> torch.Tensor:
        return self.zeros[0].new_zeros(len(self.coordinates))

    def tokens(self) -> torch.Tensor:
        return self.zeros[0].new_ones(len(self.coordinates))

    def weighted_sum(self, factors: torch.Tensor) -> list[torch.Tensor]:
        weights = factors.double() * self.size
        return [
            torch.zeros_like(zero).index_add_(0, self.coordinates, weights[:, pair])
            for pair, zero in enumerate(self.zeros)
        ]

    def matrix(self) -> torch.Tensor:
        rows = []
        for zero in self.zeros:
            part = zero.new_zeros(len(self.coordinates), len(zero))
            part[torch.arange(len(self.coordinates)), self.coordinates] = self.size
            rows.append(part)
        return torch.cat(rows, dim=1)
