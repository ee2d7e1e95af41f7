"""Cells that share a process: which they are, and that each ends as it would alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from tiny_pipeline import BUDGET, STEPS, cells

from dptune.core.errors import ConfigError, DivergedError, DptuneError
from dptune.job import base_model
from dptune.privacy.entropy import OsEntropy
from dptune.privacy.ledger_file import read_ledger
from dptune.privacy.run_folder import set_aside
from dptune.records.parquet_file import read_records, write_records
from dptune.training import loop
from dptune.training.gradients import shared_pass
from dptune.training.run import Run
from tasks.experiment import cell_training, finetune
from tasks.experiment.cell_list import CellGroup, group_cells
from tasks.experiment.cells import Cell, is_finished
from tasks.experiment.finetune import CellsError, run_cells
from tasks.experiment.preparation import prepare, shared_inputs
from tasks.paths import TOKENS, TRAIN
from tasks.settings.experiment import Model
from tasks.settings.params import load_settings

SEVERAL = {"experiment": {"mechanisms": ["nonprivate", "static", "quantile"], "seeds": [0, 1]}}


def several() -> list[Cell]:
    return cells(SEVERAL)


def sizes(groups: list[CellGroup]) -> list[int]:
    return [len(group.cells) for group in groups]


def test_groups_hold_every_cell_once_and_fill_the_places(pipeline: Path) -> None:
    six = several()
    assert sizes(group_cells(six, 1)) == [1] * 6
    assert sizes(group_cells(six, 8)) == [6]
    assert sizes(group_cells(six, 4)) == [3, 3]
    assert sizes(group_cells(six, 8, places=2)) == [3, 3]
    assert sizes(group_cells(six, 8, places=9)) == [1] * 6
    for most in (1, 2, 4, 8):
        found = [cell for group in group_cells(six, most) for cell in group.cells]
        assert sorted(cell.label for cell in found) == sorted(cell.label for cell in six)


def test_cells_with_other_inputs_and_local_training_do_not_share(pipeline: Path) -> None:
    first, second, *_ = several()
    others = [
        second.model_copy(update={"model": Model(source="elsewhere")}),
        second.model_copy(update={"training": replace(second.training, max_length=32)}),
        second.model_copy(update={"inputs": second.inputs | {"data": "other"}}),
        second.model_copy(update={"mechanism": "dp_lora_fed", "options": {}}),
    ]
    for other in others:
        assert sizes(group_cells([first, other], 8)) == [1, 1]
    assert sizes(group_cells([first, second.model_copy(update={"inputs": second.inputs | {"policy": "x"}})], 8)) == [2]


def test_cells_with_learning_rates_of_their_own_share_a_pass(pipeline: Path) -> None:
    entries = {"static": {"sweep": {"learning_rate": [0.01, 0.04]}}, "plain": {"like": "static"}}
    own = cells({"mechanisms": entries, "experiment": {"mechanisms": ["static", "plain"]}})
    (group,) = group_cells(own, 8)
    shared = shared_inputs(own[0], torch.device("cpu"))
    rates = {cell.mechanism: prepare(cell, shared, OsEntropy()).spec.plan.learning_rate for cell in group.cells}
    default = load_settings().training.learning_rate
    assert rates == {"static_learning_rate0.01": 0.01, "static_learning_rate0.04": 0.04, "plain": default}
    assert len({cell.directory for cell in own}) == 3


def test_what_a_group_left_is_forgotten_with_any_change_of_its_members(pipeline: Path) -> None:
    six = several()
    keys = {CellGroup(tuple(six[:number])).key for number in range(1, 7)}
    assert len(keys) == 6
    assert all(key.startswith(six[0].directory.name + "/") for key in keys)


def test_each_cell_of_a_group_is_a_whole_run(pipeline: Path) -> None:
    group = several()
    run_cells(group, "cpu")
    for cell in group:
        contents = read_ledger(cell.directory / "ledger.jsonl")
        result = json.loads((cell.directory / "result.json").read_text())
        assert contents.complete
        assert contents.releases == STEPS
        assert result["label"] == cell.label
        assert result["together"] == 6
        assert contents.header.mechanism == cell.mechanism
        assert (cell.directory / "adapter" / "adapter_model.safetensors").exists()
        assert not (cell.directory / "checkpoint.safetensors").exists()
        if cell.epsilon:
            assert contents.epsilons.certified <= BUDGET
    assert sizes(group_cells(group, 8)) == [1] * 6  # finished: nothing to share
    adapters = {(cell.directory / "adapter" / "adapter_model.safetensors").read_bytes() for cell in group}
    assert len(adapters) == 6


@pytest.mark.parametrize("name", ["model", "training", "data", "versions"])
def test_a_cell_with_other_inputs_is_refused_and_the_first_ends(pipeline: Path, name: str) -> None:
    """Its result would be filed under a model, length or data that it never saw."""
    first, second, *_ = several()
    changes = {
        "model": {"model": second.model.model_copy(update={"dtype": "bfloat16"})},
        "training": {"training": replace(second.training, max_length=32)},
        "data": {"inputs": second.inputs | {"data": "old"}},
        "versions": {"versions": second.versions | {"loop": 0}},
    }
    other = second.model_copy(update=changes[name])
    with pytest.raises(CellsError, match=r"Fix: run "):
        run_cells([first, other], "cpu")
    assert is_finished(first.directory)
    assert not (other.directory / "ledger.jsonl").exists()


def test_data_that_changes_while_it_is_read_is_refused_and_not_kept(
    pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cell, *_) = several()
    real, kept = base_model.load_base, TRAIN.read_bytes()

    def swapping(*arguments: Any) -> Any:
        records = read_records(TRAIN)
        write_records(TRAIN, replace(records, text=pa.array(["other words"] * len(records.text))))
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(base_model, "load_base", swapping)
        with pytest.raises(ConfigError, match="changed"):
            run_cells([cell], "cpu")
    TRAIN.write_bytes(kept)
    assert not list(TOKENS.glob("train-*"))
    run_cells([cell], "cpu")
    assert is_finished(cell.directory)


@pytest.mark.parametrize("place", ["shared_inputs", "_evaluate", "pass"])
def test_a_full_gpu_is_a_sentence_and_cells_go_on(place: str, pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of them met it, and without a size, which would follow from what was drawn."""
    group = several()[:2]

    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.20 GiB. Process 491 has")

    with monkeypatch.context() as patch:
        if place == "pass":
            patch.setattr(shared_pass._Pass, "_compute", full)
        else:
            patch.setattr(cell_training if place == "_evaluate" else finetune, place, full)
        with pytest.raises(DptuneError) as caught:
            run_cells(group, "cpu")
    sentence = "memory is full, the GPU's or the machine's. Fix: lower experiment.cells_per_device"
    assert str(caught.value).count(sentence) == (1 if place == "shared_inputs" else 2)
    assert "GiB" not in str(caught.value)
    run_cells(group, "cpu")
    assert all(is_finished(cell.directory) for cell in group)


