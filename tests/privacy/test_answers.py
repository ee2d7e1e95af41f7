"""What tokens cost together: never less than some of them alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dptune.core.errors import ConfigError
from dptune.privacy.accountants import epsilons, pld_epsilon
from dptune.privacy.accounting.renyi_filter import answers_epsilon
from dptune.privacy.ledger_file import encode
from dptune.privacy.release import Composition, Release

TOKENS = st.tuples(st.sampled_from([1.5, 2.0, 3.0, 5.0, 9.0]), st.floats(1e-6, 1.0))


@given(st.lists(TOKENS, min_size=2, max_size=6))
def test_another_token_never_makes_the_others_cheaper(tokens: list[tuple[float, float]]) -> None:
    """A bound at one order says nothing of larger ones, at which the same sum would convert to less."""
    composition: Composition = Counter()
    before = 0.0
    for order, epsilon in tokens:
        composition[Release.of_token(order, epsilon)] += 1
        after = answers_epsilon(composition, 1e-5)
        assert after >= before
        before = after


@given(st.lists(TOKENS, min_size=1, max_size=6))
def test_tokens_of_several_orders_are_priced_at_the_least(tokens: list[tuple[float, float]]) -> None:
    """Renyi divergence grows with its order: each bound holds at the least order of all, and adds up there."""
    least = min(order for order, _ in tokens)
    mixed = Counter(Release.of_token(order, epsilon) for order, epsilon in tokens)
    alike = Counter(Release.of_token(least, epsilon) for _, epsilon in tokens)
    assert answers_epsilon(mixed, 1e-5) == pytest.approx(answers_epsilon(alike, 1e-5), rel=1e-12)


def _responses(counts: Mapping[float, int], delta: float) -> float:
    """Kairouz, Oh and Viswanath 2015, by 50 digits: the least epsilon of that many randomised responses.

    delta(epsilon) is the largest of P(S) - e^epsilon Q(S) over the sets S of sums of losses above a place.
    """
    with mpmath.workdps(50):
        law = {mpmath.mpf(0): mpmath.mpf(1)}
        for each, count in counts.items():
            loss = mpmath.mpf(each)
            true = mpmath.exp(loss) / (1 + mpmath.exp(loss))
            others, law = law, {}
            for ups in range(count + 1):
                likely = mpmath.binomial(count, ups) * true**ups * (1 - true) ** (count - ups)
                for total, before in others.items():
                    place = total + (2 * ups - count) * loss
                    law[place] = law.get(place, mpmath.mpf(0)) + before * likely
        least, above, other = mpmath.mpf(0), mpmath.mpf(0), mpmath.mpf(0)
        for total in sorted(law, reverse=True):
            above, other = above + law[total], other + law[total] * mpmath.exp(-total)
            if above > delta:
                least = max(least, mpmath.log((above - delta) / other))
        return float(least)


def _pure(counts: Mapping[float, int]) -> Composition:
    return Counter({Release.of_token(math.inf, each): count for each, count in counts.items()})


def _about(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(math.log(low), math.log(high)).map(math.exp)


@settings(deadline=None, max_examples=60)
@given(_about(1e-6, 16), st.integers(1, 100), _about(1e-30, 0.5))
@example(0.01507, 2, 0.057)  # a tilt by Chernoff alone has .0301 of 0 here
@example(8 / 64, 64, 1e-5)
@example(8.0, 1, 1e-5)
def test_pure_tokens_cost_what_randomised_responses_do(each: float, count: int, delta: float) -> None:
    exact = _responses({each: count}, delta)
    found = answers_epsilon(_pure({each: count}), delta)
    assert exact <= found <= exact * (1 + 1e-6) + min(2e-8 + 1e-5 * exact, count * each)


@settings(deadline=None, max_examples=15)
@given(_about(1e-2, 4), _about(1e-2, 4), st.integers(1, 12), st.integers(1, 12), _about(1e-12, 0.3))
def test_pure_tokens_of_two_epsilons_cost_a_little_more_and_never_less(
    one: float, other: float, first: int, second: int, delta: float
) -> None:
    counts = Counter({one: first}) + Counter({other: second})
    exact = _responses(counts, delta)
    found = answers_epsilon(_pure(counts), delta)
    total = math.fsum(each * count for each, count in counts.items())
    assert exact <= found <= exact + 6e-3 * total


def test_pure_tokens_of_epsilons_far_apart_are_priced_in_little_memory() -> None:
    counts = {1e-9: 100, 1.0: 8}
    assert _responses({1.0: 8}, 1e-5) <= answers_epsilon(_pure(counts), 1e-5) <= 8.01


@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-9, 1e-14])
def test_a_million_pure_tokens_cost_what_their_gaussian_limit_does(delta: float) -> None:
    """mu = epsilon sqrt(T), up to terms of the order epsilon (Dong, Roth and Su 2022, theorem 3.4)."""
    found = answers_epsilon(_pure({1e-3: 1_000_000}), delta)
    assert found == pytest.approx(pld_epsilon(Counter({Release(1.0, 1.0): 1}), delta), rel=2e-3)


def test_pure_tokens_beside_other_releases_are_priced_by_renyi_and_never_below_either() -> None:
    pure, gaussian = _pure({0.1: 50}), Counter({Release(1.0, 2.0): 3})
    both = answers_epsilon(pure + gaussian, 1e-5)
    assert max(answers_epsilon(pure, 1e-5), pld_epsilon(gaussian, 1e-5)) < both < math.inf
    # By zCDP (Bun and Steinke 2016): rho = 50 .1^2 / 2 + 3 / (2 2^2), at the best order.
    orders = np.linspace(1.5, 60, 20_000)
    renyi = (50 * 0.1**2 / 2 + 3 / 8) * orders
    converted = renyi + np.log1p(-1 / orders) - (math.log(1e-5) + np.log(orders)) / (orders - 1)
    assert both == pytest.approx(converted.min(), rel=2e-3)
    assert both >= converted.min() * (1 - 1e-7)
    tokens: Composition = Counter({Release.of_token(3.0, 0.01): 10})
    assert answers_epsilon(pure + tokens, 1e-5) == pytest.approx(
        10 * 0.01 + 50 * 3 * 0.1**2 / 2 + math.log(2 / 3) - (math.log(1e-5) + math.log(3)) / 2, rel=1e-6
    )
    assert answers_epsilon(pure + Counter({Release(1.0, 0.0, noise="none"): 1}), 1e-5) == math.inf


@pytest.mark.parametrize("other", [{"sensitivity": 0.5}, {"sample_rate": 0.1}, {"adaptive": True}, {"norm": "l1"}])
def test_a_pure_token_is_plain_data(other: dict[str, Any]) -> None:
    """An edited line of a ledger cannot lower the price of a token by figures that a token has not."""
    token = Release.of_token(math.inf, 0.3, claims=(("pure", 0.3),))
    encode(token.to_dict())  # refuses an infinity, which is not JSON
    assert Release.from_dict(token.to_dict()) == token
    assert not token.leaks
    assert epsilons(Counter({token: 1}), 1e-9).certified == pytest.approx(0.3, rel=1e-6)
    with pytest.raises(ConfigError, match=r"pure_token is priced with a sample rate and a sensitivity of 1.*of_token"):
        replace(token, **other)
