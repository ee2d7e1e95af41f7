"""The stages before the experiment: their files, who may read them, and how a stage ends on an error."""

from __future__ import annotations

import errno
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_pipeline import ROOT, UNITS, mode, read_json, run_stages, write_params

from dptune.core.errors import DataError
from dptune.core.files import sha256
from dptune.records.canaries import read_secrets
from dptune.records.parquet_file import read_about, read_records
from tasks.corpus.acquire import acquire
from tasks.corpus.canaries import plant
from tasks.corpus.split import split
from tasks.corpus.verbalize import verbalize
from tasks.paths import (
    EVAL,
    FAILURES,
    MANIFEST,
    NARRATIVES,
    PUBLIC_MODEL,
    PUBLIC_NARRATIVES,
    PUBLIC_VALIDATION,
    RAW,
    SECRETS,
    SPLITS,
    TRAIN,
    planted_secrets,
)
from tasks.stage import ERROR_FILE, USER_ERROR, keep_failure, run_stage


def test_the_stages_leave_their_files(pipeline: Path) -> None:
    assert read_json(RAW / "source.json")["synthetic"] is True
    whole = read_records(NARRATIVES)
    sides = {name: read_records(SPLITS / f"{name}.parquet") for name in ("attack", "train", "eval")}
    assert {name: len(side.record) for name, side in sides.items()} == {"attack": 44, "train": 142, "eval": 14}
    assert len(whole.record) == 200
    assert sorted(number for side in sides.values() for number in side.record) == sorted(whole.record)
    assert len(read_records(TRAIN).record) == UNITS
    assert len(read_records(PUBLIC_VALIDATION).record) == 20
    assert (PUBLIC_MODEL / "model.safetensors").exists()
    assert read_json(PUBLIC_MODEL / "pretraining.json")["data"] == read_about(PUBLIC_NARRATIVES)["label"]
    assert all("SYNTHETIC" in read_records(path).about["label"] for path in (NARRATIVES, TRAIN, EVAL))
    assert not list(Path("data").rglob("*.partial"))
    assert {path.name for path in PUBLIC_MODEL.parent.iterdir()} == {
        "public",
        "public_validation.parquet",
        "samples.json",
        "made_of.json",
    }
    assert PUBLIC_NARRATIVES.read_bytes() == PUBLIC_VALIDATION.read_bytes(), "of both, nobody is trained on"


def test_only_the_owner_reads_what_the_stages_write(pipeline: Path) -> None:
    files = [path for path in Path("data").rglob("*") if path.is_file() and path.name != "mlflow.db"]
    assert len(files) > 12
    assert {path: oct(mode(path)) for path in files if mode(path) & 0o077} == {}
    assert {oct(mode(path)) for path in (Path("data"), SECRETS)} == {"0o700"}


def test_private_records_are_closed_whatever_the_umask(pipeline: Path) -> None:
    """The modules themselves, without the wrapper that sets the umask."""
    os.umask(0)
    acquire()
    verbalize()
    split()
    plant()
    private = [path for path in Path("data").rglob("*") if path.suffix in (".parquet", ".csv", ".json")]
    private = [path for path in private if "models" not in path.parts]
    assert {path: oct(mode(path)) for path in private if mode(path) != 0o600} == {}
    assert mode(SECRETS) == 0o700


def test_secrets_lie_in_their_folder_alone(pipeline: Path) -> None:
    secrets = read_secrets(planted_secrets())
    assert (len(secrets.extraction), len(secrets.audit)) == (4, 20)
    assert [path.name for path in SECRETS.iterdir()] == [planted_secrets().name]
    every = [canary.secret for canary in (*secrets.extraction, *secrets.audit)]
    for path in (path for path in Path("data").rglob("*") if path.is_file() and path not in (planted_secrets(), TRAIN)):
        content = path.read_bytes()
        assert not [secret for secret in every if secret.encode() in content], path
    planted = " ".join(read_records(TRAIN).text.to_pylist())
    held = {canary.secret for canary in (*secrets.extraction, *secrets.audit) if canary.included}
    assert {secret for secret in every if secret in planted} == held
    for side in ("attack", "train", "eval"):
        assert "secret_id" not in " ".join(read_records(SPLITS / f"{side}.parquet").text.to_pylist())


