"""Ledgers and certificates beside a register that no line of it names: each is named, and counts."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_certificate import RELEASE, certificate, header
from typer.testing import CliRunner

from dptune.cli import app
from dptune.core.errors import ConfigError
from dptune.core.files import NO_TIME, write_json
from dptune.privacy.certificate import write_certificate
from dptune.privacy.ledger import Ledger
from dptune.privacy.ledger_file import LedgerError, read_ledger
from dptune.privacy.release import Composition
from dptune.privacy.run_folder import CHARGES, RunFolder, set_aside
from dptune.privacy.run_header import RunHeader
from dptune.privacy.spent_budgets import booking
from dptune.privacy.spent_budgets.booking import booked, read_booking, write_booking
from dptune.privacy.spent_budgets.register import Register

PLAN: Composition = Counter({RELEASE: 40})
BUDGET = 8.0


def run(folder: Path, register: Path, releases: int = 40, *, end: bool = True, records: str = "people") -> RunHeader:
    """A run as ``dptune tune`` leaves it: booked when its ledger begins, with its settings beside it."""
    own = replace(header(), run_id=f"run in {folder.name}")
    write_json(RunFolder(folder).cell, {"kind": "run", "run_id": own.run_id, "salt": "00"})

    def count() -> None:
        Register(register).add_run(records, own, PLAN, folder=folder.name)

    with Ledger.create(
        RunFolder(folder).ledger, own, PLAN, lambda: booked(RunFolder(folder), records, register, count)
    ) as ledger:
        for _ in range(releases):
            ledger.charge(RELEASE)
        if end:
            ledger.finish()
    return own


def price(releases: int = 40) -> float:
    return header().price(Counter({RELEASE: releases})).certified


@pytest.fixture
def register(tmp_path: Path) -> Register:
    """The register of two runs that lie beside it."""
    for name in ("first", "second"):
        run(tmp_path / name, tmp_path / "spent.jsonl")
    return Register(tmp_path / "spent.jsonl")


def shown(register: Register, *options: str) -> Any:
    done = CliRunner().invoke(app, ["spent", str(register.path), "--json", *options])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_a_whole_register_finds_no_fault(register: Register) -> None:
    assert register.faults() == []
    assert [(total.entries, total.epsilon) for total in register.totals()] == [(2, pytest.approx(2 * price()))]
    assert [one.named for one in register.earlier("people")] == [True, True]
    assert shown(register)["faults"] == []
    assert "names" not in CliRunner().invoke(app, ["spent", str(register.path)]).stderr


def last_line_gone(path: Path) -> None:
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


def both_gone(path: Path) -> None:
    last_line_gone(path)
    last_line_gone(path)


CUTS: dict[str, tuple[Callable[[Path], None], str, int]] = {
    "last line": (last_line_gone, ": no line names what lies in second (once", 1),
    "both lines": (both_gone, " is empty: no line names what lies in first, second", 2),
    "all of it": (lambda path: os.truncate(path, 0), " is empty: no line names what lies in first, second", 2),
    "in a line": (lambda path: os.truncate(path, path.stat().st_size - 20), ": no line names what lies in second", 1),
    "removed": (lambda path: path.unlink(), " is missing: no line names what lies in first, second (2 times", 2),
}


@pytest.mark.parametrize("name", CUTS)
def test_a_cut_register_says_so_and_counts_what_the_ledgers_show(name: str, register: Register) -> None:
    cut, said, missing = CUTS[name]
    cut(register.path)
    (fault,) = register.faults()
    assert f"{register.path}{said}" in fault
    assert "It counts. Fix: `dptune spent" in fault
    earlier = register.earlier("people")
    assert sorted(one.epsilon for one in earlier) == pytest.approx([price()] * 2)
    assert sum(not one.named for one in earlier) == missing
    (total,) = register.totals()
    assert (total.entries, total.epsilon) == (2, pytest.approx(2 * price()))
    assert total.delta == pytest.approx(2 * header().delta)
    assert sorted(total.folders) == ["first", "second"]
    listed = shown(register)
    assert listed["faults"] == [fault]
    assert [one["entries"] for one in listed["totals"]] == [2]
    done = CliRunner().invoke(app, ["spent", str(register.path)])
    assert fault in done.stderr.replace("\n", " ")
    # Every start asks these.
    assert register.elsewhere("people") == [fault]
    assert fault in register.warnings("people", again=True)
    with pytest.raises(
        ConfigError, match=f"paid before .2 times.*, {missing} of them by ledgers that the register does"
    ):
        register.check("people", again=False)
    with pytest.raises(ConfigError, match=r"search\.again"):
        register.add_search("people", certificate(), again=False)
    assert register.earlier("others") == [], "their folders say whose records paid"


@pytest.mark.parametrize("name", CUTS)
def test_what_was_cut_off_can_be_written_again(name: str, register: Register) -> None:
    cut, _, missing = CUTS[name]
    cut(register.path)
    listed = shown(register, "--restore")
    assert listed["faults"] == register.faults() == []
    assert [(one["entries"], one["epsilon"]) for one in listed["totals"]] == [(2, pytest.approx(2 * price(), rel=1e-4))]
    assert all(one.named for one in register.earlier("people"))
    assert register.restore() == []
    lines = register.path.read_bytes()
    for folder in ("first", "second"):  # its command, run again, adds nothing either
        own = read_ledger(register.path.with_name(folder) / "ledger.jsonl").header
        register.add_run("people", own, PLAN, folder=folder)
    assert register.path.read_bytes() == lines
    assert missing == len([line for line in lines.splitlines() if b'"run in' in line]) - (2 - missing)


def test_a_damaged_register_says_what_the_ledgers_show(register: Register) -> None:
    register.path.write_bytes(register.path.read_bytes().replace(b",40]", b",20]"))
    for call in (register.totals, lambda: register.earlier("people"), register.faults, register.restore):
        with pytest.raises(
            LedgerError, match=r"line 2: was edited; the ledgers beside it show that records paid 2 times"
        ):
            call()
    register.path.rename(register.path.with_suffix(".damaged"))  # the fix without a copy
    assert register.totals()[0].entries == 2


def test_runs_that_have_not_ended_count_with_their_budget(tmp_path: Path) -> None:
    """As in their register: they may go on without another look at it."""
    register = Register(tmp_path / "spent.jsonl")
    run(tmp_path / "under way", register.path, 3, end=False)
    register.path.unlink()
    (one,) = register.earlier("people")
    assert one.epsilon == BUDGET > price(3)
    (fault,) = register.faults()
    assert "run the command of under way again, which counts what it finds" in fault
    assert "--restore" not in fault
    assert register.restore() == [], "its line would say less than its plan"


def test_a_ledger_without_a_release_has_cost_nothing(tmp_path: Path) -> None:
    register = Register(tmp_path / "spent.jsonl")
    run(tmp_path / "killed", register.path, 0, end=False)
    register.path.unlink()
    assert (register.totals(), register.faults(), register.earlier("people")) == ([], [], [])


def test_a_line_that_was_torn_in_a_ledger_was_never_charged(tmp_path: Path) -> None:
    register = Register(tmp_path / "spent.jsonl")
    run(tmp_path / "killed", register.path, 3)
    with (tmp_path / "killed" / "ledger.jsonl").open("rb+") as file:
        file.truncate(file.seek(0, 2) - 5)
    register.path.unlink()
    assert register.earlier("people")[0].epsilon == BUDGET


def test_ledgers_whose_records_nobody_names_count_for_all_of_them(register: Register, tmp_path: Path) -> None:
    (tmp_path / "first" / "booking.json").unlink()
    register.path.unlink()
    assert sorted(total.entries for total in register.totals()) == [1, 1]
    assert [one.folder for one in register.earlier("others")] == ["first"]
    assert {one.folder for one in register.earlier("people")} == {"first", "second"}
    (fault,) = register.faults()
    assert "--restore` names second again" in fault
    assert "restore a copy of it, or run the command of first again" in fault
    assert "move away what is of other records" in fault
    assert register.restore() == ["second"]


def test_a_copy_counts_once_and_with_the_most(register: Register, tmp_path: Path) -> None:
    shutil.copytree(tmp_path / "first", tmp_path / "a copy of what was half done")
    lines = (tmp_path / "first" / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "a copy of what was half done" / "ledger.jsonl").write_bytes(b"".join(lines[:5]))
    for name in ("a copy that ended early", "z"):
        shutil.copytree(tmp_path / "second", tmp_path / name)
        (tmp_path / name / "ledger.jsonl").unlink()
        own = read_ledger(tmp_path / "second" / "ledger.jsonl").header
        with Ledger.create(tmp_path / name / "ledger.jsonl", own, PLAN) as ledger:
            ledger.charge(RELEASE)
            ledger.finish()
    assert register.faults() == [], "the register names them"
    register.path.unlink()
    (total,) = register.totals()
    assert (total.entries, total.epsilon) == (2, pytest.approx(BUDGET + price()))


def test_copies_that_name_other_records_take_nothing_from_the_first(tmp_path: Path) -> None:
    """Nor does a copy that names none add to it, such as an adapter that was handed on."""
    path = tmp_path / "spent.jsonl"
    run(tmp_path / "z", path)
    path.unlink()
    for name, records in (("copy", "others"), ("handed on", "")):
        shutil.copytree(tmp_path / "z", tmp_path / name)
        (tmp_path / name / "booking.json").unlink()
        if records:
            write_booking(tmp_path / name, records, path)
    totals = Register(path).totals()
    assert len({total.records for total in totals}) == 2
    assert [(total.entries, total.epsilon) for total in totals] == [(1, price())] * 2
    shutil.rmtree(tmp_path / "copy")
    assert [(total.entries, total.epsilon) for total in Register(path).totals()] == [(1, price())]


@pytest.mark.parametrize("what", ["edited", "first line", "gone", "cut below its checkpoint", "a folder"])
def test_a_ledger_that_tells_nothing_any_more_has_no_bound(what: str, register: Register, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "first")
    whole = folder.ledger.read_bytes()
    folder.adapter.mkdir()
    if what == "edited":
        folder.ledger.write_bytes(whole.replace(b'"step":7', b'"step":8'))
    elif what == "first line":
        folder.ledger.write_bytes(whole.replace(b'"units":500', b'"units":5'))
    elif what == "cut below its checkpoint":
        folder.ledger.write_bytes(b"".join(whole.splitlines(keepends=True)[:5]))
        write_json(folder.result, {"releases": 40})
    else:
        folder.ledger.unlink()
        if what == "a folder":
            folder.ledger.mkdir()
    assert register.faults() == [], "its line counts what it planned"
    register.path.unlink()
    assert math.inf in [one.epsilon for one in register.earlier("people")]
    (fault,) = register.faults()
    assert "first" in fault
    assert register.restore() == ["second"], "nobody can say what it spent"
    assert math.inf in [one.epsilon for one in register.earlier("people")]


def test_what_another_register_counts_counts_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever that lies: the run's folder names it. It is told of, and counts here once it is not there."""
    monkeypatch.chdir(tmp_path)  # away from the register of a checkout that ran its study
    other, here = Register(tmp_path / "far" / "off.jsonl"), Register(tmp_path / "spent.jsonl")
    run(tmp_path / "first", other.path)
    assert here.faults() == []
    assert here.totals() == []
    assert here.others == [other.path]
    (told,) = here.elsewhere("people")
    assert told.startswith(f"{other.path} is another register, where these records paid too (once, ")
    assert here.elsewhere("others") == []
    other.path.unlink()
    assert [one.folder for one in here.earlier("people")] == ["first"]
    assert len(here.faults()) == 1
    here.add_run("people", replace(header(), run_id="run in first"), PLAN)
    assert here.faults() == []


