"""The grid as data: one cell is one (model, mechanism, epsilon, seed), fully spelled out.

A cell's folder name carries a digest of everything that decides its result: the settings that differ from their
defaults, its data, its model, and the versions of the parts that it uses. A cell whose name is unchanged need not run
again. A change of code renames no cell, unless it raises a version.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from glob import escape
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from dptune.core import plugins
from dptune.core.declarations import plain
from dptune.core.errors import ConfigError
from dptune.core.files import read_json, sha256, sha256_once, write_text
from dptune.core.settings import Lora
from dptune.mechanisms.gradient_interfaces import Federation
from dptune.mechanisms.registry import (
    build,
    differing_options,
    lacks_noise,
    part_names,
    plugin_modules,
    takes_noise,
)
from dptune.mechanisms.versions import versions_of
from dptune.privacy.run_folder import RunFolder, fresh_start
from dptune.records.parquet_file import read_about
from dptune.training.models.model_names import path_of
from tasks.identity import changes, name_digest
from tasks.paths import EVAL, PUBLIC_VALIDATION, RUNS, TRAIN
from tasks.settings.experiment import RULE, Model, Task, TrainingSettings
from tasks.settings.mechanisms import epsilons_of, learning_rate_of, options_on, rule_of, trained_of
from tasks.settings.params import Settings
from tasks.settings.strict import StrictModel

#: Name of a file in a run's folder that says that its results are in MLflow.
PUBLISHED = "published"


class Cell(StrictModel):
    """Everything that decides one fine-tuning run. Public.

    Attributes:
        inputs: digests of the data and of the base model; of a hyper-policy and of plug-ins where there are some. Cells
            of before parts had versions also have one of the code here, and no ``versions``.
        versions: the versions of the parts that the run uses (``dptune.mechanisms.versions.versions_of``).
        folder: name of its folder, where an earlier version named it otherwise; None else.
    """

    experiment: str
    model_name: str
    model: Model
    mechanism: str
    options: dict[str, Any]
    epsilon: float | None
    seed: int
    delta: float
    accounting: str
    telemetry: str
    unit: str
    task: Task = Task()
    crafted: int
    lora: Lora
    training: TrainingSettings
    inputs: dict[str, str]
    versions: dict[str, int] = Field(default_factory=dict)
    plugins: tuple[str, ...] = ()
    folder: str | None = None

    @field_validator("plugins")
    @classmethod
    def _import_plugins(cls, modules: tuple[str, ...]) -> tuple[str, ...]:
        """Import the cell's plug-ins, so that every process that reads a cell can build its mechanism."""
        plugins.load(modules)
        return modules

    @property
    def label(self) -> str:
        """Short and readable: ``public.static.eps2.seed0``."""
        epsilon = "" if self.epsilon is None else f".eps{self.epsilon:g}"
        return f"{self.model_name}.{self.mechanism}{epsilon}.seed{self.seed}"

    @property
    def directory(self) -> Path:
        """The cell's own folder under data/runs."""
        raised = {part: version for part, version in self.versions.items() if version != 1}  # a new part is free
        return RUNS / (self.folder or f"{self.label}-{name_digest(self.settings | {'versions': raised})}")

    @property
    def settings(self) -> dict[str, Any]:
        """What names the cell besides versions: its parts, settings that differ from their defaults, and digests."""
        parts = part_names(self.mechanism, self.options)
        options = plain(differing_options(self.mechanism, self.options))
        inputs = {name: digest for name, digest in self.inputs.items() if name != "code"}
        found = plain(self) | {"parts": parts, "options": options, "inputs": inputs, "versions": {}}
        return {name: setting for name, setting in found.items() if name != "folder"}


def write_cell(cell: Cell, home: Path = Path()) -> None:
    """Write cell.json in the cell's folder under ``home``.

    Raises: ConfigError where a run has begun there with other settings: the folder must not show it with these.
    """
    folder = RunFolder(home / cell.directory)
    earlier = read_cell(folder.cell) if folder.has_begun else None
    held, now = earlier.settings if earlier else {}, cell.settings
    if changed := [name for name in sorted(held | now) if held and held.get(name) != now.get(name)]:
        problem = f"holds a run of other settings ({', '.join(changed)}) under the same name: a default was changed"
        fix = f"restore the default, or raise a VERSION (tests/golden); or {fresh_start(cell.directory)}"
        raise ConfigError(str(cell.directory), problem, fix=fix)
    write_text(folder.cell, cell.model_dump_json(indent=2))


def read_cell(file: Path, modules: tuple[str, ...] | None = None) -> Cell | None:
    """The cell in a cell.json; None for none, a damaged one, or one of a version with other settings.

    Args:
        modules: plug-ins that it must have: of one with others, which may be gone, no code is imported.
    """
    try:
        content = read_json(file)
        others = modules is not None and tuple(content.get("plugins", ())) != modules
        return None if others else Cell.model_validate_json(json.dumps(content))
    except (OSError, ValueError, TypeError):
        return None


def of_a_pass(cell: Cell) -> dict[str, Any]:
    """The settings that cells which share forward passes have in common: all but mechanism, learning rate and rule."""
    training = {name: value for name, value in asdict(cell.training).items() if name not in ("learning_rate", *RULE)}
    return cell.model_dump(mode="json", include={"model", "lora"}) | {"training": training}


