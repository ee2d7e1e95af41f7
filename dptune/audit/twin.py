"""Twin of a run: the same mechanism, sample rate and steps on made-up parameters, of which thousands can be played.

A game is one whole run of the twin. One unit is in the data or not; its gradient is as large as the mechanism lets it
count. The attacker sees all releases and scores them by the log-likelihood ratio of the two worlds, which is exact for
Poisson-sampled Gaussian releases: the sum over steps of log(1 - q + q e^r), with r = (<y, v> - |v|^2 / 2) / sigma^2 for
a release y and the shift v of the unit. Releases are made by the code that runs use: draw, clipper, noise, controller.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dptune.audit.bets import CUTS, Bets, Curve, mu_of
from dptune.audit.contract import check_parts, check_released
from dptune.core.digits import at_least, at_most
from dptune.core.errors import ConfigError
from dptune.core.plugins import naming_plugins
from dptune.core.progress import Meter
from dptune.core.units import RECORD
from dptune.mechanisms.controllers.control import Constant
from dptune.mechanisms.interfaces import Knobs, Observation, Released, RunFacts
from dptune.mechanisms.mechanism import Mechanism
from dptune.mechanisms.planning import Schedule, planned
from dptune.privacy.accountants import epsilons, leaks_of, published_epsilon
from dptune.privacy.accounting.loss_profile import profile_of
from dptune.privacy.entropy import Entropy, OsEntropy
from dptune.privacy.release import Composition
from dptune.training.privacy_units import PrivacyUnits, split_batch
from dptune.training.unit_groups import Turn

Array = NDArray[np.float64]

_HUGE = 1e6
#: The unit's gradient, as a multiple of its direction, and its loss; the one that moves a release most is played.
_UNITS = ((_HUGE, 1.0), (_HUGE, _HUGE), (_HUGE, 0.0), (0.0, 1.0))
_TOGETHER = 500  # pairs of games side by side in one run
_ROUND = 25  # pairs of games between two looks, where each is a run of its own
#: Pairs of games that are played alone where a controller watches units: a hundredth of all, and at least so many.
_ALONE = 100
#: Deltas at which a published claim is read; its curve between them is bounded by chords.
_CLAIMED = (1e-8, 1e-5, 1e-4, 1e-3, 3e-3, 0.01, 0.02, 0.04, 0.07, 0.1, 0.14, 0.18, 0.23, 0.3, 0.4, 0.5, 0.6, 0.8)
_ACCUSED = "the mechanism or its accountant is wrong"


@dataclass(frozen=True)
class TwinAudit:
    """What games on a run's twin show, beside what its releases are certified for.

    Each bound holds by itself at ``confidence``, whenever the games were stopped.

    Attributes:
        games: pairs of games that were played; fewer than were asked for where an accusation was certain before.
        confidence: confidence of each bound.
        false_alarms: probability of an accusation if the certificate is true.
        mu_audited: lower bound on mu, from the advantage of the attack.
        mu_certified: mu of the Gaussian curve with the certified advantage, which is mu itself for unsampled Gaussian
            releases; infinite if nothing is certified.
        epsilon_audited: lower bound on epsilon at ``delta``, for any mechanism; about log(games) at most.
        epsilon_refutable: the bound if no game were guessed wrong.
        epsilon_published: what the mechanism's paper claims of these releases.
        curve: for each epsilon: delta certified with the unit in and out, and lower bounds on both.
        accused_after: pairs of games after which the certificate was refuted; None if it was not.
        claim_refuted_after: the same for the published claim.
    """

    mechanism: str
    steps: int
    sample_rate: float
    delta: float
    games: int
    confidence: float
    false_alarms: float
    mu_audited: float
    mu_certified: float
    epsilon_audited: float
    epsilon_certified: float
    epsilon_refutable: float
    epsilon_published: float
    curve: tuple[dict[str, float | None], ...]
    accused_after: int | None
    claim_refuted_after: int | None

    @property
    def accusation(self) -> str | None:
        """The accusation in one sentence; None if the games agree with what is certified."""
        return self._refuted(self.accused_after, "certified", self.epsilon_certified, _ACCUSED)

    @property
    def claim_refuted(self) -> str | None:
        """A sentence if the games refute what the paper claims of these releases."""
        return self._refuted(self.claim_refuted_after, "claimed", self.epsilon_published, "the paper's claim is wrong")

    def _refuted(self, after: int | None, called: str, epsilon: float, so: str) -> str | None:
        if after is None:
            return None
        chance = at_most(self.false_alarms, 2)
        return (
            f"{after} pairs of games on its twin refute the curve whose epsilon at {self.delta:g} is {called} as "
            f"{at_most(epsilon)}, with a chance below {chance} of a false alarm: {so}"
        )

    @property
    def power(self) -> str:
        """What the games could have refuted, in words."""
        if math.isinf(self.epsilon_certified):
            nothing = "nothing finite is certified, so there is nothing to refute"
            return f"{nothing}; {said}" if (said := self.claim_refuted) else nothing
        could = f"games that are never guessed wrong show an epsilon of {at_least(self.epsilon_refutable)}"
        shown = f"these show a mu of {at_least(self.mu_audited)} of {at_most(self.mu_certified)}"
        if self.epsilon_refutable <= self.epsilon_certified:
            return f"NO POWER on epsilon itself: {could}; on the curve as a whole {shown}"
        return f"{could}; {shown}"

    def to_dict(self) -> dict[str, Any]:
        """The figures in plain JSON types, and power, accusation and claim in words."""
        words = {"power": self.power, "accusation": self.accusation, "claim_refuted": self.claim_refuted}
        return {**{name: value for name, value in vars(self).items() if name != "curve"}, **words}


def audit_twin(
    mechanism: Mechanism,
    schedule: Schedule,
    *,
    games: int,
    confidence: float = 0.95,
    false_alarms: float = 0.001,
    entropy: Entropy | None = None,
    expected_batch_size: float = 1.0,
    claimed_of: Composition | None = None,
) -> TwinAudit:
    """Play whole runs of a twin, and compare what they show with the certified curve and with the paper's claim.

    Guarantee: if the releases keep the certificate, the twin is accused with probability ``false_alarms`` at most, over
    its coins and noise; the same holds of the published claim, by itself. Proof: ``Bets``, for independent games. A
    game that is played alone is a run of its own. Games side by side share a run, with a unit and a coordinate each,
    and see nothing but that coordinate. In units of the noise a unit moves it by the same amount at every step,
    wherever the radii went, and the noise and the coins are drawn afresh for each; both are what a ledger is charged
    for. So these scores are independent, or the ledger is wrong.

    A mechanism whose controller watches units first plays some games alone, in which its statistics are attacked too.
    One that reads raw statistics, clips in coordinates of its own or comes from a plug-in is played alone only.

    Games stop as soon as the certificate is refuted, or the claim where nothing is certified.

    Args:
        mechanism: a mechanism that is not started, with its noise; it is copied, never changed.
        schedule: sample rate (with correlated noise: of the whole run), steps, and delta of the epsilons.
        games: pairs of games, with the unit in and with it out; a tenth where all are played alone.
        entropy: source of noise and coins; the operating system's by default.
        expected_batch_size: of the run, by which some controllers scale their statistics.
        claimed_of: the releases of a run that had no more noise in any step than the twin has: its claim is compared.
            By default the twin's own, whose noise stays at its start.

    Raises: ConfigError for a mechanism that moves its noise soundly, since only its ledger limits it; for noise of a
        family without a known law; for numbers out of range; and as ``audit_step`` for broken plug-ins.

    Example:
        >>> from dptune.audit.twin import audit_twin
        >>> from dptune.mechanisms.planning import Schedule
        >>> from dptune.mechanisms.registry import build
        >>> static = build("static", {"noise_multiplier": 1.0})
        >>> found = audit_twin(static, Schedule(sample_rate=0.1, steps=10, delta=1e-5), games=500)
        >>> found.mu_audited < found.mu_certified, found.accusation
        (True, None)
    """
    _check(mechanism, games, confidence, false_alarms)
    entropy = entropy or OsEntropy()
    rounds = _rounds(mechanism, schedule, games, entropy, expected_batch_size)
    releases = planned(mechanism, schedule)
    certified = None if leaks_of(releases) else _certified_curve(releases)
    claimed = _claimed_curve(mechanism, claimed_of or releases)
    prices = epsilons(releases, schedule.delta, published_accountant=mechanism.published_accountant)
    published = published_epsilon(mechanism.published_accountant, claimed_of or releases, schedule.delta)
    refuted: dict[str, int] = {}
    curves = {name: one for name, one in (("certified", certified), ("claimed", claimed)) if one is not None}
    bets, about = Bets(), f"mechanisms.{mechanism.name}"
    with naming_plugins(about, mechanism.modules), Meter(f"audit {mechanism.name}", unit="games") as meter:
        for scores in rounds:
            bets.add(*scores)
            meter.update(bets.pairs)
            for name, curve in curves.items():
                if name not in refuted and bets.accuses(curve, false_alarms):
                    refuted[name] = bets.pairs
            if "certified" in refuted or (certified is None and "claimed" in refuted):
                break
    chance, sure = 1 - confidence, Bets()
    sure.add(np.full(bets.pairs, np.inf), np.full(bets.pairs, -np.inf))
    return TwinAudit(
        mechanism.name,
        schedule.steps,
        schedule.sample_rate,
        schedule.delta,
        bets.pairs,
        confidence,
        false_alarms,
        mu_audited=mu_of(bets.delta_at(0, 0, chance)),
        mu_certified=mu_of(min(certified.remove[0], certified.add[0])) if certified else math.inf,
        epsilon_audited=bets.epsilon_at(schedule.delta, chance),
        epsilon_certified=prices.certified,
        epsilon_refutable=sure.epsilon_at(schedule.delta, chance),
        epsilon_published=published,
        curve=_rows(bets, certified, chance),
        accused_after=refuted.get("certified"),
        claim_refuted_after=refuted.get("claimed"),
    )


def _rounds(
    mechanism: Mechanism, schedule: Schedule, games: int, entropy: Entropy, expected: float
) -> Iterator[tuple[Array, Array]]:
    """Rounds of pairs of games: those played alone, then those side by side."""
    plain = type(mechanism.controller) is Constant and not mechanism.plugins
    probe = _Twin(mechanism, schedule, entropy, expected, 1)
    together = not (mechanism.plugins or mechanism.controller.raw_inputs or probe.started().knobs().geometry)
    alone = 0 if plain else max(_ALONE, math.ceil(games / (100 if together else 10)))
    for count, size, each in ((alone, 1, _ROUND), (games - alone if together else 0, 2 * _TOGETHER, _TOGETHER)):
        if count:
            twin = probe if size == 1 else _Twin(mechanism, schedule, entropy, expected, size)
            yield from (twin.play(min(each, count - done)) for done in range(0, count, each))


def _rows(bets: Bets, certified: Curve | None, chance: float) -> tuple[dict[str, float | None], ...]:
    shown = [[bets.delta_at(cut, direction, chance) for direction in (0, 1)] for cut in range(len(CUTS))]
    return tuple(
        {
            "epsilon": epsilon,
            "delta_in_certified": certified.remove[at] if certified else None,
            "delta_in_shown": shown[at][0],
            "delta_out_certified": certified.add[at] if certified else None,
            "delta_out_shown": shown[at][1],
        }
        for at, epsilon in enumerate(CUTS)
    )


def _certified_curve(releases: Composition) -> Curve:
    """The certified curve of releases whose noise was fixed before the run."""
    profile = profile_of(Counter({replace(release, adaptive=False): count for release, count in releases.items()}))
    at = np.array(CUTS)
    remove, add = (tuple(float(one) for one in side.delta(at)) for side in (profile, profile.turned()))
    return Curve(remove, add)


def _claimed_curve(mechanism: Mechanism, releases: Composition) -> Curve | None:
    """The curve that the paper's accountant claims of these releases; None if it claims nothing finite."""
    pairs = [(published_epsilon(mechanism.published_accountant, releases, delta), delta) for delta in _CLAIMED]
    finite = [(max(epsilon, 0.0), delta) for epsilon, delta in pairs if math.isfinite(epsilon)]
    return Curve.of_pairs(finite) if finite else None


