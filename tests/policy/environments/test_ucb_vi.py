"""UCB-VI: the noise of its tree, its price, and its learning."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from dptune.core.errors import ConfigError
from dptune.policy.environments.baselines import UcbVi, _episode, _Tree, run_ucb_vi
from dptune.policy.environments.riverswim import value
from dptune.privacy.accountants import epsilons
from dptune.privacy.entropy import FixedSeed, OsEntropy


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 100])
def test_the_tree_adds_up_and_an_episode_is_in_few_nodes(count: int) -> None:
    tree, total = _Tree(3, 0.0, OsEntropy()), np.zeros(3)
    for number in range(count):
        vector = np.array([1.0, number, -number])
        total += vector
        assert tree.add(vector) == pytest.approx(total)
    assert len(tree._noisy) <= UcbVi(count).levels


def test_every_node_has_noise_of_its_own_and_keeps_it() -> None:
    """Standard deviations over 10,000 coordinates are within 5 %, with a false-alarm rate below 1e-11."""
    tree, zero = _Tree(10_000, 2.0, FixedSeed(0)), np.zeros(10_000)
    sums = [tree.add(zero) for _ in range(3)]
    assert sums[0].std() == pytest.approx(2.0, rel=0.05)
    assert sums[2].std() == pytest.approx(2.0 * math.sqrt(2), rel=0.05)
    assert (sums[2] - sums[1]).std() == pytest.approx(
        2.0, rel=0.05
    )  # the node of vectors 1 and 2 is in both sums, with the same noise


def test_noisy_counters_lie_on_the_public_grid() -> None:
    """Counters off the grid would show the exact counts in the low bits of doubles (Mironov 2012)."""
    step = 2.0 * 2.0**-20
    counters = _Tree(100, 2.0, OsEntropy()).add(np.ones(100)) / step
    assert np.abs(counters - np.round(counters)).max() < 1e-3


def test_no_episode_is_longer_than_the_sensitivity() -> None:
    plan, generator = UcbVi(1000), np.random.default_rng(0)
    longest = 0.0
    for _ in range(200):
        policy = generator.integers(2, size=(20, 6))
        longest = max(longest, float(np.linalg.norm(_episode(policy, plan, generator))))
    assert longest <= math.sqrt(3 * plan.horizon)
    assert plan.levels == 10  # 2^10 > 1000: an episode is in at most ten nodes
    assert UcbVi(1000, noise_multiplier=2.0).deviation == pytest.approx(2.0 * math.sqrt(3 * 20 * 10))


def test_its_price_is_one_gaussian_release() -> None:
    release = UcbVi(100, noise_multiplier=1.0).release()
    assert epsilons(Counter([release]), 1e-5).certified == pytest.approx(4.3772, rel=1e-4)
    assert math.isinf(epsilons(Counter([UcbVi(100).release()]), 1e-5).certified)


def test_it_learns_to_swim_and_its_regret_grows_ever_slower() -> None:
    """The bonus is a fiftieth of the theory's, which explores for thousands of episodes; seeds are fixed."""
    plan = UcbVi(600, bonus=0.02)
    values = run_ucb_vi(plan, OsEntropy())
    lost = np.cumsum(value(horizon=plan.horizon, stay=plan.stay, pays=plan.pays) - values)
    assert values[-100:].mean() > 0.7 * value()
    assert lost[-1] - lost[-100] < 0.5 * (lost[99] - lost[0])
    assert bool((np.diff(lost) >= -1e-9).all())


@pytest.mark.parametrize("options", [{"episodes": 0}, {"episodes": 1, "noise_multiplier": -1.0}])
def test_impossible_plans_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        UcbVi(**options)  # type: ignore[arg-type]
