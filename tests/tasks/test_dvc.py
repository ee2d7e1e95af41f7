"""dvc.yaml: DVC reads it, its stages fit together, and the secrets stay out of the cache."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_pipeline import ROOT, repository_params

from tasks import paths
from tasks.stage import share_checkout


@pytest.fixture(scope="module")
def definition() -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / "dvc.yaml").read_text()))


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A copy of what DVC reads, outside git."""
    from dvc.repo import Repo

    directory = tmp_path_factory.mktemp("dvc")
    for name in ("dvc.yaml", "params.yaml", ".dvcignore"):
        shutil.copy(ROOT / name, directory)
    for name in ("tasks", "flows", "dptune"):
        shutil.copytree(ROOT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
    with Repo.init(str(directory), no_scm=True) as repo:
        yield repo


def paths_of(entries: list[Any]) -> dict[str, dict[str, Any]]:
    """Path -> options, for the short and the long form."""
    named: dict[str, dict[str, Any]] = {}
    for entry in entries:
        named |= entry if isinstance(entry, dict) else {entry: {}}
    return named


def outs(stage: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return paths_of([*stage.get("outs", []), *stage.get("metrics", []), *stage.get("plots", [])])


def test_dvc_reads_it_and_the_stages_form_an_order(repository: Any, definition: dict[str, Any]) -> None:
    stages = {stage.name: stage for stage in repository.index.stages}
    assert sorted(stages) == sorted(definition["stages"])
    repository.index.check_graph()
    graph = repository.index.graph

    def needs(name: str) -> set[str]:
        return {stage.name for stage in graph.successors(stages[name])}

    assert needs("verbalize") == {"acquire"}
    assert needs("split") == {"verbalize"}
    assert needs("canaries") == {"split", "pretrain"}
    assert needs("experiment") == {"canaries", "split", "pretrain", "models", "validation"}
    assert needs("audit") == {"experiment", "canaries", "split"}
    assert needs("prediction") == {"experiment", "canaries", "split", "pretrain", "models", "validation"}
    assert needs("report") == {"experiment", "audit"}
    assert needs("acquire") == needs("pretrain") == needs("models") == needs("validation") == {"checks"}
    assert needs("checks") == set()


def test_dvc_keeps_no_secret_and_no_ledger(repository: Any) -> None:
    """What is an output, DVC may replace by an earlier state; what it caches, others may pull."""
    made = [Path(str(out.def_path)) for stage in repository.index.stages for out in stage.outs]
    for kept in (paths.SECRETS, paths.RUNS, paths.AUDITS, paths.ENSEMBLES, paths.POLICY):
        assert not [out for out in made if out.is_relative_to(kept) or kept.is_relative_to(out)], kept


def test_what_tells_of_ledgers_is_never_restored(repository: Any) -> None:
    cached = {str(out.def_path): out.use_cache for stage in repository.index.stages for out in stage.outs}
    told = ("experiment.json", "audited.json", "report/report.html", "report/answer.md", "report/cells.json")
    assert [name for name in told if cached[f"data/{name}"]] == []
    assert cached["data/report/metrics.json"]
    assert cached["data/report/plots"]


def test_a_stage_finds_what_cells_are_named_by_as_it_left_it(definition: dict[str, Any]) -> None:
    """DVC removes other outputs before a stage runs, which then cannot keep what did not change."""
    kept = [
        Path(path) for stage in definition["stages"].values() for path, how in outs(stage).items() if how.get("persist")
    ]
    for file in (paths.TRAIN, paths.EVAL, paths.PUBLIC_VALIDATION, paths.PUBLIC_MODEL):
        assert any(file.is_relative_to(out) for out in kept), file


def test_no_stage_depends_on_the_secrets(definition: dict[str, Any]) -> None:
    """A dependency's hash is written to dvc.lock, and an unsalted one would test guesses."""
    for stage in definition["stages"].values():
        assert not [path for path in stage.get("deps", []) if "secrets" in path]


def test_every_dependency_exists_or_is_made(definition: dict[str, Any]) -> None:
    made = {path for stage in definition["stages"].values() for path in outs(stage)}
    for name, stage in definition["stages"].items():
        for path in stage["deps"]:
            if path == "data/runs":  # no output; the stage before has made it
                assert name == "report"
            elif path.startswith("data/"):
                folders = {path, *map(str, Path(path).parents)}  # a file of a folder that a stage makes
                assert folders & made, f"{name}: nothing makes {path}"
            else:
                assert (ROOT / path).exists(), f"{name}: {path} is not in the repository"


def test_every_parameter_exists(definition: dict[str, Any]) -> None:
    for name, stage in definition["stages"].items():
        for path in stage.get("params", []):
            value: Any = repository_params()
            for key in path.split("."):
                assert key in value, f"{name}: params.yaml has no {path}"
                value = value[key]


def test_every_parameter_makes_some_stage_run_again(definition: dict[str, Any]) -> None:
    named = [path for stage in definition["stages"].values() for path in stage.get("params", [])]
    parted = ("data", "canaries")
    leaves = [f"{section}.{key}" for section in parted for key in repository_params()[section]]
    own = ("policy", "search")  # `make policy` and `make search` keep their own runs
    leaves += [key for key in repository_params() if key not in (*parted, *own)]
    assert [leaf for leaf in leaves if not any(leaf == p or leaf.startswith(f"{p}.") for p in named)] == []


def test_a_stage_of_the_records_runs_again_when_an_entry_that_it_reads_changes(definition: dict[str, Any]) -> None:
    """Otherwise, after a change of data.label, DVC would keep the narratives that still say that label."""
    seen = 0
    for name, stage in definition["stages"].items():
        module = ROOT / (stage["cmd"].split()[2].replace(".", "/") + ".py")
        if module.parent.name != "corpus":
            continue
        read = {*re.findall(r"\bdata\.(\w+)", module.read_text())} & {*repository_params()["data"]}
        assert {f"data.{entry}" for entry in read} <= {*stage.get("params", [])}, name
        seen += len(read)
    assert seen >= 8


def test_every_command_is_a_module_that_the_stage_depends_on(definition: dict[str, Any]) -> None:
    for stage in definition["stages"].values():
        words = stage["cmd"].split()
        assert words[:2] == ["sh", "tasks/stage.sh"]
        assert words[2].replace(".", "/") + ".py" in stage["deps"]


def test_the_stages_write_where_the_tasks_do(definition: dict[str, Any]) -> None:
    made = [Path(path) for stage in definition["stages"].values() for path in outs(stage)]
    others = ("DATA", "REPORT", "REPORTS", "FAILURES", "MLFLOW_PAGE")
    kept = ("SECRETS", "RUNS", "AUDITS", "ENSEMBLES", "POLICY", "SEARCH", "SPENT", "SYNTHETIC", "TOKENS", "DELIVERED")
    every = [getattr(paths, name) for name in dir(paths) if name.isupper() and name not in (*others, *kept)]
    assert [path for path in every if not any(path.is_relative_to(out) for out in made)] == []


def test_plots_and_metrics_are_outputs_of_the_report(definition: dict[str, Any]) -> None:
    report = outs(definition["stages"]["report"])
    assert "data/report/metrics.json" in report
    for plot in definition["plots"]:
        for options in plot.values():
            for axis in ("x", "y"):
                for path in options[axis]:
                    assert any(Path(path).is_relative_to(out) for out in report)


def test_git_ignores_what_the_pipeline_writes() -> None:
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert "/data/*" in ignored


def test_a_copy_of_the_checkout_begins_with_what_persists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DVC's cache of runs restores no output that persists; new secrets would let finished cells be paid for again."""
    checkout, copy = tmp_path, tmp_path / ".dvc" / "tmp" / "exps" / "one"
    copy.mkdir(parents=True)
    shutil.copy(ROOT / "dvc.yaml", copy)
    for folder in ("data/canaries", "data/models", "data/raw"):
        (checkout / folder).mkdir(parents=True)
        (checkout / folder / "part").write_text("the checkout's")
    (copy / "data" / "models").mkdir(parents=True)
    (copy / "data" / "models" / "part").write_text("the copy's own")
    monkeypatch.chdir(copy)
    share_checkout()
    assert (copy / "data" / "canaries" / "part").read_text() == "the checkout's"
    assert (copy / "data" / "models" / "part").read_text() == "the copy's own"
    assert not (copy / "data" / "raw").exists(), "DVC restores what does not persist"
    (copy / "data" / "canaries" / "part").write_text("changed")
    assert (checkout / "data" / "canaries" / "part").read_text() == "the checkout's"
