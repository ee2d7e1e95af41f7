"""A pipeline directory so small that a whole experiment takes seconds: built once, copied for every test."""

from __future__ import annotations

import copy
import json
import os
import shutil
import stat
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tasks.experiment.cells import Cell, grid
from tasks.profile import overrides
from tasks.settings.params import load_settings
from tasks.stage import run_stage

ROOT = Path(__file__).parents[2]
#: 142 of 200 records are on the train side (44 attack, 14 eval), and 4 extraction and 20 audit canaries beside them.
UNITS = 166
#: Releases of one cell: epochs 0.35 of these in batches of 16.
STEPS = 4
#: Small, because strong noise is priced fast.
BUDGET = 0.3
#: A policy's study of milliseconds, without its runs.
SWIM: dict[str, Any] = {
    "environment": "dptune/Riverswim-v0",
    "training": {"users": 2, "steps": 20, "updates": 4, "hidden": 0, "critic_hidden": 0, "evaluate_every": 2},
}
#: Settings of audits that take a second.
QUICK_AUDIT: dict[str, Any] = {"generations": 20, "candidates": 3, "records": 8, "step_trials": 0}
_BUILT: list[Path] = []

_CHANGES: dict[str, Any] = {
    "data": {"synthetic": {"encounters": 200, "seed": 7}},
    "canaries": {"extraction": 4, "audit": 20, "audit_kind": "code"},  # samples need the model first
    "pretrain": {
        "encounters": 100,
        "validation_encounters": 20,
        "vocabulary": 512,
        "layers": 1,
        "width": 16,
        "heads": 1,
        "max_length": 400,
        "epochs": 1,
    },
    "lora": {"rank": 2},
    "training": {
        "expected_batch_size": 16,
        "epochs": 0.35,
        "max_length": 64,
        "warmup_steps": 2,
        "physical_batch_size": 16,
        "checkpoint_every": 2,
        "evaluate_every": 2,
        "evaluate_records": 16,
    },
    "experiment": {
        "name": "tiny",
        "mechanisms": ["nonprivate", "static"],
        "epsilons": [BUDGET],
        "devices": ["cpu"],
        "cells_together": 1,
        "retries": 0,
    },
}


def repository_params() -> dict[str, Any]:
    """The repository's params.yaml as plain data."""
    return copy.deepcopy(_repository_params())


@cache
def _repository_params() -> dict[str, Any]:
    return dict(yaml.load((ROOT / "params.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader))


def params(*changes: dict[str, Any]) -> dict[str, Any]:
    """The repository's parameters made tiny, then changed."""
    merged = repository_params()
    for change in (_CHANGES, *changes):
        merged = merge(merged, change)
    return merged


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """A deep copy of ``base`` with ``over`` over it."""
    merged = copy.deepcopy(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def write_params(*changes: dict[str, Any], path: Path = Path("params.yaml")) -> None:
    """Write params.yaml into the current directory."""
    content = params(*changes)
    try:
        text = yaml.dump(content, Dumper=yaml.CSafeDumper, sort_keys=False)
    except UnicodeEncodeError:  # half of a character, which the writer in C does not take
        text = yaml.safe_dump(content, sort_keys=False)
    path.write_text(text, encoding="utf-8")


def apply_profile(profile: Path, path: Path = Path("params.yaml")) -> None:
    """Write a profile over a parameter file as `dvc exp run` does with the options that `tasks.profile` prints."""
    from dvc.utils.hydra import apply_overrides

    apply_overrides(path, overrides(profile, path))


def cells(*changes: dict[str, Any]) -> list[Cell]:
    """Write params.yaml and spell out its grid."""
    write_params(*changes)
    return grid(load_settings())


def static(*changes: dict[str, Any]) -> Cell:
    """The one private cell."""
    return next(cell for cell in cells(*changes) if cell.mechanism == "static")


def nonprivate(*changes: dict[str, Any]) -> Cell:
    """The one cell without noise."""
    return next(cell for cell in cells(*changes) if cell.mechanism == "nonprivate")


def run_stages(*changes: dict[str, Any], pretrained: bool = True) -> None:
    """All stages before the experiment, in the current directory."""
    from tasks.corpus.acquire import acquire
    from tasks.corpus.canaries import plant
    from tasks.corpus.pretrain import pretrain_public_model
    from tasks.corpus.split import split
    from tasks.corpus.validation import write_validation
    from tasks.corpus.verbalize import verbalize

    write_params(*changes)
    stages = [acquire, verbalize, split, plant]
    before = os.umask(0o022)
    try:
        with pytest.MonkeyPatch.context() as patch:
            few_samples(patch)
            for stage in [*stages, write_validation, pretrain_public_model] if pretrained else stages:
                run_stage(stage)
    finally:
        os.umask(before)


def few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the public model write 40 texts for canaries, not 1,024: those took six sevenths of all stages' time."""
    from dptune.audit.text import likelihood
    from tasks.corpus import pretrain

    monkeypatch.setattr(pretrain, "POOL", 40)
    monkeypatch.setattr(likelihood, "_ROWS", 48)


def built(factory: pytest.TempPathFactory) -> Path:
    """A directory with data, public model and an empty MLflow database, made once a session."""
    from mlflow import MlflowClient

    if _BUILT:
        return _BUILT[0]
    directory, before = factory.mktemp("pipeline"), Path.cwd()
    os.chdir(directory)
    torch.set_num_threads(1)  # a tiny model is faster so
    try:
        run_stages()
        MlflowClient(f"sqlite:///{directory / 'data' / 'mlflow.db'}").search_experiments()
    finally:
        os.chdir(before)
    _BUILT.append(directory)
    return directory


def copied(template: Path, target: Path) -> Path:
    """A copy of the pipeline, modes included."""
    return Path(shutil.copytree(template, target))


def prepare_environment(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """Work in ``directory``, with nothing inherited from the machine, and let subprocesses import the repository."""
    monkeypatch.chdir(directory)
    for name in ("MLFLOW_TRACKING_URI", "DPTUNE_UCI_PATH"):
        monkeypatch.delenv(name, raising=False)
    inherited = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *([inherited] if inherited else [])]))
    monkeypatch.setenv("DPTUNE_PLACES", str(directory / "places"))  # else tests of other checkouts are waited for
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


def quick_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let cells write no picture of their curves: drawing takes longer than training a tiny model."""
    from tasks.experiment import cell_training

    monkeypatch.setattr(cell_training, "draw_curves", lambda _, path: path.write_bytes(b"picture"))


def mode(path: Path) -> int:
    """Permission bits."""
    return stat.S_IMODE(path.stat().st_mode)


def read_json(path: Path) -> Any:
    """Content of a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def figures(value: Any, path: str = "") -> dict[str, float]:
    """Every number in nested plain data by its dotted path; list indices are dropped."""
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in figures(item, f"{path}.{key}".strip(".")).items()}
    if isinstance(value, list):
        return {k: v for item in value for k, v in figures(item, path).items()}
    return {path: float(value)} if isinstance(value, int | float) and not isinstance(value, bool) else {}
