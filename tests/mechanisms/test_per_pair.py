"""Group-wise clipping and DP-LoRA: P7.1, P7.2 and P8.1 to P8.7 of the specification."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mechanism_steps import RATE, SIZES, batch_of, privatised, started, sums, zeros

from dptune.core.errors import ConfigError
from dptune.mechanisms.clippers.groupwise_clipping import PerPair, normalised
from dptune.mechanisms.interfaces import Knobs
from dptune.training.gradients.per_sample import PairGradients

torch.set_num_threads(1)

RADII = st.floats(1e-3, 1e3)
WEIGHTS = st.floats(0.05, 1e3)
SCHEMES: dict[str, dict[str, Any]] = {
    "equal budget": {"allocation": "equal"},
    "global": {"allocation": "global"},
    "weighted": {"weights": (1.0, 0.2, 5.0)},
    "RLDP's equation 6": {"noise_unit": "pair"},
}


def effective(radii: tuple[float, ...], deviations: tuple[float, ...]) -> float:
    """Formula 8.1 of the specification."""
    return math.fsum((radius / s) ** 2 for radius, s in zip(radii, deviations, strict=True)) ** -0.5


def ones(norms: list[float]) -> PairGradients:
    """One unit whose pairs have these norms."""
    rows = [norm / math.sqrt(size) for norm, size in zip(norms, SIZES, strict=True) for _ in range(size)]
    return batch_of([rows])


@settings(max_examples=20)
@given(
    radii=st.tuples(RADII, RADII, RADII),
    weights=st.none() | st.tuples(WEIGHTS, WEIGHTS, WEIGHTS),
    sigma=st.floats(0.1, 10),
    scheme=st.sampled_from(list(SCHEMES)),
)
def test_p81_the_multiplier_of_any_radii_and_weights_is_that_of_the_worst_unit(
    radii: tuple[float, ...], weights: tuple[float, ...] | None, sigma: float, scheme: str
) -> None:
    """Brute force over units that fill every pair to nothing, a half, the brim, or beyond."""
    mechanism = started("per_pair", **SCHEMES[scheme])
    knobs = Knobs(radii, sigma, weights or ())
    deviations = tuple(sigma * scale for scale in mechanism.scales(knobs))
    charged = mechanism.release(knobs, RATE).effective_noise_multiplier
    assert charged == pytest.approx(effective(radii, deviations), rel=1e-9)
    worst = 0.0
    for fill in itertools.product((0.0, 0.5, 1.0, 100.0), repeat=3):
        unit = ones([share * radius for share, radius in zip(fill, radii, strict=True)])
        blocks = mechanism.exact_sums([unit], zeros(), knobs)
        shift = math.fsum((float(block.norm()) / s) ** 2 for block, s in zip(blocks, deviations, strict=True)) ** 0.5
        worst = max(worst, shift)
    assert 1 / worst == pytest.approx(charged, rel=1e-6)


@pytest.mark.parametrize("allocation", ["equal", "global"])
@pytest.mark.parametrize("noise_unit", ["joint", "pair"])
def test_p71_p82_with_one_pair_it_is_flat_clipping(allocation: str, noise_unit: str) -> None:
    batch = [batch_of([[3.0, -4.0], [0.1, 0.2], [1e6, 1e6]], sizes=[2])]
    flat = privatised(started("static", [2], max_grad_norm=0.7), batch, sizes=[2])
    for name in ("per_pair", "dp_lora"):
        entry = {"max_grad_norm": 0.7, "allocation": allocation, "noise_unit": noise_unit}
        mechanism = started(name, [2], **entry)
        torch.testing.assert_close(privatised(mechanism, batch, sizes=[2]).gradient, flat.gradient)
        assert mechanism.release(mechanism.knobs(), RATE) == started("static", [2]).release(mechanism.knobs(), RATE)


@given(norms=st.lists(st.sampled_from([0.0, 1e-9, 0.1, 0.5, 1.0, 1e9]), min_size=3, max_size=3))
def test_p72_the_whole_stays_within_the_radius(norms: list[float]) -> None:
    clipped = torch.cat(sums(started("dp_lora", max_grad_norm=0.7), [ones(norms)]))
    assert float(clipped.norm()) <= 0.7


def test_p72_the_noise_of_dp_lora_is_that_of_static() -> None:
    uniform, static = started("dp_lora", max_grad_norm=0.7), started("static", max_grad_norm=0.7)
    assert uniform.knobs().radii == pytest.approx((0.7 / math.sqrt(3),) * 3)
    assert uniform.scales(uniform.knobs()) == pytest.approx(static.scales(static.knobs()), rel=1e-12)


@pytest.mark.parametrize(
    ("scheme", "deviations", "multiplier"),
    [
        ("equal budget", lambda z, c: [z * math.sqrt(3) * radius for radius in c], 2.0),
        ("global", lambda z, c: [z * math.hypot(*c)] * 3, 2.0),
        ("weighted", lambda z, c: [z * a / (w / math.sqrt(26.04)) for a, w in zip(c, (1, 0.2, 5), strict=True)], 2.0),
        ("RLDP's equation 6", lambda z, c: [z * radius for radius in c], 2.0 / math.sqrt(3)),
    ],
)
def test_p83_the_four_schemes(scheme: str, deviations: Any, multiplier: float) -> None:
    radii = (0.3, 2.0, 0.01)
    mechanism, knobs = started("per_pair", **SCHEMES[scheme]), Knobs(radii, 2.0)
    found = tuple(2.0 * scale for scale in mechanism.scales(knobs))
    assert found == pytest.approx(deviations(2.0, radii), rel=1e-9)
    assert mechanism.release(knobs, RATE).effective_noise_multiplier == pytest.approx(multiplier, rel=1e-9)
    assert effective(radii, found) == pytest.approx(multiplier, rel=1e-9)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_p84_a_unit_that_fills_every_pair_attains_the_bound(scheme: str) -> None:
    mechanism, knobs = started("per_pair", **SCHEMES[scheme]), Knobs((0.3, 2.0, 0.01), 2.0)
    blocks = mechanism.exact_sums([ones([1e6] * 3)], zeros(), knobs)
    shift = math.hypot(*(float(b.norm()) / s for b, s in zip(blocks, mechanism.scales(knobs), strict=True)))
    assert shift == pytest.approx(mechanism.release(knobs, RATE).sensitivity, rel=1e-8)


@pytest.mark.parametrize("name", ["rldp", "rldp_published"])
def test_p85_with_24_pairs_rldps_sigma_is_worth_a_fifth(name: str) -> None:
    mechanism = started(name, (2,) * 24, noise_multiplier=0.41)
    knobs = mechanism.knobs()
    release = mechanism.release(knobs, RATE)
    assert mechanism.scales(knobs) == pytest.approx(knobs.radii, rel=1e-12), "equation 6: sigma C_i on every pair"
    assert release.noise_multiplier == 0.41
    assert release.effective_noise_multiplier == pytest.approx(0.41 / 4.899, rel=1e-4)


def test_p86_a_and_b_of_a_pair_are_clipped_by_their_joint_norm() -> None:
    """The square of that norm, as RLDP's equation 4 first has it, would leave a fifth of this."""
    norm_a, norm_b = 3.0, 4.0
    mechanism = started("per_pair", [2], pair_radius=1.0)
    (block,) = sums(mechanism, [batch_of([[norm_a, norm_b]], sizes=[2])], [2])
    torch.testing.assert_close(block, torch.tensor([0.6, 0.8], dtype=torch.float64), rtol=1e-8, atol=0)


