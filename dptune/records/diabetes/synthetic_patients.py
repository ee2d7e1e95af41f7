"""Draws the synthetic patients and their encounters, which both kinds of cohort share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

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
