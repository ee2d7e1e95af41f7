"""The frame of all pages, and the index over those that exist."""

from __future__ import annotations

import re
from base64 import b64decode
from collections import Counter
from io import BytesIO
from pathlib import Path
from urllib.parse import unquote

import pytest
from jinja2 import UndefinedError
from PIL import Image
from test_report import Page, result

from dptune.core.digits import at_least, at_most
from dptune.privacy.release import Release
from dptune.privacy.run_header import RunHeader
from dptune.privacy.spent_budgets.register import Register
from tasks.charts.looks import looks
from tasks.mlflow.experiments import remember
from tasks.paths import MLFLOW_PAGE, REPORT
from tasks.report.experiment import write_report
from tasks.report.numbers import digits4, exact, spread_text
from tasks.report.page import INDEX, environment, named, publish, without_empty_columns, write, write_index
from tasks.stage import share_checkout

pytestmark = pytest.mark.usefixtures("quick_pictures")


def index(data: Path) -> Page:
    write_index(data)
    return Page((data / "report" / INDEX).read_text(encoding="utf-8"))


def pictures_of(data: Path) -> list[tuple[int, int] | None]:
    """The size of the picture of each card of the index; None for a card without one."""
    text = (data / "report" / INDEX).read_text(encoding="utf-8")
    found = [re.search(r"base64,([^\"]+)", card) for card in re.findall(r"<li>(.*?)<a href", text)]
    return [Image.open(BytesIO(b64decode(one[1]))).size if one else None for one in found]


def test_the_index_names_every_page_with_its_answer_the_newest_first(tmp_path: Path) -> None:
    assert "There is no page yet" in index(tmp_path).words
    write_report([result(), result("quantile")], tmp_path / "report", "mine")
    Image.new("RGB", (900, 600)).save(tmp_path / "report" / "figures" / "utility.png")
    write("index.html.j2", tmp_path / "a" / "synthetic.html", entries=[], opening=["`A <b>` & B."])
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "foreign.html").write_text("<html><head><title>no page of ours</title></head></html>")
    write_report([result()], tmp_path / "reports" / "other 50 %" / "report", "yours")
    (tmp_path / "reports" / "other 50 %" / "report" / "figures" / "utility.png").write_bytes(b"torn")
    write_index(tmp_path / "reports" / "other 50 %")  # as in an experiment of DVC, which is copied with its index
    made = index(tmp_path)
    assert made.links == [
        "../reports/other%2050%20%25/report/report.html",
        "../a/synthetic.html",
        "../report/report.html",
    ]
    assert pictures_of(tmp_path) == [None, None, (360, 220)], "the upper part of a picture that is one"
    assert "dptune report: yours" in made.words
    assert "other 50 %" in made.words, "which study it is of"
    assert "dptune report: mine" in made.words
    assert "cannot be told apart with one seed" in made.words
    assert "A <b> & B." in made.words
    assert "no page of ours" not in made.words
    for link in made.links:
        page = (tmp_path / "report" / unquote(link)).resolve()
        back = re.findall(r'<a href="([^"]*)">all pages</a>', page.read_text(encoding="utf-8"))
        assert [(page.parent / one).resolve() for one in back] == [tmp_path / "report" / INDEX] * (
            page.stem == "report"
        )


def test_the_index_adds_up_what_the_register_knows_or_says_that_it_cannot(tmp_path: Path) -> None:
    release = Release(sample_rate=0.1, noise_multiplier=2.0)
    price = 0.0
    for run in ("a", "b"):
        header = RunHeader(
            "static", "gdp_clt", "certified", 9.0, 1e-5, "patient", 800, data="my table", run_id=run * 32
        )
        Register(tmp_path / "spent.jsonl").add_run("digest", header, Counter({release: 10}))
        price += header.price(Counter({release: 10})).certified
    made = index(tmp_path)
    assert "my table" in made.words
    assert f"patient2{at_most(price)}" in "".join(made.words.split())
    (tmp_path / "spent.jsonl").write_text("{}\nno line of a register\n")
    assert "What was spent so far is not known" in index(tmp_path).words


def test_the_index_and_a_page_without_charts_hold_no_program(tmp_path: Path) -> None:
    index(tmp_path)
    text = (tmp_path / "report" / INDEX).read_text()
    assert "<script" not in text
    assert len(text) < 20_000