def _check(mechanism: Mechanism, games: int, confidence: float, false_alarms: float) -> None:
    if games < _ALONE:
        raise ConfigError("games", f"{games} is below {_ALONE}", fix="use thousands")
    for name, share, usual in (("confidence", confidence, 0.95), ("false_alarms", false_alarms, 0.001)):
        if not 0 < share < 1:
            raise ConfigError(name, f"{share} is not in (0, 1)", fix=f"use {usual}, say")
    if mechanism.controller.adaptive and not mechanism.controller.raw_inputs:
        problem = f"{mechanism.name} moves its noise, and only the ledger of a run limits how far: a twin has none"
        raise ConfigError("mechanism", problem, fix="set move_noise to false, or audit one step")
    noise = mechanism.noise
    if noise.family not in ("gaussian", "none", "laplace_mixture"):
        problem = f"no likelihood ratio of {mechanism.name}'s noise ({noise.family}) is known"
        raise ConfigError("mechanism", problem, fix="audit one step of it, which learns its scores from trials")


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
        score, visit, ages, past = np.zeros(games), np.zeros(games), np.full(games, bands), []
        for row in range(self.schedule.steps):
            knobs = self._knobs(mechanism)
            turn = Turn.of(run_id, bands, row, mechanism.dealt_by)
            drawn = split_batch(units.draw(self.rate, self.entropy, turn))[1]
            batch = [self._batch(drawn)] if len(drawn) else []
            released = mechanism.privatise(batch, self.zeros, knobs, self.divisor, self.entropy, row=row)
            base, shift, spread = self._known(mechanism, knobs)
            parts = [*released.blocks, *([] if released.statistics is None else [released.statistics])]
            seen, move = (self._vectors(parts) - base) / spread, shift / spread
            if mechanism.noise.family == "laplace_mixture":
                score += self._sampled(_laplace_ratio(mechanism, knobs, seen, move))
            else:
                # With correlated noise (bands > 1) C v has independent noise, and a visit moves ``bands`` rows of it.
                past = [seen, *past][:bands]
                whitened = sum(weight * one for weight, one in zip(self.strategy, past, strict=False))
                own = np.ones(games, dtype=bool) if turn is None else units.of_turn(turn, np.arange(games))
                score += np.where(own, self._sampled(visit), 0.0)
                visit, ages = np.where(own, 0.0, visit), np.where(own, 0, ages)
                weight = np.where(ages < bands, self.strategy[np.minimum(ages, bands - 1)], 0.0)
                visit = visit + weight * (whitened @ move) - weight**2 * (move @ move) / 2
                ages = ages + 1
            mechanism.controller.observe(self._observation(mechanism, released, row))
        return np.asarray(score + self._sampled(visit))

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
