"""GeoClip: P5.1 to P5.9 of the specification (gamma is 1, and eigenvalues are in units of the starting one)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mechanism_steps import EXPECTED, SIZES, batch_of, observed, privatised, started

from dptune.core.errors import ConfigError
from dptune.mechanisms.clippers.transformed import Transformed
from dptune.mechanisms.controllers.geoclip import Basis
from dptune.mechanisms.gradient_interfaces import Geometry
from dptune.mechanisms.interfaces import Knobs, Released
from dptune.mechanisms.mechanism import Mechanism
from dptune.training.gradients.per_sample import PairGradients

torch.set_num_threads(1)

COORDINATES = sum(SIZES)
OPEN = {"floor": 1e-12, "ceiling": 1e12}  # bounds that nothing reaches
HOSTILE = st.sampled_from([0.0, 1e-45, 1e-30, 65504.0, -1e12, 3e38, math.nan, math.inf]) | st.floats(
    -1e3, 1e3, width=32
)
EIGENVALUES = st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=6)


def streaming(**options: Any) -> Mechanism:
    """Algorithm 3, exploring."""
    return started("geoclip", **{"rank": 3} | options)


def full(**options: Any) -> Mechanism:
    """Algorithm 1: the whole covariance."""
    return started("geoclip", rank=0, explore=0.0, **options)


def raw(seed: int, scale: float = 1.0) -> list[PairGradients]:
    generator = torch.Generator().manual_seed(seed)
    return [batch_of(scale * torch.randn(6, COORDINATES, generator=generator))]


def gradient(seed: int, size: int = COORDINATES) -> torch.Tensor:
    return torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def release_of(released: torch.Tensor, *blocks: torch.Tensor) -> Released:
    """What a step gives, made up."""
    return Released([released], [released, *blocks], None, Knobs((), 1.0), (1.0,))


def basis(of: Mechanism) -> Basis:
    made = of.knobs().geometry
    assert isinstance(made, Basis)
    return made


def of_eigenvalues(values: Sequence[float], directions: torch.Tensor | None = None) -> Mechanism:
    mechanism, size = full(sizes=(len(values),)), len(values)
    subspace = torch.eye(size) if directions is None else directions
    state = {"mean": torch.zeros(size), "subspace": subspace, "eigenvalues": torch.tensor(values)}
    mechanism.controller.load_state_dict(state)
    return mechanism


def rotation(size: int, columns: int | None = None, seed: int = 0) -> torch.Tensor:
    return torch.linalg.qr(gradient(seed, size * (columns or size)).view(size, -1)).Q


def noiseless(geometry: Geometry, gradients: PairGradients) -> torch.Tensor:
    """The summed gradient that a step would give without its noise."""
    return geometry.backward(Transformed().clipped_sum(gradients, Knobs((), 1.0, geometry=geometry)))


@pytest.mark.parametrize("columns", [2, 6])
def test_p51_mapping_back_inverts_the_coordinates(columns: int) -> None:
    made = Basis(torch.ones(6).double(), rotation(6, columns), torch.linspace(0.1, 3.0, columns).double())
    inside = gradient(1, columns)
    torch.testing.assert_close(made.forward(made.backward([inside])[None])[0][0], inside)
    if columns == 6:
        torch.testing.assert_close(made.backward([made.forward(gradient(2, 6)[None])[0][0]]), gradient(2, 6))


@pytest.mark.parametrize("radius", [0.1, 1.0, 7.0])
def test_p52_the_start_is_dp_sgd(radius: float) -> None:
    """The same seed, so the same noise."""
    ours, theirs = full(start_norm=radius), started("static", max_grad_norm=radius)
    released = [privatised(mechanism, raw(0)).gradient for mechanism in (ours, theirs)]
    torch.testing.assert_close(*released, rtol=1e-5, atol=1e-5 * radius)


def test_p52_equal_eigenvalues_are_dp_sgd_in_any_basis() -> None:
    rows, radius = 10 * gradient(0, 30).view(5, 6).float(), math.sqrt(6 * 0.5)
    made = basis(of_eigenvalues([0.5] * 6, rotation(6)))
    clipped = torch.stack([row * min(1.0, radius / float(row.norm())) for row in rows.double()])
    torch.testing.assert_close(noiseless(made, batch_of(rows, sizes=(6,))), clipped.sum(dim=0), rtol=1e-5, atol=1e-5)


def test_p53_a_diagonal_covariance_is_adaclip() -> None:
    variance = torch.logspace(-2, 0.6, 6).double()
    geoclip, adaclip = of_eigenvalues(variance.tolist()), started("adaclip", sizes=(6,))
    mean = torch.linspace(-1, 1, 6)
    adaclip.controller.load_state_dict({"mean": mean, "variance": variance})
    geoclip.controller.load_state_dict(geoclip.controller.state_dict() | {"mean": mean})
    rows = gradient(0, 30).view(5, 6)
    released = [privatised(each, [batch_of(rows, sizes=(6,))], sizes=(6,)).gradient for each in (geoclip, adaclip)]
    torch.testing.assert_close(*released, rtol=1e-4, atol=1e-5)


@given(values=EIGENVALUES)
def test_p54_the_transform_has_the_expected_norm_of_one(values: list[float]) -> None:
    """Tr(M Sigma M^T) = 1."""
    stretch = basis(of_eigenvalues(values)).stretch
    assert float((stretch.square() * torch.tensor(values)).sum()) == pytest.approx(1.0, rel=1e-4)


@given(values=EIGENVALUES)
def test_p55_the_noise_energy_is_at_most_that_of_whitening(values: list[float]) -> None:
    energy = float((1 / basis(of_eigenvalues(values)).stretch.square()).sum())
    assert energy == pytest.approx(math.fsum(map(math.sqrt, values)) ** 2, rel=1e-4)
    assert energy <= len(values) * math.fsum(values) * (1 + 1e-4)


def test_p56_a_rotated_problem_has_the_rotated_answer() -> None:
    """Signs and order of the eigenvectors do not matter to the clipped gradient; noise is isotropic."""
    turn, plain, turned = rotation(COORDINATES, seed=4), full(**OPEN), full(**OPEN)
    for step in range(4):
        plain.controller.observe(observed(release_of(gradient(step))))
        turned.controller.observe(observed(release_of(turn @ gradient(step))))
    rows = 3 * gradient(9, 6 * COORDINATES).view(6, COORDINATES)
    answer = turn @ noiseless(basis(plain), batch_of(rows))
    torch.testing.assert_close(answer, noiseless(basis(turned), batch_of(rows @ turn.T)), rtol=1e-5, atol=1e-5)
    assert float(basis(plain).stretch.max() / basis(plain).stretch.min()) > 1.2


def test_p57_a_streaming_basis_of_full_rank_is_the_smoothed_covariance() -> None:
    """With the mean held at 0: the two algorithms centre about different means."""
    fixed = OPEN | {"mean_decay": 1.0}
    streamed, whole = streaming(rank=COORDINATES, directions="axes", explore=0.0, **fixed), full(**fixed)
    for step in range(60):
        released = gradient(step) * torch.linspace(0.1, 3.0, COORDINATES)
        for mechanism in (streamed, whole):
            mechanism.controller.observe(observed(release_of(released)))
    state = streamed.controller.state_dict()
    covariance = (state["subspace"] * state["eigenvalues"]) @ state["subspace"].T
    torch.testing.assert_close(covariance, whole.controller.state_dict()["covariance"], rtol=1e-5, atol=1e-8)


def hidden_share(**options: Any) -> tuple[float, float]:
    """(share of a hidden direction in the subspace, energy outside the starting axes) after 150 private steps.

    All gradients are long and lie along one direction outside the first four axes of 30. The seeds are fixed.
    """
    hidden, generator = torch.zeros(30), torch.Generator().manual_seed(0)
    hidden[10:20] = 10**-0.5
    mechanism = streaming(sizes=(30,), rank=4, **options)
    for step in range(150):
        batch = batch_of(5 * hidden + 0.1 * torch.randn(16, 30, generator=generator), sizes=(30,))
        mechanism.controller.observe(observed(privatised(mechanism, [batch], step, sizes=(30,))))
    directions = basis(mechanism).directions
    return float((hidden.double() @ directions).norm()), float(directions[4:].norm())


def test_p58_as_printed_the_subspace_never_leaves_its_axes() -> None:
    share, outside = hidden_share(directions="axes", explore=0.0)
    assert share < 1e-9
    assert outside < 1e-9


@pytest.mark.parametrize("directions", ["axes", "random"])
def test_p58_exploring_finds_a_strong_hidden_direction(directions: str) -> None:
    share, _ = hidden_share(directions=directions, explore=0.2)
    assert share > 0.9


def test_p58_without_exploring_a_random_start_stays_where_it_was() -> None:
    """The hidden direction's share of the start: exactly what it is after 150 steps."""
    share, _ = hidden_share(directions="random", explore=0.0)
    start = basis(streaming(sizes=(30,), rank=4, directions="random", explore=0.0)).directions
    assert share == pytest.approx(float(start[10:20].sum(dim=0).norm()) / math.sqrt(10), rel=1e-5)


