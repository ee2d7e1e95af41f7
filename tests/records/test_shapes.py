"""Shapes of rows that public data sets have: each is read, or refused with a fix that works; no column goes unsaid."""

from __future__ import annotations

import gzip
import io
import json
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from dptune.core.errors import ConfigError, DataError
from dptune.job.settings import TuneSettings, check_labels
from dptune.records.parquet_file import decode_content, encode_content
from dptune.records.reading.read import read, read_sides
from dptune.records.reading.record import Chat, Content, PromptTarget, Text, row_key, unit_key
from dptune.records.reading.report import describe
from dptune.records.reading.source import Fractions, RecordSource
from tasks.settings.experiment import Task

ASKED, SAID = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}


def _called(**calls: dict[str, Any]) -> dict[str, Any]:
    """An assistant's message with calls of tools, by their names."""
    functions = [{"name": name, "arguments": arguments} for name, arguments in calls.items()]
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": one} for one in functions]}


def _answer(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text}


CHAT = Chat((ASKED, SAID))
ALPACA = {"instruction": "a", "input": "x", "output": "b"}

#: Rows of one data set, and the content of each.
SHAPES: dict[str, tuple[list[dict[str, Any]], list[Content]]] = {
    "a call without content": (
        [{"messages": [ASKED, CALL, {"role": "tool", "content": "7"}, SAID]}],
        [Chat((ASKED, {k: v for k, v in CALL.items() if v is not None}, {"role": "tool", "content": "7"}, SAID))],
    ),
    "parts": (
        [{"messages": [{"role": "user", "content": [{"type": "text", "text": part} for part in "ab"]}]}],
        [Chat(({"role": "user", "content": "ab"},))],
    ),
    "parts with the names of others": (
        [{"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "image": None}, "b"]}, SAID]}],
        [Chat(({"role": "user", "content": "ab"}, SAID))],
    ),
    "ShareGPT": ([{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}], [CHAT]),
    "ShareGPT's calls of tools, as LLaMA-Factory has them": (
        [
            {
                "conversations": [
                    {"from": "human", "value": "a"},
                    {"from": "function_call", "value": json.dumps({"name": "f", "arguments": {"x": 1}})},
                    {"from": "observation", "value": "7"},
                    {"from": "function_call", "value": json.dumps([{"name": n, "arguments": {}} for n in "gh"])},
                    {"from": "observation", "value": "8"},
                    {"from": "gpt", "value": "b"},
                ]
            }
        ],
        [Chat((ASKED, _called(f={"x": 1}), _answer("7"), _called(g={}, h={}), _answer("8"), SAID))],
    ),
    "ShareGPT called messages": (
        [{"messages": [{"from": "user", "value": "a"}, {"from": "gpt", "value": "b"}]}],
        [CHAT],
    ),
    "conversations with roles": ([{"conversations": [ASKED, SAID]}], [CHAT]),
    "a pair of messages": ([{"prompt": [ASKED], "completion": [SAID]}], [Chat((ASKED, SAID), {}, 1)]),
    "a pair of messages as JSON": (
        [{"prompt": json.dumps([ASKED]), "completion": json.dumps([SAID])}],
        [Chat((ASKED, SAID), {}, 1)],
    ),
    "a prompt that only looks like a list": ([{"prompt": "[1, 2]", "completion": "b"}], [PromptTarget("[1, 2]", "b")]),
    "Alpaca": (
        [ALPACA, ALPACA | {"input": ""}],
        [
            PromptTarget(
                "Below is an instruction that describes a task, paired with an input that provides further context. "
                "Write a response that appropriately completes the request.\n\n### Instruction:\na\n\n### Input:\nx"
                "\n\n### Response:",
                "b",
            ),
            PromptTarget(
                "Below is an instruction that describes a task. Write a response that appropriately completes the "
                "request.\n\n### Instruction:\na\n\n### Response:",
                "b",
            ),
        ],
    ),
    "tools": ([{"messages": [ASKED, SAID], "tools": [{"n": 1}]}], [Chat((ASKED, SAID), {"tools": [{"n": 1}]})]),
    "tools as JSON": (
        [{"messages": [ASKED, SAID], "tools": '[{"n": null}]'}],
        [Chat((ASKED, SAID), {"tools": [{"n": None}]})],
    ),
    "tools of the second row alone": (
        [{"messages": [ASKED, SAID]}, {"messages": [ASKED, SAID], "tools": [{"n": 1}]}],
        [CHAT, Chat((ASKED, SAID), {"tools": [{"n": 1}]})],
    ),
    "nothing as tools": ([{"messages": [ASKED, SAID], "tools": value} for value in (None, "", "null")], [CHAT] * 3),
}  # fmt: skip


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def parquet(rows: list[dict[str, Any]]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return sink.getvalue()


FILES: dict[str, Any] = {
    "a.jsonl": lines,
    "a.json": lambda rows: json.dumps(rows, indent=1).encode(),
    "b.jsonl": lambda rows: b" \n" + json.dumps(rows).encode(),
    "lines.json": lines,
    "a.jsonl.gz": lambda rows: gzip.compress(lines(rows)),
    "a.JSON.GZ": lambda rows: gzip.compress(json.dumps(rows).encode()),
    "a.csv.gz": lambda rows: gzip.compress(pd.DataFrame(rows).to_csv(index=False).encode()),
    "a.tsv.gz": lambda rows: gzip.compress(pd.DataFrame(rows).to_csv(index=False, sep="\t").encode()),
    "a.parquet.gz": lambda rows: gzip.compress(parquet(rows)),
}
PYTHON: dict[str, Any] = {
    "a list": lambda rows: rows,
    "a data frame": lambda rows: pd.DataFrame(rows, index=range(len(rows), 0, -1)),
    "a data frame of Parquet": lambda rows: pd.read_parquet(io.BytesIO(parquet(rows))),
    "an Arrow table": pa.Table.from_pylist,
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("given_as", [*PYTHON, "a file"])
def test_rows_of_public_data_sets_are_read(shape: str, given_as: str, tmp_path: Path) -> None:
    rows, expected = SHAPES[shape]
    if shape == "tools of the second row alone" and given_as in ("a data frame of Parquet", "an Arrow table"):
        rows, expected = rows[::-1], expected[::-1]  # Arrow takes the columns of the first row
    data = tmp_path / "a.jsonl"
    if given_as in PYTHON and shape != "parts with the names of others":  # such a mixture is no column of Arrow's
        data = PYTHON[given_as](rows)
    else:
        data.write_bytes(lines(rows))
    found = [record.content for record in read(RecordSource(data))]
    assert found == expected
    form = "messages" if isinstance(found[0], Chat) else "pair"
    assert [decode_content(encode_content(content), form) for content in found] == found
    sides = read_sides(RecordSource(data, split=Fractions(1, 0, 0)))
    assert sides.unread == ()
    assert describe(RecordSource(data), sides).samples  # a message without content has no text to show


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_json_or_gzip_gives_the_rows_that_were_written(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(FILES[name]([{"text": "a", "u": "x"}, {"text": "b, c", "u": "y"}]))
    found = read(RecordSource(tmp_path / name, unit="u"))
    assert [(record.content, record.unit) for record in found] == [
        (Text("a"), unit_key("x")),
        (Text("b, c"), unit_key("y")),
    ]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image", "url": "a"}]}, SAID]},
        r"column 'messages': message 1 has a part in its content that is not text\..* Fix: give only parts such as",
    ),
    "no content": ({"messages": [ASKED, {"role": "assistant", "content": None}]}, "message 2 has no text as its cont"),
    "an unknown speaker": ({"conversations": [{"from": "narrator", "value": "a"}]}, "message 1 is from a role that"),
    "a call that is no JSON": (
        {"conversations": [{"from": "function_call", "value": "f(1)"}]},
        r"message 1 is a function_call that is not JSON of a call.*Fix: write it as \{\"name\": \"f\", \"arguments\"",
    ),
    "a call without a name": (
        {"conversations": [{"from": "function_call", "value": '{"arguments": {}}'}]},
        "message 1 is a function_call that is not JSON of a call with name and arguments",
    ),
    "no call": ({"conversations": [{"from": "function_call", "value": "[]"}]}, "function_call without a call"),
    "a speaker that is no text": ({"conversations": [{"from": [], "value": "a"}]}, "message 1 is from a role that"),
    "half a pair": ({"prompt": [ASKED], "completion": "b"}, "column 'completion': is neither a list of messages nor"),
    "preferences": (
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        "Fix: preferences are not learned: name chosen as data.messages .* else prompt as data.prompt and chosen as",
    ),
    "a prompt beside a whole chat": (
        {"prompt": "a", "completion": [ASKED, SAID]},
        r"column 'prompt': is text, and completion holds messages\. Fix: name completion as data\.messages",
    ),
    "GSM8K": ({"question": "a", "answer": "b"}, "Fix: name 'question' as data.prompt and 'answer' as data.completion"),
    "Dolly": (
        {"instruction": "a", "context": "", "response": "b", "category": "c"},
        "Fix: name 'instruction' as data.prompt and 'response' as data.completion",
    ),
    "OpenOrca": ({"system_prompt": "", "question": "a", "response": "b"}, "Fix: name 'question' as data.prompt"),
    "no weight": ({"messages": [ASKED, SAID | {"weight": 0}]}, "message 2 has a weight of its own.*Fix: remove"),
    "no weight, ShareGPT": ({"conversations": [{"from": "gpt", "value": "a", "weight": 0.0}]}, "1 has a weight"),
    "not trained": ({"messages": [ASKED, SAID | {"train": False}]}, "message 2 has a train of its own"),
    "token ids": ({"input_ids": [1, 2], "labels": [1, 2]}, "Fix: give the texts that these token ids were made of"),
    "tools that are none": ({"messages": [ASKED], "tools": "[{"}, "column 'tools': is not valid JSON"),
    "tools in a mapping": ({"messages": [ASKED], "tools": {"a": 1}}, "column 'tools': is not a list of mappings"),
    "an option of ours": (
        {"messages": [ASKED], "chat_template_kwargs": {"tokenize": True}},
        "column 'chat_template_kwargs': sets tokenize",
    ),
    "a lone surrogate in a tool": ({"messages": [ASKED], "tools": [{"a": "\ud800"}]}, "column 'tools': holds half"),
    "a lone surrogate in a call": ({"messages": [CALL | {"x": {"\ud800": 1}}]}, "column 'messages': holds half"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_read_is_refused_with_its_fix(case: str) -> None:
    row, message = REFUSED[case]
    with pytest.raises(DataError, match=message) as refused:
        read(RecordSource([row]))
    assert refused.value.row == 1


def test_weights_that_change_nothing_are_read() -> None:
    rows = [{"messages": [ASKED | {"weight": 0}, SAID | {"weight": 1.0, "train": True}]}]
    assert len(read(RecordSource(rows))) == 1


def test_the_fixes_for_preferences_work() -> None:
    row = {"prompt": [ASKED], "chosen": [SAID], "rejected": [ASKED]}
    (record,) = read(RecordSource([row], prompt="prompt", completion="chosen"))
    assert record.content == Chat((ASKED, SAID), {}, 1)
    with pytest.raises(DataError, match=r"name chosen as data\.messages"):
        read(RecordSource([{"chosen": [ASKED, SAID], "rejected": [ASKED, SAID]}]))
    (record,) = read(RecordSource([{"chosen": [ASKED, SAID], "rejected": []}], messages="chosen"))
    assert record.content == CHAT


def test_an_input_is_not_left_out_of_an_instruction() -> None:
    with pytest.raises(DataError, match=r"row 1, column 'input': would be left out.*Fix: name neither data.prompt nor"):
        read(RecordSource([ALPACA], prompt="instruction", completion="output"))
    (record,) = read(RecordSource([ALPACA | {"text": "a whole text"}]))  # as the original has, and as before
    assert record.content == Text("a whole text")


def test_messages_and_texts_do_not_mix() -> None:
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": [ASKED], "completion": [SAID]}]
    for some in (rows, rows[::-1]):
        with pytest.raises(DataError, match=r"row 2, column 'prompt': holds (messages|text), and the first record"):
            read(RecordSource(some))


def test_columns_that_nobody_chose_and_nobody_reads_are_named() -> None:
    row = {"messages": [ASKED, SAID], "tools": [], "system": "c", "source": "d", "user": 1}
    assert read_sides(RecordSource([row], unit="user", split=Fractions(1, 0, 0))).unread == ("system", "source")
    assert read_sides(RecordSource([row], messages="messages", split=Fractions(1, 0, 0))).unread == ()
    assert read_sides(RecordSource([ALPACA | {"history": []}], split=Fractions(1, 0, 0))).unread == ("history",)


@pytest.mark.parametrize(
    ("first", "later", "unread"),
    [
        ({"text": "a"}, {"text": "b", "source": "web"}, ("source",)),
        ({"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d", "system": "s"}, ("system",)),
        ({"messages": [ASKED, SAID]}, {"messages": [ASKED, SAID], "tools": [], "system": "s"}, ("system",)),
        ({"instruction": "a", "output": "b"}, {"instruction": "c", "output": "d", "input": "e"}, ()),
    ],
)
def test_columns_that_the_first_row_lacks_and_nobody_reads_are_named(first: Any, later: Any, unread: Any) -> None:
    sides = read_sides(RecordSource([first, later, first], split=Fractions(1, 0, 0)))
    assert (sides.unread, sides.unread_later) == ((), unread)
    assert read_sides(RecordSource([first, first], split=Fractions(1, 0, 0))).unread_later == ()


def test_tools_are_part_of_what_a_record_is() -> None:
    """Two chats that differ in their tools alone are two records; one without any has the key that it always had."""
    one, other = Chat((ASKED, SAID), {"tools": [{"a": 1}]}), Chat((ASKED, SAID), {"tools": [{"a": 2}]})
    assert len({row_key(content) for content in (CHAT, one, other, Chat((ASKED, SAID), {}, 1))}) == 4
    assert row_key(CHAT) == 821745468077660024  # that of version 0, before chats had tools


def test_a_deeply_nested_value_is_no_traceback(tmp_path: Path) -> None:
    deep = "[" * 700 + "]" * 700
    for row in (f'{{"messages": [{{"role": "user", "content": "a", "x": {deep}}}]}}', f'{{"messages": [{deep}]}}'):
        (tmp_path / "a.jsonl").write_text(row)
        with pytest.raises(DataError, match=r"row 1, column 'messages': (is nested too deeply|message 1)"):
            read(RecordSource(tmp_path / "a.jsonl"))


@pytest.mark.parametrize(
    "content", [b"no gzip", gzip.compress(b'{"text": "a"}\n' * 99, mtime=0)[:-9]], ids=["other", "cut"]
)
def test_a_torn_gzip_file_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(content)
    with pytest.raises(DataError, match="is not a complete gzip file"):
        read(RecordSource(tmp_path / "a.jsonl.gz"))


@pytest.mark.parametrize(("content", "row"), [('[\n{"text": "a"},\n{"text"', 3), ('[{"text": "a"}, 7]', 2)])
def test_a_torn_array_is_located(content: str, row: int, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(DataError) as refused:
        read(RecordSource(tmp_path / "a.json"))
    assert refused.value.row == row


DAY, NOON = datetime(2020, 1, 2), datetime(2020, 1, 2, 12)
SAME: dict[str, list[Any]] = {
    "a whole Decimal": [Decimal("7.00"), Decimal(7), Decimal("0.7E1"), 7, "7", 7.0],
    "a Decimal": [Decimal("7.50"), 7.5, "7.5"],
    "a day": [date(2020, 1, 2), DAY, pd.Timestamp(DAY), np.datetime64("2020-01-02"), "2020-01-02"],
    "a time": [NOON, pd.Timestamp(NOON), np.datetime64(NOON, "ns"), str(NOON)],
    "a time with a zone": [NOON.replace(tzinfo=UTC), datetime(2020, 1, 2, 14, tzinfo=timezone(timedelta(hours=2)))],
    "a UUID": [UUID(int=7), str(UUID(int=7))],
}


@pytest.mark.parametrize("name", SAME)
def test_a_unit_has_one_key_in_whatever_type_a_table_holds_it(name: str) -> None:
    found = read(RecordSource([{"text": "a", "unit": value} for value in SAME[name]], unit="unit"))
    assert len({record.unit for record in found}) == 1
    others = [Decimal("7.1"), NOON + timedelta(microseconds=1), pd.Timestamp(2020, 1, 2, nanosecond=1), UUID(int=8)]
    assert not {record.unit for record in found} & {unit_key(value) for value in others}


@pytest.mark.parametrize("nobody", [pd.NaT, np.datetime64("NaT"), Decimal("NaN"), pd.NA])
def test_a_missing_time_is_nobody(nobody: Any) -> None:
    with pytest.raises(DataError, match="names no unit"):
        read(RecordSource([{"text": "a", "unit": nobody}], unit="unit"))


def test_columns_are_no_rows() -> None:
    with pytest.raises(DataError, match="are columns, not rows"):
        read(RecordSource({"text": ["a"]}))  # type: ignore[arg-type]
    with pytest.raises(DataError, match="column 'a': the column is repeated"):
        read(RecordSource(pd.DataFrame([["x", "y"]], columns=["a", "a"])))
    for empty in (pd.DataFrame({"text": []}), pa.table({"text": []})):
        with pytest.raises(DataError, match="holds no records"):
            read(RecordSource(empty))
    assert read(RecordSource(pd.DataFrame({"text": ["a"], "unit": [[1]]})))[0].content == Text("a")
    with pytest.raises(DataError, match="column 'unit': holds a list"):
        read(RecordSource(pd.DataFrame({"text": ["a"], "unit": [np.array([1, 2])]}), unit="unit"))


def test_a_hidden_label_is_not_to_be_named() -> None:
    """The fix for other labels, to name them too, would make a class of it."""
    found = read(RecordSource([{"text": "a", "label": -1}], label="label"))
    with pytest.raises(DataError, match=r"column 'label': the label is -1, .* hidden.*Fix: give a part") as refused:
        check_labels(found, ("0", "1"), "label", "name all labels, this one too")
    assert "name all" not in str(refused.value)
    check_labels(found, ("-1", "1"), "label", "")  # an earlier version let it be named, and such a classifier is scored


@pytest.mark.parametrize("name", ["-1", "-1.0", " -1", "\uff0d1", "-\u06f1"])
def test_a_hidden_label_cannot_be_named(name: str) -> None:
    for given in ({"labels": (name, "0", "1")}, {"words": {name: " bad", "1": " good"}}):
        with pytest.raises(ConfigError, match=r"^labels: .*-1.* Fix: ") as refused:
            TuneSettings(epsilon=8, task="classify", **given)
        assert ("such as negative" in str(refused.value)) == (name == "-1")
    with pytest.raises(ValidationError, match="labels: -1 is what data sets write where a label is hidden"):
        Task(kind="classify", labels=(name.strip(), "1"))


def test_the_format_of_a_packed_file_is_that_of_what_is_packed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the ending of a\.gz does not show the format"):
        RecordSource(tmp_path / "a.gz").format_of(tmp_path / "a.gz")
