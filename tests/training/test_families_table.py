"""docs/findings/models.md says what is measured: every row anew, but for the digits of an error."""

from __future__ import annotations

import re

import pytest
from families_table import END, PAGE, START, causal_row, refused_row
from tiny_families import BIDIRECTIONAL, CAUSAL, families

_NUMBER = re.compile(r"\b\d(?:\.\d+)?e-\d+\b")
#: The largest error that a row may have; wrong gradients are off by a tenth and more.
_CLOSE = 1e-3


def rows(number: int) -> dict[str, list[str]]:
    """Rows of the first or second table by their family."""
    written = PAGE.read_text(encoding="utf-8").partition(START)[2].partition(END)[0].strip()
    lines = written.split("\n\n")[number].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return {row[0]: row for row in cells}


def without_numbers(row: list[str]) -> list[str]:
    return [_NUMBER.sub("small", cell).strip() for cell in row]


def test_every_family_has_a_row() -> None:
    assert list(rows(0)) == sorted(CAUSAL)
    assert list(rows(1)) == list(BIDIRECTIONAL)
    assert any(_NUMBER.search(cell) for row in rows(0).values() for cell in row)


@pytest.mark.parametrize("family", families(*CAUSAL))
def test_a_causal_familys_row_is_what_it_does(family: str) -> None:
    written, measured = rows(0)[family], causal_row(family)
    assert without_numbers(written) == without_numbers(measured)
    figures = [float(figure) for row in (written, measured) for cell in row for figure in _NUMBER.findall(cell)]
    assert figures
    assert max(figures) < _CLOSE


@pytest.mark.parametrize("family", families(*BIDIRECTIONAL))
def test_a_refused_familys_row_is_why(family: str) -> None:
    assert rows(1)[family] == refused_row(family)
