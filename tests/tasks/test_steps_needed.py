"""Share of steps to the best baseline's final utility: a table of the report, and a figure of each agent's run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_report import page, private, result
from tiny_pipeline import read_json

from tasks.charts.seed_groups import over_seeds
from tasks.mlflow import tracking
from tasks.report.experiment import write_report
from tasks.report.page import environment
from tasks.report.steps_needed import (
    NAME,
    STEPS_FILE,
    Used,
    curve_ends,
    publish_steps,
    steps_needed,
    steps_over_seeds,
)

pytestmark = pytest.mark.usefixtures("quick_pictures")


def run(mechanism: str, curve: list[float], *, agent: bool = False, seed: int = 0, **changes: Any) -> dict[str, Any]:
    """A result whose held-out perplexity at every tenth release is the curve's."""
    history = [
        {"step": 10 * n, "releases": 10 * n, "public_perplexity": 9.0, "eval_sample_perplexity": value}
        | {"epsilon_published": 0.1 * n, "epsilon_noise_only": 0.2 * n, "epsilon_certified": 0.2 * n}
        for n, value in enumerate(curve, 1)
    ]
    label = f"small.{mechanism}.seed{seed}"
    told = {"agent": agent, "seed": seed, "history": history, "planned_releases": 10 * len(curve), "label": label}
    return result(mechanism, **(told | changes))


BASELINES = [run("static", [9, 8, 7, 6]), run("geoclip", [9, 9, 8, 8])]


def test_the_share_is_that_of_the_first_point_as_good_as_the_best_baselines_last() -> None:
    (row,) = steps_needed([*BASELINES, run("rldp", [7, 6, 5, 5], agent=True)])
    assert (row.baseline, row.target, row.share) == ("static", 6, 0.5)
    (never,) = steps_needed([*BASELINES, run("rldp", [9, 8, 7, 6.5], agent=True)])
    assert never.share == math.inf


@given(st.lists(st.floats(1, 20), min_size=1, max_size=30), st.lists(st.floats(1, 20), min_size=1, max_size=30))
def test_a_share_is_the_earliest_that_holds(agent: list[float], baseline: list[float]) -> None:
    (row,) = steps_needed([run("static", baseline), run("rldp", agent, agent=True)])
    if math.isinf(row.share):
        assert min(agent) > baseline[-1]
    else:
        index = round(row.share * len(agent))
        assert agent[index - 1] <= baseline[-1]
        assert all(value > baseline[-1] for value in agent[: index - 1])


@pytest.mark.parametrize(
    "other",
    [{"model": "large"}, {"accounting": "published"}, {"budget_epsilon": 8.0}, {"seed": 1}, {"budget_epsilon": None}],
)
def test_a_baseline_of_another_comparison_does_not_count(other: dict[str, Any]) -> None:
    """Above all none at another epsilon."""
    best = run("static", [2, 1]) | other
    assert steps_needed([best, run("rldp", [7, 6], agent=True)]) == []


def test_another_agent_is_no_baseline() -> None:
    agents = [run("rldp", [7, 6], agent=True), run("rldp_random", [2, 1], agent=True)]
    assert {row.baseline for row in steps_needed([*agents, run("static", [9, 8])])} == {"static"}


def test_a_baseline_that_diverged_is_no_target() -> None:
    for diverged in (math.inf, math.nan):
        bad = run("static", [9, diverged])
        assert steps_needed([bad, run("rldp", [7, 6], agent=True)]) == []
        (row,) = steps_needed([bad, run("geoclip", [9, 7]), run("rldp", [diverged, 6], agent=True)])
        assert (row.baseline, row.share) == ("geoclip", 1.0)


def test_seeds_are_summed_up_and_those_that_never_get_there_are_counted() -> None:
    results = [run("static", [9, 6], seed=seed) for seed in range(3)]
    results += [run("rldp", curve, agent=True, seed=seed) for seed, curve in enumerate(([6, 5], [7, 6], [9, 7]))]
    (group,) = steps_over_seeds(steps_needed(results))
    assert (len(group.runs), group.reached, group.share) == (3, 2, 0.75)


def test_the_report_has_the_table_its_file_and_the_metric(tmp_path: Path) -> None:
    write_report([*BASELINES, run("rldp", [7, 6, 5, 5], agent=True)], tmp_path, "tiny")
    words = page(tmp_path).words
    assert "best baseline" in words
    assert "50 %" in words
    (row,) = read_json(tmp_path / STEPS_FILE)
    assert (row["label"], row["baseline"], row["share"]) == ("small.rldp.seed0", "static", 0.5)
    metrics = read_json(tmp_path / "cells.json")
    assert metrics["small.rldp.seed0"][NAME] == 0.5
    assert NAME not in metrics["small.static.seed0"]


def test_an_agent_that_never_gets_there_and_results_without_agents_are_shown_as_such(tmp_path: Path) -> None:
    write_report([*BASELINES, run("rldp", [9, 9, 9, 9], agent=True)], tmp_path / "never", "tiny")
    assert "never" in page(tmp_path / "never").words
    write_report(BASELINES, tmp_path / "none", "tiny")
    assert "best baseline" not in page(tmp_path / "none").words
    assert read_json(tmp_path / "none" / STEPS_FILE) == []