def test_p87_every_coordinate_is_in_one_block_and_a_wide_radius_changes_none() -> None:
    """That the pairs cover the model's trainable parameters is in tests/training/test_per_sample.py."""
    rows = torch.arange(24.0).reshape(3, 8)
    blocks = sums(started("per_pair", pair_radius=1e12), [batch_of(rows)])
    assert [block.numel() for block in blocks] == list(SIZES)
    torch.testing.assert_close(torch.cat(blocks), rows.sum(dim=0).double(), rtol=1e-8, atol=0)


def test_pairs_are_clipped_apart_from_each_other() -> None:
    inside, outside = ones([0.1, 0.1, 0.1]), ones([0.1, 1e9, 0.1])
    mechanism = started("per_pair", pair_radius=0.2)
    for kept in (0, 2):
        assert torch.equal(sums(mechanism, [inside])[kept], sums(mechanism, [outside])[kept])


def test_the_stabiliser_only_shrinks() -> None:
    for norm in (1e-9, 0.3, 1e6):
        (plain, *_), (stabilised, *_) = (
            sums(started("per_pair", pair_radius=0.1, stabiliser=stabiliser), [ones([norm] * 3)])
            for stabiliser in (0.0, 0.05)
        )
        assert float(stabilised.norm()) <= float(plain.norm()) <= 0.1
        assert float(stabilised.norm()) == pytest.approx(norm * min(1.0, 0.1 / (norm + 0.05)), rel=1e-6)


