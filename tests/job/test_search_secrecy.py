"""A secret plan serves the records and settings that it was drawn for, and no other user learns its number."""

from __future__ import annotations

import json
import logging
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_search import asked, draws, killed, prepared, start, usual
from tiny_tuning import QUICK, rows
from typer.testing import CliRunner

from dptune.cli import app
from dptune.core.errors import ConfigError
from dptune.job.result import PUBLIC
from dptune.job.search import search as search_module
from dptune.job.search.plan import PlanError
from dptune.job.search.search import check_prepared, prepare_search, search, working_folder
from dptune.job.settings import TuneSettings
from dptune.privacy.certificate import read_certificate
from dptune.privacy.run_folder import set_aside
from dptune.privacy.spent_budgets.register import Register
from dptune.records.reading.source import RecordSource
from dptune.training import run as training_run
from dptune.training.privacy_units import PrivacyUnits

pytestmark = pytest.mark.long


def test_a_plan_is_used_for_no_other_records_or_settings_though_the_result_folder_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws(monkeypatch, 1)
    working, own = killed(monkeypatch, tmp_path), usual()
    shutil.rmtree(tmp_path / "out")
    turned = tuple(row[::-1].copy() for row in own.tokens.rows)
    others = replace(own, tokens=replace(own.tokens, rows=turned), fingerprint="others")
    dearer = replace(own, settings=replace(own.settings, epochs=6, epsilon=60.0))
    assert own.held_out is not None
    alone = replace(own, held_out=type(own.held_out).records(len(own.held_out.members)))
    for changed, named in ((others, "records"), (dearer, "epochs, epsilon"), (alone, "records")):
        with pytest.raises(ConfigError, match=rf"other settings \({named}\)"):
            start(tmp_path, changed)
    with pytest.raises(ConfigError, match=r"other settings \(search\)"):
        start(tmp_path, candidates=5)
    plan = json.loads((working / "plan.json").read_text())
    (working / "plan.json").write_text(json.dumps({name: plan[name] for name in plan if name != "asked"}))
    with pytest.raises(ConfigError, match="for which records and settings"):
        start(tmp_path)
    assert not list((working / "candidates").iterdir())
    (working / "plan.json").write_text(json.dumps(plan))
    assert start(tmp_path).certificate is not None


