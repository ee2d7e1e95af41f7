"""Encodes a user's own records as token ids; a prompt's tokens are read by the model and have no loss.

A text or a target is followed by the tokenizer's end-of-text token; a beginning-of-text token stands where the
tokenizer puts one. A chat is what the tokenizer's own template makes of it, and nothing more.

For a classifier, a row is the ids of a text, and then the number of its label. The label is the one entry of a row that
counts in the loss, so that tokens and label cannot get separated. The model never sees it (``losses.label_logits``).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from transformers.utils.chat_template_utils import render_jinja_template

from dptune.core.errors import ConfigError, DataError
from dptune.core.settings import LossOn
from dptune.records.parquet_file import decode_content
from dptune.records.reading.record import Chat, Labelled, PromptTarget, Record, Text
from dptune.records.reading.report import TokenCounts
from dptune.training.data import Tokens, tokenize, with_context
from dptune.training.tokens.chat_template import TurnError, Turns, dated_template, render_chat, with_content
from dptune.training.tokens.token_file import token_batch

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_DEFAULT: dict[type, LossOn] = {Text: "all", PromptTarget: "completion", Chat: "assistant"}
_RECORDS = 4096  # number of records of one batch of a token file

Counted = tuple[list[int], NDArray[np.bool_]]  # ids, and which of them count


def tokens_of(records: Sequence[Record], tokenizer: Any, max_length: int, loss_on: LossOn | None = None) -> Tokens:
    """All records in memory, each cut to ``max_length - 1`` tokens, the last ones going first.

    Args:
        loss_on: None counts targets, what assistants say, and all of a text.

    Raises: ConfigError for a length that leaves nothing to predict, a ``loss_on`` that the records have nothing for, or
        a chat without a chat template; DataError naming the record for messages that the template does not take, or
        in which what an assistant says cannot be found.
    """
    rows, cut = encode_records(records, tokenizer, max_length, loss_on)
    return Tokens(rows, padding=tokenizer.pad_token_id, width=max_length, truncated=int(cut.sum()))


def record_batches(
    records: Sequence[Record], tokenizer: Any, max_length: int, loss_on: LossOn | None = None
) -> Iterator[pa.RecordBatch]:
    """The same rows as batches for ``token_file.write``, each with its unit's key."""
    for start in range(0, len(records), _RECORDS):
        some = records[start : start + _RECORDS]
        rows, cut = encode_records(some, tokenizer, max_length, loss_on)
        yield token_batch(rows, np.array([record.unit for record in some], dtype=np.int64), cut)


def encode_stored(
    batch: pa.RecordBatch, tokenizer: Any, *, form: str, file: str, max_length: int
) -> tuple[list[NDArray[np.int32]], NDArray[np.bool_]]:
    """The rows of records from columns record and text of the pipeline's file.

    Args:
        form: what the records are (``dptune.records.parquet_file.FORMS``).
        file: what messages call their source.

    Raises: ConfigError and DataError as ``encode_records``.
    """
    stored = zip(batch.column("record").to_pylist(), batch.column("text").to_pylist(), strict=True)
    return encode_records([_stored(text, form, file, row) for row, text in stored], tokenizer, max_length)


def encode_stored_labels(
    batch: pa.RecordBatch, tokenizer: Any, *, file: str, max_length: int, labels: Sequence[str]
) -> tuple[list[NDArray[np.int32]], NDArray[np.bool_]]:
    """The rows of a classifier's records as the pipeline stores them.

    Raises: ConfigError and DataError as ``labelled.encode_labelled``.
    """
    stored = zip(batch.column("record").to_pylist(), batch.column("text").to_pylist(), strict=True)
    found = [_stored(text, "label", file, row) for row, text in stored]
    return encode_labelled(found, tokenizer, max_length, labels)


def stored_tokens(texts: Sequence[str], tokenizer: Any, *, form: str, file: str, max_length: int) -> Tokens:
    """The tokens of records as the pipeline's column ``text`` holds them; all in memory. See ``encode_stored``."""
    if form == "text":
        return tokenize(list(texts), tokenizer, max_length)  # many at a time
    found = [_stored(text, form, file, row) for row, text in enumerate(texts, start=1)]
    return tokens_of(found, tokenizer, max_length)


