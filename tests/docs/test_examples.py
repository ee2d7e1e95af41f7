"""Examples of params.yaml on the pages are settings that the pipeline takes."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import yaml
from pages import PAGES, ROOT, Block, blocks

from dptune.job.search.settings import SearchSettings
from tasks.settings.params import load_settings

_YAML = [
    (page, block) for page in PAGES for block in blocks(page.read_text(encoding="utf-8")) if block.language == "yaml"
]
EXAMPLES = [one for one in _YAML if not one[1].code.startswith("space:")]
SPACES = [one for one in _YAML if one not in EXAMPLES]


@pytest.mark.parametrize(
    ("page", "block"), EXAMPLES, ids=lambda one: one.stem if isinstance(one, Path) else f"line {one.line}"
)
def test_an_example_is_valid(page: Path, block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Path("visits.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["customer_id", "city", "bought"], ["c1", "Rome", "tea"]])
    assert load_settings(ROOT / "params.yaml", yaml.safe_load(block.code)).experiment.mechanisms


@pytest.mark.parametrize(
    ("page", "block"), SPACES, ids=lambda one: one.stem if isinstance(one, Path) else f"line {one.line}"
)
def test_a_space_of_a_search_is_valid(page: Path, block: Block) -> None:
    assert SearchSettings.of(yaml.safe_load(block.code), candidates=10).space.kinds()


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 4
    assert SPACES
