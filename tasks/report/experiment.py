"""DVC stage: write the report as one HTML page, PNGs, and the metrics and tables that DVC reads."""

from __future__ import annotations

import csv
import logging
import math
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dptune.core.files import read_json, replacing, write_json, write_text
from dptune.privacy.run_folder import RunFolder, Spending, spending_of
from tasks.audit.registry import parts
from tasks.charts.audits import Audit, Curve, rocs, run_profiles, step_profiles
from tasks.charts.canvas import Figure, save
from tasks.charts.curves import controller, curves, moves_knobs, spent
from tasks.charts.looks import Look, looks
from tasks.charts.seed_groups import EPSILONS, PUBLISHED, Result, cell_names, over_seeds, perplexity_metric, untuned
from tasks.charts.utility import utility
from tasks.experiment.cell_list import listed_cells, read_results
from tasks.metrics import ranked_by, title_of, tool_name
from tasks.mlflow import tracking
from tasks.mlflow.cell_run import audit_metrics
from tasks.mlflow.page import run_ids, show
from tasks.mlflow.registry import register
from tasks.paths import AUDITS, DATA, DELIVERED, EXPERIMENT, REPORT, RUNS
from tasks.report.about import About, about_runs
from tasks.report.answer import (
    answer_lines,
    best_cell,
    caveats,
    further_lines,
    headline,
    headlines,
    perplexities_of,
    rankings,
)
from tasks.report.claims import (
    as_users_claim,
    attacked,
    audit_as_users_claim,
    by_clt,
    claims,
    limit_of,
    meaning,
    of_one_person,
    privacy_curve,
    proved,
    shared_guarantees,
)
from tasks.report.page import publish, write
from tasks.report.steps_needed import (
    STEPS_FILE,
    curve_ends,
    lowest,
    publish_steps,
    steps_needed,
    steps_over_seeds,
    with_steps,
)
from tasks.report.tables import drawn_lines, powers, result_table, score_table, scores_of
from tasks.settings.params import load_settings
from tasks.stage import run_stage

_log = logging.getLogger(__name__)
PAGE, ANSWER, FIGURES, CONTROLLERS = "report.html", "answer.md", "figures", "controllers"
#: All figures of every cell; and those few of the best one that `dvc exp show` has columns for, with the perplexity of
#: each mechanism at each budget, which `dvc metrics diff` compares.
CELLS, METRICS = "cells.json", "metrics.json"
_MOST_CONTROLLERS = 24


def report(name: str | None = None, folder: Path = DATA) -> None:
    """Read every cell that the last experiment listed, and write its report.

    Args:
        name: name of the experiment; None takes that of params.yaml.
        folder: where the list of the cells lies, and the folder of the report; a study that is not params.yaml's has
            its own.
    """
    listed, directory = folder / EXPERIMENT.name, folder / REPORT.name
    (results, audits), cells = read_study(listed), listed_cells(listed)
    ledgers = [RunFolder(RUNS / cell).ledger for cell in cells]
    limits = {result["label"]: limit_of(ledger) for result, ledger in zip(results, ledgers, strict=True)}
    others, name = unlisted_spendings(RUNS, cells), name or load_settings().experiment.name
    curves = {label: privacy_curve(ledger) for label, ledger in zip(limits, ledgers, strict=True)}
    named = dict(zip(limits, cells, strict=True))
    about = about_runs(name, RUNS, cells, results)
    write_report(results, directory, name, audits, limits, others, curves, named, about)
    runs = {
        result["label"]: RunFolder(ledger.parent).mlflow_run for result, ledger in zip(results, ledgers, strict=True)
    }
    publish(directory, name)
    publish_steps(steps_needed(results), runs, directory / STEPS_FILE)
    _to_mlflow(name, directory, results, [ledger.parent for ledger in ledgers])


def read_study(listed: Path) -> tuple[list[Result], list[Audit]]:
    """Results and audits of the cells that an experiment file lists, with the claims that pages show."""
    pairs = zip(read_results(listed, RUNS), listed_cells(listed), strict=True)
    results = [as_users_claim(result, RunFolder(RUNS / cell).ledger) for result, cell in pairs]
    by_label = {result["label"]: result for result in results}
    return results, [audit_as_users_claim(one, by_label[one["label"]]) for one in read_audits(listed, AUDITS)]


