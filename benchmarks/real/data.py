"""Rows of the benchmarks on real models: train, dev and test. The first alone are private; nobody trains on the others.

SST-2 and E2E have their official dev and test files. Of the diabetes table some patients are held out. Which rows a
smaller size takes, and which patients are held out, is drawn by a fixed public seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from dptune.records.benchmarks import e2e, glue
from dptune.records.diabetes.narratives import LABEL, verbalise
from dptune.records.diabetes.sources import copy_pair
from dptune.records.diabetes.table import read_table

READMITTED = ("NO", ">30", "<30")
_SEED, _DEV_ROWS, _DEV_PATIENTS, _TEST_PATIENTS = 0, 300, 100, 500

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Rows:
    """The rows of a case. ``columns`` says to ``tune`` and to the scores what they are."""

    train: Sequence[Row] = field(repr=False)
    dev: Sequence[Row] = field(repr=False)
    test: Sequence[Row] = field(repr=False)
    columns: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Sst2:
    """SST-2's whole sentences; each is a unit. ``size`` None takes all that are left after ``skipped``."""

    size: int | None = None
    skipped: int = 0

    def __call__(self, folder: Path) -> Rows:
        place = str(needed(folder, "benchmarks/sst2/sentences", "stsa.binary.train, .dev and .test"))
        train, dev, test = (list(glue(place, "sst2-sentences", part)) for part in ("train", "dev", "test"))
        own = some(train, None)[self.skipped :][: self.size]
        return Rows(own, dev, test, {"text": "text", "label": "label"})


#: What stands between a meaning and its sentence. The papers take GPT-2's end-of-text token: SmolLM2-135M-Instruct has
#: a perplexity of 41 on dev sentences after that token, and of 11 after this line.
E2E_SEPARATOR = "\nDescription:"


@dataclass(frozen=True)
class E2e:
    """E2E's pairs of a meaning and a sentence; each is a unit. ``size`` None takes all. Dev is some of the dev file."""

    size: int | None = None
    separator: str = E2E_SEPARATOR

    def __call__(self, folder: Path) -> Rows:
        place = str(needed(folder, "benchmarks/e2e/e2e-dataset.zip", "the archive of the E2E challenge"))
        train, dev, test = (list(e2e(place, part, separator=self.separator)) for part in ("train", "dev", "test"))
        columns = {"prompt": "prompt", "completion": "completion"}
        return Rows(some(train, self.size), some(dev, _DEV_ROWS), test, columns)


@dataclass(frozen=True)
class Narratives:
    """Encounters of the diabetes table as texts; a patient is a unit. ``size`` None takes all who are not held out.

    Attributes:
        labelled: whether readmission is a label, and its sentence is left out.
    """

    size: int | None = None
    labelled: bool = False

    def __call__(self, folder: Path) -> Rows:
        place = needed(folder, "dataset_diabetes.zip", "the archive of UCI data set 296")
        with TemporaryDirectory() as made:
            table_csv, ids = Path(made, "table.csv"), Path(made, "ids.csv")
            copy_pair(place, table_csv, ids)
            table = read_table(table_csv, ids)
        patients, labels = table.frame["patient_nbr"].tolist(), table.frame["readmitted"].tolist()
        texts = verbalise(table, without=LABEL if self.labelled else None)
        rows = [
            {"patient": patient, "text": text} | ({"label": label} if self.labelled else {})
            for patient, text, label in zip(patients, texts, labels, strict=True)
        ]
        order = some(sorted(set(patients)), None)
        test, dev = set(order[:_TEST_PATIENTS]), set(order[_TEST_PATIENTS:][:_DEV_PATIENTS])
        train = set(order[_TEST_PATIENTS + _DEV_PATIENTS :][: self.size])
        first, second, third = ([row for row in rows if row["patient"] in side] for side in (train, dev, test))
        return Rows(first, second, third, {"text": "text"} | ({"label": "label"} if self.labelled else {}))


def some(rows: Sequence[Any], size: int | None) -> list[Any]:
    """``size`` of the rows (None: all), in an order that a fixed seed shuffled."""
    return [rows[number] for number in np.random.default_rng(_SEED).permutation(len(rows))[:size]]


def needed(folder: Path, inside: str, what: str) -> Path:
    """The path of published data. Exits with one sentence where it is missing."""
    if not (place := folder / inside).exists():
        raise SystemExit(f"{place} is missing: put {what} there, or name the folder that holds {inside} with --data")
    return place
