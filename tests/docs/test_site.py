"""The site builds without a warning and loads nothing from elsewhere; what is generated is complete."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from pages import PAGES, ROOT

from docs.generate import cli_page, mechanisms_page, params_page
from docs.generate.docstrings import as_markdown
from docs.generate.tables import code, plain, table

pytestmark = pytest.mark.system

#: Addresses that a browser fetches by itself; a link that a reader follows is none.
_FETCHED = re.compile(
    r"<(?:script|img|iframe|source|video)\b[^>]*?\b(?:src|srcset)=[\"']?([^\"'\s>]+)|<link\b[^>]*?\bhref=[\"']?([^\"'\s>]+)",
    re.I,
)

#: Addresses without a scheme, and not from the root, that a reader may follow.
_LINKS = re.compile(r"<a\b[^>]*?\bhref=[\"'](?![a-z]+:|/)([^\"']+)", re.I)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (built.returncode, built.stdout) == (0, ""), built.stdout + built.stderr
    return folder


def test_every_page_is_built(site: Path) -> None:
    for page in PAGES:
        assert (site / page.relative_to(ROOT / "docs").with_suffix(".html")).exists()
    for name in ("reference/cli", "reference/params", "reference/mechanisms", "findings/benchmarks"):
        assert (site / f"{name}.html").exists()
    assert not (site / "generate").exists()


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 50
    for page in pages:
        fetched = ["".join(found) for found in _FETCHED.findall(page.read_text(encoding="utf-8"))]
        assert [address for address in fetched if re.match(r"(?:https?:)?//", address)] == [], page.name
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(\s*['\"]?(?:https?:)?//|@import", sheet.read_text(encoding="utf-8")), sheet.name


def test_every_link_within_the_site_leads_to_a_file(site: Path) -> None:
    """MkDocs checks pages of docs/ alone: benchmarks/README.md is written for another place."""
    dead, seen = [], 0
    for page in sorted(site.rglob("*.html")):
        for address in _LINKS.findall(page.read_text(encoding="utf-8")):
            seen += 1
            path = unquote(urlsplit(html.unescape(address)).path)
            if path and not (page.parent / path).exists():
                dead.append((str(page.relative_to(site)), address))
    assert dead == []
    assert seen > 5000


def test_docstrings_become_text(site: Path) -> None:
    page = (site / "reference" / "api" / "tune.html").read_text(encoding="utf-8")
    assert "<strong>Guarantee:</strong>" in page
    assert "ConfigError and DataError before anything is charged" in page


def test_the_page_of_commands_has_each_option() -> None:
    page = cli_page.page()
    for name in (
        "tune",
        "suggest",
        "sample",
        "account",
        "calibrate",
        "search",
        "audit",
        "verify",
        "set-aside",
        "generate",
        "serve",
    ):
        assert f"\n## {name}\n" in page
    assert "| `--epsilon <float>` | required | " in page
    assert "| `--port <int range>` | `8000` | Port to listen on. (`1<=x<=65535`) |" in page


def test_the_page_of_parameters_has_each_key_and_says_what_it_means() -> None:
    entries = {".".join(entry.path): entry for entry in params_page.entries()}
    assert {"data.synthetic.seed", "experiment.models.NAME.revision", "policy.tenants.radius", "mechanisms"} <= set(
        entries
    )
    assert entries["lora.dropout"].kind == "number, at least 0, below 1"
    assert entries["experiment.runner"].default == "`threads`"
    assert entries["experiment.delta"].default == "*required*"
    assert entries["lora.rank"].default == "*required*"  # though the library's dataclass has a default
    assert "`policy.rlhf.trust`" in params_page.page()
    assert [name for name, entry in entries.items() if not entry.meaning] == []


def test_the_page_of_mechanisms_has_each_with_its_options() -> None:
    page = mechanisms_page.page()
    for name in ("static", "rldp_published", "pmixed", "dppg"):
        assert f"### {name.replace('_', chr(92) + '_')} {{ #{name} }}" in page
    assert "### clipper flat" in page


def test_cells_of_tables_keep_their_text() -> None:
    assert table(("a", "b"), [("1\n2", "3")]) == "| a | b |\n| --- | --- |\n| 1 2 | 3 |\n"
    assert code("a|b") == "`a\\|b`"
    assert plain("||x|| <= `a_b|c` in d_e") == "\\|\\|x\\|\\| \\<= `a_b\\|c` in d\\_e"


def test_a_sentence_about_errors_is_no_section() -> None:
    text = "Reads it.\n\nRaises: ConfigError for a folder\n    that is gone; DataError.\n\nGuarantee: none."
    assert as_markdown(text) == (
        "Reads it.\n\n**Raises:** ConfigError for a folder that is gone; DataError.\n\n**Guarantee:** none."
    )
