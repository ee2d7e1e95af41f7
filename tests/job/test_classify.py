"""``dptune tune --task classify``: from a table with labels to an adapter with a head that loads and verifies."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from tiny_tuning import QUICK, checkpoint, write_csv
from transformers import AutoModelForSequenceClassification, AutoTokenizer, RobertaConfig, RobertaForMaskedLM
from typer.testing import CliRunner, Result

import dptune
from dptune.cli import app
from dptune.core.errors import ConfigError, DataError
from dptune.core.settings import UpdateRule
from dptune.job.base_model import Base, open_base
from dptune.job.delivery.verification import CardError, check_deliverable
from dptune.job.preparation import prepare, with_labels
from dptune.job.result import HELD_OUT, PUBLIC
from dptune.job.run_spec import schedule_of
from dptune.job.settings import TuneSettings
from dptune.job.suggest import suggest
from dptune.records.reading.read import read
from dptune.records.reading.record import Labelled, Record
from dptune.records.reading.source import RecordSource
from dptune.training.data import plain_ids
from dptune.training.models.model import ModelSource, load_tokenizer
from dptune.training.tokens.encoding import labelled_tokens

ARGUMENTS = ["--task", "classify", "--text", "sentence", "--epsilon", "8", "--expected-batch-size", "16", "--rank", "2"]


def table(count: int = 80, seed: int = 3) -> list[dict[str, Any]]:
    """Sentences of a first word that decides the label, and others that do not."""
    generator, found = np.random.default_rng(seed), []
    for number in range(count):
        label = number % 2
        words = generator.choice(["red", "blue", "old", "dog", "cat"], size=3)
        sentence = f"{'cat' if label else 'dog'} {number} {' '.join(words)}."
        found.append({"sentence": sentence, "label": label, "who": f"c{number % 40}"})
    return found


@lru_cache(maxsize=1)
def encoder() -> Path:
    """The folder of a RoBERTa of 24 positions with the tokenizer of the tiny causal model."""
    folder = Path(mkdtemp(prefix="dptune tiny encoder ")) / "tiny-roberta"
    shutil.copytree(checkpoint(), folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    padding = AutoTokenizer.from_pretrained(checkpoint()).pad_token_id or 0
    config = RobertaConfig(
        vocab_size=len(AutoTokenizer.from_pretrained(checkpoint())),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=26 + padding,
        pad_token_id=padding,
    )
    torch.manual_seed(0)
    RobertaForMaskedLM(config).save_pretrained(folder)
    return folder


MODELS = {"causal": checkpoint, "encoder": encoder}


def command(model: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["tune", "--model", str(model), *arguments])


def loaded(model: Path, folder: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    labels = json.loads((folder / "labels.json").read_text())
    base = AutoModelForSequenceClassification.from_pretrained(
        model, num_labels=len(labels), pad_token_id=tokenizer.pad_token_id
    )
    return PeftModel.from_pretrained(base, str(folder)).eval()


@pytest.mark.parametrize("kind", MODELS)
def test_a_table_becomes_a_classifier_that_loads_and_verifies(kind: str, tmp_path: Path) -> None:
    model, out = MODELS[kind](), tmp_path / "out"
    rows = [{"label": row["label"], "sentence": row["sentence"]} for row in table()]
    path = tmp_path / "sst2.tsv"
    path.write_text("".join("\t".join(map(str, row)) + "\n" for row in ([*rows[0]], *(row.values() for row in rows))))
    options = ["--label", "label", "--labels", "0,1", "--epochs", "4", "--max-length", "20", "--out", str(out)]
    done = command(model, "--data", str(path), *ARGUMENTS, *options)
    assert done.exit_code == 0, done.output
    for shown in ("accuracy_after_held_out", "calibration_error_after_held_out", "Accuracy of held-out records"):
        assert shown in done.stdout
    for shown in ("accuracy_standard_error_held_out", "constant_answer_accuracy_held_out"):
        assert shown in done.stdout
    contents = check_deliverable(out / "adapter")
    assert contents.complete
    if kind == "causal":  # both kinds print the same two commands, and an attack takes longer than all the rest
        last = done.stdout.strip().splitlines()[-2:]
        given = shlex.split(last[0].partition("dptune ")[2]) + shlex.split(last[1].partition("With ")[2])[:5]
        attacked = CliRunner().invoke(app, [*given, "--trials", "500", "--json"])
        assert attacked.exit_code == 0, attacked.output
        assert json.loads(attacked.stdout)["epsilon_certified"] == pytest.approx(contents.epsilons.certified, rel=1e-4)
    assert contents.epsilons.certified <= 8
    card = (out / "adapter" / "README.md").read_text()
    assert "## Accuracy" in card
    assert "- The names of the labels, which are public." in card
    assert "held-out" not in card
    assert "Perplexity" not in card
    assert json.loads((out / "adapter" / "labels.json").read_text()) == ["0", "1"]
    said = CliRunner().invoke(app, ["verify", str(out / "adapter")])
    assert said.exit_code == 0, said.output
    again = command(model, "--data", str(path), *ARGUMENTS, *options)
    assert again.exit_code == 0, again.output
    assert any(
        "modules_to_save" in name and bool(one.any())
        for name, one in loaded(model, out / "adapter").state_dict().items()
    )
    (out / "adapter" / "labels.json").write_text('["1", "0"]')
    with pytest.raises(CardError, match=r"labels\.json"):
        check_deliverable(out / "adapter")


def test_a_classifier_learns_and_python_gives_its_scores(tmp_path: Path) -> None:
    """At a huge budget the first word is learned; the loaded folder gives the result's own logits."""
    result = dptune.tune(
        str(encoder()), table(400), task="classify", epsilon=1000, text="sentence", public=table(60, seed=9),
        labels=("0", "1"), rank=2, expected_batch_size=64, epochs=12, learning_rate=0.02, max_length=20,
        physical_batch_size=64,
    )  # fmt: skip
    assert set(result.scores) == {HELD_OUT, PUBLIC}
    assert result.perplexity == {}
    before, after = result.scores[PUBLIC]["accuracy"]
    assert before < 0.7
    assert after > 0.9
    saved = result.save(tmp_path / "handed on")
    ids = AutoTokenizer.from_pretrained(saved)("cat 7 red dog.", return_tensors="pt")["input_ids"]
    assert torch.allclose(loaded(encoder(), saved)(ids).logits, result.model(ids).logits, atol=1e-5)


