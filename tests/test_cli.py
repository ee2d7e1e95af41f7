"""The command line keeps its contract: fields, numbers, exit codes, and errors that name the option."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from dptune import __version__
from dptune.cli import app
from dptune.core.digits import at_least, shown_above
from dptune.mechanisms.noises.gaussian import Gaussian
from dptune.mechanisms.registry import MECHANISMS
from dptune.prediction.protocols import PROTOCOLS
from dptune.privacy.ledger import Ledger
from dptune.privacy.release import Release
from dptune.privacy.run_header import RunHeader

ACCOUNT = ["account", "static", "--sample-rate", "0.01", "--steps", "1000", "--delta", "1e-5"]
CALIBRATE = ["calibrate", "static", "--epsilon", "2", "--delta", "1e-5"]
SEARCH = ["search", "plrvo", "--epsilon", "1", "--delta", "1e-5", "--sample-rate", "1", "--steps", "1"]
COMMANDS = [
    "tune",
    "sample",
    "account",
    "calibrate",
    "search",
    "audit",
    "verify",
    "export",
    "mechanisms",
    "samplers",
    "set-aside",
    "generate",
    "serve",
]
DP = {name for name in [*MECHANISMS, "dppg"] if name.startswith("dp")}
FIELDS = [
    "mechanism",
    "noise_multiplier",
    "effective_noise_multiplier",
    "sample_rate",
    "steps",
    "delta",
    "epsilon_published",
    "epsilon_published_by",
    "epsilon_published_by_renyi_dp",
    "epsilon_noise_only",
    "epsilon_certified",
    "leaks",
]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), prog_name="dptune")


def answer(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def refusal(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert result.stdout == ""
    return result.stderr


def ledger(directory: Path, **changes: Any) -> Path:
    values: dict[str, Any] = {
        "mechanism": "static",
        "published_accountant": "gdp_clt",
        "accounting": "certified",
        "epsilon": 8.0,
        "delta": 1e-5,
        "unit": "record",
        "units": 100,
        "data": "synthetic cohort",
    }
    path, release = directory / "ledger.jsonl", Release(0.01, 1.0)
    opened = Ledger.create(path, RunHeader(**(values | changes)), Counter({release: 3}))
    for _ in range(3):
        opened.charge(release)
    opened.finish()
    return path


SEARCHED = [
    "candidates",
    "shape",
    "most_candidates",
    "chance_to_try_one_of_the_best_tenth",
    "search_bound",
    "search_epsilon_one_shift",
    "search_epsilon_renyi_published",
    "epsilon_of_as_many_runs_composed",
    "epsilon_of_one_candidate_no_guarantee",
]


def test_account_prices_a_search_beside_its_candidate() -> None:
    found = answer(*ACCOUNT, "--set", "noise_multiplier=1.0", "--candidates", "10")
    assert list(found) == FIELDS + SEARCHED
    assert found["shape"] == 2
    alone = answer(*ACCOUNT, "--set", "noise_multiplier=1.0")
    assert found["epsilon_of_one_candidate_no_guarantee"] == alone["epsilon_certified"]
    assert alone["epsilon_certified"] < found["epsilon_certified"] < found["search_epsilon_one_shift"]
    poisson = answer(*ACCOUNT, "--set", "noise_multiplier=1.0", "--candidates", "10", "--shape", "inf")
    assert poisson["shape"] == "inf"


def test_calibrate_finds_the_noise_of_a_search() -> None:
    sampling = ["--sample-rate", "0.02", "--steps", "20"]
    found = answer(*CALIBRATE, *sampling, "--candidates", "4")
    assert found["epsilon_certified"] == pytest.approx(2, rel=2e-3)
    assert found["epsilon_certified"] <= 2
    assert 1.02 < found["noise_over_that_of_a_single_run"] < 1.2


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--candidates", "1"], "--candidates"),
        (["--candidates", "nan"], "--candidates"),
        (["--candidates", "5", "--shape", "-1"], "--shape"),
        (["--shape", "2"], "--shape"),
        (["--bound", "one_shift"], "--bound"),
    ],
)
def test_a_search_that_cannot_be_is_refused_by_its_option(options: list[str], named: str) -> None:
    assert named in refusal(*ACCOUNT, *options)


def test_no_search_is_priced_by_another_accounting_nor_among_answers() -> None:
    sampling = ["--sample-rate", "0.02", "--steps", "20"]
    assert "--accounting" in refusal(*CALIBRATE, *sampling, "--candidates", "4", "--accounting", "published")
    assert "--candidates" in refusal("account", "pmixed", "--delta", "1e-5", "--candidates", "4")


def test_account_has_exactly_the_agreed_fields() -> None:
    found = answer(*ACCOUNT, "--set", "noise_multiplier=1.0")
    assert list(found) == FIELDS
    assert found["epsilon_certified"] == found["epsilon_noise_only"] == pytest.approx(1.83, abs=5e-3)
    assert found["epsilon_published"] == pytest.approx(1.62, abs=5e-3)
    assert (found["mechanism"], found["steps"], found["leaks"]) == ("static", 1000, [])


def test_account_of_no_noise_says_inf_in_valid_json() -> None:
    found = answer("account", "nonprivate", "--sample-rate", "0.01", "--steps", "10", "--delta", "1e-5")
    assert [found[f"epsilon_{name}"] for name in ("published", "noise_only", "certified")] == ["inf"] * 3
    assert found["leaks"]


def test_account_without_json_is_a_table() -> None:
    result = run(*ACCOUNT, "--set", "noise_multiplier=1.0")
    assert result.exit_code == 0
    assert "1.829" in result.stdout


def test_account_never_certifies_a_mechanism_without_noise() -> None:
    result = run(*ACCOUNT, "--set", "noise_multiplier=1.0", "--set", "clipper=none", "--json")
    assert result.exit_code == 2 or json.loads(result.stdout)["epsilon_certified"] == "inf"


def test_calibrate_compares_bands_with_independent_noise_of_the_same_budget() -> None:
    schedule = ["--epsilon", "2", "--delta", "1e-5", "--records", "4576", "--batch", "64", "--epochs", "1"]
    alone = answer("calibrate", "static", *schedule)
    found = answer("calibrate", "banded", *schedule)
    assert found["independent_noise_multiplier"] == alone["noise_multiplier"]
    ratio = found["noise_multiplier"] / alone["noise_multiplier"]
    for sums in ("last", "mean"):
        over = found[f"noise_in_{sums}_sum_over_independent"]
        assert over == pytest.approx(ratio * found[f"noise_in_{sums}_sum_at_one_multiplier"])
        assert 0.6 < over < 0.8
    one_band = answer("calibrate", "banded", *schedule, "--set", "bands=1")
    assert one_band["noise_in_last_sum_over_independent"] == pytest.approx(1, rel=1e-6)


def test_calibrate_from_a_rate_and_steps_agrees_with_account() -> None:
    found = answer(*CALIBRATE, "--sample-rate", "0.01", "--steps", "1000")
    assert list(found) == FIELDS
    assert 1.99 < found["epsilon_certified"] <= 2.0
    again = answer(*ACCOUNT, "--set", f"noise_multiplier={found['noise_multiplier']}")
    assert again == found


@pytest.mark.parametrize(
    ("accounting", "noise"),
    [
        pytest.param("certified", 0.511, marks=pytest.mark.slow),
        pytest.param("published", 0.410, marks=pytest.mark.slow),
    ],
)
def test_calibrate_from_records_batch_and_epochs(accounting: str, noise: float) -> None:
    found = answer(*CALIBRATE, "--records", "73271", "--batch", "16", "--epochs", "3", "--accounting", accounting)
    assert (found["sample_rate"], found["steps"]) == (16 / 73271, 13740)
    assert found["noise_multiplier"] == pytest.approx(noise, abs=5e-4)
    assert found[f"epsilon_{accounting}"] == pytest.approx(2.0, rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ([*ACCOUNT], ["noise_multiplier", "Fix"]),
        ([*ACCOUNT, "--set", "noise_multiplier=-1"], ["noise_multiplier"]),
        ([*ACCOUNT, "--set", "noise_multiplier=loud"], ["noise_multiplier", "loud"]),
        ([*ACCOUNT, "--set", "noise_multiplier"], ["--set noise_multiplier", "KEY=VALUE"]),
        ([*ACCOUNT, "--set", "=1"], ["--set =1", "KEY=VALUE"]),
        ([*ACCOUNT, "--set", "noise_multiplier=1", "--set", "sigma=1"], ["sigma", "noise_multiplier"]),
        ([*ACCOUNT, "--set", "noise_multiplier=1", "--set", "pairs=nan"], ["pairs"]),
        ([*ACCOUNT[:-1], "0", "--set", "noise_multiplier=1"], ["delta"]),
        (["account", "magic", *ACCOUNT[2:]], ["mechanism", "magic", "static"]),
        (["account", "static", "--sample-rate", "0.01", "--delta", "1e-5"], ["--steps"]),
        (["account", "static", "--steps", "5", "--delta", "1e-5"], ["--sample-rate"]),
        (["account", "static", "--sample-rate", "2", *ACCOUNT[4:], "--set", "noise_multiplier=1"], ["sample_rate"]),
        ([*CALIBRATE], ["--records", "--batch", "--epochs"]),
        ([*CALIBRATE, "--sample-rate", "0.01", "--steps", "9", "--records", "9"], ["--records"]),
        ([*CALIBRATE, "--records", "9", "--batch", "10", "--epochs", "1"], ["batch"]),
        ([*CALIBRATE, "--records", "73271", "--batch", "16", "--epochs", "1e12"], ["epochs: 1e+12 passes", "lower"]),
        ([*CALIBRATE, "--sample-rate", "0.01", "--steps", "9", "--set", "noise_multiplier=1"], ["noise_multiplier"]),
        ([*CALIBRATE, "--epsilon", "-1", "--sample-rate", "0.01", "--steps", "9"], ["epsilon"]),
        (["calibrate", "nonprivate", *CALIBRATE[2:], "--sample-rate", "0.01", "--steps", "9"], ["nonprivate"]),
        (["mechanisms", "magic"], ["magic", "static"]),
        (["verify", "/nowhere/ledger.jsonl"], ["/nowhere/ledger.jsonl"]),
    ],
)  # fmt: skip
def test_a_mistake_exits_2_and_names_its_option(arguments: list[str], names: list[str]) -> None:
    message = refusal(*arguments)
    assert all(name in message for name in names), message


@pytest.mark.parametrize(
    ("arguments", "warned"),
    [
        ([*ACCOUNT[:-1], "0.5", "--set", "noise_multiplier=1"], "delta 0.5 is large"),
        (["account", "dppg", "--delta", "0.02", "--set", "noise_multiplier=1"], "delta 0.02 is large"),
        ([*CALIBRATE[:-1], "1e-3", "--records", "1000", "--batch", "10", "--epochs", "1"], "1 over the 1000 units"),
        ([*CALIBRATE[:-1], "9e-4", "--records", "1000", "--batch", "10", "--epochs", "1"], ""),
        ([*ACCOUNT, "--set", "noise_multiplier=1"], ""),
    ],
)
def test_a_delta_that_protects_nobody_is_warned_of(arguments: list[str], warned: str) -> None:
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    assert warned in done.stderr
    assert done.stderr.count("warning: ") == bool(warned)
    json.loads(done.stdout)


def test_verify_recomputes_from_the_file_alone(tmp_path: Path) -> None:
    found = answer("verify", str(ledger(tmp_path)))
    assert (found["steps"], found["noise_multiplier"], found["sample_rate"]) == (3, 1.0, 0.01)
    assert (found["complete"], found["unit"], found["data"]) == (True, "record", "synthetic cohort")
    by_hand = answer("account", "static", "--sample-rate", "0.01", "--steps", "3", "--delta", "1e-5",
                     "--set", "noise_multiplier=1.0")  # fmt: skip
    assert all(found[field] == by_hand[field] for field in FIELDS)


def test_verify_says_what_research_telemetry_means(tmp_path: Path) -> None:
    assert "telemetry" in run("verify", str(ledger(tmp_path / "a", telemetry="research"))).stdout
    assert "curves" in run("verify", str(ledger(tmp_path / "b", telemetry="research"))).stdout
    assert "curves" not in run("verify", str(ledger(tmp_path / "c", telemetry="private"))).stdout


@pytest.mark.parametrize(("mechanism", "subject"), [("static", "trained weights"), ("pmixed", "answers")])
def test_verify_says_what_the_guarantee_is_about(mechanism: str, subject: str, tmp_path: Path) -> None:
    printed = run("verify", str(ledger(tmp_path, mechanism=mechanism, telemetry="research"))).stdout
    assert f"The guarantee covers the {subject}, NOT the curves" in " ".join(printed.split())


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_verify_refuses_a_damaged_ledger_and_names_the_line(tmp_path: Path, as_json: list[str]) -> None:
    path = ledger(tmp_path)
    path.write_bytes(path.read_bytes().replace(b'"noise_multiplier":1.0', b'"noise_multiplier":9.0', 1))
    assert "line 2" in refusal("verify", str(path), *as_json)


def test_mechanisms_lists_all_one_line_each_and_explains_one() -> None:
    lines = run("mechanisms").stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == [*MECHANISMS, *PROTOCOLS, "dppg"]
    assert all(word in line for line in lines[: len(MECHANISMS)] for word in ("Clips", "adds", "adapts", "costs"))
    leaking = [line.split(":")[0] for line in lines if "NOT sound" in line]
    assert leaking == ["autoclip_published", "rldp_published", "pmixed_published"]
    explained = run("mechanisms", "quantile").stdout
    assert all(option in explained for option in ("noise_multiplier", "count_noise", "target"))


RLDP = ["--set", "pairs=24", "--delta", "1e-5"]


def test_rldp_as_published_claims_2_pays_827_and_certifies_nothing() -> None:
    """The specification's numbers, rldp.md section 7 and baselines.md, accounting C."""
    run_of = ["--sample-rate", "2.1837e-4", "--steps", "13740"]
    found = answer("account", "rldp_published", *RLDP, "--set", "noise_multiplier=0.4099", *run_of)
    assert found["epsilon_published"] == pytest.approx(2.0, abs=5e-3)
    assert found["epsilon_noise_only"] == pytest.approx(826.9, abs=0.5)
    assert found["epsilon_certified"] == "inf"
    assert any("raw batch loss" in leak for leak in found["leaks"])
    assert found["epsilon_repriced_diagnostic"] == pytest.approx(found["epsilon_published"])


