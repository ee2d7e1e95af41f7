"""RLDP once more, by hand: scalar transcriptions that share no code with the mechanisms.

They are written from the specification (rldp.md; names O1 to O16 and line numbers are its own), in plain loops, to be
compared with the mechanisms step by step. An agent is any object with `act(state) -> numbers`,
`remember(state, action, reward, next_state)` and `improve()`, which is the K rounds that follow an action.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

Rows = Sequence[Sequence[float]]


def mills(x: float) -> float:
    """Mills' ratio (1 - Phi(x)) / phi(x); beyond 25, where erfc nears the smallest numbers, its asymptotic series."""
    if x < 25.0:
        return math.sqrt(math.pi / 2) * math.exp(x * x / 2) * math.erfc(x / math.sqrt(2))
    total, term = 0.0, 1.0
    for k in range(1, 20):
        total, term = total + term, -term * (2 * k - 1) / (x * x)
    return total / x


def gdp_delta(x: float, mu: float) -> float:
    """delta of mu-GDP at epsilon = mu x + mu^2 / 2, where it is phi(x) (mills(x) - mills(x + mu)).

    Below mu = 0.3 the difference would cancel: its Taylor series in mu, whose moments
    M_k = integral of v^k phi(x + v) / phi(x) over v > 0 obey M_(k+1) = k M_(k-1) - x M_k.
    """
    if x < -30.0:  # delta is 1 to the last digit, and exp(x^2 / 2) would overflow at -38
        return 1.0
    if mu >= 0.3:
        bracket = mills(x) - mills(x + mu)
    else:
        bracket, weight, before, moment, k = 0.0, mu, mills(x), 1.0 - x * mills(x), 1
        while k < 40:
            bracket += weight * moment
            before, moment, k = moment, k * before - x * moment, k + 1
            weight *= -mu / k
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi) * bracket


def gdp_mu(sigma: float, sample_rate: float, steps: int) -> float:
    """mu = q sqrt(t (e^(1/sigma^2) - 1)); infinite where it has no double."""
    exponent = 1.0 / (sigma * sigma)
    if exponent < 700.0:
        return sample_rate * math.sqrt(steps * math.expm1(exponent))
    return sample_rate * math.sqrt(steps) * math.exp(exponent / 2) if exponent < 1400.0 else math.inf


def gdp_epsilon(sigma: float, sample_rate: float, steps: int, delta: float) -> float:
    """Line 14 in the usable form of section 3.3: bisection for x = eps / mu - mu / 2, to the last bit."""
    mu = gdp_mu(sigma, sample_rate, steps)
    if math.isinf(mu) or mu == 0.0:
        return mu
    low, high = -mu / 2, 38.0  # `low` stays, and epsilon is 0, where delta alone covers the loss
    while low < (middle := low + (high - low) / 2) < high:
        low, high = (middle, high) if gdp_delta(middle, mu) > delta else (low, middle)
    return mu * (low + mu / 2)


def quantile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between order statistics (O3, O12)."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def raw_state(norms: Rows, losses: Sequence[float], epsilon: float) -> list[float]:
    """Section 3.4 for one batch, pooled Fisher moments (O6): 3 n + 8 numbers."""
    pairs = range(len(norms[0]))
    state = [quantile([row[i] for row in norms], share) for share in (0.25, 0.5, 0.75) for i in pairs]
    every = [norm for row in norms for norm in row]
    middle = mean(every)
    # Equal norms have no spread, though their mean may round beside them.
    variance = mean([(norm - middle) ** 2 for norm in every]) if max(every) > min(every) else 0.0
    fisher = [norm**2 for norm in every]
    fisher_mean = mean(fisher)
    fisher_variance = mean([(f - fisher_mean) ** 2 for f in fisher])
    standard = [(norm - middle) / math.sqrt(variance) for norm in every] if variance > 0 else [0.0]
    skew, kurtosis = mean([x**3 for x in standard]), mean([x**4 for x in standard])
    loss = mean(losses)
    return [*state, -loss, epsilon, variance, loss, fisher_mean, fisher_variance, skew, kurtosis]


