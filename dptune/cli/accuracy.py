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


def comparison(scores: Mapping[str, float], records: int, before: Mapping[str, float] | None = None) -> str:
    """Whether an accuracy is better than a constant answer, and than no tuning, and whether the loss became worse.

    Better means by more than a standard error of the accuracy.

    Args:
        before: scores of the same records before tuning; None where they were not taken.

    >>> scores = {"accuracy": 0.75, "largest_class": 0.5}
    >>> comparison(scores, 300, before={"accuracy": 0.48}).partition(":")[0]
    'Better than a constant answer, and than no tuning'
    """
    accuracy, constant = scores["accuracy"], scores["largest_class"]
    error = standard_error(accuracy, records)
    beats = accuracy > constant + error
    head, figures, unsure = f"{'Better' if beats else 'No better'} than a constant answer", "", ""
    if before is not None:
        untuned = before["accuracy"]
        over_untuned = accuracy > untuned + error
        joined = "than" if beats and over_untuned else "better than" if over_untuned else "no better than"
        head += f", {'but' if over_untuned and not beats else 'and'} {joined} no tuning"
        figures = f", and the model before tuning had {untuned:.4g}"
        if "loss" in before and scores["loss"] > before["loss"]:
            losses = f"{scores['loss']:.4g} after {before['loss']:.4g}"
            unsure = f" But its loss rose, {losses}: do not trust its probabilities."
    return (
        f"{head}: accuracy {accuracy:.4g} with a standard error of {error:.2g} on {records} records; always saying the "
        f"most frequent label has {constant:.4g}{figures}.{unsure}"
    )
