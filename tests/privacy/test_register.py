"""The register's file: two at once, cut lines, full disks, other readers."""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_certificate import RELEASE, certificate, header
from typer.testing import CliRunner

from dptune.cli import app
from dptune.core.digits import at_most
from dptune.core.errors import ConfigError
from dptune.core.files import locked
from dptune.privacy.accounting.renyi_filter import RenyiFilter
from dptune.privacy.certificate import write_certificate, write_winner
from dptune.privacy.ledger_file import LedgerContents, LedgerError
from dptune.privacy.release import Composition, Release
from dptune.privacy.run_header import RunHeader
from dptune.privacy.spent_budgets.register import Register, said


def test_of_two_searches_that_start_together_one_is_refused(tmp_path: Path) -> None:
    """Both saw a register without an entry; the check is made again under the lock."""

    def start(number: int) -> bool:
        register = Register(tmp_path / "spent.jsonl")
        try:
            register.add_search("people", certificate(id=str(number)), again=False)
        except ConfigError:
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(start, range(8))) == [False] * 7 + [True]
    assert Register(tmp_path / "spent.jsonl").totals()[0].entries == 1


def test_a_search_that_goes_on_is_not_refused_for_itself(tmp_path: Path) -> None:
    register = Register(tmp_path / "spent.jsonl")
    for _ in range(2):
        register.add_search("people", certificate(), again=False)
    assert register.totals()[0].entries == 1


@pytest.mark.parametrize("kept", [0, 1, 50, -2])
def test_a_line_that_was_cut_off_was_never_acknowledged(kept: int, tmp_path: Path) -> None:
    """After a crash in the middle of any write, the next one is whole, and nothing acknowledged is lost."""
    register = Register(tmp_path / "spent.jsonl")
    register.path.touch(0o600)  # killed before the first line
    register.add_search("people", certificate())
    before = register.path.read_bytes()
    register.add_run("people", header(), Counter({RELEASE: 40}))
    line = register.path.read_bytes()[len(before) :]
    register.path.write_bytes(before + line[:kept])
    assert register.totals()[0].entries == 1
    register.add_run("people", header(), Counter({RELEASE: 40}))
    assert register.totals()[0].entries == 2
    assert register.path.read_bytes().startswith(before)


def test_a_last_line_that_an_editor_left_without_its_newline_counts_and_is_completed(tmp_path: Path) -> None:
    register = Register(tmp_path / "spent.jsonl")
    for number in range(3):  # the first line of all is the register's own
        if number:
            register.add_search("people", certificate(id=str(number)))
        else:
            register.add_search("others", certificate())
        whole = register.path.read_bytes()
        register.path.write_bytes(whole.removesuffix(b"\n"))
        assert len(register.earlier("people")) == number
    register.add_search("people", certificate(id="2"))
    assert register.path.read_bytes() == whole[:-1], "nothing was to be added"
    register.add_search("people", certificate(id="3"))
    assert register.path.read_bytes().startswith(whole)
    assert [one.id for one in register.earlier("people")] == ["1", "2", "3"]
    (tmp_path / "born").mkdir()
    born = Register(tmp_path / "born" / "spent.jsonl")
    born.path.write_bytes(whole.splitlines()[0])
    born.path.chmod(0o600)
    born.add_search("people", certificate(id="1"))
    assert [one.id for one in born.earlier("people")] == ["1"], "its key is kept"
    assert born.path.read_bytes().startswith(whole.splitlines(keepends=True)[0])


def test_a_last_line_that_was_edited_is_refused_with_its_newline_or_without(tmp_path: Path) -> None:
    """A line that is whole JSON was no write that was cut off; taken for one, the next write would remove it."""
    register = Register(tmp_path / "spent.jsonl")
    register.add_run("people", header(), Counter({RELEASE: 40}))
    whole = register.path.read_bytes()
    edited = whole.replace(b",40]]", b",20]]")
    assert edited != whole
    for content in (edited, edited.removesuffix(b"\n"), whole.removesuffix(b"\n") + b" "):
        register.path.write_bytes(content)
        for call in (register.totals, lambda: register.add_search("people", certificate())):
            with pytest.raises(LedgerError, match="line 2: was edited"):
                call()
        assert register.path.read_bytes() == content