def test_a_neighbour_of_a_ledger_that_names_it_is_asked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of an earlier version does not say where it counts: that is beside it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "project").mkdir()
    run(tmp_path / "project" / "first", tmp_path / "project" / "spent.jsonl")
    (tmp_path / "project" / "first" / "booking.json").unlink()
    register = Register(tmp_path / "spent.jsonl")
    assert register.faults() == []
    assert register.others == [tmp_path / "project" / "spent.jsonl"]
    last_line_gone(tmp_path / "project" / "spent.jsonl")
    assert len(register.faults()) == 1


def test_a_search_counts_by_its_certificate_wherever_that_lies(tmp_path: Path) -> None:
    register, one = Register(tmp_path / "spent.jsonl"), certificate()
    (tmp_path / "out").mkdir()
    write_booking(tmp_path / "out", "people", register.path)
    for place in (".out.searching", "out", "out/adapter"):
        folder = tmp_path / place
        folder.mkdir(parents=True, exist_ok=True)
        write_certificate(folder / "certificate.jsonl", one)
        if place.startswith("."):
            assert register.earlier("people") == [], "no candidate has begun"
            with Ledger.create(folder / "candidates" / "x" / "ledger.jsonl", header(search=one.id), PLAN) as ledger:
                ledger.charge(RELEASE)
        (found,) = register.earlier("people")
        assert (found.what, found.epsilon, found.id) == ("search", one.certified, one.id)
        with pytest.raises(ConfigError, match=r"search\.again.*once"):
            register.check("people", again=False)
        register.add_search("people", one, again=False)  # it is no other one
        assert register.faults() == []
        register.path.unlink()
        (folder / "certificate.jsonl").unlink()
    write_certificate(tmp_path / "out" / "certificate.jsonl", one)
    assert register.restore() == ["out"]
    (tmp_path / "out" / "certificate.jsonl").write_bytes(b"{}\n")
    assert register.faults() == [] or "out" in register.faults()[0]
    register.path.unlink()
    assert register.earlier("people")[0].epsilon == math.inf


