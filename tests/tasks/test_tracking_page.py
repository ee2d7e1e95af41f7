"""MLflow's page of an experiment: a link shows the last run's cells, and the description says how to read them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from mlflow import MlflowClient

from tasks.charts.looks import run_colours
from tasks.metrics import tool_name
from tasks.mlflow import tracking
from tasks.mlflow.cell_run import main_names
from tasks.mlflow.experiments import CERTIFIED, CLAIMS, VIEW, VIEWS, remembered
from tasks.mlflow.page import LAST_RUN, PLACE, run_ids, show

VIEW_TAG = "mlflow.sharedViewState."


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty database of MLflow's, which takes seconds to make."""
    file = tmp_path_factory.mktemp("database") / "mlflow.db"
    MlflowClient(f"sqlite:///{file}").search_experiments()
    return file


@pytest.fixture
def parent(database: Path, empty: Path) -> str:
    """The run of an experiment without cells."""
    Path("data").mkdir()
    shutil.copyfile(database, Path("data") / "mlflow.db")
    return tracking.parent_run("tiny", {})


def cell(parent: str, name: str, **params: str) -> str:
    run = tracking.ChildRun(parent, name, Path(name), params, {})
    assert run.end()
    return run.run_id


def tags(parent: str) -> dict[str, str]:
    client = tracking.client()
    return dict(client.get_experiment(client.get_run(parent).info.experiment_id).tags)


def state(parent: str, view: str = VIEW) -> dict[str, Any]:
    """A saved view as MLflow's user interface parses it."""
    envelope = json.loads(tags(parent)[VIEW_TAG + view])
    assert isinstance(envelope["name"], str)
    assert isinstance(envelope["createdAt"], int)
    return dict(json.loads(envelope["state"]))


def found(parent: str, view: str = VIEW) -> list[str]:
    """The runs that the view's own filter finds, in its order."""
    client, shown = tracking.client(), state(parent, view)
    assert shown["orderByAsc"]
    runs = client.search_runs(
        [client.get_run(parent).info.experiment_id], shown["searchFilter"], order_by=[shown["orderByKey"]]
    )
    return [str(run.info.run_name) for run in runs]


def test_the_view_shows_exactly_the_cells_of_the_last_run(parent: str) -> None:
    one, two, three = (cell(parent, name) for name in ("one", "two", "three"))
    show(parent, [one, two], "research")
    assert set(found(parent)) == {"one", "two"}
    show(parent, [two, three], "research")
    assert set(found(parent)) == {"two", "three"}, "neither the parent nor a cell that the last run had not"


def test_more_cells_than_a_page_of_a_search_lose_their_mark(parent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = MlflowClient.search_runs
    runs = [cell(parent, f"cell {number}") for number in range(3)]
    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "search_runs", lambda *a, **k: real(*a, **{"max_results": 1, **k}))
        show(parent, runs, "research")
        show(parent, runs[:1], "research")
    client = tracking.client()
    assert [run for run in runs if LAST_RUN in client.get_run(run).data.tags] == runs[:1]


def test_every_mechanism_has_a_colour_of_its_own_and_its_cells_share_it(parent: str) -> None:
    """MLflow took one colour for training without privacy and for plain DP-SGD: it hashes the run's id."""
    mechanisms = ["static", "static", "banded", "nonprivate", "own"]
    runs = [cell(parent, f"cell {place}", mechanism=name) for place, name in enumerate(mechanisms)]
    show(parent, [*runs, cell(parent, "of another program")], "research")
    client = tracking.client()
    colours = [client.get_run(run).data.tags["mlflow.runColor"] for run in runs]
    assert dict(zip(mechanisms, colours, strict=True)) == run_colours(mechanisms)
    assert len(set(colours)) == 4


def test_a_laptops_window_shows_the_columns_up_to_the_four_epsilons(parent: str) -> None:
    """Of a window's 1,300 pixels MLflow's own navigation, marks and the age of a run leave 837."""
    show(parent, [], "research")
    widths = [state(parent)["columnWidths"][column] for column in state(parent)["selectedColumns"]]
    assert state(parent)["selectedColumns"][5] == "tags.`epsilon audited`"
    assert sum(widths[:6]) <= 837


