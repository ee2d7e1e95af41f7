"""Addresses of the experiment's page in MLflow. MLflow is not loaded: a command's last lines are shown at once."""

from __future__ import annotations

import os
from dataclasses import dataclass
from urllib.parse import urlencode

from dptune.core.files import write_text
from tasks.paths import MLFLOW_PAGE

#: Saved views of the experiment: their keys in links and in the experiment's tags, and the names that MLflow shows.
VIEWS = {"last-run": "Cells of the last run", "certified": "Certified only", "claims": "Claims against proof"}
VIEW, CERTIFIED, CLAIMS = VIEWS
_LOCAL_PORT = "5000"


@dataclass(frozen=True)
class PageLinks:
    """Addresses of the saved views.

    Attributes:
        table: the cells of the last run with their perplexities, epsilons and audits.
        charts: the same cells in charts.
        certified: those with a certified epsilon alone.
        claims: their claimed, certified and audited epsilons, in charts.
    """

    table: str
    charts: str
    certified: str
    claims: str


def links(experiment: str) -> PageLinks:
    """The links of an experiment's page, on the server in use or else on that of ``make ui``."""
    return PageLinks(*(f"{server()}/{path}" for path in paths(experiment)))


def server() -> str:
    """The address of the MLflow server in use, or else of the one that ``make ui`` starts."""
    given = os.environ.get("MLFLOW_TRACKING_URI", "")
    if given.startswith(("http://", "https://")):
        return given.rstrip("/")
    return f"http://127.0.0.1:{os.environ.get('DPTUNE_MLFLOW_PORT', _LOCAL_PORT)}"


def paths(experiment: str) -> tuple[str, str, str, str]:
    """The parts of the addresses after the server's, in the order of ``PageLinks``."""

    def path(view: str, **more: str) -> str:
        # Without the kind of work, a browser that was never here opens a page about traces of agents.
        asked = {"workflowType": "machine_learning", "viewStateShareKey": view, **more}
        return f"#/experiments/{experiment}/runs?{urlencode(asked)}"

    charts = {"compareRunsMode": "CHART"}
    return path(VIEW), path(VIEW, **charts), path(CERTIFIED), path(CLAIMS, **charts)


def remember(experiment: str) -> None:
    """Keep the number of the experiment that was shown last."""
    write_text(MLFLOW_PAGE, f"{experiment}\n")


def remembered() -> PageLinks | None:
    """The links of the experiment that was shown last; None before any."""
    return links(MLFLOW_PAGE.read_text(encoding="utf-8").strip()) if MLFLOW_PAGE.exists() else None
