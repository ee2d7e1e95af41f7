"""Verbalises the diabetes table: one paragraph per encounter, one clause per attribute.

Two templates: ``plain`` is dptune's; ``published`` is RLDP's (arXiv 2507.22565, tables 1 and 6.1), word for word.
``public_texts`` makes narratives that depend on no record of anyone, for canaries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import pandas as pd
import pyarrow as pa

from dptune.core.errors import DataError
from dptune.core.files import read_json, sha256
from dptune.records.diabetes.sources import IDS_NAME, TABLE_NAME, acquire_synthetic
from dptune.records.diabetes.table import COLUMNS, DIAGNOSES, DRUGS, ID_COLUMNS, MISSING, UNKNOWN, Table, read_table
from dptune.records.parquet_file import Records, encode_content, write_records
from dptune.records.reading.formats import FORMATS
from dptune.records.reading.record import Labelled

NEVER_VERBALISED = ("encounter_id", "patient_nbr")
#: The column that may be a label in place of a clause: NO, >30 or <30 (days until the patient comes back).
LABEL = "readmitted"
_ACQUIRE = "acquire it again (`dvc repro -f acquire`), or restore the file"
_UNKNOWN_VALUES = (MISSING, "Unknown/Invalid")
_ORDER = ("primary", "secondary", "additional secondary")
_DOSE = {"No": "not prescribed", "Steady": "unchanged", "Up": "increased", "Down": "decreased"}


@dataclass(frozen=True)
class Wording:
    """The words of a template, where templates differ. Braces stand for what a field says.

    Attributes:
        opening: the first sentence.
        diagnosis: clause of a diagnosis code, by its order (primary, secondary, additional secondary).
        whole_codes: whether a diagnosis keeps the digits after its point, and else is its category.
        not_measured: what a laboratory value that was not measured (None in the table) reads.
        change: clauses of the column, by its values; likewise ``diabetes_med`` and ``readmitted``.
    """

    opening: str
    age: str
    stay: str
    visits: str
    diagnosis: str
    whole_codes: bool
    not_measured: str
    change: Mapping[str, str]
    diabetes_med: Mapping[str, str]
    readmitted: Mapping[str, str]


#: The words of each template. RLDP's paper prints one row whole and another in part, and so leaves open: one visit or
#: day, a dose that goes down, and patients without medication or readmission, or with one after more than 30 days.
WORDINGS = {
    "plain": Wording(
        opening="This is the record of a hospital encounter of a patient with diabetes.",
        age="The patient is between {} and {} years old.",
        stay="The patient is in hospital for {}.",
        visits="The patient had {} in the year preceding the encounter.",
        diagnosis="{} diagnosis code is {}.",
        whole_codes=False,
        not_measured="None",
        change={"Ch": "The medication is changed.", "No": "The medication is not changed."},
        diabetes_med={"Yes": "Diabetes medication is prescribed.", "No": "Diabetes medication is not prescribed."},
        readmitted={
            "<30": "The patient is readmitted in less than 30 days.",
            ">30": "The patient is readmitted after more than 30 days.",
            "NO": "The patient is not readmitted.",
        },
    ),
    "published": Wording(
        opening="The patient has the following profile.",
        age="the patient ages between {} and {} years old.",
        stay="the patient stayed in the hospital for {}.",
        visits="the patient had {} in the year preceding the encounter.",
        diagnosis="the {} diagnosis code (first three digits of ICD9) is {}.",
        whole_codes=True,
        not_measured=UNKNOWN,
        change={
            "Ch": "the patient\u2019s diabetic medications were changed.",
            "No": "the patient\u2019s diabetic medications were not changed.",
        },
        diabetes_med={
            "Yes": "the patient was prescribed diabetic medication.",
            "No": "the patient was not prescribed diabetic medication.",
        },
        readmitted={
            "<30": "the patient was readmitted in less than 30 days.",
            ">30": "the patient was readmitted after more than 30 days.",
            "NO": "the patient was not readmitted.",
        },
    ),
}
TEMPLATES = tuple(WORDINGS)
PLAIN = TEMPLATES[0]

Clause = Callable[[str], str]


def verbalise(table: Table, template: str = PLAIN, without: str | None = None) -> list[str]:
    """Write a paragraph for each row of ``table``, in its order.

    Clauses follow the column order. encounter_id and patient_nbr are left out, a missing value is "unknown", ids become
    their descriptions, and a diagnosis its category: the digits before the point. RLDP's template keeps the whole code.

    Args:
        template: one of ``TEMPLATES``.
        without: a column that gets no clause.
    """
    clauses = clause_makers(table.ids, template)
    columns = [_clauses_of(table.frame[name], clauses[name]) for name in clauses if name != without]
    return [" ".join((WORDINGS[template].opening, *row)) for row in zip(*columns, strict=True)]


def clause_makers(ids: Mapping[str, Mapping[str, str]], template: str = PLAIN) -> dict[str, Clause]:
    """Column name -> function from a field's value to its clause, in column order."""
    words = WORDINGS[template]
    makers: dict[str, Clause] = {name: partial(_plain, name.replace("_", " ")) for name in COLUMNS}
    makers["age"] = partial(_age, words)
    makers["time_in_hospital"] = partial(_stay, words)
    makers |= {name: partial(_describe_code, name.replace("_", " "), ids[name]) for name in ID_COLUMNS}
    makers |= {f"number_{kind}": partial(_visits, words, kind) for kind in ("outpatient", "emergency", "inpatient")}
    makers |= {name: partial(_diagnosis, words, order) for name, order in zip(DIAGNOSES, _ORDER, strict=True)}
    makers |= {name: partial(_measured, words, name.replace("_", " ")) for name in ("max_glu_serum", "A1Cresult")}
    makers |= {drug: partial(_drug, drug) for drug in DRUGS}
    closing = {"change": words.change, "diabetesMed": words.diabetes_med, "readmitted": words.readmitted}
    makers |= {name: wording.__getitem__ for name, wording in closing.items()}
    return {name: maker for name, maker in makers.items() if name not in NEVER_VERBALISED}


