"""Reading is strict: every fault names file, row, column and fix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from corpus_helpers import write_source

from dptune.core.errors import DataError
from dptune.records.diabetes.table import COLUMNS, DRUGS, SCHEMA, accepts, read_ids_mapping, read_table

Lines = list[str]


def cells(lines: Lines, row: int, column: str, value: str) -> Lines:
    """``lines`` with one cell changed (``row`` as in messages)."""
    fields = lines[row - 1].split(",")
    fields[COLUMNS.index(column)] = value
    return [*lines[: row - 1], ",".join(fields), *lines[row:]]


def each(lines: Lines, change: Callable[[list[str]], list[str]]) -> Lines:
    return [",".join(change(line.split(","))) for line in lines]


def swapped(fields: list[str]) -> list[str]:
    return [*fields[:2], fields[3], fields[2], *fields[4:]]


BAD: dict[str, tuple[Callable[[Lines], Lines], int | None, str | None, str]] = {
    "missing column": (lambda t: each(t, lambda f: f[:-1]), 1, "readmitted", "needs these columns"),
    "extra column": (lambda t: each(t, lambda f: [*f, "extra"]), 1, "extra", "remove it"),
    "reordered column": (lambda t: each(t, swapped), 1, "race", "original order"),
    "repeated column": (lambda t: each(t, lambda f: [*f[:2], *f[1:]]), 1, "patient_nbr", "keep one"),
    "short row": (lambda t: [*t[:4], t[4].rsplit(",", 1)[0], *t[5:]], 5, "readmitted", "restore the row"),
    "blank row": (lambda t: [*t[:4], "", *t[4:]], 5, "encounter_id", "restore the row"),
    "long row": (lambda t: [*t[:4], t[4] + ",x", *t[5:]], 5, "readmitted", "restore the row"),
    "open quote": (lambda t: [*t[:4], '"' + t[4], *t[5:]], 5, None, "close every quote"),
    "header only": (lambda t: t[:1], 1, None, "fetch the file again"),
    "repeated encounter": (
        lambda t: cells(t, 6, "encounter_id", t[2].split(",")[0]),
        6,
        "encounter_id",
        "keep each encounter once",
    ),
    "race": (lambda t: cells(t, 3, "race", "Martian"), 3, "race", "use one of ?, Caucasian"),
    "age": (lambda t: cells(t, 4, "age", "[70-90)"), 4, "age", "[70-80)"),
    "dose": (lambda t: cells(t, 4, "insulin", "Maybe"), 4, "insulin", "No, Steady, Up, Down"),
    "empty cell": (lambda t: cells(t, 4, "payer_code", ""), 4, "payer_code", "use one of ?"),
    "stay": (lambda t: cells(t, 7, "time_in_hospital", "15"), 7, "time_in_hospital", "from 1 to 14"),
    "negative": (lambda t: cells(t, 7, "num_medications", "-1"), 7, "num_medications", "whole number"),
    "padded number": (lambda t: cells(t, 7, "num_medications", "03"), 7, "num_medications", "whole number"),
    "diagnosis": (lambda t: cells(t, 7, "diag_2", "W12"), 7, "diag_2", "matches"),
    "specialty": (lambda t: cells(t, 7, "medical_specialty", "a;b"), 7, "medical_specialty", "matches"),
    "id not mapped": (
        lambda t: cells(t, 8, "admission_type_id", "99"),
        8,
        "admission_type_id",
        "IDs_mapping.csv",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_table_is_refused_with_its_place_and_the_fix(case: str, tmp_path: Path) -> None:
    spoil, row, column, fix = BAD[case]
    table, ids = write_source(tmp_path)
    table.write_text("\n".join(spoil(table.read_text().splitlines())) + "\n")
    with pytest.raises(DataError) as caught:
        read_table(table, ids)
    assert (caught.value.file, caught.value.row, caught.value.column) == (str(table), row, column)
    message = str(caught.value)
    assert message.startswith(str(table))
    assert f"row {row}" in message
    assert fix in message.partition("Fix: ")[2]


@pytest.mark.parametrize("content", [b"", b" \n"])
def test_an_empty_file_is_refused(content: bytes, tmp_path: Path) -> None:
    table, ids = write_source(tmp_path)
    table.write_bytes(content)
    with pytest.raises(DataError, match=r"table\.csv: the file is empty\. Fix: fetch it again"):
        read_table(table, ids)


def test_an_absent_file_is_refused(tmp_path: Path) -> None:
    _, ids = write_source(tmp_path)
    with pytest.raises(DataError, match=r"none\.csv: cannot be read .* Fix: check the path"):
        read_table(tmp_path / "none.csv", ids)


def test_a_byte_that_is_not_utf8_is_refused_with_its_row(tmp_path: Path) -> None:
    table, ids = write_source(tmp_path)
    lines = table.read_bytes().splitlines()
    lines[4] = lines[4].replace(b",No,", b",N\xff,", 1)
    table.write_bytes(b"\n".join(lines))
    with pytest.raises(DataError, match=r"table\.csv, row 5: byte 0xff is not UTF-8\. Fix: save"):
        read_table(table, ids)


def test_line_ends_and_a_byte_order_mark_do_not_matter(tmp_path: Path) -> None:
    table, ids = write_source(tmp_path)
    plain = read_table(table, ids).frame
    table.write_bytes(b"\xef\xbb\xbf" + table.read_bytes().replace(b"\n", b"\r\n"))
    assert read_table(table, ids).frame.equals(plain)


STACKED = """admission_type_id,description\r
1, From  the   ward \r
2,NULL\r
,\r
discharge_disposition_id,description\r
7,"Home, with care ."\r
26,Unknown/Invalid\r
,\r
admission_source_id,description\r
9, Not Available\r
20, Not Mapped\r
"""


def test_the_stacked_mapping_is_read_and_its_unknowns_are_one(tmp_path: Path) -> None:
    path = tmp_path / "ids.csv"
    path.write_bytes(STACKED.encode())
    assert read_ids_mapping(path) == {
        "admission_type_id": {"1": "From the ward", "2": "unknown"},
        "discharge_disposition_id": {"7": "Home, with care", "26": "unknown"},
        "admission_source_id": {"9": "unknown", "20": "unknown"},
    }


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("2,NULL", "1,NULL", "row 3"),
        ("2,NULL", "two,NULL", "row 3"),
        ("2,NULL", "2,NULL,x", "row 3"),
        ("admission_source_id", "other_id", "row 9"),
        ("20, Not Mapped", '20,"Not', "row 11"),
        ("9, Not Available\r\n20, Not Mapped\r\n", "", "column 'admission_source_id'"),
    ],
)
def test_a_bad_mapping_is_refused(old: str, new: str, place: str, tmp_path: Path) -> None:
    path = tmp_path / "ids.csv"
    path.write_bytes(STACKED.replace(old, new).encode())
    with pytest.raises(DataError, match=rf"ids\.csv, {place}: .* Fix: "):
        read_ids_mapping(path)


def test_the_schema_has_50_columns_23_of_them_drugs() -> None:
    assert len(COLUMNS) == len(set(COLUMNS)) == 50
    assert COLUMNS[24:47] == DRUGS


@pytest.mark.parametrize("code", ["?", "8", "41", "250", "250.8", "250.83", "V45", "E888"])
def test_diagnosis_codes_of_the_real_forms_are_accepted(code: str) -> None:
    assert accepts(next(column for column in SCHEMA if column.name == "diag_1"), code)


@pytest.mark.parametrize("code", ["", "1234", "250.", "250.123", "E88", "V4", "v45", "250 ", "250\n", "२५०"])
def test_other_diagnosis_codes_are_not(code: str) -> None:
    assert not accepts(next(column for column in SCHEMA if column.name == "diag_1"), code)
