"""Experiments of MLflow: their numbers, found by the name of a study; their files, and the addresses of their pages.

MLflow is not loaded: a command's last lines, which hold addresses, are shown at once.
"""

from __future__ import annotations

import logging
import os
import re
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlencode, urlsplit

from dptune.core.files import write_text
from tasks.paths import DATA, MLFLOW_PAGE

if TYPE_CHECKING:  # only tasks.mlflow.tracking imports MLflow, after it has set its environment
    from mlflow import MlflowClient

#: What MLflow calls an experiment whose own name says nothing there: it has a "Default" of its own.
SHOWN_NAMES = {"default": "dptune: default study"}
#: Where a local database keeps the paths of files: tables and their columns.
_PATHS = {
    "experiments": "artifact_location",
    "runs": "artifact_uri",
    "logged_models": "artifact_location",
    "model_versions": "storage_location",
}
#: Saved views of the experiment: their keys in links and in the experiment's tags, and the names that MLflow shows.
VIEWS = {"last-run": "Cells of the last run", "certified": "Certified only", "claims": "Claims against proof"}
VIEW, CERTIFIED, CLAIMS = VIEWS
_LOCAL_PORT = "5000"
_log = logging.getLogger(__name__)


def experiment_id(mlflow: MlflowClient, name: str, *, local: bool) -> str:
    """The number of a study's experiment, which is made, restored or renamed where needed.

    Args:
        local: whether the database is the checkout's own, whose files lie beside it.
    """
    shown = SHOWN_NAMES.get(name, name)
    found = mlflow.get_experiment_by_name(shown)
    if not found and (found := mlflow.get_experiment_by_name(name)):  # of an earlier version of dptune
        mlflow.rename_experiment(found.experiment_id, shown)
    if not found:
        return str(mlflow.create_experiment(shown, artifact_location=_files().as_uri() if local else None))
    if found.lifecycle_stage == "deleted":
        mlflow.restore_experiment(found.experiment_id)
        _log.warning("the experiment %s was deleted in MLflow, and is restored: a flow logs to it again", shown)
    return str(found.experiment_id)


def repair_paths() -> None:
    """Let the checkout's own database name its files where they are now: MLflow keeps whole paths, and checkouts move.

    Paths of a folder that still exists stay as they are: this may be a copy.
    """
    file = DATA / "mlflow.db"
    if not file.exists():
        return
    try:
        with closing(sqlite3.connect(file, timeout=30)) as database, database:
            _repair(database, _files())
    except sqlite3.Error as error:
        _log.warning("MLflow's pages may miss files: %s: %s. Fix: free it, or restore it.", file, error)


def _repair(database: sqlite3.Connection, here: Path) -> None:
    known = database.execute("SELECT DISTINCT artifact_location FROM experiments").fetchall()
    for old in [old for (old,) in known if old and old != here.as_uri() and _was_ours(old, here)]:
        for table, column in _PATHS.items():
            database.execute(
                f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE {column} || '/' LIKE ? ESCAPE '\\'",
                (here.as_uri(), len(old) + 1, re.sub(r"([%_\\])", r"\\\1", old) + "/%"),
            )
        _log.info("MLflow's files moved with this checkout: its database names %s now, not %s", here.as_uri(), old)


def _was_ours(old: str, here: Path) -> bool:
    """Whether an address is of the files of this checkout, at a place where it no longer is."""
    if not old.startswith("file:"):
        return False
    path = Path(unquote(urlsplit(old).path))
    return path.parts[-2:] == here.parts[-2:] and not path.exists()


def _files() -> Path:
    return (DATA / "mlartifacts").resolve()


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
    """Keep the number of the experiment that was shown last; a copy of the checkout writes to the checkout."""
    write_text(MLFLOW_PAGE.resolve(), f"{experiment}\n")


def remembered() -> PageLinks | None:
    """The links of the experiment that was shown last; None before any."""
    return links(MLFLOW_PAGE.read_text(encoding="utf-8").strip()) if MLFLOW_PAGE.exists() else None
