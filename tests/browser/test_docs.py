"""The search of the documentation, in a page that is opened from a folder, finds first what a newcomer asks for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.browser.chromium import visit

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = {
    "own csv": "tutorials/own_table.html",
    "nightly": "howto/prefect.html",
    "which epsilon": "howto/choose_epsilon.html",
    "7B": "howto/sizes.html",
}
_HITS = "found => found.map((one) => one.closest('a').href)"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=True, capture_output=True)
    return folder


def test_the_first_hit_answers_the_question(browser: Any, site: Path) -> None:
    found = {}
    with visit(browser, site / "index.html", 1300) as one:
        for question in QUESTIONS:
            one.page.goto(f"{(site / 'index.html').as_uri()}?q={question.replace(' ', '%20')}")
            one.page.wait_for_selector("article.md-search-result__article", state="attached")
            first = one.page.eval_on_selector_all("article.md-search-result__article", _HITS)[0]
            found[question] = first.split(site.as_uri() + "/")[1].split("?")[0].split("#")[0]
    assert found == QUESTIONS


def test_an_address_that_is_none_leads_to_pages_that_are(site: Path) -> None:
    text = (site / "404.html").read_text(encoding="utf-8")
    assert "No such page" in text
    assert 'href="/howto/index.html"' in text
