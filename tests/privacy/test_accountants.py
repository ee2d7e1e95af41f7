"""Epsilons against the reference table, closed forms and an independent accountant."""

from __future__ import annotations

import logging
import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dptune.core.errors import ConfigError
from dptune.privacy.accountants import (
    epsilons,
    gdp_clt_epsilon,
    gdp_delta,
    gdp_epsilon,
    pld_epsilon,
    published_epsilon,
    quick_epsilon,
    rdp_epsilon,
    repriced_epsilon,
)
from dptune.privacy.accounting.renyi_filter import RenyiFilter
from dptune.privacy.release import Composition, Release

DELTA = 1e-5
RLDP_RATE, RLDP_STEPS = 16 / 73271, 13740

few = settings(max_examples=3)


def steps(sample_rate: float, noise_multiplier: float, count: int, **release: object) -> Composition:
    return Counter({Release(sample_rate, noise_multiplier, **release): count})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("q", "z", "count", "pld", "rdp", "clt"),
    [(0.01, 1.0, 1000, 1.8282, 2.1014, 1.6177), (0.01, 1.1, 10000, 5.1926, 5.632, 5.0647)],
)
def test_reference_values(q: float, z: float, count: int, pld: float, rdp: float, clt: float) -> None:
    composition = steps(q, z, count)
    assert pld_epsilon(composition, DELTA) == pytest.approx(pld, rel=1e-3)
    assert rdp_epsilon(composition, DELTA) == pytest.approx(rdp, rel=1e-2)
    assert gdp_clt_epsilon(composition, DELTA) == pytest.approx(clt, rel=1e-4)


@pytest.mark.parametrize(("z", "count"), [(1.0, 1), (2.0, 4)])
def test_without_sampling_the_tight_accountant_is_exact_gaussian_dp(z: float, count: int) -> None:
    assert gdp_epsilon(1.0, DELTA) == pytest.approx(4.37718, abs=1e-5)
    assert pld_epsilon(steps(1.0, z, count), DELTA) == pytest.approx(gdp_epsilon(1.0, DELTA), rel=1e-5)


@pytest.mark.parametrize(("z", "count", "clt"), [(1.0, 1, 6.007), (2.0, 4, 4.714)])
def test_without_sampling_the_central_limit_is_wrong(z: float, count: int, clt: float) -> None:
    assert gdp_clt_epsilon(steps(1.0, z, count), DELTA) == pytest.approx(clt, abs=1e-3)


@pytest.mark.parametrize(
    ("target", "z_clt", "truth_at_clt", "z_pld"),
    [
        (0.5, 0.5375, 1.495, 0.6338),
        (2.0, 0.4099, 5.40, 0.5111),
        (4.0, 0.3733, 7.77, 0.4417),
        (5.0, 0.3637, 8.62, 0.4180),
        (8.0, 0.3460, 10.5, 0.3706),
    ],
)
def test_rldp_setting_truth_at_published_noise(target: float, z_clt: float, truth_at_clt: float, z_pld: float) -> None:
    published = steps(RLDP_RATE, z_clt, RLDP_STEPS)
    assert gdp_clt_epsilon(published, DELTA) == pytest.approx(target, rel=3e-3)
    assert pld_epsilon(published, DELTA) == pytest.approx(truth_at_clt, rel=3e-3)
    assert pld_epsilon(steps(RLDP_RATE, z_pld, RLDP_STEPS), DELTA) == pytest.approx(target, rel=2e-3)


def test_noise_of_24_pairs_charged_as_one_is_828_and_not_2() -> None:
    pairwise = epsilons(steps(RLDP_RATE, 0.4099, RLDP_STEPS, sensitivity=math.sqrt(24)), DELTA)
    assert pairwise.published == pytest.approx(2.0, rel=2e-3)
    assert pairwise.noise_only == pytest.approx(828, rel=5e-3)


@pytest.mark.parametrize(("pairs", "sigma", "truth"), [(12, 0.4099, 369), (64, 0.4099, 2363), (24, 0.5375, 444)])
def test_noise_of_pairs_other_sizes(pairs: int, sigma: float, truth: float) -> None:
    composition = steps(RLDP_RATE, sigma, RLDP_STEPS, sensitivity=math.sqrt(pairs))
    assert pld_epsilon(composition, DELTA) == pytest.approx(truth, rel=1e-2)


def test_central_limit_is_not_equation_7_as_printed() -> None:
    """RLDP prints q sqrt(T) (exp(1/z) - 1): no square on z, no root over the bracket."""
    z = 0.3306
    printed = RLDP_RATE * math.sqrt(RLDP_STEPS) * math.expm1(1 / z)
    assert gdp_epsilon(printed, DELTA) == pytest.approx(2.0, rel=3e-3)
    assert gdp_clt_epsilon(steps(RLDP_RATE, z, RLDP_STEPS), DELTA) > 10
    assert pld_epsilon(steps(RLDP_RATE, z, RLDP_STEPS), DELTA) == pytest.approx(12.6, rel=5e-3)


