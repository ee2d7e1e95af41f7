"""``dptune sample``: texts that a verified adapter writes, their card, and what is refused before any is written."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from killed_process import killed_at_each_call
from peft import PeftModel
from tiny_tuning import CHAT, QUICK, as_earlier, checkpoint, rows, write_csv, write_jsonl
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner, Result

import dptune
from dptune.cli import app
from dptune.core.errors import ConfigError
from dptune.core.files import sha256
from dptune.generation import decoding
from dptune.generation.decoding import Continuation
from dptune.job import sampling
from dptune.job.delivery.adapter_loading import load_adapter
from dptune.job.delivery.deliverable import write_card
from dptune.job.delivery.finished_adapter import open_adapter
from dptune.job.delivery.verification import CardError, check_deliverable
from dptune.job.result import RunResult
from dptune.job.sampling import Sampled, summary_of
from dptune.privacy.ledger import Ledger
from dptune.privacy.ledger_file import read_ledger
from dptune.privacy.release import Release
from dptune.privacy.run_header import RunHeader
from dptune.records.reading.read import read
from dptune.records.reading.record import Chat, PromptTarget, Text
from dptune.records.reading.source import RecordSource
from dptune.training.models.model import ModelSource, load_base

PROMPTS = ["red cat", "old cat ", "new dog"]


@lru_cache(maxsize=1)
def texts_adapter() -> Path:
    """Tuned on whole texts, and on how they begin."""
    found = dptune.tune(checkpoint(), rows(), epsilon=8, unit="customer_id", add_bos_token=True, **QUICK)
    return found.folder / "adapter"


@lru_cache(maxsize=1)
def pairs_adapter() -> Path:
    pairs = [{"mr": f"{n} red cat", "ref": " blue dog."} for n in range(40)]
    found = dptune.tune(checkpoint(), pairs, epsilon=8, prompt="mr", completion="ref", **QUICK)
    return found.folder / "adapter"


@lru_cache(maxsize=1)
def chats_adapter() -> Path:
    said = [
        [{"role": "user", "content": f"{n} red cat"}, {"role": "assistant", "content": "Old dog."}] for n in range(40)
    ]
    return dptune.tune(checkpoint(), [{"messages": one} for one in said], epsilon=8, **QUICK).folder / "adapter"


def command(adapter: Path, *arguments: str, model: Path | None = None) -> Result:
    given = ["sample", str(adapter), "--model", str(model or checkpoint()), *arguments]
    return CliRunner().invoke(app, given)


def refused(adapter: Path, *arguments: str, model: Path | None = None) -> str:
    """The last line of a command that ends with status 2 and leaves nothing in the current folder."""
    before = sorted(Path.cwd().iterdir())
    done = command(adapter, *arguments, model=model)
    assert done.exit_code == 2, done.output
    assert "Traceback" not in done.output
    assert sorted(Path.cwd().iterdir()) == before
    return str(done.stderr.strip().splitlines()[-1])


def changed(adapter: Path, folder: Path, change: Callable[[Path], None]) -> Path:
    """A copy with a change, and a card that says what its files say."""
    copy = folder / "changed"
    shutil.copytree(adapter, copy)
    change(copy)
    write_card(copy, RunResult({}, {}, base="tiny"))
    check_deliverable(copy)
    return copy


@pytest.fixture(autouse=True)
def _there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def test_texts_are_written_with_a_card_and_can_be_tuned_on(tmp_path: Path) -> None:
    done = command(texts_adapter(), "--records", "30", "--out", "new/synthetic.jsonl", "--json")
    assert done.exit_code == 0, done.output
    out, said = Path("new/synthetic.jsonl"), json.loads(done.stdout)
    assert sorted(path.name for path in out.parent.iterdir()) == ["synthetic.jsonl", "synthetic.md"]
    assert {path.stat().st_mode & 0o777 for path in out.parent.iterdir()} == {0o600}
    lines = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert [list(line) for line in lines] == [["text"]] * 30
    distinct = len({line["text"] for line in lines})
    assert said["texts"] == 30
    assert said["share_duplicates"] == pytest.approx(1 - distinct / 30)
    assert 0 <= said["share_ended"] <= 1
    contents = read_ledger(texts_adapter() / "ledger.jsonl")
    assert (said["epsilon_certified"], said["delta"]) == (contents.epsilons.certified, contents.header.delta)
    records = read(RecordSource(out))
    assert [record.content for record in records] == [Text(line["text"]) for line in lines]
    data = str(write_csv(tmp_path / "records.csv", rows()))
    for arguments in (
        ["--data", str(out), "--epsilon", "50"],
        ["--data", data, "--public", str(out), "--epsilon", "8"],
    ):
        again = ["tune", "--model", str(checkpoint()), *arguments, "--dry-run"]
        tuned = CliRunner().invoke(app, again)
        assert tuned.exit_code == 0, tuned.output


def test_the_card_has_the_adapters_guarantee_and_says_what_adds_up() -> None:
    found = dptune.sample(texts_adapter(), checkpoint(), 5, top_p=0.9, seed=3)
    card = found.save("some.jsonl").with_suffix(".md").read_text("utf-8")
    own = (texts_adapter() / "README.md").read_text("utf-8").partition("Not covered:")[0]
    for name in ("epsilon_certified", "epsilon_published", "delta", "unit", "neighbours", "units", "mechanism"):
        (line,) = (line for line in own.splitlines() if line.startswith(f"| {name} |"))
        assert line in card.splitlines()
    for digest in ("ledger.jsonl", "adapter_model.safetensors"):
        (line,) = (line for line in own.splitlines() if line.startswith(f"| {digest} |"))
        assert line.replace(digest, f"the adapter's {digest}") in card.splitlines()
    assert card.startswith("# SYNTHETIC texts: some.jsonl\n")
    assert "| decoding | sampled: temperature 1, top_p 0.9, seed 3, at most 22 tokens |" in card
    assert "| texts | 5 |" in card
    assert f"| some.jsonl | SHA-256 {dptune.core.files.sha256(Path('some.jsonl'))} |" in card
    assert "- Other adapters from the same records: their epsilons and deltas add up." in card
    assert "Sampling is post-processing: it read the adapter, and no record." in card
    assert "**add to** those above" in card
    assert "seed of the draws need not be secret" in card
    assert "prompts" not in card.partition("## Use")[0]
    assert str(texts_adapter().parent) not in card
    assert str(checkpoint().parent) not in card


def test_a_seed_gives_the_same_texts_and_another_one_others() -> None:
    first, again, other = (dptune.sample(texts_adapter(), checkpoint(), 8, seed=seed).rows for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_prompts_are_used_in_turn_and_stay_as_they_are() -> None:
    path = write_jsonl(Path("prompts.jsonl"), [{"mr": prompt} for prompt in PROMPTS])
    done = command(pairs_adapter(), "--prompts", str(path), "--prompt", "mr", "--records", "7", "--max-new-tokens", "6")
    assert done.exit_code == 0, done.output
    records = [record.content for record in read(RecordSource("synthetic.jsonl"))]
    assert all(isinstance(content, PromptTarget) for content in records)
    assert [content.prompt for content in records] == (PROMPTS * 3)[:7]
    card = Path("synthetic.md").read_text("utf-8")
    assert "| prompts | prompts.jsonl |" in card
    assert "The prompts, which this file shows as they were given: they must be public." in card
    once = dptune.sample(pairs_adapter(), checkpoint(), prompts=[{"prompt": prompt} for prompt in PROMPTS])
    assert [row["prompt"] for row in once.rows] == PROMPTS
    Path("lines.txt").write_text("red cat\nnew dog\n")
    assert [row["prompt"] for row in dptune.sample(pairs_adapter(), checkpoint(), prompts="lines.txt").rows] == [
        "red cat",
        "new dog",
    ]
    # 23 tokens are the most of a record, and the longest prompt takes some of them.
    longest = max(len(AutoTokenizer.from_pretrained(checkpoint())(prompt)["input_ids"]) for prompt in PROMPTS)
    assert f"at most {23 - longest} tokens" in once.settings["decoding"]


def test_chats_get_an_answer_and_can_be_tuned_on() -> None:
    """Each public chat is used in turn, and the model's answer is the last message of its row."""
    asked = [{"messages": [{"role": "user", "content": text}]} for text in ("red cat", "new dog")]
    path = write_jsonl(Path("asked.jsonl"), asked)
    done = command(chats_adapter(), "--prompts", str(path), "--records", "5", "--max-new-tokens", "6")
    assert done.exit_code == 0, done.output
    chats = [record.content for record in read(RecordSource("synthetic.jsonl"))]
    assert all(isinstance(chat, Chat) for chat in chats)
    assert [list(chat.messages[:-1]) for chat in chats] == [asked[n % 2]["messages"] for n in range(5)]
    assert {chat.messages[-1]["role"] for chat in chats} == {"assistant"}
    assert "| prompts | asked.jsonl |" in Path("synthetic.md").read_text("utf-8")
    named = write_jsonl(Path("other.jsonl"), [{"prompt": one["messages"]} for one in asked])
    found = dptune.sample(chats_adapter(), checkpoint(), prompts=str(named), prompt="prompt", seed=1)
    assert [row["messages"][:-1] for row in found.rows] == [one["messages"] for one in asked]
    assert found.written == [row["messages"][-1]["content"] for row in found.rows]