def test_under_private_telemetry_there_is_no_share(tmp_path: Path) -> None:
    """It is computed from held-out records."""
    results = [private(one) for one in (*BASELINES, run("rldp", [7, 6, 5, 5], agent=True))]
    write_report(results, tmp_path, "tiny")
    assert read_json(tmp_path / STEPS_FILE) == []
    assert NAME not in (tmp_path / "cells.json").read_text()
    words = " ".join(page(tmp_path).words.split())
    assert "Share of steps to the best baseline's final utility: not shown: telemetry is private" in words


def test_a_run_of_mlflow_gets_its_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, dict[str, float]]] = []
    monkeypatch.setattr(tracking, "add_to_run", lambda run_id, metrics, _file: sent.append((run_id, metrics)))
    rows = steps_needed([*BASELINES, run("rldp", [7, 6, 5, 5], agent=True)])
    publish_steps(rows, {"small.rldp.seed0": tmp_path / "absent"}, tmp_path / STEPS_FILE)
    assert sent == []
    (tmp_path / "mlflow_run").write_text("abc\n")
    publish_steps(rows, {"small.rldp.seed0": tmp_path / "mlflow_run"}, tmp_path / STEPS_FILE)
    assert sent == [("abc", {NAME: 0.5})]


def timed(run: dict[str, Any], seconds: float, joules: float | None, **changes: Any) -> dict[str, Any]:
    """A run that used so much between any two points of its curve."""
    used = [{"elapsed_seconds": seconds * n} for n in range(1, len(run["history"]) + 1)]
    told = [one | ({} if joules is None else {"machine_joules": joules * n}) for n, one in enumerate(used, 1)]
    return run | {"history": [point | one for point, one in zip(run["history"], told, strict=True)]} | changes


def test_time_and_energy_to_the_best_baselines_utility(tmp_path: Path) -> None:
    """The agent gets there at the second of its points, the baseline ends at its fourth."""
    agent = timed(run("rldp", [7, 6, 5, 5], agent=True), 90, 1800)
    results = [timed(BASELINES[0], 60, 3600), agent]
    (row,) = steps_needed(results)
    assert (row.used, row.baseline_used) == (Used(180, 3600), Used(240, 14400))
    write_report(results, tmp_path / "one", "tiny")
    words = " ".join(page(tmp_path / "one").words.split())
    assert "3.0 min (4.0)" in words
    assert "1 Wh (4)" in words
    figures = read_json(tmp_path / "one" / "cells.json")
    assert figures["small.rldp.seed0"]["seconds_to_best_baseline"] == 180
    assert "seconds_to_best_baseline" not in figures["small.static.seed0"]
    without = [timed(BASELINES[0], 60, None), timed(run("rldp", [7, 6, 5, 5], agent=True), 90, None, together=2)]
    (row,) = steps_needed(without)
    assert (row.used, row.baseline_used) == (Used(), Used(240)), "of cells side by side nobody knows each one's time"
    write_report(without, tmp_path / "two", "tiny")
    words = page(tmp_path / "two").words
    assert " min (" not in words
    assert "energy of the machine" not in words


def test_lowest_and_final_perplexity_of_each_curve(tmp_path: Path) -> None:
    results = [run("static", curve, seed=seed) for seed, curve in enumerate(([9, 3, 5], [9, 4, 8]))]
    (row,) = curve_ends(over_seeds(results, "eval_perplexity"))
    assert (row.lowest, row.final) == (3.5, 6.5)
    write_report(results, tmp_path, "tiny")
    assert "Lowest and final perplexity of each curve" in page(tmp_path).words
    figures = read_json(tmp_path / "cells.json")
    assert [figures[f"small.static.seed{seed}"]["eval_sample_perplexity_lowest"] for seed in (0, 1)] == [3, 4]
    hidden = [private(one) for one in results]
    assert curve_ends(over_seeds(hidden, "public_perplexity")) == []


LIKELIHOOD = {"auc": 0.531, "auc_chance_deviation": 0.04, "mean_log_probability": -1.25, "mean_perplexity": 4.321}
EXTRACTION = {"generated": 4000, "valid": 3999, "verbatim": 0, "recited": 0} | {
    f"jaccard_{n}{end}": value * 10.0 ** (1 - n)
    for n in (1, 2, 3, 4)
    for end, value in (("", 0.155), ("_deviation", 0.07), ("_chance", 0.147))
}


def test_the_page_has_the_papers_columns_of_both_attacks() -> None:
    """And of an audit that was made before them, what it has."""
    older = {name: LIKELIHOOD[name] for name in ("auc", "auc_chance_deviation")}
    audits = [
        {"label": "one", "membership": {"likelihood": LIKELIHOOD}, "extraction": EXTRACTION},
        {"label": "older", "membership": {"likelihood": older | {"auc": 0.469}}},
        {"label": "neither"},
    ]
    names = {"one": "static", "older": "static"}
    shown = {"steps": [], "ends": [], "audits": audits, "mechanism_of": names, "cell": names}
    text = environment({}).get_template("paper.html.j2").render(**shown)
    for said in ("\u22121.250", "4.321", "0.531", "0.469", "0.155 ± 0.07 (0.15)", "0.000155 ± 7e-05", "3999 of 4000"):
        assert said in text
    assert "neither" not in text
