"""Any text file becomes records, or an error that names the file and the row."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dptune.core.errors import DataError
from dptune.records.own_files import acquire_text, read_paragraphs, write_paragraphs
from dptune.records.parquet_file import read_records

PARAGRAPHS = [f"Paragraph {number},\nover two lines." for number in range(12)]


def test_paragraphs_become_records(tmp_path: Path) -> None:
    file = tmp_path / "my text.txt"
    file.write_text("\n\n".join(PARAGRAPHS) + "\n", encoding="utf-8")
    acquire_text(tmp_path / "raw", file, "paragraphs")
    write_paragraphs(tmp_path / "raw", tmp_path / "out.parquet")
    records = read_records(tmp_path / "out.parquet")
    assert records.text.to_pylist() == [f"Paragraph {number}, over two lines." for number in range(12)]
    assert records.record.tolist() == list(range(12))
    assert len(set(records.unit.tolist())) == 12
    assert records.unit.min() >= 0
    assert records.about == {"source": "text", "synthetic": False, "label": "text file my text.txt, the user's own"}


def test_a_paragraphs_person_is_its_text_wherever_it_stands(tmp_path: Path) -> None:
    seen = []
    for name, order in (("one", [*PARAGRAPHS, PARAGRAPHS[3]]), ("other", PARAGRAPHS[::-1])):
        (tmp_path / name).write_text("\n\n".join(order), encoding="utf-8")
        acquire_text(tmp_path / "raw", tmp_path / name, "paragraphs")
        write_paragraphs(tmp_path / "raw", tmp_path / "out.parquet")
        records = read_records(tmp_path / "out.parquet")
        seen.append(set(zip(records.text.to_pylist(), records.unit.tolist(), strict=True)))
    assert seen[0] == seen[1]
    assert len(seen[0]) == 12


def test_lines_are_records_where_none_is_empty(tmp_path: Path) -> None:
    file = tmp_path / "lines.txt"
    file.write_text("\n".join(f"line {number}" for number in range(11)), encoding="utf-8-sig")
    assert read_paragraphs(acquire_text(tmp_path / "raw", file)) == [f"line {number}" for number in range(11)]


def test_a_file_that_can_be_read_in_two_ways_is_read_as_asked(tmp_path: Path) -> None:
    """Letters of one line each, and an empty line after every fifth: read as paragraphs they were four."""
    file, letters = tmp_path / "letters.txt", [f"letter {number}" for number in range(20)]
    file.write_text("".join(f"{one}\n" + "\n" * (place % 5 == 4) for place, one in enumerate(letters)))
    with pytest.raises(DataError, match=r"row 6: has 20 lines and 4 paragraphs.*choose data\.records_are"):
        acquire_text(tmp_path / "raw", file)
    assert read_paragraphs(acquire_text(tmp_path / "raw", file, "lines")) == letters


@given(st.lists(st.text(st.characters(codec="utf-8", categories=["L", "N"]), min_size=1), min_size=10, max_size=20))
def test_no_word_is_lost(words: list[str]) -> None:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        file = Path(folder) / "t"
        file.write_text("\n \n".join(words), encoding="utf-8")
        assert read_paragraphs(acquire_text(Path(folder) / "raw", file)) == [
            " ".join(word.split()) for word in words if word.split()
        ]


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "holds no records"), (b"one\n\ntwo", "2 texts"), (b"fine\nbad \xff\xfe\n" * 10, "row 2: .* is not UTF-8")],
)
def test_what_is_no_corpus_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "bad.txt"
    file.write_bytes(content)
    with pytest.raises(DataError, match=message):
        acquire_text(tmp_path / "raw", file)
    assert not (tmp_path / "raw").exists()
    with pytest.raises(DataError, match="the file does not exist"):
        acquire_text(tmp_path / "raw", tmp_path / "none.txt")
