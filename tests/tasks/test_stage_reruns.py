"""Reruns of stages: with the same settings and inputs they rename no finished cell, which would pay again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from tiny_pipeline import cells, few_samples, run_stages, write_params

from dptune.audit.text import maximisers
from dptune.core.files import read_json, sha256, write_json
from dptune.records.canaries import read_secrets
from dptune.records.parquet_file import read_records
from dptune.training.models import pretrain as public_model
from tasks.corpus import canaries, pretrain
from tasks.corpus.canaries import plant
from tasks.corpus.pretrain import pretrain_public_model
from tasks.corpus.split import split
from tasks.paths import (
    EVAL,
    MANIFEST,
    MAXIMISERS,
    PUBLIC_MODEL,
    PUBLIC_NARRATIVES,
    PUBLIC_SAMPLES,
    PUBLIC_VALIDATION,
    SECRETS,
    TRAIN,
    planted_secrets,
)

SAMPLES = {"canaries": {"audit_kind": "samples"}}


def names(*changes: dict[str, Any]) -> list[str]:
    return [cell.directory.name for cell in cells(*changes)]


def drawn_again() -> bool:
    """Whether the stage draws new secrets."""
    before = {path: path.stat().st_mtime_ns for path in SECRETS.glob("*.json")}
    plant()
    after = {path: path.stat().st_mtime_ns for path in SECRETS.glob("*.json")}
    assert after[planted_secrets()]
    return after != before


def other_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrow writes the same records in other bytes, and weights are trained to other last bits."""
    write, fit = pq.write_table, public_model.fit
    monkeypatch.setattr(pq, "write_table", lambda table, path, **_: write(table, path, compression="gzip"))

    def rounded_otherwise(model: Any, tokens: Any, **plan: Any) -> None:
        fit(model, tokens, **plan | {"learning_rate": plan["learning_rate"] * (1 + 1e-6)})

    monkeypatch.setattr(public_model, "fit", rounded_otherwise)


