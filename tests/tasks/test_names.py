"""Names of cells outlive an edit: only what can move a released number gives a finished cell another folder."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import MISSING, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from tiny_pipeline import ROOT, STEPS, UNITS, cells, static, write_params

from dptune.core import settings
from dptune.core.declarations import differing, plain
from dptune.core.errors import ConfigError, DptuneError
from dptune.core.settings import Lora
from dptune.mechanisms.clippers.clipping import Flat
from dptune.mechanisms.controllers.quantile import Quantile
from dptune.mechanisms.options import option_defaults
from dptune.mechanisms.registry import MECHANISMS, NOISES, differing_options
from dptune.privacy import accountants, entropy
from dptune.privacy.run_folder import set_aside
from tasks import grid
from tasks.experiment.cell_list import renamed_runs
from tasks.experiment.cells import Cell, write_cell
from tasks.experiment.finetune import run_cell
from tasks.grid import planned_cells
from tasks.identity import changes, name_digest
from tasks.paths import EVAL, PUBLIC_MODEL, RUNS, TRAIN
from tasks.settings.experiment import Model, Task, TrainingSettings
from tests.forked import forked

THREE = {"experiment": {"mechanisms": ["nonprivate", "static", "quantile"]}}


def folders(*changes: dict[str, Any]) -> dict[str, str]:
    return {cell.mechanism: cell.directory.name for cell in cells(*changes)}


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert text.count(old) == 1, (file, old)
    file.write_text(text.replace(old, new), encoding="utf-8")


def folders_of(tree: Path) -> dict[str, str]:
    """The cells' folders as the code in another tree names them."""

    def run() -> None:
        settings = import_module("tasks.settings.params").load_settings()
        listed = import_module("tasks.experiment.cells").grid(settings)
        names = {cell.mechanism: cell.directory.name for cell in listed}
        print(import_module("dptune").__file__, json.dumps(names), sep="\n")

    status, output, errors = forked(run, Path.cwd(), packages=tree)
    assert status == 0, errors
    place, names = output.splitlines()[-2:]
    assert Path(place).is_relative_to(tree), "the copy's own code"
    return dict(json.loads(names))


