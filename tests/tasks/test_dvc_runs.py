"""DVC's own commands on the real graph of stages: ledgers only grow, queued runs spend in the checkout, tables fit.

Every stage's command is a stand-in without training; parameters, outputs and the order are dvc.yaml's.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_pipeline import ROOT, prepare_environment

from dptune.core.errors import DptuneError
from tasks.paths import EXPERIMENT, PUBLIC_MODEL, RAW_MANIFEST, REPORT, REPORTS, RUNS
from tasks.stage import checkout_of, keep_pages, run_stage, share_checkout

pytestmark = pytest.mark.system

# What a stage does to files: pays once for each cell, named by its epsilon and the data, and writes its outputs.
_STAND_IN = """
import json, secrets, sys
from pathlib import Path
import yaml
from tasks.stage import keep_pages, share_checkout

def load(path):
    return yaml.load(open(path), yaml.CSafeLoader)

def work():
    Path("data").mkdir(exist_ok=True)
    share_checkout()
    for folder in ("data/runs", "data/secrets"):
        Path(folder).mkdir(exist_ok=True)
    name = sys.argv[1]
    stage = load("dvc.yaml")["stages"][name]
    epsilons = load("params.yaml")["experiment"]["epsilons"]
    for out in [*stage["outs"], *stage.get("metrics", [])]:
        path = Path(out if isinstance(out, str) else next(iter(out)))
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps([name, epsilons if name in ("experiment", "audit", "report") else ""])
        if path.suffix:
            path.write_text(text)
        elif not path.exists():  # what persists fits, and stays
            path.mkdir()
            (path / "part.json").write_text(text)
    if name == "pretrain":
        Path("data/models/samples.json").write_text("[]")
    if name == "canaries" and name in Path("data/canaries/part.json").read_text():
        drawn = secrets.token_hex(4)
        Path("data/canaries/part.json").write_text(drawn)
        Path(f"data/secrets/{drawn}.json").write_text(drawn)
    if name == "experiment":
        drawn = Path("data/canaries/part.json").read_text()
        for epsilon in epsilons:
            ledger = Path(f"data/runs/eps{epsilon}-{drawn}/ledger.jsonl")
            ledger.parent.mkdir(parents=True, exist_ok=True)
            if not ledger.exists():
                ledger.write_text("charged\\\\n")
    if name == "report":
        epsilons_of_best = [f"epsilon/{one}" for one in ("published", "noise_only", "certified", "audited")]
        figures = ("perplexity/eval", *epsilons_of_best)
        best = dict.fromkeys(figures, float(max(epsilons)))
        Path("data/report/metrics.json").write_text(json.dumps({"mechanism": "static", **best}))
        drawn = {"mechanism": "static", "colour": "#4d5761", "seed": 0}
        points = [{**drawn, "epsilon_certified": e, "perplexity": 9 - e} for e in epsilons]
        Path("data/report/plots/perplexity.json").write_text(json.dumps(points))
        rows = "cell,mechanism,colour,releases,perplexity\\\\na,static,#4d5761,1,2\\\\n"
        Path("data/report/plots/curves.csv").write_text(rows)
        keep_pages(Path("data/report"), "unnamed")

Path("ran.txt").open("a").write(sys.argv[1] + "\\\\n")
work()
"""


def run(*command: str) -> str:
    """Output of a command, which must succeed."""
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def dvc(*arguments: str) -> str:
    return run(sys.executable, "-m", "dvc", *arguments)


def kept() -> dict[str, bytes]:
    """Whatever no command may lose a byte of."""
    folders = (RUNS, Path("data/secrets"), Path("data/ensembles"))
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return {str(path): path.read_bytes() for path in files}


def grown(before: dict[str, bytes]) -> dict[str, bytes]:
    """What is kept now, after a look that nothing of what was before is gone."""
    now = kept()
    assert [path for path, content in before.items() if not now.get(path, b"").startswith(content)] == []
    return now


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A git repository whose stages ran once."""
    directory = tmp_path_factory.mktemp("dvc") / "checkout"
    directory.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        prepare_environment(patch, directory)
        _environment(patch)
        definition = yaml.safe_load((ROOT / "dvc.yaml").read_text())
        for name, stage in definition["stages"].items():
            stage["cmd"] = f"{shlex.quote(sys.executable)} stand_in.py {name}"
            stage["deps"] = ["stand_in.py", *(path for path in stage["deps"] if path.startswith("data/"))]
        Path("dvc.yaml").write_text(yaml.safe_dump(definition, sort_keys=False))
        Path("stand_in.py").write_text(_STAND_IN.replace("\\\\", "\\"))
        for name in ("params.yaml", ".gitignore", "data/.gitignore"):
            Path(name).parent.mkdir(exist_ok=True)
            if (ROOT / name).exists():
                shutil.copy(ROOT / name, name)
        with Path(".gitignore").open("a") as file:
            file.write("/ran.txt\n/places/\n")
        shutil.copytree(ROOT / "profiles", "profiles")
        run("git", "init", "--quiet", ".")
        dvc("init", "--quiet")
        if (ROOT / ".dvc" / "plots").exists():
            shutil.copytree(ROOT / ".dvc" / "plots", ".dvc/plots", dirs_exist_ok=True)
            for name in ("config", "page.html"):
                shutil.copy(ROOT / ".dvc" / name, f".dvc/{name}")
        run("git", "add", "--all")
        run("git", "commit", "--quiet", "--message", "the pipeline")
        dvc("repro")
    return directory


