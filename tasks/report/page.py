"""The frame that all pages share: one look, charts that need no network, and an index of the pages that exist.

A page is a template that extends ``frame.html.j2`` and fills its blocks; ``write`` gives it the charts. A policy in its
head forbids it to load anything. Whatever comes from settings or records is escaped.
"""

from __future__ import annotations

import glob
import itertools
import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

from dptune.core.digits import at_least, at_most
from dptune.core.errors import DptuneError
from dptune.core.files import locked, write_text
from dptune.privacy.spent_budgets.register import Register, SpentTotal
from tasks.charts.canvas import DARK, Figure, for_page, names_in, program
from tasks.charts.looks import Look
from tasks.paths import DATA, REPORT, REPORTS, SPENT
from tasks.report.numbers import could_refute, digits4, exact, ruler, spread_text, whole_percent
from tasks.stage import checkout_of, keep_pages

INDEX = "index.html"
#: The program of the charts, which DVC's page of plots loads (.dvc/page.html).
CHARTS = "charts.js"
_TEMPLATES = Path(__file__).with_name("templates")
_THUMBNAIL = (360, 220)  # pixels, at most; a higher picture is cut to its upper part
_DASH = "\u2013"  # in a cell without a figure
_CELLS = re.compile(r"<t[hd][ >].*?</t[hd]>", re.DOTALL)
_MARKERS = {
    "circle": "M8 2a6 6 0 1 0 .001 0Z",
    "square": "M3 3h10v10h-10Z",
    "diamond": "M8 1l6 7-6 7-6-7Z",
    "triangle-up": "M8 2l6.5 11.5h-13Z",
    "triangle-down": "M8 14l6.5-11.5h-13Z",
    "triangle-right": "M14 8l-11.5 6.5v-13Z",
    "triangle-left": "M2 8l11.5 6.5v-13Z",
    "cross": "M6 1h4v5h5v4h-5v5h-4v-5h-5v-4h5Z",
}


def write(
    template: str,
    path: Path,
    figures: Sequence[Figure] = (),
    looks: Mapping[str, Look] | None = None,
    **values: Any,
) -> None:
    """Write a page.

    Args:
        template: name of a file in ``templates`` that extends ``frame.html.j2``.
        figures: those that the template shows by ``figure(NAME)``; whichever it asks for and is not here is left out.
        looks: of mechanisms, for legends and for names in backticks.
        values: for the template.
    """
    shown = dict(looks or {})
    specs = {figure.name: for_page(figure) for figure in figures}
    given = {
        "figures": {figure.name: figure for figure in figures},
        "specs": specs,
        "legends": {figure: [name for name in shown if name in names_in(spec)] for figure, spec in specs.items()},
        "pictures": _pictures(specs, path.parent),
        "dark": DARK,
        "index": _index(path),
        "program": Markup(program()) if figures else "",
    }
    page = environment(shown).get_template(template).render(given | values)
    write_text(path, page)


def _pictures(names: Iterable[str], folder: Path) -> dict[str, str]:
    """The PNG of each figure that has one, relative to the folder of the page."""
    found = {name: next(folder.rglob(f"{name}.png"), None) for name in names}
    return {name: file.relative_to(folder).as_posix() for name, file in found.items() if file}


def _index(path: Path) -> str:
    """The index, relative to the folder of a page."""
    ups = 3 if path.parts[-4:-3] == (REPORTS.name,) else 1
    return f"{'../' * ups}{REPORT.name}/{INDEX}"


