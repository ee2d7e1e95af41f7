"""The transcriptions of RLDP against the specification: its worked example (section 4) and its checklist (section 8).

No mechanism is imported here: these tests hold the yardstick, others hold the mechanisms to it.
"""

from __future__ import annotations

import math
import statistics

import mpmath
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rldp_by_hand import (
    PublishedRldp,
    RunningNormaliser,
    ScriptedAgent,
    gdp_epsilon,
    gdp_mu,
    moved_sigma,
    raw_state,
    reward_of,
)

Q_UCI = 16 / 73_271


def sigma_for(target: float, rate: float, steps: int) -> float:
    """sigma_0: the smallest sigma with GDP epsilon within target at delta 1e-5, by bisection to the last bit."""
    low, high = 0.2, 5.0
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if gdp_epsilon(middle, rate, steps, 1e-5) > target else (low, middle)
    return high


SIGMA_0 = sigma_for(2.0, 0.01, 13)

# Section 4: norms of pair 1, norms of pair 2, mean losses.
TRACE: dict[int, tuple[list[float], list[float], list[float]]] = {
    1: ([0.6, 1.0, 2.0], [0.2, 0.3, 0.9], [1.0, 2.0, 3.0]),
    2: ([0.8, 1.4, 3.0], [0.1, 0.5, 0.7], [1.0, 2.0, 3.0]),
    3: ([1.2, 1.6, 2.4], [0.4, 0.6, 1.0], [1.0, 2.0, 3.0]),
    4: ([0.5, 1.0, 2.5], [0.2, 0.4, 0.6], [3.0, 3.2, 3.4]),
    8: ([0.4, 0.9, 1.1], [0.3, 0.3, 0.9], [2.9, 3.0, 3.4]),
    12: ([0.7, 0.8, 1.5], [0.1, 0.5, 0.6], [3.1, 3.3, 3.5]),
}
ACTIONS = [[math.log(0.5), 0.7, 1.2], [-1.5, -0.25, -2.0], [0.3, -3.0, 0.0]]


def rounds(agent: ScriptedAgent) -> int:
    """How many times an agent was asked for K rounds."""
    return agent.calls.count(("improve",))


def example(trap: float = 50.0, warmup: int = 3) -> tuple[PublishedRldp, list[tuple[list[float], float]], list[float]]:
    """The run of section 4, its knobs of steps 1 to 13 and eps after each; `trap` fills the other rows."""
    actions = ACTIONS if warmup == 3 else ACTIONS[1:]
    run = PublishedRldp(2, 0.1, SIGMA_0, 0.01, 1e-5, 2.0, 4, warmup, ScriptedAgent(*actions))
    knobs, epsilons = [], []
    for t in range(1, 14):
        knobs.append(run.knobs())
        first, second, losses = TRACE.get(t, ([trap] * 3, [trap] * 3, [trap + 49.0] * 3))
        run.step(list(zip(first, second, strict=True)), losses)
        epsilons.append(run.epsilon)
    return run, knobs, epsilons


def quick(warmup: int, interval: int, steps: int, agent: ScriptedAgent, norm: float = 0.5) -> PublishedRldp:
    """One pair, one sample, the same norm and loss at every step."""
    run = PublishedRldp(1, 0.1, 1.0, 0.01, 1e-5, 2.0, interval, warmup, agent)
    for _ in range(steps):
        run.step([[norm]], [3.0])
    return run


def test_worked_example_steps_table() -> None:  # checklist 2, 3
    _, knobs, _ = example()
    table = {
        (1,): ([0.1, 0.1], 0.435588, [0.0436, 0.0436]),
        (2,): ([1.0, 0.3], 0.435588, [0.4356, 0.1307]),
        (3,): ([1.2, 0.4], 0.435588, [0.5227, 0.1742]),
        (4,): ([1.4, 0.5], 0.435588, [0.6098, 0.2178]),
        (5, 6, 7, 8): ([0.5, 1.0], 0.439082, [0.2195, 0.4391]),
        (9, 10, 11, 12): ([0.2231, 0.7788], 0.436791, [0.0975, 0.3402]),
        (13,): ([1.0, 0.0498], 0.436791, [0.4368, 0.0217]),
    }
    assert round(SIGMA_0, 7) == 0.4355883
    assert round(gdp_mu(SIGMA_0, 0.01, 13), 7) == 0.5015517
    for steps, (radii, sigma, deviations) in table.items():
        for t in steps:
            assert [round(c, 4) for c in knobs[t - 1][0]] == radii, t
            assert round(knobs[t - 1][1], 6) == sigma, t
            assert [round(knobs[t - 1][1] * c, 4) for c in knobs[t - 1][0]] == deviations, t
    assert knobs[12][0] == [1.0, pytest.approx(math.exp(-3.0), rel=1e-15)]  # exp(0.3) is capped


