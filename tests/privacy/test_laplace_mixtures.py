"""The law of one coordinate: closed forms, published numbers, and two ways to compute each figure."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mixtures import LMO, lmo, mixtures, plrvo
from scipy.integrate import quad

from dptune.core.errors import ConfigError
from dptune.privacy.accounting.laplace_mixtures import InverseScale

#: name: E u, E u^2, E|z|, P(|z| <= 0.9), Var z, exact scalar epsilon, s0, Fisher information (spec lmo-dp.md, 4.1).
PUBLISHED = {
    "T0.3": (0.22, 0.05213333, 4.874148, 0.178414547, 50.7494, 0.23470429, 0.23696970, 0.04860),
    "T0.7": (0.62, 0.38813333, 1.627429, 0.426799280, 5.3415, 0.62400976, 0.62602151, 0.38443),
    "T2": (1.72, 2.98213333, 0.585753, 0.785371290, 0.6910, 1.72157418, 1.73379845, 2.95856),
    "T3": (2.47, 6.18880000, 0.410783, 0.887859838, 0.3424, 2.46199239, 2.50558704, 6.10213),
    "T5": (6.20, 39.85333333, 0.166468, 0.994414922, 0.0570, 5.86711215, 6.42795699, 38.4765),
}


def pure_loss(law: InverseScale, shift: float) -> float:
    """The largest loss of a shift in one coordinate, log sup f(x) / f(x - shift), which is attained at the peak."""
    return float(law.log_density(0.0) - law.log_density(shift))


@pytest.mark.parametrize("name", PUBLISHED)
def test_lmo_dp_figures(name: str) -> None:
    law, row = LMO[name], PUBLISHED[name]
    assert law.mean == pytest.approx(row[0], rel=1e-9)
    assert law.second_moment == pytest.approx(row[1], rel=1e-6)
    assert law.mean_absolute == pytest.approx(row[2], rel=2e-6)
    assert 1 - math.exp(law.log_tail(0.9)) == pytest.approx(row[3], rel=1e-8)
    assert law.variance == pytest.approx(row[4], rel=1e-3)
    assert pure_loss(law, 1.0) == pytest.approx(row[5], rel=1e-7)
    assert law.score_bound == pytest.approx(row[6], rel=1e-7)
    assert law.fisher_information == pytest.approx(row[7], rel=1e-3)


def test_the_distribution_of_t03() -> None:
    law = LMO["T0.3"]
    expected = [0.551876296, 0.598008100, 0.675675902, 0.826435477, 0.935404401]
    np.testing.assert_allclose(law.cdf([0.5, 1, 2, 5, 10]), expected, rtol=1e-8)
    np.testing.assert_allclose(law.cdf([-0.5]), [1 - expected[0]], rtol=1e-8)
    np.testing.assert_allclose(np.exp(law.log_density([0.0, 1.0])), [0.11, 0.0869885131], rtol=1e-8)


def test_single_parts() -> None:
    gamma, uniform = InverseScale(gamma=(2, 0.5)), InverseScale(uniform=(1, 2))
    assert math.exp(gamma.log_density(1.7)) == pytest.approx(0.0789686692, rel=1e-9)
    assert pure_loss(gamma, 1.0) == pytest.approx(1.2163953243, rel=1e-9)
    assert pure_loss(InverseScale(exponential=0.2), 1.0) == pytest.approx(0.3646431136, rel=1e-9)
    assert math.exp(uniform.log_density(1.7)) == pytest.approx(0.0599313369, rel=1e-8)
    assert math.exp(uniform.log_density(0.0)) == pytest.approx(0.75, rel=1e-12)


def test_plrvo_closed_forms() -> None:
    law = plrvo(20, 0.05)
    assert law.mean_absolute == pytest.approx(1 / (19 * 0.05), rel=1e-10)
    assert law.variance == pytest.approx(2 / (19 * 18 * 0.05**2), rel=1e-10)
    assert law.fisher_information == pytest.approx(1.0022727273, rel=1e-9)
    assert law.score_bound == pytest.approx(21 * 0.05)
    assert pure_loss(law, 0.7) == pytest.approx(21 * math.log1p(0.05 * 0.7))
    # Laplace is the limit: with a constant part the integral is used.
    assert InverseScale(constant=0.4).fisher_information == pytest.approx(0.16, rel=1e-9)
    assert InverseScale(constant=0.4).variance == pytest.approx(2 / 0.16, rel=1e-9)


@given(law=mixtures(), x=st.floats(0, 30))
def test_derivatives_belong_to_the_moment_generating_function(law: InverseScale, x: float) -> None:
    step = 1e-5 * (1 + x)
    points = -np.array([x + step, max(x - step, 0.0)])
    slope = -np.diff(law.log_mgf(points))[0] / np.diff(points)[0] * -1
    low, high = (float(law.tilted(-point)[0]) for point in points)
    assert low - 1e-6 * high <= slope <= high + 1e-6 * high


@given(law=mixtures(), x=st.floats(1e-3, 100), y=st.floats(1e-3, 100))
def test_no_slope_of_the_log_density_exceeds_the_score_bound(law: InverseScale, x: float, y: float) -> None:
    """And the exact loss of a shift, attained at 0, is below it too: the certificate's first step."""
    assert float(law.score(x)) <= law.score_bound * (1 + 1e-9)
    difference = float(law.log_density(x) - law.log_density(y))
    assert abs(difference) <= law.score_bound * abs(x - y) * (1 + 1e-9) + 1e-9
    assert pure_loss(law, x) <= law.score_bound * x * (1 + 1e-9)