@given(
    rows=st.lists(st.lists(HOSTILE, min_size=4, max_size=4), min_size=1, max_size=4),
    stretch=st.lists(st.sampled_from([1e-200, 1e-3, 1.0, 1e3, 1e200]), min_size=2, max_size=2),
    explore=st.sampled_from([0.0, 0.01, 0.2, 0.9]),
    outer_radius=st.sampled_from([1e-3, 1.0, 1e3]),
)
def test_a_unit_moves_both_blocks_together_by_at_most_one(
    rows: list[list[float]], stretch: list[float], explore: float, outer_radius: float
) -> None:
    made = Basis(torch.ones(4).double(), rotation(4, 2), torch.tensor(stretch).double(), explore, outer_radius)

    def release(units: list[list[float]]) -> torch.Tensor:
        blocks = Transformed().clipped_sum(batch_of(np.array(units), sizes=(4,)), Knobs((), 1.0, geometry=made))
        return torch.cat([block / scale for block, scale in zip(blocks, made.scales, strict=True)])

    for unit in range(len(rows)):
        assert float((release(rows) - release(rows[:unit] + rows[unit + 1 :])).norm()) <= 1 + 1e-12


def test_a_unit_that_is_long_inside_and_outside_uses_the_whole_bound() -> None:
    made = Basis(torch.zeros(4).double(), torch.eye(4, 2).double(), torch.ones(2).double(), 0.3, 5.0)
    blocks = Transformed().clipped_sum(batch_of([[1e6] * 4], sizes=(4,)), Knobs((), 1.0, geometry=made))
    used = [float(block.norm() / scale) ** 2 for block, scale in zip(blocks, made.scales, strict=True)]
    assert used == pytest.approx([0.7, 0.3], rel=1e-5)


