"""Registry of what attacks on a finished cell find: the parts of audit.json. Loads no torch.

A new attack takes its function in ``tasks.audit.attacks``, its part here, and a test. All that lists attacks reads
this: the stage, the share of false alarms, violations, telemetry, the figures of cells, the report, charts and MLflow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from dptune.core.digits import at_least, shown_above
from dptune.core.metric import Metric

Figures = dict[str, Any]
_WRONG = "the mechanism, its accountant or its data handling is wrong"


def _none(figures: Figures, confidence: float) -> Iterator[str]:
    yield from ()


def _draw_accused(figures: Figures, confidence: float) -> Iterator[str]:
    if said := figures.get("accusation"):
        yield said


def _coins_accused(part: str) -> Callable[[Figures, float], Iterator[str]]:
    def accused(figures: Figures, confidence: float) -> Iterator[str]:
        if said := figures.get("accusation"):
            yield f"an attack on its canaries ({part}) {said}: {_WRONG}"

    return accused


def _rate_exceeded(figures: Figures, confidence: float) -> Iterator[str]:
    if "alarm" in figures:
        checked = (figures["alarm"], figures["sample_rate"])
        yield from exceeded("the entries of its planted gradients", "a sample rate", *checked, "charged", confidence)


def _step_exceeded(figures: Figures, confidence: float) -> Iterator[str]:
    for name in ("epsilon", "mu"):
        checked = figures[f"{name}_alarm"], float(figures[f"{name}_certified"])
        yield from exceeded("a white-box attack on one of its steps", name, *checked, "certified", confidence)


def _games_accused(figures: Figures, confidence: float) -> Iterator[str]:
    if said := figures.get("accusation"):
        yield str(said)


def exceeded(attack: str, name: str, shown: float, upper: float, known: str, confidence: float) -> Iterator[str]:
    """A sentence if an attack shows more than ``upper``; ``known`` says what that is: "certified" or "charged"."""
    if shown > upper:
        lower, allowed = shown_above(shown, upper)
        sure = at_least(confidence, 6)
        yield f"{attack} shows {name} >= {lower} at confidence {sure}, but {allowed} is {known}: {_WRONG}"


@dataclass(frozen=True)
class Part:
    """What one attack found: a table of figures in audit.json.

    Attributes:
        key: its key in audit.json.
        attack: key of the function in ``tasks.audit.attacks.ATTACKS`` that makes it.
        title: what pages call it.
        comparisons: number of comparisons with the ledger that may accuse it; they share ``audit.false_alarms``.
        accused: function from the figures and the alarm's confidence to a sentence for each comparison that fails.
        power: whether its figures say in words ("power") what it could have refuted.
        bounds_epsilon: whether it proves a lower bound on a run's epsilon ("epsilon_audited").
        by_score: whether it is a table of figures for each score of a membership attack, with its ROC curve.
        private: whether it attacks persons' records, and is neither made nor shown under private telemetry.
        metrics: figures that MLflow shows, named ``audit_<key>_<figure>``; those shown in "scores" are columns of the
            report's table of further attacks.
    """

    key: str
    attack: str
    title: str
    comparisons: int = 0
    accused: Callable[[Figures, float], Iterator[str]] = _none
    power: bool = False
    bounds_epsilon: bool = False
    by_score: bool = False
    private: bool = False
    metrics: tuple[Metric, ...] = ()


ATTACK_CHARTS, _CHANCE = "Attacks (AUC 0.5: chance)", "area under the ROC curve, 0.5 by chance"
PARTS: tuple[Part, ...] = (
    Part(
        "extraction",
        "canaries",
        "secrets extracted",
        metrics=(
            Metric("audit_extraction_verbatim", "secrets extracted", source="auditor", shown=("tracking",)),
            Metric("audit_extraction_valid", "valid samples", source="auditor"),
            *(Metric(f"audit_extraction_jaccard_{n}", f"Jaccard, n = {n}", source="auditor") for n in (1, 2, 3, 4)),
            *(
                Metric(f"audit_extraction_jaccard_{n}_deviation", f"Jaccard, n = {n}: deviation", source="auditor")
                for n in (1, 2, 3, 4)
            ),
        ),
    ),
    Part(
        "exposure",
        "canaries",
        "exposure",
        metrics=(
            Metric(
                "audit_exposure_mean",
                "exposure, mean",
                unit="bits",
                source="auditor",
                shown=("tracking",),
                section=ATTACK_CHARTS,
            ),
        ),
    ),
    Part(
        "one_run",
        "canaries",
        "planted texts",
        comparisons=1,
        accused=_coins_accused("one_run"),
        power=True,
        bounds_epsilon=True,
        metrics=(
            Metric(
                "audit_one_run_epsilon_refutable",
                "planted texts: ε that could be refuted",
                source="auditor",
                shown=("tracking",),
            ),
        ),
    ),
    Part(
        "canaries",
        "canaries",
        "audit canaries",
        by_score=True,
        metrics=(
            Metric(
                "audit_canaries_calibrated_auc",
                "canaries: AUC",
                _CHANCE,
                source="auditor",
                shown=("tracking", "column"),
                section=ATTACK_CHARTS,
            ),
            # Shadow models are trained on records of the attack split.
            Metric("audit_canaries_shadows_auc", "canaries, shadows: AUC", _CHANCE, shown=("tracking",)),
        ),
    ),
    Part(
        "membership",
        "membership",
        "training records",
        by_score=True,
        private=True,
        metrics=(
            Metric("audit_membership_likelihood_auc", "records, likelihood: AUC", _CHANCE),
            Metric("audit_membership_likelihood_mean_log_probability", "records: mean log-probability", unit="nats"),
            Metric("audit_membership_likelihood_mean_perplexity", "records: mean perplexity"),
            Metric(
                "audit_membership_calibrated_auc",
                "training records: AUC",
                _CHANCE,
                shown=("tracking", "column"),
                section=ATTACK_CHARTS,
            ),
        ),
    ),
    Part(
        "crafted",
        "crafted",
        "planted gradients",
        comparisons=1,
        accused=_coins_accused("crafted"),
        power=True,
        bounds_epsilon=True,
    ),
    Part("draw", "crafted", "their draw", comparisons=1, accused=_rate_exceeded, power=True),
    Part(
        "sampling",
        "sampling",
        "the draw itself",
        comparisons=1,
        accused=_draw_accused,
        power=True,
        metrics=(
            Metric(
                "audit_sampling_p_value",
                "draws repeated: p",
                unit="share",
                source="auditor",
                shown=("tracking",),
            ),
        ),
    ),
    Part(
        "step",
        "step",
        "one step",
        comparisons=2,
        accused=_step_exceeded,
        power=True,
        metrics=(
            Metric("audit_step_epsilon_audited", "one step: ε audited", source="auditor", shown=("tracking",)),
            Metric(
                "audit_step_mu_audited",
                "one step: μ audited",
                source="auditor",
                shown=("tracking", "column"),
                section=ATTACK_CHARTS,
            ),
            Metric("audit_step_mu_certified", "one step: μ certified", source="auditor", shown=("tracking",)),
        ),
    ),
    Part(
        "whole_run",
        "step",
        "whole runs of its twin",
        comparisons=1,
        accused=_games_accused,
        power=True,
        metrics=(Metric("audit_whole_run_mu_audited", "whole run: μ audited", source="auditor"),),
    ),
)


def parts(telemetry: str = "research") -> list[Part]:
    """The parts of audit.json that telemetry allows, in the order in which attacks are made."""
    return [part for part in PARTS if telemetry == "research" or not part.private]


def comparisons() -> int:
    """Number of comparisons with the ledger in each cell, which share ``audit.false_alarms``."""
    return sum(part.comparisons for part in parts())


def bounds() -> dict[str, str]:
    """Titles of the parts that prove a bound on a run's epsilon, by their keys."""
    return {part.key: part.title for part in parts() if part.bounds_epsilon}


def violations(audit: Figures) -> list[str]:
    """A sentence for every bound that exceeds what the ledger certifies: mechanism, accountant or sampling is wrong.

    Each bound holds with ``alarm_confidence``, chosen so that all comparisons of all cells together raise a false alarm
    with at most the chance ``audit.false_alarms``.
    """
    confidence = float(audit["alarm_confidence"])
    return [
        f"{audit['label']}: {said}"
        for part in parts()
        if part.key in audit
        for said in part.accused(audit[part.key], confidence)
    ]
