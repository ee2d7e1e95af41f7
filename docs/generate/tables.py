"""Tables and code in Markdown, with the characters escaped that would break them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; a cell's line breaks become spaces."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(" ".join(cell.split()) for cell in line) + " |" for line in lines) + "\n"


def code(text: str) -> str:
    """Text as code in a cell of a table; nothing for an empty one."""
    if not text:
        return ""
    escaped = text.replace("|", "\\|")
    return f"`` {escaped} ``" if "`" in escaped else f"`{escaped}`"


def plain(text: str) -> str:
    """Text in a cell of a table. Names between backticks stay code; no other character is Markdown or HTML."""
    parts = text.replace("``", "`").split("`")
    outside = [
        part if number % 2 else part.translate({ord(sign): f"\\{sign}" for sign in "|*_<>[]"})
        for number, part in enumerate(parts)
    ]
    return "`".join(part.replace("|", "\\|") if number % 2 else part for number, part in enumerate(outside))