def test_rldp_as_provable_needs_2_504_a_pair() -> None:
    found = answer("calibrate", "rldp", *RLDP, "--epsilon", "2", "--records", "73271", "--batch", "16", "--epochs", "3")
    assert found["noise_multiplier"] == pytest.approx(2.504, abs=1e-3)
    assert found["effective_noise_multiplier"] == pytest.approx(0.511, abs=1e-3)
    assert (found["epsilon_certified"], found["leaks"]) == (pytest.approx(2.0, abs=1e-3), [])


def test_a_leaking_mechanism_is_calibrated_only_on_its_own_terms() -> None:
    schedule = ["--epsilon", "2", "--sample-rate", "0.01", "--steps", "100", "--delta", "1e-5"]
    assert "noise_only" in refusal("calibrate", "rldp_published", *schedule)
    assert answer("calibrate", "rldp_published", "--accounting", "published", *schedule)["leaks"]


AUDIT_FIELDS = {
    "mechanism", "trials", "confidence", "mu_audited", "epsilon_audited", "delta", "epsilon_published",
    "epsilon_noise_only", "epsilon_certified",
}  # fmt: skip


def test_audit_has_the_agreed_fields_and_respects_a_sound_step() -> None:
    """At confidence 0.999999, so that a false alarm has chance 2e-6."""
    found = answer("audit", "static", "--trials", "600", "--confidence", "0.999999")
    assert set(found) >= AUDIT_FIELDS
    assert (found["mechanism"], found["trials"], found["delta"]) == ("static", 600, 1e-5)
    assert 0 <= found["mu_audited"] <= 1
    assert found["epsilon_audited"] <= found["epsilon_certified"] == pytest.approx(4.3772, abs=1e-3)


