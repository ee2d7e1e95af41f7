"""The experiment's headline: the mechanism of lowest perplexity among equals, and what it is measured by."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tasks.report.answer import best_cell, headline, perplexities_of


def result(mechanism: str, perplexity: float, certified: float, seed: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "label": f"small.{mechanism}.seed{seed}",
        "model": "small",
        "unit": "record",
        "data": "synthetic cohort",
        "mechanism": mechanism,
        "accounting": "certified",
        "budget_epsilon": None if math.isinf(certified) else round(certified),
        "seed": seed,
        "synthetic": True,
        "epsilon_published": str(certified),
        "epsilon_noise_only": str(certified),
        "epsilon_certified": str(certified),
        "before": {"eval_perplexity": 9.0, "public_perplexity": 8.0},
        "after": {"eval_perplexity": perplexity, "public_perplexity": 7.0},
        **more,
    }


GRID = [
    result("nonprivate", 4.0, math.inf),
    result("static", 6.0, 2.0),
    result("static", 6.2, 1.999, seed=1),
    result("quantile", 5.5, 1.9999),
    result("quantile", 5.7, 2.0, seed=1),
    result("static", 5.0, 8.0),
    result("leaky", 3.0, 2.0, epsilon_certified="inf"),
]


def test_of_mechanisms_that_cannot_be_told_apart_plain_dp_sgd_is_named() -> None:
    """In MLflow and DVC as on the page; here the lowest mean is that of quantile, with p = 0.07."""
    found = headline(GRID)
    assert found.tags["chosen_mechanism"] == best_cell(GRID, {})["mechanism"] == "static"
    assert found.metrics["eval_perplexity"] == best_cell(GRID, {})["eval_perplexity"] == pytest.approx(6.1)
    without = [one for one in GRID if one["mechanism"] != "static"]
    assert headline([*without, result("rldp", 5.8, 2.0)]).tags["chosen_mechanism"] == "quantile", (
        "no plain one is there"
    )


def test_a_winner_at_the_epsilon_of_most_mechanisms_is_named_beside_what_it_is_measured_by() -> None:
    sure = [
        result(mechanism, mean + seed / 100, 2.0, seed=seed)
        for mechanism, mean in (("static", 6.1), ("quantile", 5.6))
        for seed in (-1, 1)
    ]
    found = headline([GRID[0], *sure, *GRID[5:]])
    assert found.tags["chosen_mechanism"] == "quantile"
    assert found.metrics == {
        "eval_perplexity": pytest.approx(5.6),
        "dp_sgd_perplexity": pytest.approx(6.1),
        "nonprivate_perplexity": 4.0,
        "untuned_perplexity": 9.0,
        "epsilon_published": 2.0,
        "epsilon_noise_only": 2.0,
        "epsilon_certified": 2.0,
    }
    assert found.tags["answer"] == found.sentence
    assert "5.600" in found.sentence


def test_a_mechanism_without_a_certified_epsilon_is_no_candidate() -> None:
    found = headline([one for one in GRID if one["mechanism"] in ("leaky", "nonprivate")])
    assert "No mechanism here has a finite certified" in found.sentence
    assert found.tags == {}
    assert set(found.metrics) == {"nonprivate_perplexity", "untuned_perplexity"}


def test_under_private_telemetry_it_tells_of_public_records_alone() -> None:
    private = [{**one, "after": {"public_perplexity": 7.0}, "before": {"public_perplexity": 8.0}} for one in GRID[1:3]]
    found = headline(private)
    assert found.metrics["public_perplexity"] == 7.0
    assert "public-set perplexity of 7.000" in found.sentence


def test_a_run_that_diverged_is_no_candidate() -> None:
    found = headline([*GRID[:3], result("quantile", math.nan, 2.0)])
    assert found.tags["chosen_mechanism"] == "static"


def test_dvc_compares_each_mechanism_at_each_budget() -> None:
    """And a cell that diverged is left out, not written as a number that JSON lacks."""
    assert perplexities_of(GRID) == {
        "nonprivate": {"none": 4.0},
        "static": {"2": pytest.approx(6.1), "8": 5.0},
        "quantile": {"2": pytest.approx(5.6)},
        "leaky": {"2": 3.0},
    }
    assert perplexities_of([*GRID, result("lost", math.nan, 2.0)]) == perplexities_of(GRID)
    two = perplexities_of([*GRID, result("static", 7.0, 2.0, model="large")])
    assert two["large static"] == {"2": 7.0}
    assert two["small static"]["8"] == 5.0