def read_audits(experiment: Path, audits: Path) -> list[Audit]:
    """The audits of the cells that an experiment file lists; cells without an audit are left out."""
    files = [audits / name / "audit.json" for name in listed_cells(experiment)]
    return [read_json(file) for file in files if file.exists()]


def write_report(
    results: list[Result],
    directory: Path,
    name: str,
    audits: Sequence[Audit] = (),
    limits: Mapping[str, float | None] | None = None,
    others: Sequence[Spending] = (),
    curves: Mapping[str, Curve] | None = None,
    cells: Mapping[str, str] | None = None,
    about: About | None = None,
) -> None:
    """Write report.html, its PNGs, answer.md, cells.json, metrics.json, plots/*; ``limits`` as ``claims`` takes them.

    Args:
        others: spendings of runs that are not in ``results``; those on the same records are added to the totals.
        curves: certified curves of cells by label, as ``run_profiles`` takes them.
        cells: names of the run folders by label, for the line that verifies one.
        about: what the page's end says of the runs; None leaves that out.
    """
    directory.mkdir(parents=True, exist_ok=True)
    shown = looks(str(result["mechanism"]) for result in results)
    place = {result["label"]: list(shown).index(str(result["mechanism"])) for result in results}
    audits = sorted(audits, key=lambda audit: place[audit["label"]])
    figures = _figures(results, audits, shown, curves or {})
    moved = _controllers(results, shown)
    for folder, drawn in ((FIGURES, figures), (CONTROLLERS, moved)):
        shutil.rmtree(directory / folder, ignore_errors=True)
        (directory / folder).mkdir(parents=True)
        for figure in drawn:
            save(figure, directory / folder / f"{figure.name}.png")
    found = {audit["label"]: audit_metrics(audit) for audit in audits}
    metrics = {result["label"]: _metrics(result) | found.get(result["label"], {}) for result in results}
    write_json(directory / CELLS, with_steps(metrics, steps_needed(results), directory / STEPS_FILE))
    audited = {label: one["epsilon_audited"] for label, one in found.items() if "epsilon_audited" in one}
    best = {tool_name(key): value for key, value in best_cell(results, audited).items()}
    write_json(directory / METRICS, {**best, "perplexity_of": perplexities_of(results)})
    write_json(directory / "plots" / "perplexity.json", _perplexity_points(results))
    _write_csv(directory / "plots" / "curves.csv", _curve_rows(results))
    lines = [*answer_lines(results), *further_lines(results), *(f"- {line}" for line in caveats(results))]
    write_text(directory / ANSWER, "\n\n".join(lines) + "\n")
    _write_page(
        results, directory, name, audits, limits or {}, others, figures, moved, shown, curves or {}, cells or {}, about
    )


def _hand_on(cell: str) -> str:
    """The command that writes a cell's adapter with card and ledger; it writes no classifier."""
    return f"python -m tasks.experiment.adapter_model {RUNS}/{cell} {DELIVERED}/{cell}"


def _figures(
    results: list[Result], audits: Sequence[Audit], shown: dict[str, Look], proved: Mapping[str, Curve]
) -> list[Figure]:
    """Every figure that has something to show."""
    synthetic = any(result["synthetic"] for result in results)
    found = [
        utility(results, shown, name="utility"),
        utility(results, shown, list(EPSILONS), name="perplexity"),
        spent(results, shown),
        curves(results, shown),
    ]
    if audits:
        names = cell_names(results)
        found.append(run_profiles(audits, proved, synthetic=synthetic, names=names))
        found.append(step_profiles(audits, synthetic=synthetic, names=names))
        found.append(rocs(audits, {result["label"]: result for result in results}, shown, synthetic=synthetic))
    return [figure for figure in found if figure]


