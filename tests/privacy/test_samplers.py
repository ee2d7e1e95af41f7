"""Samplers: what a release says of its sampler, what accountants refuse, and the commands that price and list them."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dptune.cli import app
from dptune.core.errors import ConfigError
from dptune.privacy.accountants import epsilons, pld_epsilon, quick_epsilon, rdp_epsilon, smallest_epsilon
from dptune.privacy.accounting.loss_profile import profile_of
from dptune.privacy.accounting.renyi_filter import RenyiFilter
from dptune.privacy.accounting.sampled_gaussian import gdp_epsilon
from dptune.privacy.ledger import Ledger
from dptune.privacy.ledger_file import LedgerError
from dptune.privacy.release import Release
from dptune.privacy.samplers.sampler import POISSON, SAMPLERS, Sampler, sampler_of
from dptune.privacy.samplers.sampler_bounds import least_epsilon
from dptune.privacy.samplers.shuffled_batches import least_shuffled_epsilon
from tests.privacy.test_ledger import header

SHUFFLE = Release(1 / 65, 1.3521, sampler=Sampler("shuffle", batches=65))
OTHERS = [
    Sampler("shuffle", batches=100),
    Sampler("balls_in_bins", batches=100),
    Sampler("truncated_poisson", units=10_000, max_batch=180),
    Sampler("fixed_size"),
]
PLAN = "--records 10000 --batch 100 --epochs 3 --delta 1e-5"


def run(line: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, line.split())
    return result.exit_code, result.output


def priced(line: str) -> dict[str, float]:
    code, output = run(f"{line} --json")
    assert code == 0, output
    found: dict[str, float] = json.loads(output)
    return found


def test_old_releases_are_poisson_and_are_written_as_they_were() -> None:
    old = Release(0.01, 1.0)
    assert old.sampler == POISSON
    assert "sampler" not in old.to_dict()
    assert Release.from_dict(old.to_dict()) == old


@pytest.mark.parametrize("sampler", [*OTHERS, Sampler("full")], ids=lambda one: one.name)
def test_a_release_keeps_its_sampler(sampler: Sampler) -> None:
    release = Release(1.0 if sampler.name == "full" else 0.01, 1.0, sampler=sampler)
    assert Release.from_dict(json.loads(json.dumps(release.to_dict()))) == release


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ("shuffle", "is not a sampler"),
        ({"name": "shuffel"}, "unknown sampler 'shuffel'"),
        ({"name": ["shuffle"]}, "unknown sampler"),
        ({}, "is not a sampler"),
        ({"name": "shuffle", "batches": 1000}, "with 1000 batches. Fix: use 0.001"),
        ({"name": "balls_in_bins", "batches": 101}, "0.01 does not go with sampler balls_in_bins with 101 batches"),
        ({"name": "shuffle"}, "batches: 0 does not go with"),
        ({"name": "shuffle", "batches": 2.5}, "batches: 2.5 does not go with"),
        ({"name": "poisson", "batches": 2}, "batches: 2 does not go with"),
        ({"name": "cyclic_poisson"}, "is made by bands"),
        ({"name": "full"}, "does not go with sampler full"),
        ({"name": "fixed_size", "more": 1}, "is not a sampler"),
    ],
)
def test_a_ledgers_sampler_is_checked(written: object, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Release.from_dict({**Release(0.01, 1.0).to_dict(), "sampler": written})


@pytest.mark.parametrize("sampler", OTHERS, ids=lambda one: one.name)
def test_no_accountant_of_poisson_sampling_prices_another(sampler: Sampler) -> None:
    releases = Counter({Release(0.01, 1.0, sampler=sampler): 300})
    for accountant in (pld_epsilon, rdp_epsilon):
        with pytest.raises(ConfigError, match=f"sampler: {sampler.name} is not Poisson sampling"):
            accountant(releases, 1e-5)
    with pytest.raises(ConfigError, match="without a search"):
        profile_of(releases)
    assert smallest_epsilon(releases, 1e-5) <= quick_epsilon(releases, 1e-5) * (1 + 1e-9)


def test_samplers_that_are_mixed_have_no_price() -> None:
    mixed = Counter({SHUFFLE: 65, Release(0.01, 1.0): 10})
    with pytest.raises(ConfigError, match=r"2 kinds of release \(samplers: poisson, shuffle\) have no joint price"):
        epsilons(mixed, 1e-5)
    parts = Counter({Release(1 / 65, 1.3521, part=1, sampler=SHUFFLE.sampler): 65, Release(0.01, 1.0, part=2): 10})
    assert epsilons(parts, 7.424e-6).certified == pytest.approx(3.14878, rel=1e-5)


def test_noise_of_another_family_is_refused() -> None:
    with pytest.raises(ConfigError, match="shuffle is priced for independent Gaussian noise that never moves"):
        Release(0.01, 1.0, adaptive=True, sampler=SHUFFLE.sampler)


def test_a_renyi_filter_prices_no_other_sampler() -> None:
    """Its costs are those of Poisson sampling, which would be too low."""
    mixed = Counter({Release(0.01, 2.0, adaptive=True): 3, Release(0.01, 2.0, sampler=OTHERS[0]): 3})
    assert math.isinf(epsilons(mixed, 1e-5, renyi_filter=RenyiFilter.plan(3.0, 1e-5, 0.01, 2000)).certified)


def test_an_epoch_that_was_begun_counts_whole() -> None:
    whole = [epsilons(Counter({SHUFFLE: count}), 1e-5).certified for count in (65, 66, 130, 131)]
    expected = [gdp_epsilon(math.sqrt(epochs) / 1.3521, 1e-5) for epochs in (1, 2, 2, 3)]
    assert whole == pytest.approx(expected, rel=1e-8)


def test_at_least_counts_whole_epochs_and_nothing_beside_gradients() -> None:
    """A begun epoch may not have met the unit; a count beside the sum takes a share of the sensitivity."""
    assert least_epsilon(Counter({SHUFFLE: 64}), 1e-5) == 0
    assert least_epsilon(Counter({SHUFFLE: 129}), 1e-5) == least_epsilon(Counter({SHUFFLE: 65}), 1e-5)
    assert least_epsilon(Counter({replace(SHUFFLE, statistics=("gradient sum", "count")): 65}), 1e-5) is None


def test_shuffled_batches_are_priced_as_an_interval() -> None:
    found = priced(
        "account static --sampler shuffle --batch 1024 --records 66013 --epochs 1 --set noise_multiplier=1.3521 "
        "--delta 7.424e-6"
    )
    assert found["epsilon_at_least"] == pytest.approx(2.35463, rel=1e-5)
    assert found["epsilon_certified"] == pytest.approx(3.14878, rel=1e-5)
    assert found["epsilon_if_it_were_poisson"] < 0.5
    code, text = run(f"account static --sampler shuffle {PLAN} --set noise_multiplier=2")
    assert code == 0
    assert text.startswith("With the sampler shuffle, epsilon is at least ")
    assert "(zero-out of one unit)" in text


def test_a_last_batch_that_is_left_out_counts_as_such() -> None:
    """66,013 units in batches of 1,024: 64 whole ones, and 477 units that an epoch leaves out."""
    shuffled = "account static --sampler shuffle --delta 7.424e-6 --set noise_multiplier=1.3521 --epochs 2 --batch 1024"
    dropped = priced(f"{shuffled} --records 66013 --drop-last")
    assert (dropped["batches"], dropped["steps"]) == (64, 128)
    assert dropped["left_out_of_an_epoch"] == pytest.approx(477 / 66013)
    expected = least_shuffled_epsilon(1.3521, 64, 2, 7.424e-6, 477 / 66013)
    assert dropped["epsilon_at_least"] == pytest.approx(expected, rel=1e-12)
    assert dropped["epsilon_certified"] == priced(f"{shuffled} --records 66013")["epsilon_certified"]
    whole = [priced(f"{shuffled} --records 65536 {last}") for last in ("", "--drop-last")]
    assert whole[0] == whole[1], "nothing is left out"
    release = Release(1024 / 66013, 1.3521, sampler=Sampler("shuffle", batches=64))
    assert Release.from_dict(release.to_dict()) == release


@pytest.mark.parametrize("mechanism", ["quantile", "dc_sgd_p"])
def test_nothing_is_shown_at_least_of_a_run_that_will_count(mechanism: str) -> None:
    """Before a run these controllers plan no statistics, and so the planned releases name none."""
    found = priced(f"account {mechanism} --sampler shuffle {PLAN} --set noise_multiplier=2")
    assert "epsilon_at_least" not in found
    assert found["epsilon_certified"] == pytest.approx(gdp_epsilon(math.sqrt(3) / 2, 1e-5), rel=1e-8)


@pytest.mark.parametrize(
    "sampler", ["shuffle", "balls_in_bins", "fixed_size", "truncated_poisson --max-batch 180", "full --batch 10000"]
)
def test_calibrated_noise_keeps_the_certified_budget(sampler: str) -> None:
    plan = PLAN.replace("--batch 100 ", "") if "full" in sampler else PLAN
    found = priced(f"calibrate static --epsilon 3 --sampler {sampler} {plan}")
    noise = found["noise_multiplier"]
    assert 2.95 < found["epsilon_certified"] <= 3
    again = priced(f"account static --sampler {sampler} {plan} --set noise_multiplier={noise}")
    assert again["epsilon_certified"] == pytest.approx(found["epsilon_certified"], rel=1e-9)
    poisson = priced(f"calibrate static --epsilon 3 {PLAN}")["noise_multiplier"]
    if "balls" in sampler:
        assert 0.9 * poisson < noise < poisson
    else:
        assert noise >= poisson * (1 - 1e-4)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("account static --sampler shuffle --records 100 --batch 200 --epochs 1", "batch: 200.0 is not in"),
        ("account static --sampler shufle " + PLAN, "unknown sampler 'shufle'. Fix: use one of poisson, "),
        ("account static --sampler balls_in_bins --records 100 --batch 30 --epochs 1", "Fix: use 25, for 4 batches."),
        ("account static --sampler balls_in_bins --sample-rate 0.3 --steps 9", "Fix: use 0.25, for 4."),
        ("account static --sampler balls_in_bins --sample-rate 0 --steps 9", "sample_rate: 0.0 is not in (0, 1]"),
        ("account static --sampler balls_in_bins --sample-rate nan --steps 9", "sample_rate: nan is not in (0, 1]"),
        ("account static --sampler shuffle --sample-rate 0 --steps 9", "sample_rate: 0.0 is not in (0, 1]"),
        ("account static --sampler shuffle --sample-rate -1 --steps 9", "sample_rate: -1.0 is not in (0, 1]"),
        ("account static --sampler shuffle --sample-rate 0.0153846 --steps 6500", "or give --records, --batch and"),
        ("account static --sampler shuffle --records 100 --batch 10.5 --epochs 1", "10.5 is not a whole number"),
        ("account static --sampler truncated_poisson " + PLAN, "max_batch: is missing"),
        ("account static --sampler truncated_poisson --max-batch 90 " + PLAN, "is below the expected batch"),
        ("account static --sampler truncated_poisson --max-batch 110 " + PLAN, "Fix: use 172 or more"),
        ("account static --sampler truncated_poisson --sample-rate 0.1 --steps 9", "records: is missing"),
        ("account static --max-batch 90 " + PLAN, "max_batch: does not go with sampler poisson"),
        (
            "account static --drop-last " + PLAN,
            "drop_last: does not go with sampler poisson. Fix: leave it out, or use",
        ),
        ("account static --sampler full --drop-last " + PLAN, "drop_last: does not go with sampler full"),
        ("account pmixed --drop-last", "pmixed takes no batches of records"),
        ("account static --sampler fixed_size --records 100 --batch 10.5 --epochs 1", "10.5 is not a whole number"),
        ("account static --sampler full " + PLAN, "puts all units into every batch"),
        ("account static --sampler cyclic_poisson " + PLAN, "static has no bands"),
        ("account banded --set bands=8 --sampler shuffle " + PLAN, "does not go with banded, whose proof needs"),
        ("account laplace --sampler shuffle " + PLAN, "Fix: use the mechanism static"),
        ("account static --sampler shuffle --candidates 10 " + PLAN, "shuffle is not Poisson sampling"),
        ("account pmixed --sampler shuffle", "pmixed takes no batches of records"),
    ],
)
def test_what_does_not_go_together_is_one_sentence_with_a_fix(line: str, message: str) -> None:
    delta = "" if "--delta" in line else " --delta 1e-5"
    noise = "" if "pmixed" in line else " --set noise_multiplier=1"
    code, output = run(line + delta + noise)
    assert code == 2
    assert message in output.splitlines()[-1]
    assert "Fix: " in output


@pytest.mark.parametrize("batch", [1.01, 7, 30, 95, 300, 999])
@pytest.mark.parametrize("records", [97, 1000, 4357, 42_061, 67_349])
def test_the_advised_bins_are_taken_and_easily_typed(records: int, batch: float) -> None:
    """Of 1,000 records 33 batches have 30.303030303030305 units, which nobody types, and 30.3 is refused."""
    for known in (records, None):
        if batch > records:
            continue
        try:
            sampler_of("balls_in_bins", batch / records, records=known, batch=batch)
        except ConfigError as error:
            advice = re.search(r"use ([0-9.e-]+), for ([0-9]+)", error.fix)
            assert advice is not None
            typed, bins = advice.groups()
            assert len(typed.replace(".", "").replace("e-0", "").lstrip("0")) <= 8
            rate = float(typed) / (known or 1)
            assert sampler_of("balls_in_bins", rate, records=known, batch=float(typed)).batches == int(bins)
            assert 0.8 <= rate * records / batch <= 1.25 or batch > 0.4 * records


def test_the_advised_batch_is_priced() -> None:
    plan = "account static --sampler balls_in_bins --records 1000 --epochs 2 --delta 1e-4 --set noise_multiplier=1"
    code, output = run(f"{plan} --batch 30")
    assert code == 2
    assert "is 33.3333. Fix: use 31.25, for 32 batches." in " ".join(output.split())
    found = priced(f"{plan} --batch 31.25")
    assert (found["batches"], found["steps"]) == (32, 64)


@pytest.mark.parametrize("sampler", [*OTHERS, Sampler("full"), POISSON])
def test_a_paper_claims_nothing_for_batches_that_its_formula_is_not_for(sampler: Sampler) -> None:
    """The formula of Poisson batches gave 4.35 for a full batch whose exact epsilon is 4."""
    rate = 1.0 if sampler.name == "full" else 0.01
    release = Release(rate, 1.87263, sampler=sampler)
    found = epsilons(Counter({release: 3}), 1e-5)
    assert math.isfinite(found.published) == (sampler.name in ("poisson", "truncated_poisson"))
    assert math.isfinite(found.certified)
    name = f"{sampler.name}{' --max-batch 180' if sampler.max_batch else ''}"
    plan = f"static --sampler {name} {PLAN.replace('--batch 100 ', '') if rate == 1 else PLAN}"
    shown = priced(f"account {plan} --set noise_multiplier=1.87263")["epsilon_published"]
    if math.isfinite(found.published):
        assert shown > 0
        return
    assert shown == "not defined: the paper gives none for this sampler"
    code, output = run(f"calibrate {plan} --epsilon 4 --accounting published")
    assert code == 2
    assert f"the paper of static claims nothing for sampler {sampler.name}. Fix: use certified" in output
    assert priced(f"calibrate {plan} --epsilon 4 --accounting certified")["noise_multiplier"] > 0


def test_the_list_of_samplers() -> None:
    code, output = run("samplers")
    assert code == 0
    for name, law in SAMPLERS.items():
        assert f"{name}: {law.law}" in output
    assert set(json.loads(run("samplers --json")[1])) == set(SAMPLERS)
    for name in set(SAMPLERS) - {"cyclic_poisson", "poisson"}:
        plan = {"records": 1000, "batch": 1000.0 if name == "full" else 100.0}
        rate = plan["batch"] / plan["records"]
        made = sampler_of(name, rate, records=1000, batch=plan["batch"], max_batch=200 if "trunc" in name else None)
        assert made.name == name


def test_training_draws_no_batches_by_another_sampler(tmp_path: Path) -> None:
    with Ledger.create(tmp_path / "ledger.jsonl", header(), Counter()) as ledger:
        with pytest.raises(LedgerError, match="shuffle is a sampler that no training draws its batches by"):
            ledger.charge(SHUFFLE)
        assert ledger.releases == 0


def test_verify_says_whom_another_samplers_price_takes_for_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ledger that some later version, or an editor, wrote. Its epsilon is not one of add/remove."""
    with monkeypatch.context() as patched, Ledger.create(tmp_path / "ledger.jsonl", header(), Counter()) as ledger:
        patched.setattr(Sampler, "like_poisson", True)
        ledger.charge(SHUFFLE)
        ledger.finish()
    code, output = run(f"verify {tmp_path / 'ledger.jsonl'} --json")
    assert code == 0
    found = json.loads(output)
    assert (found["sampler"], found["neighbours"]) == ("shuffle", "zero-out of one unit")
    assert found["epsilon_certified"] == pytest.approx(gdp_epsilon(1 / 1.3521, 1e-5), rel=1e-8)


def test_two_runs_by_bins_are_not_priced_as_one() -> None:
    """Half an epoch of each: one epoch of 10 bins costs 2.19, the two halves at least 2.4 (by simulation)."""
    half = Release(0.1, 1.0, sampler=Sampler("balls_in_bins", batches=10)), 5
    with pytest.raises(ConfigError, match="inherited: holds releases of a sampler other than poisson"):
        replace(header(), inherited=(half,))
    after_poisson = replace(header(), inherited=((Release(0.1, 1.0), 5),))
    with pytest.raises(ConfigError, match="no joint price"):
        after_poisson.price(Counter({half[0]: 5}))


@pytest.mark.parametrize("law", [Sampler("balls_in_bins", batches=10), Sampler("truncated_poisson", 0, 80, 40)])
def test_where_noise_differs_the_least_counts_for_all(law: Sampler) -> None:
    less, more = (Release(0.1, noise, sampler=law) for noise in (1.0, 1.5))
    mixed = smallest_epsilon(Counter({more: 12, less: 8}), 1e-5)
    assert mixed == smallest_epsilon(Counter({less: 20}), 1e-5) > smallest_epsilon(Counter({more: 20}), 1e-5)
