"""The experiment's page in MLflow: its description, the cells of the last run, and a saved view that compares them.

MLflow keeps a saved view as a tag of the experiment; a link that names the tag opens it, with its columns, order and
charts. Its user interface (3.17) reads the tag's JSON; another version that does not know it shows its plain page.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mlflow.exceptions import MlflowException

from dptune.privacy.run_folder import RunFolder
from tasks.audit.registry import ATTACK_CHARTS
from tasks.charts.looks import run_colours
from tasks.metrics import EPSILON_CHARTS, EPSILONS, HELD_OUT, PUBLIC, RANKED, TRAINING, UTILITY, shown_in
from tasks.mlflow.page_links import VIEW, PageLinks, links, paths, remember
from tasks.mlflow.tracking import LATER, NO_TIME, NOTE, client, optional, timed

#: Tag of the runs of the last run's cells.
LAST_RUN = "dptune.last_run"
#: Last line of a description that dptune may replace; one that a user wrote stays.
_OURS = "*Written by dptune; it stays as you change it if you remove this line.*"
#: Tag of a run that MLflow's charts take its colour from.
_COLOUR = "mlflow.runColor"
_MECHANISM = "mechanism"  # a parameter of each cell's run
_WIDTHS = (122, 132, 120, 115)  # of the epsilons, in pixels
_WIDTH = 110
_OPEN = "The last run's cells are not reported yet: `python -m tasks.report.experiment`."
_HOW = """## How to read this page

- [The cells of the last run]({table}) as a table, and [in charts]({charts}); also under **Views**, at the top right.
- Each run under `{name}` is a cell: one mechanism at one budget with one seed. {perplexity}
- Four epsilons stand beside each result. **published**: what the mechanism's paper would claim; of
  plain DP-SGD the claim of RLDP's paper, where the report shows that of Rényi DP. **noise only**: right sensitivity
  and right accountant, leaks of the controller ignored. **certified**: what is proved, ∞ where raw statistics of
  private records steer the run. **audited**: a lower bound that an attack showed. Compare runs of one
  certified epsilon. Each is about one cell only: several cells together cost the sum, which the report states.
- `radius` is the mean over layers. All other figures of a cell are in its files: `steps.csv` (every step),
  `result.json`, `audit.json`. The report is a file of the run `{name}`.
- The model of a cell, with its card and its ledger: `mlflow.pyfunc.load_model("runs:/RUN ID/adapter")`.
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
    """Describe the experiment, and save the view of the cells of its last run. Returns None if MLflow took nothing.

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
        _colour(mlflow, number)
        wanted = {
            "mlflow.experimentKind": "custom_model_development",
            f"mlflow.sharedViewState.{VIEW}": _saved_view(telemetry),
        }
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


def _colour(mlflow: Any, experiment: str) -> None:
    """Give the marked runs the colours of their mechanisms; MLflow's own, of a run's id, are often alike."""
    cells = [run for run in _marked(mlflow, experiment) if _MECHANISM in run.data.params]
    colours = run_colours(run.data.params[_MECHANISM] for run in cells)
    for run in cells:
        colour = colours[run.data.params[_MECHANISM]]
        if run.data.tags.get(_COLOUR) != colour:
            mlflow.set_tag(run.info.run_id, _COLOUR, colour)


def _description(experiment: str, name: str, telemetry: str) -> str:
    table, charts = paths(experiment)
    return _HOW.format(
        table=table,
        charts=charts,
        name=name,
        perplexity=_PERPLEXITY[telemetry].format(held_out=HELD_OUT.name, public=PUBLIC.name, better=PUBLIC.better),
        guarantee=_GUARANTEE[telemetry],
        ours=_OURS,
    )


def _saved_view(telemetry: str) -> str:
    """The saved view as MLflow's user interface writes it; it is the same for all experiments of one telemetry."""
    state = json.dumps(_state(telemetry))
    return json.dumps({"name": "Cells of the last run", "createdAt": NO_TIME, "updatedAt": NO_TIME, "state": state})


def _state(telemetry: str) -> dict[str, Any]:
    ranked, along = next(pair for pair in RANKED if timed(telemetry) or not pair[0].private)
    # A window of 1,300 pixels shows all up to the four epsilons. A run's name opens with mechanism and budget.
    widths = {
        "attributes.`Run Name`": 215,
        f"metrics.`{ranked.name}`": 125,
        **dict(zip((f"tags.`{one.name.replace('_', ' ', 1)}`" for one in EPSILONS), _WIDTHS, strict=True)),
        **{f"metrics.`{one.name}`": _WIDTH for one in shown_in("column", telemetry)},
        "attributes.`Dataset`": 300,
    }
    charts: dict[str, list[dict[str, Any]]] = {
        UTILITY: [_bar(ranked.name), _scatter("epsilon_certified", ranked.name)],
        EPSILON_CHARTS: [],
        ATTACK_CHARTS: [],
        TRAINING: [_line(along.name), _line("epsilon_certified")],
    }
    for one in shown_in("tracking", telemetry):
        if one.section:
            charts.setdefault(one.section, []).append((_line if one.section == TRAINING else _bar)(one.name))
    return {
        "searchFilter": f"tags.`{LAST_RUN}` = 'yes'",
        "orderByKey": f"metrics.`{ranked.name}`",
        "orderByAsc": ranked.better == "lower",
        "selectedColumns": list(widths),
        "columnOrder": list(widths),
        "columnWidths": widths,
        "runsHiddenMode": "SHOW_ALL",
        "compareRunSections": [_section(number, name) for number, name in enumerate(charts)],
        "compareRunCharts": [
            {**chart, "uuid": f"{VIEW}-{number}-{place}", "metricSectionId": f"{VIEW}-{number}"}
            for number, section in enumerate(charts.values())
            for place, chart in enumerate(section)
        ],
        "isAccordionReordered": True,
        "hideEmptyCharts": True,
    }


def _section(number: int, name: str) -> dict[str, Any]:
    about = {"uuid": f"{VIEW}-{number}", "name": name, "display": True, "isReordered": True}
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
