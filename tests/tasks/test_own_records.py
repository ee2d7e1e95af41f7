"""Records of one's own go through the pipeline: tables with a column of units, prompts, chats."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import tiny_ensemble
import tiny_tuning
import torch
from tiny_pipeline import merge, nonprivate, read_json, run_stages, static, write_params

from dptune.core.errors import ConfigError, DataError
from dptune.core.files import write_text
from dptune.prediction.deployment import deploy
from dptune.privacy.ledger_file import read_ledger
from dptune.records.diabetes.narratives import public_texts
from dptune.records.parquet_file import read_records
from dptune.training.evaluation import perplexity
from dptune.training.models.model import load_base, load_tokenizer
from dptune.training.models.pretrain import Pretraining, pretrain
from dptune.training.tokens.token_file import open_corpus
from tasks.audit.attacks import audit_cell
from tasks.corpus.acquire import acquire
from tasks.experiment.checks import check_models
from tasks.experiment.finetune import run_cell
from tasks.paths import EVAL, SPLITS, TOKENS, TRAIN
from tasks.prediction.answers import score
from tasks.prediction.ensembles import close_plan, open_plan, plans, served_protocol, tokens_of, tune
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
    with pytest.raises(DataError, match=r"policies needs records of text, and these are prompts with targets"):
        trained.texts("policies")


@lru_cache(maxsize=1)
def checkpoint() -> str:
    """The folder of a model whose context holds a canary, and whose tokenizer knows chats."""
    folder = Path(mkdtemp(prefix="dptune own model ")) / "tiny"
    texts = public_texts(40, 0, "contexts", "text")
    shape = Pretraining(vocabulary=500, layers=1, width=16, heads=1, max_length=128, epochs=1, batch_size=8)
    pretrain(texts, texts[:4], shape, folder)
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": tiny_tuning.CHAT}))
    return str(folder)


def on_own_model(rows: list[dict[str, Any]], **training: Any) -> dict[str, Any]:
    models = {"small": {"source": checkpoint()}}  # the name of the pipeline's own, which is replaced
    return merge(
        jsonl(Path("own.jsonl"), rows), {"experiment": {"models": models}, "training": {"max_length": 128, **training}}
    )


@pytest.mark.parametrize("rows", [PAIRS, CHATS * 12])
def test_every_attack_is_made_on_prompts_and_chats(pipeline: Path, rows: list[dict[str, Any]]) -> None:
    changes = on_own_model(rows, epochs=0.2)
    run_stages(changes, pretrained=False)
    check_models(load_settings())
    cell = static(changes)
    write_text(cell.directory / "cell.json", cell.model_dump_json())
    run_cell(cell, "cpu")
    few = {"generations": 20, "candidates": 3, "records": 6, "shadows": 4, "step_trials": 0}
    audit = audit_cell(cell.directory, load_settings().audit.model_copy(update=few), "cpu")
    assert audit["one_run"]["canaries"] == 20
    assert {"calibrated", "error_zone", "alignment", "shadows"} <= set(audit["canaries"])
    assert audit["extraction"]["generated"] == 20
    assert audit["exposure"]["possible"] == 2
    assert audit["membership"]["likelihood"]["members"] == 6
    assert audit["violations"] == []


@pytest.mark.parametrize("rows", [PAIRS, CHATS * 12])
def test_answers_come_from_ensembles_on_prompts_and_chats(pipeline: Path, rows: list[dict[str, Any]]) -> None:
    few = {"models": [2], "records": 3, "tokens": [8], "epsilons": [8], "serve": {"models": 2, "tokens": 8}}
    quick = {"tuning": {"epochs": 1, "batch_size": 64}}
    changes = merge(on_own_model(rows), {"prediction": few | quick})
    run_stages(changes, pretrained=False)
    settings = load_settings()
    (plan,) = plans(settings)
    open_plan(plan)
    for shard in range(2):
        tune(plan, shard, "cpu")
    close_plan(plan, served_protocol(settings.prediction.serve, settings.prediction, 1e-5), "research")
    found = score(settings, [plan], plan.directory, "cpu")
    public = next(row for row in found["rows"] if row["kind"] == "public")
    tokenizer = load_tokenizer(plan.model.weights)
    tokens = tokens_of(plan, EVAL, tokenizer)
    tokens = replace(tokens, rows=tokens.rows[:3])
    base = load_base(plan.model.weights, torch.device("cpu"))
    assert public["perplexity_pooled"] == pytest.approx(perplexity(base, tokens, 1), rel=1e-5), "of answers alone"
    deployment = deploy(plan.directory, torch.device("cpu"))
    said = tokenizer.decode(deployment._ids("Hello"))
    assert said == (
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True
        )
        if rows is not PAIRS
        else "Hello"
    )
    assert 1 <= len(list(deployment.generate("Hello", 2))) <= 2
    deployment.predictor.close()


def test_a_base_in_4_bits_goes_through_experiment_audit_and_prediction(pipeline: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="weights in 4 bits need pip install 'dptune[quantized]'")
    changes = on_own_model(PAIRS, epochs=0.2)
    changes["experiment"]["models"]["small"]["load_in_4bit"] = True
    changes = merge(changes, {"prediction": {"models": [2], "serve": {"models": 2}}})
    run_stages(changes, pretrained=False)
    check_models(load_settings())
    cell = static(changes)
    write_text(cell.directory / "cell.json", cell.model_dump_json())
    run_cell(cell, "cpu")
    few = {"generations": 4, "candidates": 3, "records": 4, "step_trials": 0}
    assert audit_cell(cell.directory, load_settings().audit.model_copy(update=few), "cpu")["violations"] == []
    (plan,) = plans(load_settings())
    assert plan.model.weights.load_in_4bit
    open_plan(plan)
    for shard in range(2):
        tune(plan, shard, "cpu")
    chosen = load_settings().prediction
    close_plan(plan, served_protocol(chosen.serve, chosen, 1e-5), "research")
    deployment = deploy(plan.directory, torch.device("cpu"))
    assert len(list(deployment.generate("Hello", 1))) == 1
    deployment.predictor.close()


def test_canaries_that_no_record_could_hold_are_refused_before_anything_runs(empty: Path) -> None:
    write_params(on_own_model(PAIRS, max_length=12))
    with pytest.raises(
        ConfigError, match=r"training\.max_length .*: 12 cuts every canary .* Fix: use \d+ or more, or set"
    ) as one:
        check_models(load_settings())
    enough = int(re.findall(r"use (\d+) or more", str(one.value))[0])
    write_params(on_own_model(PAIRS, max_length=enough))
    check_models(load_settings())
    write_params(on_own_model(PAIRS, max_length=12), {"canaries": {"extraction": 0, "audit": 0}})
    check_models(load_settings())


def test_chats_need_a_tokenizer_with_a_template(empty: Path) -> None:
    bare = tiny_ensemble.base().source
    own = {"experiment": {"models": {"small": {"source": bare}}}, "training": {"max_length": 24}}
    write_params(jsonl(empty / "own.jsonl", CHATS), own)
    problem = r"experiment\.models\.small\.source: the tokenizer has no chat template.* Fix: use an instruction-tuned"
    with pytest.raises(ConfigError, match=problem):
        check_models(load_settings())


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"path": "nowhere.csv"}, r"the file does not exist"),
        ({"unit": "client_id"}, r"row 1, column 'client_id': this column does not exist"),
        ({"unit": "client"}, r"'client' is another kind of unit"),
        ({"options": {"template": "{town}"}}, r"column 'town': this column does not exist"),
        ({"options": {"colour": "red"}}, r"data\.options: 'colour' is not an option of source table"),
        ({"options": {"text": 3}}, r"data\.options: text is not a text"),
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
    with pytest.raises(DataError, match="has 9 records, and needs at least 10"):
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
