"""Scores private prediction, the public model and the grid's finished cells on the same held-out records."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dptune.core.files import jsonable, private_directory, read_json, write_json
from dptune.core.settings import MADE_OF_OTHERS
from dptune.job.base_model import Base
from dptune.job.delivery.adapter_loading import with_trained
from dptune.prediction.predictor import score_model, summed_up
from dptune.prediction.protocols import priced_answers
from dptune.privacy.run_folder import RunFolder
from dptune.records.parquet_file import read_about
from dptune.training.data import Tokens
from tasks.charts.seed_groups import EPSILONS
from tasks.experiment.cell_list import listed_cells, read_results
from tasks.mlflow.tracking import ChildRun, timed
from tasks.paths import ANSWERS, EVAL, EXPERIMENT, RUNS
from tasks.prediction.ensembles import EnsemblePlan, base_of, scored_protocols
from tasks.prediction.scores import held_out_tokens, open_scoring, read_scores, score_part, scoring_plan
from tasks.report.claims import as_users_claim
from tasks.settings.params import Settings

Row = dict[str, Any]
_OWN = ("public_weight", "subsample")
_FIGURES = ("epsilon_", "perplexity_", "sampled_perplexity_", "private_weight")


def score(settings: Settings, plans: list[EnsemblePlan], serving: Path, device: str) -> dict[str, Any]:
    """Score everything and write data/prediction/results.json; under private telemetry it holds prices alone."""
    about, told = read_about(EVAL), settings.experiment.telemetry == "research"
    tokens, rows = None, []
    if told:
        base = base_of(plans[0], device)
        tokens = held_out_tokens(plans[0], base.tokenizer, settings.prediction.records)
        rows = _models(plans[0], tokens, base)
    for plan in plans:
        rows += _ensemble(settings, plan, len(tokens.rows) if tokens else 0, device)
    result = {
        "name": settings.experiment.name,
        "data": str(about["label"]),
        "synthetic": bool(about["synthetic"]),
        "telemetry": settings.experiment.telemetry,
        "delta": settings.experiment.delta,
        "records": settings.prediction.records,
        "served": str(serving),
        "serve": settings.prediction.serve.model_dump(),
        "rows": rows,
    }
    write_json(ANSWERS, result)
    return result


def _models(plan: EnsemblePlan, tokens: Tokens, base: Base) -> list[Row]:
    """Rows for the public model, and for every finished cell of the experiment on the same base."""
    public = _scores(base.load(), tokens)
    rows: list[Row] = [{"label": "public model", "kind": "public", "unit": "record", **_every_epsilon(0.0), **public}]
    if not EXPERIMENT.exists():
        return rows
    for result, name in zip(read_results(EXPERIMENT, RUNS), listed_cells(EXPERIMENT), strict=True):
        cell = read_json(RunFolder(RUNS / name).cell)
        if cell["model"] != plan.model.model_dump() or result["unit"] in MADE_OF_OTHERS:
            continue
        adapter = RunFolder(RUNS / name).adapter
        model = with_trained(base.load(), adapter)
        claimed = as_users_claim(result, RunFolder(RUNS / name).ledger)
        kept = {key: claimed[key] for key in (*EPSILONS, "delta")}
        kind = "training" if result["noise_multiplier"] else "nonprivate"
        rows.append({"label": result["label"], "kind": kind, "unit": result["unit"], **kept, **_scores(model, tokens)})
    return rows


def _every_epsilon(value: float) -> dict[str, float]:
    return dict.fromkeys(EPSILONS, value)


def _scores(model: Any, tokens: Tokens) -> dict[str, float | str]:
    return jsonable(score_model(model, tokens))


def _ensemble(settings: Settings, plan: EnsemblePlan, scored: int, device: str) -> list[Row]:
    """Rows for the protocols on one ensemble, and for the plain average of its models, by ``scored`` records.

    Prices alone if that is 0.
    """
    protocols = scored_protocols(settings.prediction, plan.models, settings.experiment.delta)
    scores: dict[str, dict[str, float]] = {}
    rows: list[Row] = []
    if scored:
        scoring = scoring_plan(plan, settings)
        open_scoring(scoring)
        score_part(scoring, 0, 1, device)  # what no process has scored before
        scores, average = summed_up(read_scores(scoring, scored))
        average |= _every_epsilon(math.inf)
        rows.append({"label": f"average of {plan.models}", "kind": "nonprivate", "unit": "record", **jsonable(average)})
    for name, protocol in protocols.items():
        prices = priced_answers(protocol)
        rows.append(
            {
                "label": name,
                "kind": "answers" if protocol.name == "pmixed" else "published",
                "unit": protocol.unit,
                "delta": protocol.delta,
                "tokens": protocol.tokens,
                "models": protocol.models,
                "alpha": protocol.alpha,
                "budget_epsilon": protocol.epsilon,
                **{key: value for key, value in asdict(protocol).items() if key in _OWN},
                **jsonable(prices.to_dict()),
                "leaks": list(prices.leaks),
                **jsonable(scores.get(name, {})),
            }
        )
    return rows


def publish_answers(result: dict[str, Any], parent: str, directory: Path, tags: dict[str, str]) -> None:
    """Send each protocol's scores to MLflow, as a run under the experiment's."""
    for row in result["rows"]:
        if row["kind"] not in ("answers", "published"):
            continue
        params = {key: row[key] for key in ("unit", "tokens", "models", "alpha", "budget_epsilon", "delta")}
        params |= {key: row[key] for key in _OWN if key in row}
        marker = private_directory(directory / "mlflow") / row["label"]
        when = {"timed": timed(result["telemetry"]), "kept": False}  # all of this can be made again
        child = ChildRun(parent, row["label"], marker, params, {**tags, "kind": row["kind"]}, **when)
        child.log(0, {key: float(value) for key, value in row.items() if key.startswith(_FIGURES)})
        child.end()
