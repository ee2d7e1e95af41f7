"""Private telemetry, from the first cell to the last page: what is published holds no time of a run and no figure of a
record."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
import torch
from tiny_pipeline import (
    built,
    copied,
    figures,
    merge,
    prepare_environment,
    quick_pictures,
    read_json,
    static,
    write_params,
)
from work_here import work_of

from dptune.audit.text.likelihood import ending_losses
from dptune.core.errors import ConfigError
from dptune.privacy.ledger_file import read_ledger
from dptune.records.parquet_file import read_records
from dptune.training.evaluation import perplexity
from flows import experiment as experiment_flow
from flows.audit import audit
from flows.common import processes
from flows.experiment import experiment
from flows.policy import policy_of
from flows.prediction import prediction
from tasks.audit import attacks as audit_task
from tasks.audit.target import load_target
from tasks.experiment import cell_training
from tasks.experiment.cells import Cell
from tasks.experiment.finetune import run_cell, run_cells
from tasks.experiment.preparation import corpus_of
from tasks.mlflow import tracking
from tasks.mlflow.tracking import NO_TIME
from tasks.paths import AUDITS, EVAL, EXPERIMENT, PREDICTION, REPORT, RUNS, SPLITS
from tasks.report.experiment import report
from tasks.settings.params import load_settings

pytestmark = [pytest.mark.system, pytest.mark.road]

PRIVATE = {
    "training": {"max_length": 400, "epochs": 0.15},
    "experiment": {
        "telemetry": "private",
        "mechanisms": ["static", "quantile"],
        "cells_together": 2,
        "cells_per_device": 1,
    },
    "audit": {"generations": 20, "candidates": 3, "records": 12, "step_trials": 0, "shadows": 4},
    "prediction": {
        "models": [2],
        "tokens": [16],
        "records": 2,
        "tuning": {"epochs": 1, "batch_size": 8, "learning_rate": 0.005, "seed": 0},
        "serve": {"epsilon": 8, "tokens": 16, "models": 2, "public_weight": 0.2, "unit": "record"},
    },
}
DATABASE = Path("data/mlflow.db")
#: All that MLflow may hold of it, and tables of cells.
LOGGED = re.compile(
    r"epsilon/(published|noise_only|certified|audited)|training/(radius|learning_rate|noise_multiplier|gradient_norm)"
    r"|perplexity/(public|dp_sgd|untuned)"
    r"|audit/(one_run|extraction|exposure|sampling|canaries_(likelihood|calibrated))_[\w.]+"
)
METRICS = re.compile(
    r"epsilon_(published|noise_only|certified|audited)|radius|learning_rate|noise_multiplier|gradient_norm"
    r"|public_perplexity|audit_(one_run|extraction|exposure|sampling|canaries)_[\w.]+"
)
#: What tables of single steps may hold besides.
STEPS = re.compile(r"step|radius_\d+|unclipped_estimate_\d+")


@dataclass
class Published:
    """What the whole pipeline left, and what it said on the way."""

    directory: Path
    output: str
    experiments: list[list[tuple[Any, ...]]]


def in_this_process(patch: pytest.MonkeyPatch, seen: list[list[tuple[Any, ...]]]) -> None:
    """Let the flows do the work of their processes themselves."""

    def cells(_label: str, command: list[str], *_: Any) -> None:
        seen.append(rows("experiments"))
        files = [Path(word) for word in command if word.endswith("cell.json")]
        parent, flow_run = (command[command.index(name) + 1] for name in ("--parent", "--flow-run"))
        run_cells([Cell.model_validate_json(file.read_text()) for file in files], "cpu", parent, flow_run)

    patch.setattr(experiment_flow, "run_process", cells)
    patch.setattr(processes, "run_process", lambda _label, command, **_: work_of(command))
    patch.setattr(experiment_flow, "sys", SimpleNamespace(stderr=StringIO(), executable=sys.executable))


@pytest.fixture(scope="module")
def published(server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Published]:
    """Experiment, audit, report and prediction, as their stages run them."""
    directory = copied(built(tmp_path_factory), tmp_path_factory.mktemp("private") / "tiny pipeline")
    told, seen = StringIO(), []  # type: ignore[var-annotated]
    handler = logging.StreamHandler(told)
    loggers = [logging.getLogger(name) for name in (None, "prefect.flow_runs", "prefect.task_runs")]
    with pytest.MonkeyPatch.context() as patch:
        prepare_environment(patch, directory)
        patch.setenv("PREFECT_API_URL", server)
        quick_pictures(patch)
        in_this_process(patch, seen)
        write_params(PRIVATE)
        for logger in loggers:
            logger.addHandler(handler)
        try:
            with redirect_stdout(told), redirect_stderr(told):
                experiment()
                audit()
                report()
                prediction()
        finally:
            for logger in loggers:
                logger.removeHandler(handler)
        yield Published(directory, told.getvalue(), seen)


def tables() -> dict[str, list[str]]:
    with closing(sqlite3.connect(DATABASE)) as database:
        names = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {name: [row[1] for row in database.execute(f"PRAGMA table_info('{name}')")] for name in names}


def rows(table: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(DATABASE)) as database:
        return database.execute(f"SELECT * FROM '{table}'").fetchall()


def times() -> dict[str, set[float]]:
    """Every number of the database, by table and column, that could count seconds or less since 1970."""
    found: dict[str, set[float]] = {}
    for table, columns in tables().items():
        for row in rows(table):
            for column, value in zip(columns, row, strict=True):
                if isinstance(value, int | float) and 1e9 <= abs(value) < 1e20:
                    found.setdefault(f"{table}.{column}", set()).add(value)
    return found


def words() -> Iterator[str]:
    """Every text of the database."""
    for table in tables():
        yield from (value for row in rows(table) for value in row if isinstance(value, str))


STAMPED = {"experiments.creation_time", "experiments.last_update_time"}


def test_mlflows_database_holds_no_time_of_a_run(published: Published) -> None:
    """But when an experiment was first named, which is before its first cell begins, and never changes."""
    assert set(times()) == STAMPED
    assert published.experiments == [rows("experiments")]
    columns = tables()["runs"]
    runs = [dict(zip(columns, row, strict=True)) for row in rows("runs")]
    assert len(runs) > 3, "a parent, two cells, and answers"
    assert {run["start_time"] for run in runs} == {NO_TIME}
    assert {run["end_time"] for run in runs} == {NO_TIME}
    assert not [text for text in words() if re.search(r"20\d\d-\d\d-\d\d|\d\d:\d\d:\d\d", text)]


def test_no_number_of_a_run_is_a_time(published: Published) -> None:
    """The first 48 bits of a UUID of version 7 are milliseconds; Prefect's server gives runs such numbers."""
    pattern = r"[0-9a-f]{8}-?(?:[0-9a-f]{4}-?){3}[0-9a-f]{12}"
    numbers = [UUID(found) for text in words() for found in re.findall(rf"\b{pattern}\b", text)]
    assert numbers
    assert 7 not in {number.version for number in numbers}
    assert not [row for row in rows("tags") if "prefect_flow_run" in row]


