"""Clip radii of trust regions, compared with the spec's numbers and with simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dptune.core.errors import ConfigError
from dptune.policy.environments.environment import Trajectories
from dptune.policy.environments.learner import fisher_extent
from dptune.policy.policies import Linear, Policy
from dptune.policy.schedules import Update, kl_radius, l2_radius

positive = st.floats(0.01, 20.0)


def by_markov(update: Update, trust: float, miss: float) -> float:
    """The closed form of proposition 4.5: the bound of proposition 4.7 with F = I."""
    return kl_radius(update, trust, miss, largest=1.0, trace=float(update.dimension))


def moments(
    update: Update,
    radius: float,
    gradient: NDArray[np.float64],
    fisher: NDArray[np.float64],
    *,
    as_printed: bool = False,
) -> tuple[float, float]:
    """Mean and variance of step^T F step / 2 for a clipped gradient. Analysis only: both arguments are private.

    As printed (equations 13 and 14), the variance has its two coefficients at the wrong terms.
    """
    eta, spread = update.step_size, update.noise * radius
    pushed, squared = fisher @ gradient, float((fisher * fisher.T).sum())
    mean = eta**2 / 2 * (float(gradient @ pushed) + spread**2 * float(np.trace(fisher)))
    along, across = spread**2 * float(pushed @ pushed), spread**4 * squared
    variance = 2 * along + 4 * across if as_printed else 4 * along + 2 * across
    return mean, eta**4 / 4 * variance


def gap(update: Update, radius: float, length: float, slack: float, *, as_printed: bool = False) -> float:
    """Bound on the gain that a noisy step lacks, eta (1 - S / ||g||) ||g||^2 + ``slack`` (proposition 4.6).

    It holds with probability 1 - miss where ``radius <= gap_radius(...)``. Analysis only: ``length``, which is ||g||,
    is private. As printed, ||g|| stands where its own proof has the square.
    """
    kept = 1 / max(length / radius, 1.0)
    return update.step_size * (1 - kept) * length ** (1 if as_printed else 2) + slack


def gap_radius(update: Update, length: float, slack: float, miss: float) -> float:
    """The radius that goes with ``gap``, by Cantelli's inequality."""
    return slack / (update.step_size * update.noise * length) * math.sqrt(miss / (1 - miss))


@pytest.mark.parametrize(
    ("figures", "trust", "miss", "exact", "markov"),
    [
        ((1.0, 0.5, 10), 0.5, 0.05, 0.399467, 0.119523),
        ((1.0, 1.0, 100), 0.01, 0.1, 0.0129271, 0.00444994),
        ((1.0, 1.0, 4610), 0.01, 0.1, 0.00205531, 6.58593e-4),
        ((1.0, 1.0, 4610, 8), 0.01, 0.1, 0.0163313, 0.00523312),
        ((12.0, 3.730631, 12), 3.5, 0.4, 0.0166105, None),
        ((12.0, 3.730631, 7), 3.5, 0.4, 0.0217874, None),
        ((12.0, 3.730631, 8), 3.5, 0.4, 0.0203604, None),
        ((12.0, 1.0, 12), 3.5, 0.4, 0.0597065, None),
        ((1.0, 1.0, 18, 8), 0.02, 0.1, 0.1566, None),
        ((1.0, 1.0, 18, 32), 0.02, 0.1, 0.1908, None),
    ],
)
def test_the_specs_radii(figures: tuple, trust: float, miss: float, exact: float, markov: float | None) -> None:
    update = Update(*figures)
    assert l2_radius(update, trust, miss) == pytest.approx(exact, rel=5e-4)
    if markov is not None:
        assert by_markov(update, trust, miss) == pytest.approx(markov, rel=1e-5)


@pytest.mark.parametrize("users", [1, 4])
def test_a_clipped_update_leaves_the_region_as_often_as_allowed(users: int) -> None:
    """The share of 400,000 draws is within 5 standard errors of 0.05, false alarm 6e-7."""
    update = Update(0.7, 0.5, 10, users)
    radius = l2_radius(update, 0.5, 0.05)
    mean = radius * np.eye(10)[0]
    noise = np.random.default_rng(0).standard_normal((400_000, 10)) * update.noise * radius
    outside = (update.step_size**2 * ((mean + noise) ** 2).sum(1) / 2 > 0.5).mean()
    assert outside == pytest.approx(0.05, abs=5 * math.sqrt(0.05 * 0.95 / 400_000))


@given(positive, positive, st.integers(1, 5000), st.integers(1, 64), positive, st.floats(0.01, 0.99))
def test_the_exact_law_allows_more_than_markov(
    eta: float, z: float, dimension: int, users: int, trust: float, miss: float
) -> None:
    update = Update(eta, z, dimension, users)
    assert l2_radius(update, trust, miss) >= by_markov(update, trust, miss)


@given(positive, positive, positive, st.floats(0.01, 0.99), positive, positive, st.floats(0.1, 10))
def test_how_radii_scale(
    eta: float, z: float, trust: float, miss: float, largest: float, trace: float, factor: float
) -> None:
    update = Update(eta, z, 9)
    radius = kl_radius(update, trust, miss, largest=largest, trace=trace)
    scaled = kl_radius(update, trust, miss, largest=factor * largest, trace=factor * trace)
    assert scaled == pytest.approx(radius / math.sqrt(factor))
    assert kl_radius(update, factor * trust, miss, largest=largest, trace=trace) == pytest.approx(
        radius * math.sqrt(factor)
    )
    assert kl_radius(Update(factor * eta, z, 9), trust, miss, largest=largest, trace=trace) == pytest.approx(
        radius / factor
    )


