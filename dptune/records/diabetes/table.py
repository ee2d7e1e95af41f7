"""Diabetes table: its 50 columns and what each may hold (Strack et al. 2014), and the strict reading of it.

Anything wrong in the table or in IDs_mapping.csv raises, naming row and column.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from dptune.core.errors import DataError

MISSING = "?"
DOSES = ("No", "Steady", "Up", "Down")
AGE_BANDS = tuple(f"[{low}-{low + 10})" for low in range(0, 100, 10))
WEIGHT_BANDS = (MISSING, *(f"[{low}-{low + 25})" for low in range(0, 200, 25)), ">200")
RACES = (MISSING, "Caucasian", "AfricanAmerican", "Hispanic", "Asian", "Other")
GENDERS = ("Female", "Male", "Unknown/Invalid")
PAYERS = (
    *(MISSING, "BC", "CH", "CM", "CP", "DM", "FR", "HM", "MC"),
    *("MD", "MP", "OG", "OT", "PO", "SI", "SP", "UN", "WC"),
)
GLUCOSE = ("None", "Norm", ">200", ">300")
A1C = ("None", "Norm", ">7", ">8")
READMITTED = ("NO", "<30", ">30")
DRUGS = (
    *("metformin", "repaglinide", "nateglinide", "chlorpropamide", "glimepiride", "acetohexamide"),
    *("glipizide", "glyburide", "tolbutamide", "pioglitazone", "rosiglitazone", "acarbose", "miglitol"),
    *("troglitazone", "tolazamide", "examide", "citoglipton", "insulin", "glyburide-metformin"),
    *("glipizide-metformin", "glimepiride-pioglitazone", "metformin-rosiglitazone"),
    "metformin-pioglitazone",
)
DIAGNOSES = ("diag_1", "diag_2", "diag_3")
ID_COLUMNS = ("admission_type_id", "discharge_disposition_id", "admission_source_id")

# The table drops leading zeros, so ICD-9 008 reads "8"; only V and E codes carry a letter.
ICD9 = r"\?|\d{1,3}(\.\d{1,2})?|V\d{2}(\.\d{1,2})?|E\d{3}(\.\d)?"
SPECIALTY = r"\?|[A-Za-z][A-Za-z&/-]{0,59}"
_WHOLE_NUMBER = re.compile(r"0|[1-9][0-9]{0,11}", re.ASCII)


@dataclass(frozen=True)
class Column:
    """A column of the diabetes table: its name, and what its cells may hold.

    That is one of ``values``, a whole number within ``bounds``, text that matches ``pattern`` entirely, or, without any
    of the three, a code listed in IDs_mapping.csv.
    """

    name: str
    values: tuple[str, ...] = ()
    bounds: tuple[int, int] | None = None
    pattern: str | None = None


def accepts(column: Column, value: str, codes: Collection[str] = ()) -> bool:
    """Whether ``column`` may hold ``value``; ``codes`` are the column's codes in IDs_mapping.csv."""
    if column.bounds:
        low, high = column.bounds
        return bool(_WHOLE_NUMBER.fullmatch(value)) and low <= int(value) <= high
    if column.pattern:
        return re.fullmatch(column.pattern, value, re.ASCII) is not None
    return value in (column.values or codes)


def expectation(column: Column) -> str:
    """What ``column`` may hold, as the fix that an error message gives."""
    if column.bounds:
        return f"use a whole number from {column.bounds[0]} to {column.bounds[1]}"
    if column.pattern:
        return f"use '?' or a value that matches {column.pattern}"
    if column.values:
        return f"use one of {', '.join(column.values)}"
    return "use a code that IDs_mapping.csv lists, or add the code there"


