"""``dptune score``: a delivered adapter's outputs against several references, and a classifier's labels."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel
from tiny_tuning import QUICK, as_earlier, checkpoint, rows, write_csv, write_jsonl
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner, Result

import dptune
from dptune.cli import app
from dptune.cli.console import set_up_logs
from dptune.core.errors import ConfigError, DataError
from dptune.generation import decoding
from dptune.generation.decoding import Continuation, Decoding
from dptune.job import scoring
from dptune.job.delivery.verification import check_deliverable
from dptune.job.scoring import references_of, score_adapter
from dptune.records.reading.read import read
from dptune.records.reading.source import RecordSource
from dptune.training.evaluation import perplexity
from dptune.training.models.model import ModelSource, load_tokenizer
from dptune.training.tokens.encoding import tokens_of

pytest.importorskip("sacrebleu")
pytest.importorskip("rouge_score")
PAIRS = [{"mr": f"{n} red cat", "ref": f" {word} dog."} for n in range(30) for word in ("blue", "old")]
LABELLED = [row | {"label": n % 2} for n, row in enumerate(rows(40))]


@lru_cache(maxsize=1)
def adapter() -> Path:
    found = dptune.tune(str(checkpoint()), PAIRS, epsilon=8, prompt="mr", completion="ref", **QUICK)
    return found.folder / "adapter"


def command(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["score", *arguments])


def test_rows_of_one_prompt_are_references_of_one_input(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "test.csv", PAIRS[:8])
    told = command(
        str(adapter().parent), "--model", str(checkpoint()), "--data", str(path), "--prompt", "mr",
        "--completion", "ref", "--beams", "3", "--max-new-tokens", "6", "--outputs", str(tmp_path / "out.jsonl"),
        "--json",
    )  # fmt: skip
    assert told.exit_code == 0, told.output
    found = json.loads(told.stdout)
    assert (found["inputs"], found["references"]) == (4, 8)
    assert 0 <= found["bleu_e2e"] <= 100
    assert "nrefs:2|case:lc" in found["bleu_e2e_is"]
    assert found["decoding_is"] == "3 beams, length penalty 1, at most 6 tokens"
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["prompt"] for line in lines] == [f"{n} red cat" for n in range(4)]
    assert (tmp_path / "out.jsonl").stat().st_mode & 0o777 == 0o600


def test_references_are_grouped_in_order_with_white_space_collapsed() -> None:
    source = RecordSource([{"prompt": "b", "completion": " x  y"}, {"prompt": "a", "completion": "z"}] * 2)
    assert references_of(read(source)) == {"b": ["x y", "x y"], "a": ["z", "z"]}
    said = "row 1: is a text, as not all records are, and scores of what an adapter writes need.*or give only texts"
    with pytest.raises(DataError, match=said):
        references_of(read(RecordSource([{"text": "a"}])))
    with pytest.raises(DataError, match="row 1: is a chat, and scores"):
        references_of(read(RecordSource([{"messages": [{"role": "user", "content": "a"}]}])))


def test_chats_are_scored_by_their_last_answers(tmp_path: Path) -> None:
    """Chats that differ in the last answer alone are one input; the model reads all that stands before it."""
    said = [[*turns("red cat", "blue dog."), *turns("new cat", last)] for last in ("new dog.", "old dog.")]
    learned = [{"messages": turns(f"{n} red cat", "blue dog.")} for n in range(40)]
    tuned = dptune.tune(str(checkpoint()), learned, epsilon=8, **QUICK).folder
    path, out = write_jsonl(tmp_path / "test.jsonl", [{"messages": one} for one in said]), tmp_path / "out.jsonl"
    given = [str(tuned), "--model", str(checkpoint()), "--data", str(path), "--max-new-tokens", "4", "--json"]
    told = command(*given, "--outputs", str(out))
    assert told.exit_code == 0, told.output
    found = json.loads(told.stdout)
    assert (found["inputs"], found["references"]) == (1, 2)
    (line,) = (json.loads(line) for line in out.read_text().splitlines())
    assert line["prompt"] == "red catblue dog.<|endoftext|>new cat"
    (answer,) = decoded(tuned / "adapter", line["prompt"])
    assert line["output"] == answer
    assert "other texts" not in told.stderr
    write_jsonl(path, [{"talk": one} for one in said])
    assert json.loads(command(*given, "--messages", "talk").stdout) == found
    parts = [{"prompt": one[:-1], "completion": one[-1:]} for one in said]
    told = command(*given[:3], "--data", str(write_jsonl(path, parts)), *given[5:])
    assert json.loads(told.stdout) == found
    assert "other texts" not in told.stderr, "chats are chats, however a row holds them"
    columns = ("--prompt", "mr", "--completion", "ref")
    told = command(*given[:3], "--data", str(write_jsonl(path, PAIRS)), *columns, *given[5:])
    assert "was tuned on chats, and these records are prompts with completions: other texts" in told.stderr
    write_jsonl(path, [{"messages": said[0]}, {"messages": said[0][:-1]}])
    told = command(*given)
    assert told.exit_code == 2
    assert "test.jsonl, row 2, column 'messages': the chat does not end in an assistant's text" in told.stderr
    write_jsonl(path, [{"talk": said[0]}, {"talk": said[0][:-1]}])
    told = command(*given, "--messages", "talk")
    assert "test.jsonl, row 2, column 'talk': the chat does not end in an assistant's text" in told.stderr


def test_a_prompt_that_leaves_no_room_is_named_by_its_row_before_weights_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_weights(*_: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(scoring, "load_base", no_weights)
    long = [{"mr": "z" * 22, "ref": "a"}, {"mr": "z" * 22, "ref": "b"}]
    path = write_csv(tmp_path / "test.csv", [*PAIRS, *long, *PAIRS])
    data = ("--data", str(path), "--prompt", "mr", "--completion", "ref")
    told = refused(adapter(), checkpoint(), *data, "--max-new-tokens", "4")
    assert f"--max-new-tokens: 4 beside a prompt of 22 tokens ({path}, row {len(PAIRS) + 2}) is more than" in told
    write_csv(path, [*PAIRS, {"mr": "", "ref": "a"}, *PAIRS])
    told = refused(adapter(), checkpoint(), *data, "--max-new-tokens", "4")
    assert f"holds one without a token ({path}, row {len(PAIRS) + 2})" in told


def test_the_ends_of_answers_reach_the_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And prompts of chats are not read as texts are, before which tokenizers put tokens of their own."""
    learned = [{"messages": turns(f"{n} red cat", "blue dog.")} for n in range(40)]
    tuned = dptune.tune(str(checkpoint()), learned, epsilon=8, **QUICK).folder / "adapter"
    seen: list[Any] = []

    def played(model: Any, tokenizer: Any, prompts: list[list[int]], *given: Any) -> list[Continuation]:
        seen.append((tokenizer.batch_decode(prompts), given[-1] == [tokenizer.eos_token_id]))
        return [Continuation("Blue dog.", 2, True) for _ in prompts]

    monkeypatch.setattr(decoding, "continuations", played)
    monkeypatch.setattr(decoding, "open_ids", None)
    base = ModelSource(str(checkpoint()))
    source = RecordSource([{"messages": turns("new cat", "blue dog.")}])
    found = score_adapter(tuned, base, source, decoding=Decoding(max_new_tokens=4), metrics=["bleu_e2e"])
    assert seen == [(["new cat"], True)]
    assert found.outputs == {"new cat": "Blue dog."}


