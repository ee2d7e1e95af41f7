"""Encodes texts with labels for a classifier: the tokenizer's own ids of a text, and then the number of its label.

The label is the one entry of a row that counts in the loss, so that tokens and label cannot get separated. The model
never sees it (``losses.label_logits``).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptune.core.errors import ConfigError, DataError
from dptune.records.reading.record import Labelled, Record
from dptune.training.data import Tokens, with_context

#: Places of a batch's row that hold no token of the text: the label's, and one of padding.
BESIDE_TEXT = 2


def labelled_tokens(records: Sequence[Record], tokenizer: Any, max_length: int, labels: Sequence[str]) -> Tokens:
    """All records in memory, each text cut by the tokenizer to ``max_length - 2`` tokens, special ones included.

    Args:
        records: records whose content is ``Labelled``.
        labels: names of the labels, in the order of the model's logits.

    Raises: ConfigError for a length that leaves no room; DataError naming the record for a label that is not in
        ``labels``.
    """
    rows, cut = encode_labelled(records, tokenizer, max_length, labels)
    return Tokens(rows, padding=tokenizer.pad_token_id, width=max_length, truncated=int(cut.sum()))


def encode_labelled(
    records: Sequence[Record], tokenizer: Any, max_length: int, labels: Sequence[str]
) -> tuple[list[NDArray[np.int32]], NDArray[np.bool_]]:
    """The rows of ``labelled_tokens``, and (records,) which texts were cut. Raises as it does."""
    most = max_length - BESIDE_TEXT
    if most < 3:
        raise ConfigError("training.max_length", f"{max_length} is below 5", fix="allow at least five tokens")
    numbers = {label: number for number, label in enumerate(labels)}
    contents = [_content(record, numbers, labels) for record in records]
    texts = [content.text for content in contents]
    whole = _encode(texts, tokenizer) if texts else []
    cut = [number for number, ids in enumerate(whole) if len(ids) > most]
    if cut:  # again, for only the tokenizer knows which special tokens stay
        # A fast tokenizer keeps this setting and would be delivered with it, which tells that some record was too long.
        cutting = copy.deepcopy(tokenizer)
        short = _encode([texts[number] for number in cut], cutting, truncation=True, max_length=most)
        for number, ids in zip(cut, short, strict=True):
            whole[number] = ids
    rows = []
    for ids, content in zip(whole, contents, strict=True):
        tokens = ids or [tokenizer.pad_token_id]  # a text of which the tokenizer keeps nothing
        row = np.array([*tokens, numbers[content.label]], dtype=np.int32)
        rows.append(with_context(row, np.arange(len(row)) == len(tokens)))
    return rows, np.isin(np.arange(len(records)), cut)


def _encode(texts: list[str], tokenizer: Any, **options: Any) -> list[list[int]]:
    return [list(ids) for ids in tokenizer(texts, verbose=False, **options)["input_ids"]]


def _content(record: Record, numbers: dict[str, int], labels: Sequence[str]) -> Labelled:
    content = record.content
    if not isinstance(content, Labelled):
        raise DataError("has no label", fix="name the column of labels", file=record.file, row=record.row)
    if content.label not in numbers:
        fix = "give records with these labels only, or name all labels; -1, as in GLUE's test parts, is a hidden one"
        problem = f"has a label that is not one of {', '.join(labels)}"
        raise DataError(problem, fix=fix, file=record.file, row=record.row)
    return content
