"""The private cohort: correlations that a language model can learn, as a chain of conditional draws.

age -> diagnoses -> specialty, admission, stay, drugs -> counts -> readmission. The weights are invented, for
plausible shapes; they estimate nothing about any hospital.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from dptune.records.diabetes.table import DRUGS

Columns = dict[str, np.ndarray]

# Main diagnosis by age: below 30, below 60, below 75, older.
_AGE_LIMITS = (30, 60, 75)
_MAIN = (
    {"250.13": 40, "250.11": 15, "250.03": 15, "250.83": 8, "276": 6, "682": 5, "577": 4, "V58": 2, "?": 1},
    {
        "250.8": 10,
        "250.02": 8,
        "786": 14,
        "414": 10,
        "278": 10,
        "682": 9,
        "715": 8,
        "577": 7,
        "296": 6,
        "V57": 3,
    },
    {
        "414": 16,
        "410": 12,
        "428": 11,
        "715": 11,
        "486": 7,
        "491": 7,
        "427": 6,
        "434": 6,
        "250.8": 5,
        "V57": 6,
    },
    {"428": 20, "427": 12, "486": 11, "434": 10, "599": 9, "820": 9, "410": 8, "584": 7, "491": 5, "276": 4},
)
_CHAPTERS = ("diabetes", "heart", "lung", "kidney", "injury", "other")
_CHAPTER_OF = {
    **dict.fromkeys(("250.13", "250.11", "250.03", "250.83", "250.8", "250.02", "276"), 0),
    **dict.fromkeys(("414", "410", "428", "427", "434"), 1),
    **dict.fromkeys(("486", "491", "786"), 2),
    **dict.fromkeys(("584", "599"), 3),
    **dict.fromkeys(("820", "715", "682"), 4),
}
_OTHER = _CHAPTERS.index("other")
_SECOND = (  # second and third diagnosis, by chapter of the main one
    {"276": 30, "250.61": 20, "584": 12, "401": 12, "V15": 6, "?": 6},
    {"428": 22, "427": 20, "414": 18, "401": 14, "425": 8, "V45": 8, "585": 6},
    {"491": 22, "518": 20, "496": 16, "428": 12, "276": 10, "8": 2},
    {"585": 24, "403": 22, "276": 16, "41": 12, "599": 10},
    {"E888": 26, "E878": 16, "285": 16, "682": 12, "V43": 8, "401": 8},
    {"250": 30, "401": 26, "272": 14, "305": 10, "V85": 6, "?": 4},
)
DIAGNOSIS_CODES = tuple(sorted({code for table in (*_MAIN, *_SECOND) for code in table}))

_SPECIALTY = (
    {"Endocrinology": 30, "InternalMedicine": 25, "?": 30, "Pediatrics-Endocrinology": 5},
    {"Cardiology": 45, "Surgery-Cardiovascular/Thoracic": 15, "InternalMedicine": 10, "?": 30},
    {"Pulmonology": 30, "Emergency/Trauma": 20, "InternalMedicine": 20, "?": 30},
    {"Nephrology": 35, "Urology": 15, "InternalMedicine": 20, "?": 30},
    {"Orthopedics": 40, "Surgery-General": 20, "Orthopedics-Reconstructive": 10, "?": 30},
    {"Family/GeneralPractice": 25, "InternalMedicine": 20, "Psychiatry": 15, "?": 40},
)
SPECIALTIES = tuple(sorted({name for table in _SPECIALTY for name in table}))
_TYPE = (
    {"1": 70, "2": 20, "3": 5, "6": 5},
    {"1": 50, "2": 20, "3": 25, "5": 5},
    {"1": 75, "2": 20, "8": 5},
    {"1": 60, "2": 30, "6": 10},
    {"1": 30, "3": 60, "2": 8, "7": 2},
    {"2": 35, "3": 35, "1": 20, "5": 10},
)
_SOURCE = {  # keyed by admission type
    "1": {"7": 90, "4": 6, "6": 4},
    "2": {"1": 50, "7": 35, "2": 10, "5": 5},
    "3": {"1": 85, "2": 10, "3": 5},
    "5": {"17": 70, "9": 20, "20": 10},
    "6": {"17": 80, "1": 20},
    "7": {"7": 90, "8": 5, "22": 5},
    "8": {"20": 60, "7": 40},
}
_DISCHARGE = (
    {"1": 92, "7": 5, "18": 3},
    {"1": 80, "6": 8, "7": 4, "2": 4, "18": 4},
    {"1": 60, "6": 18, "3": 12, "22": 4, "11": 2, "2": 2, "25": 2},
    {"3": 36, "1": 28, "6": 20, "11": 5, "13": 3, "14": 3, "23": 3, "5": 2},
)
_PAYER = ({"HM": 30, "BC": 25, "MD": 25, "SP": 10, "?": 10}, {"MC": 75, "?": 15, "HM": 6, "CP": 4})
TYPES = ("1", "2", "3", "4", "5", "6", "7", "8")
SOURCES = tuple(sorted({code for table in _SOURCE.values() for code in table}, key=int))
DISCHARGES = tuple(sorted({code for table in _DISCHARGE for code in table}, key=int))

_WEIGHT = {"?": 96, "[50-75)": 1, "[75-100)": 1.5, "[100-125)": 1, "[125-150)": 0.5}
_GLUCOSE = (
    {"None": 50, ">300": 25, ">200": 15, "Norm": 10},
    *({"None": 96, "Norm": 3, ">200": 1} for _ in _CHAPTERS[1:]),
)
_A1C = ({">8": 55, ">7": 10, "None": 35}, *({"None": 86, "Norm": 7, ">7": 4, ">8": 3} for _ in _CHAPTERS[1:]))
_STAY = np.array([3.0, 4.0, 5.0, 5.5, 4.5, 2.5])  # mean days by chapter
_PROCEDURES = np.array([0.3, 2.5, 0.8, 0.6, 2.0, 0.4])
_INSULIN = np.array([0.95, 0.40, 0.45, 0.75, 0.35, 0.30])
_ORAL = {
    "glimepiride": 0.06,
    "glipizide": 0.14,
    "glyburide": 0.12,
    "pioglitazone": 0.09,
    "rosiglitazone": 0.07,
}
_RARE = {"repaglinide": 0.015, "nateglinide": 0.007, "acarbose": 0.003, "glyburide-metformin": 0.007}


def private_columns(rng: np.random.Generator, visits: Visits) -> Columns:
    """All columns of the private cohort but those of ``visits``, as strings by column name."""
    ages = np.digitize(visits.years, _AGE_LIMITS)
    columns: Columns = {"diag_1": pick_by(rng, ages, _MAIN)}
    chapter = np.array([_CHAPTER_OF.get(code, _OTHER) for code in columns["diag_1"]])
    columns |= _admission(rng, ages, chapter)
    columns |= _tests(rng, chapter)
    columns |= _drugs(rng, ages, chapter, columns["A1Cresult"])
    stay = np.clip(1 + rng.poisson(_STAY[chapter] - 1 + (visits.years > 75)), 1, 14)
    columns |= _counts(rng, ages, chapter, stay)
    inpatient = rng.poisson(0.3 + 0.7 * visits.visit)
    columns["number_inpatient"] = inpatient.astype(str)
    columns["readmitted"] = _readmission(rng, inpatient, stay, visits.years)
    return columns


def _admission(rng: np.random.Generator, ages: np.ndarray, chapter: np.ndarray) -> Columns:
    kind = pick_by(rng, chapter, _TYPE)
    kinds = list(_SOURCE)
    return {
        "weight": pick(rng, len(ages), _WEIGHT),
        "admission_type_id": kind,
        "discharge_disposition_id": pick_by(rng, ages, _DISCHARGE),
        "admission_source_id": pick_by(rng, _index(kind, kinds), list(_SOURCE.values())),
        "payer_code": pick_by(rng, (ages >= 2).astype(int), _PAYER),
        "medical_specialty": pick_by(rng, chapter, _SPECIALTY),
        "diag_2": pick_by(rng, chapter, _SECOND),
        "diag_3": pick_by(rng, chapter, _SECOND),
    }


def _tests(rng: np.random.Generator, chapter: np.ndarray) -> Columns:
    return {"max_glu_serum": pick_by(rng, chapter, _GLUCOSE), "A1Cresult": pick_by(rng, chapter, _A1C)}


def _drugs(rng: np.random.Generator, ages: np.ndarray, chapter: np.ndarray, a1c: np.ndarray) -> Columns:
    """The doses of all drugs, and ``change`` and ``diabetesMed``, which follow from them exactly."""
    size, high = len(ages), a1c == ">8"
    columns: Columns = {name: np.full(size, "No", dtype=object) for name in DRUGS}

    def prescribe(name: str, chance: np.ndarray | float, share_up: np.ndarray | float = 0.05) -> None:
        taken, u = rng.random(size) < chance, rng.random(size)
        columns[name][taken] = "Steady"
        columns[name][taken & (u < share_up)] = "Up"
        columns[name][taken & (u > 0.96)] = "Down"

    prescribe("insulin", np.where(ages == 0, 0.97, _INSULIN[chapter]), np.where(high, 0.7, 0.1))
    # Patients with kidney disease get no metformin, those with heart disease no glitazones, the young only insulin.
    adult = ages > 0
    prescribe("metformin", np.where(chapter == _CHAPTERS.index("kidney"), 0.01, 0.35) * adult)
    for name, share in _ORAL.items():
        barred = name.endswith("glitazone") & (chapter == _CHAPTERS.index("heart"))
        prescribe(name, np.where(barred, 0.0, share) * adult, np.where(high, 0.3, 0.02))
    for name, share in _RARE.items():
        prescribe(name, share * adult)
    doses = np.stack([columns[name] for name in DRUGS])
    columns["change"] = np.where(((doses == "Up") | (doses == "Down")).any(axis=0), "Ch", "No").astype(object)
    columns["diabetesMed"] = np.where((doses != "No").any(axis=0), "Yes", "No").astype(object)
    return columns


def _counts(rng: np.random.Generator, ages: np.ndarray, chapter: np.ndarray, stay: np.ndarray) -> Columns:
    size = len(stay)
    counts = {
        "time_in_hospital": stay,
        "num_lab_procedures": np.clip(rng.normal(28 + 4 * stay, 8), 1, 130).astype(int),
        "num_procedures": np.clip(rng.poisson(_PROCEDURES[chapter]), 0, 6),
        "num_medications": np.clip(rng.normal(6 + 2 * stay, 3), 1, 80).astype(int),
        "number_outpatient": rng.poisson(0.3, size),
        "number_emergency": rng.poisson(np.where(ages == 0, 0.6, 0.15)),
        "number_diagnoses": np.clip(rng.normal(4 + 1.5 * ages, 1.2), 3, 9).round().astype(int),
    }
    return {name: values.astype(str) for name, values in counts.items()}


def _readmission(rng: np.random.Generator, inpatient: np.ndarray, stay: np.ndarray, years: np.ndarray) -> np.ndarray:
    score = 0.9 * inpatient + 0.10 * (stay - 4) + 0.02 * (years - 65) - 0.7
    again = rng.random(len(stay)) < 1 / (1 + np.exp(-score))
    soon = rng.random(len(stay)) < np.clip(0.1 + 0.15 * inpatient, 0, 0.8)
    return np.where(again, np.where(soon, "<30", ">30"), "NO").astype(object)


def _index(values: np.ndarray, keys: list[str]) -> np.ndarray:
    places = {key: place for place, key in enumerate(keys)}
    return np.array([places[value] for value in values])


# Shares of patients with 1, 2, ... 8 encounters, near the real table's.
_ENCOUNTERS = (0.765, 0.146, 0.047, 0.020, 0.010, 0.005, 0.003, 0.004)
_RACES = {"Caucasian": 75, "AfricanAmerican": 19, "?": 2, "Hispanic": 2, "Other": 1, "Asian": 1}
_GENDERS = {"Female": 54, "Male": 46}
_OLDEST = 99.9


@dataclass(frozen=True)
class Visits:
    """Columns with an entry for each encounter, by ascending encounter_id.

    ``visit`` counts a patient's encounters from 0. ``years`` is the age, which does not fall over a patient's
    encounters.
    """

    encounter_id: np.ndarray
    patient_nbr: np.ndarray
    visit: np.ndarray
    race: np.ndarray
    gender: np.ndarray
    years: np.ndarray


def pick(rng: np.random.Generator, size: int, weights: Mapping[str, float]) -> np.ndarray:
    """``size`` independent draws from the keys of ``weights``, in proportion to its values."""
    values = np.array(list(weights), dtype=object)
    shares = np.array(list(weights.values()), dtype=float)
    return values[rng.choice(len(values), size=size, p=shares / shares.sum())]


def pick_by(rng: np.random.Generator, group: np.ndarray, weights: Sequence[Mapping[str, float]]) -> np.ndarray:
    """Draw a key for each entry of ``group``, in proportion to the values of ``weights[group]``."""
    drawn = np.empty(len(group), dtype=object)
    for number, table in enumerate(weights):
        members = group == number
        drawn[members] = pick(rng, int(members.sum()), table)
    return drawn


def draw_visits(rng: np.random.Generator, encounters: int, *, flat: bool) -> Visits:
    """Draw patients until they have ``encounters``; ``flat`` makes race, gender and age uniform."""
    sizes = rng.choice(np.arange(1, 9), size=encounters, p=_ENCOUNTERS)
    patient = rng.permutation(np.repeat(np.arange(encounters), sizes)[:encounters])
    visit = pd.Series(patient).groupby(patient).cumcount().to_numpy()
    start = rng.uniform(0, 100, encounters) if flat else rng.beta(5, 2.4, encounters) * 100
    pace = rng.uniform(0, 1.5, encounters)  # years between a patient's encounters
    race = pick(rng, encounters, dict.fromkeys(_RACES, 1) if flat else _RACES)
    gender = pick(rng, encounters, dict.fromkeys(_GENDERS, 1) if flat else _GENDERS)
    return Visits(
        encounter_id=_distinct(rng, encounters),
        patient_nbr=rng.permutation(_distinct(rng, encounters))[patient],
        visit=visit,
        race=race[patient],
        gender=gender[patient],
        years=np.minimum(start[patient] + visit * pace[patient], _OLDEST),
    )


def _distinct(rng: np.random.Generator, size: int) -> np.ndarray:
    return 10_000 + np.cumsum(rng.integers(1, 2000, size))
