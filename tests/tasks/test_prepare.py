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
from tiny_pipeline import UNITS, cells, nonprivate, quick_pictures, static

from dptune.core.errors import DataError
from dptune.privacy.entropy import Entropy, OsEntropy
from dptune.privacy.ledger_file import read_ledger
from dptune.privacy.run_folder import RunFolder
from dptune.records.parquet_file import read_about, read_records, write_records
from dptune.training.data import tokenize
from dptune.training.models.model import ModelSource, load_tokenizer
from dptune.training.privacy_units import PrivacyUnits, Turn
from dptune.training.tokens.token_file import MappedRows, encode
from tasks.experiment.cells import Cell
from tasks.experiment.finetune import run_cells
from tasks.experiment.preparation import PreparedCell, prepare, shared_inputs, token_file
from tasks.paths import EVAL, PUBLIC_VALIDATION, TOKENS, TRAIN


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many records were tokenised, batch by batch."""
    counts: list[int] = []
    real = encode

    def noted(texts: list[str], *rest: Any) -> Any:
        counts.append(len(texts))
        return real(texts, *rest)

    monkeypatch.setattr("dptune.training.tokens.token_file.encode", noted)
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


def banded(*changes: dict[str, Any]) -> Cell:
    chosen = {"experiment": {"mechanisms": ["banded"]}, "mechanisms": {"banded": {"bands": 2}}}
    return cells(chosen, *changes)[0]


def groups(cell: Cell) -> dict[bytes, int]:
    """The group of every record, and of every slot of an auditor, in a run of one id."""
    spec, found = prepared(cell).spec, dict[bytes, int]()
    units = replace(spec.units, most=10**6).with_slots(np.ones(cell.crafted, dtype=bool))
    for row in range(2):
        for records in units.draw(1.0, OsEntropy(), Turn.of("a" * 32, 2, row)):
            rows = (b"slot %d" % -one if one < 0 else spec.tokens.rows[one].tobytes() for one in records.tolist())
            found.update((said, row) for said in rows)
    return found


@pytest.mark.parametrize("unit", ["record", "patient"])
def test_one_who_leaves_a_cells_records_moves_nobody_to_another_group(pipeline: Path, unit: str) -> None:
    """Nor a canary, nor an auditor's slot, all of which come after the records in the file."""
    cell = {"data": {"unit": unit}, "canaries": {"crafted": 16}, "training": {"max_length": 400}}
    whole, stored = groups(banded(cell)), read_records(TRAIN)
    assert set(whole.values()) == {0, 1}
    assert sum(said.startswith(b"slot") for said in whole) == 16
    for who in (0, 1, 70):
        own = {"record": stored.record, "patient": stored.unit}[unit]
        stays = np.flatnonzero(own != own[who])
        fewer = replace(
            stored, record=stored.record[stays], unit=stored.unit[stays], text=stored.text.take(pa.array(stays))
        )
        write_records(TRAIN, fewer)
        after = groups(banded(cell))
        assert after == {said: whole[said] for said in after}
        assert 0 < len(whole) - len(after) <= len(stored.record) - len(stays)


def test_cells_side_by_side_deal_by_their_own_ledgers(pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever cells run beside it, a cell's groups follow from its own run's id."""
    dealt_by, draw = set[str](), PrivacyUnits.draw

    def noted(units: PrivacyUnits, rate: float, entropy: Entropy, turn: Turn | None = None) -> Any:
        assert turn is not None
        dealt_by.add(turn.run_id)
        return draw(units, rate, entropy, turn)

    monkeypatch.setattr(PrivacyUnits, "draw", noted)
    quick_pictures(monkeypatch)
    chosen = {"experiment": {"mechanisms": ["banded"], "seeds": [0, 1]}, "mechanisms": {"banded": {"bands": 2}}}
    both = cells(chosen)
    run_cells(both, "cpu")
    ids = [read_ledger(RunFolder(cell.directory).ledger).header.run_id for cell in both]
    assert len(set(ids)) == 2
    assert dealt_by == set(ids)


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


def _tokens_of(cell: Cell) -> Path:
    """The file of the tokens of a cell's train records."""
    return token_file(TRAIN, cell.inputs, cell.training.max_length, cell.task)


def test_a_name_tests_no_guess_of_the_records(pipeline: Path) -> None:
    """The same records under another salt have another name: it takes the secret to work the name out."""
    before = _tokens_of(static())
    records = read_records(TRAIN)
    write_records(TRAIN, replace(records, about={**records.about, "salt": "another"}))
    assert read_about(TRAIN)["salt"] == "another"
    assert _tokens_of(static()) != before


def test_the_texts_of_the_corpus_are_never_all_in_memory(pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only batches are turned into texts, and no whole file of records is read."""
    monkeypatch.setattr("dptune.records.parquet_file.pq.read_table", lambda *_: pytest.fail("a whole file was read"))
    assert len(prepared(static()).spec.tokens.rows) == UNITS


def test_a_torn_file_of_tokens_is_refused_and_the_fix_works(pipeline: Path) -> None:
    cell = static()
    prepared(cell)
    path = _tokens_of(cell)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"train-.*\.arrow: is cut off.*Fix: remove it"):
        prepared(cell)
    path.unlink()
    assert len(prepared(cell).spec.tokens.rows) == UNITS
    assert pa.ipc.open_file(str(path)).num_record_batches == 1
