"""Coverage and power of audits' bounds: ``python -m benchmarks.audits [--games N] [--power N] [--only NAME]``.

Shared: the largest of several bounds, with the error that each would have alone and with shares of it, and what the
shares cost.

Coverage: how often a bound from one run exceeds the truth, in simulated games whose truth is known. Power: the median
bound on equal scores, beside jax_privacy's auditor where that is installed, and beside what dptune had before: four
shares of guesses, each with a quarter of the failure probability, by theorem 5.2 of Steinke, Nasr and Jagielski (arXiv
2305.08846). Bets: after how many trials of one step a gambler against the certified curve is certain, who may stop at
any time. Sampled: the most that 1,000 canaries can show of runs whose batches are drawn. No model is trained: scores
are drawn from their law.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import expit, ndtr
from scipy.stats import binom

from dptune.audit.epsilon_bounds import gaussian_epsilon, mu_from_errors, one_run_mu
from dptune.audit.one_run import OneRun, one_run, right_guesses
from dptune.mechanisms.planning import Schedule, calibrated
from dptune.mechanisms.registry import build

DELTA = 1e-5
LEVELS = (0.9, 0.95, 0.99)
SHARES = (1.0, 0.5, 0.25, 0.1)
PARTS = ("coverage", "power", "shared", "sampled", "bets")

Scores = NDArray[np.float64]
Coins = NDArray[np.bool_]
Attack = Callable[[Coins, np.random.Generator], Scores]


def response(epsilon: float, certain: float = 0.0) -> Attack:
    """Randomised response: the hardest run for a bound on epsilon; with chance ``certain`` it betrays all coins."""

    def scores(coins: Coins, generator: np.random.Generator) -> Scores:
        keep = 1.0 if generator.random() < certain else expit(epsilon)
        sure = generator.random(len(coins))  # the order says nothing
        return np.where((generator.random(len(coins)) < keep) == coins, 1 + sure, -1 - sure)

    return scores


def gaussian(mu: float) -> Attack:
    return lambda coins, generator: mu * coins + generator.standard_normal(len(coins))


def few_known(share: float) -> Attack:
    """A share of the coins is known for sure, and nothing of the others."""

    def scores(coins: Coins, generator: np.random.Generator) -> Scores:
        known = generator.random(len(coins)) < share
        return np.where(known, np.where(coins, 9.0, -9.0), 0.0) + generator.standard_normal(len(coins))

    return scores


def games(attack: Attack, canaries: int, count: int) -> Iterator[tuple[Scores, Coins]]:
    for seed in range(count):
        generator = np.random.default_rng(seed)
        coins = generator.random(canaries) < 0.5
        yield attack(coins, generator), coins


def coverage(canaries: int, count: int) -> None:
    """Print the share of games whose bound exceeds the truth; ``1 - level`` is allowed."""
    cases: list[tuple[str, Attack, float, float | None, float]] = [
        ("randomised response, epsilon 1", response(1.0), 1.0, None, DELTA),
        ("randomised response, epsilon 3", response(3.0), 3.0, None, DELTA),
        ("no answer, all coins betrayed with probability 0.02", response(0.0, 0.02), 0.0, None, 0.02),
        ("Gaussian scores, mu 0.5", gaussian(0.5), gaussian_epsilon(0.5, DELTA), 0.5, DELTA),
        ("Gaussian scores, mu 1.5", gaussian(1.5), gaussian_epsilon(1.5, DELTA), 1.5, DELTA),
    ]
    print(f"| {canaries} canaries, {count} games | " + " | ".join(f"level {level}" for level in LEVELS) + " |")
    print("| --- |" + " --- |" * len(LEVELS))
    for name, attack, epsilon, mu, delta in cases:
        found: dict[float, list[OneRun]] = {level: [] for level in LEVELS}
        for scores, coins in games(attack, canaries, count):
            for level in LEVELS:
                found[level].append(one_run(scores, coins, delta, level))
        above = [np.mean([one.epsilon_audited > epsilon for one in found[level]]) for level in LEVELS]
        print(f"| {name}: epsilon | " + " | ".join(f"{share:.4f}" for share in above) + " |", flush=True)
        if mu is not None:
            above = [np.mean([one.mu_gaussian > mu for one in found[level]]) for level in LEVELS]
            print(f"| {name}: mu | " + " | ".join(f"{share:.4f}" for share in above) + " |", flush=True)


@cache
def published_epsilon(canaries: int, guesses: int, correct: int, confidence: float) -> float:
    """Theorem 5.2 of 2305.08846, transcribed."""

    def excess(epsilon: float) -> float:
        right, steps = expit(epsilon), np.arange(1, correct + 1)
        tail = binom.sf(correct - 1, guesses, right)
        gain = np.max((binom.sf(correct - steps - 1, guesses, right) - tail) / steps, initial=0.0)
        return float(tail + 2 * canaries * DELTA * gain - (1 - confidence))

    return float(brentq(excess, 0.0, 50.0)) if excess(0.0) < 0 else 0.0


def before(scores: Scores, coins: Coins, confidence: float) -> tuple[float, float]:
    """Bounds on epsilon, and on that of a Gaussian run: the best of four shares, each with a quarter of the chance."""
    right, each = right_guesses(scores, coins), 1 - (1 - confidence) / len(SHARES)
    counts = [2 * max(1, int(len(coins) * share / 2)) for share in SHARES]
    tried = [(len(coins), guesses, int(right[:guesses].sum()), each) for guesses in counts]
    mu = max(one_run_mu(*one) for one in tried)
    return max(published_epsilon(*one) for one in tried), gaussian_epsilon(mu, DELTA)


def best_test(mu: float, canaries: int, count: int) -> float:
    """The epsilon that the best of all tests, which knows mu, rejects in half of the games at level 0.05.

    By Neyman and Pearson against the run that caps each coin's log-odds at epsilon, which is (epsilon, 0)-DP.
    """
    generator = np.random.default_rng(0)

    def power(epsilon: float) -> float:
        ratios = []
        for capped in (True, False):
            found = []
            for _ in range(count):
                coins = generator.random(canaries) < 0.5
                odds = np.abs(mu * (gaussian(mu)(coins, generator) - mu / 2))
                odds = odds[odds > epsilon]
                told = generator.random(len(odds)) < expit(np.full_like(odds, epsilon) if capped else odds)
                gain = np.where(told, -np.log1p(np.exp(-odds)), -np.log1p(np.exp(odds)))
                found.append((gain - np.where(told, math.log(expit(epsilon)), math.log(expit(-epsilon)))).sum())
            ratios.append(np.array(found))
        return float((ratios[1] > np.quantile(ratios[0], 0.95)).mean())

    low, high = 0.0, 10.0
    for _ in range(8):
        middle = (low + high) / 2
        low, high = (middle, high) if power(middle) > 0.5 else (low, middle)
    return (low + high) / 2


def power(count: int) -> None:
    """Print median bounds at confidence 0.95 on equal scores.

    jax_privacy's Gaussian reading is left out: it is the same recursion, and takes it seconds a game.
    """
    try:
        from jax_privacy import auditing
    except ImportError:
        auditing = None
    names = ["ours", "before", "Gaussian reading: ours", "before"]
    if auditing is not None:
        names[2:2] = ["jax_privacy, Bonferroni", "jax_privacy, split"]
    cases: list[tuple[str, int, Attack, float]] = [
        ("Gaussian scores, mu 1.5 (epsilon 7.05)", 1000, gaussian(1.5), 1.5),
        ("Gaussian scores, mu 1.666 (epsilon 8)", 1000, gaussian(1.666), 1.666),
        ("Gaussian scores, mu 0.502 (epsilon 2)", 1000, gaussian(0.502), 0.502),
        ("Gaussian scores, mu 0.502 (epsilon 2)", 256, gaussian(0.502), 0.502),
        ("randomised response, epsilon 2", 1000, response(2.0), 0.0),
        ("a tenth of the coins known", 1000, few_known(0.1), 0.0),
    ]
    print(f"\n| scores, median of {count} games | canaries | " + " | ".join(names) + " | best test |")
    print("| --- | ---: |" + " ---: |" * (len(names) + 1))
    for name, canaries, attack, mu in cases:
        rows = []
        for seed, (scores, coins) in enumerate(games(attack, canaries, count)):
            found, old = one_run(scores, coins, DELTA, 0.95), before(scores, coins, 0.95)
            row = [found.epsilon_audited, old[0], found.epsilon_gaussian, old[1]]
            if auditing is not None:
                auditor = auditing.CanaryScoreAuditor(scores[coins], scores[~coins])
                ways = (auditing.Bonferroni(), auditing.Split(seed=seed))
                row[2:2] = [auditor.epsilon_one_run(0.05, DELTA, threshold_strategy=way) for way in ways]
            rows.append(row)
        medians = " | ".join(f"{value:.2f}" for value in np.median(rows, axis=0))
        best = f"{best_test(mu, canaries, 1000):.2f}" if mu else ""
        print(f"| {name} | {canaries} | {medians} | {best} |", flush=True)


def shared(count: int) -> None:
    """Print how often the largest of several bounds is too high, and the median bound of one game, at confidence 0.95.

    Each is one game's bound on randomised response of 60 coins; the power is that of Gaussian scores.
    """
    print(f"\n| bounds, {count} audits | too high, 0.95 each: epsilon 0, 1 | too high, error shared | ", end="")
    print("shown of 256 canaries | of 1,000 canaries |\n| ---: |" + " ---: |" * 4)
    medians: list[tuple[int, Attack]] = [(256, gaussian(1.666)), (1000, gaussian(1.666))]
    for bounds in (1, 2, 5, 10):
        cells = []
        for sure in (0.95, 1 - 0.05 / bounds):
            wrong = []
            for epsilon in (0.0, 1.0):
                found = [
                    one_run(scores, coins, DELTA, sure).epsilon_audited > epsilon
                    for scores, coins in games(response(epsilon), 60, count * bounds)
                ]
                wrong.append(f"{np.reshape(found, (count, bounds)).any(axis=1).mean():.3f}")
            cells.append(", ".join(wrong))
        for canaries, attack in medians:
            each = [one_run(*game, DELTA, sure).epsilon_audited for game in games(attack, canaries, 100)]
            cells.append(f"{np.median(each):.2f}")
        print(f"| {bounds} | {' | '.join(cells)} |", flush=True)


def sampled_steps(noise: float, rate: float, steps: int) -> Attack:
    """The exact log-likelihood ratio of steps into which a canary is drawn, whose gradient nothing else disturbs.

    No canary can be told better: one unit moves a step by one clipped gradient, and no two runs of one schedule differ
    more than those do that it leaves and enters in a direction of its own.
    """

    def scores(coins: Coins, generator: np.random.Generator) -> Scores:
        total = np.zeros(len(coins))
        for _ in range(steps):
            seen = (coins & (generator.random(len(coins)) < rate)) / noise + generator.normal(size=len(coins))
            total += np.logaddexp(math.log1p(-rate), math.log(rate) + seen / noise - 0.5 / noise**2)
        return total

    return scores


def sampled(count: int) -> None:
    """Print what perfect scores of 1,000 canaries show of sampled runs, at confidence 0.95."""
    print(f"\n| rate, steps | certified | noise | shown: median of {count} | 0.05 and 0.95 quantiles |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for (rate, steps), epsilon in product(((1 / 72, 72), (0.109, 101)), (4, 8)):
        made = calibrated(
            lambda noise: build("static", {"noise_multiplier": noise}),
            epsilon,
            Schedule(rate, steps, DELTA),
            "certified",
        )
        noise = made.mechanism.noise.noise_multiplier
        found = [
            one_run(*game, DELTA, 0.95).epsilon_audited
            for game in games(sampled_steps(noise, rate, steps), 1000, count)
        ]
        low, middle, high = np.quantile(found, (0.05, 0.5, 0.95))
        print(f"| {rate:.3g}, {steps} | {epsilon} | {noise:.3f} | {middle:.2f} | {low:.2f}, {high:.2f} |", flush=True)


@dataclass(frozen=True)
class Bet:
    """A bet that pays (in says in) - slope * (out says in) - offset for each pair of trials.

    A certified mu allows P(in says in) <= slope * P(out says in) + offset for every line that touches its curve, so a
    pair pays nothing on average, and wealth exceeds 1 / alpha with probability alpha at most, whenever one stops
    (Ville's inequality).
    """

    growth: float = 0.0
    cut: float = 0.0
    slope: float = 1.0
    offset: float = 0.0
    stake: float = 0.0

    @classmethod
    def best(cls, certified: float, true: float) -> Bet:
        """The bet that grows fastest where mu is ``true`` and not ``certified``."""
        found = cls()
        for cut, touch in product(np.linspace(-0.5, true + 0.5, 21), np.linspace(-1.5, 2.5, 33)):
            hits, alarms = ndtr(true - cut), ndtr(-cut)
            slope = math.exp(certified * touch - certified**2 / 2)
            offset = ndtr(certified - touch) - slope * ndtr(-touch)
            stakes = np.linspace(0.05, 0.98, 20) / (slope + offset)
            growth = (
                hits * alarms * np.log1p(stakes * (1 - slope - offset))
                + hits * (1 - alarms) * np.log1p(stakes * (1 - offset))
                + (1 - hits) * alarms * np.log1p(-stakes * (slope + offset))
                + (1 - hits) * (1 - alarms) * np.log1p(-stakes * offset)
            )
            at = int(growth.argmax())
            if growth[at] > found.growth:
                found = cls(float(growth[at]), cut, slope, offset, float(stakes[at]))
        return found

    def certain(self, mu: float, chance: float, pairs: int, generator: np.random.Generator) -> float:
        """The pairs of trials until an accusation at this chance of a false alarm; infinite if there is none."""
        inside = generator.standard_normal(pairs) + mu > self.cut
        outside = generator.standard_normal(pairs) > self.cut
        wealth = np.cumsum(np.log1p(self.stake * (inside - self.slope * outside - self.offset)))
        above = np.flatnonzero(wealth >= -math.log(chance))
        return float(above[0] + 1) if len(above) else math.inf


def accused_at_once(
    mu: float, certified: float, chance: float, pairs: int, count: int, generator: np.random.Generator
) -> float:
    """The share of audits of a fixed number of pairs that accuse, by the best threshold, at this chance."""
    counts = generator.binomial(pairs, ndtr(-mu / 2), (count, 2))
    bounds = [mu_from_errors(int(missed), pairs, int(alarms), pairs, 1 - chance) for missed, alarms in counts]
    return float(np.mean(np.array(bounds) > certified))


def bets(count: int) -> None:
    """Print after how many pairs of trials halved noise is certain, and how often sound noise is ever accused."""
    generator, pairs = np.random.default_rng(0), 5600
    print("\n| certified mu, chance of a false alarm | halved noise: pairs until certain |", end="")
    print(" fixed pairs that see 95 % | sound noise ever accused | noise / 1.2: by bets | at once |")
    print("| --- |" + " ---: |" * 5)
    for certified, chance in ((0.716, 0.05), (0.716, 0.001 / 2), (0.716, 0.001 / 20), (1.286, 0.001 / 20)):
        bet, law = Bet.best(certified, 2 * certified), (certified, chance)
        halved, sound, weaker = (
            np.array([bet.certain(times * certified, chance, pairs, generator) for _ in range(count)])
            for times in (2, 1, 1.2)
        )
        fixed = next(
            fewest
            for fewest in range(20, pairs, 20)
            if accused_at_once(2 * certified, *law, fewest, count, generator) >= 0.95
        )
        print(
            f"| {certified}, {chance:g} | {np.median(halved[:20]):.0f}, {np.median(halved):.0f}, "
            f"{np.quantile(halved, 0.95):.0f} | {fixed} | {np.isfinite(sound).mean():.4f} | "
            f"{np.isfinite(weaker).mean():.3f} | "
            f"{accused_at_once(1.2 * certified, *law, pairs, count, generator):.3f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--games", type=int, default=2000, help="games of each row of coverage")
    parser.add_argument("--power", type=int, default=200, help="games of each row of power")
    parser.add_argument("--only", choices=PARTS)
    arguments = parser.parse_args()
    wanted = (arguments.only,) if arguments.only else PARTS
    if "coverage" in wanted:
        coverage(100, arguments.games)
    if "power" in wanted:
        power(arguments.power)
    if "shared" in wanted:
        shared(arguments.power)
    if "sampled" in wanted:
        sampled(arguments.power // 2)
    if "bets" in wanted:
        bets(arguments.games)


if __name__ == "__main__":
    main()
