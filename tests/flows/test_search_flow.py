"""The search flow: what is published is the same for one candidate and for many, but for random digits."""

from __future__ import annotations

import logging
import os
import re
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_pipeline import ROOT, copied, prepare_environment, write_params

from dptune.core.errors import DivergedError, DptuneError
from dptune.core.files import write_text
from dptune.job.search import rehearsal
from dptune.job.search.plan import Journal, Plan
from dptune.job.search.search import working_folder
from dptune.privacy.certificate import FILE, read_certificate
from dptune.privacy.selection_law import SelectionLaw
from dptune.training.run import Run
from flows import search as module
from flows.common import runners
from flows.common.command import CellError, FlowError
from flows.common.form import changes
from flows.deployments import search_form
from flows.search import DATA_STAGES, search
from tasks.metrics import legible
from tasks.mlflow import tracking
from tasks.mlflow.tracking import NO_TIME
from tasks.paths import PUBLIC_MODEL, REPORT, SEARCH
from tasks.search import publishable as told_module
from tasks.search import request
from tasks.search.run import TRAIN_SIDE, search_records
from tasks.settings.params import load_settings, merge

pytestmark = pytest.mark.system

QUICK: dict[str, Any] = {
    "experiment": {"telemetry": "private"},
    "search": {
        "space": {"learning_rate": {"log_uniform": [0.001, 0.02]}},
        "bound": "one_shift",
        "keep_losers": True,
    },
}
FORM: dict[str, Any] = {"name": "tiny", "epsilon": 1, "candidates": 3, "shape": 2, "score": "noisy", "again": False}
_PRICES = {
    "noise_multiplier": 2.0,
    "countings": [
        {"way": way, "runs": 3, "epsilon": "1.5", "noise_multiplier": 2.0}
        for way in ("search", "single", "one_shift", "renyi", "composed", "capped")
    ],
    "curve": [["search", 1.0, 1.5], ["search", 3.0, 2.0]],
}


class Prices:
    def to_json(self) -> dict[str, Any]:
        return _PRICES


