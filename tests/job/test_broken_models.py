"""A model that cannot be loaded, or computes nothing, is refused by every door before anything is booked."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from broken_models import BROKEN, BY_HEADERS, WEIGHTS, shard
from safetensors.torch import load_file, save_file
from tiny_search import draws
from tiny_tuning import QUICK, checkpoint, rows, write_csv
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer
from typer.testing import CliRunner

import dptune
from dptune.cli import app
from dptune.cli.console import by_option
from dptune.core.errors import ConfigError
from dptune.job.base_model import open_base
from dptune.job.search.search import working_folder
from dptune.job.settings import TuneSettings
from dptune.privacy.spent_budgets.register import Register
from dptune.training.tokens.chat_template import check_template

GIVEN: dict[str, Any] = {"epsilon": 8, "delta": 1e-3, "unit": "customer_id"} | QUICK
SPACE = {"space": {"learning_rate": {"log_uniform": [0.001, 0.05]}}, "candidates": 2, "score": {"on": "held_out"}}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint(), tmp_path / "model"))


def nothing_is_booked(folder: Path) -> bool:
    """No register, no ledger, no certificate, no plan of a search."""
    kinds = ("spent.jsonl", "ledger.jsonl", "certificate.jsonl", "plan.json")
    return not [path for kind in kinds for path in folder.rglob(kind)]


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_model_is_refused_by_name_and_costs_nothing(name: str, model: Path, tmp_path: Path) -> None:
    change, said = BROKEN[name]
    change(model)
    with pytest.raises(ConfigError) as refused:
        dptune.tune(model, rows(), out=tmp_path / "out", **GIVEN)
    assert re.search(said, str(refused.value)), str(refused.value)
    assert ". Fix: " in str(refused.value)
    assert nothing_is_booked(tmp_path)


def test_what_is_whole_is_taken(model: Path, tmp_path: Path) -> None:
    """As one file and in shards; its identity follows the bytes, so that a repaired model is the one of before."""
    dptune.tune(model, rows(), out=tmp_path / "one", **GIVEN)
    shard(model)
    dptune.tune(model, rows(), out=tmp_path / "other", **GIVEN)
    assert Register(tmp_path / "spent.jsonl").totals()[0].entries == 2


def command(model: Path, folder: Path, *more: str) -> Any:
    data = write_csv(folder / "records.csv", rows(60, 30))
    given = ["--data", str(data), "--unit", "customer_id", "--epsilon", "8", "--delta", "0.001", "--epochs", "2"]
    given += ["--expected-batch-size", "8", "--rank", "2", "--target-modules", "c_attn", "--out", str(folder / "out")]
    return CliRunner().invoke(app, ["tune", "--model", str(model), *given, *more])


DOORS: dict[str, list[str]] = {
    "run": [],
    "search": ["--search", "space.yaml", "--eval-share", "0.2"],
    "rehearsal": ["--search", "rehearsal.yaml", "--public", "public.csv"],
}


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("name", "door"), [("cut in half", "run"), ("cut in half", "search"), ("too large", "rehearsal")]
)
def test_after_repair_the_same_command_pays_once(
    name: str, door: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tries that are refused, and then the one that counts: no dead end, and no other run."""
    monkeypatch.chdir(tmp_path)
    draws(monkeypatch, 1)
    Path("space.yaml").write_text(
        "space: {learning_rate: {log_uniform: [0.001, 0.05]}}\ncandidates: 2\nscore: {on: held_out}\n"
    )
    Path("rehearsal.yaml").write_text(
        "space: {learning_rate: {log_uniform: [0.001, 0.05]}}\ncandidates: 2\nscore: rehearsal\n"
    )
    write_csv(Path("public.csv"), [{"customer_id": f"p{n}", "text": row["text"]} for n, row in enumerate(rows(40, 40))])
    change, said = BROKEN[name]
    change(model)
    for _ in range(2):
        done = command(model, tmp_path, *DOORS[door])
        assert done.exit_code == 2, done.output
        assert re.search(said, done.stderr.strip().splitlines()[-1]), done.stderr
        assert nothing_is_booked(tmp_path)
    shutil.rmtree(model)
    shutil.copytree(checkpoint(), model)
    done = command(model, tmp_path, *DOORS[door])
    assert done.exit_code == 0, done.output
    (total,) = Register(tmp_path / "spent.jsonl").totals()
    assert (total.entries, total.epsilon) == (1, pytest.approx(8, rel=0.05))
    assert command(model, tmp_path, *DOORS[door]).exit_code == 0, "it is only loaded"
    assert Register(tmp_path / "spent.jsonl").totals() == [total]