def measured(parent: str, name: str, mechanism: str, **figures: float) -> str:
    run = tracking.ChildRun(parent, name, Path(name), {"mechanism": mechanism}, {})
    run.log(1, figures)
    assert run.end()
    return run.run_id


def test_cells_with_a_certified_epsilon_come_first_and_one_view_has_no_others(parent: str) -> None:
    """Calibration leaves two cells of one budget at 1.9998 and 2, and MLflow keeps infinity as its largest number."""
    runs = [
        measured(parent, "none", "nonprivate", eval_perplexity=2.0),
        measured(parent, "inf", "rldp_published", eval_perplexity=3.0, epsilon_certified=float("inf")),
        measured(parent, "eight", "static", eval_perplexity=4.0, epsilon_certified=8.0),
        measured(parent, "worse", "static", eval_perplexity=6.0, epsilon_certified=1.9998),
        measured(parent, "better", "quantile", eval_perplexity=5.0, epsilon_certified=2.0),
    ]
    show(parent, runs, "research")
    assert found(parent) == found(parent, CLAIMS) == ["better", "worse", "eight", "none", "inf"]
    assert found(parent, CERTIFIED) == ["better", "worse", "eight"]
    show(parent, runs[-2:], "research")
    assert [tracking.client().get_run(run).data.tags[PLACE] for run in runs[-2:]] == ["0002", "0001"]


def test_runs_of_earlier_versions_are_compared_under_todays_names(parent: str) -> None:
    client = tracking.client()
    old = cell(parent, "old", mechanism="static")
    for step, value in enumerate((7.0, 5.0)):
        client.log_metric(old, "eval_perplexity", value, timestamp=step + 1, step=step)
    client.log_metric(old, "epsilon_certified", 2.0)
    new = measured(parent, "new", "quantile", eval_perplexity=6.0, epsilon_certified=2.0)
    for _ in range(2):
        show(parent, [old, new], "research")
        history = [(one.timestamp, one.step, one.value) for one in client.get_metric_history(old, "perplexity/eval")]
        assert history == [(1, 0, 7.0), (2, 1, 5.0)]
    assert found(parent, CERTIFIED) == ["old", "new"]
    assert set(client.get_run(new).data.metrics) == {"perplexity/eval", "epsilon/certified"}


def test_every_figure_has_a_name_and_a_section_of_its_own() -> None:
    names = [tool_name(name) for name in main_names()]
    assert len(set(names)) == len(names)
    assert {name.partition("/")[0] for name in names} == {"perplexity", "epsilon", "audit", "training"}
    assert [tool_name(name) for name in names] == names, "a name that was given is not changed again"
    assert tool_name("sampled_perplexity_pooled") == "perplexity/sampled_pooled"
    assert tool_name("public_perplexity.before") == "perplexity/public.before"
    assert tool_name("mean_return") == "mean_return"


