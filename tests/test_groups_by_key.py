"""Groups of correlated noise, of every kind of source: whoever leaves or is swapped, nobody else's group or side moves.

Everything is compared by what the records say, so that no numbering of the library's own is trusted. The sources are
those that are likely to make one record depend on others: files whose order, types or empty fields one row decides.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dptune.job.preparation import units_of_side
from dptune.prediction.ensemble import partition
from dptune.privacy.entropy import OsEntropy
from dptune.records import catalogue, published_files
from dptune.records.catalogue import SourceSettings, find_source, source
from dptune.records.parquet_file import encode_content
from dptune.records.reading.read import read, read_sides
from dptune.records.reading.record import Record
from dptune.records.reading.source import Fractions, RecordSource
from dptune.training.privacy_units import PrivacyUnits, Turn

RUN, BANDS, SHARDS = "a" * 32, 5, 4
Row = dict[str, Any]
#: A group, side or shard, which one it is, and what the record there says.
Places = Counter[tuple[str, str, str]]


def rows(numbers: Sequence[int]) -> list[Row]:
    """Records of customers, two or three each. Row 3 alone lacks an age, and row 5 alone says what no other does."""
    return [
        {
            "customer": f"c{number // 2 - number // 14}",
            "id": f"id {number}",
            "text": f'{number} words of a "record", {"with" if number % 3 else "without"} more',
            "note": f'{number} is "noted"' + ("\non two lines" if number == 5 else ""),
            "prompt": f"What is {number}?" if number % 4 else "",
            "completion": f" It is {number}.",
            "age": None if number == 3 else 20 + number,
            "label": ("good", "bad")[number % 2],
            "messages": [
                {"role": "user", "content": f"Hello {number}"} | ({"name": "Bo"} if number == 5 else {}),
                {"role": "assistant", "content": f"{number} is it."},
            ],
        }
        for number in numbers
    ]


@dataclass(frozen=True)
class Kind:
    """A kind of source: how rows become one, in a folder, and the column of its units beside the record itself."""

    make: Callable[[list[Row], Path], RecordSource]
    unit: str | None = "customer"


def only(found: list[Row], *names: str) -> list[Row]:
    return [{name: row[name] for name in names} for row in found]


def table(found: list[Row], path: Path, *names: str, **columns: Any) -> RecordSource:
    if path.suffix == ".parquet":
        pd.DataFrame(only(found, *names)).to_parquet(path)  # one missing age makes a float of every other
        return RecordSource(str(path), **columns)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, delimiter="," if path.suffix == ".csv" else "\t")
        writer.writeheader()
        writer.writerows(only(found, *names))
    return RecordSource(str(path), **columns)


def jsonl(found: list[Row], path: Path, *names: str, **columns: Any) -> RecordSource:
    path.write_text("".join(json.dumps(row) + "\n" for row in only(found, *names)))
    return RecordSource(str(path), **columns)


def plain_text(found: list[Row], path: Path, between: str) -> RecordSource:
    path.write_text(between.join(row["text"] for row in found))
    return RecordSource(str(path))


def data_set(found: list[Row], *names: str) -> Any:
    return pytest.importorskip("datasets").Dataset.from_list(only(found, *names))


def saved(found: list[Row], folder: Path) -> RecordSource:
    data_set(found, "messages", "customer").save_to_disk(str(folder / "saved"))
    return RecordSource(str(folder / "saved"))


def frame(found: list[Row], _: Path) -> RecordSource:
    """A data frame's rows, as pandas gives them."""
    return RecordSource(
        pd.DataFrame(only(found, "customer", "age", "label")).to_dict("records"), template="{age} {label}"
    )


def benchmark(name: str, unit: str | None, write: Callable[[list[Row], Path], None], **options: Any) -> Kind:
    def make(found: list[Row], folder: Path) -> RecordSource:
        write(found, folder)
        as_rows = find_source(name).rows
        assert as_rows is not None
        described = as_rows(SourceSettings(path=folder, options=options))
        return replace(described, data=list(described.data))  # type: ignore[arg-type]

    return Kind(make, unit)


def write_e2e(found: list[Row], folder: Path) -> None:
    lines = [f'"name[{row["customer"]}], area[river]",{row["completion"]}' for row in found]
    (folder / "trainset.csv").write_text("\n".join(["mr,ref", *lines, ""]))