def test_no_candidate_releases_more_than_its_kind_whatever_the_plan_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws(monkeypatch, 2)
    working = killed(monkeypatch, tmp_path)
    plan = json.loads((working / "plan.json").read_text())
    plan["kinds"][0][1]["noise_multiplier"] /= 2
    (working / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(PlanError, match="more than the certificate prices"):
        start(tmp_path)
    assert not list((working / "candidates").rglob("ledger.jsonl"))


def test_what_others_can_stat_of_the_secret_folder_does_not_follow_the_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, publish = set(), search_module._publish
    for count in (1, 4):
        draws(monkeypatch, count)
        (folder := tmp_path / str(count)).mkdir()
        working = killed(monkeypatch, folder)
        before = os.stat(working)

        def look(*arguments: Any, working: Path = working, before: os.stat_result = before) -> None:
            now = os.stat(working)
            assert now.st_mtime_ns == before.st_mtime_ns
            seen.add((now.st_nlink, now.st_size))
            publish(*arguments)

        with monkeypatch.context() as patched:
            patched.setattr(search_module, "_publish", look)
            start(folder)
    assert len(seen) == 1


def test_a_search_that_is_set_aside_says_its_whole_cost_and_takes_its_secrets_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws(monkeypatch, 1)
    killed(monkeypatch, tmp_path)
    said = CliRunner().invoke(app, ["set-aside", str(tmp_path / "out")])
    assert said.exit_code == 0
    assert "nothing was charged" not in said.output
    assert "the whole search costs epsilon" in said.output
    aside = tmp_path / "out.set-aside-1"
    certified = read_certificate(working_folder(aside) / "certificate.jsonl").certified
    assert f"{certified:.4g}" in said.output
    assert not working_folder(tmp_path / "out").exists()
    register = Register(tmp_path / "spent.jsonl")
    found = search(usual(), asked(), aside, register)  # it goes on where it lies
    assert found.certificate is not None
    assert [total.entries for total in register.totals()] == [1]
    ended = CliRunner().invoke(app, ["set-aside", str(tmp_path / "out")])
    assert "is not a run's folder" in str(ended.exception) + ended.output


def test_a_candidate_is_never_set_aside_to_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draws(monkeypatch, 1)
    start(tmp_path, keep_losers=True)
    (candidate,) = working_folder(tmp_path / "out").glob("candidates/*")
    with pytest.raises(ConfigError, match="allows each candidate one run"):
        set_aside(candidate)
    with pytest.raises(ConfigError, match="allows each candidate one run"):
        set_aside(candidate.parents[1])


def test_candidates_have_the_noise_of_their_own_kind_and_their_own_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dptune.job.search import candidates as candidates_module
    from dptune.privacy.ledger_file import read_ledger

    draws(monkeypatch, 6)
    rates, make = {}, candidates_module._spec

    def look(shared: Any, candidate: Any, own: Any) -> Any:
        rates[candidate.name] = own.plan.learning_rate
        return make(shared, candidate, own)

    monkeypatch.setattr(candidates_module, "_spec", look)
    space = {"expected_batch_size": [4, 12], "learning_rate": [0.01, 0.02]}
    numbers = iter([0, 1, 2, 3, 3, 0])

    def draw(own: Any, entropy: Any) -> tuple[int, dict[str, Any]]:
        number = next(numbers)
        return number, own.kinds()[number][1]

    monkeypatch.setattr("dptune.job.search.space.Space.draw", draw)
    found = start(tmp_path, space=space, keep_losers=True, together=1)
    assert found.certificate is not None
    working = working_folder(tmp_path / "out")
    plan = json.loads((working / "plan.json").read_text())
    for one in plan["candidates"]:
        assert rates[one["name"]] == one["options"]["learning_rate"]
        folder = working / "candidates" / one["name"]
        if folder.joinpath("ledger.jsonl").exists():
            ((kind, planned),) = [(r, n) for r, n in found.certificate.kinds[one["kind"]][1]]
            ((release, count),) = read_ledger(folder / "ledger.jsonl").composition.items()
            assert count == planned
            assert release.noise_multiplier == kind.noise_multiplier
            assert release.sample_rate == kind.sample_rate


def test_no_figure_of_held_out_records_is_told_under_research_telemetry_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws(monkeypatch, 1)
    found = start(tmp_path, prepared(telemetry="research"))
    assert set(found.perplexity) == {PUBLIC}
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert set(result["before"]) == set(result["after"]) == {"public_perplexity"}


def test_nothing_is_logged_while_candidates_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    draws(monkeypatch, 2)
    log, runs = logging.getLogger("dptune.training.loop"), []

    def run(*arguments: Any) -> None:
        runs.append(arguments)
        log.critical("a candidate runs")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(search_module, "run_candidates", run)
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path)
    assert runs
    assert "a candidate runs" not in caplog.text
    log.warning("heard again")
    assert "heard again" in caplog.text


def test_a_crash_is_told_to_who_keeps_the_losers_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    draws(monkeypatch, 2)
    end, ended = training_run.Run.end, []

    def fail(run: Any) -> None:
        ended.append(run.directory.name)
        if run.directory.name == ended[0]:
            raise RuntimeError("crash")
        end(run)

    monkeypatch.setattr(training_run.Run, "end", fail)
    for keep in (False, True):
        ended.clear()
        (folder := tmp_path / str(keep)).mkdir()
        start(folder, keep_losers=keep)
        assert ("a candidate crashed" in caplog.text) is keep


@pytest.mark.parametrize("telemetry", ["research", "private"])
def test_units_are_held_out_only_where_they_score(telemetry: Any) -> None:
    source, base = RecordSource(rows(60, 30), unit="customer_id", public=rows(6)), usual().base
    chosen = TuneSettings(epsilon=8.0, delta=1e-3, eval_share=0.2, telemetry=telemetry, **QUICK)
    for score, held_out in (("public", False), ({"on": "train"}, False), ("noisy", True)):
        found = prepare_search(source, base, chosen, asked(score=score))
        assert (found.held_out is not None) is held_out
        assert found.fingerprint == usual().fingerprint  # by which registers know records, whatever the split


def test_one_unit_that_scores_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match="fewer than two units held out"):
        check_prepared(replace(usual(), held_out=PrivacyUnits.records(1)), asked())
