"""Adaptive quantile clipping: P9.1 to P9.7 of the specification, and what Opacus does differently."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mechanism_steps import EXPECTED, RATE, batch_of, observed, privatised, shift, started, sums

from dptune.core.errors import ConfigError
from dptune.mechanisms.controllers.quantile import Quantile
from dptune.mechanisms.interfaces import Released
from dptune.mechanisms.mechanism import Mechanism

torch.set_num_threads(1)


def told(mechanism: Mechanism, counts: list[float]) -> tuple[float, ...]:
    """The next radii of a controller that is told these noisy centred counts."""
    released = Released([], [], torch.tensor(counts), mechanism.knobs(), ())
    mechanism.controller.observe(observed(released))
    return mechanism.knobs().radii


def units(norms: list[float]) -> Any:
    """A batch whose units have these gradient norms, all in the first coordinate."""
    return batch_of([[norm] + [0.0] * 7 for norm in norms])


@given(z=st.floats(0.05, 5), surplus=st.floats(1.01, 100), pairs=st.sampled_from([1, 3]))
def test_p91_gradients_and_counts_together_cost_what_is_charged(z: float, surplus: float, pairs: int) -> None:
    """z_T^-2 + K (2 z_b)^-2 = z^-2, for one radius and for one a pair."""
    z_b = surplus * z * math.sqrt(pairs) / 2
    entry = {"clipper": "per_pair"} if pairs == 3 else {}
    mechanism = started("quantile", noise_multiplier=z, count_noise=z_b, **entry)
    knobs = mechanism.knobs()
    *gradients, counts = (z * scale for scale in mechanism.scales(knobs))
    z_gradients = math.fsum((r / s) ** 2 for r, s in zip(knobs.radii, gradients, strict=False)) ** -0.5
    assert counts == pytest.approx(z_b, rel=1e-12)
    assert z_gradients**-2 + pairs / (2 * z_b) ** 2 == pytest.approx(z**-2, rel=1e-9)
    assert mechanism.release(knobs, RATE).effective_noise_multiplier == z


@pytest.mark.parametrize("pairs", [1, 3])
def test_p91_counts_that_alone_cost_too_much_are_refused_before_the_first_step(pairs: int) -> None:
    entry = {"clipper": "per_pair"} if pairs == 3 else {}
    limit = math.sqrt(pairs) / 2
    started("quantile", count_noise=limit * 1.001, **entry)
    with pytest.raises(ConfigError, match="statistics"):
        started("quantile", count_noise=limit * 0.999, **entry)


@pytest.mark.parametrize(("z", "expected"), [(0.1, 16.0), (1.0, 16.0), (1.0, 1000.0), (30.0, 16.0)])
def test_the_recommended_count_noise_is_the_papers_but_never_takes_more_than_a_twentieth(
    z: float, expected: float
) -> None:
    mechanism = started("quantile", expected=expected, noise_multiplier=z)
    deviation = z * mechanism.scales(mechanism.knobs())[-1]
    assert deviation == pytest.approx(max(expected / 20, z / 2 / math.sqrt(0.05)))
    assert (z / (2 * deviation)) ** 2 <= 0.05 * (1 + 1e-9)


@given(norms=st.lists(st.floats(0, 10), max_size=5), extra=st.sampled_from([0.0, 0.3, 1.0, 1.5, 1e30, math.nan]))
def test_p92_a_unit_changes_every_centred_count_by_a_half(norms: list[float], extra: float) -> None:
    """A unit that is not finite counts as one without gradient."""
    for entry in ({}, {"clipper": "per_pair", "pair_radius": 1.0}):
        mechanism = started("quantile", max_grad_norm=1.0, **entry)
        without, whole = (sums(mechanism, [units(rows)])[-1] for rows in (norms, [*norms, extra]))
        change = whole - without
        assert change.abs().tolist() == [0.5] * len(mechanism.knobs().radii)
        assert (float(change[0]) > 0) == (not extra > 1)


@pytest.mark.parametrize("target", [0.2, 0.5, 0.9])
def test_p93_without_noise_the_radius_finds_the_quantile(target: float) -> None:
    norms = np.random.default_rng(0).lognormal(0.0, 1.0, 4001)
    batch = units(norms.tolist())
    mechanism = started("quantile", expected=float(len(norms)), target=target, max_grad_norm=0.01)
    for _ in range(500):
        radii = told(mechanism, sums(mechanism, [batch])[-1].tolist())
    assert radii[0] == pytest.approx(np.quantile(norms, target), rel=0.03)


def test_p93_one_radius_a_pair_finds_the_quantile_of_each() -> None:
    scales = np.repeat([0.1, 1.0, 10.0], (3, 1, 4))
    rows = np.random.default_rng(0).standard_normal((801, 8)) * scales
    batch = batch_of(rows)
    mechanism = started("quantile", expected=801.0, clipper="per_pair")
    for _ in range(300):
        radii = told(mechanism, sums(mechanism, [batch])[-1].tolist())
    assert radii == pytest.approx(np.median(batch.norms().numpy(), axis=0), rel=0.03)


@pytest.mark.parametrize(("count", "bound"), [(1e9, 1e-4), (-1e9, 100.0), (3e38, 1e-4), (-3e38, 100.0)])
def test_p94_no_count_however_noisy_takes_the_radius_out_of_its_bounds(count: float, bound: float) -> None:
    mechanism = started("quantile", rate=2.0)
    assert told(mechanism, [count]) == (bound,)
    assert told(mechanism, [count]) == (bound,)


def test_p95_without_rate_and_with_endless_count_noise_it_is_dp_sgd() -> None:
    mechanism, static = started("quantile", rate=0.0, count_noise=1e9), started("static")
    batch = [units([0.2, 3.0, 50.0])]
    for seed in range(3):
        released = privatised(mechanism, batch, seed)
        torch.testing.assert_close(released.gradient, privatised(static, batch, seed).gradient)
        mechanism.controller.observe(observed(released))
    assert mechanism.knobs().radii == (1.0,)


@given(scale=st.floats(1e-3, 1e3))
def test_p96_norms_and_radius_scale_together(scale: float) -> None:
    """The starting radius is no multiple of a norm, so rounding decides no comparison."""
    norms, radii = [0.11, 0.52, 0.93, 2.7, 8.1], []
    for factor in (1.0, scale):
        bounds = {"lowest_radius": 1e-9 * factor, "highest_radius": 1e9 * factor}
        mechanism = started("quantile", max_grad_norm=0.37 * factor, rate=0.5, **bounds)
        for _ in range(5):
            told(mechanism, sums(mechanism, [units([factor * norm for norm in norms])])[-1].tolist())
        radii.append(mechanism.knobs().radii[0])
    assert radii[1] == pytest.approx(scale * radii[0], rel=1e-9)


def test_p97_an_empty_batch_is_a_half_and_noise() -> None:
    mechanism = started("quantile")
    released = privatised(mechanism, [], seed=2)
    assert released.statistics is not None
    mechanism.controller.observe(observed(released))
    noise = float(released.statistics[0])
    assert noise != 0
    assert mechanism.controller.metrics() == {"unclipped_estimate_0": pytest.approx(noise / EXPECTED + 0.5)}
    before = mechanism.knobs().radii
    assert told(mechanism, [0.0]) == before


def test_p08_the_next_radius_is_a_function_of_the_counts_and_not_of_the_data() -> None:
    one, other = started("quantile"), started("quantile")
    for counts in ([-3.0], [5.0], [0.25]):
        privatised(one, [units([1e9] * 30)])
        privatised(other, [units([0.0])])
        assert told(one, counts) == told(other, counts)


def opacus_step(norms: list[float], noise_multiplier: float = 0.0, count_noise: float = 1e-12) -> Any:
    """One step of Opacus' AdaClip on units with these norms, by default with no noise to speak of."""
    optimizers = pytest.importorskip("opacus.optimizers")
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = optimizers.AdaClipDPOptimizer(
        torch.optim.SGD([weight], lr=0.0),
        noise_multiplier=noise_multiplier,
        target_unclipped_quantile=0.5,
        clipbound_learning_rate=0.2,
        max_clipbound=1e9,
        min_clipbound=1e-9,
        unclipped_num_std=count_noise,
        max_grad_norm=1.0,
        expected_batch_size=int(EXPECTED),
    )
    weight.grad_sample = torch.tensor([[norm, 0.0] for norm in norms])
    optimizer.step()
    return optimizer


