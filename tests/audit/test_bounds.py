"""Lower bounds on epsilon against published numbers, closed forms, scipy and an independent implementation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.special import ndtri
from scipy.stats import binomtest, norm

from dptune.audit.epsilon_bounds import (
    epsilon_from_errors,
    gaussian_epsilon,
    mu_from_errors,
    one_run_epsilon,
    one_run_mu,
    ranked_epsilon,
    ranked_p_value,
    ranked_weights,
    rate_at_most,
)
from dptune.core.errors import ConfigError

CONFIDENCES = st.sampled_from([0.5, 0.9, 0.95, 0.999])
DELTAS = st.sampled_from([0.0, 1e-8, 1e-5, 1e-3, 0.1])


@st.composite
def shares(draw: st.DrawFn, fewest: int = 1, most: float = 1.0) -> tuple[int, int]:
    """(events, trials)"""
    trials = draw(st.integers(fewest, 2000))
    return draw(st.integers(0, int(most * trials))), trials


@st.composite
def guessed(draw: st.DrawFn) -> tuple[int, int, int]:
    """(canaries, guesses, correct)"""
    canaries = draw(st.integers(1, 600))
    guesses = draw(st.integers(1, canaries))
    return canaries, guesses, draw(st.integers(0, guesses) | st.integers(guesses - guesses // 5, guesses))


def logit(share: float) -> float:
    return math.log(share / (1 - share))


@given(share=shares(), confidence=CONFIDENCES)
@example(share=(0, 1), confidence=0.95)
@example(share=(1, 1), confidence=0.95)
def test_a_rate_is_bounded_as_scipy_bounds_it(share: tuple[int, int], confidence: float) -> None:
    interval = binomtest(*share, alternative="less").proportion_ci(confidence, method="exact")
    assert rate_at_most(*share, confidence) == pytest.approx(interval.high, abs=1e-9)


@pytest.mark.parametrize(("events", "trials"), [(-1, 5), (6, 5), (0, 0)])
def test_a_share_that_is_none_is_refused(events: int, trials: int) -> None:
    with pytest.raises(ConfigError, match="events"):
        rate_at_most(events, trials, 0.95)


@pytest.mark.parametrize("confidence", [0.0, 1.0, -0.1, 1.5, math.nan])
def test_a_confidence_that_is_none_is_refused(confidence: float) -> None:
    for bound in (
        lambda: rate_at_most(1, 5, confidence),
        lambda: one_run_epsilon(10, 5, 5, 1e-5, confidence),
        lambda: one_run_mu(10, 5, 5, confidence),
    ):
        with pytest.raises(ConfigError, match="confidence"):
            bound()


def test_errors_of_repeated_runs_by_hand() -> None:
    """Each rate with half of what may go wrong, as two-sided intervals have it; the better ratio counts."""
    fnr = binomtest(30, 1000).proportion_ci(0.95, method="exact").high
    fpr = binomtest(2, 500).proportion_ci(0.95, method="exact").high
    assert epsilon_from_errors(30, 1000, 2, 500, 1e-3, 0.95) == pytest.approx(math.log((1 - fnr - 1e-3) / fpr))
    assert mu_from_errors(30, 1000, 2, 500, 0.95) == pytest.approx(norm.isf(fpr) - norm.ppf(fnr))


@given(members=shares(50, 0.5), others=shares(50, 0.5), delta=DELTAS, confidence=CONFIDENCES)
def test_bounds_from_errors_are_symmetric_and_fall_with_every_error(
    members: tuple[int, int], others: tuple[int, int], delta: float, confidence: float
) -> None:
    epsilon = epsilon_from_errors(*members, *others, delta, confidence)
    mu = mu_from_errors(*members, *others, confidence)
    assert epsilon >= 0
    assert mu >= 0
    assert epsilon == epsilon_from_errors(*others, *members, delta, confidence)
    assert mu == pytest.approx(mu_from_errors(*others, *members, confidence), abs=1e-9)
    assert epsilon_from_errors(*members, *others, min(1.0, delta + 0.01), confidence) <= epsilon
    more = members[0] + 1, members[1]
    assert epsilon_from_errors(*more, *others, delta, confidence) <= epsilon
    assert mu_from_errors(*more, *others, confidence) <= mu


@given(share=shares(), confidence=st.sampled_from([0.9, 0.95, 0.999]))
@example(share=(0, 1000), confidence=0.95)
@example(share=(1000, 1000), confidence=0.95)
def test_an_attack_at_chance_shows_nothing(share: tuple[int, int], confidence: float) -> None:
    """As many false alarms as hits."""
    called, trials = share
    assert epsilon_from_errors(trials - called, trials, called, trials, 0.0, confidence) == 0
    assert mu_from_errors(trials - called, trials, called, trials, confidence) == 0


@pytest.mark.parametrize("trials", [10, 1000, 100_000])
def test_an_attack_without_an_error_shows_about_the_logarithm_of_its_trials(trials: int) -> None:
    likely = 0.025 ** (1 / trials)
    assert epsilon_from_errors(0, trials, 0, trials, 0.0, 0.95) == pytest.approx(logit(likely))
    assert mu_from_errors(0, trials, 0, trials, 0.95) == pytest.approx(2 * ndtri(likely))


@pytest.mark.parametrize(
    ("canaries", "guesses", "correct", "delta", "published", "differs"),
    [
        (1000, 100, 75, 1e-4, 0.673, -0.04),
        (100_000, 1510, 1439, 1e-5, 2.67585, 0.08),
        (1000, 100, 95, 1e-5, 2.165, 0.004),
    ],
)
def test_one_run_is_near_the_published_epsilon(
    canaries: int, guesses: int, correct: int, delta: float, published: float, differs: float
) -> None:
    """The bound is lower than the epsilons of 2305.08846, section 5, where m delta is large, and else higher."""
    found = one_run_epsilon(canaries, guesses, correct, delta, 0.95)
    assert found - published == pytest.approx(differs, abs=0.02)


def test_one_run_gives_the_published_p_value() -> None:
    assert ranked_p_value(1000, (1,) * 100, 75, math.log(3), 0.0) == pytest.approx(0.553, abs=5e-4)


@given(counts=guessed(), epsilon=st.floats(0, 8), delta=DELTAS)
def test_a_p_value_is_a_chance_that_grows_with_both_budgets(
    counts: tuple[int, int, int], epsilon: float, delta: float
) -> None:
    canaries, guesses, correct = counts
    alike = canaries, (1,) * guesses, correct
    value = ranked_p_value(*alike, epsilon, delta)
    exact = binomtest(correct, guesses, 1 / (1 + math.exp(-epsilon)), alternative="greater").pvalue
    assert ranked_p_value(*alike, epsilon, 0.0) == pytest.approx(exact, rel=1e-6, abs=1e-300)
    assert exact * (1 - 1e-9) <= value <= min(1.0, exact + canaries * delta / (1 + math.exp(epsilon))) * (1 + 1e-9)
    assert value <= ranked_p_value(*alike, epsilon, delta + 1e-4)


@pytest.mark.parametrize("canaries", [2, 3, 9, 60, 256, 1000, 4000])
def test_weights_fall_with_the_rank_and_are_counted_from_one(canaries: int) -> None:
    weights = ranked_weights(canaries)
    assert 2 <= len(weights) <= canaries
    assert len(weights) % 2 == 0
    assert weights[::2] == weights[1::2], "a guess of each side"
    assert list(weights) == sorted(weights, reverse=True)
    assert weights[-1] == 1


def test_weights_by_rank_show_more_of_gaussian_scores_than_equal_ones() -> None:
    """Expected right guesses of each rank among 1,000 Gaussian scores at mu 1.5, from 400 seeded draws."""
    generator, weights = np.random.default_rng(3), ranked_weights(1000)
    right = np.zeros(500)
    for _ in range(400):
        coins = generator.random(1000) < 0.5
        order = np.argsort(1.5 * coins + generator.standard_normal(1000))
        right += (coins[order[::-1][:500]].astype(float) + ~coins[order[:500]]) / 400
    pairs = len(weights) // 2
    ranked = ranked_epsilon(1000, weights, round(float(np.dot(weights[::2], right[:pairs]))), 1e-5, 0.95)
    alike = [
        one_run_epsilon(1000, 2 * half, round(float(right[:half].sum())), 1e-5, 0.95) for half in range(20, 500, 5)
    ]
    assert ranked > max(alike)


@pytest.mark.parametrize(("weights", "score"), [((), 0), ((1,) * 11, 5), ((1, 0), 1), ((2, 1), 4), ((2, 1), -1)])
def test_weights_that_cannot_be_are_refused(weights: tuple[int, ...], score: int) -> None:
    with pytest.raises(ConfigError, match="weights"):
        ranked_p_value(10, weights, score, 1.0, 0.0)


@pytest.mark.parametrize("guesses", [1, 3, 10, 256, 4000])
@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.9999])
def test_guesses_that_are_all_right_have_a_closed_form(guesses: int, confidence: float) -> None:
    expected = max(0.0, logit((1 - confidence) ** (1 / guesses)))
    assert one_run_epsilon(2 * guesses, guesses, guesses, 0.0, confidence) == pytest.approx(expected, abs=1e-9)


@given(counts=guessed(), confidence=CONFIDENCES)
def test_without_delta_one_run_is_a_bound_on_a_coins_bias(counts: tuple[int, int, int], confidence: float) -> None:
    _, guesses, correct = counts
    right = 1 - rate_at_most(guesses - correct, guesses, confidence)
    expected = logit(right) if right > 0.5 else 0.0
    assert one_run_epsilon(*counts, 0.0, confidence) == pytest.approx(expected, abs=1e-6)


@given(counts=guessed(), delta=DELTAS, confidence=CONFIDENCES)
def test_one_run_epsilon_ends_where_the_p_value_says(
    counts: tuple[int, int, int], delta: float, confidence: float
) -> None:
    epsilon = one_run_epsilon(*counts, delta, confidence)
    canaries, guesses, correct = counts
    alike = canaries, (1,) * guesses, correct
    assert ranked_p_value(*alike, epsilon + 1e-6, delta) >= (1 - confidence) * (1 - 1e-4)
    if epsilon > 0:
        assert ranked_p_value(*alike, epsilon, delta) < 1 - confidence


@given(counts=guessed(), confidence=CONFIDENCES)
@example(counts=(256, 256, 256), confidence=0.95)
@example(counts=(256, 20, 20), confidence=0.95)
def test_one_run_mu_claims_no_more_than_gaussian_scores_allow(counts: tuple[int, int, int], confidence: float) -> None:
    """A mu-GDP run whose canaries do not touch each other: each guess is right with chance Phi(mu / 2).

    So ``correct`` of ``guesses`` prove no more than the exact bound on that chance.
    """
    _, guesses, correct = counts
    right = 1 - rate_at_most(guesses - correct, guesses, confidence)
    assert one_run_mu(*counts, confidence) <= max(0.0, 2 * float(ndtri(right))) + 1e-9


@pytest.mark.parametrize(
    ("counts", "reference"),
    [
        ((1000, 100, 75), 1.0059),
        ((256, 256, 256), 9.9612),
        ((256, 256, 200), 2.0875),
        ((256, 26, 26), 3.3561),
        ((2000, 1000, 900), 3.3976),
    ],
)
def test_one_run_mu_has_the_values_of_jax_privacy(counts: tuple[int, int, int], reference: float) -> None:
    """Epsilons at 1e-5 by version 2.0.0; where guesses are good they beat the bound for any mechanism."""
    epsilon = gaussian_epsilon(one_run_mu(*counts, 0.95), 1e-5)
    assert epsilon == pytest.approx(reference, abs=1e-4)
    assert epsilon > one_run_epsilon(*counts, 1e-5, 0.95)


@given(counts=guessed(), confidence=CONFIDENCES)
def test_one_run_bounds_grow_with_what_was_right(counts: tuple[int, int, int], confidence: float) -> None:
    canaries, guesses, correct = counts
    if correct < guesses:
        better = canaries, guesses, correct + 1
        assert one_run_epsilon(*counts, 1e-5, confidence) <= one_run_epsilon(*better, 1e-5, confidence)
        assert one_run_mu(*counts, confidence) <= one_run_mu(*better, confidence)


@pytest.mark.parametrize("counts", [(10, 0, 0), (10, 11, 5), (10, 5, 6), (10, 5, -1)])
def test_counts_that_cannot_be_are_refused(counts: tuple[int, int, int]) -> None:
    for bound in (
        lambda: one_run_epsilon(*counts, 0.0, 0.95),
        lambda: one_run_mu(*counts, 0.95),
    ):
        with pytest.raises(ConfigError, match="guesses"):
            bound()


def test_gaussian_epsilon_of_one() -> None:
    assert gaussian_epsilon(1.0, 1e-5) == pytest.approx(4.3772, abs=5e-5)


@pytest.mark.parametrize("mu", [0.1, 0.5, 2.0, 8.0])
@pytest.mark.parametrize("delta", [1e-9, 1e-5, 1e-2])
def test_gaussian_epsilon_spends_delta_by_the_privacy_losses_definition(mu: float, delta: float) -> None:
    """delta = E[(1 - e^(epsilon - L))+], L normal with mean mu^2 / 2 and deviation mu."""
    epsilon, mean = gaussian_epsilon(mu, delta), mu * mu / 2
    spent, _ = quad(
        lambda loss: norm.pdf(loss, mean, mu) * -math.expm1(epsilon - loss),
        epsilon,
        max(epsilon, mean) + 12 * mu,
        epsabs=0,
        epsrel=1e-8,
        limit=200,
    )
    assert spent == pytest.approx(delta, rel=1e-5)


@given(mu=st.floats(0, 50), more=st.floats(0.01, 5), log_delta=st.floats(-12, -1))
def test_gaussian_epsilon_is_monotone(mu: float, more: float, log_delta: float) -> None:
    delta = 10**log_delta
    epsilon = gaussian_epsilon(mu, delta)
    assert 0 <= epsilon <= gaussian_epsilon(mu + more, delta)
    assert gaussian_epsilon(mu, delta * 2) <= epsilon


@pytest.mark.parametrize("mu", [-1.0, 0.0, 1e-9])
def test_no_mu_is_no_epsilon(mu: float) -> None:
    assert gaussian_epsilon(mu, 1e-5) == 0


@pytest.mark.parametrize(
    ("canaries", "guesses", "correct"),
    [(1000, 100, 75), (256, 256, 256), (256, 256, 200), (256, 26, 26), (256, 128, 64), (2000, 1000, 900), (2, 2, 2)],
)
@pytest.mark.parametrize("delta", [1e-5, 1e-3])
def test_one_run_agrees_with_jax_privacy(canaries: int, guesses: int, correct: int, delta: float) -> None:
    """On mu; on epsilon it has the published theorem, which shows a little less."""
    auditing = pytest.importorskip("jax_privacy.auditing", reason="the independent implementation is not installed")
    counts = canaries, guesses, correct
    theirs = auditing._epsilon_one_run(0.0, *counts, 0.05, delta)
    assert theirs - 0.01 <= one_run_epsilon(*counts, delta, 0.95) <= theirs + 0.3
    theirs = auditing._epsilon_one_run_fdp(0.0, *counts, 0.05, delta)
    assert gaussian_epsilon(one_run_mu(*counts, 0.95), delta) == pytest.approx(theirs, rel=1e-4, abs=1e-4)


def test_bounds_are_plain_numbers() -> None:
    """They go into JSON."""
    bounds = (
        rate_at_most(np.int64(1), np.int64(5), 0.95),  # type: ignore[arg-type]
        epsilon_from_errors(1, 50, 1, 50, 1e-5, 0.95),
        mu_from_errors(1, 50, 1, 50, 0.95),
        ranked_p_value(9, (1,) * 9, 9, 1.0, 1e-5),
        one_run_epsilon(9, 9, 9, 1e-5, 0.95),
        one_run_mu(9, 9, 9, 0.95),
        gaussian_epsilon(1.0, 1e-5),
    )
    assert {type(bound) for bound in bounds} == {float}


def test_hopeless_attacks_show_nothing() -> None:
    assert epsilon_from_errors(100, 100, 100, 100, 1e-5, 0.95) == 0.0
    assert epsilon_from_errors(0, 1, 0, 1, 0.1, 0.95) == 0.0


@pytest.mark.parametrize("delta", [-1.0, 1.0, math.nan])
def test_an_impossible_delta_is_refused(delta: float) -> None:
    for call in (
        lambda: epsilon_from_errors(1, 50, 1, 50, delta, 0.95),
        lambda: one_run_epsilon(100, 100, 90, delta, 0.95),
        lambda: gaussian_epsilon(1.0, delta),
    ):
        with pytest.raises(ConfigError, match=r"^delta: "):
            call()
    assert gaussian_epsilon(1.0, 0.0) == math.inf