def test_the_kl_radius_is_equation_7_and_half_the_trust_is_its_last_line() -> None:
    """eta 2, z .5, alpha .7, beta .2, largest 1.3, trace 4: equation 7, and the radius for step^T F step <= alpha."""
    update, of_fisher = Update(2.0, 0.5, 9), {"largest": 1.3, "trace": 4.0}
    assert kl_radius(update, 0.7, 0.2, **of_fisher) == pytest.approx(math.sqrt(2 * 0.7 * 0.2 / (1.3 + 0.25 * 4)) / 2)
    assert kl_radius(update, 0.35, 0.2, **of_fisher) == pytest.approx(math.sqrt(0.7 * 0.2 / 2.3) / 2)


def test_the_fisher_matrix_is_the_mean_of_outer_products_of_scores() -> None:
    """Plain loops over the steps that count, with the regulariser on the diagonal."""
    generator = torch.Generator().manual_seed(0)
    x, theta = torch.randn(2, 7, 3, generator=generator), torch.randn(6, generator=generator)
    actions, mask = torch.randint(2, (2, 6), generator=generator), torch.rand(2, 6, generator=generator) < 0.8
    no = torch.zeros(2, 6, dtype=torch.bool)
    met = Trajectories((0, 1), x, actions, torch.zeros(2, 6), no, no, mask)
    scores = []
    for user, step in mask.nonzero().tolist():
        features = x[user, step].double().numpy()
        odds = np.exp(features @ theta.double().numpy().reshape(3, 2))
        score = np.outer(features, np.eye(2)[actions[user, step]] - odds / odds.sum())
        scores.append(np.outer(score, score))
    fisher = np.mean(scores, axis=0) + 1e-3 * np.eye(6)
    found = fisher_extent(Policy(Linear(3, 2), 2, False), theta, met, 1e-3)
    assert found == pytest.approx((np.linalg.eigvalsh(fisher)[-1], np.trace(fisher)), rel=1e-5)


def test_moments_are_those_of_simulation_and_the_printed_ones_are_not() -> None:
    """The standard error of the variance is below 1 % with 2 million draws."""
    generator = np.random.default_rng(1)
    root = generator.standard_normal((6, 6))
    fisher, update, radius = root @ root.T, Update(0.9, 0.6, 6), 0.8
    gradient = generator.standard_normal(6)
    gradient *= radius / np.linalg.norm(gradient)
    steps = update.step_size * (gradient + generator.standard_normal((2_000_000, 6)) * update.noise * radius)
    values = ((steps @ fisher) * steps).sum(1) / 2
    mean, variance = moments(update, radius, gradient, fisher)
    assert values.mean() == pytest.approx(mean, rel=0.01)
    assert values.var() == pytest.approx(variance, rel=0.03)
    assert moments(update, radius, gradient, fisher, as_printed=True)[1] != pytest.approx(variance, rel=0.2)


def test_the_gap_holds_with_the_square_and_less_often_as_printed() -> None:
    """Coverage at the spec's radius 0.75 is 0.977, and 0.878 as printed (200,000 draws, standard error 0.001)."""
    update, length, miss = Update(0.1, 1.0, 5), 2.0, 0.2
    radius = gap_radius(update, length, 0.3, miss)
    assert radius == pytest.approx(0.75)
    gradient = length * np.eye(5)[0]
    clipped = gradient * min(1.0, radius / length)
    noise = np.random.default_rng(2).standard_normal((200_000, 5)) * update.noise * radius
    lost = (update.step_size * (gradient - clipped - noise)) @ gradient
    assert (lost <= gap(update, radius, length, 0.3)).mean() == pytest.approx(0.977, abs=0.005)
    assert (lost <= gap(update, radius, length, 0.3, as_printed=True)).mean() == pytest.approx(0.878, abs=0.005)


def test_with_hardly_any_noise_the_radius_tends_to_that_of_none() -> None:
    """A coarser bound replaces the exact quantile where that cannot be computed, and keeps steps in the region."""
    assert l2_radius(Update(2.0, 0.0, 12), 0.5, 0.1) == pytest.approx(0.5)
    radii = [l2_radius(Update(2.0, noise, 12), 0.5, 0.1) for noise in (1e-9, 1e-4, 9.9e-4, 1e-3, 1e-2, 0.1)]
    assert all(0 < radius <= 0.5 for radius in radii)
    assert radii[2] == pytest.approx(radii[3], rel=0.01)


@pytest.mark.parametrize(
    ("field", "make"),
    [
        ("noise_multiplier", lambda: Update(1.0, -1.0, 3)),
        ("users", lambda: Update(1.0, 1.0, 3, 0)),
        ("trust", lambda: l2_radius(Update(1.0, 1.0, 3), 0.0, 0.1)),
        ("miss", lambda: l2_radius(Update(1.0, 1.0, 3), 0.1, 1.0)),
        ("trace", lambda: kl_radius(Update(1.0, 1.0, 3), 0.1, 0.1, largest=1.0, trace=0.0)),
    ],
)
def test_bad_figures_are_named(field: str, make: object) -> None:
    with pytest.raises(ConfigError, match=rf"^{field}: .* Fix: "):
        make()  # type: ignore[operator]
