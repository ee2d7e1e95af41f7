"""Units of privacy, Poisson batches and micro-batches."""

from __future__ import annotations

import tracemalloc
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

from dptune.core.errors import ConfigError
from dptune.privacy.entropy import FixedSeed, OsEntropy, poisson_sample, uniform
from dptune.training.data import Tokens, plain_ids, tokenize, with_context
from dptune.training.gradients.step_memory import micro_batches
from dptune.training.privacy_units import PrivacyUnits, split_batch

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
    for units in (by_patient, PrivacyUnits.of("record", patients, 1)):
        assert sorted(np.concatenate(units.members).tolist()) == list(range(len(patients)))


def split_members(kind: str, patients: np.ndarray, absent: np.ndarray) -> list[np.ndarray]:
    """The units as a list of arrays, written down a second time."""
    if kind == "record":
        members = list(np.arange(len(patients))[:, None])
    else:
        order = np.argsort(patients, kind="stable")
        members = np.split(order, np.flatnonzero(np.diff(patients[order])) + 1)
    return [records[~absent[records]] for records in members]


def plain_draw(members: list[np.ndarray], most: int, rate: float, entropy: FixedSeed) -> list[list[int]]:
    batch = []
    for unit in poisson_sample(entropy, len(members), rate):
        records = members[unit]
        if len(records) > most:
            records = records[np.argsort(uniform(entropy, len(records)))[:most]]
        if len(records):
            batch.append(records.tolist())
    return batch


@given(
    kind=st.sampled_from(["record", "patient"]),
    patients=patients,
    absences=st.lists(st.booleans(), min_size=40, max_size=40),
    most=st.integers(1, 4),
    rate=st.floats(0.01, 1.0),
    seed=st.integers(0, 1000),
)
def test_draws_are_those_of_units_in_a_list(
    kind: str, patients: np.ndarray, absences: list[bool], most: int, rate: float, seed: int
) -> None:
    """The same members, the same coins in the same order, hence the same law."""
    absent = np.array(absences[: len(patients)])
    units = PrivacyUnits.of(kind, patients, most, absent)
    members = split_members(kind, patients, absent)
    assert [unit.tolist() for unit in units.members] == [unit.tolist() for unit in members]
    drawn = units.draw(rate, FixedSeed(seed))
    assert [unit.tolist() for unit in drawn] == plain_draw(members, units.most, rate, FixedSeed(seed))
    assert all(unit.dtype == np.int64 for unit in drawn)


@given(patients=patients, count=st.integers(1, 12), absences=st.lists(st.booleans(), min_size=40, max_size=40))
def test_clients_are_whole_patients_whoever_is_absent(patients: np.ndarray, count: int, absences: list[bool]) -> None:
    absent = np.array(absences[: len(patients)])
    whole, rest = PrivacyUnits.clients(count, patients), PrivacyUnits.clients(count, patients, absent)
    assert len(whole) == len(rest) == count
    assert [unit[~absent[unit]].tolist() for unit in whole.members] == [unit.tolist() for unit in rest.members]
    assert all(np.all(np.diff(unit) > 0) for unit in whole.members)
    assert rest.most == max(map(len, rest.members))


class Counted:
    """Entropy that knows how much of it was drawn."""

    leaks = ()

    def __init__(self) -> None:
        self.drawn, self._source = 0, OsEntropy()

    def words(self, count: int) -> Any:
        self.drawn += count
        return self._source.words(count)


@pytest.mark.parametrize("kind", ["record", "patient"])
def test_a_draw_costs_what_its_batch_costs(kind: str) -> None:
    """Twice as many words as batch 64 has records are never used up (more than ten standard deviations), whatever
    the number of units; and no array as long as the units is made.
    """
    for count in (10_000, 1_000_000):
        absent = np.zeros(count, dtype=bool)
        absent[:5] = True
        units = PrivacyUnits.of(kind, np.arange(count), 1, absent)
        entropy = Counted()
        units.draw(1e-9, OsEntropy())  # whatever is made once
        tracemalloc.start()
        drawn = units.draw(64 / count, entropy)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert 0 < len(drawn) < 144, "false alarm below 1e-15"
        assert entropy.drawn <= 256
        assert peak < 100_000, "bytes"


def test_ten_million_encounters_take_no_memory() -> None:
    tracemalloc.start()
    units = PrivacyUnits.records(10_000_000)
    drawn = units.draw(2e-6, OsEntropy())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(units) == 10_000_000
    assert all(len(unit) == 1 for unit in drawn)
    assert peak < 100_000


def test_many_patients_are_three_flat_arrays() -> None:
    """Eight bytes a record where each patient has one, and eight for its key; a list of arrays takes over a hundred."""
    patients = np.arange(200_000)
    tracemalloc.start()
    units = PrivacyUnits.of("patient", patients, 1)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(units) == 200_000
    assert kept < 18 * len(patients)


def test_an_encounter_is_its_own_unit() -> None:
    units = PrivacyUnits.of("record", np.array([3, 3, 3]), 5)
    assert [unit.tolist() for unit in units.draw(1.0, OsEntropy())] == [[0], [1], [2]]


