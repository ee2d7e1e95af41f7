"""Metrics of a cell: every figure that runs are compared by, declared once.

A new metric takes two files: its entry here, and its function in ``tasks.experiment.quality``. The learning curves,
result.json, the report's tables and charts, MLflow with its saved views, and DVC's table of experiments read this list.
MLflow and DVC show a metric under ``tool_name``, which MLflow sorts into sections.
Under private telemetry, what is computed from private records is neither measured nor sent, and a figure that is not
declared counts as that (``allowed``). To have one sent, give it an entry with its ``source``.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from dptune.core.digits import at_least, at_most
from dptune.core.metric import LABEL_SCORES, Metric, Place
from tasks.audit.registry import parts

_log = logging.getLogger(__name__)
#: Undeclared names that a warning was given for.
_UNDECLARED: set[str] = set()
_DIGITS = 4
_DIGITS_OF_PERPLEXITY = 6
_PRICE = re.compile(r"(^|[._])(epsilon|mu)($|[._])")
#: What attacks showed, and could have shown: lower bounds, which are rounded down.
_SHOWN = re.compile(r"audited$|^audit_(?!.*certified$)")

_PERPLEXITY = "perplexity"
UTILITY, EPSILON_CHARTS, TRAINING = "Utility (lower is better)", "Four epsilons (no bar: infinite)", "While training"

HELD_OUT = Metric(
    "eval_perplexity",
    "held-out perplexity",
    "perplexity of held-out private records",
    better="lower",
    shown=("tracking",),
    measure=_PERPLEXITY,
    measured_at=("end",),
)
PUBLIC = Metric(
    "public_perplexity",
    "public-set perplexity",
    "perplexity of public records",
    better="lower",
    source="public records",
    shown=("tracking", "curves"),
    measure=_PERPLEXITY,
    measured_at=("points", "end"),
)
SAMPLE = Metric(
    "eval_sample_perplexity",
    "held-out perplexity (sample)",
    "perplexity of the first held-out private records",
    better="lower",
    shown=("tracking", "curves"),
    measure=_PERPLEXITY,
    measured_at=("points",),
)
#: Metrics that mechanisms are ranked by: the first that every cell has. Beside each, the same along a run.
RANKED: tuple[tuple[Metric, Metric], ...] = ((HELD_OUT, SAMPLE), (PUBLIC, PUBLIC))
EPSILONS = (
    Metric("epsilon_published", "published (claimed)", source="releases", shown=("tracking",), section=EPSILON_CHARTS),
    Metric("epsilon_noise_only", "noise only", source="releases", shown=("tracking",), section=EPSILON_CHARTS),
    Metric("epsilon_certified", "certified (proved)", source="releases", shown=("tracking",), section=EPSILON_CHARTS),
    Metric("epsilon_audited", "audited (shown)", source="auditor", shown=("tracking",), section=EPSILON_CHARTS),
)
#: A classifier's scores on held-out records. Its loss is left out: perplexity here is exp of it.
HELD_OUT_SCORES = tuple(
    replace(
        score,
        name=f"eval_{score.name}",
        title="F1 (macro)" if score.name == "f1" else score.title,
        source="private records",
        shown=("scores",) if score.better else (),
    )
    for score in LABEL_SCORES
    if score.name != "loss"
)
STEPS_SHARE = Metric(
    "steps_share_to_best_baseline",
    "share of steps to the best baseline",
    "share of its steps after which an agent is as good as the best baseline at its end, on held-out private records",
    better="lower",
    unit="share",
    shown=("tracking",),
)
LOWEST = Metric(
    "eval_sample_perplexity_lowest",
    "held-out perplexity (sample), lowest",
    "lowest perplexity of the first held-out private records along a run",
    better="lower",
)
SECONDS_TO_BEST = Metric(
    "seconds_to_best_baseline",
    "time to the best baseline",
    "time after which an agent is as good as the best baseline at its end, on held-out private records",
    better="lower",
    unit="s",
)
#: What a run has used at each point of its learning curve; the energy is the machine's, all work included.
SECONDS = Metric("elapsed_seconds", "time so far", unit="s")
JOULES = Metric("machine_joules", "energy of the machine so far", unit="J")
_STEP = (
    Metric("learning_rate", "learning rate", source="releases", shown=("tracking",)),
    Metric("noise_multiplier", "noise multiplier", source="releases", shown=("tracking",), section=TRAINING),
    Metric("radius", "radius, mean over layers", source="releases", shown=("tracking",), section=TRAINING),
    # Of what is released; without noise, ``StepReport`` counts it among what is private.
    Metric("gradient_norm", "norm of the released gradient", source="releases", shown=("tracking",)),
    Metric("batch_units", "units in the batch", shown=("tracking",)),
    Metric("batch_loss", "mean loss of the batch", unit="nats", shown=("tracking",)),
    Metric("clipped_fraction", "share of clipped gradients", unit="share", shown=("tracking",)),
)
METRICS: tuple[Metric, ...] = (
    *(HELD_OUT, PUBLIC, SAMPLE, *EPSILONS, *HELD_OUT_SCORES, *_STEP),
    *(LOWEST, STEPS_SHARE, SECONDS_TO_BEST, SECONDS, JOULES),
)
_SECTIONS = {one.name: "training" for one in (*_STEP, STEPS_SHARE, SECONDS_TO_BEST, SECONDS, JOULES)} | {
    one.name: "score" for one in HELD_OUT_SCORES
}
_EPSILON_OR_AUDIT, _PERPLEXITIES = re.compile(r"(epsilon|audit)_(.+)"), re.compile(r"(?:(.+)_)?perplexity([_.].+)?")


def metrics() -> tuple[Metric, ...]:
    """Every metric: those of cells, then those that attacks declare."""
    return (*METRICS, *(metric for part in parts() for metric in part.metrics))


def shown_in(place: Place, telemetry: str = "research") -> list[Metric]:
    """The metrics that a place shows under this telemetry."""
    return [one for one in metrics() if place in one.shown and (telemetry == "research" or not one.private)]


def allowed(figures: Mapping[str, float], telemetry: str, knobs: Mapping[str, float] | None = None) -> dict[str, float]:
    """The figures that telemetry allows: under "private", those that declare another source than private records.

    Args:
        knobs: a step's knobs, which the mechanism names: they follow from releases and public data, or private
            telemetry refuses the mechanism. None may have the name of a private metric.
    """
    given = {**figures, **(knobs or {})}
    if telemetry == "research":
        return given
    private = {one.name: one.private for one in metrics()}
    for name in figures.keys() - private.keys() - (knobs or {}).keys() - _UNDECLARED:
        _UNDECLARED.add(name)
        fix = 'declare it in tasks/metrics.py, with a source other than "private records" if it has one'
        _log.warning("metric %s is not declared, so private telemetry leaves it out. Fix: %s", name, fix)
    return {name: value for name, value in given.items() if not private.get(name, name not in (knobs or {}))}


def measured(telemetry: str, at: Literal["end", "points"]) -> list[Metric]:
    """The metrics that are measured on records at a run's end, or at the points of its learning curve."""
    return [
        one for one in METRICS if one.measure and at in one.measured_at and (telemetry == "research" or not one.private)
    ]


