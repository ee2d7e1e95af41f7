"""What a search is asked for in the library's terms, and what of params.yaml it cannot follow."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from dptune.core.declarations import declared
from dptune.core.errors import ConfigError
from dptune.core.settings import Lora, ScheduleSettings
from dptune.core.units import RECORD
from dptune.job.search.space import Space
from dptune.job.settings import RENAMED, TuneSettings
from tasks.paths import SEARCH
from tasks.search.twin import check_twin
from tasks.settings.experiment import Model
from tasks.settings.params import Settings

#: The entry of params.yaml that each of the library's settings comes from, unless the space has it.
_ENTRIES = {
    **{name: f"training.{name}" for name in declared(ScheduleSettings)},
    **{name: f"lora.{name}" for name in declared(Lora)},
    **{"mechanism": "search.space.mechanism", "eval_share": "search.score", "public": "data.public"},
    **{"epsilon": "search.epsilon", "delta": "experiment.delta", "out": "search.name", "labels": "task.labels"},
    **{"task": "task.kind", "telemetry": "experiment.telemetry", "seed": "experiment.seeds"},
}


def folder_of(settings: Settings) -> Path:
    """The folder of the search's result."""
    return SEARCH / settings.search.name


def digest_of(settings: Settings) -> str:
    """SHA-256 of all settings, which are public, by which a process knows that it was asked for these."""
    return sha256(settings.model_dump_json().encode()).hexdigest()


def model_of(settings: Settings) -> tuple[str, Model]:
    """The model that is searched, by its name. Raises: ConfigError if none or several could be meant."""
    models, name = settings.experiment.models, settings.search.model
    if name is None and len(models) > 1:
        problem = f"is empty, and experiment.models has {len(models)}"
        raise ConfigError("search.model", problem, fix=f"use {' or '.join(models)}")
    name = name or next(iter(models))
    if name not in models:
        raise ConfigError("search.model", f"{name!r} is not in experiment.models", fix=f"use {' or '.join(models)}")
    return name, models[name]


def check_search(settings: Settings) -> None:
    """Raise ConfigError for what candidates cannot follow, before any work; it names the entry."""
    model_of(settings)
    if settings.task.words:
        raise ConfigError("task.words", "are for cells: a search's classifiers train a head", fix="leave them out")
    if settings.search.rehearses and settings.task.classifies:
        raise ConfigError("search.score", "rehearsal has no classifiers yet", fix="use noisy")
    if settings.search.rehearse_on == "twin":
        check_twin(settings)
    if settings.search.check_ranking and settings.experiment.telemetry == "private":
        problem = (
            "is true, and it shows perplexities of held-out private records, which private telemetry does not publish"
        )
        raise ConfigError("search.check_ranking", problem, fix="use false, or experiment.telemetry: research")
    try:
        unit = None if settings.data.unit == RECORD else settings.data.unit
        shared = tune_settings(settings, "records", None)
        shared.check_search()
        shared.check_rows(unit)
    except ConfigError as error:
        raise in_the_file(error, settings) from None


def tune_settings(settings: Settings, called: str, device: str | None) -> TuneSettings:
    """The settings that all candidates share, but for the space's. Raises: ConfigError as ``TuneSettings``.

    Args:
        called: the public description of the records.
    """
    task, (_, model) = settings.task, model_of(settings)
    # The numbers of steps of candidates differ, so warm-up and checkpoints follow each one's own.
    names = [name for name in declared(ScheduleSettings) if name not in ("warmup_steps", "checkpoint_every")]
    shared = {name: getattr(settings.training, name) for name in names} | vars(settings.lora)
    return TuneSettings(
        epsilon=settings.search.epsilon,
        task=task.kind,
        labels=task.labels or None,
        delta=settings.experiment.delta,
        telemetry=settings.experiment.telemetry,
        seed=settings.experiment.seeds[0],
        device=device,
        dtype=model.dtype,
        load_in_4bit=model.load_in_4bit,
        called=called,
        **shared,
    )


def in_the_file(error: ConfigError, settings: Settings) -> ConfigError:
    """The library's refusal with the entry of params.yaml in place of its own name for the setting."""
    return ConfigError(_entry(error.field, settings.search.asked.space), error.problem, fix=_fix(error))


def _entry(name: str, space: Space) -> str:
    searched = {RENAMED.get(setting, setting): setting for table in space.tables for setting in table.domains}
    if name in searched or name.startswith("options."):
        return f"search.space.{searched.get(name, name)}"
    if f"options.{name}" in searched:  # as the part that refuses it calls it
        return f"search.space.options.{name}"
    if name.startswith("model."):
        return f"experiment.models: {name.removeprefix('model.')}"
    return _ENTRIES.get(name, name)


def _fix(error: ConfigError) -> str:
    return error.fix.replace("another folder", "another search.name") if error.field == "out" else error.fix
