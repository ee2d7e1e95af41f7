"""``dptune verify`` of a study's finished run: its ledger, its result and its weights belong together."""

from __future__ import annotations

import json
import shlex
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from dptune.cli import app
from dptune.core.files import sha256
from dptune.job.result import RunResult
from dptune.privacy.ledger import Ledger
from dptune.privacy.ledger_file import read_ledger
from dptune.privacy.release import DEALT_BY_RANK, Release
from dptune.privacy.run_folder import RunFolder
from dptune.privacy.run_header import RunHeader


def study_run(
    path: Path,
    noise: float = 1.0,
    budget: float | None = 8.0,
    *,
    finished: bool = True,
    leaks: tuple[str, ...] = (),
) -> Path:
    """A run's folder as a study leaves it, with weights that differ by the noise."""
    folder, release = RunFolder(path), Release(0.01, noise)
    header = RunHeader(
        mechanism="static",
        published_accountant="gdp_clt",
        accounting="noise_only" if leaks else "certified",
        epsilon=budget,
        delta=1e-5,
        unit="record",
        units=100,
        data="synthetic cohort",
        telemetry="research",
        leaks=leaks,
    )
    folder.adapter.mkdir(parents=True)
    weights = folder.adapter / "adapter_model.safetensors"
    weights.write_bytes(f"weights of noise {noise}".encode())
    (folder.adapter / "adapter_config.json").write_text("{}", encoding="utf-8")
    ledger = Ledger.create(folder.ledger, header, Counter({release: 3}))
    for _ in range(3):
        ledger.charge(release)
    said: dict[str, Any] = {
        name: getattr(header, name) for name in ("mechanism", "accounting", "unit", "units", "delta", "data")
    }
    said |= ledger.contents.epsilons.to_dict()
    RunResult(
        before={},
        after={},
        label="small.static.seed0",
        budget_epsilon=budget,
        telemetry=header.telemetry,
        releases=3,
        adapter_sha256=sha256(weights),
        **said,
    ).write(folder.result)
    if finished:
        ledger.finish()
    else:
        ledger.close()
    return path


def verify(path: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["verify", str(path), *options], prog_name="dptune")


def refused(path: Path) -> str:
    done = verify(path)
    assert (done.exit_code, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    return str(line)


def test_of_a_finished_run_weights_and_result_are_compared_with_the_ledger(tmp_path: Path) -> None:
    run = study_run(tmp_path / "run")
    for given in (run, run / "ledger.jsonl"):
        done = verify(given)
        assert done.exit_code == 0, done.output
        (line,) = (one for one in done.stdout.splitlines() if one.startswith("Compared: "))
        assert f"{run / 'adapter' / 'adapter_model.safetensors'} with the SHA-256 in {run / 'result.json'}" in line
        assert "result.json is not signed" in line
        assert "binds no weights" not in done.stdout
        assert json.loads(verify(given, "--json").stdout)["weights_compared"] is True


@pytest.mark.parametrize(
    ("swapped", "named"),
    [
        ("adapter/adapter_model.safetensors", "adapter_model.safetensors: is not what the run of this ledger wrote"),
        ("ledger.jsonl", "ledger.jsonl: is of another run than result.json beside it. Fix: restore the two files"),
        ("result.json", "ledger.jsonl: is of another run than result.json beside it. Fix: restore the two files"),
    ],
)
@pytest.mark.parametrize("other", [{"noise": 0.5, "budget": 8.0}, {"noise": 0.5, "budget": None}])
def test_a_file_of_another_run_is_refused_in_one_sentence(
    swapped: str, named: str, other: dict[str, float | None], tmp_path: Path
) -> None:
    run, another = study_run(tmp_path / "run"), study_run(tmp_path / "other", **other)  # type: ignore[arg-type]
    shutil.copyfile(another / swapped, run / swapped)
    for given in (run, run / "ledger.jsonl"):
        assert named in refused(given)


def test_the_weights_of_another_run_beside_their_own_result_are_not_those_of_the_ledger(tmp_path: Path) -> None:
    run, another = study_run(tmp_path / "run"), study_run(tmp_path / "other", 0.5)
    for name in ("adapter/adapter_model.safetensors", "result.json"):
        shutil.copyfile(another / name, run / name)
    assert "ledger.jsonl: is of another run than result.json" in refused(run)


@pytest.mark.parametrize("figure", ["epsilon_certified", "epsilon_noise_only", "releases", "delta", "unit", "units"])
def test_a_result_with_another_figure_than_the_ledgers_is_refused(figure: str, tmp_path: Path) -> None:
    run = study_run(tmp_path / "run")
    said = json.loads((run / "result.json").read_text())
    other = "patient" if figure == "unit" else said[figure] * 2
    (run / "result.json").write_text(json.dumps(said | {figure: other}))
    assert "ledger.jsonl: is of another run than result.json" in refused(run)


def edit(run: Path, **fields: object) -> None:
    said = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps(said | fields))


