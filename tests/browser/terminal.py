"""A picture of a terminal: ``python -m tests.browser.terminal RECORDING PICTURE [--first N | --last N]``.

The recording is ``script``'s: ``script -qec "stty cols 100; make repro" RECORDING``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from tests.browser.chromium import chromium
from tests.browser.screenshots import write

_MOVES = re.compile(r"(\n|\r|\x1b\[2K|\x1b\[1?A|\x1b\[\?25[lh])")
_PAGE = """<body style="margin: 0; background: #fff"><pre style="display: inline-block; margin: 0; padding: 12px;
font: 14px/1.3 monospace">{code}</pre><style>{stylesheet}</style></body>"""


def shown(recording: str) -> list[str]:
    """Lines that a terminal shows in the end, with their colours. What is written after a return to the line's start
    takes the line's place. Lines of ``script`` itself are left out."""
    lines, row, again = [""], 0, False
    for part in _MOVES.split(recording):
        if part == "\n":
            row, again = row + 1, False
            lines.extend([""] * (row + 1 - len(lines)))
        elif part == "\r":
            again = True
        elif part.endswith("A") and part.startswith("\x1b"):
            row = max(0, row - 1)
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part and not part.startswith("\x1b[?25"):
            lines[row], again = part if again else lines[row] + part, False
    return [line for line in lines if not re.match(r"Script (started|done) on", line)]


def main(
    recording: Annotated[Path, typer.Argument(help="what script wrote")],
    out: Annotated[Path, typer.Argument(help="the picture, PNG")],
    first: Annotated[int, typer.Option(help="lines from the start; 0: all")] = 0,
    last: Annotated[int, typer.Option(help="lines before the end; 0: all")] = 0,
    columns: Annotated[int, typer.Option(help="where a line is cut")] = 100,
) -> None:
    """Take the picture."""
    lines = "\n".join(shown(recording.read_bytes().decode(errors="replace"))).strip("\n").split("\n")
    lines = lines[:first] if first else lines[-last:]
    with Path("/dev/null").open("w") as nowhere:
        console = Console(record=True, width=columns, file=nowhere, force_terminal=True, color_system="standard")
        for line in lines:
            text = Text.from_ansi(line)
            text.truncate(columns)
            console.print(text, soft_wrap=True)
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1300, "height": 900})
        page.set_content(console.export_html(code_format=_PAGE))
        write(page, out, clip=page.locator("pre").bounding_box())


if __name__ == "__main__":
    typer.run(main)