class RunningNormaliser:
    """Welford's mean and population variance of each component (O5)."""

    def __init__(self) -> None:
        self.count = 0
        self.means: list[float] = []
        self.squares: list[float] = []

    def __call__(self, state: list[float]) -> list[float]:
        """Take the state into the statistics, then normalise it: deviation at least 1e-6, result within +-10."""
        if not self.count:
            self.means, self.squares = [0.0] * len(state), [0.0] * len(state)
        self.count += 1
        normal = []
        for j, value in enumerate(state):
            off = value - self.means[j]
            self.means[j] += off / self.count
            self.squares[j] += off * (value - self.means[j])
            deviation = max(math.sqrt(self.squares[j] / self.count), 1e-6)
            normal.append(min(max((value - self.means[j]) / deviation, -10.0), 10.0))
        return normal


def moved_sigma(sigma: float, sigma_0: float, action: float, spent_share: float) -> float:
    """Equations 11 to 15, the share of budget clamped to [0, 1] (O10)."""
    step = 0.1 * (1.0 - min(max(spent_share, 0.0), 1.0))
    proposed = math.log(sigma) + math.tanh(action) * step
    proposed = min(max(proposed, math.log(0.5 * sigma_0)), math.log(2.0 * sigma_0))
    return math.exp(0.8 * math.log(sigma) + 0.2 * proposed)


def reward_of(utility_gain: float, epsilon_spent: float, floor: float) -> float:
    """Equations 17 to 20 with R_max = floor."""
    ratio = utility_gain / (epsilon_spent + 1e-6)
    return max(-floor, math.log(1.0 + max(ratio, -0.999)))


class ScriptedAgent:
    """Written actions, the last one for ever; `calls` notes what was asked of it."""

    def __init__(self, *actions: list[float]) -> None:
        self.actions, self.calls = list(actions), list[tuple[Any, ...]]()

    def act(self, state: list[float]) -> list[float]:
        self.calls.append(("act", state))
        return self.actions.pop(0) if len(self.actions) > 1 else self.actions[0]

    def remember(self, *transition: Any) -> None:
        self.calls.append(("remember", *transition))

    def improve(self) -> None:
        self.calls.append(("improve",))


class Decisions:
    """Lines 21 to 42, the same for both forms, and lists of what happened in them."""

    def __init__(self, agent: Any, numbers: int, reward_floor: float) -> None:
        self.agent, self.numbers, self.reward_floor = agent, numbers, reward_floor
        self.t = 0
        self.normalise = RunningNormaliser()
        self.previous: tuple[list[float], list[float], float, float] | None = None  # line 8: s, a, u, epsilon
        self.decision_steps: list[int] = []
        self.raw_states: list[list[float]] = []
        self.states: list[list[float]] = []
        self.actions: list[list[float]] = []
        self.rewards: list[float] = []
        self.buffer: list[tuple[list[float], list[float], float, list[float]]] = []

    def apply(self, action: list[float]) -> None:
        """Set the knobs of the next step."""
        raise NotImplementedError

    def decide(self, raw: list[float], utility: float, epsilon: float) -> None:
        state = self.normalise(raw)  # line 21
        action = [float(a) for a in self.agent.act(list(state))]  # line 22
        if len(action) != self.numbers:
            raise ValueError(f"the agent gave {len(action)} numbers, not {self.numbers}")
        self.apply(action)  # lines 24 to 30
        self.decision_steps.append(self.t)
        self.raw_states.append(raw)
        self.states.append(state)
        self.actions.append(action)
        if self.previous is not None:  # lines 31 to 40
            earlier_state, earlier_action, earlier_utility, earlier_epsilon = self.previous
            reward = reward_of(utility - earlier_utility, epsilon - earlier_epsilon, self.reward_floor)
            self.rewards.append(reward)
            self.buffer = [*self.buffer, (earlier_state, earlier_action, reward, state)][-10_000:]
            self.agent.remember(earlier_state, earlier_action, reward, state)
            self.agent.improve()
        self.previous = state, action, utility, epsilon  # line 42