def test_private_telemetry_tells_no_score_of_private_records() -> None:
    result = dptune.tune(
        str(encoder()), table(), task="classify", epsilon=8, text="sentence", labels=("0", "1"), max_length=20,
        telemetry="private", epochs=2, expected_batch_size=8, rank=2,
    )  # fmt: skip
    assert result.scores == {}
    assert "Not shown: figures come only from public records" in (result.folder / "adapter" / "README.md").read_text()


def delivered(records: list[dict[str, Any]], **settings: Any) -> Path:
    """The folder of a run under private telemetry."""
    result = dptune.tune(
        str(encoder()), records, task="classify", epsilon=8, text="sentence", labels=("0", "1"), max_length=20,
        telemetry="private", epochs=1, expected_batch_size=8, rank=2, **settings,
    )  # fmt: skip
    return result.folder / "adapter"


def test_whether_a_record_was_too_long_is_not_told_by_the_delivered_tokenizer() -> None:
    """A tokenizer keeps how it last cut a text."""
    long = {"sentence": "dog " + "red " * 40, "label": 0, "who": "c99"}
    folders = [delivered(records) for records in (table(40), [*table(40), long])]
    names = sorted(path.name for path in folders[0].glob("*token*"))
    assert "tokenizer.json" in names
    for name in names:
        assert len({(folder / name).read_bytes() for folder in folders}) == 1, name


def test_how_many_records_are_cut_decides_nothing_and_private_telemetry_does_not_count_them() -> None:
    """Else that a run ended would tell, at no price, that fewer than half of them are long."""
    long = [{"sentence": "dog " + "red " * 40, "label": 0, "who": f"c{number}"} for number in range(60)]
    base = open_base(str(encoder()), TuneSettings(epsilon=8.0, task="classify", labels=("0", "1")))
    for telemetry, said in (("private", False), ("research", True)):
        settings = TuneSettings(
            epsilon=8.0, task="classify", labels=("0", "1"), max_length=20, telemetry=telemetry, eval_share=0.0
        )
        for records, counted in ((long, "60 of 60 records"), ([*table(200), *long[:3]], "3 of 203 records")):
            notes = prepare(RecordSource(records, text="sentence", label="label"), base, settings).notes
            assert any(counted in note for note in notes) == said


