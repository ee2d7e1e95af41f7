"""The figures of an accusation: each on the side that says less, and never the same text twice."""

from __future__ import annotations

import math

from hypothesis import assume, given
from hypothesis import strategies as st

from dptune.core.digits import shown_above

figures = st.floats(1e-6, 1e6)


def test_what_is_shown_is_rounded_down_and_what_is_stated_up() -> None:
    assert shown_above(2.6789, 1.2341) == ("2.67", "1.24")
    assert shown_above(2.6789, 1.2341, 4) == ("2.678", "1.235")
    assert shown_above(1.6, 1.5) == ("1.6", "1.5")
    assert shown_above(math.inf, 1.2341) == ("∞", "1.24")


def test_an_accusation_has_as_many_digits_as_it_takes_to_be_one() -> None:
    """Rounded to the nearest by three digits, each of these accusations would read "shows 2, but 2 is certified"."""
    assert shown_above(2.004, 2.003) == ("2.004", "2.003")
    assert shown_above(2.0041, 2.0032) == ("2.0041", "2.0032")
    assert shown_above(2.0000000000000004, 2.0) == ("2.0000000000000004", "2.0")


@given(figures, st.one_of(figures, st.floats(1e-15, 1e-3)))
def test_no_accusation_contradicts_itself_or_says_too_much(stated: float, more: float) -> None:
    shown = stated * (1 + more)
    assume(shown > stated)
    lower, upper = map(float, shown_above(shown, stated))
    assert lower > upper
    assert lower <= shown * (1 + 1e-11)
    assert upper >= stated * (1 - 1e-11)