def environment(looks: Mapping[str, Look]) -> Environment:
    """The templates, with filters for numbers and for names of mechanisms."""
    made = Environment(
        loader=FileSystemLoader(_TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=_Missing
    )
    made.filters |= {
        "epsilon": at_most,
        "delta": at_most,
        "noise": at_most,  # whoever types it spends no more than was certified
        "shown": at_least,
        "could_refute": could_refute,
        "exact": exact,
        "percent": whole_percent,
        "digits4": digits4,
        "spread": spread_text,
        "names": lambda text: named(text, looks),
        "plain": lambda text: text.replace("`", ""),
    }
    made.filters["without_empty_columns"] = without_empty_columns
    made.globals |= {"ruler": ruler, "mark": lambda name: marker(looks[name]) if name in looks else ""}
    return made


def without_empty_columns(html: str) -> Markup:
    """A page without those columns of its tables in which every row has a dash or nothing: most runs fill few.

    A table with a cell over several columns stays as it is.
    """
    return Markup(re.sub(r"<table.*?</table>", lambda table: _full_columns(table[0]), html, flags=re.DOTALL))


def _full_columns(table: str) -> str:
    rows = [_CELLS.findall(row) for row in re.findall(r"<tr.*?</tr>", table, re.DOTALL)]
    if "<thead" not in table or "colspan" in table or len({len(row) for row in rows}) > 1:
        return table
    # The first row is the head; the first column names the row.
    texts = [[re.sub(r"<[^>]*>", "", cell).strip() for cell in row] for row in rows[1:]]
    empty = {place for place, column in enumerate(zip(*texts, strict=True)) if place and set(column) <= {"", _DASH}}
    places = itertools.cycle(range(len(rows[0])))
    return _CELLS.sub(lambda cell: "" if next(places) in empty else cell[0], table)


class _Missing(StrictUndefined):
    """A value that a template asks for and may lack, as in ``{% if a.one_run %}``; printing it is an error."""

    def __bool__(self) -> bool:  # type: ignore[override]
        return False


def named(text: str, looks: Mapping[str, Look]) -> Markup:
    """Text with names of mechanisms in backticks as HTML: each with its marker."""
    parts = re.split(r"`([^`]*)`", re.sub("([εμδ]) ([=≤≥]) ", "\\1\u00a0\\2\u00a0", text.replace(" %", "\u00a0%")))
    made = [
        Markup("<code>{}{}</code>").format(marker(looks[part]) if part in looks else "", part)
        if place % 2
        else Markup("{}").format(part)
        for place, part in enumerate(parts)
    ]
    return Markup("").join(made)


def marker(look: Look) -> Markup:
    """A mechanism's marker as a picture in a line of text."""
    filling = "none" if look.hollow else "currentColor"
    return Markup(
        '<svg class="marker" viewBox="0 0 16 16" style="--light:{};--dark:{}" aria-hidden="true">'
        '<path d="{}" fill="{}" stroke="currentColor" stroke-width="2"/></svg>'
    ).format(look.light, look.dark, _MARKERS[look.shape], filling)


@dataclass(frozen=True)
class Entry:
    """A page in the index.

    Attributes:
        link: relative to the index.
        answer: the sentence that it opens with.
        study: the folder of a study that is not the workspace's own; empty for the workspace's pages.
        picture: its first chart, small, as an address that holds it; empty if it has none.
    """

    title: str
    link: str
    answer: str
    study: str
    picture: str


def publish(folder: Path, name: str) -> None:
    """Write the index; in a copy of the checkout, keep the folder's pages in the checkout and write its index, too.

    Args:
        name: that of the pages' folder in data/reports, where DVC's experiment has none.
    """
    write_index()
    if (checkout := checkout_of(Path.cwd())) is None:
        return
    # The index reads the pages of all copies of the checkout, and none of them may replace its pages meanwhile.
    with locked(checkout / DATA / "pages.lock", wait=True):
        keep_pages(folder, name)
        write_index(checkout / DATA)


def write_index(data: Path = DATA) -> None:
    """Write data/report/index.html over all pages that ``write`` wrote, the newest first, and what was spent so far;
    and beside it the program of the charts.
    """
    directory, others = data / REPORT.name, data / REPORTS.name
    pages = [path for pattern in ("*/*.html", f"{REPORTS.name}/*/*/*.html") for path in sorted(data.glob(pattern))]
    pages.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
    found = [(path, _Head(path)) for path in pages if path.name != INDEX]
    entries = [
        Entry(
            head.title,
            quote(f"../{path.relative_to(data).as_posix()}"),
            head.answer,
            path.parts[-3] if path.is_relative_to(others) else "",
            _thumbnail(path),
        )
        for path, head in found
        if head.ours
    ]
    write_text(directory / CHARTS, program())
    write("index.html.j2", directory / INDEX, entries=entries, spent=_spent(data / SPENT.name))


def _thumbnail(page: Path) -> str:
    named = {"report": "figures/utility.png", "search": "choosing.png", "policy": "*.png"}
    for file in sorted(page.parent.glob(named.get(page.stem, glob.escape(f"{page.stem}.png")))):
        with suppress(OSError):  # a page without a chart, or whose picture was removed
            with Image.open(file) as picture:
                width, height = _THUMBNAIL
                upper = picture.crop((0, 0, picture.width, min(picture.height, picture.width * height // width)))
                upper.thumbnail(_THUMBNAIL)
                content = BytesIO()
                upper.convert("RGB").save(content, "PNG", optimize=True)
            return f"data:image/png;base64,{b64encode(content.getvalue()).decode()}"
    return ""


def _spent(register: Path) -> list[SpentTotal] | str:
    """What the register knows of each set of records and unit; or why it cannot be read."""
    try:
        return Register(register).totals()
    except (DptuneError, OSError) as error:
        return str(error)


class _Head(HTMLParser):
    """Title and description in the head of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.title = self.answer = ""
        self.ours = self._in_title = False
        self.feed(path.read_text(encoding="utf-8").partition("</head>")[0])

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self._in_title = tag == "title"
        if tag == "meta" and given.get("name") == "description":
            self.answer = given.get("content") or ""
        if tag == "meta" and given.get("name") == "generator":
            self.ours = given.get("content") == "dptune"

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.title += data