def test_worked_example_epsilons_rewards_and_buffer() -> None:  # checklist 7, 8, 9, 16
    run, knobs, epsilons = example()
    assert [round(epsilons[t - 1], 6) for t in (4, 8, 12, 13)] == [1.041713, 1.457418, 1.881816, 1.967722]
    for t, step in ((4, 0.047914), (8, 0.027129), (12, 0.005909)):
        assert round(0.1 * (1 - epsilons[t - 1] / 2), 6) == step
    moves = [5 * math.log(knobs[t][1] / knobs[t - 1][1]) for t in (4, 8, 12)]  # before damping
    assert [round(m, 6) for m in moves] == [0.039944, -0.026153, 0.0]
    assert round(epsilons[7] - epsilons[3], 6) == 0.415705
    assert round(epsilons[11] - epsilons[7], 6) == 0.424399
    assert [round(r, 6) for r in run.rewards] == [0.215559, -0.637247]
    assert run.decision_steps == [4, 8, 12]
    assert run.actions == ACTIONS
    assert [-state[6] for state in run.raw_states] == pytest.approx([3.2, 3.1, 3.3], rel=1e-15)
    assert run.buffer == [
        (run.states[0], ACTIONS[0], run.rewards[0], run.states[1]),
        (run.states[1], ACTIONS[1], run.rewards[1], run.states[2]),
    ]
    assert rounds(run.agent) == 2
    assert run.agent.calls == [
        ("act", run.states[0]),
        ("act", run.states[1]),
        ("remember", *run.buffer[0]),
        ("improve",),
        ("act", run.states[2]),
        ("remember", *run.buffer[1]),
        ("improve",),
    ]


def test_worked_example_raw_state_of_step_4() -> None:  # checklist 20
    run, _, _ = example()
    expected = [0.75, 0.3, 1.0, 0.4, 1.75, 0.5, -3.2, 1.041713, 0.592222, 3.2, 1.343333, 4.909089, 1.423863, 3.509587]
    assert [round(s, 6) for s in run.raw_states[0]] == expected
    assert len(raw_state([[1.0] * 12], [1.0], 0.0)) == 3 * 12 + 8


def test_worked_example_depends_on_no_other_row() -> None:  # checklist 4
    run, knobs, epsilons = example()
    other, other_knobs, other_epsilons = example(trap=0.001)
    assert (knobs, epsilons, run.buffer, run.raw_states) == (
        other_knobs,
        other_epsilons,
        other.buffer,
        other.raw_states,
    )


def test_variant_with_a_warmup_of_five() -> None:
    run, knobs, _ = example(warmup=5)
    assert run.decision_steps == [8, 12]
    # Pair 1 to step 5: twelve norms of section 4 and three of 50.
    first = sorted(x for t in range(1, 5) for x in TRACE[t][0]) + [50.0] * 3
    second = sorted(x for t in range(1, 5) for x in TRACE[t][1]) + [50.0] * 3
    assert knobs[4][0] == [statistics.median(first[:12]), statistics.median(second[:12])]
    assert knobs[5][0] == knobs[6][0] == knobs[7][0] == [statistics.median(first), statistics.median(second)]
    assert [sigma for _, sigma in knobs[:8]] == [SIGMA_0] * 8
    assert [round(c, 4) for c in knobs[8][0]] == [0.2231, 0.7788]
    assert len(run.buffer) == 1


