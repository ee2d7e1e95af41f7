"""Shapes of rows that public data sets have: which columns make a record, and how chats are written in them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dptune.core.errors import DataError
from dptune.records.reading.record import TEMPLATE_INPUTS, Chat
from dptune.records.reading.spelling import checked_text

#: Makes a DataError about the row at hand from column, problem and fix; the caller raises it.
Refuse = Callable[[str, str, str], DataError]

#: Columns that are found by their names, for each way of making a record, the first that is there.
KNOWN: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "messages": (("messages",), ("conversations",), ("conversation",)),
    "pair": (("prompt", "completion"),),
    "text": (("text",),),
}
#: Stanford Alpaca's columns, which are found where none of ``KNOWN`` is; ``input`` may be absent.
ALPACA, ALPACA_INPUT = ("instruction", "output"), "input"
#: Columns that other data sets call so: what is asked, and what is answered.
_PAIRS = (("instruction", "question", "query", "input"), ("response", "answer", "output", "target"))
#: Fields by which other trainers leave a message out of the loss (axolotl, ms-swift).
_TRAINED = ("train", "training", "loss")
#: Roles in ShareGPT's messages, ``from`` and ``value``, and what chat templates call them.
_SHAREGPT = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "bot"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "system": "system",
    "function_call": "function_call",
}
#: Parameters of ``apply_chat_template`` and variables of every template, which no row may set.
_RESERVED = {
    *("conversation", "messages", "chat_template", "tokenize", "tokenizer_kwargs", "padding", "truncation"),
    *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "sanitize_control_tokens"),
    *("add_generation_prompt", "continue_final_message", "strftime_now"),
}
_SUCH_AS = "give a list of messages such as {'role': 'user', 'content': 'Hello'}"


def columns_of(way: str, columns: Sequence[str]) -> tuple[str, ...] | None:
    """The columns that make a record in one of the ways of ``KNOWN``, by their names; None if they are not there."""
    return next((names for names in KNOWN[way] if set(names) <= set(columns)), None)


def fix_of(columns: Sequence[str]) -> str | None:
    """What reads rows of a known shape from which nothing is learned as it stands; None for an unknown shape."""
    if {"chosen", "rejected"} <= set(columns):
        if "prompt" in columns:
            return (
                "preferences are not learned: name chosen as data.messages if it holds whole chats, else prompt as "
                "data.prompt and chosen as data.completion"
            )
        return "preferences are not learned: name chosen as data.messages, or as data.text if it is text"
    if "input_ids" in columns:
        return "give the texts that these token ids were made of"
    return None


def pair_fix(columns: Sequence[str]) -> str | None:
    """What reads rows of a question and its answer (as GSM8K, Dolly and OpenOrca have them); None for other rows."""
    prompt, completion = (next((name for name in names if name in columns), None) for names in _PAIRS)
    if prompt is None or completion is None:
        return None
    return f"name {prompt!r} as data.prompt and {completion!r} as data.completion, or give data.template"


def alpaca_prompt(instruction: str, more: str) -> str:
    """The prompt that Stanford Alpaca (github.com/tatsu-lab/stanford_alpaca) makes of an instruction and its input."""
    beside = ", paired with an input that provides further context" if more.strip() else ""
    given = f"\n\n### Input:\n{more}" if more.strip() else ""
    return (
        f"Below is an instruction that describes a task{beside}. Write a response that appropriately completes the "
        f"request.\n\n### Instruction:\n{instruction}{given}\n\n### Response:"
    )


def is_messages(value: Any) -> bool:
    """Whether a prompt or a completion is messages: a list, or JSON of a list of mappings with a role."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = _parsed(value)
        return isinstance(value, list) and bool(value) and all(_has_a_role(one) for one in value)
    return isinstance(value, list | tuple)


def _has_a_role(message: Any) -> bool:
    return isinstance(message, Mapping) and ("role" in message or "from" in message)


def chat_of(row: Mapping[str, Any], columns: Sequence[str], named: Sequence[str | None], refuse: Refuse) -> Chat:
    """The chat of a row.

    Args:
        columns: that of the messages, or those of a prompt's messages and of its completion's.
        named: columns that hold something else, though one may be called as an input of templates.

    Raises: DataError for messages, or inputs of the template, that no template takes.
    """
    parts = [_messages(row[column], column, refuse) for column in columns]
    inputs = {}
    for name in TEMPLATE_INPUTS:
        given = row.get(name) if name not in (*columns, *named) else None
        value = present(given)
        if isinstance(given, str):  # a table holds lists as JSON, and so do many data sets, for Arrow's empty names
            value = _parsed(given)
            if value is None and given.strip() not in ("", "null"):
                raise refuse(name, "is not valid JSON", "give a list or a mapping, or one as JSON")
        if value is None or value != value:  # a NaN is how data frames say nothing
            continue
        kind, described = (Mapping, "mapping") if name == "chat_template_kwargs" else (list, "list of mappings")
        if not isinstance(value, kind) or (kind is list and not all(isinstance(one, Mapping) for one in value)):
            raise refuse(name, f"is not a {described}", f"give a {described}, or one as JSON, or leave it out")
        if kind is Mapping and (taken := sorted(_RESERVED & {*value})):
            raise refuse(name, f"sets {taken[0]}, which a row must not set", "leave it out there")
        _check_texts(value, name, refuse)
        inputs[name] = value
    return Chat(tuple(message for part in parts for message in part), inputs, len(parts[0]) if parts[1:] else 0)


