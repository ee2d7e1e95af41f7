"""Gallery: rendered reports of SYNTHETIC examples, kept without the charts' program; the build puts it back.

python -m docs.generate.gallery data/report/report.html default-study      # keeps a page; `make docs` shows it
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from dptune.core.files import write_text
from tasks.charts.canvas import program

KEPT = Path(__file__).with_name("kept_reports")
#: Stands for the program, in the script that holds it; and the link to a page's index, which the site does not have.
_PLACE, _HOME = "PROGRAM_OF_THE_CHARTS", '<a href="index.html">gallery</a>'


def pages() -> Iterator[tuple[str, str]]:
    """Names and contents of the pages, complete."""
    for file in sorted(KEPT.glob("*.html")):
        yield file.name, file.read_text(encoding="utf-8").replace(_PLACE, program())


def keep(
    page: Annotated[Path, typer.Argument(help="a page that a run wrote")],
    name: Annotated[str, typer.Argument(help="its name in the gallery, without an ending")],
) -> None:
    """Keep a page for the gallery."""
    text = page.read_text(encoding="utf-8")
    if "SYNTHETIC" not in text:
        raise SystemExit(f"error: {page}: is not about SYNTHETIC data. Fix: keep a page of synthetic data only.")
    if program() not in text:
        raise SystemExit(f"error: {page}: has another program for its charts. Fix: write the page anew, then keep it.")
    write_text(KEPT / f"{name}.html", re.sub(r'<a href="[^"]*">all pages</a>', _HOME, text.replace(program(), _PLACE)))


if __name__ == "__main__":
    typer.run(keep)
