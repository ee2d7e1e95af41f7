"""The pages of the papers: claims are what their commands print, certified figures are rounded up, limits down."""

from __future__ import annotations

import json
import re
import shlex
from functools import cache
from typing import Any

import pytest
from pages import DOCS
from typer.testing import CliRunner

from dptune.cli import app
from dptune.core.digits import at_least, at_most

PLRVO = "account plrvo --sample-rate 0.01 --steps 300 --delta 1e-5"
LMO = "account lmo_dp --delta 1e-10 --sample-rate 0.030409"
CLAIM, PROOF, LIMIT = "epsilon_published", "epsilon_certified", "epsilon_floor_high_dimension"


@cache
def printed(command: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*shlex.split(command), "--json"])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def rows(page: str, header: str, count: int) -> list[list[str]]:
    """The cells of the table under this header line, which has ``count`` rows."""
    text = (DOCS / page).read_text(encoding="utf-8").splitlines()
    (start,) = [number for number, line in enumerate(text) if line.startswith(header)]
    lines = text[start + 2 : start + 2 + count]
    assert not text[start + 2 + count].startswith("|"), "the table has more rows"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def check(shown: str, value: float, way: str) -> None:
    """Compare a figure of a page with what was computed: rounded "up", "down" or to the "nearest"."""
    shown = shown.replace("*", "").replace(",", "")
    digits = len(re.sub(r"^0*\.?0*|\.", "", shown))
    rounded = {"up": at_most, "down": at_least, "nearest": lambda one, count: f"{one:.{count}g}"}[way]
    assert float(shown) == pytest.approx(float(rounded(value, digits)), rel=1e-9), (shown, value, way)


def check_row(command: str, claim: str | None, proof: str | None = None, limit: str | None = None) -> None:
    found = printed(command)
    for shown, name, way in ((claim, CLAIM, "nearest"), (proof, PROOF, "up"), (limit, LIMIT, "down")):
        if shown is not None:
            check(shown, found[name], way)


def test_a_figure_that_is_rounded_the_wrong_way_is_found() -> None:
    check("4.38", 4.37718, "up")
    check("**.0895**", 0.0894062, "up")
    check("5,426", 5425.51, "up")
    for shown, value, way in (("4.37", 4.37718, "up"), (".0287", 0.028601, "down"), (".0445", 0.0444484, "nearest")):
        with pytest.raises(AssertionError):
            check(shown, value, way)


def test_dp_policy_gradient() -> None:
    claims, proofs = (row[1:] for row in rows("findings/dp_policy_gradient.md", "| z | .05", 2))
    for z, claim, proof in zip((0.05, 0.1, 0.25, 0.5, 1, 2, 3, 4, 5, 6), claims, proofs, strict=True):
        check_row(f"account dppg --set noise_multiplier={z} --delta 1e-5", claim, proof)
    text = (DOCS / "findings" / "dp_policy_gradient.md").read_text(encoding="utf-8")
    for pattern, options in (
        (r"At delta 1e-3 it costs ([\d.]+) and", "--set noise_multiplier=.1 --delta 1e-3"),
        (r"At delta 1e-3 it costs [\d.]+ and ([\d.]+)\.", "--set noise_multiplier=.5 --delta 1e-3"),
        (r"z \.01 certifies ([\d,]+) in place", "--set noise_multiplier=.01 --delta 1e-5"),
        (r"claimed 5\.0, certified ([\d.]+)\n", "--set noise_multiplier=1 --delta 1e-5"),
    ):
        check(re.findall(pattern, text)[0], printed(f"account dppg {options}")[PROOF], "up")


def test_pmixed_of_an_infinite_order() -> None:
    text = (DOCS / "findings" / "pmixed.md").read_text(encoding="utf-8")
    ((command, proof),) = re.findall(r"dptune (.*) +# claims 8, certifies (\S+)\n", text)
    for shown in (proof, *re.findall(r"they cost (\S+), for a shard", text)):
        check_row(command, "8", shown)


@pytest.mark.long
def test_budgets_of_rldp() -> None:
    plan = "account rldp_published --sample-rate 0.00021836743 --delta 1e-5"
    for claim, long, *paid, short, one, twelve in rows("findings/rldp.md", "| claimed ε | sigma, 13,739", 5):
        for sigma, steps, pairs, shown in (
            *((long, 13739, pairs, shown) for pairs, shown in zip((1, 12), paid, strict=True)),
            (short, 3600, 1, one),
            (short, 3600, 12, twelve),
        ):
            found = printed(f"{plan} --steps {steps} --set pairs={pairs} --set noise_multiplier={sigma}")
            check(shown, found["epsilon_noise_only"], "up")
            assert found[CLAIM] == pytest.approx(float(claim), rel=2e-3)


