"""What the pipeline makes of public data: the base model, unless nobody asks for it, and validation records."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_tuning
import yaml
from tiny_pipeline import few_samples, merge, nonprivate, params, read_json, run_stages, write_params

from dptune.core.errors import ConfigError, DataError
from dptune.records.canaries import POOL, read_secrets
from dptune.records.parquet_file import read_records
from tasks.corpus import pretrain
from tasks.corpus.canaries import plant
from tasks.corpus.pretrain import main
from tasks.corpus.validation import write_validation
from tasks.experiment.checks import check, warn_of_few_canaries
from tasks.experiment.finetune import run_cell
from tasks.paths import (
    CHECKED,
    NEEDED,
    PUBLIC_MODEL,
    PUBLIC_NARRATIVES,
    PUBLIC_SAMPLES,
    PUBLIC_VALIDATION,
    SKIPPED,
    planted_secrets,
)
from tasks.settings.params import load_settings

THEIRS, OWN = {"small": str(PUBLIC_MODEL)}, {"mine": str(tiny_tuning.checkpoint())}
PAIRS = [{"prompt": f"Question {n}?", "completion": f" Answer {n}."} for n in range(12)]


def write(models: dict[str, str], **changes: Any) -> None:
    """Write params.yaml with these base models alone, whose contexts are of 24 tokens: too few for canaries."""
    without_canaries = {"canaries": {"extraction": 0, "audit": 0}, "audit": {"records": 0, "shadows": 0}}
    content = params({"training": {"max_length": 24}}, without_canaries, changes)
    content["experiment"]["models"] = {name: {"source": source} for name, source in models.items()}
    Path("params.yaml").write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")


@pytest.mark.parametrize(
    ("models", "needed"),
    [(THEIRS, True), (OWN, False), (THEIRS | OWN, True), ({"small": str(PUBLIC_MODEL) + "/"}, True)],
)
def test_the_public_model_is_needed_where_a_model_of_the_experiment_is_it(
    empty: Path, models: dict[str, str], needed: bool
) -> None:
    write(models)
    check()
    assert read_json(NEEDED) == {"data/models/public": needed}
    before = CHECKED.read_bytes()
    write(models, lora={"rank": 1})
    check()
    assert (read_json(NEEDED), CHECKED.read_bytes()) == ({"data/models/public": needed}, before), "DVC sees no change"


def test_an_absolute_path_is_the_public_model_too(empty: Path) -> None:
    write({"small": str(PUBLIC_MODEL.absolute())})
    check()
    assert read_json(NEEDED)["data/models/public"] is True


def test_what_nobody_uses_is_not_trained_and_a_note_says_so(
    pipeline: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(OWN)
    check()
    monkeypatch.setattr(pretrain, "pretrain_public_model", lambda: pytest.fail("trained"))
    caplog.set_level("INFO")
    main()
    assert sorted(path.name for path in PUBLIC_MODEL.parent.iterdir()) == ["samples.json", SKIPPED.name], "no old model"
    assert read_json(PUBLIC_SAMPLES) == {"texts": []}
    (reason,) = read_json(SKIPPED).values()
    assert reason in caplog.text
    assert reason.startswith("no model of experiment.models has data/models/public as its source")


def test_the_model_is_trained_where_it_is_needed_or_asked_for(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[bool] = []
    monkeypatch.setattr(pretrain, "pretrain_public_model", lambda: trained.append(True))
    write(THEIRS)
    check()
    main()
    write(OWN)
    check()
    main(always=True)
    assert trained == [True, True]


def test_a_model_that_is_needed_again_takes_the_place_of_the_note(
    pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_samples(monkeypatch)
    pretrain.skip()
    assert not PUBLIC_NARRATIVES.exists()
    pretrain.pretrain_public_model()
    assert not SKIPPED.exists()
    assert (PUBLIC_MODEL / "config.json").exists()
    assert PUBLIC_NARRATIVES.exists()
    assert len(set(read_json(PUBLIC_SAMPLES)["texts"])) == pretrain.POOL < POOL
    write_params({"canaries": {"audit_kind": "samples"}})
    plant()
    said = {one.secret for one in read_secrets(planted_secrets()).audit}
    assert said <= set(read_json(PUBLIC_SAMPLES)["texts"])
    assert len(said) == 20


@pytest.mark.parametrize(
    ("canaries", "needed"),
    [
        ({"audit": 20, "audit_kind": "samples"}, True),
        ({"audit": 0, "audit_kind": "samples"}, False),
        ({"audit": 20, "audit_kind": "words"}, False),
    ],
)
def test_canaries_that_say_samples_need_the_public_model(empty: Path, canaries: dict[str, Any], needed: bool) -> None:
    """Beside models of others too, the stage pretrain makes the model that writes them."""
    write(OWN, canaries={"extraction": 0, **canaries})
    check()
    assert read_json(NEEDED)["data/models/public"] is needed


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"pretrain": {"shape": "roberta", "merges": "words"}},
            r"canaries\.audit_kind: .* roberta cannot write. Fix: use words",
        ),
        ({"canaries": {"audit": POOL + 1}}, r"canaries\.audit: 1025 exceeds the 1024 samples"),
    ],
)
def test_samples_that_nobody_can_write_are_refused_at_once(empty: Path, changes: dict[str, Any], problem: str) -> None:
    write(OWN, **merge({"canaries": {"extraction": 0, "audit": 20, "audit_kind": "samples"}}, changes))
    with pytest.raises(ConfigError, match=problem):
        check()


def test_a_budget_that_coins_cannot_refute_is_named_before_anything_runs(
    empty: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = params({"canaries": {"audit": 256, "crafted": 9000}, "experiment": {"epsilons": [2, 8]}})
    Path("params.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    warn_of_few_canaries(load_settings())
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("canaries.audit: 256 canaries are too few to refute the certified epsilon 8, even if every")
    assert "about 7700 could" in said


def test_samples_that_are_missing_are_named_with_the_command_that_makes_them(pipeline: Path) -> None:
    write_params({"canaries": {"audit_kind": "samples"}})
    PUBLIC_SAMPLES.unlink(missing_ok=True)
    with pytest.raises(DataError, match=r"samples\.json: is missing\. Fix: run `python -m tasks\.corpus\.pretrain"):
        plant()


def test_public_records_of_ones_own_are_what_cells_validate_on(pipeline: Path) -> None:
    file = tiny_tuning.write_jsonl(pipeline / "own.jsonl", [{"who": n % 40, **row} for n, row in enumerate(PAIRS * 20)])
    public = tiny_tuning.write_jsonl(pipeline / "public.jsonl", PAIRS)
    own = {"source": "jsonl", "path": str(file), "public": str(public), "unit": "who"}
    changes = {
        "data": own,
        "canaries": {"extraction": 0, "audit": 0},
        "audit": {"records": 0, "shadows": 0},
        "training": {"max_length": 32},
    }
    run_stages(changes, pretrained=False)
    write_validation()
    found = read_records(PUBLIC_VALIDATION)
    assert found.about["form"] == "pair"
    assert [json.loads(text) for text in found.text.to_pylist()] == [list(row.values()) for row in PAIRS]
    cell = nonprivate(changes)
    run_cell(cell, "cpu")
    assert read_json(cell.directory / "result.json")["public_data"] == "public.jsonl, the user's own public records"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            {"source": "synthetic", "path": None, "public": "public.jsonl"},
            "synthetic takes no public records",
        ),
        ({"public": "./own.jsonl"}, r"data\.public: is the file of private records"),
        ({"public": "copy.jsonl"}, r"data\.public: is the file of private records"),
        ({"public": "nowhere.jsonl"}, r"nowhere\.jsonl: the file does not exist"),
        (
            {"public": "texts.jsonl"},
            r"data\.public: holds texts, and the records are prompts with completions ",
        ),
        ({"public": "bad.jsonl"}, r"has no column text, prompt and completion, or messages"),
    ],
)
def test_public_records_that_do_not_fit_are_refused_before_anything_runs(
    empty: Path, change: dict[str, Any], problem: str
) -> None:
    tiny_tuning.write_jsonl(empty / "own.jsonl", PAIRS)
    tiny_tuning.write_jsonl(empty / "texts.jsonl", [{"text": "A text."}] * 12)
    tiny_tuning.write_jsonl(empty / "bad.jsonl", [{"words": "A text."}] * 12)
    shutil.copy(empty / "own.jsonl", empty / "copy.jsonl")
    tiny_tuning.write_jsonl(empty / "public.jsonl", PAIRS[::-1])
    own = {"source": "jsonl", "path": "own.jsonl", "unit": "record"}
    write_params({"data": own | change, "canaries": {"extraction": 0, "audit": 0}, "audit": {"records": 0}})
    with pytest.raises(ConfigError, match=problem):
        load_settings()
