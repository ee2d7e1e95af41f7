"""Examples of params.yaml on the pages are settings that the pipeline takes."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import yaml
from pages import PAGES, ROOT, Block, blocks

from tasks.settings.params import load_settings

EXAMPLES = [
    (page, block) for page in PAGES for block in blocks(page.read_text(encoding="utf-8")) if block.language == "yaml"
]


@pytest.mark.parametrize(
    ("page", "block"), EXAMPLES, ids=lambda one: one.stem if isinstance(one, Path) else f"line {one.line}"
)
def test_an_example_is_valid(page: Path, block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Path("visits.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["customer_id", "city", "bought"], ["c1", "Rome", "tea"]])
    assert load_settings(ROOT / "params.yaml", yaml.safe_load(block.code)).experiment.mechanisms


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 4
