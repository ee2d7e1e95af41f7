"""``tune`` with the gradients of an auditor: planted, kept, committed to, and priced."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_tuning as tiny
from typer.testing import CliRunner

from dptune import tune
from dptune.cli import app
from dptune.core.errors import ConfigError, DataError, DptuneError
from dptune.core.files import read_json, sha256, write_json
from dptune.job import run as run_module
from dptune.job.audit_canaries import KeptCanaries, canaries_of, check_count
from dptune.job.delivery.verification import check_deliverable
from dptune.privacy.ledger_file import read_ledger
from dptune.training.crafted_canaries import CraftedCanaries
from dptune.training.privacy_units import PrivacyUnits

ROWS, PLANTED = 40, 16


def tuned(out: Path, **settings: Any) -> Any:
    given = {"epsilon": 8, "eval_share": 0.0, "audit_canaries": PLANTED, **tiny.QUICK} | settings
    return tune(tiny.checkpoint(), tiny.rows(ROWS), out=out, **given)


def file_of(out: Path) -> Path:
    return out / "audit_canaries.json"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tuned(tmp_path_factory.mktemp("canaries") / "run").folder


def test_canaries_count_as_units_in_all_that_is_charged_and_said(finished: Path) -> None:
    contents = read_ledger(finished / "ledger.jsonl")
    (rate,) = {release.sample_rate for release in contents.composition}
    assert contents.header.units == ROWS + PLANTED
    assert contents.header.canaries == PLANTED
    assert rate == pytest.approx(tiny.QUICK["expected_batch_size"] / (ROWS + PLANTED))
    assert contents.header.delta == 1e-3  # at or below 1 / (10 x 56), where 40 units allow 1e-3 as well
    assert contents.epsilons.certified <= 8
    card = (finished / "adapter" / "README.md").read_text()
    assert f"| canaries | trained beside {PLANTED} gradients of an auditor, which count among the units" in card
    assert "of the records; the noise multiplier is 0." in card
    assert check_deliverable(finished / "adapter").header.canaries == PLANTED


def test_coins_and_scores_stay_in_one_private_file(finished: Path) -> None:
    file = file_of(finished)
    assert file.stat().st_mode & 0o777 == 0o600
    stored = read_json(file)
    assert len(stored["included"]) == len(stored["scores"]) == len(stored["ratios"]) == PLANTED
    assert len(stored["moves"]) == len(stored["squares"]) == stored["rated"] == 14
    for path in (finished / "adapter").rglob("*"):
        assert stored["salt"].encode() not in path.read_bytes()
        assert "canaries" not in path.name
    said = (finished / "ledger.jsonl").read_text() + (finished / "result.json").read_text()
    assert stored["salt"] not in said


def test_the_ledger_begins_with_a_commitment_and_ends_with_the_digest(finished: Path) -> None:
    """Anybody can check the commitment by hand: SHA-256 of the salt, then of the coins as JSON."""
    contents, stored = read_ledger(finished / "ledger.jsonl"), read_json(file_of(finished))
    coins = json.dumps({"coins": stored["included"]}, separators=(",", ":")).encode()
    assert contents.header.coins == hashlib.sha256(bytes.fromhex(stored["salt"]) + coins).hexdigest()
    assert contents.scores == sha256(file_of(finished))


def test_a_run_without_canaries_is_what_it_was(tmp_path: Path) -> None:
    out = tuned(tmp_path / "run", audit_canaries=0).folder
    first, *_, last = (out / "ledger.jsonl").read_text().splitlines()
    assert {"canaries", "coins"}.isdisjoint(json.loads(first))
    assert set(json.loads(last)) == {"kind", "releases", "chain"}
    assert not file_of(out).exists()
    assert "| canaries | none |" in (out / "adapter" / "README.md").read_text()


def killed_at(step: int, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch, seen = CraftedCanaries.watch, []

    def watched(*arguments: Any) -> None:
        seen.append(1)
        if len(seen) > step:
            raise KeyboardInterrupt
        watch(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(CraftedCanaries, "watch", watched)
        with pytest.raises(KeyboardInterrupt):
            tuned(out, checkpoint_every=3)


def test_a_resumed_run_keeps_coins_and_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in its eighth step, it keeps what it saw up to the checkpoint of its sixth; the ledger holds all."""
    out = tmp_path / "run"
    killed_at(7, out, monkeypatch)
    before = KeptCanaries.read(out, file_of(out))
    assert before.watched == 6
    assert before.scores.any()
    tuned(out, checkpoint_every=3)
    after = KeptCanaries.read(out, file_of(out))
    assert np.array_equal(after.included, before.included)
    assert after.moves[:6] == before.moves
    assert after.squares[:6] == before.squares
    assert (after.watched, read_ledger(out / "ledger.jsonl").releases) == (12, 14)


