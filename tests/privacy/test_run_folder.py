"""One class knows the names of a run's files, and one function opens the ledger among them."""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from dptune.privacy.accounting.renyi_filter import RenyiFilter
from dptune.privacy.budget_gate import BudgetError
from dptune.privacy.ledger import Ledger
from dptune.privacy.ledger_file import LedgerError, is_complete, read_ledger
from dptune.privacy.release import Release
from dptune.privacy.run_folder import RunFolder
from dptune.privacy.run_header import RunHeader

ROOT = Path(__file__).parents[2]
HEADER = RunHeader("static", "gdp_clt", "certified", 8.0, 1e-5, "record", 10)
RELEASE = Release(1.0, 4.0)
PLAN = Counter({RELEASE: 3})
#: Another value of every field of a header but the run's number.
OTHERS: dict[str, Any] = {
    "mechanism": "rldp",
    "published_accountant": "dppg",
    "accounting": "published",
    "epsilon": 9.0,
    "delta": 1e-6,
    "unit": "patient",
    "units": 11,
    "data": "others",
    "telemetry": "private",
    "leaks": ("a fixed seed",),
    "renyi_filter": RenyiFilter(2, 3.0),
    "inherited": ((RELEASE, 1),),
    "schedule": "another",
    "plugins": ("mine 1.0",),
    "search": "another",
    "canaries": 5,
    "coins": "c" * 64,
    "train": "all",
}
#: Fields that go with another.
_WITH: dict[str, dict[str, Any]] = {
    "leaks": {"epsilon": None},
    "canaries": {"coins": "c" * 64},
    "coins": {"canaries": 5},
}


def folder(tmp_path: Path, releases: int = 1, *, finish: bool = False) -> RunFolder:
    """A run with so many releases charged."""
    run = RunFolder(tmp_path / "run")
    with Ledger.open(run.ledger, HEADER, PLAN) as ledger:
        for _ in range(releases):
            ledger.charge(RELEASE)
        if finish:
            ledger.finish()
    return run


def test_no_other_module_spells_the_names() -> None:
    run = RunFolder(Path())
    own = {path.name for path in vars(run).values()} - {"", run.adapter.name, run.controller.name, run.lock.name}
    files = [file for part in ("dptune", "tasks", "flows") for file in (ROOT / part).rglob("*.py")]
    spelled = {
        f"{file.relative_to(ROOT)}: {node.value}"
        for file in files
        if file.name != "run_folder.py"
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in own
    }
    paths = {"tasks/paths.py: results.json"}  # of the prediction stage, which is no run
    assert spelled <= paths


def test_a_run_goes_on_where_its_ledger_is(tmp_path: Path) -> None:
    run = folder(tmp_path, 1)
    with Ledger.open(run.ledger, replace(HEADER, run_id="another process's"), PLAN) as ledger:
        assert (ledger.releases, ledger.composition) == (1, Counter({RELEASE: 1}))
        ledger.charge(RELEASE)
    assert read_ledger(run.ledger).releases == 2


def test_every_setting_of_a_run_is_compared(tmp_path: Path) -> None:
    assert set(OTHERS) == {item.name for item in fields(RunHeader)} - {"run_id", "format"}
    run = folder(tmp_path)
    before = run.ledger.read_bytes()
    for name, value in OTHERS.items():
        values = {name: value} | _WITH.get(name, {})
        with pytest.raises(LedgerError, match=rf"other settings \((\w+, )?{name}(, \w+)?\).*set-aside"):
            Ledger.open(run.ledger, replace(HEADER, **values), PLAN)
    assert run.ledger.read_bytes() == before
    Ledger.open(run.ledger, HEADER, PLAN).close()  # and no lock was left behind


@pytest.mark.parametrize("torn", [None, b"", b'{"accounting":"cert'])
@pytest.mark.parametrize("name", [file.name for file in RunFolder(Path()).released])
def test_no_fresh_ledger_is_put_beside_what_was_released(tmp_path: Path, name: str, torn: bytes | None) -> None:
    run = folder(tmp_path)
    (run.path / name).touch()
    run.ledger.unlink()
    if torn is not None:
        run.ledger.write_bytes(torn)
    with pytest.raises(LedgerError, match="has no ledger beside it" if torn is None else "the ledger is empty"):
        Ledger.open(run.ledger, HEADER, PLAN)
    assert not run.ledger.exists() or b"\n" not in run.ledger.read_bytes()
    (run.path / name).unlink()
    Ledger.open(run.ledger, HEADER, PLAN).close()
    assert read_ledger(run.ledger).releases == 0


def test_a_plan_past_the_budget_leaves_nothing(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    with pytest.raises(BudgetError):
        Ledger.open(run.ledger, HEADER, Counter({RELEASE: 10_000}))
    assert not run.path.exists()


def test_a_run_is_finished_with_its_last_line_and_its_result(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    assert not is_complete(run.ledger)
    run = folder(tmp_path, 1)
    run.result.write_text("{}")
    assert not run.is_finished
    run.result.unlink()
    with Ledger.open(run.ledger, HEADER, PLAN) as ledger:
        ledger.finish()
    assert is_complete(run.ledger)
    assert not run.is_finished
    run.result.write_text("{}")
    assert run.is_finished
    whole = run.ledger.read_bytes()
    run.ledger.write_bytes(whole[:-1])
    assert not run.is_finished
