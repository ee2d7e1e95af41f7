"""MLflow's pages in a real browser: a printed link shows perplexities, epsilons and charts of exactly the last cells.

DPTUNE_SCREENSHOTS=FOLDER keeps a picture of each page.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tiny_pipeline import BUDGET, built, cells, copied, prepare_environment

from flows.server import listens, new_password
from tasks.experiment import cell_training
from tasks.experiment.finetune import run_cells
from tasks.metrics import legible
from tasks.mlflow import tracking
from tasks.mlflow.experiments import PageLinks
from tasks.mlflow.page import run_ids, show
from tasks.report.answer import headline

pytestmark = [pytest.mark.browser, pytest.mark.system]

#: User and password.
OWNER = new_password().split(":")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTIONS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
#: What MLflow's pages say in the console whatever they show: nobody is logged in, and a chart was drawn too early.
MLFLOWS_OWN = re.compile(r"/mlflow/users/current$|ResizeObserver loop completed")
_MILLISECONDS = 60_000


@dataclass
class Served:
    """An MLflow server with an experiment of two cells.

    Attributes:
        links: the printed links.
        runs: names of the cells' runs, by their ids.
        results: contents of their result.json.
    """

    parent: str
    links: PageLinks
    runs: dict[str, str]
    results: list[dict[str, Any]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = copied(built(tmp_path_factory), tmp_path_factory.mktemp("browser") / "tiny pipeline")
    port = free_port()
    with pytest.MonkeyPatch.context() as patch:
        prepare_environment(patch, directory)
        patch.setenv("DPTUNE_MLFLOW_PORT", str(port))
        patch.setattr(cell_training, "draw_curves", lambda _, path: path.write_bytes(b"picture"))
        parent, chosen = tracking.parent_run("tiny", {}), cells()
        run_cells(chosen, "cpu", parent)
        results = [json.loads((cell.directory / "result.json").read_text()) for cell in chosen]
        found = headline(results)
        tracking.add_to_run(parent, found.metrics, None, {**found.tags, tracking.NOTE: found.sentence})
        ids = run_ids(cell.directory for cell in chosen)
        for run in ids:
            tracking.client().set_tag(run, "epsilon audited", "≥ 0")
        links = show(parent, ids, "research", found.sentence)
        assert links is not None
        names = {run: tracking.client().get_run(run).info.run_name for run in ids}
        server = start_server(port)
        try:
            yield Served(parent, links, names, results)
        finally:
            server.terminate()
            server.wait()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def start_server(port: int) -> subprocess.Popen[bytes]:
    """MLflow's server as `make ui` starts it."""
    where = ["--host", "127.0.0.1", "--port", str(port)]
    command = [sys.executable, "-m", "uvicorn", "--factory", "flows.server:mlflow_app", *where]
    names = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"} | dict(zip(names, OWNER, strict=True))
    server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while server.poll() is None:  # only the test's own limit ends the wait
        if listens(server.pid, port):
            return server
        time.sleep(0.5)
    raise AssertionError("the server ended")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A browser; the test is skipped without one."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no Chromium on the path")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield browser
        browser.close()


@dataclass
class Visit:
    """A page that was opened in a browser that was never there before.

    Attributes:
        errors: what its console calls an error, MLflow's own left out.
    """

    page: Any
    errors: list[str] = field(default_factory=list)

    def see(self, *texts: str, exact: bool = False) -> None:
        """Wait until each text is seen.

        Args:
            exact: as the whole text of something.
        """
        for text in texts:
            self.page.get_by_text(text, exact=exact).first.wait_for(timeout=_MILLISECONDS)

    def close_assistant(self) -> None:
        """Close MLflow's assistant, which opens by itself on a first visit and hides a quarter of the page."""
        with suppress(Exception):
            self.page.get_by_role("button", name="Close").first.click(timeout=2000)

    def picture(self, name: str) -> None:
        """Keep a picture, if that is asked for."""
        if folder := os.environ.get("DPTUNE_SCREENSHOTS"):
            self.close_assistant()
            self.page.wait_for_timeout(1500)
            self.page.screenshot(path=Path(folder) / name)


