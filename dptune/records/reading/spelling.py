"""Spelling of units and labels, brought to one however a table writes them; and characters that damage a text."""

from __future__ import annotations

import html
import math
import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from datetime import UTC, date, datetime
from decimal import Decimal
from itertools import pairwise
from typing import NamedTuple
from urllib.parse import unquote
from uuid import UUID

from dptune.core.errors import DataError

#: Words by which tables say that a value is missing, in lower case, beside those of ``is_missing``. They name no unit.
MISSING = frozenset(
    (
        *("", "na", "n/a", "n.a", "n.a.", "#n/a", "#na", "#nv", "#n/d", "#n/disp", "nil", "none", "null", "\\n"),
        *("nan", "-nan", "+nan", "nat", "inf", "-inf", "+inf", "infinity", "-infinity", "1.#qnan", "-1.#qnan"),
        *("1.#snan", "1.#ind", "-1.#ind", "1.#inf", "-1.#inf", "missing", "unknown", "undefined", "not available"),
        *("not applicable", "not known", "not given", "not specified", "no data", "(blank)", "(empty)"),
        *("0000-00-00", "0000-00-00 00:00:00", "0000-00-00t00:00:00", "00000000-0000-0000-0000-000000000000"),
    )
)
#: How spreadsheets name an error, in any language: #DIV/0!, #NAME?, #WERT!
_ERROR = re.compile(r"#\w+(/\w+)?[!?]")
_NUMBER = re.compile(r"([+-]?)(?=\.?\d)(\d*)(?:\.(\d*))?(?:e([+-]?\d{1,3}))?", re.IGNORECASE)
#: ISO 8601: day, time of day, its fraction, zone.
_TIME = re.compile(
    r"(\d{4}-\d\d-\d\d)[t ](\d\d:\d\d(?::\d\d)?)(?:[.,](\d+))?(z|[+-]\d\d(?::?\d\d){0,2})?", re.IGNORECASE
)
#: Unicode's Default_Ignorable_Code_Point, characters that nobody sees, and the place of an object.
_UNSEEN = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f"
    "\ufeff\uffa0\ufff0-\ufff8\ufffc\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
_DASHES, _QUOTES = "[\u2010-\u2015\u2212\u2e3a\u2e3b]", "[\u2018\u2019\u201b\u02bc\u02b9\u2032`]"
_UUID = re.compile(r"(?:urn:uuid:)?\{?([0-9a-f]{8})-?([0-9a-f]{4})-?([0-9a-f]{4})-?([0-9a-f]{4})-?([0-9a-f]{12})\}?")


def spelled(value: object) -> str | None:
    """The name that a value stands for; None for a missing value, and for a number that is none.

    One person under two names would be two units, each protected by itself, and the person would not be. So these make
    no difference: spaces at the ends and how many there are elsewhere; characters that nobody sees (a byte-order mark,
    a soft hyphen, a joiner) and compatible forms of letters (Unicode's NFKC); digits of another script; whether a
    number is written 7, "7", "7.0", "+7" or "7e0". A time, and a text of ISO 8601, is named by that form, in UTC where
    it has a zone; midnight without a zone is the day alone, as tables of days are written. Case and leading zeros do:
    ``loosely`` finds those.

    Raises: TypeError for a value that is neither text, number, time nor UUID.
    """
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return None
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal | UUID | date):
        raise TypeError(type(value).__name__)
    if isinstance(value, float | Decimal) and not math.isfinite(value):
        return None
    # the shortest digits of a float are what pandas and JSON write of it
    letters = "".join(map(seen, unicodedata.normalize("NFKC", str(value))))
    name = unicodedata.normalize("NFC", " ".join(letters.split()))
    if (time := _TIME.fullmatch(name)) is not None:
        return _time(name, *time.groups())
    number = _NUMBER.fullmatch(name.replace("\u2212", "-"))
    if number is None:
        return name
    sign, whole, part = number[1], number[2] or "0", number[3] or ""
    if number[4] is not None:  # exact, and of a thousand digits at most
        whole, _, part = format(Decimal(f"{whole}.{part}e{number[4]}"), "f").partition(".")
    part = part.rstrip("0")
    zero = not part and not whole.strip("0")
    return ("-" if sign == "-" and not zero else "") + whole + ("." + part if part else "")