@pytest.fixture
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources."""
    copy = tmp_path_factory.mktemp("tree")
    for package in ("dptune", "tasks"):
        shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def test_an_edit_that_moves_no_number_renames_nothing_and_a_raised_version_only_its_own(
    pipeline: Path, tree: Path
) -> None:
    before = folders(THREE)
    for module in sorted([*tree.glob("dptune/**/*.py"), *tree.glob("tasks/**/*.py")]):
        with module.open("a", encoding="utf-8") as file:
            file.write('\n\ndef an_unused_function() -> float:\n    """Never called."""\n    return 3.0\n')
    (tree / "dptune/mechanisms/clippers/fresh.py").write_text(
        "from dataclasses import dataclass\n"
        "from dptune.mechanisms.clippers.clipping import Flat\n"
        "from dptune.mechanisms.registry import clipper, mechanism\n\n\n"
        '@clipper("fresh")\n@dataclass(frozen=True)\nclass Fresh(Flat):\n    """A new clipper."""\n\n'
        "    VERSION = 1\n    sharpness: float = 2.0\n\n\n"
        'mechanism("fresh", clipper="fresh", clips="the whole gradient to one radius")\n'
    )
    (tree / "tasks/charts/fresh.py").write_text('"""A chart."""\n')
    (tree / "dptune/generation/fresh.py").write_text('"""A metric."""\n')
    edit(tree / "dptune/core/settings.py", "    rslora: bool = False\n",
         "    rslora: bool = False\n    fresh: int = 3\n")  # fmt: skip
    edit(tree / "dptune/core/settings.py", "    warmup_steps: CountOrZero = 100\n",
         "    warmup_steps: CountOrZero = 100\n    fresh: bool = False\n")  # fmt: skip
    edit(tree / "dptune/mechanisms/controllers/quantile.py", "    target: float = 0.5\n",
         "    target: float = 0.5\n    fresh: float = 1.0\n")  # fmt: skip
    edit(tree / "tasks/settings/experiment.py", "    beams: Few = 1\n", "    beams: Few = 1\n    fresh: str = 'no'\n")
    assert folders_of(tree) == before
    quantile = tree / "dptune/mechanisms/controllers/quantile.py"
    quantile.write_text(quantile.read_text().replace("    VERSION = 1", "    VERSION = 2"))
    after = folders_of(tree)
    assert [name for name in before if before[name] != after[name]] == ["quantile"]


RAISED: dict[str, tuple[Any, set[str]]] = {
    "loop": (lambda patch: patch.setattr(settings, "VERSION", 2), {"nonprivate", "static", "quantile"}),
    "sampler": (lambda patch: patch.setattr(entropy, "VERSION", 2), {"nonprivate", "static", "quantile"}),
    "accountant": (lambda patch: patch.setattr(accountants, "VERSION", 2), {"static", "quantile"}),
    "clipper": (lambda patch: patch.setattr(Flat, "VERSION", 2), {"static", "quantile"}),
    "controller": (lambda patch: patch.setattr(Quantile, "VERSION", 2), {"quantile"}),
    "optimizer": (lambda patch: patch.setitem(settings.VERSIONS, "optimizer sgd", 2), {"static"}),
    "average": (lambda patch: patch.setitem(settings.VERSIONS, "average ema", 2), {"quantile"}),
}


@pytest.mark.parametrize("part", RAISED)
def test_a_raised_version_renames_the_cells_that_use_the_part(
    part: str, pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"mechanisms": {"static": {"optimizer": "sgd"}, "quantile": {"average": "ema"}}}
    before = folders(THREE, own)
    plant, users = RAISED[part]
    plant(monkeypatch)
    after = folders(THREE, own)
    assert {name for name in before if before[name] != after[name]} == users


def named(entry: dict[str, Any], *changes: dict[str, Any]) -> str:
    """The folder of a cell whose mechanism is this entry."""
    (cell,) = cells({"mechanisms": {"mine": entry}, "experiment": {"mechanisms": ["mine"]}}, *changes)
    return cell.directory.name


FLAT = {"clipper": "flat", "noise": "gaussian", "controller": "constant"}


@pytest.mark.parametrize(
    "entry",
    [
        FLAT,
        {"like": "static", "max_grad_norm": 1},
        {"like": "static", "max_grad_norm": 1.0},
        {"max_grad_norm": 1, "like": "static", "noise": "gaussian"},
        {"like": "static", "optimizer": "adamw", "momentum": 0.9},
    ],
)
def test_how_an_entry_is_written_changes_no_folder(pipeline: Path, entry: dict[str, Any]) -> None:
    assert named(entry) == named({"like": "static"})


@pytest.mark.parametrize(
    "change",
    [
        {"training": {"warmup_steps": 2.0}},
        {"lora": {"rank_pattern": {}, "dropout": 0}},
        {"task": {"metrics": list(Task().metrics), "length_penalty": 1}},
    ],
)
def test_how_a_section_is_written_changes_no_folder(pipeline: Path, change: dict[str, Any]) -> None:
    assert static(change).directory == static().directory


@pytest.mark.parametrize(
    "entry",
    [
        {"like": "static", "max_grad_norm": 2},
        {"like": "auto_s"},
        {"like": "static", "average": "ema"},
        {"like": "static", "noise_multiplier": 1.0},
        {"like": "dp_lora"},
        {"like": "per_pair"},
    ],
)
def test_another_option_part_or_rule_is_another_folder(pipeline: Path, entry: dict[str, Any]) -> None:
    """A noise of one's own is not what calibration would find, even where it is a default."""
    assert named(entry) != named({"like": "static"})


def test_noise_that_is_fixed_at_its_default_is_a_setting() -> None:
    """``takes_noise`` and calibration ask whether an entry has the option, and not for its value."""
    kept = {name: {"noise_multiplier", *NOISES[MECHANISMS[name].parts["noise"]].fixed_by} for name in MECHANISMS}
    some = {(name, option) for name in MECHANISMS for option in kept[name]}
    given = 0
    for name, option in sorted(some):
        default = option_defaults(NOISES[MECHANISMS[name].parts["noise"]]).get(option, MISSING)
        if default is not MISSING:
            assert option in differing_options(name, {option: default}), (name, option)
            given += 1
    assert given > 0