def test_files_of_the_store_hold_no_time(published: Published) -> None:
    files = [path for run in Path("data/mlartifacts").iterdir() for path in (run, *run.rglob("*"))]
    assert len(files) > 10
    assert {path.stat().st_mtime for path in files} == {NO_TIME / 1000}


def test_only_releases_and_public_data_are_metrics(published: Published) -> None:
    names = {row[0] for row in rows("metrics")}
    assert {name for name in names if not LOGGED.fullmatch(name)} == set()
    assert {"perplexity/public", "training/gradient_norm", "epsilon/audited", "audit/canaries_calibrated_auc"} <= names
    shown = {name for cell in read_json(REPORT / "cells.json").values() for name in cell}
    assert {name for name in shown if not METRICS.fullmatch(name)} == {"releases"}
    tables = list(Path("data/mlartifacts").rglob("steps.csv"))
    steps = {name for table in tables for name in table.read_text("utf-8").splitlines()[0].split(",")}
    assert len(tables) == 2
    assert "radius_0" in steps
    assert {name for name in steps if not (METRICS.fullmatch(name) or STEPS.fullmatch(name))} == set()


def test_the_parent_shows_the_headline_and_its_page_says_what_is_covered(published: Published) -> None:
    parent = tracking.client().get_run(tracking.parent_run("tiny", {}, timed=False))
    assert parent.data.tags["chosen_mechanism"] in ("static", "quantile")
    assert "public-set perplexity" in parent.data.tags[tracking.NOTE]
    note = tracking.client().get_experiment(parent.info.experiment_id).tags[tracking.NOTE]
    assert note.startswith(parent.data.tags[tracking.NOTE])
    assert "For runs with the tag `telemetry: private`, the guarantee covers" in note


