"""A run that cannot go on is kept with its ledger and priced; nothing ever tells a user to remove one."""

from __future__ import annotations

import ast
import math
import re
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from dptune.cli import app
from dptune.core.digits import at_most
from dptune.core.errors import ConfigError, DptuneError
from dptune.core.files import locked
from dptune.privacy.ledger import Ledger
from dptune.privacy.ledger_file import LedgerError, discard_unborn, read_ledger
from dptune.privacy.release import Release, Sampler
from dptune.privacy.run_folder import (
    FOLDER,
    RunFolder,
    Spending,
    _together,
    earlier_runs,
    fresh_start,
    said_within,
    set_aside,
    spending_of,
    spending_within,
)
from dptune.privacy.run_header import RunHeader
from dptune.privacy.spent_budgets.register import Register

ROOT = Path(__file__).parents[2]
DELTA = 1e-5


def run(folder: Path, releases: int, *, noise: float = 4.0, finish: bool = False, leave_open: bool = False) -> Ledger:
    """A run's folder with so many releases charged."""
    header = RunHeader("static", "gdp_clt", "certified", None, DELTA, "record", 10, data="records")
    ledger = Ledger.create(folder / "ledger.jsonl", header, Counter())
    for _ in range(releases):
        ledger.charge(Release(1.0, noise))
    if finish:
        ledger.finish()
    if not leave_open:
        ledger.close()
    return ledger


@settings(max_examples=15)
@given(st.lists(st.tuples(st.integers(1, 6), st.sampled_from([2.0, 4.0, 8.0]), st.booleans()), min_size=1, max_size=4))
def test_whatever_was_charged_is_found_again(runs: list[tuple[int, float, bool]]) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "cell-0123"
        spent = []
        for releases, noise, finish in runs:
            run(folder, releases, noise=noise, finish=finish)
            spent.append(read_ledger(folder / "ledger.jsonl").epsilons.certified)
            target, said = set_aside(folder)
            assert not folder.exists()
            assert target.parent == folder.parent
            assert said is not None
            assert (said.epsilon, said.releases, said.unit) == (spent[-1], releases, "record")
        found = [spending_of(path) for path in earlier_runs(folder)]
        assert [one.epsilon for one in found if one] == spent
        assert len({one.folder for one in found if one}) == len(runs)


def test_where_nothing_was_charged_nothing_is_counted(tmp_path: Path) -> None:
    assert spending_of(tmp_path) is None
    (tmp_path / "cell.json").write_text("{}")
    assert spending_of(tmp_path) is None
    run(tmp_path / "begun", 0)
    assert spending_of(tmp_path / "begun") is None
    (tmp_path / "unborn").mkdir()
    (tmp_path / "unborn" / "ledger.jsonl").write_text('{"accounting":')
    assert spending_of(tmp_path / "unborn") is None
    assert "nothing was charged" in fresh_start(tmp_path)
    assert set_aside(tmp_path / "begun")[1] is None


