"""Cells of reinforcement learning on prompts: what they write, resume and refuse."""

from __future__ import annotations

import json
import shutil
import stat
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from peft import PeftModel

from dptune.audit.refutation import Refutation
from dptune.core.errors import ConfigError
from dptune.core.settings import Pretraining
from dptune.policy.language import training
from dptune.policy.language.learner import LanguageLearner
from dptune.privacy.ledger_file import LedgerError, read_ledger
from dptune.privacy.release import Release
from dptune.privacy.run_folder import RunFolder, set_aside
from dptune.privacy.spent_budgets.register import Register
from dptune.records.diabetes.narratives import write_narratives
from dptune.records.diabetes.sources import acquire_synthetic
from dptune.records.parquet_file import Records, read_records, write_records
from dptune.records.splits import write_splits
from dptune.training.models.model import ModelSource, load_base
from dptune.training.models.pretrain import pretrain
from tasks.corpus.canaries import secret_of
from tasks.experiment.spent_budgets import run_id_of
from tasks.paths import NARRATIVES, PUBLIC_MODEL, PUBLIC_NARRATIVES, PUBLIC_VALIDATION, SPENT, SPLITS
from tasks.policy import rlhf
from tasks.policy.rlhf import PromptPlan, Rlhf, cells, rlhf_of, run_cell, violations
from tasks.split_records import split_digest

SMALL = (
    *("users=8", "updates=3", "canaries=12", "evaluate_every=2", "prompt_tokens=80", "new_tokens=8"),
    *("baseline_prompts=4", "held_out_prompts=8", "candidates=7", "epsilons=3", "nonprivate=false"),
)


