"""RLDP's controllers: the checkable facts of the specification, what the provable one may see, and that it learns."""

from __future__ import annotations

import copy
import json
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mechanism_steps import EXPECTED, RATE, SIZES, batch_of, observed, plain, privatised, started
from safetensors.torch import load_file, save_file
from scipy import stats

from dptune.core.errors import ConfigError
from dptune.mechanisms.agents.policy_file import SavedPolicy
from dptune.mechanisms.agents.rl import NOISE_RANGE, batch_size_of_mistral, moved_noise, reward
from dptune.mechanisms.agents.sac import SacOptions, SoftActorCritic
from dptune.mechanisms.controllers.rldp import Rldp, bounded_statistics
from dptune.mechanisms.controllers.rldp_published import RldpPublished, raw_features
from dptune.mechanisms.interfaces import Knobs, Released, RunFacts
from dptune.mechanisms.mechanism import Mechanism
from dptune.privacy.accountants import epsilons, repriced_epsilon
from dptune.privacy.release import Release
from dptune.training.gradients.per_sample import PairGradients

torch.set_num_threads(1)

PAIRS, COORDINATES = len(SIZES), sum(SIZES)
#: An agent that acts often enough for a short test.
QUICK = {"interval": 2, "warmup": 3, "rounds": 1, "batch_size": 2}
FACTS = RunFacts(SIZES, torch.device("cpu"), EXPECTED, RATE, 100, 2.0, 1e-5)

ACTIONS = st.floats(-1e6, 1e6) | st.sampled_from([-1e300, -800.0, 0.0, 800.0, 1e300])
HOSTILE = st.sampled_from([0.0, 1e-45, 1e-7, 0.3, 1e4, 3e38, math.nan, math.inf, -math.inf])
EXTREMES = st.sampled_from([0.0, 3.0, 1e30, -1e30, math.nan, math.inf, -math.inf])


def raw(seed: int, units: int = 5, scale: float = 1.0, sizes: tuple[int, ...] = SIZES) -> list[PairGradients]:
    generator = torch.Generator().manual_seed(seed)
    rows = scale * torch.randn(units, sum(sizes), generator=generator)
    return [batch_of(rows, 3 + torch.randn(units, generator=generator), sizes)]


def steps(mechanism: Mechanism, first: int, last: int, sizes: tuple[int, ...] = SIZES) -> list[list[Any]]:
    """Make and observe releases ``first`` to ``last`` (1-based); returns the knobs after each."""
    seen = []
    for number in range(first, last + 1):
        released = privatised(mechanism, raw(number, sizes=sizes), number, sizes)
        loss = 3.0 + math.sin(number)
        mechanism.controller.observe(observed(released, number, public_loss=loss, spent=number / 100))
        seen.append(plain(mechanism.knobs()))
    return seen


def acted(name: str = "rldp", until: int = 8, sizes: tuple[int, ...] = SIZES, **options: Any) -> Mechanism:
    mechanism = started(name, sizes, **QUICK | options)
    steps(mechanism, 1, until, sizes)
    return mechanism


# sigma and reward: specification section 9


@given(
    position=st.floats(*NOISE_RANGE),
    start=st.floats(1e-3, 1e3),
    action=ACTIONS | st.sampled_from([math.inf, -math.inf]),
    spent=st.floats(-1.0, 2.0),
)
def test_sigma_moves_by_at_most_two_hundredths_and_stays_in_its_range(
    position: float, start: float, action: float, spent: float
) -> None:
    moved = moved_noise(position * start, start, action, spent)
    assert abs(math.log(moved / (position * start))) <= 0.02 * (1 + 1e-9)
    assert NOISE_RANGE[0] * (1 - 1e-12) <= moved / start <= NOISE_RANGE[1] * (1 + 1e-12)
    assert (moved - position * start) * math.copysign(1.0, action) >= -1e-12 * start


@pytest.mark.parametrize("action", [-1e9, 1e9])
def test_sigma_reaches_the_ends_of_its_range_and_never_leaves_them(action: float) -> None:
    """Half of the distance of a damped step goes as the end comes near: 1,000 steps are plenty."""
    noise = 0.4
    for _ in range(1000):
        noise = moved_noise(noise, 0.4, action, 0.0)
        assert 0.2 * (1 - 1e-12) <= noise <= 0.8 * (1 + 1e-12)
    assert noise == pytest.approx(0.8 if action > 0 else 0.2, rel=1e-6)


