"""DVC stage: write the report as one HTML page, PNGs, and the metrics and tables that DVC reads."""

from __future__ import annotations

import base64
import csv
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from dptune.errors import DataError
from dptune.files import replacing, write_json, write_text
from dptune.privacy.run_folder import RunFolder
from dptune.privacy.set_aside import Spending
from tasks import tracking
from tasks.drawing import (
    Result,
    draw_controller,
    draw_curves,
    draw_epsilons,
    draw_perplexity,
    moves_knobs,
    over_seeds,
    perplexity_metric,
)
from tasks.experiment.results import audit_metrics
from tasks.paths import AUDITS, EXPERIMENT, REPORT, RUNS
from tasks.report.audit_plots import Audit, draw_ledger_versus_audit, draw_rocs
from tasks.report.claims import claims, limit_of
from tasks.report.spending import totals, unlisted_spendings
from tasks.report.steps_needed import STEPS_FILE, publish_steps, steps_needed, steps_over_seeds, with_steps
from tasks.settings.params import load_settings
from tasks.stage import run_stage

_PICTURES = {
    "perplexity.png": draw_perplexity,
    "epsilon.png": draw_epsilons,
    "curves.png": draw_curves,
}
_AUDIT_PICTURES = {"audit.png": draw_ledger_versus_audit, "roc.png": draw_rocs}
_MOST_CONTROLLERS = 24
_AGAIN = "run the experiment stage again"


def report() -> None:
    """Read every cell that the last experiment listed, and write data/report."""
    results = read_results(EXPERIMENT, RUNS)
    ledgers = [RunFolder(RUNS / name).ledger for name in listed_cells(EXPERIMENT)]
    limits = {result["label"]: limit_of(ledger) for result, ledger in zip(results, ledgers, strict=True)}
    others, name = unlisted_spendings(RUNS, listed_cells(EXPERIMENT)), load_settings().experiment.name
    write_report(results, REPORT, name, read_audits(EXPERIMENT, AUDITS), limits, others)
    runs = {
        result["label"]: RunFolder(ledger.parent).mlflow_run for result, ledger in zip(results, ledgers, strict=True)
    }
    publish_steps(steps_needed(results), runs, REPORT / STEPS_FILE)
    _to_mlflow(name, all(tracking.timed(result["telemetry"]) for result in results))


