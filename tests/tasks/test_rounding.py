"""Sentences of the pipeline round what was paid up and what an attack showed down."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dptune.privacy.accountants import Epsilons
from tasks import report
from tasks.audit import attacks
from tasks.policy import tenants
from tasks.report.claims import guarantee
from tasks.report.page import environment
from tasks.report.search import ranking_text

TEMPLATES = Path(report.__file__).parent / "templates"


def test_a_delta_that_was_paid_is_rounded_up() -> None:
    ranking = {"correlation": None, "points": [], "runs": 2, "epsilon": 2.001, "delta": 2.0001e-5}
    assert "certified ε = 2.01 at δ = 2.01e-05 together" in ranking_text({"ranking": ranking})[1]
    together = guarantee("private", Epsilons(1, 1, 1), together=(2.001, 2.0001e-5))
    assert "epsilon is 2.001 and delta 2.01e-05 (basic" in together


def test_the_page_of_what_was_spent_rounds_every_delta_up() -> None:
    total: dict[str, Any] = {"runs": 3, "unit": "record", "epsilon": 2.001, "others": 1}
    other = {"folder": "old", "data": "own", "unit": "record", "releases": 4, "epsilon": 2.001, "problem": ""}
    shown = environment({}).get_template("spending.html.j2")
    page = shown.render(
        totals=[total | {"delta": 3.0001e-5}],
        totals_certified=[total | {"runs": 2, "delta": 2.0001e-5}],
        others=[other],
        totals_with_others=[total | {"delta": 4.0001e-5}],
    )
    assert [f"δ = {delta}" in page for delta in ("3.01e-05", "2.01e-05", "4.01e-05")] == [True] * 3
    assert page.count("2.01</strong>") == 2


def test_an_accusation_says_less_than_was_shown_and_more_than_was_certified() -> None:
    """Rounded to the nearest, they would say 1.68 and 1.5."""
    found = {"label": "a", "alarm_confidence": 0.9999, "epsilon_certified": 1.5012}
    step = {"mu_alarm": 0.0, "mu_certified": 1.0, "epsilon_certified": 1.5012}
    found["step"] = step | {"epsilon_alarm": 1.6789}
    assert "epsilon >= 1.67 at confidence 0.9999, but 1.51 is certified" in attacks.violations(found)[0]
    alike = found | {"step": step | {"epsilon_alarm": 1.5014}}
    assert "epsilon >= 1.5014 at confidence 0.9999, but 1.5012 is certified" in attacks.violations(alike)[0]
    sure = found | {"alarm_confidence": 0.9999995}
    assert "at confidence 0.999999, but" in attacks.violations(sure)[0], "no attack is certain"


def test_the_lines_of_tenants_round_prices_up() -> None:
    said: list[str] = []
    line = {"label": "static", "epsilon_certified": 8.00001, "held_out_perplexity": 2.5, "public_perplexity": 2.6}
    line |= {"gain_over_static": 0.01, "gain_standard_error": None}
    results = {"data": "made", "epsilon_tenant": 0.92601, "epsilon_record": 1.9931, "summary": [line]}
    tenants._print_results(results, said.append)
    assert said[1] == "hyper-policy: epsilon 0.9261 a tenant, 1.994 a record"
    assert said[3].split()[:2] == ["static", "8.0001"]


@pytest.mark.parametrize("name", sorted(path.name for path in TEMPLATES.glob("*.j2")))
def test_no_template_rounds_noise_to_the_nearest(name: str) -> None:
    """Whoever types 1.23 in place of 1.2341 spends more than the page certifies."""
    nearest = r"format\([\w.]*noise(_multiplier)?\)|\.noise(_multiplier)? \| (?!noise\b)"
    assert not re.search(nearest, (TEMPLATES / name).read_text(encoding="utf-8"))


def test_noise_in_the_table_of_cells_is_rounded_up() -> None:
    figures = {"held_out": 2.5, "public_perplexity": 2.6}
    cell = {"mechanism": "static", "label": "a", "budget_epsilon": 2.0, "accounting": "certified", "after": figures}
    cell |= dict.fromkeys(("epsilon_published", "epsilon_noise_only", "epsilon_certified"), 2.0)
    cell |= {"unit": "record", "noise_multiplier": 1.23441, "releases": 4, "seconds": None}
    shown = environment({}).get_template("cells.html.j2")
    page = shown.render(results=[cell], before={}, metric="perplexity", metric_key="held_out", private=False)
    assert "<td>1.235</td>" in page
    assert environment({}).from_string("{{ 1.2341 | noise }}").render() == "1.24"
