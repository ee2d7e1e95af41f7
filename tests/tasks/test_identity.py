"""What decides a result: the modules that an entry point reaches, and the files that a stage of DVC depends on."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from dptune.core.declarations import plain
from tasks import identity
from tasks.dvc_deps import NO_STAGE
from tasks.identity import ROOT, closure, code_digest, file_of, imported, name_digest

#: Whatever names its results by what decides them.
ENTRIES = (
    "tasks.experiment.finetune",
    "tasks.audit.attacks",
    "tasks.policy.gradient",
    "tasks.policy.audit",
    "tasks.policy.rlhf",
    "tasks.policy.tenants",
    "tasks.prediction.ensembles",
    "tasks.prediction.scores",
)
STAGES: dict[str, Any] = yaml.safe_load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))["stages"]


def test_every_module_that_is_passed_over_is_reached_by_something() -> None:
    """An exception for what nobody imports any more would hide a new module of that name."""
    everything = closure([*ENTRIES, *(stage["cmd"].split()[2] for stage in STAGES.values())])
    listed = {name for name in NO_STAGE if not name.startswith("tasks.settings")}  # those are read from the folder
    assert listed - {"tasks.dvc_deps"} <= everything  # itself


def test_the_digest_of_code_follows_what_an_entry_reaches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "ROOT", tmp_path)
    (tmp_path / "tasks").mkdir()
    digests = []
    for name, text in (("one", "import json"), ("one", "import ast"), ("two", "import ast"), ("two", "import ast")):
        for cached in (identity.code_digest, identity._read, identity.imported):
            cached.cache_clear()
        (tmp_path / "tasks" / "x.py").write_text(f"import tasks.{name}\n")
        (tmp_path / "tasks" / f"{name}.py").write_text(text)
        digests.append(code_digest("x"))
    for cached in (identity.code_digest, identity._read, identity.imported):
        cached.cache_clear()
    assert len(set(digests)) == 3
    assert digests[2] == digests[3]


def test_imports_in_functions_and_names_of_processes_are_found_and_those_for_types_are_not() -> None:
    assert "dptune.policy.language.training" in imported("tasks.policy.rlhf"), "inside functions"
    assert "tasks.experiment.finetune" in imported("flows.experiment"), "as the name of a process"
    assert "dptune.records.reading.text_files" in imported("dptune.records.reading.formats"), "as the name of a reader"
    base, interfaces = "dptune.mechanisms.noises.additive_noise", "dptune.mechanisms.interfaces"
    assert f"from {interfaces} import" in file_of(base).read_text(encoding="utf-8")
    assert interfaces not in imported(base), "for type checkers"


def test_no_two_threads_build_syntax_trees_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells of a flow start in threads; Python 3.11 ends one of them with a SystemError."""
    real, alone = ast.parse, []

    def parse(text: str) -> ast.Module:
        alone.append(identity._PARSING.locked())
        return real(text)

    monkeypatch.setattr(ast, "parse", parse)
    identity._read.cache_clear()
    identity._read("tasks.paths")
    assert alone == [True]


def test_no_module_that_draws_clips_trains_or_prices_is_passed_over() -> None:
    """Else a run made with other noise would count as the same run."""
    packages = ("privacy", "mechanisms", "training", "policy", "audit", "prediction", "tuning", "corpus")
    assert not [name for name in NO_STAGE if name.startswith(tuple(f"dptune.{package}" for package in packages))]


@dataclass(frozen=True)
class _Inner:
    depth: float = 1.0


@dataclass(frozen=True)
class _Section:
    needed: float
    rate: float = 3.0
    names: tuple[str, ...] = ()
    table: dict[str, int] = field(default_factory=dict)
    none: int | None = None
    yes: bool | int = True
    inner: _Inner = _Inner()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        ({"rate": 3, "names": [], "table": {}, "none": None, "inner": _Inner(1)}, {}),
        ({"rate": 2.0}, {"rate": 2}),
        ({"yes": 1}, {"yes": 1}),
        ({"names": ("b", "a")}, {"names": ["b", "a"]}),
        ({"table": {"b": 1, "a": 2}}, {"table": {"a": 2, "b": 1}}),
        ({"inner": _Inner(0.5)}, {"inner": {"depth": 0.5}}),
        ({"none": 0}, {"none": 0}),
    ],
)
def test_what_differs_from_its_default_names_a_result(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert plain(_Section(needed=1.0, **given)) == {"needed": 1} | expected


def test_names_hang_on_values_and_neither_on_the_order_of_keys_nor_on_how_a_number_is_written() -> None:
    assert name_digest(plain({"a": 3, "b": (1.0, 2)})) == name_digest(plain({"b": [1, 2.0], "a": 3.0}))
    others = [{"a": 3}, {"a": 3.5}, {"a": "3"}, {"a": True}, {"a": None}, {"a": [3]}, {}]
    assert len({name_digest(plain(one)) for one in others}) == len(others)
