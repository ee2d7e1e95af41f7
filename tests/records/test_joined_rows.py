"""Rows of tables that stray quotes join, and headers within them, are refused; texts of several lines are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from dptune.core.errors import DataError
from dptune.records.reading.read import read
from dptune.records.reading.source import RecordSource

PEOPLE = [("c1", "red cars", "1"), ("c2", "blue sky", "0"), ("c3", "new day", "1"), ("c4", "old home", "0")]


def table(folder: Path, lines: list[str], mark: str, end: str = "\n") -> RecordSource:
    path = folder / "a.csv"
    path.write_text(end.join(lines).replace(",", mark) + end, newline="")
    return RecordSource(path, text="text", unit="who")


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", [",", ";", "|", "\t"])
@pytest.mark.parametrize("last", [1, 2])
@pytest.mark.parametrize("header", ["who,text", "text,who", "who,text,label", "label,text,who"])
@pytest.mark.parametrize("quoted", ["text", "who"])
def test_two_stray_quotes_join_no_rows(
    quoted: str, header: str, last: int, mark: str, end: str, tmp_path: Path
) -> None:
    rows = [dict(zip(("who", "text", "label"), one, strict=True)) for one in PEOPLE]
    # a last row of two lines, so that a table with tabs is not read line by line
    rows.append({"who": "c5", "text": '"two\nlines"', "label": "1"})
    rows[0][quoted] = '"' + rows[0][quoted]
    rows[last][quoted] += '"'
    lines = [header, *(",".join(row[name] for name in header.split(",")) for row in rows)]
    with pytest.raises(DataError, match="row 2: a field in quotes holds whole rows"):
        read(table(tmp_path, lines, mark, end))


@pytest.mark.parametrize("mark", [",", ";", "|"])
@pytest.mark.parametrize(
    "text",
    [
        "Dear Sir,\nthe parcel, which was late, came.\nYours, Ann",
        "Hello\nI am fine, thanks",
        "It came late\nand cost 1,000 euro",
        "Two\nlines,",
        "Bought:\n\nred,blue\nc2,c3,c4",
    ],
)
def test_letters_of_several_lines_are_read(text: str, mark: str, tmp_path: Path) -> None:
    found = read(table(tmp_path, ["who,text", f'c1,"{text}"', "c2,red cars", f'c3,"{text}"'], mark))
    assert [one.content.text for one in found] == [  # type: ignore[union-attr]
        said.replace(",", mark) for said in (text, "red cars", text)
    ]


@pytest.mark.parametrize("second", ["Who,Text", "text,who", "WHO, text ", "\ufeffWho,TEXT", "Text,\ufeffw_h-o"])
def test_a_header_within_is_refused_however_it_is_written(second: str, tmp_path: Path) -> None:
    lines = ["who,text", "c1,red cars", second, "blue sky,c2"]
    with pytest.raises(DataError, match="row 3: the row repeats the header"):
        read(table(tmp_path, lines, ","))


def test_a_row_that_names_one_column_is_no_header(tmp_path: Path) -> None:
    assert len(read(table(tmp_path, ["who,text", "c1,Text", "who,text me"], ","))) == 2
