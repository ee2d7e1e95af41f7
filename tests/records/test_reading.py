"""Records of one's own: every format gives the same records, whatever is wrong is located, and nobody moves another."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections import UserList
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dptune.core.errors import ConfigError, DataError, DptuneError
from dptune.records.reading.formats import ENDINGS, FORMATS, Format
from dptune.records.reading.read import read, read_sides
from dptune.records.reading.record import Chat, Labelled, PromptTarget, Record, Text, row_key, unit_key
from dptune.records.reading.source import Fractions, GivenSides, RecordSource
from dptune.records.reading.spelling import is_visible

WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=30).filter(is_visible)
MESSAGES = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
WAYS = {
    "text": (WORDS.map(lambda text: {"text": text}), lambda row: Text(row["text"])),
    "pair": (
        st.builds(lambda one, other: {"prompt": one, "completion": other}, WORDS, WORDS),
        lambda row: PromptTarget(row["prompt"], row["completion"]),
    ),
    "messages": (
        st.lists(st.builds(lambda text: {"role": "user", "content": text}, WORDS), min_size=1, max_size=3).map(
            lambda messages: {"messages": messages}
        ),
        lambda row: Chat(tuple(row["messages"])),
    ),
}


def as_jsonl(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def as_csv(rows: list[dict[str, Any]], delimiter: str = ",") -> bytes:
    file = io.StringIO(newline="")
    table = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
    table.writeheader()
    table.writerows({name: json.dumps(v) if isinstance(v, list) else v for name, v in row.items()} for row in rows)
    return file.getvalue().encode()


def as_parquet(rows: list[dict[str, Any]]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return sink.getvalue()


WRITERS = {
    "rows.jsonl": as_jsonl,
    "rows.csv": as_csv,
    "rows.tsv": lambda rows: as_csv(rows, "\t"),
    "rows.parquet": as_parquet,
}


def written(folder: Path | str, name: str, content: bytes | str) -> Path:
    path = Path(folder) / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def contents(records: tuple[Record, ...]) -> list[Any]:
    return [record.content for record in records]


def as_data_set(folder: Path) -> Path:
    library = pytest.importorskip("datasets", reason="the library is not installed: pip install 'dptune[datasets]'")
    library.Dataset.from_list(THREE).save_to_disk(str(folder / "set"))
    return folder / "set"


THREE = [{"text": "one cat"}, {"text": "two cats"}, {"text": "no cat"}]
LINES = "\n".join(row["text"] for row in THREE)
#: For each format, and each ending that it is known by, a file of three texts.
OF_FORMAT: dict[str, dict[str, Callable[[Path], Path]]] = {
    "text": {ending: lambda folder, e=ending: written(folder, f"a{e}", LINES) for ending in (".txt", ".text", ".md")},
    "table": {
        ".csv": lambda folder: written(folder, "a.csv", as_csv(THREE)),
        ".tsv": lambda folder: written(folder, "a.tsv", as_csv(THREE, "\t")),
        ".parquet": lambda folder: written(folder, "a.parquet", as_parquet(THREE)),
        ".pq": lambda folder: written(folder, "a.pq", as_parquet(THREE)),
    },
    "jsonl": {
        ending: lambda folder, e=ending: written(folder, f"a{e}", as_jsonl(THREE))
        for ending in FORMATS["jsonl"].endings
    },
    "datasets": {"": as_data_set},
}


def test_every_format_has_a_reader_and_endings_of_its_own() -> None:
    assert set(get_args(Format)) == set(FORMATS)
    assert len(ENDINGS) == sum(len(form.endings) for form in FORMATS.values())


@pytest.mark.parametrize(("name", "ending"), [(n, e) for n, form in FORMATS.items() for e in form.endings or ("",)])
def test_every_format_that_is_listed_reads_the_records_of_a_file(name: Format, ending: str, tmp_path: Path) -> None:
    """A format without an example here fails: one whose reader is a stub must not be offered."""
    path = OF_FORMAT[name][ending](tmp_path)
    for stated in (None, name):
        assert contents(read(RecordSource(path, format=stated))) == [Text(row["text"]) for row in THREE]


# --- what is read ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=30)
@given(data=st.data())
def test_every_format_gives_the_rows_that_were_written(name: str, way: str, data: st.DataObject) -> None:
    strategy, expected = WAYS[way]
    rows = data.draw(st.lists(strategy, min_size=1, max_size=6))
    with TemporaryDirectory() as folder:
        found = read(RecordSource(written(folder, name, WRITERS[name](rows))))
    assert contents(found) == [expected(row) for row in rows]
    assert [(record.unit, record.id) for record in found] == [(row_key(expected(row)), None) for row in rows]
    if name != "rows.jsonl":
        first = 1 if name == "rows.parquet" else 2
        assert [record.row for record in found] == list(range(first, first + len(rows)))


def dataset(rows: list[dict[str, Any]]) -> Any:
    """Of the datasets library, as far as a reader sees it."""
    found = UserList(rows)
    found.column_names = list(rows[0])  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("given_as", [list, tuple, iter, dataset])
def test_rows_of_python_are_read(given_as: Any) -> None:
    rows = [{"text": "one", "who": 1}, {"text": "two", "who": "1 "}, {"text": "three", "who": 2.0}]
    found = read(RecordSource(given_as(rows), unit="who"))
    assert contents(found) == [Text("one"), Text("two"), Text("three")]
    assert [record.unit for record in found] == [unit_key("1"), unit_key(1), unit_key("2")]


def test_rows_of_a_data_frame_are_read() -> None:
    """Numbers of NumPy are numbers, and pandas' nothing is nothing."""
    frame = pd.DataFrame({"age": pd.array([50, None], "Int64"), "who": np.array([7, 8], np.int64)})
    found = read(RecordSource(frame.to_dict("records"), template="{age}", unit="who"))
    assert contents(found) == [Text("50"), Text("unknown")]
    assert [record.unit for record in found] == [unit_key(7), unit_key(8)]
    with pytest.raises(DataError, match="names no unit"):
        read(RecordSource(frame.to_dict("records"), template="{who}", unit="age"))


