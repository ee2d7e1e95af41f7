"""Plain English: help and pages are made of sentences that are read once, and pages open with what the reader gets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from pages import DOCS, PAGES, ROOT

from dptune.cli import app

#: Openings and phrases that a reader must read twice, and what to write in their place.
BANNED = {
    r"^Of (?!course)[^?]*[.:]$": "name the thing: 'Maximum tokens per text', not 'Of a text'",
    r"^(?:What|Who|Whoever|Where|Whose)\b[^?]*[.:]$": "begin with a subject: 'Someone who ...', 'If ...'",
    r"^(?:At most|No more than) so\b": "write the number that is limited",
    r"\b(?:is|are|was|be) no (?!longer|more|less|fewer|need|better|further)": "is not a",
    r"\b(?:is|are) told\b|\bwhat is told\b": "published, or shown",
    r"[,;] else\b": "(default: ...)",
    r"\b(?:who|what)ever (?:sees|has|knows|reaches|may)\b": "someone who, anyone who",
    r"\bnobody can tell\b": "it is unknown",
}
READ = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *PAGES]


def faults(sentence: str) -> list[str]:
    """What is wrong with a sentence, with the way to write it."""
    return [f"{sentence!r}: write {better}" for banned, better in BANNED.items() if re.search(banned, sentence, re.I)]


def sentences(text: str) -> Iterator[str]:
    """The sentences of a page or a help text, without code, titles and the targets of links."""
    text = re.sub(r"```.*?```", "", text, flags=re.S)
    text = re.sub(r"^(?:    |#)[^\n]*$|`[^`]*`|!?\[[^\]]*\]\([^)]*\)", "Page", text, flags=re.M)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|#]|\d+\.) )|\s\|\s", text):
        words = " ".join(block.split()).lstrip("-*|#0123456789. ")
        yield from (one.strip(" |*") for one in re.split(r"(?<=[.!?:]\*\*)\s|(?<=[.!?])\s", words) if one.strip(" |*"))


def helps() -> Iterator[tuple[str, str]]:
    """Command with option, and its help."""
    group: Any = typer.main.get_command(app)
    context = group.make_context("dptune", [], resilient_parsing=True)
    commands = {name: group.get_command(context, name) for name in group.list_commands(context)}
    for parameter in group.params:
        yield f"dptune {parameter.name}", parameter.help or ""
    for name, command in commands.items():
        yield name, command.help or command.short_help
        for parameter in command.params:
            yield f"{name} {parameter.name}", parameter.help or ""


def test_helps_are_plain_sentences() -> None:
    found = dict(helps())
    assert len(found) > 150
    wrong = [f"{name}: {fault}" for name, text in found.items() for one in sentences(text) for fault in faults(one)]
    assert wrong == []
    assert [name for name, text in found.items() if not re.match(r"[\"A-Z].*[.)]$", text, re.S)] == []


@pytest.mark.parametrize("page", READ, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages_are_plain(page: Path) -> None:
    assert [fault for one in sentences(page.read_text(encoding="utf-8")) for fault in faults(one)] == []


@pytest.mark.parametrize("page", READ[2:], ids=lambda page: page.relative_to(DOCS).as_posix())
def test_a_page_opens_with_what_the_reader_gets(page: Path) -> None:
    opening = page.read_text(encoding="utf-8").split("\n\n")[1]
    assert opening.startswith(("You get ", "You learn ")), opening


@pytest.mark.parametrize(
    "sentence",
    ["Of a text; else as long as records were in training.", "What it costs.", "It is no guarantee.", "Who sees it."],
)
def test_a_fault_is_found(sentence: str) -> None:
    assert faults(sentence)
