"""Request of a search in the library's terms: what it cannot follow of params.yaml, and whether it has ended."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from dptune.core.declarations import declared
from dptune.core.errors import ConfigError
from dptune.core.files import forget_times, read_json, write_json
from dptune.core.files import sha256 as file_digest
from dptune.core.plugins import plugins_of
from dptune.core.settings import RECORD, Lora, ScheduleSettings
from dptune.job.delivery.weights import weights_in
from dptune.job.search.space import Space
from dptune.job.settings import RENAMED, TuneSettings
from dptune.privacy.run_folder import RunFolder, runs_within
from dptune.privacy.spent_budgets.register import Register
from dptune.records.diabetes.narratives import PLAIN, write_narratives
from dptune.records.diabetes.sources import acquire_synthetic
from dptune.records.parquet_file import Records, read_records
from dptune.records.reading.source import RecordSource
from dptune.records.splits import keys_of
from dptune.training.models.model_names import path_of
from tasks.paths import EVAL, PUBLIC_MODEL, PUBLIC_VALIDATION, SEARCH, SPENT
from tasks.settings.data import NARRATED
from tasks.settings.experiment import Model
from tasks.settings.params import Settings
from tasks.split_records import ATTACK_SIDE, TRAIN_SIDE, split_digest

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


#: The column of a twin's rows that names their units.
UNIT = "unit"


def check_twin(settings: Settings) -> None:
    """Raise ConfigError where no generator fits the records, or where it would make the private ones again."""
    data = settings.data
    if data.source not in NARRATED:
        problem = f"is twin, and no generator makes records like the records of source {data.source}"
        fix = "use public, with public records in data.public"
        raise ConfigError("search.rehearse_on", problem, fix=fix)
    if data.source == "synthetic" and settings.search.twin_seed == data.synthetic.seed:
        problem = f"{data.synthetic.seed} is data.synthetic.seed: the twin would be made of the private records"
        raise ConfigError("search.twin_seed", problem, fix="use another seed")


def twin_source(units: int, unit: str, seed: int, template: str = PLAIN) -> RecordSource:
    """The twin as the library reads public rows: columns ``text`` and ``unit``. Equal for equal arguments.

    Guarantee: it costs no privacy. Public: all arguments; the number of private units stands in every ledger's header
    and certificate. Private records decide nothing else here, for nothing else of them is given.

    The generator draws this kind of cohort and that of the public narratives from streams of their own, and each seed
    has its own, so that the twin shares no patient with either.

    Args:
        units: number of units of the private run.
        unit: kind of unit: record, or patient.
        template: wording of the private narratives, which params.yaml names.
    """
    found = _cohort(
        units if unit == RECORD else 2 * units + 50, seed, template
    )  # patients have 1.4 encounters on average
    keys = keys_of(found, unit)
    chosen = np.isin(keys, np.unique(keys)[:units])
    rows = zip(keys[chosen].tolist(), found.text.to_pandas()[chosen], strict=True)
    return RecordSource((), public=[{UNIT: key, "text": text} for key, text in rows])


def twin_name(units: int, unit: str, seed: int) -> str:
    """What the page calls the twin."""
    return f"a generated cohort (SYNTHETIC, {units} {unit}s, seed {seed})"


def _cohort(encounters: int, seed: int, template: str) -> Records:
    with TemporaryDirectory(prefix="dptune-twin-") as work:
        acquired = acquire_synthetic(Path(work), encounters, seed, kind="private")
        narratives = Path(work) / "twin.parquet"
        write_narratives(acquired.table, acquired.ids_mapping, acquired.manifest, narratives, template)
        return read_records(narratives)


# What is known of a search before any work: it has ended as asked, or its records paid before. Loads no torch.


#: In a search's folder: what its page was made of, and the page's answer.
_SHOWN = "shown.json"


def refuse_paid(settings: Settings) -> None:
    """Raise ConfigError if a new search was not told to accept that these records were searched before."""
    folder = RunFolder(folder_of(settings))
    begun = folder.cell.exists() or folder.searching.exists()
    if settings.search.rehearses or settings.search.again or begun or not SPENT.exists():
        return
    Register(SPENT).check(split_digest(), again=False)


def shown(settings: Settings, page: Path) -> str | None:
    """The page's answer, if it shows the ended search of this name, and neither settings nor files changed since.

    None also where weights of settings that were not chosen lie there: whoever runs the search again is told of them.
    """
    file = folder_of(settings) / _SHOWN
    if not (file.exists() and page.exists()) or any(map(weights_in, runs_within(file.parent))):
        return None
    known = read_json(file)
    same = known["asked"] == _asked(settings) and known["page"] == file_digest(page)
    return str(known["answer"]) if same else None


def remember_shown(settings: Settings, page: Path, answer: str) -> None:
    """Keep what a page was made of. The file bears no time, as all in the folder of a search."""
    file = folder_of(settings) / _SHOWN
    write_json(file, {"asked": _asked(settings), "page": file_digest(page), "answer": answer})
    forget_times(file.parent)


def _asked(settings: Settings) -> str:
    """A digest of all settings, of the code of plug-ins, and of the sizes and times of the files that a search reads or
    made."""
    given = [settings.data.path, settings.data.public, TRAIN_SIDE, EVAL, ATTACK_SIDE, PUBLIC_VALIDATION]
    given.append(path_of(model_of(settings)[1].source))
    folders = [PUBLIC_MODEL, RunFolder(folder_of(settings)).adapter]
    inside = [path for folder in (*filter(None, given), *folders) if folder.is_dir() for path in folder.rglob("*")]
    states = [
        (path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted({*filter(None, given), *inside})
        if path.exists()
    ]
    code = [str(plugin) for plugin in plugins_of(settings.plugins)]
    return sha256(json.dumps([settings.model_dump(mode="json"), code, states]).encode()).hexdigest()
