"""GGUF files: what is converted holds the same numbers, tokenizer and template; what cannot be read is refused."""

from __future__ import annotations

import json
import logging
import stat
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_gguf import CHAT, write_gguf
from transformers import AutoModelForCausalLM

from dptune.core.errors import ConfigError
from dptune.training.models import memory, model_source
from dptune.training.models.model import ModelSource, load_base, load_tokenizer
from dptune.training.models.model_names import rounding
from dptune.training.models.model_source import converted, read_header
from dptune.training.models.weight_files import digest_of_weights

pytest.importorskip("gguf", reason="needs the library gguf (pip install 'dptune[models]')")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DPTUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("kind", ["F32", "Q4_1", "Q8_0"])
def test_a_converted_model_predicts_what_transformers_reads_of_the_file(tmp_path: Path, kind: str) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", kind=kind)
    model = load_base(ModelSource(str(file)), torch.device("cpu"))
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name).eval()
    ids = torch.arange(20)[None]
    torch.testing.assert_close(model(ids).logits, expected(ids).logits)
    assert all(parameter.dtype == torch.float32 and not parameter.requires_grad for parameter in model.parameters())


def test_tokenizer_and_chat_template_are_kept(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(ModelSource(str(write_gguf(tmp_path / "tiny.gguf"))))
    assert tokenizer.decode(tokenizer("an inner thing")["input_ids"]) == "an inner thing"
    assert tokenizer.tokenize("thin") == ["th", "in"]
    assert tokenizer.chat_template == CHAT
    assert len(tokenizer) == 262  # transformers adds a token that such a model does not know
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<|pad|>", "<|end|>")


def test_a_file_is_converted_once_for_each_dtype_whatever_it_is_called(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "dptune")
    file = write_gguf(tmp_path / "tiny.gguf", kind="Q4_1")
    first = ModelSource(str(file)).location
    assert "a 4-bit rounding (Q4_1) of the published weights" in caplog.text
    assert "GiB at most" in caplog.text
    caplog.clear()
    assert ModelSource(str(file.rename(tmp_path / "other.gguf"))).location == first
    assert "converted" not in caplog.text
    halved = ModelSource(str(tmp_path / "other.gguf"), dtype="bfloat16").location
    assert json.loads(Path(halved, "config.json").read_text())["dtype"] == "bfloat16"
    assert Path(halved, "model.safetensors").stat().st_size < 0.6 * Path(first, "model.safetensors").stat().st_size
    assert {path.name for path in cache.iterdir() if path.is_dir()} == {Path(first).name, Path(halved).name}
    assert stat.S_IMODE(Path(first).stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in Path(first).iterdir()} == {0o600}
    monkeypatch.setattr("transformers.__version__", "99.0")  # which may read the file otherwise
    assert ModelSource(str(tmp_path / "other.gguf")).location not in (first, halved)


def test_the_digest_is_that_of_the_file_in_every_dtype(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", kind="Q4_1")
    assert digest_of_weights(str(file), None) == sha256(file.read_bytes()).hexdigest()
    source = ModelSource(str(file))
    assert (source.kind, source.revision) == ("Q4_1", None)
    assert source.rounding == "a 4-bit rounding (Q4_1) of the published weights"
    assert ModelSource(str(write_gguf(tmp_path / "whole.gguf"))).rounding is None


@pytest.mark.parametrize(
    ("kind", "said"), [("Q6_K", "a 6-bit"), ("IQ2_XXS", "a 2-bit"), ("MXFP4", "a 4-bit"), ("F16", None)]
)
def test_roundings_say_their_bits(kind: str, said: str | None) -> None:
    assert (rounding(kind) or "").startswith(said or "")
    assert (rounding(kind) is None) is (said is None)


def cut(file: Path, share: float) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])


def scribble(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[8:16] = (2**40).to_bytes(8, "little")  # the number of tensors
    file.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda file: cut(file, 0.9), "is cut off: its weights end at byte"),
        (lambda file: cut(file, 0.02), "is not a GGUF file, or its header is damaged or cut off"),
        (lambda file: file.write_bytes(b"GGUF"), "is not a GGUF file, or its header is damaged or cut off"),
        (lambda file: file.write_text("a" * 999), "is not a GGUF file, or its header is damaged or cut off"),
        (scribble, "is not a GGUF file, or its header is damaged or cut off"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, cache: Path, damage: Callable[[Path], None], problem: str) -> None:
    damage(file := write_gguf(tmp_path / "tiny.gguf"))
    with pytest.raises(ConfigError, match=problem) as caught:
        _ = ModelSource(str(file)).location
    assert str(file) in str(caught.value)
    assert "copy or download it again" in caught.value.fix
    assert not any(path.is_dir() for path in cache.iterdir())


