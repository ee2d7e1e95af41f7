"""What may be told of an ended search, for its page and MLflow: the winner, its figures, and the price of choosing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dptune.files import read_json
from dptune.privacy.certificate import SearchCertificate
from dptune.privacy.run_folder import RunFolder
from dptune.tuning.card import HELD_OUT, PUBLIC
from dptune.tuning.prepare import PreparedRun
from dptune.tuning.run import Tuned, figures_of
from tasks.search.asked import model_of
from tasks.search.prices import choice_prices
from tasks.settings.params import Settings

#: Short names of the records that figures are about.
_KEYS = {HELD_OUT: "held_out", PUBLIC: "public"}


def told_of(settings: Settings, prepared: PreparedRun, tuned: Tuned, about: dict[str, Any]) -> dict[str, Any]:
    """What may be told of a finished search, for page and MLflow: the winner, its figures, and the price of choosing.

    Under research telemetry that includes the winner's figures on held-out private records, as of every cell; no
    epsilon covers those.
    """
    result = read_json(RunFolder(tuned.folder).result)
    measured = {
        "perplexity": {_KEYS[records]: pair for records, pair in tuned.perplexity.items()},
        "scores": {_KEYS[records]: scores for records, scores in tuned.scores.items()},
    }
    if settings.experiment.telemetry == "research" and tuned.certificate is not None:
        measured = _with_held_out(measured, prepared, tuned)
    return _asked(settings, prepared, about) | {
        "released": True,
        "epsilon_certified": str(tuned.epsilons.certified),
        "settings": result["settings"],
        "score": score_of(tuned.certificate),
        **measured,
        "prices": None if tuned.certificate is None else choice_prices(tuned.certificate).to_json(),
    }


def told_of_nothing(
    settings: Settings, prepared: PreparedRun, about: dict[str, Any], certified: float, score: dict[str, Any]
) -> dict[str, Any]:
    """What may be told of a search without a result: that, and what it costs.

    Args:
        certified: epsilon of all that was planned, as the register counts it.
    """
    return _asked(settings, prepared, about) | {
        "released": False,
        "epsilon_certified": str(certified),
        "settings": {},
        "score": score,
        "perplexity": {},
        "scores": {},
        "prices": None,
    }


def _asked(settings: Settings, prepared: PreparedRun, about: dict[str, Any]) -> dict[str, Any]:
    """What was searched, on which records: the same whatever was found."""
    name, _ = model_of(settings)
    return {
        "name": settings.search.name,
        "model": name,
        "rehearsed": settings.search.rehearses,
        "data": str(about["label"]),
        "synthetic": bool(about["synthetic"]),
        "unit": prepared.units.kind,
        "units": len(prepared.units),
        "telemetry": settings.experiment.telemetry,
        "epsilon": settings.search.epsilon,
        "delta": prepared.schedule.delta,
        "expected": settings.search.candidates,
        "space": settings.search.asked.space.to_json(),
    }


def score_of(certificate: SearchCertificate | None) -> dict[str, Any]:
    """What candidates were compared by, and the winner's score with the standard deviation of its noise."""
    if certificate is None or certificate.winner is None:
        return {"on": "rehearsal"}
    terms = certificate.score
    deviation = terms.noise_multiplier * terms.clip / terms.units
    return {
        "on": terms.on,
        "units": terms.units,
        "clip": terms.clip,
        "value": certificate.winner.score,
        "deviation": deviation,
    }


def _with_held_out(measured: dict[str, Any], prepared: PreparedRun, tuned: Tuned) -> dict[str, Any]:
    """The figures with those of held-out records: before and after of a causal model, after alone of a classifier."""
    alone = replace(prepared, public=None)
    if (after := figures_of(alone, tuned.model).get(HELD_OUT)) is None:
        return measured
    if prepared.settings.task == "classify":
        scores = {score: (value, value) for score, value in after.items()}
        return measured | {"scores": measured["scores"] | {"held_out": scores}}
    before = figures_of(alone, prepared.base.load())[HELD_OUT]
    pairs = [(before[figure], after[figure]) for figure in after]
    return measured | {"perplexity": measured["perplexity"] | {"held_out": pairs[0]}}
