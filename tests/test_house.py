"""The house: files are short, named by nouns, and one name means one thing."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FILES = [file for part in ("dptune", "tasks", "flows") for file in sorted((ROOT / part).rglob("*.py"))]
#: Words that need the code in mind to be understood.
FRAGMENTS = {"told", "telling", "met", "before", "after", "standing", "beginning", "opening", "asked", "listed"}
FRAGMENTS |= {"finished", "drawn", "verifying", "loading", "places", "plain", "together", "shown"}
#: Names of one thing that has a file in several rooms: its section of params.yaml, task, flow, page, chart, command.
ONE_THING = {
    *("__init__", "__main__", "audit", "benchmarks", "booking", "canaries", "experiment"),
    *("learner", "options", "policy", "prediction", "pretrain", "prompts"),
    *("run", "search", "settings", "suggest"),
    *("training", "tune", "preparation", "mechanisms", "data"),
    *("page", "registry"),
}


def test_no_file_is_long() -> None:
    long = {str(file.relative_to(ROOT)): lines for file in FILES if (lines := len(file.read_text().splitlines())) > 400}
    assert long == {}, "split these files: nobody reads so much at once"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_file_has_a_noun_for_a_name_and_says_what_it_is(file: Path) -> None:
    assert file.stem not in FRAGMENTS
    text = file.read_text(encoding="utf-8")
    if text.strip():
        first = (ast.get_docstring(ast.parse(text)) or "").split(" ")[0]
        assert first[:1].isalpha() or first[:1] in "`'\"", "begin the docstring with the thing that the file is about"


def test_one_name_means_one_thing() -> None:
    named = defaultdict(list)
    for file in FILES:
        named[file.stem].append(str(file.relative_to(ROOT)))
    several = {name: places for name, places in named.items() if len(places) > 1 and name not in ONE_THING}
    assert several == {}, "give files of different things different names"
    assert {name for name in ONE_THING if len(named[name]) < 2} == set(), "take these out of ONE_THING"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_nothing_stands_after_what_runs_a_module(file: Path) -> None:
    """It would not be defined yet where the module runs as a command, though every import of the module finds it."""
    body = ast.parse(file.read_text(encoding="utf-8")).body
    assert not [node for node in body[:-1] if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)]


@pytest.mark.parametrize("named", [(), ("b",), ("b", "c"), ("b", "x")])
def test_the_quick_cases_of_a_test_are_the_first_or_those_that_are_named(
    named: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    """A misspelt name would make its case long, which nobody would notice: it fails where tests are collected."""
    conftest: Any = request.config.pluginmanager.get_plugin(str(Path(__file__).with_name("conftest.py")))
    module = request.node.getparent(pytest.Module)
    items = [
        pytest.Function.from_parent(module, name=f"test[{case}]", originalname="test", callobj=test_no_file_is_long)
        for case in "abc"
    ]
    for item in items:
        item.add_marker(pytest.mark.one_case(*named))
    marking = conftest.pytest_pycollect_makeitem(module)
    next(marking)
    if "x" in named:
        with pytest.raises(module.CollectError, match="one_case of test names 'x'; its cases are a, b, c"):
            marking.send(items)
    else:
        with pytest.raises(StopIteration):
            marking.send(items)
        quick = [item.name for item in items if not item.get_closest_marker("long")]
        assert quick == [f"test[{case}]" for case in named or "a"]


def test_peft_asks_no_hub_about_the_base_model() -> None:
    """PEFT, by default, asks the hub for the base model's configuration, and so sends its name to a host."""
    nodes = [node for file in FILES for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    calls = [call for call in calls if getattr(call.func, "id", "") == "get_peft_model_state_dict"]
    assert len(calls) >= 2
    assert [call.lineno for call in calls if "save_embedding_layers" not in {one.arg for one in call.keywords}] == []