# Ranges of counts are sanity bounds, wider than the real table's (for example 132 laboratory procedures).
SCHEMA: tuple[Column, ...] = (
    Column("encounter_id", bounds=(1, 10**12 - 1)),
    Column("patient_nbr", bounds=(1, 10**12 - 1)),
    Column("race", RACES),
    Column("gender", GENDERS),
    Column("age", AGE_BANDS),
    Column("weight", WEIGHT_BANDS),
    *(Column(name) for name in ID_COLUMNS),
    Column("time_in_hospital", bounds=(1, 14)),
    Column("payer_code", PAYERS),
    Column("medical_specialty", pattern=SPECIALTY),
    Column("num_lab_procedures", bounds=(0, 200)),
    Column("num_procedures", bounds=(0, 20)),
    Column("num_medications", bounds=(0, 200)),
    Column("number_outpatient", bounds=(0, 366)),
    Column("number_emergency", bounds=(0, 366)),
    Column("number_inpatient", bounds=(0, 366)),
    *(Column(name, pattern=ICD9) for name in DIAGNOSES),
    Column("number_diagnoses", bounds=(1, 50)),
    Column("max_glu_serum", GLUCOSE),
    Column("A1Cresult", A1C),
    *(Column(name, DOSES) for name in DRUGS),
    Column("change", ("Ch", "No")),
    Column("diabetesMed", ("Yes", "No")),
    Column("readmitted", READMITTED),
)
COLUMNS: tuple[str, ...] = tuple(column.name for column in SCHEMA)


UNKNOWN = "unknown"
_MEANS_UNKNOWN = frozenset({"", "NULL", "Not Available", "Not Mapped", "Unknown/Invalid"})

IdsMapping = Mapping[str, Mapping[str, str]]
"""Column name -> code -> description, for the three id columns."""


@dataclass(frozen=True)
class Table:
    """A validated table: ``frame`` has all 50 columns as strings, ``ids`` decodes its three id columns."""

    frame: pd.DataFrame
    ids: IdsMapping


def read_table(csv: Path, ids_mapping: Path) -> Table:
    """Read and check the whole table.

    Raises: DataError naming file, row (the header is row 1), column and fix, for a missing, extra, repeated
    or moved column, a short or long row, a byte that is not UTF-8, an empty table, a value that the schema
    does not allow, an id that IDs_mapping.csv does not list, and a repeated encounter_id.
    """
    ids = read_ids_mapping(ids_mapping)
    text = _read_text(csv)
    rows = _check_shape(csv, text)
    frame = pd.read_csv(
        io.StringIO(text), dtype=str, keep_default_na=False, na_filter=False, index_col=False, engine="c"
    )
    if len(frame) != rows:  # if the two parsers disagreed, row numbers in messages would be wrong
        raise DataError("unreadable quoting or line ends", fix="export the table as plain CSV", file=csv)
    for column in SCHEMA:
        _check_values(csv, column, frame[column.name], ids.get(column.name, {}))
    _check_unique(csv, frame["encounter_id"])
    return Table(frame, ids)


def read_ids_mapping(path: Path) -> IdsMapping:
    """Read the three stacked tables of IDs_mapping.csv; stray spaces and closing full stops go, and every
    way of saying "not known" becomes ``unknown``.

    Raises: DataError for an unreadable row, a repeated or non-numeric code, or a missing table.
    """
    tables: dict[str, dict[str, str]] = {}
    current: dict[str, str] | None = None
    for number, row in _rows(path, _read_text(path)):
        cells = [cell.strip() for cell in row]
        if not any(cells):  # the separator between two tables
            current = None
        elif len(cells) != 2:
            problem = f"{len(cells)} fields instead of 2"
            raise DataError(problem, fix="write <id>,<description>; quote a comma", file=path, row=number)
        elif current is None:
            current = tables[_table_name(path, number, cells, tables)] = {}
        else:
            _add_code(path, number, cells, current)
    for name in ID_COLUMNS:
        if not tables.get(name):
            raise DataError("no codes for this column", fix="restore IDs_mapping.csv", file=path, column=name)
    return tables