@pytest.mark.parametrize(
    ("first", "second", "repriced", "clt", "rdp", "pld"),
    [(0.9, 1.1, 1.13, 3.12, 9.01, 7.14), (0.5, 2.0, 0.15, 3.6e6, 67.5, 57.5)],
)
def test_two_phases_are_composed_and_not_repriced(
    first: float, second: float, repriced: float, clt: float, rdp: float, pld: float
) -> None:
    """RLDP's Algorithm 1 prices all steps at the last sigma: more noise at the end erases what was spent."""
    phases = [Release(RLDP_RATE, 0.4099 * factor) for factor in (first, second)]
    composition = Counter(dict.fromkeys(phases, RLDP_STEPS // 2))
    assert repriced_epsilon(phases[-1], RLDP_STEPS, DELTA) == pytest.approx(repriced, abs=6e-3)
    assert gdp_clt_epsilon(composition, DELTA) == pytest.approx(clt, rel=5e-3)
    assert rdp_epsilon(composition, DELTA) == pytest.approx(rdp, rel=5e-3)
    assert pld_epsilon(composition, DELTA) == pytest.approx(pld, rel=2e-3)


@given(first=st.floats(0.3, 2.0), second=st.floats(0.3, 2.0), counts=st.tuples(*[st.integers(1, 5000)] * 2))
def test_repricing_is_right_only_while_the_noise_stays(first: float, second: float, counts: tuple[int, int]) -> None:
    composition = steps(0.001, first, counts[0]) + steps(0.001, second, counts[1])
    repriced = repriced_epsilon(Release(0.001, second), sum(counts), DELTA)
    composed = gdp_clt_epsilon(composition, DELTA)
    assert (repriced - composed) * (first - second) >= 0 or repriced == pytest.approx(composed, abs=1e-9)
    assert repriced_epsilon(Release(0.001, second), counts[1], DELTA) <= composed + 1e-9


def test_tight_epsilon_agrees_with_opacus_prv_within_its_error() -> None:
    prv = pytest.importorskip("opacus.accountants").PRVAccountant()
    prv.history = [(1.0, 0.01, 1000)]
    theirs = prv.get_epsilon(DELTA, eps_error=0.01)
    assert pld_epsilon(steps(0.01, 1.0, 1000), DELTA) == pytest.approx(theirs, abs=0.011)


@few
@given(q=st.floats(0.001, 0.05), z=st.floats(0.7, 3.0), count=st.integers(1, 500))
def test_tight_epsilon_is_at_most_renyi(q: float, z: float, count: int) -> None:
    composition = steps(q, z, count)
    assert pld_epsilon(composition, DELTA) <= rdp_epsilon(composition, DELTA) + 1e-3


@few
@given(q=st.floats(0.001, 0.05), z=st.floats(0.7, 3.0), count=st.integers(1, 300), more=st.floats(1.05, 2.0))
def test_every_accountant_is_monotone(q: float, z: float, count: int, more: float) -> None:
    for accountant in (pld_epsilon, rdp_epsilon, gdp_clt_epsilon):
        base = accountant(steps(q, z, count), DELTA)
        assert accountant(steps(q, z * more, count), DELTA) <= base + 1e-3
        assert accountant(steps(q * more, z, count), DELTA) >= base - 1e-3
        assert accountant(steps(q, z, math.ceil(count * more)), DELTA) >= base - 1e-3


@given(mu=st.floats(0.01, 30.0), log_delta=st.floats(-12, -1))
def test_gaussian_dp_conversion_inverts(mu: float, log_delta: float) -> None:
    delta = 10**log_delta
    epsilon = gdp_epsilon(mu, delta)
    assert epsilon >= 0
    if epsilon > 0:
        assert gdp_delta(mu, epsilon) == pytest.approx(delta, rel=1e-4)


def test_sensitivity_only_counts_relative_to_noise() -> None:
    assert pld_epsilon(steps(0.01, 2.0, 50, sensitivity=2.0), DELTA) == pld_epsilon(steps(0.01, 1.0, 50), DELTA)


def test_releases_that_differ_in_name_only_all_count() -> None:
    """Equal rate and effective multiplier, different statistics or units: none may replace the other."""
    mixed = steps(0.01, 1.0, 20) + steps(0.01, 2.0, 30, sensitivity=2.0) + steps(0.01, 1.0, 50, statistics=("count",))
    for accountant in (pld_epsilon, rdp_epsilon):
        assert accountant(mixed, DELTA) == accountant(steps(0.01, 1.0, 100), DELTA)


def test_one_noiseless_release_among_many_is_infinite() -> None:
    mixed = steps(0.01, 1.0, 10) + Counter({Release(0.01, 0.0, noise="none"): 1})
    assert [accountant(mixed, DELTA) for accountant in (pld_epsilon, rdp_epsilon, gdp_clt_epsilon)] == [math.inf] * 3


def test_nothing_released_costs_nothing() -> None:
    assert epsilons(Counter(), DELTA).certified == 0.0


def test_raw_statistic_makes_certified_infinite_and_is_named() -> None:
    priced = epsilons(steps(0.01, 1.0, 10, raw_inputs=("batch quartiles",)), DELTA)
    assert math.isfinite(priced.noise_only)
    assert priced.certified == math.inf
    assert priced.leaks == ("batch quartiles",)


def test_one_leaky_release_among_many_is_enough() -> None:
    composition = steps(0.01, 1.0, 10) + steps(0.01, 1.0, 1, raw_inputs=("loss",))
    assert epsilons(composition, DELTA).certified == math.inf


def test_no_noise_is_infinite_everywhere() -> None:
    priced = epsilons(Counter({Release(0.01, 0.0, noise="none"): 1}), DELTA)
    assert (priced.published, priced.noise_only, priced.certified) == (math.inf,) * 3
    assert priced.leaks


def test_run_leak_is_carried_into_the_certified_epsilon() -> None:
    priced = epsilons(steps(0.01, 1.0, 10), DELTA, run_leaks=("fixed seed",))
    assert priced.certified == math.inf
    assert priced.leaks == ("fixed seed",)


def test_orders_that_do_not_converge_are_no_users_concern(caplog: pytest.LogCaptureFixture) -> None:
    """Orders near 1 do not, at so little noise; other warnings of the library are still heard."""
    assert math.isfinite(rdp_epsilon(steps(0.013987, 0.404865, 72), DELTA))
    assert not caplog.records
    logging.getLogger("absl").warning("something else")
    assert len(caplog.records) == 1


def test_adaptive_noise_needs_a_filter() -> None:
    adaptive = steps(0.01, 1.0, 10, adaptive=True)
    assert epsilons(adaptive, DELTA).certified == math.inf
    planned = RenyiFilter.plan(2.0, DELTA, 0.01, 10)
    certified = epsilons(adaptive, DELTA, renyi_filter=planned).certified
    assert pld_epsilon(steps(0.01, 1.0, 10), DELTA) < certified == pytest.approx(2.0, rel=1e-6)


def test_breaking_the_filter_is_infinite() -> None:
    broken = steps(0.01, 0.3, 10**6, adaptive=True)
    planned = RenyiFilter.plan(2.0, DELTA, 0.01, 10)
    assert epsilons(broken, DELTA, renyi_filter=planned).certified == math.inf


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("mu", [1e3, 1e4, 1e13, 1e40])
def test_gaussian_dp_of_hardly_any_noise_is_about_half_its_mu_squared(mu: float) -> None:
    """Delta is Phi(mu / 2 - epsilon / mu) less what is far smaller: 1e-5 at mu / 2 - epsilon / mu = -4.265."""
    assert gdp_epsilon(mu, DELTA) == pytest.approx(mu**2 / 2 + 4.265 * mu, rel=3e-3)


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, 2.0, math.nan, math.inf])
@pytest.mark.parametrize("accountant", [pld_epsilon, rdp_epsilon, gdp_clt_epsilon, epsilons])
def test_bad_delta_is_refused(accountant: object, delta: float) -> None:
    with pytest.raises(ConfigError, match="delta"):
        accountant(steps(0.01, 1.0, 1), delta)  # type: ignore[operator]


