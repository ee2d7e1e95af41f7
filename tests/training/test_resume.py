"""A killed run keeps every charge, makes no release uncounted, and ends with exactly its plan."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import adapted, close, each_record, make_header, make_plan, records, release_lines, weights

from dptune.core.errors import DptuneError
from dptune.mechanisms.mechanism import Mechanism
from dptune.mechanisms.planning import Schedule, planned
from dptune.mechanisms.registry import build
from dptune.privacy.entropy import FixedSeed, OsEntropy
from dptune.privacy.ledger import Ledger
from dptune.privacy.ledger_file import LedgerError, read_ledger
from dptune.training import run as running
from dptune.training import run_start
from dptune.training.checkpoints import CheckpointError, load_checkpoint
from dptune.training.gradients.parameter_groups import lora_pairs
from dptune.training.loop import train
from dptune.training.run import StepReport
from dptune.training.spec import RunSpec

STEPS = 7


class Killed(BaseException):
    """Stands for SIGKILL: nothing may catch it."""


def run(directory: Path, *, noise: float = 1.0, entropy: Any = None, header: Any = None, **options: Any) -> Any:
    """One process' worth of the run, from a fresh model; returns (model, ledger)."""
    model, tokens = adapted(), records()
    entropy = entropy or OsEntropy()
    mechanism = build("static", {"noise_multiplier": noise, "pairs": len(lora_pairs(model))})
    plan = options.pop("plan", None) or make_plan(steps=STEPS, checkpoint_every=2)
    header = header or make_header(entropy)
    spec = RunSpec(model, tokens, each_record(tokens), mechanism, plan, header)
    ledger = train(spec, directory, entropy, **options)
    return model, close(ledger)


def killed_after(step: int) -> Any:
    def on_step(report: StepReport) -> None:
        if report.step == step:
            raise Killed

    return on_step


def kill(directory: Path, opened: list[Ledger], **options: Any) -> None:
    with pytest.raises(Killed):
        run(directory, **options)
    for ledger in opened:
        ledger.close()


