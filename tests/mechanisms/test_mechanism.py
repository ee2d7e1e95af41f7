"""The private step: what is charged is what is done."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from mechanism_steps import EXPECTED, RATE, SIZES, batch_of, observed, plain, privatised, started, sums, zeros

from dptune.core.errors import ConfigError
from dptune.mechanisms.interfaces import Released
from dptune.mechanisms.mechanism import Mechanism
from dptune.mechanisms.registry import CLIPPERS, MECHANISMS, build
from dptune.privacy.accountants import epsilons
from dptune.privacy.entropy import Entropy, FixedSeed, OsEntropy
from dptune.privacy.release import UNBOUNDED
from dptune.training.gradients.per_sample import PairGradients

torch.set_num_threads(1)

PRIVATE = [name for name in MECHANISMS if name != "nonprivate"]


def of_ones(units: int, value: float = 0.1) -> PairGradients:
    return batch_of(torch.full((units, 4), value), sizes=[4])


def step(mechanism: Mechanism, batches: list[PairGradients], entropy: Entropy, size: int = 4) -> Released:
    """One private step of a mechanism with a single pair."""
    return mechanism.privatise(batches, zeros([size]), mechanism.knobs(), 1.0, entropy)


def test_an_empty_batch_is_noise_alone() -> None:
    """Standard deviation within 5 %, fifteen standard errors: false alarm below 1e-50."""
    mechanism = started("static", [50_000], noise_multiplier=2.0, max_grad_norm=3.0)
    released = step(mechanism, [], OsEntropy(), 50_000)
    assert float(released.gradient[0].std()) == pytest.approx(6.0, rel=0.05)
    assert released.deviations == (6.0,)


@pytest.mark.parametrize("name", PRIVATE)
def test_an_empty_batch_goes_through_every_mechanism(name: str) -> None:
    """Poisson sampling draws it now and then; to fail on it would tell that it was drawn."""
    mechanism = started(name)
    for number in range(1, 4):
        assert not any(bool(block.any()) for block in sums(mechanism, []))
        released = privatised(mechanism, [], number)
        mechanism.controller.observe(observed(released, number))
        assert [part.shape for part in released.gradient] == [(size,) for size in SIZES]
        assert all(bool(part.any()) for part in released.gradient)


@pytest.mark.parametrize("name", MECHANISMS)
def test_noise_is_added_once_however_many_micro_batches(name: str) -> None:
    rows = torch.linspace(-2, 2, 5 * sum(SIZES)).reshape(5, -1)
    mechanism = started(name)
    many = privatised(mechanism, (batch_of(row) for row in rows))
    one = privatised(mechanism, [batch_of(rows)])
    torch.testing.assert_close(many.gradient, one.gradient)
    torch.testing.assert_close(many.statistics, one.statistics)


@pytest.mark.parametrize("name", PRIVATE)
def test_the_zeros_are_left_alone(name: str) -> None:
    mechanism, empty = started(name), zeros()
    mechanism.privatise([batch_of(torch.ones(2, 8))], empty, mechanism.knobs(), EXPECTED, OsEntropy())
    mechanism.exact_sums([batch_of(torch.ones(2, 8))], empty, mechanism.knobs())
    assert not any(bool(zero.any()) for zero in empty)


def test_pairs_that_do_not_fit_the_model_are_refused() -> None:
    mechanism = build("static", {"noise_multiplier": 1.0, "pairs": 2})
    with pytest.raises(RuntimeError, match="same number"):
        step(mechanism, [], OsEntropy())


def test_static_is_charged_its_own_multiplier() -> None:
    mechanism = build("static", {"noise_multiplier": 1.5, "max_grad_norm": 7.0, "pairs": 24})
    release = mechanism.release(mechanism.knobs(), 0.01)
    assert (release.effective_noise_multiplier, release.leaks, release.adaptive) == (1.5, (), False)


@pytest.mark.parametrize("name", PRIVATE)
def test_p06_the_divisor_is_the_expected_batch_size_whatever_was_drawn(name: str) -> None:
    """All coordinates start centred at 0, so the estimate is the noisy sum over a constant."""
    mechanism = started(name)
    knobs, batch = mechanism.knobs(), [batch_of(torch.ones(7, 8))]
    one, half = (mechanism.privatise(batch, zeros(), knobs, size, FixedSeed(1)) for size in (16.0, 32.0))
    torch.testing.assert_close(one.gradient, [2 * part for part in half.gradient], rtol=1e-6, atol=0)
    assert all(torch.equal(a, b) for a, b in zip(one.blocks, half.blocks, strict=True))


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("clipper", CLIPPERS)
@pytest.mark.parametrize("noise", ["gaussian", "none"])
def test_a_finite_certified_epsilon_needs_noise_that_covers_the_sensitivity(
    name: str, clipper: str, noise: str
) -> None:
    """Whatever parts an entry combines: either it is refused, or its epsilon is infinite, or its noise is real."""
    try:
        mechanism = started(name, clipper=clipper, noise=noise)
        release = mechanism.release(mechanism.knobs(), RATE)
    except ConfigError:
        return
    if math.isinf(epsilons(Counter({release: 10}), 1e-5).certified):
        return
    scales = mechanism.scales(mechanism.knobs())
    assert all(scale > 0 for scale in scales), "a finite epsilon without any noise"
    moved = sums(mechanism, [batch_of(torch.full((1, 8), 1e6))])
    shift = torch.cat([block / scale for block, scale in zip(moved, scales, strict=True)]).norm()
    assert 0 < float(shift) <= release.sensitivity * (1 + 1e-6)


def test_without_noise_no_epsilon_is_finite() -> None:
    mechanism = started("static", noise="none")
    release = mechanism.release(mechanism.knobs(), RATE)
    assert math.isinf(epsilons(Counter({release: 1}), 1e-5).noise_only)


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("quantile", {}),
        ("quantile", {"clipper": "per_pair"}),
        ("dc_sgd_p", {}),
        ("dc_sgd_e", {}),
        ("rldp", {"design": "AB"}),
    ],
)
def test_statistics_without_noise_are_refused_before_the_first_step(name: str, entry: dict[str, str]) -> None:
    with pytest.raises(
        ConfigError, match=r"statistics, which need noise|the mechanism adds no noise|there is no noise"
    ):
        started(name, noise="none", **entry)


@pytest.mark.parametrize("noise", ["gaussian", "none"])
def test_a_clipper_that_needs_coordinates_is_refused_where_nobody_makes_them(noise: str) -> None:
    with pytest.raises(ConfigError, match="has no coordinates"):
        started("novel", clipper="transformed", noise=noise, controller="constant")


def test_the_multiplier_that_a_filter_asks_for_is_the_one_that_is_charged() -> None:
    for mechanism in map(started, PRIVATE):
        if mechanism.noise.family in UNBOUNDED:
            continue  # charged at infinity, whatever its multiplier
        knobs = mechanism.at_effective_noise_multiplier(mechanism.knobs(), 0.9)
        assert mechanism.release(knobs, RATE).effective_noise_multiplier == pytest.approx(0.9, rel=1e-12)


def test_a_constant_controller_has_nothing_to_save() -> None:
    mechanism = started("static")
    before = plain(mechanism.knobs())
    mechanism.controller.observe(observed(privatised(mechanism, [batch_of(torch.ones(3, 8))])))
    assert mechanism.controller.state_dict() == {}
    mechanism.controller.load_state_dict(mechanism.controller.state_dict())
    assert plain(mechanism.knobs()) == before