@pytest.mark.long
def test_audit_catches_published_rldp(caplog: pytest.LogCaptureFixture) -> None:
    """It claims 2.1; what eight audits found has mean 4.0 and deviation 0.4: a miss is rarer than 1e-5."""
    options = ("--set", "pairs=24", "--set", "noise_multiplier=2")
    done = run("audit", "rldp_published", *options, "--trials", "2000", "--confidence", "0.95", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["epsilon_audited"] > found["epsilon_published"]
    shown, claimed = shown_above(found["epsilon_audited"], found["epsilon_published"], 4)
    sentence = f"the attack shows epsilon >= {shown} at confidence 0.95, more than the {claimed} that rldp_published"
    assert sentence in done.stderr
    assert "audit rldp_published: done" in caplog.text  # it says how far it is
    assert found["epsilon_certified"] == "inf"


def test_audit_accuses_noise_that_epsilon_is_blind_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise times 0.001 at z = 0.5: no errors in 1,000 trials refute the certified epsilon of 10, but mu is 2.

    Any sound step is accused with chance 0.001 at most; here no guess of the attack can be wrong.
    """
    whole = Gaussian.add
    monkeypatch.setattr(
        Gaussian, "add", lambda self, sums, scales, z, coins: whole(self, sums, scales, z / 1000, coins)
    )
    result = run("audit", "static", "--set", "noise_multiplier=0.5", "--trials", "1000", "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 1
    assert found["mu_certified"] == 2.0
    assert found["mu_alarm"] > 4
    assert found["epsilon_alarm"] <= found["epsilon_refutable"] < found["epsilon_certified"]
    assert "NO POWER on epsilon" in found["power"]
    said = " ".join(result.stderr.split())
    assert "Accused: the attack shows mu >= " in said
    assert said.count("Accused") == 1
    assert "but 2 is certified" in said


@pytest.mark.parametrize(
    ("further", "once"), [((), True), (("--steps", "2"), False), (("--sample-rate", "0.5"), False)]
)
def test_audit_says_where_its_figures_are_those_of_one_step(further: tuple[str, ...], once: bool) -> None:
    """They stand beside a run's, which are of many steps on drawn batches."""
    done = run("audit", "static", "--trials", "500", "--false-alarms", "1e-6", *further)
    assert ("All epsilons here are about one step" in done.stdout) is once


@pytest.mark.long
def test_audit_of_correlated_noise_plays_and_prices_as_many_visits_as_it_is_asked_for() -> None:
    """A sound mechanism: accused with chance 1e-6."""
    options = ("--set", "bands=2", "--trials", "500", "--false-alarms", "1e-6")
    one, two = (answer("audit", "banded", *options, "--steps", steps) for steps in ("1", "2"))
    assert (one["steps"], two["steps"]) == (1, 2)
    assert one["mu_certified"] == pytest.approx(1.0)
    assert two["mu_certified"] == pytest.approx(2**0.5)
    assert one["epsilon_certified"] < two["epsilon_certified"]


def test_audit_says_what_it_could_have_refuted() -> None:
    """A sound step: accused with chance 1e-6."""
    found = answer("audit", "static", "--trials", "800", "--false-alarms", "1e-6")
    assert found["mu_certified"] == 1.0
    assert found["alarm_confidence"] == pytest.approx(1 - 5e-7)
    assert found["mu_alarm"] <= 1.0
    assert found["mu_detectable"] == pytest.approx(1 / found["noise_detectable"])
    assert 0.3 < found["noise_detectable"] < 1
    assert f"noise below {at_least(found['noise_detectable'])} times what is charged" in found["power"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("nothing",), "mechanism"),
        (("static", "--false-alarms", "0"), "--false-alarms"),
        (("static", "--trials", "10"), "trials"),
        (("static", "--confidence", "1"), "confidence"),
        (("static", "--sample-rate", "0"), "sample_rate"),
        (("static", "--set", "colour=red"), "colour"),
        (("banded",), "bands"),
    ],
)
def test_audit_refuses_in_words(arguments: tuple[str, ...], named: str) -> None:
    assert named in refusal("audit", *arguments)


