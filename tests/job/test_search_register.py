"""A search and its register: what was killed in between, what is known of one that has ended, and plain scores."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_search import asked, draws, killed, start, usual

from dptune.core.errors import ConfigError, DivergedError
from dptune.core.files import NO_TIME
from dptune.job.search import candidates as candidates_module
from dptune.job.search.plan import Drawn, Journal, Plan, asked_of, changes
from dptune.job.search.search import NoWinnerError, id_of, working_folder
from dptune.privacy.certificate import read_certificate
from dptune.privacy.entropy import OsEntropy
from dptune.privacy.spent_budgets.register import Register
from dptune.training import run as training_run


def test_others_that_paid_while_a_search_was_killed_are_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between its certificate and the register, it had asked the register too early."""
    draws(monkeypatch, 1)

    def die(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Register, "add_search", die)
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path)
    working, register = working_folder(tmp_path / "out"), Register(tmp_path / "spent.jsonl")
    own = read_certificate(working / "certificate.jsonl")
    register.add_search(usual().fingerprint, replace(own, id="other"), again=False)
    with pytest.raises(ConfigError, match=r"search\.again: these records paid before"):
        start(tmp_path)
    assert not list((working / "candidates").iterdir())
    assert register.totals()[0].entries == 1
    with monkeypatch.context() as patched:
        patched.setattr("dptune.job.search.search.run_candidates", die)
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path, again=True)
    assert register.totals()[0].entries == 2


def test_a_winners_ledger_is_ended_though_its_run_was_killed_before_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws(monkeypatch, 1)
    end = Journal.end

    def die(journal: Journal, *outcome: Any) -> None:
        end(journal, *outcome)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "end", die)
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path)
    assert start(tmp_path).ledger.complete


def test_a_refused_search_leaves_no_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one entered the register after the first look at it."""
    draws(monkeypatch, 1)
    other = replace(read_certificate(killed(monkeypatch, tmp_path) / "certificate.jsonl"), id="other")
    folder = tmp_path / "second"
    (folder / "out").mkdir(parents=True)
    check = Register.check

    def look(register: Register, records: str, *, again: bool) -> None:
        check(register, records, again=again)
        register.add_search(records, other)

    with monkeypatch.context() as patched:
        patched.setattr(Register, "check", look)
        with pytest.raises(ConfigError, match=r"search\.again"):
            start(folder)
    assert not working_folder(folder / "out").exists()
    assert not (folder / "out" / "cell.json").exists(), "it would say that a search began here"
    assert start(folder, again=True).ledger.complete


def test_a_search_of_records_that_paid_before_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draws(monkeypatch, 1)
    other = replace(read_certificate(killed(monkeypatch, tmp_path) / "certificate.jsonl"), id="other")
    (folder := tmp_path / "second").mkdir()
    Register(folder / "spent.jsonl").add_search(usual().fingerprint, other, again=False)
    with pytest.raises(ConfigError, match=r"search\.again"):
        start(folder)
    assert not (folder / "out").exists()


def test_a_search_whose_line_was_cut_off_counts_by_its_certificate_and_again_when_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under way, as soon as a candidate has begun; before that it has cost nothing, and counts when it goes on."""
    draws(monkeypatch, 1)
    register, records = Register(tmp_path / "spent.jsonl"), usual().fingerprint

    def dying(*_: Any) -> None:
        raise KeyboardInterrupt

    killed(monkeypatch, tmp_path)
    register.path.unlink()
    assert register.earlier(records) == []
    with monkeypatch.context() as patched:
        patched.setattr(training_run.Run, "complete", dying)
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path)
    assert [one.named for one in register.earlier(records)] == [True], "it counts where it goes on"
    register.path.unlink()
    (under_way,) = register.earlier(records)
    assert (under_way.what, under_way.named) == ("search", False)
    with pytest.raises(ConfigError, match=r"search\.again"):
        register.check(records, again=False)
    found = start(tmp_path)
    register.path.unlink()
    (ended,) = register.earlier(records)
    assert (ended.id, ended.epsilon, ended.named) == (under_way.id, found.certificate.certified, False)
    start(tmp_path)
    assert [one.named for one in register.earlier(records)] == [True]
    assert register.faults() == []


