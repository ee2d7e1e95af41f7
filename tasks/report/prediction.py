"""Page on private prediction: cost and quality of answers with their chart, and where private training is better."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import altair as alt

from dptune.core.digits import at_most
from dptune.core.settings import RECORD
from tasks.charts.canvas import PAPER, Figure, Panel, faded, marks, save, titled, values
from tasks.charts.looks import GREY, INK, SHAPES, Look, looks
from tasks.charts.seed_groups import CERTIFIED, distinct_epsilons
from tasks.report.numbers import digits4
from tasks.report.page import write

PAGE, PICTURE = "prediction.html", "prediction.png"
Row = dict[str, Any]
METRIC = "perplexity_pooled"
_SETTINGS = {
    "budget_epsilon": "ε of the budget (hollow: claimed, not proved)",
    "tokens": "tokens T within the budget",
    "models": "models N",
    "public_weight": "least weight w0 of the public model",
    "subsample": "sampling rate q (only hollow)",
    "alpha": "Rényi order alpha",
}
_SHORT = {
    "budget_epsilon": "epsilon",
    "tokens": "T",
    "models": "N",
    "public_weight": "w0",
    "subsample": "q",
    "alpha": "alpha",
}
_FIGURES = {METRIC: "pooled perplexity, held out", "private_weight": "mean weight of private models"}
_DASHES = {"public": [2, 3], "nonprivate": [7, 4]}
#: Where the name of a line begins and how wide its letters are, in pixels; its height as a share of the panel's.
_NAME_LEFT, _LETTER_WIDTH, _NAME_HEIGHT = 4, 6, 0.08
_SAME_EPSILON = 0.01


@dataclass(frozen=True)
class Comparison:
    """Answers and training at equal (epsilon, delta, unit)."""

    answers: Row
    training: Row

    @property
    def better(self) -> str:
        """Name of the one with the lower perplexity."""
        return "prediction" if self.answers[METRIC] < self.training[METRIC] else "training"


def write_page(result: dict[str, Any], directory: Path) -> None:
    """Write prediction.html and prediction.png for what ``tasks.prediction.answers.score`` returned."""
    rows = result["rows"]
    scores_allowed = result["telemetry"] == "research"
    (directory / PICTURE).unlink(missing_ok=True)  # a picture that was drawn under research telemetry must not stay
    figures = [prediction(rows, result["serve"], synthetic=result["synthetic"])] if scores_allowed else []
    for figure in figures:
        save(figure, directory / PICTURE)
    found = list(comparisons(rows))
    write(
        "prediction.html.j2",
        directory / PAGE,
        figures,
        protocol_looks(rows),
        result=result,
        scores_allowed=scores_allowed,
        opening=[answer(found, result["records"], scores_allowed=scores_allowed)],
        rows=sorted(rows, key=_perplexity),
        comparisons=found,
        name_of=lambda row: protocol_name(row) if row["kind"] in ("answers", "published") else "",
    )


def answer(found: list[Comparison], records: int, *, scores_allowed: bool) -> str:
    """The sentence that opens the page: how often answers are better than a trained model, and by how much.

    Args:
        records: number of held-out records that all figures are of.
    """
    if not scores_allowed:
        return "Telemetry is private, so no figure compares private answers with private training."
    if not found:
        return "No finished run has the certified ε, δ and unit of a protocol here, so nothing is compared."
    won = [one for one in found if one.better == "prediction"]
    one = min(found, key=lambda one: float(one.answers[METRIC]))
    best = (
        f"the best answers have perplexity {digits4(one.answers[METRIC])} (certified ε = "
        f"{at_most(one.answers['epsilon_certified'])}, {one.answers['tokens']} tokens, one {one.answers['unit']}), "
        f"and training at the same ε, δ and unit has {digits4(one.training[METRIC])}, all on {records} held-out records"
    )
    every = "the only comparison" if len(found) == 1 else f"all {len(found)} comparisons"
    if not won:
        return f"Private training beats private answers in {every}: {best}."
    where = every if len(won) == len(found) else f"{len(won)} of {len(found)} comparisons"
    return f"Private answers beat private training in {where}: {best}."


def comparisons(rows: list[Row]) -> Iterator[Comparison]:
    """Compare the best provable answers for every unit, budget and T with the best private training of equal certified
    epsilon, delta and unit. Both are chosen by the perplexities on the page.
    """
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in (row for row in rows if row["kind"] == "answers" and METRIC in row):
        groups.setdefault((row["unit"], row["budget_epsilon"], row["tokens"]), []).append(row)
    for _, group in sorted(groups.items()):
        answers = min(group, key=_perplexity)
        equal = [row for row in rows if row["kind"] == "training" and _equally_private(answers, row)]
        if equal:
            yield Comparison(answers, min(equal, key=_perplexity))


def _equally_private(one: Row, other: Row) -> bool:
    epsilons = float(one["epsilon_certified"]), float(other["epsilon_certified"])
    same = (one["unit"], one["delta"]) == (other["unit"], other["delta"])
    return same and math.isfinite(epsilons[1]) and math.isclose(*epsilons, rel_tol=_SAME_EPSILON)


def _perplexity(row: Row) -> float:
    return float(row.get(METRIC, math.inf))


# The chart: perplexity, and the weight of private models, against each setting that varies.


def protocol_name(row: Row) -> str:
    """The name of a protocol and its unit, as legends have it."""
    return f"{'pmixed' if row['kind'] == 'answers' else 'pmixed_published'}, {row['unit']}"


def protocol_looks(rows: list[Row]) -> dict[str, Look]:
    """The look of each protocol among ``rows``: PMixED's hue, a marker for each unit, hollow as published."""
    named = {protocol_name(row): row for row in rows if row["kind"] in ("answers", "published")}
    units = sorted({str(row["unit"]) for row in named.values()}, key=lambda unit: (unit != RECORD, unit))
    shapes = dict(zip(units, itertools.cycle(SHAPES), strict=False))
    own = looks(["pmixed"])["pmixed"]
    return {
        name: replace(own, shape=shapes[row["unit"]], hollow=row["kind"] == "published")
        for name, row in sorted(named.items())
    }


