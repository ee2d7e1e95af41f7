"""Draws pictures of audits as PNG files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt

from tasks.drawing import colour, legend_below, save

Audit = dict[str, Any]
_LARGEST_SHOWN = 1.25  # infinity is drawn at this multiple of the largest finite epsilon
_MOST_CURVES = 20
_MARKS = {"one_run": ("x", "planted texts"), "crafted": ("+", "planted gradients")}


def draw_ledger_versus_audit(audits: Sequence[Audit], path: Path, *, synthetic: bool) -> None:
    """Draw published, certified and audited epsilon of every cell; a red mark right of the certified bar is a bug."""
    rows = list(reversed(audits))
    values = [float(audit[key]) for audit in rows for key in ("epsilon_published", "epsilon_certified")]
    values += [audit[part]["epsilon_audited"] for audit in rows for part in _MARKS if part in audit]
    end = _LARGEST_SHOWN * max([1.0, *(value for value in values if math.isfinite(value))])
    figure, axis = plt.subplots(figsize=(10, 1.5 + 0.32 * len(rows)), constrained_layout=True)
    for place, audit in enumerate(rows):
        certified = float(audit["epsilon_certified"])
        finite = math.isfinite(certified)
        axis.barh(place, certified if finite else end, height=0.6, color="#9ecae1" if finite else "#eeeeee")
        if not finite:
            axis.text(end, place, "∞ ", va="center", ha="right", color="#777777")
    claims = [min(float(audit["epsilon_published"]), end) for audit in rows]
    places = np.arange(len(rows))
    axis.plot(claims, places, "k|", markersize=12, markeredgewidth=2, label="published (claimed; at the end: ∞)")
    for part, (marker, label) in _MARKS.items():
        shown = [(audit[part]["epsilon_audited"], place) for place, audit in enumerate(rows) if part in audit]
        if shown:
            axis.plot(*zip(*shown, strict=True), marker, color="red", label=f"audited by {label}")
    axis.barh([0], [0], color="#9ecae1", label="certified (proved)")
    axis.set(xlim=(0, end), yticks=places, yticklabels=[audit["label"] for audit in rows], xlabel="epsilon")
    axis.tick_params(axis="y", labelsize=8)
    axis.set_title(_title(f"Ledger versus audit, confidence {audits[0]['confidence']:g}", synthetic))
    legend_below(figure, axis)
    save(figure, path)


def draw_rocs(audits: Sequence[Audit], path: Path, *, synthetic: bool) -> None:
    """Draw ROC curves of membership attacks on log axes: on audit canaries and, if attacked, on training records."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.6), constrained_layout=True)
    for axis, part, title in zip(axes, ("canaries", "membership"), ("audit canaries", "training records"), strict=True):
        with_part = [audit for audit in audits if part in audit][:_MOST_CURVES]
        lowest = 0.5
        for index, audit in enumerate(with_part):
            score = "shadows" if "shadows" in audit[part] else "calibrated"
            figures = audit[part][score]
            lowest = min(lowest, 0.5 / max(figures["members"], figures["non_members"]))
            curve = figures["roc"]
            axis.step(
                curve["false_positive_rate"],
                curve["true_positive_rate"],
                where="post",
                color=colour(index),
                label=audit["label"],
            )
        diagonal = np.geomspace(lowest, 1, 50)
        axis.plot(diagonal, diagonal, "k:", label="chance")
        axis.set(xscale="log", yscale="log", xlim=(lowest, 1), ylim=(lowest, 1.05), title=title)
        axis.set(xlabel="false positive rate", ylabel="true positive rate")
        axis.grid(alpha=0.3)
        if not with_part:
            private = part == "membership" and any(audit.get("telemetry") == "private" for audit in audits)
            why = "not shown:\ntelemetry is private" if private else "not attacked"
            axis.text(0.5, 0.5, why, ha="center", transform=axis.transAxes)
    figure.suptitle(_title("Membership attacks, calibrated by the public model", synthetic))
    legend_below(figure, axes[0])
    save(figure, path)


def _title(text: str, synthetic: bool) -> str:
    return f"{text}, SYNTHETIC data" if synthetic else text
