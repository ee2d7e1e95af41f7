"""The certificate of a search, and the register of what was published: both price themselves, edits are refused."""

from __future__ import annotations

import json
import math
import os
import stat
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dptune.cli import app
from dptune.core.errors import ConfigError
from dptune.privacy.accounting.loss_profile import gaussian_profile, profile_of
from dptune.privacy.certificate import (
    ScoreTerms,
    SearchCertificate,
    Winner,
    commitment_of,
    discard_torn_line,
    exceeds,
    read_certificate,
    write_certificate,
    write_winner,
)
from dptune.privacy.ledger import Ledger
from dptune.privacy.ledger_file import LedgerError, encode, read_ledger, seal
from dptune.privacy.release import Release
from dptune.privacy.run_header import RunHeader
from dptune.privacy.selection import selection_epsilon
from dptune.privacy.selection_law import SelectionLaw
from dptune.privacy.spent_budgets.register import Register

DELTA = 1e-5
RELEASE = Release(0.02, 1.2)


def certificate(**changes: Any) -> SearchCertificate:
    values: dict[str, Any] = {
        "id": "abc",
        "epsilon": 2.0,
        "delta": DELTA,
        "unit": "record",
        "units": 500,
        "data": "own",
        "telemetry": "private",
        "law": SelectionLaw.of(3, 2),
        "bound": "hull",
        "space": [{"weight": 1.0, "batch": [8, 16]}],
        "kinds": ((0.5, ((RELEASE, 40),)), (0.5, ((Release(0.04, 1.8), 40),))),
        "score": ScoreTerms("held_out", 1.0, 3.0, 100),
        "commitment": commitment_of(b"salt", {"candidates": []}),
    }
    return SearchCertificate(**(values | changes))


def header(**changes: Any) -> RunHeader:
    return RunHeader("static", "gdp_clt", "certified", 8.0, DELTA, "record", 500, **changes)


def test_a_certificate_comes_back_and_names_its_winner(tmp_path: Path) -> None:
    path, found = tmp_path / "certificate.jsonl", certificate()
    write_certificate(path, found)
    assert read_certificate(path) == found
    assert not read_certificate(path).complete
    assert path.stat().st_mode & 0o777 == 0o600
    winner = Winner({"batch": 8}, "d" * 64, "c" * 64, 0.25)
    write_winner(path, winner)
    assert read_certificate(path).winner == winner
    with pytest.raises(LedgerError, match="ended"):
        write_winner(path, None)
    with pytest.raises(LedgerError, match="exists"):
        write_certificate(path, found)


def test_a_search_without_a_winner_says_so(tmp_path: Path) -> None:
    write_certificate(path := tmp_path / "certificate.jsonl", certificate())
    write_winner(path, None)
    assert read_certificate(path).complete
    assert read_certificate(path).winner is None


def test_the_dearer_side_is_certified() -> None:
    law = SelectionLaw.of(3, 2)
    score = selection_epsilon(gaussian_profile(1 / 1.5), law, DELTA)
    assert certificate(score=ScoreTerms("held_out", 1.0, 1.5, 100)).certified == pytest.approx(score)
    quiet = certificate(score=ScoreTerms("held_out", 1.0, 1e4, 100)).certified
    assert quiet < score
    assert certificate(score=ScoreTerms("public", 0.0, 0.0, 10)).certified == pytest.approx(quiet)


def test_a_score_over_training_units_composes_with_their_training() -> None:
    one = certificate(kinds=((1.0, ((RELEASE, 40),)),), score=ScoreTerms("train", 1.0, 5.0, 500))
    both = profile_of(Counter({RELEASE: 40, Release(1.0, 5.0): 1}))
    assert one.certified == pytest.approx(selection_epsilon(both, one.law, DELTA), rel=1e-9)


def test_a_candidate_may_release_what_its_kind_holds_and_no_more() -> None:
    kind = ((RELEASE, 40),)
    assert not exceeds(Counter({RELEASE: 40}), kind)
    assert not exceeds(Counter({replace(RELEASE, statistics=("gradient sum", "count")): 7}), kind)
    for other in (Counter({RELEASE: 41}), Counter({replace(RELEASE, noise_multiplier=1.1): 1})):
        assert exceeds(other, kind)
    assert exceeds(Counter({replace(RELEASE, raw_inputs=("loss",)): 1}), kind)


def test_leaks_void_a_search_and_one_shift_costs_more() -> None:
    assert certificate(leaks=("fixed seed",)).certified == math.inf
    assert certificate(bound="one_shift").certified > certificate().certified > certificate().one_candidate


@pytest.mark.parametrize(
    "edit",
    [
        {"epsilon": 1.0},
        {"delta": 0.1},
        {"commitment": ""},
        {"law": {"shape": 2.0, "rate": 0.999, "most": 48}},
        {"law": {"shape": 2.0, "rate": 1.0, "most": 1}},
        {"kinds": []},
        {"space": []},
        {"unknown": 1},
    ],
)
def test_an_edited_line_is_refused(edit: dict[str, Any], tmp_path: Path) -> None:
    write_certificate(path := tmp_path / "certificate.jsonl", certificate())
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | edit, sort_keys=True, separators=(",", ":")) + "\n")
    with pytest.raises(LedgerError, match="edited"):
        read_certificate(path)