@given(law=mixtures())
def test_the_density_integrates_to_one_and_gives_the_tail(law: InverseScale) -> None:
    scale = 1 / law.mean
    total, _ = quad(lambda x: math.exp(law.log_density(x)), 0, 2 * scale, limit=200)
    assert total == pytest.approx((1 - math.exp(law.log_tail(2 * scale))) / 2, rel=1e-7)


@given(law=mixtures(), factor=st.floats(1e-3, 1e3))
def test_scaling(law: InverseScale, factor: float) -> None:
    scaled = law.scaled(factor)
    assert scaled.score_bound == pytest.approx(factor * law.score_bound)
    assert float(scaled.log_tail(1.0)) == pytest.approx(float(law.log_tail(factor)), rel=1e-9, abs=1e-12)


@given(law=mixtures())
def test_no_mixture_beats_plain_laplace_noise_and_none_a_gaussian(law: InverseScale) -> None:
    """At equal zCDP its variance is at least that of Laplace noise, twice the Gaussian's; and so in high dimension."""
    assert law.variance * law.score_bound**2 >= 2 * (1 - 1e-9)
    assert law.variance * law.fisher_information >= 2 * (1 - 1e-6)


def test_infinite_moments_are_known() -> None:
    assert math.isinf(InverseScale(exponential=1.0).mean_absolute)
    assert math.isinf(InverseScale(gamma=(2, 1.0)).variance)
    assert math.isfinite(InverseScale(gamma=(2, 1.0)).mean_absolute)
    assert math.isfinite(InverseScale(gamma=(1.0, 1.0), exponential=1.0, uniform=(0, 1)).variance)
    assert math.isinf(float(LMO["T5"].log_mgf(1.2)))


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"constant": -1.0}, "negative"),
        ({"gamma": (2.0, math.inf)}, "infinite"),
        ({"gamma": (2.0, 0.0)}, "one is 0"),
        ({"uniform": (2.0, 1.0)}, "b <= a"),
        ({}, "positive"),
    ],
)
def test_what_is_no_inverse_scale_is_refused(parts: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        InverseScale(**parts)  # type: ignore[arg-type]


def test_lmo_parameters_are_what_the_presets_hold() -> None:
    from dptune.mechanisms.noises.laplace_noise import PRESETS

    assert PRESETS["T0.3"] == lmo(0.1, 0.1, 0.1, 0.5, 1, 5, 1, 2)
    assert LMO == PRESETS
