"""Records that users bring: their content, the unit that each belongs to, and the place that it was read from."""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b, sha256
from typing import Any


@dataclass(frozen=True)
class Text:
    """Text, all of which is learned."""

    text: str = field(repr=False)


@dataclass(frozen=True)
class PromptTarget:
    """A prompt without loss, and the target that is learned. Nothing is inserted between them."""

    prompt: str = field(repr=False)
    target: str = field(repr=False)


@dataclass(frozen=True)
class Chat:
    """Messages, each with at least ``role`` and ``content``, which the tokenizer's own chat template renders."""

    messages: tuple[Mapping[str, Any], ...] = field(repr=False)


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
    """

    content: Content
    unit: int = field(repr=False)
    file: str
    row: int
    id: str | None = field(default=None, repr=False)


def unit_key(value: object) -> int | None:
    """The key of the unit that a column's value names; None for a missing value.

    Spaces at the ends, the Unicode form of a letter, and whether a whole number is written as 7, "7" or 7.0 make no
    difference. One person under two keys would be two units, each protected by itself, and the person would not be.

    Raises: TypeError for a value that is neither text nor a number.
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float | None):
        raise TypeError(type(value).__name__)
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    name = unicodedata.normalize("NFC", str(value)).strip()
    return _key(b"unit", name) if name else None


def row_key(content: Content, own_id: str | None = None) -> int:
    """The key of a record that is a unit of its own: a hash of its content and of its id, if it has one.

    Equal records without ids share a key, so that they fall on one side of a split; there each is still its own unit.
    """
    said = content.messages if isinstance(content, Chat) else tuple(vars(content).values())
    return _key(b"row", json.dumps([type(content).__name__, said, own_id], sort_keys=True, default=str))


def _key(kind: bytes, name: str) -> int:
    """63 bits, which fit the int64 columns of files. ``kind`` keys the hash: a row's key never equals a unit's."""
    digest = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8, key=b"dptune " + kind).digest()
    return int.from_bytes(digest, "little") >> 1


def fingerprint(records: Iterable[Record]) -> str:
    """A digest by which a register recognises records: the sum of their own digests. Private.

    Neither their order nor the split changes it, nor the order of the names in a chat's messages, which a table or
    another writer of JSON changes.
    """
    contents = ({name: _in_one_order(value) for name, value in vars(record.content).items()} for record in records)
    total = sum(int.from_bytes(sha256(repr(content).encode()).digest()) for content in contents)
    return sha256(str(total).encode()).hexdigest()


def _in_one_order(value: Any) -> Any:
    """The value with the names of its mappings sorted, but for ``role``, which chats name first."""
    if isinstance(value, Mapping):
        names = sorted(value, key=lambda name: (name != "role", name))
        return {name: _in_one_order(value[name]) for name in names}
    return type(value)(map(_in_one_order, value)) if isinstance(value, list | tuple) else value
