"""The 50 columns of the diabetes table, in order, and what each may hold (Strack et al. 2014)."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

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