def _time(name: str, day: str, clock: str, fraction: str | None, zone: str | None) -> str:
    """A time in UTC if it has a zone; ``name`` as it is where the calendar has no such time, or ends."""
    with suppress(ValueError, OverflowError):
        time = datetime.fromisoformat(f"{day} {clock}{(zone or '').upper()}")
        written = str(time.astimezone(UTC) if zone else time)
        part = (fraction or "").rstrip("0")
        return (written[:19] + ("." + part.ljust(6, "0") if part else "") + written[19:]).removesuffix(" 00:00:00")
    return name


def seen(letter: str) -> str:
    """What is left of a character: nothing of one that nobody sees, and 0 to 9 of a digit of any script."""
    if unicodedata.category(letter) == "Cf" or _UNSEEN.match(letter):
        return ""
    if unicodedata.category(letter) == "Cc" or letter == "\u2800":  # Braille's empty pattern looks like a space
        return " "
    digit = unicodedata.decimal(letter, None)
    return letter if digit is None else str(digit)


def is_missing(name: str | None) -> bool:
    """Whether a name says that there is none: by a word of ``MISSING``, also in brackets, a spreadsheet's error, or
    nothing but punctuation.
    """
    if name is None:
        return True
    word = re.sub(f"{_DASHES}", "-", re.sub(r" ?([^\w\s]) ?", r"\1", name.casefold()))
    inner = re.sub(r"^[(<\[{](.*)[)>\]}]$", r"\1", word)
    return (
        bool({word, inner} & MISSING)
        or _ERROR.fullmatch(word) is not None
        or all(unicodedata.category(letter).startswith("P") for letter in word)
    )


#: Letters of Cyrillic and Greek that look like Latin ones, in lower case.
_LOOKS_LIKE = str.maketrans(
    "\u0430\u0432\u0435\u043a\u043c\u043d\u043e\u0440\u0441\u0442\u0443\u0445\u0456\u0458\u0455"
    "\u03b1\u03b2\u03b5\u03b6\u03b7\u03b9\u03ba\u03bc\u03bd\u03bf\u03c1\u03c4\u03c5\u03c7",
    "abekmhopctyxijs" + "abezhikmnoptyx",
) | str.maketrans(
    {"\u00f8": "o", "\u0142": "l", "\u0111": "d", "\u00f0": "d", "\u0131": "i", "\u00e6": "a", "\u0153": "o"}
)
#: A telephone number in groups.
_PHONE = re.compile(r"\d{1,4}(?:[() /-]+\d{2,}){1,5}")
_THOUSANDS = re.compile(r"-?\d{1,3}(?:([,.' _])\d{3})(?:\1\d{3})*")