def test_a_table_without_such_columns_is_told_column_by_column(tmp_path: Path) -> None:
    content = "patient,age_band,diagnosis\n7,50-60,\n8,60-70,angina\n"
    found = read(RecordSource(written(tmp_path, "t.csv", content), unit="patient"))
    assert contents(found) == [
        Text("age band is 50-60. diagnosis is unknown."),
        Text("age band is 60-70. diagnosis is angina."),
    ]


def test_a_template_is_filled(tmp_path: Path) -> None:
    path = written(tmp_path, "t.csv", "age,the diagnosis\n50,\n60,angina\n")
    found = read(RecordSource(path, template="{{{age}-year-old}}: {the diagnosis}"))
    assert contents(found) == [Text("{50-year-old}: unknown"), Text("{60-year-old}: angina")]


def test_columns_of_other_names_are_named() -> None:
    row = {"question": "1 + 1?", "answer": "2", "text": "not this"}
    (pair,) = read(RecordSource([row], prompt="question", completion="answer"))
    (text,) = read(RecordSource([row], text="question"))
    assert (pair.content, text.content) == (PromptTarget("1 + 1?", "2"), Text("1 + 1?"))


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (['0\t"a cat', "1\ta dog", '0\tan owl"'], [("0", '"a cat'), ("1", "a dog"), ("0", 'an owl"')]),
        (
            ['0\t"a ""red"" cat"', '1\t"a dog', "", '0\tan "owl" "'],
            [("0", 'a "red" cat'), ("1", '"a dog'), ("0", 'an "owl" "')],
        ),
        (['0\t"a cat', 'and a dog"', "1\tan owl"], [("0", "a cat\nand a dog"), ("1", "an owl")]),
        (['0\t"a\tcat"', "1\tan owl"], [("0", "a\tcat"), ("1", "an owl")]),
    ],
    ids=["lone quotes", "fields quoted as a whole", "a field of two lines", "a tab in a field"],
)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_quote_of_a_text_with_tabs_takes_no_other_rows(
    end: str, lines: list[str], expected: list[tuple[str, str]], tmp_path: Path
) -> None:
    """Files of benchmarks have quotes as texts have them, and other files have fields of several lines."""
    path = tmp_path / "a.tsv"
    path.write_bytes(end.join(["label\tsentence", *lines, ""]).encode())
    found = read(RecordSource(path, text="sentence", label="label"))
    assert [(one.content.label, one.content.text.replace("\r\n", "\n")) for one in found] == expected


