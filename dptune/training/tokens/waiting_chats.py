"""Chats up to an answer that is to be written: what the model reads before it, and what ends it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from dptune.records.reading.record import Chat, Record
from dptune.training.tokens.chat_template import TurnError, Turns
from dptune.training.tokens.encoding import chat_ids, check_calls, refusal, render_record

_MADE_UP = {"role": "assistant", "content": "Yes."}


@dataclass(frozen=True)
class Waiting:
    """A chat that waits for an answer, as the tokenizer's template renders it. As private as the chat.

    Attributes:
        prompt: all that stands before what the answer says, special tokens included (``encoding.chat_ids``). Training
            showed the model the same, with what the template opens an answer with, such as an empty thought.
        behind: what the template puts behind the answer.
        answer: what the chat's own last message says, as the template renders it, without special tokens; empty where
            nobody answered.
    """

    prompt: str = field(repr=False)
    behind: str
    answer: str = field(repr=False)


def without_answers(records: Iterable[Record], tokenizer: Any) -> list[Waiting]:
    """Chats without their last answers, which outputs are compared with.

    Raises: DataError naming the record for a chat that does not end in an assistant's text, or that the template does
        not take; ConfigError for a tokenizer without a template.
    """
    found = []
    special = [re.escape(token.content) for token in tokenizer.added_tokens_decoder.values() if token.special]
    specials = re.compile("|".join(special) or "$^")
    for record in records:
        *before, last = _chat(record).messages
        text = str(last.get("content") or "").strip()
        if not before or last["role"] != "assistant" or not text or last.get("tool_calls"):
            problem = "the chat does not end in an assistant's text, which an output could be compared with"
            raise refusal(record, problem, "give one as the last message, without tool_calls, or leave the row out")
        chat = _waiting(record, tokenizer)
        found.append(replace(chat, answer=specials.sub("", chat.answer).strip()))
    return found


def unanswered(records: Iterable[Record], tokenizer: Any) -> list[Waiting]:
    """Chats whose answers nobody has written. These answers have no thoughts before them.

    Raises: DataError naming the record for a chat that ends in an answer, or that the template does not take;
        ConfigError for a tokenizer without a template.
    """
    found = []
    for record in records:
        chat = _chat(record)
        if chat.messages[-1]["role"] == "assistant":
            fix = "leave its last message out, which the model is to write"
            if len(record.columns) > 1:
                fix = f"name {record.columns[0]} as data.prompt and no completion, which the model is to write"
            raise refusal(record, "the chat ends in an answer", fix)
        answered = replace(chat, messages=(*chat.messages, _MADE_UP))
        found.append(replace(_waiting(replace(record, content=answered), tokenizer), answer=""))
    return found


def _chat(record: Record) -> Chat:
    assert isinstance(record.content, Chat)
    return record.content


def _waiting(record: Record, tokenizer: Any) -> Waiting:
    chat = _chat(record)
    check_calls(record, chat, tokenizer)
    turns = Turns(chat.messages, partial(render_record, record, chat, tokenizer))
    try:
        start, end = turns.last_said()
    except TurnError:
        problem = "the chat template leaves out what the last answer says, or writes it otherwise than others"
        raise refusal(record, problem, "use another chat template, or leave the row out") from None
    # A space before an answer is part of the answer's first token.
    return Waiting(turns.text[:start].rstrip(" "), turns.text[end:], turns.text[start:end])


def ends_of_answers(chats: Iterable[Waiting], tokenizer: Any) -> list[int]:
    """Ids of the tokens that end an answer: the first token of its own that the template puts behind one.

    It need not be the tokenizer's end-of-text token: Gemma's template writes ``<end_of_turn>``. Empty where a template
    writes no such token.
    """
    added = {*tokenizer.added_tokens_decoder}
    found = {behind: chat_ids(behind, tokenizer) for behind in {one.behind for one in chats}}
    return sorted({next(one for one in ids if one in added) for ids in found.values() if added & {*ids}})