def read_results(experiment: Path, runs: Path) -> list[Result]:
    """The results of the cells that an experiment file lists.

    Raises: DataError if the file or a cell's result is missing.
    """
    results = []
    for name in listed_cells(experiment):
        path = RunFolder(runs / name).result
        try:
            results.append(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            raise DataError("is missing or unreadable", fix=_AGAIN, file=path) from None
    return results


def listed_cells(experiment: Path) -> list[str]:
    """The folder names of the cells that an experiment file lists.

    Raises: DataError if the file is missing, or lists none.
    """
    try:
        names = json.loads(experiment.read_text(encoding="utf-8"))["cells"]
    except (OSError, ValueError, KeyError):
        raise DataError("is missing or no experiment file", fix=_AGAIN, file=experiment) from None
    if not names:
        raise DataError("lists no cell", fix="give params.yaml a mechanism and an epsilon", file=experiment)
    return list(names)


def read_audits(experiment: Path, audits: Path) -> list[Audit]:
    """The audits of the cells that an experiment file lists; cells without an audit are left out."""
    files = [audits / name / "audit.json" for name in listed_cells(experiment)]
    return [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]


def write_report(
    results: list[Result],
    directory: Path,
    name: str,
    audits: Sequence[Audit] = (),
    limits: Mapping[str, float | None] | None = None,
    others: Sequence[Spending] = (),
) -> None:
    """Write report.html, its PNGs, metrics.json and plots/*.csv; ``limits`` as ``claims`` takes them.

    Args:
        others: spendings of runs that are not in ``results``; those on the same records are added to the totals.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for file, draw in _PICTURES.items():
        draw(results, directory / file)
    synthetic = any(result["synthetic"] for result in results)
    for file, draw_audits in _AUDIT_PICTURES.items():
        (directory / file).unlink(missing_ok=True)
        if audits:
            draw_audits(audits, directory / file, synthetic=synthetic)
    shown = {audit["label"]: audit_metrics(audit) for audit in audits}
    metrics = {result["label"]: _metrics(result) | shown.get(result["label"], {}) for result in results}
    write_json(directory / "metrics.json", with_steps(metrics, steps_needed(results), directory / STEPS_FILE))
    write_json(directory / "plots" / "perplexity.json", _perplexity_points(results))
    _write_csv(directory / "plots" / "curves.csv", _curve_rows(results))
    write_text(directory / "report.html", _page(results, directory, name, audits, limits or {}, others))


def _page(
    results: list[Result],
    directory: Path,
    name: str,
    audits: Sequence[Audit],
    limits: Mapping[str, float | None],
    others: Sequence[Spending],
) -> str:
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    environment.filters["epsilon"] = epsilon_text
    drawn = [*_PICTURES, *(_AUDIT_PICTURES if audits else [])]
    pictures = {file: image_data(directory / file) for file in drawn}
    metric = perplexity_metric(results)
    groups = over_seeds(results, metric)
    return environment.get_template("report.html.j2").render(
        name=name,
        results=sorted(results, key=lambda result: float(result["after"][metric])),
        before={result["model"]: result["before"] for result in results},
        metric=metric,
        groups=groups,
        several_seeds=any(len(group.results) > 1 for group in groups),
        claims=claims(groups, audits, limits),
        steps=steps_over_seeds(steps_needed(results)),
        private=any(result["telemetry"] == "private" for result in results),
        pictures=pictures,
        audits=audits,
        controllers=_draw_controllers(results, directory / "controllers"),
        guarantees=sorted({result["guarantee"] for result in results}),
        sources=sorted({result["data"] for result in results}),
        synthetic=any(result["synthetic"] for result in results),
        first=results[0],
        privacy_units=sorted(
            {
                f"one {result['unit']}, of {result['units']} in training, sampled at rate {result['sample_rate']:.4g}"
                for result in results
            }
        ),
        totals=totals(results),
        others=others,
        totals_with_others=[total for total in totals(results, others) if total.others],
    )


def _draw_controllers(results: list[Result], directory: Path) -> dict[str, str]:
    """Draw the knobs of the first seed of every cell whose knobs moved, at most ``_MOST_CONTROLLERS`` pictures."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    first: dict[tuple[Any, ...], Result] = {}
    for result in filter(moves_knobs, results):
        first.setdefault((result["model"], result["mechanism"], result["budget_epsilon"]), result)
    pictures = {}
    for result in list(first.values())[:_MOST_CONTROLLERS]:
        path = directory / f"{result['label']}.png"
        draw_controller(result, path)
        pictures[result["label"]] = image_data(path)
    return pictures


def image_data(path: Path) -> str:
    """A PNG as base64 text, so that the page is one file."""
    return base64.b64encode(path.read_bytes()).decode()


def epsilon_text(value: float | str) -> str:
    """Three digits, or the sign for infinity."""
    number = float(value)
    return f"{number:.3g}" if math.isfinite(number) else "∞"


def _metrics(result: Result) -> dict[str, Any]:
    keys = ("epsilon_published", "epsilon_noise_only", "epsilon_certified", "noise_multiplier", "releases")
    return {**{key: result[key] for key in keys}, **result["after"]}


def _perplexity_points(results: list[Result]) -> list[dict[str, Any]]:
    metric = perplexity_metric(results)
    return [
        {
            "mechanism": f"{result['model']} {result['mechanism']}",
            "epsilon_certified": result["epsilon_certified"],
            "epsilon_published": result["epsilon_published"],
            "perplexity": result["after"][metric],
            "seed": result["seed"],
        }
        for result in results
        if math.isfinite(float(result["epsilon_certified"]))
    ]


def _curve_rows(results: list[Result]) -> list[dict[str, Any]]:
    metric = "eval_sample_perplexity" if perplexity_metric(results) == "eval_perplexity" else "public_perplexity"
    return [
        {"cell": result["label"], "releases": point["releases"], "perplexity": point[metric]}
        for result in results
        for point in result["history"]
        if metric in point
    ]


def _write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    with replacing(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=["cell", "releases", "perplexity"])
        writer.writeheader()
        writer.writerows(rows)


def _to_mlflow(name: str, timed: bool) -> None:
    parent = tracking.parent_run(name, {}, timed=timed)
    for file in [*_PICTURES, *(file for file in _AUDIT_PICTURES if (REPORT / file).exists()), "report.html"]:
        tracking.send(parent, REPORT / file, "report", timed=timed)
    if (REPORT / "controllers").is_dir():
        tracking.send(parent, REPORT / "controllers", "report/controllers", timed=timed)


if __name__ == "__main__":
    run_stage(report)