def test_candidates_and_simulated_users_are_not_counted_one_by_one(tmp_path: Path) -> None:
    register, secret = Register(tmp_path / "spent.jsonl"), tmp_path / ".out.searching"
    folders = {
        secret / "candidates" / "one": header(search="abc"),
        tmp_path / "a candidate": header(search="abc"),
        tmp_path / "policy": replace(header(), unit="user"),
        tmp_path / "tenants": replace(header(), unit="tenant"),
    }
    for folder, own in folders.items():
        with Ledger.create(folder / "ledger.jsonl", own, PLAN) as ledger:
            ledger.charge(RELEASE)
    (alone,) = register.earlier("people")
    assert (alone.what, alone.id, alone.epsilon, alone.folder) == ("search", "abc", math.inf, "a candidate")
    write_certificate(secret / "certificate.jsonl", certificate())
    assert [one.epsilon for one in register.earlier("people")] == [certificate().certified]


@pytest.mark.parametrize("booked_too", [False, True])
def test_a_winner_that_lost_its_certificate_has_no_bound(booked_too: bool, tmp_path: Path) -> None:
    """It was chosen among others, and nothing says any more what that cost."""
    register, one = Register(tmp_path / "spent.jsonl"), certificate()
    if booked_too:
        write_booking(tmp_path / "out", "people", register.path)
    with Ledger.create(tmp_path / "out" / "adapter" / "ledger.jsonl", header(search=one.id), PLAN) as ledger:
        ledger.charge(RELEASE)
        ledger.finish()
    assert [(found.id, found.epsilon) for found in register.earlier("people")] == [(one.id, math.inf)]
    assert "out" in register.faults()[0] or "adapter" in register.faults()[0]
    assert register.restore() == [], "no line can say what it cost"
    register.add_search("people", one)
    assert [found.epsilon for found in register.earlier("people")] == [one.certified]
    assert register.faults() == []


