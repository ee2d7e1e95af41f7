"""Exports say what the ledger says, in the fields and under the headings of others, and invent nothing."""

from __future__ import annotations

import json
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from dptune.cli import app
from dptune.core.digits import at_most
from dptune.core.errors import ConfigError
from dptune.job.delivery.deliverable import audit_section
from dptune.job.delivery.exports import TO_FILL_IN, Exported
from dptune.privacy.ledger import Ledger
from dptune.privacy.ledger_file import LedgerContents
from dptune.privacy.release import Release
from dptune.privacy.run_header import RunHeader
from dptune.privacy.samplers.sampler import Sampler

#: Fields of template.yaml of github.com/opendp/deployments-registry-data, commit 057e5d8.
FIELDS = {
    "basic": "name data_curators description intended_use data_product_type data_product_region data_product_sector "
    "publication_date",
    "dp_variant": "variant_name data_domain unprotected_quantities",
    "privacy_loss": "privacy_unit privacy_unit_details number_of_privacy_units privacy_parameters "
    "privacy_parameters_details",
    "deployment_model": "model_name model_name_details trust_assumptions actors release_type release_type_details "
    "data_source_type data_source_type_details access_type access_type_details",
    "implementation": "preprocessing_and_hyperparameter_tuning mechanisms composition post_processing justification "
    "utility additional_information",
    "administrative": "evidence_sources status registry_authors tier",
}
RELEASE, NO_NOISE = Release(0.01, 1.0), Release(0.01, 0.0, noise="none")


def exported(release: Release = RELEASE, *, complete: bool = True, **header: Any) -> Exported:
    values = {"unit": "patient_id", "data": "letters", "units": 812, **header}
    about = RunHeader("static", "gdp_clt", "certified", None, 1.23456e-5, **values)
    return Exported(LedgerContents(about, Counter({release: 1000}), 1000, "0" * 64, complete), None, "1" * 64, False)


def test_an_entry_has_the_fields_of_the_registry_and_what_the_ledger_certifies() -> None:
    run = exported()
    entry = run.registry()
    assert set(entry) == {"url_slug", "deployment"}
    for part, fields in entry["deployment"].items():
        assert set(fields) <= set(FIELDS[part].split()), part
    loss = entry["deployment"]["privacy_loss"]
    assert run.epsilon <= loss["privacy_parameters"]["epsilon"] <= run.epsilon * 1.001
    assert 1.23456e-5 <= loss["privacy_parameters"]["delta"] <= 1.235e-5
    assert loss["number_of_privacy_units"] == 812
    assert "`patient_id`" in loss["privacy_unit"]
    assert "add or remove" in loss["privacy_unit_details"]
    assert entry["deployment"]["basic"]["name"] == TO_FILL_IN
    assert "1 times the sensitivity" in entry["deployment"]["implementation"]["mechanisms"]


def test_an_evaluation_has_a_heading_for_each_component() -> None:
    run = exported(plugins=("mine 1.0",))
    text = run.nist()
    assert [line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")] == [
        "Privacy parameters",
        "Unit of privacy",
        "Algorithms and correctness",
        "Utility",
        "Bias",
        "Trust model",
        "Side channels",
        "Access control",
        "Data collection exposure",
        "What the guarantee does not cover",
    ]
    assert f"| epsilon_certified | {at_most(run.epsilon, 4)} (what is proved) |" in text
    assert "- Mistakes in mine 1.0, which dptune cannot check." in text
    assert "NO GUARANTEE" not in text


def test_without_a_certified_epsilon_the_evaluation_says_so_and_there_is_no_entry() -> None:
    run = exported(NO_NOISE)
    assert "NO GUARANTEE: " in run.nist()
    assert "Approximate differential privacy" not in run.nist()
    with pytest.raises(ConfigError, match=r"has no certified epsilon .* Fix: export it as nist"):
        run.registry()


def test_what_no_export_describes_is_refused() -> None:
    with pytest.raises(ConfigError, match="run: is not finished"):
        exported(complete=False)
    with pytest.raises(ConfigError, match="answers prompts"):
        exported(Release.of_token(2.0, 0.1))


def test_nothing_that_a_ledger_names_becomes_a_heading_a_link_or_html() -> None:
    named = "x\r## Certified\u2028![](http://a.b/c.png) <img src=x> | y"
    run = exported(data=named, unit=named, plugins=(named,))
    plain = exported(plugins=("mine",)).nist()
    assert len(run.nist().splitlines()) == len(plain.splitlines())
    assert not set("<>[]") & set(run.nist())
    assert [line.count("|") for line in run.nist().splitlines()] == [line.count("|") for line in plain.splitlines()]


def test_planted_gradients_among_the_units_are_told() -> None:
    run = exported(canaries=12, coins="a" * 64)
    assert "| canaries | trained beside 12 gradients" in run.nist().partition("Unit of privacy")[2].partition("## ")[0]
    details = run.registry()["deployment"]["privacy_loss"]["privacy_unit_details"]
    assert details.endswith("Of the units, 12 are an auditor's planted gradients.")
    assert "planted" not in str(exported().registry())


def test_batches_of_other_samplers_are_not_called_poisson() -> None:
    bins = exported(Release(0.01, 1.0, sampler=Sampler("balls_in_bins", batches=100)))
    assert "balls in bins: in each epoch of 100 steps each unit in one batch" in str(bins.registry())
    assert "Poisson" not in bins.nist() + str(bins.registry())
    with pytest.raises(ConfigError, match="run: drew its batches by shuffle, which no export describes"):
        exported(Release(0.01, 1.0, sampler=Sampler("shuffle", batches=100)))


def command(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


def test_the_command_writes_both_from_a_ledger(tmp_path: Path) -> None:
    header = RunHeader("static", "gdp_clt", "certified", epsilon=9.0, delta=1e-5, unit="record", units=80)
    with Ledger.create(tmp_path / "ledger.jsonl", header, Counter({RELEASE: 1})) as ledger:
        ledger.charge(RELEASE)
        refused = command(tmp_path)
        ledger.finish()
    assert refused.exit_code == 2
    assert "is not finished" in refused.stderr
    done = command(tmp_path / "ledger.jsonl", "--format", "registry", "--out", tmp_path / "entry.yaml")
    assert done.exit_code == 0, done.output
    entry = json.loads((tmp_path / "entry.yaml").read_text(encoding="utf-8"))
    assert entry["deployment"]["privacy_loss"]["number_of_privacy_units"] == 80
    assert command(tmp_path).stdout.startswith("# Evaluation of a differential privacy guarantee")
    missing = command(tmp_path / "nothing")
    assert missing.exit_code == 2
    assert "does not exist. Fix: give the folder of a finished run" in missing.stderr


def test_a_confidence_on_a_card_is_never_rounded_up() -> None:
    figures = {"epsilon_audited": 1.0, "could_be_shown_at_most": 5.0, "epsilon_certified": 8.0, "delta": 1e-5}
    figures |= {"confidence": 0.99999999, "canaries": 10, "false_alarms": 0.001}
    section = audit_section(figures | {"accusations": []}, "0" * 64, date(2026, 1, 31))
    assert "with confidence 0.999999 at" in section
