"""The provable RLDP by hand: its features, knobs and decisions against numbers worked out here."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rldp_by_hand import ProvableRldp, ScriptedAgent, direction, signal, smoothed, weights_of

STILL = [0.0, 0.0, 0.0, 0.0]


def release(k: int) -> tuple[list[list[float]], list[float], float, float, float, dict[str, list[float]]]:
    """A step's input, different for each k: two blocks, of 3 and 2 numbers."""
    blocks = [[0.3 + k, -0.1 * k, 0.2], [1.0, 0.5 - 0.2 * k]]
    return blocks, [0.05, 0.07], 4.0, k / 40, 3.0 - 0.01 * k * k, {"ba": [0.1 * k, 0.2], "m": [1.0, 2.0 + k]}


def run_of(steps: int, *actions: list[float], **options: object) -> ProvableRldp:
    run = ProvableRldp([0.1, 0.4], 0.8, 2.0, 40, ScriptedAgent(*actions), **options)
    for k in range(1, steps + 1):
        run.step(*release(k))
    return run


def test_signal_is_what_the_noise_does_not_explain() -> None:
    # ||G||^2 = 1.25, less 0.1^2 of each of 3 coordinates, over (4 * 0.5)^2.
    assert signal([1.0, 0.0, 0.5], 0.1, 0.5, 4.0) == pytest.approx(1.22 / 4, rel=1e-15)
    assert signal([0.0, 0.0, 0.0], 0.1, 0.5, 4.0) == pytest.approx(-0.03 / 4, rel=1e-15)


def test_direction_is_a_cosine() -> None:
    assert direction([3.0, 4.0], [4.0, 3.0]) == pytest.approx(24 / 25, rel=1e-15)
    assert direction([1.0, 0.0], [-2.0, 0.0]) == -1.0
    assert [direction([1.0], None), direction([0.0], [1.0]), direction([1.0], [0.0])] == [0.0, 0.0, 0.0]


def test_features_are_smoothed_from_the_first_release_on() -> None:
    assert smoothed(None, [1.0, 2.0]) == [1.0, 2.0]
    assert smoothed([1.0, 2.0], [2.0, 0.0]) == pytest.approx([1.1, 1.8], rel=1e-15)
    blocks = [release(k)[0] for k in range(1, 4)]
    signals = [signal(b[1], 0.07, 0.4, 4.0) for b in blocks]
    cosines = [0.0, direction(blocks[1][1], blocks[0][1]), direction(blocks[2][1], blocks[1][1])]
    features = run_of(3, STILL).features
    assert features is not None
    assert features[1] == pytest.approx(0.9 * (0.9 * signals[0] + 0.1 * signals[1]) + 0.1 * signals[2], rel=1e-14)
    assert features[3] == pytest.approx(0.9 * (0.9 * cosines[0] + 0.1 * cosines[1]) + 0.1 * cosines[2], rel=1e-14)


@pytest.mark.parametrize(
    ("warmup", "interval", "steps"),
    [(16, 16, [16, 32]), (8, 8, [8, 16, 24, 32]), (3, 16, [3, 19, 35]), (1, 30, [1, 31])],
)
def test_schedule(warmup: int, interval: int, steps: list[int]) -> None:
    run = run_of(36, STILL, warmup=warmup, interval=interval)
    assert run.decision_steps == steps
    assert len(run.buffer) == len(run.rewards) == len(steps) - 1
    assert (run.interval, run.warmup) == (interval, warmup)


def test_defaults_are_the_pages() -> None:
    run = ProvableRldp([0.1], 1.0, 2.0, 40, ScriptedAgent([0.0, 0.0]))
    assert (run.warmup, run.interval, run.reward_floor, run.radius_floor, run.radius_cap) == (16, 16, 5.0, 1e-3, 1.0)