@pytest.mark.parametrize(
    ("warmup", "interval", "first"),
    [
        *[(50, 16, 64), (50, 32, 64), (50, 48, 96), (50, 64, 64), (50, 72, 72), (50, 80, 80), (50, 96, 96)],
        *[(50, 112, 112), (3, 4, 4), (8, 8, 16), (0, 4, 4)],
    ],
)
def test_actions_come_at_multiples_of_the_interval(warmup: int, interval: int, first: int) -> None:  # checklist 1
    run = quick(warmup, interval, first + 2 * interval, ScriptedAgent([0.0, 0.0]))
    assert run.decision_steps == [first, first + interval, first + 2 * interval]
    assert (len(run.buffer), rounds(run.agent)) == (2, 2)


def test_warmup_medians_are_not_capped_and_hold_until_the_first_action() -> None:  # checklist 3, 5, 6
    agent = ScriptedAgent([2.0, 5.0], [-1.0, 0.0])
    run = PublishedRldp(1, 0.1, 1.0, 0.01, 1e-5, 2.0, 8, 3, agent)
    seen = []
    for t in range(1, 18):
        seen.append(run.knobs())
        run.step([[5.4]] if t < 3 else [[0.2]], [3.0])
    assert seen[:4] == [([0.1], 1.0), ([5.4], 1.0), ([5.4], 1.0), ([5.4], 1.0)]
    assert seen[3:8] == [([5.4], 1.0)] * 5
    assert seen[8:16] == [seen[8]] * 8  # nor does sigma move between actions
    assert seen[8][0] == [1.0]
    assert seen[8][1] > 1.0
    assert seen[16][0] == [math.exp(-1.0)]


def test_one_transition_is_enough_for_the_rounds() -> None:  # checklist 10
    assert rounds(quick(3, 4, 7, ScriptedAgent([0.0, 0.0])).agent) == 0
    run = quick(3, 4, 8, ScriptedAgent([0.0, 0.0]))
    assert (len(run.buffer), rounds(run.agent)) == (1, 1)


@pytest.mark.parametrize(("action", "radius"), [(0.0, 1.0), (-1000.0, 1e-12), (1000.0, 1.0), (-2.0, math.exp(-2.0))])
def test_radius_of_an_action(action: float, radius: float) -> None:  # checklist 11
    assert quick(3, 4, 4, ScriptedAgent([action, 0.0])).knobs() == ([radius], pytest.approx(1.0, rel=1e-15))


def test_median_of_zero_is_floored() -> None:  # O16
    assert quick(3, 4, 1, ScriptedAgent([0.0, 0.0]), norm=0.0).knobs()[0] == [1e-12]


@given(
    st.floats(0.3, 5.0),
    st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(-1.0, 3.0)), min_size=1, max_size=30),
)
def test_sigma_moves_little_and_stays_near_its_start(start: float, moves: list[tuple[float, float]]) -> None:  # 12
    sigma = start
    for action, share in moves:
        following = moved_sigma(sigma, start, action, share)
        bound = 0.02 * (1 - min(max(share, 0.0), 1.0))
        assert abs(math.log(following / sigma)) <= bound + 1e-14
        assert 0.5 * start * (1 - 1e-14) <= following <= 2 * start * (1 + 1e-14)
        sigma = following


def test_sigma_reaches_its_bounds_and_stops_at_a_spent_budget() -> None:  # checklist 11, 12; O10
    sigma = 1.0
    for _ in range(2_000):
        sigma = moved_sigma(sigma, 1.0, 50.0, 0.0)
    assert sigma == pytest.approx(2.0, rel=1e-12)
    for _ in range(2_000):
        sigma = moved_sigma(sigma, 1.0, -50.0, 0.0)
    assert sigma == pytest.approx(0.5, rel=1e-12)
    assert moved_sigma(0.7, 1.0, 0.0, 0.3) == pytest.approx(0.7, rel=1e-15)
    assert moved_sigma(0.7, 1.0, 50.0, 1.0) == pytest.approx(0.7, rel=1e-15)
    assert moved_sigma(0.7, 1.0, 50.0, 1.4) == pytest.approx(0.7, rel=1e-15)