@pytest.mark.parametrize("count", [1, 3])
def test_a_pass_that_fails_once_ends_no_cell_and_one_that_fails_again_does(
    count: int, pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, tried = several()[:count], []

    def broken(*_: Any) -> Any:
        raise RuntimeError("a kernel failed")

    def failing(times: int) -> Any:
        def compute(*given: Any, **more: Any) -> Any:
            tried.append(1)
            if len(tried) <= times:
                raise RuntimeError("a kernel failed")
            return real(*given, **more)

        return compute

    real = loop.per_sample_gradients
    with monkeypatch.context() as patch:
        patch.setattr(shared_pass._Pass, "_compute", broken)
        patch.setattr(loop, "per_sample_gradients", failing(99))
        with pytest.raises(RuntimeError, match="a kernel failed"):
            run_cells(group, "cpu")
        assert len(tried) == (2 if count == 1 else count), "each cell once more, alone"
        tried.clear()
        patch.setattr(loop, "per_sample_gradients", failing(1 if count == 1 else 0))
        run_cells(group, "cpu")
    assert all(is_finished(cell.directory) for cell in group)


@pytest.mark.parametrize("count", [1, 2])
def test_a_cell_that_diverged_is_not_resumed_whatever_became_of_others(
    count: int, pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a cell that crashed the process was started again, and the diverged one with it."""
    group = several()[2 : 2 + count]

    def failing(run: Run) -> None:
        if run.directory == group[0].directory:
            raise DivergedError("the run diverged.")
        raise RuntimeError("a crash")

    with monkeypatch.context() as patch:
        patch.setattr(Run, "end", failing)
        with pytest.raises(DivergedError if count == 1 else RuntimeError, match="the run diverged"):
            run_cells(group, "cpu")
    for _ in range(2):
        with pytest.raises(DivergedError if count == 1 else CellsError, match="the run diverged"):
            run_cells(group, "cpu")
    assert [is_finished(cell.directory) for cell in group] == [False, True][:count]
    set_aside(group[0].directory)
    run_cells(group, "cpu")
    assert is_finished(group[0].directory)


def test_a_cell_that_diverged_is_known_before_the_others_of_its_pass_end(
    pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, begin, dead = several()[2:4], Run.begin, []

    def begun(run: Run) -> Any:
        if run.directory == group[0].directory and not dead:
            dead.append(1)
            raise DivergedError("the run diverged.")
        if dead == [1]:
            dead.append(1)
            raise KeyboardInterrupt
        return begin(run)

    monkeypatch.setattr(Run, "begin", begun)
    with pytest.raises(KeyboardInterrupt):
        run_cells(group, "cpu")
    with pytest.raises(CellsError, match="the run diverged"):
        run_cells(group, "cpu")
    assert [is_finished(cell.directory) for cell in group] == [False, True]


def test_a_cell_that_fails_is_named_and_the_others_end(pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its first step, or at its end; the others are not run again with it."""
    group = several()[:4]
    real_prepare, real_result = finetune.prepare, cell_training.result_of

    def prepare(cell: Cell, *rest: Any) -> Any:
        if cell == group[0]:
            raise ConfigError("mechanisms.nonprivate", "is broken", fix="mend it")
        return real_prepare(cell, *rest)

    def result_of(prepared: Any, *rest: Any) -> Any:
        if prepared.cell == group[2]:
            raise AttributeError
        return real_result(prepared, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(cell_training, "prepare", prepare)
        with pytest.raises(CellsError, match=r"small\.nonprivate\.seed0-.*: mechanisms\.nonprivate: is broken"):
            run_cells(group[:2], "cpu")
        patch.setattr(cell_training, "result_of", result_of)
        with pytest.raises(RuntimeError, match="AttributeError"):
            run_cells(group, "cpu")
    assert [is_finished(cell.directory) for cell in group] == [False, True, False, True]
    seen: list[str] = []
    real = real_prepare
    monkeypatch.setattr(cell_training, "prepare", lambda cell, *rest: seen.append(cell.label) or real(cell, *rest))
    run_cells(group, "cpu")
    assert seen == [group[0].label, group[2].label]
    assert all(is_finished(cell.directory) for cell in group)
    assert [read_ledger(cell.directory / "ledger.jsonl").releases for cell in group] == [STEPS] * 4