@pytest.fixture
def checkout(server: str, pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A pipeline whose DVC is a stand-in, and whose searches run in this process."""
    write_text(Path("dvc/__main__.py"), 'import pathlib, sys\npathlib.Path("asked").write_text(" ".join(sys.argv[1:]))')
    write_text(Path("dvc/__init__.py"), "")
    monkeypatch.setattr(told_module, "choice_prices", lambda certificate: Prices())

    def run(label: str, command: list[str], *_: object) -> None:
        assert (label, command[command.index("--device") + 1]) == ("search", "cpu")
        options = (command[command.index(name) + 1] for name in ("--params", "--overrides"))
        path, overrides = options
        search_records(load_settings(Path(path), yaml.safe_load(overrides)), "cpu")

    monkeypatch.setattr(module, "run_process", run)
    write_params()
    yield pipeline
    sys.modules.pop("dvc", None)


def rows(table: str) -> list[dict[str, Any]]:
    with closing(sqlite3.connect("data/mlflow.db")) as database:
        database.row_factory = sqlite3.Row
        return [dict(row) for row in database.execute(f"SELECT * FROM {table}")]


def task_runs() -> list[str]:
    """The names of all task runs of flows so far."""
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        return [one.name for one in client.read_task_runs()]


def shown() -> list[str]:
    """The pages of results on Prefect's."""
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        return [str(one.data) for one in client.read_artifacts() if one.description == "Where the search is reported"]


def published(log: str) -> dict[str, Any]:
    """Names and counts of all that a search leaves beside its working folder and its numbers."""
    working = working_folder(SEARCH / "tiny")
    files = sorted(
        path.relative_to("data").as_posix()
        for root in (SEARCH, REPORT, Path("data/mlartifacts"))
        for path in root.rglob("*")
        if not path.absolute().is_relative_to(working.absolute())
    )
    page = (REPORT / "search.html").read_text(encoding="utf-8").partition("<script")[0]
    return {
        "files": [re.sub(r"mlartifacts/[0-9a-f]{32}", "mlartifacts/RUN", name) for name in files],
        "metrics": sorted(row["key"] for row in rows("metrics")),
        "params": sorted(row["key"] for row in rows("params")),
        "tags": sorted(row["key"] for row in rows("tags")),
        "runs": sorted(row["name"] for row in rows("runs")),
        "log": [re.sub(r"[\d.]+|below|above", "N", line) for line in log.replace(str(Path.cwd()), "").splitlines()],
        "page": re.sub(r"[\d.,+-]+(e-\d+)?|below|above", "N", page),
    }


@pytest.mark.parametrize("runner", ["threads", "dask"])
def test_what_is_published_does_not_follow_the_number_of_candidates(
    runner: str, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a cluster too, for which threads stand in here."""
    from prefect.task_runners import ThreadPoolTaskRunner  # ``flows`` has to be imported before prefect

    monkeypatch.setattr(runners, "_dask", lambda *_: ThreadPoolTaskRunner())
    monkeypatch.setitem(QUICK["experiment"], "runner", runner)
    caplog.set_level(logging.INFO)
    other = copied(checkout, tmp_path / "another pipeline")
    seen, tasks = [], []
    for count, folder in ((1, checkout), (4, other)):
        prepare_environment(monkeypatch, folder)
        monkeypatch.setattr(SelectionLaw, "draw", lambda law, entropy, count=count: count)
        caplog.clear()
        made = len(task_runs())
        state = search_form(**FORM, overrides=QUICK, return_state=True)
        assert state.is_completed(), state.message
        tasks.append(len(task_runs()) - made)
        seen.append(published("\n".join(one.message for one in caplog.records if "search" in one.message)))
        assert Path("asked").read_text() == f"repro {' '.join(DATA_STAGES)}"
    assert tasks == [3, 3], "data, search and page"
    assert seen[0] == seen[1]
    assert seen[0]["runs"] == ["search", "tiny"]
    new = [page for page in shown() if str(tmp_path) in page]
    assert len([page for page in new if "the best of a secret number of candidates, 3 on average: " in page]) == 2
    assert {row["start_time"] for row in rows("runs")} == {row["end_time"] for row in rows("runs")} == {NO_TIME}
    assert {row["timestamp"] for row in rows("metrics")} == {NO_TIME}
    _no_loser_is_told(caplog.text)
    _the_page_answers()
    _run_again_nothing_is_done()
    _another_is_refused_and_leaves_nothing()


def _run_again_nothing_is_done() -> None:
    """Unless the page, a setting or the records changed."""
    same = changes("search", {**FORM, "overrides": QUICK})
    settings, page = load_settings(overrides=same), REPORT / "search.html"
    assert str(request.shown(settings, page)).startswith(
        "At certified ε = 1 for the whole search, `static` is the best of"
    )
    assert request.shown(load_settings(overrides=merge(same, {"lora": {"rank": 7}})), page) is None
    times = TRAIN_SIDE.stat()
    os.utime(TRAIN_SIDE, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    assert request.shown(settings, page) is None
    os.utime(TRAIN_SIDE, ns=(times.st_atime_ns, times.st_mtime_ns))
    weights = next(PUBLIC_MODEL.glob("*.safetensors"))
    times = weights.stat()
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    assert request.shown(settings, page) is None
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    text = page.read_text(encoding="utf-8")
    page.write_text("of another search", encoding="utf-8")
    assert request.shown(settings, page) is None
    page.write_text(text, encoding="utf-8")
    assert request.shown(settings, page)


def _another_is_refused_and_leaves_nothing() -> None:
    """Before any process is started for it."""
    state = search_form(**{**FORM, "name": "second"}, overrides=QUICK, return_state=True)
    assert str(state.message).startswith("search.again: these records paid before (once, epsilon")
    assert not (SEARCH / "second").exists()


def _no_loser_is_told(log: str) -> None:
    """Neither a name, nor a setting, nor a score, in no file and no database of what is published."""
    working = working_folder(SEARCH / "tiny")
    winner = read_certificate(SEARCH / "tiny" / "adapter" / FILE).winner
    assert winner is not None
    losers = [one for one in Plan.read(working).candidates if one.options != dict(winner.options)]
    assert len(losers) == 3
    secret = [one.name for one in losers]
    secret += [f"{one.options['learning_rate']:.12f}".strip("0")[:11] for one in losers]
    ended = Journal(working, Plan.read(working).id).outcomes
    secret += [f"{abs(ended[one.name]['score']):.12f}"[:12] for one in losers]
    kept = [
        path
        for path in Path("data").rglob("*")
        if path.is_file() and not path.absolute().is_relative_to(working.absolute())
    ]
    told = b"".join(path.read_bytes() for path in kept) + log.encode()
    assert f"{winner.options['learning_rate']:.12f}".strip("0")[:11].encode() in told, "the scan finds what is there"
    assert not [one for one in secret if one.encode() in told]


def _the_page_answers() -> None:
    page = " ".join((REPORT / "search.html").read_text(encoding="utf-8").split())
    found = read_certificate(SEARCH / "tiny" / "adapter" / FILE)
    assert "At certified ε = 1 for the whole search, <code>static</code> is the best of a secret number of" in page
    assert "0.001 to 0.02, uniform in the logarithm" in page
    assert f"{found.winner.options['learning_rate']:.4g}" in page  # type: ignore[union-attr]
    assert "dptune verify data/search/tiny/adapter/certificate.jsonl" in page
    assert "telemetry: private" in page
    assert re.search(r"nats a token (below|above) the base model&#39;s, by a score that the guarantee covers", page)
    assert "Perplexity on held-out" not in page
    assert "dptune search: tiny" in (REPORT / "index.html").read_text(encoding="utf-8")
    client = tracking.client()
    (run,) = [row for row in rows("runs") if row["name"] == "tiny"]
    shown = client.get_run(run["run_uuid"]).data
    assert shown.metrics["epsilon/certified"] == legible("epsilon_certified", found.certified)
    assert "certified ε = 1 for the whole search" in shown.tags[tracking.NOTE]


def test_a_search_that_fails_says_one_sentence(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(label: str, command: list[str], *_: object) -> None:
        raise CellError(label, 2, "error: search.again: these records paid before. Fix: accept it.")

    monkeypatch.setattr(module, "run_process", refused)
    state = search_form(**FORM, overrides=QUICK, return_state=True)
    assert state.is_failed()
    assert state.message == "the search has not ended: search.again: these records paid before. Fix: accept it."
    for overrides, named in (({"data": {"unit": "patient"}}, "overrides.data"), ({"lora": {"rank": 0}}, "lora.rank")):
        state = search_form(**FORM, overrides=overrides, return_state=True)
        assert named in str(state.message)
    assert not (REPORT / "search.html").exists()


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (
            CellError("search", 2, "error: data.unit: is unknown. Fix: name one."),
            "data.unit: is unknown. Fix: name one.",
        ),
        (DptuneError("experiment.runner: no folder. Fix: share it."), "experiment.runner: no folder. Fix: share it."),
    ],
)
def test_a_search_that_fails_on_a_worker_says_why(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, cause: str
) -> None:
    from prefect.task_runners import ThreadPoolTaskRunner

    def refused(*_: object) -> None:
        raise error

    monkeypatch.setattr(runners, "_dask", lambda *_: ThreadPoolTaskRunner())
    monkeypatch.setattr(module, "run_process", refused)
    with pytest.raises(FlowError, match="the search has not ended") as caught:
        search(overrides=merge(QUICK, {"experiment": {"runner": "dask"}}))
    assert caught.value.cause == cause


@pytest.mark.parametrize(
    ("score", "why"),
    [
        ("noisy", "every candidate failed"),
        ("rehearsal", "the private run diverged at the settings that were rehearsed on public records"),
    ],
)
def test_a_search_that_released_nothing_has_a_page_and_ends_with_its_sentence(
    score: str, why: str, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(run: Any) -> None:
        raise DivergedError("the run diverged.")

    monkeypatch.setattr(Run, "end", fail)
    monkeypatch.setattr(rehearsal, "trial", lambda *_: 3.0)
    state = search_form(**{**FORM, "score": score}, overrides=QUICK, return_state=True)
    assert state.is_failed()
    said = f"nothing was released, and the budget is spent: {why}, so the base model is the result; "
    assert str(state.message).startswith(said + "the page is data/report/search.html. Fix: lower the learning rates")
    assert "nothing was released" in (REPORT / "search.html").read_text(encoding="utf-8")
    (run,) = [row for row in rows("runs") if row["name"] == "tiny"]
    assert tracking.client().get_run(run["run_uuid"]).data.metrics.keys() == {"epsilon/certified"}
    same = load_settings(overrides=changes("search", {**FORM, "score": score, "overrides": QUICK}))
    assert request.shown(same, REPORT / "search.html") is None, "run again, it fails again"


def test_dvc_makes_all_that_a_search_reads() -> None:
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
    made = {out if isinstance(out, str) else next(iter(out)) for name in DATA_STAGES for out in stages[name]["outs"]}
    assert made == {"data/splits", "data/validation", "data/models"}
    assert not [name for name, stage in stages.items() if "flows.search" in stage["cmd"]], "its lock would tell"
    assert search.name == "search"
