"""Cells whose batches are drawn by another sampler than Poisson: their result, their name, and their audit."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_pipeline import UNITS, static, write_params

from dptune.core.errors import ConfigError
from dptune.core.files import write_text
from dptune.privacy.ledger_file import read_ledger
from dptune.privacy.samplers.sampler import Sampler
from tasks.audit.attacks import audit_cell
from tasks.experiment.finetune import run_cell
from tasks.search.request import check_search
from tasks.settings.experiment import Audit
from tasks.settings.params import load_settings

CRAFTED = 20
_UNITS = UNITS + CRAFTED


@pytest.mark.usefixtures("pipeline")
def test_the_default_sampler_renames_no_cell() -> None:
    assert static({"training": {"sampler": "poisson"}}).directory == static().directory
    assert static({"training": {"sampler": "truncated_poisson"}}).directory != static().directory


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("training", "expected"),
    [
        (
            {"sampler": "balls_in_bins", "expected_batch_size": _UNITS / 10, "epochs": 1},
            Sampler("balls_in_bins", batches=10),
        ),
        ({"sampler": "truncated_poisson", "max_batch": 50}, Sampler("truncated_poisson", units=_UNITS, max_batch=50)),
    ],
)
def test_a_cell_is_charged_and_audited_by_its_sampler(
    pipeline: Path, training: dict[str, object], expected: Sampler
) -> None:
    cell = static({"training": training, "canaries": {"crafted": CRAFTED}, "experiment": {"epsilons": [2]}})
    write_text(cell.directory / "cell.json", cell.model_dump_json())
    result = run_cell(cell, "cpu")
    contents = read_ledger(cell.directory / "ledger.jsonl")
    assert {release.sampler for release in contents.composition} == {expected}
    assert result["sampler"] == expected.name
    assert 1.9 < result["epsilon_certified"] == contents.epsilons.certified <= 2
    options = {"generations": 1, "candidates": 1, "records": 0, "shadows": 0, "step_trials": 500, "seed": 0}
    found = audit_cell(cell.directory, Audit(confidence=0.95, false_alarms=0.001, **options), "cpu")
    assert found["sampling"]["accusation"] is None
    assert ("epochs of its own" in found["sampling"]["power"]) == (expected.name == "balls_in_bins")
    assert found["step"]["mu_certified"] == pytest.approx(1 / next(iter(contents.composition)).noise_multiplier)
    assert "whole_run" not in found, "games draw Poisson samples"
    assert found["draw"]["sample_rate"] == pytest.approx(result["sample_rate"])


@pytest.mark.usefixtures("pipeline")
def test_a_cell_whose_bins_are_no_whole_number_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"expected_batch_size: balls_in_bins needs a whole .* Fix: use 16.6, for 10"):
        run_cell(static({"training": {"sampler": "balls_in_bins", "epochs": 1}}), "cpu")


@pytest.mark.usefixtures("pipeline")
def test_a_pipelines_search_by_another_sampler_is_refused() -> None:
    write_params({"training": {"sampler": "balls_in_bins"}})
    with pytest.raises(ConfigError, match=r"^training\.sampler: balls_in_bins does not go with a search"):
        check_search(load_settings())
