"""AdaCliP: P2.1 to P2.7 of the specification.

This project's conventions: b = sqrt(s) sqrt(sum s); variances are clamped, then smoothed; the constant expected
batch size B turns the variance of a batch mean into that of one unit.
"""

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
from dptune.mechanisms.controllers.adaclip import AdaClip, Diagonal
from dptune.mechanisms.interfaces import Knobs, Released, RunFacts
from dptune.privacy.entropy import FixedSeed
from dptune.training.gradients.per_sample import PairGradients

torch.set_num_threads(1)

COORDINATES = sum(SIZES)
HOSTILE = st.sampled_from([0.0, 1e-45, 1e-30, 1e-7, 65504.0, -1e12, 3e38, math.nan, math.inf]) | st.floats(
    -1e3, 1e3, width=32
)
SCALES = st.sampled_from([1e-300, 1e-30, 1e-6, 1.0, 1e6, 1e300]) | st.floats(1e-3, 1e3)


def controller(size: int = COORDINATES, expected: float = EXPECTED, **options: Any) -> AdaClip:
    made = AdaClip(**options)
    made.start(RunFacts((size,), torch.device("cpu"), expected, 0.01, 100, None, 1e-5))
    return made


def raw(seed: int, scale: float = 1.0) -> list[PairGradients]:
    generator = torch.Generator().manual_seed(seed)
    return [batch_of(scale * torch.randn(6, COORDINATES, generator=generator))]


def release_of(gradient: torch.Tensor, deviation: float = 1.0) -> Released:
    """What a step gives, made up: only the gradient and the noise are read."""
    return Released([gradient], [], None, Knobs((), deviation), (deviation,))


def geometry(of: AdaClip) -> Diagonal:
    made = of.knobs(Knobs((), 1.0)).geometry
    assert isinstance(made, Diagonal)
    return made


def clipped(centre: torch.Tensor, scale: torch.Tensor, gradients: PairGradients) -> torch.Tensor:
    knobs = Knobs((), 1.0, geometry=Diagonal(centre, scale))
    (block,) = Transformed().clipped_sum(gradients, knobs)
    return block