def _write_page(
    results: list[Result],
    directory: Path,
    name: str,
    audits: Sequence[Audit],
    limits: Mapping[str, float | None],
    others: Sequence[Spending],
    figures: Sequence[Figure],
    moved: Sequence[Figure],
    shown: dict[str, Look],
    curves: Mapping[str, Curve],
    cells: Mapping[str, str],
    about: About | None,
) -> None:
    metric = perplexity_metric(results)
    opened = headlines(rankings(results))
    cell = cells.get(opened[0].choice.first["label"]) if opened else None
    groups = over_seeds(results, metric)
    models = dict.fromkeys(str(result["model"]) for result in results)
    write(
        "report.html.j2",
        directory / PAGE,
        [*figures, *moved],
        shown,
        name=name,
        about=about,
        opening=answer_lines(results),
        compared=opened[0].epsilon if opened and len(opened[0].candidates) > 1 else None,
        alone=bool(opened) and all(len(ranking.candidates) == 1 for ranking in opened),
        proved=proved(results),
        meaning=meaning(results, curves),
        of_one_person=of_one_person(results),
        attacked=attacked(audits),
        check=f"dptune verify {RUNS}/{cell}" if cell else "",
        hand_on=_hand_on(cell) if cell and opened[0].choice.first.get("task") != "classify" else "",
        attacks_planted=any({"canaries", "extraction"} & set(audit) for audit in audits),
        further=further_lines(results),
        caveats=caveats(results),
        results=sorted(results, key=lambda result: float(result["after"][metric])),
        before={result["model"]: result["before"] for result in results if metric in result["before"]},
        untuned={one: value for one in models if (value := untuned(results, one, metric)) is not None},
        metric=title_of(metric),
        metric_key=metric,
        table=result_table(groups, audits, rankings(results)),
        scores=score_table(groups),
        several_models=len(models) > 1,
        several_seeds=any(len(group.results) > 1 for group in groups),
        claims=claims(groups, audits, limits),
        steps=steps_over_seeds(steps_needed(results)),
        ends=curve_ends(groups),
        private=any(result["telemetry"] == "private" for result in results),
        telemetries=sorted({str(result["telemetry"]) for result in results}),
        by_clt=by_clt(results),
        several_accountants=len({one.get("claimed_by") for one in results if math.isfinite(float(one[PUBLISHED]))}) > 1,
        audits=audits,
        powers=powers(audits, cell_names(results)),
        cell=cell_names(results),
        attack_parts=parts(),
        attack_columns=lambda part: [metric for metric in part.metrics if "scores" in metric.shown],
        mechanism_of={str(result["label"]): str(result["mechanism"]) for result in results},
        controllers=[figure.name for figure in moved],
        guarantees=shared_guarantees(results),
        base_models=sorted({result["model_about"] for result in results if result.get("model_about")}),
        sources=sorted({result["data"] for result in results}),
        public_sources=sorted({result["public_data"] for result in results if result.get("public_data")}),
        synthetic=any(result["synthetic"] for result in results),
        first=results[0],
        privacy_units=sorted(
            {
                f"one {result['unit']}, of {result['units']} in training, sampled at rate {result['sample_rate']:.4g}"
                + (f" by {result['sampler']}" if result.get("sampler") else "")
                for result in results
            }
        ),
        totals=totals(results),
        totals_certified=totals([result for result in results if math.isfinite(float(result["epsilon_certified"]))]),
        others=others,
        totals_with_others=[total for total in totals(results, others) if total.others],
    )


def _controllers(results: Sequence[Result], shown: dict[str, Look]) -> list[Figure]:
    """What the first seed of every cell whose knobs moved did to them, at most ``_MOST_CONTROLLERS`` figures."""
    first: dict[tuple[Any, ...], Result] = {}
    for result in filter(moves_knobs, results):
        first.setdefault((result["model"], result["mechanism"], result["budget_epsilon"]), result)
    chosen = list(first.values())[:_MOST_CONTROLLERS]
    names = cell_names(results)
    figures = [controller(one, shown[str(one["mechanism"])], names[one["label"]]) for one in chosen]
    return [figure for figure in figures if figure.panels]


