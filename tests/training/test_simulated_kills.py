"""A run that is killed at every operation of a simulated disk: no release uncounted, no paid step lost needlessly."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from simulated_disk import Disk, Killed
from tiny_models import adapted, each_record, make_header, make_plan, records

from dptune.mechanisms.mechanism import Mechanism
from dptune.mechanisms.registry import build
from dptune.privacy.budget_gate import BudgetError
from dptune.privacy.entropy import OsEntropy
from dptune.privacy.ledger import Ledger
from dptune.privacy.ledger_file import read_ledger
from dptune.training import loop, run_start
from dptune.training import run as running
from dptune.training.gradients.parameter_groups import lora_pairs
from dptune.training.spec import OWNER, RunSpec

pytestmark = pytest.mark.long

STEPS, EVERY = 12, 3
KILLS = 1000


@dataclass
class Killer:
    """A run's processes, one after another, on a disk that stops them.

    Attributes:
        deaf_to: name of a file whose fsync does nothing.
        kills: of all runs.
    """

    folder: Path
    patch: pytest.MonkeyPatch
    opened: list[Ledger]
    moments: random.Random = field(default_factory=lambda: random.Random(20))
    deaf_to: str = ""
    kills: int = 0

    def __post_init__(self) -> None:
        self.disk_patch = pytest.MonkeyPatch()
        self.model, self.tokens = adapted(layers=1), records()
        self.start = {name: weight.clone() for name, weight in self.model.state_dict().items()}
        privatise, save, load = Mechanism.privatise, running.save_checkpoint, run_start.load_checkpoint

        def counted(mechanism: Mechanism, *args: Any) -> Any:
            self.made += 1
            return privatise(mechanism, *args)

        def saving(path: Path, model: Any, optimizer: Any, progress: Any) -> None:
            assert progress.step >= self.saved[0], "a process began before what was saved"
            save(path, model, optimizer, progress)
            self.saved = (progress.step, progress.releases)

        def loading(*args: Any) -> Any:
            progress = load(*args)
            assert (progress.step, progress.releases) >= self.saved, "what was saved is gone"
            return progress

        self.patch.setattr(Mechanism, "privatise", counted)
        self.patch.setattr(running, "save_checkpoint", saving)
        self.patch.setattr(run_start, "load_checkpoint", loading)
        # The disk alone is tried here; gradients take ten times as long as all of it.
        self.patch.setattr(run_start, "rehearse", lambda *_, **__: None)
        self.patch.setattr(run_start, "check_width", lambda *_: None)
        self.patch.setattr(loop, "gradients_of", lambda *_: iter(()))

    def begin(self) -> Disk:
        """A new run on an empty disk: no noisy value made, no checkpoint written (its step and releases), no death."""
        self.folder = self.folder.parent / f"run {self.kills}-{self.moments.random()}"
        self.folder.mkdir()
        self.made, self.saved, self.deaths = 0, (0, 0), 0
        self.disk_patch.undo()
        self.disk_patch = pytest.MonkeyPatch()
        return Disk(self.folder, self.disk_patch, self.moments, self.deaf_to)

    def process(self) -> int:
        """One process of the run, to its end; returns the steps in its weights."""
        self.model.load_state_dict(self.start)
        vars(self.model).pop(OWNER, None)  # a process of its own has a model that no run has trained yet
        mechanism = build("static", {"noise_multiplier": 1.0, "pairs": len(lora_pairs(self.model))})
        plan, header = make_plan(steps=STEPS, checkpoint_every=EVERY), make_header()
        units = each_record(self.tokens)
        steps = [self.saved[0]]
        spec = RunSpec(self.model, self.tokens, units, mechanism, plan, header)
        loop.train(spec, self.folder, OsEntropy(), lambda report: steps.append(report.step))
        return steps[-1]

    def killed(self, disk: Disk, operation: int, *, power_cut: bool) -> bool:
        """Whether a process was killed at its ``operation``-th one, and not finished before it."""
        disk.kill_at(operation)
        try:
            self.process()
        except BudgetError:  # killed so often that no step was ever saved
            return False
        except Killed:
            self.kills += 1
        else:
            return False
        finally:
            for ledger in self.opened:
                ledger.close()
            self.opened.clear()
        disk.restart(power_cut=power_cut)
        assert self.charged >= self.made, "a release is on no ledger"
        assert self.charged - self.saved[1] <= EVERY, "more paid steps are lost than since a checkpoint"
        self.deaths += 1
        return True

    @property
    def charged(self) -> int:
        """Whole lines: one without its newline was never acknowledged."""
        path = self.folder / "ledger.jsonl"
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        return sum(b'"kind":"release"' in line and line.endswith(b"\n") for line in lines)

    def finish(self, disk: Disk) -> None:
        """The last process."""
        disk.restart(power_cut=False)
        charged, saved = self.charged, self.saved[0]
        try:
            steps = self.process()
        except BudgetError:
            steps = 0
            assert charged == STEPS
            assert self.saved[0] == 0
        assert STEPS >= steps >= STEPS - charged + saved
        assert STEPS - steps <= EVERY * self.deaths
        self.disk_patch.undo()
        contents = read_ledger(self.folder / "ledger.jsonl")
        assert contents.releases == contents.composition.total() == STEPS >= self.made


@pytest.fixture
def killer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: list[Ledger]) -> Iterator[Killer]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made = Killer(tmp_path / "run", monkeypatch, opened)
    yield made
    made.disk_patch.undo()
    torch.set_num_threads(threads)


def operations_of_a_run(killer: Killer) -> int:
    disk = killer.begin()
    assert killer.process() == STEPS
    killer.disk_patch.undo()
    return disk.operations


@pytest.mark.parametrize("power_cut", [False, True])
def test_killed_once_at_every_operation(killer: Killer, power_cut: bool) -> None:
    for operation in range(1, operations_of_a_run(killer) + 1):
        disk = killer.begin()
        assert killer.killed(disk, operation, power_cut=power_cut)
        killer.finish(disk)
    assert killer.kills > 4 * STEPS


def test_a_thousand_kills_at_random(killer: Killer) -> None:
    """Runs that are killed again and again, by signals and by power cuts, until they end."""
    while killer.kills < KILLS:
        disk = killer.begin()
        while killer.killed(disk, killer.moments.randint(1, 40), power_cut=killer.moments.random() < 0.5):
            pass
        killer.finish(disk)


def test_a_ledger_that_is_not_synced_is_found_out(killer: Killer) -> None:
    """The tests above see an under-count where there is one."""
    killer.deaf_to = "ledger.jsonl"
    disks = (killer.begin() for _ in range(60))
    with pytest.raises(AssertionError, match="on no ledger"):
        all(killer.killed(disk, operation, power_cut=True) for operation, disk in enumerate(disks, 1))
