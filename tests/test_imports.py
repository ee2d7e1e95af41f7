"""Imports run one way, and the library carries no more than it needs."""

from __future__ import annotations

import ast
import pkgutil
import shutil
import subprocess
import sys
import warnings
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import grimp
import pytest

from tests.forked import forked

ROOT = Path(__file__).parents[1]


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)


def test_the_layers_hold() -> None:
    beside = Path(sys.executable).parent / "lint-imports"
    command = str(beside) if beside.exists() else shutil.which("lint-imports")
    if command is None:
        pytest.skip("import-linter is not installed")
    result = subprocess.run([command, "--no-cache"], capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert ", 0 broken" in result.stdout


def test_no_circle_of_files() -> None:
    """Imports inside functions count; those for type checkers alone do not."""
    graph = grimp.build_graph("dptune", "tasks", "flows", exclude_type_checking_imports=True, cache_dir=None)
    needs = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    assert len(needs) > 150
    list(TopologicalSorter(needs).static_order())  # raises CycleError, which names the circle


def test_no_two_classes_have_one_name() -> None:
    """Two would be two things under one noun; that of a library beside which our classes stand counts too."""
    found = [
        (node.name, path.relative_to(ROOT).as_posix())
        for package in ("dptune", "tasks", "flows")
        for path in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    ]
    assert len(found) > 200
    files: dict[str, list[str]] = {"BaseModel": ["pydantic"]}
    for name, file in found:
        files.setdefault(name, []).append(file)
    assert {name: places for name, places in files.items() if len(places) > 1} == {}


def test_no_constant_of_a_file_is_bound_twice() -> None:
    """A merge of branches can leave two values of one name, of which the first is dead; Ruff sees only functions."""
    twice, seen = [], 0
    for package in ("dptune", "tasks", "flows"):
        for path in sorted((ROOT / package).rglob("*.py")):
            statements = ast.parse(path.read_text(encoding="utf-8")).body
            bound = [
                ast.unparse(target.value if isinstance(target, ast.Subscript) else target)
                for statement in statements
                if isinstance(statement, ast.Assign | ast.AnnAssign)
                for target in (statement.targets if isinstance(statement, ast.Assign) else [statement.target])
            ]
            seen += len(bound)
            twice += [(path.relative_to(ROOT).as_posix(), name) for name in set(bound) if bound.count(name) > 1]
    assert seen > 500
    assert twice == []


@pytest.mark.parametrize(
    "module", ["dptune.cli", "dptune.privacy.ledger", "dptune.mechanisms.registry", "tasks.settings.params"]
)
def test_pricing_and_settings_load_nothing_heavy(module: str) -> None:
    heavy = ["torch", "transformers", "peft", "opacus", "prefect", "dvc", "mlflow"]
    result = python(f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])")
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


def test_help_and_completion_load_no_numbers_at_all() -> None:
    """Every import that a command line's start adds is paid at each keystroke of completion."""
    heavy = ["numpy", "scipy", "dp_accounting", "rich.table", "dptune.mechanisms", "dptune.privacy"]
    result = python(f"import sys, dptune.cli; print([name for name in {heavy} if name in sys.modules])")
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


def test_an_accountant_that_needs_none_of_it_loads_no_dp_accounting() -> None:
    """It takes half a second, for plots and statistics that nobody asked for."""
    code = """
import sys
from collections import Counter
from dptune.privacy.accountants import epsilons
from dptune.privacy.release import Release
epsilons(Counter({Release(0.01, 1.0): 1000}), 1e-5)
print([name for name in ("dp_accounting", "scipy.integrate", "scipy.stats") if name in sys.modules])
"""
    result = python(code)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


def test_every_module_of_the_library_imports_without_the_pipelines_packages() -> None:
    """Nor without extras: ``opacus_accountant`` alone may need Opacus, and environments gymnasium."""

    def run() -> None:
        warnings.simplefilter("ignore")
        extras = ["opacus", "gymnasium", "stable_baselines3", "pycocoevalcap", "mauve", "faiss", "sacrebleu"]
        for name in ("prefect", "dvc", "mlflow", "rouge_score", *extras):
            sys.modules[name] = None  # type: ignore[assignment]
            for part in [part for part in sys.modules if part.startswith(f"{name}.")]:
                sys.modules[part] = None  # type: ignore[assignment]
        names = [module.name for module in pkgutil.walk_packages(import_module("dptune").__path__, "dptune.")]
        for name in names:
            if name.rpartition(".")[2] not in ("opacus_accountant", "__main__", "swimmers", "dosing"):
                import_module(name)
        print(len(names))

    status, output, errors = forked(run, ROOT, packages=ROOT)
    assert status == 0, errors
    assert int(output.split()[-1]) > 20


def test_the_opacus_accountant_does_need_opacus() -> None:
    result = python("import sys; sys.modules['opacus'] = None; import dptune.opacus_accountant")
    assert "ModuleNotFoundError" in result.stderr
