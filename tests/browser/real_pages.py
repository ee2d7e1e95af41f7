"""Pages on a search, on policies and on a synthetic corpus, from tiny runs that were really made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_pipeline import SWIM, copied, prepare_environment, quick_pictures, static, write_params

from dptune.core.files import write_text
from tasks.experiment.finetune import run_cell as run_training
from tasks.paths import POLICY, REPORT
from tasks.policy.gradient import policy_cells, run_cell
from tasks.report import policy, search
from tasks.search.run import search_records
from tasks.settings.params import load_settings
from tasks.synthetic import sample_cell

_SEARCH: dict[str, Any] = {
    "name": "tiny",
    "epsilon": 1,
    "space": {"learning_rate": {"log_uniform": [0.001, 0.02]}},
    "candidates": 3,
    "score": "public",
    "bound": "one_shift",  # the older bound is computed at once
}
_POLICY: dict[str, Any] = {
    "name": "tiny",
    "delta": 1e-5,
    "seeds": [0, 1],
    "processes": 1,
    "audit_trials": 0,
    "studies": {
        "swim": SWIM
        | {"runs": {"l2": {"algorithm": "l2", "epsilon": 3}, "kl": {"algorithm": "kl", "noise_multiplier": 1}}}
    },
}


def write_real_pages(pipeline: Path, directory: Path) -> Path:
    """Search the records of a copy of a built pipeline, train policies, sample a cell, and write their pages. Returns
    its data."""
    with pytest.MonkeyPatch.context() as patch:
        prepare_environment(patch, copied(pipeline, directory))
        write_params({"experiment": {"telemetry": "research"}})
        content = load_settings(overrides={"search": _SEARCH})
        search.write_page(search_records(content, "cpu"), REPORT)
        settings = type(content.policy).model_validate(_POLICY)
        POLICY.mkdir(exist_ok=True)
        policy.write_page([run_cell(cell) for cell in policy_cells(settings)], settings.delta, {}, POLICY)
        quick_pictures(patch)
        cell = static({"experiment": {"telemetry": "research"}})
        write_text(cell.directory / "cell.json", cell.model_dump_json())
        run_training(cell, "cpu")
        sample_cell(cell.directory, 24)
    return directory / "data"
