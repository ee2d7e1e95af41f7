"""Records as attacks read them: the text that training reads, split where an attacker begins to guess."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dptune.audit.likelihood import Passage
from dptune.corpus.canaries import content_with, suffix
from dptune.corpus.reading.record import Chat, Content, PromptTarget
from dptune.training.chat_template import render_chat


def passage_of(content: Content, tokenizer: Any) -> Passage:
    """The passage of a record: what is answered given the prompt, or the second half of a text given the first.

    Of a chat, the ending is what the assistant says last, with what the tokenizer's chat template puts after it.
    """
    if isinstance(content, Chat):
        last = max((place for place, one in enumerate(content.messages) if one["role"] == "assistant"), default=0)
        whole = _rendered(content.messages[: last + 1], tokenizer, **content.options)
        before = _rendered(content.messages[:last], tokenizer, add_generation_prompt=True, **content.options)
        shared = _shared(before, whole)  # some templates render a message that is followed by others otherwise
        return Passage(whole[:shared], whole[shared:], rendered=True)
    if isinstance(content, PromptTarget):
        return Passage(content.prompt, content.target)
    text = content.text
    middle = text.find(" ", len(text) // 2)
    middle = middle if middle > 0 else len(text) // 2
    return Passage(text[:middle], text[middle:])


def _shared(one: str, other: str) -> int:
    """Number of characters that both begin with."""
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _rendered(messages: Sequence[Any], tokenizer: Any, **options: Any) -> str:
    return render_chat(messages, tokenizer, **options) if messages else ""


def canary_passage(carrier: str, secret: str, form: str, tokenizer: Any) -> Passage:
    """The passage of a canary, whose ending holds its secret.

    Args:
        form: what the records are (``dptune.corpus.records.FORMS``).
    """
    content = content_with(carrier, secret, form)
    return passage_of(content, tokenizer) if isinstance(content, Chat) else Passage(carrier, suffix(secret))