@pytest.mark.parametrize("unit", ["user", "tenant"])
@pytest.mark.parametrize("said", ["settings", "booking"])
def test_a_cell_whose_column_is_called_like_a_simulated_unit_counts(unit: str, said: str, tmp_path: Path) -> None:
    register, folder = Register(tmp_path / "spent.jsonl"), tmp_path / "runs" / "one"
    if said == "settings":
        write_json(RunFolder(folder).cell, {"experiment": "grid", "mechanism": "static"})
    else:
        write_booking(folder, "people", register.path)
    with Ledger.create(RunFolder(folder).ledger, replace(header(), unit=unit), PLAN) as ledger:
        ledger.charge(RELEASE)
        ledger.finish()
    assert [(one.unit, one.epsilon) for one in register.earlier("people")] == [(unit, price(1))]


def test_a_booking_that_says_the_same_is_left_as_it_is(tmp_path: Path) -> None:
    """A finished search is booked whenever it is loaded, and none of its files may bear a time."""
    write_booking(folder := tmp_path / "run", "people", tmp_path / "spent.jsonl")
    os.utime(file := RunFolder(folder).booking, (NO_TIME, NO_TIME))
    write_booking(folder, "people", tmp_path / "spent.jsonl")
    assert file.stat().st_mtime == NO_TIME
    write_booking(folder, "others", tmp_path / "spent.jsonl")
    booking = read_booking(folder)
    assert booking is not None
    assert booking.records == "others"


