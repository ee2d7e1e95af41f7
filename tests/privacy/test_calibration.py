"""Calibration meets the budget, from the private side, and no noise is wasted."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dptune.core.errors import ConfigError
from dptune.privacy.accountants import gdp_clt_epsilon, rdp_epsilon
from dptune.privacy.calibration import calibrate, sampling
from dptune.privacy.release import Release

DELTA = 1e-5


@pytest.mark.parametrize("target", [0.5, 2.0, 8.0])
@pytest.mark.parametrize("accountant", [gdp_clt_epsilon, rdp_epsilon])
def test_noise_is_within_the_budget_and_one_percent_less_is_not(target: float, accountant: object) -> None:
    def epsilon(z: float) -> float:
        return accountant(Counter({Release(0.01, z): 500}), DELTA)  # type: ignore[operator]

    z = calibrate(epsilon, target)
    assert epsilon(z) <= target < epsilon(0.99 * z)


@given(target=st.floats(0.01, 100.0), noise=st.floats(0.02, 5e3))
def test_any_decreasing_function(target: float, noise: float) -> None:
    def epsilon(z: float) -> float:
        return target * (noise / z) ** 1.5

    z = calibrate(epsilon, target)
    assert epsilon(z) <= target < epsilon(0.99 * z)


def test_the_sampling_of_the_issue_example() -> None:
    """Its noise multipliers are checked through the command line, see test_cli."""
    assert sampling(73271, 16, 3) == (16 / 73271, 13740)


def test_a_leak_cannot_be_calibrated_away() -> None:
    with pytest.raises(ConfigError, match="epsilon"):
        calibrate(lambda z: math.inf, 2.0)


@pytest.mark.parametrize("target", [0.0, -1.0, math.nan, math.inf])
def test_bad_target_is_refused(target: float) -> None:
    with pytest.raises(ConfigError, match="epsilon"):
        calibrate(lambda z: 1 / z, target)


@given(records=st.integers(1, 10**6), share=st.floats(0.001, 1.0), epochs=st.floats(0.1, 5.0))
def test_a_record_is_drawn_at_least_epochs_times_in_expectation(records: int, share: float, epochs: float) -> None:
    rate, steps = sampling(records, share * records, epochs)
    assert 0 < rate <= 1
    assert rate * steps >= epochs * (1 - 1e-9)


@pytest.mark.parametrize(
    ("values", "field"),
    [((0, 1, 1), "records"), ((10, 0, 1), "batch"), ((10, 11, 1), "batch"), ((10, 2, 0), "epochs")],
)
def test_bad_sampling_is_refused_by_name(values: tuple[int, float, float], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        sampling(*values)
    assert caught.value.field == field


def test_a_target_out_of_reach_names_its_cause() -> None:
    with pytest.raises(ConfigError, match=r"even at a noise multiplier of 10000 the accountant counts 5\. Fix: raise"):
        calibrate(lambda z: 5.0, 2.0)
    with pytest.raises(ConfigError, match=r"no noise reaches 2\. Fix: use a mechanism without leaks"):
        calibrate(lambda z: math.inf, 2.0)


@pytest.mark.parametrize("epochs", [1e12, math.inf])
def test_more_steps_than_any_run_has_are_the_fault_of_the_epochs(epochs: float) -> None:
    with pytest.raises(ConfigError, match=r"epochs: .* at most 1e\+12 are priced"):
        sampling(73271, 16, epochs)


def test_an_epsilon_that_is_barely_out_of_reach_is_not_said_to_be_reached() -> None:
    with pytest.raises(ConfigError, match=r"^epsilon: 1 is out of reach: .* counts 1\.01"):
        calibrate(lambda noise: 1.0001 + 1 / noise**2, 1.0)
