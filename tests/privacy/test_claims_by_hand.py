"""The papers' accountants equal plain loops over their own algorithms, on random parameters and at their edges.

PLRV-O's algorithm 2 and equation 9, LMO-DP's equation 4, its search grid and its totals, and the epsilon of DP policy
gradient's appendix B.1. Nothing here uses the library's own formulas.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import yaml
from mixtures import LMO, lmo, plrvo, release
from scipy.integrate import quad
from scipy.stats import expon, gamma

from dptune.mechanisms.noises.laplace_noise import Plrvo
from dptune.mechanisms.published_search import USEFUL, PlrvoProblem, _grid
from dptune.policy.method import Dppg
from dptune.privacy.accountants import smallest_epsilon
from dptune.privacy.accounting.laplace_mixtures import InverseScale
from dptune.privacy.accounting.mixture_bounds import scalar_renyi
from dptune.privacy.accounting.published_accountants import (
    _Kind,
    _moment,
    lmo_dp_epsilon,
    lmo_dp_step_epsilon,
    plrvo_epsilon,
)

CLAIMED = Path(__file__).parents[2] / "tasks" / "report" / "claimed.yaml"
Parts = tuple[float, float, float, float, float, float, float, float]  # a1, a2, a3, theta, k, lambda, a, b


def algorithm_2(moment: int, rate: float, k: float, theta: float, coordinates: int) -> float:
    """alpha(lambda) = sum_i log sum_eta w_eta G(x_i, eta), x_i = sqrt(i) - sqrt(i - 1); theta times C, as always."""
    n, total = moment + 1, 0.0
    for i in range(1, coordinates + 1):
        x, excess = 1 / (math.sqrt(i) + math.sqrt(i - 1)), []
        for eta in range(2, n + 1):  # G is 1 at 0 and 1, and the weights add up to 1
            weight = math.comb(n, eta) * (1 - rate) ** (n - eta) * rate**eta
            up = eta / (2 * eta - 1) * math.expm1(-k * math.log1p(-(eta - 1) * x * theta))
            down = (eta - 1) / (2 * eta - 1) * math.expm1(-k * math.log1p(eta * x * theta))
            excess.append(weight * (up + down))
        total += math.log1p(math.fsum(excess))
    return total


@pytest.mark.parametrize("seed", range(25))
def test_moments_are_those_of_algorithm_2(seed: int) -> None:
    rng = np.random.default_rng(seed)
    k, moment = float(10 ** rng.uniform(0.5, 4.7)), int(rng.integers(1, 30))
    theta = float(rng.uniform(0.02, 0.95) / moment * min(1, 40 / k))
    rate, coordinates = float(rng.choice([0.001, 0.01, 0.05, 0.5, 1.0])), int(rng.choice([1, 2, 3, 10, 50, 300]))
    by_hand = algorithm_2(moment, rate, k, theta, coordinates)
    assert _moment(_Kind(coordinates, rate, k, theta), moment) == pytest.approx(by_hand, rel=1e-9, abs=1e-18)


@pytest.mark.parametrize("seed", range(12))
def test_epsilon_is_the_least_over_every_moment(seed: int) -> None:
    """Equation 9 at each order up to 255, where the library searches."""
    rng = np.random.default_rng(100 + seed)
    k, rate = float(10 ** rng.uniform(0.5, 4.5)), float(rng.choice([0.002, 0.01, 0.05, 0.3, 1.0]))
    theta = min(float(10 ** rng.uniform(-1, 1.2)) / k / 30, 0.5)
    coordinates, steps, delta = int(rng.choice([1, 3])), int(rng.choice([1, 50, 2000])), float(rng.choice([1e-5, 1e-2]))
    orders = range(1, min(255, math.ceil(1 / theta) - 1) + 1)
    # Powers such as (1 - rate)^(n - eta) stay within float64 at these orders, and so do binomials.
    found = [
        steps * algorithm_2(n, rate, k, theta, coordinates) / n
        + math.log(n / (n + 1)) - (math.log(delta) + math.log(n + 1)) / n
        for n in orders
        if k * -math.log1p(-n * theta) < 600
    ]  # fmt: skip
    priced = plrvo_epsilon(Counter({release(plrvo(k, theta), rate, dimension=float(coordinates)): steps}), delta)
    assert priced == pytest.approx(max(0.0, min(found)), rel=1e-8, abs=1e-12)


def test_the_papers_thousand_moments_lower_small_claims_alone() -> None:
    """Section 5.1 has about 1,000. k 60,000, C .1, 26,010 coordinates, rate .01, 300 steps, delta 1e-5."""

    def claim(theta: float, moments: int) -> float:
        noise = Plrvo(k=6e4, theta=theta, max_grad_norm=0.1, dimension=26010, moments=moments)
        one = release(noise.law(noise.noise_multiplier), 0.01, **dict(noise.claims))
        return plrvo_epsilon(Counter({one: 300}), 1e-5)

    assert claim(5e-7, 255) == pytest.approx(0.0196, abs=5e-5)
    assert claim(5e-7, 1000) == pytest.approx(0.0041, abs=5e-5)
    assert claim(1e-5, 1000) == claim(1e-5, 255) == pytest.approx(0.0639, abs=5e-5)


def test_the_papers_thousand_moments_reach_targets_that_200_cannot() -> None:
    budget = (0.02, 1e-5, 0.01, 300, 500, 0.1)
    assert PlrvoProblem(*budget, largest_moment=1000).signal(6e4) > 0.01
    with pytest.raises(Exception, match="epsilon"):
        PlrvoProblem(*budget, largest_moment=200).signal(6e4)


def log_mgf(t: float, parts: Parts) -> float:
    """The log of the product of the three moment generating functions, within their domain."""
    a1, a2, a3, theta, k, rate, low, high = parts
    found = -k * math.log1p(-a1 * t * theta) - math.log1p(-a2 * t / rate)
    if a3 and t:
        width = a3 * t * (high - low)
        found += a3 * t * high + math.log(-math.expm1(-width) / width)
    return found


def equation_4(order: float, parts: Parts) -> float:
    """The Renyi bound of one coordinate; infinite outside the domain."""
    a1, a2, _, theta, _, rate, *_ = parts
    if a1 * (order - 1) * theta >= 1 or a2 * (order - 1) >= rate:
        return math.inf
    up = math.log(order / (2 * order - 1)) + log_mgf(order - 1, parts)
    down = math.log((order - 1) / (2 * order - 1)) + log_mgf(-order, parts)
    return (up + math.log1p(math.exp(down - up))) / (order - 1)


def some_parts(rng: np.random.Generator) -> Parts:
    weights = [float(rng.choice([0.0, 0.1, 0.3, 0.9])) for _ in range(3)]
    if not weights[2] and not (weights[0] and weights[1]):
        weights[2] = 0.3
    theta, k = float(rng.choice([0.5, 1, 3, 7.5])), float(rng.choice([0.5, 1, 2, 3.3]))
    rate, low = float(rng.choice([0.1, 0.5, 1, 5])), float(rng.integers(0, 9))
    return (weights[0], weights[1], weights[2], theta, k, rate, low, low + 1)


def law_of(parts: Parts) -> InverseScale:
    a1, a2, a3, theta, k, rate, low, high = parts
    return InverseScale(
        gamma=(k, a1 * theta) if a1 else (0.0, 0.0),
        exponential=a2 / rate if a2 else 0.0,
        uniform=(a3 * low, a3 * high) if a3 else (0.0, 0.0),
    )


@pytest.mark.parametrize("seed", range(30))
def test_equation_4_and_the_step_by_loops(seed: int) -> None:
    """With parts left out at random; the step's epsilon is the least conversion over the orders 2 to 128."""
    parts, delta = some_parts(np.random.default_rng(seed)), (1e-10, 1e-5, 8e-6)[seed % 3]
    law, orders = law_of(parts), [1.1, 1.5, 2.0, 3.0, 8.0, 20.0, 128.0]
    assert list(scalar_renyi(law, 1.0, np.array(orders))) == pytest.approx(
        [equation_4(order, parts) for order in orders], rel=1e-8
    )
    found = [
        renyi + math.log(1 - 1 / order) - math.log(order * delta) / (order - 1)
        for order in range(2, 129)
        if math.isfinite(renyi := equation_4(order, parts)) and delta**2 + math.expm1(-renyi) < 0
    ]
    assert lmo_dp_step_epsilon(law, delta, in_domain=True) == pytest.approx(min(found, default=math.inf), rel=1e-8)


