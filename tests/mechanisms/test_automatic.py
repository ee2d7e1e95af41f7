"""AUTO-S: P10.1 to P10.7 of the specification."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mechanism_steps import batch_of, privatised, started, sums, zeros

from dptune.core.errors import ConfigError
from dptune.mechanisms.clippers.automatic import AutoS
from dptune.mechanisms.clippers.psac import Psac
from dptune.privacy.entropy import FixedSeed

torch.set_num_threads(1)

NORMS = st.floats(1e-20, 1e12)
ROW = [0.6, -1.2, 0.3, 2.0, 0.0, -0.7, 1.1, 0.4]


def summed(rows: Any, **entry: Any) -> torch.Tensor:
    """The normalised sum of a batch over all pairs."""
    return torch.cat(sums(started("auto_s", **entry), [batch_of(rows)]))


@given(norms=st.lists(NORMS, min_size=2, max_size=2, unique=True))
def test_the_output_norm_rises_with_the_norm_and_stays_below_r(norms: list[float]) -> None:
    values = torch.tensor(sorted(norms), dtype=torch.float64)
    low, high = (AutoS(2.0, 0.01).factors(values, 2.0) * values).tolist()
    assert 0 < low <= high * (1 + 1e-15)  # near 2 both round
    assert high <= 2.0


@pytest.mark.parametrize("norm", [1e-6, 1e-12, 1e-20])
def test_p102_tiny_gradients_are_amplified_and_not_clamped_at_one(norm: float) -> None:
    row = torch.tensor(ROW, dtype=torch.float64) * norm
    torch.testing.assert_close(summed([row.tolist()], max_grad_norm=1.0), 100 * row, rtol=1e-3, atol=0)


@given(scale=st.floats(0.01, 100))
def test_p104_without_gamma_only_the_direction_counts(scale: float) -> None:
    one, other = (summed([[factor * value for value in ROW]], stabiliser=1e-12) for factor in (1.0, scale))
    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def trajectory(radius: float) -> torch.Tensor:
    """Parameters after every step of Adam without its epsilon, on normalised gradients with noise from one seed."""
    mechanism = started("auto_s", max_grad_norm=radius)
    parameters = [torch.zeros(size, requires_grad=True) for size in (3, 1, 4)]
    optimizer, entropy = torch.optim.AdamW(parameters, lr=0.1, eps=0.0, weight_decay=0.0), FixedSeed(4)
    generator, points = torch.Generator().manual_seed(0), []
    for _ in range(12):
        batch = batch_of(torch.randn(6, 8, generator=generator))
        released = mechanism.privatise([batch], zeros(), mechanism.knobs(), 16.0, entropy)
        for parameter, gradient in zip(parameters, released.gradient, strict=True):
            parameter.grad = gradient
        optimizer.step()
        points.append(torch.cat([parameter.detach().clone() for parameter in parameters]))
    return torch.stack(points)


def test_p105_adam_makes_the_radius_irrelevant() -> None:
    one = trajectory(1.0)
    torch.testing.assert_close(one, trajectory(7.0), rtol=1e-3, atol=1e-4)
    assert float(one.diff(dim=0).abs().min()) > 1e-4, "it does move"


def test_p106_far_above_gamma_it_is_dp_sgd_with_a_tiny_radius() -> None:
    rows = torch.randn(5, 8, generator=torch.Generator().manual_seed(1)) * 1e4
    flat = torch.cat(sums(started("static", max_grad_norm=1e-6), [batch_of(rows)]))
    torch.testing.assert_close(summed(rows, max_grad_norm=3.0) / 3.0, flat / 1e-6, rtol=1e-4, atol=1e-4)


@given(
    r=st.sampled_from([0.05, 0.1, 0.5]),
    gamma=st.sampled_from([0.001, 0.01, 0.04]),
    share=st.floats(0.01, 0.99) | st.floats(1.01, 100),
)
def test_p107_psac_weighs_less_below_the_crossing_and_more_above(r: float, gamma: float, share: float) -> None:
    norms = torch.tensor([share * (r / gamma - r), r / gamma - r], dtype=torch.float64)
    difference = Psac(1.0, r).factors(norms, 1.0) - AutoS(1.0, gamma).factors(norms, 1.0)
    assert (float(difference[0]) < 0) == (share < 1)
    assert float(difference[1]) == pytest.approx(0, abs=1e-12 / gamma)


def test_noise_is_the_radius_times_the_multiplier_and_not_gamma() -> None:
    """As a public implementation of NSGD has it."""
    mechanism = started("auto_s", max_grad_norm=3.0, stabiliser=0.5, noise_multiplier=2.0)
    assert privatised(mechanism, []).deviations == (6.0, 6.0, 6.0)


@pytest.mark.parametrize("option", ["stabiliser", "max_grad_norm"])
@pytest.mark.parametrize("bad", [0, -1, "nan", "inf", "small", None])
def test_bad_options_are_refused(option: str, bad: Any) -> None:
    with pytest.raises(ConfigError, match=option) as caught:
        started("auto_s", **{option: bad})
    assert caught.value.field == option
