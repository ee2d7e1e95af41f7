"""What a controller did to its knobs: clip radii, noise weights, noise and reward, and the epsilon that it spent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import altair as alt

from tasks.charts.canvas import Figure, Panel, titled, values
from tasks.charts.looks import Look
from tasks.charts.seed_groups import EPSILONS, Result

_HEAT = {"radius_": "clip radius", "weight_": "relative noise weight"}
_MOST_CELLS = 2000  # in a heat map: a page holds them all
_LINES = {"noise_multiplier": "noise multiplier", "controller_reward": "reward"}


def moves_knobs(result: Result) -> bool:
    """Whether the run's controller moved anything that can be drawn."""
    return len(result.get("knobs", [])) > 1


def controller(result: Result, look: Look) -> Figure:
    """A panel for each knob that the mechanism has, and one for epsilon; lines have the mechanism's colour."""
    panels = [panel for prefix, title in _HEAT.items() for panel in _knobs(result, prefix, title, look.light)]
    panels += [panel for key, title in _LINES.items() for panel in _line(result, key, title, look.light)]
    panels += _epsilons(result, look.light)
    title = titled(f"Controller of {result['label']}", synthetic=bool(result["synthetic"]))
    return Figure(result["label"], title, tuple(panels), columns=2)


def _knobs(result: Result, prefix: str, title: str, colour: str) -> list[Panel]:
    """A line for one knob, a heat map of at most 2,000 cells for one an adapter, nothing for none."""
    rows = [row for row in result["knobs"] if f"{prefix}0" in row]
    rows = rows[:: math.ceil(len(rows) * max(1, len(result["pairs"])) / _MOST_CELLS) or 1]
    names = [key for key in (rows[0] if rows else {}) if key.startswith(prefix) and key[len(prefix) :].isdigit()]
    if len(names) < 2:
        return _line(result, f"{prefix}0", title, colour)
    # A knob holds until the next row, so every column is as wide as its stay.
    starts = [row["releases"] for row in rows]
    ends = [*starts[1:], max(result["releases"], starts[-1] + 1)]
    cells = [
        {"from": start, "to": end, "adapter": adapter, "value": float(row[name])}
        for row, start, end in zip(rows, starts, ends, strict=True)
        for name, adapter in zip(names, _short(result["pairs"]), strict=False)
    ]
    positive = all(cell["value"] > 0 for cell in cells)
    scale = alt.Scale(type="log" if positive else "linear", scheme="viridis")
    chart = (
        alt.Chart(values(cells))
        .mark_rect()
        .encode(
            x=alt.X("from:Q", axis=alt.Axis(title="releases", grid=False, tickCount=6), scale=alt.Scale(nice=False)),
            x2="to:Q",
            y=alt.Y("adapter:N", sort=None, axis=alt.Axis(title=None, labelFontSize=max(6, 11 - len(names) // 8))),
            color=alt.Color("value:Q", scale=scale, legend=alt.Legend(title=None, orient="right", format=".2~g")),
        )
    )
    return [Panel(chart, f"{title} of each LoRA pair")]


def _line(result: Result, key: str, title: str, colour: str) -> list[Panel]:
    """A line of one figure; nothing where there is none, or where it never moves."""
    rows = [{"releases": row["releases"], "value": float(row[key])} for row in result["knobs"] if key in row]
    rows = [row for row in rows if math.isfinite(row["value"])]
    if len({row["value"] for row in rows}) < 2:
        return []
    return [Panel(_drawn(rows, "step-after", colour), title)]


def _drawn(rows: Sequence[dict[str, Any]], interpolate: Any, colour: str) -> alt.Chart:
    return (
        alt.Chart(values(rows))
        .mark_line(color=colour, point={"color": colour, "size": 20}, interpolate=interpolate)
        .encode(
            x=alt.X("releases:Q", axis=alt.Axis(title="releases", grid=False, tickCount=6)),
            y=alt.Y("value:Q", title=None, scale=alt.Scale(zero=False), axis=alt.Axis(format="~g")),
        )
    )


def _epsilons(result: Result, colour: str) -> list[Panel]:
    rows = [
        {"releases": point["releases"], "value": float(point[key]), "epsilon": title}
        for key, title in EPSILONS.items()
        if math.isfinite(float(result[key]))  # before any release, every epsilon is 0
        for point in result["history"]
        if math.isfinite(float(point[key]))
    ]
    if not rows:
        return []
    names = [title for title in EPSILONS.values() if any(row["epsilon"] == title for row in rows)]
    dashes = dict(zip(EPSILONS.values(), ([5, 3], [2, 2], [1, 0]), strict=True))
    legend = alt.Legend(title=None)
    chart = (
        alt.Chart(values(rows))
        .mark_line(strokeWidth=2, color=colour)
        .encode(
            x=alt.X("releases:Q", axis=alt.Axis(title="releases", grid=False, tickCount=6)),
            y=alt.Y("value:Q", title=None),
            strokeDash=alt.StrokeDash(
                "epsilon:N", legend=legend, scale=alt.Scale(domain=names, range=[dashes[n] for n in names])
            ),
        )
    )
    return [Panel(chart, "epsilon")]


def _short(pairs: Sequence[str]) -> list[str]:
    """Module paths without what all of them share at the front."""
    parts = [pair.split(".") for pair in pairs]
    shared = 0
    while len(parts) > 1 and all(len(part) > shared + 1 and part[shared] == parts[0][shared] for part in parts):
        shared += 1
    return [".".join(part[shared:]) for part in parts]
