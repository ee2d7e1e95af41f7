"""Games on a run's twin: whole runs on made-up units with a coordinate each, scored by the exact likelihood ratio."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from dptune.audit.games.contract import check_parts, check_released
from dptune.audit.games.noise_check import noise_fault
from dptune.core.settings import RECORD
from dptune.mechanisms.controllers.control import Constant
from dptune.mechanisms.interfaces import Knobs, Observation, Released, RunFacts
from dptune.mechanisms.mechanism import Mechanism
from dptune.mechanisms.planning import Schedule
from dptune.privacy.entropy import Entropy, OsEntropy
from dptune.training.privacy_units import PrivacyUnits, Turn, split_batch

Array = NDArray[np.float64]

_HUGE = 1e6
#: The unit's gradient, as a multiple of its direction, and its loss; the one that moves a release most is played.
_UNITS = ((_HUGE, 1.0), (_HUGE, _HUGE), (_HUGE, 0.0), (0.0, 1.0))
_TOGETHER = 500  # pairs of games side by side in one run
_ROUND = 25  # pairs of games between two looks, where each is a run of its own
#: Pairs of games that are played alone where a controller watches units: a hundredth of all, and at least so many.
ALONE = 100
#: Steps that are searched for a step's noise, and the correlation from which on it is that noise. Of independent noise
#: in 500 coordinates such a correlation has a chance below 1e-30.
_SEARCHED, _SAME = 16, 0.5
_CERTAIN = 6.0  # standard deviations from which on noise is quieter than charged, and is scored as such
_QUIETEST = 1e-6


@dataclass
class Notes:
    """What rounds of games tell beside their scores.

    Attributes:
        fault: the first thing that breaks a precondition of every price, in words; empty if nothing was seen.
        alone: why no games lie side by side, so that a tenth of them is played; empty if they do.
    """

    fault: str = ""
    alone: str = ""


def rounds_of(
    mechanism: Mechanism,
    schedule: Schedule,
    games: int,
    entropy: Entropy,
    expected: float,
    notes: Notes | None = None,
) -> Iterator[tuple[Array, Array]]:
    """Rounds of pairs of games: those played alone, then those side by side; ``notes`` are filled in on the way."""
    notes = notes or Notes()
    plain = type(mechanism.controller) is Constant and not mechanism.plugins
    probe = _Twin(mechanism, schedule, entropy, expected, 1)
    notes.alone = _why_alone(mechanism, probe.started().knobs())
    alone = 0 if plain else max(ALONE, math.ceil(games / (10 if notes.alone else 100)))
    for count, size, each in ((alone, 1, _ROUND), (0 if notes.alone else games - alone, 2 * _TOGETHER, _TOGETHER)):
        if count:
            twin = probe if size == 1 else _Twin(mechanism, schedule, entropy, expected, size)
            for done in range(0, count, each):
                scores = twin.play(min(each, count - done))
                notes.fault = notes.fault or twin.fault
                yield scores
    notes.fault = notes.fault or probe.noise_fault or ""  # games that refute the certificate themselves say more


def _why_alone(mechanism: Mechanism, knobs: Knobs) -> str:
    """Why games of a mechanism cannot share a run, each in a coordinate of its own; empty if they can."""
    if mechanism.plugins:
        return "has code of a plug-in, which may mix coordinates"
    if mechanism.controller.raw_inputs:
        return "reads statistics without noise, which all games of a run would share"
    return "clips in coordinates of its own" if knobs.geometry else ""


@dataclass(frozen=True)
class _Rows:
    """Gradients (``dptune.mechanisms.gradient_interfaces.Gradients``) of drawn units, each in its own coordinate."""

    coordinates: torch.Tensor
    size: float
    loss: float
    zeros: list[torch.Tensor]

    def norms(self) -> torch.Tensor:
        return self.zeros[0].new_full((len(self.coordinates), len(self.zeros)), self.size)

    def losses(self) -> torch.Tensor:
        return self.zeros[0].new_full((len(self.coordinates),), self.loss)

    def tokens(self) -> torch.Tensor:
        return self.zeros[0].new_ones(len(self.coordinates))

    def weighted_sum(self, factors: torch.Tensor) -> list[torch.Tensor]:
        weights = factors.double() * self.size
        return [zero.index_add(0, self.coordinates, weights[:, pair]) for pair, zero in enumerate(self.zeros)]

    def matrix(self) -> torch.Tensor:
        return torch.cat([zero.expand(len(self.coordinates), -1) for zero in self.zeros], dim=1).index_put(
            (
                torch.arange(len(self.coordinates)).repeat(len(self.zeros)),
                torch.cat([self.coordinates + pair * len(zero) for pair, zero in enumerate(self.zeros)]),
            ),
            self.zeros[0].new_tensor(self.size),
        )


class _Twin:
    """A mechanism that can be run from its start again and again, on units with a coordinate each."""

    def __init__(self, mechanism: Mechanism, schedule: Schedule, entropy: Entropy, expected: float, games: int) -> None:
        self.mechanism, self.schedule, self.entropy, self.games = mechanism, schedule, entropy, games
        self.side_by_side = games > 1
        self.rate = mechanism.group_sample_rate(schedule.sample_rate)
        self.sizes = (max(2, self.games),) * mechanism.pairs
        self.zeros = [torch.zeros(size, dtype=torch.float64) for size in self.sizes]
        self.divisor = expected
        self.facts = RunFacts(
            self.sizes, torch.device("cpu"), expected, schedule.sample_rate, schedule.steps, None, schedule.delta
        )
        self.unit = _UNITS[0]
        self.strategy = np.array(mechanism.coefficients or (1.0,))
        self._last: tuple[Knobs, tuple[Array, Array, Array]] | None = None
        self.fault = ""
        self.noise_fault: str | None = None  # what is wrong with the noise of some block, whatever games show
        # Noise in coordinates without a unit, as multiples of the charged deviation: sums of squares, and their number.
        self._squares, self._numbers = np.zeros(mechanism.pairs), 0
        self._quiet: Array | float = 1.0  # of each pair: its noise as a multiple of what is charged, where that is less
        self._open()

    def _open(self) -> None:
        """Check the parts on a batch of one unit, and choose the unit that moves a first release most."""
        started = self.started()
        check_parts(started, started.knobs(), [self._batch(np.zeros(1, dtype=np.int64))], self.zeros, OsEntropy())
        started = self.started()  # the noise may remember what it drew
        knobs = self._knobs(started)
        released = started.privatise([], self.zeros, knobs, self.divisor, self.entropy)
        empty = started.statistics(knobs)
        check_released(started, knobs, released, self.zeros, None if empty is None else empty.empty)
        if self.side_by_side or not started.private:
            return
        started.controller.observe(self._observation(started, released, 0))
        one = [self._batch(np.zeros(1, dtype=np.int64))]
        probed = copy.deepcopy(started)
        self.noise_fault = noise_fault(probed, self._knobs(probed), [one], self.zeros, OsEntropy())
        moves = []
        for self.unit in _UNITS:
            self._last = None
            _, shift, spread = self._known(started, self._knobs(started))
            moves.append(float(np.square(shift / spread).sum()))
        self.unit, self._last = _UNITS[int(np.argmax(moves))], None

    def started(self) -> Mechanism:
        """A copy that is ready for its first step."""
        started = copy.deepcopy(self.mechanism)
        started.start(self.facts)
        return started

    def _knobs(self, mechanism: Mechanism) -> Knobs:
        """The next knobs, with the noise multiplier of the start: of another, another run would be priced."""
        knobs = mechanism.knobs()
        start = self.mechanism.noise.noise_multiplier
        return knobs if knobs.noise_multiplier == start else replace(knobs, noise_multiplier=start)

    def play(self, pairs: int) -> tuple[Array, Array]:
        """(pairs,) scores of runs with the unit in, and of runs with it out."""
        if self.side_by_side:
            inside = np.arange(self.games) % 2 == 0
            scores = self._run(inside)
            return scores[inside][:pairs], scores[~inside][:pairs]
        scores = np.array([[self._run(np.array([world]))[0] for world in (True, False)] for _ in range(pairs)])
        return scores[:, 0], scores[:, 1]

    def _run(self, inside: NDArray[np.bool_]) -> Array:
        """(games,) log-likelihood ratios of one run of all steps, in which these units are in the data."""
        mechanism, games, bands = self.started(), len(inside), len(self.strategy)
        units = replace(PrivacyUnits.of(RECORD, np.zeros(0, dtype=np.int64), 1), planted=inside)
        run_id = str(self.entropy.words(1)[0])
        score, visit, ages = np.zeros(games), np.zeros(games), np.full(games, bands)
        past: list[Array] = []
        noise: list[Array] = []
        for row in range(self.schedule.steps):
            knobs = self._knobs(mechanism)
            turn = Turn.of(run_id, bands, row, mechanism.dealt_by)
            drawn = split_batch(units.draw(self.rate, self.entropy, turn))[1]
            batch = [self._batch(drawn)] if len(drawn) else []
            released = mechanism.privatise(batch, self.zeros, knobs, self.divisor, self.entropy, row=row)
            base, shift, spread = self._known(mechanism, knobs)
            parts = [*released.blocks, *([] if released.statistics is None else [released.statistics])]
            seen, move = (self._vectors(parts) - base) / spread, shift / spread
            if not (self.fault or np.isfinite(seen).all()):  # its score is NaN, which counts as no guess
                self.fault = f"step {row + 1} of a run released nan or infinity, which may tell the worlds apart"
            if mechanism.noise.family == "laplace_mixture":
                score += self._sampled(_laplace_ratio(mechanism, knobs, seen, move))
            else:
                # Multiplying the releases by the strategy matrix C makes correlated noise independent again. One visit
                # of a unit then moves ``bands`` rows.
                past = [seen, *past][:bands]
                whitened = sum(weight * one for weight, one in zip(self.strategy, past, strict=False))
                noise = self._heard(row, whitened[~inside], noise)
                whitened, move = whitened / self._quiet, move / self._quiet
                own = np.ones(games, dtype=bool) if turn is None else units.of_turn(turn, np.arange(games))
                score += np.where(own, self._sampled(visit), 0.0)
                visit, ages = np.where(own, 0.0, visit), np.where(own, 0, ages)
                weight = np.where(ages < bands, self.strategy[np.minimum(ages, bands - 1)], 0.0)
                visit = visit + weight * (whitened @ move) - weight**2 * (move @ move) / 2
                ages = ages + 1
            mechanism.controller.observe(self._observation(mechanism, released, row))
        self._learn()
        return np.asarray(score + self._sampled(visit))

    def _heard(self, row: int, noise: Array, earlier: list[Array]) -> list[Array]:
        """Note the noise of a step, where no unit is, and whether an earlier step had it; return the last ones."""
        if not self.side_by_side or self.mechanism.noise.family != "gaussian":
            return []
        self._squares = self._squares + np.square(noise).sum(axis=0)
        self._numbers += len(noise)
        flat = noise.ravel() / max(np.linalg.norm(noise), np.finfo(float).tiny)
        for back, one in enumerate(earlier, start=1):
            if not self.fault and abs(flat @ one) > _SAME:
                self.fault = f"steps {row - back + 1} and {row + 1} of a run have the same noise: it must be fresh"
        return [flat, *earlier][:_SEARCHED]

    def _learn(self) -> None:
        """Score the next runs by the noise that was seen, in pairs where that surely is less than what is charged.

        Bets allow for that: the score of a round may depend on the rounds before it.
        """
        if self._numbers:
            seen = np.sqrt(self._squares / self._numbers)
            sure = seen < 1 - _CERTAIN / math.sqrt(2 * self._numbers)
            self._quiet = np.where(sure, np.maximum(seen, _QUIETEST), 1.0)

    def _sampled(self, ratios: Array) -> Array:
        """Log-ratios where the unit enters a batch with the sample rate only; 0 stays 0."""
        if self.rate == 1:
            return ratios
        return np.logaddexp(math.log1p(-self.rate), math.log(self.rate) + ratios)

    def _batch(self, drawn: NDArray[np.int64]) -> _Rows:
        return _Rows(torch.from_numpy(drawn), *self.unit, self.zeros)

    def _known(self, mechanism: Mechanism, knobs: Knobs) -> tuple[Array, Array, Array]:
        """The releases of an empty batch without noise, what the unit adds to them, and the scale of the noise."""
        if self._last is None or knobs.geometry is not None or knobs != self._last[0]:
            one = [self._batch(np.zeros(1, dtype=np.int64))]
            sums = [mechanism.exact_sums(batch, self.zeros, knobs) for batch in ([], one)]
            base, moved = (self._vectors(parts)[0] for parts in sums)
            unit = knobs.noise_multiplier if mechanism.noise.family == "gaussian" else 1.0
            scales = mechanism.scales(knobs) if mechanism.private else (1.0,) * len(sums[0])
            sizes = [1 if self.side_by_side else part.numel() for part in sums[0]]
            spread = unit * np.repeat(scales, sizes)[: len(base)]
            self._last = knobs, (base, moved - base, spread)
        return self._last[1]

    def _vectors(self, parts: list[torch.Tensor]) -> Array:
        """(games, numbers) what is seen of a game: its own coordinate of each pair, or all of a run of its own."""
        pairs = self.mechanism.pairs  # statistics come after them
        flat = (
            torch.stack(parts[:pairs], dim=1)
            if self.side_by_side
            else torch.cat([one.flatten() for one in parts])[None]
        )
        return flat.double().numpy()

    def _observation(self, mechanism: Mechanism, released: Released, row: int) -> Observation:
        """The observation for a controller, with constant public figures."""
        figures = {name: [1.0] * mechanism.pairs for name in ("product", "momentum", "second_moment")}
        return Observation(row + 1, released, (row + 1) / self.schedule.steps, lambda: 1.0, lambda: figures)


def _laplace_ratio(mechanism: Mechanism, knobs: Knobs, seen: Array, move: Array) -> Array:
    """(games,) exact log-ratios of a Laplace mixture, whose scale is drawn anew for every coordinate."""
    law = mechanism.noise.law(knobs.noise_multiplier)
    assert law is not None  # its family says so
    moved = move != 0
    return np.asarray((law.log_density(seen[:, moved] - move[moved]) - law.log_density(seen[:, moved])).sum(axis=1))
