"""PSAC: P6.1 to P6.8 of the specification, and what two public implementations get wrong."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mechanism_steps import batch_of, privatised, started, sums

from dptune.core.errors import ConfigError
from dptune.mechanisms.clippers.psac import Psac

torch.set_num_threads(1)

GRID = torch.cat([torch.zeros(1, dtype=torch.float64), torch.logspace(-12, 12, 400, dtype=torch.float64)])
R = st.sampled_from([0.001, 0.01, 0.1, 0.5, 0.99])
ROW = torch.tensor([0.6, -1.2, 0.3, 2.0, 0.0, -0.7, 1.1, 0.4], dtype=torch.float64)


def weight(norms: torch.Tensor, r: float, radius: float = 1.0) -> torch.Tensor:
    return Psac(radius, r).factors(norms, radius)


@given(r=R, radius=st.sampled_from([0.1, 1.0, 20.0]))
def test_p62_the_output_norm_rises_strictly_and_stays_below_the_radius(r: float, radius: float) -> None:
    """The gap to the radius is r / n^2 of it; far out a double cannot tell."""
    outputs = GRID * weight(GRID, r, radius)
    strict = GRID < 1e4
    assert bool((outputs[strict].diff() > 0).all())
    assert bool((outputs.diff() >= -1e-15 * radius).all())
    assert bool((outputs[GRID < 1e5] < radius).all())
    assert float(outputs[-1]) == pytest.approx(radius, rel=1e-9)


@given(r=R, radius=st.sampled_from([0.1, 1.0, 20.0]))
def test_p63_the_weight_at_zero_is_exactly_the_radius(r: float, radius: float) -> None:
    assert float(weight(torch.zeros(1, dtype=torch.float64), r, radius)) == radius


@pytest.mark.parametrize(("r", "peak", "at"), [(0.1, 1.878, 0.2162), (0.01, 5.263, 0.09)])
def test_p64_the_weight_rises_to_its_maximum_and_falls_again(r: float, peak: float, at: float) -> None:
    norms = torch.linspace(0, 1, 100_001, dtype=torch.float64)
    weights = weight(norms, r)
    best = int(weights.argmax())
    assert float(norms[best]) == pytest.approx(math.sqrt(r) - r, abs=1e-4) == pytest.approx(at, abs=2e-4)
    assert float(weights[best]) == pytest.approx(1 / (2 * math.sqrt(r) - r), rel=1e-8) == pytest.approx(peak, abs=1e-3)
    assert bool((weights[: best + 1].diff() > 0).all())
    assert bool((weights[best:].diff() < 0).all())


@pytest.mark.parametrize("norm", [0.01, 0.3, 5.0])
def test_p65_a_tiny_r_normalises(norm: float) -> None:
    row = ROW / ROW.norm() * norm
    found = torch.cat(sums(started("psac", r=1e-12, max_grad_norm=2.0), [batch_of([row.tolist()])]))
    torch.testing.assert_close(found, 2.0 * row / norm, rtol=1e-6, atol=1e-7)


def test_p66_the_noise_does_not_depend_on_the_data() -> None:
    mechanism = started("psac", max_grad_norm=3.0)
    noises = []
    for rows in ([[0.2162 / 8**0.5] * 8] * 5, [[1e9] * 8], [[0.0] * 8]):
        batch = [batch_of(rows)]
        released = privatised(mechanism, batch, seed=6)
        assert released.deviations == (3.0, 3.0, 3.0)
        noises.append(torch.cat(released.blocks) - torch.cat(sums(mechanism, batch)))
    torch.testing.assert_close(noises[0], noises[2], rtol=0, atol=1e-5)
    torch.testing.assert_close(noises[1], noises[2], rtol=0, atol=1e-5)


@given(norm=st.sampled_from([1e-20, 1e-3, 0.2, 1.0, 1e20]))
def test_p67_the_direction_stays(norm: float) -> None:
    found = torch.cat(sums(started("psac"), [batch_of([(ROW * norm).tolist()])]))
    torch.testing.assert_close(found / found.norm(), ROW / ROW.norm(), rtol=1e-6, atol=1e-9)


def test_p68_it_is_not_a_threshold_with_the_noise_of_the_largest_weight_in_the_batch() -> None:
    """That one clips at C_i = C w(n_i) and scales the noise by max C_i: one unit then changes everyone's noise."""
    r, tiny, peak = 0.1, 1e-6, math.sqrt(0.1) - 0.1
    norms = torch.tensor([tiny, peak, 10.0], dtype=torch.float64)
    thresholds = weight(norms, r)
    as_threshold = (thresholds / norms).clamp(max=1.0)
    assert not torch.allclose(as_threshold, weight(norms, r), rtol=0.1)
    assert float(thresholds[:1].max()) < 0.6 * float(thresholds[:2].max()), "its noise tells who is in the batch"

    mechanism = started("psac", r=r)
    direction = (ROW / ROW.norm()).tolist()
    small, both = ([[n * value for value in direction] for n in chosen] for chosen in ([tiny], [tiny, peak]))
    assert privatised(mechanism, [batch_of(small)]).deviations == privatised(mechanism, [batch_of(both)]).deviations
    moved = torch.cat(sums(mechanism, [batch_of(both)])) - torch.cat(sums(mechanism, [batch_of(small)]))
    assert float(moved.norm()) == pytest.approx(peak / (2 * math.sqrt(r) - r), rel=1e-5)


def test_p68_the_precedence_slip_would_kill_tiny_gradients() -> None:
    """r / n + r in place of r / (n + r) keeps norms below C, so no bound would notice."""
    r, norms = 0.1, torch.tensor([1e-3, 1e-6, 1e-9], dtype=torch.float64)
    slipped = 1 / (norms + r / norms + r)
    assert bool((slipped * norms < 1).all())
    assert bool((slipped < 0.02).all())
    torch.testing.assert_close(weight(norms, r), torch.ones_like(norms), rtol=0.02, atol=0)
    found = torch.cat(sums(started("psac", r=r), [batch_of([(1e-9 * ROW).tolist()])]))
    torch.testing.assert_close(found, 1e-9 * ROW, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [0, 1, -0.1, 1.5, "nan", "inf", "small", None])
def test_r_outside_zero_and_one_is_refused(bad: Any) -> None:
    with pytest.raises(ConfigError, match="r:") as caught:
        started("psac", r=bad)
    assert caught.value.field == "r"


@pytest.mark.parametrize("bad", [0, -1, "nan", "inf"])
def test_bad_radius_is_refused(bad: Any) -> None:
    with pytest.raises(ConfigError, match="max_grad_norm"):
        started("psac", max_grad_norm=bad)
