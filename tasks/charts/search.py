"""The price of choosing: noise that candidates need against how many there are on average; and what a rehearsal's
ranking is worth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from tasks.charts.canvas import Figure, Panel, faded, marks, titled, values
from tasks.charts.looks import BLUE, INK, PURPLE, VERMILLION, Look

#: Name and look of each way to count that is drawn, by its key.
WAYS = {
    "search": ("best of a random number, as certified", Look(*BLUE, "circle")),
    "renyi": ("the same by the published bound", Look(*PURPLE, "diamond")),
    "composed": ("that many runs composed, all shown", Look(*VERMILLION, "square")),
}
WAY_LOOKS = dict(WAYS.values())


def choosing(curve: Sequence[Sequence[Any]], expected: float, epsilon: float) -> Figure:
    """Noise multiplier at one budget against the expected number of candidates; at 1 all ways are a single run's.

    Args:
        curve: (way, expected candidates, noise multiplier).
        expected: of the search itself, which is marked.
    """
    points: list[dict[str, Any]] = [
        {"mechanism": WAYS[way][0], "x": float(count), "value": float(noise)} for way, count, noise in curve
    ]
    at = sorted({point["x"] for point in points})
    scale = alt.Scale(type="log", nice=False, padding=16)
    x = alt.X("x:Q", title="candidates, on average", scale=scale, axis=alt.Axis(values=at, format="~g", grid=False))
    y = alt.Y("value:Q", title=None, scale=alt.Scale(zero=False))
    base = alt.Chart(values(points)).encode(x=x, y=y)
    tooltip = [
        alt.Tooltip("mechanism:N", title="counted as"),
        alt.Tooltip("x:Q", title="candidates"),
        alt.Tooltip("value:Q", title="noise multiplier", format=".4~f"),
    ]
    encoding = marks(WAY_LOOKS)
    layers: list[Any] = [
        base.mark_line(strokeWidth=1.8).encode(encoding["stroke"], opacity=faded(0.8)),
        base.mark_point(size=70, strokeWidth=1.8).encode(**encoding, opacity=faded(), tooltip=tooltip),
    ]
    own = [point | {"text": "this search"} for point in points if _is_own(point, expected)]
    marked = alt.Chart(values(own)).encode(x=x, y=y)
    layers.append(marked.mark_point(shape="circle", size=260, color=INK[0], strokeWidth=1.4))
    layers.append(marked.mark_text(dy=18, color=INK[0], fontSize=12).encode(text="text:N"))
    title = f"Noise multiplier that ε = {epsilon:g} for the whole search needs"
    return Figure("choosing", title, (Panel(alt.layer(*layers), "", 300),))


def _is_own(point: dict[str, Any], expected: float) -> bool:
    return point["mechanism"] == WAYS["search"][0] and abs(point["x"] / expected - 1) < 1e-5


def ranking(points: Sequence[tuple[str, float, float]], chosen: str, *, synthetic: bool) -> Figure:
    """Perplexity of rehearsed settings on held-out private records against that in the rehearsal.

    Args:
        points: (settings, in the rehearsal, on private records); those that diverged have no place.
        chosen: the settings that won the rehearsal, which are marked.
    """
    rows = [{"settings": name, "x": rehearsed, "value": held_out} for name, rehearsed, held_out in points]
    x = alt.X("x:Q", title="perplexity in the rehearsal", scale=alt.Scale(zero=False, padding=16))
    y = alt.Y("value:Q", title=None, scale=alt.Scale(zero=False, padding=16))
    tooltip = [
        alt.Tooltip("settings:N", title="settings"),
        alt.Tooltip("x:Q", title="in the rehearsal", format=".4~f"),
        alt.Tooltip("value:Q", title="on held-out private records", format=".4~f"),
    ]
    dots = alt.Chart(values(rows)).encode(x=x, y=y, tooltip=tooltip)
    own = alt.Chart(values([row | {"text": "chosen"} for row in rows if row["settings"] == chosen])).encode(x=x, y=y)
    layers: list[Any] = [
        dots.mark_point(size=70, filled=True, color=BLUE[0], opacity=1),
        own.mark_point(shape="circle", size=260, color=INK[0], strokeWidth=1.4),
        own.mark_text(dy=18, color=INK[0], fontSize=12).encode(text="text:N"),
    ]
    title = titled("Perplexity on held-out private records", synthetic=synthetic)
    return Figure("ranking", title, (Panel(alt.layer(*layers), "", 300),))