def test_tables_of_plrvo() -> None:
    for _, clip, k, _, theta, claim, proof, limit in rows("findings/plrvo.md", "| printed | clip | k | theta", 9):
        options = f"--set k={k.replace(',', '')} --set theta={theta.strip('*')} --set max_grad_norm={clip}"
        check_row(f"{PLRVO} --set dimension=26010 {options}", claim, proof, limit)


@pytest.mark.long
def test_tables_11_and_12_of_plrvo() -> None:
    for _, k, theta, clip, _, claim, one, proof, limit in rows("findings/plrvo.md", "| table | k | theta", 13):
        options = f"--set k={k.replace(',', '')} --set theta={theta} --set max_grad_norm={clip}"
        check_row(f"{PLRVO} --set dimension=26010 {options}", claim, proof, limit)
        check_row(f"{PLRVO} --set dimension=1 {options}", one)


@pytest.mark.long
def test_table_2_and_figure_9_of_plrvo() -> None:
    plan = "--sample-rate 0.01024 --steps 250 --delta 2e-5"
    found = rows("findings/plrvo.md", "| printed | clip | noise", 4)
    for (_, clip, _, large, middle, one, proof, limit), (k, theta) in zip(
        found, ((141.06, 8.32e-4), (5242.4, 2.08e-5)), strict=False
    ):
        command = f"account plrvo {plan} --set k={k} --set theta={theta} --set max_grad_norm={clip}"
        check_row(f"{command} --set dimension=85800000", large, proof, limit)
        check_row(f"{command} --set dimension=7690", middle)
        check_row(f"{command} --set dimension=1", one)
    for row, noise in zip(found[2:], (0.9456, 1.8812), strict=True):
        check_row(f"account static {plan} --set noise_multiplier={noise}", None, row[6])
    plan = "account plrvo --set k=414.2857 --set theta=2.4196e-4 --set dimension=109482240 --sample-rate 0.00977631"
    for clip, *cells in rows("findings/plrvo.md", "| clip | 10 steps", 3):
        for steps, cell in zip((10, 100, 300, 1000), cells, strict=True):
            claim, proof = cell.rstrip(")").split(" (")
            check_row(f"{plan} --delta 1e-5 --set max_grad_norm={clip} --steps {steps}", claim, proof)


def test_tables_of_lmo_dp() -> None:
    for _, preset, claim, proof, limit, *_ in rows(
        "findings/lmo_dp.md", "| printed total | preset | claim | **cert", 5
    ):
        check_row(f"{LMO} --steps 198 --set preset={preset}", claim, proof, limit)
    for total, preset, small, proof, large, large_proof, *_ in rows(
        "findings/lmo_dp.md", "| printed total | preset | claim at 16", 4
    ):
        plan = f"account lmo_dp --set preset={preset} --delta 8e-6 --steps 410"
        found = printed(f"{plan} --sample-rate {16 / 42061!r}")
        check(small, found["epsilon_as_published_orders_to_127_unsound"], "nearest")
        check(proof, found[PROOF], "up")
        assert float(total) == float(small)
        check_row(f"{plan} --sample-rate 0.02434559", large, large_proof)


def test_samplers_of_the_accounting_page() -> None:
    plan = "account static --records 10000 --epochs 3 --delta 1e-5 --set noise_multiplier=1"
    more = {"truncated_poisson": " --max-batch 180 --batch 100", "full": " --batch 10000"}
    for name, _, least, proof in rows("concepts/accounting.md", "| sampler | neighbours", 6):
        sampler = name.strip("`")
        found = printed(f"{plan} --sampler {sampler}{more.get(sampler, ' --batch 100')}")
        check(proof, found[PROOF], "up")
        assert bool(least) == ("epsilon_at_least" in found)
        if least:
            check(least, found["epsilon_at_least"], "down")


@pytest.mark.long
def test_optimised_noise_at_equal_claims() -> None:
    plans = ("--sample-rate 0.014038166264531696 --steps 72", "--sample-rate 0.0008755369503953596 --steps 173")
    for name, claim, *cells in rows("findings/noise.md", "| mechanism | claims | SYNTHETIC", 6):
        mechanism = {"Gauss": "static", "`plrv": "plrvo --set dimension=4096", "`lmo_": "lmo_dp"}[name[:5]]
        for plan, (_, proof, limit) in zip(plans, (cells[:3], cells[3:]), strict=True):
            found = printed(f"calibrate {mechanism} --epsilon {claim} --accounting published --delta 1e-5 {plan}")
            check(proof, found[PROOF], "up")
            if limit:
                check(limit, found[LIMIT], "down")
