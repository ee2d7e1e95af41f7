"""Curves of a run over its releases: learning curves, epsilon, and what a controller did to its knobs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import altair as alt

from tasks.charts.canvas import Figure, Panel, blank, faded, marks, save, titled, values
from tasks.charts.looks import Look, looks
from tasks.charts.seed_groups import CERTIFIED, EPSILONS, NO_BUDGET, PUBLISHED, Result, budget_of
from tasks.metrics import shown_in

_HEAT = {"radius_": "clip radius", "weight_": "relative noise weight"}
_MOST_CELLS = 2000  # in a heat map: a page holds them all
_KNOBS = {"noise_multiplier": "noise multiplier", "controller_reward": "reward"}
_DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3], [10, 4], [4, 4], [1, 3])
_RELEASES = alt.Axis(title="releases", grid=False, tickCount=6)
_MOST_CURVES = 200  # in one figure: no eye follows more, and a page holds every point


def curves(results: Sequence[Result], looks: dict[str, Look]) -> Figure | None:
    """A panel for each curve that telemetry lets exist; a line for each seed, dashed by budget. None without any."""
    several = len({result["model"] for result in results}) > 1
    panels = []
    drawn = sorted(shown_in("curves"), key=lambda metric: not metric.private)  # held-out records first
    for key, title in ((metric.name, metric.title) for metric in drawn):
        for model in dict.fromkeys(str(result["model"]) for result in results):
            rows = [row for one in results[:_MOST_CURVES] if one["model"] == model for row in _curve(one, key)]
            if rows:
                panels.append(Panel(_lines(rows, title, looks), f"{model}: {title}" if several else title))
    synthetic = any(result["synthetic"] for result in results)
    title = titled("Learning curves (lower is better)", synthetic=synthetic)
    return Figure("curves", title, tuple(panels), columns=2) if panels else None


def _curve(result: Result, key: str) -> list[dict[str, Any]]:
    shared = {
        "mechanism": str(result.get("mechanism", "")),
        "line": str(result.get("label", "")),
        "budget": budget_of(result),
    }
    points = [(point["releases"], float(point[key])) for point in result["history"] if key in point]
    return [shared | {"releases": releases, "value": value} for releases, value in points if math.isfinite(value)]


def _lines(rows: list[dict[str, Any]], title: str, looks: dict[str, Look]) -> Any:
    shown = {name: look for name, look in looks.items() if any(row["mechanism"] == name for row in rows)}
    base = alt.Chart(values(rows)).encode(
        x=alt.X("releases:Q", axis=_RELEASES),
        y=alt.Y("value:Q", scale=alt.Scale(zero=False), title=None),
        detail="line:N",
    )
    tooltip = [alt.Tooltip("line:N", title="cell"), "releases:Q", alt.Tooltip("value:Q", title=title, format=".4~f")]
    encoding = marks(shown)
    return alt.layer(
        base.mark_line(strokeWidth=1.8).encode(encoding["stroke"], dashed(rows), opacity=faded(0.85)),
        base.mark_point(size=40).encode(**encoding, opacity=faded(), tooltip=tooltip),
    )


def dashed(rows: Sequence[dict[str, Any]]) -> alt.StrokeDash:
    """Dashes by budget, with a legend where there are several; what has no budget is solid."""
    budgets = sorted({row["budget"] for row in rows} - {NO_BUDGET}, key=float)
    dashes = [list(_DASHES[place % len(_DASHES)]) for place in range(len(budgets))]
    scale = alt.Scale(domain=[*budgets, NO_BUDGET], range=[*dashes, list(_DASHES[0])])
    # Long enough to tell a line of dashes and dots from a solid one.
    legend = alt.Legend(title="budget ε", values=budgets, symbolSize=900) if len(budgets) > 1 else None
    return alt.StrokeDash("budget:N", scale=scale, legend=legend)


def spent(results: Sequence[Result], looks: dict[str, Look]) -> Figure | None:
    """Epsilon over releases, certified and published: a panel for each budget. None if no cell has a finite one.

    Curves of mechanisms often coincide, so the first in the order of legends is drawn widest and shows on both sides.
    """
    first = list({(one["model"], one["mechanism"], one["budget_epsilon"]): one for one in reversed(results)}.values())
    budgets = sorted({one["budget_epsilon"] for one in first if one["budget_epsilon"] is not None})
    panels = []
    for budget in [*budgets, None]:
        rows = [row for one in first if one["budget_epsilon"] == budget for row in _spent_rows(one)]
        if rows:
            title = f"budget ε = {budget:g}" if budget is not None else "no budget"
            panels.append(Panel(_spent_panel(rows, looks), title if len(budgets) > 1 else ""))
    synthetic = any(result["synthetic"] for result in results)
    note = "Solid: certified (proved). Dashed: published (claimed). Coinciding lines lie inside each other."
    title = titled("Epsilon over releases", synthetic=synthetic)
    return Figure("epsilon", title, tuple(panels), 2, note) if panels else None


def _spent_rows(result: Result) -> list[dict[str, Any]]:
    return [
        {
            "mechanism": str(result["mechanism"]),
            "line": f"{result['model']} {result['mechanism']} {key}",
            "kind": EPSILONS[key],
            "releases": point["releases"],
            "value": float(point[key]),
        }
        for key in (CERTIFIED, PUBLISHED)
        if math.isfinite(float(result[key]))  # before any release, every epsilon is 0
        for point in result["history"]
        if math.isfinite(float(point[key]))
    ]


def _spent_panel(rows: list[dict[str, Any]], looks: dict[str, Look]) -> Any:
    shown = {name: look for name, look in looks.items() if any(row["mechanism"] == name for row in rows)}
    kinds = [EPSILONS[CERTIFIED], EPSILONS[PUBLISHED]]
    dashed = alt.StrokeDash("kind:N", legend=None, scale=alt.Scale(domain=kinds, range=[[1, 0], [5, 3]]))
    tooltip = ["mechanism:N", "kind:N", "releases:Q", alt.Tooltip("value:Q", title="ε", format=".3~g")]
    base = alt.Chart(values(rows)).encode(
        x=alt.X("releases:Q", axis=_RELEASES), y=alt.Y("value:Q", title=None), detail="line:N", opacity=faded()
    )
    step = min(1.8, 8 / len(shown))
    lines = [
        base.transform_filter(alt.FieldEqualPredicate(field="mechanism", equal=name))
        .mark_line(strokeWidth=1.6 + step * (len(shown) - 1 - place), strokeCap="butt")
        .encode(marks(shown)["stroke"], dashed)
        for place, name in enumerate(shown)
    ]
    points = base.mark_point(size=50).encode(**marks(shown), tooltip=tooltip)
    return alt.layer(*lines, points)


# What a controller did to its knobs.


def moves_knobs(result: Result) -> bool:
    """Whether the run's controller moved anything that can be drawn."""
    return len(result.get("knobs", [])) > 1


