"""What decides a result: the modules that an entry point reaches, and the files that a stage of DVC depends on."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks import identity
from tasks.identity import NO_RESULT, ROOT, closure, code_digest, file_of, imported, syntax_digest
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
    "tasks.prediction.scores",
)
#: What MLflow is sent and what a page shows of a run is a result of a stage, if not of a run.
NO_STAGE = {name: why for name, why in NO_RESULT.items() if name.startswith(("dptune", "tasks.settings", "flows"))} | {
    f"tasks{name}": NO_RESULT[f"tasks{name}"]
    for name in ("", ".experiment.checks", ".experiment.standing", ".identity", ".paths", ".stage", ".workspace")
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
    assert missing == [], f"add to deps of stage {stage} in dvc.yaml (a folder covers its files):\n" + "\n".join(
        f"      - {path}" for path in sorted(missing)
    )


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_change_in_any_module_that_is_reached_changes_the_digest_and_one_outside_does_not(
    entry: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed_over = ANSWERING if entry == "tasks.prediction.ensembles" else ()
    changed: set[ast.Module] = set()
    real = cache(identity.syntax_digest)
    monkeypatch.setattr(identity, "syntax_digest", lambda tree: real(tree) + "changed" * (tree in changed))

    def digest_with(name: str | None) -> str:
        identity._digest.cache_clear()
        changed.clear()
        changed.update([identity._source(name)] if name else [])
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
    assert not {"tasks.audit.attacks", "dptune.policy.language.training"} & names


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


MODULE = '''"""A module."""

import functools

#: A bound.
LIMIT = 3


@functools.cache
def scaled(value, factor=2.0):
    """Scaled."""
    return [factor * value + LIMIT, f"{value:g}", None]


class Options:
    """Options."""

    kind: str = "flat"
'''


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"""A module."""', '"""Another text."""'),
        ('"""A module."""\n', ""),
        ('"""Scaled."""', '"""As many times as ``factor`` says.\n\n    Args:\n        factor: of the value.\n    """'),
        ('    """Options."""\n\n', ""),
        ("#: A bound.", "# The bound of everything.\n\n"),
        ("return [factor * value + LIMIT,", "return [\n        (factor * value) + LIMIT,  # first\n        "),
        ('"flat"', "'flat'"),
    ],
)
def test_words_and_layout_keep_the_digest_of_a_module(old: str, new: str) -> None:
    """A result costs privacy: to mend a sentence must not make anybody run again."""
    changed = MODULE.replace(old, new)
    assert changed != MODULE
    assert syntax_digest(ast.parse(changed)) == syntax_digest(ast.parse(MODULE))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("LIMIT = 3", "LIMIT = 4"),
        ("LIMIT = 3", "LIMIT = 3.0"),
        ("LIMIT = 3", "LIMIT = '3'"),
        ("LIMIT = 3", "LIMIT = None"),
        ("factor=2.0", "factor=2.5"),
        ("factor=2.0", "factor"),
        ("factor=2.0", "*, factor=2.0"),
        ("@functools.cache\n", ""),
        ("@functools.cache", "@functools.lru_cache"),
        ("factor * value", "value * factor"),
        ("factor * value", "factor / value"),
        ("{value:g}", "{value:e}"),
        (", None]", ", 0]"),
        (", None]", "]"),
        ("class Options:", "class Options(dict):"),
        ('kind: str = "flat"', 'kind: str = "l1"'),
        ('kind: str = "flat"', "kind: str"),
        ('    """Scaled."""\n', '    __doc__ = """Scaled."""\n'),
        ("import functools", "import functools, math"),
    ],
)
def test_any_change_of_code_changes_the_digest_of_a_module(old: str, new: str) -> None:
    changed = MODULE.replace(old, new)
    assert changed != MODULE
    assert syntax_digest(ast.parse(changed)) != syntax_digest(ast.parse(MODULE))


def test_every_constant_of_a_module_that_decides_is_part_of_its_digest() -> None:
    """On a real module, one constant after the other."""
    source = file_of("dptune.mechanisms.quantile").read_text(encoding="utf-8")
    before, tree = syntax_digest(ast.parse(source)), ast.parse(source)
    documentation = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in documentation]
    assert len(constants) > 10
    for constant in constants:
        real, constant.value = constant.value, "another value"
        assert syntax_digest(tree) != before, ast.unparse(constant)
        constant.value = real


def test_what_docstrings_say_decides_nothing() -> None:
    """The help of a part's options is read at run time; what prints it is called by the command line alone."""
    printing = {"option_rows", "describe_parts", "describe_options"}
    readers = set()
    for name in closure(ENTRIES, NO_RESULT):
        used = {getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(identity._source(name))}
        if used & {"__doc__", "getdoc", "docstring_parser"}:
            readers.add(name)
        elif name != "dptune.mechanisms.registry":
            assert not used & printing, name
    assert readers == {"dptune.declarations", "dptune.mechanisms.registry"}


def test_imports_in_functions_and_names_of_processes_are_found_and_those_for_types_are_not() -> None:
    assert "dptune.policy.language.training" in imported("tasks.policy.rlhf"), "inside functions"
    assert "tasks.experiment.finetune" in imported("flows.experiment"), "as the name of a process"
    assert "dptune.corpus.reading.jsonl_file" in imported("dptune.corpus.reading.formats"), "as the name of a reader"
    public, schedule = "dptune.policy.environments.public", "dptune.policy.environments.schedule"
    assert f"from {schedule} import" in file_of(public).read_text(encoding="utf-8")
    assert schedule not in imported(public), "for type checkers"


def test_no_two_threads_build_syntax_trees_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells of a flow start in threads; Python 3.11 ends one of them with a SystemError."""
    real, alone = ast.parse, []

    def parse(text: str) -> ast.Module:
        alone.append(identity._PARSING.locked())
        return real(text)

    monkeypatch.setattr(ast, "parse", parse)
    identity._source.cache_clear()
    identity._source("tasks.paths")
    assert alone == [True]


def test_no_module_that_draws_clips_trains_or_prices_is_passed_over() -> None:
    """Else a run made with other noise would count as the same run."""
    packages = ("privacy", "mechanisms", "training", "policy", "audit", "prediction", "tuning", "corpus")
    assert not [name for name in NO_RESULT if name.startswith(tuple(f"dptune.{package}" for package in packages))]
