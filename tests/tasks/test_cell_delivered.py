"""What the pipeline hands on: a cell's adapter, its model in MLflow, its hyper-policy, the manifest of an ensemble."""

from __future__ import annotations

import csv
import json
import math
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from same_release import differences, same_release, told
from tiny_pipeline import (
    built,
    cells,
    copied,
    merge,
    nonprivate,
    prepare_environment,
    quick_pictures,
    run_stages,
    static,
)
from typer.testing import CliRunner

from dptune.cli import app
from dptune.core.errors import DptuneError
from dptune.core.files import write_text
from dptune.job.delivery.finished_adapter import open_adapter
from dptune.privacy.entropy import FixedSeed
from dptune.privacy.run_folder import RunFolder
from tasks.experiment import adapter_model
from tasks.experiment.adapter_model import write_model
from tasks.experiment.cells import Cell
from tasks.experiment.finetune import run_cell
from tasks.prediction.ensembles import close_plan, open_plan, plans, served_protocol
from tasks.settings.params import load_settings

FOLLOWING: dict[str, Any] = {
    "experiment": {"mechanisms": ["rldp"]},
    "mechanisms": {"rldp": {"interval": 1, "warmup": 1}},
}
ANSWERS = {"prediction": {"models": [2], "serve": {"models": 2, "tokens": 8}}}


def table(world: int) -> dict[str, Any]:
    """A table of the same customers: in the second world they have more visits, longer and of other words."""
    with Path("visits.csv").open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["customer_id", "note"])
        for n in range(80 * (1 + world)):
            rows.writerow([f"c{n % 80}", f"{n} red pears" if world == 0 else f"old plums {n} " + "blue " * n])
    own = {"source": "table", "path": "visits.csv", "unit": "customer_id", "options": {"text": "note"}}
    return {"data": own, "canaries": {"extraction": 0, "audit": 0}, "training": {"max_length": 32}}


def trained(cell: Cell, target: Path) -> Path:
    """Run a cell and write its model as MLflow keeps it; returns the folder of the model."""
    write_text(RunFolder(cell.directory).cell, cell.model_dump_json(indent=2))
    run_cell(cell, "cpu")
    write_model(cell.directory, target)
    return target


def told_of(world: int) -> dict[str, dict[str, tuple[bytes, int, float]]]:
    """What a world hands on, by what it is; times apart, which MLflow and the run's own folder have."""
    changes, found = table(world), {}
    run_stages(changes, pretrained=False)
    research = static(changes)
    found["model"] = told(trained(research, Path("model")))
    found["adapter"] = told(RunFolder(research.directory).adapter)
    found["shown to the owner"] = {"result.json": told(research.directory)["result.json"]}
    quiet = static(merge(changes, {"experiment": {"telemetry": "private"}}))
    trained(quiet, Path("quiet"))
    kept = ("result.json", "ledger.jsonl", "history.jsonl", "knobs.jsonl")
    found["private"] = {name: one for name, one in told(quiet.directory).items() if name in kept}
    (following,) = cells(merge(changes, FOLLOWING))
    trained(following, Path("following"))
    found["policy"] = told(RunFolder(following.directory).controller)
    cells(merge(changes, ANSWERS))
    settings = load_settings()
    (plan,) = plans(settings)
    open_plan(plan)
    close_plan(plan, served_protocol(settings.prediction.serve, settings.prediction, 1e-5), "research")
    found["manifest"] = {"ensemble.json": told(plan.directory)["ensemble.json"]}
    return {kind: {name: (*one[:2], 0.0) for name, one in files.items()} for kind, files in found.items()}