def test_knobs_hold_between_actions() -> None:
    first, second = [0.5, -1.0, 1.0, 0.0], [9.0, -9.0, 0.0, 0.0]
    run = ProvableRldp([0.1, 0.4], 0.8, 2.0, 40, ScriptedAgent(first, second), interval=4, warmup=3)
    seen = []
    for k in range(1, 10):
        seen.append(run.knobs())
        run.step(*release(k))
    equal = [math.sqrt(0.5)] * 2
    assert seen[:3] == [([0.1, 0.4], pytest.approx(equal), 0.8)] * 3
    assert seen[3][0] == pytest.approx([0.1 * math.exp(0.5), 0.4 * math.exp(-1.0)], rel=1e-15)
    assert seen[3:7] == [seen[3]] * 4
    assert seen[7][0] == [1.0, 1e-3]  # cap and floor
    assert seen[7][1] == pytest.approx(equal, rel=1e-15)
    assert {sigma for *_, sigma in seen} == {0.8}
    high, low = seen[3][1]
    share = math.e / (math.e + 1)
    assert high**2 == pytest.approx((share + 1 / 32) / (1 + 1 / 16), rel=1e-14)
    assert low**2 == pytest.approx((1 - share + 1 / 32) / (1 + 1 / 16), rel=1e-14)


def test_centre_one_is_equation_10() -> None:
    run = run_of(3, [-2.0, 0.5, 0.0, 0.0], interval=4, warmup=3, centre="one")
    assert run.knobs()[0] == [math.exp(-2.0), 1.0]
    assert run_of(2, STILL, interval=4, warmup=3, centre="one").knobs()[0] == [0.1, 0.4]  # until the first action


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=40))
def test_weights_are_a_split_of_the_budget(logits: list[float]) -> None:
    weights = weights_of(logits)
    assert math.fsum(w * w for w in weights) == pytest.approx(1.0, rel=1e-12)
    assert min(weights) >= 0.25 / math.sqrt(1 + 1 / 16) / math.sqrt(len(logits)) * (1 - 1e-12)
    by_logit = [w for _, w in sorted(zip(logits, weights, strict=True))]
    assert by_logit == sorted(by_logit)


def test_state_rewards_and_order_of_a_decision() -> None:
    actions = [[0.5, -1.0, 1.0, 0.0], [0.1, 0.2, 0.0, 0.3], STILL]
    run = run_of(11, *actions, interval=4, warmup=3)
    assert run.decision_steps == [3, 7, 11]
    radii = [0.1 * math.exp(0.5), 0.4 * math.exp(-1.0)]  # in force at step 7, not those that its action sets
    logs = [math.log(value) for value in (*radii, *weights_of(actions[0][2:]), 0.7, 0.2, 1.0, 9.0, 0.8)]
    assert run.raw_states[1][4:] == pytest.approx([*logs, 7 / 40, 7 / 40, 3.0 - 0.49], rel=1e-11, abs=2e-12)
    average = signal(release(1)[0][0], 0.05, 0.1, 4.0)
    for k in range(2, 8):  # each release by the radius that was in force for it
        average = 0.9 * average + 0.1 * signal(release(k)[0][0], 0.05, 0.1 if k <= 3 else radii[0], 4.0)
    assert run.raw_states[1][0] == pytest.approx(average, rel=1e-13)
    assert len(run.raw_states[1]) == 2 * 2 + 2 * 2 + 2 * 2 + 4
    # The fall of the public loss over epsilon 2 times the share spent between the actions.
    falls, spent = [(49 - 9) / 100, (121 - 49) / 100], 2 * 4 / 40
    assert run.rewards == pytest.approx([math.log(1 + fall / (spent + 1e-6)) for fall in falls], rel=1e-13)
    assert run.buffer[0] == (run.states[0], actions[0], run.rewards[0], run.states[1])
    assert run.agent.calls == [
        ("act", run.states[0]),
        ("act", run.states[1]),
        ("remember", *run.buffer[0]),
        ("improve",),
        ("act", run.states[2]),
        ("remember", *run.buffer[1]),
        ("improve",),
    ]


def test_wrong_number_of_actions_is_refused() -> None:
    with pytest.raises(ValueError, match="3 numbers, not 4"):
        run_of(3, [0.0, 0.0, 0.0], interval=4, warmup=3)
