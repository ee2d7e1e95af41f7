"""The table of claims: every private mechanism once, with what is proved, what it tends to and what attacks show."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from test_report import page, result

from dptune.mechanisms.planning import Schedule, planned
from dptune.mechanisms.registry import build
from dptune.privacy.accountants import gdp_delta, rdp_epsilon
from dptune.privacy.accounting.mixture_figures import limit_epsilon
from dptune.privacy.ledger import Ledger
from dptune.privacy.release import Release
from dptune.privacy.run_header import RunHeader
from tasks.charts.seed_groups import over_seeds
from tasks.report.claims import as_users_claim, audit_as_users_claim, claims, limit_of, privacy_curve
from tasks.report.experiment import write_report

pytestmark = pytest.mark.usefixtures("quick_pictures")

SCHEDULE = Schedule(0.5, 2, 1e-5)
STEP = {"epsilon_published": 0.5, "epsilon_audited": 0.7, "epsilon_certified": 3.0}


def cell(mechanism: str, published: float, certified: float | str, **changes: Any) -> dict[str, Any]:
    seed = changes.get("seed", 0)
    label = f"small.{mechanism}.seed{seed}"
    return result(mechanism, 2.0) | {
        "label": label,
        "epsilon_published": published,
        "epsilon_certified": certified,
        **changes,
    }


RESULTS = [
    cell("plrvo", 2.0, 12.0),
    cell("plrvo", 2.0, 12.0, seed=1),
    cell("static", 2.0, 4.0),
    cell("leaky", 2.0, "inf"),
    result("nonprivate", "inf"),
]
AUDITS = [
    {"label": "small.plrvo.seed0", "one_run": {"epsilon_audited": 0.1}, "step": STEP | {"epsilon_audited": 0.6}},
    {"label": "small.plrvo.seed1", "one_run": {"epsilon_audited": 0.3}, "step": STEP},
]


def test_every_private_mechanism_has_a_row_and_the_most_that_was_shown() -> None:
    rows = claims(over_seeds(RESULTS, "eval_perplexity"), AUDITS, {"small.plrvo.seed0": 9.0})
    assert [row.group.results[0]["mechanism"] for row in rows] == ["static", "plrvo", "leaky"]
    static, plrvo, leaky = rows
    assert leaky.group.results[0]["epsilon_certified"] == "inf"
    assert (plrvo.limit, plrvo.shown, plrvo.step) == (9.0, 0.3, STEP)
    assert (static.limit, static.shown, static.step) == (None, None, None)
    assert len(plrvo.group.results) == 2


def test_budgets_come_in_order() -> None:
    made = [cell("a", 0.0, 1.0, budget_epsilon=8.0), cell("b", 1.0, 9.0, budget_epsilon=0.3)]
    rows = claims(over_seeds(made, "eval_perplexity"), [], {})
    assert [row.group.results[0]["mechanism"] for row in rows] == ["b", "a"]


@pytest.mark.parametrize(
    ("name", "options"),
    [("plrvo", {}), ("static", {}), ("laplace", {}), ("plrvo", {"shared": True}), ("plrvo", {"clipper": "l1"})],
)
def test_the_limit_is_read_from_the_ledger_and_only_for_noise_that_tends_to_it(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Not in l1, where a shift that is spread vanishes, nor of one scale for all coordinates."""
    mechanism = build(name, {"noise_multiplier": 1.0} | options)
    composition = planned(mechanism, SCHEDULE)
    (release,) = composition
    header = RunHeader(name, mechanism.published_accountant, "noise_only", None, 1e-5, "record", 10)
    with Ledger.create(tmp_path / "ledger.jsonl", header, composition) as ledger:
        for _ in range(SCHEDULE.steps):
            ledger.charge(release)
    expected = limit_epsilon(composition, 1e-5) if name == "plrvo" and not options else None
    assert limit_of(tmp_path / "ledger.jsonl") == expected


