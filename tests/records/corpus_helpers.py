"""Small tables for the corpus tests."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from dptune.records.diabetes.narratives import verbalise
from dptune.records.diabetes.synthetic_cohort import generate_cohort, synthetic_ids_mapping
from dptune.records.diabetes.table import Table, read_ids_mapping
from dptune.records.parquet_file import Records, write_records

needs_uci = [
    pytest.mark.uci,
    pytest.mark.skipif("DPTUNE_UCI_PATH" not in os.environ, reason="set DPTUNE_UCI_PATH to the real table"),
]


def uci_path() -> Path:
    return Path(os.environ["DPTUNE_UCI_PATH"])


def write_source(directory: Path, encounters: int = 12, seed: int = 3) -> tuple[Path, Path]:
    """A valid table and mapping."""
    table, ids = directory / "table.csv", directory / "ids.csv"
    generate_cohort(encounters, seed, kind="private").to_csv(table, index=False, lineterminator="\n")
    ids.write_text(synthetic_ids_mapping())
    return table, ids


def verbalised(frame: pd.DataFrame) -> list[str]:
    """The narratives of a generated cohort."""
    with TemporaryDirectory() as folder:
        ids = Path(folder) / "ids.csv"
        ids.write_text(synthetic_ids_mapping())
        return verbalise(Table(frame, read_ids_mapping(ids)))


def write_train(path: Path, records: int, patients: int, unit: str = "record", source: str = "test") -> Records:
    """A train file with text that names the record."""
    about = {"source": source, "synthetic": True, "label": "made up", "unit": unit, "split": "train"}
    numbers = np.arange(records, dtype=np.int64) * 3
    owners = np.arange(records, dtype=np.int64) % patients
    made = Records(numbers, owners, pa.array([f"text of {number}." for number in numbers]), about)
    write_records(path, made)
    return made
