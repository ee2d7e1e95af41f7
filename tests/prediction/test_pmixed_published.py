"""PMixed's published numbers, and where its theorem fails (spec pmixed.md, sections 4 and 5.1)."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from scipy.stats import binom

from dptune.core.errors import ConfigError
from dptune.prediction.mixture import pointwise_weights
from dptune.prediction.protocols import (
    Published,
    amplified_epsilon,
    one_model_epsilon,
    planned_answers,
    pointwise_radius,
    protocol_of,
    published_beta,
    theorem_epsilon,
)
from dptune.privacy.accountants import epsilons
from dptune.privacy.accounting.renyi_filter import budget_at, published_answers_epsilon

PER_TOKEN = 3.1983085200 / 1024
SIZES = (1, 2, 3, 4, 5, 8, 16)
TABLE: list[tuple[dict[str, Any], tuple[float, ...]]] = [
    ({"tokens": 512}, (0.776309, 0.243766, 0.270080, 0.287523, 0.300426, 0.326094, 0.361101)),
    ({}, (0.565178, 0.193842, 0.223588, 0.243555, 0.258306, 0.287338, 0.325929)),
    ({"tokens": 2048}, (0.372907, 0.141178, 0.171891, 0.193725, 0.210301, 0.243449, 0.287246)),
    ({"tokens": 4096}, (0.224698, 0.093178, 0.120206, 0.141120, 0.157933, 0.193666, 0.243397)),
    ({"tokens": 8192}, (0.126006, 0.056157, 0.076274, 0.093154, 0.107608, 0.141091, 0.193637)),
    ({"subsample": 0.02}, (0.835198, 0.261142, 0.288596, 0.306669, 0.319973, 0.346285, 0.381892)),
    ({"subsample": 0.05}, (0.292634, 0.114625, 0.142312, 0.162489, 0.178062, 0.209794, 0.252647)),
    ({"subsample": 0.1}, (0.092996, 0.042028, 0.057623, 0.070846, 0.082245, 0.108850, 0.151252)),
    ({"subsample": 0.25}, (0.016302, 0.007958, 0.011663, 0.015202, 0.018588, 0.027931, 0.048213)),
    ({"subsample": 0.5}, (0.004143, 0.002055, 0.003057, 0.004043, 0.005014, 0.007837, 0.014776)),
    ({"alpha": 4}, (0.567243, 0.180472, 0.198885, 0.210257, 0.218296, 0.233524)),
    ({"epsilon": 2, "alpha": 9}, (0.098921, 0.043203, 0.057307, 0.068109, 0.076204, 0.088692)),
    ({"epsilon": 4, "alpha": 5}, (0.265558, 0.102180, 0.123709, 0.137435, 0.146741, 0.162624)),
]


@pytest.mark.parametrize(("options", "expected"), TABLE, ids=str)
def test_the_radii_of_the_spec(options: dict[str, Any], expected: tuple[float, ...]) -> None:
    betas = Published(models=16, **options).betas
    for size, beta in zip(SIZES, expected, strict=False):
        assert betas[size - 1] == pytest.approx(beta, abs=1e-6)


@pytest.mark.parametrize(
    ("epsilon", "alpha", "budget"),
    [(8, 3, 3.1983085200), (8, 4, 4.9121383712), (8, 5, 5.7472716632), (8, 6, 6.2380883576), (2, 9, 0.9533204247)],
)
def test_the_budgets_of_the_spec(epsilon: float, alpha: float, budget: float) -> None:
    assert Published(epsilon=epsilon, alpha=alpha).rdp_budget == pytest.approx(budget, abs=1e-10)
    assert Published(epsilon=epsilon, alpha=alpha).rdp_per_token == pytest.approx(budget / 1024, rel=1e-10)


@pytest.mark.parametrize(
    ("models", "beta"), [(1, 1.041116e-3), (2, 5.189422e-4), (16, 3.981103e-3), (80, 1.693047e-2), (100, 2.027113e-2)]
)
def test_the_inverse_of_theorem_5_1(models: int, beta: float) -> None:
    found = Published(models=models, subsample=1.0).betas[0]
    assert found == pytest.approx(beta, rel=1e-6)
    closed = math.log(models * math.exp(2 * PER_TOKEN) + 1 - models) / (4 * 3 * 2) if models > 1 else PER_TOKEN / 3
    assert found == pytest.approx(closed, rel=1e-9)


@pytest.mark.parametrize("subsample", [0.03, 0.5, 1.0])
@pytest.mark.parametrize("models", [1, 2, 80])
def test_no_radius_claims_more_than_its_share(models: int, subsample: float) -> None:
    beta = published_beta(PER_TOKEN, models, 3, subsample)
    assert PER_TOKEN * (1 - 1e-9) <= amplified_epsilon(beta, models, 3, subsample) <= PER_TOKEN


@pytest.mark.parametrize("subsample", [0.01, 0.4])
def test_sampling_what_is_free_is_free(subsample: float) -> None:
    assert amplified_epsilon(1e-300, 1, 5, subsample) == pytest.approx(0, abs=1e-15)
    assert amplified_epsilon(0.2, 3, 5, 1.0) == theorem_epsilon(0.2, 3, 5)


def _pair(public: float, private: float, beta: float) -> tuple[float, float, float]:
    """(lambda, D2, D3) of two tokens, lambda by bisection of the order-3 constraint."""

    def divergence(weight: float, order: int) -> float:
        p, q = np.array([public, 1 - public]), np.array([private, 1 - private])
        mixed = p + weight * (q - p)
        moments = (mixed**order / p ** (order - 1)).sum(), (p**order / mixed ** (order - 1)).sum()
        return math.log(max(moments)) / (order - 1)

    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if divergence(middle, 3) <= 3 * beta else (low, middle)
    return low, divergence(low, 2), divergence(low, 3)


def test_one_model_costs_more_than_claimed() -> None:
    """Spec, finding B: the order-2 bound that amplification uses is not enforced."""
    weight, second, third = _pair(0.855, 0.001, 0.565178)
    assert weight == pytest.approx(0.830996, abs=1e-6)
    assert third == pytest.approx(1.69553, abs=1e-5)
    assert second == pytest.approx(1.62184, abs=1e-5)
    q, p, private = 0.03, np.array([0.855, 0.145]), np.array([0.001, 0.999])
    law = p + q * weight * (private - p)
    sampled = math.log((law**3 / p**2).sum()) / 2
    assert sampled == pytest.approx(5.6748e-3, rel=1e-4)
    assert sampled / PER_TOKEN == pytest.approx(1.817, abs=1e-3)
    # The linear program finds the worst pair, which is hardly worse.
    worst = one_model_epsilon(3 * published_beta(PER_TOKEN, 1, 3, 0.03), 3, 0.03)
    assert sampled < worst < 1.001 * sampled


def test_what_is_told_of_one_model() -> None:
    prices = epsilons(planned_answers(Published(models=1)), 1e-5, published_accountant="pmixed")
    assert prices.published == pytest.approx(8, abs=1e-9)
    assert prices.noise_only == pytest.approx(10.61, abs=0.005)
    assert prices.published <= 8


@pytest.mark.parametrize("models", [2, 80])
def test_more_models_than_one_have_no_proof(models: int) -> None:
    """Theorem 5.1 takes a bound at one order for all: what it claims is told, and nothing is certified."""
    prices = epsilons(planned_answers(Published(models=models)), 1e-5, published_accountant="pmixed")
    assert prices.published == pytest.approx(8, abs=1e-9)
    assert math.isinf(prices.noise_only)
    assert math.isinf(prices.certified)
    assert prices.leaks


@pytest.mark.parametrize("subsample", [0.03, 0.3, 0.9])
@pytest.mark.parametrize("order", [2, 3, 5])
def test_no_law_exceeds_the_bound_of_one_model(order: int, subsample: float) -> None:
    """Random laws of up to 5 tokens, moved as far as the radius lets them."""
    rng, radius = np.random.default_rng(order), 0.8
    bound = one_model_epsilon(radius, order, subsample)
    for _ in range(400):
        p, q = (rng.dirichlet(np.full(rng.integers(2, 6), rng.choice([0.2, 1.0, 5.0]))) + 1e-9 for _ in range(2))
        size = min(len(p), len(q))
        p, q = p[:size] / p[:size].sum(), q[:size] / q[:size].sum()
        low, high = 0.0, 1.0
        for _ in range(40):
            middle = (low + high) / 2
            mixed = p + middle * (q - p)
            inside = max(_renyi(mixed, p, order), _renyi(p, mixed, order)) <= radius
            low, high = (middle, high) if inside else (low, middle)
        law = p + subsample * low * (q - p)
        assert max(_renyi(law, p, order), _renyi(p, law, order)) <= bound * (1 + 1e-9)


def _renyi(p: np.ndarray, q: np.ndarray, order: float) -> float:
    return float(np.log((p**order * q ** (1 - order)).sum()) / (order - 1))


#: Spec, finding A: n, beta, b, D3(pbar_i || pbar_j), D3(p || p_-i), claimed. Two tokens, p0 = (b, 1 - b).
COUNTEREXAMPLES = [
    (2, "0.193842", "1e-2", 3.133, 2.115, 1.984),
    (2, "0.193842", "1e-4", 5.395, 4.356, 1.984),
    (2, "0.193842", "1e-8", 9.999, 8.959, 1.984),
    (5, "0.258306", "1e-3", 4.771, 2.368, 2.299),
    (80, "0.0169305", "1e-6", 4.673, 0.01122, 0.003123),
    (80, "0.0169305", "1e-8", 6.975, 0.5868, 0.003123),
    (80, "0.0169305", "1e-10", 9.277, 2.7065, 0.003123),
]


@pytest.mark.parametrize(("models", "beta", "rare", "pair", "mean", "claimed"), COUNTEREXAMPLES)
def test_theorem_5_1_does_not_hold(models: int, beta: str, rare: str, pair: float, mean: float, claimed: float) -> None:
    """60 digits: one model as far towards the rare token as its radius allows, all others as far away from it."""
    with mpmath.workdps(60):
        radius, p0 = 3 * mpmath.mpf(beta), mpmath.mpf(rare)
        up = p0 + _largest(p0, 1, radius) * (1 - p0)
        down = p0 - _largest(p0, 0, radius) * p0
        assert float(_binary(up, down)) == pytest.approx(pair, abs=1e-3)
        together = ((models - 1) * down + up) / models
        worst = float(_binary(together, down))
    assert worst == pytest.approx(mean, rel=1e-3)
    assert theorem_epsilon(float(beta), models, 3) == pytest.approx(claimed, abs=1e-3)
    assert worst > claimed


def _binary(one: Any, other: Any) -> Any:
    return mpmath.log(one**3 / other**2 + (1 - one) ** 3 / (1 - other) ** 2) / 2


def _largest(p0: Any, private: int, radius: Any) -> Any:
    low, high = mpmath.mpf(0), mpmath.mpf(1)
    for _ in range(250):
        middle = (low + high) / 2
        moved = p0 + middle * (private - p0)
        inside = 0 < moved < 1 and max(_binary(moved, p0), _binary(p0, moved)) <= radius
        low, high = (middle, high) if inside else (low, middle)
    return low


@pytest.mark.parametrize("models", [1, 2, 3, 80])
def test_an_infinite_order_has_the_radius_of_equation_13(models: int) -> None:
    """Appendix B: e^(2r) = N e^(epsilon / T) + 1 - N; and one model alone has all of it."""
    protocol, each = Published(alpha=math.inf, subsample=1.0, models=models), 8 / 1024
    radius = math.log(models * math.exp(each) + 1 - models) / 2 if models > 1 else each
    assert protocol.radii == pytest.approx((radius,) * models, rel=1e-9)


@pytest.mark.parametrize("models", [2, 5, 80])
def test_no_shard_that_is_left_out_shows_more_than_an_infinite_order_claims(models: int) -> None:
    """Random laws at the edge of the radius, in both directions; and the worst pair comes to 1 % of the claim."""
    rng, each, largest = np.random.default_rng(models), 0.3, 0.0
    radius = pointwise_radius(each, models)
    for _ in range(2000):
        public = rng.dirichlet(np.full(3, rng.choice([0.1, 1.0, 5.0]))) + 1e-12
        public /= public.sum()
        private = torch.tensor(rng.dirichlet(np.full(3, 0.1), models + 1) + 1e-300).log()
        weights = pointwise_weights(torch.tensor(public).log(), private, radius).numpy()[:, None]
        laws = (1 - weights) * public + weights * private.exp().numpy()
        assert np.abs(np.log(laws / public)).max() <= radius * (1 + 1e-9)
        laws, changed = laws[:-1], laws[1:]  # a record that changes makes any other law of the first
        worst = np.abs(np.log(laws.mean(axis=0) / laws[1:].mean(axis=0))).max()
        assert max(worst, np.abs(np.log(laws.mean(axis=0) / changed.mean(axis=0))).max()) <= each
        largest = max(largest, worst)
    rare = np.array([1e-6, 1 - 1e-6])  # one model as far towards the rare token as it may go, all others away from it
    up, down = (np.array([rare[0] * math.exp(r), 1 - rare[0] * math.exp(r)]) for r in (radius, -radius))
    worst = np.log(((models - 1) * down + up) / models / down).max()
    assert max(largest, worst) == pytest.approx(each, rel=0.01)


@pytest.mark.parametrize("tokens", [1, 8, 64, 1024])
def test_tokens_of_an_infinite_order_are_certified_below_what_is_claimed(tokens: int) -> None:
    """At the exact epsilon of as many randomised responses, the worst of all that are epsilon-DP."""
    protocol = Published(alpha=math.inf, subsample=1.0, tokens=tokens)
    prices = epsilons(planned_answers(protocol), 1e-5, published_accountant="pmixed")
    assert prices.published == pytest.approx(8, abs=1e-9)
    each, ups = 8 / tokens, np.arange(tokens + 1)
    losses = (2 * ups - tokens) * each
    likely = binom.pmf(ups, tokens, 1 / (1 + math.exp(-each)))
    delta = float((likely * -np.expm1(np.minimum(prices.certified - losses, 0))).sum())
    assert delta <= 1e-5
    assert tokens <= 8 or delta >= 1e-5 * (1 - 1e-5)
    assert prices.certified == pytest.approx({1: 7.99999, 8: 7.9999, 64: 4.237, 1024: 0.9253}[tokens], abs=2e-4)


def test_tokens_of_which_only_some_are_claimed_as_pure_are_claimed_as_nothing() -> None:
    pure, renyi = Published(alpha=math.inf, subsample=1.0), Published()
    assert published_answers_epsilon(Counter({pure.release: 2}), 1e-5) == pytest.approx(2 * 8 / 1024)
    assert published_answers_epsilon(Counter({pure.release: 1, renyi.release: 1}), 1e-5) == math.inf


def test_an_infinite_order_takes_no_sampling_and_is_the_published_protocols_alone() -> None:
    with pytest.raises(ConfigError, match="which amplification by sampling needs"):
        protocol_of("pmixed_published", {"alpha": "inf"})
    with pytest.raises(ConfigError, match="inf is an order of pmixed_published only"):
        protocol_of("pmixed", {"alpha": "inf"})
    with pytest.raises(ConfigError, match="beyond what one token can need"):  # e^epsilon times the models overflows
        Published(alpha=math.inf, subsample=1.0, epsilon=699.0, tokens=1, models=100_000)


@pytest.mark.parametrize(("models", "tokens"), [(1, 1), (2, 3), (80, 1), (80, 64)])
def test_a_radius_that_float64_cannot_hold_is_refused_and_the_proposed_epsilon_works(models: int, tokens: int) -> None:
    """A weight of 1 - e^-r is 1 for r above 37: a token that a private model never says would then show it."""
    options: dict[str, Any] = {"alpha": math.inf, "subsample": 1.0, "models": models, "tokens": tokens}
    with pytest.raises(ConfigError, match="weights are exact up to 16") as refused:
        Published(epsilon=40.0 * tokens, **options)
    proposed = re.search(r"use ([0-9.]+) or less", str(refused.value))
    assert proposed is not None
    protocol = Published(epsilon=float(proposed[1]), **options)
    radius = protocol.radii[0]
    assert 15.9 < radius <= 16
    public = torch.tensor([0.5, 0.5], dtype=torch.float64).log()
    private = torch.tensor([[1 - 1e-300, 1e-300]], dtype=torch.float64).log()
    weight = float(pointwise_weights(public, private, radius)[0])
    assert -math.log1p(-weight) <= radius
    assert radius - 1e-6 < -math.log1p(-weight * (1 - 2e-300))


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"alpha": 1}, "alpha"),
        ({"alpha": 0.5}, "alpha"),
        ({"alpha": "nan"}, "alpha"),
        ({"alpha": 2.5}, "alpha"),
        ({"tokens": 0}, "tokens"),
        ({"models": -3}, "models"),
        ({"models": 1.5}, "models"),
        ({"subsample": 0}, "subsample"),
        ({"subsample": 1.01}, "subsample"),
        ({"epsilon": 0.1}, "epsilon"),
        ({"epsilon": "inf"}, "epsilon"),
        ({"delta": 0}, "delta"),
        ({"noise_multiplier": 1}, "noise_multiplier"),
    ],
    ids=str,
)
def test_bad_options_are_refused_by_name(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        protocol_of("pmixed_published", options)


def test_what_needs_no_bound_or_leaves_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="no radius at all"):
        published_beta(1e9, 1, 3, 0.03)
    with pytest.raises(ConfigError, match="leaves no radius"):
        published_beta(1e-30, 2, 3, 1.0)


def test_alpha_by_the_papers_rule_fits_the_budget() -> None:
    """ceil(4 log(1/delta) / (3 epsilon) + 1), as in the ablation: every budget is positive."""
    for epsilon, alpha in ((2, 9), (4, 5), (6, 4), (8, 3), (10, 3)):
        assert alpha == math.ceil(4 * math.log(1e5) / (3 * epsilon) + 1)
        assert budget_at(alpha, epsilon, 1e-5) > 0
