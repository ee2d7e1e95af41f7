"""The data sets of a cell for MLflow: descriptions with digests, and no rows."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from dptune.corpus.records import read_about
from dptune.files import sha256
from tasks.experiment.cells import Cell
from tasks.experiment.prepare import PreparedCell
from tasks.paths import EVAL, PUBLIC_VALIDATION, TRAIN
from tasks.tracking import timed
from tasks.tracking_entities import InputData

_DIGITS = 16


def input_data(prepared: PreparedCell) -> list[InputData]:
    """What the cell reads: training records, public validation records, and, if telemetry allows it, held-out records.

    Public. The digest of private records is keyed by the secret salt of the training file, so that nobody can test a
    guess of the records with it. Under private telemetry it is of their public description alone.
    """
    cell, units = prepared.cell, len(prepared.spec.units)
    private = _digest(cell, prepared.about)
    profile = {"unit": cell.unit, "units": units, "synthetic": bool(prepared.about["synthetic"])}
    found = [InputData(str(prepared.about["label"]), private, "training", TRAIN.as_posix(), profile)]
    if timed(cell.telemetry):
        held_out = f"{prepared.about['label']}, held out"
        found.append(InputData(held_out, private, "evaluation", EVAL.as_posix(), {"unit": cell.unit}))
    public = read_about(PUBLIC_VALIDATION)
    about = {"synthetic": bool(public.get("synthetic"))}
    return [
        *found,
        InputData(
            str(public["label"]), sha256(PUBLIC_VALIDATION)[:_DIGITS], "validation", PUBLIC_VALIDATION.as_posix(), about
        ),
    ]


def _digest(cell: Cell, about: dict[str, Any]) -> str:
    return cell.inputs["data"][:_DIGITS] if timed(cell.telemetry) else _of_description(about)


def _of_description(about: dict[str, Any]) -> str:
    """A digest of what is said of data in public: its label, its source and its unit."""
    told = {key: about.get(key) for key in ("label", "source", "unit", "synthetic")}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:_DIGITS]
