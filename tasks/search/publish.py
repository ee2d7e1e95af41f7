"""Sends a finished search to MLflow: one run, with the certificate's facts and without any time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dptune.core.files import read_json
from dptune.privacy.certificate import FILE
from dptune.privacy.run_folder import RunFolder
from tasks.mlflow import tracking

#: The experiment of MLflow that holds a run for each search.
EXPERIMENT = "search"


def publish(folder: Path, page: Path, answer: str) -> bool:
    """Send what may be shown of a search: the winner's settings and figures, its folder, and the page; with no
    winner, its certificate (of a rehearsal, the ledger of its one run) and the page.

    Nothing is stamped with a time, under either telemetry: when a search ended tells how many candidates there were.

    Returns: whether MLflow has all of it.
    """
    results = read_json(RunFolder(folder).results)
    tags = {"telemetry": results["telemetry"], "data": results["data"], tracking.NOTE: answer}
    parent = tracking.parent_run(EXPERIMENT, {}, timed=False)
    run = tracking.ChildRun(
        parent,
        results["name"],
        RunFolder(folder).mlflow_run,
        params_of(results),
        tags | {"git_commit": tracking.git_commit()},
        timed=False,
        kept=False,
    )
    run.log(0, figures_of(results))
    adapter, ledger = RunFolder(folder).adapter, RunFolder(folder).ledger
    alone = ledger if results["rehearsed"] else folder / FILE
    run.artifact(adapter if adapter.exists() else alone)
    run.artifact(page)
    sent = run.end()
    tracking.finish_parent(parent, failed=False, timed=False)
    return sent


def params_of(results: dict[str, Any]) -> dict[str, Any]:
    """What was asked and what won."""
    asked = {name: results[name] for name in ("model", "unit", "units", "delta", "rehearsed")}
    expected = {} if results["rehearsed"] else {"candidates_on_average": results["expected"]}
    won = {f"winner.{name.replace(' ', '_')}": value for name, value in results["settings"].items()}
    return asked | expected | {"budget_epsilon": results["epsilon"], "space": json.dumps(results["space"])} | won


def figures_of(results: dict[str, Any]) -> dict[str, float]:
    """The guarantee, the price of choosing, and the winner's figures, by the names of MLflow's metrics."""
    found = {"epsilon_certified": float(results["epsilon_certified"])}
    if "value" in results["score"]:
        found["winners_score"] = results["score"]["value"]
    if (prices := results["prices"]) is not None:
        found["noise_multiplier"] = prices["noise_multiplier"]
        for one in prices["countings"]:
            found[f"choosing.{one['way']}.epsilon"] = float(one["epsilon"])
            if one["noise_multiplier"] is not None:
                found[f"choosing.{one['way']}.noise_multiplier"] = one["noise_multiplier"]
    if (ranking := results.get("ranking")) is not None:
        found["ranking.epsilon_certified"] = float(ranking["epsilon"])
        if ranking["correlation"] is not None:
            found |= {"ranking.correlation": ranking["correlation"], "ranking.settings": len(ranking["points"])}
    for records, pair in results["perplexity"].items():
        found |= {f"{records}_perplexity.before": pair[0], f"{records}_perplexity": pair[1]}
    for records, scores in results["scores"].items():
        found |= {f"{records}_{score}": pair[1] for score, pair in scores.items()}
    return found
