"""Attack, train and eval sides, by encounter or by patient (spec rldp.md, section 2, DEFECT A)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from dptune.corpus.records import Records, read_records, write_records
from dptune.errors import ConfigError

UNITS = ("encounter", "patient")
SIDES = ("attack", "train", "eval")


def split(records: np.ndarray, patients: np.ndarray, seed: int, unit: str) -> dict[str, np.ndarray]:
    """Deal ``records`` (distinct numbers; ``patients`` says whose each is) to attack, train and eval.

    Of n units, floor(n / 5) attack; of the m that remain, floor(9 m / 10) train; the rest is eval: 20,353 /
    73,271 / 8,142 of 101,766 encounters. A unit is an encounter, or a patient with all of theirs, so
    that no patient is on two sides. ``seed`` is public. Each side's records come in ascending order.

    Raises: ConfigError for an unknown unit, or too few units for three sides.
    """
    if unit not in UNITS:
        raise ConfigError("split.unit", f"{unit!r} is unknown", fix=f"use one of {', '.join(UNITS)}")
    units = records if unit == "encounter" else patients
    dealt = np.random.default_rng(seed).permutation(np.unique(units))
    attack = len(dealt) // 5
    train = attack + (len(dealt) - attack) * 9 // 10
    if attack == 0:
        problem = f"{len(dealt)} {unit}s cannot fill three sides"
        raise ConfigError("split.unit", problem, fix="use at least 5")
    sides = np.split(dealt, [attack, train])
    return {name: np.sort(records[np.isin(units, chosen)]) for name, chosen in zip(SIDES, sides, strict=True)}


def write_splits(narratives: Path, directory: Path, seed: int, unit: str) -> None:
    """Write attack.parquet, train.parquet and eval.parquet into ``directory``, with the columns and the
    metadata of ``narratives`` plus unit and split.

    Raises: DataError for unreadable narratives; ConfigError as :func:`split`.
    """
    whole = read_records(narratives)
    for name, chosen in split(whole.record, whole.patient, seed, unit).items():
        rows = np.flatnonzero(np.isin(whole.record, chosen))
        about = {**whole.about, "unit": unit, "split": name}
        text = whole.text.take(pa.array(rows))
        write_records(directory / f"{name}.parquet", Records(whole.record[rows], whole.patient[rows], text, about))