def _stored(text: str, form: str, file: str, row: int) -> Record:
    # An empty text is a canary that its coin left out, whatever the form: a unit without records.
    return Record(decode_content(text, form) if text else Text(""), 0, file, row)


def summary(tokens: Tokens) -> TokenCounts:
    """Counts of tokens for ``reading.report.describe``. Private."""
    return TokenCounts([len(row) for row in tokens.rows], tokens.width - 1, tokens.truncated, tokens.without_loss)


def encode_records(
    records: Sequence[Record], tokenizer: Any, max_length: int, loss_on: LossOn | None = None
) -> tuple[list[NDArray[np.int32]], NDArray[np.bool_]]:
    """The rows of ``tokens_of``, and (records,) which were cut. Raises as it does."""
    if max_length < 3:
        raise ConfigError("training.max_length", f"{max_length} is below 3", fix="allow at least three tokens")
    rows, cut = [], np.zeros(len(records), dtype=bool)
    for place, record in enumerate(records):
        ids, counts = _encode_record(record, tokenizer, loss_on)
        cut[place] = len(ids) > max_length - 1
        rows.append(with_context(np.array(ids[: max_length - 1], dtype=np.int32), counts[: max_length - 1]))
    return rows, cut


def _encode_record(record: Record, tokenizer: Any, loss_on: LossOn | None) -> Counted:
    """All token ids of one record, and which count in the loss."""
    content = record.content
    if isinstance(content, Labelled):
        fix = "set task to classify, or name no column of labels"
        raise DataError("has a label, which only a classifier learns", fix=fix, file=record.file, row=record.row)
    own: LossOn = "completion" if isinstance(content, Chat) and content.prompt else _DEFAULT[type(content)]
    loss_on = loss_on or own
    if loss_on not in ("all", own):
        fix = f"use all, or {own}"
        problem = f"{loss_on!r} does not exist in row {record.row} of {record.file}"
        raise ConfigError("training.loss_on", problem, fix=fix)
    if isinstance(content, Chat):
        return _chat(record, content, tokenizer, every=loss_on == "all")
    if isinstance(content, Text):
        return _whole(_with_end(_ids(content.text, tokenizer), tokenizer))
    ids = _with_end(_ids(content.prompt + content.target, tokenizer), tokenizer)
    if loss_on == "all":
        return _whole(ids)
    # A token that holds characters of both sides counts; with them apart, as most tokenizers keep them, this is the
    # number of the prompt's own tokens.
    return ids, np.arange(len(ids)) >= _common_prefix(_ids(content.prompt, tokenizer), ids)


def _ids(text: str, tokenizer: Any) -> list[int]:
    """Ids with the special tokens that the tokenizer adds by itself."""
    return list(tokenizer(text, truncation=False, verbose=False)["input_ids"])


def _with_end(ids: list[int], tokenizer: Any) -> list[int]:
    end = tokenizer.eos_token_id
    return ids if end is None or ids[-1:] == [end] else [*ids, end]


def _whole(ids: list[int]) -> Counted:
    return ids, np.ones(len(ids), dtype=bool)