@given(weights=st.lists(st.floats(1e-150, 1e150), min_size=1, max_size=6))
@example(weights=[1e-200, 2e-200])
@example(weights=[1e200, 2e200])
def test_normalised_weights_have_squares_that_sum_to_one(weights: list[float]) -> None:
    found = normalised(weights)
    assert math.fsum(weight * weight for weight in found) == pytest.approx(1, rel=1e-12)
    assert [a <= b for a, b in itertools.pairwise(found)] == [a <= b for a, b in itertools.pairwise(weights)]


def test_the_knobs_weights_count_and_not_the_configured_ones() -> None:
    mechanism = started("per_pair", weights=(1.0, 2.0, 3.0))
    moved = Knobs((1.0, 1.0, 1.0), 1.0, weights=(0.6, 0.8, 1e-3))
    assert mechanism.scales(moved)[1] == pytest.approx(math.hypot(0.6, 0.8, 1e-3) / 0.8)


def test_freezing_down_is_told_to_the_loop() -> None:
    assert started("dp_lora", freeze_down=True).clipper.freeze_down
    assert not started("dp_lora").clipper.freeze_down
    assert not started("static").clipper.freeze_down


@pytest.mark.parametrize("weights", [(1.0,), (1.0, 2.0), (1.0, 2.0, 3.0, 4.0)])
def test_weights_that_do_not_fit_the_pairs_are_refused_before_the_first_step(weights: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="weights") as caught:
        started("per_pair", weights=weights)
    assert caught.value.field == "weights"


@pytest.mark.parametrize(
    ("option", "bad"),
    [
        *(("max_grad_norm", bad) for bad in (0, -1, "nan", "inf", None)),
        *(("pair_radius", bad) for bad in (-0.1, "nan", "inf")),
        *(("stabiliser", bad) for bad in (-1e-6, "nan", "inf")),
        *(("weights", bad) for bad in ("1,0,1", "1,-1,1", "1,nan,1", "1,inf,1")),
        *(("allocation", bad) for bad in ("fair", None, 1)),
        *(("noise_unit", bad) for bad in ("triple", None)),
        ("freeze_down", "maybe"),
    ],
)
def test_bad_options_are_refused(option: str, bad: Any) -> None:
    with pytest.raises(ConfigError, match=option) as caught:
        started("per_pair", **{option: bad})
    assert caught.value.field == option


def test_a_clipper_of_its_own_starts_every_pair_alike() -> None:
    assert PerPair(max_grad_norm=2.0).initial_radii(4) == (1.0,) * 4
    assert PerPair(max_grad_norm=2.0, pair_radius=0.1).initial_radii(4) == (0.1,) * 4