def _environment(patch: pytest.MonkeyPatch) -> None:
    for who in ("AUTHOR", "COMMITTER"):
        patch.setenv(f"GIT_{who}_NAME", "A User")
        patch.setenv(f"GIT_{who}_EMAIL", "user@example.org")
    patch.setenv("DVC_NO_ANALYTICS", "true")
    patch.delenv("DVC_EXP_NAME", raising=False)


@pytest.fixture
def checkout(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, as the current directory."""
    directory = Path(shutil.copytree(template, tmp_path / "checkout", symlinks=True))
    prepare_environment(monkeypatch, directory)
    _environment(monkeypatch)
    monkeypatch.setenv("DPTUNE_PLACES", str(tmp_path / "places"))
    Path("ran.txt").unlink()
    return directory


def ran() -> list[str]:
    """The stages that ran in the checkout, not in a copy of it."""
    return Path("ran.txt").read_text().split() if Path("ran.txt").exists() else []


def test_a_second_run_runs_nothing(checkout: Path) -> None:
    dvc("repro")
    dvc("exp", "run")
    assert ran() == []
    assert run("git", "status", "--short").split() == ["??", "dvc.lock"]


def test_no_command_of_dvc_takes_a_byte_from_a_ledger(checkout: Path) -> None:
    before = kept()
    assert len(before) == 2, "a ledger and a file of secrets"

    def spend() -> dict[str, bytes]:
        """Let all ledgers grow, as a cell does that DVC knows nothing of."""
        for ledger in RUNS.rglob("ledger.jsonl"):
            with ledger.open("a") as file:
                file.write("charged since\n")
        return kept()

    dvc("exp", "run", "--name", "two", "--set-param", "experiment.epsilons=[1,4]")
    assert len(grown(before)) == 4
    run("git", "checkout", "params.yaml")
    commands: list[tuple[str, ...]] = [
        ("checkout", "--force"),
        ("exp", "apply", "two"),
        ("repro",),
        ("repro", "--force"),
        ("checkout", "--relink"),
        ("exp", "remove", "two"),
        ("commit", "--force"),
        ("gc", "--workspace", "--force"),
        ("remove", "experiment"),
        ("checkout", "--force"),
    ]
    for command in commands:
        before = spend()
        dvc(*command)
        grown(before)


def test_a_restored_state_is_checked_against_the_ledgers(checkout: Path) -> None:
    """DVC restores metrics and plots alone: what tells of ledgers is made anew from the ledgers."""
    dvc("exp", "run", "--name", "two", "--set-param", "experiment.epsilons=[1,4]")
    run("git", "checkout", "params.yaml")
    dvc("repro")
    Path("ran.txt").unlink()
    dvc("exp", "apply", "two")
    dvc("repro")
    assert {"experiment", "audit", "report"} <= set(ran())
    assert not {"acquire", "canaries", "pretrain"} & set(ran()), "their outputs are restored, secrets and all"
    assert "[1, 4]" in EXPERIMENT.read_text()


@pytest.mark.parametrize("way", ["temp", "queue"])
def test_a_run_in_a_copy_spends_in_the_checkout_and_pays_for_no_finished_cell(checkout: Path, way: str) -> None:
    before = kept()
    options = ("--name", "more", "--set-param", "experiment.epsilons=[2,8]")
    dvc("exp", "run", f"--{way}", *options)
    if way == "queue":
        dvc("exp", "run", "--run-all")
    now = grown(before)
    assert ran() == []
    (new,) = set(now) - set(before)
    assert "eps8-" in new
    assert now == before | {new: b"charged\n"}, "the cell of epsilon 2 was paid for already"
    assert run("git", "status", "--short").split() == ["??", "dvc.lock"]
    assert (REPORTS / "more" / "report" / "report.html").exists()
    assert "[2]" in EXPERIMENT.read_text(), "the checkout's own state is as it was"
    assert "experiment.epsilons" in dvc("params", "diff", "HEAD", "more")


def test_a_profile_runs_without_a_change_of_the_checkout(checkout: Path) -> None:
    command = (sys.executable, "-m", "flows.repro", "--profile", "profiles/tiny.yaml")
    said = run(*command)
    assert "data/reports/tiny/report/report.html" in said
    assert run("git", "status", "--short").split() == ["??", "dvc.lock"]
    before = kept()
    assert "data/reports/tiny-2/report/report.html" in run(*command)
    assert kept() == before
    assert "tiny-2" in dvc("exp", "list", "--name-only")


def test_profiles_that_a_file_names_run_one_after_the_other(checkout: Path) -> None:
    for name, epsilon in (("one", 1), ("other", 4)):
        Path(f"{name}.yaml").write_text(f"experiment: {{epsilons: [{epsilon}]}}")
    Path("both.yaml").write_text("profiles: [one.yaml, other.yaml]")
    said = run(sys.executable, "-m", "flows.repro", "--profile", "both.yaml")
    places = [
        said.index(part)
        for part in (
            "study 1 of 2: one.yaml",
            "data/reports/one/report/report.html",
            "study 2 of 2: other.yaml",
            "data/reports/other/report/report.html",
        )
    ]
    assert places == sorted(places)
    assert {"one", "other"} <= set(dvc("exp", "list", "--name-only").split())


def test_a_bad_profile_ends_with_its_error(checkout: Path) -> None:
    Path("bad.yaml").write_text("training: {epochs: -1}")
    Path("metric.yaml").write_text("task: {inputs: 5, metrics: [blue]}")
    Path("gone.yaml").write_text("data: {source: jsonl, path: gone.jsonl}")
    for name in ("bad", "metric", "gone"):
        Path(f"both_{name}.yaml").write_text(f"profiles: [profiles/tiny.yaml, {name}.yaml]")
    RAW_MANIFEST.write_text("{}")  # of an earlier study, with whose copy of the records a single profile would go on
    for arguments, said in (
        (["--profile", "both_metric.yaml"], "metric.yaml: task.metrics: 'blue' is unknown"),
        (["--profile", "both_gone.yaml"], "gone.jsonl"),
        (["--profile", "bad.yaml"], "bad.yaml over params.yaml: training.epochs"),
        (["--profile", "both_bad.yaml"], "bad.yaml over params.yaml: training.epochs"),
        (["--profile"], "--profile: names no file"),
    ):
        ended = subprocess.run([sys.executable, "-m", "flows.repro", *arguments], capture_output=True, text=True)
        assert ended.returncode == 2
        last = ended.stderr.splitlines()[-1]
        assert last.startswith("error: ")
        assert said in last
        assert "Fix: " in last
        assert "study 1" not in ended.stderr, "all are checked before the first one starts"


def test_the_table_of_experiments_has_at_most_twelve_columns(checkout: Path) -> None:
    dvc("exp", "run", "--temp", "--name", "two", "--set-param", "experiment.epsilons=[1,4]")
    shown = run("sh", "-c", f"{shlex.quote(sys.executable)} -m dvc exp show --csv {_options()}")
    columns = next(csv.reader(shown.splitlines()))
    assert {"Experiment", "perplexity/eval", "epsilon/certified", "experiment.epsilons"} <= set(columns)
    assert "two" in shown
    assert len(columns) <= 12, columns


def _options() -> str:
    """Those of `make experiments`."""
    found = re.search(r"dvc exp show (.*)", (ROOT / "Makefile").read_text())
    assert found
    return found[1].replace("$$", "$").replace("$changed ", "")  # all columns that may be there


def test_plots_are_drawn_of_experiments(checkout: Path) -> None:
    dvc("exp", "run", "--temp", "--name", "two", "--set-param", "experiment.epsilons=[1,4]")
    dvc("plots", "diff", "workspace", "two")
    page = Path("dvc_plots/index.html").read_text()
    assert "certified epsilon" in page
    assert '"rev": "two"' in page
    assert "../data/report/charts.js" in page
    assert re.findall(r'(?:src|href)="?(http[^"]*)', page) == [], "no chart needs the network"


# ---- the copy


def test_a_copy_is_known_by_its_place() -> None:
    assert checkout_of(Path("/home/me/study/.dvc/tmp/exps/standalone/tmpx")) == Path("/home/me/study")
    assert checkout_of(Path("/home/me/study/.dvc/tmp/exps/tmpx/part")) == Path("/home/me/study")
    assert checkout_of(Path("/home/me/study")) is None
    assert checkout_of(Path("/home/me/.dvc/tmp/study")) is None


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Path]:
    directory = tmp_path / "study" / ".dvc" / "tmp" / "exps" / "tmpx"
    directory.mkdir(parents=True)
    monkeypatch.chdir(directory)
    monkeypatch.delenv("DVC_EXP_NAME", raising=False)
    return lambda: tmp_path / "study"


def test_a_copy_shares_what_is_kept_however_often_it_asks(copy: Callable[[], Path]) -> None:
    share_checkout()
    share_checkout()
    (RUNS / "ledger.jsonl").write_text("charged")
    assert (copy() / RUNS / "ledger.jsonl").read_text() == "charged"
    assert (copy() / RUNS).stat().st_mode & 0o077 == 0
    Path("data/failures.log").write_text("why")
    assert (copy() / "data" / "failures.log").read_text() == "why"


def test_every_stage_in_a_copy_shares_what_is_kept(copy: Callable[[], Path]) -> None:
    run_stage(lambda: None)
    assert RUNS.resolve() == copy() / RUNS


def test_a_copy_finds_the_files_that_the_parameters_name(copy: Callable[[], Path]) -> None:
    """Git need not know own records and models, and what it does not know is not in the copy."""
    (copy() / "own" / "model").mkdir(parents=True)
    (copy() / "own" / "rows.csv").write_text("text")
    parameters = {"data": {"path": "own/rows.csv"}, "experiment": {"models": {"mine": {"source": "own/model"}}}}
    Path("params.yaml").write_text(json.dumps(parameters))
    share_checkout()
    share_checkout()
    assert Path("own/rows.csv").read_text() == "text"
    assert Path("own/model").resolve() == copy() / "own" / "model"


@pytest.mark.parametrize("outs", [["data/models"], [{"data/models": {"cache": False}}]])
def test_a_copy_has_the_outputs_of_stages_for_itself(copy: Callable[[], Path], outs: list[Any]) -> None:
    """A stage of the copy would write through a link, into the checkout."""
    (copy() / PUBLIC_MODEL).mkdir(parents=True)
    models = {"ours": {"source": str(PUBLIC_MODEL)}}
    Path("params.yaml").write_text(json.dumps({"experiment": {"models": models}}))
    Path("dvc.yaml").write_text(json.dumps({"stages": {"checks": {"cmd": "true"}, "pretrain": {"outs": outs}}}))
    share_checkout()
    assert not os.path.lexists(PUBLIC_MODEL)


def test_a_file_outside_the_checkout_needs_an_absolute_path(copy: Callable[[], Path]) -> None:
    (copy().parent / "rows.csv").write_text("text")
    Path("params.yaml").write_text(json.dumps({"data": {"path": "../rows.csv"}}))
    with pytest.raises(DptuneError, match=r"\.\./rows.csv: leads out of the checkout.*Fix: give its absolute path"):
        share_checkout()


def test_a_copy_with_ledgers_of_its_own_is_refused(copy: Callable[[], Path]) -> None:
    RUNS.mkdir(parents=True)
    with pytest.raises(DptuneError, match=r"data/runs: is not the checkout's.*Fix: "):
        share_checkout()


def test_the_checkout_itself_has_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    share_checkout()
    keep_pages(REPORT, "x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "folder"), [("a study", "a-study"), ("../../out", "-..-out"), ("..", "experiment"), ("a/b", "a-b")]
)
def test_pages_stay_in_the_folder_of_pages(copy: Callable[[], Path], name: str, folder: str) -> None:
    REPORT.mkdir(parents=True)
    (REPORT / "report.html").write_text("page")
    keep_pages(REPORT, name)
    assert (copy() / REPORTS / folder / "report" / "report.html").read_text() == "page"


def test_pages_have_the_name_that_dvc_gives(copy: Callable[[], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DVC_EXP_NAME", "tidy-ruff")
    REPORT.mkdir(parents=True)
    keep_pages(REPORT, "default")
    assert os.listdir(copy() / REPORTS) == ["tidy-ruff"]


def test_a_stage_in_a_copy_finds_the_environment_of_the_checkout(copy: Callable[[], Path]) -> None:
    python = copy() / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho ran $*\n")
    python.chmod(0o700)
    Path("nothing").mkdir()
    command = ["/bin/sh", str(ROOT / "tasks" / "stage.sh"), "some.module"]
    ended = subprocess.run(command, capture_output=True, text=True, env={"PATH": str(Path("nothing").resolve())})
    assert ended.stdout == "ran -m some.module\n", ended.stderr
