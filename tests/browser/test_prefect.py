"""Prefect's pages in a real browser: a study is started from its form, or put on a schedule, and its run's page shows
what came of it.

DPTUNE_SCREENSHOTS=FOLDER keeps a picture of the form, of the schedule, and of each finished run's page.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from tiny_pipeline import BUDGET, QUICK_AUDIT, built, copied, prepare_environment, write_params

from dptune.core.files import write_text
from tasks.paths import REPORT, RUNS
from tests.browser.screenshots import keep
from tests.flows.running_ui import RunningUi, without_dvc

pytestmark = [pytest.mark.browser, pytest.mark.system, pytest.mark.timeout(1800)]
QUICK = {"experiment": {"cells_together": 2}, "training": {"max_length": 400}, "audit": QUICK_AUDIT}
_MILLISECONDS = 120_000


@pytest.fixture
def served(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RunningUi]:
    directory = copied(built(tmp_path_factory), tmp_path / "tiny pipeline")
    prepare_environment(monkeypatch, directory)
    write_params(QUICK)
    without_dvc()
    one = RunningUi(directory)
    try:
        yield one
        one.stop()
    finally:
        one.end()


def sign_in(page: Any, served: RunningUi) -> None:
    """Type the password, as the owner does; on this page nothing needs more than a busy machine's minutes."""
    page.set_default_timeout(_MILLISECONDS)
    page.goto(served.prefect)
    page.locator("input[type=password]").fill(served.password, timeout=_MILLISECONDS)
    page.get_by_role("button", name="Login").click()
    page.get_by_text("Deployments", exact=True).first.wait_for(timeout=_MILLISECONDS)


def submit(page: Any, served: RunningUi, deployment: Any) -> str:
    """Press the form's button. Returns the id of the run; a server whose database is busy refuses, so press again."""
    while True:
        page.get_by_role("button", name="Submit").click()
        for _ in range(60):
            if found := served.runs(deployment):
                return str(found[0]["id"])
            page.wait_for_timeout(500)


def schedule_each_minute(page: Any, served: RunningUi, deployment: Any) -> None:
    """Give a deployment a cron in its page's form; a server whose database is busy refuses, so fill it in again."""
    while not served.ask(f"/deployments/{deployment['id']}")["schedules"]:
        page.goto(f"{served.prefect}/deployments/deployment/{deployment['id']}")
        page.get_by_role("button", name="Schedule").first.click(timeout=_MILLISECONDS)
        card = page.get_by_role("dialog")
        card.get_by_role("button", name="Cron", exact=True).click()
        card.locator("form input[type=text]").first.fill("* * * * *")
        card.get_by_text("Every minute every day").wait_for()
        keep(page, "prefect-schedule")
        card.get_by_role("button", name="Save").click()
        for _ in range(60):
            if served.ask(f"/deployments/{deployment['id']}")["schedules"]:
                return
            page.wait_for_timeout(500)


