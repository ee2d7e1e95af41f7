"""Damaged inputs: each kind is read as it was meant, refused, or warned about by name; sound inputs are not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from dptune.core.errors import ConfigError, DataError
from dptune.records.reading.findings import Finding
from dptune.records.reading.read import read_sides
from dptune.records.reading.source import Fractions, GivenSides, RecordSource
from dptune.records.reading.spelling import holds_another, is_placeholder, order_of_day, signs_of

SOUND = "Die Straße hieß früher „Fußweg“, sagte Zoë; das Café kostet 3 €, naïve?"
Change = Callable[[str], str]


def findings(path: Path | list[dict[str, Any]], **options: Any) -> dict[str, str]:
    sides = read_sides(RecordSource(path, split=Fractions(1.0, 0.0, 0.0), **options))
    return {one.name: one.text for one in sides.findings}


def written(folder: Path, name: str, content: str) -> Path:
    (folder / name).write_bytes(content.encode())
    return folder / name


def rows(name: Change = str, change: Change | None = None, text: Change = str) -> list[dict[str, str]]:
    """Sixty records of twenty units, of which the second record of each is changed."""
    made = [{"who": name(str(n // 3)), "text": f"Letter {n} came late."} for n in range(60)]
    for row in made[1::3]:
        row |= {"who": (change or str)(row["who"]), "text": text(row["text"])}
    return made


def code(n: str) -> str:
    return f"c{n}"


def day(n: str) -> str:
    return f"2024-03-{int(n) + 3:02}"


def large(n: str) -> str:
    return str(int(n) + 2990)


#: Kind: names of units, what changes some of them, and the finding.
UNITS: dict[str, tuple[Change, Change, str]] = {
    "marks of thousands": (large, lambda s: f"{s[0]},{s[1:]}", "similar_units"),
    "spaces of thousands": (large, lambda s: f"{s[0]}\u202f{s[1:]}", "similar_units"),
    "dots of thousands": (large, lambda s: f"{s[0]}.{s[1:]}", "unit_thousands"),
    "Cyrillic": (code, lambda s: s.replace("c", "\u0441"), "similar_units"),
    "Greek": (lambda s: f"A{s}", lambda s: s.replace("A", "\u0391"), "similar_units"),
    "quotes": (code, lambda s: f'"{s}"', "similar_units"),
    "Excel's text": (code, lambda s: f'="{s}"', "similar_units"),
    "decimal comma": (str, lambda s: f"{s},0", "similar_units"),
    "case": (code, str.upper, "similar_units"),
    "zeros": (str, lambda s: f"00{s}", "similar_units"),
    "underscore": (code, lambda s: s.replace("c", "c_"), "similar_units"),
    "accent": (lambda s: f"Zoe {s}", lambda s: s.replace("e", "\u00eb"), "similar_units"),
    "surname first": (
        lambda s: f"Ann L{'abcdefghijklmnopqrst'[int(s)]}",
        lambda s: ", ".join(s.split()[::-1]),
        "similar_units",
    ),
    "mail": (lambda s: f"u{s}@x.org", lambda s: f"<{s}>", "similar_units"),
    "day first": (day, lambda s: ".".join(s.split("-")[::-1]), "unit_days"),
    "month first": (day, lambda s: "{1}/{2}/{0}".format(*s.split("-")), "unit_days"),
    "day in words": (day, lambda s: f"{s[-2:]} March 2024", "unit_days"),
    "day as a number": (day, lambda s: s.replace("-", ""), "unit_days"),
    "TBD": (code, lambda s: "TBD", "unit_placeholders"),
    "anonymous": (code, lambda s: "Anonymous", "unit_placeholders"),
    "deleted": (code, lambda s: "[deleted]", "unit_placeholders"),
    "xxx": (code, lambda s: "xxx", "unit_placeholders"),
    "-1": (str, lambda s: "-1", "unit_placeholders"),
    "1970": (day, lambda s: "1970-01-01", "unit_placeholders"),
    "one name for many": (code, lambda s: "Shop 1", "unit_dominant"),
    "rounded": (str, lambda s: f"1.2345{s}E+14", "unit_rounded"),
    "wrong encoding": (lambda s: f"Zo\u00eb {s}", lambda s: s.encode().decode("latin-1"), "unit_encoding"),
    "lost letters": (lambda s: f"Zo\u00eb {s}", lambda s: s.replace("\u00eb", "\ufffd"), "unit_encoding"),
}


@pytest.mark.parametrize("kind", UNITS)
def test_doubtful_names_of_units_are_warned_about(kind: str) -> None:
    name, change, finding = UNITS[kind]
    assert finding in findings(rows(name, change), unit="who")
    assert findings(rows(name), unit="who") == {}


def test_a_warning_counts_and_names_rows_but_no_value() -> None:
    text = findings(rows(code, lambda s: "TBD"), unit="who")["unit_placeholders"]
    assert text.startswith("1 units with 20 records (row 2 is the first)")
    text = findings(rows(code, str.upper), unit="who")["similar_units"]
    assert text.startswith("40 units have names")
    assert "rows 1 and 2" in text
    assert "c1" not in text


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        (str.title, "similar_labels"),
        (lambda s: f'"{s}"', "similar_labels"),
        (lambda s: s.replace("o", "\u043e").replace("a", "\u0430"), "similar_labels"),
        (lambda s: "N/A", "label_missing"),
        (lambda s: "tbd", "label_missing"),
    ],
)
def test_doubtful_labels_are_warned_about(change: Change, finding: str) -> None:
    made = [{"text": f"Letter {n}.", "label": ("good", "bad")[n % 2]} for n in range(60)]
    assert findings(made, label="label") == {}
    for row in made[:9]:
        row["label"] = change(row["label"])
    assert finding in findings(made, label="label")


def test_a_label_of_one_record_is_warned_about() -> None:
    made = [{"text": f"Letter {n}.", "label": "good" if n else "godo"} for n in range(60)]
    assert set(findings(made, label="label")) == {"label_once"}


#: Kind: what changes a text, and the sign.
TEXTS: dict[str, tuple[Change, str]] = {
    **{word: (lambda s, word=word: word, "missing_texts") for word in ("NULL", "N/A", "nan", "#N/A", "\\N", "-")},
    "Latin-1": (lambda s: s.encode().decode("latin-1"), "wrong_encoding"),
    "cp1252": (lambda s: s.encode().decode("cp1252", "replace"), "wrong_encoding"),
    "lost": (lambda s: s.encode("latin-1", "ignore").decode("utf-8", "replace"), "lost_characters"),
    "UTF-7": (lambda s: s.encode("utf-7").decode(), "utf7"),
    "ISO-2022": (lambda s: "\u65e5\u672c".encode("iso2022_jp").decode(), "control_characters"),
    "terminal": (lambda s: f"\x1b[31m{s}", "control_characters"),
    "quoted-printable": (lambda s: "M=C3=BCller", "quoted_printable"),
    "base64": (lambda s: "VGhlIGxldHRlciBjYW1lIGxhdGUgYWdhaW4u", "no_words"),
    "path": (lambda s: "texts/2024/letter_0017.txt", "no_words"),
    "address in place of a text": (lambda s: quote(s), "no_words"),
    "numbers of tokens": (lambda s: str([ord(letter) for letter in s]), "no_words"),
    "letters apart": (lambda s: " ".join(s.replace(" ", "")), "no_words"),
    "named entities": (lambda s: s.replace("é", "&eacute;"), "escapes"),
    "line ends of JSON": (lambda s: s + r" It came late.\nAgain.", "escapes"),
    "line ends of Excel": (lambda s: s + "_x000D_", "escapes"),
    "doubled quotes": (lambda s: s + ' ""late""', "escapes"),
    "bytes of Python": (lambda s: repr(s.encode()), "printed_values"),
    "list of Python": (lambda s: repr([s]), "printed_values"),
    "row of pandas": (lambda s: f"0    {s}\nName: text, dtype: object", "printed_values"),
    "ChatML": (lambda s: f"<|im_start|>user\n{s}<|im_end|>", "special_tokens"),
    "Llama 2": (lambda s: f"[INST] {s} [/INST]", "special_tokens"),
    "template": (lambda s: "Dear {{ name }}, " + s, "unfilled"),
    "merge conflict": (lambda s: f"<<<<<<< HEAD\n{s}", "merge_conflict"),
    "HTML": (lambda s: f"<p>{s}</p>", "markup"),
    "Cyrillic as Latin-1": (
        lambda s: "\u041f\u043e\u0441\u044b\u043b\u043a\u0430".encode("cp1251").decode("latin-1"),
        "wrong_encoding",
    ),
    "all letters lost": (lambda s: "??????? ???????? ??", "question_marks"),
    "escapes": (lambda s: json.dumps(s), "escapes"),
    "entities": (lambda s: s.encode("ascii", "xmlcharrefreplace").decode(), "escapes"),
    "question marks": (lambda s: s.encode("ascii", "replace").decode(), "question_marks"),
}


@pytest.mark.parametrize("kind", TEXTS)
def test_a_damaged_text_shows_its_sign(kind: str) -> None:
    change, sign = TEXTS[kind]
    assert sign in list(signs_of(change(SOUND)))
    damaged = rows(code, text=lambda s: change(f"{s} {SOUND}"))
    assert sign in findings(damaged, unit="who", text="text")
    pairs = [{"prompt": "Say it.", "completion": row["text"]} for row in damaged]
    assert sign in findings(pairs)
    chats = [{"messages": [{"role": "assistant", "content": row["text"]}]} for row in damaged]
    assert sign in findings(chats)


SOUND_TEXTS = [
    SOUND,
    "What?! Why? a?b=c&d=e https://x.org/?q=a%C3%A4",
    "(",
    "...",
    "1 + 2 - 3 = 0; x+abc-y",
    "NÃO «CAFÉ» À",
    "Привет, мир",
    "日本語",
    "na ja",
    "None of it came.",
    "AT&T and R&D",
    "C:\\users\\ann",
    "नमस्ते",
    "Tab\there\nand there",
]


@pytest.mark.parametrize("text", SOUND_TEXTS)
def test_a_sound_text_shows_none(text: str) -> None:
    assert list(signs_of(text)) == []


@pytest.mark.parametrize("nothing", ["\u200b", "\u2800", "\u00ad\ufeff", "\u00a0", "\u3164 "])
def test_a_text_that_shows_nothing_is_refused(nothing: str) -> None:
    with pytest.raises(DataError, match=r"row 1, column 'text': (is empty|holds only characters that nobody sees)"):
        read_sides(RecordSource([{"text": nothing}]))


def test_an_answer_that_says_nothing_is_counted() -> None:
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "\u200b"}]
    assert "1 of 1 chats (row 1 is the first)" in findings([{"messages": chat}])["empty_answers"]


TABLE = "who,text\n" + "".join(f"{n // 3},Letter {n} came late.\n" for n in range(90))
LETTERS = "".join(f"Letter {n} came late.\n" for n in range(90))
#: Name of the file, its content, and the finding, or what the refusal says.
FILES: dict[str, tuple[str, str, str]] = {
    "total": ("a.csv", TABLE + "Total,90\n", "edge_rows"),
    "total of a text": ("a.txt", LETTERS + "Total: 90\n", "edge_rows"),
    "rows": ("a.txt", LETTERS + "(90 rows)\n", "edge_rows"),
    "comment": ("a.csv", TABLE + "# exported by shop, 2024\n", "edge_rows"),
    "comment first": ("a.txt", "# exported 2024\n" + LETTERS, "edge_rows"),
    "odd name": ("a.csv", TABLE + "Report,of today\n", "unit_odd"),
    "another header": ("a.csv", TABLE + TABLE.replace("text", "note"), "header_rows"),
    "cut text": ("a.csv", TABLE[:-9], "cut_off"),
    "cut line": ("a.txt", LETTERS[:-9], "cut_off"),
    "cut name": ("a.csv", "text,who\n" + "".join(f"b.,{n}\n" for n in range(100, 190)) + "b.,18", "cut_off"),
    "no header": ("a.csv", TABLE.partition("\n")[2], "row 1: looks like a record and is read as names"),
    "YAML": ("a.txt", "".join(f"- who: {n}\n  text: Late.\n" for n in range(9)), "looks like YAML"),
    "YAML table": ("a.csv", "".join(f"- who: {n}\n  text: Late, so.\n" for n in range(9)), "looks like YAML"),
    "SQL": ("a.txt", "".join(f"INSERT INTO a VALUES ({n}, 'Late.');\n" for n in range(9)), "looks like SQL"),
    "SQL table": ("a.csv", "-- dump\nCREATE TABLE a (n INT, t TEXT);\n" * 9, "looks like SQL"),
    "Markdown": ("a.txt", "| n | text |\n|---|---|\n" + "| 1 | Late |\n" * 9, "looks like a Markdown table"),
    "Markdown table": ("a.csv", "| n | text |\n|---|---|\n" + "| 1 | Late |\n" * 9, "looks like a Markdown table"),
    "log": ("a.txt", "2024-01-05 10:00:01,123 INFO late\n" * 9, "looks like a log"),
    "log table": ("a.csv", "2024-01-05 10:00:01,123 INFO late\n" * 9, "looks like a log"),
    "JSON": ("a.txt", json.dumps([{"text": "Late."}] * 9), "looks like JSON .*use data.format jsonl"),
    "XML": ("a.txt", "<all>\n" + "<r>Late.</r>\n" * 9 + "</all>\n", "looks like XML"),
    "LaTeX": ("a.txt", "\\documentclass{article}\n" + LETTERS, "looks like LaTeX"),
    "settings": ("a.txt", "[one]\nwho = 1\n[two]\nwho = 2\n", "looks like a file of settings"),
    "subtitles": ("a.txt", "1\n00:00:01,000 --> 00:00:02,000\nLate.\n\n" * 9, "looks like a file of subtitles"),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_damaged_file_is_refused_or_warned_about(kind: str, tmp_path: Path) -> None:
    name, content, said = FILES[kind]
    path, unit = written(tmp_path, name, content), "who" if "who" in content.partition("\n")[0].split(",") else None
    if "_" in said:
        assert said in findings(path, unit=unit, text="text" if unit else None)
    else:
        with pytest.raises(DataError, match=said):
            findings(path, unit=unit)


@pytest.mark.parametrize("kind", ["log", "YAML", "Markdown", "LaTeX"])
def test_another_format_is_text_if_that_is_said(kind: str, tmp_path: Path) -> None:
    name, content, _ = FILES[kind]
    path = written(tmp_path, name, content)
    sides = read_sides(RecordSource(path, split=Fractions(1.0, 0.0, 0.0), records_are="lines"))
    assert len(sides.train) == sum(1 for line in content.splitlines() if line.strip())


SOUND_FILES: dict[str, tuple[str, str]] = {
    "table": ("a.csv", TABLE),
    "no line end": ("a.csv", TABLE.rstrip("\n")),
    "text without a line end": ("a.txt", LETTERS.rstrip("\n")),
    "any ends": ("a.txt", "one late letter\nanother, late.\n" * 9 + "a third"),
    "headings": ("a.md", "# Letters\n\n" + LETTERS.replace("\n", "\n\n")),
    "years": ("a.csv", "town,2019,2020\n" + "Ulm,1,2\nBonn,3,4\n" * 9),
    "numbers of columns": ("a.csv", "0,1\n" + "7,late\n8,soon\n" * 9),
    "dialogue": ("a.txt", "Ann: Is it late?\nBen: It is.\n" * 9),
    "bullets": ("a.txt", "- one letter\n- another letter\n" * 9),
}


@pytest.mark.parametrize("kind", SOUND_FILES)
def test_a_sound_file_is_read_without_a_word(kind: str, tmp_path: Path) -> None:
    assert findings(written(tmp_path, *SOUND_FILES[kind])) == {}


def test_numbers_of_a_few_customers_are_sound() -> None:
    counts = {0: 40, 1: 30, 2: 3, 3: 1}
    assert findings([{"who": n, "text": "a"} for n, count in counts.items() for _ in range(count)], unit="who") == {}
    assert findings([{"who": day(str(n % 20)), "text": "a"} for n in range(60)], unit="who") == {}


def test_given_sides_have_findings_too() -> None:
    damaged = [{"text": "NULL"}] * 3
    sides = read_sides(RecordSource([{"text": "a"}] * 9, split=GivenSides(eval=damaged)))
    (finding,) = sides.findings
    assert (finding.name, finding.text[:20]) == ("missing_texts", "in eval: 3 of 3 reco")
    assert repr(sides.findings) == repr((Finding(finding.name, finding.text),))
    assert "findings" not in repr(sides)


#: Kind: names of twenty units, how half of the records write them, and the finding.
HALVES: dict[str, tuple[Callable[[int], str], Change, str]] = {
    "prefix": (lambda n: str(n + 300), lambda s: f"CUST-{s}", "unit_joined"),
    "ending": (lambda n: f"ann{n}x", lambda s: f"{s}@mail.example", "unit_joined"),
    "cut": (lambda n: f"{n:04}abcdefghij", lambda s: s[:8], "unit_joined"),
    "dots": (lambda n: f"{n:04}abcdefghij", lambda s: s[:8] + "...", "unit_joined"),
    "several": (lambda n: f"c{n}", lambda s: f"{s}; c19" if s != "c19" else s, "unit_joined"),
    "shown address": (lambda n: f"a{n}@x.org", lambda s: f"Ann Lee <{s}>", "similar_units"),
    "web address": (lambda n: f"https://x.org/u/{n}", lambda s: s.replace("s:", ":") + "/", "similar_units"),
    "telephone": (lambda n: f"+49170{n + 5551000}", lambda s: f"0049 {s[3:6]} {s[6:]}", "similar_units"),
    "umlauts": (lambda n: f"{'ABCDEFGHIJKLMNOPQRST'[n]} Müller", lambda s: s.replace("ü", "ue"), "similar_units"),
    "entities": (lambda n: f"{n} & Co", lambda s: s.replace("&", "&amp;"), "similar_units"),
    "percents": (lambda n: f"a{n}@x.org", lambda s: s.replace("@", "%40"), "similar_units"),
    "bytes": (lambda n: f"c{n}", lambda s: repr(s.encode()), "similar_units"),
    "lost letters": (lambda n: f"Zoé{n}", lambda s: "Zo? Lee", "unit_encoding"),
    "days of a spreadsheet": (lambda n: f"3-{n}", lambda s: f"{s[2:]}-Mar", "unit_rounded"),
    "zeros": (lambda n: str(175928847299117063 + 70 * n), lambda s: s[:16] + "00", "unit_rounded"),
    "masks": (lambda n: f"4929 {n + 1000}", lambda s: f"XXXX {s[-4:]}", "unit_masked"),
}


@pytest.mark.parametrize("kind", HALVES)
def test_names_of_two_exports_are_compared(kind: str) -> None:
    name, change, finding = HALVES[kind]
    made = [{"who": (change if n > 30 else str)(name(n % 20)), "text": f"Letter {n} came late."} for n in range(60)]
    assert finding in findings(made, unit="who")


def test_numbers_behind_each_other_hold_no_other() -> None:
    for names in (map(str, range(200)), (f"customer-{n}" for n in range(200)), (f"ann{n}" for n in range(200))):
        assert not holds_another([*names])


LONG = "This letter came {} days too late, and nobody in the office knew why."
#: Kind: sixty records, and the finding about all of them.
ALL: dict[str, tuple[Callable[[int], dict[str, Any]], str]] = {
    "joined many to many": (lambda n: {"who": f"c{n % 7}", "text": LONG.format(n // 3)}, "repeated_texts"),
    "swapped": (lambda n: {"who": LONG.format(n) if n % 5 else f"c{n}", "text": f"c{n}"}, "swapped_columns"),
    "an error": (lambda n: {"who": f"c{n % 9}", "text": "403 Forbidden" if n % 5 else LONG.format(n)}, "frequent_text"),
    "numbers of lines": (lambda n: {"who": f"c{n % 9}", "text": f"{n}. " + LONG.format(n)}, "line_marks"),
    "cut": (lambda n: {"who": f"c{n % 9}", "text": f"{n:02} " + LONG[:40]}, "cut_texts"),
    "no answer": (lambda n: {"who": f"c{n}", "messages": chat("Is it late?")}, "chat_order"),
    "no question": (lambda n: {"who": f"c{n}", "messages": [{}, *chat("Late?", "It is.")][2:]}, "chat_order"),
    "doubled": (lambda n: {"who": f"c{n}", "messages": chat(LONG, "Yes.", LONG, "Yes.")}, "repeated_messages"),
    "echo": (lambda n: {"who": f"c{n}", "prompt": LONG, "completion": LONG + " Sorry."}, "repeated_prompt"),
    "no space": (lambda n: {"who": f"c{n}", "prompt": f"name: Inn {n}", "completion": "A fine inn."}, "glued"),
    "no space after a mark": (lambda n: {"who": f"c{n}", "prompt": f"{n}: Late?", "completion": '"Yes."'}, "glued"),
    "no space, accents": (lambda n: {"who": f"c{n}", "prompt": f"{n}: caf\u00e9", "completion": "\u00dcber"}, "glued"),
    "no space, Korean": (lambda n: {"who": f"c{n}", "prompt": f"{n}\ubc29", "completion": "\ub124"}, "glued"),
    "no space in many": (
        lambda n: {"who": f"c{n}", "prompt": f"{n}: Late?" + "\n" * (n % 9 < 4), "completion": "Yes."},
        "glued",
    ),
    "wrapped": (
        lambda n: {"who": f"c{n}", "text": ("The letters of May", "which came so late")[n % 2] + " were such as no"},
        "wrapped",
    ),
}


def chat(*said: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(said)]


@pytest.mark.parametrize("kind", ALL)
def test_what_records_have_in_common_is_warned_about(kind: str) -> None:
    made, finding = ALL[kind]
    assert finding in findings([made(n) for n in range(60)], unit="who")


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [("Is it late?", " Yes."), ("Is it late?\n", "Yes."), ("Answer:", "Yes."), ("\u8fdf\u4e86\u5417", "\u662f\u7684")],
)
def test_a_prompt_that_ends_in_a_mark_or_a_space_is_sound(prompt: str, completion: str) -> None:
    made = [{"who": f"c{n}", "prompt": f"{n} {prompt}", "completion": f"{completion} {n}."} for n in range(60)]
    assert findings(made, unit="who") == {}


def test_a_few_prompts_without_a_space_are_sound() -> None:
    made = [{"who": f"c{n}", "prompt": f"{n}: Late?" + "\n" * (n % 9 > 3), "completion": f"{n}."} for n in range(60)]
    assert findings(made, unit="who") == {}


def test_short_answers_are_sound() -> None:
    answers = ["Yes", "No", "OK", "Sure."]
    assert findings([{"who": f"c{n % 9}", "text": answers[n % 4]} for n in range(60)], unit="who") == {}


def test_a_column_that_tells_nobody_apart_is_named_as_the_cause() -> None:
    made = [{"who": "1.23457E+12", "text": f"Letter {n}"} for n in range(60)]
    with pytest.raises(
        ConfigError, match=r"column 'who': 1 units of 60 records are too few.*1\.2E\+12.*export the column"
    ) as refused:
        read_sides(RecordSource(made, unit="who"))
    assert "(row " not in str(refused.value)  # an error is logged under private telemetry too


def test_a_role_that_templates_do_not_know_is_refused() -> None:
    with pytest.raises(DataError, match=r"message 1 has the role 'User', .* Fix: write 'user'"):
        findings([{"messages": [{"role": "User", "content": "Late?"}, {"role": "Assistant", "content": "Yes."}]}])


@pytest.mark.parametrize("label", ["other", "Other", "default"])
def test_a_common_class_is_not_taken_for_a_missing_label(label: str) -> None:
    made = [{"text": f"Letter {n}.", "label": ("complaint", label)[n % 2]} for n in range(60)]
    assert findings(made, label="label") == {}


def test_words_that_stand_for_nobody() -> None:
    assert all(map(is_placeholder, ["TBD", "anonymous", "<deleted>", "xxx", "XXXX", "Test", "n.n."]))
    assert not any(map(is_placeholder, ["Ann", "c7", "7", "Tess", "xx", "777"]))


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("2024-03-01", "year-month-day"),
        ("2024-03-01 10:30:00", "year-month-day"),
        ("2024/3/1", "year/month/day"),
        ("01.03.2024", "?.?.year"),
        ("31.03.2024", "day.month.year"),
        ("03/31/2024", "month/day/year"),
        ("31.03.24", "day.month.yy"),
        ("20240331", "yearmonthday"),
        ("31 March 2024", "in words"),
        ("32.03.2024", None),
        ("13.13.2024", None),
        ("2024-03-01-7", None),
        ("10-11-12", None),
        ("20249931", None),
        ("c7", None),
    ],
)
def test_days_are_known_by_how_they_are_written(name: str, order: str | None) -> None:
    assert order_of_day(name) == order
