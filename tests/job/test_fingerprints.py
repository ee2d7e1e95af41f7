"""By what a register knows the same records again: their contents, whoever wrote the file, in whatever order."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

import pytest
from tiny_tuning import QUICK, checkpoint

from dptune.job.base_model import open_base
from dptune.job.preparation import prepare_sides
from dptune.job.settings import TuneSettings
from dptune.records.reading.read import Sides, read
from dptune.records.reading.record import Chat, Content, Labelled, PromptTarget, Record, Text, fingerprint
from dptune.records.reading.source import RecordSource


def records(*contents: Content) -> tuple[Record, ...]:
    return tuple(Record(content, row, "file", row) for row, content in enumerate(contents))


CONTENTS = (Text("a"), PromptTarget("a", "b"), Labelled("a", "b"), Chat(({"role": "user", "content": "Hello"},)))


@pytest.mark.parametrize("content", CONTENTS)
def test_digests_stay_those_of_earlier_registers(content: Content) -> None:
    fields = {"messages": content.messages} if isinstance(content, Chat) else vars(content)  # a chat had no others then
    own = int.from_bytes(sha256(repr(fields).encode()).digest())
    assert fingerprint(records(content, content)) == sha256(str(2 * own).encode()).hexdigest()


def test_every_record_counts_and_their_order_does_not() -> None:
    first, second = Text("a"), Text("b")
    assert fingerprint(records(first, second)) == fingerprint(records(second, first))
    others = [(first,), (first, first, second), (first, first), (second, second), (first, first, first, second)]
    assert len({fingerprint(records(*one)) for one in others}) == len(others)
    assert fingerprint(records(first, first, second)) != fingerprint(records(second))


def test_the_order_of_names_in_a_chat_does_not_matter() -> None:
    calls = [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]
    message: dict[str, Any] = {"role": "assistant", "content": "Hello", "tool_calls": calls}
    turned = {"tool_calls": [{"function": {"arguments": "{}", "name": "f"}, "type": "function"}], "content": "Hello"}
    turned["role"] = "assistant"
    found = [
        fingerprint(read(RecordSource(data)))
        for data in (
            [{"messages": [message, {"role": "user", "content": "x"}]}],
            [{"messages": [turned, {"content": "x", "role": "user"}]}],
            [{"messages": json.dumps([message, {"role": "user", "content": "x"}], sort_keys=True)}],
        )
    ]
    assert len({*found}) == 1
    assert fingerprint(read(RecordSource([{"messages": [{"role": "user", "content": "x"}, message]}]))) not in found


def test_the_column_that_holds_a_chat_does_not_matter() -> None:
    """A register knows the records again under another name of their column."""
    chat = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}]
    first, second = (read(RecordSource([{column: chat}], messages=column)) for column in ("messages", "talk"))
    assert (first[0].columns, second[0].columns) == (("messages",), ("talk",))
    assert first == second
    assert fingerprint(first) == fingerprint(second)
    assert first[0].unit == second[0].unit


def test_all_sides_of_a_split_count_and_how_they_were_dealt_does_not() -> None:
    """The pipeline's side of attackers too, so that another split of the same records is known again."""
    own = tuple(Record(Text(f"red cat {row}"), row, "file", row) for row in range(30))
    chosen = TuneSettings(epsilon=8.0, delta=1e-3, **QUICK)
    base = open_base(str(checkpoint()), chosen)
    found = [
        prepare_sides(sides, base, chosen, None).fingerprint
        for sides in (
            Sides(own[:20], eval=own[20:25], test=own[25:]),
            Sides(own[10:], eval=own[:5], test=own[5:10]),
            Sides(own[:20], eval=own[20:25]),
        )
    ]
    assert found[0] == found[1] == fingerprint(own) != found[2]