@pytest.mark.parametrize("seed", range(6))
def test_the_moments_of_the_inverse_scale_are_integrals_over_its_parts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    parts, t = some_parts(rng), -float(10 ** rng.uniform(-2, 1.5))
    a1, a2, a3, theta, k, rate, low, high = parts
    k = max(k, 1.0)  # below 1 the density has a pole
    law = law_of((a1, a2, a3, theta, k, rate, low, high))
    one, two = gamma(k, scale=theta), expon(scale=1 / rate)
    exact = (
        quad(lambda y: math.exp(a1 * t * y) * one.pdf(y), 0, math.inf, epsrel=1e-11, limit=400)[0]
        * quad(lambda y: math.exp(a2 * t * y) * two.pdf(y), 0, math.inf, epsrel=1e-11, limit=400)[0]
        * quad(lambda y: math.exp(a3 * t * y), low, high, epsrel=1e-11)[0]
    )
    assert math.exp(float(law.log_mgf(t))) == pytest.approx(exact, rel=1e-7)


def sampled_gaussian(rate: float, deviation: float, order: int) -> float:
    """Integer-order Renyi divergence of a Poisson-sampled Gaussian (Mironov et al. 2019)."""
    terms = [
        math.comb(order, j) * (1 - rate) ** (order - j) * rate**j * math.exp(j * (j - 1) / (2 * deviation**2))
        for j in range(order + 1)
    ]
    return math.log(math.fsum(terms)) / (order - 1)


