"""The private step: what is charged is what is done."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from dptune.errors import ConfigError
from dptune.mechanisms.registry import MECHANISMS, build
from dptune.privacy.accountants import epsilons
from dptune.privacy.entropy import FixedSeed, OsEntropy
from dptune.training.per_sample import PairGradients


def test_an_empty_batch_is_noise_alone() -> None:
    """Standard deviation within 5 %, fifteen standard errors: false alarm below 1e-50."""
    mechanism = build("static", {"noise_multiplier": 2.0, "max_grad_norm": 3.0})
    (noisy,) = mechanism.privatise([], [torch.zeros(50_000)], mechanism.knobs(), OsEntropy())
    assert float(noisy.std()) == pytest.approx(6.0, rel=0.05)


def test_noise_is_added_once_however_many_micro_batches() -> None:
    mechanism = build("static", {"noise_multiplier": 1.0})
    parts = [PairGradients([torch.full((1, 4), 0.1)]) for _ in range(5)]
    whole = [PairGradients([torch.full((5, 4), 0.1)])]
    zeros, knobs = [torch.zeros(4)], mechanism.knobs()
    (many,) = mechanism.privatise(parts, zeros, knobs, FixedSeed(1))
    (one,) = mechanism.privatise(whole, zeros, knobs, FixedSeed(1))
    torch.testing.assert_close(many, one)


def test_the_zeros_are_left_alone() -> None:
    mechanism, zeros = build("static", {"noise_multiplier": 1.0}), [torch.zeros(4)]
    mechanism.privatise([PairGradients([torch.ones(1, 4)])], zeros, mechanism.knobs(), OsEntropy())
    assert torch.equal(zeros[0], torch.zeros(4))


def test_pairs_that_do_not_fit_the_model_are_refused() -> None:
    mechanism = build("static", {"noise_multiplier": 1.0, "pairs": 2})
    with pytest.raises(ValueError, match="zip"):
        mechanism.privatise([], [torch.zeros(4)], mechanism.knobs(), OsEntropy())


def test_static_is_charged_its_own_multiplier() -> None:
    mechanism = build("static", {"noise_multiplier": 1.5, "max_grad_norm": 7.0, "pairs": 24})
    release = mechanism.release(mechanism.knobs(), 0.01)
    assert (release.effective_noise_multiplier, release.leaks, release.adaptive) == (1.5, (), False)


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("clipper", ["flat", "none"])
@pytest.mark.parametrize("noise", ["gaussian", "none"])
def test_a_finite_certified_epsilon_needs_noise_that_covers_the_sensitivity(
    name: str, clipper: str, noise: str
) -> None:
    """Whatever parts an entry combines: either it is refused, or its epsilon is infinite, or its noise is real."""
    entry: dict[str, object] = {"clipper": clipper, "noise": noise}
    if noise == "gaussian":
        entry["noise_multiplier"] = 1.0
    try:
        mechanism = build(name, entry)
        release = mechanism.release(mechanism.knobs(), 0.01)
    except ConfigError:
        return
    if math.isinf(epsilons(Counter({release: 10}), 1e-5).certified):
        return
    scales = mechanism.clipper.noise_scales(mechanism.knobs().radii, 1)
    assert all(scale > 0 for scale in scales), "a finite epsilon without any noise"
    (clipped,) = mechanism.clipper.clipped_sum(PairGradients([torch.full((1, 4), 1e6)]), mechanism.knobs().radii)
    assert float(clipped.norm()) / scales[0] <= release.sensitivity * (1 + 1e-6)


def test_a_constant_controller_has_nothing_to_save() -> None:
    mechanism = build("static", {"noise_multiplier": 1.0})
    before = mechanism.knobs()
    mechanism.controller.observe([torch.ones(3)])
    mechanism.controller.load_state_dict(mechanism.controller.state_dict())
    assert mechanism.knobs() == before