@pytest.mark.parametrize(
    ("gain", "spent", "floor", "reward"),
    [(0.0, 0.3, 5.0, 0.0), (-9.0, 0.3, 10.0, -6.9078), (-9.0, 0.3, 5.0, -5.0), (-0.3, 0.3, 10.0, -6.9078)],
)
def test_reward(gain: float, spent: float, floor: float, reward: float) -> None:  # checklist 13
    assert round(reward_of(gain, spent, floor), 4) == reward


def test_epsilons_that_section_3_prints() -> None:  # checklist 14
    assert round(gdp_mu(1.0, 0.01, 1000), 5) == 0.41452
    assert round(gdp_epsilon(1.0, 0.01, 1000, 1e-5), 4) == 1.6177
    assert round(gdp_mu(0.3637, Q_UCI, 13_738), 4) == 1.1211
    assert round(gdp_epsilon(0.3637, Q_UCI, 13_738, 1e-5), 3) == 4.999
    # The printed bracket, taken as a mu: section 3.3 says what it would give.
    for bracket, epsilon in ((0.5434, 2.1874), (0.3746, 1.446)):
        found = gdp_epsilon(1.0, bracket / math.sqrt(math.expm1(1.0)), 1, 1e-5)
        assert found == pytest.approx(epsilon, abs=5e-4)


def test_repricing_turns_the_rewards_sign() -> None:  # checklist 16; section 3.3
    sigma_0 = sigma_for(5.0, Q_UCI, 13_739)
    before = gdp_epsilon(sigma_0, Q_UCI, 1_008, 1e-5)
    after = [gdp_epsilon(moved_sigma(sigma_0, sigma_0, a, before / 5), Q_UCI, 1_120, 1e-5) for a in (50.0, 0.0, -50.0)]
    assert [round(e, 4) for e in (before, *after)] == [1.1472, 1.0714, 1.2157, 1.3854]
    assert round(after[0] - before, 4) == -0.0758
    # The rewards that section 3.3 prints are those of the rounded difference.
    assert [round(reward_of(gain, -0.0758, 5.0), 4) for gain in (-0.05, 0.05)] == [0.5066, -1.0777]


def test_noise_that_section_3_prints() -> None:  # checklist 15
    mus = (0.1422, 0.5016, 0.9249, 1.1212, 1.6660)
    sigmas = {
        (Q_UCI, 3_600): (0.4575, 0.3704, 0.3427, 0.3352, 0.3212),
        (Q_UCI, 13_739): (0.5375, 0.4099, 0.3733, 0.3637, 0.3460),
        (Q_UCI, 26_880): (0.5955, 0.4350, 0.3921, 0.3810, 0.3608),
        (3 / 3_600, 3_600): (0.6731, 0.4652, 0.4139, 0.4009, 0.3776),
    }
    for (rate, steps), row in sigmas.items():
        for target, mu, sigma in zip((0.5, 2.0, 4.0, 5.0, 8.0), mus, row, strict=True):
            mine = sigma_for(target, rate, steps)
            assert (round(mine, 4), round(gdp_mu(mine, rate, steps), 4)) == (sigma, mu)


def exact_epsilon(mu: float, delta: float) -> mpmath.mpf:
    """Root of delta(eps) = Phi(-eps/mu + mu/2) - e^eps Phi(-eps/mu - mu/2) at 60 digits."""
    with mpmath.workdps(60):
        big = mpmath.mpf(mu)

        def over(eps: mpmath.mpf) -> mpmath.mpf:
            tail = mpmath.exp(eps) * mpmath.ncdf(-eps / big - big / 2)
            return mpmath.ncdf(-eps / big + big / 2) - tail - mpmath.mpf(delta)

        low, high = mpmath.mpf(0), big * (40 + big)
        for _ in range(120):
            middle = (low + high) / 2
            low, high = (middle, high) if over(middle) > 0 else (low, middle)
        return high


@pytest.mark.parametrize("mu", [1e-4, 0.01, 0.2, 0.2999, 0.3001, 1.0, 6.0, 40.0, 300.0])
@pytest.mark.parametrize("delta", [1e-5, 1e-9])
def test_gdp_epsilon_to_fourteen_digits(mu: float, delta: float) -> None:
    sigma, steps = 1.0, 1
    rate = mu / math.sqrt(math.expm1(1.0))  # gdp_mu gives mu back to one rounding
    mine = gdp_epsilon(sigma, rate, steps, delta)
    assert mine == pytest.approx(float(exact_epsilon(gdp_mu(sigma, rate, steps), delta)), rel=2e-14, abs=0.0)