@pytest.mark.parametrize("spent", [0.0, 0.3, 1.0])
def test_an_action_of_zero_leaves_sigma_where_it_is(spent: float) -> None:
    assert moved_noise(0.37, 0.41, 0.0, spent) == pytest.approx(0.37, rel=1e-12)


@pytest.mark.parametrize(
    ("spent", "step"), [(-1.0, 0.02), (0.0, 0.02), (0.25, 0.015), (0.5, 0.01), (1.0, 0.0), (7.0, 0.0)]
)
def test_the_step_of_sigma_shrinks_with_what_is_spent_and_ends_at_full_spend(spent: float, step: float) -> None:
    assert math.log(moved_noise(1.0, 1.0, 1e9, spent)) == pytest.approx(step, abs=1e-12)
    assert math.log(moved_noise(1.0, 1.0, -1e9, spent)) == pytest.approx(-step, abs=1e-12)


def test_no_gain_is_no_reward() -> None:
    assert reward(0.0, 0.1, 5.0) == 0.0
    assert reward(0.0, 0.0, 5.0) == 0.0


@pytest.mark.parametrize("gain", [-1.0, -1e9, -math.inf])
def test_a_great_loss_is_log_of_a_thousandth_before_the_floor(gain: float) -> None:
    assert reward(gain, 1.0, 100.0) == pytest.approx(-6.9078, abs=1e-3)
    assert reward(gain, 1.0, 5.0) == -5.0


@given(gain=st.floats(-1e6, 1e6), more=st.floats(0, 1e6), cost=st.floats(0, 1e3), floor=st.floats(0.1, 10))
def test_the_reward_grows_with_the_gain_and_never_passes_its_floor(
    gain: float, more: float, cost: float, floor: float
) -> None:
    assert reward(gain, cost, floor) >= -floor
    assert reward(gain + more, cost, floor) >= reward(gain, cost, floor)


@pytest.mark.parametrize(("name", "options"), [("rldp", {"centre": "one"}), ("rldp_published", {})])
def test_an_action_of_zero_sets_every_radius_to_one(name: str, options: dict[str, Any]) -> None:
    """Equation 10; the provable one moves around its start unless it is told otherwise."""
    mechanism = started(name, **options)
    mechanism.knobs()
    size = mechanism.controller.action_size(PAIRS)
    mechanism.controller.apply([0.0] * size, 0.0)
    knobs = mechanism.knobs()
    assert knobs.radii == (1.0,) * PAIRS
    assert knobs.noise_multiplier == pytest.approx(1.0, rel=1e-12)


def test_an_action_of_zero_leaves_the_provable_one_where_it_started() -> None:
    mechanism = started("rldp", pair_radius=0.3)
    before = mechanism.knobs()
    mechanism.controller.apply([0.0] * 2 * PAIRS, 0.0)
    assert mechanism.knobs().radii == pytest.approx(before.radii)
    assert mechanism.scales(mechanism.knobs()) == pytest.approx(mechanism.scales(before))


@given(action=st.lists(ACTIONS, min_size=2 * PAIRS + 1, max_size=2 * PAIRS + 1), spent=st.floats(0, 1))
def test_whatever_the_agent_wants_knobs_stay_within_public_bounds(action: list[float], spent: float) -> None:
    mechanism = started("rldp", move_noise=True, radius_floor=0.01, radius_cap=0.7)
    mechanism.knobs()
    for _ in range(3):
        mechanism.controller.apply(action, spent)
        knobs = mechanism.knobs()
        assert all(0.01 <= radius <= 0.7 for radius in knobs.radii)
        assert math.fsum(weight**2 for weight in knobs.weights) == pytest.approx(1.0, rel=1e-12)
        assert min(knobs.weights) * math.sqrt(PAIRS) > 0.24
        assert NOISE_RANGE[0] <= knobs.noise_multiplier * (1 + 1e-12) <= NOISE_RANGE[1] * (1 + 1e-11)
        assert mechanism.effective_noise_multiplier(knobs) <= mechanism.most_noise() * (1 + 1e-12)


def test_the_weight_of_a_pair_that_the_agent_neglects_is_a_quarter_of_its_share() -> None:
    mechanism = started("rldp")
    mechanism.knobs()
    mechanism.controller.apply([0.0] * PAIRS + [1e9, 0.0, 0.0], 0.0)
    weights = mechanism.knobs().weights
    assert weights[1] == weights[2] == pytest.approx(0.25 / math.sqrt(PAIRS) / math.sqrt(1 + 0.25**2), rel=1e-9)


