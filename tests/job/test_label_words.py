"""``dptune tune --word``: a causal model that classifies by label words, from a table to labels."""

from __future__ import annotations

import json
import re
import shutil
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from test_classify import encoder, table
from tiny_tuning import QUICK, checkpoint
from typer.testing import CliRunner, Result

import dptune
from dptune.cli import app
from dptune.core.errors import ConfigError
from dptune.core.settings import Lora
from dptune.job.base_model import open_base
from dptune.job.delivery.verification import CardError, check_deliverable
from dptune.job.preparation import prepare, with_labels
from dptune.job.result import PUBLIC
from dptune.job.run import Tuned
from dptune.job.run_spec import schedule_of
from dptune.job.scoring import score_adapter
from dptune.job.settings import TuneSettings
from dptune.records.reading.source import RecordSource
from dptune.training.data import plain_ids
from dptune.training.gradients.parameter_groups import PairModules, trained_blocks
from dptune.training.models.model import ModelSource, attach_lora, load_tokenizer

#: Words of the labels, each one token of the tiny model's tokenizer, in another order than the labels.
WORDS = {"0": "dog", "1": "cat"}
TEMPLATE = "{text} new"


def write_tsv(path: Path, column: str, rows: list[dict[str, Any]]) -> Path:
    lines = [f"label\t{column}", *(f"{row['label']}\t{row['sentence']}" for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


def command(folder: Path, *arguments: str, model: Path | None = None) -> Result:
    data = write_tsv(folder / "train.tsv", "sentence", table())
    given = ["--model", str(model or checkpoint()), "--data", str(data), "--epsilon", "8", "--text", "sentence"]
    given += ["--template", TEMPLATE] if "--template" not in arguments else []
    given += ["--out", str(folder / "out"), "--rank", "2", "--expected-batch-size", "16", "--max-length", "20"]
    return CliRunner().invoke(app, ["tune", *given, *arguments])


BY_WORDS = ["--task", "classify", "--word", "0=dog", "--word", "1=cat"]


@lru_cache(maxsize=1)
def tuned() -> Tuned:
    return dptune.tune(
        str(checkpoint()), table(400), task="classify", words=WORDS, epsilon=1000, text="sentence", template=TEMPLATE,
        public=table(60, seed=9), rank=4, expected_batch_size=64, epochs=24, learning_rate=0.03, max_length=20,
        physical_batch_size=64,
        target_modules="all-linear", schedule="linear",
    )  # fmt: skip


def labels_by_card(folder: Path, base: Path, texts: list[str]) -> list[str]:
    """What the lines of the card's section "Use" make of texts."""
    use = (folder / "README.md").read_text(encoding="utf-8").split("## Use")[1]
    code = use.split("```python")[1].split("```")[0].replace("this folder", str(folder))
    lines = code.replace(f'"{base.name}"', repr(str(base))).strip().splitlines()
    names: dict[str, Any] = {}
    found = []
    for text in texts:
        asked = [line.replace('"a text"', json.dumps(text)) for line in lines]
        if "model" in names:
            asked = [line for line in asked if line.startswith("text =") or line is asked[-1]]
        exec("\n".join(asked[:-1]), names)
        found.append(str(eval(asked[-1], names)))
    return found


def test_a_table_becomes_a_classifier_by_words_which_score_reads_without_being_told(tmp_path: Path) -> None:
    done = command(tmp_path, *BY_WORDS, "--epochs", "2")
    assert done.exit_code == 0, done.output
    assert "accuracy_after_held_out" in done.stdout
    folder = tmp_path / "out" / "adapter"
    assert check_deliverable(folder).complete
    assert json.loads((folder / "words.json").read_text()) == {"words": WORDS, "template": TEMPLATE}
    assert json.loads((folder / "labels.json").read_text()) == ["0", "1"]
    card = (folder / "README.md").read_text()
    assert "# LoRA adapter for tiny, a classifier by label words" in card
    assert 'It is put into the template "{text} new". The word that the model finds' in card
    assert 'likeliest next decides: "dog" (0) or "cat" (1).' in card
    assert '| words | 0: "dog", 1: "cat" |' in card
    assert "| head |" not in card
    rows = table(60, seed=11)
    dev = write_tsv(tmp_path / "dev.tsv", "content", rows)
    given = ["score", str(folder), "--model", str(checkpoint()), "--data", str(dev), "--json"]
    told = CliRunner().invoke(app, [*given, "--text", "content"])
    assert told.exit_code == 0, told.output
    assert json.loads(told.stdout)["inputs"] == 60
    untold = CliRunner().invoke(app, given)
    assert "name one of 'label', 'content' as --text, for which {text} in the template stands" in " ".join(
        untold.output.split()
    )
    again = command(tmp_path, *BY_WORDS, "--epochs", "2")
    assert again.exit_code == 0, again.output
    other = command(tmp_path, "--task", "classify", "--word", "0=cat", "--word", "1=dog", "--epochs", "2")
    told = "was started with other settings (words.0: dog then, cat now; words.1: cat then, dog now"
    assert told in " ".join(other.output.split())
    (folder / "words.json").write_text((folder / "words.json").read_text().replace("new", "old"))
    with pytest.raises(CardError, match=r"words\.json"):
        check_deliverable(folder)


def test_words_are_learned_and_the_cards_lines_give_the_scores_own_labels(tmp_path: Path) -> None:
    """The card's lines read the causal model, and ``score`` the classifier that was trained: they agree."""
    before, after = tuned().scores[PUBLIC]["accuracy"]
    assert before < 0.7
    assert after > 0.8
    folder, rows = tuned().save(tmp_path / "handed on"), table(60, seed=11)
    source = RecordSource(rows, text="sentence", label="label")
    with safe_open(folder / "adapter_model.safetensors", framework="pt") as opened:
        assert all(".transformer.h." in name for name in opened.keys())  # noqa: SIM118
    found = score_adapter(folder, ModelSource(str(checkpoint())), source).figures["accuracy"]
    labels = labels_by_card(folder, checkpoint(), [row["sentence"] for row in rows])
    right = sum(label == str(row["label"]) for label, row in zip(labels, rows, strict=True))
    assert 0.8 < found == pytest.approx(right / 60)
    swapped = [row | {"label": 1 - row["label"]} for row in rows]
    against = RecordSource(swapped, text="sentence", label="label")
    wrong = score_adapter(folder, ModelSource(str(checkpoint())), against).figures["accuracy"]
    assert wrong == pytest.approx(1 - found)


def test_score_fills_the_template_that_was_trained(tmp_path: Path) -> None:
    """Other templates give other losses; a template that is given takes the place of the stored one."""
    base, rows = ModelSource(str(checkpoint())), table(60, seed=11)

    def loss(template: str | None, text: str | None = "sentence") -> float:
        source = RecordSource(rows, text=text, label="label", template=template)
        return score_adapter(tuned().folder / "adapter", base, source).figures["loss"]

    assert loss(None) == loss(TEMPLATE) == loss("{sentence} new", None)
    assert loss("{text} old old") != loss(None)


@pytest.mark.parametrize(
    ("column", "template", "warned"),
    [
        ("content", "{text} old old", True),
        ("content", TEMPLATE, False),
        ("content", None, False),
        (None, "{content} new", False),
        (None, "{content} old", True),
    ],
)
def test_another_template_in_place_of_the_stored_one_is_noticed(
    column: str | None, template: str | None, warned: bool
) -> None:
    rows, notes = [{"content": row["sentence"], "label": row["label"]} for row in table(4)], list[str]()
    source = RecordSource(rows, text=column, label="label", template=template)
    score_adapter(tuned().folder / "adapter", ModelSource(str(checkpoint())), source, warn=notes.append)
    said = f"tuned with data.template '{TEMPLATE}', and these texts have {template!r}: other texts, maybe"
    assert notes == ([f"the adapter was {said}"] if warned else [])


def test_adapters_alone_train_and_mechanisms_without_heads_take_words() -> None:
    settings = TuneSettings(epsilon=8.0, task="classify", words=WORDS, labels=("1", "0"), **QUICK)
    base = open_base(str(checkpoint()), settings)
    assert (base.head, dict(base.words)) == ((), {"1": "cat", "0": "dog"})
    assert list(base.words) == ["1", "0"]  # the order of the labels
    model = attach_lora(base.load(), Lora(rank=2, target_modules=("c_attn",)), 0, base.head)
    assert all(isinstance(block, PairModules) for block in trained_blocks(model))
    learned = TuneSettings(epsilon=8.0, task="classify", words=WORDS, mechanism="rldp", **QUICK)
    chosen, source = with_labels(learned, RecordSource(table(), text="sentence", public=table(20, seed=9)))
    assert prepare(source, open_base(str(checkpoint()), chosen), chosen).mechanism.mechanism.name == "rldp"


@pytest.mark.parametrize("layers", [("c_attn", "score"), ".*(c_attn|score)"])
def test_the_words_own_layer_takes_no_adapter(layers: Any) -> None:
    settings = TuneSettings(epsilon=8.0, task="classify", words=WORDS, labels=("0", "1"), target_modules=layers)
    with pytest.raises(ConfigError, match="include 'score', the label words' rows of the output layer"):
        open_base(str(checkpoint()), settings)


def test_a_text_that_is_too_long_loses_its_beginning_and_never_the_template() -> None:
    records = [*table(60), {"sentence": "dog " + "red " * 40 + "blue.", "label": 0}]
    settings = TuneSettings(epsilon=8.0, task="classify", words=WORDS, eval_share=0, max_length=20, **QUICK)
    settings, source = with_labels(settings, RecordSource(records, text="sentence", template=TEMPLATE))
    prepared = prepare(source, open_base(str(checkpoint()), settings), settings)
    tokenizer = load_tokenizer(ModelSource(str(checkpoint())))
    assert prepared.tokens.truncated == 1
    whole = tokenizer(f"{records[-1]['sentence']} new")["input_ids"]
    assert plain_ids(prepared.tokens.rows[-1][:-1]).tolist() == whole[-18:]
    assert any("lose their beginning, so that the words follow their end" in note for note in prepared.notes)


def test_the_rate_and_radius_are_those_of_words() -> None:
    found = schedule_of(TuneSettings(epsilon=8.0, task="classify", words=WORDS), 10_000, 10**6, 64)
    assert (found.learning_rate, found.options["max_grad_norm"]) == (0.01, 1.0)


def test_a_dry_run_says_the_words(tmp_path: Path) -> None:
    done = command(tmp_path, *BY_WORDS, "--dry-run", "--json")
    assert done.exit_code == 0, done.output
    plan = json.loads(done.stdout)
    assert (plan["words"], plan["template"], plan["labels"]) == ('0: "dog", 1: "cat"', TEMPLATE, "0, 1")
    assert not (tmp_path / "out").exists()


REFUSED = {
    "not one token": ([*BY_WORDS[:4], "--word", "1= good"], r"--word: ' good' is 5 tokens .* \(' ', 'g', 'o', 'o',"),
    "one word": ([*BY_WORDS[:4], "--word", "1=dog"], "--word: labels '0' and '1' have one word, 'dog'"),
    "too few": ([*BY_WORDS[:4], "--labels", "0,1"], r"--word: there are 1, for 0, and 2 labels \(0, 1\)"),
    "too many": ([*BY_WORDS, "--word", "2=old", "--labels", "0,1"], "--word: there are 3, for 0, 1, 2, and 2 labels"),
    "one label": (BY_WORDS[:4], "--labels: .* are not two or more distinct names"),
    "label twice": ([*BY_WORDS, "--word", "1=old"], "--word: label '1' is given twice. Fix: give it one word"),
    "no label": ([*BY_WORDS[:3], "dog"], "--word: 'dog' is not of the form LABEL=WORD"),
    "no task": (BY_WORDS[2:], "--word: are for task classify"),
    "no text": ([*BY_WORDS, "--template", "It was"], "--template: names no columns"),
    "another column": ([*BY_WORDS, "--template", "{label} was"], r"--template: '\{label\} was' has no \{text\}"),
    "label unknown": ([*BY_WORDS[:4], "--word", "yes=cat"], "row 3, column 'label': '1' is not one of the labels"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_words_are_refused_by_one_sentence_before_anything_is_charged(tmp_path: Path, name: str) -> None:
    arguments, message = REFUSED[name]
    done = command(tmp_path, *arguments)
    assert done.exit_code == 2, done.output
    said = done.stderr.strip().splitlines()[-1]
    assert re.search(message, said), said
    assert said.count("Fix: ") == 1
    assert not (tmp_path / "out" / "ledger.jsonl").exists()


def test_an_encoder_is_told_to_train_a_head(tmp_path: Path) -> None:
    done = command(tmp_path, *BY_WORDS, model=encoder())
    said = done.stderr.strip().splitlines()[-1]
    assert "--word: need a causal language model" in said
    assert "is an encoder" in said
    assert "leave the words out, and train a head" in said


@pytest.mark.parametrize("words", [["dog", "cat"], {}, {"0": "dog", "1": 7}])
def test_words_of_python_are_a_mapping_of_texts(words: Any) -> None:
    with pytest.raises(ConfigError, match=r"task\.words"):
        TuneSettings(epsilon=8.0, task="classify", words=words)


def test_a_search_takes_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dptune.privacy.selection_law.SelectionLaw.draw", lambda law, entropy: 2)
    space = {"space": {"learning_rate": {"log_uniform": [0.001, 0.05]}}, "candidates": 3, "score": {"on": "public"}}
    found, alone = (
        dptune.tune(
            str(checkpoint()), table(60), task="classify", words=WORDS, epsilon=8, text="sentence",
            template=TEMPLATE, telemetry="private", public=table(20, seed=9), search=one, out=out, **QUICK,
        )
        for one, out in ((space, tmp_path / "out"), (None, tmp_path / "alone"))
    )  # fmt: skip
    (before, after), (untuned, _) = (one.scores[PUBLIC]["loss"] for one in (found, alone))
    assert before == pytest.approx(untuned) != after, "what the card says of the model before it was tuned"
    folder = found.save(tmp_path / "handed on")
    check_deliverable(folder)
    assert json.loads((folder / "words.json").read_text()) == {"words": WORDS, "template": TEMPLATE}
    shutil.rmtree(tmp_path / "out")
    labels = labels_by_card(folder, checkpoint(), [row["sentence"] for row in table(4)])
    assert set(labels) <= {"0", "1"}
