"""Agents of a study that make no update: the checks, the cell's log, its result and the report all name them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_report import page, result
from tiny_pipeline import STEPS, cells, write_params

from tasks.experiment.checks import check, warn_of_idle_agents
from tasks.experiment.finetune import run_cell
from tasks.report.experiment import write_report
from tasks.settings.params import load_settings

QUICK = {"interval": 1, "warmup": 1, "rounds": 2, "batch_size": 1}


def study(**entries: dict[str, Any]) -> dict[str, Any]:
    return {"mechanisms": entries, "experiment": {"mechanisms": list(entries)}}


def test_the_checks_name_each_mechanism_whose_agent_cannot_learn(
    pipeline: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every record of 200 and 24 canaries in batches of 16, for .35 passes: 5 steps at most."""
    late = {"like": "rldp", "warmup": 3, "interval": 3}
    write_params(study(late=late, rldp=QUICK, swept=late | {"sweep": {"interval": [1, 2]}}, static={}))
    check()
    warnings = [record.getMessage() for record in caplog.records if "no update" in record.getMessage()]
    assert len(warnings) == 1, caplog.text
    assert warnings[0].startswith("the agent of late makes no update in 5 steps")


def test_what_is_not_counted_yet_is_not_guessed(pipeline: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_params(study(rldp={}), {"data": {"source": "text", "path": "texts.txt"}})
    warn_of_idle_agents(load_settings())
    assert "no update" not in caplog.text


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (QUICK, {"actions": STEPS, "updates": 2 * (STEPS - 1), "planned_updates": 2 * (STEPS - 1)}),
        (QUICK | {"interval": 4}, {"actions": 1, "updates": 0, "planned_updates": 0}),
        (QUICK | {"warmup": 5}, {"actions": 0, "updates": 0, "planned_updates": 0}),
    ],
    ids=["learns", "acts once", "never acts"],
)
def test_a_cell_warns_before_its_first_release_and_counts_what_happened(
    pipeline: Path, caplog: pytest.LogCaptureFixture, entry: dict[str, Any], expected: dict[str, int]
) -> None:
    (cell,) = cells(study(rldp=entry))
    assert run_cell(cell, "cpu")["learning"] == expected
    named = f"{cell.label}: the agent of rldp makes no update in {STEPS} steps"
    assert (named in caplog.text) == (not expected["updates"])


def test_the_report_names_runs_whose_agent_learned_nothing(tmp_path: Path) -> None:
    idle = {"actions": 1, "updates": 0, "planned_updates": 0}
    busy = {"actions": 7, "updates": 12, "planned_updates": 14}
    results = [result(), result("rldp", learning=idle), result("rldp_published", learning=busy)]
    write_report(results, tmp_path, "tiny")
    words = " ".join(page(tmp_path).words.split())
    assert words.count("no update") == 2, "the row's mark and its note"
    assert "The agent of rldp made no update in 1 of 1 runs: at most 1 action and 0 rounds in 2 releases" in words
    assert "7, 12 (14)" in words
    assert "1, 0 (0)" in words


def test_a_report_without_agents_has_no_column_for_them(tmp_path: Path) -> None:
    write_report([result()], tmp_path, "tiny")
    assert "agent:" not in page(tmp_path).words
