"""The published accountants give the published numbers, whatever those are worth (spec plrvo.md 4, lmo-dp.md 4)."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from mixtures import LMO, lmo, plrvo, release
from scipy.special import log_ndtr

from dptune.core.errors import ConfigError
from dptune.privacy.accountants import PUBLISHED_ACCOUNTANTS, smallest_epsilon
from dptune.privacy.accounting.laplace_mixtures import InverseScale
from dptune.privacy.accounting.mixture_bounds import scalar_renyi
from dptune.privacy.accounting.published_accountants import (
    _Kind,
    _log_moments,
    _moment,
    lmo_dp_epsilon,
    lmo_dp_step_epsilon,
    plrvo_epsilon,
    plrvo_one_coordinate_epsilon,
    surrogate_multiplier,
)
from dptune.privacy.release import Release

CNN = 26010.0
#: epsilon as printed, C, theta (rows 4 to 7 of the table print it ten times too large), k.
TABLE_13 = [
    (0.065, 0.1, 1e-5, 60000),
    (0.171, 0.1, 5e-5, 30000),
    (0.284, 0.3, 8e-5, 10000),
    (0.596, 0.3, 8e-5, 20000),
    (0.757, 0.3, 5e-5, 40000),
    (0.921, 0.3, 6e-5, 40000),
    (0.962, 0.5, 3e-5, 50000),
    (1.172, 0.5, 3e-5, 60000),
    (1.606, 0.5, 6e-5, 40000),
]


@pytest.mark.parametrize(("epsilon", "radius", "theta", "k"), TABLE_13)
def test_plrvo_table_13(epsilon: float, radius: float, theta: float, k: float) -> None:
    """Within 0.002: the first row is printed as 0.065 and comes out as 0.0639."""
    steps = Counter({release(plrvo(k, theta * radius), 0.01, dimension=CNN): 300})
    assert plrvo_epsilon(steps, 1e-5) == pytest.approx(epsilon, abs=0.002)


#: Tables 11 and 12: epsilon as printed, C, theta, k, and the one moment that gives it.
TABLES_11_AND_12 = [
    (0.0457, 3.0, 1.01e-5, 1418, 200),
    (0.7971, 3.0, 1.01e-4, 1418, 74),
    (238.1, 3.0, 1.01e-3, 1418, 74),
    *((epsilon, 1.0, 1.01e-3, k, 74) for epsilon, k in ((1.069, 500), (4.106, 1000), (8.331, 1390), (8.718, 1418))),
    *((epsilon, 1.0, 1.01e-3, k, 74) for epsilon, k in ((8.888, 1430), (9.929, 1500), (20.49, 2000), (66.53, 3000))),
    (363.4, 1.0, 1.01e-3, 5000, 74),
]


@pytest.mark.parametrize(("printed", "radius", "theta", "k", "moment"), TABLES_11_AND_12)
def test_plrvo_tables_11_and_12_are_bounds_of_one_moment(
    printed: float, radius: float, theta: float, k: float, moment: int
) -> None:
    """Their algorithm takes the smallest over the moments, which is up to 25 times less."""

    def epsilon(moment: int) -> float:
        total = 300 * _moment(_Kind(CNN, 0.01, k, theta * radius), moment)
        return total / moment + math.log(moment / (moment + 1)) - math.log(1e-5 * (moment + 1)) / moment

    assert epsilon(moment) == pytest.approx(printed, rel=6e-4)
    assert printed > 1.02 * min(map(epsilon, (5, 8, 10, 16, 24, 32, 255)))


def test_plrvo_largest_moment_of_the_first_row_of_table_13() -> None:
    """.0639 at 182; with a largest Renyi order of 150, .0654, which is cut to the printed .065."""
    total = 300 * _moment(_Kind(CNN, 0.01, 60000.0, 1e-6), 149)
    assert total / 149 + math.log(149 / 150) - math.log(1e-5 * 150) / 149 == pytest.approx(0.0654, abs=5e-5)


def test_plrvo_moments() -> None:
    last = release(plrvo(4e4, 6e-5 * 0.5), 0.01, dimension=CNN)
    assert _moment(_Kind(CNN, 0.01, 4e4, 3e-5), 10) == pytest.approx(0.0266468838, rel=1e-8)
    assert _moment(_Kind(CNN, 0.01, 4e4, 3e-5), 11) == pytest.approx(0.0320187517, rel=1e-8)
    assert plrvo_epsilon(Counter({last: 300}), 1e-5) == pytest.approx(1.606956, rel=1e-6)
    assert _moment(_Kind(CNN, 0.01, 6e4, 1e-6), 1) == pytest.approx(1.2655054612e-6, rel=1e-8)


def test_the_integrated_tail_is_the_sum() -> None:
    law, n = plrvo(4e4, 3e-5), 20_000
    whole = float(_log_moments(np.arange(1.0, n + 1), *law.gamma, 0.01, 11).sum())
    assert _moment(_Kind(n, 0.01, *law.gamma), 11) == pytest.approx(whole, rel=1e-8)


@pytest.mark.parametrize(("k", "theta", "eta"), [(2, 0.1, 2), (50, 0.004, 5), (4e4, 3e-5, 12)])
def test_the_moment_of_one_coordinate_is_the_mixture_of_laplace_moments(k: float, theta: float, eta: int) -> None:
    """G of equation 20 at rate 1, where only the last term is left; 1.0545267489711934 for the first."""
    closed = eta / (2 * eta - 1) * (1 - (eta - 1) * theta) ** -k + (eta - 1) / (2 * eta - 1) * (1 + eta * theta) ** -k
    value = float(_log_moments(np.array([1.0]), k, theta, 1.0, eta - 1)[0])
    assert value == pytest.approx(math.log(closed), rel=1e-9)
    if eta == 2:
        assert closed == pytest.approx(1.0545267489711934, rel=1e-14)


def test_overflow_falls_back_to_logarithms() -> None:
    index = np.array([1.0, 2.0])
    plain = _log_moments(index, 100.0, 0.01, 0.5, 40)
    assert np.isfinite(plain).all()
    huge = _log_moments(index, 3000.0, 0.01, 0.5, 60)
    assert np.isfinite(huge).all()
    assert huge[0] > 700


def test_plrvo_released_configurations_count_one_coordinate() -> None:
    law = plrvo(73.1772575250836, 0.0146055627138098 * 1.18888888888889)
    steps, delta = Counter({release(law, 1024 / 67349, dimension=124.6e6): 197}), 1 / (2 * 67349)
    assert plrvo_one_coordinate_epsilon(steps, delta) == pytest.approx(1.12686069, rel=1e-7)
    assert plrvo_epsilon(steps, delta) == pytest.approx(2.8958, rel=1e-4)


def test_what_file_14_of_the_released_claims_and_certifies() -> None:
    """The file of PLRV-O's released SST-2 logs: .923 of one coordinate, 2.302 in all."""
    law = plrvo(53.0653266331658, 0.0158332201548282 * 1.27586206896552)
    steps, delta = Counter({release(law, 1024 / 67349, dimension=124.6e6): 197}), 1 / (2 * 67349)
    assert plrvo_one_coordinate_epsilon(steps, delta) == pytest.approx(0.922878, abs=1e-6)
    assert smallest_epsilon(steps, delta) == pytest.approx(2.302387, rel=1e-4)