def test_unknown_accountant_is_refused() -> None:
    with pytest.raises(ConfigError, match="published_accountant"):
        epsilons(steps(0.01, 1.0, 1), DELTA, published_accountant="moments")
    with pytest.raises(ConfigError, match="published_accountant"):
        published_epsilon("moments", steps(0.01, 1.0, 1), DELTA)


@given(low=st.floats(0.3, 20.0), spread=st.floats(0.01, 3.0), count=st.integers(1025, 3000))
def test_noise_of_very_many_kinds_is_rounded_and_never_up(low: float, spread: float, count: int) -> None:
    """A ledger whose noise moved a thousand times and more is priced in seconds, from above; at rate 1 the truth is
    known.
    """
    composition = Counter(Release(1.0, low * math.exp(spread * index / count)) for index in range(count))
    mu = math.sqrt(sum(number / release.noise_multiplier**2 for release, number in composition.items()))
    exact, found = gdp_epsilon(mu, 1e-5), pld_epsilon(composition, 1e-5)
    assert exact * (1 - 1e-9) <= found <= exact * 1.011
    fewer = Counter(dict(list(composition.items())[:1024]))
    assert pld_epsilon(fewer, 1e-5) <= found, "a part never costs more than the whole"


@pytest.mark.parametrize("accountant", ["gdp_clt", "pure"])
def test_a_family_that_no_accountant_knows_costs_infinity(monkeypatch: pytest.MonkeyPatch, accountant: str) -> None:
    """Whoever adds one and forgets the accountants gets no finite epsilon: it is not taken for Gaussian noise."""
    monkeypatch.setattr("dptune.privacy.release.NOISES", ("novel",))
    novel = Counter({Release(0.01, 50.0, noise="novel"): 3})
    prices = epsilons(novel, 1e-5, published_accountant=accountant)
    assert (prices.noise_only, prices.certified) == (math.inf, math.inf)
    assert math.isinf(quick_epsilon(novel, 1e-5))
    assert math.isinf(rdp_epsilon(novel, 1e-5))
