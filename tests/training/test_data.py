"""Units of privacy, Poisson batches and micro-batches."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from tiny_models import CPU, records
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dptune.errors import ConfigError
from dptune.privacy.entropy import FixedSeed, OsEntropy
from dptune.training.data import PrivacyUnits, micro_batches, tokenize

patients = st.lists(st.integers(0, 9), min_size=1, max_size=40).map(np.array)


def tokenizer() -> Any:
    vocabulary = {"<end>": 0, **{letter: index + 1 for index, letter in enumerate("abcdefgh")}}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", pad_token="<end>")


@given(patients=patients, most=st.integers(1, 4), seed=st.integers(0, 1000))
def test_a_patient_brings_at_most_m_rows_all_its_own(patients: np.ndarray, most: int, seed: int) -> None:
    units = PrivacyUnits.of("patient", patients, most)
    drawn = units.draw(0.7, FixedSeed(seed))
    owners = [set(patients[unit].tolist()) for unit in drawn]
    assert all(len(owner) == 1 for owner in owners)
    assert len(set().union(*owners)) == len(owners)
    for unit, owner in zip(drawn, owners, strict=True):
        assert len(set(unit.tolist())) == len(unit) == min(most, int((patients == next(iter(owner))).sum()))


@given(patients=patients)
def test_units_partition_the_records(patients: np.ndarray) -> None:
    by_patient = PrivacyUnits.of("patient", patients, 1)
    assert len(by_patient) == len(set(patients.tolist()))
    for units in (by_patient, PrivacyUnits.of("encounter", patients, 1)):
        assert sorted(np.concatenate(units.members).tolist()) == list(range(len(patients)))


def test_an_encounter_is_its_own_unit() -> None:
    units = PrivacyUnits.of("encounter", np.array([3, 3, 3]), 5)
    assert [unit.tolist() for unit in units.draw(1.0, OsEntropy())] == [[0], [1], [2]]


def test_the_number_of_drawn_patients_is_binomial() -> None:
    """Mean of 3000 draws of Binomial(50, 0.2) within six standard errors: false alarm 2e-9."""
    units = PrivacyUnits.of("patient", np.arange(200) % 50, 2)
    sizes = [len(units.draw(0.2, OsEntropy())) for _ in range(3000)]
    assert np.mean(sizes) == pytest.approx(10, abs=6 * (50 * 0.2 * 0.8 / 3000) ** 0.5)


def test_each_row_of_a_patient_is_chosen_equally_often() -> None:
    """Chi-square of 4000 choices among 5 rows; false alarm 1e-9."""
    units = PrivacyUnits.of("patient", np.zeros(5, dtype=np.int64), 1)
    chosen = [int(units.draw(1.0, OsEntropy())[0][0]) for _ in range(4000)]
    assert stats.chisquare(np.bincount(chosen, minlength=5)).pvalue > 1e-9


@pytest.mark.parametrize(("kind", "most"), [("hospital", 1), ("patient", 0)])
def test_bad_units_are_refused(kind: str, most: int) -> None:
    with pytest.raises(ConfigError):
        PrivacyUnits.of(kind, np.arange(3), most)


@given(sizes=st.lists(st.integers(1, 5), max_size=15), rows=st.integers(1, 8))
def test_micro_batches_hold_every_unit_once_and_whole(sizes: list[int], rows: int) -> None:
    edges = np.cumsum([0, *sizes])
    batch = [np.arange(start, end) for start, end in pairwise(edges)]
    found = []
    rows = max([rows, *sizes])
    for part in micro_batches(batch, rows):
        assert len(part.records) <= rows
        assert sorted(set(part.owners.tolist())) == list(range(part.units))
        found += [part.records[part.owners == unit].tolist() for unit in range(part.units)]
    assert found == [unit.tolist() for unit in batch]


def test_an_empty_batch_has_no_micro_batches() -> None:
    assert list(micro_batches([], 4)) == []


def test_the_shape_of_a_batch_follows_no_record() -> None:
    """Kernels round by shape: a shape that followed the records would tie their gradients together."""
    tokens = records(6)
    shapes = {tokens.batch(np.array(chosen), CPU, height=5)[0].shape for chosen in ([0], [1, 2], [3, 3, 4, 5])}
    assert shapes == {(5, tokens.width)}
    ids, mask = tokens.batch(np.array([0, 1]), CPU, height=5)
    assert (mask[:, -1] == 0).all()
    assert mask[2:].sum(dim=1).tolist() == [1, 1, 1]
    assert (ids[2:] == tokens.padding).all()


def test_compact_batches_end_with_their_longest_record() -> None:
    tokens = records(4)
    ids, mask = tokens.compact(np.array([0, 1]), CPU)
    assert ids.shape == mask.shape == (2, max(len(tokens.rows[0]), len(tokens.rows[1])))


def test_padding_is_on_the_right_and_masked() -> None:
    tokens = records(3)
    ids, mask = tokens.batch(np.array([2, 0]), CPU)
    for position, index in enumerate([2, 0]):
        length = len(tokens.rows[index])
        assert ids[position, :length].tolist() == tokens.rows[index].tolist()
        assert mask[position].tolist() == [1] * length + [0] * (mask.shape[1] - length)


def test_long_records_are_truncated_and_never_chunked() -> None:
    texts = ["a b c d e f g h", "a b", "", "a b c"]
    tokens = tokenize(texts, tokenizer(), max_length=5)
    assert [row.tolist() for row in tokens.rows] == [[1, 2, 3, 4], [1, 2, 0], [0], [1, 2, 3, 0]]
    assert tokens.truncated == 1


def test_a_length_that_predicts_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_length"):
        tokenize(["a"], tokenizer(), max_length=2)


def test_nothing_private_shows_in_a_representation() -> None:
    """Which records belong together, and which were drawn, are secrets: a log or a traceback must not show them."""
    tokens = records(1)
    (part,) = micro_batches([np.array([123456])], 4)
    assert "array" not in repr(tokens)
    assert "array" not in repr(PrivacyUnits.of("patient", np.array([4, 4, 4]), 2))
    assert "123456" not in repr(part)


@pytest.mark.parametrize("kind", ["encounter", "patient"])
def test_an_absent_unit_counts_and_brings_nothing(kind: str) -> None:
    """Not even an empty gradient: a batch with it drawn is the batch without it."""
    patients, absent = np.array([0, 1, 2, 3]), np.array([False, True, False, True])
    units = PrivacyUnits.of(kind, patients, 2, absent)
    assert len(units) == 4
    assert [part.tolist() for part in units.draw(1.0, FixedSeed(0))] == [[0], [2]]
    assert not PrivacyUnits.of(kind, patients, 2, np.ones(4, dtype=bool)).draw(1.0, FixedSeed(0))
    members = PrivacyUnits.clients(2, patients, absent).members
    assert sorted(np.concatenate(members).tolist()) == [0, 2]