def controller(result: Result, look: Look, name: str = "") -> Figure:
    """A panel for each knob that the mechanism has, and one for epsilon; lines have the mechanism's colour.

    Args:
        name: of the cell in the title; empty takes its label.
    """
    panels = [panel for prefix, title in _HEAT.items() for panel in _knobs(result, prefix, title, look.light)]
    panels += [panel for key, title in _KNOBS.items() for panel in _knob_line(result, key, title, look.light)]
    panels += _epsilons(result, look.light)
    title = titled(f"Controller of {name or result['label']}", synthetic=bool(result["synthetic"]))
    return Figure(result["label"], title, tuple(panels), columns=2)


def _knobs(result: Result, prefix: str, title: str, colour: str) -> list[Panel]:
    """A line for one knob, a heat map of at most 2,000 cells for one an adapter, nothing for none."""
    rows = [row for row in result["knobs"] if f"{prefix}0" in row]
    rows = rows[:: math.ceil(len(rows) * max(1, len(result["pairs"])) / _MOST_CELLS) or 1]
    names = [key for key in (rows[0] if rows else {}) if key.startswith(prefix) and key[len(prefix) :].isdigit()]
    if len(names) < 2:
        return _knob_line(result, f"{prefix}0", title, colour)
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
            x=alt.X("from:Q", axis=_RELEASES, scale=alt.Scale(nice=False)),
            x2="to:Q",
            y=alt.Y("adapter:N", sort=None, axis=alt.Axis(title=None, labelFontSize=max(6, 11 - len(names) // 8))),
            color=alt.Color("value:Q", scale=scale, legend=alt.Legend(title=None, orient="right", format=".2~g")),
        )
    )
    return [Panel(chart, f"{title} of each LoRA pair")]


def _knob_line(result: Result, key: str, title: str, colour: str) -> list[Panel]:
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
            x=alt.X("releases:Q", axis=_RELEASES),
            y=alt.Y("value:Q", title=None, scale=alt.Scale(zero=False)),
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
            x=alt.X("releases:Q", axis=_RELEASES),
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


# The picture that a finished run leaves in its folder.


def draw_curves(results: Sequence[Result], path: Path) -> None:
    """Draw learning curves: one colour for each mechanism, dashes for each budget, a line for each seed."""
    figure = curves(results, looks(str(result.get("mechanism", "")) for result in results))
    save(figure or blank("curves", "No point of a curve was logged"), path)
