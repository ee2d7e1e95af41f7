"""The bound on a draw's rate: how often it errs, how often it sees, and what it refuses to say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dptune.audit.one_run import SampleRate, Unseen, audited_sample_rate
from dptune.privacy.entropy import FixedSeed

STEPS, RATE = 20, 0.25


def seen(rate: float, noise: float, seed: int, *, canaries: int = 64, confidence: float = 0.9) -> SampleRate:
    """An audit of a run whose draw has this rate; moves differ by step."""
    generator = np.random.default_rng(seed)
    moves = generator.uniform(0.5, 1.5, STEPS)
    included = generator.random(canaries) < 0.5
    entered = (generator.random((canaries, STEPS)) < rate) @ moves
    background = generator.standard_t(3, canaries) * noise * STEPS**0.5
    scores = np.where(included, entered, 0.0) + background
    found = audited_sample_rate(scores, included, moves.tolist(), RATE, confidence, confidence, FixedSeed(seed))
    assert isinstance(found, SampleRate)
    return found


@pytest.mark.parametrize(("rate", "noise"), [(0.25, 0.0), (0.25, 1.0), (0.05, 0.3)])
def test_the_bound_errs_as_rarely_as_it_says(rate: float, noise: float) -> None:
    """100 audits at 90 %, under noise with heavy tails: 10 may err; more than 24 do with chance 1.3e-5."""
    errors = sum(seen(rate, noise, seed).audited > rate for seed in range(100))
    assert errors <= 24


def test_it_sees_what_it_says_it_could() -> None:
    """At the rate that it calls refutable, 19 of 20 audits should refute; fewer than 30 of 40 with chance 1e-5."""
    least = float(np.median([seen(RATE, 0.5, seed).refutable for seed in range(9)]))
    assert RATE < least < 1
    assert sum(seen(least, 0.5, 100 + seed).alarm > RATE for seed in range(40)) >= 30


@settings(max_examples=25)
@given(st.integers(0, 1000), st.floats(0, 1), st.floats(0, 2))
def test_more_confidence_shows_less(seed: int, rate: float, noise: float) -> None:
    found = [seen(rate, noise, seed, canaries=40, confidence=confidence).audited for confidence in (0.8, 0.95, 0.999)]
    assert found == sorted(found, reverse=True)
    assert 0 <= found[-1] <= found[0] <= 1


def test_no_power_is_said() -> None:
    assert "NO POWER" in seen(RATE, 30.0, 1, canaries=16).power
    assert "could have refuted: a draw at a rate above 0." in seen(RATE, 0.1, 1).power


def test_rates_are_rounded_up() -> None:
    """Rounded down, the audit would seem to have seen more, and the ledger to have charged less."""
    power = SampleRate(0.02001, 0.02, 0.01, 0.005, 0.12341).power
    assert power == "could have refuted: a draw at a rate above 0.124, where 0.0201 is charged"


@pytest.mark.parametrize(
    ("included", "moves"),
    [([True] * 4, [1.0]), ([False] * 4, [1.0]), ([True, False] * 2, []), ([True, False] * 2, [np.nan])],
)
def test_where_nothing_can_be_seen_that_is_said(included: list[bool], moves: list[float]) -> None:
    scores: NDArray[np.float64] = np.arange(4.0)
    found = audited_sample_rate(scores, np.array(included), moves, RATE, 0.9, 0.9, FixedSeed(0))
    assert isinstance(found, Unseen)
    assert found.to_dict() == {"sample_rate": RATE, "power": f"NO POWER on the draw: {found.reason}"}


BINS = 4


def seen_in_bins(entries: int, noise: float, seed: int, steps: int = STEPS) -> SampleRate | Unseen:
    """An audit of a run by balls in bins, whose canaries enter so many batches of each epoch."""
    generator = np.random.default_rng(seed)
    moves, included = generator.uniform(0.5, 1.5, steps), generator.random(64) < 0.5
    order = generator.random((64, STEPS // BINS, BINS)).argsort(axis=2)
    entered = (order < entries).reshape(64, STEPS)[:, :steps] @ moves
    scores = np.where(included, entered, 0.0) + generator.standard_t(3, 64) * noise * STEPS**0.5
    return audited_sample_rate(scores, included, moves.tolist(), 1 / BINS, 0.9, 0.9, FixedSeed(seed), BINS)


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_one_entry_an_epoch_is_the_charged_rate(noise: float) -> None:
    """100 audits at 90 %: 10 may err; more than 24 do with chance 1.3e-5. Entries vary less than those of coins."""
    found = [seen_in_bins(1, noise, seed) for seed in range(100)]
    assert sum(one.audited > one.sample_rate for one in found if isinstance(one, SampleRate)) <= 24
    assert all(isinstance(one, SampleRate) for one in found)


def test_two_entries_an_epoch_are_accused() -> None:
    """A unit enters twice in one epoch, as if bins were drawn anew in the middle of it."""
    for seed in range(10):
        found = seen_in_bins(2, 0.1, seed)
        assert isinstance(found, SampleRate)
        assert found.alarm > found.sample_rate


def test_epochs_that_were_not_seen_whole_show_nothing() -> None:
    found = seen_in_bins(1, 0.1, 0, STEPS - 1)
    assert isinstance(found, Unseen)
    assert "a process was killed" in found.power
