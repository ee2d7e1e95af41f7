"""Records of a plug-in's source become an adapter without the pipeline."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
from tiny_tuning import checkpoint
from typer.testing import CliRunner, Result

from dptune.cli import app
from dptune.cli.tune import records_of
from dptune.core.declarations import assignments
from dptune.core.errors import ConfigError, DataError
from dptune.job.delivery.verification import check_deliverable
from dptune.records import catalogue
from dptune.records.reading.read import read
from dptune.records.reading.record import Text

MODULE = """
from dptune.records.catalogue import source


@source("made_up_visits", rows=True)
def visits(customers: int, word: str = "cat", late: bool = False):
    for number in range(60):
        yield {"customer_id": number % customers, "text": f"{number} red {word}" + " late" * late}


@source("made_up_letters")
def letters(count: int = 60):
    for number in range(count):
        yield f"{number} blue dog."
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = "made_up_sources"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(catalogue, "SOURCES", dict(catalogue.SOURCES))
    sys.modules.pop(name, None)
    return name


def tune(plugin: str, *arguments: str) -> Result:
    quick = ["--epsilon", "8", "--epochs", "2", "--expected-batch-size", "8", "--rank", "2"]
    return CliRunner().invoke(app, ["--plugin", plugin, "tune", "--model", str(checkpoint()), *quick, *arguments])


def test_rows_of_a_plugin_are_tuned_on_by_units(plugin: str, tmp_path: Path) -> None:
    source = ["--source", "made_up_visits", "--source-set", "customers=30", "--unit", "customer_id"]
    done = tune(plugin, *source, "--out", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    header = check_deliverable(tmp_path / "out" / "adapter").header
    assert header.unit == "customer_id"
    assert header.data.startswith("source made_up_visits of made_up_sources sha256:"), "whose code made the records"


def test_texts_of_a_plugin_are_tuned_on_and_may_have_a_label(plugin: str, tmp_path: Path) -> None:
    done = tune(plugin, "--source", "made_up_letters", "--called", "letters", "--out", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    assert check_deliverable(tmp_path / "out" / "adapter").header.data == "letters"


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ([], "--data: is missing. Fix: give a file, or the source of a plug-in with --source"),
        (["--data", "a.csv", "--source", "made_up_letters"], "--data: does not go with --source"),
        (["--data", "a.csv", "--source-set", "count=3"], "--source-set: is for a plug-in's --source"),
        (
            ["--source", "text"],
            "--source: 'text' is neither a benchmark nor a plug-in's source. Fix: use one of e2e, dart, glue, "
            "wikitext, billion_words, made_up_visits, ",
        ),
        (["--source", "nosuch"], "unknown source 'nosuch'"),
        (
            ["--source", "made_up_letters", "--unit", "name"],
            "--unit: source made_up_letters yields texts",
        ),
        (["--source", "made_up_letters", "--source-set", "count=many"], "--source-set count: 'many' is not a"),
        (
            ["--source", "made_up_letters", "--source-set", "number=3"],
            "--source-set: source 'made_up_letters' does not take them",
        ),
        (["--source", "made_up_visits"], "missing a required argument: 'customers'"),
    ],
)
def test_wrong_sources_are_named(plugin: str, given: list[str], problem: str) -> None:
    done = tune(plugin, *given)
    assert done.exit_code == 2, done.output
    assert problem in " ".join(done.output.split())


def test_arguments_become_what_their_annotations_say(plugin: str) -> None:
    __import__(plugin)
    found, _ = records_of("made_up_visits", None, {"customers": "2", "word": "12", "late": "true"})
    assert next(iter(found.data)) == {"customer_id": 0, "text": "0 red 12 late"}  # type: ignore[call-overload]


def test_a_source_that_fails_is_named(plugin: str) -> None:
    __import__(plugin)
    found, _ = records_of("made_up_visits", None, {"customers": "0"})
    with pytest.raises(DataError, match=r"source 'made_up_visits' failed \(ZeroDivisionError"):
        list(found.data)
    with pytest.raises(ConfigError, match="customers: 'two' is not a number"):
        records_of("made_up_visits", None, {"customers": "two"})


def test_white_space_of_a_text_is_kept_and_that_of_a_number_is_not(plugin: str) -> None:
    importlib.import_module(plugin)
    described, _ = records_of("made_up_visits", None, assignments(["customers = 30", "word=\ncat ", "late= true"]))
    assert [record.content for record in read(described)][:1] == [Text("0 red \ncat  late")]