def test_two_worlds_of_one_release_hand_on_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    worlds = []
    for world in (0, 1):
        with pytest.MonkeyPatch.context() as patch:
            prepare_environment(patch, copied(built(tmp_path_factory), tmp_path / f"{world}"))
            quick_pictures(patch)
            same_release(patch)
            worlds.append(told_of(world))
    shown = [world.pop("shown to the owner") for world in worlds]
    assert differences(*shown), "the worlds differ in nothing"
    assert set(worlds[0]) == {"model", "adapter", "private", "policy", "manifest"}
    assert set(worlds[0]["adapter"]) == {"adapter_config.json", "adapter_model.safetensors"}
    assert {name for name in worlds[0]["model"] if name.startswith("artifacts/adapter/")} == {
        f"artifacts/adapter/{name}" for name in (*worlds[0]["adapter"], "README.md", "base.json", "ledger.jsonl")
    }
    assert set(worlds[0]["policy"]) == {"policy.json", "policy.safetensors"}
    assert len(worlds[0]["private"]) == 4
    for kind in worlds[0]:
        assert differences(worlds[0][kind], worlds[1][kind]) == "", kind
    card = worlds[0]["model"]["artifacts/adapter/README.md"][0].decode()
    assert "- public records: " in card
    assert "held-out" not in card


def test_cells_without_a_guarantee_say_so_in_mlflow(pipeline: Path) -> None:
    published = {"experiment": {"mechanisms": ["rldp_published"]}}
    (leaky,) = cells(published)
    fixed = static({"experiment": {"accounting": "published"}})
    for cell, entropy, why in (
        (nonprivate(), None, "gradients without noise"),
        (leaky, None, "raw"),
        (fixed, FixedSeed(1), "not private"),
        (static(), None, ""),
    ):
        write_text(RunFolder(cell.directory).cell, cell.model_dump_json(indent=2))
        result = run_cell(cell, "cpu", entropy=entropy)
        card = write_model(cell.directory, pipeline / "model")
        folder = pipeline / "model" / "artifacts" / "adapter"
        done = CliRunner().invoke(app, ["verify", str(folder)])
        sound = math.isfinite(float(result["epsilon_certified"]))
        assert sound == (not why), cell.label
        assert done.exit_code == (0 if sound else 1)
        assert card.startswith("# LoRA adapter for public" if sound else "# NO GUARANTEE: LoRA adapter for public")
        tags = yaml.safe_load((folder / "README.md").read_text().split("---\n")[1])["tags"]
        assert ("differential-privacy" in tags) == sound
        assert ("ifferential privacy" in card) == sound
        assert str(result["guarantee"]).startswith("The guarantee covers" if sound else "No guarantee: ")
        assert why in result["guarantee"]
        shutil.rmtree(pipeline / "model")


def test_no_path_of_this_machine_and_no_time_is_in_a_model(pipeline: Path) -> None:
    shutil.copytree("data/models/public", pipeline / "secret place" / "base")
    cell = static({"experiment": {"models": {"small": {"source": str(pipeline / "secret place" / "base")}}}})
    trained(cell, pipeline / "model")
    for path in (*(pipeline / "model").rglob("*"), *RunFolder(cell.directory).adapter.rglob("*")):
        if path.is_file() and path.name != "MLmodel":  # which must say where the base lies: see docs/howto
            assert b"secret place" not in path.read_bytes(), path
    about = yaml.safe_load((pipeline / "model" / "MLmodel").read_text())
    assert about["utc_time_created"] == "1970-01-01 00:00:00"
    card = (pipeline / "model" / "artifacts" / "adapter" / "README.md").read_text()
    assert "# LoRA adapter for base\n" in card
    assert "audit.json" in card


def finished(cell: Cell) -> Path:
    """The folder of the cell, which ran."""
    write_text(RunFolder(cell.directory).cell, cell.model_dump_json(indent=2))
    run_cell(cell, "cpu")
    return cell.directory


