"""Addresses of the experiment's page in MLflow. MLflow is not loaded: a command's last lines are shown at once."""

from __future__ import annotations

import os
from dataclasses import dataclass
from urllib.parse import urlencode

from dptune.core.files import write_text
from tasks.paths import MLFLOW_PAGE

#: Name of the saved view of the last run's cells, in links and in the experiment's tag.
VIEW = "last-run"
_LOCAL_PORT = "5000"


@dataclass(frozen=True)
class PageLinks:
    """Addresses of the saved view.

    Attributes:
        table: the cells of the last run with their perplexities, epsilons and audits.
        charts: the same cells in charts.
    """

    table: str
    charts: str


def links(experiment: str) -> PageLinks:
    """The links of an experiment's page, on the server in use or else on that of ``make ui``."""
    return PageLinks(*(f"{server()}/{path}" for path in paths(experiment)))


def server() -> str:
    """The address of the MLflow server in use, or else of the one that ``make ui`` starts."""
    given = os.environ.get("MLFLOW_TRACKING_URI", "")
    if given.startswith(("http://", "https://")):
        return given.rstrip("/")
    return f"http://127.0.0.1:{os.environ.get('DPTUNE_MLFLOW_PORT', _LOCAL_PORT)}"


def paths(experiment: str) -> tuple[str, str]:
    """The parts of table's and charts' addresses after the server's."""
    # Without the kind of work, a browser that was never here opens a page about traces of agents.
    table = {"workflowType": "machine_learning", "viewStateShareKey": VIEW}
    charts = {**table, "compareRunsMode": "CHART"}
    return f"#/experiments/{experiment}/runs?{urlencode(table)}", f"#/experiments/{experiment}/runs?{urlencode(charts)}"


def remember(experiment: str) -> None:
    """Keep the number of the experiment that was shown last."""
    write_text(MLFLOW_PAGE, f"{experiment}\n")


def remembered() -> PageLinks | None:
    """The links of the experiment that was shown last; None before any."""
    return links(MLFLOW_PAGE.read_text(encoding="utf-8").strip()) if MLFLOW_PAGE.exists() else None
