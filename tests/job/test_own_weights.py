"""``train``: a model's own weights, from the command to a folder that transformers loads alone, and what is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_classify import encoder, table
from test_label_words import labels_by_card
from test_mean_heads import averaging
from tiny_models import each_record, gpt2, llama, make_header, make_plan, records
from tiny_tuning import checkpoint, rows, write_csv, write_jsonl
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from typer.testing import CliRunner

import dptune
from dptune.cli import app
from dptune.cli.tune_result import delivered
from dptune.core.errors import ConfigError, DptuneError
from dptune.core.settings import TrainedWeights
from dptune.job.delivery.verification import check_deliverable
from dptune.job.delivery.weights import check_names
from dptune.job.run import Tuned
from dptune.job.scoring import score_adapter
from dptune.job.settings import TuneSettings
from dptune.mechanisms.mechanism import Mechanism
from dptune.mechanisms.registry import build, of_model
from dptune.privacy.entropy import OsEntropy
from dptune.privacy.ledger_file import read_ledger
from dptune.privacy.run_header import RunHeader
from dptune.records.reading.source import RecordSource
from dptune.training.gradients.shared_pass import shared_copy
from dptune.training.loop import train
from dptune.training.models.model import ModelSource
from dptune.training.models.own_weights import groups_of, own_weights, train_own
from dptune.training.spec import RunSpec

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


@pytest.mark.one_case("{'train': 'bias'}", "{'train': 'head'}")
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
    assert f"| weights that trained | {said}; gradients are added up in float32" in card
    assert str(encoder().parent) not in "".join(path.read_text(errors="replace") for path in folder.glob("*.json"))


@pytest.mark.one_case
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


BY_WORDS: dict[str, Any] = {"words": {"0": "dog", "1": "cat"}, "labels": None, "template": "{text} new"}


@pytest.mark.one_case("head-{'train': 'bias'}", "words-{'train': 'bias'}")
@pytest.mark.parametrize("chosen", [{"train": "all"}, {"train": "bias"}], ids=str)
@pytest.mark.parametrize("kind", ["head", "words", "mean"])
def test_the_cards_code_answers_as_score_does(kind: str, chosen: Any, tmp_path: Path) -> None:
    base = {"head": encoder, "words": checkpoint, "mean": averaging}[kind]()
    more = BY_WORDS if kind == "words" else {}
    folder = classified(model=base, learning_rate=0.01, **chosen, **more).save(tmp_path / "handed on")
    held_out = table(30, seed=11)
    found = labels_by_card(folder, base, [row["sentence"] for row in held_out])
    right = sum(label == str(row["label"]) for label, row in zip(found, held_out, strict=True))
    scored = score_adapter(folder, ModelSource(str(base)), RecordSource(held_out, text="sentence"))
    assert scored.figures["accuracy"] == right / len(held_out)


class Killed(BaseException):
    """Stands for SIGKILL."""


def test_a_killed_run_goes_on_from_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Mechanism.privatise
    made: list[int] = []

    def privatise(self: Mechanism, *given: Any, **named: Any) -> Any:
        made.append(1)
        if len(made) == 4:
            raise Killed
        return real(self, *given, **named)

    monkeypatch.setattr(Mechanism, "privatise", privatise)
    out = tmp_path / "run"
    with pytest.raises(Killed):
        classified(out, train="all", checkpoint_every=1)
    monkeypatch.setattr(Mechanism, "privatise", real)
    assert read_ledger(out / "ledger.jsonl").releases == 4
    with pytest.raises(ConfigError, match="train: all then, bias now"):
        classified(out, train="bias", checkpoint_every=1)
    tuned = classified(out, train="all", checkpoint_every=1)
    assert tuned.ledger.complete
    assert tuned.ledger.header.train == "all"
    assert torch.isfinite(logits(tuned.model)).all()


def test_a_folder_of_changed_weights_that_was_edited_does_not_verify(tmp_path: Path) -> None:
    folder = classified(train="bias").save(tmp_path / "handed on")
    weights = folder / "changed_weights.safetensors"
    whole, listed = weights.read_bytes(), (folder / "changed_weights.json").read_text()
    tensors = load_file(weights)
    save_file(dict(list(tensors.items())[1:]), weights, metadata={"format": "pt"})
    with pytest.raises(DptuneError, match=r"changed_weights\.safetensors"):
        check_deliverable(folder)
    lost = next(iter(tensors))
    with pytest.raises(DptuneError, match=f"lacks {re.escape(lost)}, which changed_weights.json lists"):
        check_names(folder, "bias")
    weights.write_bytes(whole)
    check_names(folder, "bias")
    (folder / "changed_weights.json").write_text(listed.replace('"bias"', '"head"'))
    with pytest.raises(DptuneError, match="says that head trained, and the ledger bias"):
        check_names(folder, "bias")
    (folder / "changed_weights.json").write_text(listed)
    check_deliverable(folder)
    (folder / "model.safetensors").write_bytes(whole)  # transformers would read it
    with pytest.raises(DptuneError, match=r"model\.safetensors"):
        check_deliverable(folder)


REFUSED = {
    "adapters' settings": ({"train": "all", "rank": 4}, "lora.rank: is about LoRA adapters.*no effect"),
    "four bits": ({"train": "all", "load_in_4bit": True}, "model.load_in_4bit: holds the weights in 4 bits"),
    "half": ({"train": "bias", "dtype": "bfloat16"}, "model.dtype: bfloat16 has too few digits"),
    "no layers": ({"train": "layers"}, "train_layers: is missing"),
    "layers of others": ({"train_layers": "last 1"}, "train_layers: names layers, and train is lora"),
    "no expression": ({"train": "layers", "train_layers": "("}, "train_layers: .* is not a regular expression"),
    "nothing": ({"train": "layers", "train_layers": "nowhere"}, "train_layers: 'nowhere' names no module or weight"),
    "too many": ({"train": "layers", "train_layers": "last 99"}, "train_layers: asks for 99 layers"),
    "tied": ({"train": "head"}, "train: the output layer of GPT2LMHeadModel is tied to transformer.wte.weight"),
    "one side": ({"train": "layers", "train_layers": "lm_head"}, "train_layers: .* is tied to transformer.wte.weight"),
    "coordinates": ({"train": "all", "mechanism": "adaclip"}, "mechanism: adaclip clips by more than norms"),
    "entries": ({"train": "all", "mechanism": "laplace"}, "mechanism: laplace clips by more than norms"),
    "pairs": ({"train": "bias", "mechanism": "rldp"}, "mechanism: rldp moves each LoRA pair"),
    "A factors": (
        {"train": "bias", "mechanism": "dp_lora", "options": {"freeze_down": True}},
        "mechanism: dp_lora freezes the A factors",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_train_is_refused_by_name_before_anything_is_written(case: str, tmp_path: Path) -> None:
    settings, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message) as refused:
        written(tmp_path / "run", **settings)
    assert refused.value.fix
    assert not (tmp_path / "run").exists()


def test_a_head_of_label_words_and_a_model_without_biases_are_refused() -> None:
    with pytest.raises(ConfigError, match="train: head has nothing to train: label words"):
        TuneSettings(epsilon=1, task="classify", words={"0": " a", "1": " b"}, train="head")
    with pytest.raises(ConfigError, match="train: LlamaForCausalLM has no biases"):
        train_own(llama(), TrainedWeights(train="bias"), 0)


def test_only_copies_of_the_frozen_weights_train_and_a_tied_weight_stays_one() -> None:
    base = gpt2()
    model = train_own(shared_copy(base), TrainedWeights(train="all"), 0)
    for parameter in model.parameters():
        assert parameter.requires_grad
        with torch.no_grad():
            parameter.add_(1.0)
    assert all(map(torch.equal, base.parameters(), gpt2().parameters()))
    assert model.lm_head.weight is model.transformer.wte.weight
    groups = groups_of(model)
    assert sum(group.size for group in groups) == sum(weight.numel() for weight in base.parameters())
    layers = train_own(gpt2(), TrainedWeights(train="layers", train_layers=r"ln_\w+|wte.weight|lm_head"), 0)
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in own_weights(layers).names} >= {"wte", "ln_1", "ln_f"}


def test_a_run_whose_header_names_other_weights_is_refused(tmp_path: Path) -> None:
    model, entropy, tokens = train_own(gpt2(), TrainedWeights(train="bias"), 0), OsEntropy(), records()
    blocks = groups_of(model)
    dimension = sum(block.size for block in blocks)
    mechanism = build("static", of_model("static", {"noise_multiplier": 1.0}, len(blocks), dimension))
    units = each_record(tokens)
    spec = RunSpec(model, tokens, units, mechanism, make_plan(), make_header(entropy, units))
    with pytest.raises(ConfigError, match=r"header\.train: says that lora trains, and of the model bias does"):
        train(spec, tmp_path / "run", entropy)
    train(replace(spec, header=replace(spec.header, train="bias")), tmp_path / "run", entropy).close()
    assert RunHeader.from_dict(replace(spec.header, train="layers: last 2").to_dict()).train == "layers: last 2"
    assert "train" not in spec.header.to_dict()  # ledgers of adapters stay as they were
    with pytest.raises(ConfigError, match="train: 'nothing' does not name"):
        RunHeader.from_dict(spec.header.to_dict() | {"train": "nothing"})


@pytest.mark.one_case("per_pair", "banded")
@pytest.mark.parametrize(
    "mechanism", ["auto_s", "psac", "per_pair", "quantile", "dc_sgd_p", "plrvo", "lmo_dp", "banded"]
)
def test_every_mechanism_that_clips_by_norms_trains_all_weights(mechanism: str) -> None:
    tuned = classified(train="all", mechanism=mechanism, epochs=1)
    assert tuned.ledger.header.train == "all"
    assert tuned.epsilons.certified <= 8


def test_a_search_and_canaries_take_own_weights(tmp_path: Path) -> None:
    space = {"learning_rate": [1e-4, 1e-3]}
    public = table(40, seed=9)
    found = classified(
        tmp_path / "search", train="bias", search={"space": space}, candidates=2, public=public, epochs=1
    )
    assert check_deliverable(found.save(tmp_path / "best")).header.train == "bias"
    audited = classified(tmp_path / "audited", train="all", audit_canaries=20, epochs=1)
    assert audited.ledger.header.canaries == 20
    done = CliRunner().invoke(app, ["audit-run", str(tmp_path / "audited"), "--json"])
    assert done.exit_code == 0, done.output


def test_the_plan_counts_own_weights_and_past_noise(tmp_path: Path) -> None:
    data = write_csv(tmp_path / "records.csv", rows())
    given = ["tune", "--model", str(checkpoint()), "--data", str(data), "--text", "text", "--epsilon", "8", "--dry-run"]
    shown = [
        json.loads(CliRunner().invoke(app, [*given, *more, "--json"]).stdout)
        for more in (["--train", "all"], ["--train", "layers", "--train-layers", "last 1"])
    ]
    assert shown[0]["train"] == "all"
    assert shown[0]["trained_parameters"] == sum(
        weight.numel() for weight in AutoModelForCausalLM.from_pretrained(checkpoint()).parameters()
    )
    assert shown[1]["trained_parameters"] < shown[0]["trained_parameters"]
    assert "lora_rank" not in shown[0]


def test_a_rehearsed_search_takes_own_weights(tmp_path: Path) -> None:
    """Its trials train on public records, with a header of their own."""
    space = {"space": {"learning_rate": [1e-4, 1e-3]}, "score": {"on": "rehearsal"}}
    found = written(tmp_path / "run", train="bias", search=space, candidates=2, public=rows(60), epochs=1)
    assert found.ledger.header.train == "bias"


def test_the_row_of_the_folder_says_what_is_in_it(tmp_path: Path) -> None:
    for kind in ("bias", "lora"):
        folder = classified(tmp_path / kind, train=kind, epochs=1).folder / "adapter"
        assert delivered(folder) == {"weights" if kind == "bias" else "adapter": str(folder)}
