"""A unit's side follows from its own key alone; sizes are near the stated shares; patients stay together when asked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from corpus_helpers import write_train
from hypothesis import given
from hypothesis import strategies as st

from dptune.core.errors import ConfigError
from dptune.records.parquet_file import Records, read_records, write_records
from dptune.records.reading.formats import FORMATS
from dptune.records.splits import SIDES, keys_of, side_of, split, write_splits

KEYS = st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=60)


@pytest.mark.parametrize("seed", [42, -1, 10**80])
def test_sizes_are_those_of_independent_draws(seed: int) -> None:
    """A hash at its worst would be found; for one as good as chance, nine counts are six standard deviations off with
    chance 2e-8."""
    units = 20_000
    rows = split(np.arange(units), seed, "record")
    for name, share in zip(("attack", "train", "eval"), (0.2, 0.72, 0.08), strict=True):
        assert abs(len(rows[name]) - units * share) < 6 * (units * share * (1 - share)) ** 0.5


def test_sides_that_were_dealt_once_stay() -> None:
    """Anyone can recompute a side from the number; another version of the software must not deal again."""
    dealt = [SIDES.index(side_of(key, 42, "encounter")) for key in range(30)]
    assert dealt == GOLDEN


#: Of encounters 0 to 29 with seed 42: 0 attack, 1 train, 2 eval.
GOLDEN = [1, 0, 0, 0, 1, 1, 1, 2, 1, 2, 1, 1, 1, 1, 2, 0, 0, 1, 1, 0, 0, 1, 1, 1, 0, 1, 0, 1, 1, 1]


@given(
    keys=KEYS,
    seed=st.integers(0, 2**32),
    unit=st.sampled_from(["record", "patient", "a column of long name"]),
)
def test_every_row_is_on_its_units_own_side(keys: list[int], seed: int, unit: str) -> None:
    word = {"record": "encounter", "patient": "patient"}.get(unit, "unit")
    expected = [side_of(key, seed, word) for key in keys]
    if len(set(expected)) < len(SIDES):
        with pytest.raises(ConfigError, match=r"data\.unit: .* are too few.* Fix: use 100 or more"):
            split(np.array(keys), seed, unit)
        return
    rows = split(np.array(keys), seed, unit)
    assert tuple(rows) == SIDES
    for name in SIDES:
        assert rows[name].tolist() == [row for row, side in enumerate(expected) if side == name]


def test_by_encounter_patients_do_fall_on_two_sides_and_by_patient_they_do_not(tmp_path: Path) -> None:
    source = tmp_path / "narratives.parquet"
    write_train(source, records=1000, patients=250)
    for unit, several in (("record", True), ("patient", False)):
        write_splits(source, tmp_path, 1, unit)
        attack, train = (set(read_records(tmp_path / f"{side}.parquet").unit) for side in ("attack", "train"))
        assert bool(attack & train) == several


def test_another_seed_and_another_unit_deal_otherwise() -> None:
    """As independent draws: 500 agree in 0.5648 of cases, give or take 133 (six standard deviations, 2e-9)."""
    keys = range(5000)
    one = [side_of(key, 1, "encounter") for key in keys]
    for other in ([side_of(key, 2, "encounter") for key in keys], [side_of(key, 1, "patient") for key in keys]):
        same = sum(a == b for a, b in zip(one, other, strict=True))
        assert abs(same - 5000 * (0.2**2 + 0.72**2 + 0.08**2)) < 6 * (5000 * 0.5648 * 0.4352) ** 0.5


def test_an_unknown_unit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.unit: 'client' is another kind of unit. Fix: use record"):
        split(np.arange(9), 1, "client")


def test_a_units_key_is_its_record_its_patient_or_its_text(tmp_path: Path) -> None:
    made = write_train(tmp_path / "t.parquet", records=9, patients=3)
    assert keys_of(made, "record").tolist() == made.record.tolist()
    assert keys_of(made, "patient").tolist() == made.unit.tolist()
    paragraphs = replace(made, about={**made.about, "source": "text"})
    assert keys_of(paragraphs, "record").tolist() == made.unit.tolist()


@pytest.mark.parametrize("unit", ["record", "patient"])
def test_the_files_hold_the_rows_and_say_their_side(unit: str, tmp_path: Path) -> None:
    source = tmp_path / "narratives.parquet"
    whole = write_train(source, records=100, patients=60)
    write_splits(source, tmp_path, 4, unit)
    expected = split(keys_of(whole, unit), 4, unit)
    for name in SIDES:
        path = tmp_path / f"{name}.parquet"
        side = read_records(path)
        assert side.record.tolist() == whole.record[expected[name]].tolist()
        assert side.text.to_pylist() == [f"text of {record}." for record in side.record]
        assert side.unit.tolist() == (side.record // 3 % 60).tolist()
        assert (side.about["unit"], side.about["split"], side.about["label"]) == (unit, name, "made up")
        assert path.stat().st_mode & 0o777 == 0o600


def test_too_few_records_leave_no_files(tmp_path: Path) -> None:
    source = tmp_path / "narratives.parquet"
    write_train(source, records=2, patients=2)
    with pytest.raises(ConfigError):
        write_splits(source, tmp_path, 1, "record")
    assert list(tmp_path.iterdir()) == [source]


def test_records_keep_the_order_of_the_file(tmp_path: Path) -> None:
    source = tmp_path / "narratives.parquet"
    whole = write_train(source, records=100, patients=60)
    order = np.random.default_rng(0).permutation(100)
    write_records(source, replace(whole, record=whole.record[order]))
    write_splits(source, tmp_path, 4, "record")
    place = {record: row for row, record in enumerate(whole.record[order].tolist())}
    for name in SIDES:
        rows = [place[record] for record in read_records(tmp_path / f"{name}.parquet").record.tolist()]
        assert rows == sorted(rows)


@pytest.mark.parametrize("name", FORMATS)
def test_a_record_of_any_format_is_keyed_by_its_content_and_not_by_its_row(name: str) -> None:
    units = np.array([7, 8, 9])
    records = Records(np.arange(3), units, pa.array(["a", "b", "c"]), {"source": name})
    assert keys_of(records, "record").tolist() == units.tolist()