def small(*options: str) -> Rlhf:
    """``SMALL`` with these options in place of its own of the same names."""
    names = {option.partition("=")[0] for option in options}
    return rlhf_of((*(one for one in SMALL if one.partition("=")[0] not in names), *options))


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Splits of 80 narratives (23 attack, 51 train, 6 eval), and a public model that has hardly read any, in the
    current directory."""
    monkeypatch.chdir(tmp_path)
    acquired = acquire_synthetic(Path("raw"), 80, 7, kind="private")
    NARRATIVES.parent.mkdir(parents=True)
    write_narratives(acquired.table, acquired.ids_mapping, acquired.manifest, NARRATIVES)
    write_splits(NARRATIVES, SPLITS, 42, "record")
    texts = read_records(SPLITS / "eval.parquet").text.to_pylist() * 4
    shape = Pretraining(vocabulary=500, layers=1, width=16, heads=1, max_length=128, epochs=1, batch_size=8)
    pretrain(texts, texts[:4], shape, PUBLIC_MODEL)
    numbers = np.arange(len(texts))
    write_records(PUBLIC_NARRATIVES, Records(numbers, numbers, pa.array(texts), {"label": "public"}))
    return tmp_path


def test_budgets_that_differ_beyond_the_digits_of_a_label_have_folders_of_their_own(data: Path) -> None:
    found = cells(replace(small(), epsilons=(3.0, 3.0000001)))
    assert len({cell.label for cell in found}) == 1
    assert len({cell.directory for cell in found}) == len(found) == 2


def test_a_cell_leaves_ledger_results_and_an_adapter_and_is_run_once(data: Path) -> None:
    (cell,) = cells(rlhf_of(SMALL))
    results = run_cell(cell)
    directory = cell.directory
    assert results["epsilon_certified"] == read_ledger(directory / "ledger.jsonl").epsilons.certified
    assert results["epsilon_certified"] == pytest.approx(3, abs=1e-3)
    assert [point["updates"] for point in results["curve"]] == [0, 2, 3]
    assert set(results["audit"]) == {"secrets", "updates", "exposure"}
    assert results["violations"] == []
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    for name in ("prompts.json", "results.json", "state.safetensors", "ledger.jsonl"):
        assert stat.S_IMODE((directory / name).stat().st_mode) == 0o600
    secret = json.loads((directory / "prompts.json").read_text())["canaries"][0]["secret"]
    assert secret not in (directory / "results.json").read_text() + (directory / "ledger.jsonl").read_text()
    PeftModel.from_pretrained(
        load_base(ModelSource(str(PUBLIC_MODEL)), torch.device("cpu")), str(directory / "adapter")
    )
    (booked,) = Register(SPENT).earlier(split_digest())
    assert (booked.study, booked.unit, booked.delta) == ("policy.rlhf", "prompt", cell.settings.delta)
    assert booked.epsilon == results["epsilon_certified"]
    before = (directory / "results.json").stat().st_mtime_ns
    assert run_cell(cell) == results
    assert (directory / "results.json").stat().st_mtime_ns == before
    # A process that died in the audit: the run itself is not made again.
    (directory / "results.json").unlink()
    assert run_cell(cell)["curve"] == results["curve"]
    assert Register(SPENT).totals()[0].entries == 1
    assert Register(SPENT).totals()[0].epsilon == pytest.approx(results["epsilon_certified"])


def test_a_model_of_ones_own_learns_from_a_learned_reward(data: Path) -> None:
    """Prompts are the records' beginnings, without codes; the public ones are the experiment's public records."""
    shutil.copy(Path(__file__).parents[2] / "params.yaml", ".")  # names the users' own records
    labelled = Path("labelled.jsonl")
    labelled.write_text("".join(json.dumps({"text": f"text {n}", "label": n % 2}) + "\n" for n in range(60)))
    PUBLIC_VALIDATION.parent.mkdir(parents=True)
    moved = PUBLIC_NARRATIVES.rename(PUBLIC_VALIDATION), PUBLIC_MODEL.rename("own")
    reward = "reward={encoder: {source: own}, source: jsonl, path: labelled.jsonl, positive: '1'}"
    (cell,) = cells(small("model={source: own}", reward, "codes=false", "canaries=0", "prompt_tokens=16"))
    results = run_cell(cell)
    assert (results["epsilon_certified"], results["reward_accuracy"]) == pytest.approx((3, 0.5), abs=0.5)
    assert (results["model"], results["codes"], "audit" in results) == (moved[1].name, False, False)
    before = cell.directory
    labelled.write_text(labelled.read_text().replace("text 1", "another"))
    assert cell.directory != before, "a reward of other texts is another run"


def test_a_cell_counts_once_and_so_does_what_was_set_aside(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ends it then, its ledger tells of prompts that have paid."""
    (cell,) = cells(small("telemetry=private"))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for entries in (1, 2):
        with monkeypatch.context() as patched:
            patched.setattr("dptune.training.models.model.save_adapter", full)
            with pytest.raises(OSError, match="No space left"):
                run_cell(cell)
        (total,) = Register(SPENT).totals()
        assert total.entries == entries
        assert total.epsilon == pytest.approx(3 * entries, abs=2e-3)
        if entries == 1:
            set_aside(cell.directory)