def test_gdp_epsilon_at_the_ends() -> None:
    assert gdp_epsilon(1.0, 1e-6, 1, 1e-5) == 0.0  # delta alone covers it
    assert gdp_epsilon(50.0, 1e-9, 1, 1e-5) == 0.0
    assert gdp_epsilon(1e-3, 0.01, 1, 1e-5) == math.inf
    assert 1e300 < gdp_epsilon(0.0377, 0.01, 1, 1e-5) < math.inf  # e^(1/sigma^2) has hardly a double


def test_normaliser_is_welfords() -> None:  # O5
    rows = [[1.0, 7.0, 0.0], [4.0, 7.0, 0.0], [2.5, 7.0, 1e9], [-3.0, 7.0 + 1e-9, 0.0]]
    normalise = RunningNormaliser()
    for k, row in enumerate(rows, start=1):
        normal = normalise(row)
        for j, value in enumerate(row):
            column = [r[j] for r in rows[:k]]
            deviation = max(statistics.pstdev(column), 1e-6)
            assert normal[j] == pytest.approx((value - statistics.fmean(column)) / deviation, abs=1e-9)
    for _ in range(300):
        normalise([0.0, 0.0, 0.0])
    assert normalise([1e6, 7.0, -1e30])[::2] == [10.0, -10.0]


def test_moments_of_a_batch_without_spread() -> None:
    state = raw_state([[2.0, 2.0], [2.0, 2.0]], [1.0, 2.0], 0.7)
    assert state == [2.0, 2.0, 2.0, 2.0, 2.0, 2.0, -1.5, 0.7, 0.0, 1.5, 4.0, 0.0, 0.0, 0.0]
    for norm in (0.1, 0.7):  # the mean of six of them is not the number itself
        assert raw_state([[norm] * 2] * 3, [1.0] * 3, 0.7)[-2:] == [0.0, 0.0]
    assert raw_state([[1e-100], [3e-100]], [1.0] * 2, 0.7)[-2:] == pytest.approx([0.0, 1.0])


def test_empty_batches() -> None:  # 2.2 item 13
    # None at all before the first decision step: no action, no state; the run pays for each step all the same.
    run = PublishedRldp(1, 0.1, 1.0, 0.01, 1e-5, 2.0, 4, 3, ScriptedAgent([-1.0, 0.0]))
    for _ in range(4):
        run.step([], [])
    assert (run.knobs(), run.decision_steps) == (([0.1], 1.0), [])
    assert run.epsilon == gdp_epsilon(1.0, 0.01, 4, 1e-5)
    # Then a batch, then an empty decision step: the last batch's statistics with the decision step's own epsilon.
    run.step([[0.7], [0.9]], [3.0, 4.0])
    for _ in range(3):
        run.step([], [])
    assert run.decision_steps == [8]
    assert run.raw_states == [raw_state([[0.7], [0.9]], [3.0, 4.0], gdp_epsilon(1.0, 0.01, 8, 1e-5))]
    # An empty batch during the warm-up leaves the median where it is.
    warm = PublishedRldp(1, 0.1, 1.0, 0.01, 1e-5, 2.0, 4, 3, ScriptedAgent([-1.0, 0.0]))
    warm.step([], [])
    assert warm.knobs()[0] == [0.1]
    warm.step([[0.7]], [3.0])
    warm.step([], [])
    assert warm.knobs()[0] == [0.7]


def test_bad_input_is_refused() -> None:
    run = PublishedRldp(2, 0.1, 1.0, 0.01, 1e-5, 2.0, 1, 0, ScriptedAgent([0.0, 0.0]))
    with pytest.raises(ValueError, match="rows of 2 norms"):
        run.step([[1.0]], [3.0])
    with pytest.raises(ValueError, match="2 numbers, not 3"):
        run.step([[1.0, 1.0]], [3.0])