def loosely(name: str) -> str:
    """The name without what may be a matter of spelling alone: its case, accents and the alphabet of a letter; zeros
    before its numbers and marks of thousands; marks around it; dashes, spaces and underscores beside letters, and dots
    between them; the order of "Lee, Ann"; ue for \u00fc; escapes of HTML, addresses and JSON; how a telephone number is
    grouped; a program's way to print it, as b'7'; and the punctuation of an address or a UUID.
    """
    name = re.sub(r"\\u([0-9a-fA-F]{4})", lambda found: chr(int(found[1], 16)), unquote(html.unescape(name)))
    name = unicodedata.normalize("NFKD", re.sub(_QUOTES, "'", re.sub(_DASHES, "-", name.casefold())))
    name = re.sub("[\u0300-\u036f]", "", name).translate(_LOOKS_LIKE)
    if not any(map(str.isdecimal, name)):
        name = re.sub(r"(?<=[^\W\d_])([aou])e(?=[^\W\d_])", r"\1", name)
    if (uuid := _UUID.fullmatch(name)) is not None:
        return "".join(uuid.groups())
    whole = re.sub(r"^(?:mailto:|https?://(?:www\.)?|[^<>]+ <|\w+\((?=[\"'])|b(?=[\"']))", "", name)
    whole = whole.lstrip("=#+@\"'(<[{ ").rstrip("\"')>]}.,;:/ ").replace("@googlemail.", "@gmail.") or name
    whole = re.sub(r"^([^\W\d]+), ([^\W\d]+)$", r"\2 \1", whole)
    whole = re.sub(r"(?<=\d),0{1,2}$", "", whole)
    if _THOUSANDS.fullmatch(whole):
        return re.sub(r"[,.' _]", "", whole)
    if _PHONE.fullmatch(whole) and len(digits := re.sub(r"\D", "", whole)) > 8:
        return digits.lstrip("0")
    bare = re.sub(r"(?<=[^\W\d_])[-_ ]+|[-_ ]+(?=[^\W\d_])|(?<=[^\W\d_])[.+](?=[^\W\d_])", "", whole)
    return re.sub(r"(?<!\d)(?<!\d[.,])0+(?=\d)", "", bare)


#: Names that forms and exports give to somebody who is not known, in lower case.
PLACEHOLDERS = frozenset(
    (
        *("tbd", "tba", "tbc", "todo", "to be determined", "anon", "anonymous", "anonym", "anonymized", "anonymised"),
        *("test", "tester", "testing", "test user", "testuser", "dummy", "example", "sample", "guest", "default"),
        *("nobody", "no one", "noone", "noname", "no name", "no id", "noid", "not set", "not provided", "unassigned"),
        *("unnamed", "unidentified", "other", "others", "various", "misc", "pending", "deleted", "removed", "redacted"),
        *("deleted user", "hidden", "private", "void", "empty", "blank", "n.n", "nn", "k.a", "unbekannt", "inconnu"),
        *("desconocido", "keine angabe", "john doe", "jane doe", "foo", "bar", "asdf", "filler", "placeholder"),
    )
)
#: Those of them that are common classes: "other" of a ticket, "default" of a loan.
CLASSES = frozenset(("other", "others", "various", "misc", "default", "pending", "private"))
#: Numbers and days that forms fill in for a missing one, which may be real ones too.
_FILLED_IN = re.compile(r"0|-1|-?9{2,}|0+-0+|1[89]00-01-01|1970-01-01|9999-12-31|01[./]01[./]1[89][07]0")


def is_placeholder(name: str) -> bool:
    """Whether a name probably stands for nobody: a word of ``PLACEHOLDERS``, or one letter over and over (xxx)."""
    word = re.sub(r"^[(<\[{\"']+|[)>\]}.\"']+$", "", name.casefold())
    return word in PLACEHOLDERS or re.fullmatch(r"([^\W\d_])\1{2,}", word) is not None


def may_be_filled_in(name: str) -> bool:
    """Whether a name is a number or a day that forms fill in, such as -1, 9999 or 1970-01-01."""
    return _FILLED_IN.fullmatch(name) is not None


_DAY = re.compile(
    r"(?P<ymd>\d{4}(?P<sign>[-/.])\d{1,2}(?P=sign)\d{1,2})|(?P<one>\d{1,2})(?P<mark>[-/.])(?P<two>\d{1,2})(?P=mark)"
    r"(?P<year>\d{4}|(?<!-)\d\d)|(?P<run>(?:19|20)\d\d(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01]))"
    r"|(?P<words>\d{1,2}[. ]+[^\W\d_]{3,9}\.?,? \d{4}|[^\W\d_]{3,9}\.? \d{1,2},? \d{4})"
)


