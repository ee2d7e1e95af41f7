"""Clipping: P0.1 to P0.4 and P1.1 to P1.6 of the specification, through ``PairGradients``."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dptune.core.errors import ConfigError
from dptune.mechanisms.clippers.clipping import Flat, Unclipped
from dptune.mechanisms.controllers.control import Constant
from dptune.mechanisms.interfaces import Knobs
from dptune.mechanisms.mechanism import Mechanism
from dptune.mechanisms.noises.gaussian import Gaussian
from dptune.training.gradients.per_sample import PairGradients

torch.set_num_threads(1)

SMALL = [0.0, -0.0, 1e-45, 1e-30, -1e-20, 1e-7, 0.3, -1.0, 2.5]
LARGE = [1e4, 65504.0, -1e12, 1e18, 3e19, 1e30, -3e38, math.nan, math.inf, -math.inf]
HOSTILE = st.sampled_from(SMALL + LARGE) | st.floats(-1e3, 1e3, width=32)
RADII = st.sampled_from([1e-3, 0.1, 1.0, 7.0, 1e3])

Batch = list[NDArray[np.float32]]


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Per pair a (units, parameters) array of hostile numbers."""
    units, sizes = draw(st.integers(1, 4)), draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    return [
        np.array(draw(st.lists(HOSTILE, min_size=units * size, max_size=units * size)), dtype=np.float32).reshape(
            units, size
        )
        for size in sizes
    ]


def clipped(clipper: Flat | Unclipped, batch: Batch, radius: float = 1.0) -> NDArray[np.float64]:
    """The clipped sum of a batch as one float64 vector."""
    gradients = PairGradients([torch.from_numpy(pair.copy()) for pair in batch], torch.zeros(len(batch[0])))
    sums = clipper.clipped_sum(gradients, Knobs((radius,), 1.0))
    assert all(block.dtype == torch.float64 for block in sums)
    return torch.cat(sums).numpy()


def only(batch: Batch, units: list[int]) -> Batch:
    return [pair[units] for pair in batch]


def vector(values: list[float]) -> Batch:
    return [np.array([values], dtype=np.float32)]


@given(batch=batches(), radius=RADII)
def test_p01_no_unit_exceeds_the_radius(batch: Batch, radius: float) -> None:
    for unit in range(len(batch[0])):
        assert np.linalg.norm(clipped(Flat(radius), only(batch, [unit]), radius)) <= radius * (1 + 1e-6)


@given(batch=batches(), radius=RADII)
def test_p02_removing_a_unit_moves_the_sum_by_at_most_the_radius(batch: Batch, radius: float) -> None:
    units = list(range(len(batch[0])))
    whole = clipped(Flat(radius), batch, radius)
    for unit in units:
        rest = [other for other in units if other != unit]
        without = clipped(Flat(radius), only(batch, rest), radius) if rest else np.zeros_like(whole)
        assert np.linalg.norm(whole - without) <= radius * (1 + 1e-6)


@given(batch=batches(), radius=RADII)
def test_p03_a_units_part_does_not_depend_on_the_others(batch: Batch, radius: float) -> None:
    parts = [clipped(Flat(radius), only(batch, [unit]), radius) for unit in range(len(batch[0]))]
    np.testing.assert_allclose(clipped(Flat(radius), batch, radius), np.sum(parts, axis=0), atol=2e-6 * radius)


@pytest.mark.parametrize("size", [24_576, 65_536, 1_000_000])
@pytest.mark.parametrize("value", [1 / 3, 0.7, 1.1])
def test_p01_the_radius_holds_at_the_width_of_real_adapters(size: int, value: float) -> None:
    """A float32 norm of equal entries would be off by its rounding times the width; here nothing is."""
    batch = [np.full((2, size), value, dtype=np.float32)]
    assert 1 - 1e-8 <= np.linalg.norm(clipped(Flat(1.0), only(batch, [0]))) <= 1


def test_p04_without_clipping_the_sum_is_the_plain_sum() -> None:
    batch = [np.arange(12, dtype=np.float32).reshape(3, 4), np.ones((3, 2), dtype=np.float32)]
    np.testing.assert_array_equal(clipped(Unclipped(), batch), np.concatenate([pair.sum(axis=0) for pair in batch]))


def test_p11_inside_the_radius_nothing_changes() -> None:
    np.testing.assert_allclose(clipped(Flat(1.0), vector([0.6, -0.3])), np.float32([0.6, -0.3]), rtol=1e-8)