def turns(*said: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant"), said, strict=True)]


def decoded(adapter: Path, prompt: str) -> list[str]:
    """Greedy, by PEFT and transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(checkpoint()), adapter)
    asked = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
    found = model.generate(**asked, max_new_tokens=4, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    texts = tokenizer.batch_decode(found[:, asked["input_ids"].shape[1] :], skip_special_tokens=True)
    return [text.strip() for text in texts]


def test_texts_are_scored_by_perplexity_with_the_adapter_and_without(tmp_path: Path) -> None:
    """Records that were held out have the perplexity that tuning told, and long ones are not cut."""
    tuned = dptune.tune(str(checkpoint()), rows(40), epsilon=8, text="text", max_length=20, **QUICK).folder
    path = write_csv(tmp_path / "test.csv", rows(6))
    arguments = [str(tuned), "--model", str(checkpoint()), "--data", str(path), "--text", "text"]
    told = command(*arguments, "--json")
    assert told.exit_code == 0, told.output
    found = json.loads(told.stdout)
    assert found["inputs"] == 6
    assert found["perplexity_is"].startswith(
        "6 blocks of at most 19 tokens of one text, each read on its own; all but a "
    )
    assert found["untuned_perplexity"] != found["perplexity"]
    base = AutoModelForCausalLM.from_pretrained(checkpoint()).eval()
    tokens = tokens_of(read(RecordSource(rows(6), text="text")), load_tokenizer(ModelSource(str(checkpoint()))), 20)
    assert found["untuned_perplexity"] == pytest.approx(perplexity(base, tokens, 4), rel=1e-6)
    shorter = json.loads(command(*arguments, "--json", "--block", "3").stdout)
    assert shorter["perplexity_is"].startswith(f"{sum(-(-len(row) // 3) for row in tokens.rows)} blocks of at most 3 ")
    assert shorter["untuned_bits_per_byte"] > 0
    told = command(*arguments, "--outputs", str(tmp_path / "out"))
    assert "warning: texts are scored by their perplexity" in told.stderr
    assert not (tmp_path / "out").exists()
    line = refused(tuned, checkpoint(), *arguments[3:], "--beams", "2")
    assert line.startswith("error: --beams: is about what an adapter writes, and these records are texts, scored by"), (
        line
    )
    line = refused(tuned, checkpoint(), *arguments[3:], "--block", "25")
    assert line == "error: --block: 25 is above 24, the most tokens that the model reads. Fix: give fewer."
    for block in ("1", "0"):
        line = refused(tuned, checkpoint(), *arguments[3:], "--block", block)
        assert line == f"error: --block: {block} tokens leave nothing to predict. Fix: give 2 or more."
    line = refused(tuned, checkpoint(), *arguments[3:], "--rows", "0")
    assert line == "error: --rows: 0 is not a number of rows. Fix: use 16, or 1 where memory is short."
    data = ["--data", str(write_csv(tmp_path / "pairs.csv", PAIRS[:4])), "--prompt", "mr", "--completion", "ref"]
    line = refused(adapter(), checkpoint(), *data, "--block", "8")
    assert line.startswith("error: --block: is about texts, and these records are prompts with targets"), line


def test_a_classifier_is_scored_by_its_labels(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "test.csv", LABELLED)
    told = command(str(classifier()), "--model", str(checkpoint()), "--data", str(path), "--text", "text", "--json")
    assert told.exit_code == 0, told.output
    scores = json.loads(told.stdout)
    assert scores["inputs"] == 40
    assert scores["constant_answer_accuracy"] == 0.5
    accuracy = scores["accuracy"]
    assert scores["accuracy_standard_error"] == pytest.approx((accuracy * (1 - accuracy) / 40) ** 0.5)
    told = command(str(classifier()), "--model", str(checkpoint()), "--data", str(path), "--text", "text")
    assert all(name in told.stdout for name in scores if name != "not_covered")
    assert ("No better than a constant answer" in told.stdout) is (scores["accuracy"] <= 0.5 + 0.5 / 40**0.5)


@lru_cache(maxsize=1)
def classifier() -> Path:
    """An adapter of a classifier of columns text and label."""
    settings = {"task": "classify", "epsilon": 8, "text": "text", "max_length": 20, "telemetry": "private"}
    return dptune.tune(str(checkpoint()), LABELLED, labels=("0", "1"), **settings, **QUICK).folder / "adapter"


def refused(folder: Path, base: Path, *arguments: str) -> str:
    """The last line of a command that ends with status 2."""
    done = command(str(folder), "--model", str(base), *arguments)
    assert done.exit_code == 2, done.output
    return str(done.stderr.strip().splitlines()[-1])


def other_base(folder: Path, **config: int) -> Path:
    """The tiny checkpoint with another shape, and random weights."""
    shutil.copytree(checkpoint(), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint(), **config)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["classifier", "writer"])
def test_a_base_that_is_not_the_adapters_is_refused_by_the_name_of_its_own(kind: str, tmp_path: Path) -> None:
    folder = as_earlier(classifier() if kind == "classifier" else adapter(), tmp_path / "earlier")
    asked = ["--prompt", "mr", "--completion", "ref", "--max-new-tokens", "4"]
    columns = ["--text", "text"] if kind == "classifier" else asked
    records = LABELLED if kind == "classifier" else PAIRS
    data = ["--data", str(write_csv(tmp_path / "test.csv", records)), *columns]
    for shape in ({"n_embd": 32}, {"n_layer": 2}, {"vocab_size": 256}):
        line = refused(folder, other_base(tmp_path / "other" / str(shape), **shape), *data)
        assert line.startswith("error: --model: "), line
        assert "does not fit the adapter, which was tuned on tiny (" in line
        assert line.endswith("Fix: give tiny.")
    llama = tmp_path / "llama"
    shutil.copytree(checkpoint(), llama, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=400, **sizes)).save_pretrained(llama)
    line = refused(folder, llama, *data)
    assert "does not fit the adapter, which was tuned on tiny (it lacks the adapter's layers). Fix: give tiny." in line


def test_a_base_of_another_name_is_scored_with_a_warning(tmp_path: Path) -> None:
    shutil.copytree(checkpoint(), tmp_path / "renamed")
    data = str(write_csv(tmp_path / "test.csv", LABELLED))
    for folder, warned in ((classifier(), False), (as_earlier(classifier(), tmp_path / "earlier"), True)):
        done = command(str(folder), "--model", str(tmp_path / "renamed"), "--data", data, "--text", "text")
        assert done.exit_code == 0, done.output
        assert ("warning: the adapter was tuned on tiny, and the model is renamed" in done.stderr) == warned


@pytest.mark.parametrize("option", [["--metrics", "bleu"], ["--beams", "2"], ["--outputs", "out.jsonl"], ["--sample"]])
def test_what_is_about_writing_is_refused_for_a_classifier(option: list[str], tmp_path: Path) -> None:
    data = str(write_csv(tmp_path / "test.csv", LABELLED))
    line = refused(classifier(), checkpoint(), "--data", data, "--text", "text", *option)
    assert line.startswith(f"error: {option[0]}: is about what an adapter writes, and this one is a classifier"), line


@pytest.mark.parametrize("option", [["--seed", "5"], ["--length-penalty", "2"]])
def test_options_that_would_have_no_effect_are_refused(option: list[str], tmp_path: Path) -> None:
    line = refused(adapter(), checkpoint(), "--data", str(write_csv(tmp_path / "t.csv", PAIRS)), *option)
    assert line.startswith(f"error: {option[0]}: is for "), line
    assert line.endswith(", or leave it out.")


@pytest.mark.long
def test_a_classifier_is_scored_without_reports_that_mislead(tmp_path: Path) -> None:
    """The head that the checkpoint lacks is the adapter's, and needs no training on a task."""
    data = str(write_csv(tmp_path / "test.csv", LABELLED))
    command = ["score", str(classifier()), "--model", str(checkpoint()), "--data", data, "--text", "text"]
    done = subprocess.run([sys.executable, "-m", "dptune.cli", *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for said in ("LOAD REPORT", "downstream task", "gemm_4bit_forward"):
        assert said not in done.stderr


def test_a_warning_of_a_kernel_that_is_not_used_is_hidden_and_others_are_not() -> None:
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    set_up_logs()
    for message, shown in (
        ("Failed to load CPU gemm_4bit_forward from %s", False),
        ("the library is broken: %s", True),
    ):
        record = logger.makeRecord(logger.name, logging.WARNING, "ops.py", 1, message, ("kernels",), None)
        assert bool(logger.filter(record)) is shown


def test_texts_that_are_made_of_other_columns_than_in_training_are_noticed(tmp_path: Path) -> None:
    """Without --text a table is written out column by column, which gives other texts to score."""
    assert json.loads((classifier() / "records.json").read_text()) == {"form": "label", "tokens": 18, "way": "text"}
    renamed = [{"content": row["text"], "label": row["label"]} for row in LABELLED]
    data = ["--data", str(write_csv(tmp_path / "test.csv", renamed))]
    line = refused(classifier(), checkpoint(), *data)
    assert "--text: is missing: the adapter was tuned on texts of one column, and these rows would be all" in line
    given = ["--model", str(checkpoint()), *data]
    done = command(str(classifier()), *given, "--template", "{content}!")
    assert done.exit_code == 0, done.output
    assert "warning: the adapter was tuned on texts of one column, and these records are texts of a t" in done.stderr
    done = command(str(classifier()), *given, "--text", "content")
    assert done.exit_code == 0, done.output
    assert "warning" not in done.stderr


def test_a_heads_template_is_kept_and_another_one_is_noticed(tmp_path: Path) -> None:
    rows, notes = [{"a": row["text"], "b": "old", "label": row["label"]} for row in LABELLED], list[str]()
    settings = {"task": "classify", "epsilon": 8, "max_length": 20, "labels": ("0", "1")}
    tuned = dptune.tune(str(checkpoint()), rows, template="{a} {b}.", **settings, **QUICK)
    folder = tuned.folder / "adapter"
    assert json.loads((folder / "records.json").read_text())["template"] == "{a} {b}."
    code = (folder / "README.md").read_text().split("```python")[1].split("```")[0].replace("this folder", str(folder))
    exec(code.replace(f'"{checkpoint().name}"', repr(str(checkpoint()))), found := dict[str, object]())
    assert found["text"] == "a text a text."
    check_deliverable(folder)
    for template in ("{a} {b}.", "{b} {a}.", "{a}."):
        source = RecordSource(rows[:4], label="label", template=template)
        score_adapter(folder, ModelSource(str(checkpoint())), source, warn=notes.append)
    data = ["--data", str(write_csv(tmp_path / "test.csv", rows))]
    line = refused(folder, checkpoint(), *data)
    assert line.startswith("error: --template: is missing: the adapter was tuned on texts of a template"), line
    assert line.endswith("; the one of the training is '{a} {b}.'."), line
    assert [note.split(" have ")[1] for note in notes] == [
        "'{b} {a}.': other texts, maybe",
        "'{a}.': other texts, maybe",
    ]


def test_a_benchmark_whose_texts_are_written_otherwise_than_in_training_is_noticed(tmp_path: Path) -> None:
    lines = [f"{n}\t{n} red\tcat.\t{'not_' * (n % 2)}entailment" for n in range(40)]
    for part in ("train", "dev"):
        (tmp_path / f"{part}.tsv").write_text("\n".join(["index\tquestion\tsentence\tlabel", *lines]))
    pair = ["--source-set", "template={first}</s></s>{second}"]
    rows = ["--model", str(checkpoint()), "--source", "glue", "--source-set", f"path={tmp_path}"]
    rows += ["--source-set", "task=qnli"]
    limits = ["--epsilon", "8", "--max-length", "20", "--rank", "2", "--expected-batch-size", "8", "--epochs", "1"]
    out, labels = ["--out", str(tmp_path / "out")], "entailment,not_entailment"
    done = CliRunner().invoke(app, ["tune", *rows, *pair, "--task", "classify", "--labels", labels, *limits, *out])
    assert done.exit_code == 0, done.output
    for given, warned in ((pair, False), ([], True)):
        told = command(str(tmp_path / "out" / "adapter"), *rows, *given, "--source-set", "part=dev")
        assert told.exit_code == 0, told.output
        said = "--source-set template '{first}</s></s>{second}', and these texts have the default: other texts, maybe"
        assert (said in " ".join(told.stderr.split())) is warned
        assert ("warning" in told.stderr) is warned


def test_prompts_for_an_adapter_of_whole_texts_are_scored_with_a_warning(tmp_path: Path) -> None:
    folder = shutil.copytree(adapter(), tmp_path / "adapter")
    said = folder / "records.json"
    assert json.loads(said.read_text())["way"] == "pair"
    source = RecordSource(PAIRS[:2], prompt="mr", completion="ref")
    notes: list[str] = []
    (folder / "README.md").unlink()  # it names the file's digest
    for told in ({"form": "text", "tokens": 23, "way": "text"}, {"form": "text", "tokens": 23}):
        said.write_text(json.dumps(told))
        short = Decoding(max_new_tokens=4)
        score_adapter(
            folder, ModelSource(str(checkpoint())), source, decoding=short, metrics=["chrf"], warn=notes.append
        )
    no_card, note, again = notes  # an earlier version did not say
    assert no_card == again == f"{folder} has no card of dptune's, so it is unknown whether its files come from the run"
    assert note.startswith("the adapter was tuned on texts of one column, and these records are prompts with")


def test_a_label_that_was_never_learned_is_named_with_a_fix_that_score_has(tmp_path: Path) -> None:
    data = str(write_csv(tmp_path / "test.csv", [*LABELLED[:3], LABELLED[3] | {"label": 2}]))
    line = refused(classifier(), checkpoint(), "--data", data, "--text", "text")
    assert "test.csv, row 5, column 'label': '2' is not one of the labels 0, 1. Fix: mend it, or leave out" in line


def swap_labels(folder: Path) -> None:
    (folder / "labels.json").write_text('["1", "0"]')


def add_words(folder: Path) -> None:
    (folder / "words.json").write_text('{"words": {"0": "dog", "1": "cat"}, "template": null}')


def lose_labels(folder: Path) -> None:
    (folder / "labels.json").unlink()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (swap_labels, "labels.json: is not the file that the run delivered. Fix: take the whole folder"),
        (add_words, "words.json: is not a file that the run delivered"),
        (lose_labels, "labels.json: is missing"),
    ],
)
def test_a_folder_whose_files_are_not_those_of_its_card_is_refused(
    change: Callable[[Path], None], said: str, tmp_path: Path
) -> None:
    """Whoever swaps the names in labels.json would otherwise be told the accuracy of the wrong answers."""
    folder, data = shutil.copytree(classifier(), tmp_path / "adapter"), str(write_csv(tmp_path / "t.csv", LABELLED))
    change(folder)
    line = refused(folder, checkpoint(), "--data", data, "--text", "text")
    assert f"{folder}/{said}" in line
    (folder / "README.md").unlink()
    if change is swap_labels:
        done = command(str(folder), "--model", str(checkpoint()), "--data", data, "--text", "text")
        assert "has no card of dptune's" in " ".join(done.stderr.split())


@pytest.mark.parametrize("columns", [["--prompt", "mr", "--completion", "ref"], ["--text", "mr"]])
def test_a_column_of_labels_for_an_adapter_that_writes_is_refused(columns: list[str], tmp_path: Path) -> None:
    data = ["--data", str(write_csv(tmp_path / "test.csv", PAIRS))]
    line = refused(adapter(), checkpoint(), *data, *columns, "--label", "ref")
    assert line.startswith("error: --label: is about a classifier, but this adapter is not one"), line
    assert "adapter_config.json" in refused(tmp_path, checkpoint(), *data, *columns, "--label", "ref")


def test_mauve_is_read_by_the_model_that_is_named(tmp_path: Path) -> None:
    pytest.importorskip("mauve")
    many = [{"mr": f"a {n}", "ref": f"b {n}"} for n in range(100)]
    columns = ("--prompt", "mr", "--completion", "ref", "--max-new-tokens", "2")
    data = ("--data", str(write_csv(tmp_path / "test.csv", many)), *columns)
    judged = ("--mauve-model", str(checkpoint()))
    done = command(str(adapter()), "--model", str(checkpoint()), *data, "--metrics", "chrf, mauve", *judged)
    assert done.exit_code == 0, done.output
    assert "features:tiny, last token|texts:100 of each" in done.stdout
    assert str(checkpoint()) not in done.stdout
    for given, said in (
        (("--metrics", "mauve"), "error: --mauve-model: mauve needs a model that reads the texts. Fix: name one"),
        (judged, "error: --mauve-model: is used only by the metric mauve"),
        (("--metrics", "mauve", "--mauve-model", "some/hub"), "error: --mauve-revision: 'some/hub'"),
        (("--mauve-revision", "0" * 40), "error: --mauve-revision: is given without --mauve-model"),
        ((*judged, "--mauve-revision", "0" * 40), "error: --mauve-revision: is given, and --mauve-model is a folder"),
        (("--metrics", "mauve", "--mauve-model", str(tmp_path)), "holds no config.json"),
    ):
        assert said in refused(adapter(), checkpoint(), *data, *given)


def test_rows_without_labels_for_a_classifier_are_said_to_have_none() -> None:
    rows = [{"prompt": "a", "completion": "b", "mr": "c"}]
    said = r"^benchmark e2e, row 1, column 'label': this column does not exist, so these rows have no labels\. Fix: "
    with pytest.raises(DataError, match=said):
        score_adapter(classifier(), ModelSource(str(checkpoint())), RecordSource(rows, made_by={"source": "e2e"}))


def test_wrong_input_is_named(tmp_path: Path) -> None:
    base, source = ModelSource(str(checkpoint())), RecordSource(PAIRS, prompt="mr", completion="ref")
    with pytest.raises(ConfigError, match=r"holds no adapter_config\.json"):
        score_adapter(tmp_path, base, source)
    with pytest.raises(ConfigError, match="'bertscore' is unknown"):
        score_adapter(adapter(), base, source, metrics=["bertscore"])