def prediction(rows: list[Row], serve: dict[str, Any], *, synthetic: bool) -> Figure:
    """Perplexity and weight of private models against each setting that varies, through the setting that is served.

    Args:
        rows: rows in the form of ``tasks.prediction.answers.score``.
        serve: settings of the ensemble that answers; a value that was not scored is replaced by the nearest that was.
    """
    scored = [row for row in rows if row["kind"] in ("answers", "published") and METRIC in row]
    held = _fixed_settings(scored, {**serve, "budget_epsilon": serve["epsilon"]})
    columns = [key for key in held if len({row[key] for row in scored if key in row}) > 1] or ["budget_epsilon"]
    panels = [
        Panel(_panel(rows, scored, held, key, figure), title) for figure, title in _FIGURES.items() for key in columns
    ]
    others = ", ".join(f"{_SETTINGS[key].partition(' (')[0]} = {value:g}" for key, value in held.items())
    marked = "Hollow: as published, at the ε that it claims. Marks without a line: private training."
    note = f"{marked} Values of what is not on an axis: {others}."
    return Figure(
        "prediction", titled("Private prediction", synthetic=synthetic), tuple(panels), max(2, len(columns)), note
    )


def _fixed_settings(rows: list[Row], serve: dict[str, Any]) -> dict[str, float]:
    """The scored value of every setting that is nearest to the served one; the first if none is served.

    The order is none of them where epsilon alone decides it; else it is the first one of that epsilon.
    """
    held = {}
    for key in _SETTINGS:
        if key == "alpha":
            continue
        found = list(dict.fromkeys(row[key] for row in rows if key in row))
        if found:
            wanted = serve.get(key, found[0])
            held[key] = min(found, key=lambda value: abs(value - wanted))
    firsts = _first_orders(rows)
    if any(row["alpha"] != firsts[row["budget_epsilon"]] for row in rows if "alpha" in row):
        held["alpha"] = firsts[held["budget_epsilon"]]
    return held


def _first_orders(rows: list[Row]) -> dict[float, float]:
    """The first order that was scored at each epsilon, which is served."""
    firsts: dict[float, float] = {}
    for row in rows:
        if "alpha" in row:
            firsts.setdefault(row["budget_epsilon"], row["alpha"])
    return firsts


def _is_held(row: Row, held: dict[str, float], varied: str, firsts: dict[float, float]) -> bool:
    expected = held | ({"alpha": firsts[row["budget_epsilon"]]} if "alpha" in held else {})
    return all(row[key] == value for key, value in expected.items() if key in row and key != varied)