def test_the_page_has_the_table(tmp_path: Path) -> None:
    write_report(RESULTS, tmp_path, "tiny", limits={"small.plrvo.seed0": 9.125})
    table = page(tmp_path).words.split("What does each claim become?")[1].split("Where ε proved is above ε claimed")[0]
    assert "9.13" in table
    assert table.index("static") < table.index("plrvo") < table.index("leaky")
    assert "nonprivate" not in table


def test_the_certified_curve_of_a_ledger_falls_and_holds_its_epsilon(tmp_path: Path) -> None:
    """A Gaussian release of mu 1 has epsilon 0 from delta 0.3829 on."""
    release = Release(sample_rate=1.0, noise_multiplier=1.0)
    header = RunHeader("static", "gdp_clt", "certified", epsilon=9.0, delta=1e-5, unit="record", units=800)
    with Ledger.create(tmp_path / "ledger.jsonl", header, Counter({release: 1})) as ledger:
        ledger.charge(release)
    curve = privacy_curve(tmp_path / "ledger.jsonl")
    certified = header.price(Counter({release: 1})).certified
    assert (certified, 1e-5) in curve
    assert [epsilon for epsilon, _ in curve] == sorted((epsilon for epsilon, _ in curve), reverse=True)
    assert curve[-1] == (pytest.approx(0.0, abs=1e-9), 0.4)
    for epsilon, delta in curve:
        assert gdp_delta(1.0, epsilon) <= delta * (1 + 1e-9)
    raw = Release(sample_rate=1.0, noise_multiplier=0.0, noise="none")
    header = RunHeader("nonprivate", "gdp_clt", "published", epsilon=None, delta=1e-5, unit="record", units=800)
    with Ledger.create(tmp_path / "open.jsonl", header, Counter({raw: 1})) as ledger:
        ledger.charge(raw)
    assert privacy_curve(tmp_path / "open.jsonl") == []


def test_plain_dp_sgd_claims_what_its_users_publish_unless_it_was_calibrated_otherwise(tmp_path: Path) -> None:
    release = Release(sample_rate=0.01, noise_multiplier=1.0)
    header = RunHeader("static", "gdp_clt", "certified", epsilon=9.0, delta=1e-5, unit="record", units=800)
    with Ledger.create(tmp_path / "ledger.jsonl", header, Counter({release: 2})) as ledger:
        ledger.charge(release)
        ledger.charge(release)
    by_clt = header.price(Counter({release: 2})).published
    run = result("static", epsilon_published=by_clt)
    shown = as_users_claim(run, tmp_path / "ledger.jsonl")
    assert shown["epsilon_published"] == rdp_epsilon(Counter({release: 2}), 1e-5) > 2 * by_clt
    assert shown["epsilon_clt"] == by_clt
    assert [point["epsilon_published"] for point in shown["history"]] == [
        rdp_epsilon(Counter({release: n}), 1e-5) for n in (1, 2)
    ]
    for other in (run | {"accounting": "published"}, run | {"mechanism": "quantile"}, run | {"plain": False}):
        assert as_users_claim(other, tmp_path / "ledger.jsonl") == other | {"claimed_by": "CLT"}
    endless = run | {"epsilon_published": math.inf}
    assert as_users_claim(endless, tmp_path / "ledger.jsonl") == endless
    games = {"whole_run": {"claim_refuted": "the paper's claim is wrong"}, "epsilon_published": by_clt}
    made = audit_as_users_claim(games, shown)
    assert (made["epsilon_published"], made["whole_run"]["claim_refuted"]) == (shown["epsilon_published"], None)
    assert audit_as_users_claim(games, run) == games
    quantile = as_users_claim(run | {"mechanism": "quantile", "label": "tiny.quantile"}, tmp_path / "ledger.jsonl")
    write_report([shown, quantile], tmp_path / "report", "x")
    words = page(tmp_path / "report").words
    table = " ".join(words.split("could refute")[1].split()).split("What does each claim become?")[0]
    assert re.search(r" static .* [\d.]+ RDP.* quantile .* [\d.]+ CLT", table)
    assert "Claims by different accountants do not compare" in table
    write_report([quantile], tmp_path / "alone", "x")
    assert "Claims by different" not in page(tmp_path / "alone").words