def test_versions_at_1_are_no_part_of_a_name(pipeline: Path) -> None:
    cell = static()
    more = cell.model_copy(update={"versions": cell.versions | {"a new part": 1}})
    assert more.directory == cell.directory
    assert cell.model_copy(update={"versions": cell.versions | {"a new part": 2}}).directory != cell.directory


def test_what_a_registered_mechanism_sets_is_part_of_its_cells_names(pipeline: Path) -> None:
    """dc_sgd_p has an option at its part's default, and dc_sgd_e has another value of it."""
    assert named({"like": "dc_sgd_p"}) == named({"like": "dc_sgd_e", "rule": "percentile"})
    assert named({"like": "dc_sgd_p"}) != named({"like": "dc_sgd_e"})


def test_a_new_part_of_all_cells_renames_nothing_and_what_changed_is_said() -> None:
    now = {"loop": 1, "controller quantile": 2, "new": 1}
    assert changes({"loop": 1, "controller quantile": 2}, now) == ""
    assert changes({"loop": 1, "controller quantile": 1}, now) == "controller quantile 1 -> 2"
    assert changes({}, now) == "it was named by a digest of the code, before parts had versions"


def begin(cell: Cell, *, finished: bool = False) -> Path:
    """A folder of the cell with a ledger that has begun."""
    cell.directory.mkdir(parents=True)
    write_cell(cell)
    if finished:
        run_cell(cell, "cpu")
    else:
        (cell.directory / "ledger.jsonl").write_text('{"kind":"run"}\n')
    return cell.directory


