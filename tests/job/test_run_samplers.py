"""``dptune tune --sampler``: runs by truncated batches and balls in bins, from the plan to the verified card."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_tuning import QUICK, checkpoint, rows, write_csv
from typer.testing import CliRunner, Result

import dptune
from dptune.cli import app
from dptune.core.digits import at_most
from dptune.core.errors import ConfigError, DptuneError
from dptune.job.delivery.verification import check_deliverable
from dptune.job.settings import TuneSettings
from dptune.privacy.accountants import gdp_clt_epsilon
from dptune.privacy.samplers.sampler import POISSON, Sampler

BINS = ("--sampler", "balls_in_bins")
CUT = ("--sampler", "truncated_poisson")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_csv(tmp_path / "records.csv", rows(60, 60))


def command(data: Path, *arguments: str) -> Result:
    quick = ["--epsilon", "8", "--epochs", "2", "--rank", "2", "--telemetry", "private", "--unit", "customer_id"]
    given = ["tune", "--model", str(checkpoint()), "--data", str(data), "--out", str(data.parent / "out"), *quick]
    return CliRunner().invoke(app, [*given, *arguments])


@pytest.mark.parametrize(
    ("sampler", "expected", "row"),
    [
        (BINS, Sampler("balls_in_bins", batches=4), "balls in bins: in each epoch of 4 steps each unit in one batch"),
        (CUT, Sampler("truncated_poisson", units=60, max_batch=35), "of more than 35 units so many, at random"),
    ],
)
def test_a_run_says_its_sampler_from_the_plan_to_the_card(
    data: Path, sampler: tuple[str, ...], expected: Sampler, row: str
) -> None:
    planned = command(data, *sampler, "--dry-run", "--json")
    assert planned.exit_code == 0, planned.output
    plan = json.loads(planned.stdout)
    assert (plan["sampler"], plan["expected_batch"], plan["steps"]) == (expected.name, 15, 8)
    assert any("max_batch" in reason for reason in plan["chosen_because"]) == (sampler is CUT)
    assert plan.get("largest_batch") == (expected.max_batch or None)
    done = command(data, *sampler, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["sampler"], found["neighbours"]) == (expected.name, "add or remove one unit")
    assert 7.9 < found["epsilon_certified"] <= 8
    out = data.parent / "out"
    assert {release.sampler for release in check_deliverable(out / "adapter").composition} == {expected}
    card = (out / "adapter" / "README.md").read_text()
    assert row in card
    assert "Poisson: at each" not in card.replace("truncated Poisson", "")
    unclaimed = "| epsilon_published | not defined (the mechanism's paper gives none for this sampler) |"
    assert (unclaimed in card) == (sampler is BINS)
    if sampler is BINS:  # an earlier version wrote the claim for Poisson batches, which a card may still have
        ledger = check_deliverable(out / "adapter")
        (release,) = ledger.composition
        claim = gdp_clt_epsilon(Counter({replace(release, sampler=POISSON): 8}), ledger.header.delta)
        for figure, known in ((claim, True), (0.9 * claim, False)):
            text = at_most(figure, 4) if known else f"{figure:.4g}"
            row = f"| epsilon_published | {text} (as the mechanism's paper counts) |"
            (out / "adapter" / "README.md").write_text(card.replace(unclaimed, row))
            if known:
                check_deliverable(out / "adapter")
                continue
            with pytest.raises(DptuneError, match="do not trust it"):
                check_deliverable(out / "adapter")
        (out / "adapter" / "README.md").write_text(card)
    assert not list(out.rglob("checkpoint*")), "the secret of the bins goes with the checkpoint"
    verified = CliRunner().invoke(app, ["verify", str(out / "adapter"), "--json"])
    assert verified.exit_code == 0, verified.output
    assert json.loads(verified.stdout)["epsilon_certified"] == found["epsilon_certified"]
    again = command(data)
    assert again.exit_code == 2
    assert f"sampler: {expected.name} then, poisson now" in " ".join(again.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((*BINS, "--expected-batch-size", "16"), "expected_batch_size: balls_in_bins needs a whole number of batches"),
        ((*BINS, "--expected-batch-size", "16"), "Fix: use 15, for 4 batches."),
        ((*BINS, "--epochs", "1.5"), "epochs: 1.5 is not a whole number"),
        ((*BINS, "--max-batch", "40"), "max_batch: does not go with sampler balls_in_bins"),
        ((*CUT, "--max-batch", "14"), "max_batch: 14 is below the expected batch of 15"),
        ((*CUT, "--max-batch", "20"), "max_batch: a batch is cut to 20 with a chance of"),
        ((*CUT, "--max-batch", "20"), "which is not below delta. Fix: use 35 or more."),
        ((*BINS, "--mechanism", "banded"), "sampler: balls_in_bins does not go with banded"),
        ((*CUT, "--mechanism", "laplace"), "sampler: truncated_poisson does not go with laplace"),
        (("--sampler", "shuffle"), "'shuffle' is not one of 'poisson', 'truncated_poisson', 'balls_in_bins'"),
    ],
)
def test_what_does_not_go_with_a_sampler_is_refused(data: Path, arguments: tuple[str, ...], problem: str) -> None:
    done = command(data, *arguments)
    assert done.exit_code == 2
    assert problem.replace("_", "").replace("-", "") in " ".join(done.stderr.replace("│", " ").split()).replace(
        "_", ""
    ).replace("-", "")
    assert not list((data.parent / "out").rglob("ledger.jsonl"))


def test_no_search_has_candidates_by_another_sampler() -> None:
    with pytest.raises(ConfigError, match="sampler: balls_in_bins does not go with a search"):
        TuneSettings(epsilon=8, sampler="balls_in_bins").check_search()


def test_planted_gradients_enter_bins_and_their_entries_are_tested(tmp_path: Path) -> None:
    """The library's door, with an auditor's slots among the units: 20 of them, of 80."""
    given: dict[str, Any] = {
        **QUICK,
        "epsilon": 8,
        "audit_canaries": 20,
        "sampler": "balls_in_bins",
        "out": tmp_path / "out",
    }
    given |= {"telemetry": "private", "unit": "customer_id"}
    tuned = dptune.tune(str(checkpoint()), rows(60, 60), **given)
    (release,) = tuned.ledger.composition
    assert (release.sampler.batches, tuned.ledger.header.units) == (10, 80)
    audited = CliRunner().invoke(app, ["audit-run", str(tmp_path / "out"), "--json"])
    assert audited.exit_code == 0, audited.output
    found = json.loads(audited.stdout)
    assert found["sample_rate"] == 0.1
    assert found["accusations"] == []