def vector(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("radius", [0.1, 1.0, 7.0])
def test_p21_with_frozen_estimates_it_is_dp_sgd_with_the_starting_radius(radius: float) -> None:
    """The same seed, so the same noise: equal up to rounding, and still so after steps that must change nothing."""
    adaclip = started("adaclip", start_norm=radius, mean_decay=1.0, variance_decay=1.0)
    static = started("static", max_grad_norm=radius)
    for seed in range(3):
        ours, theirs = (privatised(mechanism, raw(seed), seed) for mechanism in (adaclip, static))
        torch.testing.assert_close(ours.gradient, theirs.gradient, rtol=1e-5, atol=1e-5 * radius)
        adaclip.controller.observe(observed(ours))


def test_p21_the_same_estimates_unfrozen_leave_dp_sgd() -> None:
    adaclip, static = started("adaclip"), started("static")
    adaclip.controller.observe(observed(privatised(adaclip, raw(0))))
    ours, theirs = (torch.cat(privatised(mechanism, raw(1)).gradient) for mechanism in (adaclip, static))
    assert float((ours - theirs).abs().max()) > 1e-3


@given(
    rows=st.lists(st.lists(HOSTILE, min_size=3, max_size=3), min_size=1, max_size=4),
    centre=st.lists(st.floats(-1e3, 1e3), min_size=3, max_size=3),
    scale=st.lists(SCALES, min_size=3, max_size=3),
)
def test_p22_a_unit_moves_the_release_by_at_most_one_wherever_the_coordinates_are(
    rows: list[list[float]], centre: list[float], scale: list[float]
) -> None:
    gradients = torch.tensor(np.array(rows, dtype=np.float32))
    whole = clipped(vector(centre), vector(scale), PairGradients([gradients], torch.zeros(len(rows))))
    for unit in range(len(rows)):
        rest = torch.cat([gradients[:unit], gradients[unit + 1 :]])
        without = clipped(vector(centre), vector(scale), PairGradients([rest], torch.zeros(len(rest))))
        assert float((whole - without).norm()) <= 1 + 1e-12


def test_p22_a_long_gradient_uses_the_whole_bound() -> None:
    block = clipped(torch.zeros(3), vector([0.1, 1.0, 10.0]), PairGradients([torch.ones(1, 3)], torch.zeros(1)))
    assert float(block.norm()) == pytest.approx(1.0, rel=1e-5)


def test_p23_units_at_the_centre_add_nothing() -> None:
    centre = torch.tensor([0.5, -3.0, 1e-3])
    gradients = PairGradients([centre.repeat(4, 1)], torch.zeros(4))
    assert torch.equal(clipped(centre.double(), vector([1.0, 2.0, 3.0]), gradients), torch.zeros(3).double())


@pytest.mark.parametrize("scale", [2.0**-10, 0.3, 2.0**10])
def test_p24_gradients_and_estimates_scale_together(scale: float) -> None:
    released = []
    for factor in (1.0, scale):
        mechanism = started("adaclip")
        mean, variance = torch.linspace(-0.2, 0.3, COORDINATES).double(), torch.logspace(-2, 0.3, COORDINATES).double()
        mechanism.controller.load_state_dict({"mean": factor * mean, "variance": factor**2 * variance})
        released.append(privatised(mechanism, raw(3, scale=factor)))
    torch.testing.assert_close(released[1].blocks, released[0].blocks, rtol=1e-5, atol=1e-5)
    scaled = [scale * part for part in released[0].gradient]
    torch.testing.assert_close(released[1].gradient, scaled, rtol=1e-4, atol=1e-5 * scale)


def test_p24_unequal_scaling_is_no_symmetry() -> None:
    """The factor sqrt(sum s) couples the coordinates."""
    one, other = controller(2), controller(2)
    one.load_state_dict({"mean": torch.zeros(2), "variance": vector([1.0, 1.0])})
    other.load_state_dict({"mean": torch.zeros(2), "variance": vector([1.0, 100.0])})
    assert float(geometry(other).scale[0]) == pytest.approx(float(geometry(one).scale[0]) * math.sqrt(11 / 2))


@given(variance=st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=8))
def test_p25_the_noise_energy_is_least_for_the_same_clipped_share(variance: list[float]) -> None:
    """(sum s)^2 against d sum s^2 of equal scales; both transform deviations s to a norm of 1 on average."""
    made = controller(len(variance))
    made.load_state_dict({"mean": torch.zeros(len(variance)), "variance": vector(variance)})
    scale, deviations = geometry(made).scale, vector(variance).sqrt()
    assert float((deviations / scale).square().sum()) == pytest.approx(1.0, rel=1e-9)
    energy = float(scale.square().sum())
    assert energy == pytest.approx(float(deviations.sum()) ** 2, rel=1e-9)
    assert energy <= len(variance) * sum(variance) * (1 + 1e-9)


def test_p25_equal_deviations_save_nothing_and_unequal_ones_do() -> None:
    made = controller(4)
    made.load_state_dict({"mean": torch.zeros(4), "variance": vector([9.0] * 4)})
    assert float(geometry(made).scale.square().sum()) == pytest.approx(4 * 4 * 9.0)
    made.load_state_dict({"mean": torch.zeros(4), "variance": vector([36.0, 0.0001, 0.0001, 0.0001])})
    assert float(geometry(made).scale.square().sum()) < 0.3 * 4 * 36.0


