"""What decides a result: the modules that an entry point reaches, and the files that a stage of DVC depends on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks import identity
from tasks.identity import NO_RESULT, ROOT, closure, code_digest, file_of, imported
from tasks.prediction.ensembles import ANSWERING

#: Whatever names its results by the code that they come from.
ENTRIES = (
    "tasks.experiment.finetune",
    "tasks.audit.attacks",
    "tasks.policy.gradient",
    "tasks.policy.audit",
    "tasks.policy.rlhf",
    "tasks.policy.tenants",
    "tasks.prediction.ensembles",
)
#: What MLflow is sent and what a page shows of a run is a result of a stage, if not of a run.
NO_STAGE = {name: why for name, why in NO_RESULT.items() if name.startswith(("dptune", "tasks.settings", "flows"))} | {
    f"tasks{name}": NO_RESULT[f"tasks{name}"]
    for name in ("", ".experiment.checks", ".experiment.standing", ".identity", ".paths", ".stage")
}
STAGES: dict[str, Any] = yaml.safe_load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))["stages"]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_depends_on_all_that_its_command_reaches(stage: str) -> None:
    """Not only on the modules of its own process: a flow starts others by name."""
    entry, deps = STAGES[stage]["cmd"].split()[2], STAGES[stage]["deps"]
    reached = {relative(file_of(name)) for name in closure([entry], NO_STAGE)}
    missing = [path for path in reached if not any(Path(path).is_relative_to(dep) for dep in deps)]
    assert sorted(missing) == []


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_change_in_any_module_that_is_reached_changes_the_digest_and_one_outside_does_not(
    entry: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed_over = ANSWERING if entry == "tasks.prediction.ensembles" else ()
    changed: set[Path] = set()
    real = identity.sha256
    monkeypatch.setattr(identity, "sha256", lambda path: "another" if path in changed else real(path))

    def digest_with(name: str | None) -> str:
        identity._digest.cache_clear()
        changed.clear()
        changed.update([file_of(name)] if name else [])
        return code_digest(entry.removeprefix("tasks."), passed_over)

    before, inside = digest_with(None), closure([entry], {*NO_RESULT, *passed_over} - {entry})
    everything = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in ROOT.glob("dptune/**/*.py")}
    assert entry in inside
    assert all(digest_with(name) != before for name in inside)
    assert all(digest_with(name) == before for name in sorted(everything - inside)[:40])
    identity._digest.cache_clear()


def test_a_cell_is_named_by_the_code_that_trains_and_charges_it() -> None:
    names = closure(["tasks.experiment.finetune"], NO_RESULT)
    assert {"dptune.training.run", "dptune.privacy.ledger", "dptune.mechanisms.quantile"} <= names
    assert not {"tasks.audit.attacks", "dptune.policy.rlhf"} & names


def test_every_module_that_is_passed_over_is_reached_by_something() -> None:
    """An exception for what nobody imports any more would hide a new module of that name."""
    everything = closure([*ENTRIES, *(stage["cmd"].split()[2] for stage in STAGES.values())])
    assert {*NO_RESULT, *ANSWERING} <= everything


def test_a_digest_changes_with_a_modules_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "ROOT", tmp_path)
    digests = set()
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "x.py").write_text("import json\n")
    for name in ("one", "two"):
        for cached in (identity._digest, identity._source, identity.imported):
            cached.cache_clear()
        (tmp_path / "tasks" / "x.py").write_text(f"import tasks.{name}\n")
        (tmp_path / "tasks" / f"{name}.py").write_text("import json\n")
        digests.add(code_digest("x"))
        (tmp_path / "tasks" / f"{name}.py").unlink()
    for cached in (identity._digest, identity._source, identity.imported):
        cached.cache_clear()
    assert len(digests) == 2


def test_imports_in_functions_and_names_of_processes_are_found_and_those_for_types_are_not() -> None:
    assert "dptune.policy.rlhf" in imported("tasks.policy.rlhf"), "inside functions"
    assert "tasks.experiment.finetune" in imported("flows.experiment"), "as the name of a process"
    assert "policy.schedule import" in file_of("dptune.policy.public").read_text(encoding="utf-8")
    assert "dptune.policy.schedule" not in imported("dptune.policy.public"), "for type checkers"