@pytest.mark.parametrize(("batches", "left_out"), [(57, 0.0), (56, 0.6 / 56.6)])
def test_a_shuffled_epoch_costs_more_than_three_poisson_ones(batches: int, left_out: float) -> None:
    """The noise of PLRV-O's Gaussian logs, 1,190 of 67,349 rows in a batch: a lower bound (Chua et al. 2024).

    All other rows pull down and the one pulls up, or is empty: its batch's sum is then two or one above that of others.
    The event is that the largest of the noisy sums exceeds a cut. ``left_out``: chance that the row is in no batch,
    where the incomplete last one is dropped.
    """
    noise, delta = 1.3521, 1 / (2 * 67349)
    steps = Counter({Release(sample_rate=1024 / 67349, noise_multiplier=noise, sensitivity=1.0): 197})
    assert smallest_epsilon(steps, delta) == pytest.approx(0.771, abs=1e-3)
    cuts = np.linspace(-2, 12, 1401)
    below = [np.exp((batches - 1) * log_ndtr(cuts / noise) + log_ndtr((cuts - up) / noise)) for up in (0, 1, 2)]
    within, without = (1 - left_out) * (1 - below[2]) + left_out * (1 - below[0]), 1 - below[1]
    assert np.log(np.maximum(within - delta, 1e-300) / without).max() > 2.4


def test_lmo_dp_steps() -> None:
    expected = {"T0.3": 0.293213, "T0.7": 0.693213, "T2": 1.928093, "T3": 2.996477, "T5": 4.921457}
    within = {"T0.3": 1.3083, "T0.7": 1.7083, "T2": 4.1743, "T3": 5.1272, "T5": 29.4933}
    for name, law in LMO.items():
        assert lmo_dp_step_epsilon(law, 1e-10, in_domain=False) == pytest.approx(expected[name], rel=2e-6)
        assert lmo_dp_step_epsilon(law, 1e-10, in_domain=True) == pytest.approx(within[name], rel=1e-4)
    stored = lmo(0.4, 0.1, 0.3, 1, 2, 5, 0, 1), lmo(0.9, 0.1, 0.5, 1, 2, 1, 1, 2)
    found = [lmo_dp_step_epsilon(law, 1e-5, in_domain=False) for law in stored]
    assert found == pytest.approx([0.295979925, 1.498598759], rel=1e-8)


