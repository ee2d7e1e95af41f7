"""Benchmarks as the hub has them have the rows of the published files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from dptune.core.errors import ConfigError, DataError
from dptune.records import published_files
from dptune.records.benchmarks import dart, e2e, glue
from dptune.records.reading import read
from dptune.records.wikitext import wikitext

datasets = pytest.importorskip("datasets", reason="the library is not installed: pip install 'dptune[datasets]'")

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MR = "name[Ada], eatType[pub]"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str | None, str], Any]:
    """A hub at one commit: data sets by name, configuration and split."""
    known: dict[tuple[str, str | None, str], Any] = {}

    class Library:
        @staticmethod
        def load_dataset(name: str, configuration: str | None, *, revision: str, split: str) -> Any:
            assert revision == COMMIT
            return known[name, configuration, split]

    monkeypatch.setattr(read, "_library", lambda: Library)
    return known


def of(rows: list[dict[str, Any]], **labels: list[str]) -> Any:
    found = datasets.Dataset.from_list(rows)
    for column, names in labels.items():
        found = found.cast_column(column, datasets.ClassLabel(names=names))
    return found


def test_phrases_have_the_labels_of_the_file_and_pairs_their_names(hub: Any) -> None:
    hub["nyu/glue", "sst2", "train"] = of(
        [{"idx": 0, "sentence": "a cat ", "label": 1}, {"idx": 1, "sentence": "no cat ", "label": 0}],
        label=["negative", "positive"],
    )
    rows = list(glue("nyu/glue", revision=COMMIT))
    assert rows == [{"text": "a cat", "label": "1"}, {"text": "no cat", "label": "0"}]
    pairs = [{"premise": "A.", "hypothesis": "B.", "label": 2}]
    hub["nyu/glue", "mnli", "validation_matched"] = of(pairs, label=["entailment", "neutral", "contradiction"])
    (pair,) = glue("nyu/glue", "mnli", "dev", revision=COMMIT)
    assert pair == {"text": "A. B.", "label": "contradiction", "premise": "A."}
    hub["nyu/glue", "qnli", "train"] = of(
        [{"question": "Who?", "sentence": "Bo.", "label": 1}], label=["entailment", "not_entailment"]
    )
    (found,) = glue("nyu/glue", "qnli", revision=COMMIT)
    assert found == {"text": "Who? Bo.", "label": "not_entailment", "passage": "Bo."}
    hub["nyu/glue", "qqp", "validation"] = of(
        [{"question1": "A?", "question2": "B?", "label": 1}], label=["not_duplicate", "duplicate"]
    )
    assert list(glue("nyu/glue", "qqp", "dev", revision=COMMIT)) == [{"text": "A? B?", "label": "1"}]


def test_restaurants_and_triples(hub: Any) -> None:
    hub["a/e2e", None, "validation"] = of([{"meaning_representation": MR, "human_reference": "Ada  is a\npub."}])
    (row,) = e2e("a/e2e", "dev", revision=COMMIT)
    assert row == {"prompt": "name : Ada | Type : pub<|endoftext|>", "completion": " Ada is a pub.", "mr": MR}
    triples = [["Bo", "IS", "red"]]
    hub["a/dart", None, "train"] = of(
        [{"tripleset": triples, "annotations": {"source": ["a", "b"], "text": ["Bo.", "B."]}}]
    )
    of_lists = [row["completion"] for row in dart("a/dart", revision=COMMIT)]
    hub["a/dart", None, "train"] = of([{"tripleset": triples, "annotations": [{"text": "Bo."}, {"text": "B."}]}])
    assert of_lists == [row["completion"] for row in dart("a/dart", revision=COMMIT)] == [" Bo.", " B."]


def test_lines_of_wikitext_are_the_published_file_again(
    hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = " \n = Cats = \n \n Cats are red . \n \n = Dogs = \n \n Dogs . \n"
    (tmp_path / "wiki.test.tokens").write_text(content)
    monkeypatch.setattr(published_files, "KNOWN", {"wiki.test.tokens": hashlib.sha256(content.encode()).hexdigest()})
    lines = [line if line.strip() else "" for line in content.splitlines(keepends=True)]
    hub["a/wiki", "wikitext-2-v1", "test"] = of([{"text": line} for line in lines])
    assert list(wikitext("a/wiki", "test", revision=COMMIT)) == list(wikitext(str(tmp_path), "test"))
    hub["a/wiki", "wikitext-2-v1", "test"] = of([{"text": line} for line in lines[:-1]])
    with pytest.raises(DataError, match="has SHA-256"):
        list(wikitext("a/wiki", "test", revision=COMMIT))


def test_what_the_hub_has_not_is_named(hub: Any) -> None:
    with pytest.raises(ConfigError, match="revision 'main' is not a commit"):
        list(glue("nyu/glue", revision="main"))
    with pytest.raises(DataError, match=r"cannot be loaded \(KeyError\)"):
        list(glue("nyu/glue", revision=COMMIT))
    hub["nyu/glue", "sst2", "train"] = of([{"text": "a"}])
    with pytest.raises(DataError, match=r"has the columns text\. Fix: name a data set with sentence, label"):
        list(glue("nyu/glue", revision=COMMIT))
    with pytest.raises(ConfigError, match="leave revision out"):
        list(glue("nyu/glue", "sst2-sentences", revision=COMMIT))
    with pytest.raises(ConfigError, match="has no part 'test' here"):
        list(glue("nyu/glue", part="test", revision=COMMIT))


def test_the_library_loads_a_part_of_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's own function, on a folder that is laid out as a repository of the hub."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (repository := tmp_path / "glue").mkdir()
    (repository / "README.md").write_text(
        "---\nconfigs:\n- config_name: qqp\n  data_files: [{split: train, path: qqp.jsonl}]\n"
        "- config_name: sst2\n  data_files: [{split: train, path: train.jsonl}, {split: validation, path: dev.jsonl}]\n"
        "---\n"
    )
    for name in ("qqp", "train", "dev"):
        (repository / f"{name}.jsonl").write_text(json.dumps({"sentence": f"of {name}", "label": 1}) + "\n")
    for part in ("train", "dev"):
        assert list(glue(str(repository), part=part, revision=COMMIT)) == [{"text": f"of {part}", "label": "1"}]