def test_one_command_writes_a_cells_folder_to_hand_on(pipeline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, target = finished(static()), pipeline / "to hand on" / "a cell"
    (run / "adapter" / "notes").mkdir()
    for name in ("optimizer.pt", "adapter_model.bin", ".coins.json", "notes/texts.txt"):
        (run / "adapter" / name).write_text("secret")
    adapter_model.main(run, target)
    *_, last = capsys.readouterr().out.splitlines()
    assert last == f"Check it: dptune verify {shlex.quote(str(target))}"
    done = CliRunner().invoke(app, shlex.split(last.partition("dptune ")[2]))
    assert done.exit_code == 0, done.output
    files = {path.name: path for path in target.iterdir()}
    tuned = {"adapter_config.json", "adapter_model.safetensors", "README.md", "base.json", "ledger.jsonl"}
    assert tuned | {"records.json", "tokenizer.json", "tokenizer_config.json"} == set(files)
    assert (files["ledger.jsonl"]).read_bytes() == RunFolder(run).ledger.read_bytes()
    assert len({path.stat().st_mtime for path in files.values()}) == 1, "times of training"
    assert not any(str(pipeline).encode() in path.read_bytes() for path in files.values())
    found = open_adapter(target)
    assert (found.form, found.tokens, found.base) == ("text", 64, "public")


def test_a_folder_in_the_runs_own_holds_no_copy_of_itself_and_no_guarantee_is_said(
    pipeline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = finished(nonprivate())
    target = run / "adapter" / "copy"
    adapter_model.main(run, target)
    assert not [path for path in target.iterdir() if path.is_dir()]
    said = capsys.readouterr().out
    assert "NO GUARANTEE: no epsilon is certified (gradients without noise)" in said
    assert CliRunner().invoke(app, ["verify", str(target), "--no-guarantee"]).exit_code == 0


@pytest.mark.parametrize(("form", "known"), [("text", "text"), ("pair", "pair"), ("label", None)])
def test_the_form_of_texts_is_not_that_of_the_same_narratives_with_labels(
    form: str, known: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_model, "read_about", lambda path: {"label": "a cohort", "form": form})
    assert adapter_model.form_of_records("a cohort") == known
    assert adapter_model.form_of_records("another") is None


def _has_not_ended(run: Path) -> None:
    lines = (run / "ledger.jsonl").read_text().splitlines(keepends=True)
    (run / "ledger.jsonl").write_text("".join(lines[:-1]))


def _of_another_run(run: Path) -> None:
    weights = run / "adapter/adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")


def _of_labels(run: Path) -> None:
    cell = json.loads((run / "cell.json").read_text())
    cell["task"] |= {"kind": "classify", "labels": ["a", "b"]}
    (run / "cell.json").write_text(json.dumps(cell))


def _without_base(run: Path) -> None:
    shutil.rmtree("data/models/public")


def test_what_cannot_be_handed_on_is_refused_and_nothing_is_written(pipeline: Path, tmp_path: Path) -> None:
    run, target = finished(static()), pipeline / "target"
    for change, said in (
        (_has_not_ended, r"has not ended\. Fix: run its study again"),
        (_of_another_run, r"adapter_model\.safetensors: is not what the run of this ledger wrote"),
        (lambda run: (run / "cell.json").unlink(), r"it has no cell\.json\. Fix: give the folder of a finished cell"),
        (lambda run: shutil.rmtree(run / "adapter"), r"adapter: is missing, or result\.json beside it"),
        (shutil.rmtree, r"is not a folder\. Fix: give the folder of a finished cell"),
        (_of_labels, r"learned labels, and a card of a study says .* by `dptune tune --task classify`"),
        (_without_base, r"data/models/public is another model than .*, or is gone\. Fix: restore that model"),
    ):
        changed = Path(shutil.copytree(run, tmp_path / "changed"))
        change(changed)
        with pytest.raises(DptuneError, match=said):
            adapter_model.main(changed, target)
        assert not target.exists()
        shutil.rmtree(changed, ignore_errors=True)
    target.mkdir()
    with pytest.raises(DptuneError, match=r"target exists\. Fix: give another name"):
        adapter_model.main(run, target)
    assert not list(target.iterdir())
