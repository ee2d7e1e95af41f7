"""A cell's adapter as an MLflow model: weights, ledger, a card with the guarantee, and the code that scores texts.

The model is "from code": MLflow keeps ``adapter_code.py`` and runs it on load, so nothing is pickled. The base model is
named and not copied: a hub model by its revision, a folder by its path and the digest of its files. MLflow's flavour
for transformers keeps no digest, writes an absolute path of this machine, and must load the base to save an adapter.

``python -m tasks.experiment.adapter_model data/runs/RUN TARGET`` writes the same folder without MLflow, to hand on.
"""

from __future__ import annotations

import json
import shlex
import shutil
import warnings
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
import yaml

from dptune.core.errors import ConfigError, DataError
from dptune.core.files import forget_times, read_json, replacing_folder, write_json, write_text
from dptune.job.delivery.deliverable import write_card, write_tokenizer
from dptune.job.delivery.privacy_section import NO_GUARANTEE, has_guarantee, why_not
from dptune.job.delivery.verification import RECORDS
from dptune.job.delivery.weights import BASE, NamedBase, check_weights, form_of
from dptune.job.result import RunResult
from dptune.job.settings import rows_of
from dptune.privacy.ledger_file import read_ledger
from dptune.privacy.run_folder import RunFolder
from dptune.records.parquet_file import form_at, read_about
from dptune.training.models.model_names import name_of, path_of
from tasks.experiment.cells import Cell, model_digest
from tasks.paths import TRAIN
from tasks.stage import run_command

_CODE = Path(__file__).with_name("adapter_code.py")
_PACKAGES = ("mlflow", "pandas", "peft", "safetensors", "torch", "transformers")
#: What transformers writes beside a whole checkpoint's weights and configuration, of some models.
_OF_A_CHECKPOINT = ("generation_config.json",)
#: What stands for the time at which a model was made: with that of the run's start, it tells how long the run took.
_NO_TIME = "1970-01-01 00:00:00"


def write_model(directory: Path, target: Path) -> str:
    """Write the model of a finished cell to the folder ``target``, which must not exist. Returns its card.

    ``dptune verify`` checks the card in the model's folder ``artifacts/adapter``.
    """
    cell = read_json(RunFolder(directory).cell, lambda found: Cell.model_validate_json(json.dumps(found)))
    with TemporaryDirectory(dir=directory) as made:
        adapter = Path(made) / "adapter"
        card = write_deliverable(cell, directory, adapter)
        _save(target, adapter, cell)
    return card


def hand_on(run: Path, target: Path) -> None:
    """Write adapter, tokenizer, ledger and card of a finished cell to the folder ``target``, whole or not at all.

    Raises: ConfigError for a target that exists, and for a classifier; as ``finished_cell``.
    """
    if target.exists() or target.is_symlink():
        raise ConfigError("target", f"{target} exists", fix="give another name, or move it away")
    cell = finished_cell(run)
    if cell.task.classifies:
        problem = f"{run} learned labels, and a card of a study says how to write texts alone"
        fix = "tune a classifier to hand on by `dptune tune --task classify`, or give its adapter, ledger and labels"
        raise ConfigError("run", problem, fix=fix)
    with replacing_folder(target) as made:
        write_usable(cell, run, made)
        forget_times(made)  # no epsilon covers the times of training


def write_usable(cell: Cell, directory: Path, target: Path) -> None:
    """``write_deliverable`` with the tokenizer, and the form of the records if it is known: what sampling needs."""
    from dptune.training.models.model import load_tokenizer

    write_tokenizer(load_tokenizer(cell.model.weights), target, name_of(cell.model.source))
    if form := form_of_records(RunResult.read(RunFolder(directory).result).data):
        write_json(target / RECORDS, {"form": form, "tokens": cell.training.max_length})
    write_deliverable(cell, directory, target)


def form_of_records(data: str) -> str | None:
    """The form of the texts called ``data``, if those lie here now. Their description is read, and no record.

    Narratives are called the same with labels and without: a form of labels is not that of texts.
    """
    try:
        about = read_about(TRAIN)
    except DataError:
        return None
    return form_at(about) if about["label"] == data and form_at(about) != "label" else None


