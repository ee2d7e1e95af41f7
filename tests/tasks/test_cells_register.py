"""The register of the pipeline: a cell counts when it has its result, whatever kills it, and a study says so once."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from test_own_records import table
from tiny_pipeline import cells, mode, read_json, run_stages, static, write_params
from tiny_tuning import QUICK, checkpoint

import dptune
from dptune.core.errors import DataError
from dptune.core.files import private_directory, write_text
from dptune.job.result import RunResult
from dptune.privacy.ledger import Ledger
from dptune.privacy.ledger_file import read_ledger
from dptune.privacy.release import Release
from dptune.privacy.run_folder import RunFolder, set_aside
from dptune.privacy.spent_budgets.register import Register
from dptune.records.parquet_file import read_records, write_records
from tasks.corpus.canaries import plant
from tasks.corpus.split import split
from tasks.experiment import cell_training
from tasks.experiment.finetune import run_cell, run_cells
from tasks.experiment.spent_budgets import paid_so_far
from tasks.paths import SPENT, TRAIN
from tasks.search.request import refuse_paid
from tasks.search.run import read_sides
from tasks.settings.params import load_settings
from tasks.split_records import TRAIN_SIDE, records_digest, split_digest
from tasks.stage import run_stage


class Killed(BaseException):
    """Stands for SIGKILL."""


def test_finished_cells_are_in_the_register_of_the_records_that_a_search_reads(pipeline: Path) -> None:
    both = cells({"experiment": {"cells_together": 2}})
    assert paid_so_far() is None
    run_cells(both, "cpu")
    run_cells(both, "cpu")
    settings = load_settings()
    assert records_digest() == read_sides(settings).fingerprint
    found = {one.id: one for one in Register(SPENT).earlier(read_sides(settings).fingerprint)}
    results = [read_json(RunFolder(cell.directory).result) for cell in both]
    assert sorted(one.epsilon for one in found.values()) == sorted(float(one["epsilon_certified"]) for one in results)
    assert {one.study for one in found.values()} == {"tiny"}
    assert math.inf in [one.epsilon for one in found.values()]
    assert mode(SPENT) == 0o600
    told = str(paid_so_far())
    assert told.startswith("these records paid before (2 times, together epsilon ∞")
    assert "`dptune spent data/spent.jsonl`" in told
    assert "\n" not in told
    refuse_paid(settings)  # a search after a study is warned, not refused


@pytest.mark.parametrize("last", [True, False])
def test_a_cell_that_is_killed_around_its_result_counts_once(
    last: bool, pipeline: Path, opened: list[Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = static()

    def die(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        if last:
            patched.setattr(Ledger, "finish", die)
        else:
            patched.setattr(RunResult, "write", die)
        with pytest.raises(Killed):
            run_cell(cell, "cpu")
    for ledger in opened:
        ledger.close()
    assert RunFolder(cell.directory).result.exists() is last
    assert Register(SPENT).totals()[0].entries == 1, "no result without its entry"
    result = run_cell(cell, "cpu")
    (total,) = Register(SPENT).totals()
    assert (total.entries, total.epsilon) == (1, pytest.approx(float(result["epsilon_certified"])))


def test_a_run_that_was_set_aside_counts_beside_the_one_that_replaced_it(pipeline: Path) -> None:
    cell = static()
    first = run_cell(cell, "cpu")
    SPENT.unlink()  # so that the entry of the first is not what is found
    set_aside(cell.directory)
    second = run_cell(cell, "cpu")
    (total,) = Register(SPENT).totals()
    assert total.entries == 2
    assert total.epsilon == pytest.approx(float(first["epsilon_certified"]) + float(second["epsilon_certified"]))


def test_a_lost_ledger_of_a_run_that_was_set_aside_has_no_bound(pipeline: Path) -> None:
    cell = static()
    run_cell(cell, "cpu")
    SPENT.unlink()
    aside, _ = set_aside(cell.directory)
    RunFolder(aside).ledger.unlink()
    run_cell(cell, "cpu")
    (total,) = Register(SPENT).totals()
    assert (total.entries, total.epsilon) == (2, math.inf)


def test_a_cell_that_diverged_has_paid(pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def diverge(*_: Any) -> None:
        raise cell_training.DivergedError("diverged")

    monkeypatch.setattr(cell_training, "check_converged", diverge)
    with pytest.raises(cell_training.DivergedError):
        run_cell(static(), "cpu")
    assert not (static().directory / "adapter").exists()
    assert Register(SPENT).totals()[0].entries == 1


def test_a_search_after_a_study_says_one_line(pipeline: Path, caplog: pytest.LogCaptureFixture) -> None:
    from tasks.search.run import search_records

    run_cell(static(), "cpu")
    write_params({"training": {"expected_batch_size": 8, "epochs": 0.15}})
    space = {"learning_rate": {"log_uniform": [0.001, 0.02]}}
    over = {"name": "after", "epsilon": 1, "space": space, "candidates": 2, "score": "rehearsal", "rehearse_on": "twin"}
    caplog.set_level(logging.WARNING)
    search_records(load_settings(overrides={"search": over}), "cpu")
    assert caplog.text.count("these records paid before (once, epsilon") == 1
    (total,) = Register(SPENT).totals()
    assert [part.what for part in total.parts] == ["cell", "run"]


def test_a_cell_that_is_killed_counts_by_its_ledger_for_its_records(
    pipeline: Path, opened: list[Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in no register before it ends; a study and a search that start before that are told of it all the same."""

    def die(ledger: Ledger, release: Release) -> None:
        if ledger.releases == 3:
            raise Killed
        charge(ledger, release)

    cell, charge = static(), Ledger.charge
    write_text(RunFolder(private_directory(cell.directory)).cell, cell.model_dump_json())  # as the flow does
    with monkeypatch.context() as patched:
        patched.setattr(Ledger, "charge", die)
        with pytest.raises(Killed):
            run_cell(cell, "cpu")
    for ledger in opened:
        ledger.close()
    spent = read_ledger(RunFolder(cell.directory).ledger).epsilons.certified
    (found,) = Register(SPENT).earlier(records_digest())
    assert (found.what, found.study, found.named, found.epsilon) == ("cell", "tiny", False, spent)
    assert Register(SPENT).earlier("others") == []
    assert str(paid_so_far()).startswith("these records paid before (once, epsilon")
    assert paid_so_far(private=True) is None
    refuse_paid(load_settings())
    result = run_cell(cell, "cpu")
    (total,) = Register(SPENT).totals()
    assert (total.entries, total.epsilon) == (1, pytest.approx(float(result["epsilon_certified"])))
    SPENT.unlink()
    (told,) = Register(SPENT).faults()
    assert paid_so_far(private=True) == told, "who may not hear of records hears of a register that was removed"
    assert told in str(paid_so_far())
    assert Register(SPENT).restore() == [cell.directory.name]
    assert Register(SPENT).totals() != []
    assert paid_so_far(private=True) is None


