"""Coins and noise: open intervals, independence, and what a fixed seed may not claim."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mechanism_steps import RepeatedWord
from numpy.typing import NDArray
from scipy import stats

from dptune.privacy.entropy import FIXED_SEED_LEAK, FixedSeed, OsEntropy, poisson_sample, signed_tail, uniform


@pytest.mark.parametrize("word", [0, 1, 2**64 - 1, 2**64 - 2**11, 2**63, 2**63 - 1])
def test_uniforms_stay_inside_the_open_interval(word: int) -> None:
    """A one would be infinite noise, a zero an infinite gap."""
    (value,) = uniform(RepeatedWord(word), 1)
    assert 0.0 < value < 1.0


def test_uniforms_are_uniform() -> None:
    """Kolmogorov-Smirnov on fresh entropy; false alarm 1e-9."""
    assert stats.kstest(uniform(OsEntropy(), 200_000), "uniform").pvalue > 1e-9


def draws(units: int, rate: float, times: int) -> NDArray[np.bool_]:
    hit = np.zeros((times, units), dtype=bool)
    for row in hit:
        row[poisson_sample(OsEntropy(), units, rate)] = True
    return hit


@pytest.mark.parametrize("rate", [0.02, 0.3, 0.9])
def test_every_unit_enters_with_its_rate(rate: float) -> None:
    """Chi-square over the marginals of 20 units; false alarm 1e-8."""
    units, times = 20, 4000
    counts = draws(units, rate, times).sum(axis=0)
    statistic = ((counts - times * rate) ** 2).sum() / (times * rate * (1 - rate))
    assert stats.chi2.sf(statistic, units) > 1e-8


@pytest.mark.parametrize("rate", [0.3, 0.8])
def test_units_enter_independently(rate: float) -> None:
    """Correlation of each of 45 pairs (Bonferroni), and the batch size against the binomial; false alarm 2e-8."""
    units, times = 10, 6000
    hit = draws(units, rate, times)
    standard = (hit - rate) / math.sqrt(rate * (1 - rate))
    correlations = (standard.T @ standard)[np.triu_indices(units, 1)] / math.sqrt(times)
    assert stats.norm.sf(abs(correlations).max()) * 2 * len(correlations) > 1e-8
    sizes = np.bincount(hit.sum(axis=1), minlength=units + 1)
    expected = stats.binom.pmf(np.arange(units + 1), units, rate) * times
    usual = expected > 20
    observed = [*sizes[usual], sizes[~usual].sum()]
    assert stats.chisquare(observed, [*expected[usual], expected[~usual].sum()]).pvalue > 1e-8


@given(seed=st.integers(0, 10**6), units=st.integers(0, 300), rate=st.floats(1e-300, 1.0))
def test_samples_are_sorted_distinct_and_in_range(seed: int, units: int, rate: float) -> None:
    sample = poisson_sample(FixedSeed(seed), units, rate)
    assert (np.diff(sample) > 0).all()
    assert ((sample >= 0) & (sample < units)).all()


def test_few_of_very_many_units_enter_evenly_and_cost_little() -> None:
    """Number and places of 2,000 samples of about 3 among 10^9, by Poisson and Kolmogorov-Smirnov: false alarm 2e-9.
    A sample takes 16 words and twice what it may have (6 standard deviations), not one for a unit.
    """
    units, rate, times, entropy = 10**9, 3e-9, 2000, Counted()
    samples = [poisson_sample(entropy, units, rate) for _ in range(times)]
    total = sum(map(len, samples))
    assert 2 * min(stats.poisson.cdf(total, 3 * times), stats.poisson.sf(total - 1, 3 * times)) > 1e-9
    assert stats.kstest(np.concatenate(samples) / units, "uniform").pvalue > 1e-9
    assert entropy.drawn <= times * (16 + 2 * (3 + 6 * 3**0.5))


class Counted:
    """The system's entropy, and how much of it was drawn."""

    leaks = ()

    def __init__(self) -> None:
        self.drawn = 0

    def words(self, count: int) -> NDArray[np.uint64]:
        self.drawn += count
        return OsEntropy().words(count)


def test_rate_one_takes_everything() -> None:
    assert poisson_sample(OsEntropy(), 7, 1.0).tolist() == list(range(7))


@pytest.mark.parametrize("rate", [1e-12, 1e-300, 5e-324])
def test_tiny_rates_give_empty_batches(rate: float) -> None:
    """False alarm 1e-9 at the largest of the rates."""
    assert len(poisson_sample(OsEntropy(), 1000, rate)) == 0


