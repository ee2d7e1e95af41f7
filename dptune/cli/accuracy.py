"""A classifier's scores as commands print them: what a constant answer would have, and whether this one is better."""

from __future__ import annotations

import math
from collections.abc import Mapping


def standard_error(accuracy: float, records: int) -> float:
    """Standard error of an accuracy that was measured on this many records, each right or wrong independently."""
    return math.sqrt(accuracy * (1 - accuracy) / records)


def printed_scores(scores: Mapping[str, float], records: int) -> dict[str, float]:
    """Fields of ``training.scores.Scores`` by names that explain themselves, with the accuracy's standard error."""
    found: dict[str, float] = {}
    for name, value in scores.items():
        found["constant_answer_accuracy" if name == "largest_class" else name] = value
        if name == "accuracy":
            found["accuracy_standard_error"] = standard_error(value, records)
    return found


def no_better(scores: Mapping[str, float], records: int) -> str | None:
    """A sentence where the accuracy is below that of a constant answer, or within a standard error above; else None."""
    accuracy, constant = scores["accuracy"], scores["largest_class"]
    error = standard_error(accuracy, records)
    if accuracy > constant + error:
        return None
    return (
        f"No better than a constant answer: accuracy {accuracy:.4g} with a standard error of {error:.2g} on {records} "
        f"records, and always saying the most frequent label has {constant:.4g}."
    )