@pytest.mark.parametrize("name", BY_HEADERS)
def test_a_dry_run_names_a_damaged_file_too(name: str, model: Path, tmp_path: Path) -> None:
    change, said = BROKEN[name]
    change(model)
    done = command(model, tmp_path, "--dry-run", "--json")
    assert (done.exit_code, done.stdout) == (2, "")
    assert re.search(said, done.stderr.strip().splitlines()[-1]), done.stderr


def test_half_a_model_is_told_of(model: Path, tmp_path: Path) -> None:
    """Not refused: some checkpoints hold layers that predict further tokens. Old buffers and heads are no layers."""
    weights = load_file(model / WEIGHTS)
    more = {"lm_head.bias": torch.zeros(3), "transformer.h.0.attn.masked_bias": torch.zeros(1)}
    save_file(weights | more, model / WEIGHTS, {"format": "pt"})
    assert "not used" not in command(model, tmp_path, "--dry-run").output
    others = {name.replace("h.0", "h.7"): one.clone() for name, one in weights.items() if "h.0." in name}
    save_file(weights | more | others, model / WEIGHTS, {"format": "pt"})
    said = " ".join(command(model, tmp_path, "--dry-run").output.split())
    assert re.search(r"holds 11 weights of layers that are not used, .* asks for \d \(transformer\.h\.7\.", said), said


def test_a_model_at_fault_is_named_by_the_commands_option() -> None:
    assert (
        by_option("model: computes nothing. Fix: mend the model.") == "--model: computes nothing. Fix: mend the model."
    )


@pytest.mark.parametrize("file", ["data.prompt.jsonl", "max_new_tokens.csv", "max_length/a.csv", "a/data.prompt"])
def test_a_file_that_is_called_as_a_field_keeps_its_name(file: str) -> None:
    said = by_option(f"decoding.max_new_tokens: 4 beside a prompt ({file}, row 3). Fix: give data.prompt.")
    assert said == f"--max-new-tokens: 4 beside a prompt ({file}, row 3). Fix: give --prompt."


NO_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a FIFO": (lambda file: os.mkfifo(file), "is a FIFO"),
    "a folder": (lambda file: file.mkdir(), "is a folder"),
    "a link to itself": (lambda file: file.symlink_to(file.name), "is a link to a file that is not there"),
    "a pointer": (
        lambda file: file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"),
        "is a pointer of Git LFS, not the file itself. Fix: run `git lfs pull`",
    ),
    "empty": (lambda file: file.touch(), "is empty"),
}


@pytest.mark.parametrize("kind", NO_FILES)
@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
def test_what_lies_in_a_files_place_is_named(file: str, kind: str, model: Path) -> None:
    (model / file).unlink()
    make, said = NO_FILES[kind]
    make(model / file)
    with pytest.raises(ConfigError, match=rf"{file} {said}"):
        open_base(model, TuneSettings(epsilon=8))


def test_an_adapter_is_no_model(model: Path) -> None:
    (model / "config.json").rename(model / "adapter_config.json")
    with pytest.raises(ConfigError, match=r"is an adapter, not a model: .*Fix: give the model that it was tuned on"):
        open_base(model, TuneSettings(epsilon=8))