def test_the_head_starts_from_the_public_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds, real = [], Base.start

    def noted(base: Base, seed: int, weights: Any = None) -> Any:
        seeds.append(seed)
        return real(base, seed, weights)

    monkeypatch.setattr(Base, "start", noted)
    delivered(table(40), seed=11)
    assert set(seeds) == {11}


class Unread(Sequence[Any]):
    """Records that nobody may read."""

    def __len__(self) -> int:
        raise AssertionError("the records were counted")

    def __getitem__(self, place: Any) -> Any:
        raise AssertionError("a record was read")


@pytest.mark.parametrize("telemetry", ["research", "private"])
def test_labels_are_named_and_never_read_from_the_records(telemetry: Any, tmp_path: Path) -> None:
    """What labels there are is delivered, and decides the head's shape: no epsilon would cover reading them."""
    with pytest.raises(ConfigError, match=r"labels: are missing: .* no epsilon would cover") as refused:
        dptune.tune(
            str(encoder()), Unread(), task="classify", epsilon=8, text="sentence", telemetry=telemetry,
            out=tmp_path / "out", search={"space": {"expected_batch_size": [4, 8]}},
        )  # fmt: skip
    assert "good,bad" in str(refused.value)
    assert not list(tmp_path.iterdir())
    chosen = TuneSettings(epsilon=8.0, task="classify", labels=("1", "0", "2"), telemetry=telemetry)
    assert with_labels(chosen, RecordSource(Unread()))[0].labels == ("1", "0", "2")
    by_words = TuneSettings(epsilon=8.0, task="classify", words={"1": " a", "0": " b"}, telemetry=telemetry)
    assert with_labels(by_words, RecordSource(Unread()))[0].labels == ("1", "0")


def test_the_command_asks_for_the_labels_by_its_option_and_shows_none_of_the_records(tmp_path: Path) -> None:
    rows = [{"sentence": row["sentence"], "label": ["secret", "other"][row["label"]]} for row in table()]
    given = ["--data", str(write_csv(tmp_path / "a.csv", rows)), *ARGUMENTS, "--out", str(tmp_path / "out")]
    done = command(encoder(), *given)
    assert done.exit_code == 2
    assert done.stderr.strip().splitlines()[-1].startswith("error: --labels: are missing: ")
    assert not [word for word in ("secret", "other") if word in done.output]
    assert not (tmp_path / "out").exists()
    done = command(encoder(), *given, "--labels", "secret,other", "--max-length", "20", "--dry-run")
    assert done.exit_code == 0, done.output