@pytest.mark.parametrize("preset", ["T0.3", "T0.7"])
@pytest.mark.parametrize(("rate", "steps", "delta"), [(16 / 42061, 410, 8e-6), (2048 / 67350, 192, 1e-10)])
def test_totals_are_those_of_a_gaussian_of_classical_noise(preset: str, rate: float, steps: int, delta: float) -> None:
    epsilon = float(preset[1:])
    deviation = math.sqrt(2 * math.log(1.25 / delta)) / epsilon
    by_hand = min(
        steps * sampled_gaussian(rate, deviation, order) + math.log(1 - 1 / order)
        - math.log(order * delta) / (order - 1)
        for order in range(2, 129)
    )  # fmt: skip
    one = release(LMO[preset], rate, step_epsilon=epsilon)
    assert lmo_dp_epsilon(Counter({one: steps}), delta) == pytest.approx(by_hand, rel=1e-9)


def test_the_grid_of_lmo_dps_search_by_loops() -> None:
    """300 random points: the claimed epsilon of a step as the authors' code has it, and P(|z| <= .9)."""
    delta, tenths = 1e-10, [one / 10 for one in range(1, 10)]
    shapes = [(1.0, 2.0), (2.0, 2.0), (3.0, 2.0), (5.0, 1.0), (9.0, 0.5), (7.5, 1.0), (0.5, 1.0)]
    points = list(
        itertools.product(
            itertools.product(tenths, shapes),
            itertools.product(tenths, [0.1, 0.5, 1.0, 5.0]),
            itertools.product(tenths, range(9)),
        )
    )
    epsilons, useful = _grid(delta)
    assert len(points) == len(epsilons)
    for index in np.random.default_rng(0).integers(0, len(points), 300):
        (a1, (theta, k)), (a2, rate), (a3, low) = points[index]
        parts = (a1, a2, a3, theta, k, rate, float(low), low + 1.0)
        assert useful[index] == pytest.approx(-math.expm1(log_mgf(-USEFUL, parts)), rel=1e-12)
        if a1 * theta >= 1 or a2 >= rate:  # order 2 is outside the domain: the point is not taken
            assert math.isinf(epsilons[index])
            continue
        law = lmo(a1, a2, a3, theta, k, rate, float(low), low + 1.0)
        assert epsilons[index] == pytest.approx(lmo_dp_step_epsilon(law, delta, in_domain=False), rel=1e-7)