def _panel(rows: list[Row], scored: list[Row], held: dict[str, float], key: str, figure: str) -> Any:
    shown, firsts = protocol_looks(scored), _first_orders(scored)
    points = [
        {"mechanism": protocol_name(row), "x": float(row[key]), "value": float(row[figure])}
        for row in scored
        if key in row and _is_held(row, held, key, firsts)
    ]
    scale = (
        alt.Scale(type="log", nice=False, padding=16)
        if key == "tokens"
        else alt.Scale(zero=False, nice=False, padding=16)
    )
    trained = _trained(rows) if figure == METRIC and key == "budget_epsilon" else []
    x = alt.X("x:Q", title=_SETTINGS[key], scale=scale, axis=_axis(points, trained))
    alike = len({point["value"] for point in points}) < 2  # Vega rounds such a label to a whole number
    y_axis = alt.Axis(format=".3~g") if alike else alt.Axis()
    heights = alt.Scale(zero=False, nice=False, padding=16)  # with room for a name
    y = alt.Y("value:Q", title=None, scale=heights, axis=y_axis)
    base = alt.Chart(values(points)).encode(x=x, y=y)
    tooltip = ["mechanism:N", alt.Tooltip("x:Q", title=_SHORT[key]), alt.Tooltip("value:Q", format=".4~f")]
    encoding = marks(shown)
    limits, names = _limits(rows) if figure == METRIC else ([], [])
    layers: list[Any] = [
        *limits,
        base.mark_line(strokeWidth=1.6).encode(encoding["stroke"], opacity=faded(0.8)),
        *names,  # no line goes through a name, and no name hides a point
        base.mark_point(size=80, strokeWidth=1.8).encode(**encoding, opacity=faded(), tooltip=tooltip),
        *_training(trained),
    ]
    return alt.layer(*layers)


def _axis(points: list[Row], trained: list[Row]) -> alt.Axis:
    """Ticks at the values themselves, for there are few; beside private training one for each epsilon that differs."""
    places = sorted({point["x"] for point in points})
    if not trained:
        return alt.Axis(values=places, format="~g", grid=False)
    every = distinct_epsilons([*places, *(point["x"] for point in trained)])
    return alt.Axis(values=every, format=".4~g", grid=False)


def _trained(rows: list[Row]) -> list[Row]:
    """The points of private training, at its certified epsilon."""
    return [
        {"x": float(row[CERTIFIED]), "value": float(row[METRIC]), "unit": str(row["unit"]), "cell": row["label"]}
        for row in rows
        if row["kind"] == "training" and math.isfinite(float(row[CERTIFIED]))
    ]


def _training(points: list[Row]) -> list[Any]:
    """Marks of private training, by unit."""
    tooltip = [alt.Tooltip("cell:N", title="private training"), "unit:N", alt.Tooltip("value:Q", format=".4~f")]
    marked: dict[str, Any] = {"size": 60, "color": INK[0], "fill": INK[0], "opacity": 1}
    return [
        alt.Chart(values(mine)).mark_point(shape=shape, **marked).encode(x="x:Q", y="value:Q", tooltip=tooltip)
        for shape, records in (("square", True), ("triangle-down", False))
        if (mine := [point for point in points if (point["unit"] == RECORD) == records])
    ]


def _limits(rows: list[Row]) -> tuple[list[Any], list[Any]]:
    """The lines of the public model and of models that are not private, and their names."""
    lines: list[Any] = []
    names: list[Any] = []
    heights = [float(row[METRIC]) for row in rows if METRIC in row]
    left, text, below = _NAME_LEFT, "", -math.inf
    drawn = sorted((row for row in rows if row["kind"] in _DASHES and METRIC in row), key=lambda row: row[METRIC])
    for place, row in enumerate(drawn):
        height, room = float(row[METRIC]), _NAME_HEIGHT * (max(heights) - min(heights))
        # The lowest line's name stands under it, where the next line would go through it; further ones in a row.
        under = place == 0 and len(drawn) > 1 and float(drawn[1][METRIC]) - height <= room
        near = height - below <= room and place != 1
        left = left + _LETTER_WIDTH * (len(text) + 2) if near else _NAME_LEFT
        text, below = str(row["label"]), height
        line = alt.Chart(values([{"value": height, "text": text}]))
        lines.append(line.mark_rule(color=GREY[0], strokeDash=_DASHES[row["kind"]]).encode(y="value:Q"))
        for look in ({"stroke": PAPER[0], "strokeWidth": 4}, {"color": INK[0]}):  # a ground that hides other lines
            place_of_name: dict[str, Any] = {"baseline": "top", "dy": 3} if under else {"baseline": "bottom", "dy": -2}
            name = line.mark_text(align="left", x=left, fontSize=11, **place_of_name, **look)
            names.append(name.encode(y="value:Q", text="text:N"))
    return lines, names
