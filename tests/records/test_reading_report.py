"""The reader's report: its figures against counts by hand, its findings by name, and who may read it."""

from __future__ import annotations

import io
import json
import stat
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dptune.core.errors import ConfigError
from dptune.records.reading.read import Sides, read, read_sides
from dptune.records.reading.report import ReadReport, TokenCounts, as_table, describe, write_report
from dptune.records.reading.source import Fractions, GivenSides, RecordSource

ROWS = [{"text": "x" * (n + 1), "who": n // 10 if n < 20 else n} for n in range(30)]


def described(rows: list[dict[str, Any]] = ROWS, unit: str | None = "who", **options: Any) -> ReadReport:
    source = RecordSource(rows, text="text", unit=unit, split=GivenSides())
    return describe(source, read_sides(source), **options)


def named(report: ReadReport) -> set[str]:
    return {finding.name for finding in report.findings}


def test_figures_are_those_of_the_records() -> None:
    report = described()
    assert report.sides == {"train": 30, "eval": 0, "test": 0, "public": 0}
    assert report.units == 12
    assert report.records_per_unit == pytest.approx({"least": 1, "10 %": 1, "median": 1, "90 %": 9.1, "most": 10})
    assert report.measure == "characters"
    assert (report.lengths["least"], report.lengths["median"], report.lengths["most"]) == (1, 15.5, 30)
    assert report.samples == ("x", "x" * 16, "x" * 30)
    assert (report.kind, report.cut, report.without_loss, named(report)) == ("text", None, None, set())


def test_records_are_units_where_no_column_names_them() -> None:
    """Equal ones too: their keys are equal, and each of them is protected by itself."""
    report = described([{"text": "same"}] * 5, unit=None, most=1)
    assert (report.units, report.records_per_unit["most"]) == (5, 1)


def test_tokens_are_described() -> None:
    report = described(encoded=TokenCounts([4] * 20 + [2] * 10, limit=4, cut=6, without_loss=3))
    assert (report.measure, report.lengths["median"], report.cut, report.without_loss) == ("tokens", 4, 0.2, 0.1)
    assert named(report) == {"many_cut", "without_loss"}
    fine = described(encoded=TokenCounts([4] * 30, limit=4, cut=3, without_loss=0))
    assert named(fine) == set()


@pytest.mark.parametrize(("most", "warned"), [(None, False), (1, False), (2, False)])
def test_units_a_little_above_m_are_fine(most: int | None, warned: bool) -> None:
    assert ("large_units" in named(described(most=most))) is warned


def test_units_far_above_m_are_named() -> None:
    rows = [{"text": "x", "who": 0}] * 11 + [{"text": "x", "who": 1}]
    (finding,) = described(rows, most=1).findings
    assert (finding.name, finding.text[:44]) == ("large_units", "1 of 2 units have more than 10 times the 1 r")


@pytest.mark.parametrize(("delta", "warned"), [(1 / 12, True), (0.5, True), (1 / 13, False), (0, False)])
def test_a_delta_that_lets_a_unit_be_published_is_named(delta: float, warned: bool) -> None:
    assert ("large_delta" in named(described(delta=delta))) is warned


@pytest.mark.parametrize("delta", [-1e-9, 1.0, float("nan")])
def test_a_delta_is_a_probability(delta: float) -> None:
    with pytest.raises(ConfigError, match="delta"):
        described(delta=delta)


def test_units_on_two_sides_are_counted() -> None:
    source = RecordSource(ROWS, unit="who", split=GivenSides(eval=ROWS[:11]))
    (finding,) = describe(source, read_sides(source)).findings
    assert (finding.name, finding.text[:2]) == ("shared_units", "2 ")
    dealt = RecordSource(ROWS, unit="who", split=Fractions(0.5, 0.5, 0))
    assert named(describe(dealt, read_sides(dealt))) == set()


def test_prompts_and_messages_are_shown_whole_and_short() -> None:
    pair = RecordSource([{"prompt": "2 + 2", "completion": "4" * 500}])
    (shown,) = describe(pair, Sides(read(pair))).samples
    assert shown == "2 + 2 => " + "4" * 191 + "..."
    chat = RecordSource([{"messages": [{"role": "user", "content": "Hi"}]}])
    assert describe(chat, Sides(read(chat))).samples == ("user: Hi",)


def test_the_table_says_it_all_and_takes_no_markup_from_records() -> None:
    rows = [{"text": "[red]raw[/red] [/"}] * 12
    report = described(rows, unit=None, delta=0.5)
    out = io.StringIO()
    Console(file=out, width=200).print(as_table(report))
    for part in ("train 12", "[red]raw[/red] [/", "large_delta", "private"):
        assert part in out.getvalue()


def test_only_the_owner_may_read_it(tmp_path: Path) -> None:
    write_report(tmp_path / "report.json", described(delta=0.5))
    assert stat.S_IMODE((tmp_path / "report.json").stat().st_mode) == 0o600
    stored = json.loads((tmp_path / "report.json").read_text())
    assert (stored["units"], stored["findings"][0]["name"]) == (12, "large_delta")
    assert "x" * 16 not in repr(described())


def test_nothing_to_train_on_is_refused() -> None:
    source = RecordSource(ROWS)
    with pytest.raises(ConfigError, match="no record on side train"):
        describe(source, Sides(()))
