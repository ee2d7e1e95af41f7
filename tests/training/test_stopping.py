"""Ctrl-C and SIGTERM: a run ends after its step, with a checkpoint of every release that was charged."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, adapted, close, each_record, make_header, make_plan, records

from dptune.core.errors import DivergedError
from dptune.core.interrupts import ends_like_ctrl_c, stop_request
from dptune.core.settings import Lora
from dptune.mechanisms.registry import build
from dptune.privacy.entropy import OsEntropy
from dptune.privacy.ledger import Ledger
from dptune.privacy.ledger_file import read_ledger
from dptune.privacy.run_folder import RunFolder
from dptune.training.gradients.parameter_groups import lora_pairs
from dptune.training.gradients.shared_pass import shared_copy, train_together
from dptune.training.loop import train
from dptune.training.models.model import attach_lora
from dptune.training.run import StepReport
from dptune.training.run_start import open_run
from dptune.training.spec import RunSpec

STEPS = 7
SIGNALS = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])


def spec(entropy: OsEntropy, model: Any = None, tokens: Any = None) -> RunSpec:
    """A run that writes no checkpoint of its own before its end."""
    model, tokens = model or adapted(), tokens or records()
    mechanism = build("static", {"noise_multiplier": 1.0, "pairs": len(lora_pairs(model))})
    plan = make_plan(steps=STEPS, checkpoint_every=100)
    return RunSpec(model, tokens, each_record(tokens), mechanism, plan, make_header(entropy))


def signal_at(step: int, number: int) -> Any:
    """Send the signal in the midst of a step, as a terminal or Prefect would."""

    def on_step(report: StepReport) -> None:
        if report.step == step:
            os.kill(os.getpid(), number)

    return on_step


@SIGNALS
def test_a_run_that_is_stopped_goes_on_with_every_release_that_it_paid_for(
    tmp_path: Path, opened: list[Ledger], number: int
) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        train(spec(OsEntropy()), tmp_path, OsEntropy(), signal_at(3, number))
    assert signal.getsignal(number) is before
    assert read_ledger(RunFolder(tmp_path).ledger).releases == 3, "it ended after that step"
    steps: list[tuple[int, int]] = []
    close(train(spec(OsEntropy()), tmp_path, OsEntropy(), lambda report: steps.append((report.step, report.releases))))
    assert steps == [(n, n) for n in range(4, STEPS + 1)], "a lost step would make the first number the smaller one"


def test_runs_side_by_side_are_all_saved(tmp_path: Path, opened: list[Ledger]) -> None:
    base, tokens = FAMILIES["gpt2"](), records()
    folders = [tmp_path / "one", tmp_path / "two"]

    def start(on_step: Any) -> list[Any]:
        models = [attach_lora(shared_copy(base), Lora(rank=2, alpha=4, dropout=0.0), init_seed=n) for n in (0, 1)]
        specs = [spec(OsEntropy(), model, tokens) for model in models]
        return [open_run(one, folder, OsEntropy(), on_step) for one, folder in zip(specs, folders, strict=True)]

    with pytest.raises(KeyboardInterrupt):
        train_together(base, start(signal_at(2, signal.SIGTERM)))
    assert [read_ledger(RunFolder(folder).ledger).releases for folder in folders] == [2, 2]
    again = start(lambda report: None)
    assert [run.step for run in again] == [2, 2]


@pytest.mark.parametrize("count", [1, 2])
def test_a_run_that_diverged_when_it_was_stopped_says_both(count: int, tmp_path: Path, opened: list[Ledger]) -> None:
    """A search that heard of the failure alone would go on with its next candidate, unless others shared the pass."""
    base, tokens, told = FAMILIES["gpt2"](), records(), []

    def one(number: int) -> RunSpec:
        model = attach_lora(shared_copy(base), Lora(rank=2, alpha=4, dropout=0.0), init_seed=number)
        return replace(spec(OsEntropy(), model, tokens), on_failure=told.append)

    def diverge(report: StepReport) -> None:
        if report.step == 2:
            with torch.no_grad():
                for pair in lora_pairs(specs[0].model):
                    pair.up.weight.fill_(torch.nan)
            os.kill(os.getpid(), signal.SIGTERM)

    specs = [one(number) for number in range(count)]
    runs = [open_run(own, tmp_path / str(n), OsEntropy(), diverge) for n, own in enumerate(specs) if count > 1]
    with pytest.raises(KeyboardInterrupt):
        train_together(base, runs) if runs else train(specs[0], tmp_path, OsEntropy(), diverge)
    assert [type(error) for error in told] == [DivergedError]


def test_a_second_ctrl_c_does_not_wait() -> None:
    with pytest.raises(KeyboardInterrupt), stop_request() as asked:  # noqa: PT012
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert asked()
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("it waited")


def test_elsewhere_than_in_the_main_thread_signals_are_left_alone() -> None:
    found: list[Any] = []

    def work() -> None:
        with stop_request() as asked:
            found.extend([asked(), signal.getsignal(signal.SIGTERM)])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [False, signal.SIG_DFL]


def test_a_process_in_the_background_goes_on_to_ignore_ctrl_c() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stop_request() as asked:
            os.kill(os.getpid(), signal.SIGINT)
            assert not asked()
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_command_that_is_told_to_end_says_so_and_the_signal_is_as_before() -> None:
    command = ends_like_ctrl_c()(lambda: (os.kill(os.getpid(), signal.SIGTERM), signal.pause()))
    with pytest.raises(KeyboardInterrupt):
        command()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_who_handles_sigterm_keeps_it() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        for handler in (signal.getsignal(signal.SIGTERM), signal.SIG_IGN):
            signal.signal(signal.SIGTERM, handler)
            with ends_like_ctrl_c():
                os.kill(os.getpid(), signal.SIGTERM)
            assert signal.getsignal(signal.SIGTERM) is handler
    except KeyboardInterrupt:
        pytest.fail("it became an interrupt")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]


def test_within_a_command_a_run_still_ends_after_its_step(tmp_path: Path, opened: list[Ledger]) -> None:
    with pytest.raises(KeyboardInterrupt), ends_like_ctrl_c():
        train(spec(OsEntropy()), tmp_path, OsEntropy(), signal_at(3, signal.SIGTERM))
    assert read_ledger(RunFolder(tmp_path).ledger).releases == 3