def test_opacus_divides_the_noisy_count_by_the_private_size_of_the_batch() -> None:
    """Same noisy count, other next radius: it depends on units that are in no release. Ours uses the constant."""
    few, many = opacus_step([0.5] * 3 + [9.0]), opacus_step([0.5] * 3 + [9.0] * 9)
    assert float(few.unclipped_num) == pytest.approx(float(many.unclipped_num), abs=1e-6)
    assert float(few.max_grad_norm) == pytest.approx(math.exp(-0.2 * (3 / 4 - 0.5)), rel=1e-5)
    assert float(many.max_grad_norm) == pytest.approx(math.exp(-0.2 * (3 / 12 - 0.5)), rel=1e-5)

    ours = [started("quantile"), started("quantile")]
    for mechanism, clipped in zip(ours, (1, 9), strict=True):
        privatised(mechanism, [units([0.5] * 3 + [9.0] * clipped)])
    assert told(ours[0], [-2.0]) == told(ours[1], [-2.0])


def test_opacus_counts_one_where_its_split_of_the_budget_assumes_a_half() -> None:
    """So one unit more moves its release by more than the accountant is told; ours by just as much."""
    z, count_noise = 1.0, 0.8
    without, whole = opacus_step([9.0]), opacus_step([9.0, 0.999])
    change = float(whole.unclipped_num) - float(without.unclipped_num)
    assert change == pytest.approx(1, abs=1e-6)

    z_gradients = (z**-2 - (2 * count_noise) ** -2) ** -0.5
    theirs = math.hypot(0.999 / z_gradients, change / count_noise)
    assert theirs > 1.4 / z
    ours = started("quantile", noise_multiplier=z, count_noise=count_noise, max_grad_norm=1.0)
    found = shift(ours, [units([9.0, 1.0])], [units([9.0])])
    assert found == pytest.approx(1 / z, rel=1e-6)