def test_the_number_of_drawn_patients_is_binomial() -> None:
    """Chi-square of 3000 draws of Binomial(50, 0.2), its whole law: false alarm 1e-9. Batches of one size would have
    the same mean."""
    units = PrivacyUnits.of("patient", np.arange(200) % 50, 2)
    sizes = np.array([len(units.draw(0.2, OsEntropy())) for _ in range(3000)])
    edges = np.arange(6, 16)  # sizes up to 5, 6, ..., 15 and more: at least 90 expected in each
    expected = np.diff(stats.binom.cdf([-1, *(edges - 1), 50], 50, 0.2)) * 3000
    found = np.bincount(np.searchsorted(edges, sizes, side="right"), minlength=len(expected))
    assert expected.min() > 90
    assert stats.chisquare(found, expected).pvalue > 1e-9


@pytest.mark.parametrize("kind", ["record", "patient"])
def test_two_units_are_drawn_independently(kind: str) -> None:
    """Both, and neither, in a quarter of 400 draws, give or take 60 (6.9 deviations; false alarm 1e-10)."""
    units = PrivacyUnits.of(kind, np.arange(2), 1)
    sizes = [len(units.draw(0.5, OsEntropy())) for _ in range(400)]
    assert 40 < sizes.count(2) < 160
    assert 40 < sizes.count(0) < 160


def test_each_row_of_a_patient_is_chosen_equally_often() -> None:
    """Chi-square of 4000 choices among 5 rows; false alarm 1e-9."""
    units = PrivacyUnits.of("patient", np.zeros(5, dtype=np.int64), 1)
    chosen = [int(units.draw(1.0, OsEntropy())[0][0]) for _ in range(4000)]
    assert stats.chisquare(np.bincount(chosen, minlength=5)).pvalue > 1e-9


@pytest.mark.parametrize(("kind", "most"), [("client", 1), ("", 1), ("patient", 0)])
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


@given(data=st.data(), ids=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9))
def test_rows_hold_ids_and_what_counts(data: st.DataObject, ids: list[int]) -> None:
    """Also token 0 and the largest id; with nothing but counted tokens a row is its ids, bit for bit."""
    counts = np.array(data.draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids))))
    plain = np.array(ids, dtype=np.int32)
    row = with_context(plain, counts)
    assert (row.dtype, plain_ids(row).dtype) == (np.int32, np.int32)
    assert plain_ids(row).tolist() == ids
    assert (row >= 0).tolist() == counts.tolist()
    assert with_context(plain, np.ones(len(ids), dtype=bool)).tolist() == ids
    tokens = Tokens([row], padding=0, width=10)
    shown, mask = tokens.batch(np.array([0]), CPU, height=2)
    assert shown[0].tolist() == ids + [0] * (10 - len(ids))
    assert mask[0].tolist() == [1 if counted else 2 for counted in counts] + [0] * (10 - len(ids))
    assert mask[1].tolist() == [1] + [0] * 9
    assert tokens.without_loss == (not counts[1:].any())


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


@pytest.mark.parametrize("kind", ["record", "patient"])
def test_an_absent_unit_counts_and_brings_nothing(kind: str) -> None:
    """Not even an empty gradient: a batch with it drawn is the batch without it."""
    patients, absent = np.array([0, 1, 2, 3]), np.array([False, True, False, True])
    units = PrivacyUnits.of(kind, patients, 2, absent)
    assert len(units) == 4
    assert [part.tolist() for part in units.draw(1.0, FixedSeed(0))] == [[0], [2]]
    assert not PrivacyUnits.of(kind, patients, 2, np.ones(4, dtype=bool)).draw(1.0, FixedSeed(0))
    members = PrivacyUnits.clients(2, patients, absent).members
    assert sorted(np.concatenate(members).tolist()) == [0, 2]


def test_an_auditors_slots_are_drawn_like_all_units() -> None:
    """Of 4,000 draws, each frequency is within 5 sigma of the rate: a false alarm in 2e5 tests."""
    units = PrivacyUnits.of("record", np.arange(3), 1).with_slots(np.array([True, False, True]))
    assert len(units) == 6
    draws = [split_batch(units.draw(0.3, OsEntropy())) for _ in range(4000)]
    counts = np.zeros(6)
    for entered, planted in draws:
        counts[[*(int(one[0]) for one in entered), *(planted + 3)]] += 1
    assert counts[4] == 0, "its coin left it out"
    assert np.abs(np.delete(counts, 4) / 4000 - 0.3).max() < 5 * (0.3 * 0.7 / 4000) ** 0.5
    assert [len(units.part(rank, 2)) for rank in (0, 1)] == [1 + 3, 2], "slots are rank 0's"
    assert len(units.with_slots(np.zeros(0, dtype=bool))) == 3


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.data())
def test_the_last_record_of_units_is_the_highest_that_one_of_them_names(keys: list[int], data: st.DataObject) -> None:
    absent = np.array(data.draw(st.lists(st.booleans(), min_size=len(keys), max_size=len(keys))))
    for units in (
        PrivacyUnits.of("patient", np.array(keys), 3, absent),
        PrivacyUnits.clients(3, np.array(keys), absent),
    ):
        members = [list(records) for records in units.members]
        highest = max((record for one in members for record in one), default=-1)
        assert units.last_record == highest
        assert PrivacyUnits("patient", members, 3).last_record == highest
    assert PrivacyUnits.records(len(keys), absent).last_record == len(keys) - 1, "an absent one may come back"


def test_an_index_that_a_batch_would_take_for_an_auditors_slot_is_refused() -> None:
    with pytest.raises(ConfigError, match="units: hold a negative index"):
        PrivacyUnits("patient", [np.array([0]), np.array([1, -1])], 3).last_record  # noqa: B018