def _messages(value: Any, column: str, refuse: Refuse) -> list[Mapping[str, Any]]:
    value = plain(value)
    if isinstance(value, str):  # a table holds lists as JSON
        value = _parsed(value)
        if value is None:
            raise refuse(column, "is neither a list of messages nor JSON of such a list", _SUCH_AS)
    if not isinstance(value, list) or not value:
        raise refuse(column, "is not a list of messages", _SUCH_AS)
    found: list[Mapping[str, Any]] = []
    for place, message in enumerate(value, start=1):
        if not isinstance(message, Mapping):
            raise refuse(column, f"message {place} is not a mapping", _SUCH_AS)
        _check_texts(message, column, refuse)
        found.append(_message(present(message), f"message {place}", column, refuse))
    return found


def _message(message: dict[str, Any], called: str, column: str, refuse: Refuse) -> dict[str, Any]:
    """A message as chat templates take it: ``role``, ``content``, and what else it has."""
    if "role" not in message and "content" not in message and {"from", "value"} <= {*message}:
        if not isinstance(message["from"], str) or message["from"] not in _SHAREGPT:
            fix = f"use one of {', '.join(_SHAREGPT)}, or write messages with role, content and tool_calls"
            raise refuse(column, f"{called} is from a role that is not known", fix)
        said = {"role": _SHAREGPT[message["from"]], "content": message["value"]}
        message = said | {name: one for name, one in message.items() if name not in ("from", "value")}
    if message.get("role") == "function_call":  # LLaMA-Factory's name for an assistant's call of tools
        message = message | {"role": "assistant", "tool_calls": _calls(message.get("content"), called, column, refuse)}
        del message["content"]
    if isinstance(message.get("content"), list):
        texts = [one if isinstance(one, str) else _text_of_part(one) for one in message["content"]]
        if None in texts:
            fix = "give only parts such as {'type': 'text', 'text': 'Hello'}: images and sounds are not learned"
            raise refuse(column, f"{called} has a part in its content that is not text", fix)
        message = message | {"content": "".join(text for text in texts if text is not None)}
    for name in ("role", "content"):
        # a content of null beside tool_calls is gone by ``present``, as transformers itself drops it before it renders
        unsaid = name == "content" and name not in message and bool(message.get("tool_calls"))
        if not isinstance(message.get(name), str) and not unsaid:
            fix = _SUCH_AS if name == "role" else f"{_SUCH_AS}; only a message with tool_calls may have none"
            raise refuse(column, f"{called} has no text as its {name}", fix)
    _check_role(message["role"], called, column, refuse)
    unlearned = [name for name in _TRAINED if name in message and message[name] in (False, "false", "False")]
    weight = message.get("weight", 1)
    if weight != 1 and weight == weight:  # a NaN is how data frames say nothing
        unlearned.append("weight")
    if message["role"] == "assistant" and unlearned:
        fix = f"remove the record, or the field {unlearned[0]}, after which the message is learned"
        raise refuse(column, f"{called} has a {unlearned[0]} of its own, and all that assistants say is learned", fix)
    return message


def _check_role(role: str, called: str, column: str, refuse: Refuse) -> None:
    """Raise DataError for a role that templates render as nothing, or not at all: "User", or "human" beside content."""
    known = _SHAREGPT.get(role.lower())
    if known in ("user", "assistant", "system") and role != known:
        raise refuse(column, f"{called} has the role {role!r}, which templates do not know", f"write {known!r}")


def _calls(value: Any, called: str, column: str, refuse: Refuse) -> list[dict[str, Any]]:
    """The calls of tools in a ``function_call``, whose text is JSON of one call or of a list of them."""
    value = _parsed(value) if isinstance(value, str) else value
    calls = value if isinstance(value, list) else [value]
    for call in calls:
        if not isinstance(call, Mapping) or not isinstance(call.get("name"), str) or "arguments" not in call:
            fix = """write it as {"name": "f", "arguments": {}}, or as a message with role, content and tool_calls"""
            raise refuse(column, f"{called} is a function_call that is not JSON of a call with name and arguments", fix)
    if not calls:
        raise refuse(column, f"{called} is a function_call without a call", "leave it out")
    return [{"type": "function", "function": {name: call[name] for name in ("name", "arguments")}} for call in calls]


def _text_of_part(part: Any) -> str | None:
    """The text of a part of a message's content; None if it is an image, or anything else."""
    if not isinstance(part, Mapping) or part.get("type", "text") not in ("text", "input_text", "output_text"):
        return None
    return part["text"] if isinstance(part.get("text"), str) else None


def _parsed(text: str) -> Any:
    """The value of JSON text; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def plain(value: Any) -> Any:
    """Arrays, which data frames have in place of lists, as lists; anything else as it is."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    return list(value) if isinstance(value, tuple) else value


def present(value: Any) -> Any:
    """``value`` without the names whose value is None, in all its mappings.

    Arrow gives every message of a column the same names. One record's tool call would so add an empty name to the
    messages of all others, and change their keys and their sides of the split.
    """
    value = plain(value)
    if isinstance(value, Mapping):
        return {name: present(one) for name, one in value.items() if one is not None}
    return [present(one) for one in value] if isinstance(value, list) else value


def _check_texts(value: Any, column: str, refuse: Refuse) -> None:
    """Raise DataError for a text in a value, a name in a mapping included, that no tokenizer can read."""
    if isinstance(value, str):
        checked_text(value, lambda problem, fix: refuse(column, problem, fix))
    for one in (*value, *value.values()) if isinstance(value, Mapping) else ():
        _check_texts(one, column, refuse)
    for one in plain(value) if isinstance(value, list | tuple | np.ndarray) else ():
        _check_texts(one, column, refuse)