def test_search_writes_a_profile_and_prints_what_it_costs(tmp_path: Path) -> None:
    """On one step without sampling, which is priced fast; the same answer as the file holds."""
    out = tmp_path / "found"
    where = ["--epsilon", "1", "--delta", "1e-5", "--sample-rate", "1", "--steps", "1", "--out", str(out)]
    found = answer("search", "plrvo", *where)
    assert found["epsilon_certified"] == pytest.approx(1, rel=1e-3)
    assert found["epsilon_certified"] <= 1
    assert found["variance_over_that_gaussian"] >= 2
    assert json.loads((out / "search.json").read_text())["entry"]["k"] == found["k"]
    assert "profile.yaml" in run("search", "plrvo", *where).stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["static"], "static certified is not a noise search"),
        (["plrvo", "--mode", "published"], "dimension"),
        (["plrvo", "--objective", "beauty"], "objective"),
        (["lmo_dp", "--epsilon", "-1"], "epsilon"),
    ],
)
def test_a_search_that_cannot_be_is_refused_and_writes_nothing(
    arguments: list[str], named: str, tmp_path: Path
) -> None:
    where = [
        "--epsilon",
        "1",
        "--delta",
        "1e-5",
        "--sample-rate",
        "1",
        "--steps",
        "1",
        "--out",
        str(tmp_path / "found"),
    ]
    assert named in refusal("search", *where, *arguments)
    assert not (tmp_path / "found").exists()


