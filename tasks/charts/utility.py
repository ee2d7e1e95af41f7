"""Utility against epsilon: a column of points for each epsilon, and one at the right for what has none.

Where all mechanisms meet at one certified epsilon, each has a line there instead, best first (``dots``), and those that
ran at further ones have a panel of curves beside it. Mechanisms of equal epsilon stand beside each other in the order
of the legend, so that no point hides another. Bars are one standard deviation over seeds; with one seed, one standard
error over records of what privacy costs. The public model, and training without privacy with its own deviation, are
lines; a public model that is so much worse that all points would lie on one another is named at the upper edge. In
lines of their own, mechanisms without a guarantee stand below the others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import altair as alt

from dptune.core.digits import at_most
from tasks.charts.canvas import SHADE, Figure, Panel, faded, marks, titled, values
from tasks.charts.looks import GREY, INK, Look
from tasks.charts.seed_groups import (
    CERTIFIED,
    EPSILONS,
    SAME_EPSILON,
    Result,
    SeedGroup,
    budget_of,
    distinct_epsilons,
    over_seeds,
    perplexity_metric,
    record_error,
    untuned,
)
from tasks.metrics import measured_on, title_of

_LINE, _AROUND = 34, 70  # pixels
_EDGE, _WORDS = 0.05, 0.35  # shares of the axis left free beside its marks, and for words
_COLUMN = 0.6  # share of the room between two epsilons that a column of points takes
_MOST_LABELS = 7
_CAP = 18  # pixels; wider than a point, behind which a short bar would be hidden
_SAME = 0.001  # of logarithms of epsilon, to know a label's column again
_AGAINST = "against epsilon"
_OVER_SEEDS = "Bars: one standard deviation over seeds."
_ONE_SEED = "One seed has no bars: training's noise alone moves each point."
_OVER_RECORDS = (
    "Bars: one standard error, over {records}, of the difference to training without privacy; a mark hides what is "
    "shorter. Training's own noise moves each point too; one seed does not show how far."
)
_FAR = 2.0  # times the room that everything else takes
_Bar = Callable[[SeedGroup], float]  # half the length of a group's bar; 0 for none


def utility(
    results: Sequence[Result], looks: dict[str, Look], keys: Sequence[str] = (CERTIFIED,), *, name: str = "utility"
) -> Figure | None:
    """A panel for each model, unit of privacy and epsilon of ``keys``; None if there is no private run to show."""
    metric = perplexity_metric(results)
    groups = [group for group in over_seeds(results, metric) if math.isfinite(group.mean)]
    private = [group for group in groups if not group.nonprivate]
    places = list(dict.fromkeys((str(one.first["model"]), str(one.first["unit"])) for one in private))
    ranks = list(keys) == [CERTIFIED]
    repeated = any(len(group.results) > 1 for group in groups)
    panels, said, bars = [], set[str](), list[float]()
    for model, unit in places:
        mine = [group for group in private if (group.first["model"], group.first["unit"]) == (model, unit)]
        reference = [group for group in groups if group.nonprivate and group.first["model"] == model][:1]
        several = (model if len({one for one, _ in places}) > 1 else "", f"one {unit}" if len(places) > 1 else "")
        titles = list(filter(None, several))
        before = untuned(results, model, metric)
        bar = _bar(repeated, reference, metric)
        bars += map(bar, mine)
        ranked, curves = _ranked_and_curves(mine) if ranks else ([], mine)
        if ranked:
            said.add("by mechanism")
            rows = [_figures(group, CERTIFIED, bar) for group in ranked]
            met = [group.certified for group in ranked if math.isfinite(group.certified)]
            own = ", ".join([*titles, *([f"ε = {at_most(max(met))}"] if curves else [])])
            panels.append(dots(rows, reference, before, metric, looks, _tooltip(metric), own))
        if curves:
            said.add(_AGAINST)
            names = ", ".join(dict.fromkeys(group.mechanism for group in curves))
            own = ", ".join([*titles, *([f"{names} against ε"] if ranked else [])])
            panels += [Panel(_panel(curves, reference, before, key, metric, looks, bar), own, 320) for key in keys]
    title = f"{title_of(metric).capitalize()} {' and '.join(sorted(said, reverse=True))} (lower is better)"
    synthetic = any(result["synthetic"] for result in results)
    notes = [_said_of_bars(repeated, any(bars), metric, _AGAINST in said), _said_of_marks(groups, looks)]
    note = " ".join(note for note in notes if note)
    return Figure(name, titled(title, synthetic=synthetic), tuple(panels), note=note) if panels else None


def _ranked_and_curves(groups: Sequence[SeedGroup]) -> tuple[list[SeedGroup], list[SeedGroup]]:
    """The groups to rank at the one epsilon where all mechanisms meet, and those to draw against epsilon.

    All are ranked where there is one epsilon, and none where mechanisms meet at several, or some never meet.
    """
    private = [one for one in groups if math.isfinite(one.certified)]
    epsilons = distinct_epsilons([one.certified for one in private])
    if len(epsilons) < 2:
        return list(groups), []
    each = [[one for one in private if own <= one.certified <= own * (1 + SAME_EPSILON)] for own in epsilons]
    met = [ones for ones in each if len({one.mechanism for one in ones}) > 1]
    if len(met) != 1 or {one.mechanism for one in met[0]} != {one.mechanism for one in private}:
        return [], list(groups)
    ranked = [one for one in groups if one in met[0] or one not in private]
    elsewhere = {one.mechanism for one in private if one not in met[0]}
    return ranked, [one for one in private if one.mechanism in elsewhere]


def _bar(repeated: bool, reference: Sequence[SeedGroup], metric: str) -> _Bar:
    """Deviations over seeds where anything has several; else errors over records, if there is a ``reference``."""

    def over_records(group: SeedGroup) -> float:
        found = record_error(reference[0], group, metric) if reference else None
        return found.error if found else 0.0

    return (lambda group: group.spread) if repeated else over_records


def _said_of_bars(repeated: bool, there: bool, metric: str, curves: bool) -> str:
    """An explanation of the bars, or of their absence beside ``curves``."""
    if repeated:
        return _OVER_SEEDS
    if there:
        return _OVER_RECORDS.format(records=measured_on(metric))
    return _ONE_SEED if curves else ""


def _said_of_marks(groups: Sequence[SeedGroup], looks: dict[str, Look]) -> str:
    hollow = any(looks[group.mechanism].hollow for group in groups)
    return "Hollow: no guarantee, for it leaks raw statistics." if hollow else ""


def _panel(
    drawn: Sequence[SeedGroup],
    reference: Sequence[SeedGroup],
    before: float | None,
    key: str,
    metric: str,
    looks: dict[str, Look],
    bar: _Bar,
) -> Any:
    columns = _Columns([_epsilon(group, key) for group in drawn])
    names = [name for name in looks if any(group.mechanism == name for group in drawn)]
    rows = [_row(group, columns, _beside(group, drawn, names, columns, key), key, bar) for group in drawn]
    scale = alt.Scale(domain=[columns.left, columns.right], nice=False, zero=False)
    axis = alt.Axis(values=columns.ticks, labelExpr=columns.labels, grid=False, title=f"ε {EPSILONS[key]}")
    x = alt.X("x:Q", scale=scale, axis=axis)
    y = alt.Y("perplexity:Q", scale=alt.Scale(zero=False, padding=14), title=None)
    layers: list[Any] = []
    if columns.infinite:
        layers += _no_guarantee(columns)
    ends = [value for row in rows for value in (row["low"], row["high"])] + [group.mean for group in reference]
    if before is not None and before - max(ends) > _FAR * (max(ends) - min(ends)) > 0:
        layers.append(_far_above(before))
        before = None
    layers += _references(before, reference, columns)
    points = alt.Chart(values(rows)).encode(x=x, y=y)
    shown = {name: looks[name] for name in names}
    encoding = marks(shown)
    layers += [
        points.transform_filter("datum.finite")
        .mark_line(strokeWidth=1.5)
        .encode(encoding["stroke"], opacity=faded(0.7)),
        points.mark_rule(strokeWidth=1.5).encode(encoding["stroke"], y="low:Q", y2="high:Q", opacity=faded(0.9)),
        *(
            points.transform_filter("datum.low < datum.high")
            .mark_tick(orient="horizontal", size=_CAP, thickness=0.5, filled=False)
            .encode(encoding["stroke"], y=alt.Y(f"{end}:Q", title=None), opacity=faded(0.9))
            for end in ("low", "high")
            if any(row["low"] < row["high"] for row in rows)
        ),
        points.mark_point(size=90, strokeWidth=1.8).encode(**encoding, opacity=faded(), tooltip=_tooltip(metric)),
    ]
    return alt.layer(*layers)


def _epsilon(group: SeedGroup, key: str) -> float:
    return max(float(result[key]) for result in group.results)


class _Columns:
    """Where each epsilon stands: on a logarithmic axis, with infinity one step further."""

    def __init__(self, epsilons: Sequence[float]) -> None:
        self.epsilons = distinct_epsilons(epsilons)
        self.infinite = any(map(math.isinf, epsilons))
        places = [math.log2(epsilon) for epsilon in self.epsilons] or [0.0]  # nothing has a finite one
        steps = [after - before for before, after in itertools.pairwise(places)]
        self.room = min([*steps, 1.0])
        self.left, self.edge = (places[0] - self.room / 2, places[-1] + self.room / 2)
        width = max(0.6 * self.room, 0.2 * (self.edge - self.left))
        if self.infinite and not self.epsilons:
            self.edge = self.left
        self.infinity = self.edge + width / 2
        self.right = self.edge + width if self.infinite else self.edge

    @property
    def ticks(self) -> list[float]:
        few = len(self.epsilons) <= _MOST_LABELS
        shown = self.epsilons if few else [2.0**n for n in range(math.ceil(self.left), math.floor(self.right) + 1)]
        return [round(math.log2(one), 4) for one in shown] + ([round(self.infinity, 4)] if self.infinite else [])

    @property
    def labels(self) -> str:
        """An expression of Vega for the axis: an epsilon as tables round it, or the sign for infinity."""
        label = "format(pow(2, datum.value), '.3~g')"
        for epsilon in self.epsilons:
            label = f"abs(datum.value - {math.log2(epsilon):.4f}) < {_SAME} ? '{at_most(epsilon)}' : {label}"
        return f"datum.value > {self.edge:.4f} ? '∞' : {label}" if self.infinite else label

    def at(self, epsilon: float) -> float:
        if math.isinf(epsilon):
            return self.infinity
        return math.log2(min(self.epsilons, key=lambda one: abs(one - epsilon)))


def _beside(
    group: SeedGroup, drawn: Sequence[SeedGroup], names: Sequence[str], columns: _Columns, key: str
) -> tuple[int, int]:
    """The place of a mechanism among those in its column, and their number."""
    place = columns.at(_epsilon(group, key))
    there = {other.mechanism for other in drawn if columns.at(_epsilon(other, key)) == place}
    order = [name for name in names if name in there]
    return order.index(group.mechanism), len(order)


def _row(group: SeedGroup, columns: _Columns, beside: tuple[int, int], key: str, bar: _Bar) -> dict[str, Any]:
    shift = (beside[0] + 0.5) / beside[1] - 0.5
    place = columns.at(_epsilon(group, key)) + shift * _COLUMN * columns.room
    return {"x": place, **_figures(group, key, bar)}


def _figures(group: SeedGroup, key: str, bar: _Bar) -> dict[str, Any]:
    """What a point shows of a group, wherever it stands."""
    length = bar(group)
    return {
        "mechanism": group.mechanism,
        "finite": math.isfinite(_epsilon(group, key)),
        "perplexity": group.mean,
        "low": group.mean - length,
        "high": group.mean + length,
        "seeds": len(group.results),
        "budget": budget_of(group.first),
        **{name: at_most(group.first[name]) for name in EPSILONS},
    }


def _tooltip(metric: str) -> list[alt.Tooltip]:
    named = [alt.Tooltip(f"{key}:N", title=f"ε {title}") for key, title in EPSILONS.items()]
    found = alt.Tooltip("perplexity:Q", title=title_of(metric), format=".4~f")
    budget = alt.Tooltip("budget:N", title="budget ε")
    return [alt.Tooltip("mechanism:N"), found, alt.Tooltip("seeds:Q"), budget, *named]


def _no_guarantee(columns: _Columns) -> list[Any]:
    band = alt.Chart(alt.Data(values=[{"from": columns.edge, "to": columns.right}]))
    return [
        band.mark_rect(color=SHADE[0], opacity=0.7).encode(x="from:Q", x2="to:Q"),
        band.mark_text(text="no guarantee", y=8, align="right", dx=-6, color=GREY[0], fontSize=11).encode(x="to:Q"),
    ]


def _far_above(before: float) -> Any:
    row = [{"text": f"public model, untuned: {before:#.4g}, far above this"}]
    mark = alt.Chart(values(row)).mark_text(x=5, y=8, align="left", color=INK[0], fontSize=11)
    return mark.encode(text="text:N")


def _references(before: float | None, nonprivate: Sequence[SeedGroup], columns: _Columns) -> list[Any]:
    """The public model's line, and that of training without privacy with a band of its deviation."""
    layers: list[Any] = []
    lines: list[tuple[float, str, list[int], bool]] = []  # place, name, dashes, whether the name stands above
    if before is not None:
        lines.append((before, "public model, untuned", [2, 3], True))
    for group in nonprivate:
        lines.append((group.mean, "without privacy", [7, 4], False))
        if group.spread:
            band = alt.Chart(values([{"low": group.mean - group.spread, "high": group.mean + group.spread}]))
            layers.append(band.mark_rect(color=GREY[0], opacity=0.2).encode(y="low:Q", y2="high:Q"))
    for perplexity, name, dash, up in lines:
        line = alt.Chart(values([{"perplexity": perplexity, "text": name, "x": columns.left}]))
        layers.append(line.mark_rule(color=GREY[0], strokeDash=dash, strokeWidth=1.5).encode(y="perplexity:Q"))
        text = line.mark_text(align="left", dx=5, dy=-8 if up else 10, color=INK[0], fontSize=11)
        layers.append(text.encode(x="x:Q", y="perplexity:Q", text="text:N"))
    return layers