def test_no_digest_of_records_is_published(published: Published) -> None:
    """Nor a part of one, of any file of the corpus: with it, a guess of the records could be tested."""
    files = [path for root in ("raw", "narratives", "splits", "canaries") for path in Path("data", root).iterdir()]
    places = [path for path in Path("data/mlartifacts").rglob("*") if path.is_file()]
    told = b"".join(path.read_bytes() for path in (DATABASE, *places))
    digests = [hashlib.new(kind, file.read_bytes()).hexdigest() for file in files for kind in ("md5", "sha1", "sha256")]
    digests += [Cell.model_validate_json(file.read_text()).inputs["data"] for file in RUNS.glob("*/cell.json")]
    assert len(digests) > 20
    assert not [digest for digest in digests if digest[:12].encode() in told]
    assert {row[tables()["tags"].index("key")] for row in rows("tags")} & {"dvc_hash"} == set()


def test_no_result_holds_a_figure_of_a_record(published: Published) -> None:
    """Shadow models are trained on public records then, so their scores of canaries stay."""
    forbidden = re.compile(
        r"eval|membership|(?<!canaries[._])shadow|batch_|loss|clipped_fraction|private_weight"
        r"|perplexity_(pooled|per_block)"
    )
    files = [
        *RUNS.rglob("result.json"),
        *AUDITS.rglob("audit.json"),
        REPORT / "cells.json",
        PREDICTION / "results.json",
    ]
    assert len(files) == 6
    for file in files:
        content = read_json(file)
        assert not [name for name in figures(content) if forbidden.search(name)], file
    assert all(read_json(file)["seconds"] is None for file in RUNS.rglob("result.json"))


def secret_figures() -> list[float]:
    """What research telemetry would tell, computed here: perplexities of held-out records, likelihoods of members."""
    found: list[float] = []
    for name in read_json(EXPERIMENT)["cells"]:
        target = load_target(RUNS / name, load_settings().audit, torch.device("cpu"), 1)
        tokens = corpus_of(target.cell, EVAL, target.tokenizer).tokens
        most = target.cell.training.evaluate_records
        for model in (target.adapted, target.public):
            found += [perplexity(model, replace(tokens, rows=tokens.rows[:n]), 32) for n in (most, None)]
        members, _ = (audit_task._sample(read_records(path), target) for path in (SPLITS / "train.parquet", EVAL))
        limit = target.cell.training.max_length
        losses = ending_losses(target.adapted, target.tokenizer, members, max_length=limit, rows=target.rows)
        found.append(float((losses.total / losses.tokens).mean()))
    return found