@given(
    values=st.lists(HOSTILE.filter(math.isfinite), min_size=COORDINATES, max_size=COORDINATES),
    deviation=st.sampled_from([1e-6, 1.0, 1e6]),
)
def test_p26_whatever_is_released_variances_stay_within_their_bounds(values: list[float], deviation: float) -> None:
    made = controller(floor=0.1, ceiling=3.0, mean_decay=0.5, variance_decay=0.0)
    for _ in range(3):
        made.observe(observed(release_of(torch.tensor(values), deviation)))
        variance = made.state_dict()["variance"]
        assert bool(
            ((variance >= 0.1 / COORDINATES * (1 - 1e-12)) & (variance <= 3.0 / COORDINATES * (1 + 1e-12))).all()
        )


@pytest.mark.parametrize(("noise", "steps"), [(0.1, 1_000), (10.0, 10_000)])
def test_p26_many_steps_of_pure_noise_keep_the_scales_finite(noise: float, steps: int) -> None:
    """Little noise makes the deviations sink to the floor, much noise lifts them to the ceiling, and no further."""
    made, generator = controller(4, floor=0.01, ceiling=10.0), torch.Generator().manual_seed(0)
    for _ in range(steps):
        gradient = geometry(made).scale * noise * torch.randn(4, generator=generator) / EXPECTED
        made.observe(observed(release_of(gradient, noise)))
    radius = made.metrics()["equivalent_radius"]
    assert math.sqrt(0.01) <= radius <= math.sqrt(10.0)
    assert (radius > 1.0) == (noise > 1.0)
    assert bool((geometry(made).scale > 0).all())


def test_p26_deviations_become_those_of_one_unit() -> None:
    """Without the factor B they would be 10 times too small. Deterministic: the seed is fixed."""
    true, batch, noise = vector([0.3, 1.0, 0.6, 2.0]), 100.0, 0.2
    made = controller(4, batch, start_norm=2.0, floor=1e-6, ceiling=1e3, variance_decay=0.998)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4000):
        mean = 0.2 + true / math.sqrt(batch) * torch.randn(4, generator=generator, dtype=torch.float64)
        added = geometry(made).scale * noise / batch * torch.randn(4, generator=generator, dtype=torch.float64)
        made.observe(observed(release_of(mean + added, noise)))
    state = made.state_dict()
    torch.testing.assert_close(state["variance"].sqrt(), true, rtol=0.2, atol=0.0)
    torch.testing.assert_close(state["mean"], vector([0.2] * 4), rtol=0.0, atol=0.1)


def test_p26_the_noise_of_the_release_is_not_taken_for_deviation() -> None:
    """Every release lies exactly one standard deviation of its noise away: nothing is left over."""
    made = controller(3, 1.0, floor=1e-6, ceiling=1e6, variance_decay=0.99, mean_decay=1.0)
    generator = torch.Generator().manual_seed(0)
    start = float(made.state_dict()["variance"][0])
    for _ in range(3000):
        scale = geometry(made).scale
        signs = torch.sign(torch.randn(3, generator=generator, dtype=torch.float64))
        made.observe(observed(release_of(scale * 10.0 * signs, 10.0)))
    assert float(made.state_dict()["variance"].max()) < 1e-3 * start