def test_opacus_adds_the_gradient_noise_that_its_split_says() -> None:
    """The premise of the test above. 4,000 draws, 12 %, ten standard errors: false alarm below 1e-22."""
    torch.manual_seed(0)
    optimizers = pytest.importorskip("opacus.optimizers")
    weight = torch.nn.Parameter(torch.zeros(4000))
    optimizer = optimizers.AdaClipDPOptimizer(
        torch.optim.SGD([weight], lr=0.0),
        noise_multiplier=1.0,
        target_unclipped_quantile=0.5,
        clipbound_learning_rate=0.2,
        max_clipbound=1e9,
        min_clipbound=1e-9,
        unclipped_num_std=0.8,
        max_grad_norm=1.0,
        expected_batch_size=1,
    )
    weight.grad_sample = torch.zeros(1, 4000)
    optimizer.step()
    assert float(weight.grad.std()) == pytest.approx((1 - 1.6**-2) ** -0.5, rel=0.12)


@pytest.mark.parametrize("clipper", ["transformed", "none"])
def test_a_clipper_without_radii_is_refused(clipper: str) -> None:
    with pytest.raises(ConfigError, match="controller quantile"):
        started("quantile", clipper=clipper)


def test_before_it_is_started_it_releases_nothing() -> None:
    mechanism = Quantile()
    assert mechanism.statistics(started("static").knobs(), 1.0) is None


@pytest.mark.parametrize(
    ("option", "bad"),
    [
        *(("target", bad) for bad in (0, 1, -0.5, "nan", "half", None)),
        *(("rate", bad) for bad in (-0.1, "nan", "inf", "fast")),
        *(("count_noise", bad) for bad in (-1, "nan", "inf")),
        *(("lowest_radius", bad) for bad in (0, -1, "nan", "inf")),
        ("highest_radius", 1e-9),
        *(("highest_radius", bad) for bad in (0, 1e-5, "nan", "inf")),
    ],
)
def test_bad_options_are_refused(option: str, bad: Any) -> None:
    with pytest.raises(ConfigError, match=option):
        started("quantile", **{option: bad})