def test_no_figure_of_a_record_is_anywhere(published: Published) -> None:
    """Neither in a database, a page, a table, a log line, nor in a file that a stage publishes.

    Perplexities are above 100 and are looked for with four decimals, as pages have them, losses with six digits: one of
    the thousand other numbers is equal to one of them in fewer than 1 in 1,000 runs.
    """
    secret = {f"{value:.4f}" if value > 100 else f"{value:.6f}"[:-1] for value in secret_figures()}
    assert len(secret) >= 4
    places = [path for root in (RUNS, AUDITS, REPORT, PREDICTION, Path("data/mlartifacts")) for path in root.rglob("*")]
    texts = [path.read_text("utf-8") for path in places if path.suffix in (".json", ".jsonl", ".csv", ".html", ".md")]
    assert len(texts) > 10
    told = "\n".join([*texts, published.output, *(json.dumps(row, default=str) for row in rows("metrics"))])
    told = re.sub(r"base64,[A-Za-z0-9+/=]+", "", told)
    assert {value for value in secret if value in told} == set()


def test_the_pages_say_in_words_what_they_do_not_show(published: Published) -> None:
    page = (REPORT / "report.html").read_text(encoding="utf-8")
    assert page.count("not shown: telemetry is private") >= 2
    assert "Perplexity on held-out records is not shown" in page
    assert "attacks on persons' records are neither made nor shown" in " ".join(page.split())
    assert "NOT the times that databases, logs and files keep" in page
    answers = (PREDICTION / "prediction.html").read_text(encoding="utf-8")
    assert "Not shown: telemetry is private" in answers
    assert "NOT the figures on this page" not in answers


def test_the_log_shows_no_finding(published: Published) -> None:
    assert "Finished in state Completed()" in published.output
    assert not re.search(r"auc|perplexity|epsilon_audited", published.output, re.IGNORECASE)


def test_prefects_own_records_stay_with_the_owner(published: Published) -> None:
    assert Path("data").stat().st_mode & 0o777 == 0o700


def test_a_private_run_that_fails_and_is_resumed_is_stamped_with_nothing(
    pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = static(merge(PRIVATE, {"experiment": {"mechanisms": ["static"]}}))
    parent = tracking.parent_run("tiny", {}, timed=False)

    def broken(*_: Any) -> None:
        raise RuntimeError("the disk is on fire")

    with monkeypatch.context() as patch:
        patch.setattr(cell_training, "write_adapter", broken)
        with pytest.raises(RuntimeError):
            run_cell(cell, "cpu", parent)
    assert {row[tables()["runs"].index("status")] for row in rows("runs")} == {"RUNNING", "FAILED"}
    assert set(times()) == STAMPED
    run_cell(cell, "cpu", parent)
    tracking.finish_parent(parent, failed=True, timed=False)
    assert {row[tables()["runs"].index("status")] for row in rows("runs")} == {"FINISHED", "FAILED"}
    assert set(times()) == STAMPED
    assert read_ledger(cell.directory / "ledger.jsonl").complete


def test_a_research_run_keeps_its_times(pipeline: Path) -> None:
    """The scan finds times where there are some."""
    run_cell(static(), "cpu", tracking.parent_run("tiny", {}))
    assert {"runs.start_time", "runs.end_time", "metrics.timestamp", "latest_metrics.timestamp"} <= set(times())


def test_language_models_of_the_policy_section_follow_the_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_params()
    research, private = (
        policy_of(load_settings(overrides={"experiment": {"telemetry": kind}})) for kind in ("research", "private")
    )
    assert research.rlhf is not None
    assert private.rlhf is not None
    assert (research.rlhf.telemetry, private.rlhf.telemetry) == ("research", "private")
    leaky = {"experiment": {"telemetry": "private"}, "policy": {"rlhf": {"nonprivate": True}}}
    with pytest.raises(ConfigError, match=r"policy\.rlhf\.nonprivate: private telemetry cannot hold without noise"):
        policy_of(load_settings(overrides=leaky))
