"""A cell made ready: its records are tokenised once for all cells that share them, and held by nobody's memory."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from tiny_pipeline import UNITS, nonprivate, static

from dptune.corpus.records import read_about, read_records, write_records
from dptune.errors import DataError
from dptune.privacy.entropy import OsEntropy
from dptune.training import token_file
from dptune.training.data import tokenize
from dptune.training.model import ModelSource, load_tokenizer
from dptune.training.token_file import MappedRows
from tasks.experiment.prepare import PreparedCell, _token_file, prepare, shared_inputs
from tasks.paths import EVAL, PUBLIC_VALIDATION, TOKENS, TRAIN


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many records were tokenised, batch by batch."""
    counts: list[int] = []
    real = token_file.encode

    def noted(texts: list[str], *rest: Any) -> Any:
        counts.append(len(texts))
        return real(texts, *rest)

    monkeypatch.setattr(token_file, "encode", noted)
    return counts


def prepared(cell: Any) -> PreparedCell:
    return prepare(cell, shared_inputs(cell, torch.device("cpu")), OsEntropy())


def test_the_records_of_a_cell_are_those_of_its_files(pipeline: Path) -> None:
    cell = static()
    found = prepared(cell)
    tokenizer = load_tokenizer(ModelSource(cell.model.source))
    files = ((found.spec.tokens, TRAIN), (found.evaluation, EVAL), (found.spec.public, PUBLIC_VALIDATION))
    for tokens, path in files:
        expected = tokenize(read_records(path).text.to_pylist(), tokenizer, cell.training.max_length)
        assert tokens is not None
        assert isinstance(tokens.rows, MappedRows)
        assert [row.tolist() for row in tokens.rows] == [row.tolist() for row in expected.rows]
        assert tokens.truncated == expected.truncated
    assert len(found.spec.units) == len(found.spec.tokens.rows) == UNITS
    assert found.about == read_records(TRAIN).about


@pytest.mark.parametrize("unit", ["record", "patient"])
def test_who_the_coin_left_out_counts_and_is_in_no_batch(pipeline: Path, unit: str) -> None:
    found = prepared(static({"data": {"unit": unit}}))
    absent = np.array([text == "" for text in read_records(TRAIN).text.to_pylist()])
    assert absent.any()
    drawn = np.concatenate(found.spec.units.draw(1.0, OsEntropy()))
    assert not absent[drawn].any()
    if unit == "record":
        assert sorted(drawn) == np.flatnonzero(~absent).tolist()


def test_cells_of_one_model_tokenise_once(pipeline: Path, encoded: list[int]) -> None:
    prepared(static())
    files = sorted(TOKENS.glob("*.arrow"))
    assert sum(encoded) == sum(len(read_records(path).record) for path in (TRAIN, EVAL, PUBLIC_VALIDATION))
    encoded.clear()
    prepared(nonprivate())
    assert not encoded
    prepared(static({"training": {"max_length": 48}}))
    assert encoded, "another length is another file"
    assert set(files) < set(TOKENS.glob("*.arrow"))


def test_the_files_are_their_owners(pipeline: Path) -> None:
    prepared(static())
    assert stat.S_IMODE(TOKENS.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in TOKENS.glob("*.arrow")} == {0o600}
    assert len(list(TOKENS.glob("*.arrow"))) == 3


def test_a_name_tests_no_guess_of_the_records(pipeline: Path) -> None:
    """The same records under another salt have another name: it takes the secret to work the name out."""
    before = _token_file(static(), TRAIN)
    records = read_records(TRAIN)
    write_records(TRAIN, replace(records, about={**records.about, "salt": "another"}))
    assert read_about(TRAIN)["salt"] == "another"
    assert _token_file(static(), TRAIN) != before


def test_the_texts_of_the_corpus_are_never_all_in_memory(pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only batches are turned into texts, and no whole file of records is read."""
    monkeypatch.setattr("dptune.corpus.records.pq.read_table", lambda *_: pytest.fail("a whole file was read"))
    assert len(prepared(static()).spec.tokens.rows) == UNITS


def test_a_torn_file_of_tokens_is_refused_and_the_fix_works(pipeline: Path) -> None:
    cell = static()
    prepared(cell)
    path = _token_file(cell, TRAIN)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"train-.*\.arrow: is torn.*Fix: remove it"):
        prepared(cell)
    path.unlink()
    assert len(prepared(cell).spec.tokens.rows) == UNITS
    assert pa.ipc.open_file(str(path)).num_record_batches == 1
