"""Scores private prediction, the public model and the grid's finished cells on the same held-out records."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from dptune.corpus.records import Records, read_records
from dptune.files import jsonable, private_directory, write_json
from dptune.prediction.ensemble import load_adapters, read_manifest
from dptune.prediction.protocols import priced_answers
from dptune.prediction.scoring import score_ensemble, score_model
from dptune.privacy.run_folder import RunFolder
from dptune.training.data import Tokens
from dptune.training.model import load_base, load_tokenizer
from dptune.units import MADE_OF_OTHERS
from tasks.charts.groups import EPSILONS
from tasks.experiment.listed import listed_cells, read_results
from tasks.paths import ANSWERS, EVAL, EXPERIMENT, RUNS
from tasks.prediction.ensembles import EnsemblePlan, record_tokens, scored_protocols
from tasks.settings.params import Settings
from tasks.tracking import ChildRun, timed

Row = dict[str, Any]
_OWN = ("public_weight", "subsample")
_FIGURES = ("epsilon_", "perplexity_", "sampled_perplexity_", "private_weight")


def score(settings: Settings, plans: list[EnsemblePlan], serving: Path, device: str) -> dict[str, Any]:
    """Score everything and write data/prediction/results.json; under private telemetry it holds prices alone."""
    records, told = read_records(EVAL), settings.experiment.telemetry == "research"
    rows = []
    if told:
        tokens = _tokens(plans[0], records, settings.prediction.records)
        rows += _models(plans[0], tokens, device)
    for plan in plans:
        rows += _ensemble(settings, plan, tokens if told else None, device)
    result = {
        "name": settings.experiment.name,
        "data": str(records.about["label"]),
        "synthetic": bool(records.about["synthetic"]),
        "telemetry": settings.experiment.telemetry,
        "delta": settings.experiment.delta,
        "records": settings.prediction.records,
        "served": str(serving),
        "serve": settings.prediction.serve.model_dump(),
        "rows": rows,
    }
    write_json(ANSWERS, result)
    return result


def _tokens(plan: EnsemblePlan, records: Records, most: int) -> Tokens:
    """The first records of which a token counts that another one precedes."""
    texts = [str(text) for text in records.text.to_pylist()[:most]]
    tokens = record_tokens(plan, texts, records.about, load_tokenizer(plan.model.weights))
    return replace(tokens, rows=[row for row in tokens.rows if (row[1:] >= 0).any()])


def _models(plan: EnsemblePlan, tokens: Tokens, device: str) -> list[Row]:
    """Rows for the public model, and for every finished cell of the experiment on the same base."""
    where = torch.device(device)
    public = _scores(load_base(plan.model.weights, where), tokens)
    rows: list[Row] = [{"label": "public model", "kind": "public", "unit": "record", **_every_epsilon(0.0), **public}]
    if not EXPERIMENT.exists():
        return rows
    for result, name in zip(read_results(EXPERIMENT, RUNS), listed_cells(EXPERIMENT), strict=True):
        cell = json.loads(RunFolder(RUNS / name).cell.read_text(encoding="utf-8"))
        if cell["model"] != plan.model.model_dump() or result["unit"] in MADE_OF_OTHERS:
            continue
        adapter = RunFolder(RUNS / name).adapter
        model = PeftModel.from_pretrained(load_base(plan.model.weights, where), str(adapter)).eval()
        kept = {key: result[key] for key in (*EPSILONS, "delta")}
        kind = "training" if result["noise_multiplier"] else "nonprivate"
        rows.append({"label": result["label"], "kind": kind, "unit": result["unit"], **kept, **_scores(model, tokens)})
    return rows


def _every_epsilon(value: float) -> dict[str, float]:
    return dict.fromkeys(EPSILONS, value)


def _scores(model: Any, tokens: Tokens) -> dict[str, float | str]:
    return jsonable(score_model(model, tokens))


def _ensemble(settings: Settings, plan: EnsemblePlan, tokens: Tokens | None, device: str) -> list[Row]:
    """Rows for the protocols on one ensemble, and for the plain average of its models; without tokens prices alone."""
    protocols = scored_protocols(settings.prediction, plan.models, settings.experiment.delta)
    scores: dict[str, dict[str, float]] = {}
    rows: list[Row] = []
    if tokens is not None:
        model = load_base(plan.model.weights, torch.device(device))
        adapters = load_adapters(plan.directory, read_manifest(plan.directory), model, torch.device(device))
        scores, average = score_ensemble(model, adapters, tokens, protocols, seed=0)
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
