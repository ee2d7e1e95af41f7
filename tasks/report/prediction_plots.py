"""Draws the quality of private prediction: one column for each setting that varies, with the others fixed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from dptune.units import RECORD
from tasks.drawing import colour, legend_below, save

Row = dict[str, Any]
METRIC = "perplexity_pooled"
_SETTINGS = {
    "budget_epsilon": "epsilon (published: claimed, not proven)",
    "tokens": "T: answers that the budget must last for",
    "models": "N: models",
    "public_weight": "w0: public weight of pmixed",
    "subsample": "q: sampling rate of the published one",
}
_SHORT = {"budget_epsilon": "epsilon", "tokens": "T", "models": "N", "public_weight": "w0", "subsample": "q"}
_FLAT = {"public": ":", "nonprivate": "-."}


def draw(rows: list[Row], serve: dict[str, Any], path: Path, *, synthetic: bool) -> None:
    """Perplexity and weight of private models against each setting that varies, through the setting that is served.

    Args:
        rows: rows in the form of ``tasks.prediction.answers.score``.
        serve: settings of the ensemble that answers; a value that was not scored is replaced by the nearest that was.
    """
    scored = [row for row in rows if row["kind"] in ("answers", "published") and METRIC in row]
    held = _fixed_settings(scored, {**serve, "budget_epsilon": serve["epsilon"]})
    columns = [key for key in held if len({row[key] for row in scored if key in row}) > 1] or ["budget_epsilon"]
    size = (max(4.2 * len(columns), 8), 7.5)
    figure, axes = plt.subplots(
        2, len(columns), figsize=size, sharex="col", sharey="row", squeeze=False, constrained_layout=True
    )
    for column, key in enumerate(columns):
        for shade, name in enumerate(sorted({_name(row) for row in scored})):
            mine = [row for row in scored if _name(row) == name and key in row and _is_held(row, held, key)]
            style = "x--" if name.startswith("published") else "o-"
            for axis, figure_name in zip(axes[:, column], (METRIC, "private_weight"), strict=True):
                axis.plot(*_points(mine, key, figure_name), style, color=colour(shade), label=name)
        if key == "budget_epsilon":
            _draw_training(axes[0, column], rows)
        axes[1, column].set(xlabel=_SETTINGS[key], xscale="log" if key == "tokens" else "linear")
    _draw_limits(axes[0], rows)
    axes[0, 0].set(ylabel="pooled perplexity, held out")
    axes[1, 0].set(ylabel="mean weight of private models")
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    others = ", ".join(f"{_SHORT[key]} {value:g}" for key, value in held.items())
    figure.suptitle(f"Private prediction{', SYNTHETIC data' if synthetic else ''}\nheld, where it is no axis: {others}")
    legend_below(figure, axes[0, 0])
    save(figure, path)


def _fixed_settings(rows: list[Row], serve: dict[str, Any]) -> dict[str, float]:
    """The scored value of every setting that is nearest to the served one; the first if none is served."""
    held = {}
    for key in _SETTINGS:
        values = list(dict.fromkeys(row[key] for row in rows if key in row))
        if values:
            wanted = serve.get(key, values[0])
            held[key] = min(values, key=lambda value: abs(value - wanted))
    return held


def _is_held(row: Row, held: dict[str, float], varied: str) -> bool:
    return all(row[key] == value for key, value in held.items() if key in row and key != varied)


def _name(row: Row) -> str:
    return f"{'pmixed' if row['kind'] == 'answers' else 'published'}, {row['unit']}"


def _points(rows: list[Row], x: str, y: str) -> tuple[list[float], list[float]]:
    points = sorted((row[x], float(row[y])) for row in rows)
    return [point[0] for point in points], [point[1] for point in points]


def _draw_training(axis: Axes, rows: list[Row]) -> None:
    trained = [row for row in rows if row["kind"] == "training" and math.isfinite(float(row["epsilon_certified"]))]
    for unit in sorted({str(row["unit"]) for row in trained}):
        mine, marker = [row for row in trained if row["unit"] == unit], "s" if unit == RECORD else "D"
        at, found = [float(row["epsilon_certified"]) for row in mine], [row[METRIC] for row in mine]
        if mine:
            axis.scatter(at, found, marker=marker, color="black", label=f"private training, {unit} (certified epsilon)")


def _draw_limits(axes: Any, rows: list[Row]) -> None:
    """Draw the public model and the non-private average as lines, with labels beside the last column that do not
    overlap.
    """
    limits = sorted((row[METRIC], row["label"], _FLAT[row["kind"]]) for row in rows if row["kind"] in _FLAT)
    values = [-math.inf, *(value for value, _, _ in limits), math.inf]
    for place, (value, label, line) in enumerate(limits, start=1):
        for axis in axes:
            axis.axhline(value, linestyle=line, color="grey", linewidth=1)
        side = "top" if values[place + 1] - value < value - values[place - 1] else "bottom"
        axes[-1].annotate(label, (1.01, value), xycoords=("axes fraction", "data"), fontsize=7, va=side)
