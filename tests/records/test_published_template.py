"""RLDP's narrative, clause by clause: a scalar transcription of its tables 1 and 6.1 (spec rldp.md, section 5.8)."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from corpus_helpers import needs_uci, uci_path, write_source
from test_narratives import FULL, IDS, SPARSE

from dptune.core.errors import ConfigError
from dptune.records.diabetes.narratives import public_texts, verbalise, write_narratives
from dptune.records.diabetes.sources import acquire_synthetic, copy_pair
from dptune.records.diabetes.table import COLUMNS, Table, read_table
from dptune.records.parquet_file import read_records
from tasks.settings.params import load_settings

#: SHA-256 of table 6.1's narrative, and of its first 47 clauses: the texts themselves are not ours to copy.
PRINTED = "914ba72ed211e9c4c0041b17daa6c09cc45ad1f8a00e201faca5999b5a60f943"
PRINTED_47 = "5ce18368d240e229f8275f1cd2a2807a0a3bc26f7f6845b2e1911a352e5cc88a"
OPENING = "The patient has the following profile. "
DRUGS = (
    "metformin repaglinide nateglinide chlorpropamide glimepiride acetohexamide glipizide glyburide tolbutamide "
    "pioglitazone rosiglitazone acarbose miglitol troglitazone tolazamide examide citoglipton insulin "
    "glyburide-metformin glipizide-metformin glimepiride-pioglitazone metformin-rosiglitazone metformin-pioglitazone"
)


def transcribed(row: Mapping[str, str], ids: Mapping[str, Mapping[str, str]]) -> str:
    """The narrative of a row, written from the specification and not from the code."""

    def known(name: str) -> str:
        return "unknown" if row[name] in ("?", "Unknown/Invalid") else row[name]

    clauses = [f"race is {known('race')}.", f"gender is {known('gender')}."]
    low = int(row["age"][1:].split("-")[0])
    clauses.append(f"the patient ages between {low} and {low + 10} years old.")
    clauses.append(f"weight is {known('weight')}.")
    for name in ("admission_type_id", "discharge_disposition_id", "admission_source_id"):
        clauses.append(f"{' '.join(name.split('_'))} is {ids[name][row[name]]}.")
    days = int(row["time_in_hospital"])
    clauses.append(f"the patient stayed in the hospital for {days} {'day' if days == 1 else 'days'}.")
    clauses.append(f"payer code is {known('payer_code')}.")
    clauses.append(f"medical specialty is {known('medical_specialty')}.")
    clauses.append(f"num lab procedures is {row['num_lab_procedures']}.")
    clauses.append(f"num procedures is {row['num_procedures']}.")
    clauses.append(f"num medications is {row['num_medications']}.")
    for kind in ("outpatient", "emergency", "inpatient"):
        count = int(row[f"number_{kind}"])
        visits = f"no {kind} visits" if count == 0 else f"1 {kind} visit" if count == 1 else f"{count} {kind} visits"
        clauses.append(f"the patient had {visits} in the year preceding the encounter.")
    for name, order in (("diag_1", "primary"), ("diag_2", "secondary"), ("diag_3", "additional secondary")):
        clauses.append(f"the {order} diagnosis code (first three digits of ICD9) is {known(name)}.")
    clauses.append(f"number diagnoses is {row['number_diagnoses']}.")
    for name, said in (("max_glu_serum", "max glu serum"), ("A1Cresult", "A1Cresult")):
        clauses.append(f"{said} is {'unknown' if row[name] == 'None' else row[name]}.")
    for drug in DRUGS.split():
        dose = {"No": "not prescribed", "Steady": "unchanged", "Up": "increased", "Down": "decreased"}[row[drug]]
        clauses.append(f"{drug} is {dose}.")
    changed = "were changed" if row["change"] == "Ch" else "were not changed"
    clauses.append(f"the patient\N{RIGHT SINGLE QUOTATION MARK}s diabetic medications {changed}.")
    prescribed = "was prescribed" if row["diabetesMed"] == "Yes" else "was not prescribed"
    clauses.append(f"the patient {prescribed} diabetic medication.")
    when = {
        "<30": "readmitted in less than 30 days",
        ">30": "readmitted after more than 30 days",
        "NO": "not readmitted",
    }
    clauses.append(f"the patient was {when[row['readmitted']]}.")
    assert len(clauses) == 48
    return OPENING + " ".join(clauses)


def test_generated_rows_and_rows_of_every_kind_read_as_transcribed(tmp_path: Path) -> None:
    import pandas as pd

    table = read_table(*write_source(tmp_path, 400))
    made = Table(pd.DataFrame([FULL, SPARSE, SPARSE | {"readmitted": "NO"}], columns=list(COLUMNS)), IDS)
    for one in (table, made):
        rows = one.frame.to_dict("records")
        assert verbalise(one, "published") == [transcribed(row, one.ids) for row in rows]
    assert {row["readmitted"] for row in table.frame.to_dict("records")} == {"NO", "<30", ">30"}


def test_the_file_says_its_template_and_the_plain_one_nothing(tmp_path: Path) -> None:
    made = acquire_synthetic(tmp_path, 60, 3)
    for template, said in (("published", "published"), ("plain", None)):
        out = tmp_path / f"{template}.parquet"
        write_narratives(made.table, made.ids_mapping, made.manifest, out, template)
        read = read_records(out)
        assert read.about.get("template") == said
        assert all(text.startswith(OPENING) == (said is not None) for text in read.text.to_pylist())
    assert all(text.startswith(OPENING) for text in public_texts(3, 1, "contexts", "uci", "published"))


def test_other_sources_have_no_template(tmp_path: Path) -> None:
    (tmp_path / "letters.txt").write_text("one letter.\n\nanother letter.\n")
    over = {"data": {"source": "text", "path": str(tmp_path / "letters.txt"), "template": "published"}}
    with pytest.raises(ConfigError, match=r"data: .*source text makes no narratives.*use synthetic or uci"):
        load_settings(Path(__file__).parents[2] / "params.yaml", over)


@pytest.mark.uci
@needs_uci[1]
def test_one_row_of_the_real_table_reads_as_table_6_1_does_but_for_its_last_clause() -> None:
    """That row was not readmitted, and the paper says within 30 days: by its own template both cannot be."""
    with TemporaryDirectory() as folder:
        files = Path(folder, "table.csv"), Path(folder, "ids.csv")
        copy_pair(uci_path(), *files)
        table = read_table(*files)
    texts = (text.removeprefix(OPENING) for text in verbalise(table, "published"))
    heads = [text.rpartition(" the patient was ")[0] for text in texts]
    (place,) = [place for place, head in enumerate(heads) if sha256(head.encode()).hexdigest() == PRINTED_47]
    assert table.frame["readmitted"][place] == "NO"
    ended = f"{heads[place]} the patient was readmitted in less than 30 days."
    assert sha256(ended.encode()).hexdigest() == PRINTED
