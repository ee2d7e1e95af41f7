"""The finished runs that lie in folders of runs, by experiment: of each only those that one protocol made."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dptune.core.errors import ConfigError
from dptune.core.files import read_json
from dptune.job.result import RunResult
from dptune.privacy.run_folder import RunFolder
from tasks.charts.seed_groups import Result
from tasks.settings.experiment import RULE

#: Settings of a cell that one experiment may vary.
_VARIED = ("model_name", "model", "mechanism", "options", "epsilon", "seed", "accounting", "plugins", "versions")
#: Parts that all cells of an experiment use; the versions of others are their mechanism's.
_SHARED_PARTS = ("loop", "sampler")


@dataclass(frozen=True)
class FinishedStudy:
    """The finished runs of an experiment.

    Attributes:
        name: the experiment's.
        results: of the runs that have the settings of the last one to finish; mechanisms, budgets and seeds vary.
        left_out: number of runs of that name with other settings, which an earlier version of the experiment made.
    """

    name: str
    results: tuple[Result, ...]
    left_out: int = 0


def read_studies(folders: Sequence[Path]) -> list[FinishedStudy]:
    """The studies whose finished runs lie in folders of runs, by name. Raises: ConfigError for what is no folder."""
    found: dict[str, list[_Run]] = {}
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError("folder", f"{folder} is not a folder", fix="give data/runs of a study")
        for path in sorted(folder.iterdir()):
            run = RunFolder(path)
            if run.is_finished and run.result.exists() and run.cell.exists():
                one = _Run(read_json(run.cell), RunResult.read(run.result).to_dict(), run.result.stat().st_mtime)
                found.setdefault(str(one.cell["experiment"]), []).append(one)
    return [_study(name, runs) for name, runs in sorted(found.items())]


@dataclass(frozen=True)
class _Run:
    cell: dict[str, Any]
    result: Result
    finished: float


def _study(name: str, runs: Sequence[_Run]) -> FinishedStudy:
    """Runs of another protocol are left out, and so are those of a mechanism's earlier settings."""
    kept = _like_the_last(runs, lambda run: "all", _protocol)
    kept = _like_the_last(kept, _place, lambda run: {key: run.cell[key] for key in run.cell if key != "seed"})
    told = (run.result | {"final_records": run.cell["training"].get("final_records")} for run in kept)
    return FinishedStudy(name, tuple(told), len(runs) - len(kept))


def _like_the_last(
    runs: Sequence[_Run], place: Callable[[_Run], str], settings: Callable[[_Run], dict[str, Any]]
) -> list[_Run]:
    """Runs of each place that have the settings of the one that finished last."""
    last: dict[str, _Run] = {}
    for run in sorted(runs, key=lambda run: run.finished):
        last[place(run)] = run
    return [run for run in runs if settings(run) == settings(last[place(run)])]


def _place(run: _Run) -> str:
    """What a line of a table stands for: model, mechanism and budget."""
    return json.dumps([run.cell[key] for key in ("model_name", "mechanism", "accounting", "epsilon")])


def _protocol(run: _Run) -> dict[str, Any]:
    """What all runs of an experiment share: records, task, schedule, adapters, versions of shared parts."""
    shared = {key: value for key, value in run.cell.items() if key not in _VARIED}
    training = {key: value for key, value in run.cell["training"].items() if key not in ("learning_rate", *RULE)}
    inputs = {key: value for key, value in run.cell["inputs"].items() if key not in ("policy", "plugins", "model")}
    versions = [run.cell.get("versions", {}).get(part) for part in _SHARED_PARTS]  # None: of before parts had versions
    return shared | {"training": training, "inputs": inputs, "versions": versions}