def test_the_links_name_the_view(parent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    links = show(parent, [], "research")
    assert links is not None
    number = tracking.client().get_run(parent).info.experiment_id
    charts = ["CHART"]
    for link, view, mode in (
        (links.table, VIEW, None),
        (links.charts, VIEW, charts),
        (links.certified, CERTIFIED, None),
        (links.claims, CLAIMS, charts),
    ):
        address = urlsplit(urlsplit(link).fragment)
        assert address.path == f"/experiments/{number}/runs"
        asked = parse_qs(address.query)
        assert asked.pop("compareRunsMode", None) == mode
        assert asked == {"workflowType": ["machine_learning"], "viewStateShareKey": [view]}
        assert f"({urlsplit(link)._replace(scheme='', netloc='', path='').geturl()})" in tags(parent)[tracking.NOTE]
    assert links.table.startswith("http://127.0.0.1:5000/#/")
    assert remembered() == links
    monkeypatch.setenv("DPTUNE_MLFLOW_PORT", "5999")
    again = remembered()
    assert again is not None
    assert again.charts == links.charts.replace(":5000/", ":5999/")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://mlflow.example.org/")
    elsewhere = remembered()
    assert elsewhere is not None
    assert elsewhere.table == links.table.replace("http://127.0.0.1:5000", "https://mlflow.example.org")


@pytest.mark.parametrize("telemetry", ["research", "private"])
@pytest.mark.parametrize("name", VIEWS)
def test_columns_and_charts_are_of_figures_that_cells_have(parent: str, telemetry: str, name: str) -> None:
    show(parent, [], telemetry)
    view = state(parent, name)
    names = [name for chart in view["compareRunCharts"] for name in names_of(chart)]
    names += [
        column.removeprefix("metrics.`")[:-1] for column in view["selectedColumns"] if column.startswith("metrics.")
    ]
    assert set(names) <= set(map(tool_name, main_names()))
    assert {"epsilon/published", "epsilon/noise_only", "epsilon/certified", "epsilon/audited"} <= set(names)
    held_out = {"perplexity/eval", "perplexity/eval_sample", "audit/membership_calibrated_auc"}
    assert bool(held_out & set(names)) == (telemetry == "research")
    sections = {section["uuid"] for section in view["compareRunSections"]}
    assert {chart["metricSectionId"] for chart in view["compareRunCharts"]} == sections


def names_of(chart: dict[str, Any]) -> list[str]:
    axes = [chart[axis]["key"] for axis in ("xaxis", "yaxis") if axis in chart]
    return axes or [chart["metricKey"]]


def test_the_description_opens_with_the_answer_until_other_cells_are_there(parent: str) -> None:
    runs = [cell(parent, "one")]
    show(parent, runs, "research", "`static` is best.")
    assert tags(parent)[tracking.NOTE].startswith("`static` is best.\n\n## How to read")
    show(parent, runs, "research")
    assert tags(parent)[tracking.NOTE].startswith("`static` is best.\n\n")
    show(parent, [cell(parent, "two")], "private")
    assert "is best" not in tags(parent)[tracking.NOTE], "an answer of research telemetry, say"
    assert tags(parent)[tracking.NOTE].startswith("The last run's cells are not reported yet")


def test_what_a_user_wrote_stays(parent: str) -> None:
    client = tracking.client()
    number = client.get_run(parent).info.experiment_id
    client.set_experiment_tag(number, tracking.NOTE, "My notes.")
    show(parent, [], "research", "an answer")
    assert tags(parent)[tracking.NOTE] == "My notes."
    assert VIEW_TAG + VIEW in tags(parent)


def test_the_page_holds_no_time(parent: str) -> None:
    show(parent, [cell(parent, "one")], "private", "an answer")
    view = json.loads(tags(parent)[VIEW_TAG + VIEW])
    assert view["createdAt"] == view["updatedAt"] == tracking.NO_TIME
    before = tracking.client().get_experiment(tracking.client().get_run(parent).info.experiment_id)
    show(parent, [], "private", "another answer")
    after = tracking.client().get_experiment(before.experiment_id)
    assert (after.last_update_time, after.creation_time) == (before.last_update_time, before.creation_time)


def test_a_page_that_cannot_be_shown_stops_nothing(
    parent: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert show(tracking.LATER, [], "research") is None

    def locked(*_: Any, **__: Any) -> None:
        raise tracking.MlflowException("(sqlite3.OperationalError) database is locked")

    monkeypatch.setattr(MlflowClient, "set_experiment_tag", locked)
    assert show(parent, [], "research") is None
    assert "database is locked" in caplog.text


def test_a_run_that_the_server_does_not_know_is_passed_over(parent: str) -> None:
    known = cell(parent, "one")
    assert show(parent, ["0" * 32, known], "research")
    assert found(parent) == ["one"]


def test_cells_without_a_run_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "mlflow_run").write_text("abc\n")
    assert run_ids([tmp_path / "one", tmp_path / "two"]) == ["abc"]