@pytest.mark.parametrize("name", [file.name for file in RunFolder(Path()).released])
def test_what_was_released_without_a_ledger_counts_as_infinite(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    spent = spending_of(tmp_path)
    assert spent is not None
    assert (spent.epsilon, spent.problem) == (math.inf, "its ledger is missing")
    assert "it is unknown what it has spent (its ledger is missing)" in fresh_start(tmp_path)
    run(tmp_path, 0)
    assert spending_of(tmp_path).epsilon == math.inf  # type: ignore[union-attr]
    (tmp_path / "ledger.jsonl").write_text("")
    assert spending_of(tmp_path).epsilon == math.inf  # type: ignore[union-attr]


def test_a_damaged_ledger_counts_as_infinite(tmp_path: Path) -> None:
    run(tmp_path, 3)
    path = tmp_path / "ledger.jsonl"
    path.write_text(path.read_text().replace('"noise_multiplier":4.0', '"noise_multiplier":9.0', 1))
    spent = spending_of(tmp_path)
    assert spent is not None
    assert (spent.epsilon, spent.problem) == (math.inf, "its ledger is damaged")


def test_a_ledger_that_nothing_prices_counts_as_infinite_and_stops_no_other_run(tmp_path: Path) -> None:
    """The old run cut its batches at every step, which ``tune`` refuses and a caller of the training loop may do."""
    header = RunHeader("static", "gdp_clt", "certified", None, DELTA, "record", 8, data="records")
    with Ledger.create(tmp_path / "old" / "ledger.jsonl", header, Counter()) as ledger:
        for _ in range(30):
            ledger.charge(Release(0.5, 4.0, sampler=Sampler("truncated_poisson", units=8, max_batch=4)))
    spent = spending_of(tmp_path / "old")
    assert spent is not None
    assert spent.epsilon == math.inf
    assert spent.problem.startswith("its ledger has no price: a batch is cut to 4 with a chance of 1 in 30 steps")
    assert "so it counts as infinite" in fresh_start(tmp_path / "old")
    assert [one.epsilon for one in Register(tmp_path / "spent.jsonl").earlier("people")] == [math.inf]


@pytest.mark.parametrize("cut", [1, 40])
def test_a_line_that_was_cut_off_in_writing_was_never_charged(tmp_path: Path, cut: int) -> None:
    run(tmp_path / "whole", 2)
    run(tmp_path / "torn", 3)
    path = tmp_path / "torn" / "ledger.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    before = path.read_bytes()
    whole, torn = spending_of(tmp_path / "whole"), spending_of(tmp_path / "torn")
    assert whole is not None
    assert torn is not None
    assert (torn.epsilon, torn.releases) == (whole.epsilon, 2)
    assert path.read_bytes() == before  # reading mends nothing


def test_a_run_at_work_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ledger = run(folder, 1, leave_open=True)
    with pytest.raises(LedgerError, match="another process is charging it"):
        set_aside(folder)
    ledger.close()
    with locked(folder / "lock"), pytest.raises(DptuneError, match="another process works on it"):
        set_aside(folder)
    assert spending_of(folder) is not None
    assert set_aside(folder)[0].exists()


def test_only_a_run_is_set_aside_and_only_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run's folder"):
        set_aside(tmp_path)
    with pytest.raises(ConfigError, match="is not a run's folder"):
        set_aside(tmp_path / "nowhere")
    run(tmp_path / "run", 1)
    target, _ = set_aside(tmp_path / "run")
    with pytest.raises(ConfigError, match="is set aside already"):
        set_aside(target)
    assert spending_of(target) is not None


def test_runs_within_a_run_count_beside_it(tmp_path: Path) -> None:
    """Runs that check a ranking lie in the winner's folder and are set aside with it, so their price counts as well."""
    folder = tmp_path / "winner"
    run(folder, 2, finish=True)
    assert said_within(folder) == ""
    run(folder / FOLDER / "one", 3, finish=True)
    run(folder / FOLDER / "one.set-aside-1", 1)
    run(folder / FOLDER / "begun", 0)
    names = (".", f"{FOLDER}/one", f"{FOLDER}/one.set-aside-1")
    costs = [read_ledger(folder / name / "ledger.jsonl").epsilons.certified for name in names]
    own = costs[0]
    said = CliRunner().invoke(app, ["set-aside", str(folder)])
    assert said.exit_code == 0, said.output
    within = f"epsilon {at_most(sum(costs) - own, 4)}, delta 2e-05"
    total = f"epsilon {at_most(sum(costs), 4)}, delta 3e-05"
    assert f"it has spent epsilon {at_most(own, 4)}, delta 1e-05" in said.output
    assert f"; 2 runs that check its ranking have spent {within} beside that, {total} in all." in said.output
    moved = tmp_path / "winner.set-aside-1"
    assert [one.folder for one in spending_within(moved)] == ["one", "one.set-aside-1"]
    (moved / FOLDER / "one" / "ledger.jsonl").write_text("edited\n")
    assert said_within(moved).endswith("epsilon \u221e, delta 2e-05 in all, because it is unknown what 1 of them spent")


def test_what_runs_within_have_spent_is_rounded_up() -> None:
    spent = [Spending(name, "record", "records", 1, 0.50001, 1.0004e-5) for name in ("one", "other")]
    assert _together(spent) == "epsilon 1.001, delta 2.01e-05"
    assert "epsilon 0.5001, delta 1.01e-05 about one record" in str(spent[0])


def test_a_folder_whose_runs_within_were_charged_is_not_called_free(tmp_path: Path) -> None:
    run(tmp_path / "winner", 0)
    run(tmp_path / "winner" / FOLDER / "one", 1)
    said = CliRunner().invoke(app, ["set-aside", str(tmp_path / "winner")]).output
    assert "nothing was charged to its own run; a run that checks its ranking has spent epsilon" in said
    assert "may be removed" not in said


def test_the_command_says_what_was_spent(tmp_path: Path) -> None:
    run(tmp_path / "my run", 2)
    epsilon = read_ledger(tmp_path / "my run" / "ledger.jsonl").epsilons.certified
    result = CliRunner().invoke(app, ["set-aside", str(tmp_path / "my run")])
    assert result.exit_code == 0
    words = " ".join(result.stdout.split())
    assert f"it has spent epsilon {at_most(epsilon, 4)}, delta 1e-05 about one record (2 releases)" in words
    assert "the report counts both where they lie in data/runs" in words
    assert (tmp_path / "my run.set-aside-1" / "ledger.jsonl").exists()
    again = CliRunner().invoke(app, ["set-aside", str(tmp_path / "my run")])
    assert again.exit_code == 2
    assert "is not a run's folder" in again.stderr


def test_the_command_in_a_message_can_be_copied(tmp_path: Path) -> None:
    run(tmp_path / "my run", 1)
    assert f"`dptune set-aside '{tmp_path}/my run'` keeps its ledger" in fresh_start(tmp_path / "my run")


_AWAY = re.compile(
    r"\b(remove|delete|discard|rm)\b[^.]*\b(folder|ledger|director|runs?\b(?! makes))"
    r"|start(s)? (it |again|another|anew)|(use|choose) another (run )?director|tune another",
    re.IGNORECASE,
)


def _messages(file: Path) -> list[str]:
    """Every text of a module but its docstrings."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [str(node.value) for node in texts if id(node) not in docstrings]


def test_no_message_tells_a_user_to_remove_a_ledger_or_to_spend_again_unpriced() -> None:
    files = [file for part in ("dptune", "tasks", "flows") for file in sorted((ROOT / part).rglob("*.py"))]
    found = {f"{file.relative_to(ROOT)}: {text}" for file in files for text in _messages(file) if _AWAY.search(text)}
    assert found == set()
    assert _AWAY.search("Fix: remove the run's folder and start again.")
    assert _AWAY.search("Fix: use another run directory.")
    assert _AWAY.search("the run is finished. Fix: start another run.")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert not re.search(r"rm .*data/(runs|ensembles|policy|secrets)", makefile)


@pytest.mark.parametrize("witness", ["served.json", "result.json"])
def test_a_ledger_that_was_cut_counts_as_infinite(tmp_path: Path, witness: str) -> None:
    """The chain cannot see that its last lines are missing; what stands beside it can."""
    folder = tmp_path / "cell"
    run(folder, 5)
    (folder / witness).write_text('{"releases": 5}')
    assert math.isfinite(getattr(spending_of(folder), "epsilon", math.nan))
    lines = (folder / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "ledger.jsonl").write_bytes(b"".join(lines[:4]))
    spent = spending_of(folder)
    assert spent is not None
    assert spent.epsilon == math.inf
    assert "was cut" in spent.problem


@pytest.mark.parametrize("header", [0, 400])
def test_a_charged_ledger_is_never_taken_for_one_that_was_not_begun(tmp_path: Path, header: int) -> None:
    """With 400 inherited kinds the first line has 84,000 bytes, of which only the first 65,536 were once searched."""
    folder = tmp_path / "cell"
    inherited = tuple((Release(1.0, 50.0 + kind), 1) for kind in range(header))
    made = RunHeader("static", "gdp_clt", "certified", None, DELTA, "record", 10, inherited=inherited)
    with Ledger.create(folder / "ledger.jsonl", made, Counter()) as ledger:
        ledger.charge(Release(1.0, 4.0))
    whole = (folder / "ledger.jsonl").read_bytes()
    damaged = (whole, bytes(len(whole)), whole.replace(b"\n", b"\r"))
    for content in damaged:
        (folder / "ledger.jsonl").write_bytes(content)
        discard_unborn(folder / "ledger.jsonl")
        assert (folder / "ledger.jsonl").read_bytes() == content
    (folder / "ledger.jsonl").write_bytes(whole[:100])
    discard_unborn(folder / "ledger.jsonl")
    assert not (folder / "ledger.jsonl").exists()


def test_a_run_that_is_a_link_stays_among_those_that_are_counted(tmp_path: Path) -> None:
    runs, elsewhere = tmp_path / "runs", tmp_path / "elsewhere" / "cell"
    runs.mkdir()
    run(elsewhere, 3)
    (runs / "cell").symlink_to(elsewhere)
    done = CliRunner().invoke(app, ["set-aside", str(runs / "cell")])
    assert done.exit_code == 0
    (kept,) = earlier_runs(runs / "cell")
    spent = spending_of(kept)
    assert spent is not None
    assert spent.releases == 3


@pytest.mark.parametrize("kind", ["file", "dangling link", "folder"])
def test_whatever_has_the_next_name_is_passed_over(tmp_path: Path, kind: str) -> None:
    folder, taken = tmp_path / "cell", tmp_path / "cell.set-aside-1"
    run(folder, 2)
    if kind == "file":
        taken.write_text("mine")
    elif kind == "folder":
        taken.mkdir()
    else:
        taken.symlink_to(tmp_path / "nowhere")
    target, spent = set_aside(folder)
    assert target.name == "cell.set-aside-2"
    assert spent is not None
    assert read_ledger(target / "ledger.jsonl").releases == 2


@pytest.mark.parametrize("name", ["lock", "ledger.jsonl"])
def test_a_folder_in_place_of_a_file_is_named(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "cell"
    if name == "lock":
        run(folder, 1)
    (folder / name).mkdir(parents=True)
    ended = CliRunner().invoke(app, ["set-aside", str(folder)])
    assert ended.exit_code == 2, ended.output
    assert f"{folder / name}: Is a directory" in ended.output
    assert "Fix: " in ended.output
    assert folder.is_dir()
    spent = spending_of(folder)
    assert spent is not None
    assert math.isinf(spent.epsilon) == (name == "ledger.jsonl")