TOOLING = "{% if tools %}{{ tools[0].function.name }}: {% endif %}"


def test_a_chat_is_sampled_as_training_would_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model reads the tokens of the template, tools included, and none that the tokenizer puts before texts.

    The template's own token ends an answer. A row keeps what stands beside its messages, and a time in it as text.
    """

    def with_tools(folder: Path) -> None:
        (folder / "chat_template.jinja").write_text(f"{TOOLING}{CHAT}")

    own = changed(chats_adapter(), tmp_path, with_tools)
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    said = [{"role": "user", "content": "red cat", "at": datetime(2026, 1, 2)}]
    seen: list[Any] = []

    def played(model: Any, tokenizer: Any, prompts: list[list[int]], *given: Any) -> list[Continuation]:
        seen.append((tokenizer.batch_decode(prompts), given[-1]))
        return [Continuation(" old dog. ", 1, True) for _ in prompts]

    monkeypatch.setattr(sampling, "continuations", played)
    monkeypatch.setattr(sampling, "open_ids", None)
    found = dptune.sample(own, checkpoint(), prompts=[{"messages": said, "tools": tools}])
    eos = AutoTokenizer.from_pretrained(own).eos_token_id
    assert seen == [(["look: red cat"], [eos])]
    assert [list(row) for row in found.rows] == [["tools", "messages"]]
    assert found.written == ["old dog."]
    row = json.loads(found.save("synthetic.jsonl").read_text("utf-8"))
    assert row["messages"] == [said[0] | {"at": "2026-01-02 00:00:00"}, {"role": "assistant", "content": "old dog."}]
    assert read(RecordSource("synthetic.jsonl"))[0].content.stored["inputs"] == {"tools": tools}


def test_chats_that_cannot_be_answered_are_refused() -> None:
    assert "--prompts: are missing: the adapter was tuned on chats. Fix: give public chats" in refused(
        chats_adapter(), "--records", "3"
    )
    said = [{"role": "user", "content": "red cat"}, {"role": "assistant", "content": "blue dog."}]
    whole = write_jsonl(Path("whole.jsonl"), [{"messages": said[:1]}, {"messages": said}])
    told = refused(chats_adapter(), "--prompts", str(whole))
    assert "whole.jsonl, row 2, column 'messages': the chat ends in an answer. Fix: leave its last message out" in told
    halves = write_jsonl(Path("halves.jsonl"), [{"prompt": said[:1], "completion": said[1:]}])
    told = refused(chats_adapter(), "--prompts", str(halves))
    assert "columns 'prompt' and 'completion': the chat ends in an answer. Fix: name prompt as --prompt and no" in told
    talks = write_jsonl(Path("talks.jsonl"), [{"conversations": said}])
    told = refused(chats_adapter(), "--prompts", str(talks), "--prompt", "conversations")
    assert "talks.jsonl, row 1, column 'conversations': the chat ends in an answer" in told
    Path("lines.txt").write_text("red cat\nnew dog\n")
    told = refused(chats_adapter(), "--prompts", "lines.txt")
    assert "lines.txt, row 1: is no chat, and the adapter was tuned on chats. Fix: write it as" in told


def test_a_summary_counts_by_hand() -> None:
    texts = ["a cat", "a cat", "a dog", "a cat "]
    found = [
        Continuation(text, tokens, ended)
        for text, tokens, ended in zip(texts, (2, 2, 5, 3), (True, True, False, True), strict=True)
    ]
    assert summary_of([{"text": text} for text in texts], found, again=2) == {
        "texts": 4,
        "mean_tokens": 3.0,
        "mean_characters": 5.25,
        "share_duplicates": 0.25,  # a space more is another text
        "share_ended": 0.75,
        "drawn_again": 2,
    }
    pairs = [{"prompt": prompt, "completion": " x"} for prompt in ("a", "b", "a")]
    assert summary_of(pairs, [Continuation(" x", 1, True)] * 3)["share_duplicates"] == pytest.approx(1 / 3)


def test_what_says_nothing_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter(["a", " \n", "b\0", "c", "", "d"])

    def played(model: Any, tokenizer: Any, prompts: list[list[int]], *_: Any) -> list[Continuation]:
        return [Continuation(next(drawn), 1, True) for _ in prompts]

    monkeypatch.setattr(sampling, "continuations", played)
    found = dptune.sample(texts_adapter(), checkpoint(), 3)
    assert [row["text"] for row in found.rows] == ["a", "c", "d"]
    assert found.figures["drawn_again"] == 3
    monkeypatch.setattr(sampling, "continuations", lambda *given: [Continuation("", 0, True) for _ in given[2]])
    with pytest.raises(ConfigError, match="records: 3 of 3 texts are empty in each of 20 draws"):
        dptune.sample(texts_adapter(), checkpoint(), 3)


def test_the_folder_of_a_run_is_taken_for_its_adapter() -> None:
    found = open_adapter(texts_adapter().parent)
    assert (found.path, found.form, found.tokens, found.base) == (texts_adapter(), "text", 23, "tiny")
    assert open_adapter(pairs_adapter()).form == "pair"
    assert "| beginning-of-text token | added |" in (texts_adapter() / "README.md").read_text("utf-8")
    assert "beginning-of-text" not in (pairs_adapter() / "README.md").read_text("utf-8")


def test_an_adapter_that_never_learned_how_texts_begin_says_so(tmp_path: Path) -> None:
    out = tmp_path / "out"
    dptune.tune(checkpoint(), rows(), epsilon=8, unit="customer_id", out=out, **QUICK)
    done = command(out / "adapter", "--records", "3")
    assert done.exit_code == 0, done.output
    assert "nothing taught the adapter how texts begin" in done.stderr
    assert "--add-bos-token" in done.stderr
    assert "Note: nothing taught the adapter how texts begin" in Path("synthetic.md").read_text("utf-8")
    assert "nothing taught" not in command(texts_adapter(), "--records", "3", "--out", "b.jsonl").output


OPTIONS: dict[str, tuple[list[str], str, str]] = {
    "no number": ([], "--records: is missing", "give the number"),
    "prompts of nothing": (["--prompts", "p.jsonl"], "--prompts: are given, and the adapter was tuned on whole", "out"),
    "no such prompts": (["--prompts", "none.csv"], "none.csv: the file does not exist", "check the path"),
    "no records": (["--records", "0"], "--records", "--help"),
    "cold": (["--records", "3", "--temperature", "0"], "--temperature: 0.0 is not positive", "use 1"),
    "no share": (["--records", "3", "--top-p", "0"], "--top-p: 0.0 is not a share above 0", "use 1"),
    "a seed": (["--records", "3", "--seed", "-1"], "--seed: -1 is not in [0, 2147483647]", "use 0"),
    "beyond context": (["--records", "3", "--max-new-tokens", "24"], "--max-new-tokens: 24 beside a prompt", "lower"),
    "a device": (["--records", "3", "--device", "cuda:9"], "'cuda:9' cannot be used", "use cpu"),
    "another ending": (["--records", "3", "--out", "a.txt"], "--out: a.txt does not end in .jsonl", "use a.jsonl"),
    "a file": (["--records", "3", "--out", "p.jsonl"], "--out: p.jsonl exists", "another name"),
    "a card": (["--records", "3", "--out", "card.jsonl"], "--out: card.md exists", "another name"),
    "a file as folder": (["--records", "3", "--out", "p.jsonl/a.jsonl"], "--out: ", "path of a new file"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_wrong_option_is_named_with_its_fix(name: str) -> None:
    write_jsonl(Path("p.jsonl"), [{"prompt": "red"}])
    Path("card.md").write_text("mine")
    arguments, problem, fix = OPTIONS[name]
    line = refused(texts_adapter(), *arguments)
    assert problem in line, line
    assert fix in line.partition("Fix: ")[2], line
    assert Path("card.md").read_text() == "mine"


def test_an_adapter_of_prompts_needs_prompts_that_leave_room() -> None:
    assert "--prompts: are missing: the adapter was tuned on prompts" in refused(pairs_adapter(), "--records", "3")
    write_jsonl(Path("long.jsonl"), [{"prompt": one} for one in ("red", "z" * 23, "z" * 22)])
    told = refused(pairs_adapter(), "--prompts", "long.jsonl")
    assert "--prompts: has a prompt of 23 tokens (long.jsonl, row 2), and records had at most" in told
    told = refused(pairs_adapter(), "--prompts", "long.jsonl", "--max-new-tokens", "14")
    assert "--max-new-tokens: 14 beside a prompt of 23 tokens (long.jsonl, row 2) is more than the model's" in told
    write_jsonl(Path("longer.jsonl"), [{"prompt": one} for one in ("red", "z" * 30, "z" * 23)])
    for given in ((), ("--max-new-tokens", "1")):
        told = refused(pairs_adapter(), "--prompts", "longer.jsonl", *given)
        assert " of 30 tokens (longer.jsonl, row 2), and the model reads 24. Fix: shorten it." in told, given
    write_csv(Path("other.csv"), [{"question": "red"}])
    assert "column 'prompt': this column does not exist" in refused(pairs_adapter(), "--prompts", "other.csv")


def test_an_adapter_that_does_not_verify_is_refused(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(texts_adapter(), copy)
    card = copy / "README.md"
    card.write_text(card.read_text().replace("| epsilon_certified | 8 ", "| epsilon_certified | 1 "))
    assert "do not trust it" in refused(copy, "--records", "3")
    with pytest.raises(CardError):
        open_adapter(copy)
    assert "holds no adapter_config.json" in refused(tmp_path, "--records", "3")
    (copy / "ledger.jsonl").unlink()
    assert "holds no ledger.jsonl, which records what it cost" in refused(copy, "--records", "3")
    (copy / "labels.json").write_text('["a", "b"]')
    assert "is a classifier, which writes no texts" in refused(copy, "--records", "3")


def _cut_ledger(folder: Path) -> None:
    ledger = folder / "ledger.jsonl"
    ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:-1]))


def _of_no_form(folder: Path) -> None:
    (folder / "records.json").write_text('{"form": "poems", "tokens": 23}')


def test_a_run_without_an_end_and_other_forms_are_refused(tmp_path: Path) -> None:
    cut = Path(shutil.copytree(texts_adapter(), tmp_path / "cut"))
    _cut_ledger(cut)
    assert "has no end, so that more may have been released" in refused(cut, "--records", "3")
    copy = changed(texts_adapter(), tmp_path, _of_no_form)
    assert "says no form and tokens of records" in refused(copy, "--records", "3")


def test_an_adapter_of_an_earlier_version_is_told_how_long_texts_are(tmp_path: Path) -> None:
    copy = changed(texts_adapter(), tmp_path, lambda folder: (folder / "records.json").unlink())
    assert "--max-new-tokens: is missing, and an adapter of an earlier dptune" in refused(copy, "--records", "3")
    assert command(copy, "--records", "3", "--max-new-tokens", "5").exit_code == 0


def _leaky(folder: Path) -> None:
    path = folder / "ledger.jsonl"
    before = read_ledger(path)
    path.unlink()
    header = RunHeader("static", "gdp_clt", "published", None, 1e-3, "customer_id", 18, leaks=("a fixed noise seed",))
    ledger = Ledger.create(path, header, before.composition)
    (release,) = before.composition
    assert isinstance(release, Release)
    for _ in range(before.releases):
        ledger.charge(release)
    ledger.finish()
    ledger.close()


def test_without_a_guarantee_it_takes_a_word_and_the_card_says_so(tmp_path: Path) -> None:
    copy = changed(texts_adapter(), tmp_path, _leaky)
    line = refused(copy, "--records", "3")
    assert "has no certified epsilon (a fixed noise seed" in line
    assert "(--no-guarantee)" in line
    done = command(copy, "--records", "3", "--no-guarantee")
    assert done.exit_code == 0, done.output
    assert "SYNTHETIC, with NO GUARANTEE" in done.stdout
    card = Path("synthetic.md").read_text("utf-8")
    assert "| epsilon_certified | infinity (what is proved) |" in card
    assert "**NO GUARANTEE: " in card
    assert "post-processing" not in card
    assert "- Everything, for: a fixed noise seed." in card


def _other(folder: Path, **config: int) -> Path:
    """The checkpoint with another shape, and random weights."""
    shutil.copytree(checkpoint(), folder)
    (folder / "model.safetensors").unlink()
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint(), **config)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"n_embd": 32},
            "is not the tiny that the adapter was tuned on, though it is called so (its layers are of other",
        ),
        ({"n_layer": 2}, "is not the tiny that the adapter was tuned on, though it is called so (it has other layers)"),
        ({"vocab_size": 256}, "(it knows 256 tokens, and the adapter's tokenizer has token 299"),
    ],
)
def test_another_base_is_refused(config: dict[str, int], said: str, tmp_path: Path) -> None:
    earlier = as_earlier(texts_adapter(), tmp_path / "earlier")  # else the digest of the base tells
    line = refused(earlier, "--records", "3", model=_other(tmp_path / "tiny", **config))
    assert said in line, line
    assert line.startswith("error: --model: ")
    assert line.endswith("Fix: give the folder tiny with the files that it had when it was tuned.")


def test_a_base_of_another_name_is_noted(tmp_path: Path) -> None:
    shutil.copytree(checkpoint(), tmp_path / "renamed")
    assert dptune.sample(texts_adapter(), tmp_path / "renamed", 2).notes == ()  # its digest is the same
    found = dptune.sample(as_earlier(texts_adapter(), tmp_path / "earlier"), tmp_path / "renamed", 2)
    assert found.notes == ("the adapter was tuned on tiny, and the model is renamed",)


def test_a_stopped_run_leaves_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    batches, write = iter(range(3)), decoding._write

    def stopped(*given: Any) -> Any:
        if next(batches) == 2:
            raise KeyboardInterrupt
        return write(*given)

    monkeypatch.setattr(decoding, "_write", stopped)
    done = command(texts_adapter(), "--records", "10", "--batch", "2")
    assert done.exit_code == 130
    assert done.stderr.splitlines()[-1] == "stopped: no file was written; the same command makes the same texts"
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize("at", ["write_text", "os.replace"])
def test_a_write_that_fails_or_is_killed_leaves_no_texts(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Sampled([{"text": "a"}], {"texts": 1}, {}, open_adapter(texts_adapter()))

    replace = os.replace

    def full(*given: Any) -> None:
        if at == "os.replace" and str(given[1]).endswith(".md"):
            replace(*given)  # the card is there, and the texts are not
            return
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(f"dptune.job.sampling.{at}" if at == "write_text" else at, full)
        with pytest.raises(OSError, match="No space left"):
            found.save("a.jsonl")
    assert list(Path.cwd().iterdir()) == []
    found.save("a.jsonl")
    with pytest.raises(ConfigError, match=r"out: a\.jsonl exists"):
        found.save("a.jsonl")


def test_a_process_that_is_killed_at_any_call_leaves_texts_with_their_card_or_nothing_in_the_way() -> None:
    found = Sampled([{"text": "a"}], {"texts": 1}, {}, open_adapter(texts_adapter()))
    text, card = Path("a.jsonl"), Path("a.md")

    def clear() -> None:
        for path in Path.cwd().iterdir():
            path.unlink()

    orphans = 0
    for calls in killed_at_each_call(lambda: found.save(text), clear):
        if text.exists():
            assert f"SHA-256 {sha256(text)}" in card.read_text("utf-8"), calls
            continue
        orphans += card.exists()
        found.save(text)
        assert sorted(Path.cwd().iterdir()) == [text.absolute(), card.absolute()], calls
    assert orphans


def test_the_card_of_texts_that_were_moved_away_is_nobodys_orphan() -> None:
    found = Sampled([{"text": "a"}], {"texts": 1}, {}, open_adapter(texts_adapter()))
    found.save("a.jsonl").rename("elsewhere.jsonl")
    Path(".a.jsonl.host-1.partial").write_text("other texts")
    with pytest.raises(ConfigError, match=r"out: a\.md exists"):
        found.save("a.jsonl")


def test_texts_are_drawn_from_base_and_adapter_together() -> None:
    source = ModelSource(str(checkpoint()))
    loaded = load_adapter(texts_adapter(), source, load_base(source, torch.device("cpu")))
    base, ids = AutoModelForCausalLM.from_pretrained(checkpoint()), torch.tensor([[0, 5, 6, 7]])
    alone = base(ids).logits
    assert not torch.allclose(loaded(ids).logits, alone, atol=1e-3)
    assert torch.allclose(loaded(ids).logits, PeftModel.from_pretrained(base, texts_adapter())(ids).logits, atol=1e-5)
