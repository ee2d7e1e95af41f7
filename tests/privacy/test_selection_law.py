"""Laws of the number of candidates: closed forms, sums, the cap, and how they are drawn."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import chisquare

from dptune.core.errors import ConfigError
from dptune.privacy.entropy import FixedSeed, OsEntropy
from dptune.privacy.selection_law import SelectionLaw

SHAPES = (0.0, 0.5, 1.0, 2.0, 4.0, math.inf)


@pytest.mark.parametrize(
    ("candidates", "shape", "rate"),
    [
        (3, 0, 0.1489992965),
        (10, 0, 0.0269182596),
        (30, 0, 0.0065942799),
        (10, 1, 0.1),
        (3, 2, 0.4574271078),
        (10, 2, 0.1708203932),
        (30, 2, 0.0627314339),
        (3, math.inf, 2.8214393721),
    ],
)
def test_rates_of_means_solved_by_hand(candidates: float, shape: float, rate: float) -> None:
    law = SelectionLaw.of(candidates, shape)
    assert law.rate == pytest.approx(rate, rel=1e-8)
    assert law.uncapped_mean == pytest.approx(candidates, rel=1e-9)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_capped_law_is_a_list_of_probabilities_with_its_mean_and_slope(shape: float) -> None:
    law = SelectionLaw.of(10, shape)
    number = np.arange(1, law.most + 1)
    assert law.probabilities.shape == (law.most,)
    assert math.fsum(law.probabilities) == pytest.approx(1, abs=1e-12)
    assert law.mean == pytest.approx(float(law.probabilities @ number), rel=1e-12)
    assert law.mean < 10.001
    assert float(law.slope(1.0)) == pytest.approx(law.mean, rel=1e-12)
    x = np.linspace(0, 1, 7)
    assert law.generating(x) == pytest.approx((law.probabilities * x[:, None] ** number).sum(1), abs=1e-12)
    assert law.slope(x) == pytest.approx((law.probabilities * number * x[:, None] ** (number - 1)).sum(1), abs=1e-11)


def test_uncapped_generating_functions_have_their_closed_forms() -> None:
    x, most = 0.7, 3000
    for shape in (0.5, 1.0, 2.0):
        law = SelectionLaw.of(10, shape, most)
        g = law.rate
        expected = ((1 - (1 - g) * x) ** -shape - 1) / (g**-shape - 1)
        assert float(law.generating(x)) == pytest.approx(expected, rel=1e-9)
        assert float(law.slope(x)) == pytest.approx(10 * (g / (1 - (1 - g) * x)) ** (1 + shape), rel=1e-9)
    log = SelectionLaw.of(10, 0, most)
    assert float(log.generating(x)) == pytest.approx(math.log(1 - (1 - log.rate) * x) / math.log(log.rate), rel=1e-9)
    poisson = SelectionLaw.of(10, math.inf, 200)
    expected = math.expm1(poisson.rate * x) / math.expm1(poisson.rate)
    assert float(poisson.generating(x)) == pytest.approx(expected, rel=1e-9)


def test_the_default_cap_leaves_out_a_thousandth_and_moves_the_mean_as_computed() -> None:
    assert SelectionLaw.of(10, 2).most == 48
    assert SelectionLaw.of(10, 2, 35).mean == pytest.approx(9.7239, abs=1e-4)
    assert float(SelectionLaw.of(10, 2, 35).probabilities[0]) == pytest.approx(0.050281, abs=1e-6)
    assert SelectionLaw.of(10, 1, 44).mean == pytest.approx(9.5691, abs=1e-4)


def test_the_chance_to_try_one_of_the_best_tenth() -> None:
    hits = [SelectionLaw.of(10, shape, 2000 if shape < 9 else 100).hit(0.1) for shape in (0, 1, 2, math.inf)]
    assert hits == pytest.approx([0.4230, 0.526316, 0.5632, 0.6321], abs=5e-5)


@pytest.mark.parametrize("shape", [0.0, 2.0, math.inf])
def test_draws_follow_the_law(shape: float) -> None:
    law, entropy, draws = SelectionLaw.of(4, shape), FixedSeed(11), 20_000
    found = np.bincount([law.draw(entropy) for _ in range(draws)], minlength=law.most + 1)[1:]
    expected = law.probabilities * draws
    rare = expected < 50
    observed = np.append(found[~rare], found[rare].sum())
    assert chisquare(observed, np.append(expected[~rare], expected[rare].sum())).pvalue > 1e-4


def test_a_draw_from_the_operating_system_is_within_the_cap() -> None:
    law = SelectionLaw.of(3, 0, 5)
    assert {law.draw(OsEntropy()) for _ in range(200)} <= set(range(1, 6))


@pytest.mark.parametrize("shape", [0.0, 2.0, math.inf])
def test_a_law_comes_back_from_json(shape: float) -> None:
    law = SelectionLaw.of(7, shape)
    assert SelectionLaw.from_dict(law.to_dict()) == law


@pytest.mark.parametrize("candidates", [1, 1.0, 0, -3, math.nan, math.inf, True, "10", None])
def test_candidates_that_are_no_mean_above_one_are_refused(candidates: object) -> None:
    with pytest.raises(ConfigError, match="candidates"):
        SelectionLaw.of(candidates)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [-1, math.nan, "2", None, 1e9])
def test_shapes_below_zero_are_refused(shape: object) -> None:
    with pytest.raises(ConfigError, match="shape"):
        SelectionLaw.of(10, shape)  # type: ignore[arg-type]


@pytest.mark.parametrize("most", [1, 5, 2.5, True, 10**9])
def test_caps_below_the_mean_or_two_are_refused(most: object) -> None:
    with pytest.raises(ConfigError, match="most"):
        SelectionLaw.of(10, 2, most)  # type: ignore[arg-type]


def test_a_mean_that_no_cap_within_reach_bounds_is_refused() -> None:
    with pytest.raises(ConfigError, match="candidates"):
        SelectionLaw.of(1e7, 2)


def test_a_law_of_other_keys_is_refused() -> None:
    with pytest.raises(ConfigError, match="law"):
        SelectionLaw.from_dict({"shape": 1})