def test_files_of_json_behind_each_other_are_read(tmp_path: Path) -> None:
    one = b'\xef\xbb\xbf{"text": "a"}\n'
    assert contents(read(RecordSource(written(tmp_path, "a.jsonl", one + one + one[:3])))) == [Text("a"), Text("a")]
    row = {"id": 1, "said": "a", "by": [{"name": "b"}]}
    assert contents(read(RecordSource(written(tmp_path, "b.json", as_jsonl([row])), text="said"))) == [Text("a")]


def test_a_label_is_no_part_of_its_text() -> None:
    for ways in ({"text": "label"}, {"template": "{text} {label}"}, {"text": "sentence", "template": "{text} {label}"}):
        with pytest.raises(ConfigError, match=r"data\.label: column 'label' is also part of the text"):
            RecordSource([{"sentence": "a cat", "label": "1"}], label="label", **ways)


def test_a_template_frames_the_named_text(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text("label\tsentence\tby\n0\ta {bad} film \tann\n1\tgood\t\n", encoding="utf-8")
    framed = RecordSource(path, text="sentence", label="label", template="{by}: {text} It was")
    assert [record.content for record in read(framed)] == [
        Labelled("ann: a {bad} film It was", "0"),
        Labelled("unknown: good It was", "1"),
    ]
    with pytest.raises(DataError, match=r"column 'text': this column does not exist.*'sentence', 'by' as data\.text"):
        read(RecordSource(path, label="label", template="{text} It was"))
    path.write_text("label\tsentence\n0\t \n", encoding="utf-8")
    with pytest.raises(DataError, match="column 'sentence': is empty"):
        read(RecordSource(path, text="sentence", label="label", template="{text} It was"))


def test_messages_keep_whatever_else_a_template_may_need() -> None:
    message = {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}
    assert read(RecordSource([{"messages": [message]}]))[0].content == Chat((message,))


@pytest.mark.parametrize(
    ("content", "stated", "expected"),
    [
        ("a b\nc\n", None, ["a b", "c"]),
        ("\n\na b\r\nc\r\n\r\n", None, ["a b", "c"]),
        ("a\rb\r", None, ["a", "b"]),
        ("a\n\n \nc\n", None, ["a", "c"]),
        ("a\nb\n\n \nc\n", "paragraphs", ["a b", "c"]),
        ("a\nb\n\nc\n", "lines", ["a", "b", "c"]),
        ("a\nb\nc\n", "paragraphs", ["a b c"]),
        ("\ufeffa\u2028b\n", None, ["a\u2028b"]),
    ],
)
def test_text_is_lines_or_paragraphs(tmp_path: Path, content: str, stated: Any, expected: list[str]) -> None:
    found = read(RecordSource(written(tmp_path, "t.txt", content), records_are=stated))
    assert contents(found) == [Text(text) for text in expected]


def test_fields_may_be_long_and_the_process_keeps_its_limit(tmp_path: Path) -> None:
    before = csv.field_size_limit()
    (record,) = read(RecordSource(written(tmp_path, "t.csv", f'text\n"{"x, " * 100_000}"\n')))
    assert isinstance(record.content, Text)
    assert len(record.content.text) == 300_000
    assert csv.field_size_limit() == before


def test_a_folder_of_the_datasets_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {"train": dataset([{"text": "a"}]), "test": dataset([{"text": "b"}])}
    whole = type("DatasetDict", (dict,), {"column_names": {name: ["text"] for name in parts}})(parts)
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_from_disk=lambda path: whole))
    assert contents(read(RecordSource(tmp_path))) == [Text("a")]
    assert contents(read(RecordSource(tmp_path, part="test"))) == [Text("b")]
    with pytest.raises(DataError, match=r"has no part 'dev'.*data\.part"):
        read(RecordSource(tmp_path, part="dev"))


def test_a_data_set_of_the_hub_needs_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(name: str, configuration: str | None, *, revision: str, split: str) -> Any:
        asked.append((name, configuration, revision, split))
        return dataset([{"text": "a"}])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load))
    for revision in (None, "main"):
        with pytest.raises(ConfigError, match=r"data\.revision.*not a commit.*40-digit"):
            read(RecordSource("who/what", format="datasets", revision=revision))
    assert contents(read(RecordSource("who/what", revision="a" * 40))) == [Text("a")]
    assert asked == [("who/what", None, "a" * 40, "train")]


