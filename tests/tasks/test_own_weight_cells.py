"""Cells of a study that train a model's own weights: their names, their runs, their audits and MLflow's model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlflow.pyfunc
import pandas as pd
import pytest
import torch
from tiny_pipeline import cells, static
from transformers import AutoModelForCausalLM

from dptune.core.files import write_text
from dptune.job.delivery.verification import check_deliverable
from dptune.privacy.run_folder import RunFolder
from tasks.audit.mechanism_attacks import step_attack
from tasks.audit.target import Target, load_target
from tasks.experiment.adapter_model import write_model
from tasks.experiment.cell_list import group_cells
from tasks.experiment.cells import Cell
from tasks.experiment.finetune import run_cell
from tasks.settings.params import load_settings


def training(**settings: Any) -> dict[str, Any]:
    return {"training": settings}


def test_what_trains_names_a_cell_and_adapters_then_do_not(pipeline: Path) -> None:
    adapters, own = static(), static(training(train="all"))
    assert static(training(train="lora")).directory == adapters.directory
    assert own.directory != adapters.directory
    assert static(training(train="all"), {"lora": {"rank": 2}}).directory == own.directory
    assert static(training(train="layers", train_layers="last 1")).directory != own.directory
    entries = {"static": {"train": "bias"}, "nonprivate": {"train": "all"}}
    chosen = cells({"mechanisms": entries, "experiment": {"cells_together": 8}})
    assert {cell.mechanism: cell.training.train for cell in chosen} == {"static": "bias", "nonprivate": "all"}
    assert [len(group.cells) for group in group_cells(chosen, 8)] == [1, 1]
    with pytest.raises(Exception, match="train_layers"):
        cells({"mechanisms": {"static": {"train": "layers"}}})


def target_noise(target: Target) -> float:
    """The effective noise multiplier that the cell's ledger was charged for."""
    return min(release.effective_noise_multiplier for release in target.contents.composition)


@pytest.mark.parametrize("chosen", [{"train": "all"}, {"train": "bias"}], ids=str)
def test_a_cell_trains_is_loaded_for_its_audit_and_becomes_mlflows_model(chosen: Any, pipeline: Path) -> None:
    cell: Cell = static(training(**chosen))
    write_text(RunFolder(cell.directory).cell, cell.model_dump_json(indent=2))
    result = run_cell(cell, "cpu")
    assert result["epsilon_certified"] <= result["budget_epsilon"]
    assert "0 million" not in result["model_about"]
    target = load_target(cell.directory, load_settings().audit, torch.device("cpu"), 1)
    both = zip(target.adapted.parameters(), target.public.parameters(), strict=True)
    trained = [not torch.equal(own, before) for own, before in both]
    assert any(trained)
    assert all(trained) == (chosen["train"] == "all")
    step = step_attack(replace(target, settings=target.settings.model_copy(update={"step_trials": 500})))
    assert step["step"]["mu_certified"] == pytest.approx(1 / target_noise(target))
    card = write_model(cell.directory, Path("model"))
    assert "LoRA" not in card
    assert check_deliverable(Path("model") / "artifacts" / "adapter").header.train == chosen["train"]
    scored = mlflow.pyfunc.load_model("model").predict(pd.DataFrame({"text": ["a short text of words"]}))
    base = mlflow.pyfunc.load_model("model").unwrap_python_model()
    assert scored["tokens"][0] > 1
    assert torch.equal(base.model.get_input_embeddings().weight, target.adapted.get_input_embeddings().weight)
    if chosen["train"] == "all":
        alone = AutoModelForCausalLM.from_pretrained(RunFolder(cell.directory).adapter)
        assert torch.equal(alone.lm_head.weight, target.adapted.lm_head.weight)