def test_no_stage_that_runs_again_renames_a_cell(pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code among a stage's dependencies changed, or a library did; settings and inputs did not."""
    before = names()
    files = {path: sha256(path) for path in (TRAIN, EVAL, PUBLIC_VALIDATION, PUBLIC_MODEL / "model.safetensors")}
    other_libraries(monkeypatch)
    run_stages()
    assert names() == before
    for path, digest in files.items():  # where nothing was kept, the same stages make other files
        assert sha256(path) == digest
        path.unlink()
    run_stages()
    assert [path for path, digest in files.items() if sha256(path) == digest] == []
    assert not set(names()) & set(before)


@pytest.mark.parametrize("kind", ["code", "words", "samples"])
def test_secrets_stay_where_their_settings_and_the_split_do(pipeline: Path, kind: str) -> None:
    changes = {"canaries": {"audit_kind": kind}}
    write_params(changes)
    plant()
    before = names(changes)
    assert not drawn_again()
    assert names(changes) == before
    texts = read_json(PUBLIC_SAMPLES)["texts"]
    write_json(PUBLIC_SAMPLES, {"texts": [f"{text} again" for text in texts]})
    assert drawn_again() == (kind == "samples"), "other samples matter only to canaries that say them"
    assert (names(changes) == before) == (kind != "samples")


def test_maximisers_are_chosen_once_for_a_public_model_and_from_nothing_private(
    pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage that is killed leaves no half of them; the next one chooses the same ones."""
    monkeypatch.setattr(canaries, "POOL", 24)
    calls: list[tuple[Any, ...]] = []
    real, measured = maximisers.maximisers, maximisers.separations

    def killed(*_: Any) -> Any:
        raise KeyboardInterrupt

    def noted(model: Any, tokenizer: Any, count: int, public: list[str], **options: Any) -> list[str]:
        calls.append((count, public, options))
        return real(model, tokenizer, count, public, **options)

    monkeypatch.setattr(maximisers, "maximisers", noted)
    write_params({"canaries": {"audit_kind": "maximisers"}})
    with monkeypatch.context() as patch:
        patch.setattr(maximisers, "separations", killed)
        with pytest.raises(KeyboardInterrupt):
            plant()
    assert not MAXIMISERS.exists()
    monkeypatch.setattr(maximisers, "separations", measured)
    assert drawn_again()
    texts = read_json(MAXIMISERS)["texts"]
    assert len(texts) == len(set(texts)) == 24
    assert {one.secret for one in read_secrets(planted_secrets()).audit} <= set(texts)
    MAXIMISERS.unlink()
    assert not drawn_again(), "the same model, public texts and seed have the same maximisers"
    assert read_json(MAXIMISERS)["texts"] == texts
    assert not drawn_again()
    public = read_records(PUBLIC_NARRATIVES).text.to_pylist()
    assert calls == [(24, public[:300], {"seed": 42})] * 3, "the last rerun reads what was chosen"
    with (PUBLIC_MODEL / "tokenizer.json").open("a") as file:
        file.write("\n")
    plant()
    assert len(calls) == 4, "of another model they are chosen again"


def test_secrets_that_never_said_samples_need_none(pipeline: Path) -> None:
    PUBLIC_SAMPLES.unlink()
    assert not drawn_again()


@pytest.mark.parametrize(
    "change",
    [
        {"canaries": {"extraction": 5}},
        {"canaries": {"extraction": 2, "repeats": 2}},
        {"canaries": {"extraction": 0, "audit": 24}},
        {"canaries": {"audit": 10}},
        {"canaries": {"audit_kind": "words"}},
        SAMPLES,
        {"canaries": {"carrier_seed": 7}},
        {"data": {"split_seed": 7}},
        {"data": {"unit": "patient"}},
    ],
    ids=str,
)
def test_other_settings_draw_new_secrets(pipeline: Path, change: dict[str, Any]) -> None:
    write_params(change)
    split()
    assert drawn_again()
    assert not drawn_again()


@pytest.mark.parametrize("damage", ["no secrets", "no train file", "no manifest", "half a manifest", "another record"])
def test_secrets_that_lack_a_file_are_drawn_again(pipeline: Path, damage: str) -> None:
    if damage == "no secrets":
        planted_secrets().unlink()
    elif damage in ("no train file", "no manifest"):
        (TRAIN if damage == "no train file" else MANIFEST).unlink()
    elif damage == "half a manifest":
        MANIFEST.write_bytes(MANIFEST.read_bytes()[:20])
    else:
        pq.write_table(pq.read_table(TRAIN).slice(1), TRAIN)
    assert drawn_again()
    assert not drawn_again()


@pytest.mark.parametrize(
    "change",
    [
        "settings",
        "texts",
        "version",
        "nothing",
        *(pytest.param(one, marks=pytest.mark.long) for one in ("weights", "samples")),
    ],
)
def test_the_public_model_is_trained_again_where_what_it_is_made_of_changed(
    pipeline: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    few_samples(monkeypatch)
    weights = PUBLIC_MODEL / "model.safetensors"
    if change == "settings":
        write_params({"pretrain": {"learning_rate": 0.001}})
    elif change == "texts":  # by none of the settings, which are compared too
        monkeypatch.setattr(pretrain, "with_codes", lambda texts, *_: texts[1:])
    elif change == "version":
        monkeypatch.setattr(public_model, "VERSION", public_model.VERSION + 1)
    elif change != "nothing":
        file = weights if change == "weights" else PUBLIC_SAMPLES
        file.write_bytes(file.read_bytes() + b"\n")
    trained: list[bool] = []
    fit = public_model.fit
    monkeypatch.setattr(public_model, "fit", lambda *given, **plan: trained.append(True) or fit(*given, **plan))
    pretrain_public_model()
    assert trained == ([] if change == "nothing" else [True])
