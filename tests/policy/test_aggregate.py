"""The release of users' updates: clip, sum, noise, constant divisor."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dptune.core.errors import ConfigError
from dptune.policy.user_updates import noisy_means, project_to_ball
from dptune.privacy.entropy import FixedSeed, OsEntropy

_ANY = st.floats(allow_nan=True, allow_infinity=True, width=32)


@given(st.lists(st.lists(_ANY, min_size=3, max_size=3), min_size=1, max_size=5), st.floats(1e-6, 1e6))
@settings(max_examples=200, deadline=None)
def test_no_row_is_longer_than_the_radius_whatever_it_holds(rows: list[list[float]], radius: float) -> None:
    clipped = project_to_ball(torch.tensor(rows), radius)
    assert bool(clipped.isfinite().all())
    assert float(clipped.norm(dim=1).max()) <= radius * (1 + 1e-12)


def test_a_short_row_is_kept_and_a_long_one_keeps_its_direction() -> None:
    rows = torch.tensor([[0.3, 0.4], [30.0, 40.0], [math.nan, 0.0]])
    assert torch.equal(project_to_ball(rows, 1.0)[0], rows[0].double())
    assert project_to_ball(rows, 1.0)[1].tolist() == pytest.approx([0.6, 0.8])
    assert project_to_ball(rows, 1.0)[2].tolist() == [0.0, 0.0]


@given(st.integers(2, 6), st.integers(0, 5), st.floats(0.01, 10))
@settings(max_examples=50, deadline=None)
def test_a_zeroed_user_moves_the_joint_release_by_one_over_z(users: int, seed: int, radius: float) -> None:
    """Property t1 of the spec, and 1 / z_p^2 + 1 / z_v^2 = 1 / z^2, with rows that reach the bound."""
    generator = torch.Generator().manual_seed(seed)
    radii, multipliers = (radius, 0.3), (math.sqrt(2), math.sqrt(2))
    blocks = [1e6 * torch.randn(users, size, generator=generator) for size in (4, 2)]
    without = [torch.cat([block[:-1], torch.zeros_like(block[-1:])]) for block in blocks]
    silent = (0.0, 0.0)
    moved = [
        float((one - other).norm()) * users / (radius * z)
        for one, other, radius, z in zip(
            noisy_means(blocks, radii, silent, users, OsEntropy()),
            noisy_means(without, radii, silent, users, OsEntropy()),
            radii,
            multipliers,
            strict=True,
        )
    ]
    assert math.hypot(*moved) == pytest.approx(1.0, rel=1e-4)


def test_noise_of_the_mean_is_z_times_radius_over_users() -> None:
    """Property t2 of the spec. 40,000 draws a block: the deviation is within 2 %, false-alarm rate below 1e-7."""
    blocks = [torch.zeros(8, 40_000), torch.zeros(8, 40_000)]
    found = noisy_means(blocks, (0.05, 0.3), (1.5, 3.0), 8, OsEntropy())
    assert float(found[0].std()) == pytest.approx(1.5 * 0.05 / 8, rel=0.02)
    assert float(found[1].std()) == pytest.approx(3.0 * 0.3 / 8, rel=0.02)
    correlation = float(torch.corrcoef(torch.stack(found))[0, 1])
    assert abs(correlation) < 0.03  # 6 deviations


def test_a_null_user_counts_in_the_divisor() -> None:
    """Property t5 of the spec: a null user adds nothing to the sum, and the divisor stays K."""
    rows = torch.tensor([[0.1, 0.0], [0.0, 0.1], [0.0, 0.0]])
    assert noisy_means([rows], (1.0,), (0.0,), 3, FixedSeed(0))[0].tolist() == pytest.approx([0.1 / 3, 0.1 / 3])


@pytest.mark.parametrize("came", [0, 2, 5])
def test_the_divisor_is_the_expected_number_however_many_come(came: int) -> None:
    """If the sum were divided by the number of users who came, one who leaves would change everybody's share."""
    (found,) = noisy_means([torch.full((came, 2), 0.1)], (1.0,), (0.0,), 3, FixedSeed(0))
    assert found.tolist() == pytest.approx([0.1 * came / 3] * 2)


@pytest.mark.parametrize(
    ("blocks", "multipliers"),
    [([torch.zeros(2, 3), torch.zeros(3, 1)], (1.0, 1.0)), ([torch.zeros(2, 3), torch.zeros(2, 1)], (1.0, 0.0))],
)
def test_blocks_of_other_users_or_without_noise_are_refused(
    blocks: list[torch.Tensor], multipliers: tuple[float, ...]
) -> None:
    with pytest.raises(ConfigError):
        noisy_means(blocks, (1.0, 1.0), multipliers, 3, OsEntropy())