def in_checkpoint(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The process dies inside its ``number``-th checkpoint."""
    real, calls = running.save_checkpoint, iter(range(1, 100))

    def save(*args: Any) -> None:
        if next(calls) == number:
            raise Killed
        real(*args)

    monkeypatch.setattr(running, "save_checkpoint", save)


def in_step(monkeypatch: pytest.MonkeyPatch, number: int, *, after_noise: bool) -> None:
    """The process dies in its ``number``-th step: charged, and before or after the noisy value exists."""
    real, calls = Mechanism.privatise, iter(range(1, 100))

    def privatise(self: Mechanism, *args: Any) -> Any:
        last = next(calls) == number
        if last and not after_noise:
            raise Killed
        result = real(self, *args)
        if last:
            raise Killed
        return result

    monkeypatch.setattr(Mechanism, "privatise", privatise)


def count_releases(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for every noisy value that came to exist, in any process of the run."""
    made: list[int] = []
    real = Mechanism.privatise

    def privatise(self: Mechanism, *args: Any) -> Any:
        made.append(1)
        return real(self, *args)

    monkeypatch.setattr(Mechanism, "privatise", privatise)
    return made


def resumes_whole(directory: Path, opened: list[Ledger], made: list[int]) -> None:
    before = release_lines(directory)
    assert before >= len(made)
    _, ledger = run(directory)
    contents = read_ledger(directory / "ledger.jsonl")
    assert contents.releases == ledger.releases == STEPS >= len(made)
    assert contents.composition.total() == STEPS
    assert len(contents.composition) == 1


@pytest.mark.parametrize("step", [1, 2, 3, 6])
def test_killed_between_steps(tmp_path: Path, opened: list[Ledger], monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    made = count_releases(monkeypatch)
    kill(tmp_path, opened, on_step=killed_after(step))
    assert release_lines(tmp_path) == step
    resumes_whole(tmp_path, opened, made)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_killed_while_writing_a_checkpoint(
    tmp_path: Path, opened: list[Ledger], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    made = count_releases(monkeypatch)
    with monkeypatch.context() as patch:
        in_checkpoint(patch, number)
        kill(tmp_path, opened)
    assert release_lines(tmp_path) == len(made)
    resumes_whole(tmp_path, opened, made)


@pytest.mark.parametrize("after_noise", [False, True])
@pytest.mark.parametrize("number", [1, 4])
def test_killed_within_a_step(
    tmp_path: Path, opened: list[Ledger], monkeypatch: pytest.MonkeyPatch, number: int, after_noise: bool
) -> None:
    made = count_releases(monkeypatch)
    with monkeypatch.context() as patch:
        in_step(patch, number, after_noise=after_noise)
        kill(tmp_path, opened)
    assert release_lines(tmp_path) == number
    resumes_whole(tmp_path, opened, made)


def test_killed_again_and_again(tmp_path: Path, opened: list[Ledger], monkeypatch: pytest.MonkeyPatch) -> None:
    made = count_releases(monkeypatch)
    for before in range(3):
        with monkeypatch.context() as patch:
            in_step(patch, 2, after_noise=True)
            kill(tmp_path, opened)
        assert release_lines(tmp_path) == 2 * before + 2
    resumes_whole(tmp_path, opened, made)


def test_a_resumed_run_starts_from_the_checkpoints_weights_and_moments(
    tmp_path: Path, opened: list[Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    kill(tmp_path, opened, on_step=killed_after(5))
    optimizers: list[torch.optim.Optimizer] = []
    models: list[dict[str, torch.Tensor]] = []

    def load(path: Path, model: Any, optimizer: torch.optim.Optimizer, ledger: Ledger) -> Any:
        progress = load_checkpoint(path, model, optimizer, ledger)
        optimizers.append(optimizer)
        models.append(weights(model))
        assert (progress.step, progress.releases) == (4, 4)
        return progress

    monkeypatch.setattr(run_start, "load_checkpoint", load)
    run(tmp_path)
    assert all(not torch.equal(weight, models[0][name]) for name, weight in weights(adapted()).items())
    assert all(float(state["step"]) == 4 + 2 for state in optimizers[0].state.values())


def test_a_failure_gives_the_lock_back_so_that_a_retry_in_the_same_process_can_resume(tmp_path: Path) -> None:
    """Schedulers retry in the same process, and a descriptor that is never closed holds its lock for ever."""

    def fails(report: StepReport) -> None:
        raise ConnectionError("the tracking server is away")

    with pytest.raises(ConnectionError):
        run(tmp_path, on_step=fails)
    _, ledger = run(tmp_path)
    assert ledger.releases == STEPS


def test_a_refused_checkpoint_gives_the_lock_back(tmp_path: Path, opened: list[Ledger]) -> None:
    kill(tmp_path, opened, on_step=killed_after(3))
    checkpoint = tmp_path / "checkpoint.safetensors"
    good = checkpoint.read_bytes()
    checkpoint.write_bytes(b"damaged")
    with pytest.raises(CheckpointError):
        run(tmp_path)
    checkpoint.write_bytes(good)
    assert run(tmp_path)[1].releases == STEPS


def test_without_its_checkpoint_a_run_starts_over_and_keeps_its_charges(tmp_path: Path, opened: list[Ledger]) -> None:
    kill(tmp_path, opened, on_step=killed_after(5))
    (tmp_path / "checkpoint.safetensors").unlink()
    reports: list[StepReport] = []
    run(tmp_path, on_step=reports.append)
    assert [(report.step, report.releases) for report in reports] == [(1, 6), (2, 7)]


def test_a_checkpoint_without_its_ledger_is_refused(tmp_path: Path, opened: list[Ledger]) -> None:
    kill(tmp_path, opened, on_step=killed_after(3))
    (tmp_path / "ledger.jsonl").unlink()
    with pytest.raises(LedgerError, match="has no ledger"):
        run(tmp_path)


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path, opened: list[Ledger]) -> None:
    for name in ("a", "b"):
        kill(tmp_path / name, opened, on_step=killed_after(3))
    shutil.copy(tmp_path / "a/checkpoint.safetensors", tmp_path / "b/checkpoint.safetensors")
    with pytest.raises(CheckpointError, match="belongs to run"):
        run(tmp_path / "b")


@pytest.mark.parametrize("lines", [1, 2, 4])
def test_a_ledger_cut_behind_its_checkpoint_is_refused(tmp_path: Path, opened: list[Ledger], lines: int) -> None:
    """Whole lines gone from the end show in no checksum of the file; the checkpoint remembers them."""
    kill(tmp_path, opened, on_step=killed_after(5))
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:lines]))
    with pytest.raises(CheckpointError, match="no longer there"):
        run(tmp_path)


def truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


@pytest.mark.parametrize(
    "damage", [truncated, lambda data: b"", lambda data: b"\xff" * 64, lambda data: data.replace(b"chain", b"chaim")]
)
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, opened: list[Ledger], damage: Any) -> None:
    kill(tmp_path, opened, on_step=killed_after(3))
    checkpoint = tmp_path / "checkpoint.safetensors"
    checkpoint.write_bytes(damage(checkpoint.read_bytes()))
    with pytest.raises(CheckpointError, match=r"checkpoint\.safetensors"):
        run(tmp_path)
    assert release_lines(tmp_path) == 3


