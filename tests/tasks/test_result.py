"""result.json: what is written reads back, older files read, and readers ask for declared fields."""

from __future__ import annotations

import ast
import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from dptune.core.errors import DataError
from dptune.job.delivery.privacy_section import covered
from dptune.job.result import RunResult
from tests.browser.samples import result

ROOT = Path(__file__).parents[2]
#: Names of variables that hold a cell's result in the report and its charts.
_RESULTS = {"result", "first", "other"}
_READERS = [
    *(ROOT / "tasks" / "report" / f"{name}.py" for name in (
        "answer", "benchmarks", "claims", "experiment", "steps_needed", "tables",
    )),
    *(ROOT / "tasks" / "charts" / f"{name}.py" for name in (
        "audits", "curves", "seed_groups", "utility",
    )),
    ROOT / "flows" / "common" / "pages.py",
]  # fmt: skip
#: What ``read_results`` and ``read_studies`` add from a cell's settings, and ``as_users_claim`` from its ledger.
_OF_SETTINGS = {"claimed_by", "epsilon_clt", "learning_rate", "plain", "final_records"}


def content(**changes: Any) -> dict[str, Any]:
    """A result.json of a cell without certified epsilon."""
    return RunResult.of(result("rldp_published", 2.0, 0)).to_dict() | changes


def test_what_is_written_reads_back() -> None:
    full = content(scores={"bleu": 0.5}, together=2, adapter_sha256="ab", restarts=1)
    found = RunResult.of(full)
    assert found.epsilon_certified == math.inf
    assert found.after["eval_perplexity"] == full["after"]["eval_perplexity"]
    assert found.to_dict() == full
    json.dumps(full, allow_nan=False)


def test_a_file_of_an_earlier_version_reads() -> None:
    old = {key: value for key, value in content().items() if key not in ("task", "crafted", "public_data", "knobs")}
    found = RunResult.of(old)
    assert (found.task, found.crafted, found.knobs, found.together) == ("generate", 0, [], None)


def test_the_sentence_of_an_earlier_version_is_read_as_the_present_one() -> None:
    now = covered("private", "the adapter")
    old = now.replace("databases, logs", "Prefect's database, logs") + " It includes what the run spent."
    assert RunResult.of(content(guarantee=old)).guarantee == f"{now} It includes what the run spent."


def test_keys_of_a_later_version_are_kept() -> None:
    found = RunResult.of(content(colour="blue"))
    assert found.further["colour"] == "blue"
    assert found.to_dict()["colour"] == "blue"


@pytest.mark.parametrize("name", ["label", "epsilon_certified", "after", "history"])
def test_a_missing_field_is_named(name: str) -> None:
    given = content()
    del given[name]
    with pytest.raises(DataError, match=f"result.json: has no {name}"):
        RunResult.of(given, Path("result.json"))


@pytest.mark.parametrize("file", _READERS, ids=lambda file: file.stem)
def test_pages_and_charts_read_declared_fields(file: Path) -> None:
    known = {field.name for field in fields(RunResult)} | _OF_SETTINGS
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        match node:
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=str(key))) if name in _RESULTS:
                assert key in known, f"{file.name}:{node.lineno}: {key}"
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="get"), args=[ast.Constant(value=key), *_]):
                assert name not in _RESULTS or key in known, f"{file.name}:{node.lineno}: {key}"