def write_dart(found: list[Row], folder: Path) -> None:
    entries = [
        {"tripleset": [["Bo", "IS", row["customer"]]], "annotations": [{"source": "a", "text": row["completion"]}]}
        for row in found
    ]
    (folder / "dart-v1.1.1-full-train.json").write_text(json.dumps(entries))


def write_sst2(found: list[Row], folder: Path) -> None:
    lines = [f"{row['completion'].strip()}\t{int(row['label'] == 'good')}" for row in found]
    (folder / "train.tsv").write_text("\n".join(["sentence\tlabel", *lines, ""]))


def write_qnli(found: list[Row], folder: Path) -> None:
    lines = [f"{row['completion'].strip()}\tAbout {row['customer']}.\tentailment" for row in found]
    (folder / "train.tsv").write_text("\n".join(["question\tsentence\tlabel", *lines, ""]))


def write_wikitext(found: list[Row], folder: Path) -> None:
    """The last article stays: its hash has an end of the file in it, and a file of another SHA-256 is refused."""
    text = "".join(f" = {row['id']} = \n \n {row['completion']} \n {row['text']} \n \n" for row in found)
    (folder / "wiki.train.tokens").write_text(f" \n{text} = The end = \n")


def invented(found: list[Row], _: Path) -> RecordSource:
    """A plug-in's function of rows."""
    as_rows = find_source("rows of a test").rows
    assert as_rows is not None
    return as_rows(SourceSettings(unit="customer", options={"numbers": [row["id"] for row in found]}))


KINDS = {
    "csv": Kind(lambda found, folder: table(found, folder / "a.csv", "customer", "text")),
    "csv with ids": Kind(lambda found, folder: table(found, folder / "a.csv", "customer", "text", "id", id="id")),
    "csv by columns": Kind(lambda found, folder: table(found, folder / "a.csv", "customer", "age", "label")),
    "csv with labels": Kind(
        lambda found, folder: table(found, folder / "a.csv", "customer", "text", "label", label="label", text="text")
    ),
    "tsv": Kind(lambda found, folder: table(found, folder / "a.tsv", "customer", "note", text="note")),
    "parquet by columns": Kind(lambda found, folder: table(found, folder / "a.parquet", "customer", "age", "label")),
    "parquet by template": Kind(
        lambda found, folder: table(found, folder / "a.parquet", "customer", "age", "id", template="{id}, {age}")
    ),
    "jsonl of pairs": Kind(lambda found, folder: jsonl(found, folder / "a.jsonl", "customer", "prompt", "completion")),
    "jsonl of chats": Kind(lambda found, folder: jsonl(found, folder / "a.jsonl", "customer", "messages")),
    "text by paragraphs": Kind(lambda found, folder: plain_text(found, folder / "a.txt", "\n\n"), None),
    "text by lines": Kind(lambda found, folder: plain_text(found, folder / "a.txt", "\n"), None),
    "python records": Kind(lambda found, _: RecordSource(only(found, "customer", "prompt", "completion"))),
    "a data frame": Kind(frame),
    "a data set": Kind(lambda found, _: RecordSource(data_set(found, "customer", "messages"))),
    "a saved data set": Kind(saved),
    "a plug-in": Kind(invented),
    "e2e": benchmark("e2e", "mr", write_e2e),
    "dart": benchmark("dart", "entry", write_dart),
    "sst2": benchmark("glue", None, write_sst2),
    "qnli": benchmark("glue", "passage", write_qnli, task="qnli"),
    "wikitext": benchmark("wikitext", "article", write_wikitext),
    "wikitext in blocks": benchmark("wikitext", "article", write_wikitext, block=7),
}


