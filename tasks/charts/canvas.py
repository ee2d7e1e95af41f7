"""The frame of every chart: one style, a PNG on white for papers, and data for pages that draw it themselves.

Charts are Vega-Lite specifications that Altair writes. Pages hold Vega's own program, so that nothing is loaded.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert
from PIL import Image

from dptune.core.files import replacing
from tasks.charts.looks import GREY, HUES, INK, Look

PAPER = ("#ffffff", "#14171b")
GRID, SHADE, BAR = ("#e3e6e9", "#2c3238"), ("#f1f3f5", "#1e2328"), ("#b9d7ee", "#2d4f6b")
BAD = ("#b3001b", "#ff7a85")
#: What each colour becomes on a black ground.
DARK = dict((*HUES, INK, GREY, PAPER, GRID, SHADE, BAR, BAD))
_PANEL_WIDTH = 400
_SCALE = 2.0
_LETTER = 6  # pixels, of a note
_FONT = "Liberation Sans, Arial, sans-serif"  # the first one comes with the renderer
Chart = alt.Chart | alt.LayerChart | alt.FacetChart
#: The mechanism that a reader of the page points at; empty: none, and all are shown alike.
_CHOSEN = {"name": "chosen", "value": ""}


@dataclass(frozen=True)
class Panel:
    """One chart of a figure.

    Attributes:
        chart: without width and height.
        title: a few words over it.
        height: in pixels.
    """

    chart: Chart
    title: str
    height: int = 260


@dataclass(frozen=True)
class Figure:
    """Panels beside each other.

    Attributes:
        name: stem of its PNG, and the name by which a template asks for it.
        title: one line; of synthetic data it must say so.
        panels: at least one.
        columns: number of panels side by side, where there is room.
        note: a line under the title, which explains marks that no legend names.
    """

    name: str
    title: str
    panels: tuple[Panel, ...]
    columns: int = 3
    note: str = ""


def save(figure: Figure, path: Path) -> None:
    """Write the figure as a PNG on white."""
    drawn = vl_convert.vegalite_to_png(json.dumps(_for_paper(figure)), scale=_SCALE)
    with replacing(path) as temporary:
        picture = Image.open(BytesIO(drawn)).convert("RGB")
        picture.save(temporary, "PNG", optimize=True)  # a sixth of what the renderer writes


def blank(name: str, text: str) -> Figure:
    """A figure that says why there is none, where a file is promised."""
    return Figure(name, text, (Panel(alt.Chart(values([])).mark_point(), ""),))


def _for_paper(figure: Figure) -> dict[str, Any]:
    width = _PANEL_WIDTH if len(figure.panels) > 1 else 2 * _PANEL_WIDTH
    columns = min(figure.columns, len(figure.panels))
    lines = textwrap.wrap(figure.note, columns * width // _LETTER)
    parts = []
    for panel in figure.panels:
        view = {key: value for key, value in _specified(panel.chart).items() if key not in ("$schema", "config")}
        parts.append(view | {"title": panel.title, "width": width, "height": 1.15 * panel.height})
    return {
        "title": {"text": figure.title, "subtitle": lines, "anchor": "start", "fontSize": 15, "offset": 12},
        "concat": [{key: value for key, value in part.items() if key != "datasets"} for part in parts],
        "columns": columns,
        "resolve": {"scale": {"color": "independent"}},
        "datasets": {name: rows for part in parts for name, rows in part.get("datasets", {}).items()},
        "params": [_CHOSEN],
        "config": _config() | {"padding": 16, "font": _FONT},
    }


def for_page(figure: Figure) -> list[dict[str, Any]]:
    """The specification of each panel, as wide as its place on the page, which has the legend of mechanisms.

    A page turns to black by the colours of ``DARK``.
    """
    config = _config() | {"font": "system-ui, sans-serif"}
    shape = {"width": "container", "autosize": {"type": "fit-x", "contains": "padding"}, "params": [_CHOSEN]}
    return [
        _without_legend(_specified(panel.chart))
        | shape
        | {"height": panel.height, "description": panel.title or figure.title, "config": config}
        for panel in figure.panels
    ]


def _specified(chart: Chart) -> dict[str, Any]:
    """A chart as plain data. Its renderer refuses what is no specification, so the slow check before it is left out."""
    datasets: dict[str, Any] = {}
    return {**_with_named_data(chart.to_dict(validate=False), datasets), "datasets": datasets}


def _with_named_data(part: Any, datasets: dict[str, Any]) -> Any:
    """A specification whose rows are in ``datasets``, each table once, however many layers draw it."""
    if isinstance(part, list):
        return [_with_named_data(one, datasets) for one in part]
    if not isinstance(part, dict):
        return part
    named = {key: _with_named_data(value, datasets) for key, value in part.items() if key != "data"}
    if rows := part.get("data", {}).get("values"):
        name = hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:12]
        datasets[name] = rows
        return named | {"data": {"name": name}}
    return named | ({"data": part["data"]} if "data" in part else {})


def _without_legend(part: Any) -> Any:
    """A specification without the legends of ``mechanism``."""
    if isinstance(part, list):
        return [_without_legend(one) for one in part]
    if not isinstance(part, dict):
        return part
    hidden = {"legend": None} if part.get("field") == "mechanism" and "scale" in part else {}
    return {key: value if key == "datasets" else _without_legend(value) for key, value in part.items()} | hidden


def _config() -> dict[str, Any]:
    axis: dict[str, Any] = {"labelColor": INK[0], "titleColor": GREY[0], "gridColor": GRID[0], "domainColor": GREY[0]}
    axis |= {"tickColor": GREY[0], "labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal"}
    titles: dict[str, Any] = {"color": INK[0], "fontSize": 13, "fontWeight": "normal", "anchor": "start"}
    titles |= {"subtitleColor": GREY[0]}
    return {
        "background": PAPER[0],
        "view": {"stroke": None},
        "axis": axis | {"labelOverlap": "greedy", "labelFlush": False},
        "axisY": {"domain": False, "ticks": False, "labelPadding": 6},
        "title": titles,
        "legend": {
            "labelColor": INK[0],
            "titleColor": GREY[0],
            "orient": "bottom",
            "columns": 6,
            "labelLimit": 260,
            "symbolOpacity": 1,
        },
        "text": {"color": INK[0], "fontSize": 12},
    }


@functools.cache
def program() -> str:
    """Vega, Vega-Lite and vega-embed as one script, 0.9 MB, for a page that loads nothing."""
    return str(vl_convert.javascript_bundle()).replace("</script", "<\\/script")  # type: ignore[call-arg]


def marks(looks: dict[str, Look], title: str | None = None) -> dict[str, Any]:
    """Encodings of ``mechanism`` by stroke, filling and marker, with one legend for the three."""
    names, shown = list(looks), list(looks.values())
    filling = [PAPER[0] if look.hollow else look.light for look in shown]
    legend = alt.Legend(title=title)
    return {
        "stroke": alt.Stroke(
            "mechanism:N", legend=legend, scale=alt.Scale(domain=names, range=[look.light for look in shown])
        ),
        "fill": alt.Fill("mechanism:N", legend=legend, scale=alt.Scale(domain=names, range=filling)),
        "shape": alt.Shape(
            "mechanism:N", legend=legend, scale=alt.Scale(domain=names, range=[look.shape for look in shown])
        ),
    }


def faded(shown: float = 1.0) -> Any:
    """An opacity by which all mechanisms but the chosen one step back."""
    test = "chosen == '' || chosen == datum.mechanism"
    return alt.condition(test, alt.value(shown), alt.value(0.12 * shown))


def names_in(part: Any) -> set[str]:
    """The mechanisms that a specification draws."""
    if isinstance(part, list):
        return set().union(*map(names_in, part))
    if not isinstance(part, dict):
        return set()
    own = part.get("scale", {}).get("domain", []) if part.get("field") == "mechanism" else []
    return set(own).union(*(names_in(value) for key, value in part.items() if key != "datasets"))


def values(rows: Sequence[dict[str, Any]]) -> alt.Data:
    """Rows as data of a chart, without those that hold a number that is not finite."""
    finite = [row for row in rows if all(not isinstance(one, float) or math.isfinite(one) for one in row.values())]
    return alt.Data(values=[{key: _short(one) for key, one in row.items()} for row in finite])


def _short(value: Any) -> Any:
    """Four decimals, or six digits of a smaller number: no picture shows more, and a page holds many."""
    return value if not isinstance(value, float) else round(value, 4) if abs(value) >= 1 else float(f"{value:.6g}")


def titled(text: str, *, synthetic: bool) -> str:
    """A figure's title, which says of synthetic data that it is."""
    return f"{text}, SYNTHETIC data" if synthetic else text