@pytest.mark.parametrize("design", ["A", "AB"])
@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, 1e30])
def test_a_model_that_diverges_leaves_the_knobs_within_their_bounds(design: str, loss: float) -> None:
    mechanism = started("rldp", **QUICK, design=design, move_noise=True)
    for number in range(1, 14):
        public_loss = loss if 5 <= number < 9 else 3.0
        mechanism.controller.observe(observed(privatised(mechanism, raw(number), number), number, public_loss))
        knobs = mechanism.knobs()
        assert all(1e-3 <= radius <= 1.0 for radius in knobs.radii)
        assert all(math.isfinite(weight) for weight in knobs.weights)
        assert 0.5 <= knobs.noise_multiplier <= 2.0
        assert math.isfinite(mechanism.controller.metrics().get("controller_reward", 0.0))


@pytest.mark.parametrize("name", ["rldp", "rldp_published"])
def test_radii_stay_below_the_cap(name: str) -> None:
    mechanism = started(name, radius_cap=0.5)
    mechanism.knobs()
    mechanism.controller.apply([700.0] * mechanism.controller.action_size(PAIRS), 0.0)
    assert mechanism.knobs().radii == (0.5,) * PAIRS


# When it acts, and on what


@dataclass
class Noting(Rldp):
    """Notes what it is given to act on."""

    acts: list[tuple[int, torch.Tensor, float, float]] = field(default_factory=list, init=False)

    def act(self, features: torch.Tensor, utility: float, epsilon: float, spent: float) -> None:
        self.acts.append((len(features), features, utility, spent))
        super().act(features, utility, epsilon, spent)


@dataclass
class NotingPublished(RldpPublished):
    """Likewise."""

    acts: list[tuple[int, torch.Tensor, float, float]] = field(default_factory=list, init=False)

    def act(self, features: torch.Tensor, utility: float, epsilon: float, spent: float) -> None:
        self.acts.append((len(features), features, utility, spent))
        super().act(features, utility, epsilon, spent)


def noting(name: str, **options: Any) -> Mechanism:
    kind: Any = {"rldp": Noting, "rldp_published": NotingPublished}[name]
    mechanism = replace(started(name), controller=kind(**QUICK | options))
    mechanism.start(FACTS)
    return mechanism


@pytest.mark.parametrize(
    ("name", "when"), [("rldp", [3, 5, 7, 9, 11]), ("rldp_published", [4, 6, 8, 10])], ids=["provable", "published"]
)
def test_it_acts_every_interval_after_the_warm_up(name: str, when: list[int]) -> None:
    """The published one acts at multiples of the interval itself, once the warm-up is over (line 20)."""
    mechanism, seen = noting(name), []
    for number in range(1, 12):
        before = len(mechanism.controller.acts)
        steps(mechanism, number, number)
        seen += [number] * (len(mechanism.controller.acts) - before)
    assert seen == when


def test_knobs_move_only_when_it_acts() -> None:
    seen = steps(started("rldp", **QUICK), 1, 8)
    initial = plain(started("rldp").knobs())
    assert [knobs == initial for knobs in seen] == [True, True] + [False] * 6
    assert [seen[step] == seen[step - 1] for step in range(3, 8)] == [True, False, True, False, True]


def test_the_published_state_has_three_quartiles_a_pair_and_eight_numbers() -> None:
    """Against numpy and scipy."""
    generator = np.random.default_rng(0)
    norms, losses = generator.lognormal(size=(7, PAIRS)), generator.normal(3, 1, size=7)
    expected = [
        *np.quantile(norms, [0.25, 0.5, 0.75], axis=0).flatten(),
        -losses.mean(),
        1.7,
        norms.var(),
        losses.mean(),
        (norms**2).mean(),
        (norms**2).var(),
        stats.skew(norms, axis=None),
        stats.kurtosis(norms, axis=None, fisher=False),
    ]
    features = raw_features(torch.from_numpy(norms), float(losses.mean()), 1.7)
    assert features.shape == (3 * PAIRS + 8,)
    np.testing.assert_allclose(features.numpy(), expected, rtol=1e-9)


@pytest.mark.parametrize("units", [1, 2])
def test_the_published_state_of_equal_or_zero_norms_is_finite(units: int) -> None:
    for norms in (torch.zeros(units, PAIRS), torch.full((units, PAIRS), 2.0)):
        assert bool(raw_features(norms.double(), 1.0, 0.0).isfinite().all())