def test_equation_4() -> None:
    orders = np.array([1.5, 2, 5, 10, 20])
    expected = [0.035809115, 0.047383713, 0.107760278, 0.172335500, 0.305373896]
    np.testing.assert_allclose(scalar_renyi(LMO["T0.3"], 1.0, orders), expected, rtol=1e-7)
    assert scalar_renyi(LMO["T0.3"], 1.0, np.array([8.0]))[0] == pytest.approx(0.150681918287, rel=1e-11)
    assert math.isinf(scalar_renyi(LMO["T2"], 1.0, np.array([20.0]))[0])


def test_lmo_dp_surrogates() -> None:
    named = {name: release(LMO[name], 16 / 42061, step_epsilon=float(name[1:])) for name in LMO}
    table_2 = [lmo_dp_epsilon(Counter({named[name]: 410}), 8e-6, 127) for name in ("T0.3", "T0.7", "T2", "T3")]
    assert table_2 == pytest.approx([0.046807, 0.046870, 0.067623, 0.176436], abs=6e-7)
    sst2 = {name: release(LMO[name], 2048 / 67350, step_epsilon=float(name[1:])) for name in LMO}
    totals = [lmo_dp_epsilon(Counter({one: 192}), 1e-10) for one in sst2.values()]
    assert totals == pytest.approx([0.157432, 0.260645, 0.823042, 1.346922, 2.945015], abs=1e-6)
    multipliers = [surrogate_multiplier(one, 1e-10) for one in sst2.values()][:4]
    assert multipliers == pytest.approx([22.729811, 9.741348, 3.409472, 2.272981], rel=1e-6)
    own = release(LMO["T5"], 2048 / 67350)  # no epsilon is named: equation 4's, 4.921457
    assert lmo_dp_epsilon(Counter({own: 192}), 1e-10) == pytest.approx(2.864422, abs=1e-6)


@pytest.mark.parametrize("name", ["plrvo", "plrvo_one_coordinate", "lmo_dp"])
def test_other_noise_is_refused_and_none_is_infinite(name: str) -> None:
    accountant = PUBLISHED_ACCOUNTANTS[name]
    with pytest.raises(ConfigError, match="gdp_clt"):
        accountant(Counter({Release(0.1, 1.0): 3}), 1e-5)
    assert math.isinf(accountant(Counter({Release(0.1, 0.0, noise="none"): 3}), 1e-5))


def test_plrvo_needs_its_dimension_and_its_own_noise() -> None:
    assert math.isinf(plrvo_epsilon(Counter({release(plrvo(100, 0.01), 0.1): 1}), 1e-5))
    with pytest.raises(ConfigError, match="Gamma"):
        plrvo_epsilon(Counter({release(LMO["T0.3"], 0.1, dimension=9.0): 1}), 1e-5)
    no_moment = release(plrvo(3, 1.5), 0.1, dimension=9.0)
    assert math.isinf(plrvo_epsilon(Counter({no_moment: 1}), 1e-5))


def test_nothing_released_costs_what_its_conversion_gives_and_no_error() -> None:
    """The ledger of a run that was killed before its first release."""
    assert lmo_dp_epsilon(Counter(), 1e-5) >= 0
    assert plrvo_epsilon(Counter(), 1e-5) >= 0


def _as_the_authors_code_loops(law: InverseScale, delta: float) -> float:
    """Order by order in plain floats; an order whose value is complex, too large, or 0 or less is infinite."""
    (k, theta), (low, high) = law.gamma, law.uniform

    def moment(t: float) -> float:
        uniform = (math.exp(t * high) - math.exp(t * low)) / (t * (high - low))
        return (1 - theta * t) ** -k / (1 - law.exponential * t) * uniform

    best = math.inf
    for order in range(2, 129):
        try:
            value = (order * moment(order - 1) + (order - 1) * moment(-order)) / (2 * order - 1)
            renyi = math.log(value) / (order - 1)
        except (OverflowError, ZeroDivisionError, ValueError, TypeError):
            continue
        if renyi > 0:
            best = min(best, renyi + math.log1p(-1 / order) - math.log(delta * order) / (order - 1))
    return max(best, 0.0)


@pytest.mark.parametrize("shape", [0.5, 1.0, 2.0])
def test_lmo_dp_is_priced_as_its_authors_code_does(shape: float) -> None:
    """On laws whose formula is negative at some orders, too: those orders once made the price too small."""
    rng = np.random.default_rng(int(10 * shape))
    for _ in range(60):
        law = InverseScale(
            gamma=(shape, rng.uniform(0.05, 0.95)),
            exponential=rng.uniform(0.02, 0.95),
            uniform=(low := rng.uniform(0, 7), low + rng.uniform(0.1, 1)),
        )
        expected = _as_the_authors_code_loops(law, 1e-10)
        assert lmo_dp_step_epsilon(law, 1e-10, in_domain=False) == pytest.approx(expected, rel=1e-7)


def test_a_law_whose_price_was_once_too_small() -> None:
    law = InverseScale(gamma=(2.0, 0.9), exponential=0.04, uniform=(0.0, 0.1))
    assert lmo_dp_step_epsilon(law, 1e-10, in_domain=False) == pytest.approx(10.6283, abs=1e-4)
