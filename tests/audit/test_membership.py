"""Membership figures against scipy and against their definitions, ties included."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import mannwhitneyu

from dptune.audit.text.membership import (
    auc,
    membership_report,
    roc,
    true_positive_rate,
    true_positive_rate_by_chance,
)
from dptune.core.errors import DataError

Scores = NDArray[np.float64]
#: Few values, so that many tie.
SCORES: st.SearchStrategy[Scores] = st.lists(st.integers(0, 6) | st.floats(-1e6, 1e6), min_size=1, max_size=30).map(
    lambda values: np.array(values, dtype=float)
)


@given(members=SCORES, others=SCORES)
def test_auc_is_the_rank_statistic(members: Scores, others: Scores) -> None:
    expected = mannwhitneyu(members, others).statistic / (len(members) * len(others))
    assert auc(members, others) == pytest.approx(expected, abs=1e-12)
    assert auc(others, members) == pytest.approx(1 - expected, abs=1e-12)


def test_auc_by_hand() -> None:
    assert auc(np.array([2.0, 3.0]), np.array([0.0, 1.0])) == 1
    assert auc(np.array([0.0, 1.0]), np.array([2.0, 3.0])) == 0
    assert auc(np.array([1.0, 1.0]), np.array([1.0])) == 0.5
    assert auc(np.array([1.0, 2.0]), np.array([1.0, 0.0])) == pytest.approx(3.5 / 4)


@given(members=SCORES, others=SCORES)
def test_roc_rises_from_nothing_to_all_and_has_auc_below_it(members: Scores, others: Scores) -> None:
    curve = roc(members, others)
    false, true = curve.false_positive_rate, curve.true_positive_rate
    assert (false[0], true[0], false[-1], true[-1]) == (0, 0, 1, 1)
    assert (np.diff(false) >= 0).all()
    assert (np.diff(true) >= 0).all()
    assert np.trapezoid(true, false) == pytest.approx(auc(members, others), abs=1e-9)


@given(members=SCORES, others=SCORES)
def test_roc_has_every_threshold_by_definition(members: Scores, others: Scores) -> None:
    curve = roc(members, others)
    thresholds = [math.inf, *sorted({*members.tolist(), *others.tolist()}, reverse=True)]
    assert curve.true_positive_rate == pytest.approx([(members >= cut).mean() for cut in thresholds])
    assert curve.false_positive_rate == pytest.approx([(others >= cut).mean() for cut in thresholds])


@given(members=SCORES, others=SCORES, allowed=st.integers(0, 30))
def test_true_positive_rate_is_the_best_that_few_enough_false_alarms_allow(
    members: Scores, others: Scores, allowed: int
) -> None:
    cuts = [math.inf, *members.tolist(), *others.tolist()]
    expected = max((members >= cut).mean() for cut in cuts if (others >= cut).sum() <= allowed)
    between = (allowed + 0.5) / len(others)
    assert true_positive_rate(roc(members, others), between) == pytest.approx(expected)


def test_true_positive_rate_by_hand() -> None:
    curve = roc(np.array([5.0, 4.0, 1.0, 0.0]), np.array([4.5, 3.0, 2.0, 1.0]))
    rates = [true_positive_rate(curve, rate) for rate in (0.0, 0.2, 0.25, 0.9, 1.0)]
    assert rates == [0.25, 0.25, 0.5, 0.5, 1.0]


def test_a_report_says_what_chance_would_give() -> None:
    members, others = np.arange(500.5, 1500), np.arange(1000.0)
    report = membership_report(members, others)
    assert report["auc"] == auc(members, others) == pytest.approx(0.875, abs=1e-3)
    assert (report["members"], report["non_members"], report["auc_chance"]) == (1000, 1000, 0.5)
    assert report["tpr_at_fpr_0.01_chance"] == 11 / 1001
    assert report["tpr_at_fpr_0.001_chance"] == 2 / 1001
    assert report["tpr_at_fpr_0.01"] >= report["tpr_at_fpr_0.001"] >= 0.5


@pytest.mark.parametrize(("others", "rate"), [(100, 0.01), (100, 0.001), (128, 0.01), (300, 0.01), (100, 0.29)])
def test_chance_is_the_mean_of_scores_that_tell_nothing(others: int, rate: float) -> None:
    """3,000 draws of 100 members each; a mean more than 6 of its standard errors off has chance 2e-9."""
    generator = np.random.default_rng(others)
    drawn = generator.random((3000, 100 + others))
    rates = [true_positive_rate(roc(row[:100], row[100:]), rate) for row in drawn]
    error = np.std(rates) / len(rates) ** 0.5
    assert abs(np.mean(rates) - true_positive_rate_by_chance(rate, others)) < 6 * error


def test_a_rate_that_the_counts_cannot_resolve_is_left_out() -> None:
    """Of 100 non-members one is 1 %: nothing is known of 0.1 %."""
    report = membership_report(np.arange(100.0), np.arange(100) + 0.5)
    assert report["tpr_at_fpr_0.01_chance"] == 2 / 101
    assert not [name for name in report if "0.001" in name]
    few = membership_report(np.arange(20.0), np.arange(20) + 0.5)
    assert not [name for name in few if name.startswith("tpr")]


def test_the_deviation_under_chance_is_what_random_scores_show() -> None:
    """4,000 draws know a deviation to 1.1 percent; 6 percent off is a false alarm once in 10 million."""
    generator = np.random.default_rng(0)
    report = membership_report(generator.random(12), generator.random(30))
    drawn = [auc(row[:12], row[12:]) for row in generator.random((4000, 42))]
    assert report["auc_chance_deviation"] == pytest.approx(np.std(drawn), rel=0.06)


@pytest.mark.parametrize(
    ("members", "others", "fix"),
    [
        ([], [1.0], "plant more audit canaries"),
        ([1.0], [], "plant more audit canaries"),
        ([1.0, math.nan], [1.0], "check the model's losses"),
        ([1.0], [-math.inf, 1.0], "check the model's losses"),
    ],
)
def test_bad_scores_are_refused_with_their_fix(members: list[float], others: list[float], fix: str) -> None:
    for figure in (auc, roc, membership_report):
        with pytest.raises(DataError, match=f"Fix: {fix}"):
            figure(np.array(members), np.array(others))


def test_nothing_private_shows_in_a_representation() -> None:
    assert repr(roc(np.array([1.0]), np.array([0.0]))) == "Roc()"


@pytest.mark.parametrize("count", [100, 300, 1000, 3000])
def test_a_rate_that_falls_on_a_count_is_allowed(count: int) -> None:
    """1 - 99/100 is more than 0.01 in floating point."""
    curve = roc(np.full(10, count - 1.5), np.arange(float(count)))
    assert true_positive_rate(curve, 1 / count) == 1.0