# A line for each mechanism.


def dots(
    rows: Sequence[dict[str, Any]],
    reference: Sequence[SeedGroup],
    before: float | None,
    metric: str,
    looks: dict[str, Look],
    tooltip: Sequence[alt.Tooltip],
    title: str = "",
) -> Panel:
    """A panel of rows that have mechanism, finite, perplexity, low and high.

    Args:
        reference: training without privacy, if there is any.
        before: perplexity of the public model; None if it is not known.
    """
    shown = [row for row in rows if all(math.isfinite(row[name]) for name in ("perplexity", "low", "high"))]
    ordered = sorted(shown, key=lambda row: (not row["finite"], row["perplexity"]))
    names = list(dict.fromkeys(row["mechanism"] for row in ordered))
    y = alt.Y("mechanism:N", sort=names, title=None, axis=alt.Axis(labelLimit=150, grid=False))
    ends = [value for row in ordered for value in (row["low"], row["high"])] + [group.mean for group in reference]
    far_off = before is not None and before - max(ends) > _FAR * (max(ends) - min(ends)) > 0
    low, high = min(ends), max([*ends, *([before] if before is not None and not far_off else [])])
    # Right of the last line there is room for words that no line crosses.
    room = _WORDS if any(not row["finite"] for row in ordered) else _EDGE
    span = high - low or abs(high) or 1.0
    domain = [low - _EDGE * span, high + room * span]
    x = alt.X(
        "perplexity:Q",
        scale=alt.Scale(zero=False, nice=False, domain=domain),
        title=title_of(metric),
        axis=alt.Axis(tickCount=8),
    )
    layers: list[Any] = []
    if open_ones := [row for row in ordered if not row["finite"]]:
        band = alt.Chart(values([{"mechanism": row["mechanism"], "text": "no guarantee"} for row in open_ones]))
        layers.append(band.mark_rect(color=SHADE[0], opacity=0.7).encode(y=y))
    lines = [(group.mean, f"without privacy: {group.mean:#.4g}", [7, 4], -20) for group in reference]
    if before is not None and far_off:
        far = alt.Chart(values([{"text": f"public model, untuned: {before:#.4g}, far above this"}]))
        layers.append(
            far.mark_text(align="right", color=INK[0], fontSize=11).encode(
                x=alt.value("width"), y=alt.value(-8), text="text:N"
            )
        )
    elif before is not None:
        lines.append((before, f"public model, untuned: {before:#.4g}", [2, 3], -6))
    middle = (low + high) / 2
    for place, name, dash, height in lines:
        line = alt.Chart(values([{"perplexity": place, "text": name}]))
        layers.append(line.mark_rule(color=GREY[0], strokeDash=dash, strokeWidth=1.5).encode(x=x))
        text = line.mark_text(align="left" if place < middle else "right", color=INK[0], fontSize=11)
        layers.append(text.encode(x=x, y=alt.value(height), text="text:N"))
    for look in ({"stroke": SHADE[0], "strokeWidth": 4}, {"color": GREY[0]}) if open_ones else ():  # over the lines
        said = band.mark_text(fontSize=11, align="right", dx=-6, **look)
        layers.append(said.encode(y=y, x=alt.value("width"), text="text:N"))
    points = alt.Chart(values(ordered)).encode(x=x, y=y)
    encoding = marks({name: looks[name] for name in looks if name in names})
    layers += [
        points.mark_rule(strokeWidth=1.5).encode(encoding["stroke"], x="low:Q", x2="high:Q", opacity=faded(0.9)),
        points.mark_point(size=90, strokeWidth=1.8).encode(**encoding, opacity=faded(), tooltip=list(tooltip)),
    ]
    return Panel(alt.layer(*layers), title, _AROUND + _LINE * len(names))
