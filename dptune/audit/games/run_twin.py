"""Twin of a run: the same mechanism, sample rate and steps on made-up parameters, of which thousands can be played.

A game is one whole run of the twin. One unit is in the data or not; its gradient is as large as the mechanism lets it
count. The attacker sees all releases and scores them by the log-likelihood ratio of the two worlds, which is exact for
Poisson-sampled Gaussian releases: the sum over steps of log(1 - q + q e^r), with r = (<y, v> - |v|^2 / 2) / sigma^2 for
a release y and the shift v of the unit. Releases are made by the code that runs use: draw, clipper, noise, controller.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptune.audit.games.bets import CUTS, Bets, Curve, mu_of
from dptune.audit.games.twin_games import ALONE, Notes, rounds_of
from dptune.core.digits import at_least, at_most
from dptune.core.errors import ConfigError
from dptune.core.plugins import naming_plugins
from dptune.core.progress import Meter
from dptune.mechanisms.mechanism import Mechanism
from dptune.mechanisms.planning import Schedule, planned
from dptune.privacy.accountants import epsilons, leaks_of, published_epsilon
from dptune.privacy.accounting.loss_profile import profile_of
from dptune.privacy.entropy import Entropy, OsEntropy
from dptune.privacy.release import Composition

Array = NDArray[np.float64]

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
        fault: what breaks a precondition of every price, in words; None if nothing was seen.
        fewer: a sentence if a tenth of the games was played, each alone: why, and how to have more; else empty.

    Example:
        >>> from dptune.audit.games.run_twin import audit_twin
        >>> from dptune.mechanisms.planning import Schedule
        >>> from dptune.mechanisms.registry import build
        >>> static = build("static", {"noise_multiplier": 1.0})
        >>> audit_twin(static, Schedule(sample_rate=0.1, steps=10, delta=1e-5), games=500).games
        500
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
    fault: str | None = None
    fewer: str = ""

    @property
    def accusation(self) -> str | None:
        """The accusation in one sentence; None if the games agree with what is certified."""
        return self.fault or self._refuted(self.accused_after, "certified", self.epsilon_certified, _ACCUSED)

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
            shown = f"these show an epsilon of {at_least(self.epsilon_audited)}"
            nothing = f"nothing finite is certified, so there is nothing to refute; {shown}"
            return f"{nothing}; {said}" if (said := self.claim_refuted) else nothing
        could = f"games that are never guessed wrong show an epsilon of {at_least(self.epsilon_refutable)}"
        shown = f"these show a mu of {at_least(self.mu_audited)} of {at_most(self.mu_certified)}"
        if self.epsilon_refutable <= self.epsilon_certified:
            return f"NO POWER on epsilon itself: {could}; on the curve as a whole {shown}"
        return f"{could}; {shown}"

    def to_dict(self) -> dict[str, Any]:
        """The figures in plain JSON types, and power, accusation and claim in words."""
        words = {"power": self.power, "accusation": self.accusation, "claim_refuted": self.claim_refuted}
        left_out = ("curve", "fault", "fewer")
        return {**{name: value for name, value in vars(self).items() if name not in left_out}, **words}


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
    game that is played alone is a run of its own. Games side by side share a run, with a unit and a coordinate of every
    pair each, and see nothing but that. In units of the noise a unit moves it by the same length at every step,
    wherever radii and weights went: the batches hold nothing but such units, and each saturates the clipper. Noise and
    coins are drawn afresh for each; both are what a ledger is charged for. So these scores are independent, or the
    ledger is wrong.

    A mechanism whose controller watches units first plays some games alone, in which its statistics are attacked too.
    One that reads raw statistics, clips in coordinates of its own or comes from a plug-in is played alone only.

    Two faults of Gaussian noise hide from that score. Noise that is less than charged in some pairs alone is learned
    from the games side by side, and scored in later ones. Noise that two of 17 successive steps share is a fault by
    itself (chance below 1e-20 where it is independent). Games that are played alone see neither.
    A mechanism that recognises the twin, and behaves otherwise in a run, is not noticed.

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
        >>> from dptune.audit.games.run_twin import audit_twin
        >>> from dptune.mechanisms.planning import Schedule
        >>> from dptune.mechanisms.registry import build
        >>> static = build("static", {"noise_multiplier": 1.0})
        >>> found = audit_twin(static, Schedule(sample_rate=0.1, steps=10, delta=1e-5), games=500)
        >>> found.mu_audited < found.mu_certified, found.accusation
        (True, None)
    """
    _check(mechanism, games, confidence, false_alarms)
    entropy = entropy or OsEntropy()
    notes = Notes()
    rounds = rounds_of(mechanism, schedule, games, entropy, expected_batch_size, notes)
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
            if notes.fault or "certified" in refuted or (certified is None and "claimed" in refuted):
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
        fault=notes.fault or None,
        fewer=_fewer(mechanism.name, notes.alone, games) if notes.alone and games > ALONE else "",
    )


def _fewer(mechanism: str, why: str, games: int) -> str:
    return (
        f"Each game is a run of its own, because {mechanism} {why}. That is slow, so a tenth of --trials is played "
        f"({ALONE} pairs at least): --trials {10 * games} plays {games} pairs."
    )


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
    if games < ALONE:
        raise ConfigError("games", f"{games} is below {ALONE}", fix="use thousands")
    for name, share, usual in (("confidence", confidence, 0.95), ("false_alarms", false_alarms, 0.001)):
        if not 0 < share < 1:
            raise ConfigError(name, f"{share} is not in (0, 1)", fix=f"use {usual}, say")
    if (error := unplayable(mechanism)) is not None:
        raise error


def unplayable(mechanism: Mechanism) -> ConfigError | None:
    """The reason why no twin of a run can be played; None if one can."""
    if mechanism.controller.adaptive and not mechanism.controller.raw_inputs:
        problem = f"{mechanism.name} moves its noise, and only the ledger of a run limits how far: a twin has none"
        return ConfigError("mechanism", problem, fix="set move_noise to false, or audit one step")
    if mechanism.noise.family not in ("gaussian", "none", "laplace_mixture"):
        problem = f"no likelihood ratio of {mechanism.name}'s noise ({mechanism.noise.family}) is known"
        return ConfigError("mechanism", problem, fix="audit one step of it, which learns its scores from trials")
    return None
