"""Commands name the accountant of ``epsilon_published``, and for plain DP-SGD also print what Renyi DP proves."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from test_cli import ledger
from typer.testing import CliRunner

from dptune.cli import app
from dptune.privacy.accountants import PUBLISHED_ACCOUNTANTS
from dptune.privacy.accounting.claimed import CLAIMED_BY
from dptune.privacy.accounting.renyi_filter import RenyiFilter
from dptune.privacy.ledger import Ledger
from dptune.privacy.release import Release
from dptune.privacy.run_header import RunHeader
from tasks.report.claims import as_users_claim

SAMPLING = ("--delta", "1e-5", "--sample-rate", "0.01", "--steps", "20")
CLT, BY, RENYI = "central limit (no bound)", "epsilon_published_by", "epsilon_published_by_renyi_dp"


def told(*arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*arguments, "--json"], prog_name="dptune")
    assert done.exit_code in (0, 1), done.output
    return dict(json.loads(done.stdout))


def test_every_accountant_of_a_paper_has_a_name() -> None:
    assert set(CLAIMED_BY) == set(PUBLISHED_ACCOUNTANTS)


def test_verify_and_the_report_show_one_claim_of_a_plain_run(tmp_path: Path) -> None:
    file = ledger(tmp_path)
    found = told("verify", str(file))
    assert found[BY] == CLT
    result = {"mechanism": "static", "accounting": "certified", "history": []}
    shown = as_users_claim(result | {"epsilon_published": found["epsilon_published"]}, file)
    assert (shown["epsilon_clt"], shown["epsilon_published"]) == (found["epsilon_published"], found[RENYI])
    assert found["epsilon_published"] < found["epsilon_certified"] < found[RENYI]
    rows = CliRunner().invoke(app, ["verify", str(file)]).stdout
    assert f"│ {BY}          │ {CLT}" in rows


def test_account_and_calibrate_name_the_accountant_too() -> None:
    priced = told("account", "static", *SAMPLING, "--set", "noise_multiplier=1.0")
    found = told("calibrate", "static", "--epsilon", "2", *SAMPLING)
    assert priced[BY] == found[BY] == CLT
    assert found["epsilon_published"] < found["epsilon_certified"] <= 2 < found[RENYI]


@pytest.mark.parametrize(
    ("mechanism", "named"),
    [
        (("rldp", "--set", "pairs=12"), CLT),  # a sensitivity above 1, which its paper does not count
        (("rldp_published",), CLT),  # its noise follows earlier releases
        (("autoclip_published",), CLT),  # nothing is proved of it, by Renyi DP or otherwise: it reads raw norms
        (("laplace",), "pure DP"),
        (("banded", "--set", "bands=2", "--sampler", "cyclic_poisson"), "loss distribution, as epsilon_certified"),
        (("nonprivate",), None),
    ],
)
def test_other_mechanisms_have_no_figure_of_renyi_dp_beside_their_claim(
    mechanism: tuple[str, ...], named: str | None
) -> None:
    noise = () if named is None else ("--set", "noise_multiplier=1.0")
    found = told("account", *mechanism, *SAMPLING, *noise)
    assert found.get(BY) == named
    assert RENYI not in found


def verified(file: Path, release: Release, **facts: Any) -> dict[str, Any]:
    """What ``verify`` says of a run of plain DP-SGD that made one release."""
    header = RunHeader("static", "gdp_clt", "certified", None, 1e-5, "record", 100, **facts)
    with Ledger.create(file, header, Counter({release: 1})) as book:
        book.charge(release)
        book.finish()
    return told("verify", str(file))


def test_renyi_dp_counts_what_a_run_inherited_or_says_nothing(tmp_path: Path) -> None:
    own, other = Release(0.01, 1.0), Release(0.01, 0.8)
    found = verified(tmp_path / "own.jsonl", own, inherited=((own, 40),))
    assert found[RENYI] >= found["epsilon_certified"] > verified(tmp_path / "none.jsonl", own)["epsilon_certified"]
    assert RENYI not in verified(tmp_path / "other.jsonl", own, inherited=((other, 40),))


def test_noise_that_moves_within_a_filter_has_no_figure_of_renyi_dp(tmp_path: Path) -> None:
    """What it may have spent is the filter's budget, not the price of the noise that it had."""
    moved = Release(0.01, 1.0, adaptive=True)
    found = verified(tmp_path / "ledger.jsonl", moved, renyi_filter=RenyiFilter.plan(2.0, 1e-5, 0.01, 20))
    assert found["epsilon_certified"] < 2.01
    assert found[BY] == CLT
    assert RENYI not in found


def test_a_claim_that_is_not_defined_has_no_accountant() -> None:
    records = ("--delta", "1e-5", "--records", "1000", "--batch", "100", "--epochs", "2")
    found = told("account", "static", *records, "--set", "noise_multiplier=4.0", "--sampler", "balls_in_bins")
    assert str(found["epsilon_published"]).startswith("not defined")
    assert not {BY, RENYI} & set(found)


def test_answers_and_policies_name_it(tmp_path: Path) -> None:
    assert told("account", "pmixed", "--delta", "1e-5")[BY] == CLAIMED_BY["pmixed"]
    assert told("account", "dppg", "--delta", "1e-5", "--set", "noise_multiplier=6")[BY] == CLAIMED_BY["dppg"]
