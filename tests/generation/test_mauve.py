"""MAUVE equals its package's own, on the states of a model that is named."""

from __future__ import annotations

import random
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import gpt2
from tiny_tokenizers import tokenizer

from dptune.core.errors import ConfigError
from dptune.generation.mauve import Judge, check_number
from dptune.generation.text_metrics import check_names, score
from dptune.training.models.model import ModelSource

WORDS = ["the", "patient", "was", "seen", "at", "home", "and", "is", "well", "again", "now"]


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Judge:
    folder = tmp_path_factory.mktemp("models") / "tiny-gpt2"  # the package takes a model for a GPT-2 by its name
    gpt2().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return Judge(ModelSource(str(folder)), torch.device("cpu"))


def texts(seed: int, words: list[str]) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(words, k=8)) for _ in range(120)]


def test_equal_to_the_package_s_own_reading(judge: Judge) -> None:
    package: Any = pytest.importorskip("mauve")
    outputs, references = [*texts(0, WORDS[:6])[:-1], "well"], texts(1, WORDS)
    found = score(outputs, [[one, "not read"] for one in references], ["mauve"], judge)["mauve"]
    theirs = package.compute_mauve(
        p_text=references,
        q_text=outputs,
        featurize_model_name=judge.source.source,
        max_text_length=32,  # the positions of the model
    )
    assert found.value == pytest.approx(float(theirs.mauve), abs=1e-4)
    assert 0.004 < found.value < 1
    assert "mauve-text 0.4" in found.signature
    assert "features:tiny-gpt2, last token|texts:120 of each|empty:end-of-text|buckets:12" in found.signature
    assert str(Path(judge.source.source).parent) not in found.signature


def test_equal_texts_and_far_ones(judge: Judge) -> None:
    pytest.importorskip("mauve")
    references = [[one] for one in texts(1, WORDS)]
    same = score([one[0] for one in references], references, ["mauve"], judge)["mauve"].value
    near = score(texts(0, WORDS), references, ["mauve"], judge)["mauve"].value
    far = score([""] * 120, references, ["mauve"], judge)["mauve"].value
    assert same == pytest.approx(1)
    assert far < 0.1 < near < 1


def test_wrong_use_is_named(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "mauve", None)
        with pytest.raises(ConfigError, match=r"mauve needs mauve-text.*pip install 'dptune\[mauve\]'"):
            check_names(["mauve"], judge)
    pytest.importorskip("mauve")
    with pytest.raises(ConfigError, match="mauve_model: mauve needs a model that reads the texts"):
        check_names(["mauve"])
    with pytest.raises(ConfigError, match="mauve_model: is used only by the metric mauve"):
        check_names(["bleu"], judge)
    for call in (lambda: score(["a"] * 3, [["a"]] * 3, ["mauve"], judge), lambda: check_number(3)):
        with pytest.raises(ConfigError, match=r"there are 3 outputs.*100 at least"):
            call()


def test_a_judge_that_cannot_read_is_refused_before_anything_is_written(judge: Judge, tmp_path: Path) -> None:
    pytest.importorskip("mauve")

    def refused(*left_out: str) -> str:
        folder = tmp_path / "-".join(left_out)
        shutil.copytree(judge.source.source, folder, ignore=shutil.ignore_patterns(*left_out))
        with pytest.raises(ConfigError) as error:
            check_names(["mauve"], Judge(ModelSource(str(folder)), torch.device("cpu")))
        assert error.value.field == "mauve_model"
        return error.value.problem

    assert "holds no *.safetensors" in refused("*.safetensors")
    assert "tokenizer" in refused("tokenizer*")
    assert "config.json" in refused("config.json")


def test_a_name_on_the_hub_stands_with_its_commit_and_a_folder_without_its_path(tmp_path: Path) -> None:
    commit = "0" * 40
    assert Judge(ModelSource("some/model", commit), torch.device("cpu")).name == f"some/model@{commit}"
    for revision in (None, commit):
        assert Judge(ModelSource(str(tmp_path), revision), torch.device("cpu")).name == tmp_path.name