def variance_ratio(noise: float) -> float:
    """Estimated variance of coordinates with nine times the variance of the others, over that of the others."""
    size, batch = 1024, 64
    made, generator = started("adaclip", (size,), batch, noise_multiplier=noise, variance_decay=0.9), torch.Generator()
    scale = vector([3.0] * (size // 2) + [1.0] * (size // 2)).float() / math.sqrt(5 * size)
    for step in range(30):
        rows = scale * torch.randn(batch, size, generator=generator.manual_seed(step))
        units, zero = [batch_of(rows, sizes=(size,))], [torch.zeros(size, dtype=torch.float64)]
        made.controller.observe(observed(made.privatise(units, zero, made.knobs(), batch, FixedSeed(step))))
    variance = made.controller.state_dict()["variance"]
    return float(variance[: size // 2].mean() / variance[size // 2 :].mean())


def test_where_noise_drowns_the_signal_coordinates_hardly_differ() -> None:
    """With d z^2 / B at 39, as in docs/findings/comparison.md, and at 0.006."""
    assert variance_ratio(math.sqrt(39 * 64 / 1024)) < 1.1
    assert variance_ratio(0.02) > 5


def test_p27_the_next_coordinates_follow_from_releases_alone() -> None:
    """P0.8: two runs on different data that were shown the same releases have the same coordinates."""
    runs = [started("adaclip"), started("adaclip")]
    for step in range(4):
        recorded = privatised(started("adaclip"), raw(100 + step), seed=step)
        for data, mechanism in enumerate(runs):
            privatised(mechanism, raw(10 * step + data, scale=10.0**data))
            mechanism.controller.observe(observed(recorded))
    one, other = (mechanism.controller.state_dict() for mechanism in runs)
    assert torch.equal(one["mean"], other["mean"])
    assert torch.equal(one["variance"], other["variance"])
    assert float(one["variance"].std()) > 0


def test_it_costs_nothing_and_reads_releases_only() -> None:
    mechanism = started("adaclip", noise_multiplier=1.5)
    release = mechanism.release(mechanism.knobs(), 0.01)
    assert (release.effective_noise_multiplier, release.leaks, release.adaptive) == (1.5, (), False)
    assert release.statistics == ("gradient sum",)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"mean_decay": 1.1}, "mean_decay"),
        ({"variance_decay": math.nan}, "variance_decay"),
        ({"floor": 0.0}, "floor"),
        ({"ceiling": math.inf}, "floor"),
        ({"floor": 2.0}, "floor"),
        ({"start_norm": 0.0}, "start_norm"),
        ({"start_norm": math.nan}, "start_norm"),
        ({"clipper": "flat"}, "adaclip"),
    ],
)
def test_options_that_would_not_bound_the_noise_are_refused(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        started("adaclip", **options)


def test_it_is_not_what_opacus_calls_adaclip() -> None:
    """Opacus moves one radius by a noisy count (Andrew et al. 2021), so directions stay; here every coordinate has
    a scale of its own.
    """
    optimizers = pytest.importorskip("opacus.optimizers")
    layer = torch.nn.Linear(3, 1, bias=False)
    theirs = optimizers.AdaClipDPOptimizer(
        torch.optim.SGD(layer.parameters(), lr=1.0),
        noise_multiplier=0.0,
        target_unclipped_quantile=0.5,
        clipbound_learning_rate=0.2,
        max_clipbound=100.0,
        min_clipbound=1e-3,
        unclipped_num_std=1e-6,
        max_grad_norm=1.0,
        expected_batch_size=1,
    )
    gradient = torch.tensor([[100.0, 1.0, 0.01]])
    ours = controller(3, ceiling=1e6)
    for _ in range(3):
        theirs.zero_grad()
        layer.weight.grad_sample = gradient[:, None]
        theirs.step()
        ours.observe(observed(release_of(gradient[0], 1e-3)))
    moved = torch.as_tensor(theirs.max_grad_norm)
    assert moved.numel() == 1
    assert float(moved) != 1.0
    direction = torch.nn.functional.normalize(layer.weight.grad.flatten(), dim=0)
    torch.testing.assert_close(direction, torch.nn.functional.normalize(gradient[0], dim=0))
    assert len(set(geometry(ours).scale.tolist())) == 3


def test_a_unit_that_overflows_in_other_coordinates_gives_nothing_and_spoils_no_other() -> None:
    """A gradient of 1e30 over a scale of 1e-300 is infinite, and infinity times a factor of 0 is no number."""
    zero = torch.zeros(sum(SIZES), dtype=torch.float64)
    knobs = Knobs((), 1.0, geometry=Diagonal(zero, torch.full_like(zero, 1e-300)))
    fine, huge = np.zeros((2, sum(SIZES)))
    huge[:] = 1e30
    (both,) = Transformed().clipped_sum(batch_of([fine, huge]), knobs)
    (alone,) = Transformed().clipped_sum(batch_of([huge]), knobs)
    assert not both.any()
    assert not alone.any()
