"""Stage `models`: fingerprints of the sources of params.yaml, and errors that name the model."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import pytest
import tiny_ensemble
import yaml
from tiny_gguf import install_package, write_gguf
from tiny_pipeline import ROOT

from dptune.core.errors import ConfigError
from dptune.training.models.weight_files import digest_of_weights
from tasks.experiment.cells import model_digest
from tasks.models import fingerprint, write_fingerprints
from tasks.paths import MODELS
from tasks.settings.experiment import Model


@pytest.fixture(autouse=True)
def _site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPTUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "site").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))


def write_params(**models: dict[str, str]) -> None:
    params = yaml.safe_load((ROOT / "params.yaml").read_text())
    params["experiment"]["models"] = models
    Path("params.yaml").write_text(yaml.safe_dump(params))


def test_each_source_has_a_fingerprint(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", kind="Q4_1")
    install_package(tmp_path / "site", "tiny-llama", {"tiny_llama/tiny.gguf": file})
    folder = tiny_ensemble.base().source
    write_params(
        llama={"source": "package:tiny-llama"}, folder={"source": folder}, own={"source": "data/models/public"}
    )
    write_fingerprints()
    digest = sha256(file.read_bytes()).hexdigest()
    rounding = "a 4-bit rounding (Q4_1) of the published weights"
    assert json.loads(MODELS.read_text()) == {
        "llama": {"source": "package:tiny-llama", "revision": "1.2", "sha256": digest, "rounding": rounding},
        "folder": {"source": Path(folder).name, "revision": None, "sha256": digest_of_weights(folder, None)},
        "own": {"made_by": "pretrain"},
    }
    assert model_digest(Model(source="package:tiny-llama")) == digest  # by which a cell is named


def test_another_file_in_the_package_is_another_model(tmp_path: Path) -> None:
    install_package(tmp_path / "site", "tiny-llama", {"tiny_llama/tiny.gguf": write_gguf(tmp_path / "tiny.gguf")})
    model = Model(source="package:tiny-llama")
    before = fingerprint(model), model_digest(model)
    write_gguf(tmp_path / "site" / "tiny_llama" / "tiny.gguf", seed=1)
    after = fingerprint(model), model_digest(model)
    assert before[0] != after[0]
    assert before[1] != after[1]


def test_a_source_that_cannot_be_had_is_named() -> None:
    write_params(llama={"source": "package:nowhere-to-be-found"})
    with pytest.raises(ConfigError, match=r"experiment\.models\.llama\.source: .*is not installed"):
        write_fingerprints()