def test_how_often_a_label_is_there_decides_nothing() -> None:
    """A label of one unit, of none, or of all: the run is the same, and under private telemetry so are its warnings."""
    chosen = TuneSettings(
        epsilon=8.0, task="classify", labels=("0", "1", "2"), rank=2, max_length=20, telemetry="private"
    )
    base, ready = open_base(str(encoder()), chosen), []
    for label in (0, 2):
        rows = [row | {"label": label if number == 5 else 0} for number, row in enumerate(table(40))]
        ready.append(prepare(RecordSource(rows, text="sentence", label="label", unit="who"), base, chosen))
    assert ready[0].kept == ready[1].kept
    assert ready[0].notes == ready[1].notes


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ((0, 1), "labels: 0 is not a text. Fix: write them as texts: '0', '1'"),
        ("0,1", "labels: '0,1' is one text. Fix: give a list"),
    ],
)
def test_labels_are_named_as_texts(labels: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TuneSettings(epsilon=8.0, task="classify", labels=labels)


def test_labels_with_commas_are_named_as_a_list(tmp_path: Path) -> None:
    rows = [{"sentence": row["sentence"], "label": ["so, so", "good"][row["label"]]} for row in table()]
    given = ["--data", str(write_csv(tmp_path / "commas.csv", rows)), *ARGUMENTS, "--telemetry", "private"]
    given += ["--epochs", "1", "--max-length", "20", "--out", str(tmp_path / "out")]
    done = command(encoder(), *given, "--labels", '["so, so", "good"]')
    assert done.exit_code == 0, done.output
    assert "Load it: as the card in" in done.stdout, "no class loads it by two lines, whether or not there are scores"
    assert json.loads((tmp_path / "out" / "adapter" / "labels.json").read_text()) == ["so, so", "good"]
    refused = command(encoder(), *given, "--labels", '["so, so", "good"')
    assert refused.stderr.strip().splitlines()[-1].startswith("error: --labels: '[")
    assert "is not a list in JSON. Fix: write" in refused.stderr


def test_the_owner_is_told_value_and_place_of_labels_that_do_not_fit(tmp_path: Path) -> None:
    """A typo that is named among all labels would become a class."""
    rows = [{"sentence": row["sentence"], "label": row["label"]} for row in table()]
    rows[4]["label"] = "2"
    path = write_csv(tmp_path / "third.csv", rows)
    given = ["--data", str(path), *ARGUMENTS, "--out", str(tmp_path / "out")]
    done = command(encoder(), *given, "--labels", "0,1")
    assert done.exit_code == 2
    line = done.stderr.strip().splitlines()[-1]
    assert "third.csv, row 6, column 'label': '2' is not one of the labels 0, 1. Fix: mend it, or name all l" in line, (
        line
    )
    rows[4]["label"] = f"rare {'x' * 50}"
    write_csv(path, rows)
    done = command(encoder(), *given, "--labels", "0,1")
    assert "'rare xxx" in done.stderr
    assert "x" * 41 not in done.stderr


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"task": "sort"}, "'sort' is not 'generate' or 'classify'"),
        ({"labels": ("a", "b")}, "are for task classify"),
        ({"task": "classify", "labels": ("a",)}, "two or more distinct"),
        ({"task": "classify", "labels": ("a", "a")}, "two or more distinct"),
        ({"task": "classify", "labels": ("", "b")}, "include an empty one"),
        ({"task": "classify", "labels": ("a ", "b")}, "'a ' is spelled 'a'"),
        ({"task": "classify", "labels": ("1.0", "2")}, "'1.0' is spelled '1'"),
        ({"task": "classify"}, "labels: are missing"),
        ({"task": "classify", "loss_on": "all"}, "a classifier learns labels"),
        ({"task": "classify", "load_in_4bit": True}, "does not go with task classify"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        TuneSettings(epsilon=1.0, **settings)


def test_columns_that_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.label: does not go with data\.prompt"):
        RecordSource([], prompt="a", completion="b", label="c")
    with pytest.raises(ConfigError, match="names a column of labels, which only task classify learns"):
        with_labels(TuneSettings(epsilon=1.0), RecordSource(table(), label="label"))
    with pytest.raises(DataError, match="the label is missing"):
        read(RecordSource([*table(), {"sentence": "a cat", "label": " "}], text="sentence", label="label"))
    with pytest.raises(DataError, match="this column does not exist"):
        read(RecordSource([{"sentence": "a cat"}], text="sentence", label="label"))


def test_mechanisms_with_learned_control_are_refused_before_a_record_is_read(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", table())
    done = command(
        encoder(), "--data", str(path), *ARGUMENTS, "--labels", "0,1", "--mechanism", "rldp", "--out",
        str(tmp_path / "out"),
        "--public", str(write_csv(tmp_path / "b.csv", table(seed=4))),
    )  # fmt: skip
    assert done.exit_code == 2
    assert "figures that a classification head does not have" in done.output
    assert not (tmp_path / "out" / "ledger.jsonl").exists()


def test_encoders_are_refused_for_texts_with_the_task_that_takes_them(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", table())
    done = command(encoder(), "--data", str(path), "--text", "sentence", "--epsilon", "8", "--out", str(tmp_path / "o"))
    assert done.exit_code == 2
    assert "encoders take task classify" in " ".join(done.output.split())


def test_suggestions_and_loaded_models_are_refused() -> None:
    chosen = TuneSettings(epsilon=8.0, task="classify", labels=("0", "1"), rank=2)
    base = open_base(str(encoder()), chosen)
    with pytest.raises(ConfigError, match="task"):
        suggest(base, chosen, 100)
    model = AutoModelForSequenceClassification.from_pretrained(encoder()).requires_grad_(False)
    with pytest.raises(ConfigError, match="is a loaded model"):
        dptune.tune(
            model, table(), task="classify", labels=("0", "1"), epsilon=8, text="sentence", tokenizer=object(), **QUICK
        )


def test_texts_are_cut_by_the_tokenizer_and_labels_never() -> None:
    tokenizer = load_tokenizer(ModelSource(str(checkpoint())))
    texts = ["cat", "cat dog red blue old cat dog red blue old cat"]
    records = [Record(Labelled(text, "b"), n, "a.tsv", n + 2) for n, text in enumerate(texts)]
    found = labelled_tokens(records, tokenizer, 8, ("a", "b"))
    assert (found.width, found.truncated, found.without_loss) == (8, 1, 0)
    for row, text in zip(found.rows, texts, strict=True):
        assert int(row[-1]) == 1
        assert (row[:-1] < 0).all()
        assert plain_ids(row[:-1]).tolist() == tokenizer(text)["input_ids"][:6]
    with pytest.raises(DataError, match="not one of x, y"):
        labelled_tokens(records, tokenizer, 8, ("x", "y"))


def test_a_classifiers_radius_and_rate_are_not_those_of_texts() -> None:
    """A head's radius and rates follow the model's size; values that are given stay; words and texts have no head."""
    settings = TuneSettings(epsilon=8.0, task="classify", labels=("0", "1"))
    small, large = (schedule_of(settings, 10_000, parameters, 64) for parameters in (10**6, 10**8))
    assert (small.options["max_grad_norm"], small.learning_rate, small.head_rate) == (10, 0.005, 0.005)
    assert (large.options["max_grad_norm"], large.learning_rate) == (3, 0.001)
    assert large.head_rate > large.learning_rate
    assert {"max_grad_norm", "learning_rate", "head_rate_ratio"} <= set(large.reasons)
    asked = schedule_of(replace(settings, head_rate_ratio=2.0), 10_000, 10**8, 64)
    assert asked.head_rate == pytest.approx(0.002)
    assert "head_rate_ratio" not in asked.reasons
    words = schedule_of(replace(settings, words={"0": " no", "1": " yes"}), 10_000, 10**8, 64)
    assert words.rule == UpdateRule(average="tail")
    texts = schedule_of(TuneSettings(epsilon=8.0), 10_000, 10**6, 64)
    assert (texts.options["max_grad_norm"], texts.learning_rate) == (0.1, 0.02)


def test_the_head_counts_in_pairs_and_parameters() -> None:
    chosen = TuneSettings(epsilon=8.0, task="classify", labels=("0", "1"), rank=2, max_length=20)
    base = open_base(str(encoder()), chosen)
    assert base.head == ("classifier",)
    assert base.pairs == 3  # query and value of one layer, and the head
    assert base.dimension == 2 * 2 * 2 * 32 + (32 * 33 + 2 * 33)
    prepared = prepare(RecordSource(table(), text="sentence", label="label"), base, chosen)
    assert prepared.mechanism.mechanism.pairs == 3


@pytest.mark.parametrize("kind", MODELS)
def test_a_batch_of_the_delivered_tokenizer_is_scored_as_each_text_alone(kind: str, tmp_path: Path) -> None:
    """Whichever side the model's own tokenizer pads: encoders read the first token, and GPT-2 counts padding too."""
    model = Path(shutil.copytree(MODELS[kind](), tmp_path / "model"))
    AutoTokenizer.from_pretrained(model, padding_side="left").save_pretrained(model)
    assert AutoTokenizer.from_pretrained(model).padding_side == "left"
    settings: dict[str, Any] = {"epsilon": 20, "epochs": 2, "expected_batch_size": 8, "rank": 2, "max_length": 20}
    dptune.tune(model, table(), task="classify", labels=("0", "1"), text="sentence", out=tmp_path / "out", **settings)
    own = AutoTokenizer.from_pretrained(tmp_path / "out" / "adapter")
    classifier, texts = loaded(model, tmp_path / "out" / "adapter"), ["a", "a rather good one", "bad"]
    with torch.no_grad():
        whole = classifier(**own(texts, return_tensors="pt", padding=True)).logits
        alone = torch.cat([classifier(**own(text, return_tensors="pt")).logits for text in texts])
    torch.testing.assert_close(whole, alone, rtol=0, atol=1e-5)
