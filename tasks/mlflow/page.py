"""The experiment's page in MLflow: its description, the cells of the last run, and saved views that compare them.

MLflow keeps a saved view as a tag of the experiment; a link that names the tag opens it, with its columns, order and
charts. Its user interface (3.17) reads the tag's JSON; another version that does not know it shows its plain page.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from mlflow.entities import Metric
from mlflow.exceptions import MlflowException

from dptune.core import metric
from dptune.privacy.run_folder import RunFolder
from tasks.audit.registry import ATTACK_CHARTS
from tasks.charts.looks import run_colours
from tasks.metrics import EPSILON_CHARTS, HELD_OUT, PUBLIC, RANKED, TRAINING, UTILITY, shown_in, tool_name
from tasks.mlflow.experiments import CERTIFIED, CLAIMS, SHOWN_NAMES, VIEWS, PageLinks, links, paths, remember
from tasks.mlflow.tracking import BATCH, LATER, NO_TIME, NOTE, client, optional, timed

#: Tag of the runs of the last run's cells.
LAST_RUN = "dptune.last_run"
#: Tag of the place of such a run: cells with a certified epsilon first, by it, and of one epsilon the best first.
PLACE = "dptune.place"
#: Last line of a description that dptune may replace; one that a user wrote stays.
_OURS = "*Written by dptune; it stays as you change it if you remove this line.*"
#: Tag of a run that MLflow's charts take its colour from.
_COLOUR = "mlflow.runColor"
_MECHANISM = "mechanism"  # a parameter of each cell's run
_PROVED = tool_name("epsilon_certified")
#: In pixels. The certified one comes first: on a first visit MLflow's open assistant hides a quarter of the window.
_WIDTHS = {"epsilon_certified": 120, "epsilon_published": 122, "epsilon_noise_only": 132, "epsilon_audited": 115}
_WIDTH = 110
_LARGEST = 1_000_000_000  # MLflow keeps an infinite metric as the largest number, and its filters read no exponent
_OPEN = "The last run's cells are not reported yet: `python -m tasks.report.experiment`."
_HOW = """## How to read this page

- [The cells of the last run]({table}) as a table, and [in charts]({charts}); [only those with a certified
  epsilon]({certified}); and [what papers claim, against what is proved]({claims}). All are under **Views**, too.
- Each run under `{study}`, the study's own, is a cell: one mechanism at one budget with one seed. {perplexity}
- Four epsilons stand beside each result. **published**: what the mechanism's paper would claim; of plain DP-SGD, what
  Rényi DP proves, as its users claim (along a run, and in `result.json`, the central limit's figure of RLDP's paper).
  **noise only**: right sensitivity and right accountant, leaks of the controller ignored. **certified**: what is
  proved, ∞ where raw statistics of private records steer the run. **audited**: a lower bound that an attack showed.
  Compare runs of one certified epsilon. Each is about one cell only: several cells together cost the sum, which the
  report states.
- `training/radius` is the mean over layers. All other figures of a cell are in its files: `steps.csv` (every step),
  `result.json`, `audit.json`. The report is a file of the run `{study}`.
- The model of a cell has the cell's name, and its card and its ledger with it; the page of a run says how to load it.
- {guarantee}

