"""The Renyi filter: specification PF.1 to PF.9 (PF.3 and PF.8 need a run: see test_filtered_run)."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dptune.core.errors import ConfigError
from dptune.privacy.accountants import epsilons, rdp_epsilon
from dptune.privacy.accounting.renyi_filter import RenyiFilter, Spend, budget_at, renyi_cost, smallest_noise_multiplier
from dptune.privacy.release import Release
from dptune.privacy.run_header import RunHeader

DELTA = 1e-5
RATE, STEPS = 16 / 73271, 13740


@pytest.mark.parametrize(
    ("order", "rho", "tolerance"),
    [(2, 1.71813e-4, 1e-5), (4, 3.63154e-4, 1e-5), (8, 8.93644e-4, 1e-5), (32, 11.2463, 1e-5)],
)
def test_one_step_costs(order: float, rho: float, tolerance: float) -> None:
    assert renyi_cost(order, 0.01, 1.0) == pytest.approx(rho, rel=tolerance)


def test_order_two_is_the_closed_form() -> None:
    assert renyi_cost(2, 0.01, 1.0) == pytest.approx(math.log1p(0.01**2 * math.expm1(1.0)), rel=1e-9)


@given(alpha=st.integers(2, 40), q=st.floats(1e-4, 0.2), z=st.floats(0.5, 4.0))
def test_integer_orders_are_the_binomial_sum(alpha: int, q: float, z: float) -> None:
    terms = [
        math.lgamma(alpha + 1) - math.lgamma(k + 1) - math.lgamma(alpha - k + 1)
        + (alpha - k) * math.log1p(-q) + k * math.log(q) + k * (k - 1) / (2 * z * z)
        for k in range(alpha + 1)
    ]  # fmt: skip
    top = max(terms)
    total = top + math.log(math.fsum(math.exp(term - top) for term in terms))
    assert renyi_cost(alpha, q, z) == pytest.approx(total / (alpha - 1), rel=1e-6, abs=1e-13)


@settings(max_examples=15)
@given(order=st.floats(1.5, 30), q=st.floats(1e-3, 0.2), z=st.floats(0.5, 4.0), more=st.floats(1.01, 2.0))
def test_pf4_cost_falls_with_noise_and_grows_with_rate(order: float, q: float, z: float, more: float) -> None:
    cost = renyi_cost(order, q, z)
    assert renyi_cost(order, q, z * more) <= cost * (1 + 1e-6)
    assert renyi_cost(order, min(1.0, q * more), z) >= cost * (1 - 1e-6)


@pytest.mark.parametrize(
    ("epsilon", "order", "z"), [(0.5, 17.0, 1.0158), (2.0, 5.7, 0.5976), (5.0, 3.2, 0.4481), (8.0, 2.5, 0.3931)]
)
def test_pf1_constant_schedule_needs_the_renyi_noise_and_fills_the_budget(
    epsilon: float, order: float, z: float
) -> None:
    plan = RenyiFilter.plan(epsilon, DELTA, RATE, STEPS)
    assert plan.order == pytest.approx(order, rel=0.03)
    needed = smallest_noise_multiplier(plan.order, plan.budget / STEPS, RATE)
    assert needed == pytest.approx(z, rel=2e-3)
    release = Release(RATE, needed, adaptive=True)
    assert plan.admits(Counter({release: STEPS}))
    assert not plan.admits(Counter({release: STEPS + 1}))
    assert rdp_epsilon(Counter({release: STEPS}), DELTA) == pytest.approx(epsilon, rel=3e-2)


@pytest.mark.parametrize("epsilon", [0.5, 2.0, 4.0, 8.0])
def test_a_run_planned_for_its_budget_may_start(epsilon: float) -> None:
    """The filter's epsilon, rounding slack included, must not exceed the epsilon that it was planned for."""
    plan = RenyiFilter.plan(epsilon, DELTA, 0.01, 100)
    header = RunHeader("m", "gdp_clt", "certified", epsilon, DELTA, "record", 100, renyi_filter=plan)
    z = smallest_noise_multiplier(plan.order, plan.budget / 100, 0.01)
    assert header.within_budget(Counter({Release(0.01, z * 1.001, adaptive=True): 100}))


