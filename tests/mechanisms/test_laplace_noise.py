"""Laplace noises: the law that is drawn is the law that is accounted, whatever the entropy gives."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mechanism_steps import RATE, SIZES, RepeatedWord, batch_of, started, sums
from scipy import stats

from dptune.core.errors import ConfigError
from dptune.mechanisms.noises.gaussian import Gaussian
from dptune.mechanisms.noises.laplace_noise import PRESETS, Laplace, LmoDp, Plrvo, _tail_quantiles, laplace_mixture
from dptune.mechanisms.planning import Schedule, calibrated, price
from dptune.mechanisms.registry import build, lacks_noise, of_model, takes_noise
from dptune.privacy.accountants import epsilons
from dptune.privacy.accounting.laplace_mixtures import InverseScale
from dptune.privacy.entropy import LARGEST_LOG_TAIL, FixedSeed, OsEntropy

COORDINATES = 200_000
CPU = torch.device("cpu")
LAWS = {
    **PRESETS,
    "Laplace": InverseScale(constant=0.7),
    "PLRV-O": InverseScale(gamma=(40.0, 0.01)),
    "heavy": InverseScale(gamma=(2.2, 1.0)),
    "constant and uniform": InverseScale(constant=0.2, uniform=(0.0, 1.0)),
}


@pytest.mark.parametrize("name", LAWS)
def test_draws_follow_the_closed_form(name: str) -> None:
    """Kolmogorov-Smirnov; false alarm 1e-9 each."""
    law = LAWS[name]
    noise = laplace_mixture(law, OsEntropy(), COORDINATES, CPU).numpy()
    assert stats.kstest(noise, law.cdf).pvalue > 1e-9


@pytest.mark.parametrize("name", LAWS)
def test_draws_have_the_mean_absolute_value_that_is_told(name: str) -> None:
    """Six standard errors: false alarm 2e-9 each, more for the heavy law, whose own are not normal."""
    law = LAWS[name]
    noise = laplace_mixture(law, OsEntropy(), COORDINATES, CPU).abs()
    error = math.sqrt((law.variance - law.mean_absolute**2) / COORDINATES)
    assert float(noise.mean()) == pytest.approx(law.mean_absolute, abs=(20 if name == "heavy" else 6) * error)


@pytest.mark.parametrize("name", PRESETS)
def test_the_table_inverts_the_tail(name: str) -> None:
    """Between its knots too, over all that the entropy can give."""
    from dptune.mechanisms.noises.laplace_noise import _interpolate

    law = LAWS[name]
    s = torch.from_numpy(np.concatenate([np.linspace(1e-9, 1, 5001), np.linspace(1, LARGEST_LOG_TAIL, 5001)]))
    x = _interpolate(_tail_quantiles(law), s.clone())
    np.testing.assert_allclose(-law.log_tail(x.numpy()), s.numpy(), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(
    "name", [name for name, law in LAWS.items() if not (law.is_gamma or law.is_constant)] + ["k 1/2"]
)
def test_the_density_that_is_drawn_has_no_steeper_slope_than_is_certified(name: str) -> None:
    """From the polynomials themselves: with x(s), the score of the drawn density is (1 + x'' / x') / x'."""
    law = LAWS.get(name, InverseScale(gamma=(0.5, 0.9), uniform=(1e-4, 2e-4)))
    c, width = _tail_quantiles(law).numpy(), LARGEST_LOG_TAIL / 2**16
    for t in (0.0, 0.25, 0.5, 0.75, 1.0):
        first = (3 * c[3] * t**2 + 2 * c[2] * t + c[1]) / width
        second = (6 * c[3] * t + 2 * c[2]) / width**2
        assert (first > 0).all()
        assert ((1 + second / first) / first).max() <= law.score_bound * (1 + 1e-9)


@pytest.mark.parametrize("word", [0, 1, 2, 2**48 - 1, 2**48, 2**63, 2**64 - 2, 2**64 - 1])
@pytest.mark.parametrize("name", LAWS)
def test_every_word_gives_finite_noise(name: str, word: int) -> None:
    noise = laplace_mixture(LAWS[name], RepeatedWord(word), 3, CPU)
    assert torch.isfinite(noise).all()
    assert torch.isfinite(noise.float()).all()


@pytest.mark.parametrize(
    "noise", [Laplace(2.0), Plrvo(k=40.0, noise_multiplier=2.0), LmoDp(noise_multiplier=2.0)], ids=str
)
def test_the_noise_multiplier_is_one_over_the_score_bound(noise: Any) -> None:
    for multiplier in (0.5, 2.0, 70.0):
        assert noise.law(multiplier).score_bound == pytest.approx(1 / multiplier, rel=1e-12)
    sums = [torch.zeros(COORDINATES), torch.zeros(COORDINATES)]
    first, second = noise.add(sums, [1.0, 5.0], 2.0, OsEntropy())
    # Eight standard errors of a mean absolute value: false alarm 1e-15.
    law = noise.law(2.0)
    error = 8 * math.sqrt((law.variance - law.mean_absolute**2) / COORDINATES)
    assert float(first.abs().mean()) == pytest.approx(law.mean_absolute, abs=error)
    assert float(second.abs().mean()) == pytest.approx(5 * law.mean_absolute, abs=5 * error)


def test_a_mechanism_with_a_shared_scale_says_so_and_certifies_nothing() -> None:
    """Its noise is another than that of a scale for every coordinate, which has the same law and a proof."""
    for shared in (True, False):
        mechanism = build("plrvo", {"noise_multiplier": 1.0, "shared": shared})
        release = mechanism.release(mechanism.knobs(), 0.1)
        assert bool(release.leaks) == shared
        assert math.isinf(epsilons(Counter({release: 1}), 1e-5).noise_only) == shared


def test_a_shared_scale_is_shared() -> None:
    """The variance of a draw's mean absolute value is the scale's own; false alarm negligible: 20 draws."""
    shared = Plrvo(k=3.0, noise_multiplier=1.0, shared=True)
    means = [float(shared.add([torch.zeros(20_000)], [1.0], 1.0, OsEntropy())[0].abs().mean()) for _ in range(20)]
    own = Plrvo(k=3.0, noise_multiplier=1.0)
    apart = [float(own.add([torch.zeros(20_000)], [1.0], 1.0, OsEntropy())[0].abs().mean()) for _ in range(20)]
    assert np.std(means) > 5 * np.std(apart)


VALUES = st.floats(-1e6, 1e6, width=32) | st.sampled_from([math.nan, math.inf, 0.0, 1e-30])
ROWS = st.lists(VALUES, min_size=sum(SIZES), max_size=sum(SIZES))


@settings(max_examples=50)
@given(batch=st.lists(ROWS, max_size=3), extra=ROWS)
def test_l1_clipping_bounds_the_l1_norm(batch: list[list[float]], extra: list[float]) -> None:
    mechanism = started("laplace", max_grad_norm=0.7)
    without = sums(mechanism, [batch_of(batch)] if batch else [])
    whole = sums(mechanism, [batch_of([*batch, extra])])
    moved = sum(float((a - b).abs().sum()) for a, b in zip(whole, without, strict=True))
    release = mechanism.release(mechanism.knobs(), RATE)
    assert release.norm == "l1"
    assert moved <= 0.7 * release.sensitivity * (1 + 1e-6)


@pytest.mark.parametrize(
    ("name", "entry", "field", "words"),
    [
        ("plrvo", {"k": 1.0, "theta": 0.1}, "k", "no mean"),
        ("plrvo", {"k": 2.0, "theta": 0.1}, "k", "no variance"),
        ("plrvo", {"k": 1.0, "theta": 0.1, "infinite_variance": True}, "k", "no mean"),
        ("plrvo", {}, "theta, noise_multiplier", "exactly one"),
        ("plrvo", {"theta": 0.1, "noise_multiplier": 1.0}, "theta, noise_multiplier", "exactly one"),
        ("plrvo", {"theta": -0.1}, "theta", "not in (0, 1)"),
        ("plrvo", {"theta": 0.5, "max_grad_norm": 2.0}, "theta", "no moment"),
        ("plrvo", {"noise_multiplier": -1.0}, "noise_multiplier", "not in"),
        ("lmo_dp", {"preset": "T9"}, "preset", "T0.3"),
        ("lmo_dp", {"preset": "T2", "uniform_weight": 1}, "preset", "set preset to none"),
        ("lmo_dp", {"preset": "T2", "uniform_low": 3}, "preset", "uniform_low beside it"),
        ("lmo_dp", {"preset": "none", "uniform_weight": 1, "infinite_variance": True}, "noise", "no mean"),
        (
            "lmo_dp",
            {"preset": "none", "gamma_weight": 1, "gamma_shape": 1e-3, "uniform_weight": 1, "uniform_low": 1e-4},
            "gamma_shape",
            "sharply",
        ),
        ("lmo_dp", {"preset": "none", "gamma_weight": -0.1, "uniform_weight": 1}, "gamma_weight", "negative"),
        ("lmo_dp", {"preset": "none", "uniform_weight": 1, "uniform_low": -1}, "uniform_low", "interval"),
        (
            "lmo_dp",
            {"preset": "none", "uniform_weight": 1, "uniform_low": 2, "uniform_high": 2},
            "uniform_high",
            "interval",
        ),
        ("lmo_dp", {"preset": "none", "exponential_weight": 1}, "noise", "no mean"),
        ("lmo_dp", {"preset": "none", "gamma_weight": 1, "gamma_shape": 1.5}, "noise", "no variance"),
        (
            "lmo_dp",
            {"preset": "none", "gamma_weight": 1, "gamma_shape": 3, "gamma_scale": 1.0},
            "gamma_scale",
            "no integer order",
        ),
        ("lmo_dp", {"preset": "none", "exponential_rate": 0, "uniform_weight": 1}, "exponential_rate", "positive"),
        ("lmo_dp", {"noise_multiplier": -1}, "noise_multiplier", "neither 0 nor"),
        ("laplace", {"noise_multiplier": 0}, "noise_multiplier", "positive"),
    ],
)
def test_bad_parameters_are_refused_in_words(name: str, entry: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        build(name, entry)
    assert field in str(error.value)
    assert words in str(error.value)


def test_statistics_bounded_in_l2_are_no_company_for_gradients_clipped_in_l1() -> None:
    with pytest.raises(ConfigError, match="l1"):
        started("laplace", controller="quantile")


def test_infinite_variance_is_allowed_by_name() -> None:
    noise = Plrvo(k=1.5, noise_multiplier=1.0, infinite_variance=True)
    (noisy,) = noise.add([torch.zeros(1000)], [1.0], 1.0, OsEntropy())
    assert torch.isfinite(noisy).all()
    assert noise.deviation(1.0) == noise.law(1.0).mean_absolute  # something to scale by


def test_theta_and_the_multiplier_are_one_parameter() -> None:
    given_theta = build("plrvo", {"k": 50, "theta": 0.004, "max_grad_norm": 0.5})
    assert given_theta.noise.noise_multiplier == pytest.approx(1 / (51 * 0.002))
    same = build("plrvo", {"k": 50, "noise_multiplier": given_theta.noise.noise_multiplier, "max_grad_norm": 0.5})
    releases = [one.release(one.knobs(), RATE) for one in (given_theta, same)]
    assert releases[0].law is not None
    assert releases[1].law is not None
    assert releases[0].law.gamma == pytest.approx(releases[1].law.gamma)


def test_what_is_left_to_calibrate() -> None:
    assert takes_noise("plrvo", {})
    assert lacks_noise("plrvo", {})
    assert not takes_noise("plrvo", {"theta": 0.1})
    assert takes_noise("lmo_dp", {})
    assert not lacks_noise("lmo_dp", {})
    assert of_model("plrvo", {"k": 9}, 3, 500) == {"k": 9, "pairs": 3, "dimension": 500}
    assert of_model("static", {}, 3, 500) == {"pairs": 3}


@pytest.mark.parametrize("name", ["plrvo", "lmo_dp"])
@pytest.mark.parametrize("accounting", ["certified", "published"])
def test_a_budget_finds_the_noise(name: str, accounting: str) -> None:
    schedule = Schedule(0.01, 100, 1e-5)
    entry = {"dimension": 2000} if name == "plrvo" else {}
    found = calibrated(lambda noise: build(name, entry | {"noise_multiplier": noise}), 1.0, schedule, accounting)
    prices = price(found.mechanism, schedule)
    assert 0.99 <= getattr(prices, accounting) <= 1.0
    assert prices.certified == prices.noise_only
    if accounting == "published":
        assert prices.certified > 1.0


def test_the_ledger_line_says_the_whole_law() -> None:
    import json

    from dptune.privacy.release import Release

    mechanism = build("lmo_dp", {"preset": "T2"})
    release = mechanism.release(mechanism.knobs(), RATE)
    again = Release.from_dict(json.loads(json.dumps(release.to_dict())))
    assert again == release
    assert again.law == release.law
    assert Counter({again: 1}) == Counter({release: 1})
    assert dict(release.claims) == {"step_epsilon": 2.0}


def test_noise_is_reproducible_with_a_seed() -> None:
    noise = LmoDp(preset="T0.3")
    one, two = (noise.add([torch.ones(100)], [2.0], noise.noise_multiplier, FixedSeed(3))[0] for _ in range(2))
    assert torch.equal(one, two)


@pytest.mark.parametrize("noise", [Gaussian(2.0), LmoDp(preset="T0.3"), Laplace(2.0)], ids=lambda noise: noise.family)
def test_every_block_lies_on_its_own_public_grid(noise: Any) -> None:
    """Of outputs within 2^20 steps, whose float32 is within 1/16 of a step; off the grid they are up to 1/2 away."""
    scales, law = [3.0, 0.7], noise.law(noise.noise_multiplier)
    spread = law.mean_absolute if law else noise.noise_multiplier
    blocks = noise.add(
        [torch.full((4000,), 0.1, dtype=torch.float64)] * 2, scales, noise.noise_multiplier, FixedSeed(0)
    )
    for block, scale in zip(blocks, scales, strict=True):
        steps = block.double() / (scale * spread * 2.0**-20)
        near = steps[steps.abs() < 2**20]
        assert len(near) > 1000
        assert float((near - near.round()).abs().max()) < 0.07