def federation(cell: Cell) -> Federation | None:
    """The clients that the cell's mechanism simulates; None if it clips gradients of the data's own units."""
    noise = {"noise_multiplier": 1.0} if lacks_noise(cell.mechanism, cell.options) else {}
    return build(cell.mechanism, noise | cell.options).clipper.federation


def is_finished(directory: Path) -> bool:
    """Whether a run's folder holds a finished run."""
    return RunFolder(directory).is_finished


def is_published(directory: Path) -> bool:
    """Whether a finished run's results were sent to MLflow too, so that nothing is left to do."""
    return (directory / PUBLISHED).exists() and is_finished(directory)


def grid(settings: Settings) -> list[Cell]:
    """Every cell of the experiment; a mechanism without noise to calibrate has one cell for all epsilons."""
    experiment = settings.experiment
    cells = []
    for name, model in experiment.models.items():
        for mechanism in experiment.mechanisms:
            options = options_on(settings.mechanisms[mechanism], name)
            accounting = options.pop("accounting", experiment.accounting)
            rate, rule = learning_rate_of(options) or settings.training.learning_rate, rule_of(options)
            own_epsilons = epsilons_of(options)
            training = replace(settings.training, learning_rate=rate, **rule, **trained_of(options))
            inputs = digests(model, options) | plugin_digest(mechanism, options)
            budgets = (own_epsilons or (None,)) if own_epsilons is not None else experiment.epsilons
            epsilons = budgets if takes_noise(mechanism, options) else (None,)
            cells += [
                Cell(
                    experiment=experiment.name,
                    model_name=name,
                    model=model,
                    mechanism=mechanism,
                    options=options,
                    epsilon=epsilon,
                    seed=seed,
                    delta=experiment.delta,
                    accounting=accounting,
                    telemetry=experiment.telemetry,
                    unit=settings.data.unit,
                    task=settings.task,
                    crafted=settings.canaries.crafted,
                    lora=settings.lora if training.train == "lora" else Lora(),  # it would name what it does not change
                    training=training,
                    inputs=inputs,
                    versions=versions_of(mechanism, options, training.rule),
                    plugins=plugin_modules(mechanism, options),
                )
                for epsilon in epsilons
                for seed in experiment.seeds
            ]
    return [_in_its_folder(cell) for cell in cells]


def _in_its_folder(cell: Cell) -> Cell:
    """The cell, with the folder in which a run of it has begun under an earlier name, if there is one.

    Earlier versions also named settings that move no released number, such as ``physical_batch_size``.
    """
    if cell.directory.exists():
        return cell
    found = []
    # What was set aside counts too: the cell starts afresh beside it, and its result names what that spent.
    for file in sorted(RUNS.glob(f"{escape(cell.label)}-????????*/{RunFolder(Path()).cell}")):
        other = read_cell(file, cell.plugins) if RunFolder(file.parent).has_begun else None
        if other is not None and other.settings == cell.settings and not changes(other.versions, cell.versions):
            found.append(file.parent)
    found.sort(key=lambda folder: not is_finished(folder))
    return cell.model_copy(update={"folder": found[0].name[: len(cell.label) + 9]}) if found else cell


def digests(model: Model, options: Mapping[str, Any]) -> dict[str, str]:
    """A digest of each input of a cell: those of ``shared_digests``, and a given hyper-policy's."""
    return shared_digests(model) | policy_digest(options)


def policy_digest(options: Mapping[str, Any]) -> dict[str, str]:
    """The digest of the hyper-policy that a run starts from; empty if it starts from none."""
    return {"policy": _digest_of_folder(Path(options["init_from"]))} if options.get("init_from") else {}


def plugin_digest(mechanism: str, options: Mapping[str, Any]) -> dict[str, str]:
    """The digest of the code outside dptune that the mechanism is written in; empty if there is none."""
    found = plugins.plugins_of(plugin_modules(mechanism, options))
    return {"plugins": hashlib.sha256(repr(found).encode()).hexdigest()} if found else {}


def shared_digests(model: Model) -> dict[str, str]:
    """A digest of each input that cells of one model share: data, and base model (or its pinned commit).

    The data's is keyed by the secret salt of the training file, so that nobody can test a guess of the records.
    """
    weights = model_digest(model)
    salt = str(read_about(TRAIN)["salt"])
    files = "".join(sha256(path) for path in (TRAIN, EVAL, PUBLIC_VALIDATION))
    return {"data": hmac.digest(salt.encode(), files.encode(), "sha256").hex(), "model": weights}


def model_digest(model: Model) -> str:
    """The digest of a base model's files as they are now, or its pinned commit."""
    local = path_of(model.source)
    if local is None:
        return f"{model.source}@{model.revision}"
    if local.is_file():
        return sha256_once(local)
    if not (local / "config.json").is_file():
        problem = f"{model.source!r} is not a model's folder: it has no config.json"
        raise ConfigError("experiment.models", problem, fix="give the folder of a checkpoint, or a pinned hub model")
    return _digest_of_folder(local)


def _digest_of_folder(folder: Path) -> str:
    if not folder.is_dir():
        raise ConfigError("init_from", f"{folder} is not a folder", fix="give the controller/ folder of a finished run")
    return _digest(sorted(path for path in folder.iterdir() if path.is_file()))


def _digest(files: list[Path]) -> str:
    return hashlib.sha256("".join(f"{path.name} {sha256_once(path)}\n" for path in files).encode()).hexdigest()
