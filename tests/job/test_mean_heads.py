"""Classifiers whose head reads the mean of the tokens' states: one answer from the run, ``score`` and the card's code,
and neither a delivered folder nor a run of another pooling becomes one."""

from __future__ import annotations

import json
import logging
import shutil
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
import transformers
from test_classify import table
from tiny_tuning import checkpoint, write_csv
from transformers import AutoTokenizer, BertConfig, BertModel

import dptune
from dptune.cli.console import _MISLEADING
from dptune.core.errors import ConfigError
from dptune.job.base_model import _identity_of
from dptune.job.delivery.verification import check_deliverable
from dptune.job.result import PUBLIC
from dptune.job.scoring import score_adapter
from dptune.records.reading.source import RecordSource
from dptune.training.models import classifier
from dptune.training.models.classifier import load_classifier_config
from dptune.training.models.model import ModelSource
from dptune.training.run import Run
from tests.forked import command, forked

HELD_OUT = table(30, seed=9)


@lru_cache(maxsize=1)
def averaging() -> Path:
    """The folder of a BERT of 24 positions with a pooler, which declares the mean of its tokens' states."""
    folder = Path(mkdtemp(prefix="dptune tiny mean ")) / "tiny-bert"
    shutil.copytree(checkpoint(), folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    tokenizer = AutoTokenizer.from_pretrained(checkpoint())
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=24,
        pad_token_id=tokenizer.pad_token_id or 0,
        initializer_range=0.5,
    )
    torch.manual_seed(0)
    BertModel(config).save_pretrained(folder)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    (folder / "modules.json").write_text('[{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]')
    return folder


def tuned(out: Path, **settings: Any) -> Any:
    return dptune.tune(
        str(averaging()), table(), task="classify", epsilon=100, text="sentence", labels=("0", "1"), rank=2,
        epochs=1, expected_batch_size=16, max_length=20, public=HELD_OUT, out=out, **settings,
    )  # fmt: skip


def answers_of_the_card(folder: Path) -> list[str]:
    """The labels that the code on a card gives to the held-out texts."""
    code = (folder / "README.md").read_text().split("```python")[1].split("```")[0]
    code = code.replace("this folder", str(folder)).replace(f'"{averaging().name}"', repr(str(averaging()))).strip()
    *lines, asks = code.splitlines()
    found: dict[str, Any] = {}
    exec("\n".join(lines), found)
    return [eval(asks, found | {"text": row["sentence"]}) for row in HELD_OUT]


def accuracy(answers: list[str]) -> float:
    return sum(answer == str(row["label"]) for answer, row in zip(answers, HELD_OUT, strict=True)) / len(HELD_OUT)


def scored(folder: Path, rows: int) -> dict[str, Any]:
    source = RecordSource(HELD_OUT, text="sentence", label="label")
    return dict(score_adapter(folder, ModelSource(str(averaging())), source, rows=rows).figures)


@pytest.mark.parametrize("pooling", ["mean", "first token, of a version that read no declaration"])
def test_run_score_and_card_give_one_answer(pooling: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was delivered is scored with the pooling that it was trained with, whatever its base declares by now."""
    if pooling != "mean":
        monkeypatch.setattr(classifier, "declares_mean", lambda base: False)
    result = tuned(tmp_path / "out", learning_rate=0.05)
    folder = tmp_path / "out" / "adapter"
    monkeypatch.setattr(classifier, "declares_mean", lambda base: pooling != "mean")
    task = json.loads((folder / "adapter_config.json").read_text())["task_type"]
    assert task == ("TOKEN_CLS" if pooling == "mean" else "SEQ_CLS")
    assert check_deliverable(folder).complete
    card = (folder / "README.md").read_text()
    assert ("on the mean of the tokens' states" in card) == (pooling == "mean")
    figures = {name: after for name, (_, after) in result.scores[PUBLIC].items()}
    for rows in (1, 16):
        found = scored(folder, rows)
        assert found["accuracy"] == figures["accuracy"]
        assert found["loss"] == pytest.approx(figures["loss"], rel=1e-5)
    assert accuracy(answers_of_the_card(folder)) == figures["accuracy"]


def test_a_run_of_another_pooling_does_not_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checkpoint has the same names and shapes, so nothing else would show that the head reads other states."""
    begin = Run.begin

    def stop(run: Run) -> Any:
        if run.step == 2:
            run.ledger.close()
            raise KeyboardInterrupt
        return begin(run)

    with monkeypatch.context() as earlier:
        earlier.setattr(classifier, "declares_mean", lambda base: False)
        earlier.setattr(Run, "begin", stop)
        with pytest.raises(KeyboardInterrupt):
            tuned(tmp_path / "out")
    ledger = (tmp_path / "out" / "ledger.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"was started with other settings \(model\)"):
        tuned(tmp_path / "out")
    assert (tmp_path / "out" / "ledger.jsonl").read_bytes() == ledger


def test_the_pooling_is_part_of_a_hub_models_identity() -> None:
    """A commit alone is the same for both poolings, and whether a hub can be asked changes from day to day."""
    base = ModelSource(str(averaging()))
    first, mean = (load_classifier_config(base, ("0", "1"), 0, mean=mean) for mean in (False, True))
    hub = ModelSource("owner/model", "0" * 40)
    assert _identity_of(hub, first) == "0" * 40, "runs of earlier versions go on"
    assert _identity_of(hub, mean) != _identity_of(hub, first)


def test_the_entry_of_a_saved_configuration_decides_nothing(tmp_path: Path) -> None:
    """An encoder that is saved out of a classifier keeps the entry, and no declaration of its checkpoint."""
    load_classifier_config(ModelSource(str(averaging())), ("0", "1"), 0).save_pretrained(tmp_path)
    shape = json.loads((tmp_path / "config.json").read_text())
    assert shape["label_pooling"] == "mean"
    (tmp_path / "config.json").write_text(json.dumps(shape | {"architectures": ["BertModel"]}))
    assert not hasattr(load_classifier_config(ModelSource(str(tmp_path)), ("0", "1"), 0), "label_pooling")


def test_the_command_shows_no_report_of_a_head_that_is_to_be_missing(tmp_path: Path) -> None:
    """Also of weights that this class does not use, such as a pooler: the report asks the user to train the model."""
    given = ["tune", "--model", str(averaging()), "--task", "classify", "--epsilon", "8"]
    given += ["--data", str(write_csv(tmp_path / "a.csv", table(40))), "--text", "sentence", "--label", "label"]
    given += ["--labels", "0,1", "--epochs", "1", "--expected-batch-size", "8", "--max-length", "20", "--rank", "2"]

    def run() -> None:
        for name in _MISLEADING:  # other tests of this process may have hidden the report already
            logging.getLogger(name).filters.clear()
        transformers.logging.set_verbosity_warning()
        command("dptune", *given, "--out", str(tmp_path / "out"))()

    status, output, errors = forked(run, tmp_path)
    assert status == 0, errors
    assert "LOAD REPORT" not in output + errors