@settings(max_examples=15)
@given(wanted=st.lists(st.floats(0.35, 2.0), min_size=1, max_size=60))
def test_pf2_a_greedy_proposer_never_passes_the_budget(wanted: list[float]) -> None:
    plan = RenyiFilter(order=4.0, budget=0.05)
    composition: Counter[Release] = Counter()
    for proposal in wanted:
        z = plan.raise_noise_multiplier(proposal, 0.05, plan.spent(composition))
        assert z >= proposal
        if math.isinf(z):
            break
        composition[Release(0.05, z, adaptive=True)] += 1
        assert plan.spent(composition) <= plan.budget * (1 + 1e-9)
    assert plan.admits(composition)


def test_pf2_a_spent_budget_stops() -> None:
    plan = RenyiFilter(order=4.0, budget=0.05)
    assert plan.raise_noise_multiplier(1.0, 0.05, plan.budget) == math.inf


@settings(max_examples=15)
@given(wanted=st.lists(st.floats(0.01, 3.0), min_size=20, max_size=20))
def test_pf2_with_a_reserve_for_the_most_noise_every_planned_step_can_be_made(wanted: list[float]) -> None:
    """However greedy the proposals, nobody is raised beyond the noise that the reserve is made of."""
    plan = RenyiFilter.plan(2.0, DELTA, 0.01, len(wanted))
    start = smallest_noise_multiplier(plan.order, plan.budget / len(wanted), 0.01)
    composition: Counter[Release] = Counter()
    for step, proposal in enumerate(wanted, start=1):
        reserve = (len(wanted) - step) * renyi_cost(plan.order, 0.01, 2 * start)
        z = plan.raise_noise_multiplier(proposal * start, 0.01, plan.spent(composition) + reserve)
        assert proposal * start <= z <= max(proposal, 2.0) * start * (1 + 1e-6)
        composition[Release(0.01, z, adaptive=True)] += 1
    assert plan.admits(composition)


@given(noises=st.lists(st.floats(0.4, 4.0), min_size=1, max_size=30))
def test_pf6_what_is_spent_never_decreases(noises: list[float]) -> None:
    """Unlike the price of Algorithm 1, which falls when a run ends with more noise."""
    plan, composition = RenyiFilter(order=3.0, budget=1.0), Counter[Release]()
    spent = [plan.spent(composition)]
    for noise in noises:
        composition[Release(0.05, noise, adaptive=True)] += 1
        spent.append(plan.spent(composition))
    assert spent[0] == 0.0
    assert all(before < after for before, after in pairwise(spent))


