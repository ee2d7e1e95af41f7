"""What decides a result: each list of sources holds every module that its entry point reaches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from project_imports import ROOT, closure, file_of, imported

from tasks import identity
from tasks.audit.attacks import attacks as audit
from tasks.experiment import cells
from tasks.policy.gradient import audit as policy_audit
from tasks.policy.gradient import gradient as policy
from tasks.policy.gradient import rlhf, tenants
from tasks.prediction import ensembles

#: Modules whose change changes no result, and why; what they import counts only where something else imports it too.
SETTINGS = {
    "dptune": "a version and the package's description",
    "dptune.errors": "the words of an error",
    "dptune.files": "how a file is written, not what",
    "dptune.plugins": "it names the code of others, which has a digest of its own",
    "dptune.progress": "bars for people",
    "flows": "how long Prefect waits, and what it logs",
    "tasks.identity": "it names what decides",
    "tasks.paths": "where files lie",
    "tasks.settings.policy": "as tasks.settings.params",
    "tasks.settings.params": "its values are part of what names a run, and the parameters of a stage",
    "tasks.settings.bounds": "which settings are taken",
    "tasks.stage": "how a failed command ends",
    "tasks.settings.strict_yaml": "which files of settings are taken",
}
#: Of a run that spends budget. To run it again because of these would cost privacy and change nothing.
TOLD = SETTINGS | {
    "tasks.experiment.cells": "it spells a run out, and what it spells out is part of the name",
    "tasks.drawing": "pictures of a finished run",
    "tasks.experiment.results": "what is told of a finished run",
    "tasks.tracking": "what MLflow is sent",
    "tasks.unsent": "what MLflow is sent later",
}
ANSWERS = {
    "dptune.prediction.deployment": "an ensemble is trained before anything is asked of it",
    "dptune.prediction.protocols": "as deployment",
}
#: Entry point: (its list, what it leaves to others).
LISTS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "tasks.experiment.finetune": (cells.CODE, TOLD),
    "tasks.policy.rlhf": (rlhf.CODE, TOLD),
    "tasks.policy.gradient": (policy.CODE, TOLD),
    "tasks.policy.audit": (policy.CODE + policy_audit.CODE, TOLD),
    "tasks.policy.tenants": (cells.CODE + tenants.CODE, TOLD),
    "tasks.prediction.ensembles": (ensembles.CODE, TOLD | ANSWERS),
}
STAGES: dict[str, Any] = yaml.safe_load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))["stages"]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def reached(entry: str, passed_over: dict[str, str]) -> set[str]:
    return {relative(file_of(name)) for name in closure([entry], passed_over)}


@pytest.mark.parametrize("entry", LISTS)
def test_a_list_holds_all_that_its_entry_point_reaches(entry: str) -> None:
    patterns, passed_over = LISTS[entry]
    listed = {relative(path) for path in identity.sources(patterns)}
    assert relative(file_of(entry)) in listed
    assert sorted(reached(entry, passed_over) - listed) == []


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_depends_on_all_that_its_command_reaches(stage: str) -> None:
    """Not only on the modules of its own process: a flow starts others by name."""
    entry, deps = STAGES[stage]["cmd"].split()[2], STAGES[stage]["deps"]
    missing = [path for path in reached(entry, SETTINGS) if not any(Path(path).is_relative_to(dep) for dep in deps)]
    assert sorted(missing) == []


def test_an_audit_knows_the_code_that_its_run_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger is part of its key, and changes with every run; the rest it must name itself."""
    seen: set[str] = set()
    monkeypatch.setattr(audit, "sha256", lambda path: seen.add(relative(path)) or "x")
    audit._code_digest.__wrapped__()
    runs = {relative(path) for path in identity.sources(cells.CODE)}
    assert sorted(reached("tasks.audit.attacks", TOLD) - seen - runs) == []


def test_every_module_that_is_passed_over_is_reached_by_something() -> None:
    """An exception for what nobody imports any more would hide a new module of that name."""
    everything = closure([*LISTS, *(stage["cmd"].split()[2] for stage in STAGES.values())])
    assert {*TOLD, *ANSWERS} <= everything


def test_a_source_that_was_renamed_is_an_error() -> None:
    with pytest.raises(FileNotFoundError, match=r"dptune/nosuch\.py"):
        identity.sources(("dptune/errors.py", "dptune/nosuch.py"))


def test_a_digest_changes_with_content_and_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "ROOT", tmp_path)
    digest = identity.source_digest.__wrapped__
    (tmp_path / "one.py").write_text("1")
    first = digest(("*.py",))
    (tmp_path / "one.py").write_text("2")
    second = digest(("*.py",))
    (tmp_path / "one.py").rename(tmp_path / "two.py")
    assert len({first, second, digest(("*.py",))}) == 3


def test_imports_in_functions_and_names_of_processes_are_found_and_those_for_types_are_not() -> None:
    assert "dptune.policy.rlhf" in imported("tasks.policy.rlhf"), "inside functions"
    assert "tasks.experiment.finetune" in imported("flows.experiment"), "as the name of a process"
    assert "policy.schedule import" in file_of("dptune.policy.public").read_text(encoding="utf-8")
    assert "dptune.policy.schedule" not in imported("dptune.policy.public"), "for type checkers"