def test_a_cell_counts_from_its_start_with_all_that_it_plans(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed as soon as it is counted, or at its first release, and once however often it goes on."""
    (cell,) = cells(small("telemetry=private"))
    add = Register.add_cell

    def killed(*given: Any) -> None:
        if isinstance(given[0], Register):
            add(*given)
        raise KeyboardInterrupt

    for where in ("dptune.privacy.spent_budgets.register.Register.add_cell", "dptune.policy.language.training.step"):
        with monkeypatch.context() as patched:
            patched.setattr(where, killed)
            with pytest.raises(KeyboardInterrupt):
                run_cell(cell)
        assert [one.total() for one in booked_releases()] == [3]
        (booked,) = Register(SPENT).earlier(split_digest())
        assert (booked.study, booked.unit, booked.what) == ("policy.rlhf", "prompt", "cell")
        assert booked.epsilon == pytest.approx(3, abs=1e-3)
    results = run_cell(cell)
    (ended,) = Register(SPENT).earlier(split_digest())
    assert (ended.id, ended.epsilon) == (booked.id, results["epsilon_certified"])
    ledger = read_ledger(cell.directory / "ledger.jsonl")
    assert ledger.header.run_id == ended.id
    assert booked_releases() == [ledger.composition]


@pytest.mark.parametrize("cause", ["weights", "update", "not finite"])
def test_a_cell_whose_model_is_refused_counts_nowhere(cause: str, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cell,) = cells(small("telemetry=private"))
    with monkeypatch.context() as patched:
        if cause == "weights":
            weights = PUBLIC_MODEL / "model.safetensors"
            kept = weights.read_bytes()
            weights.write_bytes(kept[:-1])
            refused = r"model\.safetensors is cut off or damaged"
        elif cause == "update":
            patched.setattr(LanguageLearner, "updates", fail)
            refused = r"no update of a simulated user can be computed \(RuntimeError: of no use"
        else:
            patched.setattr(LanguageLearner, "updates", lambda *_: torch.tensor([[torch.nan]]))
            refused = "an update of a simulated user that is not finite"
        for _ in range(2):
            (broken,) = cells(small("telemetry=private"))
            with pytest.raises(ConfigError, match=refused):
                run_cell(broken)
            assert not SPENT.exists()
            assert not RunFolder(broken.directory).ledger.exists()
        if cause == "weights":
            weights.write_bytes(kept)
    run_cell(cell)
    assert Register(SPENT).totals()[0].entries == 1


def fail(*_: Any) -> None:
    raise RuntimeError("of no use")


def test_a_cell_whose_line_was_cut_off_counts_by_its_ledger(
    data: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its ledger lies three folders below the register."""
    (cell,) = cells(small("telemetry=private"))
    run_cell(cell)
    SPENT.unlink()
    (found,) = Register(SPENT).earlier(split_digest())
    assert (found.what, found.named, found.epsilon) == ("cell", False, pytest.approx(3, abs=1e-3))
    (other,) = cells(small("telemetry=private", "seeds=[1]"))
    run_cell(other)
    assert f"no line names what lies in {cell.directory.name}" in caplog.text
    assert Register(SPENT).totals()[0].entries == 2
    assert Register(SPENT).restore() == [cell.directory.name]
    assert Register(SPENT).totals()[0].entries == 2
    assert Register(SPENT).faults() == []


def booked_releases() -> list[Counter[Release]]:
    """The releases of each entry of the register. Of these policies epsilon does not tell how many there are."""
    entries, _ = Register(SPENT)._read()
    return [
        Counter({Release.from_dict(release): count for release, count in entry["content"]["releases"]})
        for entry in entries
    ]


def test_a_cell_that_lost_its_ledger_counts_beside_the_one_that_takes_its_place(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it released stays released. One that training refuses adds nothing."""
    (cell,) = cells(small("telemetry=private"))
    step, steps = training.step, iter(range(9))

    def killed_at_the_third(*given: Any) -> None:
        if next(steps) == 2:
            raise KeyboardInterrupt
        step(*given)

    with monkeypatch.context() as patched:
        patched.setattr(training, "step", killed_at_the_third)
        with pytest.raises(KeyboardInterrupt):
            run_cell(cell)
    folder = RunFolder(cell.directory)
    kept, cell_kept = folder.ledger.read_bytes(), folder.cell.read_bytes()
    folder.ledger.unlink()
    for _ in range(2):
        with pytest.raises(LedgerError, match="has no ledger beside it"):
            run_cell(cell)
    (first,) = Register(SPENT).earlier(split_digest())
    folder.ledger.write_bytes(kept)
    folder.cell.unlink()
    assert run_id_of(cell.directory) == first.id
    for path in (folder.ledger, folder.state, folder.progress):
        path.unlink()
    folder.cell.write_bytes(cell_kept)
    run_cell(cell)
    earlier, later = Register(SPENT).earlier(split_digest())
    assert earlier.id == first.id != later.id
    assert read_ledger(folder.ledger).header.run_id == later.id


def test_a_cell_counts_for_the_records_that_it_read(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the split is made again while it trains."""
    (cell,) = cells(small("telemetry=private"))
    before, step = split_digest(), training.step

    def edited(*given: Any) -> None:
        step(*given)
        records = read_records(SPLITS / "train.parquet")
        texts = [f"Quite another record: {number}." for number in range(len(records.record))]
        write_records(SPLITS / "train.parquet", replace(records, text=pa.array(texts)))

    monkeypatch.setattr(training, "step", edited)
    run_cell(cell)
    assert split_digest() != before
    assert Register(SPENT).earlier(split_digest()) == []
    assert len(Register(SPENT).earlier(before)) == 1


def test_private_telemetry_plants_nothing_and_attacks_nothing(data: Path) -> None:
    """Canaries' prompts are records of the attack split: what attacks on them find may not be told."""
    (cell,) = cells(small("telemetry=private"))
    results = run_cell(cell)
    assert read_ledger(cell.directory / "ledger.jsonl").header.telemetry == results["telemetry"] == "private"
    assert {"audit", "violations"}.isdisjoint(results)
    assert json.loads((cell.directory / "prompts.json").read_text())["canaries"] == []
    with pytest.raises(ConfigError, match="private telemetry cannot hold without noise"):
        small("telemetry=private", "nonprivate=true")


def test_coins_decide_who_takes_part_and_all_others_do(data: Path) -> None:
    """A canary that takes part against its coin would hide from the audit whatever its update does."""
    (cell,) = cells(rlhf_of(SMALL))
    records, hosts = (read_records(SPLITS / f"{side}.parquet") for side in ("train", "attack"))
    drawn = PromptPlan.draw(cell, hosts)
    for first in (0, 1):
        coins = [(place + first) % 2 for place in range(len(drawn.canaries))]
        canaries = tuple(replace(one, included=coin) for one, coin in zip(drawn.canaries, coins, strict=True))
        plan = replace(drawn, canaries=canaries)
        users = rlhf._stream(cell, plan, records, hosts, rlhf._learner(cell, "cpu"), "a run")
        assert users.keys[-12:].tolist() == [one.record for one in canaries]
        assert users.present.tolist() == [True] * (len(users.keys) - 12) + [bool(coin) for coin in coins]
        assert set(users.keys[:-12].tolist()) <= set(records.record.tolist())
        assert set(users.updates.tolist()) <= {0, 1, 2}


def without(records: Records, row: int) -> Records:
    kept = np.delete(np.arange(len(records.record)), row)
    return replace(records, record=records.record[kept], unit=records.unit[kept], text=records.text.take(kept))


def test_a_record_that_leaves_or_is_swapped_moves_no_other_and_no_secret(data: Path) -> None:
    """Every record of the split in turn. From 48 to 55 records there are six turns of eight; with others, others."""
    (cell,) = cells(rlhf_of(SMALL))
    records, hosts = (read_records(SPLITS / f"{side}.parquet") for side in ("train", "attack"))
    plan, learner = PromptPlan.draw(cell, hosts), rlhf._learner(cell, "cpu")
    assert len(records.record) == 51

    def dealt(some: Records) -> dict[int, tuple[int, list[int]]]:
        users = rlhf._stream(cell, plan, some, hosts, learner, "a run")
        ids = users.prompts.ids.tolist()
        return {
            one: (update, own)
            for one, update, own in zip(users.keys.tolist(), users.updates.tolist(), ids, strict=True)
        }

    whole, new = dealt(records), 10**6
    assert 12 < len(whole) < 51 + 12, "some take no part"
    for row, one in enumerate(records.record.tolist()):
        rest = {key: value for key, value in whole.items() if key != one}
        assert dealt(without(records, row)) == rest
        swapped = records.record.copy()
        swapped[row] = new
        found = dealt(replace(records, record=swapped))
        assert {key: value for key, value in found.items() if key != new} == rest


def test_a_host_that_leaves_changes_one_canary(data: Path) -> None:
    (cell,) = cells(rlhf_of(SMALL))
    hosts = read_records(SPLITS / "attack.parquet")
    whole = {canary.record for canary in PromptPlan.draw(cell, hosts).canaries}
    for row, one in enumerate(hosts.record.tolist()):
        rest = {canary.record for canary in PromptPlan.draw(cell, without(hosts, row)).canaries}
        assert len(whole - rest) == (one in whole)


def test_a_resumed_run_deals_as_it_did_and_another_run_otherwise(data: Path) -> None:
    (cell,) = cells(rlhf_of(SMALL))
    records, hosts = (read_records(SPLITS / f"{side}.parquet") for side in ("train", "attack"))
    plan, learner = PromptPlan.draw(cell, hosts), rlhf._learner(cell, "cpu")
    one, again, other = (rlhf._stream(cell, plan, records, hosts, learner, run) for run in ("one", "one", "other"))
    assert one.updates.tolist() == again.updates.tolist()
    assert one.updates.tolist() != other.updates.tolist()


def test_coins_and_secrets_are_fair_and_new_every_time() -> None:
    """2 x 4,000 coins: within 6 deviations of a half, and no plan like another; false alarm below 1e-8."""
    (cell,) = cells(small("users=2000", "canaries=4000"))
    hosts = Records(np.arange(4000), np.arange(4000), pa.array(["A text."] * 4000), {"label": "hosts", "source": "uci"})
    one, other = (PromptPlan.draw(cell, hosts) for _ in range(2))
    for plan in (one, other):
        assert abs(sum(canary.included for canary in plan.canaries) - 2000) < 6 * 0.5 * 4000**0.5
    assert [canary.included for canary in one.canaries] != [canary.included for canary in other.canaries]
    assert not {canary.secret for canary in one.canaries} & {canary.secret for canary in other.canaries}
    assert len({secret_of(one.salt, record) for record in range(4000)}) == 4000
    # The canaries' records are public, and are the same for all coins.
    assert [canary.record for canary in one.canaries] == [canary.record for canary in other.canaries]


def test_what_the_data_cannot_fill_is_an_error(data: Path) -> None:
    for option, field in (
        ("updates=9", "updates"),
        ("canaries=24", "canaries"),
        ("prompt_tokens=9", "prompt_tokens"),
        ("held_out_prompts=99", "held_out"),
    ):
        (cell,) = cells(small(option))
        with pytest.raises(ConfigError, match=field):
            run_cell(cell)


def test_the_grid_has_a_run_for_every_users_budget_and_seed() -> None:
    found = cells(rlhf_of(["users=[128, 32]", "epsilons=[3, 1]", "seeds=[0, 1]"]))
    assert len(found) == 2 * 3 * 2
    assert found[0].label == "K32.nonprivate.seed0"
    assert {round(cell.method.noise_multiplier, 3) for cell in found} == {0.0, 1.391, 3.731}
    assert all(cell.method.critic == "none" for cell in found)


@pytest.mark.parametrize("option", ["users=0", "epsilons=-1", "unknown=1", "delta=2", "canaries=-1", "canaries=3"])
def test_an_impossible_setting_is_named(option: str) -> None:
    with pytest.raises(ConfigError, match=option.partition("=")[0]):
        rlhf_of([option])


def test_coins_that_refute_what_is_certified_are_told() -> None:
    sound = Refutation(certified=1.0, confidence=0.9999, guesses=64, correct=40, needed=60, epsilon_refutable=2.0)
    audit = {"secrets": sound.to_dict(), "updates": replace(sound, correct=61).to_dict()}
    (said,) = violations({"label": "K32", "audit": audit})
    assert said.startswith("K32: an attack on its canaries (updates) guesses 61 of 64 coins right")
    assert not violations({"label": "K32", "audit": audit | {"updates": sound.to_dict()}})
