"""Spellings of one name are one unit, and words for a missing value are none."""

from __future__ import annotations

import bz2
import gzip
import lzma
import pickle
import unicodedata
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from uuid import UUID

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dptune.core.errors import DataError
from dptune.records.reading.read import read, read_sides
from dptune.records.reading.record import unit_key
from dptune.records.reading.source import Fractions, RecordSource
from dptune.records.reading.spelling import MISSING, is_missing, loosely, spelled

ALIKE = {
    "7": [
        7,
        7.0,
        "7.0",
        " 7 ",
        "+7",
        "7.",
        "7.00",
        "\uff17",
        "\u0667",
        "7\u200b",
        "\ufeff7",
        "\u20077",
        Decimal("7.0"),
    ],
    "7.5": [7.5, "7.50", "07.5"[1:], Decimal("7.5"), "75e-1"],
    "-7": ["-7", -7, "-7.0", "\u22127", "-7E0"],
    "0": [0, "-0", "0.0", -0.0, "0e9", ".0", Decimal("0E-8")],
    "0.5": [".5", 0.5, "+.5", "5E-1"],
    "-0.5": ["-.5", -0.5],
    "1000": ["1e3", "1E+3", "1.0e03", "10000e-1", 1e3, Decimal("1E+3")],
    "10000000000000002": ["1.0000000000000002e+16", 1.0000000000000002e16, 10000000000000002],
    "0.0000001": [1e-7, "1e-07", "0.0000001", Decimal("1E-7")],
    "1" + "0" * 23: [1e23, "1e+23"],
    "Ann Lee": [
        "Ann  Lee",
        "Ann\u00a0Lee",
        "Ann\tLee",
        "\uff21nn Lee",
        "A\u00adnn Lee",
        "Ann Lee\u200d",
        "Ann\u2800Lee",
    ],
    "Zo\u00eb": ["Zoe\u0308", "Zo\u00eb\ufe0f"],
    "2024-03-01": [
        date(2024, 3, 1),
        datetime(2024, 3, 1),
        pd.Timestamp("2024-03-01"),
        "2024-03-01 00:00:00",
        "2024-03-01T00:00:00",
        "2024-03-01t00:00",
        "2024-03-01 00:00:00.000",
    ],
    "2024-03-01 10:30:00+00:00": [
        datetime(2024, 3, 1, 10, 30, tzinfo=UTC),
        datetime(2024, 3, 1, 12, 30, tzinfo=timezone(timedelta(hours=2))),
        pd.Timestamp("2024-03-01T10:30", tz="UTC"),
        "2024-03-01T10:30:00Z",
        "2024-03-01 10:30z",
        "2024-03-01T12:30:00+02:00",
        "2024-03-01 05:30:00.0-0500",
        "2024-03-02T00:30:00.000000000+14",
    ],
    "2024-03-01 10:30:00.500000": [datetime(2024, 3, 1, 10, 30, 0, 500_000), "2024-03-01T10:30:00.5"],
    "2024-03-01 10:30:00.000000001": [pd.Timestamp("2024-03-01 10:30:00.000000001"), "2024-03-01T10:30:00,000000001"],
    "12345678-1234-5678-1234-567812345678": [UUID("12345678123456781234567812345678")],
}


@pytest.mark.parametrize("name", ALIKE)
def test_spellings_of_one_name_are_one_unit(name: str) -> None:
    for value in ALIKE[name]:
        assert spelled(value) == name, repr(value)
        assert unit_key(value) == unit_key(name)


def test_other_names_are_other_units() -> None:
    names = [
        "7",
        "07",
        "70",
        "0.7",
        "7e",
        "7e9999",
        "7-",
        "-7",
        "7.5",
        "Ann",
        "ann",
        "A nn",
        "1,000",
        "1000",
        "x7",
        "7.0.0",
    ]
    assert len({unit_key(name) for name in names}) == len(names)


@given(st.text() | st.integers() | st.floats(allow_nan=False, allow_infinity=False))
def test_a_name_is_its_own_spelling(value: str | int | float) -> None:
    name = spelled(value)
    assert name is not None
    assert spelled(name) == name
    assert not any(unicodedata.category(letter) in ("Cf", "Cc") for letter in name)


#: Characters that nobody sees, of which Unicode has some outside its category of formats.
UNSEEN = "\u00ad\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180e\u180f\u200b\u2060\u3164\ufe0f"
UNSEEN += "\ufeff\uffa0\ufffc\U000e0100\U000e01ef"


@pytest.mark.parametrize("letter", UNSEEN)
def test_what_nobody_sees_makes_no_other_unit(letter: str) -> None:
    assert spelled(f"{letter}c{letter}7{letter}") == "c7"
    assert unit_key(letter) is None


