"""MkDocs' hooks: pages and pictures made from the code, the benchmarks' own page, and the gallery's reports."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import dptune
from docs.generate import cli_page, gallery, mechanisms_page, params_page, pictures, weights_table

PAGES = {
    "reference/cli.md": cli_page.page,
    "reference/params.md": params_page.page,
    "reference/mechanisms.md": mechanisms_page.page,
}
_BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the version into the line at the foot of each page."""
    config.copyright = f"dptune {dptune.__version__}, free software under the Apache License 2.0"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and pictures that are no files of docs/."""
    for place, page in PAGES.items():
        files.append(File.generated(config, place, content=page()))
    with TemporaryDirectory() as folder:
        for file in pictures.draw(Path(folder), [name for name in pictures.PICTURES if name not in pictures.README]):
            content = file.read_text(encoding="utf-8")
            files.append(File.generated(config, f"pictures/{file.name}", content=content))
    for file in (_BENCHMARKS / "README.md", *sorted(_BENCHMARKS.glob("*.png"))):
        name = "benchmarks.md" if file.suffix == ".md" else file.name
        files.append(File.generated(config, f"findings/{name}", abs_src_path=str(file)))
    for name, text in gallery.pages():
        files.append(File.generated(config, f"gallery/{name}", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put kept figures into the page that names them; and let the API come after how-tos in a search.

    A name in the code counts as a title, a thousand times as much as a word in a text, so ``PrivacyUnits.own_keys`` was
    the first hit for "own csv".
    """
    if page.file.src_uri.startswith("reference/api/"):
        page.meta.setdefault("search", {"boost": 0.001})
    if page.file.src_uri == "findings/benchmarks.md":  # written for its place in the repository
        markdown = markdown.replace("](../docs/", "](../")
    return weights_table.on_page(markdown)
