"""The pages of the papers: claims are what their commands print, certified figures are rounded up, limits down."""

from __future__ import annotations

import json
import re
import shlex
from functools import cache
from typing import Any

import pytest
from pages import DOCS, ROOT
from typer.testing import CliRunner

from dptune.cli import app
from dptune.core.digits import at_least, at_most
from dptune.policy.schedules import PolicyTraining
from tasks.profile import read_profile
from tasks.settings.params import load_settings
from tasks.settings.policy import make_training

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
    assert not "".join(text[start + 2 + count :][:1]).startswith("|"), "the table has more rows"
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


STUDIES = {
    "SST-2": (256, 66013, 197, "7.424e-6"),
    "WikiText-2": (16, 310, 40, "1e-5"),
    "E2E": (128, 41232, 41, "8e-6"),
}


@pytest.mark.parametrize("study", STUDIES)
def test_noise_claims_and_proofs_of_the_benchmarks(study: str) -> None:
    """Both tables of a study: equal certified epsilon, then what the papers' accountants call epsilon 1."""
    batch, units, steps, delta = STUDIES[study]
    plan = f"--sample-rate {batch / units!r} --steps {steps} --delta {delta}"
    text = (DOCS / "findings" / "papers.md").read_text(encoding="utf-8")
    section = text.partition(f"## {study} as measured\n")[2].partition("\n## ")[0]
    at_proof, at_claim = (
        [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
        for table in re.findall(r"\| mechanism \| (?:budget|claimed).*\n\| ---.*\n((?:\|.*\n)+)", section)[:2]
    )
    options = {"rldp": "--set pairs=4", "plrvo": "--set dimension=16384 --set max_grad_norm=1"}
    for accounting, (name, budget, shown, *_, noise) in (
        *(("certified", row) for row in at_proof if row[0] != "nonprivate"),
        *(("published", row) for row in at_claim),
    ):
        mechanism = name.partition(",")[0]
        command = f"calibrate {mechanism} --epsilon {budget} --accounting {accounting} {plan}"
        found = printed(f"{command} {options.get(mechanism, '--set max_grad_norm=1')}")
        check(noise, found["noise_multiplier"], "nearest")
        if accounting == "certified":
            check(shown, found[CLAIM], "nearest")
        else:
            check(shown, found[PROOF], "up")
    for size, first, then in re.findall(
        r"\(([\d,]+)\s+of\s+them\).*?multiplier\s+of\s+(\S+) .*?of\s+(\S+) in", section, re.S
    ):
        for epsilon, shown in ((1, first), (8, then)):
            whole = f"--sample-rate {batch / int(size.replace(',', ''))!r} --steps {steps} --delta {delta}"
            check(shown, printed(f"calibrate static --epsilon {epsilon} {whole}")["noise_multiplier"], "nearest")


@pytest.mark.long
def test_where_bands_do_nothing() -> None:
    plan = "calibrate banded --delta 1e-5 --records 42061 --epochs 3"
    text = (DOCS / "findings" / "correlated.md").read_text(encoding="utf-8")
    for batch, *cells in rows("findings/correlated.md", "| batch of 42,061 units", 4):
        for epsilon, cell in zip((0.5, 2, 8), cells, strict=True):
            found = printed(f"{plan} --epsilon {epsilon} --batch {batch.replace(',', '')} --set objective=mean")
            left = f"{found['noise_in_last_sum_over_independent']:.2f}".removesuffix(".00")
            assert cell.replace("*", "").removesuffix("s") == f"{left}, {found['bands']} band"
    (recent,) = re.findall(r"default's leave ([\d., and]+) at epsilon 2,\s+with ([\d, and]+) bands", text)
    shares, bands = (re.findall(r"[\d.]+", part) for part in recent)
    for size, share, number in zip((64, 256, 1024, 4096), shares, bands, strict=True):
        found = printed(f"{plan} --epsilon 2 --batch {size}")
        assert (f"{found['noise_in_recent_sum_over_independent']:.2f}", found["bands"]) == (share, int(number))


def test_attacked_steps_of_optimised_noise() -> None:
    for cell, claim, _, proof in rows("findings/noise.md", "| mechanism | claims | shown | certified", 2):
        check_row(f"account {cell.strip('`')} --delta 1e-5 --sample-rate 1 --steps 1", claim, proof)


def test_settings_of_dp_policy_gradient() -> None:
    """Tables 2 and 3, as this page and the profile have them."""
    text = " ".join((DOCS / "findings" / "dp_policy_gradient.md").read_text(encoding="utf-8").split())
    (table,) = re.findall(
        r"discount (\S+); eta (\S+), divided by (\S+) every (\S+) episodes, at least (\S+); alpha (\S+); "
        r"confidence (\S+); (\S+) Fisher episodes; regulariser ([\d.]+)\)",
        text,
    )
    one = PolicyTraining(algorithm="l2", users=1)
    mine = (one.discount, one.step_size, one.step_divisor, one.step_every, one.least_step)
    assert list(map(float, table)) == [*mine, one.trust, 1 - one.miss, one.fisher_episodes, one.fisher_regulariser]
    studies = load_settings(overrides=read_profile(ROOT / "profiles" / "policy-paper.yaml")).policy.studies
    names = ("learning_rate", "minibatches", "epochs", "steps", "radius", "entropy_weight", "decay", "hidden", "users")
    mujoco, dosing = (2.04e-4, 64, 8, 2048, 1.8, 0.02, 0.91, 64, 8), (9.25e-4, 2, 4, 64, 0.08, 0.01, 0.97, 64, 8)
    printed_settings = {
        **dict.fromkeys(("cartpole", "acrobot"), (7.26e-4, 2, 8, 64, 0.05, 0.36, 0.85, 64, 8)),
        **dict.fromkeys(("halfcheetah", "hopper"), mujoco),
        **dict.fromkeys(("dosing0", "dosing1"), dosing),
    }
    for study, expected in printed_settings.items():
        training = make_training(studies[study].training)
        assert tuple(getattr(training, name) for name in names) == expected, study
    assert {name for name in studies if name.startswith("river")} == {"riverswim", "riverswim09"}
