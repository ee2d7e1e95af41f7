"""The public cohort: every column is drawn independently, and nearly uniformly over its values."""

from __future__ import annotations

import numpy as np

from dptune.corpus.schema import DIAGNOSES, DRUGS, SCHEMA
from dptune.corpus.synthetic_patients import Visits, pick
from dptune.corpus.synthetic_private import DIAGNOSIS_CODES, DISCHARGES, SOURCES, SPECIALTIES, TYPES

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