def test_every_cut_of_a_header_is_noticed(tmp_path: Path) -> None:
    content = write_gguf(tmp_path / "tiny.gguf").read_bytes()
    piece = tmp_path / "piece.gguf"
    for length in range(1, len(content), 997):
        piece.write_bytes(content[:length])
        with pytest.raises(ConfigError):
            read_header(piece)


def test_an_alignment_of_nothing_is_a_damaged_header(tmp_path: Path) -> None:
    content = bytearray(write_gguf(tmp_path / "tiny.gguf").read_bytes())
    content[16:24] = (int.from_bytes(content[16:24], "little") + 1).to_bytes(8, "little")  # one more key
    name = b"general.alignment"
    pair = len(name).to_bytes(8, "little") + name + (4).to_bytes(4, "little") + (0).to_bytes(4, "little")
    (damaged := tmp_path / "damaged.gguf").write_bytes(bytes(content[:24] + pair + content[24:]))
    with pytest.raises(ConfigError, match="its header is damaged"):
        read_header(damaged)


def test_an_unknown_architecture_is_named(tmp_path: Path, cache: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", architecture="unheardof")
    with pytest.raises(ConfigError, match="is of architecture 'unheardof'"):
        _ = ModelSource(str(file)).location
    assert not any(path.is_dir() for path in cache.iterdir())


def test_the_library_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(model_source, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'dptune\[models\]'"):
        converted(file, "float32", lambda needed: None)


def test_a_model_larger_than_memory_is_refused_before_it_is_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    needed = read_header(file).numbers * 4
    monkeypatch.setattr(memory, "available_memory", lambda: needed - 1)
    with pytest.raises(ConfigError, match="GiB of memory"):
        _ = ModelSource(str(file)).location


def test_what_lies_beside_a_file_is_not_read_and_no_code_of_it_is_asked_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    beside = {
        "chat_template.jinja": "other",
        "tokenizer_config.json": json.dumps(
            {"eos_token": "th", "auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}}
        ),
        "tokenizer.json": "{}",
        "generation_config.json": json.dumps({"max_new_tokens": 7}),
        "adapter_config.json": json.dumps({"peft_type": "LORA", "base_model_name_or_path": "other/model"}),
    }
    for name, content in beside.items():
        (tmp_path / name).write_text(content)
    tokenizer = load_tokenizer(source := ModelSource(str(file)))
    assert (tokenizer.chat_template, tokenizer.eos_token) == (CHAT, "<|end|>")
    assert load_base(source, torch.device("cpu")).generation_config.max_new_tokens is None
    assert "custom code" not in "".join(capfd.readouterr())
    assert not [path for path in Path(source.location).iterdir() if path.is_dir()]


def test_a_file_that_changes_while_it_is_converted_leaves_nothing(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, convert = write_gguf(tmp_path / "tiny.gguf"), model_source._convert

    def late(*given: Any) -> None:
        write_gguf(file, seed=1)
        convert(*given)

    with monkeypatch.context() as patch:
        patch.setattr(model_source, "_convert", late)
        with pytest.raises(ConfigError, match="changed while it was converted"):
            _ = ModelSource(str(file)).location
    assert not any(path.is_dir() for path in cache.iterdir())
    source = ModelSource(str(file))
    digest = sha256(file.read_bytes()).hexdigest()
    assert (Path(source.location).name[:64], source.file_digest) == (digest, digest)
    write_gguf(file, seed=2)
    assert source.file_digest == digest, "the file that was converted, not the one that lies there now"


@pytest.mark.parametrize("whose", ["link", "other"])
def test_a_checkpoint_that_another_user_could_have_put_into_the_cache_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    target = Path(ModelSource(str(file)).location)
    if whose == "link":
        target.symlink_to(target.rename(tmp_path / "elsewhere"))
    else:
        monkeypatch.setattr(model_source, "_owner", lambda path: path == target)
    with pytest.raises(ConfigError, match="is a link, or of another user") as refused:
        _ = ModelSource(str(file)).location
    assert str(target) in str(refused.value)
    assert "DPTUNE_CACHE" in refused.value.fix