@pytest.mark.parametrize("rank", [0, 3])
def test_p59_whatever_is_released_eigenvalues_stay_within_their_bounds(rank: int) -> None:
    mechanism = started("geoclip", rank=rank, explore=0.0, floor=0.5, ceiling=2.0, covariance_decay=0.1)
    start, seen = float(mechanism.controller.state_dict()["eigenvalues"][0]), []
    for scale in (1e-20, 1e6, 1e-20):
        mechanism.controller.observe(observed(release_of(scale * gradient(0))))
        seen += (mechanism.controller.state_dict()["eigenvalues"] / start).tolist()
    assert min(seen) == pytest.approx(0.5, rel=1e-12)
    assert max(seen) == pytest.approx(2.0, rel=1e-12)


def test_p59_ten_thousand_steps_of_pure_noise_keep_the_basis_finite_and_orthonormal() -> None:
    mechanism, generator = streaming(sizes=(6,), rank=2), torch.Generator().manual_seed(0)
    for _ in range(10_000):
        made, noise = basis(mechanism), torch.randn(8, generator=generator, dtype=torch.float64)
        inside, outside = noise[:2] / EXPECTED, noise[2:] * made.scales[-1]
        mechanism.controller.observe(observed(release_of(made.backward([inside]), outside)))
    made = basis(mechanism)
    torch.testing.assert_close(made.directions.T @ made.directions, torch.eye(2).double())
    assert bool((made.stretch.isfinite() & (made.stretch > 0) & made.centre.isfinite().all()).all())


@pytest.mark.parametrize("options", [{"rank": 3}, {"rank": 0, "explore": 0.0}])
def test_the_next_basis_follows_from_releases_alone(options: dict[str, Any]) -> None:
    """P0.8: two runs on different data that were shown the same releases have the same basis."""
    runs = [streaming(**options), streaming(**options)]
    for step in range(4):
        recorded = privatised(streaming(**options), raw(100 + step), seed=step)
        for data, mechanism in enumerate(runs):
            privatised(mechanism, raw(10 * step + data, scale=10.0**data))
            mechanism.controller.observe(observed(recorded))
    one, other = (mechanism.controller.state_dict() for mechanism in runs)
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert not torch.equal(one["subspace"], streaming(**options).controller.state_dict()["subspace"])


def test_exploring_is_paid_by_more_noise_inside() -> None:
    """At 20 % of the budget: 1 / sqrt(0.8); the charge stays that of one release."""
    mechanism = streaming(noise_multiplier=2.0, explore=0.2)
    assert privatised(mechanism, raw(0)).deviations[0] == pytest.approx(2.0 / math.sqrt(0.8))
    assert mechanism.release(mechanism.knobs(), 0.01).effective_noise_multiplier == 2.0


def test_a_full_covariance_of_a_large_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="rank"):
        full(sizes=(3000,))


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"rank": 0}, "rank"),  # a full basis leaves nothing to explore
        ({"rank": -1}, "rank"),
        ({"explore": 1.0}, "explore"),
        ({"explore": -0.1}, "explore"),
        ({"mean_decay": math.nan}, "mean_decay"),
        ({"covariance_decay": 2.0}, "covariance_decay"),
        ({"floor": 0.0}, "floor"),
        ({"ceiling": math.inf}, "floor"),
        ({"start_norm": 0.0}, "start_norm"),
        ({"outer_radius": math.inf}, "outer_radius"),
        ({"clipper": "flat"}, "geoclip"),
    ],
)
def test_options_that_would_not_bound_the_noise_are_refused(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        started("geoclip", **options)


def test_too_high_a_rank_is_all_directions_but_the_one_that_exploring_needs() -> None:
    assert basis(streaming(rank=50, explore=0.0)).directions.shape == (COORDINATES, COORDINATES)
    assert basis(streaming(rank=50)).directions.shape == (COORDINATES, COORDINATES - 1)