def _table_name(path: Path, number: int, cells: list[str], tables: Mapping[str, object]) -> str:
    name = cells[0]
    if name not in ID_COLUMNS or name in tables or cells[1] != "description":
        fix = f"start each of the three tables with '<name>,description', names {', '.join(ID_COLUMNS)}"
        raise DataError("not the head of a table of codes", fix=fix, file=path, row=number)
    return name


def _add_code(path: Path, number: int, cells: list[str], codes: dict[str, str]) -> None:
    code, description = cells
    if not (code.isascii() and code.isdigit()) or code in codes:
        problem = f"code {code[:20]!r} is not a number, or is repeated"
        raise DataError(problem, fix="give every code once, as a number", file=path, row=number)
    words = " ".join(description.split()).rstrip(" .")
    codes[code] = UNKNOWN if words in _MEANS_UNKNOWN else words


def _read_text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
        raise DataError(problem, fix="check the path and its permissions", file=path) from None
    if not data.strip():
        raise DataError("the file is empty", fix="fetch it again", file=path)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        row = data.count(b"\n", 0, error.start) + 1
        problem = f"byte 0x{data[error.start]:02x} is not UTF-8"
        raise DataError(problem, fix="save the file as UTF-8", file=path, row=row) from None


def _rows(path: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    number = 0
    try:
        for number, row in enumerate(csv.reader(io.StringIO(text, newline=""), strict=True), start=1):
            yield number, row
    except csv.Error as error:
        problem = f"not a CSV row ({error})"
        raise DataError(problem, fix="close every quote", file=path, row=number + 1) from None


def _check_shape(path: Path, text: str) -> int:
    """Check the header and the length of every row. Returns the number of rows below the header."""
    rows = _rows(path, text)
    _check_header(path, next(rows)[1])
    number = 1
    for number, row in rows:
        if len(row) != len(COLUMNS):
            fault = "short" if len(row) < len(COLUMNS) else "long"
            column = COLUMNS[len(row)] if fault == "short" else COLUMNS[-1]
            problem = f"the row is too {fault}: {len(row)} fields instead of {len(COLUMNS)}"
            fix = "restore the row from the source"
            raise DataError(problem, fix=fix, file=path, row=number, column=column)
    if number == 1:
        raise DataError("only a header, no encounters", fix="fetch the file again", file=path, row=1)
    return number - 1


def _check_header(path: Path, header: list[str]) -> None:
    def fault(problem: str, column: str, fix: str) -> DataError:
        return DataError(problem, fix=fix, file=path, row=1, column=column)

    for name in header:
        if header.count(name) > 1:
            raise fault("the column is repeated", name, "keep one of them")
    for name in COLUMNS:
        if name not in header:
            raise fault("the column is missing", name, f"the header needs these columns: {','.join(COLUMNS)}")
    for name in header:
        if name not in COLUMNS:
            raise fault("the table has no such column", name, "remove it")
    for place, (name, expected) in enumerate(zip(header, COLUMNS, strict=True), start=1):
        if name != expected:
            raise fault(f"column {place} is {name!r}", expected, "put the columns in their original order")


def _check_values(path: Path, column: Column, values: pd.Series, codes: Mapping[str, str]) -> None:
    numbers, distinct = pd.factorize(values)
    wrong = np.array([not accepts(column, value, codes) for value in distinct])
    if not wrong.any():
        return
    row = int(np.argmax(wrong[numbers]))
    raise DataError(
        "the value is not allowed",  # the message leaves it out: it may be a patient's
        fix=expectation(column),
        file=path,
        row=row + 2,
        column=column.name,
    )


def _check_unique(path: Path, encounters: pd.Series) -> None:
    repeated = encounters.duplicated().to_numpy()
    if repeated.any():
        row = int(np.argmax(repeated))
        first = int(np.argmax((encounters == encounters.iloc[row]).to_numpy()))
        raise DataError(
            f"the encounter of row {first + 2} appears again",
            fix="keep each encounter once",
            file=path,
            row=row + 2,
            column="encounter_id",
        )