def order_of_day(name: str) -> str | None:
    """How a name writes a day, with or without a time behind it: "2024/01/05" is "year/month/day". None for others.

    A day and a month that could each be the other are "?/?/year"; "20240105" may be a number too.
    """
    found = _DAY.match(name)
    if found is None or not re.fullmatch(r"(?:[ t]\d\d:\d\d.*)?", name[found.end() :]):
        return None
    if found["ymd"]:
        return f"year{found['sign']}month{found['sign']}day"
    if found["run"] or found["words"]:
        return "yearmonthday" if found["run"] else "in words"
    one, two, mark, year = int(found["one"]), int(found["two"]), found["mark"], "y" * len(found["year"])
    if max(one, two) > 31 or min(one, two) > 12 or not min(one, two):
        return None
    first, second = ("day", "month") if one > 12 else ("month", "day") if two > 12 else ("?", "?")
    return f"{first}{mark}{second}{mark}{year.replace('yyyy', 'year')}"


# Names that hold other names of their column: with a prefix, cut off, or several in one.


#: The least number of names with one prefix or ending, the least share of all names, and the length that is looked at.
_LEAST, _SHARE, _LONGEST, _SHORTEST = 3, 0.02, 80, 8
_SEVERAL = re.compile(r"\s*[;,/&|+]\s*|\s+(?:and|und|et|y)\s+")


def holds_another(names: Collection[str]) -> dict[str, str]:
    """Names that hold another name of the same column, each with that name.

    A prefix or an ending counts if several names have it ("CUST-17" beside "17"), a shorter name if it is cut where
    others are, and a list if each of its parts is a name ("Ann; Bea").

    Example:
        >>> from dptune.records.reading.spelling import holds_another
        >>> holds_another(["17", "CUST-17", "18", "CUST-18", "19", "CUST-19"])
        {'CUST-17': '17', 'CUST-18': '18', 'CUST-19': '19'}
    """
    known, enough = {*names}, max(_LEAST, _SHARE * len(names))
    by_addition, by_length = defaultdict[tuple[str, str], dict[str, str]](dict), defaultdict[int, dict[str, str]](dict)
    lists = dict[str, str]()
    for name in known:
        if len(name) > _LONGEST:
            continue
        parts = _SEVERAL.split(name)
        if len(parts) > 1 and known.issuperset(parts):
            lists[name] = parts[0]
        for place in range(1, len(name)):
            if _kind(name[place - 1]) == _kind(name[place]) != "other":
                continue
            before, behind = name[:place], name[place:]
            if behind in known and len(behind) > 1 and not before.isdecimal():
                by_addition[before, ""][name] = behind
            if before in known and len(before) > 1 and not behind.isdecimal():
                by_addition["", behind][name] = before
    stems = {re.sub(r"(\.\.\.|\u2026)$", "", name): name for name in known}
    for short, long in pairwise(sorted(stems)):
        cut = len(short) >= _SHORTEST and long.startswith(short) and len(long) > len(short)
        if cut and not (short[-1].isdecimal() and long[len(short)].isdecimal() and long.isdecimal()):
            by_length[len(short)][stems[long]] = stems[short]
    groups = (*by_addition.values(), *(cuts for cuts in by_length.values() if not _are_counted(cuts)))
    found = {name: other for group in groups if len(group) >= enough for name, other in group.items()}
    return dict(sorted((found | (lists if len(lists) > 1 else {})).items()))


def _kind(letter: str) -> str:
    return "letter" if letter.isalpha() else "digit" if letter.isdecimal() else "other"


def _are_counted(cuts: dict[str, str]) -> bool:
    """Whether the longer names only have more digits behind a number: "customer-1" and "customer-10" are two."""
    return all(re.fullmatch(r"\d*\D*", long[len(short) :]) and short[-1].isdecimal() for long, short in cuts.items())


# Characters of a text: those that no tokenizer can read, those that nobody sees, and signs of a damaged text.


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
        >>> from dptune.records.reading.spelling import signs_of
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