def tool_name(name: str) -> str:
    """The name of a figure in MLflow and in DVC's metrics: section and figure. Files have ``name``.

    >>> [tool_name(name) for name in ("epsilon_certified", "eval_perplexity", "audit_exposure_mean", "learning_rate")]
    ['epsilon/certified', 'perplexity/eval', 'audit/exposure_mean', 'training/learning_rate']
    """
    if name in _SECTIONS:
        return f"{_SECTIONS[name]}/{name}"
    if found := _EPSILON_OR_AUDIT.fullmatch(name):
        return f"{found[1]}/{found[2]}"
    found = _PERPLEXITIES.fullmatch(name)
    rest = f"{found[1] or ''}{found[2] or ''}".strip("_.") if found else ""
    return f"perplexity/{rest}" if rest else name


def title_of(name: str) -> str:
    """What pages call a metric."""
    return next(one.title for one in metrics() if one.name == name)


def measured_on(name: str) -> str:
    """What pages call the records that a perplexity is measured on."""
    return "held-out records" if name == HELD_OUT.name else "public records"


def ranked_by(results: Sequence[Mapping[str, Any]]) -> tuple[Metric, Metric]:
    """The metric that these results are ranked by, and the same along a run: held-out where telemetry allows it for
    every cell, else the public set's.
    """
    return next((pair for pair in RANKED if all(pair[0].name in one["after"] for one in results)), RANKED[-1])


def legible(name: str, value: float) -> float:
    """A figure as MLflow gets it: an epsilon or mu with four digits, never below what was paid; a perplexity with six.

    MLflow shows all digits that a figure has, and 1.999847 for a budget of 2 helps no reader. The exact values are in
    the run's files; nothing computes with those of MLflow.
    """
    if not math.isfinite(value):
        return value
    if "perplexity" in name:
        return float(f"{value:.{_DIGITS_OF_PERPLEXITY}g}")
    if not _PRICE.search(name):
        return value
    return float((at_least if _SHOWN.search(name) else at_most)(value, _DIGITS))