def finished_cell(run: Path) -> Cell:
    """The cell in a run's folder, which has ended, and whose ledger, weights and base model are its own.

    Raises: ConfigError, DataError or LedgerError, which say what to do.
    """
    folder = RunFolder(run)
    if not run.is_dir():
        raise ConfigError(
            "run", f"{run} is not a folder", fix="give the folder of a finished cell: `ls data/runs` lists them"
        )
    try:
        cell = Cell.model_validate_json(folder.cell.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        fix = "give the folder of a finished cell in data/runs; an adapter that `dptune tune` made has its card already"
        problem = f"{run} is not a cell's folder: it has no cell.json"
        raise ConfigError("run", problem, fix=f"{fix}, and `dptune sample` takes any other adapter") from None
    if not folder.is_finished:
        raise ConfigError("run", f"{run} has not ended", fix="run its study again, which goes on with it")
    contents = read_ledger(folder.ledger)
    if (contents.header.mechanism, contents.header.delta) != (cell.mechanism, cell.delta):
        raise DataError("is the ledger of another cell", fix="restore the cell's own", file=folder.ledger)
    if not check_weights(run, contents):
        problem = f"is missing, or {folder.result.name} beside it names no digest of its weights"
        raise DataError(problem, fix="restore both as the run wrote them", file=folder.adapter)
    with suppress(ConfigError):  # of a folder that is gone
        if model_digest(cell.model) == cell.inputs["model"]:
            return cell
    problem = f"{cell.model.source} is another model than {run} was trained on, or is gone"
    raise ConfigError("model.source", problem, fix="restore that model: for the pipeline's own, by its `pretrain`")


def write_deliverable(cell: Cell, directory: Path, target: Path) -> str:
    """Write adapter, ledger and card of the finished cell in ``directory`` to the folder ``target``. Returns the card,
    which also names what lies there already, such as a tokenizer."""
    # Imported here: it loads torch, which takes seconds, and a wrong folder is refused before that.
    from dptune.training.models.weight_files import digest_of_weights

    folder = RunFolder(directory)
    result = RunResult.read(folder.result)
    form = form_of(cell.training.trained.train)
    target.mkdir(exist_ok=True)
    for name in (form.weights, form.config, *_OF_A_CHECKPOINT):  # what somebody else put there does not leave
        if (folder.adapter / name).is_file():
            shutil.copy2(folder.adapter / name, target)
    shutil.copyfile(folder.ledger, target / folder.ledger.name)
    base, same = cell.model, model_digest(cell.model) == cell.inputs["model"]  # else another lies there by now
    digest = digest_of_weights(base.source, base.revision) if same else None
    source = base.weights
    write_json(target / BASE, NamedBase(name_of(base.source), source.revision, digest, kind=source.kind).to_dict())
    return write_card(target, _as_delivered(cell, result))


def _as_delivered(cell: Cell, result: RunResult) -> RunResult:
    """The result with what a card names of the cell's base model and settings."""
    training, four_bits = asdict(cell.training), "4 bits" if cell.model.load_in_4bit else None
    held = ", ".join(filter(None, (cell.model.weights.rounding, cell.model.dtype, four_bits)))
    shown = ("expected_batch_size", "epochs", "learning_rate", "max_length", "records_per_unit")
    return replace(
        result,
        base=name_of(cell.model.source),
        revision=cell.model.weights.revision,
        loaded_by=_loader(cell),
        settings={
            "mechanism": cell.mechanism,
            **{name: value for name, value in cell.options.items() if name != "init_from"},  # a path; ledgers name it
            **{name.replace("_", " "): training[name] for name in shown},
            **rows_of(cell.training, besides=shown),
            "steps": result.planned_releases,
            **_lora_of(cell),
            "base weights": held,
            "seed of the start": cell.seed,
        },
    )


def _lora_of(cell: Cell) -> dict[str, Any]:
    """Rows about the adapters; none where the model's own weights trained."""
    if cell.training.train != "lora":
        return {}
    adapters = {"LoRA rank": cell.lora.rank, "LoRA alpha": cell.lora.alpha}
    return adapters | rows_of(cell.lora, besides=("rank", "alpha"))


def _loader(cell: Cell) -> str:
    """transformers' automatic class that loads the cell's base model, by name."""
    from dptune.training.models.causal import auto_class  # torch takes seconds
    from dptune.training.models.model import load_config

    return str(auto_class(load_config(cell.model.weights)).__name__)


def _save(target: Path, adapter: Path, cell: Cell) -> None:
    import mlflow.pyfunc  # takes seconds, and is not needed without MLflow's parent run
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, Schema

    outputs = Schema([ColSpec("double", "log_likelihood"), ColSpec("long", "tokens")])
    local = path_of(cell.model.source) is not None
    packages = [*_PACKAGES, "bitsandbytes"] if cell.model.load_in_4bit else _PACKAGES
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it asks for an example of an input, which would be stored
        mlflow.pyfunc.save_model(
            target,
            python_model=str(_CODE),
            artifacts={adapter.name: str(adapter)},
            signature=ModelSignature(inputs=Schema([ColSpec("string")]), outputs=outputs),
            pip_requirements=[f"{name}=={version(name).partition('+')[0]}" for name in packages],
            model_config={
                "base": cell.model.source,
                "revision": cell.model.revision,
                "loaded_by": _loader(cell),
                "base_sha256": cell.inputs["model"] if local else None,
                "dtype": cell.model.dtype,
                "load_in_4bit": cell.model.load_in_4bit,
                "max_length": cell.training.max_length,
            },
        )
    _forget_this_machine(target / "MLmodel")


def _forget_this_machine(file: Path) -> None:
    """Take paths of this machine and the time out of MLflow's description of the model."""
    about = yaml.safe_load(file.read_text(encoding="utf-8"))
    flavour = about["flavors"]["python_function"]
    flavour["model_code_path"] = _CODE.name
    for artifact in flavour["artifacts"].values():
        artifact["uri"] = artifact["path"]
    about["utc_time_created"] = _NO_TIME
    write_text(file, yaml.safe_dump(about))


def main(
    run: Annotated[Path, typer.Argument(help="folder of a finished cell: data/runs/NAME")],
    target: Annotated[Path, typer.Argument(help="folder to write, which does not exist yet")],
) -> None:
    """Write a finished cell's adapter with its ledger and a card, to hand on."""
    hand_on(run, target)
    prices = read_ledger(RunFolder(target).ledger).epsilons
    if not has_guarantee(prices.certified):
        print(
            f"{NO_GUARANTEE}: no epsilon is certified ({why_not(prices.leaks)}). Treat it like the records themselves."
        )
    print(f"{target} holds weights, tokenizer, ledger and card.")
    print(f"Check it: dptune verify {shlex.quote(str(target))}")


if __name__ == "__main__":
    run_command(main)
