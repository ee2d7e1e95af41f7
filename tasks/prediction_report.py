"""The page of private prediction: what an answer costs, what it is worth, and where training privately is better."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from jinja2 import Environment, FileSystemLoader
from matplotlib.axes import Axes

from dptune.files import write_text
from tasks.plots import colour, legend_below, save
from tasks.report import encoded, epsilon_text

Row = dict[str, Any]
PAGE, PICTURE = "prediction.html", "prediction.png"
METRIC = "perplexity_pooled"
_SAME_EPSILON = 0.01


@dataclass(frozen=True)
class Comparison:
    """Answers and training at equal (epsilon, delta, unit)."""

    answers: Row
    training: Row

    @property
    def better(self) -> str:
        """Which has the lower perplexity."""
        return "prediction" if self.answers[METRIC] < self.training[METRIC] else "training"


def write_page(result: dict[str, Any], directory: Path) -> None:
    """Write prediction.html and prediction.png for what ``tasks.answers.score`` returned."""
    rows = result["rows"]
    told = result["telemetry"] == "research"
    if told:
        draw(rows, directory / PICTURE, synthetic=result["synthetic"])
    picture = encoded(directory / PICTURE) if told else None
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    environment.filters["epsilon"] = epsilon_text
    page = environment.get_template("prediction.html.j2").render(
        result=result,
        told=told,
        picture=picture,
        rows=sorted(rows, key=lambda row: float(row.get(METRIC, math.inf))),
        comparisons=list(comparisons(rows)),
    )
    write_text(directory / PAGE, page)


def comparisons(rows: list[Row]) -> Iterator[Comparison]:
    """Every provable protocol with every private training run of equal certified epsilon, delta and unit."""
    for answers in (row for row in rows if row["kind"] == "answers" and METRIC in row):
        for training in (row for row in rows if row["kind"] == "training"):
            same = (answers["unit"], answers["delta"]) == (training["unit"], training["delta"])
            epsilons = float(answers["epsilon_certified"]), float(training["epsilon_certified"])
            if same and math.isfinite(epsilons[1]) and math.isclose(*epsilons, rel_tol=_SAME_EPSILON):
                yield Comparison(answers, training)


def draw(rows: list[Row], path: Path, *, synthetic: bool) -> None:
    """Perplexity against epsilon, and the weight of private models against T."""
    figure, axes = plt.subplots(1, 2, figsize=(12, 6.5), constrained_layout=True)
    names = sorted({_series(row) for row in rows if row["kind"] in ("answers", "published")})
    for index, name in enumerate(names):
        mine = [row for row in rows if row["kind"] in ("answers", "published") and _series(row) == name]
        style = "o-" if mine[0]["kind"] == "answers" else "x--"
        _lines(axes[0], mine, "budget_epsilon", METRIC, style, colour(index), name)
    for index, name in enumerate(sorted({_setting(row) for row in rows if "private_weight" in row})):
        mine = [row for row in rows if "private_weight" in row and _setting(row) == name]
        style = "o-" if mine[0]["kind"] == "answers" else "x--"
        _lines(axes[1], mine, "tokens", "private_weight", style, colour(index), name)
    trained = [row for row in rows if row["kind"] == "training" and math.isfinite(float(row["epsilon_certified"]))]
    axes[0].scatter(
        [float(row["epsilon_certified"]) for row in trained],
        [row[METRIC] for row in trained],
        marker="s",
        color="black",
        label="private training (certified epsilon)",
    )
    for row, line in ((row, line) for row in rows for kind, line in _FLAT if row["kind"] == kind):
        axes[0].axhline(row[METRIC], linestyle=line, color="grey", linewidth=1)
        axes[0].annotate(row["label"], (1, row[METRIC]), xycoords=("axes fraction", "data"), fontsize=7, ha="right")
    axes[0].set(xlabel="epsilon (published protocols: claimed, not proven)", ylabel="pooled perplexity, held out")
    axes[1].set(xlabel="T: answers that the budget must last for", ylabel="mean weight of private models", xscale="log")
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.suptitle("Private prediction" + (", SYNTHETIC data" if synthetic else ""))
    legend_below(figure, axes[0])
    axes[1].legend(fontsize=6)
    save(figure, path)


_FLAT = (("public", ":"), ("nonprivate", "-."))


def _lines(axis: Axes, rows: list[Row], x: str, y: str, style: str, shade: Any, name: str) -> None:
    points = sorted((row[x], row[y]) for row in rows if y in row)
    if points:
        axis.plot(*zip(*points, strict=True), style, color=shade, label=name)


def _series(row: Row) -> str:
    return f"{_kind(row)}, T {row['tokens']}"


def _setting(row: Row) -> str:
    return f"{_kind(row)}, epsilon {row['budget_epsilon']:g}"


def _kind(row: Row) -> str:
    own = f"w0 {row['public_weight']:g}" if row["kind"] == "answers" else f"q {row['subsample']:g}"
    name = "pmixed" if row["kind"] == "answers" else "published"
    return f"{name}, {row['unit']}, N {row['models']}, {own}"
