"""The documentation's pages, their fenced blocks, and a reader who runs them from the first to the last."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from dptune.cli import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
#: Pages that run as they stand, in a folder in which docs/tutorials/tiny.py was run.
RUNNING = [
    DOCS / "start.md",
    *sorted((DOCS / "tutorials").glob("*.md")),
    DOCS / "concepts" / "accounting.md",
    DOCS / "howto" / "from_opacus.md",
    DOCS / "howto" / "price.md",
]
_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w+)(?P<info>[^\n]*)\n(?P<code>.*?)^(?P=indent)```$", re.M | re.S)
_NUMBER = r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?"


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        language: what follows the backticks.
        info: the rest of that line, such as a title.
        code: the lines between the fences.
        line: number of its first line in the page.
    """

    language: str
    info: str
    code: str
    line: int


def blocks(text: str) -> list[Block]:
    """All fenced blocks of a page, in order."""
    return [
        Block(found["language"], found["info"].strip(), found["code"], text[: found.start("code")].count("\n") + 1)
        for found in _FENCE.finditer(text)
    ]


def commands(code: str) -> Iterator[str]:
    """Command lines of a shell block, without comments; a line that ends in a backslash goes on."""
    for line in code.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield shlex.join(words)


def matches(shown: str, printed: str, *, numbers: bool) -> bool:
    """Whether a page shows what was printed. "..." stands for anything; so does any number if ``numbers`` is false."""
    pattern = ""
    for piece in re.split(rf"(\.\.\.|\s+|{_NUMBER})", shown.strip()):
        if piece == "...":
            pattern += ".*"
        elif piece.isspace():
            pattern += r"\s+"
        else:
            free = not numbers and re.fullmatch(_NUMBER, piece)
            pattern += _NUMBER if free else re.escape(piece)
    return re.fullmatch(pattern, printed.strip(), re.S) is not None


class Reader:
    """Runs the blocks of one page in the current folder, and remembers what the last one printed."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.printed = ""

    def run(self, block: Block) -> None:
        """Run a block of Python or commands; compare a block of text with what was printed before it. A title that is
        the name of a module writes the block to that file."""
        if named := re.fullmatch(r'title="(\w+\.py)"', block.info):
            Path(named[1]).write_text(block.code, encoding="utf-8")
        elif block.language == "python":
            self.printed = self._python(block)
        elif block.language == "sh":
            status = int("Status 1" in block.info)
            self.printed = "".join(self._command(line, status) for line in commands(block.code))
        elif block.language == "text":
            assert matches(block.code, self.printed, numbers="One run" not in block.info), self.printed

    def _python(self, block: Block) -> str:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile("\n" * (block.line - 1) + block.code, "page", "exec"), self.names)
        return out.getvalue()

    def _command(self, line: str, status: int = 0) -> str:
        program, *arguments = shlex.split(line)
        if program == "python":
            return self._script(*arguments)
        assert program == "dptune", f"a tutorial runs dptune and python alone, not {line!r}"
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == status, result.output
        return result.stdout

    @staticmethod
    def _script(script: str, *arguments: str) -> str:
        out, before = io.StringIO(), sys.argv
        sys.argv = [script, *arguments]
        try:
            with contextlib.redirect_stdout(out):
                runpy.run_path(str(ROOT / script), run_name="__main__")
        finally:
            sys.argv = before
        return out.getvalue()