@pytest.mark.parametrize("word", [0, 2**64 - 1])
def test_extreme_words_end(word: int) -> None:
    assert set(poisson_sample(RepeatedWord(word), 50, 0.1)) <= set(range(50))


@pytest.mark.parametrize("count", [8, 200_000])
def test_the_systems_entropy_never_repeats(count: int) -> None:
    """No word comes twice, in one call or in two: false alarm 5e-9 at most."""
    source = OsEntropy()
    assert source.leaks == ()
    words = np.concatenate([source.words(count), source.words(count)])
    assert len(np.unique(words)) == 2 * count


@pytest.mark.parametrize("count", [0, 1, 128, 129, 10_000])
@pytest.mark.parametrize("stretched", [True, False])
def test_the_systems_entropy_gives_as_many_words_as_asked(
    count: int, stretched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the package that stretches it and without."""
    if not stretched:
        monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    words = OsEntropy().words(count)
    assert (words.shape, words.dtype) == ((count,), np.uint64)


def test_every_bit_of_many_words_is_fair() -> None:
    """Each of 64 bits over 200,000 words, within 7 standard errors: false alarm 2e-10."""
    bits = np.unpackbits(OsEntropy().words(200_000).view(np.uint8)).reshape(-1, 64)
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 7 * 0.5 / math.sqrt(200_000)


def test_many_words_are_the_keystream_of_a_key_and_counter_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """NIST SP 800-38A, F.5.5: AES-256 in counter mode; both are asked for at every call, and nothing else is."""
    key = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
    counter = bytes.fromhex("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff")
    plain, cipher = 0x6BC1BEE22E409F96E93D7E117393172A, 0x601EC313775789A5B7A7F504BBF3D228
    asked: list[int] = []

    def kernel(size: int) -> bytes:
        asked.append(size)
        return {32: key, 16: counter}[size]

    monkeypatch.setattr("os.urandom", kernel)
    for _ in range(2):
        assert OsEntropy().words(1000).tobytes()[:16] == (plain ^ cipher).to_bytes(16, "big")
    assert asked == [32, 16, 32, 16]


def test_a_fixed_seed_repeats_and_says_so() -> None:
    first, second = FixedSeed(3), FixedSeed(3)
    assert np.array_equal(first.words(5), second.words(5))
    assert not np.array_equal(first.words(5), FixedSeed(4).words(5))
    assert first.leaks == (FIXED_SEED_LEAK,)


def test_a_fixed_seed_moves_on() -> None:
    source = FixedSeed(3)
    assert not np.array_equal(source.words(5), source.words(5))


def test_a_fixed_seed_cannot_be_declared_private() -> None:
    with pytest.raises(TypeError):
        FixedSeed(3, leaks=())


class _Prefixed:
    """Entropy that gives a certain word once for all, and fresh ones afterwards."""

    leaks = ("test",)

    def __init__(self, word: int) -> None:
        self._word: int | None = word

    def words(self, count: int) -> NDArray[np.uint64]:
        word, self._word = self._word, None
        return OsEntropy().words(count) if word is None else np.full(count, word, dtype=np.uint64)


@pytest.mark.parametrize("bits", [1, 20, 30, 40, 47])
@pytest.mark.parametrize("low", [0, 1])
def test_words_are_continued_up_to_the_threshold(bits: int, low: int) -> None:
    """Near it float64 has room for six bits of the other word; of 1000, 30 are seen but for a chance below 1e-9."""
    word = 2**bits - 1
    _, tail = signed_tail(_Prefixed(2 * word + low), 1000)
    assert len(np.unique(tail)) > 30
    assert bool(((tail >= word * 2.0**-64) & (tail <= (word + 1) * 2.0**-64)).all())


def test_words_are_not_continued_from_the_threshold_on() -> None:
    _, tail = signed_tail(_Prefixed(2**48), 1000)
    assert len(np.unique(tail)) == 1


@given(st.integers(0, 2**20 - 1))
def test_a_word_deep_in_the_tail_is_continued_by_another(word: int) -> None:
    """A quantile steps over what one word cannot tell; such gaps in heavy tails show what was added. Of 1000 uniforms
    that keep 32 bits or more beside the word, ten are alike with a chance far below 1e-30."""
    signs, tail = signed_tail(_Prefixed(2 * word), 1000)
    assert bool((signs == 1).all())
    assert bool((tail > word * 2.0**-64).all() & (tail < (word + 1) * 2.0**-64).all())
    assert len(np.unique(tail)) > 990