def test_pf7_two_phases_are_summed() -> None:
    plan = RenyiFilter(order=3.0, budget=1e9)
    releases = [Release(RATE, 0.4099 * factor) for factor in (0.5, 2.0)]
    composition = Counter(dict.fromkeys(releases, STEPS // 2))
    expected = sum(STEPS // 2 * renyi_cost(3.0, RATE, r.noise_multiplier) for r in releases)
    assert plan.spent(composition) == pytest.approx(expected, rel=1e-12)


costly = st.builds(Release, st.just(0.05), st.floats(0.3, 1e4), adaptive=st.just(True))


@given(releases=st.lists(costly, max_size=40), order=st.floats(1.5, 30))
def test_the_running_spend_is_the_sum_of_the_whole_composition(releases: list[Release], order: float) -> None:
    """At every prefix, bit for bit and in any order of adding; never below the exact sum, one rounding above it."""
    plan = RenyiFilter(order, 1.0)
    running = Spend(plan)
    for done, release in enumerate(releases, start=1):
        assert running.with_another(release).value == Spend(plan, Counter(releases[:done])).value
        running.add(release)
        costs = [plan.cost(one) for one in releases[:done]]
        backwards = Counter(reversed(releases[:done]))
        assert running.value == plan.spent(Counter(releases[:done])) == plan.spent(backwards)
        if all(map(math.isfinite, costs)):
            exact = sum(map(Fraction, costs), Fraction(0))
            assert Fraction(running.value) >= exact
            assert running.value in (math.fsum(costs), math.nextafter(math.fsum(costs), math.inf))
            assert Fraction(math.nextafter(running.value, -math.inf)) < exact
        else:
            assert running.value == math.inf


@given(counts=st.lists(st.integers(1, 10**7), min_size=1, max_size=5), costs=st.data())
def test_a_count_is_that_many_additions(counts: list[int], costs: st.DataObject) -> None:
    """Millions of a cost, from the smallest float to large ones, exactly."""
    plan = RenyiFilter(3.0, 1.0)
    spend, exact = Spend(plan), Fraction(0)
    for count in counts:
        cost = costs.draw(st.floats(5e-324, 1e290))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RenyiFilter, "cost", lambda *_, cost=cost: cost)
            spend.add(Release(0.1, 1.0), count)
        exact += count * Fraction(cost)
    assert Fraction(math.nextafter(spend.value, 0.0)) < exact <= Fraction(spend.value)


def test_spends_add_up_and_an_overflow_is_infinite() -> None:
    plan = RenyiFilter(3.0, 1.0)
    one, other = Release(0.05, 1.0), Release(0.05, 0.7)
    assert (Spend(plan, Counter({one: 3})) + Spend(plan, Counter({other: 2}))).value == plan.spent(
        Counter({one: 3, other: 2})
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RenyiFilter, "cost", lambda *_: 1e308)
        assert Spend(plan, Counter({one: 10})).value == math.inf
    assert Spend(plan, Counter({Release(0.5, 0.0, noise="none"): 1})).value == math.inf
    assert Spend(plan).value == 0.0


def test_pf9_cost_is_of_the_effective_multiplier() -> None:
    plan = RenyiFilter(order=3.0, budget=1.0)
    assert plan.cost(Release(0.01, 2.0, sensitivity=math.sqrt(24))) == renyi_cost(3.0, 0.01, 2.0 / math.sqrt(24))


def test_noiseless_release_has_infinite_cost() -> None:
    assert RenyiFilter(3.0, 1.0).cost(Release(0.01, 0.0, noise="none")) == math.inf


@given(order=st.floats(1.1, 50), epsilon=st.floats(0.1, 10))
def test_reported_epsilon_is_the_conversion_of_the_budget_however_little_was_spent(
    order: float, epsilon: float
) -> None:
    budget = budget_at(order, epsilon, DELTA)
    if budget <= 0:
        return
    reported = RenyiFilter(order, budget).epsilon(Counter(), DELTA)
    assert reported == pytest.approx(epsilon, rel=1e-6)


def test_a_composition_that_broke_the_budget_has_no_epsilon() -> None:
    """The filter's guarantee is of what it admitted; of what passed it nothing is known."""
    keeper, release = RenyiFilter(order=4.0, budget=10 * renyi_cost(4.0, 0.05, 1.0)), Release(0.05, 1.0, adaptive=True)
    assert keeper.epsilon(Counter({release: 10}), 1e-5) == keeper.limit(1e-5)
    assert keeper.epsilon(Counter({release: 11}), 1e-5) == math.inf


def test_epsilon_does_not_shrink_when_a_run_stops_early() -> None:
    plan = RenyiFilter.plan(2.0, DELTA, 0.01, 100)
    one, many = (epsilons(Counter({Release(0.01, 2.0, adaptive=True): n}), DELTA, renyi_filter=plan) for n in (1, 50))
    assert one.certified == many.certified == pytest.approx(2.0, rel=1e-6)


@given(order=st.floats(2, 40), cost=st.floats(1e-6, 1.0), q=st.floats(1e-4, 0.1))
@settings(max_examples=15)
def test_smallest_noise_is_within_and_tight(order: float, cost: float, q: float) -> None:
    z = smallest_noise_multiplier(order, cost, q)
    assert renyi_cost(order, q, z) <= cost
    assert renyi_cost(order, q, z * 0.999) > cost


@pytest.mark.parametrize("epsilon", [20.0, 100.0])
def test_a_generous_budget_can_be_planned(epsilon: float) -> None:
    """Orders below 2, where the cost's series may not converge (infinite cost), must not stop the search."""
    plan = RenyiFilter.plan(epsilon, DELTA, 0.1, 10)
    assert math.isfinite(smallest_noise_multiplier(plan.order, plan.budget / 10, 0.1))


def test_an_order_whose_cost_cannot_be_computed_admits_no_noise() -> None:
    """At order 1.5 and this rate the accountant's series never converges: stop, do not search for ever."""
    assert smallest_noise_multiplier(1.5, 1e-6, 0.09186) == math.inf


def test_pf5_round_trip_keeps_every_bit() -> None:
    plan = RenyiFilter(order=float(np.nextafter(3.0, 4.0)), budget=0.1 + 0.2)
    assert RenyiFilter.from_dict(plan.to_dict()) == plan


@pytest.mark.parametrize(
    ("order", "budget"), [(1.0, 1.0), (math.inf, 1.0), (math.nan, 1.0), (2.0, 0.0), (2.0, math.inf)]
)
def test_useless_filters_are_refused(order: float, budget: float) -> None:
    with pytest.raises(ConfigError, match="filter"):
        RenyiFilter(order, budget)
