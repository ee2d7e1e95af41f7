"""Records that users bring: their content, the unit that each belongs to, and the place that it was read from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b, sha256
from typing import Any

from dptune.records.reading.spelling import is_missing, spelled

#: Columns that a chat template is given beside the messages, as TRL's ``SFTTrainer`` (but for ``documents``) does.
TEMPLATE_INPUTS = ("tools", "documents", "chat_template_kwargs")


@dataclass(frozen=True)
class Text:
    """Text, all of which is learned.

    Example:
        >>> from dptune.records.reading.record import Text
        >>> Text("My loan was refused.").text
        'My loan was refused.'
    """

    text: str = field(repr=False)


@dataclass(frozen=True)
class PromptTarget:
    """A prompt without loss, and the target that is learned. Nothing is inserted between them.

    Example:
        >>> from dptune.records.reading.record import PromptTarget
        >>> record = PromptTarget(prompt="Q: Where is my order? A:", target=" On its way.")
        >>> record.prompt + record.target
        'Q: Where is my order? A: On its way.'
    """

    prompt: str = field(repr=False)
    target: str = field(repr=False)


@dataclass(frozen=True)
class Chat:
    """Messages, which the tokenizer's own chat template renders.

    Attributes:
        messages: each has at least ``role`` and ``content``; one with ``tool_calls`` may have no content.
        inputs: what the template is given beside the messages, by the names in ``TEMPLATE_INPUTS``.
        prompt: number of messages that are the prompt of a completion: all that follows them is learned, and nothing
            of them. 0: what assistants say is learned.

    Example:
        >>> from dptune.records.reading.record import Chat
        >>> chat = Chat(({"role": "user", "content": "Where is it?"}, {"role": "assistant", "content": "On its way."}))
        >>> len(chat.messages), chat.options
        (2, {})
    """

    messages: tuple[Mapping[str, Any], ...] = field(repr=False)
    inputs: Mapping[str, Any] = field(default_factory=dict, repr=False)
    prompt: int = 0

    @property
    def options(self) -> dict[str, Any]:
        """The inputs as options of ``apply_chat_template``, for every rendering of this chat or of a part of it."""
        own = self.inputs.get("chat_template_kwargs", {})
        return {name: value for name, value in self.inputs.items() if name != "chat_template_kwargs"} | dict(own)

    @property
    def stored(self) -> Any:
        """The chat as JSON can hold it: its messages alone where it has nothing else."""
        if not (self.inputs or self.prompt):
            return self.messages
        return {"messages": self.messages, "inputs": self.inputs, "prompt": self.prompt}


@dataclass(frozen=True)
class Labelled:
    """A text and the name of its label, which a classifier learns."""

    text: str = field(repr=False)
    label: str = field(repr=False)


Content = Text | PromptTarget | Chat | Labelled


@dataclass(frozen=True)
class Record:
    """A training example with its unit of privacy. Private.

    Attributes:
        unit: key of the unit of privacy, a number of 63 bits that follows from the record alone (``unit_key``,
            ``row_key``): nobody who joins or leaves changes it.
        file: name of the file or data set that it was read from, for messages.
        row: number of its row in ``file``, from 1; the header of a table is row 1.
        id: the record's own id, if the source names a column of ids.
        columns: of a chat, the column that it was read from, or those of its prompt and its completion, for messages;
            empty where nobody knows them.

    Example:
        >>> from dptune.records.reading.read import read
        >>> from dptune.records.reading.source import RecordSource
        >>> record = read(RecordSource([{"customer": "c1", "text": "My loan was refused."}], unit="customer"))[0]
        >>> record.content.text, record.row
        ('My loan was refused.', 1)
        >>> record  # shows nothing private
        Record(content=Text(), file='the records given from Python', row=1)
    """

    content: Content
    unit: int = field(repr=False)
    file: str
    row: int
    id: str | None = field(default=None, repr=False)
    columns: tuple[str, ...] = field(default=(), repr=False, compare=False)


def unit_key(value: object) -> int | None:
    """The key of the unit that a column's value names, by its one spelling; None for a missing value.

    Raises: TypeError as ``spelled``.
    """
    name = spelled(value)
    return None if name is None or is_missing(name) else name_key(name)


def name_key(name: str) -> int:
    """The key of a unit by its one spelling, which is not that of a missing value."""
    return _key(b"unit", name)


def row_key(content: Content, own_id: str | None = None) -> int:
    """The key of a record that is a unit of its own: a hash of its content and of its id, if it has one.

    Equal records without ids share a key, so that they fall on one side of a split; there each is still its own unit.
    """
    said = content.stored if isinstance(content, Chat) else tuple(vars(content).values())
    return _key(b"row", json.dumps([type(content).__name__, said, own_id], sort_keys=True, default=str))


def _key(kind: bytes, name: str) -> int:
    """63 bits, which fit the int64 columns of files. ``kind`` keys the hash: a row's key never equals a unit's."""
    digest = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8, key=b"dptune " + kind).digest()
    return int.from_bytes(digest, "little") >> 1


def fingerprint(records: Iterable[Record]) -> str:
    """A digest by which a register recognises records: the sum of their own digests. Private.

    Neither their order nor the split changes it, nor the order of the names in a chat's messages, which a table or
    another writer of JSON changes. All else of a content counts; what a record says about its file is none of it.
    """
    contents = (
        # a chat without inputs and prompt has the digest that it had before chats had any
        {name: _in_one_order(value) for name, value in vars(record.content).items() if value or type(value) is str}
        for record in records
    )
    total = sum(int.from_bytes(sha256(repr(content).encode()).digest()) for content in contents)
    return sha256(str(total).encode()).hexdigest()


def _in_one_order(value: Any) -> Any:
    """The value with the names of its mappings sorted, but for ``role``, which chats name first."""
    if isinstance(value, Mapping):
        names = sorted(value, key=lambda name: (name != "role", name))
        return {name: _in_one_order(value[name]) for name in names}
    return type(value)(map(_in_one_order, value)) if isinstance(value, list | tuple) else value


def form_of(records: Sequence[Record]) -> str:
    """The form of ``records``, one of ``dptune.records.parquet_file.FORMS``: the first one's, for all must have it."""
    return {Text: "text", PromptTarget: "pair", Chat: "messages", Labelled: "label"}[type(records[0].content)]


def as_text(record: Record) -> str:
    """A record as one text that people can read."""
    content = record.content
    if isinstance(content, Text):
        return content.text
    if isinstance(content, Chat):
        return "\n".join(f"{message['role']}: {_said(message)}" for message in content.messages)
    return " => ".join(vars(content).values())


def _said(message: Mapping[str, Any]) -> str:
    """What a message says; without any text, the tools that it calls."""
    return message.get("content") or json.dumps(message.get("tool_calls", ""), ensure_ascii=False, default=str)
