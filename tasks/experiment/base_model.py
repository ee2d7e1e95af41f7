"""Base model of a cell, opened and loaded as ``dptune tune`` does it, and the settings of the cell's job."""

from __future__ import annotations

from typing import Any

from dptune.core.declarations import declared
from dptune.core.settings import Lora, ScheduleSettings
from dptune.job.base_model import Base, open_base
from dptune.job.settings import JobSettings
from tasks.settings.experiment import Model, Task
from tasks.settings.training import TrainingSettings


def job_settings(
    model: Model, task: Task, lora: Lora, training: TrainingSettings, device: str, **rest: Any
) -> JobSettings:
    """The settings of a run of the pipeline as the library takes them.

    Args:
        rest: further settings, such as ``mechanism`` and ``epsilon``.

    Raises: ConfigError for settings that do not go together.
    """
    labelled: dict[str, Any] = {"task": "classify", "labels": task.labels} if task.classifies else {}
    if task.words:
        labelled["words"] = dict(zip(task.labels, task.words, strict=True))
    return JobSettings(
        device=device,
        dtype=model.dtype,
        load_in_4bit=model.load_in_4bit,
        **{name: getattr(training, name) for name in declared(ScheduleSettings)},
        **vars(lora),
        **labelled,
        **rest,
    )


def open_model(model: Model, settings: JobSettings) -> Base:
    """Check a cell's model and tokenizer, without reading weights. Raises: ConfigError as ``open_base``."""
    return open_base(model.source, settings, model.revision)