def test_a_run_in_a_hidden_folder_counts(tmp_path: Path) -> None:
    run(tmp_path / ".run", tmp_path / "spent.jsonl")
    (tmp_path / "spent.jsonl").unlink()
    assert [one.epsilon for one in Register(tmp_path / "spent.jsonl").earlier("people")] == [price()]


def cell(folder: Path, releases: int, *, end: bool) -> RunHeader:
    own = replace(header(), run_id=folder.name)
    write_json(RunFolder(folder).cell, {"experiment": "grid", "mechanism": "static"})
    write_booking(folder, "people", folder.parents[1] / "spent.jsonl")
    with Ledger.create(RunFolder(folder).ledger, own, PLAN) as ledger:
        for _ in range(releases):
            ledger.charge(RELEASE)
        if end:
            ledger.finish()
    return own


def test_cells_that_have_not_ended_count_and_are_no_fault(tmp_path: Path) -> None:
    """They are in the register from their end on; a study that is under way is no reason to refuse a search."""
    register = Register(tmp_path / "spent.jsonl")
    cell(tmp_path / "runs" / "one", 7, end=False)
    (found,) = register.earlier("people")
    assert (found.what, found.study, found.epsilon) == ("cell", "grid", pytest.approx(price(7)))
    assert register.faults() == []
    register.check("people", again=False)
    cell(tmp_path / "runs" / "two", 9, end=True)
    (fault,) = register.faults()
    assert "what lies in two (once" in fault
    assert register.restore() == ["two"]
    (total,) = register.totals()
    assert [(part.study, part.entries) for part in total.parts] == [("grid", 2)]
    assert total.epsilon == pytest.approx(price(7) + price(9))


def test_a_cell_of_an_earlier_version_is_kept(tmp_path: Path) -> None:
    cell(tmp_path / "runs" / "one", 9, end=True)
    (tmp_path / "runs" / "one" / "booking.json").unlink()
    (fault,) = Register(tmp_path / "spent.jsonl").faults()
    assert "Fix: keep one, whose ledgers count where they lie; move away what is of other records" in fault


def test_a_cell_whose_larger_line_was_cut_off_counts_by_its_ledger(tmp_path: Path) -> None:
    register = Register(tmp_path / "spent.jsonl")
    own = cell(tmp_path / "runs" / "one", 30, end=True)
    whole = read_ledger(tmp_path / "runs" / "one" / "ledger.jsonl")
    for releases in (10, 30):
        register.add_cell("people", "grid", replace(whole, composition=Counter({RELEASE: releases})))
    assert own.run_id == register.earlier("people")[0].id
    last_line_gone(register.path)
    assert register.totals()[0].epsilon == pytest.approx(price(30))
    assert register.earlier("people")[0].epsilon == pytest.approx(price(30))


def test_a_ledger_is_looked_for_where_runs_lie(tmp_path: Path) -> None:
    places = ("first", "runs/one", "search/two", "search/two/ranking/three", "policy/rlhf/four", ".")
    for number, place in enumerate(places):
        with Ledger.create(tmp_path / place / "ledger.jsonl", header(run_id=str(number)), PLAN) as ledger:
            ledger.charge(RELEASE)
    assert Register(tmp_path / "spent.jsonl").totals()[0].entries == len(places)
    for place in ("venv/one", ".git/one", "a/b/c"):
        (tmp_path / place).mkdir(parents=True)
        shutil.copy(tmp_path / "first" / "ledger.jsonl", tmp_path / place)
    (tmp_path / "venv" / "pyvenv.cfg").touch()
    found = [one.folder for one in booking.ledgers_beside([tmp_path])]
    assert sorted(str(path.relative_to(tmp_path)) for path in found) == sorted(places)


