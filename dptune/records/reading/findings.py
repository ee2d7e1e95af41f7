"""Findings about records: what was perhaps meant otherwise, counted while they are read. They change no record."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from dptune.records.reading.record import Chat, Content, PromptTarget, Text
from dptune.records.reading.spelling import (
    CLASSES,
    SIGNS,
    holds_another,
    is_missing,
    is_placeholder,
    is_visible,
    loosely,
    may_be_filled_in,
    order_of_day,
    signs_of,
)


@dataclass(frozen=True)
class Finding:
    """A warning: a name that stays the same between versions, and what was counted and what to do, in sentences."""

    name: str
    text: str

    @property
    def advice(self) -> str:
        """What to do, without a count or a row, so that an error may say it under private telemetry too."""
        return self.text.partition(". ")[2]


#: A name that has this many times the records of the next one, and at least so many, stands perhaps for many people.
_TIMES, _LEAST = 5, 20
#: A name of another build than all others is odd among at least so many.
_ENOUGH = 20
#: A first field that begins a comment, or that ends an export.
_EDGE = re.compile(
    r"\s*(#|--(?=\s)|//|/\*|<!--).*|(?i:\W*(grand |sub)?(total|totals|sum|summe|gesamt|gesamtsumme|insgesamt|average"
    r"|mean|count|end of (file|report|export))\b[\s:=]*[\d.,]*\W*|source: .*|\(?\d+ (rows?|records?|Zeilen)\b.*"
    r"|varchar\(\d+\)|(big)?int(eger|64)?|string|object|script started.*)",
    re.DOTALL,
)
#: A value that may be the name of a column.
_NAME = re.compile(r"\s*[^\W\d][\w-]{0,30}\s*")
#: A name that hides a part, and one that a spreadsheet made of what looked like a day.
_MASKED = re.compile(r"\*{2,}|(?i:x{4,}|x{3,}-)|#{3,}|\u2022{2,}")
_SHEET_DAY = re.compile(
    r"(\d\d?[-.]?)?(jan|feb|mar|m\u00e4r|mrz|apr|mai|may|ju[nl]|aug|sep|o[ck]t|nov|de[cz])[a-z]{0,6}\.?([-.]?\d\d)?",
    re.IGNORECASE,
)
_CODED = re.compile(r"\d{1,3}(?:\.\d{3})+|\d+(?:[.,](\d+))?(?:e\+?(\d{1,3}))", re.IGNORECASE)
#: A prompt's last character and its completion's first that lack a space, in scripts with spaces between words.
_LETTER = "A-Za-z0-9\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u0dff\u10a0-\u167f\u1e00-\u1fff\uac00-\ud7a3"
_GLUED = re.compile(f'[{_LETTER}.,;?!)\u2026][{_LETTER}("$\u00ab\u201c]')
#: Signs of a text by which a name is damaged.
_DAMAGE = {"wrong_encoding", "lost_characters", "utf7", "escapes", "quoted_printable", "printed_values"}
#: A text of at least so many characters is not repeated by chance; one of so many may have been cut.
_LONG, _CUT = 50, 30
#: Kinds of doubtful records: the share of all records above which they count, what they do, and what to do about it.
_KINDS = {
    "chat_order": (
        0.01, "do not end in what an assistant says, or have no user",
        "if roles are swapped or answers missing, correct them: only what assistants say is learned",
    ),
    "repeated_messages": (0.01, "hold one message twice", "if a join or an export doubled them, remove the second"),
    "repeated_prompt": (0.1, "repeat the prompt in the answer", "if it is no part of the answer, remove it there"),
    "glued": (0.5, "have nothing between prompt and completion, which are read as one text",
              "end prompts with a new line, or begin completions with a space"),
    "wrapped": (
        0.3, "begin in the middle of a sentence, as lines of wrapped texts do",
        "put an empty line between texts, and choose records_are paragraphs",
    ),
}  # fmt: skip
#: Doubtful names of units or labels: what is said of them, and what to do about it.
_NAMES = {
    "encoding": ("have names in a wrong encoding", SIGNS["wrong_encoding"].fix),
    "once": ("have one record each", "if this is a slip of the pen, correct it"),
    "missing": ("have names that often stand for none", "remove these records"),
    "single": ("are all that there are", "a classifier learns two at least"),
    "placeholders": ("have names that are probably nobody's",
        "if they stand for people who are not known, name each apart, or remove their records"),
    "dominant": (f"are more than {_TIMES - 1} times those of any other unit",
        "if many people share this name, name them apart: they are sampled and protected as one"),
    "odd": ("have a name without a digit or of several words, unlike all others",
        "if the row is a total, a header or a comment, remove it"),
    "joined": ("hold another's name (with more around it, cut, or several in one), as in rows {} and {}",
        "if these are one person, write the names alike; otherwise each is protected by itself"),
    "masked": ("have names that hide a part (*** or XXXX)",
        "if several people share one, name them apart: they are sampled and protected as one"),
}  # fmt: skip


class Names:
    """The names that one column gave, each with its number of records and its first row. Private."""

    def __init__(self, called: str) -> None:
        """Begin a column without names. ``called`` is what messages call the things named: "units" or "labels"."""
        self.called, self.rows, self.counts = called, dict[str, int](), Counter[str]()
        self.last = ""
        self._dotted, self._plain, self._rounded = 0, 0, dict[str, int]()

    def add(self, name: str, value: object, row: int) -> None:
        """Count a record of ``name``, which was spelled ``value``."""
        self.rows.setdefault(name, row)
        self.counts[name] += 1
        self.last = name
        if isinstance(value, str):
            coded = _CODED.fullmatch(value.strip())
            if coded is not None and coded[2]:
                if int(coded[2]) > len(coded[1] or ""):
                    self._rounded[name] = self.rows[name]
            elif coded is not None:
                self._dotted = self._dotted or row
            elif value.strip().isdecimal():
                self._plain = self._plain or row
        elif isinstance(value, float) and abs(value) > 2**53:
            self._rounded[name] = self.rows[name]

    def findings(self) -> Iterator[Finding]:
        """The findings about this column, of which one name holds each."""
        one = self.called.removesuffix("s")
        yield from self._alike()
        if orders := self._orders():
            shown = ", ".join(f"{order} (row {row})" for order, row in islice(orders.items(), 4))
            text = f"{self.called} are days in {len(orders)} ways: {shown}; one day would be several {self.called}. "
            yield Finding(f"{one}_days", text + "Write all as 2024-12-31")
        if self._dotted and self._plain:
            text = f"names of {self.called} are written as 1.000 (row {self._dotted}), which is read as 1, and as 1000 "
            yield Finding(f"{one}_thousands", text + f"(row {self._plain}). Write numbers without marks of thousands")
        self._rounded |= self._changed()
        if self._rounded:
            text = f"{len(self._rounded)} {self.called} (row {min(self._rounded.values())} is the first) may be several"
            advice = "A spreadsheet or a float may have rounded them (1.2E+12, 1-Mar): export the column as text"
            yield Finding(f"{one}_rounded", f"{text}. {advice}")
        damaged = [
            name
            for name in self.rows
            if _DAMAGE & {*signs_of(name)} or (name.count(" ") < 3 and re.search(r"[^\W\d_]\?[^=]*$", name))
        ]
        if damaged:
            yield self._finding("encoding", damaged)
        if self.called == "labels":
            once = [name for name in self.rows if self.counts[name] == 1]
            if once and len(self.counts) * _TIMES < self.counts.total():
                yield self._finding("once", once)
            placeholders = (name for name in self.rows if is_placeholder(name) and name.casefold() not in CLASSES)
            words = [*filter(is_missing, self.rows), *placeholders]
            if words and len(words) < len(self.rows):
                yield self._finding("missing", words)
            if len(self.rows) == 1 and self.counts.total() >= _LEAST:
                yield self._finding("single", [*self.rows])
        elif self.rows:
            yield from self._nobody()

    def _changed(self) -> dict[str, int]:
        """Names that have lost digits, or became a day, each with its first row."""
        long = [name for name in self.rows if len(name) > 15 and name.isdecimal()]
        lost = [one for one in long if len(one.rstrip("0")) <= (15 if len(one) < 18 else 17)]
        days = [name for name in self.rows if any(map(str.isdecimal, name)) and _SHEET_DAY.fullmatch(name)]
        changed = [*(lost if len(lost) * 4 > len(long) else ()), *(days if len(days) < len(self.rows) else ())]
        return {name: self.rows[name] for name in changed}

    def _finding(self, name: str, names: Sequence[str], *rows: int) -> Finding:
        """What ``_NAMES`` says of these names, with the rows that its text shows."""
        records, row = sum(self.counts[one] for one in names), min(self.rows[one] for one in names)
        says, fix = _NAMES[name]
        found = f"{len(names)} {self.called} with {records} records (row {row} is the first)"
        text = f"{found} {says.format(*rows)}. {_sentence(fix)}"
        return Finding(f"{self.called.removesuffix('s')}_{name}", text)

    def _alike(self) -> Iterator[Finding]:
        groups = defaultdict[str, list[str]](list)
        for name in self.rows:
            groups[loosely(name)].append(name)
        several = [names for names in groups.values() if len(names) > 1]
        if several:
            one, other = sorted(self.rows[name] for name in several[0])[:2]
            if self.called == "units":
                so = "if these are one person, write the names alike; otherwise each is protected by itself"
            else:
                so = "if these are one label, write them alike; otherwise each is a class of its own"
            text = (
                f"{sum(map(len, several))} {self.called} have names that differ from another's only in case, accents, "
                f"alphabet, zeros, marks or spaces, as in rows {one} and {other}: {so}"
            )
            yield Finding(f"similar_{self.called}", text)

    def _orders(self) -> dict[str, int]:
        """The ways in which names write days, each with its first row, if there are several."""
        found = dict[str, int]()
        for name, row in self.rows.items():
            if (order := order_of_day(name)) is not None:
                found.setdefault(order, row)
        if len(found) > 1:  # what could be either is as the days that can be but one
            found = {order: row for order, row in found.items() if "?" not in order or not _known(order, found)}
        return found if len(found) > 1 else {}

    def _nobody(self) -> Iterator[Finding]:
        ranked = self.counts.most_common()
        words = [name for name in self.rows if is_placeholder(name)]
        most = max((count for name, count in ranked if not may_be_filled_in(name)), default=0)
        ranked = ranked if len(ranked) > 2 else []
        filled = [name for name, count in ranked[:9] if may_be_filled_in(name) and count > max(4, 3 * most)]
        if found := [*words, *filled]:
            yield self._finding("placeholders", found)
        if len(ranked) > 2 and ranked[0][0] not in found:
            (name, most), next_most = ranked[0], ranked[1][1]
            if most >= max(_LEAST, _TIMES * next_most):
                yield self._finding("dominant", [name])
        odd = [name for name in self.rows if not any(map(str.isdecimal, name)) and name not in found]
        odd = odd or [name for name in self.rows if name.count(" ") > 1]
        if len(odd) < len(self.rows) and any(" " in name for name in {*self.rows} - {*odd}):
            odd = [name for name in odd if not any(map(str.isdecimal, name))]
        if odd and len(self.rows) >= _ENOUGH and len(odd) <= len(self.rows) / 100 + 1:
            yield self._finding("odd", odd)
        if held := holds_another(self.rows):
            yield self._finding("joined", [*held], *sorted(self.rows[name] for name in next(iter(held.items()))))
        if masked := [name for name in self.rows if _MASKED.search(name)]:
            yield self._finding("masked", masked)


def _known(order: str, found: Mapping[str, int]) -> bool:
    return any(re.sub("day|month", "?", other) == order for other in found if other != order)


class Findings:
    """Counts what is doubtful in records as they are read. Private."""

    def __init__(self, *, headings: bool = False) -> None:
        """Begin without records. ``headings``: whether a line that begins with # is a heading, as in Markdown."""
        self._headings = headings
        self.units, self.labels = Names("units"), Names("labels")
        self._texts, self._signs = 0, defaultdict[str, list[int]](list)
        self._edges, self._ends, self._headers = list[int](), list[int](), list[int]()
        self._silent, self._stopped = list[int](), 0
        self._said, self._lengths, self._whole = Counter[str | int](), Counter[int](), Counter[int]()
        self._kinds, self._widths = defaultdict[str, list[int]](list), list[int]()
        self._rows, self._last = 0, ("", 0)
        self._noted = list[Finding]()

    def add(self, row: int, values: Mapping[str, Any], content: Content) -> None:
        """Look at the content of a record, and at the row that it was made of."""
        self._rows += 1
        self._ends = [*self._ends[:1], row]
        first = next((value for value in values.values() if not isinstance(value, str) or value), None)
        if isinstance(first, str) and len(first) < 200:
            if _EDGE.fullmatch(first) and not (self._headings and first.startswith("#")):
                self._edges.append(row)
            # A header once more: all values could be names of columns, and one of several is its own column's name.
            named = all(isinstance(value, str) and _NAME.fullmatch(value) for value in values.values())
            if named and len(values) > 1 and any(_bare(value) == _bare(name) for name, value in values.items()):
                self._headers.append(row)
        texts = list(_texts(content))
        for name in {sign for text, learned in texts for sign in signs_of(text, learned=learned)}:
            self._signs[name].append(row)
        if isinstance(content, Chat) and any(_says_nothing(message) for message in content.messages):
            self._silent.append(row)
        self._count(row, content, texts)
        self._texts += 1
        self._last = (texts[-1][0].rstrip()[-1:] if texts else "", row)
        self._stopped += _stops(self._last[0])

    def _count(self, row: int, content: Content, texts: Sequence[tuple[str, bool]]) -> None:
        """Count what is said again, cut, or perhaps of another column or role."""
        whole = " ".join(text for text, _ in texts)
        if len(whole) >= _LONG:
            self._whole[hash(whole)] += 1
        for text in (text for text, learned in texts if learned):
            self._said[text if len(text) < _LONG else hash(text)] += 1
            if len(text) >= _CUT and (text[-1:].isalpha() or text[-1:] in " ,]" or text.endswith(("...", "\u2026"))):
                self._lengths[len(text)] += 1
        if len(self.units.last.split()) > 4 and len(whole.split()) < 3:
            self._kinds["swapped"].append(row)
        kind = _order_of(content.messages) if isinstance(content, Chat) else ""
        if len(texts) > 1 and len(texts[-2][0]) >= 20 and texts[-1][0].startswith(texts[-2][0]):
            kind = "repeated_prompt"
        if kind:
            self._kinds[kind].append(row)
        if isinstance(content, PromptTarget) and _GLUED.fullmatch(content.prompt[-1:] + content.target[:1]):
            self._kinds["glued"].append(row)
        if isinstance(content, Text):
            if whole[:1].islower() and self._last[0].isalnum():
                self._kinds["wrapped"].append(row)
            self._widths.append(len(whole))

    def _patterns(self) -> Iterator[Finding]:
        """Findings about all records together."""
        least = max(5, self._texts / 20)
        ranked = self._said.most_common(2)
        several = len(ranked) > 1 or (ranked and isinstance(ranked[0][0], int))
        if several and ranked[0][1] >= max(least, 10 * sum(count for _, count in ranked[1:])):
            fix = "if it stands for a missing one (an error, [deleted], a rule between texts), remove these records"
            yield self._finding("frequent_text", f"{ranked[0][1]} texts are one and the same", fix)
        again = self._whole.total() - len(self._whole)
        if again > self._texts / 10:
            fix = "if a join or a fill made these, undo it; a text of one person may be in several units"
            yield self._finding("repeated_texts", f"{again} of {self._texts} records repeat another's text", fix)
        lengths = self._lengths.most_common(2)
        if lengths and lengths[0][1] >= max(least, 5 * sum(count for _, count in lengths[1:])):
            says = f"{lengths[0][1]} texts end without a full stop at {lengths[0][0]} characters"
            yield self._finding("cut_texts", says, "if they were cut there, export them whole")
        if swapped := self._kinds["swapped"] + [row for name, row in self.units.rows.items() if name in self._said]:
            says = f"{len(swapped)} records (row {min(swapped)} is one) have a text for a unit, or a unit for a text"
            yield self._finding("swapped_columns", says, "if columns changed places or moved, correct the rows")
        for name, (share, says, fix) in _KINDS.items():
            rows = self._kinds[name]
            if name == "wrapped" and self._widths:  # lines of texts that an editor wrapped are nearly as long
                width = max(self._widths)
                alike = sum(4 * one > 3 * width for one in self._widths)
                rows = rows if 30 <= width < 120 and alike * 2 > self._texts else []
            if rows and len(rows) > share * self._texts:
                said = f"{len(rows)} of {self._texts} records (row {rows[0]} is the first) {says}"
                yield self._finding(name, said, fix)

    def _finding(self, name: str, says: str, fix: str) -> Finding:
        return Finding(name, f"{says}. {_sentence(fix)}")

    def end_open(self, names: Names | None) -> None:
        """Note that the file's last line had no end, as where a file is cut off.

        Args:
            names: names of the last column, if it holds units or labels.
        """
        others = self._rows - 1
        cut = not _stops(self._last[0]) and others >= 9 and self._stopped == others
        if names is not None:
            last, once = names.last, names.counts[names.last] == 1
            cut = once and any(other != last and other.startswith(last) for other in names.rows)
        if cut:
            text = (
                f"row {self._last[1]}, the last, is perhaps cut off: its line has no end, and it ends as no other does"
            )
            self._noted.append(Finding("cut_off", f"{text}. Compare it with the source, and export it again"))

    def found(self) -> tuple[Finding, ...]:
        """All findings so far."""
        found = [*self._noted, *self.units.findings(), *self.labels.findings()]
        edges = [row for row in self._edges if row in self._ends]
        if edges and len(self._edges) <= 2:
            text = f"row {edges[-1]} looks like a total or a comment, and is read as a record. Remove it if it is one"
            found.append(Finding("edge_rows", text))
        if self._headers:
            text = f"row {self._headers[0]} looks like the header of another file, and is read as a record. Remove it"
            found.append(Finding("header_rows", f"{text}, and bring the rows below it to the first header's columns"))
        for name, sign in SIGNS.items():
            rows = self._signs[name]
            if len(rows) > sign.share * self._texts and (not sign.share or len(rows) > 2):
                text = f"{len(rows)} of {self._texts} records (row {rows[0]} is the first) {sign.says}"
                found.append(Finding(name, f"{text}. {_sentence(sign.fix)}"))
        found += self._patterns()
        if self._silent:
            text = f"{len(self._silent)} of {self._texts} chats (row {self._silent[0]} is the first)"
            found.append(Finding("empty_answers", f"{text} have an empty answer. Remove these records, or fill it in"))
        return tuple(found)