@pytest.mark.parametrize(
    "edit",
    [
        {"law": {"shape": 2.0, "rate": 1.0, "most": 1}},
        {"law": {"shape": 2.0, "rate": 0.5}},
        {"kinds": []},
        {"delta": 2.0},
        {"format": 99},
        {"bound": "none"},
        {"unknown": 1},
        {"score": {"on": "raw", "clip": 1.0, "noise_multiplier": 1.0, "units": 3}},
    ],
)
def test_a_line_that_is_sealed_again_is_refused_where_it_describes_no_search(
    edit: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "certificate.jsonl"
    path.write_bytes(seal(encode({"kind": "search", **certificate().to_dict(), **edit}), "0" * 64)[0])
    with pytest.raises(LedgerError, match="does not describe"):
        read_certificate(path)


def respelt(line: bytes, spelling: str) -> bytes:
    """The same content in another spelling, which states the right checksum of the canonical one."""
    record = json.loads(line)
    if spelling == "spaces":
        return json.dumps(record, sort_keys=True).encode() + b"\n"
    if spelling == "order":
        return json.dumps(dict(reversed(record.items())), separators=(",", ":")).encode() + b"\n"
    if spelling == "number":
        return line.replace(b":2.0,", b":2.00,", 1) if b":2.0," in line else line.replace(b":0.25}", b":0.250}", 1)
    if spelling == "escape":
        return line.replace(b'"kind"', b'"\\u006bind"', 1)
    if spelling == "twice":
        return line.replace(b'"kind"', b'"kind":"search","kind"', 1)
    return line[:-1] + b" \n"


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("spelling", ["spaces", "order", "number", "escape", "twice", "end"])
def test_a_line_in_another_spelling_is_refused_though_its_checksum_is_right(
    spelling: str, number: int, tmp_path: Path
) -> None:
    """One content has one file: else a certificate could be changed with nobody's checksum telling of it."""
    write_certificate(path := tmp_path / "certificate.jsonl", certificate())
    write_winner(path, Winner({"batch": 8}, "d" * 64, "c" * 64, 2.0))
    lines = path.read_bytes().splitlines(keepends=True)
    changed = respelt(lines[number], spelling)
    assert changed != lines[number]
    record, same = json.loads(changed), json.loads(lines[number])
    assert record == same
    lines[number] = changed
    path.write_bytes(b"".join(lines))
    with pytest.raises(LedgerError, match=f"line {number + 1}: was edited"):
        read_certificate(path)


def test_each_line_is_synced_after_it_was_written_and_before_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut must not take a line that a candidate, or a published winner, relies on."""
    path, done = tmp_path / "certificate.jsonl", []
    write, sync = os.write, os.fsync

    def named(descriptor: int) -> str:
        own = path.exists() and os.fstat(descriptor).st_ino == path.stat().st_ino
        return "certificate" if own else "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "other"

    def written(descriptor: int, line: bytes) -> int:
        done.append(("write", named(descriptor)))
        return write(descriptor, line)

    def synced(descriptor: int) -> None:
        done.append(("fsync", named(descriptor)))
        sync(descriptor)

    monkeypatch.setattr(os, "write", written)
    monkeypatch.setattr(os, "fsync", synced)
    for add in (lambda: write_certificate(path, certificate()), lambda: write_winner(path, None)):
        done.clear()
        add()
        assert done == [("write", "certificate"), ("fsync", "certificate"), ("fsync", "folder")]


def test_torn_lines_are_refused(tmp_path: Path) -> None:
    write_certificate(path := tmp_path / "certificate.jsonl", certificate())
    whole = path.read_bytes()
    for content in (b"", whole[:-1], whole + whole, b"{}\n"):
        path.write_bytes(content)
        with pytest.raises(LedgerError, match=r"line|empty"):
            read_certificate(path)


def test_a_candidates_ledger_has_no_guarantee_of_its_own(tmp_path: Path) -> None:
    for search, expected in (("", True), ("abc", False)):
        path = tmp_path / f"ledger{search}.jsonl"
        opened = Ledger.create(path, header(search=search), Counter({RELEASE: 3}))
        for _ in range(3):
            opened.charge(RELEASE)
        opened.finish()
        found = read_ledger(path).epsilons
        assert math.isfinite(found.certified) is expected
        assert math.isfinite(found.noise_only)
        if search:
            assert "certificate" in found.leaks[-1]
            assert read_ledger(path).header.search == "abc"
        else:
            assert "search" not in json.loads(path.read_text().splitlines()[0])


def test_the_register_adds_up_what_the_same_records_paid(tmp_path: Path) -> None:
    register = Register(tmp_path / "data" / "spent.jsonl")
    assert register.totals() == []
    register.check("people", again=False)
    one = certificate()
    register.add_search("people", one)
    register.add_search("people", one)  # a killed search is not counted twice
    register.add_run("people", header(), Counter({RELEASE: 40}))
    register.add_search("others", replace(one, id="other"))
    found = {total.entries: total for total in register.totals()}
    assert set(found) == {2, 1}
    assert found[2].epsilon == pytest.approx(one.certified + header().price(Counter({RELEASE: 40})).certified)
    assert found[2].delta == pytest.approx(2 * DELTA)
    with pytest.raises(ConfigError, match=r"search\.again.*2 times"):
        register.check("people", again=False)
    register.check("people", again=True)
    register.check("third", again=False)
    assert register.path.stat().st_mode & 0o777 == 0o600
    assert "people" not in register.path.read_text()


def test_an_edited_register_is_refused(tmp_path: Path) -> None:
    register = Register(tmp_path / "spent.jsonl")
    register.add_search("people", certificate())
    register.add_search("people", certificate(id="second"))
    lines = register.path.read_text().splitlines(keepends=True)
    for changed in (
        [lines[0], lines[2]],
        [lines[1], lines[2]],
        [lines[0], lines[1].replace('"units":500', '"units":5')],
    ):
        register.path.write_text("".join(changed))
        with pytest.raises(LedgerError, match="spent"):
            register.totals()


@pytest.mark.parametrize("count", [0, -1, True, 1.0, "1"])
def test_a_kind_holds_whole_numbers_of_releases(count: Any, tmp_path: Path) -> None:
    record = certificate().to_dict()
    record["kinds"][0][1][0][1] = count
    (path := tmp_path / "certificate.jsonl").write_bytes(seal(encode({"kind": "search", **record}), "0" * 64)[0])
    with pytest.raises(LedgerError, match=r"kinds.*not a whole number"):
        read_certificate(path)


def test_a_search_has_one_outcome(tmp_path: Path) -> None:
    write_certificate(path := tmp_path / "certificate.jsonl", certificate())
    write_winner(path, None)
    chain = json.loads(path.read_text().splitlines()[-1])["chain"]
    second = {"kind": "winner", "options": {"batch": 8}, "adapter_sha256": "a", "ledger_chain": "b", "score": 1.0}
    path.write_bytes(path.read_bytes() + seal(encode(second), chain)[0])
    with pytest.raises(LedgerError, match=r"line 3.*out of place"):
        read_certificate(path)


def test_a_torn_last_line_is_cut_off_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "certificate.jsonl"
    discard_torn_line(path)
    write_certificate(path, certificate())
    first = path.read_bytes()
    write_winner(path, None)
    whole = path.read_bytes()
    discard_torn_line(path)
    assert path.read_bytes() == whole
    path.write_bytes(whole[:-5])
    discard_torn_line(path)
    assert path.read_bytes() == first
    write_winner(path, None)
    assert path.read_bytes() == whole
    for torn in (first[:-5], b""):
        path.write_bytes(torn)
        discard_torn_line(path)
        assert not path.exists()


def test_a_short_write_leaves_no_torn_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_certificate(path := tmp_path / "certificate.jsonl", certificate())
    first, write = path.read_bytes(), os.write
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda descriptor, line: write(descriptor, line[:7]))
        with pytest.raises(LedgerError, match="cannot be written"):
            write_winner(path, None)
    assert path.read_bytes() == first


def test_a_commitment_follows_its_salt_and_every_draw() -> None:
    plan = {"candidates": [{"name": "a", "kind": 0, "options": {"batch": 8}}]}
    other = {"candidates": [{"name": "a", "kind": 0, "options": {"batch": 16}}]}
    assert len({commitment_of(b"1", plan), commitment_of(b"2", plan), commitment_of(b"1", other)}) == 3


def verified(path: Path) -> Any:
    return CliRunner().invoke(app, ["verify", str(path), "--json"])


def test_a_folder_that_lost_its_winners_ledger_does_not_verify(tmp_path: Path) -> None:
    """Any weights could lie beside the certificate then."""
    path = tmp_path / "certificate.jsonl"
    write_certificate(path, certificate())
    assert verified(tmp_path).exit_code == 0  # under way
    for weights in ("adapter_model.safetensors", "model.safetensors", "pytorch_model.bin"):
        (tmp_path / weights).touch()
        assert verified(tmp_path).exit_code == 2, "no certificate of a search under way is about weights"
        (tmp_path / weights).unlink()
    write_winner(path, Winner({"batch": 8}, "d" * 64, "c" * 64, 0.25))
    assert "ledger is missing" in str(verified(tmp_path).exception) + verified(tmp_path).output
    assert verified(path).exit_code == 0


@pytest.mark.parametrize(
    "change",
    [
        {"epsilon": 0.1},
        {"commitment": "x" * 64},
        {"space": [{"batch": [8, 16, 32]}]},
        {"leaks": ("a fixed noise seed",)},
    ],
)
def test_a_certificate_that_contradicts_itself_does_not_verify(change: dict[str, Any], tmp_path: Path) -> None:
    write_certificate(path := tmp_path / "certificate.jsonl", certificate(**change))
    assert "do not trust it" in str(verified(path).exception) + verified(path).output