@pytest.mark.parametrize("damage", ["other coins", "none", "damaged"])
def test_a_run_goes_on_with_its_own_coins_or_not_at_all(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    killed_at(7, out, monkeypatch)
    if damage == "none":
        file_of(out).unlink()
    elif damage == "damaged":
        file_of(out).write_text(file_of(out).read_text()[:-40])
    else:
        write_json(file_of(out), read_json(file_of(out)) | {"included": [1, 0] * (PLANTED // 2)})
    lines = (out / "ledger.jsonl").read_text()
    expected = "is not complete JSON" if damage == "damaged" else "does not hold the coins that this run's releases"
    with pytest.raises(DptuneError, match=expected):
        tuned(out, checkpoint_every=3)
    assert (out / "ledger.jsonl").read_text() == lines


def test_coins_are_on_the_disk_before_the_ledgers_first_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in between, the run begins again with new coins: nothing was booked, and nothing released."""
    out = tmp_path / "run"

    def killed(canaries: KeptCanaries, booked: Any) -> Any:
        canaries.write()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(KeptCanaries, "kept", killed)
        with pytest.raises(KeyboardInterrupt):
            tuned(out)
    assert file_of(out).exists()
    assert not (out / "ledger.jsonl").exists()
    first = read_json(file_of(out))
    tuned(out)
    assert read_json(file_of(out))["salt"] != first["salt"]


def test_the_file_of_coins_is_there_when_the_first_line_is_booked(tmp_path: Path) -> None:
    canaries, seen = KeptCanaries.new(8, tmp_path, tmp_path / "coins.json"), []

    @contextmanager
    def booked() -> Iterator[None]:
        seen.append(KeptCanaries.read(tmp_path, canaries.file).commitment)
        yield

    with canaries.kept(booked):
        seen.append("first line")
    assert seen == [canaries.commitment, "first line"]


def test_a_file_that_is_exchanged_between_its_reading_and_the_runs_start_is_refused(tmp_path: Path) -> None:
    canaries = KeptCanaries.new(8, tmp_path, tmp_path / "coins.json")
    canaries.write()
    canaries.on_open(3)
    write_json(canaries.file, read_json(canaries.file) | {"included": (~canaries.included).astype(int).tolist()})
    with pytest.raises(DataError, match="does not hold the coins that this run's releases"):
        canaries.on_open(3)
    canaries.file.unlink()
    with pytest.raises(DataError, match="does not hold the coins that this run's releases"):
        canaries.on_open(3)


def test_scores_of_a_run_that_diverges_are_written_so_that_its_own_error_ends_it(tmp_path: Path) -> None:
    canaries = KeptCanaries.new(3, tmp_path, tmp_path / "coins.json")
    canaries.scores[:] = [np.nan, np.inf, 1.0]
    canaries.moves, canaries.squares = [np.inf], [np.inf]
    canaries.on_save()
    found = KeptCanaries.read(tmp_path, canaries.file)
    assert np.array_equal(found.scores, [np.nan, np.nan, 1.0], equal_nan=True)
    assert np.isnan([*found.moves, *found.squares]).all()
    assert found.commitment == canaries.commitment


def test_a_finished_run_is_loaded_without_its_coins(finished: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(finished, tmp_path / "run"))
    file_of(out).unlink()
    assert tuned(out).ledger.complete


def test_the_number_of_canaries_is_a_setting_that_no_resumed_run_changes(finished: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(finished, tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"audit_canaries: 16 then, 0 now"):
        tuned(out, audit_canaries=0)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"audit_canaries": 9}, r"audit_canaries: 9 is too few: their coins may .* Fix: use hundreds, or 0"),
        ({"audit_canaries": 41}, r"audit_canaries: 41 is more than the 40 units"),
        ({"delta": 0.02}, r"delta: "),
        ({"expected_batch_size": 50}, r"expected_batch_size: 50 is more than the 40 units"),
        ({"search": {"space": {"learning_rate": [0.1, 0.2]}}}, r"audit_canaries: are planted in single runs"),
    ],
)
def test_what_cannot_be_planted_is_refused_before_anything_is_charged(
    settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        tuned(tmp_path / "run", **settings)
    assert not (tmp_path / "run" / "ledger.jsonl").exists()


def test_the_command_prints_the_price_before_the_run(tmp_path: Path) -> None:
    data = tiny.write_csv(tmp_path / "records.csv", tiny.rows(ROWS))
    arguments = ["tune", "--model", str(tiny.checkpoint()), "--data", str(data), "--epsilon", "8"]
    arguments += ["--expected-batch-size", "8", "--rank", "2", "--eval-share", "0", "--out", str(tmp_path / "run")]
    done = CliRunner().invoke(app, [*arguments, "--audit-canaries", "16", "--dry-run", "--json"])
    assert done.exit_code == 0, done.output
    plan = json.loads(done.stdout.splitlines()[0])
    assert plan["units"] == ROWS + 16
    assert plan["canaries"].startswith("16 crafted gradients of an auditor, each in by a fair coin")
    assert 0 < plan["canaries_can_show_at_most"] < 8
    assert "warning: 16 canaries are too few to refute the certified epsilon 8, even if every coin is" in done.stderr
    refused = CliRunner().invoke(app, [*arguments, "--audit-canaries", "500"])
    assert refused.exit_code == 2
    assert "--audit-canaries: 500 is more than the 40 units" in refused.output


def test_coins_of_a_ledger_that_is_not_begun_are_new(tmp_path: Path) -> None:
    old = KeptCanaries.new(8, tmp_path, tmp_path / "coins.json")
    old.write()
    assert canaries_of(tmp_path, old.file, 8, None).salt != old.salt
    assert canaries_of(tmp_path, old.file, 8, old.commitment).salt == old.salt
    with pytest.raises(DataError, match="does not hold the coins"):
        canaries_of(tmp_path, old.file, 8, "0" * 64)


def test_a_commitment_tells_nothing_of_the_coins() -> None:
    """Equal coins have different commitments, and other coins or another salt do not fit one."""
    one = KeptCanaries.new(4, Path(), Path())
    twin = KeptCanaries(one.included, one.scores, salt="00" * 16)
    other = KeptCanaries(~one.included, one.scores, salt=one.salt)
    assert len({one.commitment, twin.commitment, other.commitment}) == 3
    assert len(bytes.fromhex(one.salt)) == 16


def test_each_canary_needs_a_coordinate_of_its_own_in_each_group() -> None:
    check_count(40, 40, [40, 64], has_head=True)
    with pytest.raises(ConfigError, match=r"the 39 parameters of the smallest adapter.* 39 or fewer, or a larger rank"):
        check_count(40, 40, [64, 39], has_head=False)
    with pytest.raises(ConfigError, match=r"the 39 parameters of the classifier's head.*Fix: use 39 or fewer\."):
        check_count(40, 40, [64, 39], has_head=True)  # which no rank changes


def test_slots_of_a_prepared_run_hold_no_coin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever looks at the prepared run sees how many slots there are, and nothing of who is in."""
    seen: list[PrivacyUnits] = []
    real = run_module.run_here

    def noted(prepared: Any, *rest: Any) -> Any:
        seen.append(prepared.units)
        return real(prepared, *rest)

    monkeypatch.setattr(run_module, "run_here", noted)
    tuned(tmp_path / "run")
    (units,) = seen
    assert len(units.planted) == PLANTED
    assert not units.planted.any()
