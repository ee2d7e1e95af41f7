"""An ensemble in the register of its records: its whole budget, before the first answer, and once."""

from __future__ import annotations

import math
import re
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn
from broken_models import BROKEN
from safetensors.torch import load_file, save_file
from tiny_ensemble import PROTOCOL, build
from tiny_models import CPU
from typer.testing import CliRunner

from dptune.cli import app
from dptune.core.errors import ConfigError
from dptune.prediction.booking import FILE, write_booking
from dptune.prediction.deployment import deploy
from dptune.prediction.ensemble import read_manifest, write_manifest
from dptune.privacy.ledger import Ledger
from dptune.privacy.ledger_file import LedgerError, read_ledger
from dptune.privacy.release import Composition, Release
from dptune.privacy.run_folder import RunFolder, set_aside
from dptune.privacy.run_header import RunHeader
from dptune.privacy.spent_budgets.register import Register, SpentTotal


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("ensembles") / "whole")


@pytest.fixture
def ensemble(whole: Path, tmp_path: Path) -> Path:
    """A copy that has not answered yet, and knows where it is booked."""
    folder = Path(shutil.copytree(whole, tmp_path / "ensembles" / "one"))
    write_booking(folder, "people", tmp_path / "spent.jsonl")
    return folder


def register(ensemble: Path) -> Register:
    return Register(ensemble.parents[1] / "spent.jsonl")


def total(ensemble: Path) -> SpentTotal:
    (found,) = register(ensemble).totals()
    return found


def answer(ensemble: Path, tokens: int = 1, **options: Any) -> tuple[str, ...]:
    deployment = deploy(ensemble, CPU, **options)
    try:
        for _ in range(tokens):
            deployment.predictor.answer([5])
    finally:
        deployment.predictor.close()
    return deployment.notes


def test_the_whole_budget_counts_before_the_first_answer_and_once(ensemble: Path) -> None:
    assert (ensemble / FILE).stat().st_mode & 0o777 == 0o600
    for tokens in (0, 1, int(PROTOCOL["tokens"]) - 1, 0):  # the last one opens a ledger that has ended
        assert answer(ensemble, tokens) == ()
        assert (total(ensemble).entries, total(ensemble).unit) == (1, "shard")
        assert total(ensemble).epsilon == pytest.approx(8, abs=1e-9)


def test_nothing_is_answered_that_no_register_counts(ensemble: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Register, "add_answers", full)
        refused = r"spent\.jsonl: cannot be written \(No space left on device\).*--register FILE; nothing was answered"
        with pytest.raises(LedgerError, match=refused):
            answer(ensemble)
    assert answer(ensemble) == (), "the ledger was closed"
    (ensemble / FILE).write_text("{}")
    with pytest.raises(ConfigError, match=r"booking\.json.*is damaged"):
        answer(ensemble)


def test_the_owner_is_told_what_the_records_paid_before(ensemble: Path) -> None:
    header = RunHeader("static", "gdp_clt", "certified", 8.0, 1e-5, "record", 500)
    register(ensemble).add_run("people", header, Composition({Release(0.02, 1.2): 40}))
    register(ensemble).add_run("others", replace(header, run_id="2"), Composition({Release(0.02, 1.2): 40}))
    (note,) = answer(ensemble)
    assert re.match(r"these records paid before \(once, epsilon .*; answers add to that: dptune spent ", note)
    told = CliRunner().invoke(app, ["generate", "x", "--tokens", "1", "--ensemble", str(ensemble)])
    assert re.sub(r"\s+", " ", told.stderr).count("these records paid before (once, ") == 1, told.output


def test_another_register_may_be_named(ensemble: Path, tmp_path: Path) -> None:
    given = ["--ensemble", str(ensemble), "--register", str(tmp_path / "mine.jsonl")]
    done = CliRunner().invoke(app, ["generate", "x", "--tokens", "1", *given])
    assert done.exit_code == 0, done.output
    assert Register(tmp_path / "mine.jsonl").totals()[0].entries == 1
    assert not register(ensemble).path.exists()


def test_an_ensemble_of_unknown_records_says_that_it_is_in_no_register(ensemble: Path) -> None:
    (ensemble / FILE).unlink()
    (note,) = answer(ensemble)
    assert "does not say which records it was tuned on, so no register counts its answers" in note
    assert not register(ensemble).path.exists()
    done = CliRunner().invoke(app, ["generate", "x", "--tokens", "1", "--ensemble", str(ensemble)])
    assert (done.exit_code, "no register counts" in re.sub(r"\s+", " ", done.stderr)) == (0, True), done.output


def fresh(ensemble: Path) -> Path:
    """Set the run aside, and put an ensemble into its place that was tuned anew. Returns the old one's folder."""
    aside, _ = set_aside(ensemble)
    shutil.copytree(aside, ensemble, ignore=shutil.ignore_patterns("ledger.jsonl", "served.json"))
    return aside