def test_the_published_controller_is_shown_that_state_of_the_raw_batch() -> None:
    mechanism = noting("rldp_published")
    steps(mechanism, 1, 4)
    (size, features, utility, spent), (batch,) = mechanism.controller.acts[-1], raw(4)
    assert size == 3 * PAIRS + 8
    epsilon = repriced_epsilon(Release(RATE, 1.0), 4, 1e-5)
    torch.testing.assert_close(features, raw_features(batch.norms(), float(batch.losses().mean()), epsilon))
    assert utility == pytest.approx(-float(batch.losses().mean()))
    assert spent == pytest.approx(epsilon / 2.0)


def test_in_the_warm_up_the_published_radii_are_medians_of_all_raw_norms_so_far_and_then_they_hold() -> None:
    """Lines 16 to 18: already after the first step; an even number of norms has the mean of the middle two."""
    mechanism = started("rldp_published", **QUICK | {"interval": 5})
    seen = steps(mechanism, 1, 6)
    for step in range(3):
        norms = torch.cat([batch.norms() for number in range(1, step + 2) for batch in raw(number)])
        assert seen[step][0] == pytest.approx(np.median(norms.numpy(), axis=0), rel=1e-12)
    assert seen[3] == seen[2]  # no median after the warm-up
    assert seen[4] != seen[3]  # the action of release 5
    assert seen[5] == seen[4]


def test_the_loss_of_a_batch_is_its_mean_over_tokens() -> None:
    """Equation 9; a record of many tokens counts more. Not where no token counts."""
    mechanism = started("rldp_published", **QUICK)
    knobs, norms = mechanism.knobs(), torch.ones(2, PAIRS).double()
    losses = torch.tensor([1.0, 4.0]).double()
    for tokens, loss in (([1.0, 2.0], 3.0), ([5.0, 5.0], 2.5), ([0.0, 0.0], 0.0)):
        assert mechanism.controller.peek(norms, losses, torch.tensor(tokens).double(), knobs) == knobs
        assert mechanism.controller._raw[1] == pytest.approx(loss)


def test_an_action_is_drawn_before_the_agent_learns_from_the_last_interval() -> None:
    """Lines 22 and 36 to 40: what a decision learns acts one interval later. The first decision teaches nothing."""
    mechanism = started("rldp_published", **QUICK)
    calls: list[str] = []
    steps(mechanism, 1, 4)
    agent = mechanism.controller._agent
    for name in ("act", "remember", "improve"):
        real = getattr(agent, name)
        setattr(agent, name, lambda *args, name=name, real=real: (calls.append(name), real(*args))[1])
    steps(mechanism, 5, 8)
    assert calls == ["act", "remember", "improve"] * 2