def write_narratives(
    table_csv: Path, ids_mapping: Path, source_json: Path, out: Path, template: str = PLAIN, label: str | None = None
) -> None:
    """Verbalise ``table_csv`` into the Parquet file ``out`` with columns record, unit, text.

    With a ``label`` (``LABEL``) its value is each text's label, and no text says it.

    ``record`` is encounter_id and ``unit`` is patient_nbr. Nobody else's presence changes these numbers, nor the sides,
    clients and shards that are computed from them. Source, synthetic and label go from ``source_json`` into the
    schema's metadata, and so does a template that is not the plain one.

    Raises: DataError for a bad table (see ``read_table``) or a bad ``source_json``.
    """
    about = read_source(source_json)
    check_files(source_json, {TABLE_NAME: table_csv, IDS_NAME: ids_mapping})
    table = read_table(table_csv, ids_mapping)
    check_rows(source_json, table_csv, len(table.frame))
    record, patient = (table.frame[name].to_numpy().astype(np.int64) for name in NEVER_VERBALISED)
    about |= {"template": template} if template != PLAIN else {}
    texts = verbalise(table, template, without=label)
    if label is not None:
        about |= {"form": "label"}
        labels = table.frame[label]
        texts = [encode_content(Labelled(*pair)) for pair in zip(texts, labels, strict=True)]
    write_records(out, Records(record, patient, pa.array(texts, pa.string()), about))


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


def _measured(words: Wording, column: str, value: str) -> str:
    return _plain(column, words.not_measured if value == "None" else value)


def _age(words: Wording, band: str) -> str:
    return words.age.format(*band.strip("[)").split("-"))


def _stay(words: Wording, days: str) -> str:
    return words.stay.format(f"{days} day{'' if days == '1' else 's'}")


def _visits(words: Wording, kind: str, count: str) -> str:
    number = "no" if count == "0" else count
    return words.visits.format(f"{number} {kind} visit{'' if count == '1' else 's'}")


def _diagnosis(words: Wording, order: str, code: str) -> str:
    return words.diagnosis.format(order, _or_unknown(code if words.whole_codes else code.partition(".")[0]))


def _drug(drug: str, dose: str) -> str:
    return f"{drug} is {_DOSE[dose]}."


# Public texts that carry secrets: synthetic narratives, which depend on no record of anyone.
#
# A secret in a record of the data would make that canary depend on the record, and the choice of records on their
# number. With public carriers no canary depends on private data, so what an attack on canaries finds is a function of
# the released model, of public text and of the auditor's own secrets.

#: What texts are for. Each purpose has seeds of its own, and none has the seed of the pre-training texts.
Purpose = Literal["canaries", "contexts", "words"]
_SENTENCES = 3  # length of a carrier beside records of one's own, which may be far shorter than narratives


def public_texts(count: int, seed: int, purpose: Purpose, source: str, template: str = PLAIN) -> list[str]:
    """``count`` public narratives; equal for equal arguments.

    Args:
        seed: public.
        source: name of the source of the train records. Beside narratives of the diabetes table the texts are whole.
            Beside a user's own files they are short, because ``training.max_length`` cuts a text's end, where the
            secret is.
        template: wording of the narratives, one of ``TEMPLATES``.
    """
    if count == 0:
        return []
    own_seed = int.from_bytes(blake2b(f"{purpose} {seed}".encode(), digest_size=8).digest(), "little")
    with TemporaryDirectory(prefix="dptune-") as folder:
        made = acquire_synthetic(Path(folder), count, own_seed, kind="public")
        whole = verbalise(read_table(made.table, made.ids_mapping), template)
    return [_first_sentences(text) for text in whole] if source in FORMATS else whole


def _first_sentences(text: str) -> str:
    return ". ".join(text.split(". ")[:_SENTENCES]).removesuffix(".") + "."
