"""Chats as text, by the tokenizer's own template, with one date for ever."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

#: The date that templates which print today's are given; the one that Llama 3's own falls back on. With today's, a run
#: could not go on tomorrow, for its records would be others, and an attack would look for texts that nobody trained on.
DATE = datetime(2024, 7, 26)
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
        options: of ``apply_chat_template``, such as ``add_generation_prompt``.
    """
    template = dated_template(tokenizer)
    return str(tokenizer.apply_chat_template(list(messages), chat_template=template, tokenize=False, **options))