NOBODY = [
    *(*sorted(MISSING), " N/A ", "Null", "\u200b", "\ufeffNaN", float("inf"), -float("inf"), Decimal("NaN"), None),
    *("#DIV/0!", "#NAME?", "#NUM!", "#CALC!", "#SPILL!", "#VALUE!", "#WERT!", "#NV", "#N/D", "-nan", "-Inf", "1.#QNAN"),
    *("(blank)", "(Empty)", "(null)", "<NA>", "[NULL]", "{none}", "N.A", "n / a", "N. A.", "Not  Available"),
    *(
        "\u2014",
        "\u2013",
        "\u2212-",
        "--",
        "\u2026",
        "...",
        "???",
        "[]",
        "{}",
        '""',
        "''",
        "/",
        "\u2800",
        "\u2014 \u2014",
    ),
    *("0000-00-00", "0000-00-00T00:00:00", UUID(int=0), "{00000000-0000-0000-0000-000000000000}"),
]


@pytest.mark.parametrize("name", ["0", "Nana", "N", "Nilsson", "#7", "Null, Ann", "(7)", "c-", "+", "blank", "\u2665"])
def test_other_words_name_somebody(name: str) -> None:
    assert not is_missing(spelled(name))


@pytest.mark.parametrize("word", NOBODY)
def test_a_word_for_nothing_names_nobody(word: object, tmp_path: Path) -> None:
    assert is_missing(spelled(word))
    assert unit_key(word) is None
    with pytest.raises(DataError, match="row 1, column 'who': names no unit"):
        read(RecordSource([{"text": "a", "who": word}], unit="who"))


@pytest.mark.parametrize("value", [True, b"7", [7], {"a": 1}])
def test_what_is_no_name_is_refused(value: object) -> None:
    with pytest.raises(TypeError):
        spelled(value)


def test_times_are_names() -> None:
    assert spelled(datetime(2024, 3, 1, 12, 30)) == "2024-03-01 12:30:00"


def test_names_that_differ_by_little_are_counted() -> None:
    names = ["Ann@x.org", "ann@x.org", "007", "7", "8", "Bob", "ANN@x.org"]
    assert loosely("ANN@x.org") == loosely("ann@x.org")
    assert loosely("007") == "7"
    assert loosely("0") == "0"
    same = [
        ("c7", "c007", "C-7", "c\u20117", "c\u22127"),
        ("7-1", "7\u20131", "07-001"),
        ("O'Brien", "o\u2019brien", "O`Brien"),
        (
            "12345678-1234-5678-1234-56781234567a",
            "{12345678-1234-5678-1234-56781234567A}",
            "1234567812345678123456781234567a",
        ),
    ]
    for spellings in same:
        assert len({loosely(name) for name in spellings}) == 1, spellings
    apart = ["1-12", "11-2", "1.05", "1.5", "c70", "c7", "-7", "7", "700"]
    assert len({loosely(name) for name in apart}) == len(apart)
    rows = [{"text": f"text {place}", "who": name} for place, name in enumerate(names)]
    sides = read_sides(RecordSource(rows, unit="who", split=Fractions(1.0, 0.0, 0.0)))
    (finding,) = sides.findings
    assert (finding.name, finding.text[:28]) == ("similar_units", "5 units have names that diff")
    assert len({record.unit for record in sides.train}) == 7


def test_labels_have_one_spelling_too() -> None:
    found = read(RecordSource([{"text": "a", "label": one} for one in (1, "1.0", "\uff11", " 1")], label="label"))
    assert {record.content.label for record in found} == {"1"}  # type: ignore[union-attr]


@pytest.mark.parametrize("separator", [",", ";", "|", "\t"])
@pytest.mark.parametrize("ending", ["csv", "tsv"])
def test_other_separators_are_read(separator: str, ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{ending}"
    path.write_text(f'who{separator}text\n1{separator}"a, b; c"\n2{separator}d\n')
    found = read(RecordSource(path, unit="who"))
    assert [record.content.text for record in found] == ["a, b; c", "d"]  # type: ignore[union-attr]
    assert [record.unit for record in found] == [unit_key(1), unit_key(2)]


@pytest.mark.parametrize(
    ("begins", "kind"),
    [
        (b"PK\x03\x04", "spreadsheet"),
        (b"%PDF-1.7", "PDF"),
        (b"{\\rtf1", "RTF"),
        (b"PAR1", "Parquet"),
        (b"<html>", "web page"),
        (b"\n<!doctype html>", "web page"),
        (gzip.compress(b"a", mtime=0), "gzip archive.*add .gz to its name"),
        (bz2.compress(b"a"), "bzip2 archive.*unpack it"),
        (lzma.compress(b"a"), "xz archive"),
        (b"\x28\xb5\x2f\xfd\x24", "Zstandard archive"),
        (b"ARROW1\0\0", "Arrow file"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "Office 97"),
        (pickle.dumps({"text": "a"}), "pickle"),
    ],
)
@pytest.mark.parametrize("ending", ["txt", "csv", "jsonl"])
def test_another_format_under_a_wrong_ending_is_named(begins: bytes, kind: str, ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{ending}"
    path.write_bytes(begins + b" one, two\nthree\n" * 9)
    with pytest.raises(DataError, match=f"is a.*{kind}|is {kind}"):
        read(RecordSource(path))
