"""Narratives say what spec rldp.md, section 2, says, and nothing else."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pandas as pd
import pytest
from corpus_helpers import needs_uci, uci_path, write_source

from dptune.core.errors import DataError
from dptune.core.files import sha256
from dptune.records.diabetes.narratives import LABEL, TEMPLATES, WORDINGS, verbalise, write_narratives
from dptune.records.diabetes.sources import acquire_synthetic, acquire_uci
from dptune.records.diabetes.table import COLUMNS, DRUGS, Table, read_ids_mapping, read_table
from dptune.records.parquet_file import decode_content, form_at, read_records
from dptune.records.splits import write_splits

IDS = {
    "admission_type_id": {"1": "Emergency", "6": "unknown"},
    "discharge_disposition_id": {"1": "Discharged to home", "25": "unknown"},
    "admission_source_id": {"7": "Emergency Room", "17": "unknown"},
}
FULL = {
    "encounter_id": "987654321",
    "patient_nbr": "123456789",
    "race": "Caucasian",
    "gender": "Female",
    "age": "[70-80)",
    "weight": "[75-100)",
    "admission_type_id": "1",
    "discharge_disposition_id": "1",
    "admission_source_id": "7",
    "time_in_hospital": "11",
    "payer_code": "MC",
    "medical_specialty": "Cardiology",
    "num_lab_procedures": "41",
    "num_procedures": "2",
    "num_medications": "13",
    "number_outpatient": "0",
    "number_emergency": "1",
    "number_inpatient": "3",
    "diag_1": "250.83",
    "diag_2": "V45",
    "diag_3": "E888",
    "number_diagnoses": "9",
    "max_glu_serum": ">200",
    "A1Cresult": "Norm",
    **dict.fromkeys(DRUGS, "No"),
    "metformin": "Steady",
    "insulin": "Up",
    "glyburide-metformin": "Down",
    "change": "Ch",
    "diabetesMed": "Yes",
    "readmitted": "<30",
}
FULL_TEXT = (
    "This is the record of a hospital encounter of a patient with diabetes. "
    "race is Caucasian. gender is Female. The patient is between 70 and 80 years old. weight is [75-100). "
    "admission type id is Emergency. discharge disposition id is Discharged to home. "
    "admission source id is Emergency Room. The patient is in hospital for 11 days. payer code is MC. "
    "medical specialty is Cardiology. num lab procedures is 41. num procedures is 2. num medications is 13. "
    "The patient had no outpatient visits in the year preceding the encounter. "
    "The patient had 1 emergency visit in the year preceding the encounter. "
    "The patient had 3 inpatient visits in the year preceding the encounter. "
    "primary diagnosis code is 250. secondary diagnosis code is V45. "
    "additional secondary diagnosis code is E888. number diagnoses is 9. max glu serum is >200. "
    "A1Cresult is Norm. metformin is unchanged. repaglinide is not prescribed. nateglinide is not prescribed. "
    "chlorpropamide is not prescribed. glimepiride is not prescribed. acetohexamide is not prescribed. "
    "glipizide is not prescribed. glyburide is not prescribed. tolbutamide is not prescribed. "
    "pioglitazone is not prescribed. rosiglitazone is not prescribed. acarbose is not prescribed. "
    "miglitol is not prescribed. troglitazone is not prescribed. tolazamide is not prescribed. "
    "examide is not prescribed. citoglipton is not prescribed. insulin is increased. "
    "glyburide-metformin is decreased. glipizide-metformin is not prescribed. "
    "glimepiride-pioglitazone is not prescribed. metformin-rosiglitazone is not prescribed. "
    "metformin-pioglitazone is not prescribed. The medication is changed. "
    "Diabetes medication is prescribed. The patient is readmitted in less than 30 days."
)
SPARSE = FULL | {
    "race": "?",
    "gender": "Unknown/Invalid",
    "age": "[0-10)",
    "weight": "?",
    "admission_type_id": "6",
    "discharge_disposition_id": "25",
    "admission_source_id": "17",
    "time_in_hospital": "1",
    "payer_code": "?",
    "medical_specialty": "?",
    "diag_1": "8",
    "diag_2": "?",
    "diag_3": "?",
    "max_glu_serum": "None",
    "change": "No",
    "diabetesMed": "No",
    "readmitted": ">30",
}
SPARSE_CLAUSES = (
    "race is unknown. gender is unknown. The patient is between 0 and 10 years old. weight is unknown. "
    "admission type id is unknown. discharge disposition id is unknown. admission source id is unknown. "
    "The patient is in hospital for 1 day. payer code is unknown. medical specialty is unknown. ",
    "primary diagnosis code is 8. secondary diagnosis code is unknown. "
    "additional secondary diagnosis code is unknown. ",
    "max glu serum is None. ",
    "The medication is not changed. Diabetes medication is not prescribed. "
    "The patient is readmitted after more than 30 days.",
)


def texts(*rows: dict[str, str]) -> list[str]:
    return verbalise(Table(pd.DataFrame(rows, columns=list(COLUMNS)), IDS))


def test_a_full_row() -> None:
    assert texts(FULL) == [FULL_TEXT]


def test_a_row_of_missing_values() -> None:
    (text,) = texts(SPARSE)
    for clauses in SPARSE_CLAUSES:
        assert clauses in text
    assert texts(SPARSE | {"readmitted": "NO"})[0].endswith("The patient is not readmitted.")


def test_rows_keep_their_order() -> None:
    assert texts(SPARSE, FULL, SPARSE) == [*texts(SPARSE), FULL_TEXT, *texts(SPARSE)]


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path, Path]:
    table, ids = write_source(tmp_path, encounters=400)
    source = tmp_path / "source.json"
    hashes = {"diabetic_data.csv": sha256(table), "IDs_mapping.csv": sha256(ids)}
    about = {"source": "synthetic", "synthetic": True, "label": "made", "seed": 3, "rows": 400, "sha256": hashes}
    source.write_text(json.dumps(about))
    return table, ids, source


def test_every_word_is_a_fields_value_or_the_templates(files: tuple[Path, Path, Path]) -> None:
    table = read_table(files[0], files[1])
    template = {word for text in (FULL_TEXT, *SPARSE_CLAUSES) for word in text.split()}
    values = {value for name in table.frame for value in table.frame[name].str.replace(r"\..*", "", regex=True)}
    described = " ".join(text for codes in table.ids.values() for text in codes.values()).split()
    bands = {str(low) for low in range(0, 110, 10)}
    doses = {"unchanged", "increased", "decreased", "prescribed", "visits", "visit", "days", "day", "no"}
    allowed = {word.strip(".") for word in template | set(described) | values} | bands | doses
    for row, text in zip(table.frame.to_dict("records"), verbalise(table), strict=True):
        words = [word.rstrip(".") for word in text.split()]
        assert set(words) <= allowed
        assert row["encounter_id"] not in words
        assert row["patient_nbr"] not in words
        assert text.count(". ") + 1 == 1 + 48  # the opening, and one clause per told column


def test_the_file_has_the_tables_own_numbers_and_says_what_it_is(
    files: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    out = tmp_path / "narratives.parquet"
    write_narratives(*files, out)
    read = read_records(out)
    table = read_table(files[0], files[1])
    assert read.text.to_pylist() == verbalise(table)
    assert [str(number) for number in read.record] == table.frame["encounter_id"].tolist()
    assert [str(number) for number in read.unit] == table.frame["patient_nbr"].tolist()
    assert read.about == {"source": "synthetic", "synthetic": True, "label": "made"}
    assert out.stat().st_mode & 0o777 == 0o600


def test_a_table_cut_at_a_line_end_is_refused(files: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """It parses: only its hash and number of rows tell."""
    lines = files[0].read_bytes().splitlines(keepends=True)
    files[0].write_bytes(b"".join(lines[:-40]))
    with pytest.raises(DataError, match=r"is not the file that source\.json describes: its SHA-256"):
        write_narratives(*files, tmp_path / "narratives.parquet")
    about = json.loads(files[2].read_text())
    about["sha256"]["diabetic_data.csv"] = sha256(files[0])
    files[2].write_text(json.dumps(about))
    with pytest.raises(DataError, match=r"has 360 rows, and source\.json says 400"):
        write_narratives(*files, tmp_path / "narratives.parquet")
    assert not (tmp_path / "narratives.parquet").exists()


def test_a_bad_source_leaves_no_narratives(files: tuple[Path, Path, Path], tmp_path: Path) -> None:
    files[2].write_text("[]")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(DataError, match=r"source\.json: .* Fix: acquire"):
        write_narratives(*files, tmp_path / "narratives.parquet")
    assert sorted(tmp_path.iterdir()) == before


def test_other_files_are_no_narratives(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("x")
    for name in ("x", "absent"):
        with pytest.raises(DataError, match="not a file of records"):
            read_records(tmp_path / name)


class TestUci:
    pytestmark = needs_uci

    def test_the_real_table_end_to_end(self, tmp_path: Path) -> None:
        files = acquire_uci(tmp_path, uci_path())
        start = time.process_time()
        out = tmp_path / "narratives.parquet"
        write_narratives(files.table, files.ids_mapping, files.manifest, out)
        assert time.process_time() - start < 15  # of this process's own work, whatever else runs
        read = read_records(out)
        assert len(read.record) == 101_766
        assert len(set(read.unit.tolist())) == 71_518
        told = re.compile(r"\?|NULL|Not Mapped|Not Available|Invalid|\.\.")
        assert not any(told.search(text) for text in read.text.to_pylist())
        write_splits(out, tmp_path, seed=1, unit="record")
        sizes = [len(read_records(tmp_path / f"{side}.parquet").record) for side in ("attack", "eval", "train")]
        assert sizes == [20_497, 8_258, 73_011]  # each encounter by its own number; of the paper's deal, 73,271 trained

    def test_the_real_mapping_has_all_codes(self, tmp_path: Path) -> None:
        ids = read_ids_mapping(acquire_uci(tmp_path, uci_path()).ids_mapping)
        assert [len(codes) for codes in ids.values()] == [8, 30, 25]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_label_is_that_of_its_own_row_and_the_text_lacks_its_clause_alone(template: str, tmp_path: Path) -> None:
    """Labels in another order would be as private, and nothing could be learned from them."""
    made = acquire_synthetic(tmp_path / "raw", 60, 7)
    files, out = (made.table, made.ids_mapping, made.manifest), tmp_path / "narratives.parquet"
    write_narratives(*files, out, template)
    whole = read_records(out)
    write_narratives(*files, out, template, LABEL)
    found = read_records(out)
    rows = pd.read_csv(made.table, dtype=str, keep_default_na=False)
    assert found.record.tolist() == whole.record.tolist() == rows["encounter_id"].astype(int).tolist()
    contents = [decode_content(text, form_at(found.about)) for text in found.text.to_pylist()]
    assert [one.label for one in contents] == rows[LABEL].tolist()
    clauses = WORDINGS[template].readmitted
    assert [f"{one.text} {clauses[one.label]}" for one in contents] == whole.text.to_pylist()
