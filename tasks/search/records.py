"""The records that a search reads: the sides of the split before any canary was planted, and the public records."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dptune.corpus.reading.read import Sides
from dptune.corpus.reading.record import Chat, Content, PromptTarget, Text
from dptune.corpus.reading.source import RecordSource
from dptune.corpus.records import read_about
from dptune.errors import ConfigError, DataError
from dptune.units import RECORD
from tasks.paths import EVAL, PUBLIC_VALIDATION
from tasks.settings.params import Settings
from tasks.split_records import ATTACK_SIDE, TRAIN_SIDE, split_records

_MADE_BY = {TRAIN_SIDE: "split", EVAL: "split", ATTACK_SIDE: "split", PUBLIC_VALIDATION: "validation"}


def check_records(settings: Settings) -> None:
    """Raise DataError for a file that no stage made yet, ConfigError for one that was split by another unit."""
    for file, stage in _MADE_BY.items():
        if not file.is_file():
            raise DataError(f"is missing: the stage {stage} makes it", fix=f"run `dvc repro {stage}`", file=file)
    for file in (TRAIN_SIDE, EVAL, ATTACK_SIDE):
        if (unit := read_about(file).get("unit")) != settings.data.unit:
            problem = f"is {settings.data.unit}, and {file} was split by {unit}"
            raise ConfigError("data.unit", problem, fix="run `dvc repro split`, or use that unit")


def read_sides(settings: Settings) -> Sides:
    """All records of a search. Private, but for ``public``.

    Raises: DataError for unreadable files; ConfigError if candidates would be scored on units that also train.
    """
    read = split_records
    sides = Sides(read(TRAIN_SIDE), eval=read(EVAL), public=read(PUBLIC_VALIDATION))
    shared = sides.shared_units
    if settings.data.unit != RECORD and settings.search.asked.score.on == "held_out" and shared:
        some = "some" if settings.experiment.telemetry == "private" else shared
        problem = f"is noisy, and {some} units have records on both sides of the split"
        raise ConfigError("search.score", problem, fix="use public, or {on: train}, or another data.parts")
    return replace(sides, test=split_records(ATTACK_SIDE))


def about_records() -> dict[str, Any]:
    """The public description of the records."""
    return read_about(TRAIN_SIDE)


def public_source(sides: Sides) -> RecordSource:
    """The public records as the library reads rows, for rehearsals."""
    return RecordSource((), public=[_row(record.content) for record in sides.public])


def _row(content: Content) -> dict[str, Any]:
    match content:
        case Text(text):
            return {"text": text}
        case PromptTarget(prompt, target):
            return {"prompt": prompt, "completion": target}
        case Chat(messages, inputs, prompt):
            if prompt:
                return {"prompt": list(messages[:prompt]), "completion": list(messages[prompt:]), **inputs}
            return {"messages": list(messages), **inputs}
    raise ConfigError("search.score", "rehearsal has no classifiers yet", fix="use noisy")