def test_a_search_without_matplotlib_is_refused_before_it_searches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("dptune.mechanisms.noise_search.search_noise", lambda request: pytest.fail("it searched"))
    where = [
        "--epsilon",
        "1",
        "--delta",
        "1e-5",
        "--sample-rate",
        "1",
        "--steps",
        "1",
        "--out",
        str(tmp_path / "found"),
    ]
    assert "dptune[pipeline]" in refusal("search", "plrvo", *where)
    assert not (tmp_path / "found").exists()


def test_noise_clipped_in_l1_says_up_to_which_dimension_it_is_useful() -> None:
    """One certain step at epsilon 2: Laplace of scale 1/2 against a Gaussian of about 1.99."""
    found = answer(
        "account", "laplace", "--sample-rate", "1", "--steps", "1", "--delta", "1e-5", "--set", "noise_multiplier=0.5"
    )
    gaussian = answer("calibrate", "static", "--epsilon", "2", "--delta", "1e-5", "--sample-rate", "1", "--steps", "1")
    ratio = (gaussian["noise_multiplier"] / (0.5 * 2**0.5)) ** 2
    assert found["epsilon_certified"] == pytest.approx(2)
    assert found["l1_useful_up_to_effective_dimension"] == pytest.approx(ratio, rel=1e-2)


