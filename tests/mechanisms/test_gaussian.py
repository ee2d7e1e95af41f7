"""Noise: P0.5 of the specification, and that it depends on nothing but its scale."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from mechanism_steps import RepeatedWord
from scipy import stats

from dptune.core.errors import ConfigError
from dptune.mechanisms.noises import gaussian
from dptune.mechanisms.noises.gaussian import Gaussian, NoNoise, draw_by_quantile, on_device, standard_normal
from dptune.mechanisms.registry import MECHANISMS, build, lacks_noise
from dptune.privacy.entropy import FixedSeed, OsEntropy

COORDINATES = 400_000
CPU = torch.device("cpu")


@pytest.mark.parametrize(("multiplier", "scale"), [(1.0, 1.0), (0.51, 3.0), (7.0, 0.01)])
def test_p05_the_standard_deviation_is_multiplier_times_scale(multiplier: float, scale: float) -> None:
    """Within 1 %, nine standard errors of the estimate: false alarm below 1e-18."""
    (noisy,) = Gaussian(multiplier).add([torch.zeros(COORDINATES)], [scale], multiplier, OsEntropy())
    assert float(noisy.double().std()) == pytest.approx(multiplier * scale, rel=0.01)


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_noise_has_the_deviation_that_it_says(name: str) -> None:
    """Also of those that are added later: half the noise is found. 5 %: eight standard errors and more, also of the
    heaviest tails, false alarm below 1e-14.
    """
    built = build(name, {"noise_multiplier": 0.7} if lacks_noise(name, {}) else {})
    if built.noise.correlated is not None:
        pytest.skip("rows of correlated noise have deviations of their own: test_banded.py")
    multiplier = built.knobs().noise_multiplier
    (noisy,) = built.noise.add([torch.zeros(COORDINATES)], [3.0], multiplier, OsEntropy())
    assert float(noisy.double().std()) == pytest.approx(3.0 * built.noise.deviation(multiplier), rel=0.05)


def test_the_noise_is_normal() -> None:
    """Kolmogorov-Smirnov; false alarm 1e-9."""
    noise = standard_normal(OsEntropy(), COORDINATES, torch.device("cpu"))
    assert stats.kstest(noise.numpy(), "norm").pvalue > 1e-9


def test_each_pair_has_its_own_scale() -> None:
    """As above: false alarm below 1e-18."""
    sums = [torch.zeros(COORDINATES), torch.zeros(COORDINATES)]
    small, large = Gaussian(2.0).add(sums, [0.5, 5.0], 2.0, OsEntropy())
    assert float(small.double().std()) == pytest.approx(1.0, rel=0.01)
    assert float(large.double().std()) == pytest.approx(10.0, rel=0.01)


def test_the_multiplier_of_the_step_counts_and_not_the_initial_one() -> None:
    (noisy,) = Gaussian(1.0).add([torch.zeros(COORDINATES)], [1.0], 4.0, OsEntropy())
    assert float(noisy.double().std()) == pytest.approx(4.0, rel=0.01)


def test_steps_and_pairs_are_uncorrelated() -> None:
    """Three correlations of 400,000 coordinates, six standard errors: false alarm 6e-9."""
    add = Gaussian(1.0).add
    first = add([torch.zeros(COORDINATES)] * 2, [1.0, 1.0], 1.0, OsEntropy())
    second = add([torch.zeros(COORDINATES)], [1.0], 1.0, OsEntropy())
    correlations = np.corrcoef(torch.stack([*first, *second]).double().numpy())[np.triu_indices(3, 1)]
    assert np.abs(correlations).max() < 6 / math.sqrt(COORDINATES)


def test_noise_does_not_depend_on_the_data() -> None:
    data = torch.linspace(-3, 3, 1000)
    (with_data,) = Gaussian(1.0).add([data], [1.0], 1.0, FixedSeed(5))
    (alone,) = Gaussian(1.0).add([torch.zeros(1000)], [1.0], 1.0, FixedSeed(5))
    torch.testing.assert_close(with_data - data, alone, atol=1e-6, rtol=0)


def test_the_sum_is_kept_under_the_noise() -> None:
    (noisy,) = Gaussian(1e-3).add([torch.arange(1000.0)], [1.0], 1e-3, OsEntropy())
    assert float((noisy - torch.arange(1000.0)).abs().max()) < 0.01


@pytest.mark.parametrize("count", [0, 1, 2, 5001])
def test_on_an_accelerator_the_arithmetic_is_the_same(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three draws in a row; the device that only has shapes stands for any that is not the CPU."""
    real, one, other = gaussian.signed_tail_on, FixedSeed(3), FixedSeed(3)
    monkeypatch.setattr(gaussian, "signed_tail_on", lambda _, entropy, count: real(CPU, entropy, count))
    for _ in range(3):
        found = standard_normal(one, count, torch.device("meta"))
        assert torch.equal(found, standard_normal(other, count, CPU))


def test_copies_for_a_device_share_nothing() -> None:
    first, second = on_device(np.arange(4.0), CPU), on_device(np.ones(4), CPU)
    assert first.tolist() == [0, 1, 2, 3]
    assert first.data_ptr() != second.data_ptr()


@pytest.mark.parametrize("word", [0, 2**64 - 1])
def test_extreme_words_give_finite_noise(word: int) -> None:
    assert torch.isfinite(standard_normal(RepeatedWord(word), 3, torch.device("cpu"))).all()


def test_without_noise_the_sum_is_untouched() -> None:
    (same,) = NoNoise().add([torch.arange(3.0)], [1.0], 0.0, OsEntropy())
    assert torch.equal(same, torch.arange(3.0))


@pytest.mark.parametrize("multiplier", [0.0, -1.0, math.nan, math.inf])
def test_bad_multiplier_is_refused(multiplier: float) -> None:
    with pytest.raises(ConfigError, match="noise_multiplier"):
        Gaussian(multiplier)


@pytest.mark.parametrize("count", [0, 1, 2**15, 2**15 + 1, 2**17 + 1])
def test_blocks_are_drawn_one_after_the_other_and_none_twice(count: int) -> None:
    """Two float64 draws are equal with chance 2^-47 at most: false alarm 1e-4 over 2^17, with a fixed seed."""
    values = standard_normal(FixedSeed(3), count, torch.device("cpu"))
    assert values.shape == (count,)
    assert len(values.unique()) == count


def test_a_fixed_seed_gives_the_same_noise_whichever_worker_is_first() -> None:
    first, second = (standard_normal(FixedSeed(3), 2**19, torch.device("cpu")) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("count", [10, 2**17])
def test_threads_are_given_back_whatever_happens(count: int) -> None:
    def broken(*_: torch.Tensor) -> torch.Tensor:
        assert torch.get_num_threads() == 1
        raise ValueError("broken")

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        standard_normal(FixedSeed(0), count, torch.device("cpu"))
        assert torch.get_num_threads() == 3
        with pytest.raises(ValueError, match="broken"):
            draw_by_quantile(broken, FixedSeed(0), count, torch.device("cpu"))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
