"""Prefect's pages in a real browser: a study is started from its form, and its run's page shows what came of it.

DPTUNE_SCREENSHOTS=FOLDER keeps a picture of the form and of the finished run's page.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from tiny_pipeline import BUDGET, built, copied, prepare_environment, write_params

from dptune.files import write_text
from tests.browser.screenshots import keep

pytestmark = [pytest.mark.browser, pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(1800)]
QUICK = {
    "experiment": {"cells_together": 2},
    "training": {"max_length": 400},
    "audit": {"generations": 20, "candidates": 3, "records": 8, "step_trials": 0},
}
#: Stands for DVC: the data is there already.
_DVC = "print(\"Stage 'pretrain' didn't change, skipping\", flush=True)\n"
_MILLISECONDS = 120_000


@dataclass
class Served:
    """A running ``python -m flows.ui`` on ports of its own."""

    process: subprocess.Popen[bytes]
    log: Path
    prefect: str

    def ask(self, path: str, body: Any = None) -> Any:
        """What Prefect's API answers to GET, or to POST with a body."""
        data = None if body is None else json.dumps(body).encode()
        asking = Request(f"{self.prefect}/api{path}", data, {"Content-Type": "application/json"})
        with urlopen(asking) as answer:
            return json.load(answer)


@pytest.fixture
def served(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Served]:
    directory = copied(built(tmp_path_factory), tmp_path / "tiny pipeline")
    prepare_environment(monkeypatch, directory)
    write_params(QUICK)
    write_text(Path("dvc/__main__.py"), _DVC)
    write_text(Path("dvc/__init__.py"), "")
    prefect, mlflow = free_port(), free_port()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment |= {
        "DPTUNE_PREFECT_PORT": str(prefect),
        "DPTUNE_MLFLOW_PORT": str(mlflow),
        "PREFECT_HOME": str(directory / "data" / "prefect"),
        "PREFECT_RUNNER_POLL_FREQUENCY": "1",
    }
    log = directory / "ui.log"
    with log.open("wb") as file:
        process = subprocess.Popen([sys.executable, "-m", "flows.ui"], env=environment, stdout=file, stderr=file)
    one = Served(process, log, f"http://127.0.0.1:{prefect}")
    try:
        yield one
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def wait_for_deployment(served: Served) -> Any:
    while True:  # only the test's own limit ends the wait
        assert served.process.poll() is None, served.log.read_text()
        with suppress(OSError):
            return served.ask("/deployments/name/study/study")
        time.sleep(0.5)


def submit(page: Any, served: Served, deployment: str) -> str:
    """Press the form's button. Returns the id of the run; a server whose database is busy refuses, so press again."""
    while True:
        page.get_by_role("button", name="Submit").click()
        for _ in range(60):
            if found := served.ask("/flow_runs/filter", {"deployments": {"id": {"any_": [deployment]}}}):
                return str(found[0]["id"])
            page.wait_for_timeout(500)


def wait_for_end(served: Served, run: str) -> Any:
    while True:
        assert served.process.poll() is None, served.log.read_text()
        found = served.ask(f"/flow_runs/{run}")
        if found["state_type"] in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED"):
            return found
        time.sleep(1)


def test_a_study_is_started_from_its_form_and_ends_with_a_new_report(served: Served, browser: Any) -> None:
    before = Path("params.yaml").read_bytes()
    deployment = wait_for_deployment(served)
    page = browser.new_page(viewport={"width": 1300, "height": 1250})
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{served.prefect}/deployments/deployment/{deployment['id']}/run")
    page.get_by_text("name of the experiment in MLflow").wait_for(timeout=_MILLISECONDS)
    assert page.get_by_text("Can't connect").count() == 0
    for label in ("nonprivate", "static"):
        page.get_by_text(label, exact=True).first.wait_for()
    name = page.locator("textarea").first
    assert name.input_value() == "tiny"
    assert str(BUDGET) in page.locator("input").evaluate_all("found => found.map((one) => one.value)")
    name.fill("from the form")
    keep(page, "prefect-form")
    run = submit(page, served, deployment["id"])
    ended = wait_for_end(served, run)
    assert ended["state_type"] == "COMPLETED", served.log.read_text()
    assert ended["name"] == f"from the form: nonprivate, static at epsilon {BUDGET:g}; 1 seed"
    (report,) = Path("data/reports").glob("*/report/report.html")
    assert "<title>dptune report: from the form</title>" in report.read_text()
    assert not Path("data/report/report.html").exists(), "that of the file's own values"
    assert Path("params.yaml").read_bytes() == before
    page.goto(f"{served.prefect}/runs/flow-run/{run}")
    page.get_by_text("Artifacts", exact=True).first.click(timeout=_MILLISECONDS)
    page.get_by_text("results", exact=True).first.wait_for(timeout=_MILLISECONDS)
    keep(page, "prefect-run")
    (results,) = [one for one in artifacts(served, run) if one["type"] == "markdown"]
    page.goto(f"{served.prefect}/artifacts/artifact/{results['id']}")
    page.locator("th", has_text="ε certified").first.wait_for(timeout=_MILLISECONDS)
    page.get_by_role("link", name="The report in MLflow").wait_for()
    keep(page, "prefect-results")
    assert [url for url in asked if url.startswith("http") and not url.startswith(served.prefect)] == []
    page.close()


def artifacts(served: Served, run: str) -> list[Any]:
    return list(served.ask("/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run]}}}))