class PublishedRldp(Decisions):
    """Algorithm 1, lines 3 to 44: O1a, O2a, O3 mean, O4a, O5, O6 pooled, O10, O12 linear, O16 floor 1e-12.

    An empty batch adds nothing to the buffers; at a decision step the last batch that was not empty stands for it,
    with this step's epsilon. A decision step before any such batch does not act: it is no decision at all.
    """

    def __init__(
        self,
        pairs: int,
        initial_radius: float,
        noise_multiplier: float,
        sample_rate: float,
        delta: float,
        budget_epsilon: float,
        interval: int,
        warmup: int,
        agent: Any,
        reward_floor: float = 5.0,
        radius_cap: float = 1.0,
    ) -> None:
        super().__init__(agent, pairs + 1, reward_floor)
        self.pairs, self.sample_rate, self.delta, self.budget = pairs, sample_rate, delta, budget_epsilon
        self.interval, self.warmup, self.radius_cap = interval, warmup, radius_cap
        self.radii = [initial_radius] * pairs  # line 3
        self.sigma = self.sigma_0 = noise_multiplier
        self.epsilon = 0.0  # line 6
        self.norm_buffers: list[list[float]] = [[] for _ in range(pairs)]  # line 7
        self.batch: tuple[list[list[float]], list[float]] | None = None  # the last that was not empty

    def knobs(self) -> tuple[list[float], float]:
        """Radii and sigma in force for the next step."""
        return list(self.radii), self.sigma

    def step(self, norms: Rows, losses: Sequence[float]) -> None:
        """One DP step at the knobs in force; one row of norms and one mean token loss for each sample."""
        if len(norms) != len(losses) or any(len(row) != self.pairs for row in norms):
            raise ValueError(f"{len(losses)} losses need as many rows of {self.pairs} norms")
        self.t += 1
        if norms:  # line 11
            self.batch = [list(row) for row in norms], list(losses)
        self.epsilon = gdp_epsilon(self.sigma, self.sample_rate, self.t, self.delta)  # line 14, O2a
        for i in range(self.pairs):  # line 15
            self.norm_buffers[i].extend(row[i] for row in norms)
        if self.t <= self.warmup and self.batch:  # lines 16 to 18, not capped
            self.radii = [max(quantile(values, 0.5), 1e-12) for values in self.norm_buffers]
        if self.t > self.warmup and self.t % self.interval == 0 and self.batch:  # line 20
            self.decide(raw_state(*self.batch, self.epsilon), -mean(self.batch[1]), self.epsilon)

    def apply(self, action: list[float]) -> None:
        """Lines 24 to 30; the cap comes before exp, since exp of a large action has no double."""
        capped = [min(a, math.log(self.radius_cap)) for a in action[: self.pairs]]
        self.radii = [max(min(math.exp(a), self.radius_cap), 1e-12) for a in capped]
        self.sigma = moved_sigma(self.sigma, self.sigma_0, action[-1], self.epsilon / self.budget)


# The provable form, from its page: the docstrings of `dptune.mechanisms.controllers.rldp`.


def dot(a: Sequence[float], b: Sequence[float]) -> float:
    return math.fsum(map(operator.mul, a, b))


def signal(block: Sequence[float], deviation: float, radius: float, expected_batch: float) -> float:
    """(||G||^2 - noise energy) / (B C)^2: G the noisy sum, C the radius in force for it."""
    return (dot(block, block) - deviation**2 * len(block)) / (expected_batch * radius) ** 2


def direction(block: Sequence[float], before: Sequence[float] | None) -> float:
    """Cosine with the previous release: 0 for the first release and where a norm is 0."""
    norms = math.sqrt(dot(block, block) * dot(before, before)) if before else 0.0
    return dot(block, before) / norms if before and norms else 0.0


def smoothed(old: list[float] | None, new: list[float]) -> list[float]:
    """0.9 old + 0.1 new: the first release's features start the average."""
    return new if old is None else [0.9 * o + 0.1 * n for o, n in zip(old, new, strict=True)]