def test_a_checkpoint_of_other_shapes_is_refused(tmp_path: Path, opened: list[Ledger]) -> None:
    """A tensor of one row would broadcast into every row without a word."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    kill(tmp_path, opened, on_step=killed_after(3))
    checkpoint = tmp_path / "checkpoint.safetensors"
    with safe_open(checkpoint, framework="pt") as file:
        metadata, tensors = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    shrunk = {key: tensor[:1].contiguous() if tensor.dim() == 2 else tensor for key, tensor in tensors.items()}
    save_file(shrunk, checkpoint, metadata=metadata)
    with pytest.raises(CheckpointError):
        run(tmp_path)


@pytest.mark.parametrize("changes", [{"delta": 1e-6}, {"epsilon": 100.0}, {"data": "other"}, {"telemetry": "private"}])
def test_a_resume_with_other_settings_is_refused(tmp_path: Path, opened: list[Ledger], changes: dict[str, Any]) -> None:
    kill(tmp_path, opened, on_step=killed_after(3))
    with pytest.raises(LedgerError, match=next(iter(changes))):
        run(tmp_path, header=make_header(**changes))
    assert release_lines(tmp_path) == 3


def test_a_resume_with_a_fixed_seed_is_refused(tmp_path: Path, opened: list[Ledger]) -> None:
    kill(tmp_path, opened, on_step=killed_after(3))
    with pytest.raises(LedgerError):
        run(tmp_path, entropy=FixedSeed(1))


@pytest.mark.parametrize("change", ["less noise", "more steps"])
def test_a_resume_cannot_pass_the_budget_by_another_plan(tmp_path: Path, opened: list[Ledger], change: str) -> None:
    mechanism = build("static", {"noise_multiplier": 1.0})
    header = make_header()
    epsilon = header.price(planned(mechanism, Schedule(make_plan().sample_rate, STEPS, 1e-5))).certified * 1.001
    kill(tmp_path, opened, on_step=killed_after(3), header=make_header(epsilon=epsilon))
    other = {"noise": 0.6} if change == "less noise" else {"plan": make_plan(steps=5 * STEPS)}
    with pytest.raises(DptuneError):
        run(tmp_path, header=make_header(epsilon=epsilon), **other)
    assert read_ledger(tmp_path / "ledger.jsonl").epsilons.certified <= epsilon


def test_a_torn_last_charge_is_made_again_and_counted_once(
    tmp_path: Path, opened: list[Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    kill(tmp_path, opened, on_step=killed_after(3))
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(path.read_bytes() + b'{"adaptive":false,"ki')
    assert run(tmp_path)[1].releases == STEPS
    assert read_ledger(path).releases == STEPS


def test_a_finished_run_cannot_be_trained_further(tmp_path: Path) -> None:
    run(tmp_path)
    with Ledger.resume(tmp_path / "ledger.jsonl", read_ledger(tmp_path / "ledger.jsonl").composition) as ledger:
        ledger.finish()
    with pytest.raises(LedgerError, match="finished"):
        run(tmp_path)


def test_the_checkpoint_is_its_owners(tmp_path: Path) -> None:
    run(tmp_path)
    assert (tmp_path / "checkpoint.safetensors").stat().st_mode & 0o777 == 0o600
