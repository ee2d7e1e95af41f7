"""``train``: a model's own weights, from the command to a folder that transformers loads alone, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_classify import encoder, table
from tiny_tuning import checkpoint, rows, write_jsonl
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from typer.testing import CliRunner

import dptune
from dptune.cli import app
from dptune.job.delivery.verification import check_deliverable
from dptune.job.run import Tuned

QUICK: dict[str, Any] = {"epsilon": 8, "epochs": 2, "expected_batch_size": 16, "max_length": 20}
LABELLED: dict[str, Any] = {"task": "classify", "labels": ("0", "1"), "text": "sentence", **QUICK}
LAYERS = {"train": "layers", "train_layers": "last 1"}


def classified(out: Path | None = None, model: Path | None = None, **settings: Any) -> Tuned:
    return dptune.tune(model or encoder(), table(), out=out, **{**LABELLED, **settings})


def written(out: Path | None = None, **settings: Any) -> Tuned:
    return dptune.tune(checkpoint(), rows(), out=out, **{**QUICK, "expected_batch_size": 8, **settings})


def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(4, 14)[None]
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    return found


def by_transformers(folder: Path, base: Path, loader: Any, **more: Any) -> Any:
    """The model of a delivered folder, by the code on its card."""
    if (folder / "model.safetensors").exists():
        return loader.from_pretrained(folder)
    model = loader.from_pretrained(base, **more)
    missing = model.load_state_dict(load_file(folder / "changed_weights.safetensors"), strict=False)
    assert not missing.unexpected_keys
    return model


@pytest.mark.parametrize("chosen", [{"train": "all"}, {"train": "bias"}, {"train": "head"}, LAYERS], ids=str)
def test_a_classifier_is_delivered_verified_and_loaded_by_transformers_alone(chosen: Any, tmp_path: Path) -> None:
    tuned = classified(tmp_path / "run", **chosen)
    folder = tuned.save(tmp_path / "to hand on")
    said = ": ".join(chosen.values())
    assert check_deliverable(folder).header.train == said
    model = by_transformers(folder, encoder(), AutoModelForSequenceClassification, num_labels=2)
    assert torch.equal(logits(model), logits(tuned.model))
    assert not (folder / "adapter_config.json").exists()
    again = classified(tmp_path / "run", **chosen)  # it has ended, and is loaded
    assert torch.equal(logits(again.model), logits(tuned.model))
    card = (folder / "README.md").read_text()
    assert "peft" not in card.lower()
    assert f"| weights that trained | {said} |" in card
    assert str(encoder().parent) not in "".join(path.read_text(errors="replace") for path in folder.glob("*.json"))


@pytest.mark.parametrize("chosen", [{"train": "all"}, {"train": "bias"}, LAYERS], ids=str)
def test_a_text_model_is_sampled_scored_and_loaded_by_transformers_alone(chosen: Any, tmp_path: Path) -> None:
    tuned = written(tmp_path / "run", **chosen)
    folder = tuned.save(tmp_path / "to hand on")
    model = by_transformers(folder, checkpoint(), AutoModelForCausalLM)
    assert torch.allclose(logits(model), logits(tuned.model), atol=1e-6)
    before = logits(AutoModelForCausalLM.from_pretrained(checkpoint()))
    assert not torch.allclose(logits(model), before, atol=1e-4)
    sampled = dptune.sample(folder, checkpoint(), 3, max_new_tokens=4)
    assert len(sampled.rows) == 3
    public = write_jsonl(tmp_path / "public.jsonl", [{"text": row["text"]} for row in rows(12)])
    scored = CliRunner().invoke(
        app, ["score", str(folder), "--model", str(checkpoint()), "--data", str(public), "--text", "text", "--json"]
    )
    assert scored.exit_code == 0, scored.output
    figures = json.loads(scored.stdout)
    assert figures["perplexity"] != figures["untuned_perplexity"]
    assert CliRunner().invoke(app, ["verify", str(folder)]).exit_code == 0
