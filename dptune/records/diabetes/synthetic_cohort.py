"""A synthetic cohort with the schema and the codes of the diabetes table, and no real patient behind it."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pandas as pd

from dptune.core.errors import ConfigError
from dptune.records.diabetes.synthetic_private import (
    DIAGNOSIS_CODES,
    DISCHARGES,
    SOURCES,
    SPECIALTIES,
    TYPES,
    Visits,
    draw_visits,
    pick,
    private_columns,
)
from dptune.records.diabetes.table import AGE_BANDS, COLUMNS, DIAGNOSES, DRUGS, SCHEMA

Kind = Literal["private", "public"]

# Wording of our own; the ways to say "not known" are those that the real file uses.
_DESCRIPTIONS: dict[str, dict[int, str]] = {
    "admission_type_id": {
        1: "Emergency care",
        2: "Urgent care",
        3: "Planned care",
        4: "Birth",
        5: "Not Available",
        6: "NULL",
        7: "Trauma care",
        8: "Not Mapped",
    },
    "discharge_disposition_id": {
        1: "Home without services",
        2: "Moved to another hospital",
        3: "Moved to skilled nursing",
        4: "Moved to intermediate care",
        5: "Moved to other inpatient care",
        6: "Home with nursing visits",
        7: "Left against advice",
        11: "Died",
        13: "Hospice care at home",
        14: "Hospice care in a facility",
        18: "NULL",
        22: "Moved to rehabilitation",
        23: "Moved to long term care",
        25: "Not Mapped",
        26: "Unknown/Invalid",
    },
    "admission_source_id": {
        1: " Sent by a physician",
        2: "Sent by a clinic",
        3: "Sent by the health plan",
        4: "From another hospital",
        5: " From skilled nursing",
        6: " From another care facility",
        7: " Emergency room",
        8: " Sent by a court",
        9: " Not Available",
        17: "NULL",
        20: " Not Mapped",
        22: "From a unit of the same hospital",
    },
}


def generate_cohort(encounters: int, seed: int, *, kind: Kind) -> pd.DataFrame:
    """A table of ``encounters`` rows and all 50 columns, as strings; equal for equal arguments.

    A patient has 1 to 8 encounters, one race and gender, and an age band that never falls. ``private`` has
    correlations to learn (age, diagnoses, drugs, length of stay, readmission) and rules that hold exactly:
    change is Ch iff a drug is Up or Down, diabetesMed is Yes iff a drug is not No. ``public`` draws every
    column by itself from flat marginals: a model trained on it has the private cohort left to learn.

    Raises: ConfigError if ``encounters`` is below 1 or ``kind`` is unknown.
    """
    if encounters < 1:
        raise ConfigError("encounters", f"{encounters} is too few", fix="ask for at least 1")
    if kind not in ("private", "public"):
        raise ConfigError("kind", f"{kind!r} is unknown", fix="use private or public")
    # A seed gives two unrelated cohorts, one per kind.
    rng = np.random.default_rng([seed, int(kind == "private")])
    visits = draw_visits(rng, encounters, flat=kind == "public")
    columns = private_columns(rng, visits) if kind == "private" else public_columns(rng, visits)
    columns |= {
        "encounter_id": visits.encounter_id.astype(str),
        "patient_nbr": visits.patient_nbr.astype(str),
        "race": visits.race,
        "gender": visits.gender,
        "age": np.array(AGE_BANDS, dtype=object)[visits.years.astype(int) // 10],
    }
    return pd.DataFrame({name: columns[name] for name in COLUMNS})


def synthetic_ids_mapping() -> str:
    """An IDs_mapping.csv in the real file's stacked format, for the codes that the generator uses."""
    tables = (
        f"{name},description\n" + "".join(f"{code},{text}\n" for code, text in codes.items())
        for name, codes in _DESCRIPTIONS.items()
    )
    return ",\n".join(tables)


# The public cohort: every column is drawn independently, and nearly uniformly over its values.


_DOSES = {"No": 0.55, "Steady": 0.25, "Up": 0.10, "Down": 0.10}
_HIGHEST = {
    "time_in_hospital": 14,
    "num_lab_procedures": 100,
    "num_procedures": 6,
    "num_medications": 50,
    "number_outpatient": 5,
    "number_emergency": 5,
    "number_inpatient": 5,
    "number_diagnoses": 9,
}
_CODES = {
    "admission_type_id": TYPES,
    "discharge_disposition_id": DISCHARGES,
    "admission_source_id": SOURCES,
    "medical_specialty": SPECIALTIES,
    **dict.fromkeys(DIAGNOSES, DIAGNOSIS_CODES),
}


def public_columns(rng: np.random.Generator, visits: Visits) -> dict[str, np.ndarray]:
    """All columns of the public cohort but those of ``visits``; independent of it and of each other."""
    size = len(visits.encounter_id)
    columns: dict[str, np.ndarray] = {}
    for column in SCHEMA:
        if column.name in DRUGS:
            columns[column.name] = pick(rng, size, _DOSES)
        elif column.name in _HIGHEST and column.bounds:
            low, high = column.bounds[0], _HIGHEST[column.name]
            columns[column.name] = rng.integers(low, high, size, endpoint=True).astype(str)
        elif values := _CODES.get(column.name, column.values):
            columns[column.name] = pick(rng, size, dict.fromkeys(values, 1.0))
    return columns
