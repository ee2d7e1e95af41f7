"""What tokens cost together: never less than some of them alone."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dptune.privacy.accounting.renyi_filter import answers_epsilon
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