{ours}"""
_PERPLEXITY = {
    "research": "`{held_out}` is on held-out private records: {better} is better. `{public}` is on public "
    "ones, and may rise as the model moves to the private ones.",
    "private": "`{public}` is on public records: {better} is better. Nothing is shown about held-out private ones.",
}
_GUARANTEE = {
    "research": "Where ε certified is finite, the guarantee covers the adapters, and **not** this page: curves and "
    "perplexities are computed from private records, and times are shown.",
    "private": "For runs with the tag `telemetry: private`, the guarantee covers everything that is shown about the "
    "records: the ledgers' releases and what follows from them, public data and the auditor's own secrets. "
    "They have no times. The number of units is public.",
}


def show(parent: str, run_ids: Iterable[str], telemetry: str, answer: str = "") -> PageLinks | None:
    """Describe the experiment, and save the views of the cells of its last run. Returns None if MLflow took nothing.

    Args:
        parent: run id of the experiment's, or ``LATER``.
        run_ids: the runs of the cells.
        answer: first paragraph of the description; if it is empty, that of the same cells stays.
    """
    if parent == LATER:
        return None
    with optional("the experiment's page"):
        mlflow = client()
        experiment = mlflow.get_experiment(mlflow.get_run(parent).info.experiment_id)
        number, tags = str(experiment.experiment_id), experiment.tags
        others = mark(mlflow, number, set(run_ids))
        rename_metrics(mlflow, number)
        _order_and_colour(mlflow, number, _ranked(telemetry)[0])
        wanted = {f"mlflow.sharedViewState.{view}": _saved_view(telemetry, view) for view in VIEWS}
        wanted["mlflow.experimentKind"] = "custom_model_development"
        if not tags.get(NOTE) or _OURS in tags[NOTE]:
            before = "" if others else tags.get(NOTE, "").partition("\n\n## ")[0]  # an answer is of the cells it names
            wanted[NOTE] = f"{answer or before or _OPEN}\n\n{_description(number, experiment.name, telemetry)}"
        for key, value in wanted.items():
            if tags.get(key) != value:
                mlflow.set_experiment_tag(number, key, value)
        remember(number)
        return links(number)
    return None


def run_ids(directories: Iterable[Path]) -> list[str]:
    """The ids of the cells' runs in MLflow; a cell that has none is left out."""
    markers = [RunFolder(directory).mlflow_run for directory in directories]
    return [marker.read_text(encoding="utf-8").strip() for marker in markers if marker.exists()]


def mark(mlflow: Any, experiment: str, run_ids: set[str]) -> bool:
    """Tag the runs of the last run's cells, and take the tag from all others. Returns whether that changed anything."""
    tagged = {str(run.info.run_id) for run in _marked(mlflow, experiment)}
    for run_id in tagged - run_ids:
        mlflow.delete_tag(run_id, LAST_RUN)
    for run_id in run_ids - tagged:
        try:
            mlflow.set_tag(run_id, LAST_RUN, "yes")
        except MlflowException as error:  # a run of another server, which this one does not know
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
    return tagged != run_ids


def _marked(mlflow: Any, experiment: str) -> Iterator[Any]:
    """The runs of the last run's cells."""
    token = None
    while True:
        page = mlflow.search_runs([experiment], f"tags.`{LAST_RUN}` = 'yes'", page_token=token)
        yield from page
        if not (token := page.token):
            return


def rename_metrics(mlflow: Any, experiment: str) -> None:
    """Give the marked runs of earlier versions of dptune, whose metrics had the names of files, today's names too."""
    for run in _marked(mlflow, experiment):
        for old in run.data.metrics:
            if (name := tool_name(old)) not in run.data.metrics:
                history = mlflow.get_metric_history(run.info.run_id, old)
                points = [Metric(name, one.value, one.timestamp, one.step) for one in history]
                for start in range(0, len(points), BATCH):
                    mlflow.log_batch(run.info.run_id, metrics=points[start : start + BATCH])


def _order_and_colour(mlflow: Any, experiment: str, ranked: metric.Metric) -> None:
    """Give the marked runs their places, and the colours of their mechanisms: MLflow's own are often alike."""
    cells = [run for run in _marked(mlflow, experiment) if _MECHANISM in run.data.params]
    colours = run_colours(run.data.params[_MECHANISM] for run in cells)
    for place, run in enumerate(sorted(cells, key=lambda run: _order(run, ranked)), 1):
        for tag, value in ((PLACE, f"{place:04}"), (_COLOUR, colours[run.data.params[_MECHANISM]])):
            if run.data.tags.get(tag) != value:
                mlflow.set_tag(run.info.run_id, tag, value)


def _order(run: Any, ranked: metric.Metric) -> tuple[bool, float, float]:
    """What the places of runs follow: no certified epsilon, else its first two digits; and how bad the run is."""
    certified = run.data.metrics.get(_PROVED, math.inf)
    value = run.data.metrics.get(tool_name(ranked.name), math.nan)
    badness = math.inf if math.isnan(value) else value if ranked.better == "lower" else -value
    return certified > _LARGEST, 0.0 if certified > _LARGEST else float(f"{certified:.2g}"), badness


