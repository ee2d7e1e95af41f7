"""Metric: a figure that runs are compared by, declared once for every command and page that shows it.

A metric counts as private unless its declaration says what else it is computed from: a forgotten word hides a figure,
and never shows one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: What a metric is computed from. No epsilon covers "private records"; the others are public, or the ledger's own.
Source = Literal["private records", "public records", "releases", "auditor"]
#: Where a metric is shown; see ``Metric.shown``.
Place = Literal["change", "scores", "curves", "comparison", "tracking", "column"]


@dataclass(frozen=True)
class Metric:
    """A figure that runs are compared by.

    Attributes:
        name: its key in results, learning curves and MLflow.
        title: what pages, charts and cards call it.
        explanation: a clause on what it is, without a full stop; empty if the title says it.
        better: "lower" or "higher"; empty for figures that are neither.
        unit: such as "nats" or "share"; empty for figures without one.
        source: what it is computed from.
        shown: places that show it: "change" (before and after, on the card and at the end of ``dptune tune``), "scores"
            (a column of the report's table of scores), "curves" (a panel of learning curves), "comparison" (a column of
            ``dvc exp show``), "tracking" (MLflow), "column" (a column of MLflow's saved view).
        section: heading of the charts in MLflow's saved view where it is drawn; empty: not drawn.
        measure: key of the function in ``tasks.experiment.quality.MEASURES`` by which the pipeline measures it, on
            public records or else on held-out private ones; empty for a figure that is no measurement of records.
        measured_at: "end" of a run, on all records that settings allow, and "points" of its learning curve.
    """

    name: str
    title: str
    explanation: str = ""
    better: Literal["lower", "higher", ""] = ""
    unit: str = ""
    source: Source = "private records"
    shown: tuple[Place, ...] = ()
    section: str = ""
    measure: str = ""
    measured_at: tuple[Literal["end", "points"], ...] = ()

    @property
    def private(self) -> bool:
        """Whether it is computed from private records and covered by no epsilon, so for research telemetry only."""
        return self.source == "private records"


#: Scores of a classifier: a field of ``dptune.training.evaluation.Scores`` each.
LABEL_SCORES = (
    Metric("accuracy", "accuracy", better="higher", unit="share", shown=("change",)),
    Metric("f1", "F1", "F1 is the mean over labels", better="higher", unit="share", shown=("change",)),
    Metric(
        "calibration_error",
        "calibration error",
        "the calibration error is the expected one over 15 bins",
        better="lower",
        unit="share",
        shown=("change",),
    ),
    Metric("loss", "loss", better="lower", unit="nats", shown=("change",)),
    Metric("largest_class", "accuracy of a constant answer", unit="share"),
)
#: Those that are shown before and after training.
CHANGES = tuple(metric for metric in LABEL_SCORES if "change" in metric.shown)