def rewritten(file: Path, last: str) -> None:
    """Write another text into the last record of a file, which stays as it is but for that."""
    found = read_records(file)
    write_records(file, replace(found, text=pa.array([*found.text.to_pylist()[:-1], last])))


@pytest.mark.parametrize("change", ["text", "fewer", "unit", "record"])
def test_cells_refuse_canaries_that_were_planted_among_other_records(change: str, pipeline: Path) -> None:
    """They would train on the old records and count as the new ones', which seem to have paid less than they did."""
    cell = static()
    side = read_records(TRAIN_SIDE)
    if change == "text":
        rewritten(TRAIN_SIDE, "Another record.")
    elif change == "fewer":
        shorter = replace(side, record=side.record[:-1], unit=side.unit[:-1], text=side.text[:-1])
        write_records(TRAIN_SIDE, shorter)
    else:
        write_records(TRAIN_SIDE, replace(side, **{change: getattr(side, change) + 1}))
    with pytest.raises(DataError, match=r"the split was made again, and the canaries were not.*dvc repro canaries"):
        run_cell(cell, "cpu")
    assert not RunFolder(cell.directory).ledger.exists(), "refused before anything is charged"
    assert not SPENT.exists()
    refuse_paid(load_settings())  # a search trains on the split itself
    if change == "text":
        run_stage(plant)
        run_cell(static(), "cpu")
        (found,) = Register(SPENT).earlier(split_digest())
        assert found.what == "cell"


def test_the_digest_of_the_records_follows_the_files_in_one_process(pipeline: Path) -> None:
    """A server of flows lives on while data are made again; under an old digest nothing would add up."""
    write_params()
    first = records_digest()
    assert first == split_digest()
    rewritten(TRAIN_SIDE, "Another record.")
    assert split_digest() != first
    run_stage(plant)
    assert records_digest() == split_digest() != first
    write_params({"data": {"split_seed": 5}})
    before = set(read_records(TRAIN_SIDE).text.to_pylist())
    run_stage(split)
    run_stage(plant)
    assert before != set(read_records(TRAIN_SIDE).text.to_pylist())
    assert records_digest() == first, "the same records by another split, and with other canaries"
    TRAIN.unlink()
    assert split_digest() == first


def test_a_study_and_tune_on_one_file_add_up_in_one_register_and_tell_of_each_other_in_two(
    pipeline: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changes = table(pipeline / "visits.csv")
    run_stages(changes, pretrained=False)
    cell = run_cell(static(changes), "cpu")
    given = {"template": "In {city}: {bought}.", "unit": "customer_id", "epsilon": 8, "delta": 1e-3} | QUICK
    alone = dptune.tune(checkpoint(), "visits.csv", out="tuned", **given)
    assert "data/spent.jsonl is another register, where these records paid too (once, epsilon" in caplog.text
    assert "spent.jsonl is another register, where these records paid too" in str(paid_so_far())
    assert [total.entries for file in (SPENT, Path("spent.jsonl")) for total in Register(file).totals()] == [1, 1]
    both = dptune.tune(checkpoint(), "visits.csv", out="again", register=SPENT, **given)
    (total,) = Register(SPENT).totals()
    assert (total.entries, total.unit) == (2, "customer_id")
    assert total.epsilon == pytest.approx(float(cell["epsilon_certified"]) + both.epsilons.certified)
    assert alone.epsilons.certified == both.epsilons.certified