def open_results(page: Any, served: RunningUi, run: Any, key: str) -> None:
    """Open a finished run's page and then, by its artifacts, the table of results."""
    page.goto(f"{served.prefect}/runs/flow-run/{run['id']}")
    page.get_by_text("Artifacts", exact=True).first.click(timeout=_MILLISECONDS)
    page.get_by_text(key, exact=True).first.wait_for(timeout=_MILLISECONDS)
    keep(page, "prefect-run")
    found = served.ask("/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run["id"]]}}})
    (results,) = [one for one in found if one["type"] == "markdown"]
    page.goto(f"{served.prefect}/artifacts/artifact/{results['id']}")
    page.locator("th", has_text="ε certified").first.wait_for(timeout=_MILLISECONDS)
    page.get_by_role("link", name="The report in MLflow").wait_for()
    keep(page, "prefect-results")


def test_a_cron_from_the_page_runs_the_study_and_leaves_a_new_report(served: RunningUi, browser: Any) -> None:
    deployment = served.deployment("study")
    page = browser.new_page(viewport={"width": 1300, "height": 1250})
    sign_in(page, served)
    write_text(REPORT / "report.html", "of yesterday")
    schedule_each_minute(page, served, deployment)
    ended = served.scheduled_run(deployment)
    assert ended["state_type"] == "COMPLETED", served.log.read_text()
    assert "<title>dptune report: tiny</title>" in (REPORT / "report.html").read_text()
    (made,) = served.ask(f"/deployments/{deployment['id']}")["schedules"]
    assert ended["created_by"]["id"] == made["id"], "by this schedule"
    page.goto(f"{served.prefect}/deployments/deployment/{deployment['id']}")
    page.get_by_text("Every minute every day").wait_for(timeout=_MILLISECONDS)
    page.get_by_text(ended["name"]).first.wait_for(timeout=_MILLISECONDS)
    keep(page, "prefect-scheduled")
    open_results(page, served, ended, "results-tiny")
    page.close()


def test_a_run_waits_for_resume_and_shows_the_price_first(served: RunningUi, browser: Any) -> None:
    deployment = served.deployment("experiment")
    page = browser.new_page(viewport={"width": 1300, "height": 900})
    sign_in(page, served)
    asked = {"parameters": {"ask_first": True}}
    run = str(served.ask(f"/deployments/{deployment['id']}/create_flow_run", asked)["id"])
    served.wait_for(lambda: served.ask(f"/flow_runs/{run}")["state_type"] == "PAUSED")
    page.goto(f"{served.prefect}/runs/flow-run/{run}")
    page.get_by_role("button", name="Resume").click()
    card = page.get_by_role("dialog")
    card.get_by_text(f"spends at most epsilon {BUDGET:g}").wait_for()
    assert not list(Path("data/runs").glob("*/ledger.jsonl")), "before anybody approved it"
    card.get_by_role("button", name="Submit").click()
    assert served.ended(run)["state_type"] == "COMPLETED", served.log.read_text()
    page.close()


def test_cancel_on_a_runs_page_ends_it_with_a_checkpoint_and_a_waiting_one_with_nothing_spent(
    served: RunningUi, browser: Any
) -> None:
    """The run's 3000 epochs would take hours."""
    deployment = served.deployment("experiment")
    page = browser.new_page(viewport={"width": 1300, "height": 900})
    sign_in(page, served)
    for waits in (True, False):
        asked = {"parameters": {"ask_first": waits, "epochs": 3000.0, "mechanisms": ["static"]}}
        run = str(served.ask(f"/deployments/{deployment['id']}/create_flow_run", asked)["id"])
        if waits:
            served.wait_for(lambda run=run: served.ask(f"/flow_runs/{run}")["state_type"] == "PAUSED")
        else:
            served.wait_for(lambda: any('"release"' in one.read_text() for one in RUNS.glob("*/ledger.jsonl")))
        page.goto(f"{served.prefect}/runs/flow-run/{run}")
        page.get_by_role("button", name="Cancel").click()
        page.get_by_role("dialog").get_by_role("button", name="Confirm").click()
        assert served.ended(run)["state_type"] == "CANCELLED", served.log.read_text()
        page.get_by_text("Cancelled", exact=True).first.wait_for()
        assert len(list(RUNS.glob("*/ledger.jsonl"))) == (not waits)
    assert len(list(RUNS.glob("*/checkpoint.safetensors"))) == 1
    page.close()


def test_suspend_resume_cancel_and_retry_on_a_runs_page_end_its_cell_and_let_it_go_on(
    served: RunningUi, browser: Any
) -> None:
    """Prefect itself ends nothing when a run is suspended, and takes a suspended one for a run without a process."""
    deployment = served.deployment("experiment")
    page = browser.new_page(viewport={"width": 1300, "height": 900})
    sign_in(page, served)
    asked = {"parameters": {"epochs": 3000.0, "mechanisms": ["static"]}}
    run = str(served.ask(f"/deployments/{deployment['id']}/create_flow_run", asked)["id"])

    def press(button: str, answer: str) -> None:
        page.goto(f"{served.prefect}/runs/flow-run/{run}")
        page.get_by_role("button", name=button, exact=True).click()
        page.get_by_role("dialog").get_by_role("button", name=answer, exact=True).click()

    def goes_on(before: int) -> bool:
        return releases() > before and bool(served.ask(f"/flow_runs/{run}")["state_type"] == "RUNNING")

    served.wait_for(lambda: goes_on(0))
    for button, answer, state, again in (
        ("Suspend", "Submit", "PAUSED", "Resume"),
        ("Cancel", "Confirm", "CANCELLED", "Retry"),
    ):
        press(button, answer)
        served.wait_for(lambda state=state: served.ask(f"/flow_runs/{run}")["state_type"] == state)
        served.wait_for(lambda: not cells_under_way(served))
        stopped = releases()
        assert len(list(RUNS.glob("*/checkpoint.safetensors"))) == 1
        assert served.ask(f"/flow_runs/{run}")["state_type"] == state, served.log.read_text()
        press(again, "Submit" if again == "Resume" else again)
        served.wait_for(lambda stopped=stopped: goes_on(stopped))
    press("Suspend", "Submit")
    served.wait_for(lambda: not cells_under_way(served))
    press("Cancel", "Confirm")
    assert served.ended(run)["state_type"] == "CANCELLED", served.log.read_text()
    assert len(list(RUNS.glob("*"))) == 1, "one cell, which went on"
    page.close()


def releases() -> int:
    """How many releases all cells made."""
    return sum(one.read_text().count('"release"') for one in RUNS.glob("*/ledger.jsonl"))


def cells_under_way(served: RunningUi) -> bool:
    """Whether a process of a cell runs."""
    found = psutil.Process(served.process.pid).children(recursive=True)
    with suppress(psutil.Error):
        return any("tasks.experiment.finetune" in one.cmdline() for one in found)
    return True  # one ended meanwhile: look again


def test_later_in_the_form_begins_nothing_before_its_time(served: RunningUi, browser: Any) -> None:
    deployment = served.deployment("experiment")
    page = browser.new_page(viewport={"width": 1300, "height": 1250})
    sign_in(page, served)
    page.goto(f"{served.prefect}/deployments/deployment/{deployment['id']}/run")
    page.get_by_role("button", name="Later", exact=True).click(timeout=_MILLISECONDS)
    page.get_by_text("Select date and time").click()
    page.locator("input[type=date]").fill((date.today() + timedelta(days=2)).isoformat())
    page.locator("input[type=time]").fill("02:00")
    page.get_by_role("button", name="Apply", exact=True).click()
    run = served.ask(f"/flow_runs/{submit(page, served, deployment)}")
    assert datetime.fromisoformat(run["expected_start_time"]) > datetime.now(UTC) + timedelta(hours=12)
    page.wait_for_timeout(10_000)  # the deployments' server looks for runs every second
    run = served.ask(f"/flow_runs/{run['id']}")
    assert (run["state_type"], run["start_time"]) == ("SCHEDULED", None)
    page.close()


@pytest.mark.slow
def test_a_study_is_started_from_its_form_and_ends_with_a_new_report(served: RunningUi, browser: Any) -> None:
    before = Path("params.yaml").read_bytes()
    deployment = served.deployment("study")
    page = browser.new_page(viewport={"width": 1300, "height": 1250})
    sign_in(page, served)
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
    ended = served.ended(submit(page, served, deployment))
    assert ended["state_type"] == "COMPLETED", served.log.read_text()
    assert ended["name"] == f"from the form: nonprivate, static at epsilon {BUDGET:g}; 1 seed"
    (report,) = Path("data/reports").glob("*/report/report.html")
    assert "<title>dptune report: from the form</title>" in report.read_text()
    assert not Path("data/report/report.html").exists(), "that of the file's own values"
    assert Path("params.yaml").read_bytes() == before
    open_results(page, served, ended, "results-from-the-form")
    assert [url for url in asked if url.startswith("http") and not url.startswith(served.prefect)] == []
    page.close()
