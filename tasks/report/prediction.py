"""Writes the page on private prediction: cost and quality of answers, and where private training is better."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dptune.core.digits import at_most
from tasks.charts.canvas import save
from tasks.charts.prediction import METRIC, Row, prediction, protocol_looks, protocol_name
from tasks.report.numbers import digits4
from tasks.report.page import write

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
        opening=[answer(found, scores_allowed=scores_allowed)],
        rows=sorted(rows, key=_perplexity),
        comparisons=found,
        name_of=lambda row: protocol_name(row) if row["kind"] in ("answers", "published") else "",
    )


def answer(found: list[Comparison], *, scores_allowed: bool) -> str:
    """The sentence that opens the page: how often answers are better than a trained model, and by how much."""
    if not scores_allowed:
        return "Telemetry is private, so no figure compares private answers with private training."
    if not found:
        return "No finished run has the certified ε, δ and unit of a protocol here, so nothing is compared."
    won = [one for one in found if one.better == "prediction"]
    one = min(found, key=lambda one: float(one.answers[METRIC]))
    best = (
        f"the best answers have perplexity {digits4(one.answers[METRIC])} (certified ε = "
        f"{at_most(one.answers['epsilon_certified'])}, {one.answers['tokens']} tokens, one {one.answers['unit']}), "
        f"training at the same ε, δ and unit {digits4(one.training[METRIC])}"
    )
    if not won:
        return f"Private training beats private answers in all of {len(found)} comparisons: {best}."
    return f"Private answers beat private training in {len(won)} of {len(found)} comparisons: {best}."


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