def test_a_result_may_say_a_little_more_than_its_ledger_proves_and_nothing_less(tmp_path: Path) -> None:
    run = study_run(tmp_path / "run")
    proved = read_ledger(run / "ledger.jsonl").epsilons.certified
    for share, status in ((1.0, 0), (1.04, 0), (0.999, 2), (1.06, 2)):
        edit(run, epsilon_certified=share * proved, epsilon_noise_only=share * proved)
        assert verify(run).exit_code == status, share
    edit(run, epsilon_certified=proved, epsilon_noise_only=proved, epsilon_published=0.001)
    (line,) = (one for one in verify(run).stdout.splitlines() if one.startswith("Compared: "))
    assert "noise-only and certified epsilon in result.json" in line
    assert "Its other figures, and other files of the run, were not compared." in line


def test_what_an_earlier_version_certified_of_groups_dealt_by_rank_is_the_price_of_its_noise(tmp_path: Path) -> None:
    run = study_run(tmp_path / "run", leaks=(DEALT_BY_RANK,))
    priced = read_ledger(run / "ledger.jsonl").epsilons.noise_only
    for said, status in (("inf", 1), (priced, 1), (priced / 2, 2), (priced * 2, 2)):
        edit(run, epsilon_certified=said)
        assert verify(run).exit_code == status, said


def test_somebodys_notes_beside_the_weights_are_no_card(tmp_path: Path) -> None:
    run = study_run(tmp_path / "run")
    (run / "adapter" / "README.md").write_text("# Notes\nLooks good.\n", encoding="utf-8")
    done = verify(run)
    assert done.exit_code == 0, done.output
    assert "Compared: " in done.stdout


def test_weights_that_were_taken_away_are_missing(tmp_path: Path) -> None:
    run = study_run(tmp_path / "run")
    (run / "adapter" / "adapter_model.safetensors").unlink()
    assert "adapter_model.safetensors: is missing. Fix: restore the weights" in refused(run)


def test_of_a_run_under_way_and_of_a_result_without_digest_nothing_is_compared(tmp_path: Path) -> None:
    running, earlier = study_run(tmp_path / "running", finished=False), study_run(tmp_path / "earlier")
    assert not read_ledger(running / "ledger.jsonl").complete
    said = json.loads((earlier / "result.json").read_text())
    (earlier / "result.json").write_text(json.dumps({k: v for k, v in said.items() if k != "adapter_sha256"}))
    for run in (running, earlier):
        done = verify(run)
        assert done.exit_code == 0
        assert "It proves what a run may cost, and binds no weights." in done.stdout
        assert json.loads(verify(run, "--json").stdout)["weights_compared"] is False


def test_the_folder_of_weights_alone_names_the_command_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = study_run(tmp_path / "a study" / "run")
    monkeypatch.chdir(run / "adapter")
    for given in (run / "adapter", Path()):
        said = refused(given)
        assert said.startswith(
            f"error: {given}: holds the weights of a study's run alone, whose ledger lies one folder"
        )
        command = shlex.split(said.partition("`")[2].partition("`")[0])
        assert command == ["dptune", "verify", str(run)]
        assert verify(Path(command[2])).exit_code == 0