def test_who_has_no_javascript_is_told_where_the_picture_lies(tmp_path: Path) -> None:
    write_report([result(), result("quantile")], tmp_path / "report", "mine")
    text = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    named = re.findall(r"<noscript>.*?<code>(.*?)</code>", text)
    assert "figures/utility.png" in named
    assert len(named) == text.count("<noscript>")
    assert all((tmp_path / "report" / name).is_file() for name in named)


def test_names_in_backticks_have_their_marker_and_are_escaped() -> None:
    shown = looks(["static", "<i>"])
    text = str(named("`static` beats `<i>` and `other` by 5 %", shown))
    assert text.count("<svg") == 2
    assert "<i>" not in text
    assert "&lt;i&gt;" in text
    assert "<code>other</code>" in text
    assert "5\u00a0%" in text


def test_a_value_that_a_template_misspells_is_an_error() -> None:
    made = environment({}).from_string("{% if one.two %}yes{% endif %}{{ one.three }}")
    with pytest.raises(UndefinedError, match="three"):
        made.render(one={})


def test_a_column_without_a_figure_is_left_out() -> None:
    """Not one that a single row fills, nor the column of names; a table without a head, or with joined cells, stays."""
    head = "<table><thead><tr><th>cell</th><th class='a'>none</th><th>one</th></tr></thead>"
    rows = "<tr><td>\u2013</td><td><b>\u2013</b></td><td>\u2013</td></tr>"
    rows += "<tr><td>\u2013</td><td></td><td>7</td></tr></table>"
    left = re.findall(r"<t[hd](?: [^>]*)?>(?:<b>)?(.*?)</t[hd]>", without_empty_columns(f"<p>{head}{rows}</p>"))
    assert left == ["cell", "one", "\u2013", "\u2013", "\u2013", "7"]
    joined = "<table><thead><tr><th colspan=2>a</th></tr></thead><tr><td>b</td><td>\u2013</td></tr></table>"
    for table in (rows.replace("<tr>", "<table><tr>", 1), joined):
        assert without_empty_columns(table) == table


def test_all_colours_of_the_page_turn_with_the_readers_scheme() -> None:
    """A colour that is written beside the two lists of variables would stay as it is at night."""
    style = (Path(write.__code__.co_filename).parent / "templates" / "page.css").read_text()
    rules = re.sub(r":root \{.*?\}", "", style, flags=re.DOTALL)
    assert set(re.findall(r"#[0-9a-f]{3,6}\b", rules)) <= {"#fff", "#b3001b"}, "white on red, by day and night"
    light, dark = (
        set(re.findall(r"--[a-z-]+(?=:)", part)) for part in re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    )
    assert light == dark


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (2.40538, "2.405"),
        (23.456, "23.46"),
        (234.56, "234.6"),
        (9999.6, "10000"),
        (12345.6, "12,346"),
        (0.012345, "0.01235"),
        (0, "0.000"),
        (1e12, "1e+12"),
        (float("inf"), "diverged"),
        (float("nan"), "diverged"),
        ("inf", "diverged"),
    ],
)
def test_perplexities_have_four_digits(number: float | str, text: str) -> None:
    assert digits4(number) == text


def test_numbers_for_readers() -> None:
    assert [at_most(one) for one in (1.99984, 0.9059, 12.3456, "inf", 0, 2.0049)] == [
        "2",
        "0.906",
        "12.4",
        "∞",
        "0",
        "2.01",
    ]
    assert [at_least(one) for one in (0.9059, "inf", 1.9999)] == ["0.905", "∞", "1.99"]
    assert spread_text(0.0123, 2.405) == "0.012"
    assert spread_text(0.0123, 240.5) == "0.0"
    assert str(exact(123.45678)) == '<data value="123.4568" title="123.4568">123.5</data>'


def test_a_study_in_a_copy_is_in_the_checkouts_index_and_the_last_that_mlflow_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout, copy = tmp_path / "study", tmp_path / "study" / ".dvc" / "tmp" / "exps" / "tmpx"
    copy.mkdir(parents=True)
    monkeypatch.chdir(copy)
    monkeypatch.delenv("DVC_EXP_NAME", raising=False)
    share_checkout()
    write_report([result()], REPORT, "a study")
    publish(REPORT, "mine")
    remember("7")
    page = Page((checkout / REPORT / INDEX).read_text(encoding="utf-8"))
    assert "../reports/mine/report/report.html" in page.links
    assert "a study" in page.words
    assert (checkout / MLFLOW_PAGE).read_text() == "7\n", "`make ui` prints the links of what ran last"