def _metrics(result: Result) -> dict[str, Any]:
    keys = (*EPSILONS, "noise_multiplier", "releases")
    return {**{key: result[key] for key in keys}, **result["after"], **lowest(result), **scores_of(result)}


def _perplexity_points(results: list[Result]) -> list[dict[str, Any]]:
    metric, named = perplexity_metric(results), drawn_lines(results)
    return [
        {
            **named[result["label"]],
            "epsilon_certified": result["epsilon_certified"],
            "epsilon_published": result["epsilon_published"],
            "perplexity": result["after"][metric],
            "seed": result["seed"],
        }
        for result in results
        if math.isfinite(float(result["epsilon_certified"]))
    ]


def _curve_rows(results: list[Result]) -> list[dict[str, Any]]:
    metric = ranked_by(results)[1].name
    named = drawn_lines(results, by_budget=True)
    return [
        {"cell": one["label"], **named[one["label"]], "releases": point["releases"], "perplexity": point[metric]}
        for one in results
        for point in one["history"]
        if metric in point
    ]


def _write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    with replacing(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=["cell", "mechanism", "colour", "releases", "perplexity"])
        writer.writeheader()
        writer.writerows(rows)


def _to_mlflow(name: str, pages: Path, results: list[Result], directories: Sequence[Path]) -> None:
    """Send the report and its headline to the experiment's run, and open its page with the headline."""
    timed = all(tracking.timed(result["telemetry"]) for result in results)
    parent = tracking.parent_run(name, {}, timed=timed)
    for file in (PAGE, ANSWER):
        tracking.send(parent, pages / file, "report", timed=timed)
    for folder in (FIGURES, CONTROLLERS):
        tracking.send(parent, pages / folder, f"report/{folder}", timed=timed)
    found = headline(results)
    tracking.add_to_run(parent, found.metrics, None, {**found.tags, tracking.NOTE: found.sentence}, timed=timed)
    opened = headlines(rankings(results))
    register(parent, name, results, directories, str(opened[0].choice.first["label"]) if opened else "")
    private = all(result["telemetry"] == "private" for result in results)
    links = show(parent, run_ids(directories), "private" if private else "research", found.sentence)
    if links:
        _log.info("MLflow, the cells in a table:  %s", links.table)
        _log.info("MLflow, the cells in charts:   %s", links.charts)


# Adds up what all runs on the same records have spent, those included that a report does not list.


@dataclass(frozen=True)
class Total:
    """Epsilon and delta of everything that was released about one kind of unit, by basic composition.

    Attributes:
        runs: number of runs that are added up.
        others: number of those runs that the report does not list.
    """

    unit: str
    runs: int
    others: int
    epsilon: float
    delta: float


def unlisted_spendings(runs: Path, names: Collection[str]) -> list[Spending]:
    """The spending of each run in ``runs`` that is not in ``names``; unfinished runs are included."""
    folders = sorted(path for path in runs.iterdir() if path.is_dir() and path.name not in names)
    return [spent for folder in folders if (spent := spending_of(folder))]


def totals(results: Sequence[dict[str, Any]], others: Sequence[Spending] = ()) -> list[Total]:
    """A total for every unit of privacy of ``results``.

    A run of ``others`` counts if its ledger names the same records and unit, or does not say which ones.
    """
    sources = {result["data"] for result in results} | {""}
    same = [one for one in others if one.data in sources]
    return [_total(unit, results, same) for unit in sorted({result["unit"] for result in results})]


def _total(unit: str, results: Sequence[dict[str, Any]], others: Sequence[Spending]) -> Total:
    mine = [result for result in results if result["unit"] == unit]
    more = [one for one in others if one.unit in (unit, "")]
    return Total(
        unit=unit,
        runs=len(mine) + len(more),
        others=len(more),
        epsilon=math.fsum([*(float(result["epsilon_certified"]) for result in mine), *(one.epsilon for one in more)]),
        delta=math.fsum([*(result["delta"] for result in mine), *(one.delta for one in more)]),
    )


if __name__ == "__main__":
    run_stage(report)
