"""Pages in a browser: readable at every width, by day and night, silent, and on their own."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tasks.charts.looks import BLUE
from tests.browser.chromium import SCREENS, visit
from tests.browser.screenshots import SHOTS, take

pytestmark = [pytest.mark.browser, pytest.mark.system]
_ATTRIBUTES = "found => found.map((one) => one.getAttribute('{}'))"
_PAPER = 1046  # pixels: A4 on its side, less margins of 10 mm
_HAND_ON = "python -m tasks.experiment.adapter_model "
PAGES = ("report/report.html", "prediction/prediction.html", "policy/policy.html", "report/index.html")


@pytest.mark.parametrize(("name", "width"), list(product(PAGES, SCREENS)))
def test_nothing_scrolls_sideways_and_the_page_neither_asks_nor_complains(
    browser: Any, pages: Path, name: str, width: int
) -> None:
    with visit(browser, pages / name, width) as one:
        assert one.overflow() <= 0
        one.unfold()
        assert one.overflow() <= 0, "with everything open"
        assert one.said == []
        assert one.asked == []


@pytest.mark.parametrize(("name", "width"), list(product(("report/search.html", "policy/policy.html"), SCREENS)))
def test_pages_of_real_runs_too(browser: Any, real_pages: Path, name: str, width: int) -> None:
    test_nothing_scrolls_sideways_and_the_page_neither_asks_nor_complains(browser, real_pages, name, width)


def corpus_page(data: Path) -> Path:
    (page,) = (data / "synthetic").glob("*.html")
    return page


@pytest.mark.parametrize(("width", "scheme"), list(product(SCREENS, ("light", "dark"))))
def test_the_page_of_a_real_corpus_too(browser: Any, real_pages: Path, width: int, scheme: str) -> None:
    with visit(browser, corpus_page(real_pages), width, scheme) as one:
        assert one.page.locator(".answer").first.inner_text().startswith("24 SYNTHETIC texts with the guarantee of")
        assert one.page.locator("details[open]").count() == 0
        assert one.overflow() <= 0
        one.unfold()
        assert one.overflow() <= 0, "with everything open"
        assert one.page.locator("#texts").locator("xpath=ancestor::details").locator("li").count() == 10
        bars = one.page.locator(".plot .mark-rect path")
        assert bars.count() >= 1
        assert bars.first.get_attribute("fill") == BLUE[scheme == "dark"]
        heights = bars.evaluate_all("found => found.map((one) => one.getBBox().height)")
        assert max(heights) > 100, "bars stand on the axis"
        bars.first.hover()
        assert one.said == []
        assert one.asked == []


def test_the_page_of_a_real_search_answers_and_draws_the_price_of_choosing(browser: Any, real_pages: Path) -> None:
    with visit(browser, real_pages / "report/search.html") as one:
        opening = one.page.locator(".answer").first.inner_text()
        assert "is the best of a secret number of candidates, 3 on average: perplexity" in opening
        rows = one.page.locator("table.answers tr.best")
        assert rows.count() == 1
        assert "best of a random number: this search" in rows.inner_text()
        assert one.page.locator(".plot svg").count() == 1
    with visit(browser, real_pages / "report/index.html") as one:
        assert one.page.locator(".cards a").all_inner_texts() == [  # the newest first
            f"dptune synthetic corpus: {corpus_page(real_pages).stem}",
            "dptune: private reinforcement learning",
            "dptune search: tiny",
        ]


def test_the_first_screen_holds_the_answer_the_chart_and_the_table(browser: Any, pages: Path) -> None:
    """Of a laptop. Details are folded."""
    with visit(browser, pages / "report/report.html", 1300) as one:
        tops = [
            one.page.locator(name).first.bounding_box()["y"] for name in (".answer", ".plot svg", ".answers tbody tr")
        ]
        assert max(tops) < SCREENS[1300]
        assert one.page.locator("details[open]").count() == 0


def test_the_adapter_and_the_line_that_verifies_a_run_are_copied_or_marked(browser: Any, pages: Path) -> None:
    with visit(browser, pages / "report/report.html", 1300) as one:
        buttons = one.page.locator("[data-copy]").all()
        copied = [each.get_attribute("data-copy") for each in buttons]
        assert copied == [each.locator("xpath=preceding-sibling::code").inner_text() for each in buttons]
        assert [text.split("data/runs/")[0] for text in copied] == [_HAND_ON, "dptune verify "]
        for number, (button, text) in enumerate(zip(buttons, copied, strict=True)):
            button.click()
            marked = f"getSelection().toString() === '{text}'"
            own = f"document.querySelectorAll('[data-copy]')[{number}].textContent"
            one.wait_until(f"{own} === 'copied' || {marked}")
        assert one.said == []


def test_a_row_is_no_higher_than_its_mechanism_and_warnings_need(browser: Any, pages: Path) -> None:
    """The text of a leak once made a row 480 pixels high."""
    with visit(browser, pages / "report/report.html", 1300) as one:
        heights = one.page.eval_on_selector_all(".answers tbody tr", "rows => rows.map((row) => row.offsetHeight)")
        assert len(heights) > 15
        assert max(heights) < 160


def test_the_colours_turn_with_the_readers_scheme(browser: Any, pages: Path) -> None:
    """And turn back while the page is open."""
    first = "document.querySelector('.mark-symbol path')?.getAttribute('stroke')"

    def ground_and_marks(scheme: str) -> tuple[list[int], set[str]]:
        with visit(browser, pages / "report/report.html", 1300, scheme) as one:
            ground = one.page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
            strokes = one.page.eval_on_selector_all(".mark-symbol path", _ATTRIBUTES.format("stroke"))
            one.page.emulate_media(color_scheme="dark" if scheme == "light" else "light")
            one.wait_until(f"{first}?.startsWith('#') && {first} !== '{strokes[0]}'")
            assert one.said == []
            return [int(part) for part in ground.strip("rgb()").split(",")], set(strokes)

    (day, light), (night, dark) = ground_and_marks("light"), ground_and_marks("dark")
    assert min(day) > 200 > 60 > max(night)
    assert not light & dark


def test_a_pressed_name_stands_out_in_every_chart_and_again_pressed_does_not(browser: Any, pages: Path) -> None:
    faint = "found => found.filter((one) => Number(one.getAttribute('opacity') ?? 1) < 0.5).length"
    with visit(browser, pages / "report/report.html", 1300) as one:
        one.page.get_by_role("button", name="quantile").first.click()
        one.wait_until(f"({faint})([...document.querySelectorAll('.mark-symbol path')]) > 0")
        assert one.page.locator("button[data-mechanism=quantile][aria-pressed=true]").count() > 1
        one.page.get_by_role("button", name="quantile").first.click()
        one.wait_until(f"({faint})([...document.querySelectorAll('.mark-symbol path')]) === 0")


def test_a_chart_is_saved_as_a_picture_that_scales(browser: Any, pages: Path) -> None:
    with visit(browser, pages / "report/report.html", 1300) as one:
        one.wait_for_charts()
        with one.page.expect_download() as waiting:
            one.page.locator("button[data-svg=utility]").click()
        assert waiting.value.suggested_filename == "utility.svg"
        assert Path(waiting.value.path()).read_text(encoding="utf-8").startswith("<svg")
        assert one.said == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_paper_shows_every_fold_chart_and_column_in_the_colours_of_the_day(
    browser: Any, pages: Path, scheme: str
) -> None:
    """A printer does not wait until a fold that it opened has drawn its charts, and a sheet has no scroll bar."""
    count = """() => addEventListener("afterprint", () => { window.printed = [
        document.querySelectorAll(".plot").length, document.querySelectorAll(".plot svg").length]; })"""
    colours = "[...document.querySelectorAll('.mark-symbol path')].map((one) => one.getAttribute('stroke'))"
    with visit(browser, pages / "report/report.html", 1300, scheme) as one:
        one.page.evaluate(count)
        one.page.pdf()
        plots, drawn = one.page.evaluate("window.printed")
        assert drawn == plots > 3
        one.page.evaluate("dispatchEvent(new Event('beforeprint'))")
        one.wait_until(f"{colours}.includes('{BLUE[0]}') && !{colours}.includes('{BLUE[1]}')")
        one.page.evaluate("dispatchEvent(new Event('afterprint'))")
        one.wait_until(f"{colours}.includes('{BLUE[scheme == 'dark']}')")
        one.wait_until("document.querySelectorAll('details[open]').length === 0")
        one.unfold()
        one.page.emulate_media(media="print")
        one.page.set_viewport_size({"width": _PAPER, "height": 1000})
        edges = "found => found.map((one) => one.getBoundingClientRect().right)"
        assert max(one.page.eval_on_selector_all("table, pre", edges)) <= _PAPER
        assert one.said == []


@pytest.mark.parametrize(
    "anchor", ["claims", "spending", "curves", "epsilon", "audits", "membership", "controllers", "cells"]
)
def test_an_address_with_an_anchor_opens_its_details(browser: Any, pages: Path, anchor: str) -> None:
    address = f"{(pages / 'report/report.html').as_uri()}#{anchor}"
    with visit(browser, address) as one:
        assert one.page.locator("details[open]").count() == 1
        assert one.page.locator(f"details[open] #{anchor}").is_visible()
        one.wait_for_charts()
        assert one.said == []


def test_the_table_of_a_telephone_names_every_figure(browser: Any, pages: Path) -> None:
    with visit(browser, pages / "report/report.html", 380) as one:
        assert (
            not one.page.locator(".answers thead th").first.is_visible()
            or one.page.locator(".answers thead").bounding_box()["width"] <= 1
        )
        said = "found => found.map((one) => JSON.parse(getComputedStyle(one, '::before').content))"
        names = one.page.eval_on_selector_all(".answers tbody tr:not(.group) .four > *", said)
        assert names
        assert set(zip(*[iter(names)] * 4, strict=True)) == {
            ("ε claimed", "noise only", "proved", "shown (could refute)")
        }


def test_the_index_leads_to_every_page(browser: Any, pages: Path) -> None:
    with visit(browser, pages / "report/index.html") as one:
        links = one.page.eval_on_selector_all(".cards a", "found => found.map((link) => link.href)")
        assert len(links) == 3
        for link in links:
            with visit(browser, link) as other:
                assert other.page.title().startswith("dptune")


def test_a_label_with_markup_is_text(browser: Any, tmp_path: Path) -> None:
    """In tables, legends, charts and their tooltips."""
    from tests.browser.samples import grid, write_report

    evil = '<img src=x onerror="document.title=1">'
    results = [one | {"mechanism": evil} if one["mechanism"] == "quantile" else one for one in grid((2.0,), (0,))]
    write_report(results, tmp_path / "report", evil)
    with visit(browser, tmp_path / "report" / "report.html") as one:
        one.unfold()
        one.page.locator(".mark-symbol path").first.hover()
        assert one.page.title() == f"dptune report: {evil}"
        assert one.page.locator("img").count() == 0
        assert one.said == []
        assert one.asked == []


def test_the_pictures_of_the_docs_are_taken_and_small(browser: Any, pages: Path, tmp_path: Path) -> None:
    (made,) = (take(browser, shot, pages, tmp_path) for shot in SHOTS if shot.name == "report-phone")
    assert made.stat().st_size < 300_000
    with Image.open(made) as picture:
        assert picture.width == 380
        assert 0.5 * SCREENS[380] < picture.height <= SCREENS[380]
        last = picture.convert("L").crop((0, picture.height - 1, 380, picture.height)).getcolors()
    assert last is not None
    assert min(grey for _, grey in last) > 200, "the edge goes through a box and its border, and no line of text"