@pytest.mark.parametrize("booked", [True, False])
@pytest.mark.parametrize("lost", [True, False])
def test_what_was_set_aside_counts_with_the_budget_or_with_what_it_answered(
    booked: bool, lost: bool, ensemble: Path
) -> None:
    """A run of an earlier version is in no register: if its ledger is lost, nothing bounds what it spent."""
    booking = (ensemble / FILE).read_text()
    if not booked:
        (ensemble / FILE).unlink()
    answer(ensemble, 3)
    (ensemble / FILE).write_text(booking)
    aside = fresh(ensemble)
    before = total(ensemble).epsilon if booked else 0.0
    if lost:
        (aside / "ledger.jsonl").unlink()
    for _ in range(2):
        answer(ensemble)
    found = total(ensemble)
    assert found.entries == 2
    if booked:
        assert found.epsilon == pytest.approx(8 + before) == pytest.approx(16)
    elif lost:
        assert found.epsilon == math.inf
    else:
        assert 8 < found.epsilon < 16


def test_what_was_set_aside_counts_under_its_own_header(ensemble: Path) -> None:
    """The ensemble that took its place may have another delta, which prices nothing that was answered before."""
    booking = (ensemble / FILE).read_text()
    (ensemble / FILE).unlink()
    answer(ensemble, 3)
    (ensemble / FILE).write_text(booking)
    fresh(ensemble)
    manifest = read_manifest(ensemble)
    write_manifest(ensemble, replace(manifest, protocol=manifest.protocol | {"delta": 1e-7}))
    answer(ensemble)
    assert total(ensemble).entries == 2
    assert total(ensemble).delta == pytest.approx(PROTOCOL["delta"] + 1e-7, rel=1e-9)


def test_a_budget_that_starts_again_in_secret_counts_twice(ensemble: Path) -> None:
    """The ledger cannot show that it was removed with its note; the register remembers the run."""
    answer(ensemble, 3)
    for name in ("ledger.jsonl", "served.json"):
        (ensemble / name).unlink()
    answer(ensemble, 3)
    assert (total(ensemble).entries, total(ensemble).epsilon) == (2, pytest.approx(16))


def test_an_ensemble_that_is_moved_with_its_register_finds_it(ensemble: Path, tmp_path: Path) -> None:
    answer(ensemble)
    (tmp_path / "new").mkdir()
    moved = tmp_path / "new" / "ensembles" / "one"
    shutil.move(ensemble.parent, moved.parent)
    shutil.move(tmp_path / "spent.jsonl", tmp_path / "new" / "spent.jsonl")
    answer(moved)
    assert total(moved).entries == 1
    assert not (tmp_path / "spent.jsonl").exists()


def test_a_register_is_found_from_behind_symbolic_links(ensemble: Path, tmp_path: Path) -> None:
    """Two folders up from a link is another place than two folders up from what it leads to."""
    (tmp_path / "far" / "off").mkdir(parents=True)
    (tmp_path / "far" / "off" / "short").symlink_to(ensemble.parent)
    (tmp_path / "home").symlink_to(tmp_path)
    linked = tmp_path / "far" / "off" / "short" / "one"
    for folder in (linked, ensemble):
        for book in (tmp_path / "spent.jsonl", tmp_path / "home" / "spent.jsonl"):
            write_booking(folder, "people", book)
            for name in (linked, ensemble):
                answer(name)
                assert sorted(tmp_path.rglob("spent.jsonl")) == [tmp_path / "spent.jsonl"]
    (tmp_path / "home").unlink()
    answer(ensemble)
    assert total(ensemble).entries == 1


def test_an_ensemble_that_has_answered_is_not_booked_anew_where_its_register_is_not(
    ensemble: Path, tmp_path: Path
) -> None:
    """The register that was left behind knows what else these records paid."""
    answer(ensemble, 0)
    (tmp_path / "far" / "off").mkdir(parents=True)
    moved = Path(shutil.move(ensemble, tmp_path / "far" / "off" / "one"))
    answer(moved)  # it had not answered, so that nothing was left behind but its own entry
    register(moved).path.unlink()
    with pytest.raises(ConfigError, match=r"booking\.json: names the register .*far/spent\.jsonl, which is missing"):
        answer(moved)
    assert not (tmp_path / "far" / "spent.jsonl").exists()
    assert answer(moved, register=tmp_path / "mine.jsonl") == ()
    shutil.move(tmp_path / "spent.jsonl", tmp_path / "far" / "spent.jsonl")
    assert answer(moved) == (), "no ledger was left open"
    assert total(moved).entries == 1


def test_an_ensemble_whose_tokens_are_all_spent_is_booked_in_a_register_that_does_not_know_it(
    ensemble: Path, tmp_path: Path
) -> None:
    answer(ensemble, int(PROTOCOL["tokens"]))
    answer(ensemble, 0, register=tmp_path / "mine.jsonl")
    (found,) = Register(tmp_path / "mine.jsonl").totals()
    assert (found.entries, found.epsilon) == (1, pytest.approx(8))