def _common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Number of tokens that both begin with."""
    pairs = zip(first, second, strict=False)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))


# --- chats ---------------------------------------------------------------------------------------------------


def _chat(record: Record, chat: Chat, tokenizer: Any, *, every: bool) -> Counted:
    learned = [place for place, message in enumerate(chat.messages) if message["role"] == "assistant"]
    if not every and not learned and not chat.prompt:
        raise refusal(record, "no message is an assistant's", "give one, or use training.loss_on: all")
    if not every and not chat.prompt and tokenizer.is_fast and _MARKED.search(template_of(tokenizer)):
        return _encode_marked(record, chat, tokenizer)
    check_calls(record, chat, tokenizer)
    turns = Turns(chat.messages, partial(render_record, record, chat, tokenizer))
    ids = chat_ids(turns.text, tokenizer)
    if every:
        return _whole(ids)
    counts = np.zeros(len(ids), dtype=bool)
    try:
        if chat.prompt:
            # All that follows the prompt for it, as far as the chat begins so, is the completion: that is TRL's rule.
            prompted = render_record(record, chat, tokenizer, chat.messages[: chat.prompt], add_generation_prompt=True)
            own = _common_prefix(chat_ids(turns.text[: turns.start(chat.prompt)], tokenizer), ids)
            counts[max(own, _common_prefix(chat_ids(prompted, tokenizer), ids)) :] = True
        for place in () if chat.prompt else learned:
            ends = (chat_ids(turns.text[:end], tokenizer) for end in turns.span(place))
            first, last = (_common_prefix(own, ids) for own in ends)
            counts[first:last] = True
    except TurnError as error:
        problem = "is rendered otherwise by the chat template in a longer chat, which leaves its text out"
        fix = "use a template that marks generations, or training.loss_on: all"
        raise refusal(record, problem, fix, error.place) from None
    return ids, counts


def chat_ids(text: str, tokenizer: Any) -> list[int]:
    """Ids of a rendered chat, which holds its special tokens already."""
    return list(tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"])


def check_calls(record: Record, chat: Chat, tokenizer: Any) -> None:
    """Raise DataError for a message that only calls tools, where the template knows none: nothing would be rendered."""
    if "tool_calls" not in template_of(tokenizer):
        for place, message in enumerate(chat.messages):
            if message.get("tool_calls") and not message.get("content"):  # else an empty answer would be learned
                problem = "has only tool_calls, which the chat template does not know"
                fix = "use a model whose template does, or give what it says as content"
                raise refusal(record, problem, fix, place)


def _encode_marked(record: Record, chat: Chat, tokenizer: Any) -> Counted:
    """The tokens of a chat; those count of which a character lies between the template's marks.

    The tokenizer's own ``return_assistant_tokens_mask`` counts all the rest of a chat where the last character between
    marks belongs to no token, as a space that a tokenizer drops.
    """

    def marked(messages: Sequence[Any]) -> tuple[str, list[tuple[int, int]]]:
        (text,), (spans,) = render_jinja_template(
            conversations=[list(messages)],
            chat_template=dated_template(tokenizer),
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map | chat.options,
        )
        return text, spans

    with _template_errors(record):
        text, spans = marked(with_content(chat.messages, lambda messages: marked(messages)[0]))
    found = tokenizer(text, add_special_tokens=False, truncation=False, verbose=False, return_offsets_mapping=True)
    starts, ends = np.array(found["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
    counts = np.zeros(len(starts), dtype=bool)
    for first, last in spans:
        counts |= (starts < last) & (ends > first)
    return list(found["input_ids"]), counts


def template_of(tokenizer: Any) -> str:
    try:
        return str(tokenizer.get_chat_template())
    except ValueError:
        fix = "use an instruction-tuned model, or give prompts and completions"
        raise ConfigError("data.messages", "the tokenizer has no chat template", fix=fix) from None


def render_record(record: Record, chat: Chat, tokenizer: Any, messages: Sequence[Any], **options: Any) -> str:
    with _template_errors(record):
        return render_chat(messages, tokenizer, **chat.options, **options)


@contextmanager
def _template_errors(record: Record) -> Iterator[None]:
    """Context in which any exception of a chat template becomes a DataError that names the record."""
    try:
        yield
    except Exception as error:
        problem = f"the chat template does not take these messages ({type(error).__name__})"
        raise refusal(
            record, problem, "give the roles and the order that the model knows, and each message a content"
        ) from error


def refusal(record: Record, problem: str, fix: str, place: int | None = None) -> DataError:
    """An error about a chat, with its file, row and column; ``problem`` is about its message at ``place``, from 0."""
    columns = record.columns
    if place is not None and isinstance(record.content, Chat):
        if len(columns) > 1:  # each column counts its own messages
            first = record.content.prompt
            columns, place = (columns[:1], place) if place < first else (columns[1:], place - first)
        problem = f"message {place + 1} {problem}"
    return DataError(problem, fix=fix, file=record.file, row=record.row, column=columns)


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
