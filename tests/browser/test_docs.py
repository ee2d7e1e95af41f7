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
#: Pages whose code has long lines.
_LONG_LINES = ("index", "start", "concepts/accounting", "howto/cluster", "howto/dvc", "tutorials/own_table")
_CUT = "found => found.filter((one) => one.scrollWidth > one.clientWidth + 1).map((one) => one.textContent)"
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


def test_a_laptop_shows_code_whole_and_tables_as_wide_as_their_frames(browser: Any, site: Path) -> None:
    with visit(browser, site / "index.html", 1300) as one:
        assert one.page.locator(".grid.cards li").count() == 3
        assert one.page.locator("article pre").first.inner_text().startswith("make setup && . .venv/bin/activate")
        for name in _LONG_LINES:
            one.page.goto((site / f"{name}.html").as_uri())
            assert one.page.eval_on_selector_all("pre > code", _CUT) == [], name
        one.page.goto((site / "howto" / "index.html").as_uri())
        assert one.page.locator("article h2").count() == 4
        gap = "tables => tables.map((one) => one.clientWidth - one.rows[0].offsetWidth)"
        one.page.wait_for_selector(".md-typeset__table")
        assert max(one.page.eval_on_selector_all("article table", gap)) <= 2


def test_an_address_that_is_none_leads_to_pages_that_are(site: Path) -> None:
    text = (site / "404.html").read_text(encoding="utf-8")
    assert "No such page" in text
    assert 'href="/howto/index.html"' in text
