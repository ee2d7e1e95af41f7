"""Bets against a privacy curve: an accusation that may come at any time, and bounds that hold whenever one looks.

Each game is played twice, with the unit in and with it out. Where (epsilon, delta)-DP holds, every test of the outcome
has P(says in | in) <= e^epsilon P(says in | out) + delta. So a gambler who wins (in says in) - e^epsilon (out says in)
- delta on each pair of games gains nothing on average. His wealth is a supermartingale, and Ville's inequality bounds
the chance that it *ever* reaches 1 / alpha by alpha: he may stop when he likes (Ville 1939; Ramdas, Gruenwald, Vovk and
Shafer 2023, arXiv 2210.01948).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp, ndtri

from dptune.audit.epsilon_bounds import largest_rejected

Array = NDArray[np.float64]

#: Log-likelihood ratios above which a game says "in"; below their negatives it says "out". Where the ratio is exact,
#: the best test against the line of slope e^epsilon has its cut at epsilon.
CUTS = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
#: Shares of the largest stake that leaves some wealth whatever happens; their gamblers put their wealth together.
_STAKES = np.array([0.02, 0.04, 0.08, 0.16, 0.3, 0.5, 0.75, 0.95])
_MOST_EPSILON = 30.0


@dataclass(frozen=True)
class Curve:
    """Upper bounds of delta at the epsilons ``CUTS``, in both directions.

    Attributes:
        remove: of P(with the unit) <= e^epsilon P(without it) + delta.
        add: of P(without the unit) <= e^epsilon P(with it) + delta.

    Example:
        >>> from dptune.audit.games.bets import Curve
        >>> round(Curve.of_pairs([(0.0, 0.2), (1.0, 0.01)]).remove[2], 3)  # at epsilon 0.5: between the two
        0.128
    """

    remove: tuple[float, ...]
    add: tuple[float, ...]

    @classmethod
    def of_pairs(cls, pairs: Sequence[tuple[float, float]]) -> Curve:
        """The curve of (epsilon, delta) pairs that hold together: chords in e^epsilon, as delta is convex there."""
        given = sorted({0.0: 1.0, **dict(sorted(pairs, reverse=True))}.items())
        at, deltas = np.exp([epsilon for epsilon, _ in given]), np.minimum.accumulate([delta for _, delta in given])
        found = tuple(float(delta) for delta in np.interp(np.exp(CUTS), at, deltas))
        return cls(found, found)


@dataclass
class Bets:
    """Outcomes of pairs of games, and what all gamblers together have won against a curve.

    Guarantee: if games are independent and the curve holds for one unit in or out, ``accuses(curve, chance)`` is true
    after *any* round with probability ``chance`` at most; each of the bounds is too high after any round with that
    probability at most.

    Proof of the bounds: a larger delta (or epsilon) allows what a smaller one allows, and every gambler's wealth falls
    in it. So a bound is too high only if wealth against the true value reached 1 / chance. (For epsilon a gambler's
    loss by delta is replaced by a larger one that does not depend on epsilon; wealth is still a supermartingale.)

    Example:
        >>> import numpy as np
        >>> from dptune.audit.games.bets import Bets, Curve
        >>> bets = Bets()
        >>> bets.add(np.full(200, 5.0), np.full(200, -5.0))  # 200 pairs of games, all guessed right
        >>> bets.accuses(Curve.of_pairs([(1.0, 1e-5)]), chance=0.001)
        True
        >>> bets.accuses(Curve.of_pairs([(7.0, 1e-5)]), chance=0.001)
        False
    """

    pairs: int = 0
    _rounds: list[Any] = field(default_factory=list, repr=False)

    def add(self, inside: Array, outside: Array) -> None:
        """Note a round of pairs of games: (pairs,) log-likelihood ratios with the unit in, and with it out.

        A score that is no number says neither "in" nor "out".
        """
        found = []
        for own, other in ((inside, outside), (-outside, -inside)):  # says "in" of the first; says "out" of the second
            hits, alarms = (scores[None] > np.array(CUTS)[:, None] for scores in (own, other))
            outcomes = hits & ~alarms, hits & alarms, ~hits & alarms
            found.append(np.stack([outcome.sum(axis=1) for outcome in outcomes], axis=1))
        before = self._rounds[-1][1] if self._rounds else 0
        self.pairs += len(inside)
        self._rounds.append((self.pairs, before + np.array(found)))

    def accuses(self, curve: Curve, chance: float) -> bool:
        """Whether a false alarm of this chance is already ruled out for the curve."""
        slopes = np.exp(CUTS)[None, :, None] * np.ones((2, 1, 1))
        deltas = np.array([curve.remove, curve.add])[:, :, None]
        scale = _STAKES / (slopes + 1)
        payoffs = [scale * (hit - slopes * alarm - deltas) for hit, alarm in ((1, 0), (1, 1), (0, 1), (0, 0))]
        return bool(self._wealth(payoffs, slice(None)) >= -np.log(chance))

    def delta_at(self, cut: int, direction: int, chance: float) -> float:
        """Lower bound on delta at the epsilon ``CUTS[cut]``, in the direction remove (0) or add (1)."""
        slope, which = np.exp(CUTS[cut]), (slice(direction, direction + 1), slice(cut, cut + 1))

        def rejected(delta: float) -> bool:
            scale = (_STAKES / (slope + 1))[None, None]
            payoffs = [scale * (hit - slope * alarm - delta) for hit, alarm in ((1, 0), (1, 1), (0, 1), (0, 0))]
            return self._wealth(payoffs, which) >= -np.log(chance)

        return largest_rejected(rejected, 1.0)

    def epsilon_at(self, delta: float, chance: float) -> float:
        """Lower bound on epsilon at ``delta``, by all cuts in both directions."""

        def rejected(epsilon: float) -> bool:
            slope, stakes = np.exp(epsilon), (1 - delta) * _STAKES * np.ones((2, len(CUTS), 1))
            payoffs = [
                stakes * ((hit - slope * alarm) / (slope + 1) - delta / 2)
                for hit, alarm in ((1, 0), (1, 1), (0, 1), (0, 0))
            ]
            return bool(self._wealth(payoffs, slice(None)) >= -np.log(chance))

        return largest_rejected(rejected, _MOST_EPSILON)

    def _wealth(self, payoffs: list[Array], which: Any) -> float:
        """The largest log of the gamblers' mean wealth after any round; payoffs are of the four outcomes of a pair."""
        if not self._rounds:
            return 0.0
        counts = np.stack([found[which] for _, found in self._rounds])  # (rounds, directions, cuts, 3)
        rest = np.array([pairs for pairs, _ in self._rounds])[:, None, None] - counts.sum(axis=3)
        logs = [np.log1p(payoff) for payoff in payoffs]
        wealth = rest[..., None] * logs[3] + sum(counts[..., at, None] * logs[at] for at in range(3))
        flat = wealth.reshape(len(wealth), -1)
        return float(max(0.0, (logsumexp(flat, axis=1) - np.log(flat.shape[1])).max()))


def mu_of(advantage: float) -> float:
    """The mu of the Gaussian curve whose best attack has this advantage (true less false positive rate).

    Example:
        >>> from dptune.audit.games.bets import mu_of
        >>> round(mu_of(0.3829249), 4)
        1.0
    """
    return float(2 * ndtri((1 + advantage) / 2)) if advantage > 0 else 0.0