def test_a_cell_goes_on_after_an_edit_and_not_after_a_raised_version(
    pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cell that was written down before either."""
    cell = static()
    monkeypatch.setattr(Flat, "VERSION", 2)
    with pytest.raises(ConfigError, match=r"cell\.versions: .*clipper flat 1 -> 2.*Fix: run the flow again"):
        run_cell(cell, "cpu")
    assert not (cell.directory / "ledger.jsonl").exists()
    monkeypatch.undo()
    os.chdir(pipeline)
    old = cell.model_copy(update={"versions": {}, "inputs": cell.inputs | {"code": "0" * 64}})
    with pytest.raises(ConfigError, match="named by a digest of the code"):
        run_cell(old, "cpu")
    assert not (cell.directory / "ledger.jsonl").exists()
    assert len(run_cell(cell, "cpu")["code"]) == 64


def test_runs_under_an_earlier_name_are_named_with_what_changed(
    pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell, other = static(), static({"training": {"epochs": 0.5}})
    begin(other)
    begin(cell, finished=True)
    assert renamed_runs([cell]) == [], "it has a run of its own"
    monkeypatch.setattr(Flat, "VERSION", 2)
    (renamed,) = renamed_runs(cells())
    assert (renamed.folder, renamed.state, renamed.change) == (cell.directory, "finished", "clipper flat 1 -> 2")
    assert "small.static.eps0.3.seed0" in str(renamed)
    assert "the cell trains, and spends, again" in str(renamed)


def test_a_folder_that_was_named_by_its_code_is_named(pipeline: Path) -> None:
    cell = static()
    folder = RUNS / f"{cell.label}-0a1b2c3d"
    folder.mkdir(parents=True)
    stored = json.loads(cell.model_dump_json())
    del stored["versions"]
    stored["inputs"]["code"] = "0" * 64
    (folder / "cell.json").write_text(json.dumps(stored))
    assert renamed_runs([cell]) == [], "it released nothing"
    (folder / "ledger.jsonl").write_text('{"kind":"run"}\n')
    (renamed,) = renamed_runs([cell])
    assert "named by a digest of the code" in renamed.change
    stored["delta"] = 1e-7
    (folder / "cell.json").write_text(json.dumps(stored))
    assert renamed_runs([cell]) == [], "other settings"


def test_a_begun_run_is_never_shown_with_settings_that_are_not_its_own(pipeline: Path) -> None:
    """A default that changed behind the back of its version leaves the name, and not the settings."""
    cell = static()
    folder = begin(cell)
    write_cell(cell)
    stored = json.loads((folder / "cell.json").read_text())
    stored["lora"]["alpha"] = 32
    (folder / "cell.json").write_text(json.dumps(stored))
    with pytest.raises(ConfigError, match=r"holds a run of other settings \(lora\).*Fix: restore the default"):
        write_cell(cell)
    assert json.loads((folder / "cell.json").read_text())["lora"]["alpha"] == 32


def printed(capsys: pytest.CaptureFixture[str], *arguments: Any) -> list[str]:
    capsys.readouterr()
    grid.names("names", *arguments)
    return capsys.readouterr().out.splitlines()


def test_the_grid_prints_folders_states_and_costs_and_runs_nothing(
    pipeline: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_params()
    free, cell = cells()
    lines = printed(capsys)
    assert lines[0].split() == ["folder", "state", "whole", "run", "delta", "releases"]
    assert lines[1].split() == [str(free.directory), "new", "no", "guarantee", "1e-05", str(STEPS)]
    assert lines[2].split() == [str(cell.directory), "new", "epsilon", "0.3", "(certified)", "1e-05", str(STEPS)]
    assert lines[-1] == (
        f"0 of 2 cells are finished; running the other 2 makes {2 * STEPS} releases and spends at most epsilon 0.3 "
        "by certified accounting, added up, at delta 1e-05; 1 without a budget."
    )
    assert not RUNS.exists()
    write_cell(cell)
    run_cell(cell, "cpu")
    lines = printed(capsys)
    assert "finished" in lines[2]
    assert lines[-1].startswith(f"1 of 2 cells are finished; running the other one makes {STEPS} releases and calib")
    monkeypatch.setattr(Flat, "VERSION", 2)
    lines = printed(capsys)
    assert "(clipper flat 1 -> 2)" in lines[-2]
    assert "new" in lines[2]
    monkeypatch.undo()
    os.chdir(pipeline)
    ledger = cell.directory / "ledger.jsonl"
    ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:3]))
    assert "stopped at release 2" in printed(capsys)[2]
    run_cell(free, "cpu")
    assert f"makes {STEPS - 2} releases" in printed(capsys)[-1]
    assert "of 1 stopped ones a part is spent already" in printed(capsys)[-1]


@pytest.mark.parametrize(
    ("change", "units"),
    [({}, UNITS), ({"data": {"unit": "patient"}}, None), ({"canaries": {"crafted": 5}}, UNITS + 5)],
)
def test_the_number_of_units_is_that_of_the_run(pipeline: Path, change: dict[str, Any], units: int | None) -> None:
    import torch

    from tasks.experiment.preparation import shared_inputs, units_of

    cell = static(change)
    found = len(units_of(cell, shared_inputs(cell, torch.device("cpu")).train)[0])
    assert grid._units(cell) == found
    assert units in (None, found)


def test_clients_are_counted_as_their_mechanism_says(pipeline: Path) -> None:
    cell = static({"mechanisms": {"static": {"clipper": "local_updates", "clients": 7, "clients_per_round": 2}}})
    assert grid._units(cell) == 7


@pytest.mark.parametrize("missing", [TRAIN, EVAL, PUBLIC_MODEL])
def test_what_is_missing_is_named_with_the_command_that_makes_it(pipeline: Path, missing: Path) -> None:
    write_params()
    if missing.is_dir():
        shutil.rmtree(missing)
    else:
        missing.unlink()
    with pytest.raises(DptuneError, match=r"Fix: run `dvc repro canaries validation pretrain`"):
        grid.names("names")


def test_a_profile_with_other_records_is_refused_and_others_name_its_cells(
    pipeline: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_params()
    shutil.copy(ROOT / "dvc.yaml", "dvc.yaml")
    profile = Path("other.yaml")
    profile.write_text("experiment: {epsilons: [0.5]}\n")
    assert any("eps0.5" in line for line in printed(capsys, profile))
    profile.write_text("data: {split_seed: 7}\n")
    with pytest.raises(ConfigError, match=r"data\.split_seed: the records or the model that lie here"):
        grid.names("names", profile)
    Path("dvc.lock").write_text(
        json.dumps({"stages": {"split": {"params": {"params.yaml": {"data.split_seed": 7, "data.unit": "record",
                                                                    "data.parts": None}}}}}))  # fmt: skip
    assert printed(capsys, profile)
    with pytest.raises(ConfigError, match=r"params\.yaml: data\.split_seed"):
        grid.names("names")


def test_words_that_are_no_command_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"write `python -m tasks\.grid names`"):
        grid.names("nmaes")


def test_a_cell_of_a_group_with_another_rule_keeps_its_own_versions(pipeline: Path) -> None:
    cell = static()
    sgd = static({"mechanisms": {"static": {"optimizer": "sgd"}}})
    assert replace(cell.training, optimizer="sgd") == sgd.training
    assert ("optimizer adamw" in cell.versions, "optimizer sgd" in sgd.versions) == (True, True)


def name_of_before(cell: Cell) -> str:
    """The name of a cell's folder as versions gave it that named every setting of the schedule."""
    every = {name: plain(value) for name, value in differing(cell.training).items()}
    return f"{cell.label}-{name_digest(cell.settings | {'training': every})}"


def test_the_name_of_before_is_the_one_that_was_given() -> None:
    training = TrainingSettings(
        expected_batch_size=16, epochs=3, max_length=64, records_per_unit=4, learning_rate=0.01, warmup_steps=2,
        physical_batch_size=32, checkpoint_every=10, evaluate_every=25, evaluate_records=16,
        gradient_checkpointing=True,
    )  # fmt: skip
    cell = Cell(
        experiment="tiny", model_name="small", model=Model(source="m"), mechanism="static", options={}, epsilon=2.0,
        seed=0, delta=1e-5, accounting="certified", telemetry="research", unit="record", crafted=0, lora=Lora(rank=2),
        training=training, inputs={"data": "0" * 64, "model": "1" * 64}, versions={"loop": 1, "clipper flat": 1},
    )  # fmt: skip
    assert name_of_before(cell) == "small.static.eps2.seed0-231ea474", "as that version printed it"


def test_a_finished_cell_of_before_is_found_whatever_micro_batch_it_had(pipeline: Path) -> None:
    cell = static()
    before = cell.model_copy(update={"folder": name_of_before(cell)})
    assert before.directory != cell.directory
    begin(before, finished=True)
    stored = json.loads((before.directory / "cell.json").read_text())
    del stored["folder"]  # that version knew no such field
    (before.directory / "cell.json").write_text(json.dumps(stored))
    for change in ({}, {"physical_batch_size": 4}, {"checkpoint_every": 7}, {"evaluate_every": 5}):
        found = static({"training": change})
        assert found.directory == before.directory, change
        write_cell(found)
        assert planned_cells([found])[0].state == "finished"
    assert static({"training": {"epochs": 0.5}}).directory != before.directory
    set_aside(before.directory)
    afresh = static()
    assert afresh.directory == before.directory, "its result names what was set aside"
    assert not afresh.directory.exists()


@pytest.mark.parametrize(
    "changed",
    [
        {"inputs": {"data": "0" * 64, "model": "1" * 64}},
        {"epsilon": 3.0},
        {"delta": 1e-4},
        {"accounting": "published"},
        {"telemetry": "private"},
        {"unit": "patient"},
        {"crafted": 3},
        {"options": {"radius": 0.5}},
        {"lora": Lora(rank=3)},
        {"versions": {"clipper flat": 2}},
        {"versions": {}},
        {"seed": 7},
    ],
    ids=lambda changed: " ".join(f"{name} {value}" for name, value in changed.items())[:30],
)
def test_a_run_of_before_with_another_setting_or_other_records_is_not_taken(
    pipeline: Path, changed: dict[str, Any]
) -> None:
    cell = static()
    begin(other := cell.model_copy(update={"folder": f"{cell.label}-0a1b2c3d", **changed}))
    assert static().directory == cell.directory != other.directory


def test_of_two_runs_of_before_the_finished_one_is_taken_and_one_that_charged_nothing_is_not(pipeline: Path) -> None:
    cell = static()
    names = [f"{cell.label}-{digit * 8}" for digit in "012"]
    for name in names:
        begin(cell.model_copy(update={"folder": name}))
    (RUNS / names[0] / "ledger.jsonl").unlink()
    assert static().directory.name == names[1]
    shutil.rmtree(RUNS / names[2])
    begin(cell.model_copy(update={"folder": names[2]}), finished=True)
    assert static().directory.name == names[2]
