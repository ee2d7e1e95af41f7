"""What releases about disjoint parts of the units cost."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dptune.privacy import accountants
from dptune.privacy.accountants import epsilons, smallest_epsilon
from dptune.privacy.laplace_mixtures import InverseScale
from dptune.privacy.parts import dearest, disjoint
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


@st.composite
def releases(draw: st.DrawFn) -> Release:
    """Of every family that an envelope knows."""
    number = st.floats(0.5, 3.0)
    rate = draw(st.sampled_from([1.0, 0.3, 0.01]))
    family = draw(st.sampled_from(["gaussian", "laplace_mixture", "token"]))
    if family == "token":
        return Release.of_token(draw(st.sampled_from([2.0, 3.0])), draw(number))
    if family == "gaussian":
        return Release(rate, draw(number), sensitivity=draw(number))
    uniform = (0.0, draw(number)) if draw(st.booleans()) else (0.0, 0.0)
    law = InverseScale(constant=draw(number), gamma=(draw(number), draw(number)), uniform=uniform)
    return Release(
        rate, 1 / law.score_bound, noise="laplace_mixture", law=law, norm=draw(st.sampled_from(["l1", "l2"]))
    )


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.tuples(releases(), st.integers(1, 3)), min_size=1, max_size=3), min_size=17, max_size=20))
def test_an_envelope_costs_at_least_what_every_part_does(parts: list[list[tuple[Release, int]]]) -> None:
    """With no work allowed, ``dearest`` answers with the price of the envelope of all parts."""
    composition: Composition = Counter()
    for number, part in enumerate(parts):
        for release, count in part:
            composition[_of_part(release, number)] += count
    found = disjoint(composition)
    if len(found) <= 16:
        return
    prices: list[Composition] = []
    dearest(composition, lambda whole: prices.append(whole) or 0.0, work=0)  # type: ignore[func-returns-value]
    assert len(prices) == 1
    quick = accountants.quick_epsilon
    cost = quick(prices[0], 1e-5)
    assert all(quick(part, 1e-5) <= cost * (1 + 1e-9) for part in found)


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
