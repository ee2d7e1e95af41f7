"""RLDP's secrets stand in records: such a study trains and is attacked, and nothing in it is certified."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tiny_pipeline import merge, params, read_json, run_stages, static, write_params

from dptune.core.errors import ConfigError, DataError
from dptune.core.files import write_text
from dptune.privacy.ledger_file import read_ledger
from dptune.privacy.run_folder import RunFolder
from dptune.records.canaries import SECRETS_IN_RECORDS, read_secrets
from dptune.records.parquet_file import read_records, write_records
from tasks.audit.attacks import audit_cell, audit_key
from tasks.experiment.finetune import run_cell
from tasks.paths import SPLITS, TRAIN, planted_secrets
from tasks.settings.params import load_settings
from tasks.split_records import records_digest

IN_RECORDS: dict[str, Any] = {
    "canaries": {"extraction": 4, "audit": 0, "carrier": "records"},
    "experiment": {"accounting": "published", "mechanisms": ["static"]},
    "prediction": {"models": []},
}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"experiment": {"accounting": "certified"}}, r"'static' has accounting: certified; use public, or accounting"),
        ({"experiment": {"accounting": "noise_only"}}, r"'static' has accounting: noise_only"),
        ({"mechanisms": {"static": {"accounting": "certified"}}}, r"'static' has accounting: certified"),
        ({"experiment": {"telemetry": "private"}}, r"records lets attacks read records, which telemetry: private"),
        ({"prediction": {"models": [8]}}, r"prediction\.models: .*use \[\], or canaries\.carrier: public"),
    ],
)
def test_whatever_certifies_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    file = tmp_path / "params.yaml"
    write_params(merge(IN_RECORDS, changes), path=file)
    with pytest.raises(ConfigError, match=said):
        load_settings(file)


def test_without_a_secret_nothing_is_refused(tmp_path: Path) -> None:
    certified = merge(IN_RECORDS, {"canaries": {"extraction": 0}, "experiment": {"accounting": "certified"}})
    write_params(certified, path=tmp_path / "params.yaml")
    assert load_settings(tmp_path / "params.yaml").canaries.carrier == "records"


def test_a_run_is_attacked_and_its_ledger_says_that_nothing_certifies_it(pipeline: Path) -> None:
    texts = pipeline / "own.txt"
    texts.write_text("\n\n".join(f"race is {n}. gender is {n % 2}." for n in range(200)))
    changes = merge(IN_RECORDS, {"data": {"source": "text", "path": str(texts)}})
    run_stages(changes, pretrained=False)
    split, train = read_records(SPLITS / "train.parquet"), read_records(TRAIN)
    assert train.record.tolist() == split.record.tolist(), "no row is added"
    changed = sum(a != b for a, b in zip(split.text.to_pylist(), train.text.to_pylist(), strict=True))
    assert changed == len(read_secrets(planted_secrets()).extraction) == 4
    cell = static(changes)
    write_text(cell.directory / "cell.json", cell.model_dump_json())
    run_cell(cell, "cpu")
    contents = read_ledger(RunFolder(cell.directory).ledger)
    assert contents.header.leaks == (SECRETS_IN_RECORDS,)
    result = read_json(cell.directory / "result.json")
    assert result["epsilon_certified"] == "inf"
    assert math.isfinite(result["epsilon_noise_only"])
    assert result["epsilon_published"] <= cell.epsilon
    few = {"generations": 20, "candidates": 3, "records": 6, "shadows": 0, "step_trials": 0}
    settings = load_settings().audit.model_copy(update=few)
    asked = settings.model_copy(update={"prompt": "instruction"})
    assert audit_key(cell.directory, settings) != audit_key(cell.directory, asked)
    for one in (settings, asked):
        audit = audit_cell(cell.directory, one, "cpu")
        assert audit["extraction"]["generated"] == 20
        assert audit["exposure"]["possible"] == 2
        assert "one_run" not in audit
        assert audit["violations"] == []


def test_a_split_that_was_made_again_is_still_told(pipeline: Path) -> None:
    """The check of the planted file against the split's looks past secrets, and past nothing else."""
    run_stages(IN_RECORDS, pretrained=False)
    known, file = records_digest(), SPLITS / "train.parquet"
    side = read_records(file)
    texts = side.text.to_pylist()
    for other in (texts[0] + "!", texts[0][:-1], texts[0] + " secret_id=AAAAAAAAAA."):
        write_records(file, replace(side, text=pa.array([other, *texts[1:]])))
        with pytest.raises(DataError, match="the split was made again, and the canaries were not"):
            records_digest()
    write_records(file, side)
    assert records_digest() == known


def test_a_cell_that_is_made_for_records_without_secrets_is_refused_on_these(pipeline: Path) -> None:
    """Its settings were loaded before the records were planted anew."""
    run_stages(IN_RECORDS, pretrained=False)
    cell = static({"canaries": {"carrier": "public"}, "experiment": {"mechanisms": ["static"]}})
    assert cell.accounting == "certified"
    with pytest.raises(ConfigError, match=f"certified is refused: {SECRETS_IN_RECORDS}"):
        run_cell(cell, "cpu")


def test_the_default_is_left_out_of_what_names_an_audit() -> None:
    from dptune.core.declarations import plain
    from tasks.settings.experiment import Audit

    given = {key: value for key, value in params()["audit"].items() if key != "prompt"}
    assert plain(Audit(**given)) == plain(Audit(**params()["audit"]))