def test_the_manifest_is_for_everyone(pipeline: Path) -> None:
    manifest = read_json(MANIFEST)
    assert manifest == {
        "records": UNITS,
        "extraction": 4,
        "repeats": 1,
        "audit_candidates": 20,
        "unit": "record",
        "train_sha256": sha256(TRAIN),
        "secrets_sha256": sha256(planted_secrets()),
    }


def test_new_coins_are_tossed_for_a_new_file_and_the_old_ones_stay(pipeline: Path) -> None:
    """DVC may restore the data/canaries that the old ones belong to; an audit of those needs them."""
    before, manifest = read_secrets(planted_secrets()), MANIFEST.read_bytes()
    TRAIN.unlink()
    plant()
    after = read_secrets(planted_secrets())
    assert {c.secret for c in before.audit}.isdisjoint(c.secret for c in after.audit)
    assert [c.carrier for c in before.audit] == [c.carrier for c in after.audit]
    MANIFEST.write_bytes(manifest)
    assert read_secrets(planted_secrets()) == before


def test_no_patient_is_on_two_sides(pipeline: Path) -> None:
    run_stages({"data": {"unit": "patient"}}, pretrained=False)
    patients = [set(read_records(SPLITS / f"{side}.parquet").unit) for side in ("attack", "train", "eval")]
    assert sum(map(len, patients)) == len(set.union(*patients))
    assert read_records(TRAIN).about["unit"] == "patient"
    assert read_json(MANIFEST)["unit"] == "patient"


@pytest.mark.parametrize("stage", [verbalize, split, plant])
def test_a_stage_out_of_order_names_the_missing_file(empty: Path, stage: Callable[[], None]) -> None:
    write_params()
    with pytest.raises(DataError, match=r"data/.*Fix: "):
        stage()


def test_too_many_canaries_are_refused_and_leave_the_old_files(pipeline: Path) -> None:
    before = sha256(TRAIN), sha256(planted_secrets()), sha256(MANIFEST)
    write_params({"canaries": {"audit": 1000}})
    with pytest.raises(SystemExit) as ended:
        run_stage(plant)
    assert ended.value.code == USER_ERROR
    assert (sha256(TRAIN), sha256(planted_secrets()), sha256(MANIFEST)) == before


def ends(work: Callable[[], None], capsys: pytest.CaptureFixture[str]) -> str:
    """What a stage prints when it ends with the status of a user's error."""
    with pytest.raises(SystemExit) as ended:
        run_stage(work)
    assert ended.value.code == USER_ERROR == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert captured.err.startswith("error: ")
    return captured.err


def raising(error: Exception) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


