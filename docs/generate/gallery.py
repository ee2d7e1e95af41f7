"""Gallery: rendered reports of SYNTHETIC examples, kept without program, style and script; the build puts them back.

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

KEPT, ROOT = Path(__file__).with_name("kept_reports"), Path(__file__).parents[2]
#: The link to a page's index, which the site does not have.
_HOME = '<a href="index.html">gallery</a>'
_TEMPLATES = ROOT / "tasks" / "report" / "templates"


def _parts() -> dict[str, str]:
    """What every page holds, by the word that stands for it in a kept page."""
    style, script = ((_TEMPLATES / f"page.{kind}").read_text(encoding="utf-8").strip() for kind in ("css", "js"))
    return {"PROGRAM_OF_THE_CHARTS": program(), "STYLE_OF_A_PAGE": style, "SCRIPT_OF_A_PAGE": script}


def pages() -> Iterator[tuple[str, str]]:
    """Names and contents of the pages, complete."""
    for file in sorted(KEPT.glob("*.html")):
        text = file.read_text(encoding="utf-8")
        for word, part in _parts().items():
            text = text.replace(word, part)
        yield file.name, text


def keep(
    page: Annotated[Path, typer.Argument(help="a page that a run wrote")],
    name: Annotated[str, typer.Argument(help="its name in the gallery, without an ending")],
) -> None:
    """Keep a page for the gallery."""
    text = page.read_text(encoding="utf-8")
    if "SYNTHETIC" not in text:
        raise SystemExit(f"error: {page}: is not about SYNTHETIC data. Fix: keep a page of synthetic data only.")
    for word, part in _parts().items():
        if part not in text:
            problem = f"{page}: lacks today's {word.partition('_')[0].lower()}"
            raise SystemExit(f"error: {problem}. Fix: write the page anew, then keep it.")
        text = text.replace(part, word)
    write_text(KEPT / f"{name}.html", re.sub(r'<a href="[^"]*">all pages</a>', _HOME, text))


if __name__ == "__main__":
    typer.run(keep)