@pytest.mark.parametrize("name", ["rldp", "rldp_published"])
@pytest.mark.parametrize("options", [{}, {"warmup": 0}, {"interval": 5}, {"policy": "random"}, {"rounds": 3}])
def test_the_planned_updates_are_those_that_happen(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    mechanism, rounds = started(name, **QUICK | options), 0
    controller = mechanism.controller
    real = SoftActorCritic._follow

    def counted(agent: SoftActorCritic) -> None:
        nonlocal rounds
        rounds += 1
        real(agent)

    monkeypatch.setattr(SoftActorCritic, "_follow", counted)
    for last in range(1, 14):
        steps(mechanism, last, last)
        counts = controller.metrics()
        assert counts["controller_actions"] == controller.planned_actions(last)
        assert counts["controller_updates"] == controller.planned_updates(last) == rounds
    assert bool(rounds) == (options.get("policy") != "random")


def test_an_empty_batch_gives_the_published_controller_nothing_new() -> None:
    mechanism = started("rldp_published", **QUICK)
    for number in range(1, 8):
        mechanism.controller.observe(observed(privatised(mechanism, [], seed=number), number))
    assert mechanism.knobs() == started("rldp_published").knobs()


def test_algorithm_one_prices_the_whole_past_at_todays_sigma() -> None:
    """So that a controller that ends with more noise seems to have spent less (see also test_accountants)."""
    mechanism = noting("rldp_published", warmup=0, interval=1)
    steps(mechanism, 1, 1)
    for sigma, number in ((0.6, 2), (1.9, 3)):
        mechanism.controller._noise = sigma
        steps(mechanism, number, number)
        assert mechanism.controller.acts[-1][3] * 2.0 == pytest.approx(
            repriced_epsilon(Release(RATE, sigma), number, 1e-5), rel=1e-9
        )
    spent = [spent for *_, spent in mechanism.controller.acts]
    assert spent[2] < spent[1]


def test_the_provable_state_and_utility_are_public() -> None:
    """Seven numbers a pair and four more; design AB adds its own statistics, and is paid by its released loss."""
    for design, size in (("A", 7 * PAIRS + 4), ("AB", 7 * PAIRS + 4 + PAIRS + 1)):
        mechanism = noting("rldp", design=design)
        steps(mechanism, 1, 5)
        assert [act[0] for act in mechanism.controller.acts] == [size] * 2
        utility = mechanism.controller.acts[-1][2]
        assert (utility == pytest.approx(-(3.0 + math.sin(5)))) == (design == "A")


def test_design_ab_is_paid_by_the_mean_loss_that_it_released() -> None:
    """Undone by hand: noisy sum over B, times sqrt(2) times the bound, above the public loss of the last action."""
    mechanism = noting("rldp", design="AB", loss_bound=0.7, warmup=2, interval=3)
    above, public = [], [math.nan]
    for number in range(1, 6):
        released = privatised(mechanism, raw(number), seed=number)
        above.append(public[-1] + float(released.statistics[-1]) / EXPECTED * math.sqrt(2) * 0.7)
        mechanism.controller.observe(observed(released, number, public_loss=3.0 + number))
        public.append(public[-1] if number in (3, 4) else 3.0 + number)
    assert mechanism.controller.acts[0][2] == pytest.approx(-above[1])
    assert mechanism.controller.acts[1][2] == pytest.approx(-fmean(above[2:]))


def test_the_released_loss_is_the_batch_loss_when_there_is_no_noise() -> None:
    mechanism = noting("rldp", design="AB", warmup=2)
    quiet = replace(mechanism, noise=replace(mechanism.noise, noise_multiplier=1e-9))
    for number in (1, 2):
        batch = [batch_of(torch.ones(int(EXPECTED), COORDINATES), torch.full((int(EXPECTED),), 3.2))]
        mechanism.controller.observe(observed(privatised(quiet, batch), number, public_loss=3.0))
    assert mechanism.controller.acts[0][2] == pytest.approx(-3.2, rel=1e-6)


# What the provable one may see


@pytest.mark.parametrize("options", [{}, {"design": "AB"}, {"move_noise": True}])
def test_p08_knobs_follow_from_releases_alone(options: dict[str, Any]) -> None:
    """Two agents that touch different raw data and are shown the same releases: seven steps, three actions."""
    one, other = (started("rldp", **QUICK | options) for _ in range(2))
    for number in range(1, 8):
        released = privatised(one, raw(number), seed=number)
        privatised(other, raw(1000 + number, units=9, scale=100.0), seed=2000 + number)
        for mechanism in (one, other):
            mechanism.controller.observe(observed(released, number, public_loss=3.0 + number))
        assert plain(one.knobs()) == plain(other.knobs())
    assert plain(one.knobs()) != plain(started("rldp").knobs())


@given(
    rows=st.lists(st.lists(HOSTILE, min_size=COORDINATES, max_size=COORDINATES), min_size=1, max_size=4),
    losses=st.lists(EXTREMES, min_size=4, max_size=4),
    public_loss=EXTREMES,
    radius=st.sampled_from([1e-30, 0.1, 1e30]),
    bound=st.sampled_from([1e-9, 0.5, 1e9]),
)
def test_a_units_statistics_have_norm_one_at_most(
    rows: list[list[float]], losses: list[float], public_loss: float, radius: float, bound: float
) -> None:
    batch = batch_of(np.array(rows), losses[: len(rows)])
    statistics = bounded_statistics(batch, (radius,) * PAIRS, public_loss, bound)
    assert statistics.shape == (len(rows), PAIRS + 1)
    assert bool((statistics.norm(dim=1) <= 1).all())


def test_a_unit_of_extreme_loss_uses_the_whole_norm_of_its_statistics() -> None:
    batch = batch_of(np.ones((2, COORDINATES)), [1e9, -1e9])
    norms = bounded_statistics(batch, (0.1,) * PAIRS, 3.0, 0.5).norm(dim=1)
    assert norms.tolist() == pytest.approx([1.0, 1.0], rel=1e-9)


def test_statistics_count_the_clipped_and_centre_the_loss() -> None:
    """Half a pair's share, positive where it is clipped; the loss relative to the public one, over the bound."""
    rows = [[2.0, 0, 0, 0.5, 0, 0, 0, 0], [0.0] * COORDINATES]
    statistics = bounded_statistics(batch_of(rows, [3.1, 2.0]), (1.0,) * PAIRS, 3.0, 0.5)
    share = 0.5 * math.sqrt(2 / PAIRS)
    expected = [[share, -share, -share, 0.2 * math.sqrt(0.5)], [-share, -share, -share, -math.sqrt(0.5)]]
    torch.testing.assert_close(statistics, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize(
    ("share", "gradients", "statistics"), [(0.01, 1.00504, 10.0), (0.02, 1.01015, 7.0711), (0.05, 1.02598, 4.4721)]
)
@pytest.mark.parametrize("unit", ["joint", "pair"])
def test_statistics_are_paid_by_more_noise_on_the_gradients(
    share: float, gradients: float, statistics: float, unit: str
) -> None:
    """The numbers of the specification for a whole release of effective multiplier 1."""
    noise = 1.0 if unit == "joint" else math.sqrt(PAIRS)
    options = {"design": "AB", "statistics_share": share, "noise_unit": unit, "noise_multiplier": noise}
    mechanism = started("rldp", **options)
    knobs = mechanism.knobs()
    assert mechanism.release(knobs, RATE).effective_noise_multiplier == pytest.approx(1.0)
    *blocks, last = (noise * scale for scale in mechanism.scales(knobs))
    shifts = [radius / deviation for radius, deviation in zip(knobs.radii, blocks, strict=True)]
    assert math.hypot(*shifts) ** -1 == pytest.approx(gradients, rel=1e-5)
    assert last == pytest.approx(statistics, rel=1e-5)
    assert math.hypot(*shifts, 1 / last) == pytest.approx(1.0, rel=1e-12)
    assert mechanism.release(knobs, RATE).statistics == ("gradient sum", "clipped fractions", "centred clipped loss")


# Hyper-policies


def policy_of(mechanism: Mechanism, folder: Path, releases: int = 8) -> SavedPolicy:
    """Save it, as a run of so many releases would."""
    release = mechanism.release(mechanism.knobs(), RATE)
    composition = Counter({release: releases})
    leaks = epsilons(composition, 1e-5).leaks
    policy = mechanism.controller.saved_policy("test", folder.name, "record", composition, leaks)
    assert policy is not None
    policy.write(folder)
    return SavedPolicy.read(str(folder))


def same_networks(one: SavedPolicy, other: SavedPolicy) -> bool:
    names = [name for name in one.tensors if name.startswith("policy.")]
    return all(torch.equal(one.tensors[name], other.tensors[name]) for name in names)


def test_an_agent_that_never_acted_has_no_policy() -> None:
    assert acted(until=2).controller.saved_policy("test", "1", "record", Counter(), ()) is None


def test_a_policy_is_read_as_it_was_written(tmp_path: Path) -> None:
    mechanism = acted()
    composition = Counter({mechanism.release(mechanism.knobs(), RATE): 8, Release(0.5, 2.0): 1})
    policy = mechanism.controller.saved_policy("test", "1", "record", composition, ("a leak",))
    assert policy is not None
    policy.write(tmp_path)
    read = SavedPolicy.read(str(tmp_path))
    assert same_networks(policy, read)
    assert replace(read, tensors={}) == replace(policy, tensors={})
    assert read.releases == composition


def test_a_run_starts_from_a_saved_policy(tmp_path: Path) -> None:
    """Its networks right after the first action, before it learned anything, are those that were saved."""
    saved = policy_of(acted(until=20), tmp_path / "first")
    again = policy_of(acted(until=3, init_from=str(tmp_path / "first"), seed=5), tmp_path / "again")
    cold = policy_of(acted(until=3, seed=5), tmp_path / "cold")
    assert same_networks(saved, again)
    assert not same_networks(saved, cold)
    assert [policy.features_seen for policy in (saved, again, cold)] == [9, 10, 1]


def test_a_policy_that_saw_only_releases_adds_its_price_and_no_leak(tmp_path: Path) -> None:
    """And so does every run that follows from it, whoever's records they are."""
    for generation in range(3):
        options = {"init_from": str(tmp_path / str(generation - 1))} if generation else {}
        mechanism = acted(**options)
        assert mechanism.release(mechanism.knobs(), RATE).raw_inputs == ()
        assert mechanism.controller.inherited.total() == 8 * generation
        assert policy_of(mechanism, tmp_path / str(generation)).releases.total() == 8 * (generation + 1)


def test_a_policy_that_read_raw_data_makes_the_run_leak_and_every_run_after_it(tmp_path: Path) -> None:
    """With one pair the states and actions of both controllers have the same sizes: nothing else would stop it."""
    policy_of(acted("rldp_published", sizes=(3,)), tmp_path / "0")
    for generation in (0, 1):
        mechanism = acted(sizes=(3,), init_from=str(tmp_path / str(generation)))
        release = mechanism.release(mechanism.knobs(), RATE)
        assert any("raw batch loss" in leak for leak in release.raw_inputs)
        assert epsilons(Counter({release: 10}), 1e-5).certified == math.inf
        policy_of(mechanism, tmp_path / str(generation + 1))


def test_a_policy_of_a_run_without_a_certified_epsilon_makes_the_next_run_leak(tmp_path: Path) -> None:
    """Not only raw data: a moving sigma without its filter, or a seed that was not secret."""
    policy_of(acted(move_noise=True), tmp_path)
    mechanism = acted(move_noise=True, init_from=str(tmp_path))
    assert "without a filter" in " ".join(mechanism.release(mechanism.knobs(), RATE).raw_inputs)


def _changed(**values: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "policy.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return damage


def _without(key: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "policy.json"
        path.write_text(
            json.dumps({name: value for name, value in json.loads(path.read_text()).items() if name != key})
        )

    return damage


def _lose_tensor(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "policy.safetensors"
        save_file({key: value for key, value in load_file(path).items() if key != name}, path)

    return damage


def _cut(folder: Path) -> None:
    path = folder / "policy.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "no json": lambda folder: (folder / "policy.json").unlink(),
    "no tensors": lambda folder: (folder / "policy.safetensors").unlink(),
    "half a json": lambda folder: (folder / "policy.json").write_text('{"format": 1'),
    "a list": lambda folder: (folder / "policy.json").write_text("[1]"),
    "another format": _changed(format=1),
    "one key more": _changed(certified=True),
    "no leaks": _without("leaks"),
    "leaks of another type": _changed(leaks=""),
    "no releases": _without("releases"),
    "releases that are none": _changed(releases=[[{"noise_multiplier": 1.0}, 3]]),
    "a release that never happened": _changed(releases=[[Release(0.1, 1.0).to_dict(), 0]]),
    "a release that gave something back": _changed(releases=[[Release(0.1, 1.0).to_dict(), -5]]),
    "no count": _without("features_seen"),
    "a count in words": _changed(features_seen="many"),
    "a count of nothing": _changed(features_seen=None),
    "other features": _changed(features=5),
    "a cut file": _cut,
    "a lost network": _lose_tensor("policy.head.bias"),
    "lost means": _lose_tensor("features.mean"),
    "lost squares": _lose_tensor("features.squares"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_policy_is_refused(tmp_path: Path, damage: str) -> None:
    policy_of(acted(), tmp_path)
    DAMAGES[damage](tmp_path)
    with pytest.raises(ConfigError, match="init_from"):
        acted(init_from=str(tmp_path))


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [({"design": "AB"}, {}), ({}, {"design": "AB"}), ({}, {"move_noise": True}), ({}, {"sizes": (3, 5)})],
    ids=["other features", "more features", "another action", "other pairs"],
)
def test_a_policy_of_other_options_or_adapters_is_refused(
    tmp_path: Path, saved: dict[str, Any], wanted: dict[str, Any]
) -> None:
    policy_of(acted(**saved), tmp_path)
    with pytest.raises(ConfigError, match="init_from"):
        acted(**wanted, init_from=str(tmp_path))


# Checkpoints


@pytest.mark.parametrize("before", [2, 4, 9])
@pytest.mark.parametrize(
    ("name", "options"),
    [("rldp", {}), ("rldp", {"design": "AB"}), ("rldp", {"move_noise": True}), ("rldp_published", {})],
    ids=["A", "AB", "moving sigma", "published"],
)
def test_a_run_that_was_interrupted_goes_on_with_identical_knobs(
    name: str, options: dict[str, Any], before: int
) -> None:
    """Before the first action, between two actions, and after the agent has learned; rewards included."""
    one, other = (started(name, **QUICK | {"interval": 3, "reward_floor": 100.0} | options) for _ in range(2))
    steps(one, 1, before)
    other.knobs()
    other.controller.load_state_dict(copy.deepcopy(one.controller.state_dict()))
    assert plain(one.knobs()) == plain(other.knobs())
    for number in range(before + 1, before + 9):
        assert steps(one, number, number) == steps(other, number, number)
        assert one.controller.metrics() == other.controller.metrics()


# Learning control is real


@dataclass
class Taught(Rldp):
    """Is paid for its own radii: ``teacher`` makes a reward of minus the mean log radius."""

    teacher: Callable[[float], float] = lambda small: small

    def judge(self, gain: float, cost: float) -> float:
        action = self._last[1][:2].tolist()  # the action that is rewarded; the radii are the next one's already
        return self.teacher(max(-3.0, min(3.0, -fmean(math.log(0.1) + value for value in action))))

    def _new_agent(self) -> SoftActorCritic:
        options = SacOptions(
            batch_size=32, rounds=1, width=32, discount=0.0, actor_learning_rate=1e-2, critic_learning_rate=1e-2
        )
        return SoftActorCritic(self.feature_size(2), self.action_size(2), options, self.seed)


def change_of_log_radius(seed: int, teacher: Callable[[float], float]) -> float:
    """Mean log radius of the last quarter of 100 actions minus that of the first. Bounds are far on both sides:
    with a near cap, radii fall whatever the reward is, because only the random walk downwards shows.
    """
    controller = Taught(interval=1, warmup=0, seed=seed, radius_cap=1e6, radius_floor=1e-8)
    controller.teacher = teacher
    controller.start(replace(FACTS, pair_sizes=(2, 2)))
    generator, history = torch.Generator().manual_seed(seed), []
    for number in range(1, 101):
        knobs = controller.knobs(Knobs((0.1, 0.1), 1.0))
        blocks = [torch.randn(2, generator=generator) for _ in range(2)]
        controller.observe(observed(Released(blocks, blocks, None, knobs, knobs.radii), number))
        history.append(fmean(map(math.log, controller.knobs(knobs).radii)))
    return fmean(history[75:]) - fmean(history[:25])


@pytest.mark.long
def test_an_agent_learns_the_radii_that_are_rewarded_and_nothing_from_shuffled_rewards() -> None:
    """Seeds are fixed, so the outcome only changes with the code or with torch's arithmetic.

    Over 12 seeds one agent's change was -8.1 +- 1.0 where small radii are rewarded, 11.2 +- 0.8 where large ones are,
    and 0.3 +- 3.2 where the sign of each reward is a fair coin. So with fresh seeds the means below would raise a false
    alarm with a probability below 1e-5 for the rewarded directions and of 1.4e-2 for the coin.
    """
    small = [change_of_log_radius(seed, lambda small: small) for seed in range(2)]
    large = [change_of_log_radius(seed, lambda small: -small) for seed in range(2)]
    coins = random.Random(0)
    shuffled = [change_of_log_radius(seed, lambda small: coins.choice((-1, 1)) * small) for seed in range(4)]
    assert fmean(small) < -5
    assert fmean(large) > 6
    assert abs(fmean(shuffled)) < 4


def test_a_random_policy_never_changes() -> None:
    """The ablation: it acts, and its networks stay as they are."""
    one, other = acted(policy="random", until=12), acted(policy="random", until=3)
    before, after = one.controller._agent.policy(), other.controller._agent.policy()
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    assert plain(one.knobs()) != plain(other.knobs())


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"interval": 0}, "interval"),
        ({"batch_size": -1}, "batch_size"),
        ({"rounds": -1}, "rounds"),
        ({"warmup": -1}, "warmup"),
        ({"radius_cap": 0.0}, "radius_cap"),
        ({"radius_cap": math.inf}, "radius_cap"),
        ({"reward_floor": math.nan}, "reward_floor"),
        ({"statistics_share": 1.0}, "statistics_share"),
        ({"statistics_share": 0.0}, "statistics_share"),
        ({"loss_bound": 0.0}, "loss_bound"),
        ({"loss_bound": math.inf}, "loss_bound"),
        ({"radius_floor": 0.0}, "radius_floor"),
        ({"radius_floor": 2.0}, "radius_floor"),
        ({"clipper": "flat"}, "controller"),
        ({"design": "C"}, "design"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        started("rldp", **options)


@pytest.mark.parametrize(
    ("epsilon", "batch"), [(0.5, 4), (2, 16), (4, 8), (5, 4), (8, 8), (0.1, 4), (100, 8), (None, 16)]
)
def test_the_agents_batch_is_the_papers_for_the_budget(epsilon: float | None, batch: int) -> None:
    assert batch_size_of_mistral(epsilon) == batch
