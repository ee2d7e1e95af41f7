"""The synthetic cohort is true to the schema, and learnable exactly where it says so."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from corpus_helpers import write_source

from dptune.core.errors import ConfigError
from dptune.records.diabetes.synthetic_cohort import Kind, generate_cohort, synthetic_ids_mapping
from dptune.records.diabetes.table import COLUMNS, DRUGS, read_ids_mapping, read_table

KINDS: tuple[Kind, ...] = ("private", "public")
SIZE = 6000


@pytest.fixture(scope="module")
def cohorts() -> dict[str, pd.DataFrame]:
    return {kind: generate_cohort(SIZE, 11, kind=kind) for kind in KINDS}


def information(first: pd.Series, second: pd.Series) -> float:
    """Mutual information in bits, less what the same marginals show when shuffled (the estimator's bias)."""

    def bits(other: np.ndarray) -> float:
        joint = pd.crosstab(first.to_numpy(), other).to_numpy() / len(first)
        independent = joint.sum(1, keepdims=True) * joint.sum(0, keepdims=True)
        held = joint > 0
        return float((joint[held] * np.log2(joint[held] / independent[held])).sum())

    rng = np.random.default_rng(0)
    values = second.to_numpy(dtype=object)
    return bits(values) - float(np.mean([bits(rng.permutation(values)) for _ in range(4)]))


@pytest.mark.parametrize("kind", KINDS)
def test_every_value_is_one_that_the_reader_accepts(kind: Kind, cohorts: dict, tmp_path: Path) -> None:
    _, ids = write_source(tmp_path)
    table = tmp_path / "cohort.csv"
    cohorts[kind].to_csv(table, index=False)
    frame = read_table(table, ids).frame
    assert tuple(frame.columns) == COLUMNS
    assert (frame.to_numpy(dtype=object) == cohorts[kind].to_numpy(dtype=object)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_patients_come_back_as_themselves_and_no_younger(kind: Kind, cohorts: dict) -> None:
    frame = cohorts[kind]
    patients = frame.groupby("patient_nbr")
    assert patients["race"].nunique().max() == patients["gender"].nunique().max() == 1
    band = frame["age"].str.extract(r"\[(\d+)-")[0].astype(int)
    assert (band.groupby(frame["patient_nbr"]).diff().dropna() >= 0).all()
    assert frame["encounter_id"].astype(int).is_monotonic_increasing
    visits = patients.size()
    assert visits.max() <= 8
    assert (visits >= 4).sum() > 20  # the tail


LEARNABLE = [
    ("age", "diag_1"),
    ("diag_1", "diag_2"),
    ("diag_1", "insulin"),
    ("diag_1", "metformin"),
    ("A1Cresult", "insulin"),
    ("time_in_hospital", "num_medications"),
    ("time_in_hospital", "num_lab_procedures"),
    ("number_inpatient", "readmitted"),
    ("diag_1", "medical_specialty"),
]


@pytest.mark.parametrize(("first", "second"), LEARNABLE)
def test_private_columns_inform_on_each_other_and_public_ones_do_not(first: str, second: str, cohorts: dict) -> None:
    private, public = (information(cohorts[kind][first], cohorts[kind][second]) for kind in KINDS)
    assert private > 0.03
    assert abs(public) < 0.02


@pytest.mark.parametrize("stronger", ["number_inpatient", "time_in_hospital"])
def test_readmission_rises(stronger: str, cohorts: dict) -> None:
    frame = cohorts["private"]
    value, again = frame[stronger].astype(int), frame["readmitted"] != "NO"
    assert again[value > value.median()].mean() > again[value <= value.median()].mean() + 0.05


def test_two_columns_follow_from_the_drugs_exactly_in_private_alone(cohorts: dict) -> None:
    def agreement(frame: pd.DataFrame) -> tuple[float, float]:
        moved = frame[list(DRUGS)].isin(["Up", "Down"]).any(axis=1)
        taken = (frame[list(DRUGS)] != "No").any(axis=1)
        return ((frame["change"] == "Ch") == moved).mean(), ((frame["diabetesMed"] == "Yes") == taken).mean()

    assert agreement(cohorts["private"]) == (1.0, 1.0)
    assert max(agreement(cohorts["public"])) < 0.9


@pytest.mark.parametrize("column", ["age", "diag_1", "insulin", "discharge_disposition_id", "readmitted"])
def test_public_marginals_are_flatter(column: str, cohorts: dict) -> None:
    def entropy(kind: str) -> float:
        shares = cohorts[kind][column].value_counts(normalize=True).to_numpy()
        return float(-(shares * np.log2(shares)).sum())

    assert entropy("public") > entropy("private") + 0.05


@pytest.mark.parametrize("kind", KINDS)
def test_equal_seeds_give_equal_cohorts(kind: Kind) -> None:
    first, second, other = (generate_cohort(200, seed, kind=kind) for seed in (5, 5, 6))
    assert first.equals(second)
    assert not first.equals(other)


def test_the_two_kinds_share_no_randomness_for_one_seed() -> None:
    private, public = (generate_cohort(200, 5, kind=kind) for kind in KINDS)
    assert not set(private["encounter_id"]) >= set(public["encounter_id"])


def test_the_mapping_is_no_larger_than_the_columns_need(tmp_path: Path) -> None:
    path = tmp_path / "ids.csv"
    path.write_text(synthetic_ids_mapping())
    ids = read_ids_mapping(path)
    assert [len(codes) for codes in ids.values()] == [8, 15, 12]
    assert all("unknown" in codes.values() for codes in ids.values())


@pytest.mark.parametrize("encounters", [1, 2, 7])
def test_small_cohorts_have_their_size(encounters: int) -> None:
    assert [len(generate_cohort(encounters, 1, kind=kind)) for kind in KINDS] == [encounters] * 2


def test_no_encounters_or_an_unknown_kind_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"encounters: 0 is too few. Fix: "):
        generate_cohort(0, 1, kind="private")
    with pytest.raises(ConfigError, match="kind: 'secret' is unknown"):
        generate_cohort(1, 1, kind="secret")  # type: ignore[arg-type]


def test_100_000_encounters_take_seconds() -> None:
    start = time.process_time()
    generate_cohort(100_000, 1, kind="private")
    assert time.process_time() - start < 15  # of this process's own work, whatever else runs