@pytest.fixture(autouse=True)
def sources(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(published_files, "KNOWN", {})
    before = dict(catalogue.SOURCES)

    @source("rows of a test", rows=True)
    def of_numbers(numbers: Sequence[str]) -> Iterator[Mapping[str, Any]]:
        return iter(only(rows([int(number.removeprefix("id ")) for number in numbers]), "customer", "text"))

    yield
    catalogue.SOURCES.clear()
    catalogue.SOURCES.update(before)


def say(record: Record) -> str:
    return str(vars(record.content))


def group_places(units: PrivacyUnits, said: Sequence[str]) -> Places:
    """The row of a round in which each unit's records come, by a run's own draws at rate one; and auditors' slots."""
    units, found = replace(units, most=10**6).with_slots(np.ones(3, dtype=bool)), Places()
    for row in range(BANDS):
        for records in units.draw(1.0, OsEntropy(), Turn.of(RUN, BANDS, row)):
            names = [said[record] if record >= 0 else f"slot {record}" for record in records]
            found.update(("group", str(row), name) for name in names)
    return found


def places(kind: Kind, found: list[Row], unit: str | None) -> Places:
    """Sides, groups and shards of all records of a source, and what they say."""
    with TemporaryDirectory() as name:
        described = replace(kind.make(found, Path(name)), unit=unit, split=Fractions(0.6, 0.4, 0.0))
        sides = read_sides(described)
    dealt = Places()
    for side in ("train", "eval"):
        dealt.update(("side", side, say(record)) for record in getattr(sides, side))
    said = [say(record) for record in sides.train]
    dealt.update(group_places(units_of_side(sides.train, unit, 4), said))
    keys = np.array([record.unit for record in sides.train], dtype=np.int64)
    texts = [encode_content(record.content) for record in sides.train]
    for number, shard in enumerate(partition(texts, keys, unit or "record", SHARDS, b"salt")):
        dealt.update(("shard", str(number), said[record]) for record in shard)
    return dealt


def leaves(row: Row, who: Row, unit: str | None) -> bool:
    """Whether a row goes with another: all of a customer's, where units are more than records; an article's alone."""
    column = "id" if unit in (None, "article") else "customer"
    return bool(row[column] == who[column])


def told(kind: Kind, found: list[Row], unit: str | None) -> set[str]:
    """What the records of these rows say; nothing of no rows."""
    with TemporaryDirectory() as name:
        found_there = read(replace(kind.make(found, Path(name)), unit=unit)) if found else ()
        return {said for said in map(say, found_there) if "The end" not in said}


WHOLE = list(range(28))
#: Places of the whole data, by source and unit: what every example is compared with.
_KNOWN: dict[tuple[str, str | None], Places] = {}


def whole(name: str, unit: str | None) -> Places:
    if (name, unit) not in _KNOWN:
        _KNOWN[name, unit] = places(KINDS[name], rows(WHOLE), unit)
    return _KNOWN[name, unit]


CASES = [(name, unit) for name, kind in KINDS.items() for unit in dict.fromkeys([None, kind.unit])]


@pytest.mark.parametrize(("name", "unit"), CASES)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(who=st.sampled_from([0, 3, 5, 27]) | st.sampled_from(WHOLE), swapped=st.booleans(), place=st.integers(0, 27))
def test_nobody_else_moves(name: str, unit: str | None, who: int, swapped: bool, place: int) -> None:
    """Rows 0, 3 and 5 are those that others' reading is likely to hang on: the first, and two that are unlike all."""
    everybody = rows(WHOLE)
    others = [row for row in everybody if not leaves(row, everybody[who], unit)]
    newcomers = [row | {"customer": "new"} for row in rows([100, 101])] if swapped else []
    present = [*others[:place], *newcomers, *others[place:]]
    before, after = whole(name, unit), places(KINDS[name], present, unit)
    leavers = told(KINDS[name], [row for row in everybody if row not in others], unit)
    gone, came = before - after, after - before
    assert {said for _, _, said in gone} == leavers
    assert {said for _, _, said in came} == told(KINDS[name], newcomers, unit)


@pytest.mark.parametrize(("name", "unit"), CASES)
def test_the_worlds_can_be_told_apart(name: str, unit: str | None) -> None:
    """Every place is used in every source, and what is said is distinct; else the test above could not fail."""
    found = whole(name, unit)
    used = Counter(where for where, _ in {(where, which) for where, which, _ in found})
    assert used["side"] == 2
    assert used["group"] >= BANDS - 1
    assert used["shard"] >= 3
    assert len({said for where, _, said in found if where == "side"}) >= len(WHOLE)


@pytest.mark.parametrize("name", KINDS)
def test_ranks_are_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where units are dealt by rank, somebody of seven who leave is seen to move others."""
    monkeypatch.setattr(Turn, "of", lambda run, bands, row, of=Turn.of: of(run, bands, row, "rank"))
    for unit in {None, KINDS[name].unit}:
        before, everybody = places(KINDS[name], rows(WHOLE), unit), rows(WHOLE)
        staying = ([row for row in everybody if not leaves(row, who, unit)] for who in everybody[::4])
        assert any(places(KINDS[name], present, unit) - before for present in staying)