def provable_state(
    features: list[float],
    figures: dict[str, Sequence[float]],
    radii: list[float],
    weights: list[float],
    sigma: float,
    progress: float,
    spent_share: float,
    public_loss: float,
) -> list[float]:
    """The state as its page has it: smoothed signals and directions; logs of radii, weights and adapters' figures (m,
    B A, v: in the order of their names); log sigma, releases over planned ones, spent share, public loss.
    """
    adapters = [math.log(value + 1e-12) for name in sorted(figures) for value in figures[name]]
    knobs = [*map(math.log, radii), *map(math.log, weights)]
    return [*features, *knobs, *adapters, math.log(sigma), progress, spent_share, public_loss]


def weights_of(logits: Sequence[float], least: float = 0.25) -> list[float]:
    """Squares in proportion to softmax + least^2 / n, and of sum 1."""
    top = max(logits)
    shares = [math.exp(x - top) for x in logits]
    total, n = math.fsum(shares), len(shares)
    return [math.sqrt((share / total + least**2 / n) / (1 + least**2)) for share in shares]


class ProvableRldp(Decisions):
    """Design A with a learning agent: it acts at release t >= warmup where (t - warmup) % interval is 0.

    An action has 2 n numbers, first those of the radii, then those of the weights; lines 21 to 42 of Algorithm 1
    give the order of a decision step; the state is normalised as the published agent's; epsilon spent is the spent
    share times the budget; before the first action all weights are 1 / sqrt(n). Sigma never moves.
    """

    def __init__(
        self,
        initial_radii: Sequence[float],
        noise_multiplier: float,
        budget_epsilon: float,
        planned: int,
        agent: Any,
        interval: int = 16,
        warmup: int = 16,
        centre: str = "initial",
        radius_floor: float = 1e-3,
        radius_cap: float = 1.0,
        reward_floor: float = 5.0,
    ) -> None:
        super().__init__(agent, 2 * len(initial_radii), reward_floor)
        self.pairs, self.sigma, self.budget, self.planned = (
            len(initial_radii),
            noise_multiplier,
            budget_epsilon,
            planned,
        )
        self.interval, self.warmup, self.radius_floor, self.radius_cap = interval, warmup, radius_floor, radius_cap
        self.centres = list(initial_radii) if centre == "initial" else [1.0] * self.pairs
        self.radii, self.weights = list(initial_radii), [1 / math.sqrt(self.pairs)] * self.pairs
        self.features: list[float] | None = None
        self.blocks: list[list[float]] = []

    def knobs(self) -> tuple[list[float], list[float], float]:
        """Radii, weights and sigma in force for the next step."""
        return list(self.radii), list(self.weights), self.sigma

    def step(
        self,
        released: Rows,
        deviations: Sequence[float],
        expected_batch: float,
        spent_share: float,
        public_loss: float,
        figures: dict[str, Sequence[float]],
    ) -> None:
        """One release, a block and its noise's deviation for each pair, and what is public after it."""
        self.t += 1
        pairs, before = range(self.pairs), self.blocks or [None] * self.pairs
        signals = [signal(released[i], deviations[i], self.radii[i], expected_batch) for i in pairs]
        self.features = smoothed(self.features, [*signals, *(direction(released[i], before[i]) for i in pairs)])
        self.blocks = [list(block) for block in released]
        if self.t >= self.warmup and (self.t - self.warmup) % self.interval == 0:
            state = self.radii, self.weights, self.sigma, self.t / self.planned, spent_share, public_loss
            raw = provable_state(self.features, figures, *state)
            self.decide(raw, -public_loss, spent_share * self.budget)

    def apply(self, action: list[float]) -> None:
        """Radii from the first n numbers, weights from the others; exp of more than 700 has no double."""
        moved = [c * math.exp(min(a, 700.0)) for c, a in zip(self.centres, action[: self.pairs], strict=True)]
        self.radii = [min(max(c, self.radius_floor), self.radius_cap) for c in moved]
        self.weights = weights_of(action[self.pairs :])
