"""Exposure: the arithmetic of ranks, and a secret that a model learned by heart."""

from __future__ import annotations

import math

import numpy as np
import pytest
from audit_models import LENGTH, RECORD, SECRET, gpt2, memorised, tokenizer
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dptune.audit.text.extraction import chance, exposure_of, exposures
from dptune.audit.text.likelihood import Passage, ending_losses
from dptune.core.errors import ConfigError, DataError
from dptune.records.canaries import ALPHABET, SECRET_LENGTH, suffix

CANDIDATES = 63


@pytest.mark.parametrize(
    ("losses", "rank"),
    [
        ([1, 2, 3, 4], 1),
        ([2, 1, 3, 4], 2),
        ([4, 1, 2, 3], 4),
        ([1, 1, 2, 3], 1.5),
        ([2, 1, 2, 2], 3),
        ([5, 5, 5, 5], 2.5),
    ],
)
def test_exposure_by_hand(losses: list[float], rank: float) -> None:
    assert exposure_of(np.array([losses], dtype=float)) == pytest.approx([math.log2(4 / rank)])


@given(
    rows=st.integers(1, 5).flatmap(
        lambda width: st.lists(
            st.lists(st.integers(0, 4), min_size=width + 1, max_size=width + 1), min_size=1, max_size=4
        )
    )
)
def test_exposure_has_a_range_and_takes_each_secret_alone(rows: list[list[int]]) -> None:
    losses = np.array(rows, dtype=float)
    bits = exposure_of(losses)
    assert ((bits >= 0) & (bits <= math.log2(losses.shape[1]))).all()
    assert bits.tolist() == [float(exposure_of(losses[row : row + 1])[0]) for row in range(len(losses))]


@pytest.mark.parametrize("candidates", [1, 7, 1000])
def test_chance_is_the_mean_over_all_ranks(candidates: int) -> None:
    ranks = np.arange(candidates + 1.0)
    losses = np.stack([np.roll(ranks, -first) for first in range(candidates + 1)])
    assert chance(candidates) == pytest.approx(exposure_of(losses).mean())


def test_chance_is_about_one_and_a_half_bits() -> None:
    assert chance(100_000) == pytest.approx(1 / math.log(2), abs=1e-3)


PLANTED = (Passage(RECORD, suffix(SECRET)), SECRET)


def exposed(model: object, secrets: list[str], *, seed: int = 0, rows: int = 64) -> NDArray[np.float64]:
    planted = [(Passage(RECORD, suffix(secret)), secret) for secret in secrets]
    return exposures(model, tokenizer(), planted, candidates=CANDIDATES, max_length=LENGTH, rows=rows, seed=seed)


def test_a_memorised_secret_is_at_the_maximum_and_an_unplanted_one_is_not() -> None:
    """Eight exposures at chance, which exceed b bits with probability 2^-b, have a mean above 4 once in 5,000."""
    generator = np.random.default_rng(0)
    unplanted = ["".join(row) for row in generator.choice(list(ALPHABET), size=(8, SECRET_LENGTH))]
    maximum = math.log2(CANDIDATES + 1)
    bits = exposed(memorised(), [*unplanted[:2], SECRET, *unplanted[2:]])
    assert bits.shape == (9,)
    assert bits[2] == maximum
    assert np.delete(bits, 2).mean() < 4
    assert exposed(gpt2(), [SECRET])[0] < maximum


def test_candidates_stand_where_the_secret_stands() -> None:
    """As ranked by hand, each in a passage of its own."""
    model, generator = gpt2(), np.random.default_rng(4)
    drawn = ["".join(row) for row in generator.choice(list(ALPHABET), size=(CANDIDATES, SECRET_LENGTH))]
    passages = [Passage(RECORD, suffix(secret)) for secret in (SECRET, *drawn)]
    losses = ending_losses(model, tokenizer(), passages, max_length=LENGTH, rows=8).total
    rank = 1 + sum(losses[1:] < losses[0])
    assert exposed(model, [SECRET], seed=4)[0] == pytest.approx(math.log2((CANDIDATES + 1) / rank))


def test_exposure_depends_on_the_seed_alone() -> None:
    model, secrets = gpt2(), [SECRET, "0123456789", "ABCDEFGHIJ", "ZYXWVUTSRQ"]
    bits = exposed(model, secrets, seed=1)
    assert exposed(model, secrets, seed=1).tolist() == bits.tolist()
    assert exposed(model, secrets, seed=2).tolist() != bits.tolist()


def test_nothing_to_rank_against_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"audit\.candidates"):
        exposures(gpt2(), tokenizer(), [PLANTED], candidates=0, max_length=LENGTH, rows=4)


def test_what_cannot_be_ranked_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"canaries\.extraction"):
        exposures(gpt2(), tokenizer(), [], candidates=3, max_length=LENGTH, rows=4)
    with pytest.raises(DataError, match=r"cut off.*training\.max_length"):
        exposures(gpt2(), tokenizer(), [PLANTED], candidates=3, max_length=5, rows=4)
    with pytest.raises(DataError, match="not finite"):
        exposure_of(np.array([[math.nan, 1.0, 2.0, 3.0]]))