def test_without_the_library_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"pip install 'dptune\[datasets\]'"):
        read(RecordSource(tmp_path))


# --- units and sides -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("same", [7, 7.0, "7", " 7\t", np.str_("7")])
def test_one_unit_has_one_key_however_it_is_written(same: Any) -> None:
    assert unit_key(same) == unit_key(7)
    assert unit_key("Zo\u00eb") == unit_key("Zoe\u0308")
    assert unit_key(7) not in (unit_key("07"), unit_key(7.5), row_key(Text("7")))


@pytest.mark.parametrize("nobody", [None, "", "  ", float("nan")])
def test_nobody_is_no_unit(nobody: Any) -> None:
    assert unit_key(nobody) is None
    with pytest.raises(DataError, match=r"row 2, column 'who': names no unit"):
        read(RecordSource([{"text": "a", "who": 1}, {"text": "b", "who": nobody}], unit="who"))


def test_equal_rows_stay_records_and_ids_tell_them_apart() -> None:
    rows = [{"text": "a", "n": 1}, {"text": "a", "n": 2}]
    alike, apart = read(RecordSource(rows)), read(RecordSource(rows, id="n"))
    assert len(alike) == 2
    assert alike[0].unit == alike[1].unit
    assert apart[0].unit != apart[1].unit


def test_what_others_leave_out_changes_no_key(tmp_path: Path) -> None:
    """Columns of a Parquet file have one type: a tool call or a missing number of one record shows in all others."""
    said = {"messages": [{"role": "user", "content": "a"}]}
    called = {"messages": [{"role": "user", "content": "b", "tool_calls": [{"name": "f"}]}]}
    beside = pa.array(["a", "b"])
    ages = [
        pa.table({"name": beside, "age": numbers})
        for numbers in (pa.array([50, 60]), pa.array([50.0, None], pa.float64()))
    ]
    with_call, without = (
        read(RecordSource(written(tmp_path, "m.parquet", as_parquet(rows)))) for rows in ([said, called], [said])
    )
    assert with_call[0] == without[0]
    found = []
    for table in ages:
        pq.write_table(table, tmp_path / "a.parquet")
        found.append(read(RecordSource(tmp_path / "a.parquet"))[0])
    assert found[0] == found[1]
    assert found[0].content == Text("name is a. age is 50.")


def test_prompts_and_targets_do_not_run_together_in_a_key() -> None:
    assert row_key(PromptTarget("ab", "c")) != row_key(PromptTarget("a", "bc"))
    assert row_key(Text("a"), "b") != row_key(Text("b"), "a")


def placed(rows: list[dict[str, Any]], unit: str | None, seed: int) -> dict[int, str]:
    """The side of every row, by its number ``n``; {} where a side stays empty."""
    source = RecordSource(rows, text="text", unit=unit, split=Fractions(0.6, 0.4, 0, seed))
    try:
        sides = read_sides(source)
    except DptuneError:
        return {}
    by_text = {f"text {row['n']}": row["n"] for row in rows}
    return {
        by_text[record.content.text]: name  # type: ignore[union-attr]
        for name in ("train", "eval")
        for record in getattr(sides, name)
    }


@given(owners=st.lists(st.integers(0, 6), min_size=4, max_size=25), seed=st.integers(0, 99), data=st.data())
@pytest.mark.parametrize("unit", [None, "who"])
def test_a_unit_that_leaves_moves_nobody_else(
    unit: str | None, owners: list[int], seed: int, data: st.DataObject
) -> None:
    rows = [{"n": n, "text": f"text {n}", "who": who} for n, who in enumerate(owners)]
    gone = data.draw(st.sampled_from(rows))
    kept = [row for row in rows if row[unit or "n"] != gone[unit or "n"]]
    before, after = placed(rows, unit, seed), placed(kept, unit, seed)
    if before and after:
        assert after == {row["n"]: before[row["n"]] for row in kept}
        assert placed(rows[::-1], unit, seed) == before
    if before and unit:
        assert all(before[a["n"]] == before[b["n"]] for a in rows for b in rows if a["who"] == b["who"])


