"""Writes the page on private prediction: cost and quality of answers, and where private training is better."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from dptune.files import write_text
from tasks.report.experiment import epsilon_text, image_data
from tasks.report.prediction_plots import METRIC, Row, draw

PAGE, PICTURE = "prediction.html", "prediction.png"
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
    told = result["telemetry"] == "research"
    (directory / PICTURE).unlink(missing_ok=True)  # a picture that was drawn under research telemetry must not stay
    if told:
        draw(rows, result["serve"], directory / PICTURE, synthetic=result["synthetic"])
    picture = image_data(directory / PICTURE) if told else None
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    environment.filters["epsilon"] = epsilon_text
    page = environment.get_template("prediction.html.j2").render(
        result=result,
        told=told,
        picture=picture,
        rows=sorted(rows, key=_perplexity),
        comparisons=list(comparisons(rows)),
    )
    write_text(directory / PAGE, page)


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
