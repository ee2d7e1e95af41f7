"""Characters of a text: those that no tokenizer can read, those that nobody sees, and signs of a damaged text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from dptune.core.errors import DataError
from dptune.records.reading.spelling import is_missing, seen, spelled


def checked_text(text: str, refuse: Callable[[str, str], DataError]) -> str:
    """Return ``text`` if a tokenizer can read it. Raises: DataError for NUL characters and lone surrogates."""
    if "\0" in text:
        raise refuse("holds a NUL character", "remove it; a binary file is not text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise refuse("holds half of a character (a lone surrogate)", "write it as UTF-8") from None
    return text


def is_visible(text: str) -> bool:
    """Whether a text shows anything: a character that is neither white space nor one that nobody sees."""
    return any(seen(letter).strip() for letter in text)


class Sign(NamedTuple):
    """A sign that a text is not what was meant.

    Attributes:
        says: what such texts hold, for a warning.
        fix: what to do about it.
        share: the share of texts from which the sign is believed; sound texts hold some signs now and then.
    """

    says: str
    fix: str
    share: float = 0.0


_ENCODING = "read the source in the encoding that it was written in, and save it as UTF-8"
#: Signs of damage by the name of their finding.
SIGNS = {
    "missing_texts": Sign("only say that a value is missing (NULL, N/A)", "remove these records, or fill them in"),
    "wrong_encoding": Sign("hold UTF-8 that was read in another encoding, such as \u00c3\u00bc for \u00fc", _ENCODING),
    "lost_characters": Sign("hold U+FFFD, which stands where a character was lost", _ENCODING),
    "utf7": Sign("hold UTF-7, such as +APw- for \u00fc", "decode it, and save it as UTF-8"),
    "control_characters": Sign(
        "hold control characters, as colours of a terminal and old encodings (ISO-2022) do",
        "remove or decode them, and save it as UTF-8",
    ),
    "quoted_printable": Sign("hold quoted-printable text, such as =C3=BC for \u00fc", "decode it"),
    "no_words": Sign(
        "are one run without a space (base64, a hash, a path, an address) or numbers of tokens", "decode them", 0.1
    ),
    "escapes": Sign("hold escapes such as \\u00fc, &#252; or \\n in place of characters", "decode them", 0.01),
    "printed_values": Sign("are values as Python prints them, such as b'' or ['']", "export the text itself", 0.01),
    "special_tokens": Sign(
        "hold special tokens of a tokenizer, such as <|im_end|> or [INST]",
        "remove them, or give messages: the model's own template adds its tokens",
        0.01,
    ),
    "unfilled": Sign("hold places of a template that were not filled in, such as {{ name }}", "fill them in", 0.01),
    "merge_conflict": Sign("hold a mark of a merge conflict, such as <<<<<<< HEAD", "resolve it"),
    "markup": Sign("hold markup of HTML", "remove it, unless it is to be learned", 0.2),
    "line_marks": Sign("begin with a number, a role or a mark of quotation", "remove it, if it is no text", 0.95),
    "question_marks": Sign(
        "hold a question mark within a word, as where an encoding lacks a character", _ENCODING, 0.01
    ),
}
# A UTF-8 sequence read as Latin-1 or cp1252; of all first bytes, those that begin no usual word's end.
_TAIL = "[\u0080-\u00bf\u0152\u0153\u0160\u0161\u0178\u017d\u017e\u0192\u02c6\u02dc\u2013-\u203a\u20ac\u2122\ufffd]"
_MISREAD = re.compile(
    f"\u00c3{_TAIL}|\u00c2[\u0080-\u00bf]|\u00e2[\u0080\u20ac]{_TAIL}|\u00ef\u00bb\u00bf|\u00f0[\u0178\u009f]{_TAIL}"
    f"|(?:[\u00d0\u00d1]{_TAIL}){{2}}"
    "|[\u00c0-\u00ff]{5}|(?<![\u0410-\u042f])[\u0430-\u044f][\u0410-\u042f]{3}"  # Cyrillic in another code page
)
_UTF7 = re.compile(r"\+([A-Za-z0-9+/]{3,})-")
_CONTROL = re.compile("[\x01-\x08\x0b\x0c\x0e-\x1f\x7f\x85]")
#: Texts that are one run of ASCII (perhaps with the space marks of GPT-2 or SentencePiece), numbers, or single letters.
_NO_WORDS = re.compile(
    r"(?=\S*(?:[\d/\\=%+\u0120\u2581]|[a-z][A-Z]))(?:[!-~]|\u0120|\u2581){16,}"
    r"|\[?\d+(?:[, ]+\d+){9,}\]?|(?:\S[ \u200b]+){9,}\S?",
    re.ASCII,
)
_PRINTED = re.compile(r"b(['\"]).*\1|\[(['\"]).*\2\]|\{'\w+': .*\}|\w+\.\w+_\(.*\)|.*, dtype: \w+", re.DOTALL)
_SPECIAL = re.compile(r"<\|\w+\|>|</s>|\[/?INST\]|<(?:pad|start_of_turn|end_of_turn)>|\[(?:CLS|SEP|PAD)\]| ##\w")
_TAG = re.compile(r"</?(?:p|br|span|div|b|i|font|a|li|ul)\b[^<>]*>")
_MARK = re.compile(r"(?:[>+]|\d+[.:)](?=\s)|\d+\t|__label__|(?:User|Human|Assistant|System|Bot): ).*|\"[^\"]*\",?")
_PRINTABLE = re.compile("=[C-F][0-9A-F]=[89AB][0-9A-F]")
_ESCAPE = re.compile(
    r"\\u[0-9a-fA-F]{4}|\\x[89a-f][0-9a-f]|&#x?[0-9a-fA-F]{2,5};|_x[0-9A-F]{4}_|\w\"\"(?!\")|\\r\\n|[.!?]\\n|\\n$"
    r"|&(?:amp|lt|gt|quot|apos|nbsp|\w+(?:acute|grave|uml|circ|tilde|cedil|slash));(?![^<]*>)"
)
_LOST = re.compile(r"(?:\?{3,} ){2}|(?<![^\s\"'(])[^\W\d_]+\?[^\W\d_]{2,}(?![\w=/&?.])")


def signs_of(text: str, *, learned: bool = True) -> Iterator[str]:
    """The names of the ``SIGNS`` that a text has.

    Args:
        learned: whether the text is learned, and not only read; a prompt may say that something is missing.

    Example:
        >>> from dptune.records.reading.characters import signs_of
        >>> list(signs_of("M\u00c3\u00bcller")), list(signs_of("N/A")), list(signs_of("M\u00fcller"))
        (['wrong_encoding'], ['missing_texts'], [])
    """
    if learned and len(text) < 40 and (name := spelled(text)) is not None and is_missing(name) and not _is_said(name):
        yield "missing_texts"
    yield from (name for name, found in _FOUND_BY.items() if found(text))


def _is_said(name: str) -> bool:
    """Whether punctuation is a text of its own: all of it is, but a dash and a question mark mean a missing value."""
    return not any(map(str.isalnum, name)) and name not in ("-", "--", "\u2013", "\u2014", "?", "??", "???", "/")


def _is_utf7(run: str) -> bool:
    """Whether a run of base64 is letters or signs of Europe in UTF-7: others hit upon such a run by chance."""
    try:
        letters = f"+{run}-".encode().decode("utf-7")
    except UnicodeDecodeError:
        return False
    return all("\u00a0" <= letter < "\u0600" or "\u2010" <= letter < "\u20c0" for letter in letters)


_FOUND_BY: dict[str, Callable[[str], object]] = {
    "wrong_encoding": lambda text: not text.isascii() and _MISREAD.search(text),
    "lost_characters": lambda text: "\ufffd" in text,
    "utf7": lambda text: "+" in text and any(_is_utf7(found[1]) for found in _UTF7.finditer(text)),
    "control_characters": _CONTROL.search,
    "quoted_printable": lambda text: "=" in text and _PRINTABLE.search(text),
    "no_words": lambda text: _NO_WORDS.fullmatch(text) or text.startswith("{\\rtf"),
    "escapes": lambda text: any(mark in text for mark in '\\&_"') and not _TAG.search(text) and _ESCAPE.search(text),
    "printed_values": _PRINTED.fullmatch,
    "special_tokens": lambda text: any(mark in text for mark in "<[#") and _SPECIAL.search(text),
    "unfilled": re.compile(r"\{\{ ?\w+ ?\}\}").search,
    "merge_conflict": re.compile(r"^(?:<{7}|>{7}) \S", re.MULTILINE).search,
    "markup": lambda text: "<" in text and _TAG.search(text),
    "line_marks": _MARK.fullmatch,
    "question_marks": lambda text: "?" in text and _LOST.search(text),
}
