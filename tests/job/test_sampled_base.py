"""The model under a delivered adapter is the one that it was tuned on, by every byte of its weights, or is refused."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_tuning import QUICK, as_earlier, checkpoint, rows
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import dptune
from dptune.cli import app
from dptune.core.errors import ConfigError, DptuneError
from dptune.job.delivery.adapter_loading import check_base
from dptune.job.delivery.weights import BASE, NamedBase, read_base
from dptune.training.models.model import ModelSource
from dptune.training.models.weight_files import digest_of_weights

WEIGHTS = "model.safetensors"


def tuned(model: Any, **more: Any) -> Path:
    found = dptune.tune(model, rows(), epsilon=8, unit="customer_id", **QUICK | {"add_bos_token": True} | more)
    return found.folder / "adapter"


@lru_cache(maxsize=1)
def adapter() -> Path:
    return tuned(checkpoint())


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter()  # not in this folder
    monkeypatch.chdir(tmp_path)


def base_with(folder: Path, change: Callable[[Path], None]) -> Path:
    """A base of the same name, elsewhere, after a change."""
    copy = Path(shutil.copytree(checkpoint(), folder / checkpoint().name))
    change(copy)
    return copy


def one_bit(folder: Path) -> None:
    content = bytearray((folder / WEIGHTS).read_bytes())
    content[-5] ^= 1
    (folder / WEIGHTS).write_bytes(content)


def another(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    save_file({name: weight + 0.01 for name, weight in weights.items()}, folder / WEIGHTS, {"format": "pt"})


def other_heads(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"layer_norm_epsilon": 0.1}))


@pytest.mark.parametrize("change", [one_bit, another, other_heads])
@pytest.mark.parametrize("command", [["sample", "--records", "2"], ["score", "--data", "rows.jsonl", "--text", "text"]])
def test_a_base_of_the_same_name_and_other_weights_is_refused(
    command: list[str], change: Callable[[Path], None], tmp_path: Path
) -> None:
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    other = base_with(tmp_path / "elsewhere", change)
    done = CliRunner().invoke(app, [command[0], str(adapter()), "--model", str(other), *command[1:]])
    line = done.stderr.strip().splitlines()[-1]
    assert done.exit_code == 2, done.output
    for folder in (other, checkpoint()):
        assert str(digest_of_weights(str(folder), None)) in line
    assert line.endswith(f"Fix: give the folder {checkpoint().name} with the files that it had when it was tuned.")
    assert not Path("synthetic.jsonl").exists()


def test_the_digest_is_what_sha256sum_prints_and_no_name_of_a_folder_counts(tmp_path: Path) -> None:
    copy = Path(shutil.copytree(checkpoint(), tmp_path / "renamed"))
    (copy / "notes.txt").write_text("no part of the model")
    listed = subprocess.run(["sha256sum", "config.json", WEIGHTS], cwd=copy, capture_output=True, check=True).stdout
    named = read_base(adapter())
    assert named == NamedBase(checkpoint().name, None, hashlib.sha256(listed).hexdigest())
    sampled = dptune.sample(adapter(), copy, 2)
    assert sampled.notes == ()
    assert f"| the adapter's base model | {named.row} |" in sampled.card("texts.jsonl", "0" * 64)


def test_shards_count_each_and_what_is_not_read_does_not(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint())
    model.save_pretrained(tmp_path / "shards", max_shard_size="10KB")
    shards = sorted((tmp_path / "shards").glob("*.safetensors"))
    assert len(shards) > 1
    before = digest_of_weights(str(tmp_path / "shards"), None)
    (tmp_path / "shards" / "consolidated.safetensors").write_bytes(b"read by nothing here")
    assert digest_of_weights(str(tmp_path / "shards"), None) == before
    for shard in shards:
        content = shard.read_bytes()
        shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert digest_of_weights(str(tmp_path / "shards"), None) != before, shard
        shard.write_bytes(content)
    assert digest_of_weights(str(tmp_path / "shards"), None) == before
    assert digest_of_weights("org/not-downloaded", "a" * 40) is None


def test_a_model_given_from_python_is_compared_by_its_numbers(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint())
    with torch.no_grad():
        model.transformer.wte.weight.add_(0.01)
    model.save_pretrained(tmp_path / "mine")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint())
    tokenizer.save_pretrained(tmp_path / "mine")
    mine = tuned(model, tokenizer=tokenizer, out=tmp_path / "out")
    named = read_base(mine)
    assert named is not None
    assert named.in_memory == "float32"
    assert len(dptune.sample(mine, tmp_path / "mine", 2).rows) == 2
    with pytest.raises(ConfigError, match=rf"its numbers in memory have SHA-256 .*{named.sha256}"):
        dptune.sample(mine, checkpoint(), 2)
    with pytest.raises(ConfigError, match=r"is bfloat16, and the adapter was tuned .* in float32. Fix: give dtype"):
        dptune.sample(mine, tmp_path / "mine", 2, dtype="bfloat16")
    said = CliRunner().invoke(app, ["verify", str(mine)])
    assert said.exit_code == 0
    assert f"SHA-256 of its numbers in memory (float32) {named.sha256}" in said.stdout


def test_an_earlier_deliverable_verifies_and_says_that_the_base_cannot_be_compared(tmp_path: Path) -> None:
    torn = Path(shutil.copytree(adapter(), tmp_path / "torn"))
    (torn / BASE).unlink()
    refused = CliRunner().invoke(app, ["verify", str(torn)])
    assert refused.exit_code == 2
    assert f"{torn / BASE}: is missing" in refused.stderr
    copy = as_earlier(adapter(), tmp_path / "earlier")
    done = CliRunner().invoke(app, ["verify", str(copy)])
    assert done.exit_code == 0, done.output
    assert "Base model: an earlier dptune delivered the adapter, without a digest of its base model." in done.stdout
    (note,) = dptune.sample(copy, base_with(tmp_path / "elsewhere", another), 2).notes
    assert note.startswith("tiny was not compared with the model that was tuned: an earlier dptune")


def test_without_a_digest_a_base_of_another_revision_is_noted(tmp_path: Path) -> None:
    (tmp_path / BASE).write_text(json.dumps(NamedBase("org/model", "a" * 40, None).to_dict()))
    assert check_base(tmp_path, ModelSource("org/model", "a" * 40)) == ()
    (note,) = check_base(tmp_path, ModelSource("org/model", "b" * 40))
    assert note == f"the adapter was tuned on org/model at {'a' * 40}, and the model is org/model at {'b' * 40}"


def test_weights_that_have_no_digest_do_not_pass_for_those_that_have(tmp_path: Path) -> None:
    """A hub model whose weights were converted on their way lies in no file that could be compared."""
    (tmp_path / BASE).write_text(json.dumps(NamedBase("org/model", "a" * 40, "0" * 64).to_dict()))
    source = ModelSource("org/model", "a" * 40)
    assert check_base(tmp_path, source) == ()  # not downloaded yet
    with pytest.raises(ConfigError, match=r"have no digest, and those that base\.json names 0000"):
        check_base(tmp_path, source, object())


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"name": 3, "revision": null, "sha256": null}', '{"name": "a"}'])
def test_a_file_that_names_no_base_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / BASE).write_text(content)
    with pytest.raises(DptuneError, match=r"base\.json: .* Fix: take the whole folder"):
        read_base(tmp_path)