def test_who_names_another_register_is_told_what_the_ensembles_own_knows(ensemble: Path, tmp_path: Path) -> None:
    answer(ensemble)
    (note,) = answer(ensemble, register=tmp_path / "mine.jsonl")
    assert note.startswith(f"{tmp_path}/spent.jsonl is another register, where these records paid too (once, epsilon 8")


def test_serve_counts_in_the_register_that_is_named_and_warns_the_owner(
    ensemble: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uvicorn, "run", lambda *_, **__: None)
    answer(ensemble)
    given = ["serve", "--ensemble", str(ensemble), "--register", str(tmp_path / "mine.jsonl")]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0, done.output
    assert Register(tmp_path / "mine.jsonl").totals()[0].entries == 1
    assert re.sub(r"\s+", " ", done.stderr).count("is another register, where these records paid too") == 1


def nothing_is_booked(ensemble: Path) -> bool:
    return not register(ensemble).path.exists() and not RunFolder(ensemble).ledger.exists()


@pytest.mark.parametrize("name", ["cut in half", "NaN", "too large", "another shape"])
def test_an_ensemble_whose_base_is_broken_is_refused_and_costs_nothing(
    name: str, ensemble: Path, tmp_path: Path
) -> None:
    model, manifest = tmp_path / "model", read_manifest(ensemble)
    shutil.copytree(manifest.source, model)
    write_manifest(ensemble, replace(manifest, source=str(model)))
    change, said = BROKEN[name]
    change(model)
    for _ in range(3):
        with pytest.raises(ConfigError, match=said):
            answer(ensemble)
        assert nothing_is_booked(ensemble)
    shutil.rmtree(model)
    shutil.copytree(manifest.source, model)
    answer(ensemble)
    assert total(ensemble).entries == 1


def test_a_model_that_cannot_answer_is_refused_before_anything_is_booked(
    ensemble: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token would be charged, and then fail."""

    def fail(*_: Any) -> None:
        raise RuntimeError("the size of tensor a must match")

    def nothing(*_: Any) -> torch.Tensor:
        return torch.full((2, 9), torch.nan)

    for law, said in ((fail, r"no law of a next token.*RuntimeError: the size of"), (nothing, "that is not finite")):
        with monkeypatch.context() as patched:
            patched.setattr("dptune.prediction.deployment.next_log_probabilities", law)
            with pytest.raises(ConfigError, match=said):
                answer(ensemble)
        assert nothing_is_booked(ensemble)


def test_a_slot_whose_numbers_are_not_finite_was_damaged(ensemble: Path) -> None:
    """Tuning leaves none that are not, so that this tells nothing of the records."""
    file = ensemble / "shard-001" / "adapter_model.safetensors"
    weights = load_file(file)
    next(iter(weights.values())).view(-1)[3] = torch.inf
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"shard-001/adapter_model\.safetensors holds numbers that are not finite"):
        answer(ensemble)
    assert nothing_is_booked(ensemble)


@pytest.mark.parametrize(
    ("place", "name", "when", "call", "entries"),
    [
        (Register, "add_answers", "before", 1, 0),
        (Register, "add_answers", "after", 1, 1),
        (Ledger, "_put", "before", 2, 1),
        (Ledger, "_put", "after", 2, 1),
    ],
)
def test_an_ensemble_that_is_killed_as_it_opens_counts_once(
    place: Any, name: str, when: str, call: int, entries: int, ensemble: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, real = ensemble.parents[1], getattr(place, name)
    for _ in range(2):
        calls: list[str] = []

        def die(*given: Any, calls: list[str] = calls, **named: Any) -> Any:
            calls.append(name)
            if len(calls) < call:
                return real(*given, **named)
            if when == "after":
                real(*given, **named)
            shutil.copytree(home, home.with_name("kept"))
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(place, name, die)
            with suppress(KeyboardInterrupt):
                answer(ensemble)
        if not calls or len(calls) < call:
            break  # the ledger has begun
        shutil.rmtree(home)  # what an exception tidies up stays where a process is killed
        home.with_name("kept").rename(home)
        assert len(register(ensemble)._read()[0]) == entries
        assert entries or not RunFolder(ensemble).has_begun, "its line comes first"
    answer(ensemble)
    assert total(ensemble).entries == 1
    assert [one["id"] for one in register(ensemble)._read()[0]] == [
        read_ledger(ensemble / "ledger.jsonl").header.run_id
    ]


def test_an_ensemble_whose_line_was_cut_off_counts_by_its_ledger_and_then_again(ensemble: Path) -> None:
    answer(ensemble, 3)
    register(ensemble).path.write_bytes(b"")
    (found,) = register(ensemble).earlier("people")
    assert (found.what, found.named, found.epsilon) == ("answers", False, pytest.approx(8))
    (fault,) = register(ensemble).faults()
    assert "what lies in one (once" in fault
    answer(ensemble)
    assert register(ensemble).faults() == []
    assert total(ensemble).epsilon == pytest.approx(8)