def test_a_dptune_error_is_a_message(empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = DataError("is torn", fix="mend it", file="x.csv", row=3, column="age")
    assert ends(raising(error), capsys) == "error: x.csv, row 3, column 'age': is torn. Fix: mend it.\n"


def test_a_full_disk_is_a_message(
    pipeline: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in RAW.iterdir()}

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("dptune.core.files.os.fsync", full)
    assert "No space left on device" in ends(acquire, capsys)
    assert {path: path.read_bytes() for path in RAW.iterdir()} == before


def test_a_folder_that_cannot_be_written_is_a_message(
    pipeline: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: object, *_: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    write_params({"data": {"split_seed": 7}})  # else the files hold the same records, and none is written
    monkeypatch.setattr("dptune.core.files.os.open", refuse)
    message = ends(split, capsys)
    assert "data/splits" in message
    assert "Permission denied" in message


def test_a_data_folder_that_is_a_file_is_a_message(empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_params()
    Path("data").write_text("")
    assert "data: " in ends(acquire, capsys)


def test_a_missing_file_is_not_blamed_on_the_disk(empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        Path("data/canaries/train.parquet").read_bytes()

    message = ends(work, capsys)
    assert "data/canaries/train.parquet" in message
    assert "free space" not in message


def test_a_fault_in_the_program_keeps_its_traceback_in_a_file(
    empty: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(ERROR_FILE, str(empty / "said"))
    with pytest.raises(SystemExit) as ended:
        run_stage(raising(ZeroDivisionError("no\nmore")))
    assert ended.value.code == 1
    last = capsys.readouterr().err
    assert re.fullmatch(r"error: ZeroDivisionError: no\. Fix: the traceback is in data/failures\.log; run .*\.\n", last)
    assert (empty / "said").read_text() == last
    kept = FAILURES.read_text()
    assert "Traceback (most recent call last)" in kept
    assert "in work" in kept
    assert mode(FAILURES) == 0o600
    with pytest.raises(SystemExit):
        run_stage(raising(KeyError("second")))
    assert FAILURES.read_text().startswith(kept), "an earlier failure is not lost"
    assert "KeyError" in FAILURES.read_text()


def test_ctrl_c_is_no_traceback(empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ended:
        run_stage(interrupted)
    assert ended.value.code == 130
    assert capsys.readouterr().err == "stopped; run again to go on\n"


def test_the_wrapper_closes_data_and_dvcs_cache(empty: Path) -> None:
    Path(".dvc").mkdir()
    seen: list[int] = []

    def work() -> None:
        seen.append(os.umask(0o077))
        logging.getLogger("dptune").info("a line")

    run_stage(work)
    assert seen == [0o077]
    assert mode(Path("data")) == mode(Path(".dvc/cache")) == 0o700


def test_a_python_without_dependencies_says_what_to_run() -> None:
    command = [sys.executable, "-S", "-m", "tasks.experiment.checks"]  # -S: without the packages that are installed
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env={})
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert re.fullmatch(r"error: .+ has no dptune\. Fix: run `make repro`, or first `.*activate`\.\n", ended.stderr)


def test_a_stage_finds_the_environments_python_where_none_is_activated(tmp_path: Path) -> None:
    command = ["/bin/sh", str(ROOT / "tasks" / "stage.sh"), "tasks.corpus.split"]
    ended = subprocess.run(command, cwd=tmp_path, env={"PATH": ""}, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert re.fullmatch(r"error: no python is on PATH, and \.venv has none\. Fix: run `make repro`.*\.\n", ended.stderr)
    for folder in (tmp_path / ".venv" / "bin", tmp_path / "activated"):  # what is activated comes first
        folder.mkdir(parents=True)
        (folder / "python").write_text(f'#!/bin/sh\necho {folder.name} "$@"\nexit 3\n')
        (folder / "python").chmod(0o700)
        path = str(tmp_path / "activated")
        ended = subprocess.run(command, cwd=tmp_path, env={"PATH": path}, capture_output=True, text=True, check=False)
        assert (ended.returncode, ended.stdout) == (3, f"{folder.name} -m tasks.corpus.split\n")


def test_a_stage_as_a_process_ends_with_status_two(empty: Path) -> None:
    """And says nothing but the error: no traceback, no chatter."""
    command = [sys.executable, "-m", "tasks.corpus.split"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert (
        ended.stderr
        == "error: params.yaml: cannot be read (No such file or directory). Fix: run from the repository.\n"
    )


def test_a_failure_is_its_owners_whatever_a_flows_own_umask_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.stage.FAILURES", tmp_path / "failures.log")
    before = os.umask(0)
    try:
        keep_failure(KeyError("a patient"))
    finally:
        os.umask(before)
    assert mode(tmp_path / "failures.log") == 0o600


def test_transformers_is_quiet_though_it_was_imported_before(monkeypatch: pytest.MonkeyPatch, pipeline: Path) -> None:
    """It reads its variable once, and flows import it before any stage's work."""
    monkeypatch.delenv("TRANSFORMERS_VERBOSITY", raising=False)
    logger = logging.getLogger("transformers")
    monkeypatch.setattr(logger, "level", logging.WARNING)
    run_stage(lambda: None)
    assert logger.level == logging.ERROR