def _bare(name: str) -> str:
    return re.sub(r"[\s_\ufeff-]", "", name).casefold()


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:]


def _stops(letter: str) -> bool:
    """Whether a text that ends in this character has an end: it is neither a letter nor a digit."""
    return not letter.isalnum()


def _order_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """What is doubtful about the order of messages: a name in ``_KINDS``, or nothing."""
    said = [message for message in messages if message["role"] != "system"]
    if messages[-1]["role"] not in ("assistant", "tool") or all(one["role"] != "user" for one in said):
        return "chat_order"
    long = [(one["role"], one.get("content")) for one in said if len(one.get("content") or "") >= 20]
    return "repeated_messages" if len({*long}) < len(long) else ""


def _says_nothing(message: Mapping[str, Any]) -> bool:
    empty = not is_visible(str(message.get("content") or ""))
    return message["role"] == "assistant" and empty and not message.get("tool_calls")


def _texts(content: Content) -> Iterator[tuple[str, bool]]:
    """The texts of a record, each with whether it is learned."""
    if isinstance(content, Chat):
        for message in content.messages:
            yield str(message.get("content") or ""), message["role"] == "assistant" and bool(message.get("content"))
    elif isinstance(content, PromptTarget):
        yield from ((content.prompt, False), (content.target, True))
    else:
        yield content.text, True