@pytest.fixture
def visit(chromium: Any) -> Iterator[Visit]:
    credentials = dict(zip(("username", "password"), OWNER, strict=True))
    context = chromium.new_context(viewport={"width": 1300, "height": 900}, http_credentials=credentials)
    page = context.new_page()
    one = Visit(page)

    def note(message: Any) -> None:
        said = f"{message.text} {(message.location or {}).get('url', '')}"
        if message.type == "error" and not MLFLOWS_OWN.search(said):
            one.errors.append(said)

    page.on("console", note)
    page.on("pageerror", lambda error: MLFLOWS_OWN.search(str(error)) or one.errors.append(str(error)))
    yield one
    context.close()


def shown(result: dict[str, Any]) -> str:
    """A cell's perplexity as its page shows it: 454.4896 is 454.49 there, so that a cut would look for 454.48."""
    return f"{legible('eval_perplexity', result['after']['eval_perplexity']):.6g}"


def test_the_printed_link_shows_perplexities_and_four_epsilons_without_a_click(served: Served, visit: Visit) -> None:
    visit.page.goto(served.links.table)
    visit.see(*served.runs.values(), *(shown(result) for result in served.results))
    visit.see("epsilon published", "epsilon noise_only", "epsilon certified", "∞", f"{BUDGET:g}", exact=True)
    visit.see("2 matching runs")
    visit.close_assistant()
    last = visit.page.get_by_text("epsilon audited", exact=True).first.bounding_box()
    assert last["x"] + last["width"] <= 1300 - 30, "all four epsilons in a laptop's window, its page's margin left out"
    visit.picture("mlflow-table.png")
    assert visit.errors == []


def test_the_second_link_opens_the_charts(served: Served, visit: Visit) -> None:
    visit.page.goto(served.links.charts)
    visit.see("Utility (lower is better)", "epsilon/certified vs. perplexity/eval")
    for name in ("perplexity/eval", "epsilon/published", "epsilon/certified"):
        card = visit.page.locator("[data-testid='experiment-view-compare-runs-card']").filter(has_text=name).first
        card.locator("svg.main-svg").first.wait_for(timeout=_MILLISECONDS)
    visit.picture("mlflow-charts.png")
    assert visit.errors == []


def test_the_experiments_plain_page_opens_with_the_answer_and_leads_to_the_charts(served: Served, visit: Visit) -> None:
    visit.page.goto(served.links.table.partition("?")[0] + "?workflowType=machine_learning")
    static = next(result for result in served.results if result["mechanism"] == "static")
    visit.see("At certified ε", f"{static['after']['eval_perplexity']:.4g}")
    with visit.page.context.expect_page() as opened:  # MLflow opens links of a description in a new tab
        visit.page.locator('a[href*="compareRunsMode=CHART"]').first.evaluate("link => link.click()")
    Visit(opened.value).see("Utility (lower is better)")
    assert visit.errors == []


def test_a_later_run_of_one_cell_leaves_that_cell_alone(served: Served, visit: Visit) -> None:
    (first, kept), (_, gone) = served.runs.items()
    try:
        links = show(served.parent, [first], "research")
        assert links == served.links
        visit.page.goto(served.links.table)
        visit.see(kept, "1 matching run")
        assert visit.page.get_by_text(gone).count() == 0
    finally:
        show(served.parent, served.runs, "research")


def test_a_cells_page_says_its_guarantee_and_names_its_data_and_its_model(served: Served, visit: Visit) -> None:
    run = next(run for run, name in served.runs.items() if name.startswith("static"))
    visit.page.goto(f"{served.links.table.partition('/runs?')[0]}/runs/{run}?workflowType=machine_learning")
    visit.see("The guarantee covers the adapter", "SYNTHETIC private cohort", "mlflow.pyfunc.load_model")
    visit.see("Logged models (1)")
    visit.picture("mlflow-cell.png")
    assert visit.errors == []