def test_a_register_elsewhere_looks_beside_the_run_that_starts_too(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    register = Register.beside(tmp_path / "runs" / "second", tmp_path / "far" / "spent.jsonl")
    run(tmp_path / "runs" / "first", register.path)
    last_line_gone(register.path)
    assert len(register.faults()) == 1
    assert Register(register.path).faults() == [], "it lies elsewhere"


def test_a_home_directory_is_not_walked_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(booking, "MOST", 5)
    for number in range(20):
        (tmp_path / str(number)).mkdir()
    assert 3 <= len(list(booking._folders([tmp_path]))) <= 5


def test_links_are_followed_once(register: Register, tmp_path: Path) -> None:
    (tmp_path / "first" / "loop").symlink_to(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "second")
    register.path.unlink()
    assert register.totals()[0].entries == 2


def test_a_run_that_was_set_aside_is_still_named(register: Register, tmp_path: Path) -> None:
    set_aside(tmp_path / "first")
    assert register.faults() == []
    last_line_gone(register.path)
    last_line_gone(register.path)
    assert "first.set-aside-1, second" in register.faults()[0]
    assert read_booking(tmp_path / "first.set-aside-1") == read_booking(tmp_path / "second")


def test_a_run_that_begins_while_the_register_is_read_is_no_fault(
    register: Register, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its line is there before its ledger: so ledgers are looked for first."""
    read = Register._read

    def begun(own: Register) -> Any:
        found = read(own)
        if not (tmp_path / "third").exists():
            run(tmp_path / "third", register.path)
        return found

    monkeypatch.setattr(Register, "_read", begun)
    assert register.faults() == []


def test_a_folder_that_nobody_may_read_stops_nobody(register: Register, monkeypatch: pytest.MonkeyPatch) -> None:
    scan = os.scandir

    def refused(folder: Any) -> Any:
        if str(folder).endswith("first"):
            raise PermissionError(13, "Permission denied")
        return scan(folder)

    monkeypatch.setattr(os, "scandir", refused)
    assert register.totals()[0].entries == 2


def test_a_damaged_booking_is_no_reason_to_forget_a_ledger(register: Register, tmp_path: Path) -> None:
    (tmp_path / "first" / "booking.json").write_text("{}")
    register.path.unlink()
    assert {one.folder for one in register.earlier("people")} == {"first", "second"}


@pytest.mark.parametrize("name", ["cell.json", "booking.json", "result.json", "served.json"])
def test_files_of_a_run_that_are_no_json_stop_nobody(name: str, register: Register, tmp_path: Path) -> None:
    (tmp_path / "first" / name).write_bytes(b"\xff{")
    register.path.unlink()
    assert {one.folder for one in register.earlier("people")} == {"first", "second"}


def test_the_settings_of_a_run_say_that_it_has_a_ledger(tmp_path: Path) -> None:
    run(tmp_path / "first", tmp_path / "spent.jsonl")
    assert RunFolder(tmp_path / "first").settings[CHARGES] is True
    (tmp_path / "first" / "ledger.jsonl").unlink()
    Register(tmp_path / "spent.jsonl").path.unlink()
    assert Register(tmp_path / "spent.jsonl").earlier("people")[0].epsilon == math.inf


def test_a_link_to_nothing_in_a_runs_folder_is_no_fault_of_the_next_run(register: Register, tmp_path: Path) -> None:
    before = shown(register)
    (tmp_path / "first" / "model.gguf").symlink_to(tmp_path / "nothing")
    run(tmp_path / "third", tmp_path / "elsewhere.jsonl")
    (tmp_path / "third" / "gone").symlink_to(tmp_path / "nothing")
    assert register.earlier("people") == register.earlier("people")
    assert shown(register) != before, "the third one counts"
