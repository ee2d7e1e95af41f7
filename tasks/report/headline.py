"""The report's answer as MLflow shows it, a sentence, a tag and figures of the parent run, and as DVC compares it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from tasks.charts.groups import EPSILONS, Result, SeedGroup, over_seeds, perplexity_metric, untuned
from tasks.metrics import shown_in
from tasks.report.answer import answer_lines, headlines, rankings


@dataclass(frozen=True)
class Headline:
    """Figures of the mechanism with the lowest mean perplexity at one certified epsilon, and what it is measured by.

    Attributes:
        sentence: the report's answer, which says how sure one may be of it.
        tags: what is no number, by name.
        metrics: figures by name; those that nothing was measured for are left out.
    """

    sentence: str
    tags: dict[str, str]
    metrics: dict[str, float]


def headline(results: Sequence[Result]) -> Headline:
    """The headline of the first model that has an answer; only the sentence is about all of them."""
    sentence = " ".join(answer_lines(results))
    metric, opened = perplexity_metric(results), headlines(rankings(results))
    model = opened[0].model if opened else str(results[0]["model"])
    groups = [one for one in over_seeds(results, metric) if one.first["model"] == model and math.isfinite(one.mean)]
    figures = {
        "nonprivate_perplexity": next((one.mean for one in groups if one.nonprivate), None),
        "untuned_perplexity": untuned(results, model, metric),
    }
    if not opened:
        return Headline(sentence, {}, _finite(figures))
    best, plain = opened[0].best, opened[0].plain
    figures |= {"best_perplexity": best.mean, "dp_sgd_perplexity": plain.mean if plain else None}
    figures |= {f"best_{key}": _largest(best, key) for key in EPSILONS}
    return Headline(sentence, {"lowest_mechanism": best.mechanism, "answer": sentence}, _finite(figures))


def best_cell(results: Sequence[Result], audited: Mapping[str, float]) -> dict[str, Any]:
    """Mechanism, perplexity and the four epsilons of the best candidate: what DVC compares experiments by.

    Args:
        audited: what attacks showed, by the labels of cells.

    Returns: perplexity alone, the lowest, if nothing has a certified epsilon.
    """
    opened = headlines(rankings(results))
    if not opened:
        lowest = over_seeds(results, perplexity_metric(results))[0]
        return {"mechanism": lowest.mechanism} | _finite({"perplexity": lowest.mean})
    best = opened[0].best
    shown = [audited[label] for one in best.results if (label := str(one["label"])) in audited]
    figures = {"perplexity": best.mean} | {key: _largest(best, key) for key in EPSILONS}
    more = [one.name for one in shown_in("comparison") if all(one.name in cell["after"] for cell in best.results)]
    figures |= {name: fmean(float(cell["after"][name]) for cell in best.results) for name in more}
    return {"mechanism": best.mechanism} | _finite(figures | {"epsilon_audited": max(shown, default=None)})


def _largest(group: SeedGroup, key: str) -> float:
    return max(float(result[key]) for result in group.results)


def _finite(figures: Mapping[str, float | None]) -> dict[str, float]:
    return {key: value for key, value in figures.items() if value is not None and math.isfinite(value)}
