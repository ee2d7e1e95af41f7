"""Data sets of the real ``datasets`` library: whatever way they come, the records are those of the rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dptune.core.errors import DataError
from dptune.job.settings import check_labels
from dptune.records.reading.read import read
from dptune.records.reading.record import Text
from dptune.records.reading.source import RecordSource

datasets = pytest.importorskip("datasets", reason="the library is not installed: pip install 'dptune[datasets]'")

ROWS = [{"text": f"{n} red cat", "who": n % 3, "kind": n % 2} for n in range(7)]
CHATS = [
    {"messages": [{"role": "user", "content": f"{n}"}, {"role": "assistant", "content": "b"}]} for n in range(3)
] + [{"messages": [{"role": "assistant", "content": "c"}]}]


def saved(found: Any, folder: Path) -> str:
    found.save_to_disk(str(folder))
    return str(folder)


WAYS: dict[str, Callable[[Any, Path], Any]] = {
    "as it is": lambda found, folder: found,
    "for torch": lambda found, folder: found.with_format("torch"),
    "for NumPy": lambda found, folder: found.with_format("numpy"),
    "for pandas": lambda found, folder: found.with_format("pandas"),
    "streamed": lambda found, folder: found.to_iterable_dataset(),
    "chosen from": lambda found, folder: datasets.concatenate_datasets([found, found]).select(range(len(found))),
    "saved": saved,
    "saved for torch": lambda found, folder: saved(found.with_format("torch"), folder),
    "a part of several": lambda found, folder: saved(
        datasets.DatasetDict(train=found, test=found.select(range(1))), folder
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("rows", "unit"), [(ROWS, "who"), (CHATS, None)], ids=["texts", "chats"])
def test_every_way_gives_the_records_of_the_rows(
    way: str, rows: list[dict[str, Any]], unit: str | None, tmp_path: Path
) -> None:
    found = read(RecordSource(WAYS[way](datasets.Dataset.from_list(rows), tmp_path / "set"), unit=unit))
    expected = read(RecordSource(rows, unit=unit))
    assert [(one.content, one.unit) for one in found] == [(one.content, one.unit) for one in expected]


@pytest.mark.parametrize("way", ["as it is", "for torch", "streamed", "saved"])
def test_labels_are_told_by_name(way: str, tmp_path: Path) -> None:
    labels = datasets.ClassLabel(names=["calm", "angry"])
    found = datasets.Dataset.from_list([*ROWS[:2], ROWS[0] | {"kind": -1}]).cast_column("kind", labels)
    given = WAYS[way](found, tmp_path / "set")
    told = [one.content for one in read(RecordSource(given, template="a {kind} one"))]
    assert told == [Text("a calm one"), Text("a angry one"), Text("a unknown one")]


@pytest.mark.parametrize("way", ["as it is", "for torch", "streamed", "saved"])
def test_a_classifier_learns_labels_by_name(way: str, tmp_path: Path) -> None:
    labels = datasets.ClassLabel(names=["calm", "angry"])
    rows = [{"note": f"cat {number}", "kind": number % 2} for number in range(40)]
    given = WAYS[way](datasets.Dataset.from_list(rows).cast_column("kind", labels), tmp_path / "set")
    source = RecordSource(given, text="note", label="kind")
    records = read(source)
    assert [one.content.label for one in records[:2]] == ["calm", "angry"]
    check_labels(records, ("angry", "calm"), "kind", "")


def test_a_part_that_is_missing_is_refused_with_the_folder_of_another(tmp_path: Path) -> None:
    folder = saved(datasets.DatasetDict(validation=datasets.Dataset.from_list(ROWS)), tmp_path / "set")
    with pytest.raises(DataError, match=r"has no part 'train'.*'validation'.*own folder, .*validation") as caught:
        read(RecordSource(folder))
    assert len(read(RecordSource(str(caught.value).rsplit(", ", 1)[1].rstrip(".")))) == len(ROWS)


def test_a_set_without_rows_is_refused(tmp_path: Path) -> None:
    empty = datasets.Dataset.from_list(ROWS).select([])
    for given in (empty, saved(empty, tmp_path / "set")):
        with pytest.raises(DataError, match="holds no records"):
            read(RecordSource(given))


def test_all_parts_at_once_are_refused() -> None:
    with pytest.raises(DataError, match=r"is a DatasetDict.*data\['train'\]"):
        read(RecordSource(datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS))))
