"""What releases about disjoint parts of the units cost."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dptune.privacy import accountants
from dptune.privacy.accountants import epsilons, smallest_epsilon
from dptune.privacy.accounting.laplace_mixtures import InverseScale
from dptune.privacy.accounting.parts import dearest, disjoint
from dptune.privacy.release import Composition, Release


@given(st.lists(st.tuples(st.none() | st.integers(0, 3), st.sampled_from([1.0, 2.0, 5.0])), max_size=12))
def test_a_unit_of_each_part_pays_for_its_part_and_for_what_is_about_everybody(
    made: list[tuple[int | None, float]],
) -> None:
    """Parallel composition, written down for each part; a kind that two parts share may be told once."""
    composition = Counter(Release(1.0, noise, part=part) for part, noise in made)
    parts = {part for part, _ in made if part is not None} or {None}
    expected = [Counter(Release(1.0, noise) for part, noise in made if part in (None, mine)) for mine in parts]
    found = disjoint(composition)
    assert all(kind in found for kind in expected)
    assert all(kind in expected for kind in found)


def release_of(family: str, coins: random.Random) -> Release:
    rate, sensitivity = coins.choice([1.0, 0.3, 0.01]), coins.choice([1.0, coins.uniform(0.5, 3)])
    if family == "token":
        return Release.of_token(coins.choice([1.5, 2.0, 6.0]), coins.uniform(1e-3, 1.0))
    if family == "gaussian":
        return Release(rate, coins.uniform(0.5, 30), sensitivity=sensitivity)
    laws = (
        InverseScale(constant=1.0),
        InverseScale(gamma=(coins.uniform(3, 40), 0.1)),
        InverseScale(uniform=(coins.uniform(0, 0.5), coins.uniform(0.6, 2))),
        InverseScale(exponential=0.3, gamma=(3.0, 0.1)),
    )
    law = coins.choice(laws).scaled(coins.uniform(0.03, 1.5))
    norm = coins.choice(["l1", "l2"]) if family == "laplace_mixture" else "l1"
    return Release(rate, 1 / law.score_bound, sensitivity, noise="laplace_mixture", law=law, norm=norm)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("family", ["gaussian", "laplace_mixture", "laplace_mixture in l1", "token"])
def test_an_envelope_costs_at_least_what_every_part_does(family: str, seed: int) -> None:
    """With no work allowed, ``dearest`` answers with the price of the envelope of all parts. One family at a time:
    tokens beside Laplace noise cost infinity, which is at least anything.
    """
    coins = random.Random(seed)
    parts = [
        [(release_of(family, coins), coins.randint(1, 3)) for _ in range(coins.randint(1, 3))]
        for _ in range(coins.choice([17, 17, 30]))
    ]
    composition: Composition = Counter()
    for number, part in enumerate(parts):
        for release, count in part:
            composition[_of_part(release, number)] += count
    found = disjoint(composition)
    assert len(found) > 16
    prices: list[Composition] = []
    dearest(composition, lambda whole: prices.append(whole) or 0.0, work=0)  # type: ignore[func-returns-value]
    assert len(prices) == 1
    quick = accountants.quick_epsilon
    cost = quick(prices[0], 1e-5)
    assert cost < math.inf
    assert all(quick(part, 1e-5) <= cost * (1 + 1e-9) for part in found)


def test_an_envelope_keeps_norms_apart_and_lowers_no_score_bound() -> None:
    """A release in l1 may be priced as pure, one in l2 may not. A constant beside a sharp Gamma lowers its bound."""
    sharp, flat = InverseScale(gamma=(0.5, 1.0)), InverseScale(constant=0.1)
    composition: Composition = Counter()
    for number in range(20):
        law, norm = ((sharp, "l1"), (flat, "l1"), (flat, "l2"))[number % 3]
        law = law.scaled(1 + number / 1e6)
        composition[Release(1.0, 1 / law.score_bound, noise="laplace_mixture", law=law, norm=norm, part=number)] += 1
    prices: list[Composition] = []
    dearest(composition, lambda whole: prices.append(whole) or 0.0, work=0)  # type: ignore[func-returns-value]
    (envelope,) = prices
    assert {release.norm for release in envelope} == {"l1", "l2"}
    assert max(one.law.score_bound for one in envelope if one.law) >= sharp.score_bound


def _of_part(release: Release, number: int) -> Release:
    return Release(**{name: getattr(release, name) for name in release.__dataclass_fields__} | {"part": number})


@pytest.mark.parametrize("each", [1, 3])
@pytest.mark.parametrize("shared", [0, 4])
def test_many_different_parts_cost_the_dearest_or_a_little_more(each: int, shared: int) -> None:
    coins = random.Random(each)
    composition: Composition = Counter(Release(0.05, 2 + coins.random()) for _ in range(shared))
    for part in range(30):
        for _ in range(each + part % 2):
            composition[Release(0.05 + 0.01 * coins.random(), 1 + coins.random(), part=part)] += 1
    truth = max(smallest_epsilon(part, 1e-5) for part in disjoint(composition))
    assert truth * (1 - 1e-9) <= epsilons(composition, 1e-5).certified <= 1.02 * truth
    rough = dearest(composition, lambda part: smallest_epsilon(part, 1e-5), work=0)
    assert truth <= rough < 1.5 * truth


def test_pricing_ends_although_no_two_parts_are_alike() -> None:
    """5,000 parts take a few dozen prices."""
    composition = Counter(Release(1.0, 2 + number / 1e5, part=number) for number in range(5000))
    priced: list[Composition] = []

    def price(part: Composition) -> float:
        priced.append(part)
        return smallest_epsilon(part, 1e-5)

    assert dearest(composition, price) == smallest_epsilon(Counter([Release(1.0, 2.0)]), 1e-5)
    assert len(priced) < 100


def test_what_no_bound_reads_makes_no_parts_different() -> None:
    composition = Counter(
        Release(0.1, 1.0, part=number, statistics=(f"s{number}",), claims=(("dimension", number),))
        for number in range(50)
    )
    assert epsilons(composition, 1e-5).certified == smallest_epsilon(Counter([Release(0.1, 1.0)]), 1e-5)