@pytest.mark.parametrize("delta", [1e-5, 1e-3, 1e-2])
@pytest.mark.parametrize("noise", [0.05, 0.5, 1, 3, 3.1, 3.2, 4.8, 4.9, 20])
def test_the_rule_of_appendix_b_1(noise: float, delta: float) -> None:
    """epsilon = C1 / z where z > C1, else (1 + 2 sqrt(2) C2 z) / (2 z^2)."""
    c1 = math.sqrt(2 * math.log(1.25 / delta))
    c2 = math.sqrt(math.log(2 / (math.sqrt(16 * delta + 1) - 1)))
    by_hand = c1 / noise if noise > c1 else (1 + 2 * math.sqrt(2) * c2 * noise) / (2 * noise**2)
    assert Dppg(noise_multiplier=noise, critic="none").price(delta).published == pytest.approx(by_hand, rel=1e-12)


#: LMO-DP's table 3: the total that it claims, and what the released parameters certify if batches are Poisson samples.
TABLE_3 = {"T0.3": 0.6553, "T0.7": 2.258, "T2": 25.13, "T3": 90.78, "T5": 807.3}


@pytest.mark.parametrize(("preset", "certified"), TABLE_3.items())
def test_what_table_3_of_lmo_dp_certifies(preset: str, certified: float) -> None:
    """2,048 of 67,349 rows a step, six epochs of 33 steps; the benchmarks' page has these figures, rounded up."""
    steps = Counter({release(LMO[preset], 2048 / 67349): 198})
    assert certified * (1 - 1e-3) < smallest_epsilon(steps, 1e-10) <= certified
    printed = yaml.safe_load(CLAIMED.read_text(encoding="utf-8"))["glue sst2"]["rows"]
    assert certified in next(row["certified_if_poisson"] for row in printed if row["mechanism"] == "LMO-DP").values()


#: LMO-DP's figure 1: the step's epsilon, the mean reduction in percent as printed, and the parameters that give it.
FIGURE_1 = [
    (0.3, 95.13, (0.1, 0.9, 0.1, 7.5, 1, 1, 1, 2), 73.12),
    (0.7, 92.19, (0.1, 0.9, 0.1, 7.5, 1, 1, 5, 6), 79.06),
    (2.0, 87.71, (0.1, 0.9, 0.2, 7.5, 1, 1, 8, 9), 78.47),
    (3.0, 87.31, (0.3, 0.1, 0.3, 3, 2, 5, 8, 9), 77.35),
]


@pytest.mark.parametrize(("epsilon", "printed", "parts", "trained"), FIGURE_1)
def test_figure_1_is_about_other_noise_than_the_tables(
    epsilon: float, printed: float, parts: Parts, trained: float
) -> None:
    """1 - E|z| over that of a classically calibrated Gaussian at delta 1e-10, to within 0.9: the figure was sampled.

    The parameters that training used have ``trained``.
    """
    gaussian = math.sqrt(2 * math.log(1.25e10)) / epsilon * math.sqrt(2 / math.pi)
    assert 100 * (1 - law_of(parts).mean_absolute / gaussian) == pytest.approx(printed, abs=0.9)
    assert 100 * (1 - LMO[f"T{epsilon:g}"].mean_absolute / gaussian) == pytest.approx(trained, abs=0.01)


def test_entropies_are_those_of_closed_forms_and_of_quadrature() -> None:
    """Laplace of scale b: 1 + log 2b. PLRV-O: log(2 / (k theta)) + (k + 1) / k."""
    assert InverseScale(constant=0.7).entropy == pytest.approx(1 + math.log(2 / 0.7), rel=1e-9)
    assert plrvo(40, 0.01).entropy == pytest.approx(math.log(2 / 0.4) + 41 / 40, rel=1e-9)
    for law in LMO.values():

        def integrand(log_x: float, law: InverseScale = law) -> float:
            log_density = float(law.log_density(math.exp(log_x)))
            return -2 * math.exp(log_x + log_density) * log_density

        assert law.entropy == pytest.approx(quad(integrand, -25, 25, points=[-5, 0, 3], limit=800)[0], rel=1e-6)
