"""A rehearsal on a synthetic twin: what the twin is made of, which is nothing private, and where it is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tiny_pipeline import read_json, write_params

from dptune.core.errors import ConfigError
from dptune.job.search import rehearsal as rehearsal_module
from dptune.privacy.run_folder import RunFolder
from dptune.records.diabetes.synthetic_cohort import generate_cohort
from dptune.records.parquet_file import read_records, write_records
from tasks.corpus.split import split
from tasks.corpus.validation import write_public_narratives
from tasks.paths import EVAL, PUBLIC_VALIDATION, REPORT
from tasks.profile import read_profile
from tasks.report.search import PAGE, write_page
from tasks.search.request import UNIT, check_search, twin_source
from tasks.search.run import ATTACK_SIDE, TRAIN_SIDE, search_records
from tasks.settings.params import Settings, load_settings
from tasks.stage import run_stage

TWIN: dict[str, Any] = {
    "name": "twin",
    "epsilon": 1,
    "space": {"learning_rate": {"log_uniform": [0.001, 0.02]}},
    "candidates": 2,
    "score": "rehearsal",
    "rehearse_on": "twin",
}


def settings_of(*changes: dict[str, Any], **search: Any) -> Settings:
    write_params({"training": {"expected_batch_size": 8, "epochs": 0.15}}, *changes)
    return load_settings(overrides={"search": TWIN | search})


def given_rows(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """The source of public records that a rehearsal is given, and the column of its units."""
    found: list[Any] = []

    def look(source: Any, *_: Any) -> None:
        found.append(source)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(rehearsal_module, "read_public", look)
        with pytest.raises(KeyboardInterrupt):
            search_records(settings, "cpu")
    (source,) = found
    return source.data, source.unit


def test_private_records_decide_nothing_of_the_twin_but_their_number(
    pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin of another private data set of the same size has the same bytes."""
    settings = settings_of()
    twin, unit = given_rows(settings, monkeypatch)
    assert unit is None
    before = read_records(TRAIN_SIDE)
    for file in (TRAIN_SIDE, EVAL, ATTACK_SIDE):
        records = read_records(file)
        other = [f"Quite another record: {number}." for number in range(len(records.record))]
        write_records(file, replace(records, record=records.record[::-1].copy(), text=pa.array(other)))
    assert given_rows(settings, monkeypatch) == (twin, None)
    assert (
        repr(twin).encode()
        == repr(twin_source(len(before.record), "record", settings.search.twin_seed).public).encode()
    )
    assert not {row["text"] for row in twin} & set(before.text.to_pylist())
    fewer = replace(before, record=before.record[1:], unit=before.unit[1:], text=before.text[1:])
    write_records(TRAIN_SIDE, fewer)
    assert len(given_rows(settings, monkeypatch)[0]) == len(twin) - 1


def test_a_twin_has_as_many_patients_where_they_are_the_units(pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = {"data": {"unit": "patient"}}
    settings = settings_of(changed)
    run_stage(split)
    rows, unit = given_rows(settings, monkeypatch)
    before = read_records(TRAIN_SIDE)
    patients = len(set(before.unit.tolist()))
    assert unit == UNIT
    assert len({row[UNIT] for row in rows}) == patients < len(rows)
    expected: Any = twin_source(patients, "patient", settings.search.twin_seed).public
    assert repr(rows).encode() == repr(expected).encode()
    # Others, of whom nobody has more than one record: their number is the same, and so is every byte of the twin.
    own, first = np.unique(before.unit, return_index=True)
    assert len(first) < len(before.record)
    texts = pa.array([f"Quite another record: {number}." for number in range(len(own))])
    others = replace(before, record=before.record[first], unit=own[::-1] + 1, text=texts)
    write_records(TRAIN_SIDE, others)
    again, _ = given_rows(settings, monkeypatch)
    assert repr(again).encode() == repr(rows).encode()
    assert not {row["text"] for row in again} & set(before.text.to_pylist())
    write_records(TRAIN_SIDE, replace(others, record=others.record[1:], unit=others.unit[1:], text=texts[1:]))
    assert len({row[UNIT] for row in given_rows(settings, monkeypatch)[0]}) == patients - 1


def test_no_seed_shares_a_record_with_another_or_with_the_public_narratives(tmp_path: Path) -> None:
    twins: list[Any] = [twin_source(400, "record", seed).public for seed in (20, 21)]
    one, other = ({row["text"] for row in rows} for rows in twins)
    write_public_narratives(tmp_path / "public.parquet", 400, 20)
    public = set(read_records(tmp_path / "public.parquet").text.to_pylist())
    assert (len(one), len(other), len(public)) == (400, 400, 400)
    assert not (one & other) | (one & public)
    cohorts = [set(generate_cohort(400, 20, kind=kind).patient_nbr) for kind in ("private", "public")]
    assert cohorts[0] != cohorts[1]


@pytest.mark.parametrize("unit", ["record", "patient"])
@pytest.mark.parametrize("units", [1, 50, 333])
def test_a_twin_has_the_number_of_units_that_was_asked_for(unit: str, units: int) -> None:
    rows: Any = twin_source(units, unit, 3).public
    assert len({row[UNIT] for row in rows}) == units
    assert rows == twin_source(units, unit, 3).public


def test_a_twin_is_refused_where_no_generator_fits(empty: Path) -> None:
    (empty / "own.csv").write_text("text\n" + "".join(f"record {n}\n" for n in range(300)))
    own = {"data": {"source": "table", "path": "own.csv"}}
    refused = r"search\.rehearse_on: is twin, and no generator makes .* source table\. Fix: use public, .* data\.public"
    with pytest.raises(ConfigError, match=refused):
        check_search(settings_of(own))
    with pytest.raises(ConfigError, match=r"search\.twin_seed: 7 is data\.synthetic\.seed"):
        check_search(settings_of(twin_seed=7))
    check_search(settings_of(own, rehearse_on="public"))
    check_search(settings_of({"data": {"source": "uci"}}))  # the generator has its columns
    with pytest.raises(ConfigError, match=r"rehearse_on: is twin, and score rehearses nothing"):
        settings_of(score="noisy")
    with pytest.raises(ConfigError, match=r"search\.rehearse_on"):
        settings_of(rehearse_on="private")


def test_the_profile_rehearses_on_a_twin(empty: Path) -> None:
    from tiny_pipeline import ROOT

    write_params()
    chosen = load_settings(overrides=read_profile(ROOT / "profiles" / "search-rehearsal.yaml"))
    assert (chosen.search.rehearses, chosen.search.rehearse_on) == (True, "twin")
    check_search(chosen)


def test_a_search_on_a_twin_trains_once_and_says_what_it_read(pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of()
    out = search_records(settings, "cpu")
    told = read_json(RunFolder(out).results)
    units = len(read_records(TRAIN_SIDE).record)
    assert told["rehearsed_on"] == f"a generated cohort (SYNTHETIC, {units} records, seed 20)"
    assert len(told["tried"]) == 2
    sentence = write_page(out, REPORT)
    assert f"is the best of 2 settings that were rehearsed on {told['rehearsed_on']}: " in sentence
    assert f"2 settings, on {told['rehearsed_on']}" in (REPORT / PAGE).read_text(encoding="utf-8")
    monkeypatch.setattr(rehearsal_module, "trial", lambda *_: pytest.fail("it was rehearsed already"))
    assert search_records(settings, "cpu") == out
    with pytest.raises(ConfigError, match=r"search\.name: .* rehearsed for something else \(twin_seed\)"):
        search_records(settings_of(twin_seed=21), "cpu")
    assert PUBLIC_VALIDATION.exists()