def test_an_adapter_inside_a_models_folder_is_refused(model: Path) -> None:
    """Transformers would put it into the model, whose digest would be that of the model without it."""
    (model / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"holds a model and an adapter for it .*Fix: move the adapter away"):
        open_base(model, TuneSettings(epsilon=8))


def test_a_tokenizer_that_reads_bytes_needs_no_vocabulary(model: Path) -> None:
    for file in model.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ConfigError, match=r"tokenizer: .* holds no tokenizer\. Fix: save"):
        open_base(model, TuneSettings(epsilon=8))
    ByT5Tokenizer(extra_ids=0).save_pretrained(model)
    assert not [file for file in model.iterdir() if "vocab" in file.name or file.name == "tokenizer.json"]
    assert isinstance(open_base(model, TuneSettings(epsilon=8, rank=2)).tokenizer, ByT5Tokenizer)


TEMPLATES = {
    "{% for m in messages %}{{ m.content ": r"fails on a made-up chat .*TemplateSyntaxError",
    "{{ raise_exception('no chats') }}": r"fails on a made-up chat .*no chats",
    "{{ messages[7]['content'] }}{{ zz.yy }}": r"fails on a made-up chat",
    "{{ '' }}": r"renders the same text for chats with different answers \(''\)",
    "5": r"renders the same text for chats with different answers \('5'\)",
    "{{ range(10**5)|random }}{{ messages[1]['content'] }}": r"renders the same chat differently each time",
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_broken_chat_template_is_named_and_costs_nothing(template: str, model: Path, tmp_path: Path) -> None:
    """By made-up chats alone; no row is blamed, and no private record counted."""
    file = model / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    turns = [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": row["text"]}] for row in rows()]
    chats = [{"customer_id": f"c{place % 20}", "messages": one} for place, one in enumerate(turns)]
    with pytest.raises(ConfigError, match=rf"chat_template: {TEMPLATES[template]}.*\. Fix: correct") as refused:
        dptune.tune(model, chats, out=tmp_path / "out", **GIVEN)
    assert "row" not in str(refused.value)
    assert nothing_is_booked(tmp_path)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content[0]['text'] }}{% endfor %}",
        "{% if messages[0]['role'] != 'system' %}{{ raise_exception('x') }}{% endif %}{{ messages[2]['content'] }}",
    ],
)
def test_templates_that_take_one_kind_of_chat_are_taken(template: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint())
    tokenizer.chat_template = template
    check_template(tokenizer)


def test_a_model_that_was_given_is_looked_at_too(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint()).requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint())
    with torch.no_grad():
        model.transformer.wpe.weight[-1, -1] = torch.nan
    with pytest.raises(ConfigError, match=r"weight transformer\.wpe\.weight of .* holds a number that is not finite"):
        dptune.tune(model, rows(), tokenizer=tokenizer, out=tmp_path / "out", **GIVEN)
    assert nothing_is_booked(tmp_path)


def test_a_model_that_fails_at_a_width_is_refused_before_anything_is_booked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are whole; it is the rehearsal that finds it."""
    monkeypatch.setattr("dptune.training.run_start.check_width", fail)
    monkeypatch.chdir(tmp_path)
    draws(monkeypatch, 1)
    for search in (None, SPACE):
        with pytest.raises(ConfigError, match="takes no such text"):
            dptune.tune(checkpoint(), rows(60, 30), out="out", eval_share=0.2, search=search, **GIVEN)
        assert nothing_is_booked(tmp_path)
        assert not working_folder(tmp_path / "out").exists()
        shutil.rmtree("out", ignore_errors=True)


def fail(*_: Any) -> None:
    raise ConfigError("model", "takes no such text", fix="give another")


def test_a_refused_search_leaves_no_folder(model: Path, tmp_path: Path) -> None:
    (model / WEIGHTS).write_bytes(b"")
    with pytest.raises(ConfigError, match=r"model\.safetensors is empty"):
        dptune.tune(model, rows(60, 30), out=tmp_path / "out", eval_share=0.2, search=SPACE, **GIVEN)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
