"""Records of one's own go through the pipeline: tables with a column of units, prompts, chats."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_pipeline import merge, nonprivate, read_json, run_stages, static, write_params

from dptune.corpus.records import read_records
from dptune.errors import ConfigError, DataError
from dptune.privacy.ledger_file import read_ledger
from dptune.training.token_file import open_corpus
from tasks.corpus.acquire import acquire
from tasks.corpus.verbalize import verbalize
from tasks.experiment.finetune import run_cell
from tasks.paths import SPLITS, TOKENS, TRAIN
from tasks.settings.params import load_settings

NO_ATTACKS: dict[str, Any] = {
    "canaries": {"extraction": 0, "audit": 0},
    "audit": {"records": 0, "shadows": 0},
    "training": {"max_length": 32},
}
PAIRS = [{"prompt": f"Question {n}: who?", "completion": f" It was guest {n}."} for n in range(240)]
CHATS = [
    {"messages": [{"role": "user", "content": f"Hello {n}"}, {"role": "assistant", "content": "Hi"}]} for n in range(20)
]


def table(path: Path, customers: int = 80, each: int = 3) -> dict[str, Any]:
    """A CSV of visits, three of each customer, and the settings that read it."""
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["customer_id", "city", "bought"])
        rows.writerows([f"c{n % customers}", f"city {n % 7}", f"{n} pears"] for n in range(customers * each))
    own = {"source": "table", "path": str(path), "unit": "customer_id", "options": {"template": "In {city}: {bought}."}}
    return {"data": own, "training": {"records_per_unit": 2, "max_length": 32}}


def jsonl(path: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {"data": {"source": "jsonl", "path": str(path), "unit": "record"}}


def test_a_customer_is_the_unit_end_to_end(pipeline: Path) -> None:
    changes = table(pipeline / "visits.csv")
    run_stages(changes, pretrained=False)
    customers = [set(read_records(SPLITS / f"{side}.parquet").unit.tolist()) for side in ("attack", "train", "eval")]
    assert sum(map(len, customers)) == len(set.union(*customers)) == 80
    cell = static(changes)
    run_cell(cell, "cpu")
    result, header = read_json(cell.directory / "result.json"), read_ledger(cell.directory / "ledger.jsonl").header
    units = len(set(read_records(TRAIN).unit.tolist()))
    assert units == len(customers[1]) + 24, "each canary is a unit of its own"
    assert (result["unit"], result["units"], header.unit, header.units) == ("customer_id", units, "customer_id", units)


def test_prompts_have_no_loss_end_to_end(pipeline: Path) -> None:
    changes = merge(jsonl(pipeline / "answers.jsonl", PAIRS), NO_ATTACKS)
    run_stages(changes, pretrained=False)
    cell = nonprivate(changes)
    run_cell(cell, "cpu")
    trained = read_records(TRAIN)
    assert trained.about["form"] == "pair"
    (file,) = TOKENS.glob("train-*.arrow")
    rows = open_corpus(file).tokens.rows
    assert len(rows) == len(trained.record) == read_json(cell.directory / "result.json")["units"]
    assert all((row < 0).any() and (row >= 0).any() for row in rows), "prompts are read, completions learned"
    with pytest.raises(
        DataError, match=r"private prediction needs records of text, and these are prompts with targets"
    ):
        trained.texts("private prediction")


@pytest.mark.parametrize(("rows", "what"), [(PAIRS, "prompts with targets"), (CHATS, "chats")])
def test_attacks_on_text_are_refused_for_other_records(empty: Path, rows: list[dict[str, Any]], what: str) -> None:
    changes = jsonl(empty / "own.jsonl", rows)
    write_params(changes)
    with pytest.raises(ConfigError, match=rf"{what} are no texts.* Fix: set canaries.extraction: 0, canaries.audit: 0"):
        load_settings()
    write_params(changes, NO_ATTACKS)
    assert load_settings().data.form in ("pair", "messages")
    acquire()
    verbalize()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"path": "nowhere.csv"}, r"there is no such file"),
        ({"unit": "client_id"}, r"row 1, column 'client_id': there is no such column"),
        ({"unit": "client"}, r"'client' is another kind of unit"),
        ({"options": {"template": "{town}"}}, r"column 'town': there is no such column"),
        ({"options": {"colour": "red"}}, r"data\.options: 'colour' is no option of source table"),
        ({"options": {"text": 3}}, r"data\.options: text is no text"),
        ({"path": None}, r"data\.path: source table needs the path of a file"),
    ],
)
def test_what_cannot_be_read_is_told_before_anything_runs(empty: Path, change: dict[str, Any], problem: str) -> None:
    changes = table(empty / "visits.csv")
    changes["data"] |= change
    write_params(changes)
    with pytest.raises(ConfigError, match=problem):
        load_settings()


def test_a_table_of_few_records_leaves_nothing_behind(empty: Path) -> None:
    write_params(table(empty / "visits.csv", customers=3, each=3))
    with pytest.raises(DataError, match="has 9 records, of 10 at least"):
        acquire()
    assert not [*Path("data").rglob("records.parquet"), *Path("data").rglob("source.json")]


def test_a_customers_side_is_theirs_alone(empty: Path) -> None:
    """Whoever leaves the table moves nobody else."""
    dealt = []
    for customers in (80, 60):
        run_stages(
            merge(table(empty / "visits.csv", customers), {"canaries": {"extraction": 0, "audit": 0}}), pretrained=False
        )
        sides = {side: read_records(SPLITS / f"{side}.parquet").unit for side in ("attack", "train", "eval")}
        dealt.append({int(unit): side for side, units in sides.items() for unit in np.unique(units)})
    assert dealt[1].items() <= dealt[0].items()