def _description(experiment: str, name: str, telemetry: str) -> str:
    links_of_views = dict(zip((field.name for field in fields(PageLinks)), paths(experiment), strict=True))
    held_out, public = tool_name(HELD_OUT.name), tool_name(PUBLIC.name)
    return _HOW.format(
        **links_of_views,
        study=next((study for study, shown in SHOWN_NAMES.items() if shown == name), name),
        perplexity=_PERPLEXITY[telemetry].format(held_out=held_out, public=public, better=PUBLIC.better),
        guarantee=_GUARANTEE[telemetry],
        ours=_OURS,
    )


def _saved_view(telemetry: str, view: str) -> str:
    """A saved view as MLflow's user interface writes it; it is the same for all experiments of one telemetry."""
    state = json.dumps(_state(telemetry, view))
    return json.dumps({"name": VIEWS[view], "createdAt": NO_TIME, "updatedAt": NO_TIME, "state": state})


def _ranked(telemetry: str) -> tuple[metric.Metric, metric.Metric]:
    """The metric that cells are ordered by, and the same along a run."""
    return next(pair for pair in RANKED if timed(telemetry) or not pair[0].private)


def _state(telemetry: str, view: str) -> dict[str, Any]:
    ranked, along = (tool_name(one.name) for one in _ranked(telemetry))
    # A window of 1,300 pixels shows all up to the four epsilons. A run's name opens with mechanism and budget.
    epsilons = {f"tags.`{name.replace('_', ' ', 1)}`": width for name, width in _WIDTHS.items()}
    first = dict(list(epsilons.items())[:1])
    widths = {"attributes.`Run Name`": 215, **first, f"metrics.`{ranked}`": 125, **epsilons}
    widths |= {f"metrics.`{tool_name(one.name)}`": _WIDTH for one in shown_in("column", telemetry)}
    widths["attributes.`Dataset`"] = 300
    charts: dict[str, list[dict[str, Any]]] = {UTILITY: [_bar(ranked), _scatter(_PROVED, ranked)]}
    if view == CLAIMS:
        charts = {"Claims against proof": [_scatter(tool_name("epsilon_published"), _PROVED)]} | charts
    charts |= {EPSILON_CHARTS: [], ATTACK_CHARTS: [], TRAINING: [_line(along), _line(_PROVED)]}
    for one in shown_in("tracking", telemetry):
        if one.section:
            chart = _line if one.section == TRAINING else _bar
            charts.setdefault(one.section, []).append(chart(tool_name(one.name)))
    finite = f" and metrics.`{_PROVED}` < {_LARGEST}" if view == CERTIFIED else ""
    return {
        "searchFilter": f"tags.`{LAST_RUN}` = 'yes'{finite}",
        "orderByKey": f"tags.`{PLACE}`",
        "orderByAsc": True,
        "selectedColumns": list(widths),
        "columnOrder": list(widths),
        "columnWidths": widths,
        "runsHiddenMode": "SHOW_ALL",
        "compareRunSections": [_section(f"{view}-{number}", name) for number, name in enumerate(charts)],
        "compareRunCharts": [
            {**chart, "uuid": f"{view}-{number}-{place}", "metricSectionId": f"{view}-{number}"}
            for number, section in enumerate(charts.values())
            for place, chart in enumerate(section)
        ],
        "isAccordionReordered": True,
        "hideEmptyCharts": True,
    }


def _section(uuid: str, name: str) -> dict[str, Any]:
    about = {"uuid": uuid, "name": name, "display": True, "isReordered": True}
    return {**about, "columns": 2, "cardHeight": 320}


def _chart(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "runsCountToCompare": 100, "deleted": False, "isGenerated": False, **more}


def _bar(metric: str) -> dict[str, Any]:
    return _chart("BAR", metricKey=metric)


def _scatter(x: str, y: str) -> dict[str, Any]:
    return _chart("SCATTER", xaxis={"key": x, "type": "METRIC"}, yaxis={"key": y, "type": "METRIC"})


def _line(metric: str) -> dict[str, Any]:
    axis = {"xAxisKey": "step", "useGlobalXaxisKey": True, "scaleType": "linear", "lineSmoothness": 0}
    return _chart("LINE", metricKey=metric, selectedMetricKeys=[metric], **axis)