def test_sides_have_their_shares() -> None:
    rows = [{"text": f"text {n}"} for n in range(4000)]
    sides = read_sides(RecordSource(rows, split=Fractions(0.7, 0.1, 0.2)))
    for name, share in (("train", 0.7), ("eval", 0.1), ("test", 0.2)):
        assert abs(len(getattr(sides, name)) - 4000 * share) < 6 * (4000 * share * (1 - share)) ** 0.5


def test_sides_may_be_given_and_public_records_need_no_unit() -> None:
    train, other = [{"age": 50, "who": 1}, {"age": 51, "who": 2}], [{"age": 52, "who": 2}]
    source = RecordSource(
        dataset(train), unit="who", split=GivenSides(test=dataset(other)), public=dataset([{"age": 9, "who": ""}])
    )
    sides = read_sides(source)
    assert contents(sides.public) == [Text("age is 9.")]
    assert [len(side) for side in (sides.train, sides.eval, sides.test)] == [2, 0, 1]
    assert sides.shared_units == 1


def test_a_side_that_stays_empty_is_named() -> None:
    with pytest.raises(ConfigError, match=r"data\.split: 1 distinct records \(equal ones share"):
        read_sides(RecordSource([{"text": "a"}]))


# --- what is refused -------------------------------------------------------------------------------------------

