"""Verbalises the diabetes table: one paragraph per encounter, one clause per attribute (spec rldp.md, section 2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from dptune.core.errors import DataError
from dptune.core.files import read_json, sha256
from dptune.records.diabetes.schema import COLUMNS, DIAGNOSES, DRUGS, ID_COLUMNS, MISSING
from dptune.records.diabetes.sources import IDS_NAME, TABLE_NAME
from dptune.records.diabetes.table import UNKNOWN, Table, read_table
from dptune.records.parquet_file import Records, write_records

OPENING = "This is the record of a hospital encounter of a patient with diabetes."
NEVER_VERBALISED = ("encounter_id", "patient_nbr")
_ACQUIRE = "acquire it again (`dvc repro -f acquire`), or restore the file"
_UNKNOWN_VALUES = (MISSING, "Unknown/Invalid")
_ORDER = ("primary", "secondary", "additional secondary")
_DOSE = {"No": "not prescribed", "Steady": "unchanged", "Up": "increased", "Down": "decreased"}
_CLOSING = {
    "change": {"Ch": "The medication is changed.", "No": "The medication is not changed."},
    "diabetesMed": {
        "Yes": "Diabetes medication is prescribed.",
        "No": "Diabetes medication is not prescribed.",
    },
    "readmitted": {
        "<30": "The patient is readmitted in less than 30 days.",
        ">30": "The patient is readmitted after more than 30 days.",
        "NO": "The patient is not readmitted.",
    },
}

Clause = Callable[[str], str]


def verbalise(table: Table) -> list[str]:
    """Write a paragraph for each row of ``table``, in its order.

    Clauses follow the column order. encounter_id and patient_nbr are left out, a missing value is "unknown", ids become
    their descriptions, and a diagnosis its category: the digits before the point.
    """
    clauses = clause_makers(table.ids)
    columns = [_clauses_of(table.frame[name], clauses[name]) for name in clauses]
    return [" ".join((OPENING, *row)) for row in zip(*columns, strict=True)]


def clause_makers(ids: Mapping[str, Mapping[str, str]]) -> dict[str, Clause]:
    """Column name -> function from a field's value to its clause, in column order."""
    makers: dict[str, Clause] = {name: partial(_plain, name.replace("_", " ")) for name in COLUMNS}
    makers["age"] = _age
    makers["time_in_hospital"] = _stay
    makers |= {name: partial(_describe_code, name.replace("_", " "), ids[name]) for name in ID_COLUMNS}
    makers |= {f"number_{kind}": partial(_visits, kind) for kind in ("outpatient", "emergency", "inpatient")}
    makers |= {name: partial(_diagnosis, order) for name, order in zip(DIAGNOSES, _ORDER, strict=True)}
    makers |= {drug: partial(_drug, drug) for drug in DRUGS}
    makers |= {name: wording.__getitem__ for name, wording in _CLOSING.items()}
    return {name: maker for name, maker in makers.items() if name not in NEVER_VERBALISED}


def write_narratives(table_csv: Path, ids_mapping: Path, source_json: Path, out: Path) -> None:
    """Verbalise ``table_csv`` into the Parquet file ``out`` with columns record, unit, text.

    ``record`` is encounter_id and ``unit`` is patient_nbr. Nobody else's presence changes these numbers, nor the sides,
    clients and shards that are computed from them. Source, synthetic and label go from ``source_json`` into the
    schema's metadata.

    Raises: DataError for a bad table (see ``read_table``) or a bad ``source_json``.
    """
    about = read_source(source_json)
    check_files(source_json, {TABLE_NAME: table_csv, IDS_NAME: ids_mapping})
    table = read_table(table_csv, ids_mapping)
    check_rows(source_json, table_csv, len(table.frame))
    record, patient = (table.frame[name].to_numpy().astype(np.int64) for name in NEVER_VERBALISED)
    write_records(out, Records(record, patient, pa.array(verbalise(table), pa.string()), about))


def read_source(path: Path) -> dict[str, Any]:
    """The part of a source's description that all its records keep: source, synthetic and label.

    Raises: DataError if the file is no such description.
    """
    try:
        source = read_json(path)
        kept = {name: source[name] for name in ("source", "synthetic", "label")}
        return kept | {name: source[name] for name in ("form",) if name in source}
    except (OSError, ValueError, KeyError, TypeError):
        problem = "cannot be read as the description of a source"
        raise DataError(problem, fix="acquire the table again, which writes it", file=path) from None


def check_files(source_json: Path, files: Mapping[str, Path]) -> None:
    """Check that the files are, byte for byte, the ones that ``source_json`` describes.

    A file that was cut off at the end of a line would still parse, with records missing.

    Raises: DataError naming the file whose SHA-256 differs.
    """
    stated = _read_key(source_json, "sha256")
    for name, file in files.items():
        if not (isinstance(stated, dict) and isinstance(stated.get(name), str)):
            raise DataError(f"holds no SHA-256 of {name}", fix=_ACQUIRE, file=source_json)
        try:
            actual = sha256(file)
        except OSError as error:
            raise DataError(f"cannot be read ({error.strerror})", fix=_ACQUIRE, file=file) from None
        if actual != stated[name]:
            problem = f"is not the file that {source_json.name} describes: its SHA-256 is {actual}, not {stated[name]}"
            raise DataError(problem, fix=_ACQUIRE, file=file)


def check_rows(source_json: Path, file: Path, rows: int) -> None:
    """Check the number of rows that the description states. Raises: DataError if it differs."""
    stated = _read_key(source_json, "rows")
    if type(stated) is not int or stated != rows:
        raise DataError(f"has {rows} rows, and {source_json.name} says {stated!r}", fix=_ACQUIRE, file=file)


def _read_key(source_json: Path, key: str) -> Any:
    return read_json(source_json).get(key)


def _clauses_of(values: pd.Series, clause: Clause) -> np.ndarray:
    # A column has few distinct values: make the clause of each once, then look it up for every row.
    codes, distinct = pd.factorize(values)
    return np.array([clause(value) for value in distinct], dtype=object)[codes]


def _or_unknown(value: str) -> str:
    return UNKNOWN if value in _UNKNOWN_VALUES else value


def _plain(column: str, value: str) -> str:
    return f"{column} is {_or_unknown(value)}."


def _describe_code(column: str, descriptions: Mapping[str, str], code: str) -> str:
    return f"{column} is {descriptions[code]}."


def _age(band: str) -> str:
    low, high = band.strip("[)").split("-")
    return f"The patient is between {low} and {high} years old."


def _stay(days: str) -> str:
    return f"The patient is in hospital for {days} day{'' if days == '1' else 's'}."


def _visits(kind: str, count: str) -> str:
    number = "no" if count == "0" else count
    visits = "visit" if count == "1" else "visits"
    return f"The patient had {number} {kind} {visits} in the year preceding the encounter."


def _diagnosis(order: str, code: str) -> str:
    return f"{order} diagnosis code is {_or_unknown(code.partition('.')[0])}."


def _drug(drug: str, dose: str) -> str:
    return f"{drug} is {_DOSE[dose]}."
