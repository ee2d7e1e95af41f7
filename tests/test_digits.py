"""Digits of privacy figures: no bound looks better than it is."""

from __future__ import annotations

import json
import re

from hypothesis import given
from hypothesis import strategies as st

from dptune.core.digits import at_least, at_most
from tasks.charts.audits import _Corner, _profile

# A relative error of 1e-11 is that of arithmetic, and below the digits that are meant.
_ROUND_OFF = 1e-11
figures = st.floats(1e-6, 1e6)


@given(figures, st.integers(1, 6))
def test_a_shown_bound_is_on_the_side_that_promises_less(value: float, digits: int) -> None:
    above, below = float(at_most(value, digits)), float(at_least(value, digits))
    assert below * (1 - _ROUND_OFF) <= value <= above * (1 + _ROUND_OFF)
    assert above - below <= 10.0 ** (1 - digits) * above * (1 + _ROUND_OFF), "no further off than its last digit"


def test_round_off_of_arithmetic_adds_no_digit_and_infinity_has_its_sign() -> None:
    assert [at_most(one) for one in (2, 2.0000000000000004, 1.99985, 2.001, "inf", 0)] == [
        "2",
        "2",
        "2",
        "2.01",
        "∞",
        "0",
    ]
    assert [at_least(one) for one in (2, 1.9999999999999998, 0.9059, "inf")] == ["2", "2", "0.905", "∞"]


def test_the_audits_chart_rounds_prices_up_and_what_attacks_showed_down() -> None:
    chart = json.dumps(_profile(1.0001, 2.0049, 1e-5, [_Corner("an attack", 0.9059, 3.8765)], ()).to_dict())
    assert set(re.findall(r'"shown": "([^"]*)"', chart)) == {"2.01", "1.01", "0.905", "3.87"}