MALFORMED: dict[str, tuple[str, bytes | str, dict[str, Any], str]] = {
    "torn json": ("a.jsonl", '{"text": "a"}\n{"text": ', {}, "row 2: is not valid JSON"),
    "json list": ("a.jsonl", '\n\n["a"]', {}, "row 1: is JSON but not an object"),
    "repeated name": ("a.jsonl", '{"text": "a", "text": "b"}', {}, "row 1: is not valid JSON .*comes twice"),
    "deep json": ("a.jsonl", '{"text": "a"}\n' + "[" * 100_000, {}, "row 2: is not valid JSON"),
    "number as text": ("a.jsonl", '{"text": "a"}\n{"text": 3}', {}, "row 2, column 'text': holds int"),
    "null": ("a.jsonl", '{"text": null}', {}, "row 1, column 'text': holds nothing"),
    "absent": ("a.jsonl", '{"text": "a"}\n{"txt": "a"}', {}, "row 2, column 'text': the row lacks"),
    "empty text": ("a.jsonl", '{"text": "a"}\n{"text": " "}', {}, "row 2, column 'text': is empty"),
    "empty target": ("a.jsonl", '{"prompt": "a", "completion": ""}', {}, "row 1, column 'completion': is empty"),
    "chat as prompt": ("a.jsonl", '{"prompt": [], "completion": "a"}', {}, "'prompt': is not a list of messages"),
    "no messages": ("a.jsonl", '{"messages": []}', {}, "row 1, column 'messages': is not a list"),
    "no role": ("a.jsonl", '{"messages": [{"content": "a"}]}', {}, "message 1 has no text as its role"),
    "message as text": ("a.jsonl", '{"messages": ["a"]}', {}, "message 1 is not a mapping"),
    "nul escape": ("a.jsonl", r'{"text": "a\u0000"}', {}, "row 1, column 'text': holds a NUL"),
    "half character": ("a.jsonl", r'{"text": "a\ud800"}', {}, "row 1, column 'text': holds half"),
    "nul": ("a.txt", b"a\nb\0", {}, "row 2: holds a NUL byte"),
    "utf-16": ("a.txt", "ab\n".encode("utf-16"), {}, "row 1: holds a NUL byte"),
    "latin": ("a.csv", b"text\na\n\xe9\n", {}, "row 3: byte 0xe9 is not UTF-8"),
    "short row": ("a.csv", "text,n\na\n", {}, "row 2: 1 fields instead of 2"),
    "long row": ("a.csv", "text,n\na,1\nb,c,2\n", {}, "row 3: 3 fields instead of 2"),
    "open quote": ("a.csv", 'text,n\na,1\n"b,2\n', {}, "row 3: not a row"),
    "repeated column": ("a.csv", "text,text\na,b\n", {}, "row 1, column 'text': the column is repeated"),
    "nameless column": ("a.csv", "text,\na,b\n", {}, "row 1: a column has no name"),
    "header alone": ("a.csv", "text\n", {}, "row 1: holds only a header"),
    "repeated id": ("a.csv", "text,n\na,1\nb,2\nc,1\n", {"id": "n"}, "row 4, column 'n': the id of row 2"),
    "no id": ("a.csv", "text,n\na,\n", {"id": "n"}, "row 2, column 'n': the id is missing"),
    "no unit": ("a.csv", "text,n\na,1\nb,\n", {"unit": "n"}, "row 3, column 'n': names no unit"),
    "unit is a list": ("a.jsonl", '{"text": "a", "n": [1]}', {"unit": "n"}, "row 1, column 'n': holds a list"),
    "unit is a truth": ("a.jsonl", '{"text": "a", "n": true}', {"unit": "n"}, "row 1, column 'n': holds a bool"),
    "unknown column": ("a.csv", "text\na\n", {"unit": "n"}, "row 1, column 'n': this column does not exist"),
    "template": ("a.csv", "text\na\n", {"template": "{x}"}, "row 1, column 'x': this column does not exist.*'text'"),
    "ambiguous": ("a.csv", "text,messages\na,b\n", {}, "row 1: messages and text could each"),
    "nothing found": ("a.jsonl", '{"body": "a"}', {}, "row 1: has no column text.*'body'"),
    "another separator": ("a.csv", "id:text\n1:red\n", {}, "row 1: is read as a table of one column, 'id:text'"),
    "two separators": ("a.csv", "id;text, all\n1;red\n", {}, "row 1: its columns may be separated by commas or semico"),
    "Excel's first line": (
        "a.csv",
        "sep=;\ntext;n\na;1\n",
        {},
        "row 1: begins with Excel's line sep=.*remove the line",
    ),
    "cut off": ("a.csv", "n,text\n1,a\n2", {}, "row 3: 1 fields instead of 2.*the file may be cut off"),
    "row in quotes": ("a.csv", 'n,text\n"1,a"\n', {}, "row 2: 1 fields .*remove the quotes around the whole row"),
    "rows in quotes": ("a.csv", '"n,text"\n"1,a"\n', {}, "row 1: is read as .*remove the quotes around whole rows"),
    "one object": (
        "a.json",
        '{\n "data": [{"text": "a"}]\n}',
        {},
        "row 1: is one JSON object.*the array of 'data' alone",
    ),
    "one object, one line": (
        "a.json",
        '{"v": 1, "data": [{"text": "a"}]}',
        {},
        "row 1: is one .*array of 'data' alone",
    ),
    "one record, many lines": (
        "a.json",
        '{\n "text": "a"\n}',
        {},
        "row 1: is one JSON object. Fix: write each object on",
    ),
    "two files": ("a.csv", "n,text\n1,a\nn,text\n2,b\n", {"unit": "n"}, "row 3: the row repeats the header"),
    "two files with marks": ("a.csv", "n,text\n1,a\n\ufeffn,text\n2,b\n", {}, "row 3: the row repeats the header"),
    "JSONL as a table": ("a.csv", '{"text": "a", "n": 1}\n', {}, "row 1: looks like JSON.*data.format jsonl"),
    "no unit, in a word": ("a.csv", "text,n\na,NULL\n", {"unit": "n"}, "row 2, column 'n': names no unit .'NULL' says"),
    "quotes over rows": (
        "a.tsv",
        'n\ttext\n1\t"Well\n2\ta\tb\n3\tred\n4\tsaid"\n5\tblue\n',
        {"unit": "n"},
        "row 2: a field in quotes holds whole rows",
    ),
    "names in a text": ("a.txt", "n,text\n1,a\n2,b\n", {}, "row 1: begins with names of columns"),
    "nothing but a label": (
        "a.csv",
        "sentence,label\nred,1\n ,0\n",
        {"label": "label"},
        "row 3: column 'sentence' is empty",
    ),
    "all columns empty": ("a.csv", "a,b,n\n,red,1\n,,2\n", {"unit": "n"}, "row 3: all of 'a', 'b' are empty"),
    "no other column": ("a.csv", "label\n1\n", {"label": "label"}, "row 1: has no column to make a text from"),
    "jsonl as text": ("a.txt", '{"text": "a"}\n' * 9, {}, "row 1: looks like JSONL.*data.format jsonl"),
    "table as text": ("a.txt", "an a, b, c\n" * 9, {}, "row 1: looks like a table.*data.format table"),
    "swallowed": ("a.txt", "one record\n" * 60 + "\n" + "one record\n" * 60, {}, "row 61: has 120 lines and 2 para"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_what_is_malformed_is_located(tmp_path: Path, case: str) -> None:
    name, content, options, message = MALFORMED[case]
    with pytest.raises(DataError, match=message) as refused:
        read(RecordSource(written(tmp_path, name, content), **options))
    assert refused.value.row is not None
    assert str(refused.value).startswith(str(tmp_path / name))
    assert str(refused.value).count("Fix: ") == 1


@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.jsonl", "a.parquet"])
def test_an_empty_file_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=name):
        read(RecordSource(written(tmp_path, name, b"")))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("a.jsonl", {"format": "text"}, "a.jsonl is JSON by its ending. Fix: use jsonl"),
        ("a.csv", {"format": "text"}, "a.csv is a table by its ending"),
        ("a.dat", {}, "the ending of a.dat does not show the format"),
        ("a.csv", {"format": "xml"}, "data.format: 'xml' is unknown"),
        ("a.csv", {"prompt": "a"}, "data: prompt cannot be given like this"),
        ("a.csv", {"text": "a", "template": "{a}"}, r"data.template: '\{a\}' has no \{text\}, so column 'a'"),
        ("a.csv", {"text": "a", "messages": "b"}, "data: text and messages cannot"),
        ("a.csv", {"template": "{}"}, "data.template: names no columns"),
        ("a.csv", {"template": "{a:>9}"}, "data.template: .* format"),
        ("a.csv", {"template": "{a"}, "data.template: is malformed"),
        ("a.csv", {"records_are": "pages"}, "data.records_are: 'pages'"),
    ],
)
def test_what_a_source_cannot_mean_is_refused(tmp_path: Path, name: str, options: dict[str, Any], message: str) -> None:
    path = written(tmp_path, name, b"a,b\n1,2\n")
    with pytest.raises(ConfigError, match=message):
        read(RecordSource(path, **options))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.pkl", b"\x80\x04\x95", r"a\.pkl: is a pickle of Python, not text\. Fix: export its records"),
        ("a.feather", b"ARROW1\0\0", r"a\.feather: is an Arrow file, not text\. Fix: export its records"),
        ("a.dat", b"PAR1\x15", r"a\.dat: is a Parquet file, not text\. Fix: give it the ending \.parquet"),
    ],
)
def test_a_file_of_an_unknown_ending_is_named_by_its_content(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    """Not by a list of formats, of which none would read it."""
    with pytest.raises(DataError, match=message):
        read(RecordSource(written(tmp_path, name, content)))


@pytest.mark.parametrize("shares", [(0.5, 0.5, 0.5), (0, 1, 0), (1.5, -0.5, 0), (float("nan"), 0, 0)])
def test_shares_add_up(shares: tuple[float, float, float]) -> None:
    with pytest.raises(ConfigError, match=r"data\.split: train, eval and test"):
        Fractions(*shares)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.parquet", "rows.txt"])
@settings(max_examples=150)
@given(data=st.data())
def test_no_damage_ends_in_a_traceback(name: str, data: st.DataObject) -> None:
    """Bytes that are cut out, put in or changed: records, or a DataError that names the file; of texts also the row."""
    rows = [{"text": f"some text {n}", "n": str(n), "messages_": MESSAGES} for n in range(4)]
    whole = WRITERS[name](rows) if name in WRITERS else b"a line\nanother\n\nthird\n"
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, min(len(whole), start + 9)))
    damaged = whole[:start] + data.draw(st.binary(max_size=6)) + whole[end:]
    with TemporaryDirectory() as folder:
        path = written(folder, name, damaged)
        refused = None
        try:
            assert read(RecordSource(path, text="text", unit="n" if name in WRITERS else None))
        except DataError as error:
            refused = error
        if refused is not None:
            assert str(path) in str(refused)
            assert refused.row is not None or name == "rows.parquet" or "holds no" in str(refused)


def test_no_private_value_shows_in_a_representation() -> None:
    secret = [{"text": "TOPSECRET", "who": "TOPSECRET"}]
    source = RecordSource(secret, unit="who", split=GivenSides(eval=secret), public=[*secret])
    assert "TOPSECRET" not in repr(source) + repr(read(source)) + repr(read_sides(source))
    assert str(unit_key("TOPSECRET")) not in repr(read(source))
