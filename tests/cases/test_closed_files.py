"""Files and folders that are closed to the user, and disks that are full: one sentence, and nothing half-written."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from closed_process import Ended, close, hand_over, run_closed
from tiny_tuning import checkpoint, rows, write_csv
from typer.testing import CliRunner

from dptune.cli import app
from dptune.privacy.ledger_file import read_ledger
from tasks import grid
from tasks.stage import run_command

_TUNE = (
    "tune --model ../model --data ../records.csv --unit customer_id --epsilon 8 --delta 0.001 --epochs 1 "
    "--expected-batch-size 8 --rank 2 --target-modules c_attn"
)
COMMANDS = {
    "tune": _TUNE,
    "search": f"{_TUNE} --search ../space.yaml --eval-share 0.2",
    "verify": "verify ../run/adapter",
    "sample": "sample ../run/adapter --model ../model --records 40 --max-new-tokens 4",
    "score": "score ../run/adapter --model ../model --data ../records.csv --text text",
    "set-aside": "set-aside ../run",
    "spent": "spent ../spent.jsonl",
}
#: What commands say that they could not write.
_WRITTEN = {"tune": "tuned", "sample": "synthetic.jsonl", "set-aside": "folders that you can write in"}


@pytest.fixture(scope="module")
def made() -> Iterator[Path]:
    """A folder with a model, records, and a run, in which every command was run, so that its modules are imported."""
    folder = Path(tempfile.mkdtemp(prefix="dptune closed "))
    shutil.copytree(checkpoint(), folder / "model")
    write_csv(folder / "records.csv", rows(60, 30))
    space = "space: {learning_rate: {log_uniform: [0.001, 0.05]}}\ncandidates: 2\nscore: {on: held_out}\n"
    (folder / "space.yaml").write_text(space)
    (folder / "w").mkdir()
    before = Path.cwd()
    os.chdir(folder / "w")
    try:
        search = f"{COMMANDS['search']} --dry-run"
        for command in (f"{_TUNE} --out ../run", search, *(COMMANDS[name] for name in ("verify", "sample", "score"))):
            done = CliRunner().invoke(app, command.split())
            assert done.exit_code == 0, done.output
    finally:
        os.chdir(before)
    shutil.rmtree(folder / "w")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def place(made: Path) -> Iterator[Path]:
    """A copy of the folder that is the user's who runs the commands, with an empty folder ``w`` to run them in."""
    parent = Path(tempfile.mkdtemp(prefix="dptune closed ", dir="/tmp"))  # the folder of tests is closed to others
    parent.chmod(0o755)
    folder = Path(shutil.copytree(made, parent / "place"))
    (folder / "w").mkdir()
    hand_over(folder)
    yield folder
    for path in parent.rglob("*"):
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o700)
    shutil.rmtree(parent)


def listed(folder: Path) -> set[str]:
    """The files and folders below, without locks, which say nothing."""
    found = (os.path.join(at, name) for at, folders, files in os.walk(folder) for name in (*folders, *files))
    return {name for name in found if not name.endswith("lock")}


def refused(ended: Ended, about: str) -> None:
    """Check that a command ended with one sentence that names what it is about, and a fix."""
    assert ended.status == 2, ended
    assert not any("Traceback" in line for line in ended.output), ended
    assert ended.output[-1].startswith("error: "), ended
    assert about in ended.output[-1], ended
    assert ". Fix: " in ended.output[-1], ended


@pytest.mark.parametrize(
    ("command", "closed"),
    [
        ("tune", "records.csv"),
        ("tune", "model/model.safetensors"),
        ("tune", "model/tokenizer.json"),
        ("tune", "w"),
        ("tune", "spent.jsonl"),
        ("search", "space.yaml"),
        ("verify", "run/adapter"),
        ("verify", "run/adapter/adapter_model.safetensors"),
        ("verify", "run/adapter/README.md"),
        ("sample", "run/adapter/adapter_config.json"),
        ("sample", "model"),
        ("sample", "w"),
        ("score", "records.csv"),
        ("score", "model/model.safetensors"),
        ("set-aside", "run"),
        ("set-aside", "."),
        ("spent", "spent.jsonl"),
    ],
)
def test_a_closed_path_is_named_and_nothing_is_left(command: str, closed: str, place: Path) -> None:
    writes_in = closed in ("w", ".")
    arguments = COMMANDS[command].split()
    if closed == "spent.jsonl" and command == "tune":
        arguments += ["--out", "../second"]
    close(place / closed, 0o555 if writes_in else 0)
    before = listed(place)
    ended = run_closed(partial(app, arguments), place / "w")
    about = _WRITTEN[command] if writes_in else Path(closed).name
    refused(ended, about)
    if not (place / closed).is_dir():
        assert listed(place) == before


def test_a_register_that_is_not_there_is_not_called_another_file(made: Path, tmp_path: Path) -> None:
    """Nor is a folder, also where runs lie beside it that no register has."""
    beside = Path(shutil.copytree(made / "run", tmp_path / "runs" / "one")).parent / "folder"
    beside.mkdir()
    empty = tmp_path / "empty"
    empty.mkdir()
    for file, problem in ((empty / "none.jsonl", "does not exist"), (beside, "is not a register")):
        done = CliRunner().invoke(app, ["spent", str(file)])
        assert done.exit_code == 2
        assert f"{file}: {problem}. Fix: " in done.stderr


def names_of_cells() -> None:
    """What ``python -m tasks.grid names`` does."""
    run_command(grid.names)


@pytest.mark.parametrize(
    ("name", "mode", "fix"), [("params.yaml", 0, "change its permissions"), (".", 0o555, "change its permissions")]
)
def test_a_closed_checkout_is_named(
    name: str, mode: int, fix: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["tasks.grid", "names"])
    shutil.copy(Path(__file__).parents[2] / "params.yaml", place / "w")
    hand_over(place / "w")
    close(place / "w" / name, mode)
    ended = run_closed(names_of_cells, place / "w")
    refused(ended, "data: Permission denied" if name == "." else "params.yaml: cannot be read (Permission denied)")
    assert fix in ended.output[-1]


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("command", "largest"),
    [("tune", 0), ("tune", 2000), ("tune", 8000), ("search", 0), ("search", 2500), ("sample", 0), ("sample", 1000)],
)
def test_a_full_disk_ends_a_command_with_a_sentence_and_its_retry_pays_once(
    command: str, largest: int, place: Path
) -> None:
    """As ``ulimit -f`` simulates it: no file may be longer. Whatever is left is continued, or begun anew."""
    run: Callable[..., Ended] = partial(run_closed, partial(app, COMMANDS[command].split()), place / "w")
    refused(run(largest_file=largest), "File too large")
    if command == "sample":
        assert not list((place / "w").iterdir())
    ended = run()
    assert ended.status == 0, ended
    if command == "sample":
        assert len((place / "w" / "synthetic.jsonl").read_text().splitlines()) == 40
    else:
        assert read_ledger(place / "w" / "tuned" / "adapter" / "ledger.jsonl").complete
        register: Any = (place / "w" / "spent.jsonl").read_text().splitlines()
        assert len(register) == 2, "its head, and one run"