ANSWERS = ["--epsilon", "8", "--delta", "1e-5", "--set", "alpha=3", "--set", "tokens=1024"]


def test_calibrate_prints_the_radius_of_answers() -> None:
    found = answer("calibrate", "pmixed", *ANSWERS, "--set", "models=80", "--set", "public_weight=0.0874457569")
    assert found["rdp_budget"] == pytest.approx(3.1983085200, abs=1e-10)
    assert found["rdp_per_token"] == pytest.approx(3.1233481640e-3, rel=1e-10)
    assert found["radius"] == pytest.approx(0.0307308446, abs=1e-10)
    assert found["epsilon_certified"] == pytest.approx(8, abs=1e-9)
    assert found["epsilon_certified"] <= 8
    assert found["unit"] == "shard"
    published = answer("calibrate", "pmixed_published", *ANSWERS, "--set", "models=5", "--set", "subsample=.03")
    assert published["beta"] == pytest.approx([0.565178, 0.193842, 0.223588, 0.243555, 0.258306], abs=1e-6)
    assert published["radius"] == pytest.approx([3 * beta for beta in published["beta"]])
    assert published["epsilon_certified"] == "inf"
    assert published["leaks"]
    assert isinstance(answer("calibrate", "pmixed_published", *ANSWERS, "--set", "subsample=1")["radius"], float)


def test_account_tells_what_one_published_model_costs() -> None:
    found = answer("account", "pmixed_published", "--delta", "1e-5", "--set", "models=1", "--set", "subsample=.03")
    assert found["epsilon_published"] == pytest.approx(8, abs=1e-9)
    assert found["epsilon_noise_only"] == pytest.approx(10.61, abs=0.005)


