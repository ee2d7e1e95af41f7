"""Splits have the stated sizes, cover every record once, and keep patients together when asked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from corpus_helpers import write_train
from hypothesis import given
from hypothesis import strategies as st

from dptune.corpus.records import read_records
from dptune.corpus.splits import SIDES, split, write_splits
from dptune.errors import ConfigError


def test_the_sizes_of_the_real_table() -> None:
    records = np.arange(101_766)
    sides = split(records, records, 1, "encounter")
    assert [len(sides[name]) for name in ("attack", "eval", "train")] == [20_353, 8_142, 73_271]


@given(
    patients=st.lists(st.integers(0, 40), min_size=5, max_size=200),
    seed=st.integers(0, 2**32),
    unit=st.sampled_from(["encounter", "patient"]),
)
def test_sides_partition_the_records_and_patients_stay_together(patients: list[int], seed: int, unit: str) -> None:
    owners = np.array(patients)
    records = np.arange(len(owners)) * 7
    units = len(owners) if unit == "encounter" else len(set(patients))
    if units < 5:
        with pytest.raises(ConfigError, match=r"split\.unit: .* Fix: use at least 5"):
            split(records, owners, seed, unit)
        return
    sides = split(records, owners, seed, unit)
    assert tuple(sides) == SIDES
    assert sorted(np.concatenate(list(sides.values()))) == records.tolist()
    assert all(len(side) for side in sides.values())
    if unit == "patient":
        held = [set(owners[side // 7]) for side in sides.values()]
        assert sum(map(len, held)) == len(set(patients))
        assert len(held[0]) == units // 5
    for name, side in split(records, owners, seed, unit).items():
        assert np.array_equal(side, sides[name])


def test_by_encounter_patients_do_fall_on_two_sides() -> None:
    owners = np.arange(1000) // 4
    sides = split(np.arange(1000), owners, 1, "encounter")
    assert set(owners[sides["attack"]]) & set(owners[sides["train"]])


def test_another_seed_deals_otherwise() -> None:
    records = np.arange(500)
    first, second = (split(records, records, seed, "encounter")["attack"] for seed in (1, 2))
    assert not np.array_equal(first, second)


def test_an_unknown_unit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"split\.unit: 'visit' is unknown. Fix: use one of encounter, patient"):
        split(np.arange(9), np.arange(9), 1, "visit")


@pytest.mark.parametrize("unit", ["encounter", "patient"])
def test_the_files_hold_the_rows_and_say_their_side(unit: str, tmp_path: Path) -> None:
    source = tmp_path / "narratives.parquet"
    whole = write_train(source, records=100, patients=30)
    write_splits(source, tmp_path, 4, unit)
    expected = split(whole.record, whole.patient, 4, unit)
    for name in SIDES:
        path = tmp_path / f"{name}.parquet"
        side = read_records(path)
        assert side.record.tolist() == expected[name].tolist()
        assert side.text.to_pylist() == [f"text of {record}." for record in side.record]
        assert side.patient.tolist() == (side.record // 3 % 30).tolist()
        assert (side.about["unit"], side.about["split"], side.about["label"]) == (unit, name, "made up")
        assert path.stat().st_mode & 0o777 == 0o600


def test_too_few_records_leave_no_files(tmp_path: Path) -> None:
    source = tmp_path / "narratives.parquet"
    write_train(source, records=4, patients=4)
    with pytest.raises(ConfigError):
        write_splits(source, tmp_path, 1, "encounter")
    assert list(tmp_path.iterdir()) == [source]