def test_short_writes_are_finished_and_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register, write = Register(tmp_path / "spent.jsonl"), os.write
    monkeypatch.setattr(os, "write", lambda file, line: write(file, line[:100]))
    register.add_search("people", certificate())
    assert register.totals()[0].entries == 1

    def full(file: int, line: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(LedgerError, match=r"spent\.jsonl: cannot be written \(No space left on device\)\. Fix: "):
        register.add_search("people", certificate(id="second"))
    assert register.totals()[0].entries == 1


def test_a_register_that_others_can_read_is_refused(tmp_path: Path) -> None:
    register = Register(tmp_path / "spent.jsonl")
    register.add_search("people", certificate())
    register.path.chmod(0o640)
    for call in (register.totals, lambda: register.add_search("people", certificate(id="second"))):
        with pytest.raises(ConfigError, match="can be read by others"):
            call()


def test_each_register_has_a_key_of_its_own(tmp_path: Path) -> None:
    digests = set()
    for name in ("one", "other"):
        register = Register(tmp_path / name / "spent.jsonl")
        register.add_search("people", certificate())
        digests.add(register.totals()[0].records)
    assert len(digests) == 2
    assert "people" not in digests


def test_every_line_is_on_disk_before_anything_relies_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, folders, sync = set(), set(), os.fsync

    def look(descriptor: int) -> None:
        found = os.fstat(descriptor)
        synced.add((found.st_ino, found.st_size))
        folders.update([found.st_ino] if stat.S_ISDIR(found.st_mode) else [])
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", look)
    register, path = Register(tmp_path / "spent.jsonl"), tmp_path / "certificate.jsonl"
    for write in (
        lambda: register.add_search("people", certificate()),
        lambda: register.add_run("people", header(), Counter({RELEASE: 40})),
        lambda: write_certificate(path, certificate()),
        lambda: write_winner(path, None),
    ):
        folders.clear()
        write()
        assert tmp_path.stat().st_ino in folders, "a file without a name is lost"
        for file in (register.path, path):
            assert not file.exists() or (file.stat().st_ino, file.stat().st_size) in synced


def test_the_name_of_a_register_behind_a_link_is_on_disk_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a copy of a checkout the register is a link: its own folder's entries change nothing."""
    real, sync, folders = tmp_path / "kept", os.fsync, set()
    real.mkdir()
    (tmp_path / "spent.jsonl").symlink_to(real / "spent.jsonl")

    def look(descriptor: int) -> None:
        folders.add(os.fstat(descriptor).st_ino)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", look)
    Register(tmp_path / "spent.jsonl").add_search("people", certificate())
    assert (real / "spent.jsonl").exists()
    assert real.stat().st_ino in folders


def test_a_line_waits_for_who_writes_one(tmp_path: Path) -> None:
    register = Register(tmp_path / "spent.jsonl")
    with ThreadPoolExecutor(1) as pool:
        with locked(tmp_path / ".spent.jsonl.lock"):
            waiting = pool.submit(register.add_search, "people", certificate())
            with pytest.raises(TimeoutError):
                waiting.result(timeout=0.3)
            assert not register.path.exists()
        waiting.result(timeout=60)
    assert register.totals()[0].entries == 1


def test_what_was_paid_is_the_sum_of_all_entries(tmp_path: Path) -> None:
    register = Register(tmp_path / "spent.jsonl")
    for number in range(3):
        register.add_search("people", certificate(id=str(number)))
    price = certificate().certified
    assert said(register.earlier("people")) == f"3 times, together epsilon {at_most(3 * price, 4)} at delta 3e-05"
    assert said(register.earlier("people", besides=["1"])).startswith("2 times, ")
    assert said(register.earlier("others")).startswith("0 times, ")


def test_a_sum_of_deltas_is_rounded_up(tmp_path: Path) -> None:
    register = Register(tmp_path / "spent.jsonl")
    register.add_search("people", certificate(delta=1.0001e-5))
    assert said(register.earlier("people")).endswith(" at delta 1.01e-05")


def test_a_run_that_planned_nothing_has_no_price(tmp_path: Path) -> None:
    register = Register(tmp_path / "spent.jsonl")
    register.add_run("people", header(), Counter())
    assert register.totals()[0].epsilon == math.inf


def test_what_another_version_wrote_counts_without_bound_and_stops_nobody(tmp_path: Path) -> None:
    register = Register(tmp_path / "spent.jsonl")
    register.add_run("rows", header(), Counter([RELEASE]))
    content = {"header": header().to_dict() | {"run_id": "later"}, "releases": [[{"noise": "of tomorrow"}, 1]]}
    register._add("rows", "run", "later", content)
    known, unknown = (one.epsilon for one in register.earlier("rows"))
    assert 0 < known < unknown == math.inf
    (total,) = register.totals()
    assert (total.entries, total.epsilon) == (2, math.inf)


def test_a_search_of_another_version_counts_without_bound(tmp_path: Path) -> None:
    register = Register(tmp_path / "spent.jsonl")
    line = certificate().to_dict()
    register._add("rows", "search", "later", line | {"score": line["score"] | {"of tomorrow": 1}})
    assert [one.epsilon for one in register.earlier("rows")] == [math.inf]
    with pytest.raises(ConfigError, match=r"search.again.*epsilon ∞"):
        register.check("rows", again=False)


def test_the_command_adds_up_all_units_too(tmp_path: Path) -> None:
    register = Register(tmp_path / "spent.jsonl")
    for number, unit in enumerate(("record", "customer")):
        register.add_search("people", certificate(id=str(number), unit=unit))
    told = CliRunner().invoke(app, ["spent", str(register.path)]).stdout
    assert "what is one record and one customer alike" in told
    listed = json.loads(CliRunner().invoke(app, ["spent", str(register.path), "--json"]).stdout)
    assert [one["entries"] for one in listed["totals"]] == [1, 1]
    assert [one["entries"] for one in listed["all_units"]] == [2]


def test_all_units_of_the_same_records_add_up_too(tmp_path: Path) -> None:
    """Searches by record and searches by customer both cost the customer, so their prices are added."""
    register = Register(tmp_path / "spent.jsonl")
    register.add_search("people", certificate())
    register.add_search("others", certificate(id="others"))
    register.add_search("people", certificate(id="second", unit="customer"))
    assert {(one.unit, one.entries) for one in register.totals()} == {("record", 1), ("customer", 1)}
    (whole,) = register.of_all_units()
    # Of a customer with many records, what was paid by records says nothing.
    assert (whole.unit, whole.entries) == ("what is one record and one customer alike", 2)
    assert whole.epsilon == pytest.approx(2 * certificate().certified)
    assert whole.delta == pytest.approx(2 * certificate().delta)


def test_a_run_with_a_filter_counts_as_its_budget(tmp_path: Path) -> None:
    """Its plan is no price: it may move its noise until the budget is spent."""
    for number, chosen in enumerate((None, RenyiFilter(4.0, 4.0))):
        register = Register(tmp_path / str(number) / "spent.jsonl")
        register.add_run("people", header(renyi_filter=chosen), Counter({RELEASE: 1}))
        assert (register.totals()[0].epsilon == 8.0) is (chosen is not None)


OTHER = Release(0.04, 1.8)
TOKENS = Counter({Release.of_token(3.0, 0.1): 20})


def answering(run_id: str = "ensemble") -> RunHeader:
    return replace(header(), mechanism="pmixed", published_accountant="pmixed", unit="shard", run_id=run_id)


@pytest.mark.parametrize("what", ["run", "cell", "answers"])
def test_the_same_entry_with_more_releases_replaces_the_smaller_and_never_the_other_way(
    what: str, tmp_path: Path
) -> None:
    """A run that was booked and went on has spent what it released since."""
    register, one = Register(tmp_path / "spent.jsonl"), header()

    def add(releases: Composition) -> float:
        book(register, what, one, releases)
        (total,) = register.totals()
        (known,) = register.earlier("people")
        assert (total.entries, total.epsilon, known.what) == (1, known.epsilon, what)
        return total.epsilon

    def price(releases: Composition) -> float:
        return one.price(releases).certified

    many, few, both = Counter({RELEASE: 60}), Counter({RELEASE: 40}), Counter({RELEASE: 60, OTHER: 5})
    assert add(few) == price(few)
    assert add(many) == add(few) == add(many) == price(many) > price(few)
    lines = register.path.read_bytes()
    assert add(few) == price(many)
    assert register.path.read_bytes() == lines, "nothing was added"
    assert add(Counter({RELEASE: 50, OTHER: 5})) == price(both), "of each kind the most"
    assert register.path.read_bytes().startswith(lines), "what was written stays"
    assert add(Counter()) == price(both)


def book(register: Register, what: str, one: RunHeader, releases: Composition) -> None:
    if what == "run":
        register.add_run("people", one, releases)
    elif what == "answers":
        register.add_answers("people", one, releases)
    elif releases:
        register.add_cell("people", "grid", LedgerContents(one, releases, releases.total(), "chain", complete=False))
    else:
        register.add_lost_cell("people", "grid", one)


@pytest.mark.parametrize("what", ["run", "cell", "answers"])
@pytest.mark.parametrize(
    "dearer", [{"leaks": ("a seed",), "accounting": "published"}, {"inherited": ((OTHER, 30),)}, {"delta": 1e-8}]
)
def test_of_two_headers_of_one_entry_the_dearer_counts_in_any_order(
    dearer: dict[str, Any], what: str, tmp_path: Path
) -> None:
    releases = Counter({RELEASE: 40})
    cheap, more = header(), Counter({RELEASE: 41})
    dear = replace(cheap, **dearer)
    assert dear.price(releases).certified > cheap.price(more).certified
    for name, order in (("up", (cheap, dear, cheap)), ("down", (dear, cheap, dear))):
        register = Register(tmp_path / name / "spent.jsonl")
        for one in order:
            book(register, what, one, releases)
        for _ in range(2):
            (total,) = register.totals()
            assert (total.entries, total.epsilon) == (1, dear.price(releases).certified)
            assert register.earlier("people")[0].epsilon == total.epsilon
            assert len(register.path.read_text().splitlines()) == (3 if name == "up" else 2)
        book(register, what, cheap, more)
        assert register.totals()[0].epsilon == dear.price(more).certified == register.earlier("people")[0].epsilon


@pytest.mark.parametrize("what", ["run", "cell", "answers"])
def test_of_two_headers_that_nothing_bounds_the_larger_delta_counts_in_any_order(what: str, tmp_path: Path) -> None:
    small = replace(header(), accounting="published", leaks=("a seed",))
    large, releases = replace(small, delta=1e-3), Counter({RELEASE: 40})
    for name, order in (("up", (small, large)), ("down", (large, small))):
        register = Register(tmp_path / name / "spent.jsonl")
        for one in order:
            book(register, what, one, releases)
        assert [(total.epsilon, total.delta) for total in register.totals()] == [(math.inf, 1e-3)]


def test_headers_that_differ_by_no_price_add_nothing(tmp_path: Path) -> None:
    register, one = Register(tmp_path / "spent.jsonl"), header()
    for telemetry in ("research", "private"):
        register.add_run("people", replace(one, telemetry=telemetry), Counter({RELEASE: 40}))
    assert len(register.path.read_text().splitlines()) == 2


def test_an_entry_that_nothing_bounds_stays_so(tmp_path: Path) -> None:
    register = Register(tmp_path / "spent.jsonl")
    for releases in (Counter[Release](), Counter({RELEASE: 1})):
        register.add_answers("people", header(), releases)
        assert register.totals()[0].epsilon == math.inf


def test_the_same_run_under_other_records_counts_there_too(tmp_path: Path) -> None:
    register, one = Register(tmp_path / "spent.jsonl"), header()
    for records in ("people", "others", "people"):
        register.add_run(records, one, Counter({RELEASE: 40}))
    assert [total.entries for total in register.totals()] == [1, 1]
    assert len(register.earlier("others")) == 1


@pytest.mark.parametrize("what", ["run", "cell", "answers"])
def test_every_kind_of_release_has_its_price(what: str, tmp_path: Path) -> None:
    register, one, releases = Register(tmp_path / "spent.jsonl"), header(), Counter({RELEASE: 40, OTHER: 30})
    book(register, what, one, releases)
    expected = one.price(releases).certified
    assert register.totals()[0].epsilon == expected
    assert expected > max(one.price(Counter({release: count})).certified for release, count in releases.items()) * 1.05


def test_answers_count_once_with_their_whole_budget(tmp_path: Path) -> None:
    register = Register(tmp_path / "spent.jsonl")
    for _ in range(2):
        register.add_answers("people", answering(), TOKENS)
    (total,) = register.totals()
    assert (total.entries, total.unit) == (1, "shard")
    assert total.epsilon == answering().price(TOKENS).certified
    assert 2 < total.epsilon < 8
    told = CliRunner().invoke(app, ["spent", str(register.path)]).stdout
    assert re.search(rf"ensembles that answer +│ 1, epsilon {total.epsilon:.4g}", told)
    with pytest.raises(ConfigError, match=r"search\.again.*once, epsilon"):
        register.add_search("people", certificate(), again=False)


def test_another_register_of_the_same_records_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a key of its own; what is on disk cannot be compared, and who has the records can."""
    monkeypatch.chdir(tmp_path)
    here, pipeline = Register(Path("spent.jsonl")), Register(Path("data/spent.jsonl"))
    here.add_run("people", header(), Counter({RELEASE: 40}))
    assert (here.others, pipeline.others) == ([], [Path("spent.jsonl")])
    assert Register(tmp_path / "spent.jsonl").others == []
    price = here.totals()[0].epsilon
    (told,) = pipeline.elsewhere("people")
    assert told.startswith(f"spent.jsonl is another register, where these records paid too (once, epsilon {price:.4g} ")
    assert pipeline.warnings("people", again=False) == [told]
    assert pipeline.elsewhere("others") == []
    pipeline.add_search("people", certificate(), again=False)
    assert len(here.elsewhere("people")) == len(pipeline.elsewhere("people")) == 1
    for register, other in ((here, "data/spent.jsonl"), (pipeline, "spent.jsonl")):
        told = CliRunner().invoke(app, ["spent", str(register.path)]).stdout
        assert f"What {other} counts of the same records comes on top" in told
    here.path.chmod(0o644)
    assert "can be read by others" in pipeline.elsewhere("people")[0], "a register elsewhere stops nobody"


def test_a_register_of_another_user_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Register(Path("spent.jsonl")).add_run("people", header(), Counter({RELEASE: 40}))
    pipeline = Register(Path("data/spent.jsonl"))

    def refused(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    for names in (["read_bytes"], ["is_file", "exists"]):
        with monkeypatch.context() as patched:
            for name in names:
                patched.setattr(Path, name, refused)
            told = pipeline.elsewhere("people")[0]
        unknown = "its entries about these records cannot be read: [Errno 13] Permission denied"
        assert told == f"spent.jsonl is another register, and {unknown}"


def test_other_places_are_looked_at_once_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mine, own = Register(Path("mine.jsonl")), Register(tmp_path / "spent.jsonl")
    own.add_run("people", header(), Counter({RELEASE: 40}))
    assert len(mine.elsewhere("people", own.path, tmp_path / "none.jsonl", tmp_path / "mine.jsonl")) == 1
    (tmp_path / "far").mkdir()
    monkeypatch.chdir(tmp_path / "far")
    assert mine.elsewhere("people") == []
    assert len(mine.elsewhere("people", own.path)) == 1


@pytest.mark.parametrize("mode", [0o640, 0o620, 0o610, 0o604, 0o602, 0o601])
def test_a_register_that_is_open_to_others_in_any_way_is_refused(mode: int, tmp_path: Path) -> None:
    register = Register(tmp_path / "spent.jsonl")
    register.add_search("people", certificate())
    register.path.chmod(mode)
    with pytest.raises(ConfigError, match="can be read by others"):
        register.totals()


def test_a_record_in_a_shard_pays_for_the_ensemble_too_and_the_reader_is_told_which_line_says_so(
    tmp_path: Path,
) -> None:
    register, releases = Register(tmp_path / "spent.jsonl"), Counter({RELEASE: 40})
    run = header()
    register.add_run("people", run, releases)
    told = CliRunner().invoke(app, ["spent", str(register.path)]).stdout
    assert "copied half-way and finished twice has one id and counts once" in re.sub(r"\s+", " ", told)
    assert "shard" not in told
    register.add_answers("people", answering(), TOKENS)
    assert [(one.unit, one.entries) for one in register.totals()] == [("record", 1), ("shard", 1)]
    (whole,) = register.of_all_units()
    assert (whole.unit, whole.entries) == ("what is one record, and lies in one shard", 2)
    prices = run.price(releases).certified, answering().price(TOKENS).certified
    assert (whole.epsilon, whole.delta) == (pytest.approx(sum(prices)), pytest.approx(run.delta + answering().delta))
    assert [part.what for part in whole.parts] == ["run", "answers"]
    register.add_search("people", certificate(unit="customer"))
    assert register.of_all_units()[0].unit == "what is one record and one customer alike, and lies in one shard"
    said_so = re.sub(r"\s+", " ", CliRunner().invoke(app, ["spent", str(register.path)]).stdout)
    assert "whose unit is a shard is not in the line of records" in said_so


def test_the_deltas_of_answers_add_up_too(tmp_path: Path) -> None:
    register, own = Register(tmp_path / "spent.jsonl"), replace(answering(), unit="record", delta=3e-6)
    register.add_run("people", header(), Counter({RELEASE: 40}))
    register.add_answers("people", own, TOKENS)
    (total,) = register.totals()
    assert (total.entries, total.delta) == (2, pytest.approx(1e-5 + 3e-6))
