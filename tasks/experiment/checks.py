"""DVC stage: check models and devices before anything is trained, without records or weights.

python -m tasks.experiment.checks
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from dptune.errors import ConfigError, DataError
from dptune.files import write_json
from tasks.paths import CHECKED, EVAL, PUBLIC_MODEL, PUBLIC_VALIDATION, TRAIN
from tasks.settings.params import Model, Settings, load_settings
from tasks.stage import run_stage

_MADE_BY = {TRAIN: "canaries", EVAL: "split", PUBLIC_VALIDATION: "pretrain"}


def check_inputs() -> None:
    """Raise DataError for a file of records that no stage made yet; the message names the stage."""
    for file, stage in _MADE_BY.items():
        if not file.is_file():
            problem, fix = f"is missing: the stage {stage} makes it", "run `make repro`, or `dvc repro experiment`"
            raise DataError(problem, fix=fix, file=file)


def check_models(settings: Settings) -> None:
    """Check every base model's configuration, tokenizer, target modules and context length, and every device.

    No weights are read. The model that the pipeline trains itself is judged by its settings: it may not exist yet.

    Raises: ConfigError naming the field of params.yaml.
    """
    _check_devices(settings)
    for name, model in settings.experiment.models.items():
        try:
            own = Path(model.source) == PUBLIC_MODEL
            positions = _positions_of_own(settings) if own else _positions(model, settings)
        except ConfigError as error:
            raise ConfigError(_field_of_model(error.field, name), error.problem, fix=error.fix) from None
        longest = settings.training.max_length
        if positions is not None and positions < longest:
            problem = f"{longest} exceeds the {positions} positions of experiment.models.{name}"
            raise ConfigError("training.max_length", problem, fix="lower it" + (", or raise pretrain's" if own else ""))


def _field_of_model(field: str, model: str) -> str:
    """The field of params.yaml that sets ``field`` of the model, for messages."""
    if field.startswith("lora."):
        return f"{field} (on experiment.models.{model})"
    return f"experiment.models.{model}.{field.removeprefix('model.')}"


def _check_devices(settings: Settings) -> None:
    from dptune.training.model import check_device

    devices = settings.experiment.devices
    if devices == "auto" or "://" in settings.experiment.runner:  # a cluster's devices are not this machine's
        return
    for device in devices:
        try:
            check_device(device)
        except ConfigError as error:
            raise ConfigError("experiment.devices", error.problem, fix=f"{error.fix}, or auto") from None


def _positions(model: Model, settings: Settings) -> int | None:
    from dptune.tuning.base import open_base
    from dptune.tuning.settings import TuneSettings

    lora = settings.lora.model_dump(exclude={"dropout"})
    asked = TuneSettings(epsilon=1, device="cpu", dtype=model.dtype, **lora)
    return open_base(model.source, asked, model.revision).positions


def _positions_of_own(settings: Settings) -> int:
    from dptune.training.model import Lora, attach_lora
    from dptune.training.pretrain import Pretraining, without_weights

    shape = {field.name: getattr(settings.pretrain, field.name) for field in fields(Pretraining)}
    attach_lora(without_weights(Pretraining(**shape)), Lora(**settings.lora.model_dump()), 0)
    return settings.pretrain.max_length


def check() -> None:
    """Check the settings, then write a file whose content never changes, so that later stages do not run again."""
    check_models(load_settings())
    write_json(CHECKED, {"models": "checked", "devices": "checked"})


if __name__ == "__main__":
    run_stage(check)