def test_p12_outside_the_radius_the_norm_is_the_radius_and_the_direction_stays() -> None:
    np.testing.assert_allclose(clipped(Flat(2.0), vector([30.0, 40.0]), 2.0), [1.2, 1.6], rtol=1e-8)


def test_the_norm_is_joint_over_pairs() -> None:
    batch = [np.float32([[3.0]]), np.float32([[4.0]])]
    np.testing.assert_allclose(clipped(Flat(1.0), batch), [0.6, 0.8], rtol=1e-8)


@given(batch=batches())
def test_p13_clipping_twice_is_clipping_once(batch: Batch) -> None:
    once = clipped(Flat(1.0), only(batch, [0]))
    again = clipped(Flat(1.0), [once.astype(np.float32)[None]])
    np.testing.assert_allclose(again, once, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("scale", [1e-4, 0.5, 1e4])
def test_p14_radius_and_gradient_scale_together(scale: float) -> None:
    values = [0.4, -3.0, 1.7]
    scaled = clipped(Flat(scale), vector([scale * value for value in values]), scale)
    np.testing.assert_allclose(scaled, scale * clipped(Flat(1.0), vector(values)), rtol=1e-5)


def test_p15_a_huge_radius_clips_nothing() -> None:
    np.testing.assert_allclose(clipped(Flat(1e12), vector([3.0, 1e4]), 1e12), [3.0, 1e4], rtol=1e-8)


def test_p16_a_tiny_radius_normalises() -> None:
    values = np.array([0.4, -3.0, 1.7])
    result = clipped(Flat(1e-6), vector(list(values)), 1e-6) / 1e-6
    np.testing.assert_allclose(result, values / np.linalg.norm(values), rtol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_unit_that_is_not_finite_is_dropped_and_does_not_spread(bad: float) -> None:
    batch = [np.float32([[bad, bad], [0.3, 0.4]]), np.float32([[1.0], [0.0]])]
    np.testing.assert_allclose(clipped(Flat(1.0), batch), np.float32([0.3, 0.4, 0.0]), rtol=1e-8)


def test_a_finite_unit_whose_square_is_not_is_clipped_like_any_other() -> None:
    batch = [np.float32([[3e38, 3e38], [0.3, 0.4]])]
    expected = np.float64([0.5**0.5 + 0.3, 0.5**0.5 + 0.4])
    np.testing.assert_allclose(clipped(Flat(1.0), batch), expected, rtol=1e-7)


def test_scales_and_sensitivity_agree_with_the_radius() -> None:
    """Noise z * C on every pair and a joint bound of C: the sound multiplier is z."""
    clipper = Flat(3.0)
    knobs = Knobs(clipper.initial_radii(5), 1.0)
    assert clipper.scales(knobs, 5) == (3.0,) * 5
    assert clipper.sensitivity(knobs, 5) == 1.0


@given(batch=batches(), losses=st.lists(HOSTILE, min_size=4, max_size=4))
def test_what_a_clipper_or_a_statistic_reads_is_finite(batch: Batch, losses: list[float]) -> None:
    """Gradients of a unit with any entry that is not are zero as a whole; its loss is judged on its own."""
    units = len(batch[0])
    gradients = PairGradients([torch.from_numpy(pair.copy()) for pair in batch], torch.tensor(losses[:units]))
    finite = np.all([np.isfinite(pair).all(axis=1) for pair in batch], axis=0)
    expected = np.where(finite[:, None], np.concatenate(batch, axis=1), 0.0)
    np.testing.assert_array_equal(gradients.matrix().numpy(), expected.astype(np.float64))
    starts = np.cumsum([0, *(pair.shape[1] for pair in batch)])
    norms = [np.linalg.norm(expected[:, a:b].astype(np.float64), axis=1) for a, b in itertools.pairwise(starts)]
    np.testing.assert_allclose(gradients.norms().numpy(), np.transpose(norms), rtol=1e-12, atol=0)
    kept = np.float32(losses[:units]).astype(np.float64)
    np.testing.assert_array_equal(gradients.losses().numpy(), np.where(np.isfinite(kept), kept, 0.0))


def test_without_a_bound_no_noise_is_enough() -> None:
    assert Unclipped().sensitivity(Knobs((), 1.0), 2) == math.inf
    with pytest.raises(ConfigError, match="bounds nothing, so noise cannot hide it"):
        Mechanism("hopeful", Unclipped(), Gaussian(1.0), Constant(), "gdp_clt", 2)


@pytest.mark.parametrize("radius", [0.0, -1.0, math.nan, math.inf])
def test_bad_radius_is_refused(radius: float) -> None:
    with pytest.raises(ConfigError, match="max_grad_norm"):
        Flat(radius)