def test_a_search_is_known_by_its_id_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would be told of its own cost as another's."""
    draws(monkeypatch, 1)
    out = tmp_path / "out"
    assert id_of(out) == ""
    own = Plan.read(killed(monkeypatch, tmp_path)).id
    assert id_of(out) == own

    def fail(run: Any) -> None:
        raise DivergedError("the run diverged.")

    monkeypatch.setattr(training_run.Run, "end", fail)
    with pytest.raises(NoWinnerError):
        start(tmp_path)
    assert id_of(out) == own
    assert Register(tmp_path / "spent.jsonl").earlier(usual().fingerprint, besides=[id_of(out)]) == []
    assert (out / "certificate.jsonl").stat().st_mtime == NO_TIME, "when all had failed tells how many there were"


def test_a_plan_is_drawn_for_one_model_unit_and_budget() -> None:
    own, salt = usual(), "00" * 16
    now = asked_of(own, asked(), salt)
    other = replace(own, base=replace(own.base, identity="other"))
    assert changes(now, asked_of(other, asked(), salt)) == "model"
    for name, value in (("epsilon", 4.0), ("delta", 1e-4), ("telemetry", "research"), ("seed", 5), ("rank", 1)):
        assert changes(now, asked_of(replace(own, settings=replace(own.settings, **{name: value})), asked(), salt))
    alone = replace(own, units=replace(type(own.units).records(len(own.units.members)), keys=own.units.keys))
    assert "unit" in changes(now, asked_of(alone, asked(), salt))
    assert changes(now, asked_of(own, asked(), "01" * 16)) == "keys, records"
    assert changes(now, asked_of(own, asked(score={"on": "train"}), salt)) == "search"


def test_the_commitment_fixes_the_settings_of_every_candidate() -> None:
    plan = Plan("id", "00" * 32, (), (Drawn("name", 0, {"learning_rate": 0.01}),))
    for other in (
        Drawn("name", 0, {"learning_rate": 0.02}),
        Drawn("name", 1, {"learning_rate": 0.01}),
        Drawn("else", 0, {"learning_rate": 0.01}),
    ):
        assert replace(plan, candidates=(other,)).commitment != plan.commitment


@pytest.mark.parametrize("torn", ["first", "last"])
def test_a_search_goes_on_though_a_line_of_its_certificate_was_torn(
    torn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing relies on such a line yet, and a search that cannot go on has been paid for."""
    draws(monkeypatch, 1)
    path = killed(monkeypatch, tmp_path) / "certificate.jsonl"
    if torn == "last":
        path.write_bytes(path.read_bytes() + b'{"kind":"winner"')
    else:  # before it was booked, and before its folder said that a search began there
        path.write_bytes(path.read_bytes()[:40])
        (tmp_path / "out" / "cell.json").unlink()
        (tmp_path / "spent.jsonl").unlink()
    assert start(tmp_path).certificate is not None
    assert [total.entries for total in Register(tmp_path / "spent.jsonl").totals()] == [1]


def test_a_configuration_may_be_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates are independent: of two with two configurations each, half the pairs are equal.

    Without replacement none would be, at a price that is too low. False alarm: below 1e-9.
    """
    draws(monkeypatch, 2)
    settings, pairs = asked(space={"expected_batch_size": [4, 8]}), 400
    plans = [Plan.draw(settings, (), OsEntropy()) for _ in range(pairs)]
    equal = sum(first.options == second.options for first, second in (plan.candidates for plan in plans))
    assert abs(equal - pairs / 2) < 6.2 * (pairs / 4) ** 0.5


@pytest.mark.parametrize(("loss", "score"), [(2.0, -2.0), (1.5, -1.5), (math.nan, None), (math.inf, None)])
def test_the_lower_public_loss_is_the_better_score(
    loss: float, score: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates_module, "mean_loss", lambda *_: loss)
    nothing: Any = None
    shared: Any = SimpleNamespace(scored=None)
    assert candidates_module._score(shared, nothing, nothing, usual()) == score