def test_protocols_refuse_what_is_not_theirs() -> None:
    assert "no batches" in refusal("calibrate", "pmixed", *ANSWERS, "--steps", "5")
    assert "no batches" in refusal("account", "pmixed", "--delta", "1e-5", "--sample-rate", "0.1")
    assert "too small for one token" in refusal("calibrate", "pmixed", "--epsilon", "1", "--delta", "1e-5")
    assert "answers and trains nothing" in refusal("audit", "pmixed")
    assert "alpha" in refusal("calibrate", "pmixed", "--epsilon", "8", "--delta", "1e-5", "--set", "alpha=1")
    assert "public_weight" in run("mechanisms", "pmixed").stdout


def test_policy_gradient_is_priced_without_a_sample_rate_or_steps() -> None:
    found = answer("account", "dppg", "--delta", "1e-5", "--set", "noise_multiplier=1")
    assert found["epsilon_certified"] == pytest.approx(4.3772, rel=1e-4)
    assert found["epsilon_published"] == pytest.approx(5.0, rel=1e-3)
    raw = answer("account", "dppg", "--delta", "1e-5", "--set", "noise_multiplier=1", "--set", "critic=raw")
    assert (raw["epsilon_certified"], raw["epsilon_published"]) == ("inf", found["epsilon_published"])
    assert answer("calibrate", "dppg", "--epsilon", "3", "--delta", "1e-5")["noise_multiplier"] == pytest.approx(
        1.3906, rel=2e-4
    )
    refused = run("account", "dppg", "--delta", "1e-5", "--set", "noise_multiplier=1", "--steps", "5")
    assert refused.exit_code == 2
    assert "takes no batches" in refused.stderr


def test_policy_gradient_is_audited() -> None:
    found = answer("audit", "dppg", "--trials", "4000")
    # mu is 1. In 100 audits the bound lay in [0.76, 0.98]; with 500 trials every fourth one shows nothing at all.
    assert 0 < found["mu_audited"] <= 1.2
    refused = run("audit", "dppg", "--sample-rate", "0.5")
    assert refused.exit_code == 2


def test_it_says_its_version() -> None:
    assert answer_text("--version") == f"dptune {__version__}\n"


def answer_text(*arguments: str, **environment: str) -> str:
    result = CliRunner().invoke(app, list(arguments), env=environment, prog_name="dptune")
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("dptune acc", {"account"}), ("dptune account rldp_p", {"rldp_published"}), ("dptune mechanisms dp", DP)],
)
def test_a_shell_completes_commands_and_names(typed: str, offered: set[str]) -> None:
    shell = {"_DPTUNE_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    assert set(answer_text(**shell).split()) == offered


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
def test_help_cuts_no_sentence_off_and_keeps_what_is_in_brackets(command: list[str]) -> None:
    said = " ".join(answer_text(*command, "--help").split())
    assert command != ["search"] or "[data/search/MECHANISM-MODE]" in said
    assert command or ("..." not in said.replace("ARGS]...", "") and all(name in said for name in COMMANDS))


@pytest.mark.parametrize(
    ("arguments", "last"),
    [
        (["account", "static", "--delta", "much"], "error: Invalid value for '--delta': 'much' is not a number. Fix: "),
        (["account", "static"], "error: Missing option '--delta'. Fix: see `dptune account --help`."),
        (["account"], "error: Missing argument 'mechanism'. Fix: see `dptune account --help`."),
        (["account", "--steps", "0"], "error: Invalid value for '--steps': '0' is below 1. Fix: "),
        (["nosuch"], "error: No such command 'nosuch'. Fix: see `dptune --help`."),
        (
            ["tune", "--epsilom", "2"],
            "error: No such option: --epsilom. Fix: use --epsilon, or see `dptune tune --help`",
        ),
        (["verify", "/nowhere"], "error: /nowhere: cannot be read"),
        ([*SEARCH, "--out", "/proc/x"], "error: /proc/x: No such file or directory. Fix: "),
    ],
)
def test_the_last_line_of_a_refusal_is_its_reason(arguments: list[str], last: str) -> None:
    said = refusal(*arguments).splitlines()[-1]
    assert said.startswith(last)
    assert said.count("Fix: ") == 1


def test_python_runs_the_package() -> None:
    said = subprocess.run([sys.executable, "-m", "dptune", "--version"], capture_output=True, text=True, check=True)
    assert said.stdout.startswith("dptune ")
