"""Chats as text, by the tokenizer's own template, with one date for ever."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from difflib import SequenceMatcher
from typing import Any

from dptune.core.errors import ConfigError, first_line

#: The date that templates which print today's are given; the one that Llama 3's own falls back on. With today's, a run
#: could not go on tomorrow, for its records would be others, and an attack would look for texts that nobody trained on.
DATE = datetime(2024, 7, 26)
_SHOWN = 40  # characters of a rendered chat
_CODES = "aAbBcdHIjmMpSUwxXyYZz%"
_REPLACED = "".join(f" | replace('%{code}', '{DATE.strftime(f'%{code}')}')" for code in _CODES)
#: A macro in place of transformers' function, which tells the time; what follows keeps its first line break.
_MACRO = f"{{%- macro strftime_now(form) -%}}{{{{- form{_REPLACED} -}}}}{{%- endmacro -%}}{{{{ '' }}}}"


def dated_template(tokenizer: Any) -> str:
    """The tokenizer's chat template, which prints ``DATE`` in place of today's. Raises: ValueError if it has none."""
    template = str(tokenizer.get_chat_template())
    return _MACRO + template if "strftime_now" in template else template


def render_chat(messages: Sequence[Mapping[str, Any]], tokenizer: Any, **options: Any) -> str:
    """The text of a chat, special tokens included. Raises: whatever the template does.

    Args:
        options: of ``apply_chat_template``, such as ``add_generation_prompt`` and ``Chat.options``.
    """
    template = dated_template(tokenizer)

    def render(given: Sequence[Mapping[str, Any]]) -> str:
        return str(tokenizer.apply_chat_template(list(given), chat_template=template, tokenize=False, **options))

    return render(with_content(messages, render))


def check_template(tokenizer: Any) -> None:
    """Try a chat template on made-up chats: what it makes of them must follow what they say.

    A template that takes none of them is at fault, and no row of the data.

    Raises: ConfigError for one that is no template, that raises of each of them, that renders one otherwise each time,
        or all alike. A tokenizer without a template passes.
    """
    try:
        dated_template(tokenizer)
    except ValueError:
        return
    said, errors = [], []
    for system in (False, True):
        for parts in (False, True):
            texts: list[str] = []
            try:
                made_up = [_made_up(text, system=system, parts=parts) for text in ("Yes.", "No.", "Yes.")]
                texts = [render_chat(messages, tokenizer) for messages in made_up]
            except Exception as error:  # whatever a template may raise
                errors.append(error)
            said += [texts] if texts else []
    fix = "correct chat_template.jinja, or chat_template in tokenizer_config.json; or use another model"
    if not said:
        problem = f"fails on a made-up chat of a user and an assistant ({type(errors[0]).__name__}: "
        raise ConfigError("tokenizer.chat_template", f"{problem}{first_line(errors[0])})", fix=fix)
    if any(one != again for one, _, again in said):
        problem = "renders the same chat differently each time, so that a run could not be resumed"
        raise ConfigError("tokenizer.chat_template", problem, fix=fix)
    if not any(one != other for one, other, _ in said):
        shown = repr(said[0][0][:_SHOWN])
        problem = f"renders the same text for chats with different answers ({shown}), so that nothing would be learned"
        raise ConfigError("tokenizer.chat_template", problem, fix=fix)


def _made_up(answer: str, *, system: bool, parts: bool) -> list[dict[str, Any]]:
    turns = [("system", "Be brief.")] if system else []
    turns += [("user", "Is it so?"), ("assistant", answer)]
    return [{"role": role, "content": [{"type": "text", "text": text}] if parts else text} for role, text in turns]


def with_content(
    messages: Sequence[Mapping[str, Any]], render: Callable[[Sequence[Mapping[str, Any]]], str]
) -> list[Mapping[str, Any]]:
    """The messages, with an empty content in those that have none if the template (DeepSeek's) fails over them.

    transformers takes ``content: null`` away before a template sees it, so that no other value is to be had.

    Raises: whatever the template does, also if it renders the calls of tools only where it sees no content.
    """
    silent = [message for message in messages if "content" not in message]
    if not silent:
        return list(messages)
    try:
        render(messages)
        return list(messages)
    except Exception:
        filled: list[Mapping[str, Any]] = [{"content": "", **message} for message in messages]
        text = render(filled)
        names = [str(call.get("function", call).get("name")) for one in silent for call in one.get("tool_calls", ())]
        if not all(name in text for name in names):
            raise
        return filled


class TurnError(ValueError):
    """A message, by its place from 0, that cannot be found in the rendered chat."""

    def __init__(self, place: int) -> None:
        super().__init__(place)
        self.place = place


class Turns:
    """The places of messages in the text of a chat, whatever the template makes of them when others follow.

    Where the chat up to a message is rendered as the whole chat begins, that is where the message ends. Some templates
    render a message otherwise once others follow: they drop the thoughts of earlier answers. There the message's own
    text is replaced, in the whole chat and in the chat that ends with it: what changes is the message, and what stays
    behind it in both is the end of its turn.
    """

    def __init__(self, messages: Sequence[Mapping[str, Any]], render: Callable[..., str]) -> None:
        """Render the whole chat.

        Args:
            render: from messages and options (``add_generation_prompt``) to text.
        """
        self._messages, self._render = messages, render
        self.text = render(messages)
        self._mark = next(chr(code) for code in range(0xE000, 0xF900) if chr(code) not in self.text)

    def end(self, count: int) -> int:
        """Where the first ``count`` messages end in ``text``. Raises: TurnError if the last of them is not found."""
        if count in (0, len(self._messages)):
            return len(self.text) if count else 0
        alone = self._render(self._messages[:count])
        if self.text.startswith(alone):
            return len(alone)
        changed = self._changed(count - 1)
        last = len(self.text) - len(self._behind(self.text, self._render(changed), count))
        ends = [self._behind(alone, self._render(changed[:count]), count)]
        # The last answer of all may end with a token of its own (gpt-oss); before a prompt it ends as in a longer chat.
        prompt = self._prompt(count - 1)
        prompted = self._render(self._messages[:count], add_generation_prompt=True)
        other = self._render(changed[:count], add_generation_prompt=True)
        if prompt and (end := self._behind(prompted, other, count)).endswith(prompt):
            ends.append(end.removesuffix(prompt))
        return last + max(_shared(self.text[last:], end) for end in ends)

    def span(self, place: int) -> tuple[int, int]:
        """Where what a message says begins and ends in ``text``.

        Raises: TurnError if it is not found, or has no character left, as where a template reverses the messages.
        """
        start, end = self.start(place), self.end(place + 1)
        if start >= end and self._messages[place].get("content"):
            raise TurnError(place)
        return start, end

    def last_said(self) -> tuple[int, int]:
        """Where what the last message says begins and ends in ``text``: behind all that the template opens it with, and
        before all that closes it.

        Raises: TurnError if it is not found, or has no character left.
        """
        other = self._render(self._changed(len(self._messages) - 1))
        start, behind = _shared(self.text, other), _shared(self.text[::-1], other[::-1])
        if self._mark not in other or start + behind >= len(self.text):
            raise TurnError(len(self._messages) - 1)
        return start, len(self.text) - behind

    def start(self, place: int) -> int:
        """Where what a message says begins in ``text``: behind the prompt for it, or where it leaves that prompt.

        Raises: TurnError if it is not found.
        """
        if place == 0:
            # An assistant speaks first, and templates take no empty chat: what the chat has, before the message's own
            # text, of the prompt for a second turn. That may open a thought, or begin with the end of another turn.
            before = self.text[: _shared(self.text, self._render(self._changed(0)))]
            found = SequenceMatcher(None, before, self._prompt(1), autojunk=False).find_longest_match()
            return found.a + found.size
        prompted = self._render(self._messages[:place], add_generation_prompt=True)
        if self.text.startswith(prompted):
            return len(prompted)
        prompt, end = self._prompt(place), self.end(place)
        start = end + _shared(self.text[end:], prompt)
        if start == end + len(prompt):
            return start
        # The prompt opens a thought that this answer does not have. Letters that both happen to begin with are its own.
        other = self._render(self._changed(place))
        if self._mark not in other:
            raise TurnError(place)
        return max(end, min(start, _shared(self.text, other)))

    def _prompt(self, place: int) -> str:
        """The prompt for what a message says, without the messages before it; empty before the first one."""
        if place == 0:
            return ""
        before, prompted = (self._render(self._messages[:place], add_generation_prompt=on) for on in (False, True))
        return prompted[_shared(before, prompted) :]

    def _behind(self, text: str, other: str, count: int) -> str:
        """What stands behind the last of ``count`` messages in two texts that differ in it. Raises: TurnError."""
        if self._mark not in other:
            raise TurnError(count - 1)
        return text[len(text) - _shared(text[::-1], other[::-1]) :]

    def _changed(self, place: int) -> list[Mapping[str, Any]]:
        """The messages with another text in one of them, which is nowhere in the chat."""
        message = self._messages[place]
        kept = ("role", "name", "tool_call_id")
        texts = {name: self._mark for name, value in message.items() if isinstance(value, str) and name not in kept}
        return [*self._messages[:place], {**message, **texts, "content": self._mark}, *self._messages[place + 1 :]]


def _shared(one: str, other: str) -> int:
    """Number of characters that both begin with."""
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
